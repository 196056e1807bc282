"""One optimiser step: gradients over micro-batches, clipping, the NaN guard, and a report."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvlab._errors import ConfigError
from jvlab.trainer._batching import PackedPart, TrainBatch, pad_rows
from jvlab.trainer._checks import check_choice
from jvlab.trainer._losses import Algorithm, policy_loss, row_weights, token_metrics
from jvlab.trainer._micro_batches import Packer, unpad
from jvlab.trainer.decoder._experts import Routes

# How evenly a mixture's experts are used: from the tokens that chose each, the numbers a record keeps of a step.


def expert_balance(loads: Iterable[Any]) -> Mapping[str, tuple[float, ...]]:
    """By name, one number for each layer, of the loads [layers, experts] of a step's micro-batches; {} without experts.

    max, min   the share of the busiest and of the idlest expert in all choices of a layer; even use gives 1 / experts
    entropy    of the shares, over that of even use: 1 if all experts are used alike, 0 if one is used alone
    """
    found = [np.asarray(load, np.float64) for load in loads if load is not None]
    if not found:
        return {}
    total = np.sum(found, axis=0)
    shares = total / np.maximum(total.sum(axis=1, keepdims=True), 1)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropy = -(shares * logs).sum(axis=1) / max(np.log(shares.shape[1]), 1e-12)
    numbers = {"max": shares.max(axis=1), "min": shares.min(axis=1), "entropy": entropy}
    return {name: tuple(map(float, values)) for name, values in numbers.items()}


# ----------------------------------------------------------------------------------------------------

Params = Any  # any pytree of float jax arrays
Schedule = Callable[[Any], Any]

SCHEDULES = ("constant", "linear", "cosine")


class TrainState(NamedTuple):
    """What training changes, as a pytree. `updates` does not include the `skipped` ones."""

    params: Params
    opt_state: Any
    updates: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class StepReport:
    """What one step did. `skipped` says why the update was not applied, "" if it was."""

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: str
    samples: int
    tokens: int
    micro_batches: int
    padding: float  # share of the computed positions that held no token
    compiled: int  # programs compiled in this step; 0 after warm-up
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_staleness: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    # [N, T] of the batch, before the update
    logprobs: np.ndarray | None = field(default=None, repr=False)
    # by layer; see _step.py
    experts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # their mean length over positions, what determines it
    rows: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        note = f", skipped: {self.skipped}" if self.skipped else ""
        return f"StepReport(loss {self.loss:.4g}, grad norm {self.grad_norm:.3g}, {self.tokens} tokens{note})"


@dataclass
class Pending:
    """A step that the device has been given: `state` may be used at once, its numbers are known later.

    `state.params` are the new parameters, or the same if the NaN guard kept them; its counts are still those before
    the step. `finish()` fetches what the step computed. Before the next `launch`, which reuses the state's memory,
    call `wait()` or `finish()`.
    """

    state: TrainState
    _report: Callable[[], StepReport] = field(repr=False)

    def wait(self) -> None:
        """Returns once the device has computed the new parameters; raises what went wrong there."""
        jax.block_until_ready(self.state.params)

    def finish(self) -> tuple[TrainState, StepReport]:
        """The state with its counts, and the report."""
        report = self._report()
        params, opt_state, updates, skipped = self.state
        if report.skipped:
            return TrainState(params, opt_state, updates, skipped + 1), report
        return TrainState(params, opt_state, updates + 1, skipped), report


def schedule(
    peak: float, kind: str = "constant", warmup: int = 0, steps: int | None = None
) -> Schedule:
    """A learning rate by update: linear warm-up over `warmup` updates, then constant, or down to 0 at `steps`."""
    check_choice("schedule", kind, SCHEDULES)
    if kind != "constant" and (steps is None or steps <= warmup):
        raise ConfigError(
            f"a {kind} schedule over steps={steps}",
            remedy=f"give steps above warmup={warmup}",
        )
    left = (steps or 0) - warmup
    match kind:
        case "constant":
            after = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, 0.0, left)
        case _:
            after = optax.cosine_decay_schedule(peak, left)
    if not warmup:
        return after
    # Starts at peak/warmup: an update with learning rate 0 would waste a batch.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


class TrainStep:
    """Trains any `(params, logprobs_fn)` pair with an `Algorithm`.

    `logprobs_fn(params, tokens[B, T], mask[B, T]) -> [B, T]` float32: log P of each token given those before it (the
    first column is not read), under the temperature that the engine samples with; `mask` marks real tokens, padding is
    on the right. If it takes `with_entropy=True` it then returns (log P, entropy); if it takes
    `with_loads=True`, also, and last, how many tokens chose each expert of each layer, or None. Rows must not depend on
    each other.
    With a `token_budget`, the tokens of a micro-batch, samples are packed into rows (see _micro_batches.py). It must
    then take `segments=` [B, T], which numbers a row's samples from 1 and is 0 on padding, and which it gets instead of
    a mask; if it takes that too, with `most=`, the samples that a row may hold. `short_rows` makes several shorter rows
    of a micro-batch, where attention takes time in proportion to a row's length. If it takes `frozen=` and is a method
    of an object that has `.frozen`, a tree of arrays, it gets those: as arguments of the compiled programs, not
    constants. A batch with `expert_ids` needs one that takes `routes=`, (ids, weights or None) [B, T, layers, chosen]:
    an update then computes with the engine's experts. `score` never does: a reference chooses its own.

    The optimiser is AdamW unless an optax one is given; the gradient's global norm is clipped either way, unless
    `max_grad_norm` is None. A step whose loss or gradient is not finite changes neither params nor optimiser state.
    Parameters keep their shardings. With `donate`, a step reuses the state's memory, and its input state cannot be
    used again. `deterministic` asks XLA for kernels that sum in a fixed
    order: on a GPU the gradient of an embedding otherwise uses atomic additions.
    """

    def __init__(
        self,
        logprobs_fn: Callable[..., Any],
        algorithm: Algorithm | None = None,
        *,
        learning_rate: float | Schedule = 1e-4,
        max_grad_norm: float | None = 1.0,
        optimizer: optax.GradientTransformation | None = None,
        donate: bool = True,
        deterministic: bool = False,
        token_budget: int | None = None,
        short_rows: bool = False,
    ) -> None:
        self.algorithm = algorithm or Algorithm()
        # raises now if constant_length is missing
        row_weights(self.algorithm, np.ones((1, 1), bool), 1)
        self.learning_rate = learning_rate
        inner = optimizer or optax.adamw(learning_rate, weight_decay=0.0)
        clip = (
            [] if max_grad_norm is None else [optax.clip_by_global_norm(max_grad_norm)]
        )
        self.optimizer = optax.chain(*clip, inner)
        self._own_optimizer = optimizer is None
        self._logprobs_fn = logprobs_fn
        self._donate = donate
        takes = inspect.signature(logprobs_fn).parameters
        self._with_entropy = "with_entropy" in takes
        self._counts_samples = "most" in takes
        self._with_loads = "with_loads" in takes
        self._takes_routes = "routes" in takes
        self._frozen_of = _owner(logprobs_fn) if "frozen" in takes else None
        self._takes_segments = "segments" in takes
        if token_budget is not None and not self._takes_segments:
            raise ConfigError(
                "token_budget packs samples into rows, but this logprobs_fn takes no segments",
                remedy="let it take segments=[B, T], or give micro_batch, the samples of a micro-batch, instead",
            )
        self._packer = (
            None if token_budget is None else Packer(token_budget, short_rows)
        )
        if self.algorithm.entropy_coef and not self._with_entropy:
            raise ConfigError(
                "an entropy bonus needs a logprobs_fn that can return the entropy",
                remedy="let it take with_entropy=True and return (log P, entropy), or set entropy_coef=0",
            )
        on_gpu = deterministic and jax.default_backend() == "gpu"
        self._compiler = {"xla_gpu_deterministic_ops": True} if on_gpu else None
        self._programs: dict[str, Any] = {}
        # of the parameters that the programs were compiled for
        self._shardings: Any = None

    def init(self, params: Params) -> TrainState:
        """The state before the first update. With `donate`, the first step reuses the memory of `params`."""
        # Committed to their devices, as a jitted program's results are: else the second step would compile again.
        params = jax.tree.map(
            lambda p: jax.device_put(p, jnp.asarray(p).sharding), params
        )
        wrong = [
            f"{jax.tree_util.keystr(path)} ({leaf.dtype})"
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if not jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        if wrong:
            raise ConfigError(
                f"{len(wrong)} leaves have no gradient: {', '.join(wrong[:5])}",
                remedy="pass only floating-point leaves as params; bind the others inside logprobs_fn",
                leaves=wrong,
            )
        # Moments in float32 also for parameters of 16 bits: sums of small squares would be lost there.
        opt_state = self.optimizer.init(
            jax.tree.map(lambda p: p.astype(jnp.float32), params)
        )
        # Moments are sharded like their parameters; optax creates them unsharded.
        put = lambda moment, param: jax.device_put(moment, param.sharding)
        replicated = _replicated(params)
        other = lambda leaf: jax.device_put(leaf, replicated)
        return TrainState(
            params,
            optax.tree_map_params(
                self.optimizer, put, opt_state, params, transform_non_params=other
            ),
        )

    def score(self, params: Params, batch: TrainBatch) -> np.ndarray:
        """log P of the batch's tokens under `params`, [N, T] float32: the old policy's, or a reference's."""
        self._compile(params)
        out = np.zeros(batch.tokens.shape, np.float32)
        score = self._programs["score"]
        pending = [
            (part, score(params, part.token_arrays(batch), self._frozen))
            for part in self._parts(batch)
        ]
        for part, found in pending:
            unpad(part, np.asarray(found), out)
        return np.where(batch.token_mask, out, 0.0)

    def __call__(
        self, state: TrainState, batch: TrainBatch, version: int | None = None
    ) -> tuple[TrainState, StepReport]:
        """One update on the whole batch. `version` is the trainer's before it, from which staleness is computed."""
        return self.launch(state, batch, version).finish()

    def launch(
        self, state: TrainState, batch: TrainBatch, version: int | None = None
    ) -> Pending:
        """Give the device one update on the whole batch, and return without waiting for it.

        Its micro-batches are packed and handed over one by one while the device computes those before: their gradients
        are summed, so a batch may have any number of them (gradient accumulation).
        """
        before = self.compilations
        self._check(batch)
        self._compile(state.params, state.opt_state)
        weights = row_weights(self.algorithm, batch.loss_mask, len(batch))
        grads, loss = self._programs["zeros"](state.params)
        seen = []
        computed = 0
        spanned = 0
        names = ["loss_mask", "engine_logprobs", "advantages"]
        for optional in ("old_logprobs", "reference_logprobs"):
            if getattr(batch, optional) is not None:
                names.append(optional)
        for part in self._parts(batch):
            of_loss = {name: getattr(batch, name) for name in names}
            inputs = part.token_arrays(batch, batch.replayed)
            for name, values in {**of_loss, "weights": weights}.items():
                inputs[name] = pad_rows(values, part.samples, part.width, part.most)
            grads, loss, found = self._programs["accumulate"](
                state.params, grads, loss, inputs, self._frozen
            )
            jax.tree.map(lambda array: array.copy_to_host_async(), found)
            seen.append((part, found))
            computed += part.tokens
            spanned += part.tokens * part.width
        params, opt_state, norm = self._programs["apply"](
            state.params, state.opt_state, grads, loss
        )
        compiled = self.compilations - before

        def report() -> StepReport:
            metrics, parts, current = self._metrics(batch, seen, version)
            value = float(loss)
            length = float(norm)
            finite = math.isfinite(value + length)
            return StepReport(
                loss=value,
                grad_norm=length,
                learning_rate=self._rate(state.updates),
                skipped="" if finite else f"loss {value}, gradient norm {length}",
                samples=len(batch),
                tokens=int(batch.loss_mask.sum()),
                micro_batches=len(seen),
                padding=1 - int(batch.token_mask.sum()) / computed,
                compiled=compiled,
                metrics=metrics,
                by_staleness=parts,
                logprobs=current,
                experts=expert_balance(loads for _, (_, _, loads) in seen),
                rows={
                    "row_length": spanned / computed,
                    **(self._packer.rule if self._packer else {}),
                },
            )

        made = TrainState(params, opt_state, state.updates, state.skipped)
        return Pending(made, report)

    def _rate(self, updates: int) -> float:
        """The learning rate of the update after so many; NaN if the user's optimiser has its own."""
        if not self._own_optimizer:
            return math.nan
        rate = self.learning_rate
        return float(rate(updates)) if callable(rate) else rate

    def _check(self, batch: TrainBatch) -> None:
        if not len(batch):
            raise ConfigError(
                f"nothing to train on: {batch.excluded} samples excluded, {batch.dropped} dropped",
                remedy="generate more; with dynamic sampling, until len(batch) is enough for a step",
            )
        if batch.replayed and not self._takes_routes:
            raise ConfigError(
                "the batch holds an engine's experts, but this logprobs_fn takes no routes",
                remedy='let it take routes=(ids, weights), or make the batch with replay="none"',
            )
        if self.algorithm.needs_reference and batch.reference_logprobs is None:
            raise ConfigError(
                f"kl_coef={self.algorithm.kl_coef} needs the reference's log-probabilities",
                remedy="batch.with_logprobs(reference=step.score(reference_params, batch)), or kl_coef=0",
            )

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: one per micro-batch shape, and the update."""
        return sum(program._cache_size() for program in self._programs.values())

    def _compile(self, params: Params, opt_state: Any = None) -> None:
        """Create the jitted programs; again only if the parameters' shardings changed.

        Outputs keep the shardings of the inputs, so that the next step does not compile again.
        """
        shardings_of = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
        shardings = shardings_of(params)
        replicated = _replicated(params)
        # of what is fetched: where other processes hold shards of it, each needs all of it
        fetched = None if replicated.is_fully_addressable else replicated
        if not self._programs or shardings != self._shardings:
            self._shardings = shardings
            self._programs = {}
            donated = (1, 2) if self._donate else ()
            self._programs["score"] = self._jit(
                lambda params, x, frozen: self._logprobs(params, x, frozen)[0],
                out_shardings=fetched,
            )
            self._programs["zeros"] = self._jit(
                _zeros, out_shardings=(shardings, replicated)
            )
            outs = (shardings, replicated, fetched)
            self._programs["accumulate"] = self._jit(
                self._accumulate, donate_argnums=donated, out_shardings=outs
            )
        if opt_state is not None and "apply" not in self._programs:
            outs = (shardings, shardings_of(opt_state), replicated)
            donated = (0, 1) if self._donate else ()
            self._programs["apply"] = self._jit(
                self._apply, donate_argnums=donated, out_shardings=outs
            )

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(function, compiler_options=self._compiler, **options)

    @property
    def _frozen(self) -> Any:
        return None if self._frozen_of is None else self._frozen_of.frozen

    def _logprobs(
        self, params: Params, x: Mapping[str, jax.Array], frozen: Any
    ) -> tuple[jax.Array, Any, Any]:
        """log P and entropy, [samples, time], also of packed rows; and the loads of experts. None: not known."""
        more: dict[str, Any] = {}
        if self._with_entropy:
            more["with_entropy"] = True
        if self._with_loads:
            more["with_loads"] = True
        several = bool(more)
        if frozen is not None:
            more["frozen"] = frozen
        if "expert_ids" in x:
            more["routes"] = Routes(x["expert_ids"], x.get("expert_weights"))
        segments = x["segments"]
        if self._takes_segments:
            more["segments"] = segments
            if self._counts_samples:
                more["most"] = x["place"].shape[0] // segments.shape[0]
            found = self._logprobs_fn(params, x["tokens"], **more)
        else:
            found = self._logprobs_fn(params, x["tokens"], segments > 0, **more)
        logprobs, *rest = found if several else (found,)
        entropy = rest[0] if self._with_entropy else None
        loads = rest[-1] if self._with_loads else None
        # of samples, from rows
        wide = lambda rows: jnp.pad(rows.astype(jnp.float32).reshape(-1), (0, 1))[
            x["place"]
        ]
        return wide(logprobs), jax.tree.map(wide, entropy), loads

    def _accumulate(
        self,
        params: Params,
        grads: Params,
        loss: jax.Array,
        x: Mapping[str, jax.Array],
        frozen: Any,
    ) -> Any:
        """Add one micro-batch's gradient and loss, in float32; also the log-probabilities, for the metrics."""

        def objective(params: Params) -> tuple[jax.Array, Any]:
            current, entropy, loads = self._logprobs(params, x, frozen)
            value = policy_loss(
                self.algorithm,
                current,
                old=x.get("old_logprobs", current),
                engine=x["engine_logprobs"],
                advantages=x["advantages"],
                mask=x["loss_mask"],
                weights=x["weights"],
                reference=x.get("reference_logprobs"),
                entropy=entropy,
            )
            return value, (current, entropy, loads)

        (value, found), more = jax.value_and_grad(objective, has_aux=True)(params)
        grads = jax.tree.map(
            lambda total, g: total + g.astype(jnp.float32), grads, more
        )
        return grads, loss + value, found

    def _apply(
        self, params: Params, opt_state: Any, grads: Params, loss: jax.Array
    ) -> Any:
        """The update, or the same values if loss or gradient is not finite."""
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        updates, new_opt_state = self.optimizer.update(grads, opt_state, params)
        choose = lambda new, old: jnp.where(finite, new, old)
        return (
            jax.tree.map(choose, optax.apply_updates(params, updates), params),
            jax.tree.map(choose, new_opt_state, opt_state),
            norm,
        )

    def _parts(self, batch: TrainBatch) -> Iterator[PackedPart]:
        """The batch's micro-batches."""
        return (self._packer or batch.buckets).parts(batch.lengths)

    def _metrics(
        self, batch: TrainBatch, seen: list[Any], version: int | None
    ) -> tuple[dict, dict, np.ndarray]:
        """Token metrics of the whole batch and its log-probabilities, from the forward passes of the micro-batches."""
        current = np.zeros(batch.tokens.shape, np.float32)
        entropy = np.zeros_like(current) if self._with_entropy else None
        for part, (logprobs, entropies, _) in seen:
            unpad(part, np.asarray(logprobs), current)
            if entropy is not None:
                unpad(part, np.asarray(entropies), entropy)
        metrics, by_staleness = token_metrics(
            self.algorithm,
            current=current,
            old=current if batch.old_logprobs is None else batch.old_logprobs,
            engine=batch.engine_logprobs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            reference=batch.reference_logprobs,
            entropy=entropy,
            staleness=None if version is None else version - batch.versions,
        )
        return metrics, by_staleness, current


def _owner(function: Any) -> Any:
    """The object with `.frozen` whose method this is, or a `functools.partial` of; None if there is none."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    return owner if hasattr(owner, "frozen") else None


def _zeros(params: Params) -> tuple[Params, jax.Array]:
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    return jax.tree.map(lambda p: zeros(p.shape), params), zeros(())


def _replicated(params: Params) -> jax.sharding.Sharding:
    """The sharding of a scalar used with these parameters: on every device of their mesh, or on their one device."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
    mesh = next(
        (s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)), None
    )
    if mesh is None:
        return shardings[0]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

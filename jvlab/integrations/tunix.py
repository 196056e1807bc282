"""Tunix' learners with vLLM as their sampler, on NVIDIA GPUs and CPUs. One argument of its `ClusterConfig` changes:

    ClusterConfig(..., rollout_engine=functools.partial(jv.integrations.tunix.Rollout, pool=pool))

Checked against google-tunix 0.1.7. It asks for safetensors < 0.8, which cannot be met beside vLLM (transformers there
wants 0.8): it works with 0.8 all the same, and is installed without asking (`INSTALL`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    LayoutError,
    MatchError,
    MeaningError,
    MissingDependency,
    SamplingError,
    Unsupported,
)
from jvlab._files import Plain
from jvlab.integrations._journal import Journal
from jvlab.layout._tree import flatten
from jvlab.record._events import RolloutTally, clock
from jvlab.record._record import Record
from jvlab.sync._connections import Connections, check_pool
from jvlab.sync._link import Link
from jvlab.sync._transaction import SyncReport

INSTALL = (
    'pip install "jvlab[tunix]"\n'
    "    pip install --no-deps google-tunix==0.1.7\n"
    "    (in this order; --no-deps: its safetensors<0.8 cannot be met beside vLLM, and 0.8 works)"
)

try:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.rl import common
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
    from tunix.sft.utils import is_lora_enabled

    from jvlab.integrations._tunix_lora import A, Adapters
except ImportError as error:
    raise MissingDependency(
        f"Tunix is not installed, or not all that it imports: {error}", remedy=INSTALL
    ) from error

__all__ = ["INSTALL", "Rollout"]

SECONDS = 3600.0  # for one call of the pool


class Rollout(BaseRollout):
    """A pool behind Tunix' interface: vLLM generates and scores, every new version of the actor is synced and proven.

    Tunix makes it, by `functools.partial(Rollout, pool=pool)`; then it is `cluster.rollout`:

        cluster.rollout.link        the `jv.Link`: mapping, plan, `meaning`
        cluster.rollout.reports     a `jv.SyncReport` for each sync
        cluster.rollout.record      versions, staleness, times as a `jv.Record`; `.panel()` shows them
        cluster.rollout.metrics     for `metric_fns=[...]` of a learner: rewards reach the record, versions Tunix' logs

    pool              a `jv.Pool`, of the actor's model: `lab.launch(folder)`
    rules             as for `lab.connect`; "auto" knows the trees of Tunix and MaxText
    meaning           "function": after the first sync engine and actor must compute the same log-probabilities of the
                      same tokens; else as for `lab.connect`
    record            folder for the record with all samples; default: in memory, without samples
    samples_per_step  of a learner with off_policy_steps: prompts × generations of a step, so that the record tells how
                      stale they were. Default: a step trains on what was generated since the last
    overlap           True: Tunix trains while it generates, as it does where actor and rollout have different meshes
    lora_alpha        of a LoRA actor; default: as its qwix provider has it
    timeout           seconds for one call of the pool
    maxtext_config    accepted for MaxText, which passes it, and not used
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        pool: Any,
        rules: Any = "auto",
        meaning: str = "function",
        record: str | os.PathLike[str] | None = None,
        samples_per_step: int | None = None,
        overlap: bool = False,
        lora_alpha: float | None = None,
        timeout: float = SECONDS,
        maxtext_config: Any = None,
    ) -> None:
        check_pool(pool, "functools.partial(jv.integrations.tunix.Rollout, pool=pool)")
        _refuse_offloaded(rollout_actor)
        self.pool = pool
        self.reports: list[SyncReport] = []
        self._tokenizer = tokenizer
        self._temperature = rollout_config.temperature
        self._timeout = timeout
        self._syncing = threading.Lock()
        self._seeding = threading.Lock()
        self._adapters: Adapters | None = None
        # (prompt, completion) -> its log-probabilities, if no score can tell them
        self._sampled: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}
        self._seeded = 0  # samples generated with a seed so far
        _check_room(pool, rollout_config, Deadline(timeout))
        # Tunix takes a rollout's mesh for its own; where it is not the actor's, it trains while it generates
        self.mesh = _mesh_of_its_own(mesh) if overlap else None
        self._journal = Journal(
            f"tunix on {pool.name}",
            None if record is None else Path(record),
            samples_per_step,
            {"trainer": "tunix", "model": str(pool.model), "overlap": overlap},
        )
        self._connections = Connections()
        self._ending = weakref.finalize(self, _end, self._connections, self._journal)
        try:
            self._connect(rollout_actor, rules, meaning, lora_alpha)
        except BaseException:
            self.close("failed")
            raise

    def _connect(
        self, actor: Any, rules: Any, meaning: str, alpha: float | None
    ) -> None:
        """Connect and sync: Tunix itself syncs after the first step only."""
        if not is_lora_enabled(actor):
            self._begin(_full_actor(actor), rules, meaning)
            return
        _check_adapters(self.pool, actor, Deadline(self._timeout))
        self._begin(_base_of(actor), rules, meaning)
        self._adapters = Adapters(actor, self.link.mapping.bindings, alpha)
        self._begin(_adapted(actor, self._adapters), "checkpoint", meaning)

    def _begin(self, actor: Actor, rules: Any, meaning: str) -> None:
        self._actor = actor  # a link keeps no trainer alive
        self.link = self._link_of(actor, rules, meaning)
        self._sync(actor.params, step=False)

    def _link_of(self, actor: Actor, rules: Any, meaning: str) -> Link:
        options: Plain = {"meaning": meaning, "timeout": self._timeout}
        # an engine in this process has links of its own
        connect = getattr(self.pool, "connect", None) or functools.partial(
            self._connections.connect, pool=self.pool
        )
        try:
            return connect(actor, rules=rules, **options)
        except MatchError as error:
            if rules != "auto":
                raise
            # shapes may allow two readings; of a tree of Tunix' own models it is known which
            with contextlib.suppress(LayoutError):
                return connect(actor, rules="tunix", **options)
            raise error from None

    # What Tunix asks ----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: list[str] | str, rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """A completion of each prompt, with the log-probabilities it was sampled with; the token that ends it is kept.

        Tunix repeats a prompt for each sample of its group, in a row: those become one prompt with `n` samples. Its
        agentic learner calls this from many threads, with a prompt each: the engine batches them.
        """
        # of a learner with a chat parser, one bare text
        listed = [prompts] if isinstance(prompts, str) else prompts
        rows = [self._tokens(prompt) for prompt in listed]
        sampling = _sampling(rollout_config, self.eos_id()) | kwargs
        tally = RolloutTally()
        samples: list[Any] = []
        for folded, n, seed in self._calls(rows, sampling.pop("seed", None)):
            more = sampling if seed is None else {**sampling, "seed": seed}
            batch = self.pool.generate(
                [list(row) for row in folded],
                n=n,
                progress=False,
                timeout=self._timeout,
                **more,
            )
            samples += batch
        for sample in samples:
            tally.add(sample)
        ends = set(sampling["stop_token_ids"])
        tokens = [np.asarray(sample.token_ids, np.int32) for sample in samples]
        texts = [self._tokenizer.decode(_without(row, ends)) for row in tokens]
        self._journal.generated(tally, samples, list(map(str, listed)), texts, sampling)
        logprobs = [np.asarray(sample.logprobs, np.float32) for sample in samples]
        if self._temperature != 1.0:
            pad = self.pad_id()
            keys = (tuple(_without_right(row, pad)) for row in tokens)
            pairs = zip(rows, keys, strict=True)
            self._sampled |= dict(zip(pairs, logprobs, strict=True))
        return RolloutOutput(
            text=texts,
            logits=None,  # type: ignore[arg-type]  # Tunix' own vLLM sampler gives none either
            tokens=tokens,
            left_padded_prompt_tokens=_left_padded(
                rows, rollout_config.max_prompt_length, self.pad_id()
            ),
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any:
        """log P of every token of padded completions after padded prompts; 0 where there is padding.

        The pool scores them, at temperature 1. At another one they are those with which the same completions were
        sampled since the last sync.
        """
        start = clock()
        pad = self.pad_id()
        prompts = [_without_left(row, pad) for row in np.asarray(prompt_tokens)]
        padded = np.asarray(completion_tokens)
        rows = [_without_right(row, pad) for row in padded]
        found = (
            self._scored(prompts, rows)
            if self._temperature == 1.0
            else [self._sampled_as(*pair) for pair in zip(prompts, rows, strict=True)]
        )
        out = np.zeros(padded.shape, np.float32)
        for values, row, logprobs in zip(out, rows, found, strict=True):
            values[: len(row)] = logprobs[: len(row)]
        count = sum(map(len, rows))
        self._journal.scored(start, len(rows), count, self.link.version)
        return jnp.asarray(out)

    def _scored(self, prompts: list[list[int]], rows: list[list[int]]) -> list[Any]:
        scores = self.pool.score(
            [[*a, *b] for a, b in zip(prompts, rows, strict=True)],
            timeout=self._timeout,
        )
        return [scores[k][len(prompt) :] for k, prompt in enumerate(prompts)]

    def _sampled_as(self, prompt: list[int], row: list[int]) -> Any:
        found = self._sampled.get((tuple(prompt), tuple(row)))
        if found is None:
            raise Unsupported(
                "a completion was not sampled since the last sync, and a pool scores at temperature 1, "
                f"not at {self._temperature:g}",
                remedy="RolloutConfig(temperature=1.0), or GRPOConfig(num_iterations=1), which needs none",
            )
        return found

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """A verified sync of the actor's parameters, an `nnx.State`; of a LoRA actor, of its adapter."""
        self._sync(
            params if self._adapters is None else self._adapters.adapter(params),
            step=True,
        )

    def _sync(self, params: Any, step: bool) -> None:
        before = self.link.version
        start = clock()
        try:
            # on a CPU Tunix forbids copies between host and device around this
            with self._syncing, jax.transfer_guard("allow"):
                report = self.link.sync(params, timeout=self._timeout, progress=False)
        except MeaningError as error:
            raise MeaningError(
                error.message,
                remedy=f"{error.remedy}. If the rules are right, the actor computes something else than the pool's "
                "model: compare its config with the folder's config.json (Tunix 0.1.7's Qwen3 rotates by a rope_theta "
                "of 1,000,000 whatever its config says)",
                **error.fields,
            ) from error
        self.reports.append(report)
        self._sampled = {}
        self._journal.synced(report, start, before if step else None)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: Tunix does not sync a rollout whose model is the actor."""

    # What a user asks ---------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """Rollouts, syncs and steps so far."""
        return self._journal.record

    def metrics(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rewards: Any,
        advantages: Any,
        **columns: Any,
    ) -> Plain:
        """For `metric_fns=[cluster.rollout.metrics]` of a learner: rewards for the record, numbers for Tunix' logs."""
        samples = self._journal.rewarded(
            list(map(str, prompts)),
            list(completions),
            np.asarray(rewards).tolist(),
            np.asarray(advantages).tolist(),
        )
        versions = [s.versions[s.own] for s in samples if s.own.any()]
        if not versions:
            return {}
        behind = self.link.version - np.concatenate(versions)
        return {
            "jvlab/version": (self.link.version, np.max),
            "jvlab/staleness": (float(behind.mean()), np.mean),
            "jvlab/sync_seconds": (self.reports[-1].seconds["total"], np.mean),
        }

    def close(self, reason: str = "finished") -> None:
        """Close the link and end the record; the pool stays. Done anyway when nobody holds this any more."""
        self._journal.close(reason)
        self._ending()

    # Prompts ------------------------------------------------------------------------------------------------------

    def _tokens(self, prompt: Any) -> tuple[int, ...]:
        """As Tunix' own samplers tokenise it."""
        if not isinstance(prompt, str):  # numpy's are, too
            raise SamplingError(
                f"a prompt is {type(prompt).__name__}, not a text",
                remedy="texts in the column `prompts`; chats through the learner's chat template",
            )
        begin = self._tokenizer.bos_id()
        ids = [*([begin] if begin else []), *self._tokenizer.encode(str(prompt))]
        return tuple(int(i) for i in self._tokenizer.dedup_bos_ids(ids))

    def _calls(
        self, rows: Sequence[tuple[int, ...]], seed: Any
    ) -> Iterator[tuple[list[tuple[int, ...]], int, int | None]]:
        """Prompts, samples of each, and their seed, for calls whose samples come in the order of `rows`.

        Equal neighbours are one prompt. With a seed the same prompt twice in a call would be answered twice alike, so
        that it is one call then for each of them; samples never repeat a seed.
        """
        runs: list[tuple[tuple[int, ...], int]] = []
        for row in rows:
            if runs and runs[-1][0] == row:
                runs[-1] = (row, runs[-1][1] + 1)
            else:
                runs.append((row, 1))
        n = math.gcd(*(count for _, count in runs))
        folded = [row for row, count in runs for _ in range(count // n)]
        base = _whole_seed(seed)
        if base is None:
            yield folded, n, None
        elif len(set(folded)) == len(folded):
            yield folded, n, self._next_seed(base, n)
        else:
            for row in folded:
                yield [row], n, self._next_seed(base, n)

    def _next_seed(self, base: int, count: int) -> int:
        with self._seeding:
            found = base + self._seeded
            self._seeded += count
        return found


def _end(connections: Connections, journal: Journal) -> None:
    connections.close()
    journal.close("interrupted")


# Rows of tokens -------------------------------------------------------------------------------------------------------


def _left_padded(rows: Sequence[Sequence[int]], width: int, pad: int) -> np.ndarray:
    """[rows, width]; a longer prompt widens all, to a power of two, as in Tunix' samplers."""
    longest = max(map(len, rows))
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    out = np.full((len(rows), width), pad, np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[width - len(row) :] = row
    return out


def _without(row: np.ndarray, ends: set[int]) -> list[int]:
    """Without the token that ended it, which is no part of the text."""
    ids = row.tolist()
    return ids[:-1] if ids and ids[-1] in ends else ids


def _without_left(row: np.ndarray, pad: int) -> list[int]:
    kept = np.flatnonzero(row != pad)
    return row[kept[0] :].tolist() if len(kept) else []


def _without_right(row: np.ndarray, pad: int) -> list[int]:
    kept = np.flatnonzero(row != pad)
    return row[: kept[-1] + 1].tolist() if len(kept) else []


# Tunix' settings ------------------------------------------------------------------------------------------------------


def _sampling(config: RolloutConfig, eos: int) -> Plain:
    """vLLM's sampling parameters for a RolloutConfig."""
    found = {
        "max_tokens": config.max_tokens_to_generate,
        "temperature": config.temperature,
        "stop_token_ids": [int(i) for i in config.eos_tokens or [eos]],
        **config.rollout_vllm_sampling_kwargs,
    }
    if found.get("ignore_eos"):
        found["stop_token_ids"] = []
    optional = {"top_p": config.top_p, "top_k": config.top_k, "seed": config.seed}
    return {k: v for k, v in optional.items() if v is not None} | found


def _whole_seed(seed: Any) -> int | None:
    """A seed of Tunix', a whole number or a key of JAX, as a whole number."""
    if seed is None:
        return None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint32).reshape(-1).tolist()
    # the last word of a key made from a small number is that number
    return functools.reduce(lambda a, b: (a * 31 + b) & 0x3FFFFFFF, words, 0)


def _check_room(pool: Any, config: RolloutConfig, deadline: Deadline) -> None:
    room = pool.facts(deadline).max_model_len
    need = config.max_prompt_length + config.max_tokens_to_generate
    if room and need > room:
        raise ConfigError(
            f"prompts of up to {config.max_prompt_length} tokens and {config.max_tokens_to_generate} more do not fit: "
            f"{pool.name} takes {room} in all",
            remedy=f"lab.launch(..., engine={{'max_model_len': {need}}}), or a shorter RolloutConfig",
        )


def _check_adapters(pool: Any, actor: Any, deadline: Deadline) -> None:
    if pool.facts(deadline).max_adapters:
        return
    lora = flatten(nnx.state(actor, nnx.LoRAParam)).arrays
    rank = max(a.shape[-1] for path, a in lora.items() if path.endswith(A))
    room = max(8, 1 << (rank - 1).bit_length())  # vLLM takes powers of two
    raise Unsupported(
        f"the actor has LoRA adapters, and {pool.name} was launched without LoRA",
        remedy=f"lab.launch(..., engine={{'enable_lora': True, 'max_lora_rank': {room}}})",
    )


def _refuse_offloaded(actor: Any) -> None:
    """`offload_to_cpu` would move a rollout's model, and sync it before and after each generation."""
    usual = jax.devices()[0].default_memory().kind
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(nnx.state(actor, nnx.Param))
        if isinstance(leaf, jax.Array)
    }
    if "pinned_host" in kinds and usual != "pinned_host":
        raise ConfigError(
            "ClusterConfig(offload_to_cpu=True) needs a sampler in the trainer's memory; vLLM has its own",
            remedy="offload_to_cpu=False; lab.launch(..., colocate=True) shares a GPU with the trainer",
        )


def _mesh_of_its_own(mesh: Any) -> Any:
    """One device of the mesh, under another axis name: Tunix sees that it is not the actor's."""
    return jax.sharding.Mesh(mesh.devices.reshape(-1)[:1], ("jvlab",))


# The actor's own log-probabilities ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Actor:
    """Tunix' actor as `lab.connect` takes a trainer: parameters, and a function of them.

    whole    the actor's whole state, with these parameters in it
    """

    params: Any
    graph: Any
    whole: Callable[[Any], Any]
    logprobs_fn: None = None  # by which a trainer is known; `logprobs` is called

    def logprobs(self, params: Any, tokens: Any) -> Any:
        """log P of tokens [B, T] as the actor's learners compute it, at temperature 1; 0 for the first."""
        state = self.whole(params)
        mesh = _mesh_of(state)
        copies = 1 if mesh is None else mesh.size  # a mesh may share out the rows
        rows = jnp.tile(jnp.asarray(tokens), (copies, 1))
        with mesh or contextlib.nullcontext():
            found = common.compute_per_token_logps(
                self.graph,
                state,
                prompt_tokens=rows[:, :1],
                completion_tokens=rows[:, 1:],
                pad_id=-1,  # no token is padding
                eos_id=-1,
            )
        return jnp.pad(found[: len(tokens)], ((0, 0), (1, 0)))


def _full_actor(actor: Any) -> Actor:
    """All parameters are trained."""
    graph, params, rest = nnx.split(actor, nnx.Param, ...)
    return Actor(params, graph, lambda given: nnx.merge_state(given, rest))


def _base_of(actor: Any) -> Actor:
    """What a LoRA actor is without its adapter."""
    graph, lora, params, rest = nnx.split(actor, nnx.LoRAParam, nnx.Param, ...)
    none = jax.tree.map(jnp.zeros_like, lora)
    return Actor(params, graph, lambda given: nnx.merge_state(given, none, rest))


def _adapted(actor: Any, adapters: Adapters) -> Actor:
    """A LoRA actor, of which the adapter is trained."""
    graph, lora, rest = nnx.split(actor, nnx.LoRAParam, ...)
    return Actor(
        adapters.adapter(lora),
        graph,
        lambda given: nnx.merge_state(adapters.put(lora, given), rest),
    )


def _mesh_of(state: Any) -> Any:
    """The mesh on which its arrays are; None if they are on none."""
    found = (getattr(leaf.sharding, "mesh", None) for leaf in jax.tree.leaves(state))
    return next((mesh for mesh in found if mesh is not None and not mesh.empty), None)

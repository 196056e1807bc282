"""`jv.Policy`: a decoder with its parameters on a mesh, loaded from and saved as a Hugging Face checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jvlab import _faces
from jvlab._errors import ConfigError, CoverageError, ModelError
from jvlab._tracebacks import brief
from jvlab.layout._checkpoint import read_config
from jvlab.layout._tree import LeafShape, flatten
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._ruleset import Rules
from jvlab.trainer._batching import Buckets
from jvlab.trainer._checks import check_choice, check_number, check_whole
from jvlab.trainer._compile_cache import use_compile_cache
from jvlab.trainer._live_policies import remember_policy
from jvlab.trainer._micro_batches import (
    MOST,
    Packer,
    Packing,
    packing,
)
from jvlab.trainer.decoder import _checkpoint, _lora, _memory, _model
from jvlab.trainer.decoder import _sharding as sharding
from jvlab.trainer.decoder._attention import Choice, loading_libraries, plain_tokens
from jvlab.trainer.decoder._config import DecoderConfig
from jvlab.trainer.decoder._experts import Routes, checked_routes
from jvlab.trainer.decoder._lora import LoraParams, LoraSpec
from jvlab.trainer.decoder._model import Array, Params
from jvlab.trainer.decoder._runtime import REMAT, Runtime
from jvlab.trainer.models import resolve
from jvlab.trainer.models._tiny import fresh_directory
from jvlab.wire.processes._device_memory import explaining

# The checkpoint that a policy is loaded from: its folder, downloaded if need be, and what each of its tensors is.


def bind(
    config: DecoderConfig,
    hf_config: Mapping[str, Any],
    tensors: tuple[CheckpointTensor, ...],
    dtype: str,
    source: Path,
) -> list[Binding]:
    """The rules of the Policy layout applied to this checkpoint."""
    leaves = {
        ".".join(path): LeafShape(shape, dtype)
        for path, (_, shape) in _model.parameter_letters(config).items()
    }
    rules = policy_rules(hf_config, [t.name for t in tensors])
    try:
        return rules.bind(leaves, tensors, hf_config)
    except CoverageError as error:
        raise ModelError(
            f"{source.name} does not hold the weights its config.json describes: {error.message}",
            remedy="correct config.json, or use another checkpoint",
            path=str(source),
            problems=error.problems,
        ) from error


def local(model: str) -> Path:
    """The model's folder; for a hub id, its copy in the hub's cache, downloaded if needed."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{model!r} is not a directory, and downloading it needs huggingface_hub",
            remedy="pip install huggingface_hub, or pass a model directory",
            model=model,
        ) from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    # the hub's client raises many kinds: offline, gated, no such model
    except Exception as error:
        raise ModelError(
            f"{model!r} could not be fetched from the hub: {type(error).__name__}: {error}",
            remedy="check the name and the network, or pass a model directory",
            model=model,
        ) from error


@contextlib.contextmanager
def rewritten(model: Any, like: Any, dtype: str) -> Iterator[tuple[str, Path]]:
    """The parameters of a Flax model as a checkpoint in a folder, for as long as it is entered, and `like`'s folder."""
    from flax import nnx

    if like is None:
        raise ConfigError(
            f"a model of type {type(model).__name__} does not say what its config is",
            remedy="jv.Policy.from_pretrained(model, like=the checkpoint that has its shape); or train it as it is: "
            "jv.grpo takes (params, logprobs_fn)",
        )
    source = local(resolve(like))
    hf_config = read_config(source)
    DecoderConfig.from_hf(hf_config)  # raises for a family that is not known
    tree = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    flat = flatten(tree)
    files = _checkpoint.TensorFiles(source)
    tensors = tuple(files.tensors())
    _, bindings = infer(flat.shapes, tensors, hf_config, flat.arrays, files)
    with tempfile.TemporaryDirectory(prefix="jvlab-flax-") as folder:
        leaf = flat.arrays.__getitem__
        _checkpoint.write_checkpoint(
            Path(folder), source, hf_config, tensors, bindings, leaf, dtype
        )
        yield folder, source


# Writes adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ONE_FILE = 1 << 62  # bytes: PEFT reads no index


def write_adapter(
    folder: str | os.PathLike[str],
    params: Mapping[str, Any],
    spec: LoraSpec,
    dtype: str,
    hf_config: Mapping[str, Any],
    base: Path,
) -> str:
    """Writes a folder that peft, transformers and vLLM load, all of it or nothing; returns its path."""
    lora = LoraParams(params, spec)
    flat = flatten(lora)
    tensors = lora.peft_tensors()
    bindings = Rules.parse(lora.peft_rules()).bind(flat.shapes, tensors, hf_config)
    target = Path(folder).expanduser().absolute()
    with fresh_directory(target) as fresh:
        _checkpoint.write_weights(
            fresh, tensors, bindings, flat.arrays.__getitem__, dtype, ONE_FILE
        )
        (fresh / "model.safetensors").rename(fresh / WEIGHTS)
        text = json.dumps(lora.peft_config(str(base)), indent=2)
        (fresh / CONFIG).write_text(text + "\n", encoding="utf-8")
    return str(target)


# ----------------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")
REMATS: dict[Any, str] = {True: "full", False: "none"}


class Policy:
    """A causal language model to train. `params` is a nested dict of sharded arrays; everything else is fixed.

    Methods that take `params` are pure in them: pass `policy.params`, or any tree of the same structure.

    >>> policy = jv.Policy.from_pretrained(model)
    >>> policy
    Policy(llama, ... parameters, float32, mesh fsdp=1)
    >>> policy.logprobs(policy.params, [[5, 6, 7, 8]]).shape
    (1, 4)
    """

    def __init__(
        self,
        params: Any,
        runtime: Runtime,
        *,
        config: DecoderConfig,
        mesh: Mesh,
        source: Path,
        hf_config: Mapping[str, Any],
        tensors: tuple[CheckpointTensor, ...],
        bindings: tuple[Binding, ...],
        frozen: Params | None = None,
    ) -> None:
        """Use `Policy.from_pretrained`, or `with_lora` for one with `frozen` parameters below `params`."""
        # what the model computes with and training does not change: those below an adapter
        self.frozen = frozen or {}
        self.config = config
        self.params: Any = params
        self.mesh = mesh
        self.runtime = runtime
        self.source = source
        self.hf_config = dict(hf_config)
        self._tensors = tensors
        self._bindings = bindings
        remember_policy(self)
        self._logits = jax.jit(partial(_model.logits, config=config, runtime=runtime))
        self._hidden = jax.jit(
            partial(_model.layer_states, config=config, runtime=runtime)
        )
        self._logprobs = jax.jit(
            partial(_model.logprobs, config=config, runtime=runtime),
            static_argnames=("with_entropy",),
        )

    @classmethod
    @explaining()
    @brief
    def from_pretrained(
        cls,
        path_or_id: str | os.PathLike[str] | Any,
        mesh: Mesh | str | Mapping[str, int] | None = None,
        dtype: str = "float32",
        compute_dtype: str | None = None,
        remat: str | bool | None = None,
        head_dtype: str | None = None,
        *,
        like: str | os.PathLike[str] | None = None,
    ) -> Policy:
        """Loads a checkpoint into arrays sharded over `mesh` (default: one device; "fsdp=4" is jv.mesh(fsdp=4)).

        `path_or_id` is a folder, a name on the hub, or a Flax model that is already built: an nnx.Module, its state, or
        a tree of parameters. `like` is then the checkpoint that has its shape, whose config and tokenizer it gets; the
        values are the model's, matched by name and shape as `lab.connect(rules="auto")` does.

        `dtype` is that of the parameters (float32 master weights), `compute_dtype` that of the activations (default:
        the same; "bfloat16" for mixed precision). `remat` says what is kept of each layer for the gradient: everything
        ("none"), the results of matrix products ("dots"), or the layer's input alone ("full", or True); the rest is
        computed again. By default it is chosen for each shape from the device's memory; `policy.memory` says which.
        `head_dtype` is that of the output head: "float32" uses its weights unrounded; a 16-bit one rounds the logits
        too, as an engine does; None multiplies in `compute_dtype` and keeps float32 logits. See
        notebooks/GUIDE.md, "When engine and trainer disagree".
        """
        use_compile_cache()
        compute_dtype = compute_dtype or dtype
        for name in (dtype, compute_dtype, head_dtype or dtype):
            check_choice("dtype", name, DTYPES)
        check_choice("remat", remat, (None, True, False, *REMAT))
        if mesh is None:
            mesh = sharding.mesh(fsdp=1)
        elif not isinstance(mesh, Mesh):
            mesh = sharding.mesh(mesh)
        if not isinstance(path_or_id, (str, os.PathLike)):
            with rewritten(path_or_id, like, dtype) as (folder, source):
                made = cls.from_pretrained(
                    folder, mesh, dtype, compute_dtype, remat, head_dtype
                )
            made.source = source
            return made
        if like is not None:
            raise ConfigError(
                f"like={os.fspath(like)!r} beside the checkpoint {os.fspath(path_or_id)!r}",
                remedy="like= is for a Flax model that is already built",
            )
        source = local(resolve(path_or_id))
        hf_config = read_config(source)
        config = DecoderConfig.from_hf(hf_config)
        files = _checkpoint.TensorFiles(source)
        tensors = tuple(files.tensors())
        bindings = bind(config, hf_config, tensors, dtype, source)
        layout = sharding.Layout(mesh)
        of_leaf: dict[str, dict[tuple[int, ...], Binding]] = {}
        # if a tied pair is stored twice, the embedding comes first
        for binding in bindings:
            of_leaf.setdefault(binding.leaf, {}).setdefault(binding.leaf_start, binding)
        flat: dict[tuple[str, ...], jax.Array] = {}
        plain = Runtime(compute_dtype, layout)
        fused = plain.attention(config, config.windows[0], 1)[0].form == "cudnn"
        with loading_libraries(fused):
            for path, (letters, shape) in _model.parameter_letters(config).items():
                where, _ = layout.parameter(letters, shape)
                stored = [*of_leaf[".".join(path)].values()]
                flat[path] = _checkpoint.load_leaf(stored, files, dtype, where)
        params = unflatten_dict(flat)
        kept = "auto" if remat is None else REMATS.get(remat, str(remat))
        runtime = Runtime(compute_dtype, layout, kept, head_dtype, _memory.room(params))
        return cls(
            params,
            runtime,
            config=config,
            mesh=mesh,
            source=source,
            hf_config=hf_config,
            tensors=tensors,
            bindings=tuple(bindings),
        )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        params: Params | None = None,
        dtype: str | None = None,
    ) -> str:
        """Writes config.json, safetensors and the tokenizer as transformers and vLLM load them; returns the path.

        A policy with adapters is written as a PEFT adapter: adapter_config.json and safetensors. The folder must not
        exist yet (or be empty); it appears complete, by one rename. `dtype` defaults to that of the parameters, which
        is lossless.
        """
        saved: Any = self.params if params is None else params
        dtype = dtype or str(jax.tree.leaves(saved)[0].dtype)
        check_choice("dtype", dtype, DTYPES)
        if self.frozen:
            return write_adapter(
                folder, saved, self.lora.spec, dtype, self.hf_config, self.source
            )
        leaf = flatten(saved).arrays.__getitem__
        target = Path(folder).expanduser().absolute()
        with fresh_directory(target) as fresh:
            _checkpoint.write_checkpoint(
                fresh,
                self.source,
                self.hf_config,
                self._tensors,
                self._bindings,
                leaf,
                dtype,
            )
        return str(target)

    def with_lora(
        self,
        rank: int = 16,
        targets: str | Sequence[str] | None = None,
        alpha: float | None = None,
        *,
        dtype: str = "float32",
        seed: int = 0,
    ) -> Policy:
        """The same model with LoRA adapters, which alone are trained and synced; these parameters stay as they are.

        They are its `params`, also called `lora`, and what its methods take; the base is `frozen`, and shared. They are
        linked by `lab.connect(policy.lora, pool)`. `merge()` gives a plain policy, `save_pretrained` a PEFT adapter.

        rank      inner width of the adapters
        targets   what is adapted, by its name in PEFT: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
                  default: all that the model has, of a mixture of experts those of attention
        alpha     adapters are scaled by alpha / rank; default: 2 · rank
        dtype     of the adapters; `seed` draws their first values

        >>> adapted = policy.with_lora(rank=4, targets=["q_proj", "v_proj"])
        >>> adapted
        Policy(llama, rank 4 on q_proj and v_proj: ... of ... parameters trained, float32, mesh fsdp=1)
        >>> bool((adapted.logits(adapted.lora, [[5, 6]]) == policy.logits(policy.params, [[5, 6]])).all())
        True
        """
        check_choice("dtype", dtype, DTYPES)
        base = self.frozen or self.params
        spec = _lora.lora_spec(
            rank, alpha, targets, self._bindings, _model.parameter_letters(self.config)
        )
        lora = _lora.first_values(spec, base, sharding.Layout(self.mesh), dtype, seed)
        return self._like(
            lora, replace(self.runtime, lora=spec, room=_memory.room(lora, base)), base
        )

    def merge(self, params: LoraParams | None = None) -> Policy:
        """A plain policy that computes the same: alpha / rank · A B is added to the base's kernels, in float32."""
        merged = _lora.merged(self.frozen, self.lora if params is None else params)
        return self._like(
            merged, replace(self.runtime, lora=None, room=_memory.room(merged))
        )

    def _like(
        self, params: Any, runtime: Runtime, frozen: Params | None = None
    ) -> Policy:
        """The same model with other parameters, computed in another way."""
        return Policy(
            params,
            runtime,
            config=self.config,
            mesh=self.mesh,
            source=self.source,
            hf_config=self.hf_config,
            tensors=self._tensors,
            bindings=self._bindings,
            frozen=frozen,
        )

    @property
    def lora(self) -> LoraParams:
        """The adapters of a policy made by `with_lora`: what is trained and synced."""
        if not self.frozen:
            raise ConfigError(
                "this policy has no adapters",
                remedy="policy.with_lora(rank=16) gives one that has",
            )
        return self.params  # type: ignore[return-value]

    @lora.setter
    def lora(self, value: LoraParams) -> None:
        self.params = value

    def _whole(self, params: Params, frozen: Params | None = None) -> Params:
        """What the decoder takes: `params`, and the base below them if they are adapters."""
        base = self.frozen if frozen is None else frozen
        return _lora.combined(base, params) if base else params

    # ------------------------------------------------------------------------------------------------ computing

    def logits(
        self,
        params: Params,
        tokens: ArrayLike | Sequence[Sequence[int]],
        lengths_or_mask: ArrayLike | Sequence[int] | None = None,
    ) -> jax.Array:
        """Float32 logits [B, T, v] of the token after each token of `tokens` [B, T]."""
        tokens = _tokens(tokens)
        return self._logits(
            self._whole(params), tokens=tokens, mask=_mask(tokens, lengths_or_mask)
        )

    @explaining()
    def logprobs(
        self,
        params: Params,
        tokens: ArrayLike | Sequence[Sequence[int]],
        lengths_or_mask: ArrayLike | Sequence[int] | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        routes: tuple[Any, ...] | None = None,
    ) -> Any:
        """log P of each token given those before it: float32 [B, T], 0 for each row's first token and for padding.

        `lengths_or_mask` is each row's length [B], or a mask [B, T] that is False on padding (on either side; prompts
        and observations are not padding). `with_entropy=True` returns (log P, entropy of each token's distribution).
        `routes` are experts chosen by an engine, (ids,) or (ids, weights), both [B, T, layers, chosen]; id -1: chosen
        here. See `RolloutBatch.compare`.
        """
        check_number("temperature", temperature, above=0.0)
        tokens = _tokens(tokens)
        return self._logprobs(
            self._whole(params),
            tokens=tokens,
            mask=_mask(tokens, lengths_or_mask),
            temperature=temperature,
            with_entropy=with_entropy,
            routes=checked_routes(routes, tokens.shape, self.config),
        )

    def hidden(
        self, params: Params, tokens: ArrayLike | Sequence[Sequence[int]]
    ) -> jax.Array:
        """Hidden states after every layer, float32 [layers, B, T, d], of `tokens` [B, T]; for inspection."""
        return self._hidden(self._whole(params), tokens=_tokens(tokens))

    def logprobs_fn(
        self,
        params: Params,
        tokens: Array,
        mask: Array | None = None,
        temperature: float | jax.Array = 1.0,
        with_entropy: bool = False,
        segments: Array | None = None,
        most: int = MOST,
        with_loads: bool = False,
        frozen: Params | None = None,
        routes: Routes | None = None,
    ) -> Any:
        """`logprobs` without checks and jit, for a trainer to differentiate and compile.

        `frozen`: this policy's, given where a compiled program takes them as an argument.

        `segments` [B, T] takes the place of a mask where rows hold several samples, `most` at most: it numbers them
        from 1; 0 is padding. `with_loads` also returns how many tokens chose each expert, [layers, experts]; None for a
        model without experts.
        """
        return _model.logprobs(
            self._whole(params, frozen),
            self.config,
            tokens,
            mask=mask,
            temperature=temperature,
            with_entropy=with_entropy,
            runtime=self.runtime,
            segments=segments,
            most=most if segments is not None else 1,
            with_loads=with_loads,
            routes=routes,
        )

    # ------------------------------------------------------------------------------------------------ properties

    @property
    def dtype(self) -> str:
        """The parameters' dtype."""
        whole = self.frozen or self.params
        return str(whole["final_norm"]["scale"].dtype)

    @property
    def compute_dtype(self) -> str:
        """The activations' dtype."""
        return self.runtime.dtype

    @property
    def attention(self) -> dict[str, str]:
        """Which form of attention is used, and why; by the layers' window, "all" if none."""
        limit = plain_tokens(self.config.heads)
        return {
            str(
                window or "all"
            ): f"plain up to {limit:,} tokens, then chunked: {choice.why}"
            if choice.why
            else "cudnn (the fused kernel of an NVIDIA GPU)"
            for window, choice in self._attention()
        }

    @property
    def fused_attention(self) -> bool:
        """Whether every layer's attention is a fused kernel, which takes no more time for packed rows."""
        return all(choice.form == "cudnn" for _, choice in self._attention())

    def _attention(self) -> list[tuple[int | None, Choice]]:
        """The form of attention for each window that layers have."""
        return [
            (window, self.runtime.attention(self.config, window, 1)[0])
            for window in dict.fromkeys(self.config.windows)
        ]

    def memory(self, batch: int, length: int, samples: int = 1) -> _memory.Memory:
        """The memory that a training step over `batch` rows of `length` tokens at once will take on the fullest device.

        `samples` is how many a packed row may hold: a fused kernel takes memory for each of them.

        >>> policy.memory(4, 512).parameters > 0
        True
        """
        for name, given in (("batch", batch), ("length", length), ("samples", samples)):
            check_whole(name, given)
        most = samples if self.fused_attention else 1
        return _memory.estimate(
            self.config, self.runtime, self.params, batch, length, most, self.frozen
        )

    def token_budget(self) -> int:
        """The tokens of a micro-batch that the available memory allows."""
        most = MOST if self.fused_attention else 1
        return _memory.choose_budget(
            self.config, self.runtime, self.params, most, self.frozen
        )

    def packing(
        self,
        samples: Any,
        *,
        token_budget: int | None = None,
        micro_batch: int | None = None,
    ) -> Packing:
        """How a training step would lay samples into rows: `.padding`, `.shapes`, `.plot()`. Nothing is computed.

        samples       a RolloutBatch, or the tokens of each sample, prompt included
        token_budget  of one pass, as for `jv.grpo`; default: what the available memory allows
        micro_batch   samples of one pass instead, each padded to the longest's bucket

        >>> policy.packing([30, 100, 60, 64], token_budget=256)
        Packing(4 samples in 1 row, 1 pass of 1 shape, 0.8 % padding)
        >>> policy.packing([30, 100, 60, 64], micro_batch=4)
        Packing(4 samples in 4 rows, 1 pass of 1 shape, 43.3 % padding)
        """
        if token_budget is not None and micro_batch is not None:
            raise ConfigError(
                "token_budget and micro_batch exclude each other",
                remedy="pass one of them",
            )
        if micro_batch is not None:
            check_whole("micro_batch", micro_batch)
            return packing(samples, Buckets(micro_batch))
        budget = self.token_budget() if token_budget is None else token_budget
        check_whole("token_budget", budget)
        return packing(samples, Packer(budget, not self.fused_attention))

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def shardings(self) -> Any:
        """The sharding of every parameter, as a tree like `params`."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.params)

    @property
    def sharding_notes(self) -> tuple[str, ...]:
        """What is replicated because it cannot be sharded as the table in jvlab/trainer/decoder/_sharding.py says."""
        leaves = {
            ".".join(path): entry
            for path, entry in _model.parameter_letters(self.config).items()
        }
        return sharding.Layout(self.mesh).notes(leaves)

    def __repr__(self) -> str:
        runtime = self.runtime
        more = "" if self.dtype == runtime.dtype else f" computing in {runtime.dtype}"
        more += f", {_mesh(self.mesh)}"
        if runtime.head_dtype:
            more += f", {runtime.head_dtype} head"
        if runtime.remat in ("dots", "full"):
            more += f", remat {runtime.remat}"
        return f"Policy({self.config.family}, {self._counted()}, {self.dtype}{more})"

    def _counted(self) -> str:
        if not self.frozen:
            return f"{_count(self.parameters)} parameters"
        *others, last = self.lora.spec.targets
        what = f"{', '.join(others)} and {last}" if others else last
        whole = (
            sum(leaf.size for leaf in jax.tree.leaves(self.frozen)) + self.parameters
        )
        trained = f"{_count(self.parameters)} of {_count(whole)} parameters trained"
        return f"rank {self.lora.spec.rank} on {what}: {trained}"

    def _repr_html_(self) -> str:
        from jvlab._units import human_bytes

        rows = {
            "model": f"{self.config.family}, {self.config.layers} layers, {self._counted()}",
            "mesh": _mesh(self.mesh),
            "dtype": f"{self.dtype}, computing in {self.compute_dtype}",
            "bytes per device": human_bytes(
                sharding.bytes_per_device(jax.tree.leaves(self.params))
            ),
        }
        notes = self.sharding_notes
        if notes:
            rows["replicated"] = "; ".join(notes)
        return _faces.draw(self, "html", "Policy", rows)


def _tokens(tokens: ArrayLike | Sequence[Sequence[int]]) -> jax.Array:
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ConfigError(
            f"tokens are {tokens.dtype}{tuple(tokens.shape)}",
            remedy="pass whole numbers [batch, time]",
        )
    return tokens


def _mask(
    tokens: jax.Array, lengths_or_mask: ArrayLike | Sequence[int] | None
) -> jax.Array:
    """The mask, or the one that corresponds to the lengths; shapes are checked."""
    if lengths_or_mask is None:
        return jnp.ones(tokens.shape, bool)
    given = jnp.asarray(lengths_or_mask)
    if given.shape == tokens.shape:
        return given.astype(bool)
    if given.shape == tokens.shape[:1] and jnp.issubdtype(given.dtype, jnp.integer):
        return jnp.arange(tokens.shape[1])[None, :] < given[:, None]
    raise ConfigError(
        f"lengths or mask are {given.dtype}{tuple(given.shape)} for tokens {tuple(tokens.shape)}",
        remedy="pass whole-number lengths [batch], or a mask [batch, time]",
    )


def _mesh(mesh: Mesh) -> str:
    return "mesh " + " × ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)

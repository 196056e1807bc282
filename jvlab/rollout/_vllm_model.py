"""What jvlab knows of vLLM's inside to trace a model: groups, building on meta, reload metadata; of 0.32.0.

Every vLLM name that is no public API and that the tracer relies on is in this file. Remove an entry when vLLM offers
the same in public.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.distributed.parallel_state as _groups
import vllm.distributed.utils as _distributed
import vllm.model_executor.layers.rotary_embedding as _rotary
import vllm.model_executor.models.registry as _registry
import vllm.model_executor.models.utils as _model_utils
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import get_model_cls, initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

CHECKED_VERSION = "0.32.0"
_SINGLE = ("_DP", "_DCP", "_PCP", "_EPLB", "_INNER_DP_WORLD")  # groups of one rank here
_GLOBALS = ("_WORLD", "_TP", "_PP", "_EP", "_ETP", "_ENGRAM_DP", "_NODE_COUNT", *_SINGLE)
_IN_PLACE_MOE = ("TRITON", "BATCHED_TRITON")  # MoE backends that compute from the loader's own format


# -- a live model


def worker_model(worker: Any) -> torch.nn.Module:
    """The model a worker runs."""
    get = getattr(worker, "get_model", None)  # takes CUDA graph wrappers off
    return get() if get is not None else worker.model_runner.model


@contextmanager
def current_config(worker: Any) -> Iterator[None]:
    """The worker's config as vLLM's current one: some loaders ask for it."""
    config = getattr(worker, "vllm_config", None)
    if config is None:
        yield
    else:
        with set_current_vllm_config(config):
            yield


def may_swap(worker: Any) -> bool:
    """Whether a parameter's memory may be exchanged: nothing compiled or captured holds its address."""
    config = getattr(worker, "vllm_config", None)
    return config is not None and config.device_config.device_type == "cpu" and config.model_config.enforce_eager


def coordinates() -> tuple[int, tuple[tuple[str, int], ...]]:
    """(global rank, coordinates) of this process, from vLLM's groups; a rank without expert parallelism is expert 0."""
    config = get_current_vllm_config_or_none()
    experts = config is not None and config.parallel_config.enable_expert_parallel
    pairs = (("tp", _groups._TP), ("pp", _groups._PP), ("ep", _groups._EP if experts else None))
    rank = _groups._WORLD.rank if _groups._WORLD is not None else 0
    return rank, tuple((axis, group.rank_in_group if group is not None else 0) for axis, group in pairs)


def as_built(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The layer's parameters as its constructor made them (on meta): what vLLM keeps for its own reload."""
    info = LAYERWISE_INFO.get(layer)
    return {} if info is None else info.restore_metadata[0]


def _format(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, tuple(t.stride())


def _repacked(layer: torch.nn.Module) -> dict[str, str]:
    """Parameters that no longer have the format their loader writes: name -> what became of them."""
    found = {}
    for name, meta in as_built(layer).items():
        live = layer._parameters.get(name)
        if live is None:
            found[name] = "removed after loading"
        elif _format(live) != _format(meta):
            found[name] = f"re-packed after loading: {tuple(live.shape)} {live.dtype} strides {live.stride()}"
    return found


def _made_later(layer: torch.nn.Module) -> list[str]:
    """Parameters that processing after loading added (MLA's W_UV and W_UK_T): computed from others, never loaded."""
    if LAYERWISE_INFO.get(layer) is None:
        return []
    known = as_built(layer).keys() | SKIP_TENSORS
    return [name for name, p in layer._parameters.items() if p is not None and name not in known]


@contextmanager
def loader_format(model: torch.nn.Module) -> Iterator[None]:
    """Within it, a processed model looks to its loader as when it was built; then all is put back.

    Re-packed parameters stand as meta tensors in the format their loader knows, parameters made later are hidden.
    """
    saved: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for layer in model.modules():
            names, extra = _repacked(layer), _made_later(layer)
            if names or extra:
                saved.append((layer, dict(layer._parameters)))
            for name in extra:
                del layer._parameters[name]
            for name in names:
                meta = as_built(layer)[name]
                fresh: Any = torch.empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype, device="meta")
                fresh.__class__ = meta.__class__
                fresh.__dict__.update(meta.__dict__)
                layer._parameters[name] = restore_layer_refs(fresh, layer)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for layer, parameters in saved:
            layer._parameters.clear()
            layer._parameters.update(parameters)


@contextmanager
def loader_state(model: torch.nn.Module) -> Iterator[None]:
    """Puts back what a loader may note on modules and parameters in Python: attributes and plain containers."""
    owners = [*model.modules(), *model.parameters()]
    saved = [(o, dict(o.__dict__)) for o in owners]
    held = [(v, copy.copy(v)) for _, d in saved for v in d.values() if type(v) in (dict, list, set)]
    try:
        yield
    finally:
        for owner, attributes in saved:
            if owner.__dict__.keys() != attributes.keys() or any(
                owner.__dict__[k] is not v for k, v in attributes.items()
            ):
                owner.__dict__.clear()
                owner.__dict__.update(attributes)
        for container, before in held:
            if type(container) is list:
                container[:] = before
            else:
                container.clear()
                container.update(before)


@dataclass(frozen=True)
class Staged:
    """A parameter a write into which would not reach the computation, and the layer that must process it anew."""

    parameter: str  # as it is reported, the first name of a shared one
    layer: torch.nn.Module  # for "derived": the attention that keeps matrices computed from it
    name: str  # within the layer
    why: str
    kind: str  # "packed": the layer's method packs it; "derived": an attention computes others from it


def staged_layers(model: torch.nn.Module) -> list[Staged]:
    """Every staged parameter with the layers to process anew; none for a model on meta."""
    reported = {id(p): n for n, p in model.named_parameters()}  # the first name of a shared parameter
    own_head = any(isinstance(m, ParallelLMHead) for m in model.modules())
    found: list[Staged] = []
    for prefix, layer in model.named_modules():
        for name, why in {**_held_elsewhere(layer, own_head), **_repacked(layer)}.items():
            full = f"{prefix}.{name}" if prefix else name
            found.append(Staged(reported.get(id(layer._parameters.get(name)), full), layer, name, why, "packed"))
        if isinstance(layer, MLAAttention) and getattr(layer, "W_UK_T", None) is not None:
            for name, p in layer.kv_b_proj.named_parameters():
                full, why = f"{prefix}.kv_b_proj.{name}", f"{prefix} keeps matrices computed from it after loading"
                found.append(Staged(reported.get(id(p), full), layer, name, why, "derived"))
    return found


def staged_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Parameters a write into which would not reach the computation: full name -> why. Empty for a model on meta."""
    reasons: dict[str, str] = {}
    for item in staged_layers(model):
        reasons.setdefault(item.parameter, item.why)
    return reasons


def not_repackable(item: Staged) -> str:
    """Why jvlab cannot process this layer anew after a sync; empty if it can."""
    if item.kind == "derived":
        special = ("is_amx_bmm_enabled", "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled")
        return "its matrices are quantised or packed" if any(getattr(item.layer, n, False) for n in special) else ""
    method: Any = item.layer.quant_method
    if isinstance(method, UnquantizedFusedMoEMethod):
        return "" if method.unquantized_backend.name == "CPU" else f"MoE kernel {method.unquantized_backend.value}"
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return ""
    return f"{type(method).__name__} quantises or re-arranges"


def moe_method(layer: torch.nn.Module) -> bool:
    """Whether the layer holds experts."""
    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)


def _held_elsewhere(layer: torch.nn.Module, own_head: bool) -> dict[str, str]:
    """Parameters of which the layer's kernel holds another form of the same shape, or of which that is not known."""
    method = getattr(layer, "quant_method", None)
    live = [n for n, p in layer._parameters.items() if p is not None and not p.is_meta]
    if not live or not isinstance(method, QuantizeMethodBase):
        return {}
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        if own_head and isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return {}  # it is packed as well, but only looked up: F.embedding reads the live weight
        kernel: Any = layer.__dict__.get("cpu_linear")  # set on CPU only; a closure keeps a packed weight
        code = getattr(kernel, "__code__", None)
        if code is not None and (code.co_freevars or kernel.__defaults__):
            return {"weight": "the CPU kernel computes from a packed copy (oneDNN or like) made after loading"}
        return {}
    if isinstance(method, UnquantizedFusedMoEMethod):
        if method.moe_kernel is None or method.unquantized_backend.name in _IN_PLACE_MOE:
            return {}
        name = method.unquantized_backend.value
        return {n: f"the {name} MoE kernel re-arranges experts after loading" for n in live if n in as_built(layer)}
    return {n: f"{type(method).__name__} processes weights after loading" for n in live}


# -- a model without an engine


class _Ranks:
    """As much of a torch process group as vLLM's constructors ask for."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class StandInGroup:
    """As much of vLLM's GroupCoordinator as building and loading a model asks for: sizes and ranks only."""

    def __init__(self, size: int, rank: int, ranks: list[int]) -> None:
        self.world_size, self.rank_in_group, self.ranks = size, rank, ranks
        self.rank = self.local_rank = ranks[rank]
        self.first_rank, self.last_rank = ranks[0], ranks[-1]
        self.next_rank, self.prev_rank = ranks[(rank + 1) % size], ranks[rank - 1]
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = _Ranks(size, rank)
        self.device, self.unique_name = torch.device("cpu"), "jvlab-stand-in"
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = False


@contextmanager
def vllm_globals() -> Iterator[None]:
    """Puts vLLM's process-wide state back afterwards: groups, caches keyed by model, the environment."""
    groups = {name: getattr(_groups, name) for name in _GLOBALS if hasattr(_groups, name)}
    ropes, missing = dict(_rotary._ROPE_DICT), dict(_model_utils._model_to_pp_missing_layer_names)
    environment = dict(os.environ)
    try:
        yield
    finally:
        for name, value in groups.items():
            setattr(_groups, name, value)
        caches: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (_rotary._ROPE_DICT, ropes),
            (_model_utils._model_to_pp_missing_layer_names, missing),
        ]
        for cache, before in caches:
            cache.clear()
            cache.update(before)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)


def stand_in(tensor_parallel: int, pipeline_parallel: int, rank: int) -> None:
    """Makes this process look like one rank of that many; use inside `vllm_globals`."""
    stage, place = divmod(rank, tensor_parallel)
    world = tensor_parallel * pipeline_parallel
    row = [stage * tensor_parallel + i for i in range(tensor_parallel)]
    _groups._WORLD = StandInGroup(world, rank, list(range(world)))  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("_TP", "_EP", "_ETP"):
        if hasattr(_groups, name):
            setattr(_groups, name, StandInGroup(tensor_parallel, place, row))
    column = [place + i * tensor_parallel for i in range(pipeline_parallel)]
    _groups._PP = StandInGroup(pipeline_parallel, stage, column)  # pyright: ignore[reportAttributeAccessIssue]
    for name in _SINGLE:
        if hasattr(_groups, name):
            setattr(_groups, name, StandInGroup(1, 0, [rank]))
    _groups._NODE_COUNT = 1
    # both caches hold tensors of the device of the model before
    _rotary._ROPE_DICT.clear()
    _model_utils._model_to_pp_missing_layer_names.clear()


def engine_config(
    model_dir: Path, tensor_parallel: int, pipeline_parallel: int, expert_parallel: bool, dtype: str
) -> VllmConfig:
    """vLLM's own config for a model directory (config.json is enough); raises what vLLM raises."""
    arguments = EngineArgs(
        model=str(model_dir),
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        enable_expert_parallel=expert_parallel,
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        distributed_executor_backend="mp" if tensor_parallel * pipeline_parallel > 1 else None,
    )
    inspect = _registry._run_in_subprocess
    # vLLM first imports the model class in a subprocess (13 s on two cores), so that CUDA need not be initialised here;
    # but it is about to be imported here anyway
    _registry._run_in_subprocess = lambda question: question()
    try:
        return arguments.create_engine_config()
    finally:
        _registry._run_in_subprocess = inspect


def build(config: VllmConfig, device: str) -> torch.nn.Module:
    """A fresh model of this config for the stand-in rank, its parameters on `device` ("meta": no memory)."""
    try:
        return _build(config, torch.device(device))
    except NotImplementedError:
        if device != "meta":
            raise
        # a constructor looked at numbers it had made (bloom: ALiBi slopes): let all but empty tensors be real
        return _build(config, _EmptyOnMeta())


class _EmptyOnMeta(TorchFunctionMode):
    """Puts tensors made by torch.empty, as all large weights are, on meta; others are real and on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def _build(config: VllmConfig, place: Any) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with (
        _expert_maps_on_cpu(),
        _classes_left_alone(config),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        place,
    ):
        return initialize_model(config)


@contextmanager
def _classes_left_alone(config: VllmConfig) -> Iterator[None]:
    """vLLM's Transformers backend decorates transformers' own classes for compilation, for good: not for a trace."""
    name = "_decorate_for_torch_compile"
    owners = [k for k in get_model_cls(config.model_config).__mro__ if name in k.__dict__]
    originals = [k.__dict__[name] for k in owners]
    for owner in owners:
        setattr(owner, name, lambda model: None)
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def _expert_maps_on_cpu() -> Iterator[None]:
    """With expert parallelism the loader asks a small table which experts are its own: that one needs real numbers."""
    original = ExpertMapManager.__init__

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            original(self, *args, **kwargs)

    ExpertMapManager.__init__ = on_cpu
    try:
        yield
    finally:
        ExpertMapManager.__init__ = original


@contextmanager
def config_in_force(config: VllmConfig) -> Iterator[None]:
    """The config as vLLM's current one while a loader runs."""
    with set_current_vllm_config(config):
        yield


@contextmanager
def only_layers(stage: int, count: int) -> Iterator[None]:
    """Within it, that stage of the pipeline builds its first `count` layers; the rest look like another stage's."""
    original = _distributed.get_pp_indices

    def shortened(layers: int, rank: int, stages: int) -> tuple[int, int]:
        start, end = original(layers, rank, stages)
        return (start, min(end, start + count)) if rank == stage else (start, end)

    _distributed.get_pp_indices = shortened
    try:
        yield
    finally:
        _distributed.get_pp_indices = original


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """vLLM's own split of layers over pipeline stages: [start, end)."""
    return _distributed.get_pp_indices(layers, stage, stages)


@contextmanager
def config_directory(config: dict[str, Any]) -> Iterator[Path]:
    """A directory that holds only this config.json."""
    import json

    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jvlab-config-")))
        (path / "config.json").write_text(json.dumps(config))
        yield path

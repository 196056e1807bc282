"""A vLLM model built without an engine, on meta tensors: stand-in groups, configs, layers of one stage. vLLM 0.32.0."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.distributed.parallel_state as _groups
import vllm.distributed.utils as _distributed
import vllm.model_executor.layers.rotary_embedding as _rotary
import vllm.model_executor.models.utils as _model_utils
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.utils import get_model_cls, initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from jvlab._errors import TraceError
from jvlab.engine import _defaults, _patches
from jvlab.engine._modules import own_parameters
from jvlab.engine.tracing import _vllm_model

# what `quantization` may be without an engine: two names of one thing
ONLINE = ("fp8", "fp8_per_tensor")


def process(model: torch.nn.Module) -> None:
    """vLLM's own step after loading of the layers that it quantises, on meta; inside `_patches.card_kernels`."""
    for layer in model.modules():
        method: Any = _vllm_model.online_method(layer)
        if method is not None:
            with torch.no_grad():
                method.process_weights_after_loading(layer)
            for parameter in layer.parameters(recurse=False):
                _vllm_model.own_loader(parameter)
        elif isinstance(_vllm_model.method_of(layer), BaseKVCacheMethod):
            # read once after loading, then removed
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                own_parameters(layer).pop(name, None)


def check_known(quant_config: Any) -> None:
    """Raise unless this quantisation of vLLM's is one whose result is known without an engine."""
    kind = type(quant_config).__name__
    if kind == "OnlineQuantizationConfig":  # of a name in ONLINE
        return
    if (
        kind == "Fp8Config"
        and quant_config.weight_block_size
        and not getattr(quant_config, "is_scale_e8m0", False)
    ):
        return
    raise TraceError(
        f"without an engine jvlab can't plan for a checkpoint quantised by {quant_config.get_name()!r} ({kind})",
        remedy="plan with a running pool, jv.plan(params, pool), or leave quantization_config out of the config to "
        "plan the unquantised model; known without an engine are quantization='fp8' and fp8 with weight_block_size",
        quantization=str(quant_config.get_name()),
    )


# ----------------------------------------------------------------------------------------------------

_SINGLE = ("_DP", "_DCP", "_PCP", "_EPLB", "_INNER_DP_WORLD")  # groups of one rank here


_GLOBALS = (
    "_WORLD",
    "_TP",
    "_PP",
    "_EP",
    "_ETP",
    "_ENGRAM_DP",
    "_NODE_COUNT",
    *_SINGLE,
)


class StandInGroup:
    """The part of vLLM's GroupCoordinator that building and loading a model uses: sizes and ranks only."""

    def __init__(self, size: int, rank: int, ranks: list[int]) -> None:
        self.world_size = size
        self.rank_in_group = rank
        self.ranks = ranks
        self.rank = self.local_rank = ranks[rank]
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1
        # the part of a torch process group that vLLM's constructors use
        self.device_group = self.cpu_group = SimpleNamespace(
            size=lambda: size, rank=lambda: rank
        )
        self.device = torch.device("cpu")
        self.unique_name = "jvlab-stand-in"
        self.device_communicator = None


@contextmanager
def vllm_globals() -> Iterator[None]:
    """Restores vLLM's process-wide state on exit: groups, caches keyed by model, the environment."""
    groups = {name: getattr(_groups, name) for name in _GLOBALS}
    cached = [dict(cache) for cache in _caches()]
    try:
        with _defaults.variables({}):
            yield
    finally:
        for name, value in groups.items():
            setattr(_groups, name, value)
        for cache, before in zip(_caches(), cached, strict=True):
            cache.clear()
            cache.update(before)


def _caches() -> tuple[dict[Any, Any], ...]:
    """What vLLM keeps of models: both hold tensors on a model's device."""
    return _rotary._ROPE_DICT, _model_utils._model_to_pp_missing_layer_names


def stand_in(tensor_parallel: int, pipeline_parallel: int, rank: int) -> None:
    """Sets vLLM's groups as on one rank of such an engine; use inside `vllm_globals`."""
    stage, place = divmod(rank, tensor_parallel)
    world = tensor_parallel * pipeline_parallel
    row = [stage * tensor_parallel + i for i in range(tensor_parallel)]
    column = [place + i * tensor_parallel for i in range(pipeline_parallel)]
    across = StandInGroup(tensor_parallel, place, row)
    values: dict[str, Any] = {
        **dict.fromkeys(_SINGLE, StandInGroup(1, 0, [rank])),
        **dict.fromkeys(("_TP", "_EP", "_ETP"), across),
        "_WORLD": StandInGroup(world, rank, list(range(world))),
        "_PP": StandInGroup(pipeline_parallel, stage, column),
        "_NODE_COUNT": 1,
    }
    for name, value in values.items():
        setattr(_groups, name, value)
    for cache in _caches():
        cache.clear()


def engine_config(
    model_dir: Path,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: bool,
    dtype: str,
    quantization: str | None = None,
) -> VllmConfig:
    """vLLM's own config for a model directory (config.json is enough); raises what vLLM raises."""
    arguments = EngineArgs(
        model=str(model_dir),
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        quantization=quantization,  # pyright: ignore[reportArgumentType]
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=pipeline_parallel,
        enable_expert_parallel=expert_parallel,
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        distributed_executor_backend="mp"
        if tensor_parallel * pipeline_parallel > 1
        else None,
    )
    with _patches.classes_imported_here():
        return arguments.create_engine_config()


def build(config: VllmConfig, device: str) -> torch.nn.Module:
    """A fresh model of this config for the stand-in rank, its parameters on `device` ("meta": no memory)."""
    try:
        return _build(config, torch.device(device))
    except NotImplementedError:
        if device != "meta":
            raise
        # a constructor read values that it computed (bloom: ALiBi slopes): make all but torch.empty tensors real
        return _build(config, _EmptyOnMeta())


class _EmptyOnMeta(TorchFunctionMode):
    """Puts tensors from torch.empty (all large weights) on meta; others are real, on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def _build(config: VllmConfig, place: Any) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with (
        _patches.expert_maps_on_cpu(),
        _patches.undecorated_classes(get_model_cls(config.model_config)),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        place,
    ):
        return initialize_model(config)


config_in_force = set_current_vllm_config  # while a loader runs


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """vLLM's own split of layers over pipeline stages: [start, end)."""
    return _distributed.get_pp_indices(layers, stage, stages)


@contextmanager
def config_directory(config: dict[str, Any]) -> Iterator[Path]:
    """A directory that holds only this config.json."""
    with tempfile.TemporaryDirectory(prefix="jvlab-config-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        yield path

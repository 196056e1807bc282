"""A vLLM model built without an engine, on meta tensors: stand-in groups, configs, layers of one stage. vLLM 0.32.0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.distributed.parallel_state as _groups
import vllm.distributed.utils as _distributed
import vllm.model_executor.layers.rotary_embedding as _rotary
import vllm.model_executor.models.registry as _registry
import vllm.model_executor.models.utils as _model_utils
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.utils import get_model_cls, initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from jvlab._errors import MissingDependency, TraceError
from jvlab.engine.tracing import _vllm_model

# fp8 layers of a model on meta as an engine on a card holds them: vLLM's own classes, its kernels named. vLLM 0.32.0.
# Without a card vLLM finds no kernel for fp8, and without values its step after loading cannot quantise. So kernels are
# those that an H200 was seen to take (CUTLASS for linear maps, Triton for experts), and quantising gives shapes alone.
# Which arithmetic it is follows from the class; connecting to the engine proves it, on known values (`_trace.py`).

# what `quantization` may be without an engine: two names of one thing
ONLINE = ("fp8", "fp8_per_tensor")


def linear_kernel(module_name: str = "", **options: Any) -> Any:
    """vLLM's CUTLASS kernel of an fp8 layer on any machine; blocks are left as they are loaded, so need none."""
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
        CutlassFP8ScaledMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
    )

    class Kernel(CutlassFP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(
            cls, compute_capability: int | None = None
        ) -> tuple[bool, str | None]:
            return True, None

    if options["weight_quant_key"].scale.group_shape.row > 1:
        return SimpleNamespace()
    return Kernel(
        FP8ScaledMMLinearLayerConfig(**options),
        ["weight", "weight_scale", "input_scale", "x"],
    )


@contextmanager
def card_kernels() -> Iterator[None]:
    """Inside, models on meta are built and processed as on a card; see the head of this file."""
    try:
        replaced = _replaced()
        before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    except (ImportError, AttributeError) as error:
        raise MissingDependency(
            f"this vLLM quantises to fp8 in another way than jvlab can plan without an engine: {error}",
            remedy="install vLLM 0.32.0, or plan with a running pool: jv.plan(params, pool)",
        ) from error
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _replaced() -> list[tuple[Any, str, Any]]:
    """Module, name and stand-in of what needs a card."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as moe
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.online import fp8 as online

    def quantised(
        values: torch.Tensor, scale: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(values, dtype=torch.float8_e4m3fn), scale

    triton = lambda **_: (moe.Fp8MoeBackend.TRITON, SimpleNamespace)
    of_rank = lambda amax, _: amax  # the maximum over ranks has the shape of each
    return [
        *(
            (module, "init_fp8_linear_kernel", linear_kernel)
            for module in (fp8, online)
        ),
        *((module, "select_fp8_moe_backend", triton) for module in (fp8, online)),
        (online, "amax_for_tp_weight_quant", of_rank),
        (online, "amax_for_moe_weight_quant", of_rank),
        (moe, "make_fp8_moe_kernel", lambda **_: SimpleNamespace()),
        (ops, "scaled_fp8_quant", quantised),
    ]


def process(model: torch.nn.Module) -> None:
    """vLLM's own step after loading, on a model on meta, of the layers that it quantises; inside `card_kernels`."""
    for layer in model.modules():
        method: Any = _vllm_model.online_method(layer)
        if method is not None:
            with torch.no_grad():
                method.process_weights_after_loading(layer)
            for parameter in layer.parameters(recurse=False):
                _vllm_model.own_loader(parameter)
        elif isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod):
            # read once after loading, then removed
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                layer._parameters.pop(name, None)


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


class _Ranks:
    """The part of a torch process group that vLLM's constructors use."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class StandInGroup:
    """The part of vLLM's GroupCoordinator that building and loading a model uses: sizes and ranks only."""

    def __init__(self, size: int, rank: int, ranks: list[int]) -> None:
        self.world_size = size
        self.rank_in_group = rank
        self.ranks = ranks
        self.rank = self.local_rank = ranks[rank]
        self.first_rank = ranks[0]
        self.last_rank = ranks[-1]
        self.next_rank = ranks[(rank + 1) % size]
        self.prev_rank = ranks[rank - 1]
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1
        self.device_group = self.cpu_group = _Ranks(size, rank)
        self.device = torch.device("cpu")
        self.unique_name = "jvlab-stand-in"
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = False


@contextmanager
def vllm_globals() -> Iterator[None]:
    """Restores vLLM's process-wide state on exit: groups, caches keyed by model, the environment."""
    groups = {
        name: getattr(_groups, name) for name in _GLOBALS if hasattr(_groups, name)
    }
    ropes = dict(_rotary._ROPE_DICT)
    missing = dict(_model_utils._model_to_pp_missing_layer_names)
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
    """Sets vLLM's groups as on one rank of such an engine; use inside `vllm_globals`."""
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
    # both caches hold tensors on the previous model's device
    _rotary._ROPE_DICT.clear()
    _model_utils._model_to_pp_missing_layer_names.clear()


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
    inspect = _registry._run_in_subprocess
    # vLLM first imports the model class in a subprocess (13 s on two cores), so that CUDA need not be initialised here;
    # here it is imported anyway
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
        _expert_maps_on_cpu(),
        _undecorated_classes(config),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        place,
    ):
        return initialize_model(config)


@contextmanager
def _undecorated_classes(config: VllmConfig) -> Iterator[None]:
    """Keeps vLLM's Transformers backend from decorating transformers' classes, which would outlast a trace."""
    name = "_decorate_for_torch_compile"
    owners = [
        k for k in get_model_cls(config.model_config).__mro__ if name in k.__dict__
    ]
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
    """Keeps the expert maps real: with expert parallelism the loader reads from them which experts are local."""
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
    """Sets vLLM's current config while a loader runs."""
    with set_current_vllm_config(config):
        yield


@contextmanager
def only_layers(stage: int, count: int) -> Iterator[None]:
    """Inside, this pipeline stage builds only its first `count` layers; the rest are treated as another stage's."""
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
        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="jvlab-config-"))
        )
        (path / "config.json").write_text(json.dumps(config))
        yield path

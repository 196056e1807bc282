"""fp8 layers of a model on meta as an engine on a card holds them: vLLM's own classes, its kernels named. vLLM 0.32.0.

Without a card vLLM finds no kernel for fp8, and without values its step after loading cannot quantise. So kernels are
those that an H200 was seen to take (CUTLASS for linear maps, Triton for experts), and quantising gives shapes alone.
Which arithmetic it is follows from the class; connecting to the engine proves it, on known values (`_formats.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from jvlab._errors import MissingDependency, TraceError
from jvlab.engine.tracing import _vllm_model

ONLINE = ("fp8", "fp8_per_tensor")  # what `quantization` may be without an engine: two names of one thing


def linear_kernel(module_name: str = "", **options: Any) -> Any:
    """vLLM's CUTLASS kernel of an fp8 layer on any machine; blocks are left as they are loaded, so need none."""
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig

    class Kernel(CutlassFP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

    if options["weight_quant_key"].scale.group_shape.row > 1:
        return SimpleNamespace()
    return Kernel(FP8ScaledMMLinearLayerConfig(**options), ["weight", "weight_scale", "input_scale", "x"])


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

    def quantised(values: torch.Tensor, scale: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(values, dtype=torch.float8_e4m3fn), scale

    triton = lambda **_: (moe.Fp8MoeBackend.TRITON, SimpleNamespace)
    of_rank = lambda amax, _: amax  # the maximum over ranks has the shape of each
    return [
        *((module, "init_fp8_linear_kernel", linear_kernel) for module in (fp8, online)),
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
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):  # read once after loading, then removed
                layer._parameters.pop(name, None)


def check_known(quant_config: Any) -> None:
    """Raise unless this quantisation of vLLM's is one whose result is known without an engine."""
    kind = type(quant_config).__name__
    if kind == "OnlineQuantizationConfig":  # of a name in ONLINE
        return
    if kind == "Fp8Config" and quant_config.weight_block_size and not getattr(quant_config, "is_scale_e8m0", False):
        return
    raise TraceError(
        f"without an engine jvlab can't plan for a checkpoint quantised by {quant_config.get_name()!r} ({kind})",
        remedy="plan with a running pool, jv.plan(params, pool), or leave quantization_config out of the config to "
        "plan the unquantised model; known without an engine are quantization='fp8' and fp8 with weight_block_size",
        quantization=str(quant_config.get_name()),
    )

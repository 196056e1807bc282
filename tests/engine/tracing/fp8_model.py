"""Models that vLLM's own classes load and quantise to fp8 on a CPU, whose build has no kernels for it.

What is vLLM's: the config, the online methods, their loaders, `process_weights_after_loading`, the padding of its
CUTLASS kernel. What stands in: choosing a kernel for this machine (never run here), the CUDA op that quantises (by
vLLM's own native reference, `QuantFP8.forward_native`), and the all-reduce over ranks, which are built in turn here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jvlab.engine import _patches
from jvlab.engine._patches import linear_kernel
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._offline import build_rank
from tests.engine.tracing import trace_oracle as oracle


class Reduction:
    """The maximum over ranks of each layer's largest value: noted in a first round of loading, used in a second."""

    def __init__(self) -> None:
        self.noted: dict[int, list[torch.Tensor]] = {}
        # while formats are looked for
        self.known: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.rank, self.use, self.at = 0, False, 0

    def start(self, rank: int, use: bool) -> None:
        self.rank, self.use, self.at, self.known = rank, use, 0, None
        if not use:
            self.noted[rank] = []

    def __call__(self, amax: torch.Tensor, sharded: bool | int) -> torch.Tensor:
        # of experts: the number of ranks
        if not sharded or (sharded == 1 and not isinstance(sharded, bool)):
            return amax
        if self.known is not None:
            return self.known(amax)
        if not self.use:
            self.noted[self.rank].append(amax.clone())
            return amax
        self.at += 1
        return (
            torch.stack([of[self.at - 1] for of in self.noted.values()])
            .max(dim=0)
            .values
        )


def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Reduction:
    """Make vLLM's online fp8 loadable on this machine; see the head of this file."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as moe
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    def quantised(
        x: torch.Tensor, scale: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        native: Any = QuantFP8(
            static=True, group_shape=GroupShape.PER_TENSOR, compile_native=False
        )
        return native.forward_native(x, scale.reshape(1))[0], scale

    reduction = Reduction()
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", linear_kernel)
    monkeypatch.setattr(
        fp8,
        "select_fp8_moe_backend",
        lambda **_: (moe.Fp8MoeBackend.TRITON, SimpleNamespace),
    )
    monkeypatch.setattr(moe, "make_fp8_moe_kernel", lambda **_: SimpleNamespace())
    monkeypatch.setattr(ops, "scaled_fp8_quant", quantised)
    # the head is not packed, as on a card
    for replaced in _patches.without_packing():
        monkeypatch.setattr(*replaced)
    monkeypatch.setattr(fp8, "amax_for_tp_weight_quant", reduction)
    monkeypatch.setattr(fp8, "amax_for_moe_weight_quant", reduction)
    return reduction


def blocks_on_cpu(monkeypatch: pytest.MonkeyPatch, e8m0: bool = False) -> None:
    """Make vLLM's block-scaled fp8 checkpoints loadable on this machine: only choosing a kernel is stood in for.

    With `e8m0` the kernel does what that of DeepGEMM does by default: scales become powers of two, in place.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.triton import (
        TritonFp8BlockScaledMMKernel,
    )
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as moe
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        requant_weight_ue8m0_inplace,
    )

    class Kernel(TritonFp8BlockScaledMMKernel):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            if e8m0:
                with torch.compiler.set_stance("force_eager"):
                    of: Any = layer
                    requant_weight_ue8m0_inplace(
                        of.weight, of.weight_scale_inv, of.weight_block_size
                    )

    def kernel(module_name: str = "", **options: Any) -> Any:
        return Kernel(FP8ScaledMMLinearLayerConfig(**options))

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", kernel)
    monkeypatch.setattr(
        fp8,
        "select_fp8_moe_backend",
        lambda **_: (moe.Fp8MoeBackend.TRITON, SimpleNamespace),
    )
    monkeypatch.setattr(fp8, "make_fp8_moe_kernel", lambda **_: SimpleNamespace())
    # the head is not packed, as on a card
    for replaced in _patches.without_packing():
        monkeypatch.setattr(*replaced)


def block_config(folder: Path, block: int, tp: int = 1, ep: bool = False) -> Any:
    """vLLM's config of an engine of a block-scaled checkpoint."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = _meta_model.engine_config(folder, tp, 1, ep, "bfloat16")
    config.quant_config = Fp8Config.from_config(
        block_settings(checkpoint(folder), block)
    )
    return config


def block_settings(names: Iterable[str], block: int) -> dict[str, Any]:
    """`quantization_config` of a block-scaled checkpoint with these tensors.

    It has to name the linear maps in 16 bits: vLLM would take a router's weights for fp8, and its kernel for as few
    outputs as there are experts fails without a word.
    """
    plain = [
        n.removesuffix(".weight")
        for n in names
        if n == "lm_head.weight" or n.endswith(".mlp.gate.weight")
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": plain,
    }


def block_checkpoint(
    weights: dict[str, torch.Tensor], block: int, dtype: str
) -> dict[str, torch.Tensor]:
    """The checkpoint with linear layers in fp8, by vLLM's own function; `dtype`: of the values that are quantised."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    out = {}
    for name, tensor in weights.items():
        if not name.endswith("proj.weight"):
            out[name] = tensor
            continue
        with torch.compiler.set_stance("force_eager"):
            values, scales = per_block_cast_to_fp8(
                tensor.to(getattr(torch, dtype)), [block, block], use_ue8m0=False
            )
        out |= {name: values, f"{name}_scale_inv": scales}
    return out


def quantised_config(
    folder: Path, tp: int = 1, ep: bool = False, how: str = "fp8_per_tensor"
) -> Any:
    """vLLM's config of such an engine."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization.online.base import (
        OnlineQuantizationConfig,
    )

    config = _meta_model.engine_config(folder, tp, 1, ep, "bfloat16")
    config.quant_config = OnlineQuantizationConfig(args=_ONLINE_SHORTHANDS[how])
    return config


def loaded(
    config: Any, weights: dict[str, torch.Tensor], rank: int = 0
) -> torch.nn.Module:
    """The model of a rank, as its engine holds it after loading these weights."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_processing,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model: Any = build_rank(config, rank, device="cpu")
    with torch.no_grad(), _meta_model.config_in_force(config):
        model.load_weights(iter((n, w.clone()) for n, w in weights.items()))
        finalize_layerwise_processing(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def ranks(
    config: Any, weights: dict[str, torch.Tensor], reduction: Reduction
) -> list[torch.nn.Module]:
    """Every rank's model; with several, the maxima are noted in a first round and used in a second."""
    size = config.parallel_config.tensor_parallel_size
    for use in (False, True) if size > 1 else (True,):
        out = []
        for rank in range(size):
            reduction.start(rank, use)
            out.append(loaded(config, weights, rank))
    return out


def checkpoint(folder: str | Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors."""
    return oracle.weights_of(Path(folder))

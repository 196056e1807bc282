"""Works around a bug of vLLM 0.32.0's CPU kernels for LoRA: a request without an adapter may be given one.

Such a request has the slot -1. The kernels index with it, which is the last slot: if that holds an adapter, base
requests are computed with it, in every decoding step and in prefills beside an adapted one. Here what the first of the
two products gives for slot -1 is zero, and so is the second. Remove this when `bgmv_shrink` in torch_ops does so.
"""

from __future__ import annotations

import functools
from typing import Any


def patch_cpu_lora() -> None:
    """Patch vLLM's kernels; to be called before they are used."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = no_adapter_is_zero(lora_ops.bgmv_shrink)
    lora_ops.bgmv_shrink = shrink  # sgmv_shrink calls it too
    punica_cpu.bgmv_shrink = shrink


def no_adapter_is_zero(shrink: Any) -> Any:
    """The kernel, with rows of zeros where the slot is negative."""

    @functools.wraps(shrink)
    def shrink_or_zero(
        inputs: Any, weights: Any, output: Any, slots: Any, *args: Any, **options: Any
    ) -> None:
        shrink(inputs, weights, output, slots, *args, **options)
        output[: slots.shape[0]][slots < 0] = 0

    return shrink_or_zero

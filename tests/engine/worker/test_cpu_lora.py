"""vLLM's CPU kernels for LoRA: a request without an adapter gets none, whatever the last slot holds."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow


def product(shrink, expand, slots: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(2, 1, 3, 4, generator=random),
        torch.randn(2, 1, 5, 3, generator=random),
    )
    x, low, out = (
        torch.randn(len(slots), 4, generator=random),
        torch.zeros(len(slots), 3),
        torch.zeros(len(slots), 5),
    )
    shrink(x, a, low, slots, 1.0)
    expand(low, b, out, slots, add_inputs=True)
    return out


def test_slot_minus_one_is_no_slot():
    from vllm.lora.ops.torch_ops import lora_ops

    from jvlab.engine.worker._cpu._lora import no_adapter_is_zero

    slots = torch.tensor([0, -1, 1, -1])
    plain = getattr(lora_ops.bgmv_shrink, "__wrapped__", lora_ops.bgmv_shrink)
    theirs = product(plain, lora_ops.bgmv_expand, slots)
    ours = product(no_adapter_is_zero(plain), lora_ops.bgmv_expand, slots)
    assert theirs[1].any(), "the bug that this works around is still there"
    assert not ours[[1, 3]].any()
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])

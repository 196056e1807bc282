"""vLLM's CPU kernels for experts: a rank that holds some of them computes the share of those, and no other memory."""

from __future__ import annotations

from typing import Any

import torch


def apply(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """As vLLM's: indexes this rank's experts with whatever numbers it is given."""
    each = torch.einsum("td,tkdf->tkf", hidden_states, w1[topk_ids.long()])
    output.copy_((each * topk_weights[..., None]).sum(1))


def test_ranks_add_up_to_all_experts():
    from jvlab.engine.worker._cpu._experts import own_experts_only

    random = torch.Generator().manual_seed(0)
    x, experts = (
        torch.randn(6, 4, generator=random),
        torch.randn(4, 4, 4, generator=random),
    )
    ids = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(6)]).to(
        torch.int32
    )
    weights, whole = torch.rand(6, 2, generator=random), torch.empty(6, 4)
    patched: Any = own_experts_only(apply)
    patched(whole, x, experts, weights, ids, None)
    parts = []
    for rank in range(2):
        mine = torch.full((4,), -1, dtype=torch.int32)
        mine[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        part = torch.empty(6, 4)
        patched(
            part,
            x,
            experts[2 * rank : 2 * rank + 2],
            weights,
            topk_ids=ids,
            expert_map=mine,
        )
        parts.append(part)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert not torch.allclose(parts[0], whole)
    assert ids.max() == 3, (
        "numbers that are no places on a rank of two; the caller's own are kept"
    )

"""vLLM's output head with LoRA: rows of prompts, which its kernels can't adapt, are computed without adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jvlab.engine.worker._extension import adapting_sampled_rows


class Head:
    """Adapts one row for each request, as vLLM's kernels do: it fails for any other number of rows."""

    def __init__(self, requests: int) -> None:
        self.punica_wrapper: Any = SimpleNamespace(
            sampler_indices=torch.zeros(requests, dtype=torch.long),
            add_lora_logits=self._adapt,
        )

    def _adapt(self, y: torch.Tensor, *_: Any) -> torch.Tensor:
        slots = self.punica_wrapper.sampler_indices
        return torch.einsum("bi,bi->bi", y, torch.full((len(slots), y.shape[1]), 2.0))

    def _get_logits(
        self, hidden_states: torch.Tensor, bias: float = 0.0
    ) -> torch.Tensor:
        return self.punica_wrapper.add_lora_logits(hidden_states + bias)


def test_rows_of_prompts_are_not_adapted_and_sampled_rows_are():
    head, kernels = Head(3), Head(3)
    patched = adapting_sampled_rows(Head._get_logits)
    with pytest.raises(RuntimeError):
        head._get_logits(torch.ones(7, 4))
    assert torch.equal(
        patched(head, torch.ones(7, 4), bias=1.0), torch.full((7, 4), 2.0)
    )
    assert torch.equal(patched(head, torch.ones(3, 4)), torch.full((3, 4), 2.0)), (
        "adapted: twice as large"
    )
    assert type(head.punica_wrapper) is type(kernels.punica_wrapper), (
        "the kernels are back"
    )

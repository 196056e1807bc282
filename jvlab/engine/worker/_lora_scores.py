"""Works around vLLM 0.32.0's output head with LoRA, which can't compute log-probabilities of prompts.

It adapts one row for each request that samples a token. Given the rows of several prompts, as `pool.score` asks for, it
fails, on a CPU with an error that ends the engine, also if no request has an adapter. Scores are of the base or of a
linked adapter, neither of which adapts the head: such rows are computed without. Remove this when vLLM's
LogitsProcessorWithLoRA takes rows of prompts.
"""

from __future__ import annotations

import functools
from typing import Any


class NoHeadAdapter:
    """In place of vLLM's kernels: the output head without adapters."""

    def add_lora_logits(self, y: Any, *_: Any) -> Any:
        return y


def patch_prompt_scores() -> None:
    """Patch vLLM's layer; to be called before a model is built."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    LogitsProcessorWithLoRA._get_logits = adapting_sampled_rows(LogitsProcessorWithLoRA._get_logits)


def adapting_sampled_rows(original: Any) -> Any:
    """The layer's method; rows other than one for each request are computed without adapters."""

    @functools.wraps(original)
    def get_logits(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        kernels = self.punica_wrapper
        if hidden_states.shape[0] == kernels.sampler_indices.shape[0]:
            return original(self, hidden_states, *args, **options)
        self.punica_wrapper = NoHeadAdapter()
        try:
            return original(self, hidden_states, *args, **options)
        finally:
            self.punica_wrapper = kernels

    return get_logits

"""The same model in transformers and as a Policy: variants that transformers itself writes, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
)
SMALL = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}


def tokens(vocab: int, batch: int = 2, length: int = 40, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)
    )


def config_of(family: str, **fields: Any) -> Any:
    """transformers' own config."""
    import transformers

    return getattr(transformers, CONFIGS[family])(**fields)


def written(folder: Path, family: str, **fields: Any) -> str:
    """A random model that transformers makes and saves: weights and norms far from their first values."""
    import torch
    import transformers

    config = config_of(family, **{**SMALL, **fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    return str(folder)


def reference(path: str, dtype: torch.dtype | None = None) -> Any:
    """transformers' model. Eager attention: the only one there that applies gemma2's soft-cap."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or torch.float32, attn_implementation="eager"
    ).eval()


def reference_logits(
    model: Any, ids: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    import torch

    options = (
        {} if mask is None else {"attention_mask": torch.tensor(mask.astype(np.int64))}
    )
    with torch.no_grad():
        return (
            model(torch.tensor(ids.astype(np.int64)), **options).logits.float().numpy()
        )


def gap(ours: Any, theirs: Any) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())

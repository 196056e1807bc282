"""Tiny configs of the architectures that vLLM's CPU build supports, for `arrivals`: two layers each, random weights.

Sizes are the smallest that the CPU kernels support: heads of 32, experts' widths divisible by 32.
"""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_BASE, "num_key_value_heads": 1, "head_dim": 32}
_EXPERTS: dict[str, Any] = {
    **_GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LOCAL = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    # dense, rotary
    "llama": {**_GROUPED, "attention_bias": True, "mlp_bias": True},
    "mistral": _GROUPED,
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": _GROUPED,
    "gemma2": {**_GROUPED, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {**_GROUPED, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "phi": {**_BASE, "num_key_value_heads": 2, "vocab_size": 192},
    "phi3": {**_GROUPED, "original_max_position_embeddings": 64},
    "olmo2": _GROUPED,
    "gpt_neox": _BASE,
    "gptj": {**_BASE, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 96, "rotary_dim": 16},
    "stablelm": {**_GROUPED, "use_qkv_bias": True},
    "starcoder2": {**_GROUPED, "use_bias": True, "tie_word_embeddings": True},
    "granite": _GROUPED,
    "cohere": {**_GROUPED, "use_qk_norm": True, "tie_word_embeddings": True},
    "glm4": {**_GROUPED, "attention_bias": True},
    "nemotron": _GROUPED,
    "falcon": {**_BASE, "new_decoder_architecture": False, "multi_query": True, "bias": True},
    # dense, learned positions or ALiBi
    "gpt2": {**_BASE, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "tie_word_embeddings": True},
    "opt": {**_BASE, "ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    "bloom": {**_BASE, "n_layer": 2, "n_head": 2, "tie_word_embeddings": True},
    # experts
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "layer_types": _LOCAL,
    },
    "glm4_moe": {
        **_GROUPED, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True,
    },
}  # fmt: skip
# Another dtype: some layers cache converted weights, which they do not need in float32. All experts are selected, since
# rounding could change the selection. (On ARM, experts in bfloat16 need instructions that not every machine has.)
FAMILIES |= {
    "gpt_oss@float16": {
        **FAMILIES["gpt_oss"],
        "dtype": "float16",
        "num_experts_per_tok": 4,
    },
}


# Kinds without an observable effect, with the reason; by the end of a kind's name, and its family ("": all).
_UNOBSERVABLE: dict[tuple[str, str], str] = {
    (
        "self_attn.k_proj.bias",
        "opt",
    ): "adds the same to a query's score with every key, which softmax takes away again",
}


def why_unobservable(family: str, kind: str) -> str:
    """Why a change of this kind has no effect on log-probabilities; empty if it should have one."""
    for (ending, of), why in _UNOBSERVABLE.items():
        if kind.endswith(ending) and of in ("", family.partition("@")[0]):
            return f"cannot be seen: {why}"
    return ""

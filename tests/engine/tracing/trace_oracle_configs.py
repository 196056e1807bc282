"""Small configs of families that `jvlab.trainer.models.tiny` does not write, for the tracer's tests."""

from __future__ import annotations

from typing import Any

# families that it writes
TINY = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "mixtral",
    "olmo2",
    "gpt2",
)

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        **_COMMON, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "num_hidden_layers": 3,
    },
    "qwen3_moe": {  # layer 0 dense, the others of experts
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 5,
        "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "deepseek_v3": {  # layer 0 dense, the others of experts; latent attention
        **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 5,
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True,
    },
    "deepseek_v2": {  # as its Lite: queries not compressed, two shared experts
        **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 4,
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1,
    },
    "olmoe": {  # norms over all heads at once
        **_COMMON, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_hidden_layers": 3,
        "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    },
    # its loader makes lm_head.bias while it loads; before vLLM 0.32 it took no other intermediate size
    "phi": {
        **_COMMON, "architectures": ["PhiForCausalLM"], "model_type": "phi", "num_hidden_layers": 2,
        "intermediate_size": 256,
    },
    # its constructor computes with real numbers; query, key and value are interleaved by head
    "bloom": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 320, "hidden_size": 64,
        "n_layer": 4, "n_head": 4, "tie_word_embeddings": True,
    },
    # a vocabulary that vLLM pads, more so at TP; KV heads fewer than ranks; tied
    "odd_vocab": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
        "vocab_size": 203, "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip

"""Eleven families of tiny models as data: the config and the tensors that real checkpoints of each have on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]  # of config.json; `tiny` checks what a user gives
# The tokenizer's first ids: <|pad|>, <|bos|>, <|endoftext|>, <|im_start|>, <|im_end|>
PAD_ID, BOS_ID, EOS_ID, _, TURN_END_ID = range(5)


@dataclass(frozen=True)
class Init:
    """How to draw one tensor: normal(mean, std)."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def head_dim(config: Config) -> int:
    return config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )


def _linear(out: int, into: int, gain: float = 1.0) -> Init:
    return Init((out, into), gain * into**-0.5)


# q and k are drawn twice as large as for unit variance: attention is then peaked, and outputs depend on the context,
# not only on the last token.
_SHARP = 2.0

# Norms of a layer, over the model's width, with the mean of their weights. gemma stores w and scales by 1 + w; its
# embeddings are scaled by sqrt(hidden) and tied to the outputs, so they are drawn small and the norms of its blocks'
# outputs large: else the model would repeat its last token forever.
_NORMS = {"input_layernorm": 1.0, "post_attention_layernorm": 1.0}
_NORMS_GEMMA = {
    "input_layernorm": 0.0,
    "post_attention_layernorm": 4.0,
    "pre_feedforward_layernorm": 0.0,
    "post_feedforward_layernorm": 4.0,
}
_NORMS_OLMO2 = {"post_attention_layernorm": 1.0, "post_feedforward_layernorm": 1.0}

# by family: how config.json and the checkpoint call them: number, width, block; gate, up, down
_EXPERTS = {
    "mixtral": (
        "num_local_experts",
        "intermediate_size",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        "num_experts",
        "moe_intermediate_size",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def tensors(config: Config) -> Iterator[tuple[str, Init]]:
    """What a checkpoint with this config holds, by name."""
    if config["model_type"] == "gpt2":
        yield from _gpt2(config)
        return
    kind: str = config["model_type"]
    hidden = config["hidden_size"]
    gemma = kind.startswith("gemma")
    norms = _NORMS_OLMO2 if kind == "olmo2" else _NORMS_GEMMA if gemma else _NORMS
    # gives logits a standard deviation of about 2: sampling varies, and greedy decoding is not near-random
    table = Init((config["vocab_size"], hidden), (0.5 if gemma else 2.0) * hidden**-0.5)
    yield "model.embed_tokens.weight", table
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", table
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, mean in norms.items():
            yield f"{at}{name}.weight", Init((hidden,), 0.1, mean)
        yield from _attention(config, f"{at}self_attn.")
        yield from _experts(config, at) if kind in _EXPERTS else _mlp(config, at)
    yield "model.norm.weight", Init((hidden,), 0.1, 3.0 if gemma else 1.0)


def _attention(config: Config, at: str) -> Iterator[tuple[str, Init]]:
    kind = config["model_type"]
    hidden = config["hidden_size"]
    dim = head_dim(config)
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    yield f"{at}o_proj.weight", _linear(hidden, q)
    if kind == "phi3":  # in one tensor
        yield f"{at}qkv_proj.weight", _linear(q + 2 * kv, hidden, 1.5)
        return
    for name, out, gain in (("q", q, _SHARP), ("k", kv, _SHARP), ("v", kv, 1.0)):
        yield f"{at}{name}_proj.weight", _linear(out, hidden, gain)
        if kind == "qwen2":
            yield f"{at}{name}_proj.bias", Init((out,), 0.1)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"):
        over_all = kind == "olmo2"
        yield f"{at}q_norm.weight", Init((q if over_all else dim,), 0.1, 1.0)
        yield f"{at}k_norm.weight", Init((kv if over_all else dim,), 0.1, 1.0)


def _mlp(config: Config, at: str) -> Iterator[tuple[str, Init]]:
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    if config["model_type"] == "phi3":
        yield f"{at}mlp.gate_up_proj.weight", _linear(2 * inner, hidden)
    else:
        yield f"{at}mlp.gate_proj.weight", _linear(inner, hidden)
        yield f"{at}mlp.up_proj.weight", _linear(inner, hidden)
    yield f"{at}mlp.down_proj.weight", _linear(hidden, inner, 2.0)


def _experts(config: Config, at: str) -> Iterator[tuple[str, Init]]:
    number, width, block, (gate, up, down) = _EXPERTS[config["model_type"]]
    hidden = config["hidden_size"]
    inner = config[width]
    yield f"{at}{block}.gate.weight", _linear(config[number], hidden)
    for e in range(config[number]):
        expert = f"{at}{block}.experts.{e}."
        yield f"{expert}{gate}.weight", _linear(inner, hidden)
        yield f"{expert}{up}.weight", _linear(inner, hidden)
        yield f"{expert}{down}.weight", _linear(hidden, inner, 2.0)


def _gpt2(config: Config) -> Iterator[tuple[str, Init]]:
    """Weights stored as (in, out), q, k, v in one tensor, learned positions."""
    hidden = config["n_embd"]
    inner = config["n_inner"]
    table = Init((config["vocab_size"], hidden), 2 * hidden**-0.5)
    yield "wte.weight", table
    yield "wpe.weight", Init((config["n_positions"], hidden), 2 * hidden**-0.5)
    norms = ["ln_f"]
    for i in range(config["n_layer"]):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        for name, into, out, gain in (
            ("attn.c_attn", hidden, 3 * hidden, _SHARP),
            ("attn.c_proj", hidden, hidden, 2.0),
            ("mlp.c_fc", hidden, inner, 2.0),
            ("mlp.c_proj", inner, hidden, 2.0),
        ):
            yield f"h.{i}.{name}.weight", Init((into, out), gain * into**-0.5)
            yield f"h.{i}.{name}.bias", Init((out,), 0.1)
    for name in norms:
        yield f"{name}.weight", Init((hidden,), 0.1, 1.0)
        yield f"{name}.bias", Init((hidden,), 0.1)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", table


_LAST: Config = {
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
# Head size 32 is the smallest that vLLM's CPU attention supports; 4 and 2 heads both split under tensor parallelism 2.
_COMMON: Config = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    **_LAST,
}
_BIASES: Config = {"attention_bias": False}
_GEMMA: Config = {
    **{k: v for k, v in _COMMON.items() if k != "hidden_act"},
    **_BIASES,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 256,
}
_GPT2: Config = {
    "vocab_size": 2048,
    "n_embd": 128,
    "n_inner": 512,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 2048,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": True,
    **_LAST,
}
GPT2_NAMES = {  # the common name -> gpt2's own
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _family(architecture: str, model_type: str, *parts: Config) -> Config:
    config: Config = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        config |= part
    return {**config, "dtype": "float32"}


FAMILIES: dict[str, Config] = {
    "llama": _family("LlamaForCausalLM", "llama", _COMMON, _BIASES, {"head_dim": 32, "mlp_bias": False}),
    "qwen2": _family(
        "Qwen2ForCausalLM", "qwen2", _COMMON, {"use_sliding_window": False, "sliding_window": None}
    ),
    "qwen3": _family("Qwen3ForCausalLM", "qwen3", _COMMON, _BIASES, {"head_dim": 32, "sliding_window": None}),
    "gemma2": _family(
        "Gemma2ForCausalLM", "gemma2", _GEMMA, {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    ),
    "gemma3": _family(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA, {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    ),
    "mistral": _family("MistralForCausalLM", "mistral", _COMMON, {"head_dim": 32, "sliding_window": None}),
    "phi3": _family(
        "Phi3ForCausalLM", "phi3", _COMMON,
        {"original_max_position_embeddings": 2048, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": None},
    ),
    "mixtral": _family(
        "MixtralForCausalLM", "mixtral", _COMMON,
        {"intermediate_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM", "qwen3_moe", _COMMON, _BIASES,
        {
            "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "sliding_window": None,
        },
    ),
    "olmo2": _family("Olmo2ForCausalLM", "olmo2", _COMMON, _BIASES),
    "gpt2": _family("GPT2LMHeadModel", "gpt2", _GPT2),
}  # fmt: skip

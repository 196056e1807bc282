"""Eleven families of tiny models as data: the config and the tensors that real checkpoints of each have on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Family:
    """A model family: default config, and its tensors by checkpoint name."""

    architecture: str
    config: Config
    tensors: Callable[[Config], Iterator[tuple[str, Init]]]


def head_dim(config: Config) -> int:
    return config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )


def _linear(out: int, into: int, gain: float = 1.0) -> Init:
    return Init((out, into), gain * into**-0.5)


def _norm(width: int, mean: float = 1.0) -> Init:
    return Init((width,), 0.1, mean)


def _bias(width: int) -> Init:
    return Init((width,), 0.1)


def _embeddings(config: Config, gain: float = 2.0) -> Iterator[tuple[str, Init]]:
    """Gives logits a standard deviation of about 2: sampling varies, and greedy decoding is not near-random."""
    vocab = config["vocab_size"]
    hidden = config["hidden_size"]
    table = Init((vocab, hidden), gain * hidden**-0.5)
    yield "model.embed_tokens.weight", table
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", table


# q and k are drawn twice as large as for unit variance: attention is then peaked, and outputs depend on the context,
# not only on the last token.
_SHARP = 2.0


def _attention(
    config: Config, at: str, bias: bool = False
) -> Iterator[tuple[str, Init]]:
    hidden = config["hidden_size"]
    dim = head_dim(config)
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    for name, out, gain in (
        ("q_proj", q, _SHARP),
        ("k_proj", kv, _SHARP),
        ("v_proj", kv, 1.0),
    ):
        yield f"{at}{name}.weight", _linear(out, hidden, gain)
        if bias:
            yield f"{at}{name}.bias", _bias(out)
    yield f"{at}o_proj.weight", _linear(hidden, q)


def _mlp(config: Config, at: str) -> Iterator[tuple[str, Init]]:
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    yield f"{at}gate_proj.weight", _linear(inner, hidden)
    yield f"{at}up_proj.weight", _linear(inner, hidden)
    yield f"{at}down_proj.weight", _linear(hidden, inner, 2.0)


def _layers(config: Config) -> Iterator[str]:
    return (f"model.layers.{i}." for i in range(config["num_hidden_layers"]))


def _llama(config: Config) -> Iterator[tuple[str, Init]]:
    """llama, mistral; qwen2 with biases on q, k, v; qwen3 with norms of q and k."""
    hidden = config["hidden_size"]
    kind = config["model_type"]
    yield from _embeddings(config)
    for at in _layers(config):
        yield f"{at}input_layernorm.weight", _norm(hidden)
        yield from _attention(config, f"{at}self_attn.", bias=kind == "qwen2")
        if kind == "qwen3":
            yield f"{at}self_attn.q_norm.weight", _norm(head_dim(config))
            yield f"{at}self_attn.k_norm.weight", _norm(head_dim(config))
        yield f"{at}post_attention_layernorm.weight", _norm(hidden)
        yield from _mlp(config, f"{at}mlp.")
    yield "model.norm.weight", _norm(hidden)


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


def _experts(config: Config) -> Iterator[tuple[str, Init]]:
    """mixtral; qwen3_moe with norms of q and k."""
    kind = str(config["model_type"])
    number, width, block, names = _EXPERTS[kind]
    hidden = config["hidden_size"]
    inner = config[width]
    experts = config[number]
    yield from _embeddings(config)
    for at in _layers(config):
        yield f"{at}input_layernorm.weight", _norm(hidden)
        yield from _attention(config, f"{at}self_attn.")
        if kind == "qwen3_moe":
            yield f"{at}self_attn.q_norm.weight", _norm(head_dim(config))
            yield f"{at}self_attn.k_norm.weight", _norm(head_dim(config))
        yield f"{at}post_attention_layernorm.weight", _norm(hidden)
        yield f"{at}{block}.gate.weight", _linear(experts, hidden)
        for e in range(experts):
            gate, up, down = (
                f"{at}{block}.experts.{e}.{name}.weight" for name in names
            )
            yield gate, _linear(inner, hidden)
            yield up, _linear(inner, hidden)
            yield down, _linear(hidden, inner, 2.0)
    yield "model.norm.weight", _norm(hidden)


def _phi3(config: Config) -> Iterator[tuple[str, Init]]:
    """q, k, v in one tensor, and gate and up in another."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = head_dim(config)
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    yield from _embeddings(config)
    for at in _layers(config):
        yield f"{at}input_layernorm.weight", _norm(hidden)
        yield f"{at}self_attn.qkv_proj.weight", _linear(q + 2 * kv, hidden, 1.5)
        yield f"{at}self_attn.o_proj.weight", _linear(hidden, q)
        yield f"{at}post_attention_layernorm.weight", _norm(hidden)
        yield f"{at}mlp.gate_up_proj.weight", _linear(2 * inner, hidden)
        yield f"{at}mlp.down_proj.weight", _linear(hidden, inner, 2.0)
    yield "model.norm.weight", _norm(hidden)


def _gemma(config: Config) -> Iterator[tuple[str, Init]]:
    """gemma2; gemma3 with norms of q and k. A stored norm weight w scales by 1 + w.

    Embeddings are scaled by sqrt(hidden) and tied to the outputs, so they are drawn small and the blocks' norms large:
    else the model would repeat its last token forever.
    """
    hidden = config["hidden_size"]
    yield from _embeddings(config, gain=0.5)
    for at in _layers(config):
        yield f"{at}input_layernorm.weight", _norm(hidden, 0.0)
        yield from _attention(config, f"{at}self_attn.")
        if config["model_type"] == "gemma3_text":
            yield f"{at}self_attn.q_norm.weight", _norm(head_dim(config), 1.0)
            yield f"{at}self_attn.k_norm.weight", _norm(head_dim(config), 1.0)
        yield f"{at}post_attention_layernorm.weight", _norm(hidden, 4.0)
        yield f"{at}pre_feedforward_layernorm.weight", _norm(hidden, 0.0)
        yield f"{at}post_feedforward_layernorm.weight", _norm(hidden, 4.0)
        yield from _mlp(config, f"{at}mlp.")
    yield "model.norm.weight", _norm(hidden, 3.0)


def _olmo2(config: Config) -> Iterator[tuple[str, Init]]:
    """Norms after the blocks, and over all heads of q and k."""
    hidden = config["hidden_size"]
    dim = head_dim(config)
    yield from _embeddings(config)
    for at in _layers(config):
        yield from _attention(config, f"{at}self_attn.")
        yield (
            f"{at}self_attn.q_norm.weight",
            _norm(config["num_attention_heads"] * dim),
        )
        yield (
            f"{at}self_attn.k_norm.weight",
            _norm(config["num_key_value_heads"] * dim),
        )
        yield f"{at}post_attention_layernorm.weight", _norm(hidden)
        yield from _mlp(config, f"{at}mlp.")
        yield f"{at}post_feedforward_layernorm.weight", _norm(hidden)
    yield "model.norm.weight", _norm(hidden)


def _gpt2(config: Config) -> Iterator[tuple[str, Init]]:
    """Weights stored as (in, out), q, k, v in one tensor, learned positions."""
    hidden = config["n_embd"]
    inner = config["n_inner"]
    yield "wte.weight", Init((config["vocab_size"], hidden), 2 * hidden**-0.5)
    yield "wpe.weight", Init((config["n_positions"], hidden), 2 * hidden**-0.5)
    for i in range(config["n_layer"]):
        at = f"h.{i}."
        for norm in ("ln_1", "ln_2"):
            yield f"{at}{norm}.weight", _norm(hidden)
            yield f"{at}{norm}.bias", _bias(hidden)
        for name, into, out, gain in (
            ("attn.c_attn", hidden, 3 * hidden, _SHARP),
            ("attn.c_proj", hidden, hidden, 2.0),
            ("mlp.c_fc", hidden, inner, 2.0),
            ("mlp.c_proj", inner, hidden, 2.0),
        ):
            yield f"{at}{name}.weight", Init((into, out), gain * into**-0.5)
            yield f"{at}{name}.bias", _bias(out)
    yield "ln_f.weight", _norm(hidden)
    yield "ln_f.bias", _bias(hidden)
    if not config["tie_word_embeddings"]:
        yield (
            "lm_head.weight",
            Init((config["vocab_size"], hidden), 2 * hidden**-0.5),
        )


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
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
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
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
GPT2_NAMES = {  # the common name -> gpt2's own
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _family(
    architecture: str,
    model_type: str,
    tensors: Callable[[Config], Iterator[tuple[str, Init]]],
    *parts: Config,
) -> Family:
    config: Config = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        config |= part
    return Family(architecture, {**config, "dtype": "float32"}, tensors)


FAMILIES: dict[str, Family] = {
    "llama": _family("LlamaForCausalLM", "llama", _llama, _COMMON, _BIASES, {"head_dim": 32, "mlp_bias": False}),
    "qwen2": _family(
        "Qwen2ForCausalLM", "qwen2", _llama, _COMMON, {"use_sliding_window": False, "sliding_window": None}
    ),
    "qwen3": _family("Qwen3ForCausalLM", "qwen3", _llama, _COMMON, _BIASES, {"head_dim": 32, "sliding_window": None}),
    "gemma2": _family(
        "Gemma2ForCausalLM", "gemma2", _gemma, _GEMMA, {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    ),
    "gemma3": _family(
        "Gemma3ForCausalLM", "gemma3_text", _gemma, _GEMMA, {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    ),
    "mistral": _family("MistralForCausalLM", "mistral", _llama, _COMMON, {"head_dim": 32, "sliding_window": None}),
    "phi3": _family(
        "Phi3ForCausalLM", "phi3", _phi3, _COMMON,
        {"original_max_position_embeddings": 2048, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": None},
    ),
    "mixtral": _family(
        "MixtralForCausalLM", "mixtral", _experts, _COMMON,
        {"intermediate_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM", "qwen3_moe", _experts, _COMMON, _BIASES,
        {
            "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "sliding_window": None,
        },
    ),
    "olmo2": _family("Olmo2ForCausalLM", "olmo2", _olmo2, _COMMON, _BIASES),
    "gpt2": _family("GPT2LMHeadModel", "gpt2", _gpt2, _GPT2),
}  # fmt: skip

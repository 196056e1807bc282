"""The texts of every built-in rule set: jvlab's own Policy layout by family, and the trees of other projects.

The Policy layout, as `policy.<family>` binds it. `jv.Policy` stores it with layers stacked, `policy.<family>.scanned`:
without `{i}` in the name and with `i` as the first axis, `layers.attn.q.kernel  i d n h`.

    embed.embedding  v d               layers.{i}.attn.q.kernel      d n h   (bias n h)
    pos_embed.embedding  p d  (gpt2)   layers.{i}.attn.{k,v}.kernel  d k h   (bias k h)
    final_norm.scale  d                layers.{i}.attn.o.kernel      n h d   (bias d)
    lm_head.kernel  d v  (untied)      layers.{i}.attn.{q,k}_norm.scale
    layers.{i}.{attn_norm,post_attn_norm,mlp_norm,post_mlp_norm}.scale  d, and .bias where the family has one
    layers.{i}.mlp.{gate,up}.kernel  d f     layers.{i}.mlp.down.kernel  f d      (bias where the family has one)
    layers.{i}.moe.router.kernel  d e     layers.{i}.moe.{gate,up}.kernel  e d f     layers.{i}.moe.down.kernel  e f d

Norm scales are stored as the checkpoint stores them (Gemma's forward adds 1 to them).
"""

from __future__ import annotations

_HEAD = """
embed.embedding -> model.embed_tokens.weight, lm_head.weight?
lm_head.kernel -> lm_head.weight : d v -> v d
final_norm.scale -> model.norm.weight
"""
_ATTENTION = """
layers.{i}.attn.q.kernel -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d
layers.{i}.attn.[k|v].kernel -> model.layers.{i}.self_attn.[k|v]_proj.weight : d k h -> (k h) d
layers.{i}.attn.o.kernel -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
layers.{i}.attn.q.bias -> model.layers.{i}.self_attn.q_proj.bias : n h -> (n h)
layers.{i}.attn.[k|v].bias -> model.layers.{i}.self_attn.[k|v]_proj.bias : k h -> (k h)
layers.{i}.attn.o.bias -> model.layers.{i}.self_attn.o_proj.bias
layers.{i}.attn.[q|k]_norm.scale -> model.layers.{i}.self_attn.[q|k]_norm.weight
"""
_MLP = """
layers.{i}.mlp.[gate|up|down].kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a b -> b a
layers.{i}.mlp.[gate|up|down].bias -> model.layers.{i}.mlp.[gate|up|down]_proj.bias
"""
_PRE_NORMS = """
layers.{i}.[attn|mlp]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight
"""
_SANDWICH_NORMS = """
layers.{i}.[attn|post_attn]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight
layers.{i}.[mlp|post_mlp]_norm.scale -> model.layers.{i}.[pre|post]_feedforward_layernorm.weight
"""
_POST_NORMS = """
layers.{i}.[post_attn|post_mlp]_norm.scale -> model.layers.{i}.[post_attention|post_feedforward]_layernorm.weight
"""
_PHI3 = """
layers.{i}.attn.[q|k|v].kernel -> model.layers.{i}.self_attn.qkv_proj.weight : d [n|k|k] h -> [n h|k h|k h] d
layers.{i}.attn.o.kernel -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
layers.{i}.mlp.[gate|up].kernel -> model.layers.{i}.mlp.gate_up_proj.weight : d f -> [f|f] d
layers.{i}.mlp.down.kernel -> model.layers.{i}.mlp.down_proj.weight : f d -> d f
"""
_MIXTRAL = """
layers.{i}.moe.router.kernel -> model.layers.{i}.block_sparse_moe.gate.weight : d e -> e d
layers.{i}.moe.[gate|down|up].kernel -> model.layers.{i}.block_sparse_moe.experts.{e}.w[1|2|3].weight : e a b -> b a
"""
_QWEN3_MOE = """
layers.{i}.moe.router.kernel -> model.layers.{i}.mlp.gate.weight : d e -> e d
layers.{i}.moe.[gate|up|down].kernel -> model.layers.{i}.mlp.experts.{e}.[gate|up|down]_proj.weight : e a b -> b a
"""
_GPT2 = """
embed.embedding -> transformer.wte.weight, lm_head.weight?
pos_embed.embedding -> transformer.wpe.weight
lm_head.kernel -> lm_head.weight : d v -> v d
final_norm.[scale|bias] -> transformer.ln_f.[weight|bias]
layers.{i}.attn_norm.[scale|bias] -> transformer.h.{i}.ln_1.[weight|bias]
layers.{i}.mlp_norm.[scale|bias] -> transformer.h.{i}.ln_2.[weight|bias]
layers.{i}.attn.[q|k|v].kernel -> transformer.h.{i}.attn.c_attn.weight : d n h -> d [n h|n h|n h]
layers.{i}.attn.[q|k|v].bias -> transformer.h.{i}.attn.c_attn.bias : n h -> [n h|n h|n h]
layers.{i}.attn.o.kernel -> transformer.h.{i}.attn.c_proj.weight : n h d -> (n h) d
layers.{i}.attn.o.bias -> transformer.h.{i}.attn.c_proj.bias
layers.{i}.mlp.[up|down].kernel -> transformer.h.{i}.mlp.[c_fc|c_proj].weight
layers.{i}.mlp.[up|down].bias -> transformer.h.{i}.mlp.[c_fc|c_proj].bias
"""
_GPT_NEOX = """
embed.embedding -> gpt_neox.embed_in.weight, embed_out.weight?
lm_head.kernel -> embed_out.weight : d v -> v d
final_norm.[scale|bias] -> gpt_neox.final_layer_norm.[weight|bias]
layers.{i}.attn_norm.[scale|bias] -> gpt_neox.layers.{i}.input_layernorm.[weight|bias]
layers.{i}.mlp_norm.[scale|bias] -> gpt_neox.layers.{i}.post_attention_layernorm.[weight|bias]
layers.{i}.attn.[q|k|v].kernel -> gpt_neox.layers.{i}.attention.query_key_value.weight : d n h -> (n [1|1|1] h) d
layers.{i}.attn.[q|k|v].bias -> gpt_neox.layers.{i}.attention.query_key_value.bias : n h -> (n [1|1|1] h)
layers.{i}.attn.o.kernel -> gpt_neox.layers.{i}.attention.dense.weight : n h d -> d (n h)
layers.{i}.attn.o.bias -> gpt_neox.layers.{i}.attention.dense.bias
layers.{i}.mlp.[up|down].kernel -> gpt_neox.layers.{i}.mlp.[dense_h_to_4h|dense_4h_to_h].weight : a b -> b a
layers.{i}.mlp.[up|down].bias -> gpt_neox.layers.{i}.mlp.[dense_h_to_4h|dense_4h_to_h].bias
"""
_LLAMA = _HEAD + _ATTENTION + _MLP + _PRE_NORMS
POLICY = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text"), _HEAD + _ATTENTION + _MLP + _SANDWICH_NORMS
    ),
    "olmo2": _HEAD + _ATTENTION + _MLP + _POST_NORMS,
    "phi3": _HEAD + _PHI3 + _PRE_NORMS,
    "mixtral": _HEAD + _ATTENTION + _MIXTRAL + _PRE_NORMS,
    # dense layers among the sparse ones (mlp_only_layers) keep their mlp rules
    "qwen3_moe": _HEAD + _ATTENTION + _QWEN3_MOE + _MLP + _PRE_NORMS,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
}
NOT_STACKED = ("gpt2", "gpt_neox")  # no `jv.Policy` trains them

_TUNIX_SHARED = """
embedder.input_embedding -> model.embed_tokens.weight, lm_head.weight?
layers.{i}.mlp.[gate|up|down]_proj.kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a b -> b a
"""
# tunix's Llama and Qwen: einsum weights `w`; biases flat, as in the checkpoint; experts stacked
_TUNIX_LLAMA = """
lm_head.w -> lm_head.weight : d v -> v d
final_norm.w -> model.norm.weight
layers.{i}.attn.q_proj.w -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d
layers.{i}.attn.[k|v]_proj.w -> model.layers.{i}.self_attn.[k|v]_proj.weight : d k h -> (k h) d
layers.{i}.attn.o_proj.w -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
layers.{i}.attn.[q|k|v]_bias -> model.layers.{i}.self_attn.[q|k|v]_proj.bias
layers.{i}.attn.[q|k]_norm.w -> model.layers.{i}.self_attn.[q|k]_norm.weight
layers.{i}.mlp.router.kernel -> model.layers.{i}.mlp.gate.weight : d e -> e d
layers.{i}.mlp.[gate|up|down]_proj -> model.layers.{i}.mlp.experts.{e}.[gate|up|down]_proj.weight : e a b -> b a
layers.{i}.[input|post_attention]_layernorm.w -> model.layers.{i}.[input|post_attention]_layernorm.weight
"""
# n d h einsums, key and value stacked, or all three where there are as many key as query heads
_EINSUMS = """
final_norm.scale -> model.norm.weight
LAYER.attn.q_einsum.w -> model.layers.{i}.self_attn.q_proj.weight : n d h -> (n h) d
LAYER.attn.kv_einsum.w -> model.layers.{i}.self_attn.[k|v]_proj.weight : [1|1] k d h -> (k h) d
LAYER.attn.qkv_einsum.w -> model.layers.{i}.self_attn.[q|k|v]_proj.weight : [1|1|1] n d h -> (n h) d
LAYER.attn.attn_vec_einsum.w -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
LAYER.attn.[_query|_key]_norm.scale -> model.layers.{i}.self_attn.[q|k]_norm.weight
LAYER.pre_attention_norm.scale -> model.layers.{i}.input_layernorm.weight
"""
_GEMMA1_NORMS = (
    "LAYER.pre_ffw_norm.scale -> model.layers.{i}.post_attention_layernorm.weight\n"
)
_GEMMA2_NORMS = """
LAYER.post_attention_norm.scale -> model.layers.{i}.post_attention_layernorm.weight
LAYER.[pre|post]_ffw_norm.scale -> model.layers.{i}.[pre|post]_feedforward_layernorm.weight
"""
# Gemma 2's name
_TUNIX_NORMS = "layers.{i}.post_attn_norm.scale -> model.layers.{i}.post_attention_layernorm.weight\n"
_GATING = """
embedder.input_embedding -> model.embed_tokens.weight, lm_head.weight?
LAYER.mlp.gating_einsum.w -> model.layers.{i}.mlp.[gate|up]_proj.weight : [1|1] f d -> f d
LAYER.mlp.linear.w -> model.layers.{i}.mlp.down_proj.weight : f d -> d f
"""
_MAXTEXT = """
token_embedder.embedding -> model.embed_tokens.weight, lm_head.weight?
decoder.logits_dense.kernel -> lm_head.weight : d v -> v d
decoder.decoder_norm.scale -> model.norm.weight
"""
# scanned on axis 1: `decoder.layers`; unscanned: `decoder.layers_0`
_MAXTEXT_LAYER = """
decoder.layers.self_attention.query.kernel -> model.layers.{i}.self_attn.q_proj.weight : d i n h -> (n h) d
decoder.layers.self_attention.[key|value].kernel -> model.layers.{i}.self_attn.[k|v]_proj.weight : d i k h -> (k h) d
decoder.layers.self_attention.out.kernel -> model.layers.{i}.self_attn.o_proj.weight : n i h d -> d (n h)
decoder.layers.self_attention.query.bias -> model.layers.{i}.self_attn.q_proj.bias : n i h -> (n h)
decoder.layers.self_attention.[key|value].bias -> model.layers.{i}.self_attn.[k|v]_proj.bias : k i h -> (k h)
decoder.layers.self_attention.[query|key]_norm.scale -> model.layers.{i}.self_attn.[q|k]_norm.weight : d i -> d
decoder.layers.mlp.[wi_0|wi_1|wo].kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a i b -> b a
decoder.layers.moe_block.gate.kernel -> model.layers.{i}.mlp.gate.weight : d i e -> e d
decoder.layers.moe_block.[wi_0|wi_1|wo] -> model.layers.{i}.mlp.experts.{e}.[gate|up|down]_proj.weight : e i a b -> b a
decoder.layers.MoeBlock_0.gate.kernel -> SPARSE.gate.weight : d i e -> e d
decoder.layers.MoeBlock_0.[wi_0|wo|wi_1] -> SPARSE.experts.{e}.w[1|2|3].weight : e i a b -> b a
decoder.layers.pre_self_attention_layer_norm.scale -> model.layers.{i}.input_layernorm.weight : d i -> d
decoder.layers.post_self_attention_layer_norm.scale -> model.layers.{i}.post_attention_layernorm.weight : d i -> d
""".replace("SPARSE", "model.layers.{i}.block_sparse_moe")


def _unscanned(text: str) -> str:
    """The same rules unscanned: no layer axis, the layer number in the name."""
    lines = []
    for line in text.strip().splitlines():
        names, _, axes = line.partition(" : ")
        left, _, right = axes.partition(" -> ")
        alone = " ".join(a for a in left.split() if a != "i")
        lines.append(
            f"{names.replace('decoder.layers.', 'decoder.layers_{i}.')} : {alone} -> {right}"
        )
    return "\n".join(lines) + "\n"


def _gemma(layer: str, *texts: str) -> str:
    return "".join(texts).replace("LAYER", layer)


_TUNIX_GEMMA = _gemma(
    "layers.{i}", _TUNIX_SHARED, _EINSUMS, _TUNIX_NORMS, _GEMMA2_NORMS
)
BY_FAMILY = {  # a preset's variant for one family, where names alone do not show it
    ("tunix", "llama"): _TUNIX_SHARED + _TUNIX_LLAMA,
    ("tunix", "gemma"): _gemma("layers.{i}", _TUNIX_SHARED, _EINSUMS, _GEMMA1_NORMS),
    ("tunix", "gemma2"): _TUNIX_GEMMA,
    ("tunix", "gemma3"): _gemma("layers.{i}", _TUNIX_SHARED, _EINSUMS, _GEMMA2_NORMS),
    ("gemma", "gemma"): _gemma("layer_{i}", _GATING, _EINSUMS, _GEMMA1_NORMS),
}

PRESETS: dict[str, str] = {
    "checkpoint": "{path*} -> {path*}",
    # a Dense kernel is in × out; GPT-2's Conv1D is transposed on both sides
    "hf_flax": """
        {path*}.kernel -> {path*}.weight : a b -> b a
        {path*}.embedding -> {path*}.weight
        {path*}.scale -> {path*}.weight
        {path*} -> {path*}
    """,
    "maxtext": _MAXTEXT + _MAXTEXT_LAYER + _unscanned(_MAXTEXT_LAYER),
    "tunix": _TUNIX_SHARED
    + _TUNIX_LLAMA
    + _gemma("layers.{i}", _EINSUMS, _TUNIX_NORMS, _GEMMA2_NORMS),
    "gemma": _gemma("layer_{i}", _GATING, _EINSUMS, _GEMMA2_NORMS),
}

"""Built-in rule sets: checkpoint-named trees, jvlab's own Policy layout for each family, and common Flax layouts.

The Policy layout (what `jv.Policy` stores, and what `policy.<family>` binds):

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

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jvlab._errors import ConfigError
from jvlab.layout._check import check
from jvlab.layout._grammar import parse_line
from jvlab.layout._ruleset import Rules
from jvlab.layout._syntax import Ax, Index, Name, Part, Rule, rule_text

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
_POLICY = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _HEAD + _ATTENTION + _MLP + _SANDWICH_NORMS),
    "olmo2": _HEAD + _ATTENTION + _MLP + _POST_NORMS,
    "phi3": _HEAD + _PHI3 + _PRE_NORMS,
    "mixtral": _HEAD + _ATTENTION + _MIXTRAL + _PRE_NORMS,
    # dense layers among the sparse ones (mlp_only_layers) keep their mlp rules
    "qwen3_moe": _HEAD + _ATTENTION + _QWEN3_MOE + _MLP + _PRE_NORMS,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
}
# MaxText's names and axes, scanned on axis 1. Its converters may also divide q by sqrt(h): a rule cannot undo that.
_MAXTEXT = """
token_embedder.embedding -> model.embed_tokens.weight, lm_head.weight?
decoder.logits_dense.kernel -> lm_head.weight : d v -> v d
decoder.decoder_norm.scale -> model.norm.weight
decoder.layers.self_attention.query.kernel -> model.layers.{i}.self_attn.q_proj.weight : d i n h -> (n h) d
decoder.layers.self_attention.[key|value].kernel -> model.layers.{i}.self_attn.[k|v]_proj.weight : d i k h -> (k h) d
decoder.layers.self_attention.out.kernel -> model.layers.{i}.self_attn.o_proj.weight : n i h d -> d (n h)
decoder.layers.mlp.[wi_0|wi_1|wo].kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a i b -> b a
decoder.layers.pre_self_attention_layer_norm.scale -> model.layers.{i}.input_layernorm.weight : d i -> d
decoder.layers.post_self_attention_layer_norm.scale -> model.layers.{i}.post_attention_layernorm.weight : d i -> d
"""
_FLAX = {
    # a nested dict, or a flat one, with the checkpoint's own names and shapes
    "checkpoint": "{path*} -> {path*}",
    # HF-flax naming: the checkpoint's modules with Flax's parameter names; a Dense kernel is in × out
    "hf_flax": """
        {path*}.kernel -> {path*}.weight : a b -> b a
        {path*}.embedding -> {path*}.weight
        {path*}.scale -> {path*}.weight
        {path*} -> {path*}
    """,
    "maxtext": _MAXTEXT,
    # tunix's Llama and Qwen: einsum weights `w`
    "tunix": """
        embedder.input_embedding -> model.embed_tokens.weight, lm_head.weight?
        lm_head.w -> lm_head.weight : d v -> v d
        final_norm.w -> model.norm.weight
        layers.{i}.attn.q_proj.w -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d
        layers.{i}.attn.[k|v]_proj.w -> model.layers.{i}.self_attn.[k|v]_proj.weight : d k h -> (k h) d
        layers.{i}.attn.o_proj.w -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
        layers.{i}.attn.[q|k]_norm.w -> model.layers.{i}.self_attn.[q|k]_norm.weight
        layers.{i}.mlp.[gate|up|down]_proj.kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a b -> b a
        layers.{i}.[input|post_attention]_layernorm.w -> model.layers.{i}.[input|post_attention]_layernorm.weight
    """,
    # Google's Gemma 2 and 3 modules: n d h einsums, key and value stacked, gate and up stacked
    "gemma": """
        embedder.input_embedding -> model.embed_tokens.weight, lm_head.weight?
        final_norm.scale -> model.norm.weight
        layer_{i}.attn.q_einsum.w -> model.layers.{i}.self_attn.q_proj.weight : n d h -> (n h) d
        layer_{i}.attn.kv_einsum.w -> model.layers.{i}.self_attn.[k|v]_proj.weight : [1|1] k d h -> (k h) d
        layer_{i}.attn.qkv_einsum.w -> model.layers.{i}.self_attn.[q|k|v]_proj.weight : [1|1|1] n d h -> (n h) d
        layer_{i}.attn.attn_vec_einsum.w -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)
        layer_{i}.attn.[_query|_key]_norm.scale -> model.layers.{i}.self_attn.[q|k]_norm.weight
        layer_{i}.mlp.gating_einsum.w -> model.layers.{i}.mlp.[gate|up]_proj.weight : [1|1] f d -> f d
        layer_{i}.mlp.linear.w -> model.layers.{i}.mlp.down_proj.weight : f d -> d f
        layer_{i}.[pre|post]_attention_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight
        layer_{i}.[pre|post]_ffw_norm.scale -> model.layers.{i}.[pre|post]_feedforward_layernorm.weight
    """,
}
_registered = False


def register_all() -> None:
    """Registers every built-in set once: `checkpoint`, `hf_flax`, …, `policy.<family>`, `policy.<family>.scanned`."""
    global _registered
    if _registered:
        return
    _registered = True
    for name, text in _FLAX.items():
        Rules.register(name, text)
    for family, text in _POLICY.items():
        rules = Rules.register(f"policy.{family}", text)
        Rules.register(f"policy.{family}.scanned", stacked(rules))


def policy_families() -> tuple[str, ...]:
    """The `model_type`s that have a Policy rule set."""
    return tuple(_POLICY)


def policy_rules(config: Mapping[str, Any], names: Iterable[str] = (), scanned: bool = False) -> Rules:
    """The Policy layout's rules for a model's config; `names` of the checkpoint settle its prefix.

    Hub checkpoints of one family differ in it: gpt2 with and without `transformer.`, gemma3 under `language_model.`.
    """
    family = config.get("model_type")
    if family not in _POLICY:
        inner = config.get("text_config")
        inner_family = inner.get("model_type") if isinstance(inner, Mapping) else None
        if inner_family not in _POLICY:
            known = ", ".join(_POLICY)
            raise ConfigError(f"no Policy layout for model_type {family!r}", remedy=f"known: {known}; or write rules")
        family = inner_family
    rules = Rules.named(f"policy.{family}{'.scanned' if scanned else ''}")
    anchor = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(str(family), "model.")
    tail = {"gpt2": "wte.weight", "gpt_neox": "embed_in.weight"}.get(str(family), "embed_tokens.weight")
    found = next((n for n in names if n.endswith(tail)), anchor + tail)
    return with_prefix(rules, anchor, found[: -len(tail)])


def with_prefix(rules: Rules, old: str, new: str) -> Rules:
    """The rules with another prefix on the checkpoint names that start with `old`."""
    if old == new:
        return rules

    def renamed(name: Name) -> Name:
        first = name.parts[0]
        if not isinstance(first, str) or not first.startswith(old):
            return name
        text = new + first[len(old) :]
        return replace(name, parts=(*([text] if text else []), *name.parts[1:]))

    return Rules(tuple(_rewritten(replace(r, tensors=tuple(map(renamed, r.tensors)))) for r in rules))


def stacked(rules: Rules, capture: str = "i", axis: int = 0) -> Rules:
    """The rules of the same tree scanned over layers: `layers.{i}.x` → `layers.x` with the new axis `i` at `axis`."""

    def without(parts: tuple[Part, ...]) -> tuple[Part, ...] | None:
        for at, part in enumerate(parts):
            if isinstance(part, Index) and part.terms == ((1, capture),):
                before, after = parts[at - 1] if at else "", parts[at + 1] if at + 1 < len(parts) else ""
                if not isinstance(before, str) or not isinstance(after, str):
                    return None
                joined = before.rstrip("._") + after
                return (*parts[: max(at - 1, 0)], *([joined] if joined else []), *parts[at + 2 :])
        return None

    out = []
    for rule in rules:
        parts = without(rule.leaf.parts) if rule.leaf else None
        if parts is None or not rule.leaf:
            out.append(rule)
            continue
        left = (*rule.left[:axis], Ax(capture), *rule.left[axis:])
        out.append(_rewritten(replace(rule, leaf=replace(rule.leaf, parts=parts), left=left)))
    return Rules(tuple(out))


def _rewritten(rule: Rule) -> Rule:
    """The rule re-read from its own text, so that it is checked and its errors point into that text."""
    return check(parse_line(rule_text(rule), rule.line))

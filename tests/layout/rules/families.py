"""Shape tables of small models: the checkpoint's names and shapes of twelve families, written out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jvlab.layout._tree import LeafShape
from jvlab.layout._types import Binding, CheckpointTensor

LAYERS = 3
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 50,
    "num_hidden_layers": LAYERS,
}
MHA = {"num_key_value_heads": 4, "head_dim": 6, "hidden_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"tie_word_embeddings": True},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 10},
    "gpt2": {**MHA, "tie_word_embeddings": True},
    "gpt_neox": MHA,
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A small config of the family."""
    return {
        "model_type": family,
        "tie_word_embeddings": False,
        **SMALL,
        **FAMILIES[family],
        **changes,
    }


def checkpoint_of(config: dict[str, Any]) -> list[CheckpointTensor]:
    """The checkpoint tensors a Hugging Face model of this config has."""
    family = config["model_type"]
    table: dict[str, tuple[int, ...]]
    if family == "gpt2":
        table = _gpt2(config)
    elif family == "gpt_neox":
        table = _gpt_neox(config)
    else:
        table = _llama_like(config)
    return [CheckpointTensor(name, shape, "bfloat16") for name, shape in table.items()]


def _llama_like(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family, d, v, f = (
        c["model_type"],
        c["hidden_size"],
        c["vocab_size"],
        c["intermediate_size"],
    )
    q, kv = (
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        if family == "phi3":
            out[p + "self_attn.qkv_proj.weight"] = (q + 2 * kv, d)
            out[p + "mlp.gate_up_proj.weight"] = (2 * f, d)
            out[p + "mlp.down_proj.weight"] = (d, f)
        else:
            out |= {
                p + "self_attn.q_proj.weight": (q, d),
                p + "self_attn.k_proj.weight": (kv, d),
            }
            out |= {p + "self_attn.v_proj.weight": (kv, d)}
        out[p + "self_attn.o_proj.weight"] = (d, q)
        if family == "qwen2":
            out |= {
                f"{p}self_attn.{x}_proj.bias": (s,)
                for x, s in (("q", q), ("k", kv), ("v", kv))
            }
        if family in ("qwen3", "gemma3", "qwen3_moe"):
            out |= {f"{p}self_attn.{x}_norm.weight": (c["head_dim"],) for x in "qk"}
        if family == "olmo2":
            out |= {
                p + "self_attn.q_norm.weight": (q,),
                p + "self_attn.k_norm.weight": (kv,),
            }
        if family == "mixtral":
            out[p + "block_sparse_moe.gate.weight"] = (c["num_local_experts"], d)
            for e in range(c["num_local_experts"]):
                x = f"{p}block_sparse_moe.experts.{e}."
                out |= {
                    x + "w1.weight": (f, d),
                    x + "w2.weight": (d, f),
                    x + "w3.weight": (f, d),
                }
        elif family == "qwen3_moe":
            out[p + "mlp.gate.weight"] = (c["num_experts"], d)
            m = c["moe_intermediate_size"]
            for e in range(c["num_experts"]):
                x = f"{p}mlp.experts.{e}."
                out |= {
                    x + "gate_proj.weight": (m, d),
                    x + "up_proj.weight": (m, d),
                    x + "down_proj.weight": (d, m),
                }
        elif family != "phi3":
            out |= {
                p + "mlp.gate_proj.weight": (f, d),
                p + "mlp.up_proj.weight": (f, d),
            }
            out |= {p + "mlp.down_proj.weight": (d, f)}
        norms = ["input", "post_attention"]
        if family in ("gemma2", "gemma3"):
            norms += ["pre_feedforward", "post_feedforward"]
        if family == "olmo2":
            norms = ["post_attention", "post_feedforward"]
        out |= {f"{p}{x}_layernorm.weight": (d,) for x in norms}
    out["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    return out


def _gpt2(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, v, f = c["hidden_size"], c["vocab_size"], c["intermediate_size"]
    out: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (v, d),
        "transformer.wpe.weight": (32, d),
    }
    for i in range(c["num_hidden_layers"]):
        p = f"transformer.h.{i}."
        table = {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, f),
            "mlp.c_proj": (f, d),
        }
        for name, shape in table.items():
            out |= {f"{p}{name}.weight": shape, f"{p}{name}.bias": shape[1:]}
        out |= {f"{p}ln_{j}.{x}": (d,) for j in (1, 2) for x in ("weight", "bias")}
    return out | {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}


def _gpt_neox(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, v, f = c["hidden_size"], c["vocab_size"], c["intermediate_size"]
    out: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (v, d)}
    for i in range(c["num_hidden_layers"]):
        p = f"gpt_neox.layers.{i}."
        for name, shape in (
            ("attention.query_key_value", (3 * d, d)),
            ("attention.dense", (d, d)),
            ("mlp.dense_h_to_4h", (f, d)),
            ("mlp.dense_4h_to_h", (d, f)),
        ):
            out |= {f"{p}{name}.weight": shape, f"{p}{name}.bias": shape[:1]}
        out |= {
            f"{p}{j}_layernorm.{x}": (d,)
            for j in ("input", "post_attention")
            for x in ("weight", "bias")
        }
    out |= {f"gpt_neox.final_layer_norm.{x}": (d,) for x in ("weight", "bias")}
    return out | {"embed_out.weight": (v, d)}


def policy_leaves(
    c: dict[str, Any], scanned: bool = False
) -> dict[str, tuple[int, ...]]:
    """The leaves of jvlab's Policy layout for this config, written out independently of the rules."""
    family, d, v, h = c["model_type"], c["hidden_size"], c["vocab_size"], c["head_dim"]
    n, k = c["num_attention_heads"], c["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "attn.q.kernel": (d, n, h),
        "attn.k.kernel": (d, k, h),
    }
    layer |= {"attn.v.kernel": (d, k, h), "attn.o.kernel": (n, h, d)}
    biased = family in ("gpt2", "gpt_neox")
    if biased or family == "qwen2":
        layer |= {"attn.q.bias": (n, h), "attn.k.bias": (k, h), "attn.v.bias": (k, h)}
    if biased:
        layer |= {
            "attn.o.bias": (d,),
            "mlp.up.bias": (c["intermediate_size"],),
            "mlp.down.bias": (d,),
        }
    if family in ("qwen3", "gemma3", "qwen3_moe"):
        layer |= {"attn.q_norm.scale": (h,), "attn.k_norm.scale": (h,)}
    if family == "olmo2":
        layer |= {"attn.q_norm.scale": (n * h,), "attn.k_norm.scale": (k * h,)}
    f = c["intermediate_size"]
    if family in ("mixtral", "qwen3_moe"):
        e, f = (
            (c["num_local_experts"], f)
            if family == "mixtral"
            else (c["num_experts"], c["moe_intermediate_size"])
        )
        layer |= {
            "moe.router.kernel": (d, e),
            "moe.gate.kernel": (e, d, f),
            "moe.up.kernel": (e, d, f),
        }
        layer |= {"moe.down.kernel": (e, f, d)}
    else:
        layer |= {"mlp.up.kernel": (d, f), "mlp.down.kernel": (f, d)}
        if not biased:
            layer["mlp.gate.kernel"] = (d, f)
    norms = ["attn_norm", "mlp_norm"]
    if family in ("gemma2", "gemma3"):
        norms += ["post_attn_norm", "post_mlp_norm"]
    if family == "olmo2":
        norms = ["post_attn_norm", "post_mlp_norm"]
    layer |= {
        f"{x}.{y}": (d,)
        for x in norms
        for y in (("scale", "bias") if biased else ("scale",))
    }
    out: dict[str, tuple[int, ...]] = {
        "embed.embedding": (v, d),
        "final_norm.scale": (d,),
    }
    if biased:
        out["final_norm.bias"] = (d,)
    if family == "gpt2":
        out["pos_embed.embedding"] = (32, d)
    if not c["tie_word_embeddings"]:
        out["lm_head.kernel"] = (d, v)
    count = c["num_hidden_layers"]
    if scanned:
        return out | {f"layers.{x}": (count, *s) for x, s in layer.items()}
    return out | {f"layers.{i}.{x}": s for i in range(count) for x, s in layer.items()}


def shapes(tree: Mapping[str, tuple[int, ...]]) -> dict[str, LeafShape]:
    """Leaves of these shapes."""
    return {p: LeafShape(tuple(s), "float32") for p, s in tree.items()}


def facts(bindings: list[Binding]) -> list[tuple[object, ...]]:
    """What bindings move, without the words."""
    return sorted(
        (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)
        for b in bindings
    )

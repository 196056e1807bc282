"""rules="auto": twelve families in many layouts, real sizes included, give what the declared rules give."""

from __future__ import annotations

from typing import Any

import pytest

from jvlab._errors import MatchError
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._ruleset import Rules, stacked
from tests.layout.rules.families import (
    FAMILIES,
    checkpoint_of,
    config_of,
    facts,
    policy_leaves,
    shapes,
)

Config = dict[str, Any]
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2"]

# real sizes, where layers = heads = experts and square matrices abound
REAL: dict[str, tuple[str, Config]] = {
    "llama2_7b": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
                            "intermediate_size": 11008, "vocab_size": 32000, "num_hidden_layers": 32}),
    "llama3_8b": ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                            "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32}),
    "gpt2": ("gpt2", {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64,
                      "intermediate_size": 3072, "vocab_size": 50257, "num_hidden_layers": 12}),
    "pythia_70m": ("gpt_neox", {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
                                "intermediate_size": 2048, "vocab_size": 50304, "num_hidden_layers": 6}),
    "phi3_mini": ("phi3", {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 96,
                           "intermediate_size": 8192, "vocab_size": 32064, "num_hidden_layers": 32}),
    "mixtral_8x7b": ("mixtral", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                                 "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32000,
                                 "num_hidden_layers": 32, "num_local_experts": 8}),
    "as_many_experts_as_layers": ("mixtral", {"num_local_experts": 3, "num_hidden_layers": 3}),
}  # fmt: skip


def tree_of(
    declared: Rules, config: Config, leaf_shapes: dict[str, tuple[int, ...]]
) -> None:
    """Infers and compares with the declared rules."""
    tensors = checkpoint_of(config)
    want = declared.bind(shapes(leaf_shapes), tensors, config)
    rules, got = infer(shapes(leaf_shapes), tensors, config)
    assert facts(got) == facts(want), rules
    assert all(b.reason and 0 < b.confidence <= 1 for b in got)
    # what auto found can be saved, read and edited
    assert Rules.parse(rules.to_text()) == rules


def hf_flax(config: Config) -> dict[str, tuple[int, ...]]:
    return to_flax(checkpoint_of(config))


def to_flax(tensors: list[CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    out = {}
    for t in tensors:
        stem = t.name.removesuffix("weight")
        if stem == t.name:
            out[t.name] = t.shape
        elif len(t.shape) == 1:
            out[stem + "scale"] = t.shape
        elif any(x in t.name for x in ("embed_tokens", "wte", "wpe", "embed_in")):
            out[stem + "embedding"] = t.shape
        else:
            out[stem + "kernel"] = t.shape[::-1]
    return out


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_policy_layout(family: str, scanned: bool) -> None:
    config = config_of(family)
    names = [t.name for t in checkpoint_of(config)]
    tree_of(
        policy_rules(config, names, scanned), config, policy_leaves(config, scanned)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_flax_layout(family: str) -> None:
    config = config_of(family)
    tree_of(Rules.named("hf_flax"), config, hf_flax(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_layout(family: str) -> None:
    config = config_of(family)
    tree_of(
        Rules.named("checkpoint"),
        config,
        {t.name: t.shape for t in checkpoint_of(config)},
    )


@pytest.mark.parametrize("layout", ["policy", "scanned", "hf_flax"])
@pytest.mark.parametrize("model", REAL)
def test_real_sizes(model: str, layout: str) -> None:
    family, sizes = REAL[model]
    config = config_of(family, **sizes)
    if layout == "hf_flax":
        tree_of(Rules.named("hf_flax"), config, hf_flax(config))
    else:
        tree_of(
            policy_rules(config, (), layout == "scanned"),
            config,
            policy_leaves(config, layout == "scanned"),
        )


def einsum_leaves(config: Config) -> dict[str, tuple[int, ...]]:
    """Google's Gemma modules: n d h einsums, stacked kv and gate/up."""
    d, n, k, h = (
        config[x]
        for x in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    )
    f = config["intermediate_size"]
    out: dict[str, tuple[int, ...]] = {
        "embedder.input_embedding": (config["vocab_size"], d),
        "final_norm.scale": (d,),
    }
    for i in range(config["num_hidden_layers"]):
        p = f"layer_{i}."
        out |= {p + "attn.q_einsum.w": (n, d, h), p + "attn.kv_einsum.w": (2, k, d, h)}
        out |= {
            p + "attn.attn_vec_einsum.w": (n, h, d),
            p + "mlp.gating_einsum.w": (2, f, d),
            p + "mlp.linear.w": (f, d),
        }
        out |= {
            f"{p}{x}_norm.scale": (d,)
            for x in ("pre_attention", "post_attention", "pre_ffw", "post_ffw")
        }
        if config["model_type"] == "gemma3":
            out |= {
                p + "attn._query_norm.scale": (h,),
                p + "attn._key_norm.scale": (h,),
            }
    return out


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_einsum_layout(family: str) -> None:
    config = config_of(family, num_key_value_heads=1, hidden_size=20)
    tree_of(Rules.named("gemma"), config, einsum_leaves(config))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_maxtext_layout(family: str) -> None:
    c = config_of(family)
    d, n, k, h, f, v, i = 24, 4, 2, 8, 40, 50, 3
    base, attn = "decoder.layers.", "decoder.layers.self_attention."
    leaves: dict[str, tuple[int, ...]] = {
        "token_embedder.embedding": (v, d),
        "decoder.logits_dense.kernel": (d, v),
    }
    leaves |= {
        "decoder.decoder_norm.scale": (d,),
        attn + "query.kernel": (d, i, n, h),
        attn + "key.kernel": (d, i, k, h),
    }
    leaves |= {attn + "value.kernel": (d, i, k, h), attn + "out.kernel": (n, i, h, d)}
    leaves |= {
        base + "mlp.wi_0.kernel": (d, i, f),
        base + "mlp.wi_1.kernel": (d, i, f),
        base + "mlp.wo.kernel": (f, i, d),
    }
    leaves |= {
        f"{base}{x}_self_attention_layer_norm.scale": (d, i) for x in ("pre", "post")
    }
    tree_of(Rules.named("maxtext"), c, leaves)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tunix_layout(family: str) -> None:
    c = config_of(family)
    d, n, k, h, f, v = 24, 4, 2, 8, 40, 50
    leaves: dict[str, tuple[int, ...]] = {
        "embedder.input_embedding": (v, d),
        "lm_head.w": (d, v),
        "final_norm.w": (d,),
    }
    for i in range(3):
        p = f"layers.{i}."
        leaves |= {
            p + "attn.q_proj.w": (d, n, h),
            p + "attn.k_proj.w": (d, k, h),
            p + "attn.v_proj.w": (d, k, h),
        }
        leaves |= {
            p + "attn.o_proj.w": (n, h, d),
            p + "mlp.gate_proj.kernel": (d, f),
            p + "mlp.up_proj.kernel": (d, f),
        }
        leaves |= {
            p + "mlp.down_proj.kernel": (f, d),
            p + "input_layernorm.w": (d,),
            p + "post_attention_layernorm.w": (d,),
        }
        if family == "qwen3":
            leaves |= {p + "attn.q_norm.w": (h,), p + "attn.k_norm.w": (h,)}
    tree_of(Rules.named("tunix"), c, leaves)


ODD = Rules.parse("""
    tower.vocab_embed.table -> model.embed_tokens.weight
    tower.unembed.matrix -> lm_head.weight : d v -> v d
    tower.last_rms.gamma -> model.norm.weight
    tower.block{i}.mha.wq -> model.layers.{i}.self_attn.q_proj.weight : d (n h) -> (n h) d
    tower.block{i}.mha.wk -> model.layers.{i}.self_attn.k_proj.weight : d (k h) -> (k h) d
    tower.block{i}.mha.wv -> model.layers.{i}.self_attn.v_proj.weight : d (k h) -> (k h) d
    tower.block{i}.mha.wo -> model.layers.{i}.self_attn.o_proj.weight : (n h) d -> d (n h)
    tower.block{i}.ffn.w1 -> model.layers.{i}.mlp.gate_proj.weight : d f -> f d
    tower.block{i}.ffn.w3 -> model.layers.{i}.mlp.up_proj.weight : d f -> f d
    tower.block{i}.ffn.w2 -> model.layers.{i}.mlp.down_proj.weight : f d -> d f
    tower.block{i}.ln1.gamma -> model.layers.{i}.input_layernorm.weight
    tower.block{i}.ln2.gamma -> model.layers.{i}.post_attention_layernorm.weight
""")


def odd_leaves(
    d: int = 24, q: int = 32, kv: int = 16, f: int = 40, v: int = 50
) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {
        "tower.vocab_embed.table": (v, d),
        "tower.unembed.matrix": (d, v),
    }
    out["tower.last_rms.gamma"] = (d,)
    for i in range(3):
        p = f"tower.block{i}."
        out |= {
            p + "mha.wq": (d, q),
            p + "mha.wk": (d, kv),
            p + "mha.wv": (d, kv),
            p + "mha.wo": (q, d),
        }
        out |= {p + "ffn.w1": (d, f), p + "ffn.w3": (d, f), p + "ffn.w2": (f, d)}
        out |= {p + "ln1.gamma": (d,), p + "ln2.gamma": (d,)}
    return out


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_oddly_named_layout(family: str) -> None:
    tree_of(ODD, config_of(family), odd_leaves())
    first = {
        p: s for p, s in odd_leaves().items() if "block1" not in p and "block2" not in p
    }
    scan = {
        p.replace("block0", "block"): (3, *s) if "block0" in p else s
        for p, s in first.items()
    }
    tree_of(Rules(stacked(ODD)), config_of(family), scan)


def test_attn_norm_of_a_model_that_only_norms_afterwards() -> None:
    config = config_of("olmo2")
    renamed = {"post_attn_norm": "attn_norm", "post_mlp_norm": "ffn_norm"}
    leaves = policy_leaves(config)
    for old, new in renamed.items():
        leaves = {p.replace(old, new): s for p, s in leaves.items()}
    _, bindings = infer(shapes(leaves), checkpoint_of(config), config)
    found = {b.leaf: b.tensor for b in bindings}
    assert (
        found["layers.1.attn_norm.scale"]
        == "model.layers.1.post_attention_layernorm.weight"
    )
    assert (
        found["layers.1.ffn_norm.scale"]
        == "model.layers.1.post_feedforward_layernorm.weight"
    )


def test_tied_head_of_the_checkpoint() -> None:
    config = config_of("llama", tie_word_embeddings=True)
    head = CheckpointTensor("lm_head.weight", (50, 24), "bfloat16")
    _, bindings = infer(
        shapes(policy_leaves(config)), [*checkpoint_of(config), head], config
    )
    assert {b.tensor for b in bindings if b.leaf == "embed.embedding"} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    untied = config_of("llama", tie_word_embeddings=False)
    with pytest.raises(MatchError, match=r"tensor lm_head\.weight .*no leaf found"):
        infer(shapes(policy_leaves(config)), [*checkpoint_of(config), head], untied)


def test_levanter_layout_groups_queries_by_key_head() -> None:
    c = config_of("llama", num_attention_heads=6)
    d, k, g, h, f, v = 24, 2, 3, 8, 40, 50
    p, attn = "transformer.layers.stacked.", "transformer.layers.stacked.self_attn."
    leaves: dict[str, tuple[int, ...]] = {
        "embeddings.token_embeddings.weight": (v, d),
        "lm_head.weight": (v, d),
    }
    leaves |= {"transformer.norm.weight": (d,), attn + "q_proj.weight": (3, k, g, h, d)}
    leaves |= {
        attn + "k_proj.weight": (3, k, h, d),
        attn + "v_proj.weight": (3, k, h, d),
    }
    leaves |= {
        attn + "o_proj.weight": (3, d, k, g, h),
        p + "mlp.gate_proj.weight": (3, f, d),
    }
    leaves |= {
        p + "mlp.up_proj.weight": (3, f, d),
        p + "mlp.down_proj.weight": (3, d, f),
    }
    leaves |= {
        p + "input_layernorm.weight": (3, d),
        p + "post_attention_layernorm.weight": (3, d),
    }
    declared = """
embeddings.token_embeddings.weight -> model.embed_tokens.weight
lm_head.weight -> lm_head.weight
transformer.norm.weight -> model.norm.weight
X.self_attn.q_proj.weight -> model.layers.{i}.self_attn.q_proj.weight : i k g h d -> (k g h) d
X.self_attn.[k|v]_proj.weight -> model.layers.{i}.self_attn.[k|v]_proj.weight : i k h d -> (k h) d
X.self_attn.o_proj.weight -> model.layers.{i}.self_attn.o_proj.weight : i d k g h -> d (k g h)
X.mlp.[gate|up|down]_proj.weight -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : i ... -> ...
X.[input|post_attention]_layernorm.weight -> model.layers.{i}.[input|post_attention]_layernorm.weight : i d -> d
"""
    tree_of(Rules.parse(declared.replace("X", "transformer.layers.stacked")), c, leaves)


def test_flax_modules_with_numbers_for_names() -> None:
    c = config_of("gpt2")
    d, n, h, f = 24, 4, 6, 40
    leaves: dict[str, tuple[int, ...]] = {
        "wte.embedding": (50, d),
        "wpe.embedding": (32, d),
    }
    leaves |= {"LayerNorm_0.scale": (d,), "LayerNorm_0.bias": (d,)}
    for i in range(3):
        a, m = f"Block_{i}.MultiHeadDotProductAttention_0.", f"Block_{i}.MlpBlock_0."
        for x in ("query", "key", "value"):
            leaves |= {f"{a}{x}.kernel": (d, n, h), f"{a}{x}.bias": (n, h)}
        leaves |= {a + "out.kernel": (n, h, d), a + "out.bias": (d,)}
        leaves |= {
            m + "Dense_0.kernel": (d, f),
            m + "Dense_0.bias": (f,),
            m + "Dense_1.kernel": (f, d),
        }
        leaves[m + "Dense_1.bias"] = (d,)
        leaves |= {
            f"Block_{i}.LayerNorm_{j}.{x}": (d,)
            for j in (0, 1)
            for x in ("scale", "bias")
        }
    declared = """
wte.embedding -> transformer.wte.weight
wpe.embedding -> transformer.wpe.weight
LayerNorm_0.[scale|bias] -> transformer.ln_f.[weight|bias]
Block_{i}.LayerNorm_0.[scale|bias] -> transformer.h.{i}.ln_1.[weight|bias]
Block_{i}.LayerNorm_1.[scale|bias] -> transformer.h.{i}.ln_2.[weight|bias]
Block_{i}.A.[query|key|value].kernel -> transformer.h.{i}.attn.c_attn.weight : d n h -> d [n h|n h|n h]
Block_{i}.A.[query|key|value].bias -> transformer.h.{i}.attn.c_attn.bias : n h -> [n h|n h|n h]
Block_{i}.A.out.kernel -> transformer.h.{i}.attn.c_proj.weight : n h d -> (n h) d
Block_{i}.A.out.bias -> transformer.h.{i}.attn.c_proj.bias
Block_{i}.MlpBlock_0.[Dense_0|Dense_1].kernel -> transformer.h.{i}.mlp.[c_fc|c_proj].weight
Block_{i}.MlpBlock_0.[Dense_0|Dense_1].bias -> transformer.h.{i}.mlp.[c_fc|c_proj].bias
"""
    tree_of(
        Rules.parse(declared.replace(".A.", ".MultiHeadDotProductAttention_0.")),
        c,
        leaves,
    )


def test_maxtext_experts_are_stacked_before_layers() -> None:
    c = config_of("mixtral")
    stacks = {
        "gate.kernel": (24, 3, 5),
        "wi_0": (5, 3, 24, 40),
        "wi_1": (5, 3, 24, 40),
        "wo": (5, 3, 40, 24),
    }
    leaves = shapes({f"decoder.layers.MoeBlock_0.{x}": s for x, s in stacks.items()})
    rules, _ = infer(leaves, [t for t in checkpoint_of(c) if "moe" in t.name], c)
    moe = "model.layers.{i}.block_sparse_moe"
    assert {str(r) for r in rules} == {
        f"decoder.layers.MoeBlock_0.gate.kernel -> {moe}.gate.weight : d i x -> x d",
        f"decoder.layers.MoeBlock_0.wi_0 -> {moe}.experts.{{e}}.w1.weight : e i d f -> f d",
        f"decoder.layers.MoeBlock_0.wi_1 -> {moe}.experts.{{e}}.w3.weight : e i d f -> f d",
        f"decoder.layers.MoeBlock_0.wo -> {moe}.experts.{{e}}.w2.weight : e i f d -> d f",
    }


def test_latent_attention_and_shared_experts_under_the_checkpoints_names() -> None:
    """Roles that no table knows (DeepSeek's q_a, kv_b, score bias) are matched by their names."""
    d, n, r, m, experts = 32, 4, 12, 10, 6
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (60, d),
        "model.norm.weight": (d,),
    }
    for i in range(3):
        p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        table |= {
            a + "q_a_proj.weight": (14, d),
            a + "q_a_layernorm.weight": (14,),
            a + "q_b_proj.weight": (n * 24, 14),
        }
        table |= {
            a + "kv_a_proj_with_mqa.weight": (r + 8, d),
            a + "kv_a_layernorm.weight": (r,),
        }
        table |= {a + "kv_b_proj.weight": (n * 32, r), a + "o_proj.weight": (d, n * 16)}
        table |= {
            p + "input_layernorm.weight": (d,),
            p + "post_attention_layernorm.weight": (d,),
        }
        sizes = {
            "gate_proj.weight": (m, d),
            "up_proj.weight": (m, d),
            "down_proj.weight": (d, m),
        }
        if i == 0:
            table |= {f"{p}mlp.{x}": s for x, s in sizes.items()}
            continue
        table |= {
            p + "mlp.gate.weight": (experts, d),
            p + "mlp.gate.e_score_correction_bias": (experts,),
        }
        table |= {f"{p}mlp.shared_experts.{x}": s for x, s in sizes.items()}
        table |= {
            f"{p}mlp.experts.{e}.{x}": s
            for e in range(experts)
            for x, s in sizes.items()
        }
    tensors = [
        CheckpointTensor(name, shape, "bfloat16") for name, shape in table.items()
    ]
    config = {"num_attention_heads": n, "num_key_value_heads": n, "hidden_size": d}
    for rules, leaves in (
        (Rules.named("checkpoint"), table),
        (Rules.named("hf_flax"), to_flax(tensors)),
    ):
        want = rules.bind(shapes(leaves), tensors, config)
        assert facts(infer(shapes(leaves), tensors, config)[1]) == facts(want)

"""Presets cover the trees they are named for; suggestions are right or not made; names and meshes are refused alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import jvlab as jv
from jvlab._errors import ConfigError, CoverageError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._rules import apply_binding, invert_binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import bind_rules, shapes_for
from tests.layout.rules.families import checkpoint_of, config_of, shapes


def bind(*given: Any) -> list[Binding]:
    return bind_rules(*given)[1]


D, N, K, H, F, V, L, E, M = 24, 4, 2, 8, 40, 50, 3, 5, 10  # as in families.py
Tree = dict[str, tuple[int, ...]]


def gemma1() -> tuple[dict[str, Any], list[CheckpointTensor]]:
    config = {**config_of("llama", tie_word_embeddings=True), "model_type": "gemma"}
    return config, checkpoint_of(config)


def model(family: str, **changes: Any) -> tuple[dict[str, Any], list[CheckpointTensor]]:
    if family == "gemma":
        return gemma1()
    config = config_of(family, **changes)
    return config, checkpoint_of(config)


# Trees as the projects write them: names and shapes from google/tunix (models/*/params.py, model.py) and from MaxText's
# checkpoint_conversion/utils/param_mapping.py.


def tunix(family: str) -> Tree:
    out: Tree = {"embedder.input_embedding": (V, D)}
    gemma = family.startswith("gemma")
    out |= {"final_norm.scale": (D,)} if gemma else {"final_norm.w": (D,)}
    out |= {} if gemma or family == "qwen2" else {"lm_head.w": (D, V)}
    for i in range(L):
        p, a = f"layers.{i}.", f"layers.{i}.attn."
        if gemma:
            out |= {
                a + "q_einsum.w": (N, D, H),
                a + "kv_einsum.w": (2, K, D, H),
                a + "attn_vec_einsum.w": (N, H, D),
            }
            norms = {"gemma": ("pre_attention", "pre_ffw")}.get(
                family, ("pre_attention", "pre_ffw", "post_ffw")
            )
            after = {"gemma2": ["post_attn"], "gemma3": ["post_attention"]}.get(
                family, []
            )
            out |= {f"{p}{x}_norm.scale": (D,) for x in (*norms, *after)}
            out |= {
                f"{a}_{x}_norm.scale": (H,)
                for x in ("query", "key")
                if family == "gemma3"
            }
        else:
            out |= {
                a + "q_proj.w": (D, N, H),
                a + "k_proj.w": (D, K, H),
                a + "v_proj.w": (D, K, H),
            }
            out |= {
                a + "o_proj.w": (N, H, D),
                p + "input_layernorm.w": (D,),
                p + "post_attention_layernorm.w": (D,),
            }
            out |= {
                f"{a}{x}_norm.w": (H,) for x in "qk" if family in ("qwen3", "qwen3_moe")
            }
            sizes = {"q": N * H, "k": K * H, "v": K * H} if family == "qwen2" else {}
            out |= {f"{a}{x}_bias": (s,) for x, s in sizes.items()}
        if family == "qwen3_moe":
            m = p + "mlp."
            out |= {
                m + "router.kernel": (D, E),
                m + "gate_proj": (E, D, M),
                m + "up_proj": (E, D, M),
            }
            out |= {m + "down_proj": (E, M, D)}
        else:
            out |= {f"{p}mlp.{x}_proj.kernel": (D, F) for x in ("gate", "up")} | {
                p + "mlp.down_proj.kernel": (F, D)
            }
    return out


def maxtext(family: str, scanned: bool, tied: bool = False) -> Tree:
    layer: Tree = {
        "self_attention.query.kernel": (D, N, H),
        "self_attention.key.kernel": (D, K, H),
    }
    layer |= {
        "self_attention.value.kernel": (D, K, H),
        "self_attention.out.kernel": (N, H, D),
    }
    layer |= {f"{x}_self_attention_layer_norm.scale": (D,) for x in ("pre", "post")}
    if family == "qwen2":
        layer |= {
            "self_attention.query.bias": (N, H),
            "self_attention.key.bias": (K, H),
        }
        layer |= {"self_attention.value.bias": (K, H)}
    if family in ("qwen3", "qwen3_moe"):
        layer |= {f"self_attention.{x}_norm.scale": (H,) for x in ("query", "key")}
    if family in ("qwen3_moe", "mixtral"):
        block, f = ("moe_block", M) if family == "qwen3_moe" else ("MoeBlock_0", F)
        layer |= {
            f"{block}.gate.kernel": (D, E),
            f"{block}.wi_0": (E, D, f),
            f"{block}.wi_1": (E, D, f),
        }
        layer |= {f"{block}.wo": (E, f, D)}
    else:
        layer |= {
            "mlp.wi_0.kernel": (D, F),
            "mlp.wi_1.kernel": (D, F),
            "mlp.wo.kernel": (F, D),
        }
    out: Tree = {"token_embedder.embedding": (V, D), "decoder.decoder_norm.scale": (D,)}
    out |= {} if tied else {"decoder.logits_dense.kernel": (D, V)}
    if scanned:  # the layers' axis is the second
        return out | {
            f"decoder.layers.{x}": (s[0], L, *s[1:]) for x, s in layer.items()
        }
    return out | {
        f"decoder.layers_{i}.{x}": s for i in range(L) for x, s in layer.items()
    }


def covers(rules: str, family: str, tree: Tree, **changes: Any) -> None:
    """Everything is taken and filled, and the checkpoint's numbers come back through the tree."""
    config, tensors = model(family, **changes)
    made, bindings = bind_rules(rules, shapes(tree), tensors, config)
    assert {b.leaf for b in bindings} == set(tree), made
    rng = np.random.default_rng(0)
    numbers = {t.name: rng.normal(size=t.shape) for t in tensors}
    leaves = {p: np.full(s, np.nan) for p, s in tree.items()}
    for b in bindings:
        invert_binding(b, numbers[b.tensor], leaves[b.leaf])
    assert not any(np.isnan(a).any() for a in leaves.values()), (
        "a part of a leaf that goes nowhere"
    )
    again = {name: np.full(a.shape, np.nan) for name, a in numbers.items()}
    for b in bindings:
        apply_binding(b, leaves[b.leaf], again[b.tensor])
    for name, want in numbers.items():
        np.testing.assert_array_equal(again[name], want)


TUNIX = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"]
PREFIXES = ["", "params.", "params.params."]


@pytest.mark.parametrize("prefix", ["", "params.params."])
@pytest.mark.parametrize("family", TUNIX)
def test_tunix_covers_what_it_names(family: str, prefix: str) -> None:
    covers("tunix", family, {prefix + p: s for p, s in tunix(family).items()})


def test_tunix_gemma_with_as_many_key_heads() -> None:
    tree = {
        p: s
        for p, s in tunix("gemma2").items()
        if "q_einsum" not in p and "kv_einsum" not in p
    }
    tree |= {f"layers.{i}.attn.qkv_einsum.w": (3, N, D, H) for i in range(L)}
    covers("tunix", "gemma2", tree, num_key_value_heads=N)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
)
def test_maxtext_covers_what_it_names(family: str, scanned: bool, prefix: str) -> None:
    tree = maxtext(family, scanned, tied=family == "qwen2")
    covers("maxtext", family, {prefix + p: s for p, s in tree.items()})


def test_maxtext_says_what_its_rules_cannot_undo() -> None:
    config, tensors = model("llama")
    bindings = bind("maxtext", shapes(maxtext("llama", True)), tensors, config)
    assert {b.leaf for b in bindings if "√head_dim" in b.warning} == {
        "decoder.layers.self_attention.query.kernel"
    }
    config, tensors = model("qwen3")
    assert not any(
        b.warning
        for b in bind("maxtext", shapes(maxtext("qwen3", True)), tensors, config)
    )
    config, tensors = model("gemma2")
    with pytest.raises(ConfigError, match=r"embedding times √hidden_size"):
        bind("maxtext", {}, tensors, config)


def flax_gpt2(lm_head: bool = False) -> Tree:
    """transformers' FlaxGPT2LMHeadModel: its Conv1D kernel is out × in, the checkpoint's weight in × out."""
    out: Tree = {}
    for t in checkpoint_of(config_of("gpt2")):
        stem, _, word = t.name.rpartition(".")
        if word == "bias":
            out[t.name] = t.shape
        elif "ln_" in stem:
            out[stem + ".scale"] = t.shape
        elif stem.endswith(("wte", "wpe")):
            out[stem + ".embedding"] = t.shape
        else:
            out[stem + ".kernel"] = t.shape[::-1]
    return out | ({"lm_head.kernel": (D, V)} if lm_head else {})


@pytest.mark.parametrize("outer", ["", "params."])
@pytest.mark.parametrize("head", ["tied and absent", "tied and listed", "its own"])
@pytest.mark.parametrize("here", ["transformer.", ""])
@pytest.mark.parametrize("there", ["transformer.", ""])
def test_hf_flax_covers_gpt2_with_and_without_its_prefix(
    there: str, here: str, head: str, outer: str
) -> None:
    config = config_of("gpt2", tie_word_embeddings=head != "its own")
    tensors = [
        CheckpointTensor(there + t.name.removeprefix("transformer."), t.shape, t.dtype)
        for t in checkpoint_of(config)
    ]
    if head != "tied and absent":
        tensors.append(CheckpointTensor("lm_head.weight", (V, D), "bfloat16"))
    tree = {
        outer
        + (p if p.startswith("lm_head") else here + p.removeprefix("transformer.")): s
        for p, s in flax_gpt2(head == "its own").items()
    }
    bindings = bind("hf_flax", shapes(tree), tensors, config)
    assert {b.leaf for b in bindings} == set(tree)
    assert {b.tensor for b in bindings} == {t.name for t in tensors}
    for b in bindings:
        mine, theirs = (
            x.removeprefix(outer).removeprefix("transformer.")
            for x in (b.leaf, b.tensor)
        )
        assert mine.rpartition(".")[0] == theirs.rpartition(".")[0] or (
            mine,
            theirs,
        ) == (
            "wte.embedding",
            "lm_head.weight",
        )
        assert (b.axes[0].leaf_dim == 1) == b.leaf.endswith("kernel"), (
            "a kernel is turned"
        )


def test_checkpoint_names_under_another_prefix() -> None:
    config, tensors = model("llama")
    tree = {"params." + t.name: t.shape for t in tensors}
    assert {
        (b.leaf, b.tensor) for b in bind("checkpoint", shapes(tree), tensors, config)
    } == {("params." + t.name, t.name) for t in tensors}
    bare = {t.name.removeprefix("model."): t.shape for t in tensors}
    assert {b.tensor for b in bind("checkpoint", shapes(bare), tensors, config)} == {
        t.name for t in tensors
    }
    # a prefix is no licence: what has no place stays an error
    with pytest.raises(CoverageError):
        bind("checkpoint", shapes(tree | {"params.model.extra": (3,)}), tensors, config)


@pytest.mark.parametrize("rules", ["tunix", "gemma"])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_a_plan_without_parameters_has_the_familys_own_tree(
    rules: str, family: str
) -> None:
    config, tensors = model(family)
    found = {p: s.shape for p, s in shapes_for(rules, config, tensors).items()}
    if rules == "tunix" and family != "gemma2":
        assert found == tunix(family)
    assert {b.leaf for b in bind(rules, shapes(found), tensors, config)} == set(found)


# ------------------------------------------------------------------------------------------------ suggestions


def remedy(rules: str, tree: Tree, family: str) -> str:
    config, tensors = model(family)
    with pytest.raises(CoverageError) as caught:
        Rules.parse(rules).bind(shapes(tree), tensors, config)
    return caught.value.remedy


def test_suggestions_name_what_the_leaf_is() -> None:
    known = [
        str(r)
        for r in Rules.named("maxtext")
        if "query_norm" not in str(r) and "[query|key]_norm" not in str(r)
    ]
    text = remedy("\n".join(known), maxtext("qwen3", True), "qwen3")
    assert (
        "self_attention.query_norm.scale -> model.layers.{i}.self_attn.q_norm.weight : d i -> d`"
        in text
    )
    assert "layernorm" not in text.split("or `")[0]
    tree = {
        p.replace("layers.", "layer_"): s
        for p, s in tunix("gemma2").items()
        if "attn_vec" in p
    }
    text = remedy("nothing -> ~", tree, "gemma2")
    assert (
        "layer_{i}.attn.attn_vec_einsum.w -> model.layers.{i}.self_attn.o_proj.weight : n h d -> d (n h)`"
        in text
    )


def test_no_suggestion_where_only_sizes_agree() -> None:
    """Of one size, and of no role that both names say: an example of a rule, and no wrong name in it."""
    text = remedy("nothing -> ~", {"rope.freqs": (D,), "adapter.scale": (D,)}, "llama")
    assert "`rope.freqs -> …`" in text
    assert "layernorm" not in text.split("~")[0]
    config, tensors = model("qwen3")
    taken = [t for t in tensors if "k_norm" not in t.name]
    tree: Tree = {t.name: t.shape for t in taken} | {
        "model.layers.0.self_attn.key_norm.scale": (H,)
    }
    with pytest.raises(CoverageError) as caught:
        Rules.parse(
            "model.{x*}.weight -> model.{x*}.weight\nlm_head.weight -> lm_head.weight"
        ).bind(shapes(tree), taken, config)
    assert "`model.layers.0.self_attn.key_norm.scale -> …`" in caught.value.remedy


@pytest.mark.parametrize(
    "name",
    [
        "tunx",
        "MaxText",
        "hf-flax",
        "policy.lama",
        "nothing like it",
        "x" * 5000,
        "a\0b",
    ],
)
def test_a_near_miss_of_a_name_lists_all_of_them(name: str) -> None:
    config, tensors = model("llama")
    with pytest.raises(ConfigError) as caught:
        bind(name, {}, tensors, config)
    assert all(n in caught.value.remedy for n in (*Rules.names(), "auto", "policy"))
    assert ("did you mean 'tunix'" in caught.value.remedy) == (name == "tunx")
    assert len(str(caught.value)) < 2000


# ------------------------------------------------------------------------------------------------ jvlab plan


def test_a_family_without_a_policy_is_told_of_the_checkpoints_tree(
    tmp_path: Path, capsys: Any
) -> None:
    from jvlab.cli._cli import main

    config, tensors = gemma1()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="no Policy layout for model_type 'gemma'"
    ) as caught:
        shapes_for("auto", config, tensors)
    assert "--rules checkpoint" in caught.value.remedy
    found = shapes_for("checkpoint", config, tensors)
    assert {p: s.shape for p, s in found.items()} == {t.name: t.shape for t in tensors}
    save_file(
        {t.name: np.zeros(t.shape, np.float32) for t in tensors},
        tmp_path / "model.safetensors",
    )
    assert main(["plan", "--model", str(tmp_path)]) == 1
    assert "--rules checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["fsdp=3,foo=2", {"fsdp": 3, "foo": 2}])
def test_a_mesh_axis_that_nobody_knows_is_refused_as_jv_mesh_does(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="mesh axis 'foo' is not known") as planned:
        jv.plan({"w": LeafShape((4, 4), "float32")}, jv.models.tiny("llama"), mesh=mesh)
    with pytest.raises(ConfigError, match="mesh axis 'foo' is not known") as made:
        jv.mesh(fsdp=1, foo=1)
    assert str(planned.value) == str(made.value)


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=0",
        "fsdp=-1",
        "fsdp=" + "9" * 5000,
        "fsdp=99999999999",
        {"fsdp": 1.5},
        {"fsdp": True},
        "fsdp",
        "fsdp=2=3",
        "fsdp=2,fsdp=2",
    ],
)
def test_hostile_meshes_are_refused(mesh: Any) -> None:
    with pytest.raises(ConfigError):
        jv.plan({"w": LeafShape((4, 4), "float32")}, jv.models.tiny("llama"), mesh=mesh)

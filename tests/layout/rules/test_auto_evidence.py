"""rules="auto" where names and shapes leave a choice: evidence settles it, or an error shows the candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jvlab._errors import MatchError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import apply_binding, invert_binding
from jvlab.layout.rules._ruleset import Rules
from tests.layout.rules.families import (
    checkpoint_of,
    config_of,
    facts,
    policy_leaves,
    shapes,
)

Config = dict[str, Any]
Case = tuple[Config, dict[str, tuple[int, ...]], list[CheckpointTensor]]


def square(param: str) -> Case:
    """One attention layer of square matrices only, with the given parameter word."""
    config: Config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "hidden_size": 24,
    }
    names = {f"layers.{i}.attn.{x}.{param}": (24, 24) for i in range(2) for x in "qkvo"}
    targets = [
        f"m.layers.{i}.self_attn.{x}_proj.weight" for i in range(2) for x in "qkvo"
    ]
    tensors = [CheckpointTensor(name, (24, 24), "bfloat16") for name in targets]
    return config, names, tensors


def test_square_matrices_by_the_names_convention() -> None:
    config, leaves, tensors = square("kernel")
    _, bindings = infer(shapes(leaves), tensors, config)
    assert all(b.axes[0].leaf_dim == 1 for b in bindings)  # transposed
    assert all(
        "`kernel` is in × out by convention" in b.reason and b.confidence == 0.8
        for b in bindings
    )
    config, leaves, tensors = square("weight")
    _, bindings = infer(shapes(leaves), tensors, config)
    assert all(len(b.axes) == 2 and b.axes[0].leaf_dim == 0 for b in bindings)
    assert all("`weight` is out × in by convention" in b.reason for b in bindings)


def test_square_matrices_without_evidence_are_an_error_with_candidates() -> None:
    config, leaves, tensors = square("mat")
    with pytest.raises(MatchError, match="left 4 leaves open") as caught:
        infer(shapes(leaves), tensors, config)
    found: Any = caught.value.fields["candidates"]
    line = "layers.{i}.attn.q.mat -> m.layers.{i}.self_attn.q_proj.weight : "
    assert found["layers.{i}.attn.q.mat"] == [
        line + "(n h) d -> (n h) d",
        line + "d (n h) -> (n h) d",
    ]
    assert line + "d (n h) -> (n h) d" in caught.value.message
    assert "rules=('auto', '…', '…')" in caught.value.remedy
    # the remedy works: one line settles its siblings
    given = Rules.parse(found["layers.{i}.attn.o.mat"][0])
    with pytest.raises(MatchError, match="left 3 leaves open"):
        infer(shapes(leaves), tensors, config, given=given)
    given = Rules.parse(
        "\n".join(found[f"layers.{{i}}.attn.{x}.mat"][1] for x in "qkvo")
    )
    assert len(infer(shapes(leaves), tensors, config, given=given)[1]) == 8


def test_square_matrices_by_a_sibling() -> None:
    config, leaves, tensors = square("w")
    for transposed in (False, True):
        up, tensor = (24, 40), (40, 24)
        leaves = {
            **leaves,
            **{f"layers.{i}.mlp.up.w": tensor if transposed else up for i in range(2)},
        }
        more = [
            CheckpointTensor(f"m.layers.{i}.mlp.up_proj.weight", tensor, "bfloat16")
            for i in range(2)
        ]
        _, bindings = infer(shapes(leaves), tensors + more, config)
        q = next(b for b in bindings if b.leaf == "layers.0.attn.q.w")
        assert "like its sibling layers.{i}.mlp.up.w" in q.reason
        assert q.axes[0].leaf_dim == (0 if transposed else 1)


def test_a_head_says_nothing_of_the_projections() -> None:
    """All seven projections square and in × out, the head kept as the embedding lies: it is no sibling of theirs."""
    config: Config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "hidden_size": 24,
    }
    roles = {
        **{x: f"self_attn.{x}" for x in "qkvo"},
        **{x: f"mlp.{x}" for x in ("gate", "up", "down")},
    }
    leaves = {
        f"layers.{i}.{r}.w": (24, 24) for i in range(2) for r in roles.values()
    } | {"lm_head.w": (50, 24)}
    tensors = [
        CheckpointTensor(f"model.layers.{i}.{r}_proj.weight", (24, 24), "bfloat16")
        for i in range(2)
        for r in roles.values()
    ]
    tensors.append(CheckpointTensor("lm_head.weight", (50, 24), "bfloat16"))
    with pytest.raises(MatchError, match="left 7 leaves open") as caught:
        infer(shapes(leaves), tensors, config)
    found: Any = caught.value.fields["candidates"]
    assert set(found) == {f"layers.{{i}}.{r}.w" for r in roles.values()}
    assert all(len(lines) == 2 for lines in found.values()), found


@pytest.mark.parametrize(
    ("interleaved", "transposed"),
    [(False, False), (False, True), (True, False), (True, True)],
)
def test_square_matrices_by_numbers(interleaved: bool, transposed: bool) -> None:
    config, leaves, tensors = square("mat")
    rng = np.random.default_rng(0)
    checkpoint = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in tensors}
    heads = "n (r two)" if interleaved else "n (two r)"
    lines = []
    for x in "qkvo":
        out = (
            f"({heads.replace('(', '').replace(')', '')})" if x in "qk" else "(n two r)"
        )
        pattern = f"d {out}" if transposed else f"{out} d"
        names = f"layers.{{i}}.attn.{x}.mat -> m.layers.{{i}}.self_attn.{x}_proj.weight"
        lines.append(f"{names} : {pattern} -> (n two r) d where two=2")
    want = Rules.parse("\n".join(lines)).bind(shapes(leaves), tensors, config)
    values = {p: np.zeros(s, np.float32) for p, s in leaves.items()}
    for b in want:
        invert_binding(b, checkpoint[b.tensor], values[b.leaf])
    for array in values.values():
        array += 0.05 * rng.normal(size=array.shape)  # trained a little since
    _, got = infer(
        shapes(leaves), tensors, config, values=values, checkpoint=checkpoint
    )
    assert facts(got) == facts(want)
    assert all("values match the checkpoint" in b.reason for b in got)


def test_numbers_that_match_nothing_settle_nothing() -> None:
    config, leaves, tensors = square("mat")
    rng = np.random.default_rng(0)
    checkpoint = {t.name: rng.normal(size=t.shape) for t in tensors}
    values = {p: rng.normal(size=s) for p, s in leaves.items()}
    with pytest.raises(MatchError, match="2 ways fit"):
        infer(shapes(leaves), tensors, config, values=values, checkpoint=checkpoint)


def test_a_norm_that_holds_one_plus_w_is_seen_in_the_numbers() -> None:
    config = config_of("gemma2")
    tensors = checkpoint_of(config)
    rng = np.random.default_rng(0)
    checkpoint = {t.name: rng.normal(size=t.shape) for t in tensors}
    leaves = policy_leaves(config)
    values = {p: np.zeros(s) for p, s in leaves.items()}
    for b in policy_rules(config, scanned=False).bind(shapes(leaves), tensors, config):
        invert_binding(b, checkpoint[b.tensor], values[b.leaf])
    for path in values:
        if "norm" in path:
            values[path] += 1
    rules, bindings = infer(
        shapes(leaves), tensors, config, values=values, checkpoint=checkpoint
    )
    assert (
        "layers.{i}.attn_norm.scale -> model.layers.{i}.input_layernorm.weight : d -> d - 1"
        in rules.to_text()
    )
    for b in bindings:
        got = np.full(b.tensor_shape, np.nan)
        apply_binding(b, values[b.leaf], got)
        np.testing.assert_allclose(got, checkpoint[b.tensor], rtol=1e-6, atol=1e-6)


def test_numbers_far_from_the_checkpoint_are_no_evidence() -> None:
    """Unrelated small values are nearer to w than to w ± 1; that is no match, and the reason must not claim one."""
    tensors = [CheckpointTensor("model.norm.weight", (50,), "float32")]
    rng = np.random.default_rng(0)
    values, checkpoint = (
        {"final_norm.scale": rng.normal(size=50) * 0.1},
        {"model.norm.weight": rng.normal(size=50) * 0.1},
    )
    (binding,) = infer(values, tensors, values=values, checkpoint=checkpoint)[1]
    assert "values" not in binding.reason
    checkpoint = {"model.norm.weight": values["final_norm.scale"]}
    (binding,) = infer(values, tensors, values=values, checkpoint=checkpoint)[1]
    assert "values match the checkpoint's that way only" in binding.reason


def heads_equal_head_dim(
    param: str, kv: int, order: str
) -> tuple[Config, dict[str, tuple[int, ...]], list[CheckpointTensor]]:
    config: Config = {
        "num_attention_heads": 6,
        "num_key_value_heads": kv,
        "head_dim": 6,
        "hidden_size": 24,
    }
    leaves, tensors = {}, []
    for x, n in (("q", 6), ("k", kv), ("v", kv)):
        leaves[f"layers.0.attn.{x}.{param}"] = tuple(
            {"d": 24, "n": n, "h": 6}[a] for a in order
        )
        tensors.append(
            CheckpointTensor(
                f"m.layers.0.self_attn.{x}_proj.weight", (n * 6, 24), "bfloat16"
            )
        )
    return config, leaves, tensors


@pytest.mark.parametrize("order", ["dnh", "ndh", "dhn"])
def test_as_many_heads_as_head_dim_by_a_sibling(order: str) -> None:
    config, leaves, tensors = heads_equal_head_dim("mat", 2, order)
    rules, _ = infer(shapes(leaves), tensors, config)
    assert f": {' '.join(order)} -> (n h) d" in rules.to_text()


def test_as_many_heads_as_head_dim_by_convention_or_not_at_all() -> None:
    config, leaves, tensors = heads_equal_head_dim("kernel", 6, "dnh")
    rules, _ = infer(shapes(leaves), tensors, config)
    assert ": d n h -> (n h) d" in rules.to_text()
    config, leaves, tensors = heads_equal_head_dim("mat", 6, "dnh")
    with pytest.raises(MatchError, match="2 ways fit"):
        infer(shapes(leaves), tensors, config)


def fused(config: Config) -> tuple[dict[str, tuple[int, ...]], list[CheckpointTensor]]:
    d, n, k, h = (
        config[x]
        for x in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    )
    leaves = {f"layers.{i}.attn.qkv.kernel": (d, (n + 2 * k) * h) for i in range(2)}
    tensors = [
        CheckpointTensor(
            f"m.layers.{i}.self_attn.{x}_proj.weight", (s * h, d), "bfloat16"
        )
        for i in range(2)
        for x, s in (("q", n), ("k", k), ("v", k))
    ]
    return leaves, tensors


def test_a_fused_leaf_may_be_concatenated_or_interleaved() -> None:
    config = config_of("llama")
    leaves, tensors = fused(config)
    with pytest.raises(MatchError, match="2 ways fit") as caught:
        infer(shapes(leaves), tensors, config)
    assert (
        "d [n h|k h|k h] -> [n h|k h|k h] d   # concatenated in the leaf"
        in caught.value.message
    )
    assert (
        "d (k [g|1|1] h) -> [k g h|k h|k h] d   # interleaved by head in the leaf"
        in caught.value.message
    )
    found: Any = caught.value.fields["candidates"]
    for line in next(iter(found.values())):
        _, got = infer(shapes(leaves), tensors, config, given=Rules.parse(line))
        assert facts(got) == facts(
            Rules.parse(line).bind(shapes(leaves), tensors, config)
        )
        # and numbers find the same line by themselves
        checkpoint = {
            t.name: np.random.default_rng(3).normal(size=t.shape) for t in tensors
        }
        values = {p: np.zeros(s) for p, s in leaves.items()}
        for b in got:
            invert_binding(b, checkpoint[b.tensor], values[b.leaf])
        _, again = infer(
            shapes(leaves), tensors, config, values=values, checkpoint=checkpoint
        )
        assert facts(again) == facts(got)


@pytest.mark.parametrize(
    "line", [": d [n|k|k] h -> [n h|k h|k h] d", ": d k [g|1|1] h -> [k g h|k h|k h] d"]
)
def test_a_fused_leaf_with_dimensions_of_its_own(line: str) -> None:
    config = config_of("llama")
    _, tensors = fused(config)
    shape = (24, 8, 8) if "[n|k|k]" in line else (24, 2, 4, 8)
    leaves = {f"layers.{i}.attn.qkv.kernel": shape for i in range(2)}
    want = Rules.parse(
        "layers.{i}.attn.qkv.kernel -> m.layers.{i}.self_attn.[q|k|v]_proj.weight "
        + line
    )
    # n + 2k heads = h: the heads come first by the kernel's convention
    if "[n|k|k]" in line:
        config = {**config, "head_dim": 8}
    _, got = infer(shapes(leaves), tensors, config)
    assert facts(got) == facts(want.bind(shapes(leaves), tensors, config))


def test_a_scan_over_groups_of_layers_is_settled_by_numbers() -> None:
    tensors = [
        CheckpointTensor(f"m.layers.{i}.mlp.up_proj.weight", (5, 3), "float32")
        for i in range(6)
    ]
    leaves = {f"blocks_{j}.mlp.up.kernel": (3, 3, 5) for j in range(2)}
    checkpoint = {
        t.name: np.random.default_rng(i).normal(size=t.shape)
        for i, t in enumerate(tensors)
    }
    want = Rules.parse(
        "blocks_{j}.mlp.up.kernel -> m.layers.{2*s+j}.mlp.up_proj.weight : s d f -> f d"
    )
    values = {p: np.zeros(s) for p, s in leaves.items()}
    for b in want.bind(shapes(leaves), tensors):
        invert_binding(b, checkpoint[b.tensor], values[b.leaf])
    with pytest.raises(MatchError, match="ways fit") as caught:
        infer(shapes(leaves), tensors)
    assert "{2*s+j}" in caught.value.message
    assert "{s+3*j}" in caught.value.message
    _, got = infer(shapes(leaves), tensors, values=values, checkpoint=checkpoint)
    assert facts(got) == facts(want.bind(shapes(leaves), tensors))


def test_a_stack_of_the_later_layers() -> None:
    tensors = [
        CheckpointTensor(f"m.layers.{i}.mlp.up_proj.weight", (5, 3), "float32")
        for i in (2, 3, 4, 5)
    ]
    rules, bindings = infer(shapes({"layers.mlp.up.kernel": (4, 3, 5)}), tensors)
    assert (
        str(rules.rules[0])
        == "layers.mlp.up.kernel -> m.layers.{i+2}.mlp.up_proj.weight : i d f -> f d"
    )
    assert [(b.tensor, b.leaf_start[0]) for b in bindings] == [
        (t.name, j) for j, t in enumerate(tensors)
    ]
    with pytest.raises(MatchError, match="no transform"):
        infer(
            shapes({"layers.mlp.up.kernel": (3, 3, 5)}),
            [tensors[0], tensors[1], tensors[3]],
        )


def test_names_that_say_nothing_are_matched_by_size_only_if_unique() -> None:
    tensors = [
        CheckpointTensor("m.a.weight", (5, 3), "float32"),
        CheckpointTensor("m.b.weight", (7,), "float32"),
    ]
    _, bindings = infer(shapes({"foo": (3, 5), "bar": (7,)}), tensors)
    assert {(b.leaf, b.tensor) for b in bindings} == {
        ("foo", "m.a.weight"),
        ("bar", "m.b.weight"),
    }
    assert all("only ones left" in b.reason and b.confidence == 0.7 for b in bindings)
    twins = [
        CheckpointTensor(f"m.{x}.weight", (5, 3), "float32") for x in ("left", "right")
    ]
    with pytest.raises(MatchError, match="2 lines fit") as caught:
        infer(shapes({"foo": (3, 5), "bar": (3, 5)}), twins)
    assert "foo -> m.left.weight" in caught.value.message
    _, bindings = infer(
        shapes({"x.right.kernel": (3, 5), "x.left.kernel": (3, 5)}), twins
    )
    assert {(b.leaf, b.tensor) for b in bindings} == {
        ("x.left.kernel", "m.left.weight"),
        ("x.right.kernel", "m.right.weight"),
    }


def test_a_leaf_too_many_and_the_wrong_shape_are_named() -> None:
    config = config_of("llama")
    leaves = shapes(policy_leaves(config))
    leaves["rope.freqs"] = LeafShape((4,), "float32")
    with pytest.raises(
        MatchError,
        match=r"leaf rope\.freqs \(4,\): its name says nothing, no tensor left",
    ):
        infer(leaves, checkpoint_of(config), config)
    infer(leaves, checkpoint_of(config), config, given=Rules.parse("rope.freqs -> ~"))
    leaves = shapes(
        policy_leaves(config)
        | {f"layers.{i}.mlp.up.kernel": (24, 41) for i in range(3)}
    )
    with pytest.raises(
        MatchError, match=r"no transform of \(24, 41\) → \(40, 24\) fits"
    ):
        infer(leaves, checkpoint_of(config), config)


def test_random_values_arrive_where_they_belong() -> None:
    """No binding code in the oracle: Policy leaves of a Llama, transposed and merged by numpy."""
    config = config_of("llama")
    tensors = checkpoint_of(config)
    rng = np.random.default_rng(1)
    leaves = {p: rng.normal(size=s) for p, s in policy_leaves(config).items()}
    _, bindings = infer(leaves, tensors, config)
    got = {t.name: np.full(t.shape, np.nan) for t in tensors}
    for b in bindings:
        apply_binding(b, leaves[b.leaf], got[b.tensor])
    for i in range(config["num_hidden_layers"]):
        p, m = f"layers.{i}.", f"model.layers.{i}."
        for x in "qkv":
            kernel = leaves[f"{p}attn.{x}.kernel"]
            np.testing.assert_array_equal(
                got[f"{m}self_attn.{x}_proj.weight"], kernel.reshape(24, -1).T
            )
        np.testing.assert_array_equal(
            got[m + "self_attn.o_proj.weight"],
            leaves[p + "attn.o.kernel"].reshape(-1, 24).T,
        )
        for x in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                got[f"{m}mlp.{x}_proj.weight"], leaves[f"{p}mlp.{x}.kernel"].T
            )
        np.testing.assert_array_equal(
            got[m + "input_layernorm.weight"], leaves[p + "attn_norm.scale"]
        )
        np.testing.assert_array_equal(
            got[m + "post_attention_layernorm.weight"], leaves[p + "mlp_norm.scale"]
        )
    np.testing.assert_array_equal(
        got["model.embed_tokens.weight"], leaves["embed.embedding"]
    )
    np.testing.assert_array_equal(got["lm_head.weight"], leaves["lm_head.kernel"].T)
    np.testing.assert_array_equal(got["model.norm.weight"], leaves["final_norm.scale"])


def test_gate_and_up_in_one_leaf() -> None:
    tensors = [
        CheckpointTensor(f"m.layers.0.mlp.{x}_proj.weight", (10, 6), "float32")
        for x in ("gate", "up")
    ]
    rng = np.random.default_rng(0)
    checkpoint = {t.name: rng.normal(size=t.shape) for t in tensors}
    gate, up = checkpoint.values()
    with pytest.raises(MatchError, match="2 ways fit"):
        infer(shapes({"layers.0.mlp.gate_up.kernel": (6, 20)}), tensors)
    # nothing to choose
    rules, _ = infer(shapes({"layers.0.mlp.gate_up.kernel": (6, 2, 10)}), tensors)
    assert (
        "d [1|1] f -> f d" in rules.to_text()
        or "d [1|1] f -> [f|f] d" in rules.to_text()
    )
    for leaf, text in (
        (np.concatenate([gate, up]).T, "d [f|f] -> [f|f] d"),
        (np.stack([gate, up], 1).reshape(20, 6).T, "d (f [1|1]) -> [f|f] d"),
    ):
        values = {"layers.0.mlp.gate_up.kernel": leaf}
        rules, bindings = infer(values, tensors, values=values, checkpoint=checkpoint)
        assert text in rules.to_text()
        for b in bindings:
            apply_binding(b, leaf, got := np.zeros((10, 6)))
            np.testing.assert_array_equal(got, checkpoint[b.tensor])


def test_fused_on_both_sides() -> None:
    config = config_of("phi3")
    tensors = [t for t in checkpoint_of(config) if "qkv_proj" in t.name]
    same, other = (
        {f"layers.{i}.attn.{x}.kernel": (24, 64) for i in range(3)}
        for x in ("qkv_proj", "qkv")
    )
    rules, _ = infer(shapes(same), tensors, config)
    assert (
        "layers.{i}.attn.qkv_proj.kernel -> model.layers.{i}.self_attn.qkv_proj.weight : d x -> x d"
        in rules.to_text()
    )
    with pytest.raises(MatchError, match="2 ways fit") as caught:
        infer(shapes(other), tensors, config)
    assert (
        "interleaved by head in the leaf, concatenated in the checkpoint"
        in caught.value.message
    )
    # d, k, g + 2, h
    heads = {f"layers.{i}.attn.qkv.kernel": (24, 2, 4, 8) for i in range(3)}
    rules, bindings = infer(shapes(heads), tensors, config)
    assert "d k [g|1|1] h -> [k g h|k h|k h] d" in rules.to_text()
    leaf = np.random.default_rng(0).normal(size=(24, 2, 4, 8))
    got = np.full((64, 24), np.nan)
    for b in (b for b in bindings if b.leaf == "layers.0.attn.qkv.kernel"):
        apply_binding(b, leaf, got)
    parts = [
        leaf[:, :, :2].reshape(24, -1),
        leaf[:, :, 2].reshape(24, -1),
        leaf[:, :, 3].reshape(24, -1),
    ]
    np.testing.assert_array_equal(got, np.concatenate(parts, 1).T)

"""Rules applied: every transform against numpy's own reshape and transpose, and one error that lists all problems."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab._errors import CoverageError, LayoutError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._builtin_texts import POLICY
from jvlab.layout.rules._rules import apply_binding, invert_binding
from jvlab.layout.rules._ruleset import Rules, stacked
from tests.fuzzing import examples
from tests.layout.rules.families import (
    FAMILIES,
    checkpoint_of,
    config_of,
    policy_leaves,
)

Arrays = dict[str, np.ndarray]
CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 10,
}
N, K, H, D = 4, 2, 6, 10


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    """Distinct values, so that any element out of place shows."""
    return np.arange(start, start + math.prod(shape), dtype=np.float64).reshape(shape)


def bind(
    text: str, leaves: Arrays, want: Arrays, config: dict[str, Any] | None = None
) -> list[Binding]:
    tensors = [CheckpointTensor(n, a.shape, str(a.dtype)) for n, a in want.items()]
    return Rules.parse(text).bind(leaves, tensors, config)


def run(bindings: list[Binding], leaves: Arrays, want: Arrays) -> None:
    """Applies the bindings, compares with `want`, and goes back to the leaves."""
    got = {n: np.full(a.shape, np.nan) for n, a in want.items()}
    for b in bindings:
        apply_binding(b, leaves[b.leaf], got[b.tensor])
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    back = {n: np.full(a.shape, np.nan) for n, a in leaves.items()}
    for b in bindings:
        invert_binding(b, want[b.tensor], back[b.leaf])
    for name in {b.leaf for b in bindings}:
        np.testing.assert_array_equal(back[name], leaves[name], err_msg=name)


def qkv() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Checkpoint q, k, v: [heads·h, d]."""
    return (
        numbers(N * H, D),
        numbers(K * H, D, start=1000),
        numbers(K * H, D, start=2000),
    )


def test_transpose_and_heads() -> None:
    q, _, _ = qkv()
    leaf = q.T.reshape(D, N, H)
    run(
        bind("a -> q : d n h -> (n h) d", {"a": leaf}, {"q": q}, CONFIG),
        {"a": leaf},
        {"q": q},
    )
    leaf = q.reshape(N, H, D).transpose(0, 2, 1)
    run(bind("a -> q : n d h -> (n h) d", {"a": leaf}, {"q": q}), {"a": leaf}, {"q": q})


def test_fused_leaf_concatenated_grouped_and_stacked() -> None:
    q, k, v = qkv()
    want = {"m.q": q, "m.k": k, "m.v": v}
    leaf = {"a": np.concatenate([q.T, k.T, v.T], 1)}
    run(bind("a -> m.[q|k|v] : d [q|k|v] -> [q|k|v] d", leaf, want), leaf, want)
    grouped = np.concatenate(
        [q.reshape(K, N // K, H, D), k.reshape(K, 1, H, D), v.reshape(K, 1, H, D)],
        axis=1,
    ).transpose(3, 0, 1, 2)
    line = "a -> m.[q|k|v] : d (k [g|1|1] h) -> [k g h|k h|k h] d"
    leaf = {"a": grouped.reshape(D, -1)}
    run(bind(line, leaf, want, CONFIG), leaf, want)
    leaf = {"a": grouped}
    run(bind(line.replace("(k [g|1|1] h)", "k [g|1|1] h"), leaf, want), leaf, want)
    leaf = {
        "a": np.stack([k.reshape(K, H, D), v.reshape(K, H, D)]).transpose(0, 1, 3, 2)
    }
    want = {"m.k": k, "m.v": v}
    run(bind("a -> m.[k|v] : [1|1] k d h -> (k h) d", leaf, want), leaf, want)


def test_several_leaves_fill_one_tensor() -> None:
    q, k, v = qkv()
    leaves = {
        "a.q": q.T.reshape(D, N, H),
        "a.k": k.T.reshape(D, K, H),
        "a.v": v.T.reshape(D, K, H),
    }
    want = {"qkv": np.concatenate([q, k, v])}
    run(
        bind("a.[q|k|v] -> qkv : d [n|k|k] h -> [n h|k h|k h] d", leaves, want, CONFIG),
        leaves,
        want,
    )
    neox = {
        x: numbers(D, N, H, start=j * 999) for j, x in enumerate(("a.q", "a.k", "a.v"))
    }
    want = {
        "qkv": np.stack([a.transpose(1, 2, 0) for a in neox.values()], axis=1).reshape(
            3 * N * H, D
        )
    }
    run(bind("a.[q|k|v] -> qkv : d n h -> (n [1|1|1] h) d", neox, want), neox, want)


def test_fused_on_both_sides_in_different_order() -> None:
    q, k, v = qkv()
    parts = [q.reshape(K, N // K, H, D), k.reshape(K, 1, H, D), v.reshape(K, 1, H, D)]
    leaf = {"a": np.concatenate(parts, axis=1).reshape(-1, D).T}
    want = {"qkv": np.concatenate([q, k, v])}
    run(
        bind("a -> qkv : d (k [g|1|1] h) -> [k g h|k h|k h] d", leaf, want, CONFIG),
        leaf,
        want,
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacked_layers_on_any_axis(axis: int) -> None:
    want = {f"m.{i}.w": numbers(5, 7, start=100 * i) for i in range(3)}
    leaf = {"w": np.stack([a.T for a in want.values()], axis)}
    axes = ["b", "a"]
    axes.insert(axis, "i")
    run(bind(f"w -> m.{{i}}.w : {' '.join(axes)} -> a b", leaf, want), leaf, want)


def test_stacked_experts_inside_stacked_layers() -> None:
    want = {
        f"m.{i}.experts.{e}.w": numbers(3, 4, start=100 * i + 1000 * e)
        for i in range(2)
        for e in range(5)
    }
    leaf = {
        "w": np.stack(
            [
                np.stack([want[f"m.{i}.experts.{e}.w"].T for e in range(5)])
                for i in range(2)
            ]
        )
    }
    run(bind("w -> m.{i}.experts.{e}.w : i e d f -> f d", leaf, want), leaf, want)


def test_a_scan_over_groups_of_layers() -> None:
    want = {f"m.{i}.w": numbers(3, 4, start=100 * i) for i in range(6)}
    leaves = {
        f"blocks_{j}.w": np.stack([want[f"m.{2 * s + j}.w"].T for s in range(3)])
        for j in range(2)
    }
    run(bind("blocks_{j}.w -> m.{2*s+j}.w : s d f -> f d", leaves, want), leaves, want)


def test_leaves_of_single_experts_fill_a_stacked_tensor() -> None:
    whole = numbers(3, 5, 8)
    want = {"m.0.experts.gate_up": whole}
    leaves = {f"l.0.e.{e}.g": whole[e, :, :4] for e in range(3)}
    leaves |= {f"l.0.e.{e}.u": whole[e, :, 4:] for e in range(3)}
    run(
        bind(
            "l.{i}.e.{e}.[g|u] -> m.{i}.experts.gate_up : d f -> e d [f|f]",
            leaves,
            want,
        ),
        leaves,
        want,
    )


def test_tied_tensors_and_optional_ones() -> None:
    table = numbers(6, 3)
    leaves, text = (
        {"embed": table},
        "embed -> embed_tokens, lm_head?\nhead -> lm_head : d v -> v d",
    )
    run(bind(text, leaves, {"embed_tokens": table}), leaves, {"embed_tokens": table})
    both = {"embed_tokens": table, "lm_head": table}
    run(bind(text, leaves, both), leaves, both)
    own = {"embed": table, "head": table.T + 50}
    filled = {"embed_tokens": table, "lm_head": table + 50}
    # the optional copy gives way
    assert [b.leaf for b in bind(text, own, filled)] == ["embed", "head"]


def test_rotary_pairs_in_both_directions() -> None:
    half_split = numbers(N * H, D)
    interleaved = (
        half_split.reshape(N, 2, H // 2, D).transpose(0, 2, 1, 3).reshape(N * H, D)
    )
    leaf = {"a": interleaved.T.reshape(D, N, H)}
    want = {"q": half_split}
    run(bind("a -> q : d n (r two) -> (n two r) d where two=2", leaf, want), leaf, want)
    leaf = {"a": half_split.T.reshape(D, N, H)}
    want = {"q": interleaved}
    run(bind("a -> q : d n (two r) -> (n r two) d where two=2", leaf, want), leaf, want)


def test_added_constants_and_casts() -> None:
    import ml_dtypes

    leaf = {"scale": np.array([1.001, 0.5, 2.0])}
    want = {"w": leaf["scale"] - 1}
    run(bind("scale -> w - 1", leaf, want), leaf, want)
    (binding,) = bind("scale -> w + 1 as bfloat16", leaf, {"w": np.zeros(3)})
    got = np.zeros(3)
    apply_binding(binding, leaf["scale"], got)
    np.testing.assert_array_equal(
        got, (leaf["scale"] + 1).astype(ml_dtypes.bfloat16).astype(np.float64)
    )
    # 1 + w in bfloat16 would lose w: the sum is made in float32
    tiny = np.array([0.001], ml_dtypes.bfloat16)
    (binding,) = bind("a -> w + 1", {"a": tiny}, {"w": np.zeros(1)})
    apply_binding(binding, tiny, got := np.zeros(1, np.float32))
    assert got[0] == np.float32(1) + tiny.astype(np.float32)[0]


def test_arrays_of_other_shapes_are_refused() -> None:
    (binding,) = bind("a -> w : d n -> n d", {"a": numbers(2, 3)}, {"w": numbers(3, 2)})
    for leaf, tensor in (
        (numbers(2, 2), numbers(3, 2)),
        (numbers(2, 3), numbers(2, 3)),
    ):
        with pytest.raises(LayoutError, match="that were bound"):
            apply_binding(binding, leaf, tensor)
        with pytest.raises(LayoutError, match="that were bound"):
            invert_binding(binding, tensor, leaf)


def test_sizes_from_where_config_and_shapes() -> None:
    q, _, _ = qkv()
    leaf, want = {"a": q.T.copy()}, {"q": q}
    for line in (
        "where n=4",
        "where h=6",
        "where n=num_attention_heads, h=head_dim",
        "where h=head_dim*1",
    ):
        # (n h) merged on both sides: only the product matters, but it must be said
        run(
            bind(f"a -> q : d (h n) -> (n h) d {line}", {"a": _swap(q)}, want, CONFIG),
            {"a": _swap(q)},
            want,
        )
    with pytest.raises(
        CoverageError, match=r"size of axis `h`, `n` is open: add `where h=…`"
    ):
        bind("a -> q : d (n h) -> (n h) d", leaf, want)
    with pytest.raises(CoverageError, match="config has no `heads`"):
        bind("a -> q : d (n h) -> (n h) d where n=heads", leaf, want, CONFIG)
    nested = {"text_config": CONFIG, "hidden_size": 1}
    run(
        bind("a -> q : d (h n) -> (n h) d", {"a": _swap(q)}, want, nested),
        {"a": _swap(q)},
        want,
    )


def _swap(q: np.ndarray) -> np.ndarray:
    return q.reshape(N, H, D).transpose(2, 1, 0).reshape(D, H * N)


def test_axes_in_the_wrong_order_contradict_the_config() -> None:
    leaf, want = {"a": numbers(D, H, N)}, {"q": numbers(N * H, D)}
    with pytest.raises(
        CoverageError, match=r"shapes make axis `n` 6, the config says 4.*where n=\?"
    ):
        bind("a -> q : d n h -> (n h) d", leaf, want, CONFIG)
    bind("a -> q : d n h -> (n h) d where n=?, h=?", leaf, want, CONFIG)


# ---------------------------------------------------------------------------------------------------- properties


@st.composite
def _grouping(draw: st.DrawFn, axes: list[str]) -> list[list[str]]:
    """The axes in some order, cut into dimensions."""
    order = draw(st.permutations(axes))
    cuts = [j for j in range(1, len(order)) if draw(st.booleans())]
    return [
        list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)
    ]


def _text(groups: list[list[str]]) -> str:
    return " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in groups)


def _arranged(
    elementary: np.ndarray, axes: list[str], groups: list[list[str]]
) -> np.ndarray:
    """numpy's own way: from one dimension an axis to the grouped dimensions."""
    flat = [a for g in groups for a in g]
    out = elementary.transpose([axes.index(a) for a in flat])
    sizes = dict(zip(axes, elementary.shape, strict=True))
    return out.reshape([math.prod(sizes[a] for a in g) for g in groups])


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_factorisation_equals_reshape_and_transpose(data: st.DataObject) -> None:
    axes = list("abcdefg")[: data.draw(st.integers(1, 5))]
    sizes = [data.draw(st.integers(1, 4)) for _ in axes]
    left, right = data.draw(_grouping(axes)), data.draw(_grouping(axes))
    whole = numbers(*sizes)
    leaf, want = (
        {"x": _arranged(whole, axes, left)},
        {"y": _arranged(whole, axes, right)},
    )
    where = ", ".join(f"{a}={s}" for a, s in zip(axes, sizes, strict=True))
    (binding,) = bind(
        f"x -> y : {_text(left)} -> {_text(right)} where {where}", leaf, want
    )
    run([binding], leaf, want)


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_stack_and_fusion_equals_numpy(data: st.DataObject) -> None:
    """A leaf stacked over layers whose one factor is a concatenation, to several tensors of other groupings."""
    axes = list("abc")
    sizes = [data.draw(st.integers(1, 3)) for _ in axes]
    parts = [data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(2, 3)))]
    names = [f"p{j}" for j in range(len(parts))]
    layers = data.draw(st.integers(1, 3))
    left, right = (
        data.draw(_grouping(["i", *axes, "P"])),
        data.draw(_grouping([*axes, "P"])),
    )
    whole = numbers(layers, *sizes, sum(parts))
    leaf = {"x": _arranged(whole, ["i", *axes, "P"], left)}
    want = {}
    for i in range(layers):
        for j in range(len(parts)):
            piece = whole[i, ..., sum(parts[:j]) : sum(parts[: j + 1])]
            want[f"y.{i}.{names[j]}"] = _arranged(piece, [*axes, "P"], right)
    choice = f"[{'|'.join(names)}]"
    where = ", ".join(
        f"{a}={s}"
        for a, s in zip([*axes, *names, "i"], [*sizes, *parts, layers], strict=True)
    )
    text = (
        f"x -> y.{{i}}.{choice} : {_text(left)} -> {_text(right)}".replace("P", choice)
        + f" where {where}"
    )
    bindings = bind(text, leaf, want)
    assert len(bindings) == len(want)
    run(bindings, leaf, want)
    # and the same numbers the other way: the parts are leaves, the fused stack is one tensor
    back = (
        f"y.{{i}}.{choice} -> x : {_text(right)} -> {_text(left)}".replace("P", choice)
        + f" where {where}"
    )
    run(bind(back, want, leaf), want, leaf)


# ---------------------------------------------------------------------------------------------------- one error for all


def test_one_error_lists_everything_with_next_steps() -> None:
    leaves = {
        "odd": numbers(3),
        "a.q": numbers(4, 5),
        "gone": numbers(2),
        "b.0": numbers(2),
        "b.1": numbers(2),
        "c": numbers(2),
    }
    tensors = {
        "q": numbers(5, 5),
        "unfilled": numbers(3),
        "b": numbers(3, 2),
        "c1": numbers(2),
    }
    text = "a.q -> q : d n -> n d\ngone -> nowhere\nb.{i} -> b : d -> i d\nc -> c1\n[c|d] -> c[1|2]\n"
    with pytest.raises(CoverageError) as caught:
        bind(text, leaves, tensors)
    error = caught.value
    found = {(p.kind, p.leaf or p.tensor) for p in error.fields["problems"]}  # type: ignore[attr-defined]
    assert found == {
        ("leaf", "odd"),
        ("shape", "a.q"),
        ("tensor", "gone"),
        ("gap", "b"),
        ("gap", "unfilled"),
        ("overlap", "c"),
    }
    assert "leaf a.q (4, 5) does not fit tensor q (5, 5)" in error.message
    assert "rule: a.q -> q : d n -> n d" in error.message
    assert "4 of 6 elements filled, by b.0, b.1" in error.message
    # of its size, but no name says that it is the one
    assert "`odd -> …`" in error.remedy
    assert "`~ -> unfilled`" in error.remedy


def test_the_nearest_name_is_one_that_no_rule_takes() -> None:
    leaves = {"blocks.alpha": numbers(2), "blocks.gamma": numbers(3)}
    tensors = [CheckpointTensor(n, (k,), "float32") for n, k in (("a", 2), ("b", 3))]
    text = "blocks.alpha -> a\nblocks.gama -> b"
    with pytest.raises(CoverageError, match=r"the nearest is blocks\.gamma"):
        Rules.parse(text).bind(leaves, tensors, all_of_them=True)
    del leaves["blocks.gamma"]
    with pytest.raises(CoverageError, match="no leaf has this name\n"):
        Rules.parse(text).bind(leaves, tensors, all_of_them=True)


def test_two_rules_that_fill_the_same_part() -> None:
    with pytest.raises(
        CoverageError,
        match=r"tensor y \(4,\) is filled twice: a by `a -> y`, b by `b -> y`",
    ):
        bind("a -> y\nb -> y", {"a": numbers(4), "b": numbers(4)}, {"y": numbers(4)})


def test_ignored_leaves_and_unused_tensors() -> None:
    bindings = bind(
        "a -> y\nrng.{x*} -> ~\n~ -> {x*}.inv_freq",
        {"a": numbers(2), "rng.count": numbers(1)},
        {"y": numbers(2), "m.0.inv_freq": numbers(3)},
    )
    assert [(b.leaf, b.tensor) for b in bindings] == [("a", "y")]


def test_a_part_of_a_fused_tensor_without_its_leaf_is_a_gap() -> None:
    leaves = {"a.q": numbers(D, N, H), "a.k": numbers(D, K, H)}
    with pytest.raises(
        CoverageError, match=r"360 of 480 elements filled, by a\.q, a\.k"
    ):
        bind(
            "a.[q|k|v] -> qkv : d [n|k|k] h -> [n h|k h|k h] d",
            leaves,
            {"qkv": numbers((N + 2 * K) * H, D)},
            CONFIG,
        )


def test_many_problems_are_cut_short_in_text_only() -> None:
    with pytest.raises(CoverageError, match="and 28 more") as caught:
        bind("x -> y", {f"l{j}": numbers(1) for j in range(40)}, {})
    assert len(caught.value.fields["problems"]) == 40  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- built-in sets


def test_every_policy_family_has_a_table() -> None:
    assert set(POLICY) - {"gemma3_text"} == set(FAMILIES)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_policy_rules_bind_every_family(family: str, scanned: bool) -> None:
    config = config_of(family)
    tensors = checkpoint_of(config)
    leaves = {
        p: LeafShape(s, "float32") for p, s in policy_leaves(config, scanned).items()
    }
    rules = policy_rules(config, [t.name for t in tensors], scanned)
    bindings = rules.bind(leaves, tensors, config)
    assert {b.leaf for b in bindings} == set(leaves)
    assert {b.tensor for b in bindings} == {t.name for t in tensors}
    assert Rules.parse(rules.to_text()) == rules


def test_scanned_rules_mean_the_same_numbers() -> None:
    config = config_of("phi3")
    tensors = checkpoint_of(config)
    flat = {
        p: np.random.default_rng(len(p)).normal(size=s)
        for p, s in policy_leaves(config).items()
    }
    scan = {p: a for p, a in flat.items() if not p.startswith("layers.")}
    for path in {p.split(".", 2)[2] for p in flat if p.startswith("layers.")}:
        scan[f"layers.{path}"] = np.stack(
            [flat[f"layers.{i}.{path}"] for i in range(config["num_hidden_layers"])]
        )
    out = []
    for leaves, scanned in ((flat, False), (scan, True)):
        got = {t.name: np.full(t.shape, np.nan) for t in tensors}
        for b in policy_rules(config, (), scanned).bind(leaves, tensors, config):
            apply_binding(b, leaves[b.leaf], got[b.tensor])
        out.append(got)
    for name in out[0]:
        np.testing.assert_array_equal(out[0][name], out[1][name])
        assert not np.isnan(out[0][name]).any()


def test_the_checkpoints_own_prefix_is_found() -> None:
    config = config_of("gpt2")
    tensors = [
        CheckpointTensor(t.name.removeprefix("transformer."), t.shape, t.dtype)
        for t in checkpoint_of(config)
    ]
    leaves = {p: LeafShape(s, "float32") for p, s in policy_leaves(config).items()}
    assert (
        len(
            policy_rules(config, [t.name for t in tensors], scanned=False).bind(
                leaves, tensors, config
            )
        )
        == 52
    )


def test_stacking() -> None:
    rules = Rules(
        stacked(Rules.parse("layers_{i}.w -> m.{i}.w : a b -> b a\nhead -> head"))
    )
    assert rules.to_text() == "layers.w -> m.{i}.w : i a b -> b a\nhead -> head\n"


def test_checkpoint_named_trees_bind_as_they_are() -> None:
    tensors = checkpoint_of(config_of("llama"))
    bindings = Rules.named("checkpoint").bind({t.name: t for t in tensors}, tensors)
    assert all(b.leaf == b.tensor and b.leaf_shape == b.tensor_shape for b in bindings)
    assert len(bindings) == len(tensors)

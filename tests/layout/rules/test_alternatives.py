"""Other readings of leaves: which fit, which the checkpoint's numbers favour, and what an engine holds under them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.layout._checkpoint import checkpoint_tensors, read_config
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._alternatives import (
    KINDS,
    Alternative,
    alternatives,
    compare,
    joint,
    match,
    reread,
    together,
)
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import apply_binding
from jvlab.layout.rules._ruleset import Rules, stacked
from jvlab.sync._compile_tree import policy_shapes
from tests.layout.rules.planted import COMMON, SIZES, Planted, each_in_turn, planted

pytestmark = pytest.mark.slow


class World:
    """A model of one family: its right rules, leaves with random values, and the checkpoint that they make."""

    def __init__(self, family: str) -> None:
        model = jv.models.tiny(family, **{**COMMON, **SIZES[family]})
        self.config, self.tensors = read_config(model), checkpoint_tensors(model)
        self.rules = policy_rules(
            self.config, [t.name for t in self.tensors], scanned=False
        )
        self.shapes = policy_shapes(self.config, self.tensors, scanned=False)
        rng = np.random.default_rng(0)
        self.values = {
            p: rng.normal(1, 0.2, leaf.shape).astype(np.float32)
            for p, leaf in self.shapes.items()
        }
        self.checkpoint = self.laid(self.rules)

    def laid(
        self, rules: Rules, values: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        return laid(
            rules.bind(self.shapes, self.tensors, self.config), values or self.values
        )


def laid(
    bindings: list[Binding], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for b in bindings:
        apply_binding(
            b,
            values[b.leaf],
            out.setdefault(b.tensor, np.zeros(b.tensor_shape, np.float32)),
        )
    return out


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {family: World(family) for family in SIZES}


def best(found: list[Alternative], world: World) -> list[Alternative]:
    """Those that the checkpoint favours over the rules in force."""
    return [
        a
        for a in found
        if match(a, world.values, world.checkpoint).beats(
            match(a.now, world.values, world.checkpoint)
        )
    ]


@pytest.mark.parametrize("case", each_in_turn(planted()))
def test_meaning_of_a_wrong_rule_is_found_by_value(
    worlds: dict[str, World], case: Planted
):
    world = worlds[case.family]
    wrong = case.rules(world.rules)
    found = best(alternatives(wrong, world.shapes, world.tensors, world.config), world)
    assert found, "nothing fits better"
    first = min(found, key=lambda a: match(a, world.values, world.checkpoint).error)
    assert first.kind == case.kind
    assert match(first, world.values, world.checkpoint).error == 0
    named = first.apply(wrong)
    again = world.laid(named)
    assert all(
        np.array_equal(again[name], world.checkpoint[name]) for name in world.checkpoint
    )
    if len(case.right) == 1:
        assert first.rules == case.right, "the very text that was there"
    assert all(leaf in world.shapes for leaf in first.leaves)
    held = world.laid(wrong)
    read = {**world.values, **reread(first, world.values)}
    assert all(
        np.allclose(t, held[n], atol=1e-6)
        for n, t in world.laid(world.rules, read).items()
    ), "the engine's"


@pytest.mark.parametrize("family", SIZES)
def test_meaning_of_right_rules_is_left_alone(worlds: dict[str, World], family: str):
    world = worlds[family]
    found = alternatives(world.rules, world.shapes, world.tensors, world.config)
    assert len(found) > 20
    assert {a.kind for a in found} <= set(KINDS)
    assert best([*found, *joint(found)], world) == []
    drifted = {
        p: v
        + np.float32(0.02)
        * np.sin(np.arange(v.size, dtype=np.float32)).reshape(v.shape)
        for p, v in world.values.items()
    }
    trained = World.__new__(World)
    trained.__dict__ = {**world.__dict__, "values": drifted}
    assert best(found, trained) == [], "training moves values, not meanings"


def test_meaning_is_not_settled_by_placeholders(worlds: dict[str, World]):
    """Zeros, ones, or other random numbers are near the checkpoint in no reading, an offset of one included."""
    world = worlds["llama"]
    found = alternatives(world.rules, world.shapes, world.tensors, world.config)
    rng = np.random.default_rng(1)
    for make in (
        np.zeros,
        np.ones,
        lambda shape, dtype: rng.normal(0, 1, shape).astype(dtype),
    ):
        values = {p: make(leaf.shape, np.float32) for p, leaf in world.shapes.items()}
        ones = {
            **world.checkpoint,
            **{n: np.ones_like(t) for n, t in world.checkpoint.items() if "norm" in n},
        }
        for a in found:
            for checkpoint in (world.checkpoint, ones):
                assert not match(a, values, checkpoint).beats(
                    match(a.now, values, checkpoint)
                ), a


def test_meaning_in_several_rules_at_once(worlds: dict[str, World]):
    """Interleaved in q and in k: neither alone makes it right, both together do; so do offsets of all norms."""
    world = worlds["llama"]
    names = "layers.{i}.attn.%s.kernel -> model.layers.{i}.self_attn.%s_proj.weight"
    rotary = names + " : d n (r two) -> (n two r) d where two=2"
    plain = f"{names} : d k h -> (k h) d" % ("v", "v")
    kept = [
        r for r in world.rules if "attn.q" not in str(r) and "attn.[k|v]" not in str(r)
    ]
    wrong = Rules(
        (
            *kept,
            *Rules.parse(
                "\n".join([rotary % ("q", "q"), rotary % ("k", "k"), plain])
            ).rules,
        )
    )
    found = joint(alternatives(wrong, world.shapes, world.tensors, world.config))
    both = [
        a
        for a in best(found, world)
        if match(a, world.values, world.checkpoint).error == 0
    ]
    assert len(both) == 1
    assert both[0].kind == "rotary order"
    assert len(both[0].rules) == 2
    assert all("two" not in r for r in both[0].rules)
    assert together([both[0], both[0]]) is None


def test_meaning_of_flat_and_stacked_leaves():
    """Leaves as a checkpoint has them (`{path*}`), scanned ones, and scans over groups of layers."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "head_dim": 8,
        "hidden_size": 32,
    }
    names = {
        f"model.layers.{i}.self_attn.{x}_proj.weight": (32, 32)
        for i in range(2)
        for x in "qkv"
    }
    tensors = [CheckpointTensor(n, s, "float32") for n, s in names.items()]
    shapes = {n: LeafShape(s, "float32") for n, s in names.items()}
    found = alternatives(Rules.named("checkpoint"), shapes, tensors, config)
    texts = {a.rules[0] for a in found if a.kind == "transposed"}
    assert (
        "model.layers.{i}.self_attn.q_proj.weight -> model.layers.{i}.self_attn.q_proj.weight : a b -> b a"
        in texts
    )
    assert any(
        "(h n) b -> (n h) b" in a.rule_text for a in found if a.kind == "head order"
    )
    assert any("two" in a.rule_text for a in found if a.kind == "rotary order")
    swaps = [a for a in found if a.kind == "swapped"]
    assert len(swaps) == 3
    assert all(
        a.apply(Rules.named("checkpoint")).bind(shapes, tensors, config)
        for a in found
        if a.rules
    )

    rules = Rules(
        stacked(
            Rules.parse(
                "layers.{i}.q -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d"
            )
        )
    )
    tensors = [
        CheckpointTensor(
            f"model.layers.{i}.self_attn.q_proj.weight", (32, 32), "float32"
        )
        for i in range(4)
    ]
    found = alternatives(
        rules, {"layers.q": LeafShape((4, 32, 4, 8), "float32")}, tensors, config
    )
    assert any(
        a.rules
        == (
            "layers.q -> model.layers.{i}.self_attn.q_proj.weight : n d i h -> (n h) d",
        )
        for a in found
    )

    rules = Rules.parse(
        "blocks_{j}.q -> model.layers.{2*s+j}.self_attn.q_proj.weight : s d n h -> (n h) d"
    )
    shapes = {f"blocks_{j}.q": LeafShape((2, 32, 4, 8), "float32") for j in range(2)}
    found = [
        a
        for a in alternatives(rules, shapes, tensors, config)
        if a.kind == "layer order"
    ]
    assert [a.rules[0] for a in found] == [
        "blocks_{j}.q -> model.layers.{s+2*j}.self_attn.q_proj.weight : s d n h -> (n h) d"
    ]


def test_meaning_of_a_multiple_of_the_checkpoint(worlds: dict[str, World]):
    """MaxText's q over the root of head_dim: no rule can say it, so the factor is named."""
    world = worlds["llama"]
    root = 32**0.5
    divided = World.__new__(World)
    values = {
        p: v / np.float32(root) if ".attn.q." in p else v
        for p, v in world.values.items()
    }
    divided.__dict__ = {**world.__dict__, "values": values}
    (found,) = best(
        alternatives(world.rules, world.shapes, world.tensors, world.config), divided
    )
    assert (found.kind, found.rules) == ("scale", ())
    assert found.factor == pytest.approx(root)
    assert found.apply(world.rules) == world.rules


def test_scale_and_constant_samples():
    line = np.linspace(1, 2, 50)
    found = compare([(line / 8, line)])
    assert found.correlation == pytest.approx(1)
    assert not found.fits
    assert not compare([(np.ones(50), line)]).related
    assert not compare([(line, np.full(50, np.nan))]).related
    rng = np.random.default_rng(0)
    alike = [
        (m + 0.1 * rng.normal(size=50), m + 0.1 * rng.normal(size=50))
        for m in (0.2, 1.0, 5.0)
    ]
    assert not compare(alike).related, (
        "two models of a family have norms of the same sizes, and other values"
    )

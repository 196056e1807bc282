"""Layers stacked in one leaf and taken in another order: a rule can say it, and the right one is found again."""

from __future__ import annotations

import numpy as np
import pytest

import jvlab as jv
from jvlab.layout._checkpoint import checkpoint_tensors, read_config
from jvlab.layout.rules._alternatives import alternatives, match
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import apply_binding
from jvlab.sync._compile_tree import policy_shapes
from tests.layout.rules.planted import (
    COMMON,
    SIZES,
    each_in_turn,
    planted_in_stacks,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", each_in_turn(planted_in_stacks()))
def test_every_planted_rule_of_a_stacked_tree_is_named_by_value(case) -> None:
    model = jv.models.tiny(case.family, **{**COMMON, **SIZES[case.family]})
    config, tensors = read_config(model), checkpoint_tensors(model)
    right, shapes = (
        policy_rules(config, [t.name for t in tensors]),
        policy_shapes(config, tensors),
    )
    rng = np.random.default_rng(0)
    values = {
        p: rng.normal(1, 0.2, leaf.shape).astype(np.float32)
        for p, leaf in shapes.items()
    }
    checkpoint = {t.name: np.zeros(t.shape, np.float32) for t in tensors}
    for b in right.bind(shapes, tensors, config):
        apply_binding(b, values[b.leaf], checkpoint[b.tensor])
    wrong = case.rules(right)
    found = alternatives(wrong, shapes, tensors, config)
    fits = [
        a
        for a in found
        if set(a.replaces) <= {str(r) for r in wrong}
        and match(a, values, checkpoint).error < 1e-5
    ]
    good = [a for a in fits if case.kind == a.kind]
    assert good, [(a.kind, a.rules) for a in fits]
    if len(case.right) == 1:
        assert case.right in [a.rules for a in good]


def test_a_stack_in_another_order_is_a_reading_of_the_right_rules() -> None:
    model = jv.models.tiny("llama", **{**COMMON, **SIZES["llama"]})
    config, tensors = read_config(model), checkpoint_tensors(model)
    right, shapes = (
        policy_rules(config, [t.name for t in tensors]),
        policy_shapes(config, tensors),
    )
    found = [
        a
        for a in alternatives(right, shapes, tensors, config)
        if a.kind == "layer order"
    ]
    texts = {text for a in found for text in a.rules}
    assert any(
        "layers.attn.o.kernel -> model.layers.[2|1|0].self_attn.o_proj.weight : [1|1|1]"
        in t
        for t in texts
    )
    assert any("model.layers.[1|2|0].mlp.up_proj" in t for t in texts), (
        "one choice of a rule with choices"
    )

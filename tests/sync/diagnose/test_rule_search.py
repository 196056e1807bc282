"""Wrong rules found by function, several at once too: a policy that computes as an engine with their numbers would."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab._deadline import Deadline
from jvlab.layout._checkpoint import checkpoint_tensors, read_config
from jvlab.layout._tree import flatten
from jvlab.layout.rules._alternatives import alternatives
from jvlab.layout.rules._builtin import policy_rules
from jvlab.layout.rules._rules import apply_binding, invert_binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import changed_rules, policy_shapes
from jvlab.sync.diagnose._rule_search import (
    ByFunction,
    by_value,
    largest,
    verdict_of,
)
from tests.fuzzing import soak_but
from tests.layout.rules.planted import COMMON, KV, MLP, NORMS, OUT, SIZES, Q, scanned

pytestmark = pytest.mark.slow

TOKENS = np.array([(7 * k) % 500 + 3 for k in range(16)], np.int32)


class World:
    """A policy, and what an engine would compute that was sent its parameters by some rules."""

    def __init__(self) -> None:
        model = jv.models.tiny("llama", seed=1, **{**COMMON, **SIZES["llama"]})
        self.policy = jv.Policy.from_pretrained(model)
        self.config, self.tensors = read_config(model), checkpoint_tensors(model)
        self.right = policy_rules(self.config, [t.name for t in self.tensors])
        self.shapes = policy_shapes(self.config, self.tensors)
        self.arrays = flatten(self.policy.params).arrays
        self.trainer = np.asarray(
            self.policy.logprobs(self.policy.params, TOKENS[None])
        )[0]

    def engine(self, wrong: Rules) -> Any:
        """The parameters as the engine understands them."""
        tensors = {t.name: np.zeros(t.shape, np.float32) for t in self.tensors}
        for b in wrong.bind(self.shapes, self.tensors, self.config):
            apply_binding(b, np.asarray(self.arrays[b.leaf]), tensors[b.tensor])
        leaves = {path: np.array(a) for path, a in self.arrays.items()}
        for b in self.right.bind(self.shapes, self.tensors, self.config):
            invert_binding(b, tensors[b.tensor], leaves[b.leaf])
        new = {id(a): leaves[path] for path, a in self.arrays.items()}
        return jax.tree.map(
            lambda leaf: jax.device_put(new[id(leaf)]), self.policy.params
        )

    def search(
        self, wrong: Rules, states: bool = False, seconds: float = 300.0
    ) -> tuple[Any, float]:
        held = self.engine(wrong)
        numbers = np.asarray(self.policy.logprobs(held, TOKENS[None]))[0].copy()
        numbers[0] = np.nan
        seen = lambda: (
            np.asarray(self.policy.hidden(held, TOKENS[None]))[:, 0] if states else None
        )
        search = ByFunction(
            self.policy,
            self.policy.params,
            TOKENS,
            numbers,
            1e-3,
            Deadline(seconds),
            seen,
        )
        found = alternatives(wrong, self.shapes, self.tensors, self.config)
        return search.search(found), largest(numbers, self.trainer)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def rules_with(right: Rules, *texts: str) -> Rules:
    for text in texts:
        right = changed_rules(right, scanned(text))
    return right


def bound(world: World, rules: Rules) -> set[object]:
    found = rules.bind(world.shapes, world.tensors, world.config)
    return {
        (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add) for b in found
    }


SEVERAL = {
    "the same change in three rules": (
        f"{Q} : d n h -> (h n) d",
        f"{KV} : d k h -> (h k) d",
        f"{OUT} : n h d -> d (h n)",
    ),
    "two kinds": (
        f"{Q} : d n h -> d (n h)",
        MLP.replace("[gate|up|down]_", "[up|gate|down]_"),
    ),
    "three kinds": (
        f"{OUT} : n h d -> (n h) d",
        MLP.replace("[gate|up|down]_", "[up|gate|down]_"),
        f"{NORMS} + 1",
    ),
}


@pytest.mark.parametrize("name", soak_but(["two kinds"], SEVERAL))
def test_meaning_of_several_wrong_rules_by_function(world: World, name: str):
    """Different kinds at once need the engine's hidden states: its outputs alone do not lead from one to the next."""
    wrong = rules_with(world.right, *SEVERAL[name])
    found, gap = world.search(wrong, states="kinds" in name)
    assert gap > 1
    assert found is not None
    assert bound(world, found.alternative.apply(wrong)) == bound(world, world.right)
    assert found.gap < 1e-3
    verdict, remedy = verdict_of(found, gap, True)
    assert "wrong rule" in verdict
    assert all(text in remedy for text in found.alternative.rules)


class OutOfTimeAfter30(ByFunction):
    """Its clock is the number of trials: how many a busy machine makes in some seconds is not known."""

    @property
    def out_of_time(self) -> bool:
        return self.tried >= 30


def test_meaning_right_or_out_of_time_names_nothing(world: World):
    """A model that computes differently with rightly read leaves: no rule is blamed. Nor is one without the time."""
    wrong = rules_with(world.right, f"{Q} : d n h -> d (n h)")
    assert world.search(wrong, seconds=0.0)[0] is None
    other = jv.Policy.from_pretrained(
        jv.models.tiny("llama", seed=2, **{**COMMON, **SIZES["llama"]})
    )
    numbers = np.asarray(other.logprobs(other.params, TOKENS[None]))[0].copy()
    numbers[0] = np.nan
    search = OutOfTimeAfter30(
        world.policy, world.policy.params, TOKENS, numbers, 1e-3, Deadline(6)
    )
    assert (
        search.search(
            alternatives(world.right, world.shapes, world.tensors, world.config)
        )
        is None
    )
    assert search.tried > 20


def test_meaning_of_several_wrong_rules_by_value(world: World):
    checkpoint: dict[str, np.ndarray] = {
        t.name: np.zeros(t.shape, np.float32) for t in world.tensors
    }
    for b in world.right.bind(world.shapes, world.tensors, world.config):
        apply_binding(b, np.asarray(world.arrays[b.leaf]), checkpoint[b.tensor])
    for texts in SEVERAL.values():
        wrong = rules_with(world.right, *texts)
        found, _ = by_value(
            alternatives(wrong, world.shapes, world.tensors, world.config),
            world.arrays,
            checkpoint,
        )
        assert found is not None
        assert bound(world, found.alternative.apply(wrong)) == bound(world, world.right)
    right, seen = by_value(
        alternatives(world.right, world.shapes, world.tensors, world.config),
        world.arrays,
        checkpoint,
    )
    assert right is None
    assert "are related to" in seen

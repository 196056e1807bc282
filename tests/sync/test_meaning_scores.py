"""Meaning by function: what log-probabilities of both sides say about a mapping, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab._deadline import Deadline
from jvlab.layout._tree import flatten
from jvlab.layout.rules._alternatives import alternatives_of, joint, reread
from jvlab.layout.rules._builtin import policy_rules
from jvlab.sync._meaning import owner_of, scorer_of, unpack
from jvlab.sync._value_check import ambiguities_of
from jvlab.sync._value_samples import blind_spots, explain, gap_of, judge_scores

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 500, (2, 24))


class World:
    """A policy, its mapping, and what an engine would say that was synced by another reading of its leaves."""

    def __init__(self, shrink: float = 1.0) -> None:
        model = jv.models.tiny("llama", vocab_size=512, num_hidden_layers=2)
        self.policy = jv.Policy.from_pretrained(model)
        self.params = jax.tree.map(lambda a: a * shrink, self.policy.params)
        tensors = self.policy._tensors
        rules = policy_rules(self.policy.hf_config, [t.name for t in tensors])
        shapes = flatten(self.params).shapes
        bindings = rules.bind(shapes, tensors, self.policy.hf_config)
        origin = SimpleNamespace(
            rules=rules, shapes=shapes, tensors=tensors, config=self.policy.hf_config
        )
        self.mapping = SimpleNamespace(bindings=bindings, _origin=origin, _link=None)
        self.known = ambiguities_of(self.mapping)
        self.scorer = scorer_of(self.policy)

    def ask(self, params: Any) -> np.ndarray:
        return self.scorer(params, TOKENS)[:, 1:]

    def engine(self, kind: str, leaf: str) -> np.ndarray:
        """What is computed if these leaves were meant another way than the mapping in force takes them."""
        single = alternatives_of(self.mapping)
        other = next(
            a for a in [*joint(single), *single] if a.kind == kind and leaf in a.leaves
        )
        arrays = flatten(self.params).arrays
        new = {id(arrays[path]): value for path, value in reread(other, arrays).items()}
        leaves, tree = jax.tree.flatten(self.params)
        return self.ask(jax.tree.unflatten(tree, [new.get(id(a), a) for a in leaves]))

    def judge(self, engine: np.ndarray, half: bool = False) -> Any:
        found = judge_scores(
            engine, self.ask(self.params), half, self.known, self.params, self.ask
        )
        if found.state != "failed":
            return found
        return explain(
            found,
            engine,
            half,
            self.params,
            self.ask,
            self.mapping,
            until=Deadline(600),
        )


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_meaning_agrees_and_settles_what_was_ambiguous(world: World) -> None:
    noise = 1e-6 * np.random.default_rng(1).standard_normal((2, 23))
    found = world.judge(world.ask(world.params) + noise)
    assert (found.state, dict(found.ambiguous)) == ("checked", {})
    assert "layers.attn.q.kernel" in world.known
    assert "layers.attn_norm.scale" in world.known


@pytest.mark.parametrize(
    ("kind", "leaf", "rule"),
    [
        ("transposed", "layers.attn.q.kernel", "d n h -> d (n h)"),
        ("rotary order", "layers.attn.k.kernel", "where two=2"),
        ("swapped", "layers.mlp.gate.kernel", "[up|gate|down]_proj"),
        ("offset", "layers.attn_norm.scale", "+ 1"),
    ],
)
def test_meaning_fails_and_names_the_leaves_and_the_rule(
    world: World, kind: str, leaf: str, rule: str
) -> None:
    found = world.judge(world.engine(kind, leaf))
    assert found.state == "failed"
    assert leaf in found.suspects
    assert rule in found.rule
    assert "nats apart" in found.why


def test_meaning_is_not_settled_by_a_function_that_does_not_depend_on_it() -> None:
    # as some initialise: attention looks everywhere alike, and gates are closed
    blind = World(shrink=1e-3)
    assert (
        gap_of(
            blind.engine("transposed", "layers.attn.q.kernel"),
            blind.ask(blind.params),
            False,
        )
        < 1e-3
    )
    found = blind.judge(blind.ask(blind.params))
    assert found.state == "unchecked" or "layers.attn.q.kernel" in found.ambiguous
    assert "hardly depend" in found.why


def test_meaning_between_equal_and_wrong_is_neither(world: World) -> None:
    trainer = world.ask(world.params)
    assert world.judge(trainer + 0.01).state == "unchecked"
    assert world.judge(trainer + 0.01, half=True).state == "checked", (
        "16-bit floats stray so far"
    )
    assert world.judge(trainer + 1.0, half=True).state == "failed"
    broken = trainer.copy()
    broken[0, 3] = np.nan
    assert world.judge(broken).state == "failed"
    spoiled = judge_scores(broken, broken, False, world.known, world.params, world.ask)
    assert spoiled.state == "unchecked", (
        "a trainer that is broken itself is no evidence"
    )


def test_meaning_finds_its_trainer(world: World) -> None:
    policy = world.policy
    assert owner_of(policy.params) is policy
    assert owner_of(jax.tree.map(lambda a: a + 0, policy.params)) is None, (
        "other arrays may be another model's"
    )
    params, scorer = unpack(policy)
    assert params is policy.params
    assert scorer is not None
    params, scorer = unpack((policy.params, policy.logprobs_fn))
    assert params is policy.params
    assert scorer is not None
    assert np.allclose(scorer(params, TOKENS), world.scorer(params, TOKENS), atol=1e-5)
    for tree in (policy.params, (policy.params, policy.params), [policy.params]):
        assert unpack(tree) == (tree, None)


def test_meaning_by_function_cannot_tell_leaves_apart_that_compute_the_same(
    world: World,
) -> None:
    """That log-probabilities depend on a leaf is not enough: nearly equal ones can be exchanged."""

    def blind(params: Any) -> dict[str, str]:
        right = world.ask(params)
        moved = lambda tree: gap_of(world.ask(tree), right, False)
        return blind_spots(params, world.mapping, moved, 1e-4, Deadline(600))

    assert blind(world.params) == {}
    layers = world.params["layers"]
    norms = {"layers.attn_norm.scale", "layers.mlp_norm.scale"}
    near = {"scale": layers["attn_norm"]["scale"] * (1 + 1e-6)}
    found = blind({**world.params, "layers": {**layers, "mlp_norm": near}})
    assert set(found) == norms
    assert all("exchanged" in why for why in found.values())
    found = blind(
        {**world.params, "layers": {**layers, "mlp_norm": layers["attn_norm"]}}
    )
    assert set(found) == norms
    flat = {"scale": jax.numpy.ones_like(near["scale"])}
    assert blind({**world.params, "layers": {**layers, "mlp_norm": flat}}) == {
        "layers.mlp_norm.scale": "one number everywhere"
    }

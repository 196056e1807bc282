"""Planted: wrong rules in a real engine of three families, each named by `link.bisect` with the rule to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import jvlab as jv
from tests.layout.rules.planted import COMMON, SIZES, Planted
from tests.layout.rules.planted import planted_in_stacks as planted

pytestmark = pytest.mark.engine

PROMPT = [(7 * k) % 500 + 3 for k in range(12)]
# a wrong mapping is refused by itself, by value or by function; here it is let in
OFF: dict[str, Any] = {"meaning": "off"}
KINDS = {case.kind for case in planted()}
NAMES = {case.name for case in planted()}


class Family:
    """An engine in this process; a policy of the same shapes and other numbers; the right rules."""

    def __init__(self, family: str) -> None:
        sizes = {**COMMON, **SIZES[family]}
        self.model = jv.models.tiny(family, **sizes)
        self.pool = jv.Pool.in_process(self.model, name=family)
        self.policy = jv.Policy.from_pretrained(jv.models.tiny(family, seed=1, **sizes))
        with self.pool.connect(self.policy.params, rules="policy", **OFF) as link:
            self.right, self._origin = link.mapping.rules, link.mapping._source()

    def bound(self, rules: Any) -> set[object]:
        """What rules do, however they are written."""
        found = rules.bind(
            self._origin.shapes, self._origin.tensors, self._origin.config
        )
        return {
            (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)
            for b in found
        }

    def synced(self, rules: Any) -> Any:
        link = self.pool.connect(self.policy.params, rules=rules, **OFF)
        assert link.sync(self.policy.params).verified, (
            "bits arrive under any rule that covers"
        )
        return link


class Engines:
    """One engine in this process at a time: that of the family that was asked for last."""

    now: Family | None = None

    def of(self, name: str) -> Family:
        if self.now is None or self.now.pool.name != name:
            self.close()
            self.now = Family(name)
        return self.now

    def close(self) -> None:
        if self.now is not None:
            self.now.pool.close()
            self.now = None


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    held = Engines()
    yield held
    held.close()


def cases() -> list[Any]:
    """Family by family, the right rules last. Every kind in the first, and one in gemma3; the rest soaks."""
    seen: set[object] = {"qwen3"}
    out = []
    for family in SIZES:
        first = not out
        own = [c for c in planted() if c.family == family]
        for case in sorted(own, key=lambda c: c.kind in seen):
            facts = {family, case.kind}
            marks = [pytest.mark.soak] if facts <= seen else []
            seen |= facts
            out.append(
                pytest.param(family, case, id=f"{family}: {case.name}", marks=marks)
            )
        marks = [] if first else [pytest.mark.soak]
        out.append(pytest.param(family, None, id=f"{family}: right rules", marks=marks))
    return out


def test_meaning_planted_kinds():
    for name in SIZES:
        assert len({c.name for c in planted() if c.family == name}) >= 8
    assert {
        "transposed",
        "head order",
        "rotary order",
        "offset",
        "swapped",
        "layer order",
    } == KINDS
    assert len(NAMES) >= 12


@pytest.mark.parametrize(("name", "case"), cases())
def test_meaning_of_a_planted_rule_is_found_by_function(
    engines: Engines, name: str, case: Planted | None
):
    family = engines.of(name)
    if case is None:
        right_rules_are_not_suspected(family)
        return
    with family.synced(case.rules(family.right)) as link:
        found = link.bisect(PROMPT, family.policy, max_tokens=4)
        facts = found.checks[5].facts
    assert found.cause == "rule", found
    assert facts["how"] == "function"
    assert facts["kind"] == case.kind
    assert facts["left"] < 1e-3 < found.gap
    if len(case.right) == 1:
        assert facts["write"] == list(case.right)
    assert all(rule in found.remedy for rule in facts["write"])
    assert "the same weights" not in str(found)
    assert "rope_theta" not in str(found)
    assert family.bound(found.rules) == family.bound(family.right), (
        "the rules to write are the right ones"
    )


def right_rules_are_not_suspected(family: Family) -> None:
    """After all that was planted: the right rules, and a trainer that moved on, which is no question of rules."""
    with family.synced(family.right) as link:
        found = link.bisect(PROMPT, family.policy, max_tokens=4)
        assert found.agrees, found
        assert found.rules is None
        other = jv.Policy.from_pretrained(family.model)
        assert link.bisect(PROMPT, other, max_tokens=4).cause == "version"
    wrong = next(
        c for c in planted() if c.family == family.pool.name and c.name == "query heads"
    )
    with family.pool.connect(
        other.params, rules=wrong.rules(family.right), **OFF
    ) as link:
        link.sync(other.params)
        found = link.bisect(PROMPT, other, max_tokens=4)
        assert found.cause == "rule", found
        assert found.checks[5].facts["how"] == "value", (
            "the trainer's numbers are those of the model's files"
        )
        assert found.checks[5].facts["write"] == list(wrong.right)
        assert link.bisect(PROMPT, params=other.params).cause == "rule", (
            "no policy is needed for that"
        )

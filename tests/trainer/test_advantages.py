"""Advantages against formulas written out here, and dynamic sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab.trainer._losses import ADVANTAGES, advantages, groups_with_spread

REWARDS, GROUPS = [1.0, 0.0, 0.5, 3.0, 3.0, 2.0, -1.0], [4, 4, 4, 9, 9, 9, 2]


def by_hand(
    rewards: list[float], groups: list[int], kind: str, eps: float
) -> list[float]:
    """The formulas, one sample at a time, in plain Python."""
    out = []
    for i, (r, g) in enumerate(zip(rewards, groups, strict=True)):
        mates = [x for x, h in zip(rewards, groups, strict=True) if h == g]
        others = [
            x
            for j, (x, h) in enumerate(zip(rewards, groups, strict=True))
            if h == g and j != i
        ]
        pool = rewards if kind == "reinforce++" else mates
        mean = sum(pool) / len(pool)
        std = (sum((x - mean) ** 2 for x in pool) / len(pool)) ** 0.5
        match kind:
            case "mean":
                out.append(r - mean)
            case "rloo":
                out.append(r - sum(others) / len(others) if others else 0.0)
            case _:
                out.append((r - mean) / (std + eps))
    return out


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_formula(kind: str):
    found = advantages(REWARDS, GROUPS, kind, eps=1e-3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, by_hand(REWARDS, GROUPS, kind, 1e-3), rtol=1e-5, atol=1e-6
    )


rewards_and_groups = st.lists(
    st.tuples(st.floats(-10, 10, allow_subnormal=False), st.integers(0, 3)),
    min_size=1,
    max_size=20,
)


@given(rewards_and_groups, st.sampled_from(["group", "mean", "rloo"]))
def test_advantages_of_a_group_sum_to_zero(pairs, kind: str):
    rewards, groups = map(np.array, zip(*pairs, strict=True))
    found = advantages(rewards, groups, kind)
    for g in set(groups.tolist()):
        assert abs(found[groups == g].sum()) < 1e-3


@given(rewards_and_groups, st.sampled_from(ADVANTAGES), st.randoms())
def test_order_of_samples_does_not_matter(pairs, kind: str, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards, groups = map(np.array, zip(*pairs, strict=True))
    np.testing.assert_allclose(
        advantages(rewards[order], groups[order], kind),
        advantages(rewards, groups, kind)[order],
        rtol=1e-4,
        atol=1e-5,
    )


def test_equal_rewards_give_exactly_zero():
    for kind in ("group", "mean", "rloo"):
        assert (advantages([0.1] * 7, [0] * 7, kind) == 0).all()


def test_dynamic_sampling_keeps_groups_with_spread():
    kept = groups_with_spread([1, 1, 0, 1, 0.5, 0.6, 7], [0, 0, 1, 1, 2, 2, 3])
    assert kept.tolist() == [False, False, True, True, True, True, False]

"""How evenly experts are used: shares and entropy by layer, from a step's micro-batches to the record's table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.record._events import StepEvent
from jvlab.record._metrics import step_table
from jvlab.trainer._step import TrainStep, expert_balance
from tests.trainer.decoder.test_experts import SIZES
from tests.trainer.test_step import toy_batch

pytestmark = pytest.mark.slow


def test_shares_and_entropy_by_layer() -> None:
    even, uneven, one = [3, 3, 3, 3], [6, 3, 3, 0], [12, 0, 0, 0]
    found = expert_balance(
        [np.array([even, uneven, one]), np.array([even, uneven, one])]
    )
    assert found["max"] == (0.25, 0.5, 1.0)
    assert found["min"] == (0.25, 0.0, 0.0)
    assert found["entropy"] == pytest.approx((1.0, 0.75, 0.0))
    parts = expert_balance([np.array([[4, 0]]), np.array([[0, 4]])])
    assert parts["max"] == (0.5,), "of the whole step, not of its micro-batches"
    assert expert_balance([None, None]) == {}


def test_the_table_has_the_most_uneven_layers() -> None:
    given = {"max": (0.25, 0.5), "min": (0.25, 0.125), "entropy": (1.0, 0.8)}
    steps = [
        StepEvent(start=i, stop=i + 1, step=i, version=i, experts=given if i else {})
        for i in range(2)
    ]
    again = StepEvent.from_fields(steps[1].to_json())
    assert again.experts == given
    table = step_table(steps)
    assert [table[f"expert_{name}"][1] for name in ("max", "min", "entropy")] == [
        0.5,
        0.125,
        0.8,
    ]
    assert np.isnan(table["expert_max"][0])
    assert "expert_max" not in step_table(steps[:1]), (
        "a dense model has no such columns"
    )


@pytest.mark.slow
def test_a_step_trains_router_and_experts_and_reports_their_use() -> None:
    policy = jv.Policy.from_pretrained(jv.models.tiny("qwen3_moe", **SIZES))
    step, batch = (
        TrainStep(
            policy.logprobs_fn, learning_rate=1e-2, token_budget=64, donate=False
        ),
        toy_batch(),
    )
    state, report = step(step.init(policy.params), batch)
    assert report.micro_batches > 1
    assert not report.skipped
    assert [len(report.experts[name]) for name in ("max", "min", "entropy")] == [
        2,
        2,
        2,
    ]
    assert all(1 / 6 <= share <= 1 / 2 for share in report.experts["max"]), (
        "two different experts for each token"
    )
    moved: Any = state.params["layers"]["moe"]
    for name, leaf in policy.params["layers"]["moe"].items():
        assert np.any(
            np.asarray(moved[name]["kernel"]) != np.asarray(leaf["kernel"])
        ), name

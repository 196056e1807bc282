"""`jvlab bench whatif` without an engine: how its errors follow from what it measured, and how noise is told apart."""

from __future__ import annotations

import json
import statistics
import time

import pytest

import jvlab as jv
from jvlab.bench._whatif import CASES, Noise, errors_of, row_of
from tests.analysis.forecast.synthetic import record, setting


def test_three_settings_are_fitted_and_nine_others_predicted():
    assert [case.use for case in CASES] == ["fit"] * 3 + ["predict"] * 9
    assert len({case.name for case in CASES}) == 12


def test_errors_are_those_of_the_runs_that_were_not_fitted():
    rows = []
    for case in (*CASES[:3], CASES[3]):
        made = setting(
            case.prompts_per_step,
            case.group_size,
            case.max_tokens,
            case.max_staleness,
            case.replicas,
        )
        rows.append(row_of(case, record(made, steps=16), 10))
    facts = json.loads(json.dumps({"runs": rows}))
    found = errors_of(facts)
    assert found["errors"] == list(
        jv.whatif(facts).check(rows[3]["observation"]).errors
    )
    assert (
        found["median_error"] == found["worst_error"] == abs(found["errors"][0]) < 0.05
    )
    slower = json.loads(json.dumps(facts))
    for step in slower["runs"][3]["observation"]["steps"]:
        # the window of each step: the machine was busy with something else
        step[6] *= 1.5
    assert errors_of(slower)["errors"][0] == pytest.approx(
        (1 + found["errors"][0]) / 1.5 - 1, abs=1e-6
    )
    assert errors_of({"runs": rows[:3]}) == {}
    assert statistics.median(rows[0]["steps_s"]) == pytest.approx(
        rows[0]["step_s"], abs=1e-3
    )


def test_noise_counts_what_others_took():
    noise = Noise()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    shares = noise.shares()
    assert set(shares) == {"steal", "others"}
    assert all(0 <= share <= 1 for share in shares.values())

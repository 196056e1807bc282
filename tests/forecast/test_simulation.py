"""The simulated loop: equal to its closed form on-policy, within the operational laws' bounds where phases overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jvlab.forecast._closed_form import closed_form
from jvlab.forecast._rates import Rates
from jvlab.forecast._setting import Setting
from jvlab.forecast._simulate import BatchShape, Simulated, simulate
from tests.forecast.synthetic import RATES, setting

SHAPE = BatchShape(cached=0.5, padding=0.1)


def run(wanted: Setting, rates: Rates = RATES, steps: int = 12, lengths: list[int] | None = None) -> Simulated:
    sizes = lengths or [wanted.max_tokens] * wanted.group_size
    return simulate(wanted, rates, lambda count: sizes[:count], SHAPE, steps, 3 * (wanted.max_staleness + 1))


def some_rates(random: np.random.Generator) -> Rates:
    """Costs of very different machines: each cost between a tenth and ten times that of the first."""
    loads = dict(zip(("engine_load", "train_load"), random.uniform(0.3, 1.3, 2).tolist(), strict=True))
    scaled = {n: v * 10 ** random.uniform(-1, 1) for n, v in vars(RATES).items() if n not in (*loads, "pause")}
    return Rates(**scaled, pause=random.uniform(0, 1), **loads)


@pytest.mark.parametrize("seed", range(8))
def test_on_policy_it_is_the_closed_form(seed: int):
    random = np.random.default_rng(seed)
    wanted = setting(4, 4, int(random.integers(8, 200)), 0, int(random.choice([1, 2, 4])))
    lengths = random.integers(1, wanted.max_tokens + 1, wanted.group_size).tolist()
    rates = some_rates(random)
    exact = closed_form(wanted, rates, lengths * wanted.prompts_per_step, SHAPE)
    ran = run(wanted, rates, lengths=lengths)
    assert exact.low == exact.high
    assert ran.windows == pytest.approx(exact.low, rel=1e-6)
    assert ran.staleness_max == 0


@pytest.mark.parametrize("seed", range(12))
def test_overlapping_it_stays_within_the_bounds_and_the_staleness(seed: int):
    random = np.random.default_rng(100 + seed)
    placement = ("shared", "trainer apart", "apart")[seed % 3]
    wanted = setting(int(random.integers(1, 9)), 4, 60, int(random.integers(1, 4)), int(random.choice([1, 2])))
    wanted = wanted.changed(placement=placement)
    rates = some_rates(random)
    bounds = closed_form(wanted, rates, [60] * wanted.samples, SHAPE)
    ran = run(wanted, rates, steps=6 * (wanted.max_staleness + 1))
    assert bounds.low * 0.98 <= ran.windows.mean() <= bounds.high * 1.10
    assert 0 < ran.staleness_max <= wanted.max_staleness
    assert ran.tokens == pytest.approx(60 * wanted.samples)


def test_a_device_that_nobody_contends_for_would_break_the_bound():
    """The attack: without contention the same run is faster than the shared device's work allows."""
    wanted = setting(8, 8, 64, 1)
    crowded = replace(RATES, engine_load=1.3, train_load=1.3)
    low = closed_form(wanted, crowded, [64] * 64, SHAPE).low
    assert run(wanted, crowded).windows.mean() >= 0.98 * low
    free = replace(RATES, engine_load=0.01, train_load=0.01)
    assert run(wanted, free).windows.mean() < 0.98 * low


def test_more_devices_and_more_staleness_help():
    on_policy, ahead = run(setting(8, 8, 64, 0)), run(setting(8, 8, 64, 1))
    assert ahead.windows.mean() < on_policy.windows.mean()
    apart = run(setting(8, 8, 64, 1).changed(placement="apart"))
    assert apart.windows.mean() < ahead.windows.mean()
    assert run(setting(8, 8, 64, 1, 2).changed(placement="apart")).engine_busy < apart.engine_busy
    assert on_policy.idle_s > 0
    assert on_policy.trainer_busy + on_policy.engine_busy < 1


def test_steps_within_inverts_decoding():
    for rows, context, steps in ((1, 0, 3.0), (64, 4096, 17.5), (8, 30, 1e-3)):
        assert RATES.steps_within(RATES.decoding(steps, rows, context), rows, context) == pytest.approx(steps)
    flat = replace(RATES, context=0.0)
    assert flat.steps_within(flat.decoding(5.0, 3, 9), 3, 9) == pytest.approx(5.0)

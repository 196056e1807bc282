"""The simulated loop: equal to its closed form on-policy, within the operational laws' bounds where phases overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jvlab.analysis.forecast._simulate import (
    BatchShape,
    Setting,
    Simulated,
    StepCosts,
    closed_form,
    simulate,
    speeds,
)
from tests.analysis.forecast.synthetic import RATES, setting

SHAPE = BatchShape(cached=0.5, padding=0.1)


def run(
    wanted: Setting,
    rates: StepCosts = RATES,
    steps: int = 12,
    lengths: list[int] | None = None,
) -> Simulated:
    sizes = lengths or [wanted.max_tokens] * wanted.group_size
    return simulate(
        wanted,
        rates,
        lambda count: sizes[:count],
        SHAPE,
        steps,
        3 * (wanted.max_staleness + 1),
    )


def some_rates(random: np.random.Generator) -> StepCosts:
    """Costs of very different machines: each cost between a tenth and ten times that of the first."""
    loads = dict(
        zip(
            ("engine_load", "train_load"),
            random.uniform(0.3, 1.3, 2).tolist(),
            strict=True,
        )
    )
    scaled = {
        n: v * 10 ** random.uniform(-1, 1)
        for n, v in vars(RATES).items()
        if n not in (*loads, "pause", "cores")
    }
    return StepCosts(
        **scaled, pause=random.uniform(0, 1), **loads, cores=int(random.choice([1, 2]))
    )


@pytest.mark.parametrize("seed", range(8))
def test_on_policy_it_is_the_closed_form(seed: int):
    random = np.random.default_rng(seed)
    wanted = setting(
        4, 4, int(random.integers(8, 200)), 0, int(random.choice([1, 2, 4]))
    )
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
    wanted = setting(
        int(random.integers(1, 9)),
        4,
        60,
        int(random.integers(1, 4)),
        int(random.choice([1, 2])),
    )
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
    assert (
        run(setting(8, 8, 64, 1, 2).changed(placement="apart")).engine_busy
        < apart.engine_busy
    )
    assert on_policy.idle_s > 0
    assert on_policy.trainer_busy + on_policy.engine_busy < 1


def test_steps_within_inverts_decoding():
    for rows, context, steps in ((1, 0, 3.0), (64, 4096, 17.5), (8, 30, 1e-3)):
        assert RATES.steps_within(
            RATES.decoding(steps, rows, context), rows, context
        ) == pytest.approx(steps)
    flat = replace(RATES, context=0.0)
    assert flat.steps_within(flat.decoding(5.0, 3, 9), 3, 9) == pytest.approx(5.0)


# Sharing a device -----------------------------------------------------------------------------------------------------


def test_who_wants_less_than_an_equal_part_gets_it():
    assert speeds([(0.5, 0)]) == speeds([(1.0, None)]) == speeds([(1.3, 0)]) == [1.0]
    assert speeds([(0.3, 0), (0.6, None)]) == [1.0, 1.0]
    assert speeds([(1.0, 0), (1.0, None)]) == [0.5, 0.5]
    assert speeds([(0.4, 0), (1.0, None)]) == pytest.approx([1.0, 0.6])
    assert speeds([(0.2, 0), (1.0, 1), (1.0, None)]) == pytest.approx([1.0, 0.4, 0.4])
    both = speeds([(1.2, 0), (1.2, None)])
    assert sum(both) < 1, "above 1, both together are slower than one after the other"


@pytest.mark.parametrize("seed", range(4))
def test_a_device_gives_no_more_than_it_has(seed: int):
    loads = np.random.default_rng(seed).uniform(0.1, 1.0, 5).tolist()
    claims = [(load, number) for number, load in enumerate(loads[1:])]
    found = speeds([(loads[0], None), *claims])
    taken = sum(load * speed for load, speed in zip(loads, found, strict=True))
    assert taken == pytest.approx(min(1.0, sum(loads)))


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_a_trainer_in_step_on_all_cores_is_what_a_scheduler_of_ticks_gives_it(
    engines: int,
):
    """Each core's tick goes to its engine for a share of the time; a tick counts for the trainer if all cores do."""
    load, cores = 0.4, 4
    random = np.random.default_rng(0)
    free = (random.random((200_000, engines)) >= load).all(axis=1)
    found = speeds([(1.0, None), *[(load, i) for i in range(engines)]], cores)
    assert found[0] == pytest.approx(free.mean(), abs=0.01)
    assert found[1:] == [1.0] * engines
    assert speeds([(1.0, None), (load, 0), (load, cores)], cores)[0] == pytest.approx(
        1 / 3
    ), "both on one core"


def test_a_probe_is_work_of_the_engines():
    # one batch after the other
    free = replace(RATES, engine_load=0.1, train_load=0.1, prompt=1e-3, train=3.0)
    wanted = setting(8, 4, 64, 1, 2)
    ran, strict = (
        run(wanted, free, steps=12),
        run(wanted.changed(max_staleness=0), free),
    )
    probe = free.admission(*SHAPE.probe(wanted, [64])) / 2
    assert probe == pytest.approx((4 * 0.001 + 4 * 94 * 1e-3) / 2)
    busy = lambda one: one.engine_busy * one.windows.mean()
    assert busy(ran) == pytest.approx(busy(strict) + probe, rel=0.02)
    assert ran.phases["score"] >= 0.95 * probe
    assert strict.phases["score"] == 0, "a batch of the current version is not scored"

"""`jv.whatif` on records of a simulated machine whose costs are known, and on committed runs of a CPU and an H200."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.analysis.forecast._calibrate import calibrate, fit
from jvlab.analysis.forecast._observe import Observation
from jvlab.analysis.forecast._simulate import Setting
from jvlab.analysis.forecast._whatif import Lengths, WhatIf
from jvlab.record._record import Record
from jvlab.trainer._micro_batches import Packer
from tests.analysis.forecast.synthetic import RATES, record, setting
from tests.pages import unquoted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FITTED = (setting(4, 4, 48), setting(8, 8, 96), setting(8, 4, 64, 1, 2))
OTHERS = (
    setting(8, 4, 64),
    setting(4, 8, 128),
    setting(8, 8, 64, 1),
    setting(4, 8, 64, 2),
    setting(8, 8, 64, 0, 2),
)


@pytest.fixture(scope="module")
def plan() -> WhatIf:
    return jv.whatif(*[record(s, noise=0.03, seed=i) for i, s in enumerate(FITTED)])


def test_three_runs_predict_others(plan: WhatIf):
    table = plan.check(*[record(s, steps=20) for s in OTHERS])
    errors = [abs(e) for e in table.errors]
    assert len(errors) == len(OTHERS)
    assert statistics.median(errors) < 0.04
    assert max(errors) < 0.10
    inside = [row.low <= (row.measured_s or 0) <= row.high for row in table]
    assert sum(inside) >= len(OTHERS) - 1, table


def test_a_machine_that_changed_is_seen_in_the_errors(plan: WhatIf):
    """The attack: the same settings on a machine whose engine is a third slower."""
    slower = replace(RATES, step=RATES.step * 1.5, row=RATES.row * 1.5)
    table = plan.check(*[record(s, slower, steps=20) for s in OTHERS])
    assert statistics.median(table.errors) < -0.15


def test_the_fit_finds_what_overlapping_costs(plan: WhatIf):
    assert plan.fit.overlapping
    assert (
        abs(
            plan.rates.engine_load
            + plan.rates.train_load
            - RATES.engine_load
            - RATES.train_load
        )
        < 0.4
    )
    assert plan.fit.generation_error < 0.05
    assert plan.rates.syncing(2) == pytest.approx(RATES.syncing(2), rel=0.05)
    assert plan.rates.rewarding(4) == pytest.approx(RATES.rewarding(4), rel=0.3)


def test_one_run_says_how_little_it_knows():
    alone = jv.whatif(record(setting(8, 4, 64)))
    width = lambda f: (f.high - f.low) / f.step_s
    same, larger = alone.predict(), alone.predict(prompts_per_step=64)
    assert same.step_s == pytest.approx(alone.seen[0].step_s, rel=0.02)
    assert width(larger) > 2 * width(same)
    assert any("samples of an engine: 256" in note for note in larger.notes)
    assert any("assumed" in note for note in alone.predict(max_staleness=1).notes)
    assert same.notes == ()


def test_a_forecast_is_the_same_each_time(plan: WhatIf):
    again = jv.whatif(*plan.seen)
    assert again.predict(max_staleness=1) == plan.predict(max_staleness=1)


def test_an_observation_survives_json(plan: WhatIf):
    for seen in plan.seen:
        copy = Observation.of(json.loads(json.dumps(seen.to_json())))
        assert copy.setting == seen.setting
        assert copy.step_s == pytest.approx(seen.step_s, abs=1e-4)
        assert [g.lengths for g in copy.groups] == [g.lengths for g in seen.groups]
    with pytest.raises(ConfigError, match="not an observation"):
        Observation.of({"name": "x"})


def test_samples_that_end_by_themselves():
    random = np.random.default_rng(0)
    ends = lambda count: np.minimum(random.geometric(1 / 40, count), 64).tolist()
    seen = Observation.of(record(setting(4, 4, 64), lengths=ends))
    # a record without kept samples knows the mean of each group only
    lengths = Lengths([seen])
    assert not lengths.fixed
    drawn = lengths.draw(4000, 64, np.random.default_rng(1))
    assert np.mean(drawn) == pytest.approx(np.mean(seen.lengths), rel=0.1)
    assert max(lengths.draw(4000, 30, np.random.default_rng(1))) == 30
    typical = lengths.typical(16, 64)
    assert len(typical) == 16
    assert np.mean(typical) == pytest.approx(np.mean(drawn), rel=0.1)
    assert (
        Lengths([Observation.of(record(setting(4, 4, 64)))]).draw(3, 100, random)
        == [100] * 3
    )
    plan = WhatIf([seen])
    assert plan.predict(max_tokens=16).step_s < plan.predict().step_s


def test_prefix_hits_save_prompt_work():
    seen = Observation.of(record(setting(4, 8, 32)))
    hit = replace(
        seen, groups=tuple(replace(g, computed=g.prompt) for g in seen.groups)
    )
    assert WhatIf([seen])._shape(seen.setting).cached == 0
    assert WhatIf([hit])._shape(seen.setting).cached == pytest.approx(1.0)
    assert WhatIf([hit])._shape(seen.setting).computed_prompt(
        seen.setting
    ) == pytest.approx(seen.setting.prompt_tokens)


def test_suggestions_keep_the_budget(plan: WhatIf):
    found = plan.suggest(budget={"max_staleness": 1, "step_s": 2.0})
    assert 1 <= len(found) <= 5
    assert all(f.high <= 2.0 and f.setting.max_staleness <= 1 for f in found)
    assert [f.tokens_per_s for f in found] == sorted(
        (f.tokens_per_s for f in found), reverse=True
    )
    wide = plan.suggest(budget={"devices": 3}, group_size=8)
    assert wide[0].setting.placement == "apart"
    assert all(f.setting.devices <= 3 and f.setting.group_size == 8 for f in wide)
    assert (
        wide[0].tokens_per_s
        > plan.suggest(budget={"devices": 1}, group_size=8)[0].tokens_per_s
    )
    with pytest.raises(ConfigError, match="the shortest step is"):
        plan.suggest(budget={"step_s": 0.01})
    with pytest.raises(ConfigError, match="budget has steps=3"):
        plan.suggest(budget={"steps": 3})


def test_wrong_questions_are_answered_with_a_remedy(plan: WhatIf):
    with pytest.raises(ConfigError, match="did you mean 'replicas'"):
        plan.predict(replica=2)
    for wrong in (
        {"replicas": 0},
        {"max_staleness": -1},
        {"max_tokens": 1.5},
        {"placement": "moon"},
    ):
        with pytest.raises(ConfigError):
            plan.predict(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without a run"):
        jv.whatif()
    with pytest.raises(ConfigError, match="holds no record"):
        jv.whatif(3)
    with pytest.raises(ConfigError, match="at least one more"):
        jv.whatif(Record.of(record(setting(), steps=14).events()[:3]))


def test_noise_does_not_make_costs_lower():
    """The mean of many noisy rows is what is fitted; with errors relative to what each took, slow ones count less."""
    random = np.random.default_rng(0)
    features = np.stack([np.ones(400), random.uniform(10, 100, 400)], axis=1)
    seconds = (features @ [0.5, 0.02] * (1 + 0.2 * random.standard_normal(400)))[None]
    prior = (np.array([0.5, 0.5]), np.array([0.5, 0.5]))
    found = fit(features, seconds, *prior, 0.2, np.ones_like(seconds))[0]
    assert features.mean(axis=0) @ found == pytest.approx(seconds.mean(), rel=0.01)
    naive = np.linalg.lstsq(features / seconds.T, np.ones(400), rcond=None)[0]
    assert features.mean(axis=0) @ naive < 0.96 * seconds.mean()


def test_a_draw_is_as_likely_as_the_fit(plan: WhatIf):
    """Draws differ, and explain the rows about as well as the fit itself: none is negative or far away."""
    fit = calibrate(plan.seen, seed=3)
    assert len({draw.step for draw in fit.draws}) > 10
    assert all(min(vars(draw).values()) >= 0 for draw in fit.draws)
    times = [draw.decoding(96, 64, 64 * 30) for draw in fit.draws]
    assert np.std(times) / np.mean(times) < 0.15


# What one term is for -------------------------------------------------------------------------------------------------


def _off(plan: WhatIf, *truth: Record) -> float:
    """The largest error of predictions without their intervals."""
    seen = [Observation.of(one) for one in truth]
    return max(
        abs(plan.predict(o.setting, interval=False).step_s / o.step_s - 1) for o in seen
    )


def test_attention_over_whole_rows_costs_by_their_length():
    """Long samples are laid two in a row, and some of middle length one in a row: their tokens cost less."""
    rates = replace(RATES, train_token=1e-4, train_context=2.5e-7)
    short, middle, ahead, long = (
        s.changed(prompt_tokens=48.0) for s in (*FITTED, setting(4, 8, 128))
    )
    lay = jv.whatif(record(short, rates, rows=(0.04, 200.0)))._shape
    rows = {s: (lay(s).padding, lay(s).span) for s in (short, middle, ahead, long)}
    assert [rows[s][1] for s in (short, middle, ahead, long)] == [200, 152, 232, 368]
    fitted = [
        record(s, rates, rows=rows[s], noise=0.01, seed=i)
        for i, s in enumerate((short, middle, ahead))
    ]
    truth = record(long, rates, rows=rows[long])
    assert _off(jv.whatif(*fitted), truth) < 0.05
    # the attack: what a row holds is unknown
    silent = [replace(Observation.of(one), token_budget=0) for one in fitted]
    assert _off(WhatIf([_by_samples(o) for o in silent]), truth) > 0.08


def _by_samples(o: Observation) -> Observation:
    """As if attention kept to a sample."""
    return replace(
        o,
        steps=tuple(
            replace(s, span=o.setting.prompt_tokens + o.setting.max_tokens)
            for s in o.steps
        ),
    )


def test_cores_of_their_own():
    """Two engines on two cores hold a trainer up more than twice as one, but do not slow each other down."""
    rates = replace(
        RATES, engine_load=0.5, train_load=1.0, cores=2, train_token=2e-4, step=0.012
    )
    fitted = [
        Observation.of(record(s, rates, noise=0.01, seed=i))
        for i, s in enumerate(FITTED)
    ]
    truth = [
        record(s, rates, steps=20)
        for s in (setting(8, 8, 64, 1), setting(8, 4, 128, 1), setting(8, 8, 48, 2, 2))
    ]
    plan = WhatIf(fitted)
    assert (plan.rates.engine_load, plan.rates.cores) == (
        pytest.approx(0.5, abs=0.11),
        2,
    )
    assert _off(plan, *truth) < 0.05
    # the attack: the same records, as if of one device
    shared = WhatIf([replace(o, cores=1) for o in fitted])
    assert _off(shared, *truth) > 0.08


# Runs of two CPU cores ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return json.loads((ROOT / "tests/baselines/whatif_cpu.json").read_text())


def test_nine_settings_of_a_cpu_from_three(cpu: dict[str, Any]):
    facts = cpu["result"]
    others = [row["observation"] for row in facts["runs"] if row["use"] == "predict"]
    plan = jv.whatif(facts)
    assert (len(plan.seen), len(others)) == (3, 9)
    table = plan.check(*others)
    assert table.errors == pytest.approx(facts["errors"], abs=0.002), (
        "the model changed: write its new errors down"
    )
    sizes = sorted(abs(e) for e in table.errors)
    stated = [facts["median_error"], facts["worst_error"]]
    assert [statistics.median(sizes), sizes[-1]] == pytest.approx(stated, abs=0.002)
    assert statistics.median(sizes) <= 0.08
    assert sizes[-1] <= 0.20
    assert sum(row.low <= (row.measured_s or 0) <= row.high for row in table) >= 8
    for stated in (facts, cpu["other_fits"]):
        percent = [f"{100 * stated[n]:.0f} %" for n in ("median_error", "worst_error")]
        assert not unquoted("notebooks/LIMITS.md", *percent)


def test_five_settings_of_later(cpu: dict[str, Any]):
    """Nobody had looked at them when the model was made: a harder question than the nine."""
    later, plan = cpu["later"], jv.whatif(cpu["result"])
    asked = [(Setting(**row["setting"]), row["step_s"]) for row in later["runs"]]
    off = [plan.predict(setting).step_s / took - 1 for setting, took in asked]
    assert off == pytest.approx([row["error"] for row in later["runs"]], abs=0.002), (
        "write its new errors down"
    )
    sizes = sorted(map(abs, off))
    stated = [
        later["median_error"],
        later["worst_error"],
        *map(later["own_hour"].get, ("median_error", "worst_error")),
    ]
    assert [statistics.median(sizes), sizes[-1]] == pytest.approx(stated[:2], abs=0.002)
    percent = [f"{100 * error:.0f} %" for error in stated]
    assert not unquoted("notebooks/LIMITS.md", *percent)


def test_the_two_that_were_missed_by_most_ran_on_a_faster_machine(cpu: dict[str, Any]):
    """Every sync moves the same bytes: its time is a measure of the machine that no setting changes."""
    runs, errors = cpu["result"]["runs"], cpu["result"]["errors"]
    seen = [Observation.of(row["observation"]) for row in runs]
    took = [statistics.median(s.stop - s.start for s in o.syncs) for o in seen]
    relative = [
        t
        / statistics.median(
            u
            for p, u in zip(seen, took, strict=True)
            if p.setting.replicas == o.setting.replicas
        )
        for o, t in zip(seen, took, strict=True)
    ]
    speed = [
        ratio
        for row, ratio in zip(runs, relative, strict=True)
        if row["use"] == "predict"
    ]
    assert sum(abs(error) > 0.1 for error in errors) == 2
    assert all(
        (ratio < 0.85) == (error > 0.1)
        for ratio, error in zip(speed, errors, strict=True)
    )


@pytest.mark.soak
def test_other_choices_of_three(cpu: dict[str, Any]):
    """How much of that is the choice of the three: two on-policy settings and one other, every combination of them."""
    seen = [Observation.of(row["observation"]) for row in cpu["result"]["runs"]]
    strict, ahead = (
        [o for o in seen if (o.setting.max_staleness > 0) == late]
        for late in (False, True)
    )
    medians, worst = [], []
    for *pair, one in (
        (*pair, one) for pair in itertools.combinations(strict, 2) for one in ahead
    ):
        plan = WhatIf([*pair, one])
        rest = [o for o in seen if o not in (*pair, one)]
        off = sorted(
            abs(plan.predict(o.setting, interval=False).step_s / o.step_s - 1)
            for o in rest
        )
        medians.append(statistics.median(off))
        worst.append(off[-1])
    stated = cpu["other_fits"]
    assert len(medians) == stated["fits"] == 90
    found = [statistics.median(medians), statistics.median(worst)]
    assert found == pytest.approx(
        [stated["median_error"], stated["worst_error"]], abs=0.005
    )


def test_the_rows_of_these_runs_are_those_of_the_packer(cpu: dict[str, Any]):
    """What forecasts lay samples into rows with is what the trainer computed with: equal to the token, step by step."""
    for row in cpu["result"]["runs"]:
        seen = Observation.of(row["observation"])
        prompts, packer = (
            {g.index: g for g in seen.groups},
            Packer(seen.token_budget, seen.short_rows),
        )
        for step in seen.steps:
            own = [prompts[i] for i in step.groups]
            parts = [
                *packer.parts(
                    np.array([round(g.prompt) + n for g in own for n in g.lengths])
                )
            ]
            assert sum(part.tokens for part in parts) == pytest.approx(step.tokens), (
                "measured with other rows"
            )
            assert {part.width for part in parts} == {round(step.span)}


# Runs of an H200 ------------------------------------------------------------------------------------------------------


def test_k1_from_k0_on_an_h200():
    """Fitted to both on-policy runs, the overlapping ones: the same steps of the same transient, two of them each."""
    result = json.loads((ROOT / "tests/baselines/h200.json").read_text())["grpo_size"][
        "result"
    ]
    plan = jv.whatif(result)
    assert [o.setting.max_staleness for o in plan.seen] == [0, 0]
    table = plan.check(result)
    assert [(row.setting.max_tokens, row.setting.max_staleness) for row in table] == [
        (512, 0),
        (512, 1),
        (3000, 0),
        (3000, 1),
    ]
    assert max(abs(e) for e in table.errors) < 0.10
    assert all(row.low < (row.measured_s or 0) < row.high for row in table)
    for row, run in zip(table, result["runs"], strict=False):
        assert run["step_s"] == row.measured_s
        if row.setting.max_staleness:
            short, long = run["steps_s"]
            assert long > 2 * short, "measured steps alternate; so do simulated ones"
            ran = plan._simulate(row.setting, plan.rates, warm=1, steps=2).windows
            assert ran.tolist() == pytest.approx([short, long], rel=0.2)


def test_limits_says_how_far_it_was_off_on_h200s():
    parts = json.loads((ROOT / "tests/baselines/h200.json").read_text())
    off: dict[tuple[str, int, int], float] = {}
    for name in ("grpo_size", "grpo_staleness", "grpo_staleness_slow_host"):
        result = parts[name]["result"]
        for row, error in zip(
            rows := jv.whatif(result).check(result), rows.errors, strict=True
        ):
            off[name, row.setting.max_staleness, row.setting.max_tokens] = 100 * abs(
                error
            )
    six = [error for (name, _, _), error in off.items() if name == "grpo_staleness"]
    assert len(six) == 6
    assert max(six) <= 10  # what was asked
    short = [off["grpo_size", 1, n] for n in (512, 3000)]
    slow = [
        off["grpo_staleness_slow_host", k, n]
        for k, n in ((1, 512), (1, 3000), (2, 512))
    ]
    figures = (
        f"{max(six):.0f} %",
        f"{short[0]:.0f} and {short[1]:.0f} %",
        f"{slow[0]:.0f} and {slow[1]:.0f} %",
        f"{slow[2]:.0f} %",
    )
    assert not unquoted("notebooks/LIMITS.md", *figures)


def test_limits_says_what_staleness_brought_on_h200s():
    parts = json.loads((ROOT / "tests/baselines/h200.json").read_text())
    results = [parts[name]["result"] for name in ("grpo_size", "grpo_staleness")]
    one = [100 * (r[f"k1_vs_k0_ratio_{n}"] - 1) for r in results for n in (512, 3000)]
    two = [100 * (results[1][f"k2_vs_k0_ratio_{n}"] - 1) for n in (512, 3000)]
    figures = (
        f"{min(one):.0f} to {max(one):.0f} %",
        f"{two[0]:.0f} and {two[1]:.0f} %",
    )
    assert not unquoted("notebooks/LIMITS.md", *figures)


def test_a_result_of_another_bench_is_refused():
    with pytest.raises(ConfigError, match="not the result"):
        jv.whatif({"runs": {"k0": {}}})
    with pytest.raises(ConfigError, match="how long its steps were"):
        jv.whatif({"runs": [{"who": "TRL", "tokens": 3}]})


# Absurd records -------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


def without(*kinds: str, after: int = -1) -> Callable[[list[Any]], list[Any]]:
    """Events but those of these kinds; of steps, but those after this one."""
    left = lambda e: e.kind not in kinds or (e.kind == "step" and e.step <= after)
    return lambda events: [e for e in events if left(e)]


def changed(kind: str | None = None, **values: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda events: [
        replace(e, **values) if kind in (None, e.kind) else e for e in events
    ]


def configured(**values: Any) -> Callable[[list[Any]], list[Any]]:
    with_config = lambda e: (
        replace(e, config={**e.config, **values}) if e.kind == "run_start" else e
    )
    return lambda events: [with_config(e) for e in events]


def extra(**values: Any) -> Callable[[list[Any]], list[Any]]:
    return changed("step", extra=values)


ABSURD: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "empty": (lambda events: [], "does not say when"),
    "no start": (without("run_start"), "does not say when"),
    "no step": (without("step"), "has 0 steps"),
    "one step": (without("step", after=0), "has 1 step;"),
    "no rollouts": (without("rollout"), "trained on"),
    "groups of another run": (changed("step", groups=(900, 901)), "trained on"),
    "steps without groups": (changed("step", groups=()), "trained on"),
    "no times": (changed(start=NAN, stop=NAN), "from nan"),
    "steps without times": (changed("step", start=NAN, stop=NAN), "step 0 from nan"),
    "rollouts without times": (
        changed("rollout", start=NAN, stop=NAN),
        "group 0 from nan",
    ),
    "all at once": (changed(start=1.0, stop=1.0), "time"),
    "no tokens": (changed("rollout", tokens=0), "no generated token"),
    "tokens below zero": (changed("rollout", tokens=-50), "group 0"),
    "prompts below zero": (changed("rollout", prompt_tokens=-50), "prompt_tokens"),
    "samples below zero": (changed("rollout", samples=-4), "prompt_tokens"),
    "pause below zero": (changed("sync", pause=-4.0), "sync 0"),
    "unknown size": (configured(group_size="x"), "settings"),
    "no size": (configured(group_size=None), "settings"),
    "size of zero": (configured(group_size=0), "group_size=0"),
    "bound below zero": (configured(max_staleness=-1), "max_staleness=-1"),
    "endless": (configured(prompts_per_step=INF), "settings"),
    "sampling is text": (configured(sampling="x"), "settings"),
    "no max_tokens": (configured(sampling={}), "settings"),
    "max_tokens of NaN": (configured(sampling={"max_tokens": NAN}), "settings"),
    "cores as text": (configured(cores="x"), "wrong kind"),
    "cores as nothing": (configured(cores=None), "wrong kind"),
    "no cores": (configured(cores=0), "0 cores"),
    "cores below zero": (configured(cores=-3), "-3 cores"),
    "padding as text": (extra(padding="x"), "wrong kind"),
    "padding of NaN": (extra(padding=NAN), "padding nan|step 0"),
    "padding of all": (extra(padding=1.0), "padding 1"),
    "padding below zero": (extra(padding=-3.0), "padding -3"),
    "rows without a length": (extra(short_rows=True), "wrong kind"),
    "budget as text": (extra(token_budget="x"), "wrong kind"),
    "budget below zero": (extra(token_budget=-5), "token_budget -5"),
    "all compiled": (extra(compiled=3), "compiled"),
}


@pytest.fixture(scope="module")
def events() -> list[Any]:
    return record(setting(4, 4, 48), steps=8).events()


@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_record_is_refused_with_a_remedy(events: list[Any], what: str):
    change, says = ABSURD[what]
    with pytest.raises(ConfigError, match=says) as caught:
        jv.whatif(Record.of(change(events)))
    assert caught.value.remedy


def test_times_before_zero_are_times(events: list[Any]):
    """A clock's zero means nothing."""
    moved = [replace(e, start=e.start - 1e6, stop=e.stop - 1e6) for e in events]
    assert jv.whatif(Record.of(moved)).predict().step_s == pytest.approx(
        jv.whatif(Record.of(events)).predict().step_s
    )


@pytest.mark.parametrize(
    "change",
    [
        {"groups": []},
        {"steps": []},
        {"steps": [[1]]},
        {"groups": None},
        {"setting": {"a": 1}},
        {"stopped": "x"},
        {"stopped": 7},
        {"groups": [[0, "p", 0.0, 1.0, 1.0, [], 10.0, 10.0]]},
        {"groups": [[0, "p", 0.0, 1.0, 1.0, "abc", 10.0, 10.0]]},
        {"groups": [[0, "p", 0.0, 1.0, 1.0, [[5, 10**8]], 10.0, 10.0]]},
        {"steps": [["a", "b", 1, 1, [0], True, 1, 0]] * 3},
        {"steps": [[0.0, 1.0, 1.0, 1.0, [0], False, 1.0, 0.0]] * 3},
        {"steps": [[0.0, 1.0, 1.0, 1.0, [0], True, -1.0, 0.0]] * 3},
        {"cores": 0},
        {"padding": 5},
        {"facts": 5},
    ],
    ids=str,
)
def test_an_absurd_observation_is_refused_with_a_remedy(
    events: list[Any], change: dict[str, Any]
):
    seen = Observation.of(Record.of(events)).to_json()
    with pytest.raises(ConfigError) as caught:
        jv.whatif({**seen, **change})
    assert caught.value.remedy


@pytest.mark.parametrize(
    "source",
    [
        None,
        5,
        [1, 2],
        "no such folder",
        {},
        {"runs": []},
        {"runs": 5},
        {"runs": [{"tokens": 1, "steps_s": []}]},
        {"runs": [{"tokens": 1, "steps_s": [1], "max_staleness": 0}]},
        {
            "runs": [
                {
                    "tokens": "x",
                    "steps_s": ["a"],
                    "max_staleness": 0,
                    "seconds": {},
                    "padding": 0,
                }
            ]
        },
        {"runs": [{"observation": 5, "use": "fit"}]},
    ],
    ids=str,
)
def test_absurd_sources_are_refused_with_a_remedy(source: Any):
    with pytest.raises(ConfigError) as caught:
        jv.whatif(source)
    assert caught.value.remedy


def test_absurd_questions_are_refused_with_a_remedy(events: list[Any]):
    plan = jv.whatif(Record.of(events))
    for change in (
        {"group_size": NAN},
        {"prompt_tokens": "x"},
        {"prompt_tokens": INF},
        {"replicas": "2"},
    ):
        with pytest.raises(ConfigError) as caught:
            plan.predict(**change)  # type: ignore[arg-type]
        assert caught.value.remedy
    for budget in (5, {"step_s": NAN}, {"step_s": "x"}, {"replicas": -1}):
        with pytest.raises(ConfigError) as caught:
            plan.suggest(budget=budget)  # type: ignore[arg-type]
        assert caught.value.remedy
    assert plan.suggest(budget={"devices": INF, "max_staleness": 0}).errors == ()

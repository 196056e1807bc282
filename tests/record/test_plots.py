"""Figures: every panel is drawn from the record's numbers, labelled, and none fails on little or nothing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.record._events import Event, RolloutEvent, StepEvent, SyncEvent
from jvlab.record._record import Record
from jvlab.views._record_plots import run_figure, staleness_figure, throughput_figure
from jvlab.views._timeline import timeline_figure
from tests.fuzzing import in_turn
from tests.record.synthetic import made_up, start

pytest.importorskip("matplotlib")

FIGURES = [run_figure, staleness_figure, throughput_figure, timeline_figure]


def render(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


ODD: dict[str, list[Event]] = {
    "empty": [],
    "one step": made_up(1, 0, 1),
    "bare": [start(), StepEvent(step=5, version=5)],  # nothing measured, no times
    "no step": [
        RolloutEvent(start=0, stop=1, tokens=3),
        SyncEvent(version=1, start=1, stop=1, verified=False),
    ],
    "20 replicas": made_up(16, 3, 20),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "make"), in_turn(list(ODD), FIGURES))
def test_no_record_is_too_odd_to_draw(make, case: str) -> None:
    assert render(make(Record.of(ODD[case]))).startswith(b"\x89PNG")


@pytest.mark.parametrize("gap", [0.0, float("inf")])
def test_a_gap_of_nothing_and_of_everything(gap: float) -> None:
    events = [
        StepEvent(step=5, version=5, start=0, stop=1, logprob_gap=gap, versions={5: 3})
    ]
    render(run_figure(Record.of(events)))


@pytest.mark.parametrize("make", FIGURES)
def test_every_panel_is_labelled(make) -> None:
    for ax in make(Record.of(made_up(25, 2))).axes:
        if ax.get_label() != "<colorbar>":
            assert ax.get_title(loc="left")
            assert ax.get_xlabel()


def test_the_run_figure_draws_the_numbers() -> None:
    record = Record.of(made_up(25, 0))
    table = record.steps()
    panels: dict[str, Any] = {
        ax.get_title(loc="left"): ax for ax in run_figure(record).axes
    }
    assert np.array_equal(panels["Reward"].lines[0].get_ydata(), table["reward_mean"])
    assert np.array_equal(
        panels["Entropy of the policy"].lines[0].get_ydata(), table["entropy"]
    )
    gap = panels["Trainer against engine"]
    assert any(np.allclose(line.get_ydata(), 1e-3) for line in gap.lines)  # the alarm
    tops = np.zeros(25)
    for bars in panels["Time of a step"].containers:
        tops += [bar.get_height() for bar in bars]
    # slivers under half a per cent are left out
    assert np.allclose(tops, table["window_s"], rtol=0.01)


def test_the_staleness_figure_adds_up() -> None:
    record = Record.of(made_up(25, 2))
    figure = staleness_figure(record)
    panels: dict[str, Any] = {ax.get_title(loc="left"): ax for ax in figure.axes}
    tops = sum(
        np.array([bar.get_height() for bar in bars])
        for bars in panels["Tokens by staleness"].containers
    )
    assert np.allclose(tops, 100)
    bars = [bar.get_height() for bar in panels["Whole run"].patches]
    histogram = record.staleness().histogram
    assert np.allclose(
        bars, [100 * n / sum(histogram.values()) for n in histogram.values()]
    )


def test_the_timeline_shows_the_last_steps_or_what_is_asked_for() -> None:
    record = Record.of(made_up(30, 1))
    stops = record.steps()["stop"]
    ax: Any = timeline_figure(record, steps=5).axes[0]
    assert ax.get_xlim()[0] == pytest.approx(stops[-6])
    assert "steps 25 to 29 of 30" in ax.get_title(loc="left")
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "trainer",
        "pool/0",
        "pool/1",
        "reward",
    ]
    assert {"v27", "v28"} <= {t.get_text() for t in ax.texts}
    whole: Any = timeline_figure(record, steps=None).axes[0]
    assert whole.get_xlim()[0] == 0
    part: Any = timeline_figure(record, start=2.0, stop=5.0).axes[0]
    assert part.get_xlim() == (2.0, 5.0)


def test_a_rollout_that_crossed_a_sync_shows_both_versions() -> None:
    events = [
        RolloutEvent(
            actor="pool/0", start=0, stop=4, tokens=40, versions={3: 10, 4: 30}
        )
    ]
    ax: Any = timeline_figure(Record.of(events)).axes[0]
    pieces = sorted(
        tuple(p.get_extents().bounds[0::2])
        for c in ax.collections
        for p in c.get_paths()
    )
    # (start, seconds): a quarter of the tokens, then the rest
    assert pieces == [(0, 1), (1, 3)]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"start": 5.0, "stop": 1.0}])
def test_a_timeline_of_nothing_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        timeline_figure(Record.of(made_up(3)), **wrong)

"""The plan's and the timeline's faces without a browser."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.record._events import RolloutEvent, StepEvent
from jvlab.record._record import Record
from jvlab.views._palette import PHASES
from jvlab.views._plan_view import (
    PlanPanel,
    bucket_lanes,
    heat_svg,
    link_html,
    times_html,
)
from jvlab.views._timeline import Timeline, TimelinePanel
from tests.record.synthetic import made_up
from tests.views.html_checks import check as check_html
from tests.views.mapping_world import small_mapping
from tests.views.sync_reports import report


def test_a_schedule_sends_every_byte_and_nobody_does_two_things_at_once() -> None:
    plan = dataclasses.replace(small_mapping(3).plan, bucket_bytes=256, replicas=2)
    slots = plan.schedule(link_gbps=1.0)
    # padding between boxes of a bucket is sent too
    assert sum(s.nbytes for s in slots) >= plan.total_bytes
    for ends in ([lambda s: s.device], [lambda s: s.replica, lambda s: s.rank]):
        lanes: dict = {}
        for s in slots:
            lanes.setdefault(tuple(f(s) for f in ends), []).append(
                (s.start, s.start + s.seconds)
            )
        for busy in lanes.values():
            busy.sort()
            assert all(a[1] <= b[0] + 1e-15 for a, b in pairwise(busy))
    assert max(s.start + s.seconds for s in slots) >= plan.predict(1.0)
    assert len(slots) > len(plan.all_links), "small buckets are several a link"


def test_the_plans_faces() -> None:
    plan = small_mapping(2).plan
    html = plan._repr_html_()
    check_html(html)
    assert html == small_mapping(2).plan._repr_html_(), "nothing in it changes"
    assert len(html) < 60_000
    assert heat_svg(plan).count("data-link") == len(plan.all_links)
    assert "nothing measured yet" in times_html(plan)
    plan._reports.append(report(version=3, move=2.0))
    assert "version 3, measured" in times_html(plan)
    assert plan.reports[-1].version == 3
    check_html(link_html(plan, 0))
    assert {b.link for b in bucket_lanes(plan).bars} == set(range(len(plan.all_links)))


def test_a_plan_of_many_devices_stays_small() -> None:
    plan = dataclasses.replace(small_mapping(1, mesh="fsdp=96").plan, replicas=30)
    html = plan._repr_html_()
    check_html(html)
    assert "a cell is 2 devices × 2 ranks" in html
    assert len(html) < 1_000_000


def test_the_plan_panel() -> None:
    panel = PlanPanel(small_mapping(2).plan)
    link = panel.select(0, 1)
    assert f"{len(link):,} boxes" in panel.widget.detail
    assert panel.predict(5.0) == panel.plan.predict(5.0)
    assert panel.widget.gbps == 5.0
    with pytest.raises(ConfigError, match="above 0"):
        panel.predict(0)
    with pytest.raises(ConfigError, match="sends nothing"):
        panel.select(0, 99)
    panel.plan._reports.append(report(version=9))
    panel.refresh_now()
    assert "version 9" in panel.widget.times
    panel.close()


def test_the_timeline_and_its_panel() -> None:
    timeline = Timeline(Record.of(made_up(40, staleness=1)))
    html = timeline._repr_html_()
    check_html(html)
    assert repr(timeline).startswith("Timeline('made-up', 40 steps, showing ")
    assert "trained on" in html
    assert "sync of version" in html
    low, high = timeline.window
    assert all(
        low <= b.start + b.seconds and b.start <= high for b in timeline.data().bars
    )
    whole = timeline.data(whole=True)
    assert sum(b.label.startswith("step") for b in whole.bars) == 40
    assert whole.marks == ((pytest.approx(whole.marks[0][0]), "replica lost (pool/1)"),)
    panel = TimelinePanel(timeline)
    panel.zoom(1, 2)
    assert panel.widget.view == [1.0, 2.0]
    panel.reset()
    assert panel.widget.view[0] == 0
    panel.last(5)
    assert panel.widget.view[0] > low
    with pytest.raises(ConfigError, match="before it begins"):
        panel.zoom(2, 1)
    panel.close()
    with pytest.raises(ConfigError, match="steps=0"):
        Timeline(timeline.record, steps=0)


def _folded_in_the_figure(timeline: Timeline, gap: tuple[float, float]) -> None:
    figure = timeline.figure()
    figure.draw_without_rendering()
    ax, folds = figure.axes[0], timeline.data().folds
    place = lambda at: float(ax.transData.transform((at, 0))[0])
    start, stop = gap
    second = place(start) - place(start - 1)
    assert place(stop) - place(start) == pytest.approx(folds.seconds * second, rel=1e-3)
    assert place(stop + 2) - place(stop) == pytest.approx(2 * second, rel=1e-3)
    low, high = ax.get_xlim()
    assert (low, high) == timeline.window
    ticks = ax.get_xticks()
    assert len(ticks) > 4
    assert not any(start < tick < stop for tick in ticks)
    assert min(ticks) < start
    assert max(ticks) > stop
    assert (np.diff([place(tick) for tick in ticks]) > 25).all(), "no number on another"
    strips = [p for p in ax.patches if p.get_alpha() is not None]
    assert len(strips) == 1, "a mark where time is folded"
    box = strips[0].get_extents()
    assert (box.x0, box.x1) == pytest.approx((place(start), place(stop)), abs=1.0)
    times = np.linspace(low, high, 99)
    assert folds.time(folds.drawn(times)) == pytest.approx(times)


def test_time_in_which_nobody_worked_is_folded() -> None:
    events = made_up(20)
    later = max(e.stop for e in events) + 3600.0  # a night
    moved = [
        dataclasses.replace(e, start=e.start + later - 30, stop=e.stop + later - 30)
        for e in made_up(20)
        if isinstance(e, RolloutEvent | StepEvent)
    ]
    timeline = Timeline(Record.of([*events, *moved]), steps=None)
    data = timeline.data()
    ((start, stop),) = data.folds.gaps
    assert stop - start > 3000
    ends = data.folds.drawn(stop) - data.folds.drawn(start)
    assert ends == pytest.approx(data.folds.seconds), "an hour looks like a moment"
    assert data.folds.drawn(stop + 5) - data.folds.drawn(stop) == pytest.approx(5), (
        "and elsewhere time is time"
    )
    assert data.folds.drawn(start - 1) == start - 1
    html = timeline._repr_html_()
    check_html(html)
    assert "nobody worked for" in html
    _folded_in_the_figure(timeline, (start, stop))
    assert Timeline(Record.of(events)).data(whole=True).folds.gaps == (), (
        "a run that never stood still"
    )


def test_the_timeline_has_the_palettes_colours() -> None:
    data = Timeline(Record.of(made_up(12))).data()
    keys = dict(data.keys)
    steps = {b.colour for b in data.bars if b.label.startswith("step")}
    assert steps == {keys["train"]} == {PHASES["train"]}, (
        "a bar has its legend's colour"
    )


def test_a_long_run_is_drawn_quickly() -> None:
    timeline = Timeline(Record.of(made_up(2000)), steps=None)
    began = time.perf_counter()
    html = timeline._repr_html_()
    assert time.perf_counter() - began < 60
    assert len(html) < 400_000
    assert "shorter bars are not drawn" in html

"""The run's dashboard over a fake pool: rows as they come, buttons and their methods, the bound, the cost of a look."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvlab.panels._run_panel import RunPanel
from jvlab.record._events import FaultEvent, RolloutEvent, RunStart, StepEvent, SyncEvent
from jvlab.record._record import Record
from jvlab.trainer._grpo import grpo
from jvlab.trainer._run import Run, RunStatus
from jvlab.views._run_feed import COLUMNS, RunFeed
from jvlab.views._run_view import head_html, run_html
from tests.panels.calls import calls
from tests.panels.fifty import fifty_leave_nothing
from tests.trainer.fake_pool import FakePool, fresh_params, logprobs_fn, task, world
from tests.views.html_checks import check
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., tuple[Run, RunPanel, FakePool]]]:
    """Starts runs in the background, each with a panel whose messages are kept in `panel.sent`."""
    made: list[tuple[Run, RunPanel]] = []

    def start(delay: float = 0.002, jitter: int | None = 1, **options: Any) -> tuple[Run, RunPanel, FakePool]:
        pool, link = world(delay=delay, jitter=jitter)
        given: dict[str, Any] = {"steps": 10_000, "group_size": 4, "prompts_per_step": 3, **options}
        run = grpo(
            (fresh_params(), logprobs_fn),
            pool,  # type: ignore[arg-type]
            link,  # type: ignore[arg-type]
            task(),
            folder=tmp_path / f"run{len(made)}",
            background=True,
            progress=False,
            checkpoint_every=0,
            learning_rate=0.05,
            **given,
        )
        panel = RunPanel(run)
        panel.sent = []  # type: ignore[attr-defined]
        panel.curves.send = lambda content, buffers: panel.sent.append((content, buffers))  # type: ignore[attr-defined]
        made.append((run, panel))
        return run, panel, pool

    yield start
    for run, panel in made:
        run.stop()
        run.wait(30)
        panel.close()


def test_rows_are_appended_and_are_the_records(started: Any):
    run, panel, _ = started()
    until(lambda: run.status.step >= 3)
    panel.refresh_now()
    until(lambda: run.status.step >= 8)
    panel.refresh_now()
    run.stop().wait(30)
    panel.refresh_now()
    rows = np.zeros((0, len(COLUMNS)), np.float32)
    for content, buffers in panel.sent:
        fresh = np.frombuffer(buffers[0], np.float32).reshape(-1, len(COLUMNS))
        assert content["first"] == len(rows), "each row once, in order"
        rows = np.concatenate([rows, fresh])
    table = run.record.steps()
    np.testing.assert_array_equal(rows[:, 0], table["step"].astype(np.float32))
    np.testing.assert_array_equal(rows[:, 1], table["reward_mean"].astype(np.float32))
    np.testing.assert_array_equal(rows[:, 3], table["logprob_gap"].astype(np.float32))
    assert panel.curves.snapshot == rows.tobytes(), "the snapshot is the truth"
    facts = panel.curves.facts
    assert dict(facts["histogram"]) == run.record.staleness().histogram
    assert {"generate", "train"} <= facts["split"].keys()
    assert panel.done
    panel._send_missing({"have": 2})
    assert panel.sent[-1][0] == {"first": 2}
    assert panel.sent[-1][1] == [rows[2:].tobytes()]


def test_buttons_call_their_methods(started: Any):
    run, panel, pool = started()
    until(lambda: run.status.step >= 1)
    panel.refresh_now()
    panel.pause.click()
    until(lambda: run.status.state == "paused" and not pool.flying)
    time.sleep(0.05)
    step = run.status.step
    panel.refresh_now()
    assert panel.pause.disabled
    assert not panel.resume.disabled
    time.sleep(0.1)
    assert run.status.step == step
    panel.resume.click()
    until(lambda: run.status.step > step)
    panel.refresh_now()
    panel.stop.click()
    assert panel.stop.description == "really stop?"
    assert run.status.state == "running"
    panel.stop.click()
    until(lambda: run.done)
    assert run.status.state == "stopped"


def test_the_bound_changes_while_it_runs_and_holds(started: Any):
    run, panel, _ = started(max_staleness=3, delay=0.004, steps=10_000)
    until(lambda: run.status.step >= 6)
    changes = {0: 3}
    for bound in (1, 0, 2):
        panel.bound.value = bound
        panel.apply.click()
        until(lambda bound=bound: run.max_staleness == bound)
        changes[run.status.step] = bound  # a step that is under way was admitted under the bound before
        until(lambda: run.status.step >= max(changes) + 8)
    run.stop().wait(30)
    levels = run.record.staleness()
    marks = [*changes.items(), (len(levels.max), 0)]
    for (start, bound), (stop, _) in itertools.pairwise(marks):
        most = levels.max[start + 2 : stop]
        assert (most <= bound).all(), (bound, most)
    assert levels.max[: list(changes)[1]].max() > 0, "rollouts did run ahead"
    panel.bound.value = 5
    assert run.max_staleness == 2, "the field alone changes nothing"


def test_a_gap_over_the_alarm_is_red(started: Any):
    run, panel, pool = started(gap_alarm=0.01)
    until(lambda: run.status.step >= 2)
    panel.refresh_now()
    assert "over the alarm" not in panel.head.value
    pool.offset = 0.5
    until(lambda: run.status.logprob_gap > 0.4)
    until(lambda: run.status.step >= 4)
    panel.refresh_now()
    assert "over the alarm at 1.0e-02" in panel.head.value
    assert panel.curves.facts["alarm"] == 0.01


def test_a_look_works_on_what_is_new_only(started: Any):
    run, panel, _ = started(delay=0.0, jitter=None)
    until(lambda: run.status.step >= 30)
    panel.refresh_now()
    updates = panel.updates
    short = calls(panel.refresh_now)
    until(lambda: run.status.step >= 150)
    panel.refresh_now()
    run.pause()
    until(lambda: run.status.state == "paused")
    panel.refresh_now()
    assert calls(panel.refresh_now) < 2 * short, "a look at 150 steps does no more than a look at 30"
    assert panel.updates >= updates + 4
    assert panel.cost > 0


def synthetic(steps: int) -> list[Any]:
    out: list[Any] = [RunStart(run="r", start=0.0, stop=0.0, wall=1e9, gap_alarm=0.01)]
    for i in range(steps):
        t = float(i)
        out += [
            RolloutEvent(actor="pool/0", start=t + 0.1, stop=t + 0.5, tokens=100, samples=4),
            StepEvent(
                step=i,
                version=i + 1,
                start=t + 0.5,
                stop=t + 0.9,
                reward_mean=i / steps,
                logprob_gap=1e-4,
                versions={i + 1: 75, i: 25},
            ),
            SyncEvent(version=i + 2, start=t + 0.9, stop=t + 1.0),
        ]
    return out


def test_a_resumed_run_takes_rows_back():
    events = synthetic(6)
    again = RunStart(run="r", start=20.0, stop=20.0, wall=1e9 + 20, resumed=4)
    step = StepEvent(step=4, version=9, start=21.0, stop=22.0, reward_mean=0.9)
    record = Record.of(events)
    feed = RunFeed(record)
    assert feed.read() == 0
    assert len(feed.rows) == 6
    assert feed.read() is None
    record._events += [again]
    assert feed.read() == 4
    assert len(feed.rows) == 4
    record._events += [step, FaultEvent(fault="nan", start=22.0, stop=22.0)]
    assert feed.read() == 4
    assert feed.rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert feed.faults == 1


def test_rows_and_split_are_what_happened():
    feed = RunFeed(Record.of(synthetic(40)))
    feed.read()
    row = dict(zip(COLUMNS, feed.rows[10].tolist(), strict=True))
    assert row["tokens_per_s"] == pytest.approx(100.0, rel=1e-3)
    assert (row["stale_mean"], row["stale_max"]) == (0.25, 1.0)
    assert dict(feed.histogram) == {0: 3000, 1: 1000}
    split = feed.split()
    assert split["generate"] == pytest.approx(0.4, abs=1e-6)
    assert split["train"] == pytest.approx(0.4, abs=1e-6)
    assert split["sync"] == pytest.approx(0.1, abs=1e-2)


def test_a_long_run_costs_no_more_than_a_short_one():
    def look(steps: int) -> int:
        record = Record.of(synthetic(steps))
        feed = RunFeed(record)
        feed.read()
        feed.split()
        record._events += synthetic(steps + 2)[-6:]
        return calls(lambda: (feed.read(), feed.split()))

    assert look(3000) < 2 * look(30)


def test_the_static_face():
    status = RunStatus("running", 3, 10, 4, 0.5, 2e-4, 1, error="<b>bad</b>")
    feed = RunFeed(Record.of(synthetic(300)))
    feed.read()
    html = run_html("run <x>", status, feed)
    check(html)
    assert html == run_html("run <x>", status, feed)
    assert "run &lt;x&gt;" in html
    assert "&lt;b&gt;bad&lt;/b&gt;" in html
    assert html.count("<polyline") == 3
    assert len(html) < 16_000
    check(run_html("r", status))
    check(head_html("r", status, 1e-4))
    weighed = dataclasses.replace(status, effective_samples=0.875, masked_fraction=0.0625)
    assert "87.5%" in head_html("r", weighed)
    assert "6.2%" in head_html("r", weighed)
    assert "over the alarm" in head_html("r", status, 1e-4)


def test_a_run_draws_itself(started: Any):
    run, _, _ = started()
    check(run._repr_html_())
    until(lambda: run.status.step >= 3)
    assert "<polyline" in run._repr_html_()


def test_fifty_panels_leave_no_thread_and_no_comm(started: Any):
    run, _, _ = started()
    until(lambda: run.status.step >= 1)
    run.stop().wait(30)

    fifty_leave_nothing(lambda: RunPanel(run))
    assert not run._listeners

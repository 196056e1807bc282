"""The run's dashboard over a fake pool: rows as they come, buttons and their methods, the bound, the cost of a look."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.record._events import (
    EvaluationEvent,
    FaultEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    StepEvent,
    SyncEvent,
)
from jvlab.record._record import Record
from jvlab.record._run_status import COLUMNS, RunFeed, RunStatus, status_of
from jvlab.record._samples import SampleRecord
from jvlab.record._writer import RecordWriter
from jvlab.trainer._grpo import grpo
from jvlab.trainer._run import Run
from jvlab.views._run_view import (
    CHARTS,
    RecordPanel,
    RunPanel,
    extremes_html,
    head_html,
    run_html,
)
from jvlab.views.panels._live import SHARE
from tests.trainer.fake_pool import FakePool, fresh_params, logprobs_fn, task, world
from tests.views.html_checks import check
from tests.views.panels.calls import calls
from tests.views.panels.fifty import fifty_leave_nothing
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., tuple[Run, RunPanel, FakePool]]]:
    """Starts runs in the background, each with a panel whose messages are kept in `panel.sent`."""
    made: list[tuple[Run, RunPanel]] = []

    def start(
        delay: float = 0.002, jitter: int | None = 1, **options: Any
    ) -> tuple[Run, RunPanel, FakePool]:
        pool, link = world(delay=delay, jitter=jitter)
        given: dict[str, Any] = {
            "steps": 10_000,
            "group_size": 4,
            "prompts_per_step": 3,
            **options,
        }
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
        panel.curves.send = lambda content, buffers: panel.sent.append(  # type: ignore
            (content, buffers)
        )
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
        # a step that is under way was admitted under the bound before
        changes[run.status.step] = bound
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


def test_a_wrong_bound_is_refused_in_place(started: Any):
    run, panel, _ = started(max_staleness=3)
    for wrong in ("-3", "1.5", "", "many"):
        panel.bound.value = wrong
        panel.apply.click()
        assert panel.bound.wrong == "a whole number, 0 or more; it stays 3"
        assert run.max_staleness == 3
    # what Enter sends
    for message in ({"value": "-3"}, {"press": True}, {"value": "-3"}):
        panel.parts.received({"part": panel.bound.name, **message})
    assert panel.bound.wrong, "it stays in sight"
    # as the page says it
    panel.parts.received({"part": panel.bound.name, "value": "1"})
    assert panel.bound.wrong == ""
    panel.parts.received({"part": panel.apply.name, "press": True})
    until(lambda: run.max_staleness == 1)


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

    def look_after(steps: int) -> int:
        """Calls of a look that finds nothing new, of a run that stands still after so many steps."""
        until(lambda: run.status.step >= steps)
        run.pause()
        until(lambda: run.status.state == "paused")
        panel.refresh_now()
        # the last event may come after the word "paused"
        return min(calls(panel.refresh_now) for _ in range(3))

    short = look_after(30)
    run.resume()
    long = look_after(150)
    assert long < 2 * short, "a look at 150 steps does no more than a look at 30"


def synthetic(steps: int) -> list[Any]:
    out: list[Any] = [RunStart(run="r", start=0.0, stop=0.0, wall=1e9, gap_alarm=0.01)]
    for i in range(steps):
        t = float(i)
        out += [
            RolloutEvent(
                actor="pool/0", start=t + 0.1, stop=t + 0.5, tokens=100, samples=4
            ),
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
    status = RunStatus(
        state="running",
        step=3,
        steps=10,
        version=4,
        reward=0.5,
        logprob_gap=2e-4,
        max_staleness=1,
        error="<b>bad</b>",
    )
    feed = RunFeed(Record.of(synthetic(300)))
    feed.read()
    html = run_html("run <x>", status, feed)
    check(html)
    assert html == run_html("run <x>", status, feed)
    assert "run &lt;x&gt;" in html
    assert "&lt;b&gt;bad&lt;/b&gt;" in html
    titles = [chart.title for chart in CHARTS if f">{chart.title}</span>" in html]
    assert titles == [
        "reward",
        "logprob gap",
        "tokens/s over 5 steps",
        "seconds per step",
        "staleness, mean",
    ]
    assert html.count("<polyline") == len(titles), (
        "as on the canvas: only what is known"
    )
    assert len(html) < 16_000
    check(run_html("r", status))
    check(head_html("r", status, 1e-4))
    weighed = dataclasses.replace(
        status, effective_samples=0.875, masked_fraction=0.0625
    )
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
    assert not run.listeners


def test_the_best_and_the_worst_sample_of_the_last_step_are_there_to_read(started: Any):
    run, panel, _ = started(steps=3, keep_samples=1)
    run.wait(60)
    panel.refresh_now()
    samples = run.record.samples(2)
    most, least = max(s.reward for s in samples), min(s.reward for s in samples)
    status = run.status
    assert status.best is not None
    assert status.worst is not None
    assert (status.best.reward, status.worst.reward, status.best.step) == (
        most,
        least,
        2,
    )
    html = panel.samples.value
    check(html)
    assert "samples of step 2" in html
    assert f"reward {most:.3f}" in html
    assert f"reward {least:.3f}" in html
    assert "1 tokens" in html, "a prompt of token ids, without a tokenizer to decode it"
    static = run._repr_html_()
    assert html in static, "the same when finished"
    again = status_of(run.record)
    assert again.best is not None
    assert (again.state, again.step, again.best.reward) == ("finished", 3, most)


def test_text_from_a_model_is_text():
    evil = SampleRecord(
        step=4, prompt="<img src=x>", text="<script>1</script>\u202e", reward=1.0
    )
    bad = dataclasses.replace(evil, reward=0.0, text="")
    html = extremes_html(
        RunStatus(state="running", step=5, steps=9, version=1, best=evil, worst=bad)
    )
    check(html)
    assert "&lt;script&gt;1&lt;/script&gt;\\u202e" in html
    assert "(empty)" in html
    same = extremes_html(
        RunStatus(state="running", step=5, steps=9, version=1, best=evil, worst=evil)
    )
    assert same.count('data-jv="sample"') == 1, "no best among equals"


def test_evaluations_are_a_curve_and_are_taken_back_with_their_steps():
    events = synthetic(6)
    events += [
        EvaluationEvent(step=n, version=n, start=7.0, stop=7.1, reward_mean=n / 10)
        for n in (0, 2, 4)
    ]
    record = Record.of(events)
    feed = RunFeed(record)
    feed.read()
    assert feed.evaluations == [(0, 0.0), (2, 0.2), (4, 0.4)]
    assert ">held-out reward</span>" in run_html("r", status_of(record), feed)
    record._events += [
        RunStart(run="r", start=20.0, stop=20.0, wall=1e9 + 20, resumed=4)
    ]
    feed.read()
    assert feed.evaluations == [(0, 0.0), (2, 0.2)]


def test_a_record_has_the_same_dashboard_with_a_second_run_and_smoothing():
    record, other = Record.of(synthetic(40)), Record.of(synthetic(12))
    panel = RecordPanel(record, compare=other)
    rows = np.frombuffer(panel.curves.other_rows, np.float32).reshape(-1, len(COLUMNS))
    assert rows[:, 0].tolist() == list(range(12))
    assert panel.curves.other["name"] == "other run"
    assert len(np.frombuffer(panel.curves.snapshot, np.float32)) == 40 * len(COLUMNS)
    # as the page says it
    panel.parts.received({"part": panel.smoothing.name, "value": "20 steps"})
    assert panel.curves.smoothing == 20
    with pytest.raises(ConfigError, match="compare is int"):
        panel.compare(3)
    panel.compare(None)
    assert (panel.curves.other, panel.curves.other_rows) == ({}, b"")
    check(panel.static_html())
    panel.close()


def test_the_panel_of_a_run_that_has_ended_stays(started: Any):
    run, first, _ = started(steps=1)
    run.wait(60)
    assert first.done
    panel = RunPanel(run)
    assert not panel.done
    assert all(
        part.disabled
        for part in (panel.pause, panel.resume, panel.stop, panel.bound, panel.apply)
    )
    panel.close()


def test_a_panel_takes_at_most_a_hundredth_of_a_core(monkeypatch: pytest.MonkeyPatch):
    panel = RecordPanel(Record.of(synthetic(3)))
    used = [0.0]
    monkeypatch.setattr("jvlab.views.panels._live.time.thread_time", lambda: used[0])

    def work(seconds: float) -> Callable[[], None]:
        return lambda: used.__setitem__(0, used[0] + seconds)

    for seconds in (0.9, 0.001, 0.9, 0.001):
        assert panel.spend("update", work(seconds), 0.5) == 0.5, (
            "a cheap update keeps its rate; an import is no habit"
        )
    for _ in range(2):
        again, kept = (
            panel.spend("update", work(0.020), 0.5),
            panel.spend("snapshot", work(0.030), 3.0),
        )
    assert (again, kept) == (pytest.approx(4.0), pytest.approx(6.0))
    assert 0.020 / again + 0.030 / kept <= SHARE + 1e-9, (
        "updates and snapshots together"
    )
    assert panel.cpu_seconds == pytest.approx(2 * 0.901 + 2 * 0.050)
    assert [panel.spend("update", work(9.0), 0.5) for _ in range(2)][1] == 15.0, (
        "it still moves"
    )
    panel.close()


def test_what_a_step_sends_does_not_grow_with_the_run(monkeypatch: pytest.MonkeyPatch):
    def sent(steps: int) -> tuple[int, int]:
        """Messages and bytes that an update after one more step sends."""
        record = Record.of(synthetic(steps))
        panel = RecordPanel(record)
        panel.moving, panel._rows_due = True, float("inf")
        record._events += synthetic(steps + 1)[-3:]
        messages: list[int] = []
        count = lambda message, buffers=None: messages.append(
            len(json.dumps(message, default=str)) + sum(len(b) for b in buffers or ())
        )
        panel.widget._send = count
        panel.widget.send = lambda content, buffers: count(content, buffers)
        panel.refresh_now()
        panel.widget._send = lambda *_, **__: None
        panel.close()
        return len(messages), sum(messages)

    short, long = sent(30), sent(3000)
    print(f"\n{long[0]} messages, {long[1]:,} bytes for a step of a run of 3000")
    assert 0 < short[0] == long[0] <= 5
    assert long[1] < 1.1 * short[1] < 40_000


def test_a_record_whose_writer_was_killed_is_not_shown_as_running(tmp_path: Path):
    """Killing writes no event: the panel must not wait for one."""
    writer = RecordWriter(tmp_path / "run")
    for event in synthetic(3):
        if not isinstance(event, RunStop):
            writer.write(event)
    panel = RecordPanel(Record.open(tmp_path / "run"))
    assert panel.status().state == "running"
    writer._lock.close()  # as the kernel does for a process that is killed
    assert panel.status().state == "interrupted"
    panel.close()

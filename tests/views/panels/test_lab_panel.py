"""The lab's panel over a real gateway with fake replicas: rows, buttons and their methods, what comes and goes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab.gateway import _registry as reg
from jvlab.views._cards import LabPanel, PoolPanel, pool_headline, pool_html, pool_title
from jvlab.views._palette import TONES
from jvlab.views.panels import _live
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._pool_summary import pool_summary
from tests.gateway.fake_lab import FakeLab
from tests.views.html_checks import check
from tests.views.panels.fifty import fifty_leave_nothing
from tests.waiting import until


@pytest.fixture
def panel(client: jv.Lab, pool: jv.Pool) -> Iterator[LabPanel]:
    made = LabPanel(client)
    made.refresh_now()
    yield made
    made.close()


def told(panel: LabPanel, text: str) -> Callable[[], bool]:
    return lambda: text in panel.message.value


def test_every_process_has_a_row(client: jv.Lab, pool: jv.Pool, panel: LabPanel):
    # fakes say process 1: all of this machine's are below
    rows = [r for r in client.processes() if r.kind != "worker"]
    assert [(r.kind, r.name) for r in rows] == [
        ("gateway", "gateway fake"),
        ("replica", "p/0"),
        ("replica", "p/1"),
    ]
    gateway, first, _ = rows
    assert (gateway.memory or 0) > 10_000_000, "it runs in this very process"
    assert (first.state, first.device, first.version, first.dirty, first.in_flight) == (
        "ready",
        "cpu",
        0,
        False,
        0,
    )
    assert first.beat_age is not None
    assert first.beat_age < 5
    text = panel._sections["p"].text.value
    for words in ("p/0", "p/1", "ready", "llama"):
        assert words in text
    check(text)
    check(panel.text.value)


def test_a_click_that_waited_for_a_cell_is_not_obeyed(panel: LabPanel):
    """Clicks wait in the kernel's queue while a cell runs; what was on show when they were made is over then."""
    section = panel._sections["p"]
    panel.beat()
    number = panel.widget.beat["number"]
    click = {"part": section.pause.name, "press": True, "beat": number, "ms": 100.0}
    panel._beats[number] -= 60
    panel._message(click)
    assert "a click came 60 s late" in panel.message.value
    panel.beat()
    panel._message({**click, "beat": number + 1, "ms": 0.0})
    until(told(panel, "pause p: done"))
    for unknown in ({}, {"beat": 10**6, "ms": 5}, {"beat": number, "ms": "x"}):
        assert panel.age_of(unknown) == 0.0, "a page that does not tell is believed"


def test_nothing_of_a_closed_pool_seems_to_live(pool: jv.Pool):
    snapshot = pb.PoolStatus()
    snapshot.CopyFrom(pool.snapshot)
    snapshot.replicas[0].stats.paused = True
    shown: Any = SimpleNamespace(snapshot=snapshot)
    assert "paused" in pool_html(shown)
    snapshot.closed = True
    for lost, word in ((False, "closed"), (True, "gone")):
        html = pool_html(shown, lost)
        assert "paused" not in html
        assert word in html


def test_buttons_call_their_methods(pool: jv.Pool, panel: LabPanel, fake_lab: FakeLab):
    section = panel._sections["p"]
    section.pause.click()
    until(told(panel, "pause p: done"))
    section.resume.press()  # the fakes never say that they are paused or asleep
    until(told(panel, "resume p: done"))
    section.wake.press()
    until(told(panel, "wake p: done"))
    assert (
        fake_lab.fakes["p/0"].steered
        == fake_lab.fakes["p/1"].steered
        == [pb.PAUSE, pb.RESUME, pb.WAKE]
    )


def test_what_could_lose_work_asks_first(
    panel: LabPanel, fake_lab: FakeLab, monkeypatch: pytest.MonkeyPatch
):
    section = panel._sections["p"]
    section.sleep.press()
    assert section.sleep.description == "really sleep?"
    assert section.sleep.style == "danger"
    monkeypatch.setattr(_live, "ARMED_SECONDS", 0.05)
    panel.refresh_now()
    assert section.sleep.description == "really sleep?", "three seconds have not passed"
    section.sleep.press()
    until(told(panel, "sleep p: done"))
    assert fake_lab.fakes["p/0"].steered == [pb.SLEEP]
    section.close.click()
    time.sleep(0.1)
    panel.refresh_now()
    assert section.close.description == "close pool", "too late: it asks again"
    section.close.click()
    time.sleep(0.1)
    section.close.click()
    assert section.close.description == "really close pool?"
    assert not fake_lab.registry.pools["p"].closed


def test_an_error_is_shown_with_its_remedy(
    panel: LabPanel, pool: jv.Pool, monkeypatch: pytest.MonkeyPatch
):
    def sleep() -> float:
        raise jv.errors.Unsupported(
            "CPU workers <cannot> sleep", remedy="pool.pause() stops generation"
        )

    monkeypatch.setattr(pool, "sleep", sleep)
    panel.act(pool.sleep, "sleep p")
    until(told(panel, "pool.pause() stops generation"))
    assert "&lt;cannot&gt;" in panel.message.value


def test_restart_is_for_a_replica_that_failed(
    panel: LabPanel, pool: jv.Pool, fake_lab: FakeLab
):
    section = panel._sections["p"]
    assert section.restart.disabled
    fake_lab.do(
        lambda: fake_lab.gateway.handle(
            reg.ProcessExited("p/1", "killed <b>by</b> a test", "last lines")
        )
    )
    panel.refresh_now()
    assert section.restart.why == "p/0 has not failed", "the one that is chosen"
    assert "killed &lt;b&gt;by&lt;/b&gt; a test" in section.text.value
    assert "killed" in section.text.value
    section.replica.value = "p/1"
    panel.refresh_now()
    assert not section.restart.disabled
    section.restart.click()
    section.restart.click()
    until(told(panel, "restart p: done"))
    until(lambda: pool.status()["replicas"][1]["state"] == "ready")


def test_the_log_is_read_on_demand(
    panel: LabPanel, pool: jv.Pool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[int, int]] = []

    def logs(replica: int = 0, lines: int = 50) -> str:
        asked.append((replica, lines))
        return "line <one>"

    monkeypatch.setattr(pool, "logs", logs)
    section = panel._sections["p"]
    panel.refresh_now()
    assert asked == []
    section.replica.value = "p/1"
    section.log.value = True
    until(lambda: "line &lt;one&gt;" in section.log_text.value)
    assert asked[0][0] == 1
    section.log.value = False
    assert section.log_text.hidden


def test_pools_come_and_go_and_the_end_is_static(
    client: jv.Lab, panel: LabPanel, pool: jv.Pool, llama: str, fake_lab: Any
):
    client.launch(llama, name="q").wait(20)
    panel.refresh_now()
    assert list(panel._sections) == ["p", "q"]
    assert [part["class"] for part in panel.parts.tree["of"] if isinstance(part, dict)][
        1:
    ] == [
        "jv-pool-p",
        "jv-pool-q",
    ]
    fake_lab.gateway.processes.clear()
    pool.close()
    panel.refresh_now()
    assert list(panel._sections) == ["q"]
    assert not panel.done
    client._leave()
    assert panel.done
    panel.refresh_now()


def test_close_lab_asks_first_and_ends_it(
    client: jv.Lab, panel: LabPanel, fake_lab: FakeLab, monkeypatch: Any
):
    # it is this very process
    monkeypatch.setattr(client._gateway.__class__, "process", lambda self: None)
    panel.close_button.click()
    assert panel.close_button.description == "really close lab?"
    assert not client._closed
    panel.close_button.click()
    until(lambda: client._closed)
    fake_lab.thread.join(15)
    assert not fake_lab.thread.is_alive()


def test_rates_draw_a_sparkline(panel: LabPanel):
    section = panel._sections["p"]
    for value in (1.0, 5.0, 3.0):
        section._rates["p/0"].append(value)
    panel.refresh_now()
    assert "<polyline" in section.text.value


def test_a_pool_has_a_panel_of_its_own(client: jv.Lab, pool: jv.Pool, llama: str):
    client.launch(llama, name="q").wait(20)
    panel = PoolPanel(pool)
    try:
        panel.refresh_now()
        assert list(panel._sections) == ["p"]
    finally:
        panel.close()


def test_a_lost_gateway_is_said_and_nothing_stays_green(
    panel: LabPanel, fake_lab: FakeLab
):
    green = f'data-jv="state" style="color:{TONES["good"]}"'
    section = panel._sections["p"]
    assert green in panel.text.value
    assert green in section.text.value
    assert panel.widget.notice == ""
    fake_lab.end()
    panel.refresh_now()
    assert re.fullmatch(
        r"snapshot of \d\d:\d\d; gateway gone: `lab = jv.Lab\(\)`", panel.widget.notice
    )
    assert "gateway gone" in panel.text.value
    assert green not in panel.text.value + section.text.value
    assert {b.why for b in section.buttons} == {"gateway gone"}
    assert panel.close_button.disabled
    fake_lab.end = lambda: None  # type: ignore[method-assign]


def test_buttons_that_cannot_work_say_why(panel: LabPanel):
    section = panel._sections["p"]
    assert (
        section.sleep.why == "an engine on a CPU cannot sleep; pause stops generation"
    )
    assert section.resume.why == "nothing is paused"
    assert section.wake.why == "nothing is asleep"
    assert section.restart.why == "p/0 has not failed"
    assert not section.pause.disabled
    section.sleep.click()
    assert section.sleep.description == "sleep", (
        "a click on a disabled button does nothing"
    )


@pytest.mark.parametrize(
    ("change", "words", "tone", "ready"),
    [
        ({}, "ready", "good", 2),
        ({"paused": True}, "1 of 2 paused", "wait", 2),
        ({"stale": True, "paused": True}, "1 of 2 stale: waits for a sync", "wait", 1),
        ({"dirty": True, "stale": True}, "1 of 2 dirty: sync again", "bad", 1),
        ({"stage": "lost"}, "1/2 ready, 1 lost", "bad", 1),
    ],
)
def test_headers_tell_the_worst_truth(
    client: jv.Lab,
    pool: jv.Pool,
    change: dict[str, Any],
    words: str,
    tone: str,
    ready: int,
):
    snapshot = pb.PoolStatus()
    snapshot.CopyFrom(pool.snapshot)
    for name, value in change.items():
        setattr(
            snapshot.replicas[1].stats if name == "paused" else snapshot.replicas[1],
            name,
            value,
        )
    title = pool_title(snapshot)
    assert f'style="color:{TONES[tone]}">●</span> {words}' in title
    pool.snapshot = snapshot
    assert words in repr(pool)
    number, _, below = re.findall(r">([^<>]+)</(?:span|div)>", pool_headline(snapshot))[
        -3:
    ]
    assert (number, below) == (str(ready), "replicas ready"), (
        "who may not be given work is not ready"
    )
    snapshot.replicas[0].dirty = True
    assert pool_summary(snapshot)["healthy"] == ready - 1
    if "stage" in change:
        assert "0/2 ready, 1 lost" in pool_title(snapshot)
    snapshot.replicas[0].dirty = False
    assert (f"p: {words}" in client._repr_html_()) == (tone != "good"), (
        "the lab's header too"
    )


def test_without_widgets_a_card_follows_and_hints(
    pool: jv.Pool, client: jv.Lab, llama: str, monkeypatch: Any
):
    shown: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: shown.append(data) or handle
    )
    monkeypatch.setattr("jvlab.views.panels._live.have_widgets", lambda: False)
    second = client.launch(llama, name="q")
    assert second.panel() is None
    second.wait(20)
    until(lambda: shown[-1]["text/plain"].endswith("ready)"))
    assert "pip install ipywidgets" in shown[-1]["text/html"]
    check(shown[-1]["text/html"])
    until(lambda: not second.listeners)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "ready"),
        ({"dirty": True, "stale": True}, "dirty: sync again"),
        ({"stale": True}, "waits for a sync"),
        ({"paused": True}, "paused"),
        ({"sleeping": True}, "asleep"),
        ({"stage": "<b>lost"}, "&lt;b&gt;lost"),
        ({"sync": "moving", "dirty": True}, "paused for a sync: moving"),
    ],
)
def test_static_faces(
    client: jv.Lab, pool: jv.Pool, change: dict[str, Any], words: str
):
    snapshot = pb.PoolStatus()
    snapshot.CopyFrom(pool.snapshot)
    replica = snapshot.replicas[0]
    replica.pid = 987654
    for name, value in change.items():
        owner = (
            replica.stats
            if name in ("paused", "sleeping")
            else snapshot
            if name == "sync"
            else replica
        )
        setattr(owner, name, value)
    pool.snapshot = snapshot
    for face in (pool._repr_html_(), client._repr_html_()):
        check(face)
        assert words in face
        assert "987654" not in face, "a process id differs from run to run"


def test_fifty_panels_leave_no_thread_and_no_comm(client: jv.Lab, pool: jv.Pool):
    fifty_leave_nothing(lambda: LabPanel(client))

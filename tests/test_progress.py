"""Progress: plain HTML in a notebook, which a saved notebook keeps; one line in a terminal; lines in a log."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jvlab import _progress
from jvlab._progress import Progress, importing
from tests.waiting import until


class Clock:
    """A clock that goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(_progress, "clock", found)
    return found


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a notebook's cell holds after each update."""
    import IPython.display

    held: list[dict[str, Any]] = []

    class Handle:
        def update(self, data: dict[str, Any], **_: Any) -> None:
            held.append(data)

    def display(data: dict[str, Any], **_: Any) -> Handle:
        held.append(data)
        return Handle()

    monkeypatch.setattr(_progress, "in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    return held


class Screen(io.StringIO):
    """A terminal, or a log file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Screen]:
    def make(terminal: bool) -> Screen:
        found = Screen(terminal)
        monkeypatch.setattr(_progress, "in_kernel", lambda: False)
        monkeypatch.setattr("sys.stderr", found)
        return found

    return make


def ticking() -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name == "jvlab-progress"
    ]


# In a notebook --------------------------------------------------------------------------------------------------------


def test_a_bar_is_html_and_its_last_state_stays(cell: list[dict[str, Any]]):
    with Progress(3, "p: generate", unit="sample") as bar:
        for _ in range(3):
            bar.tick()
            bar.advance(1, "512 tokens/s")
    assert all(set(data) == {"text/plain", "text/html"} for data in cell), "no widget"
    assert cell[-1]["text/plain"].startswith("p: generate, 3 of 3 samples, ")
    assert cell[-1]["text/plain"].endswith("512 tokens/s")
    assert "width:100.0%" in cell[-1]["text/html"]


@pytest.mark.parametrize(
    ("total", "unit", "said"),
    [
        (1, "sample", "0 of 1 sample"),
        (1200, "step", "0 of 1,200 steps"),
        (4e6, "B", "0.0 of 4.0 MB"),
        (0, "", ""),
    ],
)
def test_a_unit_is_said_once_and_one_is_no_plural(
    cell: list[dict[str, Any]], total: int, unit: str, said: str
):
    with Progress(total, "p", unit=unit):
        pass
    assert cell[-1]["text/plain"] == ", ".join(filter(None, ("p", said, "0.0 s")))


def test_stages_are_ticked_and_a_log_line_has_no_colours(cell: list[dict[str, Any]]):
    stages = ("process", "weights", "ready")
    with Progress(3, "p", unit="stage", stages=stages) as bar:
        bar.to(1)
        bar.remark("\x1b[0;36m(EngineCore)\x1b[0;0m loading <b>\x1b[2K")
        bar.describe("q")
        assert cell[-1]["text/plain"].startswith("q: ✓ process  ▸ weights  · ready, ")
        assert "\x1b" not in cell[-1]["text/plain"] + cell[-1]["text/html"]
        assert "(EngineCore) loading &lt;b&gt;" in cell[-1]["text/html"]
        bar.to(3)
    assert "✓ ready" in cell[-1]["text/plain"]


def test_quick_work_shows_nothing(cell: list[dict[str, Any]]):
    with Progress(2, "p", unit="sample", after=60.0) as bar:
        bar.advance(2, "fast")
    assert cell == []


def test_the_clock_goes_on_while_nothing_arrives(
    cell: list[dict[str, Any]], clock: Clock
):
    """Nobody calls anything: a thread of the bar's own draws it, and ends with it."""
    with Progress(50, "digits", unit="step"):
        assert cell[-1]["text/plain"] == "digits, 0 of 50 steps, 0.0 s"
        clock.now += 75
        until(lambda: cell[-1]["text/plain"] == "digits, 0 of 50 steps, 75 s")
        assert len(ticking()) == 1
    assert not ticking()


def test_a_bar_that_nobody_holds_ends_its_thread(cell: list[dict[str, Any]]):
    Progress(50, "digits", unit="step").start()
    until(lambda: not ticking())


def test_a_bar_says_what_it_waits_for_until_that_is_over(
    cell: list[dict[str, Any]], clock: Clock
):
    with Progress(1, "p: generate", unit="sample") as bar:
        clock.now += 2
        bar.waits("p was paused by python on host <b>")
        assert (
            cell[-1]["text/plain"]
            == "p: generate, 0 of 1 sample, 2.0 s, waits: p was paused by python on host <b>"
        )
        assert "host &lt;b&gt;" in cell[-1]["text/html"]
        bar.waits("")
        bar.advance(1, "512 tokens/s")
    assert cell[-1]["text/plain"] == "p: generate, 1 of 1 sample, 2.0 s, 512 tokens/s"


def test_some_bars_appear_only_if_something_is_waited_for(cell: list[dict[str, Any]]):
    with Progress(2, "p: stream", unit="sample", only_waiting=True) as bar:
        bar.advance(1)
        bar.tick()
        assert cell == []
        assert not ticking()
        bar.waits("p/0 is dirty: sync again")
        assert cell[-1]["text/plain"].endswith("waits: p/0 is dirty: sync again")
        assert ticking()
    assert not ticking()


def test_a_bar_asks_what_it_waits_for(cell: list[dict[str, Any]]):
    with Progress(2, "digits", unit="step", ask=lambda: "p is asleep"):
        until(lambda: cell[-1]["text/plain"].endswith("waits: p is asleep"))


# In a terminal --------------------------------------------------------------------------------------------------------


def test_a_terminal_has_one_line_that_is_written_again(
    monkeypatch: pytest.MonkeyPatch, screen: Callable[[bool], Screen], clock: Clock
):
    terminal = screen(True)
    monkeypatch.setenv("COLUMNS", "85")
    with Progress(4, "p: generate", unit="sample") as bar:
        clock.now += 1
        bar.advance(2, "512 tokens/s")
        clock.now += 1
        bar.waits("p was paused by this process")
    written = terminal.getvalue()
    assert (written.count("\n"), written[-1]) == (1, "\n")
    drawn = [
        line.strip("\n").removesuffix("\x1b[K") for line in written.split("\r")[1:]
    ]
    assert drawn[0] == f"p: generate [{' ' * 20}] 0 of 4 samples, 0.0 s"
    assert (
        f"p: generate [{'#' * 10}{' ' * 10}] 2 of 4 samples, 1.0 s, 512 tokens/s"
        in drawn
    )
    whole = f"p: generate [{'#' * 10}{' ' * 10}] 2 of 4 samples, 2.0 s, waits: p was paused by this process"
    assert len(whole) > 84
    assert whole[:84] in drawn, "cut where the terminal ends"


def test_a_terminal_that_is_closed_stops_no_work(screen: Callable[[bool], Screen]):
    terminal = screen(True)
    with Progress(4, "p", unit="sample") as bar:
        terminal.close()
        bar.describe("q")
        bar.advance(4)


# In a log -------------------------------------------------------------------------------------------------------------


def test_a_log_has_a_line_for_each_step(screen: Callable[[bool], Screen], clock: Clock):
    log = screen(False)
    with Progress(3, "digits", unit="step", each=True) as bar:
        for step in range(3):
            clock.now += 4
            bar.advance(1, f"reward 0.{step}00, 80 tokens/s")
            bar.tick()
    assert log.lines == [
        "digits, 1 of 3 steps, 4.0 s, reward 0.000, 80 tokens/s",
        "digits, 2 of 3 steps, 8.0 s, reward 0.100, 80 tokens/s",
        "digits, 3 of 3 steps, 12 s, reward 0.200, 80 tokens/s",
    ]


def test_a_log_has_a_line_of_a_step_that_hangs(
    screen: Callable[[bool], Screen], clock: Clock
):
    log = screen(False)
    with Progress(3, "digits", unit="step", each=True) as bar:
        for _ in range(200):
            clock.now += 1
            bar.tick()
    assert [line.partition(", ")[2] for line in log.lines] == [
        f"0 of 3 steps, {s} s" for s in (10, 70, 130, 190)
    ]


def test_a_log_has_the_stages_of_a_launch(
    screen: Callable[[bool], Screen], clock: Clock
):
    log = screen(False)
    with Progress(3, "p", unit="stage", stages=("process", "weights", "ready")) as bar:
        for stage, seconds in ((0, 12), (1, 1), (1, 1), (3, 1)):
            clock.now += seconds
            bar.to(stage)
            bar.tick()
    assert log.lines == ["p: process, 12 s", "p: weights, 13 s", "p: ready, 15 s"]


def test_a_log_has_nothing_of_quick_work_nor_of_a_pool_that_is_ready(
    screen: Callable[[bool], Screen], clock: Clock
):
    log = screen(False)
    with Progress(32, "p: generate", unit="sample", after=1.0) as bar:
        for _ in range(32):
            clock.now += 0.2
            bar.advance(1, "512 tokens/s")
    with Progress(3, "p", unit="stage", stages=("process", "weights", "ready")) as bar:
        bar.to(3)
    with Progress(3, "digits", unit="step", each=True, show=False) as bar:
        bar.advance(3)
        bar.waits("nobody is told")
    assert log.getvalue() == ""


def test_a_log_says_why_long_work_waits_and_how_it_ended(
    screen: Callable[[bool], Screen], clock: Clock
):
    log = screen(False)
    with Progress(2, "p: generate", unit="sample", show=True, after=1.0) as bar:
        clock.now += 2
        bar.waits("p was paused by python 7 on host; pool.resume() lets it continue")
        clock.now += 30
        bar.tick()
        bar.waits("")
        for _ in range(5):
            bar.waits("a sync that python 7 on host runs (moving)")
            clock.now += 1
            bar.waits("")
        bar.advance(2, "10 tokens/s")
    assert "\r" not in log.getvalue()
    assert log.lines == [
        "p: generate, 0 of 2 samples, 2.0 s, waits: p was paused by python 7 on host; pool.resume() lets it continue",
        "p: generate, 0 of 2 samples, 32 s, waits: a sync that python 7 on host runs (moving)",
        "p: generate, 2 of 2 samples, 37 s, 10 tokens/s",
    ]


def test_long_imports_say_so(screen: Callable[[bool], Screen], clock: Clock):
    log = screen(False)
    with importing("vLLM"):
        clock.now += 1
    assert log.lines == []
    with importing("vLLM"):
        clock.now += 6
        until(lambda: bool(log.lines))
    assert log.lines == ["importing vLLM, once in each process, 6.0 s"]


def test_a_bar_costs_little(cell: list[dict[str, Any]]):
    """Of work that is quick, a thread is started and ended, and nothing is waited for."""
    began = time.perf_counter()
    for _ in range(20):
        with Progress(1, "p", unit="sample", after=1.0) as bar:
            bar.advance(1)
    assert time.perf_counter() - began < 20 * _progress.TICK_SECONDS

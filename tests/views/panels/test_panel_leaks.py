"""Each panel is opened and closed many times: threads, comms and memory stay flat."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import jvlab as jv
from jvlab.views.panels import _live
from tests.fuzzing import soak_but
from tests.views.mapping_world import small_mapping

pytestmark = pytest.mark.slow

WARM = 3
# bytes that may stay: a panel weighs 100,000 and more, and Python keeps some names in caches
KEPT = 250_000


def inspector() -> Callable[[], Any]:
    mapping = small_mapping(2)
    return lambda: mapping.panel()


def plan() -> Callable[[], Any]:
    made = small_mapping(2).plan
    return made.panel


def timeline() -> Callable[[], Any]:
    from jvlab.record._record import Record
    from jvlab.views._timeline import Timeline
    from tests.record.synthetic import made_up

    made = Timeline(Record.of(made_up(20)))
    return made.panel


def batch() -> Callable[[], Any]:
    from tests.views.batches import make_batch

    made = make_batch(jv.models.tiny("llama"))
    return made.panel


def stepper() -> Callable[[], Any]:
    from tests.views.panels.fake_stepper import stepper

    made = stepper()
    return made.panel


def forecast() -> Callable[[], Any]:
    from tests.analysis.forecast.synthetic import record, setting

    made = jv.whatif(record(setting(4, 4, 48)))
    return made.panel


# One line for each panel: a function that makes what is shown, and returns what shows it.
PANELS = [inspector, plan, timeline, batch, stepper, forecast]


class Output:
    """A notebook's output: it takes what is displayed, and what is displayed in its place."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def display(self, data: dict[str, Any], **_: Any) -> Output:
        self.bundles = [data]
        return self

    def update(self, data: dict[str, Any], **_: Any) -> None:
        self.bundles.append(data)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    import IPython.display

    made = Output()
    monkeypatch.setattr(_live, "in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", made.display)
    return made


def comms() -> int:
    from ipywidgets.widgets import widget

    return len(widget._instances)


def threads(before: set[threading.Thread]) -> list[str]:
    """Our own threads that were not there before; they may take a moment to end."""
    deadline = time.monotonic() + 60
    while (
        left := [
            t.name
            for t in set(threading.enumerate()) - before
            if t.name.startswith("jvlab-")
        ]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("times", soak_but([5], [5, 50]))
@pytest.mark.parametrize("make", PANELS, ids=lambda make: make.__name__)
def test_many_panels_leave_nothing(
    make: Callable[[], Callable[[], Any]], times: int, output: Output
) -> None:
    others = set(threading.enumerate())
    show = make()

    def once() -> None:
        panel = show()
        assert _live.WIDGET in output.bundles[0], "no live panel was shown"
        panel.refresh_now()
        panel.close()
        panel.close()  # twice is once
        assert _live.WIDGET not in output.bundles[-1]
        assert "text/html" in output.bundles[-1]

    for _ in range(WARM):
        once()
    # of other tests' objects too: what goes away later would hide what stays
    gc.collect()
    before, held = comms(), len(_live._shown)
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(times):
        once()
    output.bundles.clear()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert comms() <= before
    assert len(_live._shown) <= held
    assert threads(others) == []
    assert grown < KEPT, f"{grown / times:,.0f} bytes a panel were kept"

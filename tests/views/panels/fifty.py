"""Opens and closes a panel fifty times: no thread and no comm may stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jvlab.views.panels._live import Panel


def panel_threads() -> list[threading.Thread]:
    """Those of panels alone: what gRPC or another test's objects keep is no panel's doing."""
    return [
        t
        for t in threading.enumerate()
        if t.name in ("jvlab-button", "jvlab-publisher")
    ]


def fifty_leave_nothing(make: Callable[[], Panel]) -> None:
    """`make` makes a panel of one and the same subject."""
    from ipywidgets.widgets import widget

    def open_and_close() -> None:
        panel = make()
        panel.refresh_now()
        panel.close()

    open_and_close()
    threads, widgets = panel_threads(), len(widget._instances)
    for _ in range(50):
        open_and_close()
    deadline = time.monotonic() + 30
    while len(panel_threads()) > max(1, len(threads)) and time.monotonic() < deadline:
        time.sleep(0.01)  # the one publisher may stay, for the next panel
    assert len(panel_threads()) <= max(1, len(threads)), panel_threads()
    assert len(widget._instances) <= widgets

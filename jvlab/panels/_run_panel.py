"""The run's dashboard: live curves on a canvas, and buttons that pause, resume, stop and change the staleness bound."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError
from jvlab.panels._assets import asset
from jvlab.panels._lab_panel import ConfirmButton, button
from jvlab.panels._live import Panel
from jvlab.views._run_feed import COLUMNS, RunFeed
from jvlab.views._run_view import head_html
from jvlab.views._style import message_html

if TYPE_CHECKING:
    from jvlab.trainer._run import Run

SNAPSHOT_SECONDS = 10.0  # between synced snapshots while rows are appended


@functools.cache
def curves_class() -> type[Any]:
    """The canvas as an anywidget; created on first use, so that importing this module needs no widgets."""
    import anywidget
    import traitlets

    class Curves(anywidget.AnyWidget):
        """`snapshot` holds all rows as float32 and is sent rarely; new rows are appended by binary messages."""

        _esm = asset("curves.js")
        columns = traitlets.List(list(COLUMNS)).tag(sync=True)
        snapshot = traitlets.Bytes(b"").tag(sync=True)
        facts = traitlets.Dict().tag(sync=True)

    return Curves


class RunPanel(Panel):
    """Live reward, staleness, throughput, time split and logprob gap; `cost` is the CPU time of an update."""

    hz = 2.0

    def build(self) -> Any:
        import ipywidgets

        run: Run = self.subject
        self.feed: RunFeed | None = None
        self.updates, self.cpu_seconds = 0, 0.0
        self._snapshot_due = 0.0
        self.head, self.message = (ipywidgets.HTML().add_class(name) for name in ("jv-head", "jv-message"))
        self.curves = curves_class()()
        self.curves.on_msg(lambda _, content, __: self._send_missing(content))
        self.pause = button("pause", "run.pause()", "jv-pause", lambda: self.act(run.pause, "pause"))
        self.resume = button("resume", "run.resume()", "jv-resume", lambda: self.act(run.resume, "resume"))
        self.stop = button("stop", "run.stop()", "jv-stop")
        self._confirm = ConfirmButton(self.stop, lambda: self.act(run.stop, "stop after this step"))
        self.bound = ipywidgets.BoundedIntText(value=run.max_staleness, min=0, max=1000, description="max staleness")
        self.bound.add_class("jv-bound")
        self.bound.layout.width, self.bound.style.description_width = "11em", "auto"
        self.apply = button("set", "run.max_staleness = k", "jv-set", self._set_bound)
        parts = [self.pause, self.resume, self.stop, self.bound, self.apply]
        bar = ipywidgets.HBox(parts, layout={"flex_flow": "row wrap", "align_items": "center"})
        self.refresh()  # complete from the start, in case the notebook is saved now
        return ipywidgets.VBox([self.head, bar, self.curves, self.message]).add_class("jv-run-panel")

    def _set_bound(self) -> None:
        value = int(self.bound.value)
        self.act(lambda: setattr(self.subject, "max_staleness", value), f"max_staleness = {value}")

    def _send_missing(self, content: Any) -> None:
        """A canvas that has just been drawn reports how many rows it has; send it the rest."""
        have = content.get("have") if isinstance(content, dict) else None
        if isinstance(have, int) and self.feed is not None and 0 <= have < len(self.feed.rows):
            self._append(have)

    def _append(self, first: int) -> None:
        assert self.feed is not None
        self.curves.send({"first": first}, buffers=[self.feed.rows[first:].tobytes()])

    def say(self, text: str, bad: bool = False) -> None:
        self.message.value = message_html(text, bad)

    def refresh(self) -> None:
        began = time.thread_time()
        if self._feed() is not None:
            self._write()
        self.updates += 1
        self.cpu_seconds += time.thread_time() - began

    def _feed(self) -> RunFeed | None:
        if self.feed is None:
            try:
                self.feed = RunFeed(self.subject.record)
            except ConfigError:  # nothing recorded yet
                return None
        return self.feed

    def _write(self) -> None:
        run: Run = self.subject
        feed, status = self.feed, run.status
        assert feed is not None
        first = feed.read()
        if first is not None:
            self._append(first)
            self.curves.facts = {
                "alarm": feed.alarm,
                "split": feed.split(),
                "histogram": [[age, n] for age, n in sorted(feed.histogram.items())],
                "steps": status.steps,
            }
        if time.monotonic() >= self._snapshot_due or run.done:
            self._snapshot_due = time.monotonic() + SNAPSHOT_SECONDS
            self.curves.snapshot = feed.rows.tobytes()
        self.head.value = head_html(run.name, status, feed.alarm)
        self.pause.disabled = status.state != "running"
        self.resume.disabled = status.state != "paused"
        self.stop.disabled = status.state not in ("starting", "running", "paused")
        self._confirm.disarm(only_if_expired=True)

    @property
    def cost(self) -> float:
        """Mean CPU seconds of the kernel per update."""
        return self.cpu_seconds / max(1, self.updates)

    @property
    def done(self) -> bool:
        return self.subject.done

"""The dashboard of a run or of a record: headline numbers, curves on a canvas, the best and the worst sample."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab.record._events import run_name
from jvlab.record._record import Record
from jvlab.record._run_status import COLUMNS, RunFeed, RunStatus, status_of
from jvlab.views._run_view import charts, extremes_html, head_html, run_html
from jvlab.views._style import message_html
from jvlab.views.panels._parts import ConfirmButton, PartsPanel, box

if TYPE_CHECKING:
    from jvlab.trainer._run import Run


# between synced copies of all rows, while new ones are appended
SNAPSHOT_SECONDS = 10.0
SMOOTHING = {"none": 1, "5 steps": 5, "20 steps": 20, "100 steps": 100}


class Dashboard(PartsPanel):
    """What the panels of a run and of a record share. `cost` is the CPU time of an update, `load` the share of a core.

    `smooth(steps)` and `compare(other)` do what the field and `run.panel(compare=...)` do.
    """

    hz = 2.0
    scripts = ("controls.js", "curves.js")
    css_class = "jv-run-panel"
    traits: ClassVar[dict[str, Any]] = {
        **PartsPanel.traits,
        "columns": list(COLUMNS),
        "charts": charts(),
        "evaluations": [],
        # `snapshot` holds all rows as float32 and is sent rarely; new rows are appended by binary messages
        "snapshot": b"",
        "facts": {},
        "smoothing": 1,
        # a second run, drawn behind the first
        "other": {},
        "other_rows": b"",
    }

    def __init__(self, subject: Any, compare: Any = None) -> None:
        self.feed: RunFeed | None = None
        self.other: RunFeed | None = None
        self.updates = 0
        self._update_seconds = 0.0
        self._read: tuple[Any, Any] = (None, None)  # the samples that are shown
        self._rows_due = self._other_due = 0.0
        super().__init__(subject)
        if compare is not None:
            self.compare(compare)

    # What it shows; subclasses say where that comes from ------------------------------------------------------------

    @property
    def name(self) -> str:
        """The run's name."""
        raise NotImplementedError

    @property
    def model(self) -> str:
        """The folder of the run's model, whose tokenizer decodes prompts; empty if it is not known."""
        raise NotImplementedError

    def status(self) -> RunStatus:
        """The run's status now."""
        raise NotImplementedError

    def open_record(self) -> Record:
        """The run's record; ConfigError while there is none."""
        raise NotImplementedError

    def make_controls(self) -> list[Any]:
        """Parts for the bar above the curves."""
        return []

    # Its parts ------------------------------------------------------------------------------------------------------

    def make_parts(self) -> None:
        parts = self.parts
        self.head, self.message = parts.html("jv-head"), parts.html("jv-message")
        self.samples = parts.html("jv-extremes")
        self.curves = self.widget
        self.curves.on_msg(lambda _, content, __: self._send_missing(content))
        controls = self.make_controls()
        self.smoothing = parts.add(
            "select",
            "jv-smoothing",
            description="smoothing",
            value="none",
            options=list(SMOOTHING),
        )
        self.smoothing.on_change(lambda: self._smooth(SMOOTHING[self.smoothing.value]))
        drawn = parts.add("draw", "jv-figure", draw="curves")
        parts.arrange(
            box(
                self.head,
                box(*controls, self.smoothing, row=True),
                drawn,
                self.samples,
                self.message,
            )
        )
        self.refresh()  # complete from the start, in case the notebook is saved now

    def _smooth(self, steps: int) -> None:
        self.curves.smoothing = steps

    def smooth(self, steps: int) -> None:
        """Draw each curve as the mean of its last `steps` steps, over the faint curve itself; 1: only the curve."""
        words = next((name for name, count in SMOOTHING.items() if count == steps), "")
        if not words:
            known = ", ".join(map(str, SMOOTHING.values()))
            raise ConfigError(
                f"smoothing over {steps!r} steps", remedy=f"one of {known}"
            )
        self.smoothing.value = words

    def compare(self, other: Any) -> None:
        """Draw another run (or its record) behind this one; None removes it."""
        if other is None:
            self.other = None
            self.curves.other = {}
            self.curves.other_rows = b""
            return
        record = other if isinstance(other, Record) else getattr(other, "record", None)
        if not isinstance(record, Record):
            raise ConfigError(
                f"compare is {type(other).__name__}",
                remedy="a run, or jv.Record.open(folder)",
            )
        name = str(
            getattr(other, "name", "")
            or (record.folder.name if record.folder else "other run")
        )
        self._other_name, self.other, self._other_due = name, RunFeed(record), 0.0
        self._send_other()

    def _send_other(self) -> None:
        """The second run may be active too: what it did since is sent with the next snapshot of rows."""
        if self.other is None or time.monotonic() < self._other_due:
            return
        self._other_due = time.monotonic() + SNAPSHOT_SECONDS
        if self.other.read() is not None:
            with self.curves.hold_sync():
                self.curves.other = {
                    "name": self._other_name,
                    "evaluations": self.other.evaluations,
                }
                self.curves.other_rows = self.other.rows.tobytes()

    def _send_missing(self, content: Any) -> None:
        """A canvas that has just been drawn reports how many rows it has; send it the rest."""
        have = content.get("have") if isinstance(content, dict) else None
        if (
            isinstance(have, int)
            and self.feed is not None
            and 0 <= have < len(self.feed.rows)
        ):
            self._append(have)

    def _append(self, first: int) -> None:
        assert self.feed is not None
        self.curves.send({"first": first}, buffers=[self.feed.rows[first:].tobytes()])

    def say(self, text: str, bad: bool = False) -> None:
        self.message.value = message_html(text, bad)

    # Its updates ----------------------------------------------------------------------------------------------------

    def static_html(self) -> str:
        return run_html(self.name, self.status(), self.feed, self.model)

    def refresh(self) -> None:
        began = time.thread_time()
        if self._feed() is not None:
            self._write()
        self.updates += 1
        self._update_seconds += time.thread_time() - began

    def _feed(self) -> RunFeed | None:
        if self.feed is None:
            try:
                self.feed = RunFeed(self.open_record())
            except ConfigError:  # nothing recorded yet
                return None
        return self.feed

    def _write(self) -> None:
        feed = self.feed
        status = self.status()
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
        if len(self.curves.evaluations) != len(feed.evaluations):
            self.curves.evaluations = [list(pair) for pair in feed.evaluations]
        if time.monotonic() >= self._rows_due or self.done:
            self._rows_due = time.monotonic() + SNAPSHOT_SECONDS
            self.curves.snapshot = feed.rows.tobytes()
        self._send_other()
        with self.parts.together():
            self.head.value = head_html(self.name, status, feed.alarm, feed)
            if self._read != (status.best, status.worst):
                self._read = status.best, status.worst
                self.samples.value = extremes_html(status, self.model)
            self.update_controls(status)
        self.found()

    def update_controls(self, status: RunStatus) -> None:
        """Enable the controls that are of use now."""

    @property
    def cost(self) -> float:
        """Mean CPU seconds of the kernel per update."""
        return self._update_seconds / max(1, self.updates)


# The panel of a record: the dashboard of a run whose process is not this one, or has ended.


class RecordPanel(Dashboard):
    """A record's dashboard: it follows a run that another process works on, and has no buttons to steer it."""

    remedy = "jv.Record.open(folder).panel()"

    def __init__(self, record: Record, compare: Any = None, model: str = "") -> None:
        self._model, self._status, self._events = (
            model,
            status_of(record),
            len(record.events()),
        )
        self.moving = record.running
        self.hz = Dashboard.hz if self.moving else 0.05
        super().__init__(record, compare)

    @property
    def name(self) -> str:
        return run_name(self.subject.events())

    @property
    def model(self) -> str:
        return self._model

    def status(self) -> RunStatus:
        # its writer may have been killed, which writes no event
        if self.moving and (
            len(self.subject.events()) != self._events or not self.subject.running
        ):
            self._events = len(self.subject.events())
            # samples are looked for once the run has ended: their file is long, and this panel need not be exact
            self.moving = self.subject.running
            self._status = status_of(self.subject, samples=not self.moving)
        return self._status

    def open_record(self) -> Record:
        return self.subject

    @property
    def progress(self) -> str:
        return f"step {self._status.step}"


# The panel of a run: its dashboard, with buttons that pause, resume, stop and change the staleness bound.


class RunPanel(Dashboard):
    """A run's dashboard. It closes when the run ends under it; one of a run that has ended stays, to look around."""

    remedy = "jv.Lab.attach(), then jv.grpo(..., folder=..., resume=True)"

    def __init__(self, run: Run, compare: Any = None) -> None:
        self._over = run.done
        super().__init__(run, compare)

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def model(self) -> str:
        return self.subject.model

    def status(self) -> RunStatus:
        return self.subject.status

    def open_record(self) -> Record:
        return self.subject.record

    @property
    def progress(self) -> str:
        return f"step {self.subject.status.step}"

    def make_controls(self) -> list[Any]:
        run: Run = self.subject
        parts = self.parts
        button = self.parts.button
        self.pause = button(
            "pause", "run.pause()", "jv-pause", lambda: self.act(run.pause, "pause")
        )
        self.resume = button(
            "resume",
            "run.resume()",
            "jv-resume",
            lambda: self.act(run.resume, "resume"),
        )
        self.stop = button("stop", "run.stop()", "jv-stop")
        self._confirm = ConfirmButton(
            self.stop, lambda: self.act(run.stop, "stop after this step")
        )
        self.bound = parts.add(
            "number",
            "jv-bound",
            description="max staleness",
            value=run.max_staleness,
            wrong="",
        )
        self.bound.on_press(self._set_bound)
        self.apply = button("set", "run.max_staleness = k", "jv-set", self._set_bound)
        return [self.pause, self.resume, self.stop, self.bound, self.apply]

    def _set_bound(self) -> None:
        """Set the bound, or say beside the field what is wrong with it."""
        text = str(self.bound.value).strip()
        if not text.isdecimal():
            now = self.subject.max_staleness
            self.bound.wrong = f"a whole number, 0 or more; it stays {now}"
            return
        self.bound.wrong = ""
        self.act(
            lambda: setattr(self.subject, "max_staleness", int(text)),
            f"max_staleness = {text}",
        )

    def update_controls(self, status: RunStatus) -> None:
        over = f"the run is {status.state}"
        self.pause.why = "" if status.state == "running" else over
        self.resume.why = "" if status.state == "paused" else over
        self.stop.why = (
            "" if status.state in ("starting", "running", "paused") else over
        )
        self.apply.why = self.bound.why = over if self.subject.done else ""
        self._confirm.disarm(only_if_expired=True)

    @property
    def done(self) -> bool:
        return self.subject.done and not self._over

    @staticmethod
    def is_renewed(subject: Run) -> bool:
        return not subject.done

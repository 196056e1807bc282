"""The panel of a record: the dashboard of a run whose process is not this one, or has ended."""

from __future__ import annotations

from typing import Any

from jvlab.record._events import RunStart
from jvlab.record._record import Record
from jvlab.record._run_status import RunStatus, status_of
from jvlab.views.panels._dashboard import Dashboard
from jvlab.views.panels._live import show


class RecordPanel(Dashboard):
    """A record's dashboard: it follows a run that another process works on, and has no buttons to steer it."""

    remedy = "jv.Record.open(folder).panel()"

    def __init__(self, record: Record, compare: Any = None, model: str = "") -> None:
        self._model, self._status, self._events = model, status_of(record), len(record.events())
        self.moving = record.running
        self.hz = Dashboard.hz if self.moving else 0.05
        super().__init__(record, compare)

    @property
    def name(self) -> str:
        names = [e.run for e in self.subject.events() if isinstance(e, RunStart) and e.run]
        return names[-1] if names else "run"

    @property
    def model(self) -> str:
        return self._model

    def status(self) -> RunStatus:
        # its writer may have been killed, which writes no event
        if self.moving and (len(self.subject.events()) != self._events or not self.subject.running):
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


def show_record(record: Record, compare: Any = None, model: str = "") -> RecordPanel | None:
    """Display a record's dashboard; returns the panel if widgets are available."""
    panel = show(record, lambda: RecordPanel(record, compare, model))
    return panel if isinstance(panel, RecordPanel) else None

"""The panel of a run: its dashboard, with buttons that pause, resume, stop and change the staleness bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab.views.panels._dashboard import Dashboard
from jvlab.views.panels._parts import ConfirmButton

if TYPE_CHECKING:
    from jvlab.record._record import Record
    from jvlab.record._run_status import RunStatus
    from jvlab.trainer._run import Run


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
        parts, button = self.parts, self.parts.button
        self.pause = button("pause", "run.pause()", "jv-pause", lambda: self.act(run.pause, "pause"))
        self.resume = button("resume", "run.resume()", "jv-resume", lambda: self.act(run.resume, "resume"))
        self.stop = button("stop", "run.stop()", "jv-stop")
        self._confirm = ConfirmButton(self.stop, lambda: self.act(run.stop, "stop after this step"))
        self.bound = parts.add("number", "jv-bound", description="max staleness", value=run.max_staleness, wrong="")
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
        self.act(lambda: setattr(self.subject, "max_staleness", int(text)), f"max_staleness = {text}")

    def update_controls(self, status: RunStatus) -> None:
        over = f"the run is {status.state}"
        self.pause.why = "" if status.state == "running" else over
        self.resume.why = "" if status.state == "paused" else over
        self.stop.why = "" if status.state in ("starting", "running", "paused") else over
        self.apply.why = self.bound.why = over if self.subject.done else ""
        self._confirm.disarm(only_if_expired=True)

    @property
    def done(self) -> bool:
        return self.subject.done and not self._over

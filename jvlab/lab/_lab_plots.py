"""`lab.plot` and `lab.timeline()`: figures of the lab's last run, or of a given one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError
from jvlab.record._calls import calls_of
from jvlab.trainer._run import _runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.lab._lab import Lab
    from jvlab.record._record import Record
    from jvlab.views.panels._timeline_panel import Timeline


class LabPlots:
    """Figures of what happened in a lab: `lab.plot.staleness()`, `.throughput()`, `.run()`, `.timeline()`.

    Each takes a `Run`, a `Record` or a run's folder; default: the last run that this process started in the lab.
    `timeline` without any run shows what was generated, scored and synced.
    """

    def __init__(self, lab: Lab) -> None:
        self._client = lab._client

    def _record(self, run: Any) -> Record:
        from jvlab.record._record import Record

        if run is None:
            found = _runs.get(self._client, [])
            if not found:
                raise ConfigError(
                    "no run was started in this lab by this process",
                    remedy="jv.grpo(...) first, or name one: lab.plot.staleness('runs/<name>')",
                )
            run = found[-1]
        if isinstance(run, Record):
            return run
        return run.record if hasattr(run, "record") else Record.open(run)

    def _happened(self, run: Any) -> Record:
        """The record of a run; without any run, what this process asked of the lab's pools."""
        if run is not None or _runs.get(self._client):
            return self._record(run)
        found = calls_of(self._client)
        if not found.events():
            raise ConfigError(
                "nothing happened in this lab yet: this process generated nothing, synced nothing and started no run",
                remedy="pool.generate(...), link.sync(...) or jv.grpo(...) first; or name a run: "
                "lab.timeline('runs/<name>')",
            )
        return found

    def staleness(self, run: Any = None) -> Figure:
        """How old the tokens were that each step trained on."""
        from jvlab.views._record_plots import staleness_figure

        return staleness_figure(self._record(run))

    def throughput(self, run: Any = None) -> Figure:
        """Tokens and samples per second, sync speed, who was busy."""
        from jvlab.views._record_plots import throughput_figure

        return throughput_figure(self._record(run))

    def run(self, run: Any = None) -> Figure:
        """Reward, loss and other metrics over the run."""
        from jvlab.views._record_plots import run_figure

        return run_figure(self._record(run))

    def timeline(self, run: Any = None, **options: Any) -> Figure:
        """Which process was busy when, and which version each rollout used."""
        from jvlab.views._timeline import timeline_figure

        return timeline_figure(self._happened(run), **options)

    def lanes(self, run: Any = None, **options: Any) -> Timeline:
        """The interactive timeline: `lab.timeline()`."""
        from jvlab.views.panels._timeline_panel import Timeline

        return Timeline(self._happened(run), **options)

    def __repr__(self) -> str:
        return "LabPlots(staleness, throughput, run, timeline)"

"""`lab.timeline()`: swim lanes of trainer, replicas and syncs; interactive in a notebook, SVG elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab.record._events import StepEvent, only, run_name
from jvlab.views._lanes_view import LaneData, lanes_svg
from jvlab.views._style import BOX, FAINT
from jvlab.views._timeline import STEPS, lane_data, timeline_figure, window_of
from jvlab.views.panels._live import Panel, static_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.record._record import Record


class Timeline:
    """When each actor was busy, and the version of each sample. Display it in a cell; `.figure()` uses matplotlib.

    Time in which nobody worked is folded: drawn narrow, with its true length.

    `steps` (the last ones; None: all), or `start` and `stop` in seconds, choose what is shown at first.
    """

    def __init__(
        self,
        record: Record,
        *,
        steps: int | None = STEPS,
        start: float | None = None,
        stop: float | None = None,
    ) -> None:
        self.record = record
        self._options: dict[str, Any] = {"steps": steps, "start": start, "stop": stop}
        self.window  # noqa: B018  raises now if the window is invalid, not when it is displayed

    @property
    def window(self) -> tuple[float, float]:
        """The time window that is shown at first, in seconds since the run began."""
        return window_of(self.record.events(), **self._options)

    def data(self, whole: bool = False) -> LaneData:
        """Lanes and bars of the window, or of the whole run."""
        events = self.record.events()
        return lane_data(events, window_of(events) if whole else self.window)

    def figure(self) -> Figure:
        """The same as a matplotlib figure."""
        return timeline_figure(self.record, **self._options)

    def savefig(self, *args: Any, **options: Any) -> None:
        """`figure().savefig`."""
        self.figure().savefig(*args, **options)

    def panel(self) -> TimelinePanel | None:
        """The interactive lanes: wheel, drag, hover. None without a notebook or ipywidgets."""
        return TimelinePanel.show(self)

    def __repr__(self) -> str:
        events = self.record.events()
        low, high = self.window
        steps = len(only(events, StepEvent))
        return f"Timeline({run_name(events)!r}, {steps} steps, showing {low:.1f} to {high:.1f} s)"

    def _repr_html_(self) -> str:
        data = self.data()
        keys = " ".join(
            f'<span style="color:{FAINT};margin-right:12px"><span style="color:{colour}">■</span> {escape(name)}</span>'
            for name, colour in data.keys
        )
        return f'<div style="{BOX}"><b>{escape(data.title)}</b><div>{keys}</div>{lanes_svg(data, data.title)}</div>'

    def _ipython_display_(self) -> None:
        self.panel()


class TimelinePanel(Panel):
    """The lanes in a notebook; `zoom`, `reset` and `last` do what its wheel and buttons do. Follows an active run."""

    hz = 1.0
    scripts = ("lanes.js", "timeline.js")
    css = ("lanes.css",)
    css_class = "jv-timeline-panel"
    traits: ClassVar[dict[str, Any]] = {"data": {}, "view": []}

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        # number of events, and the snapshot of them
        self._drawn: tuple[int, str] = (-1, "")
        self._events = len(timeline.record.events())
        super().__init__(timeline)

    def build(self) -> Any:
        widget = self.new_widget(
            data=self.timeline.data(whole=True).plain(), view=list(self.timeline.window)
        )
        widget.on_msg(self._pressed)
        return widget

    def static_html(self) -> str:
        if self._drawn[0] != self._events:
            self._drawn = (self._events, static_html(self.timeline))
        return self._drawn[1]

    @property
    def progress(self) -> str:
        return f"{self._events} events"

    def refresh(self) -> None:
        count = len(self.timeline.record.events())
        if count != self._events:
            self._events = count
            self.widget.data = self.timeline.data(whole=True).plain()

    def _pressed(self, _: Any, message: dict[str, Any], __: Any) -> None:
        match message.get("do"):
            case "reset":
                self.act(self.reset)
            case "last":
                self.act(self.last)

    def zoom(self, start: float, stop: float) -> None:
        """Show this time window, in seconds since the run began."""
        if not stop > start:
            raise ConfigError(
                f"the timeline would end at {stop:g} s before it begins at {start:g} s",
                remedy="swap them",
            )
        self.widget.view = [float(start), float(stop)]

    def reset(self) -> None:
        """Show the whole run."""
        self.widget.view = list(window_of(self.timeline.record.events()))

    def last(self, steps: int = STEPS) -> None:
        """Show the newest steps."""
        self.widget.view = list(window_of(self.timeline.record.events(), steps))

    def __repr__(self) -> str:
        return f"TimelinePanel({self.timeline!r})"

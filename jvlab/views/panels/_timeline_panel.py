"""`lab.timeline()`: swim lanes of trainer, replicas and syncs; interactive in a notebook, SVG elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab._units import human_bytes, human_seconds
from jvlab.record._events import (
    Event,
    FaultEvent,
    PauseEvent,
    RewardEvent,
    RolloutEvent,
    ScoreEvent,
    StepEvent,
    SyncEvent,
)
from jvlab.views._lanes_view import LaneBar, LaneData, folds_of, lanes_svg
from jvlab.views._palette import NEWEST, OLDEST, PHASES, hex_colour, version_colour
from jvlab.views._record_plots import run_name
from jvlab.views._style import BOX, FAINT
from jvlab.views._timeline import SHOWN, _bars, _lanes, _window, timeline_figure
from jvlab.views.panels._live import Panel, static_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.record._record import Record

STEPS = 12  # shown at first


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
        if steps is not None and steps < 1:
            raise ConfigError(
                f"steps={steps}", remedy="pass 1 or more, or None for the whole run"
            )
        self.record = record
        self._options: dict[str, Any] = {"steps": steps, "start": start, "stop": stop}
        self.window  # noqa: B018  raises now if the window is invalid, not when it is displayed

    @property
    def window(self) -> tuple[float, float]:
        """The time window that is shown at first, in seconds since the run began."""
        return _window(self.record.events(), **self._options)

    def data(self, whole: bool = False) -> LaneData:
        """Lanes and bars of the window, or of the whole run."""
        events = self.record.events()
        return lane_data(
            events, _window(events, None, None, None) if whole else self.window
        )

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
        steps = sum(isinstance(e, StepEvent) for e in events)
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


class _Shades:
    """Version → colour: the interface that `_bars` needs, without matplotlib."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def to_rgba(self, version: int) -> tuple[float, ...]:
        return version_colour(version, self.low, self.high)


def lane_data(events: Sequence[Event], window: tuple[float, float]) -> LaneData:
    """The bars of a time window."""
    low, high = window
    shown = [
        e for e in events if isinstance(e, SHOWN) and e.stop > low and e.start < high
    ]
    lane, names = _lanes(shown)
    versions = [v for e in shown if isinstance(e, RolloutEvent) for v in e.versions]
    scale = _Shades(min(versions), max(versions)) if versions else None
    replicas = {e.actor for e in shown if isinstance(e, RolloutEvent)}
    rows = [(actor, at) for at, (actor, _) in enumerate(names) if actor in replicas]
    bars = []
    for event in shown:
        text_of_event = event_text(event)
        for b in _bars(event, lane.get(id(event), 0), scale, rows):
            if b.start > high or b.start + b.seconds < low:
                continue  # a piece of a visible rollout, outside the window
            text = (
                f"{text_of_event} ({b.labels[0]})"
                if b.labels and isinstance(event, RolloutEvent)
                else text_of_event
            )
            label = b.labels[0] if b.labels else ""
            colour = b.colour if isinstance(b.colour, str) else hex_colour(b.colour)
            ink = {"white": "#fff", "black": "#000"}[b.ink]
            bars.append(
                LaneBar(
                    b.row,
                    b.start,
                    b.seconds,
                    colour,
                    text,
                    label,
                    ink,
                    isinstance(event, PauseEvent),
                )
            )
    marks = tuple(
        (e.start, f"{e.fault} ({e.who})" if e.who else e.fault)
        for e in events
        if isinstance(e, FaultEvent) and low <= e.start <= high
    )
    kinds = (
        (StepEvent, "train"),
        (SyncEvent, "sync"),
        (RewardEvent, "reward"),
        (ScoreEvent, "score"),
    )
    keys = tuple(
        (n, PHASES[n]) for kind, n in kinds if any(isinstance(e, kind) for e in shown)
    )
    if versions:
        keys += (
            (f"generated by v{min(versions)}", hex_colour(OLDEST)),
            (f"by v{max(versions)}", hex_colour(NEWEST)),
        )
    lanes = tuple(actor if not sub else "" for actor, sub in names)
    end = high if high > low else low + 1
    title = f"{run_name(events)}: who was busy when"
    return LaneData(
        lanes, tuple(bars), (low, end), marks, title, keys, folds_of(shown, (low, end))
    )


def event_text(event: Event) -> str:
    """An event in one line."""
    took = f"{human_seconds(event.seconds)} from {event.start:.2f} s"
    match event:
        case RolloutEvent():
            return f"{event.actor} generated {event.tokens:,} tokens in {event.samples} samples, {took}"
        case ScoreEvent():
            return (
                f"{event.actor} scored {event.tokens:,} tokens ({event.what}), {took}"
            )
        case RewardEvent():
            return f"rewards of {event.samples} samples, mean {event.mean:.3g}, {took}"
        case StepEvent():
            skipped = ", skipped" if event.skipped else ""
            what = f"trained on {event.tokens:,} tokens, reward {event.reward_mean:.3g}{skipped}"
            return f"step {event.step}: {what}, {took}"
        case SyncEvent():
            arrived = ", arrived" if event.verified else ""
            how = f"{human_bytes(event.bytes)} over {event.transport}{arrived}"
            return f"sync of version {event.version}: {how}, {took}"
        case PauseEvent():
            return f"paused ({event.why or event.mode}), {took}"
        case _:
            return f"{event.kind} by {event.actor}, {took}"


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
        self.widget.view = list(
            _window(self.timeline.record.events(), None, None, None)
        )

    def last(self, steps: int = STEPS) -> None:
        """Show the newest steps."""
        self.widget.view = list(
            _window(self.timeline.record.events(), steps, None, None)
        )

    def __repr__(self) -> str:
        return f"TimelinePanel({self.timeline!r})"

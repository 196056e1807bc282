"""The timeline of a run: a lane per actor, rollouts coloured by the version that generated them, syncs as bars.

`lane_data` describes it, once for the page (static/lanes.js), for SVG (`lanes_svg`) and for matplotlib
(`timeline_figure`). Time in which nobody worked is folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

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
    only,
    run_name,
)
from jvlab.record._metrics import lanes, union
from jvlab.views._figures import EMPTY, RED, blank, new_figure
from jvlab.views._palette import (
    NEUTRAL,
    NEWEST,
    OLDEST,
    PHASES,
    hex_colour,
    version_colour,
)
from jvlab.views._style import BAD, BOX, FAINT, LINE
from jvlab.views.panels._live import Panel, static_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jvlab.record._record import Record


LANE = 22
LEFT = 92
FOOT = 20
WIDTH = 860
LETTER = 6.5  # px, of a name
MAX_STATIC = 600  # bars in the SVG, to keep saved notebooks small
AT_LEAST = 1.0  # seconds of a gap that is folded; it is also longer than two steps
SHOWN_AS = 0.25  # of a median step: how long a fold looks


@dataclass(frozen=True)
class Folds:
    """Gaps (start, stop), each drawn as `seconds` long. Without gaps drawn time is time."""

    gaps: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0

    def knots(self) -> tuple[np.ndarray, np.ndarray]:
        """Time and drawn time at the ends of every gap, between which both run evenly."""
        ends = np.array(self.gaps, float).reshape(-1, 2)
        lost = np.cumsum(ends[:, 1] - ends[:, 0] - self.seconds)
        before = lost - (ends[:, 1] - ends[:, 0] - self.seconds)
        return ends.ravel(), np.stack(
            [ends[:, 0] - before, ends[:, 1] - lost], axis=1
        ).ravel()

    def drawn(self, at: Any) -> Any:
        """Where a moment, or an array of them, is drawn."""
        times, places = self.knots()
        return at + np.interp(at, times, places - times) if len(times) else at

    def time(self, place: Any) -> Any:
        """The moment that is drawn at a place: the inverse of `drawn`."""
        times, places = self.knots()
        return place + np.interp(place, places, times - places) if len(times) else place

    def plain(self) -> list[list[float]]:
        """The knots as pairs, for the browser."""
        return np.stack(self.knots(), axis=1).tolist()


@dataclass(frozen=True)
class LaneBar:
    """One bar: its lane, start and duration, label and tooltip."""

    row: int
    start: float
    seconds: float
    colour: str
    text: str
    label: str = ""
    ink: str = "#fff"
    hatch: bool = False
    link: int = -1  # for a plan: the row in its link table


@dataclass(frozen=True)
class LaneData:
    """Lanes, bars, the time window they span, and marked moments."""

    lanes: tuple[str, ...]
    bars: tuple[LaneBar, ...] = field(repr=False)
    window: tuple[float, float]
    marks: tuple[tuple[float, str], ...] = ()
    title: str = ""
    keys: tuple[tuple[str, str], ...] = ()  # (meaning, colour)
    folds: Folds = field(default_factory=Folds)
    # (time, lane, lane): where a lane reached another; for figures
    links: tuple[tuple[float, int, int], ...] = ()

    def plain(self) -> dict[str, Any]:
        """As plain columns, for the browser."""
        names = [f.name for f in fields(LaneBar)]
        return {
            "lanes": list(self.lanes),
            "bars": {name: [getattr(b, name) for b in self.bars] for name in names},
            "window": list(self.window),
            "marks": [{"at": at, "text": text} for at, text in self.marks],
            "title": self.title,
            "keys": [list(k) for k in self.keys],
            "folds": self.folds.plain(),
        }


def folds_of(events: Sequence[Event], window: tuple[float, float]) -> Folds:
    """The gaps between what anybody did within a time window."""
    low, high = window
    work = [
        (e.start, e.stop)
        for e in events
        if not isinstance(e, PauseEvent) and e.stop > low and e.start < high
    ]
    busy = union(work)
    ends = np.sort([e.stop for e in only(events, StepEvent)])
    step = float(np.median(np.diff(ends))) if len(ends) > 1 else AT_LEAST
    long = max(AT_LEAST, 2 * step)
    gaps = (
        zip(busy[:-1, 1].tolist(), busy[1:, 0].tolist(), strict=True)
        if len(busy) > 1
        else ()
    )
    return Folds(
        tuple((a, b) for a, b in gaps if b - a > long), SHOWN_AS * min(step, long)
    )


def lanes_svg(data: LaneData, what: str) -> str:
    """The lanes without zoom."""
    low, high = data.window
    begin = data.folds.drawn(low)
    # names are whole
    left = max([LEFT, *(16 + LETTER * len(name) for name in data.lanes)])
    scale = (WIDTH - left - 8) / ((data.folds.drawn(high) - begin) or 1.0)
    place = lambda at: left + (data.folds.drawn(at) - begin) * scale
    height = max(len(data.lanes), 1) * LANE + FOOT
    shown = _longest(data.bars)
    parts = [
        f'<text x="{left - 8}" y="{i * LANE + LANE / 2 + 4}" text-anchor="end" fill="currentColor">'
        f"{escape(name)}</text>"
        for i, name in enumerate(data.lanes)
    ]
    for b in shown:
        first = max(b.start, low)
        last = min(b.start + b.seconds, high)
        parts.append(_bar(b, place(first), place(last) - place(first)))
    parts += [
        _fold(place(a), place(b), height - FOOT, b - a) for a, b in data.folds.gaps
    ]
    for at, text in data.marks:
        x = place(at)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - FOOT}" stroke="{BAD}" stroke-dasharray="3"/>'
        )
        parts.append(
            f'<text x="{x + 3:.1f}" y="{height - FOOT - 4}" fill="{BAD}">{escape(text)}</text>'
        )
    ends = (
        f'<line x1="{left}" x2="{WIDTH - 8}" y1="{height - FOOT}" y2="{height - FOOT}" style="stroke:{LINE}"/>'
        f'<text x="{left}" y="{height - 5}" fill="currentColor">{human_seconds(low) if low else "0"}</text>'
        f'<text x="{WIDTH - 8}" y="{height - 5}" text-anchor="end" fill="currentColor">{human_seconds(high)}</text>'
    )
    rest = len(data.bars) - len(shown)
    note = (
        f'<div style="color:{FAINT}">{rest:,} shorter bars are not drawn</div>'
        if rest
        else ""
    )
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-size="11" role="img" '
        f'style="max-width:100%" aria-label="{escape(what, quote=True)}">{"".join(parts)}{ends}</svg>{note}'
    )


def _longest(bars: Sequence[LaneBar]) -> list[LaneBar]:
    """The longest bars, in their original order."""
    if len(bars) <= MAX_STATIC:
        return list(bars)
    keep = set(sorted(range(len(bars)), key=lambda i: -bars[i].seconds)[:MAX_STATIC])
    return [b for i, b in enumerate(bars) if i in keep]


def _fold(x: float, end: float, height: float, seconds: float) -> str:
    """A gap in which nobody worked, with its true length as a tooltip and, where there is room, below it."""
    return (
        f'<rect x="{x:.1f}" y="0" width="{max(end - x, 2):.1f}" height="{height}" fill="currentColor" '
        f'fill-opacity="0.12"><title>nobody worked for {human_seconds(seconds)}</title></rect>'
        f'<text x="{(x + end) / 2:.1f}" y="{height + FOOT - 5}" text-anchor="middle" style="fill:{FAINT}">'
        f"⇥{human_seconds(seconds)}⇤</text>"
    )


def _bar(b: LaneBar, x: float, w: float) -> str:
    y = b.row * LANE + 2
    h = LANE - 4
    look = (
        'fill="currentColor" fill-opacity="0.25"' if b.hatch else f'fill="{b.colour}"'
    )
    place = f'x="{x:.2f}" y="{y}" width="{max(w, 0.8):.2f}" height="{h}"'
    rect = f"<rect {place} {look}><title>{escape(b.text)}</title></rect>"
    if b.label and len(b.label) * 6.5 + 4 < w:
        at = f'x="{x + w / 2:.1f}" y="{y + h / 2 + 4}"'
        rect += f'<text {at} text-anchor="middle" fill="{b.ink}" pointer-events="none">{escape(b.label)}</text>'
    return rect


STEPS = 12  # shown at first
# sub-lanes of an actor with overlapping rollouts; more rollouts share them
MAX_ROWS = 8
# bars of a figure; beyond that only they are drawn, without labels, pauses and lines
MAX_DETAIL = 480
HALF = 0.38  # of a lane's height of 1
CHARACTERS = 150  # that fit in the width of the figure
KINDS: dict[type[Event], str] = {
    StepEvent: "train",
    SyncEvent: "sync",
    RewardEvent: "reward",
    ScoreEvent: "score",
}
SHOWN = (RolloutEvent, PauseEvent, *KINDS)


def window_of(
    events: Sequence[Event],
    steps: int | None = None,
    start: float | None = None,
    stop: float | None = None,
) -> tuple[float, float]:
    """The time window to draw: the last steps (None: all), or from start to stop."""
    if steps is not None and steps < 1:
        raise ConfigError(
            f"steps={steps}", remedy="pass 1 or more, or None for the whole run"
        )
    times = [t for e in events for t in (e.start, e.stop) if t == t]
    low = min(times, default=0.0)
    high = max(times, default=1.0)
    if start is None and stop is None and steps is not None:
        done = sorted(e.stop for e in only(events, StepEvent))
        if len(done) > steps:
            low = done[-steps - 1]
    low = low if start is None else start
    high = high if stop is None else stop
    if high < low:
        raise ConfigError(
            f"the timeline would end at {high:g} s before it begins at {low:g} s",
            remedy="swap them",
        )
    return low, high


# The description ------------------------------------------------------------------------------------------------------


def lane_data(events: Sequence[Event], window: tuple[float, float]) -> LaneData:
    """The lanes and bars of a time window."""
    low, high = window
    shown = [
        e for e in events if isinstance(e, SHOWN) and e.stop > low and e.start < high
    ]
    row, names = _lanes(shown)
    replicas = {e.actor for e in only(shown, RolloutEvent)}
    rows = [(actor, at) for at, (actor, _) in enumerate(names) if actor in replicas]
    versions = [v for e in only(shown, RolloutEvent) for v in e.versions]
    ends = (min(versions, default=0), max(versions, default=0))
    bars = [
        bar
        for event in shown
        for bar in _bars(event, row.get(id(event), 0), ends, rows)
        # not a piece of a visible rollout, outside the window
        if bar.start <= high and bar.start + bar.seconds >= low
    ]
    marks = tuple(
        (e.start, f"{e.fault} ({e.who})" if e.who else e.fault)
        for e in events
        if isinstance(e, FaultEvent) and low <= e.start <= high
    )
    links = tuple(
        (e.stop, row[id(e)], at)
        for e in shown
        if isinstance(e, SyncEvent)
        for at in [max((at for who, at in rows if who in e.replicas), default=-1)]
        if at >= 0
    )
    kinds = {type(e) for e in shown}
    keys = tuple((name, PHASES[name]) for kind, name in KINDS.items() if kind in kinds)
    if versions:
        keys += (
            (f"generated by v{ends[0]}", hex_colour(OLDEST)),
            (f"by v{ends[1]}", hex_colour(NEWEST)),
        )
    steps = [e.step for e in only(shown, StepEvent)]
    total = len(only(events, StepEvent))
    some = 0 < len(steps) < total
    part = f", steps {min(steps)} to {max(steps)} of {total}" if some else ""
    frame = (low, high if high > low else low + 1)
    return LaneData(
        lanes=tuple(actor if not sub else "" for actor, sub in names),
        bars=tuple(bars),
        window=frame,
        marks=marks,
        title=f"{run_name(events)}: who was busy when{part}",
        keys=keys,
        folds=folds_of(shown, frame),
        links=links,
    )


def _lanes(shown: Sequence[Event]) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """The row of each event, and per row (actor, its sub-lane): the trainer first, then replicas, then the rest."""
    actors: dict[str, list[Event]] = {}
    for event in shown:
        if not isinstance(event, PauseEvent):
            actors.setdefault(event.actor, []).append(event)
    replicas = {e.actor for e in only(shown, RolloutEvent)}
    row: dict[int, int] = {}
    names: list[tuple[str, int]] = []
    for actor in sorted(
        actors, key=lambda a: (a != "trainer", a not in replicas, _natural(a))
    ):
        own = actors[actor]
        # rewards are short and many: one row is enough
        most = MAX_ROWS if actor in replicas else 1
        found = [min(x, most - 1) for x in lanes([(e.start, e.stop) for e in own])]
        row |= {id(e): len(names) + x for e, x in zip(own, found, strict=True)}
        names += [(actor, i) for i in range(max(found) + 1)]
    return row, names


def _natural(name: str) -> tuple[str, int, str]:
    head, _, tail = name.rpartition("/")
    return (head, int(tail), "") if tail.isdigit() else (name, -1, tail)


def _bars(
    event: Event,
    row: int,
    versions: tuple[int, int],
    replica_rows: Sequence[tuple[str, int]],
) -> Iterator[LaneBar]:
    """The bars of an event: one per version for a rollout, one per replica for a pause, otherwise one."""
    text = event_text(event)
    start = event.start
    match event:
        case RolloutEvent() if event.versions:
            total = sum(event.versions.values()) or 1
            for version, tokens in sorted(event.versions.items()):
                piece = event.seconds * tokens / total
                shade = version_colour(version, *versions)
                ink = "#fff" if np.mean(shade) < 0.5 else "#000"
                label = f"v{version}"
                words = f"{text} ({label})"
                yield LaneBar(row, start, piece, hex_colour(shade), words, label, ink)
                start += piece
        case StepEvent():
            label = f"step {event.step}{' ✗' * event.skipped}"
            colour = PHASES["train"]
            yield LaneBar(row, start, event.seconds, colour, text, label, "#000")
        case PauseEvent():
            for actor, at in replica_rows:
                if not event.replicas or actor in event.replicas:
                    yield LaneBar(at, start, event.seconds, NEUTRAL, text, hatch=True)
        case _:
            colour = PHASES[KINDS.get(type(event), "generate")]
            yield LaneBar(row, start, event.seconds, colour, text)


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


# The figure -----------------------------------------------------------------------------------------------------------


def timeline_figure(
    record: Record, *, steps: int | None = STEPS, **window: float | None
) -> Figure:
    """When each actor was busy, and the version of each rollout: the last `steps` steps (None: all), or start to stop.

    A rollout that spans a sync has one piece per version, as wide as the version's share of the tokens. Time in which
    nobody worked is folded, as in the interactive timeline.
    """
    events = record.events()
    data = lane_data(events, window_of(events, steps, **window))
    figure = new_figure(11, 1.6 + 0.55 * max(len(data.lanes), 2))
    ax: Any = figure.subplots()
    low, high = data.window
    width = data.folds.drawn(high) - data.folds.drawn(low)
    detail = len(data.bars) <= MAX_DETAIL
    _draw(ax, [b for b in data.bars if detail or not b.hatch], detail, width)
    for at, first, last in data.links if detail else ():
        ends = (first + HALF, last + HALF)
        ax.vlines(at, *ends, color=RED, linewidth=0.8, alpha=0.8, zorder=3)
    for at, text in data.marks:
        ax.axvline(at, color=RED, linestyle=":", linewidth=1.2)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        ax.annotate(f" {text}", (at, 0), (2, 2), fontsize=7, color=RED, **place)
    ax.set_xlim(low, high)
    ax.set_ylim(max(len(data.lanes), 1) - 0.4, -0.6)
    ax.set_yticks(range(len(data.lanes)), data.lanes, fontsize=9)
    ax.set_xlabel("time since the run began (s)", fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_title(data.title, fontsize=10, loc="left", pad=24)
    _legend(ax, data, detail)
    if data.folds.gaps:
        _fold_axis(ax, data, width)
    return figure


def _draw(ax: Axes, bars: Sequence[LaneBar], detail: bool, width: float) -> None:
    """Draws all bars in two collections: thousands of single patches would take seconds."""
    from matplotlib.collections import PolyCollection

    for paused in (False, True):
        own = [bar for bar in bars if bar.hatch == paused]
        collection = PolyCollection(
            [_corners(bar) for bar in own],
            facecolors="none" if paused else [bar.colour for bar in own],
            hatch="////" if paused else None,
            edgecolors=NEUTRAL if paused else "white",
            linewidths=0.4 if detail and not paused else 0.0,
            zorder=3 if paused else 2,
        )
        ax.add_collection(collection)
    middle: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
    for bar in bars if detail else ():
        # the whole label, or its number alone, or nothing: what fits
        for text in (bar.label, bar.label.removeprefix("step ")):
            if text and bar.seconds > width * (len(text) + 1) / CHARACTERS:
                at = bar.start + bar.seconds / 2
                ink = {"color": bar.ink, "fontsize": 7, "zorder": 4}
                ax.text(at, bar.row, text, **ink, **middle)
                break


def _corners(bar: LaneBar) -> list[tuple[float, float]]:
    left = bar.start
    right = bar.start + bar.seconds
    top = bar.row - HALF
    bottom = bar.row + HALF
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _legend(ax: Axes, data: LaneData, detail: bool) -> None:
    from matplotlib.patches import Patch

    if not data.keys:
        blank(ax, EMPTY)
        return
    handles = [Patch(color=colour, label=name) for name, colour in data.keys]
    if detail and any(bar.hatch for bar in data.bars):
        striped: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": NEUTRAL,
            "hatch": "////",
        }
        handles.append(Patch(label="paused", linewidth=0, **striped))
    ax.legend(
        handles=handles,
        fontsize=8,
        frameon=False,
        ncols=len(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.2,
    )


def _fold_axis(ax: Axes, data: LaneData, width: float) -> None:
    """Draw time as folded: a grey strip for each gap, its true length in it where it fits; no tick is inside one."""
    from matplotlib.ticker import MaxNLocator

    folds = data.folds
    low, high = data.window
    ax.set_xscale("function", functions=(folds.drawn, folds.time))
    ax.set_xlim(low, high)
    over: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "color": NEUTRAL}
    for start, stop in folds.gaps:
        ax.axvspan(start, stop, facecolor=NEUTRAL, alpha=0.18, linewidth=0, zorder=1)
        ax.vlines((start, stop), 0, 1, linewidth=0.6, linestyle="--", **over)
        if folds.seconds > width / CHARACTERS:
            text = human_seconds(stop - start)
            look = {"rotation": 90, "fontsize": 7, "ha": "center", "va": "center"}
            ax.text((start + stop) / 2, 0.5, text, clip_on=True, **look, **over)
    edges = [low, *(t for gap in folds.gaps for t in gap), high]
    step = float(np.diff(MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(0, width))[0])
    ticks: list[float] = []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):  # between folds
        for tick in np.arange(np.ceil(start / step), np.floor(stop / step) + 1) * step:
            if not ticks or folds.drawn(tick) - folds.drawn(ticks[-1]) > 0.6 * step:
                ticks.append(float(tick))
    ax.set_xticks(ticks, [f"{tick:.10g}" for tick in ticks])
    ax.set_xlabel(
        "time since the run began (s); in grey strips nobody worked", fontsize=9
    )


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

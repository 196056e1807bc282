"""The timeline of a run: a lane per actor, rollouts coloured by the version that generated them, syncs as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab._units import human_seconds
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
from jvlab.record._metrics import lanes
from jvlab.views._figures import new_figure
from jvlab.views._lanes_view import Folds, folds_of
from jvlab.views._palette import NEWEST, OLDEST, PHASES
from jvlab.views._record_plots import EMPTY, INK, RED, run_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jvlab.record._record import Record

# sub-lanes of an actor with overlapping rollouts; more rollouts share them
MAX_ROWS = 8
# events; beyond that only bars are drawn, without labels, pauses and lines
MAX_DETAIL = 480
HALF = 0.38  # of a lane's height of 1
CHARACTERS = 150  # that fit in the width of the figure
SHOWN = (RolloutEvent, ScoreEvent, RewardEvent, StepEvent, SyncEvent, PauseEvent)


@dataclass(frozen=True)
class Bar:
    """A rectangle in a lane; the first of its labels that fits is written into it."""

    row: int
    start: float
    seconds: float
    colour: Any
    labels: tuple[str, ...] = ()
    ink: str = "white"
    hatch: str = ""


def timeline_figure(
    record: Record,
    *,
    steps: int | None = 12,
    start: float | None = None,
    stop: float | None = None,
) -> Figure:
    """When each actor was busy, and the version of each rollout: the last `steps` steps (None: all), or start to stop.

    A rollout that spans a sync has one piece per version, as wide as the version's share of the tokens. Time in which
    nobody worked is folded, as in the interactive timeline.
    """
    if steps is not None and steps < 1:
        raise ConfigError(
            f"steps={steps}", remedy="pass 1 or more, or None for the whole run"
        )
    events = record.events()
    low, high = _window(events, steps, start, stop)
    shown = [
        e for e in events if isinstance(e, SHOWN) and e.stop > low and e.start < high
    ]
    lane, names = _lanes(shown)
    figure = new_figure(11, 1.6 + 0.55 * max(len(names), 2))
    axes: Any = figure.subplots()
    scale = _versions(shown)
    replicas = {e.actor for e in shown if isinstance(e, RolloutEvent)}
    rows = [(actor, at) for at, (actor, _) in enumerate(names) if actor in replicas]
    detail = len(shown) <= MAX_DETAIL
    drawn = [e for e in shown if detail or not isinstance(e, PauseEvent)]
    folds = folds_of(shown, (low, high))
    width = folds.drawn(high) - folds.drawn(low)
    _draw(
        axes,
        [b for e in drawn for b in _bars(e, lane.get(id(e), 0), scale, rows)],
        detail,
        width,
    )
    if detail:
        _connect(
            axes, [(e, lane[id(e)]) for e in shown if isinstance(e, SyncEvent)], rows
        )
    faults = [e for e in events if isinstance(e, FaultEvent) and low <= e.start <= high]
    for fault in faults:
        axes.axvline(fault.start, color=RED, linestyle=":", linewidth=1.2)
        who = f" ({fault.who})" if fault.who else ""
        axes.annotate(
            f" {fault.fault}{who}",
            (fault.start, 0),
            (2, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=7,
            color=RED,
        )
    _finish(figure, axes, events, shown, names, (low, high), scale)
    if folds.gaps:
        _fold(axes, folds, (low, high), width)
    return figure


def _window(
    events: Sequence[Event], steps: int | None, start: float | None, stop: float | None
) -> tuple[float, float]:
    """The time window to draw."""
    times = [t for e in events for t in (e.start, e.stop) if t == t]
    low = min(times, default=0.0)
    high = max(times, default=1.0)
    if start is None and stop is None and steps is not None:
        done = sorted(e.stop for e in events if isinstance(e, StepEvent))
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


def _lanes(shown: Sequence[Event]) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """The row of each event, and per row (actor, its sub-lane): the trainer first, then replicas, then the rest."""
    actors: dict[str, list[Event]] = {}
    for event in shown:
        if not isinstance(event, PauseEvent):
            actors.setdefault(event.actor, []).append(event)
    replicas = {e.actor for e in shown if isinstance(e, RolloutEvent)}
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


def _versions(shown: Sequence[Event]) -> Any:
    """Version → colour, light to dark; None if no rollout has a version."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    found = [v for e in shown if isinstance(e, RolloutEvent) for v in e.versions]
    if not found:
        return None
    low = min(found)
    high = max(found)
    shades = LinearSegmentedColormap.from_list("versions", [OLDEST, NEWEST])
    return ScalarMappable(Normalize(low, high if high > low else low + 1), shades)


def _bars(
    event: Event, row: int, scale: Any, replica_rows: Sequence[tuple[str, int]]
) -> Iterator[Bar]:
    """The bars of an event: one per version for a rollout, one per replica for a pause, otherwise one."""
    match event:
        case RolloutEvent() if event.versions and scale is not None:
            total = sum(event.versions.values()) or 1
            at = event.start
            for version, tokens in sorted(event.versions.items()):
                piece = event.seconds * tokens / total
                colour = scale.to_rgba(version)
                ink = "white" if np.mean(colour[:3]) < 0.5 else "black"
                yield Bar(row, at, piece, colour, (f"v{version}",), ink)
                at += piece
        case StepEvent():
            hatch = "xxxx" if event.skipped else ""
            yield Bar(
                row,
                event.start,
                event.seconds,
                PHASES["train"],
                (f"step {event.step}", str(event.step)),
                "black",
                hatch=hatch,
            )
        case PauseEvent():
            for actor, at in replica_rows:
                if not event.replicas or actor in event.replicas:
                    yield Bar(at, event.start, event.seconds, "none", hatch="////")
        case _:
            kinds = {
                RolloutEvent: "generate",
                ScoreEvent: "score",
                RewardEvent: "reward",
                SyncEvent: "sync",
            }
            yield Bar(row, event.start, event.seconds, PHASES[kinds[type(event)]])


def _draw(ax: Axes, bars: Sequence[Bar], detail: bool, width: float) -> None:
    """Draws all bars in few collections: thousands of single patches would take seconds."""
    from matplotlib.collections import PolyCollection

    for hatch in sorted({bar.hatch for bar in bars}):
        own = [bar for bar in bars if bar.hatch == hatch]
        paused = hatch == "////"
        collection = PolyCollection(
            [_corners(bar) for bar in own],
            facecolors=[bar.colour for bar in own],
            hatch=hatch or None,
            edgecolors=INK if paused else "white",
            linewidths=0.4 if detail and not paused else 0.0,
            zorder=3 if paused else 2,
        )
        ax.add_collection(collection)
    for bar in bars if detail else ():
        fitting = (
            text
            for text in bar.labels
            if bar.seconds > width * (len(text) + 1) / CHARACTERS
        )
        if text := next(fitting, ""):
            at = (bar.start + bar.seconds / 2, bar.row)
            ax.text(
                *at,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color=bar.ink,
                clip_on=True,
                zorder=4,
            )


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left = bar.start
    right = bar.start + bar.seconds
    top = bar.row - HALF
    bottom = bar.row + HALF
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _connect(
    ax: Axes, syncs: Sequence[tuple[SyncEvent, int]], rows: Sequence[tuple[str, int]]
) -> None:
    """A line from each sync of the trainer down to the replicas it reached."""
    for sync, row in syncs:
        reached = [at for actor, at in rows if actor in sync.replicas]
        if reached:
            ax.vlines(
                sync.stop,
                row + HALF,
                max(reached) + HALF,
                color=RED,
                linewidth=0.8,
                alpha=0.8,
                zorder=3,
            )


def _fold(ax: Axes, folds: Folds, window: tuple[float, float], width: float) -> None:
    """Draw time as folded: a grey strip for each gap, its true length in it where it fits; no tick is inside one."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xscale("function", functions=(folds.drawn, folds.time))
    ax.set_xlim(window)
    for start, stop in folds.gaps:
        ax.axvspan(start, stop, facecolor=INK, alpha=0.18, linewidth=0, zorder=1)
        ax.vlines(
            (start, stop),
            0,
            1,
            transform=ax.get_xaxis_transform(),
            color=INK,
            linewidth=0.6,
            linestyle="--",
        )
        if folds.seconds > width / CHARACTERS:
            at = ((start + stop) / 2, 0.5)
            text = human_seconds(stop - start)
            ax.text(
                *at,
                text,
                transform=ax.get_xaxis_transform(),
                rotation=90,
                fontsize=7,
                color=INK,
                ha="center",
                va="center",
                clip_on=True,
            )
    edges = [window[0], *(t for gap in folds.gaps for t in gap), window[1]]
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


def _finish(
    figure: Figure,
    ax: Axes,
    events: Sequence[Event],
    shown: Sequence[Event],
    names: Sequence[tuple[str, int]],
    window: tuple[float, float],
    scale: Any,
) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    low, high = window
    ax.set_xlim(low, high if high > low else low + 1)
    ax.set_ylim(max(len(names), 1) - 0.4, -0.6)
    ax.set_yticks(
        range(len(names)),
        [actor if not sub else "" for actor, sub in names],
        fontsize=9,
    )
    ax.set_xlabel("time since the run began (s)", fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    steps = [e.step for e in shown if isinstance(e, StepEvent)]
    total = sum(isinstance(e, StepEvent) for e in events)
    part = (
        f", steps {min(steps)} to {max(steps)} of {total}"
        if 0 < len(steps) < total
        else ""
    )
    ax.set_title(
        f"{run_name(events)}: who was busy when{part}", fontsize=10, loc="left", pad=24
    )
    known = (
        (StepEvent, "train"),
        (SyncEvent, "sync"),
        (RewardEvent, "reward"),
        (ScoreEvent, "score"),
    )
    keys: list[Any] = [
        Patch(color=PHASES[name], label=name)
        for kind, name in known
        if any(isinstance(e, kind) for e in shown)
    ]
    if len(shown) <= MAX_DETAIL and any(isinstance(e, PauseEvent) for e in shown):
        keys.append(
            Patch(
                facecolor="none",
                edgecolor=INK,
                hatch="////",
                linewidth=0,
                label="paused",
            )
        )
    if keys:
        ax.legend(
            handles=keys,
            fontsize=8,
            frameon=False,
            ncols=len(keys),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.2,
        )
    else:
        ax.text(
            0.5,
            0.5,
            EMPTY,
            transform=ax.transAxes,
            ha="center",
            va="center",
            color="#777777",
        )
        ax.set_xticks([])
    if (
        scale is not None
        and len({v for e in shown if isinstance(e, RolloutEvent) for v in e.versions})
        > 1
    ):
        bar = figure.colorbar(scale, ax=ax, pad=0.01, aspect=12)
        bar.set_label("generated by version", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))

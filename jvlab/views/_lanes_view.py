"""Swim lanes as data for the browser (static/lanes.js) and as static SVG; time in which nobody worked is folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any

import numpy as np

from jvlab._units import human_seconds
from jvlab.record._events import Event, PauseEvent, StepEvent, only
from jvlab.record._metrics import union
from jvlab.views._style import BAD, FAINT, LINE

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

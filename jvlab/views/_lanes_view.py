"""Swim lanes as data for the browser (static/lanes.js) and as static inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from jvlab._units import human_seconds
from jvlab.views._style import BAD, FAINT, LINE

LANE, LEFT, FOOT, WIDTH = 22, 92, 20, 860
MAX_STATIC = 600  # bars in the SVG, to keep saved notebooks small


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

    def plain(self) -> dict[str, Any]:
        """As plain columns, for the browser."""
        names = ("row", "start", "seconds", "colour", "text", "label", "ink", "hatch", "link")
        return {
            "lanes": list(self.lanes),
            "bars": {name: [getattr(b, name) for b in self.bars] for name in names},
            "window": list(self.window),
            "marks": [{"at": at, "text": text} for at, text in self.marks],
            "title": self.title,
            "keys": [list(k) for k in self.keys],
        }


def lanes_svg(data: LaneData, what: str) -> str:
    """The lanes without zoom."""
    low, high = data.window
    scale = (WIDTH - LEFT - 8) / ((high - low) or 1.0)
    height = max(len(data.lanes), 1) * LANE + FOOT
    shown = _longest(data.bars)
    parts = [
        f'<text x="{LEFT - 8}" y="{i * LANE + LANE / 2 + 4}" text-anchor="end" fill="currentColor">'
        f"{escape(name)}</text>"
        for i, name in enumerate(data.lanes)
    ]
    for b in shown:
        first, last = max(b.start, low), min(b.start + b.seconds, high)
        parts.append(_bar(b, LEFT + (first - low) * scale, (last - first) * scale))
    for at, text in data.marks:
        x = LEFT + (at - low) * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - FOOT}" stroke="{BAD}" stroke-dasharray="3"/>'
        )
        parts.append(f'<text x="{x + 3:.1f}" y="{height - FOOT - 4}" fill="{BAD}">{escape(text)}</text>')
    ends = (
        f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{height - FOOT}" y2="{height - FOOT}" style="stroke:{LINE}"/>'
        f'<text x="{LEFT}" y="{height - 5}" fill="currentColor">{human_seconds(low) if low else "0"}</text>'
        f'<text x="{WIDTH - 8}" y="{height - 5}" text-anchor="end" fill="currentColor">{human_seconds(high)}</text>'
    )
    left = len(data.bars) - len(shown)
    note = f'<div style="color:{FAINT}">{left:,} shorter bars are not drawn</div>' if left else ""
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


def _bar(b: LaneBar, x: float, w: float) -> str:
    y, h = b.row * LANE + 2, LANE - 4
    look = 'fill="currentColor" fill-opacity="0.25"' if b.hatch else f'fill="{b.colour}"'
    place = f'x="{x:.2f}" y="{y}" width="{max(w, 0.8):.2f}" height="{h}"'
    rect = f"<rect {place} {look}><title>{escape(b.text)}</title></rect>"
    if b.label and len(b.label) * 6.5 + 4 < w:
        at = f'x="{x + w / 2:.1f}" y="{y + h / 2 + 4}"'
        rect += f'<text {at} text-anchor="middle" fill="{b.ink}" pointer-events="none">{escape(b.label)}</text>'
    return rect

"""The charts of a run: which ones, in which order and colour, for the dashboard's canvas and as static SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from jvlab._units import human_seconds
from jvlab.record._run_feed import COLUMNS, RunFeed
from jvlab.views._palette import PHASES
from jvlab.views._style import BAD, CELL, FAINT, LINE, bar

POINTS = 60  # of a static curve, to keep saved notebooks small
WIDE, TALL = 200, 56  # of a static chart's own units; its width is the page's


@dataclass(frozen=True)
class Chart:
    """One chart: a column of the feed (or "evaluation") over steps, in the colour of the phase it tells about."""

    title: str
    column: str
    phase: str
    form: str  # of its numbers
    log: bool = False
    zero: bool = False  # the scale begins at 0
    always: bool = False  # shown even while nothing of it is known
    spread: str = ""  # a column: drawn as a band around it


# Rewards in the colour of rewards, what engines do in that of generation, what the trainer does in that of training.
CHARTS = (
    Chart("reward", "reward", "reward", ".3f", always=True, spread="reward_std"),
    Chart("held-out reward", "evaluation", "reward", ".3f"),
    Chart("loss", "loss", "train", ".3g"),
    Chart("entropy", "entropy", "train", ".3f", zero=True),
    Chart("KL to the reference", "kl", "train", ".3g", zero=True),
    Chart("clipped tokens", "clip", "train", ".1%", zero=True),
    Chart("logprob gap", "gap", "score", ".1e", log=True, always=True),
    Chart("response length", "length", "generate", ".0f", zero=True),
    Chart("tokens/s over 5 steps", "tokens_per_s", "generate", ",.0f", zero=True, always=True),
    Chart("seconds per step", "seconds", "train", ".2f", zero=True),
    Chart("staleness, mean", "stale_mean", "sync", ".2f", zero=True, always=True),
)


def charts() -> list[dict[str, Any]]:
    """The charts as plain values, for the page."""
    return [asdict(chart) | {"colour": PHASES[chart.phase]} for chart in CHARTS]


def charts_html(feed: RunFeed) -> str:
    """The same charts as SVG, with the staleness of tokens and the time of each phase."""
    parts = [*_curves(feed), _histogram(feed.histogram), _split(feed.split())]
    grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:8px 24px;margin:6px 0"
    return f'<div style="{grid}">{"".join(parts)}</div>'


def _curves(feed: RunFeed) -> Iterator[str]:
    for chart in CHARTS:
        if chart.column == "evaluation":
            points = np.array(feed.evaluations, np.float64).reshape(-1, 2)
        else:
            points = feed.rows[:, [0, COLUMNS.index(chart.column)]].astype(np.float64)
        band = feed.rows[:, COLUMNS.index(chart.spread)].astype(np.float64) if chart.spread else None
        yield _curve(chart, points, band, feed.alarm if chart.column == "gap" else math.inf)


def _curve(chart: Chart, points: np.ndarray, band: np.ndarray | None, alarm: float) -> str:
    good = np.isfinite(points[:, 1])
    points = points[good]
    if not len(points):
        return ""
    spread = np.nan_to_num(band[good]) if band is not None else np.zeros(len(points))
    over = bool((points[:, 1] > alarm).any())
    last = f"{format(float(points[-1, 1]), chart.form)}{', was over the alarm' if over else ''}"
    if len(points) > POINTS:  # means of equal parts
        parts = np.array_split(np.arange(len(points)), POINTS)
        points = np.stack([points[part].mean(axis=0) for part in parts])
        spread = np.array([spread[part].mean() for part in parts])
    drawn = _drawing(chart, points, spread, BAD if over else PHASES[chart.phase])
    colour = f";color:{BAD}" if over else ""
    return (
        f'<div style="min-width:0"><span style="color:{FAINT}">{escape(chart.title)}</span> '
        f'<b style="white-space:nowrap{colour}">{last}</b>{drawn}</div>'
    )


def _drawing(chart: Chart, points: np.ndarray, spread: np.ndarray, colour: str) -> str:
    scale = (lambda v: np.log10(np.maximum(v, 1e-12))) if chart.log else (lambda v: v)
    x, y = points[:, 0], scale(points[:, 1])
    low, high = scale(points[:, 1] - spread), scale(points[:, 1] + spread)
    bottom, top = float(low.min()), float(high.max())
    bottom = min(bottom, 0.0) if chart.zero else bottom
    reach, width = (top - bottom) or 1.0, float(x[-1] - x[0]) or 1.0
    px = lambda at: 1 + (at - x[0]) / width * (WIDE - 2)
    py = lambda value: TALL - 1 - (value - bottom) / reach * (TALL - 2)
    pairs = lambda values: [f"{a:.0f},{b:.1f}" for a, b in zip(px(x), py(values), strict=True)]
    filled = ""
    if spread.any():
        edge = " L".join([*pairs(high), *reversed(pairs(low))])
        filled = f'<path d="M{edge}Z" fill="{colour}" fill-opacity="0.15"/>'
    line = pairs(y) if len(x) > 1 else [f"1,{float(py(y)[0]):.1f}", f"{WIDE - 1},{float(py(y)[0]):.1f}"]
    return (
        f'<svg width="100%" height="{TALL}" viewBox="0 0 {WIDE} {TALL}" preserveAspectRatio="none" role="img" '
        f'style="display:block;border-bottom:1px solid {LINE}">{filled}<polyline points="{" ".join(line)}" fill="none" '
        f'stroke="{colour}" stroke-width="1.5" vector-effect="non-scaling-stroke"/></svg>'
    )


def _histogram(histogram: Any) -> str:
    total = sum(histogram.values())
    if not total:
        return ""
    rows = "".join(
        f'<tr><td style="{CELL}">{age}</td><td>{bar(n / total, PHASES["sync"], "7em")}</td>'
        f'<td style="{CELL}">&nbsp;{n / total:.0%}</td></tr>'
        for age, n in sorted(histogram.items())
    )
    title = f'<span style="color:{FAINT}">staleness of tokens</span>'
    return f'<div style="min-width:0">{title}<table style="border-collapse:collapse">{rows}</table></div>'


def _split(split: dict[str, float]) -> str:
    total = sum(split.values())
    if not total:
        return ""
    bars = "".join(
        f'<div title="{name}" style="width:{100 * s / total:.1f}%;background:{PHASES[name]}"></div>'
        for name, s in split.items()
    )
    words = "".join(
        f'<span style="white-space:nowrap;margin-right:10px"><span style="color:{PHASES[name]}">■</span> {name} '
        f"{human_seconds(s)}</span>"
        for name, s in split.items()
    )
    title = f'<span style="color:{FAINT}">time of a step</span>'
    return f'<div style="min-width:0">{title}<div style="display:flex;height:8px">{bars}</div><div>{words}</div></div>'


def known_columns(rows: np.ndarray, evaluations: Sequence[Any]) -> list[str]:
    """The columns that have a value, for a page that has no room for empty charts."""
    found = [name for i, name in enumerate(COLUMNS) if np.isfinite(rows[:, i]).any()] if len(rows) else []
    return [*found, "evaluation"] if evaluations else found

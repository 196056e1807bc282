"""A `Run` as one line, and as a card with its curves."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import JvlabError
from jvlab._units import human_seconds
from jvlab.views._run_feed import COLUMNS, RunFeed
from jvlab.views._style import BAD, BOX, CELL, FAINT, GOOD, IDLE, PALETTE, WAIT, bar, dot, sparkline

if TYPE_CHECKING:
    from jvlab.trainer._run import Run, RunStatus

_COLOURS = {"running": GOOD, "finished": GOOD, "failed": BAD, "stopped": IDLE}
POINTS = 120  # of a static curve
PHASE_COLOURS = {
    "generate": PALETTE[0],
    "train": PALETTE[1],
    "sync": PALETTE[2],
    "reward": PALETTE[3],
    "score": PALETTE[4],
    "idle": PALETTE[7],
}


def run_line(name: str, status: RunStatus) -> str:
    """One line, without anything that depends on the machine."""
    reward = f", reward {status.reward:.3f}" if status.reward == status.reward else ""
    bound = "on-policy" if not status.max_staleness else f"staleness ≤ {status.max_staleness}"
    why = f": {status.error.splitlines()[0]}" if status.error else ""
    return f"Run({name!r}, {status.state}, step {status.step}/{status.steps}{reward}, {bound}{why})"


def head_html(name: str, status: RunStatus, alarm: float = math.inf) -> str:
    """Title, progress bar and numbers."""
    number = lambda value, form: "–" if value != value else format(value, form)
    gap = number(status.logprob_gap, ".2e")
    if status.logprob_gap > alarm:
        gap = f'<b style="color:{BAD}">{gap}, over the alarm at {alarm:.1e}</b>'
    rows = {
        "step": f"{status.step} of {status.steps}, version {status.version}",
        "reward": number(status.reward, ".3f"),
        "largest logprob gap": gap,
        "effective samples": number(status.effective_samples, ".1%"),
        "masked": number(status.masked_fraction, ".1%"),
        "staleness": f"at most {status.max_staleness}; {status.dropped} dropped, {status.regenerated} made again",
        "groups": f"{status.flying} being made, {status.ready} ready, {status.lost} of no use",
    }
    cells = "".join(
        f'<span style="white-space:nowrap"><span style="color:{FAINT}">{k}</span> {v}</span>' for k, v in rows.items()
    )
    if status.error:
        cells += f'<div style="color:{BAD};white-space:pre-wrap;width:100%">{escape(status.error)}</div>'
    colour = _COLOURS.get(status.state, WAIT)
    title = f"{dot(colour)} <b>{escape(name)}</b> {escape(status.state)}"
    progress = bar(status.step / max(status.steps, 1), width="100%")
    facts = f'<div style="display:flex;flex-wrap:wrap;gap:0 20px">{cells}</div>'
    return f'<div style="{BOX};max-width:900px">{title}{progress}{facts}</div>'


def run_html(name: str, status: RunStatus, feed: RunFeed | None = None) -> str:
    """The static card; with a feed also its curves, the staleness of its tokens and time per phase."""
    head = head_html(name, status, feed.alarm if feed else math.inf)
    return f'<div style="{BOX}">{head}{curves_html(feed) if feed is not None and len(feed.rows) else ""}</div>'


def curves_html(feed: RunFeed) -> str:
    column = lambda name: feed.rows[:, COLUMNS.index(name)]
    over = np.nanmax(np.nan_to_num(column("gap"))) > feed.alarm
    parts = [
        _curve("reward", column("reward"), PALETTE[0], ".3f"),
        _curve("logprob gap", column("gap"), BAD if over else PALETTE[2], ".1e"),
        _curve("tokens/s", column("tokens_per_s"), PALETTE[3], ".0f"),
        _histogram(feed.histogram),
    ]
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 24px">{"".join(parts)}</div>{_split(feed.split())}'


def _curve(title: str, values: np.ndarray, colour: str, form: str) -> str:
    good = values[np.isfinite(values)]
    if not len(good):
        return ""
    if len(good) > POINTS:  # means of equal parts, to keep saved notebooks small
        good = np.array([part.mean() for part in np.array_split(good, POINTS)])
    drawn = sparkline(good.tolist(), 180, 44, colour)
    last = format(float(good[-1]), form)
    return f'<div><span style="color:{FAINT}">{escape(title)}</span> <b>{last}</b><br>{drawn}</div>'


def _histogram(histogram: Any) -> str:
    total = sum(histogram.values())
    if not total:
        return ""
    rows = "".join(
        f'<tr><td style="{CELL}">{age}</td><td>{bar(n / total, PALETTE[1], "8em")}</td>'
        f'<td style="{CELL}">&nbsp;{n / total:.0%}</td></tr>'
        for age, n in sorted(histogram.items())
    )
    title = f'<span style="color:{FAINT}">staleness of tokens</span>'
    return f'<div>{title}<table style="border-collapse:collapse">{rows}</table></div>'


def _split(split: dict[str, float]) -> str:
    total = sum(split.values())
    if not total:
        return ""
    bars = "".join(
        f'<div title="{name}" style="width:{100 * s / total:.1f}%;background:{PHASE_COLOURS[name]}"></div>'
        for name, s in split.items()
    )
    words = " &nbsp; ".join(
        f'<span style="color:{PHASE_COLOURS[name]}">■</span> {name} {human_seconds(s)}' for name, s in split.items()
    )
    return (
        f'<div><span style="color:{FAINT}">seconds per step</span><div style="display:flex;height:8px;max-width:40em">'
        f"{bars}</div><div>{words}</div></div>"
    )


def card(run: Run) -> str:
    """The card of a run, from its record."""
    try:
        feed = RunFeed(run.record)
        feed.read()
    except JvlabError:  # nothing recorded yet
        return run_html(run.name, run.status)
    return run_html(run.name, run.status, feed)

"""Histograms of a tensor in engine and trainer, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from jvlab.views._style import BAD, BOX, FAINT, GOOD, LINE, PALETTE, dot

if TYPE_CHECKING:
    from jvlab.sync._values import Values

WIDTH, HEIGHT = 250, 70
ENGINE, TRAINER, CHANGE = PALETTE[1], PALETTE[0], PALETTE[3]
MAX_SHOWN = 8  # ranks


def values_html(found: Sequence[Values]) -> str:
    """One line of three histograms per rank: engine, trainer, difference."""
    rows = "".join(_one(v) for v in found[:MAX_SHOWN])
    more = len(found) - MAX_SHOWN
    note = f'<div style="color:{FAINT}">{more} more ranks</div>' if more > 0 else ""
    return f'<div style="{BOX}">{rows}{note}</div>'


def _one(v: Values) -> str:
    s = v.change_summary
    if v.equal:
        verdict = f"{dot(GOOD)} equal, bit for bit"
    else:
        verdict = (
            f"{dot(BAD)} {s.share_changed:.1%} of the values differ, by at most {s.max_change:.3g}; "
            f"‖Δ‖ {s.norm_change:.3g} of ‖engine‖ {s.norm_now:.3g}"
        )
    nonfinite = f"; {v.not_finite:,} are not finite" if v.not_finite else ""
    title = f"<b>{escape(v.parameter)}</b> {list(s.shape)} on rank {v.rank}: {verdict}{nonfinite}"
    parts = (
        _bars("engine holds", v.edges, v.engine, ENGINE, max(v.engine.max(initial=1), v.trainer.max(initial=1))),
        _bars("trainer has", v.edges, v.trainer, TRAINER, max(v.engine.max(initial=1), v.trainer.max(initial=1))),
        _bars("trainer − engine", v.change_edges, v.change, CHANGE, v.change.max(initial=1)),
    )
    row = f'<div style="display:flex;flex-wrap:wrap;gap:18px">{"".join(parts)}</div>'
    return f'<div style="margin:6px 0">{title}{row}</div>'


def _bars(title: str, edges: np.ndarray, counts: np.ndarray, colour: str, top: float) -> str:
    step = WIDTH / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{i * step:.2f}" y="{HEIGHT - n / top * HEIGHT:.2f}" width="{max(step - 0.6, 0.6):.2f}" '
        f'height="{n / top * HEIGHT:.2f}" fill="{colour}">'
        f"<title>{edges[i]:.4g} to {edges[i + 1]:.4g}: {n:,}</title></rect>"
        for i, n in enumerate(counts.tolist())
        if n
    )
    ends = (
        f'<text x="0" y="{HEIGHT + 13}" fill="currentColor">{edges[0]:.3g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 13}" fill="currentColor" text-anchor="end">{edges[-1]:.3g}</text>'
    )
    line = f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}" style="stroke:{LINE}"/>'
    svg = (
        f'<svg width="{WIDTH}" height="{HEIGHT + 16}" font-size="10" role="img" aria-label="{title}">'
        f"{line}{bars}{ends}</svg>"
    )
    return f'<div><div style="color:{FAINT}">{title}</div>{svg}</div>'

"""A `Bisection` as HTML: the verdict, the checks in order, tensors that differ, the gap along the tokens."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from jvlab.record._token_pieces import visible
from jvlab.views._style import (
    BAD,
    BOX,
    FAINT,
    GOOD,
    IDLE,
    LINE,
    MONO,
    PALETTE,
    dot,
    sparkline,
    table,
)

if TYPE_CHECKING:
    from jvlab.sync.diagnose._bisect import Bisection

STATES = {
    "ok": (GOOD, "ruled out"),
    "cause": (BAD, "the cause"),
    "skipped": (IDLE, "not asked"),
}
POINTS = 120  # of the gap's curve, to keep saved notebooks small


def bisection_html(found: Bisection) -> str:
    """The verdict, then the evidence."""
    colour = GOOD if found.agrees else BAD
    title = f"<b>{escape(found.cause or 'agree')}</b>: {escape(visible(found.verdict))}"
    remedy = (
        f'<div>→ <code style="font-family:{MONO}">{escape(found.remedy)}</code></div>'
        if found.remedy
        else ""
    )
    head = f'<div style="border-left:3px solid {colour};padding:2px 10px;margin:2px 0 6px">{title}{remedy}</div>'
    wrap = lambda text: (
        f'<div style="white-space:normal;max-width:60em">{escape(visible(text))}</div>'
    )
    rows = []
    for check in found.checks:
        shade, word = STATES[check.state]
        rows.append([f"{dot(shade)} {word}", escape(check.name), wrap(check.evidence)])
    checks = table(("", "check", "evidence"), rows)
    return f'<div style="{BOX}">{head}{checks}{_rule(found)}{_tensors(found)}{_curve(found)}</div>'


def _rule(found: Bisection) -> str:
    """The current rule, and the one to write instead."""
    facts = next(
        (c.facts for c in found.checks if c.name == "rule" and c.state == "cause"), {}
    )
    code = lambda text: (
        f'<code style="font-family:{MONO}">{escape(visible(text))}</code>'
    )
    rows = [
        [word, code(text)]
        for word, key in (("now", "now"), ("write", "write"))
        for text in facts.get(key, ())
    ]
    return table(("", "rule"), rows) if rows else ""


def _tensors(found: Bisection) -> str:
    if not found.tensors:
        return ""
    rows = [
        [
            f'<code style="font-family:{MONO}">{escape(t.parameter)}</code>',
            str(t.rank),
            escape(str(list(t.shape))),
            f"{t.share_changed:.1%}",
            f"{t.max_change:.3g}",
            f"{t.norm_change:.3g}",
            f"{t.norm_now:.3g}",
        ]
        for t in found.tensors
    ]
    heads = (
        "parameter",
        "rank",
        "shape",
        "elements that differ",
        "largest",
        "‖difference‖",
        "‖engine‖",
    )
    line = f'<div style="border-top:1px solid {LINE};margin:6px 0 2px;color:{FAINT}">engine against trainer</div>'
    return line + table(heads, rows, numbers=(1, 3, 4, 5, 6))


def _curve(found: Bisection) -> str:
    """|engine − trainer| along the tokens."""
    if found.engine is None or found.trainer is None or found.gap is None:
        return ""
    apart = np.nan_to_num(np.abs(found.engine - found.trainer))[1:]
    step = max(1, -(-len(apart) // POINTS))
    peaks = [float(apart[i : i + step].max()) for i in range(0, len(apart), step)]
    text = f"|engine − trainer| along {len(found.tokens)} tokens, at most {found.gap:.2g} nats"
    curve = sparkline(peaks, 240, 24, PALETTE[0])
    return f'<div style="margin-top:6px">{curve} <span style="color:{FAINT}">{text}</span></div>'

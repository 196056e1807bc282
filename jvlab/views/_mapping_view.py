"""A mapping as text, as an HTML table with a filter box, as a drawing of one tensor, and as a matplotlib figure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab._units import human_bytes
from jvlab.views._drawing import Drawing, Rect, colour, draw, ink
from jvlab.views._figures import new_figure
from jvlab.views._mapping_search import dtype_text
from jvlab.views._style import BAD, GOOD, IDLE, PALETTE, WAIT, headlines

if TYPE_CHECKING:
    from jvlab.sync._explanation import Explanation
    from jvlab.sync._mapping import Mapping
    from jvlab.sync._mapping_row import MappingRow

MAX_ROWS = 50  # in the static table, under 60 kB with long names; `mapping.rows` and `.search` have them all
HEADS = ("JAX leaf", "checkpoint tensor", "vLLM parameter", "rank", "dtype", "bytes", "status", "rule")
CELL = "padding:2px 10px 2px 0;text-align:left;white-space:nowrap"
SPECIAL = ("quantised", "staged", "opaque", "unused")  # statuses worth a number of their own
DOTS = {"direct": GOOD, "cast": PALETTE[4], "quantised": PALETTE[4], "staged": WAIT, "opaque": WAIT}
DOTS |= {"unused": IDLE, "problem": BAD}
# Filters the rows of the table next to it. Without double quotes, since it is an attribute's value.
FILTER = (
    "const q=this.value.toLowerCase();for(const r of this.parentElement.querySelectorAll('tbody tr'))"
    "r.style.display=r.textContent.toLowerCase().includes(q)?'':'none'"
)


def summary_line(mapping: Mapping) -> str:
    """The summary in one line."""
    s = mapping.summary()
    special = [f"{s[k]} {k}" for k in SPECIAL if s.get(k)]
    tail = "; " + ", ".join(special) if special else ""
    ranks = f"{s['ranks']} rank{'s' * (s['ranks'] != 1)}"
    return f"{s['leaves']} leaves → {s['tensors']} tensors → {ranks}, {human_bytes(s['bytes'])}{tail}"


def mapping_headline(mapping: Mapping) -> str:
    """The summary, large."""
    s = mapping.summary()
    number, unit = human_bytes(s["bytes"]).split(" ")
    special = [(f"{s[k]:,}", "", k) for k in SPECIAL if s.get(k)]
    return headlines(
        [
            (f"{s['leaves']:,}", "→", "JAX leaves"),
            (f"{s['tensors']:,}", "→", "checkpoint tensors"),
            (f"{s['ranks']:,}", "", "rollout rank" + "s" * (s["ranks"] != 1)),
            (number, unit, "in all"),
            *special,
        ]
    )


def mapping_text(mapping: Mapping) -> str:
    """The mapping's repr."""
    lines = [f"Mapping({summary_line(mapping)})"]
    for r in mapping.rows[:6]:
        lines.append(f"  {r.name or '-'} → {r.tensor} → {r.parameter or '-'} [{r.rank_text or '-'}] {r.status}")
    if len(mapping.rows) > 6:
        lines.append(f"  … {len(mapping.rows) - 6} more; mapping.explain(name) shows one tensor's way")
    lines += [f"  warning: {w}" for w in mapping.warnings]
    return "\n".join(lines)


def _cells(r: MappingRow) -> list[str]:
    return [r.name, r.tensor, r.parameter, r.rank_text, dtype_text(r), human_bytes(r.nbytes), r.status, r.rule]


def mapping_html(mapping: Mapping) -> str:
    """The table; inherits colours, so that it suits dark and light themes."""
    body = []
    for r in mapping.rows[:MAX_ROWS]:
        cells = [escape(c) for c in _cells(r)]
        at = HEADS.index("status")
        cells[at] = f'<span style="color:{DOTS[r.status]}">●</span> {cells[at]}'
        why = escape(f"{r.reason} ({r.confidence:.2f})" if r.reason else "", quote=True)
        tds = "".join(f'<td style="{CELL}">{c}</td>' for c in cells)
        body.append(f'<tr title="{why}">{tds}</tr>')
    more = len(mapping.rows) - MAX_ROWS
    note = f"<p>{more:,} more rows are not shown; they are in <code>mapping.rows</code>.</p>" if more > 0 else ""
    heads = "".join(f'<th style="{CELL};border-bottom:1px solid #8888">{h}</th>' for h in HEADS)
    return (
        f'<div style="color:inherit;background:transparent"><b>Mapping</b>{mapping_headline(mapping)}'
        f'<input placeholder="filter" aria-label="filter rows" oninput="{FILTER}" style="margin:4px 0;color:inherit;'
        'background:transparent;border:1px solid #8888;padding:2px 6px">'
        '<div style="max-height:420px;overflow:auto"><table style="border-collapse:collapse;color:inherit">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}{warnings_html(mapping)}</div>"
    )


def warnings_html(mapping: Mapping) -> str:
    """The mapping's warnings, below the table."""
    return "".join(f'<div><span style="color:{WAIT}">▲</span> {escape(w)}</div>' for w in mapping.warnings)


def explanation_html(explanation: Explanation) -> str:
    """One tensor: the text, then both shardings side by side."""
    drawing = draw(explanation.mapping.plan, explanation.leaf, explanation.parameters)
    text = escape("\n".join(explanation.lines))
    pre = f'<pre style="color:inherit;background:transparent;white-space:pre-wrap">{text}</pre>'
    return f'<div style="color:inherit;background:transparent">{pre}{drawing_svg(drawing)}</div>'


def drawing_svg(drawing: Drawing) -> str:
    """Inline SVG: the leaf on its devices at the left, each rank's parameter at the right; one colour per piece."""
    side, gap, top = 150, 26, 34
    width = (side + gap) * (1 + len(drawing.targets)) + gap
    parts = [_panel(gap, top, side, f"JAX {list(drawing.shape)}", drawing.source)]
    for k, (rank, info, rects) in enumerate(drawing.targets):
        x = gap + (side + gap) * (k + 1)
        parts.append(_panel(x, top, side, f"rank {rank} {list(info.shape)}", rects))
        # the rank's colour, as in the plan's lanes
        ends = f'x1="{x}" x2="{x + side}" y1="{top + side + 5}" y2="{top + side + 5}"'
        parts.append(f'<line {ends} stroke="{rank_colour(rank)}" stroke-width="4"/>')
    note = ""
    if drawing.left_out:
        note = f'<text x="{gap}" y="{top + side + 18}" fill="currentColor">{drawing.left_out} alike</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + side + 28}" '
        f'viewBox="0 0 {width} {top + side + 28}" font-family="sans-serif" font-size="11" role="img" '
        f'aria-label="{escape(drawing.leaf, quote=True)} on both sides">{"".join(parts)}{note}</svg>'
    )


def _panel(x: float, y: float, side: float, title: str, rects: list[Rect]) -> str:
    out = [f'<text x="{x}" y="{y - 8}" fill="currentColor">{escape(title)}</text>']
    for r in rects:
        red, green, blue = colour(r.piece)
        out.append(
            f'<rect x="{x + r.x * side:.2f}" y="{y + r.y * side:.2f}" width="{max(r.w * side, 0.5):.2f}" '
            f'height="{max(r.h * side, 0.5):.2f}" fill="rgb({red},{green},{blue})" stroke="#8888" stroke-width="0.5">'
            f"<title>{escape(r.text)}</title></rect>"
        )
        if r.w * side > 22 and r.h * side > 12:
            at = f'x="{x + (r.x + r.w / 2) * side:.1f}" y="{y + (r.y + r.h / 2) * side + 4:.1f}"'
            text = escape(r.label)
            out.append(f'<text {at} text-anchor="middle" fill="{ink(r.piece)}" pointer-events="none">{text}</text>')
    out.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="currentColor"/>')
    return "".join(out)


def rank_colour(rank: int) -> str:
    """A rollout rank's colour, the same in all views."""
    return PALETTE[rank % len(PALETTE)]


def mapping_figure(explanation: Explanation) -> object:
    """The same drawing with matplotlib."""
    drawing = draw(explanation.mapping.plan, explanation.leaf, explanation.parameters)
    panels = [(f"JAX {list(drawing.shape)}", drawing.source)]
    panels += [(f"rank {rank} {list(info.shape)}", rects) for rank, info, rects in drawing.targets]
    figure = new_figure(2.4 * len(panels), 2.8)
    from matplotlib.patches import Rectangle

    for axes, (title, rects) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for r in rects:
            fill = tuple(v / 255 for v in colour(r.piece))
            axes.add_patch(Rectangle((r.x, r.y), r.w, r.h, facecolor=fill, edgecolor="#888888", linewidth=0.5))
            if r.w > 0.15 and r.h > 0.08:
                axes.text(r.x + r.w / 2, r.y + r.h / 2, r.label, ha="center", va="center", fontsize=8)
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], title=title)
        axes.title.set_fontsize(9)
    figure.suptitle(explanation.place.name, fontsize=10)
    return figure

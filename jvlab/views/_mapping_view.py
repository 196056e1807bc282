"""A mapping as text, as an HTML table with a filter box, as a drawing of one tensor, and as a matplotlib figure."""

from __future__ import annotations

import colorsys
import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab._units import human_bytes
from jvlab.layout._plan import TransferPlan, expand_link
from jvlab.layout._plan_types import LinkPlan, Sharding, TargetInfo
from jvlab.layout._slices import fixed_dims
from jvlab.views._figures import new_figure
from jvlab.views._style import (
    BAD,
    BOX,
    FAINT,
    GOOD,
    IDLE,
    LINE,
    MONO,
    PALETTE,
    WAIT,
    dot,
    headlines,
    table,
    unseen,
)

if TYPE_CHECKING:
    from jvlab.layout._types import Axis, Binding
    from jvlab.sync._compile_tree import MappingRow
    from jvlab.sync._diff import Values
    from jvlab.sync._mapping import Explanation, Mapping
    from jvlab.sync._meaning import Meaning


MAX_RANKS = 8  # parameters drawn side by side
MAX_DEVICES = 512
MAX_RECTS = 1500  # in one panel
MAX_RUNS = 64  # rectangles per box
MAX_POINTS = 1 << 16


@dataclass(frozen=True)
class Rect:
    """A rectangle in a unit square, coloured by piece of the leaf; labelled with the devices that hold or send it."""

    x: float
    y: float
    w: float
    h: float
    piece: int
    label: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """The leaf on its devices, and each (rank, parameter) it is written to."""

    leaf: str
    shape: tuple[int, ...]
    source: list[Rect]
    targets: list[tuple[int, TargetInfo, list[Rect]]]
    left_out: str = ""  # what is not drawn: "4 more ranks"


def _members(
    plan: TransferPlan, leaf: str, parameters: Collection[str]
) -> tuple[int, np.ndarray]:
    """A leaf's index, and its members of the plan: those that are written to these parameters; to any, if none."""
    index = next(i for i, x in enumerate(plan.leaves) if x.path == leaf)
    found = np.flatnonzero(plan.member_leaf == index)
    if not parameters:
        return index, found
    wanted = np.array([info.name in parameters for info in plan.parameters], bool)
    return index, found[wanted[plan.target_parameter[plan.member_target[found]]]]


def _links(
    plan: TransferPlan, index: int, members: np.ndarray, replica: int = 0
) -> list[LinkPlan]:
    """The links that carry some members of a leaf, expanded for its classes only; for the ranks that are drawn."""
    ranks = np.unique(plan.target_rank[plan.member_target[members]])
    devices = np.unique(plan.shardings[plan.leaves[index].sharding].owners)
    classes = np.unique(plan.member_class[members]).tolist()
    pairs = [(int(d), int(r)) for r in ranks[:MAX_RANKS] for d in devices[:MAX_DEVICES]]
    return [expand_link(plan, d, r, replica, classes) for d, r in pairs]


def sends(
    plan: TransferPlan, leaf: str, replica: int = 0, parameters: Collection[str] = ()
) -> dict[tuple[int, int], int]:
    """Bytes of one leaf per (device, rank), without expanding links; only to some parameters, if these are given."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for m in _members(plan, leaf, parameters)[1].tolist():
        c = int(plan.member_class[m])
        sharding = plan.shardings[plan.class_sharding[c]]
        first = int(plan.member_ptr[c])
        last = int(plan.member_ptr[c + 1])
        boxes = np.arange(plan.box_ptr[c], plan.box_ptr[c + 1])
        base, count = plan.owners_of(boxes)
        turn = (m - first + plan.box_turn[boxes] + replica * (last - first)) % count
        rank = int(plan.target_rank[plan.member_target[m]])
        for d, n in zip(
            sharding.owners[base + turn].tolist(),
            plan.box_bytes[boxes].tolist(),
            strict=True,
        ):
            out[d, rank] += n
    return dict(out)


def draw(plan: TransferPlan, leaf: str, parameters: Collection[str] = ()) -> Drawing:
    """The geometry of one leaf on both sides; only some of the parameters it goes to, if these are given."""
    index, members = _members(plan, leaf, parameters)
    wanted = set(plan.member_target[members].tolist())
    info = plan.leaves[index]
    sharding = plan.shardings[info.sharding]
    counts = np.diff(sharding.owner_ptr)
    each = np.repeat(np.arange(len(counts)), counts).tolist()
    pieces = dict(zip(sharding.owners.tolist(), each, strict=True))
    grouped: dict[int, list[Rect]] = defaultdict(list)
    for link in _links(plan, index, members) if wanted else ():
        for i in np.flatnonzero(link.leaf == index).tolist():
            target = int(link.target[i])
            if target in wanted and len(grouped[target]) < MAX_RECTS:
                piece = pieces[link.device]
                grouped[target] += _target_rects(plan, link, i, target, piece)
    targets = []
    for t in sorted(grouped, key=lambda t: (plan.target_rank[t], t))[:MAX_RANKS]:
        parameter = plan.parameters[plan.target_parameter[t]]
        targets.append((int(plan.target_rank[t]), parameter, grouped[t]))
    several = len({int(plan.target_parameter[t]) for t in wanted}) > 1
    more = len(wanted) - len(targets)
    left_out = f"{more} more {'parameters' if several else 'ranks'}" if more > 0 else ""
    return Drawing(leaf, info.shape, _source_rects(sharding), targets, left_out)


def _source_rects(sharding: Sharding) -> list[Rect]:
    """The devices' shards projected to two dimensions: sharded dimensions are preferred, then the longest."""
    dims = range(len(sharding.shape))
    order = sorted(dims, key=lambda d: (sharding.whole[d], -sharding.shape[d]))
    y, x = [None, None, *sorted(order[:2])][-2:]
    rects = []
    for u in range(min(len(sharding.starts), MAX_RECTS)):
        first, last = sharding.owner_ptr[u : u + 2]
        owners = [str(owner) for owner in sharding.owners[first:last]]
        some = lambda most, owners=owners: (
            ", ".join(owners[:most]) + " …" * (len(owners) > most)
        )
        ends = zip(sharding.starts[u], sharding.stops[u], strict=True)
        held = " × ".join(f"{start}:{stop}" for start, stop in ends)
        left, width = _span(sharding, u, x)
        top, height = _span(sharding, u, y)
        text = f"device {some(6)}: {held}"
        rects.append(Rect(left, top, width, height, u, some(4), text))
    return rects


def _span(sharding: Sharding, u: int, d: int | None) -> tuple[float, float]:
    """Where a shard begins along a dimension and how much of it it holds; of no dimension all."""
    if d is None or not sharding.shape[d]:
        return 0.0, 1.0
    start = sharding.starts[u, d]
    size = sharding.shape[d]
    return float(start / size), float((sharding.stops[u, d] - start) / size)


def _target_rects(
    plan: TransferPlan, link: LinkPlan, i: int, target: int, piece: int
) -> list[Rect]:
    """Box i of a link in the parameter's rows × columns: exact rectangles, or their bounding one if too many."""
    info = plan.parameters[plan.target_parameter[target]]
    total = max(math.prod(info.shape), 1)
    columns = info.shape[-1] if len(info.shape) > 1 else total
    rows = max(total // columns, 1)
    y, x = divmod(int(link.dst_offset[i]), columns)
    split: list[tuple[int, int]] = []
    axes = zip(link.shape[i].tolist(), link.dst_strides[i].tolist(), strict=True)
    for n, s in axes:  # an axis that wraps around rows is split in two
        if s < columns < n * s and columns % s == 0 and n % (columns // s) == 0:
            split += [(columns // s, s), (n // (columns // s), columns)]
        elif n > 1:
            split.append((n, s))
    across = _runs(x, [(n, s) for n, s in split if s < columns], columns)
    down = _runs(y, [(n, s // columns) for n, s in split if s >= columns], rows)
    if len(across) * len(down) > MAX_RUNS:
        across = [(across[0][0], across[-1][1])]
        down = [(down[0][0], down[-1][1])]
    label = str(link.device)
    text = f"device {label} → rank {link.rank}: {int(link.nbytes[i]):,} bytes"
    rects = []
    for a, b in across:
        for c, d in down:
            size = ((b - a) / columns, (d - c) / rows)
            rects.append(Rect(a / columns, c / rows, *size, piece, label, text))
    return rects


def _runs(start: int, axes: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """The indices start + Σ i·step as runs [a, b) within the limit."""
    if math.prod(n for n, _ in axes) > MAX_POINTS:
        return [(start, min(start + sum((n - 1) * s for n, s in axes) + 1, limit))]
    points = np.array([start])
    for n, s in axes:
        points = (points[:, None] + np.arange(n) * s).reshape(-1)
    points = np.unique(np.minimum(points, limit - 1))
    cut = np.flatnonzero(np.diff(points) > 1) + 1
    return [(int(p[0]), int(p[-1]) + 1) for p in np.split(points, cut)]


def colour(piece: int) -> tuple[int, int, int]:
    """A fixed colour per piece: the palette's, then hues a golden angle apart; readable on light and dark."""
    if piece < len(PALETTE):
        return tuple(bytes.fromhex(PALETTE[piece][1:]))  # type: ignore[return-value]
    shade = colorsys.hsv_to_rgb(piece * 137.508 % 360 / 360, 0.54, 0.78)
    return tuple(int(255 * v) for v in shade)  # type: ignore[return-value]


def ink(piece: int) -> str:
    """Black or white, whichever is readable on a piece's colour."""
    red, green, blue = colour(piece)
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "#fff"


# Search of a mapping's rows by words, status, rule and rank, as the inspector's fields do.

COLUMNS = ("leaf", "rule", "tensor", "parameter", "ranks", "dtype", "bytes", "status")


def dtype_text(row: MappingRow) -> str:
    """The engine's dtype, preceded by the leaf's where they differ."""
    if not row.dtype or row.leaf_dtype in ("", row.dtype):
        return row.dtype or row.leaf_dtype
    return f"{row.leaf_dtype} → {row.dtype}"


def search_rows(
    rows: Sequence[MappingRow],
    text: str = "",
    status: str = "",
    rule: str = "",
    rank: int | None = None,
    sort: str = "",
) -> list[MappingRow]:
    """Rows that contain every word, ignoring case; `sort` is a column, with a leading "-" in descending order."""
    column = sort.removeprefix("-")
    if column and column not in COLUMNS:
        raise ConfigError(
            f"no column is called {column!r}",
            remedy=f"sort by one of {', '.join(COLUMNS)}",
        )
    words = text.lower().split()
    found = [
        r
        for r in rows
        if (not status or r.status == status)
        and (not rule or r.rule == rule)
        and (rank is None or rank in r.ranks)
        and _holds(r, words)
    ]
    if column:
        found.sort(key=lambda r: _key(r, column), reverse=sort.startswith("-"))
    return found


def _holds(row: MappingRow, words: Sequence[str]) -> bool:
    cells = (row.name, row.numbered, row.rule, row.tensor, row.parameter, row.status)
    low = "\n".join([*cells, dtype_text(row)]).lower()
    return all(word in low for word in words)


def _key(row: MappingRow, column: str) -> Any:
    match column:
        case "bytes":
            return row.nbytes
        case "ranks":
            return row.ranks
        case "dtype":
            return dtype_text(row)
        case "leaf":
            return natural(row.name)
        case _:
            return natural(getattr(row, column))


def natural(name: str) -> str:
    """A sort key that puts layers.9 before layers.10."""
    return re.sub(r"\d+", lambda m: m[0].zfill(8), name)


# A diagram of what a rule does to a leaf's axes: each axis is a coloured box, connected to its place in the tensor.

# px: width of a box, gap between dimensions, height of a box, space for the lines
AXIS_BOX = 46
GAP = 22
ROW = 24
LINK = 74


def axes_svg(b: Binding) -> str:
    """The leaf's dimensions above, the tensor's below; boxes without a gap are axes merged into one dimension.

    A dashed box without a line is a dimension of which one index is taken: a layer of a stacked leaf.
    """
    fixed = fixed_dims(b)
    top, held = _positions(
        [(a.leaf_dim, -a.leaf_step, a) for a in b.axes], len(b.leaf_shape), fixed
    )
    low, _ = _positions(
        [(a.tensor_dim, -a.tensor_step, a) for a in b.axes], len(b.tensor_shape)
    )
    number = {
        id(a): i
        for i, a in enumerate(sorted(b.axes, key=lambda a: (a.leaf_dim, -a.leaf_step)))
    }
    words = ", ".join(
        [
            *([f"{b.add:+g}"] if b.add else []),
            *([f"cast to {b.cast}"] if b.cast else []),
        ]
    )
    right = max(x + AXIS_BOX for x in (*top.values(), *low.values(), *held.values()))
    width = max(right + (10 + 7 * len(words) if words else 0), 180)
    y0 = 20
    y1 = 20 + ROW + LINK
    lines = "".join(
        _line(
            top[id(a)] + AXIS_BOX / 2,
            y0 + ROW,
            low[id(a)] + AXIS_BOX / 2,
            y1,
            rank_colour(number[id(a)]),
        )
        for a in b.axes
    )
    extra = f'<text x="{right + 10}" y="{y0 + ROW + LINK / 2 + 4}" fill="currentColor">{escape(words)}</text>'
    return (
        f'<svg width="{width}" height="{y1 + ROW + 22}" font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="axes of {escape(b.leaf, quote=True)}">{lines}{extra}'
        f"{_boxes(b.axes, top, number, y0)}{_boxes(b.axes, low, number, y1)}{_taken(b, held, y0)}"
        f'<text x="0" y="{y0 - 8}" fill="currentColor">leaf {list(b.leaf_shape)}</text>'
        f'<text x="0" y="{y1 + ROW + 16}" fill="currentColor">tensor {list(b.tensor_shape)}</text></svg>'
    )


def _line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    half = (y1 - y0) / 2
    path = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + half:.0f} {x1:.0f},{y1 - half:.0f} {x1:.0f},{y1:.0f}"
    return f'<path d="{path}" fill="none" stroke-width="2" stroke="{colour}"/>'


def _positions(
    keys: list[tuple[int, int, Axis]], dims: int, fixed: tuple[int, ...] = ()
) -> tuple[dict[int, float], dict[int, float]]:
    """The x position of each axis, dimension by dimension, slowest axis first; and that of each fixed dimension."""
    out: dict[int, float] = {}
    held: dict[int, float] = {}
    x = 0.0
    for dim in range(dims):
        if dim in fixed:
            held[dim] = x
            x += AXIS_BOX + 2
        for _, _, axis in sorted((k for k in keys if k[0] == dim), key=lambda k: k[1]):
            out[id(axis)] = x
            x += AXIS_BOX + 2
        x += GAP
    return out, held


def _taken(b: Binding, positions: dict[int, float], y: float) -> str:
    """The dimensions of which one index is taken: `[1]`, below it how many there are."""
    out = []
    for dim, x in positions.items():
        at = b.leaf_start[dim]
        size = b.leaf_shape[dim]
        middle = f'x="{x + AXIS_BOX / 2}" text-anchor="middle" fill="currentColor"'
        out.append(
            f"<g><title>index {at} of {size} along dim {dim}: the other slices go to other tensors</title>"
            f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{AXIS_BOX - 1}" height="{ROW - 1}" rx="3" fill="none" '
            f'stroke="currentColor" stroke-dasharray="3 2"/><text {middle} y="{y + ROW / 2 + 4}">[{at}]</text>'
            f'<text {middle} y="{y + ROW + 13}" font-size="10">of {size}</text></g>'
        )
    return "".join(out)


def _boxes(
    axes: tuple[Axis, ...],
    positions: dict[int, float],
    number: dict[int, int],
    y: float,
) -> str:
    out = []
    for a in axes:
        x = positions[id(a)]
        which = number[id(a)]
        at = f'x="{x + AXIS_BOX / 2}" y="{y + ROW / 2 + 4}"'
        out.append(
            f'<rect x="{x}" y="{y}" width="{AXIS_BOX}" height="{ROW}" rx="3" fill="{rank_colour(which)}"/>'
            f'<text {at} text-anchor="middle" fill="{rank_ink(which)}">{a.size}</text>'
        )
    return "".join(out)


def rank_ink(i: int) -> str:
    """Black, or white on the two dark colours of the palette."""
    return "#fff" if i % len(PALETTE) in (0, 5) else "#000"


# Histograms of a tensor in engine and trainer, as inline SVG.

WIDTH = 250
HEIGHT = 70
ENGINE = PALETTE[1]
TRAINER = PALETTE[0]
CHANGE = PALETTE[3]
MAX_SHOWN = 8  # ranks


def values_html(*found: Values) -> str:
    """One line of three histograms per rank: engine, trainer, difference."""
    rows = "".join(_one(v) for v in found[:MAX_SHOWN])
    note = unseen(len(found) - MAX_SHOWN, "{} more ranks")
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
    top = max(v.engine.max(initial=1), v.trainer.max(initial=1))
    change = v.change.max(initial=1)
    parts = (
        _bars("engine holds", v.edges, v.engine, ENGINE, top),
        _bars("trainer has", v.edges, v.trainer, TRAINER, top),
        _bars("trainer − engine", v.change_edges, v.change, CHANGE, change),
    )
    row = f'<div style="display:flex;flex-wrap:wrap;gap:18px">{"".join(parts)}</div>'
    return f'<div style="margin:6px 0">{title}{row}</div>'


def _bars(
    title: str, edges: np.ndarray, counts: np.ndarray, colour: str, top: float
) -> str:
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
    line = (
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}" style="stroke:{LINE}"/>'
    )
    svg = (
        f'<svg width="{WIDTH}" height="{HEIGHT + 16}" font-size="10" role="img" aria-label="{title}">'
        f"{line}{bars}{ends}</svg>"
    )
    return f'<div><div style="color:{FAINT}">{title}</div>{svg}</div>'


# ----------------------------------------------------------------------------------------------------

# in the static table, under 60 kB with long names; `mapping.rows` and `.search` have them all
MAX_ROWS = 50
HEADS = (
    "JAX leaf",
    "checkpoint tensor",
    "vLLM parameter",
    "rank",
    "dtype",
    "bytes",
    "status",
    "rule",
)
CELL = "padding:2px 10px 2px 0;text-align:left;white-space:nowrap"
# statuses worth a number of their own
SPECIAL = ("quantised", "staged", "opaque", "unused")
DOTS = {
    "direct": GOOD,
    "cast": PALETTE[4],
    "quantised": PALETTE[4],
    "staged": WAIT,
    "opaque": WAIT,
}
DOTS |= {"unused": IDLE, "problem": BAD}
# Filters the rows of the table next to it. Without double quotes, since it is an attribute's value.
FILTER = (
    "const q=this.value.toLowerCase();for(const r of this.parentElement.querySelectorAll('tbody tr'))"
    "r.style.display=r.textContent.toLowerCase().includes(q)?'':'none'"
)


def mapping_line(mapping: Mapping) -> str:
    """The mapping's repr: its summary."""
    s = mapping.summary()
    special = [f"{s[k]} {k}" for k in SPECIAL if s.get(k)]
    tail = "; " + ", ".join(special) if special else ""
    ranks = f"{s['ranks']} rank{'s' * (s['ranks'] != 1)}"
    return f"Mapping({s['leaves']} leaves → {s['tensors']} tensors → {ranks}, {human_bytes(s['bytes'])}{tail})"


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
    """The first rows, and the warnings."""
    lines = [mapping_line(mapping)]
    for r in mapping.rows[:6]:
        lines.append(
            f"  {r.name or '-'} → {r.tensor} → {r.parameter or '-'} [{r.rank_text or '-'}] {r.status}"
        )
    if len(mapping.rows) > 6:
        lines.append(
            f"  … {len(mapping.rows) - 6} more; mapping.explain(name) shows one tensor's way"
        )
    lines += [f"  warning: {w}" for w in mapping.warnings]
    return "\n".join(lines)


def _cells(r: MappingRow) -> list[str]:
    return [
        r.name,
        r.tensor,
        r.parameter,
        r.rank_text,
        dtype_text(r),
        human_bytes(r.nbytes),
        r.status,
        r.rule,
    ]


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
    note = (
        f"<p>{more:,} more rows are not shown; they are in <code>mapping.rows</code>.</p>"
        if more > 0
        else ""
    )
    heads = "".join(
        f'<th style="{CELL};border-bottom:1px solid #8888">{h}</th>' for h in HEADS
    )
    return (
        f'<div style="color:inherit;background:transparent"><b>Mapping</b>{mapping_headline(mapping)}'
        f'<input placeholder="filter" aria-label="filter rows" oninput="{FILTER}" style="margin:4px 0;color:inherit;'
        'background:transparent;border:1px solid #8888;padding:2px 6px">'
        '<div style="max-height:420px;overflow:auto"><table style="border-collapse:collapse;color:inherit">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}{warnings_html(mapping)}</div>"
    )


def warnings_html(mapping: Mapping) -> str:
    """The mapping's warnings, below the table."""
    return "".join(
        f'<div><span style="color:{WAIT}">▲</span> {escape(w)}</div>'
        for w in mapping.warnings
    )


def explanation_html(explanation: Explanation) -> str:
    """One tensor: the text, then both shardings side by side."""
    drawing = draw(explanation.mapping.plan, explanation.leaf, explanation.parameters)
    text = escape("\n".join(explanation.lines))
    pre = f'<pre style="color:inherit;background:transparent;white-space:pre-wrap">{text}</pre>'
    return f'<div style="color:inherit;background:transparent">{pre}{drawing_svg(drawing)}</div>'


def drawing_svg(drawing: Drawing) -> str:
    """Inline SVG: the leaf on its devices at the left, each rank's parameter at the right; one colour per piece."""
    side = 150
    gap = 26
    top = 34
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
            out.append(
                f'<text {at} text-anchor="middle" fill="{ink(r.piece)}" pointer-events="none">{text}</text>'
            )
    out.append(
        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="currentColor"/>'
    )
    return "".join(out)


def rank_colour(rank: int) -> str:
    """A rollout rank's colour, the same in all views."""
    return PALETTE[rank % len(PALETTE)]


def mapping_figure(explanation: Explanation) -> object:
    """The same drawing with matplotlib."""
    from matplotlib.patches import Rectangle

    drawing = draw(explanation.mapping.plan, explanation.leaf, explanation.parameters)
    panels = [(f"JAX {list(drawing.shape)}", drawing.source)]
    for rank, info, rects in drawing.targets:
        panels.append((f"rank {rank} {list(info.shape)}", rects))
    figure = new_figure(2.4 * len(panels), 2.8)
    edge: dict[str, Any] = {"edgecolor": "#888888", "linewidth": 0.5}
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, rects) in zip(all_axes, panels, strict=True):
        for r in rects:
            fill = tuple(v / 255 for v in colour(r.piece))
            axes.add_patch(Rectangle((r.x, r.y), r.w, r.h, facecolor=fill, **edge))
            if r.w > 0.15 and r.h > 0.08:
                axes.text(r.x + r.w / 2, r.y + r.h / 2, r.label, **middle)
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
        axes.set_title(title, fontsize=9)
    figure.suptitle(explanation.place.name, fontsize=10)
    return figure


# One row of a mapping in detail: rule and reason, its effect on the axes, both shardings, bytes per sender.

MAX_SENDERS = 16  # rows of the table of senders
STATUS_WORDS = {
    "direct": "copied, not converted",
    "cast": "converted on the way, on the trainer's device",
    "quantised": "scaled and cast to fp8 on the trainer's device",
    "staged": "written raw, then re-packed by the engine",
    "opaque": "goes whole through vLLM's own loader",
    "unused": "no rank takes anything from it",
}


def detail_html(
    mapping: Mapping | None, row: MappingRow, meaning: Meaning | None = None
) -> str:
    """Text and pictures of a row; the text alone while edited rules do not cover the model (no mapping).

    `meaning`: what is known of the mapping's values.
    """
    path = " → ".join(
        f"<b>{escape(name)}</b>"
        for name in (row.name, row.tensor, row.parameter)
        if name
    )
    cells = "".join(
        f'<div style="color:{FAINT}">{name}</div><div style="overflow-wrap:anywhere">{value}</div>'
        for name, value in _facts(mapping, row, meaning)
    )
    grid = f'<div style="display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin:4px 0 8px">{cells}</div>'
    return (
        f'<div style="{BOX};border-top:1px solid {LINE};padding-top:6px"><div style="overflow-wrap:anywhere">{path}'
        f"</div>{grid}{_pictures(mapping, row) if mapping is not None else ''}</div>"
    )


def _facts(
    mapping: Mapping | None, row: MappingRow, meaning: Meaning | None
) -> list[tuple[str, str]]:
    """What is known of a row, as pairs of a name and HTML."""
    style = f"font-family:{MONO};font-size:12px"
    rule = f'<span style="{style}">{escape(row.rule) or "none"}</span>'
    if row.status == "problem":
        return [("rule", rule), ("problem", escape(row.reason))]
    because = f"{row.reason} (confidence {row.confidence:.2f})" if row.reason else ""
    size = (
        f"{human_bytes(row.nbytes)} as {dtype_text(row)}" if row.nbytes else "nothing"
    )
    if row.ranks:
        size += f" to rank{'s' * (len(row.ranks) > 1)} {row.rank_text}"
    seen = meaning.leaves.get(row.name) if meaning is not None else None
    value = ""
    if seen is not None:
        tone = BAD if seen.contradicts else GOOD if seen.agrees else WAIT
        value = f"{dot(tone)} {'wrong: ' * seen.contradicts}{escape(seen.text)}"
    left = mapping.ambiguous if mapping is not None else {}
    if meaning is not None and meaning.state == "checked":
        left = meaning.ambiguous
    unclear = ""
    if row.leaf in left:
        unclear = f"{left[row.leaf]}; only a value or a function can tell"
    notes = mapping.notes if mapping is not None else {}
    note = notes.get(row.parameter) or notes.get(row.tensor) or ""
    facts = {
        "rule": rule,
        "because": escape(because),
        "warning": escape(row.warning),
        "moves": escape(size),
        "status": f"{dot(DOTS[row.status])} {row.status}: {STATUS_WORDS[row.status]}",
        "by value": value,
        "ambiguous": escape(unclear),
        "note": escape(note),
    }
    return [(name, html) for name, html in facts.items() if html]


def _pictures(mapping: Mapping, row: MappingRow) -> str:
    binding = next(
        (b for b in mapping.bindings if (b.leaf, b.tensor) == (row.leaf, row.tensor)),
        None,
    )
    if binding is None:
        return ""
    only = [row.parameter] if row.part else ()
    titles = (
        "what the rule does to the axes" + (": one slice is taken" if row.part else ""),
        # as wide as its picture, so that this one fits beside the other
        '<div style="width:0;min-width:100%">source and destination of each piece: numbers are devices, empty regions '
        "belong to other tensors</div>",
        "bytes sent by each device",
    )
    pictures = (
        axes_svg(binding) if binding.axes else "one number",
        drawing_svg(draw(mapping.plan, row.leaf, only)),
        _senders(mapping, row.leaf, only),
    )
    blocks = "".join(
        f'<div style="overflow-x:auto"><div style="color:{FAINT}">{title}</div>{picture}</div>'
        for title, picture in zip(titles, pictures, strict=True)
        if picture
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px 30px">{blocks}</div>'


def _senders(mapping: Mapping, leaf: str, parameters: Collection[str]) -> str:
    """Bytes of the leaf, or of its slice for these parameters, from each device to each rank of the first replica."""
    found = sends(mapping.plan, leaf, parameters=parameters)
    if not found:
        return ""
    ranks = sorted({r for _, r in found})
    devices = sorted({d for d, _ in found})
    size = lambda link: human_bytes(found[link]) if link in found else ""
    shown = ranks[:MAX_RANKS]
    rows = [
        [f"device {d}", *(size((d, r)) for r in shown)] for d in devices[:MAX_SENDERS]
    ]
    heads = ["", *(f"rank {r}" for r in shown)]
    more = unseen(len(devices) - MAX_SENDERS, "{} more devices")
    more += unseen(len(ranks) - MAX_RANKS, "{} more ranks")
    return f'<div style="margin-top:6px">{table(heads, rows, range(1, len(heads)))}{more}</div>'

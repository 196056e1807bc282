"""Parts of a plan's HTML: bytes per link as a heat map, buckets as lanes, predicted and measured seconds, one link."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from jvlab._units import how_many, human_bytes, human_seconds
from jvlab.views._lanes_view import LaneBar, LaneData
from jvlab.views._mapping_view import rank_colour
from jvlab.views._style import BOX, FAINT, LINE, PALETTE, bar, table

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan

MAX_CELLS = 48  # rows and columns of the heat map; a larger plan is drawn in blocks
MAX_LANES = 24
TOP_LEAVES = 8


def heat_svg(plan: TransferPlan) -> str:
    """Bytes per link: trainer devices as rows, the ranks of each replica as columns; darker is more."""
    links, columns = plan.all_links, plan.replicas * plan.ranks
    row = np.searchsorted(plan.devices, links.device)
    column = links.replica * plan.ranks + links.rank
    down, across = -(-len(plan.devices) // MAX_CELLS), -(-columns // MAX_CELLS)
    grid = np.zeros((-(-len(plan.devices) // down), -(-columns // across)), np.int64)
    np.add.at(grid, (row // down, column // across), links.nbytes)
    which = (
        {(int(r), int(c)): i for i, (r, c) in enumerate(zip(row, column, strict=True))} if down * across == 1 else {}
    )
    top = max(int(grid.max(initial=0)), 1)
    rows, width = grid.shape[0], grid.shape[1]
    w, h = (72, 22) if width <= 8 else (max(12, 560 // width), 14 if rows <= 24 else 8)
    left, head = 66, 36
    parts = []
    for (r, c), n in np.ndenumerate(grid):
        if not n:
            continue
        x, y = left + c * w, head + r * h
        link = f' data-link="{which[r, c]}"' if which else ""
        name = _cell_name(plan, int(r), int(c), down, across)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{w - 1}" height="{h - 1}" fill="{PALETTE[0]}" '
            f'fill-opacity="{0.1 + 0.65 * n / top:.2f}"{link}><title>{name}: {human_bytes(int(n))}</title></rect>'
        )
        if w >= 60:
            at = f'x="{x + w / 2}" y="{y + h / 2 + 4}"'
            text = f"{human_bytes(int(n))}</text>"
            parts.append(f'<text {at} text-anchor="middle" fill="currentColor" pointer-events="none">{text}')
    parts += _heads(plan, rows, width, down, across, (left, head, w, h))
    block = f", a cell is {down} devices × {across} ranks" if down * across > 1 else ""
    size = f'width="{left + width * w + 8}" height="{head + rows * h + 6}"'
    return (
        f'<div style="{BOX};overflow-x:auto"><div style="color:{FAINT}">bytes per link{block}</div>'
        f'<svg {size} font-size="11" role="img" aria-label="bytes per link">{"".join(parts)}</svg></div>'
    )


def _cell_name(plan: TransferPlan, r: int, c: int, down: int, across: int) -> str:
    if down * across > 1:
        return f"devices from {plan.devices[r * down]}, ranks from {c * across}"
    replica = f"replica {c // plan.ranks} " if plan.replicas > 1 else ""
    return f"device {plan.devices[r]} → {replica}rank {c % plan.ranks}"


def _heads(
    plan: TransferPlan, rows: int, width: int, down: int, across: int, place: tuple[int, int, int, int]
) -> list[str]:
    left, head, w, h = place
    step_r, step_c = max(1, -(-14 // h)), max(1, -(-34 // w))
    out = [
        f'<text x="{left - 6}" y="{head + r * h + h / 2 + 4}" text-anchor="end" fill="currentColor">'
        f"{'device ' if h > 14 else ''}{plan.devices[r * down]}</text>"
        for r in range(0, rows, step_r)
    ]
    for c in range(0, width, step_c):
        rank = c * across % plan.ranks
        name = f"rank {rank}" if w >= 40 else str(rank)
        out.append(
            f'<text x="{left + (c + 0.5) * w}" y="{head - 8}" text-anchor="middle" fill="currentColor">{name}</text>'
        )
        out.append(f'<rect x="{left + c * w}" y="{head - 5}" width="{w - 1}" height="3" fill="{rank_colour(rank)}"/>')
    if plan.replicas > 1 and across == 1:
        for r in range(plan.replicas):
            out.append(f'<text x="{left + r * plan.ranks * w}" y="12" fill="currentColor">replica {r}</text>')
    return out


def bucket_lanes(plan: TransferPlan, link_gbps: float | None = None) -> LaneData:
    """The schedule of buckets: a lane per device, coloured by destination rank."""
    slots = plan.schedule(link_gbps)
    devices = plan.devices.tolist()
    shown = {d: i for i, d in enumerate(devices[:MAX_LANES])}
    links = plan.all_links
    where = {
        (int(d), int(p), int(r)): i
        for i, (d, p, r) in enumerate(zip(links.device, links.replica, links.rank, strict=True))
    }
    bars = []
    for s in slots:
        if s.device not in shown:
            continue
        to = f"replica {s.replica} rank {s.rank}" if plan.replicas > 1 else f"rank {s.rank}"
        text = f"device {s.device} → {to}: {human_bytes(s.nbytes)} in {human_seconds(s.seconds)}"
        ink = "#fff" if s.rank % len(PALETTE) in (0, 5) else "#000"
        link = where[s.device, s.replica, s.rank]
        bars.append(LaneBar(shown[s.device], s.start, s.seconds, rank_colour(s.rank), text, to, ink, link=link))
    end = max((s.start + s.seconds for s in slots), default=1e-6)
    return LaneData(tuple(f"device {d}" for d in shown), tuple(bars), (0.0, end))


def times_html(plan: TransferPlan, link_gbps: float | None = None) -> str:
    """Predicted seconds compared with the last syncs of this plan."""
    gbps = link_gbps or plan.link_gbps
    predicted = plan.predict(gbps)
    rows = [("predicted: bytes only", f"at {gbps:g} GB/s", predicted, PALETTE[0])]
    for report in plan.reports[-3:]:
        name = f"version {report.version}, measured"
        rows.append((name, f"move, over {report.transport}", report.seconds["move"], PALETTE[1]))
        rows.append(("", "total", report.seconds["total"], PALETTE[2]))
    most = max(seconds for *_, seconds, _ in rows) or 1.0
    body = [
        [escape(a), escape(b), human_seconds(s), _level(s / most, colour), _times(s, predicted)]
        for a, b, s, colour in rows
    ]
    if len(rows) == 1:
        note = f'<div style="color:{FAINT}">nothing measured yet: link.sync(params), and look again</div>'
    else:
        last = plan.reports[-1]
        through = f"{last.gbps:.2f} GB/s reached" if last.gbps else ""
        note = f'<div style="color:{FAINT}">{escape(through)}; predictions exclude latency, packing and digests</div>'
    return (
        f'<div style="{BOX}"><div style="color:{FAINT}">seconds</div>'
        f"{table(('', '', 'time', '', ''), body, (2,))}{note}</div>"
    )


def _level(share: float, colour: str = PALETTE[0]) -> str:
    """A bar, vertically centred in a line of text."""
    return f'<div style="padding-top:3px">{bar(share, colour, "9em")}</div>'


def _times(seconds: float, predicted: float) -> str:
    if not predicted or seconds == predicted:
        return ""
    times = seconds / predicted
    return f"{times:,.1f} ×" if times < 100 else f"{times:,.0f} ×"


def link_html(plan: TransferPlan, index: int) -> str:
    """One link: its boxes and buckets, and its largest leaves."""
    links = plan.all_links
    device, replica, rank = int(links.device[index]), int(links.replica[index]), int(links.rank[index])
    link = plan.link(device, rank, replica)
    weight = np.bincount(link.leaf, weights=link.nbytes, minlength=len(plan.leaves))
    largest: list[tuple[int, float]] = [(int(i), float(weight[i])) for i in np.argsort(-weight, kind="stable")]
    top = [(i, n) for i, n in largest[:TOP_LEAVES] if n]
    to = f"replica {replica}, rank {rank}" if plan.replicas > 1 else f"rank {rank}"
    share = links.contiguous_bytes[index] / max(links.nbytes[index], 1)
    head = (
        f"<b>device {device} → {to}</b>: {human_bytes(link.total_bytes)} in {len(link):,} boxes, "
        f"{how_many(len(link.bucket_sizes), 'bucket')}, {share:.0%} contiguous"
    )
    rows = [[escape(plan.leaves[i].path), human_bytes(n), _level(n / top[0][1])] for i, n in top]
    more = int((weight > 0).sum()) - len(top)
    note = f'<div style="color:{FAINT}">{more:,} more leaves</div>' if more > 0 else ""
    heads = ("heaviest leaves", "bytes", "")
    return f'<div style="{BOX};border-top:1px solid {LINE};padding:6px 0">{head}{table(heads, rows, (1,))}{note}</div>'

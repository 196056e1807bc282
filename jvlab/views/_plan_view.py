"""A transfer plan as text, HTML, and a heat map of bytes per link; its panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._units import how_many, human_bytes, human_seconds
from jvlab.views._figures import new_figure
from jvlab.views._mapping_view import rank_colour, rank_ink
from jvlab.views._style import (
    BOX,
    FAINT,
    LINE,
    PALETTE,
    bar,
    faint,
    headlines,
    table,
    unseen,
)
from jvlab.views._timeline import LaneBar, LaneData
from jvlab.views.panels._live import Panel

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._plan_types import LinkPlan


# Parts of a plan's HTML: bytes per link as a heat map, buckets as lanes, predicted and measured seconds, one link.

MAX_CELLS = 48  # rows and columns of the heat map; a larger plan is drawn in blocks
MAX_LANES = 24
TOP_LEAVES = 8


@dataclass(frozen=True)
class Heat:
    """Bytes per link: trainer devices as rows; the ranks of each replica as columns, replica by replica."""

    grid: np.ndarray  # bytes of each cell, which is `down` devices × `across` ranks
    down: int
    across: int
    links: dict[tuple[int, int], int]  # cell -> its link, where each is one link

    @property
    def block(self) -> str:
        """What a cell is, if it is more than a link."""
        if self.down * self.across == 1:
            return ""
        return f"a cell is {self.down} devices × {self.across} ranks"


def link_heat(plan: TransferPlan) -> Heat:
    """The heat map of a plan, which `heat_svg` and `plan_figure` draw."""
    links = plan.all_links
    columns = plan.replicas * plan.ranks
    row = np.searchsorted(plan.devices, links.device)
    column = links.replica * plan.ranks + links.rank
    down = -(-len(plan.devices) // MAX_CELLS)
    across = -(-columns // MAX_CELLS)
    grid = np.zeros((-(-len(plan.devices) // down), -(-columns // across)), np.int64)
    np.add.at(grid, (row // down, column // across), links.nbytes)
    which = (
        {(int(r), int(c)): i for i, (r, c) in enumerate(zip(row, column, strict=True))}
        if down * across == 1
        else {}
    )
    return Heat(grid, down, across, which)


def heat_svg(plan: TransferPlan) -> str:
    """The heat map as SVG; darker is more."""
    heat = link_heat(plan)
    top = max(int(heat.grid.max(initial=0)), 1)
    rows, width = heat.grid.shape
    w, h = (72, 22) if width <= 8 else (max(12, 560 // width), 14 if rows <= 24 else 8)
    left = 66
    head = 36
    parts = []
    for (r, c), n in np.ndenumerate(heat.grid):
        if not n:
            continue
        x = left + c * w
        y = head + r * h
        link = f' data-link="{heat.links[r, c]}"' if heat.links else ""
        size = human_bytes(int(n))
        name = _cell_name(plan, heat, r, c)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{w - 1}" height="{h - 1}" fill="{PALETTE[0]}" '
            f'fill-opacity="{0.1 + 0.65 * n / top:.2f}"{link}><title>{name}: {size}</title></rect>'
        )
        if w >= 60:
            at = f'x="{x + w / 2}" y="{y + h / 2 + 4}"'
            parts.append(
                f'<text {at} text-anchor="middle" fill="currentColor" pointer-events="none">{size}</text>'
            )
    parts += _heads(plan, heat, (left, head, w, h))
    title = f"bytes per link, {heat.block}" if heat.block else "bytes per link"
    size = f'width="{left + width * w + 8}" height="{head + rows * h + 6}"'
    return (
        f'<div style="{BOX};overflow-x:auto">{faint(title)}'
        f'<svg {size} font-size="11" role="img" aria-label="bytes per link">{"".join(parts)}</svg></div>'
    )


def _cell_name(plan: TransferPlan, heat: Heat, r: int, c: int) -> str:
    if not heat.links:
        return (
            f"devices from {plan.devices[r * heat.down]}, ranks from {c * heat.across}"
        )
    to = _rank_text(plan, c // plan.ranks, c % plan.ranks)
    return f"device {plan.devices[r]} → {to}"


def _heads(
    plan: TransferPlan, heat: Heat, place: tuple[int, int, int, int]
) -> list[str]:
    """The names of the heat map's rows and columns."""
    left, head, w, h = place
    rows, width = heat.grid.shape
    word = "device " if h > 14 else ""
    out = [
        f'<text x="{left - 6}" y="{head + r * h + h / 2 + 4}" text-anchor="end" fill="currentColor">'
        f"{word}{plan.devices[r * heat.down]}</text>"
        for r in range(0, rows, max(1, -(-14 // h)))
    ]
    for c in range(0, width, max(1, -(-34 // w))):
        rank = c * heat.across % plan.ranks
        name = f"rank {rank}" if w >= 40 else str(rank)
        out.append(
            f'<text x="{left + (c + 0.5) * w}" y="{head - 8}" text-anchor="middle" fill="currentColor">{name}</text>'
            f'<rect x="{left + c * w}" y="{head - 5}" width="{w - 1}" height="3" fill="{rank_colour(rank)}"/>'
        )
    if plan.replicas > 1 and heat.across == 1:
        out += [
            f'<text x="{left + r * plan.ranks * w}" y="12" fill="currentColor">replica {r}</text>'
            for r in range(plan.replicas)
        ]
    return out


def bucket_lanes(plan: TransferPlan, link_gbps: float | None = None) -> LaneData:
    """The schedule of buckets: a lane per device, coloured by destination rank."""
    slots = plan.schedule(link_gbps)
    shown = plan.devices.tolist()[:MAX_LANES]
    links = plan.all_links
    keys = zip(links.device, links.replica, links.rank, strict=True)
    where = {(int(d), int(p), int(r)): i for i, (d, p, r) in enumerate(keys)}
    bars = []
    for s in slots:
        if s.device not in shown:
            continue
        to = _rank_text(plan, s.replica, s.rank)
        text = f"device {s.device} → {to}: {human_bytes(s.nbytes)} in {human_seconds(s.seconds)}"
        bars.append(
            LaneBar(
                row=shown.index(s.device),
                start=s.start,
                seconds=s.seconds,
                colour=rank_colour(s.rank),
                text=text,
                label=to,
                ink=rank_ink(s.rank),
                link=where[s.device, s.replica, s.rank],
            )
        )
    end = max((s.start + s.seconds for s in slots), default=1e-6)
    return LaneData(tuple(f"device {d}" for d in shown), tuple(bars), (0.0, end))


def times_html(plan: TransferPlan, link_gbps: float | None = None) -> str:
    """Predicted seconds compared with the last syncs of this plan."""
    gbps = link_gbps or plan.link_gbps
    predicted = plan.predict(gbps)
    rows = [("predicted: bytes only", f"at {gbps:g} GB/s", predicted, PALETTE[0])]
    for report in plan.reports[-3:]:
        name = f"version {report.version}, measured"
        rows.append(
            (name, f"move, over {report.transport}", report.seconds["move"], PALETTE[1])
        )
        rows.append(("", "total", report.seconds["total"], PALETTE[2]))
    most = max(seconds for *_, seconds, _ in rows) or 1.0
    body = [
        [
            escape(a),
            escape(b),
            human_seconds(s),
            _level(s / most, colour),
            _times(s, predicted),
        ]
        for a, b, s, colour in rows
    ]
    note = "nothing measured yet: link.sync(params), and look again"
    if plan.reports:
        last = plan.reports[-1]
        through = f"{last.gbps:.2f} GB/s reached" if last.gbps else ""
        note = f"{through}; predictions exclude latency, packing and digests"
    return (
        f'<div style="{BOX}"><div style="color:{FAINT}">seconds</div>'
        f"{table(('', '', 'time', '', ''), body, (2,))}{faint(note)}</div>"
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
    device = int(links.device[index])
    replica = int(links.replica[index])
    rank = int(links.rank[index])
    link = plan.link(device, rank, replica)
    weight = np.bincount(link.leaf, weights=link.nbytes, minlength=len(plan.leaves))
    largest: list[tuple[int, float]] = [
        (int(i), float(weight[i])) for i in np.argsort(-weight, kind="stable")
    ]
    top = [(i, n) for i, n in largest[:TOP_LEAVES] if n]
    to = f"replica {replica}, rank {rank}" if plan.replicas > 1 else f"rank {rank}"
    share = links.contiguous_bytes[index] / max(links.nbytes[index], 1)
    head = (
        f"<b>device {device} → {to}</b>: {human_bytes(link.total_bytes)} in {len(link):,} boxes, "
        f"{how_many(len(link.bucket_sizes), 'bucket')}, {share:.0%} contiguous"
    )
    rows = [
        [escape(plan.leaves[i].path), human_bytes(n), _level(n / top[0][1])]
        for i, n in top
    ]
    note = unseen(int((weight > 0).sum()) - len(top), "{:,} more leaves")
    heads = ("heaviest leaves", "bytes", "")
    return f'<div style="{BOX};border-top:1px solid {LINE};padding:6px 0">{head}{table(heads, rows, (1,))}{note}</div>'


# ----------------------------------------------------------------------------------------------------

MAX_ROWS = 100  # links in the HTML table
MAX_TICKS = 32  # rank numbers below the heat map
MAX_LINES = 16  # links that `jvlab plan` prints


def plan_summary(plan: TransferPlan) -> dict[str, Any]:
    """The plan's totals over the links of all replicas."""
    table = plan.all_links
    total = int(table.nbytes.sum())
    return {
        "title": plan.title,
        "devices": len(plan.devices),
        "processes": len(np.unique(plan.processes)),
        "ranks": plan.ranks,
        "replicas": plan.replicas,
        "links": len(table),
        "bytes": total,
        "bytes_per_replica": total // plan.replicas,
        "device_bytes_max": int(np.bincount(table.device, weights=table.nbytes).max())
        if len(table)
        else 0,
        "link_bytes_max": int(table.nbytes.max(initial=0)),
        "link_bytes_min": int(table.nbytes.min()) if len(table) else 0,
        "copies": plan.copies * plan.replicas,
        "contiguous_share": float(table.contiguous_bytes.sum() / total)
        if total
        else 1.0,
        "buckets_at_least": int((-(-table.nbytes // plan.bucket_bytes)).sum()),
        "bucket_bytes": plan.bucket_bytes,
        "link_gbps": plan.link_gbps,
        "predicted_s": plan.predict(),
        "padding_elements": int(plan.target_padding.sum()),
        "digest": plan.digest,
    }


def plan_title(plan: TransferPlan) -> str:
    """What is planned: from how many devices to how many ranks."""
    title = f"{plan.title}: " if plan.title else ""
    return f"{title}{how_many(len(plan.devices), 'device')} → {plan.replicas} × {how_many(plan.ranks, 'rank')}"


def plan_headline(plan: TransferPlan, link_gbps: float | None = None) -> str:
    """How much, how long, in how many pieces: large."""
    s = plan_summary(plan)
    gbps = link_gbps or plan.link_gbps
    number, unit = human_bytes(s["bytes"]).split(" ")
    seconds, unit_s = human_seconds(plan.predict(gbps)).split(" ", 1)
    copies, copies_word = how_many(s["copies"], "copy", "copies").split(" ")
    return headlines(
        [
            (number, unit, f"over {how_many(s['links'], 'link')}"),
            (seconds, unit_s, f"predicted at {gbps:g} GB/s"),
            (copies, copies_word, f"{s['contiguous_share']:.0%} contiguous"),
        ]
    )


def plan_text(plan: TransferPlan) -> str:
    """The plan's repr."""
    s = plan_summary(plan)
    return (
        f"TransferPlan({plan_title(plan)}, "
        f"{human_bytes(s['bytes'])} over {how_many(s['links'], 'link')}, {how_many(s['copies'], 'copy', 'copies')}, "
        f"{s['contiguous_share']:.0%} contiguous, about {human_seconds(s['predicted_s'])} at {s['link_gbps']:g} GB/s)"
    )


def plan_lines(plan: TransferPlan, speeds: Sequence[float]) -> list[str]:
    """The plan as `jvlab plan` prints it."""
    s = plan_summary(plan)
    table = plan.all_links
    out = [
        plan_title(plan),
        f"  {human_bytes(s['bytes'])} over {how_many(s['links'], 'link')}, {how_many(s['copies'], 'copy', 'copies')}, "
        f"{s['contiguous_share']:.0%} of the bytes contiguous on both sides",
        f"  per link {human_bytes(s['link_bytes_min'])} to {human_bytes(s['link_bytes_max'])}, in buckets of "
        f"{human_bytes(s['bucket_bytes'])}: {s['buckets_at_least']:,} or a few more",
    ]
    out += [
        f"  at {g:g} GB/s per device and rank: about {plan.predict(g):.3g} s"
        for g in speeds
    ]
    for i in range(min(len(table), MAX_LINES)):
        share = table.contiguous_bytes[i] / table.nbytes[i]
        to = _rank_text(plan, table.replica[i], table.rank[i])
        out.append(
            f"    device {table.device[i]} → {to}: {human_bytes(int(table.nbytes[i]))}, "
            f"{table.copies[i]:,} copies, {share:.0%} contiguous"
        )
    if len(table) > MAX_LINES:
        out.append(f"    … {len(table) - MAX_LINES:,} more links")
    return out


def _rank_text(plan: TransferPlan, replica: int, rank: int) -> str:
    return f"replica {replica} rank {rank}" if plan.replicas > 1 else f"rank {rank}"


def plan_html(plan: TransferPlan) -> str:
    """Summary, heat map, buckets, predicted and measured seconds; the largest links in a collapsed table."""
    from jvlab.views._timeline import lanes_svg

    gbps = f"{plan.link_gbps:g} GB/s"
    lanes = lanes_svg(bucket_lanes(plan), "buckets on their way")
    return (
        f'<div style="{BOX}"><b>{escape(plan_title(plan))}</b>{plan_headline(plan)}'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px 32px">{heat_svg(plan)}{times_html(plan)}</div>'
        f'<div style="color:{FAINT}">buckets on their way, if each device sends and each rank takes {gbps}</div>{lanes}'
        f"{_link_table(plan)}</div>"
    )


def _link_table(plan: TransferPlan) -> str:
    links = plan.all_links
    order = np.argsort(-links.nbytes, kind="stable")[:MAX_ROWS]
    rows = []
    for i in order.tolist():
        share = links.contiguous_bytes[i] / links.nbytes[i]
        rows.append(
            (
                str(links.device[i]),
                str(links.process[i]),
                str(links.replica[i]),
                str(links.rank[i]),
                human_bytes(int(links.nbytes[i])),
                f"{links.copies[i]:,}",
                f"{share:.0%}",
            )
        )
    heads = ("device", "process", "replica", "rank", "bytes", "copies", "contiguous")
    words = "{:,} lighter links are not shown; <code>plan.all_links</code> has all."
    note = unseen(len(links) - len(order), words)
    return (
        f'<details><summary style="cursor:pointer">the {len(order)} heaviest links</summary>'
        f'<div style="max-height:360px;overflow:auto">{table(heads, rows, range(7))}</div>{note}</details>'
    )


def plan_figure(plan: TransferPlan) -> object:
    """The heat map as a matplotlib figure, its axes numbered by device and rank."""
    heat = link_heat(plan)
    columns = plan.replicas * plan.ranks
    wide = 1.8 + 0.35 * min(columns, 24)
    figure = new_figure(wide, 1.6 + 0.22 * min(len(plan.devices), 32))
    axes = figure.subplots()
    edges = np.array(heat.grid.shape) * (heat.down, heat.across) - 0.5
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    extent = (-0.5, edges[1], edges[0], -0.5)
    image = axes.imshow(heat.grid / 1e6, extent=extent, **look)
    title = "MB per link"
    if plan.replicas > 1:
        title += f", {plan.replicas} replicas of {plan.ranks} side by side"
        step = max(plan.ranks // max(MAX_TICKS // plan.replicas, 1), 1)
        ticks = [c for c in range(columns) if c % plan.ranks % step == 0]
        ticks = ticks[: 4 * MAX_TICKS]
        axes.set_xticks(ticks, [str(c % plan.ranks) for c in ticks], fontsize=7)
    for r in range(1, plan.replicas):
        axes.axvline(r * plan.ranks - 0.5, color="white", linewidth=0.8)
    axes.set(xlabel="rollout rank", ylabel="trainer device", title=title)
    figure.colorbar(image, ax=axes, label=heat.block)
    return figure


class PlanPanel(Panel):
    """The plan's panel; `predict` and `select` do the same as its field and clicks."""

    hz = 1.0  # a sync may have been measured
    moving = False
    scripts = ("lanes.js", "plan.js")
    css = ("lanes.css",)
    css_class = "jv-plan-panel"
    traits: ClassVar[dict[str, Any]] = {
        "title": "",
        "headline": "",
        "heat": "",
        "times": "",
        "detail": "",
        "note": "",
        "picked": -1,
        "gbps": 50.0,
        "lanes": {},
    }

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._last_version = -1
        super().__init__(plan)

    def build(self) -> Any:
        gbps = self.plan.link_gbps
        widget = self.new_widget(
            title=plan_title(self.plan),
            headline=plan_headline(self.plan),
            heat=heat_svg(self.plan),
            times=times_html(self.plan),
            gbps=gbps,
            lanes=bucket_lanes(self.plan).plain(),
        )
        widget.observe(lambda change: self._picked(change["new"]), "picked")
        widget.on_msg(self._pressed)
        return widget

    def refresh(self) -> None:
        newest = self.plan.reports[-1].version if self.plan.reports else -1
        if newest != self._last_version:
            self._last_version = newest
            self.widget.times = times_html(self.plan, self.widget.gbps)

    def say(self, text: str, bad: bool = False) -> None:
        self.widget.note = text

    def _pressed(self, _: Any, message: dict[str, Any], __: Any) -> None:
        if message.get("do") == "predict":
            self.act(lambda: self.predict(message["gbps"]))

    def predict(self, link_gbps: float) -> float:
        """`plan.predict(link_gbps)`, shown with the schedule of buckets at that speed."""
        if not isinstance(link_gbps, (int, float)) or not link_gbps > 0:
            raise ConfigError(
                f"GB/s must be above 0, not {link_gbps!r}",
                remedy="50 is a 400 Gb/s port",
            )
        with self.widget.hold_sync():
            self.widget.gbps = float(link_gbps)
            self.widget.times = times_html(self.plan, link_gbps)
            self.widget.headline = plan_headline(self.plan, link_gbps)
            self.widget.lanes = bucket_lanes(self.plan, link_gbps).plain()
        self.say("")
        return self.plan.predict(link_gbps)

    def select(self, device: int, rank: int, replica: int = 0) -> LinkPlan:
        """`plan.link(device, rank, replica)`, shown below the heat map."""
        links = self.plan.all_links
        found = (
            (links.device == device) & (links.rank == rank) & (links.replica == replica)
        ).nonzero()[0]
        if not len(found):
            raise ConfigError(
                f"device {device} sends nothing to rank {rank} of replica {replica}"
            )
        self.widget.picked = int(found[0])
        return self.plan.link(device, rank, replica)

    def _picked(self, at: int) -> None:
        self.widget.detail = (
            link_html(self.plan, at) if 0 <= at < len(self.plan.all_links) else ""
        )

    def __repr__(self) -> str:
        return f"PlanPanel({len(self.plan.all_links)} links)"

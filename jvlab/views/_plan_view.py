"""A transfer plan as text, HTML, and a heat map of bytes per link."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._units import how_many, human_bytes, human_seconds
from jvlab.views._figures import new_figure
from jvlab.views._style import BOX, FAINT, headlines, table

if TYPE_CHECKING:
    from jvlab.layout._plan import LinkTable, TransferPlan

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
        "device_bytes_max": int(np.bincount(table.device, weights=table.nbytes).max()) if len(table) else 0,
        "link_bytes_max": int(table.nbytes.max(initial=0)),
        "link_bytes_min": int(table.nbytes.min()) if len(table) else 0,
        "copies": plan.copies * plan.replicas,
        "contiguous_share": float(table.contiguous_bytes.sum() / total) if total else 1.0,
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
    s, gbps = plan_summary(plan), link_gbps or plan.link_gbps
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
    s, table = plan_summary(plan), plan.all_links
    out = [
        plan_title(plan),
        f"  {human_bytes(s['bytes'])} over {how_many(s['links'], 'link')}, {how_many(s['copies'], 'copy', 'copies')}, "
        f"{s['contiguous_share']:.0%} of the bytes contiguous on both sides",
        f"  per link {human_bytes(s['link_bytes_min'])} to {human_bytes(s['link_bytes_max'])}, in buckets of "
        f"{human_bytes(s['bucket_bytes'])}: {s['buckets_at_least']:,} or a few more",
    ]
    out += [f"  at {g:g} GB/s per device and rank: about {plan.predict(g):.3g} s" for g in speeds]
    for i in range(min(len(table), MAX_LINES)):
        share = table.contiguous_bytes[i] / table.nbytes[i]
        out.append(
            f"    device {table.device[i]} → {_rank_text(plan, table, i)}: {human_bytes(int(table.nbytes[i]))}, "
            f"{table.copies[i]:,} copies, {share:.0%} contiguous"
        )
    if len(table) > MAX_LINES:
        out.append(f"    … {len(table) - MAX_LINES:,} more links")
    return out


def _rank_text(plan: TransferPlan, table: LinkTable, i: int) -> str:
    return f"replica {table.replica[i]} rank {table.rank[i]}" if plan.replicas > 1 else f"rank {table.rank[i]}"


def plan_html(plan: TransferPlan) -> str:
    """Summary, heat map, buckets, predicted and measured seconds; the largest links in a collapsed table."""
    from jvlab.views._lanes_view import lanes_svg
    from jvlab.views._plan_parts import bucket_lanes, heat_svg, times_html

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
    more = len(links) - len(order)
    note = f"<p>{more:,} lighter links are not shown; <code>plan.all_links</code> has all.</p>" if more > 0 else ""
    return (
        f'<details><summary style="cursor:pointer">the {len(order)} heaviest links</summary>'
        f'<div style="max-height:360px;overflow:auto">{table(heads, rows, range(7))}</div>{note}</details>'
    )


def plan_figure(plan: TransferPlan) -> object:
    """Bytes per link: trainer devices as rows; the ranks of each replica as columns, replica by replica."""
    table, columns = plan.all_links, plan.replicas * plan.ranks
    grid = np.zeros((len(plan.devices), columns))
    grid[np.searchsorted(plan.devices, table.device), table.replica * plan.ranks + table.rank] = table.nbytes / 1e6
    figure = new_figure(1.8 + 0.35 * min(columns, 24), 1.6 + 0.22 * min(len(plan.devices), 32))
    axes = figure.subplots()
    image = axes.imshow(grid, aspect="auto", interpolation="nearest")
    several = f", {plan.replicas} replicas of {plan.ranks} side by side" if plan.replicas > 1 else ""
    for r in range(1, plan.replicas):
        axes.axvline(r * plan.ranks - 0.5, color="white", linewidth=0.8)
    axes.set(xlabel="rollout rank", ylabel="trainer device", title=f"MB per link{several}")
    if plan.replicas > 1:
        step = max(plan.ranks // max(MAX_TICKS // plan.replicas, 1), 1)
        ticks = [c for c in range(columns) if c % plan.ranks % step == 0][: 4 * MAX_TICKS]
        axes.set_xticks(ticks, [str(c % plan.ranks) for c in ticks], fontsize=7)
    figure.colorbar(image, ax=axes)
    return figure

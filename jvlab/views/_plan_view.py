"""Faces of a transfer plan: text, HTML, a heat map of bytes per link."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.views._units import human_bytes

if TYPE_CHECKING:
    from jvlab.layout._plan import LinkTable, TransferPlan

MAX_ROWS = 200  # links in the HTML table
MAX_TICKS = 32  # rank numbers under the heat map
MAX_LINES = 16  # links that the command prints
CELL = "padding:2px 10px 2px 0;text-align:right;white-space:nowrap"


def plan_summary(plan: TransferPlan) -> dict[str, Any]:
    """The plan in plain numbers, over the links of all replicas."""
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


def plan_text(plan: TransferPlan) -> str:
    """The stable text face."""
    s = plan_summary(plan)
    title = f"{s['title']}: " if s["title"] else ""
    return (
        f"TransferPlan({title}{s['devices']} device{'s' * (s['devices'] != 1)} → {s['replicas']} × {s['ranks']} ranks, "
        f"{human_bytes(s['bytes'])} over {s['links']} links, {s['copies']:,} copies, "
        f"{s['contiguous_share']:.0%} contiguous, about {s['predicted_s']:.3g} s at {s['link_gbps']:g} GB/s)"
    )


def plan_lines(plan: TransferPlan, speeds: Sequence[float]) -> list[str]:
    """The plan as the command prints it."""
    s, table = plan_summary(plan), plan.all_links
    out = [
        f"{s['title']}: {s['devices']} devices → {s['replicas']} × {s['ranks']} ranks",
        f"  {human_bytes(s['bytes'])} over {s['links']} links, {s['copies']:,} copies, "
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
    """The summary and the heaviest links; colours are inherited, so that it suits dark and light."""
    table = plan.all_links
    order = np.argsort(-table.nbytes, kind="stable")[:MAX_ROWS]
    rows = []
    for i in order.tolist():
        share = table.contiguous_bytes[i] / table.nbytes[i]
        cells = (
            str(table.device[i]), str(table.process[i]), str(table.replica[i]), str(table.rank[i]),
            human_bytes(int(table.nbytes[i])), f"{table.copies[i]:,}", f"{share:.0%}",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f'<td style="{CELL}">{c}</td>' for c in cells) + "</tr>")
    heads = "".join(
        f'<th style="{CELL};border-bottom:1px solid #8888">{h}</th>'
        for h in ("device", "process", "replica", "rank", "bytes", "copies", "contiguous")
    )
    more = len(table) - len(order)
    note = f"<p>{more:,} lighter links are not shown; <code>plan.all_links</code> has all.</p>" if more > 0 else ""
    return (
        f'<div style="color:inherit;background:transparent">{escape(plan_text(plan))}'
        '<div style="max-height:360px;overflow:auto"><table style="border-collapse:collapse;color:inherit">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}</div>"
    )


def plan_figure(plan: TransferPlan) -> object:
    """Bytes per link: trainer devices down; the ranks of each replica across, replica by replica."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingDependency("figures need matplotlib", remedy='pip install "jvlab[notebook]"') from e
    table, columns = plan.all_links, plan.replicas * plan.ranks
    grid = np.zeros((len(plan.devices), columns))
    grid[np.searchsorted(plan.devices, table.device), table.replica * plan.ranks + table.rank] = table.nbytes / 1e6
    figure = Figure(
        figsize=(1.8 + 0.35 * min(columns, 24), 1.6 + 0.22 * min(len(plan.devices), 32)), layout="constrained"
    )
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

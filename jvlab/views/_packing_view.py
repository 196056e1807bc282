"""A figure of how samples lie in the rows of a step: each sample in its colour, padding hatched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab.views._drawing import ink
from jvlab.views._figures import new_figure
from jvlab.views._style import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.trainer._micro_batches import Packing

ROW = 0.16  # inches
NUMBERED = 0.05  # of the width: a sample that is at least as wide shows its number
MAX_ROWS = 120


def packing_figure(*packings: Packing) -> Figure:
    """One panel for each packing, side by side, on the same scale of tokens."""
    most = min(max(len(p.rows) for p in packings), MAX_ROWS)
    longest = max(max(p.widths) for p in packings)
    figure = new_figure(5.2 * len(packings), 1.1 + ROW * most)
    for axes, packing in zip(
        figure.subplots(1, len(packings), squeeze=False)[0], packings, strict=True
    ):
        _rows(axes, packing, longest)
        passes = len(packing.shapes)
        shapes = packing.compiled
        counts = (
            f"{passes} pass{'es' * (passes != 1)}, {shapes} shape{'s' * (shapes != 1)}"
        )
        axes.set_title(
            f"{100 * packing.padding:.1f} % padding, {counts}", fontsize=10, loc="left"
        )
        axes.set(xlim=(0, longest), ylim=(most - 0.4, -0.6), yticks=[])
        axes.set_xlabel("tokens of a row", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _rows(axes: Any, packing: Packing, longest: int) -> None:
    for y, (samples, width) in enumerate(
        zip(packing.rows[:MAX_ROWS], packing.widths, strict=False)
    ):
        at = 0
        for sample in samples:
            size = int(packing.lengths[sample])
            axes.barh(
                y,
                size,
                left=at,
                height=0.8,
                color=PALETTE[sample % len(PALETTE)],
                edgecolor="white",
                linewidth=0.6,
            )
            if size > NUMBERED * longest:
                shade = ink(sample % len(PALETTE))
                axes.text(
                    at + size / 2,
                    y,
                    str(sample),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=shade,
                )
            at += size
        if at < width:
            axes.barh(
                y,
                width - at,
                left=at,
                height=0.8,
                facecolor="none",
                edgecolor="#999999",
                hatch="////",
                linewidth=0,
            )
    first = 0
    for count, _ in packing.shapes[:-1]:  # a line between micro-batches
        first += count
        if first < MAX_ROWS:
            axes.axhline(first - 0.5, color="#999999", linewidth=0.5)
    if len(packing.rows) > MAX_ROWS:
        axes.text(
            0, MAX_ROWS - 0.5, f"{len(packing.rows) - MAX_ROWS} more rows", fontsize=7
        )

"""A diagram of what a rule does to a leaf's axes: each axis is a coloured box, connected to its place in the tensor."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab.views._style import PALETTE

if TYPE_CHECKING:
    from jvlab.layout._types import Axis, Binding

BOX, GAP, ROW, LINK = 46, 22, 24, 74  # px: width of a box, gap between dimensions, height of a box, space for the lines


def axes_svg(b: Binding) -> str:
    """The leaf's dimensions above, the tensor's below; boxes without a gap are axes merged into one dimension."""
    top = _positions([(a.leaf_dim, -a.leaf_step, a) for a in b.axes], len(b.leaf_shape))
    low = _positions([(a.tensor_dim, -a.tensor_step, a) for a in b.axes], len(b.tensor_shape))
    number = {id(a): i for i, a in enumerate(sorted(b.axes, key=lambda a: (a.leaf_dim, -a.leaf_step)))}
    words = ", ".join([*([f"{b.add:+g}"] if b.add else []), *([f"cast to {b.cast}"] if b.cast else [])])
    right = max(x + BOX for x, _ in (*top.values(), *low.values()))
    width = max(right + (10 + 7 * len(words) if words else 0), 180)
    y0, y1 = 20, 20 + ROW + LINK
    lines = "".join(
        _line(top[id(a)][0] + BOX / 2, y0 + ROW, low[id(a)][0] + BOX / 2, y1, _colour(number[id(a)])) for a in b.axes
    )
    extra = f'<text x="{right + 10}" y="{y0 + ROW + LINK / 2 + 4}" fill="currentColor">{escape(words)}</text>'
    return (
        f'<svg width="{width}" height="{y1 + ROW + 22}" font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="axes of {escape(b.leaf, quote=True)}">{lines}{extra}'
        f"{_boxes(b.axes, top, number, y0)}{_boxes(b.axes, low, number, y1)}"
        f'<text x="0" y="{y0 - 8}" fill="currentColor">leaf {list(b.leaf_shape)}</text>'
        f'<text x="0" y="{y1 + ROW + 16}" fill="currentColor">tensor {list(b.tensor_shape)}</text></svg>'
    )


def _line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    half = (y1 - y0) / 2
    path = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + half:.0f} {x1:.0f},{y1 - half:.0f} {x1:.0f},{y1:.0f}"
    return f'<path d="{path}" fill="none" stroke-width="2" stroke="{colour}"/>'


def _positions(keys: list[tuple[int, int, Axis]], dims: int) -> dict[int, tuple[float, int]]:
    """The x position of each axis: dimension by dimension, slowest axis first."""
    out: dict[int, tuple[float, int]] = {}
    x = 0.0
    for dim in range(dims):
        for _, _, axis in sorted((k for k in keys if k[0] == dim), key=lambda k: k[1]):
            out[id(axis)] = (x, dim)
            x += BOX + 2
        x += GAP
    return out


def _boxes(axes: tuple[Axis, ...], positions: dict[int, tuple[float, int]], number: dict[int, int], y: float) -> str:
    out = []
    for a in axes:
        x, which = positions[id(a)][0], number[id(a)]
        at = f'x="{x + BOX / 2}" y="{y + ROW / 2 + 4}"'
        out.append(
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{ROW}" rx="3" fill="{_colour(which)}"/>'
            f'<text {at} text-anchor="middle" fill="{_ink(which)}">{a.size}</text>'
        )
    return "".join(out)


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _ink(i: int) -> str:
    """Black, or white on the two dark colours of the palette."""
    return "#fff" if i % len(PALETTE) in (0, 5) else "#000"

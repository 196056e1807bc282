"""A diagram of what a rule does to a leaf's axes: each axis is a coloured box, connected to its place in the tensor."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab.layout._slices import fixed_dims
from jvlab.views._style import PALETTE

if TYPE_CHECKING:
    from jvlab.layout._types import Axis, Binding

BOX, GAP, ROW, LINK = 46, 22, 24, 74  # px: width of a box, gap between dimensions, height of a box, space for the lines


def axes_svg(b: Binding) -> str:
    """The leaf's dimensions above, the tensor's below; boxes without a gap are axes merged into one dimension.

    A dashed box without a line is a dimension of which one index is taken: a layer of a stacked leaf.
    """
    fixed = fixed_dims(b)
    top, held = _positions([(a.leaf_dim, -a.leaf_step, a) for a in b.axes], len(b.leaf_shape), fixed)
    low, _ = _positions([(a.tensor_dim, -a.tensor_step, a) for a in b.axes], len(b.tensor_shape))
    number = {id(a): i for i, a in enumerate(sorted(b.axes, key=lambda a: (a.leaf_dim, -a.leaf_step)))}
    words = ", ".join([*([f"{b.add:+g}"] if b.add else []), *([f"cast to {b.cast}"] if b.cast else [])])
    right = max(x + BOX for x in (*top.values(), *low.values(), *held.values()))
    width = max(right + (10 + 7 * len(words) if words else 0), 180)
    y0, y1 = 20, 20 + ROW + LINK
    lines = "".join(
        _line(top[id(a)] + BOX / 2, y0 + ROW, low[id(a)] + BOX / 2, y1, _colour(number[id(a)])) for a in b.axes
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
            x += BOX + 2
        for _, _, axis in sorted((k for k in keys if k[0] == dim), key=lambda k: k[1]):
            out[id(axis)] = x
            x += BOX + 2
        x += GAP
    return out, held


def _taken(b: Binding, positions: dict[int, float], y: float) -> str:
    """The dimensions of which one index is taken: `[1]`, below it how many there are."""
    out = []
    for dim, x in positions.items():
        at, size = b.leaf_start[dim], b.leaf_shape[dim]
        middle = f'x="{x + BOX / 2}" text-anchor="middle" fill="currentColor"'
        out.append(
            f"<g><title>index {at} of {size} along dim {dim}: the other slices go to other tensors</title>"
            f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{BOX - 1}" height="{ROW - 1}" rx="3" fill="none" '
            f'stroke="currentColor" stroke-dasharray="3 2"/><text {middle} y="{y + ROW / 2 + 4}">[{at}]</text>'
            f'<text {middle} y="{y + ROW + 13}" font-size="10">of {size}</text></g>'
        )
    return "".join(out)


def _boxes(axes: tuple[Axis, ...], positions: dict[int, float], number: dict[int, int], y: float) -> str:
    out = []
    for a in axes:
        x, which = positions[id(a)], number[id(a)]
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

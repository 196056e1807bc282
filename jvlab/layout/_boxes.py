"""Strided box algebra in mixed radix: split, intersect, paint and test boxes for an exact partition. numpy only.

A strided box is an offset and axes (size, stride). Where all strides form a chain (each divides the next), an
index is a row of digits, every box is a few digit boxes (an interval per digit), and everything else is intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._types import Shape

# pieces that one pair of boxes with unrelated strides may fall into
MAX_ENUMERATED = 65536
MAX_CELLS = 1 << 25  # cells of a compressed grid; a finer one is painted in parts

# size, its stride in each array, and what must agree to merge
StridedAxis = tuple[int, Shape, Any]


def merge_axes(axes: Iterable[StridedAxis]) -> list[StridedAxis]:
    """Axes, outermost first, without axes of size one; neighbours that are contiguous in every array are merged."""
    out: list[StridedAxis] = []
    for size, strides, kind in axes:
        if size == 1:
            continue
        if (
            out
            and out[-1][2] == kind
            and out[-1][1] == tuple(size * s for s in strides)
        ):
            out[-1] = (out[-1][0] * size, strides, kind)
        else:
            out.append((size, strides, kind))
    return out


def unique_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """First index of each distinct row, and each row's class; classes are numbered by their first appearance."""
    flat = [c.reshape(len(c), -1).astype(np.int64, copy=False) for c in columns]
    table = np.concatenate(flat, axis=1)
    order = np.lexsort(table.T)
    table = table[order]
    fresh = np.ones(len(table), bool)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    cls = np.empty(len(table), np.int64)
    cls[order] = np.cumsum(fresh) - 1
    first = order[fresh]  # a sort keeps the order of equals
    rank = np.argsort(np.argsort(first))
    return np.sort(first), rank[cls]


def split_intervals(
    lo: np.ndarray, hi: np.ndarray, radices: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split intervals [lo, hi) of non-negative integers into digit boxes: (which interval, digit lows, digit highs).

    Digit 0 is the lowest; `radices[l]` is the radix of digit l, the last is unbounded. Empty intervals are dropped.
    """
    keep = np.flatnonzero(hi > lo)
    lo = lo[keep]
    hi = hi[keep]
    if not radices:
        return keep, lo[:, None], hi[:, None]
    radix = radices[0]
    above = radices[1:]
    first = lo // radix
    last = (hi - 1) // radix
    left = lo % radix
    right = (hi - 1) % radix + 1
    one = first == last
    head = ~one & (left > 0)
    tail = ~one & (right < radix)
    body_lo = first + (left > 0)
    body_hi = last + (right == radix)
    body = ~one & (body_hi > body_lo)
    zero = np.zeros_like(lo)
    full = np.full_like(lo, radix)
    parts = [
        (one, left, right, first, first + 1),
        (head, left, full, first, first + 1),
        (body, zero, full, body_lo, body_hi),
        (tail, zero, right, last, last + 1),
    ]
    interval = np.concatenate([np.flatnonzero(m) for m, *_ in parts])
    columns = [np.concatenate([p[k][p[0]] for p in parts]) for k in (1, 2, 3, 4)]
    up, up_lo, up_hi = split_intervals(columns[2], columns[3], above)
    low = np.concatenate([columns[0][up, None], up_lo], axis=1)
    high = np.concatenate([columns[1][up, None], up_hi], axis=1)
    index = keep[interval[up]]
    order = np.argsort(index, kind="stable")
    return index[order], low[order], high[order]


def clip_axes(
    steps: Sequence[int], sizes: Sequence[int], lo: np.ndarray, hi: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where Σ i_a·steps[a] falls into [lo[k], hi[k]), as boxes of i: (k, lows [N, A], highs [N, A])."""
    if not steps:
        index = np.flatnonzero((lo <= 0) & (hi > 0))
        empty = np.zeros((len(index), 0), np.int64)
        return index, empty, empty
    if len(steps) == 1:  # the usual case, vectorised over all intervals
        low = np.clip(-(-lo // steps[0]), 0, sizes[0])
        high = np.clip(-(-hi // steps[0]), 0, sizes[0])
        index = np.flatnonzero(high > low)
        return index, low[index, None], high[index, None]
    order = sorted(range(len(steps)), key=lambda a: steps[a])
    chain = stride_chain([steps[a] for a in order] + [1])
    if chain is None or len(set(steps)) < len(steps):
        raise LayoutError(
            f"axes with steps {tuple(steps)} share one leaf dimension, but no step divides the next",
            remedy="write the rule so that merged axes nest, e.g. (n h)",
            steps=tuple(steps),
        )
    radices = [b // a for a, b in itertools.pairwise(chain)]
    top = sum((n - 1) * s for n, s in zip(sizes, steps, strict=True)) + 1
    index, low, high = split_intervals(
        np.clip(lo, 0, top), np.clip(hi, 0, top), radices
    )
    keep = np.ones(len(index), bool)
    axis_lo = np.zeros((len(index), len(steps)), np.int64)
    axis_hi = np.ones((len(index), len(steps)), np.int64)
    owner = {steps[a]: a for a in order}
    for level, stride in enumerate(chain):
        if stride in owner:
            a = owner[stride]
            axis_lo[:, a], axis_hi[:, a] = (
                low[:, level],
                np.minimum(high[:, level], sizes[a]),
            )
            keep &= axis_hi[:, a] > axis_lo[:, a]
        else:  # between two lattice steps: only digit 0 belongs to the lattice
            keep &= low[:, level] == 0
    return index[keep], axis_lo[keep], axis_hi[keep]


def stride_chain(strides: Sequence[int]) -> list[int] | None:
    """The distinct strides, ascending, if each divides the next; else None."""
    chain = sorted({s for s in strides if s > 0})
    if any(b % a for a, b in itertools.pairwise(chain)):
        return None
    return chain


@dataclass(frozen=True)
class Strided:
    """One side of a copy: an offset and axes, each with a size and a stride in that side's index space."""

    offset: int
    sizes: Shape
    strides: Shape

    def live(self) -> list[int]:
        """Axes longer than one, by ascending stride."""
        axes = [a for a, n in enumerate(self.sizes) if n > 1]
        return sorted(axes, key=lambda a: self.strides[a])

    def digit_boxes(self, chain: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """This box as digit boxes over the radix chain: lows and highs, [N, levels] each."""
        offset = np.array([self.offset], np.int64)
        shape = np.array([self.sizes], np.int64)
        strides = np.array([self.strides], np.int64)
        found = _to_digits(chain, offset, shape, strides)
        if isinstance(found, list):
            raise LayoutError("the box overlaps itself", sizes=self.sizes)
        _, low, high = found
        return low, high

    def decode(self, value: int) -> list[int]:
        """Axis indices of the element at flat position `value` (which must belong to the box)."""
        index = [0] * len(self.sizes)
        rest = value - self.offset
        for a in reversed(self.live()):
            index[a], rest = divmod(rest, self.strides[a])
        return index


def partition_defects(
    domain: Strided, offset: np.ndarray, shape: np.ndarray, strides: np.ndarray
) -> tuple[int, int, list[int]]:
    """Do the boxes partition the domain? (elements missing, elements written too often or outside, boxes at fault).

    Exact: all boxes become digit boxes over one chain of strides, painted on a grid compressed to their own cuts.
    Boxes whose strides fit no chain are painted element by element.
    """
    live = shape > 1
    if (live & (strides <= 0)).any():
        bad = np.flatnonzero((live & (strides <= 0)).any(axis=1))
        return 0, int(shape[bad].prod(axis=1).sum()), bad[:2].tolist()
    chain = stride_chain(
        [
            1,
            *(s for n, s in zip(domain.sizes, domain.strides, strict=True) if n > 1),
            *np.unique(strides[live]).tolist(),
        ]
    )
    if chain is None:
        return _paint_elements(domain, offset, shape, strides)
    found = _to_digits(chain, offset, shape, strides)
    if isinstance(found, list):
        return 0, int(shape[found].prod(axis=1).sum()), found[:2]
    box_index, low, high = found
    wanted_low, wanted_high = domain.digit_boxes(chain)
    return _grid_defects(box_index, low, high, wanted_low, wanted_high)


def _grid_defects(
    box_index: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    wanted_low: np.ndarray,
    wanted_high: np.ndarray,
) -> tuple[int, int, list[int]]:
    """`partition_defects` of digit boxes: painted on one grid, or, where it would be too fine, in two halves."""
    ends = np.concatenate([low, high, wanted_low, wanted_high])
    cuts = [np.unique(column) for column in ends.T]
    if np.prod([float(len(c)) for c in cuts]) > MAX_CELLS:
        k = int(np.argmax([len(c) for c in cuts]))
        middle = cuts[k][len(cuts[k]) // 2]
        halves = []
        for least, most in ((cuts[k][0], middle), (middle, cuts[k][-1])):
            mine, *boxes = _clipped(low, high, k, least, most)
            _, *wanted = _clipped(wanted_low, wanted_high, k, least, most)
            halves.append(_grid_defects(box_index[mine], *boxes, *wanted))
        (missing, extra, fault), (more_missing, more_extra, more_fault) = halves
        return missing + more_missing, extra + more_extra, fault or more_fault
    count, volume = _paint(cuts, low, high)
    expected, _ = _paint(cuts, wanted_low, wanted_high)
    missing = int(volume[(expected > 0) & (count == 0)].sum())
    wrong = (count > 1) | ((count > 0) & (expected == 0))
    extra = int((volume * np.where(expected > 0, count - 1, count))[wrong].sum())
    return missing, extra, _at_fault(cuts, wrong, box_index, low, high)


def _clipped(
    low: np.ndarray, high: np.ndarray, k: int, least: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts of digit boxes that lie between two values of digit k: of which box, lows and highs."""
    mine = np.flatnonzero((low[:, k] < most) & (high[:, k] > least))
    low = low[mine]
    high = high[mine]
    low[:, k] = np.maximum(low[:, k], least)
    high[:, k] = np.minimum(high[:, k], most)
    return mine, low, high


def _at_fault(
    cuts: list[np.ndarray],
    wrong: np.ndarray,
    box_index: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> list[int]:
    if not wrong.any():
        return []
    cell = np.array([c[i] for c, i in zip(cuts, np.argwhere(wrong)[0], strict=True)])
    inside = ((low <= cell) & (cell < high)).all(axis=1)
    return np.unique(box_index[inside])[:2].tolist()


def _paint(
    cuts: list[np.ndarray], low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many boxes cover each cell of the compressed grid, and each cell's volume."""
    grid = np.zeros([len(c) for c in cuts], np.int64)
    at = [
        (np.searchsorted(c, low[:, k]), np.searchsorted(c, high[:, k]))
        for k, c in enumerate(cuts)
    ]
    for corner in range(1 << len(cuts)):
        sign = -1 if bin(corner).count("1") % 2 else 1
        np.add.at(grid, tuple(at[k][(corner >> k) & 1] for k in range(len(cuts))), sign)
    for k in range(len(cuts)):
        np.cumsum(grid, axis=k, out=grid)
    volume = np.ones([1] * len(cuts), np.int64)
    for k, c in enumerate(cuts):
        width = np.append(np.diff(c), 0)
        volume = volume * width.reshape([-1 if j == k else 1 for j in range(len(cuts))])
    return grid, volume


def _to_digits(
    chain: list[int], offset: np.ndarray, shape: np.ndarray, strides: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | list[int]:
    """All boxes as digit boxes (which box, lows, highs); or the boxes that overlap themselves or lie below zero.

    The idea: adding an axis to an offset is adding with carry, one digit at a time. The digits of this level run from
    the offset's own digit (plus carry) over as many as its axis has. Where that run passes the radix, it falls into
    pieces, and what each piece carries goes to the next level.

    The invariant: a piece is a product of intervals, so it may carry several units (`spill`) only while all levels
    below are whole. An axis on a level that receives several units would count some elements twice: an error.

    Example: the chain 1, 4, 12 (radices 4 and 3), offset 6 = digits 2, 1, 0, and one axis of 10 with stride 1, so the
    elements 6 to 15. Level 0 runs over [2, 12). Radix 4 cuts it to [2, 4) with carry 0, and [0, 4) with carries [1, 3).
    Level 1, whose own digit is 1: the first piece is at [1, 2); the second, with spill 2, is [2, 4), which radix 3 cuts
    to digit 2 and, with carry 1, digit 0. Level 2 is unbounded. Three boxes, as (digit 0, digit 1, digit 2):
    (2-3, 1, 0) = 6, 7; (0-3, 2, 0) = 8 … 11; (0-3, 0, 1) = 12 … 15.
    """
    count = len(offset)
    levels = len(chain)
    if (offset < 0).any():
        return np.flatnonzero(offset < 0).tolist()
    sizes = np.ones((count, levels), np.int64)
    for level, stride in enumerate(chain):
        here = (shape > 1) & (strides == stride)
        twice = here.sum(axis=1) > 1
        if twice.any():
            return np.flatnonzero(twice).tolist()
        sizes[:, level] = np.where(here, shape, 1).max(axis=1, initial=1)
    box_index = np.arange(count)
    low = np.zeros((count, 0), np.int64)
    high = np.zeros((count, 0), np.int64)
    carry = np.zeros(count, np.int64)
    spill = np.ones(count, np.int64)
    for level, stride in enumerate(chain):
        size = sizes[box_index, level]
        clash = (size > 1) & (spill > 1)
        if clash.any():
            return np.unique(box_index[clash]).tolist()
        if level == levels - 1:
            start = offset[box_index] // stride + carry
            return (
                box_index,
                np.concatenate([low, start[:, None]], axis=1),
                np.concatenate(
                    [high, (start + np.maximum(size, spill))[:, None]], axis=1
                ),
            )
        radix = chain[level + 1] // stride
        start = (offset[box_index] // stride) % radix + carry
        index, lows, highs = split_intervals(
            start, start + np.maximum(size, spill), [radix]
        )
        box_index = box_index[index]
        low = np.concatenate([low[index], lows[:, :1]], axis=1)
        high = np.concatenate([high[index], highs[:, :1]], axis=1)
        carry = lows[:, 1]
        spill = highs[:, 1] - lows[:, 1]
    raise AssertionError("a chain has at least one level")


def _paint_elements(
    domain: Strided, offset: np.ndarray, shape: np.ndarray, strides: np.ndarray
) -> tuple[int, int, list[int]]:
    def elements(start: int, sizes: Sequence[int], steps: Sequence[int]) -> np.ndarray:
        flat = np.array([start], np.int64)
        for n, s in zip(sizes, steps, strict=True):
            flat = (flat[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
        return flat

    wanted = elements(domain.offset, domain.sizes, domain.strides)
    boxes = zip(offset.tolist(), shape.tolist(), strides.tolist(), strict=True)
    pieces = [elements(*box) for box in boxes]
    written = np.concatenate([*pieces, np.zeros(0, np.int64)])
    seen, count = np.unique(written, return_counts=True)
    inside = np.isin(seen, wanted)
    bad = seen[(count > 1) | ~inside]
    fault = [k for k, piece in enumerate(pieces) if len(bad) and bad[0] in piece]
    missing = int(len(wanted) - inside.sum())
    return missing, int((count - inside).sum()), fault[:2]


def contiguous(shape: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Which boxes [N, K] are one contiguous run, whatever the order of their axes."""
    big = np.iinfo(np.int64).max
    order = np.argsort(np.where(shape > 1, strides, big), axis=1, kind="stable")
    sizes = np.take_along_axis(shape, order, 1)
    steps = np.take_along_axis(strides, order, 1)
    expect = np.concatenate(
        [np.ones((len(shape), 1), np.int64), np.cumprod(sizes, axis=1)[:, :-1]], axis=1
    )
    return ((steps == expect) | (sizes == 1)).all(axis=1)

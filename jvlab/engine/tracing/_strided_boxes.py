"""Algebra of strided boxes: views resolved exactly through re-ordering copies, and what a set of boxes covers.

A *box* is an offset, a shape and strides, in elements: the addresses offset + Σ i_d · stride_d. Pure Python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jvlab.layout._boxes import merge_axes


@dataclass(frozen=True)
class StridedAxis:
    """One axis of a part: `step` indices along dimension `dim` of a view are `stride` elements in the source."""

    dim: int
    size: int
    step: int
    stride: int


@dataclass(frozen=True)
class StridedPart:
    """A box of a view and where it comes from: `start[d]` is its first index in view dimension d."""

    source: int  # number of the root tensor
    offset: int  # in the root tensor, of the part's first element
    start: tuple[int, ...]
    axes: tuple[StridedAxis, ...]


@dataclass(frozen=True)
class Digits:
    """A re-ordered copy: its addresses, read as digits of a mixed radix, and for ranges of digits the source they hold.

    `sizes` and `strides` are the radix, largest stride first, dense. A range is (low, high) per digit, the root tensor,
    the offset there of the digits `low`, and the source stride of each digit.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]], ...]


def whole(source: int, offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[StridedPart]:
    """The one part of a plain view of root tensor `source`."""
    axes = tuple(StridedAxis(d, n, 1, s) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1)
    return [StridedPart(source, offset, (0,) * len(shape), axes)]


def _factor(
    digits: Digits, starts: list[int], dim: int, size: int, stride: int
) -> list[tuple[int, int, int, int]] | None:
    """Split one view dimension over the digits it runs through: (digit, size, digit step, index step) each."""
    found, index_step = [], 1
    while size > 1:
        k = next((k for k, s in enumerate(digits.strides) if s <= stride and stride % s == 0), None)
        if k is None:
            return None
        step = stride // digits.strides[k]
        if starts[k] + (size - 1) * step < digits.sizes[k]:
            found.append((k, size, step, index_step))
            return found
        count = digits.sizes[k] // step if digits.sizes[k] % step == 0 else 0
        if k == 0 or count < 1 or starts[k] >= step or size % count:
            return None  # the view crosses a digit's end in the middle of a step
        if count > 1:
            found.append((k, count, step, index_step))
        size, index_step, stride = size // count, index_step * count, digits.strides[k - 1]
    return found


def through(digits: Digits, offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[StridedPart] | None:
    """The parts of a view (offset, shape, strides) of a re-ordered copy, or None if there is no cheap exact answer."""
    starts = [offset // s % n for n, s in zip(digits.sizes, digits.strides, strict=True)]
    runs: list[list[tuple[int, int, int, int]]] = [[] for _ in digits.sizes]  # per digit: (dim, size, step, index step)
    repeats = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride == 0:
            repeats.append(StridedAxis(dim, size, 1, 0))
        elif size > 1:
            factors = _factor(digits, starts, dim, size, stride)
            if factors is None:
                return None
            for k, count, step, index_step in factors:
                runs[k].append((dim, count, step, index_step))
    for k, size in enumerate(digits.sizes):
        if starts[k] + sum((count - 1) * step for _, count, step, _ in runs[k]) >= size:
            return None
    parts = []
    for low, high, source, base, source_strides in digits.ranges:
        begin, axes = [0] * len(shape), list(repeats)
        for k, stride in enumerate(source_strides):
            first = starts[k]
            last = first + sum((count - 1) * step for _, count, step, _ in runs[k])
            if last < low[k] or first >= high[k]:
                break  # this range has no element of the view
            if len(runs[k]) == 1:
                dim, count, step, index_step = runs[k][0]
                skip = max(0, -(-(low[k] - first) // step))
                count = min(count, (high[k] - 1 - first) // step + 1) - skip
                if count <= 0:
                    break
                begin[dim] += skip * index_step
                first += skip * step
                axes.append(StridedAxis(dim, count, index_step, step * stride))
            elif first < low[k] or last >= high[k]:
                return None
            else:
                axes.extend(
                    StridedAxis(dim, count, index_step, step * stride) for dim, count, step, index_step in runs[k]
                )
            base += (first - low[k]) * stride
        else:
            parts.append(StridedPart(source, base, tuple(begin), tuple(a for a in axes if a.size > 1)))
    return parts


def reordered(parts: list[StridedPart], shape: Sequence[int], strides: Sequence[int]) -> Digits | None:
    """The digits of a dense copy, with these strides, of a view made of `parts`; None if it has no mixed radix."""
    if len(parts) == 1:
        axes = sorted(parts[0].axes, key=lambda a: -a.step * strides[a.dim])
        sizes, steps = tuple(a.size for a in axes), tuple(a.step * strides[a.dim] for a in axes)
        ranges = (((0,) * len(axes), sizes, parts[0].source, parts[0].offset, tuple(a.stride for a in axes)),)
    else:
        dims = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
        sizes, steps = tuple(shape[d] for d in dims), tuple(strides[d] for d in dims)
        ranges = tuple(_range(part, dims) for part in parts)
        if any(r is None for r in ranges):
            return None
    dense = all(a == b * n for (a, b), n in zip(pairwise((*steps, 1)), (*sizes[1:], 1), strict=True)) if steps else True
    if not dense:
        return None
    return Digits(sizes, steps, tuple(r for r in ranges if r is not None))


def _range(
    part: StridedPart, dims: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]] | None:
    by_dim = {a.dim: a for a in part.axes}
    if len(by_dim) != len(part.axes) or any(a.step != 1 for a in part.axes):
        return None  # a dimension that is split further: not supported
    low = tuple(part.start[d] for d in dims)
    high = tuple(part.start[d] + (by_dim[d].size if d in by_dim else 1) for d in dims)
    return low, high, part.source, part.offset, tuple(by_dim[d].stride if d in by_dim else 0 for d in dims)


@dataclass(frozen=True)
class Row:
    """One strided copy from a root tensor into a parameter."""

    source: int
    target: int
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]


def row(part: StridedPart, target: int, offset: int, strides: Sequence[int]) -> Row:
    """The copy of one part into the target box (offset, strides), dimensions sorted and merged where that is exact."""
    offset += sum(s * i for s, i in zip(strides, part.start, strict=True))
    dims = sorted(((a.size, a.stride, a.step * strides[a.dim]) for a in part.axes), key=lambda d: -d[2])
    merged = merge_axes((size, (src, dst), None) for size, src, dst in dims) or [(1, (0, 0), None)]
    sizes, srcs, dsts = zip(*((size, *strides) for size, strides, _ in merged), strict=True)
    return Row(part.source, target, tuple(sizes), part.offset, tuple(srcs), offset, tuple(dsts))


def joined(rows: Iterable[Row]) -> list[Row]:
    """The same copies, with neighbours along the first dimension merged."""
    out: list[Row] = []
    for r in rows:
        p = out[-1] if out else None
        if (
            p is not None
            and (p.source, p.target, p.shape[1:], p.src_strides, p.dst_strides)
            == (r.source, r.target, r.shape[1:], r.src_strides, r.dst_strides)
            and r.src_offset - p.src_offset == p.shape[0] * p.src_strides[0]
            and r.dst_offset - p.dst_offset == p.shape[0] * p.dst_strides[0]
            and p.dst_strides[0] > 0
        ):
            out[-1] = Row(p.source, p.target, (p.shape[0] + r.shape[0], *p.shape[1:]), *_places(p))
        else:
            out.append(r)
    return out


def _places(r: Row) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    return r.src_offset, r.src_strides, r.dst_offset, r.dst_strides


def runs(offset: int, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The addresses of a box as [begin, end) runs, int64 [N, 2]; N is small where the box is nearly contiguous."""
    dims = sorted(((s, n) for n, s in zip(shape, strides, strict=True) if n > 1), key=lambda d: d[0])
    length, outer = 1, []
    for stride, size in dims:
        if not outer and stride == length:
            length *= size
        else:
            outer.append((stride, size))
    begins = np.array([offset], np.int64)
    for stride, size in outer:
        begins = (begins[None, :] + stride * np.arange(size, dtype=np.int64)[:, None]).reshape(-1)
    return np.stack([begins, begins + length], axis=1)


def covered(pieces: Sequence[np.ndarray]) -> tuple[int, int]:
    """How many addresses the runs cover, and how many of these more than once."""
    if not pieces:
        return 0, 0
    ends = np.concatenate([np.concatenate([p[:, 0] for p in pieces]), np.concatenate([p[:, 1] for p in pieces])])
    change = np.ones(len(ends), np.int64)
    change[len(ends) // 2 :] = -1
    order = np.argsort(ends, kind="stable")
    depth, width = np.cumsum(change[order])[:-1], np.diff(ends[order])
    return int(width[depth >= 1].sum()), int(width[depth >= 2].sum())

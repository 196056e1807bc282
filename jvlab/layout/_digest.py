"""The digest that both sides of a sync compare: order-free, shard-free, position-sensitive. numpy only.

A parameter's dense storage is a table of elements, `row` of them to a line; an element is one word of 8, 16 or 32
bits, or two of 32. The digest is

    Σ  u(line) · v(column) · k(word's place in its element) · word      mod 2⁶⁴

with odd pseudo-random weights u, v, k. A sum, so parts may be taken in any order, on any device, and added; odd
weights, so a change of any one word is always detected; products of two weights, so swapped words are detected. They
are separable and below 2²⁴: a line's sum is an exact float64 dot product, as fast as the CPU's memory, and the table
may be read by lines or, transposed, by columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout import _finite
from jvlab.layout._digest_loop import compiled_loop, compiled_scan

MASK = (1 << 64) - 1
# Bits of word + weight + count must stay within the 53 that float64 holds exactly: 16 + 24 + 13, or 32 + 12 + 9 with
# the weight in two halves.
INNER, INNER_WIDE = 8192, 512
HALF = 12
BLOCK = 1 << 18  # words converted at once, 2 MiB: more would leave the cache, fewer cost calls (measured)
LINE, COLUMN = 0x9E3779B9, 0x85EBCA6B  # seeds of u and v
PLACE = np.array([1, 0xB5297B], np.uint64)  # k


def mix(index: np.ndarray) -> np.ndarray:
    """A 32-bit finaliser with good avalanche; uint32 in and out."""
    x = index.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def weights(index: np.ndarray, seed: int) -> np.ndarray:
    """u or v at these indices: odd, below 2²⁴, as uint32."""
    return (mix(index.astype(np.uint32) ^ np.uint32(seed)) >> np.uint32(8)) | np.uint32(1)


def row_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements to a line of a parameter's storage: the length of the dimension that is contiguous."""
    ones = [n for n, s in zip(shape, strides, strict=True) if s == 1 and n > 1]
    return max(ones, default=1)


def flat_digest(storage: np.ndarray, row: int) -> int:
    """Digest of a whole dense storage, given as a 1-d array."""
    lines, rest = divmod(storage.size, row)
    total = box_digest(storage[: lines * row].reshape(lines, row), 0, (row, 1), row) if lines else 0
    if rest:
        total += box_digest(storage[lines * row :], lines * row, (1,), row)
    return total & MASK


def box_digest(values: np.ndarray, offset: int, strides: Sequence[int], row: int) -> int:
    """Digest of the part of a storage that a box fills: element i of `values` lies at offset + Σ i_k·strides_k."""
    return _of_box(values, offset, strides, row, "")[0]


def box_scan(values: np.ndarray, offset: int, strides: Sequence[int], row: int) -> tuple[int, bool]:
    """As `box_digest`, and whether any value is NaN or Inf: checked while they are in the cache."""
    return _of_box(values, offset, strides, row, values.dtype.name)


def _of_box(values: np.ndarray, offset: int, strides: Sequence[int], row: int, check: str) -> tuple[int, bool]:
    """Digest, and whether any value, of dtype `check`, is not finite; '' skips that check."""
    if values.ndim != len(strides):
        raise LayoutError(f"a box of {values.ndim} dimensions with {len(strides)} strides")
    if not values.size:
        return 0, False
    check = check if _finite.exponent(check) else ""
    line0, column0 = divmod(int(offset), row)
    axes = [(int(n), int(s)) for n, s in zip(values.shape, strides, strict=True)]
    kinds = ["line" if s % row == 0 and row > 1 else "column" for _, s in axes]
    if row == 1:
        kinds = ["line"] * len(axes)
    reach = sum((n - 1) * s for (n, s), kind in zip(axes, kinds, strict=True) if kind == "column")
    if reach < 0 or column0 + reach >= row or any(s < 0 for _, s in axes):
        return _gathered(values, offset, strides, row), bool(check) and _finite.flawed(values, check)
    u = weights(_grid(axes, kinds, "line", line0, row), LINE)
    v = weights(_grid(axes, kinds, "column", column0, 1), COLUMN)
    order = [k for k, kind in enumerate(kinds) if kind == "line" and axes[k][0] > 1]
    other = [k for k, kind in enumerate(kinds) if kind == "column" and axes[k][0] > 1]
    single = [k for k in range(len(axes)) if axes[k][0] == 1]
    by_column = bool(order) and bool(other) and max(other) < min(order)  # a transposed box: columns come first
    if by_column:
        return _separable(values.transpose(single + other + order), v, u, check)
    return _separable(values.transpose(single + order + other), u, v, check)


def _grid(axes: list[tuple[int, int]], kinds: list[str], kind: str, first: int, unit: int) -> np.ndarray:
    """Line or column numbers over the axes of that kind, flattened in their order."""
    out = np.array([first], np.int64)
    for (n, s), k in zip(axes, kinds, strict=True):
        if k == kind and n > 1:
            out = (out[:, None] + np.arange(n, dtype=np.int64) * (s // unit)).reshape(-1)
    return out


def _words(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The array's words, and how many one element has."""
    size = min(values.itemsize, 4)
    return values.view(np.dtype(f"u{size}")), values.itemsize // size


def _separable(values: np.ndarray, outer: np.ndarray, inner: np.ndarray, check: str) -> tuple[int, bool]:
    """Σ outer·inner·place·word, the trailing axes of `values` being the inner ones; and whether one is not finite."""
    table = values.reshape(len(outer), len(inner))  # a copy only where axes are out of order
    loop = compiled_loop()
    if loop is not None and table.itemsize <= 4:
        words, lines = table.view(f"u{table.itemsize}"), outer.astype(np.uint64)
        return _scanned(words, lines, inner, check) if check else (loop(words, lines, inner), False)
    return _separable_in_numpy(table, outer, inner), bool(check) and _finite.flawed(table, check)


def _scanned(words: np.ndarray, outer: np.ndarray, inner: np.ndarray, check: str) -> tuple[int, bool]:
    """`_separable` by the compiled loops."""
    loop, scan = compiled_loop(), compiled_scan()
    assert loop is not None
    assert scan is not None
    if words.strides[1] == words.itemsize and words.shape[1] * words.itemsize % 8 == 0:
        wide = words.view(np.uint64)
        if wide.flags.aligned:
            bits, low, above = _finite.lanes(check)
            total, found = scan(words, outer, inner, wide, bits, low)
            return total, bool(found & above)
    total, flawed = 0, False
    step = max(1, _finite.BLOCK // (words.itemsize * len(inner)))
    for at in range(0, len(words), step):  # lines that are not whole 64-bit words, or not contiguous
        block = words[at : at + step]
        total += loop(block, outer[at : at + step], inner)
        flawed = flawed or _finite.flawed(block, check)
    return total & MASK, flawed


def _separable_in_numpy(table: np.ndarray, outer: np.ndarray, inner: np.ndarray) -> int:
    count = max(1, table.itemsize // 4)  # words of an element
    columns = _columns(inner, count, table.itemsize >= 4)
    step = (INNER_WIDE if table.itemsize >= 4 else INNER) * count
    width = len(inner) * count
    lines = max(1, min(BLOCK // width, len(table)))
    buffer = np.empty((lines, width))
    total = 0
    for at in range(0, len(table), lines):
        block = table[at : at + lines]
        words = buffer[: len(block)]
        np.copyto(words, _words(block if count == 1 else np.ascontiguousarray(block))[0].reshape(words.shape))
        sums = np.zeros(len(block), np.uint64)
        for first in range(0, width, step):
            part = words[:, first : first + step]
            for column, factor in columns:
                sums += (part @ column[first : first + step]).astype(np.uint64) * factor
        total += int((sums * outer[at : at + lines].astype(np.uint64)).sum(dtype=np.uint64))
    return total & MASK


def _columns(inner: np.ndarray, count: int, wide: bool) -> list[tuple[np.ndarray, np.uint64]]:
    """The weights of a line as float64 vectors: one per word of an element and half of a weight, with its factor."""
    halves = [(inner >> HALF, 1 << HALF), (inner & ((1 << HALF) - 1), 1)] if wide else [(inner, 1)]
    out = []
    for place in range(count):
        for part, factor in halves:
            column = np.zeros(len(inner) * count)
            column[place::count] = part
            out.append((column, np.uint64(int(PLACE[place]) * factor)))
    return out


def _gathered(values: np.ndarray, offset: int, strides: Sequence[int], row: int) -> int:
    """`_of_box` element by element: for boxes whose axes run across lines."""
    at = np.array([int(offset)], np.int64)
    for n, s in zip(values.shape, strides, strict=True):
        at = (at[:, None] + np.arange(n, dtype=np.int64) * int(s)).reshape(-1)
    words, count = _words(np.ascontiguousarray(values).reshape(-1))
    weight = weights(at // row, LINE).astype(np.uint64) * weights(at % row, COLUMN).astype(np.uint64)
    sums = (words.reshape(-1, count).astype(np.uint64) * weight[:, None]).sum(axis=0, dtype=np.uint64)
    return int((sums * PLACE[:count]).sum(dtype=np.uint64))


def in_sample(parameter: str, version: int, one_in: int = 8) -> bool:
    """Whether verify="sampled" checks this parameter in this version; over `one_in` versions every one is checked."""
    place = sum(parameter.encode()) + len(parameter)  # spread evenly enough, and the same in every process
    return (place + version) % one_in == 0

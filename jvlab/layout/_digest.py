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

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._plan_types import ValueTransform, numpy_dtype
from jvlab.layout._slices import slice_text
from jvlab.layout._tree import leaf_from_array

# The inner loop of the digest, compiled by numba: one pass at memory speed.

Loop = Callable[..., tuple[int, int]]
NONE = np.uint64(0)
# a line without elements, its weight, no weights of elements: only `wide` is read
NO_TABLE = (np.zeros((1, 0), "u4"), np.zeros(1, "u8"), np.zeros(0, "u4"))


@functools.cache
def _kernel() -> Any:
    """The numba kernel, compiled per table layout on first use."""

    def scan(table: Any, outer: Any, inner: Any, wide: Any, bits: Any, low: Any) -> Any:
        total = np.uint64(0)
        found = np.uint64(0)
        for i in range(table.shape[0]):
            line = np.uint64(0)
            for j in range(table.shape[1]):
                line += np.uint64(table[i, j]) * np.uint64(inner[j])
            total += line * outer[i]
            # the same line again, while it is in the L1 cache
            for j in range(wide.shape[1]):
                found |= (wide[i, j] & bits) + low
        return total, found

    return compiled(scan)


def compiled(function: Callable[..., Any]) -> Any:
    """A function compiled by numba, kept on disk beside its source, or in the user's cache: compiling takes seconds,
    and every trainer and every engine would do it again. Without the GIL.
    """
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to write
        return numba.njit(nogil=True)(function)


@functools.cache
def compiled_loop() -> Loop:
    """Σ outer·inner·word of a table of uint8, uint16 or uint32, mod 2⁶⁴, and the OR of (word & bits) + low over `wide`,
    the table as words of 64 bits (see `flawed`), where it is given.

    Measured on one Neoverse N1 core, float32: 15 GB/s; numpy's exact float64 products reach 1.4. With the check 10,
    and 6.3 of bfloat16 (the sum alone: 8.3). Releases the GIL.
    """
    fast = _kernel()
    nothing = np.zeros((0, 0), np.uint64)
    # compile now, at connect, not during the pause of the first sync
    for table, (outer, inner) in _samples():
        wide = table.view(np.uint64) if table.strides[1] == table.itemsize else nothing
        exact = int(
            (table.astype(np.uint64) * inner.astype(np.uint64) * outer[:, None]).sum(
                dtype=np.uint64
            )
        )
        for words in (nothing, wide):
            if int(fast(table, outer, inner, words, NONE, NONE)[0]) != exact:
                raise LayoutError(
                    "the compiled digest gives a wrong sum: what numba kept on disk is damaged",
                    remedy=f"delete the files _digest_loop.*.nb* in {Path(__file__).parent / '__pycache__'}",
                )

    def loop(
        table: np.ndarray,
        outer: np.ndarray,
        inner: np.ndarray,
        wide: np.ndarray = nothing,
        bits: np.uint64 = NONE,
        low: np.uint64 = NONE,
    ) -> tuple[int, int]:
        total, found = fast(table, outer, inner, wide, bits, low)
        return int(total), int(found)

    return loop


def _samples() -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Tables of each layout: dense, strided lines, strided elements (the last two compile to one)."""
    for word in ("u2", "u4"):
        table = (
            (np.arange(32, dtype=np.uint64) * 2654435761 + 12345)
            .astype(word)
            .reshape(2, 16)
        )
        for part in (table[:, :8].copy(), table[:, :8], table[:, ::2]):
            yield (
                part,
                (
                    np.array([3, 1 << 63 | 5], np.uint64),
                    np.arange(1, 9, dtype=np.uint32) * 0x1FFFFFFF,
                ),
            )


# NaN and Inf, detected by their exponent bits in passes that read the values anyway.
# A float is not finite exactly if all bits of its exponent are set; adding the lowest of these bits to the
# exponent then carries into the bit above, the sign's. So one AND, one ADD and one OR check as many floats as a
# word holds.

# bits that are all set if not finite; float8_e4m3fn has no Inf, and one NaN of each sign
EXPONENTS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0 << 48,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7C,
}
# leaves that are not finite after a value transform
Flawed = set[tuple[str, ValueTransform]]
NAMED = 6  # leaves that an error names one by one
CHECKED_BYTES = 1 << 19  # bytes checked while they are in the cache: half a MiB


def exponent(dtype: str) -> int:
    """The exponent bits of a dtype, by name; 0 for integers."""
    return EXPONENTS.get(dtype, 0)


@functools.cache
def lanes(dtype: str) -> tuple[np.uint64, np.uint64, int]:
    """(bits of the exponents, the lowest of each, the bits above) of as many elements as 64 bits hold."""
    bits = exponent(dtype)
    size = 8 * numpy_dtype(dtype).itemsize
    spread = lambda x: sum(x << (size * k) for k in range(64 // size))
    return (
        np.uint64(spread(bits)),
        np.uint64(spread(bits & -bits)),
        spread(1 << (size - 1)),
    )


def flawed(values: np.ndarray, dtype: str) -> bool:
    """Whether any value is NaN or Inf; `values` may be raw words, of floats of `dtype`."""
    bits = EXPONENTS.get(dtype)
    if bits is None or not values.size:
        return False
    flat = (
        values if values.flags.c_contiguous else np.ascontiguousarray(values)
    ).reshape(-1)
    rest = flat.nbytes % 8 // flat.itemsize
    words = flat[: flat.size - rest].view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    all_bits, low, above = lanes(dtype)
    _, found = compiled_loop()(*NO_TABLE, words[None], all_bits, low)
    if found & above:
        return True
    return bool(rest) and bool(
        ((flat[flat.size - rest :].view(f"u{flat.itemsize}") & bits) == bits).any()
    )


# Reports --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NonFinite:
    """One leaf, or one slice of a stacked leaf, with values that are not finite where the engine would hold them."""

    leaf: str  # its path; `layers.attn.v.kernel[1]` for a slice
    elements: int
    nan: int  # NaN in the trainer's memory
    inf: int  # Inf in the trainer's memory
    overflow: int  # finite there, but not in the engine's dtype
    wire: str  # the engine's dtype

    @property
    def count(self) -> int:
        """Values that are not finite."""
        return self.nan + self.inf + self.overflow

    def __str__(self) -> str:
        parts = [
            f"{count} {word}"
            for count, word in (
                (self.nan, "NaN"),
                (self.inf, "Inf"),
                (self.overflow, f"beyond what {self.wire} holds"),
            )
            if count
        ]
        return (
            f"{self.leaf}: {', '.join(parts) or 'not finite'} of {self.elements} values"
        )


def examine(
    arrays: Mapping[str, Any],
    pairs: Iterable[tuple[str, ValueTransform]],
    stacked: Mapping[str, int] | None = None,
) -> list[NonFinite]:
    """Count the values that are not finite, each after its value transform; reads the leaves again, sends nothing.

    Of a leaf in `stacked`, leaf → the dimension of its layers, each slice is counted on its own.
    """
    out: dict[str, NonFinite] = {}
    for path, transform in sorted(set(pairs), key=str):
        dim = (stacked or {}).get(path)
        total: dict[str, np.ndarray] = {}
        for index, piece in _pieces(arrays[path], dim):
            name = path if dim is None else f"{path}{slice_text(dim, index)}"
            total[name] = total.get(name, 0) + _counts(piece, transform)
        for name, counts in total.items():
            elements, nan, inf, overflow = counts.tolist()
            found = NonFinite(name, elements, nan, inf, overflow, transform.wire)
            if name not in out or found.count > out[name].count:
                out[name] = found
    nonfinite = [found for found in out.values() if found.count]
    return nonfinite or list(out.values())


def merged(found: Iterable[NonFinite]) -> list[NonFinite]:
    """Sums the counts of each leaf over trainer processes, which count their own shards."""
    out: dict[str, NonFinite] = {}
    for one in found:
        before = out.get(one.leaf)
        out[one.leaf] = (
            one
            if before is None
            else NonFinite(
                one.leaf,
                before.elements + one.elements,
                before.nan + one.nan,
                before.inf + one.inf,
                before.overflow + one.overflow,
                one.wire,
            )
        )
    return [out[leaf] for leaf in sorted(out)]


def _pieces(array: Any, dim: int | None) -> Iterator[tuple[int, Any]]:
    """The shards of this process, replicas left out; with `dim`, slice by slice, each with its index along it."""
    found = getattr(array, "addressable_shards", None)
    own = [piece for piece in found or () if getattr(piece, "replica_id", 0) == 0]
    start = lambda piece: 0 if dim is None else _start(array, piece, dim)
    for first, shard in (
        [(0, array)] if found is None else [(start(piece), piece.data) for piece in own]
    ):
        if dim is None:
            yield 0, shard
            continue
        values = shard if hasattr(shard, "devices") else np.asarray(shard)
        # one at a time: a whole stack of layers may not fit into memory again
        for k in range(values.shape[dim]):
            yield first + k, values[(slice(None),) * dim + (k,)]


def _start(array: Any, piece: Any, dim: int) -> int:
    """The first index of a shard along a dimension."""
    if hasattr(piece, "index"):
        return piece.index[dim].start or 0
    leaf = leaf_from_array("", array)  # torch
    starts = (
        int(start[dim])
        for d, start in zip(leaf.devices, leaf.starts, strict=True)
        if int(d) == piece.device.id
    )
    return next(starts, 0)


def _counts(shard: Any, transform: ValueTransform) -> np.ndarray:
    """(elements, NaN, Inf, finite before the value transform and not after it), on the device that holds the shard."""
    if hasattr(shard, "devices"):
        import jax.numpy as lib

        values: Any = shard
        cast = lambda x, name: x.astype(name)
    else:
        lib = np
        values = np.asarray(shard)
        cast = lambda x, name: x.astype(numpy_dtype(name))
    if not exponent(str(values.dtype)) and not exponent(transform.wire):
        return np.array([values.size, 0, 0, 0], np.int64)
    with np.errstate(all="ignore"):
        nan = lib.isnan(values)
        inf = lib.isinf(values)
        after = (
            cast(values, "float32") + np.float32(transform.add)
            if transform.add
            else values
        )
        for name in (transform.cast, transform.wire):
            after = cast(after, name) if name else after
        over = ~lib.isfinite(after) & ~nan & ~inf
        return np.array(
            [values.size, *(int(lib.sum(x)) for x in (nan, inf, over))], np.int64
        )


# ----------------------------------------------------------------------------------------------------

MASK = (1 << 64) - 1
# seeds of u and v
LINE = 0x9E3779B9
COLUMN = 0x85EBCA6B
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
    return (mix(index.astype(np.uint32) ^ np.uint32(seed)) >> np.uint32(8)) | np.uint32(
        1
    )


def row_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements to a line of a parameter's storage: the length of the dimension that is contiguous."""
    ones = [n for n, s in zip(shape, strides, strict=True) if s == 1 and n > 1]
    return max(ones, default=1)


def flat_digest(storage: np.ndarray, row: int) -> int:
    """Digest of a whole dense storage, given as a 1-d array."""
    lines, rest = divmod(storage.size, row)
    total = (
        box_digest(storage[: lines * row].reshape(lines, row), 0, (row, 1), row)
        if lines
        else 0
    )
    if rest:
        total += box_digest(storage[lines * row :], lines * row, (1,), row)
    return total & MASK


def box_digest(
    values: np.ndarray, offset: int, strides: Sequence[int], row: int
) -> int:
    """Digest of the part of a storage that a box fills: element i of `values` lies at offset + Σ i_k·strides_k."""
    return _of_box(values, offset, strides, row, "")[0]


def box_scan(
    values: np.ndarray, offset: int, strides: Sequence[int], row: int
) -> tuple[int, bool]:
    """As `box_digest`, and whether any value is NaN or Inf: checked while they are in the cache."""
    return _of_box(values, offset, strides, row, values.dtype.name)


def _of_box(
    values: np.ndarray, offset: int, strides: Sequence[int], row: int, check: str
) -> tuple[int, bool]:
    """Digest, and whether any value, of dtype `check`, is not finite; '' skips that check."""
    if values.ndim != len(strides):
        raise LayoutError(
            f"a box of {values.ndim} dimensions with {len(strides)} strides"
        )
    if not values.size:
        return 0, False
    check = check if exponent(check) else ""
    line0, column0 = divmod(int(offset), row)
    axes = [(int(n), int(s)) for n, s in zip(values.shape, strides, strict=True)]
    kinds = ["line" if s % row == 0 and row > 1 else "column" for _, s in axes]
    if row == 1:
        kinds = ["line"] * len(axes)
    reach = sum(
        (n - 1) * s
        for (n, s), kind in zip(axes, kinds, strict=True)
        if kind == "column"
    )
    if reach < 0 or column0 + reach >= row or any(s < 0 for _, s in axes):
        return _gathered(values, offset, strides, row), bool(check) and flawed(
            values, check
        )
    u = weights(_grid(axes, kinds, "line", line0, row), LINE)
    v = weights(_grid(axes, kinds, "column", column0, 1), COLUMN)
    order = [k for k, kind in enumerate(kinds) if kind == "line" and axes[k][0] > 1]
    other = [k for k, kind in enumerate(kinds) if kind == "column" and axes[k][0] > 1]
    single = [k for k in range(len(axes)) if axes[k][0] == 1]
    # a transposed box: columns come first
    by_column = bool(order) and bool(other) and max(other) < min(order)
    if by_column:
        return _separable(values.transpose(single + other + order), v, u, check)
    return _separable(values.transpose(single + order + other), u, v, check)


def _grid(
    axes: list[tuple[int, int]], kinds: list[str], kind: str, first: int, unit: int
) -> np.ndarray:
    """Line or column numbers over the axes of that kind, flattened in their order."""
    out = np.array([first], np.int64)
    for (n, s), k in zip(axes, kinds, strict=True):
        if k == kind and n > 1:
            out = (out[:, None] + np.arange(n, dtype=np.int64) * (s // unit)).reshape(
                -1
            )
    return out


def _words(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The array's words, and how many one element has."""
    size = min(values.itemsize, 4)
    return values.view(np.dtype(f"u{size}")), values.itemsize // size


def _separable(
    values: np.ndarray, outer: np.ndarray, inner: np.ndarray, check: str
) -> tuple[int, bool]:
    """Σ outer·inner·place·word, the trailing axes of `values` being the inner ones; and whether one is not finite."""
    # a copy only where axes are out of order
    table = values.reshape(len(outer), len(inner))
    if table.itemsize > 4:
        table = np.ascontiguousarray(table)
        inner = (inner[:, None] * PLACE).reshape(-1)
    words, _ = _words(table)
    lines = outer.astype(np.uint64)
    if check:
        return _scanned(words, lines, inner, check)
    return compiled_loop()(words, lines, inner)[0], False


def _scanned(
    words: np.ndarray, outer: np.ndarray, inner: np.ndarray, check: str
) -> tuple[int, bool]:
    """`_separable`, with the check."""
    if words.strides[1] == words.itemsize and words.shape[1] * words.itemsize % 8 == 0:
        wide = words.view(np.uint64)
        if wide.flags.aligned:
            bits, low, above = lanes(check)
            total, found = compiled_loop()(words, outer, inner, wide, bits, low)
            return total, bool(found & above)
    total = 0
    bad = False
    step = max(1, CHECKED_BYTES // (words.itemsize * len(inner)))
    # lines that are not whole 64-bit words, or not contiguous
    for at in range(0, len(words), step):
        block = words[at : at + step]
        total += compiled_loop()(block, outer[at : at + step], inner)[0]
        bad = bad or flawed(block, check)
    return total & MASK, bad


def _gathered(values: np.ndarray, offset: int, strides: Sequence[int], row: int) -> int:
    """`_of_box` element by element: for boxes whose axes run across lines."""
    at = np.array([int(offset)], np.int64)
    for n, s in zip(values.shape, strides, strict=True):
        at = (at[:, None] + np.arange(n, dtype=np.int64) * int(s)).reshape(-1)
    words, count = _words(np.ascontiguousarray(values).reshape(-1))
    weight = weights(at // row, LINE).astype(np.uint64) * weights(
        at % row, COLUMN
    ).astype(np.uint64)
    sums = (words.reshape(-1, count).astype(np.uint64) * weight[:, None]).sum(
        axis=0, dtype=np.uint64
    )
    return int((sums * PLACE[:count]).sum(dtype=np.uint64))


def in_sample(parameter: str, version: int, one_in: int = 8) -> bool:
    """Whether verify="sampled" checks this parameter in this version; over `one_in` versions every one is checked."""
    # spread evenly enough, and the same in every process
    place = sum(parameter.encode()) + len(parameter)
    return (place + version) % one_in == 0

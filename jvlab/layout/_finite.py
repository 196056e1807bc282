"""NaN and Inf, detected by their exponent bits in passes that read the values anyway.

A float is not finite exactly if all bits of its exponent are set; adding the lowest of these bits to the exponent then
carries into the bit above, the sign's. So one AND, one ADD and one OR check as many floats as a word holds.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.layout._digest_loop import compiled
from jvlab.layout._plan_types import ValueTransform, numpy_dtype
from jvlab.layout._shards import leaf_from_array
from jvlab.layout._slices import slice_text

EXPONENTS = {  # bits that are all set if not finite; float8_e4m3fn has no Inf, and one NaN of each sign
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0 << 48,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7C,
}
Flawed = set[tuple[str, ValueTransform]]  # leaves that are not finite after a value transform
NAMED = 6  # leaves that an error names one by one
BLOCK = 1 << 19  # bytes checked while they are in the cache: half a MiB


def exponent(dtype: str) -> int:
    """The exponent bits of a dtype, by name; 0 for integers."""
    return EXPONENTS.get(dtype, 0)


@functools.cache
def lanes(dtype: str) -> tuple[np.uint64, np.uint64, int]:
    """(bits of the exponents, the lowest of each, the bits above) of as many elements as 64 bits hold."""
    bits, size = exponent(dtype), 8 * numpy_dtype(dtype).itemsize
    spread = lambda x: sum(x << (size * k) for k in range(64 // size))
    return np.uint64(spread(bits)), np.uint64(spread(bits & -bits)), spread(1 << (size - 1))


@functools.cache
def compiled_check() -> Callable[[np.ndarray, np.uint64, np.uint64], int]:
    """The OR of (word & bits) + lowest over words of 64 bits; compiled where numba is installed."""

    def scan(words: Any, bits: Any, low: Any) -> Any:
        found = np.uint64(0)
        for k in range(words.shape[0]):
            found |= (words[k] & bits) + low
        return found

    if importlib.util.find_spec("numba") is None:
        return lambda words, bits, low: int(np.bitwise_or.reduce((words & bits) + low)) if words.size else 0

    fast: Any = compiled(scan)
    fast(np.zeros(2, np.uint64), np.uint64(0), np.uint64(0))  # compile now, not during the first sync
    return lambda words, bits, low: int(fast(words, bits, low))


def flawed(values: np.ndarray, dtype: str) -> bool:
    """Whether any value is NaN or Inf; `values` may be raw words, of floats of `dtype`."""
    bits = EXPONENTS.get(dtype)
    if bits is None or not values.size:
        return False
    flat = (values if values.flags.c_contiguous else np.ascontiguousarray(values)).reshape(-1)
    rest = flat.nbytes % 8 // flat.itemsize
    words = flat[: flat.size - rest].view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    all_bits, low, above = lanes(dtype)
    if words.size and compiled_check()(words, all_bits, low) & above:
        return True
    return bool(rest) and bool(((flat[flat.size - rest :].view(f"u{flat.itemsize}") & bits) == bits).any())


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
            for count, word in ((self.nan, "NaN"), (self.inf, "Inf"), (self.overflow, f"beyond what {self.wire} holds"))
            if count
        ]
        return f"{self.leaf}: {', '.join(parts) or 'not finite'} of {self.elements} values"


def examine(
    arrays: Mapping[str, Any], pairs: Iterable[tuple[str, ValueTransform]], stacked: Mapping[str, int] | None = None
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
    for first, shard in [(0, array)] if found is None else [(start(piece), piece.data) for piece in own]:
        if dim is None:
            yield 0, shard
            continue
        values = shard if hasattr(shard, "devices") else np.asarray(shard)
        for k in range(values.shape[dim]):  # one at a time: a whole stack of layers may not fit into memory again
            yield first + k, values[(slice(None),) * dim + (k,)]


def _start(array: Any, piece: Any, dim: int) -> int:
    """The first index of a shard along a dimension."""
    if hasattr(piece, "index"):
        return piece.index[dim].start or 0
    leaf = leaf_from_array("", array)  # torch
    starts = (int(start[dim]) for d, start in zip(leaf.devices, leaf.starts, strict=True) if int(d) == piece.device.id)
    return next(starts, 0)


def _counts(shard: Any, transform: ValueTransform) -> np.ndarray:
    """(elements, NaN, Inf, finite before the value transform and not after it), on the device that holds the shard."""
    if hasattr(shard, "devices"):
        import jax.numpy as lib

        values: Any = shard
        cast = lambda x, name: x.astype(name)
    else:
        lib, values = np, np.asarray(shard)
        cast = lambda x, name: x.astype(numpy_dtype(name))
    if not exponent(str(values.dtype)) and not exponent(transform.wire):
        return np.array([values.size, 0, 0, 0], np.int64)
    with np.errstate(all="ignore"):
        nan, inf = lib.isnan(values), lib.isinf(values)
        after = cast(values, "float32") + np.float32(transform.add) if transform.add else values
        for name in (transform.cast, transform.wire):
            after = cast(after, name) if name else after
        over = ~lib.isfinite(after) & ~nan & ~inf
        return np.array([values.size, *(int(lib.sum(x)) for x in (nan, inf, over))], np.int64)

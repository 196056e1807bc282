"""Known values, and where vLLM's own loader puts them: the reference that an engine's memory is compared with.

Works from the traced layout alone (`pool.trace()`): no plan, no buckets and no digests, which a sync uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import RankLayout

Values = dict[str, np.ndarray]  # by checkpoint name
Memory = dict[tuple[int, str], np.ndarray]  # flat storage of a live parameter, by rank and name


def is_float(dtype: np.dtype) -> bool:
    """Also of ml_dtypes' kinds, which numpy does not count among the floats."""
    return "float" in str(dtype)


def known_values(originals: Mapping[str, np.ndarray], seed: int) -> Values:
    """Other values of the same mean and spread, so that a model with them still computes finite numbers; none is 0."""
    out: Values = {}
    for name, array in originals.items():
        if not is_float(array.dtype) or not array.size:
            out[name] = array
            continue
        wide = array.astype(np.float32)
        mean = float(wide.mean())
        spread = max(float(wide.std()), 0.1 * abs(mean), 0.01)
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())])
        fresh = (mean + spread * drawn.standard_normal(array.shape, np.float32)).astype(array.dtype)
        fresh = np.asarray(fresh)
        fresh[fresh == 0] = spread  # a packed kernel loses the sign of a zero
        out[name] = fresh
    return out


def _rows(layout: RankLayout) -> Iterator[tuple[str, str, int]]:
    """(tensor, parameter, row) of every copy."""
    for row in range(len(layout.tensor)):
        yield layout.tensors[int(layout.tensor[row])].name, layout.parameters[int(layout.parameter[row])].name, row


def _box(flat: np.ndarray, offset: int, shape: np.ndarray, strides: np.ndarray) -> np.ndarray:
    last = offset + int(((shape - 1) * strides).sum())
    if offset < 0 or last >= flat.size:  # as_strided itself checks nothing
        raise IndexError(f"a copy from {offset} to {last} lies outside of {flat.size} elements")
    return as_strided(flat[offset:], shape.tolist(), (strides * flat.itemsize).tolist())


def as_loaded(layout: RankLayout, values: Mapping[str, np.ndarray], before: Memory) -> Memory:
    """What a rank's memory holds after vLLM's loader copied these values there; padding stays as it was `before`."""
    out: Memory = {key: flat.copy() for key, flat in before.items() if key[0] == layout.rank}
    for tensor, parameter, row in _rows(layout):
        flat = out.get((layout.rank, parameter))
        if flat is None or tensor not in values:  # can't be read, or is loaded by the model's own code
            continue
        shape = layout.shape[row]
        source = np.ascontiguousarray(values[tensor]).reshape(-1)
        box = _box(source, int(layout.src_offset[row]), shape, layout.src_strides[row])
        _box(flat, int(layout.dst_offset[row]), shape, layout.dst_strides[row])[...] = box.astype(flat.dtype)
    return out


def values_held(layouts: Sequence[RankLayout], memory: Memory) -> tuple[Values, dict[str, str]]:
    """The checkpoint's tensors as an engine holds them, and those that its memory does not show, with the reason."""
    tensors = {t.name: t for layout in layouts for t in layout.tensors}
    opaque = {note.name: note.reason for layout in layouts for note in layout.opaque}
    values = {n: np.zeros(t.shape, numpy_dtype(t.dtype)) for n, t in tensors.items()}
    seen = {n: np.zeros(max(v.size, 1), bool) for n, v in values.items()}
    for layout in layouts:
        for tensor, parameter, row in _rows(layout):
            flat = memory.get((layout.rank, parameter))
            if flat is None or tensor in opaque:
                continue
            shape, offset, strides = layout.shape[row], int(layout.src_offset[row]), layout.src_strides[row]
            box = _box(flat, int(layout.dst_offset[row]), shape, layout.dst_strides[row])
            target = values[tensor].reshape(-1)
            _box(target, offset, shape, strides)[...] = box.astype(target.dtype)
            _box(seen[tensor], offset, shape, strides)[...] = True
    left = {n: opaque.get(n) or "not all of it is in the engine's memory" for n, s in seen.items() if not s.all()}
    return values, left


@dataclass(frozen=True)
class Difference:
    """The first element of a parameter that is not as wanted."""

    parameter: str
    rank: int
    index: int
    wanted: float
    found: float
    count: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.parameter} (rank {self.rank}): {self.count} of {self.size} elements, from element {self.index}: "
            f"{self.found:.6g} instead of {self.wanted:.6g}"
        )


def differences(wanted: Memory, found: Memory) -> list[Difference]:
    """Every parameter whose bits differ, in the order of `wanted`."""
    out = []
    for (rank, name), one in wanted.items():
        other = found.get((rank, name))
        if other is None or other.size != one.size or other.dtype != one.dtype:
            out.append(Difference(name, rank, 0, float(one.size), 0.0 if other is None else float(other.size), 0, 0))
            continue
        bits = np.dtype(f"u{one.itemsize}")
        wrong = np.flatnonzero(one.view(bits) != other.view(bits))
        if len(wrong):
            at = int(wrong[0])
            out.append(Difference(name, rank, at, float(one[at]), float(other[at]), len(wrong), one.size))
    return out

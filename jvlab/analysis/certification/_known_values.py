"""Known values, and where vLLM's own loader puts them: the reference that an engine's memory is compared with.

Works from the traced layout alone (`pool.trace()`): no plan, no buckets and no digests, which a sync uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab.layout._plan_types import FP8, FP8_MAX, numpy_dtype
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
        most = float(ml_dtypes.finfo(array.dtype).max)
        wide = np.clip(mean + spread * drawn.standard_normal(array.shape, np.float32), -most, most)
        fresh = np.asarray(wide.astype(array.dtype))
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


def as_loaded(layouts: Sequence[RankLayout], values: Mapping[str, np.ndarray], before: Memory) -> Memory:
    """What every rank's memory holds after vLLM's loader put these values there; padding stays as it was `before`."""
    out: Memory = {}
    largest = largest_of_groups(layouts, values)
    for layout in layouts:
        out |= {key: flat.copy() for key, flat in before.items() if key[0] == layout.rank}
        formats = {f.parameter: f for f in layout.formats}
        for tensor, parameter, row in _rows(layout):
            flat = out.get((layout.rank, parameter))
            if flat is None or tensor not in values:  # can't be read, or is loaded by the model's own code
                continue
            shape, at = layout.shape[row], int(layout.dst_offset[row])
            source = np.ascontiguousarray(values[tensor]).reshape(-1)
            box = _box(source, int(layout.src_offset[row]), shape, layout.src_strides[row])
            if (how := formats.get(parameter)) is not None:
                scale = np.float32(largest[tensor]) / np.float32(FP8_MAX)
                box = quantised(box.astype(numpy_dtype(how.loaded)), scale)
                if (scales := out.get((layout.rank, how.scale))) is not None:
                    scales[at // how.block] = scale
            _box(flat, at, shape, layout.dst_strides[row])[...] = box.astype(flat.dtype)
    return out


def largest_of_groups(layouts: Sequence[RankLayout], values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """For each quantised tensor, the largest magnitude among all that share its scale: those fused into one block.

    Whole tensors, not a rank's part of them: vLLM takes the maximum over the ranks that hold shards.
    """
    largest: dict[str, float] = {}
    blocks: set[frozenset[str]] = set()
    for layout in layouts:
        formats = {f.parameter: f for f in layout.formats}
        fused: dict[tuple[str, int], set[str]] = {}
        for tensor, parameter, row in _rows(layout):
            if (how := formats.get(parameter)) is None or tensor not in values:
                continue
            fused.setdefault((parameter, int(layout.dst_offset[row]) // how.block), set()).add(tensor)
            if tensor not in largest:
                loaded = values[tensor].astype(numpy_dtype(how.loaded)).astype(np.float32)
                largest[tensor] = float(np.abs(loaded).max(initial=0.0))
        blocks |= {frozenset(names) for names in fused.values()}
    settled = False
    while not settled:  # ranks may hold different parts of what shares a scale
        settled = True
        for names in blocks:
            most = max(largest[n] for n in names)
            settled = settled and all(largest[n] == most for n in names)
            largest |= dict.fromkeys(names, most)
    return largest


def quantised(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """These values in fp8, as vLLM's kernel rounds them; of a scale of 0 it makes the largest value."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = values.astype(np.float32) * (np.float32(1.0) / scale)
    return np.clip(np.nan_to_num(scaled, nan=FP8_MAX), -FP8_MAX, FP8_MAX).astype(numpy_dtype(FP8))


def values_held(layouts: Sequence[RankLayout], memory: Memory) -> tuple[Values, dict[str, str]]:
    """The checkpoint's tensors as an engine holds them, and those that its memory does not show, with the reason.

    What it holds in fp8 is multiplied by its scale: less exact than what was loaded, and quantised again the same.
    """
    tensors = {t.name: t for layout in layouts for t in layout.tensors}
    opaque = {note.name: note.reason for layout in layouts for note in layout.opaque}
    values = {n: np.zeros(t.shape, numpy_dtype(t.dtype)) for n, t in tensors.items()}
    seen = {n: np.zeros(max(v.size, 1), bool) for n, v in values.items()}
    for layout in layouts:
        formats = {f.parameter: f for f in layout.formats}
        for tensor, parameter, row in _rows(layout):
            flat = memory.get((layout.rank, parameter))
            how = formats.get(parameter)
            scales = None if how is None else memory.get((layout.rank, how.scale))
            if flat is None or tensor in opaque or (how is not None and scales is None):
                continue
            shape, offset, strides = layout.shape[row], int(layout.src_offset[row]), layout.src_strides[row]
            at = int(layout.dst_offset[row])
            box = _box(flat, at, shape, layout.dst_strides[row])
            if how is not None and scales is not None:
                box = (box.astype(np.float32) * scales[at // how.block]).astype(numpy_dtype(how.loaded))
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

"""A bucket as what changed in it since it was last sent: positions and values instead of every value. numpy only.

    counts      int64, one for each box of the bucket: how many of its elements changed
    then for each box with changes, each part at a multiple of 16 bytes:
        all of its elements        their values
        more than one in 32        a bit for each element, in words of 32, and the values of those that are set
        fewer                      the positions as uint32, ascending, and their values

A position counts the elements of a box in the order in which they are packed; the receiver's strides say where it lies
in the engine. A sparse bucket is always smaller than the whole one: that is how a receiver tells them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab._errors import TransportError
from jvlab.layout._digest import compiled
from jvlab.layout._plan_types import ALIGN

COUNT = np.dtype("<i8")
POSITION = np.dtype("<u4")
WORD = 32  # elements to a word of a mask


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Section:
    """Where the changes of one box are in a sparse bucket; offsets in bytes."""

    count: int
    elements: int
    item: int  # bytes of an element
    at: int  # of the positions or the mask
    values_at: int

    @property
    def whole(self) -> bool:
        return self.count == self.elements

    @property
    def masked(self) -> bool:
        return not self.whole and self.count * WORD > self.elements

    @property
    def index_bytes(self) -> int:
        """Bytes of the positions or the mask."""
        return index_bytes(self.count, self.elements)


def index_bytes(count: int, elements: int) -> int:
    """Bytes that say which elements changed."""
    if count == elements:
        return 0
    if count * WORD > elements:
        return -(-elements // WORD) * POSITION.itemsize
    return count * POSITION.itemsize


def sections(
    counts: Sequence[int], elements: Sequence[int], items: Sequence[int]
) -> tuple[list[Section], int]:
    """The sections of a bucket whose boxes have these many changes, elements and bytes to an element; its bytes."""
    at = aligned(len(counts) * COUNT.itemsize)
    out = []
    for count, size, item in zip(counts, elements, items, strict=True):
        values_at = at + aligned(index_bytes(count, size))
        out.append(Section(count, size, item, at, values_at))
        at = values_at + aligned(count * item)
    return out, at


def read_sections(
    data: Any, nbytes: int, elements: Sequence[int], items: Sequence[int]
) -> list[Section]:
    """The sections of a received bucket; raises if they are not its `nbytes`. `data` is memory, or DeviceBytes."""
    size = len(elements) * COUNT.itemsize
    counts = np.frombuffer(bytes(data[:size]), COUNT).tolist() if size <= nbytes else []
    in_range = len(counts) == len(elements) and all(
        0 <= count <= most for count, most in zip(counts, elements, strict=True)
    )
    if in_range:
        found, total = sections(counts, elements, items)
        if total == nbytes:
            return found
    raise TransportError(
        f"a sparse bucket of {nbytes} bytes does not fit its {len(elements)} boxes",
        remedy="trainer and replica hold different plans: connect again",
    )


@functools.cache
def _loops() -> tuple[Any, Any, Any]:
    """The compiled loops: find what differs, positions to a mask, a mask to positions.

    On one Neoverse N1 core the first reads float32 at 7 GB/s where 1 % changed; numpy 2.3, and 0.8 where 10 % did.
    """

    def find(wide: Any, old_wide: Any, values: Any, old: Any, out: Any) -> Any:
        several = 8 // values.itemsize
        count = 0
        for i in range(wide.shape[0]):
            if wide[i] != old_wide[i]:
                for k in range(i * several, (i + 1) * several):
                    if values[k] != old[k]:
                        out[count] = k
                        count += 1
        for k in range(wide.shape[0] * several, values.shape[0]):
            if values[k] != old[k]:
                out[count] = k
                count += 1
        return count

    def to_mask(positions: Any, mask: Any) -> None:
        for k in range(positions.shape[0]):
            at = positions[k]
            mask[at >> 5] |= np.uint32(1) << np.uint32(at & 31)

    def from_mask(mask: Any, out: Any) -> Any:
        count = 0
        for i in range(mask.shape[0]):
            word = mask[i]
            if word:
                for k in range(32):
                    if (word >> np.uint32(k)) & np.uint32(1):
                        if count < out.shape[0]:
                            out[count] = i * 32 + k
                        count += 1
        return count

    return compiled(find), compiled(to_mask), compiled(from_mask)


def _fixed(values: np.ndarray) -> np.ndarray:
    """Read-only, so that the loops are compiled once, whoever's memory it is."""
    out = values.view()
    out.flags.writeable = False
    return out


def changed(values: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The positions, ascending, at which a box of values differs in its bits from the dense bytes held of it."""
    item = values.itemsize
    flat = np.ascontiguousarray(values).reshape(-1).view(f"u{item}")
    old = held.view(f"u{item}")
    # first in words of 64 bits, which hold several elements
    several = 8 // item
    whole = flat.size - flat.size % several
    if flat.ctypes.data % 8:
        flat = flat.copy()
    parts = (flat[:whole].view(np.uint64), old[:whole].view(np.uint64), flat, old)
    out = np.empty(flat.size, POSITION)
    find, _, _ = _loops()
    return out[: find(*map(_fixed, parts), out)].copy()


def pack_box(
    section: Section, values: np.ndarray, positions: np.ndarray, out: np.ndarray
) -> None:
    """Write one box's changes into the bytes of a sparse bucket, which are zero."""
    at = section.values_at
    part = out[at : at + section.count * section.item].view(f"u{section.item}")
    flat = np.ascontiguousarray(values).reshape(-1).view(f"u{section.item}")
    if section.whole:
        part[:] = flat
        return
    part[:] = flat[positions]
    index = out[section.at : section.at + section.index_bytes].view(POSITION)
    if section.masked:
        _, to_mask, _ = _loops()
        to_mask(_fixed(positions), index)
    else:
        index[:] = positions


def positions_of(section: Section, data: np.ndarray) -> np.ndarray:
    """The positions of one box's changes; raises if there are not as many as counted, or one is outside of the box."""
    if section.whole:
        return np.arange(section.elements, dtype=POSITION)
    positions = data[section.at : section.at + section.index_bytes].view(POSITION)
    if section.masked:
        mask = _fixed(positions)
        # room for one too many: then there are more than counted
        positions = np.empty(section.count + 1, POSITION)
        _, _, from_mask = _loops()
        positions = positions[: from_mask(mask, positions)]
    if len(positions) != section.count or (
        section.count and int(positions.max()) >= section.elements
    ):
        raise TransportError(
            f"a sparse bucket names {len(positions)} of {section.elements} elements, and {section.count} changed",
            remedy="its bytes were damaged in transit: sync again",
        )
    return positions


def values_of(section: Section, data: np.ndarray) -> np.ndarray:
    """The values of one box's changes, as words of their width."""
    at = section.values_at
    return data[at : at + section.count * section.item].view(f"u{section.item}")


@functools.cache
def _put() -> Any:
    """The compiled scatter."""

    def put(
        memory: Any, positions: Any, values: Any, offset: Any, shape: Any, strides: Any
    ) -> None:
        for k in range(positions.shape[0]):
            rest = np.int64(positions[k])
            at = offset
            for axis in range(shape.shape[0] - 1, -1, -1):
                line = rest // shape[axis]
                at += (rest - line * shape[axis]) * strides[axis]
                rest = line
            memory[at] = values[k]

    return compiled(put)


def warm_put(widths: Iterable[int]) -> None:
    """Compile what a receiver runs, for elements of these widths in bytes, now, not during the first sparse sync."""
    _, _, from_mask = _loops()
    from_mask(_fixed(np.zeros(1, POSITION)), np.zeros(1, POSITION))
    for width in widths:
        values = np.ones(1, f"u{width}")
        put(np.zeros(1, values.dtype), np.zeros(1, POSITION), values, 0, (1,), (1,))


def put(
    memory: np.ndarray,
    positions: np.ndarray,
    values: np.ndarray,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> None:
    """Write values at positions of a box that lies at `offset`, with `strides`, in flat memory."""
    sizes = np.array(shape, np.int64)
    steps = np.array(strides, np.int64)
    _put()(memory, positions, values, np.int64(offset), sizes, steps)

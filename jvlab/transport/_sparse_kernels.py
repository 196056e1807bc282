"""Sparse buckets on a GPU: which elements differ, gathered into a bucket, and scattered into the engine's memory.

The format is that of `layout/_sparse.py`. All boxes of a bucket that have elements of one width share a launch: a table
has a row for each, and a block works on `BLOCK` elements of one box. A warp's votes are one word of the mask; sums of
the words' bits say where each value lies among the values. An element outside of its box is not written: the digest
shows that it is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from jvlab._errors import Unsupported
from jvlab.layout._sparse import WORD, Section
from jvlab.transport._ipc_kernels import cupy

THREADS = 256
BLOCK = 32 * THREADS  # elements
AXES = 8  # of a box, at most
TYPES = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned",
    8: "unsigned long long",
}
# A row: its first block; where the box begins in the dense bucket, its elements, its first word in the masks; how its
# changes are stored, where they are in the sparse bucket, how many; where the box lies in memory.
COLUMNS = (
    *("FIRST", "DENSE", "ELEMENTS", "MASK", "MODE", "INDEX", "VALUES", "COUNT"),
    *("MEMORY", "RANK", "SHAPE"),
)
FIRST, DENSE, ELEMENTS, MASK, MODE, INDEX, VALUES, COUNT, MEMORY, RANK, SHAPE = range(
    len(COLUMNS)
)
STRIDES = SHAPE + AXES
ROW = STRIDES + AXES
NOTHING, LISTED, MASKED, WHOLE = range(4)

SOURCE = "".join(f"#define {name} {k}\n" for k, name in enumerate(COLUMNS))
SOURCE += f"#define STRIDES {STRIDES}\n#define ROW {ROW}\n#define BLOCK {BLOCK}\n"
SOURCE += r"""
enum { NOTHING, LISTED, MASKED, WHOLE };
typedef unsigned u32;
typedef unsigned long long u64;
typedef long long i64;

// the row of this block
__device__ const i64* row_of(const i64* rows, int count)
{
    int low = 0;
    for (int high = count; high - low > 1;) {
        int middle = (low + high) / 2;
        if (rows[(u64)middle * ROW + FIRST] <= (i64)blockIdx.x) low = middle; else high = middle;
    }
    return rows + (u64)low * ROW;
}

__device__ u64 place(u32 position, const i64* row)
{
    u64 at = 0;
    for (int axis = (int)row[RANK] - 1; axis >= 0; --axis) {
        u32 size = (u32)row[SHAPE + axis];
        u32 line = position / size;
        at += (u64)(position - line * size) * (u64)row[STRIDES + axis];
        position = line;
    }
    return at;
}

// `until[w]`: bits of the words up to w, with w
__device__ u32 before(const u32* until, u64 word) { return word ? until[word - 1] : 0; }

// a warp stays together: each of its turns is one word of the mask
#define EACH(i, n) \
    u64 begin = (u64)(blockIdx.x - row[FIRST]) * BLOCK; \
    for (u64 i = begin + threadIdx.x; i < begin + BLOCK && (i & ~31ull) < (n); i += blockDim.x)

extern "C" __global__ void compare(
    const W* __restrict__ now, const W* __restrict__ held, const i64* __restrict__ rows, int count,
    u32* __restrict__ mask, u32* __restrict__ bits)
{
    const i64* row = row_of(rows, count);
    u64 n = (u64)row[ELEMENTS];
    now += row[DENSE];
    held += row[DENSE];
    EACH(i, n) {
        u32 votes = __ballot_sync(0xffffffffu, i < n && now[i] != held[i]);
        if ((threadIdx.x & 31) == 0) {
            mask[row[MASK] + (i >> 5)] = votes;
            bits[row[MASK] + (i >> 5)] = __popc(votes);
        }
    }
}

extern "C" __global__ void gather(
    const W* now, const u32* mask, const u32* until, const i64* rows, int count, unsigned char* out)
{
    const i64* row = row_of(rows, count);
    if (row[MODE] == NOTHING) return;
    u64 n = (u64)row[ELEMENTS];
    u32 earlier = before(until, (u64)row[MASK]);
    u32* index = (u32*)(out + row[INDEX]);
    W* values = (W*)(out + row[VALUES]);
    now += row[DENSE];
    EACH(i, n) {
        u32 word = mask[row[MASK] + (i >> 5)];
        u32 above = word >> (i & 31);
        if (row[MODE] == MASKED && (i & 31) == 0) index[i >> 5] = word;
        if (row[MODE] == WHOLE) {
            if (i < n) values[i] = now[i];
        } else if (above & 1) {
            u32 at = until[row[MASK] + (i >> 5)] - __popc(above) - earlier;
            if (row[MODE] == LISTED) index[at] = (u32)i;
            values[at] = now[i];
        }
    }
}

extern "C" __global__ void count_bits(const unsigned char* bucket, const i64* rows, int count, u32* bits)
{
    const i64* row = row_of(rows, count);
    if (row[MODE] != MASKED) return;
    const u32* mask = (const u32*)(bucket + row[INDEX]);
    u64 i = (u64)(blockIdx.x - row[FIRST]) * (BLOCK / 32) + threadIdx.x;
    if (i * 32 < (u64)row[ELEMENTS]) bits[row[MASK] + i] = __popc(mask[i]);
}

extern "C" __global__ void put(const unsigned char* bucket, const u32* until, const i64* rows, int count)
{
    const i64* row = row_of(rows, count);
    u64 n = (u64)row[ELEMENTS];
    u64 most = (u64)row[COUNT];
    const u32* index = (const u32*)(bucket + row[INDEX]);
    const W* values = (const W*)(bucket + row[VALUES]);
    W* memory = (W*)row[MEMORY];
    if (row[MODE] != MASKED) {
        EACH(k, most) {
            if (k >= most) continue;
            u32 position = row[MODE] == LISTED ? index[k] : (u32)k;
            if (position < n) memory[place(position, row)] = values[k];
        }
        return;
    }
    u32 earlier = before(until, (u64)row[MASK]);
    EACH(i, n) {
        u32 above = index[i >> 5] >> (i & 31);
        if (i >= n || !(above & 1)) continue;
        u32 at = until[row[MASK] + (i >> 5)] - __popc(above) - earlier;
        if (at < most) memory[place((u32)i, row)] = values[at];
    }
}
"""


@cache
def _kernel(name: str, item: int, device: int) -> Any:
    """Compiled on first use on a device, then cached on disk by cupy."""
    options = ("-std=c++17", f"-DW={TYPES[item]}")
    return cupy().RawModule(code=SOURCE, options=options).get_function(name)


def warm(items: Iterable[int], device: int) -> None:
    """Compile everything for elements of these bytes now, not in the first sparse sync."""
    with cupy().cuda.Device(device):
        for item in items:
            for name in ("compare", "gather", "count_bits", "put"):
                _kernel(name, item, device)


def _launch(name: str, item: int, device: int, blocks: int, *arguments: Any) -> None:
    """On the current stream of the current device."""
    _kernel(name, item, device)((blocks,), (THREADS,), arguments)


def _mode(part: Section) -> int:
    if not part.count:
        return NOTHING
    return WHOLE if part.whole else MASKED if part.masked else LISTED


def _number(rows: np.ndarray, work: Sequence[int]) -> int:
    """Give each row its first block, by its elements of work; returns how many blocks there are."""
    ends = np.cumsum([-(-n // BLOCK) for n in work])
    rows[1:, FIRST] = ends[:-1]
    return int(ends[-1])


class Boxes:
    """The boxes of one bucket: where each lies in its bytes, its elements, and the bytes of one."""

    def __init__(self, boxes: Sequence[tuple[int, int, int]], device: int) -> None:
        self._device = device
        words = np.cumsum([-(-elements // WORD) for _, elements, _ in boxes])
        self._words = int(words[-1])
        self._tables: list[tuple[int, list[int], np.ndarray, int, Any]] = []
        cp = cupy()
        self._ends = cp.asarray(words - 1)
        for item in sorted({item for _, _, item in boxes}):
            of_item = [k for k, box in enumerate(boxes) if box[2] == item]
            rows = np.zeros((len(of_item), ROW), np.int64)
            for row, k in zip(rows, of_item, strict=True):
                at, elements, _ = boxes[k]
                row[DENSE] = at // item
                row[ELEMENTS] = elements
                row[MASK] = words[k - 1] if k else 0
            blocks = _number(rows, rows[:, ELEMENTS].tolist())
            self._tables.append((item, of_item, rows, blocks, cp.asarray(rows)))

    def differing(self, now: Any, held: Any) -> tuple[Any, Any, list[int]]:
        """(mask, bits until each word, how many for each box) of what differs between two dense buckets."""
        cp = cupy()
        mask = cp.empty(self._words, np.uint32)
        bits = cp.empty(self._words, np.uint32)
        for item, _, rows, blocks, table in self._tables:
            count = np.int32(len(rows))
            _launch(
                *("compare", item, self._device, blocks),
                *(now, held, table, count, mask, bits),
            )
        until = cp.cumsum(bits, dtype=np.uint32)
        ends = cp.asnumpy(until[self._ends])
        return mask, until, np.diff(ends.astype(np.int64), prepend=0).tolist()

    def fill(
        self, parts: Sequence[Section], now: Any, mask: Any, until: Any, out: Any
    ) -> None:
        """Write what changed in each box into the bytes of a sparse bucket."""
        for item, of_item, rows, blocks, _ in self._tables:
            rows = rows.copy()
            for row, k in zip(rows, of_item, strict=True):
                part = parts[k]
                row[MODE : COUNT + 1] = _mode(part), part.at, part.values_at, part.count
            table = cupy().asarray(rows)
            count = np.int32(len(rows))
            _launch(
                *("gather", item, self._device, blocks),
                *(now, mask, until, table, count, out),
            )


@dataclass(frozen=True)
class Place:
    """Where a box's changes go: element 0 of its memory, and the place of its elements from there."""

    part: Section
    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def put(places: Sequence[Place], bucket: int, device: int) -> None:
    """Write the changes of boxes, from a sparse bucket at an address, into memory; on the current stream."""
    cp = cupy()
    changed = [place for place in places if place.part.count]
    for item in sorted({place.part.item for place in changed}):
        of_item = [place for place in changed if place.part.item == item]
        rows = np.zeros((len(of_item), ROW), np.int64)
        words = 0
        for row, place in zip(rows, of_item, strict=True):
            part = place.part
            row[ELEMENTS : COUNT + 1] = (
                *(part.elements, words, _mode(part)),
                *(part.at, part.values_at, part.count),
            )
            if len(place.shape) > AXES:
                raise Unsupported(
                    f"a box of {len(place.shape)} axes: the kernel for changes has room for {AXES}",
                    remedy='connect with delta="never"',
                )
            row[MEMORY] = place.memory + place.offset * item
            row[RANK] = len(place.shape)
            row[SHAPE : SHAPE + len(place.shape)] = place.shape
            row[STRIDES : STRIDES + len(place.shape)] = place.strides
            words += -(-part.elements // WORD) if part.masked else 0
        blocks = _number(
            rows, [p.part.elements if p.part.masked else p.part.count for p in of_item]
        )
        table = cp.asarray(rows)
        count = np.int32(len(rows))
        source = np.uint64(bucket)
        until = table  # not read where no box has a mask
        if words:
            bits = cp.empty(words, np.uint32)
            _launch("count_bits", item, device, blocks, source, table, count, bits)
            until = cp.cumsum(bits, dtype=np.uint32)
        _launch("put", item, device, blocks, source, until, table, count)

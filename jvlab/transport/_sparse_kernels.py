"""Sparse buckets on a GPU: which elements differ, gathered into a bucket, and scattered into the engine's memory.

The format is that of `layout/_sparse.py`. A warp's votes are one word of the mask; sums of the words' bits say where
each value lies among the values. An element outside of its box is not written: the digest shows that it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from jvlab.layout._sparse import WORD, Section
from jvlab.transport._ipc_kernels import cupy

THREADS = 256
TYPES = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned",
    8: "unsigned long long",
}

SOURCE = r"""
typedef unsigned long long u64;

__device__ u64 place(unsigned position, u64 offset, int axes, const long long* box)
{
    u64 at = offset;
    for (int axis = axes - 1; axis >= 0; --axis) {
        unsigned size = (unsigned)box[axis];
        unsigned line = position / size;
        at += (u64)(position - line * size) * (u64)box[axes + axis];
        position = line;
    }
    return at;
}

extern "C" __global__ void compare(const W* now, const W* held, unsigned n, unsigned* mask, unsigned* bits)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    bool differs = i < n && now[i] != held[i];
    unsigned votes = __ballot_sync(0xffffffffu, differs);
    if (i < n && (threadIdx.x & 31) == 0) {
        mask[i >> 5] = votes;
        bits[i >> 5] = __popc(votes);
    }
}

extern "C" __global__ void count_bits(const unsigned* mask, unsigned words, unsigned* bits)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) bits[i] = __popc(mask[i]);
}

// `until[w]`: bits of the words up to w, with w
extern "C" __global__ void gather(
    const W* now, unsigned n, const unsigned* mask, const unsigned* until, unsigned* positions, W* values)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned word = mask[i >> 5];
    unsigned lane = (unsigned)i & 31;
    if (!(word >> lane & 1)) return;
    unsigned at = until[i >> 5] - __popc(word >> lane);
    if (positions) positions[at] = (unsigned)i;
    values[at] = now[i];
}

extern "C" __global__ void put_listed(
    const unsigned* positions, const W* values, unsigned count, unsigned n,
    W* memory, u64 offset, int axes, const long long* box)
{
    u64 k = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (k < count && positions[k] < n) memory[place(positions[k], offset, axes, box)] = values[k];
}

extern "C" __global__ void put_masked(
    const unsigned* mask, const unsigned* until, const W* values, unsigned count, unsigned n,
    W* memory, u64 offset, int axes, const long long* box)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned word = mask[i >> 5];
    unsigned lane = (unsigned)i & 31;
    if (!(word >> lane & 1)) return;
    unsigned at = until[i >> 5] - __popc(word >> lane);
    if (at < count) memory[place((unsigned)i, offset, axes, box)] = values[at];
}
"""


@cache
def _kernel(name: str, item: int, device: int) -> Any:
    """Compiled on first use on a device, then cached on disk by cupy."""
    options = ("-std=c++17", f"-DW={TYPES[item]}")
    return cupy().RawModule(code=SOURCE, options=options).get_function(name)


def warm(items: Sequence[int], device: int) -> None:
    """Compile everything for elements of these bytes now, not in the first sparse sync."""
    with cupy().cuda.Device(device):
        for item in items:
            for name in ("compare", "count_bits", "gather", "put_listed", "put_masked"):
                _kernel(name, item, device)


@cache
def _box(shape: tuple[int, ...], strides: tuple[int, ...], device: int) -> Any:
    cp = cupy()
    out = cp.asarray(np.array([*shape, *strides], np.int64))
    cp.cuda.get_current_stream().synchronize()
    return out


def _launch(name: str, item: int, device: int, threads: int, *arguments: Any) -> None:
    """On the current stream of the current device."""
    blocks = -(-threads // THREADS)
    _kernel(name, item, device)((blocks,), (THREADS,), arguments)


def differing(now: Any, held: Any, item: int, device: int) -> tuple[Any, Any]:
    """(mask, bits until each word) of the elements of two dense device arrays of bytes that differ."""
    cp = cupy()
    n = now.nbytes // item
    words = -(-n // WORD)
    mask = cp.empty(words, np.uint32)
    bits = cp.empty(words, np.uint32)
    _launch("compare", item, device, n, now, held, np.uint32(n), mask, bits)
    return mask, cp.cumsum(bits, dtype=np.uint32)


def fill(part: Section, now: Any, mask: Any, until: Any, out: Any, device: int) -> None:
    """Write one box's changes into the bytes of a sparse bucket."""
    values = out[part.values_at : part.values_at + part.count * part.item]
    if part.whole:
        values[:] = now
        return
    index = out[part.at : part.at + part.index_bytes]
    if part.masked:
        index[:] = mask.view(np.uint8)
    listed = np.uint64(0 if part.masked else index.data.ptr)
    n = np.uint32(part.elements)
    _launch(
        "gather", part.item, device, part.elements, now, n, mask, until, listed, values
    )


def put(
    part: Section,
    bucket: int,
    device: int,
    memory: int,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> None:
    """Write one box's changes, from a bucket at an address, into memory at another; on the current stream."""
    cp = cupy()
    values = np.uint64(bucket + part.values_at)
    index = bucket + part.at
    where = (
        np.uint64(memory),
        np.uint64(offset),
        np.int32(len(shape)),
        _box(shape, strides, device),
    )
    count = np.uint32(part.count)
    n = np.uint32(part.elements)
    if not part.masked:
        _launch(
            "put_listed",
            part.item,
            device,
            part.count,
            np.uint64(index),
            values,
            count,
            n,
            *where,
        )
        return
    words = -(-part.elements // WORD)
    bits = cp.empty(words, np.uint32)
    _launch(
        "count_bits", part.item, device, words, np.uint64(index), np.uint32(words), bits
    )
    until = cp.cumsum(bits, dtype=np.uint32)
    _launch(
        "put_masked",
        part.item,
        device,
        part.elements,
        np.uint64(index),
        until,
        values,
        count,
        n,
        *where,
    )

"""Samples laid end to end in rows of one length, so that a run compiles one shape and computes little padding.

    row 0   [ sample 4 | sample 0 | sample 7 | · ]
    row 1   [ sample 2 | sample 5 | sample 1 | ·· ]

Attention stays within a sample (`segments`), and positions start anew in each. The loss sees the same [samples, time]
arrays as without packing: `place` says where in the rows each of a sample's tokens is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST = 64  # samples in one row; a fused kernel's memory grows with it
MULTIPLE = 128  # row lengths are multiples of it, as kernels like them; short rows of 8
SHORT = 1024
GOOD_ENOUGH = 0.01  # of padding: shorter rows must save more than this


@dataclass(frozen=True)
class Rows:
    """The shape of a packed micro-batch: `count` rows of `length` tokens, each with at most `most` samples."""

    count: int
    length: int
    most: int

    @property
    def tokens(self) -> int:
        return self.count * self.length

    @property
    def samples(self) -> int:
        return self.count * self.most


def round_up(length: int) -> int:
    """The next row length."""
    multiple = MULTIPLE if length > SHORT else 8
    return math.ceil(length / multiple) * multiple


def pack(lengths: Sequence[int] | np.ndarray, length: int, most: int = MOST) -> list[list[int]]:
    """Samples in rows of `length` tokens: the longest first, each into the fullest row that has room for it.

    Every sample is in exactly one row; one longer than a row is alone in its own. The order depends on the lengths
    alone, so that sums are reproducible.
    """
    sizes = [int(n) for n in lengths]
    rows: list[list[int]] = []
    left: list[int] = []
    for sample in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[sample]
        fits = [r for r in range(len(rows)) if left[r] >= size and len(rows[r]) < most]
        if fits:
            row = min(fits, key=lambda r: (left[r], r))
            rows[row].append(sample)
            left[row] -= size
        else:
            rows.append([sample])
            left.append(length - size)
    return rows


def rows_at_once(rows: int, length: int, budget: int) -> int:
    """The rows of one pass of at most `budget` tokens. Passes are of one size, so that the last has little padding."""
    passes = max(math.ceil(rows / max(budget // length, 1)), 1)
    return max(math.ceil(rows / passes), 1)


def row_length(lengths: Sequence[int] | np.ndarray, longest: int, most: int = MOST, budget: int | None = None) -> int:
    """The row length of at most `longest` tokens that leaves the least padding in a batch of samples like these.

    Rows of padding that fill up the last pass of `budget` tokens count. Of lengths that are about as good the longest:
    fewer rows. A sample longer than that does not count.
    """
    sizes = np.asarray(lengths, np.int64)
    sizes = sizes[sizes <= longest]
    if not len(sizes):
        return longest
    best, least = longest, math.inf
    for candidate in _candidates(sizes, longest):
        rows = len(pack(sizes, candidate, most))
        at_once = rows_at_once(rows, candidate, budget or candidate)
        padding = 1 - sizes.sum() / (math.ceil(rows / at_once) * at_once * candidate)
        if padding < least - GOOD_ENOUGH:
            best, least = candidate, padding
    return best


def _candidates(sizes: np.ndarray, longest: int) -> list[int]:
    """Row lengths worth a try, longest first: multiples of the longest sample, and fractions of all of them."""
    most, total = int(sizes.max()), int(sizes.sum())
    found = {longest} | {round_up(most * k) for k in range(1, 33)}
    found |= {round_up(math.ceil(total / k * slack)) for k in range(1, 33) for slack in (1.0, 1.02)}
    return sorted((n for n in found if most <= n <= longest), reverse=True)


@dataclass(frozen=True, eq=False)
class Packed:
    """One micro-batch: `segments` [rows, length] numbers each row's samples from 1, 0 is padding.

    `samples` are indices into the batch, in the order of their rows. `place` [samples, length] is where each token of
    a sample is in the flattened rows, and beyond the last position for what it does not have.
    """

    samples: np.ndarray
    segments: np.ndarray
    place: np.ndarray

    def lay(self, values: np.ndarray) -> np.ndarray:
        """[N, T, …] values of the whole batch in rows, zero on padding."""
        flat = np.zeros((self.segments.size + 1, *values.shape[2:]), values.dtype)
        width = min(values.shape[1], self.place.shape[1])
        flat[self.place[: len(self.samples), :width]] = values[self.samples, :width]
        return flat[:-1].reshape(*self.segments.shape, *values.shape[2:])


def packed(lengths: np.ndarray, rows: Sequence[Sequence[int]], shape: Rows) -> Packed:
    """These rows of samples as one micro-batch of this shape; rows that are missing are padding."""
    segments = np.zeros((shape.count, shape.length), np.int32)
    place = np.full((shape.samples, shape.length), shape.tokens, np.int32)
    samples: list[int] = []
    for row, of_row in enumerate(rows):
        at = 0
        for number, sample in enumerate(of_row, 1):
            size = int(lengths[sample])
            segments[row, at : at + size] = number
            place[len(samples), :size] = row * shape.length + np.arange(at, at + size)
            samples.append(sample)
            at += size
    return Packed(np.asarray(samples, np.int64), segments, place)

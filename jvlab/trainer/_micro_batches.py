"""The parts of a batch that are computed at once: samples padded to one width, or packed into rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab._units import how_many
from jvlab.trainer._batching import Buckets, PackedPart, RowShape, packed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Samples laid end to end in rows of one length, so that a run compiles one shape and computes little padding.
#     row 0   [ sample 4 | sample 0 | sample 7 | · ]
#     row 1   [ sample 2 | sample 5 | sample 1 | ·· ]
#
# Attention stays within a sample (`segments`), and positions start anew in each. The loss sees the same [samples, time]
# arrays as without packing: `place` says where in the rows each of a sample's tokens is.

MOST = 64  # samples in one row; a fused kernel's memory grows with it
MULTIPLE = 128  # row lengths are multiples of it, as kernels like them; short rows of 8
SHORT = 1024
GOOD_ENOUGH = 0.01  # of padding: shorter rows must save more than this


def round_up(length: int) -> int:
    """The next row length."""
    multiple = MULTIPLE if length > SHORT else 8
    return math.ceil(length / multiple) * multiple


def pack(
    lengths: Sequence[int] | np.ndarray, length: int, most: int = MOST
) -> list[list[int]]:
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


def row_length(
    lengths: Sequence[int] | np.ndarray,
    longest: int,
    budget: int | None = None,
) -> int:
    """The row length of at most `longest` tokens that leaves the least padding in a batch of samples like these.

    Rows of padding that fill up the last pass of `budget` tokens count. Of lengths that are about as good the longest:
    fewer rows. A sample longer than that does not count.
    """
    sizes = np.asarray(lengths, np.int64)
    sizes = sizes[sizes <= longest]
    if not len(sizes):
        return longest
    best = longest
    least = math.inf
    for candidate in _candidates(sizes, longest):
        rows = len(pack(sizes, candidate))
        at_once = rows_at_once(rows, candidate, budget or candidate)
        padding = 1 - sizes.sum() / (math.ceil(rows / at_once) * at_once * candidate)
        if padding < least - GOOD_ENOUGH:
            best = candidate
            least = padding
    return best


def _candidates(sizes: np.ndarray, longest: int) -> list[int]:
    """Row lengths worth a try, longest first: multiples of the longest sample, and fractions of all of them."""
    most = int(sizes.max())
    total = int(sizes.sum())
    found = {longest} | {round_up(most * k) for k in range(1, 33)}
    found |= {
        round_up(math.ceil(total / k * slack))
        for k in range(1, 33)
        for slack in (1.0, 1.02)
    }
    return sorted((n for n in found if most <= n <= longest), reverse=True)


# ----------------------------------------------------------------------------------------------------

SHORT_ROW = 256  # tokens that a short row may have in any case
# short rows fit samples that are this much longer than those of the batch they are chosen for
LONGER = 1.03
# times the positions that rows chosen for the batch itself would have: worth another program
WASTEFUL = 1.2


def unpad(part: PackedPart, found: np.ndarray, out: np.ndarray) -> None:
    """Write a micro-batch's values [most, width] to its samples' rows of the batch's [N, T] array."""
    width = min(part.width, out.shape[1])
    out[part.samples, :width] = found[: len(part.samples), :width]


class Packer:
    """Packs the batches of a run into micro-batches of one shape, which the first batch determines.

    If two batches in a row would have had much less padding in rows of their own, as when answers grow in the course of
    a run, the second of them determines the shape anew: one more program to compile.

    `budget` is the tokens of a micro-batch. One row holds as much as possible, or with `short` about two of the longest
    samples. A sample longer than a row is computed alone, in its own shape.
    """

    def __init__(self, budget: int, short: bool = False) -> None:
        self._budget = budget
        self._short = short
        self.shape: RowShape | None = None
        self._wasteful = 0  # batches in a row
        # lengths of the batch before: one is scored, then trained on
        self._last = np.empty(0, np.int64)

    @property
    def rule(self) -> dict[str, Any]:
        """What, beside the samples' lengths, determines the rows; a record keeps it."""
        return {"token_budget": self._budget, "short_rows": self._short}

    def parts(self, lengths: np.ndarray) -> Iterator[PackedPart]:
        """The micro-batches of samples of these lengths."""
        self.shape = shape = self._shape_for(lengths)
        alone = np.flatnonzero(lengths > shape.length)
        for sample in alone[np.argsort(-lengths[alone], kind="stable")]:
            own = RowShape(1, round_up(int(lengths[sample])), 1)
            yield packed(lengths, [[int(sample)]], own)
        short = np.flatnonzero(lengths <= shape.length)
        packs = pack(lengths[short], shape.length, shape.most)
        rows = [short[row].tolist() for row in packs]
        for at in range(0, len(rows), shape.count):
            yield packed(lengths, rows[at : at + shape.count], shape)

    def _shape_for(self, lengths: np.ndarray) -> RowShape:
        known = np.array_equal(lengths, self._last)
        self._last = lengths
        if self.shape is None:
            return self._choose(lengths)
        if known:
            return self.shape
        computed = _computed(lengths, self.shape)
        # no other shape could be that much better
        if computed <= WASTEFUL * lengths.sum():
            self._wasteful = 0
            return self.shape
        own = self._choose(lengths)
        self._wasteful = (
            self._wasteful + 1 if computed > WASTEFUL * _computed(lengths, own) else 0
        )
        if self._wasteful < 2:
            return self.shape
        self._wasteful = 0
        return own

    def _choose(self, lengths: np.ndarray) -> RowShape:
        budget = longest = self._budget
        if self._short:
            longest = min(budget, max(SHORT_ROW, round_up(2 * int(lengths.max()))))
        length = row_length(lengths, longest, budget=budget if self._short else None)
        # two or three samples fill a row: one token more, and it would hold one less
        if self._short:
            length = min(max(length, budget), round_up(math.ceil(length * LONGER)))
        rows = pack(lengths[lengths <= length], length)
        # of short rows a pass has many: the last one must not be half empty
        count = (
            rows_at_once(len(rows), length, budget)
            if self._short
            else max(min(budget // length, len(rows)), 1)
        )
        # later batches may have more, shorter samples; a fused kernel's memory grows with how many a row may hold
        fullest = max(map(len, rows), default=1)
        most = 2 ** math.ceil(math.log2(1.5 * fullest))
        return RowShape(count, length, min(most, MOST))


def _computed(lengths: np.ndarray, shape: RowShape) -> int:
    """Positions computed for samples of these lengths; one that is longer than a row counts as a whole pass."""
    short = lengths[lengths <= shape.length]
    passes = -(-len(pack(short, shape.length, shape.most)) // shape.count)
    return (passes + len(lengths) - len(short)) * shape.tokens


# `Packing`: how a training step lays samples into arrays, and how much of what it computes is padding.


@dataclass(frozen=True, eq=False)
class Packing:
    """Samples in the rows of one step's micro-batches, made by `policy.packing`; `plot()` draws them."""

    lengths: np.ndarray  # tokens of each sample, prompt included
    rows: tuple[tuple[int, ...], ...]  # the samples of each row; none: a row of padding
    widths: tuple[int, ...]  # tokens computed for each row
    shapes: tuple[tuple[int, int], ...]  # (rows, tokens of a row) of each micro-batch

    @property
    def computed(self) -> int:
        """Tokens computed, padding included."""
        return sum(self.widths)

    @property
    def padding(self) -> float:
        """The share of computed tokens that belong to no sample."""
        return 1 - int(self.lengths.sum()) / self.computed if self.computed else 0.0

    @property
    def compiled(self) -> int:
        """Different shapes: each is compiled once."""
        return len(set(self.shapes))

    def plot(self, *others: Packing) -> Figure:
        """The rows, each sample in its colour, padding hatched; others beside it, on the same scale."""
        return _faces.draw(self, "figure", *others)

    def __repr__(self) -> str:
        samples = how_many(len(self.lengths), "sample")
        rows = how_many(len(self.rows), "row")
        passes = how_many(len(self.shapes), "pass", "passes")
        shapes = how_many(self.compiled, "shape")
        return f"Packing({samples} in {rows}, {passes} of {shapes}, {100 * self.padding:.1f} % padding)"


def sample_lengths(samples: Iterable[Any]) -> np.ndarray:
    """Tokens of each sample, prompt included; of a RolloutBatch, of samples, or as they are."""
    found = [
        len(s.prompt_token_ids) + len(s.token_ids) if hasattr(s, "token_ids") else s
        for s in samples
    ]
    lengths = np.asarray(found)
    whole = np.issubdtype(lengths.dtype, np.integer)
    if lengths.ndim != 1 or not len(lengths) or not whole or lengths.min() < 1:
        raise ConfigError(
            "no lengths to pack",
            remedy="pass a RolloutBatch, or the tokens of each sample: [512, 300, …], at least 1",
        )
    return lengths.astype(np.int64)


def packing(samples: Any, packer: Packer | Buckets) -> Packing:
    """The rows that are made of samples, packed or padded."""
    lengths = sample_lengths(samples)
    rows: list[tuple[int, ...]] = []
    shapes: list[tuple[int, int]] = []
    for part in packer.parts(lengths):
        count = part.tokens // part.width
        rows += [tuple(row) for row in part.rows]
        rows += [()] * (count - len(part.rows))
        shapes.append((count, part.width))
    widths = tuple(width for count, width in shapes for _ in range(count))
    return Packing(lengths, tuple(rows), widths, tuple(shapes))

"""The parts of a batch that are computed at once: samples padded to one width, or packed into rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jvlab.trainer._batching import TrainBatch
from jvlab.trainer._packing import MOST, Packed, Rows, pack, packed, round_up, row_length, rows_at_once

SHORT_ROW = 256  # tokens that a short row may have in any case
LONGER = 1.03  # short rows fit samples that are this much longer than those of the batch they are chosen for
WASTEFUL = 1.2  # times the positions that rows chosen for the batch itself would have: worth another program


class Part(Protocol):
    """One micro-batch. Its arrays for the loss are [most, width], one sample a row, filled up with zeros."""

    @property
    def samples(self) -> np.ndarray: ...  # indices into the batch
    @property
    def width(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def tokens(self) -> int: ...  # computed, padding included
    def token_arrays(self, batch: TrainBatch, more: Iterable[str] = ()) -> dict[str, np.ndarray]:
        """What the model reads; `more` names other arrays of the batch with values for each token."""
        ...


@dataclass(frozen=True, eq=False)
class PaddedPart:
    """Samples padded on the right to the width of the longest one's bucket."""

    samples: np.ndarray
    width: int
    most: int

    @property
    def tokens(self) -> int:
        return self.most * self.width

    def token_arrays(self, batch: TrainBatch, more: Iterable[str] = ()) -> dict[str, np.ndarray]:
        """Tokens, and which of them are real."""
        return {name: batch.padded(name, self.samples, self.width) for name in ("tokens", "token_mask", *more)}


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Samples laid end to end in rows. Their losses are computed as if they were padded to a row's length."""

    content: Packed
    shape: Rows

    @property
    def samples(self) -> np.ndarray:
        return self.content.samples

    @property
    def width(self) -> int:
        return self.shape.length

    @property
    def most(self) -> int:
        return self.shape.samples

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def token_arrays(self, batch: TrainBatch, more: Iterable[str] = ()) -> dict[str, np.ndarray]:
        """Tokens in rows, the samples of each row, and where a sample's tokens are."""
        content = self.content
        laid = {name: content.lay(getattr(batch, name)) for name in ("tokens", *more)}
        return {**laid, "segments": content.segments, "place": content.place}


def unpad(part: Part, found: np.ndarray, out: np.ndarray) -> None:
    """Write a micro-batch's values [most, width] to its samples' rows of the batch's [N, T] array."""
    width = min(part.width, out.shape[1])
    out[part.samples, :width] = found[: len(part.samples), :width]


class Packer:
    """Packs the batches of a run into micro-batches of one shape, which the first batch determines.

    If two batches in a row would have had much less padding in rows of their own, as when answers grow in the course of
    a run, the second of them determines the shape anew: one more program to compile.

    `budget` is the tokens of a micro-batch, `rows` divides its number of rows. One row holds as much as possible, or
    with `short` about two of the longest samples. A sample longer than a row is computed alone, in its own shape.
    """

    def __init__(self, budget: int, short: bool = False, rows: int = 1) -> None:
        self._budget, self._short, self._rows = budget, short, rows
        self.shape: Rows | None = None
        self._wasteful = 0  # batches in a row
        self._last = np.empty(0, np.int64)  # lengths of the batch before: one is scored, then trained on

    @property
    def rule(self) -> dict[str, Any]:
        """What, beside the samples' lengths, determines the rows; a record keeps it."""
        return {"token_budget": self._budget, "short_rows": self._short}

    def parts(self, lengths: np.ndarray) -> Iterator[PackedPart]:
        """The micro-batches of samples of these lengths."""
        self.shape = shape = self._shape_for(lengths)
        alone = np.flatnonzero(lengths > shape.length)
        for sample in alone[np.argsort(-lengths[alone], kind="stable")]:
            own = Rows(self._rows, round_up(int(lengths[sample])), 1)
            yield PackedPart(packed(lengths, [[int(sample)]], own), own)
        short = np.flatnonzero(lengths <= shape.length)
        rows = [[int(short[i]) for i in row] for row in pack(lengths[short], shape.length, shape.most)]
        for at in range(0, len(rows), shape.count):
            yield PackedPart(packed(lengths, rows[at : at + shape.count], shape), shape)

    def _shape_for(self, lengths: np.ndarray) -> Rows:
        known, self._last = np.array_equal(lengths, self._last), lengths
        if self.shape is None:
            return self._choose(lengths)
        if known:
            return self.shape
        computed = _computed(lengths, self.shape)
        if computed <= WASTEFUL * lengths.sum():  # no other shape could be that much better
            self._wasteful = 0
            return self.shape
        own = self._choose(lengths)
        self._wasteful = self._wasteful + 1 if computed > WASTEFUL * _computed(lengths, own) else 0
        if self._wasteful < 2:
            return self.shape
        self._wasteful = 0
        return own

    def _choose(self, lengths: np.ndarray) -> Rows:
        longest = max(self._budget // self._rows, 1)
        if self._short:
            longest = min(longest, max(SHORT_ROW, round_up(2 * int(lengths.max()))))
        budget = max(self._budget // self._rows, 1)
        length = row_length(lengths, longest, budget=budget if self._short else None)
        if self._short:  # two or three samples fill a row: one token more, and it would hold one less
            length = min(max(length, budget), round_up(math.ceil(length * LONGER)))
        rows = pack(lengths[lengths <= length], length)
        units = -(-len(rows) // self._rows)
        # of short rows a pass has many: the last one must not be half empty
        at_once = rows_at_once(units, length, budget) if self._short else max(min(budget // length, units), 1)
        count = at_once * self._rows
        # later batches may have more, shorter samples; a fused kernel's memory grows with how many a row may hold
        most = 2 ** math.ceil(math.log2(1.5 * max((len(row) for row in rows), default=1)))
        return Rows(count, length, min(most, MOST))


def _computed(lengths: np.ndarray, shape: Rows) -> int:
    """Positions computed for samples of these lengths; one that is longer than a row counts as a whole pass."""
    short = lengths[lengths <= shape.length]
    passes = -(-len(pack(short, shape.length, shape.most)) // shape.count)
    return (passes + len(lengths) - len(short)) * shape.tokens

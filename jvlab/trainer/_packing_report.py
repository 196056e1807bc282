"""`Packing`: how a training step lays samples into arrays, and how much of what it computes is padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.trainer._batching import Buckets
from jvlab.trainer._micro_batches import Packer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        from jvlab.views._packing_view import packing_figure

        return packing_figure((self, *others))

    def __repr__(self) -> str:
        counted = lambda n, word: f"{n} {word}{('es' if word == 'pass' else 's') * (n != 1)}"
        samples, rows = counted(len(self.lengths), "sample"), counted(len(self.rows), "row")
        passes, shapes = counted(len(self.shapes), "pass"), counted(self.compiled, "shape")
        return f"Packing({samples} in {rows}, {passes} of {shapes}, {100 * self.padding:.1f} % padding)"


def packing(samples: Any, packer: Packer | None, micro_batch: int) -> Packing:
    """The rows that a packer makes of samples, or, without one, those padded to buckets."""
    lengths = sample_lengths(samples)
    return _packed(lengths, packer) if packer is not None else _padded(lengths, Buckets(rows=micro_batch))


def sample_lengths(samples: Iterable[Any]) -> np.ndarray:
    """Tokens of each sample, prompt included; of a RolloutBatch, of samples, or as they are."""
    found = [len(s.prompt_token_ids) + len(s.token_ids) if hasattr(s, "token_ids") else s for s in samples]
    lengths = np.asarray(found)
    if lengths.ndim != 1 or not len(lengths) or not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 1:
        raise ConfigError(
            "no lengths to pack", remedy="pass a RolloutBatch, or the tokens of each sample: [512, 300, …], at least 1"
        )
    return lengths.astype(np.int64)


def _packed(lengths: np.ndarray, packer: Packer) -> Packing:
    rows: list[tuple[int, ...]] = []
    widths: list[int] = []
    shapes: list[tuple[int, int]] = []
    for part in packer.parts(lengths):
        count, left = part.shape.count, list(part.samples)
        for row in part.content.segments:
            rows.append(tuple(int(left.pop(0)) for _ in range(int(row.max()))))
        widths += [part.shape.length] * count
        shapes.append((count, part.shape.length))
    return Packing(lengths, tuple(rows), tuple(widths), tuple(shapes))


def _padded(lengths: np.ndarray, buckets: Buckets) -> Packing:
    order = np.argsort(-lengths, kind="stable")
    rows: list[tuple[int, ...]] = []
    shapes: list[tuple[int, int]] = []
    for at in range(0, len(order), buckets.rows):
        here = order[at : at + buckets.rows]
        rows += [(int(sample),) for sample in here] + [()] * (buckets.rows - len(here))
        shapes.append((buckets.rows, buckets.width(int(lengths[here].max()))))
    widths = tuple(width for count, width in shapes for _ in range(count))
    return Packing(lengths, tuple(rows), widths, tuple(shapes))

"""Values as evidence for a reading of a leaf: a sample compared with the checkpoint's, or the leaf as an engine has it.

Constant values, and values unrelated to the checkpoint's, are no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.layout._types import Binding
from jvlab.layout.rules._alternatives import Alternative
from jvlab.layout.rules._rules import apply_binding, invert_binding

SAMPLES = 512  # elements of each binding
RELATED = 0.8  # correlation from which two arrays count as related
CLOSE = 0.5  # relative error that a right reading stays below, even after training
APART = 4.0  # a right reading has an error this many times smaller than a wrong one
# up to this size an array is fetched whole; of a larger one only the sample
WHOLE_BYTES = 1 << 26


@dataclass(frozen=True)
class Match:
    """A sample of leaves under one reading, compared with the same elements of the checkpoint."""

    error: float  # ‖leaf − checkpoint‖ / ‖checkpoint‖
    correlation: float  # 0 where one of the two is constant
    scale: float  # the factor that best fits the leaf to the checkpoint
    count: int  # elements compared

    @property
    def related(self) -> bool:
        """Whether the two are correlated at all."""
        return self.count > 1 and self.correlation >= RELATED

    @property
    def fits(self) -> bool:
        """Whether they are the same values, up to training."""
        return self.related and self.error <= CLOSE

    def beats(self, other: Match) -> bool:
        """Whether this reading is right and the other wrong."""
        return self.fits and self.error * APART < other.error


def match(
    reading: Alternative | Sequence[Binding],
    values: Mapping[str, Any],
    checkpoint: Mapping[str, np.ndarray],
    samples: int = SAMPLES,
    seed: int = 0,
) -> Match:
    """How well leaves match the checkpoint under a reading, over a sample of every binding."""
    bindings, factor = (
        (reading.bindings, reading.factor)
        if isinstance(reading, Alternative)
        else (reading, 1.0)
    )
    rng = np.random.default_rng(seed)
    samples_of: list[tuple[np.ndarray, np.ndarray]] = []
    for b in bindings:
        if b.leaf in values and b.tensor in checkpoint:
            leaf_at, tensor_at = _sample(b, samples, rng)
            mine = factor * (_gather(values[b.leaf], leaf_at) + b.add)
            samples_of.append((mine, _gather(checkpoint[b.tensor], tensor_at)))
    return compare(samples_of)


def compare(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Match:
    """Samples of the same elements on both sides, one pair for each array."""
    good = [
        (a[ok].astype(np.float64), b[ok].astype(np.float64))
        for a, b in pairs
        for ok in [_finite(a, b)]
        if ok.any()
    ]
    if not good:
        return Match(math.inf, 0.0, 1.0, 0)
    a, b = (np.concatenate([pair[side] for pair in good]) for side in (0, 1))
    size = math.sqrt(float(np.square(b).sum()))
    if not size:
        return Match(math.inf, 0.0, 1.0, int(a.size))
    # Each array relative to its own mean: norms of any two models of a family have similar means.
    one, other = (
        np.concatenate([pair[side] - pair[side].mean() for pair in good])
        for side in (0, 1)
    )
    spread = math.sqrt(float(np.square(one).sum()) * float(np.square(other).sum()))
    constant = spread <= 1e-10 * float(np.abs(a).max() * np.abs(b).max()) * a.size
    correlation = 0.0 if constant else float((one * other).sum()) / spread
    own = float(np.square(a).sum())
    error = math.sqrt(float(np.square(a - b).sum())) / size
    return Match(
        error, correlation, float((a * b).sum()) / own if own else 1.0, int(a.size)
    )


def _finite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isfinite(a) & np.isfinite(b)


def _sample(
    b: Binding, samples: int, rng: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], ...]:
    """Indices of the same elements in the leaf and in the tensor."""
    sizes = [a.size for a in b.axes]
    total = math.prod(sizes)
    picked = np.arange(total) if total <= samples else rng.integers(0, total, samples)
    steps = np.unravel_index(picked, sizes) if sizes else ()
    leaf = [np.full(len(picked), at, np.int64) for at in b.leaf_start]
    tensor = [np.full(len(picked), at, np.int64) for at in b.tensor_start]
    for axis, step in zip(b.axes, steps, strict=True):
        leaf[axis.leaf_dim] += axis.leaf_step * step
        tensor[axis.tensor_dim] += axis.tensor_step * step
    return tuple(leaf), tuple(tensor)


def _gather(array: Any, at: tuple[np.ndarray, ...]) -> np.ndarray:
    if not isinstance(array, np.ndarray) and getattr(array, "nbytes", 0) <= WHOLE_BYTES:
        array = np.asarray(array)
    return np.asarray(array[at]).astype(np.float32)


def reread(
    alternative: Alternative, values: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The leaves that the engine's values amount to if this alternative is the right reading.

    The current rules map leaves to tensors; here the tensors are mapped back by the alternative.
    """
    tensors: dict[str, np.ndarray] = {}
    for b in alternative.now:
        leaf = np.asarray(values[b.leaf])
        if b.tensor not in tensors:
            # 1 + w in bfloat16 would lose most digits of w
            wide = b.add and leaf.dtype.itemsize < 4
            tensors[b.tensor] = np.zeros(
                b.tensor_shape, np.float32 if wide else leaf.dtype
            )
        apply_binding(b, leaf, tensors[b.tensor])
    out: dict[str, np.ndarray] = {}
    for b in alternative.bindings:
        if b.leaf not in out:
            out[b.leaf] = np.array(values[b.leaf])
        invert_binding(b, tensors[b.tensor], out[b.leaf])
    return (
        {k: (v / alternative.factor).astype(v.dtype) for k, v in out.items()}
        if alternative.factor != 1
        else out
    )

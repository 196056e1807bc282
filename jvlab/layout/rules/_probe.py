"""Values as evidence: which candidate rule makes a leaf's values equal to the checkpoint's.

Only values that vary together are evidence. Errors are relative to the standard deviation of the checkpoint's values,
so that zeros under `+ 1`, or any values near 1, do not pass for a matching norm: a constant has no deviation, and
unrelated values have an error of 1 or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._apply import apply_binding, mark_binding
from jvlab.layout.rules._candidates import Candidate, Pair
from jvlab.layout.rules._rules import Compiled, bind_group, parse_rule

_CLOSE = 0.5  # error that a right candidate stays below, even after training
_APART = 4.0  # how many times worse every other candidate must be
_FLOOR = 0.02  # and their least error: candidates that all fit (a symmetric matrix) are inconclusive
_CHANCE = 5.0  # standard deviations of Fisher's z: the fewer the values, the closer they must match
_MULTIPLE = 0.02  # error of an exact multiple, rounding to bfloat16 included
_PARTS = 24  # parts of a stack that are compared, first and last included
_LARGEST = 1 << 24  # elements up to which a leaf is read though its shapes fit only one way


@dataclass(frozen=True)
class Measure:
    """How well the values under one candidate match the checkpoint's."""

    error: float  # relative to the checkpoint's deviation; infinite if that is 0
    count: int
    varies: bool  # the leaf is not constant
    equal: bool  # equal to the checkpoint's, constant or not
    factors: Mapping[tuple[str, str], float]  # (leaf, tensor) → f, where the tensor is exactly f times the leaf

    @property
    def close(self) -> bool:
        """Whether the match is too good for chance."""
        if not self.varies or self.count < 4:
            return False
        r = math.tanh(_CHANCE / math.sqrt(self.count - 3))
        return self.error <= min(_CLOSE, math.sqrt(1 - r * r))


@dataclass(frozen=True)
class Probe:
    """Values of both sides, and what candidates are bound with."""

    tensors: Mapping[str, CheckpointTensor]
    config: Mapping[str, Any] | None
    values: Mapping[str, Any]
    checkpoint: Mapping[str, Any]

    def measures(self, options: Sequence[tuple[Pair, Candidate]]) -> list[Measure] | None:
        """One measure each; None if some value is not available."""
        found = [self._measure(c, p) for p, c in options]
        return None if any(m is None for m in found) else [m for m in found if m is not None]

    def small(self, pair: Pair) -> bool:
        """Whether the leaf is small enough to be read even if it is unambiguous."""
        return all(math.prod(t.shape) <= _LARGEST for t in (*pair.leaves, *pair.tensors))

    def _measure(self, candidate: Candidate, pair: Pair) -> Measure | None:
        """Over the first layer, or over layers spread across a stack; None if a value is not available."""
        compiled = Compiled(parse_rule(candidate.line))
        key = next(iter(pair.leaves[0].members))
        paths = {k: t.members.get(key) for k, t in enumerate(pair.leaves)}
        group = {k: p for k, p in paths.items() if p is not None and p in self.values}
        if len(group) != len(paths):
            return None
        found = compiled.match(group[0])
        if found is None:
            return None
        shapes = {p: np.asarray(self.values[p]) for p in group.values()}
        bindings, problems = bind_group(compiled, found[1], group, shapes, self.tensors, self.config)
        if problems or any(b.tensor not in self.checkpoint for b, _ in bindings):
            return None
        chosen = sorted({round(j) for j in np.linspace(0, len(bindings) - 1, min(len(bindings), _PARTS))})
        taken = [bindings[j][0] for j in chosen]
        plain = {path: np.asarray(array, np.float32) for path, array in shapes.items()}
        # part by part: of a fused tensor, one part may be scaled and another not
        sums = [_Sums(b, plain[b.leaf], np.asarray(self.checkpoint[b.tensor], np.float32)) for b in taken]
        return _together([(b.leaf, b.tensor) for b in taken], sums, candidate)


class _Sums:
    """Sums over one binding's values and the checkpoint's."""

    def __init__(self, binding: Binding, leaf: np.ndarray, expected: np.ndarray) -> None:
        got, seen = np.zeros(expected.shape, np.float32), np.zeros(expected.shape, np.uint8)
        apply_binding(binding, leaf, got)
        mark_binding(binding, seen)
        mine, theirs = got[seen > 0].astype(np.float64), expected[seen > 0].astype(np.float64)
        self.count = mine.size
        self.wrong = float(np.sum((mine - theirs) ** 2))
        self.spread = float(np.sum((theirs - theirs.mean()) ** 2)) if theirs.size else 0.0
        self.total = float(np.sum(theirs**2))
        self.varies = bool(np.ptp(mine) > 1e-6 * np.abs(mine).max()) if mine.size else False
        self.flat = not theirs.size or bool(np.ptp(theirs) <= 1e-6 * np.abs(theirs).max())
        square = float(np.sum(mine**2))
        self.factor = float(mine @ theirs) / square if square > 0 else 0.0
        self.residual = float(np.sum((theirs - self.factor * mine) ** 2))  # residual of the multiple

    @property
    def exact(self) -> bool:
        """Whether it is an exact multiple: the factor must explain far more than the residual."""
        conclusive = self.varies and not self.flat and self.count >= 8 and self.residual <= _MULTIPLE**2 * self.spread
        return conclusive and (self.wrong > 100 * self.residual or abs(self.factor - 1) <= _MULTIPLE)


def _together(names: Sequence[tuple[str, str]], sums: Sequence[_Sums], candidate: Candidate) -> Measure:
    wrong, spread = sum(s.wrong for s in sums), sum(s.spread for s in sums if not s.flat)
    count, total = sum(s.count for s in sums), sum(s.total for s in sums)
    finite = math.isfinite(wrong) and math.isfinite(total)
    exact = finite and all(s.exact for s in sums)
    plain = not parse_rule(candidate.line).add
    return Measure(
        math.sqrt(wrong / spread) if finite and spread > 0 else math.inf,
        count,
        finite and any(s.varies for s in sums),
        finite and wrong <= 1e-6 * max(total, 1e-30),
        {n: s.factor for n, s in zip(names, sums, strict=True)} if exact and plain else {},
    )


def settle(measures: Sequence[Measure]) -> int | None:
    """The one candidate whose values match the checkpoint clearly better than all others."""
    ranked = sorted((m.error, j) for j, m in enumerate(measures))
    if not ranked or not measures[ranked[0][1]].close:
        return None
    if len(ranked) > 1 and ranked[1][0] < max(ranked[0][0] * _APART, _FLOOR):
        return None
    return ranked[0][1]


def multiple(measures: Sequence[Measure]) -> Mapping[tuple[str, str], float]:
    """(leaf, tensor) → factor, where some candidate makes the leaf an exact multiple of the checkpoint's numbers."""
    odd = [{n: f for n, f in m.factors.items() if abs(f - 1) > _MULTIPLE} for m in measures if m.factors]
    return odd[0] if odd and all(odd) else {}

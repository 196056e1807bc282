"""Numbers as evidence: which candidate rule makes a leaf's values equal to the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jvlab.layout._apply import apply_binding
from jvlab.layout._candidates import Candidate, Pair
from jvlab.layout._rules import Compiled, bind_group, parse_rule
from jvlab.layout._types import CheckpointTensor

_CLOSE = 0.5  # relative error that a right candidate stays under, trained values included
_APART = 4.0  # how many times worse every other candidate must be


def settle(
    pair: Pair,
    options: Sequence[Candidate],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
) -> tuple[Candidate, float] | None:
    """The one candidate whose values match the checkpoint clearly better than all others, and its relative error."""
    found = settle_pairs([(pair, c) for c in options], tensors, config, values, checkpoint)
    return (found[1], found[2]) if found else None


def settle_pairs(
    options: Sequence[tuple[Pair, Candidate]],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
) -> tuple[Pair, Candidate, float] | None:
    """The same for a leaf whose tensor is open too: the one (pair, candidate) that matches clearly best."""
    found = [_error(c, p, tensors, config, values, checkpoint) for p, c in options]
    ranked = sorted((e, j) for j, e in enumerate(found) if e is not None)
    if not ranked or len(ranked) < len(options) or ranked[0][0] > _CLOSE:
        return None
    if len(ranked) > 1 and ranked[0][0] * _APART > ranked[1][0]:
        return None
    return (*options[ranked[0][1]], ranked[0][0])


def _error(
    candidate: Candidate,
    pair: Pair,
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
) -> float | None:
    """The relative error over the first layer; None where a value is not at hand."""
    compiled = Compiled(parse_rule(candidate.line))
    key = next(iter(pair.leaves[0].members))
    paths = {k: t.members.get(key) for k, t in enumerate(pair.leaves)}
    group = {k: p for k, p in paths.items() if p is not None and p in values}
    if len(group) != len(paths):
        return None
    found = compiled.match(group[0])
    if found is None:
        return None
    shapes = {p: np.asarray(values[p]) for p in group.values()}
    bindings, problems = bind_group(compiled, found[1], group, shapes, tensors, config)
    if problems or any(b.tensor not in checkpoint for b, _ in bindings):
        return None
    wrong = total = 0.0
    for name in dict.fromkeys(b.tensor for b, _ in bindings):
        want = np.asarray(checkpoint[name], dtype=np.float32)
        got = np.zeros(want.shape, np.float32)
        seen = np.zeros(want.shape, np.float32)
        for binding in (b for b, _ in bindings if b.tensor == name):
            leaf = shapes[binding.leaf].astype(np.float32)
            apply_binding(binding, leaf, got)
            apply_binding(binding, np.ones_like(leaf) - np.float32(binding.add), seen)
        wrong += float(np.sum(((got - want) * seen) ** 2, dtype=np.float64))
        total += float(np.sum((want * seen) ** 2, dtype=np.float64))
    return float(np.sqrt(wrong / total)) if total > 0 else None

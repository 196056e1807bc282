"""Suggests a rule for a leaf that none matches, if names and shapes support one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jvlab.layout._types import CheckpointTensor
from jvlab.rules._candidates import candidates
from jvlab.rules._pairs import pair_up
from jvlab.rules._roles import classify, templates
from jvlab.rules._rules import HasShape

_SURE = 0.85  # confidence of a pair matched by name; equal size alone is below


def suggest(
    leaf: str,
    open_leaves: Collection[str],
    leaves: Mapping[str, HasShape],
    open_tensors: Collection[str],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
) -> str:
    """A line for this leaf, from the unmatched leaves and tensors; empty if nothing is certain.

    A wrong suggestion is worse than none: it would bind, to the wrong tensor.
    """
    mine = classify(templates({p: tuple(a.shape) for p, a in leaves.items()}))
    theirs = classify(templates({n: tuple(t.shape) for n, t in tensors.items()}))
    left = {t: r for t, r in mine.items() if set(t.members.values()) <= set(open_leaves)}
    wanted = {t: r for t, r in theirs.items() if set(t.members.values()) <= set(open_tensors)}
    for pair in pair_up(left, wanted, config).pairs:
        if pair.confidence < _SURE or not any(leaf in t.members.values() for t in pair.leaves):
            continue
        lines = [c.line for c in candidates(pair, config, False, False)]
        return lines[0] if len(lines) == 1 else ""
    return ""

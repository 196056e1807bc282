"""What else a leaf could mean: the other rules that fit the same shapes. numpy only.

Coverage and matching digests do not show that a mapping is right: a square kernel fits transposed, a query fits where a
key belongs. `alternatives` lists these other readings, each with its rules; _evidence.py checks by values, or by the
model's outputs, which one is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._alternative import Alternative
from jvlab.layout.rules._readings import Readings
from jvlab.layout.rules._rules import HasShape
from jvlab.layout.rules._ruleset import Rules


def alternatives(
    rules: Rules,
    shapes: Mapping[str, HasShape],
    tensors: Sequence[CheckpointTensor],
    config: Mapping[str, Any] | None = None,
) -> list[Alternative]:
    """Every other reading that fits the shapes and fills the same tensors, the simplest first.

    A leaf without one is determined by its shape; a leaf with some is ambiguous.
    """
    return Readings(rules, shapes, tensors, config).all()


def alternatives_of(mapping: Any) -> list[Alternative]:
    """The alternatives to a mapping's rules; none for a mapping built by hand."""
    origin = mapping._origin
    return [] if origin is None else alternatives(origin.rules, origin.shapes, origin.tensors, origin.config)


def together(parts: Sequence[Alternative]) -> Alternative | None:
    """Several alternatives as one; None where two of them rewrite the same rule or leaf."""
    replaced = [r for a in parts for r in a.replaces]
    leaves = [leaf for a in parts for leaf in dict.fromkeys(b.leaf for b in a.now)]
    if len(set(replaced)) != len(replaced) or len(set(leaves)) != len(leaves) or any(a.factor != 1 for a in parts):
        return None
    kinds = list(dict.fromkeys(a.kind for a in parts))
    return Alternative(
        kinds[0] if len(kinds) == 1 else "several",
        tuple(r for a in parts for r in a.rules),
        tuple(replaced),
        "; ".join(dict.fromkeys(a.reason for a in parts)),
        tuple(b for a in parts for b in a.now),
        tuple(b for a in parts for b in a.bindings),
        parts[0].op,
    )


def joint(found: Sequence[Alternative]) -> list[Alternative]:
    """The same change in several rules at once: rotary order of q and k, an offset of every norm, …"""
    groups: dict[str, list[Alternative]] = defaultdict(list)
    for alternative in found:
        if alternative.op and alternative.kind != "swapped":
            groups[alternative.op].append(alternative)
    out = []
    for members in groups.values():
        chosen: list[Alternative] = []
        for a in sorted(members, key=lambda a: a.part):  # whole rules before single choices
            if together([*chosen, a]) is not None:
                chosen.append(a)
        both = together(chosen) if len(chosen) > 1 else None
        out += [both] if both is not None else []
    return out

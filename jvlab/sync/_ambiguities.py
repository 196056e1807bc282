"""The ambiguities that names and shapes leave in a mapping, less what a link has settled."""

from __future__ import annotations

from typing import Any

from jvlab.sync._value_check import ambiguities


def ambiguities_of(mapping: Any) -> dict[str, tuple[tuple[str, str], ...]]:
    """Leaf -> the alternatives that names and shapes allow; cached on the mapping."""
    cache = mapping.__dict__
    if "_ambiguities" not in cache:
        origin = mapping._origin
        cache["_ambiguities"] = ambiguities(mapping.bindings, origin.config if origin is not None else None)
    return cache["_ambiguities"]


def unsettled(mapping: Any) -> dict[str, str]:
    """Leaf -> ambiguities not settled yet; what its link settled also counts for leaves that are bound the same."""
    known = {leaf: "; ".join(reason for _, reason in found) for leaf, found in ambiguities_of(mapping).items()}
    link = mapping._link() if mapping._link is not None else None
    settled = getattr(link, "meaning", None)
    if link is None or settled is None or settled.state != "checked":
        return known
    if link.mapping is mapping:
        return dict(settled.ambiguous)
    before, now = _targets(link.mapping.bindings), _targets(mapping.bindings)
    changed = {leaf: why for leaf, why in known.items() if before.get(leaf) != now[leaf]}
    return {**{leaf: why for leaf, why in settled.ambiguous.items() if leaf in known}, **changed}


def _targets(bindings: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Leaf -> where its elements go, regardless of the rule's text."""
    out: dict[str, set[tuple[Any, ...]]] = {}
    for b in bindings:
        out.setdefault(b.leaf, set()).add((b.tensor, b.axes, b.leaf_start, b.tensor_start, b.add))
    return out

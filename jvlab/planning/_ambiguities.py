"""What of a mapping names and shapes leave open, and what a link has settled of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab.planning._value_check import ambiguities

if TYPE_CHECKING:
    pass


def ambiguities_of(mapping: Any) -> dict[str, tuple[tuple[str, str], ...]]:
    """Leaf -> the readings that names and shapes leave open, of a mapping."""
    kept = mapping.__dict__  # it never changes, and a table asks often
    if "_ambiguities" not in kept:
        origin = mapping._origin
        kept["_ambiguities"] = ambiguities(mapping.bindings, origin.config if origin is not None else None)
    return kept["_ambiguities"]


def open_readings(mapping: Any) -> dict[str, str]:
    """What of a mapping nothing has settled yet; what its link settled counts for leaves that it binds alike."""
    known = {leaf: "; ".join(reason for _, reason in found) for leaf, found in ambiguities_of(mapping).items()}
    link = mapping._link() if mapping._link is not None else None
    settled = getattr(link, "meaning", None)
    if link is None or settled is None or settled.state != "checked":
        return known
    if link.mapping is mapping:
        return dict(settled.ambiguous)
    before, now = _ways(link.mapping.bindings), _ways(mapping.bindings)
    changed = {leaf: why for leaf, why in known.items() if before.get(leaf) != now[leaf]}
    return {**{leaf: why for leaf, why in settled.ambiguous.items() if leaf in known}, **changed}


def _ways(bindings: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Leaf -> where its elements go, whatever the rule is called."""
    out: dict[str, set[tuple[Any, ...]]] = {}
    for b in bindings:
        out.setdefault(b.leaf, set()).add((b.tensor, b.axes, b.leaf_start, b.tensor_start, b.add))
    return out

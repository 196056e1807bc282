"""Finds the leaf, or the slice of a stacked leaf, that a name means in a mapping."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jvlab._errors import ConfigError
from jvlab.layout._slices import Slice, layer_number, parse_slice, slice_of, without_number

if TYPE_CHECKING:
    from jvlab.layout._types import Binding
    from jvlab.sync._mapping import Mapping


@dataclass(frozen=True)
class Place:
    """A leaf, or one slice of a stacked leaf."""

    leaf: str
    part: Slice | None = None
    alias: str = ""  # the name that was asked for, if it numbers a layer that has no leaf of its own

    @property
    def name(self) -> str:
        """`layers.attn.q.kernel`, or `layers.attn.q.kernel[1]`."""
        return f"{self.leaf}{self.part or ''}"


def find(mapping: Mapping, name: str) -> Place:
    """What a name means: a leaf's path, or its beginning or end; a slice `leaf[1]`; a tensor; a parameter.

    `layers.1.attn.q` also means slice 1 of the stacked leaf `layers.attn.q.kernel`.
    """
    if (given := parse_slice(name)) is not None:
        return _given_slice(mapping, name, *given)
    near = _near([x.path for x in mapping.plan.leaves], name)
    if near:
        return Place(_only(near, name))
    rows = [r for r in mapping.rows if r.leaf and name in (r.tensor, r.parameter)]
    if rows:
        leaf = _only(sorted({r.leaf for r in rows}), name)
        parts = {slice_of(b, mapping.stacked) for r in rows for b in mapping.bindings if _same(b, leaf, r.tensor)}
        return Place(leaf, parts.pop() if len(parts) == 1 else None)
    found = _numbered(mapping, name)
    if found:
        return found[_names(found).index(_only(_names(found), name))]
    raise _unknown(mapping, name)


def targets(mapping: Mapping, place: Place) -> list[str]:
    """The parameters that a slice is written to; none for a whole leaf, or if vLLM's own loader writes them."""
    if place.part is None:
        return []
    known = {p.name for p in mapping.plan.parameters}
    rows = (r for r in mapping.rows if r.name == place.name and r.parameter in known)
    return list(dict.fromkeys(r.parameter for r in rows))


def bindings_at(mapping: Mapping, place: Place) -> list[Binding]:
    """The bindings of a leaf, or of one of its slices."""
    of_leaf = [b for b in mapping.bindings if b.leaf == place.leaf]
    return [b for b in of_leaf if place.part is None or slice_of(b, mapping.stacked) == place.part]


def _near(paths: Sequence[str], name: str) -> list[str]:
    """The leaf with this path, else those whose path begins with it, else those whose path ends with it."""
    if name in paths:
        return [name]
    return [p for p in paths if p.startswith(name + ".")] or [p for p in paths if p.endswith("." + name)]


def _only(near: Sequence[str], name: str) -> str:
    if len(near) == 1:
        return near[0]
    shown = ", ".join(near[:8]) + (" …" if len(near) > 8 else "")
    raise ConfigError(f"{name!r} matches {len(near)} leaves", remedy=f"ask for one of: {shown}", name=name)


def _same(b: Binding, leaf: str, tensor: str) -> bool:
    return b.leaf == leaf and b.tensor == tensor


def _names(places: Sequence[Place]) -> list[str]:
    return [p.name for p in places]


def _given_slice(mapping: Mapping, name: str, base: str, dim: int, index: int) -> Place:
    """`layers.attn.q.kernel[1]`."""
    leaf = find(mapping, base).leaf
    if mapping.stacked.get(leaf) != dim:
        how = f"its layers are stacked along dim {mapping.stacked[leaf]}" if leaf in mapping.stacked else "it is not"
        raise ConfigError(f"{name!r} asks for a slice of a stacked leaf, and {leaf} has none there: {how}", name=name)
    count = next(b.leaf_shape[dim] for b in mapping.bindings if b.leaf == leaf)
    if index >= count:
        raise ConfigError(f"{leaf} has {count} slices, so there is no slice {index}", name=name)
    return Place(leaf, Slice(dim, index, count))


def _numbered(mapping: Mapping, name: str) -> list[Place]:
    """The slices that a name means which numbers layers, as if each had its own leaf."""
    out = []
    for shorter, number in without_number(name):
        for leaf in _near(list(mapping.stacked), shorter):
            of_layer = (b for b in mapping.bindings if b.leaf == leaf and layer_number(b.tensor) == number)
            part = next((slice_of(b, mapping.stacked) for b in of_layer), None)
            out += [Place(leaf, part, name)] if part is not None else []
    return out


def _unknown(mapping: Mapping, name: str) -> ConfigError:
    paths = [x.path for x in mapping.plan.leaves]
    known = [*paths, *(r.numbered for r in mapping.rows if r.numbered), *(r.tensor for r in mapping.rows)]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    remedy = f"did you mean {', '.join(close)}?" if close else f"leaves look like {', '.join(paths[:3])}"
    return ConfigError(f"no leaf, tensor or parameter is called {name!r}", remedy=remedy, name=name)

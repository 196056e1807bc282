"""Slices of stacked leaves: which index of which dimension holds one layer. No numpy needed.

A leaf `layers.attn.q.kernel [L, d, n, h]` holds a kernel for each of L layers, and each goes to another tensor. Where a
layer matters, it is named by its slice: `layers.attn.q.kernel[1]`, or `[:, 1]` if layers are on the second dimension.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jvlab.layout._types import Binding

_NUMBER = re.compile(r"(?:^|(?<=[./]))\d+(?=[./]|$)")  # a component of a name
_INDEXED = re.compile(r"\[((?::,\s*)*)(\d+)\]$")


@dataclass(frozen=True)
class Slice:
    """One index of the dimension along which a leaf's layers are stacked."""

    dim: int
    index: int
    count: int  # slices of the leaf

    def __str__(self) -> str:
        return slice_text(self.dim, self.index)


def slice_text(dim: int, index: int) -> str:
    """`[1]`; `[:, 1]` on the second dimension."""
    return f"[{':, ' * dim}{index}]"


def without_slice(name: str) -> str:
    """`layers.q[1]` → `layers.q`."""
    return _INDEXED.sub("", name)


def parse_slice(name: str) -> tuple[str, int, int] | None:
    """`layers.q[:, 3]` → (`layers.q`, 1, 3): the leaf, the dimension, the index; None without an index."""
    found = _INDEXED.search(name)
    return (
        (name[: found.start()], found[1].count(":"), int(found[2])) if found else None
    )


def layer_number(tensor: str) -> int | None:
    """The first number in a tensor's name, the layer's: `model.layers.3.mlp.experts.7.up_proj.weight` → 3."""
    found = _NUMBER.search(tensor)
    return int(found[0]) if found else None


def fixed_dims(b: Binding) -> tuple[int, ...]:
    """The dimensions of a leaf of which a binding takes a single index."""
    moving = {a.leaf_dim for a in b.axes}
    return tuple(
        d for d, size in enumerate(b.leaf_shape) if size > 1 and d not in moving
    )


def stacked_dims(bindings: Iterable[Binding]) -> dict[str, int]:
    """Leaf → the dimension along which its layers are stacked; leaves that are not stacked are left out.

    Each index of that dimension goes to tensors of one layer: what else is stacked in a leaf (experts, keys with
    values) has several indices for a layer.
    """
    by_leaf: dict[str, list[Binding]] = defaultdict(list)
    for b in bindings:
        by_leaf[b.leaf].append(b)
    out = {}
    for leaf, bound in by_leaf.items():
        dims = (
            set(fixed_dims(bound[0])).intersection(*(fixed_dims(b) for b in bound[1:]))
            if len(bound) > 1
            else ()
        )
        for d in sorted(dims):
            pairs = {(layer_number(b.tensor), b.leaf_start[d]) for b in bound}
            numbers, indices = ({pair[k] for pair in pairs} for k in (0, 1))
            if None not in numbers and len(pairs) == len(numbers) == len(indices) > 1:
                out[leaf] = d
                break
    return out


def slice_of(b: Binding, dims: Mapping[str, int]) -> Slice | None:
    """The slice of a stacked leaf that a binding takes; None if the leaf is not stacked."""
    d = dims.get(b.leaf)
    return None if d is None else Slice(d, b.leaf_start[d], b.leaf_shape[d])


def slice_name(b: Binding, dims: Mapping[str, int]) -> str:
    """The leaf's path, with the slice that a binding takes: `layers.attn.q.kernel[1]`."""
    return f"{b.leaf}{slice_of(b, dims) or ''}"


def numbered(leaf: str, tensor: str) -> str:
    """The name of a slice as if each layer had its own leaf, `layers.1.attn.q.kernel`; "" if there is no place for it.

    The number belongs where the tensor has it, here behind `layers`.
    """
    found = _NUMBER.search(tensor)
    if found is None or not found.start():
        return ""
    before = re.split(r"[./]", tensor[: found.start() - 1])[-1]
    parts = leaf.split(".")
    if before not in parts:
        return ""
    at = parts.index(before) + 1
    return ".".join([*parts[:at], found[0], *parts[at:]])


def without_number(name: str) -> list[tuple[str, int]]:
    """`layers.1.attn.q` → [(`layers.attn.q`, 1)]: the name without each of its numbers."""
    parts = name.split(".")
    return [
        (".".join([*parts[:k], *parts[k + 1 :]]), int(part))
        for k, part in enumerate(parts)
        if part.isdecimal() and len(parts) > 1
    ]


def distinct_leaves(names: Iterable[str]) -> int:
    """How many leaves these names and slices of leaves belong to."""
    return len({without_slice(name) for name in names})

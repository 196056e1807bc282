"""Leaf shapes that a rule set requires, derived backwards from the checkpoint's tensors. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jvlab._errors import LayoutError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._candidates import TABLES
from jvlab.layout.rules._roles import classify, templates
from jvlab.layout.rules._rules import Captured, Compiled, matcher, name_for
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._sizes import Solver, Unfit, resolve, terms_of
from jvlab.layout.rules._syntax import Ax, Dim, Index, Name, walk_names


def leaf_shapes_for(
    rules: Rules,
    tensors: Sequence[CheckpointTensor],
    config: Mapping[str, Any],
    dtype: str | None = None,
) -> dict[str, LeafShape]:
    """{leaf path: shape} such that `rules.bind` fills exactly these tensors; `dtype` None keeps the checkpoint's.

    Where several rules would fill a tensor, a rule whose leaf name suits the tensor comes first (`embedding` for a
    table, `scale` for a vector), then the order of the rules, as far as the shapes fit.
    """
    found: dict[str, _Found] = {}
    compiled = [Compiled(r) for r in rules if r.leaf]
    patterns = [
        _Pattern(c, k, name, _pattern(name, k))
        for c in compiled
        for name in c.rule.tensors
        if not name.optional
        for k in (range(c.arity) if c.tensor_choice or c.leaf_choice else range(1))
    ]
    tables = cache(lambda: _tables(tensors))  # needed only where rules compete
    for t in tensors:
        by_rule: dict[int, list[tuple[_Pattern, Captured]]] = {}
        for p in patterns:
            found_here = p.pattern(t.name)
            if found_here is not None:
                by_rule.setdefault(id(p.compiled), []).append((p, found_here))
        claims = list(by_rule.values())
        if len(claims) > 1:
            table = t.name in tables()
            claims.sort(
                key=lambda claim, t=t, table=table: (
                    not _natural(claim[0][0].compiled, t, table)
                )
            )
        _settle(claims, t, config, found)
    out: dict[str, LeafShape] = {}
    for path, f in found.items():
        dims = (
            resolve(f.compiled.rule.left, f.choice)
            if f.compiled.leaf_choice
            else f.compiled.rule.left
        )
        out[path] = LeafShape(
            _shape(dims, {**f.sizes, **f.counted}, f.tensor.shape),
            dtype or f.tensor.dtype,
        )
    return out


@dataclass(frozen=True)
class _Pattern:
    """A checkpoint name of a rule, for one of its choices."""

    compiled: Compiled
    choice: int
    name: Name
    pattern: Callable[[str], Captured | None]


@dataclass
class _Found:
    """A leaf whose shape is being found: the rule, sizes from its first tensor, axes that only names enumerate."""

    compiled: Compiled
    choice: int
    tensor: CheckpointTensor
    sizes: dict[str, int]
    counted: dict[str, int] = field(default_factory=dict)


def _tables(tensors: Sequence[CheckpointTensor]) -> set[str]:
    roles = classify(templates({t.name: tuple(t.shape) for t in tensors}))
    return {
        name
        for template, role in roles.items()
        if role.base in TABLES
        for name in template.members.values()
    }


def _natural(c: Compiled, tensor: CheckpointTensor, table: bool) -> bool:
    """Whether the last word of the leaf's name suits the tensor; words without a convention suit all."""
    assert c.rule.leaf is not None
    last = c.rule.leaf.parts[-1]
    word = last.rpartition(".")[2] if isinstance(last, str) else ""
    fits = {
        "embedding": table,
        "scale": len(tensor.shape) == 1,
        "kernel": len(tensor.shape) > 1 and not table,
    }
    return fits.get(word, True)


def _settle(
    claims: Sequence[Sequence[tuple[_Pattern, Captured]]],
    tensor: CheckpointTensor,
    config: Mapping[str, Any],
    found: dict[str, _Found],
) -> None:
    """The first rule that fits the tensor's shape determines its leaves; `bind` reports tensors that no rule names."""
    for at, claim in enumerate(claims):
        tried: dict[str, _Found] = {}
        try:
            for pattern, values in claim:
                _take(pattern, values, tensor, config, found, tried)
        except LayoutError:
            if at + 1 == len(claims):
                raise
            continue
        found |= tried
        return


def _take(
    p: _Pattern,
    values: Captured,
    tensor: CheckpointTensor,
    config: Mapping[str, Any],
    found: Mapping[str, _Found],
    new: dict[str, _Found],
) -> None:
    c = p.compiled
    assert c.rule.leaf is not None
    path = name_for(c.rule.leaf.parts, p.choice, values)
    known = found if path in found else new
    # the other tensors of a stack have the same shape; `bind` refuses them if not
    if path not in known:
        new[path] = _Found(c, p.choice, tensor, _sizes(p, tensor, config))
    named = {a for d in c.rule.left for m in terms_of(d) for a in m}
    counted = known[path].counted
    for axis, value in values.items():
        if axis in named and isinstance(value, int):
            counted[axis] = max(counted.get(axis, 0), value + 1)


def _sizes(
    p: _Pattern, tensor: CheckpointTensor, config: Mapping[str, Any]
) -> dict[str, int]:
    c = p.compiled
    right = resolve(c.rule.right, p.choice) if c.tensor_choice else c.rule.right
    if any(isinstance(d, Ax) and d.name == "..." for d in right):
        return {}
    places = [f"tensor {tensor.shape} dimension {d}" for d in range(len(right))]
    try:
        return Solver(c.rule, config).solve(
            list(zip(right, tensor.shape, places, strict=True))
        )
    except (Unfit, ValueError) as e:
        raise LayoutError(
            f"tensor {tensor.name!r} {tensor.shape} does not suit the rule {c.text}: {e}",
            remedy="name the tree's own rules, or pass the parameters",
            tensor=tensor.name,
        ) from e


def _shape(
    dims: Sequence[Dim], sizes: Mapping[str, int], tensor_shape: tuple[int, ...]
) -> tuple[int, ...]:
    out: list[int] = []
    for dim in dims:
        if isinstance(dim, Ax) and dim.name == "...":
            out += tensor_shape
            continue
        total = 0
        for monomial in terms_of(dim):
            size = 1
            for axis in monomial:
                size *= sizes[axis]
            total += size
        out.append(total)
    return tuple(out)


def _pattern(name: Name, k: int) -> Callable[[str], Captured | None]:
    for hole in walk_names(name.parts, k):
        if isinstance(hole, Index) and (
            len(hole.terms) != 1 or hole.terms[0][0] != 1 or hole.const
        ):
            raise LayoutError(
                "a rule with computed indices cannot be read backwards",
                remedy="pass the parameters",
            )
    return matcher(name.parts, k)

"""Leaf shapes that a rule set asks for, read backwards from the checkpoint's tensors. numpy only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jvlab._errors import LayoutError
from jvlab.layout._rules import Compiled, name_for
from jvlab.layout._ruleset import Rules
from jvlab.layout._sizes import Solver, Unfit, resolve, terms_of
from jvlab.layout._syntax import Ax, Dim, Index, Name, Part, Pick, Wild
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import CheckpointTensor


def leaf_shapes_for(
    rules: Rules, tensors: Sequence[CheckpointTensor], config: Mapping[str, Any], dtype: str | None = None
) -> dict[str, LeafShape]:
    """{leaf path: shape} such that `rules.bind` fills exactly these tensors; `dtype` None keeps the checkpoint's."""
    out: dict[str, LeafShape] = {}
    stacks: dict[str, dict[str, int]] = {}  # leaf -> sizes of axes that only the checkpoint's names count
    lefts: dict[str, tuple[Compiled, int, dict[str, int], tuple[int, ...], str]] = {}
    compiled = [Compiled(r) for r in rules if r.leaf]
    patterns = [
        (c, k, name, re.compile(_pattern(name.parts, k)))
        for c in compiled
        for name in c.rule.tensors
        if not name.optional
        for k in (range(c.arity) if c.tensor_choice or c.leaf_choice else range(1))
    ]
    for t in tensors:
        for c, k, name, pattern in patterns:
            found = pattern.fullmatch(t.name)
            if found:
                _take(c, k, name, found.groupdict(), t, config, stacks, lefts)
    for path, (c, k, sizes, shape, made) in lefts.items():
        dims = resolve(c.rule.left, k) if c.leaf_choice else c.rule.left
        merged = {**sizes, **stacks.get(path, {})}
        out[path] = LeafShape(_shape(dims, merged, shape), dtype or made)
    return out


def _take(
    c: Compiled,
    k: int,
    name: Name,
    groups: Mapping[str, str],
    tensor: CheckpointTensor,
    config: Mapping[str, Any],
    stacks: dict[str, dict[str, int]],
    lefts: dict[str, tuple[Compiled, int, dict[str, int], tuple[int, ...], str]],
) -> None:
    assert c.rule.leaf is not None
    values: dict[str, int | str] = {}
    for key, text in groups.items():
        values[key[2:] + "*" if key[0] == "w" else key[2:]] = text if key[0] == "w" else int(text)
    path = name_for(c.rule.leaf.parts, k, values)
    named = {a for d in c.rule.left for m in terms_of(d) for a in m}
    counted = stacks.setdefault(path, {})
    for axis, value in values.items():
        if axis in named and isinstance(value, int):
            counted[axis] = max(counted.get(axis, 0), value + 1)
    if path in lefts:  # the other tensors of a stack have the same shape; `bind` refuses them if not
        return
    right = resolve(c.rule.right, k) if c.tensor_choice else c.rule.right
    sizes: dict[str, int] = {}
    if not any(isinstance(d, Ax) and d.name == "..." for d in right):
        places = [f"tensor {tensor.shape} dimension {d}" for d in range(len(right))]
        try:
            sizes = Solver(c.rule, config).solve(list(zip(right, tensor.shape, places, strict=True)))
        except (Unfit, ValueError) as e:
            raise LayoutError(
                f"tensor {tensor.name!r} {tensor.shape} does not suit the rule {c.text}: {e}",
                remedy="name the tree's own rules, or pass the parameters",
                tensor=tensor.name,
            ) from e
    lefts[path] = (c, k, sizes, tensor.shape, tensor.dtype)


def _shape(dims: Sequence[Dim], sizes: Mapping[str, int], tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
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


def _pattern(parts: Sequence[Part], k: int) -> str:
    out = []
    for part in parts:
        match part:
            case str():
                out.append(re.escape(part))
            case Index():
                if len(part.terms) != 1 or part.terms[0][0] != 1 or part.const:
                    raise LayoutError(
                        "a rule with computed indices cannot be read backwards", remedy="pass the parameters"
                    )
                out.append(f"(?P<n_{part.terms[0][1]}>0|[1-9]\\d*)")
            case Wild():
                out.append(f"(?P<w_{part.name}>.+)")
            case Pick():
                out.append(_pattern(part.options[k], k))
    return "".join(out)

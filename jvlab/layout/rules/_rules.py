"""Applies a checked rule: matches paths, solves shapes, and builds the index maps (Bindings)."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._boxes import merge_axes
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import Axis, Binding, CheckpointTensor
from jvlab.layout.rules._grammar import (
    arity,
    captures,
    check,
    name_has_choice,
    parse_line,
)
from jvlab.layout.rules._sizes import Solver, Unfit, product_terms, resolve
from jvlab.layout.rules._syntax import (
    Ax,
    Cat,
    Dim,
    Index,
    Part,
    Pick,
    Rule,
    Wild,
    walk_axes,
    walk_brackets,
)

# Names with holes, matched in bounded time: numbers `{i}`, any text `{x*}`, choices `[q|k]`.

Captured = dict[str, int | str]  # {i} under "i", {x*} under "x*"
_NUMBER = "0|[1-9][0-9]*"
_ONE_NUMBER = re.compile(_NUMBER)
_DIGITS = 18  # of a number in a name; it fits a 64-bit index


def matcher(parts: Sequence[Part], k: int) -> Callable[[str], Captured | None]:
    """A function from a name to what it captures under choice k, or None.

    Greedy from left to right, as in a regular expression. With several `{x*}` or adjacent numbers an expression could
    backtrack exponentially: these are matched by dynamic programming, in time parts × length.
    """
    flat = list(_flat(parts, k))
    wild = sum(isinstance(p, Wild) for p in flat)
    adjacent = any(
        not isinstance(a, str) and not isinstance(b, str)
        for a, b in itertools.pairwise(flat)
    )
    names = [_key(p) for p in flat if not isinstance(p, str)]
    if len(set(names)) == len(names) and (wild > 1 or adjacent):
        return lambda text: _walk(flat, text)
    pattern = re.compile(_expression(flat), re.DOTALL)

    def match(text: str) -> Captured | None:
        found = pattern.fullmatch(text)
        return _values(found.groupdict()) if found else None

    return match


def _flat(parts: Sequence[Part], k: int) -> Iterator[str | Index | Wild]:
    for part in parts:
        if isinstance(part, Pick):
            yield from _flat(part.options[k], k)
        else:
            yield part


def _key(hole: Index | Wild) -> str:
    return hole.name + "*" if isinstance(hole, Wild) else hole.terms[0][1]


def _expression(flat: Sequence[str | Index | Wild]) -> str:
    """A repeated hole is a back-reference."""
    out = []
    seen = set()
    for part in flat:
        if isinstance(part, str):
            out.append(re.escape(part))
            continue
        group = ("w_" if isinstance(part, Wild) else "n_") + _key(part).rstrip("*")
        if group in seen:
            out.append(f"(?P={group})")
        else:
            out.append(f"(?P<{group}>{'.+' if isinstance(part, Wild) else _NUMBER})")
        seen.add(group)
    return "".join(out)


def _values(groups: dict[str, str]) -> Captured | None:
    if any(name[0] == "n" and len(text) > _DIGITS for name, text in groups.items()):
        return None
    return {
        n[2:] + "*" if n[0] == "w" else n[2:]: t if n[0] == "w" else int(t)
        for n, t in groups.items()
    }


def _walk(flat: Sequence[str | Index | Wild], text: str) -> Captured | None:
    """Backwards: where may each part start so that the rest matches? Then forwards, longest match first."""
    size = len(text)
    # after the last part, only the end of the text
    starts: list[bytearray] = [bytearray(size) + b"\x01"]
    for part in reversed(flat):
        starts.append(_starts(part, text, starts[-1]))
    starts.reverse()
    if not starts[0][0]:
        return None
    at = [0]
    for part, after in zip(flat, starts[1:], strict=True):
        at.append(next(end for end in _ends(part, text, at[-1]) if after[end]))
    return _captured(flat, text, at)


def _starts(part: str | Index | Wild, text: str, after: bytearray) -> bytearray:
    """The positions at which this part may start, given those at which it may end."""
    out = bytearray(len(text) + 1)
    if isinstance(part, Wild):
        last = after.rfind(1)
        out[: max(last, 0)] = b"\x01" * max(last, 0)
    elif isinstance(part, str):
        found = text.find(part)
        while found >= 0:
            out[found] = after[found + len(part)]
            found = text.find(part, found + 1)
    else:
        for start in range(len(text)):
            out[start] = any(after[end] for end in _ends(part, text, start))
    return out


def _ends(part: str | Index | Wild, text: str, start: int) -> range:
    """Where a part that starts here may end, the longest first."""
    if isinstance(part, str):
        end = start + len(part)
        return range(end, end - 1, -1)
    if isinstance(part, Wild):
        return range(len(text), start, -1)
    found = _ONE_NUMBER.match(text, start, start + _DIGITS)
    return range(found.end() if found else start, start, -1)


def _captured(
    flat: Sequence[str | Index | Wild], text: str, at: Sequence[int]
) -> Captured:
    out: Captured = {}
    for part, start, end in zip(flat, at[:-1], at[1:], strict=True):
        if not isinstance(part, str):
            out[_key(part)] = (
                text[start:end] if isinstance(part, Wild) else int(text[start:end])
            )
    return out


# The numpy executor of a binding and its inverse: the reference that every faster one is tested against.


def _view(
    array: np.ndarray,
    start: tuple[int, ...],
    dims: Sequence[tuple[int, int, int]],
    writeable: bool,
) -> np.ndarray:
    """The strided view of `array` that starts at `start` with (size, dimension, step) axes."""
    corner = array[tuple(slice(at, None) for at in start)]
    shape = [size for size, _, _ in dims]
    strides = [array.strides[dim] * step for _, dim, step in dims]
    return np.lib.stride_tricks.as_strided(corner, shape, strides, writeable=writeable)


def _check(binding: Binding, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Strided views are not bounds-checked, so the arrays must have the shapes that were bound."""
    if (
        tuple(leaf.shape) != binding.leaf_shape
        or tuple(tensor.shape) != binding.tensor_shape
    ):
        raise LayoutError(
            f"leaf {binding.leaf} {leaf.shape} and tensor {binding.tensor} {tensor.shape} are not of the shapes "
            f"{binding.leaf_shape} and {binding.tensor_shape} that were bound",
            remedy="bind the rules again for these arrays",
            leaf=binding.leaf,
            tensor=binding.tensor,
        )


def apply_binding(binding: Binding, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Writes the binding's part of the checkpoint tensor from the leaf: the reference for every faster executor."""
    _check(binding, leaf, tensor)
    source = _view(
        leaf,
        binding.leaf_start,
        [(a.size, a.leaf_dim, a.leaf_step) for a in binding.axes],
        False,
    )
    target = _view(
        tensor,
        binding.tensor_start,
        [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes],
        True,
    )
    target[...] = _shift(source, binding.add, binding.cast).astype(tensor.dtype)


def invert_binding(binding: Binding, tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes the binding's part of the leaf from the checkpoint tensor: the inverse of `apply_binding`."""
    _check(binding, leaf, tensor)
    source = _view(
        tensor,
        binding.tensor_start,
        [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes],
        False,
    )
    target = _view(
        leaf,
        binding.leaf_start,
        [(a.size, a.leaf_dim, a.leaf_step) for a in binding.axes],
        True,
    )
    target[...] = _shift(source, -binding.add, None).astype(leaf.dtype)


def _shift(values: np.ndarray, add: float, cast: str | None) -> np.ndarray:
    if add:
        # at least float32: 1 + w in bfloat16 would lose most digits of w
        values = (
            values.astype(
                np.result_type(values.dtype, np.float32)
                if values.dtype.kind == "f"
                else np.float32
            )
            + add
        )
    return values.astype(numpy_dtype(cast)) if cast else values


def mark_binding(binding: Binding, count: np.ndarray) -> bool:
    """Adds one to every element of `count` that the binding fills; True if one of them was counted before."""
    view = _view(
        count,
        binding.tensor_start,
        [(a.size, a.tensor_dim, a.tensor_step) for a in binding.axes],
        True,
    )
    met = bool(view.any())
    view += 1
    return met


# ----------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
# tensors of one leaf that are looked up, even if the checkpoint has fewer
_STACKED = 4096


class HasShape(Protocol):
    """A leaf as rules see it: LeafShape, Leaf, arrays and ShapeDtypeStructs all fit."""

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True)
class RuleProblem:
    """One of the problems that an error lists."""

    kind: str  # "leaf", "tensor", "shape", "size", "overlap", "gap"
    what: str
    leaf: str = ""
    tensor: str = ""
    rule: str = ""


def parse_rule(text: str, line: int = 1) -> Rule:
    """Parses and checks one rule line; a RuleError points at the character that is wrong."""
    return check(parse_line(text, line))


@dataclass
class _Side:
    """The axes of one choice on one side: axis → (dimension, step), and the start of the part."""

    steps: dict[str, tuple[int, int]]
    start: list[int]


def _place(dims: Sequence[Dim], sizes: Mapping[str, int], k: int) -> _Side:
    side = _Side({}, [0] * len(dims))

    def size_of(items: Sequence[Dim]) -> int:
        return sum(
            int(np.prod([sizes[a] for a in m], dtype=np.int64))
            for m in product_terms(items)
        )

    def lay(item: Dim, dim: int, step: int) -> int:
        if isinstance(item, Ax):
            if item.name == "1":
                return step
            side.steps[item.name] = (dim, step)
            return step * sizes[item.name]
        if isinstance(item, Cat):
            side.start[dim] += step * sum(size_of(o) for o in item.options[:k])
            inner = step
            for part in reversed(item.options[k]):
                inner = lay(part, dim, inner)
            return step * sum(size_of(o) for o in item.options)
        for part in reversed(item.items):
            step = lay(part, dim, step)
        return step

    for d, dim in enumerate(dims):
        lay(dim, d, 1)
    return side


@dataclass(frozen=True)
class _Template:
    """A solved choice: its bindings without the indices of stacked axes."""

    axes: tuple[Axis, ...]
    leaf_start: Shape
    tensor_start: Shape
    # leaf axes in the checkpoint name: (axis, dimension, step, size)
    stacked: tuple[tuple[str, int, int, int], ...]
    # tensor axes captured from the path
    captured: tuple[tuple[str, int, int, int], ...]


def _merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Merged where contiguous in both arrays: equal maps get one form."""
    rows = (
        (a.size, (a.leaf_step, a.tensor_step), (a.leaf_dim, a.tensor_dim)) for a in axes
    )
    return tuple(
        Axis(n, leaf, step, tensor, along)
        for n, (step, along), (leaf, tensor) in merge_axes(rows)
    )


def _expand_rest(dims: Sequence[Dim], rank: int, side: str) -> tuple[Dim, ...]:
    """`...` written out for this rank."""
    more = rank - (len(dims) - 1)
    has_rest = any(isinstance(d, Ax) and d.name == "..." for d in dims)
    if (not has_rest and rank != len(dims)) or (has_rest and more < 0):
        raise Unfit(
            "shape",
            f"the {side} has {rank} dimensions, the rule names {len(dims) - has_rest}",
        )
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Ax) and dim.name == "...":
            out += [Ax(f"...{j}") for j in range(more)]
        else:
            out.append(dim)
    return tuple(out)


class Compiled:
    """A checked rule, ready to match paths and to make bindings; solved shapes are cached for the next equal layer."""

    def __init__(
        self, rule: Rule, reason: str = "", confidence: float = 1.0, warning: str = ""
    ) -> None:
        self.reason = reason
        self.confidence = confidence
        self.warning = warning
        self.rule, self.text, self.arity = rule, str(rule), arity(rule)
        self.leaf_choice = name_has_choice([rule.leaf])
        self.tensor_choice = name_has_choice(rule.tensors)
        cat = (not self.leaf_choice and any(walk_brackets(rule.left))) or (
            not self.tensor_choice and any(walk_brackets(rule.right))
        )
        self.joint = self.arity > 1 and cat
        names = (rule.leaf,) if rule.leaf else rule.tensors
        count = self.arity if name_has_choice(names) else 1
        self.patterns = [
            (k, matcher(name.parts, k)) for name in names for k in range(count)
        ]
        self.wild = any(
            isinstance(h, Wild) for name in names for h in captures(name, 0).values()
        )
        self.zeros = {a.name: 0 for a in walk_axes(rule.left)}  # index 0 of every stack
        self._solved: dict[object, list[_Template | Unfit]] = {}

    def match(self, path: str) -> tuple[int, dict[str, int | str]] | None:
        """The choice and the captured values, where this rule's leaf path (or unused tensor name) is `path`."""
        for k, pattern in self.patterns:
            found = pattern(path)
            if found is not None:
                return k, found
        return None

    def could_match(self, skeleton: str) -> bool:
        """Could a path whose numbers are all written `0` match? A quick filter for thousands of equal names."""
        return (
            any(pattern(skeleton) is not None for _, pattern in self.patterns)
            or self._literal_digits
        )

    @property
    def _literal_digits(self) -> bool:
        return (
            bool(re.search(r"\d", "".join(_literals(self.rule.leaf.parts))))
            if self.rule.leaf
            else True
        )

    def choices(self) -> range:
        """The choices that one group of leaves has bindings for."""
        return range(self.arity)

    def templates(
        self,
        leaves: Mapping[int, Shape],
        tensors: Mapping[int, Shape],
        config: Mapping[str, Any] | None,
    ) -> list[_Template | Unfit]:
        """One solved template (or the reason why not) for each choice; shapes that are absent are left out."""
        key = (tuple(leaves.items()), tuple(tensors.items()))
        if key not in self._solved:
            if self.joint:
                self._solved[key] = self._solve(
                    list(self.choices()), leaves, tensors, config
                )
            else:
                self._solved[key] = [
                    self._solve([k], leaves, tensors, config)[0] for k in self.choices()
                ]
        return self._solved[key]

    def _solve(
        self,
        choices: list[int],
        leaves: Mapping[int, Shape],
        tensors: Mapping[int, Shape],
        config: Mapping[str, Any] | None,
    ) -> list[_Template | Unfit]:
        sides = (
            (self.rule.left, self.leaf_choice, leaves, "leaf"),
            (self.rule.right, self.tensor_choice, tensors, "tensor"),
        )
        try:
            equations: list[tuple[Dim, int, str]] = []
            for dims, chosen, shapes, side in sides:
                for k in choices if chosen else choices[:1]:
                    if k in shapes:
                        full = _expand_rest(
                            resolve(dims, k) if chosen else dims, len(shapes[k]), side
                        )
                        places = [
                            f"{side} {shapes[k]} dimension {d}"
                            for d in range(len(full))
                        ]
                        equations += list(zip(full, shapes[k], places, strict=True))
            sizes = Solver(self.rule, config).solve(equations)
            return [self._template(k, sizes, leaves, tensors) for k in choices]
        except Unfit as e:
            return [e for _ in choices]

    def _template(
        self,
        k: int,
        sizes: Mapping[str, int],
        leaves: Mapping[int, Shape],
        tensors: Mapping[int, Shape],
    ) -> _Template | Unfit:
        if k not in leaves or k not in tensors:
            return Unfit("leaf" if k not in leaves else "tensor", "absent")
        left = _expand_rest(
            resolve(self.rule.left, k) if self.leaf_choice else self.rule.left,
            len(leaves[k]),
            "leaf",
        )
        right = resolve(self.rule.right, k) if self.tensor_choice else self.rule.right
        right = _expand_rest(right, len(tensors[k]), "tensor")
        a = _place(left, sizes, k)
        b = _place(right, sizes, k)
        shared = sorted(
            (x for x in b.steps if x in a.steps),
            key=lambda x: (b.steps[x][0], -b.steps[x][1], -sizes[x]),
        )
        return _Template(
            _merged(Axis(sizes[x], *a.steps[x], *b.steps[x]) for x in shared),
            tuple(a.start),
            tuple(b.start),
            tuple((x, *a.steps[x], sizes[x]) for x in a.steps if x not in b.steps),
            tuple((x, *b.steps[x], sizes[x]) for x in b.steps if x not in a.steps),
        )


def _literals(parts: Sequence[Part]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Pick):
            for option in part.options:
                yield from _literals(option)


def name_for(parts: Sequence[Part], k: int, values: Mapping[str, int | str]) -> str:
    """A checkpoint name with its holes filled."""
    out = []
    for part in parts:
        match part:
            case str():
                out.append(part)
            case Index():
                out.append(
                    str(part.const + sum(c * int(values[v]) for c, v in part.terms))
                )
            case Wild():
                out.append(str(values[part.name + "*"]))
            case Pick():
                out.append(name_for(part.options[k], k, values))
    return "".join(out)


def bind_group(
    compiled: Compiled,
    values: Mapping[str, int | str],
    group: Mapping[int, str],
    leaves: Mapping[str, HasShape],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
) -> tuple[list[tuple[Binding, bool]], list[RuleProblem]]:
    """The bindings of one rule for one set of captured values; `group` has the leaf of each choice (0 if no choice)."""
    rule = compiled.rule
    chosen = {k: tuple(leaves[p].shape) for k, p in group.items()}
    if not compiled.leaf_choice:
        chosen = dict.fromkeys(compiled.choices(), chosen[0])
    out: list[tuple[Binding, bool]] = []
    problems: list[RuleProblem] = []
    for name in rule.tensors:
        first = {
            k: name_for(name.parts, k, {**compiled.zeros, **values})
            for k in compiled.choices()
        }
        if name.optional and any(t not in tensors for t in first.values()):
            continue
        shapes = {k: tuple(tensors[t].shape) for k, t in first.items() if t in tensors}
        for k, template in enumerate(compiled.templates(chosen, shapes, config)):
            if compiled.leaf_choice and k not in group:
                continue
            leaf = group[k if compiled.leaf_choice else 0]
            if k not in shapes:
                what = f"leaf {leaf} {chosen[k]} needs tensor {first[k]}, which the checkpoint does not have"
                problems.append(
                    RuleProblem("tensor", what, leaf, first[k], compiled.text)
                )
            elif isinstance(template, Unfit):
                what = f"leaf {leaf} {chosen[k]} does not fit tensor {first[k]} {shapes[k]}: {template.what}"
                problems.append(
                    RuleProblem(template.kind, what, leaf, first[k], compiled.text)
                )
            else:
                name_of = (
                    functools.partial(name_for, name.parts, k)
                    if template.stacked
                    else lambda _, n=first[k]: n
                )
                made, wrong = _instances(
                    compiled,
                    template,
                    leaf,
                    chosen[k],
                    name_of,
                    values,
                    shapes[k],
                    tensors,
                )
                out += [(b, name.optional) for b in made]
                problems += wrong
    return out, problems


def _instances(
    compiled: Compiled,
    template: _Template,
    leaf: str,
    leaf_shape: Shape,
    name_of: Callable[[Mapping[str, int | str]], str],
    values: Mapping[str, int | str],
    tensor_shape: Shape,
    tensors: Mapping[str, CheckpointTensor],
) -> tuple[list[Binding], list[RuleProblem]]:
    tensor_start = list(template.tensor_start)
    for axis, dim, step, size in template.captured:
        index = int(values[axis])
        if index >= size:
            what = f"leaf {leaf}: index {axis}={index} is outside the tensor's axis of {size}"
            return [], [RuleProblem("shape", what, leaf, "", compiled.text)]
        tensor_start[dim] += step * index
    add = compiled.rule.add
    cast = compiled.rule.cast
    note = (compiled.text, compiled.reason, compiled.confidence, compiled.warning)
    count = math.prod(size for _, _, _, size in template.stacked)
    if count > max(len(tensors), _STACKED):
        what = f"leaf {leaf} {leaf_shape} would fill {count} tensors, and the checkpoint has {len(tensors)}"
        return [], [
            RuleProblem(
                "tensor",
                what,
                leaf,
                name_of({**values, **compiled.zeros}),
                compiled.text,
            )
        ]
    out: list[Binding] = []
    problems: list[RuleProblem] = []
    for indices in itertools.product(
        *(range(size) for _, _, _, size in template.stacked)
    ):
        start = list(template.leaf_start)
        extra: dict[str, int | str] = dict(values)
        for (axis, dim, step, _), index in zip(template.stacked, indices, strict=True):
            start[dim] += step * index
            extra[axis] = index
        name = name_of(extra)
        tensor = tensors.get(name)
        shape = tuple(tensor.shape) if tensor else ()
        if tensor is None:
            what = f"leaf {leaf} {leaf_shape} needs tensor {name}, which the checkpoint does not have"
            problems.append(RuleProblem("tensor", what, leaf, name, compiled.text))
        elif shape != tensor_shape:
            what = f"leaf {leaf} {leaf_shape} is stacked over tensors of {tensor_shape}, but {name} is {shape}"
            problems.append(RuleProblem("shape", what, leaf, name, compiled.text))
        else:
            ends = (tuple(start), tuple(tensor_start), template.axes)
            out.append(
                Binding(leaf, name, leaf_shape, tensor_shape, *ends, add, cast, *note)
            )
    return out, problems

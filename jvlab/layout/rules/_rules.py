"""Applies a checked rule: matches paths, solves axis sizes, and builds the index maps (Bindings)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jvlab._errors import LayoutError
from jvlab.layout._boxes import merge_axes
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import Axis, Binding, CheckpointTensor, Shape
from jvlab.layout.rules._syntax import (
    Ax,
    Cat,
    Dim,
    Index,
    Merged,
    Name,
    Part,
    Pick,
    Rule,
    Wild,
    arity,
    changed,
    chosen_parts,
    name_has_choice,
    walk_axes,
    walk_brackets,
    walk_names,
)


class HasShape(Protocol):
    """A leaf as rules see it: LeafShape, Leaf, arrays and ShapeDtypeStructs all fit."""

    @property
    def shape(self) -> Shape: ...


Config = Mapping[str, Any] | None  # a model's config.json
Leaves = Mapping[str, HasShape]
Tensors = Mapping[str, CheckpointTensor]

# Names with holes: numbers `{i}`, any text `{x*}`, choices `[q|k]`.

Captured = dict[str, int | str]  # {i} under "i", {x*} under "x*"
_LONGEST_NAME = 4096  # of a leaf or a tensor; with two `{x*}` in a rule's name, matching takes its square


def matcher(parts: Sequence[Part], k: int) -> Callable[[str], Captured | None]:
    """A function from a name to what it captures under choice k, or None; the first hole takes as much as it can."""
    out = []
    keys: dict[str, str] = {}  # of what each group captures
    for part in chosen_parts(parts, k):
        if isinstance(part, str):
            out.append(re.escape(part))
            continue
        number = isinstance(part, Index)
        name = part.variables[0]
        group = f"n_{name}" if number else f"w_{name}"
        pattern = "0|[1-9][0-9]{0,17}" if number else ".+"  # a 64-bit index
        out.append(f"(?P={group})" if group in keys else f"(?P<{group}>{pattern})")
        keys[group] = name if number else f"{name}*"
    expression = re.compile("".join(out), re.DOTALL)

    def match(text: str) -> Captured | None:
        found = expression.fullmatch(text, 0, _LONGEST_NAME)
        if found is None or len(text) > _LONGEST_NAME:
            return None
        return {
            key: found[group] if key.endswith("*") else int(found[group])
            for group, key in keys.items()
        }

    return match


# The numpy executor of a binding and its inverse: the reference that every faster one is tested against.


def _view(
    array: np.ndarray, start: Shape, dims: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """The strided view of `array` that starts at `start` with (size, dimension, step) axes."""
    corner = array[tuple(slice(at, None) for at in start)]
    shape = [size for size, _, _ in dims]
    strides = [array.strides[dim] * step for _, dim, step in dims]
    return np.lib.stride_tricks.as_strided(corner, shape, strides)


def _views(
    b: Binding, leaf: np.ndarray, tensor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The binding's part of the leaf and of the tensor, element for element.

    Strided views are not bounds-checked, so the arrays must have the shapes that were bound.
    """
    if tuple(leaf.shape) != b.leaf_shape or tuple(tensor.shape) != b.tensor_shape:
        raise LayoutError(
            f"leaf {b.leaf} {leaf.shape} and tensor {b.tensor} {tensor.shape} are not of the shapes "
            f"{b.leaf_shape} and {b.tensor_shape} that were bound",
            remedy="bind the rules again for these arrays",
            leaf=b.leaf,
            tensor=b.tensor,
        )
    mine = [(a.size, a.leaf_dim, a.leaf_step) for a in b.axes]
    theirs = [(a.size, a.tensor_dim, a.tensor_step) for a in b.axes]
    return _view(leaf, b.leaf_start, mine), _view(tensor, b.tensor_start, theirs)


def values_of(
    b: Binding, leaf: np.ndarray, tensor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the binding makes of the leaf, and the tensor's values in its place."""
    mine, theirs = _views(b, leaf, tensor)
    return _shift(mine, b.add), theirs


def apply_binding(binding: Binding, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Writes the binding's part of the checkpoint tensor from the leaf: the reference for every faster executor."""
    values, target = values_of(binding, leaf, tensor)
    if binding.cast:
        values = values.astype(numpy_dtype(binding.cast))
    target[...] = values.astype(tensor.dtype)


def invert_binding(binding: Binding, tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes the binding's part of the leaf from the checkpoint tensor: the inverse of `apply_binding`."""
    target, source = _views(binding, leaf, tensor)
    target[...] = _shift(source, -binding.add).astype(leaf.dtype)


def _shift(values: np.ndarray, add: float) -> np.ndarray:
    if not add:
        return values
    # at least float32: 1 + w in bfloat16 would lose most digits of w
    if values.dtype.kind == "f":
        wide = np.result_type(values.dtype, np.float32)
    else:
        wide = np.dtype(np.float32)
    return values.astype(wide) + add


# Axis sizes of a rule, solved from `where`, then from shapes, then from the config by convention.

_LARGEST = 2**62  # elements; arrays count in 64 bits


class Unfit(Exception):
    """Internal: this rule does not fit these shapes; caught and reported as a RuleProblem."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind = kind
        self.what = what
        super().__init__(what)


def convention(config: Config) -> dict[str, int]:
    """The axes with a conventional meaning: n heads, k key/value heads, h head size, g = n/k; from a HF config."""
    config = config_lookup(config)
    n = config.get("num_attention_heads", config.get("n_head"))
    if not n:
        return {}
    hidden = config.get("hidden_size", config.get("n_embd"))
    out = {"n": int(n), "k": int(config.get("num_key_value_heads") or n)}
    head = config.get("head_dim") or (hidden // n if hidden else None)
    if head:
        out["h"] = int(head)
    if out["n"] % out["k"] == 0:
        out["g"] = out["n"] // out["k"]
    return out


def config_lookup(config: Config) -> dict[str, Any]:
    """A flat view of a config: `text_config` of multimodal models under the top level's own keys."""
    if config is None:
        return {}
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else dict(config)


def _config_size(axis: str, word: str, config: Mapping[str, Any]) -> int:
    """The size given by a config key."""
    value = config.get(word)
    if value is None:
        raise Unfit("size", f"`where {axis}={word}…`: the config has no `{word}`")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise Unfit(
            "size",
            f"`where {axis}={word}…`: `{word}` of the config is not a whole number",
        )
    return value


def terms_of(dim: Dim) -> list[tuple[str, ...]]:
    """A dimension's size as a sum of products of axes."""
    if isinstance(dim, Ax):
        return [() if dim.name == "1" else (dim.name,)]
    if isinstance(dim, Merged):
        return product_terms(dim.items)
    return [m for option in dim.options for m in product_terms(option)]


def product_terms(items: Sequence[Dim]) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = [()]
    for item in items:
        out = [a + b for a in out for b in terms_of(item)]
    return out


def size_of(terms: Iterable[Sequence[str]], sizes: Mapping[str, int]) -> int:
    """A sum of products of axes, in numbers."""
    return sum(math.prod(sizes[axis] for axis in monomial) for monomial in terms)


def resolve(dims: Sequence[Dim], k: int) -> tuple[Dim, ...]:
    """The pattern of choice k alone: every `[..|..]` replaced by its k-th part."""
    return changed(dims, lambda d: Merged(d.options[k]) if isinstance(d, Cat) else d)


@dataclass
class Solver:
    """Finds axis sizes: from `where`, from dimensions with one unknown, then from the config by convention."""

    rule: Rule
    config: Config
    sizes: dict[str, int] = field(default_factory=dict)

    def solve(self, equations: Sequence[tuple[Dim, int, str]]) -> dict[str, int]:
        terms = [(terms_of(dim), total, where) for dim, total, where in equations]
        names = {a.name for a in walk_axes([dim for dim, _, _ in equations])}
        usual = {a: s for a, s in convention(self.config).items() if a in names}
        for size in self.rule.sizes:
            usual.pop(size.name, None)
        while True:
            while self._where(names) or any(self._one_unknown(t) for t in terms):
                pass
            free = next((a for a in sorted(usual) if a not in self.sizes), None)
            if free is None:
                break
            self.sizes[free] = usual[free]
        unknown = sorted(names - set(self.sizes))
        if unknown:
            listed = ", ".join(f"`{a}`" for a in unknown)
            what = f"the size of axis {listed} is open: add `where {unknown[0]}=…`"
            raise Unfit("size", what)
        for monomials, total, where in terms:
            got = size_of(monomials, self.sizes)
            if got > _LARGEST:
                raise Unfit(
                    "shape",
                    f"{where} is {total}, the rule says more than any array has",
                )
            if got != total:
                axes = sorted(set().union(*monomials))
                given = ", ".join(f"{a}={self.sizes[a]}" for a in axes)
                raise Unfit(
                    "shape",
                    f"{where} is {total}, the rule says {got} ({given or 'a size-one dimension'})",
                )
        for axis, size in usual.items():
            if self.sizes[axis] != size:
                raise Unfit(
                    "shape",
                    f"the shapes make axis `{axis}` {self.sizes[axis]}, the config says {size}: "
                    f"the axes are in another order, or `{axis}` means something else (then add `where {axis}=?`)",
                )
        return self.sizes

    def _where(self, names: set[str]) -> bool:
        """Sizes that `where` gives by now; whether there was a new one."""
        config = config_lookup(self.config)
        found = False
        for size in self.rule.sizes:
            if size.name in self.sizes or not size.factors:
                continue
            value = 1
            for op, word in size.factors:
                if word.isdigit():
                    operand = int(word)
                elif word in names:
                    operand = self.sizes.get(word)
                else:
                    operand = _config_size(size.name, word, config)
                if operand is None:
                    break
                about = f"the size of `{size.name}` is"
                if op == "*":
                    value *= operand
                elif operand == 0 or value % operand:
                    what = f"{about} {value}/{operand}, not an integer"
                    raise Unfit("size", what)
                else:
                    value //= operand
                if value > _LARGEST:
                    raise Unfit("size", f"{about} more than any array has")
            else:
                self.sizes[size.name] = value
                found = True
        return found

    def _one_unknown(self, term: tuple[list[tuple[str, ...]], int, str]) -> bool:
        monomials, total, where = term
        unknown = set().union(*monomials) - self.sizes.keys()
        if len(unknown) != 1:
            return False
        axis = unknown.pop()
        factor = 0
        rest = 0
        for m in monomials:
            value = size_of([[a for a in m if a != axis]], self.sizes)
            if axis in m:
                factor += value
            else:
                rest += value
        size, remainder = divmod(total - rest, factor) if factor else (0, 1)
        if remainder or size < 1:
            raise Unfit(
                "shape", f"{where} is {total}: no size of axis `{axis}` makes that"
            )
        self.sizes[axis] = size
        return True


# Rules with their names compiled and their shapes solved.

# tensors of one leaf that are looked up, even if the checkpoint has fewer
_STACKED = 4096


@dataclass(frozen=True)
class RuleProblem:
    """One of the problems that an error lists."""

    kind: str  # "leaf", "tensor", "shape", "size", "overlap", "gap"
    what: str
    leaf: str = ""
    tensor: str = ""
    rule: str = ""


def _place(
    dims: Sequence[Dim], sizes: Mapping[str, int], k: int
) -> tuple[dict[str, tuple[int, int]], Shape]:
    """The axes of choice k on one side: axis → (dimension, step), and the start of its part."""
    steps: dict[str, tuple[int, int]] = {}
    start = [0] * len(dims)

    def lay(items: Sequence[Dim], dim: int, step: int) -> int:
        """Lays the items from the last, which runs fastest; returns the step of what comes before them."""
        for item in reversed(items):
            if isinstance(item, Merged):
                step = lay(item.items, dim, step)
            elif isinstance(item, Cat):
                widths = [size_of(product_terms(o), sizes) for o in item.options]
                start[dim] += step * sum(widths[:k])
                lay(item.options[k], dim, step)
                step *= sum(widths)
            elif item.name != "1":
                steps[item.name] = (dim, step)
                step *= sizes[item.name]
        return step

    for d, dim in enumerate(dims):
        lay([dim], d, 1)
    return steps, tuple(start)


@dataclass(frozen=True)
class _Solved:
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
    rest = Ax("...")
    named = len(dims) - dims.count(rest)
    more = rank - named
    if more < 0 or (more and rest not in dims):
        raise Unfit(
            "shape", f"the {side} has {rank} dimensions, the rule names {named}"
        )
    out: list[Dim] = []
    for dim in dims:
        out += [Ax(f"...{j}") for j in range(more)] if dim == rest else [dim]
    return tuple(out)


class Compiled:
    """A checked rule, ready to match paths and to make bindings; solved shapes are cached for the next equal layer."""

    def __init__(
        self, rule: Rule, reason: str = "", confidence: float = 1.0, warning: str = ""
    ) -> None:
        self.rule = rule
        self.reason = reason
        self.confidence = confidence
        self.warning = warning
        self.text = str(rule)
        self.choices = range(arity(rule))
        self.leaf_choice = name_has_choice([rule.leaf])
        self.tensor_choice = name_has_choice(rule.tensors)
        # the choices share a leaf or a tensor, so they are solved together
        self.joint = (not self.leaf_choice and any(walk_brackets(rule.left))) or (
            not self.tensor_choice and any(walk_brackets(rule.right))
        )
        names = (rule.leaf,) if rule.leaf else rule.tensors
        matched = self.choices if name_has_choice(names) else range(1)
        self.patterns = [(k, matcher(name.parts, k)) for name in names for k in matched]
        holes = [hole for name in names for hole in walk_names(name.parts, 0)]
        self.wild = any(isinstance(hole, Wild) for hole in holes)
        # the name itself holds digits: `could_match` knows nothing then
        self._literal_digits = rule.leaf is None or any(
            re.search(r"\d", text) for text in _literals(rule.leaf.parts)
        )
        self.zeros = {a.name: 0 for a in walk_axes(rule.left)}  # index 0 of every stack
        self._solved: dict[object, list[_Solved | Unfit]] = {}

    def match(self, path: str) -> tuple[int, Captured] | None:
        """The choice and the captured values, where this rule's leaf path (or unused tensor name) is `path`."""
        for k, pattern in self.patterns:
            found = pattern(path)
            if found is not None:
                return k, found
        return None

    def could_match(self, skeleton: str) -> bool:
        """Could a path whose numbers are all written `0` match? A quick filter for thousands of equal names."""
        return self._literal_digits or self.match(skeleton) is not None

    def left(self, k: int) -> tuple[Dim, ...]:
        """The leaf's pattern under choice k."""
        return resolve(self.rule.left, k) if self.leaf_choice else self.rule.left

    def right(self, k: int) -> tuple[Dim, ...]:
        """The tensor's pattern under choice k."""
        return resolve(self.rule.right, k) if self.tensor_choice else self.rule.right

    def solve(
        self, leaves: Mapping[int, Shape], tensors: Mapping[int, Shape], config: Config
    ) -> list[_Solved | Unfit]:
        """Each choice solved, or the reason why not; shapes that are absent are left out."""
        key = (tuple(leaves.items()), tuple(tensors.items()))
        if key not in self._solved:
            together = [self.choices] if self.joint else [[k] for k in self.choices]
            self._solved[key] = [
                one
                for choices in together
                for one in self._solve(choices, leaves, tensors, config)
            ]
        return self._solved[key]

    def _solve(
        self,
        choices: Sequence[int],
        leaves: Mapping[int, Shape],
        tensors: Mapping[int, Shape],
        config: Config,
    ) -> list[_Solved | Unfit]:
        sides = (
            ("leaf", self.left, self.leaf_choice, leaves),
            ("tensor", self.right, self.tensor_choice, tensors),
        )
        try:
            equations: list[tuple[Dim, int, str]] = []
            for side, dims_of, chosen, shapes in sides:
                for k in choices if chosen else choices[:1]:
                    if k in shapes:
                        full = _expand_rest(dims_of(k), len(shapes[k]), side)
                        for d, dim in enumerate(full):
                            where = f"{side} {shapes[k]} dimension {d}"
                            equations.append((dim, shapes[k][d], where))
            sizes = Solver(self.rule, config).solve(equations)
            return [self._one(k, sizes, leaves, tensors) for k in choices]
        except Unfit as e:
            return [e for _ in choices]

    def _one(
        self,
        k: int,
        sizes: Mapping[str, int],
        leaves: Mapping[int, Shape],
        tensors: Mapping[int, Shape],
    ) -> _Solved | Unfit:
        if k not in leaves or k not in tensors:
            return Unfit("leaf" if k not in leaves else "tensor", "absent")
        left = _expand_rest(self.left(k), len(leaves[k]), "leaf")
        right = _expand_rest(self.right(k), len(tensors[k]), "tensor")
        here, leaf_start = _place(left, sizes, k)
        there, tensor_start = _place(right, sizes, k)
        shared = sorted(
            (x for x in there if x in here),
            key=lambda x: (there[x][0], -there[x][1], -sizes[x]),
        )
        return _Solved(
            _merged(Axis(sizes[x], *here[x], *there[x]) for x in shared),
            leaf_start,
            tensor_start,
            tuple((x, *here[x], sizes[x]) for x in here if x not in there),
            tuple((x, *there[x], sizes[x]) for x in there if x not in here),
        )


def _literals(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Pick):
            for option in part.options:
                yield from _literals(option)


def name_for(parts: Sequence[Part], k: int, values: Mapping[str, int | str]) -> str:
    """A checkpoint name with its holes filled."""
    out = []
    for part in chosen_parts(parts, k):
        if isinstance(part, Index):
            number = sum(c * int(values[v]) for c, v in part.terms)
            out.append(str(part.const + number))
        elif isinstance(part, Wild):
            out.append(str(values[part.name + "*"]))
        else:
            out.append(part)
    return "".join(out)


def bind_group(
    compiled: Compiled,
    values: Mapping[str, int | str],
    group: Mapping[int, str],
    leaves: Leaves,
    tensors: Tensors,
    config: Config,
) -> tuple[list[tuple[Binding, bool]], list[RuleProblem]]:
    """The bindings of one rule for one set of captured values, each with whether it is optional, and what is wrong.

    `group` has the leaf of each choice (0 if no choice).
    """
    chosen = {k: tuple(leaves[p].shape) for k, p in group.items()}
    if not compiled.leaf_choice:
        chosen = dict.fromkeys(compiled.choices, chosen[0])
    out: list[tuple[Binding, bool]] = []
    problems: list[RuleProblem] = []
    for name in compiled.rule.tensors:
        zeros = {**compiled.zeros, **values}
        first = {k: name_for(name.parts, k, zeros) for k in compiled.choices}
        if name.optional and any(t not in tensors for t in first.values()):
            continue
        shapes = {k: tuple(tensors[t].shape) for k, t in first.items() if t in tensors}
        for k, solved in enumerate(compiled.solve(chosen, shapes, config)):
            if compiled.leaf_choice and k not in group:
                continue
            leaf = group[k if compiled.leaf_choice else 0]
            if k not in shapes:
                kind = "tensor"
                wrong = f"needs tensor {first[k]}, which the checkpoint does not have"
            elif isinstance(solved, Unfit):
                kind = solved.kind
                wrong = f"does not fit tensor {first[k]} {shapes[k]}: {solved.what}"
            else:
                model = Binding(leaf, first[k], chosen[k], shapes[k], (), (), ())
                made, found = _instances(
                    compiled, solved, model, name, k, values, tensors
                )
                out += [(b, name.optional) for b in made]
                problems += found
                continue
            what = f"leaf {leaf} {chosen[k]} {wrong}"
            problems.append(RuleProblem(kind, what, leaf, first[k], compiled.text))
    return out, problems


def _instances(
    compiled: Compiled,
    solved: _Solved,
    first: Binding,
    name: Name,
    k: int,
    values: Mapping[str, int | str],
    tensors: Tensors,
) -> tuple[list[Binding], list[RuleProblem]]:
    """One binding for each index of the stacked axes; `first` has the leaf, the first tensor, and their shapes."""
    leaf = first.leaf
    tensor_start = list(solved.tensor_start)
    for axis, dim, step, size in solved.captured:
        index = int(values[axis])
        if index >= size:
            what = f"leaf {leaf}: index {axis}={index} is outside the tensor's axis of {size}"
            return [], [RuleProblem("shape", what, leaf, "", compiled.text)]
        tensor_start[dim] += step * index
    told = f"leaf {leaf} {first.leaf_shape}"
    count = math.prod(size for _, _, _, size in solved.stacked)
    if count > max(len(tensors), _STACKED):
        what = (
            f"{told} would fill {count} tensors, and the checkpoint has {len(tensors)}"
        )
        return [], [RuleProblem("tensor", what, leaf, first.tensor, compiled.text)]
    out: list[Binding] = []
    problems: list[RuleProblem] = []
    for indices in itertools.product(*(range(size) for *_, size in solved.stacked)):
        start = list(solved.leaf_start)
        named: Captured = dict(values)
        for (axis, dim, step, _), index in zip(solved.stacked, indices, strict=True):
            start[dim] += step * index
            named[axis] = index
        tensor = name_for(name.parts, k, named)
        shape = tuple(tensors[tensor].shape) if tensor in tensors else None
        if shape == first.tensor_shape:
            out.append(
                Binding(
                    leaf,
                    tensor,
                    first.leaf_shape,
                    first.tensor_shape,
                    tuple(start),
                    tuple(tensor_start),
                    solved.axes,
                    compiled.rule.add,
                    compiled.rule.cast,
                    compiled.text,
                    compiled.reason,
                    compiled.confidence,
                    compiled.warning,
                )
            )
            continue
        kind = "tensor"
        what = f"{told} needs tensor {tensor}, which the checkpoint does not have"
        if shape is not None:
            kind = "shape"
            what = f"{told} is stacked over tensors of {first.tensor_shape}, but {tensor} is {shape}"
        problems.append(RuleProblem(kind, what, leaf, tensor, compiled.text))
    return out, problems

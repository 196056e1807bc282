"""What else a leaf could mean: the other rules that fit the same shapes, and values as evidence for one of them.

Coverage and matching digests do not show that a mapping is right: a square kernel fits transposed, a query fits where a
key belongs. `alternatives` lists these other readings, each with its rules. `match` compares a sample of the leaves
under a reading with the checkpoint's values; `reread` gives the leaves as an engine would have them if it were right.
Constant values, and values unrelated to the checkpoint's, are no evidence. numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab._errors import RuleError
from jvlab.layout._types import Binding, CheckpointTensor, Shape
from jvlab.layout.rules import _rule_edits as edits
from jvlab.layout.rules._roles import Template, classify, templates
from jvlab.layout.rules._rules import (
    Compiled,
    Config,
    Leaves,
    apply_binding,
    config_lookup,
    convention,
    invert_binding,
)
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import (
    Ax,
    Rule,
    arity,
    name_text,
    walk_axes,
    walk_brackets,
)

# An alternative interpretation of some leaves, as rules.

KINDS = {
    "transposed": "the leaf is transposed",
    "axis order": "the leaf's axes are in another order",
    "head order": "heads and head dimension are in another order",
    "rotary order": "rotary pairs are interleaved on one side and halves on the other",
    "head groups": "query heads are counted by group first, or by key/value head first",
    "offset": "the leaf holds the scale itself, or the scale plus or minus one",
    "swapped": "two leaves of one shape are exchanged",
    "layer order": "layers are counted in another order",
    "scale": "the leaf is a multiple of the checkpoint's tensor",
}


@dataclass(frozen=True)
class Alternative:
    """Another reading of some leaves: `rules` that replace those in `replaces` (empty: in addition to a `{x*}`)."""

    kind: str  # one of KINDS
    # empty: no rule can express it, the leaf itself has to change
    rules: tuple[str, ...]
    replaces: tuple[str, ...]
    reason: str
    now: tuple[Binding, ...] = field(repr=False)  # under the current rules
    bindings: tuple[Binding, ...] = field(repr=False)  # under this alternative
    op: str = ""  # what was changed; alternatives with the same op may apply together
    factor: float = 1.0  # checkpoint value / leaf value
    part: bool = False  # only one choice of a rule with choices changes

    @property
    def rule_text(self) -> str:
        """The rules, one per line."""
        return "\n".join(self.rules)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves that are interpreted differently."""
        old = {index_map(b) for b in self.now}
        changed = dict.fromkeys(
            b.leaf for b in self.bindings if index_map(b) not in old
        )
        return tuple(changed) or tuple(dict.fromkeys(b.leaf for b in self.now))

    def apply(self, rules: Rules) -> Rules:
        """The current rules with these substituted."""
        new = Rules(self.rules).rules
        if not new:
            return rules
        out: list[Rule] = []
        placed = False
        for rule in rules:
            if str(rule) not in self.replaces:
                out.append(rule)
            elif not placed:
                out += new
                placed = True
        out += () if placed else new
        kept = {str(r) for r in out}
        return Rules(out, {k: v for k, v in rules.notes.items() if k in kept})


def index_map(b: Binding) -> tuple[object, ...]:
    """What a binding does, without the rule and reason behind it."""
    return (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)


# The search for other readings: every edit of a rule that still fits the shapes and fills the same tensors.

_ATTENTION = ("q", "k", "v", "o")
# roles that are mistaken for one another
_ZONES = (_ATTENTION, ("gate", "up", "down"), ("embed", "head"))
_ROTARY = ("q", "k", "norm.q", "norm.k")
_MANY = 4  # up to this many choices every order is tried; beyond, exchanges of two


@dataclass(frozen=True)
class Unit:
    """A current rule with its bindings; of a `{x*}` rule, the part for leaves that differ only in numbers."""

    rule: Rule
    replaces: tuple[str, ...]
    now: tuple[Binding, ...]
    choice: int | None = None  # the choice, if this is one choice of a rule
    rest: tuple[Rule, ...] = ()  # and the rest of the rule

    @property
    def shape(self) -> Shape:
        return self.now[0].tensor_shape


class Readings:
    """All alternatives of one set of rules on one model."""

    def __init__(
        self,
        rules: Rules,
        shapes: Leaves,
        tensors: Sequence[CheckpointTensor],
        config: Config,
    ) -> None:
        self.rules = rules
        self.shapes = shapes
        self.config = config
        self.tensors = {t.name: t for t in tensors}
        self.known = convention(config)
        found = classify(templates({t.name: tuple(t.shape) for t in tensors}))
        self.role = {
            name: role
            for template, role in found.items()
            for name in template.members.values()
        }
        self.bindings: dict[str, list[Binding]] = defaultdict(list)
        for binding in rules.attempt(shapes, tensors, config)[0]:
            self.bindings[binding.rule].append(binding)
        self.out: dict[object, Alternative] = {}

    def all(self) -> list[Alternative]:
        units = list(self._units())
        parts = [p for u in units for p in self._parts(u)]
        for unit in units:
            for rules, op in edits.in_order(unit.rule):
                self._add("layer order", rules, [unit], op)
            self._in_place(unit)
            self._choices(unit)
        alone = [u for u in units if arity(u.rule) == 1]
        for one, other in itertools.combinations([*alone, *parts], 2):
            self._swap(one, other)
        for rules, found, op in edits.layers_written_out(self.rules, self.bindings):
            listed = [Unit(r, (str(r),), tuple(self.bindings[str(r)])) for r in found]
            self._add("layer order", rules, listed, op)
        for unit in parts:
            self._in_place(unit)
        for unit in units:
            for rules, op in edits.other_orders(unit.rule, unit.now):
                self._add("layer order", rules, [unit], op)
            self._scales(unit)
        return list(self.out.values())

    # The current rules -------------------------------------------------------------------------------------------

    def _units(self) -> Iterator[Unit]:
        for rule in self.rules:
            text = str(rule)
            bound = self.bindings.get(text, [])
            if not bound or rule.leaf is None:
                continue
            if Compiled(rule).wild:
                yield from self._of_wild(rule, bound)
            else:
                yield Unit(rule, (text,), tuple(bound))

    def _of_wild(self, rule: Rule, bound: Sequence[Binding]) -> Iterator[Unit]:
        if len({b.leaf for b in bound}) != len(bound):
            return
        leaf_of = _members({b.leaf: b.leaf_shape for b in bound})
        tensor_of = _members({b.tensor: b.tensor_shape for b in bound})
        groups: dict[object, list[Binding]] = defaultdict(list)
        for b in bound:
            groups[leaf_of[b.leaf][0], tensor_of[b.tensor][0]].append(b)
        for members in groups.values():
            # the numbers in both names must be the same
            if any(leaf_of[b.leaf][1] != tensor_of[b.tensor][1] for b in members):
                continue
            leaf, _ = leaf_of[members[0].leaf]
            tensor, _ = tensor_of[members[0].tensor]
            names = tensor.variables()
            exact = replace(rule, leaf=leaf.name(names), tensors=(tensor.name(names),))
            yield Unit(exact, (), tuple(members))

    def _parts(self, unit: Unit) -> Iterator[Unit]:
        if arity(unit.rule) == 1 or edits.is_joint(unit.rule):
            return
        for k in range(arity(unit.rule)):
            rule = edits.rewritten(edits.only(unit.rule, k))
            rest = edits.without(unit.rule, k)
            if rule is None or rest is None:
                continue
            mine = self._bound([rule], unit.now, partly=True)
            if mine:
                yield Unit(rule, unit.replaces, tuple(mine), k, (rest,))

    # What fits ----------------------------------------------------------------------------------------------------

    def _bound(
        self, rules: Sequence[Rule], now: Iterable[Binding], partly: bool = False
    ) -> list[Binding] | None:
        """The bindings that rules make of the leaves and tensors of `now`; None if they do not fit (exactly)."""
        now = list(now)
        leaves = {b.leaf: self.shapes[b.leaf] for b in now}
        tensors = [self.tensors[name] for name in dict.fromkeys(b.tensor for b in now)]
        try:
            bindings, problems = Rules(tuple(rules)).attempt(
                leaves, tensors, self.config
            )
        except RuleError:
            return None
        return bindings if partly or not problems else None

    def _add(
        self,
        kind: str,
        rules: Sequence[Rule | None],
        units: Sequence[Unit],
        op: str = "",
        reason: str = "",
    ) -> None:
        """Add a reading, if its rules are valid and fit, and it differs from the current one and is new."""
        checked = [r for rule in rules if rule and (r := edits.rewritten(rule))]
        if len(checked) < len(rules):
            return
        replaces = tuple(dict.fromkeys(r for u in units for r in u.replaces))
        rest = [r for u in units for r in u.rest]
        now: dict[object, Binding] = {}
        for unit in units:
            found: Iterable[Binding] = unit.now
            # where one choice of a rule changes, the others must still fit
            if unit.rest:
                found = [b for text in unit.replaces for b in self.bindings[text]]
            now |= {index_map(b): b for b in found}
        bound = self._bound([*checked, *rest], now.values())
        if bound is None:
            return
        positions = frozenset(map(index_map, bound))
        if positions == frozenset(now) or positions in self.out:
            return
        made = [
            edits.joined(r, lambda new, r=r: self._same(r, new, now.values()))
            for r in checked
        ]
        kind = self._as_written(kind, units, made)
        self.out[positions] = Alternative(
            kind,
            tuple(map(str, [*made, *rest])),
            replaces,
            reason or KINDS[kind],
            tuple(now.values()),
            tuple(bound),
            op,
            part=any(u.choice is not None for u in units),
        )

    @staticmethod
    def _as_written(kind: str, units: Sequence[Unit], rules: Sequence[Rule]) -> str:
        """The kind of a reordering: axes may be rotary pairs or head groups that were merged when written."""
        before = set[str]().union(*(u.rule.axis_names for u in units))
        after = set[str]().union(*(r.axis_names for r in rules))
        if kind != "head order" or len(after) >= len(before):
            return kind
        gained = after - before
        if "h" in gained:
            return "rotary order"
        return "head groups" if gained & {"n", "k"} else kind

    def _same(self, old: Rule, new: Rule, now: Iterable[Binding]) -> bool:
        """Whether one rule does to these leaves what the other does."""
        now = list(now)
        one = self._bound([old], now, partly=True) or []
        other = self._bound([new], now, partly=True) or []
        return bool(one) and set(map(index_map, one)) == set(map(index_map, other))

    # Kinds --------------------------------------------------------------------------------------------------------

    def _roles(self, unit: Unit) -> set[str]:
        return {self.role[b.tensor].base for b in unit.now}

    def _in_place(self, unit: Unit) -> None:
        """The same leaf to the same tensor, with other axes or offset."""
        ranks = {len(b.leaf_shape) for b in unit.now}
        if len(ranks) != 1:
            return
        rule = edits.written_out(unit.rule, ranks.pop())
        roles = self._roles(unit)
        for new in edits.dimension_orders(rule):
            kind = "transposed" if new.left == rule.left else "axis order"
            self._add(kind, [new], [unit], f"dimensions {_places(rule, new)}")
        heads = [rule, *self._with_heads(rule, unit)]
        for base in heads:
            for op, new in edits.inner_orders(base):
                for permuted in edits.tensor_orders(new):
                    change = f"inner {op} {_places(new, permuted)}"
                    self._add("head order", [permuted], [unit], change)
        self._rotary(heads, unit, roles)
        self._groups(heads, unit, roles)
        bias = any(self.role[b.tensor].bias for b in unit.now)
        if not bias and all(r.startswith("norm") for r in roles):
            for add in sorted({rule.add + 1, rule.add - 1, 0.0} - {rule.add}, key=abs):
                shifted = replace(unit.rule, add=add)
                self._add("offset", [shifted], [unit], f"offset {add - rule.add:+g}")

    def _with_heads(self, rule: Rule, unit: Unit) -> list[Rule]:
        """An attention projection's rule whose heads are one axis: split into heads and head size."""
        axes = rule.axis_names
        roles = self._roles(unit)
        concatenated = any(walk_brackets((*rule.left, *rule.right)))
        if not roles <= set(_ATTENTION) or "h" in axes or concatenated:
            return []
        first = unit.now[0]
        role = self.role[first.tensor]
        if role.bias and role.base == "o":
            return []
        # the dimension of a checkpoint's matrix, out × in, that holds the heads
        dim = 1 if role.base == "o" else 0
        target = rule.right[dim] if dim < len(rule.right) else None
        head = self.known.get("h", 0)
        if not isinstance(target, Ax) or not head or first.tensor_shape[dim] % head:
            return []
        usual = {"q": "n", "o": "n", "k": "k", "v": "k"}
        letters = {usual[role] for role in roles}
        letter = letters.pop() if len(letters) == 1 else "m"
        heads = next(x for x in (letter, *"myz") if x not in axes)
        return [edits.split(rule, target.name, f"{heads} h", f"{heads} h")]

    def _rotary(self, bases: Sequence[Rule], unit: Unit, roles: set[str]) -> None:
        known = config_lookup(self.config)
        partial = known.get("partial_rotary_factor", known.get("rotary_pct"))
        if not roles <= set(_ROTARY) or (partial is not None and float(partial) < 1):
            return
        for base in bases:
            # without the axis of stacked layers
            own = [d for d in base.left if d != Ax("i")]
            axis = Ax("h")
            if axis not in walk_axes(base.left):
                axis = (
                    own[0] if roles <= {"norm.q", "norm.k"} and len(own) == 1 else None
                )
            if not isinstance(axis, Ax):
                continue
            for op, left, right in (
                ("leaf", "r two", "two r"),
                ("tensor", "two r", "r two"),
            ):
                new = edits.split(base, axis.name, left, right, ("two", 2))
                for permuted in edits.tensor_orders(new):
                    change = f"rotary {op} {_places(new, permuted)}"
                    self._add("rotary order", [permuted], [unit], change)

    def _groups(self, bases: Sequence[Rule], unit: Unit, roles: set[str]) -> None:
        grouped = min(self.known.get("g", 1), self.known.get("k", 1)) > 1
        if not grouped or not roles <= {"q", "o"}:
            return
        for base in bases:
            for name in {a.name for a in walk_axes(base.left)} & {"n", "m"}:
                for op, left, right in (
                    ("leaf", "g k", "k g"),
                    ("tensor", "k g", "g k"),
                ):
                    new = edits.split(base, name, left, right)
                    self._add("head groups", [new], [unit], f"groups {op}")

    def _choices(self, unit: Unit) -> None:
        """Exchanged choices of one rule: `[k|v]` to `[v|k]_proj`."""
        count = arity(unit.rule)
        orders = itertools.permutations(range(count))
        for order in orders if count <= _MANY else _exchanges(count):
            if order == tuple(range(count)):
                continue
            rule = edits.exchanged(unit.rule, order)
            why = "choices of one shape are exchanged"
            self._add("swapped", [rule], [unit], reason=why)

    def _swap(self, one: Unit, other: Unit) -> None:
        """Two leaves of different rules, or of two choices, each to the other's tensor."""
        if one.shape != other.shape or len(one.now) != len(other.now):
            return
        if one.choice is not None and one.replaces == other.replaces:
            return  # within one rule: _choices
        if self._zone(one) != self._zone(other):
            return
        rules = []
        for mine, theirs in ((one, other), (other, one)):
            names = tuple(t for t in theirs.rule.tensors if not t.optional)
            rules.append(replace(mine.rule, tensors=names))
        leaves = [name_text(r.leaf) for r in rules if r.leaf]
        why = f"{' and '.join(leaves)} are exchanged"
        self._add("swapped", rules, [one, other], reason=why)

    def _zone(self, unit: Unit) -> object:
        role = self.role[unit.now[0].tensor]
        own = role.base.partition(".")[0]
        zone = next((zone for zone in _ZONES if role.base in zone), own)
        return zone, role.bias, role.expert, role.shared

    def _scales(self, unit: Unit) -> None:
        """Common scale factors, which no rule can express."""
        roles = self._roles(unit)
        if roles == {"q"}:
            word = "head_dim"
            size = self.known.get("h", 0)
        elif roles == {"embed"}:
            word = "hidden_size"
            size = config_lookup(self.config).get(word, 0)
        else:
            return
        for power, verb in ((0.5, "times"), (-0.5, "divided by")) if size else ():
            factor = float(size) ** power
            why = f"the checkpoint's tensor is the leaf {verb} the root of {word}"
            self.out[unit.replaces, factor] = Alternative(
                "scale", (), unit.replaces, why, unit.now, unit.now, factor=factor
            )


def _members(
    shapes: Mapping[str, Shape],
) -> dict[str, tuple[Template, tuple[int, ...]]]:
    """Each name's template and its numbers."""
    return {
        name: (template, numbers)
        for template in templates(shapes)
        for numbers, name in template.members.items()
    }


def _places(old: Rule, new: Rule) -> str:
    """The permutation of the dimensions on each side, independent of names; "-" if unchanged."""
    pairs = ((old.left, new.left), (old.right, new.right))
    return " ".join(
        "".join(str(a.index(d)) for d in b) if a != b else "-" for a, b in pairs
    )


def _exchanges(count: int) -> Iterator[tuple[int, ...]]:
    for a, b in itertools.combinations(range(count), 2):
        order = list(range(count))
        order[a] = b
        order[b] = a
        yield tuple(order)


# ----------------------------------------------------------------------------------------------------


def alternatives(
    rules: Rules,
    shapes: Leaves,
    tensors: Sequence[CheckpointTensor],
    config: Config = None,
) -> list[Alternative]:
    """Every other reading that fits the shapes and fills the same tensors, the simplest first.

    A leaf without one is determined by its shape; a leaf with some is ambiguous.
    """
    return Readings(rules, shapes, tensors, config).all()


def alternatives_of(mapping: Any) -> list[Alternative]:
    """The alternatives to a mapping's rules; none for a mapping built by hand."""
    origin = mapping._origin
    if origin is None:
        return []
    return alternatives(origin.rules, origin.shapes, origin.tensors, origin.config)


def together(parts: Sequence[Alternative]) -> Alternative | None:
    """Several alternatives as one; None where two of them rewrite the same rule or leaf."""
    replaced = [r for a in parts for r in a.replaces]
    leaves = [leaf for a in parts for leaf in dict.fromkeys(b.leaf for b in a.now)]
    if (
        len(set(replaced)) != len(replaced)
        or len(set(leaves)) != len(leaves)
        or any(a.factor != 1 for a in parts)
    ):
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
        # whole rules before single choices
        for a in sorted(members, key=lambda a: a.part):
            if together([*chosen, a]) is not None:
                chosen.append(a)
        if len(chosen) > 1 and (both := together(chosen)) is not None:
            out.append(both)
    return out


# Values as evidence.

SAMPLES = 512  # elements of each binding
RELATED = 0.8  # correlation from which two arrays count as related
CLOSE = 0.5  # relative error that a right reading stays below, even after training
APART = 4.0  # a right reading has an error this many times smaller than a wrong one
# up to this size an array is fetched whole; of a larger one only the sample
WHOLE_BYTES = 1 << 26


@dataclass(frozen=True)
class Match:
    """A sample of leaves under one reading, compared with the same elements of the checkpoint."""

    error: float  # ‖leaf − checkpoint‖ / ‖checkpoint‖
    correlation: float  # 0 where one of the two is constant
    count: int  # elements compared

    @property
    def related(self) -> bool:
        """Whether the two are correlated at all."""
        return self.count > 1 and self.correlation >= RELATED

    @property
    def fits(self) -> bool:
        """Whether they are the same values, up to training."""
        return self.related and self.error <= CLOSE

    def beats(self, other: Match) -> bool:
        """Whether this reading is right and the other wrong."""
        return self.fits and self.error * APART < other.error


def match(
    reading: Alternative | Sequence[Binding],
    values: Mapping[str, Any],
    checkpoint: Mapping[str, np.ndarray],
) -> Match:
    """How well leaves match the checkpoint under a reading, over a sample of every binding."""
    whole = isinstance(reading, Alternative)
    bindings = reading.bindings if whole else reading
    factor = reading.factor if whole else 1.0
    rng = np.random.default_rng(0)
    samples_of: list[tuple[np.ndarray, np.ndarray]] = []
    for b in bindings:
        if b.leaf in values and b.tensor in checkpoint:
            leaf_at, tensor_at = _sample(b, rng)
            mine = factor * (_gather(values[b.leaf], leaf_at) + b.add)
            samples_of.append((mine, _gather(checkpoint[b.tensor], tensor_at)))
    return compare(samples_of)


def compare(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Match:
    """Samples of the same elements on both sides, one pair for each array."""
    good = []
    for mine, theirs in pairs:
        finite = np.isfinite(mine) & np.isfinite(theirs)
        if finite.any():
            good.append([x[finite].astype(np.float64) for x in (mine, theirs)])
    if not good:
        return Match(math.inf, 0.0, 0)
    a, b = (np.concatenate([pair[side] for pair in good]) for side in (0, 1))
    size = math.sqrt(float(np.square(b).sum()))
    if not size:
        return Match(math.inf, 0.0, int(a.size))
    # Each array relative to its own mean: norms of any two models of a family have similar means.
    one, other = (
        np.concatenate([pair[side] - pair[side].mean() for pair in good])
        for side in (0, 1)
    )
    spread = math.sqrt(float(np.square(one).sum()) * float(np.square(other).sum()))
    constant = spread <= 1e-10 * float(np.abs(a).max() * np.abs(b).max()) * a.size
    correlation = 0.0 if constant else float((one * other).sum()) / spread
    error = math.sqrt(float(np.square(a - b).sum())) / size
    return Match(error, correlation, int(a.size))


def _sample(b: Binding, rng: np.random.Generator) -> tuple[tuple[np.ndarray, ...], ...]:
    """Indices of the same elements in the leaf and in the tensor."""
    sizes = [a.size for a in b.axes]
    total = math.prod(sizes)
    picked = np.arange(total) if total <= SAMPLES else rng.integers(0, total, SAMPLES)
    steps = np.unravel_index(picked, sizes) if sizes else ()
    leaf = [np.full(len(picked), at, np.int64) for at in b.leaf_start]
    tensor = [np.full(len(picked), at, np.int64) for at in b.tensor_start]
    for axis, step in zip(b.axes, steps, strict=True):
        leaf[axis.leaf_dim] += axis.leaf_step * step
        tensor[axis.tensor_dim] += axis.tensor_step * step
    return tuple(leaf), tuple(tensor)


def _gather(array: Any, at: tuple[np.ndarray, ...]) -> np.ndarray:
    if not isinstance(array, np.ndarray) and getattr(array, "nbytes", 0) <= WHOLE_BYTES:
        array = np.asarray(array)
    return np.asarray(array[at]).astype(np.float32)


def reread(
    alternative: Alternative, values: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The leaves that the engine's values amount to if this alternative is the right reading.

    The current rules map leaves to tensors; here the tensors are mapped back by the alternative.
    """
    tensors: dict[str, np.ndarray] = {}
    for b in alternative.now:
        leaf = np.asarray(values[b.leaf])
        if b.tensor not in tensors:
            # 1 + w in bfloat16 would lose most digits of w
            wide = b.add and leaf.dtype.itemsize < 4
            tensors[b.tensor] = np.zeros(
                b.tensor_shape, np.float32 if wide else leaf.dtype
            )
        apply_binding(b, leaf, tensors[b.tensor])
    out: dict[str, np.ndarray] = {}
    for b in alternative.bindings:
        if b.leaf not in out:
            out[b.leaf] = np.array(values[b.leaf])
        invert_binding(b, tensors[b.tensor], out[b.leaf])
    if alternative.factor != 1:
        out = {k: (v / alternative.factor).astype(v.dtype) for k, v in out.items()}
    return out

"""What else a leaf could mean: the other rules that fit the same shapes. numpy only.

Coverage and matching digests do not show that a mapping is right: a square kernel fits transposed, a query fits where a
key belongs. `alternatives` lists these other readings, each with its rules; _evidence.py checks by values, or by the
model's outputs, which one is right.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jvlab._errors import RuleError
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules import _rule_edits as edits
from jvlab.layout.rules._grammar import arity
from jvlab.layout.rules._roles import classify, templates
from jvlab.layout.rules._rules import HasShape
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._sizes import config_lookup, convention
from jvlab.layout.rules._syntax import (
    Ax,
    Cat,
    Index,
    Name,
    Part,
    Pick,
    Rule,
    name_text,
    walk_axes,
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
        new = Rules.parse(self.rule_text).rules if self.rules else ()
        texts = [str(r) for r in rules]
        first = (
            next((j for j, t in enumerate(texts) if t in self.replaces), len(texts))
            if new
            else len(texts)
        )
        out: list[Rule] = []
        for j, rule in enumerate(rules):
            out += new if j == first else ()
            out += [rule] if texts[j] not in self.replaces or not new else []
        out += new if first == len(texts) else ()
        kept = {str(r) for r in out}
        return Rules(tuple(out), {k: v for k, v in rules.notes.items() if k in kept})


def index_map(b: Binding) -> tuple[object, ...]:
    """What a binding does, without the rule and reason behind it."""
    return (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)


# Layers in another order: numbers written out in rules, stacks over groups of layers, layers reversed or shifted.

LAYER = Index(((1, "i"),))
_NUMBER = re.compile(r"(?<![\w{+*])\d+(?![\w}])")


def written_out(
    rules: Rules, bindings: Mapping[str, Sequence[Binding]]
) -> Iterator[tuple[list[Rule], list[Rule], str]]:
    """Rules that differ only in a layer number: (rules of another order, the current rules, what was changed)."""
    families: dict[str, list[tuple[int, int, Rule]]] = defaultdict(list)
    for rule in rules:
        if rule.leaf is None or not rule.tensors or not bindings.get(str(rule)):
            continue
        leaf = _generic(rule.leaf)
        tensors = [t for t in map(_generic, rule.tensors) if t]
        if (
            leaf is None
            or len(tensors) != len(rule.tensors)
            or len({number for _, number in tensors}) != 1
        ):
            continue
        made = replace(rule, leaf=leaf[0], tensors=tuple(name for name, _ in tensors))
        families[str(made)].append((leaf[1], tensors[0][1], rule))
    for text, members in families.items():
        if len(members) < 2:
            continue
        numbers = sorted(m[0] for m in members)
        places = sorted(m[1] for m in members)
        generic = Rules.parse(text).rules[0]
        found = [m[2] for m in members]
        if numbers == places:
            yield [generic], found, "layers in order"
        for op, order in _orders(places):
            yield _literal(generic, numbers, order), found, f"layers {op}"


def other_orders(
    rule: Rule, now: Sequence[Binding]
) -> Iterator[tuple[list[Rule], str]]:
    """A stack in another order of its groups, or layers reversed or shifted: (rules, what was changed)."""
    for hole in edits.computed(rule):
        (_, x), (_, y) = hole.terms
        counts = {v: _count(rule, now, v) for v in (x, y)}
        for major, minor in ((x, y), (y, x)):
            terms = {major: counts[minor], minor: 1}
            new = Index(tuple((terms[v], v) for v in (x, y)), hole.const)
            made = (
                edits.rewritten(edits.with_number(rule, hole, new))
                if counts[minor]
                else None
            )
            if made is not None:
                yield [made], f"layers by {major}"
    leaf = rule.leaf
    if leaf is None or any(LAYER not in t.parts for t in rule.tensors):
        return
    if LAYER not in leaf.parts:
        yield from _stack_orders(rule, now)
        return
    numbers = sorted(
        {number for b in now if (number := _layer(leaf, b.leaf)) is not None}
    )
    for op, order in _orders(numbers):
        yield _literal(rule, numbers, order), f"layers {op}"


def _stack_orders(
    rule: Rule, now: Sequence[Binding]
) -> Iterator[tuple[list[Rule], str]]:
    """The slices of a stacked leaf in another order: `model.layers.[2|1|0].x : [1|1|1] a b -> b a`."""
    at = next((d for d, dim in enumerate(rule.left) if dim == Ax("i")), None)
    if at is None:
        return
    for op, order in _orders(range(now[0].leaf_shape[at])):
        numbers = Pick(tuple((str(n),) for n in order))
        made = []
        for one in (
            [edits.only(rule, k) for k in range(arity(rule))]
            if arity(rule) > 1
            else [rule]
        ):
            names = (
                replace(t, parts=tuple(numbers if p == LAYER else p for p in t.parts))
                for t in one.tensors
            )
            left = (
                *one.left[:at],
                Cat(((Ax("1"),),) * len(order)),
                *one.left[at + 1 :],
            )
            made.append(edits.rewritten(replace(one, tensors=tuple(names), left=left)))
        if all(made):
            yield [rule for rule in made if rule is not None], f"layers {op}"


def in_order(rule: Rule) -> Iterator[tuple[list[Rule], str]]:
    """The rule that takes the slices of a stacked leaf in order, where it writes their layers out: `layers.[2|1|0]`."""
    at = [
        d
        for d, dim in enumerate(rule.left)
        if isinstance(dim, Cat) and set(dim.options) == {(Ax("1"),)}
    ]
    if (
        len(at) != 1
        or rule.leaf is None
        or any(isinstance(p, Pick) for p in rule.leaf.parts)
    ):
        return
    names = []
    for tensor in rule.tensors:
        picks = [p for p in tensor.parts if isinstance(p, Pick)]
        written = (
            [o[0] for o in picks[0].options if len(o) == 1] if len(picks) == 1 else []
        )
        numbers = sorted(
            int(n) for n in written if isinstance(n, str) and n.isdecimal()
        )
        if not numbers or numbers != list(range(len(picks[0].options))):
            return
        names.append(
            replace(
                tensor, parts=tuple(LAYER if p is picks[0] else p for p in tensor.parts)
            )
        )
    left = (*rule.left[: at[0]], Ax("i"), *rule.left[at[0] + 1 :])
    made = edits.rewritten(replace(rule, tensors=tuple(names), left=left))
    if made is not None:
        yield [made], "layers in order"


def _orders(numbers: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Layers reversed, shifted by one, and shifted back by one."""
    listed = list(numbers)
    if len(listed) < 2:
        return []
    found = [("reversed", listed[::-1]), ("moved on", [*listed[1:], listed[0]])]
    return (
        [*found, ("moved back", [listed[-1], *listed[:-1]])]
        if len(listed) > 2
        else found[:1]
    )


def _literal(rule: Rule, leaves: Sequence[int], tensors: Sequence[int]) -> list[Rule]:
    """A rule for each layer, its number written out on both sides."""
    out = []
    for a, b in zip(leaves, tensors, strict=True):
        name = lambda n, number: replace(
            n, parts=edits.plain(str(number) if p == LAYER else p for p in n.parts)
        )
        assert rule.leaf is not None
        made = edits.rewritten(
            replace(
                rule,
                leaf=name(rule.leaf, a),
                tensors=tuple(name(t, b) for t in rule.tensors),
            )
        )
        out += [made] if made is not None else []
    return out


def _generic(name: Name) -> tuple[Name, int] | None:
    """A name with its one written number as `{i}`."""
    found: list[int] = []
    parts: list[Part] = []
    for part in name.parts:
        if isinstance(part, Pick) and any(
            _NUMBER.search(p) for o in part.options for p in o if isinstance(p, str)
        ):
            return None
        match = _NUMBER.search(part) if isinstance(part, str) else None
        if match is None or not isinstance(part, str):
            parts.append(part)
            continue
        found.append(int(match[0]))
        before = part[: match.start()]
        after = part[match.end() :]
        parts += [*([before] if before else []), LAYER, *([after] if after else [])]
    return (replace(name, parts=tuple(parts)), found[0]) if len(found) == 1 else None


def _layer(name: Name, path: str) -> int | None:
    """The number that `{i}` stands for in a path."""
    at = name.parts.index(LAYER)
    before = name.parts[0] if at else ""
    if at > 1 or not isinstance(before, str):
        return None
    match = re.match(r"\d+", path[len(before) :])
    return int(match[0]) if match else None


def _count(rule: Rule, now: Sequence[Binding], variable: str) -> int:
    """How many values a stacked axis, or a captured number, takes."""
    for d, dim in enumerate(rule.left):
        if dim == Ax(variable):
            return now[0].leaf_shape[d]
    return (
        len({b.leaf for b in now})
        if rule.leaf and Index(((1, variable),)) in rule.leaf.parts
        else 0
    )


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
    def shape(self) -> tuple[int, ...]:
        return self.now[0].tensor_shape


class Readings:
    """All alternatives of one set of rules on one model."""

    def __init__(
        self,
        rules: Rules,
        shapes: Mapping[str, HasShape],
        tensors: Sequence[CheckpointTensor],
        config: Mapping[str, Any] | None,
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
            for rules, op in in_order(unit.rule):
                self._add("layer order", rules, [unit], op)
            self._in_place(unit)
            self._choices(unit)
        alone = [u for u in units if arity(u.rule) == 1]
        for one, other in itertools.combinations([*alone, *parts], 2):
            self._swap(one, other)
        for rules, found, op in written_out(self.rules, self.bindings):
            self._add(
                "layer order",
                rules,
                [Unit(r, (str(r),), tuple(self.bindings[str(r)])) for r in found],
                op,
            )
        for unit in parts:
            self._in_place(unit)
        for unit in units:
            for rules, op in other_orders(unit.rule, unit.now):
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
            if edits.has_wild(rule):
                yield from self._of_wild(rule, bound)
            else:
                yield Unit(rule, (text,), tuple(bound))

    def _of_wild(self, rule: Rule, bound: Sequence[Binding]) -> Iterator[Unit]:
        by_leaf = {b.leaf: b for b in bound}
        if len(by_leaf) != len(bound):
            return
        sides = []
        for shapes in (
            {b.leaf: b.leaf_shape for b in bound},
            {b.tensor: b.tensor_shape for b in bound},
        ):
            sides.append(
                {
                    name: (t, key)
                    for t in templates(shapes)
                    for key, name in t.members.items()
                }
            )
        groups: dict[object, list[Binding]] = defaultdict(list)
        for b in bound:
            groups[sides[0][b.leaf][0], sides[1][b.tensor][0]].append(b)
        for members in groups.values():
            leaf, key = sides[0][members[0].leaf]
            tensor, other = sides[1][members[0].tensor]
            if any(
                sides[0][b.leaf][1] != sides[1][b.tensor][1] for b in members
            ) or len(key) != len(other):
                continue
            names = tensor.variables()
            exact = replace(rule, leaf=leaf.name(names), tensors=(tensor.name(names),))
            yield Unit(exact, (), tuple(members))

    def _parts(self, unit: Unit) -> Iterator[Unit]:
        if arity(unit.rule) == 1 or edits.is_joint(unit.rule):
            return
        for k in range(arity(unit.rule)):
            rule = edits.rewritten(edits.only(unit.rule, k))
            rest = edits.rewritten(edits.without(unit.rule, k))
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
        rules: Sequence[Rule],
        units: Sequence[Unit],
        op: str = "",
        reason: str = "",
    ) -> None:
        """Add a reading, if it fits, differs from the current one, and is new."""
        replaces = tuple(dict.fromkeys(r for u in units for r in u.replaces))
        whole = [r for u in units for r in u.rest]
        now: dict[object, Binding] = {}
        # where one choice of a rule changes, the others must still fit
        for unit in units:
            found = (
                [b for text in unit.replaces for b in self.bindings[text]]
                if unit.rest
                else unit.now
            )
            now |= {index_map(b): b for b in found}
        bound = self._bound([*rules, *whole], now.values())
        if bound is None:
            return
        positions = frozenset(map(index_map, bound))
        if positions == frozenset(now) or positions in self.out:
            return
        rules = [
            edits.joined(r, lambda new, r=r: self._same(r, new, now.values()))
            for r in rules
        ]
        kind = self._as_written(kind, units, rules)
        texts = tuple(str(r) for r in [*rules, *whole])
        part = any(u.choice is not None for u in units)
        self.out[positions] = Alternative(
            kind,
            texts,
            replaces,
            reason or KINDS[kind],
            tuple(now.values()),
            tuple(bound),
            op,
            part=part,
        )

    @staticmethod
    def _as_written(kind: str, units: Sequence[Unit], rules: Sequence[Rule]) -> str:
        """The kind of a reordering: axes may be rotary pairs or head groups that were merged when written."""
        axes = lambda listed: {
            a.name
            for r in listed
            for dims in (r.left, r.right)
            for a in walk_axes(dims)
        }
        before = axes(u.rule for u in units)
        after = axes(rules)
        if kind != "head order" or len(after) >= len(before):
            return kind
        gained = after - before
        return (
            "rotary order"
            if "h" in gained
            else "head groups"
            if gained & {"n", "k"}
            else kind
        )

    def _same(self, old: Rule, new: Rule, now: Iterable[Binding]) -> bool:
        now = list(now)
        one = self._bound([old], now, partly=True)
        other = self._bound([new], now, partly=True)
        return (
            bool(one)
            and other is not None
            and set(map(index_map, one or ())) == set(map(index_map, other))
        )

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
            permuted = new.left == rule.left
            self._try(
                "transposed" if permuted else "axis order",
                new,
                unit,
                f"dimensions {_places(rule, new)}",
            )
        heads = [rule, *self._with_heads(rule, unit)]
        for base in heads:
            for op, new in edits.inner_orders(base):
                for permuted in edits.dimension_orders(new):
                    if permuted.left == new.left:
                        self._try(
                            "head order",
                            permuted,
                            unit,
                            f"inner {op} {_places(new, permuted)}",
                        )
        self._rotary(heads, unit, roles)
        self._groups(heads, unit, roles)
        if all(r.startswith("norm") for r in roles) and not any(
            self.role[b.tensor].bias for b in unit.now
        ):
            for add in sorted({rule.add + 1, rule.add - 1, 0.0} - {rule.add}, key=abs):
                self._try(
                    "offset",
                    replace(unit.rule, add=add),
                    unit,
                    f"offset {add - rule.add:+g}",
                )

    def _try(self, kind: str, rule: Rule, unit: Unit, op: str) -> None:
        checked = edits.rewritten(rule)
        if checked is not None:
            self._add(kind, [checked], [unit], op)

    def _with_heads(self, rule: Rule, unit: Unit) -> list[Rule]:
        """An attention projection's rule whose heads are one axis: split into heads and head size."""
        axes = {a.name for dims in (rule.left, rule.right) for a in walk_axes(dims)}
        if (
            not self._roles(unit) <= set(_ATTENTION)
            or "h" in axes
            or edits.has_concatenation(rule)
        ):
            return []
        b = unit.now[0]
        head = self.known.get("h", 0)
        role = self.role[b.tensor].base
        bias = self.role[b.tensor].bias
        if bias and role == "o":
            return []
        dim = 0 if bias or role != "o" else 1  # of a checkpoint's matrix, out × in
        target = rule.right[dim] if dim < len(rule.right) else None
        wanted = (
            "n"
            if self._roles(unit) <= {"q", "o"}
            else "k"
            if self._roles(unit) <= {"k", "v"}
            else "m"
        )
        heads = next(x for x in (wanted, "m", "y", "z") if x not in axes)
        if not isinstance(target, Ax) or not head or b.tensor_shape[dim] % head:
            return []
        return [edits.split(rule, target.name, f"{heads} h", f"{heads} h")]

    def _rotary(self, bases: Sequence[Rule], unit: Unit, roles: set[str]) -> None:
        known = config_lookup(self.config)
        partial = known.get("partial_rotary_factor", known.get("rotary_pct"))
        if not roles <= set(_ROTARY) or (partial is not None and float(partial) < 1):
            return
        for base in bases:
            axis = "h" if any(a.name == "h" for a in walk_axes(base.left)) else ""
            # without the axis of stacked layers
            own = [d for d in base.left if d != Ax("i")]
            if (
                not axis
                and roles <= {"norm.q", "norm.k"}
                and len(own) == 1
                and isinstance(own[0], Ax)
            ):
                axis = own[0].name
            if not axis:
                continue
            for op, left, right in (
                ("leaf", "r two", "two r"),
                ("tensor", "two r", "r two"),
            ):
                new = edits.split(base, axis, left, right, ("two", 2))
                for permuted in edits.dimension_orders(new):
                    if permuted.left == new.left:
                        self._try(
                            "rotary order",
                            permuted,
                            unit,
                            f"rotary {op} {_places(new, permuted)}",
                        )

    def _groups(self, bases: Sequence[Rule], unit: Unit, roles: set[str]) -> None:
        if (
            not roles <= {"q", "o"}
            or min(self.known.get("g", 1), self.known.get("k", 1)) < 2
        ):
            return
        for base in bases:
            for name in {a.name for a in walk_axes(base.left)} & {"n", "m"}:
                for op, left, right in (
                    ("leaf", "g k", "k g"),
                    ("tensor", "k g", "g k"),
                ):
                    self._try(
                        "head groups",
                        edits.split(base, name, left, right),
                        unit,
                        f"groups {op}",
                    )

    def _choices(self, unit: Unit) -> None:
        """Exchanged choices of one rule: `[k|v]` to `[v|k]_proj`."""
        count = arity(unit.rule)
        if count == 1:
            return
        for order in (
            itertools.permutations(range(count))
            if count <= _MANY
            else _exchanges(count)
        ):
            if order != tuple(range(count)):
                rule = edits.rewritten(edits.exchanged(unit.rule, order))
                if rule is not None:
                    self._add(
                        "swapped",
                        [rule],
                        [unit],
                        reason="choices of one shape are exchanged",
                    )

    def _swap(self, one: Unit, other: Unit) -> None:
        """Two leaves of different rules, or of two choices, each to the other's tensor."""
        if one.shape != other.shape or len(one.now) != len(other.now):
            return
        if one.choice is not None and one.replaces == other.replaces:
            return  # within one rule: _choices
        if self._zone(one) != self._zone(other):
            return
        names = [
            tuple(t for t in u.rule.tensors if not t.optional) for u in (one, other)
        ]
        rules = [
            edits.rewritten(replace(u.rule, tensors=names[1 - j]))
            for j, u in enumerate((one, other))
        ]
        if None not in rules:
            leaves = " and ".join(
                name_text(u.rule.leaf) for u in (one, other) if u.rule.leaf
            )
            self._add(
                "swapped",
                [r for r in rules if r],
                [one, other],
                reason=f"{leaves} are exchanged",
            )

    def _zone(self, unit: Unit) -> object:
        role = self.role[unit.now[0].tensor]
        known = next(
            (zone for zone in _ZONES if role.base in zone), role.base.partition(".")[0]
        )
        return known, role.bias, role.expert, role.shared

    def _scales(self, unit: Unit) -> None:
        """Common scale factors, which no rule can express."""
        head = self.known.get("h", 0)
        roles = self._roles(unit)
        width = config_lookup(self.config).get("hidden_size", 0)
        size = head if roles == {"q"} else width if roles == {"embed"} else 0
        for power in (0.5, -0.5) if size else ():
            factor = float(size) ** power
            word = "head_dim" if roles == {"q"} else "hidden_size"
            why = f"the checkpoint's tensor is the leaf {'times' if power > 0 else 'divided by'} the root of {word}"
            key = (unit.replaces, factor)
            self.out[key] = Alternative(
                "scale", (), unit.replaces, why, unit.now, unit.now, factor=factor
            )


def _places(old: Rule, new: Rule) -> str:
    """The permutation of the dimensions on each side, independent of names; "-" if unchanged."""
    pairs = ((old.left, new.left), (old.right, new.right))
    return " ".join(
        "".join(str(a.index(d)) for d in b) if a != b else "-" for a, b in pairs
    )


def _exchanges(count: int) -> Iterator[tuple[int, ...]]:
    for a, b in itertools.combinations(range(count), 2):
        yield tuple(b if j == a else a if j == b else j for j in range(count))


# ----------------------------------------------------------------------------------------------------


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
    return (
        []
        if origin is None
        else alternatives(origin.rules, origin.shapes, origin.tensors, origin.config)
    )


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
        both = together(chosen) if len(chosen) > 1 else None
        out += [both] if both is not None else []
    return out

"""Edits of a rule: axes or layers reordered, heads or rotary pairs split, choices exchanged or separated.

They change the syntax tree only; `Rules.attempt` decides whether the result binds a model.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jvlab._errors import RuleError
from jvlab.layout._types import Binding
from jvlab.layout.rules._rules import resolve
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
    Size,
    Wild,
    arity,
    chosen_parts,
    name_has_choice,
    parse_rule,
    walk_names,
)

Dims = tuple[Dim, ...]
LETTERS = "abcefgmopqrstuvwxyz"


def rewritten(rule: Rule) -> Rule | None:
    """The rule parsed again from its own text; None if it is not valid."""
    try:
        return parse_rule(str(rule), rule.line)
    except RuleError:
        return None


def written_out(rule: Rule, leaf_rank: int) -> Rule:
    """The rule with names for the dimensions that `...` stands for."""
    plain = (Ax("..."),)
    if rule.left != plain or rule.right != plain:
        return rule
    letters = "d" if leaf_rank == 1 else LETTERS[:leaf_rank]
    axes = tuple(map(Ax, letters))
    return replace(rule, left=axes, right=axes)


# ---------------------------------------------------------------------------------------------------- axes


def flat(dims: Sequence[Dim]) -> Dims:
    """Without brackets around a single axis, and without nested brackets."""
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Merged):
            items: list[Dim] = []
            for item in flat(dim.items):
                items += item.items if isinstance(item, Merged) else (item,)
            items = [
                i for i in items if not (isinstance(i, Ax) and i.name == "1")
            ] or items[:1]
            out.append(items[0] if len(items) == 1 else Merged(tuple(items)))
        else:
            out.append(dim)
    return tuple(out)


def with_axis(dims: Sequence[Dim], name: str, new: Sequence[Dim]) -> Dims:
    """Every axis `name` replaced by several, merged."""
    out: list[Dim] = []
    for dim in dims:
        match dim:
            case Ax() if dim.name == name:
                out.append(Merged(tuple(new)))
            case Merged():
                out.append(Merged(with_axis(dim.items, name, new)))
            case Cat():
                # a part of a concatenation is merged without brackets
                options = []
                for option in dim.options:
                    items: list[Dim] = []
                    for item in with_axis(option, name, new):
                        items += item.items if isinstance(item, Merged) else (item,)
                    options.append(tuple(items))
                out.append(Cat(tuple(options)))
            case _:
                out.append(dim)
    return flat(out)


def split(
    rule: Rule, name: str, left: str, right: str, size: tuple[str, int] | None = None
) -> Rule:
    """An axis split on both sides, in an order of its own on each."""
    sizes = [s for s in rule.sizes if s.name != name]
    if size:
        sizes.append(Size(size[0], (("*", str(size[1])),)))
    return replace(
        rule,
        left=with_axis(rule.left, name, [Ax(word) for word in left.split()]),
        right=with_axis(rule.right, name, [Ax(word) for word in right.split()]),
        sizes=tuple(sizes),
    )


def tensor_orders(rule: Rule) -> Iterator[Rule]:
    """The tensor's dimensions in every order."""
    for right in itertools.permutations(rule.right):
        yield replace(rule, right=right)


def dimension_orders(rule: Rule) -> Iterator[Rule]:
    """Whole dimensions in another order, on the tensor's side, on the leaf's, or on both."""
    for left in itertools.permutations(rule.left):
        yield from tensor_orders(replace(rule, left=left))


def inner_orders(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Merged axes `(n h)` in another order, one bracket at a time; with the name of the change."""
    for side in ("left", "right"):
        dims: Dims = getattr(rule, side)
        for at, dim in enumerate(dims):
            if isinstance(dim, Ax):
                continue
            for new in _orders_within(dim):
                changed = (*dims[:at], new, *dims[at + 1 :])
                yield f"{side} {_order(dim, new)}", replace(rule, **{side: changed})


def _orders_within(dim: Merged | Cat) -> Iterator[Merged | Cat]:
    if isinstance(dim, Merged) and len(dim.items) <= 4:
        yield from (
            Merged(items)
            for items in itertools.permutations(dim.items)
            if items != dim.items
        )
    if (
        isinstance(dim, Cat)
        and len({len(o) for o in dim.options}) == 1
        and 1 < len(dim.options[0]) <= 4
    ):
        for order in itertools.permutations(range(len(dim.options[0]))):
            if order != tuple(sorted(order)):
                yield Cat(tuple(tuple(o[j] for j in order) for o in dim.options))


def _order(old: Merged | Cat, new: Merged | Cat) -> str:
    """The permutation, independent of axis names: equal for `(n h)` of q and `(k h)` of k."""
    before, after = (
        dim.items if isinstance(dim, Merged) else dim.options[0] for dim in (old, new)
    )
    return "".join(str(before.index(item)) for item in after)


def joined(rule: Rule, same: Callable[[Rule], bool]) -> Rule:
    """The rule with adjacent axes joined where they are adjacent on both sides and the result means the `same`."""
    moved = True
    while moved:
        moved = False
        for x, y in _neighbours(rule.left) & _neighbours(rule.right):
            taken = rule.axis_names - {x, y}
            for name in (n for n in "hnk" if n not in taken):
                made = replace(
                    rule,
                    left=_with_joined(rule.left, x, y, name),
                    right=_with_joined(rule.right, x, y, name),
                    sizes=tuple(s for s in rule.sizes if s.name not in (x, y)),
                )
                found = rewritten(made)
                if found is not None and same(found):
                    rule = found
                    moved = True
                    break
            if moved:
                break
    return rule


def _neighbours(dims: Sequence[Dim]) -> set[tuple[str, str]]:
    out: set[tuple[str, str]] = set()
    for dim in dims:
        if isinstance(dim, Merged):
            for x, y in itertools.pairwise(dim.items):
                if isinstance(x, Ax) and isinstance(y, Ax):
                    out.add((x.name, y.name))
    return out


def _with_joined(dims: Sequence[Dim], x: str, y: str, name: str) -> Dims:
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Merged):
            items = [Ax(name) if i == Ax(x) else i for i in dim.items if i != Ax(y)]
            out.append(Merged(tuple(items)))
        else:
            out.append(dim)
    return flat(out)


# ---------------------------------------------------------------------------------------------------- choices


def is_joint(rule: Rule) -> bool:
    """Whether the choices share one leaf or one tensor, so that they cannot be separate rules."""
    apart = name_has_choice([rule.leaf]) and name_has_choice(rule.tensors)
    return arity(rule) > 1 and not apart


def only(rule: Rule, k: int) -> Rule:
    """The rule of choice k alone."""

    def name(of: Name) -> Name:
        return replace(of, parts=tuple(chosen_parts(of.parts, k)))

    return replace(
        rule,
        leaf=name(rule.leaf) if rule.leaf else None,
        tensors=tuple(map(name, rule.tensors)),
        left=flat(resolve(rule.left, k)),
        right=flat(resolve(rule.right, k)),
    )


def without(rule: Rule, k: int) -> Rule:
    """The rule of all choices but k."""
    if arity(rule) == 2:
        return only(rule, 1 - k)
    keep = [j for j in range(arity(rule)) if j != k]
    return _chosen(rule, keep, keep, keep)


def exchanged(rule: Rule, order: Sequence[int]) -> Rule:
    """The tensors' choices in another order; the leaves', if only they have choices."""
    same = list(range(arity(rule)))
    if name_has_choice(rule.tensors):
        return _chosen(rule, same, order, same)
    return _chosen(rule, order, same, same)


def _chosen(
    rule: Rule, leaf: Sequence[int], tensors: Sequence[int], dims: Sequence[int]
) -> Rule:
    def name(n: Name, order: Sequence[int]) -> Name:
        parts = [
            Pick(tuple(p.options[j] for j in order)) if isinstance(p, Pick) else p
            for p in n.parts
        ]
        return replace(n, parts=tuple(parts))

    def side(of: Sequence[Dim]) -> Dims:
        out: list[Dim] = []
        for dim in of:
            match dim:
                case Cat():
                    out.append(Cat(tuple(dim.options[j] for j in dims)))
                case Merged():
                    out.append(Merged(side(dim.items)))
                case _:
                    out.append(dim)
        return tuple(out)

    return replace(
        rule,
        leaf=name(rule.leaf, leaf) if rule.leaf else None,
        tensors=tuple(name(t, tensors) for t in rule.tensors),
        left=side(rule.left),
        right=side(rule.right),
    )


def has_wild(rule: Rule) -> bool:
    """Does the leaf path hold a `{x*}`?"""
    holes = walk_names(rule.leaf.parts) if rule.leaf else ()
    return any(isinstance(hole, Wild) for hole in holes)


# Layers in another order: numbers written out in rules, stacks over groups of layers, layers reversed or shifted.

LAYER = Index(((1, "i"),))
_NUMBER = re.compile(r"(?<![\w{+*])\d+(?![\w}])")


def layers_written_out(
    rules: Iterable[Rule], bindings: Mapping[str, Sequence[Binding]]
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
        generic = parse_rule(text)
        found = [m[2] for m in members]
        if numbers == places:
            yield [generic], found, "layers in order"
        for op, order in _orders(places):
            yield _literal(generic, numbers, order), found, f"layers {op}"


def other_orders(
    rule: Rule, now: Sequence[Binding]
) -> Iterator[tuple[list[Rule], str]]:
    """A stack in another order of its groups, or layers reversed or shifted: (rules, what was changed)."""
    for hole in [h for t in rule.tensors for h in t.parts if isinstance(h, Index)]:
        if len(hole.terms) != 2:
            continue
        x, y = hole.variables
        counts = {v: _count(rule, now, v) for v in (x, y)}
        for major, minor in ((x, y), (y, x)):
            terms = {major: counts[minor], minor: 1}
            new = Index(tuple((terms[v], v) for v in (x, y)), hole.const)
            names = tuple(t.with_part(hole, new) for t in rule.tensors)
            made = rewritten(replace(rule, tensors=names))
            if counts[minor] and made is not None:
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
        slices = Cat(((Ax("1"),),) * len(order))
        many = arity(rule) > 1
        made = []
        for one in [only(rule, k) for k in range(arity(rule))] if many else [rule]:
            names = tuple(t.with_part(LAYER, numbers) for t in one.tensors)
            left = (*one.left[:at], slices, *one.left[at + 1 :])
            made.append(rewritten(replace(one, tensors=names, left=left)))
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
        if len(picks) != 1:
            return
        written = [o[0] for o in picks[0].options if len(o) == 1]
        numbers = [int(n) for n in written if isinstance(n, str) and n.isdecimal()]
        if sorted(numbers) != list(range(len(picks[0].options))):
            return
        names.append(tensor.with_part(picks[0], LAYER))
    left = (*rule.left[: at[0]], Ax("i"), *rule.left[at[0] + 1 :])
    made = rewritten(replace(rule, tensors=tuple(names), left=left))
    if made is not None:
        yield [made], "layers in order"


def _orders(numbers: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Layers reversed, shifted by one, and shifted back by one."""
    listed = list(numbers)
    if len(listed) < 2:
        return []
    found = [("reversed", listed[::-1])]
    if len(listed) > 2:
        found.append(("moved on", [*listed[1:], listed[0]]))
        found.append(("moved back", [listed[-1], *listed[:-1]]))
    return found


def _literal(rule: Rule, leaves: Sequence[int], tensors: Sequence[int]) -> list[Rule]:
    """A rule for each layer, its number written out on both sides."""
    out = []
    assert rule.leaf is not None
    for leaf, tensor in zip(leaves, tensors, strict=True):
        names = tuple(t.with_part(LAYER, str(tensor)) for t in rule.tensors)
        path = rule.leaf.with_part(LAYER, str(leaf))
        made = rewritten(replace(rule, leaf=path, tensors=names))
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
        around = (part[: match.start()], LAYER, part[match.end() :])
        parts += [piece for piece in around if piece]
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

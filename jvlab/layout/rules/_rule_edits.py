"""Edits of a rule: axes reordered, heads or rotary pairs split, choices exchanged or separated.

They change the syntax tree only; `Rules.attempt` decides whether the result binds a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from jvlab._errors import RuleError
from jvlab.layout.rules._grammar import arity, name_has_choice
from jvlab.layout.rules._rules import parse_rule
from jvlab.layout.rules._sizes import resolve
from jvlab.layout.rules._syntax import (
    Ax,
    Cat,
    Dim,
    Group,
    Index,
    Name,
    Part,
    Pick,
    Rule,
    Size,
    rule_text,
    walk_axes,
)
from jvlab.layout.rules._syntax import walk_brackets as brackets

Dims = tuple[Dim, ...]
LETTERS = "abcefgmopqrstuvwxyz"


def rewritten(rule: Rule) -> Rule | None:
    """The rule parsed again from its own text; None if it is not valid."""
    try:
        return parse_rule(rule_text(rule), rule.line)
    except RuleError:
        return None


def written_out(rule: Rule, leaf_rank: int) -> Rule:
    """The rule with names for the dimensions that `...` stands for."""
    plain = (Ax("..."),)
    if rule.left != plain or rule.right != plain:
        return rule
    axes = tuple(Ax(name) for name in ("d",) if leaf_rank == 1) or tuple(
        Ax(c) for c in LETTERS[:leaf_rank]
    )
    return replace(rule, left=axes, right=axes)


# ---------------------------------------------------------------------------------------------------- axes


def flat(dims: Sequence[Dim]) -> Dims:
    """Without brackets around a single axis, and without nested brackets."""
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Group):
            items: list[Dim] = []
            for item in flat(dim.items):
                items += item.items if isinstance(item, Group) else (item,)
            items = [
                i for i in items if not (isinstance(i, Ax) and i.name == "1")
            ] or items[:1]
            out.append(items[0] if len(items) == 1 else Group(tuple(items)))
        else:
            out.append(dim)
    return tuple(out)


def with_axis(dims: Sequence[Dim], name: str, new: Sequence[Dim]) -> Dims:
    """Every axis `name` replaced by several, merged."""
    out: list[Dim] = []
    for dim in dims:
        match dim:
            case Ax() if dim.name == name:
                out.append(Group(tuple(new)))
            case Group():
                out.append(Group(with_axis(dim.items, name, new)))
            case Cat():
                out.append(
                    Cat(
                        tuple(
                            tuple(_spliced(with_axis(o, name, new)))
                            for o in dim.options
                        )
                    )
                )
            case _:
                out.append(dim)
    return flat(out)


def _spliced(dims: Sequence[Dim]) -> Iterator[Dim]:
    """The items of a concatenation's part are merged already."""
    for dim in dims:
        yield from dim.items if isinstance(dim, Group) else (dim,)


def split(
    rule: Rule, name: str, left: str, right: str, size: tuple[str, int] | None = None
) -> Rule:
    """An axis split on both sides, in an order of its own on each."""
    axes = lambda text: tuple(Ax(word) for word in text.split())
    sizes = (*rule.sizes, Size(size[0], (("*", str(size[1])),))) if size else rule.sizes
    sizes = tuple(s for s in sizes if s.name != name)
    return replace(
        rule,
        left=with_axis(rule.left, name, axes(left)),
        right=with_axis(rule.right, name, axes(right)),
        sizes=sizes,
    )


def dimension_orders(rule: Rule) -> Iterator[Rule]:
    """Whole dimensions in another order, on the tensor's side, on the leaf's, or on both."""
    for left in itertools.permutations(rule.left):
        for right in itertools.permutations(rule.right):
            yield replace(rule, left=left, right=right)


def inner_orders(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Merged axes `(n h)` in another order, one bracket at a time; with the name of the change."""
    for side in ("left", "right"):
        dims: Dims = getattr(rule, side)
        for at, dim in enumerate(dims):
            for new in _orders_within(dim):
                changed = (*dims[:at], new, *dims[at + 1 :])
                yield f"{side} {_order(dim, new)}", replace(rule, **{side: changed})


def _orders_within(dim: Dim) -> Iterator[Dim]:
    if isinstance(dim, Group) and len(dim.items) <= 4:
        yield from (
            Group(items)
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


def _order(old: Dim, new: Dim) -> str:
    """The permutation, independent of axis names: equal for `(n h)` of q and `(k h)` of k."""
    items = lambda dim: (
        dim.items
        if isinstance(dim, Group)
        else dim.options[0]
        if isinstance(dim, Cat)
        else (dim,)
    )
    before = list(items(old))
    return "".join(str(before.index(item)) for item in items(new))


def joined(
    rule: Rule, same: Callable[[Rule], bool], names: Sequence[str] = ("h", "n", "k")
) -> Rule:
    """The rule with adjacent axes joined where they are adjacent on both sides and the result means the `same`."""
    moved = True
    while moved:
        moved = False
        for x, y in _neighbours(rule.left) & _neighbours(rule.right):
            taken = {
                a.name for dims in (rule.left, rule.right) for a in walk_axes(dims)
            } - {x, y}
            for name in (n for n in names if n not in taken):
                one = [
                    _with_joined(dims, x, y, name) for dims in (rule.left, rule.right)
                ]
                sizes = tuple(s for s in rule.sizes if s.name not in (x, y))
                found = rewritten(replace(rule, left=one[0], right=one[1], sizes=sizes))
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
        if isinstance(dim, Group):
            for x, y in itertools.pairwise(dim.items):
                if isinstance(x, Ax) and isinstance(y, Ax):
                    out.add((x.name, y.name))
    return out


def _with_joined(dims: Sequence[Dim], x: str, y: str, name: str) -> Dims:
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Group):
            items = [Ax(name) if i == Ax(x) else i for i in dim.items if i != Ax(y)]
            out.append(Group(tuple(items)))
        else:
            out.append(dim)
    return flat(out)


# ---------------------------------------------------------------------------------------------------- choices


def is_joint(rule: Rule) -> bool:
    """Whether the choices share one leaf or one tensor, so that they cannot be separate rules."""
    leaf = name_has_choice([rule.leaf])
    tensor = name_has_choice(rule.tensors)
    return arity(rule) > 1 and not (leaf and tensor)


def only(rule: Rule, k: int) -> Rule:
    """The rule of choice k alone."""
    name = lambda n: replace(
        n, parts=plain(p for part in n.parts for p in _of(part, k))
    )
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
                case Group():
                    out.append(Group(side(dim.items)))
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


def _of(part: Part, k: int) -> Sequence[Part]:
    return part.options[k] if isinstance(part, Pick) else (part,)


def plain(parts: Iterable[Part]) -> tuple[Part, ...]:
    out: list[Part] = []
    for part in parts:
        if out and isinstance(part, str) and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


# ---------------------------------------------------------------------------------------------------- layers


def computed(rule: Rule) -> list[Index]:
    """The computed numbers `{2*s+j}` of two variables in the checkpoint names."""
    holes = [p for t in rule.tensors for p in t.parts if isinstance(p, Index)]
    return [h for h in holes if len(h.terms) == 2]


def with_number(rule: Rule, old: Index, new: Index) -> Rule:
    """A computed number replaced by another."""
    name = lambda n: replace(n, parts=tuple(new if p == old else p for p in n.parts))
    return replace(rule, tensors=tuple(map(name, rule.tensors)))


def has_wild(rule: Rule) -> bool:
    """Does the leaf path hold a `{x*}`?"""
    return rule.leaf is not None and any(
        hasattr(p, "name") and not isinstance(p, str) for p in _holes(rule.leaf)
    )


def _holes(name: Name) -> Iterator[Part]:
    for part in name.parts:
        if isinstance(part, Pick):
            for option in part.options:
                yield from (p for p in option if not isinstance(p, str))
        elif not isinstance(part, str):
            yield part


def has_concatenation(rule: Rule) -> bool:
    """Is a `[..|..]` among its axes?"""
    return any(brackets(rule.left)) or any(brackets(rule.right))

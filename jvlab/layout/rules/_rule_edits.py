"""Edits of a rule: axes or layers reordered, heads or rotary pairs split, choices exchanged or separated.

They change the syntax tree, or the text; `Rules.attempt` decides whether the result binds a model.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jvlab._errors import RuleError
from jvlab.layout._types import Binding
from jvlab.layout.rules._rules import Compiled, resolve
from jvlab.layout.rules._syntax import (
    PLAIN,
    Ax,
    Cat,
    Dim,
    Index,
    Merged,
    Name,
    Pick,
    Rule,
    Size,
    arity,
    changed,
    chosen_parts,
    name_has_choice,
    parse_rule,
)

Dims = tuple[Dim, ...]
LETTERS = "abcefgmopqrstuvwxyz"
_CHOICE = re.compile(r"\[([^][]*)\]")


def _parsed(text: str, line: int = 1) -> Rule | None:
    """The rule of a text; None if it is not valid."""
    try:
        return parse_rule(text, line)
    except RuleError:
        return None


def rewritten(rule: Rule) -> Rule | None:
    """The rule parsed again from its own text; None if it is not valid."""
    return _parsed(str(rule), rule.line)


def written_out(rule: Rule, leaf_rank: int) -> Rule:
    """The rule with names for the dimensions that `...` stands for."""
    if rule.left != PLAIN or rule.right != PLAIN:
        return rule
    letters = "d" if leaf_rank == 1 else LETTERS[:leaf_rank]
    axes = tuple(map(Ax, letters))
    return replace(rule, left=axes, right=axes)


# ---------------------------------------------------------------------------------------------------- axes


def flat(dims: Sequence[Dim]) -> Dims:
    """Without brackets around a single axis, and without nested brackets."""
    return changed(dims, _flat)


def _flat(dim: Dim) -> Dim:
    if isinstance(dim, Merged):
        items = _inline(dim.items)
        items = [i for i in items if i != Ax("1")] or items[:1]
        return items[0] if len(items) == 1 else Merged(tuple(items))
    if isinstance(dim, Cat):
        # a part of a concatenation is merged without brackets
        return Cat(tuple(tuple(_inline(option)) for option in dim.options))
    return dim


def _inline(items: Sequence[Dim]) -> list[Dim]:
    out: list[Dim] = []
    for item in items:
        out += item.items if isinstance(item, Merged) else (item,)
    return out


def split(
    rule: Rule, name: str, left: str, right: str, size: tuple[str, int] | None = None
) -> Rule:
    """An axis split on both sides, in an order of its own on each."""

    def side(dims: Sequence[Dim], words: str) -> Dims:
        new = Merged(tuple(map(Ax, words.split())))
        return flat(changed(dims, lambda dim: new if dim == Ax(name) else dim))

    sizes = [s for s in rule.sizes if s.name != name]
    if size:
        sizes.append(Size(size[0], (("*", str(size[1])),)))
    return replace(
        rule,
        left=side(rule.left, left),
        right=side(rule.right, right),
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
            for order, new in _orders_within(dim):
                made = {side: (*dims[:at], new, *dims[at + 1 :])}
                yield f"{side} {order}", replace(rule, **made)


def _orders_within(dim: Dim) -> Iterator[tuple[str, Dim]]:
    """The order, which is equal for `(n h)` of q and `(k h)` of k, and the dimension in it."""
    if isinstance(dim, Ax):
        return
    parts = (dim.items,) if isinstance(dim, Merged) else dim.options
    count = len(parts[0])
    if count > 4 or any(len(part) != count for part in parts):
        return
    orders = itertools.permutations(range(count))
    for order in itertools.islice(orders, 1, None):
        made = tuple(tuple(part[j] for j in order) for part in parts)
        new = Merged(made[0]) if isinstance(dim, Merged) else Cat(made)
        yield "".join(map(str, order)), new


def joined(rule: Rule, same: Callable[[Rule], bool]) -> Rule:
    """The rule with adjacent axes joined where they are adjacent on both sides and the result means the `same`."""
    while True:
        found = next((made for made in _joins(rule) if same(made)), None)
        if found is None:
            return rule
        rule = found


def _joins(rule: Rule) -> Iterator[Rule]:
    for x, y in sorted(_neighbours(rule.left) & _neighbours(rule.right)):
        for name in "hnk":
            if name in rule.axis_names - {x, y}:
                continue
            made = replace(
                rule,
                left=_with_joined(rule.left, x, y, name),
                right=_with_joined(rule.right, x, y, name),
                sizes=tuple(s for s in rule.sizes if s.name not in (x, y)),
            )
            found = rewritten(made)
            if found is not None:
                yield found


def _neighbours(dims: Sequence[Dim]) -> set[tuple[str, str]]:
    out: set[tuple[str, str]] = set()
    for dim in dims:
        if isinstance(dim, Merged):
            for x, y in itertools.pairwise(dim.items):
                if isinstance(x, Ax) and isinstance(y, Ax):
                    out.add((x.name, y.name))
    return out


def _with_joined(dims: Sequence[Dim], x: str, y: str, name: str) -> Dims:
    def join(dim: Dim) -> Dim:
        if not isinstance(dim, Merged):
            return dim
        kept = (i for i in dim.items if i != Ax(y))
        return Merged(tuple(Ax(name) if i == Ax(x) else i for i in kept))

    return flat(changed(dims, join))


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


def without(rule: Rule, k: int) -> Rule | None:
    """The rule of all choices but k."""
    if arity(rule) == 2:
        return only(rule, 1 - k)
    keep = [j for j in range(arity(rule)) if j != k]
    return _chosen(rule, keep, keep, keep)


def exchanged(rule: Rule, order: Sequence[int]) -> Rule | None:
    """The tensors' choices in another order; the leaves', if only they have choices."""
    same = range(arity(rule))
    if name_has_choice(rule.tensors):
        return _chosen(rule, same, order, same)
    return _chosen(rule, order, same, same)


def _chosen(
    rule: Rule, leaf: Sequence[int], tensors: Sequence[int], dims: Sequence[int]
) -> Rule | None:
    """The rule with these choices, in this order, of each `[..|..]`."""

    def chosen(text: str, order: Sequence[int]) -> str:
        pick = lambda found: "|".join(found[1].split("|")[j] for j in order)
        return _CHOICE.sub(lambda found: f"[{pick(found)}]", text)

    names, colon, axes = str(rule).partition(" : ")
    path, _, into = names.partition(" -> ")
    into = f"{chosen(into, tensors)}{colon}{chosen(axes, dims)}"
    return _parsed(f"{chosen(path, leaf)} -> {into}", rule.line)


# Layers in another order: numbers written out in rules, stacks over groups of layers, layers reversed or shifted.

LAYER = Index(((1, "i"),))
_NUMBER = re.compile(r"(?<![\w{+*])\d+(?![\w}])")


def layers_written_out(
    rules: Iterable[Rule], bindings: Mapping[str, Sequence[Binding]]
) -> Iterator[tuple[list[Rule], list[Rule], str]]:
    """Rules that differ only in a layer number: (rules of another order, the current rules, what was changed)."""
    families: dict[str, list[tuple[int, int, Rule]]] = defaultdict(list)
    for rule in rules:
        text = str(rule)
        plain = replace(rule, left=PLAIN, right=PLAIN, sizes=(), add=0.0, cast=None)
        leaf, _, tensors = str(plain).partition(" -> ")
        mine = _NUMBER.findall(leaf)
        theirs = _NUMBER.findall(tensors)
        if not bindings.get(text) or len(mine) != 1 or len(set(theirs)) != 1:
            continue
        axes = text.removeprefix(str(plain))
        family = _NUMBER.sub("{i}", str(plain)) + axes
        families[family].append((int(mine[0]), int(theirs[0]), rule))
    for text, members in families.items():
        generic = _parsed(text)
        if len(members) < 2 or generic is None:
            continue
        numbers = sorted(m[0] for m in members)
        places = sorted(m[1] for m in members)
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
        for major, minor in ((x, y), (y, x)):
            terms = {major: _count(rule, now, minor), minor: 1}
            new = Index(tuple((terms[v], v) for v in (x, y)), hole.const)
            names = tuple(t.with_part(hole, new) for t in rule.tensors)
            yield [replace(rule, tensors=names)], f"layers by {major}"
    leaf = rule.leaf
    if leaf is None or any(LAYER not in t.parts for t in rule.tensors):
        return
    if LAYER not in leaf.parts:
        yield from _stack_orders(rule, now)
        return
    match = Compiled(rule).match
    numbers = {int(found[1]["i"]) for b in now if (found := match(b.leaf))}
    for op, order in _orders(sorted(numbers)):
        yield _literal(rule, sorted(numbers), order), f"layers {op}"


def _stack_orders(
    rule: Rule, now: Sequence[Binding]
) -> Iterator[tuple[list[Rule], str]]:
    """The slices of a stacked leaf in another order: `model.layers.[2|1|0].x : [1|1|1] a b -> b a`."""
    if Ax("i") not in rule.left:
        return
    for op, order in _orders(range(_count(rule, now, "i"))):
        numbers = Pick(tuple((str(n),) for n in order))
        slices = Cat(((Ax("1"),),) * len(order))
        made = []
        for one in (only(rule, k) for k in range(arity(rule))):
            names = tuple(t.with_part(LAYER, numbers) for t in one.tensors)
            left = tuple(slices if dim == Ax("i") else dim for dim in one.left)
            made.append(replace(one, tensors=names, left=left))
        yield made, f"layers {op}"


def in_order(rule: Rule) -> Iterator[tuple[list[Rule], str]]:
    """The rule that takes the slices of a stacked leaf in order, where it writes their layers out: `layers.[2|1|0]`."""
    slices = Cat(((Ax("1"),),) * arity(rule))
    written = {(str(n),) for n in range(arity(rule))}
    picks = [p for t in rule.tensors for p in t.parts if isinstance(p, Pick)]
    if slices not in rule.left or name_has_choice([rule.leaf]):
        return
    if len(picks) == len(rule.tensors) and all(
        set(p.options) == written for p in picks
    ):
        pairs = zip(rule.tensors, picks, strict=True)
        names = tuple(tensor.with_part(pick, LAYER) for tensor, pick in pairs)
        left = tuple(Ax("i") if dim == slices else dim for dim in rule.left)
        yield [replace(rule, tensors=names, left=left)], "layers in order"


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
    leaf, _, rest = str(rule).partition(" -> ")
    out = []
    for number, place in zip(leaves, tensors, strict=True):
        path = leaf.replace("{i}", str(number))
        made = _parsed(f"{path} -> {rest.replace('{i}', str(place))}")
        out += [made] if made is not None else []
    return out


def _count(rule: Rule, now: Sequence[Binding], variable: str) -> int:
    """How many values a stacked axis, or a captured number, takes."""
    for d, dim in enumerate(rule.left):
        if dim == Ax(variable):
            return now[0].leaf_shape[d]
    return len({b.leaf for b in now})

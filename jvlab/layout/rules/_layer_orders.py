"""Layers in another order: numbers written out in rules, stacks over groups of layers, layers reversed or shifted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jvlab.layout._types import Binding
from jvlab.layout.rules import _rule_edits as edits
from jvlab.layout.rules._check import arity
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import Ax, Cat, Index, Name, Part, Pick, Rule

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
        leaf, tensors = _generic(rule.leaf), [t for t in map(_generic, rule.tensors) if t]
        if leaf is None or len(tensors) != len(rule.tensors) or len({number for _, number in tensors}) != 1:
            continue
        made = replace(rule, leaf=leaf[0], tensors=tuple(name for name, _ in tensors))
        families[str(made)].append((leaf[1], tensors[0][1], rule))
    for text, members in families.items():
        if len(members) < 2:
            continue
        numbers, places = sorted(m[0] for m in members), sorted(m[1] for m in members)
        generic, found = Rules.parse(text).rules[0], [m[2] for m in members]
        if numbers == places:
            yield [generic], found, "layers in order"
        for op, order in _orders(places):
            yield _literal(generic, numbers, order), found, f"layers {op}"


def other_orders(rule: Rule, now: Sequence[Binding]) -> Iterator[tuple[list[Rule], str]]:
    """A stack in another order of its groups, or layers reversed or shifted: (rules, what was changed)."""
    for hole in edits.computed(rule):
        (_, x), (_, y) = hole.terms
        counts = {v: _count(rule, now, v) for v in (x, y)}
        for major, minor in ((x, y), (y, x)):
            terms = {major: counts[minor], minor: 1}
            new = Index(tuple((terms[v], v) for v in (x, y)), hole.const)
            made = edits.rewritten(edits.with_number(rule, hole, new)) if counts[minor] else None
            if made is not None:
                yield [made], f"layers by {major}"
    leaf = rule.leaf
    if leaf is None or any(LAYER not in t.parts for t in rule.tensors):
        return
    if LAYER not in leaf.parts:
        yield from _stack_orders(rule, now)
        return
    numbers = sorted({number for b in now if (number := _layer(leaf, b.leaf)) is not None})
    for op, order in _orders(numbers):
        yield _literal(rule, numbers, order), f"layers {op}"


def _stack_orders(rule: Rule, now: Sequence[Binding]) -> Iterator[tuple[list[Rule], str]]:
    """The slices of a stacked leaf in another order: `model.layers.[2|1|0].x : [1|1|1] a b -> b a`."""
    at = next((d for d, dim in enumerate(rule.left) if dim == Ax("i")), None)
    if at is None:
        return
    for op, order in _orders(range(now[0].leaf_shape[at])):
        numbers = Pick(tuple((str(n),) for n in order))
        made = []
        for one in [edits.only(rule, k) for k in range(arity(rule))] if arity(rule) > 1 else [rule]:
            names = (replace(t, parts=tuple(numbers if p == LAYER else p for p in t.parts)) for t in one.tensors)
            left = (*one.left[:at], Cat(((Ax("1"),),) * len(order)), *one.left[at + 1 :])
            made.append(edits.rewritten(replace(one, tensors=tuple(names), left=left)))
        if all(made):
            yield [rule for rule in made if rule is not None], f"layers {op}"


def in_order(rule: Rule) -> Iterator[tuple[list[Rule], str]]:
    """The rule that takes the slices of a stacked leaf in order, where it writes their layers out: `layers.[2|1|0]`."""
    at = [d for d, dim in enumerate(rule.left) if isinstance(dim, Cat) and set(dim.options) == {(Ax("1"),)}]
    if len(at) != 1 or rule.leaf is None or any(isinstance(p, Pick) for p in rule.leaf.parts):
        return
    names = []
    for tensor in rule.tensors:
        picks = [p for p in tensor.parts if isinstance(p, Pick)]
        written = [o[0] for o in picks[0].options if len(o) == 1] if len(picks) == 1 else []
        numbers = sorted(int(n) for n in written if isinstance(n, str) and n.isdecimal())
        if not numbers or numbers != list(range(len(picks[0].options))):
            return
        names.append(replace(tensor, parts=tuple(LAYER if p is picks[0] else p for p in tensor.parts)))
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
    return [*found, ("moved back", [listed[-1], *listed[:-1]])] if len(listed) > 2 else found[:1]


def _literal(rule: Rule, leaves: Sequence[int], tensors: Sequence[int]) -> list[Rule]:
    """A rule for each layer, its number written out on both sides."""
    out = []
    for a, b in zip(leaves, tensors, strict=True):
        name = lambda n, number: replace(n, parts=edits.plain(str(number) if p == LAYER else p for p in n.parts))
        assert rule.leaf is not None
        made = edits.rewritten(replace(rule, leaf=name(rule.leaf, a), tensors=tuple(name(t, b) for t in rule.tensors)))
        out += [made] if made is not None else []
    return out


def _generic(name: Name) -> tuple[Name, int] | None:
    """A name with its one written number as `{i}`."""
    found: list[int] = []
    parts: list[Part] = []
    for part in name.parts:
        if isinstance(part, Pick) and any(_NUMBER.search(p) for o in part.options for p in o if isinstance(p, str)):
            return None
        match = _NUMBER.search(part) if isinstance(part, str) else None
        if match is None or not isinstance(part, str):
            parts.append(part)
            continue
        found.append(int(match[0]))
        before, after = part[: match.start()], part[match.end() :]
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
    return len({b.leaf for b in now}) if rule.leaf and Index(((1, variable),)) in rule.leaf.parts else 0

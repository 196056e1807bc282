"""Semantic checks of a parsed rule; each error points at a character."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jvlab.layout.rules._grammar import MAX_MANY
from jvlab.layout.rules._syntax import (
    Ax,
    Cat,
    Dim,
    Group,
    Index,
    Name,
    Pick,
    Rule,
    Wild,
    walk_axes,
    walk_brackets,
    walk_names,
)


def arity(rule: Rule) -> int:
    """How many choices the rule's `[..|..]` line up; 1 without any."""
    return next((len(b.options) for b in _brackets(rule)), 1)


def name_has_choice(names: Iterable[Name | None]) -> bool:
    """Does any of these names hold a `[..|..]`?"""
    return any(next(walk_brackets(n.parts), None) for n in names if n)


def check(rule: Rule) -> Rule:
    """Returns the rule, or raises a RuleError that points at what is wrong with it."""
    _check_brackets(rule)
    _check_leaf_name(rule)
    if rule.leaf is None or not rule.tensors:
        return rule
    _check_rest(rule)
    _check_sums(rule)
    for k in range(arity(rule)):
        _check_axes(rule, k)
    _check_sizes(rule)
    return rule


def _brackets(rule: Rule) -> Iterator[Pick | Cat]:
    for name in (rule.leaf, *rule.tensors):
        if name:
            yield from walk_brackets(name.parts)
    yield from walk_brackets(rule.left)
    yield from walk_brackets(rule.right)


def _check_brackets(rule: Rule) -> None:
    count = arity(rule)
    for bracket in _brackets(rule):
        if len(bracket.options) == 1:
            rule.fail("a choice of one", bracket.pos, "write it without brackets")
        if len(bracket.options) != count:
            rule.fail(
                f"{len(bracket.options)} choices where the rule's first `[..|..]` has {count}",
                bracket.pos,
                "all `[..|..]` of a rule line up one to one",
            )
        if any(next(walk_brackets(o), None) for o in bracket.options):
            rule.fail("a `[..|..]` inside another", bracket.pos, "write them side by side, or two rules")
    if not rule.leaf or not rule.tensors or count == 1:
        return
    many = [name_has_choice([t]) for t in rule.tensors]
    if any(many) != all(many):
        odd = rule.tensors[many.index(not many[0])]
        rule.fail("only some of the checkpoint names have choices", odd.pos, "give all of them, or none, a `[..|..]`")
    left = name_has_choice([rule.leaf]) or any(walk_brackets(rule.left))
    right = any(many) or any(walk_brackets(rule.right))
    first = next(_brackets(rule)).pos
    if not left:
        fix = "split an axis of the leaf, `d [q|k|v] -> …`; for tied tensors separate names with `,`"
        rule.fail("the leaf side has no `[..|..]` to line up with this one", first, fix)
    if not right:
        fix = "concatenate on the tensor's side too, `… -> [q|k|v] d`, or choose its name"
        rule.fail("every choice would fill the same part of the same tensor", first, fix)


def _check_leaf_name(rule: Rule) -> None:
    for name in (rule.leaf,) if rule.leaf else rule.tensors:
        if rule.leaf is None and name.optional:
            rule.fail("`?` on an unused tensor", name.pos, "an unused tensor may be absent anyway: drop the `?`")
        for k in range(arity(rule)):
            seen: set[str] = set()
            for hole in walk_names(name.parts, k):
                if isinstance(hole, Index) and (len(hole.terms) != 1 or hole.terms[0][0] != 1 or hole.const):
                    fix = "capture it as {i}; compute on the other side"
                    rule.fail("a computed number in a name to match", hole.pos, fix)
                var = hole.name if isinstance(hole, Wild) else hole.terms[0][1]
                if var in seen:
                    rule.fail(f"`{var}` is captured twice", hole.pos, "give the second capture another name")
                seen.add(var)


def _check_rest(rule: Rule) -> None:
    left, right = ([d for d in dims if isinstance(d, Ax) and d.name == "..."] for dims in (rule.left, rule.right))
    for found, other in ((left, right), (right, left)):
        if len(found) > 1:
            rule.fail("`...` twice", found[1].pos, "one `...` a side")
        if found and not other:
            rule.fail("`...` on one side only", found[0].pos, "write `...` on both sides, or name the axes")


def _check_sums(rule: Rule) -> None:
    """`([a|b] [c|d] …)` is a sum of products: their number doubles with each bracket."""

    def terms(items: Sequence[Dim]) -> int:
        out = 1
        for item in items:
            if isinstance(item, Group):
                out *= terms(item.items)
            elif isinstance(item, Cat):
                out *= sum(map(terms, item.options))
        return out

    for dim in (*rule.left, *rule.right):
        if terms([dim]) > MAX_MANY:
            rule.fail(f"a dimension of more than {MAX_MANY} parts", dim.pos, "one `[..|..]` a dimension is enough")


def captures(name: Name, k: int) -> dict[str, Index | Wild]:
    """What the name captures under choice k: variable → hole."""
    return {(h.name if isinstance(h, Wild) else h.terms[0][1]): h for h in walk_names(name.parts, k)}


def used_in(name: Name, k: int) -> dict[str, Index | Wild]:
    """The variables a checkpoint name needs under choice k."""
    out: dict[str, Index | Wild] = {}
    for hole in walk_names(name.parts, k):
        for var in [hole.name] if isinstance(hole, Wild) else [v for _, v in hole.terms]:
            out[var] = hole
    return out


def _axes_once(rule: Rule, k: int) -> tuple[dict[str, Ax], dict[str, Ax]]:
    sides: tuple[dict[str, Ax], dict[str, Ax]] = ({}, {})
    for side, dims in zip(sides, (rule.left, rule.right), strict=True):
        for axis in walk_axes(dims, k):
            if axis.name in side:
                rule.fail(f"axis `{axis.name}` twice on one side", axis.pos, "give the second one another name")
            side[axis.name] = axis
    return sides


def _check_axes(rule: Rule, k: int) -> None:
    assert rule.leaf is not None
    captured = captures(rule.leaf, k)
    left, right = _axes_once(rule, k)
    needed = [used_in(t, k) for t in rule.tensors]
    for need in needed:
        _check_holes(rule, need, captured, left)
    for var, hole in captured.items():
        if var in left:
            rule.fail(f"`{var}` is captured from the path and an axis too", left[var].pos, "rename one of them")
        for need in needed:
            if var not in need and var not in right:
                fix = (
                    f"use {{{var}}} in the checkpoint name, or as an axis of the tensor; each leaf needs its own place"
                )
                rule.fail(f"`{var}` is captured and never used", hole.pos, fix)
    for axis in left.values():
        inside = [axis.name in need for need in needed]
        if axis.name in right and any(inside):
            rule.fail(
                f"axis `{axis.name}` is in the checkpoint name and in its shape", right[axis.name].pos, "drop one"
            )
        if axis.name not in right and not all(inside):
            rule.fail(f"axis `{axis.name}` is on the leaf's side only", axis.pos, "every axis is on both sides")
    for axis in right.values():
        if axis.name not in left and isinstance(captured.get(axis.name), Wild):
            rule.fail(f"axis `{axis.name}` is text, not a number", axis.pos, f"capture it as {{{axis.name}}}")
        if axis.name not in left and axis.name not in captured:
            rule.fail(f"axis `{axis.name}` is on the tensor's side only", axis.pos, "every axis is on both sides")


def _check_holes(
    rule: Rule, need: dict[str, Index | Wild], captured: dict[str, Index | Wild], left: dict[str, Ax]
) -> None:
    for var, hole in need.items():
        if isinstance(hole, Wild) and not isinstance(captured.get(var), Wild):
            rule.fail(f"`{var}*` is not captured by the leaf path", hole.pos, f"capture it there with {{{var}*}}")
        if isinstance(hole, Index) and isinstance(captured.get(var), Wild):
            rule.fail(f"`{var}` is text, not a number", hole.pos, f"write {{{var}*}}")
        if var not in captured and var not in left:
            fix = f"capture it in the leaf path with {{{var}}}, or make `{var}` an axis of the leaf (stacked leaves)"
            rule.fail(f"nothing gives `{var}` a value", hole.pos, fix)


def _check_sizes(rule: Rule) -> None:
    axes = {a.name for dims in (rule.left, rule.right) for a in walk_axes(dims)}
    defined: dict[str, set[str]] = {}
    for size in rule.sizes:
        if size.name not in axes:
            rule.fail(f"`{size.name}` is not an axis of this rule", size.pos, f"axes: {', '.join(sorted(axes))}")
        if size.name in defined:
            rule.fail(f"the size of `{size.name}` is given twice", size.pos, "drop one")
        if any(word == "0" for _, word in size.factors):
            rule.fail("a size of zero, or a division by it", size.pos, "give a positive size")
        defined[size.name] = {word for _, word in size.factors if word in axes}
    for size in rule.sizes:
        reach, todo = set(), [size.name]
        while todo:
            for word in defined.get(todo.pop(), ()):
                if word == size.name:
                    rule.fail(f"the size of `{size.name}` is defined by itself", size.pos, "give one of them a number")
                if word not in reach:
                    reach.add(word)
                    todo.append(word)

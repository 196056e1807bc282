"""Rules of a tree with stacked layers, derived from those of the unstacked tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jvlab.layout.rules._check import check
from jvlab.layout.rules._grammar import parse_line
from jvlab.layout.rules._syntax import Ax, Index, Part, Rule, rule_text


def stacked(rules: Iterable[Rule], capture: str = "i", axis: int = 0) -> tuple[Rule, ...]:
    """The rules of the same tree scanned over layers: `layers.{i}.x` → `layers.x` with the new axis `i` at `axis`."""

    def without(parts: tuple[Part, ...]) -> tuple[Part, ...] | None:
        for at, part in enumerate(parts):
            if isinstance(part, Index) and part.terms == ((1, capture),):
                before, after = parts[at - 1] if at else "", parts[at + 1] if at + 1 < len(parts) else ""
                if not isinstance(before, str) or not isinstance(after, str):
                    return None
                joined = before.rstrip("._") + after
                return (*parts[: max(at - 1, 0)], *([joined] if joined else []), *parts[at + 2 :])
        return None

    out = []
    for rule in rules:
        parts = without(rule.leaf.parts) if rule.leaf else None
        if parts is None or not rule.leaf:
            out.append(rule)
            continue
        left = (*rule.left[:axis], Ax(capture), *rule.left[axis:])
        out.append(_rewritten(replace(rule, leaf=replace(rule.leaf, parts=parts), left=left)))
    return tuple(out)


def _rewritten(rule: Rule) -> Rule:
    """The rule parsed again from its own text, so that it is checked and its errors point into that text."""
    return check(parse_line(rule_text(rule), rule.line))

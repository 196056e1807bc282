"""Tries edited rules on a mapping's inputs: what they would cover, and the new mapping if they cover everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, CoverageError
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._rules import HasShape, RuleProblem
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import Rule, name_text
from jvlab.sync._mapping_row import MappingRow

if TYPE_CHECKING:
    from jvlab.sync._mapping import Mapping as LayoutMapping

PROBLEM = "problem"  # the status of a row for something that is not covered


@dataclass(frozen=True)
class Origin:
    """The inputs of a mapping; shapes and names only, so that it keeps no parameter alive."""

    rules: Rules
    shapes: Mapping[str, HasShape] = field(repr=False)
    tensors: Sequence[CheckpointTensor] = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    # compiles and proves
    make: Callable[[Rules, list[Binding]], LayoutMapping] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Coverage:
    """What a set of rules covers: complete, or with its problems. Made by `mapping.edit(rule)`."""

    rules: Rules
    leaves: int
    leaves_bound: int
    tensors: int
    tensors_filled: int
    problems: tuple[str, ...]
    rows: tuple[MappingRow, ...] = field(repr=False)
    made: LayoutMapping | None = field(repr=False, default=None)

    @property
    def complete(self) -> bool:
        """Is every leaf used, and every element of every tensor and parameter written once? Not: is the value right?"""
        return self.made is not None

    @property
    def mapping(self) -> LayoutMapping:
        """The mapping that these rules make; a CoverageError if they do not cover the model."""
        if self.made is None:
            raise CoverageError(
                f"these rules leave {len(self.problems)} problems: {'; '.join(self.problems[:3])}",
                remedy="edit another rule with coverage.edit(rule); coverage.problems lists all",
                problems=self.problems,
            )
        return self.made

    def edit(self, rule: str, *, replace: str = "") -> Coverage:
        """Edit another rule on top of this one: rules are often wrong in pairs."""
        return self._again(changed_rules(self.rules, rule, replace))

    def save_rules(self, path: str | Path) -> Path:
        """Write these rules, complete or not, to a file for `rules=path`."""
        self.rules.save(path)
        return Path(path)

    _again: Callable[[Rules], Coverage] = field(repr=False, default=None)  # type: ignore[assignment]

    @property
    def line(self) -> str:
        """The coverage in one line."""
        state = (
            "complete"
            if self.complete
            else f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        )
        return f"{self.leaves_bound}/{self.leaves} leaves, {self.tensors_filled}/{self.tensors} tensors, {state}"

    def __repr__(self) -> str:
        return f"Coverage({self.line})"


def changed_rules(rules: Rules, text: str, replaced: str = "") -> Rules:
    """The rules with one added, replaced or removed; the notes of the others are kept."""
    old = _find(rules, replaced) if replaced.strip() else None
    parsed = Rules.parse(text).rules
    if len(parsed) > 1:
        raise ConfigError(
            f"edit takes one rule, not {len(parsed)}",
            remedy="call it per rule, or use jv.Rules.parse",
        )
    if not parsed:
        if old is None:
            raise ConfigError(
                "an empty rule removes one, but none is named",
                remedy="pass the text of the old rule as replace=",
            )
        kept = tuple(r for r in rules if r is not old)
    else:
        new = parsed[0]
        old = old or next(
            (
                r
                for r in rules
                if r.leaf and new.leaf and name_text(r.leaf) == name_text(new.leaf)
            ),
            None,
        )
        kept = (
            (*rules, new)
            if old is None
            else tuple(replace(new, line=r.line) if r is old else r for r in rules)
        )
    texts = {str(r) for r in kept}
    notes = {k: v for k, v in rules.notes.items() if k in texts}
    return Rules(kept, notes, {k: v for k, v in rules.warnings.items() if k in texts})


def _find(rules: Rules, text: str) -> Rule:
    wanted = str(Rules.parse(text).rules[0])
    found = next((r for r in rules if str(r) == wanted), None)
    if found is None:
        raise ConfigError(
            f"no rule in force reads `{wanted}`",
            remedy="print(mapping.rules) shows them",
        )
    return found


def coverage_of(mapping: LayoutMapping, rules: Rules) -> Coverage:
    """What `rules` would cover, applied to the inputs of `mapping`."""
    origin = mapping._source()
    bindings, problems = rules.attempt(origin.shapes, origin.tensors, origin.config)
    texts = [p.what for p in problems]
    made = None
    if not problems:
        try:
            made = origin.make(rules, bindings)
            made._link = mapping._link
        # the rules bind, but some elements on a rank would not be written
        except CoverageError as error:
            texts = list(error.problems) or [error.message]
    trouble = {p.leaf for p in problems} - {""}
    bound = {b.leaf for b in bindings} - trouble
    # `leaf -> ~` leaves no trace
    ignored = {p for p in origin.shapes if p not in bound and p not in trouble}
    unfilled = {p.tensor for p in problems} - {""}
    rows = (
        made.rows
        if made is not None
        else (*_rows_of(problems, texts), *mapping._rows_of(bindings))
    )
    return Coverage(
        rules,
        len(origin.shapes),
        len(bound) + len(ignored),
        len(origin.tensors),
        len(origin.tensors) - len(unfilled),
        tuple(texts),
        rows,
        made,
        _again=lambda other: coverage_of(mapping, other),
    )


def _rows_of(
    problems: Sequence[RuleProblem], texts: Sequence[str]
) -> tuple[MappingRow, ...]:
    """One table row per problem."""
    if not problems:
        return tuple(
            MappingRow("", "", text, 0.0, "", "", (), "", "", 0, PROBLEM)
            for text in texts
        )
    return tuple(
        MappingRow(p.leaf, p.rule, p.what, 0.0, p.tensor, "", (), "", "", 0, PROBLEM)
        for p in problems
    )

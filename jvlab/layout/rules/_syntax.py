"""The syntax tree of a rule, its canonical text, and the walks over it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NoReturn

from jvlab._errors import RuleError

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int32",
    "uint8",
)
_AROUND = 120  # characters of a long line shown on each side of the caret
BARE = re.compile(r"[A-Za-z0-9_./~\-]")


@dataclass(frozen=True)
class Index:
    """`{i}` or `{2*s+j}`: an integer in a name, affine in captured numbers and indexed axes."""

    terms: tuple[tuple[int, str], ...]
    const: int = 0
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Wild:
    """`{x*}`: any text in a name."""

    name: str
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Pick:
    """`[q|k|v]` in a name: choices that line up with every other `[..|..]` of the rule."""

    options: tuple[tuple[Part, ...], ...]
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Name:
    """A leaf path or checkpoint name with holes."""

    parts: tuple[Part, ...]
    optional: bool = False
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Ax:
    """An elementary axis; the name `1` is a dimension of size one, `...` any further dimensions."""

    name: str
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Group:
    """`(n h)`: several factors on one dimension, the first one major."""

    items: tuple[Dim, ...]
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Cat:
    """`[n h|k h|k h]`: a concatenation, or a choice where the name of that side has choices too."""

    options: tuple[tuple[Dim, ...], ...]
    pos: int = field(default=0, compare=False)


Part = str | Index | Wild | Pick
Dim = Ax | Group | Cat


@dataclass(frozen=True)
class Size:
    """`name = factor * factor / factor`: integers, axes, config keys; without factors: take it from the shapes."""

    name: str
    factors: tuple[tuple[str, str], ...]  # (operator, word), the first operator is "*"
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Rule:
    """One line. `leaf` None: tensors declared unused. No `tensors`: leaves declared ignored."""

    leaf: Name | None
    tensors: tuple[Name, ...]
    left: tuple[Dim, ...] = (Ax("..."),)
    right: tuple[Dim, ...] = (Ax("..."),)
    sizes: tuple[Size, ...] = ()
    add: float = 0.0
    cast: str | None = None
    source: str = field(default="", compare=False, repr=False)
    line: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return rule_text(self)

    def fail(self, what: str, pos: int, remedy: str) -> NoReturn:
        """Raises a RuleError whose message points at column `pos` of the line."""
        fail(self.source, pos, what, remedy, self.line)


def fail(source: str, pos: int, what: str, remedy: str, line: int = 1) -> NoReturn:
    """Raises a RuleError with the line, or the part around `pos`, and a caret under it."""
    start = max(0, pos - _AROUND) if len(source) > 3 * _AROUND else 0
    stop = pos + _AROUND if len(source) > 3 * _AROUND else len(source)
    before = "… " if start else ""
    after = " …" if stop < len(source) else ""
    shown = f"{before}{source[start:stop]}{after}"
    caret = " " * (len(before) + pos - start)
    raise RuleError(
        f"rule line {line}, column {pos + 1}: {what}\n    {shown}\n    {caret}^",
        remedy=remedy,
        line=line,
        column=pos + 1,
        rule=source if len(source) <= 3 * _AROUND else shown,
    )


# ---------------------------------------------------------------------------------------------------- walking


def walk_names(
    parts: Sequence[Part], pick: int | None = None
) -> Iterator[Index | Wild]:
    """Every hole of a name; with `pick`, of that choice only."""
    for part in parts:
        if isinstance(part, Pick):
            for option in (
                part.options if pick is None else part.options[pick : pick + 1]
            ):
                yield from walk_names(option, pick)
        elif not isinstance(part, str):
            yield part


def walk_axes(dims: Sequence[Dim], pick: int | None = None) -> Iterator[Ax]:
    """Every axis of a pattern but `1`; with `pick`, of that choice only."""
    for dim in dims:
        if isinstance(dim, Ax):
            if dim.name != "1":
                yield dim
        elif isinstance(dim, Group):
            yield from walk_axes(dim.items, pick)
        else:
            for option in dim.options if pick is None else dim.options[pick : pick + 1]:
                yield from walk_axes(option, pick)


def walk_brackets(items: Sequence[Part] | Sequence[Dim]) -> Iterator[Pick | Cat]:
    """Every `[..|..]` of a name or pattern."""
    for item in items:
        if isinstance(item, Pick | Cat):
            yield item
            for option in item.options:
                yield from walk_brackets(option)
        elif isinstance(item, Group):
            yield from walk_brackets(item.items)


# ---------------------------------------------------------------------------------------------------- text


def name_text(name: Name) -> str:
    """The canonical text of a name."""
    return _parts_text(name.parts) + ("?" if name.optional else "")


def _parts_text(parts: Sequence[Part]) -> str:
    out = []
    for part in parts:
        match part:
            case str():
                plain = (
                    all(BARE.match(c) for c in part)
                    and "->" not in part
                    and part != "~"
                )
                out.append(
                    part
                    if plain
                    else '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'
                )
            case Index():
                terms = [v if c == 1 else f"{c}*{v}" for c, v in part.terms]
                out.append(
                    "{"
                    + "+".join(terms + ([str(part.const)] if part.const else []))
                    + "}"
                )
            case Wild():
                out.append("{" + part.name + "*}")
            case Pick():
                out.append("[" + "|".join(_parts_text(o) for o in part.options) + "]")
    return "".join(out)


def dims_text(dims: Sequence[Dim]) -> str:
    """The canonical text of a pattern."""
    out = []
    for dim in dims:
        match dim:
            case Ax():
                out.append(dim.name)
            case Group():
                out.append(f"({dims_text(dim.items)})")
            case Cat():
                out.append("[" + "|".join(dims_text(o) for o in dim.options) + "]")
    return " ".join(out)


def rule_text(rule: Rule) -> str:
    """The canonical text of a rule; parsing it gives the same rule."""
    leaf = name_text(rule.leaf) if rule.leaf else "~"
    text = f"{leaf} -> {', '.join(map(name_text, rule.tensors)) or '~'}"
    plain = (Ax("..."),)
    if rule.left != plain or rule.right != plain:
        text += f" : {dims_text(rule.left)} -> {dims_text(rule.right)}"
    if rule.sizes:
        text += " where " + ", ".join(_size_text(s) for s in rule.sizes)
    if rule.add:
        text += f" {'+' if rule.add > 0 else '-'} {_number_text(abs(rule.add))}"
    return text + (f" as {rule.cast}" if rule.cast else "")


def _size_text(size: Size) -> str:
    value = "".join(op + word for op, word in size.factors)[1:]
    return f"{size.name}={value or '?'}"


def _number_text(number: float) -> str:
    """All digits, and never an exponent: what is read back is the same number."""
    text = format(Decimal(repr(number)), "f")
    return text.removesuffix(".0")

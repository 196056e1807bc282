"""The rule language: syntax tree, canonical text, parser with carets, and the checks of a parsed rule.

leaf path   ->  checkpoint name  [: axes of the leaf -> axes of the tensor]  [where n=8, ...]  [+ 1]  [as bfloat16]

{i}      an integer of the path; in a checkpoint name also {2*s+j}, and the name of an axis of the leaf (stacked leaves)
{x*}     any text                      [q|k|v]  choices that line up, in names and in axes; a dimension that is
(n h)    one dimension, n major                 written [a|b] on a side whose name has no choice is a concatenation
a, b     the same values to two tensors (tied); `b?`: only if the checkpoint has b and nothing else fills it
-> ~     the leaf is not sent          ~ ->     the tensor is not filled
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from jvlab._errors import RuleError

T = TypeVar("T")
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


@dataclass(frozen=True)
class Index:
    """`{i}` or `{2*s+j}`: an integer in a name, affine in captured numbers and indexed axes."""

    terms: tuple[tuple[int, str], ...]
    const: int = 0
    pos: int = field(default=0, compare=False)

    @property
    def computed(self) -> bool:
        """Whether it is more than a plain `{i}`, so that a name cannot be matched against it."""
        return len(self.terms) != 1 or self.terms[0][0] != 1 or self.const != 0

    @property
    def variables(self) -> list[str]:
        return [variable for _, variable in self.terms]


@dataclass(frozen=True)
class Wild:
    """`{x*}`: any text in a name."""

    name: str
    pos: int = field(default=0, compare=False)

    @property
    def variables(self) -> list[str]:
        return [self.name]


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

    def with_part(self, old: Part, new: Part) -> Name:
        """The name with one of its parts replaced, wherever it occurs."""
        parts = tuple(new if part == old else part for part in self.parts)
        return replace(self, parts=parts)


@dataclass(frozen=True)
class Ax:
    """An elementary axis; the name `1` is a dimension of size one, `...` any further dimensions."""

    name: str
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Merged:
    """`(n h)`: several factors on one dimension, the first one major."""

    items: tuple[Dim, ...]
    pos: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Cat:
    """`[n h|k h|k h]`: a concatenation, or a choice where the name of that side has choices too."""

    options: tuple[tuple[Dim, ...], ...]
    pos: int = field(default=0, compare=False)


Part = str | Index | Wild | Pick
Dim = Ax | Merged | Cat
PLAIN: tuple[Dim, ...] = (Ax("..."),)  # a copy: no axes are written


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
    left: tuple[Dim, ...] = PLAIN
    right: tuple[Dim, ...] = PLAIN
    sizes: tuple[Size, ...] = ()
    add: float = 0.0
    cast: str | None = None
    source: str = field(default="", compare=False, repr=False)
    line: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return rule_text(self)

    @property
    def axis_names(self) -> set[str]:
        """The axes of both sides."""
        return {axis.name for axis in walk_axes((*self.left, *self.right))}

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
            for option in _options(part, pick):
                yield from walk_names(option, pick)
        elif not isinstance(part, str):
            yield part


def _options(bracket: Pick | Cat, pick: int | None) -> Sequence[Any]:
    return bracket.options if pick is None else (bracket.options[pick],)


def chosen_parts(parts: Sequence[Part], k: int) -> Iterator[str | Index | Wild]:
    """The parts of a name under choice k."""
    for part in parts:
        if isinstance(part, Pick):
            yield from chosen_parts(part.options[k], k)
        else:
            yield part


def walk_axes(dims: Sequence[Dim], pick: int | None = None) -> Iterator[Ax]:
    """Every axis of a pattern but `1`; with `pick`, of that choice only."""
    for dim in dims:
        if isinstance(dim, Ax):
            if dim.name != "1":
                yield dim
        elif isinstance(dim, Merged):
            yield from walk_axes(dim.items, pick)
        else:
            for option in _options(dim, pick):
                yield from walk_axes(option, pick)


def walk_brackets(items: Sequence[Part] | Sequence[Dim]) -> Iterator[Pick | Cat]:
    """Every `[..|..]` of a name or pattern."""
    for item in items:
        if isinstance(item, Pick | Cat):
            yield item
            for option in item.options:
                yield from walk_brackets(option)
        elif isinstance(item, Merged):
            yield from walk_brackets(item.items)


def changed(dims: Sequence[Dim], change: Callable[[Dim], Dim]) -> tuple[Dim, ...]:
    """The pattern with each axis and bracket as `change` makes it, the inner ones first."""
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Merged):
            dim = Merged(changed(dim.items, change))
        elif isinstance(dim, Cat):
            dim = Cat(tuple(changed(option, change) for option in dim.options))
        out.append(change(dim))
    return tuple(out)


# ---------------------------------------------------------------------------------------------------- text


def name_text(name: Name) -> str:
    """The canonical text of a name."""
    return _parts_text(name.parts) + ("?" if name.optional else "")


def _parts_text(parts: Sequence[Part]) -> str:
    out = []
    for part in parts:
        match part:
            case str():
                plain = _RUN.fullmatch(part) and part != "~"
                escaped = part.replace("\\", "\\\\").replace('"', '\\"')
                out.append(part if plain else f'"{escaped}"')
            case Index():
                terms = [v if c == 1 else f"{c}*{v}" for c, v in part.terms]
                terms += [str(part.const)] if part.const else []
                out.append("{" + "+".join(terms) + "}")
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
            case Merged():
                out.append(f"({dims_text(dim.items)})")
            case Cat():
                out.append("[" + "|".join(dims_text(o) for o in dim.options) + "]")
    return " ".join(out)


def rule_text(rule: Rule) -> str:
    """The canonical text of a rule; parsing it gives the same rule."""
    leaf = name_text(rule.leaf) if rule.leaf else "~"
    text = f"{leaf} -> {', '.join(map(name_text, rule.tensors)) or '~'}"
    if rule.left != PLAIN or rule.right != PLAIN:
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


# The parser of one line -----------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_INTEGER = r"[0-9]{1,18}(?![0-9])"  # it fits 64 bits
_TERM = rf"(?:(?:{_INTEGER}\*)?{_WORD.pattern}|{_INTEGER})"
_TERMS = re.compile(rf"{_TERM}(?:\+{_TERM})*")
_OPERAND = rf"(?:{_INTEGER}|{_WORD.pattern})"
_FACTORS = re.compile(rf"{_OPERAND}(?:\s*[*/]\s*{_OPERAND})*")
_FACTOR = re.compile(r"([*/]?)\s*(\w+)")
# of a name, up to a hole, a choice, a quote or the arrow
_RUN = re.compile(r"(?:(?!->)[A-Za-z0-9_./~\-])+")
_QUOTED = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_TILDE = re.compile(r"~(?=\s|$|->)")

# No model comes near these limits. They bound the time and memory of parsing untrusted text.
MAX_LINE = 4096  # characters; it also bounds choices, names, holes, axes and sizes
MAX_DEPTH = 16  # of brackets
MAX_ADD = 3.4e38  # float32 holds it, and with it bfloat16


class _Scanner:
    """A cursor over one line; every failure points at a column."""

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.line = line
        self.pos = 0
        self.depth = 0

    def fail(self, what: str, remedy: str, pos: int | None = None) -> NoReturn:
        fail(self.text, self.pos if pos is None else pos, what, remedy, self.line)

    def deeper(self, pos: int) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(
                f"brackets more than {MAX_DEPTH} deep",
                "brackets need not be nested: `(a (b c))` is `(a b c)`",
                pos,
            )

    def space(self) -> None:
        while self.pos < len(self.text) and self.text[self.pos].isspace():
            self.pos += 1

    def peek(self, token: str) -> bool:
        return self.text.startswith(token, self.pos)

    def take(self, token: str) -> bool:
        if self.peek(token):
            self.pos += len(token)
            return True
        return False

    def keyword(self, word: str) -> bool:
        match = _WORD.match(self.text, self.pos)
        if match and match[0] == word:
            self.pos = match.end()
            return True
        return False

    def need(self, token: str, remedy: str) -> None:
        if not self.take(token):
            self.fail(f"expected `{token}`{self._found()}", remedy)

    def match(self, pattern: re.Pattern[str], what: str, remedy: str) -> str:
        found = pattern.match(self.text, self.pos)
        if not found:
            self.fail(f"expected {what}{self._found()}", remedy)
        self.pos = found.end()
        return found[0]

    def _found(self) -> str:
        return (
            f", found {self.text[self.pos]!r}"
            if self.pos < len(self.text)
            else ", found the end of the line"
        )

    def several(self, read: Callable[[], T], separator: str) -> tuple[T, ...]:
        """What `read` reads, once or more, with a separator between."""
        out = [read()]
        while self.take(separator):
            out.append(read())
        return tuple(out)

    def options(self, read: Callable[[], T], remedy: str) -> tuple[T, ...]:
        """What stands between brackets."""
        self.deeper(self.pos - 1)
        found = self.several(read, "|")
        self.need("]", remedy)
        self.depth -= 1
        return found

    # names

    def names(self, side: str) -> tuple[Name, ...]:
        def read() -> Name:
            self.space()
            name = self.name(side)
            self.space()
            return name

        return self.several(read, ",")

    def name(self, side: str) -> Name:
        pos = self.pos
        parts = self.parts()
        if not parts:
            self.fail(
                f"expected a {side}{self._found()}",
                'write `leaf.path -> checkpoint.name`; quote odd names with "…"',
            )
        return Name(parts, self.take("?"), pos)

    def parts(self) -> tuple[Part, ...]:
        out: list[Part] = []
        while self.pos < len(self.text):
            pos = self.pos
            if self.take("{"):
                out.append(self.hole(pos))
            elif self.take("["):
                choice = self.options(self.parts, "close the choice: `[q|k|v]`")
                out.append(Pick(choice, pos))
            elif self.take('"'):
                self._add(out, self.quoted(pos))
            elif run := _RUN.match(self.text, self.pos):
                self.pos = run.end()
                self._add(out, run[0])
            else:
                break
        return tuple(out)

    @staticmethod
    def _add(out: list[Part], text: str) -> None:
        if out and isinstance(out[-1], str):
            out[-1] += text
        else:
            out.append(text)

    def quoted(self, start: int) -> str:
        found = _QUOTED.match(self.text, self.pos)
        if found is None:
            self.fail("a quoted name that does not end", 'close it with `"`', start)
        self.pos = found.end()
        return _ESCAPED.sub(r"\1", found[1])

    def hole(self, start: int) -> Index | Wild:
        help_ = (
            "write {i} for a number, {x*} for any text, {2*s+j} for a computed number"
        )
        word = _WORD.match(self.text, self.pos)
        if word and self.text.startswith("*}", word.end()):
            self.pos = word.end() + 2
            return Wild(word[0], start)
        terms: dict[str, int] = {}
        const = 0
        text = self.match(_TERMS, "the name of a capture", help_)
        self.need("}", help_)
        for term in text.split("+"):
            coefficient, _, variable = term.rpartition("*")
            if variable in terms:
                self.fail(f"`{variable}` twice in one hole", help_, start)
            if variable.isdigit():
                const += int(variable)
            else:
                terms[variable] = int(coefficient or 1)
        if not terms:
            self.fail(
                "a hole without a capture",
                "write the number itself, without braces",
                start,
            )
        return Index(tuple((c, v) for v, c in terms.items()), const, start)

    # patterns

    def dims(self, closing: str = "") -> tuple[Dim, ...]:
        out: list[Dim] = []
        while True:
            self.space()
            pos = self.pos
            if self.pos >= len(self.text) or (
                closing and self.text[self.pos] in closing
            ):
                break
            word = _WORD.match(self.text, self.pos)
            if word and not closing and word[0] in ("where", "as"):
                break
            if word:
                self.pos = word.end()
                out.append(Ax(word[0], pos))
            elif self.take("..."):
                if closing:
                    self.fail(
                        "`...` inside a bracket",
                        "`...` stands for whole dimensions",
                        pos,
                    )
                out.append(Ax("...", pos))
            elif self.take("("):
                self.deeper(pos)
                items = self.dims(")")
                self.need(")", "close the merged dimension: `(n h)`")
                self.depth -= 1
                if not items:
                    self.fail(
                        "an empty `()`", "write `1` for a dimension of size one", pos
                    )
                out.append(Merged(items, pos))
            elif self.take("["):
                remedy = "close the concatenation: `[n h|k h|k h]`"
                options = self.options(lambda: self.dims("|]"), remedy)
                if not all(options):
                    remedy = "write `1` for a part of size one"
                    self.fail("an empty part in `[..|..]`", remedy, pos)
                out.append(Cat(options, pos))
            elif number := _NUMBER.match(self.text, self.pos):
                self.pos = number.end()
                if number[0] != "1":
                    self.fail(
                        f"a bare size {number[0][:18]}",
                        "name the axis and add `where name=…`; only `1` may stand alone",
                        pos,
                    )
                out.append(Ax("1", pos))
            elif not closing and (self.peek("->") or self.text[self.pos] in "+-"):
                break
            else:
                self.fail(
                    f"expected an axis{self._found()}",
                    "axes are names, `1`, `(a b)`, `[a|b]` or `...`",
                )
        return tuple(out)

    # the tail

    def size(self) -> Size:
        help_ = "write `where n=8`, `where h=head_dim` (config key), `where g=n/k` or `where h=?` (from the shapes)"
        self.space()
        pos = self.pos
        name = self.match(_WORD, "the name of an axis", help_)
        self.space()
        self.need("=", help_)
        self.space()
        factors: list[tuple[str, str]] = []
        if not self.take("?"):
            what = "an integer, an axis or a config key"
            found = _FACTOR.findall(self.match(_FACTORS, what, help_))
            factors = [(op or "*", _canonical(word)) for op, word in found]
        self.space()
        return Size(name, tuple(factors), pos)

    def tail(self) -> tuple[tuple[Size, ...], float, str | None]:
        sizes: tuple[Size, ...] = ()
        add = 0.0
        cast = None
        self.space()
        if self.keyword("where"):
            sizes = self.several(self.size, ",")
        sign = next((sign for sign in "+-" if self.take(sign)), "")
        if sign:
            self.space()
            pos = self.pos
            help_ = "write `+ 1` or `- 1`"
            add = float(sign + self.match(_NUMBER, "a number to add", help_))
            if abs(add) > MAX_ADD:
                self.fail("more than a float32 holds is added", help_, pos)
            self.space()
        if self.keyword("as"):
            self.space()
            pos = self.pos
            cast = self.match(_WORD, "a dtype", f"one of {', '.join(DTYPES)}")
            if cast not in DTYPES:
                self.fail(f"unknown dtype `{cast}`", f"one of {', '.join(DTYPES)}", pos)
            self.space()
        if self.pos < len(self.text):
            self.fail(
                f"unexpected {self.text[self.pos]!r}",
                "after the axes come, in order: `where n=8`, `+ 1`, `as bfloat16`",
            )
        return sizes, add, cast


def parse_rule(text: str, line: int = 1) -> Rule:
    """Parses and checks one rule line; a RuleError points at the character that is wrong."""
    rule = _parse(text, line)
    _check(rule)
    return rule


def _parse(text: str, line: int) -> Rule:
    text = text.rstrip()
    scan = _Scanner(text, line)
    if len(text) > MAX_LINE:
        scan.fail(
            f"a line of {len(text)} characters",
            f"a rule has at most {MAX_LINE}; write several rules",
            MAX_LINE,
        )
    arrow = "write `leaf.path -> checkpoint.name : axes -> axes`"
    scan.space()
    unused = _tilde(scan)
    leaf = None if unused else scan.name("leaf path")
    if leaf and leaf.optional:
        scan.fail(
            "`?` on a leaf path", "only a checkpoint name may be optional", scan.pos - 1
        )
    scan.space()
    if scan.peek(","):
        scan.fail(
            "two leaf paths",
            "several leaves that fill one tensor are a choice: `attn.[q|k|v].kernel -> …`",
        )
    scan.need("->", arrow)
    scan.space()
    at = scan.pos
    tensors = () if _tilde(scan) else scan.names("checkpoint name")
    if leaf is None and not tensors:
        scan.fail(
            "`~ -> ~` says nothing", "name the leaf or the tensor to leave out", at
        )
    scan.space()
    plain = (Ax("...", scan.pos),)
    left = plain
    right = plain
    if scan.peek(":"):
        if leaf is None or not tensors:
            scan.fail(
                "axes on a rule that moves nothing", "drop everything after the names"
            )
        scan.take(":")
        left = scan.dims()
        scan.need("->", "write the axes of both sides: `: d n h -> (n h) d`")
        right = scan.dims()
        if not left or not right:
            scan.fail(
                "a side without axes",
                "leave out `: … -> …` for a plain copy; write `1` for a size-one dimension",
            )
    at = scan.pos
    sizes, add, cast = scan.tail()
    if (leaf is None or not tensors) and (sizes or add or cast):
        scan.fail(
            "a change on a rule that moves nothing",
            "drop everything after the names",
            at,
        )
    return Rule(leaf, tensors, left, right, sizes, add, cast, text, line)


def _canonical(word: str) -> str:
    """A number without leading zeros; a name as it is."""
    return str(int(word)) if word.isdigit() else word


def _tilde(scan: _Scanner) -> bool:
    if _TILDE.match(scan.text, scan.pos):
        scan.pos += 1
        return True
    return False


# Semantic checks of a parsed rule; each error points at a character.


def arity(rule: Rule) -> int:
    """How many choices the rule's `[..|..]` line up; 1 without any."""
    return next((len(b.options) for b in _brackets(rule)), 1)


def name_has_choice(names: Iterable[Name | None]) -> bool:
    """Does any of these names hold a `[..|..]`?"""
    return any(next(walk_brackets(n.parts), None) for n in names if n)


def _check(rule: Rule) -> None:
    """Raises a RuleError that points at what is wrong with a parsed rule."""
    _check_brackets(rule)
    _check_names(rule)
    _check_leaf_name(rule)
    if rule.leaf is None or not rule.tensors:
        return
    _check_rest(rule)
    _check_sums(rule)
    for k in range(arity(rule)):
        _check_axes(rule, k)
    _check_sizes(rule)


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
            rule.fail(
                "a `[..|..]` inside another",
                bracket.pos,
                "write them side by side, or two rules",
            )
    if not rule.leaf or not rule.tensors or count == 1:
        return
    many = [name_has_choice([t]) for t in rule.tensors]
    if any(many) != all(many):
        odd = rule.tensors[many.index(not many[0])]
        rule.fail(
            "only some of the checkpoint names have choices",
            odd.pos,
            "give all of them, or none, a `[..|..]`",
        )
    left = name_has_choice([rule.leaf]) or any(walk_brackets(rule.left))
    right = any(many) or any(walk_brackets(rule.right))
    first = next(_brackets(rule)).pos
    if not left:
        fix = "split an axis of the leaf, `d [q|k|v] -> …`; for tied tensors separate names with `,`"
        rule.fail("the leaf side has no `[..|..]` to line up with this one", first, fix)
    if not right:
        fix = (
            "concatenate on the tensor's side too, `… -> [q|k|v] d`, or choose its name"
        )
        rule.fail(
            "every choice would fill the same part of the same tensor", first, fix
        )


def _check_names(rule: Rule) -> None:
    """So that matching a name against them takes bounded time."""
    names = [name for name in (rule.leaf, *rule.tensors) if name]
    for name, k in itertools.product(names, range(arity(rule))):
        parts = list(chosen_parts(name.parts, k))
        for one, other in itertools.pairwise(parts):
            if not isinstance(one, str) and not isinstance(other, str):
                fix = "put text between them: where one ends cannot be told"
                rule.fail("two holes side by side", other.pos, fix)
        wild = [part for part in parts if isinstance(part, Wild)]
        if len(wild) > 2:
            rule.fail("more than two `{x*}`", wild[2].pos, "one takes any text")


def _check_leaf_name(rule: Rule) -> None:
    for name in (rule.leaf,) if rule.leaf else rule.tensors:
        if rule.leaf is None and name.optional:
            rule.fail(
                "`?` on an unused tensor",
                name.pos,
                "an unused tensor may be absent anyway: drop the `?`",
            )
        for k in range(arity(rule)):
            seen: set[str] = set()
            for hole in walk_names(name.parts, k):
                if isinstance(hole, Index) and hole.computed:
                    fix = "capture it as {i}; compute on the other side"
                    rule.fail("a computed number in a name to match", hole.pos, fix)
                (var,) = hole.variables
                if var in seen:
                    rule.fail(
                        f"`{var}` is captured twice",
                        hole.pos,
                        "give the second capture another name",
                    )
                seen.add(var)


def _check_rest(rule: Rule) -> None:
    left, right = (
        [d for d in dims if d == Ax("...")] for dims in (rule.left, rule.right)
    )
    for found, other in ((left, right), (right, left)):
        if len(found) > 1:
            rule.fail("`...` twice", found[1].pos, "one `...` a side")
        if found and not other:
            rule.fail(
                "`...` on one side only",
                found[0].pos,
                "write `...` on both sides, or name the axes",
            )


def _check_sums(rule: Rule) -> None:
    """`([a|b] [c|d] …)` is a sum of products: their number doubles with each bracket."""
    for dim in (*rule.left, *rule.right):
        if len(list(walk_brackets([dim]))) > 1:
            rule.fail(
                "two `[..|..]` in one dimension", dim.pos, "one a dimension is enough"
            )


def variables(name: Name, k: int) -> dict[str, Index | Wild]:
    """What a leaf path captures, or a checkpoint name needs, under choice k: variable → hole."""
    return {v: hole for hole in walk_names(name.parts, k) for v in hole.variables}


def _axes_once(rule: Rule, k: int) -> tuple[dict[str, Ax], dict[str, Ax]]:
    sides: tuple[dict[str, Ax], dict[str, Ax]] = ({}, {})
    for side, dims in zip(sides, (rule.left, rule.right), strict=True):
        for axis in walk_axes(dims, k):
            if axis.name in side:
                rule.fail(
                    f"axis `{axis.name}` twice on one side",
                    axis.pos,
                    "give the second one another name",
                )
            side[axis.name] = axis
    return sides


def _check_axes(rule: Rule, k: int) -> None:
    assert rule.leaf is not None
    captured = variables(rule.leaf, k)
    left, right = _axes_once(rule, k)
    needed = [variables(t, k) for t in rule.tensors]
    for need in needed:
        _check_holes(rule, need, captured, left)
    for var, hole in captured.items():
        if var in left:
            rule.fail(
                f"`{var}` is captured from the path and an axis too",
                left[var].pos,
                "rename one of them",
            )
        for need in needed:
            if var not in need and var not in right:
                fix = (
                    f"use {{{var}}} in the checkpoint name, or as an axis of the tensor; "
                    "each leaf needs its own place"
                )
                rule.fail(f"`{var}` is captured and never used", hole.pos, fix)
    for axis in left.values():
        inside = [axis.name in need for need in needed]
        if axis.name in right and any(inside):
            rule.fail(
                f"axis `{axis.name}` is in the checkpoint name and in its shape",
                right[axis.name].pos,
                "drop one",
            )
        if axis.name not in right and not all(inside):
            rule.fail(
                f"axis `{axis.name}` is on the leaf's side only",
                axis.pos,
                "every axis is on both sides",
            )
    for axis in right.values():
        if axis.name not in left and isinstance(captured.get(axis.name), Wild):
            rule.fail(
                f"axis `{axis.name}` is text, not a number",
                axis.pos,
                f"capture it as {{{axis.name}}}",
            )
        if axis.name not in left and axis.name not in captured:
            rule.fail(
                f"axis `{axis.name}` is on the tensor's side only",
                axis.pos,
                "every axis is on both sides",
            )


def _check_holes(
    rule: Rule,
    need: dict[str, Index | Wild],
    captured: dict[str, Index | Wild],
    left: dict[str, Ax],
) -> None:
    for var, hole in need.items():
        if isinstance(hole, Wild) and not isinstance(captured.get(var), Wild):
            rule.fail(
                f"`{var}*` is not captured by the leaf path",
                hole.pos,
                f"capture it there with {{{var}*}}",
            )
        if isinstance(hole, Index) and isinstance(captured.get(var), Wild):
            rule.fail(f"`{var}` is text, not a number", hole.pos, f"write {{{var}*}}")
        if var not in captured and var not in left:
            fix = f"capture it in the leaf path with {{{var}}}, or make `{var}` an axis of the leaf (stacked leaves)"
            rule.fail(f"nothing gives `{var}` a value", hole.pos, fix)


def _check_sizes(rule: Rule) -> None:
    axes = rule.axis_names
    defined: dict[str, set[str]] = {}
    for size in rule.sizes:
        if size.name not in axes:
            rule.fail(
                f"`{size.name}` is not an axis of this rule",
                size.pos,
                f"axes: {', '.join(sorted(axes))}",
            )
        if size.name in defined:
            rule.fail(f"the size of `{size.name}` is given twice", size.pos, "drop one")
        if any(word == "0" for _, word in size.factors):
            rule.fail(
                "a size of zero, or a division by it", size.pos, "give a positive size"
            )
        defined[size.name] = {word for _, word in size.factors if word in axes}
    for size in rule.sizes:
        reach = set()
        todo = [size.name]
        while todo:
            for word in defined.get(todo.pop(), ()):
                if word == size.name:
                    rule.fail(
                        f"the size of `{size.name}` is defined by itself",
                        size.pos,
                        "give one of them a number",
                    )
                if word not in reach:
                    reach.add(word)
                    todo.append(word)

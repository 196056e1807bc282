"""An ordered set of rules: load, save, register, and bind to a model, with one error that lists every problem."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError, CoverageError, RuleError
from jvlab._files import parse_object, read_bounded
from jvlab._units import how_many
from jvlab.layout._boxes import Strided, partition_defects
from jvlab.layout._compose import row_major, tensor_box
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._builtin_texts import POLICY, PRESETS
from jvlab.layout.rules._candidates import fitting, nearest, suggest
from jvlab.layout.rules._rules import (
    Captured,
    Compiled,
    Config,
    Leaves,
    RuleProblem,
    Tensors,
    bind_group,
)
from jvlab.layout.rules._syntax import Ax, Rule, name_text, parse_rule

# Rules of a tree with stacked layers, derived from those of the unstacked tree.
_LAYER = re.compile(r"[._]*\{i\}")


def stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the same tree scanned over layers: `layers.{i}.x` → `layers.x` with the new first axis `i`."""
    out = []
    for rule in rules:
        leaf = name_text(rule.leaf) if rule.leaf else ""
        scanned = _LAYER.sub("", leaf)
        if scanned != leaf:
            left = (Ax("i"), *rule.left)
            rest = str(replace(rule, left=left)).removeprefix(leaf)
            rule = parse_rule(scanned + rest, rule.line)
        out.append(rule)
    return tuple(out)


# ----------------------------------------------------------------------------------------------------

_OFFERED = 3  # lines that fit, in a remedy
_SHOWN = 12  # problems of a kind that an error prints; `fields["problems"]` has all
_FORMAT = 1
_FILE_BYTES = 8 << 20
_RULES = 100_000  # of one set
# a `#` outside quotes; possessive, so linear time
_COMMENT = re.compile(r'^((?:"(?:\\.|[^"\\])*+"|[^"#])*+)#.*$')


@dataclass(frozen=True, init=False)
class Rules:
    """An ordered set of rules. Exactly one rule must match each leaf; `{x*}` rules match what the others do not.

    Made from text with one rule a line, or from a list of lines. A line says where a leaf goes, and what its axes are:

        leaf path  ->  checkpoint name  : axes of the leaf -> axes of the tensor

    {i}       a number in the path, and the same number in the checkpoint name; of a leaf that stacks its layers, an
              axis `i` of the leaf
    n k h g   axes with a meaning: heads, key/value heads, head size, heads to a key/value head, of config.json; add
              `where n=?` to mean something else. Other letters are axes of any size.
    (n h)     one dimension, h running fastest
    [q|k|v]   choices that line up, in names and in axes; where only the axes have them, parts side by side
    a, b      the same values to two tensors; `b?` only if the checkpoint has b
    -> ~      the leaf is not sent;  `~ -> name`: the tensor is not filled
    where     sizes: `where two=2`;  `+ 1`: a number is added;  `as float32`: a cast

    `notes` maps the text of each inferred rule to its reason and confidence; `warnings` to what was assumed without
    evidence.

    >>> rules = jv.Rules("layers.{i}.q -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d")
    >>> len(rules)
    1
    """

    rules: tuple[Rule, ...]
    notes: Mapping[str, tuple[str, float]] = field(default_factory=dict, compare=False)
    warnings: Mapping[str, str] = field(default_factory=dict, compare=False)

    _registry: ClassVar[dict[str, Rules]] = {}
    _built_in: ClassVar[bool] = False  # whether the built-in sets are registered

    def __init__(
        self,
        rules: str | Iterable[Rule | str] = (),
        notes: Mapping[str, tuple[str, float]] | None = None,
        warnings: Mapping[str, str] | None = None,
    ) -> None:
        object.__setattr__(self, "rules", _parsed(rules))
        object.__setattr__(self, "notes", dict(notes or {}))
        object.__setattr__(self, "warnings", dict(warnings or {}))
        self._refuse_twice()

    def _refuse_twice(self) -> None:
        seen: dict[str, Rule] = {}
        for rule in self.rules:
            # the same leaf path written twice would claim every leaf twice, whatever the shapes
            key = (
                re.sub(r"\{\w+(\*?)\}", r"{\1}", name_text(rule.leaf))
                if rule.leaf
                else f"~{rule}"
            )
            if key in seen:
                rule.fail(
                    f"this leaf is claimed twice: line {seen[key].line} has `{seen[key]}`",
                    0,
                    "keep one; one leaf to several tensors is `leaf -> a, b`",
                )
            seen[key] = rule

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __add__(self, other: Rules) -> Rules:
        return Rules(
            self.rules + other.rules,
            {**self.notes, **other.notes},
            {**self.warnings, **other.warnings},
        )

    def __str__(self) -> str:
        return self.to_text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a cell shows: the text. `repr` stays whole, since cached plans are found by it."""
        printer.text(self.to_text().rstrip() or "no rules")

    # ------------------------------------------------------------------------------------------------ text and files

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Parses one rule per line; `#` starts a comment. A RuleError points at the character that is wrong."""
        if not isinstance(text, str):
            raise ConfigError(
                f"rules are text, not {type(text).__name__}",
                remedy="one rule per line; a list of lines: jv.Rules(lines); a file: jv.Rules.load(path)",
            )
        return cls(text)

    def to_text(self) -> str:
        """The canonical text, with the reasons of inferred rules as comments; `parse` returns the same set."""
        lines = []
        for rule in self.rules:
            reason, confidence = self.notes.get(str(rule), ("", 1.0))
            warning = self.warnings.get(str(rule), "")
            lines.append(
                f"{rule}  # {confidence:.2f} {reason}" if reason else str(rule)
            )
            lines[-1] += (
                f"{'; ' if reason else '  # '}warning: {warning}" if warning else ""
            )
        return "\n".join(lines) + "\n" if lines else ""

    @classmethod
    def from_json(cls, text: str) -> Rules:
        """Reads what `to_json` wrote."""
        notes: dict[str, tuple[str, float]] = {}
        warnings: dict[str, str] = {}
        rules = []
        try:
            data = parse_object(text.encode())
            if data["version"] != _FORMAT:
                raise ValueError(f"its version is {data['version']!r}, not {_FORMAT}")
            _bound(len(data["rules"]))
            for number, entry in enumerate(data["rules"], 1):
                rule = parse_rule(entry["rule"], number)
                rules.append(rule)
                confidence = float(entry.get("confidence", 1.0))
                if not 0 <= confidence <= 1:
                    raise ValueError("a confidence is a number from 0 to 1")
                if reason := entry.get("reason"):
                    notes[str(rule)] = (str(reason), confidence)
                if warning := entry.get("warning"):
                    warnings[str(rule)] = str(warning)
        except (ConfigError, RuleError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ConfigError(
                f"this is not a rule set in JSON: {type(e).__name__}: {str(e)[:200]}",
                remedy='expected {"version": 1, "rules": [{"rule": "leaf -> tensor"}, …]}; plain text: Rules.parse',
            ) from e
        return cls(rules, notes, warnings)

    def to_json(self) -> str:
        """The set as JSON, reasons and confidences included."""
        entries = []
        for rule in self.rules:
            entry: dict[str, object] = {"rule": str(rule)}
            if str(rule) in self.notes:
                entry["reason"], entry["confidence"] = self.notes[str(rule)]
            if str(rule) in self.warnings:
                entry["warning"] = self.warnings[str(rule)]
            entries.append(entry)
        return (
            json.dumps(
                {"version": _FORMAT, "rules": entries}, indent=1, ensure_ascii=False
            )
            + "\n"
        )

    @classmethod
    def load(cls, path: str | Path) -> Rules:
        """Reads a rule file: JSON if it is named so, text otherwise."""
        path = Path(path)
        try:
            text = read_bounded(path, _FILE_BYTES, "a rule file").decode()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                f"rule file {path} cannot be read: {e}",
                remedy="give the path of a file from Rules.save",
            ) from e
        return cls.from_json(text) if path.suffix == ".json" else cls.parse(text)

    def save(self, path: str | Path) -> None:
        """Writes a rule file: JSON if it is named so, text otherwise."""
        path = Path(path)
        path.write_text(
            self.to_json() if path.suffix == ".json" else self.to_text(),
            encoding="utf-8",
        )

    # ------------------------------------------------------------------------------------------------ registry

    @classmethod
    def register(cls, name: str, rules: Rules | str) -> Rules:
        """Registers a set for `rules="name"`; a name cannot be reused for another set."""
        rules = cls(rules) if isinstance(rules, str) else rules
        if cls._registry.setdefault(name, rules) != rules:
            raise ConfigError(
                f"rules named {name!r} exist and differ", remedy="choose another name"
            )
        return rules

    @classmethod
    def named(cls, name: str) -> Rules:
        """The set registered under that name, or built in."""
        cls._register_built_in()
        if name not in cls._registry:
            near = difflib.get_close_matches(
                name, ["auto", "policy", *cls._registry], 1
            )
            meant = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(sorted(cls._registry))
            raise ConfigError(
                f"no rules and no rule file named {name[:200]!r}",
                remedy=f"{meant}known: auto, policy, {known}; or write your own: Rules.parse",
            )
        return cls._registry[name]

    @classmethod
    def names(cls) -> list[str]:
        """Every registered name, the built-in ones included."""
        cls._register_built_in()
        return sorted(cls._registry)

    @classmethod
    def _register_built_in(cls) -> None:
        """On first use: `checkpoint`, `hf_flax`, …, `policy.<family>`, `policy.<family>.scanned`."""
        if cls._built_in:
            return
        cls._built_in = True
        for name, text in PRESETS.items():
            cls.register(name, text)
        for family, text in POLICY.items():
            rules = cls.register(f"policy.{family}", text)
            cls.register(f"policy.{family}.scanned", Rules(stacked(rules)))

    # ------------------------------------------------------------------------------------------------ binding

    def check(
        self, leaves: Leaves, tensors: Sequence[CheckpointTensor], config: Config = None
    ) -> tuple[list[str], list[str]]:
        """The leaves and tensors that these rules do not take.

        Raises a CoverageError if one of these rules has no effect or does not fit.
        """
        by_name = {t.name: t for t in tensors}
        if not self.rules:
            return list(leaves), list(by_name)
        bindings, problems = self.attempt(leaves, tensors, config)
        touched = {b.tensor for b in bindings}
        own = self._without_effect(leaves, by_name)
        open_leaves = []
        open_tensors = []
        for problem in problems:
            if problem.kind == "leaf":
                open_leaves.append(problem.leaf)
            elif problem.kind == "gap" and problem.tensor not in touched:
                open_tensors.append(problem.tensor)
            else:  # also the rest of a tensor that these rules fill in part
                own.append(problem)
        if own:
            raise _error(own, leaves, by_name, config)
        return open_leaves, open_tensors

    def _without_effect(self, leaves: Leaves, tensors: Tensors) -> list[RuleProblem]:
        """Rules that match no leaf, or declare a tensor unused that is not there."""
        kept = self.effective(leaves, tensors)
        wrong = [r for r in self.rules if r not in kept.rules]
        mine = [Compiled(r) for r in kept if r.leaf]
        free = {path for path, found in _matches(mine, leaves) if not found}
        out = []
        for rule in wrong:
            if rule.leaf:
                what = "no leaf has this name"
                near = nearest(name_text(rule.leaf), leaves, free)
            else:
                what = "the checkpoint has no such tensor"
                near = nearest(name_text(rule.tensors[0]), tensors, tensors)
            what += f"; the nearest is {near}" if near else ""
            out.append(RuleProblem("rule", f"`{rule}`: {what}"))
        return out

    def effective(self, leaves: Iterable[str], tensors: Iterable[str]) -> Rules:
        """Without the rules that match nothing here: a set for many models has some for others."""
        sides = (
            ([r for r in self.rules if r.leaf], leaves),
            ([r for r in self.rules if not r.leaf], tensors),
        )
        used: set[Rule] = set()
        for mine, names in sides:
            for _, found in _matches(list(map(Compiled, mine)), names):
                used |= {mine[r] for r, _ in found}
        kept = (r for r in self.rules if r in used)
        return Rules(kept, self.notes, self.warnings)

    def bind(
        self,
        leaves: Leaves,
        tensors: Sequence[CheckpointTensor],
        config: Config = None,
        *,
        all_of_them: bool = False,
    ) -> list[Binding]:
        """Applies the rules to a model: the index maps between leaves and checkpoint tensors, or one CoverageError.

        Every leaf must be taken and every element of every tensor filled exactly once, unless a rule says otherwise
        (`leaf -> ~`, `~ -> tensor`); with `all_of_them`, every rule must match something.
        """
        by_name = {t.name: t for t in tensors}
        bindings, problems = self.attempt(leaves, tensors, config)
        if all_of_them:
            problems = [*self._without_effect(leaves, by_name), *problems]
        if problems:
            raise _error(problems, leaves, by_name, config)
        return bindings

    def attempt(
        self,
        leaves: Leaves,
        tensors: Sequence[CheckpointTensor],
        config: Config = None,
    ) -> tuple[list[Binding], list[RuleProblem]]:
        """As `bind`, but returns the problems beside the bindings: for a rule that is being edited."""
        by_name = {t.name: t for t in tensors}
        compiled = []
        for rule in self.rules:
            note = self.notes.get(str(rule), ("declared by a rule", 1.0))
            warning = self.warnings.get(str(rule), "")
            compiled.append(Compiled(rule, *note, warning))
        from_leaves = [c for c in compiled if c.rule.leaf]
        unused = [c for c in compiled if not c.rule.leaf]
        groups, problems = _assign(from_leaves, leaves)
        bindings: list[Binding] = []
        optional: list[Binding] = []
        for (r, _), (values, group) in groups.items():
            made, wrong = bind_group(
                from_leaves[r], values, group, leaves, by_name, config
            )
            problems += wrong
            for binding, is_optional in made:
                (optional if is_optional else bindings).append(binding)
        filled = {b.tensor for b in bindings}
        bindings += [b for b in optional if b.tensor not in filled]
        problems += _coverage(bindings, tensors, unused, {p.tensor for p in problems})
        return bindings, problems


def _parsed(rules: Any) -> tuple[Rule, ...]:
    """Rules, or their text, or a list of lines: each line with its number, for errors."""
    if isinstance(rules, str):
        rules = rules.split("\n")
    elif not isinstance(rules, Iterable) or isinstance(rules, (Mapping, bytes)):
        raise ConfigError(
            f"rules are text, not {type(rules).__name__}",
            remedy="one rule per line, or a list of lines; help(jv.Rules)",
        )
    listed: list[Rule | str] = []
    for given in rules:
        if not isinstance(given, (Rule, str)):
            raise ConfigError(
                f"a rule is text, not {type(given).__name__}",
                remedy="leaf -> tensor; help(jv.Rules)",
            )
        listed += given.split("\n") if isinstance(given, str) else [given]
    numbered: list[tuple[int, Rule | str]] = []
    for number, line in enumerate(listed, 1):
        bare = _COMMENT.sub(r"\1", line) if isinstance(line, str) else line
        if not isinstance(bare, str) or bare.strip():
            numbered.append((number, bare))
    _bound(len(numbered))
    return tuple(
        parse_rule(line, number) if isinstance(line, str) else line
        for number, line in numbered
    )


def _bound(count: int) -> None:
    if count > _RULES:
        raise ConfigError(
            f"more than {_RULES:,} rules",
            remedy="one rule takes all layers: write {i} for a number",
        )


def _matches(
    compiled: Sequence[Compiled], names: Iterable[str]
) -> Iterator[tuple[str, list[tuple[int, tuple[int, Captured]]]]]:
    """Each name with the rules that match it: index, choice and captured values."""
    # rules to try, by the name with all its numbers zeroed: few for many layers
    likely: dict[str, list[int]] = {}
    for name in names:
        skeleton = re.sub(r"\d+", "0", name)
        if skeleton not in likely:
            likely[skeleton] = [
                r for r, c in enumerate(compiled) if c.could_match(skeleton)
            ]
        yield name, [(r, m) for r in likely[skeleton] if (m := compiled[r].match(name))]


Groups = dict[tuple[int, object], tuple[Captured, dict[int, str]]]


def _assign(
    compiled: Sequence[Compiled], leaves: Leaves
) -> tuple[Groups, list[RuleProblem]]:
    """Which rule matches which leaf: (rule, captured values) → (values, leaf of each choice)."""
    groups: Groups = {}
    problems: list[RuleProblem] = []
    for path, found in _matches(compiled, leaves):
        exact = [(r, m) for r, m in found if not compiled[r].wild]
        if len(exact) > 1:
            lines = "; ".join(compiled[r].text for r, _ in exact)
            what = f"leaf {path} is claimed by {len(exact)} rules: {lines}"
            problems.append(RuleProblem("overlap", what, path))
        if not found:
            what = f"leaf {path} {tuple(leaves[path].shape)}: no rule takes it"
            problems.append(RuleProblem("leaf", what, path))
            continue
        r, (k, values) = (exact or found)[0]
        if compiled[r].rule.tensors:
            key = (r, tuple(sorted(values.items())))
            _, group = groups.setdefault(key, (values, {}))
            group[k] = path
    return groups, problems


def _coverage(
    bindings: Sequence[Binding],
    tensors: Sequence[CheckpointTensor],
    unused: Sequence[Compiled],
    known: set[str],
) -> list[RuleProblem]:
    """Tensors with elements that nothing fills, or that two bindings fill."""
    by_tensor: dict[str, list[Binding]] = defaultdict(list)
    for binding in bindings:
        by_tensor[binding.tensor].append(binding)
    out = []
    for tensor in tensors:
        parts = by_tensor.get(tensor.name, [])
        declared = not parts and any(c.match(tensor.name) for c in unused)
        if declared or tensor.name in known:
            continue
        shape = tuple(tensor.shape)
        size = math.prod(shape)
        kind = "gap"
        if not parts:
            what = ": no leaf fills it"
        # a rule is one-to-one, so one binding of the full size fills it
        elif len(parts) == 1 and math.prod(a.size for a in parts[0].axes) == size:
            continue
        else:
            missing, extra = _partition(parts, shape)
            if not missing and not extra:
                continue
            who = ", ".join(b.leaf for b in parts[:4])
            what = f": {size - missing} of {size} elements filled, by {who}"
            if extra:
                kind = "overlap"
                who = ", ".join(f"{b.leaf} by `{b.rule}`" for b in parts[:4])
                what = f" is filled twice: {who}"
        whole = f"tensor {tensor.name} {shape}{what}"
        out.append(RuleProblem(kind, whole, tensor=tensor.name))
    return out


def _partition(parts: Sequence[Binding], shape: tuple[int, ...]) -> tuple[int, int]:
    """How many elements of a tensor no binding fills, and how many several do."""
    boxes = [tensor_box(shape, b.tensor_start, b.axes) for b in parts]
    width = max((len(box.sizes) for box in boxes), default=0)
    pad = lambda row, fill: (*row, *[fill] * (width - len(row)))
    missing, extra, _ = partition_defects(
        Strided(0, shape, row_major(shape)),
        np.array([box.offset for box in boxes], np.int64),
        np.array([pad(box.sizes, 1) for box in boxes], np.int64),
        np.array([pad(box.strides, 0) for box in boxes], np.int64),
    )
    return missing, extra


_KINDS = {  # one of a kind, and several
    "rule": ("rule that matches nothing", "rules that match nothing"),
    "leaf": ("leaf that no rule takes", "leaves that no rule takes"),
    "tensor": (
        "leaf whose tensor is not in the checkpoint",
        "leaves whose tensor is not in the checkpoint",
    ),
    "shape": ("shape that does not fit", "shapes that do not fit"),
    "size": ("axis size that is not known", "axis sizes that are not known"),
    "overlap": ("part claimed twice", "parts claimed twice"),
    "gap": (
        "checkpoint tensor that is not (wholly) filled",
        "checkpoint tensors that are not (wholly) filled",
    ),
}


def _error(
    problems: Sequence[RuleProblem],
    leaves: Leaves,
    tensors: Tensors,
    config: Config,
) -> CoverageError:
    lines = [f"the rules do not bind this model: {how_many(len(problems), 'problem')}"]
    for kind, title in _KINDS.items():
        mine = [p for p in problems if p.kind == kind]
        if not mine:
            continue
        lines.append(f"  {how_many(len(mine), *title)}")
        # a rule is wrong in every layer: one of them tells
        alike = Counter(p.rule for p in mine)
        first: dict[str, RuleProblem] = {}
        for p in mine:
            first.setdefault(p.rule or p.what, p)
        shown = list(first.values())
        for p in shown[:_SHOWN]:
            lines.append(f"    {p.what}")
            more = f", {alike[p.rule] - 1} more alike" if alike[p.rule] > 1 else ""
            lines += [f"      rule: {p.rule}{more}"] if p.rule else []
        if len(shown) > _SHOWN:
            lines.append(
                f"    … and {len(shown) - _SHOWN} more (error.fields['problems'])"
            )
    return CoverageError(
        "\n".join(lines),
        remedy=_remedy(problems, leaves, tensors, config),
        problems=list(problems),
    )


def _remedy(
    problems: Sequence[RuleProblem],
    leaves: Leaves,
    tensors: Tensors,
    config: Config,
) -> str:
    first: dict[str, RuleProblem] = {}
    for p in problems:
        first.setdefault(p.kind, p)
    steps = []
    if "rule" in first:
        steps.append(
            "correct the name of a rule that matches nothing, or drop the rule"
        )
    if "leaf" in first:
        unmatched = list(dict.fromkeys(p.leaf for p in problems if p.kind == "leaf"))
        empty = {p.tensor for p in problems if p.kind == "gap"}
        line = suggest(unmatched, leaves, empty, tensors, config)
        example = f"`{line}`" if line else f"`{unmatched[0]} -> …`"
        steps.append(
            f"add a rule such as {example}, or `{unmatched[0]} -> ~` to leave the leaf out"
        )
    if "tensor" in first:
        near = nearest(first["tensor"].tensor, tensors, tensors)
        steps.append(
            f"correct the checkpoint name{f' (the nearest is {near})' if near else ''}, mark a tied copy optional "
            "(`name?`), or leave it out (`leaf -> ~`)"
        )
    if "shape" in first:
        wrong = next((p for p in problems if p.kind == "shape" and p.tensor), None)
        fits = []
        if wrong:
            fits = fitting(wrong.leaf, wrong.tensor, leaves, tensors, config)
        if fits:
            offered = " or ".join(f"`{line}`" for line in fits[:_OFFERED])
            steps.append(f"correct the rule's axes; what fits is {offered}")
        else:
            steps.append("correct the rule's axes, or its tensor")
    if "size" in first:
        steps.append("add `where n=…`, or pass the model's config")
    if "overlap" in first:
        steps.append("keep one rule for each part")
    if "gap" in first:
        name = first["gap"].tensor
        steps.append(f"fill the tensor by a rule, or declare it unused: `~ -> {name}`")
    return "; ".join(steps)

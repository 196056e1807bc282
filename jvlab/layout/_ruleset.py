"""An ordered set of rules: load, save, name, and bind a whole model, with one error for everything that is wrong."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError, CoverageError
from jvlab.layout._apply import mark_binding
from jvlab.layout._rules import Compiled, HasShape, Problem, bind_group, parse_rule
from jvlab.layout._syntax import Rule, name_text
from jvlab.layout._types import Binding, CheckpointTensor

_SHOWN = 12  # problems of a kind that an error prints; `fields["problems"]` has all
_FORMAT = 1
_COMMENT = re.compile(r'^((?:"(?:\\.|[^"\\])*"|[^"#])*)#.*$')  # a `#` outside quotes


@dataclass(frozen=True)
class Rules:
    """An ordered set of rules. A leaf is taken by the one rule that matches it; `{x*}` rules take what is left.

    `notes` has, for rules that were inferred, the reason in words and the confidence, under the rule's canonical text.

    >>> rules = jv.Rules.parse("layers.{i}.q -> model.layers.{i}.self_attn.q_proj.weight : d n h -> (n h) d")
    >>> len(rules)
    1
    """

    rules: tuple[Rule, ...]
    notes: Mapping[str, tuple[str, float]] = field(default_factory=dict, compare=False)

    _registry: ClassVar[dict[str, Rules]] = {}

    def __post_init__(self) -> None:
        seen: dict[str, Rule] = {}
        for rule in self.rules:
            # the same leaf path written twice would claim every leaf twice, whatever the shapes
            key = re.sub(r"\{\w+(\*?)\}", r"{\1}", name_text(rule.leaf)) if rule.leaf else f"~{rule}"
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
        return Rules(self.rules + other.rules, {**self.notes, **other.notes})

    def __str__(self) -> str:
        return self.to_text()

    # ------------------------------------------------------------------------------------------------ text and files

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Parses one rule a line; `#` starts a comment. A RuleError points at the character that is wrong."""
        rules = []
        for number, line in enumerate(text.split("\n"), 1):
            bare = _COMMENT.sub(r"\1", line)
            if bare.strip():
                rules.append(parse_rule(bare, number))
        return cls(tuple(rules))

    def to_text(self) -> str:
        """The canonical text, with the reasons of inferred rules as comments; `parse` gives the same set back."""
        lines = []
        for rule in self.rules:
            reason, confidence = self.notes.get(str(rule), ("", 1.0))
            lines.append(f"{rule}  # {confidence:.2f} {reason}" if reason else str(rule))
        return "\n".join(lines) + "\n" if lines else ""

    @classmethod
    def from_json(cls, text: str) -> Rules:
        """Reads what `to_json` wrote."""
        try:
            data = json.loads(text)
            entries = [(e["rule"], str(e.get("reason", "")), float(e.get("confidence", 1.0))) for e in data["rules"]]
            if data["version"] != _FORMAT:
                raise ConfigError(f"rules of format {data['version']!r}", remedy=f"this jvlab reads format {_FORMAT}")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(
                f"this is no rule set in JSON: {type(e).__name__}: {e}",
                remedy='expected {"version": 1, "rules": [{"rule": "leaf -> tensor"}, …]}; plain text: Rules.parse',
            ) from e
        rules = tuple(parse_rule(rule, number) for number, (rule, _, _) in enumerate(entries, 1))
        notes = {str(r): (why, c) for r, (_, why, c) in zip(rules, entries, strict=True) if why}
        return cls(rules, notes)

    def to_json(self) -> str:
        """The set as JSON, reasons and confidences included."""
        entries = []
        for rule in self.rules:
            entry: dict[str, object] = {"rule": str(rule)}
            if str(rule) in self.notes:
                entry["reason"], entry["confidence"] = self.notes[str(rule)]
            entries.append(entry)
        return json.dumps({"version": _FORMAT, "rules": entries}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Rules:
        """Reads a rule file: JSON if it is named so, text otherwise."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as e:
            raise ConfigError(
                f"rule file {path} cannot be read: {e}", remedy="give the path of a file from Rules.save"
            ) from e
        return cls.from_json(text) if path.suffix == ".json" else cls.parse(text)

    def save(self, path: str | Path) -> None:
        """Writes a rule file: JSON if it is named so, text otherwise."""
        path = Path(path)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_text(), encoding="utf-8")

    # ------------------------------------------------------------------------------------------------ registry

    @classmethod
    def register(cls, name: str, rules: Rules | str) -> Rules:
        """Gives a set a name that `rules="name"` finds; a name is given once."""
        rules = cls.parse(rules) if isinstance(rules, str) else rules
        if cls._registry.setdefault(name, rules) != rules:
            raise ConfigError(f"rules named {name!r} exist and differ", remedy="choose another name")
        return rules

    @classmethod
    def named(cls, name: str) -> Rules:
        """The set registered under that name, or built in."""
        from jvlab.layout import _builtin  # registers the built-in sets on first use

        _builtin.register_all()
        if name not in cls._registry:
            near = difflib.get_close_matches(name, cls._registry, 3) or sorted(cls._registry)
            raise ConfigError(
                f"no rules named {name!r}", remedy=f"known: {', '.join(near)}; or write your own: Rules.parse"
            )
        return cls._registry[name]

    @classmethod
    def names(cls) -> list[str]:
        """Every registered name, the built-in ones included."""
        from jvlab.layout import _builtin

        _builtin.register_all()
        return sorted(cls._registry)

    # ------------------------------------------------------------------------------------------------ binding

    def bind(
        self,
        leaves: Mapping[str, HasShape],
        tensors: Sequence[CheckpointTensor],
        config: Mapping[str, Any] | None = None,
    ) -> list[Binding]:
        """Applies the rules to a model: the index maps between leaves and checkpoint tensors, or one CoverageError.

        Every leaf must be taken and every element of every tensor filled exactly once, unless a rule says otherwise
        (`leaf -> ~`, `~ -> tensor`).
        """
        bindings, problems = self.attempt(leaves, tensors, config)
        if problems:
            raise _error(problems, leaves, {t.name: t for t in tensors})
        return bindings

    def attempt(
        self,
        leaves: Mapping[str, HasShape],
        tensors: Sequence[CheckpointTensor],
        config: Mapping[str, Any] | None = None,
    ) -> tuple[list[Binding], list[Problem]]:
        """As `bind`, but what does not fit comes back beside what does: a rule that is being written shows both."""
        by_name = {t.name: t for t in tensors}
        compiled = [Compiled(r, *self.notes.get(str(r), ("declared by a rule", 1.0))) for r in self.rules]
        groups, problems = assign(compiled, leaves)
        bindings: list[Binding] = []
        optional: list[Binding] = []
        for (r, _), (values, group) in groups.items():
            made, wrong = bind_group(compiled[r], values, group, leaves, by_name, config)
            problems += wrong
            for binding, is_optional in made:
                (optional if is_optional else bindings).append(binding)
        filled = {b.tensor for b in bindings}
        bindings += [b for b in optional if b.tensor not in filled]
        unused = [c for c in compiled if c.rule.leaf is None]
        problems += _coverage(bindings, tensors, unused, {p.tensor for p in problems})
        return bindings, problems


Groups = dict[tuple[int, object], tuple[dict[str, int | str], dict[int, str]]]


def assign(compiled: Sequence[Compiled], leaves: Mapping[str, HasShape]) -> tuple[Groups, list[Problem]]:
    """Which rule takes which leaf: (rule, captured values) → (values, leaf of each choice)."""
    groups: Groups = {}
    problems: list[Problem] = []
    likely: dict[str, list[int]] = {}  # rules worth trying, by the path with all its numbers zeroed
    takers = [r for r, c in enumerate(compiled) if c.rule.leaf]
    for path in leaves:
        skeleton = re.sub(r"\d+", "0", path)
        if skeleton not in likely:
            likely[skeleton] = [r for r in takers if compiled[r].could_match(skeleton)]
        found = [(r, m) for r in likely[skeleton] if (m := compiled[r].match(path))]
        exact = [(r, m) for r, m in found if not compiled[r].wild]
        if len(exact) > 1:
            lines = "; ".join(compiled[r].text for r, _ in exact)
            problems.append(Problem("overlap", f"leaf {path} is claimed by {len(exact)} rules: {lines}", path))
        if not found:
            problems.append(Problem("leaf", f"leaf {path} {tuple(leaves[path].shape)}: no rule takes it", path))
            continue
        r, (k, values) = (exact or found)[0]
        if compiled[r].rule.tensors:
            groups.setdefault((r, tuple(sorted(values.items()))), (values, {}))[1][k] = path
    return groups, problems


def _elements(binding: Binding) -> int:
    return math.prod(a.size for a in binding.axes)


def _coverage(
    bindings: Sequence[Binding], tensors: Sequence[CheckpointTensor], unused: Sequence[Compiled], known: set[str]
) -> list[Problem]:
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
        size = math.prod(tensor.shape)
        total = sum(map(_elements, parts))
        shape = tuple(tensor.shape)
        if not parts:
            out.append(Problem("gap", f"tensor {tensor.name} {shape}: no leaf fills it", "", tensor.name))
        elif len(parts) == 1 and total == size:
            continue  # a rule is one-to-one, so one binding of the full size fills it
        elif total > size or _collide(parts, shape):
            who = ", ".join(f"{b.leaf} by `{b.rule}`" for b in parts[:4])
            out.append(Problem("overlap", f"tensor {tensor.name} {shape} is filled twice: {who}", "", tensor.name))
        elif total < size:
            who = ", ".join(b.leaf for b in parts[:4])
            what = f"tensor {tensor.name} {shape}: {total} of {size} elements filled, by {who}"
            out.append(Problem("gap", what, "", tensor.name))
    return out


def _collide(parts: Sequence[Binding], shape: tuple[int, ...]) -> bool:
    """Do any two bindings fill the same element? Boxes first; marking each element only where boxes meet."""
    if len({b.rule for b in parts}) == 1 and len({(b.tensor_start) for b in parts}) == len(parts):
        return False  # the parts of one rule start apart and are disjoint by its construction
    boxes = []
    for b in parts:
        stop = list(b.tensor_start)
        for a in b.axes:
            stop[a.tensor_dim] += (a.size - 1) * a.tensor_step
        boxes.append((np.array(b.tensor_start), np.array(stop)))
    meet = any(
        bool(np.all(a0 <= b1) and np.all(b0 <= a1)) for j, (a0, a1) in enumerate(boxes) for b0, b1 in boxes[j + 1 :]
    )
    if not meet:
        return False
    count = np.zeros(shape, np.uint8)
    return any(mark_binding(b, count) for b in parts)


_KINDS = {
    "leaf": "leaves that no rule takes",
    "tensor": "leaves whose tensor is not in the checkpoint",
    "shape": "shapes that do not fit",
    "size": "axis sizes that are not known",
    "overlap": "parts claimed twice",
    "gap": "checkpoint tensors that are not (wholly) filled",
}


def _error(
    problems: Sequence[Problem], leaves: Mapping[str, HasShape], tensors: Mapping[str, CheckpointTensor]
) -> CoverageError:
    counts = Counter(p.kind for p in problems)
    lines = [f"the rules do not bind this model: {len(problems)} problems"]
    for kind, title in _KINDS.items():
        mine = [p for p in problems if p.kind == kind]
        if not mine:
            continue
        lines.append(f"  {counts[kind]} {title}")
        for p in mine[:_SHOWN]:
            lines.append(f"    {p.what}" + (f"\n      rule: {p.rule}" if p.rule else ""))
        if len(mine) > _SHOWN:
            lines.append(f"    … and {len(mine) - _SHOWN} more (error.fields['problems'])")
    return CoverageError("\n".join(lines), remedy=_remedy(problems, leaves, tensors), problems=list(problems))


def _remedy(
    problems: Sequence[Problem], leaves: Mapping[str, HasShape], tensors: Mapping[str, CheckpointTensor]
) -> str:
    kinds = {p.kind for p in problems}
    steps = []
    if "leaf" in kinds:
        path = next(p.leaf for p in problems if p.kind == "leaf")
        size = math.prod(leaves[path].shape)
        same = [n for n, t in tensors.items() if math.prod(t.shape) == size]
        near = difflib.get_close_matches(path, same, 1, 0.0)
        steps.append(
            f"add a rule such as `{path} -> {near[0] if near else '…'}`, or `{path} -> ~` to leave the leaf out"
        )
    if "tensor" in kinds:
        steps.append("correct the checkpoint name, mark a tied copy optional (`name?`), or leave it out (`leaf -> ~`)")
    if "shape" in kinds:
        steps.append("correct the rule's axes; a transposed kernel is `a b -> b a`")
    if "size" in kinds:
        steps.append("add `where n=…`, or pass the model's config")
    if "overlap" in kinds:
        steps.append("keep one rule for each part")
    if "gap" in kinds:
        name = next((p.tensor for p in problems if p.kind == "gap"), "")
        steps.append(f"fill the tensor by a rule, or declare it unused: `~ -> {name}`")
    return "; ".join(steps)

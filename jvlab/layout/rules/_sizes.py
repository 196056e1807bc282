"""Axis sizes of a rule, solved from `where`, then from shapes, then from the config by convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvlab.layout.rules._syntax import Ax, Cat, Dim, Group, Rule

_LARGEST = 2**62  # elements; arrays count in 64 bits


class Unfit(Exception):
    """Internal: this rule does not fit these shapes; caught and reported as a RuleProblem."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind = kind
        self.what = what
        super().__init__(what)


def convention(config: Mapping[str, Any] | None) -> dict[str, int]:
    """The axes with a conventional meaning: n heads, k key/value heads, h head size, g = n/k; from a HF config."""
    config = config_lookup(config)
    n = config.get("num_attention_heads", config.get("n_head"))
    if not n:
        return {}
    hidden = config.get("hidden_size", config.get("n_embd"))
    out = {"n": int(n), "k": int(config.get("num_key_value_heads") or n)}
    head = config.get("head_dim") or (hidden // n if hidden else None)
    if head:
        out["h"] = int(head)
    if out["n"] % out["k"] == 0:
        out["g"] = out["n"] // out["k"]
    return out


def config_lookup(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A flat view of a config: `text_config` of multimodal models under the top level's own keys."""
    if config is None:
        return {}
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else dict(config)


def _config_size(axis: str, word: str, config: Mapping[str, Any]) -> int:
    """The size given by a config key."""
    value = config.get(word)
    if value is None:
        raise Unfit("size", f"`where {axis}={word}…`: the config has no `{word}`")
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != value
        or value != int(value)
    ):
        raise Unfit(
            "size",
            f"`where {axis}={word}…`: `{word}` of the config is not a whole number",
        )
    return int(value)


def terms_of(dim: Dim) -> list[tuple[str, ...]]:
    """A dimension's size as a sum of products of axes."""
    if isinstance(dim, Ax):
        return [() if dim.name == "1" else (dim.name,)]
    if isinstance(dim, Group):
        return product_terms(dim.items)
    return [m for option in dim.options for m in product_terms(option)]


def product_terms(items: Sequence[Dim]) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = [()]
    for item in items:
        out = [a + b for a in out for b in terms_of(item)]
    return out


def resolve(dims: Sequence[Dim], k: int) -> tuple[Dim, ...]:
    """The pattern of choice k alone: every `[..|..]` replaced by its k-th part."""
    out: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Cat):
            out.append(Group(dim.options[k]))
        elif isinstance(dim, Group):
            out.append(Group(resolve(dim.items, k)))
        else:
            out.append(dim)
    return tuple(out)


@dataclass
class Solver:
    """Finds axis sizes: from `where`, from dimensions with one unknown, then from the config by convention."""

    rule: Rule
    config: Mapping[str, Any] | None
    sizes: dict[str, int] = field(default_factory=dict)

    def solve(self, equations: Sequence[tuple[Dim, int, str]]) -> dict[str, int]:
        terms = [(terms_of(dim), total, where) for dim, total, where in equations]
        names = {a for m, _, _ in terms for mono in m for a in mono}
        usual = {a: s for a, s in convention(self.config).items() if a in names}
        for size in self.rule.sizes:
            usual.pop(size.name, None)
        while True:
            while self._where(names) or any(self._one_unknown(t) for t in terms):
                pass
            free = next((a for a in sorted(usual) if a not in self.sizes), None)
            if free is None:
                break
            self.sizes[free] = usual[free]
        unknown = sorted(names - set(self.sizes))
        if unknown:
            one = unknown[0]
            raise Unfit(
                "size",
                f"the size of axis {', '.join(f'`{a}`' for a in unknown)} is open: add `where {one}=…`",
            )
        for monomials, total, where in terms:
            got = sum(self._value(m) for m in monomials)
            if got > _LARGEST:
                raise Unfit(
                    "shape",
                    f"{where} is {total}, the rule says more than any array has",
                )
            if got != total:
                given = ", ".join(
                    f"{a}={self.sizes[a]}"
                    for a in sorted({a for m in monomials for a in m})
                )
                raise Unfit(
                    "shape",
                    f"{where} is {total}, the rule says {got} ({given or 'a size-one dimension'})",
                )
        for axis, size in usual.items():
            if self.sizes[axis] != size:
                raise Unfit(
                    "shape",
                    f"the shapes make axis `{axis}` {self.sizes[axis]}, the config says {size}: "
                    f"the axes are in another order, or `{axis}` means something else (then add `where {axis}=?`)",
                )
        return self.sizes

    def _value(self, monomial: tuple[str, ...]) -> int:
        out = 1
        for axis in monomial:
            out *= self.sizes[axis]
        return out

    def _where(self, names: set[str]) -> bool:
        config = config_lookup(self.config)
        found = False
        for size in self.rule.sizes:
            if size.name in self.sizes or not size.factors:
                continue
            value = 1
            ready = True
            for op, word in size.factors:
                if word not in names and not word.isdigit():
                    operand = _config_size(size.name, word, config)
                else:
                    operand = int(word) if word.isdigit() else self.sizes.get(word)
                if operand is None:
                    ready = False
                    break
                value = (
                    value * operand
                    if op == "*"
                    else self._divide(size.name, value, operand)
                )
                if value > _LARGEST:
                    raise Unfit(
                        "size", f"the size of `{size.name}` is more than any array has"
                    )
            if ready:
                self.sizes[size.name] = value
                found = True
        return found

    @staticmethod
    def _divide(name: str, value: int, by: int) -> int:
        if by == 0 or value % by:
            raise Unfit("size", f"the size of `{name}` is {value}/{by}, not an integer")
        return value // by

    def _one_unknown(self, term: tuple[list[tuple[str, ...]], int, str]) -> bool:
        monomials, total, where = term
        unknown = {a for m in monomials for a in m if a not in self.sizes}
        if len(unknown) != 1:
            return False
        axis = unknown.pop()
        factor = 0
        rest = 0
        for m in monomials:
            value = self._value(tuple(a for a in m if a != axis))
            factor, rest = (
                (factor + value, rest) if axis in m else (factor, rest + value)
            )
        size, remainder = divmod(total - rest, factor) if factor else (0, 1)
        if remainder or size < 1:
            raise Unfit(
                "shape", f"{where} is {total}: no size of axis `{axis}` makes that"
            )
        self.sizes[axis] = size
        return True

"""rules="auto": infers rules from names, shapes and siblings, with a reason for each; ambiguity is an error.

    names → templates → roles → pairs (leaf, tensor) → candidate lines that fit the shapes → evidence → one line

Evidence, strongest first: the shapes fit one line only; values follow a checkpoint's; siblings of the same naming
convention have the same order; the name's own convention (`kernel` is in × out, `weight` out × in). Else: MatchError.
What is assumed without evidence becomes a warning (`Rules.warnings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab._errors import CoverageError, MatchError
from jvlab._units import how_many
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._candidates import (
    TABLES,
    Candidate,
    Offer,
    Pair,
    Pairing,
    candidates,
    is_conv1d,
    legend,
    lines_for_leaf,
    lines_for_parts,
    pair_up,
    roles_among,
    shown,
)
from jvlab.layout.rules._roles import Role, Template
from jvlab.layout.rules._rules import (
    Compiled,
    Config,
    Leaves,
    Tensors,
    bind_group,
    config_lookup,
    values_of,
)
from jvlab.layout.rules._ruleset import Rules

# Values as evidence: which candidate rule makes a leaf's values equal to the checkpoint's.
# Only values that vary together are evidence. Errors are relative to the standard deviation of the checkpoint's values,
# so that zeros under `+ 1`, or any values near 1, do not pass for a matching norm: a constant has no deviation, and
# unrelated values have an error of 1 or more.

_CLOSE = 0.5  # error that a right candidate stays below, even after training
_APART = 4.0  # how many times worse every other candidate must be
# and their least error: candidates that all fit (a symmetric matrix) are inconclusive
_FLOOR = 0.02
# standard deviations of Fisher's z: the fewer the values, the closer they must match
_CHANCE = 5.0
_MULTIPLE = 0.02  # error of an exact multiple, rounding to bfloat16 included
_PARTS = 24  # parts of a stack that are compared, first and last included
# elements up to which a leaf is read though its shapes fit only one way
_LARGEST = 1 << 24


@dataclass(frozen=True)
class Measure:
    """How well the values under one candidate match the checkpoint's."""

    error: float  # relative to the checkpoint's deviation; infinite if that is 0
    count: int
    varies: bool  # the leaf is not constant
    equal: bool  # equal to the checkpoint's, constant or not
    # (leaf, tensor) → f, where the tensor is exactly f times the leaf
    factors: Mapping[tuple[str, str], float]

    @property
    def close(self) -> bool:
        """Whether the match is too good for chance."""
        if not self.varies or self.count < 4:
            return False
        r = math.tanh(_CHANCE / math.sqrt(self.count - 3))
        return self.error <= min(_CLOSE, math.sqrt(1 - r * r))


@dataclass(frozen=True)
class Probe:
    """Values of both sides, and what candidates are bound with."""

    tensors: Tensors
    config: Config
    values: Mapping[str, Any]
    checkpoint: Mapping[str, Any]

    def measures(self, options: Sequence[Offer]) -> list[Measure] | None:
        """One measure each; None if some value is not available."""
        tried = (self._measure(candidate, pair) for pair, candidate in options)
        found = [measure for measure in tried if measure is not None]
        return found if len(found) == len(options) else None

    def _measure(self, candidate: Candidate, pair: Pair) -> Measure | None:
        """Over the first layer, or over layers spread across a stack; None if a value is not available."""
        compiled = Compiled(candidate.rule)
        key = next(iter(pair.leaves[0].members))
        group = {k: t.members.get(key, "") for k, t in enumerate(pair.leaves)}
        found = compiled.match(group[0])
        if found is None or any(path not in self.values for path in group.values()):
            return None
        arrays = {p: np.asarray(self.values[p]) for p in group.values()}
        bindings, problems = bind_group(
            compiled, found[1], group, arrays, self.tensors, self.config
        )
        if problems or any(b.tensor not in self.checkpoint for b, _ in bindings):
            return None
        # of a stack, parts spread over it
        parts = np.linspace(0, len(bindings) - 1, min(len(bindings), _PARTS))
        taken = [bindings[j][0] for j in sorted({round(part) for part in parts})]
        parts = []
        for b in taken:
            leaf = np.asarray(arrays[b.leaf], np.float32)
            tensor = np.asarray(self.checkpoint[b.tensor], np.float32)
            both = values_of(b, leaf, tensor)
            parts.append([x.astype(np.float64).reshape(-1) for x in both])
        return _measured(parts, taken)


def _is_small(pair: Pair) -> bool:
    """Whether the leaf is small enough to be read even if it is unambiguous."""
    return all(math.prod(t.shape) <= _LARGEST for t in (*pair.leaves, *pair.tensors))


def _varies(values: np.ndarray) -> bool:
    return bool(values.size and np.ptp(values) > 1e-6 * np.abs(values).max())


def _measured(
    parts: Sequence[Sequence[np.ndarray]], bindings: Sequence[Binding]
) -> Measure:
    """Of a leaf's values and the checkpoint's; part by part, since one of a fused tensor may be scaled alone."""
    wrong = sum(float(np.sum((mine - theirs) ** 2)) for mine, theirs in parts)
    spread = sum(_spread(theirs) for _, theirs in parts)
    total = sum(float(theirs @ theirs) for _, theirs in parts)
    finite = math.isfinite(wrong) and math.isfinite(total)
    factors = {}
    for b, (mine, theirs) in zip(bindings, parts, strict=True):
        factor = None if b.add else _factor(mine, theirs)
        if factor is None:
            factors = {}
            break
        factors[b.leaf, b.tensor] = factor
    return Measure(
        error=math.sqrt(wrong / spread) if finite and spread > 0 else math.inf,
        count=sum(mine.size for mine, _ in parts),
        varies=finite and any(_varies(mine) for mine, _ in parts),
        equal=finite and wrong <= 1e-6 * max(total, 1e-30),
        factors=factors,
    )


def _spread(values: np.ndarray) -> float:
    """The sum of squares around the mean; 0 of what does not vary."""
    return float(np.sum((values - values.mean()) ** 2)) if _varies(values) else 0.0


def _factor(mine: np.ndarray, theirs: np.ndarray) -> float | None:
    """f, where theirs are exactly f times mine: the factor must explain far more than the residual."""
    if mine.size < 8 or not (_varies(mine) and _varies(theirs)):
        return None
    factor = float(mine @ theirs) / float(mine @ mine)
    residual = float(np.sum((theirs - factor * mine) ** 2))
    if not residual <= _MULTIPLE**2 * _spread(theirs):
        return None
    wrong = float(np.sum((mine - theirs) ** 2))
    exact = wrong > 100 * residual or abs(factor - 1) <= _MULTIPLE
    return factor if exact else None


def settle(measures: Sequence[Measure]) -> int | None:
    """The one candidate whose values match the checkpoint clearly better than all others."""
    ranked = sorted((m.error, j) for j, m in enumerate(measures))
    if not ranked or not measures[ranked[0][1]].close:
        return None
    if len(ranked) > 1 and ranked[1][0] < max(ranked[0][0] * _APART, _FLOOR):
        return None
    return ranked[0][1]


def multiple(measures: Sequence[Measure]) -> Mapping[tuple[str, str], float]:
    """(leaf, tensor) → factor, where some candidate makes the leaf an exact multiple of the checkpoint's numbers."""
    odd = [
        {n: f for n, f in m.factors.items() if abs(f - 1) > _MULTIPLE}
        for m in measures
        if m.factors
    ]
    return odd[0] if odd and all(odd) else {}


# ----------------------------------------------------------------------------------------------------

_SHOWN = 12
# confidence of a pair chosen by name; below, it was chosen by size and similarity of names
_NAMED = 0.8
_FAR = 0.2  # a factor beyond what weight decay produces
# model types without rotary embedding
_NO_ROTARY = ("gpt2", "gpt_bigcode", "opt", "bloom", "mpt")


@dataclass
class _Item:
    """A pair whose rule line is being chosen."""

    pair: Pair
    options: list[Candidate]
    choice: Candidate | None = None
    why: str = ""
    confidence: float = 1.0
    trace: list[str] = field(default_factory=list)
    measures: list[Measure] | None = None  # of the options, where values are available
    seen: Candidate | None = None  # the option that the values confirm
    # of an exact multiple of the checkpoint
    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def by_values(self) -> bool:
        """Whether values chose it, or confirmed the only one that fits the shapes."""
        return self.seen is not None and self.seen is self.choice

    @property
    def param(self) -> str:
        """The parameter word of the name (`kernel`, `w`, …), which implies a convention; empty if there is none."""
        last = self.pair.leaves[0].last_segment
        known = ("kernel", "weight", "w", "weights")
        return last[0] if len(last) == 1 and last[0] in known else ""

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm's scale."""
        role = self.pair.role
        return role.base.startswith("norm") and not role.bias

    def choose(self, candidate: Candidate, why: str, confidence: float) -> None:
        self.choice = candidate
        self.why = why
        self.confidence = confidence


def infer(
    leaves: Leaves,
    tensors: Sequence[CheckpointTensor],
    config: Config = None,
    values: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    given: Rules | None = None,
) -> tuple[Rules, list[Binding]]:
    """Infers the rules that fill `tensors` from `leaves`, and binds them.

    `values` (leaf arrays) and `checkpoint` (tensors) together allow a numeric probe; `given` rules are kept and
    only the rest is inferred. Raises MatchError with the candidates of everything ambiguous, or where a leaf holds a
    multiple of the checkpoint's values: no rule multiplies.
    """
    given = given or Rules(())
    by_name = {t.name: t for t in tensors}
    open_leaves, open_tensors = given.check(leaves, tensors, config)
    leaf_roles = roles_among(set(open_leaves), leaves)
    tensor_roles = roles_among(set(open_tensors), by_name)
    pairing = pair_up(leaf_roles, tensor_roles, config)
    conv1d = is_conv1d(by_name)
    probe = None
    if values is not None and checkpoint is not None:
        probe = Probe(by_name, config, values, checkpoint)
    items = [
        _Item(p, candidates(p, config, conv1d, probe is not None))
        for p in pairing.pairs
    ]
    if probe is not None:
        for item in items:
            _by_numbers(item, probe)
        items += _pairs_by_numbers(pairing, conv1d, probe)
        _offsets_by_siblings(items)
    _refuse_multiples(items)
    for item in items:
        if item.choice is None:
            item.options = [c for c in item.options if not c.probe_only]
            if len(item.options) == 1:
                item.choose(item.options[0], "the shapes fit one way only", 1.0)
    _by_evidence(items)
    chosen = [(item, item.choice.rule) for item in items if item.choice is not None]
    if pairing.leaves or pairing.tensors or len(chosen) < len(items):
        raise _error(pairing, items, leaf_roles, tensor_roles, config, conv1d)
    inferred = [replace(rule, line=n) for n, (_, rule) in enumerate(chosen, 1)]
    notes = {str(rule): _note(item) for item, rule in chosen}
    warnings = {str(rule): w for item, rule in chosen if (w := _warning(item, config))}
    rules = given + Rules(inferred, notes, warnings)
    try:
        return rules, rules.bind(leaves, tensors, config)
    except CoverageError as e:
        raise MatchError(
            f'rules="auto" found rules, but they do not bind this model:\n{rules}{e.message}',
            remedy="save the rules printed above, correct them, and pass them instead of auto",
            rules=rules,
            **{k: v for k, v in e.fields.items() if k == "problems"},
        ) from e


def _note(item: _Item) -> tuple[str, float]:
    how = f" ({item.choice.how})" if item.choice and item.choice.how else ""
    return f"{item.pair.why}; {item.why}{how}", round(
        min(item.pair.confidence, item.confidence), 2
    )


def _warning(item: _Item, config: Config) -> str:
    """What was assumed without evidence; empty if nothing was."""
    if item.by_values:
        return ""
    out = []
    role = item.pair.role
    family = config_lookup(config).get("model_type")
    if item.pair.confidence < _NAMED:
        out.append(
            f"its tensor was chosen without a name that says so: {item.pair.why}"
        )
    if role.base in ("q", "k", "qkv") and family not in _NO_ROTARY:
        out.append(
            "rotary order taken to be the checkpoint's: names and shapes cannot show whether pairs are interleaved"
        )
    if item.is_norm and item.measures is not None:
        varies = any(m.varies for m in item.measures)
        fact = "do not follow the checkpoint's" if varies else "do not vary"
        out.append(
            f"its values {fact}, so they do not show whether it holds w or 1 + w: taken to be w"
        )
    near = {f for f in item.factors.values() if abs(f - 1) <= _FAR}
    if near:
        out.append(f"the checkpoint holds exactly {min(near):.4g} times its values")
    return "; ".join(out)


# ---------------------------------------------------------------------------------------------------- evidence


def _by_numbers(item: _Item, probe: Probe) -> None:
    if not item.options or (len(item.options) < 2 and not _is_small(item.pair)):
        return
    measures = probe.measures([(item.pair, c) for c in item.options])
    if measures is None:
        return
    item.measures = measures
    item.factors = multiple(measures)
    found = settle(measures)
    if found is None or item.factors:
        return
    item.seen = item.options[found]
    if len(measures) > 1:
        why = f"the values match the checkpoint's that way only (relative error {measures[found].error:.1e})"
        item.choose(item.seen, why, 0.99)


def _pairs_by_numbers(pairing: Pairing, conv1d: bool, probe: Probe) -> list[_Item]:
    """Leaves whose names do not say which tensor they are, but whose values do: each the only one for its tensor."""
    best: dict[Template, tuple[Pair, Candidate, Measure]] = {}
    for leaf in pairing.leaves:
        pairs = [
            Pair((leaf,), (t,), Role("?"), "the values equal the checkpoint's", 0.99)
            for t in pairing.options(leaf)
        ]
        options = [
            (p, c) for p in pairs for c in candidates(p, probe.config, conv1d, True)
        ]
        measures = probe.measures(options) or []
        at = settle(measures)
        if at is not None:
            best[leaf] = (*options[at], measures[at])
    out = []
    for leaf, (pair, candidate, measure) in best.items():
        tensor = pair.tensors[0]
        if sum(p.tensors[0] is tensor for p, _, _ in best.values()) > 1:
            continue  # two leaves with equal values: values cannot tell them apart
        item = _Item(pair, [candidate], measures=[measure], seen=candidate)
        item.choose(
            candidate,
            f"relative error {measure.error:.1e}, every other way is worse",
            0.99,
        )
        out.append(item)
        del pairing.leaves[leaf]
        del pairing.tensors[tensor]
    return out


def _offsets_by_siblings(items: Sequence[_Item]) -> None:
    """Norms whose own values are inconclusive, where other norms were found to hold 1 + w.

    They get the siblings' offset if that makes the values equal (a constant norm); else they stay ambiguous.
    """
    norms = [item for item in items if item.is_norm]
    offsets = {i.choice.rule.add for i in norms if i.choice is not None and i.by_values}
    if len(offsets) != 1 or offsets == {0.0}:
        return
    (offset,) = offsets
    for item in norms:
        if item.choice is not None or item.measures is None:
            continue
        like = [c for c in item.options if c.rule.add == offset]
        same = [c for c, m in zip(item.options, item.measures, strict=True) if m.equal]
        if len(like) == 1 and same == like:
            item.choose(
                like[0],
                "as in its sibling norms, which makes its constant the checkpoint's",
                0.9,
            )
        else:
            item.options = [
                replace(c, probe_only=False)
                for c in item.options
                if c.rule.add in (0.0, offset)
            ]


def _refuse_multiples(items: Sequence[_Item]) -> None:
    """Refuse leaves that are a multiple of the checkpoint's tensor: sent as they are, they would change the model."""
    found = {
        i.pair.leaf: i.factors
        for i in items
        if any(abs(f - 1) > _FAR for f in i.factors.values())
    }
    if not found:
        return
    lines = []
    for factors in found.values():
        (leaf, name), factor = next(iter(factors.items()))
        more = f", and {len(factors) - 1} more alike" if len(factors) > 1 else ""
        lines.append(
            f"  {leaf}: {name} holds {factor:.6g} times its values{_guess(factor)}{more}"
        )
    raise MatchError(
        f"{len(found)} leaves hold a multiple of the checkpoint's numbers, and no rule multiplies:\n"
        + "\n".join(lines),
        remedy="multiply these leaves by the factor before the sync (MaxText divides queries by √head_dim and "
        "multiplies Gemma's embedding by √hidden_size), or, if the values are meant as they are, declare their rules: "
        "rules=('auto', '…')",
        factors={
            leaf: {tensor: f for (_, tensor), f in each.items()}
            for leaf, each in found.items()
        },
    )


def _guess(factor: float) -> str:
    """The factor as √n or 1/√n, if it is one: common scalings."""
    square = factor**2 if abs(factor) > 1 else factor**-2
    whole = round(square)
    if factor <= 0 or abs(square - whole) > 0.01 * square or whole < 2:
        return ""
    return f" (√{whole})" if factor > 1 else f" (1/√{whole})"


Feature = Callable[[Candidate], object]


def _by_evidence(items: Sequence[_Item]) -> None:
    """Siblings first, then naming conventions; each settled item is a sibling for the next."""
    for decide in (_by_siblings, _by_convention):
        moved = True
        while moved:
            moved = False
            for item in items:
                if (
                    item.choice is None
                    and len(item.options) > 1
                    and decide(item, items)
                ):
                    moved = True


def _by_siblings(item: _Item, items: Sequence[_Item]) -> bool:
    role = item.pair.role
    rank = len(item.pair.leaves[0].shape)
    settled = [i for i in items if i.choice is not None and i.confidence >= 0.9]
    same_param = [i for i in settled if i.param == item.param]
    near = [i for i in same_param if _similar_roles(i.pair.role, role)]
    both_linear = (
        i for i in same_param if _is_linear(i.pair.role) and _is_linear(role)
    )
    linear = list(both_linear)
    level = [i for i in linear if len(i.pair.leaves[0].shape) == rank]
    steps: list[tuple[Sequence[_Item], Feature, str]] = [
        (near, lambda c: c.signature, "lies like"),
        (level, lambda c: c.order, "is {} like"),
        (linear, lambda c: c.order, "is {} like"),
        (same_param, lambda c: c.heads, "has its heads as `{}` like"),
        (settled, lambda c: c.heads, "has its heads as `{}` like"),
        (settled, lambda c: c.stack, "is stacked on dimension {} like"),
    ]
    for siblings, feature, phrase in steps:
        votes = {
            feature(i.choice): i
            for i in siblings
            if i.choice and feature(i.choice) not in ("", "mixed")
        }
        kept = [c for c in item.options if feature(c) in votes]
        if len(votes) != 1 or len(kept) in (0, len(item.options)):
            continue
        vote, sibling = next(iter(votes.items()))
        item.options = kept
        item.trace.append(f"{phrase.format(vote)} its sibling {sibling.pair.leaf}")
        if len(kept) == 1:
            item.choose(kept[0], "; ".join(item.trace), 0.9)
            return True
    return False


def _is_linear(role: Role) -> bool:
    """A projection in a layer. Not the output head: many trees store it like the embedding, whatever the rest does."""
    return role.base not in (*TABLES, "head") and not role.bias


def _similar_roles(a: Role, b: Role) -> bool:
    attention = ("q", "k", "v")
    return a.bias == b.bias and (
        a.base == b.base or (a.base in attention and b.base in attention)
    )


def _by_convention(item: _Item, items: Sequence[_Item]) -> bool:
    last = item.pair.leaves[0].last_segment[-1]
    table = item.pair.role.base in TABLES
    order = (
        "out × in" if table else {"kernel": "in × out", "weight": "out × in"}.get(last)
    )
    if order is None:
        return False
    kept = [c for c in item.options if c.order == order and c.heads in ("", "n h")]
    if len(kept) != 1:
        return False
    why = (
        "an embedding has a row for each token"
        if table
        else f"`{last}` is {order} by convention"
    )
    item.choose(kept[0], "; ".join([*item.trace, why]), 0.8)
    return True


# ---------------------------------------------------------------------------------------------------- errors


def _error(
    pairing: Pairing,
    items: Sequence[_Item],
    leaf_roles: Mapping[Template, Role],
    tensor_roles: Mapping[Template, Role],
    config: Config,
    conv1d: bool,
) -> MatchError:
    """Every open leaf with the lines that fit it: each binds when it is copied."""
    unfit = [i.pair for i in items if i.choice is None and not i.options]
    leaves = [*pairing.leaves, *(t for pair in unfit for t in pair.leaves)]
    tensors = [*pairing.tensors, *(t for pair in unfit for t in pair.tensors)]
    open_tensors = {t: tensor_roles[t] for t in tensors}
    open_leaves = {t: leaf_roles[t] for t in leaves}
    lines: list[str] = []
    open_: dict[str, list[str]] = {}
    for item in items:
        if item.choice is None and item.options:
            pair = item.pair
            open_[pair.leaf] = [c.line for c in item.options]
            ways = f"{pair.why}, but {len(item.options)} ways fit:"
            lines.append(f"  {pair.leaf} {pair.shapes}: {ways}")
            lines += shown(item.options, _SHOWN)
    parts = {
        t: lines_for_parts(t, role, open_leaves, config, conv1d)
        for t, role in open_tensors.items()
    }
    mentioned = {t for t, found in parts.items() if found}
    for leaf, role in open_leaves.items():
        found = lines_for_leaf(leaf, role, open_tensors, config, conv1d)
        mentioned |= {t for pair, _ in found for t in pair.tensors}
        as_part = [
            (t, c) for t, some in parts.items() for p, c in some if leaf in p.leaves
        ]
        open_[str(leaf)] = [c.line for _, c in [*found, *as_part]]
        what = "its name says " + ("nothing" if role.base == "?" else str(role))
        for pair in unfit:
            if leaf in pair.leaves:
                into = " + ".join(map(str, pair.tensors))
                what = f"{pair.why}, but no transform of {pair.shapes} fits {into}"
        fits = "no tensor left has its size and role"
        if found:
            fits = f"{how_many(len(found), 'line fits', 'lines fit')}:"
        elif as_part:
            fits = "it may be a part of a tensor below"
        lines.append(f"  leaf {leaf} {leaf.shape}: {what}, {fits}")
        lines += shown([c for _, c in found], _SHOWN)
        if not open_[str(leaf)]:
            lines.append(f"    {leaf} -> ~   # leaves it out")
    for tensor, found in parts.items():
        about = f"  tensor {tensor} {tensor.shape}"
        if found:
            lines.append(f"{about}: leaves can be its parts, {len(found)} ways:")
            lines += shown([c for _, c in found], _SHOWN)
        elif tensor not in mentioned:
            lines.append(f"{about}: no leaf found for it")
            lines.append(f"    ~ -> {tensor}   # leaves it as the engine has it")
    settled = sum(i.choice is not None for i in items)
    unfilled = (
        f", {how_many(len(open_tensors), 'tensor')} unfilled" if open_tensors else ""
    )
    left = how_many(len(open_), "leaf", "leaves")
    lines.insert(
        0,
        f'rules="auto" settled {how_many(settled, "rule")} and left {left} open{unfilled}:',
    )
    every = [line for some in open_.values() for line in some]
    if every:
        lines.append(f"  {legend(every, config)}")
    return MatchError(
        "\n".join(lines),
        remedy="copy the right line of each leaf: rules=('auto', '…', '…'), as many as you like, auto does the rest; "
        "leave one out with `leaf -> ~` or `~ -> tensor`; or give values and a checkpoint so that numbers decide; "
        "help(jv.Rules) explains the lines",
        candidates=open_,
        tensors=[str(t) for t in open_tensors],
    )

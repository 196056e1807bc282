"""Finds wrong rules by trying alternatives against the checkpoint's values, or against the engine's log-probabilities.

By value: under the right rule the trainer's values match the checkpoint's, apart from training. By function: weights
sent under a wrong rule are, seen through the right one, a different set of parameters; a trainer that computes with
those reproduces the engine's log-probabilities. Nothing in the engine is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab.layout._checkpoint import CheckpointValues
from jvlab.layout._tree import flatten
from jvlab.layout.rules._alternatives import (
    Alternative,
    Match,
    joint,
    match,
    together,
)
from jvlab.layout.rules._roles import templates
from jvlab.sync._value_samples import read_by

if TYPE_CHECKING:
    from jvlab.sync._link import Link

ROUNDS = 4  # greedy search: wrong rules of different kinds, found one after the other
BETTER = 0.98  # each step must reduce the remaining distance at least by this factor
CLEAR = 3.0  # an alternative explains a gap if it reduces it by this factor
BEAM = 4  # partial solutions kept per round: the best one need not lead to a full one
SMALL = 1 << 26  # models with up to this many elements are compared in every layer


# how far it is from the engine, with which alternatives
Step = tuple[float, tuple[Alternative, ...]]


@dataclass(frozen=True)
class WrongRule:
    """An alternative that explains what the rules in force do not."""

    alternative: Alternative
    how: str  # "value" or "function"
    evidence: str
    gap: float | None = None  # remaining under it, in nats

    def facts(self) -> dict[str, Any]:
        """As plain values, for a check."""
        found = self.alternative
        return {
            "kind": found.kind,
            "how": self.how,
            "now": list(found.replaces),
            "write": list(found.rules),
            "leaves": list(found.leaves),
            "left": self.gap,
        }


def largest(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, ignoring NaN."""
    both = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    known = both[~np.isnan(both)]
    return float(known.max()) if known.size else 0.0


# By value -----------------------------------------------------------------------------------------------------------


def _few(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Of names that differ only in numbers: the first, middle and last of each number."""
    for template in templates(shapes):
        chosen = []
        for slot in range(len(template.kinds)):
            numbers = sorted(template.values(slot))
            chosen.append({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
        for key, name in template.members.items():
            if all(number in some for number, some in zip(key, chosen, strict=True)):
                yield name


def checkpoint_of(link: Link) -> dict[str, np.ndarray] | None:
    """The weights in the folder of the engine's model, unread as yet; None if there are none.

    Of a large model only those of a few layers and experts.
    """
    values = CheckpointValues.of(link.pool.model)
    if values is None or not link.mapping.editable:
        return None
    shapes = {t.name: tuple(t.shape) for t in link.mapping.tensors}
    small = sum(map(math.prod, shapes.values())) <= SMALL
    names = shapes.keys() if small else set(_few(shapes))
    return {name: values.stored(name) for name in names & values.keys()}


def by_value(
    found: Sequence[Alternative],
    values: Mapping[str, Any],
    checkpoint: Mapping[str, np.ndarray],
) -> tuple[WrongRule | None, str]:
    """The alternatives that match the checkpoint better than the rules in force, combined; and a summary."""
    now: dict[tuple[str, ...], Match] = {}
    good: list[tuple[float, int, Alternative]] = []
    for place, a in enumerate(found):
        key = tuple(b.leaf + b.tensor for b in a.now)
        if key not in now:
            now[key] = match(a.now, values, checkpoint)
        if not now[key].count:
            continue
        here = match(a, values, checkpoint)
        if here.beats(now[key]):
            good.append((round(here.error, 3), place, a))
    chosen: list[Alternative] = []
    for _, _, a in sorted(good, key=lambda g: g[:2]):
        if not chosen or (a.factor == 1 and together([*chosen, a]) is not None):
            chosen.append(a)
    related = sum(m.related for m in now.values())
    seen = f"{related} of {len(now)} groups of leaves are related to the checkpoint's values"
    whole = chosen[0] if len(chosen) == 1 else together(chosen) if chosen else None
    if whole is None:
        return None, seen
    before = match(whole.now, values, checkpoint)
    after = match(whole, values, checkpoint)
    text = (
        f"compared with the checkpoint the leaves are {before.error:.2g} off under the rules in force, "
        f"{after.error:.2g} under the corrected ones ({after.count} values compared)"
    )
    return WrongRule(whole, "value", text), seen


# By function --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ByFunction:
    """Finds the alternative under which the trainer reproduces the engine's log-probabilities."""

    policy: Any
    params: Any
    tokens: np.ndarray
    engine: np.ndarray
    allowed: float
    until: Deadline
    states: Callable[[], np.ndarray | None] = lambda: None
    tried: int = 0
    # the engine's hidden states, if available; fetched when needed
    _states: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._arrays = flatten(self.params).arrays
        # must explain most of the gap: with rounding allowed for, an irrelevant alternative might pass
        if (gap := self.gap(None)) is not None:
            self.allowed = min(self.allowed, gap / CLEAR)

    @property
    def replaceable(self) -> bool:
        """Are the flattened leaves the same arrays as the JAX pytree's?"""
        import jax

        return {id(a) for a in self._arrays.values()} <= {
            id(leaf) for leaf in jax.tree.leaves(self.params)
        }

    @property
    def out_of_time(self) -> bool:
        return self.until.over

    def search(self, found: Sequence[Alternative]) -> WrongRule | None:
        """Try single alternatives, the same change in several rules, then different ones in combination."""
        singles = sorted(found, key=_plausible)
        listed = [
            *(a for a in singles if _plausible(a) < 2),
            *joint(found),
            *(a for a in singles if _plausible(a) >= 2),
        ]
        for a in listed:
            gap = self.gap(a)
            if gap is None:
                return None
            if gap <= self.allowed:
                return WrongRule(a, "function", self._evidence(gap), gap)
        return self._beam_search([a for a in listed if _plausible(a) < 3])

    def _beam_search(self, listed: Sequence[Alternative]) -> WrongRule | None:
        """Combine alternatives of several kinds, extending those that come closest to the engine."""
        self._states = self.states()
        measure = self.states_apart if self._states is not None else self.mean_gap
        left = measure(None)
        beam: list[Step] = [] if left is None else [(left, ())]
        for _ in range(ROUNDS):
            steps: list[Step] = []
            for left, chosen in beam:
                for a in listed:
                    both = together([*chosen, a])
                    apart = measure(both) if both is not None else None
                    if apart is not None and apart < BETTER * left:
                        steps.append((apart, (*chosen, a)))
            beam = _nearest(steps)
            for _, chosen in beam:
                whole = together(chosen)
                gap = self.gap(whole)
                if whole is not None and gap is not None and gap <= self.allowed:
                    return WrongRule(whole, "function", self._evidence(gap), gap)
            if not beam or self.out_of_time:
                break
        return None

    def _evidence(self, gap: float) -> str:
        return f"with it trainer and engine agree to {gap:.2g} nats ({self.tried} alternatives tried)"

    def gap(self, reading: Alternative | None) -> float | None:
        """The largest difference under an alternative; None when time is up."""
        row = self._row(reading)
        return None if row is None else largest(self.engine, row)

    def mean_gap(self, reading: Alternative | None) -> float | None:
        """The mean difference under an alternative."""
        row = self._row(reading)
        return None if row is None else float(np.nanmean(np.abs(self.engine - row)))

    def _row(self, reading: Alternative | None) -> np.ndarray | None:
        """The trainer's log-probabilities under an alternative, of all tokens but the first."""
        found = self._run(self.policy.logprobs, reading)
        return None if found is None else logprobs_of(found)

    def states_apart(self, reading: Alternative | None) -> float | None:
        """The difference of the hidden states after the first layer, where errors have not spread yet."""
        assert self._states is not None
        found = self._run(self.policy.hidden, reading)
        if found is None:
            return None
        mine = np.asarray(found, np.float32)[0, 0]
        theirs = self._states[0]
        # the first token attends to itself only: its state does not depend on queries and keys
        apart = _relative(mine[:1], theirs[:1]) + _relative(mine, theirs)
        # the final norm and head only show in the outputs
        mean = self.mean_gap(reading) if apart < 1e-3 else 1.0
        return apart + 1e-3 * (1.0 if mean is None else min(mean, 1.0))

    def _run(
        self, compute: Callable[[Any, Any], Any], reading: Alternative | None
    ) -> Any:
        if self.out_of_time:
            return None
        if reading is None:
            return compute(self.params, self.tokens[None, :])
        self.tried += 1
        tree = read_by(reading, self.params, self._arrays)
        return compute(tree, self.tokens[None, :])


def logprobs_of(scored: Any) -> np.ndarray:
    """A trainer's log-probabilities of one row of tokens; of the first there is none."""
    row = np.asarray(scored, np.float32)[0].copy()
    row[0] = np.nan
    return row


def _nearest(
    steps: Sequence[Step],
) -> list[Step]:
    """The `BEAM` nearest steps, without permutations of the same alternatives."""
    seen: dict[frozenset[int], Step] = {}
    for step in sorted(steps, key=lambda s: s[0]):
        seen.setdefault(frozenset(map(id, step[1])), step)
    return list(seen.values())[:BEAM]


def _relative(mine: np.ndarray, theirs: np.ndarray) -> float:
    return float(
        np.sqrt(
            np.square(mine - theirs).sum() / max(float(np.square(theirs).sum()), 1e-30)
        )
    )


def _plausible(a: Alternative) -> int:
    """Sort key: whole rules first, then parts of one; layer orders and what no rule can express last."""
    if a.kind in ("layer order", "scale") and a.op != "layers in order":
        return 3
    return 2 if a.part and a.kind != "swapped" else 0


# The verdict --------------------------------------------------------------------------------------------------------


def verdict_of(finding: WrongRule, gap: float | None, synced: bool) -> tuple[str, str]:
    """What is wrong, and the remedy."""
    a = finding.alternative
    first, *more = a.leaves
    leaves = f"{first} and {len(more)} more" if more else first
    texts = a.replaces or tuple(dict.fromkeys(b.rule for b in a.now))
    present = " and ".join(f"`{text}`" for text in texts)
    what = f"wrong rule ({a.kind}): {leaves} read by {present}"
    known = "by the checkpoint's values " if finding.how == "value" else ""
    what += f"; {known}{a.reason}"
    if gap is not None and finding.gap is not None:
        what += f", which reduces the gap of {gap:.2g} nats to {finding.gap:.2g}"
        what += (
            "" if finding.gap <= gap / CLEAR else ": something else is wrong as well"
        )
    elif not synced:
        what += "; a sync would write them by the wrong rule"
    if not a.rules:
        return what, f"rules can't multiply: send the leaf times {a.factor:.6g}"
    lines = "; ".join(f"`{text}`" for text in a.rules)
    return (
        what,
        f"write {lines}: lab.connect(params, pool, rules=found.rules), and sync",
    )

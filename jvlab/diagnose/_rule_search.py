"""Is a rule wrong? Other readings of the leaves, held against the checkpoint's values, or against the engine's numbers.

By value: under the right rule a trainer's values are the checkpoint's, but for training. By function: what an engine
was sent under a wrong rule is, read by the right one, another set of parameters; a trainer that computes with those
gets the engine's numbers. Nothing in the engine is changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.diagnose._bisection import largest
from jvlab.rules._alternative import Alternative
from jvlab.rules._alternatives import alternatives_of, joint, together
from jvlab.rules._evidence import Match, match, reread
from jvlab.rules._roles import templates

ROUNDS = 4  # wrong rules that are not of one kind and are found one after the other
BETTER = 0.98  # of the distance that was left: what a step of such a search must fall below
CLEAR = 3.0  # a reading that explains a gap leaves less than this share of it
FRONT = 4  # steps that are followed beside each other: the best one need not lead on
SMALL = 1 << 26  # numbers of a model of which every layer is compared
CACHE_BYTES = 1 << 30  # of checkpoint tensors that are kept while alternatives are compared


@dataclass(frozen=True)
class Finding:
    """A reading that explains what the rules in force do not."""

    alternative: Alternative
    how: str  # "value" or "function"
    evidence: str
    gap: float | None = None  # that is left under it, in nats

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


# By value -----------------------------------------------------------------------------------------------------------


class SomeTensors(Mapping[str, np.ndarray]):
    """Of a large checkpoint's tensors those of a few layers and experts; values are kept for the next comparison."""

    def __init__(self, values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        small = sum(math.prod(shape) for shape in shapes.values()) <= SMALL
        self._values, self._names = values, set(shapes if small else _few(shapes)) & set(values)
        self._kept: dict[str, np.ndarray] = {}
        self._bytes = 0

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._kept:
            if name not in self._names:
                raise KeyError(name)
            if self._bytes > CACHE_BYTES:
                self._kept, self._bytes = {}, 0
            self._kept[name] = self._values[name]
            self._bytes += self._kept[name].nbytes
        return self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _few(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Of names that differ in numbers only: the first, the middle and the last of each number."""
    for template in templates(shapes):
        chosen = []
        for slot in range(len(template.kinds)):
            numbers = sorted(template.values(slot))
            chosen.append({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
        for key, name in template.members.items():
            if all(number in some for number, some in zip(key, chosen, strict=True)):
                yield name


def checkpoint_of(link: Any) -> Mapping[str, np.ndarray] | None:
    """The values that lie in the folder of the engine's model; None where there are none."""
    from jvlab.checkpoint._values import CheckpointValues

    model, origin = getattr(link.pool, "model", None), link.mapping._origin
    values = CheckpointValues.of(model) if model is not None else None
    if values is None or origin is None:
        return None
    return SomeTensors(values, {t.name: tuple(t.shape) for t in origin.tensors})


def by_value(
    found: Sequence[Alternative], values: Mapping[str, Any], checkpoint: Mapping[str, np.ndarray]
) -> tuple[Finding | None, str]:
    """The readings that the checkpoint favours over the rules in force, as one; and in words what was seen."""
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
    seen = f"{related} of {len(now)} groups of leaves have to do with the checkpoint's values"
    whole = chosen[0] if len(chosen) == 1 else together(chosen) if chosen else None
    if whole is None:
        return None, seen
    before, after = match(whole.now, values, checkpoint), match(whole, values, checkpoint)
    text = (
        f"beside the checkpoint's values the leaves are {before.error:.2g} off as they are read now, "
        f"{after.error:.2g} as they should be ({after.count} numbers compared)"
    )
    return Finding(whole, "value", text), seen


# By function --------------------------------------------------------------------------------------------------------


class ByFunction:
    """Which reading makes a trainer's numbers those of the engine?"""

    def __init__(
        self,
        policy: Any,
        params: Any,
        tokens: np.ndarray,
        engine: np.ndarray,
        allowed: float,
        seconds: float,
        states: Callable[[], np.ndarray | None] = lambda: None,
    ) -> None:
        from jvlab.layout._tree import flatten

        self.policy, self.params, self.tokens, self.engine = policy, params, tokens, engine
        self._until = time.monotonic() + seconds
        self._ask_states = states
        self._states: np.ndarray | None = None  # the engine's hidden states, if it shows them; asked for late
        self._arrays = flatten(params).arrays
        self.tried = 0
        row = _without_first(np.asarray(policy.logprobs(params, tokens[None, :]), np.float32)[0])
        # a reading must explain most of the gap: with a dtype's rounding allowed, one that hardly matters would do
        self.allowed = min(allowed, largest(engine, row) / CLEAR)

    @property
    def exchangeable(self) -> bool:
        """Are the leaves by their paths those that jax sees in the tree?"""
        import jax

        return {id(a) for a in self._arrays.values()} <= {id(leaf) for leaf in jax.tree.leaves(self.params)}

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self._until

    def search(self, found: Sequence[Alternative]) -> Finding | None:
        """One reading, the same change in several rules, or different ones found one after the other."""
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
                return Finding(a, "function", self._words(gap), gap)
        return self._one_by_one([a for a in listed if _plausible(a) < 3])

    def _one_by_one(self, listed: Sequence[Alternative]) -> Finding | None:
        """Wrong rules of several kinds: from the readings that bring the numbers nearest, on to the next."""
        self._states = self._ask_states()
        measure = self.states_apart if self._states is not None else self.mean_gap
        left = measure(None)
        front: list[tuple[float, tuple[Alternative, ...]]] = [] if left is None else [(left, ())]
        for _ in range(ROUNDS):
            steps: list[tuple[float, tuple[Alternative, ...]]] = []
            for left, chosen in front:
                for a in listed:
                    both = together([*chosen, a])
                    apart = measure(both) if both is not None else None
                    if apart is not None and apart < BETTER * left:
                        steps.append((apart, (*chosen, a)))
            front = _nearest(steps)
            for _, chosen in front:
                whole = together(chosen)
                gap = self.gap(whole)
                if whole is not None and gap is not None and gap <= self.allowed:
                    return Finding(whole, "function", self._words(gap), gap)
            if not front or self.out_of_time:
                break
        return None

    def _words(self, gap: float) -> str:
        return f"with it the trainer's numbers are the engine's, to {gap:.2g} nats ({self.tried} readings tried)"

    def gap(self, reading: Alternative | None) -> float | None:
        """The largest difference under a reading; None when time is up."""
        row = self._run(self.policy.logprobs, reading)
        return None if row is None else largest(self.engine, _without_first(np.asarray(row, np.float32)[0]))

    def mean_gap(self, reading: Alternative | None) -> float | None:
        """The mean difference under a reading."""
        row = self._run(self.policy.logprobs, reading)
        return None if row is None else float(np.nanmean(np.abs(self.engine - _without_first(np.asarray(row)[0]))))

    def states_apart(self, reading: Alternative | None) -> float | None:
        """How far the hidden states are apart after the first layer, where errors have not yet spread."""
        assert self._states is not None
        found = self._run(self.policy.hidden, reading)
        if found is None:
            return None
        mine, theirs = np.asarray(found, np.float32)[0, 0], self._states[0]
        # the first token sees itself alone: whatever queries and keys are, the rest of a layer shows in it
        apart = _relative(mine[:1], theirs[:1]) + _relative(mine, theirs)
        mean = self.mean_gap(reading) if apart < 1e-3 else 1.0  # what lies behind the layers shows in the outputs only
        return apart + 1e-3 * (1.0 if mean is None else min(mean, 1.0))

    def _run(self, compute: Callable[[Any, Any], Any], reading: Alternative | None) -> Any:
        if self.out_of_time:
            return None
        if reading is None:
            return compute(self.params, self.tokens[None, :])
        import jax

        self.tried += 1
        new = {id(self._arrays[path]): value for path, value in reread(reading, self._arrays).items()}
        like = lambda old, array: jax.device_put(array, old.sharding) if hasattr(old, "sharding") else array
        put = lambda leaf: like(leaf, new[id(leaf)]) if id(leaf) in new else leaf
        return compute(jax.tree.map(put, self.params), self.tokens[None, :])


def _nearest(
    steps: Sequence[tuple[float, tuple[Alternative, ...]]],
) -> list[tuple[float, tuple[Alternative, ...]]]:
    """The few that are nearest; of those that say the same in another order, one."""
    seen: dict[frozenset[int], tuple[float, tuple[Alternative, ...]]] = {}
    for step in sorted(steps, key=lambda s: s[0]):
        seen.setdefault(frozenset(map(id, step[1])), step)
    return list(seen.values())[:FRONT]


def _relative(mine: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.sqrt(np.square(mine - theirs).sum() / max(float(np.square(theirs).sum()), 1e-30)))


def _without_first(row: np.ndarray) -> np.ndarray:
    row = row.copy()
    row[0] = np.nan
    return row


def _plausible(a: Alternative) -> int:
    """Whole rules first, then parts of one; layers in another order, and what no rule can say, last."""
    if a.kind in ("layer order", "scale") and a.op != "layers in order":
        return 3
    return 2 if a.part and a.kind != "swapped" else 0


# In words -----------------------------------------------------------------------------------------------------------


def verdict_of(finding: Finding, gap: float | None, synced: bool) -> tuple[str, str]:
    """What is wrong, and what to write instead."""
    a = finding.alternative
    first, *more = a.leaves
    leaves = f"{first} and {len(more)} more" if more else first
    texts = a.replaces or tuple(dict.fromkeys(b.rule for b in a.now))
    present = " and ".join(f"`{text}`" for text in texts)
    what = f"wrong rule ({a.kind}): {leaves} read by {present}"
    known = "by the checkpoint's values " if finding.how == "value" else ""
    what += f"; {known}{a.reason}"
    if gap is not None and finding.gap is not None:
        what += f", and read so the gap of {gap:.2g} nats is {finding.gap:.2g}"
        what += "" if finding.gap <= gap / CLEAR else ": something else is wrong beside it"
    elif not synced:
        what += "; a sync would write them as they are read now"
    if not a.rules:
        return what, f"no rule can multiply: send the leaf times {a.factor:.6g}"
    lines = "; ".join(f"`{text}`" for text in a.rules)
    return what, f"write {lines}: lab.connect(params, pool, rules=found.rules), and sync"


def suspects(link: Any) -> list[Alternative]:
    """Every other reading of a link's leaves; none where its mapping keeps no rules."""
    return alternatives_of(link.mapping)

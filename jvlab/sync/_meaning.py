"""`Meaning`: whether a mapping is right, beyond covering everything and its bytes arriving.

covered   every element is written once                     the plan
arrived   the engine holds the trainer's bits               digests, every sync
meaning   those bits mean the same on both sides            once per connect: by value, by function, or unchecked

connect ─ by value ─▶ checked │ failed: refused, nothing was written │ pending
first sync ─ by value, if its values are others ─▶ checked │ failed: refused, nothing was written │ pending
           ─ by function, if pending ─▶ checked │ failed: refused, the pool is dirty │ unchecked, with the reason
later syncs ─ by function, once leaves differ that could not be told apart ─▶ the same

The verdict belongs to the values that were compared: each connect starts anew, and later syncs say at which version.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._errors import ConfigError, JvlabError, MeaningError, ModelError
from jvlab._units import how_many
from jvlab.layout._checkpoint import CheckpointValues
from jvlab.layout._slices import stacked_dims, without_slice
from jvlab.layout._tree import as_sent, flatten
from jvlab.layout.rules._alternatives import alternatives_of
from jvlab.sync._value_check import (
    Arrays,
    Known,
    LeafEvidence,
    ambiguities_of,
    decide,
    still_ambiguous,
)
from jvlab.sync._value_samples import (
    ScoreGap,
    by_function_of,
    by_policy,
    compare,
    rearranged,
    sample,
    slice_order,
    untold,
)
from jvlab.trainer._live_policies import live_policies

if TYPE_CHECKING:
    import numpy as np

    from jvlab.sync._connections import Agreement
    from jvlab.sync._value_check import Verdict
    from jvlab.wire._pool_view import PoolView


# The parameters that a link was connected with, as long as somebody else keeps them: for comparisons of values.


class RememberedParams:
    """Weak references to a tree's arrays: comparing values needs no argument, and no memory is kept for it."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}

    def take(self, params: Any) -> None:
        """Remember this tree's arrays; those that cannot be referenced weakly are forgotten."""
        self.take_arrays(flatten(params).arrays)

    def take_arrays(self, arrays: Arrays) -> None:
        """Remember these arrays by path."""
        self._refs = {}
        for path, array in arrays.items():
            try:
                self._refs[path] = weakref.ref(array)
            except TypeError:
                self._refs = {}
                return

    def arrays(self) -> Arrays | None:
        """The arrays by path; None if one of them is gone, or its memory was given to a training step."""
        found = {path: ref() for path, ref in self._refs.items()}
        alive = all(
            a is not None and not getattr(a, "is_deleted", bool)()
            for a in found.values()
        )
        return found if found and alive else None

    def or_given(self, params: Any, remedy: str) -> Arrays:
        """The arrays of this tree, or Policy, if one is given, else the remembered ones; raises if they are gone."""
        if params is not None:
            return flatten(as_sent(getattr(params, "params", params))).arrays
        arrays = self.arrays()
        if arrays is None:
            raise ConfigError(
                "the parameters that this link was connected with are gone: training reused their memory, or nobody "
                "kept them",
                remedy=remedy,
                ask="params",  # an inspector asks for them in place
            )
        return arrays

    def holds(self, arrays: Arrays) -> bool:
        """Are these the same arrays, with the same values? Only JAX's can be known to be: others change in place."""
        if not self._refs or arrays.keys() != self._refs.keys():
            return False
        return all(
            hasattr(a, "addressable_shards") and self._refs[path]() is a
            for path, a in arrays.items()
        )


# ----------------------------------------------------------------------------------------------------

WAYS = ("auto", "function", "off")
NAMED = 6  # leaves named in one message
EAGER = 8  # syncs at which leaves that could not be told apart are compared again
# with more, alternative rules are not searched: that would take minutes
MAX_BINDINGS = 20_000
Scorer = Callable[[Any, "np.ndarray"], "np.ndarray"]


@dataclass(frozen=True, eq=False)
class Meaning:
    """Whether the values that a link sends mean the same on both sides, and how that is known.

    state       "checked", "unchecked", "failed", or "pending" until the first sync
    how         "value": the trainer's values match the checkpoint's where the mapping puts them;
                "function": both sides computed the same log-probabilities after a sync; "value and function": some
                leaves by the second; None: neither
    why         the reason, in a sentence
    leaves      leaf -> what a sample of its values showed; of a stacked leaf, each slice: `layers.attn.q.kernel[1]`
    ambiguous   leaf -> what nothing has ruled out yet: alternative mappings that names and shapes allow, or any, where
                its values show no order (one number everywhere, the same as another leaf's)

    >>> link = lab.connect(policy.params, pool)
    >>> link.meaning.state, link.meaning.how
    ('checked', 'value')
    """

    state: str
    how: str | None = None
    why: str = ""
    leaves: Mapping[str, LeafEvidence] = field(default_factory=dict, repr=False)
    ambiguous: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The summary that reports print."""
        return self.text_at(None)

    def text_at(self, version: int | None) -> str:
        """The summary for a sync whose values were not compared themselves, but those of `version`."""
        if self.state != "checked":
            return f"meaning {self.state}{f': {self.why}' if self.why else ''}"
        text = f"meaning checked by {self.how}"
        if version is not None:
            text += f" at version {version}"
        if self.ambiguous:
            left = how_many(len(self.ambiguous), "leaf", "leaves")
            text += f", except for {left}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        fields = ("kind", "compared", "equal", "r", "text")
        return {
            "state": self.state,
            "how": self.how,
            "why": self.why,
            "leaves": {
                leaf: {name: getattr(s, name) for name in fields}
                for leaf, s in self.leaves.items()
            },
            "ambiguous": dict(self.ambiguous),
        }

    def __repr__(self) -> str:
        how = f" by {self.how}" if self.how else ""
        left = f"; {len(self.ambiguous)} leaves ambiguous" if self.ambiguous else ""
        return f"Meaning({self.state}{how}: {self.why}{left})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def unpack(trainer: Any) -> tuple[Any, Scorer | None]:
    """Parameters and scorer of the `lab.connect` argument: a tree, a Policy, or `(params, logprobs_fn)`."""
    if isinstance(trainer, tuple):
        pair = len(trainer) == 2 and callable(trainer[1])
        return (trainer[0], scorer_of(trainer)) if pair else (trainer, None)
    if hasattr(trainer, "params") and hasattr(trainer, "logprobs_fn"):
        return trainer.params, scorer_of(trainer)
    return trainer, None


def scorer_of(trainer: Any) -> Scorer:
    """A function for log P of tokens [B, T], by a Policy (held weakly) or by the `logprobs_fn` of a pair."""
    if isinstance(trainer, tuple):
        return by_function_of(trainer[1])
    return by_policy(weakref.ref(trainer))


class MeaningCheck:
    """The check of one connected tree: at connect, at its first sync, and while leaves could not be told apart."""

    def __init__(self, agreed: Agreement) -> None:
        self._agreed = agreed
        self.way = "auto"
        self.scorer: Scorer | None = None
        self._checkpoint: Any = None  # the checkpoint the trainer loaded, if given
        self._searched_owner = False
        # the arrays whose values were compared, while they exist
        self._compared = RememberedParams()
        # of the sync whose values were compared: the first, unless it settled nothing
        self._version: int | None = None
        self._syncs = 0
        self._last_scorer: Scorer | None = None
        self.meaning = Meaning("pending", why="nothing was compared yet")

    @property
    def known(self) -> Known:
        """Leaf -> the alternative mappings that names and shapes allow."""
        return ambiguities_of(self._agreed.mapping)

    def offer_scorer(self, trainer: Any) -> None:
        """While the meaning is unsettled, let the next sync score tokens with this trainer."""
        if self.scorer is None and (self.is_open or self.meaning.ambiguous):
            self.scorer = scorer_of(trainer)

    def of_rules(self, mapping: Any, arrays: Arrays, model: Any) -> Meaning:
        """What these values say about other rules; raises a MeaningError if they contradict them."""
        check = MeaningCheck(replace(self._agreed, mapping=mapping))
        check.configure("auto", self._checkpoint, None)
        check.by_value(arrays, model)
        return check.meaning

    def configure(self, way: str, checkpoint: Any, scorer: Scorer | None) -> None:
        """Take the arguments of a connect."""
        if way not in WAYS:
            raise ConfigError(
                f"meaning must be one of {', '.join(map(repr, WAYS))}, not {way!r}"
            )
        if way == "function" and self._agreed.part == "draft":
            raise ConfigError(
                'meaning="function" compares log-probabilities, and an engine returns none of its draft model',
                remedy='meaning="auto" compares values with the draft model\'s checkpoint; "off" does not',
            )
        self.way = way
        self._checkpoint = checkpoint
        self.scorer = scorer
        self._set("pending", "nothing was compared yet")
        if way == "off":
            self._set("unchecked", 'turned off by meaning="off"')

    @property
    def is_open(self) -> bool:
        """Is the meaning still unsettled?"""
        return self.way != "off" and self.meaning.state in ("pending", "unchecked")

    def _set(
        self, state: str, why: str, seen: Mapping[str, LeafEvidence] | None = None
    ) -> None:
        left = still_ambiguous(self.known, seen or {}, False)
        self.meaning = Meaning(state, None, why, dict(seen or {}), left)

    # By value -----------------------------------------------------------------------------------------------------

    def by_value(self, arrays: Arrays, model: Any, trained: bool = False) -> None:
        """Compare with the checkpoint's values; raises a MeaningError if they contradict the mapping.

        After an error the meaning is as it was: what is known of other values stays true.
        `trained`: other values of this tree were checked before, and training may have changed them.
        """
        if self.way != "auto":
            return
        files = CheckpointValues.of(self._checkpoint or model)
        if files is None and self._checkpoint is not None:
            raise ModelError(
                f"checkpoint={os.fspath(self._checkpoint)!r} has no safetensors files that can be read",
                remedy="pass the folder that the trainer's parameters were loaded from",
            )
        if files is None:
            self._set("pending", "the model folder holds no weights to compare with")
            return
        bindings = self._agreed.mapping.bindings
        found = sample(bindings, arrays, files)
        seen = dict(found.seen)
        if not any(s.compared for s in seen.values()):
            self._set(
                "pending",
                "the tree has no values yet, or none that the checkpoint has",
                seen=seen,
            )
            return
        against = {
            without_slice(name)
            for name, s in seen.items()
            if s.contradicts or s.kind == "named"
        }
        readings: dict[str, str] = {}
        orders: dict[str, dict[int, int]] = {}
        if against and any(s.agrees for s in seen.values()):
            readings = self._alternatives(against, arrays, files)
            orders = self._orders(against - readings.keys(), arrays, files)
            # under its own name, but another tensor's numbers, or its own elsewhere
            for name, s in found.seen.items():
                moved = without_slice(name) in (*readings, *orders)
                if s.kind == "named" and (
                    moved or rearranged(name, bindings, arrays, files)
                ):
                    seen[name] = replace(s, kind="different")
        verdict = decide(seen, (*readings, *orders), trained)
        checked = verdict.state == "checked"
        left = still_ambiguous(self.known, seen, checked, found.alike)
        meaning = Meaning(verdict.state, "value", verdict.why, seen, left)
        if verdict.state == "open":
            meaning = replace(meaning, state="pending", how=None)
        if verdict.state == "failed":
            raise self._refusal(meaning, verdict, readings, orders)
        self.meaning = meaning
        self._compared.take_arrays(arrays)

    def _orders(
        self, leaves: set[str], arrays: Arrays, files: Any
    ) -> dict[str, dict[int, int]]:
        """Stacked leaf -> index -> the index whose layer's values it holds, where layers are in another order."""
        bindings = self._agreed.mapping.bindings
        out = {}
        for leaf, dim in stacked_dims(b for b in bindings if b.leaf in leaves).items():
            bound = [b for b in bindings if b.leaf == leaf]
            if order := slice_order(bound, arrays.get(leaf), files, dim):
                out[leaf] = order
        return out

    def _alternatives(
        self, leaves: set[str], arrays: Arrays, files: Any
    ) -> dict[str, str]:
        """Leaf -> the rule under which its values match the checkpoint's, where one was found."""
        mapping = self._agreed.mapping
        out: dict[str, str] = {}
        if len(mapping.bindings) > MAX_BINDINGS:
            return out
        for other in alternatives_of(mapping):
            mine = {leaf for leaf in other.leaves if leaf in leaves and leaf not in out}
            if not mine or not other.rules:
                continue
            bound = [b for b in other.bindings if b.leaf in mine]
            found = sample(bound, arrays, files)
            if all(s.fits for s in found.seen.values()):
                out |= dict.fromkeys(mine, other.rule_text)
        return out

    def _refusal(
        self,
        meaning: Meaning,
        verdict: Verdict,
        readings: Mapping[str, str],
        orders: Mapping[str, Mapping[int, int]],
    ) -> MeaningError:
        wrong = whole_leaves(verdict.wrong, meaning.leaves)  # name -> its evidence
        by_rule: dict[str, list[str]] = {}
        for name, seen in wrong.items():
            by_rule.setdefault(seen.rule, []).append(name)
        readings = {
            name: readings[leaf]
            for name in wrong
            if (leaf := without_slice(name)) in readings
        }
        lines = []
        for rule, names in by_rule.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"  {', '.join(names[:NAMED])}{more}: {wrong[names[0]].text}")
            lines.append(f"    by the rule: {rule}")
            better = [readings[name] for name in names if name in readings]
            lines += [f"    they are by: {reading}" for reading in better[:1]]
            leaves = {without_slice(name) for name in names}
            mixed = [leaf for leaf in orders if leaf in leaves]
            for leaf in mixed[:NAMED]:
                order = orders[leaf].items()
                words = [f"[{i}] holds the values of layer [{j}]" for i, j in order]
                shown = ", ".join(words[:NAMED]) + (" …" if len(words) > NAMED else "")
                lines.append(f"    {leaf}: its layers are in another order: {shown}")
        text = "\n".join(lines)
        rules = list(dict.fromkeys(readings.values()))
        remedy = "correct the rules of these leaves"
        if rules:
            remedy = f"write {'; '.join(rules)}"
        if orders:
            remedy = f"stack the layers of {', '.join(list(orders)[:NAMED])} in the checkpoint's order"
        return MeaningError(
            f"the mapping does not put these values where the checkpoint has them: {verdict.why}\n{text}",
            remedy=f'{remedy}; if the trainer has other values there on purpose: meaning="function" or "off"',
            leaves=tuple(wrong),
            readings=readings,
            meaning=meaning,
            mapping=self._agreed.mapping,
        )

    # By function --------------------------------------------------------------------------------------------------

    def before_sync(self, params: Any, model: Any) -> None:
        """Refuse a mapping found wrong; check the values of the first sync too, unless they are the connect's."""
        if self.meaning.state == "failed":
            raise MeaningError(
                f"this mapping was found wrong, and nothing was written: {self.meaning.why}",
                remedy='connect with corrected rules or values; meaning="off" skips the check',
                meaning=self.meaning,
            )
        if self.way != "auto" or self._version is not None:
            return
        arrays = flatten(params).arrays
        if not self._compared.holds(arrays):
            self.by_value(arrays, model, trained=self.meaning.state == "checked")

    def committed(self, version: int, arrays: Arrays) -> None:
        """A sync was committed; the first one is the one whose values were compared."""
        self._syncs += 1
        if self._version is None:
            self._settled(version, arrays)

    def _settled(self, version: int, arrays: Arrays) -> None:
        self._version = version
        self._compared.take_arrays(arrays)

    def text_of(self, version: int, arrays: Arrays) -> str:
        """The meaning of one sync, for its report: other values than those that were compared are said to be so."""
        same = self._version in (None, version) or self._compared.holds(arrays)
        return self.meaning.text_at(None if same else self._version)

    def after_sync(
        self,
        pool: PoolView,
        version: int,
        params: Any,
        seconds: float,
        mark_dirty: Callable[[], None],
    ) -> None:
        """Check by function, once per scorer. A MeaningError leaves the pool dirty."""
        if hasattr(params, "is_zero") and params.is_zero():
            self._set(
                "pending",
                "the adapter is still zero: no log-probability depends on where it is",
            )
            return
        if self._agreed.part == "draft":
            self.give_up("an engine returns no log-probabilities of its draft model")
            return
        scorer = self._take_scorer(params)
        if scorer is None:
            self.give_up(
                "the trainer's log-probabilities are not known (connect a jv.Policy or (params, logprobs_fn))"
            )
            return
        found = compare(pool, params, scorer, self.known, self._agreed.mapping, seconds)
        if found.state == "unchecked":
            self.give_up(found.why)
            return
        self.meaning = Meaning(
            found.state, "function", found.why, self.meaning.leaves, found.ambiguous
        )
        if found.state == "failed":
            raise self._disagreement(found, version, _dirty(mark_dirty))
        self._settled(version, flatten(params).arrays)

    def _take_scorer(self, params: Any) -> Scorer | None:
        """The scorer for one comparison: the one that was given, or that of the policy with these parameters."""
        if self.scorer is None and not self._searched_owner:
            self._searched_owner = True
            owner = owner_of(params)
            self.scorer = scorer_of(owner) if owner is not None else None
        # used once, while the meaning is open
        scorer = self.scorer
        self.scorer = None
        self._last_scorer = scorer or self._last_scorer
        return scorer

    def again(
        self,
        pool: PoolView,
        version: int,
        params: Any,
        seconds: float,
        mark_dirty: Callable[[], None],
    ) -> None:
        """Check by function the leaves that could not be told apart, once they differ. Raises as `after_sync` does.

        Tried at the first syncs, then at every power of two: it costs as much as a small request.
        """
        open_ = self.meaning.ambiguous
        tried = self._syncs <= EAGER or self._syncs & (self._syncs - 1) == 0
        if self.meaning.state != "checked" or not open_ or not tried:
            return
        if self._agreed.part == "draft":
            return
        scorer = self._take_scorer(params) or self._last_scorer
        if scorer is None:
            return
        arrays = flatten(params).arrays
        same = untold(self._agreed.mapping.bindings, arrays)
        apart = {
            leaf: self.known.get(leaf, (("order", why),))
            for leaf, why in open_.items()
            if leaf not in same
        }
        if not apart:
            return
        found = compare(pool, params, scorer, apart, self._agreed.mapping, seconds)
        if found.state == "checked":
            left = {
                leaf: why
                for leaf, why in open_.items()
                if leaf not in apart or leaf in found.ambiguous
            }
            if left != open_:
                how = self.meaning.how
                if how != "function":
                    how = "value and function"
                why = f"{self.meaning.why}; at version {version}: {found.why}"
                self.meaning = replace(self.meaning, how=how, why=why, ambiguous=left)
                self._settled(version, arrays)
        elif (
            found.state == "failed"
            and set(found.suspects) & apart.keys()
            and found.rule
        ):
            self.meaning = Meaning(
                "failed", "function", found.why, self.meaning.leaves, dict(open_)
            )
            raise self._disagreement(found, version, _dirty(mark_dirty))
        # for whatever reason: it is not known to be these leaves
        elif found.state == "failed":
            why = f"at version {version} engine and trainer are {found.why}"
            self.meaning = replace(self.meaning, state="unchecked", how=None, why=why)

    def give_up(self, why: str) -> None:
        """Mark a pending meaning as unchecked, for this reason in addition to the earlier one."""
        if self.meaning.state == "pending":
            before = self.meaning.why
            why = f"{before}; {why}" if before else why
            self.meaning = replace(self.meaning, state="unchecked", why=why)

    def _disagreement(self, found: ScoreGap, version: int, state: str) -> MeaningError:
        shown = ", ".join(found.suspects[:NAMED]) or "no leaf is ambiguous"
        remedy = "connect with corrected rules and sync again"
        if not found.rule:
            remedy += "; link.bisect(prompt, policy) looks for the rule"
        else:
            shown += f"; under this rule they would agree:\n  {found.rule}\n"
        return MeaningError(
            f"version {version} arrived, but engine and trainer compute different things with it: {found.why}. "
            f"{state}. Most suspicious: {shown}",
            remedy=remedy,
            leaves=tuple(found.suspects),
            meaning=self.meaning,
            mapping=self._agreed.mapping,
        )


def whole_leaves(
    wrong: Sequence[str], seen: Mapping[str, LeafEvidence]
) -> dict[str, LeafEvidence]:
    """Name -> evidence of what is wrong: a stacked leaf by its path if all its slices are, else slice by slice."""
    slices: dict[str, list[str]] = {}
    for name in seen:
        slices.setdefault(without_slice(name), []).append(name)
    out: dict[str, LeafEvidence] = {}
    for name in wrong:
        leaf = without_slice(name)
        out.setdefault(leaf if set(slices[leaf]) <= set(wrong) else name, seen[name])
    return out


def _dirty(mark_dirty: Callable[[], None]) -> str:
    """Mark the pool dirty; returns a sentence about the outcome."""
    try:
        mark_dirty()
        return "The pool is dirty: it generates nothing until a sync commits"
    except JvlabError as error:  # the MeaningError matters more
        return f"The pool could not be marked dirty ({error.message}): pool.pause() it"


def owner_of(params: Any) -> Any:
    """The live `jv.Policy` whose parameters are these same array objects, or None."""
    mine = flatten(params).arrays
    for policy in live_policies():
        theirs = flatten(policy.params).arrays
        if theirs.keys() == mine.keys() and all(
            theirs[path] is array for path, array in mine.items()
        ):
            return policy
    return None

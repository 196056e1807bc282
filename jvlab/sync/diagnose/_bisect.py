"""`bisect`: why engine and trainer disagree. Ordered checks on one prompt, each with evidence; the first cause wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, JvlabError
from jvlab._files import Plain
from jvlab.layout._plan_types import is_scales
from jvlab.layout._tree import flatten
from jvlab.layout.rules._alternatives import Alternative, alternatives_of
from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample
from jvlab.sync.diagnose._rule_search import (
    ByFunction,
    WrongRule,
    by_value,
    checkpoint_of,
    largest,
    logprobs_of,
    verdict_of,
)
from jvlab.trainer._live_policies import live_policies

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._link import Link


TENSOR_FIELDS = ("parameter", "rank", "share_changed", "max_change")


@dataclass(frozen=True)
class Check:
    """The result of one check: `state` is "ok", "cause", or "skipped" (the evidence says why)."""

    name: str
    state: str
    evidence: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Check({self.name}: {self.state}, {self.evidence})"


@dataclass(frozen=True, eq=False)
class Bisection:
    """Why engine and trainer disagree on a prompt: `cause`, `verdict` and `remedy`, and the checks that led there.

    `cause` is one of "state", "tensor", "version", "prefix cache", "sampler", "rule", "dtype", "model", or "" if they
    agree. If a rule was wrong, `rules` are those in force with that one corrected.
    `engine[t]` and `trainer[t]` are log P of `tokens[t]` given the tokens before it (NaN at 0), if they were needed.

    >>> found = link.bisect("Once upon a time", policy)
    >>> found.agrees, found.gap < 1e-3
    (True, True)
    >>> [check.name for check in found.checks if check.state == "ok"][:3]
    ['state', 'tensor', 'version']
    """

    cause: str
    verdict: str
    remedy: str
    checks: tuple[Check, ...]
    tokens: np.ndarray
    engine: np.ndarray | None = None
    trainer: np.ndarray | None = None
    tensors: tuple[TensorDiff, ...] = ()
    rules: Rules | None = field(repr=False, default=None)

    @property
    def agrees(self) -> bool:
        """Was no cause found?"""
        return not self.cause

    @property
    def gap(self) -> float | None:
        """The largest difference in log-probability; None if they were not compared."""
        return (
            None
            if self.engine is None or self.trainer is None
            else largest(self.engine, self.trainer)
        )

    def to_dict(self) -> Plain:
        """Everything as plain values."""
        listed = lambda row: (
            None
            if row is None
            else [None if v != v else float(v) for v in row.tolist()]
        )
        return {
            "cause": self.cause,
            "verdict": self.verdict,
            "remedy": self.remedy,
            "gap": self.gap,
            "checks": [asdict(check) for check in self.checks],
            "tensors": [
                {name: getattr(t, name) for name in TENSOR_FIELDS} for t in self.tensors
            ],
            "rules": None if self.rules is None else self.rules.to_text(),
            "tokens": self.tokens.tolist(),
            "engine": listed(self.engine),
            "trainer": listed(self.trainer),
        }

    def __repr__(self) -> str:
        return f"Bisection({self.cause or 'agree'}: {self.verdict})"

    def __str__(self) -> str:
        marks = {"ok": "✓", "cause": "✗", "skipped": "–"}
        lines = [f"  {marks[c.state]} {c.name}: {c.evidence}" for c in self.checks]
        return "\n".join(
            [self.verdict, *lines, *([f"  → {self.remedy}"] if self.remedy else [])]
        )

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


# The checks -----------------------------------------------------------------------------------------------------------


# The possible causes, in the order they are checked.
CAUSES = (
    "state",
    "tensor",
    "version",
    "prefix cache",
    "sampler",
    "rule",
    "dtype",
    "model",
)
NEUTRAL: Plain = {  # sampler settings that leave log-probabilities unchanged
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "min_tokens": 0,
    "bad_words": None,
    "allowed_token_ids": None,
}
NOISE_FACTOR = 10.0  # a gap beyond this multiple of the engine's own noise is real
# fraction of the remaining time for the rule search; the checks after it need some too
SEARCH_SHARE = 0.8
# two programs round in different orders: up to this multiple of one's error is still rounding
ROUNDING_FACTOR = 4.0
NAMED = 5  # names listed in one line
# the models diverge at the first layer with this multiple of any earlier layer's difference
JUMP = 10.0


def names(listed: Any) -> str:
    """The first few, and how many more."""
    listed = list(listed)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(str(name) for name in listed[:NAMED]) + more


@dataclass(eq=False)
class Found(Exception):
    """Raised by a check that found the cause: `cause` if it is not its own, but another check's."""

    evidence: str
    verdict: str
    remedy: str
    cause: str = ""


class Skipped(Exception):
    """Raised by a check that could not be made, with the reason."""


def bisect(
    link: Link,
    prompt: Any,
    policy: Any = None,
    *,
    params: Any = None,
    max_tokens: int = 16,
    seed: int = 0,
    tolerance: float = 1e-3,
    timeout: float = 600.0,
    **sampling: Any,
) -> Bisection:
    """See `Link.bisect`."""
    deadline = Deadline.of(timeout)
    if not tolerance > 0:
        raise ConfigError(
            f"tolerance must be positive, not {tolerance!r}",
            remedy="in nats; the default is 1e-3",
        )
    if isinstance(prompt, RolloutBatch):
        if len(prompt) != 1:
            raise ConfigError(
                f"bisect takes one sample, not a batch of {len(prompt)} samples",
                remedy="pass one: link.bisect(batch[0])",
            )
        prompt = prompt[0]
    given = prompt if isinstance(prompt, Sample) else None
    _check_arguments(prompt, policy, params)
    policy = find_policy(link) if policy is None and params is None else policy
    if params is None and policy is not None:
        params = policy.params
    search = _Search(
        link=link,
        prompt=prompt if given is None else given.prompt_token_ids.tolist(),
        given=given,
        policy=policy,
        params=params,
        max_tokens=max_tokens,
        seed=seed,
        tolerance=tolerance,
        timeout=deadline,
        sampling=sampling,
    )
    return search.run()


def _check_arguments(prompt: Any, policy: Any, params: Any) -> None:
    """Raise if a tree of parameters, or a policy, is in the place of another argument."""
    call = 'link.bisect("a prompt", policy)'
    if (
        isinstance(prompt, Mapping)
        or hasattr(prompt, "params")
        or not isinstance(prompt, (str, Sequence, Sample, np.ndarray))
    ):
        what = "parameters" if isinstance(prompt, Mapping) else type(prompt).__name__
        raise ConfigError(f"bisect needs a prompt first, and got {what}", remedy=call)
    if policy is not None and not (
        hasattr(policy, "params") and hasattr(policy, "logprobs")
    ):
        raise ConfigError(
            f"policy is {type(policy).__name__}",
            remedy=f"{call}; of another trainer: link.bisect(prompt, params=params)",
        )
    if hasattr(params, "logprobs_fn"):
        raise ConfigError("params is a policy", remedy=call)


def find_policy(link: Link) -> Any:
    """The only live `jv.Policy` whose parameters fit this link; None if there is none."""
    wanted = {
        leaf.path: tuple(leaf.shape)
        for leaf in link.plan.leaves
        if not is_scales(leaf.path)
    }
    shapes = lambda policy: {
        path: tuple(a.shape) for path, a in flatten(policy.params).arrays.items()
    }
    found = [policy for policy in live_policies() if shapes(policy) == wanted]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} policies fit this link",
            remedy="say which: link.bisect(prompt, policy)",
        )
    return found[0] if found else None


@dataclass(kw_only=True, eq=False)
class _Search:
    """One bisection. Each check returns its evidence, or raises `Found` or `Skipped`; `facts` are its numbers."""

    link: Link
    prompt: Any
    given: Sample | None  # if the prompt is one
    policy: Any
    params: Any
    max_tokens: int
    seed: int
    tolerance: float
    timeout: Deadline
    sampling: Mapping[str, Any]
    noise: float = 0.0  # between the engine's drawn and scored log-probabilities
    facts: Plain = field(default_factory=dict)  # of the check in progress
    # of the pool, set by the first check
    status: Plain = field(default_factory=dict)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    engine: np.ndarray | None = None
    trainer: np.ndarray | None = None
    tensors: tuple[TensorDiff, ...] = ()
    rules: Rules | None = None  # corrected rules, if one was wrong
    _rounding: float | None = None
    _seen: str = ""  # what a comparison with the checkpoint showed
    _tried: str = ""  # result of the rule search, for the verdict on the model
    _no_states: str = ""  # why the engine shows no hidden states

    @property
    def pool(self) -> Pool:
        return self.link.pool

    def _draw(self, **settings: Any) -> Sample:
        neutral = {
            "temperature": 1.0,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
        batch = self.pool.generate(
            [self.prompt], progress=False, timeout=self.timeout, **(neutral | settings)
        )
        return batch[0]

    def _scored(self, sample: Sample) -> np.ndarray:
        """log P of prompt and completion in one pass, which does not read the prefix cache."""
        whole = _tokens(sample).tolist()
        return self.pool.score([whole], timeout=self.timeout)[0]

    def _take(self, sample: Sample) -> None:
        self.tokens = _tokens(sample)
        self.engine = self._scored(sample)

    def _by_trainer(self, policy: Any, params: Any) -> np.ndarray:
        return logprobs_of(policy.logprobs(params, self.tokens[None, :]))

    @cached_property
    def _suspects(self) -> list[Alternative]:
        return alternatives_of(self.link.mapping)

    def _by_value(self) -> WrongRule | None:
        """An alternative under which the trainer's values match the checkpoint's, if the rules in force do not."""
        if self.params is None or not self._suspects:
            self._seen = "nothing to compare"
            return None
        checkpoint = checkpoint_of(self.link)
        if checkpoint is None:
            self._seen = "the engine's model has no weights on disk"
            return None
        wrong, self._seen = by_value(
            self._suspects, flatten(self.params).arrays, checkpoint
        )
        return wrong

    def _wrong_rule(self, wrong: WrongRule, gap: float | None) -> Found:
        if wrong.alternative.rules:
            self.rules = wrong.alternative.apply(self.link.mapping.rules)
        verdict, remedy = verdict_of(wrong, gap, bool(self.link.version))
        self.facts = wrong.facts()
        return Found(wrong.evidence, verdict, remedy, "rule")

    def run(self) -> Bisection:
        checks: dict[str, Check] = {}
        cause = verdict = remedy = ""
        for name in CAUSES:
            if cause:
                why = f"not asked: the {cause} explains it"
                checks.setdefault(name, Check(name, "skipped", why))
                continue
            self.facts = {}
            check: Callable[[], str] = getattr(self, name.replace(" ", "_"))
            try:
                checks[name] = Check(name, "ok", check(), self.facts)
            except Skipped as skipped:
                checks[name] = Check(name, "skipped", str(skipped))
            except Found as found:
                cause = found.cause or name
                verdict = found.verdict
                remedy = found.remedy
                why = f"not asked: the {cause} explains it"
                checks[name] = Check(name, "skipped", why)
                checks[cause] = Check(cause, "cause", found.evidence, self.facts)
        return Bisection(
            cause,
            verdict or self.agreement(),
            remedy,
            tuple(checks[name] for name in CAUSES),
            self.tokens,
            self.engine,
            self.trainer,
            self.tensors,
            self.rules,
        )

    def agreement(self) -> str:
        if self.engine is None or self.trainer is None:
            return "nothing wrong was found on the engine's side; without a trainer its numbers were not compared"
        gap = largest(self.engine, self.trainer)
        return f"engine and trainer agree: {gap:.2g} nats at most over {len(self.tokens)} tokens"

    # The weights: the replicas' state, what is in memory, and which version it is ---------------------------------

    def state(self) -> str:
        """Is every replica ready, clean and running?"""
        self.status = self.pool.status(timeout=self.timeout)
        for r in self.status["replicas"]:
            for flag, wrong, remedy in (
                (
                    "dirty",
                    "is dirty: it holds parts of two versions",
                    "link.sync(params)",
                ),
                (
                    "stale",
                    "missed the last sync and is not served from",
                    "link.sync(params)",
                ),
                ("sleeping", "is asleep", "pool.wake()"),
                ("paused", "is paused", "pool.resume()"),
            ):
                if r[flag]:
                    if flag == "dirty":
                        self._dirty_by_meaning(str(r["replica"]))
                    text = f"{r['replica']} {wrong}"
                    self.facts = {flag: True}
                    raise Found(text, text, remedy)
            if r["state"] != "ready":
                text = f"{r['replica']} is not ready: {r['state']}"
                raise Found(text, text, "pool.wait(), or pool.restart(index)")
        count = len(self.status["replicas"])
        return f"{count} of {count} replicas ready, none dirty, paused or stale"

    def _dirty_by_meaning(self, replica: str) -> None:
        """A failed meaning check marks replicas dirty too: then the cause is the mapping."""
        meaning = self.link.meaning
        if meaning.state != "failed":
            return
        if (wrong := self._by_value()) is not None:
            raise self._wrong_rule(wrong, None)
        text = f"{replica} is dirty because it does not compute what the trainer does: {meaning.why}"
        self.facts = {"how": "function"}
        raise Found(
            text,
            f"wrong rule: {text}",
            'link = lab.connect(params, pool, meaning="off"); link.sync(params); link.bisect(prompt, policy) names it',
            "rule",
        )

    def tensor(self) -> str:
        """Does live memory still hold what the last sync committed?"""
        if not self.link.version:
            raise Skipped("nothing was synced yet: there is no commit to compare with")
        report = self.link.verify(timeout=self.timeout)
        if report.differing:
            shown = names(report.differing)
            self._read_values(report.differing)
            text = f"{len(report.differing)} of {len(report.digests)} digests differ from the last commit: {shown}"
            self.facts = {"differing": list(report.differing)}
            raise Found(
                text + self._largest_change(),
                f"the engine's memory changed after version {self.link.version} was verified: {shown}",
                "link.sync(params) writes it again; if it recurs, something else writes there",
            )
        partly = sum(
            report.evidence.get(how, 0) for how in ("sampled", "loader", "unread")
        )
        note = (
            f"; {partly} of them are packed and were read back in part (report.evidence)"
            if partly
            else ""
        )
        self.facts = {"digests": len(report.digests)}
        return f"all {len(report.digests)} digests of live memory are those of version {report.version}{note}"

    def version(self) -> str:
        """Is it the version that the trainer holds?"""
        mine = self.link.version
        found = {r["replica"]: int(r["version"]) for r in self.status["replicas"]}
        behind = [f"{name} holds {v}" for name, v in found.items() if v != mine]
        if behind:
            text = f"the link's last version is {mine}, but {names(behind)}"
            self.facts = found
            raise Found(text, f"stale version: {text}", "link.sync(params)")
        if self.given is not None and (
            old := sorted(set(self.given.versions.tolist()) - {mine})
        ):
            text = f"tokens of this sample were made by version {names(old)}; the engine holds {mine} now"
            remedy = "compare it with the parameters of that version, or generate again"
            self.facts = {"sample": old, "engine": mine}
            raise Found(text, f"stale version: {text}", remedy)
        if self.params is None:
            return f"every replica holds version {mine}; no trainer was given to compare with"
        report = self.link.verify(self.params, timeout=self.timeout)
        read = {f"{name} (rank {rank})" for name, rank in report.digests}
        differing = [
            entry for entry in report.differing if entry.partition(": ")[2] in read
        ]
        unread = len(report.differing) - len(differing)
        if differing:
            # a sync would make it worse
            if not mine and (wrong := self._by_value()) is not None:
                raise self._wrong_rule(wrong, None)
            self._read_values(differing)
            text = f"{len(differing)} of {len(report.digests)} digests differ from the trainer's parameters now"
            self.facts = {"engine": mine, "differing": differing}
            raise self._stale(f"{text}: {names(differing)}{self._largest_change()}")
        # packed by the engine before the first sync: only its log-probabilities can be compared
        if unread:
            return self._unread(unread)
        return f"every replica holds version {mine}, bit for bit what the rules make of the trainer's parameters"

    def _stale(self, evidence: str) -> Found:
        why = "nothing was ever synced: the engine holds what it loaded itself"
        if self.link.version:
            why = (
                f"the trainer has moved on since version {self.link.version} was synced"
            )
        return Found(evidence, f"stale version: {why}", "link.sync(policy.params)")

    def _unread(self, count: int) -> str:
        text = f"{count} parameters were packed before a first sync and can't be read"
        if self.policy is None:
            raise Skipped(f"{text}; sync once, then bisect again")
        self._take(
            self._draw(skip_reading_prefix_cache=True)
            if self.given is None
            else self.given
        )
        assert self.engine is not None
        self.trainer = self._by_trainer(self.policy, self.params)
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return (
                f"{text}, but the engine's numbers are the trainer's, to {gap:.2g} nats"
            )
        raise self._stale(
            f"{text}; the engine's numbers are {gap:.2g} nats from the trainer's"
        )

    def _read_values(self, differing: Any) -> None:
        """Diff the values of the first tensors that differ, if they can be read."""
        if self.params is None:
            return
        seen: list[TensorDiff] = []
        for entry in differing[:NAMED]:
            name = entry.partition(": ")[2].rpartition(" (rank ")[0]
            if any(t.parameter == name for t in seen):
                continue
            try:
                seen += self.link.diff(name, self.params)
            except JvlabError:  # packed or opaque: only its digest is available
                continue
        self.tensors = tuple(seen)

    def _largest_change(self) -> str:
        if not self.tensors:
            return ""
        worst = max(self.tensors, key=lambda t: t.max_change)
        return f"; the largest change is {worst.max_change:.3g}, in {worst.parameter}"

    # The engine's own log-probabilities ---------------------------------------------------------------------------

    def _own_gap(self, sample: Sample) -> float:
        """The gap between a sample's log-probabilities when drawn and those of the same tokens scored now."""
        count = len(sample.token_ids)
        return largest(sample.logprobs, self._scored(sample)[-count:]) if count else 0.0

    def _beyond(self, gap: float) -> bool:
        return gap > max(self.tolerance, NOISE_FACTOR * self.noise)

    def prefix_cache(self) -> str:
        """Draw the same prompt with and without the cache; scoring never reads it."""
        cached = self._draw()  # first: the uncached draw would overwrite stale entries
        fresh = self._draw(skip_reading_prefix_cache=True)
        self.noise = self._own_gap(fresh)
        self._take(fresh if self.given is None else self.given)
        if not self.pool.facts(self.timeout).prefix_caching:
            return "this engine has no prefix cache"
        gap = self._own_gap(cached)
        numbers = f"{gap:.2g} nats with the cache, {self.noise:.2g} without"
        self.facts = {"with_cache": gap, "without": self.noise}
        if self._beyond(gap):
            raise Found(
                f"drawn against scored: {numbers}",
                f"stale prefix cache: the KV of this prompt was computed by other weights ({numbers})",
                "pool.pause(clear_cache=True); pool.resume() clears it; every jvlab sync does that by itself",
            )
        return f"drawn against scored: {numbers}"

    def sampler(self) -> str:
        """Are the engine's log-probabilities those before temperature, filters and penalties?"""
        mode = self.pool.facts(self.timeout).logprobs_mode
        odd = {
            k: v
            for k, v in self.sampling.items()
            if k not in NEUTRAL or NEUTRAL[k] != v
        }
        if not odd:
            return self._sampler_of_sample()
        written = ", ".join(f"{k}={v!r}" for k, v in odd.items())
        gap = self._own_gap(self._draw(**odd))
        text = f"with {written}: {gap:.2g} nats from the model's own ({mode})"
        if not self._beyond(gap):
            self.facts = {"gap": gap}
            return text
        alone = {
            k: self._own_gap(self._draw(**{k: v}))
            for k, v in odd.items()
            if k in NEUTRAL and len(odd) > 1
        }
        responsible = [k for k, g in alone.items() if self._beyond(g)] or list(odd)
        shown = ", ".join(f"{k}={odd[k]!r}" for k in responsible)
        if alone:
            text += "; alone: " + ", ".join(f"{k} {g:.2g}" for k, g in alone.items())
        remedy = 'launch with engine={"logprobs_mode": "raw_logprobs"}, or roll out without them'
        if responsible == ["temperature"]:
            remedy = f"policy.logprobs(params, tokens, lengths, temperature={odd['temperature']!r}) computes the same"
        self.facts = alone
        raise Found(
            text,
            f"sampler settings: the engine's log-probabilities are those after {shown}, the trainer's those before",
            remedy,
        )

    def _sampler_of_sample(self) -> str:
        if self.given is None or not len(self.given.token_ids):
            raise Skipped(
                "no settings to try: pass those of your rollouts, e.g. temperature=0.7"
            )
        gap = self._own_gap(self.given)
        if self._beyond(gap):
            raise Found(
                f"the sample's log-probabilities are {gap:.2g} nats from the model's own",
                "sampler settings: this sample's log-probabilities are not the model's own for the same tokens",
                "pass the settings it was drawn with, e.g. link.bisect(sample, policy, temperature=0.7): it names them",
            )
        return f"the sample's log-probabilities are the model's own, to {gap:.2g} nats"

    # Engine against trainer: a wrong rule, rounding, or a different model -----------------------------------------

    def rule(self) -> str:
        """Does an alternative rule explain the gap? The bits arrived, but may be in the wrong place."""
        gap = self._gap()
        if gap is not None and gap <= self.tolerance and self.link.version:
            return f"{gap:.2g} nats apart: there is nothing to explain"
        if (wrong := self._by_value()) is not None:
            left = (
                self._by_function().gap(wrong.alternative)
                if gap is not None and gap > self.tolerance
                else None
            )
            raise self._wrong_rule(replace(wrong, gap=left), gap)
        if gap is None:
            raise Skipped(f"no jv.Policy to compute with; by value: {self._seen}")
        if gap <= self._rounding_gap():
            return (
                f"{gap:.2g} nats apart, which rounding explains; by value: {self._seen}"
            )
        if not self._suspects:
            return "the shapes allow no alternative, or the link has no rules"
        search = self._by_function()
        if not search.replaceable:
            raise Skipped(
                "the leaves of these parameters can't be replaced: not a JAX pytree"
            )
        wrong = search.search(self._suspects)
        if wrong is not None:
            raise self._wrong_rule(wrong, gap)
        some = " (all there was time for)" if search.out_of_time else ""
        self._tried = f", and none of {search.tried} alternative rules{some} helps"
        self.facts = {"tried": search.tried}
        text = f"{search.tried} alternative rules tried{some}: under none do trainer and engine agree"
        return f"{text}; by value: {self._seen}"

    def _by_function(self) -> ByFunction:
        assert self.engine is not None
        return ByFunction(
            self.policy,
            self.params,
            self.tokens,
            self.engine,
            self._rounding_gap(),
            Deadline(SEARCH_SHARE * self.timeout.left()),
            self._states,
        )

    def _gap(self) -> float | None:
        """The gap between engine and trainer; None without a policy."""
        if self.policy is None:
            return None
        assert self.engine is not None  # set by the check before
        if self.trainer is None:
            self.trainer = self._by_trainer(self.policy, self.params)
        return largest(self.engine, self.trainer)

    def _rounding_gap(self) -> float:
        """The gap that the two dtypes can explain; the tolerance if they are equal."""
        engine = str(self.status["dtype"])
        if engine == self.policy.compute_dtype:
            return self.tolerance
        if self._rounding is None:
            assert self.trainer is not None
            self._rounding = largest(
                self.trainer,
                self._by_trainer(*_rounded(self.policy, self.params, engine)),
            )
        return ROUNDING_FACTOR * self._rounding + self.tolerance

    def dtype(self) -> str:
        """Does rounding explain the gap?"""
        gap = self._gap()
        if gap is None:
            raise Skipped(
                "no jv.Policy to compute with: pass link.bisect(prompt, policy)"
            )
        engine = str(self.status["dtype"])
        trainer = self.policy.compute_dtype
        self.facts = {"gap": gap, "engine": engine, "trainer": trainer}
        text = f"{gap:.2g} nats between the engine in {engine} and the trainer in {trainer}"
        if gap <= self.tolerance:
            return text
        if engine == trainer:
            return f"{text}: not a matter of dtype"
        explained = self._rounding_gap()
        self.facts["rounding"] = self._rounding
        text += (
            f"; the trainer itself computing in {engine} moves by {self._rounding:.2g}"
        )
        if gap > explained:
            return f"{text}: too little to explain it"
        raise Found(
            text,
            f"dtype: the engine computes in {engine}, the trainer in {trainer}, and rounding explains the gap",
            f'launch with engine={{"dtype": "{trainer}"}}, or correct for it (importance ratios) in the loss',
        )

    def model(self) -> str:
        """Neither weights, rules nor dtype explain the gap: the two models compute differently."""
        if self.engine is None or self.trainer is None:
            raise Skipped("the engine's numbers were not compared with a trainer's")
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return f"the two compute the same, to {gap:.2g} nats"
        apart = np.abs(self.engine - self.trainer)
        first = int(np.argmax(np.nan_to_num(apart) > self.tolerance))
        where = (
            "from the first prediction on, which depends on one token: embeddings, norms or the MLP, not positions"
            if first == 1
            else f"from position {first} on, not before: attention or positions (RoPE), or the context"
        )
        self.facts = {"first": first}
        layers = self._layers()
        part = where.partition(":")[0]
        if "layer" in self.facts:
            part = f"starting in layer {self.facts['layer']}"
        raise Found(
            f"{gap:.2g} nats, {where}; {layers}",
            f"what was sent has arrived{self._tried}: engine and trainer compute differently, {part}",
            "compare config.json of both sides: rope_theta, rms_norm_eps, sliding_window, tied embeddings",
        )

    def _layers(self) -> str:
        """Where the two diverge, if hidden states are available."""
        states = self._states()
        if states is None:
            return f"no layer is named: {self._no_states}"
        mine = np.asarray(self.policy.hidden(self.params, self.tokens[None, :]))[:, 0]
        found = compare_layers(states, mine)
        self.facts |= {"layer": found.layer, "apart": list(found.apart)}
        return f"layer by layer: {found}"

    def _states(self) -> np.ndarray | None:
        """The engine's hidden states; None if they are unavailable (`_no_states` says why)."""
        try:
            return self.pool.hidden(self.tokens.tolist(), timeout=self.timeout)
        except JvlabError as error:
            self._no_states = error.message
            return None


def _tokens(sample: Sample) -> np.ndarray:
    """Prompt and completion."""
    tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids])
    return tokens.astype(np.int32)


def _rounded(policy: Any, params: Any, dtype: str) -> tuple[Any, Any]:
    """The same policy and parameters in another dtype."""
    import jax

    other = policy._like(params, replace(policy.runtime, dtype=dtype))
    return other, jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@dataclass(frozen=True)
class LayerGaps:
    """The relative difference of two models' hidden states after each layer; `layer` is where they diverge."""

    apart: tuple[float, ...]

    @property
    def layer(self) -> int:
        """The first layer that differs much more than all before it; else the one that differs most."""
        floor = 1e-4  # smaller differences are rounding
        for index, value in enumerate(self.apart):
            if value > max(floor, JUMP * max(self.apart[:index], default=0.0)):
                return index
        return int(np.argmax(self.apart))

    def __str__(self) -> str:
        before = (
            f"after layer {self.layer - 1} they are {self.apart[self.layer - 1]:.2g} apart, "
            if self.layer
            else ""
        )
        return f"{before}after layer {self.layer} {self.apart[self.layer]:.2g}"


def compare_layers(engine: np.ndarray, trainer: Any) -> LayerGaps:
    """Per layer, the largest difference divided by the largest value."""
    theirs = np.asarray(trainer, np.float32)
    off = np.abs(engine - theirs).max(axis=(1, 2)) / np.maximum(
        np.abs(theirs).max(axis=(1, 2)), 1e-12
    )
    return LayerGaps(tuple(float(v) for v in off))

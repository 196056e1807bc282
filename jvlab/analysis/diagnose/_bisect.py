"""`bisect`: why engine and trainer disagree. Ordered checks on one prompt, each with evidence; the first cause wins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError
from jvlab.analysis.diagnose._bisect_base import Found
from jvlab.analysis.diagnose._bisect_model import Models
from jvlab.analysis.diagnose._bisect_weights import WeightChecks
from jvlab.analysis.diagnose._bisection import Bisection, Check, largest
from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample

if TYPE_CHECKING:
    from jvlab.sync._link import Link

# The possible causes, in the order they are checked.
CAUSES = ("state", "tensor", "version", "prefix cache", "sampler", "rule", "dtype", "model")
NEUTRAL: dict[str, Any] = {  # sampler settings that leave log-probabilities unchanged
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
        raise ConfigError(f"tolerance must be positive, not {tolerance!r}", remedy="in nats; the default is 1e-3")
    if isinstance(prompt, RolloutBatch):
        if len(prompt) != 1:
            raise ConfigError(
                f"bisect takes one sample, not a batch of {len(prompt)} samples",
                remedy="pass one: link.bisect(batch[0])",
            )
        prompt = prompt[0]
    _check_arguments(prompt, policy, params)
    policy = find_policy(link) if policy is None and params is None else policy
    if params is None and policy is not None:
        params = policy.params
    search = _Search(link, prompt, policy, params, max_tokens, seed, tolerance, deadline, sampling)
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
    if policy is not None and not (hasattr(policy, "params") and hasattr(policy, "logprobs")):
        raise ConfigError(
            f"policy is {type(policy).__name__}",
            remedy=f"{call}; of another trainer: link.bisect(prompt, params=params)",
        )
    if hasattr(params, "logprobs_fn"):
        raise ConfigError("params is a policy", remedy=call)


def find_policy(link: Link) -> Any:
    """The only live `jv.Policy` whose parameters fit this link; None if there is none."""
    module = sys.modules.get("jvlab.trainer._policy")
    if module is None:
        return None
    from jvlab.layout._plan_types import is_scales
    from jvlab.layout._tree import flatten

    wanted = {leaf.path: tuple(leaf.shape) for leaf in link.plan.leaves if not is_scales(leaf.path)}
    shapes = lambda policy: {path: tuple(a.shape) for path, a in flatten(policy.params).arrays.items()}
    found = [policy for policy in list(module.alive) if shapes(policy) == wanted]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} policies fit this link", remedy="say which: link.bisect(prompt, policy)")
    return found[0] if found else None


class _Search(WeightChecks, Models):
    """One bisection. Each check returns its evidence, or raises `Found`."""

    def run(self) -> Bisection:
        steps: dict[str, Callable[[], Check]] = {
            "state": self.state,
            "tensor": self.tensor,
            "version": self.version,
            "prefix cache": self.prefix_cache,
            "sampler": self.sampler,
            "rule": self.rule,
            "dtype": self.dtype,
            "model": self.model,
        }
        checks: list[Check] = []
        cause: Found | None = None
        for name in CAUSES:
            if cause is None:
                try:
                    checks.append(steps[name]())
                    continue
                except Found as found:
                    cause = found
            why = f"not asked: the {cause.check.name} explains it"
            checks.append(cause.check if name == cause.check.name else Check(name, "skipped", why))
        verdict = (cause.check.name, cause.verdict, cause.remedy) if cause else ("", self.agreement(), "")
        return Bisection(*verdict, tuple(checks), self.tokens, self.engine, self.trainer, self.tensors, self.rules)

    def agreement(self) -> str:
        if self.engine is None or self.trainer is None:
            return "nothing wrong was found on the engine's side; without a trainer its numbers were not compared"
        gap = largest(self.engine, self.trainer)
        return f"engine and trainer agree: {gap:.2g} nats at most over {len(self.tokens)} tokens"

    # The engine's own log-probabilities ---------------------------------------------------------------------------

    def _own_gap(self, sample: Sample) -> float:
        """The gap between a sample's log-probabilities when drawn and those of the same tokens scored now."""
        count = len(sample.token_ids)
        return largest(sample.logprobs, self._scored(sample)[-count:]) if count else 0.0

    def _beyond(self, gap: float) -> bool:
        return gap > max(self.tolerance, NOISE_FACTOR * self.noise)

    def prefix_cache(self) -> Check:
        """Draw the same prompt with and without the cache; scoring never reads it."""
        cached = self._draw()  # first: the uncached draw would overwrite stale entries
        fresh = self._draw(skip_reading_prefix_cache=True)
        self.noise = self._own_gap(fresh)
        self._take(fresh if self.given is None else self.given)
        if not self.pool._facts(self.timeout).prefix_caching:
            return Check("prefix cache", "ok", "this engine has no prefix cache")
        gap = self._own_gap(cached)
        numbers = f"{gap:.2g} nats with the cache, {self.noise:.2g} without"
        facts = {"with_cache": gap, "without": self.noise}
        if self._beyond(gap):
            raise Found(
                Check("prefix cache", "cause", f"drawn against scored: {numbers}", facts),
                f"stale prefix cache: the KV of this prompt was computed by other weights ({numbers})",
                "pool.pause(clear_cache=True); pool.resume() clears it; every jvlab sync does that by itself",
            )
        return Check("prefix cache", "ok", f"drawn against scored: {numbers}", facts)

    def sampler(self) -> Check:
        """Are the engine's log-probabilities those before temperature, filters and penalties?"""
        mode = self.pool._facts(self.timeout).logprobs_mode
        odd = {k: v for k, v in self.sampling.items() if k not in NEUTRAL or NEUTRAL[k] != v}
        if not odd:
            return self._sampler_of_sample()
        written = ", ".join(f"{k}={v!r}" for k, v in odd.items())
        gap = self._own_gap(self._draw(**odd))
        if not self._beyond(gap):
            return Check("sampler", "ok", f"with {written}: {gap:.2g} nats from the model's own ({mode})", {"gap": gap})
        alone = {k: self._own_gap(self._draw(**{k: v})) for k, v in odd.items() if k in NEUTRAL} if len(odd) > 1 else {}
        responsible = [k for k, g in alone.items() if self._beyond(g)] or list(odd)
        shown = ", ".join(f"{k}={odd[k]!r}" for k in responsible)
        each = "; alone: " + ", ".join(f"{k} {g:.2g}" for k, g in alone.items()) if alone else ""
        remedy = 'launch with engine={"logprobs_mode": "raw_logprobs"}, or roll out without them'
        if responsible == ["temperature"]:
            remedy = f"policy.logprobs(params, tokens, lengths, temperature={odd['temperature']!r}) computes the same"
        raise Found(
            Check("sampler", "cause", f"with {written}: {gap:.2g} nats from the model's own ({mode}){each}", alone),
            f"sampler settings: the engine's log-probabilities are those after {shown}, the trainer's those before",
            remedy,
        )

    def _sampler_of_sample(self) -> Check:
        if self.given is None or not len(self.given.token_ids):
            return Check("sampler", "skipped", "no settings to try: pass those of your rollouts, e.g. temperature=0.7")
        gap = self._own_gap(self.given)
        if self._beyond(gap):
            raise Found(
                Check("sampler", "cause", f"the sample's log-probabilities are {gap:.2g} nats from the model's own"),
                "sampler settings: this sample's log-probabilities are not the model's own for the same tokens",
                "pass the settings it was drawn with, e.g. link.bisect(sample, policy, temperature=0.7): it names them",
            )
        return Check("sampler", "ok", f"the sample's log-probabilities are the model's own, to {gap:.2g} nats")

"""Why do engine and trainer disagree? Ordered checks on one prompt, each with its evidence; the first cause wins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._bisection import Bisection, Check, largest
from jvlab._errors import ConfigError, JvlabError
from jvlab.rollout._batch import RolloutBatch, Sample

if TYPE_CHECKING:
    from jvlab._diff import TensorDiff
    from jvlab._link import Link

# What may be found, in the order in which it is looked for.
CAUSES = ("state", "tensor", "version", "prefix cache", "sampler", "dtype", "model")
NEUTRAL: dict[str, Any] = {  # settings under which a sampler leaves log-probabilities alone
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": None, "min_tokens": 0, "bad_words": None, "allowed_token_ids": None,
}  # fmt: skip
OF_NOISE = 10.0  # a gap this many times the engine's own noise is none of it
OF_ROUNDING = 4.0  # two programs round in different orders: so much more than one of them loses is still rounding
NAMED = 5  # names in one line


def bisect(
    link: Link, prompt: Any, policy: Any = None, *, params: Any = None, max_tokens: int = 16, seed: int = 0,
    tolerance: float = 1e-3, timeout: float = 600.0, **sampling: Any,
) -> Bisection:  # fmt: skip
    """See `Link.bisect`."""
    if not tolerance > 0:
        raise ConfigError(f"tolerance must be positive, not {tolerance!r}", remedy="in nats; the default is 1e-3")
    if isinstance(prompt, RolloutBatch):
        if len(prompt) != 1:
            raise ConfigError(f"a batch of {len(prompt)} samples", remedy="pass one of them: link.bisect(batch[0])")
        prompt = prompt[0]
    policy = find_policy(link) if policy is None and params is None else policy
    if params is None and policy is not None:
        params = policy.params
    search = _Search(link, prompt, policy, params, max_tokens, seed, tolerance, timeout, sampling)
    return search.run()


def find_policy(link: Link) -> Any:
    """The one living `jv.Policy` whose parameters this link takes; None if there is none."""
    module = sys.modules.get("jvlab.trainer._policy")
    if module is None:
        return None
    from jvlab.layout._tree import flatten

    wanted = {leaf.path: tuple(leaf.shape) for leaf in link.plan.leaves}
    shapes = lambda policy: {path: tuple(a.shape) for path, a in flatten(policy.params).arrays.items()}
    found = [policy for policy in list(module.alive) if shapes(policy) == wanted]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} policies fit this link", remedy="say which: link.bisect(prompt, policy)")
    return found[0] if found else None


def names(listed: Any) -> str:
    """The first few, and how many more."""
    listed = list(listed)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(str(name) for name in listed[:NAMED]) + more


class _Found(Exception):
    """Carries a cause out of its check."""

    def __init__(self, check: Check, verdict: str, remedy: str) -> None:
        self.check, self.verdict, self.remedy = check, verdict, remedy


class _Search:
    """One bisection. Each check returns its evidence, or raises `_Found`."""

    def __init__(
        self, link: Link, prompt: Any, policy: Any, params: Any, max_tokens: int, seed: int, tolerance: float,
        timeout: float, sampling: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.link, self.pool, self.policy, self.params = link, link.pool, policy, params
        self.given = prompt if isinstance(prompt, Sample) else None
        self.prompt = [int(t) for t in prompt.prompt_token_ids] if self.given is not None else prompt
        self.max_tokens, self.seed, self.tolerance, self.timeout = max_tokens, seed, tolerance, timeout
        self.sampling = dict(sampling)
        self.noise = 0.0  # between the engine's own ways of computing the same numbers
        self.tokens = np.zeros(0, np.int32)
        self.engine: np.ndarray | None = None
        self.trainer: np.ndarray | None = None
        self.tensors: tuple[TensorDiff, ...] = ()

    def run(self) -> Bisection:
        steps: dict[str, Callable[[], Check]] = {
            "state": self.state, "tensor": self.tensor, "version": self.version, "prefix cache": self.prefix_cache,
            "sampler": self.sampler, "dtype": self.dtype, "model": self.model,
        }  # fmt: skip
        checks: list[Check] = []
        cause, verdict, remedy = "", "", ""
        for name in CAUSES:
            if cause:
                checks.append(Check(name, "skipped", f"not asked: the {cause} explains it"))
                continue
            try:
                checks.append(steps[name]())
            except _Found as found:
                cause, verdict, remedy = name, found.verdict, found.remedy
                checks.append(found.check)
        if not cause:
            verdict = self.agreement()
        return Bisection(
            cause, verdict, remedy, tuple(checks), self.tokens, self.engine, self.trainer, self.tensors
        )  # fmt: skip

    def agreement(self) -> str:
        if self.engine is None or self.trainer is None:
            return "nothing wrong was found on the engine's side; without a trainer its numbers were not compared"
        gap = largest(self.engine, self.trainer)
        return f"engine and trainer agree: {gap:.2g} nats at most over {len(self.tokens)} tokens"

    # The weights --------------------------------------------------------------------------------------------------

    def state(self) -> Check:
        """Is every replica ready, clean and running?"""
        self.status = self.pool.status()
        for r in self.status["replicas"]:
            for flag, wrong, remedy in (
                ("dirty", "is dirty: it holds parts of two versions", "link.sync(params)"),
                ("stale", "missed the last sync and is not served from", "link.sync(params)"),
                ("sleeping", "sleeps", "pool.wake()"),
                ("paused", "is paused: it answers nothing", "pool.resume()"),
            ):
                if r[flag]:
                    text = f"{r['replica']} {wrong}"
                    raise _Found(Check("state", "cause", text, {flag: True}), text, remedy)
            if r["state"] != "ready":
                text = f"{r['replica']} is not ready: {r['state']}"
                raise _Found(Check("state", "cause", text), text, "pool.wait(), or pool.restart(index)")
        count = len(self.status["replicas"])
        return Check("state", "ok", f"{count} of {count} replicas ready, none dirty, paused or stale")

    def tensor(self) -> Check:
        """Does live memory still hold what the last sync committed?"""
        if not self.link.version:
            return Check("tensor", "skipped", "nothing was ever synced: there is no commit to compare with")
        report = self.link.verify(timeout=self.timeout)
        if report.differing:
            shown = names(report.differing)
            self._look_at(report.differing)
            text = f"{len(report.differing)} of {len(report.digests)} digests differ from the last commit: {shown}"
            raise _Found(
                Check("tensor", "cause", text + self._values(), {"differing": list(report.differing)}),
                f"the engine's memory changed after version {self.link.version} was verified: {shown}",
                "link.sync(params) writes it again; if it comes back, something else writes there",
            )
        packed = self.link.mapping.summary()["staged"]
        note = f"; {packed} packed ones are known by the digests taken when they were packed" if packed else ""
        text = f"all {len(report.digests)} digests of live memory are those of version {report.version}{note}"
        return Check("tensor", "ok", text, {"digests": len(report.digests)})

    def version(self) -> Check:
        """Is it the version that the trainer holds?"""
        mine = self.link.version
        found = {r["replica"]: int(r["version"]) for r in self.status["replicas"]}
        behind = [f"{name} holds {v}" for name, v in found.items() if v != mine]
        if behind:
            text = f"the link's last version is {mine}, but {names(behind)}"
            raise _Found(Check("version", "cause", text, found), f"stale version: {text}", "link.sync(params)")
        if self.given is not None and (old := sorted({v for v, _, _ in self.given.versions} - {mine})):
            text = f"tokens of this sample were made by version {names(old)}; the engine holds {mine} now"
            remedy = "compare it with the parameters of that version, or generate again"
            raise _Found(
                Check("version", "cause", text, {"sample": old, "engine": mine}), f"stale version: {text}", remedy
            )
        if self.params is None:
            return Check("version", "ok", f"every replica holds version {mine}; no trainer was given to compare with")
        report = self.link.verify(self.params, timeout=self.timeout)
        read = {f"{name} (rank {rank})" for name, rank in report.digests}
        differing = [entry for entry in report.differing if entry.partition(": ")[2] in read]
        unread = len(report.differing) - len(differing)
        if differing:
            self._look_at(differing)
            text = f"{len(differing)} of {len(report.digests)} digests differ from the trainer's parameters now"
            facts = {"engine": mine, "differing": differing}
            check = Check("version", "cause", f"{text}: {names(differing)}{self._values()}", facts)
            raise _Found(check, f"stale version: {self._why_old()}", "link.sync(policy.params)")
        if unread:  # packed by the engine before anybody looked; only its numbers can tell
            return self._unread(unread)
        return Check("version", "ok", f"every replica holds version {mine}, bit for bit the trainer's parameters")

    def _why_old(self) -> str:
        if self.link.version:
            return f"the trainer has moved on since version {self.link.version} was synced"
        return "nothing was ever synced: the engine holds what it loaded itself"

    def _unread(self, count: int) -> Check:
        text = f"{count} parameters were packed before a first sync and can't be read"
        if self.policy is None:
            return Check("version", "skipped", f"{text}; sync once, then ask again")
        self._take(self._draw(skip_reading_prefix_cache=True) if self.given is None else self.given)
        assert self.engine is not None
        self.trainer = self._by_trainer(self.policy, self.params)
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return Check("version", "ok", f"{text}, but the engine's numbers are the trainer's, to {gap:.2g} nats")
        check = Check("version", "cause", f"{text}; the engine's numbers are {gap:.2g} nats from the trainer's")
        raise _Found(check, f"stale version: {self._why_old()}", "link.sync(policy.params)")

    def _look_at(self, differing: Any) -> None:
        """Values of the first tensors that differ, where they can be read."""
        if self.params is None:
            return
        seen: list[TensorDiff] = []
        for entry in differing[:NAMED]:
            name = entry.partition(": ")[2].rpartition(" (rank ")[0]
            if any(t.parameter == name for t in seen):
                continue
            try:
                seen += self.link.diff(name, self.params)
            except JvlabError:  # packed or loaded whole: its digest is all that can be had, and was told
                continue
        self.tensors = tuple(seen)

    def _values(self) -> str:
        if not self.tensors:
            return ""
        worst = max(self.tensors, key=lambda t: t.max_change)
        return f"; the largest change is {worst.max_change:.3g}, in {worst.parameter}"

    # The engine's own numbers -------------------------------------------------------------------------------------

    def _draw(self, **settings: Any) -> Sample:
        neutral = {"temperature": 1.0, "seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}
        batch = self.pool.generate([self.prompt], progress=False, timeout=self.timeout, **(neutral | settings))
        return batch[0]

    def _scored(self, sample: Sample) -> np.ndarray:
        """log P of prompt and completion by one pass over all of it, which reads no cache."""
        whole = np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int32)
        return self.pool.score([whole.tolist()], timeout=self.timeout)[0]

    def _own_gap(self, sample: Sample) -> float:
        """Between the log-probabilities of a sample as it was drawn, and those of the same tokens scored now."""
        count = len(sample.token_ids)
        return largest(sample.logprobs, self._scored(sample)[-count:]) if count else 0.0

    def _beyond(self, gap: float) -> bool:
        return gap > max(self.tolerance, OF_NOISE * self.noise)

    def prefix_cache(self) -> Check:
        """The same prompt with and without the cache; scoring never reads it."""
        cached = self._draw()  # first: what is computed anew would take the place of what is stale
        fresh = self._draw(skip_reading_prefix_cache=True)
        self.noise = self._own_gap(fresh)
        self._take(fresh if self.given is None else self.given)
        if not self.pool._facts().prefix_caching:
            return Check("prefix cache", "ok", "this engine keeps no prefix cache")
        gap = self._own_gap(cached)
        numbers = f"{gap:.2g} nats with the cache, {self.noise:.2g} without"
        facts = {"with_cache": gap, "without": self.noise}
        if self._beyond(gap):
            raise _Found(
                Check("prefix cache", "cause", f"drawn against scored: {numbers}", facts),
                f"stale prefix cache: the KV of this prompt was computed by other weights ({numbers})",
                "pool.pause(clear_cache=True); pool.resume() forgets it; a sync by jvlab does that by itself",
            )
        return Check("prefix cache", "ok", f"drawn against scored: {numbers}", facts)

    def _take(self, sample: Sample) -> None:
        self.tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int32)
        self.engine = self._scored(sample)

    def sampler(self) -> Check:
        """Are the engine's log-probabilities those before temperature, filters and penalties?"""
        mode = self.pool._facts().logprobs_mode
        odd = {k: v for k, v in self.sampling.items() if k not in NEUTRAL or NEUTRAL[k] != v}
        if not odd:
            return self._sampler_of_sample()
        written = ", ".join(f"{k}={v!r}" for k, v in odd.items())
        gap = self._own_gap(self._draw(**odd))
        if not self._beyond(gap):
            return Check("sampler", "ok", f"with {written}: {gap:.2g} nats from the model's own ({mode})", {"gap": gap})
        alone = {k: self._own_gap(self._draw(**{k: v})) for k, v in odd.items() if k in NEUTRAL} if len(odd) > 1 else {}
        guilty = [k for k, g in alone.items() if self._beyond(g)] or list(odd)
        shown = ", ".join(f"{k}={odd[k]!r}" for k in guilty)
        each = "; alone: " + ", ".join(f"{k} {g:.2g}" for k, g in alone.items()) if alone else ""
        remedy = 'launch with engine={"logprobs_mode": "raw_logprobs"}, or roll out without them'
        if guilty == ["temperature"]:
            remedy = f"policy.logprobs(params, tokens, lengths, temperature={odd['temperature']!r}) computes the same"
        raise _Found(
            Check("sampler", "cause", f"with {written}: {gap:.2g} nats from the model's own ({mode}){each}", alone),
            f"sampler settings: the engine's log-probabilities are those after {shown}, the trainer's those before",
            remedy,
        )

    def _sampler_of_sample(self) -> Check:
        if self.given is None or not len(self.given.token_ids):
            return Check("sampler", "skipped", "no settings to try: pass those of your rollouts, e.g. temperature=0.7")
        gap = self._own_gap(self.given)
        if self._beyond(gap):
            raise _Found(
                Check("sampler", "cause", f"the sample's log-probabilities are {gap:.2g} nats from the model's own"),
                "sampler settings: this sample's log-probabilities are not the model's own for the same tokens",
                "pass the settings it was drawn with, e.g. link.bisect(sample, policy, temperature=0.7): it names them",
            )
        return Check("sampler", "ok", f"the sample's log-probabilities are the model's own, to {gap:.2g} nats")

    # Engine against trainer ---------------------------------------------------------------------------------------

    def dtype(self) -> Check:
        """Does rounding explain what is left?"""
        if self.policy is None:
            return Check("dtype", "skipped", "no jv.Policy to compute with: pass link.bisect(prompt, policy)")
        assert self.engine is not None  # taken by the check before
        self.trainer = self._by_trainer(self.policy, self.params)
        gap = largest(self.engine, self.trainer)
        engine, trainer = str(self.status["dtype"]), self.policy.compute_dtype
        facts = {"gap": gap, "engine": engine, "trainer": trainer}
        text = f"{gap:.2g} nats between the engine in {engine} and the trainer in {trainer}"
        if gap <= self.tolerance:
            return Check("dtype", "ok", text, facts)
        if engine == trainer:
            return Check("dtype", "ok", f"{text}: not a matter of dtype", facts)
        rounding = largest(self.trainer, self._by_trainer(*_rounded(self.policy, self.params, engine)))
        facts["rounding"] = rounding
        text += f"; the trainer itself computing in {engine} moves by {rounding:.2g}"
        if gap > OF_ROUNDING * rounding + self.tolerance:
            return Check("dtype", "ok", f"{text}: too little to explain it", facts)
        raise _Found(
            Check("dtype", "cause", text, facts),
            f"dtype: the engine computes in {engine}, the trainer in {trainer}, and rounding explains the gap",
            f'launch with engine={{"dtype": "{trainer}"}}, or correct for it (importance ratios) in the loss',
        )

    def _by_trainer(self, policy: Any, params: Any) -> np.ndarray:
        row = np.asarray(policy.logprobs(params, self.tokens[None, :]), np.float32)[0].copy()
        row[0] = np.nan
        return row

    def model(self) -> Check:
        """Equal weights, equal dtype, other numbers: the two programs differ."""
        if self.engine is None or self.trainer is None:
            return Check("model", "skipped", "the engine's numbers were not compared with a trainer's")
        gap = largest(self.engine, self.trainer)
        if gap <= self.tolerance:
            return Check("model", "ok", f"the two compute the same, to {gap:.2g} nats")
        apart = np.abs(self.engine - self.trainer)
        first = int(np.argmax(np.nan_to_num(apart) > self.tolerance))
        where = (
            "from the first prediction on, which knows one token only: embeddings, norms or the MLP, not the positions"
            if first == 1 else f"from place {first} on, not before: attention or positions (RoPE), or the context"
        )  # fmt: skip
        layers, facts = self._layers()
        part = f"they part in layer {facts['layer']}" if facts else f"they part {where.partition(':')[0]}"
        verdict = f"the same weights, and other numbers: engine and trainer compute differently, {part}"
        raise _Found(
            Check("model", "cause", f"{gap:.2g} nats, {where}; {layers}", {"first": first, **facts}),
            verdict,
            "compare config.json of both sides: rope_theta, rms_norm_eps, sliding_window, tied embeddings",
        )

    def _layers(self) -> tuple[str, dict[str, Any]]:
        """Layer by layer, where hidden states can be had."""
        from jvlab._hidden import parting

        try:
            states = self.pool.hidden(self.tokens.tolist(), timeout=self.timeout)
        except JvlabError as error:
            return f"no layer is named: {error.message}", {}
        found = parting(states, np.asarray(self.policy.hidden(self.params, self.tokens[None, :]))[:, 0])
        return f"layer by layer: {found}", {"layer": found.layer, "apart": list(found.apart)}


def _rounded(policy: Any, params: Any, dtype: str) -> tuple[Any, Any]:
    """The same policy and parameters in another dtype."""
    import dataclasses

    import jax

    runtime = dataclasses.replace(policy.runtime, dtype=dtype)
    other = type(policy)(
        policy.config, params, policy.mesh, runtime, policy.source, policy.hf_config, policy._tensors, policy._bindings
    )
    return other, jax.tree.map(lambda leaf: leaf.astype(dtype), params)

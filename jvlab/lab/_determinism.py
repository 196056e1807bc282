"""Determinism: the launch settings of `deterministic=True`, and a measurement of their effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError
from jvlab.lab import _prompts
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.record._sample import Sample


def launch_settings(
    device: str,
    engine: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    deterministic: bool,
    speculative: Mapping[str, Any] | None,
    latent_attention: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments and environment for these switches; what the caller gave explicitly takes precedence.

    `latent_attention`: the model uses multi-head latent attention (DeepSeek), which has kernels of its own.
    """
    engine = dict(engine or {})
    env = dict(env or {})
    if speculative is not None:
        if "speculative_config" in engine:
            raise ConfigError(
                "speculative is given twice",
                remedy="leave speculative_config out of engine={...}",
            )
        engine["speculative_config"] = dict(speculative)
    if not deterministic:
        return engine, env
    if device == "cuda":
        # FlashAttention 3 uses a different kernel variant for a step with a long query: a token decoded in the same
        # step as a prefill, or after a cached prefix, then has different bits (seen on an H200, head size 64).
        # vLLM's Triton attention has a single variant.
        attention = "TRITON_MLA" if latent_attention else "TRITON_ATTN"
        given = "attention_backend" in engine or "attention_config" in engine
        ours = {"seed": 0} if given else {"seed": 0, "attention_backend": attention}
        return {**ours, **engine}, {"VLLM_BATCH_INVARIANT": "1", **env}
    # No batch-invariant kernels on a CPU: how a row is summed depends on how many rows are computed together. So
    # requests are computed one at a time and without cached prefixes.
    return {"seed": 0, "max_num_seqs": 1, "enable_prefix_caching": False, **engine}, env


@dataclass(frozen=True)
class Case:
    """One way to run the prompts, compared with running each of them alone."""

    name: str
    prompts: int
    equal: int  # prompts whose tokens are the same
    same_bits: int  # prompts whose tokens and log-probabilities are bitwise equal
    gap: float  # largest log-probability difference up to the first token that differs
    first: int | None  # the first token that differs, over all prompts

    @property
    def exact(self) -> bool:
        return self.same_bits == self.prompts


@dataclass(frozen=True, repr=False)
class DeterminismReport:
    """What `pool.check_determinism()` measured. `exact` means bitwise, `tokens_equal` only the tokens.

    >>> report = pool.check_determinism([[5, 6, 7], [8, 9]], max_tokens=4, batches=(2,))
    >>> report
    DeterminismReport(2 prompts × 4 tokens, 3 ways: ...)
    >>> [case.name for case in report.cases]
    ['alone again', 'in batches of 2', 'in batches of 2, last first']
    """

    cases: tuple[Case, ...]
    prompts: int
    max_tokens: int
    sampling: Mapping[str, Any]
    device: str
    version: int
    # `pool.score` of the same tokens against the sampler; None if not comparable
    scored: Case | None = None
    # known causes of differences on this engine; empty if all is exact
    causes: tuple[str, ...] = ()

    @property
    def tokens_equal(self) -> bool:
        """Did every prompt give the same tokens in every case?"""
        return all(case.equal == case.prompts for case in self.cases)

    @property
    def exact(self) -> bool:
        """Were tokens and log-probabilities bitwise equal in every case?"""
        return all(case.exact for case in self.cases)

    @property
    def score_exact(self) -> bool | None:
        """Did `pool.score` give the sampler's log-probabilities, bitwise? None if the two are not comparable."""
        return None if self.scored is None else self.scored.exact

    @property
    def largest_gap(self) -> float:
        """The largest difference of one token's log-probability between cases with equal prefixes."""
        return max((case.gap for case in self.cases), default=0.0)

    def __repr__(self) -> str:
        found = (
            "equal to the bit"
            if self.exact
            else "tokens equal"
            if self.tokens_equal
            else "tokens differ"
        )
        gap = "" if self.exact else f", largest logprob gap {self.largest_gap:.1e}"
        size = (
            f"{self.prompts} prompts × {self.max_tokens} tokens, {len(self.cases)} ways"
        )
        score = ""
        if self.scored is not None:
            score = (
                "; scored the same"
                if self.scored.exact
                else f"; scored within {self.scored.gap:.1e}"
            )
        return f"DeterminismReport({size}: {found}{gap}{score})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def check(
    pool: Pool,
    prompts: Any = None,
    *,
    max_tokens: int = 32,
    batches: Sequence[int] = (2, 4, 8),
    repeats: int = 2,
    timeout: float = 600.0,
    **sampling: Any,
) -> DeterminismReport:
    """Run the prompts one at a time, then in every other way, and compare."""
    if repeats < 1 or any(size < 1 for size in batches):
        raise ConfigError(
            "repeats and batch sizes must be at least 1",
            remedy="leave them out for the defaults",
        )
    deadline = Deadline.of(timeout)
    facts = pool.facts(deadline)
    listed = (
        _prompts.as_list(prompts)
        if prompts is not None
        else default_prompts(facts.vocab_size, facts.max_model_len)
    )
    chosen = {
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
        **sampling,
        "max_tokens": max_tokens,
    }
    replicas = [r.replica for r in pool.snapshot.replicas if r.state == pb.READY]
    alone = [[i] for i in range(len(listed))]
    run = lambda home, groups: _run(pool, home, listed, groups, chosen, deadline)
    reference = run(replicas[0], alone)
    cases = []
    for name, home, groups in ways(len(listed), batches, repeats, replicas):
        cases.append(compare(name, reference, run(home, groups)))
    versions = {v for sample in reference for v in sample.versions.tolist()}
    scored = _scored(pool, reference, deadline) if comparable(chosen) else None
    device = pool.snapshot.device
    why = causes(device, facts, cases, scored)
    return DeterminismReport(
        tuple(cases),
        len(listed),
        max_tokens,
        chosen,
        device,
        max(versions, default=0),
        scored,
        why,
    )


def comparable(sampling: Mapping[str, Any]) -> bool:
    """Whether the sampler's log-probabilities are the raw model's, like those of `pool.score`."""
    harmless = {
        "temperature",
        "seed",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
    }
    return sampling.get("temperature") == 1.0 and set(sampling) <= harmless


def _scored(pool: Pool, reference: Sequence[Sample], deadline: Deadline) -> Case:
    """Compare the log-probabilities of `pool.score` for the sampled tokens with the sampler's."""
    whole = [
        [*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
        for sample in reference
    ]
    scores = pool.score(whole, timeout=deadline)
    gap = 0.0
    same = 0
    for sample, row in zip(reference, scores.logprobs, strict=True):
        mine = np.asarray(row[-len(sample.token_ids) :], sample.logprobs.dtype)
        same += np.array_equal(mine, sample.logprobs)
        gap = max(gap, float(np.abs(mine - sample.logprobs).max(initial=0.0)))
    return Case("scored", len(reference), len(reference), int(same), gap, None)


def causes(
    device: str, facts: Any, cases: Sequence[Case], scored: Case | None = None
) -> tuple[str, ...]:
    """Known causes of bitwise differences on such an engine, if there were any. `facts`: an engine's."""
    differing = [
        case.name for case in (*cases, *([scored] if scored else [])) if not case.exact
    ]
    if not differing:
        return ()
    any_case = lambda start: any(name.startswith(start) for name in differing)
    backend = facts.attention_backend or "vLLM's own choice of attention"
    known = [
        (
            device == "cuda" and not facts.batch_invariant,
            "batch-invariant kernels are off, so sums are ordered by the batch: launch(deterministic=True)",
        ),
        (
            device == "cuda" and not facts.attention_backend.startswith("TRITON"),
            f"{backend}: its kernel changes with the longest query of a step, so a prefill beside a token, or a cached "
            "prefix, changes bits: leave attention_backend to launch(deterministic=True)",
        ),
        (
            device == "cpu" and facts.max_num_seqs > 1 and any_case("in batches"),
            "a CPU has no batch-invariant kernels, so sums are ordered by the batch: launch(deterministic=True)",
        ),
        (
            device == "cpu" and facts.prefix_caching and any_case("alone"),
            "the prefix cache: only the end of a repeated prompt is computed: enable_prefix_caching=False",
        ),
        (
            device == "cpu" and any_case("scored"),
            "a score is one prefill, and on a CPU its kernels order sums differently from a decoding step",
        ),
        (
            bool(facts.speculative),
            f"drafts ({facts.speculative}): several tokens are checked in one step: launch without speculative=",
        ),
        (
            all(name.startswith("alone on") for name in differing),
            "replicas differ from each other: other hardware, or another build",
        ),
    ]
    found = tuple(text for applies, text in known if applies)
    return found or (
        "no known cause applies: compare versions and arguments of the engines",
    )


def ways(
    count: int, batches: Sequence[int], repeats: int, replicas: Sequence[str]
) -> Iterator[tuple[str, str, list[list[int]]]]:
    """(name, replica, groups of prompts sent together) of every run after the first."""
    home = replicas[0]
    order = list(range(count))
    alone = [[i] for i in order]
    for k in range(1, repeats):
        yield "alone again" if k == 1 else f"alone again ({k})", home, alone
    for size in batches:
        cut = lambda row, size=size: [row[i : i + size] for i in range(0, count, size)]
        yield f"in batches of {size}", home, cut(order)
        yield f"in batches of {size}, last first", home, cut(order[::-1])
    for other in replicas[1:]:
        yield f"alone on {other}", other, alone


def _run(
    pool: Pool,
    home: str,
    prompts: list[Any],
    groups: list[list[int]],
    sampling: Mapping[str, Any],
    deadline: Deadline,
) -> list[Sample]:
    """The sample of each prompt; the prompts of a group are sent together, one group after the other."""
    found: dict[int, Sample] = {}
    for group in groups:
        chosen = [prompts[i] for i in group]
        batch = pool.generate(
            chosen, replica=home, progress=False, timeout=deadline, **sampling
        )
        found |= dict(zip(group, batch, strict=True))
    return [found[i] for i in range(len(prompts))]


def compare(name: str, reference: Sequence[Sample], samples: Sequence[Sample]) -> Case:
    """Compare a run with the reference, prompt by prompt."""
    equal = same_bits = 0
    gap = 0.0
    first = None
    for one, other in zip(reference, samples, strict=True):
        if set(one.versions.tolist()) != set(other.versions.tolist()):
            raise ConfigError(
                "the weights changed during the check",
                remedy="check while no sync runs",
            )
        size = min(len(one.token_ids), len(other.token_ids))
        differ = np.flatnonzero(one.token_ids[:size] != other.token_ids[:size])
        stop = int(differ[0]) if len(differ) else size
        same = stop == len(one.token_ids) == len(other.token_ids)
        equal += same
        same_bits += same and np.array_equal(one.logprobs, other.logprobs)
        if not same:
            first = stop if first is None else min(first, stop)
        gap = max(
            gap,
            float(np.abs(one.logprobs[:stop] - other.logprobs[:stop]).max(initial=0.0)),
        )
    return Case(name, len(reference), equal, int(same_bits), gap, first)


def default_prompts(vocabulary: int, longest: int) -> list[list[int]]:
    """Eight fixed prompts of random tokens, short and long."""
    random = np.random.default_rng(0)
    lengths = [min(n, max(1, longest // 4)) for n in (5, 9, 17, 33, 64, 100, 150, 300)]
    return [random.integers(0, vocabulary, n).tolist() for n in lengths]

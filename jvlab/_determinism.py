"""Determinism: what one switch sets at launch, and a measurement of what it brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _prompts
from jvlab._errors import ConfigError
from jvlab.control import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab._pool import Pool
    from jvlab.rollout._batch import Sample


def launch_settings(
    device: str,
    engine: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    deterministic: bool,
    speculative: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments and environment with the switches' settings under what the caller gave by name."""
    engine, env = dict(engine or {}), dict(env or {})
    if speculative is not None:
        if "speculative_config" in engine:
            raise ConfigError("speculative is given twice", remedy="leave speculative_config out of engine={...}")
        engine["speculative_config"] = dict(speculative)
    if not deterministic:
        return engine, env
    if device == "cuda":
        return {"seed": 0, **engine}, {"VLLM_BATCH_INVARIANT": "1", **env}
    # No batch-invariant kernels here: how a row is summed depends on how many rows are computed together. So each
    # request is computed alone, and from its first token, as if it were the only one.
    return {"seed": 0, "max_num_seqs": 1, "enable_prefix_caching": False, **engine}, env


@dataclass(frozen=True)
class Case:
    """One way to run the prompts, against each of them alone."""

    name: str
    prompts: int
    equal: int  # prompts whose tokens are the same
    same_bits: int  # prompts whose tokens and log-probabilities are the same, to the bit
    gap: float  # largest difference of a log-probability, up to the first token that differs
    first: int | None  # the first token that differs, over all prompts

    @property
    def exact(self) -> bool:
        return self.same_bits == self.prompts


@dataclass(frozen=True, repr=False)
class DeterminismReport:
    """What `pool.check_determinism()` measured. `exact` means to the bit, `tokens_equal` only the tokens.

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

    @property
    def tokens_equal(self) -> bool:
        """Every prompt gave the same tokens in every case."""
        return all(case.equal == case.prompts for case in self.cases)

    @property
    def exact(self) -> bool:
        """The log-probabilities were equal too, to the bit."""
        return all(case.exact for case in self.cases)

    @property
    def largest_gap(self) -> float:
        """Between log-probabilities of one token in two cases, while what came before it was equal."""
        return max((case.gap for case in self.cases), default=0.0)

    def __repr__(self) -> str:
        found = "equal to the bit" if self.exact else "tokens equal" if self.tokens_equal else "tokens differ"
        gap = "" if self.exact else f", largest logprob gap {self.largest_gap:.1e}"
        size = f"{self.prompts} prompts × {self.max_tokens} tokens, {len(self.cases)} ways"
        return f"DeterminismReport({size}: {found}{gap})"

    def _repr_html_(self) -> str:
        from jvlab.views._determinism_view import report_html

        return report_html(self)


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
    """Run the prompts alone, then in every other way, and compare."""
    if repeats < 1 or any(size < 1 for size in batches):
        raise ConfigError("repeats and batch sizes must be at least 1", remedy="leave them out for the defaults")
    facts = pool._facts()
    listed = (
        _prompts.as_list(prompts) if prompts is not None else default_prompts(facts.vocab_size, facts.max_model_len)
    )
    chosen = {"temperature": 1.0, "seed": 0, "ignore_eos": True, **sampling, "max_tokens": max_tokens}
    replicas = [r.replica for r in pool._snapshot.replicas if r.state == pb.READY]
    alone = [[i] for i in range(len(listed))]
    run = lambda home, groups: _run(pool, home, listed, groups, chosen, timeout)
    reference = run(replicas[0], alone)
    cases = []
    for name, home, groups in ways(len(listed), batches, repeats, replicas):
        cases.append(compare(name, reference, run(home, groups)))
    versions = {v for sample in reference for v, _, _ in sample.versions}
    return DeterminismReport(
        tuple(cases), len(listed), max_tokens, chosen, pool._snapshot.device, max(versions, default=0)
    )


def ways(
    count: int, batches: Sequence[int], repeats: int, replicas: Sequence[str]
) -> Iterator[tuple[str, str, list[list[int]]]]:
    """(name, replica, groups of prompts that are sent together) of every run after the first."""
    home, order = replicas[0], list(range(count))
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
    pool: Pool, home: str, prompts: list[Any], groups: list[list[int]], sampling: Mapping[str, Any], timeout: float
) -> list[Sample]:
    """The sample of each prompt; the prompts of a group are sent together, one group after the other."""
    found: dict[int, Sample] = {}
    for group in groups:
        chosen = [prompts[i] for i in group]
        start = pool._start(chosen, 1, 0, sampling)
        start.home = home
        batch = pool._client.loop.run(pool._collect(start, chosen, False, timeout))
        found |= dict(zip(group, batch, strict=True))
    return [found[i] for i in range(len(prompts))]


def compare(name: str, reference: Sequence[Sample], samples: Sequence[Sample]) -> Case:
    """How far a run is from the reference, prompt by prompt."""
    equal = same_bits = 0
    gap, first = 0.0, None
    for one, other in zip(reference, samples, strict=True):
        if one.versions != other.versions and {v for v, _, _ in one.versions} != {v for v, _, _ in other.versions}:
            raise ConfigError("the weights changed during the check", remedy="check while no sync runs")
        size = min(len(one.token_ids), len(other.token_ids))
        differ = np.flatnonzero(one.token_ids[:size] != other.token_ids[:size])
        stop = int(differ[0]) if len(differ) else size
        same = stop == len(one.token_ids) == len(other.token_ids)
        equal += same
        same_bits += same and np.array_equal(one.logprobs, other.logprobs)
        if not same:
            first = stop if first is None else min(first, stop)
        gap = max(gap, float(np.abs(one.logprobs[:stop] - other.logprobs[:stop]).max(initial=0.0)))
    return Case(name, len(reference), equal, int(same_bits), gap, first)


def default_prompts(vocabulary: int, longest: int) -> list[list[int]]:
    """Eight prompts of random tokens, short and long, the same each time."""
    random = np.random.default_rng(0)
    lengths = [min(n, max(1, longest // 4)) for n in (5, 9, 17, 33, 64, 100, 150, 300)]
    return [random.integers(0, vocabulary, n).tolist() for n in lengths]

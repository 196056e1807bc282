"""State shared by the checks of a bisection: the prompt, both sides' log-probabilities, alternative rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab.analysis.diagnose._bisection import Check
from jvlab.record._sample import Sample

if TYPE_CHECKING:
    from jvlab.analysis.diagnose._rule_search import Finding
    from jvlab.layout.rules._alternative import Alternative
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._link import Link

NAMED = 5  # names listed in one line


def names(listed: Any) -> str:
    """The first few, and how many more."""
    listed = list(listed)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(str(name) for name in listed[:NAMED]) + more


class Found(Exception):
    """Raised by a check that found the cause. `check.name` says which cause, which may be another check's."""

    def __init__(self, check: Check, verdict: str, remedy: str) -> None:
        self.check, self.verdict, self.remedy = check, verdict, remedy


class Base:
    """The state of one bisection."""

    def __init__(
        self,
        link: Link,
        prompt: Any,
        policy: Any,
        params: Any,
        max_tokens: int,
        seed: int,
        tolerance: float,
        deadline: Deadline,
        sampling: Mapping[str, Any],
    ) -> None:
        self.link, self.pool, self.policy, self.params = link, link.pool, policy, params
        self.given = prompt if isinstance(prompt, Sample) else None
        self.prompt = [int(t) for t in prompt.prompt_token_ids] if self.given is not None else prompt
        self.max_tokens, self.seed, self.tolerance, self.timeout = max_tokens, seed, tolerance, deadline
        self.sampling = dict(sampling)
        self.noise = 0.0  # between the engine's drawn and scored log-probabilities
        self.status: dict[str, Any] = {}  # of the pool, set by the first check
        self.tokens = np.zeros(0, np.int32)
        self.engine: np.ndarray | None = None
        self.trainer: np.ndarray | None = None
        self.tensors: tuple[TensorDiff, ...] = ()
        self.rules: Rules | None = None  # corrected rules, if one was wrong
        self._rounding: float | None = None
        self._seen = ""  # what a comparison with the checkpoint showed

    def _draw(self, **settings: Any) -> Sample:
        neutral = {"temperature": 1.0, "seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}
        batch = self.pool.generate([self.prompt], progress=False, timeout=self.timeout, **(neutral | settings))
        return batch[0]

    def _scored(self, sample: Sample) -> np.ndarray:
        """log P of prompt and completion in one pass, which does not read the prefix cache."""
        whole = np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int32)
        return self.pool.score([whole.tolist()], timeout=self.timeout)[0]

    def _take(self, sample: Sample) -> None:
        self.tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int32)
        self.engine = self._scored(sample)

    def _by_trainer(self, policy: Any, params: Any) -> np.ndarray:
        row = np.asarray(policy.logprobs(params, self.tokens[None, :]), np.float32)[0].copy()
        row[0] = np.nan
        return row

    @cached_property
    def _suspects(self) -> list[Alternative]:
        from jvlab.analysis.diagnose._rule_search import suspects

        return suspects(self.link)

    def _by_value(self) -> Finding | None:
        """An alternative under which the trainer's values match the checkpoint's, if the rules in force do not."""
        from jvlab.analysis.diagnose._rule_search import by_value, checkpoint_of
        from jvlab.layout._tree import flatten

        if self.params is None or not self._suspects:
            self._seen = "nothing to compare"
            return None
        checkpoint = checkpoint_of(self.link)
        if checkpoint is None:
            self._seen = "the engine's model has no weights on disk"
            return None
        wrong, self._seen = by_value(self._suspects, flatten(self.params).arrays, checkpoint)
        return wrong

    def _wrong_rule(self, wrong: Finding, gap: float | None) -> Found:
        from jvlab.analysis.diagnose._rule_search import verdict_of

        if wrong.alternative.rules:
            self.rules = wrong.alternative.apply(self.link.mapping.rules)
        verdict, remedy = verdict_of(wrong, gap, bool(self.link.version))
        return Found(Check("rule", "cause", wrong.evidence, wrong.facts()), verdict, remedy)

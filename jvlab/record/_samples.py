"""One trained or scored completion, whole enough to be scored again: tokens, text, reward, version of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab.record._events import NAN, Event

if TYPE_CHECKING:
    from jvlab.rollout._batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Event):
    """A sample of a run. `versions` are spans (version, start, stop) over `tokens`; `mask` is 1 where a token counts in
    the loss, empty for: all do. `logprobs` are the engine's. `step` is -1 for a sample that was not trained on.
    """

    tag = "sample"
    step: int = -1
    group: int = -1
    index: int = 0  # within its group
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    prompt: str = ""
    text: str = ""
    reward: float = NAN
    advantage: float = NAN
    versions: tuple[tuple[int, int, int], ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    finish_reason: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # temperature and the like: what logprobs depend on

    @classmethod
    def of(cls, sample: Any, *, reward: float = NAN, step: int = -1, **fields: Any) -> SampleRecord:
        """From a `jvlab.Sample` of a rollout batch. `fields` add to what the sample says or replace it: group, ..."""
        logprobs = np.asarray(sample.logprobs, np.float32)
        taken = {
            "actor": sample.replica, "group": sample.prompt_index, "index": sample.sample_index,
            "prompt_tokens": sample.prompt_token_ids, "tokens": sample.token_ids, "prompt": sample.prompt or "",
            "text": sample.text, "versions": sample.versions, "finish_reason": sample.finish_reason,
            # the shortest text that gives a float32 back: a third of the bytes
            "logprobs": () if np.isnan(logprobs).all() else [float(str(x)) for x in logprobs],
        }  # fmt: skip
        return cls(reward=reward, step=step, **(taken | fields))

    @property
    def token_versions(self) -> np.ndarray:
        """The version that produced each token, int64."""
        spans = self.versions
        return np.repeat(np.array([v for v, _, _ in spans], np.int64), [stop - start for _, start, stop in spans])

    def staleness(self, trainer_version: int) -> np.ndarray:
        """Per token: how far its version was behind the trainer's."""
        return trainer_version - self.token_versions

    def __repr__(self) -> str:
        versions = ", ".join(str(v) for v, _, _ in self.versions) or "none"
        return (
            f"SampleRecord(step {self.step}, group {self.group}, sample {self.index}: {len(self.tokens)} tokens, "
            f"reward {self.reward:.3g}, version {versions})"
        )


def batch_of(records: Sequence[SampleRecord], model: str = "") -> RolloutBatch:
    """Records as the batch they once were part of; each (step, group) is a prompt."""
    from jvlab.rollout._batch import RolloutBatch, Sample

    numbers: dict[tuple[int, int], int] = {}
    samples = [
        Sample(
            numbers.setdefault((r.step, r.group), len(numbers)), r.index, np.array(r.prompt_tokens, np.int32),
            np.array(r.tokens, np.int32), np.array(r.logprobs or [NAN] * len(r.tokens), np.float32),
            prompt=f"step {r.step}, group {r.group}: {r.prompt}", text=r.text, finish_reason=r.finish_reason or "stop",
            versions=r.versions, replica=r.actor, reward=None if r.reward != r.reward else r.reward,
        )
        for r in records
    ]  # fmt: skip
    return RolloutBatch(samples, model=model)


def sample_from_json(fields: Mapping[str, Any]) -> SampleRecord:
    """What `to_json` gave."""
    return SampleRecord.from_fields({k: v for k, v in fields.items() if k != "kind"})

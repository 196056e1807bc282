"""One trained or scored completion, complete enough to score again: tokens, text, reward, version of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab.record._events import NAN, Event

if TYPE_CHECKING:
    from jvlab.record._batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Event):
    """A sample of a run. `versions` are spans (version, start, stop) over `tokens`, as in the file; `mask` is 1 where a
    token counts in the loss, empty if all do. `logprobs` are the engine's. `step` is -1 for a sample that was not
    trained on. `token_ids`, `token_versions` and `version_spans` are as in `jv.Sample`.
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
    # temperature and the like: what logprobs depend on
    sampling: dict[str, Any] = field(default_factory=dict)
    # {} if the reward is one number
    reward_parts: dict[str, float] = field(default_factory=dict)
    # which process of the run wrote it, from 0: a later one may have repeated it
    session: int = -1

    @classmethod
    def of(
        cls, sample: Any, *, reward: float = NAN, step: int = -1, **fields: Any
    ) -> SampleRecord:
        """From a `jvlab.Sample` of a rollout batch. `fields` add to the sample's or override them: group, ..."""
        logprobs = np.asarray(sample.logprobs, np.float32)
        taken = {
            "actor": sample.replica,
            "group": sample.prompt_index,
            "index": sample.sample_index,
            "prompt_tokens": sample.prompt_token_ids,
            "tokens": sample.token_ids,
            "prompt": sample.prompt or "",
            "text": sample.text,
            "versions": sample.version_spans,
            "finish_reason": sample.finish_reason,
            "reward_parts": dict(getattr(sample, "reward_parts", None) or {}),
            "logprobs": () if np.isnan(logprobs).all() else shortest(logprobs),
        }
        return cls(reward=reward, step=step, **(taken | fields))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The same as `tokens`."""
        return self.tokens

    @property
    def version_spans(self) -> tuple[tuple[int, int, int], ...]:
        """The same as `versions`."""
        return self.versions

    @property
    def token_versions(self) -> np.ndarray:
        """The version that produced each token, int64."""
        spans = self.versions
        return np.repeat(
            np.array([v for v, _, _ in spans], np.int64),
            [stop - start for _, start, stop in spans],
        )

    def staleness(self, trainer_version: int) -> np.ndarray:
        """Per token: how many versions it was behind the trainer."""
        return trainer_version - self.token_versions

    def __repr__(self) -> str:
        versions = ", ".join(str(v) for v, _, _ in self.versions) or "none"
        return (
            f"SampleRecord(step {self.step}, group {self.group}, sample {self.index}: {len(self.tokens)} tokens, "
            f"reward {self.reward:.3g}, version {versions})"
        )


def shortest(values: np.ndarray) -> list[float]:
    """Float32 numbers as the shortest decimals that round-trip them, `float(str(x))` of each: a third of the bytes.

    By rounding all of them at once to more and more places. The few that need still more, or none before the point,
    are done one by one.
    """
    narrow = np.asarray(values, np.float32)
    wide = narrow.astype(np.float64)
    # not NaN
    found = wide.copy()
    left = np.abs(narrow) < 2**23
    large = np.isfinite(narrow) & ~left
    for places in range(13):
        rounded = np.round(wide, places)
        good = left & (rounded.astype(np.float32) == narrow)
        found[good] = rounded[good]
        left &= ~good
        if not left.any():
            break
    out = found.tolist()
    for i in np.flatnonzero(left | large):
        out[i] = float(str(narrow[i]))
    return out


def current(
    records: Callable[[], Iterable[SampleRecord]], resumed: Sequence[int]
) -> Iterator[SampleRecord]:
    """Those that count: without samples that a later session repeated, or will.

    `records` is read twice, so that they need not fit in memory. `resumed` is, for each session, the step that it
    continued with; -1 for the first. Records of an earlier jvlab have no session: the later of two counts.
    """
    last: dict[tuple[int, int, int], int] = {}
    newest: dict[int, int] = {}
    total = 0
    for total, record in enumerate(records(), 1):
        if record.step >= 0:
            last[record.step, record.group, record.index] = total
        newest[record.group] = max(newest.get(record.group, -1), record.session)
    for number, record in enumerate(records(), 1):
        later = (
            [step for step in resumed[record.session + 1 :] if step >= 0]
            if record.session >= 0
            else []
        )
        if record.step >= 0:
            gone = number < last.get(
                (record.step, record.group, record.index), 0
            ) or record.step >= min(later, default=record.step + 1)
        else:
            gone = bool(later) and newest.get(record.group, -1) > record.session
        if number > total or not gone:
            yield record


def batch_of(records: Sequence[SampleRecord], model: str = "") -> RolloutBatch:
    """Records as the batch they once were part of; each (step, group) is a prompt."""
    from jvlab.record._batch import RolloutBatch
    from jvlab.record._sample import Sample

    numbers: dict[tuple[int, int], int] = {}
    samples = [
        Sample(
            numbers.setdefault((r.step, r.group), len(numbers)),
            r.index,
            np.array(r.prompt_tokens, np.int32),
            np.array(r.tokens, np.int32),
            np.array(r.logprobs or [NAN] * len(r.tokens), np.float32),
            # a chat or token ids: the viewer decodes the tokens
            prompt=f"step {r.step}, group {r.group}: {r.prompt}" if r.prompt else None,
            text=r.text,
            finish_reason=r.finish_reason or "stop",
            versions=r.versions,
            replica=r.actor,
            reward=None if r.reward != r.reward else r.reward,
            reward_parts=r.reward_parts,
        )
        for r in records
    ]
    return RolloutBatch(samples, model=model)


def sample_from_json(fields: Mapping[str, Any]) -> SampleRecord:
    """The inverse of `to_json`."""
    return SampleRecord.from_fields({k: v for k, v in fields.items() if k != "kind"})

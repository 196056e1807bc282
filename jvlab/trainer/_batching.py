"""Samples and rewards as padded arrays of a few fixed shapes, so that a jitted step compiles once per shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jvlab._errors import ConfigError
from jvlab._units import how_many
from jvlab.record._sample import Sample, expert_arrays
from jvlab.trainer._losses import Algorithm, advantages, groups_with_spread

FAILED = ("abort", "error")  # finish reasons of incomplete samples
# of a batch, scored by the engines if none of it is of the current version alone
PROBE_SAMPLES = 4


SHORTEST = 32  # tokens; lengths of arrays grow by half, in multiples of 8
MULTIPLE = 8


@dataclass(frozen=True)
class Buckets:
    """The shapes of training arrays: `rows` samples in a micro-batch, and lengths that grow geometrically."""

    rows: int = 8

    def width(self, tokens: int) -> int:
        """The smallest length that holds `tokens` tokens."""
        length = float(SHORTEST)
        while (width := math.ceil(length / MULTIPLE) * MULTIPLE) < tokens:
            length *= 1.5
        return width

    def parts(self, lengths: np.ndarray) -> Iterator[PackedPart]:
        """The micro-batches: at most `rows` samples of similar length, longest first.

        Every sample is in exactly one. The order depends on the lengths alone, so that sums are reproducible.
        """
        order = np.argsort(-lengths, kind="stable")
        for at in range(0, len(order), self.rows):
            samples = order[at : at + self.rows]
            shape = RowShape(self.rows, self.width(int(lengths[samples[0]])), 1)
            part = packed(lengths, [[sample] for sample in samples.tolist()], shape)
            # some models return NaN for a row without tokens; these do not count for the loss
            part.segments[len(samples) :] = part.segments[0]
            yield part


@dataclass(frozen=True)
class RowShape:
    """The shape of a micro-batch: `count` rows of `length` tokens, each with at most `most` samples."""

    count: int
    length: int
    most: int

    @property
    def tokens(self) -> int:
        return self.count * self.length

    @property
    def samples(self) -> int:
        return self.count * self.most


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Samples laid end to end in rows, or one in each. Their losses are computed as if padded to a row's length.

    `segments` [rows, length] numbers each row's samples from 1, 0 is padding. `samples` are indices into the batch, in
    the order of their rows. `place` [samples, length] is where each token of a sample is in the flattened rows, and
    beyond the last position for what it does not have.
    """

    shape: RowShape
    rows: Sequence[Sequence[int]]  # the samples of each, as far as there are any
    samples: np.ndarray
    segments: np.ndarray
    place: np.ndarray

    @property
    def width(self) -> int:
        return self.shape.length

    @property
    def most(self) -> int:
        return self.shape.samples

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def lay(self, values: np.ndarray) -> np.ndarray:
        """[N, T, …] values of the whole batch in rows, zero on padding."""
        flat = np.zeros((self.segments.size + 1, *values.shape[2:]), values.dtype)
        width = min(values.shape[1], self.place.shape[1])
        flat[self.place[: len(self.samples), :width]] = values[self.samples, :width]
        return flat[:-1].reshape(*self.segments.shape, *values.shape[2:])

    def token_arrays(
        self, batch: TrainBatch, more: Iterable[str] = ()
    ) -> dict[str, np.ndarray]:
        """Tokens in rows, the samples of each row, and where a sample's tokens are.

        `more` names other arrays of the batch with values for each token.
        """
        laid = {name: self.lay(getattr(batch, name)) for name in ("tokens", *more)}
        return {**laid, "segments": self.segments, "place": self.place}


def packed(
    lengths: np.ndarray, rows: Sequence[Sequence[int]], shape: RowShape
) -> PackedPart:
    """These rows of samples as one micro-batch of this shape; rows that are missing are padding."""
    segments = np.zeros((shape.count, shape.length), np.int32)
    place = np.full((shape.samples, shape.length), shape.tokens, np.int32)
    samples: list[int] = []
    for row, of_row in enumerate(rows):
        at = 0
        for number, sample in enumerate(of_row, 1):
            size = int(lengths[sample])
            segments[row, at : at + size] = number
            place[len(samples), :size] = row * shape.length + np.arange(at, at + size)
            samples.append(sample)
            at += size
    return PackedPart(shape, rows, np.asarray(samples, np.int64), segments, place)


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The input of one optimiser step: [N, T] arrays, prompt then completion, padded on the right.

    A log-probability or version at t belongs to the token at t. `loss_mask` marks tokens that the policy generated:
    not prompts, observations or padding. `versions` is -1 where it is False.
    """

    tokens: np.ndarray  # [N, T] int32
    token_mask: np.ndarray  # [N, T] bool: real tokens
    loss_mask: np.ndarray  # [N, T] bool
    engine_logprobs: np.ndarray  # [N, T] float32
    versions: np.ndarray  # [N, T] int32
    advantages: np.ndarray  # [N] float32
    rewards: np.ndarray  # [N] float32
    group_ids: np.ndarray  # [N] int32
    buckets: Buckets = field(default_factory=Buckets)
    excluded: int = 0  # samples without a reward, or incomplete
    dropped: int = 0  # samples dropped by dynamic sampling
    # [N, T] float32; None: taken from the step's own forward pass
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None  # [N, T] float32
    # [N, T, layers, chosen] int16, -1 where none is known; None: no replay
    expert_ids: np.ndarray | None = None
    expert_weights: np.ndarray | None = None  # float32; None: the trainer's own

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, prompt included."""
        return self.token_mask.sum(axis=1)

    @property
    def replayed(self) -> dict[str, np.ndarray]:
        """The experts that training takes from the engine, by name; empty without replay."""
        both = {"expert_ids": self.expert_ids, "expert_weights": self.expert_weights}
        return {name: values for name, values in both.items() if values is not None}

    @property
    def replay_share(self) -> dict[str, float]:
        """With replay, `replayed`: the share of tokens whose experts are the engine's."""
        if self.expert_ids is None:
            return {}
        return {
            "replayed": float((self.expert_ids[..., 0, 0] >= 0)[self.token_mask].mean())
        }

    def with_logprobs(
        self, *, old: np.ndarray | None = None, reference: np.ndarray | None = None
    ) -> TrainBatch:
        """The batch with the old or the reference policy's log-probabilities [N, T], as `TrainStep.score` returns."""
        given = {"old_logprobs": old, "reference_logprobs": reference}
        known = {name: value for name, value in given.items() if value is not None}
        for name, value in known.items():
            if value.shape != self.tokens.shape:
                raise ConfigError(
                    f"{name} of shape {value.shape} for tokens of shape {self.tokens.shape}",
                    remedy="score this batch's tokens: one number per token, padding included",
                )
        return replace(self, **known)

    def __repr__(self) -> str:
        groups = len(np.unique(self.group_ids))
        tokens = int(self.loss_mask.sum())
        omitted = f", {self.excluded} excluded" if self.excluded else ""
        omitted += f", {self.dropped} dropped" if self.dropped else ""
        return f"TrainBatch({how_many(len(self), 'sample')}, {how_many(groups, 'group')}, {tokens} tokens{omitted})"


def pad_rows(
    values: np.ndarray, rows: np.ndarray, width: int, count: int
) -> np.ndarray:
    """Some rows of an array, cut or padded to `width`, and padded with zero rows to `count`."""
    values = values[rows] if values.ndim == 1 else values[rows][:, :width]
    padding = [(0, count - len(rows))] + (
        [(0, max(width - values.shape[1], 0))] if values.ndim > 1 else []
    )
    return np.pad(values, padding + [(0, 0)] * (values.ndim - 2))


def train_batch(
    samples: Sequence[Sample],
    rewards: Sequence[float] | np.ndarray,
    algorithm: Algorithm | None = None,
    buckets: Buckets | None = None,
    group_ids: Sequence[int] | np.ndarray | None = None,
    replay: str = "none",
) -> TrainBatch:
    """A batch for `TrainStep` from samples and their rewards, in the samples' order.

    A sample is excluded, and counted in `excluded`, if its reward is NaN (the reward function failed), if it was
    aborted, or if it failed. Advantages are computed over the rest. With `dynamic_sampling`, groups of equal rewards
    are then dropped. `group_ids` defaults to the samples' prompt_index. With `replay` the batch holds the experts that
    the engine chose ("ids"), and their weights ("full").
    """
    algorithm = algorithm or Algorithm()
    buckets = buckets or Buckets()
    groups = np.array(
        [s.prompt_index for s in samples] if group_ids is None else group_ids, np.int32
    )
    values = np.asarray(rewards, np.float64)
    if values.shape != (len(samples),) or groups.shape != values.shape:
        raise ConfigError(
            f"{how_many(len(samples), 'sample')}, rewards of shape {values.shape}, group ids of shape {groups.shape}",
            remedy="pass one reward and one group id per sample; NaN where there is no reward",
        )
    complete = np.array([s.finish_reason not in FAILED for s in samples], bool)
    good = np.isfinite(values) & complete
    kept = np.flatnonzero(good)
    if algorithm.dynamic_sampling:
        kept = kept[groups_with_spread(values[kept], groups[kept])]
    chosen = [samples[i] for i in kept]
    arrays = _arrays(chosen, buckets)
    return TrainBatch(
        **arrays,
        **expert_arrays(chosen, arrays["tokens"].shape[1], replay),
        advantages=advantages(
            values[kept], groups[kept], algorithm.advantages, algorithm.advantage_eps
        ),
        rewards=values[kept].astype(np.float32),
        group_ids=groups[kept],
        buckets=buckets,
        excluded=int((~good).sum()),
        dropped=int(good.sum()) - len(kept),
    )


def _arrays(samples: Sequence[Sample], buckets: Buckets) -> dict[str, np.ndarray]:
    """The [N, T] arrays, T being the bucket of the longest sample."""
    lengths = [len(s.prompt_token_ids) + len(s.token_ids) for s in samples]
    shape = (len(samples), buckets.width(max(lengths, default=1)))
    tokens = np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    loss = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    versions = np.full(shape, -1, np.int32)
    for row, sample in enumerate(samples):
        start = len(sample.prompt_token_ids)
        stop = lengths[row]
        own = sample.own
        if start == 0 and len(own) and own[0]:
            raise ConfigError(
                f"sample {row} has no prompt, so its first token has no log-probability",
                remedy="give each prompt at least one token, e.g. BOS",
            )
        if not np.isfinite(sample.logprobs[own]).all():
            raise ConfigError(
                f"sample {row} (prompt {sample.prompt_index}) has no log-probability for some of its tokens",
                remedy="generate with log-probabilities: the loss and logprob_gap need them",
                row=row,
            )
        tokens[row, :start] = sample.prompt_token_ids
        tokens[row, start:stop] = sample.token_ids
        mask[row, :stop] = True
        loss[row, start:stop] = own
        logprobs[row, start:stop] = np.where(own, sample.logprobs, 0.0)
        versions[row, start:stop] = np.where(own, sample.token_versions, -1)
    return {
        "tokens": tokens,
        "token_mask": mask,
        "loss_mask": loss,
        "engine_logprobs": logprobs,
        "versions": versions,
    }

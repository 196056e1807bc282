"""`Sample`: one completion with tokens, log-probabilities and the policy version of every token. numpy only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jvlab._errors import ConfigError

# The weight version of each token, and the same as spans (version, start, stop). numpy only.

Spans = tuple[tuple[int, int, int], ...]


def versions_of(given: Any, count: int, **where: object) -> np.ndarray:
    """One version per token, int64 and read-only, from one per token or from spans that cover `count` tokens."""
    remedy = "pass one whole number per token, or contiguous (version, start, stop) from 0 to the number of tokens"
    try:
        array = np.array(given, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        why = f"versions {given!r}: {error}"
        raise ConfigError(why, remedy=remedy, **where) from error
    why = ""
    if array.size and array.ndim == 1:
        if len(array) != count:
            why = f"{len(array)} versions for {count} tokens"
    elif array.size and array.shape[1:] != (3,):
        why = f"versions of shape {array.shape}"
    else:
        spans = array.reshape(-1, 3)
        edges = [0, *spans[:, 2].tolist()]
        follow = spans[:, 1].tolist() == edges[:-1] and edges[-1] == count
        if not follow or (spans[:, 1] >= spans[:, 2]).any():
            told = tuple(map(tuple, spans.tolist()))
            why = f"version spans {told} do not cover {count} tokens once, in order"
        else:
            array = np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1])
    if why:
        raise ConfigError(why, remedy=remedy, **where)
    array.setflags(write=False)
    return array


def spans_of(versions: np.ndarray) -> Spans:
    """Runs of equal versions as (version, start, stop)."""
    if not len(versions):
        return ()
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple((int(versions[a]), a, b) for a, b in itertools.pairwise(edges))


# The experts that an engine chose for each token of some samples, as arrays for a trainer. numpy only.

# own router; the engine's experts; its experts and their weights
REPLAYS = ("none", "ids", "full")


def check_replay(replay: str) -> None:
    """Raise ConfigError unless it is one of REPLAYS."""
    if replay not in REPLAYS:
        raise ConfigError(f"replay={replay!r}", remedy=f"one of {', '.join(REPLAYS)}")


def frozen_routes(
    ids: Any, weights: Any, tokens: int, **where: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Ids as int16 and weights as float32, read-only, both [tokens, layers, chosen]; raises if shapes do not fit."""
    if ids is None and weights is not None:
        raise ConfigError(
            "expert_weights without expert_ids",
            remedy="pass both, or ids alone",
            **where,
        )
    chosen = None if ids is None else np.array(ids, np.int16)
    weighed = None if weights is None else np.array(weights, np.float32)
    for array in (chosen, weighed):
        if array is None or chosen is None:
            continue
        if array.ndim != 3 or array.shape != chosen.shape or len(array) != tokens:
            raise ConfigError(
                f"experts of shape {array.shape} for {tokens} tokens, prompt included",
                remedy="pass [tokens, layers, chosen], -1 where none is known",
                **where,
            )
        array.setflags(write=False)
    return chosen, weighed


def expert_arrays(
    samples: Sequence[Any], width: int, replay: str
) -> dict[str, np.ndarray]:
    """`expert_ids` [N, width, layers, chosen] int16, and for "full" `expert_weights`, float32; nothing for "none".

    -1 where no choice is known: padding, a sample's last token, and prompts found in an engine's prefix cache.
    """
    check_replay(replay)
    if replay == "none" or not samples:
        return {}
    names = ("expert_ids", "expert_weights")[: 1 + (replay == "full")]
    found: dict[str, np.ndarray] = {}
    for name in names:
        rows: list[Any] = [getattr(sample, name, None) for sample in samples]
        missing = next((i for i, row in enumerate(rows) if row is None), None)
        if missing is not None:
            what = "experts" if name == "expert_ids" else "weights of experts"
            raise ConfigError(
                f"replay={replay!r}, but sample {missing} has no {what}",
                remedy='lab.launch(..., engine={"enable_return_routed_experts": True}); weights come from CPUs only',
            )
        out = np.full(
            (len(rows), width, *rows[0].shape[1:]),
            -1 if name == "expert_ids" else 0,
            rows[0].dtype,
        )
        for at, row in enumerate(rows):
            out[at, : len(row)] = row
        found[name] = out
    return found


# ----------------------------------------------------------------------------------------------------

# vLLM's; `Sample.error` says why one failed
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


# arrays of a sample with one number for each token
COLUMNS = {
    "prompt_token_ids": np.int32,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "trainer_logprobs": np.float32,
    "loss_mask": np.bool_,
}


def _frozen(values: object, dtype: type, what: str) -> np.ndarray:
    array = np.array(values, dtype=dtype)
    if array.ndim != 1:
        raise ConfigError(
            f"{what} has shape {array.shape}",
            remedy="pass one number per token",
            shape=array.shape,
        )
    array.setflags(write=False)
    return array


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return one is other if one is None or other is None else one == other
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion of one prompt. `logprobs[t]` is the log-probability of `token_ids[t]`; NaN if not requested.

    `versions[t]` is the weight version that generated it: a weight sync in the middle of a request gives more than one.
    They may be passed as spans (version, start, stop) over the tokens; `version_spans` returns that form.
    `seconds` may hold queued, first_token and total, each measured from the start of the request.
    `expert_ids` and `expert_weights` are the experts that a pool which returns them chose, for every token, prompt
    included: [tokens, layers, chosen]; -1 where none is known (the last token, prompts found in a prefix cache).

    >>> sample = jv.Sample(0, 0, [5, 6], [7, 8, 9], [-0.5, -1.0, -1.5], text="abc", versions=((3, 0, 2), (4, 2, 3)))
    >>> sample.versions.tolist(), sample.mean_logprob
    ([3, 3, 4], -1.0)
    """

    prompt_index: int
    sample_index: int
    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray = None  # type: ignore[assignment]  # None becomes an array of NaN
    prompt: str | None = None
    text: str = ""
    finish_reason: str = "stop"  # one of FINISH_REASONS
    versions: Any = ()  # an int64 array; passed one per token or as spans
    replica: str = ""
    retried: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    reward: float | None = None  # the task's, if it was scored
    trainer_logprobs: np.ndarray | None = None  # see `RolloutBatch.compare`
    # which tokens are the model's own; None: all. Others: logprob 0, version -1
    loss_mask: np.ndarray | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    adapter: tuple[str, int] | None = None  # name and version of the LoRA adapter
    # what `reward` is the sum of; {}: one number
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    expert_ids: np.ndarray | None = None  # int16
    expert_weights: np.ndarray | None = None  # float32

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        where = {"prompt_index": self.prompt_index, "sample_index": self.sample_index}
        for name, kind in COLUMNS.items():
            if (given := getattr(self, name)) is not None:
                put(name, _frozen(given, kind, name))
        count = len(self.token_ids)
        if self.logprobs is None:
            put("logprobs", _frozen(np.full(count, np.nan), np.float32, "logprobs"))
        for name in ("logprobs", "trainer_logprobs", "loss_mask"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise ConfigError(
                    f"{len(values)} {name} for {count} tokens",
                    remedy="pass one per token",
                    **where,
                )
        if self.finish_reason not in FINISH_REASONS:
            raise ConfigError(
                f"finish_reason={self.finish_reason!r}",
                remedy=f"one of {', '.join(FINISH_REASONS)}",
                **where,
            )
        put("seconds", dict(self.seconds))
        put("reward", None if self.reward is None else float(self.reward))
        parts = self.reward_parts or {}
        put("reward_parts", {str(name): float(v) for name, v in parts.items()})
        put("cached_tokens", int(self.cached_tokens or 0))
        if self.adapter is not None:
            name, version = self.adapter
            put("adapter", (str(name), int(version)))
        put("versions", versions_of(self.versions, count, **where))
        length = len(self.prompt_token_ids) + count
        ids, weights = frozen_routes(
            self.expert_ids, self.expert_weights, length, **where
        )
        put("expert_ids", ids)
        put("expert_weights", weights)

    @property
    def token_versions(self) -> np.ndarray:
        """The same as `versions`."""
        return self.versions

    @property
    def version_spans(self) -> Spans:
        """`versions` as (version, start, stop), one per run of tokens from one version."""
        return spans_of(self.versions)

    @property
    def own(self) -> np.ndarray:
        """Which tokens the model generated, bool: all but observations between the turns of a session."""
        if self.loss_mask is not None:
            return self.loss_mask
        return np.ones(len(self.token_ids), bool)

    @property
    def mean_logprob(self) -> float:
        """Mean over the model's own tokens; NaN if there are none."""
        return (
            float(self.logprobs[self.own].mean(dtype=np.float64))
            if self.own.any()
            else float("nan")
        )

    @property
    def gap(self) -> np.ndarray | None:
        """Engine's minus trainer's log-probability of each token; None before `RolloutBatch.compare`."""
        rows = self.trainer_logprobs
        return (
            None
            if rows is None
            else np.where(self.own, self.logprobs - rows, np.float32(0))
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(_equal(value, vars(other)[n]) for n, value in vars(self).items())

    __hash__ = None  # type: ignore[assignment]  # holds arrays and a dict

    def __repr__(self) -> str:
        return (
            f"Sample(prompt {self.prompt_index}, sample {self.sample_index}: {len(self.token_ids)} tokens, "
            f"{self.finish_reason}, version {spans_text(self)}, {shorten(self.text, 40)!r})"
        )


def spans_text(sample: Sample) -> str:
    """The versions of a sample's own tokens, in order, as text."""
    found = [v for v, _, _ in sample.version_spans if v >= 0]
    return ", ".join(str(v) for v, _ in itertools.groupby(found)) or "none"


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters, control characters escaped."""
    line = (
        json.dumps(text, ensure_ascii=False)[1:-1]
        .replace('\\"', '"')
        .replace("\\\\", "\\")
    )
    return line if len(line) <= width else line[: width - 1] + "…"

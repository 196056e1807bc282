"""What a pool generated: samples with tokens, logprobs and the policy version of every token. numpy only."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, overload

import numpy as np

from jvlab._errors import ConfigError

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")  # vLLM's; `Sample.error` says why one failed
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")  # after temperature and filters, or before
SHOWN = 10  # rows of a table


def _frozen(values: object, dtype: type, what: str) -> np.ndarray:
    array = np.array(values, dtype=dtype)
    if array.ndim != 1:
        raise ConfigError(f"{what} has shape {array.shape}", remedy="pass one number per token", shape=array.shape)
    array.setflags(write=False)
    return array


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion of one prompt. `logprobs[t]` is the log-probability of `token_ids[t]`; NaN: none was asked for.

    `versions` are spans (version, start, stop) over the completion's tokens: a weight sync in the middle of a request
    gives more than one. `seconds` may hold queued, first_token and total, each counted from the request's start.

    >>> sample = jv.Sample(0, 0, [5, 6], [7, 8, 9], [-0.5, -1.0, -1.5], text="abc", versions=((3, 0, 2), (4, 2, 3)))
    >>> sample.token_versions.tolist(), sample.mean_logprob
    ([3, 3, 4], -1.0)
    """

    prompt_index: int
    sample_index: int
    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray = None  # type: ignore[assignment]  # made an array of NaN below
    prompt: str | None = None
    text: str = ""
    finish_reason: str = "stop"  # one of FINISH_REASONS
    versions: tuple[tuple[int, int, int], ...] = ()
    replica: str = ""
    retried: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    reward: float | None = None  # what a task gave it, where it was judged
    trainer_logprobs: np.ndarray | None = None  # the trainer's, of the same tokens: see `RolloutBatch.compare`
    loss_mask: np.ndarray | None = None  # which tokens are the model's own; None: all. Others: logprob 0, version -1
    cached_tokens: int = 0  # prompt tokens whose KV the engine had already
    adapter: tuple[str, int] | None = None  # the LoRA adapter it was made with: name and version

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        put("prompt_token_ids", _frozen(self.prompt_token_ids, np.int32, "prompt_token_ids"))
        put("token_ids", _frozen(self.token_ids, np.int32, "token_ids"))
        count = len(self.token_ids)
        given = np.full(count, np.nan) if self.logprobs is None else self.logprobs
        put("logprobs", _frozen(given, np.float32, "logprobs"))
        put("versions", tuple((int(v), int(a), int(b)) for v, a, b in self.versions))
        put("seconds", dict(self.seconds))
        put("reward", None if self.reward is None else float(self.reward))
        if self.trainer_logprobs is not None:
            put("trainer_logprobs", _frozen(self.trainer_logprobs, np.float32, "trainer_logprobs"))
        if self.loss_mask is not None:
            put("loss_mask", _frozen(self.loss_mask, np.bool_, "loss_mask"))
        put("cached_tokens", int(self.cached_tokens or 0))
        put("adapter", None if self.adapter is None else (str(self.adapter[0]), int(self.adapter[1])))
        where = {"prompt_index": self.prompt_index, "sample_index": self.sample_index}
        columns = (("logprobs", given), ("trainer_logprobs", self.trainer_logprobs), ("loss_mask", self.loss_mask))
        for what, values in columns:
            if values is not None and len(values) != count:
                raise ConfigError(f"{len(values)} {what} for {count} tokens", remedy="pass one per token", **where)
        if self.finish_reason not in FINISH_REASONS:
            raise ConfigError(
                f"finish_reason={self.finish_reason!r}", remedy=f"one of {', '.join(FINISH_REASONS)}", **where
            )
        edges = [0, *(stop for _, _, stop in self.versions)]
        starts = [start for _, start, _ in self.versions]
        if starts != edges[:-1] or edges[-1] != count or any(a >= b for _, a, b in self.versions):
            raise ConfigError(
                f"version spans {self.versions} do not cover {count} tokens once, in order",
                remedy="pass (version, start, stop) from 0 on, each start the stop before it, the last stop the count",
                **where,
            )

    @property
    def token_versions(self) -> np.ndarray:
        """The version that produced each token, int64."""
        spans = self.versions
        return np.repeat(np.array([v for v, _, _ in spans], np.int64), [stop - start for _, start, stop in spans])

    @property
    def own(self) -> np.ndarray:
        """Which tokens the model made itself, bool: all, but for observations between the turns of a session."""
        return np.ones(len(self.token_ids), bool) if self.loss_mask is None else self.loss_mask

    @property
    def mean_logprob(self) -> float:
        """Mean over the model's own tokens; NaN if there are none."""
        return float(self.logprobs[self.own].mean(dtype=np.float64)) if self.own.any() else float("nan")

    @property
    def gap(self) -> np.ndarray | None:
        """Engine's minus trainer's log-probability of each token; None before `RolloutBatch.compare`."""
        rows = self.trainer_logprobs
        return None if rows is None else np.where(self.own, self.logprobs - rows, np.float32(0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        arrays = ("prompt_token_ids", "token_ids", "logprobs", "trainer_logprobs", "loss_mask")
        return all(
            _same(getattr(self, n), getattr(other, n)) if n in arrays else getattr(self, n) == getattr(other, n)
            for n in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays and a dict

    def __repr__(self) -> str:
        return (
            f"Sample(prompt {self.prompt_index}, sample {self.sample_index}: {len(self.token_ids)} tokens, "
            f"{self.finish_reason}, version {spans_text(self)}, {shorten(self.text, 40)!r})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBatch(Sequence[Sample]):
    """Samples in the order of their prompts, with what is common to them. A list of `Sample`s to index, slice and add.

    `seconds` is the wall time of the whole generation; a slice has none. `notes` say what happened on the way: retries,
    replicas lost.

    >>> sample = lambda k: jv.Sample(0, k, [5, 6], [7, 8], [-0.5, -1.0], text="ab", versions=((3, 0, 2),))
    >>> batch = jv.RolloutBatch([sample(0), sample(1)]).with_rewards([0.0, 1.0])
    >>> batch
    RolloutBatch(2 samples, 1 prompts, 4 tokens, version 3, 2 stop)
    >>> batch.arrays(pad_to=8)["tokens"].shape
    (2, 8)
    >>> batch.compare([[-0.5, -0.75]] * 2)[0].gap.tolist()      # engine against trainer
    [0.0, -0.25]
    """

    samples: Sequence[Sample]
    model: str = ""
    logprobs_mode: str = "processed_logprobs"  # one of LOGPROBS_MODES
    notes: Sequence[str] = ()
    seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        object.__setattr__(self, "notes", tuple(self.notes))
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(f"logprobs_mode={self.logprobs_mode!r}", remedy=f"one of {', '.join(LOGPROBS_MODES)}")

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> RolloutBatch: ...
    def __getitem__(self, index: int | slice) -> Sample | RolloutBatch:
        if isinstance(index, slice):
            return replace(self, samples=self.samples[index], seconds=None)
        return self.samples[index]

    def __add__(self, other: RolloutBatch) -> RolloutBatch:
        """Both batches' samples. Prompt numbers that stand for different prompts are moved past the first batch's."""
        if not isinstance(other, RolloutBatch):
            return NotImplemented
        if self.logprobs_mode != other.logprobs_mode:
            raise ConfigError(
                f"cannot add batches with {self.logprobs_mode} and {other.logprobs_mode}",
                remedy="generate both with the same logprobs mode: their logprobs are not comparable",
            )
        mine = {s.prompt_index: s.prompt_token_ids for s in self.samples}
        clash = any(
            s.prompt_index in mine and not np.array_equal(mine[s.prompt_index], s.prompt_token_ids)
            for s in other.samples
        )
        shift = max(mine) + 1 if clash else 0
        moved = tuple(replace(s, prompt_index=s.prompt_index + shift) if shift else s for s in other.samples)
        known = self.seconds is not None and other.seconds is not None
        return RolloutBatch(
            samples=(*self.samples, *moved),
            model=self.model if self.model == other.model else ", ".join(dict.fromkeys([self.model, other.model])),
            logprobs_mode=self.logprobs_mode,
            notes=(*self.notes, *(n for n in other.notes if n not in self.notes)),
            seconds=(self.seconds or 0.0) + (other.seconds or 0.0) if known else None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutBatch):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__dataclass_fields__)

    __hash__ = None  # type: ignore[assignment]

    def groups(self) -> list[tuple[Sample, ...]]:
        """The samples of each prompt, prompts and samples in order."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.prompt_index, []).append(sample)
        return [tuple(sorted(found[i], key=lambda s: s.sample_index)) for i in sorted(found)]

    @property
    def tokens(self) -> int:
        """Tokens generated, prompts not counted."""
        return sum(len(s.token_ids) if s.loss_mask is None else int(s.loss_mask.sum()) for s in self.samples)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated per second of wall time; None where that time is not known, as for a slice."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that produced tokens of this batch, ascending."""
        return tuple(sorted({v for s in self.samples for v, _, _ in s.versions if v >= 0}))

    def arrays(
        self, pad_to: int | Sequence[int] | Literal["power_of_two"] | None = None, pad_id: int = 0
    ) -> dict[str, np.ndarray]:
        """The batch as arrays [B, T] for a loss: prompt then completion, from the left, padding after.

        `pad_to` fixes T, so that a jitted loss compiles once: a number, "power_of_two", or a list of lengths to choose
        the smallest fitting one from; None takes the longest sample. Position t of `logprobs` and `versions` belongs to
        the token at t, not to the one after it. Prompts have logprob 0 and version -1, as padding has, and as
        observations between the turns of a session have: they are no part of `completion_mask` either.
        """
        prompts = np.array([len(s.prompt_token_ids) for s in self.samples], np.int32)
        lengths = prompts + np.array([len(s.token_ids) for s in self.samples], np.int32)
        shape = (len(self), _width(int(lengths.max(initial=0)), pad_to))
        tokens, logprobs = np.full(shape, pad_id, np.int32), np.zeros(shape, np.float32)
        versions, own = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        for row, (sample, start, stop) in enumerate(zip(self.samples, prompts, lengths, strict=True)):
            tokens[row, :start] = sample.prompt_token_ids
            tokens[row, start:stop] = sample.token_ids
            logprobs[row, start:stop] = sample.logprobs
            versions[row, start:stop] = sample.token_versions
            own[row, start:stop] = sample.own
        at = np.arange(shape[1])[None, :]
        return {
            "tokens": tokens,
            "prompt_mask": at < prompts[:, None],
            "completion_mask": own,
            "logprobs": logprobs,
            "versions": versions,
            "lengths": lengths,
            "prompt_lengths": prompts,
            "prompt_index": np.array([s.prompt_index for s in self.samples], np.int32),
        }

    @classmethod
    def from_sessions(cls, sessions: Iterable[Any], rewards: Sequence[float | None] | None = None) -> RolloutBatch:
        """One sample per session (see `pool.session`), all its turns in it; `loss_mask` tells the model's tokens."""
        from jvlab._session import to_batch

        return to_batch(sessions, rewards)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the batch to one .npz file, without pickle, and return its path."""
        from jvlab.rollout._batch_file import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RolloutBatch:
        """Read what `save` wrote."""
        from jvlab.rollout._batch_file import load

        return load(path)

    def __repr__(self) -> str:
        prompts = len({s.prompt_index for s in self.samples})
        ends = collections.Counter(s.finish_reason for s in self.samples)
        parts = [f"{len(self)} samples", f"{prompts} prompts", f"{self.tokens} tokens", _version_text(self.versions)]
        parts += [f"{ends[reason]} {reason}" for reason in FINISH_REASONS if ends[reason]]
        if self.model:
            parts.append(f"model {PurePath(self.model).name}")  # a path would differ from machine to machine
        if self.notes:
            parts.append(f"{len(self.notes)} notes")
        return f"RolloutBatch({', '.join(parts)})"

    def table(self, rows: int = SHOWN, width: int = 40) -> str:
        """The first `rows` samples as plain text."""
        head = ("prompt", "sample", "prompt text", "text", "finish", "tokens", "logprob", "version")
        body = [tuple(shorten(cell, width) for cell in row) for row in self._rows(rows)]
        widths = [max(len(row[c]) for row in [head, *body]) for c in range(len(head))]
        right = {0, 1, 5, 6}
        lines = [
            "  ".join(
                cell.rjust(w) if c in right else cell.ljust(w)
                for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *body]
        ]
        rest = len(self) - len(body)
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join(
            [repr(self), *(line.rstrip() for line in lines), *([f"… {rest} more"] if rest > 0 else []), *notes]
        )

    def _rows(self, rows: int) -> Iterator[tuple[str, ...]]:
        for s in self.samples[:rows]:
            yield (
                str(s.prompt_index),
                str(s.sample_index),
                s.prompt if s.prompt is not None else f"{len(s.prompt_token_ids)} tokens",
                s.text if s.error is None else f"{s.text} [{s.error}]",
                s.finish_reason,
                str(len(s.token_ids)),
                f"{s.mean_logprob:.3f}",
                spans_text(s),
            )

    # Rewards, the trainer's view, and faces ------------------------------------------------------------------------

    def with_rewards(self, rewards: Sequence[float | None]) -> RolloutBatch:
        """The same batch, each sample with its reward, in the order of the samples."""
        if len(rewards) != len(self):
            raise ConfigError(f"{len(rewards)} rewards for {len(self)} samples", remedy="pass one per sample, in order")
        pairs = zip(self.samples, rewards, strict=True)
        return replace(self, samples=tuple(replace(s, reward=r) for s, r in pairs))

    def compare(self, trainer: Any, params: Any = None, *, temperature: float = 1.0) -> RolloutBatch:
        """The same batch with the trainer's log-probability of every token beside the engine's: see `Sample.gap`.

        trainer      a `jv.Policy`, or one array of log-probabilities per sample
        params       of the policy; default: `policy.params`
        temperature  what the samples were drawn with, if the engine's logprobs are processed ones
        """
        from jvlab.rollout._compare import trainer_rows

        pairs = zip(self.samples, trainer_rows(self, trainer, params, temperature), strict=True)
        return replace(self, samples=tuple(replace(s, trainer_logprobs=row) for s, row in pairs))

    def panel(self, colour: str | None = None) -> Any:
        """Show the viewer: completions coloured token by token, samples of a prompt side by side.

        colour    "logprob", "gap" (after `compare`) or "version"; default: the gap where there is one

        Arrow keys or j and k move. Returns the panel: `.colour_by(...)`, `.select(prompt, sample)`, `.close()`; None
        where no widget can be shown, and a table is.
        """
        from jvlab.views._batch_panel import show_batch

        return show_batch(self, colour)

    def _repr_html_(self) -> str:
        from jvlab.views._batch_view import batch_html

        return batch_html(self)

    def _ipython_display_(self) -> None:
        self.panel()


def _width(longest: int, pad_to: int | Sequence[int] | str | None) -> int:
    """T for a batch whose longest sample has `longest` tokens."""
    match pad_to:
        case None:
            return longest
        case "power_of_two":
            return 1 << max(longest - 1, 0).bit_length()
        case bool() | str():
            raise ConfigError(
                f"pad_to={pad_to!r}", remedy='pass a number, a list of numbers, "power_of_two" or None', pad_to=pad_to
            )
        case int():
            buckets = [pad_to]
        case _:
            buckets = sorted(int(n) for n in pad_to)
    fitting = [n for n in buckets if n >= longest]
    if not fitting:
        raise ConfigError(
            f"pad_to={pad_to} is too small: the longest sample has {longest} tokens, prompt included",
            remedy=f"pad to {longest} or more, or generate with fewer max_tokens",
            pad_to=pad_to,
            longest=longest,
        )
    return fitting[0]


def spans_text(sample: Sample) -> str:
    """The versions of a sample's own tokens, in order, as words."""
    found = [v for v, _, _ in sample.versions if v >= 0]
    return ", ".join(str(v) for i, v in enumerate(found) if not i or v != found[i - 1]) or "none"


def _version_text(versions: tuple[int, ...]) -> str:
    match versions:
        case ():
            return "no version"
        case (only,):
            return f"version {only}"
        case _:
            return f"versions {versions[0]} to {versions[-1]}"


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters, control characters escaped."""
    line = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return line if len(line) <= width else line[: width - 1] + "…"

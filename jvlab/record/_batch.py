"""What a pool generated: samples with tokens, logprobs and the policy version of every token. numpy only."""

from __future__ import annotations

import collections
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    Literal,
    TypeGuard,
    TypeVar,
    overload,
)

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError, MissingDependency
from jvlab._files import parse_object
from jvlab._names import model_words
from jvlab._units import how_many
from jvlab.record._events import coerce
from jvlab.record._sample import (
    FINISH_REASONS,
    Sample,
    check_replay,
    expert_arrays,
    shorten,
    spans_text,
)

if TYPE_CHECKING:
    import pandas


# A trainer's log-probabilities of a batch's completions, one row per sample.


def trainer_rows(
    batch: RolloutBatch, trainer: Any, params: Any, temperature: float, replay: str
) -> list[Any]:
    """The policy's log-probabilities of every completion, or the rows passed in; one per sample."""
    check_replay(replay)
    if not hasattr(trainer, "logprobs"):
        given = list(trainer)
        if replay != "none":
            raise ConfigError(
                f"replay={replay!r} of rows that are given",
                remedy="pass a jv.Policy, or leave it out",
            )
        if len(given) != len(batch):
            raise ConfigError(
                f"{len(given)} rows for {len(batch)} samples",
                remedy="pass one array per sample, in order",
            )
        return given
    arrays = batch.arrays(pad_to="power_of_two")  # few lengths, so few compilations
    tree = trainer.params if params is None else params
    experts = expert_arrays(batch.samples, arrays["tokens"].shape[1], replay)
    more = {"routes": tuple(experts.values())} if experts else {}
    rows = np.asarray(
        trainer.logprobs(
            tree, arrays["tokens"], arrays["lengths"], temperature=temperature, **more
        )
    )
    ends = zip(
        rows, arrays["prompt_lengths"].tolist(), arrays["lengths"].tolist(), strict=True
    )
    return [row[start:stop] for row, start, stop in ends]


# A reward made of parts: what a reward function returns as a mapping, and the number that training uses.

NUMBERS = (int, float, np.integer, np.floating, np.bool_)


class PartedReward(float):
    """The sum of a reward's parts, a number like any other; `parts` names them."""

    parts: dict[str, float]

    def __new__(cls, parts: Mapping[str, Any]) -> PartedReward:
        named = {str(name): float(value) for name, value in parts.items()}
        made = super().__new__(cls, math.fsum(named.values()))
        made.parts = named
        return made


def is_parted(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is a mapping of names to numbers, at least one."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(v, NUMBERS) for v in value.values())
    )


def parts_of(reward: Any) -> dict[str, float]:
    """The parts of a reward; {} if it is one number."""
    return dict(reward.parts) if isinstance(reward, PartedReward) else {}


# ----------------------------------------------------------------------------------------------------

# after temperature and filters, or before
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
SHOWN = 10  # rows printed by `table`


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBatch(Sequence[Sample]):
    """Samples in the order of their prompts, and what they have in common. Can be indexed, sliced and added.

    `seconds` is the wall time of the whole generation; a slice has none. `notes` record retries and
    lost replicas.

    >>> sample = lambda k: jv.Sample(0, k, [5, 6], [7, 8], [-0.5, -1.0], text="ab", versions=((3, 0, 2),))
    >>> batch = jv.RolloutBatch([sample(0), sample(1)]).with_rewards([0.0, 1.0])
    >>> batch
    RolloutBatch(2 samples, 1 prompt, 4 tokens, version 3, 2 stop)
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
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode!r}",
                remedy=f"one of {', '.join(LOGPROBS_MODES)}",
            )

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
        if isinstance(index, str):
            raise ConfigError(
                f"a batch has no column {index!r}",
                remedy="batch.arrays() has columns; batch[0] is a sample",
            )
        return self.samples[index]

    def __add__(self, other: RolloutBatch) -> RolloutBatch:
        """Both batches' samples. Where prompt numbers clash, the second batch's are renumbered past the first's."""
        if not isinstance(other, RolloutBatch):
            return NotImplemented
        if self.logprobs_mode != other.logprobs_mode:
            raise ConfigError(
                f"cannot add batches with {self.logprobs_mode} and {other.logprobs_mode}",
                remedy="generate both with the same logprobs mode: their logprobs are not comparable",
            )
        mine = {s.prompt_index: s.prompt_token_ids for s in self.samples}
        clash = any(
            s.prompt_index in mine
            and not np.array_equal(mine[s.prompt_index], s.prompt_token_ids)
            for s in other.samples
        )
        shift = max(mine) + 1 if clash else 0
        moved = tuple(
            replace(s, prompt_index=s.prompt_index + shift) if shift else s
            for s in other.samples
        )
        known = self.seconds is not None and other.seconds is not None
        return RolloutBatch(
            samples=(*self.samples, *moved),
            model=self.model
            if self.model == other.model
            else ", ".join(dict.fromkeys([self.model, other.model])),
            logprobs_mode=self.logprobs_mode,
            notes=(*self.notes, *(n for n in other.notes if n not in self.notes)),
            seconds=(self.seconds or 0.0) + (other.seconds or 0.0) if known else None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutBatch):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name)
            for name in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    def groups(self) -> list[tuple[Sample, ...]]:
        """The samples of each prompt, prompts and samples in order."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.prompt_index, []).append(sample)
        return [
            tuple(sorted(found[i], key=lambda s: s.sample_index)) for i in sorted(found)
        ]

    @property
    def tokens(self) -> int:
        """Tokens generated, prompts not counted."""
        return sum(
            len(s.token_ids) if s.loss_mask is None else int(s.loss_mask.sum())
            for s in self.samples
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated per second of wall time; None where that time is unknown, as for a slice."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that produced tokens of this batch, ascending."""
        return tuple(
            sorted({v for s in self.samples for v in s.versions.tolist() if v >= 0})
        )

    def arrays(
        self,
        pad_to: int | Sequence[int] | Literal["power_of_two"] | None = None,
        pad_id: int = 0,
    ) -> dict[str, np.ndarray]:
        """The batch as arrays [B, T] for a loss: prompt, completion, then padding on the right.

        `pad_to` fixes T, so that a jitted loss compiles once: a number, "power_of_two", or a list of lengths to choose
        the smallest fitting one from; None takes the longest sample. Position t of `logprobs` and `versions` belongs to
        the token at t, not to the one after it. Prompts, padding, and observations between the turns of a session have
        logprob 0 and version -1 and are outside `completion_mask`.
        """
        prompts = np.array([len(s.prompt_token_ids) for s in self.samples], np.int32)
        lengths = prompts + np.array([len(s.token_ids) for s in self.samples], np.int32)
        shape = (len(self), _width(int(lengths.max(initial=0)), pad_to))
        tokens = np.full(shape, pad_id, np.int32)
        logprobs = np.zeros(shape, np.float32)
        versions = np.full(shape, -1, np.int64)
        own = np.zeros(shape, bool)
        for row, (sample, start, stop) in enumerate(
            zip(self.samples, prompts, lengths, strict=True)
        ):
            tokens[row, :start] = sample.prompt_token_ids
            tokens[row, start:stop] = sample.token_ids
            logprobs[row, start:stop] = sample.logprobs
            versions[row, start:stop] = sample.versions
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
    def from_sessions(
        cls, sessions: Iterable[Any], rewards: Sequence[float | None] | None = None
    ) -> RolloutBatch:
        """One sample per session (see `pool.session`) with all its turns; `loss_mask` marks the model's tokens.

        Different prompts with the same number are renumbered.
        """
        listed = list(sessions)
        if not listed:
            raise ConfigError("no sessions were given", remedy="pass at least one")
        if rewards is not None and len(rewards) != len(listed):
            raise ConfigError(
                f"{len(rewards)} rewards for {len(listed)} sessions",
                remedy="pass one per session, in order",
            )
        given = [None] * len(listed) if rewards is None else list(rewards)
        samples = [
            session.sample(reward)
            for session, reward in zip(listed, given, strict=True)
        ]
        places = {(s.prompt_index, s.sample_index) for s in samples}
        # pool.session numbers each from 0: number them by prompt
        if len(places) < len(samples):
            prompts: dict[bytes, int] = {}
            counts: dict[int, int] = {}
            for i, s in enumerate(samples):
                number = prompts.setdefault(s.prompt_token_ids.tobytes(), len(prompts))
                samples[i] = replace(
                    s, prompt_index=number, sample_index=counts.get(number, 0)
                )
                counts[number] = counts.get(number, 0) + 1
        pool = listed[0].pool
        notes = tuple(
            dict.fromkeys(
                note for s in listed for turn in s.turns for note in turn.notes
            )
        )
        return cls(
            tuple(samples),
            model=pool.model,
            logprobs_mode=listed[0].logprobs_mode,
            notes=notes,
        )

    def to_pandas(self) -> pandas.DataFrame:
        """One row per sample: texts, reward, mean log-probability, versions, tokens; token by token: `arrays()`."""
        try:
            import pandas
        except ImportError as e:
            raise MissingDependency(
                "a DataFrame needs pandas",
                remedy="pip install pandas; batch.arrays() and batch.table() need nothing",
            ) from e
        parts = sorted({name for s in self.samples for name in s.reward_parts})
        rows = []
        for s in self.samples:
            own = s.versions[s.own].tolist()
            row: dict[str, Any] = {
                "prompt_index": s.prompt_index,
                "sample_index": s.sample_index,
                "prompt": s.prompt,
                "text": s.text,
                "reward": math.nan if s.reward is None else s.reward,
                **{
                    f"reward_{name}": s.reward_parts.get(name, math.nan)
                    for name in parts
                },
                "finish_reason": s.finish_reason,
                "tokens": int(s.own.sum()),
                "prompt_tokens": len(s.prompt_token_ids),
                "cached_tokens": s.cached_tokens,
                "mean_logprob": s.mean_logprob,
                "gap": math.nan
                if s.gap is None
                else float(np.abs(s.gap).max(initial=0.0)),
                "first_version": min(own, default=-1),
                "last_version": max(own, default=-1),
                "replica": s.replica,
                "retried": s.retried,
                "error": s.error,
                "token_ids": s.token_ids,
                "logprobs": s.logprobs,
            }
            rows.append(row | {f"{name}_s": value for name, value in s.seconds.items()})
        return pandas.DataFrame(rows)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the batch to one .npz file, without pickle, and return its path."""
        return _save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, max_bytes: int = 2 << 30
    ) -> RolloutBatch:
        """Read what `save` wrote; a file that declares more than `max_bytes` is refused before it is read."""
        return _load(path, cls, max_bytes)

    def __repr__(self) -> str:
        prompts = len({s.prompt_index for s in self.samples})
        ends = collections.Counter(s.finish_reason for s in self.samples)
        counts = {"sample": len(self), "prompt": prompts, "token": self.tokens}
        parts = [
            *(how_many(number, what) for what, number in counts.items()),
            _version_text(self.versions),
        ]
        parts += [
            f"{ends[reason]} {reason}" for reason in FINISH_REASONS if ends[reason]
        ]
        if self.model:
            parts.append(f"model {model_words(self.model)}")
        if self.notes:
            parts.append(how_many(len(self.notes), "note"))
        return f"RolloutBatch({', '.join(parts)})"

    def table(self, rows: int = SHOWN, width: int = 40) -> str:
        """The first `rows` samples as plain text."""
        head = (
            "prompt",
            "sample",
            "prompt text",
            "text",
            "finish",
            "tokens",
            "logprob",
            "version",
        )
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
            [
                repr(self),
                *(line.rstrip() for line in lines),
                *([f"… {rest} more"] if rest > 0 else []),
                *notes,
            ]
        )

    def _rows(self, rows: int) -> Iterator[tuple[str, ...]]:
        for s in self.samples[:rows]:
            yield (
                str(s.prompt_index),
                str(s.sample_index),
                s.prompt
                if s.prompt is not None
                else f"{len(s.prompt_token_ids)} tokens",
                s.text if s.error is None else f"{s.text} [{s.error}]",
                s.finish_reason,
                str(len(s.token_ids)),
                f"{s.mean_logprob:.3f}",
                spans_text(s),
            )

    # Rewards, the trainer's logprobs, displays -----------------------------------------------------------------------

    def with_rewards(
        self, rewards: Sequence[float | Mapping[str, float] | None]
    ) -> RolloutBatch:
        """The same batch with a reward for each sample, in order; of a mapping of named parts, their sum."""
        if len(rewards) != len(self):
            raise ConfigError(
                f"{len(rewards)} rewards for {len(self)} samples",
                remedy="pass one per sample, in order",
            )
        for given in rewards:
            if isinstance(given, Mapping) and not is_parted(given):
                raise ConfigError(
                    f"a reward is {given!r}",
                    remedy="a number, or a mapping of names to numbers",
                )
        pairs = zip(
            self.samples,
            (PartedReward(r) if is_parted(r) else r for r in rewards),
            strict=True,
        )
        scored = (replace(s, reward=r, reward_parts=parts_of(r)) for s, r in pairs)  # type: ignore[arg-type]
        return replace(self, samples=tuple(scored))

    def compare(
        self,
        trainer: Any,
        params: Any = None,
        *,
        temperature: float = 1.0,
        replay: str = "none",
    ) -> RolloutBatch:
        """The same batch with the trainer's log-probability of every token added: see `Sample.gap`.

        trainer      a `jv.Policy`, or one array of log-probabilities per sample
        params       of the policy; default: `policy.params`
        temperature  of the sampling, if the engine's logprobs are processed ones
        replay       of a policy with experts: "ids" takes the experts that the engine chose, "full" their weights too
        """

        pairs = zip(
            self.samples,
            trainer_rows(self, trainer, params, temperature, replay),
            strict=True,
        )
        return replace(
            self, samples=tuple(replace(s, trainer_logprobs=row) for s, row in pairs)
        )

    def panel(self, colour: str | None = None) -> Any:
        """Show the viewer: completions coloured token by token, samples of a prompt side by side.

        colour    "logprob", "gap" (after `compare`) or "version"; default: the gap where there is one

        Arrow keys or j and k move. Returns the panel: `.colour_by(...)`, `.select(prompt, sample)`, `.close()`; None
        where no widget can be shown, and a table is.
        """
        return _faces.draw(self, "panel", colour)

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

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
                f"pad_to={pad_to!r}",
                remedy='pass a number, a list of numbers, "power_of_two" or None',
                pad_to=pad_to,
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


def _version_text(versions: tuple[int, ...]) -> str:
    match versions:
        case ():
            return "no version"
        case (only,):
            return f"version {only}"
        case _:
            return f"versions {versions[0]} to {versions[-1]}"


# What a pool scored: the log-probability of every given token. numpy only.


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """`logprobs[i][t]` is log P of token t of sequence i given the tokens before it; NaN at t = 0, which has no prefix.

    `top_ids[i][t]` and `top_logprobs[i][t]` hold the most likely tokens at position t, best first, if requested.
    `versions[i]` is the weight version that scored sequence i, `token_ids[i]` its tokens.

    >>> scores = pool.score([[5, 6, 7, 8]], top=2)
    >>> scores[0].shape, scores.top_ids[0].shape
    ((4,), (4, 2))
    """

    logprobs: list[np.ndarray]
    versions: np.ndarray
    top_ids: list[np.ndarray] | None = None
    top_logprobs: list[np.ndarray] | None = None
    # what was scored, also where it was given as text
    token_ids: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.logprobs[index]

    def gap(self, batch: RolloutBatch) -> float:
        """The largest difference between these and the log-probabilities the batch was sampled with."""
        differences = [
            np.abs(scored[-len(sample.token_ids) :] - sample.logprobs)[sample.own]
            for sample, scored in zip(batch, self.logprobs, strict=True)
            if len(sample.token_ids)
        ]
        # NaN stays NaN
        return float(np.max(np.concatenate(differences))) if differences else 0.0

    def __repr__(self) -> str:
        tokens = sum(len(row) for row in self.logprobs)
        return f"Scores({len(self)} sequences, {tokens} tokens)"


# A batch as a file: one .npz with a JSON header for texts and flat arrays for numbers, no pickle ----------------------

Batch = TypeVar("Batch")
_FORMAT = "jvlab rollout batch 1"
# the fields of a sample that are in the header; files of earlier versions have fewer
_SAMPLE: dict[str, Any] = {
    "prompt_index": int,
    "sample_index": int,
    "prompt": str | None,
    "text": str,
    "finish_reason": str,
    "replica": str,
    "retried": int,
    "seconds": dict[str, float],
    "error": str | None,
    "reward": float | None,
    "reward_parts": dict[str, float] | None,
    "cached_tokens": int | None,
    "adapter": tuple[str, int] | None,
}
_COMMON: dict[str, Any] = {
    "model": str,
    "logprobs_mode": str,
    "notes": tuple[str, ...],
    "seconds": float | None,
}
_ARRAYS = {
    "header": "u1",
    "prompt_tokens": "<i4",
    "prompt_ends": "<i8",
    "tokens": "<i4",
    "logprobs": "<f4",
    "ends": "<i8",
    "spans": "<i8",
    "span_ends": "<i8",
    "compared": "?",
    "trainer_logprobs": "<f4",
    "masked": "?",
    "loss_mask": "?",
    "expert_shapes": "<i8",
    "expert_ids": "<i2",
    "weighed": "?",
    "expert_weights": "<f4",
}
_COLUMNS = {"spans": 3, "expert_shapes": 2}  # of those that are tables
MAX_BYTES = 2 << 30
# of max_bytes per value in the header: about what a Python object takes
BYTES_PER_PART = 256


def _save(batch: RolloutBatch, path: str | os.PathLike[str]) -> str:
    """Write to a temporary file, then rename: a reader never sees half a file."""
    samples = batch.samples
    header = {
        "format": _FORMAT,
        "batch": {name: getattr(batch, name) for name in _COMMON},
        "samples": [{name: getattr(s, name) for name in _SAMPLE} for s in samples],
    }
    spans = [np.array(s.version_spans, np.int64).reshape(-1, 3) for s in samples]
    arrays = {
        # ASCII escapes keep every str, unpaired surrogates included
        "header": np.frombuffer(json.dumps(header).encode("ascii"), np.uint8),
        "prompt_tokens": _joined([s.prompt_token_ids for s in samples], np.int32),
        "prompt_ends": _ends(s.prompt_token_ids for s in samples),
        "tokens": _joined([s.token_ids for s in samples], np.int32),
        "logprobs": _joined([s.logprobs for s in samples], np.float32),
        "ends": _ends(s.token_ids for s in samples),
        "spans": _joined([part.ravel() for part in spans], np.int64).reshape(-1, 3),
        "span_ends": _ends(spans),
    }
    trainer = [s.trainer_logprobs for s in samples]
    arrays |= _some("compared", "trainer_logprobs", trainer, np.float32)
    arrays |= _some("masked", "loss_mask", [s.loss_mask for s in samples], np.bool_)
    if any(s.expert_ids is not None for s in samples):
        # for each sample how many layers and chosen experts: 0 and 0 if it has none
        ids = [s.expert_ids for s in samples]
        shapes = [(0, 0) if row is None else row.shape[1:] for row in ids]
        weights = [s.expert_weights for s in samples]
        arrays["expert_shapes"] = np.array(shapes, np.int64)
        arrays["expert_ids"] = _joined([r for r in ids if r is not None], np.int16)
        arrays["weighed"] = np.array([row is not None for row in weights])
        arrays |= _some("weighed", "expert_weights", weights, np.float32)
        arrays.setdefault("expert_weights", np.zeros(0, np.float32))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            np.savez_compressed(f, **arrays)  # plain numbers only: nothing is pickled
        os.chmod(part, 0o644)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    return str(target)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(part.ravel() for part in parts)])


def _ends(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)


def _some(
    flag: str, name: str, rows: Sequence[np.ndarray | None], dtype: type
) -> dict[str, np.ndarray]:
    """A column that only some samples have, and which; nothing if none has it."""
    known = [row for row in rows if row is not None]
    if not known:
        return {}
    has = np.array([row is not None for row in rows])
    return {flag: has, name: _joined(known, dtype)}


def _load(
    path: str | os.PathLike[str],
    build: Callable[..., Batch],
    max_bytes: int = MAX_BYTES,
) -> Batch:
    """Read a file that `save` wrote, and call `build` with its fields.

    Anything else is an error that names the file; at most `max_bytes` are read.
    """
    # outside the try: a missing file stays a FileNotFoundError
    with open(path, "rb") as stream:
        try:
            return build(**_fields(_read(stream, max_bytes), max_bytes))
        # whatever zipfile, zlib and numpy raise for bytes that they cannot or must not read
        except Exception as e:
            raise ConfigError(
                f"{os.fspath(path)} is not a rollout batch: {str(e)[:300] or type(e).__name__}",
                remedy="load a file that RolloutBatch.save of this jvlab wrote; a larger one with max_bytes=",
                path=os.fspath(path),
            ) from e


def _read(stream: BinaryIO, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays, by name. Their declared sizes are summed before any is read, and compared with what is read."""
    with zipfile.ZipFile(stream) as archive:
        found = archive.infolist()
        names = [info.filename for info in found]
        if len(found) > len(_ARRAYS) or not {f"{n}.npy" for n in _ARRAYS} >= set(names):
            shown = ", ".join(name[:40] for name in names[:8])
            raise ValueError(f"it holds other arrays: {shown}")
        total = sum(info.file_size for info in found)
        if total > max_bytes:
            raise ValueError(
                f"it declares {total:,} bytes, more than max_bytes={max_bytes:,}"
            )
        return {
            info.filename.removesuffix(".npy"): _array(archive, info) for info in found
        }


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One array. numpy reads its head; it would allocate what that declares, so the size is checked before."""
    name = info.filename.removesuffix(".npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that save does not use")
    with archive.open(info) as stream:
        np.lib.format.read_magic(stream)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        fits = shape[1:] == ((_COLUMNS[name],) if name in _COLUMNS else ())
        if fortran or not shape or not fits or dtype != _ARRAYS[name]:
            raise ValueError(f"{name} is an array of {dtype} of shape {shape}")
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= size <= info.file_size:
            raise ValueError(
                f"{name} declares {size:,} bytes but has {info.file_size:,}"
            )
        data = stream.read(size)
        if len(data) != size or stream.read(1):
            raise ValueError(f"{name} is longer or shorter than it declares")
    return np.frombuffer(data, dtype).reshape(shape)


def _fields(file: dict[str, np.ndarray], max_bytes: int) -> dict[str, Any]:
    """What the batch is made from."""
    parts = max(max_bytes // BYTES_PER_PART, 1000)
    header = parse_object(file.pop("header").tobytes(), parts)
    if header["format"] != _FORMAT:
        raise ValueError(
            f"its format is {str(header['format'])[:60]!r}, not {_FORMAT!r}"
        )
    entries = [_typed(entry, _SAMPLE, "a sample") for entry in header["samples"]]
    ends = [file[name] for name in ("prompt_ends", "ends", "span_ends")]
    if {len(column) for column in ends} != {len(entries)}:
        raise ValueError(f"its arrays are not those of {len(entries)} samples")
    prompts = _split(file["prompt_tokens"], ends[0])
    tokens = _split(file["tokens"], ends[1])
    lengths = [len(ids) for ids in tokens]
    columns = {
        "prompt_token_ids": prompts,
        "token_ids": tokens,
        "logprobs": _split(file["logprobs"], ends[1]),
        "versions": _split(file["spans"], ends[2]),
        "trainer_logprobs": _rows(file, "trainer_logprobs", "compared", lengths),
        "loss_mask": _rows(file, "loss_mask", "masked", lengths),
        **_experts(file, [len(p) + n for p, n in zip(prompts, lengths, strict=True)]),
    }
    samples = [
        Sample(**entry, **dict(zip(columns, values, strict=True)))
        for entry, *values in zip(entries, *columns.values(), strict=True)
    ]
    return {"samples": samples, **_typed(header["batch"], _COMMON, "the batch")}


def _typed(given: Any, hints: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The fields, if each has the type that `save` writes."""
    out = {}
    for name, hint in hints.items():
        value = given.get(name)
        try:
            out[name] = coerce(hint, value)
        except (TypeError, ValueError, OverflowError) as e:
            raise TypeError(f"{name} of {what} is {str(value)[:60]!r}") from e
    return out


def _experts(
    file: Mapping[str, np.ndarray], lengths: Sequence[int]
) -> dict[str, list[Any]]:
    """The experts of each sample, which has so many tokens; None where it has none."""
    if "expert_shapes" not in file:
        return {}
    shapes = file["expert_shapes"].tolist()
    sizes = [n * math.prod(shape) for n, shape in zip(lengths, shapes, strict=True)]
    known = {"chosen": np.array([min(shape) > 0 for shape in shapes], bool), **file}
    return {
        name: [
            None if row is None else row.reshape(n, *shape)
            for row, n, shape in zip(
                _rows(known, name, flag, sizes), lengths, shapes, strict=True
            )
        ]
        for name, flag in (("expert_ids", "chosen"), ("expert_weights", "weighed"))
    }


def _rows(
    file: Mapping[str, np.ndarray], name: str, flag: str, lengths: Sequence[int]
) -> list[np.ndarray | None]:
    """Column `name`, split by sample; None for samples whose `flag` is not set."""
    if flag not in file:
        return [None] * len(lengths)
    has = file[flag].tolist()
    known = [n for n, flagged in zip(lengths, has, strict=True) if flagged]
    rows = iter(_split(file[name], np.cumsum(known, dtype=np.int64)))
    return [next(rows) if flagged else None for flagged in has]


def _split(values: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    last = int(ends[-1]) if len(ends) else 0
    if last != len(values):
        raise ValueError(f"{len(values)} values where {last} are declared")
    # could exceed the file
    if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any()):
        raise ValueError("its pieces overlap")
    return np.split(values, ends[:-1]) if len(ends) else []

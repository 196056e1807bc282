"""What a pool generated: samples with tokens, logprobs and the policy version of every token. numpy only."""

from __future__ import annotations

import collections
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard, overload

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab._files import parse_object
from jvlab._names import model_words
from jvlab._units import how_many
from jvlab.record._events import coerce
from jvlab.record._export import aligned, needed
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
            not np.array_equal(mine[s.prompt_index], s.prompt_token_ids)
            for s in other.samples
            if s.prompt_index in mine
        )
        shift = max(mine) + 1 if clash else 0
        moved = [replace(s, prompt_index=s.prompt_index + shift) for s in other.samples]
        known = self.seconds is not None and other.seconds is not None
        return RolloutBatch(
            samples=(*self.samples, *moved),
            model=", ".join(dict.fromkeys([self.model, other.model])),
            logprobs_mode=self.logprobs_mode,
            notes=tuple(dict.fromkeys([*self.notes, *other.notes])),
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
        given = [None] * len(listed) if rewards is None else list(rewards)
        if len(given) != len(listed):
            raise ConfigError(
                f"{len(given)} rewards for {len(listed)} sessions",
                remedy="pass one per session, in order",
            )
        pairs = zip(listed, given, strict=True)
        samples = [session.sample(reward) for session, reward in pairs]
        places = {(s.prompt_index, s.sample_index) for s in samples}
        # pool.session numbers each from 0: number them by prompt
        if len(places) < len(samples):
            prompts: dict[bytes, int] = {}
            counts: collections.Counter[int] = collections.Counter()
            for i, s in enumerate(samples):
                number = prompts.setdefault(s.prompt_token_ids.tobytes(), len(prompts))
                place = {"prompt_index": number, "sample_index": counts[number]}
                samples[i] = replace(s, **place)
                counts[number] += 1
        notes = [note for s in listed for turn in s.turns for note in turn.notes]
        return cls(
            samples,
            model=listed[0].pool.model,
            logprobs_mode=listed[0].logprobs_mode,
            notes=tuple(dict.fromkeys(notes)),
        )

    def to_pandas(self) -> pandas.DataFrame:
        """One row per sample: texts, reward, mean log-probability, versions, tokens; token by token: `arrays()`."""
        why = "a DataFrame needs pandas; batch.arrays() and batch.table() need nothing"
        pandas = needed("pandas", why)
        parts = sorted({name for s in self.samples for name in s.reward_parts})
        rows = []
        for s in self.samples:
            own = s.versions[s.own].tolist()
            rewards = {f"reward_{n}": s.reward_parts.get(n, math.nan) for n in parts}
            gap = None if s.gap is None else float(np.abs(s.gap).max(initial=0.0))
            row = {
                "prompt_index": s.prompt_index,
                "sample_index": s.sample_index,
                "prompt": s.prompt,
                "text": s.text,
                "reward": math.nan if s.reward is None else s.reward,
                **rewards,
                "finish_reason": s.finish_reason,
                "tokens": len(own),
                "prompt_tokens": len(s.prompt_token_ids),
                "cached_tokens": s.cached_tokens,
                "mean_logprob": s.mean_logprob,
                "gap": math.nan if gap is None else gap,
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
        # outside the try: a missing file stays a FileNotFoundError
        with open(path, "rb") as stream:
            try:
                return cls(**_fields(_read(stream, max_bytes), max_bytes))
            # whatever zipfile, zlib and numpy raise for bytes that they cannot or must not read
            except Exception as e:
                raise ConfigError(
                    f"{os.fspath(path)} is not a rollout batch: {str(e)[:300] or type(e).__name__}",
                    remedy="load a file that RolloutBatch.save of this jvlab wrote; a larger one with max_bytes=",
                    path=os.fspath(path),
                ) from e

    def __repr__(self) -> str:
        prompts = len({s.prompt_index for s in self.samples})
        ends = collections.Counter(s.finish_reason for s in self.samples)
        counts = {"sample": len(self), "prompt": prompts, "token": self.tokens}
        parts = [how_many(number, what) for what, number in counts.items()]
        parts.append(_version_text(self.versions))
        parts += [f"{ends[why]} {why}" for why in FINISH_REASONS if ends[why]]
        if self.model:
            parts.append(f"model {model_words(self.model)}")
        if self.notes:
            parts.append(how_many(len(self.notes), "note"))
        return f"RolloutBatch({', '.join(parts)})"

    def table(self, rows: int = SHOWN, width: int = 40) -> str:
        """The first `rows` samples as plain text."""
        head = ("prompt", "sample", "prompt text", "text", "finish")
        head += ("tokens", "logprob", "version")
        shown = self.samples[:rows]
        body = [[shorten(cell, width) for cell in _cells(s)] for s in shown]
        lines = aligned([head, *body], left=(2, 3, 4, 7))
        rest = len(self) - len(shown)
        more = [f"… {rest} more"] if rest > 0 else []
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([repr(self), *lines, *more, *notes])

    # Rewards, the trainer's logprobs, displays -----------------------------------------------------------------------

    def with_rewards(
        self, rewards: Sequence[float | Mapping[str, float] | None]
    ) -> RolloutBatch:
        """The same batch with a reward for each sample, in order; of a mapping of named parts, their sum."""
        self._check_count(len(rewards), "rewards")
        scored = []
        for sample, given in zip(self.samples, rewards, strict=True):
            if isinstance(given, Mapping) and not is_parted(given):
                raise ConfigError(
                    f"a reward is {given!r}",
                    remedy="a number, or a mapping of names to numbers",
                )
            reward: Any = PartedReward(given) if is_parted(given) else given
            parts = parts_of(reward)
            scored.append(replace(sample, reward=reward, reward_parts=parts))
        return replace(self, samples=scored)

    def _check_count(self, count: int, what: str) -> None:
        if count != len(self):
            raise ConfigError(
                f"{count} {what} for {len(self)} samples",
                remedy="pass one per sample, in order",
            )

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
        check_replay(replay)
        if hasattr(trainer, "logprobs"):
            rows = self._trainer_rows(trainer, params, temperature, replay)
        else:
            rows = list(trainer)
            self._check_count(len(rows), "rows")
            if replay != "none":
                raise ConfigError(
                    f"replay={replay!r} of rows that are given",
                    remedy="pass a jv.Policy, or leave it out",
                )
        pairs = zip(self.samples, rows, strict=True)
        compared = tuple(replace(s, trainer_logprobs=row) for s, row in pairs)
        return replace(self, samples=compared)

    def _trainer_rows(
        self, trainer: Any, params: Any, temperature: float, replay: str
    ) -> list[np.ndarray]:
        """The policy's log-probabilities of every completion, one row per sample."""
        arrays = self.arrays(pad_to="power_of_two")  # few lengths, so few compilations
        tokens = arrays["tokens"]
        lengths = arrays["lengths"]
        tree = trainer.params if params is None else params
        experts = expert_arrays(self.samples, tokens.shape[1], replay)
        more = {"routes": tuple(experts.values())} if experts else {}
        rows = np.asarray(
            trainer.logprobs(tree, tokens, lengths, temperature=temperature, **more)
        )
        ends = zip(rows, arrays["prompt_lengths"], lengths, strict=True)
        return [row[start:stop] for row, start, stop in ends]

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


def _cells(s: Sample) -> Iterator[str]:
    """A sample's row of the table."""
    yield str(s.prompt_index)
    yield str(s.sample_index)
    yield f"{len(s.prompt_token_ids)} tokens" if s.prompt is None else s.prompt
    yield s.text if s.error is None else f"{s.text} [{s.error}]"
    yield s.finish_reason
    yield str(len(s.token_ids))
    yield f"{s.mean_logprob:.3f}"
    yield spans_text(s)


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


# A batch as a file: one .npz with a JSON header for texts and shapes, flat arrays for numbers, no pickle --------------

_FORMAT = "jvlab rollout batch 2"
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
# those that are arrays: of all samples one after the other, each with its shape in the header
_ARRAYS = {
    "prompt_token_ids": "<i4",
    "token_ids": "<i4",
    "logprobs": "<f4",
    "versions": "<i8",
    "trainer_logprobs": "<f4",
    "loss_mask": "?",
    "expert_ids": "<i2",
    "expert_weights": "<f4",
}
_MEMBERS = {"header": "u1", **_ARRAYS}
# of max_bytes per value in the header: about what a Python object takes
BYTES_PER_PART = 256


def _save(batch: RolloutBatch, path: str | os.PathLike[str]) -> str:
    """Write to a temporary file, then rename: a reader never sees half a file."""
    entries = []
    rows = {name: [np.zeros(0, kind)] for name, kind in _ARRAYS.items()}
    for sample in batch.samples:
        arrays = {name: getattr(sample, name) for name in _ARRAYS}
        known = {name: row for name, row in arrays.items() if row is not None}
        for name, row in known.items():
            rows[name].append(row.ravel())
        entry = {name: getattr(sample, name) for name in _SAMPLE}
        entries.append({**entry, "shapes": {n: row.shape for n, row in known.items()}})
    common = {name: getattr(batch, name) for name in _COMMON}
    header = {"format": _FORMAT, "batch": common, "samples": entries}
    # ASCII escapes keep every str, unpaired surrogates included
    text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    columns: dict[str, Any] = {
        name: np.concatenate(parts) for name, parts in rows.items()
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            # plain numbers only: nothing is pickled
            np.savez_compressed(f, header=text, **columns)
        os.chmod(part, 0o644)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    return str(target)


def _read(stream: BinaryIO, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays, by name. Their declared sizes are summed before any is read, and compared with what is read."""
    with zipfile.ZipFile(stream) as archive:
        found = archive.infolist()
        names = [info.filename for info in found]
        if sorted(names) != sorted(f"{name}.npy" for name in _MEMBERS):
            shown = ", ".join(name[:40] for name in names[:8])
            raise ValueError(f"it holds other arrays: {shown}")
        total = sum(info.file_size for info in found)
        if total > max_bytes:
            raise ValueError(
                f"it declares {total:,} bytes, more than max_bytes={max_bytes:,}"
            )
        return dict(_array(archive, info) for info in found)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[str, np.ndarray]:
    """One array. numpy reads its head; it would allocate what that declares, so the size is checked before."""
    name = info.filename.removesuffix(".npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that save does not use")
    with archive.open(info) as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 1 or dtype != _MEMBERS[name]:
            raise ValueError(f"{name} is an array of {dtype} of shape {shape}")
        size = shape[0] * dtype.itemsize
        if not 0 <= size <= info.file_size:
            raise ValueError(
                f"{name} declares {size:,} bytes but has {info.file_size:,}"
            )
        data = stream.read(size)
        if len(data) != size or stream.read(1):
            raise ValueError(f"{name} is longer or shorter than it declares")
    return name, np.frombuffer(data, dtype)


def _fields(file: dict[str, np.ndarray], max_bytes: int) -> dict[str, Any]:
    """What the batch is made from."""
    parts = max(max_bytes // BYTES_PER_PART, 1000)
    header = parse_object(file.pop("header").tobytes(), parts)
    if header["format"] != _FORMAT:
        raise ValueError(
            f"its format is {str(header['format'])[:60]!r}, not {_FORMAT!r}"
        )
    used = dict.fromkeys(_ARRAYS, 0)
    samples = []
    for entry in header["samples"]:
        arrays: dict[str, Any] = {}
        for name, shape in coerce(_SHAPES, entry["shapes"]).items():
            start = used[name]
            used[name] += math.prod(shape)
            if min(shape) < 0 or used[name] > len(file[name]):
                raise ValueError(f"{name} has no array of shape {shape}")
            arrays[name] = file[name][start : used[name]].reshape(shape)
        samples.append(Sample(**_typed(entry, _SAMPLE, "a sample"), **arrays))
    if any(len(column) != used[name] for name, column in file.items()):
        raise ValueError(f"its arrays are not those of {len(samples)} samples")
    return {"samples": samples, **_typed(header["batch"], _COMMON, "the batch")}


_SHAPES = dict[str, tuple[int, ...]]


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

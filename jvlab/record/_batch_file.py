"""A rollout batch as one .npz file: a JSON header for texts, flat arrays for numbers, no pickle."""

from __future__ import annotations

import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._files import parse_object
from jvlab.record._events import coerce
from jvlab.record._sample import Sample

if TYPE_CHECKING:
    from jvlab.record._batch import RolloutBatch

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


def save(batch: RolloutBatch, path: str | os.PathLike[str]) -> str:
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


def load(
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

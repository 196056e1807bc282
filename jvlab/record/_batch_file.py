"""A rollout batch as one .npz file: a JSON header for texts, flat arrays for numbers, no pickle."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._files import parse_object
from jvlab.record._sample import Sample

if TYPE_CHECKING:
    from jvlab.record._batch import RolloutBatch

Batch = TypeVar("Batch")
_FORMAT = "jvlab rollout batch 1"
_REQUIRED = (
    "prompt_index",
    "sample_index",
    "prompt",
    "text",
    "finish_reason",
    "replica",
    "retried",
    "seconds",
    "error",
)
# fields that files of earlier versions do not have
_OPTIONAL = ("reward", "reward_parts", "cached_tokens", "adapter")
_COMMON = ("model", "logprobs_mode", "notes", "seconds")
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
_MAGIC = b"\x93NUMPY\x01\x00"
_HEAD = re.compile(
    rb"\{'descr': '([<>|]?[a-z][0-9]*)', 'fortran_order': False, 'shape': \(([0-9, ]{0,60})\), \} *\n"
)
MAX_BYTES = 2 << 30
# of max_bytes per value in the header: about what a Python object takes
BYTES_PER_PART = 256


def save(batch: RolloutBatch, path: str | os.PathLike[str]) -> str:
    """Write to a temporary file, then rename: a reader never sees half a file."""
    header = {
        "format": _FORMAT,
        "batch": {name: getattr(batch, name) for name in _COMMON},
        "samples": [
            {name: getattr(s, name) for name in (*_REQUIRED, *_OPTIONAL)}
            for s in batch.samples
        ],
    }
    spans = [np.array(s.version_spans, np.int64).reshape(-1, 3) for s in batch.samples]
    arrays = {
        # ASCII escapes keep every str, unpaired surrogates included
        "header": np.frombuffer(json.dumps(header).encode("ascii"), np.uint8),
        "prompt_tokens": _joined([s.prompt_token_ids for s in batch.samples], np.int32),
        "prompt_ends": _ends(s.prompt_token_ids for s in batch.samples),
        "tokens": _joined([s.token_ids for s in batch.samples], np.int32),
        "logprobs": _joined(
            [s.logprobs for s in batch.samples if s.logprobs is not None], np.float32
        ),
        "ends": _ends(s.token_ids for s in batch.samples),
        "spans": _joined([part.ravel() for part in spans], np.int64).reshape(-1, 3),
        "span_ends": _ends(spans),
    }
    compared = [s.trainer_logprobs for s in batch.samples]
    if any(row is not None for row in compared):
        arrays["compared"] = np.array([row is not None for row in compared])
        arrays["trainer_logprobs"] = _joined(
            [row for row in compared if row is not None], np.float32
        )
    masks = [s.loss_mask for s in batch.samples]
    if any(mask is not None for mask in masks):
        arrays["masked"] = np.array([mask is not None for mask in masks])
        arrays["loss_mask"] = _joined(
            [mask for mask in masks if mask is not None], np.bool_
        )
    arrays |= _expert_columns(batch.samples)
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


def _expert_columns(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The samples' experts, flat, and for each how many layers and chosen ones: 0 and 0 if it has none."""
    if all(s.expert_ids is None for s in samples):
        return {}
    weights = [s.expert_weights for s in samples]
    return {
        "expert_shapes": np.array(
            [
                (0, 0) if s.expert_ids is None else s.expert_ids.shape[1:]
                for s in samples
            ],
            np.int64,
        ),
        "expert_ids": _joined(
            [s.expert_ids.ravel() for s in samples if s.expert_ids is not None],
            np.int16,
        ),
        "weighed": np.array([row is not None for row in weights]),
        "expert_weights": _joined(
            [row.ravel() for row in weights if row is not None], np.float32
        ),
    }


def _expert_rows(
    file: Mapping[str, np.ndarray], lengths: Sequence[int]
) -> list[dict[str, np.ndarray]]:
    """Each sample's experts, by the names of `Sample`'s fields, of so many tokens."""
    if "expert_shapes" not in file:
        return [{}] * len(lengths)
    if file["expert_shapes"].shape[1] != 2:
        raise ValueError(
            f"its shapes of experts have {file['expert_shapes'].shape[1]} columns"
        )
    shapes = [
        (n, *shape)
        for n, shape in zip(lengths, file["expert_shapes"].tolist(), strict=True)
    ]
    has = [min(shape[1:]) > 0 for shape in shapes]
    weighed = [
        flag and known
        for flag, known in zip(file["weighed"].tolist(), has, strict=True)
    ]
    out: list[dict[str, np.ndarray]] = [{} for _ in shapes]
    for name, flags in (("expert_ids", has), ("expert_weights", weighed)):
        sizes = [
            math.prod(shape) if flag else 0
            for shape, flag in zip(shapes, flags, strict=True)
        ]
        parts = _split(file[name], np.cumsum(sizes, dtype=np.int64))
        for entry, part, shape, flag in zip(out, parts, shapes, flags, strict=True):
            if flag:
                entry[name] = part.reshape(shape)
    return out


def load(
    path: str | os.PathLike[str],
    build: Callable[..., Batch],
    max_bytes: int = MAX_BYTES,
) -> Batch:
    """Read a file that `save` wrote, and call `build` with its fields.

    Anything else is an error that names the file; at most `max_bytes` are read.
    """
    # outside the try below: a missing file stays a FileNotFoundError
    with open(path, "rb") as stream:
        return _load(stream, path, build, max_bytes)


def _load(
    stream: BinaryIO,
    path: str | os.PathLike[str],
    build: Callable[..., Batch],
    max_bytes: int,
) -> Batch:
    try:
        with zipfile.ZipFile(stream) as archive:
            file = _read(archive, max_bytes)
        header = parse_object(
            file.pop("header").tobytes(), max(max_bytes // BYTES_PER_PART, 1000)
        )
        if header["format"] != _FORMAT:
            raise ValueError(
                f"its format is {str(header['format'])[:60]!r}, not {_FORMAT!r}"
            )
        return build(**_fields(header, file))
    # what zipfile, zlib and numpy raise for bytes that they cannot or must not read
    except (
        ValueError,
        LookupError,
        TypeError,
        EOFError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        MemoryError,
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
    ) as e:
        raise ConfigError(
            f"{os.fspath(path)} is not a rollout batch: {str(e)[:300] or type(e).__name__}",
            remedy="load a file that RolloutBatch.save of this jvlab wrote; a larger one with max_bytes=",
            path=os.fspath(path),
        ) from e


def _read(archive: zipfile.ZipFile, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays, by name. Their declared sizes are summed before any is read, and compared with what is read."""
    found = archive.infolist()
    if len(found) > len(_ARRAYS) or {info.filename for info in found} - {
        f"{name}.npy" for name in _ARRAYS
    }:
        raise ValueError(
            f"it holds other arrays: {', '.join(info.filename[:40] for info in found[:8])}"
        )
    total = sum(info.file_size for info in found)
    if total > max_bytes:
        raise ValueError(
            f"it declares {total:,} bytes, more than max_bytes={max_bytes:,}"
        )
    return {info.filename.removesuffix(".npy"): _array(archive, info) for info in found}


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    name = info.filename
    wanted = _ARRAYS[info.filename.removesuffix(".npy")]
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that save does not use")
    with archive.open(info) as stream:
        start = stream.read(10)
        head = (
            _HEAD.fullmatch(stream.read(int.from_bytes(start[8:], "little")))
            if start[:8] == _MAGIC
            else None
        )
        if head is None or head[1].decode() != np.dtype(wanted).str:
            raise ValueError(f"{name} does not begin as an array of {np.dtype(wanted)}")
        shape = tuple(int(n) for n in head[2].split(b",") if n.strip())
        dtype = np.dtype(wanted)
        if len(shape) != (2 if name in ("spans.npy", "expert_shapes.npy") else 1):
            raise ValueError(f"{name} has shape {shape}")
        size = math.prod(shape) * dtype.itemsize
        if size > info.file_size:
            raise ValueError(
                f"{name} declares {size:,} bytes but has {info.file_size:,}"
            )
        data = stream.read(size)
        if len(data) != size or stream.read(1):
            raise ValueError(f"{name} is longer or shorter than it declares")
    return np.frombuffer(data, dtype).reshape(shape)


def _fields(header: dict[str, Any], file: Mapping[str, np.ndarray]) -> dict[str, Any]:
    entries = [_checked(entry) for entry in header["samples"]]
    if {len(file[name]) for name in ("prompt_ends", "ends", "span_ends")} != {
        len(entries)
    }:
        raise ValueError(f"its arrays are not those of {len(entries)} samples")
    if file["spans"].shape[1] != 3:
        raise ValueError(f"its spans have {file['spans'].shape[1]} columns")
    prompts = _split(file["prompt_tokens"], file["prompt_ends"])
    tokens = _split(file["tokens"], file["ends"])
    logprobs = _split(file["logprobs"], file["ends"])
    spans = _split(file["spans"], file["span_ends"])
    trainer = _optional_rows(file, "compared", "trainer_logprobs", tokens)
    masks = _optional_rows(file, "masked", "loss_mask", tokens)
    experts = _expert_rows(
        file,
        [len(prompt) + len(ids) for prompt, ids in zip(prompts, tokens, strict=True)],
    )
    samples = [
        Sample(
            **{name: entry[name] for name in _REQUIRED},
            **{name: entry.get(name) for name in _OPTIONAL},
            trainer_logprobs=trainer_row,
            loss_mask=mask,
            prompt_token_ids=prompt,
            token_ids=ids,
            logprobs=logprob,
            versions=tuple(tuple(span) for span in part.tolist()),
            **chosen,
        )
        for entry, prompt, ids, logprob, part, trainer_row, mask, chosen in zip(
            entries,
            prompts,
            tokens,
            logprobs,
            spans,
            trainer,
            masks,
            experts,
            strict=True,
        )
    ]
    common = {name: header["batch"][name] for name in _COMMON}
    if (
        not isinstance(common["model"], str)
        or not _are_strings(common["notes"])
        or not _is_number(common["seconds"], True)
    ):
        raise TypeError(f"its batch header is {str(common)[:100]}")
    return {"samples": tuple(samples), **common}


def _checked(entry: Any) -> dict[str, Any]:
    """A sample's header, if each field has the type that `save` writes."""
    whole = lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63
    text = lambda value: isinstance(value, str)
    some = lambda value: value is None or text(value)
    numbers = lambda value: (
        isinstance(value, dict) and all(map(_is_number, value.values()))
    )
    rules = {
        "prompt_index": whole,
        "sample_index": whole,
        "prompt": some,
        "text": text,
        "finish_reason": text,
        "replica": text,
        "retried": whole,
        "error": some,
        "reward": lambda value: _is_number(value, True),
        "reward_parts": lambda value: value is None or numbers(value),
        "seconds": numbers,
        "cached_tokens": lambda value: value is None or whole(value),
        "adapter": lambda value: (
            value is None or (len(value) == 2 and text(value[0]) and whole(value[1]))
        ),
    }
    for name, fits in rules.items():
        value = entry[name] if name in _REQUIRED else entry.get(name)
        if not fits(value):
            raise TypeError(f"{name} of a sample is {str(value)[:60]!r}")
    return entry


def _is_number(value: Any, or_none: bool = False) -> bool:
    return (
        type(value) is float
        or (type(value) is int and abs(value) < 1 << 63)
        or (or_none and value is None)
    )


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _optional_rows(
    file: Mapping[str, np.ndarray], flag: str, name: str, tokens: list[np.ndarray]
) -> list[np.ndarray | None]:
    """Column `name`, split by sample; None for samples whose `flag` is not set."""
    if flag not in file:
        return [None] * len(tokens)
    has = file[flag].tolist()
    lengths = [len(ids) for ids, known in zip(tokens, has, strict=True) if known]
    rows = iter(_split(file[name], np.cumsum(lengths, dtype=np.int64)))
    return [next(rows) if known else None for known in has]


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _ends(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)


def _split(values: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    last = int(ends[-1]) if len(ends) else 0
    if last != len(values):
        raise ValueError(f"{len(values)} values where {last} are declared")
    # could exceed the file
    if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any()):
        raise ValueError("its pieces overlap")
    return np.split(values, ends[:-1]) if len(ends) else []

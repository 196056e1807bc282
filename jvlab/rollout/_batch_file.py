"""A rollout batch as one .npz file: a JSON header for texts, flat arrays for numbers, no pickle either way."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jvlab._errors import ConfigError
from jvlab.rollout._batch import RolloutBatch, Sample

_FORMAT = "jvlab rollout batch 1"
_TEXTS = ("prompt_index", "sample_index", "prompt", "text", "finish_reason", "replica", "retried", "seconds", "error")
_LATER = ("reward", "cached_tokens", "adapter")  # fields that files of earlier versions do not have
_COMMON = ("model", "logprobs_mode", "notes", "seconds")


def save(batch: RolloutBatch, path: str | os.PathLike[str]) -> str:
    """Write beside the target, then rename: a reader never meets half a file."""
    header = {
        "format": _FORMAT,
        "batch": {name: getattr(batch, name) for name in _COMMON},
        "samples": [{name: getattr(s, name) for name in (*_TEXTS, *_LATER)} for s in batch.samples],
    }
    spans = [np.array(s.versions, np.int64).reshape(-1, 3) for s in batch.samples]
    arrays = {
        # ASCII escapes keep every str, unpaired surrogates included
        "header": np.frombuffer(json.dumps(header).encode("ascii"), np.uint8),
        "prompt_tokens": _joined([s.prompt_token_ids for s in batch.samples], np.int32),
        "prompt_ends": _ends(s.prompt_token_ids for s in batch.samples),
        "tokens": _joined([s.token_ids for s in batch.samples], np.int32),
        "logprobs": _joined([s.logprobs for s in batch.samples if s.logprobs is not None], np.float32),
        "ends": _ends(s.token_ids for s in batch.samples),
        "spans": _joined([part.ravel() for part in spans], np.int64).reshape(-1, 3),
        "span_ends": _ends(spans),
    }
    compared = [s.trainer_logprobs for s in batch.samples]
    if any(row is not None for row in compared):
        arrays["compared"] = np.array([row is not None for row in compared])
        arrays["trainer_logprobs"] = _joined([row for row in compared if row is not None], np.float32)
    masks = [s.loss_mask for s in batch.samples]
    if any(mask is not None for mask in masks):
        arrays["masked"] = np.array([mask is not None for mask in masks])
        arrays["loss_mask"] = _joined([mask for mask in masks if mask is not None], np.bool_)
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


def load(path: str | os.PathLike[str]) -> RolloutBatch:
    """Read a file that `save` wrote; anything else is an error that names it."""
    try:
        # np.load leaves a file open that it cannot read, so the opening is ours
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header["format"] != _FORMAT:
                raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
            return _batch(header, file)
    except (ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as e:
        raise ConfigError(
            f"{os.fspath(path)} is no rollout batch: {e}",
            remedy="load a file that RolloutBatch.save of this jvlab wrote",
            path=os.fspath(path),
        ) from e


def _batch(header: dict, file: np.lib.npyio.NpzFile) -> RolloutBatch:
    prompts, tokens = _split(file["prompt_tokens"], file["prompt_ends"]), _split(file["tokens"], file["ends"])
    logprobs, spans = _split(file["logprobs"], file["ends"]), _split(file["spans"], file["span_ends"])
    trainer = _some(file, "compared", "trainer_logprobs", tokens)
    masks = _some(file, "masked", "loss_mask", tokens)
    samples = [
        Sample(
            **{name: entry[name] for name in _TEXTS},
            **{name: entry.get(name) for name in _LATER},
            trainer_logprobs=theirs,
            loss_mask=mask,
            prompt_token_ids=prompt,
            token_ids=ids,
            logprobs=logprob,
            versions=tuple(tuple(span) for span in part.tolist()),
        )
        for entry, prompt, ids, logprob, part, theirs, mask in zip(
            header["samples"], prompts, tokens, logprobs, spans, trainer, masks, strict=True
        )
    ]
    return RolloutBatch(samples=tuple(samples), **{name: header["batch"][name] for name in _COMMON})


def _some(file: np.lib.npyio.NpzFile, flag: str, name: str, tokens: list[np.ndarray]) -> list[np.ndarray | None]:
    """A row per token of those samples that have one: the column `name` of the samples with `flag`."""
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
    if len(ends) and ends[-1] != len(values):
        raise ValueError(f"{len(values)} values where {ends[-1]} are announced")
    return np.split(values, ends[:-1]) if len(ends) else []

"""Scores a recorded sample again under the weights that generated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.trainer._batching import Buckets, TrainBatch

if TYPE_CHECKING:
    from jvlab.record._samples import SampleRecord
    from jvlab.trainer._loop import Loop
    from jvlab.trainer._run_checkpoint import Checkpoints


def replay(loop: Loop, checkpoints: Checkpoints, sample: SampleRecord) -> np.ndarray:
    """log P of each of the sample's tokens under its own version; raises if a version's checkpoint is missing."""
    own = np.ones(len(sample.tokens), bool) if not sample.mask else np.asarray(sample.mask, bool)
    versions = sample.token_versions
    wanted = sorted({int(v) for v in versions[own]})
    paths = {v: checkpoints.of_version(v) for v in wanted}
    missing = [v for v, path in paths.items() if path is None]
    if missing:
        held = sorted(checkpoints.position(p).version for p in checkpoints.paths())
        raise ConfigError(
            f"no checkpoint holds version {', '.join(map(str, missing))}; there are {held or 'none'}",
            remedy="run with checkpoint_every=1 and keep_checkpoints=None to be able to replay every sample",
            versions=missing,
        )
    batch, start, out = _batch(sample, own), len(sample.prompt_tokens), np.zeros(len(own), np.float32)
    for version, path in paths.items():
        assert path is not None
        params: Any = checkpoints.load(path, loop.state).params
        scored = loop.train.score(params, batch)[0, start : start + len(own)]
        at = own & (versions == version)
        out[at] = scored[at]
    checkpoints.close()
    return out


def _batch(sample: SampleRecord, own: np.ndarray) -> TrainBatch:
    """One row, as `TrainStep.score` reads it."""
    tokens = np.array([*sample.prompt_tokens, *sample.tokens], np.int32)
    buckets = Buckets(rows=1)
    width = buckets.width(len(tokens))
    row = np.zeros((1, width), np.int32)
    row[0, : len(tokens)] = tokens
    mask = (np.arange(width) < len(tokens))[None]
    loss = np.zeros((1, width), bool)
    loss[0, len(sample.prompt_tokens) : len(tokens)] = own
    one = np.zeros(1, np.float32)
    zeros = np.zeros((1, width), np.float32)
    return TrainBatch(
        row, mask, loss, zeros, np.full((1, width), -1, np.int32), one, one, np.zeros(1, np.int32), buckets
    )

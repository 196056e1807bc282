"""A trainer's log-probabilities of a batch's completions, one row per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.record._expert_routes import check_replay, expert_arrays

if TYPE_CHECKING:
    from jvlab.record._batch import RolloutBatch


def trainer_rows(batch: RolloutBatch, trainer: Any, params: Any, temperature: float, replay: str) -> list[Any]:
    """The policy's log-probabilities of every completion, or the rows passed in; one per sample."""
    check_replay(replay)
    if not hasattr(trainer, "logprobs"):
        given = list(trainer)
        if replay != "none":
            raise ConfigError(f"replay={replay!r} of rows that are given", remedy="pass a jv.Policy, or leave it out")
        if len(given) != len(batch):
            raise ConfigError(
                f"{len(given)} rows for {len(batch)} samples", remedy="pass one array per sample, in order"
            )
        return given
    arrays = batch.arrays(pad_to="power_of_two")  # few lengths, so few compilations
    tree = trainer.params if params is None else params
    experts = expert_arrays(batch.samples, arrays["tokens"].shape[1], replay)
    more = {"routes": tuple(experts.values())} if experts else {}
    rows = np.asarray(trainer.logprobs(tree, arrays["tokens"], arrays["lengths"], temperature=temperature, **more))
    ends = zip(rows, arrays["prompt_lengths"].tolist(), arrays["lengths"].tolist(), strict=True)
    return [row[start:stop] for row, start, stop in ends]

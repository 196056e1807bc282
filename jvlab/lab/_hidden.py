"""Fetches hidden states from a pool and compares them with a policy's, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import Unsupported
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool_calls import PoolCalls

# the models diverge at the first layer with this multiple of any earlier layer's difference
JUMP = 10.0


def hidden_states(
    pool: PoolCalls, tokens: Sequence[int], deadline: Deadline
) -> np.ndarray:
    """Float32 [layers, tokens, width]."""
    if pool.replicas != 1:
        raise Unsupported(
            f"{pool.name} has {pool.replicas} replicas, and a score may go to any of them",
            remedy="launch a pool of one replica for this",
        )
    sequence = pool._score_call([list(tokens)], 0, deadline).sequences[0]
    call = pb.HiddenCall(pool=pool.name, replica=f"{pool.name}/0", tokens=sequence)
    found: dict[int, bytes] = defaultdict(bytes)
    for event in pool._client.loop.run(pool._client.gather("Hidden", call, deadline)):
        found[event.layer] += event.piece
    rows = [np.frombuffer(found[layer], np.float32) for layer in sorted(found)]
    if not all(len(row) for row in rows):
        raise Unsupported(
            "no layer returned hidden states: this engine runs a compiled graph",
            remedy='launch with engine={"enforce_eager": True}',
        )
    if any(len(row) % len(tokens) for row in rows):
        raise Unsupported(
            "other requests ran at the same time",
            remedy="try again when the pool is idle",
        )
    return np.stack([row.reshape(len(tokens), -1) for row in rows])


@dataclass(frozen=True)
class LayerGaps:
    """The relative difference of two models' hidden states after each layer; `layer` is where they diverge."""

    apart: tuple[float, ...]

    @property
    def layer(self) -> int:
        """The first layer that differs much more than all before it; else the one that differs most."""
        floor = 1e-4  # smaller differences are rounding
        for index, value in enumerate(self.apart):
            if value > max(floor, JUMP * max(self.apart[:index], default=0.0)):
                return index
        return int(np.argmax(self.apart))

    def __str__(self) -> str:
        before = (
            f"after layer {self.layer - 1} they are {self.apart[self.layer - 1]:.2g} apart, "
            if self.layer
            else ""
        )
        return f"{before}after layer {self.layer} {self.apart[self.layer]:.2g}"


def compare_layers(engine: np.ndarray, trainer: Any) -> LayerGaps:
    """Per layer, the largest difference divided by the largest value."""
    theirs = np.asarray(trainer, np.float32)
    off = np.abs(engine - theirs).max(axis=(1, 2)) / np.maximum(
        np.abs(theirs).max(axis=(1, 2)), 1e-12
    )
    return LayerGaps(tuple(float(v) for v in off))

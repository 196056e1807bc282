"""Hidden states on both sides, layer by layer: fetched from a pool, compared with a policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import Unsupported
from jvlab.rollout._hidden import MARK

if TYPE_CHECKING:
    from jvlab._pool import Pool

APART = 10.0  # a layer this many times further off than any before it is where two models part


def hidden_states(pool: Pool, tokens: Sequence[int], timeout: float) -> np.ndarray:
    """Float32 [layers, tokens, width]; the hooks are taken off again, whatever happens."""
    if pool.replicas != 1:
        raise Unsupported(
            f"{pool.name} has {pool.replicas} replicas, and a score may go to any of them",
            remedy="launch a pool of one replica to look into",
        )
    layers = int(pool.peek(f"{MARK}listen", timeout=timeout))
    try:
        pool.score([list(tokens)], timeout=timeout)
        found = [pool.peek(f"{MARK}{i}", timeout=timeout) for i in range(layers)]
    finally:
        pool.peek(f"{MARK}end", timeout=timeout)
    rows = [np.frombuffer(data, np.float32) for data in found]
    if not all(len(row) for row in rows):
        raise Unsupported(
            "no layer was heard: this engine runs a compiled graph", remedy='launch with engine={"enforce_eager": True}'
        )
    if any(len(row) % len(tokens) for row in rows):
        raise Unsupported("other requests ran at the same time", remedy="try again when the pool is idle")
    return np.stack([row.reshape(len(tokens), -1) for row in rows])


@dataclass(frozen=True)
class Parting:
    """How far two models are apart after each layer, relative to the size of its states; `layer` is where they part."""

    apart: tuple[float, ...]

    @property
    def layer(self) -> int:
        """The first layer that is off much more than all before it; else the one that is off most."""
        floor = 1e-4  # below it is rounding
        for index, value in enumerate(self.apart):
            if value > max(floor, APART * max(self.apart[:index], default=0.0)):
                return index
        return int(np.argmax(self.apart))

    def __str__(self) -> str:
        before = f"after layer {self.layer - 1} they are {self.apart[self.layer - 1]:.2g} apart, " if self.layer else ""
        return f"{before}after layer {self.layer} {self.apart[self.layer]:.2g}"


def parting(engine: np.ndarray, trainer: Any) -> Parting:
    """Layer by layer, the largest difference over the largest value."""
    theirs = np.asarray(trainer, np.float32)
    off = np.abs(engine - theirs).max(axis=(1, 2)) / np.maximum(np.abs(theirs).max(axis=(1, 2)), 1e-12)
    return Parting(tuple(float(v) for v in off))

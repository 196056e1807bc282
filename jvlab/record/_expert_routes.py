"""The experts that an engine chose for each token of some samples, as arrays for a trainer. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jvlab._errors import ConfigError

REPLAYS = ("none", "ids", "full")  # own router; the engine's experts; its experts and their weights


def check_replay(replay: str) -> None:
    """Raise ConfigError unless it is one of REPLAYS."""
    if replay not in REPLAYS:
        raise ConfigError(f"replay={replay!r}", remedy=f"one of {', '.join(REPLAYS)}")


def frozen_routes(ids: Any, weights: Any, tokens: int, **where: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Ids as int16 and weights as float32, read-only, both [tokens, layers, chosen]; raises if shapes do not fit."""
    if ids is None:
        if weights is not None:
            raise ConfigError("expert_weights without expert_ids", remedy="pass both, or ids alone", **where)
        return None, None
    found = [np.array(ids, np.int16)] + ([] if weights is None else [np.array(weights, np.float32)])
    for array in found:
        if array.ndim != 3 or array.shape != found[0].shape or len(array) != tokens:
            raise ConfigError(
                f"experts of shape {array.shape} for {tokens} tokens, prompt included",
                remedy="pass [tokens, layers, chosen], -1 where none is known",
                **where,
            )
        array.setflags(write=False)
    return found[0], found[1] if weights is not None else None


def expert_arrays(samples: Sequence[Any], width: int, replay: str) -> dict[str, np.ndarray]:
    """`expert_ids` [N, width, layers, chosen] int16, and for "full" `expert_weights`, float32; nothing for "none".

    -1 where no choice is known: padding, a sample's last token, and prompts found in an engine's prefix cache.
    """
    check_replay(replay)
    if replay == "none" or not samples:
        return {}
    names = ("expert_ids", "expert_weights")[: 1 + (replay == "full")]
    found: dict[str, np.ndarray] = {}
    for name in names:
        rows: list[Any] = [getattr(sample, name, None) for sample in samples]
        missing = next((i for i, row in enumerate(rows) if row is None), None)
        if missing is not None:
            what = "experts" if name == "expert_ids" else "weights of experts"
            raise ConfigError(
                f"replay={replay!r}, but sample {missing} has no {what}",
                remedy='lab.launch(..., engine={"enable_return_routed_experts": True}); weights come from CPUs only',
            )
        out = np.full((len(rows), width, *rows[0].shape[1:]), -1 if name == "expert_ids" else 0, rows[0].dtype)
        for at, row in enumerate(rows):
            out[at, : len(row)] = row
        found[name] = out
    return found

"""How evenly a mixture's experts are used: from the tokens that chose each, the numbers a record keeps of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def expert_balance(loads: Iterable[Any]) -> Mapping[str, tuple[float, ...]]:
    """By name, one number for each layer, of the loads [layers, experts] of a step's micro-batches; {} without experts.

    max, min   the share of the busiest and of the idlest expert in all choices of a layer; even use gives 1 / experts
    entropy    of the shares, over that of even use: 1 if all experts are used alike, 0 if one is used alone
    """
    found = [np.asarray(load, np.float64) for load in loads if load is not None]
    if not found:
        return {}
    total = np.sum(found, axis=0)
    shares = total / np.maximum(total.sum(axis=1, keepdims=True), 1)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropy = -(shares * logs).sum(axis=1) / max(np.log(shares.shape[1]), 1e-12)
    numbers = {"max": shares.max(axis=1), "min": shares.min(axis=1), "entropy": entropy}
    return {name: tuple(map(float, values)) for name, values in numbers.items()}

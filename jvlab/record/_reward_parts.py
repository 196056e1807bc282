"""A reward made of parts: what a reward function returns as a mapping, and the number that training uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

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
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, NUMBERS) for v in value.values())


def parts_of(reward: Any) -> dict[str, float]:
    """The parts of a reward; {} if it is one number."""
    return dict(reward.parts) if isinstance(reward, PartedReward) else {}

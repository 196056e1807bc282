"""Checks of arguments: a whole number, a finite number, one of some choices, sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jvlab._errors import ConfigError


def check_whole(name: str, given: Any, least: int = 1) -> None:
    """Raise ConfigError unless it is a whole number of at least `least`."""
    if isinstance(given, (bool, np.bool_)) or not isinstance(given, (int, np.integer)):
        raise ConfigError(
            f"{name}={given!r}",
            remedy=f"{name} is a whole number of at least {least}",
            option=name,
        )
    if given < least:
        raise ConfigError(
            f"{name}={given}", remedy=f"{name} is at least {least}", option=name
        )


def check_number(
    name: str, given: Any, above: float | None = None, least: float | None = None
) -> None:
    """Raise ConfigError unless it is a finite number, above or at least a bound."""
    is_number = isinstance(
        given, (int, float, np.integer, np.floating)
    ) and not isinstance(given, bool)
    good = is_number and math.isfinite(given)
    good = (
        good and (above is None or given > above) and (least is None or given >= least)
    )
    if not good:
        bound = (
            f" above {above:g}"
            if above is not None
            else f" of at least {least:g}"
            if least is not None
            else ""
        )
        raise ConfigError(
            f"{name}={given!r}", remedy=f"{name} is a finite number{bound}", option=name
        )


def check_choice(name: str, given: Any, choices: Sequence[Any]) -> None:
    """Raise ConfigError unless it is one of these; 1 is not True."""
    if not any(type(given) is type(choice) and given == choice for choice in choices):
        remedy = f"{name} is one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"{name}={given!r}", remedy=remedy, option=name)


def check_sampling(given: Any) -> None:
    """Raise ConfigError unless these are sampling parameters by name, with a good max_tokens if there is one."""
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ):
        raise ConfigError(
            f"sampling is {given!r}",
            remedy='sampling={"top_p": 0.9}, by the names of vLLM',
        )
    if given and given.get("max_tokens") is not None:
        check_whole("max_tokens", given["max_tokens"])

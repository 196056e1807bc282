"""Checks of arguments: a whole number, a finite number, one of some choices, sampling parameters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jvlab._errors import ConfigError


def check_whole(name: str, given: Any, least: int = 1) -> None:
    """Raise ConfigError unless it is a whole number of at least `least`."""
    whole = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if not whole or given < least:
        remedy = f"{name} is a whole number of at least {least}"
        raise ConfigError(f"{name}={given!r}", remedy=remedy, option=name)


def check_number(
    name: str, given: Any, above: float | None = None, least: float | None = None
) -> None:
    """Raise ConfigError unless it is a finite number, above or at least a bound."""
    is_number = isinstance(
        given, (int, float, np.integer, np.floating)
    ) and not isinstance(given, bool)
    good = is_number and math.isfinite(given)
    bound = ""
    if above is not None:
        good = good and given > above
        bound = f" above {above:g}"
    elif least is not None:
        good = good and given >= least
        bound = f" of at least {least:g}"
    if not good:
        remedy = f"{name} is a finite number{bound}"
        raise ConfigError(f"{name}={given!r}", remedy=remedy, option=name)


def check_choice(name: str, given: Any, choices: Sequence[Any]) -> None:
    """Raise ConfigError unless it is one of these; 1 is not True."""
    if not any(type(given) is type(choice) and given == choice for choice in choices):
        remedy = f"{name} is one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"{name}={given!r}", remedy=remedy, option=name)


def meant(name: object, known: Iterable[str], option: str = "") -> str:
    """A remedy for a name that does not exist: the nearest that does, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, 1)
    if close:
        return f"did you mean {option}{close[0]!r}?"
    return f"there are: {', '.join(names) or 'none'}"


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

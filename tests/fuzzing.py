"""How much of a large product `make test` tries: a quarter of the examples, some rows. `make soak`: all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

# set by `make soak`: explore instead of repeating
NEW_EXAMPLES = bool(os.environ.get("JVLAB_FUZZ"))


def examples(full: int) -> int:
    """For hypothesis's `max_examples`."""
    return full if NEW_EXAMPLES else max(full // 4, 10)


def in_turn(*axes: Sequence[Any]) -> list[Any]:
    """Rows for `parametrize`: every value of the longest axis with one of each other axis in turn; the rest is soak.

    >>> [row.values for row in in_turn("abc", [1, 2]) if not row.marks]
    [('a', 1), ('b', 2), ('c', 1)]
    """
    longest = max(map(len, axes))
    usual = {tuple(axis[k % len(axis)] for axis in axes) for k in range(longest)}
    return [
        pytest.param(*row, marks=() if row in usual else pytest.mark.soak)
        for row in itertools.product(*axes)
    ]


def soak_but(usual: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, of which only `usual` run in `make test`."""
    return [
        value if value in usual else pytest.param(value, marks=pytest.mark.soak)
        for value in values
    ]

"""The weight version of each token, and the same as spans (version, start, stop). numpy only."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from jvlab._errors import ConfigError

Spans = tuple[tuple[int, int, int], ...]


def versions_of(given: Any, count: int, **where: object) -> np.ndarray:
    """One version per token, int64 and read-only, from one per token or from spans that cover `count` tokens."""
    try:
        array = np.array(given, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"versions {given!r}: {error}", remedy="pass one whole number per token", **where) from error
    if array.size and array.ndim == 1:
        if len(array) != count:
            raise ConfigError(f"{len(array)} versions for {count} tokens", remedy="pass one per token", **where)
    elif array.size and array.shape[1:] != (3,):
        raise ConfigError(f"versions of shape {array.shape}", remedy="pass one per token, or (version, start, stop)s")
    else:
        spans = array.reshape(-1, 3)
        edges = [0, *spans[:, 2].tolist()]
        if spans[:, 1].tolist() != edges[:-1] or edges[-1] != count or (spans[:, 1] >= spans[:, 2]).any():
            raise ConfigError(
                f"version spans {tuple(map(tuple, spans.tolist()))} do not cover {count} tokens once, in order",
                remedy="pass contiguous (version, start, stop) from 0 to the number of tokens",
                **where,
            )
        array = np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1])
    array.setflags(write=False)
    return array


def spans_of(versions: np.ndarray) -> Spans:
    """Runs of equal versions as (version, start, stop)."""
    if not len(versions):
        return ()
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple((int(versions[a]), a, b) for a, b in itertools.pairwise(edges))

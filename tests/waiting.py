"""Waiting in tests, always with a deadline; and a clock for tests of deadlines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: str = "it",
    seconds: float = 120.0,
    pause: float = 0.01,
) -> T:
    """Wait until `condition` returns a true value, and return it; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"{what} did not happen within {seconds:g} s"
        )
        time.sleep(pause)
    return found


def stolen_time() -> float:
    """Seconds per core that this machine has waited for its host, which gave them to others; 0 without a host."""
    # of all cores together
    stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return stolen / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def own_time() -> float:
    """A clock in seconds that leaves out stolen time: nothing keeps a deadline on a core that it does not get."""
    return time.monotonic() - stolen_time()

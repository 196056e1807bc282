"""Memory available to this process: of the machine, or of its cgroup if that is less."""

from __future__ import annotations

import contextlib
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Free memory and reclaimable page cache."""
    import psutil

    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max", or no cgroup v2
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = (GROUP / "memory.stat").read_text().split()
        available = min(available, limit - used + int(stat[stat.index("inactive_file") + 1]))
    return max(0, available)

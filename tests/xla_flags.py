"""XLA's flags for programs that run a few times only: they compile in a fifth of the time (a gradient of a tiny llama:
5.1 s, or 1.2 without the fusion emitters, jaxlib 0.10.2, 2 cores)."""

from __future__ import annotations

import mmap
from pathlib import Path

UNOPTIMISED = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
PLAIN_LOOPS = "xla_cpu_use_fusion_emitters"


def plain_loops() -> list[str]:
    """Turns the fusion emitters off, if this jaxlib has that flag: XLA ends a process that is given an unknown one."""
    import jaxlib

    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    if not library.exists():
        return []
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [f"--{PLAIN_LOOPS}=false"] if content.find(PLAIN_LOOPS.encode()) >= 0 else []

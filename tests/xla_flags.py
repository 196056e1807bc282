"""XLA's flags for programs that run a few times only: they compile in a fifth of the time (a gradient of a tiny llama:
5.1 s, or 1.2 without the fusion emitters, jaxlib 0.10.2, 2 cores)."""

from __future__ import annotations

UNOPTIMISED = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
PLAIN_LOOPS = "xla_cpu_use_fusion_emitters"
# seen with 0.10.2; 0.11.2 refuses it, though its library has the name
HAVE_IT = "0.10."


def plain_loops() -> list[str]:
    """Turns the fusion emitters off, and compiles a program as one part, if this jaxlib has these flags: XLA ends a
    process that is given an unknown one."""
    import jaxlib

    if not jaxlib.__version__.startswith(HAVE_IT):
        return []
    return [f"--{PLAIN_LOOPS}=false", "--xla_cpu_parallel_codegen_split_count=1"]

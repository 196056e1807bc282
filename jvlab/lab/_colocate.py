"""Trainer and engine on one GPU: how its memory is divided.

JAX's default allocator never returns memory and never exceeds its share, so it could neither use what a sleeping
engine frees nor give it back. Its `cuda_async` allocator keeps its share, takes more if available, and releases
memory above the share at the next synchronisation after it is freed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from jvlab._errors import ConfigError

ENGINE_SHARE = 0.45
SPARE = 0.08  # CUDA contexts, graphs, and kernels' own memory, on both sides
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both together
ALLOCATOR, ELASTIC = "XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async"


def engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments: its share of the card, and sleep mode, so that `pool.sleep` can free it."""
    return {"gpu_memory_utilization": ENGINE_SHARE, "enable_sleep_mode": True, **given}


def trainer_share(engine: float) -> float:
    """JAX's share next to an engine with that share; it may take more while the engine sleeps."""
    share = 1.0 - SPARE - engine
    if not 0.0 < engine < 1.0 or share < 0.05:
        raise ConfigError(
            f"gpu_memory_utilization={engine:g} leaves {max(0.0, share):.0%} of the card to the trainer",
            remedy=f"launch(..., colocate=True, engine={{'gpu_memory_utilization': {ENGINE_SHARE}}})",
        )
    return round(share, 2)


def share_card(engine: float) -> None:
    """Limit this process's JAX memory pool; if JAX has started already, check that it left enough."""
    share = trainer_share(engine)
    if not jax_has_started():
        if not os.environ.get(FRACTION) and not os.environ.get(OLD_FRACTION):
            os.environ[FRACTION] = str(share)
        os.environ.setdefault(ALLOCATOR, ELASTIC)
        _allocate_share()
        return
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    taken, total = stats.get("bytes_limit", 0), _card_bytes()
    if not total or taken <= (share + SPARE / 2) * total:
        return
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return  # an upper bound, not memory that JAX holds
    raise ConfigError(
        f"JAX has taken {taken / total:.0%} of the card already, the engine is to have {engine:.0%}",
        remedy=f"launch(colocate=True) before the first array, or set {FRACTION}={share} and {ALLOCATOR}={ELASTIC} "
        "when the kernel starts",
        taken=taken,
        total=total,
    )


def _allocate_share() -> None:
    """Make JAX allocate its share now (at its first array): the engine measures free memory while it starts."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(1))


def give_back() -> None:
    """Before an engine wakes: return what this process's JAX has freed above its share."""
    if os.environ.get(ALLOCATOR) != ELASTIC or not jax_has_started():
        return
    from importlib.util import find_spec

    if find_spec("cupy") is None:  # CUDA then releases it at JAX's next synchronisation
        return
    import cupy
    import jax

    for device in jax.local_devices():
        if device.platform in ("gpu", "cuda"):
            cupy.cuda.Device(int(getattr(device, "local_hardware_id", 0) or 0)).synchronize()


def jax_has_started() -> bool:
    """Whether JAX's backends are initialized in this process, which fixes its memory settings."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge is not None and bridge.backends_are_initialized())


def _card_bytes() -> int:
    from importlib.util import find_spec

    if find_spec("cupy") is None:
        return 0
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[1])

"""Sleep and wake of one engine: which memory is released, and when generation may resume afterwards.

vLLM's own `wake_up` resumes its scheduler as soon as all memory is allocated. Here it resumes only if the weights are
those of one version and the user has not paused: requests that waited through a sleep must not use discarded weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import SyncError
from jvlab.engine import _vllm

if TYPE_CHECKING:
    from jvlab.engine._engine_sync import EngineSync

ALL = frozenset({"weights", "kv_cache"})


async def sleep(llm: Any, sync: EngineSync, level: int) -> None:
    """Level 1 keeps the weights in host memory; level 2 drops them, and the engine is dirty until a sync."""
    async with sync.lock:
        state = sync.state
        if state.terms is not None:
            raise SyncError(f"a sync of version {state.terms.version} is open", remedy="wait for its end")
        if "weights" in sync.asleep:
            if level > 1 and not state.discarded:
                raise SyncError("the engine sleeps at level 1", remedy='pool.wake(["weights"]), then pool.sleep(2)')
            return
        await _release_shadows(sync)
        if level > 1:
            state.discard()  # both are set first, as the call may be interrupted
        sync.asleep = set(ALL)
        await llm.sleep(level)


async def wake(llm: Any, sync: EngineSync, tags: list[str]) -> None:
    """Allocate memory again; tags that are awake already are left out, as vLLM would refuse the whole call."""
    async with sync.lock:
        state, wanted = sync.state, sync.asleep & (set(tags) or ALL)
        if not wanted:
            return
        if state.terms is None:
            await _release_shadows(sync)  # allocated by a sync during the sleep; the memory is needed now
        await _vllm.wake(llm, sorted(wanted))
        sync.asleep -= wanted
        if not sync.asleep and not sync.user_paused and not state.dirty and not state.halted:
            await llm.resume_generation()


async def _release_shadows(sync: EngineSync) -> None:
    """Free the shadows of staged syncs; the next such sync allocates new ones."""
    if sync.state.link:
        await sync.ask("jv_release_shadows")

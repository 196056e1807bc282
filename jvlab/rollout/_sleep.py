"""Sleep and wake of one engine: which memory is given back, and when generation may go on after it came back.

vLLM's own `wake_up` lets its scheduler go on as soon as all memory is there. Here it goes on only if the weights are
those of a version and nobody asked for a pause: requests that waited through a sleep must not meet discarded weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import SyncError
from jvlab.rollout import _vllm

if TYPE_CHECKING:
    from jvlab.rollout._engine_sync import EngineSync

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
            state.discard()  # both before it happens: it may be interrupted
        sync.asleep = set(ALL)
        await llm.sleep(level)


async def wake(llm: Any, sync: EngineSync, tags: list[str]) -> None:
    """Take memory again; what is awake already is left alone, as vLLM would refuse all of the tags for it."""
    async with sync.lock:
        state, wanted = sync.state, sync.asleep & (set(tags) or ALL)
        if not wanted:
            return
        if state.terms is None:
            await _release_shadows(sync)  # a sync while it slept made them; the memory is needed now
        await _vllm.wake(llm, sorted(wanted))
        sync.asleep -= wanted
        if not sync.asleep and not sync.user_paused and not state.dirty and not state.halted:
            await llm.resume_generation()


async def _release_shadows(sync: EngineSync) -> None:
    """Shadows of staged syncs are memory like any other; the next such sync makes them anew."""
    if sync.state.link:
        await sync.ask("jv_release_shadows")

"""A direct sync by ipc from the front end's side: the core runs it whole (`_core_sync`), here its state is kept."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from jvlab import _errors as errors
from jvlab.control import _door
from jvlab.control import jvlab_pb2 as pb
from jvlab.rollout import _strikes, _vllm
from jvlab.rollout._sync_state import ORDER, Terms

if TYPE_CHECKING:
    from jvlab.rollout._engine_sync import EngineSync

BEFORE = ("prepare", "halt", "move")
SECONDS = 60.0


def is_whole(request: pb.RolloutSyncRequest) -> bool:
    """All phases of a direct sync in one order?"""
    phases = tuple(pb.SyncPhase.Name(p).lower() for p in request.phases)
    return phases == ORDER["direct"] and request.terms.mode == "direct"


async def exchange(sync: EngineSync, terms: Terms, request: pb.RolloutSyncRequest) -> None:
    """Every phase. Raises what went wrong; `sync.at` names the phase it was."""
    for phase in BEFORE:
        sync.at = phase
        sync.state.check(phase, terms if phase == "prepare" else None)
        sync.state.enter(phase)
        if _strikes.VARIABLE in os.environ:
            await asyncio.to_thread(_strikes.strike, "rollout", phase)
        if phase == "prepare":
            await sync.prepare(terms)
        sync.state.did(phase, terms if phase == "prepare" else None)
    await sync.to_its_end(_core(sync, terms, request))


async def _core(sync: EngineSync, terms: Terms, request: pb.RolloutSyncRequest) -> None:
    goes_on = not (sync.user_paused or sync.asleep or _vllm.is_multimodal(sync.llm))
    order = {**_door.order(terms, request.seconds or SECONDS, request.call), "resume": goes_on}
    told = await sync.llm.engine_core.call_utility_async("jv_exchange", order)
    sync.note(told["seconds"])
    sync.at = "verify" if told["stage"] == "verify" else "move"
    answers = sync.checked(told["answers"])
    sync.at = "verify"
    sync.take(answers, None if terms.verify == "off" else claims(told["claimed"], sync.names))
    for phase in ("verify", "commit"):
        sync.at = phase
        sync.state.did(phase)
    sync.committed()
    sync.at = "go_on"
    start = time.perf_counter()
    if not goes_on:
        await sync.go_on_after_exchange()
    sync.note({"go_on": time.perf_counter() - start})
    sync.state.did("go_on")


def claims(said: bytes, names: dict[int, list[str]]) -> dict[tuple[str, int], int]:
    """What the trainer says it wrote: digests of each rank's parameters, in the order that the ranks told."""
    keys = [(name, rank) for rank in sorted(names) for name in names[rank]]
    values = np.frombuffer(said, np.uint64).tolist()
    if len(values) != len(keys):
        raise errors.SyncError(
            f"the trainer tells {len(values)} digests, this engine has {len(keys)} parameters", remedy="connect again"
        )
    return dict(zip(keys, values, strict=True))

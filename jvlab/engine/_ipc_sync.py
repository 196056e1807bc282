"""The front end's side of ipc syncs: the core runs a whole direct sync, or the end of a staged one (`_ipc_core`).

The front end keeps their state.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from jvlab import _errors as errors
from jvlab.wire import _core_channel
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import AFTER_VERIFY, BEFORE_BYTES, ORDER, Terms

if TYPE_CHECKING:
    from jvlab.engine._engine_sync import EngineSync

SWAP = AFTER_VERIFY["staged"]
SECONDS = 60.0


def is_whole(request: pb.RolloutSyncRequest) -> bool:
    """Whether the order has all phases of a direct sync."""
    return tuple(request.phases) == ORDER["direct"] and request.terms.mode == "direct"


def is_swap(sync: EngineSync, request: pb.RolloutSyncRequest) -> bool:
    """Whether the core runs the rest in one call. Not if requests are to finish first: that can be abandoned."""
    last = tuple(request.phases[-len(SWAP) :])
    soon = sync.state.terms is not None and sync.state.terms.pause != "wait"
    return last == SWAP and soon and sync.llm.vllm_config.parallel_config.data_parallel_size == 1


async def swap(sync: EngineSync) -> None:
    """Pause generation, swap the shadows in, resume. Raises on failure; `sync.at` names the phase."""
    for phase in (phase.word for phase in SWAP[:2]):
        sync.at = phase
        sync.state.check(phase)
        await sync.enter(phase)
        if phase == "halt":
            sync.state.did(phase)
    await sync.run_to_completion(_core_swap(sync))


async def _core_swap(sync: EngineSync) -> None:
    terms = sync.state.terms
    assert terms is not None  # checked before
    resume = sync.core_may_resume
    order = {
        "pause": terms.pause,
        "version": terms.version,
        "recompute": terms.kv == "recompute",
        "resume": resume,
        "nonfinite": sync.nonfinite,
    }
    reply = await sync.llm.engine_core.call_utility_async("jv_swap", order)
    sync.note(reply["seconds"])
    sync.checked(reply["answers"])
    await _go_on(sync, resume)


async def _go_on(sync: EngineSync, resumed: bool) -> None:
    """The commit is done; resume generation, unless the core has."""
    sync.state.did("commit")
    sync.committed()
    sync.at = "go_on"
    await sync.enter("go_on")
    start = time.perf_counter()
    if not resumed:
        await sync.resume_after_sync()
    sync.note({"go_on": time.perf_counter() - start})
    sync.state.did("go_on")


async def direct_sync(sync: EngineSync, terms: Terms, request: pb.RolloutSyncRequest) -> None:
    """Run every phase. Raises on failure; `sync.at` names the phase."""
    for phase in (phase.word for phase in BEFORE_BYTES["direct"]):
        sync.at = phase
        sync.state.check(phase, terms if phase == "prepare" else None)
        await sync.enter(phase)
        if phase == "prepare":
            await sync.prepare(terms)
        sync.state.did(phase, terms if phase == "prepare" else None)
    await sync.run_to_completion(_core_sync(sync, terms, request))


async def _core_sync(sync: EngineSync, terms: Terms, request: pb.RolloutSyncRequest) -> None:
    resume = sync.core_may_resume
    order = {**_core_channel.order(terms, request.seconds or SECONDS, request.call), "resume": resume}
    reply = await sync.llm.engine_core.call_utility_async("jv_direct_sync", order)
    sync.note(reply["seconds"])
    sync.at = "verify" if reply["stage"] == "verify" else "move"
    answers = sync.checked(reply["answers"])
    sync.at = "verify"
    claimed: bytes = reply["claimed"]
    sync.take(answers, None if terms.verify == "off" else lambda: claims(claimed, sync.names), claimed)
    sync.state.did("verify")
    sync.at = "commit"
    await _go_on(sync, resume)


def claims(claimed: bytes, names: dict[int, list[str]]) -> dict[tuple[str, int], int]:
    """The trainer's digests of what it wrote, by parameter and rank; sent in the order of the ranks' names."""
    keys = [(name, rank) for rank in sorted(names) for name in names[rank]]
    values = np.frombuffer(claimed, np.uint64).tolist()
    if len(values) != len(keys):
        raise errors.SyncError(
            f"the trainer sent {len(values)} digests, this engine has {len(keys)} parameters", remedy="connect again"
        )
    return dict(zip(keys, values, strict=True))

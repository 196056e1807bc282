"""What a call waits for, in words; and streams that are left while they wait."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import BackgroundLoop, Stream
from jvlab.wire._pool_summary import waiting_for

ME = "python 1 on here"
OTHER = "python 2 on there"


def replica(name: str = "p/0", **given: Any) -> pb.ReplicaStatus:
    stats = pb.ReplicaStats(
        paused=given.pop("paused", False), sleeping=given.pop("sleeping", False)
    )
    return pb.ReplicaStatus(
        replica=name, **{"stage": "ready", "state": pb.READY, "stats": stats, **given}
    )


def pool(*replicas: pb.ReplicaStatus, **given: Any) -> pb.PoolStatus:
    return pb.PoolStatus(
        pool="p",
        replicas=replicas or [replica()],
        sync=given.pop("sync", "idle"),
        **given,
    )


DIRTY = replica(dirty=True)
STATES = {
    "nothing": (pool(), ""),
    "a pause of our own": (
        pool(paused_by=ME),
        "p was paused by this process; pool.resume() lets it continue",
    ),
    "another's pause": (
        pool(paused_by=OTHER),
        f"p was paused by {OTHER}; pool.resume() lets it continue",
    ),
    "sleep": (
        pool(asleep_by=OTHER),
        f"p was put to sleep by {OTHER}; pool.wake() lets it continue",
    ),
    "a sync": (
        pool(DIRTY, sync="moving", trainer=OTHER),
        f"a sync that {OTHER} runs (moving)",
    ),
    "a halted sync": (
        pool(sync="halted", trainer=OTHER),
        f"a sync that {OTHER} runs (halted)",
    ),
    "a stepper": (
        pool(DIRTY, sync="verified", trainer=ME, stepping=True),
        "a sync that this process has open in a stepper (digests equal)",
    ),
    "a staged sync, which halts nothing": (
        pool(sync="moving", trainer=OTHER, stepping=True),
        "",
    ),
    "dirty": (pool(DIRTY), "p/0 is dirty: sync again"),
    "stale": (pool(replica(stale=True)), "p/0 is stale: waits for a sync"),
    "lost": (pool(replica(stage="lost", state=pb.LOST)), "p/0 is lost"),
    "starting": (
        pool(replica(stage="weights", state=pb.STARTING)),
        "p/0 is starting: weights",
    ),
    "one of two, without work": (pool(DIRTY, replica("p/1")), ""),
    "one of two, with work": (
        pool(replica(dirty=True, routed=3), replica("p/1")),
        "p/0 is dirty: sync again",
    ),
    "one that leaves": (
        pool(replica(), replica("p/1", stage="draining", routed=1)),
        "",
    ),
    "a closed pool": (pool(paused_by=ME, closed=True), ""),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_waited_for(name: str):
    snapshot, words = STATES[name]
    assert waiting_for(snapshot, ME) == words


# Streams --------------------------------------------------------------------------------------------------------------


class Source:
    """Gives one value, then waits; takes a moment to end, as a call does that tells the other side."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.waits = threading.Event()

    async def values(self) -> AsyncGenerator[int, None]:
        try:
            yield 1
            self.waits.set()
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.05)
            self.ended.set()


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    made = BackgroundLoop()
    yield made
    made.stop()


def test_ctrl_c_in_a_stream_is_ctrl_c(loop: BackgroundLoop):
    """And not an error about a generator that is running."""
    source = Source()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        assert source.waits.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(Stream(loop, source.values()))
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    assert source.ended.wait(60)


def test_a_wait_that_cannot_end_is_ended(loop: BackgroundLoop):
    source = Source()

    def check() -> None:
        if source.waits.is_set():
            raise ValueError("for ever")

    with pytest.raises(ValueError, match="for ever"):
        list(Stream(loop, source.values(), check))
    assert source.ended.wait(60)

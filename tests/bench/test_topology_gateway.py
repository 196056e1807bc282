"""The gateway half of `bench topology`: a small run, and what was mended for a thousand replicas."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import jvlab as jv
from jvlab.bench import _side
from jvlab.bench import _topology_gateway as bench
from jvlab.gateway import _registry as reg
from jvlab.gateway import _servicers
from jvlab.gateway._dispatch import Dispatch, Done, Item
from jvlab.gateway._routing import Board
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._rpc_errors import CallFailed
from tests.gateway.fake_lab import FakeLab


def test_a_small_run():
    found = bench.run_bench_gateway((1, 3), requests=40)
    assert [row["replicas"] for row in found["rows"]] == [1, 3]
    assert found["routes_per_s"] == found["rows"][-1]["routes_per_s"] > 0
    assert found["route_p99_ms"] > 0
    assert found["floor_routes_per_s"] == found["rows"][-1]["floor_routes_per_s"] > 0
    assert found["floor_p99_ms"] > 0
    for row in found["rows"]:
        assert row["batch_routes_per_s"] > 0


def test_a_gateway_that_does_not_come_up_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_side.sys, "executable", "/bin/false")
    with pytest.raises(jv.JvlabError, match="the gateway side ended with 1"):
        bench.run_bench_gateway((1,), requests=1)


def test_many_changes_are_watched_as_few_pictures(
    pool: jv.Pool, fake_lab: FakeLab, monkeypatch: pytest.MonkeyPatch
):
    """A picture that takes long is followed by a pause, and the last change is always seen."""
    # as if a snapshot took very long
    monkeypatch.setattr(_servicers, "PAUSE_FACTOR", 1e9)
    monkeypatch.setattr(_servicers, "MAX_PAUSE", 0.2)
    seen: list[pb.PoolStatus] = []
    pool.listeners.append(seen.append)

    async def change() -> None:
        for number in range(200):
            fake_lab.gateway.handle(reg.ProcessStarted("p/0", number + 1))
            await asyncio.sleep(0)  # whoever watches could look at each

    fake_lab.do(change)
    arrived = threading.Event()
    pool.listeners.append(lambda s: arrived.set() if s.replicas[0].pid == 200 else None)
    fake_lab.do(lambda: fake_lab.gateway.announce("p"))
    assert arrived.wait(60)
    assert len(seen) < 50


def test_results_that_wait_go_into_one_message_and_notes_keep_their_place():
    class Replicas:
        def __init__(self) -> None:
            self.map, self.left = Board({"p/0": 0}), 0

        def board(self) -> Board:
            return self.map

        def count(self, replica: str, change: int) -> None:
            self.map.count(replica, change)

        def served(self, replica: str, parts: int) -> None:
            self.map.count(replica, -parts)

        def wait_for(self, avoid: frozenset[str]) -> None: ...
        def barred(self) -> None: ...
        def track(self, replica: str, call: Any) -> None: ...
        def untrack(self, replica: str, call: Any) -> None: ...
        def loss(self, replica: str) -> str:
            return "gone"

        def epoch(self, replica: str) -> int:
            return 1

        def run(self, replica: str) -> int:
            return 0

        def failed(self, replica: str, epoch: int, error: Any) -> str:
            return "gone"

        def deadline_error(self, replicas: Any) -> CallFailed:
            return CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "waited for them")

    class Call:
        def __init__(self, items: list[Item]) -> None:
            self.parts = [
                (item.index, part) for item in items for part in sorted(item.parts)
            ]

        async def __aiter__(self):
            for part in self.parts:
                yield SimpleNamespace(results=[part])

        def cancel(self) -> None: ...

    async def run(parts: int) -> list[Any]:
        replicas: Any = Replicas()
        dispatch = Dispatch(
            replicas,
            [Item(i, {0, 1}) for i in range(parts)],
            lambda name, items: Call(items),
            lambda part: part,
            lambda message: message.results,
        )
        dispatch._out.put_nowait("a note")
        events = [event async for event in dispatch.events()]
        assert replicas.map.total == 0
        return events

    note, *events = asyncio.run(run(1000))
    assert note == "a note"
    assert all(isinstance(event, Done) for event in events)
    assert len(events) == 8, "2000 results in messages of 256"
    assert [result for event in events for result, _ in event.results] == [
        (i, k) for i in range(1000) for k in (0, 1)
    ]

"""Whatever one part of the gateway knows of a replica, all know: registry, syncs, routing, open calls and status.

Random events in random order on a real gateway object, without processes or ports; after each of them, all are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jvlab as jv
from jvlab import errors
from jvlab.gateway import _gateway
from jvlab.gateway import _registry as reg
from jvlab.gateway import _sync_types as sync
from jvlab.gateway._pool_commands import PoolReplicas
from jvlab.gateway._sync_types import Standing
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import Phase, Terms
from tests.fuzzing import examples
from tests.gateway.fake_lab import FACTS, FakeLab

CODE = grpc.StatusCode
FAILURES = (
    CODE.UNAVAILABLE,
    CODE.ABORTED,
    CODE.UNKNOWN,
    CODE.CANCELLED,
    CODE.DEADLINE_EXCEEDED,
)
ORDERS = (
    (Phase.PREPARE, Phase.HALT, Phase.MOVE),
    (Phase.VERIFY, Phase.COMMIT, Phase.GO_ON),
    (Phase.ABANDON,),
)


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, none, none, f"it said {code.name}")


class Call:
    """One open call to a replica; whoever tests decides how it ends."""

    def __init__(self, replica: str, request: Any = None) -> None:
        self.replica, self.request = replica, request
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Any:
        return self.future.__await__()

    def cancel(self) -> bool:
        return self.future.cancel()

    def cancelled(self) -> bool:
        return self.future.cancelled()


class Bench(_gateway.Gateway):
    """A gateway whose replicas are only names."""

    def __init__(self) -> None:
        super().__init__("bench", Path(), "", lease=1e9, beat=1.0, missed_beats=3)
        self.made: list[Call] = []
        self.calls.stub = self.stub
        self.now = 0.0
        self.orders = 0

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        """It registers when the test says so."""

    def stub(self, replica: str) -> Any:
        bench = self

        class Stub:
            def Sync(self, request: Any, **_: Any) -> Call:
                bench.made.append(Call(replica, request))
                return bench.made[-1]

            def Stats(self, request: Any, **_: Any) -> Any:
                return Call(replica)  # nobody answers

        return Stub()

    # Events, by number -----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self.registry.pool("p").replicas)

    def pick(self, a: int) -> reg.Replica | None:
        names = self.names()
        return self.registry.replica(names[a % len(names)]) if names else None

    def comes(self, a: int, b: int) -> None:
        if (replica := self.pick(a)) is not None:
            stats = pb.ReplicaStats(
                weight_version=b % 3, running=b % 2, dirty=b % 5 == 4
            )
            self.register(
                pb.RegisterRequest(
                    replica=replica.name,
                    address=f"x:{b}",
                    facts=FACTS,
                    stats=stats,
                    run=replica.run,
                )
            )

    def beats(self, a: int, b: int) -> None:
        if (replica := self.pick(a)) is not None:
            self.handle(
                reg.BeatReceived(replica.name, replica.epoch - (b % 4 == 3), self.now)
            )

    def says(self, a: int, b: int) -> None:
        """A beat's word on what it holds."""
        if (replica := self.pick(a)) is not None and replica.state in reg.BEATING:
            self.links.reported(
                replica, pb.ReplicaStats(weight_version=b % 3, dirty=b % 4 == 0)
            )

    def ticks(self, a: int, b: int) -> None:
        self.now += (0.25, 0.9, 2.0, 30.0)[b % 4]
        self.handle(reg.Tick(self.now))
        self.links.tick(self.now)

    def exits(self, a: int, b: int) -> None:
        if (replica := self.pick(a)) is not None:
            self.handle(reg.ProcessExited(replica.name, "it died", "", replica.run))

    def starts_again(self, a: int, b: int) -> None:
        if (replica := self.pick(a)) is not None:
            self.restart("p", replica.name)

    def scales(self, a: int, b: int) -> None:
        self.handle(reg.ScaleRequested("p", 1 + b % 3, frozenset(), self.now))

    def drains(self, a: int, b: int) -> None:
        if (replica := self.pick(a)) is not None and self._idle(replica.name):
            self.handle(reg.Drained(replica.name))

    def begins(self, a: int, b: int) -> None:
        """A call of some other part: a request, a peek."""
        replica = self.pick(a)
        if replica is not None and replica.state in reg.BEATING:
            call = Call(replica.name)
            call.request = replica.epoch
            self.calls.track(replica.name, call)
            self.made.append(call)

    def fails(self, a: int, b: int) -> None:
        """An open call fails; the part that made it says what it makes of that."""
        live = [call for call in self.made if not call.future.done()]
        if not live:
            return
        call, error = live[a % len(live)], failure(FAILURES[b % len(FAILURES)])
        if isinstance(call.request, pb.RolloutSyncRequest):
            call.future.set_exception(error)  # the link service hears it
            return
        call.future.set_result(None)
        self.calls.untrack(call.replica, call)
        told = self.calls.failed(call.replica, call.request, error)
        found = self.registry.find(call.replica)
        same = (
            found is not None
            and found.epoch == call.request
            and found.state in reg.BEATING
        )
        assert bool(told) != same, (
            "a caller is told of a loss exactly if the replica is lost"
        )

    def answers(self, a: int, b: int) -> None:
        live = [
            c
            for c in self.made
            if not c.future.done() and isinstance(c.request, pb.RolloutSyncRequest)
        ]
        if live:
            call = live[a % len(live)]
            version = call.request.terms.version or b % 3
            state = ("committed", "old", "dirty")[b % 3]
            outcome = pb.ReplicaOutcome(
                replica=call.replica, state=state, version=version
            )
            call.future.set_result(pb.RolloutSyncReply(outcome=outcome))

    def opens(self, a: int, b: int) -> None:
        ready = tuple(r.name for r in self.registry.ready("p"))
        self.links.of("p")._opening = pb.LinkOpen(
            endpoints=[pb.Endpoint(replica=name) for name in ready]
        )
        self.links.of("p").feed(
            sync.Opened(
                f"link {b % 2}", "trainer", self.number(), ready, 60.0, self.now
            )
        )

    def orders_phases(self, a: int, b: int) -> None:
        phases = ORDERS[b % 3]
        machine = self.links.of("p").machine
        terms = (
            Terms(machine.version + 1 + a % 2, ("direct", "staged")[a % 2])
            if b % 3 == 0
            else None
        )
        digests = frozenset(machine.members)
        self.links.of("p").feed(
            sync.Ordered(
                f"link {a % 2}", self.number(), phases, self.now, terms, digests
            )
        )

    def ends(self, a: int, b: int) -> None:
        self.links.of("p").feed(sync.Ended(f"link {b % 2}", self.now))

    def number(self) -> int:
        self.orders += 1
        return self.orders

    # What must be true -----------------------------------------------------------------------------------------------

    def agree(self) -> None:
        replicas = {r.name: r for r in self.registry.pool("p").replicas.values()}
        beating = {name for name, r in replicas.items() if r.state in reg.BEATING}
        machine = self.links.of("p").machine
        assert set(machine.members) == beating, (
            "who takes part in syncs is who is there"
        )
        assert machine.participants <= beating
        assert (
            machine.holder is None
            or machine.holder.opened | machine.holder.asked <= beating
        )
        for version in (0, 1):
            board = PoolReplicas(self, "p", version).board()
            offered = {name for name in replicas if name in board}
            assert offered <= {
                n for n, r in replicas.items() if r.state is reg.ReplicaState.READY
            }, "work only for the ready"
            assert len(board) == len(offered)
            assert all(not machine.members[name].dirty for name in offered)
            if not version:
                assert all(
                    machine.standing(name) is Standing.SERVING for name in offered
                )
        for name, calls in self.calls._open.items():
            assert name in beating or all(call.cancelled() for call in calls), (
                f"{name} is gone, and is waited for"
            )
        status = self.pool_status("p")
        assert {r.replica: r.state for r in status.replicas} == {
            name: pb.ReplicaState.Value(r.state.name) for name, r in replicas.items()
        }
        for said in status.replicas:
            member = machine.members.get(said.replica)
            assert said.version == (-1 if member is None else member.version)
            assert said.dirty == (member is not None and member.dirty)
            assert said.replica in beating or said.stats.running == 0, (
                "who is gone runs nothing"
            )
            assert said.replica not in beating or said.HasField("facts")


EVENTS: list[Callable[..., None]] = [
    Bench.comes,
    Bench.comes,
    Bench.beats,
    Bench.says,
    Bench.ticks,
    Bench.exits,
    Bench.starts_again,
    Bench.scales,
    Bench.drains,
    Bench.begins,
    Bench.begins,
    Bench.fails,
    Bench.fails,
    Bench.answers,
    Bench.answers,
    Bench.opens,
    Bench.orders_phases,
    Bench.orders_phases,
    Bench.ends,
]
STEP = st.tuples(st.integers(0, len(EVENTS) - 1), st.integers(0, 5), st.integers(0, 19))


@settings(max_examples=examples(300))
@given(st.lists(STEP, max_size=40))
def test_deadline_or_death_all_parts_agree_on_a_replica(
    steps: list[tuple[int, int, int]],
):
    async def run() -> None:
        bench = Bench()
        bench.handle(
            reg.LaunchRequested(
                reg.PoolSpec("p", "m", 2, 1, "auto", "cpu", "{}", "{}"), 0.0
            )
        )
        bench.comes(0, 0)
        bench.comes(1, 0)
        for event, a, b in steps:
            with contextlib.suppress(reg.Refused):
                EVENTS[event](bench, a, b)
            bench.agree()
            for _ in range(3):  # what was set going by it
                await asyncio.sleep(0)
            bench.agree()
        tasks = [
            task for task in asyncio.all_tasks() if task is not asyncio.current_task()
        ]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result

    asyncio.run(run())


def test_deadline_or_death_status_says_what_the_caller_was_told(
    fake_lab: FakeLab, pool: jv.Pool
):
    """A replica whose engine died told so to its caller, and to nobody else, until its process was found gone."""
    victim = fake_lab.fakes["p/0"]
    victim.silent, victim.engine_death = True, "the engine died"
    batch = pool.generate(["a", "b", "c", "d"], timeout=30)
    assert any("p/0 was lost (the engine died)" in note for note in batch.notes)
    status = pool.status()
    assert (status["healthy"], status["in_flight"]) == (1, 0)
    assert status["replicas"][0]["cause"] == "the engine died"


def test_deadline_or_death_a_score_that_nobody_finishes_says_why(
    fake_lab: FakeLab, pool: jv.Pool
):
    """It said "no other replica is ready" alone."""
    for fake in fake_lab.fakes.values():
        fake.silent, fake.engine_death = (
            True,
            "the engine died: its core died of SIGKILL",
        )
    with pytest.raises(
        errors.ReplicaLost,
        match=r"sequence 0: .*p/\d was lost \(the engine died: .* of SIGKILL\)",
    ):
        pool.score([[5, 6, 7]], timeout=30)


def test_deadline_or_death_a_peek_that_finds_nobody_tells_everybody(
    fake_lab: FakeLab, pool: jv.Pool
):
    fake_lab.fakes["p/0"].silent = True
    fake_lab.do(lambda: fake_lab.fakes["p/0"].server.stop(0))  # its port is closed
    with pytest.raises(errors.ReplicaLost, match="p/0"):
        pool.peek("w", timeout=30)
    assert pool.status()["healthy"] == 1


def test_deadline_or_death_a_replica_that_says_it_is_dirty_is_dirty_for_all(
    fake_lab: FakeLab, pool: jv.Pool
):
    """A sync that went past the gateway broke: the replica refused to generate, and status called it ready."""
    fake = fake_lab.fakes["p/0"]
    for dirty in (True, False):
        fake.memory.dirty = dirty
        until = time.monotonic() + 30
        while pool.status()["replicas"][0]["dirty"] != dirty:
            assert time.monotonic() < until, "status does not say what the replica says"
            time.sleep(0.05)
        batch = pool.generate(["a", "b", "c", "d"], timeout=30)
        assert ({s.replica for s in batch} == {"p/1"}) == dirty

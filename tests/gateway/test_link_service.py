"""Links over real gRPC with fake replicas: the transaction end to end, failures, locks, leases, routing, restarts."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import jvlab as jv
from jvlab.gateway import _link_service
from jvlab.gateway import _registry as reg
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.gateway.fake_lab import FakeLab
from tests.waiting import until

pytestmark = pytest.mark.slow

FIRST = {"direct": [pb.PREPARE, pb.HALT, pb.MOVE], "staged": [pb.PREPARE, pb.MOVE]}
LAST = {
    "direct": [pb.VERIFY, pb.COMMIT, pb.GO_ON],
    "staged": [pb.VERIFY, pb.HALT, pb.COMMIT, pb.GO_ON],
}
ONE_BY_ONE = {mode: FIRST[mode] + LAST[mode] for mode in FIRST}
AUTH = _security.authorization("secret")


class Trainer:
    """The client's end of one Link stream."""

    def __init__(self, address: str, holder: str = "trainer") -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = rpc.LabStub(self.channel)
        self.holder, self.number = holder, 0
        self._orders: queue.Queue[pb.LinkOrder | None] = queue.Queue()
        self._stream = self.stub.Link(
            iter(self._orders.get, None), metadata=AUTH, timeout=300
        )

    def send(self, seconds: float = 30.0, **kind: Any) -> None:
        self.number += 1
        self._orders.put(pb.LinkOrder(number=self.number, seconds=seconds, **kind))

    def reply(self) -> pb.LinkReply:
        reply = next(self._stream)
        assert reply.number == self.number
        return reply

    def open(
        self, *names: str, pool: str = "p", lease: float = 30.0, seconds: float = 30.0
    ) -> pb.LinkReply:
        endpoints = [
            pb.Endpoint(replica=name, index=i, ranks_json=[json.dumps([name])])
            for i, name in enumerate(names or ("p/0", "p/1"))
        ]
        request = pb.LinkOpen(
            pool=pool,
            holder=self.holder,
            transport="loopback",
            plan=b"plan",
            endpoints=endpoints,
            lease_seconds=lease,
        )
        self.send(seconds, open=request)
        return self.reply()

    def steps(
        self,
        phases: Sequence[int],
        version: int = 1,
        mode: str = "direct",
        require: str = "all",
    ) -> pb.SyncSteps:
        steps = pb.SyncSteps(phases=phases)  # type: ignore[arg-type]
        if pb.PREPARE in phases:
            steps.terms.CopyFrom(
                pb.SyncTerms(
                    version=version,
                    mode=mode,
                    verify="full",
                    require=require,
                    pause="keep",
                    kv="keep",
                )
            )
        if pb.VERIFY in phases:
            steps.digests.extend(
                pb.ReplicaDigests(
                    replica=f"p/{i}", parameters=["w"], ranks=[0], values=[7]
                )
                for i in range(2)
            )
        return steps

    def do(
        self, phases: Sequence[int], seconds: float = 30.0, **terms: Any
    ) -> pb.LinkReply:
        self.send(seconds, steps=self.steps(phases, **terms))
        return self.reply()

    def sync(
        self, version: int = 1, mode: str = "direct", require: str = "all"
    ) -> pb.LinkReply:
        first = self.do(FIRST[mode], version=version, mode=mode, require=require)
        return first if first.code else self.do(LAST[mode])

    def cut(self) -> None:
        """As when the process dies."""
        self._stream.cancel()
        self._orders.put(None)
        self.channel.close()

    def close(self) -> None:
        self._orders.put(None)
        self.cut()


@pytest.fixture
def trainer(pool: jv.Pool, fake_lab: FakeLab) -> Iterator[Trainer]:
    trainer = Trainer(fake_lab.address)
    yield trainer
    trainer.close()


def said(caught: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    return caught.value.details() or ""


def states(reply: pb.LinkReply) -> list[str]:
    return [outcome.state for outcome in reply.outcomes]


def machine(lab: FakeLab) -> Any:
    return lab.gateway.links.of("p").machine


def status(lab: FakeLab) -> pb.PoolStatus:
    return lab.do(lambda: lab.gateway.pool_status("p"))


def kill(lab: FakeLab, name: str, cause: str = "killed by the test") -> None:
    lab.do(lambda: lab.gateway.handle(reg.ProcessExited(name, cause, "")))


def heal(lab: FakeLab, version: int, names: tuple[str, ...] = ("p/0", "p/1")) -> None:
    """A new trainer's sync must bring every replica that lives to the new version."""
    for fake in lab.fakes.values():
        fake.hang = fake.broken = ""
        fake.corrupt = False
    other = Trainer(lab.address, "healer")
    try:
        assert other.open(*names).code == ""
        assert other.sync(version).code == ""
    finally:
        other.close()
    for name in names:
        memory = lab.fakes[name].memory
        assert (memory.content, memory.version, memory.halted, memory.dirty) == (
            version,
            version,
            False,
            False,
        )


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("require", ["all", "any"])
@pytest.mark.parametrize("names", [("p/0", "p/1"), ("p/1",)])
def test_a_sync_commits(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab, mode: str, require: str, names
):
    if len(names) == 1:
        kill(fake_lab, "p/0")
    assert states(trainer.open(*names)) == ["ready"] * len(names)
    reply = trainer.sync(4, mode, require)
    assert (reply.code, reply.state) == ("", "idle")
    assert states(reply) == ["committed"] * len(names)
    assert {s.name for o in reply.outcomes for s in o.seconds} >= {
        "verify",
        "commit",
        "go_on",
    }
    seen = status(fake_lab)
    assert (seen.version, seen.sync, seen.trainer) == (4, "idle", "trainer")
    assert [r.version for r in seen.replicas if r.replica in names] == [4] * len(names)
    fused = " ".join(pb.SyncPhase.Name(p).lower() for p in LAST[mode])  # type: ignore[arg-type]
    alone = len(names) == 1 or require == "any"
    for name in names:
        calls = fake_lab.fakes[name].synced
        assert calls[-1] == (fused if alone else fused.removeprefix("verify "))
    batch = pool.generate([[1], [2], [3]])
    assert {s.versions[0] for s in batch} == {4}


def test_the_first_order_must_be_open_and_every_order_needs_a_deadline(
    trainer: Trainer,
):
    assert "first order" in trainer.do([pb.PREPARE]).error
    trainer.send(0.0, steps=pb.SyncSteps(phases=[pb.HALT]))
    assert "deadline" in trainer.reply().error
    assert trainer.open(pool="nope").error.startswith("no pool is called 'nope'")
    assert trainer.open("p/7").error == "not ready: p/7"
    assert trainer.open().code == ""
    assert trainer.open(pool="q").code == "refused"


def test_two_trainers(trainer: Trainer, fake_lab: FakeLab):
    assert trainer.open().code == ""
    other = Trainer(fake_lab.address, "the other")
    reply = other.open()
    assert reply.code == "busy"
    assert re.search(r"pool 'p' is held by trainer, for \d+ s", reply.error)
    assert other.do([pb.PREPARE]).code == "refused"
    assert trainer.sync(1).code == "", "the holder is not disturbed"
    fake_lab.fakes["p/0"].hold_close = True
    trainer.close()
    until(lambda: machine(fake_lab).holder.ended)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(other.open)
        time.sleep(0.2)
        assert not opening.done(), (
            "a holder that is being cleaned up after is waited for"
        )
        fake_lab.fakes["p/0"].hold_close = False
        assert opening.result(60).code == ""
    assert other.sync(1).error == "version 1 is not larger than the pool's, 1"
    assert other.sync(2).code == ""
    other.close()


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("how", ["broken", "killed"])
def test_a_failure_in_each_phase(
    trainer: Trainer, fake_lab: FakeLab, mode: str, at: int, how: str
):
    trainer.open()
    phases, victim = ONE_BY_ONE[mode], fake_lab.fakes["p/1"]
    name = pb.SyncPhase.Name(phases[at]).lower()  # type: ignore[arg-type]
    for phase in phases[:at]:
        assert trainer.do([phase], mode=mode).code == ""
    if how == "broken":
        victim.broken = name
        reply = trainer.do([phases[at]], mode=mode)
        assert reply.code == "failed"
        assert reply.error == f"failed at replica p/1 in {name}: {name} is broken"
    else:
        victim.hang = name
        trainer.send(30.0, steps=trainer.steps([phases[at]], mode=mode))
        until(victim.reached.is_set)
        kill(fake_lab, "p/1")
        reply = trainer.reply()
        assert reply.code == "lost", "noticed, not waited for until the deadline"
        assert reply.error == f"lost at replica p/1 in {name}: killed by the test"
    late = phases[at] in (pb.COMMIT, pb.GO_ON)
    moved = mode == "direct" and at >= 2
    if late:
        assert reply.outcomes[0].state == "committed"
    else:
        # MOVE broke at p/1; p/0 has begun it, unless it was cancelled before
        assert reply.outcomes[0].state == ("dirty" if moved else "old")
        assert reply.state == "idle"
    assert status(fake_lab).version == (1 if late else 0)
    assert all(not r.routed for r in status(fake_lab).replicas)
    trainer.close()
    heal(fake_lab, 9, ("p/0", "p/1") if how == "broken" else ("p/0",))


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_bits_that_differ_commit_nowhere(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab, mode: str
):
    trainer.open()
    fake_lab.fakes["p/1"].corrupt = True
    reply = trainer.sync(1, mode)
    assert reply.code == "mismatch"
    assert list(reply.outcomes[1].differing) == ["w (rank 0)"]
    assert states(reply) == (["dirty", "dirty"] if mode == "direct" else ["old", "old"])
    assert not any(
        "commit" in call for fake in fake_lab.fakes.values() for call in fake.synced
    )
    if mode == "staged":
        assert {s.versions[0] for s in pool.generate([[1], [2]])} == {0}
    fake_lab.fakes["p/1"].corrupt = False
    assert trainer.sync(2, mode).code == "", "the same link heals"


def test_with_any_the_rest_goes_on(trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab):
    trainer.open()
    fake_lab.fakes["p/1"].corrupt = True
    reply = trainer.sync(1, "staged", "any")
    assert (reply.code, states(reply)) == ("", ["committed", "stale"])
    assert reply.outcomes[1].failed == "verify"
    assert [(r.version, r.stale, r.dirty) for r in status(fake_lab).replicas] == [
        (1, False, False),
        (0, True, False),
    ]
    assert {s.replica for s in pool.generate([[i] for i in range(1, 7)])} == {"p/0"}
    fake_lab.fakes["p/1"].corrupt = False
    assert states(trainer.sync(2, "staged", "any")) == ["committed", "committed"]
    assert {s.replica for s in pool.generate([[i] for i in range(1, 7)])} == {
        "p/0",
        "p/1",
    }


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("at", range(6))
def test_a_stream_cut_in_each_phase(
    trainer: Trainer,
    fake_lab: FakeLab,
    mode: str,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Cut while the phase is under way on one replica and done on the other."""
    # Who hangs is cut short and answers again; GO_ON is not, so there it is what ends the wait.
    monkeypatch.setattr(_link_service, "CLEANUP_SECONDS", 2.0 if at == 5 else 20.0)
    trainer.open()
    phases = ONE_BY_ONE[mode]
    for phase in phases[:at]:
        assert trainer.do([phase], mode=mode).code == ""
    slow, name = fake_lab.fakes["p/1"], pb.SyncPhase.Name(phases[at]).lower()  # type: ignore[arg-type]
    slow.hang = name
    # COMMIT is never cut short, so its own deadline is what ends the wait
    trainer.send(
        0.5 if name == "commit" else 30.0, steps=trainer.steps([phases[at]], mode=mode)
    )
    until(slow.reached.is_set)
    trainer.cut()
    until(lambda: machine(fake_lab).holder is None)
    assert machine(fake_lab).stage.value == "idle"
    for fake in fake_lab.fakes.values():
        # maybe after the gateway stopped waiting for its reply
        until(lambda fake=fake: fake.synced[-1] == "close")
        assert "abandon" in fake.synced or at >= 4
        dirty = mode == "direct" and 2 <= at < 4
        if fake.name == "p/0":
            assert (fake.memory.dirty, fake.memory.halted) == (dirty, dirty)
    assert status(fake_lab).version == (1 if at >= 4 else 0)
    heal(fake_lab, 9)


def test_a_stream_cut_between_phases_abandons(trainer: Trainer, fake_lab: FakeLab):
    trainer.open()
    trainer.do(FIRST["staged"], mode="staged")
    trainer.cut()
    until(lambda: machine(fake_lab).holder is None)
    assert [fake.synced[-2:] for fake in fake_lab.fakes.values()] == [
        ["abandon", "close"]
    ] * 2
    assert [fake.memory.state for fake in fake_lab.fakes.values()] == ["old", "old"]


def test_the_lease(trainer: Trainer, fake_lab: FakeLab):
    trainer.open(lease=0.3)
    trainer.do([pb.PREPARE], mode="staged")
    until(lambda: machine(fake_lab).stage.value == "idle")
    reply = trainer.do([pb.MOVE])
    assert reply.code == "deadline"
    assert "no order came for 0.3 s while prepared" in reply.error
    assert trainer.open(lease=30.0).code == ""
    assert trainer.sync(1, "staged").code == ""


def test_a_deadline_names_the_replica_and_the_phase(
    trainer: Trainer, fake_lab: FakeLab
):
    trainer.open()
    fake_lab.fakes["p/1"].hang = "halt"
    reply = trainer.do([pb.PREPARE, pb.HALT], seconds=1.5)
    assert reply.code == "deadline"
    assert (
        reply.error == "deadline at replica p/1 in prepare/halt: no answer within 1.5 s"
    )
    assert states(reply) == ["old", "old"]


def test_an_open_that_hangs_names_its_replica(trainer: Trainer, fake_lab: FakeLab):
    fake_lab.fakes["p/0"].hang = "open"
    reply = trainer.open(seconds=1.5)
    assert (reply.code, reply.error) == (
        "deadline",
        "deadline at replica p/0 in open: no answer within 1.5 s",
    )
    fake_lab.fakes["p/0"].hang = ""
    assert trainer.open().code == ""
    assert trainer.sync().code == ""


def test_a_replica_that_ignores_abandon_is_dirty_until_it_answers(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_link_service, "CLEANUP_SECONDS", 1.5)
    trainer.open()
    trainer.do(FIRST["staged"], mode="staged")
    deaf = fake_lab.fakes["p/1"]
    deaf.hang = "abandon"
    reply = trainer.do([pb.ABANDON])
    assert states(reply) == ["old", "dirty"]
    assert [r.dirty for r in status(fake_lab).replicas] == [False, True]
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0"}
    deaf.hang = ""
    assert trainer.open().code == ""
    assert "abandon" in deaf.synced[deaf.synced.index("open", 1) :], "told again"
    assert [r.dirty for r in status(fake_lab).replicas] == [False, False]
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0", "p/1"}


def test_a_dirty_pool_refuses_and_says_what_to_do(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    trainer.open()
    trainer.do(FIRST["direct"])
    assert states(trainer.do([pb.ABANDON])) == ["dirty", "dirty"]
    call = pb.GenerateCall(
        start=pb.GenerateStart(
            pool="p", prompts=[pb.Prompt(text="x")], n=1, sampling_json="{}"
        )
    )
    for answer in (
        trainer.stub.Generate(iter([call]), timeout=30, metadata=AUTH),
        trainer.stub.Score(
            pb.ScoreCall(pool="p", sequences=[pb.TokenIds(ids=[1, 2])]),
            timeout=30,
            metadata=AUTH,
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(answer)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert said(caught).startswith("dirty: no replica of pool 'p' may generate")
        assert "sync again" in said(caught)
    with pytest.raises(grpc.RpcError) as caught:
        trainer.stub.Steer(
            pb.SteerCall(pool="p", what=pb.RESUME), timeout=30, metadata=AUTH
        )
    assert "dirty: p/0, p/1" in said(caught)
    assert trainer.sync(1).code == ""
    assert len(pool.generate([[1]])) == 1


def test_requests_wait_while_a_sync_moves_and_frozen_ones_go_on(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    for fake in fake_lab.fakes.values():
        fake.limit = 1
    with ThreadPoolExecutor(2) as threads:
        frozen = threads.submit(pool.generate, [[i + 1] for i in range(12)])
        until(lambda: all(fake.finished == 1 for fake in fake_lab.fakes.values()))
        trainer.open()
        trainer.do(FIRST["direct"])
        for fake in fake_lab.fakes.values():
            fake.limit = None  # from here on only the sync holds them
        assert [r.stale for r in status(fake_lab).replicas] == [False, False]
        count = [fake.finished for fake in fake_lab.fakes.values()]
        late = threads.submit(pool.generate, [[1], [2]])
        time.sleep(0.3)
        assert [fake.finished for fake in fake_lab.fakes.values()] == count, (
            "nothing is generated meanwhile"
        )
        assert not late.done()
        with pytest.raises(grpc.RpcError) as caught:
            trainer.stub.Steer(
                pb.SteerCall(pool="p", what=pb.PAUSE, mode="keep"),
                timeout=30,
                metadata=AUTH,
            )
        assert "trainer syncs pool 'p' (moving)" in said(caught)
        assert trainer.do(LAST["direct"]).code == ""
        assert {s.versions[0] for s in late.result(60)} == {1}
        assert {s.versions[0] for s in frozen.result(60)} == {0, 1}


def test_an_engine_that_turns_work_away_is_asked_again(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    """The gateway routed just before MOVE reached the engine: the refusal is no reason to fail the call."""
    for fake in fake_lab.fakes.values():
        fake.dirty_refusals = 3  # the gateway does not know
    assert len(pool.generate([[1], [2], [3]], n=2)) == 6
    assert all(fake.dirty_refusals == 0 for fake in fake_lab.fakes.values()), (
        "both were asked again and again"
    )
    for fake in fake_lab.fakes.values():
        fake.dirty_refusals = 10_000
    with pytest.raises(jv.errors.JvlabError, match="refused by the engine"):
        pool.generate([[1]])


def test_restart_brings_a_failed_replica_back_stale(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    restart = lambda name: trainer.stub.Restart(
        pb.RestartRequest(pool="p", replica=name), timeout=30, metadata=AUTH
    )
    with pytest.raises(grpc.RpcError) as caught:
        restart("p/1")
    assert "only a replica that failed" in said(caught)
    trainer.open()
    assert trainer.sync(3).code == ""
    kill(fake_lab, "p/1")
    restart("p/1")
    until(lambda: fake_lab.registry.replica("p/1").state is reg.ReplicaState.READY)
    until(lambda: [r.stale for r in status(fake_lab).replicas] == [False, True])
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0"}
    kill(fake_lab, "p/0")
    call = trainer.stub.Score(
        pb.ScoreCall(pool="p", sequences=[pb.TokenIds(ids=[1])]),
        timeout=30,
        metadata=AUTH,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert said(caught).startswith(
        "stale: no replica of pool 'p' holds the committed version 3"
    )
    assert trainer.open("p/1").code == ""
    assert trainer.sync(4).code == ""
    assert {s.versions[0] for s in pool.generate([[1]])} == {4}


def test_a_replica_that_comes_back_with_the_pools_version_serves(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    trainer.open()
    assert trainer.sync(3).code == ""
    quiet = fake_lab.fakes["p/0"]
    fake_lab.silence("p/0")
    assert trainer.sync(4).error == "", "the other one is synced alone"
    quiet.silent = False
    until(lambda: fake_lab.registry.replica("p/0").state is reg.ReplicaState.READY)
    until(lambda: [r.stale for r in status(fake_lab).replicas] == [True, False])
    assert trainer.sync(5).error == "the link is not open on p/0"
    assert trainer.open("p/0").code == ""
    assert (
        states(trainer.sync(5)) == ["committed", "committed"]
        or machine(fake_lab).version == 5
    )
    fake_lab.silence("p/0")
    quiet.silent = False
    until(lambda: fake_lab.registry.replica("p/0").state is reg.ReplicaState.READY)
    until(lambda: [r.version for r in status(fake_lab).replicas] == [5, 5])
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0", "p/1"}


def test_a_replica_that_was_away_during_a_sync_is_told_that_it_is_over(
    trainer: Trainer, pool: jv.Pool, fake_lab: FakeLab
):
    trainer.open()
    assert trainer.do([*FIRST["staged"], pb.VERIFY, pb.HALT], mode="staged").code == ""
    quiet = fake_lab.fakes["p/0"]
    fake_lab.silence("p/0")
    quiet.silent = False
    until(lambda: fake_lab.registry.replica("p/0").state is reg.ReplicaState.READY)
    until(lambda: not any(r.dirty for r in status(fake_lab).replicas))
    assert [fake.memory.halted for fake in fake_lab.fakes.values()] == [False, False]
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0", "p/1"}
    assert trainer.do([pb.COMMIT]).code == "lost"


def test_check_and_peek(trainer: Trainer, fake_lab: FakeLab):
    trainer.open()
    assert trainer.do([pb.CHECK]).code == ""
    fake_lab.fakes["p/1"].memory.content = 12
    reply = trainer.do([pb.CHECK])
    assert (reply.code, list(reply.outcomes[1].differing)) == (
        "mismatch",
        ["w (rank 0)"],
    )
    fake_lab.fakes["p/1"].memory.content = 0
    peek = lambda name: trainer.stub.Peek(
        pb.PeekCall(pool="p", replica=name, rank=1, parameter="w"),
        timeout=30,
        metadata=AUTH,
    )
    assert [event.piece for event in peek("p/1")] == [b"p/1", b"w", b"1"]
    with pytest.raises(grpc.RpcError) as caught:
        list(peek("p/9"))
    assert "ready: p/0, p/1" in said(caught)


def test_closing_the_lab_in_the_middle_of_a_sync_ends_it(
    trainer: Trainer, fake_lab: FakeLab
):
    trainer.open()
    fake_lab.fakes["p/1"].hang = "verify"
    trainer.do(FIRST["direct"])
    trainer.send(300.0, steps=trainer.steps([pb.VERIFY]))
    until(fake_lab.fakes["p/1"].reached.is_set)
    # within its own deadline, which is shorter than the hang and the order's
    fake_lab.end()
    try:
        assert trainer.reply().code == "lost"
    except grpc.RpcError as error:  # the server went before the reply did
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # noqa: PT017


def test_a_pool_of_the_same_name_starts_anew(
    trainer: Trainer, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    trainer.open()
    assert trainer.sync(3).code == ""
    fake_lab.gateway.processes.clear()
    client.pools["p"].close()
    assert trainer.do([pb.PREPARE], version=4).code in ("refused", "lost")
    client.launch(llama, name="p", replicas=2).wait(60)
    assert status(fake_lab).version == 0
    other = Trainer(fake_lab.address)
    assert other.open().code == ""
    assert other.sync(1).code == ""
    other.close()


def test_a_stream_that_is_closed_while_an_answer_is_read():
    """By another thread, whose trainer process heard that one of its team failed."""
    from jvlab.wire._client import LinkStream
    from jvlab.wire._local_calls import LocalClient

    class Call:
        def done(self) -> bool:
            return False

        def cancel(self) -> None:
            """Too late: the answer is there."""

        async def write(self, order: pb.LinkOrder) -> None:
            stream.close()

        async def read(self) -> pb.LinkReply:
            return pb.LinkReply(number=1, state="idle")

    client = LocalClient()
    stream = LinkStream(client)
    stream._call = Call()
    assert stream.steps([pb.CHECK], 30.0).state == "idle"
    assert not stream.is_open
    client.close()

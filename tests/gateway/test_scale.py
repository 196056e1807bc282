"""More and fewer replicas at run time: the registry in tables and under random events, and `pool.scale` with fakes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import jvlab as jv
from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.gateway import _gateway
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._http_server import prometheus_text
from jvlab.gateway._registry import ReplicaState
from jvlab.sync._coordinator import Coordinator
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._pool_summary import waiting_for
from jvlab.wire.processes import _rollout_process
from tests.fuzzing import examples
from tests.gateway.fake_lab import FakeLab, FakeReplica
from tests.gateway.test_link_service import Trainer, machine, until
from tests.gateway.test_registry import SPEC, kinds, launched


def scaled(
    registry: reg.Registry, count: int, serving: tuple[str, ...] = ("p/0", "p/1")
) -> list[reg.Instruction]:
    return registry.handle(reg.ScaleRequested("p", count, frozenset(serving), 9.0))


def states(registry: reg.Registry) -> dict[str, str]:
    return {r.name: r.state.value for r in registry.replicas()}


# The registry -------------------------------------------------------------------------------------------------------


def test_more():
    registry = launched()
    out = scaled(registry, 4)
    assert out == [
        reg.StartProcess("p/2", replace(SPEC, replicas=4)),
        reg.StartProcess("p/3", replace(SPEC, replicas=4)),
        reg.Announce("p"),
    ]
    assert states(registry) == {
        "p/0": "ready",
        "p/1": "ready",
        "p/2": "starting",
        "p/3": "starting",
    }


def test_fewer_drains_then_ends_then_forgets():
    registry = launched()
    assert scaled(registry, 1) == [reg.Announce("p")], (
        "nothing ends while it may have work"
    )
    assert states(registry) == {"p/0": "ready", "p/1": "draining"}
    registry.handle(reg.BeatReceived("p/1", 1, 9.5))  # it lives on
    assert kinds(registry.handle(reg.Drained("p/1"))) == [
        "DropWork",
        "EndProcess",
        "Announce",
    ]
    assert states(registry)["p/1"] == "closed"
    assert registry.handle(reg.Drained("p/1")) == [], "once"
    assert registry.handle(reg.ProcessExited("p/1", "ended", "")) == [
        reg.Forget("p/1"),
        reg.Announce("p"),
    ]
    assert states(registry) == {"p/0": "ready"}
    assert registry.cause("p/1") == "it was drained"
    scaled(registry, 2)
    assert registry.replica("p/1").epoch > 2, (
        "orders to the old one can't reach the new one"
    )


def test_those_that_serve_nobody_go_first():
    registry = launched()
    scaled(registry, 4)
    registry.handle(reg.ProcessExited("p/0", "boom", ""))
    # ready, but stale; p/3 is still starting
    registry.handle(reg.Registered("p/2", "c:3", 9.0))
    out = scaled(registry, 3, ("p/1",))
    assert out == [reg.Forget("p/0"), reg.Announce("p"), reg.Announce("p")], (
        "the one that failed, at once"
    )
    assert kinds(scaled(registry, 2, ("p/1",))) == [
        "DropWork",
        "EndProcess",
        "Announce",
        "Announce",
    ]
    assert states(registry) == {"p/1": "ready", "p/2": "ready", "p/3": "closed"}
    scaled(registry, 1, ("p/1",))
    assert states(registry) == {"p/1": "ready", "p/2": "draining", "p/3": "closed"}


def test_one_that_drains_can_be_wanted_again():
    registry = launched()
    scaled(registry, 1)
    assert scaled(registry, 2) == [reg.Announce("p")], "no process is started"
    assert states(registry) == {"p/0": "ready", "p/1": "ready"}
    assert registry.handle(reg.Drained("p/1")) == []


def test_a_new_number_beside_one_that_is_still_ending():
    registry = launched()
    scaled(registry, 1)
    registry.handle(reg.Drained("p/1"))
    assert scaled(registry, 2)[0] == reg.StartProcess(
        "p/2", replace(SPEC, replicas=3)
    ), "its number is 2, of 3"
    registry.handle(reg.ProcessExited("p/1", "ended", ""))
    again = scaled(registry, 3)[0]
    assert again == reg.StartProcess(
        "p/1", replace(SPEC, replicas=3, run=registry.replica("p/1").run)
    )
    assert list(states(registry)) == ["p/0", "p/1", "p/2"]


def test_a_draining_replica_that_dies_or_falls_silent_is_gone():
    registry = launched()
    scaled(registry, 1)
    out = registry.handle(reg.ProcessExited("p/1", "killed", ""))
    assert out == [reg.DropWork("p/1", "killed"), reg.Forget("p/1"), reg.Announce("p")]
    assert registry.cause("p/1") == "killed"
    registry = launched()
    scaled(registry, 1)
    registry.handle(reg.BeatReceived("p/0", 1, 10.0))
    assert kinds(registry.handle(reg.Tick(10.5))) == [
        "DropWork",
        "EndProcess",
        "Announce",
    ]
    assert "while draining" in registry.cause("p/1")


def test_a_draining_replica_that_registers_again_goes_on_draining():
    registry = launched()
    scaled(registry, 1)
    assert kinds(registry.handle(reg.Registered("p/1", "b:9", 9.5))) == [
        "DropWork",
        "Announce",
    ]
    assert states(registry)["p/1"] == "draining"


def test_closing_a_pool_does_not_end_a_process_twice():
    registry = launched()
    scaled(registry, 1)
    registry.handle(reg.Drained("p/1"))
    out = registry.handle(reg.PoolCloseRequested("p"))
    assert [i.replica for i in out if isinstance(i, reg.EndProcess)] == ["p/0"]
    assert registry.handle(reg.ProcessExited("p/1", "ended", "")) == []


def test_what_is_refused_changes_nothing():
    registry = launched()
    before = [replace(r) for r in registry.replicas()]
    with pytest.raises(reg.Refused, match="at least 1"):
        scaled(registry, 0)
    with pytest.raises(reg.Refused, match="no pool"):
        registry.handle(reg.ScaleRequested("q", 1, frozenset(), 0.0))
    assert list(registry.replicas()) == before
    registry.handle(reg.PoolCloseRequested("p"))
    with pytest.raises(reg.Refused, match="closed"):
        scaled(registry, 1)


class ScaleMachine(RuleBasedStateMachine):
    """Random scaling, starts, deaths, drains: the count is right, epochs never repeat, each process ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = launched()
        self.wanted, self.now = 2, 10.0
        # processes: which run of its replica each is
        self.running = {"p/0": 0, "p/1": 0}
        self.told: set[str] = set()
        self.epochs: dict[str, int] = {}

    def send(self, event: reg.Event) -> None:
        for instruction in self.registry.handle(event):
            match instruction:
                case reg.StartProcess(name, spec):
                    assert name not in self.running, "two processes of one name"
                    assert spec.replicas > int(name.split("/")[1])
                    self.running[name] = spec.run
                case reg.EndProcess(name):
                    assert name in self.running
                    assert name not in self.told
                    self.told.add(name)
                case reg.Forget(name):
                    assert name not in self.running, "forgotten while its process runs"

    @rule(count=st.integers(1, 5), data=st.data())
    def scale(self, count: int, data: st.DataObject) -> None:
        names = [r.name for r in self.registry.replicas()]
        serving = (
            data.draw(st.frozensets(st.sampled_from(names))) if names else frozenset()
        )
        self.wanted = count
        self.send(reg.ScaleRequested("p", count, serving, self.now))

    @rule(
        data=st.data(), what=st.sampled_from(["register", "exit", "drained", "restart"])
    )
    def replica_event(self, data: st.DataObject, what: str) -> None:
        names = [r.name for r in self.registry.replicas()]
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        state = self.registry.replica(name).state
        if what == "exit" and name in self.running:
            run = self.running.pop(name)
            self.told.discard(name)
            gone = state in (ReplicaState.DRAINING, ReplicaState.CLOSED)
            self.send(reg.ProcessExited(name, "boom", "", run))
            assert (self.registry.find(name) is None) is gone
        elif what == "register" and state not in (
            ReplicaState.FAILED,
            ReplicaState.CLOSED,
        ):
            self.send(reg.Registered(name, "a:1", self.now, self.running[name]))
        elif what == "drained":
            self.send(reg.Drained(name))
        elif what == "restart" and state is ReplicaState.FAILED:
            self.send(reg.RestartRequested("p", name, self.now))

    @rule(seconds=st.floats(0, 4))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.send(reg.Tick(self.now))

    @invariant()
    def promises(self) -> None:
        replicas = list(self.registry.replicas())
        staying = [
            r
            for r in replicas
            if r.state not in (ReplicaState.DRAINING, ReplicaState.CLOSED)
        ]
        assert len(staying) == self.wanted
        assert [r.index for r in replicas] == sorted({r.index for r in replicas})
        assert self.running == {
            r.name: r.run for r in replicas if r.state is not ReplicaState.FAILED
        }
        for replica in replicas:
            assert replica.epoch >= self.epochs.get(replica.name, 0)
            self.epochs[replica.name] = replica.epoch


TestScaleMachine = ScaleMachine.TestCase
TestScaleMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


# pool.scale ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one(client: jv.Lab, llama: str) -> jv.Pool:
    return client.launch(llama, replicas=1, name="p").wait(60)


@pytest.fixture
def trainer(one: jv.Pool, fake_lab: FakeLab) -> Iterator[Trainer]:
    trainer = Trainer(fake_lab.address)
    yield trainer
    trainer.close()


def test_one_two_one_during_a_stream_loses_nothing(one: jv.Pool, fake_lab: FakeLab):
    fake_lab.fakes["p/0"].delay = 0.002
    busy: list[int] = []

    def let_go() -> None:
        """Sixty by the newcomer; the next ones it holds, so that it is busy when it is told to go."""
        leaving = fake_lab.fakes["p/1"]
        until(lambda: leaving.finished == 60 and leaving.running)
        one.scale(1, wait=False)
        busy.append(leaving.running)
        leaving.limit = None
        one.scale(1, timeout=60)

    seen: list[jv.Sample] = []
    with ThreadPoolExecutor(1) as threads:
        for sample in one.stream([[i + 1] for i in range(300)], n=2, window=12):
            seen.append(sample)
            if len(seen) == 50:
                one.scale(2, timeout=60)
                fake_lab.fakes["p/1"].limit = 60
                assert one.replicas == 2
                leaving = threads.submit(let_go)
        leaving.result(60)
    assert busy[0] > 0
    assert "p/1" not in fake_lab.fakes
    assert one.replicas == 1
    assert sorted((s.prompt_index, s.sample_index) for s in seen) == [
        (i, k) for i in range(300) for k in range(2)
    ]
    gone = fake_lab.gateway.drained["p/1"]
    by_newcomer = [s for s in seen if s.replica == "p/1"]
    assert len(by_newcomer) == gone.finished > 60
    assert gone.cancelled == 0, "what was in flight was finished"
    assert not any(s.retried or s.error for s in seen)
    status = one.status()
    assert [(r["replica"], r["served"], r["health"]) for r in status["replicas"]] == [
        ("p/0", 600 - gone.finished, "ready")
    ]
    assert status["in_flight"] == 0


def test_a_batch_in_flight_is_finished_before_the_process_ends(
    pool: jv.Pool, fake_lab: FakeLab
):
    leaving = fake_lab.fakes["p/1"]
    leaving.limit = 3
    batches: list[jv.RolloutBatch] = []
    work = threading.Thread(
        target=lambda: batches.append(pool.generate([[i + 1] for i in range(40)], n=2))
    )
    work.start()
    until(lambda: leaving.finished == 3)
    pool.scale(1, wait=False)
    rows = {r["replica"]: r for r in pool.status()["replicas"]}
    assert (rows["p/1"]["health"], rows["p/1"]["state"]) == ("draining", "draining")
    assert rows["p/1"]["in_flight"] > 0
    assert repr(pool).endswith("1 replica × TP 1 on cpu, ready, 1 draining)")
    assert {s.replica for s in pool.generate([[1], [2], [3]])} == {"p/0"}, (
        "it gets nothing new"
    )
    leaving.limit = None
    work.join()
    assert len(batches[0]) == 80
    assert batches[0].notes == ()
    assert leaving.finished == 40
    until(lambda: "p/1" not in fake_lab.fakes)
    assert pool.scale(1) is pool
    assert repr(pool).endswith("1 replica × TP 1 on cpu, ready)")


def test_a_newcomer_takes_no_request_before_it_holds_the_version(
    one: jv.Pool, fake_lab: FakeLab, trainer: Trainer
):
    trainer.open("p/0")
    assert trainer.do([pb.PREPARE, pb.HALT, pb.MOVE], version=7).code == ""
    assert trainer.do([pb.VERIFY, pb.COMMIT, pb.GO_ON]).code == ""
    one.scale(2, timeout=60)
    prompts = [[i + 1] for i in range(12)]
    early = one.generate(prompts)
    assert {s.replica for s in early} == {"p/0"}
    assert {
        r["replica"]: (r["version"], r["stale"]) for r in one.status()["replicas"]
    } == {
        "p/0": (7, False),
        "p/1": (0, True),
    }
    assert one.status()["replicas"][1]["health"] == "stale: waits for a sync"
    assert trainer.open("p/0", "p/1").code == ""
    assert trainer.sync(8).code == ""
    late = one.generate(prompts)
    assert {(s.replica, s.versions[0]) for s in late} == {("p/0", 8), ("p/1", 8)}
    one.scale(1, timeout=60)
    assert list(machine(fake_lab).members) == ["p/0"]
    assert trainer.do([pb.CHECK]).code == "", "the trainer's link lives on"


def test_a_link_reaches_replicas_that_came_after_its_plan():
    """They take the index of an earlier one: what arrives does not depend on it."""
    indices, asked = {}, []
    replicas = [
        pb.ReplicaStatus(replica=f"p/{i}", state=pb.READY, epoch=1) for i in range(3)
    ]
    replicas.insert(1, pb.ReplicaStatus(replica="p/9", state=pb.DRAINING, epoch=1))
    pool: Any = SimpleNamespace(
        facts=lambda deadline: None,
        snapshot=pb.PoolStatus(version=3, replicas=replicas),
        client=SimpleNamespace(link=lambda: None),
        name="p",
    )
    agreed: Any = SimpleNamespace(
        plan=SimpleNamespace(replicas=2, to_bytes=lambda: b""),
        transport="shm",
        meaning=None,
        check_replica=lambda *_: None,
    )

    def senders_to(wanted: dict[str, int], process: None) -> Any:
        indices.update(wanted)
        return SimpleNamespace(
            replicas=dict.fromkeys(wanted, ()),
            open=lambda order, _: order(),
        )

    channels: Any = Coordinator(pool, agreed, None)
    channels._make_senders = senders_to
    channels.stream = SimpleNamespace(
        close=lambda: None, open=lambda order, _: asked.append(order) or pb.LinkReply()
    )
    channels.ensure_open(Deadline(1.0))
    assert indices == {"p/0": 0, "p/1": 0, "p/2": 1}, "the plan is for two replicas"
    assert {e.replica: e.index for e in asked[0].endpoints} == indices
    assert channels.version == 3


def test_the_stale_one_leaves_first(one: jv.Pool, fake_lab: FakeLab, trainer: Trainer):
    trainer.open("p/0")
    trainer.do([pb.PREPARE, pb.HALT, pb.MOVE], version=1)
    trainer.do([pb.VERIFY, pb.COMMIT, pb.GO_ON])
    one.scale(3, timeout=60)
    one.scale(1, timeout=60)
    assert list(fake_lab.fakes) == ["p/0"]
    assert len(one.generate([[1]])) == 1


def test_a_replica_in_a_sync_stays_until_the_sync_is_over(
    pool: jv.Pool, fake_lab: FakeLab
):
    trainer = Trainer(fake_lab.address)
    try:
        trainer.open()
        assert trainer.do([pb.PREPARE, pb.HALT, pb.MOVE]).code == ""
        pool.scale(1, wait=False)
        time.sleep(1.0)  # several looks of the gateway
        assert "p/1" in fake_lab.fakes
        assert trainer.do([pb.VERIFY, pb.COMMIT, pb.GO_ON]).code == "", (
            "and the sync commits on both"
        )
        until(lambda: "p/1" not in fake_lab.fakes)
        assert fake_lab.gateway.drained["p/1"].memory.version == 1
    finally:
        trainer.close()


def test_the_work_of_a_draining_replica_that_dies_is_done_elsewhere(
    pool: jv.Pool, fake_lab: FakeLab
):
    fake_lab.fakes["p/1"].limit = 3
    batches: list[jv.RolloutBatch] = []
    work = threading.Thread(
        target=lambda: batches.append(pool.generate([[i + 1] for i in range(30)]))
    )
    work.start()
    until(lambda: fake_lab.fakes["p/1"].finished == 3)
    pool.scale(1, wait=False)
    fake_lab.do(
        lambda: fake_lab.gateway.handle(
            reg.ProcessExited("p/1", "killed by the test", "")
        )
    )
    work.join()
    assert len(batches[0]) == 30
    assert any("p/1 was lost (killed by the test)" in note for note in batches[0].notes)
    assert pool.replicas == 1
    assert pool.status()["in_flight"] == 0


def test_steering_reaches_one_that_drains(pool: jv.Pool, fake_lab: FakeLab):
    leaving = fake_lab.fakes["p/1"]
    leaving.limit = 0
    work = pool.client.loop.submit(pool.agenerate([[1], [2]]))
    until(lambda: leaving.running == 1)
    pool.scale(1, wait=False)
    pool.resume()
    assert leaving.steered == [pb.RESUME], "its frozen requests can go on"
    leaving.limit = None
    assert len(work.result(60)) == 2
    pool.scale(1, timeout=60)


def test_a_drain_that_takes_too_long_says_who_is_waited_for(
    pool: jv.Pool, fake_lab: FakeLab
):
    fake_lab.fakes["p/1"].limit = 0
    work = pool.client.loop.submit(pool.agenerate([[1], [2]]))
    until(lambda: fake_lab.fakes["p/1"].running == 1)
    with pytest.raises(
        errors.DeadlineExceeded, match="p/1 is draining with 1 in flight"
    ) as caught:
        pool.scale(1, timeout=0.5)
    assert "pool.resume()" in caught.value.remedy
    work.cancel()
    # the caller left, so nothing is in flight
    until(lambda: "p/1" not in fake_lab.fakes)


def test_scaling_down_and_up_again_uses_the_name_again(
    pool: jv.Pool, fake_lab: FakeLab
):
    epoch = fake_lab.registry.replica("p/1").epoch
    for _ in range(2):
        pool.scale(1, timeout=60)
        pool.scale(2, timeout=60)
    assert fake_lab.registry.replica("p/1").epoch > epoch + 2
    assert {s.replica for s in pool.generate([[i + 1] for i in range(8)])} == {
        "p/0",
        "p/1",
    }


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None, True])
def test_counts_that_make_no_sense(pool: jv.Pool, wrong):
    with pytest.raises(errors.ConfigError, match="at least 1 replica") as caught:
        pool.scale(wrong)
    assert "pool.close()" in caught.value.remedy
    assert pool.replicas == 2


def test_the_gateway_refuses_zero_too(pool: jv.Pool, fake_lab: FakeLab):
    order, metadata = (
        pb.ScaleRequest(pool="p", replicas=0),
        _security.authorization(fake_lab.token),
    )
    with (
        grpc.insecure_channel(fake_lab.address) as channel,
        pytest.raises(grpc.RpcError, match="at least 1 replica"),
    ):
        rpc.LabStub(channel).Scale(order, timeout=30, metadata=metadata)


def test_a_newcomer_that_fails_is_told(one: jv.Pool, fake_lab: FakeLab):
    spec = fake_lab.registry.pool("p").spec
    fake_lab.registry.pool("p").spec = replace(spec, engine_json='{"broken": true}')
    with pytest.raises(
        errors.LaunchError, match="p/1 did not come up: ValueError: broken"
    ):
        one.scale(2, timeout=60)
    assert len(one.generate([[1]])) == 1, "the others go on"
    one.scale(1, timeout=60)
    assert repr(one).endswith("ready)")


def test_real_processes_of_a_relaunched_pool_wait_for_their_predecessors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What ends was taken for what begins: its exit failed the new pool, and both wrote one log."""
    script, allowed = tmp_path / "ends_late.py", tmp_path / "allowed"
    script.write_text(
        "import os, sys, time\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.read()\n"
        f"while not os.path.exists({str(allowed)!r}): time.sleep(0.02)\n"
    )
    monkeypatch.setattr(_rollout_process._supervisor, "__file__", str(script))
    # none is killed before it may end
    monkeypatch.setattr(_gateway, "GRACE_SECONDS", 100.0)
    monkeypatch.setenv("JVLAB_WARM", "0")
    one = replace(SPEC, replicas=1)

    async def until_true(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def run() -> None:
        gateway = Gateway("lab", tmp_path, "token", 60.0, 1.0, 1000)
        registry, replica = gateway.registry, lambda: gateway.registry.replica("p/0")
        ticking = asyncio.create_task(gateway.tick_forever())
        gateway.handle(reg.LaunchRequested(one, 0.0))
        await until_true(lambda: replica().pid)
        first = replica().pid
        # the first of these is closed while it waits, and never starts a process
        for _ in range(2):
            gateway.handle(reg.PoolCloseRequested("p"))
            gateway.handle(reg.LaunchRequested(one, 1.0))
        await until_true(lambda: replica().stage == _gateway.WAITS)
        with pytest.raises(reg.Refused, match="another process is p/0 now"):
            gateway.register(pb.RegisterRequest(replica="p/0", address="127.0.0.1:1"))
        assert psutil.pid_exists(first)
        allowed.touch()
        await until_true(lambda: replica().pid)
        assert replica().pid != first
        assert replica().state is ReplicaState.STARTING
        assert not psutil.pid_exists(first)
        await until_true(lambda: replica().stage == "process")
        gateway.register(
            pb.RegisterRequest(replica="p/0", address="127.0.0.1:1", run=replica().run)
        )
        assert replica().state is ReplicaState.READY
        assert list(registry.pools) == ["p"]

        # One that never ends is told, not waited for for ever.
        allowed.unlink()
        monkeypatch.setattr(_gateway, "PREDECESSOR_SECONDS", 0.2)
        gateway.handle(reg.PoolCloseRequested("p"))
        gateway.handle(reg.LaunchRequested(one, 2.0))
        await until_true(lambda: replica().state is ReplicaState.FAILED)
        assert "did not end within 0.2 s; launch under another name" in replica().cause
        allowed.touch()
        ticking.cancel()
        await gateway.shut_down()

    asyncio.run(run())


def test_real_processes_end_when_they_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The gateway's own processes instead of fakes; what runs in them only waits for its end."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(_rollout_process._supervisor, "__file__", str(script))
    monkeypatch.setenv("JVLAB_WARM", "0")

    async def until_true(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def run() -> None:
        gateway = Gateway("lab", tmp_path, "token", 60.0, 1.0, 1000)
        registry, scale = (
            gateway.registry,
            lambda n: gateway.handle(reg.ScaleRequested("p", n, frozenset(), 1.0)),
        )
        gateway.handle(reg.LaunchRequested(SPEC, 0.0))
        await until_true(lambda: all(r.pid for r in registry.replicas()))
        ticking = asyncio.create_task(gateway.tick_forever())
        first = registry.replica("p/1").pid
        for number in range(2):
            gateway.handle(
                reg.Registered(f"p/{number}", "127.0.0.1:1", time.monotonic())
            )
        gateway.count("p/1", 1)  # a request is in flight
        scale(1)
        await asyncio.sleep(0.6)  # two looks of the gateway
        assert registry.replica("p/1").state is ReplicaState.DRAINING
        assert psutil.pid_exists(first)
        gateway.served("p/1", 1)
        await until_true(lambda: registry.find("p/1") is None)
        assert not psutil.pid_exists(first)
        assert psutil.pid_exists(registry.replica("p/0").pid)
        scale(2)
        await until_true(lambda: registry.replica("p/1").pid)
        second = registry.replica("p/1").pid
        assert second != first
        scale(1)  # while it is still coming up
        await until_true(lambda: registry.find("p/1") is None)
        assert not psutil.pid_exists(second)
        scale(2)
        scale(1)  # before it has a process at all
        await until_true(lambda: registry.find("p/1") is None)
        assert gateway.processes["p/1"].ended.is_set()
        ticking.cancel()
        await gateway.shut_down()
        assert not psutil.pid_exists(registry.replica("p/0").pid)

    asyncio.run(run())


# A pool keeps its size: replicas that die are started again ----------------------------------------------------------


def kill(lab: FakeLab, name: str, cause: str = "killed by the test") -> None:
    """Its process exits."""
    run = lab.registry.replica(name).run
    last = f"last words before: {cause}"
    lab.do(lambda: lab.gateway.handle(reg.ProcessExited(name, cause, last, run)))


def row(pool: jv.Pool, number: int = 0) -> dict[str, Any]:
    return pool.status()["replicas"][number]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No back-off."""
    monkeypatch.setattr(reg, "BACK_OFF", (0.0,))


def test_a_replica_that_dies_comes_back_and_serves(
    soon: None, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    pool = client.launch(llama, replicas=2, name="p").wait(60)
    before = row(pool)
    assert (before["restarts"], before["restarts_left"], before["deaths"]) == (0, 3, [])
    fake_lab.fakes["p/0"].limit = 2
    batches: list[jv.RolloutBatch] = []
    prompts = [[i + 1] for i in range(12)]
    work = threading.Thread(target=lambda: batches.append(pool.generate(prompts)))
    work.start()
    until(lambda: fake_lab.served("p/0") == 2)
    kill(fake_lab, "p/0")
    work.join()
    assert [s.text for s in batches[0]] == [f"{i}.0" for i in range(12)]
    until(lambda: row(pool)["state"] == "ready")
    after = row(pool)
    assert (after["restarts"], after["restarts_left"]) == (1, 2)
    assert after["deaths"] == ["killed by the test"]
    assert after["epoch"] > before["epoch"]
    assert {s.replica for s in pool.generate(prompts)} == {"p/0", "p/1"}
    assert "death 1 of 1: killed by the test" in pool.logs(0)
    assert pool.logs(0).endswith(
        "last words before: killed by the test\n— killed by the test —"
    )
    assert pool.logs(1) == ""


def test_work_waits_for_the_only_replica(
    soon: None, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    """Nothing is lost and nothing is made twice; what is waited for is said meanwhile."""
    pool = client.launch(llama, name="p").wait(60)
    allowed = threading.Event()
    start = fake_lab.gateway._start_process

    async def later(replica: str, spec: reg.PoolSpec) -> None:
        while not allowed.is_set():
            await asyncio.sleep(0.01)
        await start(replica, spec)

    fake_lab.gateway._start_process = later  # type: ignore[method-assign]
    fake_lab.fakes["p/0"].limit = 3
    seen: list[jv.Sample] = []
    prompts = [[i + 1] for i in range(8)]
    work = threading.Thread(target=lambda: seen.extend(pool.stream(prompts, window=4)))
    work.start()
    until(lambda: fake_lab.served("p/0") == 3)
    kill(fake_lab, "p/0", "out of memory")
    until(lambda: row(pool)["state"] == "process")
    said = waiting_for(pool.snapshot)
    assert said == "p/0 is starting: process (restart 1 of 3), after: out of memory"
    assert "0/1 ready, 1 restarting" in repr(pool)
    assert work.is_alive()
    with pytest.raises(errors.DeadlineExceeded) as caught:
        pool.score([[1, 2]], timeout=3.0)
    assert "p/0, which is at process (out of memory)" in caught.value.message
    allowed.set()
    work.join(60)
    assert sorted(s.text for s in seen) == [f"{i}.0" for i in range(8)]
    assert {s.retried for s in seen} == {0, 1}
    assert {s.replica for s in seen} == {"p/0"}, "it is another one of that name"
    assert pool.status()["in_flight"] == 0


class StuckReplica(FakeReplica):
    """Finishes nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limit = 0


def test_a_request_that_kills_every_replica_is_not_repeated_for_ever(
    soon: None,
    client: jv.Lab,
    fake_lab: FakeLab,
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tests.gateway.fake_lab.FakeReplica", StuckReplica)
    pool = client.launch(llama, name="p").wait(60)
    failures: list[errors.ReplicaLost] = []

    def work() -> None:
        try:
            pool.generate([[1], [2]])
        except errors.ReplicaLost as error:
            failures.append(error)

    working = threading.Thread(target=work)
    working.start()
    for death in range(2):
        # of this process: a status may still show the load of the one before
        until(lambda n=death: (row(pool)["restarts"], row(pool)["running"]) == (n, 2))
        kill(fake_lab, "p/0", f"death {death}")
    working.join(60)
    assert "lost twice; last on p/0: death 1" in failures[0].message
    until(lambda: row(pool)["state"] == "ready")
    assert row(pool)["restarts_left"] == 1, "and the pool goes on"


def test_after_a_sync_one_that_was_started_again_waits_for_the_next(
    soon: None, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    pool = client.launch(llama, name="p").wait(60)
    trainer = Trainer(fake_lab.address)
    try:
        trainer.open("p/0")
        assert trainer.sync(1).code == ""
        fake_lab.fakes["p/0"].limit = 1
        failures: list[errors.ReplicaLost] = []

        def work() -> None:
            try:
                pool.generate([[1], [2], [3]])
            except errors.ReplicaLost as error:
                failures.append(error)

        working = threading.Thread(target=work)
        working.start()
        until(lambda: fake_lab.served("p/0") == 1)
        kill(fake_lab, "p/0")
        working.join(60)
        # nobody knows whether a sync comes: the caller gets what was made, and the reason
        kept = failures[0].fields["batch"]
        assert isinstance(kept, jv.RolloutBatch)
        assert len(kept) == 1
        assert "2 of 3 samples were lost" in failures[0].message
        assert "stale: no replica of pool 'p' holds the committed version 1" in (
            failures[0].message
        )
        assert (row(pool)["state"], row(pool)["stale"]) == ("ready", True)
        with pytest.raises(errors.EngineDirty, match="stale"):
            pool.generate([[1]])
        trainer.open("p/0")
        assert trainer.sync(2).code == ""
        (sample,) = pool.generate([[1]])
        assert sample.version_spans == ((2, 0, 2),)
    finally:
        trainer.close()


def test_who_dies_too_often_stays_failed_with_every_reason(
    soon: None, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    pool = client.launch(llama, name="p", restarts=2).wait(60)
    for number, cause in enumerate(("first", "second", "third")):
        until(lambda: row(pool)["state"] == "ready")
        assert row(pool)["restarts_left"] == 2 - number
        kill(fake_lab, "p/0", cause)
    text = "third (it was restarted 2 times before, after: first; second)"
    assert (row(pool)["state"], row(pool)["cause"]) == ("failed", text)
    assert row(pool)["deaths"] == ["first", "second", "third"]
    with pytest.raises(errors.LaunchError) as caught:
        pool.generate([[1]])
    assert f"p/0 died: {text}" in caught.value.message
    said = pool.logs(0)
    assert all(f"of 3: {cause}" in said for cause in ("first", "second", "third"))
    assert "0/1 ready, 1 failed" in repr(pool)
    pool.restart(0)
    pool.wait(60)
    after = row(pool)
    assert (after["restarts"], after["restarts_left"], after["deaths"]) == (3, 2, [])
    assert len(pool.generate([[1]])) == 1


def test_nothing_is_started_for_a_pool_that_was_closed_in_the_back_off(
    client: jv.Lab, fake_lab: FakeLab, llama: str, monkeypatch: pytest.MonkeyPatch
):
    started: list[str] = []
    start = fake_lab.gateway._start_process

    async def told(replica: str, spec: reg.PoolSpec) -> None:
        started.append(replica)
        await start(replica, spec)

    fake_lab.gateway._start_process = told  # type: ignore[method-assign]
    monkeypatch.setattr(reg, "BACK_OFF", (3600.0,))
    pools = [client.launch(llama, name=name).wait(60) for name in ("p", "q")]
    kill(fake_lab, "p/0")
    kill(fake_lab, "q/0")
    assert row(pools[0])["state"] == "restarting"
    assert row(pools[0])["health"] == "restarting (1 of 3)"
    pools[0].close()

    def over() -> None:
        """The back-off of both."""
        for replica in fake_lab.registry.replicas():
            replica.restart_at = 0.0

    fake_lab.do(over)
    until(lambda: row(pools[1])["restarts"] == 1)
    assert started == ["p/0", "q/0", "q/0"]


def test_restarts_that_no_pool_can_have(client: jv.Lab, llama: str):
    for wrong in (-1, 101, True, 1.5, "3", None):
        with pytest.raises(errors.ConfigError, match="restarts must be a whole number"):
            client.launch(llama, restarts=wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.Unsupported, match="restarts=2: an engine in this proc"):
        jv.Pool.in_process(llama, restarts=2)


def test_restarts_are_counted_for_prometheus(
    soon: None, client: jv.Lab, fake_lab: FakeLab, llama: str
):
    pool = client.launch(llama, name="p").wait(60)
    kill(fake_lab, "p/0")
    until(lambda: row(pool)["restarts"] == 1)
    text = prometheus_text([pool.status()]).decode()
    assert 'jvlab_replica_restarts_total{pool="p",replica="p/0"} 1.0' in text

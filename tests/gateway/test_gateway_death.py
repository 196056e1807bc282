"""A gateway that is killed and started again with its state file: real processes, simulated engines, joined hosts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.engine._agent import Host
from jvlab.gateway import _registry as reg
from jvlab.gateway import _sync_types as sync
from jvlab.gateway._registry import ReplicaState
from jvlab.gateway._replica_processes import Agents, JoinedHost, JoinedProcess
from jvlab.gateway._serve import FORMAT, StateFile
from jvlab.gateway._sync import PoolSync
from jvlab.gateway._sync_types import Standing
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import LinkStream
from jvlab.wire._sync_words import Phase
from tests.gateway.cluster.test_join import Running, own_address, simulated
from tests.gateway.test_link_service import FIRST, LAST
from tests.gateway.test_registry import launched
from tests.waiting import until

__all__ = ["simulated"]

NAMES = ("p/0", "p/1")
PROMPTS = [[i + 1] for i in range(8)]

# The state file ----------------------------------------------------------------------------------------------------


def test_a_state_file_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "new" / "state"
    first = StateFile(path)
    assert first.agree("port", 0, 0) == 0
    first.facts["port"] = 4711
    first.write({"spent": 3})
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(errors.ConfigError, match="another gateway runs with"):
        StateFile(path)
    first.close(over=False)
    second = StateFile(path)
    assert second.agree("port", 0, 0) == 4711
    assert second.facts["state"] == {"spent": 3}
    with pytest.raises(errors.ConfigError, match=r"the port of the lab in .* is not"):
        second.agree("port", 4712, 0)
    second.close(over=True)
    assert not path.exists(), "the lab is over"
    torn = path.with_name("state.0123456789abcdef.new")
    torn.write_text("half a")
    third = StateFile(path)
    assert not torn.exists(), "of a gateway that was killed in the middle of writing"
    assert "state" not in third.facts
    third.close(over=True)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"kind": "jvlab gateway", "format"', "cannot be read"),
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"lab": "mine"}', "no gateway's state file"),
        (
            f'{{"kind": "jvlab gateway", "format": {FORMAT + 1}}}',
            f"has format {FORMAT + 1}, and this jvlab reads {FORMAT}",
        ),
    ],
)
def test_a_torn_or_foreign_state_file_is_refused(tmp_path: Path, text: str, word: str):
    path = tmp_path / "state"
    path.write_text(text)
    path.chmod(0o600)
    for _ in range(2):  # the second time: whoever was refused holds no lock
        with pytest.raises(errors.ConfigError, match=word) as caught:
            StateFile(path)
        assert "--state" in caught.value.remedy
    assert path.read_text() == text, "nothing of it is lost"


def test_a_state_file_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "state"
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="the lab's token"):
        StateFile(path)


def test_a_disk_that_fails_is_reported_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = StateFile(tmp_path / "state")
    full = OSError(28, "No space left on device")

    def fails(*_: Any) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr("jvlab.gateway._serve.write_private", fails)
        file.write({"a": 1})
        file.write({"a": 1})
    assert capsys.readouterr().out.count("out of date: [Errno 28]") == 1
    file.write({"a": 1})
    assert json.loads(file.path.read_text())["state"] == {"a": 1}
    file.close(over=True)


# The registry and the syncs, without I/O ----------------------------------------------------------------------------


def again(registry: reg.Registry) -> reg.Registry:
    """The registry of a gateway that was started in its place, through JSON."""
    fresh = reg.Registry(10.0, 1.0, 3, 100.0)
    fresh.restore(json.loads(json.dumps(registry.plain())), 100.0)
    return fresh


def test_a_registry_comes_back_with_larger_epochs():
    registry = launched()
    registry.handle(reg.ProcessStarted("p/0", 4711))
    before = {r.name: r.epoch for r in registry.replicas()}
    fresh = again(registry)
    assert fresh.pools["p"].spec == registry.pools["p"].spec
    for replica in fresh.replicas():
        assert replica.state is ReplicaState.LOST
        assert replica.cause == reg.AWAITED
        assert replica.epoch > before[replica.name]
        assert replica in fresh.returning("p"), "work waits for it"
    assert fresh.replica("p/0").pid == 4711
    with pytest.raises(reg.Refused, match="beats with epoch"):
        fresh.handle(reg.BeatReceived("p/0", before["p/0"], 101.0))
    with pytest.raises(reg.Refused, match="another process is p/0"):
        fresh.handle(reg.Registered("p/0", "there", 101.0, run=7))
    fresh.handle(reg.Registered("p/0", "there", 101.0))
    assert fresh.replica("p/0").state is ReplicaState.READY
    assert [r.name for r in fresh.returning("p")] == ["p/1"]
    fresh.handle(reg.ProcessExited("p/1", "it did not come back", ""))
    assert fresh.replica("p/1").cause == "it did not come back"
    assert fresh.returning("p") == []


def test_what_was_closed_keeps_its_epochs_from_being_given_again():
    registry = launched()
    highest = max(r.epoch for r in registry.replicas())
    registry.handle(reg.PoolCloseRequested("p"))
    fresh = again(registry)
    assert not fresh.pools
    (start, _) = fresh.handle(reg.LaunchRequested(registry.pools["p"].spec, 101.0))
    assert isinstance(start, reg.StartProcess)
    assert fresh.replica("p/0").epoch > highest


@pytest.mark.parametrize(
    ("held", "state", "pool", "standing"),
    [
        (4, "old", 4, Standing.SERVING),
        # the gateway died between the answer to COMMIT and its file
        (5, "old", 5, Standing.SERVING),
        (3, "old", 4, Standing.STALE),
        (4, "dirty", 4, Standing.DIRTY),
        (5, "dirty", 4, Standing.DIRTY),
    ],
)
def test_a_replica_that_comes_back_is_believed(
    held: int, state: str, pool: int, standing: Standing
):
    machine = PoolSync("p")
    machine.restore(4, ["p/0"])
    machine.handle(sync.ReplicaJoined("p/0", held, state == "dirty"))
    assert machine.standing("p/0") is Standing.SYNCING, "nothing is known yet"
    (order,) = [
        i for i in machine.handle(sync.SyncTick(1.0)) if isinstance(i, sync.Send)
    ]
    assert order.phases == (Phase.ABANDON,)
    machine.handle(sync.Answered(order.ticket, "ok", 2.0, state=state, version=held))
    assert machine.version == pool
    assert machine.standing("p/0") is standing


def test_one_that_is_lost_again_before_it_answers_is_asked_again():
    machine = PoolSync("p")
    machine.restore(4, ["p/0"])
    for _ in range(2):
        machine.handle(sync.ReplicaJoined("p/0", 5, False))
        assert machine.standing("p/0") is Standing.SYNCING
        (order,) = [
            i for i in machine.handle(sync.SyncTick(1.0)) if isinstance(i, sync.Send)
        ]
        machine.handle(sync.Left("p/0", "silent"))
        machine.handle(sync.Answered(order.ticket, "lost", 2.0))
    assert machine.version == 4, "nobody said that it has 5"


def test_only_the_host_that_ran_it_may_return_with_a_replica(tmp_path: Path):
    spec = reg.PoolSpec("p", "m", 1, 1, "auto", "cpu", "{}", "{}", place="join")

    async def run() -> None:
        process = JoinedProcess("p/0", spec, 0, tmp_path, away=0.5)
        agents = Agents(launched(), {"p/0": process}, lambda _: None, lambda *_: None)
        exits: list[str] = []
        await process.start(lambda pid: None, lambda cause, tail: exits.append(cause))
        process.resume("python 1 on a")
        assert not process.free, "it is no place for a new one"
        other, same = (
            JoinedHost(pb.JoinOffer(agent=name, running="p/0"))
            for name in ("python 2 on a", "python 1 on a")
        )
        with pytest.raises(reg.Refused, match="another agent runs p/0"):
            agents._admit(other)
        agents._admit(same)
        assert same.orders.get_nowait().WhichOneof("kind") == "wait", "no new start"
        await asyncio.sleep(0.7)
        assert exits == []
        process.resume("python 1 on a")
        await asyncio.sleep(0.7)
        assert "did not come back within 0.5 s" in exits[0]

    asyncio.run(asyncio.wait_for(run(), 30))


# Real processes -----------------------------------------------------------------------------------------------------


class Mortal:
    """A gateway process that can be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.options = options
        self.start()

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "jvlab", "gateway", "--state", str(self.state)),
            *("--folder", str(self.folder), "--place", "join", "--lease", "60"),
            *("--beat", "0.2", "--missed-beats", "30", *self.options),
        ]

    def start(self) -> None:
        (self.folder / "lab.json").unlink(missing_ok=True)
        with open(self.folder / "gateway.log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        until(self._is_up, "the gateway's start", 60)
        self.facts = json.loads((self.folder / "lab.json").read_text())

    def _is_up(self) -> bool:
        assert self.process.poll() is None, (self.folder / "gateway.log").read_text()
        return (self.folder / "lab.json").exists()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def mortal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mortal]:
    """It and its replicas wait 20 s for each other, unless a test says otherwise."""
    gateway = Mortal(tmp_path, "--away", getattr(request, "param", "60"))
    try:
        yield gateway
    finally:
        gateway.end()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that does not import vLLM first: its replica has a process at once."""
    monkeypatch.setenv("JVLAB_WARM", "0")


@pytest.fixture
def world(
    simulated: None, mortal: Mortal, tmp_path: Path, llama: str
) -> Iterator[World]:
    world = World(mortal, tmp_path, llama)
    yield world
    world.end()


class World:
    """A gateway, two hosts that joined it, and a lab of this process."""

    def __init__(self, gateway: Mortal, folder: Path, model: str) -> None:
        self.gateway = gateway
        self.folder = folder
        facts = gateway.facts
        self.lab = jv.Lab.attach(facts["address"], facts["token"])
        environment = {"FAKE_FOLDER": str(folder)}
        self.pool = self.lab.launch(
            model, name="p", replicas=2, env=environment, restarts=0
        )
        host = Host(facts["address"], facts["token"], alone=False)
        self.agents = [Running(host, folder / f"host-{n}") for n in range(2)]
        self.pool.wait(120)
        self.stream: LinkStream | None = None

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["replica"]: row for row in self.pool.status()["replicas"]}

    def open(self) -> None:
        self.stream = self.stream or self.lab.client.link()
        endpoints = [
            pb.Endpoint(replica=name, index=i, ranks_json=[json.dumps([name])])
            for i, name in enumerate(NAMES)
        ]
        request = pb.LinkOpen(
            pool="p",
            holder="trainer",
            transport="loopback",
            plan=b"plan",
            endpoints=endpoints,
            lease_seconds=30.0,
        )
        self.stream.open(request, 30.0)

    def steps(
        self, phases: Sequence[int], version: int = 0, mode: str = ""
    ) -> pb.LinkReply:
        assert self.stream is not None
        more: dict[str, Any] = {}
        if pb.PREPARE in phases:
            more["terms"] = pb.SyncTerms(
                version=version,
                mode=mode,
                verify="full",
                require="all",
                pause="keep",
                kv="keep",
            )
        if pb.VERIFY in phases:
            more["digests"] = [
                pb.ReplicaDigests(replica=name, parameters=["w"], ranks=[0], values=[7])
                for name in NAMES
            ]
        return self.stream.steps(phases, 30.0, **more)

    def sync(self, version: int, mode: str) -> None:
        self.open()
        self.steps(FIRST[mode], version, mode)
        self.steps(LAST[mode])

    def tell(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def settled(self) -> dict[str, dict[str, Any]]:
        """Both are registered again, and have said what they hold."""
        self.pool.wait(60)
        until(lambda: not [r for r in self.pool.snapshot.replicas if r.version < 0])
        return self.rows()

    def end(self) -> None:
        if self.stream is not None:
            self.stream.close()
        if self.gateway.process.poll() is None:
            self.lab.close()
        else:
            self.lab._leave()
        for agent in self.agents:
            agent.stop()
            agent.end()


def standings(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {"dirty" if row["dirty"] else row["state"] for row in rows.values()}


def served(*batches: jv.RolloutBatch) -> set[str]:
    return {sample.replica for batch in batches for sample in batch}


def versions(*batches: jv.RolloutBatch) -> set[int]:
    return {int(v) for batch in batches for s in batch for v in s.versions}


slow = pytest.mark.slow


@slow
def test_pools_versions_and_identities_survive(world: World):
    pool = world.pool
    world.sync(3, "direct")
    before = world.rows()
    facts = world.gateway.facts
    world.gateway.kill()
    world.gateway.start()
    for name in ("lab", "address", "token"):
        assert world.gateway.facts[name] == facts[name]
    assert world.gateway.facts["pid"] != facts["pid"]
    after = world.settled()
    assert {n: row["pid"] for n, row in after.items()} == {
        n: row["pid"] for n, row in before.items()
    }
    for name in NAMES:
        assert psutil.pid_exists(after[name]["pid"]), "the engine was not restarted"
        assert after[name]["epoch"] > before[name]["epoch"]
        assert after[name]["restarts"] == 0
    assert pool.status()["version"] == 3
    batches = [pool.generate(PROMPTS, timeout=30)]
    # the other may not have said yet what it holds
    until(
        lambda: batches.append(pool.generate(PROMPTS)) or served(*batches) == set(NAMES)
    )
    assert versions(*batches) == {3}
    world.sync(4, "staged")
    assert pool.status()["version"] == 4
    # the lab object knows which process it talks to
    assert world.lab.status()["pid"] == world.gateway.process.pid
    world.lab.close()
    assert world.gateway.process.wait(30) == 0
    assert not world.gateway.state.exists(), "a lab that ended has no state"
    assert [agent.end() for agent in world.agents] == [0, 0]


OLD = {
    "direct": ("prepare", "halt", "move"),
    "staged": ("prepare", "move", "verify", "halt", "commit"),
}


@slow
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_death_in_each_phase_of_a_sync(world: World, mode: str):
    """The state is what the engines say: old, dirty, or committed; the next sync heals it."""
    pool = world.pool
    world.sync(1, mode)
    version = 1
    with ThreadPoolExecutor(1) as thread:
        for phase in ("prepare", "halt", "move", "verify", "commit", "go_on"):
            world.tell("hang", phase)
            death: Future[None] = thread.submit(world.sync, version + 1, mode)
            reached = [world.folder / f"reached-{i}" for i in range(2)]
            until(lambda files=reached: all(f.exists() for f in files), phase)
            world.gateway.kill()
            began = time.monotonic()
            with pytest.raises(errors.JvlabError) as caught:
                death.result(30)
            assert time.monotonic() - began < 15, phase
            assert isinstance(
                caught.value, (errors.GatewayUnreachable, errors.SyncError)
            )
            assert "gateway" in str(caught.value), phase
            assert caught.value.remedy
            for file in (*reached, world.folder / "hang"):
                file.unlink()
            world.gateway.start()
            rows = world.settled()
            if phase == "go_on":  # they had committed, and the gateway did not know
                version += 1
            states = standings(rows)
            until(lambda v=version: pool.status()["version"] == v, phase, 10)
            if phase == "go_on" or phase in OLD[mode]:
                assert states == {"ready"}, phase
                assert versions(pool.generate(PROMPTS, timeout=30)) == {version}, phase
            else:
                assert states == {"dirty"}, phase
                with pytest.raises(errors.EngineDirty):
                    pool.generate(PROMPTS, timeout=30)
            version += 1
            world.sync(version, mode)
            assert standings(world.rows()) == {"ready"}
            assert len(pool.generate(PROMPTS, timeout=30)) == len(PROMPTS)


@slow
def test_death_between_two_orders_of_a_sync(world: World):
    """No call is open then: the engines are halted, and only ABANDON frees them."""
    world.sync(1, "direct")
    for phases, state in ((FIRST["direct"][:2], "ready"), (FIRST["direct"], "dirty")):
        world.open()
        world.steps(phases, 2, "direct")
        world.gateway.kill()
        world.gateway.start()
        rows = world.settled()
        assert standings(rows) == {state}
    world.sync(2, "direct")
    assert len(world.pool.generate(PROMPTS, timeout=30)) == len(PROMPTS)


@slow
def test_calls_fail_in_flight_and_wait_before_they_begin(world: World):
    pool = world.pool
    world.tell("delay", "30")
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(pool.generate, PROMPTS, timeout=120)
        until(lambda: pool.status()["in_flight"])
        world.gateway.kill()
        with pytest.raises(
            errors.GatewayUnreachable, match="does not answer"
        ) as caught:
            running.result(10)
        assert "try again" in caught.value.remedy
        (world.folder / "delay").unlink()
        # within its own deadline, and with what to do
        began = time.monotonic()
        with pytest.raises(errors.ControlError, match="gateway"):
            pool.generate(PROMPTS, timeout=2)
        with pytest.raises(
            errors.GatewayUnreachable, match="come back within 2 s"
        ) as late:
            world.lab.client.call("Describe", pb.DescribeRequest(), 2.0)
        assert "--state" in late.value.remedy
        assert time.monotonic() - began < 8
        asked = threads.submit(world.lab.status)
        waiting = threads.submit(pool.generate, PROMPTS, timeout=60)
        time.sleep(1.0)
        assert not waiting.done()
        assert not asked.done()
        world.gateway.start()
        assert asked.result(30)["pid"] == world.gateway.process.pid
        assert len(waiting.result(60)) == len(PROMPTS)


@slow
def test_without_its_file_nothing_survives(world: World):
    """The same address and the same token are another lab: its replicas end at once, and say why."""
    pids = {row["pid"] for row in world.rows().values()}
    gateway = world.gateway
    gateway.kill()
    gateway.state.unlink()
    token = gateway.folder / "token"
    token.touch(0o600)
    token.write_text(gateway.facts["token"])
    port = gateway.facts["address"].rpartition(":")[2]
    gateway.options = ("--port", port, "--token-file", str(token))
    began = time.monotonic()
    gateway.start()
    assert [agent.end() for agent in world.agents] == [1, 1]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert time.monotonic() - began < 15, "they do not wait to the end of their time"
    assert not world.lab.status()["pools"]
    with pytest.raises(errors.ControlError, match="closed"):
        world.pool.generate(PROMPTS, timeout=10)


@slow
def test_a_lab_that_is_closed_at_once_leaves_nothing(world: World):
    """Its hosts have not come back yet: they are told to end when they do, and do not wait for another gateway."""
    pids = {row["pid"] for row in world.rows().values()}
    world.gateway.kill()
    world.gateway.start()
    world.lab.close()
    assert world.gateway.process.wait(30) == 0
    assert [agent.end() for agent in world.agents] == [0, 0]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@slow
def test_one_that_was_leaving_leaves(world: World):
    world.tell("delay", "30")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(world.pool.generate, PROMPTS, timeout=120)
        until(lambda: all(row["in_flight"] for row in world.rows().values()))
        stub = world.lab.client
        stub.call("Scale", pb.ScaleRequest(pool="p", replicas=1))
        until(lambda: "draining" in [row["state"] for row in world.rows().values()])
        world.gateway.kill()
        with pytest.raises(errors.GatewayUnreachable):
            running.result(10)
    (world.folder / "delay").unlink()
    world.gateway.start()
    until(lambda: len(world.pool.snapshot.replicas) == 1, "the end of one", 30)
    until(lambda: 0 in [agent.code for agent in world.agents], "its agent's end", 30)
    assert sorted(str(agent.code) for agent in world.agents) == ["0", "None"]
    assert len(world.pool.wait(60).generate(PROMPTS, timeout=30)) == len(PROMPTS)


@slow
def test_one_that_does_not_come_back_is_lost_with_the_reason(world: World):
    world.gateway.kill()
    world.agents[0].stop()
    assert world.agents[0].end() == 1
    world.gateway.options = ("--away", "3")
    world.gateway.start()
    until(lambda: "failed" in [row["state"] for row in world.rows().values()], "it", 30)
    (gone,) = [row for row in world.rows().values() if row["state"] == "failed"]
    assert "did not come back within 3 s of the gateway's new start" in gone["cause"]
    assert gone["state"] == "failed"
    batch = world.pool.generate(PROMPTS, timeout=30)
    assert {s.replica for s in batch} == set(NAMES) - {gone["replica"]}


@slow
@pytest.mark.parametrize("mortal", ["2"], indirect=True)
def test_replicas_end_without_a_gateway(world: World):
    pids = {row["pid"] for row in world.rows().values()}
    world.gateway.kill()
    for agent in world.agents:
        agent.end()
        assert isinstance(agent.error, errors.GatewayUnreachable)
        assert "for 2 s" in str(agent.error)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # a gateway that comes too late says so of each
    world.gateway.start()
    # this process had given up on the pool, and finds it again
    world.pool = world.lab.pools["p"]
    until(lambda: standings(world.rows()) == {"failed"}, "the loss of both", 30)


@slow
def test_a_second_gateway_is_refused(mortal: Mortal, tmp_path: Path):
    second = subprocess.run(
        mortal.command, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert "another gateway runs with the state file" in second.stderr
    assert mortal.process.poll() is None
    mortal.kill()
    content = mortal.state.read_text()
    mortal.state.write_text(content[: len(content) // 2])
    torn = subprocess.run(
        mortal.command, capture_output=True, text=True, timeout=60, check=False
    )
    assert torn.returncode == 1
    assert "cannot be read" in torn.stderr
    assert "name another with --state" in torn.stderr
    broken = json.loads(content)
    broken["state"]["pools"] = [{"spec": {}}]
    mortal.state.write_text(json.dumps(broken))
    foreign = subprocess.run(
        mortal.command, capture_output=True, text=True, timeout=60, check=False
    )
    assert foreign.returncode == 1
    assert "cannot be read: KeyError" in foreign.stderr
    mortal.state.write_text(content)
    mortal.start()


@slow
def test_other_hosts_find_the_same_certificate(tmp_path: Path):
    gateway = Mortal(tmp_path, "--host", own_address())
    try:
        facts = gateway.facts
        lab = jv.Lab.attach(facts["address"], facts["token"])
        line = lab.join_line
        gateway.kill()
        gateway.start()
        for name in ("address", "public_address"):
            assert gateway.facts[name] == facts[name]
        assert lab.status()["fingerprint"] in line
        lab.close()
    finally:
        gateway.end()


@slow
def test_a_paused_pool_is_paused_again(world: World):
    world.pool.pause()
    world.gateway.kill()
    world.gateway.start()
    world.settled()
    time.sleep(1.0)  # a beat that differs would be corrected by now
    assert world.pool.snapshot.paused_by
    assert all(row["paused"] for row in world.rows().values())
    world.pool.resume()
    assert len(world.pool.generate(PROMPTS, timeout=30)) == len(PROMPTS)


@slow
def test_local_replicas_end_with_their_gateway(cold: None, mortal: Mortal, llama: str):
    """They are its children."""
    facts = mortal.facts
    with jv.Lab.attach(facts["address"], facts["token"]) as lab:
        request = pb.LaunchRequest(
            pool="local",
            model=llama,
            replicas=1,
            tensor_parallel=1,
            load="dummy",
            device="cpu",
            engine_json="{}",
            env_json="{}",
            place="local",
        )
        lab.client.call("Launch", request)
        starting = lab.pools["local"]
        pid = until(lambda: starting.snapshot.replicas[0].pid)
        mortal.kill()
        until(lambda: not psutil.pid_exists(pid), "the end of its replica", 60)
        mortal.start()
        row = lab.pools["local"].status()["replicas"][0]
        assert row["state"] == "failed"
        assert "its gateway died, and with it what that had started" in row["cause"]

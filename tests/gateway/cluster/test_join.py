"""Replicas that the gateway did not start: they offer, are given a replica, come back, leave; tokens and TLS."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.cli._cli import main
from jvlab.engine import _agent
from jvlab.engine._agent import Agent, Host, host_from
from jvlab.gateway import _registry as reg
from jvlab.gateway import _replica_processes
from jvlab.gateway._registry import ReplicaState
from jvlab.wire import _channels
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire.processes import _rollout_process
from tests.conftest import process_tree, wait_for_exit
from tests.gateway.cluster import fake_rollout
from tests.gateway.test_registry import launched
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPTS = [[i + 1] for i in range(12)]


class Running:
    """An agent in a thread, as a Ray actor has it; what the command runs is the same."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.code: int | None = None
        self.error: BaseException | None = None
        self.agents: list[Agent] = []
        self.loops: list[asyncio.AbstractEventLoop] = []
        self._host, self._folder = host, folder
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        async def run() -> int:
            self.loops.append(asyncio.get_running_loop())
            self.agents.append(Agent(self._host, self._folder))
            return await self.agents[0].run()

        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self.code = asyncio.run(run())
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        if self.thread.is_alive() and self.agents:
            self.loops[0].call_soon_threadsafe(self.agents[0].stop)

    def end(self) -> int | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of this process start simulated replicas."""
    monkeypatch.setattr(_rollout_process._supervisor, "__file__", fake_rollout.__file__)
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )


@pytest.fixture
def offer(
    simulated: None, lab: jv.Lab, tmp_path: Path
) -> Iterator[Callable[..., Running]]:
    """Start an agent that offers itself to the lab."""
    started: list[Running] = []

    def start(name: str = "", **more: Any) -> Running:
        host = Host(
            **{"gateway": lab.address, "token": lab._token, "name": name, **more}
        )
        started.append(Running(host, tmp_path / f"host-{len(started)}"))
        return started[-1]

    yield start
    for running in started:
        running.stop()
        running.end()


@pytest.fixture
def pool(lab: jv.Lab, llama: str) -> Iterator[jv.Pool]:
    """Two replicas that nobody runs yet."""
    pool = lab.launch(
        llama,
        replicas=2,
        name=f"join-{time.monotonic_ns()}",
        place="join",
        restarts=0,
    )
    yield pool
    pool.close()


def rows(pool: jv.Pool) -> dict[str, dict[str, Any]]:
    return {r["replica"].rpartition("/")[2]: r for r in pool.status()["replicas"]}


def test_a_pool_waits_for_hosts_and_takes_them(
    pool: jv.Pool, offer: Callable[..., Running], capfd
):
    until(
        lambda: (
            {r["state"] for r in rows(pool).values()} == {_replica_processes.WAITING}
        )
    )
    first, second = offer(), offer(pool.name)
    pool.wait(60)
    batch = pool.generate(PROMPTS, n=2)
    assert {s.replica for s in batch} == {f"{pool.name}/0", f"{pool.name}/1"}
    # a host's cores and cards are its own
    until(lambda: "index 0 of 1" in pool.logs(1))
    pids = {r["pid"] for r in rows(pool).values()}
    assert all(psutil.pid_exists(pid) for pid in pids)
    pool.scale(1, timeout=60)
    until(lambda: sorted([first.code is None, second.code is None]) == [False, True])
    assert len(pool.generate(PROMPTS)) == 12
    pool.close()
    assert {first.end(), second.end()} == {0}, "the gateway ended them"
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_hosts_may_come_before_the_pool_and_beyond_its_number(
    lab: jv.Lab, llama: str, offer: Callable[..., Running]
):
    early = offer("early")
    until(lambda: early.agents)
    pool = lab.launch(llama, replicas=1, name="early", place="join").wait(60)
    more = offer("early")
    until(lambda: pool.replicas == 2)
    pool.wait(60)
    until(lambda: {s.replica for s in pool.generate(PROMPTS)} == {"early/0", "early/1"})
    pool.close()
    assert (early.end(), more.end()) == (0, 0)


def test_a_replica_that_dies_fails_and_its_name_can_come_back(
    pool: jv.Pool, offer: Callable[..., Running]
):
    names = [f"{pool.name}/{i}" for i in range(2)]
    first, other = offer(names[0]), offer(names[1])
    pool.wait(60)
    before = rows(pool)["0"]
    os.kill(before["pid"], signal.SIGKILL)
    assert first.end() == 1
    until(lambda: rows(pool)["0"]["state"] == "failed")
    with pytest.raises(errors.LaunchError, match="died: the rollout process"):
        pool.wait(5)
    assert len(pool.generate(PROMPTS)) == 12, "the other goes on"
    offer(names[0])
    until(lambda: rows(pool)["0"]["state"] == "ready")
    after = rows(pool)["0"]
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]
    assert other.code is None


def test_its_successor_may_come_before_its_end_is_known(
    pool: jv.Pool, offer: Callable[..., Running]
):
    """Ray brings up a new actor while the old one's engine is still ending."""
    first, _ = offer(f"{pool.name}/0"), offer(f"{pool.name}/1")
    pool.wait(60)
    second = offer(f"{pool.name}/0")
    until(lambda: second.agents)
    time.sleep(1.0)  # its offer is on its way; one that is late shows less
    before = rows(pool)["0"]
    os.kill(before["pid"], signal.SIGKILL)
    assert first.end() == 1
    until(lambda: rows(pool)["0"]["state"] == "ready")
    assert rows(pool)["0"]["epoch"] > before["epoch"]


def test_a_place_is_open_again_for_the_next_host(
    lab: jv.Lab, llama: str, offer: Callable[..., Running]
):
    """The agent ends with its replica; whichever host comes next runs it, and the pool gets no larger."""
    pool = lab.launch(llama, name="reopened", place="join", restarts=1)
    first = offer("reopened")
    pool.wait(60)
    before = rows(pool)["0"]
    os.kill(before["pid"], signal.SIGKILL)
    assert first.end() == 1
    until(lambda: rows(pool)["0"]["state"] == _replica_processes.WAITING)
    waiting = rows(pool)["0"]
    assert (waiting["restarts"], len(waiting["deaths"])) == (1, 1)
    second = offer("reopened")
    pool.wait(60)
    assert pool.replicas == 1
    assert rows(pool)["0"]["epoch"] > before["epoch"]
    assert len(pool.generate(PROMPTS)) == 12
    second.stop()
    assert second.end() == 1
    until(lambda: rows(pool)["0"]["state"] == "failed")
    assert "it was restarted once before" in rows(pool)["0"]["cause"]
    third = offer("reopened/0")
    until(lambda: rows(pool)["0"]["state"] == "ready")
    assert rows(pool)["0"]["restarts_left"] == 1, "somebody started it by hand"
    pool.close()
    assert third.end() == 0


def test_a_host_that_comes_in_the_back_off_gets_the_place(tmp_path: Path):
    """It was taken for one too many, and the pool grew."""
    registry = launched()
    pool = registry.pools["p"]
    pool.spec = replace(pool.spec, place="join", restarts=1)
    asked: list[reg.Event] = []
    restarted: list[str] = []
    process = _replica_processes.JoinedProcess("p/0", pool.spec, 0, tmp_path)
    process.ended.set()
    registry.handle(reg.ProcessExited("p/0", "boom", ""))
    agents = _replica_processes.Agents(
        registry,
        {"p/0": process},
        asked.append,
        lambda pool, replica: restarted.append(replica),
    )
    for name in ("p", "p/0"):
        agents._admit(_replica_processes.JoinedHost(pb.JoinOffer(name=name)))
    assert (asked, restarted) == ([], [])
    agents._admit(_replica_processes.JoinedHost(pb.JoinOffer(name="p")))
    assert [type(event) for event in asked] == [reg.Offered]


def test_a_host_that_is_told_to_end_says_so(
    pool: jv.Pool, offer: Callable[..., Running]
):
    first, _ = offer(f"{pool.name}/0"), offer(f"{pool.name}/1")
    pool.wait(60)
    first.stop()
    assert first.end() == 1
    until(lambda: rows(pool)["0"]["state"] == "failed")


def test_a_start_that_fails_carries_the_log(
    lab: jv.Lab, llama: str, offer: Callable[..., Running]
):
    pool = lab.launch(llama, name="broken-join", place="join", engine={"broken": True})
    host = offer("broken-join")
    with pytest.raises(errors.LaunchError, match="ValueError: broken by the test"):
        pool.wait(60)
    assert host.end() == 1
    pool.close()


def test_what_is_refused(lab: jv.Lab, simulated: None, tmp_path: Path, llama: str):
    wrong = Running(Host(lab.address, "not-the-token"), tmp_path / "a")
    wrong.end()
    assert isinstance(wrong.error, errors.AuthError)
    nobody = Running(Host("127.0.0.1:9", lab._token, patience=1.5), tmp_path / "b")
    nobody.end()
    assert isinstance(nobody.error, errors.GatewayUnreachable)
    with pytest.raises(errors.ConfigError, match="place='mars' is not known"):
        lab.launch(llama, place="mars")
    pool = lab.launch(llama, name="no-ray", place={"cpus": 1})
    with pytest.raises(errors.LaunchError, match="can't start processes on 'ray'"):
        pool.wait(30)
    pool.close()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({}, "clear text"),
        ({"tls_ca": "ca.pem", "bind": "127.0.0.1"}, "could not reach this replica"),
        (
            {"tls_ca": "ca.pem", "bind": "192.0.2.7"},
            "refusing to listen on 192.0.2.7 without TLS",
        ),
    ],
)
def test_a_far_gateway_needs_tls(more: dict[str, Any], word: str):
    with pytest.raises(errors.ConfigError, match=word):
        Host("192.0.2.1:7000", "token", **more).check()
    with pytest.raises(errors.ConfigError, match="HOST:PORT"):
        Host("somewhere", "token").check()


def test_a_replica_elsewhere_without_a_certificate_is_refused():
    _replica_processes.check_reachable("127.0.0.1:5", "")
    _replica_processes.check_reachable("192.0.2.1:5", "pem")
    with pytest.raises(reg.Refused, match="clear text"):
        _replica_processes.check_reachable("192.0.2.1:5", "")


def test_token_files(tmp_path: Path, lab: jv.Lab, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "token"
    lab.write_token(str(file))
    assert _channels.read_token(str(file)) == lab._token
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="can be read by others"):
        _channels.read_token(str(file))
    empty = _channels.write_private(tmp_path / "empty", "\n")
    with pytest.raises(errors.ConfigError, match="holds no token"):
        _channels.read_token(str(empty))
    assert main(["rollout", "--gateway", lab.address]) == 1
    assert "--token-file" in capsys.readouterr().err
    assert (
        main(
            [
                "rollout",
                "--gateway",
                lab.address,
                "--token-file",
                str(tmp_path / "no"),
                "--patience",
                "0.1",
            ]
        )
        == 1
    )
    assert "did not appear" in capsys.readouterr().err


def own_address() -> str:
    """An address of this machine that is not loopback."""
    found = [
        a.address
        for addresses in psutil.net_if_addrs().values()
        for a in addresses
        if a.family is socket.AF_INET and not a.address.startswith("127.")
    ]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def test_tls_from_end_to_end(
    simulated: None, tmp_path: Path, llama: str, monkeypatch: pytest.MonkeyPatch
):
    """Gateway and replica on an address that others can reach, with the certificate that the lab made for itself."""
    address, folder = own_address(), tmp_path / "tls"
    tls = _channels.tls_folder(folder, address)
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    assert _channels.tls_folder(folder, address) == tls, "made once"
    with jv.Lab(host=address, tls=(tls.certificate, tls.key), lease=60) as lab:
        lab.write_token(str(tmp_path / "token"))
        arguments = argparse.Namespace(
            gateway=lab.public_address,
            token_file=str(tmp_path / "token"),
            tls_dir=str(folder),
            tls_ca=None,
            tls_cert=None,
            tls_key=None,
            name="",
            bind="",
            patience=20.0,
            folder=None,
            share_host=False,
            fingerprint="",
        )
        host = host_from(arguments, tmp_path)
        running = Running(host, tmp_path / "host")
        with lab.launch(llama, name="far", place="join").wait(60) as pool:
            assert len(pool.generate(PROMPTS)) == 12
            outside = jv.Lab.attach(
                lab.public_address, lab._token, tls_ca=tls.certificate
            )
            assert list(outside.pools) == ["far"]
            outside._leave()
            # as if the replica's host were another: a trainer here is not bound to loopback, as its own channel is
            bound: list[str] = []

            def agree(*_: Any, options: dict[str, Any], **__: Any) -> None:
                bound.append(options["host"])
                raise errors.Unsupported("enough")

            monkeypatch.setattr("jvlab.sync._connections.agree", agree)
            monkeypatch.setattr(
                "jvlab.sync._connections.on_this_host", lambda *_: False
            )
            with pytest.raises(errors.Unsupported, match="enough"):
                lab.connect({"w": np.zeros(2)}, pool)
            assert bound == [address]
        assert running.end() == 0


def test_one_pasted_line_joins(
    simulated: None, tmp_path: Path, llama: str, capfd: pytest.CaptureFixture[str]
):
    """No file is copied: the line, and the token from the environment."""
    code = (
        "import sys; import jvlab.wire.processes._supervisor as s; "
        f"s.__file__ = {fake_rollout.__file__!r}; from jvlab.cli._cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with jv.Lab(host=own_address(), lease=60) as lab:
        words = shlex.split(lab.join_line)
        pool = lab.launch(llama, name="pasted", place="join")
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        environment["JVLAB_TOKEN"] = lab._token
        command = [sys.executable, "-c", code, *words[1:]]
        with subprocess.Popen(command, env=environment) as agent:
            try:
                pool.wait(180)
                assert len(pool.generate(PROMPTS)) == 12
                below = set(process_tree(agent.pid)) - {agent.pid}
                for pid in below if sys.platform == "linux" else ():
                    # one that has ended meanwhile shows nothing
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        environ = Path(f"/proc/{pid}/environ").read_bytes()
                        assert lab._token.encode() not in environ
                pool.close()
                assert agent.wait(180) == 0
            finally:
                agent.terminate()  # or this would wait for it for ever
        other = _channels.fingerprint(_channels.make_certificate(["x"])[0])
        wrong = [*command[:-1], other]
        done = subprocess.run(wrong, env=environment, timeout=120)
        assert done.returncode == 1
        assert "another certificate" in capfd.readouterr().err
    assert list(tmp_path.glob("jv*")) == []


def test_a_token_is_asked_for_where_there_is_a_keyboard(
    monkeypatch: pytest.MonkeyPatch, lab: jv.Lab
):
    arguments = argparse.Namespace(
        gateway=lab.address, token_file=None, patience=1.0, fingerprint=""
    )
    asked: list[str] = []

    def typed(prompt: str) -> str:
        asked.append(prompt)
        return f" {lab._token}\n"

    monkeypatch.delenv("JVLAB_TOKEN", raising=False)
    monkeypatch.setattr(_agent.getpass, "getpass", typed)
    with pytest.raises(errors.ConfigError, match="JVLAB_TOKEN or a terminal"):
        _agent._token(arguments)
    monkeypatch.setattr(_agent.sys.stdin, "isatty", lambda: True, raising=False)
    assert _agent._token(arguments) == lab._token
    assert asked == [f"token of the lab at {lab.address}: "]
    monkeypatch.setenv("JVLAB_TOKEN", "from the outside")
    with pytest.raises(errors.ConfigError):
        _agent._token(arguments)
    monkeypatch.setenv("JVLAB_TOKEN", "from-the-outside")
    assert _agent._token(arguments) == "from-the-outside"
    assert "JVLAB_TOKEN" not in os.environ, "no child inherits it"
    assert len(asked) == 1


# Agents, without I/O ------------------------------------------------------------------------------------------------


def test_offered_is_one_more():
    registry = launched()
    start = registry.handle(reg.Offered("p", 9.0))[0]
    assert isinstance(start, reg.StartProcess)
    assert (start.replica, start.spec.place, start.spec.replicas) == ("p/2", "join", 3)
    assert registry.pool("p").spec.place == "local", "the others are the gateway's own"
    registry.handle(reg.ProcessExited("p/2", "boom", ""))
    again = registry.handle(reg.RestartRequested("p", "p/2", 10.0))[0]
    assert isinstance(again, reg.StartProcess)
    assert again.spec.place == "join", "it is started again by whoever offers"
    assert registry.replica("p/2").state is ReplicaState.STARTING
    registry.handle(reg.PoolCloseRequested("p"))
    with pytest.raises(reg.Refused, match="closed"):
        registry.handle(reg.Offered("p", 11.0))


def test_an_agent_may_return_with_its_replica_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_replica_processes, "RECONNECT_SECONDS", 0.2)
    spec = reg.PoolSpec("p", "m", 1, 1, "auto", "cpu", "{}", "{}", place="join")

    async def run() -> None:
        exits: list[str] = []
        process = _replica_processes.JoinedProcess("p/0", spec, 0, tmp_path)
        await process.start(lambda pid: None, lambda cause, tail: exits.append(cause))
        process.assign(
            _replica_processes.JoinedHost(pb.JoinOffer(agent="python 1 on a"))
        )
        process.agent_left()
        process.assign(
            _replica_processes.JoinedHost(
                pb.JoinOffer(agent="python 1 on a", running="p/0")
            )
        )
        await asyncio.sleep(0.4)
        assert exits == [], "it was back in time"
        process.agent_left()
        while not exits:
            await asyncio.sleep(0.05)
        assert exits == ["its host's process (python 1 on a) went away"]
        process.exited("twice")
        assert len(exits) == 1

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_starter_that_cannot_leave_files(
    pool: jv.Pool, lab: jv.Lab, simulated: None, tmp_path: Path
):
    """As a Ray actor starts it: token through standard input, and its end; whatever it wrote goes with it."""
    code = (
        "import sys; import jvlab.wire.processes._supervisor as s; "
        f"s.__file__ = {fake_rollout.__file__!r}; from jvlab.cli._cli import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [
        "rollout",
        "--gateway",
        lab.address,
        "--supervised",
        "--invited",
        "--name",
        f"{pool.name}/0",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, env=environment
    ) as agent:
        assert agent.stdin is not None
        invitation = {"token": lab._token, "certificate": "", "key": ""}
        agent.stdin.write(f"{json.dumps(invitation)}\n".encode())
        agent.stdin.flush()
        until(lambda: rows(pool)["0"]["state"] == "ready")
        assert len(pool.generate(PROMPTS)) == 12
        (folder,) = tmp_path.glob("jvengine-*")
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        pid = rows(pool)["0"]["pid"]
        for below in (
            {agent.pid, *process_tree(agent.pid)} if sys.platform == "linux" else ()
        ):
            assert (
                lab._token.encode() not in Path(f"/proc/{below}/environ").read_bytes()
            ), "a token in an environment"
        agent.stdin.close()
        assert agent.wait(30) == 1, "not by order"
    assert not wait_for_exit({pid}, 30)
    assert list(tmp_path.glob("jv*")) == []


def test_a_host_that_comes_while_a_pool_is_launched_adds_no_replica(tmp_path: Path):
    """The registry knows a replica before its process exists: whoever came in between was taken for one too many."""

    async def run() -> None:
        registry, asked = launched(ready=False), []
        spec = registry.pools["p"].spec = replace(
            registry.pools["p"].spec, place="join"
        )
        processes: dict[str, Any] = {}
        agents = _replica_processes.Agents(
            registry, processes, asked.append, lambda pool, replica: None
        )
        hosts = [
            _replica_processes.JoinedHost(pb.JoinOffer(name="p")) for _ in range(3)
        ]
        for host in hosts[:2]:
            agents._admit(host)
        assert not asked, "two hosts, two replicas that are being made"
        agents._admit(hosts[2])
        assert [type(event) for event in asked] == [reg.Offered]
        for index in range(2):
            processes[f"p/{index}"] = _replica_processes.JoinedProcess(
                f"p/{index}", spec, index, tmp_path
            )
            agents.match()
        assert [p.agent for p in processes.values()] == hosts[:2]

    asyncio.run(run())


def test_a_host_that_is_refused_is_given_nothing_later():
    """It asks for a replica of a pool that is closed: whatever is launched under that name must not wait for it."""
    registry = launched()
    registry.handle(reg.ProcessExited("p/0", "boom", ""))
    registry.handle(reg.PoolCloseRequested("p"))
    restart = lambda pool, name: registry.handle(reg.RestartRequested(pool, name, 3.0))
    agents = _replica_processes.Agents(registry, {}, registry.handle, restart)

    async def reports() -> AsyncIterator[pb.JoinReport]:
        yield pb.JoinReport(offer=pb.JoinOffer(name="p/0"))

    async def run() -> None:
        with pytest.raises(reg.Refused, match="closed"):
            await anext(agents.join(reports()))

    asyncio.run(run())
    assert agents._idle == []


def test_whose_place_a_host_may_return_to(tmp_path: Path):
    spec = reg.PoolSpec("p", "m", 1, 1, "auto", "cpu", "{}", "{}", place="join")
    process = _replica_processes.JoinedProcess("p/0", spec, 0, tmp_path)
    agents = _replica_processes.Agents(
        launched(), {"p/0": process}, lambda event: None, lambda pool, replica: None
    )

    def returns(name: str) -> _replica_processes.JoinedHost:
        offer = pb.JoinOffer(agent=name, running="p/0")
        agent = _replica_processes.JoinedHost(offer)
        agents._admit(agent)
        return agent

    with pytest.raises(reg.Refused, match="counts as exited"):
        returns("python 1 on a")  # the place is open again: it was given up
    first = _replica_processes.JoinedHost(pb.JoinOffer(agent="python 1 on a"))
    process.assign(first)
    with pytest.raises(reg.Refused, match="another agent runs p/0"):
        returns("python 1 on b")
    back = returns("python 1 on a")  # the gateway has not seen its stream break
    assert process.agent is back
    first.orders.get_nowait()  # its start
    assert first.orders.get_nowait() is None, "the old stream ends"
    agents._leave(first)
    assert process.agent is back

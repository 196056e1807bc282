"""`jvlab rollout --gateway HOST:PORT`: offers this host to a running gateway, and runs the replica that it assigns.

    gateway ◀──Join stream: offer, pid, stage and log, exit──▶ agent ──pipe──▶ supervisor ──▶ rollout process (vLLM)

The agent uses no GPU and imports no vLLM. When it ends, for whatever reason, the pipe closes, which ends the replica.
While the replica runs, a broken connection is reopened, so that a short network outage does no harm, nor the death of a
gateway that is started again from its state file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from jvlab._deadline import Deadline
from jvlab._errors import AuthError, ConfigError, GatewayUnreachable
from jvlab._names import check_name, check_replica, own_name
from jvlab.wire import _channels, _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire.processes import _supervisor
from jvlab.wire.processes._identity import read_secret
from jvlab.wire.processes._pool_spec import AWAY_SECONDS
from jvlab.wire.processes._rollout_process import GRACE_SECONDS, RolloutProcess
from jvlab.wire.processes._warm import WarmProcesses, shared_socket

PATIENCE = 300.0  # for a gateway that is not up yet
RETRY_SECONDS = 1.0
NEWS_SECONDS = 1.0
NEWS_LINES = 200


@dataclass(frozen=True)
class Host:
    """The gateway's address, and how this host can be reached."""

    gateway: str
    token: str
    name: str = ""
    bind: str = ""
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str = ""
    patience: float = PATIENCE
    # all visible cores and GPUs are for this replica; else divided by replica number
    alone: bool = True

    def check(self) -> str:
        """The address to listen on; raises if the token would go in clear text, or the gateway could not reach us."""
        far = not _security.is_loopback(_channels.host_of(self.gateway))
        if far and self.tls_ca is None:
            raise ConfigError(
                f"{self.gateway} is not on this machine: the token would cross the network in clear text",
                remedy="give the fingerprint that the gateway printed, --fingerprint sha256:…, or its certificate, "
                "--tls-ca FILE or --tls-dir FOLDER",
            )
        bind = self.bind or "127.0.0.1"
        if far and not self.bind:
            bind = _channels.address_towards(_channels.host_of(self.gateway))
        if far and _security.is_loopback(bind) and self.bind:
            raise ConfigError(
                f"--bind {bind}: the gateway at {self.gateway} could not reach this replica",
                remedy="bind to an address that the gateway sees, or leave --bind out",
            )
        if not _security.is_loopback(bind) and (
            self.tls_cert is None or self.tls_key is None
        ):
            raise ConfigError(
                f"refusing to listen on {bind} without TLS: the token would cross the network in clear text",
                remedy="pass --tls-cert and --tls-key, or --tls-dir FOLDER",
            )
        return bind


class Agent:
    """One offer, at most one replica."""

    def __init__(self, host: Host, folder: Path, ask_warm: bool = False) -> None:
        """`ask_warm`: let `jvlab warm` fork the replica, if it runs on this host."""
        self._host = host
        self._folder = folder
        self._ask_warm = ask_warm
        self._bind = host.check()
        self.process: RolloutProcess | None = None
        self._warm: WarmProcesses | None = None
        self._reports: asyncio.Queue[pb.JoinReport | None] = asyncio.Queue()
        self._ended_by_order = False
        # without a gateway for this long, a running replica is ended
        self._away = AWAY_SECONDS
        self._exited = asyncio.Event()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End the replica and this agent."""
        self._stop.set()

    async def run(self) -> int:
        """Offer, run and report; 0 if the gateway ended it, 1 if it ended otherwise."""
        stopping = asyncio.create_task(self._stop.wait())
        trust = _channels.Trust.of_file(self._host.tls_ca, self._host.tls_name)
        try:
            async with _channels.open_channel(self._host.gateway, trust) as channel:
                last_contact = time.monotonic()
                while True:
                    began = time.monotonic()
                    joining = asyncio.create_task(self._join(channel))
                    # no deadline: the agent's whole life; `stop` ends it
                    await asyncio.wait(
                        {joining, stopping}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if stopping.done():
                        await self._end()
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(joining, 2.0)
                        return 1
                    code = joining.result()  # no deadline: the task is done
                    if code is not None:
                        return code
                    if time.monotonic() - began > RETRY_SECONDS:
                        last_contact = time.monotonic()
                    self._check_patience(last_contact)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            stopping.cancel()
            if self.process is not None:
                await self.process.end(GRACE_SECONDS + 5)
            if self._warm is not None:
                await self._warm.close()

    def _check_patience(self, last_contact: float) -> None:
        patience = self._host.patience if self.process is None else self._away
        if time.monotonic() - last_contact > patience:
            raise GatewayUnreachable(
                f"no gateway at {self._host.gateway} for {patience:g} s",
                remedy="does it run, and is the address right?",
            )

    async def _join(self, channel: Any) -> int | None:
        """One Join stream: the exit code, or None if the connection broke."""
        running = "" if self.process is None else self.process.replica
        offer = pb.JoinOffer(name=self._host.name, agent=own_name(), running=running)
        self._reports = asyncio.Queue()
        self._reports.put_nowait(pb.JoinReport(offer=offer))
        metadata = _security.authorization(self._host.token)
        call = rpc.RegistryStub(channel).Join(
            _drain(self._reports), metadata=metadata, timeout=None
        )
        news = asyncio.create_task(self._report_news())
        try:
            if self._exited.is_set():
                self._reports.put_nowait(None)
            async for order in call:
                await self._execute(order)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise AuthError(
                    f"the gateway at {self._host.gateway} refuses this token"
                ) from None
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                print(
                    f"jvlab: the gateway refuses this host: {error.details()}",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
        finally:
            news.cancel()
            call.cancel()
            # of a call that failed by itself, gRPC would go on to wait for reports
            self._reports.put_nowait(None)
        if self._ended_by_order:
            return 0
        return 1 if self._exited.is_set() else None

    async def _execute(self, order: pb.JoinOrder) -> None:
        match order.WhichOneof("kind"):
            case "start_json" if self.process is None:
                await self._start(json.loads(order.start_json))
            case "end":
                self._ended_by_order = True
                await self._end()

    async def _start(self, order: dict[str, Any]) -> None:
        host = self._host
        path = shared_socket()
        if self._ask_warm and path is not None and path.is_socket():
            self._warm = WarmProcesses(self._folder, joined=True)
        self._away = order.get("away", self._away)
        names = ("gateway", "tls_ca", "tls_cert", "tls_key", "tls_name")
        own = {name: getattr(host, name) for name in names}
        own["bind"] = self._bind
        if host.alone:
            own |= {"index": 0, "replicas": 1}
        process = self.process = RolloutProcess(
            {**order, **own}, self._folder, host.token, self._warm
        )
        print(
            f"jvlab: this host runs {process.replica}; log: {process.log}", flush=True
        )
        try:
            await process.start(
                on_pid=lambda pid: self._reports.put_nowait(pb.JoinReport(pid=pid)),
                on_exit=lambda cause, _: self._report_exit(cause),
            )
        except OSError as error:
            self._report_exit(f"the rollout process could not be started: {error}")

    def _report_exit(self, cause: str) -> None:
        assert self.process is not None
        if not self._ended_by_order:
            print(
                f"jvlab: {self.process.replica} ended: {cause}",
                file=sys.stderr,
                flush=True,
            )
        self._exited.set()
        self._reports.put_nowait(pb.JoinReport(news=self._news()))
        self._reports.put_nowait(pb.JoinReport(exited=cause))
        self._reports.put_nowait(None)

    async def _end(self) -> None:
        if self.process is not None:
            await self.process.end(GRACE_SECONDS + 5)
            # no deadline: `end` killed what did not end
            await self.process.ended.wait()
        else:
            self._reports.put_nowait(None)

    def _news(self) -> pb.JoinNews:
        assert self.process is not None
        return pb.JoinNews(
            stage=self.process.stage(), log_tail=self.process.tail(NEWS_LINES)
        )

    async def _report_news(self) -> None:
        last = None
        while True:
            await asyncio.sleep(NEWS_SECONDS)
            if (
                self.process is not None
                and not self._exited.is_set()
                and (news := self._news()) != last
            ):
                last = news
                self._reports.put_nowait(pb.JoinReport(news=news))


async def _drain(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    # no deadline: reports come when something happens; None ends it
    while (report := await queue.get()) is not None:
        yield report


def _stop_with_parent(agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
    """Stop the agent when standard input closes: the parent process has ended."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: we end anyway
            loop.call_soon_threadsafe(agent.stop)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def run_agent(host: Host, folder: Path, supervised: bool) -> int:
    """Offer this host until it ends: by SIGTERM, Ctrl-C or, with `supervised`, the end of standard input."""

    async def run() -> int:
        # what Ray or SLURM started stays among its processes, with its limits
        own = not supervised and "SLURM_JOB_ID" not in os.environ
        agent = Agent(host, folder, ask_warm=own)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        if supervised:
            _stop_with_parent(agent, loop)
        return await agent.run()

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return asyncio.run(run())


# The command -----------------------------------------------------------------------------------------------------


def host_from(arguments: argparse.Namespace, folder: Path) -> Host:
    """The command's arguments, checked. Certificates of this process go into the folder."""
    _channels.host_of(arguments.gateway)
    if arguments.fingerprint:
        _channels.digest_of(arguments.fingerprint)
    if arguments.name:
        if "/" in arguments.name:
            check_replica(arguments.name)
        else:
            check_name("pool", arguments.name)
    authority = arguments.tls_ca
    certificate = arguments.tls_cert
    key = arguments.tls_key
    if arguments.tls_dir:
        folder = Path(arguments.tls_dir)
        authority = certificate = str(folder / "cert.pem")
        key = str(folder / "key.pem")
        wait_for([certificate, key], arguments.patience)
    host = Host(
        arguments.gateway,
        _token(arguments),
        arguments.name,
        arguments.bind,
        tls_ca=authority,
        tls_cert=certificate,
        tls_key=key,
        tls_name=_channels.OWN_NAME if arguments.tls_dir else "",
        patience=arguments.patience,
        alone=not arguments.share_host,
    )
    if not arguments.fingerprint:
        return host
    if authority:
        raise ConfigError(
            "--fingerprint, and a certificate to trust", remedy="pass one of them"
        )
    return _pinned(host, arguments.fingerprint, folder)


def _token(arguments: argparse.Namespace) -> str:
    """The lab's token: from a file, the environment or the keyboard, but not from the command line."""
    if arguments.token_file:
        wait_for([arguments.token_file], arguments.patience)
        return _channels.read_token(arguments.token_file)
    # children don't inherit it
    given = os.environ.pop(_security.TOKEN_VARIABLE, "")
    if not given and sys.stdin is not None and sys.stdin.isatty():
        given = getpass.getpass(f"token of the lab at {arguments.gateway}: ")
    token = given.strip()
    if not token or any(c.isspace() for c in token):
        raise ConfigError(
            "--gateway needs --token-file, JVLAB_TOKEN or a terminal to ask for it: every lab has a token",
            remedy="lab.write_token(FILE) writes it",
        )
    return token


def _pinned(host: Host, fingerprint: str, folder: Path) -> Host:
    """Trusting the certificate with this fingerprint, with one of this host's own, both as files in the folder."""
    deadline = Deadline(host.patience)
    while True:
        try:
            trust = _channels.fetch_pinned(host.gateway, fingerprint, deadline)
            break
        except GatewayUnreachable:
            if deadline.over:
                raise
            time.sleep(deadline.within(RETRY_SECONDS))
    authority = str(_channels.write_private(folder / "gateway.pem", trust.pem))
    pinned = replace(host, tls_ca=authority, tls_name=trust.name)
    at = _channels.host_of(host.gateway)
    bind = host.bind or (
        "" if _security.is_loopback(at) else _channels.address_towards(at)
    )
    if not bind or host.tls_cert or host.tls_key:
        return pinned
    own = _channels.tls_folder(folder / "tls", bind)
    return replace(pinned, tls_cert=own.certificate, tls_key=own.key)


def wait_for(files: list[str], patience: float) -> None:
    """Wait for the token and certificate of a gateway that is starting."""
    deadline = time.monotonic() + patience
    while missing := [path for path in files if not Path(path).exists()]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{missing[0]} did not appear within {patience:g} s",
                remedy="does the gateway run?",
            )
        time.sleep(0.2)


def _store_invitation(
    invitation: dict[str, str], folder: Path, arguments: argparse.Namespace
) -> None:
    """Write token and certificate to files of this process."""
    arguments.token_file = str(
        _channels.write_private(folder / "token", invitation["token"])
    )
    if invitation["certificate"]:
        _channels.write_private(folder / "key.pem", invitation["key"])
        _channels.write_private(folder / "cert.pem", invitation["certificate"])
        arguments.tls_dir = str(folder)


@contextlib.contextmanager
def own_scratch() -> Iterator[str]:
    """A temporary folder of this process. If this is killed, the next process that starts a replica here removes it."""
    _supervisor.sweep_scratch()
    made, handle = _supervisor.make_locked(tempfile.gettempdir())
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def run_join(arguments: argparse.Namespace) -> dict[str, Any]:
    """The body of `jvlab rollout --gateway`."""
    # from a parent that can't write files here
    invitation = read_secret() if arguments.invited else None
    with own_scratch() as made:
        if invitation is not None:
            _store_invitation(json.loads(invitation), Path(made), arguments)
        folder = Path(arguments.folder or made)
        host = host_from(arguments, Path(made))
        code = run_agent(host, folder, arguments.supervised)
    if code:  # SLURM and Ray check the exit status
        if arguments.json:
            print(json.dumps({"exit": code}), flush=True)
        raise SystemExit(code)
    return {"exit": code}

"""Runs one gateway as a gRPC server until it ends."""

from __future__ import annotations

import asyncio
import fcntl
import glob
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jvlab._deadline import check_timeout
from jvlab._errors import ConfigError
from jvlab._files import Plain, read_json_object
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._servicers import LabServicer, RegistryServicer
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import (
    fingerprint,
    join_line,
    joined,
    tls_folder,
    write_private,
)
from jvlab.wire.processes._identity import Identity
from jvlab.wire.processes._pool_spec import AWAY_SECONDS

# Options of a gateway.


@dataclass(frozen=True)
class GatewayOptions:
    """Options shared by `jv.Lab(...)`, `jvlab gateway` and the gateway's actor on Ray."""

    lease: float = 600.0  # seconds until a lab without holders ends
    beat: float = 1.0  # seconds between two heartbeats of a replica
    missed_beats: int = 10  # after this many a replica counts as lost
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    tls: security.Tls | None = None
    # Prometheus metrics on loopback; 0: a free one, None: none
    metrics_port: int | None = None
    # who starts a pool's processes, unless its launch says otherwise
    place: str = "local"
    # that it and joined replicas wait for each other after its death; only with a state file
    away: float = AWAY_SECONDS

    def check(self) -> GatewayOptions:
        """Itself; raises ConfigError if an option is invalid."""
        for name in ("lease", "beat", "away"):
            check_timeout(getattr(self, name), name)
        count = self.missed_beats
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"missed_beats must be a whole number of at least 1, not {count!r}"
            )
        return self

    def command_line(self) -> list[str]:
        """As arguments of `jvlab gateway`."""
        words = [
            "--lease",
            self.lease,
            "--beat",
            self.beat,
            "--missed-beats",
            self.missed_beats,
        ]
        words += ["--host", self.host, "--port", self.port]
        if self.metrics_port is not None:
            words += ["--metrics-port", self.metrics_port]
        if self.tls is not None:
            words += ["--tls-cert", self.tls.certificate, "--tls-key", self.tls.key]
        return [str(word) for word in words]


# The state file: with it, a gateway that died comes back in a new process.

KIND = "jvlab gateway"
FORMAT = 1
STATE_BYTES = 64 << 20
NEW_FILE = "name another with --state, which is made, or remove this one: its replicas then end, and are launched anew"
T = TypeVar("T")


class StateFile:
    """What outlives a gateway's process, readable by its user alone. One process at a time has it open."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._text = ""
        self._complained = False
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # beside the file, which each write replaces; the lock ends with the process, however that ends
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(f"{self.path}.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # of a write that its death cut off; the name is `write_private`'s
            for cut in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.new"):
                cut.unlink(missing_ok=True)
            self.facts: Plain = self._read()
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"another gateway runs with the state file {self.path}",
                remedy="jv.Lab.attach() joins that one, `jvlab ps` shows it; another lab needs another file",
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self) -> Plain:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {"kind": KIND, "format": FORMAT}
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{self.path} is another user's, or can be read by others, but it holds the lab's token",
                remedy=f"chmod 600 {self.path}, if it is yours",
            )
        facts = read_json_object(
            self.path, STATE_BYTES, "a gateway's state file", remedy=NEW_FILE
        )
        if facts.get("kind") != KIND:
            raise ConfigError(
                f"{self.path} is no gateway's state file", remedy=NEW_FILE
            )
        if facts.get("format") != FORMAT:
            text = f"{self.path} has format {facts.get('format')}, and this jvlab reads {FORMAT}"
            raise ConfigError(
                text, remedy=f"start the jvlab that wrote it; or {NEW_FILE}"
            )
        return facts

    def agree(self, name: str, given: T, default: T | None = None) -> T:
        """A fact of this lab: as given, or as it was before; refuses one that was given and differs."""
        known = self.facts.setdefault(name, given)
        if given not in (default, known):
            shown = "" if name == "token" else f" {given!r}, but {known!r}"
            raise ConfigError(
                f"the {name} of the lab in {self.path} is not{shown or ' the one that was given'}",
                remedy=f"leave it out, or give the same {name}: replicas and clients know the lab by it",
            )
        return known

    def write(self, state: Plain) -> None:
        """Replace the file if anything changed. A disk that fails is reported, and tried again at the next call."""
        text = json.dumps({**self.facts, "state": state})
        if text == self._text:
            return
        try:
            write_private(self.path, text)
        except OSError as error:
            if not self._complained:
                print(f"gateway: {self.path} is out of date: {error}", flush=True)
            self._complained = True
            return
        self._text = text
        self._complained = False

    async def attach(self, gateway: Gateway) -> None:
        """Take up what an earlier process left, and keep what changes from now on."""
        try:
            if "state" in self.facts:
                await gateway.restore(self.facts.pop("state"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"{self.path} cannot be read: {type(error).__name__}: {error}"
            raise ConfigError(text, remedy=NEW_FILE) from error
        gateway.keep = self.write
        gateway.save()

    def close(self, over: bool) -> None:
        """Let go of it; remove it if the lab is over."""
        if over:
            self.path.unlink(missing_ok=True)
        os.close(self._lock)


# ----------------------------------------------------------------------------------------------------


async def serve(
    folder: Path,
    lab: str,
    token: str,
    options: GatewayOptions,
    *,
    signals: bool = True,
    make: Callable[..., Gateway] = Gateway,
    state: StateFile | None = None,
) -> None:
    """Run one gateway until it is closed, its lease is over, or a signal ends it.

    Beyond loopback it speaks TLS: with the given certificate, or with one that it makes for itself at its first start.
    """
    host = options.host
    tls = options.tls
    if tls is None and not security.is_loopback(host):
        tls = tls_folder(folder, host)
    gateway = make(
        lab, folder, token, options.lease, options.beat, options.missed_beats
    )
    gateway.place = options.place
    gateway.away = options.away
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)],
        options=security.options(keepalive=not security.is_loopback(host)),
        maximum_concurrent_rpcs=None,
    )
    rpc.add_LabServicer_to_server(LabServicer(gateway), server)
    rpc.add_RegistryServicer_to_server(RegistryServicer(gateway), server)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    known = {} if state is None else state.facts
    target = joined(host, options.port or known.get("port", 0))
    try:
        bound = (
            server.add_secure_port(target, tls.credentials())
            if tls
            else server.add_insecure_port(target)
        )
    except RuntimeError as error:  # gRPC has no other class for a port that is taken
        raise ConfigError(
            f"cannot listen on {target}: {error}",
            remedy="is the port taken? end what listens there, as replicas and clients of a state file's lab expect it "
            "at its port; any other takes a free one without --port",
        ) from error
    shown = joined(host, bound)
    # With TLS on the public port, processes of this machine use a loopback port of their own.
    near = f"127.0.0.1:{known.get('near', 0)}"
    if tls:
        known["near"] = server.add_insecure_port(near)
        gateway.address = f"127.0.0.1:{known['near']}"
    else:
        gateway.address = shown
    known["port"] = bound
    gateway.public_address = shown
    if tls is not None:
        gateway.fingerprint = fingerprint(Path(tls.certificate).read_text())
        if not security.is_loopback(host):
            gateway.public = (host, tls)
    if state is not None:
        await state.attach(gateway)
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    loop = asyncio.get_running_loop()
    # main thread only
    for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
        loop.add_signal_handler(
            number,
            lambda n=number: gateway.handle(reg.LabCloseRequested(f"signal {n}")),
        )
    metrics = None
    if options.metrics_port is not None:
        from jvlab.gateway._http_server import serve_metrics

        metrics = await serve_metrics(gateway.lab_status, token, options.metrics_port)
    facts = {
        "lab": lab,
        "address": gateway.address,
        "public_address": shown,
        "token": token,
        "tls": bool(tls),
    }
    if metrics is not None:
        gateway.metrics_url = facts["metrics_url"] = f"{metrics.url}/metrics"
    # readable by the owner only: it has the token
    write_private(folder / "lab.json", json.dumps(facts | asdict(Identity.own())))
    print(f"gateway: {lab} listens on {shown}", flush=True)
    if gateway.fingerprint:
        line = join_line(shown, gateway.fingerprint)
        print(f"gateway: another host joins with\n{line}", flush=True)
    ticking = asyncio.create_task(gateway.tick_forever())
    ending = asyncio.create_task(gateway.ended.wait())
    try:
        # no deadline: the gateway's whole life; a lease ends it
        done, _ = await asyncio.wait(
            {ending, ticking}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            # no deadline: the task is done
            # if ticking failed, end: the lab would have no lease and no heartbeats
            task.result()
    finally:
        ending.cancel()
        (folder / "lab.json").unlink(missing_ok=True)
        if metrics is not None:
            await metrics.close()
        over = gateway.registry.ending
        await gateway.shut_down()
        if state is not None:
            state.close(over)
        await server.stop(1.0)
        ticking.cancel()

"""Runs one gateway as a gRPC server until it ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jvlab._errors import ConfigError
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._http_server import serve_metrics
from jvlab.gateway._servicers import LabServicer, RegistryServicer
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import (
    fingerprint,
    join_line,
    tls_folder,
    write_private,
)
from jvlab.wire.processes._identity import Identity

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
    max_message: int = security.MAX_MESSAGE

    def check(self) -> GatewayOptions:
        """Itself; raises ConfigError if an option is invalid."""
        for name in ("lease", "beat", "missed_beats"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)):
                raise ConfigError(
                    f"{name}={given!r} is not a number",
                    remedy=f"pass {name}=... in seconds, or a count",
                )
        if not self.lease > 0:
            raise ConfigError(
                f"lease must be positive, not {self.lease}",
                remedy="lab.detach() keeps a lab until it is closed",
            )
        if not self.beat > 0 or self.missed_beats < 1:
            raise ConfigError(
                f"beat={self.beat:g} and missed_beats={self.missed_beats} must be positive"
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


# ----------------------------------------------------------------------------------------------------


async def serve(
    folder: Path,
    lab: str,
    token: str,
    options: GatewayOptions,
    *,
    signals: bool = True,
    make: Callable[..., Gateway] = Gateway,
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
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)],
        options=security.options(
            options.max_message, keepalive=not security.is_loopback(host)
        ),
        maximum_concurrent_rpcs=None,
    )
    rpc.add_LabServicer_to_server(LabServicer(gateway), server)
    rpc.add_RegistryServicer_to_server(RegistryServicer(gateway), server)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    shown_host = f"[{host}]" if ":" in host else host
    target = f"{shown_host}:{options.port}"
    credentials = tls.credentials() if tls else None
    try:
        bound = (
            server.add_secure_port(target, credentials)
            if credentials
            else server.add_insecure_port(target)
        )
    except RuntimeError as error:  # gRPC has no other class for a port that is taken
        raise ConfigError(
            f"cannot listen on {target}: {error}",
            remedy="is the port taken? leave --port out to take a free one",
        ) from error
    shown = f"{shown_host}:{bound}"
    # With TLS on the public port, processes of this machine use a loopback port of their own.
    gateway.address = (
        f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" if tls else shown
    )
    gateway.public_address = shown
    if tls is not None:
        gateway.fingerprint = fingerprint(Path(tls.certificate).read_text())
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
    write_lab_file(folder, facts | asdict(Identity.own()))
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
        await gateway.shut_down()
        await server.stop(1.0)
        ticking.cancel()


def write_lab_file(folder: Path, content: dict[str, Any]) -> None:
    """Write address and token, readable by the owner only."""
    write_private(folder / "lab.json", json.dumps(content))

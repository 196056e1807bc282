"""Runs one gateway as a gRPC server until it ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import Gateway
from jvlab.gateway._metrics_http import serve_metrics
from jvlab.gateway._options import GatewayOptions
from jvlab.gateway._servicers import LabServicer, RegistryServicer
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import write_private
from jvlab.wire.processes._identity import Identity


async def serve(
    folder: Path,
    lab: str,
    token: str,
    options: GatewayOptions,
    *,
    signals: bool = True,
    make: Callable[..., Gateway] = Gateway,
) -> None:
    """Run one gateway until it is closed, its lease is over, or a signal ends it."""
    security.check_bind(options.host, options.tls)
    host, tls = options.host, options.tls
    gateway = make(lab, folder, token, options.lease, options.beat, options.missed_beats)
    gateway.place = options.place
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)],
        options=security.options(options.max_message, keepalive=not security.is_loopback(host)),
        maximum_concurrent_rpcs=None,
    )
    rpc.add_LabServicer_to_server(LabServicer(gateway), server)
    rpc.add_RegistryServicer_to_server(RegistryServicer(gateway), server)
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    shown_host = f"[{host}]" if ":" in host else host
    target = f"{shown_host}:{options.port}"
    bound = server.add_secure_port(target, tls.credentials()) if tls else server.add_insecure_port(target)
    shown = f"{shown_host}:{bound}"
    # With TLS on the public port, processes of this machine use a loopback port of their own.
    gateway.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" if tls else shown
    gateway.public_address = shown
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT) if signals else ():  # main thread only
        loop.add_signal_handler(number, lambda n=number: gateway.handle(reg.LabCloseRequested(f"signal {n}")))
    metrics = None
    if options.metrics_port is not None:
        metrics = await serve_metrics(gateway.lab_status, token, options.metrics_port)
    facts = {"lab": lab, "address": gateway.address, "public_address": shown, "token": token, "tls": bool(tls)}
    if metrics is not None:
        gateway.metrics_url = facts["metrics_url"] = f"{metrics.url}/metrics"
    write_lab_file(folder, facts | asdict(Identity.own()))
    print(f"gateway: {lab} listens on {shown}", flush=True)
    ticking = asyncio.create_task(gateway.tick_forever())
    ending = asyncio.create_task(gateway.ended.wait())
    try:
        # no deadline: the gateway's whole life; a lease ends it
        done, _ = await asyncio.wait({ending, ticking}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # no deadline: the task is done
            task.result()  # if ticking failed, end: the lab would have no lease and no heartbeats
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

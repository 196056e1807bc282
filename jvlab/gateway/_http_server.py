"""The gateway's HTTP servers: on loopback, a pool's also over TLS where other hosts reach it.

Every request has the lab's token; errors are JSON with a remedy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jvlab._errors import (
    ConfigError,
    EngineDirty,
    JvlabError,
    LayoutError,
    MissingDependency,
    ReplicaLost,
    Unsupported,
)
from jvlab.gateway import _registry as reg
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._pool_summary import pool_summary
from jvlab.wire._rpc_errors import CallFailed, status_of
from jvlab.wire._security import MAX_MESSAGE, Tls, is_bearer, pool_key

# Prometheus metrics of pools, from their summaries.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POOL = {  # name: (value from a pool's summary, help)
    "jvlab_pool_healthy_replicas": (
        lambda pool: pool["healthy"],
        "Replicas that are ready, and not dirty or stale.",
    ),
    "jvlab_pool_replicas": (lambda pool: len(pool["replicas"]), "Replicas requested."),
}
REPLICA = {  # field of a replica in the summary: (name, help); one that ends with _total is a counter
    "in_flight": (
        "jvlab_replica_in_flight",
        "Requests routed to the replica and not yet answered.",
    ),
    "running": (
        "jvlab_replica_running",
        "Requests the engine is generating for.",
    ),
    "waiting": ("jvlab_replica_waiting", "Requests waiting in the engine."),
    "kv_use": (
        "jvlab_replica_kv_cache_use_ratio",
        "Share of the KV cache in use, 0 to 1.",
    ),
    "prefix_hit_rate": (
        "jvlab_replica_prefix_cache_hit_ratio",
        "Share of prompt tokens found cached.",
    ),
    "tokens_per_s": (
        "jvlab_replica_tokens_per_second",
        "Tokens generated per second, recently.",
    ),
    "generated_tokens": (
        "jvlab_replica_generated_tokens_total",
        "Tokens generated since engine start.",
    ),
    "version": (
        "jvlab_replica_weight_version",
        "Version of the weights the engine holds.",
    ),
    "restarts": (
        "jvlab_replica_restarts_total",
        "How often the replica was started again since its pool was launched.",
    ),
    "paused": ("jvlab_replica_paused", "1 while generation is paused."),
    "sleeping": ("jvlab_replica_sleeping", "1 while the engine sleeps."),
    "beat_age": (
        "jvlab_replica_heartbeat_age_seconds",
        "Seconds since the replica's last heartbeat.",
    ),
}


class PoolMetrics:
    """A prometheus_client collector over the `pool_summary` of each pool."""

    def __init__(self, pools: Iterable[Mapping[str, Any]]) -> None:
        self._pools = list(pools)

    def collect(self) -> Iterator[Metric]:
        for name, (value, text) in POOL.items():
            family = GaugeMetricFamily(name, text, labels=["pool"])
            for pool in self._pools:
                family.add_metric([pool["pool"]], value(pool))
            yield family
        replicas = [
            ([p["pool"], str(r["replica"])], r)
            for p in self._pools
            for r in p["replicas"]
        ]
        labels = ["pool", "replica", "state"]
        ready = GaugeMetricFamily(
            "jvlab_replica_ready",
            "1 if the replica may be given work; its state is a label.",
            labels=labels,
        )
        for values, replica in replicas:
            ready.add_metric([*values, replica["state"]], float(replica["ready"]))
        yield ready
        for field, (name, text) in REPLICA.items():
            total = name.endswith("_total")
            kind = CounterMetricFamily if total else GaugeMetricFamily
            family = kind(name, text, labels=labels[:2])
            for values, replica in replicas:
                if replica.get(field) is not None:
                    family.add_metric(values, float(replica[field]))
            yield family


def prometheus_text(pools: Iterable[Mapping[str, Any]]) -> bytes:
    """The response to a scrape."""
    registry = CollectorRegistry()
    registry.register(PoolMetrics(pools))
    return generate_latest(registry)


# ----------------------------------------------------------------------------------------------------

HOST = "127.0.0.1"
KEY_USER = "jvlab"  # the user in a URL with a key
END_SECONDS = 1.0  # for open requests when the server ends
BODY_SECONDS = 60.0  # for a request's body
FROM_GRPC = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """An error response: its status, what is wrong, and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        remedy: str,
        kind: str = "refused",
        **headers: str,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.remedy = remedy
        self.kind = kind
        self.headers = {
            name.replace("_", "-"): value for name, value in headers.items()
        }


def error_body(
    status: int, message: str, remedy: str = "", kind: str = "refused", **more: Any
) -> dict[str, Any]:
    """An error as OpenAI's clients read it, with our remedy."""
    text = f"{message}\n  → {remedy}" if remedy else message
    return {
        "error": {
            "message": text,
            "type": kind,
            "param": None,
            "code": status,
            "remedy": remedy,
            **more,
        }
    }


def refusal_of(error: Exception) -> Refusal:
    """The HTTP response for an error of the control plane; re-raises one that is not ours."""
    match error:
        case Refusal():
            return error
        case reg.Refused():
            return Refusal(409, error.message, error.remedy or "GET /bridge/status")
        case CallFailed() | EngineDirty() | ReplicaLost():
            code = status_of(error)
            remedy = error.remedy or "GET /bridge/status"
            return Refusal(
                FROM_GRPC.get(code, 500), error.message, remedy, code.name.lower()
            )
        case MissingDependency() | Unsupported():
            return Refusal(501, error.message, error.remedy, type(error).__name__)
        case ConfigError():
            return Refusal(400, error.message, error.remedy, type(error).__name__)
        case LayoutError():
            return Refusal(422, error.message, error.remedy, type(error).__name__)
        case JvlabError():
            return Refusal(500, error.message, error.remedy, type(error).__name__)
        case _:
            raise error


def basic(url: str, token: str) -> str:
    """What a client sends for a URL with the pool's key in it: `http://jvlab:KEY@127.0.0.1:...`."""
    return base64.b64encode(f"{KEY_USER}:{pool_key(token, url)}".encode()).decode()


class Doors:
    """Who may ask for what: the lab's token opens every path, a pool's key those that are `keyed`."""

    def __init__(
        self, token: str, unguarded: Iterable[str], keyed: Iterable[str]
    ) -> None:
        self._token = token
        self._unguarded = frozenset(unguarded)
        self._keyed = frozenset(keyed)
        self._basic = b""  # empty: no key fits

    def listen_at(self, url: str) -> None:
        """The address is known: a key is for one."""
        if self._keyed:
            self._basic = basic(url, self._token).encode()

    def open(self, path: str, authorization: str, near: bool = True) -> bool:
        """`near`: it came over loopback, the only way on which keys are taken."""
        scheme, _, sent = authorization.partition(" ")
        match scheme.lower():
            case _ if path in self._unguarded:
                return True
            case "bearer":
                return is_bearer(sent.strip(), self._token.encode())
            case "basic" if near and self._basic and path in self._keyed:
                return is_bearer(sent.strip(), self._basic)
            case _:
                return False


def _guard(doors: Doors) -> Any:
    """Middleware: the token, and errors as JSON."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        if not doors.open(request.path, sent, near=not request.secure):
            body = error_body(
                401,
                "the lab's token is missing or wrong",
                "Authorization: Bearer <token>",
                "unauthorized",
            )
            return web.json_response(body, status=401)
        try:
            return await handler(request)
        # aiohttp's own: no such route, another method, too large a body
        except web.HTTPException as error:
            body = error_body(
                error.status,
                f"{request.method} {request.path}: {error.reason}",
                "",
                "http",
            )
            allowed = (
                {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            )
            return web.json_response(body, status=error.status, headers=allowed)
        except (Refusal, JvlabError) as error:
            refusal = refusal_of(error)
            body = error_body(
                refusal.status, refusal.message, refusal.remedy, refusal.kind
            )
            return web.json_response(
                body, status=refusal.status, headers=refusal.headers
            )

    return guard


async def read_body(request: web.Request) -> bytes:
    """The whole body, decompressed; refused if it does not match its Content-Encoding."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        text = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise Refusal(
            408,
            text,
            "send it again; a Content-Length larger than the body is waited for",
        ) from None
    except RequestPayloadError as error:
        encoding = request.headers.get("Content-Encoding", "none")
        text = f"the body can't be unpacked ({encoding[:30]!a}): {type(error).__name__}"
        raise Refusal(
            400, text, "send it uncompressed, without Content-Encoding"
        ) from None


class Listener:
    """A listening server; `close()` frees its port and ends its requests."""

    def __init__(
        self,
        runner: web.AppRunner,
        port: int,
        public_port: int = 0,
    ) -> None:
        self._runner = runner
        self.port = port
        self.public_port = public_port  # 0: it listens on loopback only
        self.url = f"http://{HOST}:{port}"

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await self._runner.cleanup()


async def listen(
    routes: Iterable[tuple[str, str, Handler]],
    token: str,
    port: int,
    unguarded: Iterable[str] = (),
    keyed: Iterable[str] = (),
    public: tuple[str, Tls] | None = None,
) -> Listener:
    """Serve (method, path, handler) on a loopback port, 0 for a free one.

    `public`: also over TLS at this address, on the same port; on another, if the address is the wildcard.
    """
    doors = Doors(token, unguarded, keyed)
    app = web.Application(middlewares=[_guard(doors)], client_max_size=MAX_MESSAGE)
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    # A client that leaves cancels its request, and with it the request in the engine.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=END_SECONDS
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        port = runner.addresses[0][1]
        public_port = 0
        if public is not None:
            host, tls = public
            wildcard = host in ("0.0.0.0", "::")
            site = web.TCPSite(
                runner, host, 0 if wildcard else port, ssl_context=tls.context()
            )
            await site.start()
            public_port = runner.addresses[1][1]
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot serve HTTP on port {port}: {error}",
            remedy="is the port taken? http=True takes a free one",
        ) from error
    listener = Listener(runner, port, public_port)
    doors.listen_at(listener.url)
    return listener


# `/metrics` of a gateway for Prometheus: one read-only page over HTTP on loopback, with the lab's token.


def metrics_page(status: Callable[[], list[pb.PoolStatus]]) -> Handler:
    """The page of these pools."""

    async def page(_: web.Request) -> web.Response:
        text = prometheus_text(pool_summary(pool) for pool in status())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    return page


async def serve_metrics(
    status: Callable[[], pb.LabStatus], token: str, port: int
) -> Listener:
    """Listen on 127.0.0.1; a scrape sends `Authorization: Bearer <token>`, as every other call does."""
    return await listen(
        [("GET", "/metrics", metrics_page(lambda: list(status().pools)))], token, port
    )

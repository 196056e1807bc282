"""A pool's HTTP front: OpenAI's routes, each request routed to one replica by the same rules as gRPC requests.

paused, asleep, or waiting for a sync         held here for at most HOLD_SECONDS; then 503
replica lost before the answer's first byte   retried once on another; then 502
replica lost later                            the stream ends with an error event and without [DONE]
no replica may serve                          503 and why
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from jvlab.gateway import _registry as reg
from jvlab.gateway._dispatch import DIRTY_RETRIES, DIRTY_RETRY_SECONDS, being_cancelled
from jvlab.gateway._http_bridge import Bridge
from jvlab.gateway._http_server import (
    Handler,
    Listener,
    Refusal,
    error_body,
    listen,
    metrics_page,
    read_body,
)
from jvlab.gateway._pool_commands import PoolReplicas
from jvlab.gateway._routing import POLICIES, RouteRequest, prefix_key
from jvlab.wire._limits import Limits, of_http, read_json, read_object

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway

HOLD_SECONDS = 120.0  # the longest that a request is held while its pool is paused
CONNECT_SECONDS = 5.0
MAX_SECONDS = 86_400.0
TRIES = 2
# these count as samples in flight
SAMPLING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
ROUTED = (
    *(("POST", path) for path in SAMPLING),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
EPOCH = "x-jvlab-epoch"
REFUSED = "x-jvlab-refused"
MIN_VERSION = "x-jvlab-min-version"
FORWARDED = ("content-type", "accept", "x-request-id", "traceparent", "tracestate")
NOT_RETURNED = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "te",
        "trailer",
        "upgrade",
        "date",
        "server",
        "proxy-authenticate",
        "proxy-authorization",
    }
)
EVENT_END = b"\n\n"
_VERSION = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class HttpWork:
    """One request as the router sees it."""

    body: bytes
    parts: int  # samples it asks for; 0 for read-only routes
    key: int  # hash of the prompt's prefix
    version: int  # the minimum that its replica must hold; 0: the pool's


class _Lost(Exception):
    """The replica is gone, or refused the request's epoch."""


class _BecameDirty(Exception):
    """A sync made the replica dirty while the request was in flight to it."""


class _ClientGone(Exception):
    """The client has disconnected."""


class Front:
    """One pool's listener: `/v1/...` routed, `/bridge/...`, `/metrics` and `/health` answered here."""

    _listener: Listener  # once it is open
    _session: aiohttp.ClientSession

    def __init__(self, gateway: Gateway, pool: str, keyed: bool) -> None:
        self._gateway = gateway
        self._pool = pool
        self._bridge = Bridge(gateway, pool)
        self.keyed = keyed  # whether it takes a key in the URL

    @property
    def url(self) -> str:
        return f"{self._listener.url}/v1"

    @property
    def public_port(self) -> int:
        return self._listener.public_port

    async def open(self, port: int) -> None:
        gateway = self._gateway
        status = lambda: [gateway.pool_status(self._pool)]
        routes: list[tuple[str, str, Handler]] = [
            *((method, path, self._forward) for method, path in ROUTED),
            ("GET", "/health", self._health),
            ("GET", "/metrics", metrics_page(status)),
            *self._bridge.routes(),
        ]
        self._listener = await listen(
            routes,
            gateway.token,
            port,
            ("/health",),
            # not the bridge: such a URL may end up in a trainer's logs
            [path for _, path in ROUTED] if self.keyed else (),
            gateway.public,
        )
        timeout = aiohttp.ClientTimeout(total=MAX_SECONDS, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=timeout,
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._listener.close()
        await self._bridge.close()
        await self._session.close()

    async def _health(self, _: web.Request) -> web.StreamResponse:
        """200 while a replica serves."""
        serving = [replica.name for replica in self._gateway.links.serving(self._pool)]
        return web.json_response(
            {"pool": self._pool, "serving": serving}, status=200 if serving else 503
        )

    # Routing --------------------------------------------------------------------------------------------------------

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Send a request to a replica; retry elsewhere if that one is lost before it answers."""
        work = await read_work(
            request,
            self._gateway.limits(self._pool),
            self._gateway.facts_of(self._pool).max_model_len,
        )
        replicas = PoolReplicas(self._gateway, self._pool, work.version)
        avoid: set[tuple[str, int]] = set()  # where it was lost: replica and run
        reason = ""
        dirty_retries = 0
        until = time.monotonic() + HOLD_SECONDS
        while True:
            name = await self._choose(work, replicas, avoid, until, reason)
            run = replicas.run(name)
            attempt = _Attempt(self._gateway, self._session, request, work, name)
            try:
                return await attempt.run()
            except _BecameDirty as error:
                dirty_retries += 1
                if dirty_retries > DIRTY_RETRIES:
                    raise Refusal(
                        503,
                        str(error),
                        "sync again: POST /bridge/notify_update, or link.sync",
                        "dirty",
                    ) from None
                await asyncio.sleep(DIRTY_RETRY_SECONDS)
            except _Lost as error:
                reason = f"replica {name} was lost: {error}"
                if attempt.answer is not None:
                    return await attempt.end_with_error(reason)
                avoid.add((name, run))
                if len(avoid) >= TRIES:
                    raise Refusal(
                        502,
                        f"lost twice; {reason}",
                        "ask again; GET /bridge/status",
                        "replica_lost",
                    ) from None

    async def _choose(
        self,
        work: HttpWork,
        replicas: PoolReplicas,
        lost: set[tuple[str, int]],
        until: float,
        reason: str,
    ) -> str:
        """The replica for it; waits while the pool is paused, or a sync or a restart may make a replica serve."""
        gateway = self._gateway
        pool = self._pool
        while True:
            change = gateway.change(pool)
            state = gateway.registry.pool(pool)
            if state.closed:
                raise Refusal(
                    503, f"pool {pool!r} is closed", "launch a new one", "closed"
                )
            waiting = gateway.steering.why(pool)
            if not waiting:
                policy = POLICIES[state.spec.routing]
                board = replicas.board()
                avoid = frozenset(n for n, run in lost if replicas.run(n) == run)
                name = policy(board, RouteRequest(max(1, work.parts), work.key, avoid))
                if name is not None:
                    return name
                # no deadline: it returns an event and does not wait
                if replicas.wait_for(avoid) is None:
                    raise self._no_replica(replicas, len(board), reason)
                back = gateway.registry.returning(pool)
                waiting = "waiting for " + (
                    f"{back[0].name} to be started again"
                    if back
                    else "a sync to commit"
                )
            left = until - time.monotonic()
            if left <= 0:
                raise Refusal(
                    503,
                    f"pool {pool!r} is {waiting}, and was so for {HOLD_SECONDS:g} s",
                    "POST /bridge/resume if it is paused, or ask again later",
                    "paused",
                    Retry_After="5",
                )
            try:
                await asyncio.wait_for(change.wait(), left)
            except TimeoutError:
                continue

    def _no_replica(self, replicas: Any, board: int, reason: str) -> Refusal:
        """Why no replica can be given it."""
        if reason:
            return Refusal(
                502,
                f"{reason}; no other replica is ready",
                "ask again; GET /bridge/status",
                "replica_lost",
            )
        if not board and (why := replicas.barred()):
            return Refusal(503, why.message, why.remedy, why.fields["state"])
        return Refusal(
            503,
            f"no replica of pool {self._pool!r} is ready",
            "GET /bridge/status says why",
            "not_ready",
        )


@contextlib.contextmanager
def _to_client() -> Iterator[None]:
    """Inside, the client's connection may break, not the replica's."""
    try:
        yield
    except ConnectionError as error:
        raise _ClientGone from error


class _Attempt:
    """One request to one replica: counted as in flight there, and cancelled if the replica is lost."""

    def __init__(
        self,
        gateway: Gateway,
        session: aiohttp.ClientSession,
        request: web.Request,
        work: HttpWork,
        replica: str,
    ) -> None:
        self._gateway = gateway
        self._session = session
        self._request = request
        self._work = work
        self._replica = replica
        self.answer: web.StreamResponse | None = None  # once its first byte is sent

    async def run(self) -> web.StreamResponse:
        gateway = self._gateway
        name = self._replica
        parts = self._work.parts
        gateway.count(name, parts)
        exchange = asyncio.create_task(self._exchange())
        gateway.calls.track(name, exchange)
        served = False
        try:
            answer = await exchange
            served = answer.status < 400
            return answer
        except asyncio.CancelledError:
            if being_cancelled():
                raise  # our own client left
            raise self._loss("it was fenced") from None
        except _ClientGone:
            assert self.answer is not None
            return self.answer
        finally:
            gateway.calls.untrack(name, exchange)
            if served:
                gateway.served(name, parts)
            else:
                gateway.count(name, -parts)

    async def _exchange(self) -> web.StreamResponse:
        gateway = self._gateway
        request = self._request
        replica = gateway.registry.find(self._replica)
        facts = gateway.facts.get(self._replica)
        if replica is None or facts is None or not facts.http_url:
            raise _Lost("it serves no HTTP")
        headers = {
            name: request.headers[name] for name in FORWARDED if name in request.headers
        }
        headers |= {
            "Authorization": f"Bearer {gateway.token}",
            EPOCH: str(replica.epoch),
        }
        url = facts.http_url.removesuffix("/v1") + request.raw_path
        try:
            async with self._session.request(
                request.method,
                url,
                data=self._work.body or None,
                headers=headers,
                allow_redirects=False,
            ) as reply:
                if refused := reply.headers.get(REFUSED):
                    # no deadline: the session has one, and a lost replica's exchange is cancelled
                    text = (await reply.read()).decode(errors="replace")
                    raise (_BecameDirty if refused == "dirty" else _Lost)(
                        _message_of(text)
                    )
                if reply.content_type == "text/event-stream":
                    return await self._stream(reply)
                # no deadline: the session has one, and a lost replica's exchange is cancelled
                return self._whole(reply, await reply.read())
        # nothing listens there: declare it lost
        except aiohttp.ClientConnectorError as error:
            why = f"its port is closed: {error}"
            gateway.handle(reg.Unreachable(self._replica, replica.epoch, why))
            raise self._loss(str(error)) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise self._loss(f"{type(error).__name__}: {error}") from error

    def _loss(self, otherwise: str) -> _Lost:
        return _Lost(self._gateway.registry.cause(self._replica) or otherwise)

    def _whole(self, reply: aiohttp.ClientResponse, body: bytes) -> web.StreamResponse:
        return web.Response(
            status=reply.status, headers=_returned_headers(reply), body=body
        )

    async def _stream(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass on events as they arrive, only complete ones."""
        answer = web.StreamResponse(
            status=reply.status, headers=_returned_headers(reply)
        )
        rest = b""
        async for chunk in reply.content.iter_any():
            whole, found, rest = (rest + chunk).rpartition(EVENT_END)
            if found:
                with _to_client():
                    await self._begin(answer)
                    await answer.write(whole + found)
        with _to_client():
            await self._begin(answer)
            if rest:
                await answer.write(rest)
            await answer.write_eof()
        return answer

    async def _begin(self, answer: web.StreamResponse) -> None:
        if self.answer is None:
            self.answer = answer
            await answer.prepare(self._request)

    async def end_with_error(self, reason: str) -> web.StreamResponse:
        """The status is already sent: send the error as an event, and end without [DONE]."""
        assert self.answer is not None
        body = error_body(
            502, f"{reason}; the answer is not complete", "ask again", "replica_lost"
        )
        with contextlib.suppress(ConnectionError):  # the client left too
            await self.answer.write(b"data: " + json.dumps(body).encode() + EVENT_END)
            await self.answer.write_eof()
        return self.answer


async def read_work(
    request: web.Request, limits: Limits, max_model_len: int
) -> HttpWork:
    """The request's body and what routing needs; refused if it exceeds the limits of one call."""
    version = request.headers.get(MIN_VERSION, "0")
    if _VERSION.fullmatch(version) is None:
        raise Refusal(
            400,
            f"{MIN_VERSION} must be a version, not {version[:30]!a}",
            "a whole number, counted from 1",
        )
    for name in FORWARDED:
        # bytes that are not text arrive as surrogates
        if not request.headers.get(name, "").isprintable():
            raise Refusal(
                400,
                f"the header {name} holds bytes that are not text",
                "send it in ASCII",
            )
    body = await read_body(request)
    if request.path not in SAMPLING:
        if body:
            read_json(body)
        return HttpWork(body, 0, 0, int(version))
    content = read_object(body)
    asked = of_http(content, max_model_len)
    limits.check(asked)
    return HttpWork(body, asked.samples, prefix_key(_first(content)), int(version))


def _first(content: dict[str, Any]) -> str | list[int]:
    """The first prompt; a malformed one is left for the replica to refuse."""
    if "messages" in content:
        return json.dumps(content["messages"])
    prompt = content.get("prompt", content.get("token_ids"))
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(p, (str, list)) for p in prompt)
    ):
        first = prompt[0]
        return first if isinstance(first, str) else _ids(first)
    return _ids(prompt) if isinstance(prompt, list) else str(prompt)


def _ids(tokens: list[Any]) -> list[int]:
    return [
        token
        for token in tokens
        if isinstance(token, int) and -(2**31) <= token < 2**31
    ]


def _returned_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {
        name: value
        for name, value in reply.headers.items()
        if name.lower() not in NOT_RETURNED
    }


def _message_of(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"]).removesuffix(f"\n  → {error.get('remedy')}")
    except (ValueError, KeyError, TypeError):
        return text[:500]

"""vLLM's own OpenAI-compatible app on a replica's engine, behind the token; answers name their weight version.

    client ──▶ uvicorn ──▶ ReplicaGate (ours) ──▶ vLLM's app ──▶ Labelled engine ──▶ AsyncLLM

All of vLLM's routes are served. Checked against vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from jvlab._errors import ConfigError, SyncError
from jvlab.engine import _vllm, _vllm_versions
from jvlab.engine._engine import Engine
from jvlab.engine._engine_sync import LinkedAdapter
from jvlab.wire._limits import of_http, read_json
from jvlab.wire._security import MAX_MESSAGE

HOST = "127.0.0.1"
END_SECONDS = 1  # for open requests when the process ends
DROP_SECONDS = 2.0  # for vLLM to abort a dropped request
OPEN_PATHS = ("/health", "/ping")  # without the token
TOKENS = "/inference/v1/generate"
_TOKEN_ID = re.compile(rb'\{"token_id":(\d+),')
# Response headers for clients:
VERSION = "x-jvlab-version"
VERSIONS = "x-jvlab-versions"
REPLICA = "x-jvlab-replica"
# Between gateway and replica: the epoch of a request, and why it was refused ("dirty", "fenced", "dead").
EPOCH = "x-jvlab-epoch"
REFUSED = "x-jvlab-refused"

_seen: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar(
    "jvlab_http_versions", default=None
)


class Labelled:
    """The engine, recording which weight versions generated the tokens of each HTTP request.

    Requests that name no adapter use that of a link (`linked`), as those of `pool.generate` do.
    """

    def __init__(self, llm: Any, linked: LinkedAdapter | None = None) -> None:
        self._llm = llm
        self._linked = linked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        seen = _seen.get()  # no deadline: a context variable
        if (
            self._linked is not None
            and self._linked.request is not None
            and options.get("lora_request") is None
        ):
            options["lora_request"] = self._linked.request
        outputs = self._llm.generate(*arguments, **options)
        try:
            async for output in outputs:
                if seen is not None:
                    for result in output.outputs:
                        note_versions(seen, result.weight_versions or ())
                yield output
        finally:
            await outputs.aclose()


def note_versions(seen: list[int], spans: Any) -> None:
    """Add the spans' versions, each once, in the order they appear."""
    for span in spans:
        version = int(span.version)
        if span.end > span.start and version not in seen:
            seen.append(version)


@dataclass
class ReplicaGate:
    """In front of vLLM's app: checks the token and whether this replica may answer, and adds the version headers."""

    _app: Any
    _verify: Callable[[Any], bool]
    _engine: Engine
    _epoch: Callable[[], int]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            # a websocket, whose weight versions would not be reported
            if scope["type"] != "lifespan":
                raise RuntimeError(f"{scope['type']} is not served")
            await self._app(scope, receive, send)
            return
        from starlette.datastructures import Headers

        headers = Headers(scope=scope)
        path = scope["path"]
        # vLLM's middleware guards /v1 and a few more, but not /invocations, /tokenize or /scale_elastic_ep.
        if path not in OPEN_PATHS and not self._verify(headers):
            text = "the lab's token is missing or wrong"
            remedy = "send Authorization: Bearer <token>"
            await _refuse(send, 401, "unauthorized", text, remedy)
            return
        if scope["method"] == "POST":
            await self._answer(scope, receive, send, headers)
        else:
            await self._app(scope, receive, self._labelling(send, _Progress()))

    async def _answer(self, scope: Any, receive: Any, send: Any, headers: Any) -> None:
        """One request that may reach the engine."""
        if problem := await self._problem(headers.get(EPOCH)):
            await _refuse(send, 503, *problem)
            return
        try:
            body = await _read_body(receive)
            if body is None:
                return  # the client disconnected
            if not headers.get("content-type", "").startswith("multipart/"):
                self._check(body)
        except ConfigError as error:
            kind = type(error).__name__
            await _refuse(send, 400, kind, error.message, error.remedy)
            return
        progress = _Progress()
        _seen.set(progress.seen)  # this task's own context, which vLLM's tasks inherit
        # Among the engine's tasks in flight, so that a fenced replica drops it with the others.
        # no deadline: it ends when it is cancelled, below or by the engine
        dropped = self._engine.spawn(asyncio.Event().wait())
        if scope["path"] == TOKENS:
            send = naming_tokens(send)
        work = asyncio.ensure_future(
            self._app(
                scope,
                _until(dropped, body, receive),
                self._labelling(send, progress),
            )
        )
        try:
            # no deadline: a client waits as long as it likes; leaving ends it
            await asyncio.wait({work, dropped}, return_when=asyncio.FIRST_COMPLETED)
            # vLLM is told that the client disconnected, and aborts the request in the engine
            if not work.done():
                await asyncio.wait({work}, timeout=DROP_SECONDS)
                work.cancel()
                await asyncio.wait({work})  # no deadline: it was cancelled
                if not progress.started:
                    text = "this replica was fenced; its work was dropped"
                    await _refuse(send, 503, "fenced", text, "ask again")
                # without an end: the server breaks the connection, so that the answer is seen to be incomplete
                return
            await work
        finally:
            dropped.cancel()
            work.cancel()

    def _check(self, body: bytes) -> None:
        """Raise ConfigError for an invalid body, LimitExceeded for one over the limits."""
        content = read_json(body) if body.strip() else None
        if isinstance(content, dict):
            facts = self._engine.facts
            self._engine.limits.check(of_http(content, facts.max_model_len))
            for name in ("prompt", "token_ids"):
                bad = unknown_token(content.get(name), facts.vocab_size)
                if bad is not None:
                    raise ConfigError(
                        f"token id {bad}; the vocabulary has {facts.vocab_size}",
                        remedy="ids count from 0",
                    )

    async def _problem(self, epoch: str | None) -> tuple[str, str, str] | None:
        """(kind, text, remedy) if this replica must not answer now."""
        if self._engine.dead:
            return (
                "dead",
                self._engine.why_dead(),
                "pool.logs() shows why; pool.restart(replica) restarts it",
            )
        mine = self._epoch()
        if mine == 0 or (epoch is not None and epoch != str(mine)):
            return (
                "fenced",
                f"an order of epoch {epoch}, and this replica is at epoch {mine}",
                "ask the gateway",
            )
        try:
            await self._engine.wait_clean()
        except SyncError as error:
            return "dirty", error.message, error.remedy
        return None

    def _labelling(self, send: Any, progress: _Progress) -> Any:
        engine = self._engine
        seen = progress.seen

        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                progress.started = True
                progress.is_stream = any(
                    name.lower() == b"content-type"
                    and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
                versions = seen or [engine.version]
                added = [
                    (VERSION, versions[0]),
                    (VERSIONS, ",".join(map(str, versions))),
                    (REPLICA, engine.replica),
                ]
                if message["status"] >= 500 and engine.dead:
                    message["status"] = 503
                    added.append((REFUSED, "dead"))
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), str(v).encode()) for k, v in added),
                ]
            elif progress.is_stream and not message.get("more_body", False):
                # A stream's headers are sent before its tokens, so its versions follow in a final comment.
                tail = f": {VERSIONS} {','.join(map(str, seen))}\n\n" if seen else ""
                body = message.get("body", b"") + tail.encode()
                message = {**message, "body": body}
            await send(message)

        return labelled


@dataclass
class _Progress:
    """Which versions one answer has tokens of, and whether it has started, and is a stream."""

    seen: list[int] = field(default_factory=list)
    started: bool = False
    is_stream: bool = False


def _until(dropped: asyncio.Task[Any], body: bytes, receive: Any) -> Any:
    """`receive` for vLLM's app: the body that was read, then what follows, a disconnect once the request is dropped."""
    given = False

    async def received() -> Any:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        incoming = asyncio.ensure_future(receive())
        try:
            # no deadline: vLLM listens for a disconnect; the request's end cancels it
            await asyncio.wait({incoming, dropped}, return_when=asyncio.FIRST_COMPLETED)
            # no deadline: the task is done
            return incoming.result() if incoming.done() else {"type": "http.disconnect"}
        finally:
            incoming.cancel()

    return received


def naming_tokens(send: Any) -> Any:
    """`send` for an answer of `/inference/v1/generate`: each log-probability has its token as older clients read it.

    vLLM 0.32 sends {"token_id": 5, ...}; verifiers 0.4 and prime-rl (renderers 0.1.12) want {"token": "token_id:5"}.
    Within a JSON string a quote is escaped, so the bytes looked for are an object's.
    """

    async def named(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            kept = [(k, v) for k, v in headers if k.lower() != b"content-length"]
            message = {**message, "headers": kept}
        elif message.get("body"):
            body = _TOKEN_ID.sub(
                rb'{"token":"token_id:\1","token_id":\1,', message["body"]
            )
            message = {**message, "body": body}
        await send(message)

    return named


def unknown_token(prompt: Any, vocabulary: int) -> int | None:
    """A token id outside the vocabulary, in the prompt or in one of several: the engine does not check."""
    parts = prompt if isinstance(prompt, list) else []
    for part in parts:
        for token in part if isinstance(part, list) else [part]:
            if isinstance(token, int) and not 0 <= token < vocabulary:
                return token
    return None


async def _read_body(receive: Any) -> bytes | None:
    """A request's whole body, of limited size; None if the client disconnected."""
    parts: list[bytes] = []
    size = 0
    while True:
        # no deadline: from the gateway's front on this machine; ends with its connection
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_MESSAGE:
            raise ConfigError(
                f"the body is longer than {MAX_MESSAGE >> 20} MiB",
                remedy="send it in several requests",
            )
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Any, status: int, kind: str, message: str, remedy: str) -> None:
    body = {
        "message": f"{message}\n  → {remedy}",
        "type": kind,
        "param": None,
        "code": status,
        "remedy": remedy,
    }
    content = json.dumps({"error": body}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    if status == 503:
        headers.append((REFUSED.encode(), kind.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@dataclass
class HttpServer:
    """The server of the app, on the engine's own loop."""

    _server: Any
    _task: asyncio.Task[Any]
    _listener: socket.socket

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._listener.getsockname()[1]}/v1"

    async def close(self) -> None:
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._task, END_SECONDS + 2)
        self._listener.close()


def loopback_listener() -> socket.socket:
    """Bound to a free port, with an explicit protocol: only then does asyncio turn Nagle's algorithm off."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, 0))
    return listener


async def serve_http(
    engine: Engine, epoch: Callable[[], int], token: str
) -> HttpServer:
    """Serve vLLM's app on a free loopback port; `epoch` is this replica's, 0 while it is not registered."""
    _vllm_versions.check(_vllm_versions.HTTP)
    import uvicorn
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    # its routes would change weights and state outside of a sync
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)
    llm: Any = Labelled(engine.llm, engine.linked)
    arguments = _arguments(engine, token)
    tasks = await llm.get_supported_tasks()
    if "generate" not in tasks:
        raise ConfigError(
            f"this model does not generate (it can: {', '.join(tasks)})",
            remedy="launch without http",
        )
    _vllm.export_metrics(engine.llm)
    app = build_app(arguments, tasks, llm.model_config)
    await init_app_state(llm, app.state, arguments, tasks)
    verify = AuthenticationMiddleware(app, [token]).verify_token
    gate = ReplicaGate(app, verify, engine, epoch)
    config = uvicorn.Config(
        gate,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=END_SECONDS,
        timeout_keep_alive=60,
        server_header=False,
    )

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield  # the rollout process handles signals

    listener = loopback_listener()
    server = Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()  # no deadline: the task is done
            raise RuntimeError("vLLM's HTTP app did not start; see the log above")
        await asyncio.sleep(0.01)
    return HttpServer(server, task, listener)


def _arguments(engine: Engine, token: str) -> Any:
    """vLLM's server arguments at their defaults, for this engine."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = engine.arguments
    config = engine.llm.model_config
    parsed: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", config.model]
    )
    parsed.api_key = [token]
    parsed.host = HOST
    parsed.port = 0
    parsed.disable_log_stats = True  # else the app prints stats every few seconds
    names = given.get("served_model_name") or [
        config.model,
        config.model.rstrip("/").rpartition("/")[2],
    ]
    parsed.served_model_name = list(
        dict.fromkeys([names] if isinstance(names, str) else names)
    )
    parsed.enable_scale_out = True  # /inference/v1/generate: tokens in, tokens out
    return parsed

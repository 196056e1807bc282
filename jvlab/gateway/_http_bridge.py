"""`/bridge/...`: the control plane for trainers that speak HTTP only, a thin layer over the same state machine.

GET  /bridge/status         what pool.status() returns
GET  /bridge/version        the committed version, and each replica's
POST /bridge/notify_update  load a checkpoint from a folder: one sync, verified by digests
POST /bridge/pause, /bridge/resume
GET  /bridge/openapi.json   the OpenAPI document of these routes

Bodies are pydantic models: they check requests, and the document is made of them. pydantic takes a third of a second
to import, so this file is imported by the first pool with an HTTP front, not by every gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import models_json_schema

from jvlab._files import Plain
from jvlab._version import __version__
from jvlab.gateway._http_server import Handler, Refusal, read_body
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._limits import read_object
from jvlab.wire._pool_summary import pool_summary
from jvlab.wire._sync_words import CHOICES

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway


MAX_TIMEOUT = 86_400.0
DEFAULT_TIMEOUT = 600.0

# What requests hold.


def _choice(option: str, description: str) -> tuple[Any, Any]:
    """One of a sync's options; its first choice is the default."""
    choices = CHOICES[option]
    about = Field(default=choices[0], description=description)
    return Literal[choices], about  # pyright: ignore[reportInvalidTypeForm]


class Body(BaseModel):
    """A request: nothing is converted, and a field that is not known is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Nothing(Body):
    """An empty object, or no body."""


Update = create_model(
    "Update",
    __base__=Body,
    __doc__="The checkpoint to load, and the options of the sync.",
    path=(
        str,
        Field(
            description="folder of safetensors files, in the checkpoint's names, readable by the gateway"
        ),
    ),
    version=(
        int,
        Field(
            default=None,
            ge=1,
            lt=2**63,
            description="larger than the pool's; default: one more",
        ),
    ),
    mode=_choice("mode", "how weights are written to memory"),
    verify=_choice("verify", "which digests are compared"),
    require=_choice("require", "which replicas must commit"),
    pause=_choice("pause", "what happens to requests in flight"),
    kv=_choice("kv", "what happens to their KV"),
    nonfinite=_choice("nonfinite", "what to do about NaN and Inf in the tensors"),
    transport=(
        str,
        Field(default="auto", description="auto, shm, tcp, nixl or disk"),
    ),
    timeout=(
        float,
        Field(default=DEFAULT_TIMEOUT, gt=0, le=MAX_TIMEOUT, description="in seconds"),
    ),
)
Pause = create_model(
    "Pause",
    __base__=Body,
    __doc__="How to pause.",
    mode=_choice(
        "pause", "keep freezes requests in flight, wait finishes, abort ends them"
    ),
    clear_cache=(
        bool,
        Field(default=False, description="also empty the prefix cache"),
    ),
)


def read_fields(route: Route, body: bytes) -> Plain:
    """The fields that a body sets, checked by the route's model."""
    fields = read_object(body) if body.strip() else {}
    takes = route.takes
    known = takes.model_fields
    try:
        read = takes.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        about = known[name].description or "" if name in known else ""
        match wrong["type"]:
            case "extra_forbidden":
                text = f"{route.path} takes no {name}"
                about = f"it takes: {', '.join(known) or 'nothing'}"
            case "missing":
                text = f"{route.path} needs {name}"
            case _:
                wanted = wrong["msg"].removeprefix("Input should be ")
                text = (
                    f"{name} must be {wanted}, not {json.dumps(wrong['input'])[:200]}"
                )
        raise Refusal(400, text, about) from None
    for name, value in fields.items():
        if isinstance(value, str) and "\0" in value:
            about = known[name].description or ""
            raise Refusal(400, f"{name} holds a NUL character", about)
    return read.model_dump(exclude_unset=True)


# What answers hold, for the document.


class Answer(BaseModel):
    """A text below a field describes it."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Outcome(Answer):
    """One replica after the sync."""

    replica: str
    """its name"""
    state: str
    """committed, old, stale, dirty or lost"""
    version: int
    """the version it holds"""
    error: str
    """what failed; empty if nothing"""


class Updated(Answer):
    """What was committed."""

    pool: str
    version: int
    """the version that the pool holds now"""
    verified: bool
    """every parameter's digest matched on every replica"""
    meaning: str
    """whether tensors mean the same on both sides: checked and how, or unchecked and why"""
    bytes: int
    """bytes moved"""
    transport: str
    """the transport used"""
    seconds: dict[str, float]
    """durations by part of the sync"""
    outcomes: list[Outcome]
    digests: dict[str, dict[str, str]]
    """parameter -> rank -> digest as 16 hexadecimal digits"""


class Steered(Answer):
    """What was done."""

    pool: str
    paused: bool
    """whether the pool is paused now"""
    seconds: float
    """duration on the slowest replica"""


class Versions(Answer):
    """Which weights are served."""

    pool: str
    version: int
    """that the last sync committed; 0 before the first"""
    sync: str
    """stage of the open sync, or idle"""
    replicas: dict[str, int]
    """replica -> version"""


class ReplicaAnswer(Answer):
    """One replica; there are more fields."""

    replica: str
    """its name"""
    state: str
    """ready, starting, failed, ..."""
    version: int
    """the version it holds"""
    in_flight: int
    """unfinished samples that it was given"""
    http_url: str | None
    """base address of its own OpenAI app"""


class StatusAnswer(Answer):
    """What pool.status() returns; there are more fields."""

    pool: str
    model: str
    """path or hub id"""
    state: str
    """one word for the pool"""
    version: int
    """that the last sync committed; 0 before the first"""
    sync: str
    """stage of the open sync, or idle"""
    replicas: list[ReplicaAnswer]


class ErrorFields(Answer):
    """What and why."""

    message: str
    """what is wrong, and the remedy"""
    type: str
    """its kind"""
    code: int
    """the status"""
    remedy: str
    """what to do next"""


class Error(Answer):
    """An error."""

    error: ErrorFields


# The routes, and the OpenAPI document made of them.


@dataclass(frozen=True)
class Route:
    """One route: a POST takes a body, each answers with a model."""

    method: str
    name: str
    summary: str
    answer: type[BaseModel]
    takes: type[Body] = Nothing
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"/bridge/{self.name}"


STEER_FAILURES = {
    409: "a sync is open, or no replica is ready",
    503: "a replica was lost meanwhile",
}
ROUTES = (
    Route("GET", "status", "One fresh snapshot of the pool", StatusAnswer),
    Route("GET", "version", "Which weights the pool serves", Versions),
    Route(
        "POST",
        "notify_update",
        "Load a checkpoint from a folder: prepare, pause, move, verify, commit. Returns when it is done or failed",
        Updated,
        Update,
        {
            400: "a field, the path or a file is wrong; nothing was changed",
            409: "another trainer holds the pool, or an update is in progress",
            422: "names or shapes do not fit the model, and nothing was changed; or tensors are not finite",
            500: "the sync did not commit; outcomes say what each replica holds",
            504: "it ran past its deadline",
        },
    ),
    Route(
        "POST",
        "pause",
        "Pause generation on every replica; HTTP requests are held meanwhile",
        Steered,
        Pause,
        STEER_FAILURES,
    ),
    Route("POST", "resume", "Resume generation", Steered, failures=STEER_FAILURES),
)


def document(server: str) -> Plain:
    """The OpenAPI 3.1 document of the bridge."""
    models = dict.fromkeys(
        [Error, *(r.answer for r in ROUTES), *(r.takes for r in ROUTES)]
    )
    _, schemas = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    about = (
        "Weight syncs of a pool of vLLM replicas, for trainers that speak HTTP only."
    )
    token = {"type": "http", "scheme": "bearer", "description": "the lab's token"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jvlab bridge", "version": __version__, "description": about},
        "servers": [{"url": server}],
        "security": [{"token": []}],
        "paths": {
            route.path: {route.method.lower(): _operation(route)} for route in ROUTES
        },
        "components": {
            "securitySchemes": {"token": token},
            "schemas": schemas["$defs"],
        },
    }


def _content(model: type[BaseModel]) -> Plain:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"application/json": {"schema": schema}}


def _operation(route: Route) -> Plain:
    failures = {401: "the token is missing or wrong", **route.failures}
    post = route.method == "POST"
    if post:
        failures.setdefault(400, "the body is wrong")
    responses = {
        "200": {
            "description": route.answer.__doc__,
            "content": _content(route.answer),
        }
    }
    for status, why in sorted(failures.items()):
        responses[str(status)] = {"description": why, "content": _content(Error)}
    operation = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": responses,
    }
    if post:
        needed = any(f.is_required() for f in route.takes.model_fields.values())
        operation["requestBody"] = {
            "content": _content(route.takes),
            "required": needed,
        }
    return operation


# The gateway's side of `notify_update`: one helper process per pool, which is the trainer of an ordinary sync.
# The helper (`lab/_checkpoint_trainer.py`) reads the checkpoint and drives a `Link` over gRPC as any trainer does, so
# state machine, digests and error handling are the same. One JSON line per request and per reply; closing its
# input ends it. It is kept for a while, so that the next update finds imports and plan ready. Between updates
# it holds neither pool nor lab.

IDLE_SECONDS = 300.0  # without an update for this long, the helper ends
END_SECONDS = 5.0
START_SECONDS = 180.0  # for imports and compilation, on top of an update's own deadline
LINE_BYTES = 256 << 20
STATUS = {
    "LinkBusy": 409,
    "DeadlineExceeded": 504,
    "MissingDependency": 501,
    "Unsupported": 501,
}


class Updates:
    """Updates of one pool, one at a time."""

    def __init__(self, pool: str, address: str, token: str, folder: Path) -> None:
        self._pool = pool
        self._address = address  # the gateway's
        self._token = token
        self._log = folder / f"{pool}-updates.log"
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[Plain] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def take(self, fields: Mapping[str, Any]) -> Plain:
        """Load a checkpoint into the pool. Runs to its end even if the client disconnects."""
        timeout = fields.get("timeout", DEFAULT_TIMEOUT)
        if self._task is not None and not self._task.done():
            raise Refusal(
                409,
                "an update is under way",
                "GET /bridge/version shows when it is over",
                "LinkBusy",
            )
        self._task = asyncio.create_task(self._update(dict(fields), timeout))
        answer = await asyncio.shield(self._task)
        if error := answer.get("error"):
            kind = error["kind"]
            status = STATUS.get(kind, int(error["status"]))
            raise Refusal(
                status, error["message"], error["remedy"] or "GET /bridge/status", kind
            )
        return {"pool": self._pool, **answer}

    async def _update(self, fields: Plain, timeout: float) -> Plain:
        if self._idle is not None:
            self._idle.cancel()
        if self._ending is not None:
            await self._ending
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout + START_SECONDS):
                process.stdin.write(
                    json.dumps({**fields, "timeout": timeout}).encode() + b"\n"
                )
                await process.stdin.drain()
                line = await process.stdout.readline()
                if not line:
                    raise ConnectionError(f"it ended with code {await process.wait()}")
            return json.loads(line)
        except (ConnectionError, TimeoutError, ValueError) as error:
            await self._end()
            what = (
                "did not answer in time"
                if isinstance(error, TimeoutError)
                else f"failed: {error}"
            )
            remedy = (
                f"its log: {self._log}; GET /bridge/status shows what the replicas hold"
            )
            raise Refusal(500, f"the update {what}", remedy, "SyncError") from None
        finally:
            self._idle = asyncio.get_running_loop().call_later(
                IDLE_SECONDS, self._end_later
            )

    async def _start(self) -> asyncio.subprocess.Process:
        order = {"address": self._address, "pool": self._pool}
        environment = _security.child_environment(JVLAB_ORDER=json.dumps(order))
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jvlab.lab._checkpoint_trainer",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(f"{self._token}\n".encode())
        return process

    def _end_later(self) -> None:
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Close its input, which ends it; kill it if it does not."""
        process = self._process
        self._process = None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()  # no deadline: it was killed

    async def close(self) -> None:
        """The pool is closed: end the update and the helper."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()
        for task in (self._task, self._ending):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------

STEER_SECONDS = 600.0
HTTP = "an HTTP client"  # who paused a pool, for display


class Bridge:
    """One pool's bridge."""

    def __init__(self, gateway: Gateway, pool: str) -> None:
        self._gateway = gateway
        self._pool = pool
        self._updates = Updates(pool, gateway.address, gateway.token, gateway.folder)
        self.close = self._updates.close

    def routes(self) -> list[tuple[str, str, Handler]]:
        """The routes of the OpenAPI document, and the document itself."""
        answers = {
            "status": self._status,
            "version": self._version,
            "pause": self._pause,
            "resume": self._resume,
            "notify_update": self._updates.take,
        }
        found = [
            (route.method, route.path, _handler(route, answers[route.name]))
            for route in ROUTES
        ]
        return [*found, ("GET", "/bridge/openapi.json", self._openapi)]

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(document(f"{request.scheme}://{request.host}"))

    async def _status(self, _: Mapping[str, Any]) -> Plain:
        return pool_summary(await self._gateway.fresh_status(self._pool))

    async def _version(self, _: Mapping[str, Any]) -> Plain:
        status = self._gateway.pool_status(self._pool)
        return {
            "pool": self._pool,
            "version": status.version,
            "sync": status.sync or "idle",
            "replicas": {
                replica.replica: replica.version for replica in status.replicas
            },
        }

    async def _pause(self, body: Mapping[str, Any]) -> Plain:
        mode = body.get("mode", "keep")
        clear = body.get("clear_cache", False)
        return await self._steer(
            pb.SteerCall(
                pool=self._pool, what=pb.PAUSE, mode=mode, clear_cache=clear, by=HTTP
            )
        )

    async def _resume(self, _: Mapping[str, Any]) -> Plain:
        return await self._steer(pb.SteerCall(pool=self._pool, what=pb.RESUME))

    async def _steer(self, order: pb.SteerCall) -> Plain:
        reply = await self._gateway.steer(order, STEER_SECONDS)
        return {
            "pool": self._pool,
            "paused": order.what == pb.PAUSE,
            "seconds": reply.seconds,
        }


def _handler(route: Route, answer: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        fields = (
            read_fields(route, await read_body(request))
            if route.method == "POST"
            else {}
        )
        return web.json_response(await answer(fields))

    return handle

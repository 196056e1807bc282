"""`/bridge/...`: the control plane for trainers that speak HTTP only, a thin layer over the same state machine.

GET  /bridge/status         what pool.status() returns
GET  /bridge/version        the committed version, and each replica's
GET  /bridge/mapping        where vLLM's own loader puts every checkpoint element, traced in the live engine
POST /bridge/notify_update  load a checkpoint from a folder: one sync, verified by digests
POST /bridge/pause, /bridge/resume
GET  /bridge/openapi.json   the OpenAPI document of these routes
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jvlab._version import __version__
from jvlab.gateway import _pool_commands
from jvlab.gateway._http_openapi import ROUTES, Route, document
from jvlab.gateway._http_server import Handler, Refusal, read_body
from jvlab.wire import _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._limits import read_object

if TYPE_CHECKING:
    from aiohttp import web

    from jvlab.gateway._gateway import Gateway
    from jvlab.layout._types import Note, RankLayout


# The gateway's side of `notify_update`: one helper process per pool, which is the trainer of an ordinary sync.
# The helper (`lab/_checkpoint_trainer.py`) reads the checkpoint and drives a `Link` over gRPC as any trainer does, so
# state machine, digests and error handling are the same. One JSON line per request and per reply; closing its
# input ends it. It is kept for a while, so that the next update finds imports and plan ready. Between updates
# it holds neither pool nor lab.

IDLE_SECONDS = 300.0  # without an update for this long, the helper ends
END_SECONDS = 5.0
START_SECONDS = 180.0  # for imports and compilation, on top of an update's own deadline
DEFAULT_TIMEOUT = 600.0
MAX_TIMEOUT = 86_400.0
LINE_BYTES = 256 << 20
STATUS = {
    "LinkBusy": 409,
    "DeadlineExceeded": 504,
    "MissingDependency": 501,
    "Unsupported": 501,
}


class Updates:
    """Updates of one pool, one at a time."""

    def __init__(self, gateway: Gateway, pool: str) -> None:
        self._gateway = gateway
        self._pool = pool
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def take(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into the pool. Runs to its end even if the client disconnects."""
        timeout = fields.get("timeout", DEFAULT_TIMEOUT)
        if not 0 < timeout <= MAX_TIMEOUT:
            text = (
                f"timeout must be positive and at most {MAX_TIMEOUT:g} s, not {timeout}"
            )
            raise Refusal(400, text, "default: 600 s")
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

    async def _update(self, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
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
            log = self._gateway.folder / self._log
            what = (
                "did not answer in time"
                if isinstance(error, TimeoutError)
                else f"failed: {error}"
            )
            remedy = f"its log: {log}; GET /bridge/status shows what the replicas hold"
            return {
                "error": {
                    "kind": "SyncError",
                    "status": 500,
                    "message": f"the update {what}",
                    "remedy": remedy,
                }
            }
        finally:
            self._idle = asyncio.get_running_loop().call_later(
                IDLE_SECONDS, self._end_later
            )

    @property
    def _log(self) -> str:
        return f"{self._pool}-updates.log"

    async def _start(self) -> asyncio.subprocess.Process:
        order = {"address": self._gateway.address, "pool": self._pool}
        environment = _security.child_environment(JVLAB_ORDER=json.dumps(order))
        with (self._gateway.folder / self._log).open("ab") as log:
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
        process.stdin.write(f"{self._gateway.token}\n".encode())
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

TRACE_SECONDS = 300.0
STEER_SECONDS = 600.0
HTTP = "an HTTP client"  # who paused a pool, for display
KINDS = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
}


class Bridge:
    """One pool's bridge."""

    def __init__(self, gateway: Gateway, pool: str) -> None:
        self._gateway = gateway
        self._pool = pool
        self._updates = Updates(gateway, pool)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """The routes of the OpenAPI document, and the document itself."""
        answers = {
            "status": self._status,
            "version": self._version,
            "mapping": self._mapping,
            "pause": self._pause,
            "resume": self._resume,
            "notify_update": self._notify_update,
        }
        found = [
            (route.method, route.path, _handler(route, answers[route.name]))
            for route in ROUTES
        ]
        return [*found, ("GET", "/bridge/openapi.json", self._openapi)]

    async def close(self) -> None:
        await self._updates.close()

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.json_response(
            document(__version__, f"{request.scheme}://{request.host}")
        )

    async def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        from jvlab.wire._pool_summary import pool_summary

        return pool_summary(
            await _pool_commands.fresh_status(self._gateway, self._pool)
        )

    async def _version(self, _: Mapping[str, Any]) -> dict[str, Any]:
        status = self._gateway.pool_status(self._pool)
        return {
            "pool": self._pool,
            "version": status.version,
            "sync": status.sync or "idle",
            "replicas": {
                replica.replica: replica.version for replica in status.replicas
            },
        }

    async def _mapping(self, _: Mapping[str, Any]) -> dict[str, Any]:
        from jvlab.layout._checkpoint import checkpoint_tensors

        model = self._gateway.registry.pool(self._pool).spec.model
        tensors = await asyncio.to_thread(checkpoint_tensors, model)
        replica, layouts = await _pool_commands.trace(
            self._gateway, self._pool, tensors, TRACE_SECONDS
        )
        mapped = await asyncio.to_thread(mapping_json, layouts)
        return {"pool": self._pool, "model": model, "replica": replica, **mapped}

    async def _pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "keep")
        clear = body.get("clear_cache", False)
        return await self._steer(
            pb.SteerCall(
                pool=self._pool, what=pb.PAUSE, mode=mode, clear_cache=clear, by=HTTP
            )
        )

    async def _resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return await self._steer(pb.SteerCall(pool=self._pool, what=pb.RESUME))

    async def _steer(self, order: pb.SteerCall) -> dict[str, Any]:
        reply = await _pool_commands.steer(self._gateway, order, STEER_SECONDS)
        return {
            "pool": self._pool,
            "paused": order.what == pb.PAUSE,
            "seconds": reply.seconds,
        }

    async def _notify_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._updates.take(body)


def _handler(route: Route, answer: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        fields = (
            read_fields(route, await read_body(request))
            if route.method == "POST"
            else {}
        )
        return web.json_response(await answer(fields))

    return handle


def read_fields(route: Route, body: bytes) -> dict[str, Any]:
    """The body's fields, checked against the route's names and types."""
    fields = read_object(body) if body.strip() else {}
    known = route.takes
    if unknown := sorted(set(fields) - set(known)):
        raise Refusal(
            400,
            f"{route.path} takes no {', '.join(unknown)}",
            f"it takes: {', '.join(known) or 'nothing'}",
        )
    if missing := [name for name in route.required if name not in fields]:
        raise Refusal(
            400,
            f"{route.path} needs {', '.join(missing)}",
            "GET /bridge/openapi.json describes it",
        )
    for name, value in fields.items():
        kind = known[name]["type"]
        if not isinstance(value, KINDS[kind]) or (
            isinstance(value, bool) and kind != "boolean"
        ):
            shown = json.dumps(value)[:200]
            raise Refusal(
                400,
                f"{name} must be of type {kind}, not {shown}",
                known[name]["description"],
            )
        # beyond any time or version
        if kind in ("integer", "number") and abs(value) >= 2**63:
            raise Refusal(
                400, f"{name} is too large a number", known[name]["description"]
            )
        if (words := known[name].get("enum")) and value not in words:
            listed = f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}"
            raise Refusal(
                400,
                f"{name} must be {listed}, not {value!r}",
                known[name]["description"],
            )
        if isinstance(value, str) and "\0" in value:
            raise Refusal(
                400, f"{name} holds a NUL character", known[name]["description"]
            )
    return fields


def mapping_json(layouts: list[bytes]) -> dict[str, Any]:
    """Traced layouts as plain values."""
    from jvlab.layout._layout_codec import layout_from_bytes

    ranks = sorted(
        (layout_from_bytes(layout) for layout in layouts),
        key=lambda layout: layout.rank,
    )
    tensors = (
        [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype}
            for t in ranks[0].tensors
        ]
        if ranks
        else []
    )
    return {"tensors": tensors, "ranks": [_rank(layout) for layout in ranks]}


def _rank(layout: RankLayout) -> dict[str, Any]:
    return {
        "rank": layout.rank,
        "coords": dict(layout.coords),
        "parameters": [
            {
                "name": p.name,
                "shape": list(p.shape),
                "dtype": p.dtype,
                "strides": list(p.strides),
            }
            for p in layout.parameters
        ],
        "copies": [_copy(layout, row) for row in range(len(layout.tensor))],
        "opaque": _notes(layout.opaque),
        "staged": _notes(layout.repacked),
        "padding": _notes(layout.padding),
        "unused": list(layout.unused),
    }


def _copy(layout: RankLayout, row: int) -> dict[str, Any]:
    """One strided copy; trailing dimensions of size 1 are left out."""
    shape = layout.shape[row].tolist()
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    kept = len(shape)
    return {
        "tensor": layout.tensors[layout.tensor[row]].name,
        "parameter": layout.parameters[layout.parameter[row]].name,
        "shape": shape,
        "src_offset": int(layout.src_offset[row]),
        "src_strides": layout.src_strides[row].tolist()[:kept],
        "dst_offset": int(layout.dst_offset[row]),
        "dst_strides": layout.dst_strides[row].tolist()[:kept],
    }


def _notes(notes: tuple[Note, ...]) -> list[dict[str, Any]]:
    return [{"name": note.name, "reason": note.reason} for note in notes]

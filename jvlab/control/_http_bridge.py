"""`/bridge/...`: the control plane for trainers that speak HTTP only, a thin face over the same state machine.

GET  /bridge/status         what pool.status() says
GET  /bridge/version        the committed version, and each replica's
GET  /bridge/mapping        where vLLM's own loader puts every checkpoint element, traced in the live engine
POST /bridge/notify_update  take a checkpoint that was written to a folder: one verified sync
POST /bridge/pause, /bridge/resume
GET  /bridge/openapi.json   this, for machines
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jvlab.control import _orders
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._http_openapi import ROUTES, Route, document
from jvlab.control._http_server import Handler, Refusal
from jvlab.control._http_update import Updates

if TYPE_CHECKING:
    from aiohttp import web

    from jvlab.control._gateway import Gateway
    from jvlab.layout._types import Note, RankLayout

TRACE_SECONDS, STEER_SECONDS = 300.0, 600.0
KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict}


class Bridge:
    """One pool's bridge."""

    def __init__(self, gateway: Gateway, pool: str) -> None:
        self._gateway, self._pool = gateway, pool
        self._updates = Updates(gateway, pool)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Those of the document, and the document."""
        answers = {
            "status": self._status, "version": self._version, "mapping": self._mapping, "pause": self._pause,
            "resume": self._resume, "notify_update": self._notify_update,
        }  # fmt: skip
        found = [(route.method, route.path, _handler(route, answers[route.name])) for route in ROUTES]
        return [*found, ("GET", "/bridge/openapi.json", self._openapi)]

    async def close(self) -> None:
        await self._updates.close()

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        import jvlab

        return web.json_response(document(jvlab.__version__, f"{request.scheme}://{request.host}"))

    async def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        from jvlab.views._cards import pool_summary

        return pool_summary(await _orders.fresh_status(self._gateway, self._pool))

    async def _version(self, _: Mapping[str, Any]) -> dict[str, Any]:
        status = self._gateway.pool_status(self._pool)
        return {
            "pool": self._pool, "version": status.version, "sync": status.sync or "idle",
            "replicas": {replica.replica: replica.version for replica in status.replicas},
        }  # fmt: skip

    async def _mapping(self, _: Mapping[str, Any]) -> dict[str, Any]:
        from jvlab.rollout._checkpoint import checkpoint_tensors

        model = self._gateway.registry.pool(self._pool).spec.model
        tensors = await asyncio.to_thread(checkpoint_tensors, model)
        replica, layouts = await _orders.trace(self._gateway, self._pool, tensors, TRACE_SECONDS)
        mapped = await asyncio.to_thread(mapping_json, layouts)
        return {"pool": self._pool, "model": model, "replica": replica, **mapped}

    async def _pause(self, said: Mapping[str, Any]) -> dict[str, Any]:
        mode, clear = said.get("mode", "keep"), said.get("clear_cache", False)
        if mode not in ("keep", "wait", "abort"):
            raise Refusal(400, f"mode must be 'keep', 'wait' or 'abort', not {mode!r}", "leave it out for 'keep'")
        return await self._steer(pb.SteerCall(pool=self._pool, what=pb.PAUSE, mode=mode, clear_cache=clear))

    async def _resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return await self._steer(pb.SteerCall(pool=self._pool, what=pb.RESUME))

    async def _steer(self, order: pb.SteerCall) -> dict[str, Any]:
        reply = await _orders.steer(self._gateway, order, STEER_SECONDS)
        return {"pool": self._pool, "paused": order.what == pb.PAUSE, "seconds": reply.seconds}

    async def _notify_update(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return await self._updates.take(said)


def _handler(route: Route, answer: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        said = read_fields(route, await request.read()) if route.method == "POST" else {}
        return web.json_response(await answer(said))

    return handle


def read_fields(route: Route, body: bytes) -> dict[str, Any]:
    """The body's fields, if they are those of the route and of their kinds."""
    try:
        said = json.loads(body) if body.strip() else {}
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}", "send a JSON object, or nothing") from None
    if not isinstance(said, dict):
        raise Refusal(400, f"the body is a {type(said).__name__}, not an object", "send a JSON object, or nothing")
    known = route.takes
    if unknown := sorted(set(said) - set(known)):
        raise Refusal(400, f"{route.path} takes no {', '.join(unknown)}", f"it takes: {', '.join(known) or 'nothing'}")
    if missing := [name for name in route.required if name not in said]:
        raise Refusal(400, f"{route.path} needs {', '.join(missing)}", "GET /bridge/openapi.json describes it")
    for name, value in said.items():
        kind = known[name]["type"]
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
            raise Refusal(400, f"{name} must be of type {kind}, not {json.dumps(value)}", known[name]["description"])
    return said


def mapping_json(layouts: list[bytes]) -> dict[str, Any]:
    """Traced layouts as plain values."""
    from jvlab.layout._wire import layout_from_bytes

    ranks = sorted((layout_from_bytes(layout) for layout in layouts), key=lambda layout: layout.rank)
    tensors = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in ranks[0].tensors] if ranks else []
    return {"tensors": tensors, "ranks": [_rank(layout) for layout in ranks]}


def _rank(layout: RankLayout) -> dict[str, Any]:
    return {
        "rank": layout.rank, "coords": dict(layout.coords),
        "parameters": [
            {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "strides": list(p.strides)}
            for p in layout.parameters
        ],
        "copies": [_copy(layout, row) for row in range(len(layout.tensor))],
        "opaque": _notes(layout.opaque), "staged": _notes(layout.staged), "padding": _notes(layout.padding),
        "unused": list(layout.unused),
    }  # fmt: skip


def _copy(layout: RankLayout, row: int) -> dict[str, Any]:
    """One strided copy; trailing dimensions of size 1 are left out."""
    shape = layout.shape[row].tolist()
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    kept = len(shape)
    return {
        "tensor": layout.tensors[layout.tensor[row]].name,
        "parameter": layout.parameters[layout.parameter[row]].name, "shape": shape,
        "src_offset": int(layout.src_offset[row]), "src_strides": layout.src_strides[row].tolist()[:kept],
        "dst_offset": int(layout.dst_offset[row]), "dst_strides": layout.dst_strides[row].tolist()[:kept],
    }  # fmt: skip


def _notes(notes: tuple[Note, ...]) -> list[dict[str, Any]]:
    return [{"name": note.name, "reason": note.reason} for note in notes]

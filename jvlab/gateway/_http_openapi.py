"""The routes of `/bridge` as data, and the OpenAPI document made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jvlab.wire._sync_words import CHOICES

Schema = dict[str, Any]


def _is(kind: str, description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


def _object(description: str, properties: Mapping[str, Schema]) -> Schema:
    return _is(
        "object", description, properties=dict(properties), required=list(properties)
    )


def _list(description: str, of: Schema) -> Schema:
    return _is("array", description, items=of)


def _choice(option: str, description: str) -> Schema:
    """One of a sync's options; its first choice is the default."""
    choices = CHOICES[option]
    return _is("string", f"{description}; default {choices[0]}", enum=list(choices))


@dataclass(frozen=True)
class Route:
    """One route: the fields of a POST's body, and the response."""

    method: str
    name: str
    summary: str
    answer: Schema
    takes: Mapping[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"/bridge/{self.name}"


_POOL = _is("string", "the pool's name")
_VERSION = _is(
    "integer", "of the weights that the last sync committed; 0 before the first"
)
_OUTCOME = _object(
    "one replica after the sync",
    {
        "replica": _is("string", "its name"),
        "state": _is("string", "committed, old, stale, dirty or lost"),
        "version": _is("integer", "the version it holds"),
        "error": _is("string", "what failed; empty if nothing"),
    },
)
_STEER_RESULT = _object(
    "what was done",
    {
        "pool": _POOL,
        "paused": _is("boolean", "whether the pool is paused now"),
        "seconds": _is("number", "duration on the slowest replica"),
    },
)
_COPY = _object(
    "one strided copy; offsets and strides count elements",
    {
        "tensor": _is("string", "from this checkpoint tensor"),
        "parameter": _is("string", "to this parameter"),
        "shape": _list("of the box", _is("integer", "elements")),
        "src_offset": _is("integer", "first element in the tensor"),
        "src_strides": _list("in the tensor", _is("integer", "elements")),
        "dst_offset": _is("integer", "first element in the parameter's storage"),
        "dst_strides": _list("in the parameter's storage", _is("integer", "elements")),
    },
)
_NOTE = _object(
    "an exception, and why",
    {"name": _is("string", "whose"), "reason": _is("string", "why")},
)
_SHAPED = {
    "name": _is("string", "its name"),
    "shape": _list("its shape", _is("integer", "elements")),
    "dtype": _is("string", "as torch spells it"),
}
_RANK = _object(
    "one rank of the engine",
    {
        "rank": _is("integer", "its number"),
        "coords": _is("object", "its index in each kind of parallelism"),
        "parameters": _list(
            "live parameters",
            _object(
                "one",
                {
                    **_SHAPED,
                    "strides": _list("in elements", _is("integer", "elements")),
                },
            ),
        ),
        "copies": _list("the copies that the loader makes", _COPY),
        "opaque": _list("tensors that must go whole through load_weights", _NOTE),
        "staged": _list("parameters that are repacked after loading", _NOTE),
        "padding": _list("elements that no tensor fills", _NOTE),
        "unused": _list("tensors that this rank does not use", _is("string", "name")),
    },
)
_STATUS = _is(
    "object",
    "what pool.status() returns",
    required=["pool", "model", "state", "version", "sync", "replicas"],
    properties={
        "pool": _POOL,
        "model": _is("string", "path or hub id"),
        "state": _is("string", "one word for the pool"),
        "version": _VERSION,
        "sync": _is("string", "stage of the open sync, or idle"),
        "replicas": _list(
            "every replica",
            _is(
                "object",
                "one",
                required=["replica", "state", "version", "in_flight", "http_url"],
                properties={
                    "replica": _is("string", "its name"),
                    "state": _is("string", "ready, starting, failed, ..."),
                    "version": _is("integer", "the version it holds"),
                    "in_flight": _is("integer", "unfinished samples that it was given"),
                    "http_url": {
                        "type": ["string", "null"],
                        "description": "base address of its own OpenAI app",
                    },
                },
            ),
        ),
    },
)
_UPDATE_RESULT = _object(
    "what was committed",
    {
        "pool": _POOL,
        "version": _is("integer", "the version that the pool holds now"),
        "verified": _is("boolean", "every parameter's digest matched on every replica"),
        "meaning": _is(
            "string",
            "whether tensors mean the same on both sides: checked and how, or unchecked and why",
        ),
        "bytes": _is("integer", "bytes moved"),
        "transport": _is("string", "the transport used"),
        "seconds": _is(
            "object",
            "durations by part of the sync",
            additionalProperties={"type": "number"},
        ),
        "outcomes": _list("every replica", _OUTCOME),
        "digests": _is(
            "object",
            "parameter -> rank -> digest as 16 hexadecimal digits",
            additionalProperties={
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
        ),
    },
)
_STEER_FAILURES = {
    409: "a sync is open, or no replica is ready",
    503: "a replica was lost meanwhile",
}

ROUTES = (
    Route("GET", "status", "One fresh snapshot of the pool", _STATUS),
    Route(
        "GET", "version", "Which weights the pool serves",
        _object(
            "versions",
            {
                "pool": _POOL, "version": _VERSION, "sync": _is("string", "stage of the open sync, or idle"),
                "replicas": _is("object", "replica -> version", additionalProperties={"type": "integer"}),
            },
        ),
    ),
    Route(
        "GET", "mapping", "Where vLLM's own loader puts every checkpoint element, traced in the live engine",
        _object(
            "the traced mapping",
            {
                "pool": _POOL, "model": _is("string", "path or hub id"), "replica": _is("string", "which was traced"),
                "tensors": _list("of the checkpoint", _object("one", _SHAPED)), "ranks": _list("each rank", _RANK),
            },
        ),
        failures={400: "the model's folder can't be read", 409: "no replica is ready"},
    ),
    Route(
        "POST", "notify_update",
        "Load a checkpoint from a folder: prepare, pause, move, verify, commit. Returns when it is done or failed",
        _UPDATE_RESULT,
        takes={
            "path": _is("string", "folder of safetensors files, in the checkpoint's names, readable by the gateway"),
            "version": _is("integer", "larger than the pool's; default: one more"),
            "mode": _choice("mode", "how weights are written to memory"),
            "verify": _choice("verify", "which digests are compared"),
            "require": _choice("require", "which replicas must commit"),
            "pause": _choice("pause", "what happens to requests in flight"),
            "kv": _choice("kv", "what happens to their KV"),
            "nonfinite": _choice("nonfinite", "what to do about NaN and Inf in the tensors"),
            "transport": _is("string", "auto, shm, gloo or disk; default auto"),
            "timeout": _is("number", "seconds; default 600"),
        },
        required=("path",),
        failures={
            400: "a field, the path or a file is wrong; nothing was changed",
            409: "another trainer holds the pool, or an update is in progress",
            422: "names or shapes do not fit the model, and nothing was changed; or tensors are not finite",
            500: "the sync did not commit; outcomes say what each replica holds", 504: "it ran past its deadline",
        },
    ),
    Route(
        "POST", "pause", "Pause generation on every replica; HTTP requests are held meanwhile", _STEER_RESULT,
        takes={
            "mode": _choice("pause", "keep freezes requests in flight, wait finishes, abort ends them"),
            "clear_cache": _is("boolean", "also empty the prefix cache; default false"),
        },
        failures=_STEER_FAILURES,
    ),
    Route("POST", "resume", "Resume generation", _STEER_RESULT, failures=_STEER_FAILURES),
)  # fmt: skip

_ERROR = _object(
    "an error",
    {
        "error": _object(
            "what and why",
            {
                "message": _is("string", "what is wrong, and the remedy"),
                "type": _is("string", "its kind"),
                "code": _is("integer", "the status"),
                "remedy": _is("string", "what to do next"),
            },
        )
    },
)


def document(version: str, server: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the bridge."""
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jvlab bridge",
            "version": version,
            "description": "Weight syncs of a pool of vLLM replicas, for trainers that speak HTTP only.",
        },
        "servers": [{"url": server}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "the lab's token",
                }
            },
            "schemas": {"Error": _ERROR},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {401: "the token is missing or wrong", **route.failures}
    if route.method == "POST":
        failures.setdefault(400, "the body is wrong")
    responses: dict[str, Any] = {
        "200": {
            "description": route.answer["description"],
            "content": {"application/json": {"schema": route.answer}},
        }
    }
    responses |= {
        str(status): {"description": why, "content": failed}
        for status, why in sorted(failures.items())
    }
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": responses,
    }
    if route.method == "POST":
        schema = {
            "type": "object",
            "properties": dict(route.takes),
            "required": list(route.required),
            "additionalProperties": False,
        }
        body = {
            "content": {"application/json": {"schema": schema}},
            "required": bool(route.required),
        }
        operation["requestBody"] = body
    return operation

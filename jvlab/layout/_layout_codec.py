"""A RankLayout as plain dicts, lists, numbers, strings and bytes, and back: what crosses an RPC without pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jvlab._errors import TraceError
from jvlab._files import parse_object
from jvlab.layout._types import CheckpointTensor, Format, Note, Parameter, RankLayout

_COLUMNS = {"tensor": "<i4", "parameter": "<i4"}  # numpy dtype codes on the wire
_COLUMNS |= dict.fromkeys(
    ("shape", "src_offset", "src_strides", "dst_offset", "dst_strides"), "<i8"
)
_NOTES = ("padding", "opaque", "repacked")
_WIRE_VERSION = 5


def layout_to_plain(layout: RankLayout) -> dict[str, Any]:
    """The layout as msgpack- and JSON-like values; arrays become little-endian bytes with their shape."""
    columns = {}
    for name, kind in _COLUMNS.items():
        values = getattr(layout, name)
        data = np.ascontiguousarray(values, kind).tobytes()
        columns[name] = [list(values.shape), data]
    return {
        "wire": _WIRE_VERSION,
        "rank": layout.rank,
        "coords": [[axis, place] for axis, place in layout.coords],
        "tensors": [[t.name, list(t.shape), t.dtype] for t in layout.tensors],
        "parameters": [
            [p.name, list(p.shape), p.dtype, list(p.strides)] for p in layout.parameters
        ],
        "columns": columns,
        "notes": {
            name: [
                [n.name, n.reason, n.elements, n.kind] for n in getattr(layout, name)
            ]
            for name in _NOTES
        },
        "unused": list(layout.unused),
        "formats": [
            [f.parameter, f.scale, f.loaded, f.block, f.text] for f in layout.formats
        ],
    }


def layout_from_plain(plain: Mapping[str, Any]) -> RankLayout:
    """The inverse of `layout_to_plain`; refuses anything else."""
    if plain.get("wire") != _WIRE_VERSION:
        raise TraceError(
            f"this is not a rank layout of wire version {_WIRE_VERSION}: its version is {plain.get('wire')!r}",
            remedy="run the same jvlab on the rollout side as here",
            version=plain.get("wire"),
        )
    try:
        return _layout(plain)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise TraceError(
            f"a rank layout is damaged: {str(error)[:200]}",
            remedy="the reply was cut short or altered in transit: ask for the trace again",
        ) from error


def _layout(plain: Mapping[str, Any]) -> RankLayout:
    columns: dict[str, Any] = {}
    for name, kind in _COLUMNS.items():
        shape, data = plain["columns"][name]
        array = np.frombuffer(data, dtype=kind).astype(kind[1:])
        if array.size != int(np.prod(shape, dtype=np.int64)):
            raise TraceError(
                f"column {name!r} of a layout holds {array.size} numbers, which do not fill its shape {tuple(shape)}",
                remedy="the reply was cut short or altered in transit: ask for the trace again",
                column=name,
            )
        columns[name] = array.reshape(shape)
    notes: dict[str, Any] = {
        name: tuple(
            Note(str(n), str(r), int(e), str(k)) for n, r, e, k in plain["notes"][name]
        )
        for name in _NOTES
    }
    return RankLayout(
        rank=int(plain["rank"]),
        coords=tuple((str(axis), int(place)) for axis, place in plain["coords"]),
        tensors=tuple(CheckpointTensor(n, tuple(s), d) for n, s, d in plain["tensors"]),
        parameters=tuple(
            Parameter(n, tuple(s), d, tuple(t)) for n, s, d, t in plain["parameters"]
        ),
        unused=tuple(plain["unused"]),
        formats=tuple(
            Format(str(p), str(s), str(x), int(b), str(t))
            for p, s, x, b, t in plain["formats"]
        ),
        **columns,
        **notes,
    )


def plain_to_bytes(plain: Mapping[str, Any]) -> bytes:
    """The output of `layout_to_plain` as JSON; columns in base64."""
    columns = {
        name: [shape, base64.b64encode(data).decode()]
        for name, (shape, data) in plain["columns"].items()
    }
    return json.dumps({**plain, "columns": columns}).encode()


def layout_from_bytes(text: bytes) -> RankLayout:
    """The inverse of `plain_to_bytes`, back to a layout."""
    try:
        plain = parse_object(text)
        columns = {
            name: [shape, base64.b64decode(data)]
            for name, (shape, data) in plain["columns"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TraceError(
            f"these bytes are not a rank layout: {str(error)[:200]}",
            remedy="the reply was cut short or altered in transit: ask for the trace again",
        ) from error
    return layout_from_plain({**plain, "columns": columns})

"""A RankLayout as plain dicts, lists, numbers and strings, and back: what crosses an RPC without pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jvlab._errors import TraceError
from jvlab._files import parse_object
from jvlab.layout._types import (
    CheckpointTensor,
    Format,
    Note,
    Parameter,
    RankLayout,
    from_row,
    to_row,
)

_COLUMNS = {"tensor": "<i4", "parameter": "<i4"}  # numpy dtype codes on the wire
_COLUMNS |= dict.fromkeys(
    ("shape", "src_offset", "src_strides", "dst_offset", "dst_strides"), "<i8"
)
_ROWS = {"tensors": CheckpointTensor, "parameters": Parameter, "formats": Format}
_ROWS |= dict.fromkeys(("padding", "opaque", "repacked"), Note)
_WIRE_VERSION = 6


def layout_to_plain(layout: RankLayout) -> dict[str, Any]:
    """The layout as msgpack- and JSON-like values; arrays become little-endian bytes in base64, with their shape."""
    columns = {}
    for name, kind in _COLUMNS.items():
        values = getattr(layout, name)
        data = np.ascontiguousarray(values, kind).tobytes()
        columns[name] = [list(values.shape), base64.b64encode(data).decode()]
    return {
        "wire": _WIRE_VERSION,
        "rank": layout.rank,
        "coords": [list(pair) for pair in layout.coords],
        "unused": list(layout.unused),
        "columns": columns,
        **{name: [to_row(x) for x in getattr(layout, name)] for name in _ROWS},
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
        raise _damaged(error) from error


def _damaged(error: Exception) -> TraceError:
    return TraceError(
        f"a rank layout is damaged: {str(error)[:200]}",
        remedy="the reply was cut short or altered in transit: ask for the trace again",
    )


def _layout(plain: Mapping[str, Any]) -> RankLayout:
    columns: dict[str, Any] = {}
    for name, kind in _COLUMNS.items():
        shape, text = plain["columns"][name]
        data = base64.b64decode(text)
        if len(data) != np.prod(shape, dtype=np.int64) * np.dtype(kind).itemsize:
            raise ValueError(f"{len(data)} bytes do not fill column {name!r} {shape}")
        columns[name] = np.frombuffer(data, kind).astype(kind[1:]).reshape(shape)
    rows: dict[str, Any] = {
        name: tuple(from_row(kind, row) for row in plain[name])
        for name, kind in _ROWS.items()
    }
    return RankLayout(
        rank=int(plain["rank"]),
        coords=tuple((str(axis), int(place)) for axis, place in plain["coords"]),
        unused=tuple(plain["unused"]),
        **columns,
        **rows,
    )


def plain_to_bytes(plain: Mapping[str, Any]) -> bytes:
    """The output of `layout_to_plain` as JSON."""
    return json.dumps(plain).encode()


def layout_from_bytes(text: bytes) -> RankLayout:
    """The inverse of `plain_to_bytes`, back to a layout."""
    try:
        plain = parse_object(text)
    except ValueError as error:
        raise _damaged(error) from error
    return layout_from_plain(plain)

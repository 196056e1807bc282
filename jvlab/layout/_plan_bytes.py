"""A transfer plan as bytes and back: a JSON header, then the raw little-endian arrays; no pickle. numpy only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._files import parse_object
from jvlab.layout._plan_types import LeafInfo, Quantised, Sharding, TargetInfo, ValueTransform

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan

Plan = TypeVar("Plan")
MAGIC = b"jvplan1\n"
SCALARS = ("ranks", "replicas", "bucket_bytes", "link_gbps", "ignored", "title")
DTYPES = {"|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)), "<f4", "<f8"}
CELLS = ("starts", "stops", "owner_ptr", "owners")


def plan_to_bytes(plan: TransferPlan) -> bytes:
    """The plan as bytes; equal plans give equal bytes."""
    arrays = _arrays(plan)
    header = {
        "leaves": [[x.path, x.shape, x.dtype, x.sharding] for x in plan.leaves],
        "shardings": [x.shape for x in plan.shardings],
        "parameters": [[x.name, x.shape, x.dtype, x.strides] for x in plan.parameters],
        "transforms": [[x.source, x.wire, x.add, x.cast] for x in plan.transforms],
        "scalars": {k: getattr(plan, k) for k in SCALARS},
        "arrays": [[k, a.dtype.str, a.shape] for k, a in arrays.items()],
    }
    if plan.quantised:
        header["quantised"] = [
            [x.path, x.source, x.loaded, x.grid, x.groups, x.add, x.cast, x.block] for x in plan.quantised
        ]
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in arrays.values())])


def _arrays(plan: TransferPlan) -> dict[str, np.ndarray]:
    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    arrays = {k: a for k, a in found.items() if isinstance(a, np.ndarray)}
    for i, s in enumerate(plan.shardings):
        arrays |= {f"sharding.{i}.{k}": getattr(s, k) for k in CELLS}
    return {k: a.astype(a.dtype.newbyteorder("<"), copy=False) for k, a in arrays.items()}


def plan_from_bytes(data: bytes | memoryview, build: Callable[..., Plan]) -> Plan:
    """Parse what `plan_to_bytes` wrote and pass its fields to `build`; refuses anything else."""
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ConfigError("these bytes hold no transfer plan", remedy="pass what TransferPlan.to_bytes() returned")
    at = len(MAGIC) + 8
    size = int.from_bytes(view[len(MAGIC) : at], "little")
    try:
        header = parse_object(bytes(view[at : at + min(size, len(view))]))
        arrays = _read_arrays(header["arrays"], view, at + size)
        return build(**_fields(header, arrays))
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
        raise ConfigError(
            f"the plan's header is cut off or altered: {str(e)[:200]}", remedy="send the bytes whole"
        ) from e


def _read_arrays(entries: list[Any], view: memoryview, at: int) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in entries:
        if dtype not in DTYPES or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 8:
            raise ValueError(f"{str(name)[:40]!r} is {str(dtype)[:20]!r} of shape {str(shape)[:60]}")
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(view):
            raise ConfigError(
                f"the plan is cut off inside {str(name)[:40]!r}", remedy="send the bytes whole", array=name
            )
        arrays[name] = np.frombuffer(view[at:end], np.dtype(dtype)).reshape(shape)
        at = end
    if at != len(view):
        raise ValueError(f"{len(view) - at} bytes after its last array")
    return arrays


def _fields(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    shardings = tuple(
        Sharding(tuple(shape), *(arrays.pop(f"sharding.{i}.{k}") for k in CELLS))
        for i, shape in enumerate(header["shardings"])
    )
    scalars = header["scalars"] | {"ignored": tuple(header["scalars"]["ignored"])}
    return {
        **arrays,
        **scalars,
        "leaves": tuple(LeafInfo(p, tuple(s), d, k) for p, s, d, k in header["leaves"]),
        "shardings": shardings,
        "parameters": tuple(TargetInfo(n, tuple(s), d, tuple(t)) for n, s, d, t in header["parameters"]),
        "transforms": tuple(ValueTransform(*x) for x in header["transforms"]),
        "quantised": tuple(
            Quantised(p, s, d, tuple(grid), tuple(groups), add, cast, tuple(block))
            for p, s, d, grid, groups, add, cast, block in header.get("quantised", ())
        ),
    }

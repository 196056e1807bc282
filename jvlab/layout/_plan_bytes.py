"""A transfer plan as bytes and back: a JSON header, then the raw little-endian arrays; no pickle. numpy only."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np

from jvlab._errors import ConfigError
from jvlab.layout._plan import Law, LeafInfo, Sharding, TargetInfo, TransferPlan

MAGIC = b"jvplan1\n"
SCALARS = ("ranks", "replicas", "bucket_bytes", "link_gbps", "ignored", "title")
CELLS = ("starts", "stops", "owner_ptr", "owners")


def plan_to_bytes(plan: TransferPlan) -> bytes:
    """The plan as bytes; equal plans give equal bytes."""
    arrays = _arrays(plan)
    header = {
        "leaves": [[x.path, x.shape, x.dtype, x.sharding] for x in plan.leaves],
        "shardings": [x.shape for x in plan.shardings],
        "parameters": [[x.name, x.shape, x.dtype, x.strides] for x in plan.parameters],
        "laws": [[x.source, x.wire, x.add, x.cast] for x in plan.laws],
        "scalars": {k: getattr(plan, k) for k in SCALARS},
        "arrays": [[k, a.dtype.str, a.shape] for k, a in arrays.items()],
    }
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in arrays.values())])


def _arrays(plan: TransferPlan) -> dict[str, np.ndarray]:
    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    arrays = {k: a for k, a in found.items() if isinstance(a, np.ndarray)}
    for i, s in enumerate(plan.shardings):
        arrays |= {f"sharding.{i}.{k}": getattr(s, k) for k in CELLS}
    return {k: a.astype(a.dtype.newbyteorder("<"), copy=False) for k, a in arrays.items()}


def plan_from_bytes(data: bytes | memoryview) -> TransferPlan:
    """The plan that `plan_to_bytes` wrote; refuses anything else."""
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ConfigError("these bytes hold no transfer plan", remedy="pass what TransferPlan.to_bytes() returned")
    at = len(MAGIC) + 8
    size = int.from_bytes(view[len(MAGIC) : at], "little")
    try:
        header = json.loads(bytes(view[at : at + size]))
    except ValueError as e:
        raise ConfigError("the plan's header is cut off or altered", remedy="send the bytes whole") from e
    at += size
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in header["arrays"]:
        end = at + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if end > len(view):
            raise ConfigError(f"the plan is cut off inside {name!r}", remedy="send the bytes whole", array=name)
        arrays[name] = np.frombuffer(view[at:end], np.dtype(dtype)).reshape(shape)
        at = end
    shardings = tuple(
        Sharding(tuple(shape), *(arrays.pop(f"sharding.{i}.{k}") for k in CELLS))
        for i, shape in enumerate(header["shardings"])
    )
    scalars = header["scalars"] | {"ignored": tuple(header["scalars"]["ignored"])}
    return TransferPlan(
        leaves=tuple(LeafInfo(p, tuple(s), d, k) for p, s, d, k in header["leaves"]),
        shardings=shardings,
        parameters=tuple(TargetInfo(n, tuple(s), d, tuple(t)) for n, s, d, t in header["parameters"]),
        laws=tuple(Law(*x) for x in header["laws"]),
        **arrays,
        **scalars,
    )

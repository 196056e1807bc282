"""The copy kernels of the ipc transport in numpy: block by block, thread by thread, with their own arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jvlab.layout._digest import COLUMN, LINE, MASK, PLACE, exponent, weights
from jvlab.layout._plan_types import ValueTransform, convert, item_bytes, numpy_dtype
from jvlab.transport import _ipc_tables as ipc
from jvlab.transport._ipc_tables import (
    AT,
    DEEP,
    LOAD,
    OUTER,
    SEPARABLE,
    SIDE,
    STEPS,
    STORE,
    THREADS,
    Table,
)

# worlds to test with are modules of that folder
sys.path.append(str(Path(__file__).parents[1] / "layout"))

THREAD = np.arange(THREADS, dtype=np.int64)


def run(
    tables: Sequence[Table],
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    slots: int,
    write: bool = True,
    digest: bool = True,
    flawed: set[int] | None = None,
) -> list[int]:
    """Run launches on flat arrays; `targets` are written, the digests by slot come back. No element twice.

    `digest` picks the kernel variant: without it, vectors are used also where weights could not be tabulated. `flawed`
    gets the slots of which some value is not finite.
    """
    sums = [0] * slots
    touched = [np.zeros(t.size, bool) for t in targets]
    for table in tables:
        for block in range(table.blocks):
            e, at = find(table, block)
            e["apart"] = int(not digest or e["flags"] & SEPARABLE)
            part = _rows if table.program.form == "rows" else _tiles
            e["found"] = 0
            slot, total = part(table, e, at, sources, targets, touched, write)
            if flawed is not None and e["found"]:
                flawed.add(slot)
            sums[slot] = (sums[slot] + total) & MASK
    return sums


def find(table: Table, block: int) -> tuple[dict[str, int], int]:
    """The kernel's search, 32 probes at once."""
    low, n = 0, len(table.first)
    while n > 1:
        step = (n + 31) // 32
        below = [
            k * step < n and int(table.first[low + min(k * step, n - 1)]) <= block
            for k in range(32)
        ]
        k = (sum(below) - 1) * step
        low, n = low + k, min(step, n - k)
    entry = dict(zip(AT, table.entries[low].tolist(), strict=True))
    assert (
        0
        <= block - int(table.first[low])
        < int(np.append(table.first, table.blocks)[low + 1]) - table.first[low]
    )
    return entry, block - int(table.first[low])


def place(e: dict[str, int], t: int) -> tuple[int, int, int, int]:
    t, b = divmod(t, e["tiles_b"])
    t, a = divmod(t, e["tiles_a"])
    src, dst = e["src"], e["dst"]
    for k in range(OUTER):
        t, i = divmod(t, e[f"n{k}"])
        src, dst = src + i * e[f"ss{k}"], dst + i * e[f"ds{k}"]
    return a, b, src, dst


def along(e: dict[str, int], p: np.ndarray, one: str, two: str) -> np.ndarray:
    return (p // e["na1"]) * e[two] + (p % e["na1"]) * e[one]


def _law(table: Table, e: dict[str, int]) -> ValueTransform:
    add = float(np.uint32(e["add"]).view(np.float32))
    cast = {code: name for name, code in ipc.FLOATS.items()}.get(e["cast"])
    return ValueTransform(table.program.source, table.program.wire, add, cast)


def _words(values: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(values).view(f"u{min(values.itemsize, 4)}")
    raw = raw.reshape(*values.shape, -1).astype(np.uint64)
    return (raw * PLACE[: raw.shape[-1]]).sum(axis=-1, dtype=np.uint64)


def _read(
    source: np.ndarray, at: np.ndarray, transform: ValueTransform, vector: int
) -> np.ndarray:
    """Values at these places; runs of `vector` are read at once and must be aligned and contiguous."""
    if vector > 1:
        runs = at.reshape(-1, vector)
        assert (runs[:, 0] % vector == 0).all()
        assert (np.diff(runs, axis=1) == 1).all()
    assert at.min() >= 0
    return convert(
        source.reshape(-1)[at].astype(numpy_dtype(transform.source), copy=False),
        transform,
    )


def _write(
    target: np.ndarray,
    touched: np.ndarray,
    at: np.ndarray,
    values: np.ndarray,
    vector: int,
    write: bool,
) -> None:
    if vector > 1:
        runs = at.reshape(-1, vector)
        assert (runs[:, 0] % vector == 0).all()
        assert (np.diff(runs, axis=1) == 1).all()
    assert at.min() >= 0
    assert not touched[at].any(), "written twice"
    assert len(np.unique(at)) == at.size
    touched[at] = True
    if write:
        target.reshape(-1)[at] = values


def _digest(
    e: dict[str, int],
    values: np.ndarray,
    index: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
) -> int:
    """By tables where the entry says so (they must be the right ones), else by index."""
    line, column = weights(index // e["row"], LINE), weights(index % e["row"], COLUMN)
    if e["flags"] & SEPARABLE:  # the quick kernel looks nowhere else
        assert np.array_equal(u, line)
        assert np.array_equal(v, column)
    if exponent(values.dtype.name):
        e["found"] |= int(not np.isfinite(values.astype(np.float64)).all())
    total = _words(values) * line.astype(np.uint64) * column.astype(np.uint64)
    return int(total.sum(dtype=np.uint64))


def _rows(
    table: Table,
    e: dict[str, int],
    at: int,
    sources: Any,
    targets: Any,
    touched: Any,
    write: bool,
) -> Any:
    a, b, src, dst = place(e, at)
    transform, vr = _law(table, e), table.program.vector
    across, high = 1 << e["wide"], THREADS >> e["wide"]
    x, y = THREAD & (across - 1), THREAD >> e["wide"]
    vec = bool(e["flags"] & LOAD and e["flags"] & STORE and e["apart"])
    c0 = b * across * vr + (x * vr if vec else x)
    step = 1 if vec else across
    c = c0[:, None, None] + np.arange(vr)[None, None, :] * step
    p = (a * high * STEPS + y)[:, None, None] + np.arange(STEPS)[None, :, None] * high
    c, p = np.broadcast_arrays(c, p)
    line0, col0 = divmod(dst, e["row"])
    full = np.broadcast_to(vec & (c0 + vr <= e["nb"])[:, None, None], c.shape)
    total = 0
    for chosen, vector in ((full, vr), (~full, 1)):
        here = chosen & (p < e["na"]) & (c < e["nb"])
        if not here.any():
            continue
        assert vector > 1 or not table.program.quick, (
            "the quick kernel has no other way"
        )
        pp, cc = p[here], c[here]
        values = _read(
            sources[e["source"]],
            src + pp * e["ssa1"] + cc * e["ssb"],
            transform,
            vector,
        )
        index = dst + pp * e["dsa1"] + cc * e["dsb"]
        _write(targets[e["target"]], touched[e["target"]], index, values, vector, write)
        u, v = (
            weights(line0 + pp * e["line1"], LINE),
            weights(col0 + cc * e["dsb"], COLUMN),
        )
        total += _digest(e, values, index, u, v)
    return e["slot"], total


def _word(r: np.ndarray, c: np.ndarray) -> np.ndarray:
    return r * 32 + ((c + 4 * (r >> 3) + (r & 3)) & 31)


def _tiles(
    table: Table,
    e: dict[str, int],
    at: int,
    sources: Any,
    targets: Any,
    touched: Any,
    write: bool,
) -> Any:
    assert write
    a, b, src, dst = place(e, at)
    a0, b0, total = a * SIDE * DEEP, b * SIDE, 0
    for t in range(DEEP):
        if a0 + t * SIDE >= e["na"]:
            break
        tile = _load_tile(table, e, sources[e["source"]], src, a0 + t * SIDE, b0)
        total += _store_tile(
            table, e, targets[e["target"]], touched[e["target"]], dst, a0, t, b0, tile
        )
    return e["slot"], total


def _load_tile(
    table: Table, e: dict[str, int], source: np.ndarray, src: int, a0: int, b0: int
) -> np.ndarray:
    """Shared memory after `keep`, as elements of the target's dtype."""
    transform = _law(table, e)
    vl = 16 // item_bytes(table.program.source)
    lx = SIDE // vl
    ly = THREADS // lx
    two_bytes = item_bytes(table.program.wire) == 2
    room = np.zeros(
        SIDE * SIDE if two_bytes else SIDE * (SIDE + 1), numpy_dtype(transform.wire)
    )
    for i in range(SIDE // ly):
        p = (a0 + THREAD % lx * vl)[:, None] + np.arange(vl)
        r = np.broadcast_to((i * ly + THREAD // lx)[:, None], p.shape)
        q = b0 + r
        full = np.broadcast_to(
            bool(e["flags"] & LOAD) & (p[:, :1] + vl <= e["na"]), p.shape
        )
        values = np.zeros(p.shape, numpy_dtype(transform.source))
        # what is out of range is zero before the law
        values = convert(values, transform)
        for chosen, vector in ((full, vl), (~full, 1)):
            here = chosen & (p < e["na"]) & (q < e["nb"])
            if here.any():
                assert vector > 1 or not table.program.quick, (
                    "the quick kernel has no other way"
                )
                near = (
                    p[here] * e["ssa1"]
                    if vector > 1
                    else along(e, p[here], "ssa1", "ssa2")
                )
                values[here] = _read(
                    source, src + near + q[here] * e["ssb"], transform, vector
                )
        within = THREAD[:, None] % lx * vl + np.arange(vl)
        room[
            2 * _word(r, within // 2) + within % 2
            if two_bytes
            else r * (SIDE + 1) + within
        ] = values
    return room


def _store_tile(
    table: Table,
    e: dict[str, int],
    target: Any,
    touched: Any,
    dst: int,
    a0: int,
    t: int,
    b0: int,
    room: Any,
) -> int:
    size = item_bytes(table.program.wire)
    vs, turns = 16 // size, 2 if size == 2 else 1
    wx = SIDE // vs
    wy = THREADS // wx
    total, (line0, col0) = 0, divmod(dst, e["row"])
    x, y = THREAD % wx, THREAD // wx
    for k in range(SIDE // turns // wy):
        for r in range(turns):
            within = x[:, None] * vs + np.arange(vs)
            line = np.broadcast_to(((k * wy + y) * turns + r)[:, None], within.shape)
            out = room[
                2 * _word(within, line // 2) + line % 2
                if size == 2
                else within * (SIDE + 1) + line
            ]
            p, q = a0 + t * SIDE + line, b0 + within
            full = np.broadcast_to(
                bool(e["flags"] & STORE) & (q[:, :1] + vs <= e["nb"]), q.shape
            )
            for chosen, vector in ((full, vs), (~full, 1)):
                here = chosen & (p < e["na"]) & (q < e["nb"])
                if not here.any():
                    continue
                assert vector > 1 or not table.program.quick, (
                    "the quick kernel has no other way"
                )
                index = dst + along(e, p[here], "dsa1", "dsa2") + q[here] * e["dsb"]
                _write(target, touched, index, out[here], vector, True)
                u = weights(line0 + along(e, p[here], "line1", "line2"), LINE)
                total += _digest(
                    e, out[here], index, u, weights(col0 + q[here] * e["dsb"], COLUMN)
                )
    return total

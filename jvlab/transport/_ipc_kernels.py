"""The CUDA kernels of the ipc transport, and their launches: tables on the device, one launch per form and dtypes.

A block finds its entry by a search over first blocks, then copies lines ("rows") or turns tiles ("tiles"), converts,
and adds what it wrote to a digest of its target. tests/transport/ipc_interpreter.py does the same arithmetic in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.layout._digest import COLUMN, LINE, PLACE
from jvlab.layout._plan import item_bytes
from jvlab.transport import _ipc_tables as ipc
from jvlab.transport._ipc_source import SOURCE
from jvlab.transport._ipc_tables import AT, FIELDS, FLOATS, THREADS, Program, Table

STRIPES = 8  # sums per digest: blocks of one large parameter would queue for a single one
SHARED = ("THREADS", "SIDE", "DEEP", "STEPS", "OUTER", "SEPARABLE", "LOAD", "STORE")  # numbers of the tables


def cupy() -> Any:
    """The cupy module, or an error that says what to install."""
    try:
        import cupy as module
    except ImportError as e:
        raise MissingDependency("transport ipc needs cupy", remedy="pip install cupy-cuda12x or cupy-cuda13x") from e
    return module


def defines(program: Program, write: bool, digest: bool) -> tuple[str, ...]:
    """What the source is compiled with for one program."""
    same = program.source == program.wire
    raw = same and not program.computes
    values = {
        "S_BYTES": item_bytes(program.source), "D_BYTES": item_bytes(program.wire),
        "SRC": 0 if raw else FLOATS[program.source], "DST": 0 if raw else FLOATS[program.wire],
        "COMPUTES": int(program.computes), "QUICK": int(program.quick), "WRITE": int(write), "DIGEST": int(digest),
        "FIELDS": len(FIELDS), "STRIPES": STRIPES, "LINE": f"{LINE}u", "COLUMN": f"{COLUMN}u",
        "PLACE_1": f"{int(PLACE[1])}ull", **{f"F_{name}": k for name, k in AT.items()},
        **{name: getattr(ipc, name) for name in SHARED},
    }  # fmt: skip
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def _module(options: tuple[str, ...]) -> Any:
    return cupy().RawModule(code=SOURCE, options=("-std=c++17", *options))


@cache
def compiled(program: Program, write: bool, digest: bool, device: int) -> Any:
    """The kernel of a program; compiled at its first use on a device, then kept on disk by cupy."""
    if program.source == program.wire and not program.computes:  # as bits: dtypes of one width share a kernel
        name = f"uint{8 * item_bytes(program.source)}"
        program = replace(program, source=name, wire=name)
    return _module(defines(program, write, digest)).get_function(program.form)


class Launcher:
    """Tables of one device, uploaded once; `launch` runs them all on a stream. Use it with that device current."""

    def __init__(self, device: int, tables: Sequence[Table], slots: int, write: bool = True) -> None:
        cp = cupy()
        self.device, self.slots, self._write = device, slots, write
        self.nbytes = sum(t.nbytes for t in tables)
        self._kernels: dict[bool, list[Any]] = {}  # with digests, or without
        with cp.cuda.Device(device):
            self._tables = [
                (t.program, t.blocks, cp.asarray(t.entries), cp.asarray(t.first), np.int32(len(t.first)))
                for t in sorted(tables, key=lambda t: -t.nbytes)
            ]
            self._sums = cp.zeros(slots * STRIPES + 1, dtype=np.uint64)  # the last counts blocks that were refused
            self._pinned = cp.cuda.alloc_pinned_memory(self._sums.nbytes)  # brought along by the stream itself
            self._found = np.frombuffer(self._pinned, np.uint64, self._sums.size)
            self._refused = self._sums[-1:]
            cp.cuda.get_current_stream().synchronize()

    def warm(self, digests: Sequence[bool] | None = None) -> None:
        """Compile everything now, so that the first sync needn't; `digests`: only launches with or without them."""
        with cupy().cuda.Device(self.device):
            for program, *_ in self._tables:
                for digest in {not self._write, True} if digests is None else digests:
                    compiled(program, self._write, digest, self.device)

    def clear(self, stream: Any) -> None:
        """Sums are zero from here on, in the order of the stream; once for each launch."""
        with cupy().cuda.Device(self.device), stream:
            self._sums.data.memset_async(0, self._sums.nbytes, stream)  # fill() would compile a kernel

    def launch(
        self, stream: Any, sources: Any, targets: Any, *, digest: bool = True, permit: int = 0, version: int = 0,
        cleared: bool = False,
    ) -> None:  # fmt: skip
        """Everything, in the order of the stream; `sources` and `targets` are device arrays of pointers."""
        if not cleared:
            self.clear(stream)
        with cupy().cuda.Device(self.device), stream:
            if digest not in self._kernels:
                self._kernels[digest] = [compiled(t[0], self._write, digest, self.device) for t in self._tables]
            last = (self._sums, np.uint64(permit), np.uint64(version), self._refused)
            for kernel, (_, blocks, entries, first, count) in zip(self._kernels[digest], self._tables, strict=True):
                kernel((blocks,), (THREADS,), (entries, first, count, sources, targets, *last))
            self._sums.data.copy_to_host_async(self._pinned.ptr, self._sums.nbytes, stream)

    def sums(self, stream: Any) -> np.ndarray:
        """Waits for the stream; digests by slot, modulo 2**64 as they are."""
        stream.synchronize()
        return self._found[:-1].reshape(self.slots, STRIPES).sum(axis=1, dtype=np.uint64)

    def refused(self, stream: Any) -> int:
        """Waits for the stream; how many blocks found no permit."""
        stream.synchronize()
        return int(self._found[-1])

"""The CUDA kernels of the ipc transport, and their launches: tables on the device, one launch per form and dtypes.

A block finds its entry by a search over first blocks, then copies lines ("rows") or transposes tiles ("tiles"),
converts, and adds what it wrote to a digest of its target; NaN or Inf sets the target's flag.
tests/transport/ipc_interpreter.py does the same arithmetic in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.layout._digest import COLUMN, LINE, PLACE, exponent
from jvlab.layout._plan_types import item_bytes
from jvlab.transport import _ipc_tables as ipc
from jvlab.transport._ipc_source import SOURCE
from jvlab.transport._ipc_tables import AT, FIELDS, FLOATS, THREADS, Program, Table

# partial sums per digest: blocks of a large parameter would contend for a single one
STRIPES = 8
# constants shared with the tables
SHARED = ("THREADS", "SIDE", "DEEP", "STEPS", "OUTER", "SEPARABLE", "LOAD", "STORE")


def cupy() -> Any:
    """The cupy module, or an error that says what to install."""
    try:
        import cupy as module
    except ImportError as e:
        raise MissingDependency(
            "transport ipc needs cupy",
            remedy="pip install cupy-cuda12x or cupy-cuda13x",
        ) from e
    return module


def shared(program: Program, look: bool) -> Program:
    """The program whose kernel this one can use: values moved as bits share one kernel per width, unless checked."""
    if (
        program.source != program.wire
        or program.computes
        or (look and exponent(program.wire))
    ):
        return program
    name = f"uint{8 * item_bytes(program.source)}"
    return replace(program, source=name, wire=name)


def defines(program: Program, write: bool, digest: bool, look: bool) -> tuple[str, ...]:
    """The compiler options for one program; `look`: check for values that are not finite."""
    same = program.source == program.wire
    raw = same and not program.computes
    bits = exponent(program.wire) if look else 0
    values = {
        "EXPONENT": f"{bits >> 32 if item_bytes(program.wire) == 8 else bits}u",
        "S_BYTES": item_bytes(program.source),
        "D_BYTES": item_bytes(program.wire),
        "SRC": 0 if raw else FLOATS[program.source],
        "DST": 0 if raw else FLOATS[program.wire],
        "COMPUTES": int(program.computes),
        "QUICK": int(program.quick),
        "WRITE": int(write),
        "DIGEST": int(digest),
        "FIELDS": len(FIELDS),
        "STRIPES": STRIPES,
        "LINE": f"{LINE}u",
        "COLUMN": f"{COLUMN}u",
        "PLACE_1": f"{int(PLACE[1])}ull",
        **{f"F_{name}": k for name, k in AT.items()},
        **{name: getattr(ipc, name) for name in SHARED},
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def _module(options: tuple[str, ...]) -> Any:
    return cupy().RawModule(code=SOURCE, options=("-std=c++17", *options))


@cache
def compiled(
    program: Program, write: bool, digest: bool, look: bool, device: int
) -> Any:
    """The kernel of a program; compiled on first use on a device, then cached on disk by cupy."""
    program = shared(program, look)
    return _module(defines(program, write, digest, look)).get_function(program.form)


class Launcher:
    """Tables of one device, uploaded once; `launch` runs them all on a stream. Use it with that device current.

    `look`: also check for values that are not finite.
    """

    def __init__(
        self,
        device: int,
        tables: Sequence[Table],
        slots: int,
        write: bool = True,
        look: bool = True,
    ) -> None:
        cp = cupy()
        self.device = device
        self.slots = slots
        self._write = write
        self._look = look
        self.nbytes = sum(t.nbytes for t in tables)
        self._kernels: dict[bool, list[Any]] = {}  # with digests, or without
        with cp.cuda.Device(device):
            self._tables = [
                (
                    t.program,
                    t.blocks,
                    cp.asarray(t.entries),
                    cp.asarray(t.first),
                    np.int32(len(t.first)),
                )
                for t in sorted(tables, key=lambda t: -t.nbytes)
            ]
            # sums of the digests, how many blocks were refused, a flag for each slot
            self._sums = cp.zeros(slots * STRIPES + 1 + slots, dtype=np.uint64)
            # copied by the stream itself
            self._pinned = cp.cuda.alloc_pinned_memory(self._sums.nbytes)
            self._found = np.frombuffer(self._pinned, np.uint64, self._sums.size)
            self._refused = self._sums[slots * STRIPES :]
            cp.cuda.get_current_stream().synchronize()

    def warm(self, digests: Sequence[bool] | None = None) -> None:
        """Compile everything now, not in the first sync; `digests`: only launches with or without them."""
        with cupy().cuda.Device(self.device):
            for program, *_ in self._tables:
                for digest in {not self._write, True} if digests is None else digests:
                    compiled(program, self._write, digest, self._look, self.device)

    def clear(self, stream: Any) -> None:
        """Zero the sums, in stream order; once before each launch."""
        with cupy().cuda.Device(self.device), stream:
            # fill() would compile a kernel
            self._sums.data.memset_async(0, self._sums.nbytes, stream)

    def launch(
        self,
        stream: Any,
        sources: Any,
        targets: Any,
        *,
        digest: bool = True,
        permit: int = 0,
        version: int = 0,
        cleared: bool = False,
    ) -> None:
        """Launch everything, in stream order; `sources` and `targets` are device arrays of pointers."""
        if not cleared:
            self.clear(stream)
        with cupy().cuda.Device(self.device), stream:
            if digest not in self._kernels:
                options = self._write, digest, self._look, self.device
                self._kernels[digest] = [compiled(t[0], *options) for t in self._tables]
            last = (self._sums, np.uint64(permit), np.uint64(version), self._refused)
            for kernel, (_, blocks, entries, first, count) in zip(
                self._kernels[digest], self._tables, strict=True
            ):
                kernel(
                    (blocks,),
                    (THREADS,),
                    (entries, first, count, sources, targets, *last),
                )
            self._sums.data.copy_to_host_async(
                self._pinned.ptr, self._sums.nbytes, stream
            )

    def sums(self, stream: Any) -> np.ndarray:
        """Waits for the stream; digests by slot, modulo 2**64."""
        stream.synchronize()
        of_slots = self._found[: self.slots * STRIPES].reshape(self.slots, STRIPES)
        return of_slots.sum(axis=1, dtype=np.uint64)

    def refused(self, stream: Any) -> int:
        """Waits for the stream; how many blocks had no permit to write."""
        stream.synchronize()
        return int(self._found[self.slots * STRIPES])

    def flawed(self, stream: Any) -> list[int]:
        """Waits for the stream; the slots with a NaN or Inf among the converted values."""
        stream.synchronize()
        return np.flatnonzero(self._found[self.slots * STRIPES + 1 :]).tolist()

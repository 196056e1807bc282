"""libnccl through ctypes: non-blocking communicators of two, so that every wait can be monitored and aborted.

Why not `cupy.cuda.nccl`: its communicators block. A blocked ncclCommInitRank has no handle yet for commAbort, and a
first send blocks until the peer connects. `ncclConfig_t.blocking = 0` avoids this, but cupy does not expose it. The
library is the one that this process has loaded already (torch's in a vLLM worker), if any.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from jvlab._errors import MissingDependency, TransportError

SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1  # ncclUint8
ID_BYTES = 128
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400  # the first version with `blocking`; newer ones default the rest


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config),
    ],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [ctypes.c_void_p],
    "ncclSend": [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ],
    "ncclRecv": [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ],
}  # fmt: skip


def _candidates() -> list[tuple[str, int]]:
    """Library names with dlopen modes: already loaded, the wheel that torch and JAX use, the system's."""
    found = [("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "lib" / "libnccl.so.2"
        if path.is_file():
            found.append((str(path), ctypes.DEFAULT_MODE))
    return [*found, ("libnccl.so.2", ctypes.DEFAULT_MODE)]


@cache
def library() -> ctypes.CDLL:
    """libnccl, or an error that says what to install."""
    why = ""
    for name, mode in _candidates():
        try:
            found = ctypes.CDLL(name, mode=mode)
            for function, arguments in _FUNCTIONS.items():
                getattr(found, function).argtypes = arguments
            found.ncclGetErrorString.restype = ctypes.c_char_p
            return found
        except (OSError, AttributeError) as e:  # AttributeError: older than 2.14
            why = str(e)
    raise MissingDependency(
        f"transport nccl needs NCCL 2.14 or newer: {why}", remedy="pip install nvidia-nccl-cu13 or nvidia-nccl-cu12"
    )


def version_text(number: int) -> str:
    """22907 → 2.29.7"""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def check(code: int, what: str) -> int:
    """The code, if it is not an error."""
    if code in (SUCCESS, IN_PROGRESS):
        return code
    text = library().ncclGetErrorString(code).decode()
    raise TransportError(
        f"nccl: {what} failed: {text} (code {code})",
        transport="nccl",
        code=code,
        reason="nccl",
        remedy="set NCCL_DEBUG=WARN on both sides for details. Two processes on one GPU need different "
        "NCCL_HOSTIDs, set before either uses NCCL; NCCL_SOCKET_IFNAME chooses the network interface",
    )


def version() -> int:
    """The version of the loaded library; both sides must have the same."""
    number = ctypes.c_int()
    check(library().ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
    return number.value


def unique_id() -> bytes:
    """An id that both ends join by; this process holds a thread and a port until both have joined."""
    out = _Id()
    check(library().ncclGetUniqueId(ctypes.byref(out)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(out), ID_BYTES)


class Communicator:
    """One end of a group of two. No call waits for the peer; `ready` tells when the last one has completed.

    Calls are serialised, because an abort from another thread frees what they use.
    """

    def __init__(self, identity: bytes, rank: int) -> None:
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        own = _Id()
        ctypes.memmove(ctypes.byref(own), identity, ID_BYTES)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        code = library().ncclCommInitRankConfig(ctypes.byref(self._comm), 2, own, rank, ctypes.byref(config))
        check(code, "ncclCommInitRankConfig")
        self._peer = 1 - rank

    def ready(self) -> bool:
        """Whether the last call has completed. Raises its error, or a later one."""
        state = ctypes.c_int()
        with self._lock:
            check(library().ncclCommGetAsyncError(self._alive(), ctypes.byref(state)), "ncclCommGetAsyncError")
        return check(state.value, "a transfer") == SUCCESS

    def send(self, pointer: int, nbytes: int, stream: int) -> None:
        with self._lock:
            check(library().ncclSend(pointer, nbytes, UINT8, self._peer, self._alive(), stream), "ncclSend")

    def recv(self, pointer: int, nbytes: int, stream: int) -> None:
        with self._lock:
            check(library().ncclRecv(pointer, nbytes, UINT8, self._peer, self._alive(), stream), "ncclRecv")

    def _alive(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise TransportError("nccl: this communicator was ended", remedy="open a new channel", reason="closed here")
        return self._comm

    def abort(self) -> None:
        """Abort everything in flight, kernels included, and free the communicator. Idempotent."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None and comm.value:
            library().ncclCommAbort(comm)  # its result no longer matters

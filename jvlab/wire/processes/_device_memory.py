"""Who holds a GPU's memory, for errors that say that none is left: labs of this user first, then other processes.

The processes are those that the driver's `nvidia-smi` lists. In a container it may list none, or ids of the host.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jvlab._errors import DeviceMemoryError
from jvlab._units import human_bytes

LIST_SECONDS = 10.0
_FULL = re.compile(
    r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory|CUDA error: out of memory|"
    r"Free memory on device .* is less than desired|No available memory for the cache blocks",
    re.DOTALL,
)
_JAX_ERRORS = ("XlaRuntimeError", "JaxRuntimeError")


@dataclass(frozen=True)
class DeviceHolder:
    """A process that holds memory of a GPU. `lab` is its lab, if it is one of this user's."""

    pid: int
    bytes: int  # on all GPUs; 0 if the driver does not tell
    name: str = ""  # of its program; empty if it cannot be seen from here
    lab: str = ""
    own: bool = False  # this process, or a lab that it started

    def __str__(self) -> str:
        size = f", {human_bytes(self.bytes)}" if self.bytes else ""
        if self.lab:
            return f"lab {self.lab}{', of this process' if self.own else ''} (pid {self.pid}{size})"
        return f"{'this process' if self.own else self.name or 'a process'} (pid {self.pid}{size})"


def is_full(text: str) -> bool:
    """Whether an error of XLA, PyTorch or vLLM says that a device has too little free memory."""
    return _FULL.search(text) is not None


def explained(error: BaseException) -> BaseException:
    """XLA's error about a full device as ours, which says who holds it; any other error as it is."""
    if type(error).__name__ not in _JAX_ERRORS or not is_full(str(error)):
        return error
    first = str(error).strip().splitlines()[0]
    held, remedy = who_holds(
        "use a smaller batch or model, or remat='full'; `jvlab doctor` shows memory"
    )
    made = DeviceMemoryError(
        f"the trainer's device has no memory left: {first}{held}",
        remedy=remedy,
        holders=device_holders(),
    )
    made.__cause__ = error
    return made


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """`explained` errors of a block, or of a function that it decorates."""
    try:
        yield
    except Exception as error:
        told = explained(error)
        if told is error:
            raise
        raise told from error


def who_holds(otherwise: str) -> tuple[str, str]:
    """(a sentence to append to the error, what to do); `otherwise` is the remedy if nobody else holds anything."""
    found = device_holders()
    if not found:
        return "", otherwise
    text = f"\nThe GPU's memory is held by {'; '.join(map(str, found))}"
    labs = list(
        dict.fromkeys(holder.lab for holder in found if holder.lab and not holder.own)
    )
    others = [str(holder.pid) for holder in found if not holder.lab and not holder.own]
    steps = [f"`jvlab stop {lab}` ends that lab" for lab in labs]
    if others:
        steps.append(f"if nobody needs {', '.join(others)}: kill {' '.join(others)}")
    if any(holder.lab and holder.own for holder in found):
        steps.append(
            "pool.sleep() or pool.close() frees an engine's share, launch(colocate=True) limits both"
        )
    return text, "; ".join([*steps, otherwise])


def device_holders() -> list[DeviceHolder]:
    """The processes that hold GPU memory, labs of this user first; empty if the driver lists none."""
    sizes = parse_compute_apps(_compute_apps())
    return name_holders(sizes, _lab_processes()) if sizes else []


def _compute_apps() -> str:
    """What nvidia-smi lists; empty if there is no driver, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [
        tool,
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIST_SECONDS,
            stdin=subprocess.DEVNULL,
        ).stdout
    return ""


def parse_compute_apps(listing: str) -> dict[int, int]:
    """Bytes by process id, of lines "pid, MiB"; a size that the driver does not tell counts as 0."""
    sizes: dict[int, int] = {}
    for line in listing.splitlines():
        pid, _, mib = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            sizes[int(pid)] = sizes.get(int(pid), 0) + (
                int(mib) * 2**20 if mib.isdigit() else 0
            )
    return sizes


def _lab_processes() -> dict[int, tuple[str, bool]]:
    """(name of the lab, whether this process started it) by process id, of every lab of this user on this machine."""
    import psutil

    from jvlab.wire.processes._identity import Identity
    from jvlab.wire.processes._labs import list_labs, processes_below

    found = {}
    for info in list_labs(query=False):
        gateway = (
            Identity(info.pid, info.host, info.started).process()
            if info.state == "running"
            else None
        )
        with contextlib.suppress(psutil.Error):
            if gateway is not None:
                own = gateway.ppid() == os.getpid()
                found |= {
                    process.pid: (info.name, own)
                    for process in (gateway, *processes_below(gateway))
                }
    return found


def name_holders(
    sizes: Mapping[int, int], labs: Mapping[int, tuple[str, bool]]
) -> list[DeviceHolder]:
    """Who these processes are: other labs first, then other processes, then this process and its own labs."""
    found = []
    for pid, size in sizes.items():
        lab, own = labs.get(pid, ("", pid == os.getpid()))
        found.append(DeviceHolder(pid, size, _program(pid), lab, own))
    return sorted(found, key=lambda holder: (holder.own, not holder.lab, -holder.bytes))


def _program(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""

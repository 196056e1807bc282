"""The processes of a lab as rows: gateway, replicas and their workers, with memory if they run on this machine."""

from __future__ import annotations

import contextlib
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jvlab.views._palette import TONES
from jvlab.views._style import GOOD, IDLE
from jvlab.wire._pool_summary import replica_health
from jvlab.wire.processes._identity import Identity

if TYPE_CHECKING:
    import psutil

    from jvlab.wire._client import Client

WORKER = "VLLM::"  # prefix of the names of vLLM's engine core and ranks
TRACKER = "multiprocessing.resource_tracker"
RESCAN_SECONDS = 5.0  # between scans of a replica's process tree, each of which reads every process of the machine
DESCRIBE_SECONDS = 5.0  # deadline of the one call: the gateway answers from memory


def describe(client: Client, seconds: float) -> Any:
    """The lab's status, or an error within the time: a client that is being closed may never reply."""
    from jvlab.wire import jvlab_pb2 as pb

    return client.loop.submit(client.acall("Describe", pb.DescribeRequest(), seconds)).result(seconds + 1.0)


@dataclass(frozen=True)
class ProcessRow:
    """One process. A number that does not apply, or is not known on this machine, is None."""

    kind: str  # "gateway", "replica" or "worker"
    name: str
    pool: str
    state: str
    colour: str
    pid: int
    device: str
    memory: int | None = None  # resident bytes
    version: int | None = None
    dirty: bool = False
    beat_age: float | None = None  # seconds since its last heartbeat
    in_flight: int | None = None
    tokens_per_s: float | None = None
    cause: str = ""


class ProcessRows:
    """Reads the rows repeatedly, with one call to the gateway each time; psutil's handles are kept."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._workers: dict[int, tuple[float, list[psutil.Process]]] = {}
        self._handles: dict[int, psutil.Process] = {}

    def read(self) -> tuple[Any, list[ProcessRow]]:
        """The lab's status as the gateway reports it, and a row per process."""
        status = describe(self._client, DESCRIBE_SECONDS)
        # the gateway started the others, so that they are local if it is
        local = Identity(status.pid, status.host, status.started).process() is not None
        rows = [
            ProcessRow(
                "gateway",
                f"gateway {status.lab}",
                "",
                "serving",
                GOOD,
                status.pid,
                "cpu",
                self._memory(status.pid) if local else None,
            )
        ]
        for pool in status.pools:
            if not pool.closed:
                for replica in pool.replicas:
                    rows += self._replica(pool, replica, local)
        return status, rows

    def _replica(self, pool: Any, r: Any, local: bool) -> list[ProcessRow]:
        words, tone = replica_health(r, pool.sync)
        colour = TONES[tone]
        local = local and r.pid > 0 and (not r.elsewhere or r.facts.host == platform.node())
        ready = r.stage == "ready"
        row = ProcessRow(
            "replica",
            r.replica,
            pool.pool,
            words,
            colour,
            r.pid,
            pool.device,
            self._memory(r.pid) if local else None,
            int(r.stats.weight_version) if ready else None,
            r.dirty,
            r.beat_age if ready and r.beat_age >= 0 else None,
            r.routed if ready else None,
            r.stats.tokens_per_s if ready else None,
            r.cause,
        )
        return [row, *(self._worker(pool, p) for p in (self._descendants(r.pid) if local else []))]

    def _worker(self, pool: Any, process: psutil.Process) -> ProcessRow:
        memory = self._memory(process.pid)
        state, colour = ("running", GOOD) if memory is not None else ("gone", IDLE)
        return ProcessRow("worker", _worker_name(process), pool.pool, state, colour, process.pid, pool.device, memory)

    def _descendants(self, pid: int) -> list[psutil.Process]:
        """vLLM's processes below a replica."""
        import psutil

        scanned, found = self._workers.get(pid, (0.0, []))
        if time.monotonic() - scanned > RESCAN_SECONDS or not scanned:
            found = []
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        # a forked one keeps its parent's name; multiprocessing's resource tracker holds nothing
                        if child.name().startswith((WORKER, "python")) and TRACKER not in " ".join(child.cmdline()):
                            found.append(child)
            self._workers = {p: kept for p, kept in self._workers.items() if psutil.pid_exists(p)}
            self._workers[pid] = (time.monotonic(), found)
        return found

    def _memory(self, pid: int) -> int | None:
        import psutil

        try:
            if pid not in self._handles:
                self._handles[pid] = psutil.Process(pid)
            return self._handles[pid].memory_info().rss
        except psutil.Error:
            self._handles.pop(pid, None)
            return None


def _worker_name(process: psutil.Process) -> str:
    import psutil

    try:
        name = process.name()
        return name.removeprefix(WORKER) if name.startswith(WORKER) else "EngineCore"
    except psutil.Error:
        return "worker"

"""`Senders`: the interface shared by sending buckets over channels and writing by CUDA IPC."""

# ruff: noqa: B027 (hooks that only ipc needs do nothing elsewhere)

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab.layout._digest import MASK
from jvlab.layout._finite import Flawed
from jvlab.layout._plan import TransferPlan
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._direct_client import DirectStream

Exports = Mapping[str, Iterable[dict[str, Any]]]  # replica -> what each rank exported


@dataclass
class Sent:
    """What was sent and how long it took. Digests are by target of the plan and equal for every replica."""

    bytes: int = 0
    buckets: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"pack": 0.0, "copy": 0.0, "digest": 0.0, "move": 0.0})
    digests: dict[int, int] = field(default_factory=dict)
    flawed: Flawed = field(default_factory=set)  # leaves with NaN or Inf
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self.lock:
                self.seconds[name] += time.perf_counter() - start

    def add_digests(self, parts: dict[int, int]) -> None:
        with self.lock:
            for target, value in parts.items():
                self.digests[target] = (self.digests.get(target, 0) + value) & MASK

    def add_flawed(self, found: Flawed) -> None:
        with self.lock:
            self.flawed |= found


class Senders(ABC):
    """What one trainer process sends to the ranks of each replica.

        open()                                    once, while the gateway opens the other ends
        settle() gather() attach() send_all()     once per sync, or send() and settle_jobs() step by step
        close()                                   also after errors; can be called twice

    `channels` are in order of replicas and ranks; each has a replica, a rank, a sender, jobs.
    """

    plan: TransferPlan
    channels: Sequence[Any]
    digest_replica: str  # digests are taken of what goes to this replica: the others get the same
    no_direct = ""  # why live memory can't be written from here; empty if it can

    def __init__(self, plan: TransferPlan, replicas: Mapping[str, int]) -> None:
        self.plan, self.digest_replica = plan, next(iter(replicas), "")
        self._named: dict[tuple[int, ...], list[tuple[str, int]]] = {}

    @property
    def replicas(self) -> dict[str, list[Any]]:
        """The channels by replica, in order of ranks."""
        out: dict[str, list[Any]] = {}
        for channel in self.channels:
            out.setdefault(channel.replica, []).append(channel)
        return out

    def named(self, targets: tuple[int, ...]) -> list[tuple[str, int]]:
        """(parameter, rank) of these targets; cached, since every sync asks for the same ones."""
        if targets not in self._named:
            self._named[targets] = by_parameter(self.plan, targets)
        return self._named[targets]

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of one sync, to all replicas."""

    @abstractmethod
    def source(self, params: Any) -> Any:
        """A tree of parameters as these senders read it; raises if it does not match the connected one."""

    @abstractmethod
    def open(self, order: Callable[[], pb.LinkReply], deadline: Deadline) -> pb.LinkReply:
        """Open both ends; `order` asks the gateway to open the replicas' ends."""

    @abstractmethod
    def ready(self, seconds: float) -> None:
        """Wait until every rank has opened its end."""

    def direct_orders(self, reply: pb.LinkReply) -> DirectStream | None:
        """The replica's own socket for orders, if it has one and the transport is fast enough to need it."""
        return None

    def settle(self, source: Any, staged: bool) -> None:
        """Wait for arrays that are still being computed, before the sync pauses the engines."""

    def gather(self, source: Any, digest: bool) -> None:
        """Prepare what can be prepared while the engines pause."""

    def attach(self, exports: Exports) -> None:
        """Map the memory that ranks exported, if any."""

    @abstractmethod
    def send(
        self, job: Any, channel: Any, source: Any, version: int, seconds: float, sent: Sent, digest: bool
    ) -> Callable[[], None] | None:
        """Send one job; returns a function that computes its digest, if that is left to do. `settle_jobs` follows."""

    @abstractmethod
    def settle_jobs(self, jobs: Iterable[Any], channel: Any, sent: Sent, seconds: float) -> None:
        """Wait until these jobs have arrived, and add their non-finite leaves to `sent`."""

    @abstractmethod
    def send_all(
        self,
        source: Any,
        version: int,
        seconds: float,
        digest: bool = True,
        progress: Callable[[Sent], None] = lambda _: None,
        collect: bool = True,
    ) -> Sent:
        """Send everything to every rank; returns on arrival. Without `collect`, results may be left for `collect()`."""

    def collect(self, sent: Sent) -> None:
        """Add the results that `send_all` left to `sent`."""

    def claims(self, sent: Sent) -> bytes:
        """Digests of what was sent, in the order in which the ranks report theirs."""
        values = [sent.digests[t] for channel in self.replicas[self.digest_replica] for t in channel.targets]
        return np.array(values, np.uint64).tobytes()

    @abstractmethod
    def digests(self, source: Any) -> dict[int, int]:
        """By target, the digests of this process's part of these parameters; nothing is sent."""

    def release_shadows(self) -> None:
        """Unmap the shadow buffers of staged syncs before the engines free them."""

    @abstractmethod
    def close(self) -> None:
        """Close every channel. Can be called twice."""


def by_parameter(plan: TransferPlan, targets: Iterable[int]) -> list[tuple[str, int]]:
    """(parameter, rank) of targets of a plan."""
    return [(plan.parameters[plan.target_parameter[t]].name, int(plan.target_rank[t])) for t in targets]

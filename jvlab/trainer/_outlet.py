"""Where the trainer's bytes leave: the channels of one link, and the threads that feed them while a sync is on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from jvlab._errors import DeadlineExceeded
from jvlab.layout._digest import MASK
from jvlab.layout._plan import TransferPlan
from jvlab.trainer._pack import LinkPack, Source
from jvlab.transport._channel import Header, Sender

WAITING_DIGESTS = 2  # buckets whose digest is still to be taken: what bounds the memory of computed boxes


@dataclass(frozen=True)
class Job:
    """One bucket to send."""

    pack: LinkPack
    bucket: int

    @property
    def nbytes(self) -> int:
        return self.pack.sizes[self.bucket]


@dataclass
class Channel:
    """One replica's rank: its sender and what goes to it, in the order in which parameters fill up."""

    replica: str
    rank: int
    sender: Sender
    jobs: list[Job] = field(repr=False)
    sent: int = 0


@dataclass
class Sent:
    """What was sent, and where the time went. Digests by target of the plan; equal for every replica."""

    bytes: int = 0
    buckets: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"pack": 0.0, "copy": 0.0, "digest": 0.0, "move": 0.0})
    digests: dict[int, int] = field(default_factory=dict)
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


MakePack = Callable[[TransferPlan, int, int, int], LinkPack]  # plan, device, rank, replica


def jobs_of(
    plan: TransferPlan, rank: int, index: int, pack: MakePack = LinkPack, process: int | None = None
) -> list[Job]:
    """Every bucket for one rank of one replica: parameter by parameter over all devices, so that each is whole soon."""
    table = plan.links(index)
    mine = [d for d in table.device[table.rank == rank].tolist() if process in (None, plan.process_of(d))]
    packs = [pack(plan, d, rank, index) for d in mine]
    keyed = [(min(p.targets(b), default=-1), n, b) for n, p in enumerate(packs) for b in range(len(p.sizes))]
    return [Job(packs[n], b) for _, n, b in sorted(keyed)]


class Outlet:
    """The channels of one link. `make` opens a sender for buckets of up to so many bytes, to a rank of a replica.

    `pack` makes the packer of a device's link; `process`: only what that trainer process holds is sent.
    """

    def __init__(
        self,
        plan: TransferPlan,
        replicas: dict[str, int],
        make: Callable[[int, str, int], Sender],
        pack: MakePack = LinkPack,
        process: int | None = None,
    ) -> None:
        self.plan = plan
        self.channels: list[Channel] = []
        try:
            for name, index in replicas.items():
                for rank in range(plan.ranks):
                    jobs = jobs_of(plan, rank, index, pack, process)
                    room = max((job.nbytes for job in jobs), default=1)
                    self.channels.append(Channel(name, rank, make(room, name, rank), jobs))
        except BaseException:
            self.close()
            raise
        self.witness = next(iter(replicas), "")  # digests are taken of what goes to this replica

    @property
    def replicas(self) -> dict[str, list[Channel]]:
        """The channels by replica, in order of ranks."""
        out: dict[str, list[Channel]] = {}
        for channel in self.channels:
            out.setdefault(channel.replica, []).append(channel)
        return out

    @property
    def total_bytes(self) -> int:
        return sum(job.nbytes for channel in self.channels for job in channel.jobs)

    def ready(self, deadline: float) -> None:
        """Wait until every rank has opened its end."""
        until = time.monotonic() + deadline
        for channel in self.channels:
            channel.sender.ready(max(0.1, until - time.monotonic()))

    def send(
        self, job: Job, channel: Channel, source: Source, version: int, deadline: float, sent: Sent, digest: bool
    ) -> Callable[[], None] | None:
        """One bucket; returns the work of its digest, to be done now or elsewhere."""
        pack, bucket = job.pack, job.bucket
        with sent.timed("pack"):
            values = pack.values(bucket, source)

        def fill(room: memoryview) -> None:
            with sent.timed("copy"):
                pack.write(bucket, values, room)

        channel.sender.send(Header(version, pack.device, bucket, job.nbytes), fill, deadline)
        channel.sent += 1
        with sent.lock:
            sent.bytes += job.nbytes
            sent.buckets += 1
        if not digest or channel.replica != self.witness:
            return None

        def take() -> None:
            with sent.timed("digest"):
                sent.add_digests(pack.digests(bucket, values))

        return take

    def send_all(
        self,
        source: Source,
        version: int,
        deadline: float,
        digest: bool = True,
        progress: Callable[[Sent], None] = lambda _: None,
    ) -> Sent:
        """Every bucket to every rank, a thread for each channel; returns when all of them were released there.

        Whatever goes wrong on one channel, or a KeyboardInterrupt here, ends all of them.
        """
        sent, until, stop = Sent(), time.monotonic() + deadline, threading.Event()
        room = threading.Semaphore(WAITING_DIGESTS)
        start = time.perf_counter()
        with ThreadPoolExecutor(len(self.channels) + 1, "jvlab-send") as threads:
            digests: list[Future[None]] = []

            def taken(take: Callable[[], None]) -> None:
                try:
                    take()
                finally:
                    room.release()

            def feed(channel: Channel) -> None:
                for job in channel.jobs:
                    if stop.is_set():
                        return
                    take = self.send(job, channel, source, version, _left(until, channel), sent, digest)
                    if take is not None:
                        room.acquire()
                        digests.append(digesting.submit(taken, take))
                channel.sender.flush(_left(until, channel))

            with ThreadPoolExecutor(1, "jvlab-digest") as digesting:
                futures = [threads.submit(feed, channel) for channel in self.channels]
                try:
                    pending = set(futures)
                    while pending:
                        done, pending = wait(pending, 0.2, FIRST_EXCEPTION)
                        progress(sent)
                        for future in done:
                            future.result()
                    sent.seconds["move"] = time.perf_counter() - start
                    for future in digests:
                        future.result()
                except BaseException:
                    stop.set()
                    self.close()  # ends every wait of the other threads
                    raise
        sent.seconds["sent"] = time.perf_counter() - start
        progress(sent)
        return sent

    def close(self) -> None:
        """Close every channel. Can be called twice."""
        for channel in self.channels:
            channel.sender.close()


def _left(until: float, channel: Channel) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            f"the sync's deadline passed while rank {channel.rank} of {channel.replica} was waited for",
            remedy="pass a larger timeout=, or look at pool.logs()",
        )
    return left


def by_parameter(plan: TransferPlan, targets: Iterable[int]) -> list[tuple[str, int]]:
    """(parameter, rank) of targets of a plan."""
    return [(plan.parameters[plan.target_parameter[t]].name, int(plan.target_rank[t])) for t in targets]

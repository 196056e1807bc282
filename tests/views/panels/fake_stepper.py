"""A stepper whose transaction moves nothing: two ranks, a handful of tensors, digests that may be wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jvlab._errors import SyncError, VerifyError
from jvlab.sync._stepper import Stepper
from jvlab.sync._transaction import CheckReport, Outcome, SyncReport
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import Terms

EVIL = "evil.<script>alert(1)</script>&"
NAMES = (
    "embed.weight",
    "layers.0.qkv.weight",
    "layers.0.mlp.weight",
    "layers.1.qkv.weight",
    "layers.1.mlp.weight",
    EVIL,
    "lm_head.weight",
)


class FakePack:
    def __init__(self, targets: list[int]) -> None:
        self._targets = targets

    def targets(self, bucket: int) -> list[int]:
        return self._targets


@dataclass
class FakeJob:
    pack: FakePack
    bucket: int
    nbytes: int


@dataclass
class FakeTransaction:
    """Records what was asked of it; `delay` seconds per tensor, `hang` until it is abandoned."""

    names: tuple[str, ...]
    mode: str = "direct"
    delay: float = 0.0
    wrong: tuple[str, ...] = ()
    log: list[str] = field(default_factory=list)
    hang: bool = False
    per_bucket: int = 1
    abandoned: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.terms = Terms(7, self.mode, bucket_seconds=10.0)
        sender = SimpleNamespace(flush=lambda timeout: None)
        count = len(self.names)
        self.channels = [
            SimpleNamespace(
                replica="p/0",
                rank=rank,
                sender=sender,
                jobs=[
                    FakeJob(
                        FakePack(
                            [
                                rank * count + j
                                for j in range(i, min(i + self.per_bucket, count))
                            ]
                        ),
                        i,
                        1000 * (i + 1),
                    )
                    for i in range(0, count, self.per_bucket)
                ],
            )
            for rank in (0, 1)
        ]
        settle = lambda jobs, channel, sent, deadline: channel.sender.flush(deadline)
        self.senders = SimpleNamespace(
            channels=self.channels, send=self.send, settle_jobs=settle
        )
        self.source, self.sent, self.digesting = None, SimpleNamespace(), True
        self.inside = self.most_inside = 0

    def prepare(self) -> None:
        self.log.append("prepare")

    def send(self, job: FakeJob, channel: Any, *_: Any) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        time.sleep(self.delay)
        if self.hang:
            self.abandoned.wait(30)
            raise SyncError("the channel was closed")
        self.log.append(f"{self.names[job.bucket]}@{channel.rank}")
        self.inside -= 1

    def check_finite(self) -> None:
        """All is finite."""

    def expected(self, only: set[str] | None = None) -> list[pb.ReplicaDigests]:
        names = [n for n in self.names if only is None or n in only]
        return [
            pb.ReplicaDigests(
                replica="p/0", parameters=names * 2, ranks=[0, 1], values=[]
            )
        ]

    def verify(self) -> pb.LinkReply:
        self.log.append("verify")
        reply = pb.LinkReply(
            outcomes=[
                pb.ReplicaOutcome(
                    replica="p/0", differing=[f"{n} (rank 1)" for n in self.wrong]
                )
            ]
        )
        if self.wrong:
            raise VerifyError("digests differ", reply=reply)
        return reply

    def commit(self) -> None:
        self.log.append("commit")

    def report(self) -> SyncReport:
        return SyncReport(
            7, 56000, {"total": 0.5, "move": 0.25}, (Outcome("p/0", "committed", 7),)
        )


class FakeLink:
    """As much of a link and its coordinator as a stepper needs."""

    transport = "shm"

    def __init__(self, transaction: FakeTransaction) -> None:
        self.transaction, self._lock, self.stepper = (
            transaction,
            threading.RLock(),
            None,
        )
        count = len(transaction.names)
        self.plan = SimpleNamespace(
            parameters=[SimpleNamespace(name=n) for n in transaction.names],
            target_parameter=[*range(count), *range(count)],
            target_rank=[0] * count + [1] * count,
        )
        stats = pb.ReplicaStats(weight_version=6)
        replica = pb.ReplicaStatus(replica="p/0", stage="ready", stats=stats)
        snapshot = pb.PoolStatus(pool="p", replicas=[replica], sync="idle")
        self.pool = SimpleNamespace(
            name="p",
            snapshot=snapshot,
            look=lambda seconds: pb.LabStatus(),
            status=lambda timeout: None,
        )
        self.checked: list[set[str]] = []

    def exclusive(self, deadline: Any) -> Any:
        return self._lock

    def begin(self, *_: Any) -> FakeTransaction:
        return self.transaction

    def committed(
        self,
        report: SyncReport,
        transaction: FakeTransaction,
        params: Any,
        timeout: Any,
    ) -> SyncReport:
        return report

    def give_up(self, transaction: FakeTransaction) -> None:
        transaction.log.append("abandon")
        transaction.abandoned.set()

    def check(self, digests: list[pb.ReplicaDigests], deadline: Any) -> CheckReport:
        names = {name for of in digests for name in of.parameters}
        self.checked.append(names)
        bad = tuple(f"{n} (rank 0)" for n in self.transaction.wrong if n in names)
        return CheckReport(
            6,
            (Outcome("p/0", "holds", 6, differing=bad),),
            {(n, r): 1 for n in names for r in (0, 1)},
        )


def stepper(
    names: tuple[str, ...] = NAMES, breakpoints: tuple[str, ...] = (), **options: Any
) -> Stepper:
    link: Any = FakeLink(FakeTransaction(names, **options))
    return Stepper(link, link, None, None, Terms(), breakpoints=breakpoints)

"""`PoolView`: what sync, trainer and views know of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weakref import WeakSet

    from jvlab._deadline import Deadline
    from jvlab.layout._types import CheckpointTensor, RankLayout
    from jvlab.record._batch import Scores
    from jvlab.wire import jvlab_pb2 as pb
    from jvlab.wire._client import Client


class PoolView(Protocol):
    """A pool as the rooms below `lab` see it. `jv.Pool` is one, in processes of its own or in this one."""

    name: str
    model: str
    client: Client  # to the gateway, or to its servicers in this process
    # the gateway's last word about the pool, kept up to date; reading it asks nobody
    snapshot: pb.PoolStatus
    listeners: list[Callable[[pb.PoolStatus], None]]  # called with each new snapshot
    links: WeakSet[Any]  # this process's
    one_process: bool  # whether its only engine runs in this process

    @property
    def replicas(self) -> int:
        """The number of replicas, without those that are leaving."""
        ...

    def facts(self, timeout: float | Deadline = 900.0) -> pb.EngineFacts:
        """What a ready engine said about itself; waits for a pool that is still starting."""
        ...

    def renew(self, snapshot: pb.PoolStatus) -> None:
        """Store a newer snapshot."""
        ...

    def trace(
        self,
        tensors: Sequence[CheckpointTensor] | None = None,
        *,
        replica: str = "",
        timeout: float | Deadline = 300.0,
    ) -> list[RankLayout]:
        """Where an engine stores every checkpoint element."""
        ...

    def peek(
        self,
        parameter: str,
        rank: int = 0,
        *,
        replica: int = 0,
        timeout: float | Deadline = 120.0,
    ) -> bytes:
        """The raw bytes of a live parameter."""
        ...

    def score(
        self, sequences: Any, top: int = 0, *, timeout: float | Deadline = 3600.0
    ) -> Scores:
        """log P of every token given its prefix."""
        ...

    def status(self, *, timeout: float | Deadline = 30.0) -> dict[str, Any]:
        """A fresh snapshot as plain values."""
        ...

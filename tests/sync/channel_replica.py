"""A fake replica with real channels: it takes the buckets of a plan into numpy memory and compares digests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from jvlab.engine.worker._receivers import (
    Ledger,
    ReceivedBox,
    Receivers,
    ReceivingChannel,
)
from jvlab.layout._digest import flat_digest, row_elements
from jvlab.layout._layout_codec import layout_to_plain, plain_to_bytes
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype, source_order
from jvlab.layout._types import CheckpointTensor, Parameter, RankLayout
from jvlab.transport import open_receiver
from jvlab.wire import jvlab_pb2 as pb
from tests.gateway.fake_lab import FakeReplica
from tests.gateway.replica_memory import Broken, Differs

Storage = dict[tuple[str, int], np.ndarray]  # (parameter, rank) -> its elements


def halves(tensors: list[CheckpointTensor]) -> list[RankLayout]:
    """Two ranks, each with half of the rows of every tensor, under its name."""
    count, rows = len(tensors), [t.shape[0] // 2 for t in tensors]
    widths = [int(np.prod(t.shape[1:], dtype=np.int64)) for t in tensors]
    shapes = [(n, *t.shape[1:]) for n, t in zip(rows, tensors, strict=True)]
    strides = [
        (w, 1) if len(t.shape) > 1 else (1,)
        for w, t in zip(widths, tensors, strict=True)
    ]
    names = zip(tensors, shapes, strides, strict=True)
    parameters = tuple(
        Parameter(t.name, shape, t.dtype, step) for t, shape, step in names
    )
    number, zero = np.arange(count, dtype=np.int32), np.zeros(count, np.int64)
    box, step = (
        np.array([rows, widths], np.int64).T,
        np.array([widths, [1] * count], np.int64).T,
    )
    first = [
        zero,
        np.array([n * w for n, w in zip(rows, widths, strict=True)], np.int64),
    ]
    return [
        RankLayout(
            r,
            (("tp", r),),
            tuple(tensors),
            parameters,
            number,
            number,
            box,
            first[r],
            step,
            zero,
            step,
        )
        for r in range(2)
    ]


class Rank:
    """What a worker does, on numpy memory."""

    def __init__(
        self, plan: TransferPlan, rank: int, endpoints: list[dict[str, Any]]
    ) -> None:
        self.plan, self.rank = plan, rank
        table = plan.links(0)
        devices = sorted(table.device[table.rank == rank].tolist())
        ledger = Ledger(
            [source_order(plan.link(device, rank, 0)) for device in devices]
        )
        processes = sorted({int(p) for p in plan.processes})
        assert len(endpoints) == len(processes)
        channels = [
            ReceivingChannel(
                open_receiver(e, 30.0),
                tuple(d for d in devices if plan.process_of(d) == p),
                p,
            )
            for p, e in zip(processes, endpoints, strict=True)
        ]
        self.storage: Storage = {}
        self.receivers = Receivers(
            channels, ledger, self._scatter, lambda _: None, lambda: None
        )

    def start(self, version: int) -> None:
        for t in np.flatnonzero(self.plan.target_rank == self.rank).tolist():
            info = self.plan.parameters[self.plan.target_parameter[t]]
            self.storage[info.name, self.rank] = np.zeros(
                int(np.prod(info.shape)), numpy_dtype(info.dtype)
            )
        self.receivers.start(version, 30.0)

    def _scatter(self, box: ReceivedBox, data: Any) -> None:
        name = self.plan.parameters[self.plan.target_parameter[box.target]].name
        to = self.storage[name, self.rank]
        raw = np.frombuffer(data[box.at : box.at + box.nbytes], to.dtype).reshape(
            box.shape
        )
        strides = [s * to.itemsize for s in box.strides]
        np.lib.stride_tricks.as_strided(to[box.offset :], box.shape, strides)[...] = raw

    def digests(self) -> dict[tuple[str, int], int]:
        shapes = {
            p.name: row_elements(p.shape, p.strides) for p in self.plan.parameters
        }
        return {
            (name, rank): flat_digest(value, shapes[name])
            for (name, rank), value in self.storage.items()
        }


class ChannelReplica(FakeReplica):
    """One replica of a pool, all of whose ranks live here. What waits, waits in a thread: the loop is the gateway's."""

    ranks: list[Rank]
    live: Storage
    _found: dict[tuple[str, int], int]
    _error: str
    nonfinite: bool  # of the last commit

    async def sync(self, request: pb.RolloutSyncRequest) -> pb.ReplicaOutcome:
        self._error = ""
        if request.HasField("open") or request.close:
            await asyncio.to_thread(self.close_ranks)
        if request.HasField("open"):
            self.ranks = await asyncio.to_thread(self._open, request.open)
        if pb.ABANDON in request.phases:
            await asyncio.to_thread(
                lambda: [rank.receivers.stop(10.0) for rank in self.ranks]
            )
        if pb.VERIFY in request.phases or pb.CHECK in request.phases:
            await asyncio.to_thread(self._collect, pb.VERIFY in request.phases)
        return await super().sync(request)

    def phase(self, name: str, request: pb.RolloutSyncRequest) -> None:
        if name in ("open", "close"):
            self.link = request.link if name == "open" else ""
            return
        if name == "prepare":
            self.version = int(request.terms.version)
        if name in ("verify", "check"):
            self._compare(request.digests)
        if name != "check":
            super().phase(name, request)
        if name == "move":
            for rank in self.ranks:
                rank.start(self.version)
        if name == "commit":
            self.nonfinite = request.nonfinite
            self.live = {
                key: value.copy()
                for rank in self.ranks
                for key, value in rank.storage.items()
            }

    async def Trace(
        self, request: pb.RolloutTraceRequest, context: Any
    ) -> AsyncIterator[pb.TraceEvent]:
        for layout in halves(
            [CheckpointTensor(t.name, tuple(t.shape), t.dtype) for t in request.tensors]
        ):
            yield pb.TraceEvent(layout=plain_to_bytes(layout_to_plain(layout)))

    @staticmethod
    def _open(order: pb.RolloutOpen) -> list[Rank]:
        plan = TransferPlan.from_bytes(order.plan)
        return [
            Rank(plan, r, json.loads(text)) for r, text in enumerate(order.ranks_json)
        ]

    def _collect(self, wait: bool) -> None:
        """Digests of what is there; of a sync, once all has arrived."""
        until = time.monotonic() + 30
        for rank in self.ranks:
            while wait and not rank.receivers.done and time.monotonic() < until:
                time.sleep(0.001)
            if wait and rank.receivers.error is not None:
                self._error = str(rank.receivers.error)
        self._found = {
            key: value for rank in self.ranks for key, value in rank.digests().items()
        }

    def _compare(self, wanted: pb.ReplicaDigests) -> None:
        if self._error:
            raise Broken(self._error)
        expected = dict(
            zip(
                zip(wanted.parameters, wanted.ranks, strict=True),
                wanted.values,
                strict=True,
            )
        )
        if expected and expected != self._found:
            raise Differs("digests differ")

    def close_ranks(self) -> None:
        for rank in getattr(self, "ranks", []):
            rank.receivers.close()
            rank.receivers.stop(10.0)
        self.ranks = []

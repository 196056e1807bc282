"""What both faces of a gateway can order, gRPC and HTTP: fresh numbers, steering, tracing. Failures are Fatal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jvlab.control import _registry as reg
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._dispatch import Fatal

if TYPE_CHECKING:
    from jvlab.control._gateway import Gateway
    from jvlab.layout._types import CheckpointTensor

STATS_DEADLINE = 2.0  # a status that waits longer shows the last beat instead
UNDO_SECONDS = 30.0
PAUSED = "paused"


class Standstills:
    """Which pools their users have told to stand still, and how; those of a sync are the sync's own business."""

    def __init__(self) -> None:
        self._pools: dict[str, set[str]] = {}

    def why(self, pool: str) -> str:
        """In words; empty if the pool runs."""
        return " and ".join(sorted(self._pools.get(pool, ())))

    def steered(self, order: pb.SteerCall) -> None:
        """All replicas have done this."""
        words = self._pools.setdefault(order.pool, set())
        match order.what:
            case pb.PAUSE:
                words.add(PAUSED)
            case pb.RESUME:
                words.discard(PAUSED)
            case pb.SLEEP:
                words |= {"weights asleep", "kv_cache asleep"}
            case pb.WAKE:
                words -= {f"{tag} asleep" for tag in order.tags or ("weights", "kv_cache")}
            case _:
                pass  # no replica knows any other

    def forget(self, pool: str) -> None:
        self._pools.pop(pool, None)


async def fresh_status(gateway: Gateway, pool: str) -> pb.PoolStatus:
    """A pool's picture with numbers asked for now."""

    async def refresh(replica: reg.Replica) -> None:
        order = pb.EpochRequest(epoch=replica.epoch)
        try:
            gateway.stats[replica.name] = await gateway.stub(replica.name).Stats(
                order, timeout=STATS_DEADLINE, metadata=gateway.metadata()
            )
        except grpc.aio.AioRpcError as error:  # beat_age shows how old the numbers are
            print(f"gateway: no fresh numbers from {replica.name}: {error.code().name}", flush=True)

    await asyncio.gather(*(refresh(replica) for replica in gateway.alive(pool)))
    return gateway.pool_status(pool)


async def steer(gateway: Gateway, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
    """Pause, resume, sleep or wake every replica of a pool, or none."""
    replicas = gateway.alive(order.pool)
    if not replicas:
        raise Fatal(grpc.StatusCode.FAILED_PRECONDITION, f"no replica of {order.pool} is ready")
    if problem := gateway.links.steering_problem(order.pool, order.what):
        raise Fatal(grpc.StatusCode.FAILED_PRECONDITION, problem)
    answers = await asyncio.gather(*(_steer_one(gateway, r, order, timeout) for r in replicas), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, Fatal)]
    if failed:
        if order.what == pb.PAUSE:  # all or none: don't leave a pool half paused
            undo = pb.SteerCall(pool=order.pool, what=pb.RESUME)
            done = [r for r, answer in zip(replicas, answers, strict=True) if isinstance(answer, pb.SteerReply)]
            await asyncio.gather(*(_steer_one(gateway, r, undo, UNDO_SECONDS) for r in done), return_exceptions=True)
        raise failed[0]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    gateway.standstills.steered(order)
    gateway.announce(order.pool)  # whoever holds requests back looks again
    return pb.SteerReply(seconds=max(a.seconds for a in answers if isinstance(a, pb.SteerReply)))


async def _steer_one(gateway: Gateway, replica: reg.Replica, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
    """One order to one replica; a replica that is lost meanwhile ends the wait."""
    message = pb.RolloutSteerRequest(epoch=replica.epoch, order=order)
    call: Any = gateway.stub(replica.name).Steer(message, timeout=timeout, metadata=gateway.metadata())
    with gateway.watched(replica.name, call):
        return await call


async def trace(
    gateway: Gateway, pool: str, tensors: list[CheckpointTensor], timeout: float
) -> tuple[str, list[bytes]]:
    """(the replica that was asked, each rank's layout as it crosses the wire)."""
    ready = gateway.ready(pool)
    if not ready:
        raise Fatal(grpc.StatusCode.FAILED_PRECONDITION, f"no replica of {pool} is ready")
    asked = ready[0]
    listed = [pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in tensors]
    order = pb.RolloutTraceRequest(epoch=asked.epoch, tensors=listed)
    call: Any = gateway.stub(asked.name).Trace(order, timeout=timeout, metadata=gateway.metadata())
    with gateway.watched(asked.name, call):
        return asked.name, [event.layout async for event in call]

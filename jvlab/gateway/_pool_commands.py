"""Pool commands shared by the gateway's gRPC and HTTP services: status, pause and resume, tracing. Failures raise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jvlab._errors import JvlabError
from jvlab.gateway import _registry as reg
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._rpc_errors import refused

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway
    from jvlab.layout._types import CheckpointTensor

STATS_DEADLINE = 2.0  # then a status shows the last beat's stats instead
UNDO_SECONDS = 30.0
PAUSED = "paused"
MEMORY = ("weights", "kv_cache")  # what sleeps


class PauseState:
    """Which pools were paused or put to sleep by users; a sync's halts are not among them."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, str]] = {}

    def of(self, pool: str) -> dict[str, str]:
        """The pool's states, paused and asleep, and who asked for each."""
        return self._pools.get(pool, {})

    def why(self, pool: str) -> str:
        """The states as text; empty if the pool runs."""
        return " and ".join(sorted(self.of(pool)))

    def asleep(self, pool: str) -> list[str]:
        """What of its memory sleeps."""
        return [tag for tag in MEMORY if f"{tag} asleep" in self.of(pool)]

    def steered(self, order: pb.SteerCall) -> None:
        """All replicas have done this."""
        states = self._pools.setdefault(order.pool, {})
        by = order.by or "another client"
        match order.what:
            case pb.PAUSE:
                states[PAUSED] = by
            case pb.RESUME:
                states.pop(PAUSED, None)
            case pb.SLEEP:
                states |= {f"{tag} asleep": by for tag in MEMORY}
            case pb.WAKE:
                for tag in order.tags or MEMORY:
                    states.pop(f"{tag} asleep", None)
            case _:
                pass  # replicas refuse any other

    def forget(self, pool: str) -> None:
        self._pools.pop(pool, None)


async def fresh_status(gateway: Gateway, pool: str, seconds: float = STATS_DEADLINE) -> pb.PoolStatus:
    """A pool's snapshot with fresh stats from its replicas."""

    async def refresh(replica: reg.Replica) -> None:
        name, epoch = replica.name, replica.epoch
        try:
            stats = await gateway.stub(name).Stats(
                pb.EpochRequest(epoch=epoch), timeout=min(seconds, STATS_DEADLINE), metadata=gateway.metadata()
            )
        except grpc.aio.AioRpcError as error:  # beat_age shows how old the numbers are
            print(f"gateway: no fresh numbers from {name}: {error.code().name}", flush=True)
            gateway.failed(name, epoch, error)
            return
        if gateway.is_current(name, epoch):  # else the stats are outdated
            gateway.stats[name] = stats

    await asyncio.gather(*(refresh(replica) for replica in gateway.alive(pool)))
    return gateway.pool_status(pool)


async def steer(gateway: Gateway, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
    """Pause, resume, sleep or wake every replica of a pool, or none."""
    replicas = gateway.alive(order.pool)
    if not replicas:
        raise refused(f"no replica of {order.pool} is ready")
    gateway.links.check_steering(order.pool, order.what)
    until = time.monotonic() + timeout
    undo = _opposite(gateway.pause_state, order)
    gateway.steering[order.pool] += 1
    try:
        orders = (_steer_one(gateway, r, order, timeout) for r in replicas)
        answers = await asyncio.gather(*orders, return_exceptions=True)
    finally:
        gateway.steering[order.pool] -= 1
        if not gateway.steering[order.pool]:
            del gateway.steering[order.pool]
    failed = [answer for answer in answers if isinstance(answer, JvlabError)]
    if failed:
        if undo is not None:  # all or none: don't leave a pool half paused or half asleep
            done = [r for r, answer in zip(replicas, answers, strict=True) if isinstance(answer, pb.SteerReply)]
            # One that did not answer in time undoes a pause itself, when its call is cancelled; a sleep may have been
            # done in part, and one that did not sleep wakes without doing anything.
            steered = done if order.what == pb.PAUSE else replicas
            undone = [gateway.in_background(_undo(gateway, r, undo)) for r in steered]
            if undone:
                await asyncio.wait(undone, timeout=max(0.0, until - time.monotonic()))
        raise failed[0]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    gateway.pause_state.steered(order)
    gateway.announce(order.pool)  # held requests may go on
    return pb.SteerReply(seconds=max(a.seconds for a in answers if isinstance(a, pb.SteerReply)))


def _opposite(known: PauseState, order: pb.SteerCall) -> pb.SteerCall | None:
    """What undoes an order that some replicas have carried out; None for one that changes nothing, or frees the pool.

    Weights that a sleep at level 2 dropped do not come back: such a replica is dirty until a sync.
    """
    if order.what == pb.PAUSE and PAUSED not in known.of(order.pool):
        return pb.SteerCall(pool=order.pool, what=pb.RESUME)
    awake = [tag for tag in MEMORY if tag not in known.asleep(order.pool)]
    if order.what == pb.SLEEP and awake:
        return pb.SteerCall(pool=order.pool, what=pb.WAKE, tags=awake)
    return None


async def _undo(gateway: Gateway, replica: reg.Replica, undo: pb.SteerCall) -> None:
    with contextlib.suppress(JvlabError):  # lost, or too slow: its next beat reports that it is paused or asleep
        await _steer_one(gateway, replica, undo, UNDO_SECONDS)


def differs(known: PauseState, pool: str, stats: pb.ReplicaStats) -> pb.Steering | None:
    """The order that makes a replica as its pool: it may have missed one, or have carried out one that was undone."""
    if stats.sleeping and not known.asleep(pool):
        return pb.WAKE
    paused = PAUSED in known.of(pool)
    if stats.paused == paused:
        return None
    return pb.PAUSE if paused else pb.RESUME


async def reconcile_pause(gateway: Gateway, replica: reg.Replica) -> None:
    """Wake, pause or resume a replica to match its pool."""
    name, epoch = replica.name, replica.epoch
    try:
        stats = await gateway.stub(name).Stats(
            pb.EpochRequest(epoch=epoch), timeout=STATS_DEADLINE, metadata=gateway.metadata()
        )
        # No await between here and the order, so that it cannot overtake a later one of the user's.
        what = differs(gateway.pause_state, replica.pool, stats)
        if gateway.is_current(name, epoch) and what is not None and not gateway.steering[replica.pool]:
            await _undo(gateway, replica, pb.SteerCall(pool=replica.pool, what=what, mode="keep"))
    except grpc.aio.AioRpcError:
        pass  # its next beat reports whether it is alive and paused
    finally:
        gateway.reconciled(name)


async def _steer_one(gateway: Gateway, replica: reg.Replica, order: pb.SteerCall, timeout: float) -> pb.SteerReply:
    """One order to one replica; raises at once if the replica is lost."""
    message = pb.RolloutSteerRequest(epoch=replica.epoch, order=order)
    call: Any = gateway.stub(replica.name).Steer(message, timeout=timeout, metadata=gateway.metadata())
    with gateway.watched(replica.name, call):
        return await call


async def trace(
    gateway: Gateway, pool: str, tensors: list[CheckpointTensor], timeout: float
) -> tuple[str, list[bytes]]:
    """(the replica that was traced, each rank's encoded layout)."""
    ready = gateway.ready(pool)
    if not ready:
        raise refused(f"no replica of {pool} is ready")
    asked = ready[0]
    listed = [pb.TraceTensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in tensors]
    order = pb.RolloutTraceRequest(epoch=asked.epoch, tensors=listed)
    call: Any = gateway.stub(asked.name).Trace(order, timeout=timeout, metadata=gateway.metadata())
    with gateway.watched(asked.name, call):
        return asked.name, [event.layout async for event in call]

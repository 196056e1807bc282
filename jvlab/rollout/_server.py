"""The replica's gRPC service: checks the epoch, calls the engine, maps errors to status codes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError, JvlabError, Unsupported
from jvlab.control import jvlab_pb2 as pb
from jvlab.control import jvlab_pb2_grpc as rpc
from jvlab.layout._wire import plain_to_bytes
from jvlab.rollout import _vllm
from jvlab.rollout._engine import Engine
from jvlab.rollout._express import Express

Context = grpc.aio.ServicerContext
REGISTERING = 5.0  # seconds that an order waits for us to be registered


class RolloutServicer(rpc.RolloutServicer):
    """Orders from the gateway. One with another epoch is refused: it was meant for what this replica no longer is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.epoch = 0
        self.express = Express(self._express)
        self.beat_now = asyncio.Event()  # something changed that the gateway should know

    async def _express(self, request: pb.RolloutSyncRequest) -> pb.RolloutSyncReply:
        """A trainer's own order."""
        if request.epoch != self.epoch or request.HasField("open") or request.close:
            text = f"order of epoch {request.epoch}, this replica is at epoch {self.epoch}"
            return pb.RolloutSyncReply(outcome=pb.ReplicaOutcome(failed="order", error=text, kind="SyncError"))
        reply = await self.engine.sync(request)
        if reply.outcome.failed or {pb.COMMIT, pb.ABANDON} & set(request.phases):
            self.beat_now.set()
        return reply

    async def _registered(self) -> None:
        """Its first order may be here before the gateway's answer to our registration, which says our epoch."""
        until = time.monotonic() + REGISTERING
        while self.epoch == 0 and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _check(self, epoch: int, context: Context) -> None:
        await self._registered()
        if epoch != self.epoch:
            await context.abort(
                grpc.StatusCode.ABORTED, f"order of epoch {epoch}, this replica is at epoch {self.epoch}"
            )

    async def _fail(self, error: Exception, context: Context) -> None:
        if isinstance(error, Unsupported):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        if isinstance(error, ConfigError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, _vllm.dead_errors()) or self.engine.dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine died")
        if isinstance(error, JvlabError):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise error

    async def Generate(self, request: pb.RolloutRequest, context: Context) -> AsyncIterator[pb.SampleBatch]:
        await self._check(request.epoch, context)
        adapter = request.adapter if request.HasField("adapter") else None
        samples = self.engine.generate(request.work, request.sampling_json, adapter)
        try:
            async for batch in samples:
                yield pb.SampleBatch(samples=batch)
        except Exception as error:  # _fail re-raises what it does not know
            await self._fail(error, context)
        finally:
            await samples.aclose()  # type: ignore[attr-defined]

    async def Score(self, request: pb.RolloutScoreRequest, context: Context) -> AsyncIterator[pb.ScoreBatch]:
        await self._check(request.epoch, context)
        scores = self.engine.score([s.ids for s in request.sequences], request.indexes, request.top)
        try:
            async for scored in scores:
                yield pb.ScoreBatch(scored=[scored])
        except Exception as error:
            await self._fail(error, context)
        finally:
            await scores.aclose()  # type: ignore[attr-defined]

    async def Steer(self, request: pb.RolloutSteerRequest, context: Context) -> pb.SteerReply:
        await self._check(request.epoch, context)
        try:
            return pb.SteerReply(seconds=await self.engine.steer(request.order))
        except Exception as error:
            await self._fail(error, context)
            raise

    async def Stats(self, request: pb.EpochRequest, context: Context) -> pb.ReplicaStats:
        await self._check(request.epoch, context)
        return await self.engine.stats()

    async def Trace(self, request: pb.RolloutTraceRequest, context: Context) -> AsyncIterator[pb.TraceEvent]:
        await self._check(request.epoch, context)
        tensors: list[list[Any]] = [[t.name, list(t.shape), t.dtype] for t in request.tensors]
        try:
            for layout in await self.engine.trace(tensors):
                yield pb.TraceEvent(layout=plain_to_bytes(layout))
        except Exception as error:
            await self._fail(error, context)

    async def Sync(self, request: pb.RolloutSyncRequest, context: Context) -> pb.RolloutSyncReply:
        await self._check(request.epoch, context)
        try:
            reply = await self.engine.sync(request)
            if request.HasField("open") and request.open.transport == "ipc" and not reply.outcome.failed:
                reply.outcome.express_json = self.express.invitation(request.link, self.epoch, self.engine.door)
            return reply
        except Exception as error:
            await self._fail(error, context)
            raise

    async def SetAdapter(self, request: pb.RolloutAdapterRequest, context: Context) -> pb.Empty:
        await self._check(request.epoch, context)
        try:
            change = self.engine.adapters.drop if request.unload else self.engine.adapters.load
            await change(request.adapter)
        except Exception as error:
            await self._fail(error, context)
        return pb.Empty()

    async def Peek(self, request: pb.RolloutPeekRequest, context: Context) -> AsyncIterator[pb.PeekEvent]:
        await self._check(request.epoch, context)
        try:
            async for piece in self.engine.peek(request.rank, request.parameter):
                yield pb.PeekEvent(piece=piece)
        except Exception as error:
            await self._fail(error, context)

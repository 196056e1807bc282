"""The replica's gRPC service: checks the epoch, calls the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError, Unsupported
from jvlab.engine import _vllm
from jvlab.engine._engine import Engine
from jvlab.layout._layout_codec import plain_to_bytes
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._rpc_errors import CallFailed, reports_errors

Context = grpc.aio.ServicerContext
REGISTER_SECONDS = 5.0  # that an order waits for the registration to complete


@reports_errors
class RolloutServicer(rpc.RolloutServicer):
    """Orders from the gateway. One of another epoch is refused: it was sent before this replica was fenced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.epoch = 0

    async def _registered(self) -> None:
        """Wait for our epoch: the gateway's first order may overtake its reply to our registration."""
        until = time.monotonic() + REGISTER_SECONDS
        while self.epoch == 0 and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _check(self, epoch: int) -> None:
        await self._registered()
        if epoch != self.epoch:
            text = f"order of epoch {epoch}, this replica is at epoch {self.epoch}"
            raise CallFailed(grpc.StatusCode.ABORTED, text)

    def explain(self, error: Exception) -> Exception:
        """The error for the gateway: whatever fails while the engine dies is reported as its death."""
        caller_error = isinstance(error, (ConfigError, Unsupported, CallFailed))
        if not caller_error and (
            isinstance(error, _vllm.dead_errors()) or self.engine.dead
        ):
            return CallFailed(grpc.StatusCode.UNAVAILABLE, self.engine.why_dead())
        return error

    async def Generate(
        self, request: pb.RolloutRequest, context: Context
    ) -> AsyncIterator[pb.SampleBatch]:
        await self._check(request.epoch)
        adapter = request.adapter if request.HasField("adapter") else None
        samples = self.engine.generate(request.work, request.sampling_json, adapter)
        try:
            async for batch in samples:
                yield pb.SampleBatch(samples=batch)
        finally:
            await samples.aclose()  # type: ignore[attr-defined]

    async def Score(
        self, request: pb.RolloutScoreRequest, context: Context
    ) -> AsyncIterator[pb.ScoreBatch]:
        await self._check(request.epoch)
        scores = self.engine.score(
            [s.ids for s in request.sequences], request.indexes, request.top
        )
        try:
            async for scored in scores:
                yield pb.ScoreBatch(scored=[scored])
        finally:
            await scores.aclose()  # type: ignore[attr-defined]

    async def Steer(
        self, request: pb.RolloutSteerRequest, context: Context
    ) -> pb.SteerReply:
        await self._check(request.epoch)
        return pb.SteerReply(seconds=await self.engine.steer(request.order))

    async def Stats(
        self, request: pb.EpochRequest, context: Context
    ) -> pb.ReplicaStats:
        await self._check(request.epoch)
        return await self.engine.stats()

    async def Trace(
        self, request: pb.RolloutTraceRequest, context: Context
    ) -> AsyncIterator[pb.TraceEvent]:
        await self._check(request.epoch)
        tensors: list[list[Any]] = [
            [t.name, list(t.shape), t.dtype] for t in request.tensors
        ]
        for layout in await self.engine.trace(tensors):
            yield pb.TraceEvent(layout=plain_to_bytes(layout))

    async def Sync(
        self, request: pb.RolloutSyncRequest, context: Context
    ) -> pb.RolloutSyncReply:
        await self._check(request.epoch)
        return await self.engine.sync(request)

    async def SetAdapter(
        self, request: pb.RolloutAdapterRequest, context: Context
    ) -> pb.Empty:
        await self._check(request.epoch)
        change = (
            self.engine.adapters.drop if request.unload else self.engine.adapters.load
        )
        await change(request.adapter)
        return pb.Empty()

    async def Peek(
        self, request: pb.RolloutPeekRequest, context: Context
    ) -> AsyncIterator[pb.PeekEvent]:
        await self._check(request.epoch)
        async for piece in self.engine.peek(request.rank, request.parameter):
            yield pb.PeekEvent(piece=piece)

    async def Hidden(
        self, request: pb.RolloutHiddenRequest, context: Context
    ) -> AsyncIterator[pb.HiddenEvent]:
        await self._check(request.epoch)
        async with contextlib.aclosing(
            self.engine.hidden(request.tokens.ids)
        ) as pieces:
            async for layer, piece in pieces:
                yield pb.HiddenEvent(layer=layer, piece=piece)

"""The replica's gRPC service: checks the epoch, calls the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError, Unsupported
from jvlab.engine import _vllm
from jvlab.engine._engine import Engine
from jvlab.layout._layout_codec import plain_to_bytes
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._core_channel import same_user
from jvlab.wire._rpc_errors import CallFailed, reports_errors

# A replica's own socket for the orders of a sync, from a trainer on the same host, bypassing the gateway.
# An ipc sync takes a few milliseconds, and each order through the gateway two. The gateway still grants the pool to one
# trainer and opens the link; its reply holds the socket's path and key. It learns of a commit by the next beat,
# which is sent at once. On either path the replica's own state machine checks the order of phases. When a
# trainer dies, its stream to the gateway ends, and the gateway closes the link here.
#
# Frames: four bytes of length, then the key (once), then RolloutSyncRequest and RolloutSyncReply in turn.

MAX_FRAME_BYTES = 64 << 20
ADMIT_SECONDS = 5.0  # for the key to arrive
FRAME_SECONDS = 60.0  # for the rest of a frame that has begun
Run = Callable[[pb.RolloutSyncRequest], Awaitable[pb.RolloutSyncReply]]


class DirectOrders:
    """Listens on a local socket; a client without the key is refused."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.path = f"\0jvlab-{secrets.token_hex(8)}"  # abstract: no file to clean up
        self._key = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if sys.platform == "linux":
            self._server = await asyncio.start_unix_server(self._serve, self.path)

    def invitation(
        self, link: str, epoch: int, core_channel: Sequence[str] = ()
    ) -> str:
        """What a trainer needs to connect; invalidates earlier invitations. Empty if this is not listening.

        `core_channel`: the engine core's own path and key, if it has a channel.
        """
        if self._server is None:
            return ""
        self._key = secrets.token_hex(16)
        return json.dumps(
            {
                "path": self.path,
                "key": self._key,
                "link": link,
                "epoch": epoch,
                "core_channel": list(core_channel),
            }
        )

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            end: socket.socket = writer.get_extra_info("socket")
            if not same_user(end):
                return
            async with asyncio.timeout(ADMIT_SECONDS):
                sent = await _read(reader, len(self._key))
            if not hmac.compare_digest(sent, self._key.encode()):
                return
            while True:  # no timeout: a trainer may be silent between two syncs
                request = pb.RolloutSyncRequest.FromString(await _read(reader))
                answer = (await self._run(request)).SerializeToString()
                writer.write(len(answer).to_bytes(4, "little") + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            return  # the trainer is gone; the gateway notices too
        finally:
            writer.close()

    def close(self) -> None:
        """Stop listening. Can be called twice."""
        if self._server is not None:
            self._server.close()
            self._server = None


async def _read(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> bytes:
    # no deadline: a trainer is silent between two syncs
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > max_bytes:
        raise ConnectionError(f"a frame of {size} bytes")
    async with asyncio.timeout(FRAME_SECONDS):
        return await reader.readexactly(size)


# ----------------------------------------------------------------------------------------------------

Context = grpc.aio.ServicerContext
REGISTER_SECONDS = 5.0  # that an order waits for the registration to complete


@reports_errors
class RolloutServicer(rpc.RolloutServicer):
    """Orders from the gateway. One of another epoch is refused: it was sent before this replica was fenced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.epoch = 0
        self.direct_orders = DirectOrders(self._direct_orders)
        # something changed that the gateway should know at once
        self.beat_now = asyncio.Event()

    async def _direct_orders(
        self, request: pb.RolloutSyncRequest
    ) -> pb.RolloutSyncReply:
        """An order straight from a trainer."""
        if request.epoch != self.epoch or request.HasField("open") or request.close:
            text = (
                f"order of epoch {request.epoch}, this replica is at epoch {self.epoch}"
            )
            return pb.RolloutSyncReply(
                outcome=pb.ReplicaOutcome(failed="order", error=text, kind="SyncError")
            )
        reply = await self.engine.sync(request)
        if reply.outcome.failed or {pb.COMMIT, pb.ABANDON} & set(request.phases):
            self.beat_now.set()
        return reply

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
        reply = await self.engine.sync(request)
        if (
            request.HasField("open")
            and request.open.transport == "ipc"
            and not reply.outcome.failed
        ):
            invitation = self.direct_orders.invitation(
                request.link, self.epoch, self.engine.core_channel
            )
            reply.outcome.direct_orders_json = invitation
        return reply

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

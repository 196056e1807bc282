"""The trainer's end of a link's control stream: one reply per order; failures are raised as our errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from jvlab import _errors as errors
from jvlab._deadline import Deadline
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client, translate
from jvlab.wire._rpc_errors import in_words
from jvlab.wire._sync_words import CODE_ERRORS

GRACE = 1.5  # seconds a reply may arrive after its order's deadline; above CLEANUP_GRACE of gateway/_link_service.py
OWN_STREAM_SECONDS = 20.0  # to wait for the gateway to release a stream that this process just dropped
MIN_SECONDS = 0.05  # deadline of an order that is given late


class LinkStream:
    """A stream to the gateway for the life of a link. Closing it abandons an open sync and frees the pool."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._call: Any = None
        self._numbers = 0
        self.busy = False  # an order is in flight, its reply unread

    @property
    def is_open(self) -> bool:
        return self._call is not None and not self._call.done()

    def open(self, request: pb.LinkOpen, seconds: float) -> pb.LinkReply:
        """Acquire the pool, or raise LinkBusy with the holder's name. Waits for a stream this process just dropped."""
        deadline = Deadline(seconds)
        until = time.monotonic() + min(OWN_STREAM_SECONDS, seconds)
        while True:
            reply = self._order(pb.LinkOrder(open=request), deadline.left())
            if reply.code == "busy" and request.holder in reply.error and time.monotonic() < until:
                self.close()
                time.sleep(0.1)
                continue
            if reply.code:
                self.close()
            return check(reply)

    def steps(
        self, phases: Sequence[int], seconds: float, meanwhile: Callable[[], None] | None = None, **more: Any
    ) -> pb.LinkReply:
        """Run these phases in order; raises if one failed, with every replica's outcome in the error.

        `meanwhile` is called while the order is carried out.
        """
        numbers: Any = list(phases)
        steps = pb.SyncSteps(phases=numbers, **more)
        return check(self._order(pb.LinkOrder(steps=steps), seconds, meanwhile))

    def _order(self, order: pb.LinkOrder, seconds: float, meanwhile: Callable[[], None] | None = None) -> pb.LinkReply:
        self._numbers += 1
        seconds = max(seconds, MIN_SECONDS)
        order.number, order.seconds = self._numbers, seconds
        self.busy = True
        reply = self._client.loop.run(self._exchange(order, seconds), meanwhile)
        self.busy = False
        return reply

    async def _exchange(self, order: pb.LinkOrder, seconds: float) -> pb.LinkReply:
        if self._call is None and not order.HasField("open"):
            raise closed_here()
        if self._call is None or self._call.done():
            self._call = self._client.stub.Link(metadata=self._client.metadata)
        call = self._call  # another thread may call close() at any time
        try:
            async with asyncio.timeout(seconds + GRACE):
                await call.write(order)
                reply = await call.read()
                if reply is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
                    code, details = await call.code(), await call.details()
                    raise errors.SyncError(
                        f"the gateway ended the link: {in_words(code, details)}",
                        remedy="sync again: a new stream is opened",
                    )
        except TimeoutError:
            raise errors.SyncDeadline(
                f"the gateway at {self._client.address} did not answer an order of the sync within {seconds:.3g} s",
                remedy="is its process stopped, or its machine overloaded? sync again when it answers",
            ) from None
        except grpc.aio.AioRpcError as error:
            raise translate(error, "link", seconds, self._client.address) from None
        except asyncio.InvalidStateError:  # written to a stream that ended meanwhile
            if self._call is not call:
                raise closed_here() from None
            raise errors.GatewayUnreachable(
                f"the link's stream to the gateway at {self._client.address} is over",
                remedy="sync again, or jv.Lab.attach() if the gateway ended",
            ) from None
        if reply.number != order.number:
            raise errors.SyncError(f"reply {reply.number} to order {order.number}", remedy="sync again")
        return reply

    def close(self) -> None:
        """End the stream. Can be called twice."""
        call, self._call, self.busy = self._call, None, False
        if call is not None and not self._client.loop.loop.is_closed():
            self._client.loop.loop.call_soon_threadsafe(call.cancel)


def closed_here() -> errors.TransportError:
    """The error of an order on a stream that another thread of this process has closed."""
    text = "the link's stream to the gateway was closed here"
    return errors.TransportError(text, remedy="sync again: a new stream is opened", reason="closed here")


def check(reply: pb.LinkReply) -> pb.LinkReply:
    """The reply if it reports success; else raises the error it describes."""
    if not reply.code:
        return reply
    kind = CODE_ERRORS.get(reply.code, errors.SyncError)
    differing = [f"{o.replica}: {name}" for o in reply.outcomes for name in o.differing]
    raise kind(
        reply.error,
        remedy=reply.remedy or _next_step(reply),
        code=reply.code,
        differing=differing,
        outcomes={o.replica: o.state for o in reply.outcomes},
        reply=reply,
    )


def _next_step(reply: pb.LinkReply) -> str:
    states = {o.state for o in reply.outcomes}
    if "dirty" in states:
        return "the engine refuses to generate until a sync commits: sync again"
    if "lost" in states:
        return "pool.status() shows who is left; sync again, or pool.restart(replica)"
    return "the engine still serves its old version; sync again"

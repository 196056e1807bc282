"""Calls to a servicer in this process, through the interface of a gRPC stub: no port, no bytes, the same errors.

The in-process pool uses it for both hops: Pool → LabServicer → RolloutServicer are then coroutines on one loop, and
code written for gRPC (dispatch, the sync's state machine, deadlines, cancellation) runs unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Generator
from typing import Any

import grpc
import grpc.aio

from jvlab.wire._client import EOF, BackgroundLoop, Client

Code = grpc.StatusCode


class _Aborted(Exception):
    """What a servicer's `context.abort` raises."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata


class LocalContext:
    """A servicer's view of a call: the part of gRPC's context that our servicers use."""

    def __init__(self, call: LocalCall) -> None:
        self._call = call

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        raise _Aborted(code, details, trailing_metadata)

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    async def read(self) -> Any:
        # no deadline: the caller has one, and cancels this
        return await self._call.requests.get()

    async def write(self, message: Any) -> None:
        self._call.replies.put_nowait(message)


class LocalCall:
    """One call: awaited if it has one reply, iterated or read if it has several. Made and used on the loop."""

    def __init__(
        self,
        method: Any,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Any = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._cancelled = False
        self._trailing = grpc.aio.Metadata()
        self._until = None if timeout is None else loop.time() + timeout
        self._timer = (
            None
            if timeout is None
            else loop.call_later(max(0.0, timeout), self._expire)
        )
        self._task = loop.create_task(
            self._run(method, self._sent() if request is None else request)
        )
        self._task.add_done_callback(
            lambda _: self._end(Code.CANCELLED, "cancelled before it began")
        )

    async def _run(self, method: Any, given: Any) -> None:
        try:
            answer = method(given, LocalContext(self))
            if inspect.isasyncgen(answer):
                async with contextlib.aclosing(answer):
                    async for message in answer:
                        self.replies.put_nowait(message)
            elif (reply := await answer) is not None:
                self.replies.put_nowait(reply)
            self._end(Code.OK, "")
        except _Aborted as error:
            self._trailing = grpc.aio.Metadata(*error.metadata)
            self._end(error.code, error.details)
        except asyncio.CancelledError:
            self._end(Code.CANCELLED, "cancelled")
        # like a gRPC server: the caller gets the error, the server keeps running
        except Exception as error:
            self._end(Code.UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _sent(self) -> AsyncIterator[Any]:
        """What the caller writes, for a servicer to iterate."""
        # no deadline: the caller has one, and cancels this
        while (message := await self.requests.get()) is not EOF:
            yield message

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if self._code is None:  # the first status counts
            self._code = code
            self._details = details
            self.replies.put_nowait(EOF)
            if self._timer is not None:
                self._timer.cancel()

    def _expire(self) -> None:
        self._end(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._task.cancel()

    def time_remaining(self) -> float | None:
        return (
            None
            if self._until is None
            else max(0.0, self._until - asyncio.get_running_loop().time())
        )

    # The caller's side ----------------------------------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("the call is over")
        self.requests.put_nowait(message)

    async def done_writing(self) -> None:
        self.requests.put_nowait(EOF)

    async def read(self) -> Any:
        """The next reply, or EOF after the last; raises if the call failed."""
        try:
            # no deadline: `_expire` and the task's end put EOF there
            message = await self.replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not EOF:
            return message
        self.replies.put_nowait(EOF)  # for the next read
        if self._cancelled:
            raise asyncio.CancelledError
        assert self._code is not None
        if self._code is not Code.OK:
            raise grpc.aio.AioRpcError(
                self._code, grpc.aio.Metadata(), self._trailing, self._details
            )
        return EOF

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.read().__await__()

    def __aiter__(self) -> LocalCall:
        return self

    async def __anext__(self) -> Any:
        # no deadline: `_expire` and the task's end put EOF there
        if (message := await self.read()) is EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled = True
        self._end(Code.CANCELLED, "cancelled")
        self._task.cancel()
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._code is not None

    async def code(self) -> grpc.StatusCode:
        # no deadline: asked at the end: it is over, or was cancelled
        await asyncio.wait([self._task])
        return self._code or Code.UNKNOWN

    async def details(self) -> str:
        # no deadline: asked at the end: it is over, or was cancelled
        await asyncio.wait([self._task])
        return self._details


class LocalStub:
    """The methods of a servicer in this process, called as on a stub."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        return functools.partial(LocalCall, getattr(self._servicer, name))


class LocalClient(Client):
    """A `Client` without a channel; `stub` is set once the servicer exists, on this client's loop."""

    def __init__(self) -> None:
        self.address, self.loop = "this process", BackgroundLoop()
        self.gone = lambda: False
        self.metadata = ()
        self.owed = set()
        self._closing = threading.Lock()
        self.stub: Any = None

    def close(self) -> None:
        with self._closing:
            self.loop.stop()

"""The caller's end of the control plane: one background event loop, one channel, errors mapped to ours.

Everything runs on a loop in a thread of its own, so that the same code serves scripts, notebooks (whose main thread has
a loop running already) and coroutines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from jvlab import _errors as errors
from jvlab import _tracebacks
from jvlab._deadline import ANSWER_SECONDS, Deadline
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._rpc_errors import LOST_REMEDY, rebuild, received

T = TypeVar("T")
GIVE_UP_SECONDS = 30.0  # without a connection for this long, a gateway counts as gone
QUICK_SECONDS = 30.0  # deadline of calls that only query or notify
STOP_SECONDS = 10.0  # for what still runs when a lab is closed
CHECK_SECONDS = 1.0  # between two checks of a wait
CLOSE_SECONDS = 10.0  # for a read that was cancelled to end


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="jvlab-client", daemon=True)
        self._thread.start()
        self._submitting = threading.RLock()  # re-entrant: a signal handler or a finaliser may call in between
        self.stopping = False

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._submitting:  # nothing comes after `stop` has begun: it would never be run, nor cancelled
            if not self.stopping:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise errors.ControlError("this lab is closed", remedy="start a new one: lab = jv.Lab()")

    def run(
        self,
        work: Coroutine[Any, Any, T],
        meanwhile: Callable[[], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> T:
        """Start it, call `meanwhile`, then wait for its result. Ctrl-C cancels it.

        `check` is called every second of the wait, in the caller's thread; what it raises ends the wait and the work.
        """
        future = self.submit(work)
        try:
            if meanwhile is not None:
                meanwhile()
            if check is not None:
                _check_until_done(future, check)
            return future.result()  # no deadline: the work has one, and `stop` cancels it
        except KeyboardInterrupt as error:
            future.cancel()
            _tracebacks.shorten(error)
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, awaited on another loop; cancelling the waiter cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def stop(self) -> None:
        """Cancel what runs, then end the thread. Can be called twice."""
        with self._submitting:
            if self.stopping:
                return
            self.stopping = True

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with contextlib.suppress(TimeoutError):  # something ignores that it is cancelled, or blocks the loop
            asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result(STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


def _check_until_done(future: concurrent.futures.Future[Any], check: Callable[[], None]) -> None:
    while not concurrent.futures.wait([future], CHECK_SECONDS).done:
        try:
            check()
        except BaseException:
            future.cancel()
            raise


class Stream(Generic[T]):
    """An async generator on the background loop; iterate it with `for` or `async for`.

    `close()`/`aclose()`, leaving a `with` block, or dropping the iterator ends the work behind it.
    """

    def __init__(
        self, loop: BackgroundLoop, source: AsyncGenerator[T, None], check: Callable[[], None] | None = None
    ) -> None:
        """`check` is called every second that a `for` waits; what it raises ends the stream."""
        self._loop, self._source, self._check = loop, source, check
        self._reading: asyncio.Task[Any] | None = None  # the one that waits for the next, or did last

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                try:
                    yield self._loop.run(self._next(), check=self._check)
                except StopAsyncIteration:
                    return
        finally:
            self.close()

    def __aiter__(self) -> AsyncIterator[T]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[T]:
        try:
            while True:
                try:
                    yield await self._loop.arun(self._next())
                except StopAsyncIteration:
                    return
        finally:
            self.close()

    def close(self) -> None:
        if not self._loop.stopping:
            self._loop.run(self._close())

    async def aclose(self) -> None:
        await self._loop.arun(self._close())

    async def _next(self) -> T:
        self._reading = asyncio.current_task()
        return await self._source.__anext__()

    async def _close(self) -> None:
        """End the work; first a read that was interrupted, which may not have noticed it yet."""
        if self._reading is not None and not self._reading.done():
            if not self._reading.cancelling():  # a second time would break off what it does to end
                self._reading.cancel()
            await asyncio.wait([self._reading], timeout=CLOSE_SECONDS)
        await self._source.aclose()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Client:
    """A channel to one gateway, with its token on every call."""

    def __init__(
        self, address: str, token: str, tls_ca: str | None = None, max_message: int = security.MAX_MESSAGE
    ) -> None:
        self.address, self.loop = address, BackgroundLoop()
        self.gone: Callable[[], bool] = lambda: False  # whether the gateway is known to have ended
        self.metadata = security.authorization(token)
        self._max_message, self._closing = max_message, threading.Lock()
        self._channel, self.stub = self.loop.run(self._open(tls_ca))

    async def _open(self, tls_ca: str | None) -> tuple[grpc.aio.Channel, rpc.LabStub]:
        options = security.options(self._max_message)
        host = self.address.rpartition(":")[0]
        if tls_ca is not None:
            channel = grpc.aio.secure_channel(
                self.address, grpc.ssl_channel_credentials(Path(tls_ca).read_bytes()), options=options
            )
        elif security.is_loopback(host):
            channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            raise errors.ConfigError(
                f"{self.address} is not on this machine: the token would cross the network in clear text",
                remedy="pass tls_ca='path to the gateway's CA certificate'",
            )
        return channel, rpc.LabStub(channel)

    def begin(self, method: str, *request: Any, deadline: Deadline) -> Any:
        """Start a call that times out shortly after the deadline: the gateway first reports what it waited for."""
        seconds = deadline.left() + ANSWER_SECONDS
        return getattr(self.stub, method)(*request, timeout=seconds, metadata=self.metadata)

    async def acall(self, method: str, request: Any, timeout: float | Deadline = QUICK_SECONDS) -> Any:
        """One unary call on the background loop."""
        deadline = Deadline.of(timeout)
        return await self.guard(self.begin(method, request, deadline=deadline), method, deadline.seconds)

    def call(self, method: str, request: Any, timeout: float | Deadline = QUICK_SECONDS) -> Any:
        """One unary call; blocks until its reply."""
        return self.loop.run(self.acall(method, request, Deadline.of(timeout)))

    async def guard(self, awaited: Awaitable[T], what: str, timeout: float) -> T:
        """Await it, with gRPC's errors turned into ours."""
        try:
            return await awaited
        except grpc.aio.AioRpcError as error:
            raise translate(error, spaced(what), timeout, self.address) from None

    async def gather(self, method: str, request: Any, deadline: Deadline) -> list[Any]:
        """All messages of a streaming reply."""
        try:
            return [event async for event in self.begin(method, request, deadline=deadline)]
        except grpc.aio.AioRpcError as error:
            raise translate(error, spaced(method), deadline.seconds, self.address) from None

    async def follow(self, open_stream: Callable[[], Any], take: Callable[[Any], None]) -> str:
        """Read a long stream while the gateway lives, reopened when the connection breaks; returns why it ended."""
        failing_since = None
        while True:
            try:
                async for message in open_stream():
                    failing_since = None
                    take(message)
                return "it was ended"
            except grpc.aio.AioRpcError as error:
                code, now = error.code(), time.monotonic()
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue  # this stream's own deadline: open the next one
                failing_since = failing_since or now
                if code is not grpc.StatusCode.UNAVAILABLE or self.gone() or now - failing_since > GIVE_UP_SECONDS:
                    return f"the gateway at {self.address} went away: {received(error).message}"
                await asyncio.sleep(0.5)

    def close(self) -> None:
        """Close the channel and end the loop; a second call, from any thread, waits for the first."""
        with self._closing:
            if self.loop.stopping:
                return
            try:
                self.loop.run(self._channel.close(None))
            finally:
                self.loop.stop()


def spaced(method: str) -> str:
    """A method's name as words: "SetAdapter" is "set adapter"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", method).lower()


def translate(error: grpc.aio.AioRpcError, what: str, timeout: float, address: str) -> errors.JvlabError:
    """Our error for a gRPC one: the error raised on the other side if it was ours, else one chosen by status code."""
    sent = received(error)
    if (raised := rebuild(sent)) is not None:
        return raised
    message, remedy, code = sent.message, sent.remedy, grpc.StatusCode
    match error.code():
        case code.UNAUTHENTICATED:
            return errors.AuthError(
                f"the gateway at {address} refuses this token",
                remedy="jv.Lab.attach() finds the right one; is it another lab's?",
            )
        case code.UNAVAILABLE if sent.ours:  # the gateway answers; a replica does not
            return errors.ReplicaLost(message, remedy=remedy or LOST_REMEDY)
        case code.UNAVAILABLE:
            return errors.GatewayUnreachable(
                f"the gateway at {address} does not answer: {message}",
                remedy="it may have ended; start a new lab with jv.Lab(), or jv.Lab.attach() to find another",
            )
        case code.DEADLINE_EXCEEDED if sent.ours:
            return errors.DeadlineExceeded(
                f"{what} was not done within {timeout:g} s: {message}",
                remedy=remedy or "pass a larger timeout=, or look at pool.status() and pool.logs()",
            )
        case code.DEADLINE_EXCEEDED:  # the gateway itself did not answer
            return errors.DeadlineExceeded(
                f"{what}: the gateway at {address} did not answer within {timeout:g} s",
                remedy="is its process stopped, or its machine overloaded? pass a larger timeout= if it is only slow",
            )
        case code.RESOURCE_EXHAUSTED:
            return errors.MessageTooLarge(
                f"{what}: {message}", remedy="send fewer or shorter prompts in one call (pool.stream in pieces)"
            )
        case code.INVALID_ARGUMENT:
            return errors.SamplingError(message, remedy=remedy)
        case code.UNIMPLEMENTED:
            return errors.Unsupported(message, remedy=remedy)
        case code.UNKNOWN:
            return errors.ControlError(
                f"{what}: the gateway at {address} has a fault: {message}",
                remedy="please report it, with the lines at the end of gateway.log in the lab's folder",
            )
        case _ if sent.ours:
            return errors.ControlError(message, remedy=remedy)
        case _:
            return errors.ControlError(
                f"{what}: {message}", remedy="is the lab still there? `jvlab ps` shows yours; jv.Lab.attach() joins one"
            )

"""The caller's end of the control plane: one background event loop, one channel, errors mapped to ours.

Everything runs on a loop in a thread of its own, so that the same code serves scripts, notebooks (whose main thread has
a loop running already) and coroutines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from jvlab import _errors as errors
from jvlab import _tracebacks
from jvlab._deadline import ANSWER_SECONDS, Deadline
from jvlab._errors import DeadlineExceeded
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._channels import Trust, open_channel
from jvlab.wire._rpc_errors import LOST_REMEDY, in_words, rebuild, received
from jvlab.wire._sync_words import CODE_ERRORS, GRACE

T = TypeVar("T")
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
GIVE_UP_SECONDS = 30.0  # without a connection for this long, a gateway counts as gone
QUICK_SECONDS = 30.0  # deadline of calls that only query or notify
STOP_SECONDS = 10.0  # for what still runs when a lab is closed
CHECK_SECONDS = 1.0  # between two checks of a wait
CLOSE_SECONDS = 10.0  # for a read that was cancelled to end
RETRY_SECONDS = 0.5
# calls that may be carried out twice: asked again if the gateway dies meanwhile, and comes back
REPEATABLE = ("Describe", "Detach", "Logs", "Scale", "Status", "Steer")


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="jvlab-client", daemon=True
        )
        self._thread.start()
        # re-entrant: a signal handler or a finaliser may call in between
        self._submitting = threading.RLock()
        self.stopping = False

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        # nothing comes after `stop` has begun: it would never be run, nor cancelled
        with self._submitting:
            if not self.stopping:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise errors.ControlError(
            "this lab is closed", remedy="start a new one: lab = jv.Lab()"
        )

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
            # no deadline: the work has one, and `stop` cancels it
            return future.result()
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
            tasks = [
                task
                for task in asyncio.all_tasks()
                if task is not asyncio.current_task()
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        # something ignores that it is cancelled, or blocks the loop
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result(
                STOP_SECONDS
            )
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


def _check_until_done(
    future: concurrent.futures.Future[Any], check: Callable[[], None]
) -> None:
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
        self,
        loop: BackgroundLoop,
        source: AsyncGenerator[T, None],
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` is called every second that a `for` waits; what it raises ends the stream."""
        self._loop = loop
        self._source = source
        self._check = check
        # the one that waits for the next, or did last
        self._reading: asyncio.Task[Any] | None = None

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
            # a second time would break off what it does to end
            if not self._reading.cancelling():
                self._reading.cancel()
            await asyncio.wait([self._reading], timeout=CLOSE_SECONDS)
        await self._source.aclose()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A channel to one gateway, with its token on every call."""

    # seconds to wait for a gateway that died, as it comes back from its state file; 0: it does not
    away = 0.0

    def __init__(
        self,
        address: str,
        token: str,
        trust: Trust | None = None,
    ) -> None:
        self.address, self.loop = address, BackgroundLoop()
        # whether the gateway is known to have ended
        self.gone: Callable[[], bool] = lambda: False
        self.metadata = security.authorization(token)
        # the gateway's replies to orders that engines have carried out already
        self.owed: set[concurrent.futures.Future[Any]] = set()
        self._closing = threading.Lock()
        self._channel, self.stub = self.loop.run(self._open(trust or Trust()))

    async def _open(self, trust: Trust) -> tuple[grpc.aio.Channel, rpc.LabStub]:
        channel = open_channel(self.address, trust)
        return channel, rpc.LabStub(channel)

    def link(self) -> LinkStream:
        """The stream on which a link's orders go; not open yet."""
        return LinkStream(self)

    def begin(self, method: str, *request: Any, deadline: Deadline) -> Any:
        """Start a call that times out shortly after the deadline: the gateway first reports what it waited for."""
        seconds = deadline.left() + ANSWER_SECONDS
        return getattr(self.stub, method)(
            *request, timeout=seconds, metadata=self.metadata
        )

    async def back(self, deadline: Deadline) -> None:
        """Wait for a gateway that died and comes back, if it is such a one; what is asked then is not lost."""
        seconds = deadline.within(self.away)
        ready = grpc.ChannelConnectivity.READY
        if not self.away or self._channel.get_state(try_to_connect=True) is ready:
            return
        try:
            await asyncio.wait_for(self._channel.channel_ready(), seconds)
        except TimeoutError:
            raise errors.GatewayUnreachable(
                f"the gateway at {self.address} did not come back within {seconds:.3g} s",
                remedy="start it again with its state file: jvlab gateway --state FILE",
            ) from None

    async def acall(
        self, method: str, request: Any, timeout: float | Deadline = QUICK_SECONDS
    ) -> Any:
        """One unary call on the background loop."""
        deadline = Deadline.of(timeout)
        if self.owed:
            await self._catch_up(deadline)
        while True:
            await self.back(deadline)
            try:
                with self.translating(method, deadline.seconds):
                    return await self.begin(method, request, deadline=deadline)
            except errors.GatewayUnreachable:
                again = self.away and method in REPEATABLE
                if not again or deadline.left() < RETRY_SECONDS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _catch_up(self, deadline: Deadline) -> None:
        """Let the gateway learn of this process's syncs first: what is asked next must not overtake them."""
        replies = [asyncio.wrap_future(reply) for reply in tuple(self.owed)]
        done, _ = await asyncio.wait(replies, timeout=deadline.left())
        for reply in done:
            if not reply.cancelled():
                reply.exception()  # no deadline: it is done; the link raises it

    def call(
        self, method: str, request: Any, timeout: float | Deadline = QUICK_SECONDS
    ) -> Any:
        """One unary call; blocks until its reply."""
        return self.loop.run(self.acall(method, request, Deadline.of(timeout)))

    def describe(self, seconds: float) -> pb.LabStatus:
        """The lab's status, or an error within the time: a client that is being closed may never reply."""
        asked = self.acall("Describe", pb.DescribeRequest(), seconds)
        return self.loop.submit(asked).result(seconds + 1.0)

    @contextlib.contextmanager
    def translating(self, what: str, seconds: float) -> Iterator[None]:
        """Inside, gRPC's errors are raised as ours. `what`: a method, which becomes words ("set adapter"), or words."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", what).lower()
            raise translate(error, words, seconds, self.address, self.away) from None

    async def gather(self, method: str, request: Any, deadline: Deadline) -> list[Any]:
        """All messages of a streaming reply."""
        await self.back(deadline)
        with self.translating(method, deadline.seconds):
            call = self.begin(method, request, deadline=deadline)
            return [event async for event in call]

    async def follow(
        self,
        open_stream: Callable[[], Any],
        take: Callable[[Any], None],
        broken: Callable[[], None] = lambda: None,
    ) -> str:
        """Read a long stream while the gateway lives, reopened when the connection breaks; `broken` is told of that.

        Returns how the gateway was lost; "" if it ended the stream itself.
        """
        failing_since = None
        while True:
            try:
                async for message in open_stream():
                    failing_since = None
                    take(message)
                return ""
            except grpc.aio.AioRpcError as error:
                code = error.code()
                now = time.monotonic()
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue  # this stream's own deadline: open the next one
                if failing_since is None:
                    broken()
                failing_since = failing_since or now
                if (
                    code is not grpc.StatusCode.UNAVAILABLE
                    or self.gone()
                    or now - failing_since > (self.away or GIVE_UP_SECONDS)
                ):
                    return f"the gateway at {self.address} went away: {received(error).message}"
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Close the channel and end the loop; a second call, from any thread, waits for the first."""
        with self._closing:
            if self.loop.stopping:
                return
            try:
                self.loop.run(self._channel.close(None))
            finally:
                self.loop.stop()


def translate(
    error: grpc.aio.AioRpcError,
    what: str,
    timeout: float,
    address: str,
    away: float = 0.0,
) -> errors.JvlabError:
    """Our error for a gRPC one: the error raised on the other side if it was ours, else one chosen by status code.

    away    seconds that a gateway which died is waited for; 0: it does not come back
    """
    sent = received(error)
    if (raised := rebuild(sent)) is not None:
        return raised
    message = sent.message
    remedy = sent.remedy
    code = grpc.StatusCode
    match error.code():
        case code.UNAUTHENTICATED:
            return errors.AuthError(
                f"the gateway at {address} refuses this token",
                remedy="jv.Lab.attach() finds the right one; is it another lab's?",
            )
        case code.UNAVAILABLE if sent.ours:  # the gateway answers; a replica does not
            return errors.ReplicaLost(message, remedy=remedy or LOST_REMEDY)
        # INTERNAL: a stream broke before its first answer
        case code.UNAVAILABLE | code.INTERNAL if not sent.ours:
            return errors.GatewayUnreachable(
                f"the gateway at {address} does not answer: {message}",
                remedy=f"try again: calls wait up to {away:g} s for it to be started again with its state file"
                if away
                else "it may have ended; start a new lab with jv.Lab(), or jv.Lab.attach() to find another",
            )
        case code.DEADLINE_EXCEEDED if sent.ours:
            return errors.DeadlineExceeded(
                f"{what} was not done within {timeout:g} s: {message}",
                remedy=remedy
                or "pass a larger timeout=, or look at pool.status() and pool.logs()",
            )
        case code.DEADLINE_EXCEEDED:  # the gateway itself did not answer
            return errors.DeadlineExceeded(
                f"{what}: the gateway at {address} did not answer within {timeout:g} s",
                remedy="is its process stopped, or its machine overloaded? pass a larger timeout= if it is only slow",
            )
        case code.RESOURCE_EXHAUSTED:
            return errors.MessageTooLarge(
                f"{what}: {message}",
                remedy="send fewer or shorter prompts in one call (pool.stream in pieces)",
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
                f"{what}: {message}",
                remedy="is the lab still there? `jvlab ps` shows yours; jv.Lab.attach() joins one",
            )


# The trainer's end of a link's control stream: one reply per order; failures are raised as our errors.

# to wait for the gateway to release a stream that this process just dropped
OWN_STREAM_SECONDS = 20.0
MIN_SECONDS = 0.05  # deadline of an order that is given late


class LinkStream:
    """A stream to the gateway for the life of a link. Closing it abandons an open sync and frees the pool."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._call: Any = None
        self._numbers = 0
        self.busy = False  # an order is in flight, its reply unread
        # replies to posted orders, in order
        self._owed: deque[concurrent.futures.Future[pb.LinkReply]] = deque()
        # of the open call: replies are read in the order in which orders are written
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._call is not None and not self._call.done()

    def open(self, request: pb.LinkOpen, seconds: float) -> pb.LinkReply:
        """Acquire the pool, or raise LinkBusy with the holder's name. Waits for a stream this process just dropped."""
        deadline = Deadline(seconds)
        until = time.monotonic() + min(OWN_STREAM_SECONDS, seconds)
        while True:
            reply = self._order(pb.LinkOrder(open=request), deadline.left())
            if (
                reply.code == "busy"
                and reply.holder == request.holder
                and time.monotonic() < until
            ):
                self.close()
                time.sleep(0.1)
                continue
            if reply.code:
                self.close()
            return check(reply)

    def steps(
        self,
        phases: Sequence[int],
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
        **more: Any,
    ) -> pb.LinkReply:
        """Run these phases in order; raises if one failed, with every replica's outcome in the error.

        `meanwhile` is called while the order is carried out.
        """
        self.settle(seconds)
        return check(self._order(_steps(phases, **more), seconds, meanwhile))

    def post(
        self, phases: Sequence[int], seconds: float, **more: Any
    ) -> concurrent.futures.Future[pb.LinkReply]:
        """Give an order and do not wait for its reply: `settle` does, at the latest at the next `steps`."""
        order = self._numbered(_steps(phases, **more), seconds)
        reply = self._client.loop.submit(self._exchange(order))
        self._owed.append(reply)
        return reply

    def done_early(self, reply: concurrent.futures.Future[pb.LinkReply]) -> None:
        """The order of this reply is known to be carried out."""
        self._client.owed.add(reply)
        reply.add_done_callback(self._client.owed.discard)

    def settle(
        self,
        seconds: float,
        until: concurrent.futures.Future[pb.LinkReply] | None = None,
    ) -> pb.LinkReply:
        """The last of the replies to posted orders, all or those before `until`; raises if one of them failed."""
        if self._call is None:
            raise closed_here()
        reply = pb.LinkReply()
        while self._owed and self._owed[0] is not until:
            try:
                reply = self._owed.popleft().result(seconds)
            except errors.JvlabError:  # some are TimeoutErrors too
                raise
            except TimeoutError:
                self.busy = True
                raise self._late("reply to an order", seconds) from None
            except concurrent.futures.CancelledError:
                raise closed_here() from None
            check(reply)
        return reply

    def _numbered(self, order: pb.LinkOrder, seconds: float) -> pb.LinkOrder:
        self._numbers += 1
        order.number = self._numbers
        order.seconds = max(seconds, MIN_SECONDS)
        return order

    def _order(
        self,
        order: pb.LinkOrder,
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> pb.LinkReply:
        self.busy = True
        work = self._exchange(self._numbered(order, seconds))
        reply = self._client.loop.run(work, meanwhile)
        self.busy = False
        return reply

    async def _exchange(self, order: pb.LinkOrder) -> pb.LinkReply:
        seconds = order.seconds
        if self._call is None and not order.HasField("open"):
            raise closed_here()
        if not self.is_open:
            if not order.HasField("open"):
                raise self._over()
            await self._client.back(Deadline(seconds))
            self._call = self._client.stub.Link(metadata=self._client.metadata)
            self._writing = asyncio.Lock()
            self._reading = asyncio.Lock()
        call: Any = self._call  # another thread may call close() at any time
        reading = self._reading
        with self._client.translating("link", seconds):
            try:
                async with asyncio.timeout(seconds + GRACE):
                    async with self._writing:
                        await call.write(order)
                    async with reading:
                        reply = await call.read()
                    if reply is EOF:
                        code = await call.code()
                        details = await call.details()
                        raise errors.SyncError(
                            f"the gateway ended the link: {in_words(code, details)}",
                            remedy="sync again: a new stream is opened",
                        )
            except TimeoutError:
                raise self._late("answer an order of the sync", seconds) from None
            except (
                asyncio.InvalidStateError
            ):  # written to a stream that ended meanwhile
                if self._call is not call:
                    raise closed_here() from None
                raise self._over() from None
        if reply.number != order.number:
            raise errors.SyncError(
                f"reply {reply.number} to order {order.number}", remedy="sync again"
            )
        return reply

    def _late(self, what: str, seconds: float) -> errors.SyncDeadline:
        return errors.SyncDeadline(
            f"the gateway at {self._client.address} did not {what} within {seconds:.3g} s",
            remedy="is its process stopped, or its machine overloaded? sync again when it answers",
        )

    def _over(self) -> errors.GatewayUnreachable:
        return errors.GatewayUnreachable(
            f"the link's stream to the gateway at {self._client.address} is over",
            remedy="sync again, or jv.Lab.attach() if the gateway ended",
        )

    def close(self) -> None:
        """End the stream. Can be called twice."""
        call = self._call
        self._call = None
        self.busy = False
        self._owed.clear()
        if call is not None and not self._client.loop.loop.is_closed():
            self._client.loop.loop.call_soon_threadsafe(call.cancel)


def _steps(phases: Sequence[int], **more: Any) -> pb.LinkOrder:
    numbers: Any = list(phases)
    return pb.LinkOrder(steps=pb.SyncSteps(phases=numbers, **more))


def closed_here() -> errors.TransportError:
    """The error of an order on a stream that another thread of this process has closed."""
    text = "the link's stream to the gateway was closed here"
    return errors.TransportError(
        text, remedy="sync again: a new stream is opened", reason="closed here"
    )


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


# One trainer process's stream to the other processes of its trainer, through the gateway.

WRITE_SECONDS = 30.0
END_SECONDS = 2.0
Message = dict[str, Any]


class TeamStream:
    """A stream for the life of a team. Messages are queued until they are read; the team's end is reported at once."""

    def __init__(self, client: Client, join: pb.TeamJoin) -> None:
        self._client = client
        self.names = [""] * join.size
        self.complete = False
        self.over = ""  # why this team is over
        self._inbox: dict[int, deque[Message]] = {}
        self.changed = threading.Condition()  # guards the fields above; reentrant
        # called on the client's loop at a message, and at the end
        self.on_news: Callable[[], None] = lambda: None
        # gRPC breaks off a call that is given a message while it takes another
        self._writing = asyncio.Lock()
        self._call: Any = client.loop.run(self._open())
        self._reading = client.loop.submit(self._read(join))

    async def _open(self) -> Any:
        return self._client.stub.Team(metadata=self._client.metadata)

    async def _read(self, join: pb.TeamJoin) -> None:
        why = "its stream to the gateway was closed"
        try:
            await self._call.write(pb.TeamMessage(join=join))
            # no deadline: members are silent between two syncs; `wait` has one
            while (event := await self._call.read()) is not EOF:
                if event.WhichOneof("kind") == "over":
                    why = event.over
                    break
                self._take(event)
            else:
                code = await self._call.code()
                details = await self._call.details()
                why = why if code is grpc.StatusCode.OK else in_words(code, details)
        except grpc.aio.AioRpcError as error:
            why = translate(error, "team", WRITE_SECONDS, self._client.address).message
        finally:
            with self.changed:
                self.over = self.over or why
                self.changed.notify_all()
            self.on_news()

    def _take(self, event: pb.TeamEvent) -> None:
        with self.changed:
            if event.WhichOneof("kind") == "roll":
                self.names = list(event.roll.names)
                self.complete = event.roll.complete
            else:
                self._inbox.setdefault(event.delivery.member, deque()).append(
                    json.loads(event.delivery.payload)
                )
            self.changed.notify_all()
        self.on_news()

    def wait(self, done: Callable[[], Any], seconds: float) -> Any:
        """What `done` returns once it is true; None when the time or the team is over. `done` may read `messages`."""
        end = time.monotonic() + seconds
        with self.changed:
            while True:
                found = done()
                left = end - time.monotonic()
                if found or self.over or left <= 0:
                    return found or None
                self.changed.wait(min(left, 1.0))

    def messages(self, member: int) -> deque[Message]:
        """A member's unread messages; only to be used while `changed` is held, as it is inside `wait`."""
        return self._inbox.setdefault(member, deque())

    def send(self, message: Message, to_all: bool = False) -> None:
        """To all others (member 0, or `to_all`), else to member 0. `over` reports a team that has ended."""
        if not self.over:
            self._client.loop.run(
                self._send(
                    pb.TeamMessage(payload=json.dumps(message).encode(), to_all=to_all)
                )
            )

    async def _send(self, message: pb.TeamMessage) -> None:
        # If the stream has ended, the reader sets `over` to the reason.
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(WRITE_SECONDS), self._writing:
                    await self._call.write(message)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the gateway at {self._client.address} took no message of this trainer within {WRITE_SECONDS:g} s",
                remedy="is its process stopped, or its machine overloaded? sync again when it answers",
            ) from None

    def close(self) -> None:
        """Leave; the others are notified. Can be called twice."""
        with self.changed:
            self.over = self.over or "this process left it"
            self.changed.notify_all()
        if not self._client.loop.loop.is_closed():
            with suppress(Exception):
                self._client.loop.submit(self._end()).result(END_SECONDS + 1.0)

    async def _end(self) -> None:
        """End the call so that earlier messages still arrive; a cancelled call may drop them."""
        with suppress(Exception):
            async with asyncio.timeout(END_SECONDS):
                await self._call.done_writing()
                await asyncio.shield(asyncio.wrap_future(self._reading))
        self._call.cancel()

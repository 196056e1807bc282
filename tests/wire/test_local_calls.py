"""Calls without gRPC behave as gRPC's do: replies, errors, deadlines, cancelling. On a servicer made for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from jvlab import errors
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import BackgroundLoop, TeamStream
from jvlab.wire._local_calls import EOF, LocalClient, LocalStub
from jvlab.wire._rpc_errors import reports_errors
from tests.waiting import until

PATIENCE = 30.0


@reports_errors
class Servicer:
    """One method of each kind."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Unary(self, request: pb.PoolRequest, context: Any) -> pb.PoolStatus:
        return pb.PoolStatus(pool=request.pool)

    async def Refuses(self, request: pb.PoolRequest, context: Any) -> pb.PoolStatus:
        raise errors.SamplingError("not that", remedy="this")

    async def Breaks(self, request: pb.PoolRequest, context: Any) -> pb.PoolStatus:
        raise KeyError("a bug")

    async def Counts(self, request: pb.PoolRequest, context: Any) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def Hangs(self, request: pb.PoolRequest, context: Any) -> AsyncIterator[int]:
        try:
            yield 0
            await asyncio.sleep(3600)
        finally:
            self.left.set()

    async def Echoes(
        self, requests: AsyncIterator[int], context: Any
    ) -> AsyncIterator[int]:
        async for number in requests:
            yield 10 * number

    async def Reads(self, requests: AsyncIterator[int], context: Any) -> None:
        while (number := await context.read()) is not EOF:
            await context.write(number + 1)

    async def Remains(self, request: pb.PoolRequest, context: Any) -> float | None:
        return context.time_remaining()


Body = Callable[[Any, Servicer], Awaitable[None]]


def run(body: Body) -> None:
    async def main() -> None:
        servicer = Servicer()
        async with asyncio.timeout(PATIENCE):
            await body(LocalStub(servicer), servicer)

    asyncio.run(main())


ASK = pb.PoolRequest(pool="p")


def test_one_reply_and_many():
    async def body(stub: Any, servicer: Servicer) -> None:
        assert (await stub.Unary(ASK, timeout=5, metadata=())).pool == "p"
        assert [n async for n in stub.Counts(ASK)] == [0, 1, 2]
        assert await stub.Remains(ASK, timeout=5) <= 5
        call = stub.Counts(ASK)
        assert [await call.read() for _ in range(4)] == [0, 1, 2, EOF]
        assert await call.read() is EOF, "whoever asks again is told again"
        assert await call.code() is grpc.StatusCode.OK

    run(body)


def test_a_stream_of_requests():
    async def body(stub: Any, servicer: Servicer) -> None:
        for method in (stub.Echoes, stub.Reads):
            call = method()
            await call.write(1)
            assert await call.read() == (
                10 if method.args[0].__name__ == "Echoes" else 2
            )
            await call.done_writing()
            assert await call.read() is EOF
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(2)

    run(body)


@pytest.mark.parametrize(
    ("method", "code", "details"),
    [("Refuses", "INVALID_ARGUMENT", "not that"), ("Breaks", "UNKNOWN", "KeyError")],
)
def test_errors_are_grpcs(method: str, code: str, details: str):
    async def body(stub: Any, servicer: Servicer) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(ASK)
        assert caught.value.code().name == code
        assert details in str(caught.value.details())

    run(body)


def test_a_deadline_ends_the_work_too():
    async def body(stub: Any, servicer: Servicer) -> None:
        call = stub.Hangs(ASK, timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [n async for n in call]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await servicer.left.wait()
        assert not call.cancelled()

    run(body)


def test_cancel_ends_the_work_and_the_wait():
    async def body(stub: Any, servicer: Servicer) -> None:
        call = stub.Hangs(ASK)
        assert await call.read() == 0
        assert call.cancel()
        assert call.done()
        assert call.cancelled()
        assert not call.cancel(), "once"
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await servicer.left.wait()

    run(body)


def test_a_cancelled_reader_takes_its_call_with_it():
    async def body(stub: Any, servicer: Servicer) -> None:
        call = stub.Hangs(ASK)
        await call.read()
        reader = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        reader.cancel()
        await servicer.left.wait()
        assert call.cancelled()

    run(body)


def test_a_call_that_is_cancelled_before_it_began_has_ended():
    async def body(stub: Any, servicer: Servicer) -> None:
        call = stub.Counts(ASK)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()

    run(body)


@pytest.fixture
def client() -> Iterator[LocalClient]:
    client = LocalClient()
    client.stub = LocalStub(Servicer())
    yield client
    client.close()
    client.close()


def test_the_clients_calls_raise_our_errors(client: LocalClient):
    assert client.call("Unary", ASK).pool == "p"
    with pytest.raises(errors.SamplingError, match="not that") as caught:
        client.call("Refuses", ASK)
    assert caught.value.remedy == "this"


def test_what_comes_while_a_lab_closes_is_refused_and_waited_for_by_nobody():
    loop = BackgroundLoop()
    cancelled, go_on = threading.Event(), threading.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)

    waiting = loop.submit(slow_to_end())
    until(lambda: asyncio.all_tasks(loop.loop))
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    assert cancelled.wait(PATIENCE)
    try:
        # it would be neither run nor cancelled
        with pytest.raises(errors.ControlError, match="closed"):
            loop.submit(asyncio.sleep(3600))
    finally:
        go_on.set()
        stopping.join(PATIENCE)
    assert not stopping.is_alive()
    assert waiting.done()
    assert loop.loop.is_closed()
    loop.stop()


def test_a_gateway_that_takes_no_message_of_a_team_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("jvlab.wire._client.WRITE_SECONDS", 0.2)

    class Silent:
        """A stream whose other end is stopped: its window is full."""

        async def write(self, _: Any) -> None:
            await asyncio.sleep(3600)

        def cancel(self) -> None: ...

    client = LocalClient()
    client.stub = SimpleNamespace(Team=lambda **_: Silent())
    stream = TeamStream(client, pb.TeamJoin(size=2))
    raised: list[errors.JvlabError] = []

    def send() -> None:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            stream.send({})
        raised.append(caught.value)

    sending = threading.Thread(target=send)
    sending.start()
    sending.join(PATIENCE)
    client.close()
    assert "the gateway at this process took no message" in str(raised[0])

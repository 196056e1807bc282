"""An error raised in a servicer is the same error for the caller, over gRPC and inside one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from jvlab import errors
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._client import translate
from jvlab.wire._local_calls import LocalStub
from jvlab.wire._rpc_errors import CallFailed, refused, reports_errors

NASTY = "größer als 7\n  → no remedy, only text\x01"
CASES: list[tuple[Exception, type[errors.JvlabError], str, str]] = [
    (errors.LimitExceeded("too many", remedy="fewer", name="n", limit=3), errors.LimitExceeded, "too many", "fewer"),
    (errors.EngineDirty(NASTY, remedy="sync → again"), errors.EngineDirty, NASTY, "sync → again"),
    (errors.Unsupported("not here"), errors.Unsupported, "not here", ""),
    (errors.ReplicaLost("p/0 was lost"), errors.ReplicaLost, "p/0 was lost", ""),
    (refused("not now", "later"), errors.ControlError, "peek: FAILED_PRECONDITION: not now", "later"),
    (
        CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "waited for p/0", "pool.resume() lets it go on"),
        errors.DeadlineExceeded,
        "peek was not done within 7 s: waited for p/0",
        "pool.resume() lets it go on",
    ),
    (errors.ConfigError("long", remedy="r" * 9000), errors.ConfigError, "long", "r" * 512),
    (KeyError("a bug"), errors.ControlError, "peek: UNKNOWN: Unexpected <class 'KeyError'>: 'a bug'", ""),
]


@reports_errors
class Servicer(rpc.LabServicer):
    raises: Exception

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.LabStatus:
        raise self.raises

    async def Peek(self, request: pb.PeekCall, context: Any) -> AsyncIterator[pb.PeekEvent]:
        yield pb.PeekEvent(piece=b"1")
        raise self.raises


async def caught(stub: Any, streams: bool) -> errors.JvlabError:
    async def call() -> None:
        if streams:
            async for event in stub.Peek(pb.PeekCall(), timeout=20):
                assert event.piece == b"1"
        else:
            await stub.Describe(pb.DescribeRequest(), timeout=20)

    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call()
    return translate(info.value, "peek", 7, "nowhere")


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("local", [False, True], ids=["grpc", "local"])
def test_errors_cross_the_wire(local: bool, streams: bool):
    async def body() -> None:
        servicer = Servicer()
        server = grpc.aio.server()
        rpc.add_LabServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = LocalStub(servicer) if local else rpc.LabStub(channel)
            for servicer.raises, kind, message, remedy in CASES:
                error = await caught(stub, streams)
                assert type(error) is kind
                assert (error.message, error.remedy) == (message, remedy)
            servicer.raises = CASES[0][0]
            assert (await caught(stub, streams)).fields == {"name": "n", "limit": 3}
        await server.stop(None)

    asyncio.run(body())

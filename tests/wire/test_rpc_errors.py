"""An error raised in a servicer is the same error for the caller, over gRPC and inside one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._client import translate
from jvlab.wire._local_calls import LocalStub
from jvlab.wire._rpc_errors import CallFailed, refused, reports_errors

NASTY = "größer als 7\n  → no remedy, only text\x01"
CASES: list[tuple[Exception, type[errors.JvlabError], str, str]] = [
    (
        errors.LimitExceeded("too many", remedy="fewer", name="n", limit=3),
        errors.LimitExceeded,
        "too many",
        "fewer",
    ),
    (
        errors.EngineDirty(NASTY, remedy="sync → again"),
        errors.EngineDirty,
        NASTY,
        "sync → again",
    ),
    (errors.Unsupported("not here"), errors.Unsupported, "not here", ""),
    (errors.ReplicaLost("p/0 was lost"), errors.ReplicaLost, "p/0 was lost", ""),
    (refused("not now", "later"), errors.ControlError, "not now", "later"),
    (
        CallFailed(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "waited for p/0",
            "pool.resume() lets it continue",
        ),
        errors.DeadlineExceeded,
        "peek was not done within 7 s: waited for p/0",
        "pool.resume() lets it continue",
    ),
    (
        errors.ConfigError("long", remedy="r" * 9000),
        errors.ConfigError,
        "long",
        "r" * 512,
    ),
    (
        CallFailed(grpc.StatusCode.UNAVAILABLE, "the engine died"),
        errors.ReplicaLost,
        "the engine died",
        "pool.status() and pool.logs() show what happened",
    ),
    (
        KeyError("a bug"),
        errors.ControlError,
        "peek: the gateway at nowhere has a fault: it failed with KeyError: 'a bug'",
        "please report it, with the lines at the end of gateway.log in the lab's folder",
    ),
]
# What gRPC says by itself.
DETAILS = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "connect: Connection refused (111)",
    "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:7: Timeout occurred: FD Shutdown",
    "Socket closed",
    "recvmsg:Connection reset by peer",
    "sendmsg: Broken pipe (32)",
    "GOAWAY received; Error code: 11; Debug Text: ping_timeout",
    "keepalive watchdog timeout",
    "Channel closed!",
    "Cancelled on the server side",
    "Locally cancelled by application!",
    "Deadline Exceeded",
    "DNS resolution failed for nowhere:7: C-ares status is not ARES_SUCCESS qtype=A",
    "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED",
    "Stream removed",
    "Internal error from Core",
    "Received RST_STREAM with error code 2",
    "Method not found!",
    "Received message larger than max (70000000 vs. 67108864)",
    "Internal error from Core: UNKNOWN:Error received from peer {grpc_status:13}",
    "",
)
OWN_WORDS = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
OWN_WORDS += [
    "grpc",
    "ipv4",
    "all addresses",
    "Socket",
    "FD ",
    "GOAWAY",
    "RST_STREAM",
    "hannel",
    "TSI_",
    "keepalive",
]
OWN_WORDS += [
    "StatusCode",
    "ARES",
    "larger than max",
    "watchdog",
    "Locally",
    "Method not",
]


@reports_errors
class Servicer(rpc.LabServicer):
    raises: Exception

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.LabStatus:
        raise self.raises

    async def Peek(
        self, request: pb.PeekCall, context: Any
    ) -> AsyncIterator[pb.PeekEvent]:
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


@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
)
def test_words_of_grpc_do_not_reach_the_user(code: grpc.StatusCode):
    for details in DETAILS:
        failure = grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(), details
        )
        error = translate(failure, "peek", 7, "127.0.0.1:7")
        assert not [word for word in OWN_WORDS if word in str(error)], error
        assert error.remedy or code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNIMPLEMENTED,
        ), error
        passed_on = CallFailed.of(failure)
        assert not [word for word in OWN_WORDS if word in str(passed_on)], passed_on


def test_a_stream_that_broke_before_its_first_answer_names_the_gateway():
    """It was called an internal error of gRPC's core, when a gateway was killed in the middle of a sync."""
    metadata = grpc.aio.Metadata()
    internal = grpc.StatusCode.INTERNAL
    for details in ("Internal error from Core", "RST_STREAM"):
        failure = grpc.aio.AioRpcError(internal, metadata, metadata, details)
        error = translate(failure, "link", 7, "127.0.0.1:7", away=60.0)
        assert isinstance(error, errors.GatewayUnreachable)
        assert "does not answer: the connection was closed" in error.message
        assert "up to 60 s" in error.remedy


def test_a_gateway_that_is_not_there_is_named_in_plain_words():
    with pytest.raises(errors.GatewayUnreachable) as caught:
        jv.Lab.attach("127.0.0.1:1", "token")
    assert (
        caught.value.message
        == "the gateway at 127.0.0.1:1 does not answer: nothing listens there"
    )

"""What stands in front of vLLM's app on a replica, around an app and an engine that are fakes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jvlab._errors import EngineDirty
from jvlab.engine._http import Labelled, ReplicaGate, loopback_listener
from jvlab.wire._limits import Limits

starlette = pytest.importorskip("starlette.datastructures")  # vLLM brings it
Message = dict[str, Any]


class FakeEngine:
    """As much of `Engine` as the gate touches."""

    def __init__(self) -> None:
        self.version, self.dead, self.replica, self.dirty = 3, False, "p/0", False
        self.busy: set[asyncio.Task[Any]] = set()
        self.limits, self.facts = (
            Limits.resolve({}, 8, 64),
            SimpleNamespace(max_model_len=64, vocab_size=100),
        )

    async def wait_clean(self) -> None:
        if self.dirty:
            raise EngineDirty("dirty: parts of two versions", remedy="sync again")

    def why_dead(self) -> str:
        return "the engine died"

    def spawn(self, job: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(job)
        self.busy.add(task)
        task.add_done_callback(self.busy.discard)
        return task


class FakeLlm:
    """Streams two outputs, the second by another version."""

    model = "tiny"

    async def generate(self, *_: Any, **__: Any) -> Any:
        for version, start in (("3", 0), ("4", 1)):
            span = SimpleNamespace(version=version, start=start, end=start + 1)
            yield SimpleNamespace(outputs=[SimpleNamespace(weight_versions=[span])])


async def call(
    app: Any,
    engine: FakeEngine,
    headers: dict[str, str] | None = None,
    epoch: int = 1,
    during: Callable[[], Awaitable[None]] | None = None,
    body: bytes = b"",
) -> list[Message]:
    """One POST through the gate; what was sent to the client."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asked = [body]

    async def receive() -> Message:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    gate = ReplicaGate(
        app,
        lambda given: given.get("Authorization") == "Bearer t",
        engine,  # type: ignore[arg-type]
        lambda: epoch,
    )
    listed = {"authorization": "Bearer t", **(headers or {})}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(k.encode(), v.encode()) for k, v in listed.items()],
    }
    asking = asyncio.create_task(gate(scope, receive, send))
    if during is not None:
        await during()
    await asyncio.wait_for(asking, 60)
    return sent


def header(sent: list[Message], name: str) -> str | None:
    return next((v.decode() for k, v in sent[0]["headers"] if k.decode() == name), None)


def answering(llm: Any, kind: str = "application/json", status: int = 200) -> Any:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        if kind == "text/event-stream":
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [(b"content-type", kind.encode())],
                }
            )
        async for _ in llm.generate():
            if kind == "text/event-stream":
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"data: x\n\n",
                        "more_body": True,
                    }
                )
        if kind != "text/event-stream":
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": [(b"content-type", kind.encode())],
                }
            )
        await send({"type": "http.response.body", "body": b""})

    return app


def test_an_answer_names_every_version_that_made_it():
    sent = asyncio.run(call(answering(Labelled(FakeLlm())), FakeEngine()))
    assert (header(sent, "x-jvlab-version"), header(sent, "x-jvlab-versions")) == (
        "3",
        "3,4",
    )
    assert header(sent, "x-jvlab-replica") == "p/0"
    assert Labelled(FakeLlm()).model == "tiny", "all else is the engine's own"


def test_a_stream_names_them_at_its_end():
    sent = asyncio.run(
        call(answering(Labelled(FakeLlm()), "text/event-stream"), FakeEngine())
    )
    assert header(sent, "x-jvlab-version") == "3"
    assert sent[-1]["body"] == b": x-jvlab-versions 3,4\n\n"


@pytest.mark.parametrize(
    ("change", "headers", "epoch", "status", "refused"),
    [
        ({}, {"authorization": "Bearer wrong"}, 1, 401, None),
        ({"dirty": True}, {}, 1, 503, "dirty"),
        ({"dead": True}, {}, 1, 503, "dead"),
        ({}, {}, 0, 503, "fenced"),
        ({}, {"x-jvlab-epoch": "2"}, 1, 503, "fenced"),
        ({}, {"x-jvlab-epoch": "1"}, 1, 200, None),
    ],
)
def test_who_may_not_answer(
    change: dict[str, bool],
    headers: dict[str, str],
    epoch: int,
    status: int,
    refused: Any,
):
    engine = FakeEngine()
    for name, value in change.items():
        setattr(engine, name, value)
    sent = asyncio.run(call(answering(Labelled(FakeLlm())), engine, headers, epoch))
    assert (sent[0]["status"], header(sent, "x-jvlab-refused")) == (status, refused)


def test_an_engine_that_dies_meanwhile_is_said_to_be_dead():
    engine = FakeEngine()
    inner = answering(Labelled(FakeLlm()), status=500)

    async def app(scope: Message, receive: Any, send: Any) -> None:
        engine.dead = True
        await inner(scope, receive, send)

    sent = asyncio.run(call(app, engine))
    assert (sent[0]["status"], header(sent, "x-jvlab-refused")) == (503, "dead")


@pytest.mark.parametrize("begun", [False, True])
def test_a_fenced_replica_drops_what_it_does(begun: bool):
    """The app hears that its client left, as vLLM's does to abort the request; no answer looks whole."""
    engine, told = FakeEngine(), []
    reached = asyncio.Event()

    async def app(scope: Message, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.request"
        reached.set()
        told.append((await receive())["type"])

    async def fence() -> None:
        await reached.wait()
        for task in list(engine.busy):
            task.cancel()

    sent = asyncio.run(call(app, engine, during=fence))
    assert told == ["http.disconnect"]
    if begun:
        assert [message["type"] for message in sent] == ["http.response.start"], (
            "it has no end"
        )
    else:
        assert (sent[0]["status"], header(sent, "x-jvlab-refused")) == (503, "fenced")
    assert not engine.busy


def test_small_answers_are_sent_at_once():
    """An answer is two writes, and Nagle's algorithm would hold the second for 40 ms."""

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def made(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(
                writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )
            )
            writer.close()

        listener = loopback_listener()
        async with await asyncio.start_server(made, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            no_delay = await asyncio.wait_for(found, 30)
            writer.close()
        return no_delay

    assert asyncio.run(accepted())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"[" * 200_000, "ConfigError"),
        (b'{"prompt": "\\ud800"}', "ConfigError"),
        (b"nul", "ConfigError"),
        (b'{"prompt": "x", "n": 200000}', "LimitExceeded"),
        (b'{"prompt": "x", "n": "4000000"}', "LimitExceeded"),
        (b'{"sampling_params": {"n": 4000000}}', "LimitExceeded"),
        (b'{"prompt": [1, -5]}', "ConfigError"),
        (b'{"prompt": [[1], [100]]}', "ConfigError"),
    ],
)
def test_hostile_bodies_never_reach_the_app(body: bytes, kind: str):
    async def app(scope: Message, receive: Any, send: Any) -> None:
        raise AssertionError("it was asked")

    sent = asyncio.run(call(app, FakeEngine(), body=body))
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == kind
    assert error["remedy"]


def test_the_app_reads_the_body_that_was_checked():
    read: list[bytes] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        read.append((await receive())["body"])
        await answering(Labelled(FakeLlm()))(scope, receive, send)

    body = b'{"prompt": "x", "n": 7}'
    assert asyncio.run(call(app, FakeEngine(), body=body))[0]["status"] == 200
    assert read == [body]

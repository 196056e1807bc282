"""One trainer process's stream to the other processes of its trainer, through the gateway."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import DeadlineExceeded
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client, translate
from jvlab.wire._rpc_errors import in_words

WRITE_SECONDS, END_SECONDS = 30.0, 2.0
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
        self.on_news: Callable[[], None] = lambda: None  # called on the client's loop at a message, and at the end
        self._call: Any = client.loop.run(self._open())
        self._reading = client.loop.submit(self._read(join))

    async def _open(self) -> Any:
        return self._client.stub.Team(metadata=self._client.metadata)

    async def _read(self, join: pb.TeamJoin) -> None:
        why = "its stream to the gateway was closed"
        try:
            await self._call.write(pb.TeamMessage(join=join))
            # no deadline: members are silent between two syncs; `wait` has one
            while (event := await self._call.read()) is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
                if event.WhichOneof("kind") == "over":
                    why = event.over
                    break
                self._take(event)
            else:
                code, details = await self._call.code(), await self._call.details()
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
                self.names, self.complete = list(event.roll.names), event.roll.complete
            else:
                self._inbox.setdefault(event.delivery.member, deque()).append(json.loads(event.delivery.payload))
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
            self._client.loop.run(self._send(pb.TeamMessage(payload=json.dumps(message).encode(), to_all=to_all)))

    async def _send(self, message: pb.TeamMessage) -> None:
        # If the stream has ended, the reader sets `over` to the reason.
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(WRITE_SECONDS):
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

"""A replica's own socket for the orders of a sync, from a trainer on the same host, bypassing the gateway.

An ipc sync takes a few milliseconds, and each order through the gateway two. The gateway still grants the pool to one
trainer and opens the link; its reply holds the socket's path and key. It learns of a commit by the next beat, which is
sent at once. On either path the replica's own state machine checks the order of phases. When a trainer dies, its stream
to the gateway ends, and the gateway closes the link here.

Frames: four bytes of length, then the key (once), then RolloutSyncRequest and RolloutSyncReply in turn.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._local_peer import same_user

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

    def invitation(self, link: str, epoch: int, core_channel: Sequence[str] = ()) -> str:
        """What a trainer needs to connect; invalidates earlier invitations. Empty if this is not listening.

        `core_channel`: the engine core's own path and key, if it has a channel.
        """
        if self._server is None:
            return ""
        self._key = secrets.token_hex(16)
        return json.dumps(
            {"path": self.path, "key": self._key, "link": link, "epoch": epoch, "core_channel": list(core_channel)}
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


async def _read(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "little")  # no deadline: a trainer is silent between two syncs
    if size > max_bytes:
        raise ConnectionError(f"a frame of {size} bytes")
    async with asyncio.timeout(FRAME_SECONDS):
        return await reader.readexactly(size)

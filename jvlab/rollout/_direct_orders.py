"""Orders of a sync straight from a trainer on the same host, past the gateway: a socket of the replica's own.

A sync by ipc takes a few milliseconds, and each order through the gateway two. The gateway still grants the pool to one
trainer and makes the link, in whose answer the socket's path and key travel; it learns of a commit by the next beat,
which follows at once. What may follow what is the replica's own state machine's to say, on either way. A trainer that
dies ends its stream at the gateway, which closes the link here.

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

LONGEST = 64 << 20  # bytes of a frame
ADMIT_SECONDS = 5.0  # for the key to arrive
FRAME_SECONDS = 60.0  # for the rest of a frame that has begun
Run = Callable[[pb.RolloutSyncRequest], Awaitable[pb.RolloutSyncReply]]


class DirectOrders:
    """Listens on a socket of this host; who has no key is refused."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.path = f"\0jvlab-{secrets.token_hex(8)}"  # no file: nothing stays behind, however this process ends
        self._key = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if sys.platform == "linux":
            self._server = await asyncio.start_unix_server(self._serve, self.path)

    def invitation(self, link: str, epoch: int, core_channel: Sequence[str] = ()) -> str:
        """What a trainer needs to come in; an earlier invitation is no longer good. Empty where nobody listens.

        `core_channel`: where the engine core itself listens, if it does.
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
            while True:  # between two syncs a trainer may be silent for as long as it likes
                request = pb.RolloutSyncRequest.FromString(await _read(reader))
                answer = (await self._run(request)).SerializeToString()
                writer.write(len(answer).to_bytes(4, "little") + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            return  # the trainer is gone; the gateway sees that too
        finally:
            writer.close()

    def close(self) -> None:
        """Listen no more. Can be called twice."""
        if self._server is not None:
            self._server.close()
            self._server = None


async def _read(reader: asyncio.StreamReader, longest: int = LONGEST) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > longest:
        raise ConnectionError(f"a frame of {size} bytes")
    async with asyncio.timeout(FRAME_SECONDS):
        return await reader.readexactly(size)

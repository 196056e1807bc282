"""The trainer's end of a replica's own socket: the orders of a sync by ipc without the gateway in between."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from jvlab._errors import DeadlineExceeded, TransportError
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._link_client import GRACE, check

STAGES = {
    pb.PREPARE: "prepared", pb.HALT: "halted", pb.MOVE: "moving", pb.VERIFY: "verified", pb.COMMIT: "committed",
    pb.GO_ON: "idle", pb.ABANDON: "idle",
}  # fmt: skip
CODES = {"VerifyError": "mismatch", "TransportError": "transport", "DeadlineExceeded": "deadline"}
CONNECT_SECONDS = 2.0
ABANDON_SECONDS = 10.0


class ExpressStream:
    """One replica, asked over its socket. The same face as LinkStream, as far as a transaction needs it."""

    def __init__(self, replica: str, invitation: str) -> None:
        plain = json.loads(invitation)
        self.replica, self._link, self._epoch = replica, plain["link"], int(plain["epoch"])
        self.busy = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(plain["path"])
            self._send(plain["key"].encode())
        except OSError:
            self._socket.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def steps(
        self,
        phases: Sequence[pb.SyncPhase],
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
        terms: pb.SyncTerms | None = None,
        digests: Sequence[pb.ReplicaDigests] = (),
    ) -> pb.LinkReply:
        """These phases, in order. If one fails the sync is given up on the replica before the error is raised."""
        request = pb.RolloutSyncRequest(
            epoch=self._epoch, link=self._link, phases=phases, terms=terms, seconds=seconds,
            digests=next((d for d in digests if d.replica == self.replica), None),
        )  # fmt: skip
        self.busy = True
        outcome = self._ask(request, seconds + GRACE, meanwhile)
        if not outcome.failed:
            self.busy = False
            return pb.LinkReply(state=STAGES[phases[-1]], outcomes=[outcome])
        over = pb.RolloutSyncRequest(epoch=self._epoch, link=self._link, phases=[pb.ABANDON], seconds=ABANDON_SECONDS)
        after = self._ask(over, ABANDON_SECONDS)
        self.busy = False
        code = "mismatch" if outcome.differing else CODES.get(outcome.kind, "failed")
        error = f"{code} at replica {self.replica} in {outcome.failed}: {outcome.error}"
        outcome.replica, outcome.state, outcome.version = self.replica, after.state, after.version
        return check(pb.LinkReply(code=code, error=error, state="idle", outcomes=[outcome]))

    def _ask(
        self, request: pb.RolloutSyncRequest, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> pb.ReplicaOutcome:  # fmt: skip
        until = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._send(request.SerializeToString())
            if meanwhile is not None:
                meanwhile()
            size = int.from_bytes(self._read(4, until), "little")
            return pb.RolloutSyncReply.FromString(self._read(size, until)).outcome
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.replica} did not answer an order of the sync in {seconds:g} s",
                remedy="pass a larger timeout=, or look at pool.logs()",
            ) from None
        except OSError as error:
            raise TransportError(
                f"the socket of {self.replica} broke: {error}",
                remedy="pool.status() says what became of it; sync again",
            ) from error

    def _send(self, data: bytes) -> None:
        self._socket.sendall(len(data).to_bytes(4, "little") + data)

    def _read(self, size: int, until: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            part = self._socket.recv(size)
            if not part:
                raise ConnectionError("it was closed on the other side")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Can be called twice."""
        with contextlib.suppress(OSError):
            self._socket.close()


def try_express(outcomes: Sequence[Any]) -> ExpressStream | None:
    """The socket of the one replica that was opened, if it has one that we can reach."""
    if len(outcomes) != 1 or not outcomes[0].express_json:
        return None
    try:
        return ExpressStream(outcomes[0].replica, outcomes[0].express_json)
    except OSError:  # another mount namespace: its path means nothing here; the gateway's way is open
        return None

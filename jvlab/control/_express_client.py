"""The trainer's end of a replica's own socket: the orders of a sync by ipc without the gateway in between."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jvlab._errors import DeadlineExceeded, SyncError, TransportError
from jvlab.control import _door
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._link_client import GRACE, check

STAGES = {
    pb.PREPARE: "prepared", pb.HALT: "halted", pb.MOVE: "moving", pb.VERIFY: "verified", pb.COMMIT: "committed",
    pb.GO_ON: "idle", pb.ABANDON: "idle",
}  # fmt: skip
CODES = {"VerifyError": "mismatch", "TransportError": "transport", "DeadlineExceeded": "deadline"}
WHOLE = (pb.PREPARE, pb.HALT, pb.MOVE, pb.VERIFY, pb.COMMIT, pb.GO_ON)  # of a direct sync
CONNECT_SECONDS = 2.0
ABANDON_SECONDS = 10.0


class ExpressStream:
    """One replica, asked over its socket. The same face as LinkStream, as far as a transaction needs it."""

    def __init__(self, replica: str, invitation: str) -> None:
        plain = json.loads(invitation)
        self.replica, self._link, self._epoch = replica, plain["link"], int(plain["epoch"])
        self.busy = False
        self.door: _door.Line | None = None  # to the engine core itself: the words of a sync
        self._orders: _door.Line | None = None
        self._owed = False  # a reply that nobody has read yet: the core told already what it says
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(plain["path"])
            self._send(plain["key"].encode())
            if plain.get("door"):
                self.door = _door.call(plain["door"], _door.WORDS, CONNECT_SECONDS)
                self._orders = _door.call(plain["door"], _door.ORDERS, CONNECT_SECONDS)
        except OSError:
            self.close()
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
        return self._given_up(outcome)

    def knock(self) -> None:
        """A sync is about to be ordered: the engine core wakes up, and looks for the order for a moment."""
        if self._orders is not None:
            with contextlib.suppress(OSError):  # the order itself finds out
                self._orders.say(_door.KNOCK, 0)

    def exchange(
        self,
        terms: pb.SyncTerms,
        seconds: float,
        meanwhile: Callable[[], None],
        write: Callable[[], None],
        claims: Callable[[], bytes] | None,
    ) -> pb.LinkReply:
        """A whole direct sync, run by the engine core, which says over its own line when it stands still and goes on.

        `meanwhile` is called until it does, then `write`; `claims` tells the digests of what was written, while the
        engine reads what it holds. Returns when the engine generates again; the replica's own reply says the same a
        little later, and is read in the course of the next order.
        """
        assert self.door is not None, "only where the core has a door"
        assert self._orders is not None
        self.busy, until, call = True, time.monotonic() + seconds + GRACE, secrets.token_hex(8)
        request = pb.RolloutSyncRequest(
            epoch=self._epoch, link=self._link, phases=WHOLE, terms=terms, seconds=seconds, call=call
        )  # fmt: skip
        self._post(request, seconds + GRACE)  # first: whatever happens to us now, the replica will know of it
        with contextlib.suppress(OSError):  # the replica's own order to its core is on its way too
            told = json.dumps(_door.order(terms, seconds, call)).encode()
            self._orders.say(_door.ORDER, terms.version, told)
        try:
            with self._hanging_up():
                meanwhile()
            self._hear(_door.GO, terms.version, until, seconds)
            with self._hanging_up():
                write()
                self._say(_door.WRITTEN, terms.version)
                if claims is not None:
                    self._say(_door.CLAIMED, terms.version, claims())
            parts = self._hear(_door.DONE, terms.version, until, seconds)
        except _door.Elsewhere:
            outcome = self._reply(until)  # what went wrong is told the usual way
            return self._given_up(outcome) if outcome.failed else self._whole(outcome)
        self._settle()
        self._owed = True
        took = [pb.PhaseSeconds(name=name, seconds=value) for name, value in json.loads(parts).items()]
        outcome = pb.ReplicaOutcome(replica=self.replica, state="committed", version=terms.version, seconds=took)
        return self._whole(outcome)

    def _say(self, kind: bytes, version: int, payload: bytes = b"") -> None:
        assert self.door is not None
        with contextlib.suppress(OSError):  # a broken line is found when we listen
            self.door.say(kind, version, payload)

    def _whole(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        self.busy = False
        return pb.LinkReply(state=STAGES[WHOLE[-1]], outcomes=[outcome])

    @contextlib.contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """What we do meanwhile: if it fails we hang up, which ends the core's call, and the replica answers."""
        try:
            yield
        except BaseException:
            assert self.door is not None
            self.door.close()
            with contextlib.suppress(Exception):
                until = time.monotonic() + ABANDON_SECONDS
                for _ in range(1 + self._owed):
                    self._reply(until)
                self._owed = self.busy = False
            raise

    def _hear(self, kind: bytes, version: int, until: float, seconds: float) -> bytes:
        assert self.door is not None
        while True:
            try:
                said, about, payload = self.door.hear(until, self._socket)
            except TimeoutError:
                raise self._late(seconds) from None
            except _door.Elsewhere:
                if not self._owed:
                    raise
                with self._hanging_up():
                    self._settle()  # it was about the sync before
                continue
            except OSError:  # the line broke; why is told the usual way
                with self._hanging_up():
                    self._settle()
                raise _door.Elsewhere from None
            if (said, about) == (kind, version):  # else a word about a sync that was given up
                return payload

    def _settle(self) -> None:
        """Read what is still to be read."""
        if self._owed:
            self._owed = False
            outcome = self._reply(time.monotonic() + ABANDON_SECONDS)
            if outcome.failed:
                raise SyncError(
                    f"{self.replica} could not finish the sync before: {outcome.error}", remedy="sync again"
                )

    def _given_up(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        """Give the sync up on the replica, then raise what went wrong."""
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
        self._settle()
        until = time.monotonic() + seconds
        self._post(request, seconds)
        if meanwhile is not None:
            meanwhile()
        return self._reply(until)

    def _post(self, request: pb.RolloutSyncRequest, seconds: float) -> None:
        try:
            self._socket.settimeout(seconds)
            self._send(request.SerializeToString())
        except TimeoutError:
            raise self._late(seconds) from None
        except OSError as error:
            raise self._broken(error) from error

    def _reply(self, until: float) -> pb.ReplicaOutcome:
        seconds = until - time.monotonic()
        try:
            size = int.from_bytes(_door.exactly(self._socket, 4, until), "little")
            return pb.RolloutSyncReply.FromString(_door.exactly(self._socket, size, until)).outcome
        except TimeoutError:
            raise self._late(seconds) from None
        except OSError as error:
            raise self._broken(error) from error

    def _late(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.replica} did not answer an order of the sync in {seconds:g} s",
            remedy="pass a larger timeout=, or look at pool.logs()",
        )

    def _broken(self, error: OSError) -> TransportError:
        return TransportError(
            f"the socket of {self.replica} broke: {error}", remedy="pool.status() says what became of it; sync again"
        )

    def _send(self, data: bytes) -> None:
        self._socket.sendall(len(data).to_bytes(4, "little") + data)

    def close(self) -> None:
        """Can be called twice."""
        with contextlib.suppress(OSError):
            self._socket.close()
        for line in (self.door, self._orders):
            if line is not None:
                line.close()


def try_express(outcomes: Sequence[Any]) -> ExpressStream | None:
    """The socket of the one replica that was opened, if it has one that we can reach."""
    if len(outcomes) != 1 or not outcomes[0].express_json:
        return None
    try:
        return ExpressStream(outcomes[0].replica, outcomes[0].express_json)
    except OSError:  # another mount namespace: its path means nothing here; the gateway's way is open
        return None

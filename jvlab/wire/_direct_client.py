"""The trainer's end of a replica's own socket: the orders of a sync by ipc without the gateway in between."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jvlab._errors import SyncDeadline, SyncError, TransportError
from jvlab.wire import _core_channel
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._link_client import GRACE, check
from jvlab.wire._sync_words import ORDER, STAGE_AFTER, Phase, Stage, failure_code

CONNECT_SECONDS = 2.0
ABANDON_SECONDS = 10.0
LEAST = 0.3


class DirectStream:
    """One replica, asked over its socket. The same face as LinkStream, as far as a transaction needs it."""

    def __init__(self, replica: str, invitation: str) -> None:
        plain = json.loads(invitation)
        self.replica, self._link, self._epoch = replica, plain["link"], int(plain["epoch"])
        self.busy = False
        self._end = time.monotonic()  # of the order's time, a moment for its answer included
        self.core_channel: _core_channel.CoreChannel | None = None  # to the engine core itself: a sync's signals
        self._orders: _core_channel.CoreChannel | None = None
        self._reply_pending = False  # the core has sent its result, the replica's own reply was not read yet
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(plain["path"])
            self._send(plain["key"].encode())
            if plain.get("core_channel"):
                self.core_channel = _core_channel.call(plain["core_channel"], _core_channel.WORDS, CONNECT_SECONDS)
                self._orders = _core_channel.call(plain["core_channel"], _core_channel.ORDERS, CONNECT_SECONDS)
        except OSError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def steps(
        self,
        phases: Sequence[int],
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
        terms: pb.SyncTerms | None = None,
        digests: Sequence[pb.ReplicaDigests] = (),
        nonfinite: bool = False,
    ) -> pb.LinkReply:
        """These phases, in order. If one fails the sync is given up on the replica before the error is raised."""
        numbers: Any = list(phases)
        request = pb.RolloutSyncRequest(
            epoch=self._epoch,
            link=self._link,
            phases=numbers,
            terms=terms,
            seconds=seconds,
            digests=next((d for d in digests if d.replica == self.replica), None),
            nonfinite=nonfinite,
        )
        self.busy, self._end = True, time.monotonic() + seconds + GRACE
        outcome = self._ask(request, seconds + GRACE, meanwhile)
        if not outcome.failed:
            self.busy = False
            return pb.LinkReply(state=STAGE_AFTER[Phase(phases[-1])].value, outcomes=[outcome])
        return self._given_up(outcome)

    def wake_up(self) -> None:
        """A sync is about to be ordered: the engine core wakes up, and looks for the order for a moment."""
        if self._orders is not None:
            with contextlib.suppress(OSError):  # the order itself finds out
                self._orders.send(_core_channel.WAKE, 0)

    def exchange(
        self,
        terms: pb.SyncTerms,
        seconds: float,
        meanwhile: Callable[[], None],
        write: Callable[[], None],
        claims: Callable[[], bytes] | None,
        nonfinite: Callable[[], bool] = bool,
    ) -> pb.LinkReply:
        """A whole direct sync, run by the engine core, which signals over its own channel when it halts and goes on.

        `meanwhile` is called until it halts, then `write`; `claims` returns the digests of what was written, while the
        engine reads what it holds; `nonfinite` is called after each: whether NaN or Inf was found, and allowed.
        Returns when the engine generates again; the replica's own reply comes a little later, and is read in the course
        of the next order.
        """
        assert self.core_channel is not None, "only where the core has a channel"
        assert self._orders is not None
        self.busy, until, call = True, time.monotonic() + seconds + GRACE, secrets.token_hex(8)
        self._end = until
        whole: Any = ORDER["direct"]
        request = pb.RolloutSyncRequest(
            epoch=self._epoch, link=self._link, phases=whole, terms=terms, seconds=seconds, call=call
        )
        self._post(request, seconds + GRACE)  # first: whatever happens to us now, the replica will know of it
        with contextlib.suppress(OSError):  # the replica's own order to its core is on its way too
            message = json.dumps(_core_channel.order(terms, seconds, call)).encode()
            self._orders.send(_core_channel.ORDER, terms.version, message)
        digests = b""
        try:
            with self._disconnecting_on_error():
                meanwhile()
            self._await_signal(_core_channel.GO, terms.version, until, seconds)
            with self._disconnecting_on_error():
                write()
                self._signal(_core_channel.WRITTEN, terms.version, _core_channel.mark(nonfinite()))
                if claims is not None:
                    digests = claims()
                    self._signal(_core_channel.CLAIMED, terms.version, _core_channel.mark(nonfinite()) + digests)
            parts = self._await_signal(_core_channel.DONE, terms.version, until, seconds)
        except _core_channel.Elsewhere:
            outcome = self._reply(until)  # the replica's own reply says what went wrong
            return self._given_up(outcome) if outcome.failed else self._whole(outcome)
        self._read_pending_reply()
        self._reply_pending = True
        took = [pb.PhaseSeconds(name=name, seconds=value) for name, value in json.loads(parts).items()]
        outcome = pb.ReplicaOutcome(replica=self.replica, state="committed", version=terms.version, seconds=took)
        if digests:  # by ipc every digest is of live memory, and it was all of them or no commit
            outcome.evidence["live"] = len(digests) // 8
        return self._whole(outcome)

    def _signal(self, kind: bytes, version: int, payload: bytes = b"") -> None:
        assert self.core_channel is not None
        with contextlib.suppress(OSError):  # a broken channel is found when we read
            self.core_channel.send(kind, version, payload)

    def _whole(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        self.busy = False
        return pb.LinkReply(state=Stage.IDLE.value, outcomes=[outcome])

    @contextlib.contextmanager
    def _disconnecting_on_error(self) -> Iterator[None]:
        """Our part of it: if it fails we hang up, which ends the core's call, and the replica answers."""
        try:
            yield
        except BaseException:
            assert self.core_channel is not None
            self.core_channel.close()
            with contextlib.suppress(Exception):
                until = self._soon()
                for _ in range(1 + self._reply_pending):
                    self._reply(until)
                self._reply_pending = self.busy = False
            raise

    def _await_signal(self, kind: bytes, version: int, until: float, seconds: float) -> bytes:
        assert self.core_channel is not None
        while True:
            try:
                signal, about, payload = self.core_channel.receive(until, self._socket)
            except TimeoutError:
                raise self._late(seconds) from None
            except _core_channel.Elsewhere:
                if not self._reply_pending:
                    raise
                with self._disconnecting_on_error():
                    self._read_pending_reply()  # it was about the sync before
                continue
            except OSError:  # the channel broke; the replica's own reply says why
                with self._disconnecting_on_error():
                    self._read_pending_reply()
                raise _core_channel.Elsewhere from None
            if (signal, about) == (kind, version):  # else it is about a sync that was abandoned
                return payload

    def _read_pending_reply(self) -> None:
        """Read what is still to be read."""
        if self._reply_pending:
            self._reply_pending = False
            outcome = self._reply(self._soon())
            if outcome.failed:
                raise SyncError(
                    f"{self.replica} could not finish the sync before: {outcome.error}", remedy="sync again"
                )

    def _soon(self) -> float:
        """Until when an answer that should come at once is waited for: giving up has no more time than the order."""
        now = time.monotonic()
        return min(now + ABANDON_SECONDS, max(self._end, now + LEAST))

    def _given_up(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        """Give the sync up on the replica, then raise what went wrong."""
        seconds = self._soon() - time.monotonic()
        over = pb.RolloutSyncRequest(epoch=self._epoch, link=self._link, phases=[pb.ABANDON], seconds=seconds)
        after = self._ask(over, seconds)
        self.busy = False
        code = failure_code(outcome.kind, bool(outcome.differing))
        error = f"{code} at replica {self.replica} in {outcome.failed}: {outcome.error}"
        outcome.replica, outcome.state, outcome.version = self.replica, after.state, after.version
        return check(pb.LinkReply(code=code, error=error, state="idle", outcomes=[outcome]))

    def _ask(
        self, request: pb.RolloutSyncRequest, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> pb.ReplicaOutcome:
        self._read_pending_reply()
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
            size = int.from_bytes(_core_channel.exactly(self._socket, 4, until), "little")
            return pb.RolloutSyncReply.FromString(_core_channel.exactly(self._socket, size, until)).outcome
        except TimeoutError:
            raise self._late(seconds) from None
        except OSError as error:
            raise self._broken(error) from error

    def _late(self, seconds: float) -> SyncDeadline:
        return SyncDeadline(
            f"{self.replica} did not answer an order of the sync within {seconds:.3g} s",
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
        for channel in (self.core_channel, self._orders):
            if channel is not None:
                channel.close()


def try_direct(outcomes: Sequence[Any]) -> DirectStream | None:
    """The socket of the one replica that was opened, if it has one that we can reach."""
    if len(outcomes) != 1 or not outcomes[0].direct_orders_json:
        return None
    try:
        return DirectStream(outcomes[0].replica, outcomes[0].direct_orders_json)
    except OSError:  # another mount namespace: its path means nothing here; the gateway's way is open
        return None

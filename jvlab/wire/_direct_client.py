"""The trainer's end of a replica's own socket: the orders of an ipc sync, bypassing the gateway."""

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
from jvlab.wire._client import GRACE, check
from jvlab.wire._sync_words import ORDER, STAGE_AFTER, Phase, Stage, failure_code

CONNECT_SECONDS = 2.0
ABANDON_SECONDS = 10.0
MIN_SECONDS = 0.3


class DirectStream:
    """Orders to one replica over its socket; the part of LinkStream's interface that a transaction needs."""

    def __init__(self, replica: str, invitation: str) -> None:
        plain = json.loads(invitation)
        self.replica = replica
        self._link = plain["link"]
        self._epoch = int(plain["epoch"])
        self.busy = False
        # of the current order, including time for its reply
        self._deadline = time.monotonic()
        # to the engine core itself: a sync's signals
        self.core_channel: _core_channel.CoreChannel | None = None
        self._orders: _core_channel.CoreChannel | None = None
        # the core has sent its result; the replica's own reply is not yet read
        self._reply_pending = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect(plain["path"])  # no deadline: the socket has a timeout
            self._send(plain["key"].encode())
            if plain.get("core_channel"):
                self.core_channel = _core_channel.connect(
                    plain["core_channel"], _core_channel.SIGNALS, CONNECT_SECONDS
                )
                self._orders = _core_channel.connect(
                    plain["core_channel"], _core_channel.ORDERS, CONNECT_SECONDS
                )
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
        """Run these phases in order. If one fails, the sync is abandoned on the replica before the error is raised."""
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
        self.busy, self._deadline = True, time.monotonic() + seconds + GRACE
        outcome = self._ask(request, seconds + GRACE, meanwhile)
        if not outcome.failed:
            self.busy = False
            return pb.LinkReply(
                state=STAGE_AFTER[Phase(phases[-1])].value, outcomes=[outcome]
            )
        return self._abandon_and_raise(outcome)

    def wake_up(self) -> None:
        """A sync is about to be ordered: wake the engine core, which then waits briefly for the order."""
        if self._orders is not None:
            # a broken channel shows when the order is sent
            with contextlib.suppress(OSError):
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
        """A whole direct sync, run by the engine core, which signals over its own channel when it halts and resumes.

        `meanwhile` is called before the engine has halted, then `write`; `claims` returns the digests of what was
        written while the engine computes its own; `nonfinite`, called after each, tells whether NaN or Inf was found
        (and allowed). Returns when the engine generates again; the replica's own reply follows a little later and is
        read during the next order.
        """
        assert self.core_channel is not None, "needs a core channel"
        assert self._orders is not None
        self.busy, until, call = (
            True,
            time.monotonic() + seconds + GRACE,
            secrets.token_hex(8),
        )
        self._deadline = until
        whole: Any = ORDER["direct"]
        request = pb.RolloutSyncRequest(
            epoch=self._epoch,
            link=self._link,
            phases=whole,
            terms=terms,
            seconds=seconds,
            call=call,
        )
        # first: if this process fails from here on, the replica notices
        self._post(request, seconds + GRACE)
        # the replica's own order to its core is on its way too
        with contextlib.suppress(OSError):
            message = json.dumps(_core_channel.order(terms, seconds, call)).encode()
            self._orders.send(_core_channel.ORDER, terms.version, message)
        digests = b""
        try:
            with self._disconnecting_on_error():
                meanwhile()
            self._await_signal(_core_channel.GO, terms.version, until, seconds)
            with self._disconnecting_on_error():
                write()
                self._signal(
                    _core_channel.WRITTEN,
                    terms.version,
                    _core_channel.mark(nonfinite()),
                )
                if claims is not None:
                    digests = claims()
                    self._signal(
                        _core_channel.CLAIMED,
                        terms.version,
                        _core_channel.mark(nonfinite()) + digests,
                    )
            parts = self._await_signal(
                _core_channel.DONE, terms.version, until, seconds
            )
        except _core_channel.OtherSocketReady:
            outcome = self._reply(until)  # the replica's own reply says what went wrong
            return (
                self._abandon_and_raise(outcome)
                if outcome.failed
                else self._idle_reply(outcome)
            )
        self._read_pending_reply()
        self._reply_pending = True
        took = [
            pb.PhaseSeconds(name=name, seconds=value)
            for name, value in json.loads(parts).items()
        ]
        outcome = pb.ReplicaOutcome(
            replica=self.replica, state="committed", version=terms.version, seconds=took
        )
        # with ipc every digest is of live memory, and a commit means that all of them matched
        if digests:
            outcome.evidence["live"] = len(digests) // 8
        return self._idle_reply(outcome)

    def _signal(self, kind: bytes, version: int, payload: bytes = b"") -> None:
        assert self.core_channel is not None
        with contextlib.suppress(OSError):  # a broken channel shows when it is read
            self.core_channel.send(kind, version, payload)

    def _idle_reply(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        self.busy = False
        return pb.LinkReply(state=Stage.IDLE.value, outcomes=[outcome])

    @contextlib.contextmanager
    def _disconnecting_on_error(self) -> Iterator[None]:
        """If the trainer's part fails, disconnect: that ends the core's call, and the replica replies."""
        try:
            yield
        except BaseException:
            assert self.core_channel is not None
            self.core_channel.close()
            with contextlib.suppress(Exception):
                until = self._prompt_deadline()
                for _ in range(1 + self._reply_pending):
                    self._reply(until)
                self._reply_pending = self.busy = False
            raise

    def _await_signal(
        self, kind: bytes, version: int, until: float, seconds: float
    ) -> bytes:
        assert self.core_channel is not None
        while True:
            try:
                signal, about, payload = self.core_channel.receive(until, self._socket)
            except TimeoutError:
                raise self._timeout_error(seconds) from None
            except _core_channel.OtherSocketReady:
                if not self._reply_pending:
                    raise
                with self._disconnecting_on_error():
                    self._read_pending_reply()  # it belongs to the previous sync
                continue
            except OSError:  # the channel broke; the replica's own reply says why
                with self._disconnecting_on_error():
                    self._read_pending_reply()
                raise _core_channel.OtherSocketReady from None
            # else it belongs to an abandoned sync
            if (signal, about) == (kind, version):
                return payload

    def _read_pending_reply(self) -> None:
        """Read the reply to the previous sync, if it is still unread."""
        if self._reply_pending:
            self._reply_pending = False
            outcome = self._reply(self._prompt_deadline())
            if outcome.failed:
                raise SyncError(
                    f"{self.replica} could not finish the previous sync: {outcome.error}",
                    remedy="sync again",
                )

    def _prompt_deadline(self) -> float:
        """The deadline of a reply that should come at once; abandoning gets no more time than its order had."""
        now = time.monotonic()
        return min(now + ABANDON_SECONDS, max(self._deadline, now + MIN_SECONDS))

    def _abandon_and_raise(self, outcome: pb.ReplicaOutcome) -> pb.LinkReply:
        """Abandon the sync on the replica, then raise what went wrong."""
        seconds = self._prompt_deadline() - time.monotonic()
        abandon = pb.RolloutSyncRequest(
            epoch=self._epoch, link=self._link, phases=[pb.ABANDON], seconds=seconds
        )
        after = self._ask(abandon, seconds)
        self.busy = False
        code = failure_code(outcome.kind, bool(outcome.differing))
        error = f"{code} at replica {self.replica} in {outcome.failed}: {outcome.error}"
        outcome.replica = self.replica
        outcome.state = after.state
        outcome.version = after.version
        return check(
            pb.LinkReply(code=code, error=error, state="idle", outcomes=[outcome])
        )

    def _ask(
        self,
        request: pb.RolloutSyncRequest,
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
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
            raise self._timeout_error(seconds) from None
        except OSError as error:
            raise self._socket_error(error) from error

    def _reply(self, until: float) -> pb.ReplicaOutcome:
        seconds = until - time.monotonic()
        try:
            size = int.from_bytes(
                _core_channel.read_exactly(self._socket, 4, until), "little"
            )
            return pb.RolloutSyncReply.FromString(
                _core_channel.read_exactly(self._socket, size, until)
            ).outcome
        except TimeoutError:
            raise self._timeout_error(seconds) from None
        except OSError as error:
            raise self._socket_error(error) from error

    def _timeout_error(self, seconds: float) -> SyncDeadline:
        return SyncDeadline(
            f"{self.replica} did not answer an order of the sync within {seconds:.3g} s",
            remedy="pass a larger timeout=, or look at pool.logs()",
        )

    def _socket_error(self, error: OSError) -> TransportError:
        return TransportError(
            f"the socket of {self.replica} broke: {error}",
            remedy="pool.status() says what became of it; sync again",
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
    """A stream to the only replica that was opened, if it has a socket that this process can reach."""
    if len(outcomes) != 1 or not outcomes[0].direct_orders_json:
        return None
    try:
        return DirectStream(outcomes[0].replica, outcomes[0].direct_orders_json)
    # another mount namespace, where its path does not exist: go through the gateway
    except OSError:
        return None

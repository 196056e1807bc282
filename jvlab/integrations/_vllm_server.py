"""A server of plain vLLM as a pool of one replica: orders by vLLM's own four calls, answers over sockets.

vLLM's calls return nothing to the trainer. So each rank of the server, when it is told to, connects to a socket of the
trainer's, and within a call it carries out the trainer's orders and answers them there:

    init_weight_transfer_engine   a conversation: facts, trace, open, check, peek
    start_weight_update           nothing yet
    update_weights                prepare, move, verify; bytes go by a plan, over shm or ipc
    finish_weight_update          commit; vLLM then shows the version

A call ends with the trainer's verdict. If a rank fails, or the trainer goes away, or a deadline passes, every rank
abandons the sync, and the last one raises: vLLM would take what the ranks behind one that raised answered for their
answers to the next call. `Engine` in _vllm_backend.py is the ranks' side.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    ControlError,
    JvlabError,
    SyncDeadline,
    SyncError,
    TransportError,
    Unsupported,
    VerifyError,
)
from jvlab._files import Plain
from jvlab._version import __version__
from jvlab.engine._engine_sync import (
    checked,
    claimed_digests,
    digests_of,
    handles_of,
)
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._layout_codec import layout_from_bytes
from jvlab.layout._types import CheckpointTensor, RankLayout
from jvlab.record._batch import Scores
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import check
from jvlab.wire._core_channel import PROMPT_SECONDS, CoreChannel, OtherSocketReady
from jvlab.wire._sync_words import Phase, Terms, failure_code, for_workers

if TYPE_CHECKING:
    from jvlab.sync._link import Link

# kinds of frames: the first of a rank, an order, its answer, and the two ends of a conversation
HELLO = b"H"
ORDER = b"O"
ANSWER = b"A"
END = b"E"
FAIL = b"F"
CALL_SECONDS = 60.0  # for a call that nothing else limits
GRACE = 5.0  # for vLLM to answer a call whose conversation is over
WHY_SECONDS = 60.0  # for a busy server to say why a rank hung up
PIECE = 8 << 20  # bytes of a parameter in one answer


def encode(message: Any) -> bytes:
    """Plain values and bytes as JSON."""
    plain = lambda data: {"base64": base64.b64encode(data).decode()}
    return json.dumps(message, default=plain).encode()


def decode(payload: bytes) -> Any:
    """What `encode` was given."""

    def made(found: Plain) -> Any:
        return (
            base64.b64decode(found["base64"]) if found.keys() == {"base64"} else found
        )

    return json.loads(payload, object_hook=made)


# vLLM's calls --------------------------------------------------------------------------------------------------------


class FourCalls(Protocol):
    """vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: Plain) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class HttpCalls:
    """The four calls, and those that halt generation, over HTTP; needs no vLLM here. As vLLM's own client."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no address of a server", remedy="'http://127.0.0.1:8000'"
            )
        self.url = url.rstrip("/")
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.deadline: Deadline | None = None  # of the calls that are made next

    def init_weight_transfer_engine(self, init_info: Plain) -> None:
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.ask("POST", "/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.ask("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        given = {} if weight_version is None else {"weight_version": weight_version}
        self.ask("POST", "/finish_weight_update", given)

    def pause(self, mode: str) -> None:
        """Stop generating; requests in flight wait ("keep"), are finished ("wait") or aborted."""
        self.ask("POST", f"/pause?mode={mode}&clear_cache=false")

    def resume(self) -> None:
        """Drop KV of older weights, and generate again."""
        self.ask("POST", "/reset_prefix_cache?reset_running_requests=true")
        self.ask("POST", "/resume")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The reply's JSON; raises ControlError for another status than 200."""
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        left = CALL_SECONDS if self.deadline is None else self.deadline.left()
        seconds = left + GRACE
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=seconds)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            prefix = self._parts.path.rstrip("/")
            connection.request(method, prefix + path, data, self._headers)
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
        except TimeoutError:
            raise SyncDeadline(
                f"{self.url}{path} did not answer within {seconds:.3g} s",
                remedy="is the server busy or stopped? pass a larger timeout=",
            ) from None
        except (OSError, HTTPException) as error:
            raise ControlError(
                f"{self.url}{path}: {error or type(error).__name__}",
                remedy="is `vllm serve` running there?",
            ) from None
        finally:
            connection.close()
        if reply.status != 200:
            raise ControlError(
                f"{self.url}{path} answered {reply.status}: {_words(text)}",
                remedy=_REMEDIES.get(reply.status, "see the server's log"),
                status=reply.status,
            )
        return json.loads(text) if text.startswith(("{", "[")) else text


_REMEDIES = {
    404: "start the server with VLLM_SERVER_DEV_MODE=1: vLLM has these routes only then",
    401: "connect(..., api_key=...)",
}


def _words(text: str) -> str:
    """The message in an error of vLLM's."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(text)["error"]["message"])
    return text[:500]


class Call:
    """One of vLLM's calls, in a thread: it lasts as long as its conversation."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.over, self._end = socket.socketpair()
        self._future: Future[None] = Future()
        threading.Thread(
            target=self._run, args=(work,), name=f"jvlab-{name}", daemon=True
        ).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._future.set_result(None)
        except BaseException as error:
            self._future.set_exception(error)
        self._end.close()  # `over` is readable then

    def result(self, seconds: float) -> None:
        """Wait for its end; raises its error."""
        try:
            self._future.result(seconds)
        except JvlabError:
            raise
        except TimeoutError:
            raise SyncDeadline(
                f"vLLM's {self.name} did not return within {seconds:.3g} s",
                remedy="see the server's log",
            ) from None
        except Exception as error:  # of another client than ours
            raise ControlError(
                f"vLLM's {self.name} failed: {error}", remedy="see the server's log"
            ) from error

    def close(self) -> None:
        """Nobody asks for its result any more; its thread closes the other end."""
        self.over.close()


# Ranks ---------------------------------------------------------------------------------------------------------------


class Server:
    """The ranks of one server, and the call that is in progress. Stands where other pools have a gateway's client."""

    def __init__(self, calls: FourCalls) -> None:
        self.calls = calls
        # the same, if it is reached by its address: only then can it be paused
        self.http = calls if isinstance(calls, HttpCalls) else None
        self.name = self.http.url if self.http is not None else "vLLM's server"
        self.hellos: dict[int, Plain] = {}  # rank -> what it said of itself
        self._ranks: dict[int, CoreChannel] = {}
        self._listener: socket.socket | None = None
        self._session = ""
        self._call: Call | None = None
        self.version = 0
        self.dirty = False

    @property
    def met(self) -> bool:
        return bool(self._ranks)

    def link(self) -> ServerStream:
        """The stream on which a link's orders go; not open yet."""
        return ServerStream(self)

    def invite(self, deadline: Deadline) -> None:
        """Meet every rank, in a session of its own."""
        self.hang_up("another session begins")
        self._session = secrets.token_hex(8)
        path = f"\0jvlab-server-{self._session}"  # abstract: no file to clean up
        key = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        info = {"path": path[1:], "key": key, "jvlab": __version__}
        self._begin_conversation(deadline, info)
        try:
            self._accept(key, deadline)
            unfinished = any(hello["started"] for hello in self.hellos.values())
            if unfinished:
                self.order(deadline, "forget")
            self.end(deadline)
            if unfinished:
                # ends the update that an earlier trainer left open; the last rank may have ended it by its error
                with contextlib.suppress(JvlabError):
                    self.call("finish_weight_update", deadline).result(deadline.left())
                self.close_call()
        except BaseException as error:
            self.hang_up(str(error))
            raise

    def _begin_conversation(self, deadline: Deadline, info: Plain) -> None:
        given = {**info, "session": self._session, "seconds": deadline.left()}
        self.call("init_weight_transfer_engine", deadline, given)

    def _accept(self, key: str, deadline: Deadline) -> None:
        assert self._listener is not None
        self._listener.settimeout(0.05)
        wanted = 1
        while len(self._ranks) < wanted:
            if deadline.over:
                raise SyncDeadline(
                    f"{len(self._ranks)} ranks of {self.name} connected within {deadline.seconds:g} s",
                    remedy="the server's ranks must run on this host: their sockets do not leave it",
                )
            try:
                end, _ = self._listener.accept()  # no deadline: the socket has one
            except TimeoutError:
                self._check_call()
                continue
            channel = CoreChannel(end)
            # any user of this host may connect, and say anything or nothing
            given = b""
            with contextlib.suppress(OSError):
                seconds = min(PROMPT_SECONDS, deadline.left())
                kind, _, payload = channel.receive(time.monotonic() + seconds)
                given = payload if kind == HELLO else b""
            if not secrets.compare_digest(given[: len(key)], key.encode()):
                channel.close()
                continue
            hello = decode(given[len(key) :])
            self.hellos[hello["rank"]] = hello
            self._ranks[hello["rank"]] = channel
            wanted = hello["world"]
        self.version = max(hello["version"] for hello in self.hellos.values())
        self.dirty = any(hello["dirty"] for hello in self.hellos.values())

    # Calls

    def call(self, name: str, deadline: Deadline, *args: Any) -> Call:
        """Begin one of vLLM's calls."""
        if self.http is not None:
            self.http.deadline = deadline
        work = getattr(self.calls, name)
        self._call = Call(name, lambda: work(*args))
        return self._call

    def begin_update(self, deadline: Deadline) -> None:
        """Begin `update_weights`, in which ranks carry out a sync's orders."""
        info = {"session": self._session, "seconds": deadline.left()}
        self.call("update_weights", deadline, info)

    def _check_call(self) -> None:
        """Raise if the call has ended: its conversation has not."""
        call = self._call
        assert call is not None
        with contextlib.suppress(SyncDeadline):
            call.result(0.0)
            raise SyncError(
                f"vLLM's {call.name} returned before its ranks answered",
                remedy='is the server\'s backend "jvlab"? --weight-transfer-config \'{"backend": "jvlab"}\'',
            )

    @contextlib.contextmanager
    def conversation(self, deadline: Deadline) -> Iterator[None]:
        """Inside, ranks carry out orders while nothing is synced."""
        if not self.met:
            self.invite(deadline)
        self._begin_conversation(deadline, {})
        try:
            yield
            self.end(deadline)
        except BaseException as error:
            self.hang_up(str(error))
            raise

    def order(self, deadline: Deadline, do: str, *args: Any) -> list[Plain]:
        """The answers of all ranks, in their order; raises the first error among them."""
        message = encode({"do": do, "args": args})
        for rank in sorted(self._ranks):
            self._send(rank, ORDER, deadline, message)
        return checked([self._answer(rank, deadline) for rank in sorted(self._ranks)])

    def _answer(self, rank: int, deadline: Deadline) -> Plain:
        until = time.monotonic() + deadline.left()
        call = self._call
        assert call is not None
        try:
            return decode(self._ranks[rank].receive(until, call.over)[2])
        except OtherSocketReady:
            self._check_call()
            raise
        except TimeoutError:
            raise SyncDeadline(
                f"rank {rank} of {self.name} did not answer within {deadline.seconds:g} s",
                remedy="see the server's log",
            ) from None
        except OSError as error:
            raise self._gone(rank, error, deadline) from None

    def _send(
        self, rank: int, kind: bytes, deadline: Deadline, payload: bytes = b""
    ) -> None:
        try:
            self._ranks[rank].send(kind, 0, payload)
        except OSError as error:
            raise self._gone(rank, error, deadline) from None

    def _gone(self, rank: int, error: OSError, deadline: Deadline) -> JvlabError:
        """Why a rank hung up: what its call says, if it ends."""
        try:
            assert self._call is not None
            self._call.result(min(WHY_SECONDS, deadline.left() + GRACE))
        except SyncDeadline:
            pass
        except JvlabError as said:
            return said
        return TransportError(
            f"rank {rank} of {self.name} hung up: {error}",
            remedy="sync again; is the server still running?",
        )

    def end(self, deadline: Deadline) -> None:
        """The call's conversation ends well; waits until the call returns."""
        for rank in sorted(self._ranks):  # the last one last: see this module
            self._send(rank, END, deadline)
        call = self._call
        assert call is not None
        call.result(deadline.left() + GRACE)
        self.close_call()

    def close_call(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call = None

    def hang_up(self, why: str) -> None:
        """Leave; ranks that are in a call abandon it, and the call's end is awaited. Can be called twice."""
        for rank in sorted(self._ranks):
            with contextlib.suppress(OSError):
                self._ranks[rank].send(FAIL, 0, why.encode(), seconds=1.0)
            self._ranks[rank].close()
        self._ranks = {}
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._call is not None:
            with contextlib.suppress(JvlabError):  # what ended it is known already
                self._call.result(GRACE)
            self.close_call()


# Orders of a link ----------------------------------------------------------------------------------------------------


class ServerStream:
    """What `LinkStream` is with a gateway: a link's orders, one at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._opened = False
        self.busy = False
        self._terms: Terms | None = None
        self._names: dict[int, list[str]] = {}  # rank -> its parameters, if it says so
        self._committed: dict[tuple[str, int], int] = {}
        self._found: dict[tuple[str, int], int] = {}
        self._written = False  # live memory may hold parts of two versions
        self._halted = 0.0  # since when generation is paused for a sync

    @property
    def is_open(self) -> bool:
        return self._opened and self._server.met

    def open(self, request: pb.LinkOpen, seconds: float) -> pb.LinkReply:
        """Open the ranks' ends of a link's channels."""
        deadline = Deadline(seconds)
        ranks = list(request.endpoints[0].ranks_json)
        with self._server.conversation(deadline):
            answers = self._server.order(
                deadline, "open", request.transport, request.plan, 0, ranks, seconds
            )
        self._names = {a["rank"]: a["names"] for a in answers if "names" in a}
        self._opened = True
        outcome = self._outcome("ready", exports_json=handles_of(answers))
        return pb.LinkReply(state="idle", outcomes=[outcome])

    def steps(
        self,
        phases: Sequence[int],
        seconds: float,
        meanwhile: Callable[[], None] | None = None,
        *,
        terms: Any = None,
        digests: Sequence[pb.ReplicaDigests] = (),
        nonfinite: bool = False,
    ) -> pb.LinkReply:
        """Run these phases in order; raises if one failed, with what the server holds then in the error."""
        deadline = Deadline(seconds)
        self.busy = True
        outcome = self._outcome("ready")
        for phase in map(Phase, phases):
            try:
                match phase:
                    case Phase.PREPARE:
                        done = self._prepare(terms, deadline, meanwhile)
                    case Phase.HALT:
                        done = self._halt("staged", deadline)
                    case Phase.MOVE:
                        done = self._move(deadline)
                    case Phase.VERIFY:
                        done = self._verify(digests, nonfinite, deadline)
                    case Phase.COMMIT:
                        done = self._commit(deadline)
                    case Phase.GO_ON:
                        done = self._go_on(deadline)
                    case Phase.CHECK:
                        done = self._check(digests, deadline)
                    case Phase.ABANDON:
                        done = self._abandon("the trainer abandoned the sync")
                    case _:
                        raise SyncError(f"no such phase here: {phase.word}")
            except JvlabError as error:
                self.busy = False
                self._raise(phase.word, error)
            outcome.MergeFrom(done)
        self.busy = False
        return pb.LinkReply(state=outcome.state, outcomes=[outcome])

    # Phases

    def _prepare(
        self,
        message: Any,
        deadline: Deadline,
        meanwhile: Callable[[], None] | None,
    ) -> pb.ReplicaOutcome:
        terms = Terms.read(message).check()
        self._terms = terms
        self._halt("direct", deadline)
        server = self._server
        start = server.call("start_weight_update", deadline)
        if meanwhile is not None:
            meanwhile()
        start.result(deadline.left())
        server.close_call()
        self._server.begin_update(deadline)
        answers = server.order(deadline, "prepare", for_workers(terms))
        return self._outcome("ready", exports_json=handles_of(answers))

    def _halt(self, mode: str, deadline: Deadline) -> pb.ReplicaOutcome:
        """Pause generation, if this mode does so here: a core in a call cannot be, so direct syncs do it first."""
        http = self._server.http
        terms = self._terms
        if terms is not None and terms.mode == mode and http is not None:
            http.deadline = deadline
            self._halted = time.perf_counter()
            http.pause(terms.pause)
        return self._outcome("ready")

    def _move(self, deadline: Deadline) -> pb.ReplicaOutcome:
        terms = self._terms
        assert terms is not None  # prepared
        self._written = terms.mode == "direct"
        self._server.order(deadline, "move")
        if terms.mode == "staged":  # the engine generates while shadows are written
            self._server.end(deadline)
        return self._outcome("ready")

    def _verify(
        self, digests: Sequence[pb.ReplicaDigests], nonfinite: bool, deadline: Deadline
    ) -> pb.ReplicaOutcome:
        if nonfinite:
            raise Unsupported(
                "these parameters are not finite, and a server of plain vLLM can't keep NaN out of other requests' KV",
                remedy='sync finite ones, or launch the engine in a lab: nonfinite="allow" works there',
            )
        terms = self._terms
        assert terms is not None  # prepared
        if terms.mode == "staged":
            self._server.begin_update(deadline)
        answers = self._server.order(deadline, "verify", deadline.left())
        if late := [a for a in answers if not a["done"]]:
            raise SyncDeadline(
                f"rank {late[0]['rank']} of {self._server.name}: {late[0]['missing']} did not arrive",
                remedy="sync again",
            )
        self._found = digests_of(answers, self._names)
        if digests:
            self._compare(claimed_digests(digests[0]), whole=True)
        self._server.end(deadline)
        return self._outcome("ready", **self._facts_of(answers))

    def _facts_of(self, answers: list[Plain]) -> Plain:
        slowest: dict[str, float] = {}
        evidence: dict[str, int] = {}
        for answer in answers:
            for name, value in answer.get("seconds", {}).items():
                slowest[name] = max(value, slowest.get(name, 0.0))
            for name, count in answer.get("evidence", {}).items():
                evidence[name] = evidence.get(name, 0) + count
        parts = [pb.PhaseSeconds(name=n, seconds=s) for n, s in slowest.items()]
        total = sum(answer.get("bytes", 0) for answer in answers)
        return {"seconds": parts, "evidence": evidence, "bytes": total}

    def _compare(self, wanted: dict[tuple[str, int], int], whole: bool) -> None:
        found = self._found
        wrong = [key for key, value in wanted.items() if found.get(key) != value]
        if whole:
            wrong += [key for key in found if key not in wanted]
        if wrong:
            names = [f"{name} (rank {rank})" for name, rank in sorted(set(wrong))]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise VerifyError(
                f"{self._server.name} does not hold the trainer's bits: {', '.join(names[:3])}{more} differ",
                remedy="sync again",
                names=names,
            )

    def _commit(self, deadline: Deadline) -> pb.ReplicaOutcome:
        terms = self._terms
        assert terms is not None  # prepared
        self._written = True  # a swap that fails midway leaves parts of both
        server = self._server
        server.call("finish_weight_update", deadline, str(terms.version))
        answers = server.order(deadline, "commit")
        server.end(deadline)
        self._written = False
        server.dirty = False
        server.version = terms.version
        self._committed = self._found
        reloaded: dict[str, float] = {}
        for answer in answers:
            reloaded |= answer.get("reloaded", {})
        return self._outcome("committed", reloaded=reloaded)

    def _go_on(self, deadline: Deadline) -> pb.ReplicaOutcome:
        seconds = []
        http = self._server.http
        if self._halted and http is not None:
            http.deadline = deadline
            http.resume()
            pause = time.perf_counter() - self._halted
            seconds = [pb.PhaseSeconds(name="pause", seconds=pause)]
        self._halted = 0.0
        self._terms = None
        return self._outcome("committed", seconds=seconds)

    def _check(
        self, digests: Sequence[pb.ReplicaDigests], deadline: Deadline
    ) -> pb.ReplicaOutcome:
        with self._server.conversation(deadline):
            answers = self._server.order(deadline, "check", False)
        self._found = digests_of(answers, self._names)
        given = claimed_digests(digests[0]) if digests else self._committed
        self._compare(given, whole=False)
        rows = [(*key, value) for key, value in self._found.items()]
        found = pb.ReplicaDigests(
            replica=self._server.name,
            parameters=[name for name, _, _ in rows],
            ranks=[rank for _, rank, _ in rows],
            values=[value for _, _, value in rows],
        )
        facts = self._facts_of(answers)
        return self._outcome("ready", found=found, evidence=facts["evidence"])

    def _abandon(self, why: str) -> pb.ReplicaOutcome:
        """Ranks give the sync up. Old weights are served again; generation stays halted if there are none."""
        server = self._server
        server.hang_up(why)
        server.dirty = server.dirty or self._written
        if self._halted and not server.dirty and server.http is not None:
            server.http.deadline = Deadline(GRACE)
            with contextlib.suppress(JvlabError):
                server.http.resume()
        self._halted = 0.0
        self._terms = None
        self._written = False
        return self._outcome("dirty" if server.dirty else "old")

    # Replies

    def _outcome(self, state: str, **more: Any) -> pb.ReplicaOutcome:
        server = self._server
        return pb.ReplicaOutcome(
            replica=server.name, state=state, version=server.version, **more
        )

    def _raise(self, phase: str, error: JvlabError) -> None:
        """Raise what a gateway would have answered."""
        kind = type(error).__name__
        names = list(error.fields.get("names", ()))  # type: ignore[call-overload]
        if phase == "check":
            outcome = self._outcome("old")
        else:
            outcome = self._abandon(error.message)
        outcome.failed = phase
        outcome.error = error.message
        outcome.differing.extend(names)
        state = (
            "its weights may be parts of two versions, and it stays paused until a sync commits"
            if outcome.state == "dirty"
            else f"it holds version {outcome.version}, as before"
        )
        name = self._server.name
        reply = pb.LinkReply(
            state="idle",
            outcomes=[outcome],
            code=failure_code(
                "DeadlineExceeded" if kind == "SyncDeadline" else kind, bool(names)
            ),
            error=f"{phase}: {error.message}; {name} is {outcome.state}: {state}",
            remedy=error.remedy,
        )
        check(reply)

    def close(self) -> None:
        """Abandon an open sync; the ranks forget the link. Can be called twice."""
        if not self._opened:
            return
        self._opened = False
        if self._terms is not None:
            self._abandon("the trainer closed its link")
        elif self._server.met:
            deadline = Deadline(GRACE)
            with (
                contextlib.suppress(JvlabError, OSError),
                self._server.conversation(deadline),
            ):
                self._server.order(deadline, "close")
        self._server.hang_up("the trainer closed its link")


# The pool ------------------------------------------------------------------------------------------------------------


class ServerPool:
    """A server as `PoolView` describes a pool."""

    one_process = False
    replicas = 1

    def __init__(self, server: Server, deadline: Deadline) -> None:
        self.client: Any = server
        self.name = server.name
        self.listeners: list[Any] = []
        self.links: weakref.WeakSet[Any] = weakref.WeakSet()
        server.invite(deadline)
        hello = server.hellos[0]
        self.model: str = hello["model"]
        self._device: str = hello["device"]
        self._known = hello["facts"]
        self.jvlab: str = hello["jvlab"]
        self._ranks: int = hello["world"]

    @property
    def snapshot(self) -> pb.PoolStatus:
        """What is known of the server; asks nobody."""
        server = self.client
        replica = pb.ReplicaStatus(
            replica=self.name,
            state=pb.READY,
            stage="ready",
            epoch=1,
            facts=self.facts(),
            version=server.version,
            dirty=server.dirty,
        )
        return pb.PoolStatus(
            pool=self.name,
            model=self.model,
            tensor_parallel=self._ranks,
            device=self._device,
            replicas=[replica],
            version=server.version,
        )

    def facts(self, timeout: float | Deadline = 900.0) -> pb.EngineFacts:
        """What the server's ranks said of their engine."""
        return pb.EngineFacts(**self._known)

    def renew(self, snapshot: pb.PoolStatus) -> None:
        """Nothing to store: `snapshot` is made of what the ranks say."""

    def status(self, *, timeout: float | Deadline = 30.0) -> Plain:
        """Its version, and whether it is dirty."""
        return {"version": self.client.version, "dirty": self.client.dirty}

    def trace(
        self,
        tensors: Sequence[CheckpointTensor] | None = None,
        *,
        replica: str = "",
        timeout: float | Deadline = 300.0,
    ) -> list[RankLayout]:
        """Where the server's engine stores every checkpoint element."""
        deadline = Deadline.of(timeout)
        listed = checkpoint_tensors(self.model) if tensors is None else tensors
        rows = [[t.name, list(t.shape), t.dtype] for t in listed]
        with self.client.conversation(deadline):
            answers = self.client.order(deadline, "trace", rows)
        return [layout_from_bytes(answer["layout"]) for answer in answers]

    def peek(
        self,
        parameter: str,
        rank: int = 0,
        *,
        replica: int = 0,
        timeout: float | Deadline = 120.0,
    ) -> bytes:
        """The raw bytes of a live parameter."""
        deadline = Deadline.of(timeout)
        out = b""
        total = 1
        with self.client.conversation(deadline):
            while len(out) < total:
                answers = self.client.order(
                    deadline, "peek", rank, parameter, len(out), PIECE
                )
                out += answers[rank]["data"]
                total = answers[rank]["total"]
        return out

    def score(
        self, sequences: Any, top: int = 0, *, timeout: float | Deadline = 3600.0
    ) -> Scores:
        """log P of every token given its prefix, by the server's own completions route."""
        http = self.client.http
        if http is None or top:
            raise Unsupported(
                "this server is reached by four calls, none of which scores tokens",
                remedy="connect by its address",
            )
        http.deadline = Deadline.of(timeout)
        rows = []
        for ids in sequences:
            asked = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
            reply = http.ask("POST", "/v1/completions", asked)
            found = reply["choices"][0]["prompt_logprobs"]
            pairs = zip(ids, found, strict=True)
            row = [np.nan if f is None else f[str(t)]["logprob"] for t, f in pairs]
            rows.append(np.array(row, np.float32))
        versions = np.full(len(rows), self.client.version)
        return Scores(rows, versions)

    def __repr__(self) -> str:
        return f"ServerPool({self.name})"


def connect(
    server: str | FourCalls,
    params: Any,
    rules: Any = "auto",
    transport: str = "auto",
    mode: str = "direct",
    *,
    api_key: str | None = None,
    bucket_mib: float = 16.0,
    nonfinite: str = "refuse",
    checkpoint: Any = None,
    meaning: str = "auto",
    timeout: float | Deadline = 900.0,
) -> Link:
    """Connect a tree of parameters with a server whose backend is `jvlab`; `link.sync(params)` then writes them there.

    server   its address, "http://127.0.0.1:8000", or an object with vLLM's four calls (`VLLMWeightSyncClient`). By its
             address, generation is paused for each sync, and KV of older weights is dropped; by four calls alone the
             caller pauses it
    api_key  what the server was started with, if it was
    others   as of `lab.connect`; `params` is a JAX tree, a torch state dict or module, a `jv.Policy`

    After a failed sync the server holds its old weights, or, in direct mode, is dirty: it stays paused, its version
    does not move, and calls of another trainer's are answered with an error that says so, until a sync commits.
    """
    from jvlab.layout._tree import device_processes, flatten
    from jvlab.sync._connections import agree, check_options
    from jvlab.sync._link import Link
    from jvlab.sync._meaning import unpack

    deadline = Deadline.of(timeout)
    calls = HttpCalls(server, api_key) if isinstance(server, str) else server
    check_options(params, {})
    params, scorer = unpack(params)
    if len(set(device_processes(flatten(params).arrays).values())) > 1:
        raise Unsupported(
            "these parameters are spread over several trainer processes; a server is written from one",
            remedy="launch the engines in a lab: lab.launch(model), or gather the parameters in one process",
        )
    reached = Server(calls)
    try:
        pool: Any = ServerPool(reached, deadline)
        agreed = agree(
            params,
            scorer,
            pool,
            rules,
            transport,
            meaning=meaning,
            checkpoint=checkpoint,
            bucket_mib=bucket_mib,
            options={},
            cache={},
            gateway_version=pool.jvlab,
            same_host=True,
            deadline=deadline,
        )
        forget = lambda link: None
        link = Link(pool, agreed, mode, None, forget, None, nonfinite, deadline)
    except BaseException as error:
        reached.hang_up(str(error))
        raise
    link.remembered.take(params)
    return link

"""A trainer of several processes: each holds some of the shards, process 0 leads, and all do one thing at a time.

    leader (member 0)                                  others
    gather("begin")  ◀───────────────────────────────  send("begin", …)
    send("go", …)    ───────────────────────────────▶  receive("go")
    whoever fails:  fail(error)  ──── to all ───────▶  everybody raises it; what they wait for is closed

Each thing done together (connect, a sync, a verify) is a round, and messages of older rounds are dropped: after a
failure everybody starts the next one alike. The gateway passes the messages on and reports at once when a process ends.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from jvlab import _errors as errors
from jvlab._errors import ConfigError, DeadlineExceeded, JvlabError, SyncError, TransportError
from jvlab.layout._shards import device_processes
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._team_client import Message, TeamStream

if TYPE_CHECKING:
    from jvlab.sync._connect import Agreement
    from jvlab.wire._client import Client

JOIN_SECONDS = 120.0  # for the other processes to call connect
LINGER = 0.5  # a failure here may be the echo of one elsewhere: the news of that is waited for so long
ECHOES = ("closed", "closed here", "lost", "failed")  # reasons of a TransportError
AGAIN = "start the trainer's processes again, and call lab.connect(params, pool) in every one of them"


class Team:
    """The processes of one trainer, as one of them sees it. Used by one thread at a time."""

    def __init__(self, client: Client, pool: str, processes: list[int], own: int, job: str) -> None:
        self.processes, self.member, self.size = processes, processes.index(own), len(processes)
        self._round, self._kind = 0, "connect"
        self._close: Callable[[], object] | None = None  # what ends the work that is going on here
        self._failed: set[int] = set()  # rounds whose failure was reported to the others
        name = f"python {os.getpid()} on {platform.node()}"
        join = pb.TeamJoin(pool=pool, team=job, member=self.member, size=self.size, name=name)
        self._stream = TeamStream(client, join)
        self._stream.on_news = self._news

    @property
    def leads(self) -> bool:
        return self.member == 0

    @property
    def process(self) -> int:
        """This process's number in the plan."""
        return self.processes[self.member]

    @property
    def over(self) -> str:
        """Why this team is over; empty while it is not."""
        return self._stream.over

    def _who(self, member: int) -> str:
        name = self._stream.names[member]
        return f"trainer process {self.processes[member]}" + (f" ({name})" if name else "")

    def assemble(self, seconds: float = JOIN_SECONDS) -> None:
        """Wait until every process is there."""
        stream = self._stream
        if stream.wait(lambda: stream.complete, seconds):
            return
        self.check()
        absent = [str(self.processes[k]) for k, name in enumerate(stream.names) if not name]
        missing = ", ".join(absent) if self.leads else "some"  # only the leader knows who has come
        raise DeadlineExceeded(
            f"these parameters lie in {self.size} trainer processes; {missing} did not connect within {seconds:g} s",
            remedy="call lab.connect(params, pool) in every process that holds some of them",
            missing=missing,
        )

    # Rounds -------------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, kind: str) -> Iterator[None]:
        """One thing that all do together; a failure here is reported to all, and one elsewhere is raised here."""
        self._round += 1
        self._kind = kind
        with self.sharing():
            self.check()
            yield

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """The same for a part of a round."""
        try:
            yield
        except BaseException as error:
            if not getattr(error, "fields", {}).get("reported"):
                self.fail(error)
            cause = self._stream.wait(self._cause, LINGER) if _is_echo(error) else None
            if cause is None:
                raise
            raise cause from error

    @contextmanager
    def watching(self, close: Callable[[], object]) -> Iterator[None]:
        """Work that waits for an engine: `close` ends it when another process fails."""
        self._close = close
        try:
            self.check()
            yield
        finally:
            self._close = None

    def _news(self) -> None:
        close = self._close
        if close is not None and self._find_trouble() is not None:
            self._close = None
            threading.Thread(target=close, name="jvlab-team", daemon=True).start()  # the loop must not wait

    def fail(self, error: BaseException) -> None:
        """Report to the others, once a round, that it can't be finished."""
        if self._round in self._failed or self.over:
            return
        self._failed.add(self._round)
        known = isinstance(error, JvlabError)
        text = error.message if known else f"{type(error).__name__}: {error}"
        report = {
            "message": text,
            "remedy": error.remedy if known else "",
            "kind": type(error).__name__,
            "echo": _is_echo(error),
        }
        with suppress(JvlabError):  # a client that is closed: the end of the stream shows them
            self._stream.send({"round": self._round, "step": "error", "error": report}, to_all=True)

    def check(self) -> None:
        """Raise what another process failed with, or that one has gone."""
        if (found := self._find_trouble()) is not None:
            raise found

    def _find_trouble(self) -> JvlabError | None:
        """What is known to have gone wrong elsewhere in this round; a cause before its echoes."""
        return self._cause() or next(iter(self._errors(echo=True)), None)

    def _cause(self) -> JvlabError | None:
        with self._stream.changed:
            found = next(iter(self._errors(echo=False)), None)
            if found is None and self._stream.over:
                why = f"the trainer's processes no longer hold together: {self._stream.over}"
                found = SyncError(why, remedy=AGAIN, reported=True)
            return found

    def _errors(self, echo: bool) -> list[JvlabError]:
        with self._stream.changed:
            return [
                self._error_of(member, message["error"])
                for member in range(self.size)
                for message in self._stream.messages(member)
                if message["round"] == self._round and message["step"] == "error" and message["error"]["echo"] == echo
            ]

    def _error_of(self, member: int, report: Mapping[str, Any]) -> JvlabError:
        kind = getattr(errors, str(report["kind"]), SyncError)
        kind = kind if isinstance(kind, type) and issubclass(kind, JvlabError) else SyncError
        text = f"{self._who(member)} gave up: {report['message']}"
        return kind(
            text, remedy=str(report["remedy"]) or "try again in every process", reported=True, echo=report["echo"]
        )

    # Messages -----------------------------------------------------------------------------------------------------

    def _next(self, member: int, step: str) -> Message | None:
        """The member's next message, if it has come; those of older rounds are dropped."""
        queue = self._stream.messages(member)
        while queue and queue[0]["round"] < self._round:
            queue.popleft()
        if not queue or queue[0]["round"] > self._round:
            return None
        if queue[0]["step"] == "error":
            return None  # `check` finds it
        kind, at = queue[0]["kind"], queue[0]["step"]
        if (kind, at) != (self._kind, step):
            raise SyncError(
                f"{self._who(member)} is at {kind}, {at}; this process at {self._kind}, {step}",
                remedy="every process calls connect, sync and verify in the same order",
            )
        return queue[0]

    def _await(self, members: list[int], step: str, seconds: float) -> list[Message]:
        def done() -> list[Message] | None:
            if self._errors(echo=False) or self._errors(echo=True):
                return [{}]
            received = [self._next(m, step) for m in members]
            return [m for m in received if m is not None] if all(m is not None for m in received) else None

        found = self._stream.wait(done, seconds)
        if found in (None, [{}]):  # a message counts, even if its sender has left since
            self.check()
        if found is None:
            late = ", ".join(self._who(m) for m in members if self._next(m, step) is None)
            raise DeadlineExceeded(
                f"{late} did not come to {self._kind} ({step}) within {seconds:.3g} s",
                remedy=f"call link.{self._kind}(...) in every process; pass a larger timeout= if one is that late",
            )
        with self._stream.changed:
            for member in members:
                self._stream.messages(member).popleft()
        return found

    def gather(self, step: str, seconds: float) -> list[Message]:
        """Leader: one message of each other member, in their order."""
        return self._await(list(range(1, self.size)), step, seconds)

    def receive(self, step: str, seconds: float) -> Message:
        """Others: the leader's message."""
        return self._await([0], step, seconds)[0]

    def send(self, step: str, **body: Any) -> None:
        """To all others (leader), or to the leader."""
        self._stream.send({"round": self._round, "kind": self._kind, "step": step, **body})

    def agree(self, agreed: Agreement) -> None:
        """After each process planned for itself: the plans must be one, and so must the transport."""
        held = sorted({int(p) for p in agreed.plan.processes})
        if held != self.processes:
            raise ConfigError(
                f"the plan takes numbers from processes {held}, the arrays' shardings name {self.processes}",
                remedy="give every leaf a sharding over the trainer's devices (numpy arrays have none)",
            )
        own = {"plan": agreed.plan.digest, "transport": agreed.transport, "reason": agreed.reason}
        if self.leads:
            others = self.gather("plan", JOIN_SECONDS)
            for member, other in enumerate(others, 1):
                if other["plan"] != own["plan"]:
                    raise ConfigError(
                        f"{self._who(member)} has another plan than process {self.process}",
                        remedy="give every process the same tree, rules and options, with global shardings",
                    )
            names = {other["transport"] for other in others} | {agreed.transport}
            if len(names) > 1:  # some processes share the engine's host, others do not
                agreed.transport, agreed.reason = "gloo", "the trainer's processes are on different hosts"
            self.send("agreed", transport=agreed.transport, reason=agreed.reason)
        else:
            self.send("plan", **own)
            report = self.receive("agreed", JOIN_SECONDS)
            agreed.transport, agreed.reason = report["transport"], report["reason"]

    def close(self) -> None:
        """Leave; the others' waits end. Can be called twice."""
        self._stream.close()


def _is_echo(error: BaseException) -> bool:
    """Is it how a failure elsewhere shows here: a channel or a call that was closed from the other side?"""
    fields = getattr(error, "fields", {})
    if isinstance(error, TransportError):
        return fields.get("reason") in ECHOES or fields.get("code") == "transport" or bool(fields.get("echo"))
    return isinstance(error, CancelledError) or bool(fields.get("echo"))


@contextmanager
def together(client: Any, arrays: Mapping[str, Any], pool: str) -> Iterator[Team | None]:
    """The team of all processes that hold shards of these arrays, all of them there; None if that is this one alone.

    What goes wrong inside is reported to all of them.
    """
    processes = sorted(set(device_processes(arrays).values()))
    if len(processes) < 2:
        yield None
        return
    own = {int(d.process_index) for a in arrays.values() for d in _addressable(a)}
    if not own:
        raise ConfigError(
            f"this process holds none of these parameters; processes {processes} do",
            remedy="call lab.connect in those, and leave the others out",
        )
    team = Team(client, pool, processes, own.pop(), _job(arrays))
    try:
        team.assemble()
        with team.round("connect"):
            yield team
    except BaseException:
        team.close()
        raise


def _addressable(array: Any) -> Any:
    return getattr(getattr(array, "sharding", None), "addressable_devices", ())


def _job(arrays: Mapping[str, Any]) -> str:
    """What only the processes of one trainer have in common, where there is such a thing."""
    if any(type(a).__module__.startswith("jax") for a in arrays.values()):
        # Not public in jax (as of 0.10); it only keeps two trainers apart that start at the same moment.
        state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
        return str(getattr(state, "coordinator_address", "") or "")
    return ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))

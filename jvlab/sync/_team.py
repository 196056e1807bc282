"""A multi-process trainer: each process holds some of the shards, and process 0 is the leader.

    leader (member 0)                                  others
    gather("begin")  ◀───────────────────────────────  send("begin", …)
    send("go", …)    ───────────────────────────────▶  receive("go")
    on failure:     fail(error)  ──── to all ───────▶  all raise it; channels they wait on are closed

Each collective operation (connect, sync, verify) is a round. Messages of older rounds are dropped, so after a failure
all processes start the next round in the same state. The gateway relays messages and reports at once when a process
ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from jvlab import _errors as errors
from jvlab._deadline import Deadline
from jvlab._errors import (
    ConfigError,
    DeadlineExceeded,
    JvlabError,
    SyncError,
    TransportError,
)
from jvlab._files import Plain
from jvlab._names import own_name
from jvlab.layout._digest import NonFinite, merged
from jvlab.layout._tree import device_processes
from jvlab.sync._coordinator import Coordinator, Wrap
from jvlab.sync._pack import Source
from jvlab.sync._senders import Progress, Senders, Sent
from jvlab.sync._transaction import (
    ORDER_SECONDS,
    CheckReport,
    Outcome,
    SyncReport,
    Transaction,
)
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Message, TeamStream
from jvlab.wire._sync_words import CHOICES, Terms

if TYPE_CHECKING:
    from jvlab.sync._connections import Agreement
    from jvlab.wire._client import Client
    from jvlab.wire._pool_view import PoolView


JOIN_SECONDS = 120.0  # for the other processes to call connect
# after a secondary failure, wait this long for the report of its cause in another process
CAUSE_SECONDS = 0.5
SECONDARY_REASONS = ("closed", "closed here", "lost", "failed")  # of a TransportError
RESTART = (
    "restart all trainer processes, and call lab.connect(params, pool) in every one"
)


class Team:
    """One process's view of the trainer's processes. Used by one thread at a time."""

    def __init__(
        self, client: Client, pool: str, processes: list[int], own: int, job: str
    ) -> None:
        self.processes, self.member, self.size = (
            processes,
            processes.index(own),
            len(processes),
        )
        self._round = 0
        self._kind = "connect"
        # cancels the work in progress here
        self._close: Callable[[], object] | None = None
        self._failed: set[int] = set()  # rounds whose failure this process has reported
        self._client = client
        self._join = pb.TeamJoin(
            pool=pool, team=job, member=self.member, size=self.size, name=own_name()
        )
        self._stream = TeamStream(client, self._join)
        self._stream.on_news = self._on_message

    def another_stream(self, purpose: str) -> TeamStream:
        """A stream of the same processes beside that of the syncs; each of them opens it."""
        join = pb.TeamJoin()
        join.CopyFrom(self._join)
        join.team = f"{join.team}/{purpose}"
        return TeamStream(self._client, join)

    @property
    def leads(self) -> bool:
        return self.member == 0

    @property
    def process(self) -> int:
        """This process's index in the plan."""
        return self.processes[self.member]

    @property
    def over(self) -> str:
        """Why this team has ended; empty while it has not."""
        return self._stream.over

    def _who(self, member: int) -> str:
        name = self._stream.names[member]
        return f"trainer process {self.processes[member]}" + (
            f" ({name})" if name else ""
        )

    def assemble(self, seconds: float = JOIN_SECONDS) -> None:
        """Wait until every process has joined."""
        stream = self._stream
        if stream.wait(lambda: stream.complete, seconds):
            return
        self.check()
        absent = [
            str(self.processes[k]) for k, name in enumerate(stream.names) if not name
        ]
        # only the leader knows who has joined
        missing = ", ".join(absent) if self.leads else "some"
        raise DeadlineExceeded(
            f"these parameters span {self.size} trainer processes; {missing} did not connect within {seconds:g} s",
            remedy="call lab.connect(params, pool) in every process that holds some of them",
            missing=missing,
        )

    # Rounds -------------------------------------------------------------------------------------------------------

    @contextmanager
    def round(self, kind: str) -> Iterator[None]:
        """One collective operation; a failure here is reported to all, and one elsewhere is raised here."""
        self._round += 1
        self._kind = kind
        with self.sharing():
            self.check()
            yield

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """The same error handling for a part of a round."""
        try:
            yield
        except BaseException as error:
            if not getattr(error, "fields", {}).get("reported"):
                self.fail(error)
            cause = (
                self._stream.wait(self._cause, CAUSE_SECONDS)
                if _is_secondary(error)
                else None
            )
            if cause is None:
                raise
            raise cause from error

    @contextmanager
    def watching(self, close: Callable[[], object]) -> Iterator[None]:
        """Work that waits for an engine; `close` cancels it when another process fails."""
        self._close = close
        try:
            self.check()
            yield
        finally:
            self._close = None

    def _on_message(self) -> None:
        close = self._close
        if close is not None and self._find_error() is not None:
            self._close = None
            # must not block the event loop
            threading.Thread(target=close, name="jvlab-team", daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Report to the others, once per round, that this process failed."""
        if self._round in self._failed or self.over:
            return
        self._failed.add(self._round)
        known = isinstance(error, JvlabError)
        text = error.message if known else f"{type(error).__name__}: {error}"
        report = {
            "message": text,
            "remedy": error.remedy if known else "",
            "kind": type(error).__name__,
            "echo": _is_secondary(error),
        }
        # the client is closed: the others see the stream end
        with suppress(JvlabError):
            self._stream.send(
                {"round": self._round, "step": "error", "error": report}, to_all=True
            )

    def check(self) -> None:
        """Raise another process's error, or that one has left."""
        if (found := self._find_error()) is not None:
            raise found

    def _find_error(self) -> JvlabError | None:
        """An error reported by another process in this round; a cause before secondary failures."""
        return self._cause() or self._reported(echo=True)

    def _cause(self) -> JvlabError | None:
        with self._stream.changed:
            found = self._reported(echo=False)
            if found is None and self._stream.over:
                why = f"the trainer's processes are no longer connected: {self._stream.over}"
                found = SyncError(why, remedy=RESTART, reported=True)
            return found

    def _reported(self, echo: bool) -> JvlabError | None:
        with self._stream.changed:
            for member in range(self.size):
                for message in self._stream.messages(member):
                    if message["round"] != self._round or message["step"] != "error":
                        continue
                    if message["error"]["echo"] == echo:
                        return self._error_of(member, message["error"])
        return None

    def _error_of(self, member: int, report: Mapping[str, Any]) -> JvlabError:
        kind = getattr(errors, str(report["kind"]), SyncError)
        kind = (
            kind
            if isinstance(kind, type) and issubclass(kind, JvlabError)
            else SyncError
        )
        text = f"{self._who(member)} gave up: {report['message']}"
        return kind(
            text,
            remedy=str(report["remedy"]) or "try again in every process",
            reported=True,
            echo=report["echo"],
        )

    # Messages -----------------------------------------------------------------------------------------------------

    def _next(self, member: int, step: str) -> Message | None:
        """The member's next message, if it has arrived; those of older rounds are dropped."""
        queue = self._stream.messages(member)
        while queue and queue[0]["round"] < self._round:
            queue.popleft()
        if not queue or queue[0]["round"] > self._round:
            return None
        if queue[0]["step"] == "error":
            return None  # `check` finds it
        kind = queue[0]["kind"]
        at = queue[0]["step"]
        if (kind, at) != (self._kind, step):
            raise SyncError(
                f"{self._who(member)} is at {kind}, {at}; this process at {self._kind}, {step}",
                remedy="call connect, sync and verify in the same order in every process",
            )
        return queue[0]

    def _await(self, members: list[int], step: str, seconds: float) -> list[Message]:
        def done() -> list[Message] | None:
            if self._reported(echo=False) or self._reported(echo=True):
                return [{}]
            received = [m for m in (self._next(m, step) for m in members) if m]
            return received if len(received) == len(members) else None

        found = self._stream.wait(done, seconds)
        # a received message counts, even if its sender has left since
        if found in (None, [{}]):
            self.check()
        if found is None:
            late = ", ".join(
                self._who(m) for m in members if self._next(m, step) is None
            )
            raise DeadlineExceeded(
                f"{late} did not reach {self._kind} ({step}) within {seconds:.3g} s",
                remedy=f"call link.{self._kind}(...) in every process; pass a larger timeout= if one is slower",
            )
        with self._stream.changed:
            for member in members:
                self._stream.messages(member).popleft()
        return found

    def gather(self, step: str, seconds: float) -> list[Message]:
        """Leader: one message from each other member, in order."""
        return self._await(list(range(1, self.size)), step, seconds)

    def receive(self, step: str, seconds: float) -> Message:
        """Others: the leader's message."""
        return self._await([0], step, seconds)[0]

    def send(self, step: str, **body: Any) -> None:
        """Send to all others (leader), or to the leader."""
        self._stream.send(
            {"round": self._round, "kind": self._kind, "step": step, **body}
        )

    def agree(self, agreed: Agreement) -> None:
        """Check that all processes made the same plan, and settle on one transport."""
        held = sorted({int(p) for p in agreed.plan.processes})
        if held != self.processes:
            raise ConfigError(
                f"the plan reads from processes {held}, the arrays' shardings name {self.processes}",
                remedy="give every leaf a sharding over the trainer's devices (numpy arrays have none)",
            )
        own = {
            "plan": agreed.plan.digest,
            "transport": agreed.transport,
            "reason": agreed.reason,
        }
        if self.leads:
            others = self.gather("plan", JOIN_SECONDS)
            for member, other in enumerate(others, 1):
                if other["plan"] != own["plan"]:
                    raise ConfigError(
                        f"{self._who(member)} has a different plan than process {self.process}",
                        remedy="give every process the same tree, rules and options, with global shardings",
                    )
            names = {other["transport"] for other in others} | {agreed.transport}
            if len(names) > 1:  # only some processes share the engine's host
                agreed.transport = "tcp"
                agreed.reason = "the trainer's processes are on different hosts"
            self.send("agreed", transport=agreed.transport, reason=agreed.reason)
        else:
            self.send("plan", **own)
            report = self.receive("agreed", JOIN_SECONDS)
            agreed.transport = report["transport"]
            agreed.reason = report["reason"]

    def close(self) -> None:
        """Leave the team, which ends the others' waits. Can be called twice."""
        self._stream.close()


def _is_secondary(error: BaseException) -> bool:
    """Is it the effect of a failure elsewhere: a channel or call closed by the other side?"""
    fields = getattr(error, "fields", {})
    if isinstance(error, TransportError):
        secondary = (
            fields.get("reason") in SECONDARY_REASONS
            or fields.get("code") == "transport"
        )
        return secondary or bool(fields.get("echo"))
    return isinstance(error, CancelledError) or bool(fields.get("echo"))


@contextmanager
def together(
    client: Any, arrays: Mapping[str, Any], pool: str
) -> Iterator[Team | None]:
    """The team of all processes that hold shards of these arrays, once all have joined; None if this is the only one.

    Errors inside are reported to all of them.
    """
    processes = sorted(set(device_processes(arrays).values()))
    if len(processes) < 2:
        yield None
        return
    shardings = [getattr(a, "sharding", None) for a in arrays.values()]
    here = [getattr(s, "addressable_devices", ()) for s in shardings]
    own = {int(d.process_index) for devices in here for d in devices}
    if not own:
        raise ConfigError(
            f"this process holds none of these parameters; processes {processes} do",
            remedy="call lab.connect in those processes only",
        )
    team = Team(client, pool, processes, own.pop(), _job(arrays))
    try:
        team.assemble()
        with team.round("connect"):
            yield team
    except BaseException:
        team.close()
        raise


def _job(arrays: Mapping[str, Any]) -> str:
    """An id shared only by the processes of one trainer, if there is one."""
    if any(type(a).__module__.startswith("jax") for a in arrays.values()):
        # Not public in jax (as of 0.10); only needed to tell two trainers apart that start at the same moment.
        state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
        return str(getattr(state, "coordinator_address", "") or "")
    return ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))


# The channels of a multi-process trainer: one process leads, each sends its own shards.
#     all       begin: the same arguments everywhere
#     leader    acquires the pool, with all endpoints               others  open their channels
#     leader    PREPARE … MOVE                                      others  wait
#     all       send their buckets; the leader sums the digests of the parts
#     leader    VERIFY, COMMIT, GO_ON; the report                   others  get the report
#
# Only the leader sends the orders of a sync to the gateway; see _team.py for how the others follow.

# The leader reports an error when its deadline passes; the others wait a little longer for its message.
SLACK = 1.0


class TeamCoordinator(Coordinator):
    """This process's part; all processes open, sync and check together."""

    def __init__(
        self,
        pool: PoolView,
        agreed: Agreement,
        wrap: Wrap,
        team: Team,
    ) -> None:
        super().__init__(pool, agreed, wrap)
        self.team = team
        self.processes = team.size

    def stream_beside(self, purpose: str) -> TeamStream | None:
        return self.team.another_stream(purpose)

    def together(self, kind: str) -> AbstractContextManager[None]:
        return self.team.round(kind)

    def sharing(self) -> AbstractContextManager[None]:
        return self.team.sharing()

    def close(self) -> None:
        super().close()
        self.team.close()

    # Opening ------------------------------------------------------------------------------------------------------

    def open_first(self, mode: str, deadline: Deadline) -> None:
        with self.together("open"):
            deadline = Deadline(ORDER_SECONDS)
            self._agree({"mode": mode}, deadline)
            self._open_together(deadline)

    def _agree(self, wanted: Mapping[str, Any], deadline: Deadline) -> bool:
        """Check that all processes ask for the same; returns (leader) whether all have their channels open."""
        self._refuse_closed("link = lab.connect(params, pool), in every process")
        team = self.team
        is_open = self.senders is not None
        if not team.leads:
            team.send("begin", wanted=wanted, open=is_open)
            return is_open
        for member, other in enumerate(team.gather("begin", deadline.left()), 1):
            if other["wanted"] != wanted:
                differing = [k for k in wanted if other["wanted"].get(k) != wanted[k]]
                raise ConfigError(
                    f"trainer processes {team.processes[member]} and {team.process} ask for different things: "
                    + ", ".join(
                        f"{k}={other['wanted'].get(k)!r} and {wanted[k]!r}"
                        for k in differing
                    ),
                    remedy="call it with the same arguments in every process",
                )
            is_open = is_open and other["open"]
        return is_open

    def _open_together(self, deadline: Deadline, is_open: bool = False) -> Senders:
        """Open channels from every process to every rank of every ready replica."""
        team = self.team
        if not team.leads:
            return self._open_mine(deadline)
        ready = self._ready_now(None, deadline)
        if is_open and self.senders is not None and self._is_open_to(ready):
            team.send("open", replicas=None, version=self.version)
            return self.senders
        self._check_replicas(ready, deadline)
        team.send("open", replicas=ready, version=self.version)
        with self._opening(ready, team.process) as senders:
            others = team.gather("endpoints", deadline.left())
            endpoints = [_endpoints(senders), *(other["endpoints"] for other in others)]
            ranks = {
                name: [
                    json.dumps(list(of_rank))
                    for of_rank in zip(*(e[name] for e in endpoints), strict=True)
                ]
                for name in ready
            }
            with team.watching(lambda: (senders.close(), self.stream.close())):
                self._take_pool(senders, ready, ranks, deadline)
            team.send("opened", version=self.version)
        return senders

    def _open_mine(self, deadline: Deadline) -> Senders:
        team = self.team
        leader = team.receive("open", deadline.left() + SLACK)
        self.version = int(leader["version"])
        if leader["replicas"] is None:
            assert self.senders is not None, "the leader knows who is open"
            return self.senders
        self.drop()
        with self._opening(leader["replicas"], team.process) as senders:
            team.send("endpoints", endpoints=_endpoints(senders))
            with team.watching(senders.close):
                senders.ready(deadline.left() + SLACK)
            self.version = int(
                team.receive("opened", deadline.left() + SLACK)["version"]
            )
        return senders

    # One sync or check --------------------------------------------------------------------------------------------

    def _open_transaction(
        self, params: Any, version: int | None, options: Terms, deadline: Deadline
    ) -> Transaction:
        """A transaction of all processes."""
        began = time.perf_counter()
        self.next_version(version)
        # None: the next version
        wanted: Plain = {name: getattr(options, name) for name in CHOICES}
        wanted |= {"timeout": deadline.seconds, "version": version}
        is_open = self._agree(wanted, deadline)
        # raises on a mismatch, before anything is opened
        source = Source.of(self.plan, params)
        senders = self._open_together(deadline, is_open)
        kind = Leading if self.team.leads else Following
        return kind(
            self.team,
            self.stream,
            senders,
            source,
            self._terms(options, version, deadline),
            self.transport,
            deadline,
            began,
        )

    def _verify(self, params: Any, deadline: Deadline) -> CheckReport:
        team = self.team
        with self.together("verify"):
            is_open = self._agree(
                {"params": params is not None, "timeout": deadline.seconds}, deadline
            )
            senders = self._open_together(deadline, is_open)
            sum_of_parts = Sent()
            if params is not None:
                sum_of_parts.add_digests(senders.digests(senders.source(params)))
            if not team.leads:
                team.send("digests", digests=list(sum_of_parts.digests.items()))
                done = team.receive("checked", deadline.left() + SLACK)
                return _from_plain(CheckReport, done["report"])
            for other in team.gather("digests", deadline.left()):
                sum_of_parts.add_digests(
                    {int(target): int(value) for target, value in other["digests"]}
                )
            with team.watching(self.stream.close):
                report = self.check(
                    self.expected(senders, sum_of_parts.digests), deadline
                )
            team.send("checked", report=_to_plain(report))
            return report


def _endpoints(senders: Senders) -> dict[str, list[Plain]]:
    """By replica, this process's endpoint for each rank."""
    return {
        name: [channel.sender.endpoint() for channel in of]
        for name, of in senders.replicas.items()
    }


# Transactions ---------------------------------------------------------------------------------------------------------


class Shared(Transaction):
    """One process's part of a transaction."""

    def __init__(self, team: Team, *of_transaction: Any) -> None:
        super().__init__(*of_transaction)
        self._team = team

    def send_all(self, progress: Progress, collect: bool = True) -> None:
        with self._team.watching(self.senders.close):
            # non-finite values in one process fail all of them
            super().send_all(progress, collect)

    @property
    def _seconds_left(self) -> float:
        return self.deadline.left() + SLACK


class Leading(Shared):
    """The leader's part: sends the orders."""

    def prepare(self) -> None:
        with self._team.watching(self.stream.close):
            super().prepare()
        self._team.send("move")

    def send_all(self, progress: Progress, collect: bool = True) -> None:
        super().send_all(progress, collect)
        for other in self._team.gather("sent", self.deadline.left()):
            _add(self.sent, other)
            self.nonfinite = merged(
                [*self.nonfinite, *(NonFinite(**found) for found in other["nonfinite"])]
            )

    def finish(self) -> SyncReport:
        report = super().finish()
        self._team.send("committed", report=_to_plain(report))
        return report


class Following(Shared):
    """Another process's part: sends its shards."""

    def prepare(self) -> None:
        self._team.receive("move", self._seconds_left)

    def send_all(self, progress: Progress, collect: bool = True) -> None:
        super().send_all(progress, collect)
        sent = self.sent
        digests = [[target, value] for target, value in sent.digests.items()]
        self._team.send(
            "sent",
            bytes=sent.bytes,
            buckets=sent.buckets,
            seconds=sent.seconds,
            digests=digests,
            nonfinite=[asdict(found) for found in self.nonfinite],
        )

    def finish(self) -> SyncReport:
        done = self._team.receive("committed", self._seconds_left)
        return _from_plain(SyncReport, done["report"])

    def abandon(self, error: BaseException | None = None) -> None:
        """Close the channels; the leader abandons the sync and knows each replica's state."""
        if isinstance(error, SyncError):
            error.fields.setdefault(
                "outcomes", dict.fromkeys(self.senders.replicas, "unknown")
            )
        self.senders.close()
        self.state = "over"


def _add(sent: Sent, other: Mapping[str, Any]) -> None:
    """Add another process's part: bytes and digests are summed, times are the slowest's."""
    sent.bytes += other["bytes"]
    sent.buckets += other["buckets"]
    sent.seconds = {
        name: max(s, other["seconds"].get(name, 0.0))
        for name, s in sent.seconds.items()
    }
    sent.add_digests({int(target): int(value) for target, value in other["digests"]})


Report = TypeVar("Report", SyncReport, CheckReport)


# Reports --------------------------------------------------------------------------------------------------------------


def _to_plain(report: SyncReport | CheckReport) -> Plain:
    """A report as JSON can hold it."""
    digests = [[*key, value] for key, value in report.digests.items()]
    return {**asdict(report), "digests": digests}


def _from_plain(kind: type[Report], plain: Mapping[str, Any]) -> Report:
    """The report that `_to_plain` was given."""
    tuples: Plain = {k: tuple(v) for k, v in plain.items() if isinstance(v, list)}
    if "spans" in plain:
        tuples["spans"] = {name: tuple(at) for name, at in plain["spans"].items()}
    tuples["outcomes"] = tuple(
        Outcome(**{**o, "differing": tuple(o["differing"])}) for o in plain["outcomes"]
    )
    digests = {(name, int(rank)): int(value) for name, rank, value in plain["digests"]}
    return kind(**{**plain, **tuples, "digests": digests})

"""One sync from the trainer's side, phase by phase: `Link.sync` runs it through, the stepper walks it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jvlab._errors import JvlabError
from jvlab._sync_report import Outcome, SyncReport
from jvlab.control import jvlab_pb2 as pb
from jvlab.layout._digest import in_sample
from jvlab.trainer._outlet import Outlet, Sent, by_parameter
from jvlab.trainer._pack import Source

if TYPE_CHECKING:
    from jvlab.control._express_client import ExpressStream
    from jvlab.control._link_client import LinkStream
    from jvlab.transport._ipc_arrays import Shards
    from jvlab.transport._ipc_outlet import IpcOutlet

ORDER_SECONDS = 60.0  # deadline of an order that moves no bytes
ABANDON_SECONDS = 15.0
PHASES = ("prepare", "halt", "move", "verify", "commit", "go_on")
WORKER_PARTS = ("scatter", "digest", "repack", "pause", "commit", "prepare", "halt", "go_on", "verify", "admit")


@dataclass(frozen=True)
class Terms:
    """How one sync is to be done."""

    version: int
    mode: str
    verify: str
    require: str
    pause: str
    kv: str
    timeout: float

    def message(self, replicas: list[str]) -> pb.SyncTerms:
        return pb.SyncTerms(
            version=self.version, mode=self.mode, verify=self.verify, require=self.require, pause=self.pause,
            kv=self.kv, bucket_seconds=self.timeout, replicas=replicas,
        )  # fmt: skip


def _pairs(outlet: Outlet | IpcOutlet, targets: tuple[int, ...]) -> list[tuple[str, int]]:
    """(parameter, rank) of these targets; an outlet sends the same ones every time."""
    known = outlet.__dict__.setdefault("_named_targets", {})
    if targets not in known:
        known[targets] = by_parameter(outlet.plan, targets)
    return known[targets]


def replica_digests(replica: str, rows: list[tuple[str, int, int]]) -> pb.ReplicaDigests:
    """(parameter, rank, digest) rows as a message."""
    return pb.ReplicaDigests(
        replica=replica, parameters=[r[0] for r in rows], ranks=[r[1] for r in rows], values=[r[2] for r in rows]
    )


def exports(reply: pb.LinkReply) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each replica exported, if they did."""
    return {o.replica: [json.loads(text) for text in o.exports_json] for o in reply.outcomes if o.exports_json}


def outcome_of(o: pb.ReplicaOutcome) -> Outcome:
    """A replica's outcome as plain values."""
    seconds = {part.name: part.seconds for part in o.seconds}
    return Outcome(o.replica, o.state, int(o.version), int(o.bytes), seconds, o.error, tuple(o.differing))


class Transaction:
    """prepare() → send … → finish(), or abandon() from anywhere. Used by one thread."""

    def __init__(
        self, stream: LinkStream, outlet: Outlet | IpcOutlet, source: Source | Shards, terms: Terms, transport: str,
        began: float | None = None,
    ) -> None:  # fmt: skip
        self.stream, self.outlet, self.source, self.terms = stream, outlet, source, terms
        self._transport = transport
        self.replies: list[pb.LinkReply] = []
        self.seconds: dict[str, float] = {}
        self.sent = Sent()
        self.state = "idle"
        self.express: ExpressStream | None = None  # orders go this way, past the gateway, if it is set
        self._began = began if began is not None else time.perf_counter()
        self._ended = 0.0
        self._digests: dict[tuple[str, int], int] | None = None  # of the report, where they are made already

    @property
    def digesting(self) -> bool:
        return self.terms.verify != "off"

    def _steps(self, name: str, phases: list[pb.SyncPhase], **more: Any) -> pb.LinkReply:
        start = time.perf_counter()
        way = self.express or self.stream
        try:
            reply = way.steps(phases, max(ORDER_SECONDS, self.terms.timeout), **more)
        except JvlabError:
            if not way.busy:  # the gateway has abandoned it: its answer said so
                self.state = "over"
            raise
        self.seconds[name] = time.perf_counter() - start
        self.replies.append(reply)
        self.state = reply.state
        return reply

    def prepare(self) -> None:
        """Up to the moment when bytes may move; in direct mode the engines stand still from now on."""
        staged = self.terms.mode == "staged"
        first = [pb.PREPARE, pb.MOVE] if staged else [pb.PREPARE, pb.HALT, pb.MOVE]
        terms = self.terms.message(list(self.outlet.replicas))
        if isinstance(self.outlet, Outlet):
            self._steps("prepare", first, terms=terms)
            return
        outlet = self.outlet
        outlet.staged = staged
        outlet.settle(self.source)  # what JAX still computes is waited for while the engines go on
        reply = self._steps("prepare", first, terms=terms, meanwhile=self._gather)
        outlet.attach(exports(reply))

    def _gather(self) -> None:
        assert not isinstance(self.outlet, Outlet)
        self.outlet.gather(self.source, self.digesting)

    def send_all(self, progress: Callable[[Sent], None], **more: Any) -> None:
        """Every bucket, until it lies in the engines' memory."""
        left = self.terms.timeout - (time.perf_counter() - self._began)
        send_all: Any = self.outlet.send_all  # each kind of outlet with its kind of source
        self.sent = send_all(self.source, self.terms.version, max(left, 0.1), self.digesting, progress, **more)

    def expected(self) -> list[pb.ReplicaDigests]:
        """What each replica must hold, as taken of what was sent; for a sample, of the parameters whose turn it is."""
        if self.terms.verify == "full":
            targets = tuple(sorted(self.sent.digests))
            pairs = _pairs(self.outlet, targets)
            columns: dict[str, Any] = {
                "parameters": [name for name, _ in pairs], "ranks": [rank for _, rank in pairs],
                "values": [self.sent.digests[t] for t in targets],
            }  # fmt: skip
            return [pb.ReplicaDigests(replica=replica, **columns) for replica in self.outlet.replicas]
        rows = [(*pair, value) for pair, value in self._named()]
        if self.terms.verify == "sampled":
            rows = [row for row in rows if in_sample(row[0], self.terms.version)]
        return [replica_digests(replica, rows) for replica in self.outlet.replicas]

    def _named(self) -> list[tuple[tuple[str, int], int]]:
        targets = sorted(self.sent.digests)
        names = _pairs(self.outlet, tuple(targets))
        return [(pair, self.sent.digests[t]) for t, pair in zip(targets, names, strict=True)]

    @property
    def _last(self) -> list[pb.SyncPhase]:
        """The phases that bring the new version, once it is verified."""
        return [pb.HALT, pb.COMMIT, pb.GO_ON] if self.terms.mode == "staged" else [pb.COMMIT, pb.GO_ON]

    @property
    def at_once(self) -> bool:
        """Can the engine core run all of it in one call? A direct sync by ipc into one replica, on one host.

        Not if requests are to finish first: who waits for that may give up, and nothing was written then.
        """
        there = self.express is not None and self.express.door is not None and self.express.door.is_open
        known = self.terms.verify in ("full", "off") and self.terms.pause != "wait"
        return there and known and self.terms.mode == "direct"

    def exchange(self, progress: Callable[[Sent], None]) -> SyncReport:
        """Everything in one order, and the report."""
        outlet, express = self.outlet, self.express
        assert express is not None  # `at_once` said so
        assert not isinstance(outlet, Outlet)
        outlet.staged = False
        outlet.settle(self.source)  # what JAX still computes is waited for while the engine goes on

        def claims() -> bytes:  # while the engine reads what it holds now
            outlet.collect(self.sent)
            self._digests = dict(self._named())
            return outlet.claims(self.sent)

        write = lambda: self.send_all(progress, collect=not self.digesting)
        seconds, start = max(ORDER_SECONDS, self.terms.timeout), time.perf_counter()
        try:
            terms = self.terms.message(list(outlet.replicas))
            reply = express.exchange(terms, seconds, self._gather, write, claims if self.digesting else None)
        except JvlabError:
            if not express.busy:
                self.state = "over"
            raise
        self._ended = time.perf_counter()
        reply.outcomes[0].bytes = self.sent.bytes
        self.seconds["exchange"] = self._ended - start - self.sent.seconds["move"]
        self.replies.append(reply)
        self.state = reply.state
        return self.report()

    def verify(self) -> pb.LinkReply:
        """Compare digests; afterwards only commit() or abandon() follow."""
        return self._steps("verify", [pb.VERIFY], digests=self.expected() if self.digesting else [])

    def commit(self) -> pb.LinkReply:
        """The version becomes the new one; generation goes on."""
        return self._steps("commit", self._last)

    def finish(self) -> SyncReport:
        """Verify and commit in one order, and the report."""
        self._steps("finish", [pb.VERIFY, *self._last], digests=self.expected() if self.digesting else [])
        self._ended = time.perf_counter()
        return self.report()

    def abandon(self) -> None:
        """Give up: old version (staged), or dirty until the next commit (direct, once bytes could move)."""
        self.outlet.close()
        way = self.express or self.stream
        if self.state != "over" and self.stream.is_open and way.is_open and not way.busy:
            try:
                self._steps("abandon", [pb.ABANDON])
            except JvlabError:
                self.stream.close()  # the gateway abandons when the stream ends
        else:
            self.stream.close()
        self.state = "over"

    def report(self) -> SyncReport:
        """What happened, after a commit."""
        merged: dict[str, Outcome] = {}
        for reply in self.replies:
            for o in map(outcome_of, reply.outcomes):
                before = merged[o.replica].seconds if o.replica in merged else {}
                merged[o.replica] = replace(o, seconds={**before, **o.seconds})
        seconds = {name: self.sent.seconds[name] for name in ("pack", "move")}
        for part in WORKER_PARTS:
            slowest = max((o.seconds.get(part, 0.0) for o in merged.values()), default=0.0)
            if slowest:
                seconds[part] = slowest
        seconds["copy"] = self.sent.seconds["copy"]
        seconds["trainer_digest"] = self.sent.seconds["digest"]
        seconds["digest"] = max(seconds.get("digest", 0.0), self.sent.seconds["digest"])
        seconds["total"] = (self._ended or time.perf_counter()) - self._began
        phases = (*PHASES, "admit") if "exchange" in self.seconds else PHASES
        inside = max((sum(o.seconds.get(p, 0.0) for p in phases) for o in merged.values()), default=0.0)
        seconds["control"] = max(0.0, sum(self.seconds.values()) - inside)
        digests = dict(self._named()) if self._digests is None else self._digests
        behind = [o for o in merged.values() if o.state != "committed"]
        return SyncReport(
            version=self.terms.version, bytes=self.sent.bytes, seconds=seconds, outcomes=tuple(merged.values()),
            digests=digests, verify=self.terms.verify, mode=self.terms.mode, transport=self._transport,
            buckets=self.sent.buckets, notes=tuple(f"{o.replica} stayed behind: {o.error or o.state}" for o in behind),
        )  # fmt: skip

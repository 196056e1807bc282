"""One sync from the trainer's side, phase by phase: `Link.sync` runs all of it, the stepper one step at a time.

Its result is a `SyncReport`; that of a check of live memory is a `CheckReport`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import JvlabError, NonFiniteError, SyncError
from jvlab.layout._digest import NAMED, NonFinite, examine, in_sample
from jvlab.layout._slices import distinct_leaves
from jvlab.sync._senders import DigestRow, Progress, Senders, Sent
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import AFTER_VERIFY, BEFORE_BYTES, ORDER, Phase, Terms

if TYPE_CHECKING:
    from jvlab.wire._client import LinkStream
    from jvlab.wire._core_channel import CoreOrders


class Closing(ABC):
    """What a `with` block closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# What a sync or a check of live memory resulted in.


@dataclass(frozen=True)
class Outcome:
    """One replica after a sync or a check."""

    replica: str
    state: str  # "committed", "old", "dirty" or "lost"
    version: int
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    differing: tuple[str, ...] = ()
    # parameter counts, see `SyncReport.evidence`
    evidence: Mapping[str, int] = field(default_factory=dict)
    # layer -> seconds, see `SyncReport.reloaded`
    reloaded: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SyncReport:
    """One committed version: what moved, how long each part took, what each replica holds now.

    Parts overlap, so they add up to more than `total`: pack, move (first byte sent until the last one is in the
    engine's memory), scatter and digest (of the slowest rank), repack, pause (generation was paused), total.

    >>> report = link.sync(policy.params)
    >>> [outcome.state for outcome in report.outcomes], report.seconds["total"] > 0
    (['committed'], True)
    """

    version: int
    bytes: int
    seconds: Mapping[str, float]
    outcomes: tuple[Outcome, ...]
    # (parameter, rank) -> digest
    digests: Mapping[tuple[str, int], int] = field(repr=False, default_factory=dict)
    verify: str = "full"
    mode: str = "direct"
    transport: str = "shm"
    buckets: int = 0
    notes: tuple[str, ...] = ()
    # leaves with NaN or Inf, sent because of nonfinite="allow"
    nonfinite: tuple[str, ...] = ()
    # whether only what changed was sent, at least to some replica or in some buckets; see `why_full`
    delta: bool = False
    changed: float | None = None  # share of the values that changed; None: not compared
    full_bytes: int = 0  # what sending everything would have taken
    why_full: str = ""  # why all of it, or some, was sent whole
    # part -> start, stop in seconds
    spans: Mapping[str, tuple[float, float]] = field(repr=False, default_factory=dict)
    # or "checked by value", "checked by function", "unchecked: <why>"; see `link.meaning`. With "at version 1": these
    # values were not compared, but those of version 1; with "except for 5 leaves": those could not be told apart
    meaning: str = "unchecked"

    @property
    def verified(self) -> bool:
        """Were the digests of all parameters equal on every replica that committed?

        This shows that the bits arrived; whether they mean the same on both sides is in `meaning`.
        """
        return self.verify == "full" and bool(self.outcomes)

    @property
    def evidence(self) -> dict[str, int]:
        """Number of parameters by how their arrival is known, over all replicas and ranks; empty without verification.

        live         the digest is of the memory that the engine computes with
        read back    vLLM keeps it packed; the digest is of the unpacked values
        sampled      vLLM's kernel keeps it packed: some columns were read back, and its product with a vector equals
                     that of the weights that arrived, up to rounding; `link.verify()` reads more
        loader       passed to vLLM's own loader; the digest is of what was passed
        reloaded     processed by vLLM's own reload (see `reloaded`); the digest is of what that was given
        unread       packed in a format that can't be read; the digest is of what arrived

        >>> sorted(link.sync(policy.params).evidence)
        ['live', 'sampled']
        """
        return _sum(o.evidence for o in self.outcomes)

    @property
    def reloaded(self) -> dict[str, float]:
        """Layers that jvlab has no format for, and the seconds that vLLM's own reload took for each (slowest replica).

        `link.mapping.notes` says why for each of their parameters.

        >>> link.sync(policy.params).reloaded
        {}
        """
        slowest: dict[str, float] = {}
        for o in self.outcomes:
            for layer, seconds in o.reloaded.items():
                slowest[layer] = max(seconds, slowest.get(layer, 0.0))
        return dict(sorted(slowest.items()))

    @property
    def gbps(self) -> float:
        """Gigabytes per second during the move."""
        return (
            self.bytes / self.seconds["move"] / 1e9 if self.seconds.get("move") else 0.0
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the digests as plain values."""
        plain = asdict(self)
        del plain["digests"]
        return {**plain, "verified": self.verified, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


@dataclass(frozen=True)
class CheckReport:
    """Digests of live memory compared with the expected ones; true if all are equal.

    >>> report = link.verify()
    >>> bool(report), report.differing
    (True, ())
    """

    version: int
    outcomes: tuple[Outcome, ...]
    digests: Mapping[tuple[str, int], int] = field(repr=False, default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def evidence(self) -> dict[str, int]:
        """Number of parameters by how their digests were obtained; see `SyncReport.evidence`."""
        return _sum(o.evidence for o in self.outcomes)

    @property
    def ok(self) -> bool:
        """Did every replica reply with the expected digests? This is about bits, not their meaning."""
        return bool(self.outcomes) and not any(
            o.differing or o.error for o in self.outcomes
        )

    @property
    def differing(self) -> tuple[str, ...]:
        """What differs, as "replica: parameter (rank)"."""
        return tuple(
            f"{o.replica}: {name}" for o in self.outcomes for name in o.differing
        )

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


# Converts a sync's protobuf messages to and from plain values.


def replica_digests(replica: str, rows: list[DigestRow]) -> pb.ReplicaDigests:
    """The digests that a replica is expected to have."""
    return pb.ReplicaDigests(
        replica=replica,
        parameters=[r[0] for r in rows],
        ranks=[r[1] for r in rows],
        values=[r[2] for r in rows],
    )


def exports_of(reply: pb.LinkReply) -> dict[str, list[dict[str, Any]]]:
    """By replica, what its ranks exported."""
    return {
        o.replica: [json.loads(text) for text in o.exports_json]
        for o in reply.outcomes
        if o.exports_json
    }


def outcome_of(o: pb.ReplicaOutcome) -> Outcome:
    """A replica's outcome as plain values."""
    return Outcome(
        o.replica,
        o.state,
        o.version,
        o.bytes,
        {part.name: part.seconds for part in o.seconds},
        o.error,
        tuple(o.differing),
        dict(o.evidence),
        dict(o.reloaded),
    )


def check_report(
    outcomes: Iterable[pb.ReplicaOutcome], version: int, seconds: float
) -> CheckReport:
    """The report of a check; `version` is the fallback if no replica replied."""
    found: dict[tuple[str, int], int] = {}
    for o in outcomes:
        keys = zip(o.found.parameters, o.found.ranks, strict=True)
        found |= dict(zip(keys, o.found.values, strict=True))
    listed = tuple(map(outcome_of, outcomes))
    return CheckReport(
        max((o.version for o in listed), default=version), listed, found, seconds
    )


# ----------------------------------------------------------------------------------------------------

ORDER_SECONDS = 60.0  # default for opening channels
ENOUGH = 0.5  # with less time left, do not wait for replies to an abandon
ABANDON_SECONDS = 8.0  # to wait for them otherwise, at most
PHASES = tuple(phase.word for phase in ORDER["direct"])
WORKER_PARTS = (
    "scatter",
    "digest",
    "repack",
    "reload",
    "pause",
    "commit",
    "prepare",
    "halt",
    "go_on",
    "verify",
    "admit",
)


def refusal(found: Sequence[NonFinite], mode: str) -> NonFiniteError:
    """The error for non-finite leaves, with what the engines hold now."""
    leaves = distinct_leaves([f.leaf for f in found])
    count = f"{leaves} {'leaf is' if leaves == 1 else 'leaves are'} not finite"
    more = f"\n  … and {len(found) - NAMED} more" if len(found) > NAMED else ""
    state = {
        "staged": "Nothing was committed: every replica serves its old version",
        "direct": "Live memory was written and nothing committed: replicas refuse to generate until a sync commits",
    }[mode]
    overflow = next((f for f in found if f.overflow), None)
    cast = ""
    if overflow:
        cast = f"; or launch with a dtype that holds {overflow.leaf} ({overflow.wire} does not)"
    return NonFiniteError(
        f"{count}:\n  " + "\n  ".join(map(str, found[:NAMED])) + f"{more}\n  {state}.",
        remedy=f'sync finite parameters, e.g. those of the step before{cast}; nonfinite="allow" sends them as they are',
        leaves={
            f.leaf: {"nan": f.nan, "inf": f.inf, "overflow": f.overflow} for f in found
        },
        mode=mode,
    )


@dataclass(eq=False)
class Transaction:
    """prepare() → send … → finish(), or abandon() from anywhere. Used by one thread."""

    stream: LinkStream
    senders: Senders
    source: Any
    terms: Terms
    transport: str
    deadline: Deadline  # of the current call: each step of a stepper has its own
    began: float
    # if set, the engine core carries out orders at once, where it can
    core: CoreOrders | None = None
    replies: list[pb.LinkReply] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    # start and stop of each part, since the sync began
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)
    state: str = "idle"
    _ended: float = 0.0
    # for the report, if computed already
    _digests: dict[tuple[str, int], int] | None = None
    # found and allowed
    nonfinite: list[NonFinite] = field(default_factory=list)
    why_full: str = ""  # why changes were not sought
    # leaf → the dimension of its layers, to name a layer
    stacked: Callable[[], Mapping[str, int]] = dict

    @property
    def digesting(self) -> bool:
        return self.terms.verify != "off"

    def _steps(self, name: str, phases: Sequence[Phase], **more: Any) -> pb.LinkReply:
        return self._order(name, lambda left: self.stream.steps(phases, left, **more))

    def _order(self, name: str, order: Callable[[float], pb.LinkReply]) -> pb.LinkReply:
        start = time.perf_counter()
        with self._noticing_the_end():
            reply = order(self.deadline.left())
        self.seconds[name] = time.perf_counter() - start
        self._span(name, start)
        return self._take(reply)

    @contextmanager
    def _noticing_the_end(self) -> Iterator[None]:
        try:
            yield
        except JvlabError as error:
            # the gateway replied, and has abandoned the sync
            if not self.stream.busy and "reply" in error.fields:
                self.state = "over"
            raise

    def _take(self, reply: pb.LinkReply) -> pb.LinkReply:
        self.replies.append(reply)
        self.state = reply.state
        return reply

    def _span(self, name: str, start: float) -> None:
        self.spans[name] = (start - self.began, time.perf_counter() - self.began)

    def prepare(self) -> None:
        """Prepare the engines to receive bytes; in direct mode they are paused from now on."""
        mode = self.terms.mode
        start = time.perf_counter()
        self.senders.settle(self.source, mode == "staged")
        if self.senders.changes is not None:
            self._span("find", start)
        terms = self._message
        if (core := self.core) is not None:
            reply = self._order(
                "prepare", lambda left: core.prepare(terms, left, self._gather)
            )
        else:
            reply = self._steps(
                "prepare", BEFORE_BYTES[mode], terms=terms, meanwhile=self._gather
            )
        self.senders.attach(exports_of(reply))

    @property
    def _message(self) -> pb.SyncTerms:
        terms = replace(self.terms, replicas=tuple(self.senders.replicas))
        if (changes := self.senders.changes) is not None:
            terms = replace(terms, base=changes.base, mark=changes.mark)
        return terms.message()

    def _gather(self) -> None:
        self.senders.gather(self.source, self.digesting)

    def send_all(self, progress: Progress, collect: bool = True) -> None:
        """Send everything, until it is in the engines' memory. Without `collect`, ipc's results are left for later."""
        left = max(self.deadline.left(), 0.1)
        version = self.terms.version
        start = time.perf_counter()
        self.sent = self.senders.send_all(
            self.source, version, left, self.digesting, progress, collect
        )
        self._span("move", start)
        if collect:
            self.check_finite()

    def check_finite(self) -> None:
        """Raise if non-finite values were found while packing, unless the terms allow them."""
        if not self.sent.flawed:
            return
        found = examine(
            self.source.by_path, self.source.naming(self.sent.flawed), self.stacked()
        )
        if self.terms.nonfinite == "refuse":
            raise refusal(found, self.terms.mode)
        self.nonfinite = found

    def expected(self, only: set[str] | None = None) -> list[pb.ReplicaDigests]:
        """The digests each replica must hold, taken from what was sent; with "sampled", of this version's sample.

        `only`: of these parameters.
        """
        rows = self.senders.rows(self.sent.digests)
        if only is not None:
            rows = [row for row in rows if row[0] in only]
        if self.terms.verify == "sampled":
            rows = [row for row in rows if in_sample(row[0], self.terms.version)]
        return [replica_digests(replica, rows) for replica in self.senders.replicas]

    @property
    def _found(self) -> dict[tuple[str, int], int]:
        """(parameter, rank) -> digest of what was sent."""
        rows = self.senders.rows(self.sent.digests)
        return {(name, rank): value for name, rank, value in rows}

    def run(self, progress: Progress) -> SyncReport:
        """Run the whole sync; the engine core carries out its orders, if it can."""
        # Not with pause="wait": while requests finish the caller may still give up with nothing written. The core
        # compares all digests or none.
        able = self.terms.verify != "sampled" and self.terms.pause != "wait"
        if self.core is not None and not (able and self.core.is_open):
            self.core = None
        if self.core is not None and self.terms.mode == "direct":
            with self._noticing_the_end():
                self._write_live(self.core, progress)
            return self.report()
        self.prepare()
        self.send_all(progress)
        return self.finish()

    def _write_live(self, core: CoreOrders, progress: Progress) -> None:
        """A direct sync, in one order."""
        # wait for JAX before the engine pauses
        self.senders.settle(self.source, staged=False)

        def claims() -> bytes:  # runs while the engine digests its memory
            self.senders.collect(self.sent)
            self.check_finite()
            self._digests = self._found
            return self.senders.claims(self.sent)

        start = time.perf_counter()
        reply = core.direct(
            self._message,
            self.deadline.left(),
            self._gather,
            lambda: self.send_all(progress, collect=not self.digesting),
            claims if self.digesting else None,
            lambda: bool(self.nonfinite),
        )
        self._ended = time.perf_counter()
        self._span("exchange", start)
        reply.outcomes[0].bytes = self.sent.bytes
        self.seconds["exchange"] = self._ended - start - self.sent.seconds["move"]
        self._take(reply)

    @property
    def _claimed(self) -> dict[str, Any]:
        """The arguments of a verify order."""
        return {
            "digests": self.expected() if self.digesting else [],
            "nonfinite": bool(self.nonfinite),
        }

    def verify(self) -> pb.LinkReply:
        """Compare digests; only commit() or abandon() may follow."""
        return self._steps("verify", [Phase.VERIFY], **self._claimed)

    def commit(self) -> pb.LinkReply:
        """Commit the new version and resume generation."""
        return self._steps(
            "commit", AFTER_VERIFY[self.terms.mode], nonfinite=bool(self.nonfinite)
        )

    def finish(self) -> SyncReport:
        """Verify and commit in one order, and make the report."""
        if (core := self.core) is not None:
            claims = self.senders.claims(self.sent) if self.digesting else b""
            reply = self._order(
                "finish",
                lambda left: core.swap(
                    self._message, left, claimed=claims, **self._claimed
                ),
            )
            reply.outcomes[0].bytes = self.sent.bytes
        else:
            phases = [Phase.VERIFY, *AFTER_VERIFY[self.terms.mode]]
            self._steps("finish", phases, **self._claimed)
        self._ended = time.perf_counter()
        return self.report()

    def abandon(self, error: BaseException | None = None) -> None:
        """Give up: old version (staged), or dirty until the next commit (direct, once bytes could move).

        If no time is left, no reply is awaited: the gateway sees the stream end and abandons by itself.
        A SyncError that does not yet know the state of each replica gets it; "unknown" if the gateway did not reply.
        """
        states = dict.fromkeys(self.senders.replicas, "unknown")
        self.senders.close()
        open_still = (
            self.state != "over" and self.stream.is_open and not self.stream.busy
        )
        if open_still and self.deadline.left() > ENOUGH:
            self.deadline = Deadline(self.deadline.within(ABANDON_SECONDS))
            try:
                states |= {
                    o.replica: o.state
                    for o in self._steps("abandon", [Phase.ABANDON]).outcomes
                }
            except JvlabError as failed:
                known = failed.fields.get("outcomes")
                states |= known if isinstance(known, dict) else {}
                self.stream.close()
        else:
            self.stream.close()
        self.state = "over"
        if isinstance(error, SyncError):
            error.fields.setdefault("outcomes", states)

    def report(self) -> SyncReport:
        """The report, after a commit."""
        merged: dict[str, Outcome] = {}
        for reply in self.replies:
            for o in map(outcome_of, reply.outcomes):
                before = merged.get(o.replica, o)
                merged[o.replica] = replace(
                    o,
                    seconds={**before.seconds, **o.seconds},
                    evidence=o.evidence or before.evidence,
                    reloaded=o.reloaded or before.reloaded,
                )
        outcomes = tuple(merged.values())

        def slowest(*parts: str) -> float:
            sums = (sum(o.seconds.get(p, 0.0) for p in parts) for o in outcomes)
            return max(sums, default=0.0)

        sent = self.sent
        seconds = {name: sent.seconds[name] for name in ("pack", "move")}
        if "find" in self.spans:
            start, stop = self.spans["find"]
            seconds["find"] = stop - start
        seconds |= {part: s for part in WORKER_PARTS if (s := slowest(part))}
        seconds["copy"] = sent.seconds["copy"]
        seconds["trainer_digest"] = sent.seconds["digest"]
        seconds["digest"] = max(seconds.get("digest", 0.0), sent.seconds["digest"])
        seconds["total"] = (self._ended or time.perf_counter()) - self.began
        phases = (*PHASES, "admit") if "exchange" in self.seconds else PHASES
        seconds["control"] = max(0.0, sum(self.seconds.values()) - slowest(*phases))
        notes = [
            f"{o.replica} stayed behind: {o.error or o.state}"
            for o in outcomes
            if o.state != "committed"
        ]
        changes = self.senders.changes
        why_full = self.why_full
        if changes is not None:
            why_full = changes.why_full(sent.sparse, sent.buckets)
        flawed = tuple(map(str, self.nonfinite))
        notes += [f"not finite, and allowed: {line}" for line in flawed]
        return SyncReport(
            version=self.terms.version,
            bytes=sent.bytes,
            seconds=seconds,
            spans=dict(sorted(self.spans.items(), key=lambda item: item[1])),
            outcomes=outcomes,
            digests=self._found if self._digests is None else self._digests,
            verify=self.terms.verify,
            mode=self.terms.mode,
            transport=self.transport,
            buckets=sent.buckets,
            notes=tuple(notes),
            nonfinite=flawed,
            delta=sent.sparse > 0,
            changed=None if changes is None else changes.share,
            full_bytes=sent.full_bytes or sent.bytes,
            why_full=why_full,
        )

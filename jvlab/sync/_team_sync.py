"""The channels of a multi-process trainer: one process leads, each sends its own shards.

    all       begin: the same arguments everywhere
    leader    acquires the pool, with all endpoints               others  open their channels
    leader    PREPARE … MOVE                                      others  wait
    all       send their buckets; the leader sums the digests of the parts
    leader    VERIFY, COMMIT, GO_ON; the report                   others  get the report

Only the leader sends the orders of a sync to the gateway; see _team.py for how the others follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, SyncError
from jvlab.layout._finite import NonFinite, merged
from jvlab.sync._channels import Channels
from jvlab.sync._pack import Source
from jvlab.sync._senders import Senders, Sent
from jvlab.sync._sync_options import SyncOptions
from jvlab.sync._sync_report import CheckReport, Outcome, SyncReport
from jvlab.sync._team import Team
from jvlab.sync._transaction import ORDER_SECONDS, Transaction

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.sync._connect import Agreement
    from jvlab.transport._channel import Sender

# The leader reports an error when its deadline passes; the others wait a little longer for its message.
SLACK = 1.0


class TeamChannels(Channels):
    """This process's channels; all processes open, sync and check together."""

    def __init__(self, pool: Pool, agreed: Agreement, wrap: Callable[[Sender], Sender] | None, team: Team) -> None:
        super().__init__(pool, agreed, wrap)
        self.team, self.processes = team, team.size

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
        team, is_open = self.team, self.senders is not None
        if not team.leads:
            team.send("begin", wanted=wanted, open=is_open)
            return is_open
        for member, other in enumerate(team.gather("begin", deadline.left()), 1):
            if other["wanted"] != wanted:
                differing = [k for k in wanted if other["wanted"].get(k) != wanted[k]]
                raise ConfigError(
                    f"trainer processes {team.processes[member]} and {team.process} ask for different things: "
                    + ", ".join(f"{k}={other['wanted'].get(k)!r} and {wanted[k]!r}" for k in differing),
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
                name: [json.dumps(list(of_rank)) for of_rank in zip(*(e[name] for e in endpoints), strict=True)]
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
            self.version = int(team.receive("opened", deadline.left() + SLACK)["version"])
        return senders

    # One sync or check --------------------------------------------------------------------------------------------

    def begin(self, params: Any, version: int | None, options: SyncOptions, deadline: Deadline) -> Transaction:
        """A transaction of all processes, ready for `prepare()`."""
        began = time.perf_counter()
        self.next_version(version)
        wanted = {**asdict(options), "timeout": deadline.seconds, "version": version}  # None: the next version
        is_open = self._agree(wanted, deadline)
        source = Source.of(self.plan, params)  # raises on a mismatch, before anything is opened
        senders = self._open_together(deadline, is_open)
        terms = options.terms(self.next_version(version), deadline.seconds)  # opening may have revealed a newer version
        kind = Leading if self.team.leads else Following
        return kind(self.team, self.stream, senders, source, terms, self.transport, deadline, began)

    def verify(self, params: Any, deadline: Deadline) -> CheckReport:
        """Compare digests of live memory with the last commit, or with the parameters of all processes."""
        team = self.team
        with self.together("verify"):
            is_open = self._agree({"params": params is not None, "timeout": deadline.seconds}, deadline)
            senders, sum_of_parts = self._open_together(deadline, is_open), Sent()
            if params is not None:
                sum_of_parts.add_digests(senders.digests(senders.source(params)))
            if not team.leads:
                team.send("digests", digests=list(sum_of_parts.digests.items()))
                return _check_from_plain(team.receive("checked", deadline.left() + SLACK)["report"])
            for other in team.gather("digests", deadline.left()):
                sum_of_parts.add_digests({int(target): int(value) for target, value in other["digests"]})
            with team.watching(self.stream.close):
                report = self.check(self.expected(senders, sum_of_parts.digests), deadline)
            team.send("checked", report={**asdict(report), "digests": _digests_to_plain(report.digests)})
            return report


def _endpoints(senders: Senders) -> dict[str, list[dict[str, Any]]]:
    """By replica, this process's endpoint for each rank."""
    return {name: [channel.sender.endpoint() for channel in of] for name, of in senders.replicas.items()}


# Transactions ---------------------------------------------------------------------------------------------------------


class Shared(Transaction):
    """One process's part of a transaction."""

    def __init__(self, team: Team, *of_transaction: Any) -> None:
        super().__init__(*of_transaction)
        self._team = team

    def send_all(self, progress: Callable[[Sent], None], collect: bool = True) -> None:
        with self._team.watching(self.senders.close):
            super().send_all(progress, collect)  # non-finite values in one process fail all of them

    @property
    def _seconds_left(self) -> float:
        return self.deadline.left() + SLACK


class Leading(Shared):
    """The leader's part: sends the orders."""

    def prepare(self) -> None:
        with self._team.watching(self.stream.close):
            super().prepare()
        self._team.send("move")

    def send_all(self, progress: Callable[[Sent], None], collect: bool = True) -> None:
        super().send_all(progress, collect)
        for other in self._team.gather("sent", self.deadline.left()):
            _add(self.sent, other)
            self.nonfinite = merged([*self.nonfinite, *(NonFinite(**found) for found in other["nonfinite"])])

    def finish(self) -> SyncReport:
        report = super().finish()
        self._team.send("committed", report=_report_to_plain(report))
        return report


class Following(Shared):
    """Another process's part: sends its shards."""

    def prepare(self) -> None:
        self._team.receive("move", self._seconds_left)

    def send_all(self, progress: Callable[[Sent], None], collect: bool = True) -> None:
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
        return _report_from_plain(self._team.receive("committed", self._seconds_left)["report"])

    def abandon(self, error: BaseException | None = None) -> None:
        """Close the channels; the leader abandons the sync and knows each replica's state."""
        if isinstance(error, SyncError):
            error.fields.setdefault("outcomes", dict.fromkeys(self.senders.replicas, "unknown"))
        self.senders.close()
        self.state = "over"


def _add(sent: Sent, other: Mapping[str, Any]) -> None:
    """Add another process's part: bytes and digests are summed, times are the slowest's."""
    sent.bytes += other["bytes"]
    sent.buckets += other["buckets"]
    sent.seconds = {name: max(s, other["seconds"].get(name, 0.0)) for name, s in sent.seconds.items()}
    sent.add_digests({int(target): int(value) for target, value in other["digests"]})


# Reports --------------------------------------------------------------------------------------------------------------


def _digests_to_plain(digests: Mapping[tuple[str, int], int]) -> list[list[Any]]:
    return [[name, rank, value] for (name, rank), value in digests.items()]


def _shared_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both reports share, from JSON."""
    outcomes = [Outcome(**{**o, "differing": tuple(o["differing"])}) for o in plain["outcomes"]]
    digests = {(name, int(rank)): int(value) for name, rank, value in plain["digests"]}
    return {"outcomes": tuple(outcomes), "digests": digests, "notes": tuple(plain["notes"])}


def _report_to_plain(report: SyncReport) -> dict[str, Any]:
    return {**asdict(report), "digests": _digests_to_plain(report.digests)}


def _report_from_plain(plain: Mapping[str, Any]) -> SyncReport:
    spans = {name: tuple(times) for name, times in plain["spans"].items()}
    return SyncReport(**{**plain, **_shared_fields(plain), "nonfinite": tuple(plain["nonfinite"]), "spans": spans})


def _check_from_plain(plain: Mapping[str, Any]) -> CheckReport:
    return CheckReport(**{**plain, **_shared_fields(plain)})

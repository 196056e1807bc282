"""What a `Link` does when its trainer has several processes: one leads, each sends the shards it holds.

    all       begin: the same arguments everywhere
    leader    takes the pool, with everybody's endpoints          others  open their channels
    leader    PREPARE … MOVE                                      others  wait
    all       send their buckets; digests of parts are added up by the leader
    leader    VERIFY, COMMIT, GO_ON; the report                   others  get the report

Only the leader speaks with the gateway about the sync; see _team.py for how the others hear of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, SyncError
from jvlab._sync_report import CheckReport, Outcome, SyncReport
from jvlab._team import Team
from jvlab._transaction import ORDER_SECONDS, Terms, Transaction
from jvlab.control import jvlab_pb2 as pb
from jvlab.layout._tree import flatten
from jvlab.trainer._outlet import Outlet, Sent
from jvlab.trainer._pack import Source

if TYPE_CHECKING:
    from jvlab._link import Link

SLACK = 30.0  # seconds that the leader's answer may come after the work it follows


def open_first(link: Link, team: Team) -> None:
    """The first opening, right after connect."""
    with team.round("open"):
        _begin(link, team, {"mode": link.mode}, ORDER_SECONDS)
        open_together(link, team, ORDER_SECONDS)


def _begin(link: Link, team: Team, wanted: Mapping[str, Any], seconds: float) -> bool:
    """Everybody is there and asked for the same; leader: whether all have their channels open."""
    if link._closed:
        raise SyncError("this link is closed", remedy="link = lab.connect(params, pool), in every process")
    is_open = link._outlet is not None
    if not team.leads:
        team.say("begin", wanted=wanted, open=is_open)
        return is_open
    for member, other in enumerate(team.gather("begin", seconds), 1):
        if other["wanted"] != wanted:
            differing = [k for k in wanted if other["wanted"].get(k) != wanted[k]]
            raise ConfigError(
                f"trainer processes {team.processes[member]} and {team.process} ask for different things: "
                + ", ".join(f"{k}={other['wanted'].get(k)!r} and {wanted[k]!r}" for k in differing),
                remedy="call it with the same arguments in every process",
            )
        is_open = is_open and other["open"]
    return is_open


def open_together(link: Link, team: Team, seconds: float, is_open: bool = False) -> Outlet:
    """Channels from every process to every rank of every replica that is ready now."""
    if not team.leads:
        return _open_mine(link, team, seconds)
    now = link._wanted_now(None)
    if is_open and link._is_open(now):
        team.say("open", replicas=None, version=link.version)
        return _host_outlet(link)
    link._drop()
    for name, (_, epoch) in now.items():
        link._agreed.check_replica(link.pool, name, epoch)
    team.say("open", replicas={name: place for name, (place, _) in now.items()}, version=link.version)
    with Guard(link, team, {name: place for name, (place, _) in now.items()}) as outlet:
        others = team.gather("endpoints", seconds)
        endpoints = [_endpoints(outlet), *(other["endpoints"] for other in others)]
        ranks = {name: [json.dumps(list(of_rank)) for of_rank in zip(*(e[name] for e in endpoints), strict=True)]
                 for name in now}  # fmt: skip
        with team.watching(lambda: (outlet.close(), link._stream.close())):
            link._take_pool(outlet, now, ranks, seconds)
        link._outlet, link._opened = outlet, {name: epoch for name, (_, epoch) in now.items()}
        team.say("opened", version=link.version)
    return outlet


def _open_mine(link: Link, team: Team, seconds: float) -> Outlet:
    told = team.hear("open", seconds + SLACK)
    link.version = int(told["version"])
    if told["replicas"] is None:
        return _host_outlet(link)
    link._drop()
    with Guard(link, team, told["replicas"]) as outlet:
        team.say("endpoints", endpoints=_endpoints(outlet))
        with team.watching(outlet.close):
            outlet.ready(seconds + SLACK)
        link.version = int(team.hear("opened", seconds + SLACK)["version"])
        link._outlet = outlet
    return outlet


class Guard:
    """A new outlet that is closed again if it can't be opened."""

    def __init__(self, link: Link, team: Team, replicas: dict[str, int]) -> None:
        self._link, self._replicas, self._process = link, replicas, team.process

    def __enter__(self) -> Outlet:
        made = self._link._make_outlet(self._replicas, self._process)
        assert isinstance(made, Outlet)  # a team is never given ipc
        self._outlet = made
        return made

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._outlet.close()
            self._link._stream.close()


def _host_outlet(link: Link) -> Outlet:
    assert isinstance(link._outlet, Outlet)
    return link._outlet


def _endpoints(outlet: Outlet) -> dict[str, list[dict[str, Any]]]:
    """By replica, this process's endpoint for each rank."""
    return {name: [channel.sender.endpoint() for channel in of] for name, of in outlet.replicas.items()}


# A sync ---------------------------------------------------------------------------------------------------------------


def begin(link: Link, team: Team, params: Any, terms: Terms, version: int | None, began: float) -> Transaction:
    """All processes together up to the point where a single one would prepare."""
    wanted = {**asdict(terms), "version": version}  # the version that was asked for: None counts on by one
    is_open = _begin(link, team, wanted, terms.timeout)
    source = Source(link.plan, flatten(params).arrays)
    outlet = open_together(link, team, min(terms.timeout, ORDER_SECONDS), is_open)
    kind = Leading if team.leads else Following
    return kind(link, team, outlet, source, terms, began)


class Shared(Transaction):
    """One process's part of a transaction."""

    def __init__(self, link: Link, team: Team, outlet: Outlet, source: Source, terms: Terms, began: float) -> None:
        super().__init__(link._stream, outlet, source, terms, link.transport, began)
        self._team = team

    def send_all(self, progress: Callable[[Sent], None]) -> None:
        with self._team.watching(self.outlet.close):
            super().send_all(progress)

    @property
    def _patience(self) -> float:
        return max(ORDER_SECONDS, self.terms.timeout) + SLACK


class Leading(Shared):
    """The one that gives the orders."""

    def prepare(self) -> None:
        with self._team.watching(self.stream.close):
            super().prepare()
        self._team.say("move")

    def send_all(self, progress: Callable[[Sent], None]) -> None:
        super().send_all(progress)
        for other in self._team.gather("sent", self.terms.timeout):
            _add(self.sent, other)

    def finish(self) -> SyncReport:
        report = super().finish()
        self._team.say("committed", report=_report_to_plain(report))
        return report


class Following(Shared):
    """One that sends its shards."""

    def prepare(self) -> None:
        self._team.hear("move", self._patience)

    def send_all(self, progress: Callable[[Sent], None]) -> None:
        super().send_all(progress)
        sent = self.sent
        digests = [[target, value] for target, value in sent.digests.items()]
        self._team.say("sent", bytes=sent.bytes, buckets=sent.buckets, seconds=sent.seconds, digests=digests)

    def finish(self) -> SyncReport:
        return _report_from_plain(self._team.hear("committed", self._patience)["report"])

    def abandon(self) -> None:
        self.outlet.close()
        self.state = "over"


def _add(sent: Sent, other: Mapping[str, Any]) -> None:
    """Another process's part: bytes and digests add up, the slowest counts."""
    sent.bytes += other["bytes"]
    sent.buckets += other["buckets"]
    sent.seconds = {name: max(s, other["seconds"].get(name, 0.0)) for name, s in sent.seconds.items()}
    sent.add_digests({int(target): int(value) for target, value in other["digests"]})


# A check --------------------------------------------------------------------------------------------------------------


def verify(link: Link, team: Team, params: Any, timeout: float) -> CheckReport:
    """Digests of live memory against the last commit, or against what all processes hold together."""
    with team.round("verify"):
        is_open = _begin(link, team, {"params": params is not None, "timeout": timeout}, timeout)
        parts = Sent()
        outlet = open_together(link, team, min(timeout, ORDER_SECONDS), is_open)
        if params is not None:
            parts = link._parts(outlet, params)
        if not team.leads:
            team.say("digests", digests=[[target, value] for target, value in parts.digests.items()])
            return _check_from_plain(team.hear("checked", timeout + SLACK)["report"])
        for other in team.gather("digests", timeout):
            parts.add_digests({int(target): int(value) for target, value in other["digests"]})
        with team.watching(link._stream.close):
            digests: list[pb.ReplicaDigests] = [] if params is None else link._expected(outlet, parts)
            report = link._check(digests, timeout)
        team.say("checked", report={**asdict(report), "digests": _digests_to_plain(report.digests)})
        return report


# Reports --------------------------------------------------------------------------------------------------------------


def _digests_to_plain(digests: Mapping[tuple[str, int], int]) -> list[list[Any]]:
    return [[name, rank, value] for (name, rank), value in digests.items()]


def _shared_fields(told: Mapping[str, Any]) -> dict[str, Any]:
    """What both reports have in common, out of JSON."""
    outcomes = [Outcome(**{**o, "differing": tuple(o["differing"])}) for o in told["outcomes"]]
    digests = {(name, int(rank)): int(value) for name, rank, value in told["digests"]}
    return {"outcomes": tuple(outcomes), "digests": digests, "notes": tuple(told["notes"])}


def _report_to_plain(report: SyncReport) -> dict[str, Any]:
    return {**asdict(report), "digests": _digests_to_plain(report.digests)}


def _report_from_plain(told: Mapping[str, Any]) -> SyncReport:
    return SyncReport(**{**told, **_shared_fields(told)})


def _check_from_plain(told: Mapping[str, Any]) -> CheckReport:
    return CheckReport(**{**told, **_shared_fields(told)})

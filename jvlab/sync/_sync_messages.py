"""Converts a sync's protobuf messages to and from plain values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jvlab.sync._sync_report import CheckReport, Outcome
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._sync_words import Terms

DigestRow = tuple[str, int, int]  # parameter, rank, digest


def terms_message(terms: Terms, replicas: Iterable[str]) -> pb.SyncTerms:
    """The message for these terms and replicas."""
    return pb.SyncTerms(**replace(terms, replicas=tuple(replicas)).fields())


def replica_digests(replica: str, rows: list[DigestRow]) -> pb.ReplicaDigests:
    """The digests that a replica is expected to have."""
    return pb.ReplicaDigests(
        replica=replica, parameters=[r[0] for r in rows], ranks=[r[1] for r in rows], values=[r[2] for r in rows]
    )


def exports_of(reply: pb.LinkReply) -> dict[str, list[dict[str, Any]]]:
    """By replica, what its ranks exported."""
    return {o.replica: [json.loads(text) for text in o.exports_json] for o in reply.outcomes if o.exports_json}


def outcome_of(o: pb.ReplicaOutcome) -> Outcome:
    """A replica's outcome as plain values."""
    seconds = {part.name: part.seconds for part in o.seconds}
    evidence = {how: int(count) for how, count in o.evidence.items()}
    differing, reloaded = tuple(o.differing), dict(o.reloaded)
    return Outcome(o.replica, o.state, int(o.version), int(o.bytes), seconds, o.error, differing, evidence, reloaded)


def check_report(outcomes: Iterable[pb.ReplicaOutcome], version: int, seconds: float) -> CheckReport:
    """The report of a check; `version` is the fallback if no replica replied."""
    found: dict[tuple[str, int], int] = {}
    for o in outcomes:
        found |= dict(zip(zip(o.found.parameters, o.found.ranks, strict=True), o.found.values, strict=True))
    listed = tuple(map(outcome_of, outcomes))
    return CheckReport(max((o.version for o in listed), default=version), listed, found, seconds)

"""Bring new and returning replicas to the version that the others hold, after comparing digests."""

from __future__ import annotations

import time
from typing import Any

from jvlab._deadline import Deadline
from jvlab._errors import SyncDeadline, SyncError, VerifyError
from jvlab._progress import Progress
from jvlab.sync._channels import Channels
from jvlab.sync._sync_options import SyncOptions
from jvlab.sync._sync_report import SyncReport
from jvlab.sync._transaction import Transaction
from jvlab.wire import jvlab_pb2 as pb


def behind(snapshot: pb.PoolStatus) -> frozenset[str]:
    """Ready replicas that hold an older version than the pool."""
    return frozenset(r.replica for r in snapshot.replicas if r.state == pb.READY and r.version < snapshot.version)


def catch_up(channels: Channels, params: Any, mode: str, deadline: Deadline) -> SyncReport | None:
    """See `Link.catch_up`."""
    snapshot = _current(channels, deadline)
    late, version = behind(snapshot), int(snapshot.version)
    if not late:
        return None
    began = time.perf_counter()
    _same_as_committed(channels, params, late, version, deadline)
    # non-finite values were allowed when this version was committed, and these are the same bits
    terms = SyncOptions(mode, nonfinite="allow").terms(version, deadline.seconds)
    senders = channels.ensure_open(deadline, late)
    source = senders.source(params)
    transaction = Transaction(channels.stream, senders, source, terms, channels.transport, deadline, began)
    try:
        with Progress(senders.total_bytes, f"catch up to {version}", unit="B", show=None, after=1.0) as bar:
            return transaction.run(lambda sent: bar.to(sent.bytes))
    except BaseException as error:  # KeyboardInterrupt included: no engine may be left waiting
        transaction.abandon(error)
        raise
    finally:
        channels.drop()  # the next order opens channels to all replicas again


def _current(channels: Channels, deadline: Deadline) -> pb.PoolStatus:
    """The pool's status, no older than this link's last commit: with ipc the gateway learns of it a heartbeat later."""
    pool = channels.pool
    while True:
        pool.status(timeout=deadline)
        snapshot = pool._snapshot
        if snapshot.version >= channels.version:
            return snapshot
        if deadline.over:
            raise SyncDeadline(
                f"the gateway has {pool.name} at version {snapshot.version}; this link committed {channels.version}",
                remedy="pool.status() shows which replica is silent; link.sync(params) gives all of them a new version",
            )
        time.sleep(0.1)


def _same_as_committed(channels: Channels, params: Any, late: frozenset[str], version: int, deadline: Deadline) -> None:
    """Check `params` against the digests of the replicas that hold `version`: one version, one set of weights."""
    senders = channels.ensure_open(deadline)
    digests = channels.expected(senders, senders.digests(senders.source(params)))
    wanted = [of for of in digests if of.replica not in late]
    if not wanted:
        raise SyncError(
            f"no replica of {channels.pool.name} holds version {version}: these parameters can't be checked against it",
            remedy="link.sync(params) gives all of them a new version",
        )
    report = channels.check(wanted, deadline)
    if not report.ok:
        names = ", ".join(report.differing[:3])
        raise VerifyError(
            f"these parameters are not those of version {version}: {len(report.differing)} differ ({names}, ...)",
            remedy="pass the parameters of the last sync, or link.sync(params) to make a new version",
            differing=report.differing,
        )

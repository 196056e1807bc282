"""Newcomers and returned replicas brought to the version that the others hold, proven to be that one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, SyncError, VerifyError
from jvlab._transaction import ORDER_SECONDS, Terms, Transaction
from jvlab.control import jvlab_pb2 as pb
from jvlab.layout._tree import flatten
from jvlab.trainer._pack import Source
from jvlab.views._progress import Progress

if TYPE_CHECKING:
    from jvlab._link import Link
    from jvlab._sync_report import SyncReport


def behind(snapshot: pb.PoolStatus) -> frozenset[str]:
    """Replicas that are ready and hold an older version than the pool."""
    return frozenset(r.replica for r in snapshot.replicas if r.state == pb.READY and r.version < snapshot.version)


def catch_up(link: Link, params: Any, timeout: float) -> SyncReport | None:
    """See `Link.catch_up`."""
    if link._stepper is not None:
        raise SyncError("a stepper is open on this link", remedy="finish it, or stepper.abort()")
    if not timeout > 0:
        raise ConfigError(f"timeout must be positive, not {timeout!r}")
    snapshot = _heard(link)
    late, version = behind(snapshot), int(snapshot.version)
    if not late:
        return None
    began = time.perf_counter()
    _same_as_committed(link, params, late, version, timeout)
    terms = Terms(version, link.mode, "full", "all", "keep", "keep", float(timeout))
    outlet = link._ensure_open(min(timeout, ORDER_SECONDS), late)
    source: Any = Source(link.plan, flatten(params).arrays) if link.transport != "ipc" else link._shards(outlet, params)
    transaction = Transaction(link._stream, outlet, source, terms, link.transport, began)
    try:
        with Progress(outlet.total_bytes, f"catch up to {version}", unit="B", show=None, after=1.0) as bar:
            transaction.prepare()
            transaction.send_all(lambda sent: bar.to(sent.bytes))
            return transaction.finish()
    except BaseException:  # Ctrl-C too: no engine may be left waiting
        transaction.abandon()
        raise
    finally:
        link._drop()  # the next order opens it on all of them


def _heard(link: Link) -> pb.PoolStatus:
    """Who is there now and holds what; by ipc a commit goes past the gateway, which hears of it a beat later."""
    deadline = time.monotonic() + ORDER_SECONDS
    while True:
        link.pool.status()
        snapshot = link.pool._snapshot
        if snapshot.version >= link.version:
            return snapshot
        if time.monotonic() > deadline:
            raise SyncError(
                f"the gateway knows {link.pool.name} at {snapshot.version}, this link brought version {link.version}",
                remedy="pool.status() shows who is silent; link.sync(params) brings all of them to a new version",
            )
        time.sleep(0.1)


def _same_as_committed(link: Link, params: Any, late: frozenset[str], version: int, timeout: float) -> None:
    """One version must not mean two sets of weights: those who hold it say whether these are the ones."""
    outlet = link._ensure_open(min(timeout, ORDER_SECONDS))
    wanted = [digests for digests in link._digests(outlet, params) if digests.replica not in late]
    if not wanted:
        raise SyncError(
            f"no replica of {link.pool.name} holds version {version}: nothing can tell whether these are its weights",
            remedy="link.sync(params) brings all of them to a new version",
        )
    report = link._check(wanted, timeout)
    if not report.ok:
        names = ", ".join(report.differing[:3])
        raise VerifyError(
            f"these parameters are not those of version {version}: {len(report.differing)} differ ({names}, ...)",
            remedy="pass the parameters of the last sync, or link.sync(params) to make a new version",
            differing=report.differing,
        )

"""`SyncCoordinator`: runs the syncs of one link, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import JvlabError, SyncDeadline, SyncError
from jvlab._progress import Progress
from jvlab._tracebacks import shorten
from jvlab.sync._catch_up import catch_up
from jvlab.sync._channels import Channels
from jvlab.sync._senders import Sent
from jvlab.sync._sync_messages import replica_digests
from jvlab.sync._sync_options import SyncOptions
from jvlab.sync._sync_report import CheckReport, SyncReport
from jvlab.sync._transaction import ORDER_SECONDS, Transaction

if TYPE_CHECKING:
    from jvlab.sync._stepper import Stepper

DIRTY_SECONDS = 1.0  # minimum time to mark a pool dirty
STATE_SECONDS = 5.0  # to ask what an interrupted sync left behind
Listener = Callable[[float], None]  # called with the bytes sent so far


class SyncCoordinator:
    """Serializes the syncs, steppers and checks over a link's channels, and keeps the report of the last sync."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._checking = channels.agreed.meaning  # by the sync in progress: a connect meanwhile makes another
        self._lock = threading.RLock()
        self.stepper: Stepper | None = None  # the open one, if any
        self.last: SyncReport | None = None

    @contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[None]:
        """One thread of this process at a time."""
        if not self._lock.acquire(timeout=min(deadline.left(), threading.TIMEOUT_MAX)):
            raise SyncDeadline(
                f"waited {deadline.seconds:g} s for another thread of this process that uses this link",
                remedy="one sync or check at a time; its own timeout ends it",
            )
        try:
            yield
        finally:
            self._lock.release()

    def begin(self, params: Any, version: int | None, options: SyncOptions, deadline: Deadline) -> Transaction:
        """A transaction, ready for `prepare()`; raises if a stepper is open."""
        self._refuse_stepper()
        self._checking = self._channels.agreed.meaning
        self._checking.before_sync(params, self._channels.pool.model)
        transaction = self._channels.begin(params, version, options, deadline)
        transaction.stacked = lambda: self._channels.agreed.mapping.stacked
        return transaction

    def _refuse_stepper(self) -> None:
        if self.stepper is not None:
            raise SyncError("a stepper is open on this link", remedy="finish it, or stepper.abort()")

    def sync(
        self,
        params: Any,
        version: int | None,
        options: Callable[[], SyncOptions],
        deadline: Deadline,
        progress: bool | None,
        listener: Listener | None = None,
    ) -> SyncReport:
        """Run a whole sync. Invalid options raise in all trainer processes."""
        channels = self._channels
        with self.exclusive(deadline), channels.together("sync"):
            chosen = options()
            channels.wake_up(chosen)
            transaction = self.begin(params, version, chosen, deadline)
            transaction.direct_orders = channels.direct_orders
            total, title = transaction.senders.total_bytes, f"sync {transaction.terms.version}"
            try:
                with Progress(total, title, unit="B", show=progress, after=1.0) as bar, channels.sharing():
                    report = transaction.run(lambda sent: _show(bar, sent, listener))
            except BaseException as error:  # KeyboardInterrupt included: no engine may be left waiting
                self.give_up(transaction, error)
                if isinstance(error, KeyboardInterrupt):
                    version = transaction.terms.version
                    self.explain(error, f"the sync of version {version}", version)
                raise
            return self.committed(report, transaction, params, deadline)

    def give_up(self, transaction: Transaction, error: BaseException | None = None) -> None:
        """Abandon it because of `error`; the next sync opens all channels again."""
        transaction.abandon(error)
        self._channels.drop()

    def explain(self, error: KeyboardInterrupt, what: str, version: int) -> None:
        """Let an interrupt of `what`, which would have committed `version`, say what the engines hold now."""
        pool = self._channels.pool
        said = f"{what} was interrupted"
        try:
            pool.status(timeout=STATE_SECONDS)
        except JvlabError:
            shorten(error, f"{said}; pool.status() says what its replicas hold")
            return
        snapshot = pool._snapshot
        if any(replica.dirty for replica in snapshot.replicas):
            said += f": {pool.name} is dirty, and generates again after the next link.sync(params)"
        elif snapshot.version >= version:
            said += f" after it was committed: {pool.name} serves version {snapshot.version}"
        else:
            said += f": {pool.name} serves version {snapshot.version}, as before"
        shorten(error, said)

    def committed(self, report: SyncReport, transaction: Transaction, params: Any, deadline: Deadline) -> SyncReport:
        """After a commit: check the mapping's meaning if that is still open, and store the report."""
        channels, check = self._channels, self._checking
        channels.version = report.version
        arrays = transaction.source.by_path
        check.committed(report.version, arrays)

        def mark_dirty() -> None:
            channels.mark_dirty(Deadline(max(DIRTY_SECONDS, deadline.within(ORDER_SECONDS))))

        try:
            if check.is_open and channels.processes > 1:
                check.give_up("the trainer's log-probabilities are spread over several processes")
            elif check.is_open:
                check.after_sync(channels.pool, report.version, params, deadline.left(), mark_dirty)
            elif channels.processes == 1:
                check.again(channels.pool, report.version, params, deadline.left(), mark_dirty)
        finally:
            self.last = report = replace(report, meaning=_meaning_of(check.text_of(report.version, arrays)))
            channels.plan._reports.append(report)
        return report

    def catch_up(self, params: Any, mode: str, deadline: Deadline) -> SyncReport | None:
        """See `Link.catch_up`."""
        with self.exclusive(deadline):
            self._refuse_stepper()
            try:
                report = catch_up(self._channels, params, mode, deadline)
            except KeyboardInterrupt as error:
                self.explain(error, "the catching up", self._channels.version + 1)
                raise
            if report is None:
                return None
            known = self.last.meaning if self.last is not None else self._channels.agreed.meaning.meaning.text
            return replace(report, meaning=_meaning_of(known))  # the bits of the last sync, compared by digest

    def verify(self, params: Any, deadline: Deadline) -> CheckReport:
        """See `Link.verify`."""
        with self.exclusive(deadline):
            return self._channels.verify(params, deadline)

    def check_sent(self, transaction: Transaction, names: set[str]) -> CheckReport:
        """A check during a sync, of the parameters that have fully arrived."""
        wanted = []
        for d in transaction.expected():
            rows = [row for row in zip(d.parameters, d.ranks, d.values, strict=True) if row[0] in names]
            wanted.append(replica_digests(d.replica, rows))
        return self._channels.check(wanted, Deadline(transaction.terms.bucket_seconds))

    def release_shadows(self, deadline: Deadline) -> None:
        """Unmap the shadow buffers of staged syncs before the engines free them."""
        with self.exclusive(deadline):
            if self._channels.senders is not None and self.stepper is None:
                self._channels.senders.release_shadows()

    def let_go(self, deadline: Deadline) -> None:
        """Close the channels between syncs; the next call opens them again. Raises if a stepper is open."""
        with self.exclusive(deadline):
            self._refuse_stepper()
            self._channels.drop()

    def close(self) -> None:
        """Abandon an open stepper, and close the channels."""
        if self.stepper is not None:
            self.stepper.close()
        self._channels.close()


def _meaning_of(text: str) -> str:
    return text.removeprefix("meaning ")


def _show(bar: Progress, sent: Sent, listener: Listener | None) -> None:
    bar.to(sent.bytes)
    if listener is not None:
        listener(float(sent.bytes))

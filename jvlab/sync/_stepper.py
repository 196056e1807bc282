"""`Stepper`: one sync, run tensor by tensor or bucket by bucket for inspection."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, ControlError, SyncError, VerifyError
from jvlab._tracebacks import brief
from jvlab.sync._senders import by_parameter
from jvlab.sync._transaction import ABANDON_SECONDS, CheckReport, Closing, SyncReport

if TYPE_CHECKING:
    from jvlab.sync._coordinator import Coordinator
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._link import Link
    from jvlab.views.panels._live import Panel
    from jvlab.wire._sync_words import Terms

UNITS = ("tensor", "bucket")
STATUS_SECONDS = 5.0  # to refresh the pool's status when a stepper ends
ABORT_WAITS = 5.0  # seconds that abort() waits for another thread's step


@dataclass(frozen=True)
class Step:
    """One completed step: some bytes, or a phase of the transaction."""

    number: int
    total: int
    name: str  # the tensor, the bucket's first tensor, "verify" or "commit"
    parameters: tuple[str, ...] = ()
    bytes: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Step({self.number}/{self.total} {self.name})"


@dataclass
class _Unit:
    name: str
    parameters: tuple[str, ...]
    work: list[tuple[Any, Any]] = field(default_factory=list)  # (channel, job)

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for _, job in self.work)


class Stepper(Closing):
    """The transaction of `link.sync`, held open. End it with `run()` (commits), `abort()` or `close()`.

    The first step prepares the engine: in direct mode it is paused from then on, in staged mode it serves its old
    version until the commit. The gateway abandons a forgotten stepper when its lease expires. `timeout` applies to
    each step, not to the time between steps.

    >>> stepper = link.stepper(policy.params)
    >>> stepper.step()
    Step(1/... ...)
    >>> stepper.run().verified                      # the rest, then verify and commit
    True
    """

    def __init__(
        self,
        link: Link,
        coordinator: Coordinator,
        params: Any,
        version: int | None,
        options: Terms,
        *,
        unit: str = "tensor",
        breakpoints: Iterable[str] = (),
        timeout: float = 3600.0,
    ) -> None:
        if unit not in UNITS:
            raise ConfigError(f"unit must be one of {UNITS}, not {unit!r}")
        self.link = link
        self._coordinator = coordinator
        self.breakpoints: list[str] = [_regex(b) for b in breakpoints]
        deadline = Deadline.of(timeout)
        with coordinator.exclusive(deadline):
            self._transaction = coordinator.begin(params, version, options, deadline)
            self._transaction.terms = replace(self._transaction.terms, stepped=True)
            coordinator.stepper = self
        self._thread = threading.get_ident()  # of the one who opened it
        # kept until the end: the first commit may check their meaning
        self._params: Any = params
        # what it sends, in order: each names its tensors and its bytes
        self.units = _units(self._transaction.senders.channels, link.plan, unit)
        self.position = 0  # how many units have been sent
        self._stop = threading.Event()
        self._stepping = threading.RLock()  # one step at a time, from any thread
        self.busy = False  # a step or a run is in progress
        # the tensor ahead at which the last run stopped; empty again after the next step
        self.stopped_at = ""
        # parameter → whether its digest was as expected, if one was compared
        self.checked: dict[str, bool] = {}
        self.state = "ready"  # ready, moving, moved, verified, committed, aborted
        self.report: SyncReport | None = None
        self.steps: list[Step] = []

    @property
    def version(self) -> int:
        """The version that will be committed."""
        return self._transaction.terms.version

    @property
    def mode(self) -> str:
        """Whether engines wait while it moves ("direct") or keep generating ("staged")."""
        return self._transaction.terms.mode

    @property
    def upcoming(self) -> str:
        """The name of the next step: its first tensor, or the one at which a run stopped."""
        if self.state in ("committed", "aborted"):
            return "nothing: it is over"
        if self.stopped_at:
            return self.stopped_at
        if self.position < len(self.units):
            return self.units[self.position].name
        return "commit" if self.state == "verified" else "verify"

    @property
    def blocks_this_thread(self) -> bool:
        """Whether the calling thread opened it and engines wait for it: none of their work ends before its next step.

        Another thread may wait: its work continues once this one has finished the sync.
        """
        halted = (
            self.state in ("moving", "moved", "verified")
            and self._transaction.terms.mode == "direct"
        )
        return halted and threading.get_ident() == self._thread

    def __len__(self) -> int:
        return len(self.units) + 2

    # Stepping -----------------------------------------------------------------------------------------------------

    @brief
    def step(self) -> Step:
        """Send the next tensor (or bucket); after the last one, verify, then commit."""
        with self._stepping:
            outer = self.busy
            self.busy = True
            try:
                return self._step()
            finally:
                self.busy = outer

    def _step(self) -> Step:
        if self.state in ("committed", "aborted"):
            raise SyncError(
                f"this stepper is over: {self.state}",
                remedy="link.stepper(params) starts another",
            )
        start = time.perf_counter()
        self._transaction.deadline = Deadline(self._transaction.terms.bucket_seconds)
        try:
            if self.state == "ready":
                self._transaction.prepare()
                self.state = "moving"
            if self.position < len(self.units):
                unit = self.units[self.position]
                size = self._send(unit)
                self.position += 1
                self.stopped_at = ""
                step = self._record_step(unit.name, unit.parameters, size, start)
                if self.position == len(self.units):
                    self.state = "moved"
            elif self.state == "moved":
                self._verify_all()
                self.state = "verified"
                step = self._record_step("verify", (), 0, start)
            else:
                self._transaction.commit()
                self.state = "committed"
                self._coordinator.stepper = None
                report = self._transaction.report()
                deadline = self._transaction.deadline
                self.report = self._coordinator.committed(
                    report, self._transaction, self._params, deadline
                )
                self._params = None
                self._refresh_status()
                step = self._record_step("commit", (), 0, start)
        # KeyboardInterrupt included: nothing is left open
        except BaseException as error:
            self._abort(self._transaction.deadline)
            if isinstance(error, KeyboardInterrupt):
                self._coordinator.explain(
                    error, f"the sync of version {self.version}", self.version
                )
            raise
        return step

    def _verify_all(self) -> None:
        """Verify before the commit, and record what was compared."""
        try:
            reply = self._transaction.verify()
        except VerifyError as error:
            failed: Any = error.fields.get("reply")
            self._record_checks(self._compared(), getattr(failed, "outcomes", ()))
            raise
        self._record_checks(self._compared(), reply.outcomes)

    def _compared(self) -> set[str]:
        t = self._transaction
        expected = t.expected() if t.digesting else ()
        return {name for digests in expected for name in digests.parameters}

    def _record_checks(self, names: Iterable[str], outcomes: Iterable[Any]) -> None:
        # "parameter (rank r)"
        wrong = {name.partition(" (")[0] for o in outcomes for name in o.differing}
        self.checked |= {name: name not in wrong for name in names}

    def _record_step(
        self, name: str, parameters: tuple[str, ...], size: int, start: float
    ) -> Step:
        seconds = time.perf_counter() - start
        number = len(self.steps) + 1
        step = Step(number, len(self), name, parameters, size, seconds)
        self.steps.append(step)
        return step

    def _send(self, unit: _Unit) -> int:
        t = self._transaction
        for channel, job in unit.work:
            digest = t.senders.send(
                job,
                channel,
                t.source,
                t.terms.version,
                t.deadline.left(),
                t.sent,
                t.digesting,
            )
            if digest is not None:
                digest()
        for channel in {id(c): c for c, _ in unit.work}.values():
            t.senders.settle_jobs(
                [job for c, job in unit.work if c is channel],
                channel,
                t.sent,
                t.deadline.left(),
            )
        t.check_finite()
        return unit.nbytes

    @brief
    def run(self, until: str | None = None) -> SyncReport | Step | None:
        """Run until a tensor ahead matches `until` or a breakpoint, `pause()` is called, or all is committed.

        Small tensors share a bucket: `stopped_at` names the one that matched. Returns the report if it committed, else
        the last step.
        """
        patterns = [_regex(until)] if until else []
        self._stop.clear()
        outer = self.busy
        self.busy = True
        try:
            self._run(patterns)
        finally:
            self.busy = outer
        return self.report or (self.steps[-1] if self.steps else None)

    def _run(self, patterns: list[str]) -> None:
        taken = 0
        while self.state not in ("committed", "aborted") and not self._stop.is_set():
            stop_here = list(patterns)
            if taken or not self._at_break:
                stop_here += self.breakpoints
            found = [n for n in self.ahead if any(re.search(p, n) for p in stop_here)]
            if found:
                self._at_break = True
                self.stopped_at = found[0] if self.position < len(self.units) else ""
                break
            self._at_break = False
            with self._stepping:
                # while waiting for the lock
                if self._stop.is_set() or self.state in ("committed", "aborted"):
                    break
                self.step()
            taken += 1

    _at_break = False  # stopped at a breakpoint, which the next run ignores

    @property
    def ahead(self) -> tuple[str, ...]:
        """The tensors that the next step sends, in whole or in part: small ones share a bucket."""
        if self.position < len(self.units):
            unit = self.units[self.position]
            return (unit.name, *unit.parameters)
        return (self.upcoming,)

    def pause(self) -> None:
        """Stop a `run` in another thread after its current step."""
        self._stop.set()

    # Inspecting ---------------------------------------------------------------------------------------------------

    @brief
    def verify(self) -> CheckReport:
        """Compare the tensors that have fully arrived with what was sent."""
        with self._stepping:
            done = {
                name for unit in self.units[: self.position] for name in unit.parameters
            }
            done -= {
                name for unit in self.units[self.position :] for name in unit.parameters
            }
            t = self._transaction
            deadline = Deadline(t.terms.bucket_seconds)
            report = self._coordinator.check(t.expected(done), deadline)
        names = {name for name, _ in report.digests} & done
        self._record_checks(names, report.outcomes)
        return report

    @brief
    def diff(self, name: str, replica: int = 0) -> list[TensorDiff]:
        """Compare what the engine holds of a tensor now with what it will hold."""
        from jvlab.sync._diff import differences

        return differences(self.link, name, self._transaction.source, replica)

    # Ending -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give up. Staged: the old version stays. Direct, after a step: dirty until a later sync commits."""
        self._abort(Deadline(ABANDON_SECONDS))

    def _abort(self, deadline: Deadline) -> None:
        """Give up within this time; replicas that do not reply by then are told later."""
        if self.state in ("committed", "aborted"):
            return
        self.pause()
        # Wait for another thread's step; one that hangs is cut off below, since giving up closes its channels.
        mine = self._stepping.acquire(timeout=ABORT_WAITS)
        try:
            if self.state in ("committed", "aborted"):
                return
            touched = self.state != "ready"
            self.state = "aborted"
            self._coordinator.stepper = self._params = None
            if touched:
                # until the engines' state is known: the panel's last rendering shows it
                self.busy = True
                self._transaction.deadline = deadline
                self._coordinator.give_up(self._transaction)
                self._refresh_status()
        finally:
            self.busy = False
            if mine:
                self._stepping.release()

    def _refresh_status(self) -> None:
        """Fetch the pool's status, so that the last rendering shows what the engines hold now."""
        with contextlib.suppress(ControlError, TimeoutError):
            self.link.pool.status(timeout=STATUS_SECONDS)

    def close(self) -> None:
        """`abort()`, unless it has ended already. Can be called twice."""
        self.abort()

    # Display ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "digests equal" if self.state == "verified" else self.state
        return f"Stepper(version {self.version}, {state}, {self.position}/{len(self.units)}, next: {self.upcoming})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def panel(self) -> Panel | None:
        """Show the live panel, whose buttons call the methods here. None where only a table can be shown."""
        return _faces.draw(self, "panel")

    def _ipython_display_(self) -> None:
        self.panel()


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}"
        ) from error
    return pattern


def _units(channels: Sequence[Any], plan: Any, unit: str) -> list[_Unit]:
    """One unit per bucket; or one per tensor, with all buckets that hold parts of it and are in no earlier unit."""
    buckets = []
    for channel in channels:
        for job in channel.jobs:
            of = by_parameter(plan, sorted(job.pack.targets(job.bucket)))
            names = tuple(dict.fromkeys(name for name, _ in of))
            buckets.append(_Unit(names[0], names, [(channel, job)]))
    if unit == "bucket":
        return buckets
    order = list(dict.fromkeys(name for b in buckets for name in b.parameters))
    units = {name: _Unit(name, (name,)) for name in order}
    for bucket in buckets:
        home = units[min(bucket.parameters, key=order.index)]
        home.work += bucket.work
        names = (*home.parameters, *bucket.parameters)
        home.parameters = tuple(dict.fromkeys(names))
    return [u for u in units.values() if u.work]

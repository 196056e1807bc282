"""`Link`: a trainer's parameters connected to a pool."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._deadline import Deadline, check_timeout
from jvlab._errors import ConfigError, DeadlineExceeded, Unsupported
from jvlab._names import model_words
from jvlab._tracebacks import brief
from jvlab._units import human_bytes
from jvlab.record._events import clock, note, sync_event
from jvlab.sync._coordinator import Coordinator, Wrap
from jvlab.sync._diff import Values, values_of
from jvlab.sync._meaning import RememberedParams
from jvlab.sync._pack import Source
from jvlab.sync._team import TeamCoordinator
from jvlab.sync._transaction import ORDER_SECONDS, CheckReport, Closing, SyncReport
from jvlab.transport._storage import FULL_EVERY, KEEP
from jvlab.wire._sync_words import Terms

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._plan import TransferPlan
    from jvlab.sync._connections import Agreement
    from jvlab.sync._mapping import Mapping
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._publish import Publisher, PublishReport
    from jvlab.sync._stepper import Stepper
    from jvlab.sync._team import Team
    from jvlab.sync.diagnose._bisect import Bisection
    from jvlab.wire._client import TeamStream


# `SyncHandle`: a sync running in the background.


class SyncHandle:
    """A sync running in the background. `result()` waits for the report, or raises the sync's error."""

    def __init__(
        self,
        sync: Callable[[Callable[[float], None]], SyncReport],
        pool: str,
        total: int,
    ) -> None:
        """`sync` is called with a function that it reports bytes sent to, out of `total`."""
        self._future: Future[SyncReport] = Future()
        self._sync = sync
        self._pool = pool
        self._bytes = 0.0
        self._total = max(1, total)
        threading.Thread(target=self._run, name="jvlab-sync", daemon=True).start()

    def _run(self) -> None:
        try:
            report = self._sync(self._take)
            self._bytes = self._total
            self._future.set_result(report)
        except BaseException as error:
            self._future.set_exception(error)

    def _take(self, done: float) -> None:
        self._bytes = done

    @property
    def progress(self) -> float:
        """Fraction of the bytes sent, 0 to 1."""
        return min(1.0, self._bytes / self._total)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> SyncReport:
        """The report, or the sync's error; without `timeout`, waits as long as the sync's own timeout."""
        seconds = check_timeout(timeout)
        try:
            return self._future.result(seconds)
        except TimeoutError:
            if self._future.done():  # the sync's own error
                raise
            raise DeadlineExceeded(
                f"waited {seconds:g} s for pool {self._pool!r}: {self.progress:.0%} of the bytes of the sync are sent",
                remedy="call result() again: the sync continues until the timeout= it was started with",
            ) from None

    def __await__(self) -> Any:
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"SyncHandle({'done' if self.done() else 'running'})"


# ----------------------------------------------------------------------------------------------------

SYNC_SECONDS = 600.0
STEP_SECONDS = 3600.0


class Link(Closing):
    """A connected tree of parameters: `link.sync(params)` makes every replica of the pool hold them, bit for bit.

    Made by `lab.connect(params, pool)`. `link.mapping` and `link.plan` show where each value goes, `link.meaning`
    whether it means the same there.

    >>> report = link.sync(policy.params)
    >>> report.verified, report.version == link.version
    (True, True)
    >>> link.verify(policy.params).ok               # digests of live memory against the trainer's bits
    True
    >>> link.diff("final_norm.scale", policy.params)[0].share_changed
    0.0
    """

    def __init__(
        self,
        pool: Pool,
        agreed: Agreement,
        mode: str,
        wrap: Wrap,
        on_close: Callable[[Link], None],
        team: Team | None = None,
        nonfinite: str = "refuse",
        deadline: Deadline | None = None,
        beside: Sequence[Link] = (),
    ) -> None:
        Terms(mode=mode, nonfinite=nonfinite).check()
        self.pool = pool
        self.mode = mode
        self.nonfinite = nonfinite
        self._on_close = on_close
        self._agreed = agreed
        self._publishers: dict[str, Publisher] = {}  # by path
        self._coordinator = (
            Coordinator(pool, agreed, wrap)
            if team is None
            else TeamCoordinator(pool, agreed, wrap, team)
        )
        for other in beside:
            self._coordinator.take_turns(other._coordinator)
        # what it was connected with, for comparisons
        self.remembered = RememberedParams()
        pool.links.add(self)
        # its inspector reads values from this link's engines
        agreed.mapping._link = weakref.ref(self)
        self._coordinator.open_first(mode, deadline or Deadline(ORDER_SECONDS))

    @property
    def version(self) -> int:
        """The newest version that the pool is known to hold."""
        return max(self._coordinator.version, int(self.pool.snapshot.version))

    @property
    def last(self) -> SyncReport | None:
        """The report of the last sync."""
        return self._coordinator.last

    @property
    def open_stepper(self) -> Stepper | None:
        """The stepper that was opened on it and has not ended; None if there is none."""
        return self._coordinator.stepper

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or the pool is gone."""
        return self._coordinator.closed

    @property
    def mapping(self) -> Mapping:
        """Which leaf lands where, and why."""
        return self._agreed.mapping

    @property
    def plan(self) -> TransferPlan:
        """The transfer plan."""
        return self._agreed.plan

    @property
    def meaning(self) -> Meaning:
        """Whether the values mean the same on both sides, how that is known, and what is ambiguous."""
        return self._agreed.meaning.meaning

    @property
    def part(self) -> str:
        """What it writes: "model", an adapter's slot included, or "draft", the model that drafts tokens."""
        return self._agreed.part

    @property
    def transport(self) -> str:
        """The transport in use; `link.reason` says why."""
        return self._agreed.transport

    @property
    def reason(self) -> str:
        """Why this transport was chosen."""
        return self._agreed.reason

    def matches(self, agreed: Agreement, mode: str, nonfinite: str) -> bool:
        """Would connecting with these arguments give the same link?"""
        given = (mode, nonfinite)
        return self._agreed is agreed and (self.mode, self.nonfinite) == given

    def stream_beside(self, purpose: str) -> TeamStream | None:
        """A stream between the processes of this trainer, for something else than syncs; None if it is one process.

        Each of them opens it. `stream.names` has one entry for each process, the leader's first.
        """
        return self._coordinator.stream_beside(purpose)

    def lend_scores(self, policy: Any) -> None:
        """While the mapping's meaning is unsettled, let the next sync score tokens with this policy."""
        self._agreed.meaning.offer_scorer(policy)

    def let_go(self, deadline: Deadline) -> None:
        """Close the channels, so that another link can hold the pool; the next call opens them again."""
        self._coordinator.let_go(deadline)

    def inject(self, faults: Wrap) -> Wrap:
        """From the next call on the channels are wrapped so, as by `faults=` of connect; returns what wrapped them."""
        before = self._coordinator.wrap
        self.let_go(Deadline(ORDER_SECONDS))
        self._coordinator.wrap = faults
        return before

    def release_shadows(self, deadline: Deadline) -> None:
        """Unmap the shadow buffers of staged syncs before the engines free them."""
        self._coordinator.release_shadows(deadline)

    # Sync ---------------------------------------------------------------------------------------------------------

    @brief
    def sync(
        self,
        params: Any,
        version: int | None = None,
        *,
        mode: str | None = None,
        verify: str = "full",
        require: str = "all",
        pause: str = "keep",
        kv: str = "keep",
        nonfinite: str | None = None,
        delta: str = "never",
        timeout: float | Deadline = SYNC_SECONDS,
        progress: bool | None = None,
    ) -> SyncReport:
        """Make every replica hold `params` as `version`, verify digests, and report how long each part took.

        version   an integer larger than the last; default: the next one
        mode      "direct": generation pauses while live memory is written; "staged": it continues while shadow
                  buffers fill, and pauses only for the swap, at twice the weight memory
        verify    "full" compares a digest of every parameter; "sampled" of one in eight, rotating; "off" of none
        require   "all": commit everywhere or nowhere; "any": replicas that fail are left behind and not served from
        pause     requests in flight: "keep" (resumed afterwards), "wait" (finished first), "abort"
        kv        resumed requests keep their KV ("keep"), or recompute it with the new weights ("recompute")
        nonfinite "refuse": NaN or Inf in the parameters, or after the cast to the engine's dtype, raises an error with
                  the leaves; "allow": they are sent, and the next sync clears the KV they produced. Default:
                  as connected
        delta     "auto": send only the values that changed since the last sync, to replicas that hold it, where that is
                  smaller; the digests are still of whole parameters, and if they differ everything is sent.
                  The trainer keeps a copy in the engine's dtypes, and so does an engine of what it holds packed.
                  "always" raises where that is impossible. `report.delta`, `.changed` and `.why_full` say what happened

        The first sync also settles what `link.meaning` left open, if it can: it raises a `MeaningError` and writes
        nothing if other values than those connected contradict the mapping; it raises one and leaves the pool dirty if
        engine and trainer compute different log-probabilities. So does a later sync, for leaves that could not be told
        apart before.

        After a failure each engine is on its old version, or dirty (refuses to generate) until a later sync commits.
        A multi-process trainer calls it in every process with the same arguments: all return, or all raise.
        """
        options = self._options(
            mode,
            nonfinite,
            verify=verify,
            require=require,
            pause=pause,
            kv=kv,
            delta=delta,
        )
        return self._sync(params, version, options, Deadline.of(timeout), progress)

    def _sync(
        self,
        params: Any,
        version: int | None,
        options: Terms,
        deadline: Deadline,
        progress: bool | None,
        listener: Callable[[float], None] | None = None,
    ) -> SyncReport:
        """A sync, noted for `lab.timeline()` too."""
        start = clock()
        report = self._coordinator.sync(
            params, version, options, deadline, progress, listener
        )
        note(self.pool.client, sync_event(report, start, clock()))
        return report

    def _options(
        self, mode: str | None = None, nonfinite: str | None = None, **others: str
    ) -> Terms:
        """The given options; mode and nonfinite default to those of connect. Checked when the sync begins."""
        return Terms(
            mode=mode or self.mode,
            nonfinite=nonfinite or self.nonfinite,
            **others,  # type: ignore[arg-type]
        )

    def require_one_process(self, what: str, instead: str) -> None:
        """Raise if the parameters are spread over several processes; `instead` is the remedy."""
        if (processes := self._coordinator.processes) > 1:
            raise Unsupported(
                f"{what} needs all parameters in one process; these are spread over {processes}",
                remedy=instead,
            )

    @brief
    def catch_up(
        self, params: Any, *, timeout: float | Deadline = SYNC_SECONDS
    ) -> SyncReport | None:
        """Bring replicas that joined or returned to the version that the others hold; None if none is behind.

        `params` must be those of the last sync, which is first checked by digest. The other replicas keep generating,
        and the version does not change.
        """
        self.require_one_process(
            "catch_up",
            "link.sync(params), in every process, gives all replicas a new version",
        )
        return self._coordinator.catch_up(params, self.mode, Deadline.of(timeout))

    def sync_async(
        self, params: Any, version: int | None = None, **options: Any
    ) -> SyncHandle:
        """`sync` in the background: returns a handle with `.progress`, `.done()`, `.result()`."""
        deadline = Deadline.of(options.pop("timeout", SYNC_SECONDS))
        chosen = self._options(**options)

        def sync(listener: Callable[[float], None]) -> SyncReport:
            return self._sync(params, version, chosen, deadline, False, listener)

        return SyncHandle(sync, self.pool.name, self.plan.total_bytes)

    @brief
    def publish(
        self,
        path: str | os.PathLike[str],
        params: Any,
        version: int | None = None,
        *,
        full: bool = False,
        full_every: int = FULL_EVERY,
        keep: int = KEEP,
        storage_options: dict[str, Any] | None = None,
        timeout: float | Deadline = SYNC_SECONDS,
    ) -> PublishReport:
        """Write `params` as the next version of a folder or bucket, for pools elsewhere that follow it.

        version   default: this link's version, if it is larger than all that are there, else the next one
        others    as for `jv.Publisher`, which needs no pool

        By this link's rules, in its engine's dtypes: a pool that follows gets what `link.sync(params)` would send it.
        The link keeps the folder open for itself until it is closed.
        """
        from jvlab.sync._publish import Export, Publisher, PublishOptions

        self.require_one_process("publish", "gather the parameters into one")
        deadline = Deadline.of(timeout)
        options = PublishOptions(
            full_every=full_every,
            keep=keep,
            nonfinite=self.nonfinite,
            storage_options=storage_options,
        )
        name = os.fspath(path)
        publisher = self._publishers.get(name)
        if publisher is None or publisher.closed:
            folder = self._agreed.folder or self.pool.model
            export = Export.of_link(self, folder)
            publisher = Publisher(path, export, timeout=deadline, **vars(options))
            self._publishers[name] = publisher
        if publisher.options != options:
            raise ConfigError(
                f"this link publishes into {name} with other options",
                remedy="give the same ones in each call; a new link takes new ones",
            )
        if version is None and self.version > publisher.version:
            version = self.version
        return publisher.publish(params, version, full=full, timeout=deadline)

    # Inspecting ---------------------------------------------------------------------------------------------------

    @brief
    def verify(
        self, params: Any = None, *, timeout: float | Deadline = SYNC_SECONDS
    ) -> CheckReport:
        """Compare digests of what the engines hold now with the last commit, or with `params`."""
        return self._coordinator.verify(params, Deadline.of(timeout))

    @brief
    def stepper(
        self,
        params: Any,
        version: int | None = None,
        *,
        unit: str = "tensor",
        breakpoints: Iterable[str] = (),
        timeout: float = STEP_SECONDS,
        **options: Any,
    ) -> Stepper:
        """The same transaction one tensor or bucket at a time; options as for `sync`, and unit="tensor"|"bucket"."""
        from jvlab.sync._stepper import Stepper

        self.require_one_process("a stepper", "link.sync(params), in every process")
        chosen = self._options(**options)
        return Stepper(
            self,
            self._coordinator,
            params,
            version,
            chosen.check(),
            unit=unit,
            breakpoints=breakpoints,
            timeout=timeout,
        )

    @brief
    def diff(self, name: str, params: Any, *, replica: int = 0) -> list[Any]:
        """Compare what the engine holds of a parameter (or of everything a leaf or a slice feeds) with `params`."""
        from jvlab.sync._diff import differences

        self.require_one_process(
            "diff", "link.verify(params), in every process, compares digests"
        )
        return differences(self, name, Source.of(self.plan, params), replica)

    def values(self, name: str, params: Any, replica: int, bins: int) -> list[Values]:
        """Histograms of both sides, for `mapping.values`."""
        return values_of(self, name, params, replica, bins)

    def meaning_of(self, mapping: Mapping, params: Any = None) -> Meaning:
        """What values say about a mapping by other rules, e.g. `link.mapping.edit(rule).mapping`; changes nothing.

        params   the trainer's arrays, or a Policy; default: those that the link was connected with, while they exist

        Raises a `MeaningError` if they contradict it, as `lab.connect` with these rules would.
        """
        remedy = (
            "link.meaning_of(mapping, policy.params), or link.mapping.panel(policy)"
        )
        arrays = self.remembered.or_given(params, remedy)
        return self._agreed.meaning.of_rules(mapping, arrays, self.pool.model)

    @brief
    def bisect(
        self,
        prompt: Any,
        policy: Any = None,
        *,
        params: Any = None,
        max_tokens: int = 16,
        seed: int = 0,
        tolerance: float = 1e-3,
        timeout: float = 600.0,
        **sampling: Any,
    ) -> Bisection:
        """Find out why engine and trainer disagree: ordered checks, each with its evidence; the first cause wins.

        prompt      a text, a list of token ids, or a `Sample` whose log-probabilities look wrong
        policy      the trainer's `jv.Policy`; default: the one that fits this link
        params      its parameters; default: `policy.params`
        tolerance   differences up to this many nats count as agreement
        sampling    the settings of your rollouts: temperature=0.7, top_p=0.9, ...

        Checks: a replica's state, a tensor that changed in memory, a stale version, a stale prefix cache, sampler
        settings, a wrong rule (`.rules` are then the corrected ones), dtype, and models that compute differently.
        Nothing in the engine is changed.

        >>> link.bisect("Once upon a time", policy).agrees
        True
        >>> found = link.bisect("Once upon a time", policy, temperature=0.5)
        >>> found.cause
        'sampler'
        >>> found.remedy
        'policy.logprobs(params, tokens, lengths, temperature=0.5) computes the same'
        """
        from jvlab.sync.diagnose._bisect import bisect

        check_timeout(timeout)
        if self.part != "model":
            raise Unsupported(
                "bisect compares log-probabilities, and an engine returns none of its draft model",
                remedy="link.verify(params) and link.diff(name, params) compare its weights",
            )
        self.require_one_process(
            "bisect", "connect from one process that holds all parameters"
        )
        return bisect(
            self,
            prompt,
            policy,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            tolerance=tolerance,
            timeout=timeout,
            **sampling,
        )

    # Closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abandon an open sync and release the pool; the engines keep their weights. Can be called twice."""
        if not self.closed:
            self._coordinator.close()
            for publisher in self._publishers.values():
                publisher.close()
            self.pool.links.discard(self)
            self._on_close(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"version {self.version}"
        size = human_bytes(self.plan.total_bytes)
        what = repr(model_words(self._agreed.folder or self.pool.model))
        if self.part != "model":
            what = f"{what}, {self.part}"
        return f"Link({what}, {size}, {self.mode} over {self.transport}, {state})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

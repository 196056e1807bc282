"""The part of `Pool` that keeps the gateway's last snapshot and waits for replicas to start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Self

from jvlab._deadline import Deadline
from jvlab._errors import (
    ControlError,
    DeadlineExceeded,
    JvlabError,
    LaunchError,
    SyncError,
)
from jvlab._names import own_name
from jvlab._progress import Progress
from jvlab._tracebacks import brief
from jvlab.lab import _prompts, _scaling
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import Client
from jvlab.wire._pool_summary import waiting_for
from jvlab.wire.processes._device_memory import is_full, who_holds

if TYPE_CHECKING:
    from jvlab.sync._link import Link

WATCH_SECONDS = 3600.0
# seconds; a gateway that takes longer is named while the wait goes on
ANSWER_WITHIN = 5.0
# of the log's last line, while a pool starts
LOG_SECONDS = 2.0
LOG_CHARACTERS = 120
LOOK_SECONDS = 0.5  # between two looks at what a call waits for
SILENT_SECONDS = 1.0  # without a result, until a bar says what is waited for
RATE_SECONDS = 2.0  # between two questions for a pool's tokens/s
STAGES = ("process", "weights", "warm-up", "ready")


class WatchedPool:
    """Part of `Pool`."""

    _one_process = False  # whether the engine runs in this process
    _why_closed = ""

    def __init__(self, client: Client, snapshot: pb.PoolStatus) -> None:
        self._client = client
        self._snapshot = snapshot
        self.name: str = snapshot.pool
        self.model: str = snapshot.model
        self._changed = threading.Condition()
        self._warned: set[str] = set()  # what `wait` has warned of
        # written for `load_adapter`; removed with the pool
        self._adapter_folders: dict[str, weakref.finalize] = {}
        # close() and the watching thread both remove; close() waits for the other
        self._removing = threading.Lock()
        self.listeners: list[Callable[[pb.PoolStatus], None]] = []
        # this process's links to the pool
        self._linked: weakref.WeakSet[Link] = weakref.WeakSet()
        self._watching = client.loop.submit(self._watch())

    async def _watch(self) -> None:
        """Keep the snapshot up to date, so that a repr needs no RPC."""
        request = pb.PoolRequest(pool=self.name)
        metadata = self._client.metadata
        open_stream = lambda: self._client.stub.Watch(
            request, timeout=WATCH_SECONDS, metadata=metadata
        )
        self._forget(await self._client.follow(open_stream, self._take))

    def _take(self, snapshot: pb.PoolStatus) -> None:
        with self._changed:
            # replies may overtake the watched stream
            if 0 < snapshot.revision < self._snapshot.revision:
                return
            self._snapshot = snapshot
            self._changed.notify_all()
        for listener in list(self.listeners):
            listener(snapshot)

    @property
    def snapshot(self) -> pb.PoolStatus:
        """What the gateway said last; no RPC."""
        return self._snapshot

    def look(self, seconds: float) -> pb.LabStatus:
        """What the gateway says now of the whole lab, within a time; for displays."""
        status = self._client.describe(seconds)
        for found in status.pools:
            if found.pool == self.name:
                self._take(found)
        return status

    def _forget(self, why: str) -> None:
        """Mark the pool as closed for this reason, and wake all waiters."""
        self._why_closed = self._why_closed or why
        closed = pb.PoolStatus()
        closed.CopyFrom(self._snapshot)
        closed.closed = True
        self._take(closed)
        with self._removing:
            for remove in list(self._adapter_folders.values()):
                remove()

    # Waiting for work ---------------------------------------------------------------------------------------------

    def _refuse_own_stepper(self, what: str) -> None:
        """Raise if this thread has the engines halted with a stepper: it would wait for itself, for ever."""
        for link in list(self._linked):
            stepper = link.open_stepper
            if stepper is not None and stepper.blocks_this_thread:
                raise SyncError(
                    f"{what} would wait for ever: {self.name} is halted by a stepper that this thread opened and has "
                    f"not finished (version {stepper.version}, next: {stepper.upcoming})",
                    remedy="finish it with stepper.run(), or give it up with stepper.abort()",
                    stepper=stepper,
                )

    @contextlib.asynccontextmanager
    async def _explained(
        self, bar: Progress, arrived: Callable[[], float]
    ) -> AsyncIterator[None]:
        """Inside, the bar says what is waited for once nothing has arrived for a while. On the client's loop.

        `arrived()`: when something arrived last, by `time.monotonic()`.
        """
        task = asyncio.create_task(self._explain(bar, arrived)) if bar.wanted else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _explain(self, bar: Progress, arrived: Callable[[], float]) -> None:
        me = own_name()
        asked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            silent = now - arrived() >= SILENT_SECONDS
            bar.waits(waiting_for(self._snapshot, me) if silent else "")
            if silent and bar.shown and now - asked >= RATE_SECONDS:
                asked = now
                await self._show_rate(bar)

    async def _show_rate(self, bar: Progress) -> None:
        """The pool's tokens/s: while no sample ends, nothing tells a rate of the call's own."""
        try:
            snapshot = await self._client.acall(
                "Status", pb.PoolRequest(pool=self.name), RATE_SECONDS
            )
        except JvlabError:  # the call itself says what is wrong
            return
        self._take(snapshot)
        rate = sum(replica.stats.tokens_per_s for replica in snapshot.replicas)
        bar.remark(f"{rate:,.0f} tokens/s" if rate else "")

    # Starting -----------------------------------------------------------------------------------------------------

    @brief
    def wait(
        self, timeout: float | Deadline = 900.0, progress: bool | None = None
    ) -> Self:
        """Wait until every replica is ready; a failed start raises with the last lines of the engine's log.

        Warns, once for each pool, of a vLLM that jvlab was not seen to work with, and names what it lacks; and of a CPU
        that cannot compute in the checkpoint's dtype.
        """
        self._wait_until(Deadline.of(timeout), progress, self._all_ready, confirm=True)
        said = (
            {r.facts.vllm_warning for r in self._snapshot.replicas}
            - self._warned
            - {""}
        )
        self._warned |= said
        for text in sorted(said):
            warnings.warn(text, stacklevel=3)  # of the caller, above `brief`
        return self

    def _wait_until(
        self,
        deadline: Deadline,
        progress: bool | None,
        done: Callable[[], Any],
        confirm: bool = False,
    ) -> None:
        """Wait for `done`, with a progress bar. `confirm`: of what the gateway says now, not when it was last heard."""
        title = _stage_text(self._snapshot)
        with Progress(
            len(STAGES), title, unit="stage", show=progress, stages=STAGES
        ) as bar:
            while not (
                done()
                and (not confirm or (self._gateway_answers(deadline, bar) and done()))
            ):
                bar.to(
                    min(
                        (_stage_number(r) for r in _scaling.staying(self._snapshot)),
                        default=0,
                    )
                )
                bar.describe(_stage_text(self._snapshot))
                if not done():
                    said = self._last_log_line() if bar.shown else ""
                    bar.remark(said or ("it imports vLLM" if bar.done == 0 else ""))
                lost = [
                    r for r in _scaling.staying(self._snapshot) if r.stage == "lost"
                ]
                bar.waits(", ".join(f"{r.replica} is lost ({r.cause})" for r in lost))
                if deadline.over:
                    # raises if it is the gateway that is late
                    self._ask_gateway(deadline, 0.0)
                    raise DeadlineExceeded(
                        f"{self.name} was not ready after {deadline.seconds:g} s: waited for "
                        + _scaling.not_ready(self._snapshot),
                        remedy="wait again with a larger timeout, or look at pool.logs()",
                    )
                with self._changed:
                    self._changed.wait(deadline.within(0.5))
            bar.to(len(STAGES))
            bar.remark("")
            bar.describe(_stage_text(self._snapshot))

    def _gateway_answers(self, deadline: Deadline, bar: Progress) -> bool:
        """Fetch a fresh snapshot: the last may be of a gateway that is stopped or gone since."""
        try:
            self._ask_gateway(deadline, deadline.within(ANSWER_WITHIN))
        except DeadlineExceeded as error:
            if deadline.over:
                raise
            bar.remark(error.message)
            return False
        return True

    def _ask_gateway(self, deadline: Deadline, seconds: float) -> None:
        """Fetch a fresh snapshot; raises, naming the gateway, if it does not answer within this part of the time."""
        request = pb.PoolRequest(pool=self.name)

        async def ask() -> pb.PoolStatus:
            call = self._client.begin("Status", request, deadline=Deadline(seconds))
            waited = round(deadline.seconds - deadline.left() + seconds, 1)
            return await self._client.guard(
                call, f"waiting for pool {self.name!r}", waited
            )

        self._take(self._client.loop.run(ask()))

    def _last_log_line(self) -> str:
        """What a starting engine said last, of the first replica that is not ready; empty if nothing can be read."""
        late = next(
            (r.replica for r in self._snapshot.replicas if r.stage != "ready"), ""
        )
        if not late:
            return ""
        try:
            reply = self._client.call(
                "Logs",
                pb.LogsRequest(pool=self.name, replica=late, lines=1),
                LOG_SECONDS,
            )
        except ControlError:  # the wait itself says what is wrong
            return ""
        return reply.text.strip()[-LOG_CHARACTERS:]

    async def ready(self, timeout: float | Deadline = 900.0) -> Self:
        """`wait`, awaited."""
        return await asyncio.to_thread(self.wait, Deadline.of(timeout), False)

    def _all_ready(self) -> bool:
        """Are all replicas ready? Raises if one failed or the pool is closed."""
        snapshot = self._snapshot
        if snapshot.closed:
            raise ControlError(
                f"{self.name} is closed: {self._why_closed or 'by another holder'}",
                remedy="launch a new pool",
            )
        for replica in snapshot.replicas:
            if replica.state == pb.FAILED:
                what = "died" if replica.HasField("facts") else "did not come up"
                remedy = _prompts.launch_remedy(replica.cause, snapshot.model)
                held = ""
                if is_full(replica.cause) and not replica.elsewhere:
                    held, remedy = who_holds(remedy)
                raise LaunchError(
                    f"{replica.replica} {what}: {replica.cause}{held}\n--- last log lines ---\n{replica.log_tail}",
                    remedy=remedy,
                    cause=replica.cause,
                    log=replica.log_tail,
                )
        return all(
            replica.state == pb.READY
            for replica in snapshot.replicas
            if replica.state not in _scaling.LEAVING
        )

    def _facts(self, timeout: float | Deadline = 900.0) -> pb.EngineFacts:
        """The engine's facts; waits for the pool if it is still starting."""
        found: list[pb.EngineFacts] = []

        def up() -> bool:
            snapshot = self._snapshot
            found[:] = [
                r.facts
                for r in snapshot.replicas
                if r.state == pb.READY and not snapshot.closed
            ]
            if not found:
                self._all_ready()  # raises if none will become ready
            return bool(found)

        if not up():
            self._wait_until(Deadline.of(timeout), None, up)
        return found[0]


def _stage_number(replica: pb.ReplicaStatus) -> int:
    return STAGES.index(replica.stage) if replica.stage in STAGES else 0


def _stage_text(snapshot: pb.PoolStatus) -> str:
    """The pool's name; with replicas in different stages, also the stage of each."""
    stages = [replica.stage for replica in _scaling.staying(snapshot)]
    if len(set(stages)) <= 1:
        return snapshot.pool
    return f"{snapshot.pool}: " + ", ".join(
        f"{r.replica} {r.stage}" for r in snapshot.replicas
    )

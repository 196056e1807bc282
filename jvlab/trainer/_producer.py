"""A thread that starts groups as the schedule allows, and hands finished ones to the trainer.

All groups that may start are generated at once, each by a task of its own: a sample's reward is computed when it has
ended, while others are still being generated.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from jvlab._errors import ConfigError, JvlabError
from jvlab.record._events import FaultEvent, PauseEvent, clock
from jvlab.record._writer import RecordWriter
from jvlab.trainer._groups import GroupMaker, SampleGroup
from jvlab.trainer._schedule import Flow, Ticket

THREADS = 64  # which mostly wait for gRPC replies and rewards
# the run fails once so many steps' worth of groups in a row were rejected
MAX_REJECTED_STEPS = 20


class Producer:
    """Starts groups and collects them. All state is in `flow`, under one lock; every change notifies waiters."""

    def __init__(
        self,
        flow: Flow[SampleGroup],
        maker: GroupMaker,
        rejection_reason: Callable[[SampleGroup], str],
    ) -> None:
        """`rejection_reason(group)`: why a group is not trained on, "" if it is."""
        self._flow = flow
        self.maker = maker
        self._rejection_reason = rejection_reason
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._paused = self._closing = False
        self._remaining: int | None = None
        self._rejected = 0  # in a row
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(
            ThreadPoolExecutor(THREADS, thread_name_prefix="jvlab-producer")
        )
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._run, name="jvlab-producer", daemon=True
        )
        self._thread.start()

    # Called by the trainer ----------------------------------------------------------------------------------------

    def take(
        self, leave: Callable[[], bool]
    ) -> tuple[list[SampleGroup], list[SampleGroup]] | None:
        """Waits for the groups of the next step; returns them and those that were too stale. None once `leave()`."""
        stale: list[SampleGroup] = []
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if leave():
                    return None
                stale += self._flow.remove_stale()
                groups = self._flow.take()
                if groups is not None and self._remaining is not None:
                    self._remaining -= len(groups)
                self._wake_thread()
                if groups is not None:
                    return groups, stale
                self._changed.wait(1.0)

    def synced(self, version: int) -> None:
        """The engines hold `version` now."""
        self._change(lambda: self._flow.synced(version))

    def limit(self, max_staleness: int) -> None:
        """Change the staleness bound."""
        self._change(lambda: self._flow.limit(max_staleness))

    def set_remaining(self, groups: int) -> None:
        """The rest of the run takes at most this many groups."""
        self._change(lambda: setattr(self, "_remaining", groups))

    def pause(self, paused: bool) -> None:
        """Start no new groups (True), or resume (False)."""
        self._change(lambda: setattr(self, "_paused", paused))

    def snapshot(self) -> dict[str, Any]:
        """Position and counts of groups, for a status and for a checkpoint."""
        with self._changed:
            flow = self._flow
            return {
                "position": flow.position,
                "pending": flow.pending,
                "flying": len(flow.flying),
                "ready": len(flow.ready),
                "dropped": flow.dropped,
                "regenerated": flow.regenerated,
                "lost": flow.lost,
            }

    def wake(self) -> None:
        """Make waiters check their conditions again."""
        self._change(lambda: None)

    def _change(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            self._wake_thread()

    def _wake_thread(self) -> None:
        if not self._closing:
            self._loop.call_soon_threadsafe(self._wake.set)

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._produce())
        except BaseException as error:
            self._fail(error)

    async def _produce(self) -> None:
        while not self._closing:
            self._wake.clear()
            while (ticket := self._next()) is not None:
                task = self._loop.create_task(self._one(ticket))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await self._wake.wait()  # no deadline: `close` wakes it
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _next(self) -> Ticket | None:
        with self._changed:
            if self._paused or self._closing or self._failure is not None:
                return None
            return self._flow.start(self._remaining)

    async def _one(self, ticket: Ticket) -> None:
        try:
            group = await self.maker.make(ticket)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
            return
        with self._changed:
            reason = self._rejection_reason(group)
            if reason:
                self._flow.reject(ticket.index)
                self._rejected += 1
            else:
                self._flow.finish(group)
                self._rejected = 0
            most = MAX_REJECTED_STEPS * self._flow.schedule.groups_per_step
            if self._rejected > most:
                self._failure = ConfigError(
                    f"{self._rejected} groups in a row were rejected: {reason}",
                    remedy="look at run.record.events('fault') and the task's reward function",
                )
            self._changed.notify_all()
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Abort groups in flight and end the thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._loop.call_soon_threadsafe(self._wake.set)
        # before the join: ends reward calls that threads of the event loop wait for
        self.maker.close()
        self._thread.join(30)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


class PoolSleep:
    """Lends the trainer the memory of a pool on its own device: asleep while a step trains, awake for the sync.

    The pool's weights are dropped, not kept: the sync after the step brings new ones. `wake("weights")` before it and
    `wake("kv_cache")` after it do nothing if the pool is awake.
    """

    def __init__(self, pool: Any, producer: Producer, writer: RecordWriter) -> None:
        self._pool = pool
        self._producer = producer
        self._writer = writer
        self._since: float | None = None

    def begin(self, before: Sequence[Future[Any]]) -> None:
        """Put the pool to sleep once these have ended; not if it generates, as with a staleness bound above 0."""
        # so that a bound which is raised just now starts no group in a sleeping pool
        self._producer.pause(True)
        if self._producer.snapshot()["flying"]:
            self._producer.pause(False)
            return
        wait(before)  # no deadline: `Pool.score` has one
        self._since = clock()
        self._pool.sleep(level=2)

    def wake(self, tag: str) -> None:
        """Wake a part of it; "kv_cache" is the last, after which groups may start."""
        if self._since is None:
            return
        self._pool.wake(tags=[tag])
        if tag == "kv_cache":
            why = "the trainer used its memory"
            self._writer.write(
                PauseEvent(start=self._since, stop=clock(), mode="sleep", why=why)
            )
            self._since = None
            self._producer.pause(False)

    def close(self) -> None:
        """Leave no pool asleep behind a run that failed; without weights its engines refuse until the next sync."""
        if self._since is None:
            return
        self._since = None
        try:
            self._pool.wake()
        except JvlabError as error:
            self._writer.write(
                FaultEvent(
                    actor="trainer", fault="wake failed", who="pool", text=error.message
                )
            )

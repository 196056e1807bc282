"""Spreads one call over replicas: a window of work in flight, and one retry elsewhere of what a lost replica left.

Work is a list of items, each with parts (a prompt and its samples; a sequence and its one score). An item stays whole
on one replica. The unfinished parts of a lost replica are retried once on another, then count as lost. While no replica
may take them and one that died is being started again, they wait for it.

Weight syncs. A replica that a sync has halted is given work as usual; it waits in the engine. A dirty or stale replica
is given none: while an open sync may make it serve, the work waits here, else the call fails with EngineDirty
("dirty: …" or "stale: …"). Work on a replica that becomes dirty is frozen there and goes on after the next commit,
unless its caller cancels it.

Work that misses the caller's deadline ends in DEADLINE_EXCEEDED, and the error names the replicas it waited for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jvlab._errors import EngineDirty, JvlabError
from jvlab._names import LostNote
from jvlab.gateway._routing import Board, Policy, RouteRequest, least_in_flight
from jvlab.wire._rpc_errors import CallFailed, received

if TYPE_CHECKING:
    from jvlab.gateway._pool_commands import PoolReplicas


@dataclass
class Item:
    """One unit of work, with the parts that are still unfinished."""

    index: int
    parts: set[int]
    retried: int = 0
    # replicas that it was lost on, with their `run`: one that was started again is another
    avoid: set[tuple[str, int]] = field(default_factory=set)
    dirty_retries: int = 0
    key: int = 0  # hash of the prompt's prefix


@dataclass(frozen=True)
class Done:
    """Parts that arrived, as the replica's own messages, and how often each was retried."""

    results: list[tuple[Any, int]]  # (message, retried)


@dataclass(frozen=True)
class Lost:
    """Parts that failed on two replicas, or found none."""

    index: int
    parts: tuple[int, ...]
    reason: str


DIRTY_RETRIES = 20
DIRTY_RETRY_SECONDS = 0.05
MAX_RESULTS = 256  # in one message
RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
}


class Dispatch:
    """Runs one call's items over the replicas; iterate `events()`.

    `open_call` returns None for a replica that has left.
    """

    def __init__(
        self,
        replicas: PoolReplicas,
        items: Sequence[Item],
        open_call: Callable[[str, list[Item]], Any],
        part_of: Callable[[Any], tuple[int, int]],
        results_of: Callable[[Any], Sequence[Any]],
        window: int = 0,
        policy: Policy = least_in_flight,
        seconds: float | None = None,
    ) -> None:
        self._policy = policy
        self._seconds = seconds
        self._requests: Counter[str] = Counter()  # open calls, by replica
        self._replicas = replicas
        self._open = open_call
        self._part_of = part_of
        self._results_of = results_of
        self._todo = deque(items)
        self._window = window
        self._outstanding = 0
        self._unfinished = sum(len(item.parts) for item in items)
        self._over = self._waiting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: asyncio.Queue[Done | Lost | str | JvlabError] = asyncio.Queue()
        # taken from the queue, not yet yielded
        self._next_event: Lost | str | JvlabError | None = None

    def credit(self, parts: int) -> None:
        """The caller has read this many parts; as many more may be started."""
        self._outstanding = max(0, self._outstanding - parts)
        self._start()

    async def events(self) -> AsyncIterator[Done | Lost | str]:
        """Results as they arrive; a plain string is a note for the caller. Leaving early cancels all work."""
        loop = asyncio.get_running_loop()
        timer = (
            None
            if self._seconds is None
            else loop.call_later(self._seconds, self._expire)
        )
        try:
            self._start()
            while self._unfinished > 0:
                # no deadline: `_expire` puts an error there
                event = self._next_event or await self._out.get()
                self._next_event = None
                if isinstance(event, JvlabError):
                    raise event
                if isinstance(event, Done):
                    event = self._coalesced(event)
                    self._unfinished -= len(event.results)
                elif isinstance(event, Lost):
                    self._unfinished -= len(event.parts)
                yield event
            while self._next_event is not None or not self._out.empty():
                event = self._next_event or self._out.get_nowait()
                self._next_event = None
                if isinstance(event, str):
                    yield event
        finally:
            self._over = True
            if timer is not None:
                timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _expire(self) -> None:
        self._out.put_nowait(self._replicas.deadline_error(sorted(self._requests)))

    def _coalesced(self, first: Done) -> Done:
        """Put results that are already queued into one message: messages cost more than their content."""
        results = list(first.results)
        while (
            self._next_event is None
            and not self._out.empty()
            and len(results) < MAX_RESULTS
        ):
            event = self._out.get_nowait()
            if isinstance(event, Done):
                results += event.results
            else:
                self._next_event = event
        return Done(results)

    def _start(self) -> None:
        """Send as many items as the window allows, in one request per replica."""
        if self._over:  # the caller left
            return
        ready: list[Item] = []
        while self._todo:
            size = len(self._todo[0].parts)
            if (
                self._window
                and self._outstanding
                and self._outstanding + size > self._window
            ):
                break
            item = self._todo.popleft()
            self._outstanding += size
            ready.append(item)
        batches: dict[str, list[Item]] = {}
        waiting: list[Item] = []
        board = self._replicas.board()
        for item in ready:
            avoid = self._avoided(item)
            name = self._policy(board, RouteRequest(len(item.parts), item.key, avoid))
            if name is None:
                reason = self._hopeless(item, board, avoid)
                if reason:
                    parts = tuple(sorted(item.parts))
                    self._out.put_nowait(Lost(item.index, parts, reason))
                else:
                    self._outstanding -= len(item.parts)
                    waiting.append(item)
                continue
            self._replicas.count(name, len(item.parts))
            batches.setdefault(name, []).append(item)
        self._todo.extendleft(reversed(waiting))
        for name, items in batches.items():
            self._requests[name] += 1
            task = asyncio.create_task(self._run(name, items))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, name, items))

    def _ended(self, name: str, items: list[Item], task: asyncio.Task[None]) -> None:
        """Its parts are no longer in flight. A callback, because a task cancelled early never runs."""
        self._tasks.discard(task)
        # no deadline: the task is done
        # a bug: report it instead of hanging
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"work for {name} broke off: {type(error).__name__}: {error}"
            self._out.put_nowait(CallFailed(grpc.StatusCode.INTERNAL, text))
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name]
        self._replicas.count(name, -sum(len(item.parts) for item in items))

    def _avoided(self, item: Item) -> frozenset[str]:
        """Replicas that this item was lost on, and that were not started again since."""
        run = self._replicas.run
        return frozenset(name for name, lost in item.avoid if run(name) == lost)

    def _hopeless(self, item: Item, board: Board, avoid: frozenset[str]) -> str:
        """No replica may take this item now: why it is lost. Empty: it waits, or the whole call fails."""
        # no deadline: it returns an event and does not wait
        change = self._replicas.wait_for(avoid)
        if change is not None:
            if not self._waiting:
                self._waiting = True
                self._start_after(change.wait)
            return ""
        why = None if len(board) else self._replicas.barred()
        if why is None:
            return (
                "no other replica is ready" if item.retried else "no replica is ready"
            )
        if item.retried:  # its call may have finished others: their caller gets those
            return why.message
        self._out.put_nowait(why)
        return ""

    def _start_after(self, wait: Callable[[], Awaitable[Any]]) -> None:
        async def start_again() -> None:
            # no deadline: `events` cancels it when the call's time is over
            await wait()
            self._waiting = False
            self._start()

        task = asyncio.create_task(start_again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _retry_after_dirty(self, items: list[Item]) -> bool:
        """A sync made the replica dirty while the order was in flight: by now the gateway knows, so try again."""
        if any(item.dirty_retries >= DIRTY_RETRIES for item in items):
            return False
        for item in items:
            if item.parts:
                self._outstanding -= len(item.parts)
                self._todo.append(
                    replace(
                        item,
                        parts=set(item.parts),
                        dirty_retries=item.dirty_retries + 1,
                    )
                )
        self._start_after(lambda: asyncio.sleep(DIRTY_RETRY_SECONDS))
        return True

    async def _run(self, name: str, items: list[Item]) -> None:
        """One request to one replica, until it succeeds or fails."""
        open_items = {item.index: item for item in items}
        call = None
        epoch = self._replicas.epoch(name)
        run = self._replicas.run(name)
        requeue = partial(self._requeue, name, run, items)
        try:
            call = self._open(name, items)
            if call is None:
                requeue(self._replicas.loss(name))
                return
            self._replicas.track(name, call)
            async for message in call:
                results = []
                for result in self._results_of(message):
                    index, part = self._part_of(result)
                    item = open_items[index]
                    item.parts.discard(part)
                    results.append((result, item.retried))
                self._replicas.served(name, len(results))
                self._out.put_nowait(Done(results))
            if any(item.parts for item in items):
                requeue("it ended its answer early", False)
        except asyncio.CancelledError:
            if call is None or not call.cancelled() or being_cancelled():
                raise  # our own caller left
            requeue(self._replicas.loss(name))
        except grpc.aio.AioRpcError as error:
            if received(error).kind is EngineDirty and self._retry_after_dirty(items):
                pass
            elif error.code() in RETRYABLE:
                lost = self._replicas.failed(name, epoch, error)
                requeue(lost or received(error).message, bool(lost))
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._expire()
            else:
                self._out.put_nowait(CallFailed.of(error))
        finally:
            if call is not None:
                self._replicas.untrack(name, call)
                call.cancel()

    def _requeue(
        self,
        name: str,
        run: int,
        items: list[Item],
        reason: str,
        lost_it: bool = True,
    ) -> None:
        """Retry the unfinished parts elsewhere; those that were retried before are lost."""
        again = []
        lost = []
        count = 0
        for item in items:
            if not item.parts:
                continue
            count += len(item.parts)
            self._outstanding -= len(item.parts)
            fresh = replace(
                item,
                parts=set(item.parts),
                retried=item.retried + 1,
                avoid=item.avoid | {(name, run)},
                dirty_retries=0,
            )
            (lost if fresh.retried > 1 else again).append(fresh)
        if not count:  # all results had arrived before it failed
            return
        what = "was lost" if lost_it else "failed"
        text = (
            f"replica {name} {what} ({reason}); {count} unfinished part(s) handed back"
        )
        self._out.put_nowait(LostNote(text, name) if lost_it else text)
        for item in lost:
            self._out.put_nowait(
                Lost(
                    item.index,
                    tuple(sorted(item.parts)),
                    f"lost twice; last on {name}: {reason}",
                )
            )
        self._todo.extendleft(reversed(again))
        asyncio.get_running_loop().call_soon(self._start)


def being_cancelled() -> bool:
    """Whether this task itself is being cancelled, as opposed to the call it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

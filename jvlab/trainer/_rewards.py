"""Runs reward functions in threads, processes or an event loop, with a timeout; a failure is never a number."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import itertools
import math
import multiprocessing
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab._errors import ConfigError, RewardError
from jvlab._tracebacks import own_lines, own_place
from jvlab.record._batch import NUMBERS, PartedReward, is_parted, parts_of

START_S = 60.0  # time for a worker process to import the reward function's module
# by why there is no reward; "skipped": the function itself said so, which is no fault
REMEDIES = {
    "raised": "return a number for such samples too, for instance 0.0",
    "timeout": "jv.Task(..., timeout=...) gives it longer; processes=4 runs it where it can be ended",
    "not started": 'start runs inside of `if __name__ == "__main__":`, since processes import the script',
    "died": "run it on one sample by hand: its process ended, by exit() or for lack of memory",
    "not a number": "return a finite number, or a mapping of names to finite numbers; float(...) makes one of an array",
    "skipped": "return a number for some samples; None leaves one out of training",
}
CLOSED = "the Rewarder was closed"
SAID_AFTER_S = 2.0  # a call that takes longer is mentioned beside the progress


@dataclass(frozen=True)
class RewardFailure:
    """A sample that got no reward, and why. It is excluded from training, never counted as zero."""

    index: int  # in the list that was scored
    kind: str  # one of REMEDIES
    message: str
    traceback: str = ""  # of the user's own lines; of a call that hangs, where it was


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards in the order of the samples, NaN where there is none, and the failures."""

    rewards: np.ndarray  # float64
    failures: tuple[RewardFailure, ...] = ()
    # of each reward; {} where the function returned one number
    parts: tuple[Mapping[str, float], ...] = ()

    @property
    def faults(self) -> tuple[RewardFailure, ...]:
        """The failures that are not the function's own decision to skip a sample."""
        return tuple(f for f in self.failures if f.kind != "skipped")

    @property
    def counts(self) -> dict[str, int]:
        """Failures by kind."""
        return dict(collections.Counter(f.kind for f in self.failures))


def reward_result(found: Sequence[float | RewardFailure]) -> RewardResult:
    """What each sample got, as one result."""
    numbers = [math.nan if isinstance(f, RewardFailure) else f for f in found]
    return RewardResult(
        np.array(numbers, np.float64),
        tuple(f for f in found if isinstance(f, RewardFailure)),
        tuple(parts_of(f) for f in found),
    )


def is_async(function: Any) -> bool:
    """Whether a call of this function, or object, is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


class RewardWatch:
    """Raises RewardError if a task's rewards all fail: the first `first` of them, or later `later` in a row."""

    def __init__(self, task: str, first: int, later: int) -> None:
        self._task = task
        self._first = first
        self._later = later
        self._row = 0
        self._any_good = False
        self._lock = threading.Lock()

    def add(self, found: float | RewardFailure) -> None:
        """What one sample got."""
        with self._lock:
            if not isinstance(found, RewardFailure):
                self._any_good = True
                self._row = 0
                return
            self._row += 1
            failed = self._row
            patient = self._any_good or found.kind == "skipped"
            if failed < (self._later if patient else self._first):
                return
            which = f"any of the first {failed} samples"
            if self._any_good:
                which = f"{failed} samples in a row"
        lines = f"\n{found.traceback}" if found.traceback else ""
        raise RewardError(
            f"task {self._task!r} has no reward for {which}. {found.kind}: {found.message}{lines}",
            remedy=REMEDIES[found.kind],
            kind=found.kind,
            failed=failed,
            traceback=found.traceback,
        )


@dataclass(frozen=True)
class GroupScores:
    """What a reward function that takes several samples at once returned: a number, a mapping or None for each."""

    values: Sequence[Any]
    # what it logged besides: numbers by name, and a value for each sample by name
    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def of_sample(self, index: int) -> dict[str, Any]:
        """What was logged about one sample, for its record."""
        found = {name: values[index] for name, values in self.columns.items()}
        return {"logged": found} if found else {}


class CallClock:
    """Since when calls of a user's function run."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts as a call while it is entered."""
        call = object()
        self._began[call] = time.monotonic()
        try:
            yield
        finally:
            del self._began[call]

    def waiting(self, what: str, timeout: float) -> str:
        """Says how long the oldest call runs already; "" if that is not worth mentioning."""
        seconds = time.monotonic() - min(list(self._began.values()), default=math.inf)
        if seconds < SAID_AFTER_S:
            return ""
        return f"waiting for {what} since {seconds:.0f} s (timeout {timeout:g} s)"


class Rewarder:
    """Calls `reward(sample, example) -> number` for many samples concurrently, each within `timeout` seconds.

    A function may return a mapping of names to numbers instead: their sum is the reward, and its parts are kept.
    One with `whole_groups` is called with lists of samples and examples and returns `GroupScores`; one with `may_skip`
    may return None for a sample that is to be left out.

    An async function runs on an event loop of its own, a plain one in threads, or in `processes` child processes. A
    thread that exceeds the timeout cannot be stopped, only abandoned: for code that may hang use processes, which are
    killed and replaced. Close it, or use it in a `with`, to end its threads and processes.
    """

    def __init__(
        self,
        reward: Callable[..., Any],
        timeout: float = 30.0,
        processes: int = 0,
        workers: int | None = None,
    ) -> None:
        self.clock = CallClock()
        wants_loop = is_async(reward)
        if processes and getattr(reward, "own_processes", False):
            raise ConfigError(
                f"processes={processes}, but {reward!r} runs in processes of its own",
                remedy="processes=0; the reward has an option for their number",
            )
        if wants_loop and processes:
            raise ConfigError(
                "an async reward cannot run in processes",
                remedy="make it a plain function, or processes=0",
            )
        self.timeout = timeout
        self.whole_groups = bool(getattr(reward, "whole_groups", False))
        self._may_skip = bool(getattr(reward, "may_skip", False))
        self._opened = contextlib.ExitStack()  # processes of the reward's own
        if hasattr(reward, "opened"):
            self._opened.enter_context(reward.opened())
        count = processes or workers or (32 if wants_loop else 4)
        if wants_loop:
            self._callers: list[Caller] = [OnLoop(reward)]
        else:
            make = InProcess if processes else InThread
            self._callers = [make(reward) for _ in range(count)]
        # a caller for each thread
        self._free: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        for caller in itertools.islice(itertools.cycle(self._callers), count):
            self._free.put(caller)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jvlab-reward")

    def score(
        self,
        samples: Sequence[Any],
        examples: Sequence[Any],
        told: Callable[[float | RewardFailure], None] = lambda found: None,
    ) -> RewardResult:
        """The rewards of all samples; `told` hears of each as it comes."""
        if self.whole_groups:
            # no deadline: the call has the task's timeout
            found, _ = self.start_group(samples, examples).result()
            for one in found:
                told(one)
            return reward_result(found)
        pairs = enumerate(zip(samples, examples, strict=True))
        calls = [self.start(i, sample, example) for i, (sample, example) in pairs]
        for call in as_completed(calls):  # no deadline: each has the task's timeout
            told(call.result(0))
        return reward_result([call.result(0) for call in calls])

    def start(
        self, index: int, sample: Any, example: Any = None
    ) -> Future[float | RewardFailure]:
        """Begin with the reward of one sample; `index` is what a failure will name."""
        return self._threads.submit(self._one, index, sample, example)

    def start_group(
        self, samples: Sequence[Any], examples: Sequence[Any]
    ) -> Future[tuple[list[float | RewardFailure], GroupScores]]:
        """Begin with the rewards of several samples at once, for a function with `whole_groups`."""
        return self._threads.submit(self._group, list(samples), list(examples))

    def _group(
        self, samples: list[Any], examples: list[Any]
    ) -> tuple[list[float | RewardFailure], GroupScores]:
        given = self._called(samples, examples)
        if isinstance(given, RewardFailure):
            failed = [replace(given, index=i) for i in range(len(samples))]
            return list(failed), GroupScores(())
        found = [self._judged(i, value) for i, value in enumerate(given.values)]
        return found, given

    def _one(self, index: int, sample: Any, example: Any) -> float | RewardFailure:
        given = self._called(sample, example)
        if isinstance(given, RewardFailure):
            return replace(given, index=index)
        return self._judged(index, given)

    def _called(self, sample: Any, example: Any) -> Any:
        """What the function returned, or a failure of no sample yet."""
        caller = self._free.get()  # no deadline: there is one for each thread
        try:
            with self.clock.running():
                return caller.call(sample, example, self.timeout)
        except UserCallFailed as error:
            told = error.message or f"no reward after {self.timeout:g} s"
            return RewardFailure(-1, error.kind, told, error.trace)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            return RewardFailure(-1, "raised", told, own_lines(error))
        finally:
            self._free.put(caller)

    def _judged(self, index: int, value: Any) -> float | RewardFailure:
        """The reward that the function returned, or why it is none."""
        failed = lambda kind, message: RewardFailure(index, kind, message)
        if value is None and self._may_skip:
            return failed("skipped", "the reward function returned None")
        told = f"{type(value).__name__} {str(value)[:60]!r}"
        try:
            reward = PartedReward(value) if is_parted(value) else value
            if isinstance(reward, NUMBERS):
                if math.isfinite(reward):
                    parted = isinstance(reward, PartedReward)
                    return reward if parted else float(reward)
                told = str(parts_of(reward) or reward)
        except OverflowError as error:  # a whole number beyond any float
            return failed("raised", f"OverflowError: {error}")
        return failed("not a number", f"the reward function returned {told}")

    def waiting(self) -> str:
        """Says how long the oldest call runs already; "" if that is not worth mentioning."""
        return self.clock.waiting("the reward function", self.timeout)

    def close(self) -> None:
        """End its threads and processes; calls in flight are cancelled."""
        for caller in self._callers:
            caller.close()
        # no deadline: each call has one
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._opened.close()

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class UserCallFailed(Exception):
    """A call of the user's function gave nothing. `kind` is one of REMEDIES; a timeout's message is its caller's."""

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.trace = trace


def in_daemon(call: Callable[[], Any], done: Future[Any]) -> threading.Thread:
    """A daemon thread for a call: one that never returns must not keep the interpreter alive."""

    def run() -> None:
        # whoever waits may have been told something else meanwhile
        with contextlib.suppress(InvalidStateError):
            try:
                done.set_result(call())
            # SystemExit too: otherwise the call would seem to hang
            except BaseException as error:
                done.set_exception(error)

    thread = threading.Thread(target=run, name="jvlab-reward-call", daemon=True)
    thread.start()
    return thread


class InThread:
    """A thread of its own for each call."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self._reward = reward
        self._done: Future[Any] = Future()

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        self._done = done = Future()
        thread = in_daemon(lambda: self._reward(sample, example), done)
        if not wait([done], timeout).done:
            place = own_place(sys._current_frames().get(thread.ident or 0))
            raise UserCallFailed("timeout", "", place)
        error = done.exception(0)
        if error is None or isinstance(error, UserCallFailed):
            return done.result(0)
        told = f"{type(error).__name__}: {error}"
        raise UserCallFailed("raised", told, own_lines(error))

    def close(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self._done.set_exception(UserCallFailed("died", CLOSED))


class OnLoop:
    """An async reward function on an event loop of its own, cancelled after its timeout. Takes calls at once."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self._reward = reward
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jvlab-reward-loop", daemon=True
        )
        self._thread.start()

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(
            self._reward(sample, example), self._loop
        )
        try:
            return future.result(timeout)
        except TimeoutError:
            # the function's own TimeoutError
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise UserCallFailed("timeout", "") from None

    async def _cancel_all(self) -> None:
        calls = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def close(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        # a call that blocks the loop or ignores cancellation
        with contextlib.suppress(TimeoutError):
            ending.result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


class InProcess:
    """A child process, started at the first call; killed and replaced after a timeout.

    Spawned, not forked: forking a process with JAX's threads can deadlock.
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        try:
            self._reward = pickle.dumps(reward)
        except Exception as error:
            raise ConfigError(
                f"this reward function cannot be sent to a process: {error}",
                remedy="define it with `def` in a module that can be imported, or use processes=0",
            ) from error
        self._child: Any = None
        self._pipe: Any = None
        self._closed = False
        self._lock = threading.Lock()

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        if self._child is None or not self._child.is_alive():
            self._start()
        try:
            self._pipe.send((sample, example))
            if not self._pipe.poll(timeout):
                self._kill()
                raise UserCallFailed("timeout", "")
            good, value, trace = self._pipe.recv()  # no deadline: there is something
        except (EOFError, ConnectionError, OSError) as error:
            self._kill()
            why = f"its process ended with exit code {self._exit}"
            raise UserCallFailed("died", why) from error
        if not good:
            raise UserCallFailed("raised", value, trace)
        return value

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise UserCallFailed("not started", CLOSED)
            self._pipe, child_end = spawn.Pipe()
            child = spawn.Process(
                target=_serve, args=(child_end, self._reward), daemon=True
            )
            child.start()
            self._child = child
            child_end.close()
        try:
            # no deadline: there is something
            ready = self._pipe.poll(START_S) and self._pipe.recv()
        except (EOFError, OSError):
            ready = False
        if ready is not True:
            self._kill()
            late = f"no answer within {START_S:g} s, or exit code {self._exit}"
            why = f"the reward process did not start: {ready or late}"
            raise UserCallFailed("not started", why)

    def _kill(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child.join(5)
                self._exit = self._child.exitcode
                with contextlib.suppress(ValueError):
                    self._child.close()
                self._pipe.close()
                self._child = None

    _exit: int | None = None

    def close(self) -> None:
        self._closed = True
        self._kill()


# calls the reward function, for one thread at a time unless it says otherwise
Caller = InThread | OnLoop | InProcess


def _serve(pipe: Any, reward: bytes) -> None:
    """Runs in the child: serves calls one after the other until the pipe closes."""
    try:
        # sent by our own parent process over a private pipe
        function = pickle.loads(reward)
    except BaseException as error:
        pipe.send(
            f"{type(error).__name__}: {error}; define it in a module that can be imported"
        )
        return
    pipe.send(True)
    while True:
        try:
            # no deadline: it is killed, or the pipe's other end closes
            sample, example = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            reply = (True, function(sample, example), "")
        except Exception as error:
            reply = (False, f"{type(error).__name__}: {error}", own_lines(error))
        try:
            pipe.send(reply)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            pipe.send((False, f"its result cannot be sent back: {error}", ""))

"""Runs reward functions: sync, async or in processes, each call with a deadline, no failure turned into a number."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import math
import multiprocessing
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jvlab._errors import ConfigError

START_S = 60.0  # for a worker process to import the reward function's module
KINDS = ("raised", "timeout", "died", "not a number")  # why there is no reward


@dataclass(frozen=True)
class RewardFailure:
    """A sample that got no reward, and why. It is left out of training, never counted as zero."""

    index: int  # in the list that was scored
    sample: Any
    kind: str  # one of KINDS
    message: str
    traceback: str = ""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"RewardFailure(sample {self.index}, {self.kind}: {self.message})"


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards in the order of the samples, NaN where there is none, and the failures."""

    rewards: np.ndarray  # float64
    failures: tuple[RewardFailure, ...] = ()
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Failures by kind."""
        return dict(collections.Counter(f.kind for f in self.failures))

    @property
    def mean(self) -> float:
        """Mean of the rewards there are; NaN if there are none."""
        good = self.rewards[np.isfinite(self.rewards)]
        return float(good.mean()) if len(good) else math.nan

    def __repr__(self) -> str:
        failed = "".join(f", {n} {kind}" for kind, n in sorted(self.counts.items()))
        return f"RewardResult({len(self.rewards)} samples, mean {self.mean:.4g}{failed})"


class Rewarder:
    """Calls `reward(sample, example) -> number` for many samples at a time, each within `timeout` seconds.

    An async function runs on an event loop of its own, a plain one in threads, or with `processes` in so many child
    processes. A thread that overruns cannot be stopped, only left behind: use processes for code that may hang; such a
    child is killed and replaced. Close it, or use it in a `with`, to end its threads and processes.
    """

    def __init__(
        self, reward: Callable[..., Any], timeout: float = 30.0, processes: int = 0, workers: int | None = None
    ) -> None:
        if not callable(reward):
            raise ConfigError(
                f"reward is {type(reward).__name__}, no function", remedy="reward(sample, example) -> float"
            )
        if not timeout > 0 or processes < 0 or (workers is not None and workers < 1):
            raise ConfigError(
                f"timeout={timeout}, processes={processes}, workers={workers}",
                remedy="timeout above 0, processes from 0 up, workers from 1 up",
            )
        is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
        if is_async and processes:
            raise ConfigError(
                "an async reward cannot run in processes", remedy="make it a plain function, or processes=0"
            )
        self.timeout, self._closed = timeout, False
        count = processes or workers or (32 if is_async else 4)
        self._loop = _EventLoop() if is_async else None
        self._callers: queue.SimpleQueue[_Caller] = queue.SimpleQueue()
        self._all: list[_Caller] = []
        for _ in range(count):
            caller: _Caller
            if self._loop is not None:
                caller = _OnLoop(reward, self._loop)
            else:
                caller = _InProcess(reward) if processes else _InThread(reward)
            self._all.append(caller)
            self._callers.put(caller)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jvlab-reward")

    def score(self, samples: Sequence[Any], examples: Sequence[Any] | None = None) -> RewardResult:
        """The rewards of all samples; returns after at most timeout · ⌈samples / workers⌉ and a little."""
        if self._closed:
            raise ConfigError("this Rewarder is closed", remedy="make a new one")
        given = [None] * len(samples) if examples is None else list(examples)
        if len(given) != len(samples):
            raise ConfigError(f"{len(samples)} samples, {len(given)} examples", remedy="pass one example per sample")
        began = time.perf_counter()
        found = list(self._threads.map(self._one, range(len(samples)), samples, given))
        return RewardResult(
            np.array([math.nan if isinstance(f, RewardFailure) else f for f in found], np.float64),
            tuple(f for f in found if isinstance(f, RewardFailure)),
            time.perf_counter() - began,
        )

    async def score_async(self, samples: Sequence[Any], examples: Sequence[Any] | None = None) -> RewardResult:
        """`score`, without blocking the event loop."""
        return await asyncio.to_thread(self.score, samples, examples)

    def _one(self, index: int, sample: Any, example: Any) -> float | RewardFailure:
        caller, began = self._callers.get(), time.perf_counter()
        failed = lambda kind, message, trace="": RewardFailure(
            index, sample, kind, message, trace, time.perf_counter() - began
        )
        try:
            value = caller.call(sample, example, self.timeout)
        except _Overran:
            return failed("timeout", f"no reward after {self.timeout:g} s")
        except _Died as error:
            return failed("died", str(error))
        except _Raised as error:
            return failed("raised", error.message, error.trace)
        except Exception as error:
            return failed("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
        finally:
            self._callers.put(caller)
        if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
            return failed("not a number", f"the reward function returned {type(value).__name__} {str(value)[:60]!r}")
        return float(value) if math.isfinite(value) else failed("not a number", f"the reward function returned {value}")

    def close(self) -> None:
        """End its threads and processes; a call in flight is cut off."""
        self._closed = True
        for caller in self._all:
            caller.close()
        if self._loop is not None:
            self._loop.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Overran(Exception):
    """The deadline passed."""


class _Died(Exception):
    """The child process ended."""


class _Raised(Exception):
    """The reward function raised in a child process."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.message, self.trace = message, trace


class _Caller(Protocol):
    """Calls the reward function, one call at a time."""

    def call(self, sample: Any, example: Any, timeout: float) -> Any: ...
    def close(self) -> None: ...


class _InThread:
    """A daemon thread for each call: one that never returns must not keep the interpreter alive."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self._reward = reward
        self._box: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        box = self._box = queue.SimpleQueue()  # a new one: a call left behind may still answer into the old one

        def run() -> None:
            try:
                box.put((True, self._reward(sample, example)))
            except BaseException as error:  # SystemExit too: else the call would look like one that hangs
                box.put((False, error))

        threading.Thread(target=run, name="jvlab-reward-call", daemon=True).start()
        try:
            good, value = box.get(timeout=timeout)
        except queue.Empty:
            raise _Overran from None
        if good:
            return value
        if isinstance(value, _Died):
            raise value
        trace = "".join(traceback.format_exception(value))
        raise _Raised(f"{type(value).__name__}: {value}", trace)

    def close(self) -> None:
        self._box.put((False, _Died("the Rewarder was closed")))


class _EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="jvlab-reward-loop", daemon=True)
        self._thread.start()

    async def _cancel_all(self) -> None:
        calls = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def close(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        with contextlib.suppress(TimeoutError):  # a call that blocks the loop or refuses to be cancelled
            ending.result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self.loop.close()


class _OnLoop:
    """An async reward function, cancelled at its deadline."""

    def __init__(self, reward: Callable[..., Any], loop: _EventLoop) -> None:
        self._reward, self._loop = reward, loop

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._reward(sample, example), self._loop.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done() and not future.cancelled():  # the function's own TimeoutError
                raise
            future.cancel()
            raise _Overran from None

    def close(self) -> None: ...


class _InProcess:
    """A child process, started at the first call; killed and replaced when it overruns.

    Spawned, not forked: a fork of a process in which JAX runs threads can deadlock.
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
        self._closed, self._lock = False, threading.Lock()

    def call(self, sample: Any, example: Any, timeout: float) -> Any:
        if self._child is None or not self._child.is_alive():
            self._start()
        try:
            self._pipe.send((sample, example))
            if not self._pipe.poll(timeout):
                self._kill()
                raise _Overran
            good, value, trace = self._pipe.recv()
        except (EOFError, ConnectionError, OSError) as error:
            self._kill()
            raise _Died(f"its process ended with exit code {self._exit}") from error
        if not good:
            raise _Raised(value, trace)
        return value

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise _Died("the Rewarder was closed")
            self._pipe, theirs = spawn.Pipe()
            self._child = spawn.Process(target=_serve, args=(theirs, self._reward), daemon=True)
            self._child.start()
            theirs.close()
        try:
            ready = self._pipe.poll(START_S) and self._pipe.recv()
        except (EOFError, OSError):
            ready = False
        if ready is not True:
            self._kill()
            why = ready or f"no answer within {START_S:g} s, or it ended with exit code {self._exit}"
            raise _Died(f"the reward process did not start: {why}")

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


def _serve(pipe: Any, reward: bytes) -> None:
    """The child's side: answers one call after the other until the pipe closes."""
    try:
        function = pickle.loads(reward)  # sent by our own parent process over a private pipe
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}; define it in a module that can be imported")
        return
    pipe.send(True)
    while True:
        try:
            sample, example = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(sample, example), "")
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            pipe.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            pipe.send((False, f"its result cannot be sent back: {error}", ""))

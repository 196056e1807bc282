"""What every bench shares: a side in a process of its own, and a clock.

A side is a function of a bench, run by `python -m jvlab.bench._side MODULE:FUNCTION`. It gets an order and the lines
to the process that started it: JSON both ways, a line for each value. What libraries print meanwhile goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import psutil

from jvlab._deadline import Deadline
from jvlab._errors import DeadlineExceeded, LaunchError
from jvlab.wire.processes._supervisor import (
    descendants,
    kill_with_descendants,
    make_scratch,
    shared_memory,
    unlink_segments,
)

# for what a side measures next: a large model may load and compile first
ANSWER_SECONDS = 3600.0


def since_start() -> float:
    """Seconds since this process was started, before Python's first line."""
    return time.time() - psutil.Process().create_time()


class Lines:
    """Values as lines of JSON, in the side's process."""

    def __init__(self, reads: IO[str], writes: IO[str]) -> None:
        self._reads = reads
        self._writes = writes

    def send(self, value: Any) -> None:
        print(json.dumps(value), file=self._writes, flush=True)

    def receive(self) -> Any:
        """The next value; the side ends when nobody will send one."""
        line = self._reads.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)


class Side:
    """The process of a side, from the one that started it. A context manager, at whose end nothing of it is left.

    side         "MODULE:FUNCTION"; the function takes the order and `Lines`
    environment  added to this process's
    grace        seconds to end by itself before it is killed: a lab closes its engines; plain vLLM may hang
    prefix       a command that starts it somewhere else

    vLLM leaves its sockets where it made them: here in a folder that is removed.
    """

    def __init__(
        self,
        side: str,
        order: Any,
        environment: Mapping[str, str] = {},
        grace: float = 0.0,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = side.rpartition(":")[2].removesuffix("_side")
        self._grace = grace
        self._scratch, self._lock = make_scratch()
        own = {"TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "jvlab.bench._side", side],
            env={**os.environ, **environment, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that `select` sees every line that was not read
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._writes = self._process.stdin
        self._reads = self._process.stdout
        self.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: Any) -> None:
        # if it has died, `receive` says so
        with contextlib.suppress(BrokenPipeError):
            self._writes.write(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float = ANSWER_SECONDS) -> Any:
        """What it sends next, within these seconds."""
        line = self._reads.readline() if self._readable(seconds) else b""
        if line:
            return json.loads(line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        raise LaunchError(
            f"the {self.name} side ended with {self._process.returncode}",
            remedy="its own lines above say why",
        )

    def _readable(self, seconds: float) -> bool:
        """Waits for a line, or its end; false if it has ended, and children of it hold the pipe open."""
        deadline = Deadline(seconds)
        while not select.select([self._reads], [], [], 1.0)[0]:
            if self._process.poll() is not None:
                return False
            if deadline.over:
                raise DeadlineExceeded(
                    f"the {self.name} side sent nothing for {seconds:g} s",
                    remedy="its own lines above may say why",
                )
        return True

    def ask(self, value: Any) -> Any:
        self.send(value)
        return self.receive()

    def close(self) -> None:
        """End it and its children: without it they would stay."""
        self._writes.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace)
        held = shared_memory([self.pid, *descendants(self.pid)])
        kill_with_descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()  # no deadline: it has ended or was killed
        self._reads.close()
        unlink_segments(held)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._grace = 0.0
        self.close()


def timed(work: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    """The seconds that a call took, and what it returned."""
    start = time.perf_counter()
    found = work(*args, **options)
    return time.perf_counter() - start, found


def seconds_of(work: Callable[[], Any], rounds: int) -> list[float]:
    """Of each of the rounds; one more warms up and does not count."""
    work()
    return [timed(work)[0] for _ in range(rounds)]


def median_ms(seconds: Iterable[float]) -> float:
    return 1e3 * statistics.median(seconds)


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of 12 tokens each, no two alike."""
    return [[3 + (i * 7 + k) % 500 for k in range(12)] for i in range(count)]


def model_of(model: str | None, **tiny: Any) -> str:
    """The folder of this model, or of a tiny Llama."""
    import jvlab as jv

    return jv.models.resolve(model) if model else jv.models.tiny("llama", **tiny)


def vllm_build() -> str:
    from jvlab.engine import _vllm_versions

    return " ".join(_vllm_versions.build())


def main(side: str) -> None:
    lines = Lines(sys.stdin, os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    # a lab in it is closed on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    module, _, function = side.partition(":")
    getattr(importlib.import_module(module), function)(lines.receive(), lines)


if __name__ == "__main__":
    main(sys.argv[1])


def folder_for(size: float, stack: ExitStack) -> tuple[Path, bool]:
    """A temporary folder for a checkpoint: in memory, and true, if so many bytes are free there."""
    in_memory = shutil.disk_usage("/dev/shm").free > size
    made = tempfile.TemporaryDirectory(
        prefix="jvlab-bench-", dir="/dev/shm" if in_memory else None
    )
    return Path(stack.enter_context(made)), in_memory

"""`PlainVllm`: vLLM without jvlab in a process of its own, the peer of several benchmarks; nothing of it is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from jvlab._errors import DeadlineExceeded, LaunchError
from jvlab.wire.processes._supervisor import (
    descendants,
    make_scratch,
    shared_memory,
    unlink_segments,
)

Order = dict[str, Any]
# for what it measures next: a large model may load and compile first
ANSWER_SECONDS = 3600.0


class PlainVllm:
    """Runs `serve(pipe, order)` with the environment `order["env"]`. A context manager, at whose end it is killed.

    vLLM leaves its sockets where it made them: here in a folder that is removed.
    """

    def __init__(
        self, serve: Callable[[Connection, Order], None], order: Order
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._scratch, self._lock = make_scratch()
        own = {"TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch}
        order = {**order, "env": {**order["env"], **own}}
        self._process = context.Process(
            target=_run, args=(serve, theirs, order), daemon=False
        )
        self._process.start()
        theirs.close()  # so that recv() raises EOFError if it dies

    def receive(self) -> Any:
        """What it sends next."""
        if not self.pipe.poll(ANSWER_SECONDS):
            raise DeadlineExceeded(
                f"plain vLLM sent nothing for {ANSWER_SECONDS:g} s",
                remedy="its own lines above may say why",
            )
        try:
            return self.pipe.recv()  # no deadline: there is something
        except EOFError as error:
            raise LaunchError(
                "plain vLLM ended; its own lines above say why"
            ) from error

    def wait_ready(self) -> None:
        """Until it says so."""
        if self.receive() != "ready":
            raise RuntimeError("plain vLLM did not come up")

    def close(self) -> None:
        """Kill it and its children: its own teardown can hang, and without it the children would stay."""
        pid = self._process.pid
        assert pid is not None
        held = shared_memory([pid, *descendants(pid)])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.join(10)
        unlink_segments(held)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(
    serve: Callable[[Connection, Order], None], pipe: Connection, order: Order
) -> None:
    """In the new process, which leads a group of its own."""
    os.setsid()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # re-read TMPDIR
    serve(pipe, order)

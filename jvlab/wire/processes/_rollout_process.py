"""Starts rollout processes under a supervisor, follows their logs, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jvlab._names import check_replica
from jvlab.wire import _security
from jvlab.wire.processes import _supervisor
from jvlab.wire.processes._log_causes import (
    death,
    exit_cause,
    stage_of,
    without_escapes,
)
from jvlab.wire.processes._pool_spec import PoolSpec
from jvlab.wire.processes._warm import ForkedSupervisor, WarmProcesses, can_fork

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL


def order_of(replica: str, spec: PoolSpec, index: int) -> dict[str, Any]:
    """The configuration of a replica's process, on any host."""
    return {
        "replica": replica,
        "index": index,
        "model": spec.model,
        "replicas": spec.replicas,
        "tensor_parallel": spec.tensor_parallel,
        "load": spec.load,
        "device": spec.device,
        "engine": json.loads(spec.engine_json),
        "env": json.loads(spec.env_json),
        "http": spec.http,
        "limits": json.loads(spec.limits_json),
        "run": spec.run,
    }


class RolloutProcess:
    """One rollout process with its supervisor and its log."""

    def __init__(
        self,
        order: dict[str, Any],
        folder: Path,
        token: str,
        warm: WarmProcesses | None = None,
    ) -> None:
        """`order`: as of `order_of`, with the gateway's address; on another host it came from there."""
        self.replica: str = check_replica(order["replica"])  # its log is named after it
        self.log = folder / f"{self.replica.replace('/', '-')}.log"
        self.run: int = order["run"]
        self._order = order
        self._token = token
        self._process: asyncio.subprocess.Process | ForkedSupervisor | None = None
        self._warm = warm if can_fork(order) else None
        self.ended = asyncio.Event()
        self._scratch = ""

    async def start(
        self, on_pid: Callable[[int], None], on_exit: Callable[[str, str], None]
    ) -> None:
        """Start it; `on_exit(cause, log tail)` is called when it has exited."""
        # Stages and causes are read from the log: that of an earlier process of this name is moved away.
        with contextlib.suppress(FileNotFoundError):
            self.log.replace(self.log.with_name(self.log.name + ".old"))
        self.log.touch(mode=0o600)
        _supervisor.sweep_scratch()
        reply = await self._fork() if self._warm is not None else ""
        if not reply and not self._cancelled:
            reply = await self._spawn()
        pid, _, self._scratch = reply.partition(" ")
        if pid.isdigit():
            on_pid(int(pid))
        self._waiter = asyncio.create_task(self._wait(on_exit))

    async def _fork(self) -> str:
        """Fork it from the gateway's warm process; returns "" if that failed, and logs why."""
        assert self._warm is not None
        try:
            process = self._process = await self._warm.fork(
                self._order, self.log, GRACE_SECONDS
            )
            process.stdin.write(f"{self._token}\n".encode())
            if (reply := await process.started()) or self._cancelled:
                return reply
            cause: object = "it ended"
        except OSError as error:
            cause = error
        with self.log.open("a") as log:
            log.write(
                f"WARNING jvlab: no fork of the warm process ({cause}; see warm.log); starting cold\n"
            )
        return ""

    async def _spawn(self) -> str:
        """Start a supervisor, which starts the rollout process."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            _supervisor.__file__,
            str(self.log),
            str(GRACE_SECONDS),
            *(sys.executable, "-m", "jvlab", "rollout", "--supervised"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_security.child_environment(JVLAB_ORDER=json.dumps(self._order)),
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(f"{self._token}\n".encode())  # the supervisor forwards it
        # no deadline: the supervisor's first act; `end` kills it, and `Pool.wait` has one
        return (await process.stdout.readline()).decode().strip()

    @property
    def _cancelled(self) -> bool:
        """Whether it was ended while the warm process was forking it."""
        return (
            isinstance(self._process, ForkedSupervisor) and self._process.stdin.closed
        )

    async def _wait(self, on_exit: Callable[[str, str], None]) -> None:
        assert self._process is not None
        code = await self._process.wait()  # no deadline: a task that does nothing else
        self._clear()
        text = self.tail(400)
        on_exit(exit_cause(code, text), "\n".join(text.splitlines()[-40:]))
        self.ended.set()

    def stage(self) -> str:
        """The stage of vLLM's start, from its log."""
        return stage_of(self.tail(4000))

    def death(self) -> str:
        """Which of its processes a signal ended, from its log; empty if none is known to have been."""
        return death(self.tail(400))

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 400 * lines))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(without_escapes(text).splitlines()[-lines:])

    async def end(self, deadline: float) -> None:
        """Close the pipe, which ends the whole process tree; kill what is left after the deadline."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), deadline)
        except TimeoutError:
            _supervisor.kill_with_descendants(process.pid)
            await process.wait()  # no deadline: it was killed
            self._clear()

    def _clear(self) -> None:
        """Remove the temporary folder, if the supervisor was killed before it could."""
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

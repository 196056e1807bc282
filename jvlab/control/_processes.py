"""Starts rollout processes under a supervisor, follows their logs, and ends them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jvlab.control import _supervisor
from jvlab.control._registry import PoolSpec
from jvlab.rollout._causes import exit_cause, stage_of

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL


def order_of(replica: str, spec: PoolSpec, index: int) -> dict[str, Any]:
    """What a replica is to be, wherever its process runs."""
    return {
        "replica": replica, "index": index, "model": spec.model, "replicas": spec.replicas,
        "tensor_parallel": spec.tensor_parallel, "load": spec.load, "device": spec.device,
        "engine": json.loads(spec.engine_json), "env": json.loads(spec.env_json), "http": spec.http,
    }  # fmt: skip


class RolloutProcess:
    """One rollout process with its supervisor and its log."""

    def __init__(self, replica: str, spec: PoolSpec, index: int, folder: Path, gateway: str, token: str) -> None:
        self._prepare({**order_of(replica, spec, index), "gateway": gateway}, folder, token)

    @classmethod
    def of_order(cls, order: dict[str, Any], folder: Path, token: str) -> RolloutProcess:
        """One whose order a gateway elsewhere gave."""
        process = cls.__new__(cls)
        process._prepare(order, folder, token)
        return process

    def _prepare(self, order: dict[str, Any], folder: Path, token: str) -> None:
        self.replica: str = order["replica"]
        self.log = folder / f"{self.replica.replace('/', '-')}.log"
        self._order, self._token = order, token
        self._process: asyncio.subprocess.Process | None = None
        self.ended = asyncio.Event()

    async def start(self, on_pid: Callable[[int], None], on_exit: Callable[[str, str], None]) -> None:
        """Start it; `on_exit(cause, log tail)` is called when it is gone, however it went."""
        environment = {**os.environ, "JVLAB_TOKEN": self._token, "JVLAB_ORDER": json.dumps(self._order)}
        command = [sys.executable, "-m", "jvlab", "rollout", "--supervised"]
        self.log.touch(mode=0o600)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", _supervisor.__file__, str(self.log), str(GRACE_SECONDS), *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line.strip().isdigit():
            on_pid(int(line))
        self._waiter = asyncio.create_task(self._wait(on_exit))

    async def _wait(self, on_exit: Callable[[str, str], None]) -> None:
        assert self._process is not None
        code = await self._process.wait()
        text = self.tail(400)
        on_exit(exit_cause(code, text), "\n".join(text.splitlines()[-40:]))
        self.ended.set()

    def stage(self) -> str:
        """How far vLLM has come, from its log."""
        return stage_of(self.tail(4000))

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 400 * lines))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    async def end(self, deadline: float) -> None:
        """Close the pipe, which ends the whole tree; wait for it, and kill what is left after the deadline."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), deadline)
        except TimeoutError:
            for pid in [*_supervisor.descendants(process.pid), process.pid]:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            await process.wait()

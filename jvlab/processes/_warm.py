"""The gateway's end of a warm process: one that has imported vLLM and forks rollout processes.

    gateway ──socket──▶ warm process ──fork──▶ supervisor ──fork──▶ rollout process
       └────────────────pipes─────────────────────▲

The first launch of a lab starts it and waits for its imports, as it would for its own; later ones, and replicas beside
the first, only fork. A supervisor gets its pipes from the gateway with its order and then needs nobody else: the rules
of `_supervisor.py` hold unchanged. The warm process ends with the gateway, or when nothing has needed it for a while.
Its other half is in `rollout/_warm.py`. JVLAB_WARM=0 switches it off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from jvlab.processes._supervisor import KILLED
from jvlab.wire import _security

LONGEST_ORDER = 128 << 10  # one message of the socket


def suits(order: dict[str, Any]) -> bool:
    """Whether a fork can be what this order asks for.

    Variables other than jvlab's own may be read by whatever is imported, and Ray is an import of its own.
    """
    return (
        sys.platform == "linux"
        and os.environ.get("JVLAB_WARM", "1") != "0"
        and all(name.startswith("JVLAB_") for name in order["env"])
        and order["engine"].get("distributed_executor_backend") != "ray"
        and len(json.dumps(order)) < LONGEST_ORDER
    )


class ForkedSupervisor:
    """A supervisor that a warm process forks, with the face of `asyncio.subprocess.Process`."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = _Writer(stdin)
        self._stdout = stdout
        self._started = False
        self._end: asyncio.Task[bytes] | None = None
        self.stdout = asyncio.StreamReader()

    async def connect(self) -> None:
        file = os.fdopen(self._stdout, "rb", 0)
        factory = lambda: asyncio.StreamReaderProtocol(self.stdout)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(factory, file)

    async def started(self) -> str:
        """Its first words: the command's process and temporary folder; nothing if it never came so far."""
        words = (await self.stdout.readline()).decode().strip()
        own, _, rest = words.partition(" ")
        if own.isdigit():
            self.pid, self._started = int(own), True
        return rest

    async def wait(self) -> int:
        """Its exit code: its last words, or killed if there are none. One that is still to start is not waited for."""
        if self.stdin.closed and not self._started:
            self.returncode = KILLED
        if self.returncode is None:
            self._end = self._end or asyncio.create_task(self.stdout.read())  # several may wait
            last = (await asyncio.shield(self._end)).decode().split()
            self.returncode = int(last[-1]) if last else KILLED
        self._transport.close()
        return self.returncode


class _Writer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.closed = descriptor, False

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)


class WarmProcesses:
    """The warm processes of one gateway: one for each way in which vLLM may have been imported."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starting = folder, asyncio.Lock()
        self._known: dict[tuple[str, bool], tuple[asyncio.subprocess.Process, socket.socket]] = {}

    async def fork(self, order: dict[str, Any], log: Path, grace: float) -> ForkedSupervisor:
        """A supervisor for this order, started as soon as the imports are done. Raises OSError if there is no way."""
        async with self._starting:
            line = await self._line(order)
        given, kept = os.pipe()
        read, told = os.pipe()
        supervisor = ForkedSupervisor(kept, read)
        try:
            words = json.dumps({"order": order, "log": str(log), "grace": grace}).encode()
            socket.send_fds(line, [words], [given, told])
        except OSError:
            for end in (kept, read):
                os.close(end)
            raise
        finally:
            for end in (given, told):
                os.close(end)
        await supervisor.connect()
        return supervisor

    async def _line(self, order: dict[str, Any]) -> socket.socket:
        """The socket of the warm process for this order, which is started if there is none."""
        # a model that is here is loaded by a vLLM that asks no hub
        key = order["device"], Path(order["model"]).is_dir()
        if key in self._known:
            process, line = self._known[key]
            if process.returncode is None:
                return line
            line.close()
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        log = os.open(self._folder / "warm.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "jvlab", "rollout", "--warm"),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=_security.child_environment(JVLAB_ORDER=json.dumps(order)),
                start_new_session=True,
            )
        finally:
            os.close(log)
            theirs.close()
        self._known[key] = process, line
        return line

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._known.values() if process.returncode is None]

    async def close(self) -> None:
        for process, line in self._known.values():
            line.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

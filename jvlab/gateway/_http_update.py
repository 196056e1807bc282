"""The gateway's side of `notify_update`: one helper process per pool, which is the trainer of an ordinary sync.

The helper (`lab/_checkpoint_trainer.py`) reads the checkpoint and drives a `Link` over gRPC as any trainer does, so
state machine, digests and error handling are the same. One JSON line per request and per reply; closing its input ends
it. It is kept for a while, so that the next update finds imports and plan ready. Between updates it holds neither pool
nor lab.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jvlab.gateway._http_server import Refusal
from jvlab.wire import _security

if TYPE_CHECKING:
    from jvlab.gateway._gateway import Gateway

IDLE_SECONDS = 300.0  # without an update for this long, the helper ends
END_SECONDS = 5.0
START_SECONDS = 180.0  # for imports and compilation, on top of an update's own deadline
DEFAULT_TIMEOUT, MAX_TIMEOUT = 600.0, 86_400.0
LINE_BYTES = 256 << 20
STATUS = {"LinkBusy": 409, "DeadlineExceeded": 504, "MissingDependency": 501, "Unsupported": 501}


class Updates:
    """Updates of one pool, one at a time."""

    def __init__(self, gateway: Gateway, pool: str) -> None:
        self._gateway, self._pool = gateway, pool
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def take(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into the pool. Runs to its end even if the client disconnects."""
        timeout = fields.get("timeout", DEFAULT_TIMEOUT)
        if not 0 < timeout <= MAX_TIMEOUT:
            text = f"timeout must be positive and at most {MAX_TIMEOUT:g} s, not {timeout}"
            raise Refusal(400, text, "default: 600 s")
        if self._task is not None and not self._task.done():
            raise Refusal(409, "an update is under way", "GET /bridge/version shows when it is over", "LinkBusy")
        self._task = asyncio.create_task(self._update(dict(fields), timeout))
        answer = await asyncio.shield(self._task)
        if error := answer.get("error"):
            kind = error["kind"]
            status = STATUS.get(kind, int(error["status"]))
            raise Refusal(status, error["message"], error["remedy"] or "GET /bridge/status", kind)
        return {"pool": self._pool, **answer}

    async def _update(self, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._idle is not None:
            self._idle.cancel()
        if self._ending is not None:
            await self._ending
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout + START_SECONDS):
                process.stdin.write(json.dumps({**fields, "timeout": timeout}).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                if not line:
                    raise ConnectionError(f"it ended with code {await process.wait()}")
            return json.loads(line)
        except (ConnectionError, TimeoutError, ValueError) as error:
            await self._end()
            log = self._gateway.folder / self._log
            what = "did not answer in time" if isinstance(error, TimeoutError) else f"failed: {error}"
            remedy = f"its log: {log}; GET /bridge/status shows what the replicas hold"
            return {"error": {"kind": "SyncError", "status": 500, "message": f"the update {what}", "remedy": remedy}}
        finally:
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_later)

    @property
    def _log(self) -> str:
        return f"{self._pool}-updates.log"

    async def _start(self) -> asyncio.subprocess.Process:
        order = {"address": self._gateway.address, "pool": self._pool}
        environment = _security.child_environment(JVLAB_ORDER=json.dumps(order))
        with (self._gateway.folder / self._log).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jvlab.lab._checkpoint_trainer",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(f"{self._gateway.token}\n".encode())
        return process

    def _end_later(self) -> None:
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Close its input, which ends it; kill it if it does not."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()  # no deadline: it was killed

    async def close(self) -> None:
        """The pool is closed: end the update and the helper."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()
        for task in (self._task, self._ending):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

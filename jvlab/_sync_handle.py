"""`SyncHandle`: a sync in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jvlab._sync_report import SyncReport

if TYPE_CHECKING:
    from jvlab._link import Link


class SyncHandle:
    """A sync in the background. `result()` waits for the report, or raises what went wrong."""

    def __init__(self, link: Link, params: Any, version: int | None, options: dict[str, Any]) -> None:
        self._future: Future[SyncReport] = Future()
        self._bytes, self._total = 0.0, max(1, link.plan.total_bytes)
        self._thread = threading.Thread(
            target=self._run, args=(link, params, version, options), name="jvlab-sync", daemon=True
        )
        self._thread.start()

    def _run(self, link: Link, params: Any, version: int | None, options: dict[str, Any]) -> None:
        try:
            with link._lock:
                link._handle_progress = self._take
                try:
                    report = link.sync(params, version, progress=False, **options)
                finally:
                    link._handle_progress = None
            self._bytes = self._total
            self._future.set_result(report)
        except BaseException as error:
            self._future.set_exception(error)

    def _take(self, done: float) -> None:
        self._bytes = done

    @property
    def progress(self) -> float:
        """Share of the bytes that were sent, 0 to 1."""
        return min(1.0, self._bytes / self._total)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> SyncReport:
        return self._future.result(timeout)

    def __await__(self) -> Any:
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"SyncHandle({'done' if self.done() else 'running'})"

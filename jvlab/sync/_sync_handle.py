"""`SyncHandle`: a sync running in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jvlab._deadline import check_timeout
from jvlab._errors import DeadlineExceeded
from jvlab.sync._sync_report import SyncReport


class SyncHandle:
    """A sync running in the background. `result()` waits for the report, or raises the sync's error."""

    def __init__(self, sync: Callable[[Callable[[float], None]], SyncReport], pool: str, total: int) -> None:
        """`sync` is called with a function that it reports bytes sent to, out of `total`."""
        self._future: Future[SyncReport] = Future()
        self._sync, self._pool = sync, pool
        self._bytes, self._total = 0.0, max(1, total)
        threading.Thread(target=self._run, name="jvlab-sync", daemon=True).start()

    def _run(self) -> None:
        try:
            report = self._sync(self._take)
            self._bytes = self._total
            self._future.set_result(report)
        except BaseException as error:
            self._future.set_exception(error)

    def _take(self, done: float) -> None:
        self._bytes = done

    @property
    def progress(self) -> float:
        """Fraction of the bytes sent, 0 to 1."""
        return min(1.0, self._bytes / self._total)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> SyncReport:
        """The report, or the sync's error; without `timeout`, waits as long as the sync's own timeout."""
        seconds = check_timeout(timeout)
        try:
            return self._future.result(seconds)
        except TimeoutError:
            if self._future.done():  # the sync's own error
                raise
            raise DeadlineExceeded(
                f"waited {seconds:g} s for pool {self._pool!r}: {self.progress:.0%} of the bytes of the sync are sent",
                remedy="call result() again: the sync continues until the timeout= it was started with",
            ) from None

    def __await__(self) -> Any:
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"SyncHandle({'done' if self.done() else 'running'})"

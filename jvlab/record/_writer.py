"""The one writer of a run folder: appends events and samples, and passes events to dashboards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jvlab._errors import ConfigError, StorageError
from jvlab._files import writing
from jvlab.record._events import NAN, Event, FaultEvent, RunStart, RunStop, clock
from jvlab.record._log import EVENTS, SAMPLES, FolderLock, LogReader, LogWriter
from jvlab.record._samples import SampleRecord

if TYPE_CHECKING:
    from jvlab.record._record import Record


Sink = Callable[[Event], None]


class RecordWriter:
    """Opens a new or resumed run folder for writing, and appends to it from any thread.

    `keep_samples`: every n-th sample's content is kept, 0 for none. `sinks` are called with every event;
    one that raises is reported as a fault and not called again: a dashboard cannot stop a run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str = "",
        config: Mapping[str, Any] | None = None,
        gap_alarm: float = NAN,
        resumed: int = -1,
        fsync_s: float | None = 1.0,
        keep_samples: int = 1,
        sinks: Iterable[Sink] = (),
    ) -> None:
        if keep_samples < 0:
            raise ConfigError(
                f"keep_samples={keep_samples}",
                remedy="pass 0 for none, 1 for all, n for every n-th",
            )
        self.folder = Path(folder)
        self._keep = keep_samples
        self._seen = 0
        self._sinks = list(sinks)
        self._counting = threading.Lock()
        self._closed = False
        with (
            contextlib.ExitStack() as opened,
            writing(self.folder, "the record of the run"),
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder)
            opened.callback(self._lock.close)
            self._events = LogWriter(self.folder / EVENTS, fsync_s=fsync_s)
            opened.callback(self._events.close)
            self._samples = (
                LogWriter(self.folder / SAMPLES, fsync_s=fsync_s)
                if keep_samples
                else None
            )
            if self._samples is not None:
                opened.callback(self._samples.close)
            self._session = sum(
                line.get("kind") == RunStart.tag
                for line in LogReader(self.folder / EVENTS).read()
            )
            name = run or self.folder.resolve().name
            self.write(
                RunStart.now(name, config=config, gap_alarm=gap_alarm, resumed=resumed)
            )
            opened.pop_all()  # it stays open

    def write(self, event: Event) -> None:
        """Append one event; it is in the file when this returns. Without times it is stamped now."""
        if event.start != event.start:  # NaN
            now = clock()
            event = dataclasses.replace(event, start=now, stop=now)
        elif event.stop != event.stop:
            event = dataclasses.replace(event, stop=max(clock(), event.start))
        self._events.append(
            event.to_json(), sync=isinstance(event, (RunStart, RunStop, FaultEvent))
        )
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception as e:
                self._sinks.remove(sink)
                name = getattr(sink, "__name__", type(sink).__name__)
                self.write(
                    FaultEvent(
                        fault="sink failed", who=name, text=f"{type(e).__name__}: {e}"
                    )
                )

    def write_samples(self, samples: Sequence[SampleRecord]) -> int:
        """Append the content of every n-th sample; returns how many were kept."""
        if self._samples is None:
            return 0
        with self._counting:
            first = self._seen
            self._seen = self._seen + len(samples)
        chosen = [s for i, s in enumerate(samples, first) if i % self._keep == 0]
        for sample in chosen:
            self._samples.append({**sample.to_json(), "session": self._session})
        return len(chosen)

    @property
    def record(self) -> Record:
        """A reader of this folder."""
        from jvlab.record._record import Record

        return Record.open(self.folder)

    def close(self, reason: str = "finished", text: str = "") -> None:
        """Write how the run ended, fsync, and unlock the folder; once."""
        with self._counting:
            if self._closed:
                return
            self._closed = True
        stop = RunStop(reason=reason, text=text, actor="trainer")
        # each of these, in reverse, whatever becomes of the others
        with contextlib.ExitStack() as ends:
            for sink in self._sinks:
                ends.callback(getattr(sink, "close", lambda: None))
            ends.callback(self._lock.close)
            ends.callback(self._events.close)
            if self._samples is not None:
                ends.callback(self._samples.close)
            try:
                self.write(stop)
            except StorageError:
                self._lock.make_room()
                self.write(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        match error:
            case None:
                self.close()
            case KeyboardInterrupt():
                self.close("stopped", "interrupted")
            case _:
                self.close("failed", f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"RecordWriter({self.folder.name!r}, {'closed' if self._closed else 'open'})"

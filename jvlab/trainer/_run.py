"""`Run`: a training run in a background thread: status, pause, resume, stop, wait, plot, replay."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, DeadlineExceeded, Unsupported
from jvlab._tracebacks import brief
from jvlab.record._events import runs
from jvlab.record._record import Record
from jvlab.record._run_status import RunStatus, measured
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, train_batch
from jvlab.trainer._checks import check_whole
from jvlab.trainer._loop import Loop
from jvlab.trainer._producer import Producer
from jvlab.trainer._run_checkpoint import Checkpoints
from jvlab.wire.processes._device_memory import explained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.record._samples import SampleRecord
    from jvlab.views._timeline import Timeline
    from jvlab.views.panels._live import Panel


# Scores a recorded sample again under the weights that generated it.


def score_again(
    loop: Loop, checkpoints: Checkpoints, sample: SampleRecord
) -> np.ndarray:
    """log P of each of the sample's tokens under its own version; raises if a version's checkpoint is missing."""
    own = np.asarray(sample.mask or [1] * len(sample.tokens), bool)
    versions = sample.token_versions
    wanted: list[int] = np.unique(versions[own]).tolist()
    held = {checkpoints.position(path).version: path for path in checkpoints.paths()}
    missing = [v for v in wanted if v not in held]
    if missing:
        raise ConfigError(
            f"no checkpoint holds version {', '.join(map(str, missing))}; there are {sorted(held) or 'none'}",
            remedy="run with checkpoint_every=1 and keep_checkpoints=None to be able to replay every sample",
            versions=missing,
        )
    given = Sample(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=np.array(sample.prompt_tokens),
        token_ids=np.array(sample.tokens),
        logprobs=np.zeros(len(own), np.float32),  # not read: it is scored
        versions=versions,
        loss_mask=own,
    )
    batch = train_batch([given], [0.0], buckets=Buckets(rows=1))
    start = len(sample.prompt_tokens)
    out = np.zeros(len(own), np.float32)
    for version in wanted:
        params = checkpoints.load(held[version], loop.state).params
        scored = loop.train.score(params, batch)[0, start : start + len(own)]
        at = own & (versions == version)
        out[at] = scored[at]
    checkpoints.close()
    return out


# ----------------------------------------------------------------------------------------------------

_open: weakref.WeakSet[Run] = weakref.WeakSet()


class Run:
    """A run of `jv.grpo`, in a thread of its own; everything it does is in `run.record`.

    `pause()` and `resume()`, `stop()` (after the current step), `wait()` (raises the run's error), `max_staleness`
    (may be set while it runs), `status`, `params`, `plot()`, `replay(sample)`.

    >>> run = jv.grpo(policy, pool, link, "digits", steps=2, group_size=2, prompts_per_step=2, background=True)
    >>> run.wait().status.state, run.status.step
    ('finished', 2)
    >>> len(run.record.steps()["reward_mean"])          # one row per step
    2
    """

    def __init__(
        self,
        loop: Loop,
        start: Callable[[], Producer],
        folder: Path,
        client: object,
        on_end: Callable[[], None],
    ) -> None:
        """`client` is the lab's, if the pool has one; `on_end` is called before those who wait are told."""
        self.folder = folder
        self.name = folder.name
        self._loop = loop
        self._start_producer = start
        self._on_end = on_end
        self._max_staleness = loop.config.max_staleness
        self._state = "starting"
        self._error = None
        self._began = time.monotonic()
        self._ended = 0.0
        self._final: dict[str, Any] = {}
        self._over = threading.Event()
        self._leaving = False  # the process ends
        self.listeners: list[Callable[[Run], None]] = []
        self._thread = threading.Thread(
            target=self._run, name=f"jvlab-run-{self.name}", daemon=True
        )
        loop.on_step.append(lambda event: self._notify())
        _open.add(self)
        if client is not None:
            runs.setdefault(client, []).append(folder)
        self._thread.start()

    def _run(self) -> None:
        producer = None
        reason = "failed"
        try:
            producer = self._start_producer()
            self._state = "running"
            reason = self._loop.run(producer)
        except BaseException as error:
            self._error = explained(error)
        finally:
            self._end(producer, reason)

    def _end(self, producer: Producer | None, reason: str) -> None:
        """Release everything, write how the run ended, and tell those who wait; each even if another fails."""
        if producer is not None:
            self._final = producer.snapshot()
            self._release(producer.close)
        self._release(lambda: self._loop.ended(reason, self._error))
        self._release(self._loop.close)
        if self._leaving and reason != "finished":
            reason = "interrupted"
        elif self._error is not None:
            reason = "failed"
        text = f"{type(self._error).__name__}: {self._error}" if self._error else ""
        self._release(lambda: self._loop.writer.close(reason, text))
        self._state = (
            "failed" if self._error is not None and reason == "finished" else reason
        )
        self._ended = time.monotonic()
        _open.discard(self)
        self._release(self._on_end)
        self._over.set()
        self._notify()

    def _release(self, end: Callable[[], None]) -> None:
        try:
            end()
        except BaseException as error:
            self._error = self._error or error

    def _notify(self) -> None:
        for listener in list(self.listeners):
            with contextlib.suppress(Exception):  # a broken display must not end a run
                listener(self)

    # Control ------------------------------------------------------------------------------------------------------

    def pause(self) -> Run:
        """Stop after the current step and start no new rollouts, until `resume()`."""
        self._loop.control.set(pausing=True)
        return self

    def resume(self) -> Run:
        """Continue after a pause."""
        self._loop.control.set(pausing=False)
        return self

    def stop(self) -> Run:
        """End after the current step. `jv.grpo(..., folder=run.folder, resume=True)` continues the run."""
        self._loop.control.set(stopping=True)
        return self

    @brief
    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run has ended; raises the run's error, if it failed.

        Ctrl-C stops the run after the current step and then returns; a second Ctrl-C returns at once.
        """
        deadline = Deadline.of(timeout)
        try:
            self._await(deadline)
        except KeyboardInterrupt:
            told = "stopping after this step; Ctrl-C again to leave at once"
            print(told, file=sys.stderr, flush=True)
            self.stop()
            self._await(None)
        if self._error is not None:
            raise self._error
        return self

    def _await(self, deadline: Deadline | None) -> None:
        # in short waits: signals are handled between them
        while not self._over.wait(0.2):
            if deadline is not None and deadline.over:
                raise DeadlineExceeded(
                    f"{self!r} has not ended",
                    remedy="wait longer, or run.stop() to end it after the current step",
                )

    @property
    def max_staleness(self) -> int:
        """The bound K; may be set while the run is active."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        check_whole("max_staleness", value, least=0)
        self._max_staleness = value
        if self._loop.producer is not None:
            self._loop.producer.limit(value)

    # Inspection ---------------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """Everything recorded so far."""
        return Record.open(self.folder)

    @property
    def params(self) -> Any:
        """The trainer's parameters. While the run is active, the next step reuses their memory: copy them, or pause."""
        return self._loop.state.params

    @property
    def model(self) -> str:
        """The model's folder, as its pool was launched with."""
        return str(self._loop.link.pool.model)

    @property
    def done(self) -> bool:
        """Whether the run has ended, successfully or not."""
        return self._over.is_set()

    @property
    def status(self) -> RunStatus:
        """A snapshot of the run."""
        loop = self._loop
        producer = loop.producer
        flow = self._final or (producer.snapshot() if producer is not None else {})
        state = self._state
        if state == "running" and loop.control.stopping:
            state = "stopping"
        elif state == "running" and loop.control.pausing:
            state = "paused"
        counts = ("flying", "ready", "dropped", "regenerated", "lost")
        best, worst = loop.extremes or (None, None)
        return RunStatus(
            state=state,
            step=loop.step,
            steps=loop.config.steps,
            version=loop.version,
            logprob_gap=loop.max_gap,
            max_staleness=self._max_staleness,
            **{name: flow.get(name, 0) for name in counts},
            seconds=(self._ended or time.monotonic()) - self._began,
            error=str(self._error) if self._error else "",
            best=best,
            worst=worst,
            waiting="" if self.done else loop.waiting(),
            **measured(loop.last),
        )

    @property
    def checkpoints(self) -> list[str]:
        """Folders of its checkpoints, oldest first."""
        return [str(p) for p in self._loop.checkpoints.paths()]

    def plot(self) -> Figure:
        """Plot reward, loss, KL, entropy, logprob gap and the time spent in each phase."""
        return _faces.draw(self.record, "run")

    def compare(self, *others: Run | Record) -> Figure:
        """This run and others in the same axes: reward, loss, entropy, gap, evaluations, time."""
        return _faces.draw(self, "comparison", *others)

    def timeline(self, **options: Any) -> Timeline:
        """When each process was busy, interactive; the same object as `lab.timeline()`."""
        return _faces.draw(self.record, "lanes", **options)

    def save_figures(self) -> list[str]:
        """Write figures of the run into its folder as PNG, and return their paths."""
        out = []
        for name in ("run", "staleness", "throughput", "timeline"):
            out.append(str(self.folder / f"{name}.png"))
            _faces.draw(self.record, name).savefig(out[-1], dpi=110)
        return out

    def replay(self, sample: SampleRecord) -> np.ndarray:
        """log P of the sample's tokens under exactly the weights that generated them, from the run's checkpoints.

        0 for tokens that were not generated (observations). Tokens generated after a sync in the middle of a request
        differ slightly: the engine continued from KV of the version before.
        """

        if len(self._loop.crew.processes) > 1:
            raise Unsupported(
                "replay needs all parameters in one process; those of this run are spread over several",
                remedy="resume the run in one process, with steps at its last, and replay there",
            )
        return score_again(self._loop, Checkpoints(self.folder, keep=None), sample)

    # Display ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def panel(self, compare: Run | Record | None = None) -> Panel | None:
        """Show the dashboard: live curves, pause, resume, stop, and the staleness bound. None without widgets.

        compare    another run, or its record, drawn behind this one's curves
        """
        return _faces.draw(self, "panel", compare)

    def _ipython_display_(self) -> None:
        # of one that is over its card; run.panel() makes a dashboard of it
        _faces.draw(self, "card" if self.done else "panel")


def _stop_all() -> None:
    """When the process ends, runs in the background finish their step and close their record."""
    left = list(_open)
    for run in left:
        run._leaving = True
        run.stop()
    for run in left:
        run._over.wait(60)


# Not by atexit: before its functions are called, concurrent.futures refuses new work, of which a run's last step has
# some, and the run would fail. Functions registered here are called earlier, the last one first.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]

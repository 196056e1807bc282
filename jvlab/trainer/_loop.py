"""The training loop: take groups, train, sync, record, checkpoint. The schedule decides whether it is on-policy.

One step, in the order of time; what a line says at its right end goes on beside the lines below it:

    take      groups whose rewards are known; each sample's was computed when it ended, beside the generation of others
    launch    micro-batches are packed and handed to the device one by one           the device trains
    wait      until the new parameters exist: here the step's own time ends
    sync      the engines get them                                                   generation of the next groups
    finish    metrics are fetched, the step's event is written                       samples are written by a thread

A replica that dies is started again by its pool, and is part of the next sync. If it was the only one, groups wait
for it, and the loop sends it the weights that the others would have had: the version is the same, nothing gets staler.
A gateway that dies and comes back from its state file is waited for; groups and a sync under way are repeated.

So an on-policy step is generate + train + sync and little else. What a record still shows as `idle_s` is: from the last
reward to the first micro-batch (the loop's thread wakes up, samples become arrays), from the end of training to the
sync (a probe by the engines that takes longer than training; an engine that wakes up), and from the sync to the first
request (the producer's thread wakes up, a task's function gives prompts). An engine tokenises a prompt on arrival: that
counts as generation. Evaluations and checkpoints come after `finish`: generation goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import (
    ControlError,
    GatewayUnreachable,
    JvlabError,
    NonFiniteError,
    ReplicaLost,
    SyncError,
    Unsupported,
)
from jvlab._names import LostNote
from jvlab.record._events import (
    DraftTally,
    Event,
    FaultEvent,
    PauseEvent,
    ScoreEvent,
    StepEvent,
    clock,
    sync_event,
)
from jvlab.record._run_status import extremes
from jvlab.record._samples import SampleRecord
from jvlab.record._writer import RecordWriter
from jvlab.trainer._batching import PROBE_SAMPLES, TrainBatch, train_batch
from jvlab.trainer._groups import (
    LOOK_SECONDS,
    RETURN_SECONDS,
    Evaluation,
    SampleGroup,
    count_versions,
    is_up,
    look,
    serves,
    too_late,
    why_all_are_dead,
)
from jvlab.trainer._grpo_config import GrpoConfig
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._producer import PoolSleep, Producer
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._step import Pending, StepReport, TrainState, TrainStep
from jvlab.trainer._tasks import Task

if TYPE_CHECKING:
    from jvlab.trainer._processes import Crew

SYNC_TRIES = 4  # of a sync during which replicas fail
RATIO_STATISTICS = ("mean", "p01", "p50", "p99", "min", "max")


class Control:
    """Requests of the run's owner to the loop: pause, resume, stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.pausing = self.stopping = False
        self.listener: Callable[[], None] = lambda: None

    def set(self, *, pausing: bool | None = None, stopping: bool | None = None) -> None:
        with self._changed:
            self.pausing = self.pausing if pausing is None else pausing
            self.stopping = self.stopping if stopping is None else stopping
            self._changed.notify_all()
        self.listener()

    def wait_while_pausing(self, leave: Callable[[], bool]) -> None:
        with self._changed:
            while self.pausing and not self.stopping and not leave():
                self._changed.wait(1.0)


class Alone:
    """In place of a `Crew`, where one process trains."""

    leads = True
    processes: Sequence[int] = (0,)
    on_news: Callable[[], None]

    def order(self, do: str, **body: Any) -> None: ...

    def order_batch(self, batch: TrainBatch, version: int) -> None: ...

    def together(self, work: Callable[[], Any]) -> Any:
        return work()

    def lost(self) -> None: ...

    def check(self) -> None: ...

    def end(self, reason: str, error: BaseException | None) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Trained:
    """A step whose parameters exist and whose numbers were not fetched yet. `stop` is when they did."""

    number: int
    version: int  # of the trainer before it
    groups: Sequence[SampleGroup]
    stale: Sequence[SampleGroup]
    batch: TrainBatch
    pending: Pending
    probe: Future[Any] | None
    start: float
    stop: float


@dataclass(kw_only=True, eq=False)
class Loop:
    """Runs in one thread; `state`, `step` and `version` are its current position."""

    config: GrpoConfig
    algorithm: Algorithm
    sampling: Mapping[str, Any]
    reference: Any  # a pool, a tree of parameters, or None
    gap_alarm: float
    train: TrainStep
    state: TrainState
    link: Any
    task: Task
    writer: RecordWriter
    checkpoints: Checkpoints
    evaluation: Evaluation | None
    keep: Callable[[Any], None]  # takes each step's new parameters
    export: Callable[[str], None] | None  # saves the policy under a name
    step: int
    version: int
    crew: Crew | Alone  # the trainer's processes
    control: Control = field(default_factory=Control)
    # told of each step, in this order
    on_step: list[Callable[[StepEvent], None]] = field(default_factory=list)
    producer: Producer | None = None
    last: StepEvent | None = None
    max_gap: float = 0.0
    # best and worst sample of the last step
    extremes: tuple[SampleRecord, SampleRecord] | None = None

    def __post_init__(self) -> None:
        self._replicas: set[str] = set()  # those that the last sync reached
        self._drafts = DraftTally()
        self._probe_thread = ThreadPoolExecutor(1, thread_name_prefix="jvlab-probe")
        self._sample_thread = ThreadPoolExecutor(1, thread_name_prefix="jvlab-samples")
        self._writing: Future[None] | None = None  # of the last step's samples
        self._sleep: PoolSleep | None = None

    def rejection_reason(self, group: SampleGroup) -> str:
        """Why a group cannot be trained on, "" if it can."""
        rewards = group.rewards[group.usable]
        if not len(rewards):
            why = f": {group.failures[0].message}" if group.failures else ""
            return f"group {group.index} has no usable sample{why}"
        if self.algorithm.dynamic_sampling and not np.ptp(rewards):
            self._record_samples([group], -1)
            return f"all rewards of group {group.index} are equal, and dynamic_sampling drops such groups"
        return ""

    def run(self, producer: Producer) -> str:
        """Run to the last step, or until the owner stops it; returns "finished" or "stopped"."""
        self.producer = producer
        self.control.listener = producer.wake
        self.crew.on_news = self._news
        steps = self.config.steps
        if self.config.sleeps(self.link.pool):
            self._sleep = PoolSleep(self.link.pool, producer, self.writer)
        self._write(self._sync())
        self._evaluate()
        while self.step < steps and not self.control.stopping:
            self.crew.check()
            if self.control.pausing:
                self._wait_while_paused()
                continue
            producer.set_remaining((steps - self.step) * self.config.prompts_per_step)
            taken = producer.take(self._has_other_work)
            if taken is None:
                if producer.maker.needs_weights:
                    self._catch_up()
                continue
            trained = self._train(*taken)
            try:
                synced = self._sync()
            finally:  # a step is recorded even if its parameters cannot be sent
                event = self._finish(trained)
            self._write(synced)
            self._record_drafts()
            ended = self.step == steps
            if ended or self.step % self.config.every == 0:
                self._evaluate()
            every = self.config.checkpoint_every
            if every and (ended or self.control.stopping or self.step % every == 0):
                self.save()
            for told in self.on_step:
                told(event)
        self._wait_for_samples()
        self._record_drafts(last=True)
        if self.evaluation is not None:
            self._export("last")
        return "finished" if self.step >= steps else "stopped"

    def _evaluate(self) -> None:
        """Answer the held-out prompts with the weights just synced; the best so far are exported."""
        if self.evaluation is None:
            return
        try:
            event = self.evaluation.run(self.step, self.version)
        except (ControlError, ReplicaLost, SyncError) as error:
            self._fault("evaluation failed", "pool", error.message)
            self._wait_until(serves, error)
            event = self.evaluation.run(self.step, self.version)
        self.writer.write(event)
        if event.best:
            self._export("best")

    def waiting(self) -> str:
        """Which function of the user's has been waited for, and how long; "" if that is not worth mentioning."""
        found = ""
        if self.evaluation is not None:
            found = self.evaluation.rewarder.waiting()
        if not found and self.producer is not None:
            found = self.producer.maker.waiting()
        return found

    def ended(self, reason: str, error: BaseException | None) -> None:
        """How the run ended, for the trainer's other processes."""
        self.crew.end(reason, error)

    def close(self) -> None:
        """Release threads and files; the owner closes the record."""
        if self.evaluation is not None:
            self.evaluation.rewarder.close()
        if self._sleep is not None:
            self._sleep.close()
        self._probe_thread.shutdown(wait=True)  # no deadline: `Pool.score` has one
        self._sample_thread.shutdown(wait=True)  # no deadline: it writes a file
        self.checkpoints.close()
        self.crew.close()

    def save(self) -> None:
        """Write a checkpoint of the current position."""
        assert self.producer is not None
        # a run that resumes from here does not write them again
        self._wait_for_samples()
        flow = self.producer.snapshot()
        self.checkpoints.save(
            self.state,
            Position(
                step=self.step,
                version=self.version,
                seed=self.config.seed,
                groups=flow["position"],
                pending=tuple((t.index, t.attempt) for t in flow["pending"]),
                task={**self.task.state_dict(), "position": flow["position"]},
                updates=self.state.updates,
                skipped=self.state.skipped,
            ),
            self._write_arrays,
        )

    def _write_arrays(self, state: TrainState, path: Path) -> None:
        self.crew.order("save", path=str(path))
        self.crew.together(lambda: self.checkpoints.write_arrays(state, path))

    def _wait_while_paused(self) -> None:
        assert self.producer is not None
        start = clock()
        self.producer.pause(True)
        self.control.wait_while_pausing(lambda: self.crew.lost() is not None)
        self.producer.pause(False)
        self.writer.write(
            PauseEvent(actor="trainer", start=start, stop=clock(), why="run.pause()")
        )

    # Several processes --------------------------------------------------------------------------------------------

    def _news(self) -> None:
        """Called by the crew's thread: another process has gone, or its owner asks for something."""
        assert self.producer is not None
        assert not isinstance(self.crew, Alone)
        for asked in self.crew.asked():
            self.control.set(pausing=asked["pausing"], stopping=asked["stopping"])
        self.producer.wake()

    def _export(self, name: str) -> None:
        if self.export is not None:
            self.crew.order("gather")
            self.export(name)

    # One step -----------------------------------------------------------------------------------------------------

    def _train(
        self, groups: Sequence[SampleGroup], stale: Sequence[SampleGroup]
    ) -> _Trained:
        """Train on the groups until the new parameters exist. The engines still hold the version before."""
        version = self.version
        start = clock()
        batch = train_batch(
            [s for g in groups for s in g.samples],
            np.concatenate([g.rewards for g in groups]),
            self.algorithm,
            self.config.buckets,
            np.concatenate([np.full(len(g.samples), g.index) for g in groups]),
            replay=self.config.replay,
        )
        by_a_pool = hasattr(self.reference, "score")
        if by_a_pool:
            batch = self._with_reference(batch)
        self.crew.order_batch(batch, version)
        if not by_a_pool:
            batch = self._with_reference(batch)
        probe = self._probe(batch)
        if self._sleep is not None:
            self._sleep.begin(() if probe is None else (probe,))
        self.crew.order("train")
        launch = lambda: self.train.launch(self.state, batch, version)
        pending = self.crew.together(launch)
        self.state = pending.state
        self.keep(self.state.params)
        # as long as the computation takes
        self.crew.together(pending.wait)
        stop = clock()
        if probe is not None:  # it scores with the version that a sync would replace
            wait([probe])  # no deadline: `Pool.score` has one
        self.version = version + 1
        return _Trained(
            number=self.step,
            version=version,
            groups=groups,
            stale=stale,
            batch=batch,
            pending=pending,
            probe=probe,
            start=start,
            stop=stop,
        )

    def _finish(self, trained: _Trained) -> StepEvent:
        """Fetch what a step computed and record it."""
        self.state, report = self.crew.together(trained.pending.finish)
        gap = self._gap(trained, report)
        event = self._event(trained, report, gap)
        self.writer.write(event)
        self._record_faults(event, report)
        self._wait_for_samples()
        self._writing = self._sample_thread.submit(self._record_trained, trained)
        self.last = event
        self.step = trained.number + 1
        return event

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self.writer.write(event)

    def _record_drafts(self, last: bool = False) -> None:
        """What the engines drafted, as far as their heartbeats have told; asked for after the `last` step."""
        pool = self.link.pool
        if not any(r.facts.speculative for r in pool.snapshot.replicas):
            return
        if last:
            with contextlib.suppress(JvlabError):  # the run has ended all the same
                pool.status()
        self._write(self._drafts.events(pool.snapshot))

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        if not self.algorithm.needs_reference or not len(batch):
            return batch
        start = clock()
        reference = self.reference
        if hasattr(reference, "score"):
            found = np.zeros(batch.tokens.shape, np.float32)
            scored = self._scored_by(reference, batch, len(batch))
            for row, logprobs in zip(found, scored, strict=True):
                row[: len(logprobs)] = np.nan_to_num(logprobs)  # a first token has none
        else:
            found = self.crew.together(lambda: self.train.score(reference, batch))
            tokens = int(batch.token_mask.sum())
            event = ScoreEvent(actor="trainer", samples=len(batch), tokens=tokens)
            self.writer.write(replace(event, start=start, stop=clock()))
        return batch.with_logprobs(reference=found)

    def _scored_by(
        self, pool: Any, batch: TrainBatch, count: int, **about: Any
    ) -> Sequence[Any]:
        """The log-probabilities that engines give to the first samples of a batch; recorded."""
        start = clock()
        lengths = batch.lengths[:count].tolist()
        scores = pool.score(
            [batch.tokens[r, :n].tolist() for r, n in enumerate(lengths)]
        )
        self.writer.write(
            ScoreEvent(
                actor=pool.name,
                start=start,
                stop=clock(),
                samples=len(lengths),
                tokens=sum(lengths),
                **about,
            )
        )
        return scores.logprobs

    def _event(
        self, trained: _Trained, report: StepReport, gap: tuple[float, float]
    ) -> StepEvent:
        groups = trained.groups
        batch = trained.batch
        finite = np.concatenate([g.rewards for g in groups])
        finite = finite[np.isfinite(finite)]
        m = report.metrics
        stale_samples = sum(len(g.samples) for g in trained.stale)
        regenerate = self.config.on_stale == "regenerate"
        pick = lambda stats: {k: stats[f"importance_{k}"] for k in RATIO_STATISTICS}
        return StepEvent(
            start=trained.start,
            stop=trained.stop,
            step=trained.number,
            version=trained.version,
            loss=report.loss,
            reward_mean=float(finite.mean()),
            reward_std=float(finite.std()),
            kl=m.get("kl_reference", math.nan),
            entropy=m.get("entropy", m.get("surprise", math.nan)),
            ratios=pick(m),
            ratios_by_staleness={k: pick(v) for k, v in report.by_staleness.items()},
            clip_fraction=m["clip_low_fraction"] + m["clip_high_fraction"],
            logprob_gap=gap[0],
            effective_samples=m["importance_ess"],
            masked_fraction=m["masked_fraction"],
            logprob_gap_mean=gap[1],
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            skipped=bool(report.skipped),
            samples=report.samples,
            tokens=report.tokens,
            versions=count_versions(batch.versions[batch.loss_mask]),
            groups=tuple(g.index for g in groups),
            dropped=0 if regenerate else stale_samples,
            regenerated=stale_samples if regenerate else 0,
            experts=dict(report.experts),
            extra={
                "compiled": report.compiled,
                "padding": report.padding,
                **report.rows,
                **batch.replay_share,
                **self._about_samples(groups, batch),
                "clipped": {
                    "low_mean": m["clip_low_fraction"],
                    "high_mean": m["clip_high_fraction"],
                },
            },
        )

    def _about_samples(
        self, groups: Sequence[SampleGroup], batch: TrainBatch
    ) -> dict[str, Any]:
        """Lengths, parts of the rewards before their weights, and what reward functions logged, for reports."""
        weights = getattr(self.task.reward, "weights", {})
        parts: dict[str, list[float]] = {}
        logged: dict[str, list[float]] = {}
        for group in groups:
            for of_sample in group.parts:
                for name, value in of_sample.items():
                    weight = weights.get(name, 1.0)
                    parts.setdefault(name, []).append(value / weight if weight else 0.0)
            for name, value in group.logged.metrics.items():
                logged.setdefault(name, []).append(value)
        even = [float(np.ptp(g.rewards[g.usable]) == 0) for g in groups]
        about: dict[str, Any] = {
            "completions": _lengths(groups),
            "zero_std": float(np.mean(even)),
            "sequence_tokens": int(batch.lengths.sum()),
        }
        if parts:
            statistics = lambda v: (float(np.mean(v)), float(np.std(v)))
            about["rewards"] = {name: statistics(v) for name, v in parts.items()}
        if logged:
            about["logged"] = {name: float(np.mean(v)) for name, v in logged.items()}
        return about

    def _gap(self, trained: _Trained, report: StepReport) -> tuple[float, float]:
        """Largest and mean |trainer − engine| log-probability at the version before the step, on both sides.

        Over the samples that this version generated entirely, or over those that `_probe` scored.
        """
        assert report.logprobs is not None
        batch = trained.batch
        if trained.probe is None:
            counted = batch.loss_mask & _fresh(batch, trained.version)[:, None]
            engine = batch.engine_logprobs
        else:
            counted = np.zeros(batch.tokens.shape, bool)
            engine = np.zeros(batch.tokens.shape, np.float32)
            for row, scored in enumerate(trained.probe.result(0)):
                counted[row, 1 : len(scored)] = True
                engine[row, : len(scored)] = scored
        gaps = np.abs(report.logprobs - engine)[counted]
        if not len(gaps):
            return math.nan, math.nan
        return float(gaps.max()), float(gaps.mean(dtype=np.float64))

    def _probe(self, batch: TrainBatch) -> Future[Any] | None:
        """If no sample is fresh, as in most steps of an asynchronous run, the engines score a few while the trainer
        trains: a list of log-probabilities, empty if that failed.
        """
        pool = self.link.pool
        # an engine's score has the engine's experts, and says nothing about log-probabilities with replayed ones
        possible = self.config.temperature == 1.0 and self.config.replay == "none"
        if not possible or _fresh(batch, self.version).any():
            return None
        version = self.version

        def score() -> Any:
            try:
                return self._scored_by(
                    pool, batch, PROBE_SAMPLES, what="probe", version=version
                )
            # the run continues without this measurement
            except (ControlError, ReplicaLost, SyncError) as error:
                text = f"version {version}: {error.message}"
                self._fault("probe failed", "pool", text)
                return []

        return self._probe_thread.submit(score)

    def _fault(self, fault: str, who: str, text: str) -> None:
        self.writer.write(FaultEvent(actor="trainer", fault=fault, who=who, text=text))

    def _record_faults(self, event: StepEvent, report: StepReport) -> None:
        self.max_gap = max(self.max_gap, event.logprob_gap)  # which may be NaN
        if event.logprob_gap > self.gap_alarm:
            text = f"step {event.step}: trainer and engine differ by {event.logprob_gap:.3g} at version {event.version}"
            self._fault("logprob gap", "trainer", text)
        if report.skipped:
            text = f"step {event.step} changed nothing: {report.skipped}"
            self._fault("nan", "trainer", text)

    def _record_trained(self, trained: _Trained) -> None:
        """The samples of a step, in a thread of its own: a long batch takes longer to write than a sync."""
        found = _advantages(trained.groups, trained.batch)
        written = self._record_samples(trained.groups, trained.number, found)
        self.extremes = extremes(written) or self.extremes
        self._record_samples(trained.stale, -1)

    def _wait_for_samples(self) -> None:
        """Until the last step's samples are in the file; raises what went wrong there."""
        if self._writing is not None:
            self._writing.result()  # no deadline: it writes a file
            self._writing = None

    def _record_samples(
        self,
        groups: Sequence[SampleGroup],
        step: int,
        advantages: np.ndarray | None = None,
    ) -> list[SampleRecord]:
        """Write the samples of groups; returns all of them, also those that the record does not keep.

        Those that are not trained on have the step -1, and no advantages.
        """
        out: list[SampleRecord] = []
        for group in groups:
            own = np.full(len(group.samples), math.nan)
            if advantages is not None:
                own = advantages[len(out) :]
            out += group.records(step, own, self.sampling)
        self.writer.write_samples(out)
        return out

    # A pool that died ---------------------------------------------------------------------------------------------

    def _has_other_work(self) -> bool:
        """Whether to wait no longer for groups."""
        waits = self.producer is not None and self.producer.maker.needs_weights
        steered = self.control.pausing or self.control.stopping
        return steered or waits or self.crew.lost() is not None

    def _catch_up(self) -> None:
        """Send the version that the groups are made with to replicas that were started again: no other holds it."""
        assert self.producer is not None
        start = clock()
        try:
            report = self.link.catch_up(self.state.params)
            if report is not None:
                self.writer.write(sync_event(report, start, clock()))
        # it can't be shown that the parameters are those of this version, or the replica was lost again
        except (ControlError, SyncError, Unsupported) as error:
            self._fault("catching up failed", "pool", error.message)
            self._write(self._sync())
        # set again if the replicas still do not serve
        self.producer.maker.needs_weights = False

    def _wait_until(
        self, reached: Callable[[Mapping[str, Any]], bool], error: JvlabError
    ) -> None:
        """After an error: until the pool's status says so. Raises if it never will."""
        pool = self.link.pool
        deadline = Deadline(RETURN_SECONDS)
        while not reached(status := look(pool, error)):
            if deadline.over:
                raise too_late(status) from error
            if is_up(status):
                self._catch_up()
            time.sleep(deadline.within(LOOK_SECONDS))

    # One sync -----------------------------------------------------------------------------------------------------

    def _sync(self) -> tuple[Event, ...]:
        """Send the trainer's parameters to the engines; retried if replicas fail, as long as one is up.

        Returns what the record is to say about it, after the step. Generation has begun by then.
        """
        if self._sleep is not None:
            self._sleep.wake("weights")
        options = {**self.config.sync_options, "progress": False}
        send = lambda: self.link.sync(self.state.params, self.version, **options)
        for attempt in range(SYNC_TRIES):
            self.version = max(self.version, self.link.version + 1)
            start = clock()
            self.crew.order("sync", version=self.version)
            try:
                report = self.crew.together(send)
                break
            except (GatewayUnreachable, SyncError) as error:
                self._fault(
                    "sync failed", "pool", f"version {self.version}: {error.message}"
                )
                # the same parameters would be rejected again
                if isinstance(error, NonFiniteError):
                    raise
                # Dirty ones count as up: a sync is what they need. For one that is started again it waits.
                if isinstance(error, GatewayUnreachable):
                    self._wait_until(is_up, error)
                elif causes := why_all_are_dead(self.link.pool.status()):
                    raise ReplicaLost(
                        f"every replica of the pool is dead, the last one during a weight sync ({causes})",
                        remedy="lab.launch(...) again, then jv.grpo(..., folder=the same, resume=True)",
                    ) from error
                if attempt == SYNC_TRIES - 1:
                    raise
        self.version = report.version
        stop = clock()
        pause = report.seconds.get("pause", math.nan)
        if self._sleep is not None:
            self._sleep.wake("kv_cache")
        replicas = tuple(o.replica for o in report.outcomes)
        if self.producer is not None:
            for lost in sorted(self._replicas - set(replicas)):
                # in case no group reported it
                text = f"replica {lost} was lost (it took no part in the sync of version {self.version})"
                self.producer.maker.record_notes([LostNote(text, lost)])
            self.producer.synced(self.version)
        self._replicas = set(replicas)
        event = sync_event(report, start, stop)
        if math.isnan(pause):
            return (event,)
        return event, PauseEvent(
            start=max(start, stop - pause),
            stop=stop,
            replicas=replicas,
            mode="keep",
            why=f"sync of version {self.version}",
        )


def _fresh(batch: TrainBatch, version: int) -> np.ndarray:
    """Which samples were generated by this version alone. A sample that spans a sync was continued from KV of the
    version before: its later tokens differ for that reason, not because the sync was wrong.
    """
    return ((batch.versions == version) | ~batch.loss_mask).all(axis=1)


def _lengths(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Of the tokens that the policy generated; those that were not cut off are the terminated ones."""
    samples = [s for g in groups for s in g.samples]
    length = np.array([s.own.sum() for s in samples], float)
    cut = np.array([s.finish_reason == "length" for s in samples], bool)
    found = {"clipped_ratio": float(cut.mean())}
    for kind, values in (("length", length), ("terminated_length", length[~cut])):
        for name in ("mean", "min", "max") if len(values) else ():
            found[f"{name}_{kind}"] = float(getattr(values, name)())
    return found


def _advantages(groups: Sequence[SampleGroup], batch: TrainBatch) -> np.ndarray:
    """The advantage of every sample of the groups; NaN for those not in the batch."""
    good = np.concatenate([g.usable for g in groups])
    out = np.full(len(good), math.nan)
    out[good] = batch.advantages
    return out

"""What the loop does at the same time: late metrics, samples by a thread, sleep and wake; and that times stay true."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvlab._errors import ConfigError, ControlError, NonFiniteError
from jvlab.record._events import RewardEvent
from jvlab.record._record import Record
from jvlab.record._writer import RecordWriter
from jvlab.trainer._grpo import grpo
from jvlab.trainer._run_checkpoint import Checkpoints
from jvlab.trainer._step import Pending, TrainStep
from tests.trainer.fake_pool import (
    FakeLink,
    FakePool,
    fresh_params,
    logprobs_fn,
    share,
    task,
    world,
)

pytestmark = pytest.mark.slow


def train(
    folder: Path, steps: int, pool: FakePool, link: FakeLink, **options: Any
) -> Any:
    given = {
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.05,
        "checkpoint_every": 0,
        **options,
    }
    policy = given.pop("policy", (fresh_params(), logprobs_fn))
    return grpo(policy, pool, link, task(), steps=steps, folder=folder, **given)  # type: ignore[arg-type]


def test_the_next_groups_are_generated_before_a_step_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`finish` waits here until the pool was asked for the next group: an earlier order would wait in vain."""
    pool, link = world()
    asked, waited = threading.Event(), []
    pool.on_call = lambda call: asked.set()
    inner = Pending.finish

    def finish(self: Pending) -> Any:
        last = len(waited) == 3
        waited.append(last or asked.wait(20))
        return inner(self)

    def on_sync(version: int) -> None:
        asked.clear()

    link.on_sync = on_sync
    monkeypatch.setattr(Pending, "finish", finish)
    run = train(tmp_path / "run", 4, pool, link)
    assert waited == [True] * 4
    assert run.record.summary()["max_staleness"] == 0, "and it stays on-policy"


class Staggered(FakePool):
    """A sample of a group does not end before the one before it was rewarded."""

    def __init__(self) -> None:
        super().__init__()
        self.rewarded: set[int] = set()
        self.waits: list[bool] = []

    async def _sample(self, prompt: Any, index: int, *given: Any) -> Any:
        if index == 0:
            self.rewarded.clear()
        for _ in range(2000):
            if len(self.rewarded) >= index:
                break
            await asyncio.sleep(0.01)
        self.waits.append(len(self.rewarded) >= index)
        return await super()._sample(prompt, index, *given)


def test_a_sample_is_rewarded_while_its_group_is_still_generated(tmp_path: Path):
    pool = Staggered()

    def reward(sample: Any, example: Any) -> float:
        pool.rewarded.add(sample.sample_index)
        return share(sample, example)

    options: dict[str, Any] = {
        "group_size": 3,
        "prompts_per_step": 1,
        "checkpoint_every": 0,
    }
    link: Any = FakeLink(pool)
    run = grpo(
        (fresh_params(), logprobs_fn),
        link.pool,
        link,
        task(reward),
        steps=2,
        folder=tmp_path / "r",
        **options,
    )
    assert pool.waits == [True] * 6
    rewards = [
        e.samples for e in run.record.events("reward") if isinstance(e, RewardEvent)
    ]
    assert rewards == [3, 3], "one event for each group, as before"


def test_times_and_order_stay_true_if_fetching_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pool, link = world()
    inner = Pending.finish

    def finish(self: Pending) -> Any:
        time.sleep(0.3)
        return inner(self)

    monkeypatch.setattr(Pending, "finish", finish)
    events = train(tmp_path / "run", 4, pool, link).record.events()
    kinds = [e.kind for e in events if e.kind in ("step", "sync")]
    assert kinds == ["sync", *["step", "sync"] * 4], "as if nothing overlapped"
    steps = [e for e in events if e.kind == "step"]
    syncs = [e for e in events if e.kind == "sync"]
    for before, step, after in zip(syncs, steps, syncs[1:], strict=False):
        assert before.stop <= step.start <= step.stop <= after.start
        assert after.start - step.stop < 0.3, "the sync does not wait for the numbers"
    assert all(step.seconds < 0.3 for step in steps[1:]), (
        "nor is the wait a part of the step; the first compiles"
    )


def test_a_step_is_recorded_even_if_its_sync_fails(tmp_path: Path):
    pool, link = world()

    def on_sync(version: int) -> None:
        if version == 3:
            raise NonFiniteError("1 leaf is not finite", remedy="...")

    link.on_sync = on_sync
    with pytest.raises(NonFiniteError):
        train(tmp_path / "run", 6, pool, link)
    record = Record.open(tmp_path / "run")
    assert record.steps()["step"].tolist() == [0, 1]
    assert len([s for s in record.samples() if s.step == 1]) == 12
    assert record.summary()["ended"] == "failed"


def test_a_probe_ends_before_its_version_is_replaced(tmp_path: Path):
    pool, link = world(delay=0.001)
    pool.crossing = {4, 5, 6, 7, 8, 9}
    inner = pool.score

    def score(sequences: Any) -> Any:
        time.sleep(0.05)
        return inner(sequences)

    pool.score = score  # type: ignore[method-assign]
    record = train(tmp_path / "run", 8, pool, link, max_staleness=2).record
    probes = [e for e in record.events("score") if e.what == "probe"]  # type: ignore[attr-defined]
    assert probes
    syncs = {e.version: e for e in record.events("sync")}  # type: ignore[attr-defined]
    for probe in probes:
        assert probe.stop <= syncs[probe.version + 1].start  # type: ignore[attr-defined]
    assert record.summary()["logprob_gap"] < 1e-5


def test_a_checkpoint_is_later_than_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, save, seen = RecordWriter.write_samples, Checkpoints.save, []

    def slow(self: RecordWriter, samples: Any) -> int:
        time.sleep(0.02)
        return write(self, samples)

    def counted(self: Checkpoints, state: Any, position: Any, write: Any) -> Any:
        seen.append((position.step, len(Record.open(tmp_path / "run").samples())))
        return save(self, state, position, write)

    monkeypatch.setattr(RecordWriter, "write_samples", slow)
    monkeypatch.setattr(Checkpoints, "save", counted)
    run = train(tmp_path / "run", 5, *world(), checkpoint_every=2)
    assert seen == [(2, 24), (4, 48), (5, 60)]
    assert len(run.record.samples()) == 60


def test_samples_that_cannot_be_written_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(self: RecordWriter, samples: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write_samples", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run", 5, *world())


def test_a_pool_on_the_trainers_card_sleeps_while_it_trains(tmp_path: Path):
    pool, link = world()
    pool.colocated = True  # type: ignore[attr-defined]
    run = train(tmp_path / "run", 3, pool, link)
    step = lambda version: [
        "sleep 2",
        "wake weights",
        f"sync {version}",
        "wake kv_cache",
    ]
    assert pool.steered == ["sync 1", *step(2), *step(3), *step(4)]
    slept = [e for e in run.record.events("pause") if e.mode == "sleep"]  # type: ignore[attr-defined]
    assert len(slept) == 3
    assert all(a.stop <= b.start for a, b in itertools.pairwise(slept))
    plain = train(tmp_path / "plain", 3, *world()).record
    np.testing.assert_array_equal(run.record.steps()["loss"], plain.steps()["loss"])


def test_a_pool_that_generates_does_not_sleep(tmp_path: Path):
    pool, link = world(delay=0.001)
    pool.colocated = True  # type: ignore[attr-defined]
    train(tmp_path / "bound", 3, pool, link, max_staleness=1)
    assert not [what for what in pool.steered if not what.startswith("sync")]
    with pytest.raises(
        ConfigError, match="the pool generates while the trainer trains"
    ):
        train(tmp_path / "no", 3, pool, link, max_staleness=1, sleep=True)
    pool, link = world(delay=0.001)
    run = train(
        tmp_path / "raised",
        10_000,
        pool,
        link,
        sleep=True,
        background=True,
        progress=False,
    )
    while run.status.step < 2:
        time.sleep(0.01)
    assert "sleep 2" in pool.steered
    run.max_staleness = 2  # while it runs
    step = run.status.step
    while run.status.step < step + 6:
        time.sleep(0.01)
    run.stop().wait(60)
    assert run.status.state == "stopped"
    assert run.record.summary()["faults"] == {}
    assert run.record.staleness().max.max() > 0


def test_a_run_that_fails_leaves_no_pool_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pool, link = world()

    def launch(self: TrainStep, *_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "launch", launch)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(tmp_path / "run", 3, pool, link, sleep=True)
    assert pool.steered == ["sync 1", "sleep 2", "wake all"]
    assert not pool.asleep
    pool, link = world()

    def gone(tags: Any = None) -> float:
        raise ControlError("the gateway is gone")

    pool.wake = gone  # type: ignore[method-assign]
    with pytest.raises(ControlError, match="gone"):
        train(tmp_path / "gone", 3, pool, link, sleep=True)
    record = Record.open(tmp_path / "gone")
    assert record.summary()["faults"] == {"wake failed": 1}
    assert record.steps()["step"].tolist() == [0], "the step was trained"

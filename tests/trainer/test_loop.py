"""The loop without engines: on-policy and asynchronous, faults, steering, checkpoints, what the record says."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jvlab import _progress
from jvlab._errors import (
    ConfigError,
    GatewayUnreachable,
    NonFiniteError,
    ReplicaLost,
    RewardError,
)
from jvlab.record._record import Record
from jvlab.trainer import _groups, _grpo
from jvlab.trainer._environment import EnvironmentTurn
from jvlab.trainer._grpo import _folder, grpo
from jvlab.trainer._grpo_config import GrpoConfig
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._tasks import Task
from jvlab.wire import jvlab_pb2 as pb
from tests.trainer.fake_pool import (
    WANTED,
    FakeLink,
    FakePool,
    fresh_params,
    logprobs_fn,
    share,
    task,
    world,
)
from tests.trainer.loop_script import go
from tests.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COLUMNS = ("step", "loss", "reward_mean", "grad_norm", "logprob_gap", "tokens")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    # a call that hangs cannot be ended
    own = lambda t: t.name.startswith("jvlab") and t.name != "jvlab-reward-call"
    left = lambda: [t for t in threading.enumerate() if t not in before and own(t)]
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left()


def train(
    folder: Path,
    steps: int = 4,
    pool: FakePool | None = None,
    link: Any = None,
    **options: Any,
):
    if pool is None:
        pool, link = world()
    given = {
        "group_size": 4,
        "prompts_per_step": 3,
        "learning_rate": 0.05,
        "checkpoint_every": 0,
        "task": task(),
    }
    given = {**given, **options}
    what = given.pop("task")
    policy = given.pop("policy", (fresh_params(), logprobs_fn))
    return grpo(
        policy,
        pool,  # type: ignore
        link or FakeLink(pool),  # type: ignore
        what,
        steps=steps,
        folder=folder,
        **given,  # type: ignore
    )


def same(a: Record, b: Record, rows: slice = slice(None)) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(
            a.steps()[name][rows], b.steps()[name], err_msg=name
        )


def samples(record: Record) -> list[tuple[Any, ...]]:
    return [
        (s.step, s.group, s.index, s.tokens, s.logprobs, s.reward, s.advantage)
        for s in record.samples()
    ]


def test_on_policy_learns_and_is_never_stale(tmp_path: Path):
    run = train(tmp_path / "run", steps=40, learning_rate=0.1)
    record = run.record
    assert run.status.state == "finished"
    reward = record.steps()["reward_mean"]
    assert reward[0] < 0.25, "a random policy says the wanted token once in 12"
    assert reward[-5:].mean() > 0.5
    assert record.staleness().histogram.keys() == {0}
    s = record.summary()
    assert (s["syncs"], s["syncs_verified"], s["dropped"], s["ended"]) == (
        41,
        41,
        0,
        "finished",
    )
    assert s["samples"] == 40 * 12 == len(record.samples())
    assert 0 < s["logprob_gap"] < 1e-5
    assert s["alarms"] == 0


def test_one_seed_gives_the_same_run_and_another_does_not(tmp_path: Path):
    one, two, other = (
        train(tmp_path / n, seed=s).record for n, s in (("a", 3), ("b", 3), ("c", 4))
    )
    same(one, two)
    assert samples(one) == samples(two)
    assert samples(one) != samples(other)
    groups = {s.group: [] for s in one.samples()}
    for s in one.samples():
        groups[s.group].append(s.tokens)
    assert all(len(set(tokens)) > 1 for tokens in groups.values()), (
        "samples of a group differ"
    )


@pytest.mark.parametrize("on_stale", ["drop", "regenerate"])
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_staleness_is_never_exceeded_under_random_delays(
    tmp_path: Path, bound: int, on_stale: str
):
    pool, link = world(delay=0.002, jitter=bound)
    run = train(
        tmp_path / "run", 12, pool, link, max_staleness=bound, on_stale=on_stale
    )
    record = run.record
    for step in record.events("step"):
        assert all(0 <= age <= bound for age in step.staleness), step  # type: ignore[attr-defined]
    for sample in record.samples():
        if sample.step >= 0:
            trained_at = record.events("step")[sample.step].version  # type: ignore[attr-defined]
            assert sample.staleness(trained_at).max() <= bound
    assert max(record.staleness().levels) > 0, "rollouts did run ahead"
    assert pool.most_flying <= (bound + 1) * 3, "the queue is bounded"
    assert np.isfinite(record.steps()["logprob_gap"]).all(), "measured at every step"
    assert (record.steps()["effective_samples"] > 0).all()
    assert (record.steps()["masked_fraction"] == 0).all(), (
        "nothing is masked unless asked"
    )
    assert record.summary()["logprob_gap"] < 1e-5


def test_stale_groups_are_dropped_or_made_again_and_counted(tmp_path: Path):
    for on_stale in ("drop", "regenerate"):
        pool, link = world()
        slow = {2}  # the group that is made by this call outlives several syncs
        inner = pool._sample

        async def sample(
            prompt: Any,
            index: int,
            seed: int,
            length: int,
            replica: str,
            inner=inner,
            pool=pool,
            slow=slow,
        ):
            made = await inner(prompt, index, seed, length, replica)
            if pool.calls in slow and index == 0:
                slow.clear()
                while pool.version < 5:
                    await asyncio.sleep(0.005)
            return made

        pool._sample = sample  # type: ignore[method-assign]
        run = train(
            tmp_path / on_stale, 8, pool, link, max_staleness=1, on_stale=on_stale
        )
        table, s = run.record.steps(), run.record.summary()
        assert table["staleness_max"].max() <= 1
        untrained = sum(x.step < 0 for x in run.record.samples())  # kept all the same
        assert untrained >= 4, "the slow group; on a busy machine others too"
        assert untrained % 4 == 0, "whole groups"
        assert (s["dropped"], s["regenerated"]) == (
            (untrained, 0) if on_stale == "drop" else (0, untrained)
        ), on_stale


def test_partial_rollouts_carry_the_version_of_each_token(tmp_path: Path):
    pool, link = world(delay=0.001)
    pool.crossing = {4, 5, 6}
    record = train(tmp_path / "run", 8, pool, link, max_staleness=2).record
    crossing = [s for s in record.samples() if len(s.versions) > 1]
    assert crossing, "some rollout crossed a sync"
    assert all(np.diff(s.token_versions).min() >= 0 for s in crossing)
    ratios = [r for e in record.events("step") for r in e.ratios_by_staleness]  # type: ignore[attr-defined]
    assert set(ratios) > {0}, "importance ratios are kept by staleness"


def test_a_resumed_run_equals_one_that_was_never_killed(tmp_path: Path):
    whole = go(str(tmp_path / "whole"), 9)
    command = [
        sys.executable,
        "-m",
        "tests.trainer.loop_script",
        str(tmp_path / "killed"),
        "9",
        "4",
    ]
    killed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    record = Record.open(tmp_path / "killed")
    assert record.summary()["ended"] == "interrupted"
    assert "interrupted after 5 steps" in repr(record)
    assert record.steps()["step"].tolist() == [0, 1, 2, 3, 4]
    resumed = go(str(tmp_path / "killed"), 9, resume=True)
    assert resumed.record.events("run_start")[1].resumed == 4, (  # type: ignore
        "the last checkpoint, of every second step"
    )
    same(resumed.record, whole.record)
    assert sorted(samples(resumed.record)) == sorted(samples(whole.record))
    np.testing.assert_array_equal(resumed.params["table"], whole.params["table"])
    assert len(resumed.record.events("step")) == 10, (
        "the step that was made twice is in the file twice"
    )
    one, two = resumed.record.summary(), whole.record.summary()
    for name in ("samples", "tokens", "rollouts", "reward_failures", "steps"):
        assert one[name] == two[name], f"{name}: what was made again counts once"
    assert one["samples"] == 9 * 12
    assert one["replayed"] >= 12 > two["replayed"] == 0, (
        "and how much was generated again is recorded"
    )
    assert f"{9 * 12} samples" in repr(resumed.record)
    for name in ("tokens", "reward", "step"):
        assert (
            len(resumed.record.table("samples")[name])
            == 9 * 12
            == len(list(resumed.record.iter_samples()))
        )


def test_resume_after_a_stop_and_with_staleness(tmp_path: Path):
    pool, link = world()
    run = train(
        tmp_path / "run",
        10_000,
        pool,
        link,
        max_staleness=2,
        checkpoint_every=1,
        background=True,
    )
    while run.status.step < 3:
        time.sleep(0.01)
    run.stop().wait(120)
    assert run.status.state == "stopped"
    done = run.status.step
    again = train(
        tmp_path / "run",
        done + 4,
        pool,
        link,
        max_staleness=2,
        checkpoint_every=1,
        resume=True,
    )
    record = again.record
    assert record.steps()["step"].tolist() == list(range(done + 4))
    assert max(record.staleness().levels) <= 2
    trained = [s.group for s in record.samples() if s.step >= 0]
    assert sorted(set(trained)) == list(range((done + 4) * 3)), (
        "every prompt once: what was in flight is made again"
    )


def test_resume_refuses_what_does_not_fit(tmp_path: Path):
    go(str(tmp_path / "run"), 2)
    with pytest.raises(ConfigError, match="already holds a run"):
        go(str(tmp_path / "run"), 4)
    with pytest.raises(ConfigError, match="seed 5"):
        go(str(tmp_path / "run"), 4, seed=6, resume=True)
    with pytest.raises(ConfigError, match="without a folder"):
        grpo((fresh_params(), logprobs_fn), *world(), task(), resume=True)  # type: ignore[arg-type]


def test_a_replica_that_dies_is_reported_and_the_run_goes_on(tmp_path: Path):
    pool, link = world(replicas=2, delay=0.001)

    def die(call: int) -> None:
        if call == 8:
            pool.alive["fake/1"] = False

    pool.on_call = die
    run = train(tmp_path / "run", 5, pool, link)
    s = run.record.summary()
    assert s["steps"] == 5
    late = [e.actor for e in run.record.events("rollout")][-6:]
    assert set(late) == {"fake/0"}
    assert s["faults"] == {"replica lost": 1}, "once, by whoever notices first"
    assert s["max_staleness"] == 0


def test_a_replica_lost_under_a_group_is_one_fault(tmp_path: Path):
    pool, link = world(replicas=2, delay=0.002)
    inner = pool._sample

    async def sample(prompt: Any, index: int, seed: int, length: int, replica: str):
        # in the middle of a group
        if link.version == 2 and index == 1 and replica == "fake/1":
            pool.alive["fake/1"] = False
        return await inner(prompt, index, seed, length, replica)

    pool._sample = sample  # type: ignore[method-assign]
    run = train(tmp_path / "run", 4, pool, link)
    faults = run.record.events("fault")
    assert [e.who for e in faults if e.fault == "replica lost"] == ["fake/1"]  # type: ignore[attr-defined]
    assert run.record.summary()["steps"] == 4


def test_no_replica_left_is_a_clear_error_and_the_record_is_closed(tmp_path: Path):
    pool, link = world(replicas=2)

    def die(call: int) -> None:
        for name in pool.alive if call >= 8 else ():
            pool.alive[name] = False

    pool.on_call = die
    with pytest.raises(ReplicaLost, match="every replica of the pool is dead"):
        train(tmp_path / "run", 6, pool, link)
    s = Record.open(tmp_path / "run").summary()
    assert (s["ended"], s["running"]) == ("failed", False)
    assert s["faults"]["rollout failed"] >= 1


def returning(pool: FakePool, looks: int) -> list[str]:
    """The pool starts its only replica again: seen so often as restarting, then it is up without weights."""
    inner = pool.status
    seen: list[str] = []

    def status(**_: Any) -> dict[str, Any]:
        found = inner()
        seen.append(found["replicas"][0]["health"])
        if seen[-1] == "restarting" and seen.count("restarting") == looks:
            pool.stale.add("fake/0")
            pool.alive["fake/0"] = True
        return found

    pool.gone = "restarting"
    pool.status = status  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("known", [True, False], ids=["caught up", "synced"])
@pytest.mark.parametrize("bound", [0, 1])
def test_the_only_replica_is_started_again_and_gets_the_weights(
    tmp_path: Path, known: bool, bound: int
):
    pool, link = world()
    link.unknown = not known
    seen = returning(pool, 2)

    def die(call: int) -> None:
        if call == 8:
            pool.alive["fake/0"] = False

    pool.on_call = die
    run = train(tmp_path / "run", 4, pool, link, max_staleness=bound)
    summary = run.record.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", 4)
    assert seen.count("restarting") >= 2
    assert summary["faults"]["pool does not serve"] == 1
    # every group of every step was made, and none with other weights than the record says
    samples = [s for s in run.record.samples() if s.step >= 0]
    assert len(samples) == 4 * 3 * 4
    events = run.record.events("step")
    assert max(e.logprob_gap for e in events) < 1e-4  # type: ignore[attr-defined]
    caught = [word for word in pool.steered if word.startswith("catch up")]
    if (
        bound == 0
    ):  # nothing else would sync: it waits for groups, so it is the loop that brings the weights
        assert "stale" in seen
        assert len(caught) == 1
        assert summary["faults"].get("catching up failed", 0) == (0 if known else 1)
        assert summary["syncs"] == 6
        assert summary["dropped"] == 0 if known else True


def test_a_run_says_whom_it_waits_for(tmp_path: Path):
    pool, link = world()
    returning(pool, 6)  # each of three groups looks once by itself
    said: list[str] = []
    inner = pool.status

    def status(**_: Any) -> dict[str, Any]:
        said.append(made[0].waiting() if made else "")
        return inner()

    made: list[Any] = []
    real = _grpo.GroupMaker

    def make(*arguments: Any) -> Any:
        made.append(real(*arguments))
        return made[0]

    pool.status = status  # type: ignore[method-assign]
    pool.on_call = lambda call: pool.alive.update(
        {"fake/0": False} if call == 4 else {}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_grpo, "GroupMaker", make)
        train(tmp_path / "run", 2, pool, link)
    assert "generation waits: fake/0 is restarting" in said
    assert "generation waits: fake/0 is stale" in said
    assert made[0].waiting() == ""


def test_a_replica_that_does_not_come_back_in_time_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_groups, "RETURN_SECONDS", 0.6)
    pool, link = world()
    pool.gone = "restarting"
    pool.on_call = lambda call: pool.alive.update({"fake/0": call < 5})
    with pytest.raises(ReplicaLost, match="no replica served again") as it:
        train(tmp_path / "run", 4, pool, link)
    assert "fake/0 is restarting" in it.value.message
    # and one whose tries are used up while it is waited for ends it at once
    monkeypatch.setattr(_groups, "RETURN_SECONDS", 600.0)
    pool, link = world()
    pool.gone = "restarting"
    inner = pool.status

    def status(**_: Any) -> dict[str, Any]:
        found = inner()
        pool.gone = "failed"
        return found

    pool.status = status  # type: ignore[method-assign]
    pool.on_call = lambda call: pool.alive.update({"fake/0": call < 5})
    with pytest.raises(ReplicaLost, match="every replica of the pool is dead"):
        train(tmp_path / "again", 4, pool, link)


@pytest.mark.parametrize("place", ["group", "sync"])
def test_a_gateway_that_comes_back_is_waited_for(tmp_path: Path, place: str):
    pool, link = world()
    inner = pool.status
    looks: list[str] = []

    def status(**_: Any) -> dict[str, Any]:
        found = inner()
        if not pool.alive["fake/0"]:
            looks.append(found["replicas"][0]["health"])
            pool.alive["fake/0"] = len(looks) == 3
        return found

    def die(number: int) -> None:
        if number == 3 and not looks:
            pool.alive["fake/0"] = False
            raise GatewayUnreachable("the gateway does not answer")

    pool.status = status  # type: ignore[method-assign]
    pool.gone = "lost"
    pool.awaited = True
    if place == "group":
        pool.on_call = die
    else:
        link.on_sync = die
    run = train(tmp_path / "run", 4, pool, link)
    summary = run.record.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", 4)
    assert looks == ["lost"] * 3
    failed = {"group": "rollout failed", "sync": "sync failed"}[place]
    assert summary["faults"][failed] >= 1
    assert len([s for s in run.record.samples() if s.step >= 0]) == 4 * 3 * 4

    # one that nobody expects ends the run
    looks.clear()
    pool.alive["fake/0"] = True
    pool.awaited = False
    pool.calls = 0
    other = FakeLink(pool)
    other.on_sync = link.on_sync
    with pytest.raises(ReplicaLost, match="every replica of the pool is dead"):
        train(tmp_path / "ended", 4, pool, other)


def test_an_evaluation_waits_for_the_only_replica(tmp_path: Path):
    pool, link = world()
    seen = returning(pool, 2)
    inner = pool.generate
    calls: list[int] = []

    def generate(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            pool.alive["fake/0"] = False
            raise ReplicaLost("lost in the middle")
        assert not pool.stale, "asked before it had the weights"
        return inner(*arguments, **options)

    pool.generate = generate  # type: ignore[method-assign]
    run = train(tmp_path / "run", 2, pool, link, evaluate=task(), every=1)
    assert len(run.record.events("evaluation")) == 3
    assert seen.count("restarting") == 2
    assert run.record.summary()["faults"]["evaluation failed"] == 1


def test_a_sync_that_fails_is_tried_again(tmp_path: Path):
    pool, link = world()
    link.on_sync = lambda version: (
        setattr(link, "fail", 1)
        if version == 3 and link.fail == 0 and not seen
        else None
    )
    seen: list[int] = []
    inner = link.on_sync

    def on_sync(version: int) -> None:
        inner(version)
        if version == 3:
            seen.append(version)

    link.on_sync = on_sync
    run = train(tmp_path / "run", 4, pool, link)
    assert seen == [3, 3]
    assert run.record.summary()["faults"] == {"sync failed": 1}
    assert run.record.summary()["syncs"] == 5
    pool, link = world()
    link.fail = 99
    with pytest.raises(Exception, match="died in the middle"):
        train(tmp_path / "never", 4, pool, link)


def test_poison_ends_a_run_at_once(tmp_path: Path):
    """The same parameters would be refused again: no second try, and the record names the leaf."""
    pool, link = world()
    asked: list[int] = []

    def on_sync(version: int) -> None:
        asked.append(version)
        if version == 3:
            raise NonFiniteError(
                "1 leaf is not finite: w: 1 NaN of 8 values", remedy="..."
            )

    link.on_sync = on_sync
    with pytest.raises(NonFiniteError, match="1 NaN of 8 values"):
        train(tmp_path / "run", 6, pool, link)
    assert asked.count(3) == 1
    record = Record.open(tmp_path / "run")
    assert (record.summary()["ended"], record.summary()["faults"]) == (
        "failed",
        {"sync failed": 1},
    )


def sometimes(sample: Any, example: Any) -> float:
    if sample.sample_index == 1:
        raise ValueError("no idea")
    if sample.sample_index == 2 and example.index == 4:
        time.sleep(600)
    return share(sample, example)


def test_rewards_that_raise_or_hang_are_left_out_and_reported(tmp_path: Path):
    run = train(tmp_path / "run", 3, task=task(sometimes, timeout=3.0))
    events = run.record.events("reward")
    assert sum(e.failures for e in events) == 9  # type: ignore[attr-defined]
    assert sum(e.timeouts for e in events) == 1  # type: ignore[attr-defined]
    faults = [e for e in run.record.events("fault") if e.fault == "reward failed"]  # type: ignore[attr-defined]
    assert len(faults) == 10
    assert "no idea" in faults[0].text  # type: ignore[attr-defined]
    assert "ValueError" in faults[0].extra["traceback"]
    assert run.record.steps()["samples"].tolist() == [9, 8, 9]
    failed = [s for s in run.record.samples() if math.isnan(s.reward)]
    assert len(failed) == 10
    assert all(math.isnan(s.advantage) for s in failed)


def text(sample: Any, example: Any) -> Any:
    return "very good"


def raises(sample: Any, example: Any) -> float:
    return {}["always"]


def not_finite(sample: Any, example: Any) -> float:
    return math.nan


def too_large(sample: Any, example: Any) -> int:
    return 10**400


async def raises_async(sample: Any, example: Any) -> float:
    await asyncio.sleep(0)
    return raises(sample, example)


def hangs(sample: Any, example: Any) -> float:
    time.sleep(600)
    return 1.0


BROKEN = {  # reward: kind, words of the message, processes
    text: ("not a number", r"returned str 'very good'", 0),
    not_finite: ("not a number", "returned nan", 0),
    too_large: ("raised", "OverflowError", 0),
    raises: ("raised", "KeyError: 'always'", 0),
    raises_async: ("raised", "KeyError: 'always'", 0),
    hangs: ("timeout", "no reward after 0.5 s", 0),
}


@pytest.mark.parametrize("reward", BROKEN, ids=lambda reward: reward.__name__)
def test_a_reward_that_never_works_ends_the_run_after_the_first_group(
    tmp_path: Path, reward: Any
):
    kind, says, processes = BROKEN[reward]
    pool, link = world()
    with pytest.raises(RewardError, match=says) as caught:
        train(
            tmp_path / "run",
            3,
            pool,
            link,
            task=task(reward, timeout=0.5, processes=processes),
        )
    assert caught.value.fields["kind"] == kind
    assert caught.value.fields["failed"] == 4, "as many as one group has"
    assert pool.calls <= 3, "no group was made in place of one that failed"
    summary = Record.open(tmp_path / "run").summary()
    assert (summary["ended"], summary["steps"]) == ("failed", 0)
    assert summary["faults"]["reward failed"] >= 1
    if kind != "not a number" and reward is not too_large:
        frames = str(caught.value.fields["traceback"])
        assert f"in {reward.__name__}" in frames
        assert "test_loop.py" in frames.split("\n")[kind == "raised"], (
            "begins with the user's line"
        )
        assert os.path.join("jvlab", "trainer") not in frames
        assert frames in str(caught.value)


def test_the_users_lines_come_back_from_a_process(tmp_path: Path):
    with pytest.raises(RewardError, match="KeyError: 'always'") as caught:
        train(tmp_path / "run", 3, task=task(raises, processes=1))
    assert "in raises" in str(caught.value.fields["traceback"])
    assert "in _serve" not in str(caught.value)


def test_a_reward_that_stops_working_ends_the_run_too(tmp_path: Path):
    calls = itertools.count()

    def works_at_first(sample: Any, example: Any) -> float:
        if next(calls) >= 24:
            raise ConnectionError("the judge is gone")
        return share(sample, example)

    with pytest.raises(RewardError, match=r"64 samples in a row.*the judge is gone"):
        train(tmp_path / "run", 30, task=task(works_at_first))
    assert Record.open(tmp_path / "run").summary()["steps"] == 2


class HangsAtReset:
    def reset(self, example: Any) -> Any:
        time.sleep(600)

    def step(self, completion: str) -> Any:
        raise AssertionError("never called")


class RaisesAtStep(HangsAtReset):
    def reset(self, example: Any) -> Any:
        return example.prompt

    def step(self, completion: str) -> Any:
        raise LookupError("no such turn")


@pytest.mark.parametrize(
    ("made", "says"),
    [(HangsAtReset, "did not return within 0.5 s"), (RaisesAtStep, "such turn")],
)
def test_an_environment_that_never_works_ends_the_run(
    tmp_path: Path, made: Any, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jvlab.trainer._groups.model_tokenizer", lambda model: None)
    what = Task([[1], [2]], environment=made, timeout=0.5, sampling={"max_tokens": 4})
    with pytest.raises(RewardError, match=says) as caught:
        train(tmp_path / "run", 3, task=what)
    assert f"in {'reset' if made is HangsAtReset else 'step'}" in str(
        caught.value.fields["traceback"]
    )


def test_an_evaluation_whose_rewards_never_work_ends_the_run(tmp_path: Path):
    held_out = Task([[2], [5]], raises, name="held out")
    with pytest.raises(
        RewardError,
        match=r"'held out' has no reward for any of the first 2 samples.*'always'",
    ):
        train(tmp_path / "run", 3, evaluate=held_out)


@pytest.mark.parametrize("where", ["group", "evaluation"])
def test_a_reward_that_is_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    monkeypatch.setattr("jvlab.trainer._rewards.SAID_AFTER_S", 0.05)
    go_on = threading.Event()
    notes: list[str] = []
    monkeypatch.setattr(
        "jvlab.trainer._grpo.Progress.remark", lambda self, note: notes.append(note)
    )

    def waits(sample: Any, example: Any) -> float:
        go_on.wait(100)
        return share(sample, example)

    given: dict[str, Any] = (
        {"task": task(waits, timeout=100)}
        if where == "group"
        else {"evaluate": Task([[2]], waits, timeout=100)}
    )
    run = train(tmp_path / "run", 2, background=True, **given)
    said = r"waiting for the reward function since \d+ s \(timeout 100 s\)"
    try:
        until(
            lambda: any(re.fullmatch(said, note) for note in notes),
            "the note beside the bar",
        )
        assert re.fullmatch(said, run.status.waiting)
        assert "waiting for the reward function since" in run._repr_html_()
    finally:
        go_on.set()
    assert run.wait(120).status.state == "finished"
    assert run.status.waiting == ""


def test_nan_is_skipped_and_reported(tmp_path: Path):
    def poisoned(params: Any, tokens: Any, mask: Any) -> Any:
        return logprobs_fn(params, tokens, mask) + jnp.where(
            (tokens[:, :1] == 4) & mask, jnp.nan, 0.0
        )

    # prompts start with 1 + index: step 1 has a 4
    run = train(tmp_path / "run", 4, policy=(fresh_params(), poisoned))
    table = run.record.steps()
    assert table["skipped"].tolist() == [False, True, False, False]
    assert run.record.summary()["faults"]["nan"] == 1
    assert np.isfinite(run.params["table"]).all()


def test_an_engine_that_computes_something_else_raises_the_alarm(tmp_path: Path):
    pool, _ = world()
    pool.offset = 0.01
    for name, bound in (("sync", 0), ("async", 2)):
        record = train(
            tmp_path / name, 3, pool, FakeLink(pool), max_staleness=bound
        ).record
        assert len(record.alarms()) == 3
        assert record.summary()["faults"]["logprob gap"] == 3
        assert record.summary()["logprob_gap"] == pytest.approx(0.01, rel=1e-3)


class Ladder:
    """Two turns: the observation between them is token 3, twice."""

    def reset(self, example: Any) -> Any:
        self.turns = 0
        return example.prompt

    def step(self, completion: str) -> EnvironmentTurn:
        self.turns += 1
        return EnvironmentTurn(
            [3, 3], completion.split().count(str(WANTED)) / 4, self.turns == 2
        )


def test_an_environment_keeps_its_observations_out_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    game = Task(
        lambda i: [1 + i % 5],
        environment=Ladder,
        name="ladder",
        sampling={"max_tokens": 2},
    )
    monkeypatch.setattr("jvlab.trainer._groups.model_tokenizer", lambda model: None)
    record = train(tmp_path / "run", 3, task=game).record
    for sample in record.samples():
        mask = np.array(sample.mask, bool)
        assert (~mask).sum() == 2
        assert (np.array(sample.tokens)[~mask] == 3).all()
        assert (sample.token_versions[~mask] == -1).all()
        assert (sample.token_versions[mask] >= 1).all()
    by_step = {
        e.step: sum(sum(s.mask) for s in record.samples(step=e.step))  # type: ignore
        for e in record.events("step")
    }
    assert record.steps()["tokens"].tolist() == list(by_step.values())
    assert record.summary()["logprob_gap"] < 1e-5


def test_pause_resume_stop_and_another_bound_while_it_runs(tmp_path: Path):
    pool, link = world(delay=0.001)
    run = train(tmp_path / "run", 10_000, pool, link, background=True, progress=False)
    while run.status.step < 2:
        time.sleep(0.01)
    run.pause()
    while run.status.state != "paused" or pool.flying:
        time.sleep(0.01)
    step = run.status.step
    time.sleep(0.5)
    assert run.status.step <= step + 1, "at most the step under way ends"
    step = run.status.step
    assert "paused" in repr(run)
    run.max_staleness = 2
    run.resume()
    while run.status.step < step + 8:
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        run.wait(0.3)
    assert run.stop().wait(120) is run
    assert run.done
    levels = run.record.staleness()
    assert set(levels.max[: step + 1]) == {0.0}
    assert levels.max.max() == 2
    assert any(e.why == "run.pause()" for e in run.record.events("pause"))  # type: ignore[attr-defined]
    assert run.record.summary()["ended"] == "stopped"
    with pytest.raises(ConfigError):
        run.max_staleness = -1
    assert "stopped" in run._repr_html_()


def test_ctrl_c_in_a_script_ends_after_the_step_with_the_record_closed(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "tests.trainer.loop_script",
        str(tmp_path / "run"),
        "100000",
        "-1",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "step 3" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    last = out.splitlines()[-1]
    assert last.startswith("ended stopped after ")
    s = Record.open(tmp_path / "run").summary()
    assert (s["ended"], s["running"], s["steps"]) == (
        "stopped",
        False,
        int(last.split()[-1]),
    )


def test_a_scripts_log_has_a_line_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(tmp_path / "run", 3)
    said = capsys.readouterr().err
    line = r"^run, (\d) of 3 steps, [\d.]+ s, reward \d\.\d{3}, [\d,]+ tokens/s$"
    assert re.findall(line, said, re.M) == ["1", "2", "3"]
    assert "\r" not in said
    assert "\x1b" not in said
    train(tmp_path / "silent", 1, progress=False)
    assert capsys.readouterr().err == ""


def test_a_reward_that_hangs_leaves_a_clock_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What the log says while the first step does not end."""
    go_on = threading.Event()

    def hangs(sample: Any, example: Any) -> float:
        assert go_on.wait(120)
        return share(sample, example)

    monkeypatch.setattr(_progress, "NEXT_LINE", 0.5)
    monkeypatch.setattr(_grpo, "LATE_SECONDS", 0.5)
    run = train(tmp_path / "run", 1, task=task(hangs), background=True)
    said = ""

    def told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return (
            len(
                re.findall(
                    r"^run, 0 of 1 step, [\d.]+ s, 3 groups being generated or rewarded$",
                    said,
                    re.M,
                )
            )
            > 1
        )

    try:
        monkeypatch.setattr(_progress, "clock", lambda: time.monotonic() + 60)
        until(told)
    finally:
        go_on.set()
        run.wait(120)


def test_dynamic_sampling_trains_only_on_groups_with_a_spread(tmp_path: Path):
    coarse = lambda sample, example: float(WANTED in np.asarray(sample.token_ids))
    runs = [
        train(
            tmp_path / n, 4, task=task(coarse), algorithm="dapo", seed=1, group_size=2
        )
        for n in "ab"
    ]
    record = runs[0].record
    for step in range(4):
        groups: dict[int, list[float]] = {}
        for sample in record.samples(step=step):
            groups.setdefault(sample.group, []).append(sample.reward)
        assert len(groups) == 3
        assert all(len(set(rewards)) > 1 for rewards in groups.values())
    assert runs[0].status.lost > 0
    same(record, runs[1].record)


@pytest.mark.parametrize("kind", ["jax", "pool"])
def test_kl_to_the_policy_at_the_start(tmp_path: Path, kind: str):
    reference = None
    if kind == "pool":
        reference = FakePool()
        reference.hold(fresh_params(), 1)
    record = train(
        tmp_path / "run",
        4,
        algorithm=Algorithm.named("grpo", kl_coef=0.1),
        reference=reference,
    ).record
    kl = record.steps()["kl"]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert (kl[1:] > 0).all()
    assert len(record.events("score")) == 4


def test_a_sample_is_scored_again_under_its_own_weights(tmp_path: Path):
    run = train(tmp_path / "run", 4, checkpoint_every=1, keep_checkpoints=2)
    sample = run.record.samples(step=3)[0]
    assert sample.token_versions.tolist() == [4] * len(sample.tokens)
    np.testing.assert_allclose(run.replay(sample), sample.logprobs, atol=1e-5)
    assert len(run.checkpoints) == 2
    with pytest.raises(
        ConfigError, match=r"no checkpoint holds version 1; there are \[4, 5\]"
    ):
        run.replay(run.record.samples(step=0)[0])


class DraftingPool(FakePool):
    """For each version that it held, 10 tokens were drafted, and 10 more for each version before it."""

    @property
    def snapshot(self) -> pb.PoolStatus:
        stats = pb.ReplicaStats(
            drafts=[
                pb.DraftCount(version=v, drafted=10 * (v + 1), accepted=v)
                for v in range(self.version + 1)
            ]
        )
        facts = pb.EngineFacts(speculative="ngram")
        replica = pb.ReplicaStatus(replica="fake/0", facts=facts, stats=stats)
        return pb.PoolStatus(pool="fake", replicas=[replica])


def test_the_record_says_which_version_accepted_how_many_drafts(tmp_path: Path):
    run = train(tmp_path / "run", 3, DraftingPool())
    found = run.record.acceptance()
    last = max(found)
    assert last >= 3, "the version of the last step too"
    assert found == {v: v / (10 * (v + 1)) for v in range(last + 1)}
    assert run.record.summary()["acceptance"] == found
    assert train(tmp_path / "plain", 1).record.acceptance() == {}


def test_a_link_to_the_draft_model_is_not_trained_over(tmp_path: Path):
    pool = FakePool()
    link: Any = FakeLink(pool)
    link.part = "draft"
    with pytest.raises(ConfigError, match="writes the draft model"):
        train(tmp_path / "run", 1, pool, link)


def test_figures(tmp_path: Path):
    run = train(tmp_path / "run", 3, max_staleness=1)
    assert all(Path(p).stat().st_size > 10_000 for p in run.save_figures())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"on_stale": "keep"}, "on_stale"),
        ({"algorithm": "nope"}, "no algorithm"),
        ({"temperature": 0.5}, "logprobs_fn takes no temperature"),
        ({"sampling": {"seed": 1}}, "seed"),
        ({"reference": FakePool()}, "would not be used"),
        ({"policy": 3}, "policy is int"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"task": Task([[1]], share)}, "max_tokens"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    tmp_path: Path, wrong: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_the_caller_keeps_its_own_parameters(tmp_path: Path):
    params = fresh_params()
    train(tmp_path / "run", 2, policy=(params, functools.partial(logprobs_fn)))
    np.testing.assert_array_equal(params["table"], fresh_params()["table"])


def test_hostile_task_name_makes_no_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    for name in ("../../x", "a\0b", "/x", ""):
        with pytest.raises(ConfigError, match="task"):
            _folder(None, name, False)
    assert _folder(None, "my digits", False)[0].parent == tmp_path / "runs"
    with pytest.raises(ConfigError, match="folder"):
        _folder("a\0b", "digits", False)


def test_the_options_of_grpo_are_the_fields_of_its_config() -> None:
    names = list(inspect.signature(grpo).parameters)
    assert names == [
        "policy",
        "pool",
        "link",
        "task",
        *(field.name for field in dataclasses.fields(GrpoConfig)),
    ]
    with pytest.raises(ConfigError, match="stepz"):
        grpo((None, None), None, None, None, stepz=1)  # type: ignore[arg-type]

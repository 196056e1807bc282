"""Reward functions: sync, async, in processes; what raises, hangs, dies or lies is reported, never zero."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from jvlab._errors import ConfigError
from jvlab.trainer._batching import train_batch
from jvlab.trainer._rewards import Rewarder, RewardResult
from tests.trainer.test_batching import sample

pytestmark = pytest.mark.slow

TEXTS = [SimpleNamespace(text=t) for t in ("a", "boom", "ccc", "nan", "word", "dd")]


def scored(rewarder: Rewarder, samples: list) -> RewardResult:
    return rewarder.score(samples, [None] * len(samples))


hanging = threading.Event()  # a call that hangs has begun


def length(sample, example) -> object:
    """The length of the text, with trouble on demand."""
    match sample.text:
        case "boom":
            raise ValueError("no such thing")
        case "nan":
            return math.nan
        case "word":
            return "a lot"
        case "hang":
            hanging.set()
            time.sleep(600)
        case "die":
            os._exit(7)
        case "pid":
            return os.getpid()
        case "exit":
            raise SystemExit(3)
    return len(sample.text) + (example or 0)


async def length_async(sample, example):
    await asyncio.sleep(0.01)
    if sample.text == "hang":
        hanging.set()
        await asyncio.sleep(600)
    if sample.text == "own":
        raise TimeoutError("a database did not answer")
    return length(sample, example)


@pytest.mark.parametrize(
    ("function", "processes"),
    [(length, 0), (length, 1), (length_async, 0)],
    ids=["threads", "processes", "async"],
)
def test_failures_are_reported_with_their_sample(function, processes: int):
    with Rewarder(function, processes=processes) as rewarder:
        result = rewarder.score(TEXTS, [10, 0, 0, 0, 0, 0])
        assert result.rewards[[0, 2, 5]].tolist() == [11, 3, 2]
        assert np.isnan(result.rewards[[1, 3, 4]]).all()
        assert [(f.index, f.kind) for f in result.failures] == [
            (1, "raised"),
            (3, "not a number"),
            (4, "not a number"),
        ]
        failure = result.failures[0]
        assert failure.message == "ValueError: no such thing"
        assert "in length" in failure.traceback
        assert result.counts == {"raised": 1, "not a number": 2}
        assert rewarder.start(0, TEXTS[0]).result() == 1


@pytest.mark.parametrize("function", [length, length_async], ids=["threads", "async"])
def test_one_that_hangs_does_not_stall_the_others(function):
    texts = [SimpleNamespace(text=t) for t in ("hang", "aa", "bb", "cc")]
    with Rewarder(function, timeout=2.5, workers=2) as rewarder:
        result = scored(rewarder, texts)
    assert [(f.index, f.kind) for f in result.failures] == [(0, "timeout")]
    assert "2.5 s" in result.failures[0].message
    assert result.rewards[1:].tolist() == [2, 2, 2]


def test_a_hanging_or_dying_process_is_replaced():
    texts = [SimpleNamespace(text=t) for t in ("pid", "hang", "pid", "die", "pid")]
    with Rewarder(length, timeout=5, processes=1) as rewarder:
        result = scored(rewarder, texts)
        first, second, third = (int(p) for p in result.rewards[[0, 2, 4]])
        assert [(f.index, f.kind) for f in result.failures] == [
            (1, "timeout"),
            (3, "died"),
        ]
        assert "exit code 7" in result.failures[1].message
        assert os.getpid() not in (first, second, third)
        assert len({first, second, third}) == 3
        assert not psutil.pid_exists(first)
        assert psutil.pid_exists(third)
    assert not psutil.pid_exists(third)


def test_the_functions_own_timeout_is_not_ours():
    with Rewarder(length_async, timeout=30) as rewarder:
        (failure,) = scored(rewarder, [SimpleNamespace(text="own")]).failures
    assert (failure.kind, failure.message) == (
        "raised",
        "TimeoutError: a database did not answer",
    )


def test_exit_in_a_reward_is_a_failure_not_a_hang():
    with Rewarder(length, timeout=300) as rewarder:
        (failure,) = scored(rewarder, [SimpleNamespace(text="exit")]).failures
    assert failure.kind == "raised"


def test_rewards_run_side_by_side_and_threads_end():
    before = set(threading.enumerate())
    gate = threading.Barrier(4, timeout=60)
    with Rewarder(lambda sample, example: gate.wait() >= 0, workers=4) as rewarder:
        assert scored(rewarder, [None] * 4).rewards.tolist() == [1] * 4
    assert not [
        t
        for t in set(threading.enumerate()) - before
        if t.name.startswith("jvlab-reward_")
    ]


@pytest.mark.parametrize("function", [length, length_async], ids=["threads", "async"])
def test_close_cuts_calls_off(function):
    rewarder, results = Rewarder(function, timeout=300, workers=1), []
    hanging.clear()
    waiting = threading.Thread(
        target=lambda: results.append(scored(rewarder, [SimpleNamespace(text="hang")]))
    )
    waiting.start()
    assert hanging.wait(60)
    rewarder.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(results[0].failures) == 1


def test_failed_rewards_stay_out_of_training():
    samples = [sample(0, i, 2, 3) for i in range(3)]
    fail = lambda s, e: 1 / s.sample_index
    with Rewarder(fail) as rewarder:
        result = scored(rewarder, samples)
    batch = train_batch(samples, result.rewards)
    assert (len(batch), batch.excluded) == (2, 1)
    assert "ZeroDivisionError" in result.failures[0].message


def test_errors():
    with pytest.raises(ConfigError, match="cannot be sent to a process"):
        Rewarder(lambda sample, example: 0.0, processes=1)
    with pytest.raises(ConfigError, match="async reward cannot run in processes"):
        Rewarder(length_async, processes=1)


def in_parts(sample, example) -> object:
    """A mapping; one of its parts is as `length` gives it."""
    return {"length": length(sample, example), "form": 0.5}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reward_of_parts_is_their_sum(processes: int):
    with Rewarder(in_parts, processes=processes) as rewarder:
        result = scored(rewarder, [TEXTS[0], TEXTS[2], TEXTS[3], TEXTS[4]])
    np.testing.assert_array_equal(result.rewards, [1.5, 3.5, math.nan, math.nan])
    assert result.parts[:2] == (
        {"length": 1.0, "form": 0.5},
        {"length": 3.0, "form": 0.5},
    )
    assert [f.kind for f in result.failures] == ["not a number", "not a number"]
    assert "nan" in result.failures[0].message, "which part it was"


def test_a_record_keeps_the_parts(tmp_path):
    from jvlab.trainer._grpo import grpo
    from tests.trainer.fake_pool import fresh_params, logprobs_fn, share, task, world

    pool, link = world()
    run = grpo(
        (fresh_params(), logprobs_fn),
        pool,  # type: ignore[arg-type]
        link,  # type: ignore[arg-type]
        task(lambda sample, example: {"share": share(sample, example), "bonus": 0.25}),
        steps=1,
        group_size=2,
        prompts_per_step=1,
        folder=tmp_path / "run",
        keep_samples=1,
        checkpoint_every=0,
        progress=False,
    )
    run.wait(60)
    kept = run.record.samples()
    assert all(
        s.reward == s.reward_parts["share"] + s.reward_parts["bonus"] for s in kept
    )
    assert run.record.batch()[0].reward_parts["bonus"] == 0.25

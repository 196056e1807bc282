"""GRPO on a real engine: on-policy and asynchronous, deterministic, resumed after kill -9, verified at every sync."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.lab._lab import LabPlots
from jvlab.record._record import Record
from jvlab.trainer import _task_library as tasks
from jvlab.trainer._grpo import grpo
from jvlab.trainer._run import Run

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
STEPS = 6
COLUMNS = (
    "step",
    "loss",
    "reward_mean",
    "grad_norm",
    "logprob_gap",
    "entropy",
    "tokens",
)


@pytest.fixture(scope="module")
def engine(lab: jv.Lab) -> Iterator[tuple[jv.Pool, str]]:
    model = jv.models.tiny("llama", vocab_size=288)
    pool = lab.launch(model, load="dummy").wait()
    yield pool, model
    pool.close()


def train(lab: jv.Lab, pool: jv.Pool, model: str, folder: Path, **options: Any) -> Run:
    policy = jv.Policy.from_pretrained(model)
    link = lab.connect(policy.params, pool, rules="policy")
    given = {
        "steps": STEPS,
        "learning_rate": 1e-3,
        "group_size": 4,
        "prompts_per_step": 4,
        "micro_batch": 16,
    }
    given = {"task": tasks.digits(), "seed": 3, **given, **options}
    return grpo(policy, pool, link, given.pop("task"), folder=folder, **given)


def tokens(record: Record) -> list[Any]:
    return sorted(
        (s.step, s.group, s.index, s.tokens, s.logprobs, s.reward)
        for s in record.samples()
    )


def same(a: Record, b: Record) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(a.steps()[name], b.steps()[name], err_msg=name)
    assert tokens(a) == tokens(b)


@pytest.fixture(scope="module")
def whole(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """An on-policy run that nothing happens to."""
    return train(lab, *engine, tmp_path_factory.mktemp("whole") / "run")


def test_on_policy_every_sync_verified_and_the_gap_small(whole: Run, lab: jv.Lab):
    s = whole.record.summary()
    assert (s["steps"], s["syncs"], s["syncs_verified"], s["ended"]) == (
        STEPS,
        STEPS + 1,
        STEPS + 1,
        "finished",
    )
    assert s["max_staleness"] == s["dropped"] == s["alarms"] == 0
    assert s["faults"] == {}
    assert 0 < s["logprob_gap"] < 1e-3
    assert all(e.extra["compiled"] == 0 for e in whole.record.events("step")[1:]), (
        "nothing compiles after warm-up"
    )
    plots = LabPlots(lab.client)
    for figure in (
        plots.staleness(),
        plots.throughput(),
        plots.timeline(),
        plots.run(whole),
    ):
        assert figure.axes


def broken(sample: Any, example: Any) -> float:
    return example.answer["what the task does not have"]


def test_a_run_that_cannot_work_is_refused_or_ends_at_once(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    """The tiny model's context is known to its pool alone; a reward is called with a real sample."""
    longest = engine[0].facts().max_model_len
    with pytest.raises(
        jv.errors.ConfigError,
        match=f"max_tokens={longest}, but the engine's context holds {longest}",
    ):
        train(lab, *engine, tmp_path / "long", max_tokens=longest)
    with pytest.raises(jv.errors.ConfigError, match="did you mean 'top_p'"):
        train(lab, *engine, tmp_path / "names", sampling={"topp": 0.9})
    assert list(tmp_path.iterdir()) == []
    task = jv.Task(["Digits: "], broken, sampling={"max_tokens": 4})
    with pytest.raises(
        jv.errors.RewardError, match="TypeError: 'NoneType' object is not subscriptable"
    ) as caught:
        train(lab, *engine, tmp_path / "run", task=task, background=True).wait(300)
    lines = str(caught.value.fields["traceback"]).splitlines()
    assert "test_grpo.py" in lines[1]
    assert "in broken" in lines[1]
    summary = Record.open(tmp_path / "run").summary()
    assert (summary["ended"], summary["steps"]) == ("failed", 0)
    assert summary["samples"] <= 16, "no more than the groups of the first step"


def test_a_held_out_prompt_is_answered_once(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    run = train(
        lab,
        *engine,
        tmp_path / "run",
        steps=1,
        evaluate=tasks.digits(),
        background=True,
    ).wait(300)
    assert [e.samples for e in run.record.events("evaluation")] == [1, 1]  # type: ignore[attr-defined]


@pytest.mark.soak  # without an engine: tests/trainer/test_loop.py
def test_one_seed_gives_the_same_tokens_and_losses(
    whole: Run, lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    same(train(lab, *engine, tmp_path / "run").record, whole.record)


def test_kill_9_and_resume_go_on_exactly(
    whole: Run, lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    pool, model = engine
    for link in list(pool.links):
        link.close()  # the pool is the other process's for a while
    address = [lab.address, lab._token, pool.name, model, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-m", "tests.live.grpo_script", *address],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert Record.open(tmp_path / "run").steps()["step"].tolist() == [0, 1, 2]
    resumed = train(lab, pool, model, tmp_path / "run", checkpoint_every=2, resume=True)
    assert resumed.record.events("run_start")[1].resumed == 2  # type: ignore[attr-defined]
    same(resumed.record, whole.record)


def test_asynchronous_stays_in_its_bound(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    run = train(lab, *engine, tmp_path / "run", max_staleness=2, steps=8)
    record, s = run.record, run.record.summary()
    assert s["steps"] == 8
    assert s["syncs_verified"] == s["syncs"] == 9
    for step in record.events("step"):
        assert all(0 <= age <= 2 for age in step.staleness)  # type: ignore[attr-defined]
    assert 1 <= s["max_staleness"] <= 2
    assert s["time"]["overlap"] > 0, "rollouts and training overlapped"
    assert np.isfinite(record.steps()["logprob_gap"]).all()
    assert s["logprob_gap"] < 1e-3
    assert s["samples"] <= (8 + 1) * 16, "no rollouts that no step would take"


def test_a_game_of_several_turns(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    run = train(lab, *engine, tmp_path / "run", task=tasks.guess_number(), steps=2)
    record = run.record
    assert record.summary()["logprob_gap"] < 1e-3, (
        "observations and turns line up with what the engine saw"
    )
    seen = [s for s in record.samples() if 0 in s.mask]
    assert seen, "some game had an observation"
    for sample in seen:
        mask = np.array(sample.mask, bool)
        assert (sample.token_versions[~mask] == -1).all()
        assert (sample.token_versions[mask] >= 0).all()


def test_a_replica_killed_mid_run_costs_a_note_not_the_run(lab: jv.Lab, tmp_path: Path):
    """kill -9 of one of two replicas while both generate: the run ends, on what the other one makes."""
    model = jv.models.tiny("llama", vocab_size=288)
    pool = lab.launch(model, load="dummy", replicas=2).wait()
    try:
        run = train(
            lab,
            pool,
            model,
            tmp_path / "run",
            steps=8,
            max_staleness=1,
            background=True,
        )
        deadline = time.monotonic() + 300
        while run.status.step < 2 and not run.done:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        victim = pool.status()["replicas"][1]
        os.killpg(os.getpgid(victim["pid"]), signal.SIGKILL)
        run.wait(240)
        summary = run.record.summary()
        assert (summary["steps"], summary["ended"]) == (8, "finished")
        assert summary["faults"], "the death is on record"
        assert summary["logprob_gap"] < 1e-3, (
            "what was trained on is what the engine made"
        )
        assert summary["max_staleness"] <= 1
        status = pool.status()
        assert status["healthy"] == 1
        assert [r["version"] for r in status["replicas"] if r["state"] == "ready"] == [
            run.status.version
        ]
    finally:
        pool.close()

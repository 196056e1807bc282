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
from tests.sync.team_processes import free_port

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


class Count:
    """An environment in TRL's style: a tool that adds, and a reward for what was added."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.total = start
        return f" Start at {start}."

    def add(self, number: int) -> str:
        """
        Adds a number.

        Args:
            number: What to add.
        """
        self.total += number
        return f"{self.total} now"

    def get_reward(self) -> float:
        return self.total / 10


def test_an_environment_with_tools(
    lab: jv.Lab,
    engine: tuple[jv.Pool, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Random weights call no tool: here each turn with an even number of tokens counts as a call."""
    from jvlab.trainer import _groups
    from tests.trainer.test_tool_environments import TEMPLATE

    pool, model = engine
    tokenizer = _groups.model_tokenizer(model)
    called = {"function": {"name": "add", "arguments": {"number": 1}}}
    parse = lambda ids: {"tool_calls": [called] if len(ids) % 2 == 0 else []}
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "response_template", "", raising=False)
    monkeypatch.setattr(tokenizer, "parse_response", parse, raising=False)
    rows = [{"prompt": "Count.", "start": n} for n in (1, 2)]
    task = jv.Task.from_dataset(
        rows,
        environment=Count,
        sampling={"max_tokens": 4, "stop_token_ids": [*range(5, 200)]},
    )
    run = train(lab, pool, model, tmp_path / "run", task=task, steps=2, max_turns=3)
    record = run.record
    assert record.summary()["logprob_gap"] < 1e-3, "turns line up with what was sampled"
    assert record.summary()["faults"] == {}
    several = [s for s in record.samples() if 0 in s.mask]
    assert several, "some episode called a tool"
    for sample in several:
        mask = np.array(sample.mask, bool)
        shown = tokenizer.decode(np.array(sample.tokens)[~mask])
        assert "<|im_start|>tool\n" in shown
        assert " now<|im_end|>" in shown
        assert (sample.token_versions[~mask] == -1).all()
        assert (np.array(sample.logprobs)[~mask] == 0).all()
        assert sample.reward > 0.1


def digits_share(completions: list[Any], **columns: Any) -> list[float]:
    texts = [c[0]["content"] for c in completions]
    return [sum(c.isdigit() for c in t) / max(1, len(t)) for t in texts]


async def brief_enough(completion_ids: list[Any], completions: Any, most: Any) -> Any:
    return [
        None if m is None else float(len(c) <= m)
        for c, m in zip(completion_ids, most, strict=True)
    ]


def test_what_people_bring(lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path):
    """Rows of a dataset with chats, rewards in TRL's signature, and a report, on a real engine."""
    chat = [{"role": "user", "content": "Digits, please."}]
    rows = [{"prompt": chat, "most": 8}, {"prompt": chat, "most": None}]
    calls: list[tuple[dict[str, float], int]] = []
    run = train(
        lab,
        *engine,
        tmp_path / "run",
        task=jv.Task.from_dataset(
            rows,
            reward=[digits_share, brief_enough],
            weights=[1.0, 0.1],
            sampling={"max_tokens": 12},
        ),
        steps=2,
        report_to=lambda metrics, step: calls.append((metrics, step)),
    )
    assert run.record.summary()["faults"] == {}
    assert [step for _, step in calls] == [1, 2]
    assert "rewards/digits_share/mean" in calls[0][0]
    asked = [s.reward_parts for s in run.record.samples() if s.group % 2 == 0]
    assert all(set(p) == {"digits_share", "brief_enough"} for p in asked)
    other = [s.reward_parts for s in run.record.samples() if s.group % 2]
    assert all(set(p) == {"digits_share"} for p in other)
    first = run.record.samples()[0]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine[1])
    wanted = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert list(first.prompt_tokens) == list(wanted), "the model's own template"


def test_the_only_replica_killed_mid_run_is_waited_for(lab: jv.Lab, tmp_path: Path):
    """kill -9 while it generates: its pool starts it again, the run sends it the weights, and goes on by itself."""
    model = jv.models.tiny("llama", vocab_size=288)
    pool = lab.launch(model, load="dummy", restarts=1).wait()
    try:
        run = train(
            lab,
            pool,
            model,
            tmp_path / "run",
            steps=6,
            max_staleness=0,
            background=True,
        )
        deadline = time.monotonic() + 300
        while run.status.step < 2 and not run.done:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        victim = pool.status()["replicas"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        run.wait(480)
        summary = run.record.summary()
        assert (summary["steps"], summary["ended"]) == (6, "finished")
        assert summary["logprob_gap"] < 1e-3, (
            "what was trained on is what the engine made, with the weights it had got again"
        )
        assert summary["max_staleness"] == 0
        (row,) = pool.status()["replicas"]
        assert (row["restarts"], row["version"]) == (1, run.status.version)
    finally:
        pool.close()


def test_a_replica_killed_mid_run_costs_a_note_not_the_run(lab: jv.Lab, tmp_path: Path):
    """kill -9 of one of two replicas while both generate: the run ends, on what the other one makes."""
    model = jv.models.tiny("llama", vocab_size=288)
    pool = lab.launch(model, load="dummy", replicas=2, restarts=0).wait()
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


@pytest.mark.soak
def test_two_trainer_processes(
    lab: jv.Lab, engine: tuple[jv.Pool, str], tmp_path: Path
):
    """Each sends the shards it holds; losses as in one process on the same mesh; a policy that transformers loads."""
    pool, model = engine
    records = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
        }
        port = f"127.0.0.1:{free_port()}"
        run = [sys.executable, "-m", "tests.live.grpo_script", lab.address, lab._token]
        run += [pool.name, model, str(folder), str(processes)]
        team = [
            subprocess.Popen(
                [*run, str(k), port],
                env=env,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for k in range(processes)
        ]
        try:
            for process in team:
                said, _ = process.communicate(timeout=400)
                assert said.splitlines()[-1] == "finished after 3", said
        finally:
            for process in team:
                process.kill()
                process.communicate()
        records.append(Record.open(folder))
    one, two = records
    [start] = two.events("run_start")
    assert start.config["processes"] == 2  # type: ignore[attr-defined]
    for name in ("loss", "grad_norm", "reward_mean", "entropy"):
        there = one.steps()[name]
        np.testing.assert_allclose(two.steps()[name], there, atol=1e-5, err_msg=name)
    assert two.summary()["syncs_verified"] == 4
    assert np.nanmax(two.steps()["logprob_gap"]) < 1e-3
    saved = jv.Policy.from_pretrained(str(tmp_path / "2" / "last"))
    alone = jv.Policy.from_pretrained(str(tmp_path / "1" / "last"))
    kernel = lambda policy: np.asarray(policy.params["lm_head"]["kernel"])
    np.testing.assert_allclose(kernel(saved), kernel(alone), atol=1e-5)

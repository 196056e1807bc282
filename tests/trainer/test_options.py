"""What users of any trainer expect: schedules by name, evaluation, best and last, comparison, KL with packing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.engine._defaults import usable_cores
from jvlab.record._events import RunStart
from jvlab.trainer._compile_cache import compile_cache_bytes
from jvlab.trainer._grpo import grpo
from jvlab.trainer._grpo_config import GrpoConfig
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._run import Run
from jvlab.trainer._step import schedule
from jvlab.trainer._tasks import Task
from tests.trainer.fake_pool import (
    FakeLink,
    FakePool,
    fresh_params,
    logprobs_fn,
    share,
    task,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "group_size": 4,
    "prompts_per_step": 3,
    "learning_rate": 0.05,
    "checkpoint_every": 0,
    "background": False,
}


def train(
    folder: Path,
    steps: int,
    pool: FakePool | None = None,
    link: FakeLink | None = None,
    **options: Any,
) -> Run:
    pool = pool or FakePool()
    given = {**SETTINGS, **options}
    policy = given.pop("policy", (fresh_params(), logprobs_fn))
    return grpo(
        policy,
        pool,  # type: ignore
        link or FakeLink(pool),  # type: ignore
        task(),
        steps=steps,
        folder=folder,
        **given,
    )


class TablePolicy:
    """What `jv.grpo` needs of a policy, with the table as its checkpoint."""

    def __init__(self) -> None:
        self.params = fresh_params()

    def logprobs_fn(
        self, params: Any, tokens: Any, mask: Any, temperature: float = 1.0
    ) -> Any:
        return logprobs_fn(params, tokens, mask)

    def save_pretrained(self, folder: Path) -> str:
        Path(folder).mkdir(parents=True)
        np.save(Path(folder) / "table.npy", self.params["table"])
        return str(folder)


def saved(folder: Path) -> np.ndarray:
    return np.load(folder / "table.npy")


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_by_name(tmp_path: Path, kind: str):
    run = train(tmp_path / "run", 6, schedule=kind, warmup=2)
    wanted = [float(schedule(0.05, kind, 2, 6)(i)) for i in range(6)]
    np.testing.assert_allclose(run.record.steps()["learning_rate"], wanted, rtol=1e-6)
    assert wanted[0] == pytest.approx(0.025)
    config = run.record.events("run_start")[0].config  # type: ignore[attr-defined]
    assert (config["schedule"], config["warmup"]) == (kind, 2)


def test_a_skipped_update_does_not_move_the_schedule(tmp_path: Path):
    def poisoned(params: Any, tokens: Any, mask: Any) -> Any:
        return logprobs_fn(params, tokens, mask) + jnp.where(
            (tokens[:, :1] == 4) & mask, jnp.nan, 0.0
        )

    # step 1 has a prompt of 4
    run = train(
        tmp_path / "run", 4, policy=(fresh_params(), poisoned), schedule="linear"
    )
    rates = run.record.steps()["learning_rate"]
    assert run.record.steps()["skipped"].tolist() == [False, True, False, False]
    assert rates[1] == rates[2], "the second update is made by the third step"
    assert run._loop.state.updates == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"schedule": "square"}, "'constant', 'linear', 'cosine'"),
        ({"schedule": "cosine", "warmup": 6}, "steps above warmup"),
        ({"warmup": -1}, "warmup=-1"),
        (
            {"schedule": "cosine", "learning_rate": lambda n: 0.1},
            "optimizer or learning_rate has its own",
        ),
        ({"schedule": "cosine", "optimizer": "any"}, "optimizer or learning_rate"),
        ({"evaluate": [1, 2]}, "evaluate is list"),
        ({"evaluate": Task([[1]], share), "every": 0}, "every=0"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, wrong: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path / "run", 4, **wrong)
    assert not (tmp_path / "run").exists()


NAN, INF = float("nan"), float("inf")
# option: values that are refused where they enter
WRONG: dict[str, tuple[Any, ...]] = {
    "steps": (0, -1, 2.5, "5", True, None),
    "max_staleness": (-1, 0.5, "1", None),
    "algorithm": (5, None, "grop"),
    "group_size": (0, -2, 1, 2.0, True),
    "prompts_per_step": (0, -1, "3", None),
    "learning_rate": (
        -1.0,
        NAN,
        INF,
        "1e-4",
        None,
        True,
        lambda n: -1.0,
        lambda n: "fast",
        lambda: 0.1,
    ),
    "schedule": ("square", 3, None),
    "warmup": (-1, 1.5, "2"),
    "optimizer": ("adam", 3),
    "max_grad_norm": (0.0, -1.0, NAN, "1"),
    "seed": (-1, 1.5, "7", None),
    "max_tokens": (0, -5, 2.5, "64"),
    "temperature": (0.0, -1.0, NAN, INF, "1", None),
    "sampling": ("top_p=0.9", 3, {"max_tokens": 5}, {1: 2}),
    "micro_batch": (0, -1, 1.5, "16"),
    "token_budget": (0, -1, 1.5, "16"),
    "on_stale": ("keep", None),
    "replay": ("yes", True),
    "max_turns": (0, -1, 1.5),
    "folder": (5, ""),
    "checkpoint_every": (-1, 1.5, None),
    "keep_checkpoints": (0, -1, 1.5, "3"),
    "evaluate": (5, [1, 2], "no such task"),
    "every": (0, -1, 1.5),
    "evaluate_prompts": (0, -1, 1.5),
    "resume": ("runs/first", 1, None, "automatic"),
    "gap_alarm": (0.0, -1.0, NAN, "1"),
    "keep_samples": (-1, 1.5, "all"),
    "sinks": (print, [1], "print"),
    "report_to": ("tensorbord", 3, ["wandb", "no"]),
    "sync": ("staged", 5, {"modus": 1}),
    "sleep": ("yes", 1),
    "background": ("yes", 0),
    "progress": ("yes", 3),
    "reference": ("a pool", {"table": np.zeros(3)}),
}


class StrictLink(FakeLink):
    """Knows its options, as a real one does."""

    def sync(
        self,
        params: Any,
        version: int,
        *,
        progress: bool = False,
        verify: str = "",
        pause: str = "",
    ) -> Any:
        return super().sync(params, version)


def test_every_option_has_wrong_values():
    unchecked = {"max_staleness", "steps"} | {
        field.name for field in dataclasses.fields(GrpoConfig)
    }
    assert set(WRONG) == unchecked


@pytest.mark.parametrize("option", WRONG)
def test_absurd_options_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
):
    monkeypatch.chdir(tmp_path)
    for value in WRONG[option]:
        pool = FakePool()
        given = {**SETTINGS, "steps": 2, "folder": tmp_path / "run", option: value}
        if option == "reference":
            given["algorithm"] = Algorithm.named("grpo", kl_coef=0.1)
        with pytest.raises(ConfigError) as caught:
            grpo((fresh_params(), logprobs_fn), pool, StrictLink(pool), task(), **given)  # type: ignore[arg-type]
        assert caught.value.remedy, value
        named = "task" if value == "no such task" else option
        assert named in str(caught.value), (value, caught.value)
        assert list(tmp_path.iterdir()) == [], value
        assert (pool.calls, pool.steered) == (0, []), "neither a rollout nor a sync"


def test_an_algorithm_without_groups_may_have_one_sample_each(tmp_path: Path):
    run = train(tmp_path / "run", 2, group_size=1, algorithm="reinforce++")
    assert run.status.state == "finished"


def test_a_completion_that_cannot_fit_the_engine_is_refused(tmp_path: Path):
    pool = FakePool()
    facts = SimpleNamespace(
        max_model_len=64,
        sampling_names=["top_p", "max_tokens", "temperature"],
        batch_invariant=0,
    )
    pool.facts = lambda: facts  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"max_tokens=64, but the engine's context holds 64 tokens"
    ):
        train(tmp_path / "run", 2, pool, max_tokens=64)
    with pytest.raises(ConfigError, match=r"did you mean 'top_p'"):
        train(tmp_path / "run", 2, pool, sampling={"top_pp": 0.9})
    assert not (tmp_path / "run").exists()


def test_a_misspelt_folder_to_resume_is_refused(tmp_path: Path):
    train(tmp_path / "first", 2, checkpoint_every=1)
    with pytest.raises(
        ConfigError, match=r"frist holds no run to resume\n.*did you mean 'first'"
    ):
        train(tmp_path / "frist", 4, resume=True, checkpoint_every=1)
    assert not (tmp_path / "frist").exists()
    run = train(tmp_path / "first", 4, resume="auto", checkpoint_every=1)
    assert (run.record.events("run_start")[-1].resumed, run.status.step) == (2, 4)  # type: ignore[attr-defined]
    run = train(tmp_path / "second", 2, resume="auto")
    assert run.record.events("run_start")[0].resumed == -1  # type: ignore[attr-defined]


def no_parameters() -> float:
    return 1.0


async def asynchronous(sample: Any, example: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"reward": no_parameters},
            r"called as reward\(sample, example\), but it is no_parameters\(\)",
        ),
        ({"reward": lambda sample: 1.0}, r"called as reward\(sample, example\)"),
        (
            {"reward": None, "environment": lambda example: None},
            r"called as environment\(\)",
        ),
        ({"name": 5}, "name=5"),
        *[({"timeout": value}, "timeout=") for value in (0, -1.0, NAN, "30")],
        *[({"processes": value}, "processes=") for value in (-1, 1.5, "2", None)],
        *[({"workers": value}, "workers=") for value in (0, -1, 1.5, "2")],
        *[({"seed": value}, "seed=") for value in (-1, 1.5, "x", None)],
        ({"shuffle": "yes"}, "shuffle="),
        ({"sampling": "max_tokens"}, "sampling is"),
        *[
            ({"sampling": {"max_tokens": value}}, "max_tokens=")
            for value in (0, -1, 1.5, "9")
        ],
    ],
)
def test_absurd_tasks_are_refused_where_they_are_made(wrong: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        Task(**{"prompts": ["a"], "reward": share, **wrong})
    assert caught.value.remedy


def test_a_reward_that_cannot_run_in_processes_is_refused_before_the_run(
    tmp_path: Path,
):
    for reward in (asynchronous, lambda sample, example: 1.0):
        pool = FakePool()
        what = task(reward, processes=1)
        with pytest.raises(ConfigError, match="process"):
            grpo(
                (fresh_params(), logprobs_fn),
                pool,  # type: ignore
                FakeLink(pool),  # type: ignore
                what,
                folder=tmp_path / "run",
                **SETTINGS,
            )
        assert not (tmp_path / "run").exists()


def held_out() -> Task:
    return Task([[t] for t in (2, 5, 9)], share, name="held out")


def test_held_out_prompts_are_answered_every_few_steps(tmp_path: Path):
    policy, pool = TablePolicy(), FakePool()
    seen: dict[int, np.ndarray] = {0: np.array(policy.params["table"])}
    keep = lambda event: seen.__setitem__(
        event.step + 1, np.array(policy.params["table"])
    )
    options: dict[str, Any] = {
        "evaluate": held_out(),
        "every": 4,
        "evaluate_prompts": 3,
        "learning_rate": 0.3,
    }
    run = train(tmp_path / "run", 10, pool, policy=policy, progress=keep, **options)
    events: list[Any] = run.record.events("evaluation")
    assert [e.step for e in events] == [0, 4, 8, 10], (
        "before the first step, every fourth, and at the end"
    )
    assert [e.version for e in events] == [1, 5, 9, 11]
    assert all(e.samples == 3 and e.failed == 0 for e in events)
    means = [e.reward_mean for e in events]
    assert means[-1] > means[0]
    assert [e.best for e in events] == [
        m > max(means[:i], default=-1) for i, m in enumerate(means)
    ]
    best = max(e.step for e in events if e.best)
    np.testing.assert_array_equal(saved(tmp_path / "run" / "best"), seen[best])
    np.testing.assert_array_equal(saved(tmp_path / "run" / "last"), run.params["table"])
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir()) == [
        "best",
        "last",
    ]
    assert run.record.summary()["samples"] == 10 * 12, (
        "evaluations are no samples of the training"
    )


@pytest.mark.parametrize(
    ("what", "answered"),
    [
        (Task([[2]], share), 1),
        (Task([[t] for t in (2, 5, 9)], share, shuffle=True), 3),
        (Task([[2], [2]], share), 2),  # asked for twice
        (Task(iter([[2], [5]]), share), 2),
        (Task(lambda index: [4], share), 1),
        (Task(lambda index: {"prompt": [4], "level": index % 3}, share), 3),
        # which cannot be compared
        (Task(lambda index: {"prompt": [4], "check": lambda: index}, share), 32),
        (task(), 11),
    ],
)
def test_held_out_prompts_are_answered_once_each(
    tmp_path: Path, what: Task, answered: int
):
    run = train(tmp_path / "run", 1, evaluate=what)
    assert [e.samples for e in run.record.events("evaluation")] == [answered, answered]  # type: ignore[attr-defined]
    assert what.position == 0


def test_a_resumed_run_keeps_its_best(tmp_path: Path):
    options: dict[str, Any] = {
        "evaluate": held_out(),
        "every": 1,
        "evaluate_prompts": 3,
        "checkpoint_every": 1,
    }
    train(tmp_path / "run", 4, policy=TablePolicy(), learning_rate=0.3, **options)
    before = saved(tmp_path / "run" / "best")
    rewards = iter([0.0] * 100)
    worse = Task(
        [[t] for t in (2, 5, 9)], lambda sample, example: next(rewards), name="held out"
    )
    options["evaluate"] = worse
    run = train(tmp_path / "run", 5, policy=TablePolicy(), resume=True, **options)
    np.testing.assert_array_equal(saved(tmp_path / "run" / "best"), before)
    late: list[Any] = run.record.events("evaluation")[-2:]
    assert [(e.step, e.best) for e in late] == [(4, False), (5, False)]


def test_runs_side_by_side(tmp_path: Path):
    one = train(tmp_path / "one", 4, evaluate=held_out(), every=2, evaluate_prompts=3)
    two = train(tmp_path / "two", 3, learning_rate=0.2)
    figure = one.compare(two, two.record)
    axes: Any = figure.axes
    curves = axes[0].lines
    assert [line.get_label() for line in curves] == ["one", "two", "two (3)"]
    assert [len(line.get_xdata()) for line in curves] == [4, 3, 3]
    np.testing.assert_allclose(curves[0].get_ydata(), one.record.steps()["reward_mean"])
    evaluations = next(
        ax
        for ax in axes
        if ax.get_title(loc="left") + ax.get_title() == "Held-out prompts"
    )
    assert [len(line.get_xdata()) for line in evaluations.lines] == [3]
    assert two.compare(two).axes, "without any evaluation too"


def packing(params: Any, tokens: Any, mask: Any = None, segments: Any = None) -> Any:
    """The bigram model over rows of several samples: a sample's first token has no log-probability."""
    scores = jax.nn.log_softmax(params["table"][tokens[:, :-1]])
    found = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    if segments is not None:
        found = jnp.where(
            (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), found, 0.0
        )
    return jnp.pad(found, ((0, 0), (1, 0)))


@pytest.mark.parametrize("kind", ["tree", "pool"])
def test_a_kl_reference_with_packing(tmp_path: Path, kind: str):
    reference = None
    if kind == "pool":
        reference = FakePool()
        reference.hold(fresh_params(), 1)
    options: dict[str, Any] = {
        "algorithm": Algorithm.named("grpo", kl_coef=0.1),
        "reference": reference,
    }
    options["policy"] = (fresh_params(), packing)
    packed = train(tmp_path / "packed", 4, token_budget=48, **options).record
    padded = train(tmp_path / "padded", 4, micro_batch=4, **options).record
    for name in ("loss", "kl", "grad_norm", "reward_mean"):
        np.testing.assert_allclose(
            packed.steps()[name],
            padded.steps()[name],
            rtol=1e-3,
            atol=1e-5,
            err_msg=name,
        )
    assert packed.steps()["kl"][0] == pytest.approx(0, abs=1e-6)
    assert (packed.steps()["kl"][1:] > 0).all()
    assert max(e.extra["padding"] for e in packed.events("step")) < min(
        e.extra["padding"] for e in padded.events("step")
    )
    laid = packed.events("step")[0].extra  # what a forecast lays samples into rows with
    assert (laid["token_budget"], laid["short_rows"]) == (48, True)
    assert 0 < laid["row_length"] <= 48
    assert "token_budget" not in padded.events("step")[0].extra
    began = packed.events("run_start")[0]
    assert isinstance(began, RunStart)
    assert began.config["cores"] == len(usable_cores())


SCRIPT = """
import json, sys
import jax
missed = []
jax.monitoring.register_event_listener(lambda name, **_: missed.append(name) if "cache_miss" in name else None)
from tests.trainer.loop_script import go
run = go(sys.argv[1], 3, schedule="cosine")
print(json.dumps({"missed": len(missed), "compiled": sum(e.extra["compiled"] for e in run.record.events("step"))}))
"""


def test_a_second_run_of_a_script_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for name in ("first", "second"):
        environment = {**os.environ, "JVLAB_COMPILE_CACHE": str(tmp_path / "programs")}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / name)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0]["missed"] > 3
    monkeypatch.setenv("JVLAB_COMPILE_CACHE", str(tmp_path / "programs"))
    assert compile_cache_bytes() > 1000
    assert found[1]["missed"] == 0, "every program came from the folder"
    assert found[0]["compiled"] == found[1]["compiled"], "of the same programs"

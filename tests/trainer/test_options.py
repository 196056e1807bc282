"""What users of any trainer expect: schedules by name, evaluation, best and last, comparison, KL with packing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.record._events import RunStart
from jvlab.rollout._defaults import usable_cores
from jvlab.trainer._compile_cache import compile_cache_bytes
from jvlab.trainer._grpo import grpo
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._run import Run
from jvlab.trainer._step import schedule
from jvlab.trainer._tasks import Task
from tests.trainer.fake_pool import FakeLink, FakePool, fresh_params, logprobs_fn, share, task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "group_size": 4,
    "prompts_per_step": 3,
    "learning_rate": 0.05,
    "checkpoint_every": 0,
    "background": False,
}


def train(folder: Path, steps: int, pool: FakePool | None = None, link: FakeLink | None = None, **options: Any) -> Run:
    pool = pool or FakePool()
    given = {**SETTINGS, **options}
    policy = given.pop("policy", (fresh_params(), logprobs_fn))
    return grpo(policy, pool, link or FakeLink(pool), task(), steps=steps, folder=folder, **given)  # type: ignore[arg-type]


class TablePolicy:
    """What `jv.grpo` needs of a policy, with the table as its checkpoint."""

    def __init__(self) -> None:
        self.params = fresh_params()

    def logprobs_fn(self, params: Any, tokens: Any, mask: Any, temperature: float = 1.0) -> Any:
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
        return logprobs_fn(params, tokens, mask) + jnp.where((tokens[:, :1] == 4) & mask, jnp.nan, 0.0)

    run = train(tmp_path / "run", 4, policy=(fresh_params(), poisoned), schedule="linear")  # step 1 has a prompt of 4
    rates = run.record.steps()["learning_rate"]
    assert run.record.steps()["skipped"].tolist() == [False, True, False, False]
    assert rates[1] == rates[2], "the second update is made by the third step"
    assert run._loop.state.updates == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"schedule": "square"}, "constant, linear, cosine"),
        ({"schedule": "cosine", "warmup": 6}, "steps above warmup"),
        ({"warmup": -1}, "warmup=-1"),
        ({"schedule": "cosine", "learning_rate": lambda n: 0.1}, "learning_rate, a function"),
        ({"schedule": "cosine", "optimizer": "any"}, "the optimizer"),
        ({"evaluate": [1, 2]}, "evaluate is list"),
        ({"evaluate": Task([[1]], share), "every": 0}, "every=0"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path, wrong: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path / "run", 4, **wrong)
    assert not (tmp_path / "run").exists()


def held_out() -> Task:
    return Task([[t] for t in (2, 5, 9)], share, name="held out")


def test_held_out_prompts_are_answered_every_few_steps(tmp_path: Path):
    policy, pool = TablePolicy(), FakePool()
    seen: dict[int, np.ndarray] = {0: np.array(policy.params["table"])}
    keep = lambda event: seen.__setitem__(event.step + 1, np.array(policy.params["table"]))
    options: dict[str, Any] = {"evaluate": held_out(), "every": 4, "evaluate_prompts": 3, "learning_rate": 0.3}
    run = train(tmp_path / "run", 10, pool, policy=policy, progress=keep, **options)
    events: list[Any] = run.record.events("evaluation")
    assert [e.step for e in events] == [0, 4, 8, 10], "before the first step, every fourth, and at the end"
    assert [e.version for e in events] == [1, 5, 9, 11]
    assert all(e.samples == 3 and e.failed == 0 for e in events)
    means = [e.reward_mean for e in events]
    assert means[-1] > means[0]
    assert [e.best for e in events] == [m > max(means[:i], default=-1) for i, m in enumerate(means)]
    best = max(e.step for e in events if e.best)
    np.testing.assert_array_equal(saved(tmp_path / "run" / "best"), seen[best])
    np.testing.assert_array_equal(saved(tmp_path / "run" / "last"), run.params["table"])
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir()) == ["best", "last"]
    assert run.record.summary()["samples"] == 10 * 12, "evaluations are no samples of the training"


def test_a_resumed_run_keeps_its_best(tmp_path: Path):
    options: dict[str, Any] = {"evaluate": held_out(), "every": 1, "evaluate_prompts": 3, "checkpoint_every": 1}
    train(tmp_path / "run", 4, policy=TablePolicy(), learning_rate=0.3, **options)
    before = saved(tmp_path / "run" / "best")
    rewards = iter([0.0] * 100)
    worse = Task([[t] for t in (2, 5, 9)], lambda sample, example: next(rewards), name="held out")
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
    evaluations = next(ax for ax in axes if ax.get_title(loc="left") + ax.get_title() == "Held-out prompts")
    assert [len(line.get_xdata()) for line in evaluations.lines] == [3, 0, 0]
    assert two.compare(two).axes, "without any evaluation too"


def packing(params: Any, tokens: Any, mask: Any = None, segments: Any = None) -> Any:
    """The bigram model over rows of several samples: a sample's first token has no log-probability."""
    scores = jax.nn.log_softmax(params["table"][tokens[:, :-1]])
    found = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    if segments is not None:
        found = jnp.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), found, 0.0)
    return jnp.pad(found, ((0, 0), (1, 0)))


@pytest.mark.parametrize("kind", ["tree", "pool"])
def test_a_kl_reference_with_packing(tmp_path: Path, kind: str):
    reference = None
    if kind == "pool":
        reference = FakePool()
        reference.hold(fresh_params(), 1)
    options: dict[str, Any] = {"algorithm": Algorithm.named("grpo", kl_coef=0.1), "reference": reference}
    options["policy"] = (fresh_params(), packing)
    packed = train(tmp_path / "packed", 4, token_budget=48, **options).record
    padded = train(tmp_path / "padded", 4, micro_batch=4, **options).record
    for name in ("loss", "kl", "grad_norm", "reward_mean"):
        np.testing.assert_allclose(packed.steps()[name], padded.steps()[name], rtol=1e-3, atol=1e-5, err_msg=name)
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


def test_a_second_run_of_a_script_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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

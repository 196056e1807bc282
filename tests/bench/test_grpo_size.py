"""`bench grpo` of a model of size: its rows, its keys, a peer that is missing; the engine itself is a fake here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jvlab._errors import ConfigError, MissingDependency
from jvlab.bench import _grpo
from jvlab.bench._floors import floor_bytes, kernel_ms, sizes_of
from jvlab.bench._grpo import (
    DrawnLengths,
    drawn_lengths,
    facts_of,
    jvlab_rows,
    reward_of,
    run_bench_grpo_size,
)
from jvlab.bench._train import QWEN3_1_7B
from jvlab.cli._cli import main
from jvlab.trainer._tasks import Task
from tests.trainer.fake_pool import VOCAB, FakeLink, FakePool, fresh_params, logprobs_fn

pytestmark = pytest.mark.slow


class LongWinded(FakePool):
    """Says as much as it may."""

    async def agenerate(
        self, prompts: Any, n: int = 1, *, ignore_eos: bool, **options: Any
    ) -> Any:
        assert ignore_eos
        return await super().agenerate(prompts, n, **options)

    def hold(self, params: Any, version: int) -> None:
        super().hold(params, version)
        self.scores[:, 0] = -40.0  # never the end


def test_rows_of_each_length_and_bound(tmp_path: Path):
    pool = LongWinded(delay=0.001)
    task = Task(
        lambda i: [1 + i % (VOCAB - 1)], lambda s, e: reward_of(s.text), name="size"
    )
    order = {"tokens": [4, 9], "bounds": [0, 1], "steps": 2, "scratch": str(tmp_path)}
    rows = list(
        jvlab_rows(order, (fresh_params(), logprobs_fn), pool, FakeLink(pool), task)
    )
    assert [(r["tokens"], r["max_staleness"]) for r in rows] == [
        (4, 0),
        (4, 1),
        (9, 0),
        (9, 1),
    ]
    for row in rows:
        assert len(row["steps_s"]) == 2
        assert row["tokens_trained"] == 64 * row["tokens"]
        assert row["compiled"] == 0, "the first step compiled everything"
        assert row["staleness_max"] <= row["max_staleness"]
        parts = row["seconds"]
        alone = sum(
            parts[k] for k in ("generate", "score", "reward", "train", "sync", "idle")
        )
        assert alone >= sum(row["steps_s"]) / 2 - 1e-6, (
            "phases and idle cover a step; where they overlap, twice"
        )
        assert row["tokens_per_s"] == pytest.approx(
            row["tokens_trained"] / row["step_s"]
        )
        json.dumps(row)
    facts = facts_of(
        rows, [{"tokens": 9, "max_staleness": 0, "step_s": 7.0, "who": "TRL"}]
    )
    assert facts["vs_trl_ratio_9"] == pytest.approx(7.0 / facts["step_s_9"])
    assert facts["vs_trl_ratio_9_k1"] == pytest.approx(7.0 / facts["step_s_9_k1"])
    assert facts["k1_vs_k0_ratio_4"] == pytest.approx(
        facts["step_s_4"] / facts["step_s_4_k1"]
    )
    assert facts["first_step_s_4"] > 0
    assert "vs_trl_ratio_4" not in facts
    assert len(facts["runs"]) == 5


def test_rows_of_drawn_lengths(tmp_path: Path):
    order = {"tokens": [40], "bounds": [0], "steps": 2, "scratch": str(tmp_path)}
    pool = LongWinded()
    task = Task(
        lambda i: [1 + i % (VOCAB - 1)], lambda s, e: reward_of(s.text), name="size"
    )
    policy = (fresh_params(), logprobs_fn)
    link = FakeLink(pool)
    (row,) = jvlab_rows(order | {"drawn": True}, policy, pool, link, task)
    lengths = DrawnLengths(40)
    steps = [sum(lengths.next(64)) for _ in range(3)]
    assert row["tokens_trained"] == pytest.approx(sum(steps[1:]) / 2, abs=1)


def test_a_peer_gets_the_same_lengths():
    """One sample of each prompt, parameters of its own for each, and the caller's are left as they were."""
    from vllm import SamplingParams

    asked: list[Any] = []
    generate = drawn_lengths(
        lambda prompts, sampling_params, use_tqdm: asked.extend(sampling_params), 3000
    )
    params = SamplingParams(n=1, max_tokens=3000, ignore_eos=True)
    for _ in range(2):
        generate(["a"] * 64, sampling_params=params, use_tqdm=False)
    lengths = DrawnLengths(3000)
    assert [p.max_tokens for p in asked] == lengths.next(64) + lengths.next(64)
    assert all(p.ignore_eos for p in asked)
    assert params.max_tokens == 3000
    assert len({p.max_tokens for p in asked}) > 64, "no two steps alike"
    assert min(p.max_tokens for p in asked) >= 8


def test_what_decoding_must_read():
    """Counted from a model's own tensors: all but the embedding and the norms are multiplied with."""
    sizes = sizes_of(QWEN3_1_7B)
    assert sizes["layers"] + sizes["head"] == 1_476_395_008
    assert sizes["kv"] == 28 * 2 * 8 * 128
    few = floor_bytes(sizes, 1, eight=False)
    assert few == 2 * 1_476_395_008 + 64 * 0.5 * sizes["kv"] * 2
    eight = floor_bytes(sizes, 1, eight=True)
    assert eight == pytest.approx(few / 2 + sizes["head"])


def test_kernels_by_what_they_do():
    events = [
        {"cat": "kernel", "name": "flash::FlashAttnFwd", "dur": 30.0},
        {"cat": "kernel", "name": "nvjet_sm90_tst", "dur": 20.0},
        {"cat": "kernel", "name": "_gumbel_sample_kernel", "dur": 8.0},
        {"cat": "kernel", "name": "triton_poi_fused_4", "dur": 2.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 500.0},
    ]
    assert kernel_ms(events, tokens=10) == pytest.approx(
        {"attention": 0.003, "matmul": 0.002, "sampling": 0.0008, "other": 0.0002}
    )


def test_a_peer_that_is_missing_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = {
        "who": "jvlab",
        "tokens": 4,
        "max_staleness": 0,
        "step_s": 1.0,
        "first_step_s": 2.0,
        "tokens_per_s": 3.0,
    }
    asked = []
    monkeypatch.setattr(
        _grpo,
        "_rows",
        lambda side, order: asked.append((side, order)) or iter([row]),
    )
    monkeypatch.setattr(_grpo, "find_spec", lambda name: None)
    monkeypatch.setattr("jvlab.trainer.models.resolve", lambda model: model)
    found = run_bench_grpo_size("some/model", [4], "cpu", peer="trl")
    assert [side for side, _ in asked] == ["jvlab"]
    assert asked[0][1]["model"] == "some/model"
    assert found["peer"] == "trl is not installed: pip install trl"
    assert "trl is not installed" in capsys.readouterr().out
    assert found["step_s_4"] == 1.0


def test_a_side_that_dies_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    order = {
        "model": str(tmp_path / "none"),
        "tokens": [4],
        "bounds": [0],
        "steps": 1,
        "device": "cpu",
        "eager": False,
    }
    with pytest.raises(Exception, match="the trl side ended with"):
        list(_grpo._rows("trl", {**order, "tokens": [], "scratch": str(tmp_path)}))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tokens", "4"],
        ["--peer", "trl"],
        ["--model", "a", "--shape", "qwen3-1.7b"],
        ["--shape", "square"],
        ["--model", "a", "--tokens", "1"],
        ["--drawn"],
        ["--floors", "--tokens", "1"],
        ["--model", "a", "--fp8"],
    ],
)
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "grpo", "--device", "cpu", "--json", *wrong]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["error"]
    assert said["remedy"]


def test_without_a_model_the_small_bench_runs(monkeypatch: pytest.MonkeyPatch):
    from jvlab.bench import _grpo

    asked: list[Any] = []
    monkeypatch.setattr(_grpo, "run_bench_grpo", lambda **k: asked.append(k) or {})
    assert main(["bench", "grpo", "--device", "cpu"]) == 0
    assert asked == [{"device": "cpu", "eager": False}]
    with pytest.raises(ConfigError, match="peer"):
        _grpo._peer_rows("nobody", {"device": "cpu"})


def test_trl_with_and_without_a_pool(monkeypatch: pytest.MonkeyPatch):
    """`bench trl`: both ways on a GPU, the pool alone on a CPU, where TRL has no engine of its own."""
    asked: list[str] = []

    def rows(side: str, order: dict[str, Any]) -> Any:
        assert side == "trl"
        asked.append(order["way"])
        slow = order["way"] == "colocate"
        yield {"step_s": 6.0 if slow else 3.0, "sync_s": 1.0 if slow else 0.1}

    monkeypatch.setattr(_grpo, "_rows", rows)
    monkeypatch.setattr(_grpo, "find_spec", lambda name: name)
    monkeypatch.setattr(_grpo, "resolve", lambda device: device)
    found = _grpo.run_bench_trl(tokens=[64], steps=2, device="cuda")
    assert asked == ["colocate", "jvlab"]
    assert found["vs_colocate_step_ratio"] == pytest.approx(2.0)
    assert found["vs_colocate_sync_ratio"] == pytest.approx(10.0)
    found = _grpo.run_bench_trl(device="cpu")
    assert asked[2:] == ["jvlab"]
    assert found["tokens"] == 32
    assert "vs_colocate_step_ratio" not in found
    with pytest.raises(ConfigError, match="0 steps"):
        _grpo.run_bench_trl(steps=0, device="cpu")
    monkeypatch.setattr(_grpo, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="needs TRL"):
        _grpo.run_bench_trl(device="cpu")


def test_to_the_first_step_cold_and_warm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """`bench launch --first-step`: each side twice with the same caches, of which nothing is there at first."""
    asked: list[tuple[str, str]] = []
    forgotten: list[int] = []

    def rows(side: str, order: dict[str, Any]) -> Any:
        assert order["first"]
        assert order["steps"] == 0
        asked.append((side, order["scratch"]))
        slow = {"jvlab": 10.0, "trl": 30.0}[side] / len(asked)
        who = {"jvlab": "jvlab", "trl": "TRL"}[side]
        yield {"who": who, "tokens": 32, "reached": {"step": slow}}

    monkeypatch.setattr(_grpo, "_rows", rows)
    monkeypatch.setattr(
        _grpo, "forget_files", lambda folders: forgotten.append(len(asked))
    )
    monkeypatch.setattr(_grpo, "find_spec", lambda name: name)
    monkeypatch.setattr(_grpo, "resolve", lambda device: device)
    found = _grpo.run_bench_first_step(device="cuda", tokens=[64], peer="trl")
    assert [side for side, _ in asked] == ["jvlab", "jvlab", "trl", "trl"]
    assert len({scratch for _, scratch in asked}) == 2
    assert forgotten == [0, 2], "before each side's first, and not before its second"
    assert (found["jvlab_cold_s"], found["jvlab_warm_s"]) == (10.0, 5.0)
    assert found["vs_trl_ratio_cold"] == pytest.approx(1.0)
    assert found["vs_trl_ratio_warm"] == pytest.approx(1.5)
    found = _grpo.run_bench_first_step(device="cpu", peer="trl")
    assert len(asked) == 6, "TRL has no engine on a CPU"
    assert "vs_trl_ratio_cold" not in found
    asked_for: list[Any] = []
    monkeypatch.setattr(
        _grpo, "run_bench_first_step", lambda **k: asked_for.append(k) or {}
    )
    words = ["--device", "cpu", "--tokens", "8", "--peer", "trl"]
    assert main(["bench", "launch", "--first-step", *words]) == 0
    wanted = {"tokens": (8,), "device": "cpu", "peer": "trl", "eager": False}
    assert asked_for == [wanted]


def test_forgetting_files_leaves_what_is_in_them(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 10_000)
    _grpo.forget_files([tmp_path])
    assert (tmp_path / "a" / "b").read_bytes() == b"x" * 10_000

"""Engine defaults per device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jvlab.rollout._defaults import engine_arguments, environment, thread_binding


@pytest.mark.parametrize(
    ("cores", "ranks", "replicas", "replica", "binding"),
    [
        (2, 1, 1, 0, "0,1"),
        (2, 2, 1, 0, "0|1"),
        (2, 1, 2, 1, "1"),
        (8, 2, 1, 0, "0,1,2|3,4,5"),  # one core stays free for the processes around the engine
        (8, 1, 2, 1, "3,4,5"),
        (1, 2, 1, 0, "0|0"),
        (4, 4, 1, 0, "0|1|2|3"),
    ],
)
def test_thread_binding(cores: int, ranks: int, replicas: int, replica: int, binding: str):
    assert thread_binding(range(cores), ranks, replicas, replica) == binding


def test_what_the_caller_gives_wins():
    arguments = engine_arguments("m", "cpu", 2, "dummy", {"enforce_eager": False, "max_model_len": 64})
    assert arguments["enforce_eager"] is False
    assert arguments["max_model_len"] == 64
    assert arguments["load_format"] == "dummy"
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_fp32_checkpoints_stay_fp32(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    assert engine_arguments(str(tmp_path), "cuda", 1, "auto", {})["dtype"] == "float32"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert "dtype" not in engine_arguments(str(tmp_path), "cuda", 1, "auto", {})


def test_replicas_get_gpus_of_their_own_where_there_are_enough():
    where = lambda replica, gpus: environment("cuda", 2, 2, replica, [0], 9.0, "m", gpus).get("CUDA_VISIBLE_DEVICES")
    assert [where(r, ["0", "1", "2", "3"]) for r in (0, 1)] == ["0,1", "2,3"]
    assert where(1, ["4", "5", "6", "7"]) == "6,7"
    assert where(1, ["0"]) is None


def test_no_calls_home():
    env = environment("cuda", 1, 1, 0, [0], 100.0, "org/model")
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in env


def test_waiting_threads_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert int(environment("cpu", 1, 1, 0, [0, 1], 9.0, "m")["GOMP_SPINCOUNT"]) <= 1000
    assert "GOMP_SPINCOUNT" not in environment("cuda", 1, 1, 0, [0, 1], 9.0, "m")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in environment("cpu", 1, 1, 0, [0, 1], 9.0, "m"), "as its user wants it"

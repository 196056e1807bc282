"""Engine defaults per device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jvlab.engine._defaults import (
    GIB,
    engine_arguments,
    environment,
    kv_cache_bytes,
    thread_binding,
)


@pytest.mark.parametrize(
    ("cores", "ranks", "replicas", "replica", "binding"),
    [
        (2, 1, 1, 0, "0,1"),
        (2, 2, 1, 0, "0|1"),
        (2, 1, 2, 1, "1"),
        # one core stays free for the processes around the engine
        (8, 2, 1, 0, "0,1,2|3,4,5"),
        (8, 1, 2, 1, "3,4,5"),
        (1, 2, 1, 0, "0|0"),
        (4, 4, 1, 0, "0|1|2|3"),
    ],
)
def test_thread_binding(
    cores: int, ranks: int, replicas: int, replica: int, binding: str
):
    assert thread_binding(range(cores), ranks, replicas, replica) == binding


def test_what_the_caller_gives_wins():
    arguments = engine_arguments(
        "m", "cpu", 2, "dummy", {"enforce_eager": False, "max_model_len": 64}
    )
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


def test_memory_of_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the requests at once may need, at most an eighth of the free memory; an argument of the caller wins."""
    monkeypatch.setattr(
        "psutil.virtual_memory", lambda: SimpleNamespace(available=24 * GIB)
    )
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**sizes, "max_position_embeddings": 2048, "dtype": "float32"})
    )
    token = 2 * 4 * 2 * 32 * 4
    assert kv_cache_bytes(str(tmp_path), {}, 1) == 64 * 2048 * token
    assert kv_cache_bytes(str(tmp_path), {"max_model_len": 1 << 20}, 1) == 3 * GIB
    assert kv_cache_bytes(str(tmp_path), {"max_model_len": 1 << 20}, 2) == 1.5 * GIB
    assert kv_cache_bytes(str(tmp_path), {"max_num_seqs": 128}, 1) == 128 * 2048 * token
    assert kv_cache_bytes("org/not-here", {}, 1) == 3 * GIB
    assert (
        engine_arguments(str(tmp_path), "cpu", 1, "auto", {"kv_cache_memory_bytes": 7})[
            "kv_cache_memory_bytes"
        ]
        == 7
    )
    assert "kv_cache_memory_bytes" not in engine_arguments(
        str(tmp_path), "cuda", 1, "auto", {}
    )


def test_replicas_get_gpus_of_their_own_where_there_are_enough():
    where = lambda replica, gpus: environment(
        "cuda", 2, 2, replica, [0], "m", gpus
    ).get("CUDA_VISIBLE_DEVICES")
    assert [where(r, ["0", "1", "2", "3"]) for r in (0, 1)] == ["0,1", "2,3"]
    assert where(1, ["4", "5", "6", "7"]) == "6,7"
    assert where(1, ["0"]) is None


def test_no_calls_home():
    env = environment("cuda", 1, 1, 0, [0], "org/model")
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in env


def test_waiting_threads_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert int(environment("cpu", 1, 1, 0, [0, 1], "m")["GOMP_SPINCOUNT"]) <= 1000
    assert "GOMP_SPINCOUNT" not in environment("cuda", 1, 1, 0, [0, 1], "m")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in environment("cpu", 1, 1, 0, [0, 1], "m"), (
        "as its user wants it"
    )

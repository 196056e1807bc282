"""The rollout API on one real vLLM engine on a GPU: CUDA graphs on, sleep mode on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import jvlab as jv
from tests.conftest import process_tree, wait_for_exit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool() -> Iterator[jv.Pool]:
    lab = jv.Lab(lease=120)
    model = jv.models.tiny("llama", head_dim=64)
    engine = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 4 << 30,
        "dtype": "bfloat16",
        "max_num_seqs": 32,  # few sizes of CUDA graphs to capture
    }
    pool = lab.launch(model, engine=engine)
    try:
        yield pool.wait(400)
    finally:
        pids = process_tree(lab._gateway.pid)
        lab.close()
    assert not wait_for_exit(pids, 20)


def test_generate_and_score(pool: jv.Pool):
    batch = pool.generate(["The cat", [5, 6, 7]], n=8, max_tokens=32, seed=0)
    assert len(batch) == 16
    assert pool.status()["device"] == "cuda"
    assert pool.score(batch).gap(batch) < 0.1, (
        "bf16: decode and prefill kernels round differently"
    )


def test_pause_keep(pool: jv.Pool):
    whole = pool.generate("Once upon", max_tokens=1500, **GREEDY)[0]
    results: list[jv.Sample] = []
    thread = threading.Thread(
        target=lambda: results.append(
            pool.generate("Once upon", max_tokens=1500, **GREEDY)[0]
        )
    )
    thread.start()
    time.sleep(0.3)
    pool.pause("keep")
    try:
        # the last step's tokens may still be on their way to the counters
        time.sleep(0.3)
        before = pool.status()["replicas"][0]["generated_tokens"]
        time.sleep(0.5)
        assert pool.status()["replicas"][0]["generated_tokens"] == before
        assert thread.is_alive(), "it was paused in the middle"
    finally:
        pool.resume()
    thread.join(60)
    assert np.array_equal(results[0].token_ids, whole.token_ids)


def test_sleep_and_wake(pool: jv.Pool):
    first = pool.generate("Once upon", max_tokens=64, **GREEDY)[0]
    pool.sleep(level=1)
    assert pool.status()["replicas"][0]["sleeping"]
    pool.wake(["weights"])
    pool.wake(["kv_cache"])
    assert not pool.status()["replicas"][0]["sleeping"]
    assert np.array_equal(
        pool.generate("Once upon", max_tokens=64, **GREEDY)[0].token_ids,
        first.token_ids,
    )


def test_live_trace(pool: jv.Pool):
    (layout,) = pool.trace()
    assert not layout.opaque
    assert not layout.repacked, "unquantised weights stay where the loader put them"

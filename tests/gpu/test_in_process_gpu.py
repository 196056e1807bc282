"""`jv.Pool.in_process` on a GPU: JAX and vLLM in one process write and read the same memory without a handle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab.lab._pool import InProcessPool
from tests.gpu.card import device_used, ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
    # vLLM and torch warn in the engine's thread, which is this process's: as errors they would end the engine
    pytest.mark.filterwarnings("default"),
]
ENGINE = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def itself() -> Iterator[jv.Pool]:
    """An engine in processes of its own that loads the weights of seed 5; it comes up while ours does."""
    with ending_lab() as lab:
        yield lab.launch(tiny(5), name="loaded", device="cuda", engine=ENGINE)


@pytest.fixture(scope="module")
def local(itself: jv.Pool) -> Iterator[InProcessPool]:
    pool = jv.Pool.in_process(tiny(0), name="local", device="cuda", engine=ENGINE)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def wanted(itself: jv.Pool, local: InProcessPool) -> list[list[int]]:
    said = greedy(itself.wait(200), 16)
    itself.close()
    return said


def test_syncs_write_the_engines_memory_in_this_process(
    local: InProcessPool, wanted: list[list[int]]
) -> None:
    import jax

    assert local.status()["replicas"][0]["pid"] == os.getpid()
    assert local.status()["device"] == "cuda"
    facts: dict[str, Any] = {}
    first = greedy(local, 16)
    assert first != wanted
    for dtype in ("bfloat16", "float32"):
        policy: Any = jv.Policy.from_pretrained(tiny(5), dtype=dtype)
        link = local.connect(policy.params, rules="policy")
        assert link.transport == "ipc", link.reason
        assert "one process" in link.reason
        for mode in ("direct", "staged"):
            link.sync(
                jax.tree.map(lambda x: x * 2, policy.params), mode=mode, progress=False
            )
            assert greedy(local, 16) != wanted
            report = link.sync(policy.params, mode=mode, progress=False)
            assert report.verified
            assert report.bytes == link.plan.total_bytes
            assert link.verify(), "live memory holds what was committed"
            assert link.verify(policy.params)
            assert greedy(local, 16) == wanted, f"{dtype} {mode}"
            assert local.status()["replicas"][0]["version"] == link.version
            facts[f"{dtype} {mode}"] = {
                f"{k}_ms": round(1e3 * v, 3) for k, v in report.seconds.items()
            }
        link.close()
    print("in process:", json.dumps(facts), flush=True)


def test_it_ends_and_another_may_be_made(
    local: InProcessPool, wanted: list[list[int]]
) -> None:
    before = device_used()
    local.close()
    after = device_used()
    start = time.perf_counter()
    with jv.Pool.in_process(tiny(5), device="cuda", engine=ENGINE) as again:
        took = time.perf_counter() - start
        assert greedy(again, 16) == wanted, (
            "the same weights, loaded by itself, in this process"
        )
    facts = {
        "freed_bytes": before - after,
        "second_start_s": took,
        "left_bytes": device_used() - after,
    }
    print("in process, ended:", json.dumps(facts), flush=True)
    assert before - after > 0.9 * ENGINE["kv_cache_memory_bytes"], (
        "the KV cache is given back"
    )

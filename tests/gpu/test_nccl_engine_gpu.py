"""Weight sync by nccl into a live vLLM engine that shares the GPU with the trainer: bits, tokens, versions, modes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

import jvlab as jv
from tests.gpu.card import ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
ENGINE = {
    "gpu_memory_utilization": 0.12,
    "kv_cache_memory_bytes": 2 << 30,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    # before this process's first NCCL call
    os.environ.update({**LOOPBACK, "NCCL_HOSTID": "trainer"})
    with ending_lab() as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: jv.Lab) -> jv.Pool:
    return lab.launch(
        tiny(0), name="nccl", engine=ENGINE, env={**LOOPBACK, "NCCL_HOSTID": "engine"}
    ).wait(300)


def test_live_engine_holds_the_trainers_bits(lab: jv.Lab, pool: jv.Pool) -> None:
    own: Any = jv.Policy.from_pretrained(tiny(0), dtype="bfloat16")
    other: Any = jv.Policy.from_pretrained(tiny(1), dtype="bfloat16")
    first = greedy(pool)
    link = lab.connect(own.params, pool, rules="policy", transport="nccl")
    assert link.transport == "nccl"
    assert link.verify(own.params), "vLLM's own load holds the trainer's bits"
    reports = [link.sync(other.params)]
    assert link.verify(other.params)
    second = greedy(pool)
    assert second != first
    reports.append(link.sync(own.params, mode="staged"))
    assert link.verify(own.params)
    assert greedy(pool) == first, (
        "greedy tokens are those of the engine's own load of the same weights"
    )
    reports.append(link.sync(other.params, verify="off"))
    assert greedy(pool) == second
    assert pool.status()["replicas"][0]["version"] == 3
    for report in reports:
        print(json.dumps({"report": str(report)}))
    link.close()
    again = lab.connect(own.params, pool, rules="policy", transport="nccl")
    again.sync(own.params)
    assert greedy(pool) == first
    again.close()


def test_formats_that_jvlab_has_not_go_through_vllms_reload(lab: jv.Lab) -> None:
    """One scale per row: reported layer by layer, and tokens are those of the engine's own load of the same weights."""
    engine = {**ENGINE, "quantization": "fp8_per_channel", "enforce_eager": False}
    pool = lab.launch(
        tiny(0), name="rows", engine=engine, env={**LOOPBACK, "NCCL_HOSTID": "rows"}
    ).wait(400)
    own: Any = jv.Policy.from_pretrained(tiny(0), dtype="bfloat16")
    other: Any = jv.Policy.from_pretrained(tiny(1), dtype="bfloat16")
    first = greedy(pool)
    link = lab.connect(own.params, pool, rules="policy", transport="nccl")
    for mode in ("direct", "staged"):
        link.sync(other.params, mode=mode)
        assert link.verify(other.params)
        assert greedy(pool) != first
        report = link.sync(own.params, mode=mode)
        assert report.verified
        assert report.reloaded, "layers by name, with seconds"
        print(
            json.dumps(
                {
                    "mode": mode,
                    "reloaded_ms": round(1e3 * sum(report.reloaded.values()), 1),
                }
            )
        )
        assert greedy(pool) == first, (
            "a graph captured before the syncs reads what the reload wrote"
        )
    link.close()
    pool.close()

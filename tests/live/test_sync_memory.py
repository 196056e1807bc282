"""Extra memory of a sync on real vLLM: bounded by a few buckets on both sides, however large the model is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import jvlab as jv

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
BUCKET = 0.5  # MiB
MIB = 2**20


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory(pid: int, what: str) -> float:
    """MiB of a process now ("VmRSS") or at its peak ("VmHWM")."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


@pytest.fixture(scope="module")
def pools(lab: jv.Lab) -> Iterator[dict[str, jv.Pool]]:
    """One for each dtype; they come up side by side."""
    models = {
        dtype: jv.models.tiny("llama", dtype=dtype, **SIZES)
        for dtype in ("float32", "float16")
    }
    made = {
        dtype: lab.launch(model, env={"JVLAB_LIVE_WEIGHTS": "1"})
        for dtype, model in models.items()
    }
    for pool in made.values():
        pool.wait()
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        pytest.param("float32", "float32", marks=pytest.mark.soak),
        ("float16", "float32"),
    ],
)
def test_a_model_of_a_hundred_buckets(
    lab: jv.Lab, pools: dict[str, jv.Pool], dtype: str, master: str
):
    policy = jv.Policy.from_pretrained(
        pools[dtype].model, mesh=jv.mesh(fsdp=2), dtype=master
    )
    with pools[dtype] as pool:
        link = lab.connect(policy.params, pool, rules="policy", bucket_mib=BUCKET)
        # compiled programs, thread stacks and allocators' arenas come once
        for _ in range(3):
            link.sync(policy.params)
        replica = psutil.Process(pool.status()["replicas"][0]["pid"])
        pids = [os.getpid(), *(p.pid for p in replica.children(recursive=True))]
        extra = dict.fromkeys(pids, float("inf"))
        # the least: other threads of a process allocate too, now and then
        for _ in range(3):
            before = {}
            for pid in pids:
                forget_peak(pid)
                before[pid] = memory(pid, "VmRSS")
            report = link.sync(policy.params)
            extra = {
                pid: min(extra[pid], memory(pid, "VmHWM") - before[pid]) for pid in pids
            }
        assert report.buckets * BUCKET * MIB >= report.bytes
        assert report.bytes > 50 * BUCKET * MIB, "many buckets, or nothing was shown"
        assert max(extra.values()) < 16 * BUCKET, (
            f"{extra} MiB for {report.bytes / MIB:.0f} MiB of weights"
        )
        link.close()

"""What each way for the orders of a sync costs on a GPU: the core's own channel, and the gateway alone.

pytest tests/gpu/test_orders_gpu.py -s       prints the medians of one run, 4 GB by ipc
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jvlab.bench._shapes import config_of, policy_of
from tests.gpu.card import ending_lab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE = {
    "max_model_len": 512,
    "gpu_memory_utilization": 0.2,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 4 << 30,
}
ROUNDS = 20


def restrict(link: Any, way: str) -> None:
    """Take away what the other way does without. It holds until the link opens its channels again."""
    if way == "gateway":
        link._coordinator.core.close()
        link._coordinator.core = None


def test_what_each_way_costs(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("4")))
    policy = policy_of(tmp_path)
    found: dict[str, dict[str, float]] = {}
    with ending_lab(60) as lab:
        pool = lab.launch(
            str(tmp_path), load="dummy", engine=ENGINE, device="cuda"
        ).wait(300)
        for way in ("core", "gateway"):
            for mode in ("direct", "staged"):
                with lab.connect(
                    policy.params, pool, rules="policy", meaning="off"
                ) as link:
                    for _ in range(2):
                        link.sync(policy.params, mode=mode, progress=False)
                    restrict(link, way)
                    calls, pauses = [], []
                    for _ in range(ROUNDS):
                        start = time.perf_counter()
                        report = link.sync(policy.params, mode=mode, progress=False)
                        calls.append(time.perf_counter() - start)
                        pauses.append(report.seconds["pause"])
                        assert report.verified
                    assert (link._coordinator.core is None) == (way == "gateway"), (
                        "nothing was opened again"
                    )
                    found[f"{way} {mode}"] = {
                        "call_ms": round(1e3 * statistics.median(calls), 2),
                        "pause_ms": round(1e3 * statistics.median(pauses), 2),
                    }
                    print(
                        json.dumps({f"{way} {mode}": found[f"{way} {mode}"]}),
                        flush=True,
                    )
    print(json.dumps(found))

"""Weight sync into an engine of two ranks that share one GPU with the trainer: real NCCL inside vLLM, ipc into both.

`tp_probe.py` says what vLLM needs for it; run that first: `python -m tests.gpu.tp_probe`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from tests.gpu import tp_probe
from tests.gpu.card import ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
UP_SECONDS = 200


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab(30) as made:
        yield made


def launched(lab: jv.Lab, seed: int) -> jv.Pool:
    more = next(iter(tp_probe.WAYS.values()))
    return lab.launch(
        tiny(seed),
        name=f"seed-{seed}",
        tensor_parallel=2,
        device="cuda",
        engine=tp_probe.ENGINE,
        env={**tp_probe.environment(), **more},
    )


def test_two_ranks_on_one_card_hold_the_trainers_bits(lab: jv.Lab) -> None:
    import jax

    start = time.perf_counter()
    pool, itself = launched(lab, 0), launched(lab, 5)  # both come up at the same time
    wanted, first = (
        greedy(itself.wait(UP_SECONDS), 16),
        greedy(pool.wait(UP_SECONDS), 16),
    )
    facts: dict[str, Any] = {"up_s": time.perf_counter() - start}
    assert wanted != first
    itself.close()
    policy: Any = jv.Policy.from_pretrained(tiny(5), dtype="bfloat16")
    link = lab.connect(policy.params, pool, rules="policy")
    assert link.transport == "ipc", link.reason
    assert link.plan.ranks == 2
    assert not link.verify(policy.params), "other weights, so far"
    for mode in ("direct", "staged"):
        link.sync(jax.tree.map(lambda x: x * 2, policy.params), mode=mode)
        assert greedy(pool, 16) != wanted
        report = link.sync(policy.params, mode=mode)
        assert report.verified
        assert report.bytes == link.plan.total_bytes
        assert {rank for _, rank in report.digests} == {0, 1}
        assert link.verify(), "live memory of both ranks holds what was committed"
        assert link.verify(policy.params)
        assert greedy(pool, 16) == wanted, (
            f"{mode}: tokens of an engine of two ranks that loaded these weights"
        )
        assert pool.status()["replicas"][0]["version"] == link.version
        facts[mode] = {
            "bytes": report.bytes,
            **{f"{k}_ms": 1e3 * v for k, v in report.seconds.items()},
        }
    print("tp:", json.dumps(facts), flush=True)
    link.close()

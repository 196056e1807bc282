"""`jv.certify` on a card: bfloat16 with graphs, sleep at both levels, experts, LoRA, and FP8 as far as it connects.

Each result is printed as one line of JSON, "CERTIFY <name> {...}", for tests/baselines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from tests.gpu.card import ending_lab, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.15,
    "kv_cache_memory_bytes": 1 << 30,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 16,  # few sizes of CUDA graphs to capture
}
# it computes from live memory; others re-arrange experts
EXPERTS = {"moe_backend": "triton"}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab() as made:
        yield made


def certified(lab: jv.Lab, name: str, model: str, **engine: Any) -> dict[str, str]:
    """The state of every check, after printing the whole certificate."""
    with lab.launch(model, name=name, device="cuda", engine={**ENGINE, **engine}).wait(
        400
    ) as pool:
        found = jv.certify(pool, progress=False)
    print(found, flush=True)
    print(f"CERTIFY {name} {found.to_json()}", flush=True)
    assert not found.failed, str(found)
    return {row.name: row.state for row in found.rows}


def test_sixteen_bits_with_graphs(lab: jv.Lab):
    states = certified(lab, "graphs", tiny())
    assert {name for name, state in states.items() if state != "pass"} == {
        "sleep 1",
        "sleep 2",
        "adapters",
    }


def test_sleep_at_both_levels(lab: jv.Lab):
    states = certified(lab, "sleeping", tiny(), enable_sleep_mode=True)
    assert (
        states["sleep 1"]
        == states["sleep 2"]
        == states["arrives staged"]
        == states["restored"]
        == "pass"
    )
    assert states["graphs"] == "pass"


def test_experts(lab: jv.Lab):
    for family in ("mixtral", "qwen3_moe"):
        states = certified(
            lab,
            family.replace("_", "-"),
            jv.models.tiny(family, dtype="bfloat16"),
            **EXPERTS,
        )
        assert (
            states["arrives direct"]
            == states["arrives staged"]
            == states["graphs"]
            == "pass"
        ), family


def test_adapters(lab: jv.Lab):
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    states = certified(lab, "lora", tiny(), **lora)
    assert states["adapters"] == states["arrives direct"] == states["graphs"] == "pass"


def test_eight_bits_pass_or_say_why_not(lab: jv.Lab):
    states = certified(lab, "fp8", tiny(), quantization="fp8")
    assert states["scored"] == "pass"
    assert states["arrives direct"] in ("pass", "not applicable"), (
        "connect takes it, or refuses with a reason"
    )
    assert (states["arrives direct"] == "pass") == (states["restored"] == "pass")

"""Mixtures of experts on a card, by ipc: bits and tokens of a tiny one with CUDA graphs, times of one of size.

pytest tests/gpu/test_experts_gpu.py -s       prints the facts of the one of size as JSON; needs 110 GB of the card
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab.bench._sync_gpu import run_bench_sync_gpu
from tests.gpu.card import ending_lab, greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.12,
    "kv_cache_memory_bytes": 2 << 30,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,  # few sizes of CUDA graphs to capture
    "moe_backend": "triton",  # it computes from live memory; others re-arrange experts
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 256,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 8,
    },
    "mixtral": {"hidden_size": 256, "intermediate_size": 128, "num_local_experts": 8},
}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab(60) as made:
        yield made


@pytest.mark.parametrize("family", SIZES)
def test_bits_and_tokens_are_those_of_a_load(lab: jv.Lab, family: str):
    """What vLLM loaded itself is the reference: its memory, byte for byte, and its tokens."""
    import jax

    model = jv.models.tiny(
        family, tie_word_embeddings=False, dtype="bfloat16", **SIZES[family]
    )
    pool = lab.launch(model, name=family, engine=ENGINE).wait(300)
    policy = jv.Policy.from_pretrained(model, dtype="bfloat16")
    link = lab.connect(policy.params, pool, rules="policy")
    assert link.transport == "ipc", link.reason
    names = sorted({p.name for p in link.plan.parameters})
    assert any("w13_weight" in name for name in names), names
    own, wanted = {name: pool.peek(name) for name in names}, greedy(pool)
    other = jax.tree.map(lambda x: x * 1.5 + 0.01, policy.params)
    for mode in ("direct", "staged"):
        assert link.sync(other, mode=mode).verified
        same = [name for name in names if pool.peek(name) == own[name]]
        assert same == [], "a parameter that the sync did not change"
        assert greedy(pool) != wanted
        assert link.sync(policy.params, mode=mode).verified
        assert [name for name in names if pool.peek(name) != own[name]] == []
        assert greedy(pool) == wanted, mode
    order = np.arange(policy.config.experts)
    order[:2] = 1, 0
    moe = {
        name: {"kernel": at["kernel"] if name == "router" else at["kernel"][:, order]}
        for name, at in policy.params["layers"]["moe"].items()
    }
    link.sync({**policy.params, "layers": {**policy.params["layers"], "moe": moe}})
    differing = {name for name in names if pool.peek(name) != own[name]}
    assert differing == {name for name in names if "w13_" in name or "w2_" in name}, (
        "two experts were swapped"
    )
    assert not link.verify(policy.params)
    link.close()
    pool.close()


def test_one_of_size_beside_vllms_own_ipc():
    """12 layers of Qwen3-30B-A3B, 16 GB of bf16: direct and staged, verified, and vLLM's own way in the same run."""
    found = run_bench_sync_gpu(
        rounds=10, size=os.environ.get("JVLAB_GPU_SIZE", "moe-16")
    )
    print(json.dumps(found), flush=True)
    assert found["transport"] == "ipc"
    assert all(found["tokens_equal"].values()), found["tokens_equal"]
    assert found["ways"]["direct_verified"]["move_vs_ceiling"] > 0.5
    assert found["ways"]["direct_verified"]["vs_vllm_ratio"] > 1

"""LoRA in memory on a card, by ipc, with CUDA graphs: tokens move, nothing is left over, times beside files.

pytest tests/gpu/test_lora_gpu.py -s       prints the facts of rank 16 on Qwen3-1.7B's shape as JSON
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab.bench._lora import run_bench_lora
from tests.gpu.card import PROMPTS, ending_lab, greedy, tiny

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
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 16,
}
CLOSE = 0.1  # nats: bfloat16 in the engine, in the mean over tokens


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab(60) as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: jv.Lab) -> jv.Pool:
    return lab.launch(tiny(0), engine=ENGINE).wait(300)


@pytest.fixture(scope="module")
def base() -> Any:
    return jv.Policy.from_pretrained(tiny(0), dtype="bfloat16")


def trained(policy: Any, seed: int, size: float = 0.05) -> Any:
    """Adapters as after training: no value is zero."""
    import jax

    leaves, tree = jax.tree.flatten(policy.lora)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        x + size * jax.random.normal(k, x.shape, x.dtype)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def gap(policy: Any, params: Any, pool: jv.Pool) -> float:
    """Mean difference between the engine's log-probabilities of its own tokens and the trainer's."""
    sample = pool.generate(
        [PROMPTS[0]], max_tokens=24, temperature=0.0, ignore_eos=True, progress=False
    )[0]
    row = [*PROMPTS[0], *sample.token_ids.tolist()]
    ours = np.asarray(policy.logprobs(params, [row]), np.float32)[0, len(PROMPTS[0]) :]
    return float(np.abs(ours - sample.logprobs).mean())


def test_adapters_arrive_and_tokens_move(
    lab: jv.Lab, pool: jv.Pool, base: Any, tmp_path: Path
):
    policy = base.with_lora(rank=8)
    plain = greedy(pool)
    link = lab.connect(policy.lora, pool)
    assert link.transport == "ipc", link.reason
    assert link.sync(policy.lora).verified
    assert greedy(pool) == plain, "an adapter starts as zero"
    seen = [plain]
    for seed, mode in ((1, "direct"), (2, "staged"), (3, "direct")):
        policy.lora = trained(policy, seed)
        assert link.sync(policy.lora, mode=mode).verified
        assert link.verify(policy.lora)
        assert not link.verify(trained(policy, seed + 50)), (
            "other adapters have other digests"
        )
        tokens = greedy(pool)
        assert tokens not in seen, "a captured graph does not see the new adapter"
        seen.append(tokens)
        assert gap(policy, policy.lora, pool) < CLOSE
        pool.load_adapter("file", policy.save_pretrained(tmp_path / f"adapter{seed}"))
        options = {
            "max_tokens": 24,
            "temperature": 0.0,
            "ignore_eos": True,
            "progress": False,
            "adapter": "file",
        }
        by_file = [
            pool.generate([ids], **options)[0].token_ids.tolist() for ids in PROMPTS
        ]
        assert by_file == tokens, mode
        pool.unload_adapter("file")
    assert (link.meaning.state, link.meaning.how) == ("checked", "function"), (
        link.meaning
    )
    link.close()


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_nothing_is_left_of_a_wider_adapter(
    lab: jv.Lab, pool: jv.Pool, base: Any, mode: str
):
    wide, narrow = base.with_lora(rank=16), base.with_lora(rank=4, targets=["q_proj"])
    wide.lora, narrow.lora = trained(wide, 10, 0.2), trained(narrow, 11)
    with lab.connect(wide.lora, pool) as link:
        assert link.sync(wide.lora).verified
        assert gap(base, base.params, pool) > CLOSE, "the wide adapter is seen"
    with lab.connect(narrow.lora, pool) as link:
        assert link.sync(narrow.lora, mode=mode).verified
    held = np.frombuffer(
        pool.peek("adapter.model.layers.0.self_attn.qkv_proj.lora_a.0"), np.uint16
    )
    held = held.reshape(16, -1)
    assert held[:4].any()
    assert not held[4:].any(), "rows of the wider adapter"
    assert gap(narrow, narrow.lora, pool) < CLOSE


def test_the_base_below_is_synced(lab: jv.Lab, pool: jv.Pool, base: Any):
    import jax

    link = lab.connect(base.params, pool, rules="policy")
    changed = jax.tree.map(lambda x: x * 1.25, base.params)
    for mode in ("direct", "staged"):
        assert link.sync(changed, mode=mode).verified
        assert gap(base, changed, pool) < CLOSE, "the base alone, without the adapter"
        assert link.sync(base.params, mode=mode).verified
    link.close()


def test_attention_is_adapted_beside_experts(lab: jv.Lab):
    """vLLM adapts experts too; `with_lora` has attention's maps alone, and the rest of the slot stays zero."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 8,
    }
    model = jv.models.tiny(
        "qwen3_moe", tie_word_embeddings=False, dtype="bfloat16", **sizes
    )
    more = {"moe_backend": "triton", "enforce_eager": True}
    pool = lab.launch(model, name="experts", engine={**ENGINE, **more}).wait(300)
    policy = jv.Policy.from_pretrained(model, dtype="bfloat16").with_lora(rank=8)
    plain = greedy(pool)
    with lab.connect(policy.lora, pool) as link:
        policy.lora = trained(policy, 1, 0.2)
        for mode in ("direct", "staged"):
            assert link.sync(policy.lora, mode=mode).verified
    assert greedy(pool) != plain
    assert gap(policy, policy.lora, pool) < CLOSE
    pool.close()


def test_rank_16_on_a_model_of_size_beside_files(capsys: pytest.CaptureFixture[str]):
    found = run_bench_lora(rounds=10, device="cuda", shape="qwen3-1.7b")
    with capsys.disabled():
        print(json.dumps(found), flush=True)
    assert found["transport"] == "ipc"
    assert found["same_tokens"]
    assert found["tokens_moved"]
    assert found["vs_files_ratio"] > 1

"""`launch(deterministic=True)` on a GPU: to the bit, however a prompt is run, scored or synced in between."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 64,
}
TOKENS = 24
QWEN = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# name -> (model, the switch, more engine arguments)
POOLS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "tiny": ("tiny", True, {"enforce_eager": True}),
    "tiny-graphs": ("tiny", True, {}),
    "large-graphs": ("large", True, {}),
    "tiny-flash": (
        "tiny",
        True,
        {"enforce_eager": True, "attention_backend": "FLASH_ATTN"},
    ),
    "tiny-off": ("tiny", False, {"enforce_eager": True}),
    "large-off": ("large", False, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    large = jv.models.tiny(
        "qwen3", path=tmp_path_factory.mktemp("models") / "large", **QWEN
    )
    return {
        "tiny": jv.models.tiny("llama", head_dim=64, tie_word_embeddings=False),
        "large": large,
    }


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    lab = jv.Lab(lease=120)
    try:
        yield lab
    finally:
        pids = process_tree(lab._gateway.pid)
        lab.close()
    assert not wait_for_exit(pids, 20)


@pytest.fixture(scope="module")
def pools(lab: jv.Lab, folders: dict[str, str]) -> dict[str, jv.Pool]:
    """All of them; they come up at the same time."""
    made = {
        name: lab.launch(
            folders[model],
            name=name,
            device="cuda",
            engine={**ENGINE, **more},
            deterministic=switch,
        )
        for name, (model, switch, more) in POOLS.items()
    }
    return {name: pool.wait(400) for name, pool in made.items()}


def measured(pools: dict[str, jv.Pool], name: str) -> jv.DeterminismReport:
    """The report of one pool, printed for the record."""
    report = pools[name].check_determinism(max_tokens=TOKENS, batches=(2, 8))
    told = {
        "pool": name,
        "exact": report.exact,
        "score_exact": report.score_exact,
        "largest_gap": report.largest_gap,
        "cases": [asdict(case) for case in report.cases],
        "causes": report.causes,
    }
    print("determinism:", json.dumps(told), flush=True)
    return report


@pytest.mark.parametrize("name", ["tiny", "tiny-graphs", "large-graphs"])
def test_the_switch_is_exact(pools: dict[str, jv.Pool], name: str) -> None:
    report = measured(pools, name)
    assert report.device == "cuda"
    assert report.exact, report.cases
    assert report.score_exact, report.scored
    assert report.causes == ()


@pytest.mark.parametrize(
    ("name", "cause"),
    [("tiny-flash", "longest query"), ("tiny-off", "kernels are off")],
)
def test_without_it_the_cause_is_named(
    pools: dict[str, jv.Pool], name: str, cause: str
) -> None:
    report = measured(pools, name)
    assert not (report.exact and report.score_exact), (
        "this card no longer needs the switch: say so in README"
    )
    assert any(cause in found for found in report.causes), report.causes


def test_a_sync_in_between_changes_nothing(
    lab: jv.Lab, pools: dict[str, jv.Pool], folders: dict[str, str]
) -> None:
    """Other weights and back again: the same bits, alone and in a batch."""
    import jax

    pool, policy = pools["tiny"], jv.Policy.from_pretrained(folders["tiny"])
    options = {
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
        "progress": False,
    }
    prompts = [[3 + (i * 7 + k) % 500 for k in range(40 * i + 5)] for i in range(8)]
    link = lab.connect(policy.params, pool)
    link.sync(policy.params)
    before = [pool.generate([ids], **options)[0] for ids in prompts]
    link.sync(jax.tree.map(lambda x: x * 1.25, policy.params))
    other = pool.generate(prompts, **options)
    link.sync(policy.params)
    after = pool.generate(prompts, **options)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(before, other, strict=True)
    )
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


def test_grpo_repeats_to_the_bit(
    lab: jv.Lab, pools: dict[str, jv.Pool], folders: dict[str, str], tmp_path: Path
) -> None:
    """Two runs of one seed, K = 0: the same rewards and losses."""
    pool, found = pools["tiny-graphs"], []
    for turn in range(2):
        policy = jv.Policy.from_pretrained(folders["tiny"])
        link = lab.connect(policy.params, pool)
        run = jv.grpo(
            policy,
            pool,
            link,
            jv.tasks.digits(seed=0),
            steps=4,
            group_size=4,
            prompts_per_step=4,
            max_staleness=0,
            learning_rate=1e-3,
            checkpoint_every=0,
            folder=tmp_path / str(turn),
            background=False,
            progress=False,
        )
        table = run.record.steps()
        found.append(
            {
                k: np.asarray(table[k])
                for k in ("reward_mean", "loss", "grad_norm", "logprob_gap")
            }
        )
    print(
        "grpo twice:",
        {k: (found[0][k].tolist(), found[1][k].tolist()) for k in found[0]},
        flush=True,
    )
    for key in found[0]:
        np.testing.assert_array_equal(found[0][key], found[1][key], err_msg=key)


def test_what_it_costs(pools: dict[str, jv.Pool]) -> None:
    """Tokens/s with the switch and without, one model, in turns: printed, and only that both work is asserted."""
    import time

    names = ("large-graphs", "large-off")
    rates: dict[str, list[float]] = {name: [] for name in names}
    options = {
        "max_tokens": 128,
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
        "progress": False,
    }
    for turn in range(4):
        for name in names if turn % 2 else names[::-1]:
            start = time.perf_counter()
            batch = pools[name].generate([[5 + i, 6, 7] for i in range(64)], **options)
            if turn:
                rates[name].append(batch.tokens / (time.perf_counter() - start))
    print("determinism costs:", json.dumps(rates), flush=True)
    assert all(rate > 0 for found in rates.values() for rate in found)

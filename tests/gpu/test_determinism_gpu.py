"""`launch(deterministic=True)` on a GPU: vLLM's batch-invariant kernels, and what they bring, measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest

import jvlab as jv
from jvlab._determinism import Case
from tests.conftest import gone, tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"),
]
ENGINE = {
    "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30, "dtype": "bfloat16", "max_model_len": 1024,
    "max_num_seqs": 16, "enforce_eager": True,
}  # fmt: skip
TOKENS = 24


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[bool, jv.Pool]]:
    """One with the switch and one without; both come up at the same time."""
    lab = jv.Lab(lease=120)
    model = str(jv.models.tiny("llama", head_dim=64, tie_word_embeddings=False))
    try:
        made = {
            switch: lab.launch(model, name=f"switch-{switch}", device="cuda", engine=ENGINE, deterministic=switch)
            for switch in (True, False)
        }
        yield {switch: pool.wait(300) for switch, pool in made.items()}
    finally:
        pids = tree(lab._gateway.pid)
        lab.close()
    assert not gone(pids, 20)


@pytest.mark.parametrize("switch", [True, False])
def test_the_report_says_what_was_measured(pools: dict[bool, jv.Pool], switch: bool) -> None:
    pool = pools[switch]
    report = pool.check_determinism(max_tokens=TOKENS, batches=(2, 8))
    told = {"switch": switch, "exact": report.exact, "tokens_equal": report.tokens_equal,
            "largest_gap": report.largest_gap, "cases": [asdict(case) for case in report.cases]}  # fmt: skip
    print("determinism:", json.dumps(told), flush=True)
    assert report.device == "cuda"
    assert len(report.cases) == 5
    for case in report.cases:
        assert 0 <= case.same_bits <= case.equal <= case.prompts == report.prompts == 8
        assert (case.first is None) == (case.equal == case.prompts)
        assert case.first is None or 0 <= case.first < TOKENS
        assert np.isfinite(case.gap)
        assert not case.exact or case.gap == 0.0
    assert report.tokens_equal == all(case.equal == 8 for case in report.cases)
    assert report.exact == all(case.same_bits == 8 for case in report.cases)
    assert report.largest_gap == max(case.gap for case in report.cases)
    assert f"{report.prompts} prompts" in repr(report)
    assert ("equal to the bit" in repr(report)) == report.exact


def test_the_report_is_what_two_runs_say(pools: dict[bool, jv.Pool]) -> None:
    """One of its cases done by hand, on the engine without the switch as well."""
    from jvlab._determinism import compare, default_prompts

    for pool in pools.values():
        prompts = default_prompts(pool._facts().vocab_size, 1024)
        options = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "max_tokens": TOKENS, "progress": False}
        alone = [pool.generate([ids], **options)[0] for ids in prompts]
        again = [pool.generate([ids], **options)[0] for ids in prompts]
        case = compare("by hand", alone, again)
        equal = sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(alone, again, strict=True))
        assert isinstance(case, Case)
        assert case.equal == equal

"""Single rows of 32,768 and 49,152 tokens trained beside an engine that holds 0.35 of the card.

XLA_PYTHON_CLIENT_MEM_FRACTION=0.57 python -m tests.gpu.long_row_script     prints "long row: {...}", or raises
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

import jvlab as jv
from jvlab.bench._train import QWEN3_1_7B
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, train_batch
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._step import TrainStep
from tests.gpu.card import device_used

LENGTHS, STEPS = (32768, 49152), 3
ENGINE = {"gpu_memory_utilization": 0.35, "max_model_len": 1024, "enforce_eager": True}


def one_sample(length: int) -> Sample:
    rng, answer = np.random.default_rng(0), length - 64
    return Sample(
        prompt_index=0,
        sample_index=0,
        versions=((1, 0, answer),),
        prompt_token_ids=rng.integers(5, 32000, 64),
        token_ids=rng.integers(5, 32000, answer),
        logprobs=rng.normal(-10.4, 0.1, answer),
    )


def train(policy: jv.Policy, length: int) -> dict[str, Any]:
    """Some steps over one row; the policy has the new parameters then."""
    algorithm, estimate = Algorithm(), policy.memory(1, length)
    batch = train_batch([one_sample(length)], [1.0], algorithm, Buckets(rows=1))
    batch = replace(batch, advantages=np.ones(1, np.float32))
    step = TrainStep(
        policy.logprobs_fn, algorithm, learning_rate=1e-6, token_budget=length
    )
    state, seconds, reports = step.init(policy.params), [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, report = step(state, batch, version=1)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - start)
        reports.append(report)
        print(f"{length} tokens: {seconds[-1]:.2f} s, {report}", flush=True)
    policy.params = state.params
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens": length,
        "first_step_s": seconds[0],
        "steps_s": seconds[1:],
        **{
            name: [getattr(r, name) for r in reports]
            for name in ("compiled", "loss", "grad_norm", "skipped")
        },
        "padding": reports[-1].padding,
        "peak_bytes": int(stats["peak_bytes_in_use"]),
        "limit_bytes": int(stats["bytes_limit"]),
        "estimate": asdict(estimate),
        "estimate_bytes": estimate.total,
        "card_used_bytes": device_used(),
    }


def main() -> None:
    import cupy

    # JAX's share, before the engine takes its own
    jax.block_until_ready(jax.numpy.zeros(1))
    model = jv.models.tiny("qwen3", **QWEN3_1_7B)
    rows = []
    with jv.Lab() as lab:
        pool = lab.launch(model, load="dummy", device="cuda", engine=ENGINE)
        policy = jv.Policy.from_pretrained(model, compute_dtype="bfloat16")
        pool.wait()
        link = lab.connect(policy.params, pool, rules="policy")
        link.sync(policy.params, progress=False)
        for length in LENGTHS:
            row = train(policy, length)
            row["synced_verified"] = link.sync(policy.params, progress=False).verified
            out = pool.generate(
                [[5, 6, 7]],
                max_tokens=8,
                temperature=0.0,
                ignore_eos=True,
                progress=False,
            )[0]
            row["engine_versions_after"] = sorted(
                {int(version) for version in out.versions}
            )
            rows.append(row)
        facts = {
            "card_bytes": int(cupy.cuda.runtime.memGetInfo()[1]),
            "card_used_bytes": max(row["card_used_bytes"] for row in rows),
            "trainer_limit_bytes": rows[0]["limit_bytes"],
            "attention": policy.attention,
            "rows": rows,
        }
        print(f"long row: {json.dumps(facts, default=str)}", flush=True)


if __name__ == "__main__":
    main()

"""The peer of `bench grpo`: decoding in JAX with a KV cache says what the policy itself says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.bench._jax_decode import JaxLink, JaxPool
from jvlab.trainer import _task_library as tasks
from jvlab.trainer._grpo import grpo

pytestmark = pytest.mark.slow

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [11, 12])


def peer(model: str, together: int) -> tuple[jv.Policy, JaxPool]:
    policy = jv.Policy.from_pretrained(model)
    encode = lambda prompt: (
        prompt if isinstance(prompt, list) else [5 + ord(c) % 90 for c in prompt]
    )
    text = lambda ids: "".join(chr(48 + t % 10) if t % 3 else "x" for t in ids.tolist())
    return policy, JaxPool(policy, together, encode, text, stop=2, width=8)


@pytest.mark.soak
def test_its_log_probabilities_are_the_policys():
    policy, pool = peer(jv.models.tiny("llama"), len(PROMPTS))

    async def all_of_them():
        return await asyncio.gather(
            *(
                pool.agenerate([p], n=3, seed=7, max_tokens=12, temperature=0.7)
                for p in PROMPTS
            )
        )

    batches = asyncio.run(all_of_them())
    assert len({tuple(s.token_ids) for b in batches for s in b}) > len(PROMPTS)
    for batch in batches:
        for sample in batch:
            ids = np.concatenate([sample.prompt_token_ids, sample.token_ids])
            padded = np.pad(ids, (0, 64 - len(ids)))[None]  # one length to compile
            ours = np.asarray(
                policy.logprobs(policy.params, padded, [len(ids)], temperature=0.7)
            )[0]
            np.testing.assert_allclose(
                sample.logprobs,
                ours[len(sample.prompt_token_ids) : len(ids)],
                atol=2e-4,
            )


@pytest.mark.soak
def test_the_same_loop_runs_on_it(tmp_path: Path):
    policy, pool = peer(jv.models.tiny("llama", vocab_size=288), 2)
    link: Any = JaxLink(pool)
    run = grpo(
        policy,
        link.pool,
        link,
        tasks.digits(),
        steps=3,
        group_size=4,
        prompts_per_step=2,
        folder=tmp_path / "run",
        checkpoint_every=0,
    )  # type: ignore[arg-type]
    s = run.record.summary()
    assert (s["steps"], s["max_staleness"], s["alarms"]) == (3, 0, 0)
    assert s["logprob_gap"] < 1e-3

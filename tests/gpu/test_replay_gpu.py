"""Router replay on a card: the experts that vLLM's own output names, ids only, and what they do to the gap.

pytest tests/gpu/test_replay_gpu.py -s       prints the gaps as JSON
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab._errors import ConfigError
from tests.gpu.card import ending_lab
from tests.gpu.test_experts_gpu import ENGINE, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
EXPERTS = 8


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab(60) as made:
        yield made


@pytest.mark.parametrize("family", SIZES)
def test_ids_close_the_gap_and_other_ids_open_it(
    lab: jv.Lab, family: str, tmp_path: Path
) -> None:
    model = jv.models.tiny(
        family, tie_word_embeddings=False, dtype="bfloat16", **SIZES[family]
    )
    engine: dict[str, Any] = {**ENGINE, "enable_return_routed_experts": True}
    pool = lab.launch(model, name=family, engine=engine).wait(300)
    policy = jv.Policy.from_pretrained(model, dtype="bfloat16")
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(policy.params)
    prompts = np.random.default_rng(0).integers(5, 280, (8, 40)).tolist()
    given: dict[str, Any] = {
        "max_tokens": 64,
        "temperature": 1.0,
        "ignore_eos": True,
        "seed": 1,
        "progress": False,
    }
    batch = pool.generate(prompts, n=4, **given)
    # its prompt is in the prefix cache, and its experts are known
    again = pool.generate(prompts[:1], n=2, **given)
    assert any(sample.cached_tokens for sample in (*batch, *again))
    sample: Any
    for sample in (*batch, *again):
        assert sample.expert_weights is None
        assert (sample.expert_ids[:-1] >= 0).all()
        assert (sample.expert_ids[-1] == -1).all()
    gap = lambda batch, replay: np.concatenate(
        [np.abs(s.gap) for s in batch.compare(policy, replay=replay)]
    )
    other = lambda sample: np.where(
        sample.expert_ids < 0, -1, (sample.expert_ids + 1) % EXPERTS
    )
    wrong = replace(batch, samples=[replace(s, expert_ids=other(s)) for s in batch])
    none, ids, shifted = gap(batch, "none"), gap(batch, "ids"), gap(wrong, "ids")
    means = {
        "none": float(none.mean()),
        "ids": float(ids.mean()),
        "wrong ids": float(shifted.mean()),
    }
    print(
        json.dumps(
            {
                "family": family,
                "mean": means,
                "max": [float(none.max()), float(ids.max())],
            }
        ),
        flush=True,
    )
    assert means["ids"] <= 1.05 * means["none"]
    assert means["wrong ids"] > 5 * means["ids"]
    with pytest.raises(ConfigError, match="no weights of experts"):
        batch.compare(policy, replay="full")
    options: dict[str, Any] = {
        "steps": 2,
        "group_size": 4,
        "prompts_per_step": 2,
        "checkpoint_every": 0,
    }
    with pytest.raises(ConfigError, match="no weights of experts on a GPU"):
        jv.grpo(
            policy,
            pool,
            link,
            "digits",
            folder=tmp_path / "full",
            replay="full",
            **options,
        )
    with pytest.raises(ConfigError, match="in flight when weights change"):
        jv.grpo(
            policy,
            pool,
            link,
            "digits",
            folder=tmp_path / "late",
            replay="ids",
            **{**options, "max_staleness": 1},  # type: ignore
        )
    run = jv.grpo(
        policy,
        pool,
        link,
        "digits",
        folder=tmp_path / "run",
        replay="ids",
        background=False,
        **options,
    )
    assert all(event.extra["replayed"] > 0.8 for event in run.record.events("step"))  # type: ignore[attr-defined]
    # after a sync prompts are computed again, with the new weights: so are their experts
    sample = pool.generate(prompts[:1], n=1, **given)[0]
    assert (sample.expert_ids[:-1] >= 0).all()
    link.close()
    pool.close()

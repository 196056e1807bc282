"""Sessions, segments, determinism, drafts and adapters on real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# more than one KV block of a CPU engine
LONG = [int(t) for t in np.random.default_rng(1).integers(10, 2000, 200)]


def test_segments_are_one_greedy_run(pool: jv.Pool):
    whole = pool.generate([LONG], max_tokens=40, **GREEDY)[0]
    s = pool.session(LONG, **GREEDY)
    for count in (1, 7, 8, 24):
        assert len(s.generate(count).token_ids) == count
    assert s.tokens[s.mask].tolist() == whole.token_ids.tolist()
    assert np.allclose(s.logprobs, whole.logprobs, atol=1e-4)
    assert s.versions.tolist() == [0] * 40
    assert all(turn.cached_tokens >= 128 for turn in s.turns[1:]), (
        "the prompt's block was not computed again"
    )
    assert s.stats.hit_rate > 0.4
    assert s.stats.seconds_saved >= 0
    assert pool.status()["replicas"][0]["prefix_hit_rate"] > 0


def test_turns_with_observations_are_what_one_prompt_would_give(
    pool: jv.Pool, llama: str
):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    s = pool.session("Once upon a time", **GREEDY)
    s.generate(12)
    s.append(" Really? ").append([77, 78])
    s.generate(12)
    seen = tokenizer.encode(" Really? ", add_special_tokens=False)
    given = s.turns[1].prompt_token_ids.tolist()
    first = s.turns[0]
    assert given == [
        *first.prompt_token_ids.tolist(),
        *first.token_ids.tolist(),
        *seen,
        77,
        78,
    ]
    again = pool.generate([given], max_tokens=12, **GREEDY)[0]
    assert s.turns[1].token_ids.tolist() == again.token_ids.tolist()
    assert np.allclose(s.turns[1].logprobs, again.logprobs, atol=1e-4)


def test_sessions_side_by_side_are_scored_alike(pool: jv.Pool):
    group = pool.sessions(
        [LONG, "The cat"], n=2, temperature=1.0, seed=5, ignore_eos=True
    )
    group.generate(6)
    for s in group:
        s.append([90, 91, 92])
    asyncio.run(group.agenerate(6))
    batch = group.batch()
    assert [sample.own.tolist() for sample in batch] == [
        [True] * 6 + [False] * 3 + [True] * 6
    ] * 4
    assert pool.score(batch).gap(batch) < 1e-4, (
        "each log-probability is that of its token in the whole sequence"
    )
    repeat = pool.session(LONG, temperature=1.0, seed=5, ignore_eos=True)
    repeat.generate(6)
    repeat.append([90, 91, 92]).generate(6)
    assert repeat.tokens.tolist() == group[0].tokens.tolist(), (
        "the same calls give the same tokens"
    )


def test_determinism_is_measured(pool: jv.Pool):
    report = pool.check_determinism(max_tokens=8, batches=(4, 8))
    assert [case.prompts for case in report.cases] == [8] * 5
    assert report.largest_gap < 1e-3
    assert report._repr_html_().count("<tr>") == 7
    assert bool(report.causes) == (not report.exact or not report.score_exact)


# One more engine: it drafts, takes adapters, and is deterministic ---------------------------------------------------


@pytest.fixture(scope="module")
def extras(lab: jv.Lab, llama: str) -> Iterator[jv.Pool]:
    pool = lab.launch(
        llama,
        name="extras",
        deterministic=True,
        speculative={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
        engine={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    ).wait()
    yield pool
    pool.close()


def test_the_deterministic_switch(extras: jv.Pool):
    report = extras.check_determinism(max_tokens=8, batches=(4, 8))
    assert report.exact, report.cases
    assert report.scored is not None
    assert report.scored.gap < 1e-4


REPEATING = [[5, 6, 7, 8] * 8, "The cat sat. The cat sat. The cat"]


def test_switching_drafts_on_is_seen_in_the_status_and_not_in_the_logprobs(
    extras: jv.Pool,
):
    # says one thing only: easy to draft
    extras.generate("x", max_tokens=32, allowed_token_ids=[77], **GREEDY)
    sampled = extras.generate(
        REPEATING, n=2, max_tokens=32, temperature=1.0, seed=3, ignore_eos=True
    )
    assert extras.score(sampled).gap(sampled) < 1e-3, (
        "accepted, corrected and bonus tokens alike"
    )
    drafting = extras.status()["speculative"]
    assert drafting["method"] == "ngram"
    assert drafting["draft_tokens"] > 0
    assert 0 < drafting["acceptance_rate"] <= 1
    assert drafting["draft_stale"] is False
    assert extras.status()["replicas"][0]["acceptance_rate"] is not None


def test_drafts_change_no_greedy_token(extras: jv.Pool, pool: jv.Pool):
    ours, plain = (
        p.generate(REPEATING, max_tokens=32, **GREEDY) for p in (extras, pool)
    )
    assert [s.token_ids.tolist() for s in ours] == [s.token_ids.tolist() for s in plain]
    assert np.allclose(ours[0].logprobs, plain[0].logprobs, atol=1e-3)
    assert pool.status()["speculative"] is None


def tensors(seed: int, layers: int, width: int, heads: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    out = {}
    for layer in range(layers):
        module = f"model.layers.{layer}.self_attn.q_proj"
        out[f"{module}.lora_A.weight"] = (
            random.normal(size=(8, width)).astype(np.float32) / 4
        )
        out[f"{module}.lora_B.weight"] = (
            random.normal(size=(heads, 8)).astype(np.float32) / 4
        )
    return out


def adapted_logprobs(
    model: Any, adapter: dict[str, np.ndarray], scale: float, sample: jv.Sample
) -> np.ndarray:
    """By transformers, with the adapter merged into the weights."""
    import torch

    ids = torch.tensor(
        [[*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]]
    )
    weights = dict(model.named_parameters())
    changes = {
        name.removesuffix(".lora_A.weight"): scale
        * adapter[name.replace("lora_A", "lora_B")]
        @ a
        for name, a in adapter.items()
        if "lora_A" in name
    }
    with torch.no_grad():
        for name, change in changes.items():
            weights[f"{name}.weight"] += torch.from_numpy(change)
        table = torch.log_softmax(model(ids).logits[0, :-1], -1)
        for name, change in changes.items():
            weights[f"{name}.weight"] -= torch.from_numpy(change)
    return table.gather(1, ids[0, 1:, None])[:, 0].numpy()[-len(sample.token_ids) :]


def test_adapters_are_loaded_replaced_chosen_and_forgotten(extras: jv.Pool, llama: str):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    config = model.config
    shape = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
    )
    prompt, sampling = [5, 6, 7, 8] * 4, {"max_tokens": 16, **GREEDY}
    base = sample = extras.generate([prompt], **sampling)[0]
    adapter: dict[str, np.ndarray] = {}
    for seed in (1, 2):
        adapter = tensors(seed, *shape)
        assert extras.load_adapter("style", adapter, config={"lora_alpha": 16}) == seed
        sample = extras.generate([prompt], adapter="style", **sampling)[0]
        assert sample.adapter == ("style", seed)
        assert (
            np.abs(
                adapted_logprobs(model, adapter, 2.0, sample) - sample.logprobs
            ).max()
            < 1e-3
        )
        assert sample.token_ids.tolist() != base.token_ids.tolist()
    assert (
        extras.generate([prompt], **sampling)[0].token_ids.tolist()
        == base.token_ids.tolist()
    ), "the base is as it was"
    assert extras.status()["replicas"][0]["adapters"] == {"style": 2}
    turns = extras.session(prompt, adapter="style", **GREEDY)
    turns.generate(8)
    turns.generate(8)
    assert turns.tokens[turns.mask].tolist() == sample.token_ids.tolist()
    # rank 16
    wrong = {
        n: np.repeat(a, 2, axis=0 if "lora_A" in n else 1) for n, a in adapter.items()
    }
    with pytest.raises(errors.ConfigError, match="vLLM cannot load adapter 'style'"):
        extras.load_adapter("style", wrong, config={"lora_alpha": 16})
    assert extras.generate([prompt], adapter="style", **sampling)[0].adapter == (
        "style",
        2,
    ), "the engine lives on"
    extras.unload_adapter("style")
    assert extras.status()["replicas"][0]["adapters"] == {}
    with pytest.raises(errors.ConfigError, match="has no adapter 'style'"):
        extras.generate([prompt], adapter="style", **sampling)


def test_a_pool_without_lora_says_so(pool: jv.Pool):
    with pytest.raises(errors.Unsupported, match="launched without LoRA"):
        pool.load_adapter("style", {})

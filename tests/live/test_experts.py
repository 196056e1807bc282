"""A mixture of experts as a policy: its leaves land in vLLM's w13 and w2 as vLLM loads them itself, and GRPO runs.

The engines return the experts that they chose: those of transformers, and replayed they give the engine's
log-probabilities, also in 16 bits, where a policy's own router chooses others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jvlab as jv
from jvlab.trainer import _task_library as tasks
from tests.live.test_sync import greedy, memory
from tests.trainer.decoder.policy_reference import reference

pytestmark = pytest.mark.engine

# Widths that both ranks' halves suit: vLLM's CPU kernels want multiples of 32.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"vocab_size": 288, "num_hidden_layers": 2, "num_experts": 4},
    "mixtral": {
        "vocab_size": 288,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "intermediate_size": 64,
    },
}
MANY: dict[str, Any] = {
    "vocab_size": 288,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
MANY |= {"dtype": "bfloat16"}


ROUTED: dict[str, Any] = {  # prompts in chunks
    "enable_return_routed_experts": True,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}


def saved(family: str, folder: Path, **mesh: int) -> tuple[jv.Policy, Any, str]:
    """A policy, other parameters than its own, and the checkpoint of those."""
    policy = jv.Policy.from_pretrained(
        jv.models.tiny(family, **SIZES[family]), mesh=jv.mesh(**mesh)
    )
    changed = jax.tree.map(lambda leaf: leaf * 1.25 + 0.001, policy.params)
    return policy, changed, policy.save_pretrained(folder / "saved", params=changed)


@pytest.fixture(scope="module")
def engine(
    lab: jv.Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[jv.Pool, jv.Policy, Any, str]]:
    """An engine that loaded what a policy saved; the policy, the parameters it saved (not its own), the folder."""
    policy, changed, folder = saved(
        "qwen3_moe", tmp_path_factory.mktemp("experts"), ep=2
    )
    with lab.launch(folder, engine=ROUTED).wait() as pool:
        yield pool, policy, changed, folder


BOTH = ("direct", "staged")


def compared_with_a_load(
    lab: jv.Lab,
    pool: jv.Pool,
    policy: jv.Policy,
    changed: Any,
    ranks: int,
    modes: tuple[str, ...] = BOTH,
) -> None:
    """The engine has loaded `changed` from files: its memory and tokens then are what syncs must bring back."""
    # these are not the checkpoint's numbers
    link = lab.connect(policy.params, pool, rules="policy", meaning="off")
    assert link.plan.ranks == ranks
    own, answer = memory(pool, link), greedy(pool)
    for part in ("w13_weight", "w2_weight", "gate.weight"):
        assert any(name.endswith(part) for name, _ in own), part
    for mode in modes:
        assert link.sync(policy.params, mode=mode).verified
        other = memory(pool, link)
        assert [name for name in own if own[name] == other[name]] == [], (
            "a parameter that the sync did not change"
        )
        assert greedy(pool) != answer
        assert link.sync(changed, mode=mode).verified
        assert [
            name for name, value in memory(pool, link).items() if value != own[name]
        ] == []
        assert greedy(pool) == answer
    wrong = {
        **changed,
        "layers": {**changed["layers"], "moe": _swapped(changed["layers"]["moe"])},
    }
    link.sync(wrong)
    assert not link.verify(changed).ok
    differing = {
        name
        for (name, rank), value in memory(pool, link).items()
        if value != own[name, rank]
    }
    assert differing == {
        name for name, _ in own if ".w13_" in name or ".w2_" in name
    }, "two experts were swapped"
    link.close()


def _swapped(moe: Any) -> Any:
    """Its first two experts in each other's place, and a router that does not know."""
    order = np.array([1, 0, 2, 3])
    swap = lambda leaf: jax.device_put(jnp.asarray(leaf)[:, order], leaf.sharding)
    return {
        name: at if name == "router" else {"kernel": swap(at["kernel"])}
        for name, at in moe.items()
    }


def test_what_arrives_is_what_vllm_loads_from_the_saved_checkpoint(
    lab: jv.Lab, engine: Any
) -> None:
    pool, policy, changed, _ = engine
    compared_with_a_load(lab, pool, policy, changed, 1)


def test_grpo(lab: jv.Lab, engine: Any, tmp_path: Path) -> None:
    pool, _, _, folder = engine
    policy = jv.Policy.from_pretrained(folder, mesh=jv.mesh(ep=2))
    link = lab.connect(policy.params, pool, rules="policy")
    given: dict[str, Any] = {
        "steps": 3,
        "learning_rate": 1e-3,
        "group_size": 4,
        "prompts_per_step": 4,
        "seed": 3,
    }
    given |= {"token_budget": 512, "replay": "ids"}
    run = jv.grpo(policy, pool, link, tasks.digits(), folder=tmp_path / "run", **given)
    summary, table = run.record.summary(), run.record.steps()
    assert (summary["steps"], summary["syncs_verified"], summary["ended"]) == (
        3,
        4,
        "finished",
    )
    assert 0 < summary["logprob_gap"] < 1e-3
    assert (table["grad_norm"] > 0).all()
    for event in run.record.events("step"):
        shares: Any = event.experts  # type: ignore[attr-defined]
        assert {name: len(values) for name, values in shares.items()} == {
            "max": 2,
            "min": 2,
            "entropy": 2,
        }
        assert all(
            0 <= low <= 0.25 <= high <= 0.5
            for low, high in zip(shares["min"], shares["max"], strict=True)
        )
        assert all(0.5 <= entropy <= 1 for entropy in shares["entropy"])
        assert 0.8 < event.extra["replayed"] < 1, (
            "all but the last token of each sample"
        )  # type: ignore[attr-defined]
    assert (table["expert_max"] >= 0.25).all()
    assert "busiest" in run._repr_html_()
    link.close()


def rollouts(pool: jv.Pool, n: int = 2, tokens: int = 24) -> jv.RolloutBatch:
    """Prompts longer than a step, and samples that share them."""
    prompts = np.random.default_rng(0).integers(5, 280, (4, 90)).tolist()
    return pool.generate(
        prompts,
        n=n,
        max_tokens=tokens,
        temperature=1.0,
        ignore_eos=True,
        seed=1,
        progress=False,
    )


def gaps(batch: jv.RolloutBatch, policy: jv.Policy, replay: str) -> np.ndarray:
    return np.concatenate(
        [
            np.abs(np.asarray(sample.gap))
            for sample in batch.compare(policy, replay=replay)
        ]
    )


def with_other_experts(batch: jv.RolloutBatch, experts: int) -> jv.RolloutBatch:
    """Each token's experts replaced by their neighbours, where there are any."""
    other = lambda sample: np.where(
        sample.expert_ids < 0, -1, (sample.expert_ids + 1) % experts
    )
    return replace(batch, samples=[replace(s, expert_ids=other(s)) for s in batch])


def compared_with_transformers(
    batch: jv.RolloutBatch, folder: str, chosen: int
) -> None:
    """Ids and weights of every token but the last, except where two experts are as good as each other."""
    model, compared, layer_tokens = reference(folder), 0, 0
    sample: Any
    for sample in batch:
        tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids])
        assert sample.cached_tokens == 0
        assert (sample.expert_ids[-1] == -1).all()
        assert (sample.expert_ids[:-1] >= 0).all()
        with torch.no_grad():
            found = model(
                torch.tensor(tokens[None], dtype=torch.int64), output_router_logits=True
            ).router_logits
        for layer, scores in enumerate(found):
            shares = (
                torch.softmax(scores.float(), dim=-1)
                .reshape(len(tokens), -1)
                .numpy()[:-1]
            )
            best = np.argsort(-shares, axis=-1)
            clear = (
                np.take_along_axis(shares, best[:, chosen - 1 : chosen + 1], axis=-1)
                @ [1, -1]
                > 1e-4
            )
            ids = sample.expert_ids[:-1, layer].astype(np.int64)
            np.testing.assert_array_equal(
                np.sort(ids)[clear], np.sort(best[:, :chosen])[clear]
            )
            weights = np.take_along_axis(shares, ids, axis=-1)
            weights /= weights.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(
                sample.expert_weights[:-1, layer][clear], weights[clear], atol=1e-4
            )
            compared, layer_tokens = compared + clear.sum(), layer_tokens + len(clear)
    assert compared > 0.95 * layer_tokens > 0


def test_replay(lab: jv.Lab, engine: Any) -> None:
    pool, _, _, folder = engine
    policy = jv.Policy.from_pretrained(folder)
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(policy.params)
    batch = rollouts(pool)
    compared_with_transformers(batch, folder, 2)
    for replay in ("none", "ids", "full"):
        assert gaps(batch, policy, replay).max() < 1e-3, replay
    wrong = with_other_experts(batch, 4)
    assert gaps(wrong, policy, "none").max() < 1e-3
    assert gaps(wrong, policy, "ids").mean() > 0.05
    link.close()


@pytest.mark.soak  # notebook 12 asserts the same, in every `make test`
@pytest.mark.usefixtures("needs_bf16")
def test_replay_in_16_bits(lab: jv.Lab) -> None:
    """A router that rounds otherwise chooses other experts; with the engine's the largest gaps are gone."""
    model = jv.models.tiny("qwen3_moe", **MANY)
    with lab.launch(model, engine=ROUTED).wait() as pool:
        batch, policy = (
            rollouts(pool, n=4, tokens=32),
            jv.Policy.from_pretrained(model, dtype="bfloat16"),
        )
    none, ids, full = (
        gaps(batch, policy, replay) for replay in ("none", "ids", "full")
    )
    print(
        {
            name: (float(g.mean()), float(g.max()))
            for name, g in (("none", none), ("ids", ids), ("full", full))
        }
    )
    assert full.mean() <= ids.mean() < 0.5 * none.mean()
    assert ids.max() < 0.5 * none.max()
    assert gaps(with_other_experts(batch, 16), policy, "full").mean() > 10 * full.mean()


@pytest.mark.soak  # without an engine: tests/sync/test_plan_vllm.py
def test_ranks_hold_their_parts_of_every_expert(lab: jv.Lab, tmp_path: Path) -> None:
    policy, changed, folder = saved("mixtral", tmp_path, fsdp=2, ep=2)
    with lab.launch(folder, tensor_parallel=2, engine=ROUTED).wait() as pool:
        compared_with_transformers(rollouts(pool, n=1), folder, 2)
        compared_with_a_load(lab, pool, policy, changed, 2, modes=("staged",))


@pytest.mark.soak
@pytest.mark.parametrize("family", SIZES)
def test_ranks_hold_experts_of_their_own(
    lab: jv.Lab, tmp_path: Path, family: str
) -> None:
    policy, changed, folder = saved(family, tmp_path, ep=2)
    with lab.launch(
        folder, tensor_parallel=2, engine={"enable_expert_parallel": True}
    ).wait() as pool:
        link = lab.connect(policy.params, pool, rules="policy", meaning="off")
        held = [p.shape[0] for p in link.plan.parameters if "w13_weight" in p.name]
        assert set(held) == {2}, "two of four experts"
        link.close()
        compared_with_a_load(lab, pool, policy, changed, 2)

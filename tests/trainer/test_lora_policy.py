"""LoRA policies: nothing changes before training, only adapters train, others compute the same with what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._batching import train_batch
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._policy import Policy
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._step import TrainStep
from jvlab.trainer.decoder._lora import LoraParams
from jvlab.trainer.decoder._sharding import mesh
from tests.fuzzing import soak_but
from tests.trainer.decoder.policy_reference import (
    gap,
    reference,
    reference_logits,
    tokens,
)

pytestmark = pytest.mark.slow
IDS = tokens(2048)


def shaken(lora: LoraParams, seed: int = 7) -> LoraParams:
    """Adapters as after training: no value is zero."""
    leaves, tree = jax.tree.flatten(lora)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            leaf + 0.05 * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=True)
        ],
    )


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.from_pretrained(jv.models.tiny("llama"))


@pytest.mark.parametrize("family", soak_but(["qwen3"], ["qwen3", "olmo2", "gemma2"]))
def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same(
    family: str,
) -> None:
    base = Policy.from_pretrained(jv.models.tiny(family), mesh=mesh(fsdp=2, tp=2))
    adapted = base.with_lora(rank=4)
    before = base.logits(base.params, IDS)
    np.testing.assert_array_equal(
        np.asarray(adapted.logits(adapted.lora, IDS)), np.asarray(before)
    )
    trained = shaken(adapted.lora)
    after = adapted.logits(trained, IDS)
    assert gap(after, before) > 0.05, "the adapters are part of what is computed"
    sent = trained.as_sent()
    assert jax.tree.map(lambda x: x.sharding, sent) == jax.tree.map(
        lambda x: x.sharding, trained
    )
    np.testing.assert_array_equal(
        np.asarray(sent["layers"]["attn"]["q"]["lora_b"]),
        2 * np.asarray(trained["layers"]["attn"]["q"]["lora_b"]),
    )
    merged = adapted.merge(trained)
    assert not merged.frozen
    assert gap(merged.logits(merged.params, IDS), after) < 1e-4
    np.testing.assert_array_equal(
        np.asarray(base.logits(base.params, IDS)), np.asarray(before)
    )


def test_in_a_mixture_of_experts_attention_is_adapted() -> None:
    """Router and experts stay as they are: named as targets they are refused, and by default they are left out."""
    base = Policy.from_pretrained(
        jv.models.tiny("qwen3_moe", num_hidden_layers=2), mesh=mesh(fsdp=2, ep=2)
    )
    adapted = base.with_lora(rank=4)
    assert adapted.lora.spec.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(adapted.lora["layers"]) == {"attn"}
    before = base.logits(base.params, IDS)
    np.testing.assert_array_equal(
        np.asarray(adapted.logits(adapted.lora, IDS)), np.asarray(before)
    )
    trained = shaken(adapted.lora)
    after = adapted.logits(trained, IDS)
    assert gap(after, before) > 0.05
    merged = adapted.merge(trained)
    assert gap(merged.logits(merged.params, IDS), after) < 1e-3
    for target in ("gate_proj", "down_proj"):
        with pytest.raises(
            ConfigError,
            match=r"(?s)experts and their router have no adapters.*q_proj, k_proj, v_proj",
        ):
            base.with_lora(targets=["q_proj", target])
    step = TrainStep(adapted.logprobs_fn, learning_rate=1e-2, token_budget=64)
    state = step.init(jax.tree.map(jnp.copy, adapted.lora))
    state, report = step(
        state, train_batch(samples(adapted), np.array([0, 1.0] * 3), Algorithm())
    )
    assert not report.skipped
    assert len(report.experts["max"]) == 2, (
        "the loads of experts below adapters are counted too"
    )
    assert float(jnp.abs(state.params["layers"]["attn"]["q"]["lora_b"]).max()) > 0


def samples(policy: Policy, seed: int = 0) -> Any:
    from jvlab.record._sample import Sample

    rng = np.random.default_rng(seed)
    return [
        Sample(
            prompt_index=i // 2,
            sample_index=i % 2,
            prompt_token_ids=rng.integers(10, 2000, 3),
            token_ids=rng.integers(10, 2000, 5 + i),
            logprobs=rng.normal(-7, 0.1, 5 + i),
            versions=((0, 0, 5 + i),),
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("budget", [None, 64])
def test_only_adapters_train(policy: Policy, budget: int | None) -> None:
    adapted = policy.with_lora(rank=4, targets=["q_proj", "down_proj"])
    base = jax.tree.map(np.array, adapted.frozen)
    step = TrainStep(adapted.logprobs_fn, learning_rate=1e-2, token_budget=budget)
    state = step.init(jax.tree.map(jnp.copy, adapted.lora))
    assert isinstance(state.params, LoraParams)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * adapted.parameters, "of the adapters, and of nothing else"
    batch = train_batch(samples(adapted), np.array([0, 1.0] * 3), Algorithm())
    losses = []
    for _ in range(3):
        state, report = step(state, batch)
        assert not report.skipped
        losses.append(report.loss)
    assert report.compiled == 0
    assert losses[2] < losses[0]
    assert state.params.spec == adapted.lora.spec
    q = state.params["layers"]["attn"]["q"]
    assert float(jnp.abs(q["lora_b"]).max()) > 0
    jax.tree.map(np.testing.assert_array_equal, adapted.frozen, base)
    text = (
        step._programs["score"]
        .lower(
            state.params,
            next(iter(step._parts(batch))).token_arrays(batch),
            step._frozen,
        )
        .as_text()
    )
    assert "dense_resource" not in text
    assert len(text) < 300_000, "the base is an argument of the program, not part of it"


def test_packed_rows_give_what_single_ones_do(policy: Policy) -> None:
    adapted = policy.with_lora(rank=4)
    trained, batch = (
        shaken(adapted.lora),
        train_batch(samples(adapted), np.arange(6.0), Algorithm()),
    )
    packed = TrainStep(adapted.logprobs_fn, token_budget=64).score(trained, batch)
    padded = TrainStep(adapted.logprobs_fn).score(trained, batch)
    np.testing.assert_allclose(packed, padded, atol=2e-5)
    assert (
        np.abs(packed - TrainStep(adapted.logprobs_fn).score(adapted.lora, batch)).max()
        > 0.05
    )


def test_a_checkpoint_of_a_run_holds_adapters_alone(
    policy: Policy, tmp_path: Path
) -> None:
    adapted = policy.with_lora(rank=4)
    step, kept = TrainStep(adapted.logprobs_fn, donate=False), Checkpoints(tmp_path)
    path = kept.save(
        step.init(shaken(adapted.lora)), Position(step=1, version=1, seed=0, groups=2)
    )
    found = kept.load(path, step.init(adapted.lora))
    jax.tree.map(np.testing.assert_array_equal, found.params, shaken(adapted.lora))
    assert isinstance(found.params, LoraParams)
    other = policy.with_lora(rank=8)
    with pytest.raises(ConfigError, match="does not fit this policy"):
        kept.load(path, TrainStep(other.logprobs_fn, donate=False).init(other.lora))
    kept.close()


def test_peft_loads_what_is_saved(policy: Policy, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    adapted = policy.with_lora(
        rank=4, alpha=12, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    )
    adapted.lora = shaken(adapted.lora)
    folder = adapted.save_pretrained(tmp_path / "adapter")
    assert sorted(f.name for f in Path(folder).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    theirs = peft.PeftModel.from_pretrained(reference(str(policy.source)), folder)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(np.asarray(IDS))).logits.numpy()
    assert gap(adapted.logits(adapted.lora, IDS), expected) < 5e-5
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    config["lora_alpha"] = 8  # the comparison sees a wrong scale
    Path(folder, "adapter_config.json").write_text(json.dumps(config))
    other = peft.PeftModel.from_pretrained(reference(str(policy.source)), folder)
    with torch.no_grad():
        assert (
            gap(other(torch.from_numpy(np.asarray(IDS))).logits.numpy(), expected)
            > 1e-3
        )


def test_a_merged_policy_is_saved_as_a_model(policy: Policy, tmp_path: Path) -> None:
    adapted = policy.with_lora(rank=4)
    adapted.lora = shaken(adapted.lora)
    saved = adapted.merge().save_pretrained(tmp_path / "merged")
    assert (
        gap(reference_logits(reference(saved), IDS), adapted.logits(adapted.lora, IDS))
        < 1e-4
    )


def test_what_cannot_be_adapted_is_refused(policy: Policy) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)target 'c_attn' is not a linear map.*targets: q_proj"
    ):
        policy.with_lora(targets=["c_attn"])
    with pytest.raises(ConfigError, match="rank=0"):
        policy.with_lora(rank=0)
    with pytest.raises(ConfigError, match="alpha=-1"):
        policy.with_lora(alpha=-1)
    with pytest.raises(ConfigError, match="no targets"):
        policy.with_lora(targets=[])
    fused = Policy.from_pretrained(jv.models.tiny("phi3"))
    with pytest.raises(
        ConfigError,
        match=r"'q_proj' is a part of model.layers.0.self_attn.qkv_proj.weight",
    ):
        fused.with_lora(targets=["q_proj"])
    assert fused.with_lora(targets=["o_proj", "down_proj"]).lora.spec.targets == (
        "o_proj",
        "down_proj",
    )
    with pytest.raises(ConfigError, match=r"(?s)no adapters.*with_lora"):
        _ = policy.lora


def test_memory_counts_the_base_once(policy: Policy) -> None:
    adapted = policy.with_lora(rank=4)
    plain, ours = policy.memory(2, 64), adapted.memory(2, 64)
    assert ours.parameters > plain.parameters
    assert ours.moments == 8 * adapted.parameters < plain.moments

"""Training with an engine's experts: ids, order and weights reach every layer, packed or padded; what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, TrainBatch, train_batch
from jvlab.trainer._grpo import grpo
from jvlab.trainer._grpo_config import GrpoConfig
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._step import TrainStep
from jvlab.trainer.decoder._config import DecoderConfig
from jvlab.trainer.decoder._experts import Routes, route
from tests.trainer.fake_pool import FakeLink, FakePool, fresh_params, logprobs_fn, task

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 288,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("renormalised", [True, False])
def test_ids_weights_and_order(renormalised: bool) -> None:
    config = DecoderConfig.from_hf(
        {"model_type": "qwen3_moe", **SIZES, "norm_topk_prob": renormalised}
    )
    shares = np.array([0.05, 0.4, 0.15, 0.25, 0.1, 0.05])
    scores = jnp.log(jnp.asarray(shares))[None, None].repeat(3, axis=1)
    ids = jnp.asarray([[[2, 1], [-1, -1], [4, 0]]], jnp.int16)
    found, weights = route(scores, config, Routes(ids))
    # the engine's order; its own choice where -1 is
    np.testing.assert_array_equal(found, [[[2, 1], [1, 3], [4, 0]]])
    total = lambda *of: (
        shares[list(of)] / (shares[list(of)].sum() if renormalised else 1)
    )
    np.testing.assert_allclose(
        weights, [[total(2, 1), total(1, 3), total(4, 0)]], rtol=1e-6
    )
    given = jnp.full(ids.shape, 0.875, jnp.float32)
    found, weights = route(scores, config, Routes(ids, given))
    np.testing.assert_array_equal(found, [[[2, 1], [1, 3], [4, 0]]])
    np.testing.assert_allclose(
        weights, [[[0.875, 0.875], total(1, 3), [0.875, 0.875]]], rtol=1e-6
    )
    slope = jax.grad(
        lambda scores, routes: jnp.sum(
            route(scores, config, routes)[1] * jnp.array([1.0, 3.0])
        )
    )
    moved = lambda routes: np.any(np.asarray(slope(scores, routes)), axis=-1)[
        0
    ].tolist()
    assert moved(Routes(ids)) == [True, True, True]
    assert moved(Routes(ids, given)) == [False, True, False], (
        "a constant has no gradient"
    )


def batch_of(policy: jv.Policy, replay: str, shift: int = 0) -> TrainBatch:
    """Eight samples of different lengths; experts that no router would choose, `shift` further."""
    rng, config = np.random.default_rng(0), policy.config
    samples = []
    for index in range(8):
        before, after = int(rng.integers(1, 6)), int(rng.integers(2, 12))
        shape = before + after, config.layers, config.chosen
        first = rng.integers(0, config.experts, (*shape[:2], 1))
        ids = ((first + np.array([0, 3]) + shift) % config.experts).astype(np.int16)
        ids[-1] = -1
        drawn = rng.integers(0, config.vocab, before + after)
        samples.append(
            Sample(
                prompt_index=index // 4,
                sample_index=index,
                prompt_token_ids=drawn[:before],
                token_ids=drawn[before:],
                logprobs=rng.normal(-5, 0.3, after),
                versions=((1, 0, after),),
                expert_ids=ids,
                expert_weights=rng.random(shape),
            )
        )
    return train_batch(
        samples, rng.random(8), Algorithm(), Buckets(rows=4), replay=replay
    )


@pytest.mark.slow
def test_packed_rows_carry_them_and_constants_have_no_gradient() -> None:
    policy = jv.Policy.from_pretrained(jv.models.tiny("qwen3_moe", **SIZES))
    step = TrainStep(
        policy.logprobs_fn,
        token_budget=64,
        optimizer=optax.sgd(1.0),
        max_grad_norm=None,
        donate=False,
    )
    batch: Any = batch_of(policy, "full")
    state, run = step.init(policy.params), cast(Any, step)
    (after, full), (_, shifted) = (
        run(state, batch),
        run(state, batch_of(policy, "full", shift=1)),
    )
    assert np.abs(full.logprobs - shifted.logprobs).max() > 0.1, (
        "other experts, and nothing has changed"
    )
    one_by_one = lambda *routes: policy.logprobs(
        policy.params, batch.tokens, batch.token_mask, routes=routes
    )
    np.testing.assert_allclose(
        full.logprobs, one_by_one(batch.expert_ids, batch.expert_weights), atol=2e-5
    )
    # as a reference is scored, with experts of its own
    own = step.score(policy.params, batch)
    np.testing.assert_allclose(
        own, one_by_one(batch.expert_ids * 0 - 1, batch.expert_weights), atol=2e-5
    )
    assert np.abs(own - full.logprobs).max() > 0.1
    kernels = [
        {name: np.asarray(at["kernel"]) for name, at in p["layers"]["moe"].items()}
        for p in (policy.params, after.params)
    ]
    changed = {
        name for name in kernels[0] if np.any(kernels[0][name] != kernels[1][name])
    }
    assert changed == {"gate", "up", "down"}, "not the router"


def test_padded_rows_carry_them() -> None:
    policy: Any = SimpleNamespace(
        config=DecoderConfig.from_hf({"model_type": "qwen3_moe", **SIZES})
    )
    batch = batch_of(policy, "full")
    part, *_ = batch.buckets.parts(batch.lengths)
    rows = part.samples
    found = part.token_arrays(batch, batch.replayed)
    for at, row in enumerate(rows):
        width = batch.lengths[row]
        np.testing.assert_array_equal(
            found["expert_ids"][at, :width],
            batch.expert_ids[row, :width],  # type: ignore
        )
        np.testing.assert_array_equal(
            found["expert_weights"][at, :width],
            batch.expert_weights[row, :width],  # type: ignore
        )


@pytest.mark.slow
def test_routes_of_another_model_are_refused() -> None:
    policy = jv.Policy.from_pretrained(jv.models.tiny("qwen3_moe", **SIZES))
    ids = np.zeros((1, 4, 2, 2), np.int16)
    for wrong in (ids[:, :3], ids + 6, ids - 2):
        with pytest.raises(
            ConfigError, match=r"pass arrays of shape \(1, 4, 2, 2\), ids from -1 to 5"
        ):
            policy.logprobs(policy.params, np.array([[5, 6, 7, 8]]), routes=(wrong,))
    dense = jv.Policy.from_pretrained(jv.models.tiny("llama"))
    with pytest.raises(ConfigError, match="llama has no experts"):
        dense.logprobs(dense.params, np.array([[5, 6, 7, 8]]), routes=(ids,))


def test_samples_without_experts_are_refused() -> None:
    of: dict[str, Any] = {
        "prompt_token_ids": [5],
        "token_ids": [6, 7],
        "logprobs": [-1.0, -1.0],
        "versions": ((1, 0, 2),),
    }
    plain = Sample(0, 0, **of)
    with pytest.raises(ConfigError, match="sample 0 has no experts"):
        train_batch([plain], [1.0], replay="ids")
    known = Sample(0, 0, **of, expert_ids=np.zeros((3, 2, 2)))
    assert set(train_batch([known], [1.0], replay="ids").replayed) == {"expert_ids"}
    assert not train_batch([known], [1.0]).replayed, "not asked for"
    with pytest.raises(ConfigError, match="sample 0 has no weights of experts"):
        train_batch([known], [1.0], replay="full")
    with pytest.raises(ConfigError, match=r"experts of shape \(2, 2, 2\) for 3 tokens"):
        Sample(0, 0, **of, expert_ids=np.zeros((2, 2, 2)))
    with pytest.raises(ConfigError, match="takes no routes"):
        TrainStep(logprobs_fn)(
            TrainStep(logprobs_fn).init(fresh_params()),
            train_batch([known], [1.0], replay="ids"),
        )


def test_what_a_run_refuses(tmp_path: Any) -> None:
    pool = FakePool()
    with pytest.raises(ConfigError, match="one of none, ids, full"):
        grpo(
            (fresh_params(), logprobs_fn),
            pool,  # type: ignore
            FakeLink(pool),  # type: ignore
            task(),
            folder=tmp_path,
            replay="weights",
        )
    with pytest.raises(ConfigError, match="logprobs_fn takes no routes"):
        grpo(
            (fresh_params(), logprobs_fn),
            pool,  # type: ignore
            FakeLink(pool),  # type: ignore
            task(),
            folder=tmp_path,
            replay="ids",
        )
    with_routes = lambda params, tokens, mask, routes=None: logprobs_fn(
        params, tokens, mask
    )

    def refusal(
        replay: str,
        delivers: str = "full",
        staleness: int = 0,
        experts: int = 6,
        **of_task: Any,
    ) -> str:
        policy: Any = SimpleNamespace(config=SimpleNamespace(experts=experts))
        pool: Any = SimpleNamespace(
            facts=lambda: SimpleNamespace(routed_experts=delivers)
        )
        chosen: Any = SimpleNamespace(**{"environment": None, **of_task})
        try:
            GrpoConfig(max_staleness=staleness, replay=replay).check_replay_of(
                policy, with_routes, pool, chosen
            )
        except ConfigError as error:
            return f"{error.message} → {error.remedy}"
        return ""

    assert "no experts" in refusal("ids", experts=0)
    assert "enable_return_routed_experts" in refusal("ids", delivers="")
    assert 'replay="ids"' in refusal("full", delivers="ids")
    assert "max_staleness=0" in refusal("ids", delivers="ids", staleness=1)
    assert "with turns" in refusal("ids", environment=object)
    assert [
        refusal("none", delivers="", experts=0),
        refusal("ids", "ids"),
        refusal("full", staleness=2),
    ] == [""] * 3

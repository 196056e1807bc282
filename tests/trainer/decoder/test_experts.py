"""Mixtures of experts: the grouped product against a loop over experts, meshes with an `ep` axis, packed rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jvlab as jv
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder._config import DecoderConfig
from jvlab.trainer.decoder._experts import mixture, route
from jvlab.trainer.decoder._sharding import bytes_per_device, mesh
from tests.trainer.decoder.policy_reference import tokens

pytestmark = pytest.mark.slow

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
MIX = partial(mixture, activation=jax.nn.silu, precision=jax.lax.Precision.HIGHEST)


def _layer(experts: int = 5, chosen: int = 2) -> tuple[Any, ...]:
    """Tokens [2, 7, 8], their experts and weights, and three kernels."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = np.stack(
        [[rng.permutation(experts)[:chosen] for _ in range(7)] for _ in range(2)]
    )
    kernels = draw(experts, 8, 6), draw(experts, 8, 6), draw(experts, 6, 8)
    return draw(2, 7, 8), jnp.asarray(ids), jnp.abs(draw(2, 7, chosen)), *kernels


def _loop(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> np.ndarray:
    """The same, token by token and expert by expert."""
    out = np.zeros(x.shape)
    for at in np.ndindex(ids.shape):
        token, e = np.asarray(x[at[:2]], np.float64), int(ids[at])
        inner = token @ np.asarray(gate[e])
        out[at[:2]] += float(weights[at]) * (
            (inner / (1 + np.exp(-inner)) * (token @ np.asarray(up[e]))) @ down[e]
        )
    return out


def test_the_grouped_product_is_that_of_a_loop() -> None:
    layer = _layer()
    np.testing.assert_allclose(MIX(*layer), _loop(*layer), atol=1e-4)
    x, ids, *rest = layer
    # four idle experts
    np.testing.assert_allclose(
        MIX(x, ids * 0 + 3, *rest), _loop(x, ids * 0 + 3, *rest), atol=1e-4
    )
    swapped = MIX(
        x, ids, rest[0], *(kernel[jnp.array([1, 0, 2, 3, 4])] for kernel in rest[1:])
    )
    assert np.abs(swapped - _loop(*layer)).max() > 0.1, (
        "an expert's number does not matter"
    )


def test_parts_of_the_experts_add_up() -> None:
    """As on two devices, of three experts and two; the gradient too, and where a device's kernels make NaN for none."""
    x, ids, weights, *kernels = _layer()

    def total(kernels: Any, x: jax.Array, parts: bool) -> jax.Array:
        if not parts:
            return MIX(x, ids, weights, *kernels)
        return sum(
            MIX(x, ids, weights, *(k[a:b] for k in kernels), first=a)
            for a, b in ((0, 3), (3, 5))
        )  # type: ignore[return-value]

    whole, back = jax.vjp(lambda k, x: total(k, x, False), kernels, x)
    parts, parts_back = jax.vjp(lambda k, x: total(k, x, True), kernels, x)
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)
    jax.tree.map(close, parts_back(jnp.cos(whole)), back(jnp.cos(whole)))
    nobody = MIX(x, ids * 0 + 4, weights, *(k[:3] for k in kernels), first=0)
    np.testing.assert_array_equal(nobody, 0)


def test_weights_of_the_chosen() -> None:
    scores = jnp.log(jnp.asarray([[[0.1, 0.4, 0.2, 0.3]]]))
    base = {"model_type": "qwen3_moe", **SIZES, "num_experts": 4}
    ids, weights = route(
        scores, DecoderConfig.from_hf({**base, "norm_topk_prob": False})
    )
    np.testing.assert_array_equal(ids, [[[1, 3]]])
    np.testing.assert_allclose(weights, [[[0.4, 0.3]]], rtol=1e-6)
    _, weights = route(scores, DecoderConfig.from_hf({**base, "norm_topk_prob": True}))
    np.testing.assert_allclose(weights, [[[4 / 7, 3 / 7]]], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ whole models


@pytest.fixture(scope="module")
def path() -> str:
    return jv.models.tiny("qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray]:
    return tokens(288, 6, 12), np.arange(12) < np.array([12, 10, 12, 5, 12, 12])[
        :, None
    ]


def _gradient(
    policy: Policy, batch: tuple[np.ndarray, np.ndarray]
) -> tuple[Any, Any, Any]:
    """Log-probabilities, loads, and the gradient of their mean, in one program."""

    def mean(params: Any) -> tuple[jax.Array, Any]:
        found, loads = policy.logprobs_fn(params, *batch, with_loads=True)
        return found.mean(), (found, loads)

    (_, (found, loads)), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(
        policy.params
    )
    return np.asarray(found), np.asarray(loads), gradient


@pytest.fixture(scope="module")
def alone(path: str, batch: Any) -> tuple[Any, Any, Any]:
    return _gradient(Policy.from_pretrained(path), batch)


def test_gradients_are_finite_and_reach_every_leaf(alone: Any, batch: Any) -> None:
    for name, leaf in jax.tree_util.tree_leaves_with_path(alone[2]):
        assert np.isfinite(leaf).all(), name
        assert np.any(leaf), name
    assert (alone[1].sum(axis=1) == 2 * batch[1].sum()).all(), (
        "two experts for each token that is not padding"
    )


# Tokens and experts split over ep; tokens not, since 6 rows do not divide by 4; ep beside tp.
@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"ep": 3}, marks=pytest.mark.soak),
        {"fsdp": 2, "ep": 2},
        pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_numbers(
    axes: dict[str, int], path: str, batch: Any, alone: Any
) -> None:
    policy = Policy.from_pretrained(
        path, mesh=mesh(**axes), remat="dots" if "tp" in axes else None
    )
    found, loads, gradient = _gradient(policy, batch)
    np.testing.assert_allclose(found, alone[0], atol=2e-4)
    np.testing.assert_array_equal(loads, alone[1])
    close = lambda a, b: np.testing.assert_allclose(
        a, b, atol=1e-3 * np.abs(np.asarray(b)).max()
    )
    jax.tree.map(close, gradient, alone[2])
    same = jax.tree.map(
        lambda g, p: g.sharding.is_equivalent_to(p.sharding, p.ndim),
        gradient,
        policy.params,
    )
    assert all(jax.tree.leaves(same)), (
        "an optimiser step would move parameters between devices"
    )
    experts = [
        policy.params["layers"]["moe"][name]["kernel"]
        for name in ("gate", "up", "down")
    ]
    split = axes["ep"] * axes.get("tp", 1) * axes.get("fsdp", 1)
    assert bytes_per_device(experts) == sum(leaf.nbytes for leaf in experts) // split
    assert not policy.sharding_notes


def test_experts_that_do_not_divide_are_replicated_and_said(path: str) -> None:
    policy = Policy.from_pretrained(path, mesh=mesh(ep=4))
    assert policy.params["layers"]["moe"]["gate"]["kernel"].sharding.is_fully_replicated
    assert (
        "layers.moe.gate.kernel (2, 6, 32, 16) is replicated along ep: no suitable dimension divides by 4"
        in (policy.sharding_notes)
    )
    dense = Policy.from_pretrained(jv.models.tiny("llama"), mesh=mesh(ep=2))
    assert dense.shardings["layers"]["mlp"]["gate"]["kernel"].spec == PartitionSpec()


def test_packed_rows_are_padded_rows(path: str, batch: Any, alone: Any) -> None:
    """Two samples end to end in a row, and padding: the same log-probabilities and loads as a row for each."""
    ids, mask = batch
    policy, lengths = Policy.from_pretrained(path), mask.sum(axis=1)
    rows, segments = np.zeros((3, 26), np.int32), np.zeros((3, 26), np.int32)
    for row in range(3):
        first, second = (ids[i][mask[i]] for i in (2 * row, 2 * row + 1))
        rows[row, : len(first) + len(second)] = np.concatenate([first, second])
        (
            segments[row, : len(first)],
            segments[row, len(first) : len(first) + len(second)],
        ) = 1, 2
    found, loads = policy.logprobs_fn(
        policy.params, rows, segments=segments, most=2, with_loads=True
    )
    for row in range(3):
        a, b = lengths[2 * row], lengths[2 * row + 1]
        np.testing.assert_allclose(found[row, :a], alone[0][2 * row, :a], atol=2e-5)
        np.testing.assert_allclose(
            found[row, a : a + b], alone[0][2 * row + 1, :b], atol=2e-5
        )
    np.testing.assert_array_equal(loads, alone[1])

"""One policy on meshes of any shape: the same numbers, less memory a device, gradients with and without remat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder._sharding import Layout, bytes_per_device, mesh
from tests.trainer.decoder.policy_reference import tokens

pytestmark = pytest.mark.slow

# sizes that 2, 3 and 6 divide, so that every mesh below splits something
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 2304,
    "num_hidden_layers": 2,
}
MESHES = [{"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 3}]
MORE = [{"fsdp": 3}, {"tp": 2}]


@pytest.fixture(scope="module")
def path() -> str:
    return jv.models.tiny("llama", **SIZES)


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = tokens(2304, 6, 24)
    return ids, np.arange(24) < np.array([24, 20, 24, 7, 24, 24])[:, None]


def _gradient(
    policy: Policy, batch: tuple[np.ndarray, np.ndarray]
) -> tuple[jax.Array, Any]:
    """Log-probabilities, and the gradient of their mean, in one program."""

    def mean(params: Any) -> tuple[jax.Array, jax.Array]:
        found = policy.logprobs_fn(params, *batch)
        return found.mean(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(
        policy.params
    )
    return found, gradient


@pytest.fixture(scope="module")
def alone(
    path: str, batch: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, Any, int]:
    policy = Policy.from_pretrained(path)
    assert policy.mesh.size == 1
    found, gradient = _gradient(policy, batch)
    return np.asarray(found), gradient, bytes_per_device(jax.tree.leaves(policy.params))


def _close(found: Any, expected: Any, share: float) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), atol=share * np.abs(np.asarray(b)).max()
        ),
        found,
        expected,
    )


@pytest.mark.parametrize(
    "axes",
    [*MESHES, *(pytest.param(axes, marks=pytest.mark.soak) for axes in MORE)],
    ids=lambda axes: "x".join(f"{k}{v}" for k, v in axes.items()),
)
def test_every_mesh_gives_the_same_numbers(
    axes: dict[str, int], path: str, batch: Any, alone: Any
) -> None:
    policy = Policy.from_pretrained(path, mesh=mesh(**axes))
    expected, gradient, bytes_alone = alone
    logprobs, found = _gradient(policy, batch)
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    _close(found, gradient, 1e-3)
    same = jax.tree.map(
        lambda g, p: g.sharding.is_equivalent_to(p.sharding, p.ndim),
        found,
        policy.params,
    )
    assert all(jax.tree.leaves(same)), (
        "an optimiser step would move parameters between devices"
    )
    held = bytes_per_device(jax.tree.leaves(policy.params))
    split = axes.get("fsdp", 1) * axes.get("tp", 1)
    assert held < bytes_alone / split * 1.25, (
        "norms alone are replicated, and k and v where tp does not divide them"
    )


def test_the_table() -> None:
    layout = Layout(mesh(fsdp=2, tp=2))

    def spec(letters: str, *shape: int) -> PartitionSpec:
        return layout.parameter(letters, shape)[0].spec

    assert spec("dnh", 8, 4, 6) == PartitionSpec("fsdp", "tp")
    assert spec("nhd", 4, 6, 8) == PartitionSpec("tp", None, "fsdp")
    assert spec("vd", 10, 8) == PartitionSpec("tp", "fsdp")
    assert spec("-", 8) == PartitionSpec()
    # a bias: too small to be worth a gather
    assert spec("nh", 4, 6) == PartitionSpec("tp")
    # d does not divide: fsdp goes where it can
    assert spec("df", 7, 8) == PartitionSpec(None, ("tp", "fsdp"))
    assert spec("dkh", 8, 3, 6) == PartitionSpec("fsdp")
    assert layout.parameter("dkh", (8, 3, 6))[1] == ("tp",)


def test_what_does_not_divide_is_replicated_and_said() -> None:
    """128 by 3: only the MLP's 384 splits; heads of 4 and 2, and the vocabulary of 2048, do not."""
    policy = Policy.from_pretrained(jv.models.tiny("llama"), mesh=mesh(fsdp=3))
    specs = {
        path: policy.shardings["layers"]["mlp"][path]["kernel"].spec
        for path in ("gate", "down")
    }
    assert specs == {
        "gate": PartitionSpec(None, None, "fsdp"),
        "down": PartitionSpec(None, "fsdp"),
    }
    assert policy.params["embed"]["embedding"].sharding.is_fully_replicated
    assert (
        "layers.attn.q.kernel (4, 128, 4, 32) is replicated along fsdp: no suitable dimension divides by 3"
        in (policy.sharding_notes)
    )
    assert not any("mlp" in note or "norm" in note for note in policy.sharding_notes)


def test_a_mesh_of_other_axes_is_used_and_said(path: str) -> None:
    other = Mesh(np.asarray(jax.devices()[:2]), ("model",))
    policy = Policy.from_pretrained(path, mesh=other)
    assert policy.sharding_notes == (
        "everything is replicated along mesh axis 'model': nothing is sharded over it",
    )


def test_wrong_meshes() -> None:
    with pytest.raises(
        ConfigError,
        match=r"mesh\(fsdp=40, tp=2\) needs 80 devices, but jax has \d+ \(cpu\)",
    ) as caught:
        mesh(fsdp=40, tp=2)
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=80" in caught.value.remedy
    with pytest.raises(ConfigError, match="mesh axis 'data'"):
        mesh(data=2)
    with pytest.raises(ConfigError, match="mesh axis of size 0"):
        mesh(fsdp=0)
    with pytest.raises(ConfigError, match="mesh"):
        Policy.from_pretrained(jv.models.tiny("llama"), mesh=3)  # type: ignore[arg-type]
    assert mesh().shape == {"fsdp": len(jax.devices())}


@pytest.mark.parametrize("remat", [True, "dots"])
def test_remat_gives_the_same_gradient(
    path: str, batch: Any, alone: Any, remat: Any
) -> None:
    policy = Policy.from_pretrained(path, remat=remat)
    assert repr(policy).endswith(f", remat {'full' if remat is True else remat})")
    value, gradient = _gradient(policy, batch)
    np.testing.assert_allclose(value, alone[0], atol=2e-5)
    _close(gradient, alone[1], 1e-4)
    assert all(
        np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradient)
    )
    ids, mask = batch
    program = str(
        jax.make_jaxpr(jax.grad(lambda p: policy.logprobs_fn(p, ids, mask).mean()))(
            policy.params
        )
    )
    # the scanned layer, and the head
    assert program.count("checkpoint[") + program.count("remat2[") > 1


def test_mixed_precision(path: str, batch: Any, alone: Any) -> None:
    """float32 masters and gradients, bfloat16 matrix products: near the float32 numbers, and not equal to them."""
    policy = Policy.from_pretrained(
        path, compute_dtype="bfloat16", mesh=mesh(fsdp=2, tp=2)
    )
    assert repr(policy) == (
        "Policy(llama, 664K parameters, float32 computing in bfloat16, mesh fsdp=2 × tp=2)"
    )
    found, gradient = _gradient(policy, batch)
    assert found.dtype == jnp.float32
    error = np.abs(np.asarray(found) - alone[0])
    assert 1e-4 < error.max() < 1.0
    assert error.mean() < 0.1
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradient)} == {"float32"}
    ours, theirs = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)])
        for g in (gradient, alone[1])
    )
    assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.99


def test_faces(path: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(path, mesh=mesh(tp=2), dtype="bfloat16")
    assert repr(policy) == "Policy(llama, 664K parameters, bfloat16, mesh tp=2)"
    html = policy._repr_html_()
    for fact in (
        "llama, 2 layers",
        "mesh tp=2",
        "bfloat16",
        "bytes per device",
        "divides by 2",
    ):
        assert fact in html, fact
    assert str(tmp_path.parent) not in html

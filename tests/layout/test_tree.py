"""Any pytree of parameters as flat paths."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from jvlab._errors import LayoutError
from jvlab.layout._tree import LeafShape, flatten
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._ruleset import Rules


def test_nested_dicts_lists_and_named_tuples() -> None:
    class Block(NamedTuple):
        w: Any
        b: Any

    second = Block(np.zeros((2, 3)), np.zeros(3, np.int8))
    tree = {"layers": [Block(np.zeros((2, 3)), None), second], "a.b": np.ones(())}
    flat = flatten(tree)
    assert flat.shapes == {
        "layers.0.w": LeafShape((2, 3), "float64"),
        "layers.1.w": LeafShape((2, 3), "float64"),
        "layers.1.b": LeafShape((3,), "int8"),
        "a.b": LeafShape((), "float64"),
    }
    assert [(n.name, n.reason) for n in flat.skipped] == [("layers.0.b", "None")]
    assert flat.arrays["layers.1.b"] is second.b


def test_jax_arrays_and_shapes_without_arrays() -> None:
    import jax
    import jax.numpy as jnp

    def init() -> dict[str, Any]:
        return {"w": jnp.zeros((4, 2), jnp.bfloat16), "n": {"scale": jnp.ones(2)}}

    want = {"w": LeafShape((4, 2), "bfloat16"), "n.scale": LeafShape((2,), "float32")}
    assert flatten(init()).shapes == flatten(jax.eval_shape(init)).shapes == want


def test_prng_keys_are_skipped_and_listed() -> None:
    import jax

    flat = flatten({"key": jax.random.key(0), "w": np.zeros(2)})
    assert set(flat.arrays) == {"w"}
    assert [(n.name, n.reason) for n in flat.skipped] == [("key", "a PRNG key")]


def test_nnx_modules_and_states_skip_rng_state() -> None:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.proj = nnx.Linear(3, 4, rngs=rngs)
            self.blocks = nnx.List([nnx.LayerNorm(4, rngs=rngs) for _ in range(2)])
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    want = {"proj.kernel": (3, 4), "proj.bias": (4,)}
    want |= {f"blocks.{i}.{x}": (4,) for i in range(2) for x in ("scale", "bias")}
    for tree in (
        model,
        nnx.state(model),
        nnx.split(model)[1],
        nnx.eval_shape(lambda: Model(nnx.Rngs(0))),
    ):
        flat = flatten(tree)
        assert {p: a.shape for p, a in flat.shapes.items()} == want
        assert all(n.reason == "nnx RNG state: no parameter" for n in flat.skipped)
        assert any(n.name.startswith("drop.rngs") for n in flat.skipped)
    params = flatten(nnx.state(model, nnx.Param))
    assert {p: a.shape for p, a in params.shapes.items()} == want
    assert params.skipped == ()
    np.testing.assert_array_equal(
        np.asarray(params.arrays["proj.kernel"]), np.asarray(model.proj.kernel[...])
    )


def test_linen_variables_frozen_or_not_enter_params() -> None:
    import jax
    from flax import linen as nn
    from flax.core import freeze

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.BatchNorm(use_running_average=True)(
                nn.Dense(5, kernel_init=kernel)(x)
            )

    variables = Net().init(jax.random.key(0), np.zeros((1, 3), np.float32))
    want = {
        "Dense_0.kernel": (3, 5),
        "Dense_0.bias": (5,),
        "BatchNorm_0.scale": (5,),
        "BatchNorm_0.bias": (5,),
    }
    for tree in (variables, freeze(variables)):
        flat = flatten(tree)
        assert {p: a.shape for p, a in flat.shapes.items()} == want
        assert [n.name for n in flat.skipped] == ["batch_stats"]
    assert set(flatten(variables["params"]).arrays) == set(want)


def test_registered_pytree_classes() -> None:
    import jax

    node = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Node", ["w", "inner"]), ["w", "inner"], []
    )
    tree = node(np.zeros(2), {"x": node(np.zeros(3), None)})
    assert {p: a.shape for p, a in flatten(tree).shapes.items()} == {
        "w": (2,),
        "inner.x.w": (3,),
    }


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        ({"a": 3}, "leaf a is of type int"),
        (object(), "tree itself"),
        ({"a": "w"}, "str"),
    ],
)
def test_a_leaf_that_is_no_array(tree: Any, what: str) -> None:
    with pytest.raises(LayoutError, match=what) as caught:
        flatten(tree)
    assert "nnx.state" in caught.value.remedy


def test_paths_that_collide() -> None:
    with pytest.raises(LayoutError, match=r"two leaves have the path a\.b"):
        flatten({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})


def test_a_flat_tree_binds() -> None:
    tree = {"model": {"norm": {"weight": np.zeros(3)}}}
    tensor = CheckpointTensor("model.norm.weight", (3,), "bfloat16")
    (binding,) = Rules.named("checkpoint").bind(flatten(tree).shapes, [tensor])
    assert (binding.leaf, binding.tensor) == ("model.norm.weight", "model.norm.weight")

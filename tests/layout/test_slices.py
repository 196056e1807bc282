"""Slices of stacked leaves: which dimension holds layers, how a slice is named, and what is not finite in it."""

from __future__ import annotations

import numpy as np
import pytest

from jvlab.layout._digest import examine, merged
from jvlab.layout._plan_types import ValueTransform
from jvlab.layout._slices import (
    distinct_leaves,
    layer_number,
    numbered,
    parse_slice,
    slice_name,
    slice_of,
    slice_text,
    stacked_dims,
    without_number,
    without_slice,
)
from jvlab.layout._tree import TorchLeaf
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._ruleset import Rules

LAYERS = 3


def bound(rule: str, leaf: tuple[int, ...], tensors: dict[str, tuple[int, ...]]):
    path = rule.partition(" -> ")[0]
    listed = [
        CheckpointTensor(name, shape, "float32") for name, shape in tensors.items()
    ]
    return Rules.parse(rule).bind({path: np.zeros(leaf, np.float32)}, listed, {})


def of_layers(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {name.replace("#", str(i)): shape for i in range(LAYERS)}


def test_the_dimension_of_layers_is_found_wherever_it_is():
    first = bound(
        "layers.q -> model.layers.{i}.q.weight : i a b -> b a",
        (LAYERS, 4, 6),
        of_layers("model.layers.#.q.weight", (6, 4)),
    )
    assert stacked_dims(first) == {"layers.q": 0}
    assert [slice_name(b, {"layers.q": 0}) for b in first] == [
        "layers.q[0]",
        "layers.q[1]",
        "layers.q[2]",
    ]
    second = bound(
        "stack.q -> model.layers.{i}.q.weight : a i b -> b a",
        (4, LAYERS, 6),
        of_layers("model.layers.#.q.weight", (6, 4)),
    )
    assert stacked_dims(second) == {"stack.q": 1}
    assert str(slice_of(second[2], {"stack.q": 1})) == "[:, 2]"
    assert slice_of(second[2], {}) is None


def test_experts_and_fused_leaves_are_no_stacks_of_layers():
    names = {f"model.layers.0.experts.{e}.up.weight": (6, 4) for e in range(4)}
    experts = bound(
        "layers.{i}.up -> model.layers.{i}.experts.{e}.up.weight : e a b -> b a".replace(
            "{i}", "0"
        ),
        (4, 4, 6),
        names,
    )
    assert len(experts) == 4
    assert stacked_dims(experts) == {}
    both = {
        f"model.layers.{i}.experts.{e}.up.weight": (6, 4)
        for i in range(LAYERS)
        for e in range(4)
    }
    scanned = bound(
        "layers.up -> model.layers.{i}.experts.{e}.up.weight : e i a b -> b a",
        (4, LAYERS, 4, 6),
        both,
    )
    assert stacked_dims(scanned) == {"layers.up": 1}, (
        "not the experts, of which a layer has many"
    )
    fused = {"model.k.weight": (6, 4), "model.v.weight": (6, 4)}
    assert (
        stacked_dims(
            bound("kv -> model.[k|v].weight : [1|1] a b -> b a", (2, 4, 6), fused)
        )
        == {}
    )


def test_names():
    assert slice_text(0, 3) == "[3]"
    assert slice_text(2, 3) == "[:, :, 3]"
    assert parse_slice("layers.q[3]") == ("layers.q", 0, 3)
    assert parse_slice("layers.q[:, 3]") == ("layers.q", 1, 3)
    assert parse_slice("layers.q") is None
    assert without_slice("layers.q[:, 3]") == without_slice("layers.q") == "layers.q"
    assert layer_number("model.layers.12.mlp.experts.7.w.weight") == 12
    assert layer_number("lm_head.weight") is None
    assert (
        numbered("layers.attn.q.kernel", "model.layers.1.self_attn.q_proj.weight")
        == "layers.1.attn.q.kernel"
    )
    assert numbered("stack.q", "model.layers.1.q.weight") == ""
    assert without_number("layers.1.experts.3.w") == [
        ("layers.experts.3.w", 1),
        ("layers.1.experts.w", 3),
    ]
    assert without_number("layers") == []
    assert distinct_leaves(["a[0]", "a[1]", "b"]) == 2


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["numpy", "jax", "torch"])
def test_what_is_not_finite_is_counted_slice_by_slice(dim: int, kind: str):
    values = np.moveaxis(np.ones((LAYERS, 4, 6), np.float32), 0, dim)
    at = lambda *index: tuple(np.insert(index[1:], dim, index[0]).tolist())
    values[at(1, 2, 3)] = np.nan
    values[at(2, 0, 0)] = np.inf
    values[at(2, 0, 1)] = 1e30
    array = values
    if kind == "jax":
        import jax

        array = jax.device_put(values)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        array = TorchLeaf("w", torch.from_numpy(values.copy()), -1)
    transform = ValueTransform("float32", "float16")
    found = {f.leaf: f for f in examine({"w": array}, [("w", transform)], {"w": dim})}
    first, second = (f"w{slice_text(dim, k)}" for k in (1, 2))
    assert found.keys() == {first, second}
    assert str(found[first]) == f"{first}: 1 NaN of 24 values"
    assert (found[second].nan, found[second].inf, found[second].overflow) == (0, 1, 1)
    (whole,) = examine({"w": array}, [("w", transform)])
    assert (whole.leaf, whole.elements, whole.count) == ("w", 72, 3)


def test_shards_along_layers_keep_their_numbers():
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.devices()[:2]
    values = np.ones((4, 2, 6), np.float32)
    values[3, 1, 5] = np.nan
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    for spec in (PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()):
        array = jax.device_put(values, NamedSharding(mesh, spec))
        (found,) = examine(
            {"w": array}, [("w", ValueTransform("float32", "float32"))], {"w": 0}
        )
        assert (found.leaf, found.elements, found.nan) == ("w[3]", 12, 1)
        (both,) = merged([found, found])
        assert (both.leaf, both.nan) == ("w[3]", 2)

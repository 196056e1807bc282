"""fp8 on the trainer's side: bit-equal to torch by vLLM's formula, on one device and on a mesh; NaN is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jvlab._errors import CoverageError, LayoutError, Unsupported
from jvlab.layout._digest import examine
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import SCALES, ValueTransform
from jvlab.layout._proof import prove
from jvlab.sync._pack import Source
from tests.sync import quantised_world as world

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def reference(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's online fp8 of what is fused from these parts, in torch: values as bytes, and the scale."""
    w = torch.cat([torch.from_numpy(np.asarray(p, np.float32)) for p in parts]).to(
        torch.bfloat16
    )
    lo, hi = w.aminmax()
    scale = torch.maximum(lo.abs(), hi.abs()).float() / torch.tensor(448.0)
    scaled = w.float() * scale.reciprocal()
    # as seen on an H200
    fp8 = torch.nan_to_num(scaled, nan=448.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return fp8.view(torch.uint8).numpy(), scale.numpy()


def values_of(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        p: (rng.standard_normal(s) * 0.1).astype(np.float32)
        for p, s in world.SHAPES.items()
    }


def jax_of(
    values: dict[str, np.ndarray], dtype: str, mesh: str = "fsdp=1"
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jvlab.layout._tree import MeshSpec, default_spec

    spec = MeshSpec.parse(mesh)
    devices = Mesh(
        np.array(jax.devices()[: spec.devices]).reshape(spec.sizes), spec.names
    )
    put = lambda x: jax.device_put(
        jnp.asarray(x).astype(dtype),
        NamedSharding(devices, PartitionSpec(*default_spec(x.shape, spec))),
    )
    return {path: put(x) for path, x in values.items()}


def wrong(held: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> list[str]:
    """Parameters that do not hold what vLLM's own load of these values would."""
    out = []
    same = lambda name, got, want: (
        None if np.array_equal(got, want) else out.append(name)
    )
    for n in range(world.LAYERS):
        fp8, scale = reference([values[x][n].T for x in "qkv"])
        same(f"{n}.qkv", held[f"{n}.qkv"].view(np.uint8), fp8.reshape(-1))
        same(
            f"{n}.qkv_scale",
            held[f"{n}.qkv_scale"].view(np.uint32),
            scale.reshape(1).view(np.uint32),
        )
        fp8, scale = reference([values["down"][n].T])
        down = held[f"{n}.down"].view(np.uint8).reshape(world.OUT, 16)
        same(f"{n}.down", down, np.pad(fp8, ((0, 0), (0, 16 - world.WIDTH))))
        same(
            f"{n}.down_scale",
            held[f"{n}.down_scale"].view(np.uint32),
            scale.reshape(1).view(np.uint32),
        )
        for e in range(world.EXPERTS):
            fp8, scale = reference([values["gate"][n, e].T, values["up"][n, e].T])
            same(
                f"{n}.w13[{e}]",
                held[f"{n}.w13"].view(np.uint8)[e * 20 : e * 20 + 20],
                fp8.reshape(-1),
            )
            same(
                f"{n}.w13_scale[{e}]",
                held[f"{n}.w13_scale"][e].view(np.uint32),
                scale.view(np.uint32),
            )
        same(
            f"{n}.norm",
            held[f"{n}.norm"].view(np.uint16),
            values["norm"][n, :, 0].astype(world.BF16).view(np.uint16),
        )
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_and_scales_are_vllms(dtype: str) -> None:
    """Many magnitudes, ties between fp8 values, maxima that occur twice or with either sign."""
    plan = world.plan_of(dtype)
    assert prove(plan).padding == world.LAYERS * world.OUT * (16 - world.WIDTH)
    assert TransferPlan.from_bytes(plan.to_bytes()) == plan
    assert TransferPlan.from_bytes(plan.to_bytes()).quantised == plan.quantised
    for k in range(24):
        values = {
            p: x * np.float32(2.0 ** (2 * k - 24) * (1 + k / 24))
            for p, x in values_of(k).items()
        }
        # the largest is negative, and of another part
        values["q"][0, 0, 0] = -values["k"][0].max() * 4
        values["down"][1] = np.float32(1.0625) * np.float32(2.0) ** -np.arange(
            24
        ).reshape(6, 4)  # ties, then subnormals
        # a scale of 1: 1.0625 lies between two fp8 values
        values["down"][1, 0, :2] = 448.0, -448.0
        assert wrong(world.memory(plan, jax_of(values, dtype)), values) == []
    one = {**values, "v": values["v"].copy()}
    one["v"][1, 3, 2] += abs(values["v"][1]).max()
    assert wrong(world.memory(plan, jax_of(one, dtype)), values), (
        "one value, and other bytes"
    )


def test_zeros_and_tiny_values() -> None:
    """A matrix of zeros has scale 0, and vLLM's kernel makes its 0 · ∞ the largest value; the product is 0 still."""
    plan, values = world.plan_of("float32"), values_of()
    for part in "qkv":
        values[part][0] = 0.0
    values["gate"][0, 1], values["up"][0, 1] = 0.0, -0.0
    values["down"][0] = 2.0**-120 * np.arange(24).reshape(6, 4)
    held = world.memory(plan, jax_of(values, "float32"))
    assert wrong(held, values) == []
    assert set(held["0.qkv"].view(np.uint8).tolist()) == {0x7E}
    assert held["0.qkv_scale"] == 0.0
    assert (
        float(held["0.qkv"].astype(np.float32)[0]) * float(held["0.qkv_scale"][0])
        == 0.0
    )


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,tp=2"])
def test_a_scale_is_over_all_shards(mesh: str) -> None:
    plan, values = world.plan_of("float32", mesh), values_of(3)
    arrays = jax_of(values, "float32", mesh)
    assert any(
        len(x.sharding.device_set) > 1 and not x.sharding.is_fully_replicated
        for x in arrays.values()
    )
    assert wrong(world.memory(plan, arrays), values) == []


def test_what_is_not_finite_is_named() -> None:
    plan, values = world.plan_of("float32"), values_of()
    values["k"][1, 2, 3], values["up"][0, 2, 0, 0] = np.nan, np.inf
    source = Source.of_arrays(plan, jax_of(values, "float32"))
    named = source.naming({(SCALES, ValueTransform("float32", "float32"))})
    assert {leaf for leaf, _ in named} == {"k", "up"}
    found = {f.leaf: (f.nan, f.inf) for f in examine(source.by_path, named)}
    assert found == {"k": (1, 0), "up": (0, 1)}
    assert not np.isfinite(np.asarray(source.shard(SCALES, 0))).all(), (
        "the scale shows it, so no sync misses it"
    )


def test_other_trees_are_refused() -> None:
    plan, arrays = world.plan_of("float32"), jax_of(values_of(), "float32")
    with pytest.raises(
        LayoutError, match=r"q: connected as float32\(2, 8, 4\), now bfloat16"
    ):
        Source.of_arrays(plan, {**arrays, "q": arrays["q"].astype("bfloat16")})
    with pytest.raises(LayoutError, match="down: was connected, is missing now"):
        Source.of_arrays(plan, {p: x for p, x in arrays.items() if p != "down"})
    with pytest.raises(Unsupported, match="quantised by JAX"):
        Source.of_arrays(plan, {**arrays, "q": np.asarray(arrays["q"])})


def test_leaves_that_no_format_fits_are_named() -> None:
    """One leaf with two scales for the same values, or of which a part is not quantised."""
    rules = world.bindings()
    at = next(i for i, b in enumerate(rules) if b.tensor == "1.q")
    # layer 1 takes layer 0's values
    rules[at] = replace(rules[at], leaf_start=(0, 0, 0))
    with pytest.raises(
        CoverageError,
        match="q: one part of it fills parameters with scales of their own",
    ):
        world.plan_of("float32", rules=rules)
    rules = [b for b in world.bindings() if b.leaf != "norm"]
    for n in range(world.LAYERS):
        axes = rules[0].axes[:1]
        rules.append(
            replace(
                rules[0],
                tensor=f"{n}.norm",
                tensor_shape=(world.IN, 1),
                leaf_start=(n, 0, 0),
                axes=axes,
            )
        )
    with pytest.raises(CoverageError, match="which is not quantised"):
        world.plan_of("float32", rules=rules)
    made = [replace(b, cast="float16") for b in world.bindings()]
    with pytest.raises(
        CoverageError, match="float32 values would be rounded to float16"
    ) as caught:
        world.plan_of("float32", rules=made)
    assert "bfloat16" in str(caught.value)

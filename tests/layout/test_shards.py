"""Leaves from a described mesh equal leaves from real jax shardings, and what JAX refuses is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.layout._tree import (
    MeshSpec,
    default_spec,
    leaf_from_array,
    leaf_from_spec,
)

pytestmark = pytest.mark.slow

SIX_DEVICES = """
import json
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jvlab.layout._tree import default_spec, device_processes, leaf_from_array, leaf_from_spec, MeshSpec
from tests.layout.plan_world import cut_leaf

mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ("fsdp", "tp"))
described = MeshSpec.of(mesh)
checked = 0
for shape, spec in (
    ((12, 8), P("fsdp", "tp")), ((12, 8), P("tp", None)), ((12, 8), P()), ((6, 4, 10), P(None, "tp")),
    ((24,), P(("fsdp", "tp"))), ((24, 2), P(("tp", "fsdp"), None)), ((), P()),
):
    array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=array.sharding)
    ours = cut_leaf("w", shape, "float32", described, tuple(spec))
    read = [leaf_from_array("w", array), leaf_from_array("w", struct)]
    if tuple(spec) == default_spec(shape, described):
        read.append(leaf_from_spec("w", shape, "float32", described))
        checked += 1
    for theirs in read:
        assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
        for k in ("devices", "starts", "stops"):
            np.testing.assert_array_equal(getattr(theirs, k), getattr(ours, k), err_msg=f"{shape} {spec} {k}")
    for shard in array.addressable_shards:
        k = int(np.flatnonzero(ours.devices == shard.device.id)[0])
        assert shard.data.shape == tuple(ours.stops[k] - ours.starts[k])
    checked += 1
print(json.dumps({"checked": checked, "processes": device_processes({"w": array})}))
"""

PACK_BY_JAX = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.layout.plan_world import MeshSpec, Size, World, transformer
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan_types import convert
from tests.layout.plan_interpreter import scatter_bucket, transform_of
from jvlab.sync._pack import box_recipe
from jvlab.layout._tree import default_spec, device_processes, leaves_of

mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ("fsdp", "tp"))
world = transformer(World(MeshSpec.of(mesh), 2), Size(layers=1), layout="einsum", rotary=True)
arrays = {
    p: jax.device_put(v, NamedSharding(mesh, P(*default_spec(v.shape, world.mesh)))) for p, v in world.values.items()
}
plan = compile_plan(leaves_of(arrays), world.bindings, world.layouts, device_process=device_processes(arrays))
assert plan == compile_plan(world.leaves, world.bindings, world.layouts)  # real shardings and described ones agree
params, table, programs = world.blank_params(plan), plan.links(), 0
for device, rank in zip(table.device.tolist(), table.rank.tolist()):
    link = plan.link(device, rank)
    paths = sorted({plan.leaves[i].path for i in link.leaf})
    recipes = [box_recipe(plan, link, i) for i in range(len(link))]
    adds = [transform_of(plan, link, i).add for i in range(len(link))]

    @jax.jit
    def pack(shards):  # one compiled program per device and link: static slices only
        return [r.apply(shards[plan.leaves[link.leaf[i]].path], jnp) + adds[i] for i, r in enumerate(recipes)]

    local = {p: next(s.data for s in arrays[p].addressable_shards if s.device.id == device) for p in paths}
    for bucket in range(len(link.bucket_sizes)):
        data = bytearray(int(link.bucket_sizes[bucket]))
        for i, box in enumerate(pack(local)):
            if link.bucket[i] == bucket:
                data[link.bucket_offset[i] : link.bucket_offset[i] + link.nbytes[i]] = np.asarray(box).tobytes()
        scatter_bucket(plan, link, bucket, data, params)
    programs += 1
for key, want in world.dense_params().items():
    np.testing.assert_array_equal(params[key], want, err_msg=str(key))
print(json.dumps({"programs": programs}))
"""

MESH_OF_ITS_OWN = """
import json
import jax, numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jvlab._errors import LayoutError
from jvlab.layout._tree import MeshSpec, leaf_from_array, leaf_from_spec, leaves_of, mesh_processes

mesh = Mesh(np.array(jax.devices())[[5, 2, 0, 4]].reshape(2, 2), ("fsdp", "tp"))
spec = P("fsdp", "tp")
array = jax.device_put(np.arange(32.0).reshape(8, 4), NamedSharding(mesh, spec))
real = leaf_from_array("w", array)
for ours in (
    leaf_from_spec("w", (8, 4), "float32", MeshSpec.of(mesh)),
    leaves_of({"w": array}, mesh)[0],
):
    for k in ("devices", "starts", "stops"):
        np.testing.assert_array_equal(getattr(ours, k), getattr(real, k), err_msg=k)
assert mesh_processes(mesh) == {5: 0, 2: 0, 0: 0, 4: 0}
assert MeshSpec.of(AbstractMesh((2, 2), ("fsdp", "tp"))) == MeshSpec(("fsdp", "tp"), (2, 2))

struct = jax.ShapeDtypeStruct((9, 4), np.float32, sharding=NamedSharding(mesh, spec))
try:
    leaves_of({"layers.0.w": struct})
    raise SystemExit("not refused")
except LayoutError as e:
    fields = {**e.fields, "spec": tuple(e.fields["spec"])}
print(json.dumps({"devices": real.devices.tolist(), "fields": fields}))
"""


def on_six_devices(script: str) -> dict[str, object]:
    flags = "--xla_force_host_platform_device_count=6"
    env = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_described_equals_jax_on_six_devices() -> None:
    assert on_six_devices(SIX_DEVICES) == {
        "checked": 9,
        "processes": {str(i): 0 for i in range(6)},
    }


def test_a_jax_mesh_keeps_its_devices_and_an_indivisible_leaf_its_name() -> None:
    found = on_six_devices(MESH_OF_ITS_OWN)
    assert found["devices"] == [0, 2, 4, 5]
    assert found["fields"] == {
        "leaf": "layers.0.w",
        "shape": [9, 4],
        "spec": ["fsdp", "tp"],
    }


def test_jax_packs_each_link_in_one_program() -> None:
    assert on_six_devices(PACK_BY_JAX) == {"programs": 12}


def test_mesh_text() -> None:
    assert MeshSpec.parse("fsdp=3, tp=2") == MeshSpec(("fsdp", "tp"), (3, 2))
    assert MeshSpec.of({"fsdp": 3}).devices == 3
    for bad in ("fsdp", "fsdp=x", "fsdp=2,fsdp=2", "fsdp=0"):
        with pytest.raises(ConfigError, match="mesh"):
            MeshSpec.parse(bad)
    with pytest.raises(ConfigError, match="int"):
        MeshSpec.of(3)


def test_default_is_the_largest_dimension_that_divides() -> None:
    mesh = MeshSpec.parse("dp=2,fsdp=3,tp=2")
    assert default_spec((9, 50), mesh) == ("fsdp", "tp")
    assert default_spec((9, 12), mesh) == (None, "fsdp")
    assert default_spec((7, 5), mesh) == (None, None)
    assert default_spec((48,), mesh) == (None,)


def test_leaves_alike_share_their_arrays() -> None:
    mesh = MeshSpec.parse("fsdp=4")
    a, b = (leaf_from_spec(p, (8, 4), "float32", mesh) for p in "ab")
    assert a.starts is b.starts


def test_plain_numpy_sits_on_device_zero() -> None:
    leaf = leaf_from_array("w", np.zeros((3, 2), np.float16))
    assert (leaf.dtype, leaf.devices.tolist(), leaf.stops.tolist()) == (
        "float16",
        [0],
        [[3, 2]],
    )

"""Leaves from a described mesh equal leaves from real jax shardings, and what JAX refuses is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jvlab._errors import ConfigError, LayoutError
from jvlab.layout._shards import MeshSpec, default_spec, leaf_from_array, leaf_from_spec, leaves_of

SIX_DEVICES = """
import json
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jvlab.layout._shards import device_processes, leaf_from_array, leaf_from_spec, MeshSpec

mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ("fsdp", "tp"))
described = MeshSpec.of(mesh)
checked = 0
for shape, spec in (
    ((12, 8), P("fsdp", "tp")), ((12, 8), P("tp", None)), ((12, 8), P()), ((6, 4, 10), P(None, "tp")),
    ((24,), P(("fsdp", "tp"))), ((24, 2), P(("tp", "fsdp"), None)), ((), P()),
):
    array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=array.sharding)
    ours = leaf_from_spec("w", shape, "float32", described, tuple(spec))
    for theirs in (leaf_from_array("w", array), leaf_from_array("w", struct)):
        assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
        for k in ("devices", "starts", "stops"):
            np.testing.assert_array_equal(getattr(theirs, k), getattr(ours, k), err_msg=f"{shape} {spec} {k}")
    for shard in array.addressable_shards:
        k = int(np.flatnonzero(ours.devices == shard.device.id)[0])
        assert shard.data.shape == tuple(ours.stops[k] - ours.starts[k])
    checked += 1
print(json.dumps({"checked": checked, "processes": device_processes({"w": array})}))
"""


def test_described_equals_jax_on_six_devices() -> None:
    flags = "--xla_force_host_platform_device_count=6"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SIX_DEVICES], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == {"checked": 7, "processes": {str(i): 0 for i in range(6)}}


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


def test_what_the_mesh_does_not_allow() -> None:
    mesh = MeshSpec.parse("fsdp=3,tp=2")
    with pytest.raises(LayoutError, match="size 6 does not divide") as caught:
        leaf_from_spec("layers.0.w", (9, 4), "float32", mesh, (("fsdp", "tp"), None))
    assert caught.value.fields["leaf"] == "layers.0.w"
    with pytest.raises(LayoutError, match="partition"):
        leaf_from_spec("w", (6, 6), "float32", mesh, ("fsdp", "fsdp"))
    with pytest.raises(LayoutError, match="partition"):
        leaf_from_spec("w", (6, 6), "float32", mesh, ("data", None))
    shapes = {p: SimpleNamespace(shape=(9, 5), dtype="float32") for p in "ab"}
    with pytest.raises(LayoutError, match="2 leaves do not fit the mesh"):
        leaves_of(shapes, mesh, {"a": ("tp", None), "b": (None, "fsdp")})


def test_plain_numpy_sits_on_device_zero() -> None:
    leaf = leaf_from_array("w", np.zeros((3, 2), np.float16))
    assert (leaf.dtype, leaf.devices.tolist(), leaf.stops.tolist()) == ("float16", [0], [[3, 2]])

"""The plan, executed by the interpreter, equals a dense reference; serialised, expanded and bounded as promised."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab.layout._compile import compile_plan
from jvlab.layout._execute import execute
from jvlab.layout._plan import TransferPlan
from jvlab.layout._proof import prove
from jvlab.layout._shards import MeshSpec
from tests.layout.plan_world import Size, World, transformer

MESHES = [
    "fsdp=1",
    "fsdp=2",
    "fsdp=3",
    "tp=4",
    "fsdp=3,tp=2",
    "fsdp=2,tp=4",
    "dp=2,fsdp=2",
    "dp=3",
    "dp=2,fsdp=3",
    "fsdp=8",
]
LAYOUTS = ["einsum", "dense", "checkpoint", "scanned", "fused"]


def make(mesh: str, tp: int, layout: str, rotary: bool, size: Size | None = None, dtype: str = "float32") -> World:
    return transformer(World(MeshSpec.parse(mesh), tp, dtype), size or Size(), layout=layout, rotary=rotary)


def check(world: World, plan: TransferPlan, mode: str, replica: int = 0) -> int:
    params = world.blank_params(plan)
    moved = execute(plan, world.shards(), params, mode=mode, replica=replica)
    expect = world.dense_params()
    assert params.keys() == expect.keys()
    for key, want in expect.items():
        np.testing.assert_array_equal(params[key], want, err_msg=str(key))
    return moved


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mesh=st.sampled_from(MESHES),
    tp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(LAYOUTS),
    rotary=st.booleans(),
    size=st.builds(
        Size, d=st.sampled_from([6, 12]), n=st.just(4), k=st.sampled_from([1, 2, 4]), h=st.sampled_from([4, 6]),
        f=st.sampled_from([8, 12, 24]), vocab=st.sampled_from([5, 10, 24]), layers=st.sampled_from([1, 2]),
        experts=st.sampled_from([1, 2, 3]),
    ),
    mode=st.sampled_from(["packed", "direct"]),
    bucket=st.sampled_from([64, 1000, 1 << 20]),
)  # fmt: skip
def test_executed_equals_dense(
    mesh: str, tp: int, layout: str, rotary: bool, size: Size, mode: str, bucket: int
) -> None:
    world = make(mesh, tp, layout, rotary, size)
    plan = compile_plan(world.leaves, world.bindings, world.layouts, bucket_mib=bucket / (1 << 20))
    proof = prove(plan)
    check(world, plan, mode)
    assert proof.elements == sum(a.size for a in world.dense_params().values())

"""The plan, executed by the interpreter, equals a dense reference; serialised, expanded and bounded as promised."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.layout._boxes import merge_axes
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import OPAQUE
from jvlab.layout._proof import prove
from jvlab.layout._tree import MeshSpec
from jvlab.layout._types import Note
from tests.fuzzing import examples
from tests.layout.plan_interpreter import execute
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


def make(
    mesh: str,
    tp: int,
    layout: str,
    rotary: bool,
    size: Size | None = None,
    dtype: str = "float32",
) -> World:
    return transformer(
        World(MeshSpec.parse(mesh), tp, dtype),
        size or Size(),
        layout=layout,
        rotary=rotary,
    )


def check(world: World, plan: TransferPlan, mode: str, replica: int = 0) -> int:
    params = world.blank_params(plan)
    moved = execute(plan, world.shards(), params, mode=mode, replica=replica)
    expect = world.dense_params()
    assert params.keys() == expect.keys()
    for key, want in expect.items():
        np.testing.assert_array_equal(params[key], want, err_msg=str(key))
    return moved


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    mesh=st.sampled_from(MESHES),
    tp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(LAYOUTS),
    rotary=st.booleans(),
    size=st.builds(
        Size,
        d=st.sampled_from([6, 12]),
        n=st.just(4),
        k=st.sampled_from([1, 2, 4]),
        h=st.sampled_from([4, 6]),
        f=st.sampled_from([8, 12, 24]),
        vocab=st.sampled_from([5, 10, 24]),
        layers=st.sampled_from([1, 2]),
        experts=st.sampled_from([1, 2, 3]),
    ),
    mode=st.sampled_from(["packed", "direct"]),
    bucket=st.sampled_from([64, 1000, 1 << 20]),
)
def test_executed_equals_dense(
    mesh: str, tp: int, layout: str, rotary: bool, size: Size, mode: str, bucket: int
) -> None:
    world = make(mesh, tp, layout, rotary, size)
    plan = compile_plan(
        world.leaves, world.bindings, world.layouts, bucket_mib=bucket / (1 << 20)
    )
    proof = prove(plan)
    check(world, plan, mode)
    assert proof.elements == sum(a.size for a in world.dense_params().values())


def test_round_trip_and_identity() -> None:
    world = make("fsdp=3,tp=2", 2, "einsum", True)
    plan = compile_plan(
        world.leaves, world.bindings, world.layouts, replicas=3, title="tiny"
    )
    again = TransferPlan.from_bytes(plan.to_bytes())
    assert again == plan
    assert hash(again) == hash(plan)
    assert (again.replicas, again.title, again.leaves) == (3, "tiny", plan.leaves)
    assert (
        compile_plan(
            world.leaves, world.bindings, world.layouts, replicas=3, title="tiny"
        )
        == plan
    )
    other = compile_plan(
        world.leaves, world.bindings, world.layouts, replicas=2, title="tiny"
    )
    assert other != plan
    prove(again)
    check(world, again, "packed", replica=2)
    with pytest.raises(ValueError, match="read-only"):
        plan.box_src[0] = 1
    with pytest.raises(ConfigError, match="no transfer plan"):
        TransferPlan.from_bytes(b"something else")
    with pytest.raises(ConfigError, match="cut off"):
        TransferPlan.from_bytes(plan.to_bytes()[:-5])


@pytest.mark.parametrize("mesh", ["fsdp=3,tp=2", "dp=2,fsdp=3", "dp=4"])
def test_links_agree_with_their_expansion(mesh: str) -> None:
    world = make(mesh, 2, "einsum", False)
    plan = compile_plan(
        world.leaves,
        world.bindings,
        world.layouts,
        replicas=2,
        bucket_mib=200 / (1 << 20),
    )
    needed = sum(a.size for k, a in world.dense_params().items()) - int(
        plan.target_padding.sum()
    )
    for replica in range(2):
        table = plan.links(replica)
        # each byte that a rank needs crosses once
        assert int(table.nbytes.sum()) == needed * 4
        for d, r, n in zip(
            table.device.tolist(),
            table.rank.tolist(),
            table.nbytes.tolist(),
            strict=True,
        ):
            link = plan.link(d, r, replica)
            assert link.total_bytes == n
            assert link.bucket_sizes.max() <= 200
            assert (link.bucket_offset % 16 == 0).all()
            ends = link.bucket_offset + link.nbytes
            for b in range(len(link.bucket_sizes)):
                here = link.bucket == b
                # no two boxes share a byte
                assert (link.bucket_offset[here][1:] >= ends[here][:-1]).all()
                assert ends[here].max() == link.bucket_sizes[b]
    assert plan.total_bytes == needed * 4 * 2


def test_replicated_sources_share_the_work() -> None:
    world = make("dp=4,fsdp=2", 2, "dense", False, Size(layers=6))
    plan = compile_plan(world.leaves, world.bindings, world.layouts, replicas=2)
    sent = np.zeros(8)
    for replica in range(2):
        table = plan.links(replica)
        np.add.at(sent, table.device, table.nbytes)
    assert sent.min() > 0.9 * sent.max()
    for replica in range(2):
        check(world, plan, "packed", replica)


def test_a_large_replicated_leaf_is_shared_out() -> None:
    world = World(MeshSpec.parse("dp=3"), 1)
    rows, d = 3000, 512
    world.leaf("embed", (rows, d))
    world.tensor("e", (rows, d))
    world.bind("embed", "e", [(rows, 0, 1, 0, 1), (d, 1, 1, 1, 1)])
    p = world.loaders[0].parameter("e", (rows, d))
    world.loaders[0].copy(
        world.tensors["e"], (slice(None), slice(None)), p, (slice(None), slice(None))
    )
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    table = plan.links()
    assert table.nbytes.tolist() == [rows * d * 4 // 3] * 3
    params = world.blank_params(plan)
    execute(plan, world.shards(), params)
    np.testing.assert_array_equal(params[0, "e"], world.values["embed"])


def test_masters_are_cast_before_they_cross() -> None:
    world = make("fsdp=2", 2, "einsum", False, dtype="bfloat16")
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    assert {(x.source, x.wire) for x in plan.transforms} == {("float32", "bfloat16")}
    assert check(world, plan, "packed") == (
        sum(a.nbytes for a in world.dense_params().values())
        - 2 * int(plan.target_padding.sum())
    )


def test_processes_are_known_to_links() -> None:
    world = make("fsdp=4", 2, "dense", False)
    plan = compile_plan(
        world.leaves,
        world.bindings,
        world.layouts,
        device_process={0: 0, 1: 0, 2: 1, 3: 1},
    )
    table = plan.links()
    assert {
        (int(d), int(p)) for d, p in zip(table.device, table.process, strict=True)
    } == {
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    }
    assert plan.link(2, 0).process == 1
    with pytest.raises(ConfigError, match="no device 9"):
        plan.link(9, 0)
    with pytest.raises(ConfigError, match="no rank 2"):
        plan.link(0, 2)


def test_layers_of_one_kind_are_one_class() -> None:
    few, many = (make("fsdp=4", 2, "dense", False, Size(layers=n)) for n in (2, 12))
    a, b = (compile_plan(w.leaves, w.bindings, w.layouts) for w in (few, many))
    assert len(a.class_transform) == len(b.class_transform)
    assert len(a.box_cell) == len(b.box_cell)
    assert b.copies > 3 * a.copies


def test_stacked_experts_merge_into_one_piece() -> None:
    world = make("fsdp=2", 2, "dense", False, Size(experts=3, layers=1))
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    index = next(
        i for i, x in enumerate(plan.leaves) if x.path == "layers.0.experts.w2"
    )
    # one per rank, not one per expert and rank
    assert (plan.member_leaf == index).sum() == 2


def test_opaque_tensors_go_whole_to_a_buffer_of_their_own() -> None:
    world = make("fsdp=3", 2, "einsum", False, Size(layers=1))
    name, layouts = "model.layers.0.o_proj.weight", []
    for layout in world.layouts:
        number = next(i for i, t in enumerate(layout.tensors) if t.name == name)
        keep = layout.tensor != number
        size = int(np.prod(next(p.shape for p in layout.parameters if p.name == name)))
        columns = (
            "tensor",
            "parameter",
            "shape",
            "src_offset",
            "src_strides",
            "dst_offset",
            "dst_strides",
        )
        layouts.append(
            dataclasses.replace(
                layout,
                **{k: getattr(layout, k)[keep] for k in columns},
                opaque=(Note(name, "the loader computes with it", 1),),
                padding=(
                    *layout.padding,
                    Note(name, f"filled by the opaque {name}", size, "opaque"),
                ),
            )
        )
    plan = compile_plan(world.leaves, world.bindings, layouts)
    opaque = np.flatnonzero(plan.target_kind == OPAQUE)
    assert len(opaque) == 2
    assert {plan.parameters[plan.target_parameter[t]].shape for t in opaque} == {
        world.tensors[name].shape
    }
    prove(plan, world.bindings, layouts)
    params = world.blank_params(plan)
    params |= {
        (r, name): np.zeros(world.tensors[name].shape, np.float32) for r in range(2)
    }
    execute(plan, world.shards(), params)
    for r in range(2):
        np.testing.assert_array_equal(params[r, name], world.dense_tensors()[name])


def test_merged_axes():
    of = lambda *axes: [
        (n, strides[0])
        for n, strides, _ in merge_axes((n, (s,), None) for n, s in axes)
    ]
    assert of((4, 6), (1, 99), (6, 1)) == [(24, 1)]
    assert of((3, 1), (4, 15), (5, 3)) == [(3, 1), (20, 3)]
    assert of((1, 7), (1, 8)) == []
    assert merge_axes([(2, (3, 6), "a"), (3, (1, 1), "a")]) == [
        (2, (3, 6), "a"),
        (3, (1, 1), "a"),
    ], "in one array only"
    assert merge_axes([(2, (3, 3), "a"), (3, (1, 1), "b")]) == [
        (2, (3, 3), "a"),
        (3, (1, 1), "b"),
    ], "two dimensions"

"""The proof refuses every damaged plan, and one error lists everything that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab._errors import CoverageError
from jvlab.layout import _boxes
from jvlab.layout._boxes import Strided, partition_defects
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._proof import prove
from jvlab.layout._tree import MeshSpec
from jvlab.layout._types import Axis, Binding, Leaf, Note
from tests.fuzzing import examples
from tests.layout.plan_world import Size, World, square, transformer

WORLDS = [
    transformer(World(MeshSpec.parse(mesh), tp), Size(), layout=layout, rotary=True)
    for mesh, tp, layout in (
        ("fsdp=3,tp=2", 2, "einsum"),
        ("fsdp=2", 4, "scanned"),
        ("dp=2,fsdp=3", 1, "dense"),
    )
]
PLANS = [compile_plan(w.leaves, w.bindings, w.layouts) for w in WORLDS]
BOX_COLUMNS = (
    "box_cell",
    "box_turn",
    "box_shape",
    "box_src",
    "box_src_strides",
    "box_dst",
    "box_dst_strides",
)
# damage that may be consistent in itself
NEED_INPUTS = ("member dst", "axis leaf dim swapped", "law changed")
MEMBER_COLUMNS = ("member_leaf", "member_target", "member_start", "member_dst")


def rows_changed(
    plan: TransferPlan, kind: str, at: int, *, double: bool
) -> TransferPlan:
    """One box or member of a plan dropped or doubled."""
    columns, ptr = (
        (BOX_COLUMNS, "box_ptr") if kind == "box" else (MEMBER_COLUMNS, "member_ptr")
    )
    edit: dict[str, Any] = {
        c: np.insert(getattr(plan, c), at, getattr(plan, c)[at], axis=0)
        if double
        else np.delete(getattr(plan, c), at, axis=0)
        for c in columns
    }
    edge = getattr(plan, ptr).copy()
    edge[edge > at] += 1 if double else -1
    return dataclasses.replace(plan, **edit, **{ptr: edge})


def value_changed(
    plan: TransferPlan, column: str, index: tuple[int, ...], by: int
) -> TransferPlan:
    array = getattr(plan, column).copy()
    array[index] += by
    return dataclasses.replace(plan, **{column: array})


def dims_swapped(plan: TransferPlan, c: int) -> TransferPlan:
    """The leaf dimensions of one class's first and last axis that moves, exchanged (of another class if it has one)."""
    live = np.flatnonzero(plan.axis_size[c] > 1)
    if len(set(plan.axis_leaf_dim[c, live].tolist())) < 2:
        c = next(
            k
            for k in range(len(plan.axis_size))
            if len(np.unique(plan.axis_leaf_dim[k][plan.axis_size[k] > 1])) > 1
        )
        live = np.flatnonzero(plan.axis_size[c] > 1)
    a, b = (
        live[0],
        next(
            k
            for k in live
            if plan.axis_leaf_dim[c, k] != plan.axis_leaf_dim[c, live[0]]
        ),
    )
    dims = plan.axis_leaf_dim.copy()
    dims[c, a], dims[c, b] = dims[c, b], dims[c, a]
    return dataclasses.replace(plan, axis_leaf_dim=dims)


def law_changed(plan: TransferPlan, transform: int, field: str) -> TransferPlan:
    """One law with another `add` or `cast`: consistent in itself, but not what the rules say."""
    new = dataclasses.replace(
        plan.transforms[transform],
        **{
            field: {"add": plan.transforms[transform].add + 1.0, "cast": "bfloat16"}[
                field
            ]
        },
    )
    return dataclasses.replace(
        plan,
        transforms=(
            *plan.transforms[:transform],
            new,
            *plan.transforms[transform + 1 :],
        ),
    )


@st.composite
def damaged(draw: st.DrawFn) -> tuple[int, str, TransferPlan]:
    which = draw(st.integers(0, len(PLANS) - 1))
    plan = PLANS[which]
    by = draw(st.sampled_from([-7, -1, 1, 2, 12]))
    box = draw(st.integers(0, len(plan.box_cell) - 1))
    member = draw(st.integers(0, len(plan.member_leaf) - 1))
    live = np.argwhere(plan.box_shape > 1)
    axis = tuple(int(x) for x in live[draw(st.integers(0, len(live) - 1))])
    c = int(plan.box_class[axis[0]])
    what = draw(
        st.sampled_from(
            [
                "drop box",
                "double box",
                "drop member",
                "double member",
                "src",
                "dst",
                "src stride",
                "dst stride",
                "shape",
                "class start",
                "axis step",
                "axis stride",
                "axis size",
                *NEED_INPUTS,
            ]
        )
    )
    changes: dict[str, Callable[[], TransferPlan]] = {
        "drop box": lambda: rows_changed(plan, "box", box, double=False),
        "double box": lambda: rows_changed(plan, "box", box, double=True),
        "drop member": lambda: rows_changed(plan, "member", member, double=False),
        "double member": lambda: rows_changed(plan, "member", member, double=True),
        "src": lambda: value_changed(plan, "box_src", (box,), by),
        "dst": lambda: value_changed(plan, "box_dst", (box,), by),
        "src stride": lambda: value_changed(plan, "box_src_strides", axis, by),
        "dst stride": lambda: value_changed(plan, "box_dst_strides", axis, by),
        "shape": lambda: value_changed(plan, "box_shape", axis, by),
        "member dst": lambda: value_changed(plan, "member_dst", (member,), by),
        "class start": lambda: value_changed(plan, "class_start", (c, 0), by),
        "axis step": lambda: value_changed(plan, "axis_leaf_step", (c, axis[1]), by),
        "axis stride": lambda: value_changed(plan, "axis_dst_stride", (c, axis[1]), by),
        "axis size": lambda: value_changed(plan, "axis_size", (c, axis[1]), by),
        "axis leaf dim swapped": lambda: dims_swapped(plan, c),
        "law changed": lambda: law_changed(
            plan, int(plan.class_transform[c]), draw(st.sampled_from(["add", "cast"]))
        ),
    }
    return which, what, changes[what]()


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(damaged())
def test_a_damaged_plan_is_refused(case: tuple[int, str, TransferPlan]) -> None:
    which, what, plan = case
    known = what in NEED_INPUTS  # else from nothing but the plan itself
    bindings, layouts = (
        (WORLDS[which].bindings, WORLDS[which].layouts) if known else ([], [])
    )
    with pytest.raises(CoverageError):
        prove(plan, bindings, layouts)


@pytest.mark.parametrize("which", range(len(PLANS)))
def test_whole_plans_pass(which: int) -> None:
    proof = prove(PLANS[which], WORLDS[which].bindings, WORLDS[which].layouts)
    assert proof.elements == sum(a.size for a in WORLDS[which].dense_params().values())
    assert proof.boxes == len(PLANS[which].box_cell) < proof.copies


def test_a_consistent_plan_of_other_rules_is_refused() -> None:
    """Layers swapped: nothing is wrong within the plan, but it is not the plan of these rules."""
    world, plan = WORLDS[1], PLANS[1]
    starts = plan.member_start.copy()
    swapped = np.flatnonzero(starts[:, 0] < 2)
    stacked = np.array(
        [
            len(plan.leaves[i].shape) == 3 and "experts" not in plan.leaves[i].path
            for i in plan.member_leaf
        ]
    )
    rows = swapped[stacked[swapped]]
    assert len(rows)
    starts[rows, 0] = 1 - starts[rows, 0]
    other = dataclasses.replace(plan, member_start=starts)
    prove(other)
    with pytest.raises(CoverageError, match=r"belongs at position"):
        prove(other, world.bindings, world.layouts)
    leaves = plan.member_leaf.copy()
    a, b = (
        next(i for i, x in enumerate(plan.leaves) if x.path == f"layers.{n}.experts.w1")
        for n in (0, 1)
    )
    leaves[plan.member_leaf == a], leaves[plan.member_leaf == b] = b, a
    with pytest.raises(CoverageError, match="does not send it there"):
        prove(
            dataclasses.replace(plan, member_leaf=leaves), world.bindings, world.layouts
        )


# ---- what a user gets wrong, all of it in one error ---------------------------------------------------------


def fresh() -> World:
    return transformer(
        World(MeshSpec.parse("fsdp=2"), 2),
        Size(layers=1),
        layout="einsum",
        rotary=False,
    )


def problems_of(world: World, **changes: Any) -> list[Any]:
    with pytest.raises(CoverageError) as caught:
        compile_plan(
            changes.get("leaves", world.leaves),
            changes.get("bindings", world.bindings),
            changes.get("layouts", world.layouts),
        )
    assert caught.value.remedy
    found = list(caught.value.fields["problems"])  # type: ignore[call-overload]
    for p in found:
        assert p.name in str(caught.value)
        assert p.remedy
    return found


def test_missing_tensor() -> None:
    world = fresh()
    found = problems_of(
        world, bindings=[b for b in world.bindings if "k_proj" not in b.tensor]
    )
    assert [(p.kind, p.name) for p in found if p.kind == "missing"] == [
        ("missing", "model.layers.0.k_proj.weight")
    ]
    assert "(12, 12)" in found[0].message


def test_extra_leaf_and_tensor() -> None:
    world = fresh()
    world.leaf("layers.0.adapter", (4, 4))
    world.leaf("ghost", (4, 4))
    lost = Binding(
        "ghost",
        "model.ghost",
        (4, 4),
        (4, 4),
        (0, 0),
        (0, 0),
        (Axis(4, 0, 1, 0, 1), Axis(4, 1, 1, 1, 1)),
    )
    found = problems_of(world, bindings=[*world.bindings, lost])
    assert {(p.kind, p.name) for p in found} == {
        ("extra", "layers.0.adapter"),
        ("extra", "ghost"),
    }
    plan = compile_plan(
        world.leaves,
        world.bindings,
        world.layouts,
        ignored_leaves=["layers.0.adapter", "ghost"],
    )
    assert plan.copies


def test_transposed_kernel_and_wrong_heads() -> None:
    world = fresh()
    bindings = []
    for b in world.bindings:
        if b.leaf.endswith(".q"):  # (n h, d) written as (d, n h)
            b = dataclasses.replace(b, tensor_shape=b.tensor_shape[::-1])
        elif b.leaf.endswith(".k"):  # four heads of three instead of two of six
            b = dataclasses.replace(b, leaf_shape=(12, 4, 3))
        bindings.append(b)
    found = {
        p.name: p for p in problems_of(world, bindings=bindings) if p.kind == "shape"
    }
    assert "(12, 24)" in found["layers.0.q"].message
    assert "(24, 12)" in found["layers.0.q"].message
    assert "transposed" in found["layers.0.q"].remedy
    assert "(12, 2, 6)" in found["layers.0.k"].message
    assert "(12, 4, 3)" in found["layers.0.k"].message


def test_wrong_dtype() -> None:
    world = fresh()
    leaves = [
        dataclasses.replace(x, dtype="int32") if x.path == "embed" else x
        for x in world.leaves
    ]
    found = problems_of(world, leaves=leaves)
    assert [(p.kind, p.name) for p in found] == [("dtype", "embed")]
    layouts = []
    for layout in world.layouts:
        params = tuple(
            dataclasses.replace(p, dtype="int8") if "norm" in p.name else p
            for p in layout.parameters
        )
        layouts.append(dataclasses.replace(layout, parameters=params))
    assert {p.kind for p in problems_of(world, layouts=layouts)} == {"dtype"}


def test_overlapping_rules() -> None:
    world = fresh()
    world.leaf("again", world.values["embed"].shape)
    twice = next(b for b in world.bindings if b.leaf == "embed")
    found = problems_of(
        world, bindings=[*world.bindings, dataclasses.replace(twice, leaf="again")]
    )
    assert {p.kind for p in found} == {"overlap"}
    assert {p.name for p in found} == {"model.embed_tokens.weight"}
    assert "again and embed" in found[0].message


def without_keys(note: Note) -> World:
    """A checkpoint without its k_proj, in tensors, rules, tree and rows, and what the tracer says of the hole."""
    world = fresh()
    name = "model.layers.0.k_proj.weight"
    del world.tensors[name]
    world.bindings = [b for b in world.bindings if b.tensor != name]
    world.leaves = [x for x in world.leaves if x.path != "layers.0.k"]
    for loader in world.loaders:
        loader.rows = [r for r in loader.rows if r[0] != name]
        loader.padding.append(note)
    return world


@pytest.mark.parametrize("kind", ["gap", ""])
def test_a_missing_part_of_a_fused_parameter_is_not_padding(kind: str) -> None:
    world = without_keys(
        Note(
            "model.layers.0.qkv_proj.weight",
            "no checkpoint tensor given fills them",
            72,
            kind,
        )
    )
    (found,) = problems_of(world)
    assert (found.kind, found.name) == ("gap", "model.layers.0.qkv_proj.weight")
    for part in (
        "(24, 12)",
        "72 of 288 elements",
        "rank 0 (and 1 more",
        "no checkpoint tensor given fills them",
    ):
        assert part in found.message, part
    filled = without_keys(
        Note(
            "model.layers.0.qkv_proj.weight",
            "the loader fills them with 0",
            72,
            "constant",
        )
    )
    plan = compile_plan(filled.leaves, filled.bindings, filled.layouts)
    with pytest.raises(CoverageError, match="72 of 288"):
        prove(plan, world.bindings, world.layouts)


def test_a_leaf_that_only_fills_what_vllm_ignores_is_not_dropped() -> None:
    world = fresh()
    # tied in the engine: no rank takes anything from it
    world.tensor("lm_head.weight", (10, 12))
    world.leaf("head", (10, 12))
    tied = [(10, 0, 1, 0, 1), (12, 1, 1, 1, 1)]
    world.bind("embed", "lm_head.weight", tied)
    world.leaves, head = world.leaves[:-1], world.leaves[-1]
    # a tied leaf that fills the embedding too
    compile_plan(world.leaves, world.bindings, world.layouts)
    world.leaves.append(head)
    world.bindings[-1] = dataclasses.replace(world.bindings[-1], leaf="head")
    (found,) = problems_of(world)
    assert (found.kind, found.name) == ("extra", "head")
    assert "'lm_head.weight'" in found.message
    assert "-> ~" in found.remedy
    compile_plan(world.leaves, world.bindings, world.layouts, ignored_leaves=["head"])


def test_a_leaf_used_on_one_pipeline_stage_only_is_used() -> None:
    world = square(transposed=False, tp=2)
    for r, loader in enumerate(world.loaders):
        loader.parameters.clear()
        loader.rows.clear()
        if r:
            p = loader.parameter("p", (6, 6))
            loader.copy(
                world.tensors["t"],
                (slice(None), slice(None)),
                p,
                (slice(None), slice(None)),
            )
    assert world.layouts[0].unused == ("t",)
    assert compile_plan(world.leaves, world.bindings, world.layouts).copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float8_parameter_wants_an_explicit_cast(dtype: str) -> None:
    world = square(transposed=False)
    world.leaves = [dataclasses.replace(x, dtype=dtype) for x in world.leaves]
    world.loaders[0].parameters[0] = dataclasses.replace(
        world.loaders[0].parameters[0], dtype="float8_e4m3fn"
    )
    (found,) = problems_of(world)
    assert (found.kind, found.name) == ("dtype", "w")
    assert "float8_e4m3fn" in found.message
    assert "scale" in found.remedy
    world.tensors["t"] = dataclasses.replace(world.tensors["t"], dtype="float8_e4m3fn")
    assert {p.kind for p in problems_of(world)} >= {"dtype"}
    world.bindings = [
        dataclasses.replace(b, cast="float8_e4m3fn") for b in world.bindings
    ]
    assert compile_plan(world.leaves, world.bindings, world.layouts).copies
    world.leaves = [dataclasses.replace(x, dtype="int8") for x in world.leaves]
    assert "dtype" in {p.kind for p in problems_of(world)}


def test_a_parameter_nobody_fills_is_not_padding() -> None:
    world = fresh()
    loader = world.loaders[0]
    loader.parameter("model.forgotten.weight", (4, 4))
    loader.padding.append(
        Note(
            "model.forgotten.weight",
            "no checkpoint tensor given fills this parameter",
            16,
        )
    )
    found = problems_of(world)
    assert [(p.kind, p.name) for p in found] == [("missing", "model.forgotten.weight")]


def test_a_sharding_with_a_gap() -> None:
    world = fresh()
    leaves = []
    for x in world.leaves:
        if x.path == "embed":
            x = Leaf(
                x.path,
                x.shape,
                x.dtype,
                x.devices,
                x.starts,
                np.minimum(x.stops, x.stops - [[1, 0]]),
            )
        leaves.append(x)
    found = problems_of(world, leaves=leaves)
    assert ("gap", "embed") in {(p.kind, p.name) for p in found}


def test_everything_in_one_error() -> None:
    world = fresh()
    world.leaf("extra", (2, 2))
    leaves = [
        dataclasses.replace(x, dtype="int32") if x.path == "embed" else x
        for x in world.leaves
    ]
    bindings = [b for b in world.bindings if "o_proj" not in b.tensor]
    found = problems_of(world, leaves=leaves, bindings=bindings)
    assert {p.kind for p in found} == {"missing", "extra", "dtype"}


# ---- the test for a partition itself -------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_partition_test_agrees_with_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    domain = Strided(
        0, shape, tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    )
    total = int(np.prod(shape))
    count = np.zeros(total + 64, np.int64)
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
        strides = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=2))
        offset = data.draw(st.integers(0, total - 1))
        boxes.append((offset, sizes, strides))
        for i in range(sizes[0]):
            for j in range(sizes[1]):
                count[offset + i * strides[0] + j * strides[1]] += 1
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(_boxes, "MAX_CELLS", 64)  # in parts
        missing, extra, fault = partition_defects(
            domain,
            np.array([b[0] for b in boxes]),
            np.array([b[1] for b in boxes]),
            np.array([b[2] for b in boxes]),
        )
    inside, outside = count[:total], count[total:]
    clean = (inside <= 1).all() and not outside.any()
    assert (extra == 0) == clean
    if clean:
        assert missing == int((inside == 0).sum())
    else:
        assert fault

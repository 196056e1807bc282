"""Random rules, regions and shardings, composed and executed, against an element-by-element reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab._errors import LayoutError
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan_types import LinkPlan
from jvlab.layout._proof import prove
from jvlab.layout._tree import MeshSpec
from jvlab.layout._types import Axis, Binding, Leaf, Note
from jvlab.sync._pack import box_recipe
from tests.fuzzing import examples
from tests.layout.plan_interpreter import execute, source_view
from tests.layout.plan_world import World, strides_of

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
FACTORS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """One leaf, a random re-ordering of its factored axes as tensor, random strided regions, random device boxes."""
    # factors of each tensor dimension
    factored = draw(st.lists(FACTORS, min_size=1, max_size=3))
    tensor_shape = tuple(math.prod(f) for f in factored)
    axes = [(d, j) for d, f in enumerate(factored) for j in range(len(f))]
    order = draw(st.permutations(axes))
    cuts = (
        sorted(draw(st.sets(st.integers(1, max(len(order) - 1, 1)), max_size=2)))
        if len(order) > 1
        else []
    )
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    leaf_shape = tuple(math.prod(factored[d][j] for d, j in g) for g in groups)
    made = []
    for dim, group in enumerate(groups):
        step = 1
        for d, j in reversed(group):
            made.append(
                Axis(factored[d][j], dim, step, d, math.prod(factored[d][j + 1 :]))
            )
            step *= factored[d][j]
    world = World(MeshSpec.parse("x=1"), 1, seed=draw(st.integers(0, 99)))
    world.leaves.append(draw(sharded("leaf", leaf_shape)))
    world.values["leaf"] = np.arange(math.prod(leaf_shape), dtype=np.float32).reshape(
        leaf_shape
    )
    tensor = world.tensor("t", tensor_shape)
    zero = (0,) * len(leaf_shape)
    world.bindings.append(
        Binding(
            "leaf",
            "t",
            leaf_shape,
            tensor_shape,
            zero,
            (0,) * len(tensor_shape),
            tuple(made),
        )
    )
    regions(draw, world, tensor.shape)
    return world


@st.composite
def sharded(draw: st.DrawFn, path: str, shape: tuple[int, ...]) -> Leaf:
    """Uneven cuts of every dimension, cells in any order, some on two devices: more than a mesh can say."""
    bounds = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
        edges = [0, *sorted(inner), n]
        bounds.append(list(itertools.pairwise(edges)))
    cells = [
        [bounds[d][i] for d, i in enumerate(at)]
        for at in np.ndindex(*[len(b) for b in bounds])
    ]
    copies = draw(st.integers(1, 3))
    cells = draw(st.permutations(cells * copies))
    starts = np.array([[a for a, _ in c] for c in cells], np.int64).reshape(
        len(cells), len(shape)
    )
    stops = np.array([[b for _, b in c] for c in cells], np.int64).reshape(
        len(cells), len(shape)
    )
    return Leaf(
        path, shape, "float32", np.arange(len(cells), dtype=np.int32), starts, stops
    )


def regions(draw: st.DrawFn, world: World, shape: tuple[int, ...]) -> None:
    """Rows into one parameter, one behind the other: sliced boxes, flat runs across rows, and a broadcast."""
    rank, strides, total = world.loaders[0], strides_of(shape), math.prod(shape)
    rows, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            start = draw(st.integers(0, total - 1))
            size = draw(st.integers(1, total - start))
            rows.append(("t", 0, (size,), start, (1,), at, (1,)))
            at += size
        else:
            picks = []
            for n in shape:
                a = draw(st.integers(0, n - 1))
                step = draw(st.integers(1, 2))
                picks.append(range(a, draw(st.integers(a + 1, n)), step))
            sizes = [len(p) for p in picks]
            src = sum(p.start * s for p, s in zip(picks, strides, strict=True))
            src_strides = tuple(p.step * s for p, s in zip(picks, strides, strict=True))
            # the parameter may hold it transposed
            order = draw(st.permutations(range(len(shape))))
            dst_strides, step = [0] * len(shape), 1
            for d in order:
                dst_strides[d] = step
                step *= sizes[d]
            rows.append(
                ("t", 0, tuple(sizes), src, src_strides, at, tuple(dst_strides))
            )
            at += math.prod(sizes)
    if draw(st.booleans()):
        rows.append(("t", 0, (3,), draw(st.integers(0, total - 1)), (0,), at, (1,)))
        at += 3
    hole = draw(st.integers(0, 2))
    rank.parameter("p", (at + hole,))
    rank.rows.extend(rows)
    if hole:
        rank.padding.append(Note("p", "the loader fills them with 0", hole, "constant"))


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    world=worlds(),
    mode=st.sampled_from(["packed", "direct"]),
    bucket=st.sampled_from([32, 256, 1 << 20]),
)
def test_random_worlds(world: World, mode: str, bucket: int) -> None:
    plan = compile_plan(
        world.leaves, world.bindings, world.layouts, bucket_mib=bucket / (1 << 20)
    )
    prove(plan, world.bindings, world.layouts)
    params = world.blank_params(plan)
    execute(plan, world.shards(), params, mode=mode)
    np.testing.assert_array_equal(params[0, "p"], world.dense_params()[0, "p"])


def live_axes(link: LinkPlan, i: int) -> list[tuple[int, int]]:
    """(source stride, leaf dimension) of the axes of a box that move."""
    axes = zip(
        link.src_strides[i].tolist(),
        link.leaf_dim[i].tolist(),
        link.shape[i].tolist(),
        strict=True,
    )
    return [(s, d) for s, d, n in axes if n > 1 and d >= 0]


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(world=worlds())
def test_recipes_are_the_strided_views(world: World) -> None:
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    shards = world.shards()
    table = plan.links()
    for device, rank in zip(table.device.tolist(), table.rank.tolist(), strict=True):
        link = plan.link(device, rank)
        for i in range(len(link)):
            steps = [
                sorted(s for s, d in live_axes(link, i) if d == k) for k in range(3)
            ]
            if any(b % a for group in steps for a, b in itertools.pairwise(group)):
                with pytest.raises(LayoutError, match="do not divide"):
                    box_recipe(plan, link, i)
                continue
            recipe = box_recipe(plan, link, i)
            shard = shards[plan.leaves[link.leaf[i]].path, device]
            np.testing.assert_array_equal(
                recipe.apply(shard), source_view(plan, link, i, shards)
            )

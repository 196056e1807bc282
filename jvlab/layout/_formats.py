"""Formats → plan: leaves that feed quantised parameters become fp8 leaves of the same geometry, and one leaf of scales.

vLLM's fp8, per tensor (checked against 0.32.0, bit for bit): of each group of values that share a scale

    scale = amax / 448            q = fp8(clamp(value · (1 / scale), ±448))           all in float32, 1 / scale rounded

A group is what one block of a parameter is fused from: q, k and v; gate and up; of experts, those of one expert. Where
ranks hold shards of it vLLM takes the maximum over all of them, so a group has one scale on every rank. numpy only.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jvlab.layout._plan_types import FP8, SCALES, Quantised, scales_path
from jvlab.layout._problems import Problem, raise_problems
from jvlab.layout._types import Axis, Binding, CheckpointTensor, Leaf, RankLayout, Shape

# Block-scaled fp8 checkpoints → plan: leaves become fp8 leaves of the same geometry, each with a leaf of scales.
# Such a checkpoint (`quantization_config.weight_block_size`) holds fp8 values and, for each block of a matrix,
# a scale in `<name>_scale_inv`. Of a block's values in float32, each operation rounded once, as vLLM's
# `per_block_cast_to_fp8` does:
#
#     scale = max(amax, 1e-4) / 448                         q = fp8(value · (1 / scale))
#
# vLLM's own loader says where values and scales go on each rank; only the trainer's half is made here: the scales are
# bound as the values are, with every run of indices divided by the block. numpy only.

SUFFIX = "_scale_inv"
_REMEDY = "give each matrix a leaf (or a slice of a stacked leaf) of its own, or launch the checkpoint in 16 bits"


@dataclass(frozen=True)
class BlockScale:
    """The scales of one fp8 tensor of a checkpoint."""

    tensor: CheckpointTensor
    block: Shape  # of the fp8 tensor's dimensions


def block_size(config: Mapping[str, Any]) -> Shape:
    """The blocks of a checkpoint that is quantised in blocks; empty for any other."""
    given = config.get("quantization_config") or {}
    return (
        tuple(map(int, given.get("weight_block_size") or ()))
        if given.get("quant_method") == "fp8"
        else ()
    )


def _grid(t: CheckpointTensor, size: Shape) -> tuple[Shape, Shape]:
    """The block in all of a tensor's dimensions, and how many there are along each."""
    block = (1,) * (len(t.shape) - 2) + size
    return block, tuple(-(-n // b) for n, b in zip(t.shape, block, strict=False))


def with_block_scales(
    tensors: Sequence[CheckpointTensor],
    config: Mapping[str, Any],
    layouts: Sequence[RankLayout],
) -> list[CheckpointTensor]:
    """The checkpoint's tensors, if their names came from config.json alone, which has them before quantisation.

    What the engine holds in fp8 the checkpoint has in fp8, with scales. Tensors with scales are returned as they are.
    """
    size = block_size(config)
    if not size or any(t.name.endswith(SUFFIX) or t.dtype == FP8 for t in tensors):
        return list(tensors)
    held = {
        layout.tensors[t].name
        for layout in layouts
        for t, p in zip(layout.tensor, layout.parameter, strict=True)
        if layout.parameters[p].dtype == FP8
    }
    out = []
    for t in tensors:
        if t.name in held:
            out.append(replace(t, dtype=FP8))
            t = CheckpointTensor(t.name + SUFFIX, _grid(t, size)[1], "float32")
        out.append(t)
    return out


def block_scales(
    tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]
) -> dict[str, BlockScale]:
    """fp8 tensor → its scales, for a checkpoint that is quantised in blocks; empty for any other."""
    size = block_size(config)
    if not size:
        return {}
    named = {t.name: t for t in tensors}
    found = {}
    for t in tensors:
        scale = named.get(t.name + SUFFIX)
        block, grid = _grid(t, size)
        if (
            t.dtype == FP8
            and scale is not None
            and scale.dtype == "float32"
            and tuple(scale.shape) == grid
        ):
            found[t.name] = BlockScale(scale, block)
    return found


def before_blocks(
    tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]
) -> list[CheckpointTensor]:
    """The tensors that a block-scaled checkpoint was quantised from, in the model's dtype; any other's as they are."""
    scales = block_scales(tensors, config)
    hidden = {scale.tensor.name for scale in scales.values()}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return [
        replace(t, dtype=dtype) if t.name in scales else t
        for t in tensors
        if t.name not in hidden
    ]


def expand_blocks(
    leaves: Sequence[Leaf],
    bindings: Sequence[Binding],
    scales: Mapping[str, BlockScale],
) -> tuple[list[Leaf], list[Binding], tuple[Quantised, ...]]:
    """The leaves and bindings of a plan that sends fp8 values and their scales, and how each leaf is quantised."""
    of_leaf: dict[str, list[Binding]] = {}
    for b in bindings:
        of_leaf.setdefault(b.leaf, []).append(b)
    sent = []
    more = []
    made = []
    problems = []
    for leaf in leaves:
        own = of_leaf.get(leaf.path, [])
        if leaf.dtype == FP8 or not any(b.tensor in scales for b in own):
            sent.append(leaf)
            continue
        found = _block_quantised(leaf, own, scales)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        quantised, bound = found
        devices = np.unique(leaf.devices)
        sent.append(replace(leaf, dtype=FP8))
        sent.append(_on_each(devices, quantised.scales, quantised.grid))
        more += bound
        made.append(quantised)
    if problems:
        raise_problems(problems)
    paths = {q.path for q in made}
    kept = [replace(b, add=0.0, cast=None) if b.leaf in paths else b for b in bindings]
    return sent, [*kept, *more], tuple(made)


def _on_each(devices: np.ndarray, path: str, shape: Shape) -> Leaf:
    """A leaf of scales, whole on each of these devices."""
    starts = np.zeros((len(devices), len(shape)), np.int64)
    return Leaf(path, shape, "float32", devices, starts, starts + np.array(shape))


def _block_quantised(
    leaf: Leaf, bindings: Sequence[Binding], scales: Mapping[str, BlockScale]
) -> tuple[Quantised, list[Binding]] | Problem:
    """How a leaf is quantised, with the bindings of its scales; or why it can't be."""
    mixed = _mixed(leaf, bindings, scales, {(b.add, b.cast) for b in bindings}, _REMEDY)
    if mixed:
        return mixed
    add = bindings[0].add
    cast = bindings[0].cast
    if leaf.dtype not in ("bfloat16", "float32") or cast not in (
        None,
        "bfloat16",
        leaf.dtype,
    ):
        text = f"{leaf.dtype} values{f', rounded to {cast},' if cast else ''} can't be quantised in blocks"
        return Problem(
            "format", leaf.path, text, "keep the leaf in bfloat16 or float32"
        )
    bound: list[Binding] = []
    blocks: set[Shape] = set()
    for b in bindings:
        found = _divided(b, scales[b.tensor])
        if isinstance(found, str):
            return Problem("format", leaf.path, f"{b.tensor}: {found}", _REMEDY)
        blocks.add(found[0])
        bound.append(found[1])
    if len(blocks) > 1:
        return Problem(
            "format", leaf.path, "its parts have blocks of different shapes", _REMEDY
        )
    block = blocks.pop()
    grid = tuple(-(-n // b) for n, b in zip(leaf.shape, block, strict=True))
    path = scales_path(leaf.path)
    made = Quantised(
        leaf.path, leaf.dtype, cast or leaf.dtype, grid, (), add, cast, block
    )
    return made, [replace(b, leaf=path, leaf_shape=grid) for b in bound]


def _mixed(
    leaf: Leaf,
    bindings: Sequence[Binding],
    quantised: Container[str],
    ways: set[Any],
    remedy: str,
) -> Problem | None:
    """A leaf of which only some parts are quantised, or some in another way, is sent in no format."""
    plain = [b.tensor for b in bindings if b.tensor not in quantised]
    if plain:
        text = f"it fills {plain[0]!r}, which is not quantised, and others that are"
    elif len(ways) > 1:
        text = "its parts are cast in different ways before fp8"
    else:
        return None
    return Problem("format", leaf.path, text, remedy)


def _divided(b: Binding, scale: BlockScale) -> tuple[Shape, Binding] | str:
    """The block of the leaf's dimensions, and the binding of the scales; or why the leaf has no such blocks."""
    if any(at % size for at, size in zip(b.tensor_start, scale.block, strict=True)):
        return "a part of it begins inside of a block"
    block = [1] * len(b.leaf_shape)
    axes = []
    for d in range(len(b.leaf_shape)):
        mine = sorted((a for a in b.axes if a.leaf_dim == d), key=lambda a: a.leaf_step)
        step = 1
        for k, a in enumerate(mine):
            size = scale.block[a.tensor_dim]
            last = k == len(mine) - 1
            whole = a.tensor_step * a.size <= size and (
                size % (a.tensor_step * a.size) == 0 or last
            )
            if a.leaf_step != step or (not whole and not last):
                return f"dimension {d} of the leaf runs through its blocks in another order"
            if not whole and a.tensor_step % size and size % a.tensor_step:
                return f"blocks of {size} end inside of a run of {a.tensor_step}"
            # steps that stay in one block
            inside = a.size if whole else max(1, size // a.tensor_step)
            if last:
                block[d] = a.leaf_step * inside
                count = -(-a.size // inside)
                axes.append(
                    Axis(count, d, 1, a.tensor_dim, max(1, a.tensor_step // size))
                )
            step *= a.size
    if any(at % size for at, size in zip(b.leaf_start, block, strict=True)):
        return "a part of the leaf begins inside of a block"
    start = tuple(at // size for at, size in zip(b.leaf_start, block, strict=True))
    into = tuple(
        at // size for at, size in zip(b.tensor_start, scale.block, strict=True)
    )
    of = scale.tensor
    made = replace(
        b,
        tensor=of.name,
        tensor_shape=tuple(of.shape),
        leaf_start=start,
        tensor_start=into,
        axes=tuple(axes),
    )
    return tuple(block), replace(
        made, add=0.0, cast=None, reason="the scales of its blocks", warning=""
    )


# ----------------------------------------------------------------------------------------------------

Cell = tuple[str, int]  # parameter, block
_UNLIKE = "give each matrix a leaf (or a slice of a stacked leaf) of its own, or launch without quantization"


def expand_formats(
    leaves: Sequence[Leaf], bindings: Sequence[Binding], layouts: Sequence[RankLayout]
) -> tuple[list[Leaf], list[Binding], list[RankLayout], tuple[Quantised, ...]]:
    """The inputs of a plan that sends fp8 values and scales; unchanged where no layout has formats."""
    if not any(layout.formats for layout in layouts):
        return list(leaves), list(bindings), list(layouts), ()
    cells = [_cells(layout) for layout in layouts]
    groups, number = _groups(layouts, cells)
    made = []
    problems = []
    for leaf in leaves:
        own = [b for b in bindings if b.leaf == leaf.path]
        if any(b.tensor in groups for b in own):
            found = _quantised(leaf, own, groups, _loaded(layouts))
            (problems if isinstance(found, Problem) else made).append(found)
    if problems:
        raise_problems([p for p in problems if isinstance(p, Problem)])
    quantised = tuple(q for q in made if isinstance(q, Quantised))
    sent = {q.path for q in quantised}
    holders = [leaf for leaf in leaves if leaf.path in sent]
    if not holders:  # the rules reach none of them: compiling says so
        return list(leaves), list(bindings), list(layouts), ()
    devices = holders[0].devices
    for leaf in holders:
        if not np.array_equal(np.sort(leaf.devices), np.sort(devices)):
            text = f"it is on other devices than {holders[0].path}: no program can compute one scale for both"
            raise_problems(
                [Problem("format", leaf.path, text, "put all parameters on one mesh")]
            )
    scales = _on_each(devices, SCALES, (number,))
    whole = Binding(
        SCALES,
        SCALES,
        (number,),
        (number,),
        (0,),
        (0,),
        (Axis(number, 0, 1, 0, 1),),
        reason="a format",
    )
    return (
        [*(replace(x, dtype=FP8) if x.path in sent else x for x in leaves), scales],
        [
            *(
                replace(b, add=0.0, cast=None) if b.leaf in sent else b
                for b in bindings
            ),
            whole,
        ],
        [
            _with_scales(x, mine, groups, number)
            for x, mine in zip(layouts, cells, strict=True)
        ],
        quantised,
    )


def _loaded(layouts: Sequence[RankLayout]) -> dict[str, str]:
    """Tensor → the dtype in which the loader gets it, for tensors that are quantised."""
    out = {}
    for layout in layouts:
        of = {f.parameter: f.loaded for f in layout.formats}
        for t, p in {
            *zip(layout.tensor.tolist(), layout.parameter.tolist(), strict=True)
        }:
            if (name := layout.parameters[p].name) in of:
                out[layout.tensors[t].name] = of[name]
    return out


def _cells(layout: RankLayout) -> dict[Cell, set[str]]:
    """(parameter, block) → the tensors that fill it on this rank."""
    out: dict[Cell, set[str]] = {}
    place = {p.name: i for i, p in enumerate(layout.parameters)}
    for f in layout.formats:
        rows = np.flatnonzero(layout.parameter == place[f.parameter])
        first = layout.dst_offset[rows]
        last = first + ((layout.shape[rows] - 1) * layout.dst_strides[rows]).sum(axis=1)
        across = rows[first // f.block != last // f.block]
        if len(across):
            name = layout.tensors[int(layout.tensor[across[0]])].name
            text = f"one copy fills several blocks of {f.parameter}, each with a scale of its own"
            raise_problems([Problem("format", name, text, _UNLIKE)])
        blocks = (first // f.block).tolist()
        for tensor, block in zip(layout.tensor[rows], blocks, strict=True):
            cell = out.setdefault((f.parameter, block), set())
            cell.add(layout.tensors[tensor].name)
    return out


def _groups(
    layouts: Sequence[RankLayout], cells: Sequence[Mapping[Cell, set[str]]]
) -> tuple[dict[str, int], int]:
    """Tensor → group, and how many groups there are: tensors that share a block on some rank share a scale."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for mine in cells:
        for names in mine.values():
            first, *others = sorted(names)
            for other in others:
                parent[root(other)] = root(first)
    groups: dict[str, int] = {}
    out: dict[str, int] = {}
    for layout, mine in zip(layouts, cells, strict=True):
        held: dict[int, Cell] = {}
        for cell, names in mine.items():
            for name in sorted(names):
                out[name] = groups.setdefault(root(name), len(groups))
            group = out[min(names)]
            if held.setdefault(group, cell) != cell:
                text = f"it fills {held[group][0]} and {cell[0]} on rank {layout.rank}, which have scales of their own"
                raise_problems(
                    [Problem("format", min(names), text, "launch without quantization")]
                )
    return out, len(groups)


def _quantised(
    leaf: Leaf,
    bindings: Sequence[Binding],
    groups: Mapping[str, int],
    loaded: Mapping[str, str],
) -> Quantised | Problem:
    """How one leaf is quantised, or why it cannot be."""
    ways = {(b.add, b.cast, loaded.get(b.tensor, "")) for b in bindings}
    mixed = _mixed(leaf, bindings, groups, ways, _UNLIKE)
    if mixed:
        return mixed
    (add, cast, dtype) = ways.pop()
    for name in (cast or dtype, dtype):
        if name not in ("bfloat16", leaf.dtype):
            text = f"{leaf.dtype} values would be rounded to {name} and then to fp8"
            remedy = (
                'launch with engine={"dtype": "bfloat16"}, or keep the leaf in ' + name
            )
            return Problem("format", leaf.path, text, remedy)
    indices = [_indices(b) for b in bindings]
    cut = [
        d
        for d, n in enumerate(leaf.shape)
        if any(len(index[d]) != n for index in indices)
    ]
    grid = np.full(
        [n if d in cut else 1 for d, n in enumerate(leaf.shape)], -1, np.int64
    )
    for b, index in zip(bindings, indices, strict=True):
        at = np.ix_(
            *(
                index[d] if d in cut else np.zeros(1, np.int64)
                for d in range(len(leaf.shape))
            )
        )
        if ((grid[at] != -1) & (grid[at] != groups[b.tensor])).any():
            return Problem(
                "format",
                leaf.path,
                "one part of it fills parameters with scales of their own",
                _UNLIKE,
            )
        grid[at] = groups[b.tensor]
    for d in cut:  # fused parts of one group need no table along the fused dimension
        first = np.take(grid, [0], axis=d)
        if (grid == first).all():
            grid = first
    return Quantised(
        leaf.path,
        leaf.dtype,
        dtype,
        tuple(grid.shape),
        tuple(grid.reshape(-1).tolist()),
        add,
        cast,
    )


def _indices(b: Binding) -> list[np.ndarray]:
    """The indices of a leaf that a binding reads, for each of its dimensions."""
    out = [np.array([start], np.int64) for start in b.leaf_start]
    for a in b.axes:
        out[a.leaf_dim] = (
            out[a.leaf_dim][:, None] + np.arange(a.size) * a.leaf_step
        ).reshape(-1)
    return [np.unique(x) for x in out]


def _with_scales(
    layout: RankLayout,
    cells: Mapping[Cell, set[str]],
    groups: Mapping[str, int],
    number: int,
) -> RankLayout:
    """The layout with fp8 tensors, and rows that copy scales from `SCALES` to the parameters that hold them."""
    tensors = [
        *(replace(t, dtype=FP8) if t.name in groups else t for t in layout.tensors)
    ]
    tensors.append(CheckpointTensor(SCALES, (number,), "float32"))
    place = {p.name: i for i, p in enumerate(layout.parameters)}
    scale = {f.parameter: place[f.scale] for f in layout.formats}
    rows = [
        (scale[parameter], block, groups[min(names)])
        for (parameter, block), names in cells.items()
    ]
    into, at, source = np.array(rows, np.int64).reshape(-1, 3).T
    number_of_tensor = np.full(len(rows), len(tensors) - 1)
    ones = np.ones((len(rows), layout.shape.shape[1]), np.int64)
    filled = {f.scale for f in layout.formats}
    return replace(
        layout,
        tensors=tuple(tensors),
        tensor=np.append(layout.tensor, number_of_tensor).astype(np.int32),
        parameter=np.append(layout.parameter, into).astype(np.int32),
        shape=np.concatenate([layout.shape, ones]),
        src_offset=np.append(layout.src_offset, source),
        src_strides=np.concatenate([layout.src_strides, 0 * ones]),
        dst_offset=np.append(layout.dst_offset, at),
        dst_strides=np.concatenate([layout.dst_strides, 0 * ones]),
        padding=tuple(n for n in layout.padding if n.name not in filled),
    )

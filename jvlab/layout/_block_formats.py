"""Block-scaled fp8 checkpoints → plan: leaves become fp8 leaves of the same geometry, each with a leaf of scales.

Such a checkpoint (`quantization_config.weight_block_size`) holds fp8 values and, for each block of a matrix, a scale in
`<name>_scale_inv`. Of a block's values in float32, each operation rounded once, as vLLM's `per_block_cast_to_fp8` does:

    scale = max(amax, 1e-4) / 448                         q = fp8(value · (1 / scale))

vLLM's own loader says where values and scales go on each rank; only the trainer's half is made here: the scales are
bound as the values are, with every run of indices divided by the block. numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jvlab.layout._plan_types import FP8, Quantised, scales_path
from jvlab.layout._problems import Problem, raise_problems
from jvlab.layout._types import Axis, Binding, CheckpointTensor, Leaf, RankLayout

SUFFIX = "_scale_inv"
_REMEDY = "give each matrix a leaf (or a slice of a stacked leaf) of its own, or launch the checkpoint in 16 bits"


@dataclass(frozen=True)
class BlockScale:
    """The scales of one fp8 tensor of a checkpoint."""

    tensor: CheckpointTensor
    block: tuple[int, ...]  # of the fp8 tensor's dimensions


def block_size(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The blocks of a checkpoint that is quantised in blocks; empty for any other."""
    given = config.get("quantization_config") or {}
    return tuple(map(int, given.get("weight_block_size") or ())) if given.get("quant_method") == "fp8" else ()


def _grid(t: CheckpointTensor, size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The block in all of a tensor's dimensions, and how many there are along each."""
    block = (1,) * (len(t.shape) - 2) + size
    return block, tuple(-(-n // b) for n, b in zip(t.shape, block, strict=False))


def with_block_scales(
    tensors: Sequence[CheckpointTensor], config: Mapping[str, Any], layouts: Sequence[RankLayout]
) -> list[CheckpointTensor]:
    """The checkpoint's tensors, if their names came from config.json alone, which has them before quantisation.

    What the engine holds in fp8 the checkpoint has in fp8, with scales. Tensors with scales are returned as they are.
    """
    size = block_size(config)
    if not size or any(t.name.endswith(SUFFIX) or t.dtype == FP8 for t in tensors):
        return list(tensors)
    held = set()
    for layout in layouts:
        into = [p.dtype == FP8 for p in layout.parameters]
        held |= {layout.tensors[t].name for t, p in zip(layout.tensor, layout.parameter, strict=True) if into[p]}
    out = []
    for t in tensors:
        if t.name not in held:
            out.append(t)
            continue
        out += [replace(t, dtype=FP8), CheckpointTensor(t.name + SUFFIX, _grid(t, size)[1], "float32")]
    return out


def block_scales(tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]) -> dict[str, BlockScale]:
    """fp8 tensor → its scales, for a checkpoint that is quantised in blocks; empty for any other."""
    size = block_size(config)
    if not size:
        return {}
    named = {t.name: t for t in tensors}
    found = {}
    for t in tensors:
        scale = named.get(t.name + SUFFIX)
        block, grid = _grid(t, size)
        if t.dtype == FP8 and scale is not None and scale.dtype == "float32" and tuple(scale.shape) == grid:
            found[t.name] = BlockScale(scale, block)
    return found


def before_blocks(tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]) -> list[CheckpointTensor]:
    """The tensors that a block-scaled checkpoint was quantised from, in the model's dtype; any other's as they are."""
    scales = block_scales(tensors, config)
    hidden = {scale.tensor.name for scale in scales.values()}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return [replace(t, dtype=dtype) if t.name in scales else t for t in tensors if t.name not in hidden]


def expand_blocks(
    leaves: Sequence[Leaf], bindings: Sequence[Binding], scales: Mapping[str, BlockScale]
) -> tuple[list[Leaf], list[Binding], tuple[Quantised, ...]]:
    """The leaves and bindings of a plan that sends fp8 values and their scales, and how each leaf is quantised."""
    of_leaf: dict[str, list[Binding]] = {}
    for b in bindings:
        of_leaf.setdefault(b.leaf, []).append(b)
    sent, more, made, problems = [], [], [], []
    for leaf in leaves:
        own = of_leaf.get(leaf.path, [])
        if leaf.dtype == FP8 or not any(b.tensor in scales for b in own):
            sent.append(leaf)
            continue
        found = _quantised(leaf, own, scales)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        quantised, bound = found
        devices = np.unique(leaf.devices)
        zeros = np.zeros((len(devices), len(quantised.grid)), np.int64)
        ends = np.broadcast_to(np.array(quantised.grid, np.int64), zeros.shape).copy()
        sent += [replace(leaf, dtype=FP8), Leaf(quantised.scales, quantised.grid, "float32", devices, zeros, ends)]
        more += bound
        made.append(quantised)
    if problems:
        raise_problems(problems)
    paths = {q.path for q in made}
    kept = [replace(b, add=0.0, cast=None) if b.leaf in paths else b for b in bindings]
    return sent, [*kept, *more], tuple(made)


def _quantised(
    leaf: Leaf, bindings: Sequence[Binding], scales: Mapping[str, BlockScale]
) -> tuple[Quantised, list[Binding]] | Problem:
    """How a leaf is quantised, with the bindings of its scales; or why it can't be."""
    plain = [b.tensor for b in bindings if b.tensor not in scales]
    if plain:
        text = f"it fills {plain[0]!r}, which is not quantised, and others that are"
        return Problem("format", leaf.path, text, _REMEDY)
    if len({(b.add, b.cast) for b in bindings}) > 1:
        return Problem("format", leaf.path, "its parts are cast in different ways before fp8", _REMEDY)
    add, cast = bindings[0].add, bindings[0].cast
    if leaf.dtype not in ("bfloat16", "float32") or cast not in (None, "bfloat16", leaf.dtype):
        text = f"{leaf.dtype} values{f', rounded to {cast},' if cast else ''} can't be quantised in blocks"
        return Problem("format", leaf.path, text, "keep the leaf in bfloat16 or float32")
    bound: list[Binding] = []
    blocks: set[tuple[int, ...]] = set()
    for b in bindings:
        found = _divided(b, scales[b.tensor])
        if isinstance(found, str):
            return Problem("format", leaf.path, f"{b.tensor}: {found}", _REMEDY)
        blocks.add(found[0])
        bound.append(found[1])
    if len(blocks) > 1:
        return Problem("format", leaf.path, "its parts have blocks of different shapes", _REMEDY)
    block = blocks.pop()
    grid = tuple(-(-n // b) for n, b in zip(leaf.shape, block, strict=True))
    path = scales_path(leaf.path)
    made = Quantised(leaf.path, leaf.dtype, cast or leaf.dtype, grid, (), add, cast, block)
    return made, [replace(b, leaf=path, leaf_shape=grid) for b in bound]


def _divided(b: Binding, scale: BlockScale) -> tuple[tuple[int, ...], Binding] | str:
    """The block of the leaf's dimensions, and the binding of the scales; or why the leaf has no such blocks."""
    if any(at % size for at, size in zip(b.tensor_start, scale.block, strict=True)):
        return "a part of it begins inside of a block"
    block, axes = [1] * len(b.leaf_shape), []
    for d in range(len(b.leaf_shape)):
        mine = sorted((a for a in b.axes if a.leaf_dim == d), key=lambda a: a.leaf_step)
        step = 1
        for k, a in enumerate(mine):
            size, last = scale.block[a.tensor_dim], k == len(mine) - 1
            whole = a.tensor_step * a.size <= size and (size % (a.tensor_step * a.size) == 0 or last)
            if a.leaf_step != step or (not whole and not last):
                return f"dimension {d} of the leaf runs through its blocks in another order"
            if not whole and a.tensor_step % size and size % a.tensor_step:
                return f"blocks of {size} end inside of a run of {a.tensor_step}"
            inside = a.size if whole else max(1, size // a.tensor_step)  # steps that stay in one block
            if last:
                block[d] = a.leaf_step * inside
                count = -(-a.size // inside)
                axes.append(Axis(count, d, 1, a.tensor_dim, max(1, a.tensor_step // size)))
            step *= a.size
    if any(at % size for at, size in zip(b.leaf_start, block, strict=True)):
        return "a part of the leaf begins inside of a block"
    start = tuple(at // size for at, size in zip(b.leaf_start, block, strict=True))
    into = tuple(at // size for at, size in zip(b.tensor_start, scale.block, strict=True))
    of = scale.tensor
    made = replace(
        b, tensor=of.name, tensor_shape=tuple(of.shape), leaf_start=start, tensor_start=into, axes=tuple(axes)
    )
    return tuple(block), replace(made, add=0.0, cast=None, reason="the scales of its blocks", warning="")

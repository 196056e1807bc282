"""Loads safetensors checkpoints into sharded arrays of the Policy layout and writes them back, one leaf at a time."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jvlab._errors import LayoutError, ModelError, Unsupported
from jvlab.layout._checkpoint import (
    FLOATS,
    INDEX,
    CheckpointValues,
    encode_header,
    read_header,
    read_weight_map,
)
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._rules import apply_binding

SHARD_BYTES = 5_000_000_000  # largest weights file, as in transformers
# files of a checkpoint besides weights and config: the tokenizer's, under all its names, and the sampling defaults
_AUXILIARY_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "generation_config.json",
)


class TensorFiles(CheckpointValues):
    """The safetensors files of a folder as a mapping from name to array, memory-mapped: only what is used is read."""

    def __init__(self, folder: Path) -> None:
        self._files = {}
        for file in _files(folder):
            for entry in read_header(file):
                if entry.dtype not in FLOATS:
                    raise ModelError(
                        f"{entry.name} in {file.name} holds {entry.dtype}, not plain floating-point numbers",
                        remedy="a policy trains float32, float16 or bfloat16 weights: use the unquantised checkpoint",
                        tensor=entry.name,
                        dtype=entry.dtype,
                    )
                self._files[entry.name] = (file, entry)
        if not self._files:
            raise ModelError(
                f"{folder} holds no safetensors files",
                remedy="give a model directory with weights; jv.models.tiny() writes one",
                path=str(folder),
            )

    def tensors(self) -> list[CheckpointTensor]:
        """Names, shapes and dtypes, in file order."""
        return [
            CheckpointTensor(name, entry.shape, FLOATS[entry.dtype])
            for name, (_, entry) in self._files.items()
        ]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored(name)


def _files(folder: Path) -> list[Path]:
    """The files that the index names, if there is one: a folder may hold the same weights twice."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    files = [folder / name for name in sorted(set(read_weight_map(index).values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(files)} files its index names, first {missing[0]}",
            remedy="fetch the checkpoint again",
            path=str(folder),
            files=missing,
        )
    return files


# ------------------------------------------------------------------------------------------------ loading


def load_leaf(
    bindings: Sequence[Binding], files: TensorFiles, dtype: str, sharding: NamedSharding
) -> jax.Array:
    """One leaf as a sharded array, from its tensor, or from one tensor for each of its stacked layers (and experts).

    Each device's part is copied from the mapped files separately, and cast.
    """
    lead = max(map(leading_dims, bindings))
    shape = bindings[0].leaf_shape
    views = {
        binding.leaf_start[:lead]: leaf_view(binding, files[binding.tensor])
        for binding in bindings
    }
    if len(views) != math.prod(shape[:lead]):
        raise LayoutError(
            f"leaf {bindings[0].leaf} {shape} has {len(views)} tensors",
            remedy="report this as a bug",
        )
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        key = repr(index)  # devices with equal parts share one copy
        if key not in parts:
            whole = index or (slice(None),) * len(shape)
            ranges = [
                range(*at.indices(size)) for at, size in zip(whole, shape, strict=True)
            ]
            # always a copy: jax may alias host memory, and the file may change
            parts[key] = np.empty([len(each) for each in ranges], numpy_dtype(dtype))
            for at in itertools.product(*ranges[:lead]):
                into = tuple(
                    number - each.start
                    for number, each in zip(at, ranges, strict=False)
                )
                _copy(parts[key][into], views[at][(0,) * lead + whole[lead:]])
        return parts[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _copy(into: np.ndarray, view: np.ndarray) -> None:
    into[...] = view  # casts


def leading_dims(binding: Binding) -> int:
    """How many of the leaf's first dimensions are not the tensor's: they count layers, or layers and experts."""
    own = {axis.leaf_dim for axis in binding.axes}
    return next(
        (d for d in range(len(binding.leaf_shape) - 1) if d in own),
        len(binding.leaf_shape) - 1,
    )


def leaf_view(binding: Binding, tensor: np.ndarray) -> np.ndarray:
    """A view of a checkpoint tensor with the leaf's axes: of the whole leaf, or of one of its layers or experts.

    The inverse of `apply_binding`.
    """
    dims = {axis.leaf_dim: axis for axis in binding.axes}
    lead = leading_dims(binding)
    whole = (
        len(dims) == len(binding.axes)
        and not any(binding.leaf_start[lead:])
        and not binding.add
    )
    shape = tuple(
        dims[d].size if d in dims else 1 for d in range(len(binding.leaf_shape))
    )
    fits = shape[lead:] == binding.leaf_shape[lead:]
    if not whole or not fits or any(a.leaf_step != 1 for a in binding.axes):
        raise LayoutError(
            f"leaf {binding.leaf} is not one plain view of tensor {binding.tensor}: {binding.rule}",
            remedy="report this as a bug: every rule of the Policy layout should be one",
            leaf=binding.leaf,
            tensor=binding.tensor,
        )
    strides = [
        tensor.strides[dims[d].tensor_dim] * dims[d].tensor_step if d in dims else 0
        for d in range(len(shape))
    ]
    corner = tensor[tuple(slice(at, None) for at in binding.tensor_start)]
    return np.lib.stride_tricks.as_strided(corner, shape, strides, writeable=False)


# ------------------------------------------------------------------------------------------------ saving


def write_weights(
    folder: Path,
    tensors: Sequence[CheckpointTensor],
    bindings: Sequence[Binding],
    leaf: Callable[[str], jax.Array],
    dtype: str,
    shard_bytes: int,
) -> None:
    """Writes the checkpoint's tensors, holding one in memory at a time; writes an index if there are several files."""
    width = numpy_dtype(dtype).itemsize
    groups: list[list[CheckpointTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * width
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    by_tensor: dict[str, list[Binding]] = {}
    for binding in bindings:
        by_tensor.setdefault(binding.tensor, []).append(binding)
    weight_map: dict[str, str] = {}
    slices = _Slices(leaf)
    for number, group in enumerate(groups, 1):
        several = f"model-{number:05}-of-{len(groups):05}.safetensors"
        name = several if len(groups) > 1 else "model.safetensors"
        with (folder / name).open("wb") as stream:
            stream.write(
                encode_header(
                    ((t.name, t.shape) for t in group), dtype, {"format": "pt"}
                )
            )
            for tensor in group:
                stream.write(
                    _tensor(tensor, by_tensor[tensor.name], slices, dtype).tobytes()
                )
        weight_map |= {tensor.name: name for tensor in group}
    if len(groups) > 1:
        total = sum(math.prod(t.shape) * width for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def _tensor(
    tensor: CheckpointTensor, bindings: Sequence[Binding], slices: _Slices, dtype: str
) -> np.ndarray:
    out = np.empty(tensor.shape, numpy_dtype(dtype))
    for binding in bindings:
        array, at = slices.of(binding)
        apply_binding(
            replace(binding, leaf_start=at, leaf_shape=array.shape), array, out
        )
    return out


class _Slices:
    """Fetches from the devices what one tensor needs of a leaf: the leaf, or one of its stacked layers.

    Of experts the layer is kept until another one is asked for, since its other experts usually come next.
    """

    def __init__(self, leaf: Callable[[str], jax.Array]) -> None:
        self.leaf = leaf
        self.kept: dict[str, tuple[int, np.ndarray]] = {}

    def of(self, binding: Binding) -> tuple[np.ndarray, tuple[int, ...]]:
        """The array, and where the binding starts in it."""
        array = self.leaf(binding.leaf)
        lead = leading_dims(binding)
        start = binding.leaf_start
        # arrays of numpy are what a gather over processes gives
        if not getattr(array, "is_fully_addressable", True):
            raise Unsupported(
                f"{binding.leaf} spans processes, but this one holds only a part of it",
                remedy="gather the parameters first: jax.experimental.multihost_utils.process_allgather",
                leaf=binding.leaf,
            )
        if not lead or len(array) == 1:
            return np.asarray(array), start
        if binding.leaf in self.kept and self.kept[binding.leaf][0] == start[0]:
            return self.kept[binding.leaf][1], (0, *start[1:])
        found = np.asarray(array[start[0] : start[0] + 1])
        if lead > 1:
            self.kept[binding.leaf] = start[0], found
        return found, (0, *start[1:])


def write_checkpoint(
    folder: Path,
    source: Path,
    config: Mapping[str, Any],
    tensors: Sequence[CheckpointTensor],
    bindings: Sequence[Binding],
    leaf: Callable[[str], jax.Array],
    dtype: str,
) -> None:
    """The weights, config.json, and from `source` the tokenizer and the sampling defaults."""
    for pattern in _AUXILIARY_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    write_weights(folder, tensors, bindings, leaf, dtype, SHARD_BYTES)
    text = config_text(config, dtype)
    (folder / "config.json").write_text(text, encoding="utf-8")


def config_text(config: Mapping[str, Any], dtype: str) -> str:
    """config.json with the dtype of the weights as written."""
    out = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": dtype}
    if "torch_dtype" in config:
        out["torch_dtype"] = dtype  # transformers 4 reads this one
    return json.dumps(out, indent=2) + "\n"

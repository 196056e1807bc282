"""A checkpoint's values, read lazily, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jvlab.layout.checkpoint._safetensors import FLOATS, Entry, read_header

KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


class CheckpointValues(Mapping[str, np.ndarray]):
    """The safetensors files of a model folder as a mapping from tensor name to float32 array. Keeps no values.

    Tensors of other kinds (float8, packed integers) are left out: without their scales their bits are not values.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[Path, Entry]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            entries = read_header(file, whole=False)
            if entries and file.stat().st_size <= min(entry.begin for entry in entries):
                continue  # a header alone, for planning: it has no values
            self._files |= {entry.name: (file, entry) for entry in read_header(file) if entry.dtype in KINDS}

    @classmethod
    def of(cls, model: object) -> CheckpointValues | None:
        """The values of a local model folder, or None where there are none to read."""
        if isinstance(model, Mapping) or not Path(str(model)).is_dir():
            return None
        found = cls(Path(str(model)))
        return found if found._files else None

    def __getitem__(self, name: str) -> np.ndarray:
        """Read straight from the file: numpy has no bfloat16, so its bits are widened here."""
        file, entry = self._files[name]
        with file.open("rb") as stream:
            stream.seek(entry.begin)
            raw = np.frombuffer(stream.read(entry.end - entry.begin), KINDS[entry.dtype])
        if entry.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        return raw.astype(np.float32).reshape(entry.shape)

    def dtype(self, name: str) -> str:
        """The dtype it is stored in, as jax spells it; empty if it is not a float."""
        return FLOATS.get(self._files[name][1].dtype, "")

    def at(self, name: str, index: np.ndarray) -> np.ndarray:
        """The elements at `index` [n, dimensions] as float64, without reading the rest of the tensor."""
        file, entry = self._files[name]
        stored = np.memmap(file, np.dtype(KINDS[entry.dtype]), "r", entry.begin, (max(math.prod(entry.shape), 1),))
        flat = np.ravel_multi_index(tuple(index.T), entry.shape) if entry.shape else np.zeros(len(index), np.int64)
        raw = np.asarray(stored[flat])
        if entry.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

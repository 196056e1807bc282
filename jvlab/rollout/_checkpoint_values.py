"""A checkpoint's numbers, read one tensor at a time when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


class CheckpointValues(Mapping[str, np.ndarray]):
    """The safetensors files of a model folder as a mapping from tensor name to float32 array. Keeps no values.

    A tensor of another kind (float8, packed integers) is not in it: its bits alone are not its values.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as stream:
                header, _ = _header(stream)
            self._files |= {n: file for n, e in header.items() if n != "__metadata__" and e["dtype"] in KINDS}

    @classmethod
    def of(cls, model: object) -> CheckpointValues | None:
        """The values of a local model folder, or None where there are none to read."""
        if isinstance(model, Mapping) or not Path(str(model)).is_dir():
            return None
        found = cls(Path(str(model)))
        return found if found._files else None

    def __getitem__(self, name: str) -> np.ndarray:
        """Read straight from the file: numpy has no bfloat16, so its bits are widened here."""
        file = self._files[name]
        with file.open("rb") as stream:
            header, start = _header(stream)
            entry = header[name]
            begin, end = entry["data_offsets"]
            stream.seek(start + begin)
            raw = np.frombuffer(stream.read(end - begin), KINDS[entry["dtype"]])
        if entry["dtype"] == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
        return raw.astype(np.float32).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """A safetensors file's table of tensors, and where its data begin."""
    size = int.from_bytes(stream.read(8), "little")
    return json.loads(stream.read(size)), 8 + size

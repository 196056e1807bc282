"""A checkpoint's numbers, read one tensor at a time when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np


class CheckpointValues(Mapping[str, np.ndarray]):
    """The safetensors files of a model folder as a mapping from tensor name to float32 array. Keeps nothing."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

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
            size = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(size))[name]
            begin, end = entry["data_offsets"]
            stream.seek(8 + size + begin)
            data = stream.read(end - begin)
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(entry["shape"])
        kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}[entry["dtype"]]
        return np.frombuffer(data, kind).astype(np.float32).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

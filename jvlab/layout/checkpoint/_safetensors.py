"""Headers of safetensors files, read and written without the library; no weights are read, every field is checked.

A file is a length in 8 bytes, a JSON header of that length, then the tensors' bytes. Anything inconsistent is a
ModelError that names the file; the length is compared with the file's size before the header is read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from jvlab._errors import ModelError
from jvlab._files import parse_object, read_json_object
from jvlab.layout._plan_types import item_bytes

LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
LONGEST_INDEX = 200_000_000  # the names of a 671B checkpoint are some 10 MB
INDEX = "model.safetensors.index.json"
DTYPES = {  # the format's codes -> names as torch and jax spell them
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
FLOATS = {code: DTYPES[code] for code in ("F64", "F32", "F16", "BF16")}


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype by the format's code, and where its bytes lie in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path, whole: bool = True) -> list[Entry]:
    """The tensors of a file, in its order. `whole`: their bytes must be there too; else the header is enough."""
    try:
        with file.open("rb") as stream:
            file_size = os.fstat(stream.fileno()).st_size
            _, entries = parse_header(stream, file_size)
    except (ValueError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{file} is not a safetensors file: {error}",
            remedy="fetch the file again",
            path=str(file),
        ) from error
    for entry in entries:
        if whole and entry.end > file_size:
            raise ModelError(
                f"{file} ends before {entry.name}: {file_size} bytes of {entry.end}",
                remedy="the file was cut short: fetch it again",
                path=str(file),
                tensor=entry.name,
            )
    return entries


def parse_header(
    stream: BinaryIO | mmap.mmap, file_size: int, limit: int = LONGEST_HEADER
) -> tuple[dict[str, Any], list[Entry]]:
    """Metadata and tensors of a file of `file_size` bytes, from its first bytes; ValueError if it is not one."""
    size = int.from_bytes(stream.read(8), "little")
    if not 2 <= size <= min(file_size - 8, limit):
        raise ValueError(
            f"it declares a header of {size:,} bytes in a file of {file_size:,}"
        )
    header = parse_object(stream.read(size))
    metadata = header.pop("__metadata__", {})
    return metadata, [_entry(name, fields, 8 + size) for name, fields in header.items()]


def encode_header(
    tensors: Iterable[tuple[str, Sequence[int]]],
    dtype: str,
    metadata: dict[str, str],
    align: int = 8,
) -> bytes:
    """The header of a file of these tensors (name, shape), all of one dtype; their bytes follow in this order."""
    code = next(code for code, name in DTYPES.items() if name == dtype)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, shape in tensors:
        start = end
        end = end + math.prod(shape) * item_bytes(dtype)
        header[name] = {
            "dtype": code,
            "shape": tuple(shape),
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # the data start at a multiple of `align` bytes
    text += b" " * (-(len(text) + 8) % align)
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, fields: Any, start: int) -> Entry:
    if not isinstance(fields, dict):
        raise ValueError(f"{_short(name)} is described by a {type(fields).__name__}")
    values: list[Any] = [fields.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, place = values
    if (
        not isinstance(dtype, str)
        or not _are_sizes(shape)
        or not _are_sizes(place)
        or len(place) != 2
        or place[0] > place[1]
    ):
        raise ValueError(
            f"{_short(name)} has dtype {_short(dtype)}, shape {_short(shape)}, bytes {_short(place)}"
        )
    count = math.prod(shape)
    if dtype in DTYPES and count * item_bytes(DTYPES[dtype]) != place[1] - place[0]:
        raise ValueError(
            f"{_short(name)} has {place[1] - place[0]} bytes for a {dtype} of shape {tuple(shape)}"
        )
    return Entry(name, dtype, tuple(shape), start + place[0], start + place[1])


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of plausible sizes."""
    return (
        isinstance(value, list)
        and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
        and len(value) < 64
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file of the folder, from a checkpoint's index."""
    found = read_json_object(
        index, LONGEST_INDEX, "a checkpoint's index", ModelError
    ).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(name, str) for name in found.values()
    ):
        raise ModelError(
            f"{index} has no weight_map from tensors to files",
            remedy="fetch the file again",
            path=str(index),
        )
    for name in set(found.values()):
        if (
            PurePosixPath(name).is_absolute()
            or ".." in PurePosixPath(name).parts
            or "\0" in name
        ):
            raise ModelError(
                f"{index} names a file outside its folder: {_short(name)}",
                remedy="is this checkpoint from a trusted source?",
                path=str(index),
            )
    return found

"""Headers of safetensors files, read and written without the library: no weights are read, nothing is believed.

A file is a length of 8 bytes, a JSON header of that length, then the tensors' bytes. Whatever does not fit together is
one ModelError that names the file; the length is compared with the file's before a byte of the header is read.
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
    """The tensors of a file, in its order. `whole`: their bytes must be in the file too; else only the header is."""
    try:
        with file.open("rb") as stream:
            there = os.fstat(stream.fileno()).st_size
            _, entries = parse_header(stream, there)
    except (ValueError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{file} is no safetensors file: {error}", remedy="fetch the file again", path=str(file)
        ) from error
    for entry in entries:
        if whole and entry.end > there:
            raise ModelError(
                f"{file} ends before {entry.name}: {there} bytes of {entry.end}",
                remedy="the file was cut short: fetch it again",
                path=str(file),
                tensor=entry.name,
            )
    return entries


def parse_header(
    stream: BinaryIO | mmap.mmap, there: int, limit: int = LONGEST_HEADER
) -> tuple[dict[str, Any], list[Entry]]:
    """Metadata and tensors of a file of `there` bytes, read from its beginning; ValueError where it is none."""
    size = int.from_bytes(stream.read(8), "little")
    if not 2 <= size <= min(there - 8, limit):
        raise ValueError(f"it announces a header of {size:,} bytes, and has {there:,} in all")
    header = parse_object(stream.read(size))
    metadata = header.pop("__metadata__", {})
    return metadata, [_entry(name, fields, 8 + size) for name, fields in header.items()]


def encode_header(
    tensors: Iterable[tuple[str, Sequence[int]]], dtype: str, metadata: dict[str, str], align: int = 8
) -> bytes:
    """What a file of these tensors (name, shape), all of one dtype, begins with: their bytes follow in this order."""
    code = next(code for code, name in DTYPES.items() if name == dtype)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, shape in tensors:
        start, end = end, end + math.prod(shape) * item_bytes(dtype)
        header[name] = {"dtype": code, "shape": tuple(shape), "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)  # the data start at a multiple of `align` bytes
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, fields: Any, start: int) -> Entry:
    if not isinstance(fields, dict):
        raise ValueError(f"{_short(name)} is described by a {type(fields).__name__}")
    values: list[Any] = [fields.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, place = values
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(place) or len(place) != 2 or place[0] > place[1]:
        raise ValueError(f"{_short(name)} has dtype {_short(dtype)}, shape {_short(shape)}, bytes {_short(place)}")
    count = math.prod(shape)
    if dtype in DTYPES and count * item_bytes(DTYPES[dtype]) != place[1] - place[0]:
        raise ValueError(f"{_short(name)} has {place[1] - place[0]} bytes for a {dtype} of shape {tuple(shape)}")
    return Entry(name, dtype, tuple(shape), start + place[0], start + place[1])


def _sizes(value: Any) -> bool:
    """A list of sizes as a file of this world can have them."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value) and len(value) < 64


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def read_weight_map(index: Path) -> dict[str, str]:
    """Which file of the folder holds which tensor, by a checkpoint's index."""
    found = read_json_object(index, LONGEST_INDEX, "a checkpoint's index", ModelError).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(
            f"{index} has no weight_map from tensors to files", remedy="fetch the file again", path=str(index)
        )
    for name in set(found.values()):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise ModelError(
                f"{index} names a file outside its folder: {_short(name)}",
                remedy="is this checkpoint from somebody you trust?",
                path=str(index),
            )
    return found

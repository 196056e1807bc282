"""What a checkpoint folder holds: config.json, the headers of its safetensors files, names, values. numpy only.

Headers are read and written here, not by the `safetensors` library. It cannot (0.8.0): open a header without its
weights, which is enough to plan with; give bfloat16 or float8 to numpy; say where a tensor's bytes lie, so that they
can be memory-mapped, and single elements picked; or write the same bytes in every version. Nor may `import jvlab` need
it. A file is a length in 8 bytes, a JSON header of that length, then the tensors' bytes. Anything inconsistent is a
ModelError that names the file; the length is compared with the file's size before the header is read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from jvlab._errors import MissingDependency, ModelError
from jvlab._files import parse_object, read_json_object
from jvlab.layout._formats import block_size
from jvlab.layout._plan_types import item_bytes, numpy_dtype
from jvlab.layout._types import CheckpointTensor

# Headers of safetensors files.

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

    def array(self, memory: np.ndarray) -> np.ndarray:
        """The tensor in its own dtype, as a view of its file's memory-mapped bytes: only what is used is read."""
        raw = np.asarray(memory[self.begin : self.end])
        return raw.view(numpy_dtype(DTYPES[self.dtype])).reshape(self.shape)


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
    return encode_entries(
        ((name, dtype, shape) for name, shape in tensors), metadata, align
    )


def encode_entries(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: dict[str, str],
    align: int = 8,
) -> bytes:
    """The same for tensors of several dtypes (name, dtype, shape)."""
    codes = {name: code for code, name in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        start = end
        end = end + math.prod(shape) * item_bytes(dtype)
        header[name] = {
            "dtype": codes[dtype],
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


# A model's config.json.

LONGEST_CONFIG = 20_000_000


def read_config_file(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. FileNotFoundError where there is none."""
    return read_json_object(
        folder / "config.json", LONGEST_CONFIG, "a model's config", ModelError
    )


def read_config(model: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's config.json, or the mapping itself; a ModelError where there is none."""
    if isinstance(model, Mapping):
        return model
    try:
        return read_config_file(Path(model))
    except (OSError, ModelError) as e:
        raise ModelError(
            f"{str(model)!r} has no readable config.json: {e}",
            remedy="give the directory of a Hugging Face checkpoint; config.json alone is enough",
            model=str(model),
        ) from e


def expert_count(config: Mapping[str, Any]) -> int:
    """Experts of a layer; 0 for a model without."""
    return max(
        int(config.get(name) or 0)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def unnamed_routers(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint in fp8 blocks lets vLLM take its routers, of fewer outputs than a block, for fp8 too.

    Some of vLLM's models keep their routers in 16 bits anyway (DeepSeek's), so this alone is no error.
    """
    given = config.get("quantization_config") or {}
    block = block_size(config)
    experts = expert_count(config)
    named = [
        str(n)
        for key in ("modules_to_not_convert", "ignored_layers")
        for n in given.get(key) or ()
    ]
    routers = any(
        part in ("gate", "router") for name in named for part in name.split(".")
    )
    return bool(block) and experts > 1 and experts % block[0] > 0 and not routers


# A checkpoint's values, read lazily, one tensor at a time.

VALUE_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8")


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
            self._files |= {
                entry.name: (file, entry)
                for entry in read_header(file)
                if entry.dtype in VALUE_DTYPES
            }

    @classmethod
    def of(cls, model: object) -> CheckpointValues | None:
        """The values of a local model folder, or None where there are none to read."""
        if isinstance(model, Mapping) or not Path(str(model)).is_dir():
            return None
        found = cls(Path(str(model)))
        return found if len(found) else None

    def stored(self, name: str) -> np.ndarray:
        """A tensor in the dtype of its file, which is read where the array is."""
        file, entry = self._files[name]
        return entry.array(np.memmap(file, np.uint8, "r"))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored(name).astype(np.float32)

    def dtype(self, name: str) -> str:
        """The dtype it is stored in, as jax spells it; empty if it is not a float."""
        return FLOATS.get(self._files[name][1].dtype, "")

    def at(self, name: str, index: np.ndarray) -> np.ndarray:
        """The elements at `index` [n, dimensions] as float64, without reading the rest of the tensor."""
        stored = self.stored(name)
        if not stored.ndim:
            return np.full(len(index), stored, np.float64)
        return stored[tuple(index.T)].astype(np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


# ----------------------------------------------------------------------------------------------------


def checkpoint_tensors(
    model: str | os.PathLike[str] | Mapping[str, Any],
) -> list[CheckpointTensor]:
    """Names, shapes and dtypes of a checkpoint, in its own order, without reading weights.

    `model` is a directory (safetensors files are read by their headers; with only config.json the names come from the
    config) or a config as a dict.
    """
    if isinstance(model, Mapping):
        return _from_config(model)
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a directory",
            remedy="give a model directory that holds config.json",
            path=str(folder),
        )
    index = folder / INDEX
    if index.is_file():
        places = read_weight_map(index)
        files = [folder / name for name in sorted(set(places.values()))]
        if all(f.is_file() for f in files):
            return _in_order([t for f in files for t in _header(f)], list(places))
        return _in_order(_from_config(read_config(folder)), list(places), str(index))
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return [t for f in files for t in _header(f)]
    return _from_config(read_config(folder))


def _header(file: Path) -> list[CheckpointTensor]:
    found = []
    # a header alone is enough to plan with
    for entry in read_header(file, whole=False):
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.name} in {file} has dtype {entry.dtype!r}",
                remedy="known dtypes: " + ", ".join(DTYPES),
                tensor=entry.name,
            )
        found.append(CheckpointTensor(entry.name, entry.shape, DTYPES[entry.dtype]))
    return found


def _in_order(
    tensors: list[CheckpointTensor], names: list[str], index: str = ""
) -> list[CheckpointTensor]:
    """The tensors that an index lists, in its order; it must list exactly these."""
    by_name = {t.name: t for t in tensors}
    if missing := [n for n in names if n not in by_name]:
        where = (
            f"{index} lists, but neither file nor config gives a shape for"
            if index
            else "the index lists, but no file has"
        )
        raise ModelError(
            f"{where} {len(missing)} tensors, first {missing[:3]}",
            remedy="put the safetensors files beside the index",
            tensors=missing,
        )
    return [by_name[n] for n in names]


def _from_config(config: Mapping[str, Any]) -> list[CheckpointTensor]:
    """What `save_pretrained` of transformers would write for a model of this config; nothing is allocated."""
    try:
        import torch
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise MissingDependency(
            f"names from config.json alone need transformers 5 and torch: {error}",
            remedy="pip install 'transformers>=5' torch, or use a directory with safetensors files",
        ) from error
    fields = {k: v for k, v in config.items() if k != "quantization_config"}
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ModelError(
            "the config has no model_type", remedy="use the model's own config.json"
        )
    try:
        parsed = transformers.AutoConfig.for_model(kind, **fields)
        wanted = [
            getattr(transformers, a)
            for a in (parsed.architectures or ())
            if hasattr(transformers, a)
        ]
        dtype = parsed.dtype if isinstance(parsed.dtype, torch.dtype) else torch.float32
        with torch.device("meta"):
            if wanted:
                model = wanted[0]._from_config(parsed, dtype=dtype)
            else:
                model = transformers.AutoModelForCausalLM.from_config(
                    parsed, dtype=dtype
                )
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot build {kind!r} from its config: {error}",
            remedy="put the checkpoint's safetensors files beside config.json",
            model_type=kind,
        ) from error
    seen: set[int] = set()
    state = {}
    # of tied tensors a checkpoint has only the first
    for name, tensor in model.state_dict().items():
        storage = tensor.untyped_storage()._cdata
        if storage not in seen:
            seen.add(storage)
            state[name] = tensor
    # transformers 5 fuses experts in memory, not on disk
    on_disk = revert_weight_conversion(model, state)
    return [
        CheckpointTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for n, t in on_disk.items()
    ]

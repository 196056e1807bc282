"""The tensors of a model as its checkpoint names them: from safetensors headers, or from config.json alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency, ModelError
from jvlab._files import read_json_object
from jvlab.layout._formats import block_size
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.checkpoint._safetensors import (
    DTYPES,
    FLOATS,
    INDEX,
    Entry,
    read_header,
    read_weight_map,
)

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

KINDS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
}


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
                if entry.dtype in KINDS
            }

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
            raw = np.frombuffer(
                stream.read(entry.end - entry.begin), KINDS[entry.dtype]
            )
        if entry.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        return raw.astype(np.float32).reshape(entry.shape)

    def dtype(self, name: str) -> str:
        """The dtype it is stored in, as jax spells it; empty if it is not a float."""
        return FLOATS.get(self._files[name][1].dtype, "")

    def at(self, name: str, index: np.ndarray) -> np.ndarray:
        """The elements at `index` [n, dimensions] as float64, without reading the rest of the tensor."""
        file, entry = self._files[name]
        stored = np.memmap(
            file,
            np.dtype(KINDS[entry.dtype]),
            "r",
            entry.begin,
            (max(math.prod(entry.shape), 1),),
        )
        flat = (
            np.ravel_multi_index(tuple(index.T), entry.shape)
            if entry.shape
            else np.zeros(len(index), np.int64)
        )
        raw = np.asarray(stored[flat])
        if entry.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64)

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
        return _from_config(dict(model))
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
        return _in_order(_from_config(_read_config(folder)), list(places), str(index))
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return [t for f in files for t in _header(f)]
    return _from_config(_read_config(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} holds neither safetensors files nor config.json",
            remedy="give a model directory in Hugging Face's layout",
            path=str(folder),
        )
    return read_config_file(folder)


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


def _from_config(config: dict[str, Any]) -> list[CheckpointTensor]:
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
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            state[name] = tensor
    # transformers 5 fuses experts in memory, not on disk
    on_disk = revert_weight_conversion(model, state)
    return [
        CheckpointTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for n, t in on_disk.items()
    ]

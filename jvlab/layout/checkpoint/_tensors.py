"""The tensors of a model as its checkpoint names them: from safetensors headers, or from config.json alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvlab._errors import MissingDependency, ModelError
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.checkpoint._config import read_config_file
from jvlab.layout.checkpoint._safetensors import DTYPES, INDEX, read_header, read_weight_map


def checkpoint_tensors(model: str | os.PathLike[str] | Mapping[str, Any]) -> list[CheckpointTensor]:
    """Names, shapes and dtypes of a checkpoint, in its own order, without reading weights.

    `model` is a directory (safetensors files are read by their headers; with only config.json the names come from the
    config) or a config as a dict.
    """
    if isinstance(model, Mapping):
        return _from_config(dict(model))
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a directory", remedy="give a model directory that holds config.json", path=str(folder)
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
    for entry in read_header(file, whole=False):  # a header alone is enough to plan with
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.name} in {file} has dtype {entry.dtype!r}",
                remedy="known dtypes: " + ", ".join(DTYPES),
                tensor=entry.name,
            )
        found.append(CheckpointTensor(entry.name, entry.shape, DTYPES[entry.dtype]))
    return found


def _in_order(tensors: list[CheckpointTensor], names: list[str], index: str = "") -> list[CheckpointTensor]:
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
        raise ModelError("the config has no model_type", remedy="use the model's own config.json")
    try:
        parsed = transformers.AutoConfig.for_model(kind, **fields)
        wanted = [getattr(transformers, a) for a in (parsed.architectures or ()) if hasattr(transformers, a)]
        dtype = parsed.dtype if isinstance(parsed.dtype, torch.dtype) else torch.float32
        with torch.device("meta"):
            if wanted:
                model = wanted[0]._from_config(parsed, dtype=dtype)
            else:
                model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot build {kind!r} from its config: {error}",
            remedy="put the checkpoint's safetensors files beside config.json",
            model_type=kind,
        ) from error
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():  # of tied tensors a checkpoint has only the first
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            state[name] = tensor
    on_disk = revert_weight_conversion(model, state)  # transformers 5 fuses experts in memory, not on disk
    return [CheckpointTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in on_disk.items()]

"""LoRA adapters, client side: a folder in PEFT's format, or tensors that are written as one."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab._names import check_name
from jvlab.layout._checkpoint import (
    _header,
    checkpoint_tensors,
    read_config_file,
)

if TYPE_CHECKING:
    from jvlab.layout._types import CheckpointTensor

PREFIX = "base_model.model."  # of every tensor in PEFT's files
FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"^(.+)\.(lora_A|lora_B)\.weight$")


def split(sampling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split keyword arguments into (adapter name or "", vLLM's sampling parameters)."""
    rest = dict(sampling)
    name = rest.pop("adapter", None)
    return "" if name is None else check_name("adapter", name), rest


def folder_of(source: Any, config: Mapping[str, Any] | None) -> tuple[Path, bool]:
    """(the folder to load, whether we made it)."""
    if isinstance(source, Mapping):
        return write(source, config), True
    path = Path(source).expanduser().resolve()
    if config is not None:
        raise ConfigError(
            "config goes with tensors; a folder has its own", remedy="leave config out"
        )
    for name in ("adapter_config.json", FILE):  # an adapter_model.bin would be a pickle
        if not (path / name).is_file():
            raise ConfigError(
                f"{path} holds no {name}",
                remedy="pass a folder in PEFT's format with safetensors, or a dict of tensors",
            )
    return path, False


def check_folder(folder: Path, model: str) -> None:
    """See `check_shapes`, for the tensors of a folder."""
    check_shapes(_header(folder / FILE), model)


def check_shapes(tensors: Sequence[CheckpointTensor], model: str) -> None:
    """Check that each pair fits its module's weight: vLLM would silently copy what fits and leave the rest zero."""
    if not Path(model).is_dir():
        return  # a hub id: its files are not here
    weights = {
        t.name.removesuffix(".weight"): t.shape
        for t in checkpoint_tensors(model)
        if t.name.endswith(".weight")
    }
    gpt2 = read_config_file(Path(model)).get("model_type") == "gpt2"
    problems = []
    for tensor in tensors:
        found = _TENSOR.match(tensor.name.removeprefix(PREFIX))
        if found is None:
            continue  # a bias or an embedding: left to vLLM
        module = found[1]
        side = found[2]
        # some checkpoints leave out the first part of a name (gpt2: "h.0..." for "transformer.h.0...")
        shape = weights.get(module) or next(
            (s for n, s in weights.items() if module.endswith(f".{n}")), None
        )
        width = tensor.shape[1] if side == "lora_A" else tensor.shape[0]
        if shape is None:
            problems.append(f"{module}: the model has no such module")
        elif len(shape) == 2 and width != _end(shape, side, gpt2):
            problems.append(
                f"{tensor.name} is {tensor.shape}, the module's weight {tuple(shape)}"
            )
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"the adapter does not fit the model: {'; '.join(problems[:5])}{more}",
            remedy="lora_A is r × in and lora_B is out × r of the module's weight (out × in)",
            problems=problems,
        )


def _end(shape: Sequence[int], side: str, gpt2: bool) -> int:
    """The size that this side of a pair must have; gpt2's weights are in × out."""
    out, into = shape[::-1] if gpt2 else shape
    return into if side == "lora_A" else out


def write(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Path:
    """Tensors by PEFT's names ("...q_proj.lora_A.weight"; "base_model.model." may be left out) as a new folder."""
    from safetensors.numpy import save_file

    arrays = {}
    ranks = set()
    modules = set()
    for name, value in tensors.items():
        found = _TENSOR.match(name)
        if found is None:
            raise ConfigError(
                f"{name!r} is not a LoRA tensor",
                remedy="names end in '.lora_A.weight' (r × in) or '.lora_B.weight' (out × r)",
            )
        array = _array(value)
        if array.ndim != 2:
            raise ConfigError(
                f"{name} has shape {array.shape}",
                remedy="lora_A is r × in, lora_B is out × r",
            )
        ranks.add(array.shape[0 if found[2] == "lora_A" else 1])
        modules.add(found[1].rpartition(".")[2])
        arrays[name if name.startswith(PREFIX) else PREFIX + name] = array
    alone = [
        n
        for n in arrays
        if n.replace("lora_A", "lora_@")
        .replace("lora_B", "lora_A")
        .replace("lora_@", "lora_B")
        not in arrays
    ]
    if not arrays or alone:
        raise ConfigError(
            f"no pair of lora_A and lora_B: {alone[:3]}",
            remedy="pass both of every module",
        )
    chosen = {
        "peft_type": "LORA",
        "bias": "none",
        "r": max(ranks),
        "target_modules": sorted(modules),
        **(config or {}),
    }
    if "lora_alpha" not in chosen:
        raise ConfigError(
            "the tensors do not define their scale",
            remedy=f"pass config={{'lora_alpha': ...}}; the scale is lora_alpha / r, and r is {max(ranks)}",
        )
    folder = Path(tempfile.mkdtemp(prefix="jvlab-adapter-"))
    save_file(arrays, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps(chosen))
    return folder


def _array(value: Any) -> np.ndarray:
    """As numpy; 16-bit floats become float32, losslessly, since safetensors' numpy API lacks bfloat16."""
    if hasattr(value, "detach"):  # torch, whose bfloat16 numpy does not know
        value = value.detach().cpu()
        value = (
            value.float().numpy()
            if value.is_floating_point() and value.element_size() == 2
            else value.numpy()
        )
    array = np.asarray(value)
    return np.ascontiguousarray(
        array.astype(np.float32) if array.dtype.itemsize == 2 else array
    )

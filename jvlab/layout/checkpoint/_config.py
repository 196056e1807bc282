"""A model's config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvlab._errors import ModelError
from jvlab._files import read_json_object
from jvlab.layout._block_formats import block_size

LONGEST_CONFIG = 20_000_000


def read_config_file(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. FileNotFoundError where there is none."""
    return read_json_object(folder / "config.json", LONGEST_CONFIG, "a model's config", ModelError)


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
    return max(int(config.get(name) or 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def unnamed_routers(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint in fp8 blocks lets vLLM take its routers, of fewer outputs than a block, for fp8 too.

    Some of vLLM's models keep their routers in 16 bits anyway (DeepSeek's), so this alone is no error.
    """
    given = config.get("quantization_config") or {}
    block, experts = block_size(config), expert_count(config)
    named = [str(n) for key in ("modules_to_not_convert", "ignored_layers") for n in given.get(key) or ()]
    routers = any(part in ("gate", "router") for name in named for part in name.split("."))
    return bool(block) and experts > 1 and experts % block[0] > 0 and not routers

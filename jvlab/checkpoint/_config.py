"""A model's config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvlab._errors import ModelError
from jvlab._files import read_json_object

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

"""Writes adapters as PEFT does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvlab.layout._tree import flatten
from jvlab.layout.rules._ruleset import Rules
from jvlab.trainer.decoder import _checkpoint
from jvlab.trainer.decoder._lora import LoraParams, LoraSpec
from jvlab.trainer.models._tiny import fresh_directory

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ONE_FILE = 1 << 62  # bytes: PEFT reads no index


def write_adapter(
    folder: str | os.PathLike[str],
    params: Mapping[str, Any],
    spec: LoraSpec,
    dtype: str,
    hf_config: Mapping[str, Any],
    base: Path,
) -> str:
    """Writes a folder that peft, transformers and vLLM load, all of it or nothing; returns its path."""
    lora = params if isinstance(params, LoraParams) else LoraParams(params, spec)
    flat, tensors = flatten(lora), lora.peft_tensors()
    bindings = Rules.parse(lora.peft_rules()).bind(flat.shapes, tensors, hf_config)
    target = Path(folder).expanduser().absolute()
    with fresh_directory(target) as fresh:
        _checkpoint.write_weights(fresh, tensors, bindings, flat.arrays.__getitem__, dtype, ONE_FILE)
        (fresh / "model.safetensors").rename(fresh / WEIGHTS)
        text = json.dumps(lora.peft_config(str(base)), indent=2)
        (fresh / CONFIG).write_text(text + "\n", encoding="utf-8")
    return str(target)

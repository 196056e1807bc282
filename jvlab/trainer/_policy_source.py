"""The checkpoint that a policy is loaded from: its folder, downloaded if need be, and what each of its tensors is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvlab._errors import CoverageError, ModelError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._builtin import policy_rules
from jvlab.trainer.decoder import _model
from jvlab.trainer.decoder._config import DecoderConfig


def bind(
    config: DecoderConfig,
    hf_config: Mapping[str, Any],
    tensors: tuple[CheckpointTensor, ...],
    dtype: str,
    source: Path,
) -> list[Binding]:
    """The rules of the Policy layout applied to this checkpoint."""
    leaves = {".".join(path): LeafShape(shape, dtype) for path, (_, shape) in _model.parameter_letters(config).items()}
    rules = policy_rules(hf_config, [t.name for t in tensors])
    try:
        return rules.bind(leaves, tensors, hf_config)
    except CoverageError as error:
        raise ModelError(
            f"{source.name} does not hold the weights its config.json describes: {error.message}",
            remedy="correct config.json, or use another checkpoint",
            path=str(source),
            problems=error.problems,
        ) from error


def local(model: str) -> Path:
    """The model's folder; for a hub id, its copy in the hub's cache, downloaded if needed."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{model!r} is not a directory, and downloading it needs huggingface_hub",
            remedy="pip install huggingface_hub, or pass a model directory",
            model=model,
        ) from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many kinds: offline, gated, no such model
        raise ModelError(
            f"{model!r} could not be fetched from the hub: {type(error).__name__}: {error}",
            remedy="check the name and the network, or pass a model directory",
            model=model,
        ) from error

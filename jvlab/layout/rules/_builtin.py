"""The Policy layout's rules for a model; the layout and its texts are in _builtin_texts.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jvlab._errors import ConfigError
from jvlab.layout.rules._builtin_texts import NOT_STACKED, POLICY
from jvlab.layout.rules._presets import with_prefix
from jvlab.layout.rules._ruleset import Rules

_NUMBERED = re.compile(r"(^|[./])layers[./_]\d")


def numbers_layers(leaves: Iterable[str]) -> bool:
    """Whether a tree with these leaves has a leaf for each layer, instead of stacked ones."""
    return any(_NUMBERED.search(leaf) for leaf in leaves)


def policy_rules(config: Mapping[str, Any], names: Iterable[str] = (), scanned: bool | None = None) -> Rules:
    """The Policy layout's rules for a model's config; the checkpoint's `names` determine its prefix.

    Hub checkpoints of one family differ in it: gpt2 with and without `transformer.`, gemma3 under `language_model.`.
    A policy's layers are stacked where `jv.Policy` trains the model, so not where some layers have experts and others
    have none; `scanned` says otherwise: False is how they were in jvlab 0.1, numbered.
    """
    family = config.get("model_type")
    if family not in POLICY:
        inner = config.get("text_config")
        inner_family = inner.get("model_type") if isinstance(inner, Mapping) else None
        if inner_family not in POLICY:
            known = ", ".join(POLICY)
            raise ConfigError(f"no Policy layout for model_type {family!r}", remedy=f"known: {known}; or write rules")
        family = inner_family
    if scanned is None:
        dense_too = bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1
        scanned = family not in NOT_STACKED and not dense_too
    rules = Rules.named(f"policy.{family}{'.scanned' if scanned else ''}")
    anchor = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(str(family), "model.")
    tail = {"gpt2": "wte.weight", "gpt_neox": "embed_in.weight"}.get(str(family), "embed_tokens.weight")
    found = next((n for n in names if n.endswith(tail)), anchor + tail)
    return with_prefix(rules, anchor, found[: -len(tail)])

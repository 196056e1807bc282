"""The Policy layout's rules for a model; the layout and its texts are in _builtin_texts.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jvlab._errors import ConfigError
from jvlab.rules._builtin_texts import NOT_STACKED, POLICY
from jvlab.rules._presets import with_prefix
from jvlab.rules._ruleset import Rules

_NUMBERED = re.compile(r"(^|[./])layers[./_]\d")


def policy_rules(config: Mapping[str, Any], names: Iterable[str] = (), leaves: Iterable[str] = ()) -> Rules:
    """The Policy layout's rules for a model's config; the checkpoint's `names` determine its prefix.

    Hub checkpoints of one family differ in it: gpt2 with and without `transformer.`, gemma3 under `language_model.`.
    A policy's layers are stacked; a tree whose `leaves` number them, as those of jvlab 0.1 do, gets rules that do too.
    """
    family = config.get("model_type")
    if family not in POLICY:
        inner = config.get("text_config")
        inner_family = inner.get("model_type") if isinstance(inner, Mapping) else None
        if inner_family not in POLICY:
            known = ", ".join(POLICY)
            raise ConfigError(f"no Policy layout for model_type {family!r}", remedy=f"known: {known}; or write rules")
        family = inner_family
    numbered = family in NOT_STACKED or any(_NUMBERED.search(leaf) for leaf in leaves)
    rules = Rules.named(f"policy.{family}{'' if numbered else '.scanned'}")
    anchor = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(str(family), "model.")
    tail = {"gpt2": "wte.weight", "gpt_neox": "embed_in.weight"}.get(str(family), "embed_tokens.weight")
    found = next((n for n in names if n.endswith(tail)), anchor + tail)
    return with_prefix(rules, anchor, found[: -len(tail)])

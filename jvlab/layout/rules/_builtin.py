"""The Policy layout's rules for a model; the layout and its texts are in _builtin_texts.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jvlab._errors import ConfigError
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._builtin_texts import BY_FAMILY, NOT_STACKED, POLICY, PRESETS
from jvlab.layout.rules._rules import Compiled, HasShape, name_for, parse_rule
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._sizes import config_lookup, convention
from jvlab.layout.rules._syntax import Name, name_text

# Named rule sets for the trees of other projects, and their adaptation to a tree and a checkpoint.
# checkpoint  a nested dict, or a flat one, with the checkpoint's own names and shapes
# hf_flax     the checkpoint's modules with Flax's parameter names
# tunix       Llama, Qwen 2 and 3, Qwen 3 MoE, Gemma 1, 2 and 3
# maxtext     Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen 3 MoE; scanned or not
# gemma       Google's Gemma 2 and 3 modules

_FOLDED = (
    "MaxText's converters divide the query by √head_dim for this family, which no rule undoes, and may order rotary "
    "pairs in another way: only values can tell"
)


def preset_rules(
    name: str,
    config: Mapping[str, Any],
    tensors: Collection[CheckpointTensor],
    leaves: Mapping[str, HasShape] | None = None,
) -> Rules:
    """A named rule set for this model's family, adapted to the prefixes of checkpoint and tree."""
    rules = Rules.named(name)
    known = config_lookup(config)
    family = str(known.get("model_type", "")).removesuffix("_text")
    if name in ("checkpoint", "hf_flax"):
        return _fit_wild(rules, name, known, {t.name: t for t in tensors}, leaves or {})
    if name not in PRESETS:
        return fit_leaves(rules, leaves or {})
    if name == "maxtext" and family.startswith("gemma"):
        raise ConfigError(
            "MaxText's Gemma holds its embedding times √hidden_size and its norms as 1 + w: no rule multiplies",
            remedy='divide the embedding before the sync, and pass rules="auto" or your own',
        )
    text = BY_FAMILY.get((name, family)) or BY_FAMILY.get((name, "llama"))
    rules = Rules.parse(text) if text else rules
    rules = _one_einsum(rules, known)
    anchor = "model."
    tail = "embed_tokens.weight"
    found = next((t.name for t in tensors if t.name.endswith(tail)), anchor + tail)
    rules = fit_leaves(with_prefix(rules, anchor, found[: -len(tail)]), leaves or {})
    if name == "maxtext" and family in ("llama", "mistral", "mixtral"):
        folded = {
            str(r): _FOLDED
            for r in rules
            if r.leaf and "query.kernel" in name_text(r.leaf)
        }
        rules = Rules(rules.rules, rules.notes, folded)
    return rules


def _one_einsum(rules: Rules, config: Mapping[str, Any]) -> Rules:
    """One leaf for query, key and value where head counts are equal, else one for the query and one for the others."""
    sizes = convention(config)
    if not sizes:
        return rules
    drop = (
        ("attn.q_einsum", "attn.kv_einsum")
        if sizes["n"] == sizes["k"]
        else ("attn.qkv_einsum",)
    )
    return Rules(
        tuple(
            r for r in rules if r.leaf and not any(d in name_text(r.leaf) for d in drop)
        )
    )


def with_prefix(rules: Rules, old: str, new: str) -> Rules:
    """The rules with another prefix on the checkpoint names that start with `old`."""
    if old == new:
        return rules

    def renamed(name: Name) -> Name:
        first = name.parts[0]
        if not isinstance(first, str) or not first.startswith(old):
            return name
        return _prefixed(replace(name, parts=(first[len(old) :], *name.parts[1:])), new)

    return Rules(
        tuple(
            parse_rule(str(replace(r, tensors=tuple(map(renamed, r.tensors)))), r.line)
            for r in rules
        )
    )


def _prefixed(name: Name, prefix: str) -> Name:
    first = name.parts[0]
    whole = (
        (prefix + first, *name.parts[1:])
        if isinstance(first, str)
        else (prefix, *name.parts)
    )
    return replace(name, parts=tuple(p for p in whole if p != ""))


def fit_leaves(rules: Rules, leaves: Iterable[str]) -> Rules:
    """The rules with the prefix of this tree's leaves, e.g. `params.params.` of a train state."""
    first = next(
        (
            r.leaf
            for r in rules
            if r.leaf and all(isinstance(p, str) for p in r.leaf.parts)
        ),
        None,
    )
    anchor = "".join(str(p) for p in first.parts) if first else ""
    prefix = (
        next(
            (leaf[: -len(anchor)] for leaf in leaves if leaf.endswith("." + anchor)), ""
        )
        if anchor
        else ""
    )
    if not prefix or anchor in leaves:
        return rules
    made = [replace(r, leaf=_prefixed(r.leaf, prefix)) if r.leaf else r for r in rules]
    return Rules(tuple(parse_rule(str(r), r.line) for r in made))


# ---------------------------------------------------------------------------------------------- the checkpoint's names


def _fit_wild(
    rules: Rules,
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, CheckpointTensor],
    leaves: Mapping[str, HasShape],
) -> Rules:
    """Rules for `{path*}` where tree and checkpoint differ by a prefix: GPT-2 with and without `transformer.`."""
    compiled = [Compiled(r) for r in rules]
    # leaf → its rule, and the tensor that it names
    bare: dict[str, tuple[Compiled, str]] = {}
    for leaf in leaves:
        for c in compiled:
            found = c.match(leaf)
            if found is not None:
                bare[leaf] = (c, name_for(c.rule.tensors[0].parts, 0, found[1]))
                break
    missing = [leaf for leaf, (_, tensor) in bare.items() if tensor not in tensors]
    drop, add = _prefixes([bare[leaf][1] for leaf in missing], tensors)
    extra: list[str] = []
    for leaf, (c, tensor) in bare.items():
        moved = add + tensor[len(drop) :] if tensor.startswith(drop) else tensor
        target = next(
            (t for t in (moved, tensor, *_shorter(tensor)) if t in tensors), None
        )
        # an output head, outside the module with the prefix
        if target not in (None, moved):
            axes = str(c.rule).partition(" : ")[2]
            extra.append(f'"{leaf}" -> "{target}"' + (f" : {axes}" if axes else ""))
    if (
        name == "hf_flax"
        and config.get("tie_word_embeddings", True)
        and "lm_head.weight" in tensors
    ):
        extra = _tied(
            extra,
            {leaf: (drop, add, tensor) for leaf, (_, tensor) in bare.items()},
            tensors,
            leaves,
        )
    fitted = [
        replace(
            r, leaf=_prefixed(r.leaf, drop), tensors=(_prefixed(r.tensors[0], add),)
        )
        for r in rules
        if r.leaf
    ]
    first = fitted if drop or add else []
    lines = [*extra, *map(str, first), *map(str, rules if drop or not add else ())]
    return Rules(tuple(parse_rule(line) for line in lines))


def _prefixes(names: Collection[str], tensors: Collection[str]) -> tuple[str, str]:
    """The prefix to drop from these names and the one to add, so that most of them are tensors."""
    tails = Counter[tuple[str, str]]()
    heads = {t[: m.end()] for t in tensors for m in re.finditer(r"\.", t)} | {""}
    for name in names:
        for rest, drop in [
            (name, ""),
            *((name[m.end() :], name[: m.end()]) for m in re.finditer(r"\.", name)),
        ]:
            for add in heads:
                if add + rest in tensors and (drop or add):
                    tails[drop, add] += 1
    return max(
        tails,
        key=lambda pair: (tails[pair], -len(pair[0]) - len(pair[1])),
        default=("", ""),
    )


def _shorter(name: str) -> list[str]:
    """The name without its first module, without its first two, …"""
    return [name[m.end() :] for m in re.finditer(r"\.", name)]


def _tied(
    lines: list[str],
    bare: Mapping[str, tuple[str, str, str]],
    tensors: Mapping[str, CheckpointTensor],
    leaves: Mapping[str, HasShape],
) -> list[str]:
    """Let the embedding also fill an output head that the checkpoint lists and the tree has no leaf for."""
    if any(tensor.endswith("lm_head.weight") for _, _, tensor in bare.values()):
        return lines
    for leaf, (drop, add, tensor) in bare.items():
        if tensor.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")):
            target = add + tensor[len(drop) :] if tensor.startswith(drop) else tensor
            if target in tensors and tuple(leaves[leaf].shape) == tuple(
                tensors["lm_head.weight"].shape
            ):
                return [*lines, f'"{leaf}" -> "{target}", lm_head.weight?']
    return lines


# ----------------------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"(^|[./])layers[./_]\d")


def numbers_layers(leaves: Iterable[str]) -> bool:
    """Whether a tree with these leaves has a leaf for each layer, instead of stacked ones."""
    return any(_NUMBERED.search(leaf) for leaf in leaves)


def policy_rules(
    config: Mapping[str, Any], names: Iterable[str] = (), scanned: bool | None = None
) -> Rules:
    """The Policy layout's rules for a model's config; the checkpoint's `names` determine its prefix.

    Hub checkpoints of one family differ in it: gpt2 with and without `transformer.`, gemma3 under `language_model.`.
    A policy's layers are stacked where `jv.Policy` trains the model, so not where some layers have experts and others
    have none; `scanned` says otherwise: False for a tree whose layers are numbered.
    """
    family = config.get("model_type")
    if family not in POLICY:
        inner = config.get("text_config")
        inner_family = inner.get("model_type") if isinstance(inner, Mapping) else None
        if inner_family not in POLICY:
            known = ", ".join(POLICY)
            raise ConfigError(
                f"no Policy layout for model_type {family!r}",
                remedy=f"known: {known}; or write rules",
            )
        family = inner_family
    if scanned is None:
        dense_too = (
            bool(config.get("mlp_only_layers"))
            or config.get("decoder_sparse_step", 1) != 1
        )
        scanned = family not in NOT_STACKED and not dense_too
    rules = Rules.named(f"policy.{family}{'.scanned' if scanned else ''}")
    anchor = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(
        str(family), "model."
    )
    tail = {"gpt2": "wte.weight", "gpt_neox": "embed_in.weight"}.get(
        str(family), "embed_tokens.weight"
    )
    found = next((n for n in names if n.endswith(tail)), anchor + tail)
    return with_prefix(rules, anchor, found[: -len(tail)])

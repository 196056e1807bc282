"""The built-in rules for a model and its tree, and the tree that rules ask for; the texts are in _builtin_texts.py."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jvlab._errors import ConfigError, LayoutError
from jvlab.layout._tree import LeafShape
from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._builtin_texts import BY_FAMILY, NOT_STACKED, POLICY, PRESETS
from jvlab.layout.rules._rules import (
    Captured,
    Compiled,
    Leaves,
    Solver,
    Tensors,
    Unfit,
    config_lookup,
    convention,
    matcher,
    name_for,
    size_of,
    terms_of,
)
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import (
    Ax,
    Index,
    Name,
    Rule,
    name_text,
    parse_rule,
    walk_axes,
    walk_names,
)

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
    leaves: Leaves | None = None,
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
    rules = _one_einsum(Rules.parse(text) if text else rules, known)
    names = [t.name for t in tensors]
    rules = _with_prefix(rules, "model.", "embed_tokens.weight", names)
    rules = fit_leaves(rules, leaves or {})
    if name == "maxtext" and family in ("llama", "mistral", "mixtral"):
        folded = {str(r): _FOLDED for r in rules if "query.kernel" in str(r)}
        rules = Rules(rules.rules, rules.notes, folded)
    return rules


def _one_einsum(rules: Rules, config: Mapping[str, Any]) -> Rules:
    """One leaf for query, key and value where head counts are equal, else one for the query and one for the others."""
    sizes = convention(config)
    if not sizes:
        return rules
    drop = ["attn.qkv_einsum"]
    if sizes["n"] == sizes["k"]:
        drop = ["attn.q_einsum", "attn.kv_einsum"]
    return Rules(r for r in rules if not any(word in str(r) for word in drop))


def _with_prefix(rules: Rules, old: str, embedding: str, names: Iterable[str]) -> Rules:
    """The rules with the prefix that the embedding has among `names`, instead of `old`, on the checkpoint's names."""
    found = next((n for n in names if n.endswith(embedding)), old + embedding)
    new = found.removesuffix(embedding)
    if old == new:
        return rules

    # a checkpoint name stands behind the arrow, or behind a comma
    begins = re.compile(rf"(-> |, ){re.escape(old)}")
    return Rules(parse_rule(begins.sub(rf"\1{new}", str(r)), r.line) for r in rules)


def fit_leaves(rules: Rules, leaves: Iterable[str]) -> Rules:
    """The rules with the prefix of this tree's leaves, e.g. `params.params.` of a train state."""
    paths = (name_text(r.leaf) for r in rules if r.leaf)
    anchor = next((path for path in paths if not set(path) & set("{[")), "")
    nested = (leaf for leaf in leaves if leaf.endswith("." + anchor))
    prefix = next(nested, "").removesuffix(anchor)
    if not anchor or anchor in leaves or not prefix:
        return rules
    return Rules(parse_rule(_prefixed(r, prefix), r.line) for r in rules)


def _prefixed(rule: Rule, leaf: str, tensor: str = "") -> str:
    """The rule's text with prefixes of the leaf and of its first tensor."""
    names = str(rule).split(" -> ", 1)
    prefixes = (leaf if rule.leaf else "", tensor)
    return " -> ".join(
        (name_text(Name((prefix,))) if prefix else "") + name
        for prefix, name in zip(prefixes, names, strict=True)
    )


# The checkpoint's names.

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")


def _fit_wild(
    rules: Rules,
    name: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    leaves: Leaves,
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
    drop, add = _prefixes([t for _, t in bare.values() if t not in tensors], tensors)

    def moved(tensor: str) -> str:
        return add + tensor[len(drop) :] if tensor.startswith(drop) else tensor

    lines: list[str] = []
    for leaf, (c, tensor) in bare.items():
        known = (moved(tensor), tensor, *(rest for _, rest in _splits(tensor)))
        target = next((t for t in known if t in tensors), None)
        # an output head, outside the module with the prefix
        if target not in (None, moved(tensor)):
            axes = str(c.rule).partition(" : ")[2]
            lines.append(f'"{leaf}" -> "{target}"' + (f" : {axes}" if axes else ""))
    head = "lm_head.weight"
    has_head = any(tensor.endswith(head) for _, tensor in bare.values())
    tied = name == "hf_flax" and config.get("tie_word_embeddings", True)
    if tied and head in tensors and not has_head:
        # the embedding also fills the output head that the checkpoint lists and the tree has no leaf for
        shape = tuple(tensors[head].shape)
        for leaf, (_, tensor) in bare.items():
            fits = moved(tensor) in tensors and tuple(leaves[leaf].shape) == shape
            if fits and tensor.endswith(_EMBEDDINGS):
                lines.append(f'"{leaf}" -> "{moved(tensor)}", {head}?')
                break
    if drop or add:
        lines += (_prefixed(rule, drop, add) for rule in rules)
    if drop or not add:
        lines += map(str, rules)
    return Rules(parse_rule(line) for line in lines)


def _splits(name: str) -> list[tuple[str, str]]:
    """The name cut behind its first module, behind its second, …"""
    return [(name[: m.end()], name[m.end() :]) for m in re.finditer(r"\.", name)]


def _prefixes(names: Collection[str], tensors: Collection[str]) -> tuple[str, str]:
    """The prefix to drop from these names and the one to add, so that most of them are tensors."""
    tails = Counter[tuple[str, str]]()
    heads = {first for t in tensors for first, _ in _splits(t)} | {""}
    for name in names:
        for drop, rest in [("", name), *_splits(name)]:
            for add in heads:
                if add + rest in tensors and (drop or add):
                    tails[drop, add] += 1
    return max(
        tails,
        key=lambda pair: (tails[pair], -len(pair[0]) - len(pair[1])),
        default=("", ""),
    )


# The Policy layout.

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
        family = config_lookup(config).get("model_type")
    if family not in POLICY:
        raise ConfigError(
            f"no Policy layout for model_type {config.get('model_type')!r}",
            remedy=f"known: {', '.join(POLICY)}; or write rules",
        )
    if scanned is None:
        dense_too = (
            bool(config.get("mlp_only_layers"))
            or config.get("decoder_sparse_step", 1) != 1
        )
        scanned = family not in NOT_STACKED and not dense_too
    rules = Rules.named(f"policy.{family}{'.scanned' if scanned else ''}")
    prefix, embedding = {
        "gpt2": ("transformer.", "wte.weight"),
        "gpt_neox": ("gpt_neox.", "embed_in.weight"),
    }.get(str(family), ("model.", "embed_tokens.weight"))
    return _with_prefix(rules, prefix, embedding, names)


# Leaf shapes that a rule set requires, derived backwards from the checkpoint's tensors.


def leaf_shapes_for(
    rules: Rules,
    tensors: Sequence[CheckpointTensor],
    config: Mapping[str, Any],
    dtype: str | None = None,
) -> dict[str, LeafShape]:
    """{leaf path: shape} such that `rules.bind` fills exactly these tensors; `dtype` None keeps the checkpoint's.

    Where several rules would fill a tensor, a rule whose leaf name suits the tensor comes first (`embedding` for a
    table, `scale` for a vector), then the order of the rules, as far as the shapes fit.
    """
    found: dict[str, _Found] = {}
    patterns = []
    for rule in rules:
        c = Compiled(rule)
        chosen = c.tensor_choice or c.leaf_choice
        for name in rule.tensors if rule.leaf else ():
            if not name.optional:
                for k in c.choices if chosen else range(1):
                    patterns.append(_Pattern(c, k, _backwards(name, k)))
    for t in tensors:
        claims: dict[str, list[tuple[_Pattern, Captured]]] = defaultdict(list)
        for p in patterns:
            captured = p.match(t.name)
            if captured is not None:
                claims[p.compiled.text].append((p, captured))
        ranked = list(claims.values())
        if len(ranked) > 1:  # a sort keeps the order of equals
            ranked.sort(key=lambda claim: not _natural(claim[0][0].compiled, t))
        _settle(ranked, t, config, found)
    out: dict[str, LeafShape] = {}
    for path, f in found.items():
        shape: list[int] = []
        for dim in f.compiled.left(f.choice):
            if dim == Ax("..."):
                shape += f.tensor.shape
            else:
                shape.append(size_of(terms_of(dim), {**f.sizes, **f.counted}))
        out[path] = LeafShape(tuple(shape), dtype or f.tensor.dtype)
    return out


@dataclass(frozen=True)
class _Pattern:
    """A checkpoint name of a rule, for one of its choices."""

    compiled: Compiled
    choice: int
    match: Callable[[str], Captured | None]

    def leaf(self, values: Captured) -> str:
        """The path of the leaf that fills a tensor of this name."""
        assert self.compiled.rule.leaf is not None
        return name_for(self.compiled.rule.leaf.parts, self.choice, values)


@dataclass
class _Found:
    """A leaf whose shape is being found: the rule, sizes from its first tensor, axes that only names enumerate."""

    compiled: Compiled
    choice: int
    tensor: CheckpointTensor
    sizes: dict[str, int]
    counted: dict[str, int] = field(default_factory=dict)


def _natural(c: Compiled, tensor: CheckpointTensor) -> bool:
    """Whether the last word of the leaf's name suits the tensor; words without a convention suit all."""
    assert c.rule.leaf is not None
    last = c.rule.leaf.parts[-1]
    word = last.rpartition(".")[2] if isinstance(last, str) else ""
    table = tensor.name.endswith((*_EMBEDDINGS, "wpe.weight"))
    fits = {
        "embedding": table,
        "scale": len(tensor.shape) == 1,
        "kernel": len(tensor.shape) > 1 and not table,
    }
    return fits.get(word, True)


def _settle(
    claims: Sequence[Sequence[tuple[_Pattern, Captured]]],
    tensor: CheckpointTensor,
    config: Mapping[str, Any],
    found: dict[str, _Found],
) -> None:
    """The first rule that fits the tensor's shape determines its leaves; `bind` reports tensors that no rule names."""
    for claim in claims:
        named = [(p.leaf(values), p, values) for p, values in claim]
        try:
            # the other tensors of a stack have the same shape; `bind` refuses them if not
            found |= {
                path: _Found(p.compiled, p.choice, tensor, _sizes(p, tensor, config))
                for path, p, _ in named
                if path not in found
            }
        except LayoutError:
            if claim is claims[-1]:
                raise
            continue
        for path, p, values in named:
            axes = {a.name for a in walk_axes(p.compiled.rule.left)}
            counted = found[path].counted
            for axis, value in values.items():
                if axis in axes and isinstance(value, int):
                    counted[axis] = max(counted.get(axis, 0), value + 1)
        return


def _sizes(
    p: _Pattern, tensor: CheckpointTensor, config: Mapping[str, Any]
) -> dict[str, int]:
    right = p.compiled.right(p.choice)
    if Ax("...") in right:
        return {}
    try:
        equations = [
            (dim, size, f"tensor {tensor.shape} dimension {d}")
            for d, (dim, size) in enumerate(zip(right, tensor.shape, strict=True))
        ]
        return Solver(p.compiled.rule, config).solve(equations)
    except (Unfit, ValueError) as e:
        raise LayoutError(
            f"tensor {tensor.name!r} {tensor.shape} does not suit the rule {p.compiled.text}: {e}",
            remedy="name the tree's own rules, or pass the parameters",
            tensor=tensor.name,
        ) from e


def _backwards(name: Name, k: int) -> Callable[[str], Captured | None]:
    """Matches a checkpoint name, as a rule otherwise matches a leaf's path."""
    holes = walk_names(name.parts, k)
    if any(isinstance(hole, Index) and hole.computed for hole in holes):
        raise LayoutError(
            "a rule with computed indices cannot be read backwards",
            remedy="pass the parameters",
        )
    return matcher(name.parts, k)

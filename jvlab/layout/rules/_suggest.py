"""Lines to copy: rules that fit a leaf which none matches, or a rule that does not fit, and what their letters mean."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._candidates import FUSED, Candidate, Pair, candidates
from jvlab.layout.rules._pairs import pair_up, total
from jvlab.layout.rules._roles import Role, Template, classify, templates
from jvlab.layout.rules._rules import HasShape
from jvlab.layout.rules._sizes import convention

_SURE = 0.85  # confidence of a pair matched by name; equal size alone is below
_ORDERS = 60  # of leaves as the parts of a fused tensor that are tried
_MEANINGS = {"n": "heads", "k": "key/value heads", "h": "head size", "g": "heads to a key/value head"}


def suggest(
    leaf: str,
    open_leaves: Collection[str],
    leaves: Mapping[str, HasShape],
    open_tensors: Collection[str],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
) -> str:
    """A line for this leaf, from the unmatched leaves and tensors; empty if nothing is certain.

    A wrong suggestion is worse than none: it would bind, to the wrong tensor.
    """
    mine, theirs = _roles_of(leaves), _roles_of(tensors)
    left = {t: r for t, r in mine.items() if set(t.members.values()) <= set(open_leaves)}
    wanted = {t: r for t, r in theirs.items() if set(t.members.values()) <= set(open_tensors)}
    for pair in pair_up(left, wanted, config).pairs:
        if pair.confidence < _SURE or not any(leaf in t.members.values() for t in pair.leaves):
            continue
        lines = [c.line for c in candidates(pair, config, False, False)]
        return lines[0] if len(lines) == 1 else ""
    return ""


def fitting(
    leaf: str,
    tensor: str,
    leaves: Mapping[str, HasShape],
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
) -> list[str]:
    """Every line that takes this leaf to this tensor, whose own rule does not fit."""
    theirs = _roles_of(tensors)
    mine = next((t for t in _roles_of(leaves) if leaf in t.members.values()), None)
    into = next((t for t in theirs if tensor in t.members.values()), None)
    if mine is None or into is None:
        return []
    pair = Pair((mine,), (into,), theirs[into], "", 0.0)
    return [c.line for c in candidates(pair, config, is_conv1d(tensors), False)]


def nearest(name: str, known: Mapping[str, Any], among: Iterable[str] | None = None) -> str:
    """The name most like one that is not there, with numbers as `{i}`; empty if none is. `among`: see `templates`."""
    found = templates({n: tuple(x.shape) for n, x in known.items()}, among)
    plain = {re.sub(r"\{\w+\}", "0", text): text for text in map(str, found)}
    wanted = re.sub(r"\{[^}]*\}|\d+", "0", name)
    return next((plain[near] for near in difflib.get_close_matches(wanted, plain, 1, 0.6)), "")


def legend(lines: Iterable[str], config: Mapping[str, Any] | None) -> str:
    """What the letters in these lines stand for, with their sizes in this model."""
    axes = [line.partition(" : ")[2] for line in lines]
    letters = set(re.findall(r"[A-Za-z_]\w*", " ".join(axes)))
    sizes = convention(config)
    known = [f"{a}={sizes[a]} {_MEANINGS[a]}" for a in _MEANINGS if a in letters and a in sizes]
    parts = [f"{', '.join(known)} (of config.json)"] if known else []
    if any("{i}" in line for line in lines):
        parts.append("i the layer")
    if any("{e}" in line for line in lines):
        parts.append("e the expert")
    out = f"in these lines: {', '.join([*parts, 'any other letter' if parts else 'a letter'])} an axis of any size"
    if any("(" in a for a in axes):
        out += "; `(a b)` is one dimension, b running fastest"
    if any("[" in a for a in axes):
        out += "; `[a|b]` are parts side by side, in the order of the names in brackets (exchange those for another)"
    return out


def _roles_of(named: Mapping[str, Any]) -> dict[Template, Role]:
    return classify(templates({n: tuple(x.shape) for n, x in named.items()}))


def is_conv1d(tensors: Mapping[str, HasShape]) -> bool:
    """Are the checkpoint's matrices in × out, as GPT-2's Conv1D stores them?"""
    fused = [t.shape for name, t in tensors.items() if "c_attn" in name]
    return any(len(shape) == 2 and shape[0] * 3 == shape[1] for shape in fused)


def roles_among(some: Mapping[str, HasShape], all_of_them: Mapping[str, HasShape]) -> dict[Template, Role]:
    """The roles of some names. All of them are read: what a norm is depends on which others a layer has."""
    roles = _roles_of(all_of_them)
    if len(some) == len(all_of_them):
        return roles
    known = {(t.pieces, t.kinds): role for t, role in roles.items()}
    found = templates({n: tuple(x.shape) for n, x in some.items()}, all_of_them)
    return {t: known[t.pieces, t.kinds] for t in found}


# ---------------------------------------------------------------------------------------------------- open leaves


Offer = tuple[Pair, Candidate]


def lines_for_leaf(
    leaf: Template, role: Role, tensors: Mapping[Template, Role], config: Mapping[str, Any] | None, conv1d: bool
) -> list[Offer]:
    """Every line from a leaf to one of these tensors, or to several that it holds the parts of.

    Those that its name speaks against only if there is no other.
    """
    pairs = [Pair((leaf,), (t,), r, "", 0.0) for t, r in tensors.items() if total(t) == total(leaf)]
    pairs += [p for p in _fused_pairs(leaf, tensors) if sum(map(total, p.tensors)) == total(leaf)]
    pairs.sort(key=lambda p: p.role.bias != role.bias)  # a leaf called `bias` is one, mostly
    fits = [p for p in pairs if "?" in (role.base, p.role.base) or role.base == p.role.base]
    for some in (fits, [p for p in pairs if p not in fits]):
        found = [(p, c) for p in some for c in candidates(p, config, conv1d, False)]
        if found:
            return found
    return []


def _fused_pairs(leaf: Template, tensors: Mapping[Template, Role]) -> Iterator[Pair]:
    for base, parts in FUSED.items():
        for role in dict.fromkeys(replace(r, base=base) for r in tensors.values()):
            pieces = [[t for t, r in tensors.items() if r == replace(role, base=p)] for p in parts]
            if all(len(p) == 1 for p in pieces):
                yield Pair((leaf,), tuple(p[0] for p in pieces), role, "", 0.0)


def lines_for_parts(
    tensor: Template, role: Role, leaves: Mapping[Template, Role], config: Mapping[str, Any] | None, conv1d: bool
) -> list[Offer]:
    """Every line from several leaves to a fused tensor that they are the parts of."""
    if role.base not in FUSED:
        return []
    known = convention(config)
    heads = [known.get("n", 1), known.get("k", 1), known.get("k", 1)]
    shares = heads if role.base == "qkv" else [1] * len(FUSED[role.base])
    sizes = [total(tensor) * share / sum(shares) for share in shares]
    groups: dict[tuple[Any, ...], list[Template]] = {}
    for leaf, own in leaves.items():
        if total(leaf) in sizes:
            word = leaf.pieces[-1].rpartition(".")[2]
            groups.setdefault((own.bias, len(leaf.shape), leaf.kinds, word), []).append(leaf)
    out: list[Offer] = []
    # first the leaves that are just as many as the parts, of the kind that the tensor is
    for _, members in sorted(groups.items(), key=lambda g: (len(g[1]) != len(sizes), g[0][0] != role.bias)):
        orders = (o for o in itertools.permutations(members, len(sizes)) if [*map(total, o)] == sizes)
        for order in itertools.islice(orders, _ORDERS):
            pair = Pair(order, (tensor,), role, "", 0.0)
            out += [(pair, c) for c in candidates(pair, config, conv1d, False)]
    return out


def shown(found: Sequence[Candidate], most: int) -> list[str]:
    """Lines of a message, to copy."""
    lines = [f"    {c.line}" + (f"   # {c.how}" if c.how else "") for c in found[:most]]
    if len(found) > most:
        lines.append(f"    … and {len(found) - most} more (error.fields['candidates'])")
    return lines

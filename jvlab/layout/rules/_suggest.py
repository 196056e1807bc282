"""Lines to copy: rules that fit a leaf which none matches, or a rule that does not fit, and what their letters mean."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jvlab.layout._types import CheckpointTensor
from jvlab.layout.rules._candidates import FUSED, Candidate, Pair, candidates
from jvlab.layout.rules._roles import (
    Role,
    Template,
    classify,
    identity,
    templates,
    words,
)
from jvlab.layout.rules._rules import HasShape
from jvlab.layout.rules._sizes import config_lookup, convention

# Pairs leaves with checkpoint tensors: by name, by role, by the parts of a fused one, by elimination.

_NEAR = 0.2  # how much more similar the best name must be than the next one


@dataclass
class Pairing:
    """The pairs found, and what is unpaired on either side, with its candidates."""

    pairs: list[Pair] = field(default_factory=list)
    open_leaves: dict[Template, list[Template]] = field(default_factory=dict)
    open_tensors: list[Template] = field(default_factory=list)


def pair_up(
    leaf_roles: Mapping[Template, Role],
    tensor_roles: Mapping[Template, Role],
    config: Mapping[str, Any] | None,
) -> Pairing:
    """Pairs templates of both sides; what names and shapes leave ambiguous stays unpaired."""
    work = _Work(dict(leaf_roles), dict(tensor_roles))
    work.by_name()
    work.by_role()
    work.by_parts()
    work.norms_by_zone()
    work.left_over()
    work.tie(config)
    return Pairing(
        work.pairs, {t: work.options(t) for t in work.leaves}, list(work.tensors)
    )


@dataclass
class _Work:
    leaves: dict[Template, Role]
    tensors: dict[Template, Role]
    pairs: list[Pair] = field(default_factory=list)

    def take(
        self,
        leaves: Sequence[Template],
        tensors: Sequence[Template],
        role: Role,
        why: str,
        confidence: float,
    ) -> None:
        self.pairs.append(Pair(tuple(leaves), tuple(tensors), role, why, confidence))
        for t in leaves:
            del self.leaves[t]
        for t in tensors:
            del self.tensors[t]

    def by_name(self) -> None:
        """The checkpoint's own name, except for the parameter word."""
        theirs = defaultdict(list)
        for tensor in self.tensors:
            theirs[identity(tensor)].append(tensor)
        mine = defaultdict(list)
        for leaf in self.leaves:
            mine[identity(leaf)].append(leaf)
        for key, leaves in mine.items():
            if len(leaves) == len(theirs[key]) == 1:
                tensor = theirs[key][0]
                role = self.tensors[tensor]
                suffix = "" if role.base == "?" else f", {role}"
                self.take(leaves, [tensor], role, f"the same name{suffix}", 0.95)

    def by_role(self) -> None:
        for loose in (False, True):
            # a second pass without `expert`: a leaf may hold experts though its name does not say so
            mine, theirs = (_index(side, loose) for side in (self.leaves, self.tensors))
            for role, tensors in theirs.items():
                leaves = mine.get(role, [])
                if role.base == "?" or not leaves:
                    continue
                for leaf, tensor in _same_places(leaves, tensors):
                    real = self.tensors[tensor]
                    self.take(
                        [leaf],
                        [tensor],
                        real,
                        f"both names say {real}",
                        0.95 if not loose else 0.85,
                    )

    def by_parts(self) -> None:
        for base, parts in FUSED.items():
            for role in {
                replace(r, base=base)
                for r in (*self.leaves.values(), *self.tensors.values())
            }:
                for fused, apart in (
                    (self.leaves, self.tensors),
                    (self.tensors, self.leaves),
                ):
                    whole = [t for t, r in fused.items() if r == role]
                    pieces = [
                        [t for t, r in apart.items() if r == replace(role, base=p)]
                        for p in parts
                    ]
                    if len(whole) != 1 or any(len(p) != 1 for p in pieces):
                        continue
                    listed = [p[0] for p in pieces]
                    if fused is self.leaves:
                        self.take(
                            whole,
                            listed,
                            role,
                            f"the leaf is {role}, the checkpoint has the parts",
                            0.9,
                        )
                    else:
                        self.take(
                            listed,
                            whole,
                            role,
                            f"the checkpoint has {role}, the leaves are its parts",
                            0.9,
                        )

    def norms_by_zone(self) -> None:
        """`attn_norm`, neither before nor after by name: the only norm around attention on the other side."""
        for zone in ("attn", "mlp"):
            around = (f"norm.{zone}", f"norm.pre_{zone}", f"norm.post_{zone}")
            for bias in (False, True):
                mine, theirs = (
                    [t for t, r in side.items() if r.base in around and r.bias == bias]
                    for side in (self.leaves, self.tensors)
                )
                if (
                    len(mine) == len(theirs) == 1
                    and self.leaves[mine[0]].base == f"norm.{zone}"
                ):
                    role = self.tensors[theirs[0]]
                    self.take(
                        mine,
                        theirs,
                        role,
                        f"the only norm around the {zone} on both sides, {role}",
                        0.9,
                    )

    def left_over(self) -> None:
        """The rest: a leaf and a tensor that fit only each other, or whose names are by far the most similar."""
        for by_name in (False, True, False):
            for leaf in list(self.leaves):
                options = self.options(leaf)
                if not options:
                    continue
                best = (
                    _nearest(leaf, options)
                    if by_name
                    else options[0]
                    if len(options) == 1
                    else None
                )
                if best is None:
                    continue
                rivals = [x for x in self.leaves if best in self.options(x)]
                mutual = _nearest(best, rivals) is leaf if by_name else rivals == [leaf]
                if mutual:
                    why = (
                        "the names are nearest to each other"
                        if by_name
                        else "the only ones left that fit each other"
                    )
                    self.take(
                        [leaf], [best], self.tensors[best], why, 0.6 if by_name else 0.7
                    )

    def options(self, leaf: Template) -> list[Template]:
        """The unpaired tensors that match this leaf's number of elements and role."""
        role = self.leaves.get(leaf)
        size = total(leaf)
        out = []
        for tensor, other in self.tensors.items():
            clash = (
                role is not None
                and "?" not in (role.base, other.base)
                and role.base != other.base
            )
            if total(tensor) == size and not clash:
                out.append(tensor)
        return out

    def tie(self, config: Mapping[str, Any] | None) -> None:
        """An output head of the checkpoint without a leaf, where the config ties it to the embedding."""
        heads = [t for t, r in self.tensors.items() if r.base == "head" and not r.bias]
        at = [j for j, p in enumerate(self.pairs) if p.role.base == "embed"]
        if (
            config_lookup(config).get("tie_word_embeddings")
            and len(heads) == 1
            and len(at) == 1
        ):
            pair = self.pairs[at[0]]
            if heads[0].shape == pair.tensors[0].shape:
                why = pair.why + "; the config ties the output head to it"
                self.pairs[at[0]] = replace(pair, tied=(heads[0],), why=why)
                del self.tensors[heads[0]]


def _index(roles: Mapping[Template, Role], loose: bool) -> dict[Role, list[Template]]:
    out: dict[Role, list[Template]] = defaultdict(list)
    for template, role in roles.items():
        out[replace(role, expert=False) if loose else role].append(template)
    return out


def _same_places(
    leaves: Sequence[Template], tensors: Sequence[Template]
) -> list[tuple[Template, Template]]:
    """One to one; where a role occurs several times, by equal layer numbers (dense layers beside sparse ones)."""
    if len(leaves) == len(tensors) == 1:
        return [(leaves[0], tensors[0])]
    out = []
    for tensor in tensors:
        same = [t for t in leaves if _places(t) == _places(tensor)]
        rivals = [t for t in tensors if _places(t) == _places(tensor)]
        if len(same) == 1 and len(rivals) == 1:
            out.append((same[0], tensor))
    return out


def _places(template: Template) -> tuple[frozenset[int], ...]:
    return tuple(template.values(s) for s in range(len(template.kinds)))


def total(template: Template) -> int:
    """The elements of all members."""
    return int(np.prod(template.shape, dtype=np.int64)) * len(template.members)


def _nearest(one: Template, others: Sequence[Template]) -> Template | None:
    """The template whose name shares clearly more words than any other, if there is one."""

    def tokens(t: Template) -> set[str]:
        return {
            w
            for segment in words(".".join(p.strip("./") for p in t.pieces))
            for w in segment
        }

    mine = tokens(one)
    scored = sorted(
        (
            (len(mine & tokens(t)) / len(mine | tokens(t)), j)
            for j, t in enumerate(others)
        ),
        reverse=True,
    )
    if (
        not scored
        or scored[0][0] == 0
        or (len(scored) > 1 and scored[0][0] - scored[1][0] < _NEAR)
    ):
        return None
    return others[scored[0][1]]


# ----------------------------------------------------------------------------------------------------

_SURE = 0.85  # confidence of a pair matched by name; equal size alone is below
_ORDERS = 60  # of leaves as the parts of a fused tensor that are tried
_MEANINGS = {
    "n": "heads",
    "k": "key/value heads",
    "h": "head size",
    "g": "heads to a key/value head",
}


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
    mine = _roles_of(leaves)
    theirs = _roles_of(tensors)
    left = {
        t: r for t, r in mine.items() if set(t.members.values()) <= set(open_leaves)
    }
    wanted = {
        t: r for t, r in theirs.items() if set(t.members.values()) <= set(open_tensors)
    }
    for pair in pair_up(left, wanted, config).pairs:
        if pair.confidence < _SURE or not any(
            leaf in t.members.values() for t in pair.leaves
        ):
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


def nearest(
    name: str, known: Mapping[str, Any], among: Iterable[str] | None = None
) -> str:
    """The name most like one that is not there, with numbers as `{i}`; empty if none is. `among`: see `templates`."""
    found = templates({n: tuple(x.shape) for n, x in known.items()}, among)
    plain = {re.sub(r"\{\w+\}", "0", text): text for text in map(str, found)}
    wanted = re.sub(r"\{[^}]*\}|\d+", "0", name)
    return next(
        (plain[near] for near in difflib.get_close_matches(wanted, plain, 1, 0.6)), ""
    )


def legend(lines: Iterable[str], config: Mapping[str, Any] | None) -> str:
    """What the letters in these lines stand for, with their sizes in this model."""
    axes = [line.partition(" : ")[2] for line in lines]
    letters = set(re.findall(r"[A-Za-z_]\w*", " ".join(axes)))
    sizes = convention(config)
    known = [
        f"{a}={sizes[a]} {_MEANINGS[a]}"
        for a in _MEANINGS
        if a in letters and a in sizes
    ]
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


def roles_among(
    some: Mapping[str, HasShape], all_of_them: Mapping[str, HasShape]
) -> dict[Template, Role]:
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
    leaf: Template,
    role: Role,
    tensors: Mapping[Template, Role],
    config: Mapping[str, Any] | None,
    conv1d: bool,
) -> list[Offer]:
    """Every line from a leaf to one of these tensors, or to several that it holds the parts of.

    Those that its name speaks against only if there is no other.
    """
    pairs = [
        Pair((leaf,), (t,), r, "", 0.0)
        for t, r in tensors.items()
        if total(t) == total(leaf)
    ]
    pairs += [
        p
        for p in _fused_pairs(leaf, tensors)
        if sum(map(total, p.tensors)) == total(leaf)
    ]
    # a leaf called `bias` is one, mostly
    pairs.sort(key=lambda p: p.role.bias != role.bias)
    fits = [
        p for p in pairs if "?" in (role.base, p.role.base) or role.base == p.role.base
    ]
    for some in (fits, [p for p in pairs if p not in fits]):
        found = [(p, c) for p in some for c in candidates(p, config, conv1d, False)]
        if found:
            return found
    return []


def _fused_pairs(leaf: Template, tensors: Mapping[Template, Role]) -> Iterator[Pair]:
    for base, parts in FUSED.items():
        for role in dict.fromkeys(replace(r, base=base) for r in tensors.values()):
            pieces = [
                [t for t, r in tensors.items() if r == replace(role, base=p)]
                for p in parts
            ]
            if all(len(p) == 1 for p in pieces):
                yield Pair((leaf,), tuple(p[0] for p in pieces), role, "", 0.0)


def lines_for_parts(
    tensor: Template,
    role: Role,
    leaves: Mapping[Template, Role],
    config: Mapping[str, Any] | None,
    conv1d: bool,
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
            groups.setdefault((own.bias, len(leaf.shape), leaf.kinds, word), []).append(
                leaf
            )
    out: list[Offer] = []
    # first the leaves that are just as many as the parts, of the kind that the tensor is
    for _, members in sorted(
        groups.items(), key=lambda g: (len(g[1]) != len(sizes), g[0][0] != role.bias)
    ):
        orders = (
            o
            for o in itertools.permutations(members, len(sizes))
            if [*map(total, o)] == sizes
        )
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

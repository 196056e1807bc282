"""Which leaf fills which tensor, and every rule line that fits the two.

pair_up       leaves and tensors that belong together: by name, by role, as parts of a fused one, by elimination
candidates    every line that fits a pair's shapes; several mean that shapes alone are ambiguous
suggest, …    lines to copy, for a leaf that no rule matches or a rule that does not fit
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jvlab.layout.rules._roles import Role, Template, classify, identity, templates
from jvlab.layout.rules._rules import (
    Compiled,
    Config,
    Leaves,
    Tensors,
    Unfit,
    config_lookup,
    convention,
)
from jvlab.layout.rules._syntax import Index, Name, Rule, name_text, parse_rule

FUSED = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}
_LINEAR = {  # role → axes of the output, axes of the input
    "q": ("n h", "d"),
    "k": ("k h", "d"),
    "v": ("k h", "d"),
    "o": ("d", "n h"),
    "gate": ("f", "d"),
    "up": ("f", "d"),
    "down": ("d", "f"),
    "router": ("x", "d"),
    "head": ("v", "d"),
    "embed": ("v", "d"),
    "pos": ("p", "d"),
}
TABLES = ("embed", "pos")  # looked up by row, not multiplied


@dataclass(frozen=True)
class Pair:
    """Leaf templates and tensor templates that belong together: one each, or the parts of a fused one."""

    leaves: tuple[Template, ...]
    tensors: tuple[Template, ...]
    role: Role
    why: str = ""
    confidence: float = 0.0
    tied: tuple[Template, ...] = ()  # further tensors with the same values

    @property
    def leaf(self) -> str:
        return " + ".join(str(t) for t in self.leaves)

    @property
    def shapes(self) -> str:
        return f"{self.leaves[0].shape} → {self.tensors[0].shape}"


# Pairs leaves with checkpoint tensors.

_NEAR = 0.2  # how much more similar the best name must be than the next one


def pair_up(
    leaf_roles: Mapping[Template, Role],
    tensor_roles: Mapping[Template, Role],
    config: Config,
) -> Pairing:
    """Pairs templates of both sides; what names and shapes leave ambiguous stays unpaired."""
    work = Pairing(dict(leaf_roles), dict(tensor_roles))
    work.by_name()
    work.by_role()
    work.by_parts()
    work.norms_by_zone()
    work.left_over()
    work.tie(config)
    return work


@dataclass
class Pairing:
    """The pairs found, and what is unpaired on either side."""

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
        theirs = _grouped(self.tensors, identity)
        for key, leaves in _grouped(self.leaves, identity).items():
            tensors = theirs.get(key, [])
            if len(leaves) == len(tensors) == 1:
                role = self.tensors[tensors[0]]
                suffix = "" if role.base == "?" else f", {role}"
                self.take(leaves, tensors, role, f"the same name{suffix}", 0.95)

    def by_role(self) -> None:
        for loose in (False, True):
            # a second pass without `expert`: a leaf may hold experts though its name does not say so
            mine = _by_role(self.leaves, loose)
            confidence = 0.85 if loose else 0.95
            for role, tensors in _by_role(self.tensors, loose).items():
                if role.base == "?":
                    continue
                for leaf, tensor in _same_places(mine.get(role, []), tensors):
                    real = self.tensors[tensor]
                    why = f"both names say {real}"
                    self.take([leaf], [tensor], real, why, confidence)

    def by_parts(self) -> None:
        for role in _fused_roles([*self.leaves.values(), *self.tensors.values()]):
            leaf, tensor = (
                [t for t, r in side.items() if r == role]
                for side in (self.leaves, self.tensors)
            )
            if len(leaf) == 1 and (parts := _parts(role, self.tensors)):
                why = f"the leaf is {role}, the checkpoint has the parts"
                self.take(leaf, parts, role, why, 0.9)
            if len(tensor) == 1 and (parts := _parts(role, self.leaves)):
                why = f"the checkpoint has {role}, the leaves are its parts"
                self.take(parts, tensor, role, why, 0.9)

    def norms_by_zone(self) -> None:
        """`attn_norm`, neither before nor after by name: the only norm around attention on the other side."""
        for zone in ("attn", "mlp"):
            around = (f"norm.{zone}", f"norm.pre_{zone}", f"norm.post_{zone}")
            for bias in (False, True):
                mine, theirs = (
                    [t for t, r in side.items() if r.base in around and r.bias == bias]
                    for side in (self.leaves, self.tensors)
                )
                if len(mine) != 1 or len(theirs) != 1:
                    continue
                if self.leaves[mine[0]].base == f"norm.{zone}":
                    role = self.tensors[theirs[0]]
                    why = f"the only norm around the {zone} on both sides, {role}"
                    self.take(mine, theirs, role, why, 0.9)

    def left_over(self) -> None:
        """The rest: a leaf and a tensor that fit only each other, or whose names are by far the most similar."""
        for by_name in (False, True, False):
            for leaf in list(self.leaves):
                options = self.options(leaf)
                best = _nearest(leaf, options) if by_name else _only(options)
                if best is None:
                    continue
                rivals = [x for x in self.leaves if best in self.options(x)]
                mutual = _nearest(best, rivals) if by_name else _only(rivals)
                if mutual is not leaf:
                    continue
                why = "the only ones left that fit each other"
                if by_name:
                    why = "the names are nearest to each other"
                confidence = 0.6 if by_name else 0.7
                self.take([leaf], [best], self.tensors[best], why, confidence)

    def options(self, leaf: Template) -> list[Template]:
        """The unpaired tensors that match this leaf's number of elements and role."""
        role = self.leaves[leaf]
        return [
            tensor
            for tensor, other in self.tensors.items()
            if tensor.elements == leaf.elements and may_be(role, other)
        ]

    def tie(self, config: Config) -> None:
        """An output head of the checkpoint without a leaf, where the config ties it to the embedding."""
        if not config_lookup(config).get("tie_word_embeddings"):
            return
        heads = [t for t, r in self.tensors.items() if r.base == "head" and not r.bias]
        at = [j for j, p in enumerate(self.pairs) if p.role.base == "embed"]
        if len(heads) != 1 or len(at) != 1:
            return
        pair = self.pairs[at[0]]
        if heads[0].shape == pair.tensors[0].shape:
            why = pair.why + "; the config ties the output head to it"
            self.pairs[at[0]] = replace(pair, tied=(heads[0],), why=why)
            del self.tensors[heads[0]]


def may_be(role: Role, other: Role) -> bool:
    """Whether nothing in two names speaks against one being the other."""
    return "?" in (role.base, other.base) or role.base == other.base


def _only(found: Sequence[Template]) -> Template | None:
    return found[0] if len(found) == 1 else None


def _fused_roles(roles: Iterable[Role]) -> Iterable[Role]:
    """Every role that some of these could be the parts of."""
    listed = list(roles)
    return dict.fromkeys(replace(r, base=base) for base in FUSED for r in listed)


def _parts(role: Role, roles: Mapping[Template, Role]) -> list[Template]:
    """The parts of a fused role, in order; none if one of them is not there exactly once."""
    out = []
    for base in FUSED[role.base]:
        found = [t for t, r in roles.items() if r == replace(role, base=base)]
        if len(found) != 1:
            return []
        out += found
    return out


def _grouped(
    items: Iterable[Template], key: Callable[[Template], Any]
) -> dict[Any, list[Template]]:
    out: dict[Any, list[Template]] = defaultdict(list)
    for item in items:
        out[key(item)].append(item)
    return out


def _by_role(roles: Mapping[Template, Role], loose: bool) -> dict[Role, list[Template]]:
    return _grouped(
        roles, lambda t: replace(roles[t], expert=False) if loose else roles[t]
    )


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


def _nearest(one: Template, others: Sequence[Template]) -> Template | None:
    """The template whose name shares clearly more words than any other, if there is one."""
    mine = one.words
    shared = [len(mine & other.words) / len(mine | other.words) for other in others]
    ranked = sorted(shared, reverse=True)
    if not ranked or not ranked[0]:
        return None
    if len(ranked) > 1 and ranked[0] - ranked[1] < _NEAR:
        return None
    return others[shared.index(ranked[0])]


# Every way that a leaf can map to a checkpoint tensor of a known role, as rule lines.


@dataclass(frozen=True)
class Candidate:
    """One possible rule: its line, and what each dimension of the leaf is (stacked, input, output, heads)."""

    line: str
    rule: Rule
    signature: tuple[str, ...]
    how: str
    map: object  # equal for lines that are equivalent for these shapes
    probe_only: bool = False  # chosen only if values confirm it

    @property
    def order(self) -> str:
        """in × out, out × in, or neither."""
        places = {
            s: [j for j, x in enumerate(self.signature) if x[0] == s] for s in "io"
        }
        if not places["i"] or not places["o"]:
            return ""
        if max(places["i"]) < min(places["o"]):
            return "in × out"
        return "out × in" if max(places["o"]) < min(places["i"]) else "mixed"

    @property
    def heads(self) -> str:
        """Do heads come before head_dim?"""
        kinds = [x[1:] for x in self.signature]
        if "N" not in kinds or "H" not in kinds:
            return ""
        return "n h" if kinds.index("N") < kinds.index("H") else "h n"

    @property
    def stack(self) -> str:
        """Which dimension the layers are stacked on."""
        return next(
            (str(j) for j, x in enumerate(self.signature) if x in ("si", "ss")), ""
        )


@dataclass(frozen=True)
class _Layout:
    """Atoms of the leaf, each with its kind, and the output text on the tensor's side."""

    atoms: tuple[tuple[str, str], ...]
    out: str
    how: str = ""
    probe_only: bool = False
    tail: str = ""
    into: str = ""


def candidates(
    pair: Pair, config: Config, conv1d: bool, probing: bool
) -> list[Candidate]:
    """Every rule line that fits the shapes of this pair; several mean that shapes alone are ambiguous.

    Three choices are independent, so every combination is written as a line and tried:

        names      which numbers of the tensor's name are captured, and which are axes of a stacked leaf (`_slots`)
        layout     how heads and fused parts are split into the leaf's axes, its "atoms" (`_layouts`)
        order      every order of stacked axes, atoms and dimensions of size one over the leaf's dimensions

    A line fits if the solver finds sizes for all axes of both shapes (`_fits`). Lines that solve to the same index map
    are one candidate, of which the shortest line is kept: without heads in the config's sense `(n h)` and `d` are one.

    Example: q_proj [64, 32], leaf [32, 4, 16], of a model with n=4 heads of size h=16. Layouts of a query are
    `(n h) d`, `n h d` and `k g h d`; only the second has three atoms. Of its 6 orders, `d n h` alone makes d=32, n=4
    and h=16: one candidate. Were the leaf [64, 64] for a tensor [64, 64], `(n h) d` and `d (n h)` would both fit: two.
    """
    out = _enumerate(pair, config, conv1d, list(_layouts(pair, config, probing)))
    if not out and len(pair.leaves) == len(pair.tensors) == 1:
        # heads that are not n · h (e.g. latent attention): the tensor's own dimensions
        own = replace(pair, role=replace(pair.role, base="?"))
        plain = list(_plain_layouts(own, config, probing))
        out = _enumerate(own, config, conv1d, plain)
    return sorted(out.values(), key=lambda c: (c.probe_only, c.line))


def _enumerate(
    pair: Pair, config: Config, conv1d: bool, layouts: Sequence[_Layout]
) -> dict[object, Candidate]:
    """Index map → the candidate with the shortest line for it."""
    out: dict[object, Candidate] = {}
    shape = pair.leaves[0].shape
    for names, stacks in _slots(pair):
        for layout in layouts:
            atoms = [*((v, "s" + v) for v in stacks), *layout.atoms]
            # dimensions that no atom is for must have size one
            spare = len(shape) - len(atoms)
            if not 0 <= spare <= shape.count(1):
                continue
            right = _right(pair, layout, conv1d)
            for order in set(itertools.permutations([*atoms, *[("1", "1")] * spare])):
                left = " ".join(atom for atom, _ in order)
                line = f"{names} : {_plain_heads(left, right)}{layout.tail}"
                rule = parse_rule(line)
                solved = _fits(rule, pair, config)
                if solved is None:
                    continue
                found = Candidate(
                    line,
                    rule,
                    tuple(kind for _, kind in order),
                    layout.how,
                    (names, solved, layout.tail),
                    layout.probe_only,
                )
                if found.map not in out or len(out[found.map].line) > len(line):
                    out[found.map] = found
    return out


def _plain_heads(left: str, right: str) -> str:
    """`[k g h|k h|k h]` is `[n h|k h|k h]` where no group is split off."""
    both = f"{left} -> {right}"
    return both if "[g|" in both else both.replace("[k g", "[n")


def _fits(rule: Rule, pair: Pair, config: Config) -> object | None:
    """The solved index maps of a rule for the pair's shapes; None if it does not fit."""
    compiled = Compiled(rule)
    leaves = {k: t.shape for k, t in enumerate(pair.leaves)}
    if not compiled.leaf_choice:
        leaves = dict.fromkeys(compiled.choices, pair.leaves[0].shape)
    tensors = {k: t.shape for k, t in enumerate(pair.tensors)}
    if not compiled.tensor_choice:
        tensors = dict.fromkeys(compiled.choices, pair.tensors[0].shape)
    first = pair.tensors[0]
    counts = {v: len(first.values(j)) for j, v in enumerate(first.variables())}
    solved = compiled.solve(leaves, tensors, config)
    for one in solved:
        if isinstance(one, Unfit):
            return None
        # a stack has as many slices as there are numbers in the tensors' names
        if any(counts.get(axis, size) != size for axis, _, _, size in one.stacked):
            return None
    return tuple(solved)


# Names and slots.


def _slots(pair: Pair) -> Iterator[tuple[str, list[str]]]:
    """The names of a rule, and the tensor's slots that must be axes of the leaf."""
    leaf = pair.leaves[0]
    tensor = pair.tensors[0]
    if (
        len({t.kinds for t in pair.leaves}) > 1
        or len({t.kinds for t in pair.tensors}) > 1
    ):
        return
    variables = tensor.variables()
    free = dict(enumerate(variables))
    bound: dict[int, str] = {}
    for slot, kind in enumerate(leaf.kinds):
        for j in free:
            if tensor.kinds[j] == kind and tensor.values(j) == leaf.values(slot):
                bound[slot] = free.pop(j)
                break
    tied = [t.name(t.variables()) for t in pair.tied]
    rest = [s for s in range(len(leaf.kinds)) if s not in bound]
    if not rest:
        targets = [t.name(variables) for t in pair.tensors]
        for j, variable in free.items():
            numbers = sorted(tensor.values(j))
            if numbers != list(range(numbers[0], numbers[-1] + 1)):
                return  # a stack cannot skip layers
            hole = Index(((1, variable),), numbers[0])
            targets = [t.with_part(replace(hole, const=0), hole) for t in targets]
        names = [_joined(targets), *(name_text(t) for t in tied)]
        leaf_name = _joined(
            [t.name([bound[s] for s in range(len(leaf.kinds))]) for t in pair.leaves]
        )
        yield f"{leaf_name} -> {', '.join(names)}", list(free.values())
        return
    # a scan over groups of layers: leaf block j, stack step s, layer J·s + j (or S·j + s)
    layer = [j for j in free if tensor.kinds[j] == "layer"]
    if len(rest) != 1 or len(layer) != 1 or tied:
        return
    groups = len(leaf.values(rest[0]))
    count = len(tensor.values(layer[0]))
    if count % groups or leaf.values(rest[0]) != frozenset(range(groups)):
        return
    holes = {
        Index(((groups, "s"), (1, "j"))),
        Index(((1, "s"), (count // groups, "j"))),
    }
    leaf_vars = [bound.get(s, "j") for s in range(len(leaf.kinds))]
    for hole in sorted(holes, key=lambda h: h.terms):
        plain = Index(((1, variables[layer[0]]),))
        names = [t.name(variables).with_part(plain, hole) for t in pair.tensors]
        leaf_name = _joined([t.name(leaf_vars) for t in pair.leaves])
        yield (
            f"{leaf_name} -> {_joined(names)}",
            ["s", *(v for j, v in free.items() if j != layer[0])],
        )


def _joined(names: Sequence[Name]) -> str:
    """Several names as one with choices: the segments in which they differ."""
    texts = [name_text(n) for n in names]
    if len(texts) == 1:
        return texts[0]
    rows = [t.split(".") for t in texts]
    if len({len(r) for r in rows}) > 1 or any('"' in t for t in texts):
        return f"[{'|'.join(texts)}]"
    return ".".join(
        c[0] if len(set(c)) == 1 else f"[{'|'.join(c)}]"
        for c in zip(*rows, strict=True)
    )


# Layouts.


def _merge(axes: str) -> str:
    return f"({axes})" if " " in axes else axes


def _kinds(axes: str, side: str) -> list[tuple[str, str]]:
    """Axes as separate atoms: `n h` → n is a head axis, h a head_dim axis."""
    names = axes.split()
    if len(names) == 1:
        return [(names[0], side)]
    return [(a, side + {"n": "N", "k": "N", "h": "H", "g": "G"}[a]) for a in names]


def _layouts(pair: Pair, config: Config, probing: bool) -> Iterator[_Layout]:
    role = pair.role
    if role.base in FUSED:
        yield from _fused_layouts(pair, config)
    elif role.base in _LINEAR and len(pair.tensors[0].shape) == (1 if role.bias else 2):
        out, into = _LINEAR[role.base]
        for way_in, in_text in [((), "")] if role.bias else _ways(into, "i"):
            for way_out, out_text in _ways(out, "o"):
                yield _Layout((*way_out, *way_in), out_text, into=in_text)
        if probing and role.base in ("q", "k"):
            yield from _rotary_layouts(out, [] if role.bias else [("d", "i")])
    else:
        yield from _plain_layouts(pair, config, probing)


def _ways(axes: str, side: str) -> Iterator[tuple[tuple[tuple[str, str], ...], str]]:
    """Merged or split heads, the query's also by key/value group; with the text of the tensor's side."""
    yield ((_merge(axes), side),), _merge(axes)
    if " " in axes:
        yield tuple(_kinds(axes, side)), _merge(axes)
    if axes == "n h":
        yield tuple(_kinds("k g h", side)), "(k g h)"


def _rotary_layouts(out: str, into: list[tuple[str, str]]) -> Iterator[_Layout]:
    heads = out.split()[0]
    how = "rotary pairs interleaved in the leaf, half-split in the checkpoint"
    for atoms in ([(f"({heads} r two)", "o")], [(heads, "oN"), ("(r two)", "oH")]):
        yield _Layout((*atoms, *into), f"({heads} two r)", how, True, " where two=2")


def _plain_layouts(pair: Pair, config: Config, probing: bool) -> Iterator[_Layout]:
    """Norms and parameters of unknown role: the tensor's own dimensions in any order."""
    shape = pair.tensors[0].shape
    base = pair.role.base
    known = convention(config)
    heads = {"norm.q": "n", "norm.k": "k"}.get(base, "")
    if heads and known and shape == (known[heads] * known.get("h", 0),):
        yield _Layout(((f"({heads} h)", "o"),), f"({heads} h)")
        yield _Layout(((heads, "oN"), ("h", "oH")), f"({heads} h)")
        return
    axes = ["d"] if len(shape) == 1 else [f"a{j}" for j in range(len(shape))]
    # a checkpoint's matrix is out × in
    kinds = ["o", "i"] if len(shape) == 2 else [f"a{j}" for j in range(len(shape))]
    yield _Layout(tuple(zip(axes, kinds, strict=True)), " ".join(axes))
    if probing and base.startswith("norm") and not pair.role.bias:
        for tail, how in (
            (" - 1", "the leaf holds 1 + w"),
            (" + 1", "the leaf holds w - 1"),
        ):
            yield _Layout((("d", "a0"),), "d", how, True, tail)


def _fused_layouts(pair: Pair, config: Config) -> Iterator[_Layout]:
    """A fused leaf, a fused tensor, or both; concatenated, stacked, or interleaved by head group.

    Of a qkv with n=4 heads and k=2 key/value heads, in the texts of its axes:

        concatenated    [k g h|k h|k h]     all queries, all keys, all values
        interleaved     (k [g|1|1] h)       for each key/value head its g=2 queries, its key, its value
        of its own      k [g|1|1] h         the same as three dimensions
    """
    base = pair.role.base
    into: list[tuple[str, str]] = [] if pair.role.bias else [("d", "i")]
    known = convention(config)
    count = len(FUSED[base])
    ones = "[" + "|".join("1" * count) + "]"
    # what one part is in units of `unit`, and how many of those units each part has
    split = ones
    if base == "gate_up":
        unit = "f"
        tail = ""
        heads = ["f"] * count
    else:
        tail = " h"
        unit = "k" if base == "kv" else "n"
        heads = [unit] * count
        if base == "qkv" and known.get("n") != known.get("k"):
            unit = "k"
            heads = ["k g", "k", "k"]
            split = "[g|1|1]"
    all_heads = "[" + "|".join(heads) + "]"
    concat = "[" + "|".join(f"{x}{tail}" for x in heads) + "]"
    group = f"({unit} {split}{tail})"
    one_leaf = len(pair.leaves) == 1
    one_tensor = len(pair.tensors) == 1
    rights = [(concat, "")]
    if one_tensor:
        forms = {"concatenated": concat, "interleaved": group}
        rights = [
            (forms[form], f"{form} in the checkpoint")
            for form in _tensor_forms(pair, config)
        ]
    leaf = pair.leaves[0]
    tensor = pair.tensors[0]
    if one_leaf and one_tensor and _module(leaf) == _module(tensor):
        yield _Layout((("x", "o"), *into), "x", "fused on both sides under one name")
        if len(leaf.shape) <= len(tensor.shape):
            return
    size = [("h", "oH")] if tail else []
    leaf_forms: list[tuple[list[tuple[str, str]], str]] = [
        ([(concat, "o")], "concatenated")
    ]
    if one_leaf:
        leaf_forms += [
            ([(group, "o")], "interleaved by head" if tail else "interleaved"),
            (
                [(unit, "oN"), (split, "oP"), *size],
                "a dimension of its own for the parts",
            ),
        ]
    if tail:
        leaf_forms.append(([(all_heads, "oN"), *size], "heads concatenated"))
        if one_leaf and split == ones:
            leaf_forms.append(([(ones, "oP"), (f"({unit} h)", "o")], "stacked"))
    for right, tensor_how in rights:
        for atoms, leaf_how in leaf_forms:
            hows = [tensor_how] if tensor_how else []
            if one_leaf:
                hows = [f"{leaf_how} in the leaf", *hows]
            yield _Layout((*atoms, *into), right, ", ".join(hows))


def _module(template: Template) -> str:
    return "_".join(template.segments[-2]) if len(template.segments) > 1 else ""


def _tensor_forms(pair: Pair, config: Config) -> tuple[str, ...]:
    """How this checkpoint fuses, as far as its names show."""
    module = _module(pair.tensors[0])
    family = config_lookup(config).get("model_type")
    if module in ("c_attn", "qkv_proj", "gate_up_proj"):
        return ("concatenated",)
    if module == "query_key_value" and (
        family in ("gpt_neox", "bloom") or "gpt_neox" in pair.tensors[0].pieces[0]
    ):
        return ("interleaved",)
    return ("concatenated", "interleaved")


def _right(pair: Pair, layout: _Layout, conv1d: bool) -> str:
    role = pair.role
    if (
        role.bias
        or (role.base not in _LINEAR and role.base not in FUSED)
        or len(pair.tensors[0].shape) != 2
    ):
        return layout.out
    into = layout.into or "d"
    swapped = conv1d and role.base not in (*TABLES, "head")
    return f"{into} {layout.out}" if swapped else f"{layout.out} {into}"


# Lines to copy.

_SURE = 0.85  # confidence of a pair matched by name; equal size alone is below
_TRIED = 12  # pairs that a line is looked for
_ORDERS = 60  # of leaves as the parts of a fused tensor that are tried
_MEANINGS = {
    "n": "heads",
    "k": "key/value heads",
    "h": "head size",
    "g": "heads to a key/value head",
}


def suggest(
    open_leaves: Sequence[str],
    leaves: Leaves,
    open_tensors: Collection[str],
    tensors: Tensors,
    config: Config,
) -> str:
    """A line for one of the unmatched leaves, from the unmatched tensors; empty if nothing is certain.

    A wrong suggestion is worse than none: it would bind, to the wrong tensor.
    """
    left, wanted = (
        {t: r for t, r in _roles_of(named).items() if set(t.members.values()) <= some}
        for named, some in ((leaves, set(open_leaves)), (tensors, set(open_tensors)))
    )
    pairs = [p for p in pair_up(left, wanted, config).pairs if p.confidence >= _SURE]
    for pair in pairs[:_TRIED]:
        found = candidates(pair, config, False, False)
        if len(found) == 1:
            return found[0].line
    return ""


def fitting(
    leaf: str, tensor: str, leaves: Leaves, tensors: Tensors, config: Config
) -> list[str]:
    """Every line that takes this leaf to this tensor, whose own rule does not fit."""
    theirs = _roles_of(tensors)
    mine = next((t for t in _roles_of(leaves) if leaf in t.members.values()), None)
    into = next((t for t in theirs if tensor in t.members.values()), None)
    if mine is None or into is None:
        return []
    pair = Pair((mine,), (into,), theirs[into])
    return [c.line for c in candidates(pair, config, is_conv1d(tensors), False)]


def nearest(name: str, known: Mapping[str, Any], free: Collection[str]) -> str:
    """The name most like one that is not there, with numbers as `{i}`; empty if none of those that are free is."""
    found = templates({n: tuple(x.shape) for n, x in known.items()})
    texts = [str(t) for t in found if any(n in free for n in t.members.values())]
    plain = {re.sub(r"\{\w+\}", "0", text): text for text in texts}
    wanted = re.sub(r"\{[^}]*\}|\d+", "0", name)
    near = difflib.get_close_matches(wanted, plain, 1, 0.6)
    return plain[near[0]] if near else ""


def legend(lines: Iterable[str], config: Config) -> str:
    """What the letters in these lines stand for, with their sizes in this model."""
    axes = " ".join(line.partition(" : ")[2] for line in lines)
    letters = set(re.findall(r"[A-Za-z_]\w*", axes))
    sizes = convention(config)
    known = [f"{a}={sizes[a]} {_MEANINGS[a]}" for a in sizes if a in letters]
    given = f"{', '.join(known)} (of config.json), " if known else ""
    return f"in these lines: {given}any other letter an axis of any size"


def _roles_of(named: Mapping[str, Any]) -> dict[Template, Role]:
    return classify(templates({n: tuple(x.shape) for n, x in named.items()}))


def is_conv1d(tensors: Leaves) -> bool:
    """Are the checkpoint's matrices in × out, as GPT-2's Conv1D stores them?"""
    fused = [t.shape for name, t in tensors.items() if "c_attn" in name]
    return any(len(shape) == 2 and shape[0] * 3 == shape[1] for shape in fused)


def roles_among(some: Collection[str], every: Leaves) -> dict[Template, Role]:
    """The roles of some names. All of them are read: what a norm is depends on which others a layer has."""
    out = {}
    for template, role in _roles_of(every).items():
        members = {key: n for key, n in template.members.items() if n in some}
        if members:
            out[replace(template, members=members)] = role
    return out


Offer = tuple[Pair, Candidate]


def lines_for_leaf(
    leaf: Template,
    role: Role,
    tensors: Mapping[Template, Role],
    config: Config,
    conv1d: bool,
) -> list[Offer]:
    """Every line from a leaf to one of these tensors, or to several that it holds the parts of.

    Those that its name speaks against only if there is no other.
    """
    pairs = [Pair((leaf,), (t,), r) for t, r in tensors.items()]
    for fused in _fused_roles(tensors.values()):
        if parts := _parts(fused, tensors):
            pairs.append(Pair((leaf,), tuple(parts), fused))
    pairs = [p for p in pairs if sum(t.elements for t in p.tensors) == leaf.elements]
    # a leaf called `bias` is one, mostly
    pairs.sort(key=lambda p: p.role.bias != role.bias)
    for agree in (True, False):
        some = [p for p in pairs if may_be(role, p.role) == agree]
        found = [(p, c) for p in some for c in candidates(p, config, conv1d, False)]
        if found:
            return found
    return []


def lines_for_parts(
    tensor: Template,
    role: Role,
    leaves: Mapping[Template, Role],
    config: Config,
    conv1d: bool,
) -> list[Offer]:
    """Every line from several leaves to a fused tensor that they are the parts of."""
    if role.base not in FUSED:
        return []
    known = convention(config)
    heads = [known.get("n", 1), known.get("k", 1), known.get("k", 1)]
    shares = heads if role.base == "qkv" else [1] * len(FUSED[role.base])
    sizes = [tensor.elements * share / sum(shares) for share in shares]
    fits = [leaf for leaf in leaves if leaf.elements in sizes]
    # leaves of the kind that the tensor is come first
    fits.sort(key=lambda leaf: leaves[leaf].bias != role.bias)

    def alike(leaf: Template) -> object:
        word = leaf.pieces[-1].rpartition(".")[2]
        return leaves[leaf].bias, len(leaf.shape), leaf.kinds, word

    orders = (
        order
        for order in itertools.permutations(fits, len(sizes))
        if [t.elements for t in order] == sizes and len(set(map(alike, order))) == 1
    )
    pairs = [
        Pair(order, (tensor,), role) for order in itertools.islice(orders, _ORDERS)
    ]
    return [(p, c) for p in pairs for c in candidates(p, config, conv1d, False)]


def shown(found: Sequence[Candidate], most: int) -> list[str]:
    """Lines of a message, to copy."""
    lines = [f"    {c.line}" + (f"   # {c.how}" if c.how else "") for c in found[:most]]
    if len(found) > most:
        lines.append(f"    … and {len(found) - most} more (error.fields['candidates'])")
    return lines

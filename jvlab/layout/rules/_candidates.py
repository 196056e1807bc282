"""Every way that a leaf can map to a checkpoint tensor of a known role, as rule lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jvlab.layout.rules._roles import Role, Template, words
from jvlab.layout.rules._rules import Compiled, parse_rule
from jvlab.layout.rules._sizes import Unfit, config_lookup, convention
from jvlab.layout.rules._syntax import Index, Name, name_text

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
class Candidate:
    """One possible rule: its line, and what each dimension of the leaf is (stacked, input, output, heads)."""

    line: str
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
class Pair:
    """Leaf templates and tensor templates that belong together: one each, or the parts of a fused one."""

    leaves: tuple[Template, ...]
    tensors: tuple[Template, ...]
    role: Role
    why: str
    confidence: float
    tied: tuple[Template, ...] = ()  # further tensors with the same values

    @property
    def leaf(self) -> str:
        return " + ".join(str(t) for t in self.leaves)


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
    pair: Pair, config: Mapping[str, Any] | None, conv1d: bool, probing: bool
) -> list[Candidate]:
    """Every rule line that fits the shapes of this pair; several mean that shapes alone are ambiguous."""
    out = _enumerate(pair, config, conv1d, list(_layouts(pair, config, probing)))
    if not out and len(pair.leaves) == len(pair.tensors) == 1:
        # heads that are not n · h (e.g. latent attention): the tensor's own dimensions
        own = replace(pair, role=replace(pair.role, base="?"))
        out = _enumerate(
            own, config, conv1d, list(_plain_layouts(own, config, probing))
        )
    return sorted(out.values(), key=lambda c: (c.probe_only, c.line))


def _enumerate(
    pair: Pair,
    config: Mapping[str, Any] | None,
    conv1d: bool,
    layouts: Sequence[_Layout],
) -> dict[object, Candidate]:
    out: dict[object, Candidate] = {}
    for names, stacks in _slots(pair):
        for layout in layouts:
            atoms = [*((v, "s" + v) for v in stacks), *layout.atoms]
            spare = len(pair.leaves[0].shape) - len(atoms)
            if spare < 0 or spare > pair.leaves[0].shape.count(1):
                continue
            right = _right(pair, layout, conv1d)
            for order in set(itertools.permutations([*atoms, *[("1", "1")] * spare])):
                line = f"{names} : {_plain_heads(' '.join(a for a, _ in order), right)}{layout.tail}"
                mapped = _fits(line, pair, config)
                if mapped is not None:
                    kinds = tuple(kind for _, kind in order)
                    found = Candidate(
                        line,
                        kinds,
                        layout.how,
                        (names, mapped, layout.tail),
                        layout.probe_only,
                    )
                    if found.map not in out or len(out[found.map].line) > len(line):
                        out[found.map] = found
    return out


def _plain_heads(left: str, right: str) -> str:
    """`[k g h|k h|k h]` is `[n h|k h|k h]` where no group is split off."""
    both = f"{left} -> {right}"
    return both if "[g|" in both else both.replace("[k g", "[n")


def _fits(line: str, pair: Pair, config: Mapping[str, Any] | None) -> object | None:
    """The solved index maps of a line for the pair's shapes; None if it does not fit."""
    compiled = Compiled(parse_rule(line))
    leaves = {k: t.shape for k, t in enumerate(pair.leaves)}
    if not compiled.leaf_choice:
        leaves = dict.fromkeys(compiled.choices(), pair.leaves[0].shape)
    tensors = {k: t.shape for k, t in enumerate(pair.tensors)}
    if not compiled.tensor_choice:
        tensors = dict.fromkeys(compiled.choices(), pair.tensors[0].shape)
    solved = compiled.templates(leaves, tensors, config)
    if any(isinstance(t, Unfit) for t in solved):
        return None
    counts = {
        v: len(pair.tensors[0].values(j))
        for j, v in enumerate(pair.tensors[0].variables())
    }
    for template in solved:
        assert not isinstance(template, Unfit)
        if any(counts.get(axis, size) != size for axis, _, _, size in template.stacked):
            return None
    return tuple(solved)


# ---------------------------------------------------------------------------------------------------- names and slots


def _slots(pair: Pair) -> Iterator[tuple[str, list[str]]]:
    """The names of a rule, and the tensor's slots that must be axes of the leaf."""
    leaf = pair.leaves[0]
    tensor = pair.tensors[0]
    if any(t.kinds != leaf.kinds for t in pair.leaves) or any(
        t.kinds != tensor.kinds for t in pair.tensors
    ):
        return
    variables = tensor.variables()
    free = dict(enumerate(variables))
    bound: dict[int, str] = {}
    for slot, kind in enumerate(leaf.kinds):
        same = [
            j
            for j in free
            if tensor.kinds[j] == kind and tensor.values(j) == leaf.values(slot)
        ]
        if same:
            bound[slot] = free.pop(same[0])
    tied = [t.name(t.variables()) for t in pair.tied]
    rest = [s for s in range(len(leaf.kinds)) if s not in bound]
    if not rest:
        targets = [t.name(variables) for t in pair.tensors]
        for j, variable in free.items():
            numbers = sorted(tensor.values(j))
            if numbers != list(range(numbers[0], numbers[-1] + 1)):
                return  # a stack cannot skip layers
            targets = [
                _with_hole(t, variable, Index(((1, variable),), numbers[0]))
                for t in targets
            ]
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
        names = [
            _with_hole(t.name(variables), variables[layer[0]], hole)
            for t in pair.tensors
        ]
        leaf_name = _joined([t.name(leaf_vars) for t in pair.leaves])
        yield (
            f"{leaf_name} -> {_joined(names)}",
            ["s", *(v for j, v in free.items() if j != layer[0])],
        )


def _with_hole(name: Name, variable: str, hole: Index) -> Name:
    plain = Index(((1, variable),))
    return Name(tuple(hole if part == plain else part for part in name.parts))


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


# ---------------------------------------------------------------------------------------------------- layouts


def _merge(axes: str) -> str:
    return f"({axes})" if " " in axes else axes


def _kinds(axes: str, side: str) -> list[tuple[str, str]]:
    """Axes as separate atoms: `n h` → n is a head axis, h a head_dim axis."""
    names = axes.split()
    if len(names) == 1:
        return [(names[0], side)]
    return [(a, side + {"n": "N", "k": "N", "h": "H", "g": "G"}[a]) for a in names]


def _layouts(
    pair: Pair, config: Mapping[str, Any] | None, probing: bool
) -> Iterator[_Layout]:
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


def _plain_layouts(
    pair: Pair, config: Mapping[str, Any] | None, probing: bool
) -> Iterator[_Layout]:
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


def _fused_layouts(pair: Pair, config: Mapping[str, Any] | None) -> Iterator[_Layout]:
    """A fused leaf, a fused tensor, or both; concatenated, stacked, or interleaved by head group."""
    base = pair.role.base
    bias = pair.role.bias
    into: list[tuple[str, str]] = [] if bias else [("d", "i")]
    known = convention(config)
    equal = base != "qkv" or known.get("n") == known.get("k")
    head = "k" if base == "kv" else "n" if equal else "k"
    count = len(FUSED[base])
    ones = "[" + "|".join("1" * count) + "]"
    split = ones if equal else "[g|1|1]"
    heads = [head] * count if equal else ["k g", "k", "k"]
    tail = "" if base == "gate_up" else " h"
    unit = "f" if base == "gate_up" else head
    whole = [unit] * count if base == "gate_up" else [f"{x}{tail}" for x in heads]
    concat = "[" + "|".join(whole) + "]"
    group = f"({unit} {split}{tail})"
    apart = len(pair.tensors) > 1
    forms = {"concatenated": concat, "interleaved": group}
    if not apart:
        forms = {k: v for k, v in forms.items() if k in _tensor_forms(pair, config)}
    same_name = (
        not apart
        and len(pair.leaves) == 1
        and _module(pair.leaves[0]) == _module(pair.tensors[0])
    )
    if same_name:
        yield _Layout((("x", "o"), *into), "x", "fused on both sides under one name")
        if len(pair.leaves[0].shape) - len(pair.tensors[0].shape) < 1:
            return
    for form, right in forms.items() if not apart else [("apart", concat)]:
        tensor_how = "" if apart else f"{form} in the checkpoint"
        if len(pair.leaves) > 1:
            yield _Layout(((concat, "o"), *into), right, tensor_how)
            if tail:
                yield _Layout(
                    (("[" + "|".join(heads) + "]", "oN"), ("h", "oH"), *into),
                    right,
                    tensor_how,
                )
            continue
        leaf_forms: list[tuple[list[tuple[str, str]], str]] = [
            ([(concat, "o")], "concatenated"),
            ([(group, "o")], "interleaved by head" if tail else "interleaved"),
            (
                [(unit, "oN"), (split, "oP"), *([("h", "oH")] if tail else [])],
                "a dimension of its own for the parts",
            ),
        ]
        if tail:
            leaf_forms.append(
                (
                    [("[" + "|".join(heads) + "]", "oN"), ("h", "oH")],
                    "heads concatenated",
                )
            )
        if tail and equal:
            leaf_forms.append(([(ones, "oP"), (f"({unit} h)", "o")], "stacked"))
        for atoms, how in leaf_forms:
            yield _Layout(
                (*atoms, *into),
                right,
                f"{how} in the leaf{', ' * bool(tensor_how)}{tensor_how}",
            )


def _module(template: Template) -> str:
    segments = words(".".join(p.strip("./") for p in template.pieces))
    return "_".join(segments[-2]) if len(segments) > 1 else ""


def _tensor_forms(pair: Pair, config: Mapping[str, Any] | None) -> tuple[str, ...]:
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

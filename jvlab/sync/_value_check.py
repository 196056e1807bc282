"""Checks a mapping by value: a sample of every leaf against the same elements of a checkpoint. numpy only.

    points of a binding → (leaf index, tensor index) → values of both sides → evidence per leaf → one verdict

Neither coverage nor digests can show this: a transposed square matrix covers and arrives just as well.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jvlab.layout._slices import distinct_leaves, without_slice
from jvlab.layout._types import Binding
from jvlab.layout.rules._roles import Role, classify, templates

# sample size per leaf: values of one row are close together in a file, rows are far apart
ROWS = 64
COLUMNS = 4
MAX_ROWS = 2**18  # of embeddings every row is looked at, up to this many
# sampled per leaf (of stacked layers: per slice), first and last included: experts may be many
BINDINGS = 32
ENOUGH = 8  # values needed for a correlation to mean anything
# a correlation above the first is no coincidence, below the second it is
SURE = 0.9
CHANCE = 0.3
FAR = 8.0  # times the median difference
GROWN = 1.5  # the size of trained values, relative to the checkpoint's, at most
SLIGHT = 0.1  # relative error of values that were trained a little
EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
SMALLEST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
# model types without rotary embeddings
NO_ROTARY = ("gpt2", "opt", "bloom", "mpt", "gpt_bigcode")
# and so shows no order
ONE_NUMBER = "one number everywhere"
SAME_NUMBERS = "another leaf holds the same numbers"
# roles that often have the same shape
SAME_SHAPE = (("q", "k"), ("k", "v"), ("q", "v"), ("gate", "up"))


Arrays = Mapping[str, Any]  # a tree's, by path
# leaf -> (kind, reason) of each alternative that names and shapes allow
Known = Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class LeafEvidence:
    """What a sample of the values of one leaf, or of one slice of a stacked leaf, showed.

    equal       every value is the checkpoint's, up to rounding
    correlated  the values changed, but still follow the checkpoint's (r)
    near        too little spread for a correlation, but all close: shows an offset, not an order
    constant    one value everywhere, on either side: shows nothing about the order
    weak        neither like the checkpoint nor unlike it
    different   unrelated values
    shifted     the checkpoint's values plus a constant
    scaled      the checkpoint's values times a constant
    exchanged   rows of an embedding that hold each other's values
    partly      some rows of an embedding are other values: neither right nor wrong
    named       other values under the checkpoint's own name and order: other weights, not a wrong rule
    unread      one of the sides could not be read
    """

    kind: str
    compared: int = 0
    equal: int = 0
    r: float | None = None
    by: float = 0.0  # the constant, for shifted and scaled, and weak if that is why
    rule: str = ""
    note: str = ""  # which rows, for exchanged and partly

    @property
    def agrees(self) -> bool:
        """Are these the checkpoint's values in the checkpoint's order?"""
        return self.kind in ("equal", "correlated")

    @property
    def fits(self) -> bool:
        """Are these the checkpoint's values, whether or not they show the order?"""
        return (
            self.agrees
            or self.kind == "near"
            or (self.kind == "constant" and self.equal == self.compared)
        )

    @property
    def contradicts(self) -> bool:
        """If other leaves agree, are these values in the wrong place?"""
        return self.kind in ("different", "shifted", "scaled", "exchanged")

    @property
    def text(self) -> str:
        """A description for messages."""
        of = f"{self.compared} numbers compared"
        match self.kind:
            case "equal":
                return f"{of}: equal"
            case "correlated":
                return (
                    f"{of}: moved, and still those of the checkpoint (r = {self.r:.3f})"
                )
            case "near":
                return f"{of}: all close, with too little spread to show their order"
            case "constant":
                return f"{of}: one number everywhere shows no order: no evidence"
            case "weak" if self.by:
                return f"{of}: like the checkpoint's times {self.by:.3g}: no evidence"
            case "weak":
                return f"{of}: neither like the checkpoint nor unlike it (r = {self.r or 0.0:.2f}): no evidence"
            case "different":
                return f"{of}: {self.compared - self.equal} different (r = {self.r or 0.0:.2f})"
            case "shifted":
                return f"{of}: the checkpoint's {self.by:+g}"
            case "scaled":
                return f"{of}: the checkpoint's times {self.by:g}"
            case "exchanged" | "partly":
                return f"{of}: {self.note}"
            case "named":
                return f"{of}: other weights than the checkpoint's, under its own name: no evidence"
        return "not compared: one of the sides could not be read"


# Points -----------------------------------------------------------------------------------------------------------


def chosen(bindings: Sequence[Binding]) -> list[Binding]:
    """The bindings of one leaf to sample: all, or `BINDINGS` of them, evenly spread."""
    if len(bindings) <= BINDINGS:
        return list(bindings)
    return [
        bindings[i]
        for i in np.linspace(0, len(bindings) - 1, BINDINGS).round().astype(int)
    ]


def points(
    binding: Binding, rows: int = ROWS, columns: int = COLUMNS
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the same elements in the leaf [n, d] and in the tensor [n, e], spread over every axis."""
    # seeded by shape, not by name: siblings are sampled at the same indices, so that equal ones are recognised
    seed = zlib.crc32(f"{binding.tensor_shape} {binding.tensor_start}".encode())
    random = np.random.default_rng(seed)
    last = len(binding.tensor_shape) - 1
    fast = [a for a in binding.axes if a.tensor_dim == last]
    slow = [a for a in binding.axes if a.tensor_dim != last]
    wide, tall = (math.prod(a.size for a in axes) for axes in (fast, slow))
    if wide * tall <= rows * columns:
        far, near = np.divmod(np.arange(wide * tall), wide)
    else:
        if tall == 1:
            rows, columns = 1, rows * columns
        far = np.repeat(_spread(tall, rows, random), columns)
        near = random.permutation(_spread(wide, rows * columns, random))
    count = len(far)
    at: dict[int, np.ndarray] = {}
    for axes, flat in ((slow, far), (fast, near)):
        if axes:
            indices = np.unravel_index(flat, [a.size for a in axes])
            at |= zip(map(id, axes), indices, strict=True)
    leaf = np.tile(np.asarray(binding.leaf_start, np.int64), (count, 1))
    tensor = np.tile(np.asarray(binding.tensor_start, np.int64), (count, 1))
    for axis in binding.axes:
        leaf[:, axis.leaf_dim] += at[id(axis)] * axis.leaf_step
        tensor[:, axis.tensor_dim] += at[id(axis)] * axis.tensor_step
    return leaf, tensor


def _spread(size: int, count: int, random: np.random.Generator) -> np.ndarray:
    """One random index in each of `count` equal parts of a range: no gap is larger than two parts."""
    return np.minimum(
        ((np.arange(count) + random.random(count)) * (size / count)).astype(np.int64),
        size - 1,
    )


def needs_more(seen: LeafEvidence) -> bool:
    """Are nearly all values the checkpoint's, and the others too few to judge? Then sample more."""
    return 2 * ENOUGH <= seen.equal < seen.compared < seen.equal + 2 * ENOUGH


# One leaf ---------------------------------------------------------------------------------------------------------


def judge(
    got: np.ndarray,
    want: np.ndarray,
    dtypes: Sequence[str] = ("float32",),
    rule: str = "",
) -> LeafEvidence:
    """Classify `got`, a leaf's values under its mapping, against `want`, the checkpoint's at the same indices.

    `dtypes` are those that the trainer's values were rounded to: the leaf's own, and that of a cast.
    """
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    keep = np.isfinite(got) & np.isfinite(want)
    got = got[keep]
    want = want[keep]
    n = len(got)
    if not n:
        return LeafEvidence("unread", rule=rule)
    epsilon = _epsilon(dtypes)
    close = close_to(got, want, dtypes)
    equal = int(close.sum())
    made = lambda kind, r=None, by=0.0: LeafEvidence(
        kind, n, equal, None if r is None else float(r), float(by), rule
    )
    if is_flat(got) or is_flat(want):
        return _judge_flat(got, want, equal == n, made)
    if equal == n:
        return made("equal")
    by = float(np.mean(got - want))
    if _offset(got - want):
        return made("shifted", by=by)
    factor = float(got @ want / (want @ want))
    if abs(factor - 1) > SLIGHT and _rms(got - factor * want) <= max(
        1e-3, 4 * epsilon
    ) * _rms(got):
        return made("scaled", by=factor)
    # correlate only what changed: a misplaced quarter must not hide behind three quarters that are right
    some = ~close if n - equal >= 2 * ENOUGH else np.ones(n, bool)
    r = _correlation(got[some], want[some])
    # trained values stray evenly: a few that stray far more, and follow the checkpoint's no longer, may be misplaced
    stray = np.abs(got - want)
    far = stray > FAR * np.median(stray[some])
    if (
        r >= SURE
        and far.sum() >= ENOUGH
        and (misplaced := _correlation(got[far], want[far])) < CHANCE
    ):
        return made("weak", misplaced)
    if r >= SURE and n >= ENOUGH:
        # noise of training leaves the size as it is: what was scaled as well is not agreed to
        return (
            made("correlated", r)
            if 1 / GROWN <= factor <= GROWN
            else made("weak", r, by=factor)
        )
    if _rms(got - want) <= SLIGHT * _rms(want):
        return made("near", r)
    return made("different" if r < CHANCE and n >= ENOUGH else "weak", r)


def _epsilon(dtypes: Sequence[str]) -> float:
    return sum(EPSILON.get(d, 0.0) for d in {*dtypes, "float32"})


def close_to(got: np.ndarray, want: np.ndarray, dtypes: Sequence[str]) -> np.ndarray:
    """Which values are equal, up to half a unit in the last place of each dtype that they were rounded to?"""
    smallest = max(SMALLEST.get(d, 0.0) for d in (*dtypes, "float32"))
    return (
        np.abs(got - want)
        <= 0.51 * _epsilon(dtypes) * np.maximum(np.abs(got), np.abs(want)) + smallest
    )


def under_its_name(bindings: Sequence[Binding]) -> bool:
    """Is the leaf the checkpoint's tensor by name and index for index? Then no rule can be wrong about it."""
    return all(
        b.leaf == b.tensor
        and not b.add
        and all(a.leaf_dim == a.tensor_dim for a in b.axes)
        for b in bindings
    )


def _judge_flat(
    got: np.ndarray, want: np.ndarray, equal: bool, made: Any
) -> LeafEvidence:
    if equal:
        return made("constant")
    if is_flat(want) and _rms(got - want) <= SLIGHT * _rms(want):
        return made("near")
    if is_flat(want) and _offset(got - want):
        return made("shifted", by=np.mean(got - want))
    return made("constant")


def is_flat(values: np.ndarray) -> bool:
    """Is it one number everywhere?"""
    return bool(np.ptp(values) <= 1e-6 * np.abs(values).max(initial=0.0))


def _offset(change: np.ndarray) -> bool:
    """Is the change the same everywhere? An offset of about 1 may vary more: the values may have been trained."""
    mean = abs(float(np.mean(change)))
    spread = float(np.std(change))
    return spread <= 1e-3 * mean or (abs(mean - 1) <= 0.1 and spread <= 0.2)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a = a - a.mean()
    b = b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0


# All of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The conclusion from all leaves: `state` is "checked", "open" (inconclusive) or "failed"."""

    state: str
    why: str
    wrong: tuple[str, ...] = ()  # leaves, and slices of stacked ones


def counted(names: Collection[str]) -> str:
    """`12 leaves`, or `40 slices of 12 leaves`."""
    leaves = distinct_leaves(names)
    return (
        f"{leaves} leaves"
        if leaves == len(names)
        else f"{len(names)} slices of {leaves} leaves"
    )


def decide(
    seen: Mapping[str, LeafEvidence],
    explained: Sequence[str] = (),
    trained: bool = False,
) -> Verdict:
    """The verdict; `explained` are leaves whose values match the checkpoint under an alternative rule.

    `trained`: the tree was right before, and may have been trained since. Then unrelated values in some leaves are no
    proof if others moved too: training can take a leaf that far.
    """
    agree = [leaf for leaf, s in seen.items() if s.agrees]
    against = [leaf for leaf, s in seen.items() if s.contradicts]
    silent = len(seen) - len(agree) - len(against)
    moved = [s.r for s in seen.values() if s.kind == "correlated" and s.r is not None]
    proof = (
        bool(explained)
        or any(seen[leaf].kind != "different" for leaf in against)
        or not (trained and moved)
    )
    if against and agree and proof and (explained or len(agree) >= len(against)):
        return Verdict(
            "failed",
            f"{len(agree)} of {counted(seen)} hold the checkpoint's numbers, {len(against)} do not",
            tuple(against),
        )
    if not agree or against:
        some = (
            f"only {len(agree)} of {counted(seen)} hold" if agree else "no leaf holds"
        )
        return Verdict(
            "open", f"{some} the checkpoint's numbers, so values settle nothing"
        )
    how = f"trained since, correlated r ≥ {min(moved):.2f}" if moved else "equal"
    rest = (
        f"; {silent} of {counted(seen)} show nothing (constant, unread or other numbers)"
        if silent
        else ""
    )
    return Verdict("checked", f"{counted(agree)} sampled: {how}{rest}")


# What only values can show ---------------------------------------------------------------------------------------


def ambiguities(
    bindings: Sequence[Binding], config: Mapping[str, Any] | None = None
) -> Known:
    """Leaf → (kind, reason) of each alternative that names and shapes allow: square, sibling, rotary, offset."""
    shapes = {b.tensor: b.tensor_shape for b in bindings}
    roles = {
        name: role
        for template, role in classify(templates(shapes)).items()
        for name in template.members.values()
    }
    layers: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for name, role in roles.items():
        layers[_parent(name), role.bias, shapes[name]][role.base] = name
    out: dict[str, dict[str, str]] = defaultdict(dict)
    for b in bindings:
        role = roles[b.tensor]
        found = out[b.leaf]
        if len(b.tensor_shape) == 2 and b.tensor_shape[0] == b.tensor_shape[1] > 1:
            size = " × ".join(map(str, b.tensor_shape))
            found["square"] = f"square ({size}): its transpose fits as well"
        beside = layers[_parent(b.tensor), role.bias, b.tensor_shape]
        similar = [
            y if x == role.base else x for x, y in SAME_SHAPE if role.base in (x, y)
        ]
        similar += [
            x for x in beside if x.startswith("norm") and role.base.startswith("norm")
        ]
        names = [
            beside[t].rsplit(".", 2)[-2]
            for t in similar
            if t in beside and beside[t] != b.tensor
        ]
        if names:
            have = "has" if len(names) == 1 else "have"
            found["sibling"] = f"{' and '.join(names)} {have} the same shape"
        if _rotary(role, config):
            found["rotary"] = "rotary order: halves or pairs, which shapes do not show"
        norm = role.base.startswith("norm") or (
            role.base == "?" and "norm" in b.tensor.lower()
        )
        if b.add or (norm and not role.bias):
            found["offset"] = "w or 1 + w, which shapes do not show"
    return {leaf: tuple(found.items()) for leaf, found in out.items() if found}


def _parent(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` → `model.layers.0.self_attn`."""
    return name.rsplit(".", 2)[0] if name.count(".") > 1 else ""


def _rotary(role: Role, config: Mapping[str, Any] | None) -> bool:
    return (
        role.base in ("q", "k", "qkv", "norm.q", "norm.k")
        and (config or {}).get("model_type") not in NO_ROTARY
    )


def still_ambiguous(
    known: Known,
    seen: Mapping[str, LeafEvidence],
    checked: bool,
    alike: Collection[str] = (),
) -> dict[str, str]:
    """Leaf → reasons that its sample has not settled. Close or constant values only settle an offset.

    `alike` are leaves with the same values as another leaf: which is which stays open. Of a stacked leaf, every slice
    must agree. A leaf whose sample shows no order is open even if names and shapes allow one reading only: the rule
    that named it may be wrong.
    """
    doubles = {*alike, *map(without_slice, alike)}
    slices: dict[str, list[LeafEvidence]] = defaultdict(list)
    for name, evidence in seen.items():
        slices[name if name in known else without_slice(name)].append(evidence)
    out = {}
    for leaf, reasons in known.items():
        settled: set[str] = set()
        if checked and leaf in slices and all(s.agrees for s in slices[leaf]):
            settled = {
                kind for kind, _ in reasons if kind != "sibling" or leaf not in doubles
            }
        elif checked and leaf in slices and all(s.fits for s in slices[leaf]):
            settled = {"offset"}
        left = [reason for kind, reason in reasons if kind not in settled]
        if left:
            out[leaf] = "; ".join(left)
    for name, evidence in seen.items() if checked else ():
        reason = _untold(evidence, name in alike)
        if reason:
            out.setdefault(name if name in known else without_slice(name), reason)
    return out


def _untold(seen: LeafEvidence, alike: bool) -> str:
    """Why a leaf could not be told from others; empty if it could."""
    if seen.agrees:
        return SAME_NUMBERS if alike else ""
    if seen.kind in ("near", "constant"):
        return ONE_NUMBER
    return (
        "its numbers were not compared"
        if seen.kind == "unread"
        else "its numbers are not the checkpoint's"
    )


# The ambiguities that names and shapes leave in a mapping, less what a link has settled.


def ambiguities_of(mapping: Any) -> Known:
    """Leaf -> the alternatives that names and shapes allow; cached on the mapping."""
    cache = mapping.__dict__
    if "_ambiguities" not in cache:
        origin = mapping._origin
        cache["_ambiguities"] = ambiguities(
            mapping.bindings, origin.config if origin is not None else None
        )
    return cache["_ambiguities"]


def in_words(known: Known) -> dict[str, str]:
    """Leaf -> its alternatives in one text."""
    return {
        leaf: "; ".join(reason for _, reason in found) for leaf, found in known.items()
    }


def unsettled(mapping: Any) -> dict[str, str]:
    """Leaf -> ambiguities not settled yet; what its link settled also counts for leaves that are bound the same."""
    known = in_words(ambiguities_of(mapping))
    link = mapping._link() if mapping._link is not None else None
    settled = getattr(link, "meaning", None)
    if link is None or settled is None or settled.state != "checked":
        return known
    if link.mapping is mapping:
        return dict(settled.ambiguous)
    before = _targets(link.mapping.bindings)
    now = _targets(mapping.bindings)
    changed = {
        leaf: why for leaf, why in known.items() if before.get(leaf) != now[leaf]
    }
    return {
        **{leaf: why for leaf, why in settled.ambiguous.items() if leaf in known},
        **changed,
    }


def _targets(bindings: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Leaf -> where its elements go, regardless of the rule's text."""
    out: dict[str, set[tuple[Any, ...]]] = {}
    for b in bindings:
        out.setdefault(b.leaf, set()).add(
            (b.tensor, b.axes, b.leaf_start, b.tensor_start, b.add)
        )
    return out

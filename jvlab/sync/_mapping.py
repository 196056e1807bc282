"""`Mapping`: which leaf fills which vLLM parameter on which rank, and why. numpy only."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab._tracebacks import brief
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import item_bytes
from jvlab.layout._slices import (
    Slice,
    fixed_dims,
    layer_number,
    numbered,
    parse_slice,
    slice_of,
    stacked_dims,
    without_number,
)
from jvlab.layout._types import Binding, CheckpointTensor, Note, RankLayout
from jvlab.sync._compile_tree import LINK_GBPS, MappingRow, trace_and_compile
from jvlab.trainer.models import resolve

if TYPE_CHECKING:
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._compile_tree import Coverage, Origin
    from jvlab.sync._diff import Values
    from jvlab.sync._meaning import Meaning
    from jvlab.views.panels._inspector import InspectorPanel
    from jvlab.wire._pool_view import PoolView

# Finds the leaf, or the slice of a stacked leaf, that a name means in a mapping.


@dataclass(frozen=True)
class Place:
    """A leaf, or one slice of a stacked leaf."""

    leaf: str
    part: Slice | None = None
    # the name that was asked for, if it numbers a layer that has no leaf of its own
    alias: str = ""

    @property
    def name(self) -> str:
        """`layers.attn.q.kernel`, or `layers.attn.q.kernel[1]`."""
        return f"{self.leaf}{self.part or ''}"


def find(mapping: Mapping, name: str) -> Place:
    """What a name means: a leaf's path, or its beginning or end; a slice `leaf[1]`; a tensor; a parameter.

    `layers.1.attn.q` also means slice 1 of the stacked leaf `layers.attn.q.kernel`.
    """
    if (given := parse_slice(name)) is not None:
        return _given_slice(mapping, name, *given)
    near = _near([x.path for x in mapping.plan.leaves], name)
    if near:
        return Place(_only(near, name))
    rows = [r for r in mapping.rows if r.leaf and name in (r.tensor, r.parameter)]
    if rows:
        leaf = _only(sorted({r.leaf for r in rows}), name)
        tensors = {r.tensor for r in rows}
        parts = {
            slice_of(b, mapping.stacked)
            for b in mapping.bindings
            if b.leaf == leaf and b.tensor in tensors
        }
        return Place(leaf, parts.pop() if len(parts) == 1 else None)
    found = {place.name: place for place in _numbered(mapping, name)}
    if found:
        return found[_only([*found], name)]
    raise _unknown(mapping, name)


def targets(mapping: Mapping, place: Place) -> list[str]:
    """The parameters that a slice is written to; none for a whole leaf, or if vLLM's own loader writes them."""
    if place.part is None:
        return []
    known = {p.name for p in mapping.plan.parameters}
    rows = (r for r in mapping.rows if r.name == place.name and r.parameter in known)
    return list(dict.fromkeys(r.parameter for r in rows))


def _near(paths: Sequence[str], name: str) -> list[str]:
    """The leaf with this path, else those whose path begins with it, else those whose path ends with it."""
    if name in paths:
        return [name]
    return [p for p in paths if p.startswith(name + ".")] or [
        p for p in paths if p.endswith("." + name)
    ]


def _only(near: Sequence[str], name: str) -> str:
    if len(near) == 1:
        return near[0]
    shown = ", ".join(near[:8]) + (" …" if len(near) > 8 else "")
    raise ConfigError(
        f"{name!r} matches {len(near)} leaves",
        remedy=f"ask for one of: {shown}",
        name=name,
    )


def _given_slice(mapping: Mapping, name: str, base: str, dim: int, index: int) -> Place:
    """`layers.attn.q.kernel[1]`."""
    leaf = find(mapping, base).leaf
    if mapping.stacked.get(leaf) != dim:
        how = (
            f"its layers are stacked along dim {mapping.stacked[leaf]}"
            if leaf in mapping.stacked
            else "it is not"
        )
        raise ConfigError(
            f"{name!r} asks for a slice of a stacked leaf, and {leaf} has none there: {how}",
            name=name,
        )
    count = next(b.leaf_shape[dim] for b in mapping.bindings if b.leaf == leaf)
    if index >= count:
        raise ConfigError(
            f"{leaf} has {count} slices, so there is no slice {index}", name=name
        )
    return Place(leaf, Slice(dim, index, count))


def _numbered(mapping: Mapping, name: str) -> list[Place]:
    """The slices that a name means which numbers layers, as if each had its own leaf."""
    return [
        Place(leaf, slice_of(b, mapping.stacked), name)
        for shorter, number in without_number(name)
        for leaf in _near(list(mapping.stacked), shorter)
        for b in mapping.bindings
        if b.leaf == leaf and layer_number(b.tensor) == number
    ]


def _unknown(mapping: Mapping, name: str) -> ConfigError:
    paths = [x.path for x in mapping.plan.leaves]
    known = [*paths, *(n for r in mapping.rows for n in (r.numbered, r.tensor) if n)]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    remedy = (
        f"did you mean {', '.join(close)}?"
        if close
        else f"leaves look like {', '.join(paths[:3])}"
    )
    return ConfigError(
        f"no leaf, tensor or parameter is called {name!r}", remedy=remedy, name=name
    )


# `Explanation`: where one leaf, or one slice of a stacked leaf, goes and why.


class Explanation:
    """Where one leaf goes, as text, and as HTML with a drawing."""

    def __init__(self, mapping: Mapping, place: Place) -> None:
        self.mapping = mapping
        self.place = place
        self.leaf = place.leaf
        # of a slice; empty: all that the leaf is written to
        self.parameters = targets(mapping, place)

    @cached_property
    def lines(self) -> list[str]:
        """The explanation, line by line."""
        plan = self.mapping.plan
        place = self.place
        info = next(x for x in plan.leaves if x.path == self.leaf)
        sharding = plan.shardings[info.sharding]
        cells = len(sharding.starts)
        devices = len(sharding.owners)
        local = (
            tuple(int(n) for n in sharding.stops[0] - sharding.starts[0])
            if cells
            else ()
        )
        how = (
            "whole on every device"
            if cells == 1
            else f"cut into {cells} pieces of {local}"
        )
        copies = f", each on {devices // cells}" if 1 < cells < devices else ""
        where = f"{how}{copies} ({devices} device{'s' * (devices != 1)})"
        dtype = next(
            (x.source for x in plan.quantised if x.path == self.leaf), info.dtype
        )
        out = [f"{info.path}  {dtype}{list(info.shape)}: {where}"]
        dim = self.mapping.stacked.get(self.leaf)
        if place.part is not None:
            asked = f", which {place.alias!r} means" if place.alias else ""
            out.append(
                f"  slice {place.part} of {place.part.count} along dim {place.part.dim}{asked}"
            )
        elif dim is not None:
            out.append(
                f"  {info.shape[dim]} slices along dim {dim}, one for each layer"
            )
        out += self._ways()
        return [*out, *self._senders()]

    def _ways(self) -> Iterator[str]:
        """The tensors and parameters that the leaf goes to; what is the same for all slices is said once."""
        whole = self.place.part is None
        said: set[tuple[str, ...]] = set()
        for b in self.mapping.bindings:
            part = slice_of(b, self.mapping.stacked)
            if b.leaf != self.leaf or self.place.part not in (None, part):
                continue
            part = part if whole else None
            yield f"  {f'{part} ' if part else ''}→ {b.tensor} {list(b.tensor_shape)}"
            how = tuple(_how(b))
            if part is None or how not in said:
                yield from (f"      {text}" for text in how)
            said.add(how)
            for r in self.mapping.rows:
                if (r.tensor, r.leaf) != (b.tensor, self.leaf):
                    continue
                if r.status == "unused":
                    yield "      no rank takes anything from it"
                    continue
                yield f"      → {r.parameter} on rank {r.rank_text}: {r.nbytes:,} bytes as {r.dtype} ({r.status})"
                notes = self.mapping.notes
                if note := notes.get(r.parameter) or notes.get(r.tensor):
                    yield f"        {note}"

    def _senders(self) -> list[str]:
        from jvlab.views._drawing import sends

        table = sends(self.mapping.plan, self.leaf, parameters=self.parameters)
        out = []
        for rank in sorted({r for _, r in table}):
            who = sorted((d, n) for (d, r), n in table.items() if r == rank)
            shown = ", ".join(f"device {d}: {n:,}" for d, n in who[:8])
            shown += " …" if len(who) > 8 else ""
            out.append(
                f"  rank {rank} takes {sum(n for _, n in who):,} bytes from {len(who)} device(s): {shown}"
            )
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


def _how(b: Binding) -> Iterator[str]:
    """The rule of a binding, its reason, and what it does to the axes."""
    if b.rule:
        yield f"by the rule {b.rule}"
    if b.reason:
        yield f"because {b.reason} (confidence {b.confidence:.2f})"
    if b.warning:
        yield f"warning: {b.warning}"
    yield from axis_words(b)


def axis_words(b: Binding) -> list[str]:
    """What a binding does to the axes, as text."""
    if not b.axes:
        return ["one number"]
    leaf = sorted(b.axes, key=lambda a: (a.leaf_dim, -a.leaf_step))
    tensor = sorted(b.axes, key=lambda a: (a.tensor_dim, -a.tensor_step))
    words = []
    if leaf == tensor and b.leaf_shape == b.tensor_shape:
        words.append("index for index the same")
    else:
        moves = [
            f"leaf dim {a.leaf_dim}{_by(a.leaf_step)} → dim {a.tensor_dim}{_by(a.tensor_step)} ({a.size})"
            for a in leaf
        ]
        words.append("; ".join(moves))
    fixed = fixed_dims(b)
    start = [0 if d in fixed else at for d, at in enumerate(b.leaf_start)]
    if any(start) or any(b.tensor_start):
        words.append(
            f"starting at {start} of the leaf and {list(b.tensor_start)} of the tensor"
        )
    if b.add:
        words.append(f"{b.add:+g} is added")
    if b.cast:
        words.append(f"cast to {b.cast} first")
    return words


def _by(step: int) -> str:
    return f" by {step}" if step != 1 else ""


# ----------------------------------------------------------------------------------------------------


def block_text(block: tuple[int, ...]) -> str:
    """A block-scaled format in words; `block`: of the leaf's dimensions."""
    return f"fp8, one scale per block of {' × '.join(str(n) for n in block if n > 1)} elements"


# tensor → (parameter, dtype, status) → [(rank, elements)]
Destinations = dict[str, dict[tuple[str, str, str], list[tuple[int, int]]]]


class Mapping:
    """Where every JAX leaf goes in vLLM's memory. Display it in a cell, or call `.explain("layers.3.attn.q")`.

    `Mapping.of(params, model_or_pool, ...)` makes one; `.plan` is its transfer plan.

    >>> mapping = jv.Mapping.of(policy.params, model, tensor_parallel=2)
    >>> mapping
    Mapping(... leaves → ... tensors → 2 ranks, ...)
    >>> print(mapping.explain("layers.0.attn.q"))   # one layer of a stacked leaf
    layers.attn.q.kernel  float32[...]: whole on every device (1 device)
      slice [0] of ... along dim 0, which 'layers.0.attn.q' means
      → model.layers.0.self_attn.q_proj.weight [...]
    ...
    """

    @classmethod
    def of(cls, params: Any, model: Any, **options: Any) -> Mapping:
        """The mapping of a tree onto a model folder, or onto a running pool; arguments as for `jv.plan`."""
        if isinstance(model, str) and not Path(model).exists():
            model = resolve(model)  # tiny:llama, smollm2
        return trace_and_compile(cls, params, model, **options)

    def __init__(
        self,
        plan: TransferPlan,
        bindings: Sequence[Binding],
        layouts: Sequence[RankLayout],
        skipped: Sequence[Note] = (),
        origin: Origin | None = None,
    ) -> None:
        self.plan = plan
        self.skipped = tuple(skipped)
        # inputs for trying other rules; None for a mapping that was built by hand
        self._origin = origin
        # a weak reference to the link that uses this mapping, if any
        self._link: Any = None
        self.bindings = tuple(bindings)
        self._layouts = tuple(layouts)

    @cached_property
    def rows(self) -> tuple[MappingRow, ...]:
        """Every row, in binding order, followed by tensors that no rank takes."""
        bound = {b.tensor for b in self.bindings}
        rows = self._rows_of(self.bindings)
        rows += [
            MappingRow(
                "", "", "no rank takes it", 1.0, name, "", (), "", "", 0, "unused"
            )
            for name in self.plan.ignored
            if name not in bound
        ]
        return tuple(rows)

    def _rows_of(self, bindings: Sequence[Binding]) -> list[MappingRow]:
        """One row per (binding, parameter) pair in the traced ranks."""
        dtypes = {x.path: x.dtype for x in self.plan.leaves} | {
            x.path: x.source for x in self.plan.quantised
        }
        quantised = {x.path for x in self.plan.quantised}
        destinations = self._destinations()
        stacked = self.stacked if bindings is self.bindings else stacked_dims(bindings)
        rows: list[MappingRow] = []
        for b in bindings:
            leaf = dtypes[b.leaf]
            share = math.prod(a.size for a in b.axes) / max(
                math.prod(b.tensor_shape), 1
            )
            part = slice_of(b, stacked)
            row = MappingRow(
                *(b.leaf, b.rule, b.reason, b.confidence, b.tensor),
                *("", (), leaf, "", 0, "unused", b.warning),
                str(part or ""),
                numbered(b.leaf, b.tensor) if part else "",
            )
            found = destinations.get(b.tensor, {})
            if not found:
                rows.append(row)
            for (parameter, dtype, kind), taken in found.items():
                nbytes = round(sum(n for _, n in taken) * share) * item_bytes(dtype)
                status = kind
                if kind == "direct" and b.leaf in quantised:
                    status = "quantised"
                elif kind == "direct" and (leaf != dtype or b.add):
                    status = "cast"
                ranks = tuple(r for r, _ in taken)
                rows.append(
                    replace(
                        row,
                        parameter=parameter,
                        ranks=ranks,
                        dtype=dtype,
                        nbytes=nbytes,
                        status=status,
                    )
                )
        return rows

    def _destinations(self) -> Destinations:
        out: Destinations = defaultdict(lambda: defaultdict(list))
        for layout in self._layouts:
            opaque = {n.name for n in layout.opaque}
            repacked = {n.name for n in layout.repacked}
            key = (
                layout.tensor.astype(np.int64) * len(layout.parameters)
                + layout.parameter
            )
            pairs, at = np.unique(key, return_inverse=True)
            total = np.zeros(len(pairs), np.int64)
            np.add.at(total, at.reshape(-1), layout.shape.prod(axis=1))
            for pair, elements in zip(pairs.tolist(), total.tolist(), strict=True):
                t = layout.tensors[pair // len(layout.parameters)]
                p = layout.parameters[pair % len(layout.parameters)]
                if t.name not in opaque:
                    kind = "staged" if p.name in repacked else "direct"
                    out[t.name][p.name, p.dtype, kind].append((layout.rank, elements))
            for t in layout.tensors:
                if t.name in opaque:
                    taken = (layout.rank, math.prod(t.shape))
                    out[t.name]["(load_weights)", t.dtype, "opaque"].append(taken)
        return out

    @cached_property
    def notes(self) -> dict[str, str]:
        """Why a tensor or parameter is not a plain copy: opaque, staged, padding."""
        out: dict[str, str] = {}
        blocks = {q.path: q.block for q in self.plan.quantised if q.block}
        for row in self.rows if blocks else ():
            if row.status == "quantised" and row.leaf in blocks:
                out.setdefault(row.parameter, f"format: {block_text(blocks[row.leaf])}")
        for layout in self._layouts:
            for f in layout.formats:
                out.setdefault(f.parameter, f"format: {f.text}")
            for kind, found in (
                ("opaque", layout.opaque),
                ("staged", layout.repacked),
                ("padding", layout.padding),
            ):
                for note in found:
                    out.setdefault(note.name, f"{kind}: {note.reason}")
        return out

    @property
    def warnings(self) -> tuple[str, ...]:
        """What rules="auto" assumed without evidence: one line per assumption, with its leaves.

        Assumptions that this mapping's link has confirmed since, by value or by function, are left out.
        """
        found: dict[str, dict[str, None]] = defaultdict(dict)
        warned = [b for b in self.bindings if b.warning]
        still = self.ambiguous if warned and self.meaning is not None else None
        for b in warned:
            left = "rotary, 1 + w" if still is None else still.get(b.leaf, "")
            for text in b.warning.split("; "):
                if all(w in left for w in ("rotary", "1 + w") if w in text):
                    found[text][b.rule.split(" -> ")[0] or b.leaf] = None
        lines = []
        for text, names in found.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"{', '.join(list(names)[:3])}{more}: {text}")
        return tuple(lines)

    def summary(self) -> dict[str, int]:
        """Counts: leaves, tensors, rows by status, bytes."""
        counts = Counter(r.status for r in self.rows)
        return {
            "leaves": len({r.leaf for r in self.rows if r.leaf}),
            "tensors": len({r.tensor for r in self.rows}),
            "ranks": self.plan.ranks,
            "bytes": sum(r.nbytes for r in self.rows),
            **{k: counts[k] for k in ("direct", "cast", "staged", "opaque", "unused")},
            **({"quantised": counts["quantised"]} if counts["quantised"] else {}),
        }

    @cached_property
    def stacked(self) -> dict[str, int]:
        """Leaf -> the dimension along which its layers are stacked, for leaves that hold several layers."""
        return stacked_dims(self.bindings)

    def find(self, name: str) -> str:
        """The leaf with this path, path prefix or suffix, checkpoint tensor, or vLLM parameter name."""
        return find(self, name).leaf

    def explain(self, name: str) -> Explanation:
        """Where one tensor goes and why, as text; in a notebook with a drawing of both shardings.

        Of a stacked leaf, a tensor or parameter of one layer, `layers.attn.q.kernel[1]`, or `layers.1.attn.q` means
        that layer's slice.
        """
        return Explanation(self, find(self, name))

    # Searching and editing: called by the inspector's fields and buttons ------------------------------------------

    def search(
        self,
        text: str = "",
        *,
        status: str = "",
        rule: str = "",
        rank: int | None = None,
        sort: str = "",
    ) -> list[MappingRow]:
        """The rows that contain every word of `text` in some column, filtered by status, rule or rank, and sorted.

        >>> {row.parameter for row in mapping.search("layers.0 q_proj", status="direct", rank=0)}
        {'model.layers.0.self_attn.qkv_proj.weight'}
        """
        from jvlab.views._mapping_view import search_rows

        if not isinstance(text, str):
            raise ConfigError(
                f"text is {type(text).__name__}",
                remedy='words: mapping.search("layers.0 q_proj")',
            )
        return search_rows(self.rows, text, status, rule, rank, sort)

    def select(self, name: str) -> Explanation:
        """`explain(name)`, and select the tensor in every open inspector of this mapping."""
        found = self.explain(name)
        _faces.draw(self, "selection", found.place.name)
        return found

    @property
    def rules(self) -> Rules:
        """The rules in force, inferred ones with reasons; `mapping.edit` changes one, `save_rules` saves them."""
        return self._source().rules

    def edit(self, rule: str, *, replace: str = "") -> Coverage:
        """What the rules would cover with `rule` added or replaced. This mapping does not change.

        `rule` replaces the rule with the text `replace`, else the rule for the same leaves, else it is added; an empty
        `rule` removes `replace`. `.complete` and `.problems` say whether everything is covered; if so, `.mapping` is
        the new mapping, and `lab.connect(params, pool, rules=coverage.rules)` syncs with it.
        """
        from jvlab.sync._compile_tree import changed_rules, coverage_of

        return coverage_of(self, changed_rules(self.rules, rule, replace))

    def save_rules(self, path: str | Path) -> Path:
        """Write the rules to a file for `rules=path`: JSON if its name ends in .json, else text."""
        self.rules.save(path)
        return Path(path)

    def values(
        self, name: str, params: Any = None, *, replica: int = 0, bins: int = 48
    ) -> list[Values]:
        """Histograms of a tensor on both sides and of their difference, per rank; needs a link.

        params   the trainer's arrays, or a Policy; default: those that the link was connected with, while they exist
        """
        link = self._open_link()
        place = find(self, name)
        names = targets(self, place) or [place.leaf]
        return [
            found for one in names for found in link.values(one, params, replica, bins)
        ]

    @property
    def meaning(self) -> Meaning | None:
        """Whether the link's values mean the same on both sides; None if no link uses this mapping."""
        link = self._link() if self._link is not None else None
        return link.meaning if link is not None and link.mapping is self else None

    @property
    def ambiguous(self) -> dict[str, str]:
        """Leaf -> the alternatives that names and shapes allow (its transpose, a sibling, rotary order, 1 + w).

        Those that this mapping's link has settled, by value or by function, are left out.
        """
        from jvlab.sync._value_check import unsettled

        return unsettled(self)

    def panel(self, params: Any = None) -> InspectorPanel | None:
        """The inspector: search, inspect a tensor, edit a rule. `params`: arrays or a Policy, to compare values."""
        return _faces.draw(self, "panel", params)

    def _source(self) -> Origin:
        if self._origin is None:
            raise ConfigError(
                "this mapping was built by hand and has no rules",
                remedy="make it with jv.Mapping.of(params, model, rules=…), or use link.mapping",
            )
        return self._origin

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """The checkpoint's tensors that were traced."""
        return self._layouts[0].tensors

    @property
    def editable(self) -> bool:
        """Whether it was made by rules, which can be edited."""
        return self._origin is not None

    @property
    def link(self) -> Any:
        """The open link that uses this mapping; None without one."""
        link = self._link() if self._link is not None else None
        return None if link is None or link.closed else link

    def _open_link(self) -> Any:
        link = self.link
        if link is None:
            raise ConfigError(
                "no open link uses this mapping, so there is no engine to read from",
                remedy="link = lab.connect(params, pool); link.mapping",
            )
        return link

    def figure(self, name: str) -> object:
        """A matplotlib Figure: which device's piece goes to which rank."""
        return _faces.draw(self.explain(name), "figure")

    def __repr__(self) -> str:
        return _faces.draw(self, "line")

    def __str__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def _ipython_display_(self) -> None:
        self.panel()


# `jv.plan`, and the body of the `jvlab plan` command ------------------------------------------------------------------


MAX_LINKS = 1024  # rows of the link table in the command's JSON
RULES_HELP = (
    "the trainer's tree, by the rules it is written in: policy, hf_flax, checkpoint, tunix, maxtext, gemma, "
    "policy.<family>.scanned, or a file of rules; auto (the default) infers the rules of jvlab's own Policy tree"
)


@brief
def plan(
    params: Any,
    model: str | os.PathLike[str] | Dict[str, Any] | PoolView,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    link_gbps: float | None = None,
    bucket_mib: float = 64,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    quantization: str | None = None,
) -> TransferPlan:
    """The plan from a tree of arrays or shapes to a vLLM engine that need not exist: every element is written once.

    `model` is a model folder, "tiny:llama", "smollm2", a config, or a running pool (whose engine is traced, with its
    own options).
    `params` is any pytree of arrays or ShapeDtypeStructs; with None the tree is the one that `rules` imply, for "auto"
    that of jvlab's own Policy. `mesh` (`"fsdp=4,tp=2"`, a dict, a jax Mesh) says how they would be sharded; without it
    their own shardings are used. `rules` is "auto", the name of a rule set, a file, rule text, a `jv.Rules`, a list of
    lines, or ("auto", line, line, …), which infers the remaining ones; `help(jv.Rules)` explains the lines. If `params`
    hold values and the model folder holds weights, "auto" may compare them as evidence.
    `quantization="fp8"` plans for an engine that quantises while loading; a model whose config.json says that it is fp8
    in blocks needs no option. Both as an H200 was seen to hold them; connecting finds what the engine really does.
    `link_gbps` (GB/s each way, per device and rank) is the bandwidth that `plan.predict()` assumes; without it 50, a
    400 Gb/s port, or 2 for a pool on a CPU.

    >>> jv.plan(None, model, tensor_parallel=2, mesh="fsdp=3")
    TransferPlan(llama: 3 devices → 1 × 2 ranks, ...)
    """
    return Mapping.of(
        params,
        model,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        quantization=quantization,
        bucket_mib=bucket_mib,
        link_gbps=link_gbps,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
    ).plan


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jvlab plan`."""
    parser.add_argument(
        "--model",
        required=True,
        help="directory with a config.json (weights are not needed), or tiny:llama",
    )
    parser.add_argument(
        "--mesh", default="fsdp=1", help="trainer mesh, e.g. fsdp=3,tp=2"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--rules", default="auto", help=RULES_HELP)
    parser.add_argument("--dtype", default="auto", help="the engine's dtype")
    parser.add_argument(
        "--quantization", help="fp8: the engine quantises while loading, per tensor"
    )
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument(
        "--link-gbps",
        type=float,
        nargs="+",
        default=[LINK_GBPS],
        help="GB/s per device, each way",
    )


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """`jvlab plan`: prints the plan from the tree that --rules describe, returns it as plain values."""
    from jvlab.views._plan_view import plan_lines, plan_summary

    timing: dict[str, float] = {}
    names = (
        *("tensor_parallel", "replicas", "mesh", "rules", "bucket_mib"),
        *("pipeline_parallel", "expert_parallel", "dtype", "quantization"),
    )
    given = {name: getattr(args, name) for name in names}
    link_gbps = args.link_gbps[0]
    mapping = Mapping.of(None, args.model, link_gbps=link_gbps, timing=timing, **given)
    made = mapping.plan
    print("\n".join(plan_lines(made, args.link_gbps)))
    for warning in mapping.warnings:
        print(f"warning: {warning}")
    table = made.all_links
    names = (
        "replica",
        "device",
        "process",
        "rank",
        "nbytes",
        "copies",
        "contiguous_bytes",
    )
    columns = [getattr(table, n).tolist()[:MAX_LINKS] for n in names]
    keys = [n.replace("nbytes", "bytes") for n in names]
    return plan_summary(made) | {
        "mapping": mapping.summary(),
        "warnings": list(mapping.warnings),
        "timing": timing,
        "predicted_s_by_gbps": {f"{g:g}": made.predict(g) for g in args.link_gbps},
        "link_table": [
            dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)
        ],
    }

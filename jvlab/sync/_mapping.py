"""`Mapping`: which leaf fills which vLLM parameter on which rank, and why. numpy only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import item_bytes
from jvlab.layout._slices import Slice, numbered, slice_of, stacked_dims
from jvlab.layout._types import Binding, Note, RankLayout
from jvlab.sync._compile_tree import trace_and_compile
from jvlab.sync._explanation import Explanation
from jvlab.sync._mapping_row import MappingRow
from jvlab.sync._place import find, targets
from jvlab.trainer.models import resolve

if TYPE_CHECKING:
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._rebind import Coverage, Origin
    from jvlab.sync._values import Values
    from jvlab.views.panels._inspector import InspectorPanel


def block_text(block: tuple[int, ...]) -> str:
    """A block-scaled format in words; `block`: of the leaf's dimensions."""
    return f"fp8, one scale per block of {' × '.join(str(n) for n in block if n > 1)} elements"


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
        if isinstance(model, str) and model.startswith("tiny:"):
            model = resolve(model)
        return trace_and_compile(cls, params, model, **options)

    def __init__(
        self,
        plan: TransferPlan,
        bindings: Sequence[Binding],
        layouts: Sequence[RankLayout],
        skipped: Sequence[Note] = (),
        origin: Origin | None = None,
    ) -> None:
        self.plan, self.skipped = plan, tuple(skipped)
        self._origin = origin  # inputs for trying other rules; None for a mapping that was built by hand
        self._link: Any = None  # a weak reference to the link that uses this mapping, if any
        self.bindings, self._layouts = tuple(bindings), tuple(layouts)

    @cached_property
    def rows(self) -> tuple[MappingRow, ...]:
        """Every row, in binding order, followed by tensors that no rank takes."""
        bound = {b.tensor for b in self.bindings}
        rows = self._rows_of(self.bindings)
        rows += [
            MappingRow("", "", "no rank takes it", 1.0, name, "", (), "", "", 0, "unused")
            for name in self.plan.ignored
            if name not in bound
        ]
        return tuple(rows)

    def _rows_of(self, bindings: Sequence[Binding]) -> list[MappingRow]:
        """One row per (binding, parameter) pair in the traced ranks."""
        dtypes = {x.path: x.dtype for x in self.plan.leaves} | {x.path: x.source for x in self.plan.quantised}
        quantised = {x.path for x in self.plan.quantised}
        destinations = self._destinations()
        stacked = self.stacked if bindings is self.bindings else stacked_dims(bindings)
        rows: list[MappingRow] = []
        for b in bindings:
            leaf = dtypes[b.leaf]
            share = int(np.prod([a.size for a in b.axes], dtype=np.int64)) / max(
                int(np.prod(b.tensor_shape, dtype=np.int64)), 1
            )
            found = destinations.get(b.tensor, {})
            if not found:
                rows.append(self._row(b, slice_of(b, stacked), "", (), leaf, "", 0, "unused"))
            for (parameter, dtype, kind), taken in found.items():
                nbytes = round(sum(n for _, n in taken) * share) * item_bytes(dtype)
                status = kind if kind != "direct" else "direct" if leaf == dtype and not b.add else "cast"
                status = "quantised" if b.leaf in quantised and kind == "direct" else status
                ranks = tuple(r for r, _ in taken)
                rows.append(self._row(b, slice_of(b, stacked), parameter, ranks, leaf, dtype, nbytes, status))
        return rows

    @staticmethod
    def _row(
        b: Binding,
        part: Slice | None,
        parameter: str,
        ranks: tuple[int, ...],
        leaf: str,
        dtype: str,
        nbytes: int,
        status: str,
    ) -> MappingRow:
        layer = (str(part), numbered(b.leaf, b.tensor)) if part is not None else ("", "")
        why = b.leaf, b.rule, b.reason, b.confidence
        return MappingRow(*why, b.tensor, parameter, ranks, leaf, dtype, nbytes, status, b.warning, *layer)

    def _destinations(self) -> dict[str, dict[tuple[str, str, str], list[tuple[int, int]]]]:
        """Tensor → (parameter, dtype, status) → [(rank, elements)]."""
        out: dict[str, dict[tuple[str, str, str], list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for layout in self._layouts:
            opaque, staged = {n.name for n in layout.opaque}, {n.name for n in layout.staged}
            key = layout.tensor.astype(np.int64) * len(layout.parameters) + layout.parameter
            pairs, at = np.unique(key, return_inverse=True)
            total = np.zeros(len(pairs), np.int64)
            np.add.at(total, at.reshape(-1), layout.shape.prod(axis=1))
            for pair, elements in zip(pairs.tolist(), total.tolist(), strict=True):
                t, p = layout.tensors[pair // len(layout.parameters)], layout.parameters[pair % len(layout.parameters)]
                if t.name not in opaque:
                    kind = "staged" if p.name in staged else "direct"
                    out[t.name][p.name, p.dtype, kind].append((layout.rank, elements))
            for t in layout.tensors:
                if t.name in opaque:
                    size = int(np.prod(t.shape, dtype=np.int64))
                    out[t.name]["(load_weights)", t.dtype, "opaque"].append((layout.rank, size))
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
            for kind, found in (("opaque", layout.opaque), ("staged", layout.staged), ("padding", layout.padding)):
                for note in found:
                    out.setdefault(note.name, f"{kind}: {note.reason}")
        return out

    @property
    def warnings(self) -> tuple[str, ...]:
        """What rules="auto" assumed without evidence: one line per assumption, with its leaves.

        Assumptions that this mapping's link has confirmed since, by value or by function, are left out.
        """
        found: dict[str, dict[str, None]] = defaultdict(dict)
        still = self.ambiguous if any(b.warning for b in self.bindings) and self.meaning is not None else None
        for b in self.bindings:
            for text in filter(None, b.warning.split("; ")):
                settled = [w for w in ("rotary", "1 + w") if w in text and still is not None]
                if not any(w not in (still or {}).get(b.leaf, "") for w in settled):
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
        self, text: str = "", *, status: str = "", rule: str = "", rank: int | None = None, sort: str = ""
    ) -> list[MappingRow]:
        """The rows that contain every word of `text` in some column, filtered by status, rule or rank, and sorted.

        >>> {row.parameter for row in mapping.search("layers.0 q_proj", status="direct", rank=0)}
        {'model.layers.0.self_attn.qkv_proj.weight'}
        """
        from jvlab.views._mapping_search import search_rows

        if not isinstance(text, str):
            raise ConfigError(f"text is {type(text).__name__}", remedy='words: mapping.search("layers.0 q_proj")')
        return search_rows(self.rows, text, status, rule, rank, sort)

    def select(self, name: str) -> Explanation:
        """`explain(name)`, and select the tensor in every open inspector of this mapping."""
        from jvlab.views.panels._inspector import select_everywhere

        found = self.explain(name)
        select_everywhere(self, found.place.name)
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
        from jvlab.sync._rebind import changed_rules, coverage_of

        return coverage_of(self, changed_rules(self.rules, rule, replace))

    def save_rules(self, path: str | Path) -> Path:
        """Write the rules to a file for `rules=path`: JSON if its name ends in .json, else text."""
        self.rules.save(path)
        return Path(path)

    def values(self, name: str, params: Any = None, *, replica: int = 0, bins: int = 48) -> list[Values]:
        """Histograms of a tensor on both sides and of their difference, per rank; needs a link.

        params   the trainer's arrays, or a Policy; default: those that the link was connected with, while they exist
        """
        link, place = self._open_link(), find(self, name)
        names = targets(self, place) or [place.leaf]
        return [found for one in names for found in link.values(one, params, replica, bins)]

    @property
    def meaning(self) -> Meaning | None:
        """Whether the link's values mean the same on both sides; None if no link uses this mapping."""
        link = self._link() if self._link is not None else None
        return link.meaning if link is not None and getattr(link, "mapping", None) is self else None

    @property
    def ambiguous(self) -> dict[str, str]:
        """Leaf -> the alternatives that names and shapes allow (its transpose, a sibling, rotary order, 1 + w).

        Those that this mapping's link has settled, by value or by function, are left out.
        """
        from jvlab.sync._ambiguities import unsettled

        return unsettled(self)

    def panel(self, params: Any = None) -> InspectorPanel | None:
        """The inspector: search, inspect a tensor, edit a rule. `params`: arrays or a Policy, to compare values."""
        from jvlab.views.panels._inspector import inspect

        return inspect(self, params)

    def _source(self) -> Origin:
        if self._origin is None:
            raise ConfigError(
                "this mapping was built by hand and has no rules",
                remedy="make it with jv.Mapping.of(params, model, rules=…), or use link.mapping",
            )
        return self._origin

    def _open_link(self) -> Any:
        link = self._link() if self._link is not None else None
        if link is None or link.closed:
            raise ConfigError(
                "no open link uses this mapping, so there is no engine to read from",
                remedy="link = lab.connect(params, pool); link.mapping",
            )
        return link

    def figure(self, name: str) -> object:
        """A matplotlib Figure: which device's piece goes to which rank."""
        from jvlab.views._mapping_view import mapping_figure

        return mapping_figure(self.explain(name))

    def __repr__(self) -> str:
        from jvlab.views._mapping_view import summary_line

        return f"Mapping({summary_line(self)})"

    def __str__(self) -> str:
        from jvlab.views._mapping_view import mapping_text

        return mapping_text(self)

    def _repr_html_(self) -> str:
        from jvlab.views._mapping_view import mapping_html

        return mapping_html(self)

    def _ipython_display_(self) -> None:
        self.panel()

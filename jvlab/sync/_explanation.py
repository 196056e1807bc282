"""`Explanation`: where one leaf, or one slice of a stacked leaf, goes and why."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from jvlab.layout._slices import fixed_dims, slice_of
from jvlab.sync._place import Place, bindings_at, targets

if TYPE_CHECKING:
    from jvlab.layout._types import Binding
    from jvlab.sync._mapping import Mapping


class Explanation:
    """Where one leaf goes, as text, and as HTML with a drawing."""

    def __init__(self, mapping: Mapping, place: Place) -> None:
        self.mapping, self.place = mapping, place
        self.leaf = place.leaf
        self.parameters = targets(mapping, place)  # of a slice; empty: all that the leaf is written to

    @cached_property
    def lines(self) -> list[str]:
        """The explanation, line by line."""
        plan, place = self.mapping.plan, self.place
        info = next(x for x in plan.leaves if x.path == self.leaf)
        sharding = plan.shardings[info.sharding]
        cells, devices = len(sharding.starts), len(sharding.owners)
        local = tuple(int(n) for n in sharding.stops[0] - sharding.starts[0]) if cells else ()
        how = "whole on every device" if cells == 1 else f"cut into {cells} pieces of {local}"
        copies = f", each on {devices // cells}" if 1 < cells < devices else ""
        where = f"{how}{copies} ({devices} device{'s' * (devices != 1)})"
        dtype = next((x.source for x in plan.quantised if x.path == self.leaf), info.dtype)
        out = [f"{info.path}  {dtype}{list(info.shape)}: {where}"]
        dim = self.mapping.stacked.get(self.leaf)
        if place.part is not None:
            asked = f", which {place.alias!r} means" if place.alias else ""
            out.append(f"  slice {place.part} of {place.part.count} along dim {place.part.dim}{asked}")
        elif dim is not None:
            out.append(f"  {info.shape[dim]} slices along dim {dim}, one for each layer")
        out += self._ways()
        return [*out, *self._senders()]

    def _ways(self) -> Iterator[str]:
        """The tensors and parameters that the leaf goes to; what is the same for all slices is said once."""
        whole = self.place.part is None
        said: set[tuple[str, ...]] = set()
        for b in bindings_at(self.mapping, self.place):
            part = slice_of(b, self.mapping.stacked) if whole else None
            yield f"  {f'{part} ' if part else ''}→ {b.tensor} {list(b.tensor_shape)}"
            how = tuple(_how(b))
            if part is None or how not in said:
                yield from (f"      {text}" for text in how)
            said.add(how)
            for r in (r for r in self.mapping.rows if r.tensor == b.tensor and r.leaf == self.leaf):
                if r.status == "unused":
                    yield "      no rank takes anything from it"
                    continue
                yield f"      → {r.parameter} on rank {r.rank_text}: {r.nbytes:,} bytes as {r.dtype} ({r.status})"
                note = self.mapping.notes.get(r.parameter) or self.mapping.notes.get(r.tensor)
                if note:
                    yield f"        {note}"

    def _senders(self) -> list[str]:
        from jvlab.views._drawing import sends

        table = sends(self.mapping.plan, self.leaf, parameters=self.parameters)
        out = []
        for rank in sorted({r for _, r in table}):
            who = sorted((d, n) for (d, r), n in table.items() if r == rank)
            shown = ", ".join(f"device {d}: {n:,}" for d, n in who[:8]) + (" …" if len(who) > 8 else "")
            out.append(f"  rank {rank} takes {sum(n for _, n in who):,} bytes from {len(who)} device(s): {shown}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from jvlab.views._mapping_view import explanation_html

        return explanation_html(self)


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
            f"leaf dim {a.leaf_dim}{_by(a.leaf_step)} → dim {a.tensor_dim}{_by(a.tensor_step)} ({a.size})" for a in leaf
        ]
        words.append("; ".join(moves))
    fixed = fixed_dims(b)
    start = [0 if d in fixed else at for d, at in enumerate(b.leaf_start)]
    if any(start) or any(b.tensor_start):
        words.append(f"starting at {start} of the leaf and {list(b.tensor_start)} of the tensor")
    if b.add:
        words.append(f"{b.add:+g} is added")
    if b.cast:
        words.append(f"cast to {b.cast} first")
    return words


def _by(step: int) -> str:
    return f" by {step}" if step != 1 else ""

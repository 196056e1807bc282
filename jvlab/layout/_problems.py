"""Checks of a plan's inputs, and the one error that lists every problem. numpy only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from jvlab._errors import CoverageError
from jvlab._units import how_many
from jvlab.layout._compose import axes_numbers
from jvlab.layout._types import Binding, CheckpointTensor, Leaf, Note, RankLayout

SHOWN = 40  # problems printed in the message; all of them are in the error's `problems`


@dataclass(frozen=True)
class Problem:
    """One reason why the two sides do not fit."""

    kind: str  # gap, overlap, dtype, shape, missing, extra, source
    name: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.name}: {self.message}\n      → {self.remedy}"


def raise_problems(problems: Sequence[Problem]) -> NoReturn:
    """One CoverageError with every problem."""
    lines = [f"  {p}" for p in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(
            f"  … and {len(problems) - SHOWN} more (all in the error's fields['problems'])"
        )
    count = how_many(len(problems), "problem")
    raise CoverageError(
        "\n".join([f"the plan does not cover the model: {count}", *lines]),
        remedy="fix the rules or the tree as each line below suggests; nothing was sent",
        problems=tuple(problems),
    )


def check_inputs(
    leaves: Sequence[Leaf],
    bindings: Sequence[Binding],
    layouts: Sequence[RankLayout],
    ignored_leaves: Collection[str],
) -> list[Problem]:
    """What does not fit before anything is compiled. Shardings and indices are left to the proof."""
    problems: list[Problem] = []
    by_path = {leaf.path: leaf for leaf in leaves}
    tensors = {
        t.name: t
        for many in {id(x.tensors): x.tensors for x in layouts}.values()
        for t in many
    }
    good_keys: set[tuple[object, ...]] = set()  # geometries already found good
    for b, number in zip(bindings, axes_numbers(bindings), strict=True):
        leaf = by_path.get(b.leaf)
        tensor = tensors.get(b.tensor)
        key = (
            b.leaf_shape,
            b.tensor_shape,
            b.leaf_start,
            b.tensor_start,
            number,
            b.cast,
            leaf and (leaf.shape, leaf.dtype),
            tensor and (tensor.shape, tensor.dtype),
        )
        if key not in good_keys:
            found = _check_binding(b, leaf, tensor)
            if found:
                problems.append(Problem(found[0], b.leaf, found[1], found[2]))
            else:
                good_keys.add(key)
    taken: set[str] = set()  # some rank takes something from these
    declared: set[str] = set()
    for layout in layouts:
        taken.update(layout.tensors[i].name for i in np.unique(layout.tensor))
        taken.update(note.name for note in layout.opaque)
        declared.update(layout.unused)
    wanted = set(by_path) - set(ignored_leaves)
    problems += _check_tensors({b.tensor for b in bindings}, taken, declared, tensors)
    problems += _check_dropped(bindings, taken, tensors, wanted)
    problems += padding_problems(layouts)
    for path in sorted(wanted - {b.leaf for b in bindings}):
        problems.append(
            Problem(
                "extra",
                path,
                f"leaf of shape {by_path[path].shape} fills no checkpoint tensor",
                "add a rule for it, or declare it unused with a rule `… -> ~`",
            )
        )
    return problems


def _check_binding(
    b: Binding, leaf: Leaf | None, tensor: CheckpointTensor | None
) -> tuple[str, str, str] | None:
    rule = f" (rule: {b.rule})" if b.rule else ""
    if leaf is None:
        return (
            "missing",
            f"a rule names this leaf for {b.tensor!r}, but the tree has none{rule}",
            "fix the rule's path",
        )
    if tensor is None:
        return (
            "extra",
            f"fills {b.tensor!r}, which the checkpoint does not have{rule}",
            "fix the rule's tensor name",
        )
    remedy = "check the head counts and whether the kernel is transposed"
    if tuple(b.leaf_shape) != tuple(leaf.shape):
        text = f"the leaf has shape {leaf.shape}, its rule for {b.tensor!r} expects {b.leaf_shape}{rule}"
        return "shape", text, remedy
    if tuple(b.tensor_shape) != tuple(tensor.shape):
        text = f"leaf {leaf.shape} makes {b.tensor!r} as {b.tensor_shape}, the checkpoint has {tensor.shape}{rule}"
        return "shape", text, remedy
    if not dtypes_agree(leaf.dtype, tensor.dtype, b.cast):
        text = f"leaf {leaf.shape} is {leaf.dtype}, tensor {b.tensor!r} {tensor.shape} is {tensor.dtype}{rule}"
        return "dtype", text, dtype_remedy(tensor.dtype)
    return None


def dtypes_agree(source: str, target: str, cast: str | None = None) -> bool:
    """May values of one dtype become the other? Float to float, int to int, bool to bool.

    Floats of 8 bits or fewer hold scaled values, so only a cast in the rule may produce them.
    """
    if cast is None:
        return _family(source) == _family(target)
    return _family(cast) == _family(target) and _family(source).removeprefix(
        _SCALED
    ) == _family(target).removeprefix(_SCALED)


def dtype_remedy(target: str) -> str:
    """What to do where `dtypes_agree` says no."""
    if _family(target).startswith(_SCALED):
        return "quantise the leaf and its scale in the tree, or cast in the rule if the plain values are meant"
    return "cast the leaf in the tree, or map another leaf"


_SCALED = "scaled "


def _family(dtype: str) -> str:
    if dtype.startswith(("float8", "float6", "float4")):
        return _SCALED + "float"
    return next((kind for kind in ("float", "bool", "int") if kind in dtype), dtype)


def _check_dropped(
    bindings: Sequence[Binding],
    taken: set[str],
    tensors: dict[str, CheckpointTensor],
    leaves: set[str],
) -> list[Problem]:
    """Leaves that are bound, but only to tensors which no rank takes anything from: training them has no effect.

    A tied leaf that also fills the embedding is fine.
    """
    useful = {b.leaf for b in bindings if b.tensor in taken}
    unread: dict[str, str] = {}
    for b in bindings:
        if b.leaf in leaves and b.leaf not in useful and b.tensor in tensors:
            unread.setdefault(b.leaf, b.tensor)
    return [
        Problem(
            "extra",
            leaf,
            f"fills only {tensor!r}, which vLLM takes nothing from on any rank",
            "if vLLM ties or ignores that tensor, declare the leaf unused with a rule `… -> ~`",
        )
        for leaf, tensor in sorted(unread.items())
    ]


def _check_tensors(
    bound: set[str],
    taken: set[str],
    declared: set[str],
    tensors: dict[str, CheckpointTensor],
) -> list[Problem]:
    problems: list[Problem] = []
    for name in sorted(taken - bound):
        shape = tensors[name].shape if name in tensors else "?"
        problems.append(
            Problem(
                "missing",
                name,
                f"vLLM needs this tensor of shape {shape}, and no leaf is bound to it",
                "add the leaf to the tree, or a rule that names it",
            )
        )
    for name in sorted(set(tensors) - taken - declared - bound):
        problems.append(
            Problem(
                "extra",
                name,
                f"tensor of shape {tensors[name].shape} is used by no rank and not declared unused",
                "trace again with a checkpoint list that matches the model",
            )
        )
    return problems


def padding_problems(layouts: Sequence[RankLayout]) -> list[Problem]:
    """Elements of live parameters that neither a row, nor an opaque tensor, nor the loader itself fills.

    Padding is what the loader fills itself. Anything else that no row reaches is a tensor missing from the traced list,
    whether it is a whole parameter or the K rows of a fused one.
    """
    filled: set[str] = set()
    gaps: dict[str, list[tuple[int, Note, tuple[int, ...]]]] = {}
    for layout in layouts:
        filled |= {layout.parameters[i].name for i in np.unique(layout.parameter)}
        loose = [n for n in layout.padding if n.kind not in ("constant", "opaque")]
        shapes = {p.name: tuple(p.shape) for p in layout.parameters} if loose else {}
        for note in loose:
            gaps.setdefault(note.name, []).append(
                (layout.rank, note, shapes.get(note.name, ()))
            )
    out = []
    for name, found in sorted(gaps.items()):
        rank, note, shape = found[0]
        others = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
        if name in filled:
            total = int(np.prod(shape, dtype=np.int64))
            kind = "gap"
            text = (
                f"parameter of shape {shape}: {note.elements} of {total} elements on rank {rank}{others} "
                f"are filled by nothing, and no loader pads them: {note.reason}"
            )
        else:
            kind = "missing"
            text = (
                f"live parameter of shape {shape} is filled on no rank: {note.reason}"
            )
        out.append(
            Problem(
                kind, name, text, "pass the complete list of the checkpoint's tensors"
            )
        )
    return out

"""Raw copies kept transposed: a weight that is packed afterwards need not be turned, for packing reads any strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jvlab.rollout._receive import Box


def turned_boxes(shape: tuple[int, ...], strides: tuple[int, ...], boxes: Sequence[Box]) -> dict[Box, Box]:
    """Each box with its place in the transposed storage of a matrix; empty if turning brings nothing or can't be.

    It pays where the bytes arrive with the matrix's first dimension running fastest, as Flax kernels do: their copy is
    then a plain run. Every element must be covered, so that the whole of the storage is written.
    """
    if len(shape) != 2 or tuple(strides) != (shape[1], 1) or min(shape) < 2:
        return {}
    lines, row = shape
    out: dict[Box, Box] = {}
    covered = gained = 0
    for box in boxes:
        moved = _moved(box, lines, row)
        if moved is None:
            return {}
        out[box] = moved
        covered += box.elements
        gained += box.elements * ((moved.strides[-1] == 1) - (box.strides[-1] == 1))
    return out if covered == lines * row and gained > 0 else {}


def _moved(box: Box, lines: int, row: int) -> Box | None:
    line, column = divmod(box.offset, row)
    strides, reach = [], 0
    for n, s in zip(box.shape, box.strides, strict=True):
        if s % row == 0:
            strides.append(s // row)
        else:
            strides.append(s * lines)
            reach += (n - 1) * s
    if column + reach >= row:
        return None  # an axis runs across lines
    return replace(box, offset=column * lines + line, strides=tuple(strides))

"""Raw copies kept transposed: a weight to be packed need not be transposed first, as packing reads any strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jvlab.worker._receivers import ReceivedBox


def transposed_boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], boxes: Sequence[ReceivedBox]
) -> dict[ReceivedBox, ReceivedBox]:
    """Each box with its place in the transposed storage of a matrix; empty if that gains nothing or is not possible.

    It pays where the bytes arrive with the matrix's first dimension running fastest, as Flax kernels do: their copy is
    then a plain run. Every element must be covered, so that the whole of the storage is written.
    """
    if len(shape) != 2 or tuple(strides) != (shape[1], 1) or min(shape) < 2:
        return {}
    lines, row = shape
    out: dict[ReceivedBox, ReceivedBox] = {}
    covered = gained = 0
    for box in boxes:
        moved = _moved(box, lines, row)
        if moved is None:
            return {}
        out[box] = moved
        covered += box.elements
        gained += box.elements * ((moved.strides[-1] == 1) - (box.strides[-1] == 1))
    return out if covered == lines * row and gained > 0 else {}


def _moved(box: ReceivedBox, lines: int, row: int) -> ReceivedBox | None:
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

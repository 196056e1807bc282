"""Raw copies in transposed storage: packing reads any strides, so a weight that is packed need not be transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jvlab.engine.worker._receivers import ReceivedBox


def transposed_boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], boxes: Sequence[ReceivedBox]
) -> dict[ReceivedBox, ReceivedBox]:
    """Each box with its box in the transposed storage of a matrix; empty if that is no gain, or impossible.

    It is a gain where the bytes arrive with the matrix's first dimension fastest, as those of Flax kernels: they are
    then copied as plain runs. The boxes must cover every element, so that the whole storage is written.
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
        return None  # an axis crosses rows
    return replace(box, offset=column * lines + line, strides=tuple(strides))

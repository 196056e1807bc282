"""Raw copies kept transposed hold the same matrix, and are only used where they turn a transpose into a plain copy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from jvlab.engine.worker._receivers import ReceivedBox
from jvlab.engine.worker._weights import transposed_boxes

pytestmark = pytest.mark.vllm  # the module under test imports it
LINES, ROW = 12, 10


def put(storage: np.ndarray, box: ReceivedBox, values: np.ndarray) -> None:
    as_strided(storage[box.offset :], box.shape, [s * 4 for s in box.strides])[...] = (
        values
    )


def boxes_of(transposed: bool) -> list[ReceivedBox]:
    """A matrix in three parts of its lines, as fused query, key and value come; columns first if transposed."""
    out = []
    for first, last in ((0, 6), (6, 9), (9, 12)):
        shape, strides = (last - first, ROW), (ROW, 1)
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        out.append(
            ReceivedBox(0, 0, 4 * ROW * (last - first), first * ROW, shape, strides)
        )
    return out


def test_the_same_matrix():
    boxes = boxes_of(transposed=True)
    turned = transposed_boxes((LINES, ROW), (ROW, 1), boxes)
    assert len(turned) == 3
    plain, other = np.zeros(LINES * ROW, np.float32), np.zeros(LINES * ROW, np.float32)
    for box in boxes:
        values = np.random.default_rng(box.offset).standard_normal(
            box.shape, np.float32
        )
        put(plain, box, values)
        put(other, turned[box], values)
        assert turned[box].strides[-1] == 1, "what comes in is written in runs"
    assert np.array_equal(plain.reshape(LINES, ROW), other.reshape(ROW, LINES).T)


def test_heads_within_lines():
    # d n h -> (n h) d
    box = ReceivedBox(0, 0, 4 * 120, 0, (ROW, 3, 4), (1, 4 * ROW, ROW))
    (moved,) = transposed_boxes((LINES, ROW), (ROW, 1), [box]).values()
    assert (moved.offset, moved.strides) == (0, (LINES, 4, 1))


@pytest.mark.parametrize(
    ("shape", "strides", "boxes"),
    [
        ((LINES, ROW), (ROW, 1), boxes_of(transposed=False)),  # already in order
        ((LINES, ROW), (ROW, 1), boxes_of(transposed=True)[:2]),  # not all of it
        ((LINES, ROW), (1, LINES), boxes_of(transposed=True)),  # another storage
        # no matrix
        ((LINES * ROW,), (1,), [ReceivedBox(0, 0, 480, 0, (LINES * ROW,), (1,))]),
        # an axis runs across lines
        ((LINES, ROW), (ROW, 1), [ReceivedBox(0, 0, 480, 0, (8, 15), (15, 1))]),
    ],
)
def test_otherwise_it_stays_as_it_is(
    shape: tuple[int, ...], strides: tuple[int, ...], boxes: list[ReceivedBox]
):
    assert transposed_boxes(shape, strides, boxes) == {}

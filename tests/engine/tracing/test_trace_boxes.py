"""The algebra of strided boxes against brute force: numpy index arrays take the place of every formula."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from jvlab.engine.tracing._write_recorder import (
    Digits,
    Row,
    StridedPart,
    covered,
    joined,
    reordered,
    row,
    runs,
    through,
    whole,
)
from tests.fuzzing import examples


def addresses(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    out = np.full(shape, offset, np.int64)
    for d, (n, s) in enumerate(zip(shape, strides, strict=True)):
        out += (np.arange(n) * s).reshape(
            [-1 if i == d else 1 for i in range(len(shape))]
        )
    return out


def filled(parts: list[StridedPart], shape: tuple[int, ...]) -> np.ndarray:
    """Source address of each element of a view, from its parts; -1 where none says so."""
    out = np.full(shape, -1, np.int64)
    for part in parts:
        sizes = tuple(a.size for a in part.axes)
        index = [np.full(sizes, s) for s in part.start]
        source = np.full(sizes, part.offset)
        for k, a in enumerate(part.axes):
            along = np.arange(a.size).reshape(
                [-1 if i == k else 1 for i in range(len(sizes))]
            )
            index[a.dim] = index[a.dim] + along * a.step
            source = source + along * a.stride
        assert (out[tuple(index)] == -1).all()
        out[tuple(index)] = source
    return out


@st.composite
def views(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """A view of an array by the steps loaders take: split, merge, permute, narrow, step, repeat."""
    for _ in range(draw(st.integers(0, 5))):
        match draw(
            st.sampled_from(["split", "merge", "permute", "narrow", "step", "repeat"])
        ):
            case "split":
                d = draw(st.integers(0, array.ndim - 1))
                n = draw(
                    st.sampled_from(
                        [
                            k
                            for k in range(1, array.shape[d] + 1)
                            if array.shape[d] % k == 0
                        ]
                    )
                )
                array = array.reshape(
                    *array.shape[:d],
                    n,
                    array.shape[d] // n,
                    *array.shape[d + 1 :],
                    copy=None,
                )
            case "merge" if array.ndim > 1:
                d = draw(st.integers(0, array.ndim - 2))
                shape = (
                    *array.shape[:d],
                    array.shape[d] * array.shape[d + 1],
                    *array.shape[d + 2 :],
                )
                try:
                    array = array.reshape(shape, copy=False)
                except ValueError:
                    continue
            case "permute":
                array = array.transpose(draw(st.permutations(range(array.ndim))))
            case "narrow":
                d = draw(st.integers(0, array.ndim - 1))
                a = draw(st.integers(0, array.shape[d] - 1))
                b = draw(st.integers(a + 1, array.shape[d]))
                array = array[(slice(None),) * d + (slice(a, b),)]
            case "step":
                d = draw(st.integers(0, array.ndim - 1))
                array = array[
                    (slice(None),) * d + (slice(None, None, draw(st.integers(1, 3))),)
                ]
            case "repeat":
                array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array


def box(
    view: np.ndarray, base: np.ndarray
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    offset = (
        view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    ) // base.itemsize
    return offset, view.shape, tuple(s // base.itemsize for s in view.strides)


answered: list[bool] = []


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_views_of_reordered_copies(data: st.DataObject) -> None:
    shape = tuple(
        data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    )
    root = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    first = data.draw(views(root))
    parts = whole(0, *box(first, root))
    assert np.array_equal(filled(parts, first.shape), first)
    for _ in range(2):  # a copy of a view of a copy
        copied = np.ascontiguousarray(first)
        digits = reordered(parts, first.shape, tuple(s // 8 for s in copied.strides))
        if digits is None:
            # sizes that are no radix (a repeated view): the tracer then says opaque
            return
        second = data.draw(views(copied))
        found = through(digits, *box(second, copied))
        answered.append(found is not None)
        if found is None:
            return
        assert np.array_equal(filled(found, second.shape), second)
        parts, first = found, second


def test_most_views_are_answered() -> None:
    """`None` is always allowed, so the property above must not hold by saying nothing."""
    assert len(answered) > 200
    assert sum(answered) / len(answered) > 0.8


def test_gpt_neox_style_regrouping() -> None:
    heads, dim, width = 4, 3, 5
    root = np.arange(heads * 3 * dim * width).reshape(heads, 3, dim, width)
    view = root.transpose(1, 0, 2, 3)
    digits = reordered(
        whole(0, *box(view, root)),
        view.shape,
        (heads * dim * width, dim * width, width, 1),
    )
    assert digits is not None
    copied = np.ascontiguousarray(view).reshape(3 * heads * dim, width)
    shard = copied[heads * dim + 6 : heads * dim + 12]  # two heads of k
    parts = through(digits, *box(shard, copied))
    assert parts is not None
    assert len(parts) == 1
    assert np.array_equal(filled(parts, shard.shape), shard)


def test_concatenation_is_cut_at_its_seams() -> None:
    parts = [
        StridedPart(0, 0, (0, 0), whole(0, 0, (2, 4), (4, 1))[0].axes),
        StridedPart(1, 0, (2, 0), whole(1, 0, (3, 4), (4, 1))[0].axes),
    ]
    digits = reordered(parts, (5, 4), (4, 1))
    assert isinstance(digits, Digits)
    # rows 1 to 3: one of the first, two of the second
    found = through(digits, 4, (3, 4), (4, 1))
    assert found is not None
    assert [(p.source, p.offset, p.start, p.axes[0].size) for p in found] == [
        (0, 4, (0, 0), 4),
        (1, 0, (1, 0), 2),
    ]


def test_a_view_across_a_digits_end_is_not_guessed() -> None:
    root = np.arange(12).reshape(3, 4)
    digits = reordered(whole(0, *box(root.T, root)), (4, 3), (3, 1))
    assert digits is not None
    assert through(digits, 1, (5,), (2,)) is None


def test_rows_merge_dimensions_and_neighbours() -> None:
    (part,) = whole(0, 8, (2, 4), (4, 1))
    assert row(part, 3, 16, (4, 1)) == Row(0, 3, (8,), 8, (1,), 16, (1,))
    (turned,) = whole(0, 0, (4, 2), (1, 4))
    assert row(turned, 0, 0, (2, 1)) == Row(0, 0, (4, 2), 0, (1, 4), 0, (2, 1))
    (scalar,) = whole(0, 5, (), ())
    assert row(scalar, 0, 2, ()) == Row(0, 0, (1,), 5, (0,), 2, (0,))
    a, b = (
        Row(0, 0, (2, 4), 0, (8, 1), 0, (4, 1)),
        Row(0, 0, (3, 4), 16, (8, 1), 8, (4, 1)),
    )
    assert joined([a, b]) == [Row(0, 0, (5, 4), 0, (8, 1), 0, (4, 1))]
    apart = Row(0, 0, (3, 4), 17, (8, 1), 8, (4, 1))
    assert joined([a, apart]) == [a, apart]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(1, 4),
            st.integers(1, 4),
            st.sampled_from([4, 5, 8]),
        ),
        max_size=4,
    )
)
def test_coverage_counts_addresses(boxes: list[tuple[int, int, int, int]]) -> None:
    depth = np.zeros(64, np.int64)
    pieces = []
    for offset, rows, width, stride in boxes:
        pieces.append(runs(offset, (rows, width), (stride, 1)))
        as_strided(depth[offset:], (rows, width), (stride * 8, 8))[...] += 1
    assert covered(pieces) == (int((depth > 0).sum()), int((depth > 1).sum()))


def test_runs_of_a_contiguous_box_are_one() -> None:
    assert runs(3, (4, 5), (5, 1)).tolist() == [[3, 23]]
    # the order of dimensions does not matter to a set
    assert runs(3, (5, 4), (1, 5)).tolist() == [[3, 23]]
    assert runs(0, (2, 3), (10, 1)).tolist() == [[0, 3], [10, 13]]
    assert np.array_equal(
        np.sort(addresses(3, (5, 4), (1, 5)).reshape(-1)), np.arange(3, 23)
    )

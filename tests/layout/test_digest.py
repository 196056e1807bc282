"""The digest: the same whatever the order and the cut, different after any change of value or place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from jvlab._errors import LayoutError
from jvlab.layout import _digest
from jvlab.layout._digest import (
    COLUMN,
    LINE,
    PLACE,
    box_digest,
    box_scan,
    compiled_loop,
    flat_digest,
    row_elements,
    weights,
)
from jvlab.layout._plan_types import numpy_dtype

DTYPES = ("float32", "float16", "uint8", "float64")


def brute(storage: np.ndarray, row: int) -> int:
    """The formula, one word at a time."""
    word = np.dtype(f"u{min(storage.itemsize, 4)}")
    total = 0
    for i, element in enumerate(storage):
        u = int(weights(np.array([i // row]), LINE)[0])
        v = int(weights(np.array([i % row]), COLUMN)[0])
        for place, value in enumerate(np.array([element]).view(word).tolist()):
            total += u * v * int(PLACE[place]) * value
    return total % 2**64


def storage_of(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(
        0, 256, count * np.dtype(dtype).itemsize, dtype=np.uint8
    )
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "row"), [(1, 1), (7, 7), (12, 4), (13, 4), (60, 1), (96, 96), (200, 10)]
)
def test_flat_is_the_formula(dtype: str, count: int, row: int):
    storage = storage_of(count, dtype)
    assert flat_digest(storage, row) == brute(storage, row)


def test_long_rows_and_many_lines_are_exact():
    # the largest words: nothing may be rounded
    storage = np.full(20_000 * 3, np.uint32(0xFFFFFFFF)).view(np.float32)
    whole = flat_digest(storage, 20_000)
    parts = (
        sum(
            box_digest(storage[a : a + 500], a, (1,), 20_000)
            for a in range(0, 60_000, 500)
        )
        % 2**64
    )
    assert whole == parts


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(DTYPES),
    st.randoms(use_true_random=False),
)
def test_any_cut_in_any_order_of_axes_adds_up(
    lines: int, heads: int, width: int, dtype: str, random
):
    row = heads * width
    storage = storage_of(lines * row, dtype, seed=lines + 10 * heads)
    cut = random.randint(0, heads)
    total = 0
    for first, last in ((0, cut), (cut, heads)):
        shape, strides = [lines, last - first, width], [row, width, 1]
        order = random.sample(range(3), 3)
        shape, strides = [shape[k] for k in order], [strides[k] for k in order]
        if 0 in shape:
            continue
        size = storage.itemsize
        view = as_strided(storage[first * width :], shape, [s * size for s in strides])
        total += box_digest(np.ascontiguousarray(view), first * width, strides, row)
    assert total % 2**64 == flat_digest(storage, row)


def test_axes_across_lines():
    storage = storage_of(24, "float32")
    view = storage.reshape(2, 12)  # lines of 5: the axis of 12 runs across them
    assert box_digest(view, 0, (12, 1), 5) == brute(storage, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: str):
    storage = storage_of(6, dtype)
    seen = {flat_digest(storage, 3)}
    raw = storage.view(np.uint8)
    for byte, bit in itertools.product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        seen.add(flat_digest(storage, 3))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(raw)


def test_places_count():
    storage = storage_of(64, "float32")
    whole = flat_digest(storage, 8)
    for i, j in itertools.combinations(range(64), 2):
        swapped = storage.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert flat_digest(swapped, 8) != whole, (i, j)
    assert (
        flat_digest(np.ascontiguousarray(storage.reshape(8, 8).T).reshape(-1), 8)
        != whole
    )
    doubles = storage_of(8, "float64")
    halves = doubles.copy().view(np.uint32)
    halves[[0, 1]] = halves[[1, 0]]
    assert flat_digest(halves.view(np.float64), 8) != flat_digest(doubles, 8)


def test_two_sign_bits_do_not_cancel():
    storage = storage_of(64, "float32")
    whole = flat_digest(storage, 8)
    for i, j in itertools.combinations(range(64), 2):
        flipped = storage.copy()
        flipped.view(np.uint32)[[i, j]] ^= np.uint32(1 << 31)
        assert flat_digest(flipped, 8) != whole, (i, j)


def test_lines_follow_the_contiguous_dimension():
    assert row_elements((4, 6), (6, 1)) == 6
    assert row_elements((4, 6), (1, 4)) == 4
    assert row_elements((5,), (1,)) == 5
    assert row_elements((), ()) == 1
    with pytest.raises(LayoutError, match="strides"):
        box_digest(np.zeros((2, 2), np.float32), 0, (1,), 2)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"],
)
def test_poison_is_seen_beside_the_digest(dtype: str):
    """Each place of odd shapes, dense, apart and scattered; the greatest finite numbers are none, nor are integers."""
    kind = numpy_dtype(dtype)
    words = np.dtype(f"u{kind.itemsize}")
    bits = _digest.exponent(dtype)
    rng = np.random.default_rng(0)
    for rows, width, apart in (
        (1, 1, 0),
        (3, 5, 0),
        (4, 8, 0),
        (4, 8, 3),
        (7, 33, 8),
        (2, 4096, 0),
    ):
        # below it: finite, of either sign
        storage = rng.integers(0, bits, (rows, width + apart)).astype(words)
        storage |= (
            rng.integers(0, 2, storage.shape) << (8 * kind.itemsize - 1)
        ).astype(words)
        storage[-1, width - 1] = bits - 1  # the greatest
        for view, strides in (
            (storage[:, :width], (width, 1)),
            (storage.T[:width], (1, width)),
        ):
            values = view.view(kind)
            digest, flawed = box_scan(values, 0, strides, width)
            assert not flawed
            assert digest == box_digest(values, 0, strides, width)
            for at in {
                (0, 0),
                tuple(n - 1 for n in values.shape),
                tuple(n // 2 for n in values.shape),
            }:
                for bad in (bits, bits | 1, bits | 1 << (8 * kind.itemsize - 1)):
                    kept = view[at]
                    view[at] = bad
                    assert box_scan(values, 0, strides, width) == (
                        box_digest(values, 0, strides, width),
                        True,
                    )
                    view[at] = kept
    assert not box_scan(np.full((3, 5), -1, np.int32), 0, (5, 1), 5)[1]


def test_a_damaged_compiled_loop_is_not_trusted(monkeypatch: pytest.MonkeyPatch):
    """numba keeps compiled code on disk: it is tried against plain arithmetic before a digest relies on it."""
    monkeypatch.setattr(
        _digest, "_kernel", lambda: lambda *_: (np.uint64(0), np.uint64(0))
    )
    with pytest.raises(LayoutError, match=r"wrong sum.*\n.*delete the files"):
        compiled_loop.__wrapped__()

"""The picture of packed rows: every sample is drawn once, and the rest of each row is hatched."""

from __future__ import annotations

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.trainer._batching import Buckets
from jvlab.trainer._micro_batches import (
    Packer,
    Packing,
    packing,
    sample_lengths,
)

LENGTHS = np.random.default_rng(0).integers(20, 200, 30)


def _padded() -> Packing:
    return packing(LENGTHS, Buckets(rows=8))


@pytest.mark.parametrize("budget", [None, 512])
def test_rows_hold_every_sample_once_and_say_what_is_padding(
    budget: int | None,
) -> None:
    found = (
        _padded() if budget is None else packing(LENGTHS, Packer(budget, short=True))
    )
    assert sorted(s for row in found.rows for s in row) == list(range(30))
    assert (
        len(found.rows) == len(found.widths) == sum(count for count, _ in found.shapes)
    )
    assert found.computed == sum(rows * length for rows, length in found.shapes)
    assert all(
        LENGTHS[list(row)].sum() <= width
        for row, width in zip(found.rows, found.widths, strict=True)
    )
    assert found.padding == pytest.approx(1 - LENGTHS.sum() / found.computed)


def test_packed_rows_have_less_padding_and_one_shape() -> None:
    padded, packed = (
        _padded(),
        packing(LENGTHS, Packer(512, short=True)),
    )
    assert packed.compiled == 1 < padded.compiled
    assert packed.padding < 0.1 < padded.padding
    assert repr(padded).startswith("Packing(30 samples in 32 rows, 4 passes of ")


def test_the_figure_draws_them_side_by_side() -> None:
    from matplotlib.patches import Rectangle

    padded, packed = (
        _padded(),
        packing(LENGTHS, Packer(512, short=True)),
    )
    figure = padded.plot(packed)
    left, right = figure.axes
    for axes, of in ((left, padded), (right, packed)):
        bars = [p for p in axes.patches if isinstance(p, Rectangle)]
        assert len(bars) == len(axes.patches)
        hatched = [p for p in bars if p.get_hatch()]
        drawn = [p for p in bars if not p.get_hatch()]
        assert len(drawn) == 30
        assert sum(p.get_width() for p in drawn) == LENGTHS.sum()
        assert sum(p.get_width() for p in (*drawn, *hatched)) == of.computed
    assert left.get_xlim() == right.get_xlim()
    assert "% padding" in right.get_title(loc="left")
    assert len(figure._repr_png_()) > 1000  # type: ignore[attr-defined]


def test_lengths_of_samples_and_of_nothing() -> None:
    class Sample:
        prompt_token_ids, token_ids = [1, 2], [3, 4, 5]

    assert sample_lengths([Sample(), Sample()]).tolist() == [5, 5]
    for wrong in ([], [0], [1.5], [[1, 2]]):
        with pytest.raises(ConfigError, match="no lengths"):
            sample_lengths(wrong)

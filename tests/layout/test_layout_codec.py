"""A rank layout as plain values: there and back, and refusals."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from jvlab._errors import TraceError
from jvlab.layout._layout_codec import layout_from_plain, layout_to_plain
from jvlab.layout._types import RELOADED, CheckpointTensor, Note, Parameter, RankLayout

LAYOUT = RankLayout(
    rank=3,
    coords=(("tp", 1), ("pp", 1)),
    tensors=(
        CheckpointTensor("a", (4, 6), "float32"),
        CheckpointTensor("b", (), "bfloat16"),
    ),
    parameters=(Parameter("p", (6, 4), "bfloat16", (4, 1)),),
    tensor=np.array([0, 1], np.int32),
    parameter=np.array([0, 0], np.int32),
    shape=np.array([[6, 4], [1, 1]], np.int64),
    src_offset=np.array([0, 2**40], np.int64),
    src_strides=np.array([[1, 6], [0, 0]], np.int64),
    dst_offset=np.array([0, 5], np.int64),
    dst_strides=np.array([[4, 1], [0, 0]], np.int64),
    padding=(Note("p", "why", 3, "gap"),),
    opaque=(Note("b", "computed", 1),),
    repacked=(Note("p", "packed", 24), Note("q", "its words may be any", 3, RELOADED)),
    unused=("b",),
)


def plain_types(value: object) -> set[type]:
    if isinstance(value, dict):
        return {dict}.union(*(plain_types(v) for v in value.values()))
    if isinstance(value, list):
        return {list}.union(*(plain_types(v) for v in value))
    return {type(value)}


def test_there_and_back() -> None:
    plain = layout_to_plain(LAYOUT)
    assert plain_types(plain) <= {dict, list, str, int, bytes}
    back = layout_from_plain(plain)
    for f in fields(LAYOUT):
        a, b = getattr(LAYOUT, f.name), getattr(back, f.name)
        assert (
            np.array_equal(a, b) and a.dtype == b.dtype
            if isinstance(a, np.ndarray)
            else a == b
        ), f.name
    assert back.src_offset.flags.writeable
    assert back.reloaded == {"q"}


def test_a_cut_column_is_refused() -> None:
    plain = layout_to_plain(LAYOUT)
    plain["columns"]["src_offset"][1] = plain["columns"]["src_offset"][1][:8]
    with pytest.raises(TraceError, match="src_offset"):
        layout_from_plain(plain)


def test_another_version_is_refused() -> None:
    with pytest.raises(TraceError, match="wire version"):
        layout_from_plain({**layout_to_plain(LAYOUT), "wire": 1})

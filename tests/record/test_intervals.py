"""Interval arithmetic against brute force on a grid of integer seconds, where floats are exact."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jvlab.record._metrics import (
    lanes,
    measure,
    rate,
    split_time,
    union,
)

SIZE = 24
interval = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(
    lambda p: (min(p), max(p))
)
intervals = st.lists(interval, max_size=8)


def cells(given: object) -> set[int]:
    """The unit cells [i, i + 1) that any interval covers."""
    return {
        i
        for a, b in np.asarray(given, float).reshape(-1, 2)
        for i in range(int(a), int(b))
    }


@given(intervals)
def test_union_is_disjoint_sorted_and_covers_the_same(given: list) -> None:
    joined = union(given)
    assert cells(joined) == cells(given)
    assert measure(given) == len(cells(given))
    assert (joined[:, 0] < joined[:, 1]).all()
    assert (joined[1:, 0] > joined[:-1, 1]).all()  # not even touching


@given(
    st.dictionaries(st.sampled_from("abcd"), intervals),
    st.lists(st.integers(0, SIZE), unique=True, max_size=6),
)
def test_split_of_time_against_counting_cells(
    phases: dict[str, list], cuts: list[int]
) -> None:
    edges = sorted(cuts)
    windows = list(itertools.pairwise(edges))[::2]  # every other: with gaps between
    split = split_time(phases, windows)
    covered = {name: cells(given) for name, given in phases.items()}
    for w, (low, high) in enumerate(windows):
        inside = range(low, high)
        active = {i: tuple(n for n in phases if i in covered[n]) for i in inside}
        for name in phases:
            assert split.busy[name][w] == sum(name in active[i] for i in inside)
        for names, seconds in split.together.items():
            assert seconds[w] == sum(active[i] == names for i in inside)
        assert split.overlap[w] == sum(len(active[i]) > 1 for i in inside)
        assert split.idle[w] == sum(not active[i] for i in inside)
        assert sum(s[w] for s in split.together.values()) + split.idle[w] == high - low


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=20),
    st.integers(1, 9),
)
def test_split_of_arbitrary_times_adds_up(raw: list, parts: int) -> None:
    spans = [(a, a + d) for a, d in raw]
    edges = np.linspace(0, 160, parts + 1)
    split = split_time(
        {"x": spans[::2], "y": spans[1::2]}, np.stack([edges[:-1], edges[1:]], axis=1)
    )
    whole = sum(split.together.values(), np.zeros(parts)) + split.idle
    assert np.allclose(whole, np.diff(edges))
    assert np.isclose(split.busy["x"].sum(), measure(spans[::2]))


def test_windows_of_no_length_hold_nothing() -> None:
    split = split_time({"x": [(0, 4)]}, [(0, 1), (1, 1), (1, 3)])
    assert split.busy["x"].tolist() == [1, 0, 2]


def test_nothing_at_all() -> None:
    split = split_time({"x": []}, [])
    assert split.idle.tolist() == []
    assert measure([]) == 0
    assert lanes([]) == []


@given(st.lists(st.tuples(interval, st.integers(0, 50)), max_size=8))
def test_rates_keep_the_total(given: list) -> None:
    edges = np.linspace(-1, SIZE + 1, 11)
    found = rate([x for x, _ in given], [n for _, n in given], edges)
    assert np.isclose((found * np.diff(edges)).sum(), sum(n for _, n in given))
    assert (found >= -1e-9).all()


def test_a_rate_is_spread_over_its_interval() -> None:
    assert rate([(0, 4)], [8], np.array([0.0, 1, 2, 6])).tolist() == [2, 2, 1]


@given(intervals)
def test_lanes_do_not_overlap_and_are_as_few_as_can_be(given: list) -> None:
    proper = [(a, b) for a, b in given if b > a]
    found = lanes(proper)
    for lane in set(found):
        own = [x for x, at in zip(proper, found, strict=True) if at == lane]
        assert sum(b - a for a, b in own) == len(cells(own))
    deepest = max((sum(a <= i < b for a, b in proper) for i in range(SIZE)), default=0)
    assert len(set(found)) == deepest

"""Events become strict JSON and come back, whatever a newer jvlab or a numpy scalar put into them."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.record._events import (
    KINDS,
    Event,
    FaultEvent,
    RolloutEvent,
    RunStart,
    StepEvent,
    SyncEvent,
    UnknownEvent,
    coerce,
    event_from_json,
    plain,
)
from jvlab.record._samples import SampleRecord, sample_from_json, shortest

# what could upset a line format; quick to draw
TEXT = st.text('ab01"\\\n,{}=: é☃\x00\u2028', max_size=12)
VALUES: dict[object, st.SearchStrategy] = {
    str: TEXT,
    int: st.integers(-(2**60), 2**60),
    float: st.floats(),
    bool: st.booleans(),
    bool | None: st.sampled_from([True, False, None]),
    dict[int, int]: st.dictionaries(st.integers(-5, 2**40), st.integers(0, 2**40)),
    dict[str, int]: st.dictionaries(TEXT, st.integers(0, 9)),
    dict[str, float]: st.dictionaries(TEXT, st.floats()),
    dict[str, tuple[float, ...]]: st.dictionaries(
        TEXT, st.lists(st.floats(), max_size=4).map(tuple), max_size=4
    ),
    dict[int, dict[str, float]]: st.dictionaries(
        st.integers(0, 4), st.dictionaries(TEXT, st.floats())
    ),
    dict[str, typing.Any]: st.dictionaries(
        TEXT, st.integers() | TEXT | st.lists(st.booleans())
    ),
    tuple[int, ...]: st.lists(st.integers(0, 99)).map(tuple),
    tuple[str, ...]: st.lists(TEXT).map(tuple),
    tuple[float, ...]: st.lists(st.floats()).map(tuple),
    tuple[tuple[int, int, int], ...]: st.lists(st.tuples(*[st.integers(0, 9)] * 3)).map(
        tuple
    ),
}


def events_of(cls: type[Event]) -> st.SearchStrategy[Event]:
    """Any event of a class: every field drawn by its type; `stop` not before `start`."""
    hints = typing.get_type_hints(cls)
    names = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in ("start", "stop", "extra")
    ]
    times = st.lists(st.floats(0, 1e9), min_size=2, max_size=2).map(sorted)
    fields = st.fixed_dictionaries({name: VALUES[hints[name]] for name in names})
    return st.builds(lambda f, t: cls(**f, start=t[0], stop=t[1]), fields, times)


def same(a: object, b: object) -> bool:
    """Equal, NaN being equal to itself, at any depth."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def assert_same(a: Event, b: Event) -> None:
    assert type(a) is type(b)
    for f in dataclasses.fields(a):
        assert same(getattr(a, f.name), getattr(b, f.name)), f.name


@given(st.sampled_from(list(KINDS.values())).flatmap(events_of))
def test_every_event_comes_back_from_strict_json(event: Event) -> None:
    text = json.dumps(event.to_json(), allow_nan=False)
    assert_same(event_from_json(json.loads(text)), event)


@given(events_of(SampleRecord))
def test_every_sample_comes_back(sample: Event) -> None:
    assert_same(
        sample_from_json(json.loads(json.dumps(sample.to_json(), allow_nan=False))),
        sample,
    )


def test_nan_and_infinity_are_deliberate_strings() -> None:
    event = StepEvent(
        step=1, version=1, loss=math.nan, kl=math.inf, ratios={"max": -math.inf}
    )
    fields = event.to_json()
    assert (fields["loss"], fields["kl"], fields["ratios"]) == (
        "NaN",
        "Infinity",
        {"max": "-Infinity"},
    )
    back = event_from_json(fields)
    assert isinstance(back, StepEvent)
    assert math.isnan(back.loss)
    assert back.kl == math.inf
    assert back.ratios == {"max": -math.inf}


def test_what_a_newer_version_wrote_is_kept_and_written_again() -> None:
    fields = {
        "kind": "step",
        "step": 3,
        "version": 3,
        "start": 1.0,
        "stop": 2.0,
        "shiny": {"a": ["NaN"]},
    }
    event = event_from_json(fields)
    assert isinstance(event, StepEvent)
    assert event.extra == {"shiny": {"a": ["NaN"]}}
    assert event.to_json()["shiny"] == {"a": ["NaN"]}
    unknown = {
        "kind": "teleport",
        "actor": "pool/0",
        "start": 1.5,
        "stop": 2.5,
        "how": "fast",
    }
    event = event_from_json(unknown)
    assert isinstance(event, UnknownEvent)
    assert (event.kind, event.start, event.extra) == ("teleport", 1.5, {"how": "fast"})
    assert event.to_json() == unknown


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "step", "version": 1},  # a required field is gone
        {"kind": "sync", "version": "seven"},  # a type changed
        {"kind": "rollout", "start": 3.0, "stop": 1.0},
        {"kind": "rollout", "start": "soon"},
        {"kind": "fault", "fault": {"name": "x"}},
        {},
    ],
)
def test_an_event_that_lost_its_shape_is_kept_not_a_crash(fields: dict) -> None:
    event = event_from_json(fields)
    assert isinstance(event, UnknownEvent)
    kept = event.to_json()
    assert {k: kept[k] for k in fields} == fields


def test_numbers_of_numpy_and_zero_dimensional_arrays_are_taken() -> None:
    event = StepEvent(
        step=np.int32(4),  # type: ignore[arg-type]
        version=np.array(4),  # type: ignore[arg-type]
        loss=np.float32(0.5),  # type: ignore[arg-type]
        skipped=np.bool_(True),  # type: ignore[arg-type]
        versions={np.int64(3): np.int64(7)},  # type: ignore[dict-item]
        groups=np.arange(3),  # type: ignore[arg-type]
    )
    assert (event.step, event.version, event.loss, event.skipped) == (4, 4, 0.5, True)
    assert (event.versions, event.groups) == ({3: 7}, (0, 1, 2))
    json.dumps(event.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StepEvent(step="one", version=1), "step"),  # type: ignore[arg-type]
        (lambda: StepEvent(step=1.5, version=1), "step"),  # type: ignore[arg-type]
        (lambda: StepEvent(step=1, version=1, loss="low"), "loss"),  # type: ignore[arg-type]
        (lambda: StepEvent(step=1, version=1, skipped=1), "skipped"),  # type: ignore[arg-type]
        (lambda: SyncEvent(version=1, replicas="pool/0"), "replicas"),  # type: ignore[arg-type]
        (lambda: FaultEvent(fault=None), "fault"),  # type: ignore[arg-type]
        (lambda: RolloutEvent(versions={"v1": 3}), "versions"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_field_is_named(make, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"\.{field}=") as caught:
        make()
    assert caught.value.fields["field"] == field


def test_an_event_that_stops_before_it_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="before it starts"):
        RolloutEvent(start=2.0, stop=1.0)


def test_staleness_is_trainer_minus_token_version() -> None:
    event = StepEvent(step=9, version=9, versions={7: 10, 9: 5})
    assert event.staleness == {0: 5, 2: 10}


def test_run_start_pairs_both_clocks() -> None:
    import time

    before = (time.monotonic(), time.time())
    event = RunStart.now("x", config={"lr": 1e-3})
    after = (time.monotonic(), time.time())
    assert before[0] <= event.start <= after[0]
    assert before[1] <= event.wall <= after[1]
    assert event.config == {"lr": 1e-3}


def test_importing_the_record_needs_numpy_only() -> None:
    code = (
        "import sys, jvlab.record._record, jvlab.record._export, jvlab.views._timeline; "
        "print([m for m in ('jax','torch','vllm','pandas','pyarrow','matplotlib','grpc','wandb') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


@given(st.lists(st.floats(width=32) | st.floats(-30, 0, width=32), max_size=50))
def test_float32_is_written_as_its_shortest_text(values: list[float]):
    array = np.array(values, np.float32)
    np.testing.assert_array_equal(shortest(array), [float(str(x)) for x in array])
    np.testing.assert_array_equal(np.array(shortest(array), np.float32), array)


NUMBERS = (
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.integers(0, 9) | st.floats(0, 9),
)


@given(st.one_of([st.lists(kind) for kind in NUMBERS]))
def test_many_numbers_are_taken_as_one_by_one(values: list[float]):
    """A sample's thousands of tokens have a short way; it gives what the long one does."""
    assert plain(values) == plain(tuple(values)) == [plain(v) for v in values]
    json.dumps(plain(values), allow_nan=False)
    assert same(coerce(tuple[float, ...], values), tuple(float(v) for v in values))


@pytest.mark.parametrize("wrong", [[1, 2**63], [True, 1.5], ["1"], [1, None]])
def test_a_wrong_number_among_many_is_refused(wrong: list[object]):
    with pytest.raises(ConfigError, match="tokens"):
        SampleRecord(tokens=wrong)  # type: ignore[arg-type]

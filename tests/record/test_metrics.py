"""Numbers from events, against hand-made runs and brute force over single tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab.record import _metrics as m
from jvlab.record._events import (
    DraftTally,
    Event,
    PauseEvent,
    RewardEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    ScoreEvent,
    StepEvent,
    SyncEvent,
    UnknownEvent,
)
from jvlab.record._record import Record
from tests.record.synthetic import made_up, start


def on_policy() -> list[Event]:
    """Two steps by the book, in whole seconds: generate 4, reward 1, train 2, sync 1, and 2 idle before the first."""
    events: list[Event] = [RunStart(run="book", start=0, stop=0, wall=1e9)]
    for i, t in enumerate((2, 10)):
        events += [
            RolloutEvent(
                actor="pool/0",
                start=t,
                stop=t + 4,
                samples=8,
                tokens=100,
                versions={i: 100},
            ),
            RewardEvent(
                start=t + 4, stop=t + 5, samples=8, mean=0.5, failures=1, timeouts=1
            ),
            StepEvent(
                step=i,
                version=i,
                start=t + 5,
                stop=t + 7,
                tokens=100,
                versions={i: 100},
                reward_mean=i / 2,
                logprob_gap=[1e-5, 5e-3][i],
            ),
            SyncEvent(
                version=i + 1,
                start=t + 7,
                stop=t + 8,
                bytes=3 * 10**9,
                verified=True,
                pause=0.5,
            ),
        ]
    return [*events, RunStop(start=20, stop=20)]


def test_the_time_of_each_step_by_hand() -> None:
    table = m.step_table(on_policy())
    # 0 to 9, then to 17: the first sync is in the second window
    assert table["window_s"].tolist() == [9, 8]
    assert table["generate_s"].tolist() == [4, 4]
    assert table["reward_s"].tolist() == [1, 1]
    assert table["train_s"].tolist() == [2, 2]
    assert table["sync_s"].tolist() == [0, 1]
    assert table["idle_s"].tolist() == [2, 0]
    assert table["overlap_s"].tolist() == [0, 0]
    assert m.summary(on_policy())["time"] == {
        "generate": 8,
        "score": 0,
        "reward": 2,
        "train": 4,
        "sync": 2,
        "overlap": 0,
        "idle": 4,
    }


def test_throughput_and_utilisation_by_hand() -> None:
    found = m.throughput(on_policy())
    assert found["tokens_per_s"] == 200 / 20
    assert found["tokens_per_s_generating"] == 200 / 8
    assert found["samples_per_s"] == 16 / 20
    assert found["steps_per_s"] == 2 / 20
    assert found["sync_gb_per_s"] == 3
    assert m.utilisation(on_policy()) == {
        "pool/0": 8 / 20,
        "reward": 2 / 20,
        "trainer": 4 / 20,
        "pool": 8 / 20,
    }


def test_a_paused_replica_is_not_busy_and_a_score_counts_for_who_did_it() -> None:
    events: list[Event] = [
        RolloutEvent(actor="pool/0", start=0, stop=10),
        # requests overlap: time counts once
        RolloutEvent(actor="pool/0", start=5, stop=10),
        RolloutEvent(actor="pool/1", start=0, stop=5),
        PauseEvent(start=2, stop=4, replicas=("pool/0",)),
        PauseEvent(start=4, stop=5),  # all of them
        ScoreEvent(actor="trainer", start=6, stop=7),
    ]
    found = m.utilisation(events)
    assert found["pool/0"] == pytest.approx(0.7)
    assert found["pool/1"] == pytest.approx(0.4)
    assert found["pool"] == pytest.approx(0.55)
    assert found["trainer"] == pytest.approx(0.1)


def test_phases_overlap_in_an_asynchronous_run() -> None:
    events: list[Event] = [
        RunStart(start=0, stop=0, wall=1.0),
        RolloutEvent(actor="pool/0", start=0, stop=10, tokens=10),
        RolloutEvent(actor="pool/1", start=1, stop=8, tokens=10),
        RewardEvent(start=3, stop=5),
        StepEvent(step=0, version=0, start=4, stop=9),
    ]
    split = m.step_times(events)
    assert split.busy["generate"].tolist() == [9]
    assert split.together[("generate",)].tolist() == [3]
    assert split.together[("generate", "reward")].tolist() == [1]
    assert split.together[("generate", "reward", "train")].tolist() == [1]
    assert split.together[("generate", "train")].tolist() == [4]
    assert split.overlap.tolist() == [6]


steps_of_tokens = st.lists(st.lists(st.integers(0, 6), max_size=40), max_size=12)


@given(steps_of_tokens)
def test_staleness_against_one_token_at_a_time(ages: list[list[int]]) -> None:
    events: list[Event] = []
    for i, batch in enumerate(ages):
        versions: dict[int, int] = {}
        for age in batch:
            versions[10 + i - age] = versions.get(10 + i - age, 0) + 1
        events.append(StepEvent(step=i, version=10 + i, versions=versions))
    found = m.staleness(events)
    everything = [age for batch in ages for age in batch]
    assert found.histogram == {
        age: everything.count(age) for age in sorted(set(everything))
    }
    for i, batch in enumerate(ages):
        if batch:
            assert found.mean[i] == pytest.approx(sum(batch) / len(batch))
            assert found.max[i] == max(batch)
        else:
            assert math.isnan(found.mean[i])
            assert math.isnan(found.max[i])
    assert found.tokens.sum() == len(everything)
    assert m.summary(events)["max_staleness"] == max(everything, default=0)


def test_gap_alarm() -> None:
    events = on_policy()
    assert [e.step for e in m.alarms(events)] == [1]
    assert m.alarms(events, threshold=0.1) == []
    own = [RunStart(gap_alarm=0.5, start=0, stop=0), *events[1:]]
    assert m.alarms(own) == []
    unmeasured = [
        StepEvent(step=0, version=0),
        StepEvent(step=1, version=1, logprob_gap=math.inf),
    ]
    assert [e.step for e in m.alarms(unmeasured)] == [1]


def test_summary_by_hand() -> None:
    found = m.summary(on_policy())
    expected = {
        "run": "book",
        "ended": "finished",
        "sessions": 1,
        "seconds": 20,
        "steps": 2,
        "reward_first": 0.0,
        "reward_last": 0.5,
        "samples": 16,
        "tokens": 200,
        "reward_failures": 4,
        "syncs": 2,
        "syncs_verified": 2,
        "sync_bytes": 6 * 10**9,
        "sync_pause_mean_s": 0.5,
        "max_staleness": 0,
        "logprob_gap": 5e-3,
        "alarms": 1,
    }
    assert {k: found[k] for k in expected} == expected


def test_the_pause_between_two_sessions_is_nobodys_time() -> None:
    events = Record.of(
        [
            start(at=100, wall=1000),
            StepEvent(step=0, version=0, start=101, stop=103),
            # another boot, a minute later: its clock began anew
            start(at=7, wall=1060),
            StepEvent(step=1, version=1, start=8, stop=9),
            RunStop(start=10, stop=10),
        ]
    ).events()
    assert m.sessions(events).tolist() == [[0, 3], [60, 63]]
    table = m.step_table(events)
    assert table["window_s"].tolist() == [3, 2]
    assert table["idle_s"].tolist() == [1, 1]
    assert m.summary(events)["seconds"] == 6
    assert m.summary(events)["sessions"] == 2


def test_a_wall_clock_that_was_set_back_does_not_fold_time() -> None:
    events = Record.of(
        [
            start(at=0, wall=1000),
            StepEvent(step=0, version=0, start=0, stop=50),
            start(at=0, wall=1010),
            StepEvent(step=1, version=1, start=1, stop=2),
        ]
    ).events()
    assert [(e.start, e.stop) for e in events] == [(0, 0), (0, 50), (50, 50), (51, 52)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_made_up_run_keeps_its_bound(staleness: int) -> None:
    events = Record.of(made_up(30, staleness)).events()
    table = m.step_table(events)
    assert m.summary(events)["max_staleness"] <= staleness
    split = m.step_times(events)
    whole = sum(split.together.values(), np.zeros(30)) + split.idle
    assert np.allclose(whole, table["window_s"])
    rates = m.rates(events, 17)
    total = sum(e.tokens for e in events if isinstance(e, RolloutEvent))
    assert (rates.generated_tokens * np.diff(rates.edges)).sum() == pytest.approx(total)
    if staleness:
        assert split.overlap.sum() > 0.3 * table["window_s"].sum()


@pytest.mark.parametrize(
    "events",
    [
        [],
        [start()],
        [UnknownEvent(name="x")],
        [StepEvent(step=0, version=0)],
        [UnknownEvent(name="x"), StepEvent(step=0, version=0, start=1, stop=2)],
        [StepEvent(step=0, version=0, start=1, stop=1)],
    ],
)
def test_little_or_nothing_is_no_crash(events: list[Event]) -> None:
    found = m.summary(events)
    assert found["steps"] == sum(isinstance(e, StepEvent) for e in events)
    assert {len(column) for column in m.step_table(events).values()} == {found["steps"]}
    m.rates(events)


def test_ratios_by_staleness() -> None:
    events = [
        StepEvent(
            step=0,
            version=0,
            ratios_by_staleness={0: {"p50": 1.0, "max": 2.0}, 1: {"p50": 0.5}},
        ),
        StepEvent(
            step=1,
            version=1,
            ratios_by_staleness={0: {"p50": 2.0, "max": 5.0}, 1: {"p50": math.nan}},
        ),
    ]
    assert m.ratios_by_staleness(events) == {
        0: {"p50": 1.5, "max": 5.0},
        1: {"p50": 0.5},
    }


def counts(*rows: tuple[str, int, int, int, int]) -> Any:
    """A snapshot whose replicas (name, epoch) report (version, drafted, accepted)."""
    replicas: dict[tuple[str, int], Any] = {}
    for name, epoch, *count in rows:
        drafts = replicas.setdefault((name, epoch), [])
        of = dict(zip(("version", "drafted", "accepted"), count, strict=True))
        drafts.append(SimpleNamespace(**of))
    return SimpleNamespace(
        replicas=[
            SimpleNamespace(
                replica=name, epoch=epoch, stats=SimpleNamespace(drafts=drafts)
            )
            for (name, epoch), drafts in replicas.items()
        ]
    )


def test_acceptance_by_version_is_of_what_was_drafted_then() -> None:
    tally = DraftTally()
    events: list[Event] = []
    for snapshot in (
        counts(("p/0", 1, 0, 10, 5)),
        # two replicas; the first goes on with another version
        counts(("p/0", 1, 0, 12, 5), ("p/0", 1, 1, 4, 4), ("p/1", 1, 1, 6, 1)),
        counts(("p/0", 1, 0, 12, 5), ("p/0", 1, 1, 4, 4), ("p/1", 1, 1, 6, 1)),
        # restarted: it counts from 0 again
        counts(("p/0", 2, 1, 2, 0), ("p/1", 1, 1, 6, 1)),
    ):
        events += tally.events(snapshot)
    assert [(e.actor, e.version, e.drafted) for e in events] == [
        ("p/0", 0, 10),
        ("p/0", 0, 2),
        ("p/0", 1, 4),
        ("p/1", 1, 6),
        ("p/0", 1, 2),
    ], "nothing is counted twice"
    found = m.acceptance(events)
    assert found == {0: 5 / 12, 1: 5 / 12}
    assert Record.of(events).acceptance() == found
    assert m.summary(events)["acceptance"] == found
    assert Record.of([]).acceptance() == {}

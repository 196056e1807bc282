"""The schedule as data, and the flow of groups under it, in simulated time with random delays."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.trainer._schedule import Flow, Schedule, Ticket


@dataclass(frozen=True)
class Made:
    index: int
    oldest: int


@dataclass
class World:
    """What a simulated run did."""

    trained: list[tuple[int, list[Made]]]
    stale: int
    most: int
    generating_while_training: int


def simulate(
    flow: Flow[Made],
    steps: int,
    group_times: list[float],
    train_times: list[float],
    lose: set[int],
) -> World:
    """A pool without limits and one trainer, in simulated time: events by time, everything else is the flow's."""
    out = World([], 0, 0, 0)
    events: list[tuple[float, int, str, object]] = []
    order = itertools.count()
    times, lessons = itertools.cycle(group_times), itertools.cycle(train_times)
    now, training, made = 0.0, False, 0
    flow.synced(flow.next_version)
    per_step = flow.schedule.groups_per_step
    while len(out.trained) < steps:
        while (ticket := flow.start((steps - len(out.trained)) * per_step)) is not None:
            made += 1
            heapq.heappush(
                events,
                (
                    now + next(times),
                    next(order),
                    "group",
                    (ticket, flow.pool_version, made),
                ),
            )
        out.most = max(out.most, flow.outstanding)
        if not training:
            version = flow.next_version
            out.stale += len(flow.remove_stale())
            if (groups := flow.take()) is not None:
                out.trained.append((version, groups))
                training = True
                out.generating_while_training += len(flow.flying)
                heapq.heappush(
                    events, (now + next(lessons), next(order), "trained", version + 1)
                )
                continue
            # start(0) never starts: only to see that nothing moves
            if flow.start(0) is None and not events:
                assert flow.schedule.may_start(
                    flow.next_version, flow.outstanding, flow.pool_version
                ), "deadlock"
                continue
        now, _, kind, what = heapq.heappop(events)
        if kind == "trained":
            training = False
            flow.synced(what)  # type: ignore[arg-type]
        else:
            ticket, version, number = what  # type: ignore[misc]
            if number in lose:
                flow.reject(ticket.index)
            else:
                flow.finish(Made(ticket.index, version))
    return out


delays = st.lists(st.floats(0.01, 50), min_size=1, max_size=12)


@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from(["drop", "regenerate"]),
    delays,
    delays,
    st.sets(st.integers(1, 30), max_size=8),
)
def test_the_bound_holds_whatever_the_delays(
    per_step: int,
    bound: int,
    on_stale: str,
    groups: list[float],
    lessons: list[float],
    lose: set[int],
):
    flow: Flow[Made] = Flow(Schedule(per_step, bound, on_stale), version=7)
    done = simulate(flow, 12, groups, lessons, lose)
    for version, batch in done.trained:
        assert len(batch) == per_step
        assert all(0 <= version - g.oldest <= bound for g in batch)
    assert [v for v, _ in done.trained] == list(range(7, 19)), "one version a step"
    assert done.most <= (bound + 1) * per_step, "back-pressure"
    numbers = [g.index for _, batch in done.trained for g in batch]
    assert len(numbers) == len(set(numbers)), "no group twice"
    if not bound:
        assert done.stale == done.generating_while_training == 0
    if on_stale == "regenerate" and not lose:
        assert sorted(numbers) == list(range(12 * per_step)), "no prompt is passed by"


def test_on_policy_alternates_and_a_bound_overlaps():
    for bound in (0, 1, 2):
        flow: Flow[Made] = Flow(Schedule(2, bound), version=1)
        done = simulate(flow, 10, [1.0], [1.0], set())
        ages = [version - g.oldest for version, batch in done.trained for g in batch]
        assert max(ages) == bound
        assert (done.generating_while_training > 0) == (bound > 0)


def test_a_straggler_is_dropped_or_made_again():
    for on_stale in ("drop", "regenerate"):
        flow: Flow[Made] = Flow(Schedule(1, 1, on_stale), version=1)
        flow.synced(1)
        slow, quick = flow.start(), flow.start()
        assert (slow, quick, flow.start()) == (Ticket(0), Ticket(1), None)
        flow.finish(Made(1, 1))
        assert flow.take() == [Made(1, 1)]
        flow.synced(2)
        third = flow.start()
        assert third is not None
        flow.finish(Made(third.index, 2))
        assert not flow.remove_stale()
        assert flow.take() == [Made(2, 2)]
        flow.synced(3)
        flow.finish(Made(0, 1))
        assert flow.remove_stale() == [Made(0, 1)]
        assert (flow.dropped, flow.regenerated) == (
            (1, 0) if on_stale == "drop" else (0, 1)
        )
        assert flow.start() == (Ticket(3) if on_stale == "drop" else Ticket(0, 1))


def test_pending_is_all_that_has_to_be_made_again():
    flow: Flow[Made] = Flow(
        Schedule(2, 1, "regenerate"), version=1, position=4, pending=(Ticket(1, 2),)
    )
    flow.synced(1)
    assert [flow.start() for _ in range(5)] == [
        Ticket(1, 2),
        Ticket(4),
        Ticket(5),
        Ticket(6),
        None,
    ]
    flow.finish(Made(4, 1))
    assert flow.pending == (Ticket(1, 2), Ticket(4), Ticket(5), Ticket(6))
    flow.finish(Made(1, 1))
    assert flow.take() == [Made(1, 1), Made(4, 1)]
    assert flow.pending == (Ticket(5), Ticket(6))
    assert flow.position == 7


def test_nothing_starts_before_the_first_sync_and_the_last_step_takes_no_extra():
    flow: Flow[Made] = Flow(Schedule(2, 2), version=1)
    assert flow.start() is None
    flow.synced(1)
    assert [flow.start(remaining=3) for _ in range(4)] == [
        Ticket(0),
        Ticket(1),
        Ticket(2),
        None,
    ]


def test_another_bound_while_it_runs():
    flow: Flow[Made] = Flow(Schedule(1, 0), version=1)
    flow.synced(1)
    assert [flow.start(), flow.start()] == [Ticket(0), None]
    flow.limit(1)
    assert [flow.start(), flow.start()] == [Ticket(1), None]


@pytest.mark.parametrize("wrong", [(0, 0, "drop"), (1, -1, "drop"), (1, 0, "keep")])
def test_a_wrong_schedule_is_refused(wrong: tuple[int, int, str]):
    with pytest.raises(ConfigError):
        Schedule(*wrong)

"""The gateway's state machine: table tests, and random event sequences that must keep its promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jvlab.gateway import _registry as reg
from jvlab.gateway._registry import ReplicaState
from tests.fuzzing import examples

SPEC = reg.PoolSpec("p", "m", 2, 1, "auto", "cpu", "{}", "{}")


def fresh(lease: float = 10.0) -> reg.Registry:
    registry = reg.Registry(lease, beat=1.0, missed_beats=3, now=0.0)
    registry.handle(reg.HoldOpened("h"))
    return registry


def launched(ready: bool = True) -> reg.Registry:
    registry = fresh()
    registry.handle(reg.LaunchRequested(SPEC, 0.0))
    if ready:
        for index in range(2):
            registry.handle(reg.Registered(f"p/{index}", f"127.0.0.1:{index}", 1.0))
    return registry


def kinds(instructions: list[reg.Instruction]) -> list[str]:
    return [type(i).__name__ for i in instructions]


def tick_until(registry: reg.Registry, start: float, stop: float) -> list[str]:
    """Ticks as a gateway gives them when it runs."""
    out: list[str] = []
    for step in range(1, round((stop - start) * 4) + 1):
        out += kinds(registry.handle(reg.Tick(start + step / 4)))
    return out


def test_launch_starts_one_process_per_replica():
    registry = fresh()
    out = registry.handle(reg.LaunchRequested(SPEC, 0.0))
    assert out == [reg.StartProcess("p/0", SPEC), reg.StartProcess("p/1", SPEC)]
    assert [r.state for r in registry.replicas()] == [ReplicaState.STARTING] * 2


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (reg.LaunchRequested(SPEC, 0.0), "already"),
        (reg.LaunchRequested(replace(SPEC, pool="q", replicas=0), 0.0), "at least 1"),
        (reg.Registered("p/9", "x", 0.0), "no replica"),
        (reg.PoolCloseRequested("nope"), "no pool"),
        (reg.BeatReceived("p/0", 7, 1.0), "epoch 7"),
    ],
)
def test_refused_events_change_nothing(event: reg.Event, word: str):
    registry = launched()
    before = [replace(r) for r in registry.replicas()]
    with pytest.raises(reg.Refused, match=word):
        registry.handle(event)
    assert list(registry.replicas()) == before


def test_stage_then_ready_then_exit():
    registry = launched(ready=False)
    assert registry.handle(reg.StageSeen("p/0", "weights")) == [reg.Announce("p")]
    assert registry.handle(reg.StageSeen("p/0", "weights")) == []
    registry.handle(reg.Registered("p/0", "a:1", 5.0))
    replica = registry.replica("p/0")
    assert (replica.state, replica.stage, replica.epoch, replica.ready_after) == (
        ReplicaState.READY,
        "ready",
        1,
        5.0,
    )
    # a late look at the log changes nothing
    assert registry.handle(reg.StageSeen("p/0", "weights")) == []
    out = registry.handle(reg.ProcessExited("p/0", "boom", "tail"))
    assert out == [reg.DropWork("p/0", "boom"), reg.Announce("p")]
    assert replica.state is ReplicaState.FAILED
    assert replica.epoch == 2


def test_missed_beats_fence_and_a_return_gets_a_new_epoch():
    registry = launched()
    registry.handle(reg.BeatReceived("p/0", 1, 3.0))
    out = registry.handle(reg.Tick(4.5))  # p/1 was silent for 3.5 s, p/0 for 1.5
    assert kinds(out) == ["DropWork", "Announce"]
    assert registry.replica("p/0").state is ReplicaState.READY
    lost = registry.replica("p/1")
    assert (lost.state, lost.epoch) == (ReplicaState.LOST, 2)
    with pytest.raises(reg.Refused):
        # its old epoch no longer counts
        registry.handle(reg.BeatReceived("p/1", 1, 5.0))
    registry.handle(reg.Registered("p/1", "b:2", 6.0))
    assert (lost.state, lost.epoch) == (ReplicaState.READY, 3)
    registry.handle(reg.BeatReceived("p/1", 3, 6.5))


def test_a_failed_replica_cannot_come_back():
    registry = launched()
    registry.handle(reg.ProcessExited("p/0", "boom", ""))
    with pytest.raises(reg.Refused, match="failed"):
        registry.handle(reg.Registered("p/0", "a:1", 2.0))


def test_closing_a_pool_ends_its_processes_once():
    registry = launched()
    out = registry.handle(reg.PoolCloseRequested("p"))
    assert kinds(out) == [
        "DropWork",
        "EndProcess",
        "DropWork",
        "EndProcess",
        "Announce",
    ]
    assert registry.handle(reg.PoolCloseRequested("p")) == []
    assert registry.handle(reg.ProcessExited("p/0", "ended", "")) == []


def test_lease_runs_only_while_nobody_holds():
    registry = launched()
    assert registry.handle(reg.Tick(2.0)) == []
    registry.handle(reg.HoldClosed("h", 2.0))
    registry.handle(reg.BeatReceived("p/0", 1, 11.0))
    registry.handle(reg.BeatReceived("p/1", 1, 11.0))
    assert tick_until(registry, 2.0, 11.75) == []
    registry.handle(reg.HoldOpened("again"))
    registry.handle(reg.HoldClosed("again", 13.0))
    registry.handle(reg.BeatReceived("p/0", 1, 22.0))
    registry.handle(reg.BeatReceived("p/1", 1, 22.0))
    assert tick_until(registry, 11.75, 22.75) == []
    out = registry.handle(reg.Tick(23.0))
    assert kinds(out)[-1] == "EndLab"
    assert kinds(out).count("EndProcess") == 2
    assert registry.handle(reg.LabCloseRequested("again")) == []  # it ends once


def test_a_detached_lab_has_no_lease():
    registry = fresh()
    registry.handle(reg.Detached())
    registry.handle(reg.HoldClosed("h", 1.0))
    assert registry.handle(reg.Tick(1e9)) == []
    assert kinds(registry.handle(reg.LabCloseRequested("done"))) == ["EndLab"]


def test_a_lab_nobody_ever_held_ends():
    registry = reg.Registry(5.0, 1.0, 3, now=0.0)
    assert registry.handle(reg.Tick(4.9)) == []
    assert kinds(registry.handle(reg.Tick(5.0))) == ["EndLab"]


def test_no_launch_while_closing():
    registry = fresh()
    registry.handle(reg.LabCloseRequested("bye"))
    with pytest.raises(reg.Refused, match="closing"):
        registry.handle(reg.LaunchRequested(SPEC, 1.0))


Process = tuple[str, int]  # replica and run


class RegistryMachine(RuleBasedStateMachine):
    """Random events in any order, by few pools' names, so that many have a predecessor whose processes still end.

    Epochs of a name only grow, ended replicas stay ended, every process started is ended once, and what a process says
    changes no replica but its own. A pool never has more processes than replicas, and no more than `restarts` of one
    are started by themselves between two that somebody asked for, or between two long services.
    """

    def __init__(self) -> None:
        super().__init__()
        self.registry = fresh(lease=20.0)
        self.now, self.holds = 0.0, ["h"]
        self.launched: list[str] = []  # pools
        self.epochs: dict[str, int] = {}
        self.ended: set[Process] = set()
        self.started: list[Process] = []
        self.exited: set[Process] = set()
        self.beats: dict[Process, int] = {}  # the epoch that each process was given
        self.told_to_end: list[Process] = []
        self.restarts: dict[str, int] = {}  # by pool, as launched last
        self.by_themselves: dict[str, int] = {}  # by replica, since it was whole
        self.ready_at: dict[str, float] = {}

    def send(self, event: reg.Event) -> bool:
        was = {r.name: (r.state, r.restart_at) for r in self.registry.replicas()}
        try:
            out = self.registry.handle(event)
        except reg.Refused:
            return False
        fresh = [
            (i.replica, i.spec.run) for i in out if isinstance(i, reg.StartProcess)
        ]
        self.started += fresh
        for name, _ in fresh:
            if isinstance(event, reg.Tick):
                self.by_themselves[name] = self.by_themselves.get(name, 0) + 1
                state, due = was[name]
                assert state is ReplicaState.RESTARTING
                assert self.now >= due, "before its back-off was over"
            else:
                self.by_themselves[name] = 0
        if isinstance(event, reg.Tick):
            for replica in self.registry.replicas():
                served = self.now - self.ready_at.get(replica.name, self.now)
                ready = replica.state is ReplicaState.READY
                if ready and served >= reg.WELL_SECONDS:
                    self.by_themselves[replica.name] = 0
        ending = [i.replica for i in out if isinstance(i, reg.EndProcess)]
        self.told_to_end += [(name, self.registry.replica(name).run) for name in ending]
        return True

    @rule(
        replicas=st.integers(1, 3),
        number=st.integers(1, 3),
        restarts=st.integers(0, 3),
    )
    def launch(self, replicas: int, number: int, restarts: int) -> None:
        pool = f"p{number}"
        self.launched.append(pool)
        spec = replace(SPEC, pool=pool, replicas=replicas, restarts=restarts)
        if self.send(reg.LaunchRequested(spec, self.now)):
            self.restarts[pool] = restarts

    @precondition(lambda self: self.launched)
    @rule(data=st.data(), wanted=st.integers(1, 3))
    def scale(self, data: st.DataObject, wanted: int) -> None:
        pool = data.draw(st.sampled_from(self.launched))
        self.send(reg.ScaleRequested(pool, wanted, frozenset(), self.now))

    @precondition(lambda self: self.launched)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.launched))
        self.send(reg.RestartRequested(pool, f"{pool}/0", self.now))

    @precondition(lambda self: set(self.started) - self.exited)
    @rule(
        data=st.data(),
        what=st.sampled_from(
            ["start", "stage", "register", "exit", "beat", "stale beat"]
        ),
    )
    def process_event(self, data: st.DataObject, what: str) -> None:
        """By any process that has not exited, of a pool that is there or of one before it."""
        name, run = process = data.draw(
            st.sampled_from(sorted(set(self.started) - self.exited))
        )
        known = self.registry.find(name)
        before = None if known is None else replace(known)
        if what == "exit":
            self.exited.add(process)
        epoch = self.beats.get(process, 0)
        accepted = self.send(
            {
                "start": reg.ProcessStarted(name, 1000 + run, run),
                "stage": reg.StageSeen(name, f"stage of {run}", run),
                "register": reg.Registered(name, f"{name} {run}", self.now, run),
                "exit": reg.ProcessExited(name, "boom", "", run),
                "beat": reg.BeatReceived(name, epoch, self.now),
                "stale beat": reg.BeatReceived(name, epoch - 1, self.now),
            }[what]
        )
        if before is None or before.run != run:
            assert self.registry.find(name) == before, (
                "a process changed another's replica"
            )
        elif what == "register" and accepted:
            self.beats[process] = self.registry.replica(name).epoch
            self.ready_at[name] = self.now

    @precondition(lambda self: set(self.started) - self.exited)
    @rule(
        data=st.data(),
        times=st.integers(1, 5),
        wait=st.sampled_from([0.2, 1.0, 5.0]),
    )
    def crash_loop(self, data: st.DataObject, times: int, wait: float) -> None:
        """Comes up and dies, so often in a row that a limit is reached."""
        living = sorted(set(self.started) - self.exited)
        name = data.draw(st.sampled_from(living))[0]
        for _ in range(times):
            known = self.registry.find(name)
            process = (name, -1 if known is None else known.run)
            if process not in set(self.started) - self.exited:
                return
            address = f"{name} {process[1]}"
            if self.send(reg.Registered(name, address, self.now, process[1])):
                self.ready_at[name] = self.now
            self.exited.add(process)
            self.send(reg.ProcessExited(name, "boom", "", process[1]))
            self.tick(wait)

    @rule(seconds=st.floats(0, 5))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.send(reg.Tick(self.now))

    @rule()
    def serve_well(self) -> None:
        """Everybody who is ready stays so for long; held, or the lab would end."""
        self.hold()
        self.now += reg.WELL_SECONDS
        for replica in list(self.registry.replicas()):
            if replica.state in reg.BEATING:
                self.send(reg.BeatReceived(replica.name, replica.epoch, self.now))
        self.send(reg.Tick(self.now))

    @precondition(lambda self: self.launched)
    @rule(data=st.data())
    def close_pool(self, data: st.DataObject) -> None:
        self.send(reg.PoolCloseRequested(data.draw(st.sampled_from(self.launched))))

    @precondition(lambda self: self.launched)
    @rule(data=st.data())
    def relaunch(self, data: st.DataObject) -> None:
        """Closed, and launched again at once: none of its processes has ended."""
        pool = data.draw(st.sampled_from(self.launched))
        self.send(reg.PoolCloseRequested(pool))
        spec = replace(SPEC, pool=pool, replicas=1, restarts=1)
        if self.send(reg.LaunchRequested(spec, self.now)):
            self.restarts[pool] = 1

    @rule()
    def hold(self) -> None:
        self.holds.append("h")
        self.send(reg.HoldOpened("h"))

    @precondition(lambda self: self.holds)
    @rule()
    def let_go(self) -> None:
        self.holds.pop()
        self.send(reg.HoldClosed("h", self.now))

    @invariant()
    def promises(self) -> None:
        for replica in self.registry.replicas():
            process = replica.name, replica.run
            assert replica.epoch >= self.epochs.get(replica.name, 0)
            self.epochs[replica.name] = replica.epoch
            if process in self.ended:
                assert replica.ended
            if replica.ended:
                self.ended.add(process)
            if replica.state is ReplicaState.READY:
                assert replica.address == f"{replica.name} {replica.run}"
            if replica.state in reg.RESTARTABLE:
                assert process in self.exited
            pool = self.registry.pools[replica.pool]
            if pool.closed:
                assert replica.state is not ReplicaState.RESTARTING
            allowed = self.restarts[replica.pool]
            assert self.by_themselves[replica.name] <= allowed, "restarted too often"
            if replica.state is ReplicaState.RESTARTING:
                assert self.by_themselves[replica.name] < allowed
                assert replica.deaths, "it never came up"
        for name, pool in self.registry.pools.items():
            of = [r for r in pool.replicas.values() if not r.ended]
            living = {r.run for r in of}
            ours = set(self.started) - self.exited
            running = {p for p in ours if reg.pool_of(p[0]) == name}
            wanted = [r for r in of if r.state is not ReplicaState.DRAINING]
            assert len(wanted) <= pool.spec.replicas, "more than wanted"
            for process in running - set(self.told_to_end):
                assert process[1] in living, "a process that nobody knows"
        assert len(self.started) == len(set(self.started)), (
            "two processes that nothing tells apart"
        )
        assert len(self.told_to_end) == len(set(self.told_to_end))
        if self.registry.ending:
            # One that failed, and was restarted, has ended by itself.
            assert set(self.started) - set(self.told_to_end) <= self.exited


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


# Names that are used again ------------------------------------------------------------------------------------------


def test_a_relaunched_pool_is_not_failed_by_its_predecessors_exit():
    registry = launched()
    registry.handle(reg.PoolCloseRequested("p"))
    out = registry.handle(reg.LaunchRequested(SPEC, 5.0))
    assert kinds(out) == [
        "Forget",
        "Forget",
        "ForgetPool",
        "StartProcess",
        "StartProcess",
    ]
    run = registry.replica("p/0").run
    assert registry.handle(reg.ProcessStarted("p/0", 7)) == []
    assert registry.handle(reg.StageSeen("p/0", "weights")) == []
    assert registry.handle(reg.ProcessExited("p/0", "ended", "")) == []
    assert [(r.state, r.stage, r.pid) for r in registry.replicas()] == [
        (ReplicaState.STARTING, "process", 0)
    ] * 2
    with pytest.raises(reg.Refused, match="another process is p/0 now"):
        # it came up while it was being ended
        registry.handle(reg.Registered("p/0", "old:1", 6.0))
    registry.handle(reg.Registered("p/0", "new:1", 6.0, run))
    registry.handle(reg.ProcessExited("p/1", "boom", "", registry.replica("p/1").run))
    assert [r.state for r in registry.replicas()] == [
        ReplicaState.READY,
        ReplicaState.FAILED,
    ]


def test_epochs_of_a_name_never_repeat():
    registry = fresh()
    given: list[int] = []
    # more than are listed: what is forgotten counts too
    for second in range(2 * reg.KEPT_CLOSED):
        out = registry.handle(
            reg.LaunchRequested(replace(SPEC, replicas=1), float(second))
        )
        start = next(i for i in out if isinstance(i, reg.StartProcess))
        registry.handle(reg.Registered("p/0", "a:1", float(second), start.spec.run))
        given.append(registry.replica("p/0").epoch)
        registry.handle(reg.PoolCloseRequested("p"))
        for other in range(second % 3 * reg.KEPT_CLOSED):
            registry.handle(
                reg.LaunchRequested(replace(SPEC, pool=f"other-{other}"), float(second))
            )
            registry.handle(reg.PoolCloseRequested(f"other-{other}"))
    assert given == sorted(set(given))


def test_a_thousand_pools_opened_and_closed_leave_the_last_few():
    registry = fresh()
    registry.handle(reg.LaunchRequested(replace(SPEC, pool="stays"), 0.0))
    forgotten: list[str] = []
    for number in range(1000):
        spec = replace(SPEC, pool=registry.free_name())
        started = [
            i
            for i in registry.handle(reg.LaunchRequested(spec, 0.0))
            if isinstance(i, reg.StartProcess)
        ]
        out = registry.handle(reg.PoolCloseRequested(spec.pool))
        forgotten += [i.pool for i in out if isinstance(i, reg.ForgetPool)]
        for start in started[: number % 2]:  # of some the processes exit long after
            assert (
                registry.handle(
                    reg.ProcessExited(start.replica, "ended", "", start.spec.run)
                )
                == []
            )
    last = [f"pool-{number}" for number in range(1001 - reg.KEPT_CLOSED, 1001)]
    assert list(registry.pools) == ["stays", *last]
    assert forgotten == [
        f"pool-{number}" for number in range(1, 1001 - reg.KEPT_CLOSED)
    ]
    assert registry.handle(reg.ProcessExited("pool-1/0", "ended", "")) == []
    assert [r.state for r in registry.pools["stays"].replicas.values()] == [
        ReplicaState.STARTING
    ] * 2
    with pytest.raises(reg.Refused, match="no pool"):
        registry.handle(reg.PoolCloseRequested("pool-1"))


def test_a_free_name_is_nobodys():
    registry = fresh()
    registry.handle(reg.LaunchRequested(replace(SPEC, pool="pool-2"), 0.0))
    names = []
    for _ in range(3):
        names.append(registry.free_name())
        registry.handle(reg.LaunchRequested(replace(SPEC, pool=names[-1]), 0.0))
    assert names == ["pool-1", "pool-3", "pool-4"]
    registry.handle(reg.PoolCloseRequested("pool-4"))
    assert registry.free_name() == "pool-5", "who knows pool-4 means another"


# The gateway's own clock ---------------------------------------------------------------------------------------------


def test_deadline_of_beats_is_not_missed_while_the_gateway_stood_still():
    registry = launched()
    assert tick_until(registry, 1.0, 2.0) == []
    assert registry.handle(reg.Tick(16.0)) == [], (
        "14 s in which it heard nobody are nobody's silence"
    )
    registry.handle(reg.BeatReceived("p/0", 1, 16.2))
    assert tick_until(registry, 16.0, 17.0) == []
    assert "DropWork" in tick_until(registry, 17.0, 19.0), (
        "who is silent from then on is lost as ever"
    )
    assert [r.state for r in registry.replicas()] == [
        ReplicaState.READY,
        ReplicaState.LOST,
    ]


def test_deadline_of_beats_counts_the_silence_before_the_gateway_stood_still():
    registry = launched()
    assert tick_until(registry, 1.0, 3.5) == []  # silent for 2.5 of 3 s
    registry.handle(reg.Tick(20.0))
    assert tick_until(registry, 20.0, 21.0).count("DropWork") <= 2
    assert [r.state for r in registry.replicas()] == [ReplicaState.LOST] * 2


def test_deadline_of_the_lease_is_not_over_while_the_gateway_stood_still():
    registry = launched()
    registry.handle(reg.HoldClosed("h", 2.0))
    for name in ("p/0", "p/1"):
        registry.handle(reg.BeatReceived(name, 1, 2.0))
    assert tick_until(registry, 2.0, 3.0) == []
    assert registry.handle(reg.Tick(60.0)) == [], "a holder could not come back"
    registry.handle(reg.HoldOpened("h"))
    assert not registry.ending


def test_deadline_or_death_an_unreachable_replica_is_lost_at_once():
    registry = launched()
    out = registry.handle(reg.Unreachable("p/0", 1, "the engine died"))
    assert out == [reg.DropWork("p/0", "the engine died"), reg.Announce("p")]
    lost = registry.replica("p/0")
    assert (lost.state, lost.epoch, lost.cause) == (
        ReplicaState.LOST,
        2,
        "the engine died",
    )
    assert registry.handle(reg.Unreachable("p/0", 1, "again")) == []
    assert registry.handle(reg.Unreachable("p/9", 1, "who?")) == []
    registry.handle(reg.Registered("p/0", "a:1", 5.0))
    assert registry.handle(reg.Unreachable("p/0", 1, "an old call")) == [], (
        "of what it was before"
    )
    assert lost.state is ReplicaState.READY


# Restarts -----------------------------------------------------------------------------------------------------------


def restarting(restarts: int = 2, **spec: Any) -> reg.Registry:
    """A pool of one replica that is ready."""
    registry = fresh()
    more = {"replicas": 1, "restarts": restarts, **spec}
    registry.handle(reg.LaunchRequested(replace(SPEC, **more), 0.0))
    registry.handle(reg.Registered("p/0", "a:1", 1.0))
    return registry


def dies(registry: reg.Registry, now: float, cause: str = "boom") -> list[str]:
    """The replica's process exits at this time."""
    registry.handle(reg.Tick(now))
    run = registry.replica("p/0").run
    return kinds(registry.handle(reg.ProcessExited("p/0", cause, f"log {cause}", run)))


def comes_up(registry: reg.Registry, now: float) -> None:
    """What its new process says."""
    run = registry.replica("p/0").run
    registry.handle(reg.Registered("p/0", f"a:{run}", now, run))


def test_a_replica_that_dies_is_started_again_after_its_back_off():
    registry = restarting()
    assert dies(registry, 2.0) == ["DropWork", "Announce"]
    replica = registry.replica("p/0")
    assert (replica.state, replica.stage) == (ReplicaState.RESTARTING, "restarting")
    assert (replica.cause, registry.restarts_left(replica)) == ("boom", 1)
    assert registry.handle(reg.Tick(2.9)) == []
    (start, told) = registry.handle(reg.Tick(3.0))
    assert isinstance(start, reg.StartProcess)
    assert told == reg.Announce("p")
    fresh = registry.replica("p/0")
    assert (fresh.state, fresh.cause) == (ReplicaState.STARTING, "boom")
    assert start.spec.run == fresh.run == replica.epoch
    assert fresh.deaths == (reg.Death("boom", "log boom"),)
    with pytest.raises(reg.Refused, match="another process is p/0 now"):
        registry.handle(reg.Registered("p/0", "old:1", 3.1, 0))
    comes_up(registry, 9.0)
    assert (fresh.state, fresh.cause) == (ReplicaState.READY, "")


def test_each_death_waits_longer_and_the_last_leaves_every_reason():
    registry = restarting(restarts=2)
    dies(registry, 2.0, "the first")
    registry.handle(reg.Tick(3.0))
    comes_up(registry, 4.0)
    dies(registry, 5.0, "the second")
    assert registry.handle(reg.Tick(6.9)) == []
    assert kinds(registry.handle(reg.Tick(7.0))) == ["StartProcess", "Announce"]
    # a try that does not come up counts too
    dies(registry, 8.0, "the third")
    replica = registry.replica("p/0")
    assert replica.state is ReplicaState.FAILED
    text = "the third (it was restarted 2 times before, after: the first; the second)"
    assert replica.cause == text
    assert replica.log_tail == "log the third"
    assert tick_until(registry, 8.0, 100.0) == [], "and that was it"


def test_back_off_is_bounded_and_no_restart_is_lost_to_a_large_number():
    registry = restarting(restarts=reg.MAX_RESTARTS)
    now = 2.0
    waits = []
    for _ in range(reg.MAX_RESTARTS):
        dies(registry, now)
        waits.append(registry.replica("p/0").restart_at - now)
        now += waits[-1]
        assert "StartProcess" in kinds(registry.handle(reg.Tick(now)))
    assert tuple(waits[: len(reg.BACK_OFF)]) == reg.BACK_OFF
    assert set(waits[len(reg.BACK_OFF) :]) == {reg.BACK_OFF[-1]}
    dies(registry, now)
    assert registry.replica("p/0").state is ReplicaState.FAILED
    for wrong in (-1, reg.MAX_RESTARTS + 1):
        spec = replace(SPEC, pool="q", restarts=wrong)
        with pytest.raises(reg.Refused, match=f"{wrong} restarts"):
            registry.handle(reg.LaunchRequested(spec, now))


def test_a_long_service_gives_all_tries_back():
    registry = restarting(restarts=1)
    dies(registry, 2.0)
    registry.handle(reg.Tick(3.0))
    comes_up(registry, 4.0)
    replica = registry.replica("p/0")

    def beats(start: float, stop: float) -> None:
        for second in range(int(start), int(stop)):
            registry.handle(reg.BeatReceived("p/0", replica.epoch, float(second)))
            registry.handle(reg.Tick(float(second)))

    beats(4.0, 4.0 + reg.WELL_SECONDS)
    assert registry.restarts_left(replica) == 0, "not a second before"
    registry.handle(reg.BeatReceived("p/0", replica.epoch, 4.0 + reg.WELL_SECONDS))
    out = registry.handle(reg.Tick(4.0 + reg.WELL_SECONDS))
    assert out == [reg.Announce("p")]
    assert (registry.restarts_left(replica), replica.deaths) == (1, ())
    assert replica.restarts == 1, "of all its life"
    dies(registry, 605.0)
    assert registry.replica("p/0").state is ReplicaState.RESTARTING


def test_a_launch_that_fails_is_not_repeated():
    registry = fresh()
    registry.handle(reg.LaunchRequested(replace(SPEC, replicas=1, restarts=3), 0.0))
    dies(registry, 1.0, "no such model")
    replica = registry.replica("p/0")
    assert (replica.state, replica.cause) == (ReplicaState.FAILED, "no such model")
    assert tick_until(registry, 1.0, 60.0) == []
    # somebody who starts it by hand has all tries, once it has come up
    registry.handle(reg.RestartRequested("p", "p/0", 61.0))
    dies(registry, 62.0, "again")
    assert registry.replica("p/0").state is ReplicaState.FAILED


def test_a_restart_by_hand_does_not_wait_and_resets_the_count():
    registry = restarting(restarts=1)
    dies(registry, 2.0)
    assert kinds(registry.handle(reg.RestartRequested("p", "p/0", 2.1))) == [
        "StartProcess",
        "Announce",
    ]
    assert "StartProcess" not in tick_until(registry, 2.1, 10.0), "one, not two"
    comes_up(registry, 10.0)
    replica = registry.replica("p/0")
    assert (registry.restarts_left(replica), replica.restarts) == (1, 1)
    with pytest.raises(reg.Refused, match="only a replica that failed"):
        registry.handle(reg.RestartRequested("p", "p/0", 11.0))


@pytest.mark.parametrize("how", ["close", "end", "scale", "lease", "drain"])
def test_who_is_not_wanted_any_more_is_not_started_again(how: str):
    registry = restarting(restarts=3, replicas=2)
    registry.handle(reg.Registered("p/1", "b:1", 1.0))
    if how == "drain":
        registry.handle(reg.ScaleRequested("p", 1, frozenset({"p/0", "p/1"}), 2.0))
        draining = registry.replica("p/1")
        assert draining.state is ReplicaState.DRAINING
        registry.handle(reg.ProcessExited("p/1", "boom", "", draining.run))
        assert registry.find("p/1") is None
    else:
        dies(registry, 2.0)
        events: dict[str, reg.Event] = {
            "close": reg.PoolCloseRequested("p"),
            "end": reg.LabCloseRequested("over"),
            "scale": reg.ScaleRequested("p", 1, frozenset({"p/1"}), 2.5),
            "lease": reg.HoldClosed("h", 2.0),
        }
        registry.handle(events[how])
        if how == "scale":
            assert list(registry.pool("p").replicas) == ["p/1"]
    # with "lease" the restart falls due before the lab ends, and is ended with it
    started = tick_until(registry, 2.5, 30.0).count("StartProcess")
    assert started == (1 if how == "lease" else 0)
    assert registry.ending == (how in ("end", "lease"))


def test_scaled_up_counts_one_that_waits_for_its_back_off():
    registry = restarting(restarts=3)
    dies(registry, 2.0)
    out = registry.handle(reg.ScaleRequested("p", 2, frozenset(), 2.1))
    assert [i.replica for i in out if isinstance(i, reg.StartProcess)] == ["p/1"]
    out = registry.handle(reg.Tick(3.0))
    assert [i.replica for i in out if isinstance(i, reg.StartProcess)] == ["p/0"]


def test_ray_starts_its_own_again():
    registry = restarting(restarts=3, place="ray")
    dies(registry, 2.0)
    replica = registry.replica("p/0")
    assert (replica.state, registry.restarts_left(replica)) == (ReplicaState.FAILED, 0)
    assert tick_until(registry, 2.0, 60.0) == []


def test_one_that_is_dying_is_waited_for_but_not_for_ever():
    registry = restarting(restarts=1)
    registry.handle(reg.Tick(2.0))
    assert registry.returning("p") == []
    registry.handle(reg.Unreachable("p/0", 1, "its core died"))
    assert [r.name for r in registry.returning("p")] == ["p/0"]
    told = [reg.Tick(2.0 + reg.EXIT_SECONDS - 0.1), reg.Tick(2.0 + reg.EXIT_SECONDS)]
    assert [registry.handle(tick) for tick in told] == [[], [reg.Announce("p")]]
    assert registry.returning("p") == [], "its process lives on, out of reach"
    dies(registry, 20.0)
    assert [r.name for r in registry.returning("p")] == ["p/0"]
    registry.handle(reg.Tick(21.0))
    assert [r.name for r in registry.returning("p")] == ["p/0"]
    comes_up(registry, 22.0)
    registry.handle(reg.Unreachable("p/0", registry.replica("p/0").epoch, "again"))
    assert registry.returning("p") == [], "no try is left"

"""The sync state machine: tables of transitions, and a model check with replicas that really hold mixtures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jvlab.gateway import _registry as reg
from jvlab.gateway import _sync_types as sync
from jvlab.gateway._sync import PoolSync, segments
from jvlab.gateway._sync_types import Standing
from jvlab.wire._sync_words import STAGE_AFTER, Phase, Stage, Terms
from tests.fuzzing import examples
from tests.gateway.replica_memory import Broken, Differs, ReplicaMemory

P = Phase
FIRST = {"direct": (P.PREPARE, P.HALT, P.MOVE), "staged": (P.PREPARE, P.MOVE)}
LAST = {
    "direct": (P.VERIFY, P.COMMIT, P.GO_ON),
    "staged": (P.VERIFY, P.HALT, P.COMMIT, P.GO_ON),
}
STEPS = {mode: FIRST[mode] + LAST[mode] for mode in FIRST}
NAMES = ("p/0", "p/1", "p/2")


class Bench:
    """A machine with model replicas: carries out its instructions when told to."""

    def __init__(self, replicas: int = 2) -> None:
        self.machine = PoolSync("p")
        self.memory = {name: ReplicaMemory() for name in NAMES[:replicas]}
        self.sends: dict[int, sync.Send] = {}
        self.replies: list[sync.Reply] = []
        self.released: list[str] = []
        self.calls: list[tuple[str, ...]] = []
        self.now, self.number, self.terms = 0.0, 0, Terms(1)
        self.seen = 0
        for name in self.memory:
            self.feed(sync.ReplicaJoined(name, 0, False))

    def feed(self, event: sync.SyncEvent) -> None:
        for instruction in self.machine.handle(event):
            match instruction:
                case sync.Send(ticket, replica, _, phases):
                    self.sends[ticket] = instruction
                    self.calls.append((replica, *(phase.name for phase in phases)))
                case sync.Cancel(ticket):
                    self.sends.pop(ticket)
                case sync.Reply():
                    self.replies.append(instruction)
                case sync.Release(link):
                    self.released.append(link)
        self.check()

    def check(self) -> None:
        """The promises, after every event."""
        machine, asked = self.machine, {send.replica for send in self.sends.values()}
        for name in machine.members:
            if machine.standing(name) is Standing.SERVING:
                content = self.memory[name].content
                assert content is not None, f"{name} serves a mixture"
                assert content >= machine.version, (
                    f"{name} serves {content}, older than {machine.version}"
                )
                assert name in asked or content == machine.version, (
                    f"{name} serves {content}, never committed"
                )
        assert machine.version >= self.seen
        if machine.version > self.seen:
            whole = [
                m
                for m in self.memory.values()
                if m.content == m.version == machine.version
            ]
            assert whole, "the version moved, and nobody holds it"
            if machine.terms is not None and machine.terms.require == "all":
                held = [
                    (self.memory[name].content, self.memory[name].shadow)
                    for name in machine.participants
                ]
                assert all(machine.version in pair for pair in held), (
                    "it moved before all had matched"
                )
        self.seen = machine.version

    def open(
        self,
        link: str = "a",
        replicas: tuple[str, ...] | None = None,
        lease: float = 10.0,
    ) -> sync.Reply:
        self.number += 1
        names = tuple(self.machine.members) if replicas is None else replicas
        self.feed(
            sync.Opened(link, f"trainer {link}", self.number, names, lease, self.now)
        )
        self.drain()
        return self.replies[-1]

    def order(
        self, phases: tuple[Phase, ...], link: str = "a", blind: bool = False
    ) -> None:
        self.number += 1
        digests = frozenset() if blind else frozenset(NAMES)
        self.feed(
            sync.Ordered(link, self.number, phases, self.now, self.terms, digests)
        )

    def do(self, *phases: Phase, link: str = "a") -> sync.Reply:
        self.order(phases, link)
        self.drain()
        return self.replies[-1]

    def execute(
        self, send: sync.Send, upto: int | None = None, arrived: bool = True
    ) -> tuple[str, str, str]:
        """(kind, failed phase, error) after the first `upto` phases."""
        memory = self.memory[send.replica]
        for phase in send.phases[:upto]:
            self.check()
            try:
                if phase is P.PREPARE:
                    memory.prepare(self.terms.version, self.terms.mode)
                elif phase not in (P.OPEN, P.CLOSE):
                    memory.run(phase, arrived)
            except Broken as error:
                return (
                    "mismatch" if isinstance(error, Differs) else "failed",
                    phase.name.lower(),
                    str(error),
                )
        return "ok", "", ""

    def answer(self, ticket: int, kind: str, failed: str = "", error: str = "") -> None:
        memory = self.memory[self.sends.pop(ticket).replica]
        self.feed(
            sync.Answered(
                ticket, kind, self.now, failed, error, memory.state, memory.version
            )
        )

    def deliver(self, ticket: int, arrived: bool = True) -> None:
        self.answer(ticket, *self.execute(self.sends[ticket], None, arrived))

    def drain(self) -> None:
        while self.sends:
            self.deliver(next(iter(self.sends)))

    def ticket(self, replica: str) -> int:
        return next(t for t, send in self.sends.items() if send.replica == replica)

    def states(self) -> dict[str, str]:
        return {o.replica: o.state for o in self.replies[-1].outcomes}

    def standings(self) -> list[str]:
        return [self.machine.standing(name).value for name in self.machine.members]


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("require", ["all", "any"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_sync_commits(mode: str, require: str, replicas: int, stepwise: bool):
    bench = Bench(replicas)
    assert bench.open().code == ""
    bench.terms = Terms(3, mode=mode, require=require)
    for phases in (
        [(phase,) for phase in STEPS[mode]] if stepwise else [FIRST[mode], LAST[mode]]
    ):
        assert bench.machine.version == (3 if phases == (P.GO_ON,) else 0)
        assert bench.do(*phases).code == "", phases
    assert set(bench.states().values()) == {"committed"}
    assert (bench.machine.version, bench.machine.stage) == (3, Stage.IDLE)
    assert all(
        m.content == m.version == 3 and not m.halted for m in bench.memory.values()
    )
    assert bench.standings() == ["serving"] * replicas


@pytest.mark.parametrize(
    ("phases", "terms", "count", "groups"),
    [
        (LAST["direct"], Terms(1), 1, ["VERIFY COMMIT GO_ON"]),
        (LAST["direct"], Terms(1), 2, ["VERIFY", "COMMIT GO_ON"]),
        (LAST["direct"], Terms(1, require="any"), 2, ["VERIFY COMMIT GO_ON"]),
        (LAST["staged"], Terms(1, mode="staged"), 1, ["VERIFY HALT COMMIT GO_ON"]),
        (LAST["staged"], Terms(1, mode="staged"), 2, ["VERIFY", "HALT COMMIT GO_ON"]),
        (
            LAST["staged"],
            Terms(1, mode="staged", pause="wait"),
            2,
            ["VERIFY", "HALT", "COMMIT GO_ON"],
        ),
        (FIRST["staged"], Terms(1, mode="staged"), 2, ["PREPARE MOVE"]),
        (FIRST["direct"], Terms(1), 1, ["PREPARE HALT MOVE"]),
        (FIRST["direct"], Terms(1), 2, ["PREPARE HALT", "MOVE"]),
        ((P.COMMIT, P.GO_ON), Terms(1), 2, ["COMMIT GO_ON"]),
    ],
)
def test_which_phases_share_a_call(phases, terms: Terms, count: int, groups: list[str]):
    assert [
        " ".join(p.name for p in group) for group in segments(phases, terms, count)
    ] == groups


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_phase_out_of_order_is_refused_and_changes_nothing(mode: str):
    for done in range(len(STEPS[mode])):
        for wrong in [p for p in STEPS[mode] if p is not STEPS[mode][done]]:
            bench = Bench()
            bench.open()
            bench.terms = Terms(1, mode=mode)
            for phase in STEPS[mode][:done]:
                assert bench.do(phase).code == ""
            before, memory = (
                bench.machine._snapshot(),
                {n: replace(m) for n, m in bench.memory.items()},
            )
            reply = bench.do(wrong)
            assert (reply.code, bench.sends) == ("refused", {})
            assert "ABANDON may follow" in reply.remedy or "PREPARE" in reply.remedy
            assert (bench.machine._snapshot(), bench.memory) == (before, memory)
            for phase in STEPS[mode][done:]:
                assert bench.do(phase).code == "", (
                    "the sync goes on as if nothing had been said"
                )


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        (Terms(2), "version 2 is not larger than the pool's, 2"),
        (Terms(1), "version 1 is not larger than the pool's, 2"),
        (Terms(3, mode="sideways"), "mode='sideways'"),
        (Terms(3, verify="perhaps"), "verify='perhaps'"),
        (Terms(3, require="most"), "require='most'"),
        (Terms(3, replicas=("p/7",)), "not ready: p/7"),
    ],
)
def test_terms_that_cannot_be_are_refused(terms: Terms, word: str):
    bench = Bench()
    bench.open()
    bench.terms = Terms(2)
    bench.do(*STEPS["direct"])
    bench.terms = terms
    reply = bench.do(P.PREPARE)
    assert reply.code == "refused"
    assert word in reply.error
    assert bench.machine.stage is Stage.IDLE


def test_verify_without_digests_is_refused():
    bench = Bench()
    bench.open()
    bench.do(*FIRST["direct"])
    bench.order(LAST["direct"], blind=True)
    assert bench.replies[-1].code == "refused"
    assert "without digests for p/0, p/1" in bench.replies[-1].error
    assert bench.machine.version == 0


def test_a_second_trainer_is_told_who_holds_the_pool():
    bench = Bench()
    bench.open("a")
    bench.now = 42.0
    reply = bench.open("b")
    assert reply.code == "busy"
    assert "held by trainer a, for 42 s" in reply.error
    assert bench.do(P.PREPARE, link="b").code == "refused"
    bench.feed(sync.Ended("a", 43.0))
    bench.drain()
    assert bench.released == ["a"]
    assert bench.open("b").code == ""


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize(
    "how", ["failed", "mismatch", "deadline", "lost", "left", "crash"]
)
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("require", ["all", "any"])
def test_each_failure_in_each_phase(mode: str, how: str, at: int, require: str):
    """p/1 fails in phase `at`; whatever then stands must be safe, and the next sync must heal it."""
    bench = Bench()
    bench.open()
    bench.terms = Terms(1, mode=mode, require=require)
    for phase in STEPS[mode][:at]:
        assert bench.do(phase).code == ""
    phase = STEPS[mode][at]
    bench.order((phase,))
    ticket = bench.ticket("p/1")
    if phase is P.MOVE:  # it began, and broke in the middle
        bench.execute(bench.sends[ticket])
    if how in ("left", "crash"):
        bench.feed(sync.Left("p/1", "killed"))
    else:
        bench.answer(
            ticket,
            how,
            phase.name.lower() if how in ("failed", "mismatch") else "",
            "boom",
        )
    bench.drain()
    reply, states = bench.replies[-1], bench.states()
    assert (reply.code == "") == (require == "any"), reply
    committed = phase in (P.COMMIT, P.GO_ON) or require == "any"
    # A MOVE that was cancelled before it reached p/0 has written nothing there, and p/0 says so.
    moved = {
        name: mode == "direct" and (at > 2 or bench.memory[name].dirty)
        for name in bench.memory
    }
    if committed:
        assert states["p/0"] in ("ready", "committed")
    else:
        assert states["p/0"] == ("dirty" if moved["p/0"] else "old")
        assert bench.machine.stage is Stage.IDLE
    if how in ("left", "crash", "lost"):
        assert states["p/1"] == "lost"
    elif phase is P.GO_ON:
        assert states["p/1"] == "committed"
    else:
        assert states["p/1"] == (
            "dirty" if moved["p/1"] else "stale" if phase is P.COMMIT else "old"
        )
    assert bench.machine.version == (1 if phase in (P.COMMIT, P.GO_ON) else 0)
    if how == "crash":
        bench.memory["p/1"] = ReplicaMemory()
    if how in ("left", "crash"):
        memory = bench.memory["p/1"]
        memory.run(P.ABANDON)
        bench.feed(sync.ReplicaJoined("p/1", memory.version, memory.dirty))
    bench.feed(sync.Ended("a", bench.now))
    bench.drain()
    assert bench.open("b").code == ""
    bench.terms = Terms(5, mode=mode)
    assert bench.do(*FIRST[mode], link="b").code == ""
    assert bench.do(*LAST[mode], link="b").code == ""
    assert bench.standings() == ["serving", "serving"]
    assert [m.content for m in bench.memory.values()] == [5, 5]


def test_a_commit_whose_answer_was_late_still_counts():
    bench = Bench(1)
    bench.open()
    bench.do(*FIRST["direct"])
    bench.order(LAST["direct"])
    # VERIFY and COMMIT, then silence
    bench.execute(bench.sends[bench.ticket("p/0")], 2)
    bench.answer(bench.ticket("p/0"), "deadline", "", "no answer")
    bench.drain()
    assert bench.replies[-1].code == "deadline"
    assert bench.states() == {"p/0": "committed"}
    assert (bench.machine.version, bench.standings()) == (1, ["serving"])
    assert not bench.memory["p/0"].halted
    assert [(o.failed, o.error) for o in bench.replies[-1].outcomes] == [
        ("verify/commit/go_on", "no answer")
    ]
    assert bench.do(*STEPS["direct"]).code == "refused", "version 1 is taken"


def test_a_replica_lost_between_orders_ends_the_sync_and_the_next_order_is_told():
    bench = Bench()
    bench.open()
    bench.do(*FIRST["direct"])
    bench.feed(sync.Left("p/1", "killed"))
    assert bench.calls[-1] == ("p/0", "ABANDON")
    bench.order(LAST["direct"])  # while the abandon is under way
    bench.drain()
    reply = bench.replies[-1]
    assert reply.code == "lost"
    assert "p/1 in moving: killed" in reply.error
    assert bench.states() == {"p/0": "dirty", "p/1": "lost"}


def test_the_lease_abandons_and_says_so():
    bench = Bench()
    bench.open(lease=10.0)
    bench.terms = Terms(1, mode="staged")
    bench.do(P.PREPARE)
    bench.feed(sync.SyncTick(10.0))
    assert bench.sends == {}
    bench.feed(sync.SyncTick(10.5))
    bench.drain()
    assert bench.machine.stage is Stage.IDLE
    reply = bench.do(P.MOVE)
    assert reply.code == "deadline"
    assert "no order came for 10 s while prepared" in reply.error
    assert bench.states() == {"p/0": "old", "p/1": "old"}
    assert bench.do(*STEPS["staged"]).code == "", "the link is still the holder's"


def test_a_replica_that_cannot_be_told_to_abandon_is_dirty_and_told_again():
    bench = Bench()
    bench.open()
    bench.terms = Terms(1, mode="staged")
    bench.do(*FIRST["staged"])
    bench.order((P.ABANDON,))
    bench.answer(bench.ticket("p/1"), "deadline", "", "silent")
    bench.drain()
    assert bench.states() == {"p/0": "old", "p/1": "dirty"}
    assert bench.standings() == ["serving", "dirty"]
    bench.open()
    assert ("p/1", "ABANDON") in bench.calls[-2:]
    assert bench.standings() == ["serving", "serving"], (
        "it answered: it holds the old version"
    )


def test_a_replica_that_left_in_the_middle_gets_no_work_until_it_has_been_told():
    bench = Bench()
    bench.open()
    bench.terms = Terms(1, mode="staged")
    bench.do(*FIRST["staged"], P.VERIFY, P.HALT)
    bench.feed(sync.Left("p/1", "no heartbeat"))
    bench.drain()
    bench.feed(sync.ReplicaJoined("p/1", 0, False))
    assert bench.memory["p/1"].halted
    assert bench.standings() == ["serving", "dirty"]
    bench.feed(sync.SyncTick(1.0))
    assert bench.calls[-1] == ("p/1", "ABANDON")
    bench.feed(sync.SyncTick(2.0))
    assert len(bench.sends) == 1, "asked once at a time"
    bench.drain()
    assert not bench.memory["p/1"].halted
    assert bench.standings() == ["serving", "serving"]


def test_a_replica_that_left_before_it_heard_the_abandon_is_told():
    bench = Bench()
    bench.open()
    bench.terms = Terms(1, require="any")
    bench.order((P.PREPARE, P.HALT))
    bench.execute(bench.sends[bench.ticket("p/1")], 1)
    bench.answer(bench.ticket("p/1"), "failed", "halt", "boom")
    bench.feed(sync.Left("p/1", "no heartbeat"))  # its ABANDON is under way
    bench.drain()
    bench.feed(sync.ReplicaJoined("p/1", 0, False))
    bench.feed(sync.SyncTick(1.0))
    bench.drain()
    assert bench.memory["p/1"].stage is Stage.IDLE
    assert bench.machine.standing("p/1") is Standing.SERVING


def test_while_bytes_move_nothing_is_routed_and_work_waits():
    bench = Bench()
    bench.open()
    bench.do(P.PREPARE, P.HALT)
    assert bench.standings() == ["serving"] * 2, (
        "halted only: requests wait in the engine"
    )
    bench.order((P.MOVE,))
    assert bench.standings() == ["syncing"] * 2, (
        "from the sending of MOVE on, not from its answer"
    )
    bench.drain()
    bench.do(P.VERIFY)
    bench.order((P.COMMIT,))
    bench.deliver(bench.ticket("p/0"))
    assert bench.standings() == ["serving", "syncing"]
    bench.drain()
    assert bench.standings() == ["serving"] * 2


def test_a_newcomer_is_stale_until_it_is_synced():
    bench = Bench()
    bench.open()
    bench.do(*STEPS["direct"])
    bench.memory["p/2"] = ReplicaMemory()
    bench.feed(sync.ReplicaJoined("p/2", 0, False))
    assert bench.standings() == ["serving", "serving", "stale"]
    bench.terms = Terms(2)
    reply = bench.do(P.PREPARE)
    assert (reply.code, reply.error) == ("refused", "the link is not open on p/2")
    bench.open()
    assert bench.do(*STEPS["direct"]).code == ""
    assert bench.standings() == ["serving"] * 3
    bench.feed(sync.Left("p/0", "silent"))
    bench.feed(sync.ReplicaJoined("p/0", 2, False))
    assert bench.machine.standing("p/0") is Standing.SERVING, (
        "it came back with the pool's version"
    )
    bench.feed(sync.Left("p/0", "silent"))
    bench.feed(sync.ReplicaJoined("p/0", 2, True))
    assert bench.machine.standing("p/0") is Standing.DIRTY


def test_check_changes_nothing_and_tells_what_differs():
    bench = Bench()
    bench.open()
    assert bench.do(P.CHECK).code == ""
    # memory that changes by itself is just what CHECK is for
    bench.check = lambda: None
    bench.memory["p/1"].content = 9
    assert bench.do(P.CHECK).code == "mismatch"
    assert bench.standings() == ["serving"] * 2


@pytest.mark.parametrize(
    ("kind", "phase"), [("lost", P.VERIFY), ("lost", P.COMMIT), ("deadline", P.COMMIT)]
)
def test_who_may_hold_either_version_gets_no_work_until_it_tells(
    kind: str, phase: Phase
):
    bench = Bench(1)
    bench.open()
    bench.terms = Terms(1, mode="staged")
    steps = STEPS["staged"]
    bench.do(*steps[: steps.index(phase)])
    bench.order((phase,))
    bench.answer(bench.ticket("p/0"), kind, "", "boom")
    assert bench.standings() == ["dirty"]
    bench.feed(sync.SyncTick(1.0))
    bench.drain()
    assert bench.standings() == ["serving"], "it told: still the old version"


def test_a_trainer_that_dies_does_not_cut_an_abandon():
    bench = Bench()
    bench.open()
    bench.terms = Terms(1, require="any")
    bench.do(P.PREPARE)
    bench.order((P.HALT,))
    bench.answer(bench.ticket("p/1"), "failed", "halt", "boom")
    assert bench.calls[-1] == ("p/1", "ABANDON")
    bench.feed(sync.Ended("a", 1.0))
    assert [send.phases for send in bench.sends.values()] == [(P.ABANDON,)], (
        "HALT at p/0 is cut, this is not"
    )
    bench.drain()
    assert bench.released == ["a"]
    assert all(m.stage is Stage.IDLE for m in bench.memory.values())


def test_a_trainer_that_dies_in_a_commit_does_not_stop_it():
    bench = Bench()
    bench.open()
    bench.do(*FIRST["direct"], P.VERIFY)
    bench.order((P.COMMIT,))
    bench.feed(sync.Ended("a", 1.0))
    assert len(bench.sends) == 2, "neither call is cut"
    bench.drain()
    assert (bench.machine.version, bench.released, bench.standings()) == (
        1,
        ["a"],
        ["serving"] * 2,
    )
    assert not any(m.halted for m in bench.memory.values())


def test_restart_is_for_failed_replicas_and_keeps_the_epoch():
    registry = reg.Registry(10.0, 1.0, 3, 0.0)
    spec = reg.PoolSpec("p", "m", 2, 1, "auto", "cpu", "{}", "{}")
    registry.handle(reg.LaunchRequested(spec, 0.0))
    registry.handle(reg.Registered("p/0", "a:1", 1.0))
    for name, word in (
        ("p/0", "is ready: only"),
        ("p/1", "is starting: only"),
        ("p/7", "it has: p/0, p/1"),
    ):
        with pytest.raises(reg.Refused, match=word):
            registry.handle(reg.RestartRequested("p", name, 2.0))
    registry.handle(reg.ProcessExited("p/0", "boom", "tail"))
    epoch = registry.replica("p/0").epoch
    out = registry.handle(reg.RestartRequested("p", "p/0", 3.0))
    assert out == [reg.StartProcess("p/0", replace(spec, run=epoch)), reg.Announce("p")]
    replica = registry.replica("p/0")
    assert (replica.state, replica.cause, replica.epoch, replica.pid) == (
        reg.ReplicaState.STARTING,
        "",
        epoch,
        0,
    )
    with pytest.raises(reg.Refused, match="another process is p/0 now"):
        registry.handle(reg.Registered("p/0", "a:1", 3.5))
    registry.handle(reg.Registered("p/0", "a:2", 4.0, run=epoch))
    assert replica.epoch == epoch + 1
    registry.handle(reg.PoolCloseRequested("p"))
    with pytest.raises(reg.Refused, match="closed"):
        registry.handle(reg.RestartRequested("p", "p/1", 5.0))


class SyncMachine(RuleBasedStateMachine):
    """Trainers, replicas and failures in any order, against replicas that really hold mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(3)
        self.gone: set[str] = set()
        self.link, self.links = "", 0
        self.highest = 0

    def next_version(self) -> int:
        self.highest = max(self.highest, self.bench.machine.version) + 1
        return self.highest

    def take(self, link: str, lease: float) -> None:
        bench, holder = self.bench, self.bench.machine.holder
        bench.number += 1
        bench.feed(
            sync.Opened(
                link, link, bench.number, tuple(bench.machine.members), lease, bench.now
            )
        )
        if holder is not None and holder.link != link:
            assert bench.replies[-1].code in ("busy", "deadline"), (
                "held, or still being let go of"
            )

    @initialize(lease=st.sampled_from([2.0, 50.0]))
    def first_trainer(self, lease: float) -> None:
        self.next_trainer(lease)

    @precondition(lambda self: not self.link and self.bench.machine.holder is None)
    @rule(lease=st.sampled_from([2.0, 50.0]))
    def next_trainer(self, lease: float) -> None:
        self.links += 1
        self.link = f"t{self.links}"
        self.take(self.link, lease)
        self.bench.drain()

    @precondition(lambda self: self.bench.machine.holder is not None)
    @rule(again=st.booleans())
    def open_again(self, again: bool) -> None:
        """The holder opens for newcomers, or somebody else asks."""
        self.take(self.link if again and self.link else "intruder", 50.0)

    @precondition(lambda self: self.link and not self.bench.sends)
    @rule(
        mode=st.sampled_from(["direct", "staged"]),
        require=st.sampled_from(["all", "any"]),
        pause=st.sampled_from(["keep", "wait"]),
        count=st.integers(1, 6),
        answered=st.booleans(),
    )
    def sync_on(
        self, mode: str, require: str, pause: str, count: int, answered: bool
    ) -> None:
        """Begin a sync, or order its next phases; all replicas may answer well at once."""
        bench, stage = self.bench, self.bench.machine.stage
        if stage is Stage.IDLE:
            self.take(self.link, 50.0)
            bench.drain()
            bench.terms = Terms(
                self.next_version(), mode=mode, require=require, pause=pause
            )
        steps, places = STEPS[bench.terms.mode], [Stage.IDLE]
        for phase in steps:
            places.append(STAGE_AFTER[phase])
        start = places.index(stage)
        bench.order(steps[start : start + count], self.link)
        if answered:
            bench.drain()

    @precondition(lambda self: self.link and self.bench.machine.open)
    @rule(phase=st.sampled_from(list(Phase)[:8]))
    def anything(self, phase: Phase) -> None:
        if phase is not P.PREPARE:
            self.bench.order((phase,), self.link)

    @precondition(lambda self: self.bench.sends)
    @rule(
        data=st.data(),
        how=st.sampled_from(
            ["well", "well", "well", "corrupt", "failed", "deadline", "lost"]
        ),
        upto=st.integers(0, 4),
    )
    def answer(self, data: st.DataObject, how: str, upto: int) -> None:
        bench = self.bench
        ticket = data.draw(st.sampled_from(sorted(bench.sends)))
        send = bench.sends[ticket]
        if how in ("well", "corrupt"):
            bench.deliver(ticket, arrived=how == "well")
            return
        upto = min(upto, len(send.phases) - 1) if how == "failed" else upto
        kind, failed, error = bench.execute(send, upto)
        if kind == "ok":
            kind, error = how, "boom"
            failed = send.phases[upto].name.lower() if how == "failed" else ""
        elif how in ("deadline", "lost"):
            kind, failed = how, ""
        bench.answer(ticket, kind, failed, error)

    @precondition(lambda self: not self.gone)
    @rule(data=st.data(), crash=st.booleans(), upto=st.integers(0, 4))
    def lose(self, data: st.DataObject, crash: bool, upto: int) -> None:
        """A replica is fenced or dies, in the middle of whatever it was doing."""
        bench = self.bench
        if not bench.machine.members:
            return
        name = data.draw(st.sampled_from(sorted(bench.machine.members)))
        for send in [s for s in bench.sends.values() if s.replica == name]:
            bench.execute(send, upto)
        self.gone.add(name)
        bench.feed(sync.Left(name, "lost"))
        if crash:
            bench.memory[name] = ReplicaMemory()

    @precondition(lambda self: self.gone)
    @rule()
    def come_back(self) -> None:
        name = min(self.gone)  # a set's own order would differ from run to run
        self.gone.remove(name)
        memory = self.bench.memory[name]
        self.bench.feed(sync.ReplicaJoined(name, memory.version, memory.dirty))

    @rule(seconds=st.floats(0, 3))
    def tick(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.feed(sync.SyncTick(self.bench.now))

    @precondition(lambda self: self.link and self.bench.machine.open)
    @rule()
    def trainer_dies(self) -> None:
        self.bench.feed(sync.Ended(self.link, self.bench.now))
        self.link = ""

    @precondition(lambda self: self.bench.sends)
    @rule()
    def all_answer(self) -> None:
        self.bench.drain()

    def teardown(self) -> None:
        """From anywhere: the trainer goes, replicas answer, and the pool is free and idle; one sync then heals all."""
        bench, machine = self.bench, self.bench.machine
        if self.link:
            self.trainer_dies()
        bench.drain()
        assert machine.holder is None
        assert (machine.stage, machine.participants, machine.open) == (
            Stage.IDLE,
            set(),
            False,
        )
        while self.gone:
            self.come_back()
        mode = "direct" if self.links % 2 else "staged"
        assert bench.open("healer").code == ""
        bench.terms = Terms(self.next_version(), mode=mode)
        assert bench.do(*FIRST[mode], link="healer").code == ""
        assert bench.do(*LAST[mode], link="healer").code == ""
        assert [m.content for m in bench.memory.values()] == [self.highest] * 3
        assert bench.standings() == ["serving"] * 3
        assert not any(m.halted for m in bench.memory.values())
        bench.feed(sync.Ended("healer", bench.now))
        bench.drain()

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        work = self.bench.machine._work
        assert (work is not None) == bool(
            set(self.bench.sends) - set(self.bench.machine._unacknowledged)
        )


TestSyncMachine = SyncMachine.TestCase
TestSyncMachine.settings = settings(
    max_examples=examples(400), stateful_step_count=40, deadline=None
)

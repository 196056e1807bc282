"""A newcomer is brought to the pool's own version: only named replicas that are behind, the others untouched."""

from __future__ import annotations

import pytest

from jvlab.gateway import _sync_types as sync
from jvlab.wire._sync_words import Phase, Terms
from tests.gateway.replica_memory import ReplicaMemory
from tests.gateway.test_sync import STEPS, Bench


@pytest.fixture
def bench() -> Bench:
    """Two replicas at version 2, and one that came later."""
    bench = Bench()
    bench.open()
    for version in (1, 2):
        bench.terms = Terms(version)
        assert bench.do(*STEPS["direct"]).code == ""
    bench.memory["p/2"] = ReplicaMemory()
    bench.feed(sync.ReplicaJoined("p/2", 0, False))
    bench.open()
    bench.calls.clear()
    return bench


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_only_the_newcomer_takes_part(bench: Bench, mode: str):
    bench.terms = Terms(2, mode, replicas=("p/2",))
    assert bench.standings() == ["serving", "serving", "stale"]
    bench.order(STEPS[mode][:3])
    assert bench.standings()[:2] == ["serving", "serving"], "they serve meanwhile"
    bench.drain()
    assert bench.do(*STEPS[mode][3:]).code == ""
    assert bench.standings() == ["serving"] * 3
    assert {call[0] for call in bench.calls} == {"p/2"}
    assert bench.machine.version == 2
    bench.terms = Terms(3)
    assert bench.do(*STEPS["direct"]).code == "", "the next sync is for all"


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        (Terms(2), "version 2 is not larger than the pool's, 2"),
        (Terms(2, replicas=("p/0",)), "version 2 is not larger than the pool's, 2"),
        (
            Terms(2, replicas=("p/0", "p/2")),
            "version 2 is not larger than the pool's, 2",
        ),
        (Terms(1, replicas=("p/2",)), "version 1 is not larger than the pool's, 2"),
    ],
)
def test_what_is_refused(bench: Bench, terms: Terms, word: str):
    bench.terms = terms
    reply = bench.do(Phase.PREPARE)
    assert (reply.code, reply.error) == ("refused", word)
    assert bench.standings() == ["serving", "serving", "stale"]
    assert bench.calls == []


@pytest.mark.parametrize(("mode", "state"), [("direct", "dirty"), ("staged", "stale")])
def test_a_failure_concerns_the_newcomer_alone(bench: Bench, mode: str, state: str):
    bench.terms = Terms(2, mode, replicas=("p/2",))
    moved = STEPS[mode].index(Phase.MOVE) + 1
    assert bench.do(*STEPS[mode][:moved]).code == ""
    bench.order((Phase.VERIFY,))
    bench.deliver(bench.ticket("p/2"), arrived=False)
    bench.drain()
    assert bench.replies[-1].code == "mismatch"
    assert bench.standings() == ["serving", "serving", state]
    bench.terms = Terms(3)
    assert bench.do(*STEPS["direct"]).code == ""
    assert bench.standings() == ["serving"] * 3

"""What the gateway makes of versions that replicas report by themselves."""

from __future__ import annotations

import pytest

from jvlab.gateway import _sync_types as sync
from jvlab.gateway._sync import PoolSync
from jvlab.gateway._sync_types import Standing


def test_the_gateway_hears_of_a_commit():
    machine = PoolSync("p")
    machine.handle(sync.ReplicaJoined("p/0", 0, False))
    assert machine.is_news("p/0", 5)
    assert not machine.is_news("p/1", 5), "not registered"
    out = machine.handle(sync.ReplicaReported("p/0", 5))
    assert out == [sync.AnnounceVersion()]
    assert machine.version == machine.members["p/0"].version == 5
    assert machine.standing("p/0") is Standing.SERVING
    assert machine.handle(sync.ReplicaReported("p/0", 4)) == [], (
        "an old word says nothing"
    )
    assert machine.version == 5
    machine.handle(sync.ReplicaJoined("p/1", 0, False))
    assert machine.standing("p/1") is Standing.STALE, (
        "one that came later does not hold what was committed"
    )


@pytest.mark.parametrize(("state", "known"), [("ready", 7), ("dirty", 5)])
def test_a_new_link_learns_of_a_commit_whose_beat_has_not_come_yet(
    state: str, known: int
):
    machine = PoolSync("p")
    machine.handle(sync.ReplicaJoined("p/0", 5, False))
    opening = machine.handle(
        sync.Opened("b", "the next trainer", 1, ("p/0",), 10.0, 0.0)
    )
    send = next(order for order in opening if isinstance(order, sync.Send))
    out = machine.handle(sync.Answered(send.ticket, "ok", 0.0, state=state, version=7))
    reply = next(told for told in out if isinstance(told, sync.Reply))
    assert [outcome.version for outcome in reply.outcomes] == [known]
    assert machine.members["p/0"].version == known
    assert not reply.code

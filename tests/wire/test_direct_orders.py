"""Orders straight to a replica: the socket, its key, failures given up before they are told, and the gateway's news."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator

import pytest

from jvlab import _errors as errors
from jvlab.engine._server import DirectOrders
from jvlab.gateway import _sync_types as sync
from jvlab.gateway._sync import PoolSync
from jvlab.gateway._sync_types import Standing
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._direct_client import DirectStream, try_direct

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets without files are Linux's"
)


class Replica:
    """An Express on a loop of its own; remembers the phases it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.fail = ""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.direct_orders = DirectOrders(self.run)
        self.call(self.direct_orders.start())

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def run(self, request: pb.RolloutSyncRequest) -> pb.RolloutSyncReply:
        self.asked.append(list(request.phases))
        if pb.ABANDON in request.phases:
            return pb.RolloutSyncReply(
                outcome=pb.ReplicaOutcome(replica="p/0", state="dirty", version=3)
            )
        outcome = pb.ReplicaOutcome(replica="p/0", state="ready", version=3)
        if self.fail:
            outcome.failed, outcome.error = self.fail, "broke"
            outcome.differing.append("lm_head (rank 0)")
        return pb.RolloutSyncReply(outcome=outcome)

    def invite(self) -> str:
        return self.direct_orders.invitation("link-1", 7)


async def turns() -> None:
    """Many turns of the loop, however long each takes."""
    for _ in range(30):
        await asyncio.sleep(0.001)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made

    async def end() -> None:
        # who knocks just now is let in first: a server that closes then drops the socket
        await turns()
        made.direct_orders.close()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # a transport lets go of its socket some turns of the loop after its close
        await turns()

    made.call(end())
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join(60)
    made.loop.close()


def test_orders_and_what_is_done_meanwhile(replica: Replica):
    stream = DirectStream("p/0", replica.invite())
    done: list[str] = []
    reply = stream.steps(
        [pb.PREPARE, pb.HALT, pb.MOVE],
        30.0,
        lambda: done.append("gathered"),
        pb.SyncTerms(version=4),
    )
    assert reply.state == "moving"
    assert done == ["gathered"]
    assert stream.steps([pb.VERIFY, pb.COMMIT, pb.GO_ON], 30.0).state == "idle"
    assert replica.asked == [[1, 2, 3], [4, 5, 6]]
    assert not stream.busy
    stream.close()
    stream.close()
    assert not stream.is_open


def test_a_failure_is_given_up_before_it_is_told(replica: Replica):
    stream, replica.fail = DirectStream("p/0", replica.invite()), "verify"
    with pytest.raises(
        errors.VerifyError, match=r"mismatch at replica p/0 in verify: broke"
    ) as caught:
        stream.steps([pb.VERIFY, pb.COMMIT], 30.0)
    assert replica.asked == [[4, 5], [7]], "ABANDON follows at once"
    assert caught.value.fields["outcomes"] == {"p/0": "dirty"}
    assert not stream.busy
    stream.close()


def test_the_key(replica: Replica):
    old = replica.invite()
    replica.invite()
    long = json.dumps({**json.loads(replica.invite()), "key": "x" * 1000})
    for invitation in (old, long):
        stream = DirectStream("p/0", invitation)
        with pytest.raises(errors.TransportError, match="the socket of p/0 broke"):
            stream.steps([pb.ABANDON], 30.0)
        stream.close()
    assert not replica.asked


def test_when_it_is_used(replica: Replica):
    outcome = pb.ReplicaOutcome(replica="p/0", direct_orders_json=replica.invite())
    stream = try_direct([outcome])
    assert stream is not None
    stream.close()
    assert try_direct([outcome, outcome]) is None, (
        "several replicas commit together, by the gateway"
    )
    assert try_direct([pb.ReplicaOutcome(replica="p/0")]) is None
    gone = json.dumps({"path": "\0jvlab-nobody", "key": "k", "link": "l", "epoch": 1})
    assert (
        try_direct([pb.ReplicaOutcome(replica="p/0", direct_orders_json=gone)]) is None
    )
    closed = DirectOrders(replica.run)
    assert closed.invitation("l", 1) == "", "nobody listens yet"


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

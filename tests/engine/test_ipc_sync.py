"""A sync run by the engine core: its channel, front end, trainer's end; vLLM, gateway and GPU are stand-ins."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jvlab import _errors as errors
from jvlab.engine._engine_sync import EngineSync, SyncState
from jvlab.engine.worker import _ipc_core
from jvlab.wire import _core_channel
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._core_channel import CoreOrders
from tests.engine.one_replica import OneReplica
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="sockets without files are Linux's"
    ),
]
NAMES = ["a", "b", "c"]


class Core:
    """What `_core_sync` uses of vLLM's EngineCore, with one rank that holds three parameters."""

    jv_utility, jv_wake_up = "utility", "wake up"

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.holds = [1, 2, 3]
        self.refuses = ""
        self.pending: Future[Any] | None = None  # a pause that is not complete at once
        self.paused = False
        self.version = "0"
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_multimodal_model=False)
        )
        self.model_executor = SimpleNamespace(is_sleeping=False)
        # the core's loop takes one after the other
        self.calls: queue.Queue[Any] = queue.Queue()
        self.input_queue = SimpleNamespace(put_nowait=self._put)
        self.woken = 0
        self.deaf = False  # does not hear what is ordered at its door
        self.begun_by: list[str] = []
        threading.Thread(target=self._loop, daemon=True).start()

    def _put(self, item: tuple[str, Any]) -> None:
        if item[0] == self.jv_wake_up:
            self.woken += 1
        else:
            self.calls.put((item[1][2], item[1][3], None))

    def _loop(self) -> None:
        while (item := self.calls.get()) is not None:
            method, args, answer = item
            if method in ("jv_called", "jv_woken") and self.deaf:
                continue
            self.begun_by.append(method)
            try:
                result = getattr(_ipc_core, method)(self, *args)
            except Exception as error:
                assert answer is not None, "nobody would hear of it"
                answer.set_exception(error)
                continue
            if answer is None:
                assert not result.done(), "vLLM must not answer a call that nobody made"
            elif isinstance(result, Future):
                result.add_done_callback(
                    lambda done, to=answer: _ipc_core._copy_result(done, to)
                )
            else:
                answer.set_result(result)

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def get_weight_version(self) -> str:
        return self.version

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[Any] | None:
        self.did.append(("pause", mode))
        self.paused = True
        return self.pending

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = ()
    ) -> list[dict[str, Any]]:
        self.did.append(method)
        if self.refuses == method:
            return [
                {
                    "rank": 0,
                    "error": "no memory",
                    "remedy": "buy some",
                    "kind": "TransportError",
                }
            ]
        if method == "jv_move":
            return [{"rank": 0, "seconds": 0.001}]
        if method == "jv_commit":
            return [{"rank": 0, "bytes": 12}]
        values = np.array(self.holds, np.uint64).tobytes()
        return [
            {
                "rank": 0,
                "values": values,
                "seconds": {"digest": 0.002},
                "bytes": 12,
                "done": True,
            }
        ]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.did.append(("forget", reset_running_requests))
        return True

    def set_weight_version(self, version: str) -> None:
        self.did.append(("version", version))
        self.version = version

    def jv_poison(self) -> None:
        self.did.append("poisoned")

    def resume_scheduler(self) -> None:
        self.did.append("resume")
        self.paused = False


class Replica:
    """The real front end (EngineSync, state) on a loop of its own, over a core in threads."""

    def __init__(self) -> None:
        self.core = Core()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.state = SyncState(link="link-1")
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(is_multimodal_model=False),
        )
        client = SimpleNamespace(
            call_utility_async=self.utility, pause_scheduler_async=self.pause
        )
        self.llm: Any = SimpleNamespace(
            engine_core=client,
            vllm_config=config,
            errored=False,
            collective_rpc=self.rpc,
            resume_generation=self.resume,
        )
        self.sync = EngineSync(self.llm, self.state, "p/0")
        self.sync._ipc, self.sync.names = True, {0: NAMES}
        self.streams: list[OneReplica] = []
        self.trainers: list[CoreOrders] = []
        self.call(self.sync._open_core_channel(True))

    async def utility(self, method: str, *args: Any) -> Any:
        answer: Future[Any] = Future()
        self.core.calls.put((method, args, answer))
        return await asyncio.wrap_future(answer)

    async def rpc(
        self, method: str, args: tuple[Any, ...] = ()
    ) -> list[dict[str, Any]]:
        if method in ("jv_verify", "jv_commit"):
            return self.core.collective_rpc(method, args)
        self.core.did.append(method)
        return [{"rank": 0}]

    async def resume(self) -> None:
        self.core.resume_scheduler()

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self.core.pause_scheduler(mode, clear_cache)

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def trainer(self) -> CoreOrders:
        stream = OneReplica(self.sync.run, self.loop, "link-1")
        self.streams.append(stream)
        self.trainers.append(CoreOrders(stream, "p/0", self.sync.core_channel))
        return self.trainers[-1]

    async def _end(self) -> None:
        await self.sync._open_core_channel(False)
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # a transport lets go of its socket some turns of the loop after its close
        for _ in range(30):
            await asyncio.sleep(0.001)
        self.core.calls.put(None)

    def close(self) -> None:
        # also those of a test that failed: their sockets would fail another one
        for trainer in self.trainers:
            trainer.close()
        for stream in self.streams:
            stream.end()
        self.call(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.close()


@pytest.fixture
def trainer(replica: Replica) -> CoreOrders:
    return replica.trainer()


def terms(version: int, **more: Any) -> pb.SyncTerms:
    given = {"mode": "direct", "verify": "full", "pause": "keep", "kv": "keep", **more}
    return pb.SyncTerms(version=version, **given)


def digests(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def nothing() -> None:
    """Nothing to do meanwhile, or to write."""


def unasked() -> None:
    pytest.fail("nobody said that we may write")


def test_one_order_does_it_all(replica: Replica, trainer: CoreOrders):
    order: list[str] = []

    def write() -> None:
        order.append("write")
        assert replica.core.did[-1] == "jv_move", (
            "the engine stands still and lets us in, and nothing is verified yet"
        )

    def claims() -> bytes:
        order.append("claims")
        # the engine reads what it holds meanwhile
        while "jv_verify" not in replica.core.did:
            time.sleep(0.001)
        time.sleep(0.02)
        assert replica.core.did[-1] == "jv_verify", (
            "nothing is committed before it heard what it must hold"
        )
        return digests(1, 2, 3)

    reply = trainer.direct(
        terms(4), 30.0, lambda: order.append("meanwhile"), write, claims
    )
    assert order == ["meanwhile", "write", "claims"]
    assert reply.state == "idle"
    (outcome,) = reply.outcomes
    assert (outcome.replica, outcome.state, outcome.version) == ("p/0", "committed", 4)
    # the front end adds how long it took to go on, if its reply came before the core's signal
    assert {s.name for s in outcome.seconds} - {"go_on"} == {
        "halt",
        "admit",
        "verify",
        "digest",
        "commit",
        "pause",
    }
    assert replica.core.did == [
        ("pause", "keep"),
        "jv_move",
        "jv_verify",
        ("forget", False),
        ("version", "4"),
        "resume",
    ]
    trainer._stream.settle(60.0)
    assert (replica.state.version, replica.state.dirty, replica.state.stage) == (
        4,
        False,
        "idle",
    )
    assert replica.sync._committed[False]() == {("a", 0): 1, ("b", 0): 2, ("c", 0): 3}
    assert not trainer._stream.busy


def test_again_and_again_and_between_other_orders(
    replica: Replica, trainer: CoreOrders
):
    for version in range(1, 6):
        replica.core.holds = [version, 0, version]
        trainer.direct(
            terms(version), 30.0, nothing, nothing, lambda v=version: digests(v, 0, v)
        )
        if version == 3:  # the reply that is owed is read first
            assert trainer._stream.steps([pb.ABANDON], 30.0).outcomes[0].version == 3
    trainer._stream.settle(60.0)
    assert replica.state.version == 5


def test_without_digests(replica: Replica, trainer: CoreOrders):
    trainer.direct(terms(1, verify="off", kv="recompute"), 30.0, nothing, nothing, None)
    trainer._stream.settle(60.0)
    assert ("forget", True) in replica.core.did
    assert replica.state.version == 1


@pytest.mark.parametrize("deaf", [False, True])
def test_poison_that_is_allowed_is_told_to_the_core(
    replica: Replica, trainer: CoreOrders, deaf: bool
):
    """With digests and without, by its door or by the front end; the next version knows nothing of it."""
    replica.core.deaf = deaf
    for version, verify in ((1, "full"), (2, "off")):
        claims = (lambda: digests(1, 2, 3)) if verify == "full" else None
        trainer.direct(
            terms(2 * version, verify=verify),
            30.0,
            nothing,
            nothing,
            claims,
            lambda: True,
        )
        trainer._stream.settle(60.0)
        assert replica.core.did[-3:] == [
            ("version", str(2 * version)),
            "poisoned",
            "resume",
        ]
        trainer.direct(
            terms(2 * version + 1, verify=verify), 30.0, nothing, nothing, claims
        )
        trainer._stream.settle(60.0)
        assert replica.core.did[-2:] == [("version", str(2 * version + 1)), "resume"]
    assert replica.core.did.count("poisoned") == 2
    staged(trainer, 6, nonfinite=True)
    assert replica.core.did[-3:] == [("version", "6"), "poisoned", "resume"]
    staged(trainer, 7)
    assert replica.core.did.count("poisoned") == 3


@pytest.mark.parametrize("verify", ["full", "off"])
def test_poison_that_is_refused_is_not_committed(
    replica: Replica, trainer: CoreOrders, verify: str
):
    """Found with the digests, or where there are none before it is said that all is written."""

    def found() -> Any:
        raise errors.NonFiniteError("1 leaf is not finite")

    write, claims = (nothing, found) if verify == "full" else (found, None)
    with pytest.raises(errors.NonFiniteError):
        trainer.direct(terms(1, verify=verify), 30.0, nothing, write, claims)
    time.sleep(0.5)  # for a commit that should not come
    assert not any(isinstance(d, tuple) and d[0] == "version" for d in replica.core.did)
    assert (replica.state.version, replica.state.dirty) == (0, True)


def test_wrong_bits_do_not_commit(replica: Replica, trainer: CoreOrders):
    with pytest.raises(
        errors.VerifyError, match=r"does not hold the trainer's bits: b \(rank 0\)"
    ):
        trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 7, 3))
    assert "resume" not in replica.core.did
    assert not any(isinstance(d, tuple) and d[0] == "version" for d in replica.core.did)
    assert replica.core.did[-1] == "jv_abandon", "no writer may write from now on"
    assert (replica.state.version, replica.state.dirty) == (0, True)
    trainer.direct(terms(2), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    trainer._stream.settle(60.0)
    assert (replica.state.version, replica.state.dirty) == (2, False)


def test_fewer_digests_than_parameters(replica: Replica, trainer: CoreOrders):
    with pytest.raises(errors.JvlabError, match="sent 2 digests, this engine has 3"):
        trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2))
    assert replica.state.dirty


def test_a_rank_that_does_not_let_us_in(replica: Replica, trainer: CoreOrders):
    replica.core.refuses = "jv_move"
    with pytest.raises(errors.TransportError, match="in move: no memory"):
        trainer.direct(terms(1), 30.0, nothing, unasked, None)
    replica.core.refuses = "jv_verify"
    with pytest.raises(errors.TransportError, match="in verify: no memory"):
        trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    assert replica.state.dirty
    assert not trainer._stream.busy


@pytest.mark.parametrize(
    "error", [RuntimeError("the card is gone"), KeyboardInterrupt()]
)
def test_a_writer_that_fails_hangs_up(
    replica: Replica, trainer: CoreOrders, error: BaseException
):
    def write() -> None:
        raise error

    with pytest.raises(type(error)):
        trainer.direct(terms(1), 30.0, nothing, write, lambda: digests(1, 2, 3))
    assert not trainer._stream.busy, (
        "the replica has answered: it can be told to give up"
    )
    assert not trainer.is_open
    with pytest.raises(errors.TransportError, match="closed its connection") as caught:
        trainer._stream.steps([pb.ABANDON], 30.0)
    assert caught.value.fields["outcomes"] == {"p/0": "dirty"}
    assert trainer._stream.asked[-1] == [pb.ABANDON]  # type: ignore
    assert "jv_verify" not in replica.core.did
    # what the next open of the link does
    replica.call(replica.sync._open_core_channel(True))
    again = replica.trainer()
    again.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2, 3))


def test_a_trainer_that_dies_while_it_writes(replica: Replica):
    trainer = replica.trainer()
    wrote = threading.Event()

    def write() -> None:
        wrote.set()
        trainer._signals._end.shutdown(socket.SHUT_RDWR)

    with pytest.raises(errors.TransportError):
        trainer.direct(terms(1), 30.0, nothing, write, lambda: digests(1, 2, 3))
    assert wrote.is_set()
    until(lambda: replica.state.dirty, "the replica notices")
    until(lambda: not replica.sync.lock.locked(), "its order ends")
    assert (replica.state.version, replica.state.dirty) == (0, True)
    assert "resume" not in replica.core.did


def test_a_trainer_that_says_nothing(
    replica: Replica, trainer: CoreOrders, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_ipc_core, "WRITE_SECONDS", 0.2)

    def write() -> None:
        until(trainer._reply.done, "the core loses its patience, the replica answers")

    with pytest.raises(errors.SyncError, match="did not report in time"):
        trainer.direct(terms(1), 30.0, nothing, write, lambda: digests(1, 2, 3))
    assert replica.state.dirty


def test_a_pause_that_takes_its_time(replica: Replica, trainer: CoreOrders):
    replica.core.pending = Future()
    wrote: list[bool] = []

    def write() -> None:
        wrote.append(replica.core.pending is not None and replica.core.pending.done())

    def step_ends() -> None:
        while not replica.core.did:
            time.sleep(0.001)
        assert replica.core.did == [("pause", "keep")], (
            "nothing else before the engine stands still"
        )
        threading.Timer(0.05, replica.core.pending.set_result, [None]).start()  # type: ignore[union-attr]

    trainer.direct(terms(1), 30.0, step_ends, write, lambda: digests(1, 2, 3))
    assert wrote == [True]
    assert replica.core.woken == 1, (
        "nothing else would tell the core's loop that there is work again"
    )
    trainer._stream.settle(60.0)
    assert replica.state.version == 1


def test_who_paused_stays_paused(replica: Replica, trainer: CoreOrders):
    replica.sync.user_paused = replica.core.paused = True
    trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    trainer._stream.settle(60.0)
    assert "resume" not in replica.core.did
    assert replica.state.version == 1


@pytest.mark.parametrize("deaf", [False, True])
def test_whose_order_comes_first(replica: Replica, trainer: CoreOrders, deaf: bool):
    """The core is called at its door and by the front end; it does it once, whoever comes first."""
    replica.core.deaf = deaf
    for version in (1, 2, 3):
        trainer.direct(terms(version), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    trainer._stream.settle(60.0)
    assert replica.core.did.count("jv_move") == 3
    assert replica.core.did.count("resume") == 3
    assert ("jv_called" in replica.core.begun_by) != deaf
    assert (replica.state.version, replica.state.stage) == (3, "idle")


@pytest.mark.parametrize("deaf", [False, True])
def test_who_knocks_first_is_heard_by_the_core_itself(
    replica: Replica, trainer: CoreOrders, deaf: bool
):
    replica.core.deaf = deaf
    for version in (1, 2, 3):
        trainer.wake_up()
        trainer.direct(terms(version), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    trainer._stream.settle(60.0)
    assert replica.core.did.count("jv_move") == replica.core.did.count("resume") == 3
    assert ("jv_woken" in replica.core.begun_by) != deaf
    assert (replica.state.version, replica.state.stage) == (3, "idle")


def test_a_knock_without_an_order(replica: Replica, trainer: CoreOrders):
    trainer.wake_up()
    until(lambda: replica.core.begun_by.count("jv_woken"), "the core is woken")
    time.sleep(2 * _ipc_core.WOKEN_SECONDS)
    trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    trainer._stream.settle(60.0)
    assert replica.core.did.count("jv_move") == 1
    assert replica.state.version == 1


def test_the_next_sync_does_not_wait_for_the_front_end(
    replica: Replica, trainer: CoreOrders
):
    """Its reply to the sync before may come in the middle of this one."""
    committed = replica.sync.committed
    replica.sync.committed = lambda: (time.sleep(0.1), committed())[1]  # type: ignore[method-assign]
    owed: list[bool] = []
    for version in (1, 2, 3, 4):
        write = lambda: owed.append(len(trainer._stream._owed) > 1)
        trainer.direct(terms(version), 30.0, nothing, write, lambda: digests(1, 2, 3))
    assert any(owed), "the front end was behind, or nothing was shown"
    trainer._stream.settle(60.0)
    assert (replica.state.version, replica.core.did.count("jv_move")) == (4, 4)


def test_a_front_end_that_failed_behind_our_back(replica: Replica, trainer: CoreOrders):
    ordered = threading.Event()

    def fails() -> None:
        # not while the first sync may still be told of it
        ordered.wait(30)
        raise errors.SyncError("the front end is confused")

    def write() -> None:
        ordered.set()
        first = trainer._stream._owed[0]
        until(first.done, "the front end fails in the middle of the second sync")

    committed, replica.sync.committed = replica.sync.committed, fails  # type: ignore[method-assign]
    trainer.direct(terms(1), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    with pytest.raises(
        errors.SyncError,
        match="the front end is confused",
    ):
        trainer.direct(terms(2), 30.0, nothing, write, lambda: digests(1, 2, 3))
    # its second order may still be on its way to the front end: it is refused as the first, or finds its trainer gone
    with pytest.raises(errors.SyncError):
        trainer._stream.settle(60.0)
    replica.sync.committed = committed  # type: ignore[method-assign]
    trainer.close()
    replica.call(replica.sync._open_core_channel(True))
    again = replica.trainer()
    again._stream.steps([pb.ABANDON], 30.0)
    again.direct(terms(3), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    again._stream.settle(60.0)
    assert (replica.state.version, replica.state.dirty) == (3, False)


def test_what_the_front_end_refuses_is_not_begun_at_the_door(
    replica: Replica, trainer: CoreOrders
):
    replica.state.version, replica.core.version = 5, "5"
    with pytest.raises(errors.SyncError, match="version 5 is not newer"):
        trainer.direct(terms(5), 30.0, nothing, unasked, None)
    replica.core.model_executor.is_sleeping, replica.sync.asleep = True, {"weights"}
    with pytest.raises(errors.SyncError, match="sleeps: its weights have no memory"):
        trainer.direct(terms(6), 30.0, nothing, unasked, None)
    assert "jv_move" not in replica.core.did
    assert not replica.state.dirty


def staged(
    trainer: CoreOrders, version: int, nonfinite: bool = False, **more: Any
) -> pb.ReplicaOutcome:
    trainer._stream.steps(
        [pb.PREPARE, pb.MOVE], 30.0, terms=terms(version, mode="staged", **more)
    )
    expected = pb.ReplicaDigests(
        replica="p/0", parameters=NAMES, ranks=[0, 0, 0], values=[1, 2, 3]
    )
    last = [pb.VERIFY, pb.HALT, pb.COMMIT, pb.GO_ON]
    return trainer._stream.steps(
        last, 30.0, digests=[expected], nonfinite=nonfinite
    ).outcomes[0]


def test_a_staged_sync_stands_still_for_one_call(replica: Replica, trainer: CoreOrders):
    outcome = staged(trainer, 1)
    assert (outcome.state, outcome.version) == ("committed", 1)
    assert {"verify", "halt", "commit", "pause"} <= {s.name for s in outcome.seconds}
    assert replica.core.did == [
        "jv_prepare",
        "jv_move",
        "jv_verify",
        ("pause", "keep"),
        "jv_commit",
        ("forget", False),
        ("version", "1"),
        "resume",
    ]
    assert "jv_core_order" in replica.core.begun_by
    assert (replica.state.version, replica.state.dirty, replica.state.stage) == (
        1,
        False,
        "idle",
    )
    assert replica.sync._committed[False]() == {("a", 0): 1, ("b", 0): 2, ("c", 0): 3}
    replica.sync.user_paused = True
    staged(trainer, 2, kv="recompute")
    assert replica.core.did[-1] == ("version", "2"), "who paused stays paused"
    assert ("forget", True) in replica.core.did


def by_the_core(
    trainer: CoreOrders, version: int, *values: int, **more: Any
) -> pb.ReplicaOutcome:
    """A staged sync, ordered from the core."""
    chosen = terms(version, mode="staged", **more)
    trainer.prepare(chosen, 30.0, nothing)
    expected = pb.ReplicaDigests(
        replica="p/0", parameters=NAMES, ranks=[0, 0, 0], values=values
    )
    claimed = digests(*values)
    return trainer.swap(chosen, 30.0, [expected], claimed, False).outcomes[0]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_staged_sync_by_the_core(replica: Replica, trainer: CoreOrders, deaf: bool):
    replica.core.deaf = deaf
    for version in (1, 2, 3):
        outcome = by_the_core(trainer, version, 1, 2, 3)
        assert (outcome.state, outcome.version) == ("committed", version)
        assert {"verify", "halt", "commit", "pause"} <= {
            s.name for s in outcome.seconds
        }
    trainer._stream.settle(60.0)
    assert len(replica.core.did) == 3 * 8, "each order was carried out once"
    assert replica.core.did[:5] == [
        "jv_prepare",
        "jv_move",
        "jv_verify",
        ("pause", "keep"),
        "jv_commit",
    ]
    assert ("jv_called" in replica.core.begun_by) != deaf
    assert (replica.state.version, replica.state.dirty, replica.state.stage) == (
        3,
        False,
        "idle",
    )
    assert replica.sync._committed[False]() == {("a", 0): 1, ("b", 0): 2, ("c", 0): 3}


@pytest.mark.parametrize("deaf", [False, True])
def test_wrong_bits_in_the_shadows_change_nothing(
    replica: Replica, trainer: CoreOrders, deaf: bool
):
    replica.core.deaf = deaf
    with pytest.raises(
        errors.VerifyError, match=r"does not hold the trainer's bits: b \(rank 0\)"
    ) as caught:
        by_the_core(trainer, 1, 1, 7, 3)
    assert caught.value.fields["outcomes"] == {"p/0": "old"}
    assert ("pause", "keep") not in replica.core.did
    assert (replica.state.version, replica.state.dirty, replica.state.stage) == (
        0,
        False,
        "idle",
    )


def test_shadows_are_not_swapped_in_before_they_were_prepared(
    replica: Replica, trainer: CoreOrders
):
    with pytest.raises(errors.SyncError, match="verify without a prepare"):
        trainer.swap(terms(1, mode="staged"), 30.0, [], digests(1, 2, 3), False)
    assert replica.core.did == ["jv_abandon"]


@pytest.mark.parametrize("wrote", [False, True])
def test_an_order_that_only_the_core_heard(replica: Replica, wrote: bool):
    """The trainer died before the gateway had its order: what the engine holds is not a version that anyone knows."""
    trainer = replica.trainer()
    order = _core_channel.order("direct", terms(1, verify="off"), 30.0, "call")
    trainer._orders.send(_core_channel.ORDER, 1, json.dumps(order).encode())
    trainer._signals.receive(time.monotonic() + 60)
    if wrote:
        trainer._signals.send(_core_channel.WRITTEN, 1, _core_channel.FINITE)
        trainer._signals.receive(time.monotonic() + 60)
    trainer.close()
    assert not replica.state.dirty
    replica.call(replica.sync._open_core_channel(False))  # as the gateway closes a link
    assert replica.state.dirty
    replica.call(replica.sync._open_core_channel(True))
    again = replica.trainer()
    again.direct(terms(2), 30.0, nothing, nothing, lambda: digests(1, 2, 3))
    again._stream.settle(60.0)
    assert (replica.state.version, replica.state.dirty) == (2, False)
    assert not replica.core.paused
    again.close()


def test_shadows_that_are_not_taken_over(replica: Replica, trainer: CoreOrders):
    replica.core.refuses = "jv_commit"
    with pytest.raises(errors.TransportError, match="in commit: no memory"):
        staged(trainer, 1)
    assert "resume" not in replica.core.did
    assert (replica.state.version, replica.state.dirty) == (0, True), (
        "part of it may lie in live memory"
    )
    replica.core.refuses = ""
    staged(trainer, 1)
    assert (replica.state.version, replica.state.dirty) == (1, False)


def test_who_lets_requests_finish_first_may_give_up(
    replica: Replica, trainer: CoreOrders
):
    staged(trainer, 1, pause="wait")
    assert "jv_core_order" not in replica.core.begun_by
    assert replica.state.version == 1


def test_the_door_wants_its_key():
    heard: queue.Queue[bytes] = queue.Queue()
    core_channel = _core_channel.CoreChannelServer(heard.put)
    path, _ = core_channel.invitation()
    stranger = _core_channel.connect(
        [path, "0" * _core_channel.KEY_BYTES], _core_channel.SIGNALS, 5.0
    )
    gone = _core_channel.connect([path, "0"], _core_channel.SIGNALS, 5.0)
    gone.close()
    friend = _core_channel.connect(
        core_channel.invitation(), _core_channel.SIGNALS, 5.0
    )
    orders = _core_channel.connect(core_channel.invitation(), _core_channel.ORDERS, 5.0)
    for text in (b"one", b"two"):
        orders.send(_core_channel.ORDER, 1, text)
        assert heard.get(timeout=60) == text
    orders.close()
    nonsense = _core_channel.CoreChannelServer(json.loads)
    # who talks nonsense is hung up on, and the next is heard
    for text in (b"{", b"[]"):
        channel = _core_channel.connect(
            nonsense.invitation(), _core_channel.ORDERS, 5.0
        )
        channel.send(_core_channel.ORDER, 1, text)
        if text == b"{":
            with pytest.raises(ConnectionError):
                channel.receive(time.monotonic() + 60)
        channel.close()
    nonsense.close()
    channel = core_channel.channel(time.monotonic() + 30)
    channel.send(_core_channel.GO, 5, b"x" * 100_000)
    assert friend.receive(time.monotonic() + 30) == (
        _core_channel.GO,
        5,
        b"x" * 100_000,
    )
    with pytest.raises(ConnectionError):
        stranger.receive(time.monotonic() + 30)
    with pytest.raises(TimeoutError):
        friend.receive(time.monotonic())
    for end in (stranger, friend, core_channel):
        end.close()
        end.close()


def test_a_door_that_was_knocked_at_can_be_closed():
    heard: queue.Queue[bytes] = queue.Queue()
    wake_ups = threading.Semaphore(0)
    core_channel = _core_channel.CoreChannelServer(heard.put, wake_ups.release)
    assert core_channel.next_order(0.0) is None, "nobody knocked"
    orders = _core_channel.connect(core_channel.invitation(), _core_channel.ORDERS, 5.0)
    both = (
        _core_channel.HEADER.pack(_core_channel.WAKE, 0, 0)
        + _core_channel.HEADER.pack(_core_channel.ORDER, 1, 3)
        + b"now"
    )
    orders._end.sendall(both)  # one piece: the order came with the knock
    assert wake_ups.acquire(timeout=60)
    assert core_channel.next_order(30.0) == b"now"
    for kind in (_core_channel.WAKE, _core_channel.ORDER):
        orders.send(kind, 1, b"later")
    assert wake_ups.acquire(timeout=60)
    core_channel.next_order(0.0)  # too late or just in time: it is heard once
    orders.send(_core_channel.WAKE, 0)
    assert wake_ups.acquire(timeout=60)
    core_channel.close()  # while its thread waits for an answer to the knock
    assert not core_channel._thread.is_alive()
    assert core_channel.next_order(0.0) is None
    orders.close()


def test_a_core_that_never_comes_for_the_order_is_given_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_core_channel, "LEND_SECONDS", 0.1, raising=False)
    heard: queue.Queue[bytes] = queue.Queue()
    core_channel = _core_channel.CoreChannelServer(heard.put, lambda: None)
    orders = _core_channel.connect(core_channel.invitation(), _core_channel.ORDERS, 5.0)
    for text in (b"one", b"two"):
        orders.send(_core_channel.WAKE, 0)
        orders.send(_core_channel.ORDER, 1, text)
        assert heard.get(timeout=60) == text
        assert core_channel.next_order(0.0) is None, "too late"
    orders.close()
    core_channel.close()
    assert not core_channel._thread.is_alive()


def test_what_comes_another_way_is_seen_at_once():
    core_channel = _core_channel.CoreChannelServer(lambda order: None)
    channel = _core_channel.connect(
        core_channel.invitation(), _core_channel.SIGNALS, 5.0
    )
    ours, theirs = socket.socketpair()
    threading.Timer(0.01, theirs.send, [b"!"]).start()
    with pytest.raises(_core_channel.OtherSocketReady):
        channel.receive(time.monotonic() + 60, ours)
    for end in (channel, core_channel, ours, theirs):
        end.close()

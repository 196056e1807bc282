"""The trainer's end of the ipc transport with a stand-in for the card: what is launched, when, and with which sums.

The kernels are run by the numpy interpreter; on a card tests/gpu/test_ipc_gpu.py does the same with the real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest

from jvlab._deadline import Deadline
from jvlab._errors import TransportError
from jvlab.layout._compile import compile_plan
from jvlab.layout._digest import MASK, examine
from jvlab.layout._plan import TransferPlan
from jvlab.layout._tree import MeshSpec
from jvlab.sync import _ipc_lanes, _ipc_senders
from jvlab.sync._ipc_lanes import Destination, Lane, Port
from jvlab.sync._ipc_senders import Shards
from jvlab.sync._senders import Sent
from jvlab.sync._transaction import Transaction
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._core_channel import CoreOrders
from jvlab.wire._sync_words import Terms
from tests.layout.plan_interpreter import execute
from tests.layout.plan_world import Size, World, transformer
from tests.transport.ipc_interpreter import run

MEMORY: dict[int, np.ndarray] = {}  # what lies at an address


class Card:
    """Launches in their order; each is run at once."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.permit = 0

    def launcher(
        self, device: int, tables: Any, slots: int, write: bool = True
    ) -> Launcher:
        return Launcher(self, tables, slots, write)


class Launcher:
    """The face of `_ipc_kernels.Launcher`."""

    def __init__(self, card: Card, tables: Any, slots: int, write: bool) -> None:
        self.card, self.tables, self.slots, self.write = card, tables, slots, write
        self.nbytes = sum(t.nbytes for t in tables)
        self._sums, self._refused, self._flawed = [99] * slots, 0, {0}  # not clear

    def warm(self) -> None:
        self.card.did.append(("warm", self.nbytes))

    def clear(self, stream: Any) -> None:
        self._sums, self._refused, self._flawed = [0] * self.slots, 0, set[int]()

    def launch(
        self,
        stream: Any,
        sources: Any,
        targets: Any,
        *,
        digest: bool = True,
        permit: int = 0,
        version: int = 0,
        cleared: bool = False,
    ) -> None:
        if not cleared:
            self.clear(stream)
        self.card.did.append(("launch", self.nbytes, digest, cleared))
        if self.write and self.card.permit != version:
            self._refused = 1
            return
        read = [MEMORY.get(int(p), np.zeros(0)) for p in sources]
        into = [
            MEMORY[int(p)] if self.write else np.zeros(1 << 16, np.float32)
            for p in targets
        ]
        sums = run(self.tables, read, into, self.slots, flawed=self._flawed)
        self._sums = [(x + y) & MASK for x, y in zip(self._sums, sums, strict=True)]

    def sums(self, stream: Any) -> np.ndarray:
        return np.array(self._sums, np.uint64)

    def refused(self, stream: Any) -> int:
        return self._refused

    def flawed(self, stream: Any) -> list[int]:
        return sorted(self._flawed)


class Array:
    """A JAX array, as far as senders look."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.ndim = values.reshape(-1), values.ndim
        MEMORY[id(self) * 16] = self.values

    def unsafe_buffer_pointer(self) -> int:
        return id(self) * 16

    def block_until_ready(self) -> Array:
        return self


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    stream = lambda **_: SimpleNamespace(done=True, synchronize=lambda: None)
    cuda = SimpleNamespace(Device=lambda _: nullcontext(), Stream=stream)
    monkeypatch.setattr(
        _ipc_senders, "cupy", lambda: SimpleNamespace(cuda=cuda, asarray=np.asarray)
    )
    monkeypatch.setattr(_ipc_lanes, "Launcher", card.launcher)
    monkeypatch.setattr(
        _ipc_senders.IpcSenders, "_upload", lambda self, lane, table, stream: table
    )
    MEMORY.clear()
    return card


@pytest.fixture
def world() -> World:
    world = World(MeshSpec.parse("fsdp=1"), 1)
    return transformer(world, Size(d=16, layers=3), layout="dense", rotary=True)


def attached(
    plan: TransferPlan, memory: dict[int, np.ndarray], staged: bool = False
) -> _ipc_senders.IpcSenders:
    senders = _ipc_senders.IpcSenders(plan, {"r": 0}, ordinal=lambda device: 0)
    senders._streams[0] = _ipc_senders.cupy().cuda.Stream()
    (port,) = senders.channels
    (lane,) = port.lanes
    for number in lane.numbers:
        MEMORY[1000 + number] = memory[number]
    targets = np.array([1000 + number for number in lane.numbers], np.uint64)
    mapped: Any = SimpleNamespace(close=lambda: None)
    port.into[staged, 0] = Destination(mapped, targets, False, 1, 70)
    return senders


def source_of(world: World, plan: TransferPlan) -> Shards:
    shards = world.shards()
    return Shards(
        {info.path: Array(shards[info.path, 0]) for info in plan.leaves}, True
    )


def blank(
    world: World, plan: TransferPlan
) -> tuple[dict[Any, np.ndarray], dict[int, np.ndarray]]:
    """All parameters, and by target."""
    params = world.blank_params(plan)
    names = [plan.parameters[int(p)].name for p in plan.target_parameter]
    return params, {t: params[0, name].reshape(-1) for t, name in enumerate(names)}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("parts", [True, False])
def test_everything_arrives_in_parts_or_at_once(
    card: Card, world: World, monkeypatch: pytest.MonkeyPatch, parts: bool, early: bool
) -> None:
    if parts:
        monkeypatch.setattr(_ipc_lanes, "SPLIT_BYTES", 0)
        monkeypatch.setattr(_ipc_lanes, "FIRST_LEAVES", 3)
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    wanted, _ = blank(world, plan)
    execute(plan, world.shards(), wanted, mode="direct", replica=0)
    got, memory = blank(world, plan)
    senders, source = attached(plan, memory), source_of(world, plan)
    card.permit = 71
    for turn in (1, 2):  # what was cleared for the one before is cleared again
        card.did.clear()
        if early:
            senders.gather(source, True)
        sent = senders.send_all(source, 1, 30.0, True, collect=turn == 1)
        if turn == 2:
            assert not sent.digests, "left for later"
            senders.collect(sent)
        launches = [did for did in card.did if did[0] == "launch"]
        assert len(launches) == 1 + parts
        assert (
            sum(nbytes for _, nbytes, *_ in launches) == sent.bytes == plan.total_bytes
        )
        assert [cleared for *_, cleared in launches] == [early, False][: len(launches)]
        for key, array in wanted.items():
            np.testing.assert_array_equal(got[key], array)
        assert (
            senders.claims(sent)
            == np.array(
                [sent.digests[t] for t in sorted(sent.digests)], np.uint64
            ).tobytes()
        )
    (lane,) = senders.channels[0].lanes
    made: Any = lane.launcher(False)
    whole = run(
        made.tables,
        [a.values for a in source.shards(lane.leaves, 0)],
        [memory[t] for t in lane.numbers],
        len(lane.numbers),
    )
    assert [sent.digests[t] for t in lane.numbers] == whole
    assert senders.digests(source) == sent.digests


def test_what_was_made_ready_for_another_sync_is_not_launched(
    card: Card, world: World
) -> None:
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    _, memory = blank(world, plan)
    senders, source, other = (
        attached(plan, memory),
        source_of(world, plan),
        source_of(world, plan),
    )
    card.permit = 71
    # without digests; of other arrays
    for digest, given in ((False, source), (True, other)):
        senders.gather(source, True)
        senders.send_all(given, 1, 30.0, digest)
        assert card.did[-1][2:] == (digest, False)
    senders.gather(source, True)
    senders.staged = True
    with pytest.raises(TransportError, match="has not exported its shadow memory"):
        senders.send_all(source, 1, 30.0, True)
    assert senders._closed


def test_blocks_that_were_refused_are_an_error(card: Card, world: World) -> None:
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    _, memory = blank(world, plan)
    before = {t: array.copy() for t, array in memory.items()}
    senders = attached(plan, memory)
    card.permit = 72  # another version's
    with pytest.raises(TransportError, match="revoked write access"):
        senders.send_all(source_of(world, plan), 1, 30.0)
    assert senders._closed
    later = attached(plan, memory)
    sent = later.send_all(source_of(world, plan), 1, 30.0, collect=False)
    with pytest.raises(TransportError, match="revoked write access"):
        later.collect(sent)
    assert all(np.array_equal(array, before[t]) for t, array in memory.items())


def test_shadows_are_unmapped_once_nothing_runs() -> None:
    """What a trainer lets go of before engines sleep: mappings of shadows, and of nothing else."""
    order: list[str] = []
    mapped = lambda name: SimpleNamespace(
        mapped=SimpleNamespace(close=lambda: order.append(name))
    )
    lane = Lane(0, 0, [], [], [], 0)
    port = Port("p/0", 0, [lane])
    live: Any = mapped("live")
    port.into.update({(False, 0): live, (True, 0): mapped("shadow")})  # type: ignore[dict-item]
    senders: Any = _ipc_senders.IpcSenders.__new__(_ipc_senders.IpcSenders)
    senders._streams = {0: SimpleNamespace(synchronize=lambda: order.append("idle"))}
    senders.channels = [port]
    senders.release_shadows()
    senders.release_shadows()
    assert order == ["idle", "shadow", "idle"], (
        "not while a kernel may write there, and once"
    )
    assert senders._destination(port, lane, False) is live
    with pytest.raises(TransportError, match="shadow memory"):
        senders._destination(port, lane, True)


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_poison_is_found_by_the_copy(
    card: Card, world: World, digest: bool, value: float
) -> None:
    """With digests or without, in one leaf of several that feed a target; and the next launch begins anew."""
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    _, memory = blank(world, plan)
    senders, good = attached(plan, memory), source_of(world, plan)
    card.permit = 71
    assert not senders.send_all(good, 1, 30.0, digest).flawed
    for path in (plan.leaves[0].path, plan.leaves[-1].path):
        source = source_of(world, plan)
        values = source._arrays[path].values
        kept, values[3] = values[3], value
        sent = senders.send_all(source, 1, 30.0, digest)
        assert path in {leaf for leaf, _ in sent.flawed}
        found = examine({p: a.values for p, a in source._arrays.items()}, sent.flawed)
        assert [(f.leaf, f.nan, f.inf, f.overflow) for f in found] == [
            (path, int(value != value), int(value == value), 0)
        ]
        values[3] = kept
        assert not senders.send_all(source, 1, 30.0, digest).flawed, (
            "of the last launch alone"
        )


@pytest.mark.parametrize("verify", ["full", "off", "sampled"])
def test_the_engine_core_takes_a_staged_sync_in_two_orders(verify: str) -> None:
    """Not one of which it would have to compare a sample: that goes through the gateway."""
    outcome = pb.ReplicaOutcome(replica="p/0", state="committed", version=1)
    ready = pb.LinkReply(state="moving", outcomes=[pb.ReplicaOutcome(replica="p/0")])
    done = pb.LinkReply(state="idle", outcomes=[outcome])
    core = create_autospec(CoreOrders, instance=True, is_open=True)
    core.prepare.side_effect = lambda terms, seconds, meanwhile: (meanwhile(), ready)[1]
    core.swap.return_value = done
    stream = SimpleNamespace(busy=False, steps=Mock(side_effect=[ready, done]))
    senders = Mock(changes=None, replicas={"p/0": []})
    senders.send_all.return_value = Sent(bytes=8, digests={0: 5})
    senders.rows.return_value = [("w", 0, 5)]
    senders.claims.return_value = b"claims"
    terms = Terms(1, "staged", verify=verify)
    transaction = Transaction(
        cast(Any, stream), senders, None, terms, "ipc", Deadline(60), 0.0, core
    )
    report = transaction.run(lambda sent: None)
    assert report.verified == (verify == "full")
    if verify == "sampled":
        assert stream.steps.call_count == 2
        core.prepare.assert_not_called()
        return
    stream.steps.assert_not_called()
    senders.gather.assert_called_once()
    assert report.outcomes[0].bytes == 8
    assert core.swap.call_args.kwargs == {
        "claimed": b"claims" if verify == "full" else b"",
        "digests": transaction.expected() if verify == "full" else [],
        "nonfinite": False,
    }

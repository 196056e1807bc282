"""The trainer's end of the ipc transport with a stand-in for the card: what is launched, when, and with which sums.

The kernels are run by the numpy interpreter; on a card tests/gpu/test_ipc_gpu.py does the same with the real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ipc_interpreter import run
from plan_world import Size, World, transformer

from jvlab._errors import TransportError
from jvlab.layout._compile import compile_plan
from jvlab.layout._digest import MASK
from jvlab.layout._execute import execute
from jvlab.layout._plan import TransferPlan
from jvlab.layout._shards import MeshSpec
from jvlab.transport import _ipc_lanes, _ipc_outlet
from jvlab.transport._ipc_arrays import Shards
from jvlab.transport._ipc_lanes import Destination, Lane, Port

MEMORY: dict[int, np.ndarray] = {}  # what lies at an address


class Card:
    """Launches in their order; each is run at once."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.permit = 0

    def launcher(self, device: int, tables: Any, slots: int, write: bool = True) -> Launcher:
        return Launcher(self, tables, slots, write)


class Launcher:
    """The face of `_ipc_kernels.Launcher`."""

    def __init__(self, card: Card, tables: Any, slots: int, write: bool) -> None:
        self.card, self.tables, self.slots, self.write = card, tables, slots, write
        self.nbytes = sum(t.nbytes for t in tables)
        self._sums, self._refused = [99] * slots, 0  # not clear

    def warm(self) -> None:
        self.card.did.append(("warm", self.nbytes))

    def clear(self, stream: Any) -> None:
        self._sums, self._refused = [0] * self.slots, 0

    def launch(
        self, stream: Any, sources: Any, targets: Any, *, digest: bool = True, permit: int = 0, version: int = 0,
        cleared: bool = False,
    ) -> None:  # fmt: skip
        if not cleared:
            self.clear(stream)
        self.card.did.append(("launch", self.nbytes, digest, cleared))
        if self.write and self.card.permit != version:
            self._refused = 1
            return
        read = [MEMORY.get(int(p), np.zeros(0)) for p in sources]
        into = [MEMORY[int(p)] if self.write else np.zeros(1 << 16, np.float32) for p in targets]
        sums = run(self.tables, read, into, self.slots)
        self._sums = [(x + y) & MASK for x, y in zip(self._sums, sums, strict=True)]

    def sums(self, stream: Any) -> np.ndarray:
        return np.array(self._sums, np.uint64)

    def refused(self, stream: Any) -> int:
        return self._refused


class Array:
    """A JAX array, as far as an outlet looks."""

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
    monkeypatch.setattr(_ipc_outlet, "cupy", lambda: SimpleNamespace(cuda=cuda, asarray=np.asarray))
    monkeypatch.setattr(_ipc_lanes, "Launcher", card.launcher)
    monkeypatch.setattr(_ipc_outlet.IpcOutlet, "_upload", lambda self, lane, table, stream: table)
    MEMORY.clear()
    return card


@pytest.fixture
def world() -> World:
    world = World(MeshSpec.parse("fsdp=1"), 1)
    return transformer(world, Size(d=16, layers=3), layout="dense", rotary=True)


def attached(plan: TransferPlan, memory: dict[int, np.ndarray], staged: bool = False) -> _ipc_outlet.IpcOutlet:
    outlet = _ipc_outlet.IpcOutlet(plan, {"r": 0}, ordinal=lambda device: 0)
    outlet._streams[0] = _ipc_outlet.cupy().cuda.Stream()
    (port,) = outlet.channels
    (lane,) = port.lanes
    for number in lane.numbers:
        MEMORY[1000 + number] = memory[number]
    targets = np.array([1000 + number for number in lane.numbers], np.uint64)
    mapped: Any = SimpleNamespace(close=lambda: None)
    port.into[staged, 0] = Destination(mapped, targets, False, 1, 70)
    return outlet


def source_of(world: World, plan: TransferPlan) -> Shards:
    shards = world.shards()
    return Shards({info.path: Array(shards[info.path, 0]) for info in plan.leaves}, True)


def blank(world: World, plan: TransferPlan) -> tuple[dict[Any, np.ndarray], dict[int, np.ndarray]]:
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
        monkeypatch.setattr(_ipc_lanes, "LARGE", 0)
        monkeypatch.setattr(_ipc_lanes, "FEW", 3)
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    wanted, _ = blank(world, plan)
    execute(plan, world.shards(), wanted, mode="direct", replica=0)
    got, memory = blank(world, plan)
    outlet, source = attached(plan, memory), source_of(world, plan)
    card.permit = 71
    for turn in (1, 2):  # what was cleared for the one before is cleared again
        card.did.clear()
        if early:
            outlet.gather(source, True)
        sent = outlet.send_all(source, 1, 30.0, True, collect=turn == 1)
        if turn == 2:
            assert not sent.digests, "left for later"
            outlet.collect(sent)
        launches = [did for did in card.did if did[0] == "launch"]
        assert len(launches) == 1 + parts
        assert sum(nbytes for _, nbytes, *_ in launches) == sent.bytes == plan.total_bytes
        assert [cleared for *_, cleared in launches] == [early, False][: len(launches)]
        for key, array in wanted.items():
            np.testing.assert_array_equal(got[key], array)
        assert outlet.claims(sent) == np.array([sent.digests[t] for t in sorted(sent.digests)], np.uint64).tobytes()
    (lane,) = outlet.channels[0].lanes
    made: Any = lane.launcher(False)
    whole = run(
        made.tables, [a.values for a in source.shards(lane.leaves, 0)],
        [memory[t] for t in lane.numbers], len(lane.numbers),
    )  # fmt: skip
    assert [sent.digests[t] for t in lane.numbers] == whole
    assert outlet.digests(source) == sent.digests


def test_what_was_made_ready_for_another_sync_is_not_launched(card: Card, world: World) -> None:
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    _, memory = blank(world, plan)
    outlet, source, other = attached(plan, memory), source_of(world, plan), source_of(world, plan)
    card.permit = 71
    for digest, given in ((False, source), (True, other)):  # without digests; of other arrays
        outlet.gather(source, True)
        outlet.send_all(given, 1, 30.0, digest)
        assert card.did[-1][2:] == (digest, False)
    outlet.gather(source, True)
    outlet.staged = True
    with pytest.raises(TransportError, match="has not exported its shadow memory"):
        outlet.send_all(source, 1, 30.0, True)
    assert outlet._closed


def test_blocks_that_were_refused_are_an_error(card: Card, world: World) -> None:
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    _, memory = blank(world, plan)
    before = {t: array.copy() for t, array in memory.items()}
    outlet = attached(plan, memory)
    card.permit = 72  # another version's
    with pytest.raises(TransportError, match="did not let us write"):
        outlet.send_all(source_of(world, plan), 1, 30.0)
    assert outlet._closed
    later = attached(plan, memory)
    sent = later.send_all(source_of(world, plan), 1, 30.0, collect=False)
    with pytest.raises(TransportError, match="did not let us write"):
        later.collect(sent)
    assert all(np.array_equal(array, before[t]) for t, array in memory.items())


def test_shadows_are_unmapped_once_nothing_runs() -> None:
    """What a trainer lets go of before engines sleep: mappings of shadows, and of nothing else."""
    order: list[str] = []
    mapped = lambda name: SimpleNamespace(mapped=SimpleNamespace(close=lambda: order.append(name)))
    lane = Lane(0, 0, [], [], [], 0)
    port = Port("p/0", 0, [lane])
    live: Any = mapped("live")
    port.into.update({(False, 0): live, (True, 0): mapped("shadow")})  # type: ignore[dict-item]
    outlet: Any = _ipc_outlet.IpcOutlet.__new__(_ipc_outlet.IpcOutlet)
    outlet._streams = {0: SimpleNamespace(synchronize=lambda: order.append("idle"))}
    outlet.channels = [port]
    outlet.let_go_of_shadows()
    outlet.let_go_of_shadows()
    assert order == ["idle", "shadow", "idle"], "not while a kernel may write there, and once"
    assert outlet._destination(port, lane, False) is live
    with pytest.raises(TransportError, match="shadow memory"):
        outlet._destination(port, lane, True)

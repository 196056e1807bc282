"""Sparse syncs without an engine: changes are found, packed and written, M devices to N ranks, against plain numpy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jvlab._deadline import Deadline
from jvlab._errors import SyncDeadline, TransportError
from jvlab.layout import _sparse
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import source_order
from jvlab.sync._coordinator import Coordinator
from jvlab.sync._pack import Source
from jvlab.sync._senders import BucketSenders, Changes, Held, Sent
from jvlab.transport._choose import listen, open_receiver
from jvlab.wire._sync_words import Terms
from tests.layout.plan_interpreter import execute, scatter_bucket, target_view
from tests.layout.plan_world import World
from tests.sync.test_pack import arrays_of, make

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "uint8"]
NAMED = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(NAMED.get(name, name))


def some_bits(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bit patterns, NaN of every kind and both zeros among them."""
    size = int(np.prod(shape)) * dtype_of(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return raw.view(dtype_of(dtype)).reshape(shape)


def words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}")


def altered(values: np.ndarray, share: float, seed: int) -> np.ndarray:
    out = words(values).copy()
    some = np.random.default_rng(seed).random(out.size) < share
    out[some] ^= 1
    return out.view(values.dtype).reshape(values.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.004, 0.3, 1.0])
def test_a_box_of_changes_is_found_packed_and_written(dtype: str, share: float) -> None:
    # 13 elements at the end are less than a 64-bit word; the box is a strided view, and transposed in the engine
    whole = some_bits(dtype, (37, 61), 1)
    old = whole[:, 3:50]
    new = altered(whole, share, 2)[:, 3:50]
    held = words(old).view(np.uint8)
    positions = _sparse.changed(new, held)
    expected = np.array([k for k in range(old.size) if words(new)[k] != words(old)[k]])
    assert positions.tolist() == expected.tolist()
    item = new.itemsize
    (part,), total = _sparse.sections([len(positions)], [old.size], [item])
    out = np.zeros(total, np.uint8)
    out[:8] = np.array([len(positions)], "<i8").view(np.uint8)
    _sparse.pack_box(part, new, positions, out)
    (read,) = _sparse.read_sections(out, total, [old.size], [item])
    assert read == part
    assert part.whole == (share == 1.0)
    assert part.masked == (share == 0.3)
    # in a matrix of 50 by 40, from row 2, column 1
    engine = np.zeros(60 * 40, f"u{item}")
    place = lambda memory: (
        np.lib.stride_tricks.as_strided(
            memory[2 * 40 + 1 :], (47, 37), (40 * item, item)
        ).T
    )
    place(engine)[...] = words(old).reshape(37, 47)
    wanted = np.zeros(60 * 40, f"u{item}")
    place(wanted)[...] = words(new).reshape(37, 47)
    where = (2 * 40 + 1, (37, 47), (1, 40))
    _sparse.put(
        engine, _sparse.positions_of(read, out), _sparse.values_of(read, out), *where
    )
    np.testing.assert_array_equal(engine, wanted)


def test_the_scatter() -> None:
    memory = np.zeros(100, np.uint16)
    positions = np.array([0, 5, 11], np.uint32)
    values = np.array([7, 8, 9], np.uint16)
    _sparse.put(memory, positions, values, 3, (3, 4), (20, 2))
    assert np.flatnonzero(memory).tolist() == [3, 3 + 20 + 2, 3 + 40 + 6]
    assert memory[memory > 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "damage", ["count", "negative", "outside", "bits", "cut", "more"]
)
def test_a_damaged_bucket_is_refused(damage: str) -> None:
    old = some_bits("bfloat16", (640,), 1)
    share = 0.2 if damage == "bits" else 0.01
    new = altered(old, share, 3)
    positions = _sparse.changed(new, old.view(np.uint8))
    (part,), total = _sparse.sections([len(positions)], [640], [2])
    out = np.zeros(total, np.uint8)
    out[:8] = np.array([len(positions)], "<i8").view(np.uint8)
    _sparse.pack_box(part, new, positions, out)
    nbytes = total
    if damage == "count":
        out[:8] = np.array([641], "<i8").view(np.uint8)
    elif damage == "negative":
        out[:8] = np.array([-1], "<i8").view(np.uint8)
    elif damage == "outside":
        out[part.at : part.at + 4].view("<u4")[0] = 640
    elif damage == "bits":
        out[part.at] ^= 1
    else:
        nbytes += 16 if damage == "more" else -16

    def read() -> None:
        (found,) = _sparse.read_sections(out[:nbytes], nbytes, [640], [2])
        _sparse.positions_of(found, out)

    with pytest.raises(TransportError, match="sparse bucket"):
        read()


# M devices to N ranks -------------------------------------------------------------------------------------------------


class Engines:
    """The receiving side in threads, on numpy memory; it decodes sparse buckets by itself, element by element."""

    def __init__(
        self, world: World, plan: TransferPlan, senders: BucketSenders
    ) -> None:
        self.plan = plan
        self.params = world.blank_params(plan)
        self.senders = senders
        self.sparse = 0
        self.receivers = {
            (channel.replica, channel.rank): open_receiver(
                channel.sender.endpoint(), 10.0
            )
            for channel in senders.channels
        }
        senders.ready(10.0)

    def sync(self, source: Source, changes: Changes, version: int, holds: bool) -> Sent:
        self.senders.changes = changes
        self.senders.settle(source, staged=False)
        replies: dict[str, list[dict[str, Any]]] = {}
        for replica, rank in self.receivers:
            replies.setdefault(replica, []).append({"rank": rank, "holds_base": holds})
        self.senders.attach(replies)
        threads = [
            threading.Thread(target=self._take, args=(channel,), daemon=True)
            for channel in self.senders.channels
        ]
        for thread in threads:
            thread.start()
        sent = self.senders.send_all(source, version, 60.0)
        for thread in threads:
            thread.join(10.0)
        self.senders.changes = None
        return sent

    def _take(self, channel: Any) -> None:
        receiver = self.receivers[channel.replica, channel.rank]
        for _ in channel.jobs:
            received = receiver.recv(60.0)
            header = received.header
            link = source_order(self.plan.link(header.device, channel.rank, 0))
            if header.nbytes == link.bucket_sizes[header.bucket]:
                scatter_bucket(
                    self.plan, link, header.bucket, received.data, self.params
                )
            else:
                self.sparse += 1
                self._patch(link, header.bucket, bytes(received.data))
            receiver.release(received)

    def _patch(self, link: Any, bucket: int, data: bytes) -> None:
        boxes = np.flatnonzero(link.bucket == bucket).tolist()
        counts = np.frombuffer(data, "<i8", len(boxes)).tolist()
        at = -(-8 * len(boxes) // 16) * 16
        for i, count in zip(boxes, counts, strict=True):
            view = target_view(self.plan, link, i, self.params)
            elements = view.size
            item = int(link.nbytes[i]) // elements
            if count == elements:
                where = list(range(elements))
            elif 32 * count > elements:
                size = -(-elements // 32) * 4
                mask = int.from_bytes(data[at : at + size], "little")
                where = [k for k in range(elements) if mask >> k & 1]
                at += -(-size // 16) * 16
            else:
                where = np.frombuffer(data, "<u4", count, at).tolist()
                at += -(-4 * count // 16) * 16
            values = np.frombuffer(data, f"u{item}", count, at).view(view.dtype)
            at += -(-item * count // 16) * 16
            for position, value in zip(where, values, strict=True):
                view[np.unravel_index(position, view.shape)] = value
        assert at == len(data)


def train(world: World, share: float, seed: int) -> None:
    """Change a share of every leaf's values."""
    drawn = np.random.default_rng(seed)
    for path, value in world.values.items():
        new = value.copy()
        some = drawn.random(value.shape) < share
        new[some] = (drawn.random(int(some.sum())) - 0.5).astype(value.dtype)
        world.values[path] = new


def wanted_of(world: World, plan: TransferPlan) -> dict[Any, np.ndarray]:
    wanted = world.blank_params(plan)
    execute(plan, world.shards(), wanted)
    return wanted


CASES = [
    ("fsdp=1", 1, "einsum", "float32"),
    ("fsdp=3,tp=2", 2, "scanned", "bfloat16"),
    ("fsdp=2", 2, "fused", "float16"),
    ("dp=2,fsdp=2", 2, "einsum", "float32"),
]


@pytest.mark.parametrize(("mesh", "tp", "layout", "dtype"), CASES)
def test_changes_arrive_where_everything_would(
    mesh: str, tp: int, layout: str, dtype: str
) -> None:
    world, plan = make(mesh, tp, layout, dtype)
    senders = BucketSenders(
        plan,
        {"a": 0},
        lambda room, _replica, _rank: listen("loopback", slot_bytes=room, slots=2),
    )
    engines = Engines(world, plan, senders)
    held = Held()

    def sync(version: int, holds: bool = True, known: bool = True) -> tuple[Sent, Any]:
        changes = Changes(held, version, Deadline(60))
        source = Source(plan, arrays_of(world))
        sent = engines.sync(source, changes, version, holds)
        wanted = wanted_of(world, plan)
        assert all(np.array_equal(engines.params[key], wanted[key]) for key in wanted)
        assert sent.digests == senders.digests(source), "of everything, not of changes"
        if known:
            changes.committed()
        return sent, changes

    first, changes = sync(1, holds=False)
    assert not first.sparse
    assert changes.share is None
    assert "no earlier sync" in changes.why_full(0, first.buckets)
    assert held.nbytes == senders.total_bytes
    for version, share in enumerate((0.01, 0.2, 0.0), 2):
        train(world, share, version)
        sent, changes = sync(version)
        assert sent.sparse
        assert sent.bytes < sent.full_bytes == senders.total_bytes
        assert changes.share is not None
        assert changes.share <= 1.5 * share + 1e-9
    # a commit that nobody heard of: the copy stays, and holds another mark than the engines
    mark = held.mark
    train(world, 0.02, 10)
    sync(5, known=False)
    assert held.mark == mark
    train(world, 0.02, 11)
    sent, changes = sync(6, holds=False)
    assert not sent.sparse, "nobody holds the base: everything is sent"
    assert "a did not hold the base" in changes.why_full(0, sent.buckets)
    train(world, 1.0, 12)
    sent, changes = sync(7)
    assert changes.share is not None
    assert changes.share > 0.9
    assert sent.bytes <= sent.full_bytes
    senders.close()


def test_replicas_that_get_the_same_share_one_copy() -> None:
    world, plan = make("fsdp=2", 2)
    senders = BucketSenders(
        plan,
        {"a": 0, "b": 1},
        lambda room, _replica, _rank: listen("loopback", slot_bytes=room, slots=2),
    )
    changes = Changes(held := Held(), 1, Deadline(60))
    senders.changes = changes
    senders.settle(Source(plan, arrays_of(world)), staged=False)
    changes.committed()
    assert held.nbytes == senders.total_bytes // 2
    senders.close()


def test_seeking_changes_ends_at_the_deadline() -> None:
    world, plan = make("fsdp=1", 1)
    senders = BucketSenders(
        plan,
        {"a": 0},
        lambda room, _replica, _rank: listen("loopback", slot_bytes=room, slots=2),
    )
    senders.changes = Changes(Held(), 1, Deadline(1e-9))
    with pytest.raises(SyncDeadline, match="changes were sought"):
        senders.settle(Source(plan, arrays_of(world)), staged=False)
    senders.close()


def test_an_interrupt_at_the_commit_leaves_nothing_to_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stepper would send by changes that were found for another sync."""
    pool: Any = SimpleNamespace(client=SimpleNamespace(link=lambda: None))
    agreed: Any = SimpleNamespace(transport="shm", meaning=None)
    coordinator = Coordinator(pool, agreed, None)
    senders = SimpleNamespace(no_delta="", total_bytes=0, replicas={}, changes=None)
    transaction: Any = SimpleNamespace(
        senders=senders, terms=Terms(version=1), run=lambda listener: None
    )
    monkeypatch.setattr(coordinator, "begin", lambda *_: transaction)

    def interrupt(changes: Changes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Changes, "committed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        coordinator.sync({}, None, Terms(1, delta="always"), Deadline(60), False)
    assert senders.changes is None

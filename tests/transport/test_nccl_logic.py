"""The nccl transport without a GPU: negotiation, protocol, overlap, deadlines, ends; and the packing's tables."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jvlab._errors import ConfigError, TransportError
from jvlab.layout._digest import MASK
from jvlab.sync._device_pack import digest_box, pack_box
from jvlab.sync._pack import LinkPack
from jvlab.transport import NAMES, Faults, Header, _nccl, choose
from jvlab.transport._ipc_tables import tables
from jvlab.transport._nccl import NcclReceiver, NcclSender
from jvlab.transport._peer import Clock
from tests.transport import ipc_interpreter
from tests.transport.fake_gpu import FakeGpu, FakePair, Hub

ROOM = 1 << 12


def pattern(bucket: int, nbytes: int) -> bytes:
    return hashlib.shake_128(f"bucket {bucket}".encode()).digest(nbytes)


def put(sender: Any, bucket: int, nbytes: int = ROOM, deadline: float = 60.0) -> None:
    data = pattern(bucket, nbytes)
    sender.send(
        Header(7, 2, bucket, nbytes),
        lambda view: view.__setitem__(slice(None), data),
        deadline,
    )


class Ends:
    """A channel of two fake GPUs in this process, over a real line."""

    def __init__(
        self, slots: int = 2, versions: tuple[int, int] = (22907, 22907)
    ) -> None:
        self.hub = Hub()
        self.gpus: list[Any] = [FakeGpu(self.hub, v) for v in versions]
        self.sender = NcclSender(
            ROOM, slots, "rank 1 of replica-0", "the trainer", "127.0.0.1", self.gpus[0]
        )
        self.receiver: Any = None
        self.threads = ThreadPoolExecutor(2)

    def open(self) -> Ends:
        ready = self.threads.submit(self.sender.ready, 60.0)
        try:
            self.receiver = NcclReceiver(
                self.sender.endpoint(), Clock(60.0), "the rank", self.gpus[1]
            )
        except BaseException:
            self.sender.close()
            raise
        ready.result(60)
        return self

    def close(self) -> None:
        self.sender.close()
        if self.receiver is not None:
            self.receiver.close()
        self.threads.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def ends(**options: Any) -> Ends:
        made.append(Ends(**options))
        return made[-1]

    yield ends
    for one in made:
        one.close()
    for thread in threading.enumerate():
        assert not thread.name.startswith("jvlab-nccl"), "an end was not ended"


# ---- negotiation ---------------------------------------------------------------------------------------------------


def test_an_endpoint_is_plain_values_and_says_the_version(
    make: Callable[..., Ends],
) -> None:
    endpoint = make().sender.endpoint()
    assert endpoint["transport"] == "nccl"
    assert endpoint["nccl"] == 22907
    assert len(bytes.fromhex(endpoint["identity"])) == _nccl.ID_BYTES
    assert all(isinstance(v, (str, int, dict)) for v in endpoint.values())


def test_an_identity_is_made_once_and_only_when_it_is_asked_for(
    make: Callable[..., Ends],
) -> None:
    ends = make()
    assert ends.hub.made == 0
    assert ends.sender.endpoint() == ends.sender.endpoint()
    ends.open()
    assert ends.hub.made == 1


def test_different_versions_are_named(make: Callable[..., Ends]) -> None:
    ends = make(versions=(22907, 22705))
    with pytest.raises(
        TransportError, match=r"NCCL 2\.29\.7, this process 2\.27\.5"
    ) as error:
        ends.open()
    assert error.value.fields["reason"] == "version"
    assert "same nvidia-nccl wheel" in error.value.remedy


@pytest.mark.parametrize("wrong", [{"identity": "00"}, {"nccl": None}])
def test_an_endpoint_that_makes_no_sense(
    make: Callable[..., Ends], wrong: dict[str, Any]
) -> None:
    ends = make()
    ready = ends.threads.submit(ends.sender.ready, 1.0)
    with pytest.raises(TransportError):
        NcclReceiver(
            {**ends.sender.endpoint(), **wrong}, Clock(1.0), "the rank", ends.gpus[1]
        )
    with pytest.raises(TransportError):
        ready.result(60)


@pytest.mark.parametrize(
    ("same_host", "device", "engine", "name", "words"),
    [
        (False, "gpu", "cuda", "nccl", "different hosts"),
        (True, "gpu", "cuda", "ipc", "one host"),
    ],
)
def test_auto(same_host: bool, device: str, engine: str, name: str, words: str) -> None:
    found, why = choose("auto", same_host, device, 1 << 40, 1, engine)
    assert found == name
    assert words in why


def test_asked_for() -> None:
    assert "nccl" in NAMES
    name, why = choose("nccl", True, "gpu", 0, 1, "cuda")
    assert name == "nccl"
    assert "NCCL_HOSTID" in why
    for device, engine, words in (
        ("cpu", "cuda", "parameters are on cpu"),
        ("gpu", "cpu", "engines run on cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose("nccl", True, device, 1 << 40, 1, engine)


def test_version_text() -> None:
    assert _nccl.version_text(22907) == "2.29.7"


# ---- protocol ------------------------------------------------------------------------------------------------------


def test_the_same_bytes_in_the_same_order(make: Callable[..., Ends]) -> None:
    ends = make(slots=3).open()
    sizes = [ROOM, 1, 0, 777, ROOM, 16, 0, 4095]

    def feed() -> None:
        for bucket, size in enumerate(sizes):
            put(ends.sender, bucket, size)
        ends.sender.flush(60.0)

    feeding = ends.threads.submit(feed)
    for bucket, size in enumerate(sizes):
        received = ends.receiver.recv(60.0)
        assert received.header == Header(7, 2, bucket, size)
        assert len(received.data) == size
        assert bytes(received.data) == pattern(bucket, size)
        ends.receiver.release(received)
    feeding.result(60)
    assert ends.sender.arrived() == len(sizes)


def test_buckets_are_device_memory(make: Callable[..., Ends]) -> None:
    ends = make().open()
    put(ends.sender, 0, 100)
    received = ends.receiver.recv(60.0)
    interface = received.data.__cuda_array_interface__
    assert interface["shape"] == (100,)
    assert interface["data"][0] == received.data.pointer
    assert bytes(received.data[10:20]) == pattern(0, 100)[10:20]
    ends.receiver.release(received)


def test_room_is_bounded_and_flush_waits_for_the_release(
    make: Callable[..., Ends],
) -> None:
    ends = make(slots=2).open()
    put(ends.sender, 0)
    put(ends.sender, 1)
    with pytest.raises(TransportError, match="rank 1 of replica-0") as error:
        put(ends.sender, 2, deadline=0.2)
    assert error.value.fields["reason"] == "deadline"
    first = ends.receiver.recv(60.0)
    second = ends.receiver.recv(60.0)  # the third is not there: two slots
    ends.receiver.release(first)
    put(ends.sender, 2)
    with pytest.raises(TransportError, match="release 2 of 3"):
        ends.sender.flush(0.1)
    ends.receiver.release(second)
    ends.receiver.release(ends.receiver.recv(60.0))
    ends.sender.flush(60.0)


def test_what_is_announced_is_posted_while_another_is_in_use(
    make: Callable[..., Ends],
) -> None:
    ends = make(slots=3).open()
    for bucket in range(3):
        put(ends.sender, bucket)
    received = ends.receiver.recv(60.0)
    assert [header.bucket for _, header, _ in ends.receiver._posted] == [1, 2]
    ends.receiver.release(received)
    for bucket in (1, 2):
        received = ends.receiver.recv(60.0)
        assert bytes(received.data) == pattern(bucket, ROOM)
        ends.receiver.release(received)
    ends.sender.flush(60.0)


def test_a_slot_is_not_filled_before_its_send_has_ended(
    make: Callable[..., Ends],
) -> None:
    ends = make(slots=1).open()
    for bucket in range(4):
        put(ends.sender, bucket)
        received = ends.receiver.recv(60.0)
        assert bytes(received.data) == pattern(bucket, ROOM)
        ends.receiver.release(received)
    ends.sender.flush(60.0)


def test_faults_work_on_device_memory(make: Callable[..., Ends]) -> None:
    ends = make(slots=2).open()
    put(Faults(flip=0).wrap(ends.sender), 0, 100)
    received = ends.receiver.recv(60.0)
    assert (
        sum(a != b for a, b in zip(bytes(received.data), pattern(0, 100), strict=True))
        == 1
    )
    ends.receiver.release(received)


def test_a_failure_arrives_with_its_words(make: Callable[..., Ends]) -> None:
    ends = make().open()
    put(ends.sender, 0)
    ends.receiver.fail("no room for lm_head")
    with pytest.raises(TransportError, match="no room for lm_head"):
        ends.sender.flush(60.0)
    assert ends.hub.aborted == 1  # ours: nothing of it stays on the GPU


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_bytes_that_never_come_meet_the_deadline_and_end_the_communicator(
    make: Callable[..., Ends],
) -> None:
    ends = make().open()
    ends.hub.silent = True
    put(ends.sender, 0)
    start = time.monotonic()
    with pytest.raises(
        TransportError, match="send the bytes of a bucket that it announced"
    ) as error:
        ends.receiver.recv(0.3)
    assert error.value.fields["reason"] == "deadline"
    assert time.monotonic() - start > 0.25
    assert ends.hub.aborted == 1
    with pytest.raises(TransportError, match="closed"):
        ends.receiver.recv(0.3)


def test_the_sender_ends_while_bytes_are_waited_for(make: Callable[..., Ends]) -> None:
    ends = make().open()
    ends.hub.silent = True
    put(ends.sender, 0)
    participants = ends.threads.submit(ends.receiver.recv, 300.0)
    time.sleep(0.1)
    ends.sender.close()
    with pytest.raises(TransportError, match="closed the channel"):
        participants.result(60)
    assert ends.hub.aborted == 2


def test_the_receiver_ends_while_a_release_is_waited_for(
    make: Callable[..., Ends],
) -> None:
    ends = make().open()
    ends.hub.silent = True
    put(ends.sender, 0)
    flushing = ends.threads.submit(ends.sender.flush, 300.0)
    time.sleep(0.1)
    ends.receiver.close()
    with pytest.raises(TransportError, match="closed the channel"):
        flushing.result(60)
    assert ends.hub.aborted == 2


def test_close_of_another_thread_ends_recv(make: Callable[..., Ends]) -> None:
    ends = make().open()
    ends.hub.silent = True
    put(ends.sender, 0)
    participants = ends.threads.submit(ends.receiver.recv, 300.0)
    time.sleep(0.1)
    ends.receiver.close()
    with pytest.raises(TransportError):
        participants.result(60)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_side_that_never_joins_the_communicator(
    make: Callable[..., Ends], missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = make()
    stuck = threading.Event()

    def late(identity: bytes, rank: int) -> FakePair:
        stuck.wait(200)
        return FakePair(ends.gpus[missing], identity, rank)

    monkeypatch.setattr(ends.gpus[missing], "pair", late)
    ready = ends.threads.submit(ends.sender.ready, 2.0 if missing else 200.0)
    opening = ends.threads.submit(
        NcclReceiver,
        ends.sender.endpoint(),
        Clock(200.0 if missing else 2.0),
        "the rank",
        ends.gpus[1],
    )
    with pytest.raises(TransportError, match="join the NCCL communicator"):
        (ready if missing else opening).result(60)
    assert ends.hub.aborted == 1
    stuck.set()
    for other in (ready, opening):
        assert other.exception(60) is not None


def test_a_new_channel_works_after_a_failure(make: Callable[..., Ends]) -> None:
    broken = make().open()
    broken.hub.silent = True
    put(broken.sender, 0)
    broken.receiver.close()
    with pytest.raises(TransportError):
        broken.sender.flush(60.0)
    fresh = make().open()
    put(fresh.sender, 5)
    assert bytes(fresh.receiver.recv(60.0).data) == pattern(5, ROOM)


def test_close_twice_and_before_anybody_came(make: Callable[..., Ends]) -> None:
    ends = make()
    ends.sender.close()
    ends.sender.close()
    with pytest.raises(TransportError, match="closed"):
        ends.sender.ready(1.0)


# ---- packing on the device -----------------------------------------------------------------------------------------


def test_buckets_and_digests_of_a_plan() -> None:
    """The tables of DevicePack, run by the numpy interpreter of the kernels, against LinkPack."""
    from tests.transport.plan_ends import RANKS, make

    world, plan = make()
    shards = world.shards()

    class Held:
        def shard(self, path: str, device: int) -> np.ndarray:
            return shards[path, device]

        def memory(self, path: str, device: int) -> np.ndarray:
            return shards[path, device].reshape(-1)

    source: Any = Held()
    for device in range(3):
        for rank in range(RANKS):
            pack = LinkPack(plan, device, rank, 0)
            for bucket, size in enumerate(pack.sizes):
                check_bucket(pack, bucket, size, source)


def check_bucket(pack: LinkPack, bucket: int, size: int, source: Any) -> None:
    boxes = [box for _, box in pack.buckets[bucket]]
    wanted = bytearray(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pack, "_values", lambda i, box, source: reference(pack, box, source)
        )
        values = pack.values(bucket, source)
    pack.write(bucket, values, memoryview(wanted))
    leaves = list(dict.fromkeys(box.leaf for box in boxes))
    sources = [source.memory(leaf, pack.device) for leaf in leaves]
    rooms = [
        np.zeros(int(np.prod(box.shape)), values[k].dtype)
        for k, box in enumerate(boxes)
    ]
    pieces = [pack_box(box, k, leaves.index(box.leaf)) for k, box in enumerate(boxes)]
    ipc_interpreter.run(tables(pieces), sources, rooms, 1, digest=False)
    found = bytearray(size)
    for box, room in zip(boxes, rooms, strict=True):
        found[box.at : box.at + box.nbytes] = room.tobytes()
    assert found == wanted
    numbers = sorted(pack.targets(bucket))
    pieces = [
        digest_box(box, numbers.index(box.target), leaves.index(box.leaf))
        for box in boxes
    ]
    storage = [np.zeros(10_000, values[0].dtype) for _ in numbers]
    sums = ipc_interpreter.run(tables(pieces), sources, storage, len(numbers))
    assert {t: s & MASK for t, s in zip(numbers, sums, strict=True)} == pack.digests(
        bucket, values
    )


def reference(pack: LinkPack, box: Any, source: Any) -> np.ndarray:
    """A box's numbers by numpy: LinkPack computes what is cast or added to by JAX, from JAX arrays."""
    from numpy.lib.stride_tricks import as_strided

    from jvlab.layout._plan_types import convert

    flat = source.memory(box.leaf, pack.device)
    view = as_strided(
        flat[box.src_offset :], box.shape, [s * flat.itemsize for s in box.src_strides]
    )
    return convert(view, box.transform)

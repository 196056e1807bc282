"""Buckets in: accounting, refusals, threads that end. Loopback channels, no engine, no torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jvlab._errors import TransportError
from jvlab.engine.worker._receivers import (
    Ledger,
    ReceivedBox,
    Receivers,
    ReceivingChannel,
)
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype, source_order
from jvlab.layout._tree import MeshSpec
from jvlab.transport._choose import listen, open_receiver
from jvlab.transport._peer import Header
from tests.layout.plan_interpreter import execute, pack_bucket
from tests.layout.plan_world import Size, World, transformer


class Rank:
    """Memory of one rank in numpy, with everything that an Intake wants."""

    def __init__(
        self, world: World, plan: TransferPlan, rank: int, channels: int = 1
    ) -> None:
        self.plan, self.rank = plan, rank
        self.params = world.blank_params(plan)
        self.links = {
            int(d): source_order(plan.link(int(d), rank)) for d in plan.devices
        }
        self.ledger = Ledger(list(self.links.values()))
        self.senders = [
            listen("loopback", slot_bytes=1 << 20, slots=2) for _ in range(channels)
        ]
        devices = sorted(self.links)
        self.channels = [
            ReceivingChannel(
                open_receiver(s.endpoint(), 30.0), tuple(devices[k::channels]), k
            )
            for k, s in enumerate(self.senders)
        ]
        self.finished: list[int] = []
        self.ended = 0
        self.receivers = Receivers(
            self.channels, self.ledger, self.scatter, self.finished.append, self.end
        )

    def end(self) -> None:
        self.ended += 1

    def scatter(self, box: ReceivedBox, data: memoryview) -> None:
        info = self.plan.parameters[self.plan.target_parameter[box.target]]
        flat = self.params[self.rank, info.name].reshape(-1)
        dtype = numpy_dtype(info.dtype)
        at = np.lib.stride_tricks.as_strided(
            flat[box.offset :], box.shape, [s * dtype.itemsize for s in box.strides]
        )
        at[...] = np.frombuffer(
            data, dtype, box.nbytes // dtype.itemsize, box.at
        ).reshape(box.shape)

    def jobs(self) -> list[tuple[int, int]]:
        return sorted(self.ledger.buckets, key=lambda job: (job[1], job[0]))

    def send(
        self, world: World, version: int, jobs: list[tuple[int, int]], resize: int = 0
    ) -> None:
        shards, devices = world.shards(), sorted(self.links)
        for device, bucket in jobs:
            known = device in self.links and bucket < len(
                self.links[device].bucket_sizes
            )
            data = (
                bytes(pack_bucket(self.plan, self.links[device], bucket, shards))
                if known
                else b"12345678"
            )
            data += b"\0" * resize
            sender = self.senders[
                devices.index(device) % len(self.senders) if known else 0
            ]

            def fill(room: memoryview, data: bytes = data) -> None:
                room[:] = data

            sender.send(Header(version, device, bucket, len(data)), fill, 30.0)

    def settled(self, seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while not self.receivers.done and time.monotonic() < end:
            time.sleep(0.002)
        return self.receivers.done

    def close(self) -> None:
        self.receivers.close()
        assert self.receivers.stop(60.0), "threads did not end"
        for sender in self.senders:
            sender.close()


def make(
    mesh: str = "fsdp=2", tp: int = 2, layout: str = "dense"
) -> tuple[World, TransferPlan]:
    world = transformer(
        World(MeshSpec.parse(mesh), tp),
        Size(layers=1),
        layout=layout,
        rotary=layout == "einsum",
    )
    return world, compile_plan(
        world.leaves, world.bindings, world.layouts, bucket_mib=0.002
    )


def own_threads() -> set[threading.Thread]:
    """Those of an intake; other tests' threads come and go."""
    return {
        t
        for t in threading.enumerate()
        if t.name.startswith(("jvlab-receive", "jvlab-finish"))
    }


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    before = own_threads()
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.close()
    assert not own_threads() - before, "receive threads were left"


@pytest.mark.parametrize(
    "layout", ["dense", "einsum", "checkpoint", "scanned", "fused"]
)
@pytest.mark.parametrize("channels", [1, 2])
def test_as_the_interpreter(ranks: list[Rank], layout: str, channels: int):
    world, plan = make(layout=layout)
    expected = world.blank_params(plan)
    execute(plan, world.shards(), expected)
    for number in range(plan.ranks):
        rank = Rank(world, plan, number, channels)
        ranks.append(rank)
        for version in (3, 4):  # the second sync over the same channels
            rank.params.update(world.blank_params(plan))
            rank.receivers.start(version, 30.0)
            rank.send(world, version, rank.jobs())
            for sender in rank.senders:
                sender.flush(30.0)
            assert rank.settled()
            assert rank.receivers.error is None
            assert rank.ledger.missing() == []
            assert rank.ledger.bytes == sum(
                b.nbytes for b in rank.ledger.buckets.values()
            )
        for key, value in expected.items():
            if key[0] == number:
                assert np.array_equal(rank.params[key], value), key
        assert sorted(rank.finished) == sorted([*rank.ledger.boxes] * 2), (
            "each target is finished once a sync"
        )
        assert rank.ended == 2


def test_order_does_not_matter(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    rank.receivers.start(1, 30.0)
    rank.send(world, 1, rank.jobs()[::-1])
    assert rank.settled()
    expected = world.blank_params(plan)
    execute(plan, world.shards(), expected)
    assert all(
        np.array_equal(rank.params[key], value) for key, value in expected.items()
    )


def test_another_version_is_dropped(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    before = {k: v.copy() for k, v in rank.params.items()}
    rank.receivers.start(2, 30.0)
    rank.send(world, 1, rank.jobs())
    rank.senders[0].flush(30.0)
    assert rank.receivers.dropped == len(rank.jobs())
    assert all(np.array_equal(before[k], v) for k, v in rank.params.items()), (
        "an older bucket wrote memory"
    )
    assert not rank.receivers.done
    rank.send(world, 2, rank.jobs())
    assert rank.settled()
    assert rank.receivers.error is None


@pytest.mark.parametrize(
    ("jobs", "resize", "words"),
    [
        (lambda all_: [all_[0], all_[0]], 0, "arrived twice"),
        (
            lambda all_: [(all_[0][0], 999)],
            0,
            "bucket 999 of device 0 is not in the plan",
        ),
        (lambda all_: [(77, 0)], 0, "bucket 0 of device 77 is not in the plan"),
        (lambda all_: [all_[0]], 4, "in the plan it has"),
    ],
)
def test_refused_and_told(ranks: list[Rank], jobs, resize: int, words: str):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    rank.receivers.start(1, 30.0)
    rank.send(world, 1, jobs(rank.jobs()), resize)
    with pytest.raises(TransportError, match=words):  # the trainer learns why, at once
        rank.senders[0].flush(30.0)
    assert rank.settled()
    assert words in str(rank.receivers.error)
    assert rank.ended == 0


def test_a_bucket_that_never_comes(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    jobs = rank.jobs()
    rank.receivers.start(1, 2.0)
    rank.send(world, 1, jobs[:-1])
    assert rank.settled()
    device, bucket = jobs[-1]
    assert f"1 bucket, the first: {bucket} of device {device} did not arrive" in str(
        rank.receivers.error
    )
    assert "trainer process 0" in str(rank.receivers.error)


def test_stop_in_the_middle(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    rank.receivers.start(1, 600.0)
    rank.send(world, 1, rank.jobs()[:1])
    rank.senders[0].flush(30.0)
    assert rank.receivers.stop(60.0), "it does not wait for the next bucket"
    assert rank.receivers.error is None, "to be stopped is no failure"
    with pytest.raises(TransportError, match="open the link again"):
        rank.receivers.start(2, 1.0)


def test_stop_before_and_after_keeps_the_channel(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)
    assert rank.receivers.stop(60.0)
    rank.receivers.start(1, 30.0)
    rank.send(world, 1, rank.jobs())
    assert rank.settled()
    end = time.monotonic() + 60
    while rank.receivers.running and time.monotonic() < end:
        time.sleep(0.002)
    assert rank.receivers.stop(60.0)
    rank.receivers.start(2, 30.0)
    rank.send(world, 2, rank.jobs())
    assert rank.settled()
    assert rank.receivers.error is None


def test_what_finishing_raises_is_told(ranks: list[Rank]):
    world, plan = make(tp=1)
    rank = Rank(world, plan, 0)
    ranks.append(rank)

    def broken(target: int) -> None:
        raise RuntimeError(f"no room to pack {target}")

    rank.receivers._finish = broken
    rank.receivers.start(1, 30.0)
    with contextlib.suppress(TransportError):  # it may learn before it has sent all
        rank.send(world, 1, rank.jobs())
    assert rank.settled()
    assert "no room to pack" in str(rank.receivers.error)

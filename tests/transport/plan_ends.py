"""A real plan, three devices to two ranks, as the processes of a test execute it."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "layout"))
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._tree import MeshSpec
from jvlab.transport import Header, listen, open_receiver
from tests.layout.plan_interpreter import pack_bucket, scatter_bucket
from tests.layout.plan_world import Size, World, transformer

DEVICES, RANKS = 3, 2


def make() -> tuple[World, TransferPlan]:
    """The same in every process: values are drawn from a seed."""
    world = transformer(
        World(MeshSpec.parse(f"fsdp={DEVICES}"), RANKS),
        Size(),
        layout="einsum",
        rotary=True,
    )
    plan = compile_plan(
        world.leaves,
        world.bindings,
        world.layouts,
        bucket_mib=1000 / (1 << 20),
        device_process={d: d for d in range(DEVICES)},
    )
    return world, plan


def digest(value: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


class PlanSender:
    """The trainer process of one device."""

    def __init__(self, device: int, transport: str) -> None:
        self.world, self.plan = make()
        self.device = device
        self.links = [self.plan.link(device, rank) for rank in range(RANKS)]
        room = [max(link.bucket_sizes.tolist(), default=1) for link in self.links]
        self.senders = [
            listen(transport, slot_bytes=size, slots=2, peer=f"rank {r}")
            for r, size in enumerate(room)
        ]

    def send(self) -> int:
        """Both channels at once; the number of buckets."""
        # This process may read its own device's shards, no others.
        shards = {
            key: value
            for key, value in self.world.shards().items()
            if key[1] == self.device
        }
        with ThreadPoolExecutor(RANKS) as threads:
            counts = list(
                threads.map(lambda rank: self._send(rank, shards), range(RANKS))
            )
        return sum(counts)

    def _send(self, rank: int, shards: dict[tuple[str, int], np.ndarray]) -> int:
        sender, link = self.senders[rank], self.links[rank]
        sender.ready(300)
        for bucket, size in enumerate(link.bucket_sizes.tolist()):
            data = pack_bucket(self.plan, link, bucket, shards)
            sender.send(
                Header(1, self.device, bucket, size),
                lambda view, data=data: view.__setitem__(slice(None), data),
                20,
            )
        sender.flush(20)
        sender.close()
        return len(link.bucket_sizes)


def receive(rank: int, endpoints: list[dict[str, Any]]) -> dict[str, str]:
    """Digest of each parameter of a rank, after everything arrived."""
    world, plan = make()
    params = {
        key: value for key, value in world.blank_params(plan).items() if key[0] == rank
    }

    def take(device: int) -> None:
        link = plan.link(device, rank)
        receiver = open_receiver(endpoints[device], 300)
        for _ in range(len(link.bucket_sizes)):
            received = receiver.recv(20)
            assert received.header.device == device
            scatter_bucket(plan, link, received.header.bucket, received.data, params)
            receiver.release(received)
        receiver.close()

    with ThreadPoolExecutor(DEVICES) as threads:
        list(threads.map(take, range(DEVICES)))
    return {name: digest(value) for (_, name), value in params.items()}

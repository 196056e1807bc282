"""Three trainer processes to two rank processes: a real plan over real transports gives what the interpreter gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.layout.plan_interpreter import execute
from tests.transport.other_end import Remote
from tests.transport.plan_ends import DEVICES, RANKS, digest, make

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", ["tcp", "shm", "disk", "nixl"])
def test_three_to_two(
    transport: str, clean: None, remote: Callable[[], Remote]
) -> None:
    world, plan = make()
    expected = world.blank_params(plan)
    execute(plan, world.shards(), expected)

    trainers, ranks = (
        [remote() for _ in range(DEVICES)],
        [remote() for _ in range(RANKS)],
    )
    listening = [
        t.start("plan_listen", device=d, transport=transport)
        for d, t in enumerate(trainers)
    ]
    endpoints = [future.result(400).ok() for future in listening]
    receiving = [
        rank.start(
            "plan_receive", rank=r, endpoints=[of_device[r] for of_device in endpoints]
        )
        for r, rank in enumerate(ranks)
    ]
    sending = [trainer.start("plan_send") for trainer in trainers]
    # several buckets a link
    assert sum(future.result(400).ok() for future in sending) > DEVICES * RANKS * 2
    for r, future in enumerate(receiving):
        held = future.result(400).ok()
        assert held == {
            name: digest(value) for (rank, name), value in expected.items() if rank == r
        }
        assert len(held) > 5

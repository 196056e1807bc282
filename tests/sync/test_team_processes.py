"""Real processes of jax.distributed and FSDP2 into a replica without an engine; one is killed with -9."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from tests.engine.worker.fake_trainer import checkpoint
from tests.gateway.fake_lab import FakeLab
from tests.sync.channel_replica import ChannelReplica
from tests.sync.team_processes import TrainerProcesses, all_equal

pytestmark = pytest.mark.slow

# sizes that 4 and 6 devices divide, some of them
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2304,
    "num_hidden_layers": 1,
}


class World:
    """A pool of one replica whose two ranks hold half of every tensor each, and two trainers."""

    def __init__(self, fake: FakeLab) -> None:
        self.fake, self.lab = fake, jv.Lab.attach(fake.address, fake.token)
        self.one, self.two = (
            jv.models.tiny("llama", seed=seed, **SIZES) for seed in (0, 1)
        )
        self.lab.launch(self.one, tensor_parallel=2, name="p").wait(60)
        self.torch, self.jax = (
            TrainerProcesses(self.lab, "p", kind, size)
            for kind, size in (("torch", 2), ("jax", 3))
        )

    @property
    def replica(self) -> Any:
        return self.fake.fakes["p/0"]

    def holds(self, model: str) -> bool:
        """Does live memory hold this checkpoint, bit for bit?"""
        live = self.replica.live
        for name, value in checkpoint(model).items():
            for rank, half in enumerate(np.split(value, 2)):
                if live[name, rank].tobytes() != np.ascontiguousarray(half).tobytes():
                    return False
        return len(live) == 2 * len(checkpoint(model))

    def end(self) -> None:
        for trainer in (self.torch, self.jax):
            trainer.end()
        self.lab._leave()
        self.fake.do(self.replica.close_ranks)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jvlab.lab._launch_settings.resolve_device", lambda device: "cpu")
        patch.setattr("tests.gateway.fake_lab.FakeReplica", ChannelReplica)
        fake = FakeLab(tmp_path_factory.mktemp("team"))
        found = World(fake)
        yield found
        found.end()
        fake.end()


def there_and_back(world: World, trainer: TrainerProcesses, processes: int) -> int:
    connected = all_equal(trainer.ready().ask("connect", model=world.one))
    assert connected["processes"] == list(range(processes))
    for model, other in ((world.two, world.one), (world.one, world.two)):
        report = all_equal(trainer.ask("sync", model=model))
        assert report["verified"]
        assert world.holds(model)
        assert not world.holds(other)
    return int(report["version"])


def test_fsdp2(world: World):
    there_and_back(world, world.torch, 2)
    all_equal(world.torch.ask("close"))


def test_jax_distributed_and_a_process_that_is_killed(world: World):
    version = there_and_back(world, world.jax, 3)
    assert (
        all_equal(world.jax.ask("connect", model=world.one, dies=2, mode="staged"))[
            "version"
        ]
        == version
    )
    answers = world.jax.ask("sync", model=world.two, timeout=60)
    assert answers[2] == {"gone": -signal.SIGKILL}
    for answer in answers[:2]:
        assert (
            f"member 2 of 3 (python {world.jax.processes[2].pid} on"
            in answer["message"]
        ), answers
        assert "every one" in answer["remedy"]
    assert world.holds(world.one), "the old version goes on"
    assert not world.replica.memory.dirty
    # whoever comes next is served, and the version counts on
    assert all_equal(world.torch.ask("connect", model=world.one))["version"] == version
    assert all_equal(world.torch.ask("sync", model=world.two))["version"] == version + 1
    assert world.holds(world.two)
    assert Path(world.two).exists()

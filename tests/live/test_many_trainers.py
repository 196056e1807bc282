"""Trainers that are not one JAX process, into one real engine of two ranks: torch, FSDP2, and jax.distributed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from tests.sync.team_processes import TrainerProcesses, all_equal

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9]
# sizes that 4 and 6 devices divide, some of them
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2304,
    "num_hidden_layers": 2,
}
Memory = dict[tuple[str, int], bytes]


class World:
    """One engine that loaded a checkpoint by itself, another checkpoint of the same shapes, and trainers."""

    def __init__(self, lab: jv.Lab, half: str) -> None:
        self.lab, self.parties = lab, {}
        self.one, self.two = (
            jv.models.tiny("llama", seed=seed, dtype=half, **SIZES) for seed in (0, 1)
        )
        self.pool = lab.launch(
            self.one, tensor_parallel=2, env={"JVLAB_LIVE_WEIGHTS": "1"}, name="many"
        )
        try:
            # their imports take as long as the engine
            for kind, size in (("jax", 2), ("torch", 2), ("jax", 3)):
                self.parties[f"{kind} {size}"] = TrainerProcesses(
                    lab, self.pool.name, kind, size
                )
            self.pool.wait()
        except BaseException:
            self.end()
            raise
        with lab.connect(state_dict(self.one), self.pool) as link:
            plan = link.plan
        self.names = sorted(
            {
                (plan.parameters[p].name, int(r))
                for p, r in zip(plan.target_parameter, plan.target_rank, strict=True)
            }
        )
        self.own = self.memory()
        self.tokens = self.greedy()

    def memory(self) -> Memory:
        """Every live parameter of every rank, as raw bytes: nothing shared with digests."""
        return {(name, rank): self.pool.peek(name, rank) for name, rank in self.names}

    def greedy(self) -> list[int]:
        batch = self.pool.generate(
            [PROMPT], max_tokens=12, temperature=0.0, ignore_eos=True, timeout=120
        )
        return list(batch[0].token_ids)

    def end(self) -> None:
        for party in self.parties.values():
            party.end()
        self.pool.close()


def state_dict(model: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(Path(model).glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.fixture(scope="module")
def world(lab: jv.Lab, half: str) -> Iterator[World]:
    found = World(lab, half)
    yield found
    found.end()


def test_a_state_dict(world: World):
    """Plain tensors with the checkpoint's names: contiguous or not, tied, masters, a module, and all of it verified."""
    import torch

    first, second = state_dict(world.one), state_dict(world.two)
    link = world.lab.connect(first, world.pool)
    assert link.verify(first), "vLLM's own load holds the trainer's bits"
    assert not link.verify(second)
    there = link.sync(second)
    assert there.verified
    assert world.memory() != world.own
    assert world.lab.connect(second, world.pool) is link, (
        "the same shapes share plan, channels and link"
    )
    back = {name: t.T.contiguous().T if t.ndim == 2 else t for name, t in first.items()}
    assert not back["lm_head.weight"].is_contiguous()
    assert link.sync(back).version == there.version + 1
    assert world.memory() == world.own, "bit for bit what vLLM itself loaded"
    with pytest.raises(errors.LayoutError, match="missing now"):
        link.sync({name: t for name, t in first.items() if "norm" not in name})
    with pytest.raises(errors.LayoutError, match=r"float32.*"):
        link.sync({name: t.float() for name, t in first.items()})

    masters = {f"_orig_mod.{name}": t.float() for name, t in second.items()}
    # a second name of the same memory
    masters["_orig_mod.also.weight"] = masters["_orig_mod.lm_head.weight"]
    link = world.lab.connect(masters, world.pool)
    report = link.sync(masters)
    assert report.verified
    assert report.bytes == there.bytes, "the engine's dtype crosses, not the masters'"
    assert (
        link.sync(
            {name: torch.nn.Parameter(t) for name, t in masters.items()},
            verify="sampled",
        ).bytes
        == there.bytes
    )
    link.close()


def check_party(world: World, party: TrainerProcesses, size: int) -> None:
    """Connect, there and back, verified by digests and by what lies in memory."""
    connected = all_equal(party.ready().ask("connect", model=world.one))
    assert connected["processes"] == list(range(size))
    assert connected["transport"] == "shm"
    with pytest.raises(errors.LinkBusy, match=f"python {party.processes[0].pid}"):
        world.lab.connect(state_dict(world.one), world.pool)
    there = all_equal(party.ask("sync", model=world.two))
    assert there["verified"]
    assert there["version"] > connected["version"]
    assert world.memory() != world.own
    assert all_equal(party.ask("verify", model=world.two)) == {
        "ok": True,
        "version": there["version"],
    }
    assert not all_equal(party.ask("verify", model=world.one))["ok"]
    back = all_equal(party.ask("sync", model=world.one))
    assert back["version"] == there["version"] + 1
    assert world.memory() == world.own, "bit for bit what vLLM itself loaded"
    assert world.greedy() == world.tokens
    assert all_equal(party.ask("verify"))["ok"]


@pytest.mark.soak
def test_two_processes_of_jax(world: World):
    party = world.parties["jax 2"]
    check_party(world, party, 2)
    assert len(all_equal(party.ask("refuse", model=world.one))["said"]) == 2
    answers = party.ask("sync", model=world.one, version=1)
    assert {a["error"] for a in answers} == {"ConfigError"}, (
        "refused everywhere, before a byte moves"
    )
    assert all_equal(party.ask("sync", model=world.one, mode="staged"))["verified"]
    all_equal(party.ask("close"))


@pytest.mark.soak
def test_two_processes_of_torch_by_their_local_shards(world: World):
    check_party(world, world.parties["torch 2"], 2)
    all_equal(world.parties["torch 2"].ask("close"))


def test_three_processes_one_killed_in_the_middle(world: World):
    party = world.parties["jax 3"]
    check_party(world, party, 3)
    version = all_equal(party.ask("connect", model=world.one, dies=2, mode="staged"))[
        "version"
    ]
    answers = party.ask("sync", model=world.two, timeout=60)
    assert answers[2] == {"gone": -signal.SIGKILL}
    for answer in answers[:2]:
        assert "error" in answer, answer
        assert (
            f"python {party.processes[2].pid} " in answer["message"]
            or "process 2" in answer["message"]
        ), answer
    assert world.greedy() == world.tokens, "the old version goes on"
    assert world.memory() == world.own
    assert world.pool.status()["version"] == version
    # and whoever comes next is served, with the version counted on
    other = world.parties["jax 2"].ready()
    assert (
        all_equal(other.ask("connect", model=world.one, transport="tcp"))["version"]
        == version
    )
    there = all_equal(other.ask("sync", model=world.two))
    assert (there["verified"], there["version"]) == (True, version + 1)
    all_equal(other.ask("sync", model=world.one))
    assert world.memory() == world.own

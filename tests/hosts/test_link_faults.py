"""Links between hosts that go in the middle of a sync: cut, deaf or slow, in each phase, at each of three hosts.

Whatever happens, the trainer's call ends within its deadline, the engine is on its old version, on the new one, or
dirty, and the next sync after the link is mended commits.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jvlab as jv
from tests.hosts.conftest import Host, cluster
from tests.hosts.test_cluster import joined, served
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(900)]
DEADLINE = 40.0
STALL = 6.0  # seconds that the engine stands still in a phase, so that the fault comes in the middle of it
LATE = (
    15.0  # after a deadline: what the caller is told takes a moment on a busy machine
)


class Cluster:
    """A gateway, an engine and a trainer, a host each; the trainer does as it is told, a line of JSON each."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.gateway, self.engine, self.trainer = hosts
        self.fault = folder / "fault.json"
        address, token, certificate = served(
            self.gateway, folder, "--place", "join", "--lease", "300"
        )
        joined(self.engine, folder, address, token, certificate)
        self.script = self.trainer.python(
            *("-m", "tests.hosts.obedient_trainer", address),
            *(token.read_text().strip(), str(certificate), str(self.fault)),
            *(jv.models.tiny("llama", seed=seed) for seed in (0, 1)),
            env={"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.tokens = self.answer()["tokens"]  # of both checkpoints

    def ask(self, do: str, **options: Any) -> None:
        assert self.script.stdin is not None
        self.script.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self.script.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.script.stdout is not None
        return json.loads(self.script.stdout.readline())

    def told(self, do: str, **options: Any) -> dict[str, Any]:
        self.ask(do, **options)
        return self.answer()

    def stall(self, phase: str) -> None:
        new = self.fault.with_suffix(".new")
        order = {"who": "rollout", "phase": phase, "do": "stall", "seconds": STALL}
        new.write_text(json.dumps(order))
        new.replace(self.fault)


@pytest.fixture(scope="module")
def world(
    namespaces: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(3) as hosts:
        yield Cluster(hosts, tmp_path_factory.mktemp("faults"))


def heal(world: Cluster, which: int) -> None:
    """The link is there again: the next sync commits, and the engine has its tokens."""
    found: dict[str, Any] = {}

    def committed() -> bool:
        found.clear()
        found.update(world.told("sync", which=which, mode="direct", timeout=60))
        return "error" not in found

    until(committed, f"a sync after the link was mended: {found}", 240, 1.0)
    assert found["verified"]
    assert world.told("generate") == {"tokens": world.tokens[which]}


def ends(
    world: Cluster, mode: str, phase: str, fault: Callable[[], None]
) -> dict[str, Any]:
    """A sync of the second checkpoint during which this happens: what its caller is told, in time."""
    heal(world, 0)
    world.stall(phase)
    start = time.monotonic()
    world.ask("sync", which=1, mode=mode, timeout=DEADLINE)
    until(lambda: not world.fault.exists(), "the phase", 60, 0.05)
    fault()
    found = world.answer()
    assert time.monotonic() - start < DEADLINE + LATE, found
    return found


def serves_one_of_both(world: Cluster) -> None:
    """Old, new or dirty, and never a mixture. A connection that was cut may fail one call more."""
    found = world.told("generate")
    if "error" in found:
        said = ("EngineDirty", "ReplicaLost", "GatewayUnreachable")
        assert found["error"] in said, found
    else:
        assert found["tokens"] in world.tokens


@pytest.mark.parametrize("phase", ["prepare", "move", "verify", "commit"])
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_the_engines_link_is_cut(world: Cluster, mode: str, phase: str):
    found = ends(world, mode, phase, world.engine.cut)
    assert "error" in found, "nobody can have heard of a commit"
    assert found["message"], found
    world.engine.mend()
    serves_one_of_both(world)
    heal(world, 1)


@pytest.mark.parametrize("phase", ["move", "commit"])
@pytest.mark.parametrize("who", ["gateway", "trainer"])
def test_another_link_is_cut(world: Cluster, who: str, phase: str):
    host = getattr(world, who)
    found = ends(world, "direct", phase, host.cut)
    assert "error" in found or found["verified"]
    host.mend()
    serves_one_of_both(world)
    heal(world, 1)


@pytest.mark.parametrize("deaf", ["engine", "trainer"])
def test_half_a_link(world: Cluster, deaf: str):
    """What one of them sends arrives, and it hears nothing back."""
    one, other = (world.engine, world.trainer)
    if deaf == "trainer":
        one, other = other, one
    found = ends(world, "direct", "move", lambda: one.deafen(other))
    one.hear(other)
    assert "error" in found or found["verified"]
    serves_one_of_both(world)
    heal(world, 1)


def test_a_link_that_crawls(world: Cluster):
    """Slower than the deadline allows: it ends with the deadline, and says so."""
    found = ends(world, "direct", "prepare", lambda: world.engine.shape("40kbit"))
    world.engine.shape("10gbit")
    assert found["error"] in ("SyncDeadline", "DeadlineExceeded", "TransportError")
    serves_one_of_both(world)
    heal(world, 1)

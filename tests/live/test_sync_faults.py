"""The fault matrix on real vLLM: who dies in which phase, what comes of the bytes, and what state is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.sync._pack import LinkPack
from tests.conftest import process_tree, wait_for_exit
from tests.waiting import until

pytestmark = pytest.mark.engine

PHASES = ["prepare", "move", "verify", "commit"]
ONE_PHASE = [
    pytest.param(phase, marks=[] if phase == "move" else [pytest.mark.soak])
    for phase in PHASES
]
PROMPT = [5, 6, 7, 8]


class World:
    """One lab and pool, two checkpoints of equal shapes, and a file that injects faults into the engine."""

    def __init__(self, folder: Path) -> None:
        self.fault_file = folder / "fault.json"
        self.one, self.two = (jv.models.tiny("llama", seed=seed) for seed in (0, 1))
        self.policies = [
            jv.Policy.from_pretrained(m, mesh=jv.mesh(fsdp=2))
            for m in (self.one, self.two)
        ]
        self.launch()

    def launch(self) -> None:
        """Begin; `arrive` waits for the engine."""
        self.lab = jv.Lab(lease=120, missed_beats=60)
        self.pool = self.lab.launch(
            self.one,
            env={"JVLAB_FAULT": str(self.fault_file)},
            name="faulty",
            restarts=0,
        )

    def arrive(self) -> None:
        self.pool.wait()
        self.tokens = [self.greedy()]
        self.connect()
        self.link.sync(self.params(1))
        self.tokens.append(self.greedy())
        self.link.sync(self.params(0))
        assert self.greedy() == self.tokens[0] != self.tokens[1]

    def params(self, which: int) -> Any:
        return self.policies[which].params

    def connect(self, **options: Any) -> jv.Link:
        self.link = self.lab.connect(
            self.params(0), self.pool, rules="policy", bucket_mib=0.5, **options
        )
        return self.link

    def greedy(self, timeout: float = 60.0) -> list[int]:
        batch = self.pool.generate(
            [PROMPT], max_tokens=16, temperature=0.0, ignore_eos=True, timeout=timeout
        )
        return list(batch[0].token_ids)

    def order(self, **fault: Any) -> None:
        new = self.fault_file.with_suffix(".new")
        new.write_text(json.dumps(fault))
        new.replace(self.fault_file)

    def workers(self) -> list[psutil.Process]:
        replica = psutil.Process(self.pool.status()["replicas"][0]["pid"])
        return [
            p
            for p in replica.children(recursive=True)
            if "Worker" in p.name() or "Worker" in " ".join(p.cmdline())
        ]

    def heal(self, which: int = 1) -> None:
        """A complete sync after whatever happened: verified, and the engine serves it."""
        report = self.link.sync(self.params(which))
        assert report.verified
        assert self.greedy() == self.tokens[which]
        assert self.link.verify()

    def restart(self) -> None:
        """Start the dead replica again; `revived` waits for it."""
        until(lambda: self.pool.status()["replicas"][0]["state"] == "failed")
        self.pool.restart(0)

    def revived(self) -> None:
        """It is back, and does not answer with its own old weights."""
        self.pool.wait()
        with pytest.raises(errors.EngineDirty, match=r"stale|dirty"):
            self.greedy()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    """Two: what takes time here is to start an engine after its death, and two start as quickly as one."""
    found = [World(tmp_path_factory.mktemp("faults")) for _ in range(2)]
    for one in found:
        one.arrive()
    yield found
    for one in found:
        one.lab.close()


@pytest.fixture
def world(worlds: list[World]) -> World:
    return worlds[0]


# Bytes ---------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_and_never_served(world: World):
    for mode, state in (("direct", "dirty"), ("staged", "old")):
        faults = jv.transport.Faults(flip=1)
        link = world.connect(faults=faults.wrap, mode=mode)
        version, before = link.version, world.greedy()
        with pytest.raises(errors.VerifyError) as caught:
            link.sync(world.params(1))
        assert faults.fired
        assert caught.value.fields["outcomes"] == {"faulty/0": state}
        assert caught.value.fields["differing"], "the tensors are named"
        assert link.version == version
        if state == "dirty":
            with pytest.raises(errors.EngineDirty, match="sync"):
                world.greedy()
        else:
            assert world.greedy() == before, "staged: the old version goes on"
        world.heal(1)
        world.heal(0)


def test_a_dropped_bucket_ends_in_the_deadline_and_is_named(world: World):
    link = world.connect(faults=jv.transport.Faults(drop=1).wrap)
    with pytest.raises(errors.JvlabError, match=r"bucket|arrived|missing|differ"):
        link.sync(world.params(1), timeout=6)
    with pytest.raises(errors.EngineDirty):
        world.greedy()
    world.heal(1)


def test_a_late_bucket(world: World):
    link = world.connect(faults=jv.transport.Faults(delay=(1, 8.0)).wrap)
    with pytest.raises(errors.JvlabError, match=r"deadline|within|waited|late"):
        link.sync(world.params(0), timeout=3)
    world.heal(0)
    link = world.connect(faults=jv.transport.Faults(delay=(1, 0.5)).wrap)
    assert link.sync(world.params(1)).verified, "late, but in time"


def test_a_bucket_delivered_twice_does_no_harm(world: World):
    faults = jv.transport.Faults(twice=1)
    link = world.connect(faults=faults.wrap)
    try:
        report = link.sync(world.params(0))
    except errors.SyncError:
        with pytest.raises(errors.EngineDirty):
            world.greedy()
    else:
        assert report.verified
    assert faults.fired
    world.heal(0)


def test_a_full_disk(world: World, tmp_path: Path):
    link = world.connect(transport="disk", directory=str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    link.sync(world.params(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jvlab.transport._disk.os.posix_fallocate", full)
        with pytest.raises(errors.TransportError, match=r"space|room|full") as caught:
            link.sync(world.params(0), timeout=20)
    assert caught.value.fields["outcomes"] == {"faulty/0": "dirty"}, (
        "the trainer saw it first, and asked the gateway"
    )
    world.heal(0)
    link.close()
    assert not list(tmp_path.rglob("*")), "nothing half-written stays"
    world.connect()


# People --------------------------------------------------------------------------------------------------------------


def test_a_second_trainer_is_told_who_holds_the_link(world: World):
    other = jv.Lab.attach(world.lab.address, world.lab._token)
    try:
        with pytest.raises(errors.LinkBusy, match=f"python {os.getpid()}"):
            # the same process name, so it waits for a ghost first; a real second trainer is refused at once
            other.connect(world.params(0), other.pools["faulty"], rules="policy")
    finally:
        other._leave()
    world.heal(1)


TRAINER = """
import sys, jvlab as jv
lab = jv.Lab.attach(sys.argv[1], sys.argv[2])
pool = lab.pools["faulty"]
policy = jv.Policy.from_pretrained(sys.argv[3], mesh=jv.mesh(fsdp=3))
link = lab.connect(policy.params, pool, rules="policy", bucket_mib=0.5)
print("CONNECTED", flush=True)
sys.stdin.readline()
link.sync(policy.params)
print("DONE", flush=True)
sys.stdin.readline()
"""


def trainer(world: World, model: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, world.lab.address, world.lab._token, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "CONNECTED\n"
    return process


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("phase", ONE_PHASE)
def test_the_trainer_dies(world: World, phase: str):
    world.link.close()
    process = trainer(world, world.two)
    with pytest.raises(errors.LinkBusy, match=f"python {process.pid}"):
        world.connect()
    world.order(who="rollout", phase=phase, do="stall", seconds=2.5)
    say(process)
    until(lambda: not world.fault_file.exists())  # the phase is reached
    process.kill()
    process.wait(60)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    # it was given up
    until(
        lambda: (
            not world.pool.status()["trainer"] and world.pool.status()["sync"] == "idle"
        )
    )
    state = world.pool.status()["replicas"][0]
    if phase == "prepare":
        assert not state["dirty"], "nothing was written yet"
    world.connect()
    world.heal(0)


def test_a_trainer_that_starts_again_attaches_and_syncs(world: World):
    world.link.close()
    process = trainer(world, world.two)
    say(process)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "DONE\n"
    process.kill()
    process.wait(60)
    process.stdin.close()
    process.stdout.close()
    assert world.greedy() == world.tokens[1]
    again = jv.Lab.attach(world.lab.address, world.lab._token)
    pool = again.pools["faulty"]
    link = again.connect(world.params(0), pool, rules="policy")
    report = link.sync(world.params(0))
    assert report.version > 1
    again._leave()
    assert world.greedy() == world.tokens[0]
    world.connect()


def test_ctrl_c_in_a_kernel(world: World):
    from jupyter_client.manager import KernelManager
    from jupyter_core.utils import ensure_event_loop

    world.link.close()
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=180)
        setup = (
            f"import jvlab as jv\nlab = jv.Lab.attach({world.lab.address!r}, {world.lab._token!r})\n"
            f"pool = lab.pools['faulty']\npolicy = jv.Policy.from_pretrained({world.two!r})\n"
            "faults = jv.transport.Faults(delay=(1, 30.0))\n"
            "link = lab.connect(policy.params, pool, rules='policy', bucket_mib=0.5, faults=faults.wrap)\n"
        )
        assert (
            client.execute_interactive(setup, timeout=240)["content"]["status"] == "ok"
        )

        told: list[float] = []

        def interrupt() -> None:
            until(lambda: world.pool.status()["sync"] == "moving")
            told.append(time.monotonic())
            manager.interrupt_kernel()
            # jupyter_client makes one for each thread, and leaves it open
            ensure_event_loop().close()

        waiting = threading.Thread(target=interrupt)
        waiting.start()
        reply = client.execute_interactive(
            "link.sync(policy.params)", timeout=200, output_hook=lambda _: None
        )
        waiting.join()
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert (
            "faulty is dirty, and generates again after the next link.sync(params)"
            in reply["content"]["evalue"]
        )
        shown = "\n".join(reply["content"]["traceback"])
        assert "link.sync(policy.params)" in shown
        assert "faulty is dirty" in shown
        assert "jvlab" not in shown, "no frame of ours"
        assert time.monotonic() - told[0] < 25, (
            "it ends with the interrupt, not with the delay"
        )
        with pytest.raises(errors.EngineDirty):
            world.greedy()
        said = []
        hook = lambda message: said.append(message["content"].get("text", ""))
        reply = client.execute_interactive(
            "print(link.sync(policy.params).verified)", timeout=200, output_hook=hook
        )
        assert reply["content"]["status"] == "ok"
        assert "True" in "".join(said)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        ensure_event_loop().close()
    assert world.greedy() == world.tokens[1]
    world.connect()


# Processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ONE_PHASE)
def test_the_engine_dies(worlds: list[World], phase: str):
    """A worker in one world, the rollout process in the other."""
    for world, who in zip(worlds, ("worker", "rollout"), strict=True):
        world.order(who=who, phase=phase, do="kill")
        start = time.monotonic()
        with pytest.raises(errors.JvlabError, match=r"lost|died|ended|gone|closed"):
            world.link.sync(world.params(1), timeout=200)
        assert time.monotonic() - start < 100, (
            "nobody waits for the dead until the deadline"
        )
        assert not world.fault_file.exists()
        world.restart()
    for world in worlds:
        world.revived()
        world.heal(1)
        world.heal(0)


@pytest.mark.parametrize(
    "phases",
    [pytest.param(PHASES[:2], marks=pytest.mark.soak), PHASES[2:]],
    ids="-".join,
)
def test_the_gateway_dies(worlds: list[World], phases: list[str]):
    """In one phase in one world, in another one in the other."""
    for world, phase in zip(worlds, phases, strict=True):
        pids = process_tree(world.lab._gateway.pid)
        world.order(who="rollout", phase=phase, do="stall", seconds=5)

        def kill(world: World = world) -> None:
            until(lambda: not world.fault_file.exists())
            os.kill(world.lab._gateway.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        start = time.monotonic()
        with pytest.raises(errors.JvlabError):
            world.link.sync(world.params(1), timeout=200)
        killer.join()
        assert time.monotonic() - start < 100, (
            "nobody waits for the dead until the deadline"
        )
        assert not wait_for_exit(pids, 90), "engines end with their gateway"
        world.lab.close()
        world.launch()
    for world in worlds:
        world.arrive()
        world.heal(1)


# Many ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_four_ranks_end_when_a_channel_fails_and_at_ctrl_c():
    """Slow digests, as on a busy machine: whatever ends the sync, the other channels are waiting for theirs."""
    digests = LinkPack.digests

    def slow_digests(*args: Any) -> dict[int, int]:
        time.sleep(0.05)
        return digests(*args)

    def press_ctrl_c(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # the workers of a parallel test run ignore it
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    models = [
        jv.models.tiny("llama", seed=seed, num_key_value_heads=4, num_hidden_layers=2)
        for seed in (0, 1)
    ]
    first, second = (jv.Policy.from_pretrained(model).params for model in models)
    try:
        with (
            jv.Lab() as lab,
            lab.launch(models[0], tensor_parallel=4, name="four").wait() as pool,
        ):
            for faults, raised in (
                (jv.transport.Faults(fail=2), errors.TransportError),
                (jv.transport.Faults(hook=(2, press_ctrl_c)), KeyboardInterrupt),
            ):
                link = lab.connect(
                    first, pool, rules="policy", bucket_mib=0.02, faults=faults.wrap
                )
                start = time.monotonic()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(LinkPack, "digests", slow_digests)
                    with pytest.raises(raised):
                        link.sync(second, timeout=60)
                assert time.monotonic() - start < 60, (
                    "it ends with the fault, not with the deadline"
                )
                assert faults.fired
                assert not [
                    t.name
                    for t in threading.enumerate()
                    if t.name.startswith("jvlab-send")
                ]
                with pytest.raises(errors.EngineDirty):
                    pool.generate([PROMPT], max_tokens=1)
                assert link.sync(second).verified
                assert link.verify(second)
                assert (
                    pool.generate([PROMPT], max_tokens=4)[0].versions.tolist()
                    == [link.version] * 4
                )
                link.close()
    finally:
        signal.signal(signal.SIGINT, handler)

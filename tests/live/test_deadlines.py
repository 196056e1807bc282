"""A deadline is a deadline, on real vLLM: every call with a timeout × who is frozen, lost, killed or paused."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from tests.conftest import process_tree, wait_for_exit
from tests.waiting import own_time

pytestmark = pytest.mark.engine

SECONDS = 1.5
MARGIN = 4.0  # of a busy machine; a call without a deadline takes minutes
BEAT, MISSED = 0.5, 16
PROMPT = [5, 6, 7, 8]
Call = Callable[[float], Any]


class World:
    """One lab, one replica, a link, and hands that stop processes."""

    def __init__(self) -> None:
        self.models = [jv.models.tiny("llama", seed=seed) for seed in (0, 1)]
        self.lab = jv.Lab(lease=120, beat=BEAT, missed_beats=MISSED)
        self.pool = self.lab.launch(self.models[0], name="late", restarts=0)
        self.policies = [jv.Policy.from_pretrained(model) for model in self.models]

    def arrive(self) -> None:
        self.pool.wait()
        self.link = self.lab.connect(self.policies[0].params, self.pool, rules="policy")
        self.tokens = []
        for which in (1, 0):
            self.link.sync(self.policies[which].params)
            self.tokens.insert(0, self.greedy())
        assert self.tokens[0] != self.tokens[1]
        replica = psutil.Process(self.pool.status()["replicas"][0]["pid"])
        self.engine = [p.pid for p in replica.children(recursive=True)]
        self.replica = [replica.pid]
        self.gateway = [self.lab._gateway.pid]

    def greedy(self, timeout: float = 60.0) -> list[int]:
        batch = self.pool.generate(
            [PROMPT], max_tokens=12, temperature=0.0, ignore_eos=True, timeout=timeout
        )
        return list(batch[0].token_ids)

    @contextmanager
    def frozen(self, pids: list[int]) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def looks(self) -> dict[str, Call]:
        """Those that may be asked at the same time."""
        pool, ask = self.pool, {"max_tokens": 4, "ignore_eos": True}
        return {
            "generate": lambda t: pool.generate([PROMPT], timeout=t, **ask),
            "stream": lambda t: list(pool.stream([PROMPT], timeout=t, **ask)),
            "score": lambda t: pool.score([PROMPT], timeout=t),
            "session": lambda t: pool.session(PROMPT).generate(timeout=t, **ask),
            "determinism": lambda t: pool.check_determinism(
                [PROMPT], timeout=t, max_tokens=4
            ),
            "trace": lambda t: pool.trace(timeout=t),
            "peek": lambda t: pool.peek("model.norm.weight", timeout=t),
            "status": lambda t: pool.status(timeout=t),
            "wait": lambda t: pool.wait(t, progress=False),
        }

    def orders(self) -> dict[str, Call]:
        """One after the other."""
        link, params = self.link, self.policies[1].params
        return {
            "hidden": lambda t: self.pool.hidden(PROMPT, timeout=t),
            "pause": lambda t: self.pool.pause(timeout=t),
            "verify": lambda t: link.verify(timeout=t),
            "sync": lambda t: link.sync(params, timeout=t, progress=False),
            "staged sync": lambda t: link.sync(
                params, timeout=t, mode="staged", progress=False
            ),
            "sync handle": lambda t: link.sync_async(params, timeout=t).result(),
            "stepper": lambda t: link.stepper(params, timeout=t).run(),
            "catch up": lambda t: link.catch_up(params, timeout=t),
            "connect": lambda t: self.lab.connect(
                params, self.pool, rules="policy", bucket_mib=1.0, timeout=t
            ),
        }

    def table(self) -> dict[str, str]:
        """What each call said; all of them in time."""
        looks = self.looks()
        with ThreadPoolExecutor(len(looks)) as threads:
            asked = {name: threads.submit(timed, call) for name, call in looks.items()}
            found = {name: future.result() for name, future in asked.items()}
        found |= {name: timed(call) for name, call in self.orders().items()}
        print(
            {name: (round(took, 2), said[:200]) for name, (took, said) in found.items()}
        )
        late = {
            name: cell for name, cell in found.items() if cell[0] > SECONDS + MARGIN
        }
        assert not late, "these did not keep their deadline"
        return {name: said for name, (_, said) in found.items()}

    def heal(self, state: str = "old") -> None:
        """After a thaw: nobody stands still or serves a mixture, and the next sync works."""
        until = time.monotonic() + 60
        while (replica := self.pool.status()["replicas"][0])[
            "state"
        ] != "ready" or replica["dirty"] != (state == "dirty"):
            assert time.monotonic() < until, replica
            time.sleep(0.1)
        assert not replica["paused"]
        if state == "dirty":
            with pytest.raises(errors.EngineDirty):
                self.greedy()
        else:
            assert self.greedy() == self.tokens[0], "the old version goes on"
        for which in (1, 0):
            assert self.link.sync(self.policies[which].params).verified
            assert self.greedy() == self.tokens[which]
        assert self.link.verify().ok


def timed(call: Call, seconds: float = SECONDS) -> tuple[float, str]:
    """(how long it took, what it raised): nothing but errors of our own."""
    began = own_time()
    try:
        call(seconds)
    except errors.JvlabError as error:
        return own_time() - began, f"{type(error).__name__}: {error}"
    return own_time() - began, ""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    try:
        world.arrive()
        yield world
    finally:
        world.lab.close()


def says(found: dict[str, str], who: str, quiet: tuple[str, ...]) -> None:
    """Every call raised, but those that need nobody who is silent; each names who that is."""
    for name, said in found.items():
        assert said or name in quiet, f"{name} cannot have done its work"
        assert not said or re.search(who, said), (
            f"{name} does not name who was waited for: {said}"
        )


@pytest.mark.soak
def test_deadline_with_a_frozen_worker(world: World):
    with world.frozen(world.engine):
        found = world.table()
        says(found, "late/0", ("status", "wait", "catch up"))
        assert "waited for replica late/0" in found["generate"]
        assert found["sync"].startswith("SyncDeadline: ")
    world.heal()


def test_deadline_with_a_frozen_gateway(world: World):
    with world.frozen(world.gateway):
        says(world.table(), "the gateway at", ())
    world.heal()


@pytest.mark.soak
def test_deadline_with_a_lost_replica(world: World):
    with world.frozen(world.replica):
        until = time.monotonic() + 60
        while world.pool.status()["healthy"]:
            assert time.monotonic() < until, "it was not found lost"
            time.sleep(0.1)
        says(world.table(), "late/0", ("status", "catch up"))
    world.heal()


def test_deadline_in_a_paused_pool(world: World):
    world.pool.pause()
    try:
        for name in ("generate", "stream", "score", "session"):
            took, said = timed(world.looks()[name])
            assert took < SECONDS + MARGIN
            assert "the pool is paused" in said
            assert "late/0" in said
            assert "larger timeout" not in said
        assert world.link.verify().ok, "looking and syncing go on"
    finally:
        world.pool.resume()
    world.heal()


def test_deadline_of_a_worker_frozen_in_the_middle_of_a_move(world: World):
    # of each step: also of the first one, with nobody frozen
    seconds = 4 * SECONDS
    stepper = world.link.stepper(world.policies[1].params, timeout=seconds)
    stepper.step()
    with world.frozen(world.engine):
        took, said = timed(lambda t: stepper.run())
        assert took < seconds + MARGIN
        assert "late/0" in said
    world.heal("dirty")


@pytest.mark.soak
def test_deadline_a_gateway_that_was_frozen_loses_nobody(world: World):
    """It was frozen for longer than the beats that a replica may miss: its own late tick is nobody's silence."""
    before = world.pool.status()["replicas"][0]
    results: list[jv.RolloutBatch] = []
    work = threading.Thread(
        target=lambda: results.append(
            world.pool.generate(
                [PROMPT], n=4, max_tokens=400, ignore_eos=True, timeout=120
            )
        )
    )
    work.start()
    while not world.pool.status()["in_flight"]:
        time.sleep(0.02)
    with world.frozen(world.gateway):
        time.sleep(BEAT * MISSED + 1.5)
    work.join(120)
    assert len(results[0]) == 4
    assert not any(sample.retried for sample in results[0])
    assert results[0].notes == ()
    after = world.pool.status()["replicas"][0]
    assert (after["state"], after["epoch"]) == ("ready", before["epoch"])


@pytest.mark.soak
def test_deadline_with_a_killed_replica(world: World):
    """The last one of this engine."""
    os.kill(world.engine[0], signal.SIGKILL)
    looks, orders = world.looks(), world.orders()
    for name in ("generate", "score", "peek"):
        took, said = timed(looks[name])
        assert took < SECONDS + MARGIN
        assert "late/0" in said, name
    assert world.pool.status()["healthy"] == 0, "what a caller was told, status says"
    for name in ("verify", "sync", "pause"):
        took, said = timed(orders[name])
        assert took < SECONDS + MARGIN
        assert "late/0" in said, name


@pytest.mark.soak
def test_deadline_of_closing_a_lab_whose_gateway_is_frozen(world: World):
    pids = process_tree(world.lab._gateway.pid)
    os.kill(world.lab._gateway.pid, signal.SIGSTOP)
    began = own_time()
    world.lab.close(timeout=SECONDS)
    assert own_time() - began < SECONDS + MARGIN
    assert not wait_for_exit(pids, 30), "closing left processes"

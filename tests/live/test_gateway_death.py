"""A gateway that is killed and started again, around a real engine on a joined host and a trainer here."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import jvlab as jv
from jvlab import errors
from tests.conftest import process_tree, wait_for_exit
from tests.gateway.test_gateway_death import Mortal
from tests.live.test_sync import greedy
from tests.waiting import until

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    gateway = Mortal(tmp_path_factory.mktemp("gateway"), "--away", "60")
    try:
        yield gateway
    finally:
        gateway.end()


@pytest.fixture(scope="module")
def agent(gateway: Mortal) -> Iterator[subprocess.Popen[bytes]]:
    """`jvlab rollout --gateway`, as on another host."""
    token = gateway.folder / "token"
    token.touch(0o600)
    token.write_text(gateway.facts["token"])
    words = ["rollout", "--gateway", gateway.facts["address"], "--token-file", token]
    with subprocess.Popen([sys.executable, "-m", "jvlab", *map(str, words)]) as process:
        yield process
        try:
            assert process.wait(60) == 0, "the gateway ended it"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def lab(gateway: Mortal, agent: subprocess.Popen[bytes]) -> Iterator[jv.Lab]:
    facts = gateway.facts
    lab = jv.Lab.attach(facts["address"], facts["token"])
    yield lab
    pids = process_tree(agent.pid)
    # with `make test`'s own `jvlab warm` they are not below the agent
    for row in lab.pools["p"].status()["replicas"]:
        pids |= process_tree(row["pid"])
    lab.close()
    assert not wait_for_exit(pids - {agent.pid}, 60), "the joined host left processes"


@pytest.fixture(scope="module")
def pool(lab: jv.Lab, llama: str) -> jv.Pool:
    return lab.launch(llama, name="p", restarts=0).wait(300)


def again(gateway: Mortal, pool: jv.Pool) -> None:
    """kill -9, and a new start; the same engine serves."""
    pid = pool.status()["replicas"][0]["pid"]
    engine = psutil.Process(pid).create_time()
    gateway.kill()
    gateway.start()
    pool.wait(60)
    row = pool.status()["replicas"][0]
    assert (row["pid"], row["restarts"]) == (pid, 0)
    assert psutil.Process(pid).create_time() == engine


def test_an_engine_a_lab_and_a_link_outlive_their_gateway(
    gateway: Mortal, lab: jv.Lab, pool: jv.Pool
):
    policy = jv.Policy.from_pretrained(pool.model)
    link = lab.connect(policy.params, pool)
    first = link.sync(policy.params)
    assert first.verified
    tokens = greedy(pool)
    epoch = pool.status()["replicas"][0]["epoch"]

    again(gateway, pool)
    assert pool.status()["version"] == first.version
    assert pool.status()["replicas"][0]["epoch"] > epoch
    assert greedy(pool) == tokens
    assert link.verify(policy.params), "the same weights"
    second = link.sync(policy.params)
    assert (second.version, second.verified) == (first.version + 1, True)

    # in the middle of a direct sync: its engine may hold parts of two versions, and says so
    stepper = link.stepper(policy.params)
    stepper.step()
    assert stepper.state in ("moving", "moved")
    gateway.kill()
    began = time.monotonic()
    with pytest.raises(errors.JvlabError, match="gateway"):
        stepper.run()
    assert time.monotonic() - began < 30
    gateway.start()
    pool.wait(60)
    assert pool.status()["version"] == second.version
    with pytest.raises(errors.EngineDirty):
        greedy(pool)
    third = link.sync(policy.params)
    assert (third.version > second.version, third.verified) == (True, True)
    assert greedy(pool) == tokens

    # what was in flight fails at once, what comes later waits
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(pool.generate, [[5, 6]] * 4, timeout=300, **LONG)
        until(lambda: pool.status()["in_flight"])
        gateway.kill()
        with pytest.raises(errors.GatewayUnreachable, match="does not answer"):
            running.result(30)
        waiting = threads.submit(greedy, pool)
        gateway.start()
        assert waiting.result(90) == tokens
    until(lambda: not pool.status()["in_flight"], "the end of what nobody reads", 60)


def test_a_run_goes_on_when_its_gateway_comes_back(
    gateway: Mortal, lab: jv.Lab, pool: jv.Pool, tmp_path: Path
):
    """It dies while groups are generated, and in the middle of a sync."""
    policy = jv.Policy.from_pretrained(pool.model)
    link = lab.connect(policy.params, pool)
    deaths: list[str] = []

    def die(where: str) -> None:
        if where not in deaths:
            deaths.append(where)
            gateway.kill()
            threading.Timer(2.0, gateway.start).start()

    def reward(sample: jv.Sample, example: object) -> float:
        if link.version >= start + 2:  # other samples of its step are being generated
            die("group")
        return float(sample.token_ids[0] % 2)

    def in_sync(header: jv.transport.Header) -> None:
        if header.version >= start + 4:
            die("sync")

    faults = jv.transport.Faults(hook=(0, in_sync), times=100)
    link.inject(faults.wrap)
    start = link.version
    try:
        run = jv.grpo(
            policy,
            pool,
            link,
            jv.Task(["1 2 3", "4 5 6"], reward, sampling={"max_tokens": 64}),
            steps=6,
            group_size=2,
            prompts_per_step=2,
            learning_rate=1e-3,
            checkpoint_every=0,
            folder=tmp_path / "run",
            progress=False,
        )
        run.wait(timeout=300)
    finally:
        link.inject(None)
    assert deaths == ["group", "sync"]
    summary = run.record.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", 6)
    assert summary["syncs_verified"] == summary["syncs"] == 7
    assert summary["faults"]["sync failed"] >= 1
    assert summary["logprob_gap"] < 1e-2
    assert len([s for s in run.record.samples() if s.step >= 0]) == 6 * 2 * 2
    assert pool.status()["version"] == link.version
    assert link.verify(policy.params)

"""A gateway that is killed and started again, around a real engine on a joined host and a trainer here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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

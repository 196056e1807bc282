"""A trainer and an engine that share nothing but a folder: bit for bit what a direct sync leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.transport._storage import Why
from tests.live.test_sync import greedy, memory
from tests.waiting import until

pytestmark = pytest.mark.engine
SECONDS = 120


@pytest.fixture(scope="module")
def model(half: str) -> str:
    return jv.models.tiny("llama", seed=0, dtype=half)


@pytest.fixture(scope="module")
def pool(lab: jv.Lab, model: str) -> Iterator[jv.Pool]:
    """Live weights, so that every byte can be read."""
    env = {"JVLAB_LIVE_WEIGHTS": "1"}
    pool = lab.launch(model, name="follows", env=env).wait()
    yield pool
    pool.close(300)


@pytest.fixture(scope="module")
def policy(model: str) -> jv.Policy:
    return jv.Policy.from_pretrained(model, mesh=jv.mesh(fsdp=2))


def trained(params: Any, seed: int) -> Any:
    """One value in a hundred is another; few of them survive the cast to 16 bits."""

    def step(leaf: Any) -> Any:
        chance = jax.random.uniform(jax.random.key(seed), leaf.shape)
        return jax.device_put(
            jnp.where(chance < 0.01, leaf * 1.5 + 0.05, leaf), leaf.sharding
        )

    return jax.tree.map(step, params)


def damage(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_pool_that_follows_holds_what_a_direct_sync_leaves(
    lab: jv.Lab, pool: jv.Pool, policy: jv.Policy, model: str, tmp_path: Path
) -> None:
    versions = [trained(policy.params, 1)]
    versions.append(trained(versions[0], 2))
    versions.append(trained(versions[1], 3))
    # what a direct sync leaves: the bytes in the engine, and the tokens
    with lab.connect(policy, pool) as link:
        wanted = []
        for params in versions:
            link.sync(params)
            wanted.append((memory(pool, link), greedy(pool)))
        link.sync(trained(policy.params, 9))
    assert wanted[0][0] != wanted[1][0]

    def holds(number: int) -> bool:
        bytes_, tokens = wanted[number]
        return memory(pool, follower.link) == bytes_ and greedy(pool) == tokens

    with jv.Publisher(tmp_path, policy) as publisher:
        first = pool.snapshot.version + 6
        assert publisher.publish(versions[0], first).kind == "full"
        with lab.follow(pool, tmp_path, poll=0.05) as follower:
            last = follower.wait(first, SECONDS).last
            assert last is not None
            assert (last.version, last.pool_version) == (first, first)
            assert follower.link.last.verified
            assert holds(0)
            report = publisher.publish(versions[1])
            assert report.kind == "delta"
            assert report.bytes < report.total_bytes / 5
            last = follower.wait(first + 1, SECONDS).last
            assert last is not None
            assert last.read == (first + 1,)
            assert holds(1)
            sample = pool.generate([[5, 6, 7]], max_tokens=4)[0]
            assert {span[0] for span in sample.version_spans} == {first + 1}
        # one that nobody saw whole, and a late joiner
        publisher.publish(versions[2])
        damage(tmp_path / f"weight_v{first + 2:06d}")
        with lab.follow(pool, tmp_path, poll=0.05) as follower:
            follower.wait(first + 1, SECONDS)
            problem = until(lambda: follower.error, "the reason", SECONDS)
            assert isinstance(problem, errors.StorageError)
            assert problem.fields["why"] is Why.DAMAGED
            assert follower.version == first + 1
            assert holds(1)
            publisher.publish(versions[2], full=True)
            follower.wait(first + 3, SECONDS)
            assert holds(2)


def test_a_link_publishes_what_it_syncs(
    lab: jv.Lab, pool: jv.Pool, policy: jv.Policy, tmp_path: Path
) -> None:
    params = [trained(policy.params, seed) for seed in (4, 5)]
    with lab.connect(policy, pool) as link:
        report = link.sync(params[0])
        published = link.publish(tmp_path, params[0])
        assert published.version == report.version
        assert link.publish(tmp_path, params[1]).version == report.version + 1
        with pytest.raises(errors.LinkBusy):
            jv.Publisher(tmp_path, policy)
        before = memory(pool, link)
        link.sync(params[1])
        wanted = memory(pool, link)
    assert before != wanted
    with lab.follow(pool, tmp_path, poll=0.05) as follower:
        # the pool counts further by now, so the version there is another
        assert follower.wait(published.version + 1, SECONDS).last is not None
        assert memory(pool, follower.link) == wanted


@pytest.mark.soak
def test_the_command_follows(model: str, policy: jv.Policy, tmp_path: Path) -> None:
    where = str(tmp_path / "published")
    command = [sys.executable, "-m", "jvlab", "rollout", "--follow", where]
    env = {**os.environ, "JVLAB_HOME": str(tmp_path / "home")}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--model", model, "--device", "cpu", "--json"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
        )
    try:
        with jv.Publisher(where, policy) as publisher:
            for version in (1, 2):
                publisher.publish(trained(policy.params, version))
                until(
                    lambda v=version: f"version {v} served" in log.read_text(),
                    f"version {version} in {log.read_text()}",
                    300,
                    0.2,
                )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert log.read_text().rstrip().endswith('{"version": 2}')
    finally:
        process.kill()
        process.wait(60)

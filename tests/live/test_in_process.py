"""vLLM in this very process: the same tokens as behind a gateway, verified syncs, and nothing left when it ends."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab._pool import InProcessPool
from tests.waiting import until

pytestmark = pytest.mark.engine
PROMPTS = [
    "Once upon a time",
    [{"role": "user", "content": "Tell me a story"}],
    [5, 6, 7],
]
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "max_tokens": 12,
    "progress": False,
}
PATIENCE = 60.0


def tokens(batch: jv.RolloutBatch) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in batch]


def process_state() -> dict[str, Any]:
    """What a process has of its own, and a library should leave alone."""
    variables = {
        f"${name}": value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    return {
        **variables,
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "handlers": handlers,
    }


@pytest.fixture(scope="module")
def local(llama: str) -> Iterator[InProcessPool]:
    before = process_state()
    pool = jv.Pool.in_process(llama, name="local")
    after = process_state()
    changed = {
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    }
    assert not changed, "the engine's start changed the trainer's process"
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def policy(llama: str) -> jv.Policy:
    return jv.Policy.from_pretrained(llama)


def test_it_says_what_the_engine_behind_a_gateway_says(
    local: InProcessPool, pool: jv.Pool
):
    here, there = (
        local.generate(PROMPTS, n=2, **GREEDY),
        pool.generate(PROMPTS, n=2, **GREEDY),
    )
    assert tokens(here) == tokens(there)
    assert [s.text for s in here] == [s.text for s in there]
    assert (
        max(
            np.abs(a.logprobs - b.logprobs).max()
            for a, b in zip(here, there, strict=True)
        )
        < 1e-4
    )
    assert {s.replica for s in here} == {"local/0"}
    assert local.score(here).gap(there) < 1e-4
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "progress": False}
    assert tokens(local.generate(PROMPTS, n=2, **drawn)) == tokens(
        pool.generate(PROMPTS, n=2, **drawn)
    )


def test_it_is_in_this_process(local: InProcessPool):
    status = local.status()
    assert status["replicas"][0]["pid"] == os.getpid()
    assert (status["healthy"], status["version"]) == (1, 0)
    assert repr(local).startswith("Pool('local', 'llama',")
    assert "in process on cpu, ready" in repr(local)
    assert "in process" in local._repr_html_()


def test_streams_flow_and_end_early(local: InProcessPool):
    seen = list(
        local.stream([[5, 6], [7, 8], [9, 10]], n=2, window=1, **_without_progress())
    )
    assert sorted((s.prompt_index, s.sample_index) for s in seen) == [
        (i, k) for i in range(3) for k in range(2)
    ]
    with local.stream([[5, 6]] * 4, max_tokens=400, ignore_eos=True) as stream:
        next(iter(stream))
    until(lambda: local.status()["in_flight"] == 0, "the rest to be aborted")
    until(
        lambda: local.status()["replicas"][0]["running"] == 0,
        "the engine to have let go",
    )


def _without_progress() -> dict[str, Any]:
    return {key: value for key, value in GREEDY.items() if key != "progress"}


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_pause_and_resume(local: InProcessPool, mode: str):
    wanted, found = tokens(local.generate([[5, 6, 7]], **GREEDY)), []
    local.pause(mode)
    assert local.status()["replicas"][0]["paused"]
    asking = threading.Thread(
        target=lambda: found.extend(tokens(local.generate([[5, 6, 7]], **GREEDY)))
    )
    asking.start()
    until(lambda: local.status()["in_flight"] == 1, "the request to have arrived")
    assert not found, "nothing is generated while it is paused"
    local.resume()
    asking.join(PATIENCE)
    assert found == wanted


def test_mistakes_are_the_same_errors(local: InProcessPool):
    with pytest.raises(errors.SamplingError, match="temprature"):
        local.generate("x", temprature=1.0)
    with pytest.raises(errors.SamplingError, match="the vocabulary has"):
        local.generate([[5, 10**6]])
    for cannot in (lambda: local.scale(2), local.restart, local.logs):
        with pytest.raises(errors.Unsupported) as caught:
            cannot()
        assert caught.value.remedy
    assert local.scale(1) is local


def test_a_second_one_is_refused_and_named(local: InProcessPool, llama: str):
    with pytest.raises(
        errors.ConfigError, match="has an engine already: Pool\\('local'"
    ) as caught:
        jv.Pool.in_process(llama)
    assert caught.value.fields["pool"] is local


def test_syncs_are_verified_and_change_what_it_says(
    local: InProcessPool, policy: jv.Policy
):
    import jax

    before = tokens(local.generate(PROMPTS, **GREEDY))
    link = local.connect(policy.params)
    assert local.connect(policy.params) is link
    assert (link.transport, link.mode) == ("loopback", "direct")
    other = jax.tree.map(lambda x: -x, policy.params)
    report = link.sync(other, progress=False)
    assert (report.version, report.verified, report.transport) == (1, True, "loopback")
    assert report.digests
    changed = local.generate(PROMPTS, **GREEDY)
    assert tokens(changed) != before
    assert {span for s in changed for span in s.version_spans} == {(1, 0, 12)}
    assert link.verify(other).ok
    assert not link.verify(policy.params).ok
    report = link.sync(policy.params, mode="staged", progress=False)
    assert (report.version, report.verified, report.mode) == (2, True, "staged")
    assert tokens(local.generate(PROMPTS, **GREEDY)) == before
    assert local.status()["version"] == 2
    with pytest.raises(errors.ConfigError, match="nearer than any wire"):
        local.connect(policy.params, transport="shm")


def test_a_request_in_flight_goes_on_through_a_sync(
    local: InProcessPool, policy: jv.Policy
):
    link, found = local.connect(policy.params), []
    options = {**GREEDY, "max_tokens": 400}
    asking = threading.Thread(
        target=lambda: found.extend(local.generate([[5, 6, 7]], **options))
    )
    asking.start()
    until(lambda: local.status()["replicas"][0]["running"] == 1, "the request to run")
    version = link.sync(policy.params, progress=False).version
    asking.join(PATIENCE)
    spans = found[0].version_spans
    assert [v for v, _, _ in spans] == [version - 1, version]
    assert (spans[0][1], spans[-1][2]) == (0, 400)


def test_it_closes_and_another_can_be_made_and_can_die(
    local: InProcessPool, llama: str
):
    before = tokens(local.generate(PROMPTS, **GREEDY))
    local.close()
    local.close()
    assert "closed" in repr(local)
    assert not [t.name for t in threading.enumerate() if t.name == "jvlab-engine"]
    with pytest.raises(errors.ControlError, match="closed"):
        local.generate("x")
    with jv.Pool.in_process(llama, name="second") as second:
        assert tokens(second.generate(PROMPTS, **GREEDY)) == before
        from vllm.v1.engine import EngineCoreRequestType

        engine = second._host.engine
        assert engine is not None
        engine.llm.engine_core._core.input_queue.put_nowait(
            (EngineCoreRequestType.EXECUTOR_FAILED, b"")
        )
        until(
            lambda: second.snapshot.replicas[0].stage == "failed",
            "the death to be told",
        )
        with pytest.raises(errors.JvlabError, match="died"):
            second.generate("x", **GREEDY)
    assert not [t.name for t in threading.enumerate() if t.name == "jvlab-engine"]

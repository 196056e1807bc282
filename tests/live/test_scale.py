"""More, fewer and restarted replicas on real vLLM: no sample is lost, and a newcomer never answers with old weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from tests.conftest import process_tree, wait_for_exit
from tests.live.test_sync_versions import that_say

pytestmark = pytest.mark.engine
# so many in all; so many may be read before both replicas serve
PROMPTS, EARLY = 160, 80


@pytest.fixture(scope="module")
def scaled(lab: jv.Lab) -> Iterator[tuple[jv.Pool, Any]]:
    """A pool of one replica, and a policy whose every token can tell which weights made it."""
    model = jv.models.tiny("llama", tie_word_embeddings=False)
    pool = lab.launch(
        model,
        name="scaled",
        engine={"max_num_seqs": 4},
        env={"JVLAB_LIVE_WEIGHTS": "1"},  # packed ones lose their base with a channel
        restarts=1,
    ).wait()
    yield pool, jv.Policy.from_pretrained(model)
    pool.close(300)


class Reader:
    """Reads a stream in a thread: slowly and not to its end, until it is let go."""

    def __init__(self, pool: jv.Pool) -> None:
        self.seen: list[jv.Sample] = []
        self.free = threading.Event()
        self._failures: list[BaseException] = []
        self._pool = pool
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        prompts = [[5 + i % 90, 6, 7] for i in range(PROMPTS)]
        try:
            for sample in self._pool.stream(
                prompts, window=16, max_tokens=16, temperature=0.0, ignore_eos=True
            ):
                self.seen.append(sample)
                self.free.wait(0.5 if len(self.seen) < EARLY else None)
        except BaseException as error:
            self._failures.append(error)

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert not self._failures, self._failures
            assert time.monotonic() < deadline, Counter(s.replica for s in self.seen)
            time.sleep(0.02)

    def end(self) -> list[jv.Sample]:
        self.free.set()
        self._thread.join(240)
        assert not self._thread.is_alive()
        assert not self._failures
        return self.seen


def test_one_two_one_during_a_stream(scaled: tuple[jv.Pool, Any], lab: jv.Lab):
    pool, policy = scaled
    link = lab.connect(policy.params, pool, rules="policy")
    for version in (1, 2, 3):
        params = that_say(policy, 100 + version)
        assert link.sync(params).version == version
    reader = Reader(pool)
    try:
        reader.until(lambda: len(reader.seen) >= 8)
        pool.scale(2)
        rows = {r["replica"]: r for r in pool.status()["replicas"]}
        assert (rows["scaled/1"]["version"], rows["scaled/1"]["stale"]) == (0, True)
        assert rows["scaled/1"]["served"] == 0, "ready, and given nothing"
        newcomer = process_tree(rows["scaled/1"]["pid"])
        before = len(reader.seen)
        reader.until(lambda: len(reader.seen) > before or len(reader.seen) == EARLY)
        wrong = {
            **params,
            "final_norm": {"scale": params["final_norm"]["scale"] + jnp.float32(1)},
        }
        with pytest.raises(errors.VerifyError, match="not those of version 3"):
            link.catch_up(wrong)
        report = link.catch_up(params)
        assert report is not None
        assert (report.version, report.verified) == (3, True)
        assert [(o.replica, o.state) for o in report.outcomes] == [
            ("scaled/1", "committed")
        ]
        assert link.catch_up(params) is None, "nobody is behind"
        checked = link.verify(params)
        assert checked.ok
        assert [o.replica for o in checked.outcomes] == ["scaled/0", "scaled/1"]
        reader.free.set()
        reader.until(lambda: sum(s.replica == "scaled/1" for s in reader.seen) >= 10)
        pool.scale(1)
        assert not wait_for_exit(newcomer, 30), "its processes ended"
    finally:
        seen = reader.end()
    assert sorted(s.prompt_index for s in seen) == list(range(PROMPTS)), (
        "no sample lost, none twice"
    )
    assert not any(s.error or s.retried for s in seen)
    assert {s.replica for s in seen} == {"scaled/0", "scaled/1"}
    for sample in seen:
        assert sample.version_spans == ((3, 0, 16),)
        assert set(np.asarray(sample.token_ids).tolist()) == {103}, (
            f"{sample.replica} answered with other weights"
        )
    assert [r["replica"] for r in pool.status()["replicas"]] == ["scaled/0"]
    assert link.sync(policy.params).version == 4, "the link lives on"
    link.close()


def rows(pool: jv.Pool) -> dict[str, dict[str, Any]]:
    return {r["replica"]: r for r in pool.status()["replicas"]}


def killed(pool: jv.Pool, name: str) -> int:
    """kill -9 of a replica's process; returns its pid."""
    pid = rows(pool)[name]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def until_it_is(pool: jv.Pool, name: str, state: str, other_than: int) -> None:
    """Its process is another one, and in this state."""
    deadline = time.monotonic() + 240
    while True:
        row = rows(pool)[name]
        if (row["state"], row["pid"] != other_than) == (state, True):
            return
        assert time.monotonic() < deadline, row
        time.sleep(0.1)


def said(sample: jv.Sample) -> set[int]:
    return set(np.asarray(sample.token_ids).tolist())


def test_one_of_two_is_killed_in_a_stream_and_comes_back(
    scaled: tuple[jv.Pool, Any], lab: jv.Lab
):
    """By itself: it is stale, gets no work until a sync, and from a sparse one everything."""
    pool, policy = scaled
    pool.scale(2)
    link = lab.connect(policy.params, pool, rules="policy")
    params = that_say(policy, 110)
    first = link.sync(params, delta="auto").version
    reader = Reader(pool)
    try:
        reader.until(lambda: len({s.replica for s in reader.seen}) == 2)
        victim = killed(pool, "scaled/1")
        until_it_is(pool, "scaled/1", "ready", victim)
        row = rows(pool)["scaled/1"]
        assert (row["version"], row["stale"], row["ready"]) == (0, True, False)
        assert (row["restarts"], row["restarts_left"]) == (1, 0)
        assert len(row["deaths"]) == 1
        assert "SIGKILL" in row["deaths"][0]
        served = row["served"]
        before = len(reader.seen)
        reader.until(lambda: len(reader.seen) > before or len(reader.seen) == EARLY)
        assert rows(pool)["scaled/1"]["served"] == served, "given nothing"
        # the final norm alone differs, so what changed is little
        scale = params["final_norm"]["scale"] * jnp.float32(1.5)
        changed = {**params, "final_norm": {"scale": scale}}
        report = link.sync(changed, delta="auto")
        assert [(o.replica, o.state) for o in report.outcomes] == [
            ("scaled/0", "committed"),
            ("scaled/1", "committed"),
        ]
        assert report.why_full.startswith("scaled/1 did not hold the base"), (
            report.why_full
        )
        assert report.delta, "one of them got what changed"
        assert link.verify(changed).ok
        reader.free.set()
        late = lambda: [s for s in reader.seen if s.version_spans[-1][0] > first]
        reader.until(lambda: any(s.replica == "scaled/1" for s in late()))
    finally:
        seen = reader.end()
    assert sorted(s.prompt_index for s in seen) == list(range(PROMPTS)), (
        "no sample lost, none twice"
    )
    assert not any(s.error for s in seen)
    assert all(s.retried <= 1 for s in seen)
    for sample in seen:
        versions = {span[0] for span in sample.version_spans}
        assert versions <= {first, report.version}
        assert said(sample) == {110}, f"{sample.replica} answered with other weights"
    assert report.version == first + 1
    link.close()


def test_the_only_one_is_killed_caught_up_and_killed_once_too_often(
    scaled: tuple[jv.Pool, Any], lab: jv.Lab
):
    pool, policy = scaled
    pool.scale(1)
    link = lab.connect(policy.params, pool, rules="policy")
    params = that_say(policy, 120)
    version = link.sync(params).version
    ask = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    victim = killed(pool, "scaled/0")
    # nobody else holds this version, and nobody knows whether somebody will sync: the caller is told
    with pytest.raises((errors.EngineDirty, errors.ReplicaLost), match="stale: no rep"):
        pool.generate([[5, 6, 7]], timeout=240, **ask)
    until_it_is(pool, "scaled/0", "ready", victim)
    with pytest.raises(errors.VerifyError, match=f"not those of version {version}"):
        link.catch_up(policy.params)
    report = link.catch_up(params)
    assert report is not None
    assert (report.version, report.verified) == (version, True)
    (sample,) = pool.generate([[5, 6, 7]], **ask)
    assert (sample.version_spans, said(sample)) == (((version, 0, 4),), {120})
    again = killed(pool, "scaled/0")
    until_it_is(pool, "scaled/0", "failed", -1)
    row = rows(pool)["scaled/0"]
    assert (row["pid"], row["restarts_left"], len(row["deaths"])) == (again, 0, 2)
    assert "it was restarted once before, after: " in row["cause"]
    assert row["cause"].count("SIGKILL") == 2
    assert "death 2 of 2" in pool.logs()
    with pytest.raises(errors.LaunchError, match="it was restarted once before"):
        pool.wait(5)
    link.close()

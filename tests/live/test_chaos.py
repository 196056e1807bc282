"""`jv.chaos` on real vLLM: replicas killed, engines frozen, syncs damaged and given up, with requests in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import jvlab as jv
from jvlab.analysis._chaos import frozen
from jvlab.lab._pool import Pool
from tests.waiting import until

pytestmark = pytest.mark.engine
PROMPT = [5, 6, 7, 8]
# of seconds, so that a busy machine is not taken for a hang
SILENT = "3"


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[jv.Pool, jv.Link, jv.Policy]]:
    model = jv.models.tiny("llama")
    with jv.Lab(beat=0.5, missed_beats=6) as lab:
        pool = lab.launch(
            model,
            replicas=2,
            name="shaken",
            env={"JVLAB_SILENT_ENGINE_SECONDS": SILENT},
        ).wait()
        policy = jv.Policy.from_pretrained(model)
        link = lab.connect(policy.params, pool, rules="policy", bucket_mib=0.05)
        yield pool, link, policy


def test_nothing_is_lost_nothing_is_wrong_and_all_recovers(world: Any):
    pool, link, policy = world
    kinds = ["kill", "freeze engine", "flip", "abandon"]
    report = jv.chaos(pool, link, minutes=0.35, seed=8, faults=kinds)
    print(report)
    assert report.ok, str(report)
    assert {row.kind for row in report.rows} == set(kinds)
    ended = {row.kind: row for row in report.rows if row.state == "recovered"}
    assert ended["kill"].ended == "died"
    assert ended["flip"].said.startswith("VerifyError")
    assert ended["abandon"].ended in ("old", "dirty")
    assert report.asked == report.answered + sum(report.refused.values())
    assert not any("tell them apart" in note for note in report.notes), (
        "the weights differ enough to be told apart"
    )
    assert pool.status()["healthy"] == 2
    assert link.verify(policy.params)


def test_a_pool_that_mislabels_its_answers_is_found(
    world: Any, monkeypatch: pytest.MonkeyPatch
):
    """The planted bug: one answer under load says that a version made it which was not there yet."""
    pool, link, _ = world
    honest = Pool.generate
    told: list[str] = []

    def generate(self: jv.Pool, *given: Any, **options: Any) -> jv.RolloutBatch:
        batch = honest(self, *given, **options)
        if told or not threading.current_thread().name.startswith("jvlab-chaos"):
            return batch
        told.append("once")
        object.__setattr__(batch[0], "versions", batch[0].versions + 40)
        return batch

    monkeypatch.setattr(Pool, "generate", generate)
    report = jv.chaos(pool, link, minutes=0.05, faults=["abandon"])
    assert not report.ok
    assert len(report.wrong) == 1
    assert not report.lost
    assert "it names version" in report.wrong[0]


def test_an_engine_that_hangs_behind_its_process_is_found_lost(world: Any):
    """The process still beats for it; its request goes to the other replica long before the request's deadline."""
    pool, _, _ = world
    first = pool.status()["replicas"][0]
    engine = psutil.Process(first["pid"]).children(recursive=True)
    found: list[jv.RolloutBatch] = []
    ask = {"max_tokens": 8, "ignore_eos": True, "replica": 0, "timeout": 120}
    work = threading.Thread(target=lambda: found.append(pool.generate([PROMPT], **ask)))
    state = lambda: pool.status()["replicas"][0]
    with frozen([process.pid for process in engine]):
        work.start()
        until(lambda: state()["state"] == "lost", "the hang was noticed", 60, 0.1)
        work.join(60)
        assert found[0][0].retried == 1
        assert found[0][0].replica == "shaken/1"
    until(lambda: state()["ready"], "it came back", 60, 0.1)
    assert state()["epoch"] > first["epoch"]

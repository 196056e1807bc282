"""`jv.chaos` on pools that lie, lose and hang, without an engine: its report is only worth what it finds."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from jvlab import errors
from jvlab.analysis import _chaos
from jvlab.analysis._chaos import KINDS, ChaosReport, chaos, frozen, schedule
from jvlab.engine._process import Pulse
from jvlab.record._batch import RolloutBatch
from jvlab.record._sample import Sample
from jvlab.wire import jvlab_pb2 as pb
from tests.views.html_checks import check
from tests.waiting import until


class FakePool:
    """One replica that serves what was synced; `lie` changes its answers, once it is asked under load."""

    one_process = False
    replicas = 1
    name = "<b>fake"

    def __init__(
        self, lie: Callable[[Sample], Sample | None] | None = None, **replica: Any
    ) -> None:
        told = {"replica": "fake/0", "state": pb.READY, "pid": 1 << 22, **replica}
        self.snapshot = pb.PoolStatus(replicas=[pb.ReplicaStatus(**told)])
        self.lie = lie
        self.version = 0
        self.held = 1.0
        self.dirty = False

    def wait(self, *_: Any, **__: Any) -> None: ...

    def status(self, **_: Any) -> dict[str, Any]:
        return {"healthy": int(not self.dirty), "replicas": [{"dirty": self.dirty}]}

    def generate(self, prompts: Any, **options: Any) -> RolloutBatch:
        time.sleep(0.002)
        if self.dirty:
            raise errors.EngineDirty("dirty")
        found = [self.sample(prompt) for prompt in prompts]
        if self.lie and threading.current_thread() is not threading.main_thread():
            found = [told for one in found if (told := self.lie(one)) is not None]
        return RolloutBatch(tuple(found))

    def sample(self, prompt: Any, **changes: Any) -> Sample:
        count = _chaos.SAMPLING["max_tokens"]
        facts: dict[str, Any] = {
            "prompt_index": 0,
            "sample_index": 0,
            "prompt_token_ids": tuple(prompt),
            "token_ids": (7,) * count,
            "logprobs": np.full(count, -self.held, np.float32),
            "versions": [self.version] * count,
        }
        return Sample(**facts | changes)


class FakeLink:
    """Commits what it is given, unless faults are injected."""

    part, transport, last = "model", "shm", None

    def __init__(self, pool: FakePool, served: bool = True) -> None:
        self.pool, self.served, self.faults = pool, served, None
        self.tree = {"w": np.ones(2, np.float32)}
        self.remembered = SimpleNamespace(arrays=lambda: self.tree)

    @property
    def version(self) -> int:
        return self.pool.version

    def require_one_process(self, *_: str) -> None: ...

    def verify(self, *_: Any, **__: Any) -> bool:
        return self.served

    def inject(self, faults: Any) -> Any:
        self.faults, before = faults, self.faults
        return before

    def sync(self, params: Any, **_: Any) -> None:
        if self.faults is not None:
            self.faults.__self__.fired.append("fault")
            self.pool.dirty = True
            raise errors.VerifyError(
                "bits at 10.0.0.1:4711 differ", outcomes={"fake/0": "dirty"}
            )
        self.pool.version += 1
        self.pool.held = float(params["w"][0])
        self.pool.dirty = False

    @contextmanager
    def stepper(self, *_: Any, **__: Any) -> Any:
        yield SimpleNamespace(units=[1, 2], step=lambda: None)
        self.pool.dirty = True


def shake(pool: FakePool, **options: Any) -> ChaosReport:
    given = {
        "minutes": 0.01,
        "faults": ["flip", "abandon"],
        "deadline": 5,
        "recovery": 5,
    }
    return chaos(pool, FakeLink(pool), progress=False, **given | options)  # type: ignore[arg-type]


def test_a_schedule_is_its_seeds_and_has_every_kind_before_any_comes_again():
    plan = schedule(3, 5, list(KINDS))
    assert plan == schedule(3, 5, list(KINDS)) != schedule(4, 5, list(KINDS))
    assert {planned.kind for planned in plan[: len(KINDS)]} == set(KINDS)
    assert len(plan) == 20
    assert list(plan) == sorted(plan, key=lambda planned: planned.at)
    assert plan[-1].at < 300


def test_a_sound_pool_passes_and_the_report_says_what_happened():
    report = shake(FakePool())
    assert report.ok, str(report)
    assert {row.kind: row.ended for row in report.rows} == {
        "flip": "dirty",
        "abandon": "dirty",
    }
    assert (
        next(row.said for row in report.rows if row.kind == "flip")
        == "VerifyError: bits differ"
    )
    assert report.asked == report.answered + sum(report.refused.values())
    check(report._repr_html_())
    assert "<b>fake" not in report._repr_html_()
    assert report.to_dict()["rows"][0]["state"] == "recovered"


LIES: dict[str, Callable[[FakePool, Sample], Sample | None]] = {
    "wrong: a version to come": lambda pool, s: pool.sample([5], versions=[99] * 16),
    "wrong: a version long gone": lambda pool, s: pool.sample([5], versions=[0] * 16),
    "wrong: the other weights": lambda pool, s: pool.sample(
        [5], logprobs=np.full(16, -1.9375 + pool.held)
    ),
    "lost: nothing in it": lambda pool, s: None,
    "lost: a token is missing": lambda pool, s: pool.sample(
        [5], token_ids=(7,), logprobs=[-1.0], versions=[1]
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_pool_that_lies_fails(lie: str):
    pool = FakePool()
    told = []

    def once(sample: Sample) -> Sample | None:
        if told or pool.version < 3:
            return sample
        told.append(lie)
        return LIES[lie](pool, sample)

    pool.lie = once
    report = shake(pool)
    assert not report.ok
    assert len(report.wrong if lie.startswith("wrong") else report.lost) == 1, str(
        report
    )


@pytest.mark.parametrize(
    "error", [errors.DeadlineExceeded("late"), ZeroDivisionError("a bug")]
)
def test_no_answer_and_no_reason_is_lost(error: Exception):
    def fail(_: Sample) -> Sample:
        raise error

    report = shake(FakePool(fail))
    assert not report.ok
    assert len(report.lost) == report.asked


def test_a_call_that_never_ends_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_chaos, "GRACE_SECONDS", 0.1)
    done = threading.Event()
    report = shake(
        FakePool(lambda sample: (done.wait(20) and sample) or sample),
        deadline=0.2,
        workers=1,
    )
    done.set()
    assert report.lost == ("a call did not end, 0.1 s after its deadline",)
    until(
        lambda: (
            not [t for t in threading.enumerate() if t.name.startswith("jvlab-chaos")]
        )
    )


def test_what_could_not_be_undone_is_not_done():
    report = shake(FakePool(), faults=["kill"])
    assert not report, "nothing happened"
    assert "no restarts are left" in report.rows[0].said
    report = shake(FakePool(elsewhere=True), faults=["freeze engine", "flip"])
    assert report.ok
    assert {row.state for row in report.rows} == {"skipped", "recovered"}


def test_it_refuses_what_it_could_not_put_back():
    pool, other = FakePool(), FakePool()
    for link, options, said in (
        (FakeLink(other), {}, "this link writes"),
        (FakeLink(pool), {"faults": ["flod"]}, "no fault is called 'flod'"),
        (FakeLink(pool, served=False), {}, "does not serve the weights"),
    ):
        with pytest.raises(errors.ConfigError, match=said):
            chaos(pool, link, **options)  # type: ignore[arg-type]
    assert pool.version == 0


def test_an_interrupt_ends_it_with_the_weights_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
):
    def interrupted(self: Any, planned: Any) -> None:
        self._wrapped, self._injected = self.link.inject(print), True
        raise KeyboardInterrupt

    pool = FakePool()
    monkeypatch.setattr(_chaos.Chaos, "_inject", interrupted)
    with pytest.raises(KeyboardInterrupt, match="as they were, verified"):
        shake(pool)
    assert pool.held == 1.0
    assert not [t for t in threading.enumerate() if t.name.startswith("jvlab-chaos")]


def test_what_stands_still_goes_on_whatever_happens():
    sleeper = subprocess.Popen(["sleep", "60"])
    state = psutil.Process(sleeper.pid).status

    def interrupted() -> None:
        with frozen([sleeper.pid, 1 << 22]):
            until(lambda: state() == psutil.STATUS_STOPPED)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        until(lambda: state() == psutil.STATUS_SLEEPING)
    finally:
        sleeper.kill()
        sleeper.wait(10)


def test_a_core_that_hangs_is_felt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JVLAB_SILENT_ENGINE_SECONDS", "0.05")

    async def beats() -> list[bool]:
        answer = asyncio.Event()
        state = SimpleNamespace(stage="idle")
        engine = SimpleNamespace(
            state=state, llm=SimpleNamespace(is_sleeping=answer.wait)
        )
        pulse = Pulse(engine)
        felt = [pulse.is_felt()]
        await asyncio.sleep(0.1)
        state.stage = "moving"  # a sync may take longer
        felt.append(pulse.is_felt())
        state.stage = "idle"
        await asyncio.sleep(0.1)
        felt += [pulse.is_felt(), pulse.is_felt()]
        answer.set()
        await asyncio.sleep(0.01)
        return [*felt, pulse.is_felt()]

    assert asyncio.run(beats()) == [True, True, False, False, True]
    assert capsys.readouterr().out.count("has not answered") == 1

"""`Record` and `RecordWriter` together: write, follow, resume, samples, faces."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.record._events import FaultEvent, RolloutEvent, RunStop, StepEvent, clock
from jvlab.record._record import Record
from jvlab.record._sample import Sample
from jvlab.record._samples import SampleRecord
from jvlab.record._writer import RecordWriter
from tests.record.synthetic import made_up


def sample(i: int = 0) -> Sample:
    return Sample(
        prompt_index=i,
        sample_index=1,
        prompt_token_ids=np.array([1, 2]),
        token_ids=np.array([5, 6, 7]),
        prompt="p",
        logprobs=np.array([-0.1, -1e-7, -2.3], np.float32),
        text="héllo\n",
        versions=((3, 0, 1), (4, 1, 3)),
        replica="pool/1",
    )


def test_what_was_written_is_read_with_times_since_the_start(tmp_path: Path) -> None:
    with RecordWriter(
        tmp_path / "runs" / "a", config={"lr": 0.1}, gap_alarm=0.01
    ) as writer:
        begin = clock()
        writer.write(
            RolloutEvent(actor="pool/0", tokens=5, start=begin, stop=begin + 2)
        )
        writer.write(FaultEvent(fault="nan", who="trainer"))  # stamped by the writer
        record = writer.record
        assert record.running
        assert "running" in repr(record)
    events = record.events()
    assert [e.kind for e in events] == ["run_start", "rollout", "fault", "run_stop"]
    assert events[0].start == 0
    assert 0 <= events[1].start < 60
    assert events[1].stop == pytest.approx(events[1].start + 2)
    assert 0 <= events[2].start == events[2].stop < 60
    assert abs(record.started - time.time()) < 600
    assert not record.running
    assert record.events("fault") == [events[2]]
    assert repr(record) == "Record('a': 0 steps, 0 samples, 0 syncs, 1 fault, finished)"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    def fail() -> None:
        with RecordWriter(tmp_path):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    stop = Record.open(tmp_path).events()[-1]
    assert isinstance(stop, RunStop)
    assert (stop.reason, stop.text) == ("failed", "ValueError: boom")


def test_a_folder_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no record") as caught:
        Record.open(tmp_path)
    assert "runs/" in caught.value.remedy


def test_an_unknown_kind_is_an_error_that_lists_them(tmp_path: Path) -> None:
    RecordWriter(tmp_path).close()
    record = Record.open(tmp_path)
    assert record.events("sync") == []
    with pytest.raises(ConfigError, match="'stepp'") as caught:
        record.events("stepp")
    assert "step" in caught.value.remedy


def test_follow_while_it_runs_and_after(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    record = writer.record

    def work() -> None:
        for i in range(5):
            time.sleep(0.05)
            writer.write(StepEvent(step=i, version=i))
        writer.close()

    thread = threading.Thread(target=work)
    thread.start()
    kinds = [e.kind for e in record.follow(poll=0.01)]
    thread.join()
    assert kinds == ["run_start", *["step"] * 5, "run_stop"]
    assert [e.kind for e in Record.open(tmp_path).follow()] == kinds


def test_follow_gives_up_when_nothing_comes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        begin = time.monotonic()
        assert [e.kind for e in writer.record.follow(poll=0.01, timeout=0.2)] == [
            "run_start"
        ]
        assert time.monotonic() - begin > 0.15


def test_a_resumed_run_goes_on_in_the_same_record(tmp_path: Path) -> None:
    for i in range(2):
        with RecordWriter(tmp_path, run="r") as writer:
            now = clock()
            writer.write(StepEvent(step=i, version=i, start=now, stop=now))
    record = Record.open(tmp_path)
    assert record.steps()["step"].tolist() == [0, 1]
    times = [e.start for e in record.events()]
    assert times == sorted(times)
    assert record.summary()["sessions"] == 2


def test_samples_hold_what_re_scoring_needs(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        kept = writer.write_samples(
            [
                SampleRecord.of(
                    sample(i), reward=i / 2, step=7, sampling={"temperature": 0.7}
                )
                for i in range(4)
            ]
        )
        assert kept == 4
    record = Record.open(tmp_path)
    found = record.samples(step=7, group=2)
    assert len(found) == 1
    one, given = found[0], sample(2)
    assert one.reward == 1.0
    assert (one.prompt_tokens, one.tokens, one.text, one.actor) == (
        (1, 2),
        (5, 6, 7),
        "héllo\n",
        "pool/1",
    )
    # bit for bit
    assert np.array_equal(np.array(one.logprobs, np.float32), given.logprobs)
    assert one.token_versions.tolist() == given.token_versions.tolist() == [3, 4, 4]
    assert one.staleness(5).tolist() == [2, 1, 1]
    assert one.sampling == {"temperature": 0.7}
    assert len(record.samples()) == 4
    assert record.samples(step=8) == []
    assert record.table("samples")["reward"].tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("every", "expected"), [(0, []), (1, list(range(10))), (3, [0, 3, 6, 9])]
)
def test_every_nth_sample_is_kept_across_calls(
    tmp_path: Path, every: int, expected: list[int]
) -> None:
    with RecordWriter(tmp_path, keep_samples=every) as writer:
        for i in range(10):
            writer.write_samples([SampleRecord.of(sample(i))])
    assert [s.group for s in Record.open(tmp_path).samples()] == expected


def test_a_negative_n_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_samples=-1"):
        RecordWriter(tmp_path, keep_samples=-1)


def test_a_sink_that_raises_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    good: list[str] = []

    def broken(event) -> None:
        if event.kind == "step":
            raise RuntimeError("no network")

    with RecordWriter(
        tmp_path, sinks=[broken, lambda e: good.append(e.kind)]
    ) as writer:
        for i in range(3):
            writer.write(StepEvent(step=i, version=i))
    faults = Record.open(tmp_path).events("fault")
    assert [(e.who, e.text) for e in faults] == [("broken", "RuntimeError: no network")]  # type: ignore[attr-defined]
    assert good == ["run_start", "fault", "step", "step", "step", "run_stop"]


def test_faces_are_stable_and_small() -> None:
    record = Record.of(made_up(30, 1))
    assert repr(record).startswith(
        "Record('made-up': 30 steps, 960 samples, 30 syncs, reward "
    )
    assert "\n" not in repr(record)
    page = record._repr_html_()
    assert "30 with equal digests" in page
    assert len(page) < 4000
    empty = Record.of([])
    assert repr(empty) == "Record('': 0 steps, 0 samples, 0 syncs, not ended)"
    assert "nan" not in empty._repr_html_()


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    one, other = (
        Record.of(made_up(steps=30)),
        Record.of(made_up(steps=20, staleness=2, seed=1)),
    )
    found = one.compare(other)
    assert found.names == ("this", "other")  # both are called the same
    assert found.numbers["steps"] == (30, 20)
    rewards = one.steps()["reward_mean"]
    assert found.numbers["reward, same 20 steps"][0] == pytest.approx(
        rewards[:20].mean()
    )
    assert found.numbers["reward, last 10 steps"][0] == pytest.approx(
        rewards[-10:].mean()
    )
    assert found.numbers["staleness, mean"][0] < found.numbers["staleness, mean"][1]
    assert found.to_pandas().loc["steps"].tolist() == [30, 20]
    assert "staleness, mean" in repr(found)
    for name, rate in (("slow", 0.1), ("fast", 0.5)):
        with RecordWriter(
            tmp_path / name, config={"learning_rate": rate, "group_size": 8}
        ):
            pass
    slow = Record.open(tmp_path / "slow")
    settings = slow.compare(tmp_path / "fast")  # a folder will do
    assert settings.names == ("slow", "fast")
    assert settings.settings == {"learning_rate": (0.1, 0.5)}
    assert "learning_rate" in settings._repr_html_()
    for wrong in (5, None, tmp_path / "none"):
        with pytest.raises(ConfigError):
            slow.compare(wrong)

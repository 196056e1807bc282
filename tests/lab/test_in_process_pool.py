"""The in-process pool over a faked engine: everything between `Pool` and the engine is real, and no vLLM is needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab import _in_process
from jvlab.lab._lab import LabPlots
from jvlab.lab._pool import InProcessPool
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._client import LinkStream
from tests.gateway.fake_lab import FACTS, FakeReplica
from tests.waiting import until

pytestmark = pytest.mark.slow


class FakeEngine:
    """What a host asks of an engine beside serving."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica, self.facts = replica, FACTS
        self.dead, self.closed = False, 0

    async def stats(self) -> pb.ReplicaStats:
        return self.replica.stats()

    async def drop_all(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that were loaded."""
    engines: list[FakeEngine] = []

    async def load(host: _in_process.EngineHost) -> Any:
        engines.append(FakeEngine(FakeReplica(host.name, "", "")))
        return engines[-1]

    monkeypatch.setattr(
        "jvlab.lab._launch_settings.resolve_device", lambda device: "cpu"
    )
    monkeypatch.setattr(_in_process.EngineHost, "_load", load)
    monkeypatch.setattr(
        _in_process.EngineHost, "_serve", lambda host, engine: engine.replica
    )
    return engines


@pytest.fixture
def local(made: list[FakeEngine], llama: str) -> Iterator[InProcessPool]:
    pool = jv.Pool.in_process(llama, name="here")
    yield pool
    pool.close()


def test_it_is_a_pool(local: InProcessPool, made: list[FakeEngine]):
    assert local.wait() is local
    batch = local.generate(["a", "b"], n=2, max_tokens=2, progress=False)
    assert [s.text for s in batch] == ["0.0", "0.1", "1.0", "1.1"]
    assert [len(row) for row in local.score([[1, 2], [3]]).logprobs] == [2, 1]
    assert local.pause() >= 0
    assert local.resume() >= 0
    assert made[0].replica.steered == [pb.PAUSE, pb.RESUME]
    status = local.status()
    assert (
        status["healthy"],
        status["replicas"][0]["served"],
        status["in_flight"],
    ) == (1, 6, 0)
    assert repr(local).endswith("in process on cpu, ready)")


def test_texts_are_scored_as_the_engine_reads_them(local: InProcessPool):
    """With the tokenizer of the model's folder, special tokens included, as `generate` does with a prompt."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(local.model)
    assert (
        local.tokenizer("Hello there")["input_ids"] == own("Hello there")["input_ids"]
    )
    scores = local.score(["Hello there", [5, 6, 7]])
    assert scores.token_ids is not None
    assert [row.tolist() for row in scores.token_ids] == [
        own("Hello there")["input_ids"],
        [5, 6, 7],
    ]
    assert [len(row) for row in scores.logprobs] == [
        len(row) for row in scores.token_ids
    ]
    assert len(local.score("one text")) == 1
    with pytest.raises(errors.SamplingError, match="sequence 0 is a chat") as caught:
        local.score([[{"role": "user", "content": "hi"}]])
    assert "apply_chat_template" in caught.value.remedy
    for wrong in ("", 3.5, {"a": 1}):
        with pytest.raises(errors.SamplingError):
            local.score([wrong])


def test_a_tokenizer_that_is_not_here_is_an_error_of_its_own():
    from jvlab.lab._prompts import tokenizer_of

    with pytest.raises(
        errors.ModelError, match="the tokenizer of /not/here cannot be loaded"
    ) as caught:
        tokenizer_of("/not/here")
    assert "token ids" in caught.value.remedy


def test_a_timeline_without_a_run_shows_the_calls(local: InProcessPool):
    plots = LabPlots(local.client)
    with pytest.raises(
        errors.ConfigError, match="nothing has happened in this lab yet"
    ):
        plots.lanes()
    local.generate(["a", "b"], n=2, max_tokens=2, progress=False)
    local.score([[1, 2]])
    with local.stream([[1]] * 3, max_tokens=2) as stream:
        assert len(list(stream)) == 3
    shown = plots.lanes()
    events = shown.record.events()
    assert [e.kind for e in events] == ["run_start", "rollout", "score", "rollout"]
    assert [e.samples for e in shown.record.events("rollout")] == [4, 3]  # type: ignore[attr-defined]
    assert all(0 <= e.start <= e.stop for e in events)
    assert "here/0" in str(shown.data())
    assert plots.timeline().axes
    with pytest.raises(errors.ConfigError, match="has started no run"):
        plots.staleness()  # of steps, which only a run has


def test_a_slow_reader_slows_it_down(local: InProcessPool, made: list[FakeEngine]):
    with local.stream([[1]] * 20, window=3, max_tokens=2) as stream:
        first = next(iter(stream))
        assert first.finish_reason == "stop"
        assert made[0].replica.max_running <= 3
    until(lambda: made[0].replica.running == 0, "the rest to be cancelled")


def test_refusals_keep_their_class(local: InProcessPool, made: list[FakeEngine]):
    made[0].replica.refusal = errors.SamplingError(
        "prompt 0 is odd", remedy="make it even"
    )
    with pytest.raises(errors.SamplingError, match="prompt 0 is odd") as caught:
        local.generate("x", max_tokens=2)
    assert caught.value.remedy == "make it even"


def test_a_deadline_is_kept(local: InProcessPool, made: list[FakeEngine]):
    made[0].replica.limit = 0
    with pytest.raises(errors.DeadlineExceeded, match="waited for replica here/0"):
        local.generate("x", max_tokens=2, timeout=0.2)
    until(lambda: made[0].replica.running == 0, "the work to be cancelled")


def orders(local: InProcessPool, holder: str = "me") -> LinkStream:
    stream = LinkStream(local.client)
    endpoint = pb.Endpoint(
        replica="here/0", index=0, ranks_json=[json.dumps(["here/0"])]
    )
    order = pb.LinkOpen(
        pool="here",
        holder=holder,
        transport="loopback",
        endpoints=[endpoint],
        lease_seconds=60,
    )
    stream.open(order, 30)
    return stream


def test_a_sync_is_the_gateways_transaction(
    local: InProcessPool, made: list[FakeEngine]
):
    stream = orders(local)
    terms = pb.SyncTerms(
        version=1, mode="direct", verify="full", require="all", pause="keep", kv="keep"
    )
    assert (
        stream.steps([pb.PREPARE, pb.HALT, pb.MOVE], 30, terms=terms).state == "moving"
    )
    digests = [
        pb.ReplicaDigests(replica="here/0", parameters=["w"], ranks=[0], values=[1])
    ]
    reply = stream.steps([pb.VERIFY, pb.COMMIT, pb.GO_ON], 30, digests=digests)
    assert [(o.replica, o.state, o.version) for o in reply.outcomes] == [
        ("here/0", "committed", 1)
    ]
    assert local.status()["version"] == 1
    assert local.generate("x", max_tokens=2)[0].version_spans == ((1, 0, 2),)
    with pytest.raises(errors.LinkBusy, match="me"):
        orders(local, "you")
    stream.close()
    until(lambda: local.status()["trainer"] is None, "the pool to be free again")


def test_a_trainer_that_leaves_mid_sync_leaves_a_dirty_engine(
    local: InProcessPool, made: list[FakeEngine]
):
    stream = orders(local)
    terms = pb.SyncTerms(
        version=1, mode="direct", verify="full", require="all", pause="keep", kv="keep"
    )
    stream.steps([pb.PREPARE, pb.HALT, pb.MOVE], 30, terms=terms)
    stream.close()
    until(lambda: local.status()["trainer"] is None, "the sync to be abandoned")
    with pytest.raises(errors.EngineDirty):
        local.generate("x", max_tokens=2)


def test_an_engine_that_dies_is_told(local: InProcessPool, made: list[FakeEngine]):
    made[0].dead = True
    until(lambda: local.snapshot.replicas[0].stage == "failed", "the death to be seen")
    with pytest.raises(
        errors.LaunchError, match=r"here/0 died: the engine in this process died"
    ):
        local.generate("x", max_tokens=2)


def test_closing_ends_everything_and_makes_room(made: list[FakeEngine], llama: str):
    with jv.Pool.in_process(llama) as first:
        with pytest.raises(errors.ConfigError, match="has an engine already") as caught:
            jv.Pool.in_process(llama)
        assert caught.value.fields["pool"] is first
        thread = first.client.loop._thread
    first.close()
    assert made[0].closed == 1
    assert not thread.is_alive()
    with pytest.raises(errors.ControlError, match="closed"):
        first.generate("x")
    with jv.Pool.in_process(llama) as second:
        assert second.generate("x", max_tokens=2)[0].text == "0.0"
    assert not _in_process._open


def test_a_start_that_fails_leaves_room_and_says_why(
    made: list[FakeEngine], llama: str, monkeypatch: Any
):
    async def broken(host: Any) -> Any:
        raise ValueError("no memory for the KV cache")

    before = {thread.name for thread in threading.enumerate()}
    monkeypatch.setattr(_in_process.EngineHost, "_load", broken)
    with pytest.raises(
        errors.LaunchError, match="ValueError: no memory for the KV cache"
    ) as caught:
        jv.Pool.in_process(llama)
    assert "max_model_len" in caught.value.remedy
    assert not _in_process._open
    assert {thread.name for thread in threading.enumerate()} <= before

"""What one call may ask: refused at every door with the limit, what was asked and what to do; nothing was started."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvlab as jv
from jvlab import errors
from jvlab.wire import _limits, _security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._limits import Asked, Limits
from tests.gateway.fake_lab import FakeLab
from tests.waiting import until


def test_defaults_let_what_people_do_pass():
    for seqs, length in ((0, 0), (8, 64), (16, 2048), (256, 2048), (1024, 40_960)):
        limits = Limits.resolve({}, seqs, length)
        for prompts, n, new in (
            (64, 8, 256),
            (10_000, 8, 64),
            (1, 1024, 512),
            (50_000, 1, 1024),
            (512, 16, 512),
        ):
            limits.check(
                _limits.of_prompts([128] * prompts, n, {"max_tokens": new}, length)
            )
        for asked in (Asked(200_000, 1, 200_000, 0), Asked(4_000_000, 1, 4_000_000, 0)):
            with pytest.raises(
                errors.LimitExceeded, match=r"samples of one prompt \(n\)"
            ) as caught:
                limits.check(asked)
            assert caught.value.fields == {
                "limit": limits.n,
                "asked": asked.n,
                "name": "n",
            }
            assert "limits={'n'" in caught.value.remedy


def test_tokens_count_prompts_and_what_may_become_of_them():
    asked = _limits.of_prompts([10, 20], 3, {"max_tokens": 5}, 100)
    assert asked == Asked(3, 2, 6, 3 * (30 + 10))
    assert _limits.of_prompts([10], 1, {}, 100).tokens == 10 + 16, "vLLM's own default"
    assert _limits.of_prompts([10], 1, {"max_tokens": None}, 100).tokens == 110, (
        "to the model's end"
    )
    assert _limits.of_prompts([10], 1, {"max_tokens": 10**30}, 100).tokens == 110


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        ({"prompt": "x"}, Asked(1, 1, 1, 16)),
        ({"prompt": "x", "n": 3, "max_tokens": 4}, Asked(3, 1, 3, 12)),
        ({"prompt": "x", "n": "3", "max_tokens": 4.0}, Asked(3, 1, 3, 12)),
        ({"prompt": "x", "best_of": 5, "max_tokens": 1}, Asked(5, 1, 5, 5)),
        ({"prompt": [1, 2, 3], "max_tokens": 1}, Asked(1, 1, 1, 4)),
        (
            {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 1},
            Asked(2, 2, 4, 2 * (3 + 2)),
        ),
        ({"messages": [], "n": 2}, Asked(2, 1, 2, 200)),
        ({"messages": [], "max_completion_tokens": 7}, Asked(1, 1, 1, 7)),
        (
            {"token_ids": [1], "sampling_params": {"n": 9, "max_tokens": 2}},
            Asked(9, 1, 9, 909),
        ),
        ({"prompt": "x", "n": None, "max_tokens": "9" * 5000}, Asked(1, 1, 1, 100)),
    ],
)
def test_what_a_body_asks(content: dict[str, Any], asked: Asked):
    assert _limits.of_http(content, 100) == asked


@given(
    st.dictionaries(
        st.sampled_from(
            ["n", "best_of", "prompt", "max_tokens", "messages", "sampling_params"]
        ),
        st.none()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers() | st.text())
        | st.dictionaries(st.just("n"), st.integers()),
    )
)
def test_hostile_bodies_are_counted_without_an_error(content: dict[str, Any]):
    asked = _limits.of_http(content, 100)
    assert asked.n >= 1
    assert asked.samples >= asked.prompts >= 1


@pytest.mark.parametrize(
    ("given_limits", "word"),
    [
        ({"m": 1}, "no limit is called 'm'"),
        ({"n": 0}, "at least 1"),
        ({"n": True}, "at least 1"),
        ({"n": 2.5}, "whole"),
        ({"prompt": 5}, "did you mean 'prompts'"),
        ({"tokens": 10**30}, "whole number"),
    ],
)
def test_limits_of_a_launch_are_checked(
    client: jv.Lab, llama: str, given_limits: dict[str, Any], word: str
):
    with pytest.raises(errors.ConfigError, match=word):
        client.launch(llama, limits=given_limits)


def calls(lab: FakeLab) -> tuple[int, int]:
    return sum(f.max_running for f in lab.fakes.values()), sum(
        f.finished for f in lab.fakes.values()
    )


def test_hostile_calls_are_refused_before_they_are_sent(
    fake_lab: FakeLab, pool: jv.Pool
):
    assert pool.limits == {
        "n": 1024,
        "prompts": 65_536,
        "samples": 131_072,
        "tokens": 2**26,
    }
    for prompts, n in (
        ("x", 200_000),
        ("x", 4_000_000),
        ("x", 2**40),
        (["x"] * 70_000, 1),
        (["x"] * 1000, 1000),
    ):
        for ask in (pool.generate, pool.stream):
            with pytest.raises(
                errors.LimitExceeded, match="one call asks for"
            ) as caught:
                ask(prompts, n=n)
            assert caught.value.fields["asked"] > caught.value.fields["limit"]  # type: ignore[operator]
    with pytest.raises(errors.LimitExceeded):
        pool.score([[1]] * 70_000)
    assert calls(fake_lab) == (0, 0)


def test_hostile_calls_are_refused_by_the_gateway(
    fake_lab: FakeLab, client: jv.Lab, llama: str
):
    """Whoever calls it without our client; what it was launched with counts."""
    limits = {"n": 2, "prompts": 3, "samples": 5, "tokens": 100}
    pool = client.launch(llama, name="q", limits=limits).wait(60)
    assert pool.limits == limits
    assert len(pool.generate([[1], [2]], n=2, max_tokens=4)) == 4, "below all of them"
    metadata = _security.authorization(fake_lab.token)
    text, ids = pb.Prompt(text="x"), pb.Prompt(tokens=pb.TokenIds(ids=[1] * 60))
    with grpc.insecure_channel(fake_lab.address) as channel:
        stub = rpc.LabStub(channel)

        def refusal(call: Any) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE, caught.value
            return caught.value.details() or ""

        def generate(prompts: list[pb.Prompt], n: int, **sampling: Any) -> str:
            start = pb.GenerateStart(
                pool="q", prompts=prompts, n=n, sampling_json=json.dumps(sampling)
            )
            return refusal(
                stub.Generate(
                    iter([pb.GenerateCall(start=start)]), timeout=30, metadata=metadata
                )
            )

        before = calls(fake_lab)
        assert "3 samples of one prompt (n); this pool takes at most 2" in generate(
            [text], 3
        )
        assert "4,000,000" in generate([text], 4_000_000)
        assert "4 prompts" in generate([text] * 4, 1)
        assert "6 samples" in generate([text] * 3, 2)
        assert "limits={'tokens'" in generate([ids], 1, max_tokens=50)
        assert "128 tokens" in generate([text], 2, max_tokens=None)
        scores = pb.ScoreCall(pool="q", sequences=[pb.TokenIds(ids=[1, 2])] * 4)
        assert "4 prompts" in refusal(stub.Score(scores, timeout=30, metadata=metadata))
        scores = pb.ScoreCall(pool="q", sequences=[pb.TokenIds(ids=[1] * 64)] * 2)
        assert "tokens" in refusal(stub.Score(scores, timeout=30, metadata=metadata))
        assert calls(fake_lab) == before, "no replica heard of it"
    with pytest.raises(errors.LimitExceeded, match="tokens"):
        pool.generate([[1] * 60], max_tokens=50)


def test_limits_can_be_taken_away(client: jv.Lab, llama: str):
    pool = client.launch(llama, name="q", limits={"n": None, "samples": None}).wait(60)
    assert len(pool.generate([[1]], n=1500)) == 1500


@pytest.mark.parametrize(
    "sampling", ["[" * 100_000, "[]", "{", '{"temperature": NaN}', '{"seed": 1e999}']
)
def test_hostile_sampling_is_the_callers_mistake(
    fake_lab: FakeLab, pool: jv.Pool, sampling: str
):
    """Never an unknown error, which counts as a lost replica and is tried elsewhere."""
    start = pb.GenerateStart(
        pool="p", prompts=[pb.Prompt(text="x")], n=1, sampling_json=sampling
    )
    metadata = _security.authorization(fake_lab.token)
    with (
        grpc.insecure_channel(fake_lab.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(
            rpc.LabStub(channel).Generate(
                iter([pb.GenerateCall(start=start)]), timeout=30, metadata=metadata
            )
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "prompt",
    [
        "\ud800",
        [{"role": "user", "content": "\ud800"}],
        [2**40],
        [-(2**40)],
        [{"role": float("nan"), "x": {1, 2}}],
    ],
)
def test_hostile_prompts_are_the_callers_mistake(pool: jv.Pool, prompt: Any):
    with pytest.raises(errors.SamplingError, match="prompt 0"):
        pool.generate([prompt])
    with pytest.raises(errors.SamplingError):
        pool.generate("fine", temperature=float("nan"))


def test_a_caller_that_leaves_has_its_work_cancelled(fake_lab: FakeLab, pool: jv.Pool):
    """Through the gateway: nothing stays counted, and the replicas are told."""
    for fake in fake_lab.fakes.values():
        fake.limit = 1
    stream = pool.stream([[1]] * 500, n=4, window=2000)
    samples = iter(stream)
    next(samples)
    until(
        lambda: sum(fake.running for fake in fake_lab.fakes.values()) >= 1998,
        "all is with the replicas",
    )
    stream.close()
    until(
        lambda: sum(fake.cancelled for fake in fake_lab.fakes.values()) >= 1998,
        "cancelled there",
    )
    until(
        lambda: [fake_lab.gateway.loads.of(name) for name in fake_lab.fakes] == [0, 0],
        "not counted",
    )

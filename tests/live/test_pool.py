"""The rollout API on one real vLLM engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab import _pool
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from tests.conftest import process_tree

pytestmark = pytest.mark.engine
CHAT = [{"role": "user", "content": "Tell me a story"}]


def test_texts_chats_and_tokens_in_one_call(pool: jv.Pool):
    batch = pool.generate(
        ["Once upon a time", CHAT, [5, 6, 7]], n=2, max_tokens=8, temperature=0.0
    )
    assert len(batch) == 6
    assert batch.logprobs_mode == "processed_logprobs"
    for first, second in batch.groups():
        assert np.array_equal(first.token_ids, second.token_ids), (
            "greedy samples are equal"
        )
    for sample in batch:
        assert (
            len(sample.token_ids) == len(sample.logprobs) == 8
            or sample.finish_reason == "stop"
        )
        assert sample.version_spans == ((0, 0, len(sample.token_ids)),)
        assert sample.replica == "shared/0"
        assert 0 < sample.seconds["first_token"] <= sample.seconds["total"]
        assert (sample.logprobs < 0).all()
    assert list(batch[4].prompt_token_ids) == [5, 6, 7]


def test_score_agrees_with_sampled_logprobs(pool: jv.Pool):
    batch = pool.generate(
        ["The cat", "A long way from home"], n=4, max_tokens=24, temperature=1.0, seed=3
    )
    scores = pool.score(batch)
    assert scores.gap(batch) < 1e-4
    assert all(
        np.isnan(row[0]) and np.isfinite(row[1:]).all() for row in scores.logprobs
    )


def test_texts_are_scored_with_the_tokens_that_prompts_have(pool: jv.Pool):
    texts = ["The cat", "A long way from home"]
    batch = pool.generate(texts, max_tokens=4, temperature=0.0, ignore_eos=True)
    scores = pool.score([*texts, batch[0].prompt_token_ids])
    assert scores.token_ids is not None
    assert [row.tolist() for row in scores.token_ids[:2]] == [
        s.prompt_token_ids.tolist() for s in batch
    ]
    assert np.array_equal(scores[0], scores[2], equal_nan=True)
    whole = texts[0] + pool.tokenizer.decode(batch[0].token_ids)
    assert np.isfinite(pool.score(whole)[0][1:]).all()


def test_logprobs_are_the_models(pool: jv.Pool, llama: str):
    """Against an implementation that shares nothing with the engine: transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    batch = pool.generate(
        ["The cat", [5, 6, 7]], n=2, max_tokens=16, temperature=1.0, seed=5
    )
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for sample in batch:
        ids = torch.tensor(
            [[*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]]
        )
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0, :-1], -1)
        wanted = table.gather(1, ids[0, 1:, None])[:, 0].numpy()[
            -len(sample.token_ids) :
        ]
        assert np.abs(wanted - sample.logprobs).max() < 1e-3


def test_score_with_top(pool: jv.Pool):
    scores = pool.score([[5, 6, 7, 8], [9, 10]], top=3)
    assert scores.top_ids is not None
    assert scores.top_logprobs is not None
    assert [a.shape for a in scores.top_ids] == [(4, 3), (2, 3)]
    assert (np.diff(scores.top_logprobs[0][1:], axis=1) <= 0).all(), "best first"
    greedy = pool.generate([[5, 6, 7]], max_tokens=1, temperature=0.0)
    assert scores.top_ids[0][3][0] == greedy[0].token_ids[0], (
        "the most likely next token is the greedy one"
    )


def test_processed_logprobs_follow_the_temperature(pool: jv.Pool):
    batch = pool.generate("The cat", n=4, max_tokens=16, temperature=0.5, seed=0)
    scores = pool.score(batch, top=20)
    assert scores.gap(batch) > 0.05, (
        "at another temperature than 1 they differ from the raw model's"
    )


def test_seeds_make_samples_repeat_and_differ(pool: jv.Pool):
    first = pool.generate("The cat", n=4, max_tokens=12, seed=11)
    again = pool.generate("The cat", n=4, max_tokens=12, seed=11)
    assert [list(s.token_ids) for s in first] == [list(s.token_ids) for s in again]
    assert len({tuple(s.token_ids) for s in first}) > 1


def test_stop_strings(pool: jv.Pool):
    plain = pool.generate("The cat", max_tokens=24, temperature=0.0)[0]
    word = plain.text[5:8]
    stopped = pool.generate("The cat", max_tokens=24, temperature=0.0, stop=[word])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(word)]


def test_text_is_what_vllm_would_say(pool: jv.Pool):
    plain = pool.generate("The cat", max_tokens=12, temperature=0.0, ignore_eos=True)[0]
    stopped = pool.generate(
        "The cat", max_tokens=12, temperature=0.0, stop=[plain.text[:3]]
    )[0]
    assert stopped.text == "", "a stop string at the very start leaves no text"
    third = int(plain.token_ids[2])
    ended = pool.generate(
        "The cat", max_tokens=12, temperature=0.0, stop_token_ids=[third]
    )[0]
    assert ended.finish_reason == "stop"
    assert list(ended.token_ids) == list(plain.token_ids[:3])
    assert plain.text.startswith(ended.text)
    assert len(ended.text) < len(plain.text)


def test_logit_bias_chooses_the_token(pool: jv.Pool):
    sample = pool.generate(
        "The cat",
        max_tokens=4,
        temperature=0.0,
        logit_bias={77: 100.0},
        ignore_eos=True,
    )[0]
    assert list(sample.token_ids) == [77] * 4


@pytest.mark.parametrize(
    ("prompts", "sampling", "word"),
    [
        ([], {}, "no prompts"),
        (["fine", ""], {}, "prompt 1 is an empty text"),
        ("fine", {"temprature": 1.0}, "temperature"),
        ("fine", {"top_p": 7.0}, "top_p must be in"),
        ("fine", {"max_tokens": -1}, "max_tokens must be at least 1"),
        (
            ["fine", [5] * 3000],
            {},
            "prompt 1 has 3000 tokens; the engine takes at most 2047",
        ),
        ([[1, 10**6]], {}, "token id 1000000"),
        ([[{"role": "user"}]], {}, "chat template failed"),
        ("fine", {"max_tokens": 2.5}, "int"),
        ("fine", {"seed": "a"}, "refuses"),
        ("fine", {"ignore_eos": "x"}, "bool"),
    ],
)
def test_bad_requests_are_clear_and_harmless(
    pool: jv.Pool, prompts, sampling, word: str
):
    with pytest.raises(errors.SamplingError, match=word):
        pool.generate(prompts, **sampling)
    assert len(pool.generate("fine", max_tokens=2)) == 1


def test_sleep_says_what_a_cpu_cannot(pool: jv.Pool):
    for call in (pool.sleep, pool.wake):
        with pytest.raises(errors.Unsupported, match="not supported on CPU"):
            call()


def in_background(call):
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def running(pool: jv.Pool) -> int:
    return pool.status()["replicas"][0]["running"]


def until_running(pool: jv.Pool, tokens: int = 20) -> None:
    """Wait until the engine is well inside a request."""
    start = pool.status()["replicas"][0]["generated_tokens"]
    deadline = time.monotonic() + 120
    while pool.status()["replicas"][0]["generated_tokens"] < start + tokens:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_still(pool: jv.Pool) -> None:
    """Wait until half a second brings no token; those of the last step may be on their way to the counters."""
    generated = lambda: pool.status()["replicas"][0]["generated_tokens"]
    deadline, last = time.monotonic() + 60, -1
    while (now := generated()) != last:
        assert time.monotonic() < deadline, "it goes on and on"
        last = now
        time.sleep(0.5)


def test_pause_keep_freezes_and_goes_on_with_the_same_tokens(pool: jv.Pool):
    greedy = {"max_tokens": 250, "temperature": 0.0, "ignore_eos": True}
    whole = pool.generate("Once upon", **greedy)[0]
    thread, results = in_background(lambda: pool.generate("Once upon", **greedy)[0])
    until_running(pool)
    pool.pause("keep")
    try:
        assert pool.status()["replicas"][0]["paused"]
        until_still(pool)
        assert thread.is_alive()
    finally:
        pool.resume()
    thread.join(400)
    assert np.array_equal(results[0].token_ids, whole.token_ids)
    assert np.allclose(results[0].logprobs, whole.logprobs, atol=1e-5)


def test_calls_behind_a_pause_say_who_paused(
    pool: jv.Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each of them waits in a thread, as it would in another notebook; here in a script, whose log says why."""
    until_still(pool)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(_pool, "own_name", lambda: "python 7 on elsewhere")
        pool.pause()
    calls = {
        "generate, 0 of 1 sample": lambda: pool.generate(
            "Once", max_tokens=3, ignore_eos=True
        ),
        "stream, 0 of 2 samples": lambda: list(
            pool.stream("Once", n=2, max_tokens=3, ignore_eos=True)
        ),
        "score, 0 of 1 sequence": lambda: pool.score([[5, 6, 7]]),
        "turns, 0 of 1 turn": lambda: pool.session("Once", ignore_eos=True).generate(3),
    }
    waiting = [in_background(call) for call in calls.values()]
    said = ""
    try:
        for what in calls:
            wanted = f"{pool.name}: {what}, "
            deadline = time.monotonic() + 120
            while not any(
                line.startswith(wanted) and "waits: " in line
                for line in said.splitlines()
            ):
                assert time.monotonic() < deadline, (wanted, said)
                time.sleep(0.05)
                said += capsys.readouterr().err
    finally:
        pool.resume()
    for thread, _ in waiting:
        thread.join(200)
    assert all(results for _, results in waiting), "they go on"
    remedy = f"waits: {pool.name} was paused by python 7 on elsewhere; pool.resume() lets it continue"
    assert said.count(remedy) >= len(calls)
    assert "\r" not in said
    assert not [
        thread for thread in threading.enumerate() if thread.name == "jvlab-progress"
    ]


def test_pause_wait_lets_requests_finish(pool: jv.Pool):
    thread, results = in_background(
        lambda: pool.generate("Once", max_tokens=60, temperature=0.0, ignore_eos=True)[
            0
        ]
    )
    until_running(pool, 5)
    pool.pause("wait")
    try:
        thread.join(400)
        assert len(results[0].token_ids) == 60
    finally:
        pool.resume()


def test_pause_abort_gives_back_what_was_there(pool: jv.Pool):
    thread, results = in_background(
        lambda: pool.generate(
            "Once", max_tokens=1500, temperature=0.0, ignore_eos=True
        )[0]
    )
    until_running(pool)
    pool.pause("abort")
    try:
        thread.join(400)
        assert results[0].finish_reason == "abort"
        assert 0 < len(results[0].token_ids) < 1500
    finally:
        pool.resume()
    assert len(pool.generate("Once", max_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_leaving_a_stream_aborts_the_rest_in_the_engine(pool: jv.Pool):
    with pool.stream(
        ["a", "b", "c"] * 10, n=2, max_tokens=150, ignore_eos=True, window=12
    ) as stream:
        seen = next(iter(stream))
    assert len(seen.token_ids) == 150
    deadline = time.monotonic() + 120
    while running(pool) or pool.status()["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    until_still(pool)


def test_ctrl_c_in_generate_aborts_and_the_pool_lives_on(pool: jv.Pool):
    # a shell's background job ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        until_running(pool, 5)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.generate("Once", n=4, max_tokens=1900, ignore_eos=True)
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 120
    while running(pool) or pool.status()["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(pool.generate("Once", max_tokens=2)) == 1


def test_async_generate_and_stream(pool: jv.Pool):
    async def work() -> tuple[int, int]:
        batch = await pool.agenerate(["x", "y"], n=2, max_tokens=4)
        seen = 0
        async for _ in pool.stream(["x"], n=3, max_tokens=4):
            seen += 1
        return len(batch), seen

    assert asyncio.run(work()) == (4, 3)


def test_prefix_cache_is_used_and_shown(pool: jv.Pool):
    prompt = list(range(10, 10 + 600))
    pool.generate([prompt], n=4, max_tokens=2)
    assert pool.status()["prefix_hit_rate"] > 0


def test_status_and_faces(pool: jv.Pool):
    status = pool.status()
    assert status["state"] == "ready"
    assert status["healthy"] == 1
    assert status["dtype"] == "float32"
    replica = status["replicas"][0]
    assert (replica["version"], replica["in_flight"], replica["paused"]) == (
        0,
        0,
        False,
    )
    assert repr(pool).endswith("1 replica × TP 1 on cpu, ready)")
    assert "shared/0" in pool._repr_html_()
    assert "registered" in pool.logs(lines=400)


def test_arrays_feed_a_trainer(pool: jv.Pool):
    batch = pool.generate(["The cat", "A"], n=2, max_tokens=5)
    arrays = batch.arrays(pad_to=64)
    assert arrays["tokens"].shape == (4, 64)
    assert arrays["completion_mask"].sum() == batch.tokens


# What one caller may ask ----------------------------------------------------------------------------------------------


def memory(pool: jv.Pool) -> int:
    """Resident bytes of the replica and everything below it."""
    root = psutil.Process(pool.status()["replicas"][0]["pid"])
    return sum(
        process.memory_info().rss for process in (root, *root.children(recursive=True))
    )


def load(pool: jv.Pool) -> tuple[int, int, int]:
    row = pool.status()["replicas"][0]
    return row["running"], row["waiting"], row["in_flight"]


def until_idle(pool: jv.Pool, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while load(pool) != (0, 0, 0):
        assert time.monotonic() < deadline, f"still there: {load(pool)}"
        time.sleep(0.1)


def test_hostile_calls_are_refused_by_every_door(pool: jv.Pool, lab: jv.Lab):
    """The caller's own, the gateway's, and the replica's for whoever has the token and goes round both."""
    with pytest.raises(
        errors.LimitExceeded, match="4,000,000 samples of one prompt"
    ) as caught:
        pool.generate("The cat", n=4_000_000)
    assert "limits={'n'" in caught.value.remedy
    metadata = pool.client.metadata
    start = pb.GenerateStart(
        pool=pool.name, prompts=[pb.Prompt(text="x")], n=4_000_000, sampling_json="{}"
    )
    with (
        grpc.insecure_channel(lab.address) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(
            rpc.LabStub(channel).Generate(
                iter([pb.GenerateCall(start=start)]), timeout=60, metadata=metadata
            )
        )
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    row = pool.status()["replicas"][0]
    served = re.findall(r"serving on (\S+)", pool.logs(0, 2000))[-1]
    work = pb.PromptWork(
        prompt_index=0,
        prompt=pb.Prompt(text="x"),
        sample_indexes=range(pool.limits["n"] + 1),
    )
    order = pb.RolloutRequest(epoch=row["epoch"], work=[work], sampling_json="{}")
    with (
        grpc.insecure_channel(served) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(rpc.RolloutStub(channel).Generate(order, timeout=60, metadata=metadata))
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    until_idle(pool)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_environment_below_a_lab_holds_its_token(pool: jv.Pool, lab: jv.Lab):
    """Gateway, supervisor, rollout process, engine core: whoever needs the token was told through a pipe."""
    pids = process_tree(lab._gateway.pid)
    assert pool.status()["replicas"][0]["pid"] in pids
    held = [
        pid
        for pid in pids
        if lab._token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    assert not held


def test_hostile_call_that_is_left_leaves_the_engine(pool: jv.Pool):
    """200,000 samples of one prompt, which this pool allows: the replica goes on beating, and its memory is bounded."""
    pool.generate("The cat", n=64, max_tokens=8)
    before = memory(pool)
    stream = pool.stream(
        "The cat", n=200_000, window=200_000, max_tokens=64, ignore_eos=True
    )
    samples = iter(stream)
    began = time.monotonic()
    next(samples)
    first = time.monotonic() - began
    row = pool.status()["replicas"][0]
    assert row["state"] == "ready"
    assert row["in_flight"] > 190_000
    assert row["running"] + row["waiting"] < 20_000, (
        "the engine holds what it can soon run; the rest are numbers"
    )
    peak = memory(pool) - before
    stream.close()
    until_idle(pool)
    left = memory(pool) - before
    assert peak < 400 << 20, f"{peak >> 20} MiB while it ran"
    assert left < 200 << 20, (
        f"{left >> 20} MiB after it had been left; first sample after {first:.1f} s"
    )
    assert len(pool.generate("The cat", n=4, max_tokens=8, timeout=60)) == 4


LEAVER = """
import sys
import jvlab as jv
lab = jv.Lab.attach(sys.argv[1], sys.stdin.readline().strip())
samples = iter(lab.pools[sys.argv[2]].stream("The cat", n=50_000, window=50_000, max_tokens=64, ignore_eos=True))
next(samples)
print("asked", flush=True)
sys.stdin.read()
"""


def test_hostile_caller_that_is_killed_leaves_the_engine(pool: jv.Pool, lab: jv.Lab):
    command = [sys.executable, "-c", LEAVER, lab.address, pool.name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(f"{lab._token}\n")
        caller.stdin.flush()
        assert caller.stdout.readline() == "asked\n"
        assert load(pool)[2] > 45_000
        caller.kill()
    until_idle(pool)
    assert len(pool.generate("The cat", n=4, max_tokens=8, timeout=60)) == 4


def test_pause_abort_ends_what_the_engine_has_not_seen_too(pool: jv.Pool):
    """More than the engine is given at once: the rest never begins, and the call ends."""
    count = 40 * pool.facts().max_num_seqs
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(
            pool.generate, "The cat", count, max_tokens=64, ignore_eos=True
        )
        deadline = time.monotonic() + 60
        while not load(pool)[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pool.pause("abort")
        try:
            batch = asked.result(60)
        finally:
            pool.resume()
    assert len(batch) == count
    assert sum(sample.finish_reason == "abort" for sample in batch) > count // 2
    assert any(
        sample.finish_reason == "abort" and not len(sample.token_ids)
        for sample in batch
    )

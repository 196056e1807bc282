"""Versions on real vLLM: 200 syncs under load with weights that tell theirs, partial rollouts, stale KV, stepping."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.lab import _pool
from jvlab.record._record import calls_of
from jvlab.wire.processes._supervisor import shared_memory
from tests.sync.own_models import Author, offered_by
from tests.waiting import until

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def telling(lab: jv.Lab) -> Iterator[tuple[jv.Pool, Any]]:
    """A pool (vLLM's default, packed weights) and a policy whose every token can tell which weights made it."""
    model = jv.models.tiny("llama", tie_word_embeddings=False)
    pool = lab.launch(model, name="telling").wait()
    yield pool, jv.Policy.from_pretrained(model, mesh=jv.mesh(fsdp=2))
    pool.close()


def that_say(policy: Any, token: int) -> Any:
    """Parameters under which every greedy token is `token`: all states are equal, and its column alone is not zero."""

    def leaf(path: Any, value: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "lm_head" in name:
            new = jnp.zeros_like(value).at[:, token].set(1.0)
        elif "norm" in name or "embed" in name:
            new = jnp.ones_like(value)
        elif "attn" in name or "mlp" in name:
            new = (
                jnp.zeros_like(value)
                if "'o'" in name or "down" in name
                else value * 0.5
            )
        else:
            new = value
        return jax.device_put(new, value.sharding)

    return jax.tree_util.tree_map_with_path(leaf, policy.params)


def hits(pool: jv.Pool) -> int:
    """Tokens that were found in the prefix cache so far; the counter follows a moment later, so until it rests."""
    last, deadline = -1, time.monotonic() + 60
    while time.monotonic() < deadline:
        pool.status()
        if (now := pool.snapshot.replicas[0].stats.prefix_hits) == last:
            return now
        last = now
        time.sleep(0.4)
    raise AssertionError("the counter does not rest")


def until_generating(pool: jv.Pool, tokens: int, requests: int = 1) -> None:
    """Wait until so many requests are well inside of their work."""
    status = lambda: pool.status()["replicas"][0]
    start, deadline = status()["generated_tokens"], time.monotonic() + 120
    while (now := status())["generated_tokens"] < start + tokens or now[
        "running"
    ] < requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def footprint(pids: list[int]) -> dict[str, float]:
    processes = [psutil.Process(pid) for pid in pids]
    return {
        "rss": sum(p.memory_info().rss for p in processes) / 2**20,
        "fds": sum(p.num_fds() for p in processes),
        "threads": sum(p.num_threads() for p in processes),
        "processes": len(psutil.Process(pids[1]).children(recursive=True)),
        "segments": len(shared_memory(pids)),  # theirs: another program's come and go
    }


@pytest.mark.parametrize("syncs", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_many_syncs_while_requests_stream(
    telling: tuple[jv.Pool, Any], lab: jv.Lab, syncs: int
):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy")
    first = link.version + 1
    # version v says 100 + v % 4
    versions = [that_say(policy, 100 + k) for k in range(4)]
    says = lambda version: 100 + version % 4
    link.sync(versions[first % 4], version=first)
    seen: list[jv.Sample] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def load() -> None:
        try:
            while not over.is_set():
                for sample in pool.stream(
                    [PROMPT] * 4, max_tokens=200, temperature=0.0, ignore_eos=True
                ):
                    seen.append(sample)
        except BaseException as error:
            failures.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    replica = pool.status()["replicas"][0]["pid"]
    pids = [
        psutil.Process().pid,
        lab._gateway.pid,
        replica,
        *(c.pid for c in psutil.Process(replica).children(True)),
    ]
    before: dict[str, float] = {}
    for version in range(first + 1, first + syncs):
        mode = "staged" if version % 2 else "direct"
        assert link.sync(
            versions[version % 4], version=version, mode=mode, progress=False
        ).verified
        if version == first + syncs // 5:
            before = footprint(pids)
    after = footprint(pids)
    over.set()
    loader.join(240)
    assert not failures
    assert after["rss"] - before["rss"] < 60, (before, after)
    assert after["fds"] <= before["fds"] + 4, (before, after)
    assert after["threads"] <= before["threads"] + 4, (before, after)
    assert after["processes"] <= before["processes"]
    assert after["segments"] <= before["segments"]
    crossings, tokens = 0, 0
    for sample in seen:
        crossings += len(sample.version_spans) > 1
        for version, start, stop in sample.version_spans:
            made = set(np.asarray(sample.token_ids[start:stop]).tolist())
            assert made == {says(version)}, (version, made)
            tokens += stop - start
    assert tokens == sum(len(s.token_ids) for s in seen) > 0
    assert crossings > 0, "some requests went on across a sync, or nothing was shown"
    link.close()


def test_kv_recomputed_or_kept(telling: tuple[jv.Pool, Any], lab: jv.Lab):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy")
    for kv in ("keep", "recompute"):
        link.sync(that_say(policy, 50))
        out: list[Any] = []
        ask = lambda out=out: out.append(
            pool.generate([PROMPT], max_tokens=400, temperature=0.0, ignore_eos=True)[0]
        )
        thread = threading.Thread(target=ask)
        thread.start()
        until_generating(pool, 5)
        report = link.sync(that_say(policy, 60), kv=kv)
        thread.join(240)
        (sample,) = out
        assert [version for version, _, _ in sample.version_spans] == [
            report.version - 1,
            report.version,
        ], kv
        cut = sample.version_spans[1][1]
        assert set(sample.token_ids[:cut].tolist()) == {50}
        assert set(sample.token_ids[cut:].tolist()) == {60}
    link.close()


def test_no_stale_kv_with_a_request_frozen_in_flight(
    telling: tuple[jv.Pool, Any], lab: jv.Lab
):
    """The same long prompt before and after a commit, another request being frozen meanwhile; against a clean cache."""
    pool, policy = telling
    other = jv.Policy.from_pretrained(
        jv.models.tiny("llama", seed=5, tie_word_embeddings=False), mesh=jv.mesh(fsdp=2)
    )
    link = lab.connect(policy.params, pool, rules="policy")
    # more than one block of the cache, which has 128 tokens on a CPU
    prompt = [(7 * k) % 500 + 3 for k in range(300)]
    ask = lambda: pool.generate(
        [prompt], max_tokens=16, temperature=0.0, ignore_eos=True
    )[0]
    link.sync(other.params)
    pool.pause(clear_cache=True)
    pool.resume()
    wanted = ask().token_ids.tolist()
    link.sync(policy.params)
    old = ask()
    before = hits(pool)
    ask()
    assert hits(pool) > before, "the prefix cache works"
    frozen = threading.Thread(
        target=lambda: pool.generate(
            [prompt], n=2, max_tokens=300, temperature=0.0, ignore_eos=True
        )
    )
    frozen.start()
    until_generating(pool, 4, requests=2)
    link.sync(other.params, kv="keep")
    before = hits(pool)
    new = ask()
    assert hits(pool) == before, "no block of older weights is found"
    assert new.token_ids.tolist() == wanted != old.token_ids.tolist()
    frozen.join(240)
    link.close()


def refuses_to_wait(pool: jv.Pool, stepper: jv.Stepper, halted: bool) -> None:
    """Whatever would wait for a stepper of this thread's own is refused at once, with what to do."""
    calls = {
        "generate": lambda: pool.generate([PROMPT], max_tokens=4, timeout=60),
        "stream": lambda: list(pool.stream([PROMPT], max_tokens=4, timeout=60)),
        "score": lambda: pool.score([PROMPT], timeout=60),
        "session": lambda: pool.session(PROMPT).generate(4, timeout=60),
        "sessions": lambda: pool.sessions([PROMPT], n=2).generate(4, timeout=60),
    }
    for name, call in calls.items():
        if not halted:
            assert call() is not None, name
            continue
        with pytest.raises(errors.SyncError, match="would wait for ever") as caught:
            call()
        assert "stepper.run()" in caught.value.remedy
        assert "stepper.abort()" in caught.value.remedy
        assert caught.value.fields["stepper"] is stepper


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the returned function waits for its result."""
    with_result = concurrent.futures.ThreadPoolExecutor(1)
    future = with_result.submit(call)
    with_result.shutdown(wait=False)
    return lambda: future.result(300)


# Stepping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_stepping(telling: tuple[jv.Pool, Any], lab: jv.Lab, mode: str):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy", mode=mode, bucket_mib=0.25)
    link.sync(that_say(policy, 70))
    says = lambda: set(
        pool.generate([PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids.tolist()
    )
    stepper = link.stepper(that_say(policy, 80), breakpoints=["lm_head"])
    assert says() == {70}, "nothing happens before the first step"
    with pytest.raises(errors.SyncError, match="stepper is open"):
        link.sync(policy.params)
    step = stepper.step()
    assert step.number == 1
    assert step.bytes > 0
    if mode == "staged":
        assert says() == {70}, "generation goes on with the old version"
    behind = in_thread(says)  # of a thread that may wait: this one can finish the sync
    refuses_to_wait(pool, stepper, halted=mode == "direct")
    stopped = stepper.run(until="layers.1")
    assert any("layers.1" in name for name in stepper.ahead)
    assert not any(
        "layers.1" in name for taken in stepper.steps for name in taken.parameters
    )
    assert stepper.state == "moving"
    assert stopped is not None
    assert stepper.verify(), "what has arrived is what was sent"
    stepper.run()
    assert any("lm_head" in name for name in stepper.ahead), "the breakpoint"
    report = stepper.run()
    assert isinstance(report, jv.SyncReport)
    assert report.verified
    assert stepper.state == "committed"
    assert says() == {80}
    assert behind() <= ({80} if mode == "direct" else {70, 80})
    with pytest.raises(errors.SyncError, match="over"):
        stepper.step()
    link.close()


def test_waiting_for_a_stepper_says_so(
    telling: tuple[jv.Pool, Any],
    lab: jv.Lab,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Another thread's call says what it waits for; a stream of this thread's own, begun before, ends with an error."""
    pool, policy = telling
    link = lab.connect(
        policy.params, pool, rules="policy", mode="direct", bucket_mib=0.25
    )
    link.sync(that_say(policy, 70))
    stream = iter(
        pool.stream([PROMPT] * 4, max_tokens=8, ignore_eos=True, window=1, timeout=300)
    )
    assert len(next(stream).token_ids) == 8
    with link.stepper(that_say(policy, 80)) as stepper:
        stepper.step()
        with pytest.raises(errors.SyncError, match="the stream would wait for ever"):
            list(stream)
        # another kernel, that is
        monkeypatch.setattr(_pool, "own_name", lambda: "python 7 on elsewhere")
        waiting = in_thread(
            lambda: pool.generate(
                [PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True
            )
        )
        wanted = f"waits: a sync that python {os.getpid()} on {platform.node()} has open in a stepper (moving)"
        said = ""

        def told() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return wanted in said

        until(told)
        stepper.run()
    assert set(waiting()[0].token_ids.tolist()) == {80}
    assert "telling: generate, 0 of 1 sample, " in said
    link.close()


def test_a_stepper_left_open(telling: tuple[jv.Pool, Any], lab: jv.Lab):
    pool, policy = telling
    says = lambda: set(
        pool.generate([PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids.tolist()
    )
    for mode in ("staged", "direct"):
        link = lab.connect(
            policy.params, pool, rules="policy", mode=mode, bucket_mib=0.25
        )
        link.sync(that_say(policy, 70))
        with link.stepper(that_say(policy, 80), unit="bucket") as stepper:
            stepper.step()
        assert stepper.state == "aborted"
        if mode == "staged":
            assert says() == {70}
        else:
            with pytest.raises(errors.EngineDirty):
                says()
        link.sync(that_say(policy, 90))
        assert says() == {90}
        link.close()


def test_diff_says_what_will_change(telling: tuple[jv.Pool, Any], lab: jv.Lab):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(that_say(policy, 70))
    (norm,) = link.diff("final_norm.scale", that_say(policy, 80))
    assert norm.share_changed == 0
    (embed,) = link.diff("model.embed_tokens.weight", policy.params)
    assert embed.share_changed > 0.9
    assert embed.norm_change > 0
    with pytest.raises(errors.ConfigError, match="did you mean"):
        link.diff("model.embed_token.weight", policy.params)
    link.close()


def test_a_session_goes_on_over_a_sync(telling: tuple[jv.Pool, Any], lab: jv.Lab):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy")
    first = link.version + 1
    link.sync(that_say(policy, 31), version=first)
    # longer than a KV block
    session = pool.session(PROMPT * 40, temperature=0.0, ignore_eos=True)
    session.generate(6)
    before = session.generate(2)
    link.sync(that_say(policy, 32), version=first + 1)
    after = session.append([9]).generate(4)
    assert before.cached_tokens > 0
    assert after.cached_tokens == 0, "no KV of older weights"
    assert session.generate(4).cached_tokens > 0
    assert session.tokens[session.mask].tolist() == [31] * 8 + [32] * 8
    assert session.versions.tolist() == [first] * 8 + [first + 1] * 8
    assert session.sample().version_spans == (
        (first, 0, 8),
        (-1, 8, 9),
        (first + 1, 9, 17),
    )
    link.close()


# Poison --------------------------------------------------------------------------------------------------------------


def changed(params: Any, name: str, change: Any) -> Any:
    """The tree with each leaf whose path holds `name` changed."""

    def leaf(path: Any, value: Any) -> Any:
        return (
            jax.device_put(change(value), value.sharding)
            if name in jax.tree_util.keystr(path)
            else value
        )

    assert any(
        name in jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    )
    return jax.tree_util.tree_map_with_path(leaf, params)


def with_nan(policy: Any) -> Any:
    """One NaN in the second layer, a slice of the stacked leaf."""
    return changed(
        policy.params,
        "['layers']['attn']['v']",
        lambda v: v.at[1, 3, 0, 1].set(jnp.nan),
    )


def answers(
    pool: jv.Pool, prompts: list[list[int]] | None = None
) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens with their log-probabilities, one prompt after the other."""
    asked = prompts or [[5 + k, 6, 7, 8] for k in range(4)]
    made = [
        pool.generate(
            [p], max_tokens=6, temperature=0.0, ignore_eos=True, progress=False
        )[0]
        for p in asked
    ]
    return [(s.token_ids.tolist(), [float(x) for x in s.logprobs]) for s in made]


def test_poison_is_refused_and_named(telling: tuple[jv.Pool, Any], lab: jv.Lab):
    """Staged, the old version serves; direct, the replica is dirty until a good sync. Also step by step."""
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(policy.params)
    wanted, version = answers(pool), link.version
    leaf = "layers.attn.v.kernel[1]"
    for mode, verify in (
        ("staged", "full"),
        ("staged", "off"),
        ("direct", "sampled"),
        ("direct", "off"),
    ):
        with pytest.raises(
            errors.NonFiniteError, match=re.escape(f"{leaf}: 1 NaN of")
        ) as caught:
            link.sync(with_nan(policy), mode=mode, verify=verify)
        assert caught.value.fields["leaves"] == {
            leaf: {"nan": 1, "inf": 0, "overflow": 0}
        }
        assert 'nonfinite="allow"' in caught.value.remedy
        if mode == "staged":
            assert answers(pool) == wanted
        else:
            with pytest.raises(errors.EngineDirty):
                answers(pool)
    assert pool.status()["replicas"][0]["version"] == version
    assert link.sync(policy.params).verified
    assert answers(pool) == wanted
    poisoned = link.stepper(with_nan(policy), mode="staged")
    with (
        pytest.raises(errors.NonFiniteError, match=re.escape(leaf)),
        poisoned as stepper,
    ):
        stepper.run()
    assert answers(pool) == wanted
    with pytest.raises(
        errors.ConfigError,
        match="nonfinite='alow' must be one of 'refuse', 'allow'",
    ):
        link.sync(policy.params, nonfinite="alow")
    more = {**policy.params, "more": {"kernel": jnp.zeros((2, 2))}}
    for refused in (link.sync, link.stepper, link.verify):
        with pytest.raises(
            errors.LayoutError, match=r"more\.kernel: is new, was not connected"
        ):
            refused(more)
    link.close()


@pytest.mark.soak
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_poison_that_was_allowed_does_not_outlive_its_version(
    telling: tuple[jv.Pool, Any], lab: jv.Lab, kv: str
):
    pool, policy = telling
    link = lab.connect(policy.params, pool, rules="policy", nonfinite="allow")
    link.sync(policy.params)
    wanted = answers(pool)
    report = link.sync(with_nan(policy))
    assert report.verified
    assert report.nonfinite == ("layers.attn.v.kernel[1]: 1 NaN of 8192 values",)
    assert all(np.isnan(logprobs).all() for _, logprobs in answers(pool))
    out: list[Any] = []
    ask = lambda: out.append(
        pool.generate([PROMPT * 40], max_tokens=400, temperature=0.0, ignore_eos=True)[
            0
        ]
    )
    kept = threading.Thread(target=ask)
    kept.start()
    until_generating(pool, 5)
    report = link.sync(policy.params, kv=kv)
    assert not report.nonfinite
    assert answers(pool) == wanted, "the first requests of the new version"
    kept.join(240)
    (sample,) = out
    own = np.asarray(sample.versions)
    logprobs = np.asarray(sample.logprobs, float)
    assert set(own.tolist()) == {report.version - 1, report.version}
    assert np.isnan(logprobs[own < report.version]).all(), (
        "what it said before is what it is"
    )
    assert np.isfinite(logprobs[own == report.version]).all(), (
        "its KV was computed anew"
    )
    tokens = jnp.asarray([[5, 6, 7, 8, *wanted[0][0]]])
    trainer = np.asarray(
        policy.logprobs(policy.params, tokens, jnp.asarray([tokens.shape[1]]))
    )[0]
    np.testing.assert_allclose(trainer[-6:], wanted[0][1], atol=2e-3)
    link.close()


def test_poison_that_was_computed_spoils_no_other_request(
    telling: tuple[jv.Pool, Any], lab: jv.Lab
):
    """Finite weights, and one token whose values overflow: requests without it stay right, in the same version too."""
    pool, policy = telling
    # other values, on purpose
    link = lab.connect(policy.params, pool, rules="policy", meaning="off")
    loud, column = 77, 0
    quiet = changed(
        policy.params,
        "embed",
        lambda x: x.at[:, column].set(0.0).at[loud].set(0.0).at[loud, column].set(1.0),
    )
    params = changed(
        quiet, "['layers']['attn']['v']", lambda v: v.at[0, column].set(3e38)
    )
    link.sync(params)
    wanted = answers(pool)
    assert all(np.isfinite(logprobs).all() for _, logprobs in wanted)
    for _ in range(3):
        with_it = answers(pool, [[5, loud, 7, 8], [loud, 9, 9, 9]])
        assert all(np.isnan(logprobs).all() for _, logprobs in with_it)
        assert answers(pool) == wanted, (
            "computed again, into blocks that were given back"
        )
    link.sync(policy.params)
    again = answers(pool)
    link.sync(policy.params)
    assert again == answers(pool)
    assert all(np.isfinite(logprobs).all() for _, logprobs in again)
    link.close()


# Real weights --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_smollm2_from_jax_reads_as_from_disk(lab: jv.Lab):
    model = jv.models.resolve("smollm2")
    prompts = [
        "The capital of France is",
        "Once upon a time",
        "Water boils at a temperature of",
        "def add(a, b):",
    ]
    ask = lambda pool: [
        s.text
        for s in pool.generate(prompts, max_tokens=16, temperature=0.0, progress=False)
    ]
    policy = jv.Policy.from_pretrained(model)
    launch = lambda name, load: lab.launch(
        model, load=load, name=name, engine={"max_model_len": 256}
    )
    # they come up side by side
    with launch("dummy", "dummy") as pool, launch("disk", "auto") as disk:
        garbage = ask(pool.wait())
        link = lab.connect(policy.params, pool)
        assert link.sync(policy.params).verified
        from_jax = ask(pool)
        link.close()
        from_disk = ask(disk.wait())
    assert from_jax == from_disk != garbage
    assert "Paris" in from_jax[0]


# A tree of somebody else's ------------------------------------------------------------------------------------------


def test_a_foreign_model_is_connected_by_copying_and_computes_the_same(
    telling: tuple[jv.Pool, Any], lab: jv.Lab
):
    """Its shapes alone leave most leaves open; the lines of the error, copied, sync it into a real engine."""
    pool, _ = telling
    author = Author("towers", pool.model)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), author.params
    )
    with pytest.raises(errors.MatchError) as caught:
        jv.plan(shapes, pool)
    lines = author.choose(offered_by(caught.value.message))
    assert len(lines) > 5
    # what a step of training may make
    other = jax.tree.map(lambda x: jnp.asarray(x) * 1.03 + 0.001, author.params)
    link = lab.connect(other, pool, rules=("auto", *lines), meaning="off")
    with pytest.raises(errors.CoverageError, match=r"speach.*: no leaf has this name"):
        lab.connect(
            other,
            pool,
            rules=("auto", *lines, "speach -> lm_head.weight"),
            meaning="off",
        )
    report = link.sync(other)
    tokens = np.arange(5, 37)
    scores = pool.score([tokens.tolist()])
    assert scores.versions.tolist() == [report.version]
    logits = author.model.forward(author.config, other, tokens[:-1])
    mine = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), tokens[1:, None], 1
    )[:, 0]
    np.testing.assert_allclose(scores[0][1:], mine, atol=2e-3)
    checked = lab.connect(author.params, pool, rules=("auto", *lines))
    assert "checked by value" in str(checked.sync(author.params).meaning)
    pool.generate([PROMPT], max_tokens=2)
    kinds = [e.kind for e in calls_of(lab.client).events()]
    assert {"sync", "rollout", "score"} <= set(kinds), (
        "for lab.timeline(), where no run was started"
    )
    checked.close()

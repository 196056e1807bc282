"""Weight sync by ipc into a live vLLM engine on a GPU, CUDA graphs on: bits, tokens, versions, endings, sleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab import _errors as errors
from tests.gpu.card import device_used, ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
SYNCS = 300
PROMPT = [5, 6, 7, 8]
ENGINE = {
    "gpu_memory_utilization": 0.12,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    # engines that come up side by side would each measure what the others take
    "kv_cache_memory_bytes": 4 << 30,
}
# by the fixture that waits for it: seed, engine
LAUNCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "pool": (0, ENGINE),
    "slept": (0, {**ENGINE, "enable_sleep_mode": True, "enforce_eager": True}),
}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab() as made:
        yield made


@pytest.fixture(scope="module")
def launched(lab: jv.Lab, request: pytest.FixtureRequest) -> dict[str, jv.Pool]:
    """The engines that the chosen tests need, coming up at the same time."""
    ours = [
        item
        for item in request.session.items
        if getattr(item, "module", None) is request.module
    ]
    needed = {name for item in ours for name in getattr(item, "fixturenames", ())}
    return {
        name: lab.launch(tiny(seed), name=name, engine=engine)
        for name, (seed, engine) in LAUNCHES.items()
        if name in needed
    }


@pytest.fixture(scope="module")
def pool(launched: dict[str, jv.Pool]) -> jv.Pool:
    return launched["pool"].wait(300)


@pytest.fixture(scope="module")
def loaded_tokens(pool: jv.Pool) -> list[list[int]]:
    """What the engine says of the weights it loaded itself. Another engine's compiled kernels may round otherwise."""
    assert pool.status()["replicas"][0]["version"] == 0, "before any sync"
    return greedy(pool)


@pytest.fixture(scope="module")
def slept(launched: dict[str, jv.Pool]) -> jv.Pool:
    """An engine with sleep mode, whose memory has no handles: staged syncs only."""
    return launched["slept"].wait(300)


@pytest.fixture(scope="module")
def policy() -> Any:
    return jv.Policy.from_pretrained(tiny(0), dtype="bfloat16")


def that_say(policy: Any, token: int) -> Any:
    """Parameters under which every greedy token is `token`: all states are equal, and its column alone is not zero."""
    import jax
    import jax.numpy as jnp

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


def says(pool: jv.Pool) -> set[int]:
    return set(
        pool.generate([PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True)[
            0
        ].token_ids.tolist()
    )


def test_bits_and_tokens(lab: jv.Lab, pool: jv.Pool, loaded_tokens: list[list[int]]):
    """Digests match, and tokens are those of the weights as the engine loaded them itself; fp32 masters too."""
    import jax

    wanted = loaded_tokens
    masters = jv.Policy.from_pretrained(tiny(0), dtype="float32")
    halves = jv.Policy.from_pretrained(tiny(0), dtype="bfloat16")
    for trained in (halves, masters):
        link = lab.connect(trained.params, pool, rules="policy")
        assert link.transport == "ipc", link.reason
        for mode in ("direct", "staged"):
            link.sync(jax.tree.map(lambda x: x * 2, trained.params), mode=mode)
            assert greedy(pool) != wanted
            report = link.sync(trained.params, mode=mode)
            assert report.verified
            assert report.bytes == link.plan.total_bytes
            assert link.verify(), "live memory holds what was committed"
            assert link.verify(trained.params)
            assert greedy(pool) == wanted, mode
        link.close()


def test_300_syncs_under_load(lab: jv.Lab, pool: jv.Pool, policy: Any):
    link = lab.connect(policy.params, pool, rules="policy")
    first = link.version + 1
    versions = [that_say(policy, 100 + k) for k in range(4)]
    link.sync(versions[first % 4], version=first, mode="staged")
    seen: list[jv.Sample] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def load() -> None:
        try:
            while not over.is_set():
                seen.extend(
                    pool.stream(
                        [PROMPT] * 16, max_tokens=400, temperature=0.0, ignore_eos=True
                    )
                )
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

    def footprint() -> dict[str, float]:
        processes = [psutil.Process(pid) for pid in pids]
        return {
            "rss": sum(p.memory_info().rss for p in processes) / 2**20,
            "fds": sum(p.num_fds() for p in processes),
            "threads": sum(p.num_threads() for p in processes),
            "device": device_used() / 2**20,
        }

    before: dict[str, float] = {}
    for version in range(first + 1, first + SYNCS):
        mode = "staged" if version % 2 else "direct"
        assert link.sync(
            versions[version % 4], version=version, mode=mode, progress=False
        ).verified
        if version == first + 60:
            before = footprint()
    after = footprint()
    over.set()
    loader.join(120)
    assert not failures
    print(
        "300 syncs under load:",
        {"before": before, "after": after, "samples": len(seen)},
    )
    assert after["rss"] - before["rss"] < 100, (before, after)
    assert after["fds"] <= before["fds"] + 4, (before, after)
    assert after["threads"] <= before["threads"] + 4, (before, after)
    assert after["device"] <= before["device"] + 8, (before, after)
    crossings, tokens = 0, 0
    for sample in seen:
        crossings += len(sample.version_spans) > 1
        for version, start, stop in sample.version_spans:
            made = set(np.asarray(sample.token_ids[start:stop]).tolist())
            assert made == {100 + version % 4}, (version, made)
            tokens += stop - start
    assert tokens == sum(len(s.token_ids) for s in seen) > 0
    assert crossings > 0, "some requests went on across a sync, or nothing was shown"
    link.close()


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_stepping_and_giving_up(lab: jv.Lab, pool: jv.Pool, policy: Any, mode: str):
    link = lab.connect(policy.params, pool, rules="policy", mode=mode)
    link.sync(that_say(policy, 70))
    with link.stepper(that_say(policy, 80)) as stepper:
        stepper.step()
        stepper.step()
        assert stepper.verify()
    if mode == "staged":
        assert says(pool) == {70}, "an abandoned staged sync leaves the old version"
    else:
        with pytest.raises(errors.EngineDirty):
            says(pool)
    stepper = link.stepper(that_say(policy, 90))
    assert isinstance(stepper.run(), jv.SyncReport)
    assert says(pool) == {90}
    link.close()


def test_wrong_bits_are_found(lab: jv.Lab, pool: jv.Pool, policy: Any):
    link = lab.connect(policy.params, pool, rules="policy")
    link.sync(that_say(policy, 70))
    found = link.verify(that_say(policy, 80))
    assert not found
    assert any("lm_head" in name for name in found.differing)
    with pytest.raises(errors.ConfigError, match="ipc has none"):
        lab.connect(policy.params, pool, rules="policy", faults=lambda sender: sender)
    link.close()


TRAINER = """
import sys, time
import jvlab as jv
lab = jv.Lab.attach(sys.argv[1], sys.argv[2])
policy = jv.Policy.from_pretrained(sys.argv[3], dtype="bfloat16")
link = lab.connect(policy.params, lab.pools["slept"], rules="policy")
link.sync(policy.params, mode="staged")
stepper = link.stepper(policy.params, mode="staged")
stepper.step()
print("in the middle", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed(
    lab: jv.Lab, slept: jv.Pool, policy: Any, tmp_path: Path
):
    used = device_used()
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    command = [sys.executable, str(script), lab.address, lab._token, tiny(5)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert "in the middle" in trainer.stdout.readline()
            version = slept.status()["replicas"][0]["version"]
        finally:
            trainer.kill()
    assert says(slept), "generation goes on, on the version that was committed"
    assert slept.status()["replicas"][0]["version"] == version
    link = lab.connect(policy.params, slept, rules="policy")
    assert link.sync(that_say(policy, 70), mode="staged").verified
    assert says(slept) == {70}
    link.close()
    until = time.monotonic() + 20  # both sides give memory back on their own time
    while (now := device_used()) > used + (64 << 20) and time.monotonic() < until:
        time.sleep(0.1)
    assert now <= used + (64 << 20), (
        "what the dead trainer had mapped, and its shadows, were given back"
    )


def test_sleep_and_wake(lab: jv.Lab, slept: jv.Pool, policy: Any):
    """Memory comes back per level; a wake never serves weights that are gone."""
    link = lab.connect(policy.params, slept, rules="policy")
    with pytest.raises(errors.ConfigError, match="staged"):
        link.sync(policy.params, mode="direct")
    assert link.sync(that_say(policy, 70), mode="staged").verified
    facts: dict[str, Any] = {}
    for level in (1, 2):
        used, start = device_used(), time.perf_counter()
        slept.sleep(level)
        facts[f"level {level}"] = {
            "freed_mib": (used - device_used()) / 2**20,
            "sleep_s": time.perf_counter() - start,
        }
        with pytest.raises(errors.SyncError, match="sleeps"):
            link.sync(that_say(policy, 80), mode="staged")
        start = time.perf_counter()
        slept.wake(["weights"])
        facts[f"level {level}"]["wake_weights_s"] = time.perf_counter() - start
        if level == 1:
            slept.wake(["kv_cache"])
            assert says(slept) == {70}, "level 1 brings its weights back"
            continue
        link.sync(that_say(policy, 80), mode="staged")
        slept.wake(["kv_cache"])
        assert says(slept) == {80}
        assert slept.status()["replicas"][0]["version"] == link.version
    slept.sleep(2)
    slept.wake()
    with pytest.raises(errors.EngineDirty, match="level 2"):
        says(slept)
    link.sync(that_say(policy, 90), mode="staged")
    assert says(slept) == {90}
    print("sleep:", facts)
    link.close()

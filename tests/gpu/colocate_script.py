"""Trainer and engine on one card, a model of 4 GB: sleep lends memory to JAX, wake takes it back, versions stay right.

    python -m tests.gpu.colocate_script        prints "colocate: {...}" at its end, or raises

A process of its own, because JAX's share of the card is settled when JAX starts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jvlab as jv
from jvlab import _errors as errors
from jvlab.bench._shapes import config_of, policy_of
from jvlab.lab import _launch_settings
from tests.gpu.card import device_used as used

GIB = 1 << 30
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
}
PROMPTS = [[3 + (i * 7 + k) % 500 for k in range(12)] for i in range(3)]
# whole blocks of KV, which a later request could find
LONG = [5 + k % 200 for k in range(100)]


def say(*what: Any) -> None:
    print(f"[{time.perf_counter() - BEGUN:6.1f} s]", *what, flush=True)


BEGUN = time.perf_counter()


def settled(seconds: float = 10.0) -> int:
    """Bytes in use once they stay the same for half a second: processes free on their own time."""
    until, last, since = time.monotonic() + seconds, used(), time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < 0.5:
        time.sleep(0.05)
        if (now := used()) != last:
            last, since = now, time.monotonic()
    return last


@contextlib.contextmanager
def timed(facts: dict[str, Any], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    facts[name] = round(time.perf_counter() - start, 4)
    say(f"{name}: {facts[name]:.3f} s")


@contextlib.contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(
            f"{kind.__name__} ({text}) was expected, and nothing was raised"
        )


class Colocated:
    """The two sides, and what they say."""

    def __init__(self, lab: jv.Lab, folder: Path, engine: dict[str, Any]) -> None:
        import jax

        start, nothing = time.perf_counter(), used()
        self.pool = lab.launch(
            str(folder), load="dummy", device="cuda", colocate=True, engine=engine
        )
        self.base = used()  # JAX's share and its context; the engine has not begun
        self.policy = policy_of(folder)
        self.first = self.policy.params
        self.second = jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, self.first)
        self.weights = sum(x.nbytes for x in jax.tree.leaves(self.first))
        self.pool.wait(240)
        self.facts: dict[str, Any] = {
            "weights_bytes": self.weights,
            "up_s": round(time.perf_counter() - start, 1),
            "engine_bytes": settled() - self.base,
            "jax_share_bytes": self.base - nothing,
        }
        say("up", self.facts)
        self.link = lab.connect(self.first, self.pool, rules="policy", mode="staged")
        self.facts["transport"] = self.link.transport

    def greedy(self) -> list[list[int]]:
        options = {
            "max_tokens": 16,
            "temperature": 0.0,
            "ignore_eos": True,
            "progress": False,
        }
        samples = [self.pool.generate([ids], **options)[0] for ids in PROMPTS]
        for sample in samples:
            assert set(sample.versions.tolist()) == {self.link.version}, sample.versions
        return [s.token_ids.tolist() for s in samples]

    def sync(self, params: Any, facts: dict[str, Any], name: str) -> None:
        with timed(facts, f"{name}_call_s"):
            report = self.link.sync(params, mode="staged", progress=False)
        assert report.verified
        facts[f"{name}_ms"] = {k: round(1e3 * v, 3) for k, v in report.seconds.items()}
        assert (
            self.pool.status()["replicas"][0]["version"]
            == self.link.version
            == report.version
        )

    def asleep(self) -> None:
        """What a sleeping engine says: it is asked to read and to write memory that is not there."""
        assert self.pool.status()["replicas"][0]["sleeping"]
        with refused(errors.SyncError, "sleeps"):
            self.link.verify()
        with refused(errors.SyncError, "sleeps"):
            self.link.sync(self.first, mode="staged", progress=False)

    def sleep(self, level: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        before = settled()
        with timed(facts, "sleep_s"):
            self.pool.sleep(level)
        after = settled()
        facts |= {"freed_bytes": before - after, "left_bytes": after - self.base}
        say(
            f"level {level}: freed {(before - after) / GIB:.2f} GiB, the engine keeps {(after - self.base) / GIB:.2f}"
        )
        assert before - after > self.weights, (
            "at least the weights, and the KV cache is larger"
        )
        return facts

    def lend(self, facts: dict[str, Any]) -> None:
        """JAX takes, fills and reads about what was freed, beside its own share, and gives it back."""
        import jax
        import jax.numpy as jnp

        fill = jax.jit(lambda k: jnp.full((GIB,), k, jnp.uint8))
        total = jax.jit(lambda x: jnp.sum(x[:: 1 << 20], dtype=jnp.uint32))
        share = self.facts["jax_share_bytes"]
        # of its own share, which it holds already
        room = max(0, share - 2 * self.weights)
        count = int((0.9 * facts["freed_bytes"] + room) // GIB)
        before = used()
        with timed(facts, "jax_fill_s"):
            arrays = [fill(jnp.uint8(k % 200 + 1)) for k in range(count)]
            sums = [int(total(x)) for x in arrays]
        assert sums == [(GIB >> 20) * (k % 200 + 1) for k in range(count)], (
            "what was written is there"
        )
        facts |= {"jax_bytes": count * GIB, "jax_beyond_share_bytes": used() - before}
        say(
            f"JAX filled {count} GiB, {(used() - before) / GIB:.2f} of them beyond its share of {share / GIB:.2f}"
        )
        assert used() - before > 0.8 * facts["freed_bytes"], (
            "the card shows that it was taken"
        )
        del arrays
        gc.collect()
        _launch_settings.give_back()  # as pool.wake does before it asks the engine
        facts["jax_returned_bytes"] = (
            before + facts["jax_beyond_share_bytes"] - settled()
        )
        say(f"JAX gave {facts['jax_returned_bytes'] / GIB:.2f} GiB back")
        assert facts["jax_returned_bytes"] > 0.9 * facts["jax_beyond_share_bytes"]

    def wake(self, facts: dict[str, Any], *tags: str) -> None:
        with timed(facts, f"wake_{'_and_'.join(tags) or 'all'}_s"):
            self.pool.wake(list(tags) or None)


def run(lab: jv.Lab, folder: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """The whole story; every step asserts."""
    both = Colocated(lab, folder, engine)
    pool, link, facts = both.pool, both.link, both.facts
    with refused(errors.ConfigError, "staged"):
        link.sync(both.first, mode="direct")
    both.sync(both.second, facts, "first_staged")  # makes the shadows
    second = both.greedy()
    both.sync(both.first, facts, "staged")
    first = both.greedy()
    assert first != second
    long = pool.generate([LONG], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    again = pool.generate([LONG], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    assert again.cached_tokens > 0, "KV of the prompt is found again"

    facts["level_1"] = one = both.sleep(1)
    both.lend(one)
    both.wake(one, "weights")
    both.wake(one, "kv_cache")
    after = pool.generate([LONG], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    assert after.cached_tokens == 0, "KV was given back: nothing of it is found"
    assert after.token_ids.tolist() == long.token_ids.tolist()
    assert both.greedy() == first, "level 1 brings weights and version back"
    assert link.verify(both.first)

    facts["level_2"] = two = both.sleep(2)
    both.lend(two)
    both.wake(two, "weights")
    with refused(errors.EngineDirty, "a sleep took the weights"):
        both.greedy()
    both.sync(both.second, two, "sync_between_wakes")
    both.wake(two, "kv_cache")
    assert both.greedy() == second, "the trainer's weights"
    assert link.verify(both.second)

    facts["level_2_woken_whole"] = whole = both.sleep(2)
    both.asleep()
    both.wake(whole)
    with refused(errors.EngineDirty, "a sleep took the weights"):
        both.greedy()
    assert not link.verify(both.first)
    # the one that was refused has closed its own
    both.sync(both.first, whole, "sync_over_a_new_link")
    assert both.greedy() == first
    facts["engine_bytes_at_the_end"] = settled() - both.base
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description="sleep and wake beside a trainer on one GPU"
    )
    parser.add_argument("--size", default="4", help="GB of weights: 1, 4, 16")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="jvlab-colocate-") as place,
        jv.Lab(lease=120) as lab,
    ):
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(config_of(given.size)))
        facts = run(lab, folder, {**ENGINE, "enforce_eager": not given.graphs})
        print("colocate:", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

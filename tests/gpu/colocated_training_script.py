"""GRPO with an engine that sleeps while a step trains on its memory; then the same step without sleep does not fit.

python -m tests.gpu.colocated_training_script       prints "colocated training: {...}" at its end, or raises
"""

from __future__ import annotations

import json
import tempfile
import threading
from typing import Any

import jvlab as jv
from jvlab.bench._grpo import PROMPTS, reward_of
from jvlab.bench._train import QWEN3_1_7B
from jvlab.record import _metrics
from tests.gpu.card import device_used

SHARE, TOKENS, BUDGET = 0.7, 512, 32768
ENGINE = {
    "gpu_memory_utilization": SHARE,
    "max_model_len": TOKENS + 96,
    "enforce_eager": True,
}
TIMES = (
    "window_s",
    "generate_s",
    "train_s",
    "sync_s",
    "idle_s",
    "logprob_gap",
    "staleness_max",
    "tokens",
)


class Watch:
    """The least and the most of the card in use, by whomever, since it began to look."""

    def __init__(self) -> None:
        self.least = self.most = device_used()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            used = device_used()
            self.least, self.most = min(self.least, used), max(self.most, used)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def steps(
    policy: jv.Policy, pool: jv.Pool, link: jv.Link, count: int, sleep: bool | None
) -> list[Any]:
    """The events of a run."""
    task = jv.Task(
        PROMPTS, lambda sample, example=None: reward_of(sample.text), name="size"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = jv.grpo(
            policy,
            pool,
            link,
            task,
            steps=count,
            max_staleness=0,
            group_size=8,
            prompts_per_step=15,
            max_tokens=TOKENS,
            token_budget=BUDGET,
            learning_rate=1e-6,
            sampling={"ignore_eos": True},
            sleep=sleep,
            folder=f"{folder}/run",
            checkpoint_every=0,
            background=False,
            progress=False,
        )
        return list(run.record.events())


def facts_of(events: list[Any]) -> dict[str, Any]:
    table = _metrics.step_table(events)
    pauses = [e for e in events if e.tag == "pause" and e.mode == "sleep"]
    syncs = [e for e in events if e.tag == "sync"]
    trained = [dict(e.extra) for e in _metrics.trained(events)]
    return {
        "steps": {name: [round(float(x), 3) for x in table[name]] for name in TIMES},
        "slept_s": [e.stop - e.start for e in pauses],
        "syncs": [
            {
                "sync": e.version,
                "verified": e.verified,
                "mode": e.mode,
                "transport": e.transport,
                "seconds": e.seconds,
            }
            for e in syncs
        ],
        "padding": [row.get("padding") for row in trained],
        "compiled": [row.get("compiled") for row in trained],
    }


def main() -> None:
    import cupy

    model = jv.models.tiny("qwen3", **QWEN3_1_7B)
    with jv.Lab() as lab:
        pool = lab.launch(
            model, load="dummy", device="cuda", colocate=True, engine=ENGINE
        )
        import jax

        policy = jv.Policy.from_pretrained(
            model, compute_dtype="bfloat16", remat="full"
        )
        pool.wait()
        stats = lambda: jax.local_devices()[0].memory_stats() or {}
        card = int(cupy.cuda.runtime.memGetInfo()[1])
        link = lab.connect(policy.params, pool, rules="policy", mode="staged")
        rows, length = policy.packing([TOKENS + 16] * 120, token_budget=BUDGET).shapes[
            0
        ]
        estimate = policy.memory(rows, length, 64)
        facts: dict[str, Any] = {
            "card_bytes": card,
            "trainer_share_bytes": estimate.at_hand,
        }
        facts |= {
            "shape": [rows, length],
            "memory": str(estimate),
            "memory_bytes": estimate.total,
        }
        print(facts, flush=True)
        watch = Watch()
        facts |= facts_of(steps(policy, pool, link, 2, None))
        watch.stop()
        facts |= {
            "card_used_least_bytes": watch.least,
            "card_used_most_bytes": watch.most,
        }
        facts["jax_peak_bytes"] = int(stats()["peak_bytes_in_use"])
        facts["engine_holds_the_last"] = bool(link.verify())
        try:
            steps(policy, pool, link, 1, False)
            facts["without_sleep"] = "it fits"
        except Exception as error:  # that it does not fit is what is to be seen
            facts["without_sleep"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(f"colocated training: {json.dumps(facts, default=str)}", flush=True)


if __name__ == "__main__":
    main()

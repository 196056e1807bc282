"""`jvlab demo`: the main job on the embedded default, start to end, on this machine."""

from __future__ import annotations

import time
from typing import Any

PROMPTS = ["Once upon a time", "The cat sat on", [{"role": "user", "content": "Count to three"}], [5, 6, 7, 8]]


def run_demo(seed: int = 0) -> dict[str, Any]:
    """Make a tiny model, launch real vLLM, generate, score, compare, and leave nothing behind."""
    import jvlab as jv
    from jvlab._doctor import diagnose, render

    began = time.perf_counter()
    print(render(diagnose()), flush=True)
    model = jv.models.tiny("llama", seed=seed)
    print(f"\nA tiny llama with random weights: {model}", flush=True)
    with jv.Lab() as lab:
        pool = lab.launch(model)
        print(f"{pool}: returned at once; now waiting for vLLM", flush=True)
        pool.wait()
        up = time.perf_counter() - began
        print(f"{pool} after {up:.0f} s", flush=True)
        batch = pool.generate(PROMPTS, n=4, max_tokens=32, temperature=1.0, seed=seed)
        print(f"\n{batch.table()}", flush=True)
        scores = pool.score(batch)
        gap = scores.gap(batch)
        print(f"\n{scores}: the largest gap to the sampled log-probabilities is {gap:.2e}", flush=True)
    seconds = time.perf_counter() - began
    print(f"Lab closed, nothing left running. {seconds:.0f} s in all.", flush=True)
    return {
        "logprob_gap": gap, "samples": len(batch), "tokens": batch.tokens, "tokens_per_s": batch.tokens_per_s,
        "seconds": seconds,
    }  # fmt: skip

"""`jvlab bench grpo`: one loop, model, task and seed; rollouts by vLLM or decoded in JAX, on-policy or overlapping.

(a) vs_jax_decode_ratio: steps per second of the on-policy loop with vLLM rollouts (weight syncs, verified, included)
over the same loop with rollouts decoded by one jitted JAX program with a KV cache (jvlab/bench/_jax_decode.py).
(b) k1_vs_k0_ratio, k2_vs_k0_ratio: steps per second with staleness up to 1 and 2 over the on-policy loop, all on vLLM.

The first steps compile and are not counted. How to read the numbers: on a CPU both sides share the same cores, so
overlap can only use time in which one side waits for a sync, a reward or a reply; K = 2 then adds contention. A tiny
model with short completions of one length is the best case for a jitted JAX loop: no other process, no sync, no
scheduler, all rows end together. An engine gains where rows end at different times (continuous batching), where
prompts share prefixes, and where the cache of every row at full length would not fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARM = 3  # steps that are not counted
# per step
GROUPS = 8
SAMPLES = 8


def run_bench_grpo(
    steps: int = 15,
    model: str | None = None,
    device: str = "auto",
    seed: int = 0,
    eager: bool = False,
) -> dict[str, Any]:
    """Measure all four runs; prints a table as it goes, returns the facts."""
    import jvlab as jv
    from jvlab.bench import _jax_decode

    path = (
        jv.models.resolve(model) if model else jv.models.tiny("llama", vocab_size=288)
    )
    print(
        f"bench grpo: {Path(path).name}, {GROUPS} × {SAMPLES} samples a step, {steps} steps counted",
        flush=True,
    )
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="jvlab-bench-") as folder, jv.Lab() as lab:
        engine = (
            {}
            if resolve(device) == "cpu"
            else {"gpu_memory_utilization": 0.4, "enforce_eager": eager}
        )
        pool = lab.launch(path, load="dummy", device=device, engine=engine).wait()
        for bound in (0, 1, 2):
            policy = jv.Policy.from_pretrained(path)
            link = lab.connect(policy.params, pool, rules="policy")
            runs[f"k{bound}"] = _run(
                policy, pool, link, steps, bound, seed, Path(folder) / f"k{bound}"
            )
        policy = jv.Policy.from_pretrained(path)
        peer = _peer(_jax_decode, policy)
        runs["jax"] = _run(
            policy,
            peer,
            _jax_decode.JaxLink(peer),
            steps,
            0,
            seed,
            Path(folder) / "jax",
        )
    return {
        "vs_jax_decode_ratio": runs["k0"]["steps_per_s"] / runs["jax"]["steps_per_s"],
        "vs_jax_decode_rollout_ratio": runs["k0"]["rollouts_per_s"]
        / runs["jax"]["rollouts_per_s"],
        "k1_vs_k0_ratio": runs["k1"]["steps_per_s"] / runs["k0"]["steps_per_s"],
        "k2_vs_k0_ratio": runs["k2"]["steps_per_s"] / runs["k0"]["steps_per_s"],
        "model": Path(path).name,
        "device": resolve(device),
        "eager": eager,
        "steps": steps,
        "warm_up_steps": WARM,
        "samples_per_step": GROUPS * SAMPLES,
        "runs": runs,
    }


def resolve(device: str) -> str:
    from jvlab.lab._launch_settings import resolve_device

    return resolve_device(device)


def _peer(decode: Any, policy: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy.source)
    encode = lambda text, special=True: tokenizer.encode(
        text, add_special_tokens=special
    )
    text = lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    stop = policy.hf_config.get("eos_token_id", tokenizer.eos_token_id)
    stop = stop[0] if isinstance(stop, list) else -1 if stop is None else stop
    return decode.JaxPool(policy, GROUPS, encode, text, stop, width=16)


def _run(
    policy: Any, pool: Any, link: Any, steps: int, bound: int, seed: int, folder: Path
) -> dict[str, Any]:
    from jvlab.trainer import _task_library
    from jvlab.trainer._grpo import grpo

    run = grpo(
        policy,
        pool,
        link,
        _task_library.digits(seed=seed),
        steps=steps + WARM,
        max_staleness=bound,
        learning_rate=1e-3,
        group_size=SAMPLES,
        prompts_per_step=GROUPS,
        micro_batch=GROUPS * SAMPLES,
        seed=seed,
        folder=folder,
        checkpoint_every=0,
        background=False,
        progress=False,
    )
    facts = _facts(run.record.events(), steps) | {
        "reward_last": run.record.summary()["reward_last"]
    }
    name = (
        f"vLLM, staleness ≤ {bound}"
        if getattr(pool, "name", "") != "jax"
        else "decoded in JAX"
    )
    shares = ", ".join(
        f"{k} {v:.2f} s" for k, v in facts["seconds_per_step"].items() if v >= 0.005
    )
    print(
        f"{name}: {facts['steps_per_s']:.2f} steps/s, {facts['rollouts_per_s']:.0f} rollouts/s while generating; "
        f"a step: {shares}; reward {facts['reward_last']:.2f}",
        flush=True,
    )
    return facts


def _facts(events: Sequence[Any], steps: int) -> dict[str, Any]:
    """Rates over the counted steps, from the record."""
    from jvlab.record import _metrics
    from jvlab.record._events import RolloutEvent, StepEvent
    from jvlab.record._metrics import measure

    done = [e for e in events if isinstance(e, StepEvent)]
    since = done[WARM - 1].stop
    until = done[-1].stop
    counted = [e for e in events if isinstance(e, RolloutEvent) and e.start >= since]
    generating = measure(_metrics.spans(counted))
    table = _metrics.step_table(events)
    parts = ("generate_s", "reward_s", "train_s", "sync_s", "overlap_s", "idle_s")
    return {
        "steps_per_s": steps / (until - since),
        "rollouts_per_s": sum(e.samples for e in counted) / generating,
        "tokens_per_s": sum(e.tokens for e in counted) / generating,
        "max_staleness": int(table["staleness_max"].max()),
        "seconds_per_step": {
            name[:-2]: float(table[name][WARM:].mean()) for name in parts
        },
    }

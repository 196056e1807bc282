"""`jvlab demo`: a complete GRPO run on a tiny model, with real vLLM rollouts and verified syncs."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from jvlab._files import Plain

if TYPE_CHECKING:
    import jvlab as jv
    from jvlab.record._events import StepEvent
    from jvlab.trainer._run import Run

STEPS = 20
VOCABULARY = 288  # small enough that a random model emits a digit now and then
PROMPT = "Digits: "


def run_demo(seed: int = 0, max_staleness: int = 0, steps: int = STEPS) -> Plain:
    """Train a tiny random llama to emit digits; prints progress, returns the facts, leaves only runs/<name>."""
    import jvlab as jv
    from jvlab.cli._doctor import diagnose, render
    from jvlab.trainer import _grpo, _task_library

    began = time.perf_counter()
    say = lambda text="": print(text, flush=True)
    say(render(diagnose()))
    model = jv.models.tiny("llama", vocab_size=VOCABULARY, seed=seed)
    with jv.Lab() as lab:
        pool = lab.launch(model, load="dummy")
        say(
            f"\n{pool}: returned at once; vLLM comes up with dummy weights, and JAX loads the real ones meanwhile"
        )
        policy = jv.Policy.from_pretrained(model)
        pool.wait()
        say(f"{pool} after {time.perf_counter() - began:.0f} s\n{policy}")
        link = lab.connect(policy.params, pool, rules="policy")
        say(
            f"{link}\n\nTwo weight syncs from JAX, each compared by digests of the engine's memory:"
        )
        for _ in range(2):
            say(f"  {link.sync(policy.params, progress=False)}")
        early = _greedy_check(policy, pool)
        say(
            f"Greedy tokens: vLLM and JAX agree on all {early['tokens']}; largest logprob gap {early['gap']:.1e}"
        )
        task = _task_library.digits(seed=seed)
        bound = (
            "strictly on-policy"
            if not max_staleness
            else f"rollouts and training overlap, staleness ≤ {max_staleness}"
        )
        say(
            f"\nGRPO on {task.name!r} ({bound}): reward is the share of digits in what the model says"
        )
        say(
            f"{'step':>5} {'reward':>7} {'loss':>9} {'gap':>8} {'staleness':>9} {'seconds':>8}"
        )
        run = _grpo.grpo(
            policy,
            pool,
            link,
            task,
            steps=steps,
            max_staleness=max_staleness,
            learning_rate=1e-3,
            seed=seed,
            micro_batch=64,
            checkpoint_every=steps,
            background=False,
            progress=_StepRows(),
        )
        late = _greedy_check(policy, pool)
        facts = _facts(run, max(early["gap"], late["gap"]), syncs_before=2)
        said = pool.generate([PROMPT], max_tokens=16, temperature=1.0, seed=seed)[
            0
        ].text
    say(f"\nIt now says {said!r}.\n{run}\n{_times(run)}")
    say(
        "\n".join(
            [
                "Figures, events and checkpoints:",
                *(f"  {path}" for path in run.save_figures()),
                f"  {run.folder}",
            ]
        )
    )
    seconds = time.perf_counter() - began
    say(f"Lab closed, nothing left running. {seconds:.0f} s in all.")
    return {**facts, "seconds": seconds}


class _StepRows:
    """Prints one row per step."""

    def __init__(self) -> None:
        self._before = time.perf_counter()

    def __call__(self, event: StepEvent) -> None:
        now = time.perf_counter()
        stale = ",".join(map(str, sorted(event.staleness)))
        print(
            f"{event.step:>5} {event.reward_mean:>7.3f} {event.loss:>9.1e} {event.logprob_gap:>8.1e} {stale:>9} "
            f"{now - self._before:>8.2f}",
            flush=True,
        )
        self._before = now


def _greedy_check(policy: jv.Policy, pool: jv.Pool) -> Plain:
    """Check that vLLM's greedy tokens equal JAX's, and measure the log-probability gap."""
    from jvlab._errors import VerifyError

    sample = pool.generate([PROMPT], max_tokens=24, temperature=0.0, ignore_eos=True)[0]
    tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids])[None]
    start = len(sample.prompt_token_ids)
    chosen = np.argmax(np.asarray(policy.logits(policy.params, tokens))[0], axis=-1)[
        start - 1 : -1
    ]
    if not np.array_equal(chosen, sample.token_ids):
        raise VerifyError(
            f"greedy tokens differ: vLLM {sample.token_ids.tolist()}, JAX {chosen.tolist()}",
            remedy="the engine computes something else; link.verify(policy.params) says whether it holds the weights",
        )
    ours = np.asarray(policy.logprobs(policy.params, tokens))[0, 1:]
    theirs = pool.score([tokens[0].tolist()]).logprobs[0][1:]
    return {"tokens": len(chosen), "gap": float(np.abs(ours - theirs).max())}


def _facts(run: Run, gap: float, syncs_before: int) -> Plain:
    s = run.record.summary()
    gaps = (gap, s["logprob_gap"])
    same = ("reward_first", "reward_last", "max_staleness", "steps", "samples")
    same += ("tokens", "dropped", "alarms", "faults")
    return {
        **{name: s[name] for name in same},
        "logprob_gap": max(g for g in gaps if math.isfinite(g)),
        "syncs": s["syncs"] + syncs_before,
        "syncs_verified": s["syncs_verified"] + syncs_before,
        "tokens_per_s": s["tokens_per_s_generating"],
        "run": str(run.folder),
    }


def _times(run: Run) -> str:
    s = run.record.summary()
    parts = ", ".join(
        f"{name} {seconds:.1f} s"
        for name, seconds in s["time"].items()
        if seconds >= 0.05
    )
    return f"Time: {parts} of {s['seconds']:.1f} s; {s['tokens_per_s_generating']:.0f} tokens/s while generating."

"""`jvlab bench grpo --model DIR --tokens 512,3000`: one GRPO step of a model of size, and where its time goes.

The work of a step: 8 prompts, 8 samples of each, every completion exactly as long as it may be; float32 parameters,
bfloat16 compute, AdamW; on a card vLLM beside the trainer with `ENGINE_SHARE` of its memory; every sync is verified.
Staleness 0 and 1. The first step compiles, over an empty compilation cache, and is reported on its own; the others
count: on-policy by their median, with a bound above 0 by their mean, since their lengths alternate there. (Once a step
is synced, the groups of the step after next start beside those of the next: two batches end at about the same time,
and the second is trained on at once.) With `--peer trl` TRL does the same work with vLLM in its own process
("colocate"), its steps counted by their median.

Each side is a process of its own, one after the other: no memory is shared with a peer that has not ended.

    python -m jvlab.bench._grpo_size jvlab|trl      one side: an order as JSON on stdin, a line of JSON for each run
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.bench._side import ENDED, read_order, rows_of, write_rows

# per step
GROUPS = 8
SAMPLES = 8
TOKENS = (512, 3000)
BOUNDS = (0, 1)
STEPS = 4  # counted ones; even, see above
# of a card's memory
ENGINE_SHARE = 0.35
TRAINER_SHARE = 0.57
PROMPT_ROOM = 96  # tokens
PROMPTS = [
    f"Question {i}: how much is {i} plus {i * 7 % 31}? Think first, then answer."
    for i in range(64)
]
PHASES = ("generate", "score", "reward", "train", "sync", "overlap", "idle")
SHAPES = ("qwen3-1.7b",)
PEERS = ("trl",)


def run_bench_grpo_size(
    model: str | None = None,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    steps: int = STEPS,
    shape: str | None = None,
    peer: str | None = None,
    eager: bool = False,
    bounds: Sequence[int] = BOUNDS,
) -> dict[str, Any]:
    """Measure; prints a line for each run, returns the facts."""
    import jvlab as jv
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device)
    tokens = tuple(tokens or TOKENS)
    if any(n < 2 for n in tokens) or steps < 1:
        raise ConfigError(
            f"tokens {tokens}, {steps} steps", remedy="e.g. --tokens 512,3000 --steps 3"
        )
    if (model is None) == (shape is None):
        raise ConfigError(
            f"model={model!r}, shape={shape!r}",
            remedy=f"give one: a folder, or {', '.join(SHAPES)}",
        )
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch:
        path = (
            jv.models.resolve(model)
            if model
            else shaped_model(str(shape), f"{scratch}/model")
        )
        order: dict[str, Any] = {
            "model": path,
            "tokens": tokens,
            "bounds": tuple(bounds),
            "steps": steps,
        }
        order |= {"device": device, "eager": eager, "scratch": scratch}
        print(
            f"bench grpo on {device}: {shape or Path(path).name}, {GROUPS} × {SAMPLES} samples a step",
            flush=True,
        )
        ours = list(_side("jvlab", order))
        theirs, missing = _peer_rows(peer, order)
    return facts_of(ours, theirs) | {
        "model": shape or Path(path).name,
        "device": device,
        "eager": eager,
        "steps": steps,
        "samples_per_step": GROUPS * SAMPLES,
        **({"peer": missing or peer} if peer else {}),
    }


def shaped_model(shape: str, path: str) -> str:
    """A model of a known shape with random weights."""
    import jvlab as jv
    from jvlab.bench._train import QWEN3_1_7B

    if shape not in SHAPES:
        raise ConfigError(
            f"shape={shape!r}", remedy=f"one of {', '.join(SHAPES)}, or --model DIR"
        )
    return jv.models.tiny("qwen3", path, **QWEN3_1_7B)


def _peer_rows(
    peer: str | None, order: dict[str, Any]
) -> tuple[list[dict[str, Any]], str]:
    """What the peer measured, a process for each length; or why there is nothing."""
    if peer is None:
        return [], ""
    if peer not in PEERS:
        raise ConfigError(f"peer={peer!r}", remedy=f"one of {', '.join(PEERS)}")
    why = "" if find_spec(peer) else f"{peer} is not installed: pip install {peer}"
    why = why or (
        ""
        if order["device"] == "cuda"
        else f"{peer} with vLLM in its process needs a GPU"
    )
    if why:
        print(why, flush=True)
        return [], why
    return [
        row for n in order["tokens"] for row in _side(peer, {**order, "tokens": [n]})
    ], ""


def facts_of(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Flat keys beside the runs themselves: step_s_512 (on-policy), step_s_512_k1, vs_trl_ratio_512, ..."""
    out: dict[str, Any] = {}
    name = lambda key, row: (
        f"{key}_{row['tokens']}"
        + (f"_k{row['max_staleness']}" if row["max_staleness"] else "")
    )
    for row in ours:
        out[name("step_s", row)] = row["step_s"]
        out[name("tokens_per_s", row)] = row["tokens_per_s"]
        if not row["max_staleness"]:
            out[name("first_step_s", row)] = row["first_step_s"]
    for peer in theirs:
        out[f"trl_step_s_{peer['tokens']}"] = peer["step_s"]
        for row in ours:
            if row["tokens"] == peer["tokens"]:
                out[name("vs_trl_ratio", row)] = peer["step_s"] / row["step_s"]
    on_policy = {
        row["tokens"]: row["step_s"] for row in ours if row["max_staleness"] == 0
    }
    for row in ours:
        if row["max_staleness"] and row["tokens"] in on_policy:
            out[f"k{row['max_staleness']}_vs_k0_ratio_{row['tokens']}"] = (
                on_policy[row["tokens"]] / row["step_s"]
            )
    return out | {"runs": [*ours, *theirs]}


def _side(side: str, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of one side, printed as they come."""
    environment = {"JVLAB_COMPILE_CACHE": f"{order['scratch']}/xla"}
    if side == "jvlab" and not {
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    } & set(os.environ):
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(TRAINER_SHARE)
    for row in rows_of("jvlab.bench._grpo_size", side, order, environment):
        print(_text(row), flush=True)
        yield row


def _text(row: dict[str, Any]) -> str:
    who = (
        row["who"]
        if row["who"] != "jvlab"
        else f"jvlab, staleness ≤ {row['max_staleness']}"
    )
    parts = ", ".join(
        f"{k} {v:.2f}" for k, v in row.get("seconds", {}).items() if v >= 0.005
    )
    more = f" ({parts})" if parts else ""
    return f"{who}, {row['tokens']} tokens: {row['step_s']:.2f} s a step{more}; the first {row['first_step_s']:.1f} s"


# One side, in its own process -----------------------------------------------------------------------------------------


def reward_of(text: str) -> float:
    """Some number that depends on the text, so that every group has a spread."""
    return (sum(map(ord, text[:64])) % 97) / 97


def _jvlab_side(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import jvlab as jv

    card = order["device"] == "cuda"
    engine: dict[str, Any] = {"max_model_len": max(order["tokens"]) + PROMPT_ROOM}
    if card:
        import jax

        engine |= {
            "gpu_memory_utilization": ENGINE_SHARE,
            "enforce_eager": order["eager"],
        }
        # JAX takes its share before the engine measures what is free
        jax.block_until_ready(jax.numpy.zeros(1))
    with jv.Lab() as lab:
        pool = lab.launch(
            order["model"], load="dummy", device=order["device"], engine=engine
        )
        policy = jv.Policy.from_pretrained(
            order["model"], compute_dtype="bfloat16" if card else None
        )
        pool.wait()
        link = lab.connect(policy.params, pool, rules="policy")
        task = jv.Task(
            PROMPTS, lambda sample, example=None: reward_of(sample.text), name="size"
        )
        yield from jvlab_rows(order, policy, pool, link, task)
        yield ENDED  # before a teardown that may hang


def jvlab_rows(
    order: dict[str, Any], policy: Any, pool: Any, link: Any, task: Any
) -> Iterator[dict[str, Any]]:
    """One row for each length and bound."""
    from jvlab.trainer._grpo import grpo

    for tokens in order["tokens"]:
        for bound in order["bounds"]:
            run = grpo(
                policy,
                pool,
                link,
                task,
                steps=1 + order["steps"] + bound,
                max_staleness=bound,
                group_size=SAMPLES,
                prompts_per_step=GROUPS,
                max_tokens=tokens,
                learning_rate=1e-6,
                sampling={"ignore_eos": True},
                folder=Path(order["scratch"]) / f"run-{tokens}-{bound}",
                checkpoint_every=0,
                background=False,
                progress=False,
            )
            yield row_of(run.record.events(), tokens, bound, order["steps"])


def row_of(
    events: Sequence[Any], tokens: int, bound: int, steps: int
) -> dict[str, Any]:
    """The counted steps of a run: not the first, which compiles, and not those for which nothing is generated ahead."""
    from jvlab.record import _metrics

    table = _metrics.step_table(events)
    counted = slice(1, 1 + steps)
    window = table["window_s"][counted]
    mean = {name: float(table[f"{name}_s"][counted].mean()) for name in PHASES}
    trained = _metrics.trained(events)[counted]
    step_s = float(window.mean()) if bound else statistics.median(window.tolist())
    return {
        "who": "jvlab",
        "tokens": tokens,
        "max_staleness": bound,
        "step_s": step_s,
        "first_step_s": float(table["window_s"][0]),
        "steps_s": window.tolist(),
        "seconds": mean,
        "shares": {
            name: seconds / float(window.mean()) for name, seconds in mean.items()
        },
        "tokens_per_s": float(np.median(table["tokens"][counted])) / step_s,
        "tokens_trained": int(np.median(table["tokens"][counted])),
        "padding": max((e.extra.get("padding", 0.0) for e in trained), default=0.0),
        "compiled": sum(e.extra.get("compiled", 0) for e in trained),
        "logprob_gap": float(np.nanmax(table["logprob_gap"])),
        "staleness_max": int(np.nanmax(table["staleness_max"])),
    }


def _trl_side(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """TRL with vLLM in its own process, told to do the same work."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ.update(alone | {"WANDB_DISABLED": "true"})
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    (tokens,) = order["tokens"]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=f"{order['scratch']}/trl",
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=GROUPS,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        max_steps=1 + order["steps"],
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        bf16=True,
        gradient_checkpointing=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=ENGINE_SHARE,
        vllm_max_model_length=tokens + PROMPT_ROOM,
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True},
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=order["model"],
        reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[Clock()],
    )
    start = time.perf_counter()
    trainer.train()
    seconds = np.diff([start, *times]).tolist()
    step_s = statistics.median(seconds[1:])
    yield {
        "who": "TRL",
        "tokens": tokens,
        "max_staleness": 0,
        "step_s": step_s,
        "first_step_s": seconds[0],
        "steps_s": seconds[1:],
        "tokens_per_s": GROUPS * SAMPLES * tokens / step_s,
    }


def main(side: str) -> None:
    # the lab is closed on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    order = read_order()
    if side == "jvlab":
        write_rows(_jvlab_side(order))
        return
    try:
        write_rows(_trl_side(order))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # an engine in this process hangs when it ends


if __name__ == "__main__":
    main(sys.argv[1])

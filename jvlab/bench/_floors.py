"""`jvlab bench grpo --floors`: generating one step of GRPO: what it must cost, and what vLLM and a pool take for it.

The work is that of `jvlab bench grpo` with a model: 8 prompts, 8 samples of each, all as long as they may be.

floor       the bytes that decoding must read, by the rate at which this device copies: all weights of the layers and
            of the head once a token, keys and values of every sample so far
plain       vllm.LLM with the same engine arguments, without a pool
pool        `pool.generate`, log-probabilities included

On a GPU each of them in 16 bits and in eight ("fp8": weights, keys and values), with CUDA graphs, and once more with a
profiler for some tokens: the milliseconds of each token's kernels by what they do, at the start of a completion. All
engines are up at once, and one works.

`--tail`: the last samples of a step, 8 and fewer, with n-gram speculation and without. A model with random weights
bounds what it can gain: its samples at temperature 1 repeat nothing, so no draft is accepted, and its greedy
completions end in loops, so nearly all are.

`--fp8` without a model: the reward of a task that is learnt, by step, with rollouts in 16 bits and in eight.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.bench._grpo import (
    EIGHT_BITS,
    GROUPS,
    PROMPT_ROOM,
    SAMPLES,
    TOKENS,
    folder_of,
    record_of,
    resolve,
)
from jvlab.bench._side import Lines, Side, prompts_of, timed

FORMATS = {"16 bits": {}, "fp8": EIGHT_BITS}
ROUNDS = 2
WARM_TOKENS = 16
TAIL = (8, 4, 1)  # samples
TAIL_TOKENS = 512
HEARTBEATS_S = 2.0
NGRAM = {
    "speculative": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
    }
}
SEEDS = (0, 1, 2)
LEARNER = {  # sizes that the kernels for eight bits take
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROFILED = 64  # tokens
SPARE = 1.1  # of the KV cache, for blocks that are not full
KERNELS = {
    "attention": ("flash", "attn", "attention", "reshape_and_cache"),
    "matmul": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "scaled_mm"),
    "sampling": ("gumbel", "sampl", "topk", "logprob", "logsoftmax", "argmax"),
}


def run_bench_floors(
    model: str | None = None,
    shape: str | None = None,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    eager: bool = False,
) -> dict[str, Any]:
    """Measure; prints a line for each length and format, returns the facts."""
    import jvlab as jv

    device = resolve(device)
    lengths = tuple(tokens or (TOKENS if device == "cuda" else (32,)))
    if min(lengths) < 2:
        raise ConfigError(f"tokens {lengths}", remedy="e.g. --tokens 512,3000")
    formats = FORMATS if device == "cuda" else {"16 bits": {}}
    with (
        tempfile.TemporaryDirectory(prefix="jvbench-") as scratch,
        jv.Lab() as lab,
        ExitStack() as stack,
    ):
        path = folder_of(model, shape, scratch)
        what = shape or Path(path).name
        print(f"bench grpo --floors on {device}: {what}", flush=True)
        with Side("jvlab.bench._floors:copy_side", device) as side:
            rate = side.receive()
        sizes = sizes_of(json.loads((Path(path) / "config.json").read_text()))
        engines = {
            name: _engine(device, eager, max(lengths), sizes, name == "fp8") | more
            for name, more in formats.items()
        }
        plain = {
            name: stack.enter_context(_plain(path, device, engine, f"{scratch}/{name}"))
            for name, engine in engines.items()
        }
        pools = {
            name: lab.launch(path, load="dummy", device=device, engine=engine)
            for name, engine in engines.items()
        }
        rows = []
        for name in formats:
            plain[name].receive()
            pools[name].wait(timeout=1800.0)
        for name in formats:
            for length in lengths:
                row = _row(plain[name], pools[name], length)
                floor = floor_bytes(sizes, length, name == "fp8") / rate
                row = {"format": name, "tokens": length, "floor_s": floor} | row
                print(_text(row), flush=True)
                rows.append(row)
            if device == "cuda":
                kernels = _profile(plain[name], f"{scratch}/{name}")
                print(f"{name}, ms of kernels for a token: {kernels}", flush=True)
                rows[-1]["kernels_ms"] = kernels
    return {
        "model": what,
        "device": device,
        "eager": eager,
        "samples": GROUPS * SAMPLES,
        "copy_gb_per_s": rate / 1e9,
        "rows": rows,
    }


def _text(row: Mapping[str, Any]) -> str:
    return (
        f"{row['tokens']} tokens, {row['format']}: at least {row['floor_s']:.2f} s; plain vLLM {row['plain_s']:.2f}, "
        f"without log-probabilities {row['plain_without_logprobs_s']:.2f}; pool {row['pool_s']:.2f}"
    )


# What it must cost ----------------------------------------------------------------------------------------------------


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of a model: weights that a token multiplies with, and values of keys and values for a token."""
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    feed_forward = 3 * hidden * config["intermediate_size"]
    return {
        "layers": layers * (attention + feed_forward),
        "head": hidden * config["vocab_size"],
        "kv": 2 * layers * kv_heads * width,
        "bytes": 4 if config.get("dtype") == "float32" else 2,
    }


def floor_bytes(sizes: Mapping[str, int], tokens: int, eight: bool) -> float:
    """Bytes that decoding so many tokens of every sample reads. The head stays in 16 bits; prompts are not counted."""
    item = 1 if eight else sizes["bytes"]
    weights = sizes["layers"] * item + sizes["head"] * sizes["bytes"]
    context = tokens / 2  # on average
    return tokens * (weights + GROUPS * SAMPLES * context * sizes["kv"] * item)


def copy_side(device: str, lines: Lines) -> None:
    """Bytes read and written a second by a large copy."""
    import torch

    values = 2**28 if device == "cuda" else 2**25
    source = torch.ones(values, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(8):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    seconds = min(timed(copy)[0] for _ in range(5))
    lines.send(2 * 8 * source.nbytes / seconds)


# What it costs --------------------------------------------------------------------------------------------------------


def _engine(
    device: str, eager: bool, tokens: int, sizes: Mapping[str, int], eight: bool
) -> dict[str, Any]:
    engine: dict[str, Any] = {"max_model_len": tokens + PROMPT_ROOM}
    if device == "cuda":
        item = 1 if eight else sizes["bytes"]
        room = GROUPS * SAMPLES * (tokens + PROMPT_ROOM) * sizes["kv"] * item
        # several start at once: none may measure what is free
        engine |= {
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": int(SPARE * room),
            "enforce_eager": eager,
        }
    return engine


def _plain(path: str, device: str, engine: dict[str, Any], traces: str) -> Side:
    from jvlab.engine import _defaults

    arguments = _defaults.engine_arguments(path, device, 1, "dummy", engine)
    if device == "cuda":
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": traces,
        }
    env = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), path)
    return Side("jvlab.bench._beside_vllm:plain_side", arguments, env)


def _row(plain: Side, pool: Any, tokens: int) -> dict[str, Any]:
    """Seconds of each side, the median of its rounds; in turn."""
    prompts = prompts_of(GROUPS)
    took: dict[str, list[float]] = {"plain": [], "without": [], "pool": []}
    same = {"temperature": 1.0, "ignore_eos": True, "progress": False}
    for length in (WARM_TOKENS, *[tokens] * ROUNDS):
        asked = {"prompts": prompts, "n": SAMPLES, "max_tokens": length}
        seconds, batch = timed(
            pool.generate, prompts, n=SAMPLES, max_tokens=length, **same
        )
        found = {
            "plain": plain.ask(asked | {"logprobs": 0}),
            "without": plain.ask(asked),
            "pool": (seconds, batch.tokens),
        }
        for side, (seconds, made) in found.items():
            if made != GROUPS * SAMPLES * length:
                raise RuntimeError(f"{side} made {made} tokens")
            if length == tokens:
                took[side].append(seconds)
    median = {side: statistics.median(seconds) for side, seconds in took.items()}
    return {
        "plain_s": median["plain"],
        "plain_without_logprobs_s": median["without"],
        "pool_s": median["pool"],
        "seconds": took,
    }


def _profile(plain: Side, traces: str) -> dict[str, float]:
    """Milliseconds of a token's kernels in a short generation."""
    asked = {"prompts": prompts_of(GROUPS), "n": SAMPLES, "max_tokens": PROFILED}
    plain.ask(asked | {"logprobs": 0, "profile": True})
    files = Path(traces).glob("*.json.gz")
    largest = max(files, key=lambda file: file.stat().st_size)
    with gzip.open(largest) as file:
        return kernel_ms(json.load(file)["traceEvents"], PROFILED)


def kernel_ms(events: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, float]:
    """Milliseconds for each of so many tokens, by what the kernels of a trace do."""
    spent = dict.fromkeys((*KERNELS, "other"), 0.0)
    for event in events:
        if event.get("cat") == "kernel":
            spent[_kind(event["name"].lower())] += event["dur"] / 1e3 / tokens
    return spent


def _kind(name: str) -> str:
    for kind, words in KERNELS.items():
        if any(word in name for word in words):
            return kind
    return "other"


# The tail -------------------------------------------------------------------------------------------------------------


def run_bench_tail(
    model: str | None = None,
    shape: str | None = None,
    device: str = "auto",
    eager: bool = False,
) -> dict[str, Any]:
    """Measure; prints a line for each number of samples, returns the facts."""
    import jvlab as jv

    device = resolve(device)
    tokens = TAIL_TOKENS if device == "cuda" else 48
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch, jv.Lab() as lab:
        path = folder_of(model, shape, scratch)
        what = shape or Path(path).name
        print(f"bench grpo --tail on {device}: {what}, {tokens} tokens", flush=True)
        sizes = sizes_of(json.loads((Path(path) / "config.json").read_text()))
        engine = _engine(device, eager, tokens, sizes, False)
        pools = {
            name: lab.launch(path, load="dummy", device=device, engine=engine, **more)
            for name, more in {"plain": {}, "ngram": NGRAM}.items()
        }
        for pool in pools.values():
            pool.wait(timeout=1800.0)
        rows = []
        for kind, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            for samples in TAIL:
                row = _tail_row(pools, samples, tokens, temperature)
                rows.append({"kind": kind, "samples": samples} | row)
                print(
                    f"{samples} samples, {kind}: {row['plain_s']:.2f} s, with n-grams {row['ngram_s']:.2f}; "
                    f"of its drafts {row['accepted']:.0%} accepted",
                    flush=True,
                )
    return {
        "model": what,
        "device": device,
        "eager": eager,
        "tokens": tokens,
        "rows": rows,
    }


def _tail_row(
    pools: Mapping[str, Any], samples: int, tokens: int, temperature: float
) -> dict[str, Any]:
    prompts = prompts_of(samples)
    options = {"temperature": temperature, "ignore_eos": True, "progress": False}
    took: dict[str, list[float]] = {name: [] for name in pools}
    before = _drafts(pools["ngram"])
    for length in (WARM_TOKENS, *[tokens] * ROUNDS):
        for name, pool in pools.items():
            seconds, _ = timed(
                pool.generate, prompts, max_tokens=length, seed=0, **options
            )
            if length == tokens:
                took[name].append(seconds)
    proposed, accepted = np.subtract(_drafts(pools["ngram"]), before)
    return {
        **{f"{name}_s": statistics.median(times) for name, times in took.items()},
        "accepted": float(accepted / max(1, proposed)),
        "proposed": int(proposed),
    }


def _drafts(pool: Any) -> tuple[int, int]:
    """Tokens that were drafted so far, and those accepted, once heartbeats have told."""
    time.sleep(HEARTBEATS_S)
    pool.status()
    stats = [replica.stats for replica in pool.snapshot.replicas]
    return sum(s.draft_tokens for s in stats), sum(s.accepted_tokens for s in stats)


# What is learnt in eight bits -----------------------------------------------------------------------------------------


def run_bench_curves(
    steps: int = 60, device: str = "auto", seeds: Sequence[int] = SEEDS
) -> dict[str, Any]:
    """The reward by step for each format and seed; prints a line for each, returns the facts."""
    import jvlab as jv

    device = resolve(device)
    formats = FORMATS if device == "cuda" else {"16 bits": {}}
    rows = []
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch, jv.Lab() as lab:
        path = jv.models.tiny("qwen3", f"{scratch}/model", **LEARNER)
        card = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
        engine = card if device == "cuda" else {}
        pools = {
            name: lab.launch(path, load="dummy", device=device, engine=engine | more)
            for name, more in formats.items()
        }
        for name, pool in pools.items():
            pool.wait(timeout=1800.0)
            for seed in seeds:
                policy = jv.Policy.from_pretrained(path)
                with lab.connect(policy.params, pool, rules="policy") as link:
                    record = record_of(
                        policy,
                        pool,
                        link,
                        jv.tasks.repeat_letter("abc", seed=seed),
                        Path(scratch) / f"{name.replace(' ', '')}-{seed}",
                        steps=steps,
                        learning_rate=3e-4,
                        group_size=SAMPLES,
                        prompts_per_step=GROUPS,
                        seed=seed,
                    )
                table = record.steps()
                row = {
                    "format": name,
                    "seed": seed,
                    "rewards": [round(float(r), 4) for r in table["reward_mean"]],
                    "effective_samples": float(np.nanmin(table["effective_samples"])),
                    "logprob_gap": float(np.nanmax(table["logprob_gap"])),
                }
                row["reward_mean"] = statistics.fmean(row["rewards"])
                row["reward_last"] = statistics.fmean(row["rewards"][-5:])
                rows.append(row)
                print(
                    f"{name}, seed {seed}: reward {row['reward_mean']:.3f} on average, {row['reward_last']:.3f} in the "
                    f"last five steps; effective samples {row['effective_samples']:.3f}",
                    flush=True,
                )
    return {"device": device, "steps": steps, "rows": rows}

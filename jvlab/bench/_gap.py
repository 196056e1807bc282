"""`jvlab bench gap`: the log-probability gap between engine and trainer, and the effect and cost of each setting.

One checkpoint, several engines, several policies: each engine samples the same prompts, and policies compute the
log-probabilities of what engines sampled. A row is one pair: mean, 99th percentile and largest |trainer − engine|
over all completion tokens, and the signed mean. Engines run one at a time, so that their tokens/s are comparable.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab._files import Plain
from jvlab.bench._side import model_of, timed
from jvlab.layout._checkpoint import read_config

PROMPTS = 8
SAMPLES = 4
TOKENS = 256
ROUNDS = 2
SCORED = 16  # completions of each engine that the policies score
# name -> engine arguments, deterministic
ENGINES: dict[str, dict[str, tuple[Plain, bool]]] = {
    "cuda": {
        "bfloat16": ({"dtype": "bfloat16"}, False),
        "bfloat16, float32 head": (
            {"dtype": "bfloat16", "head_dtype": "float32"},
            False,
        ),
        "bfloat16, Triton attention": (
            {"dtype": "bfloat16", "attention_backend": "TRITON_ATTN"},
            False,
        ),
        "bfloat16, deterministic": ({"dtype": "bfloat16"}, True),
        "float16": ({"dtype": "float16"}, False),
        "float16, float32 head": ({"dtype": "float16", "head_dtype": "float32"}, False),
        "float32": ({"dtype": "float32"}, False),
    },
    "cpu": {
        "bfloat16": ({"dtype": "bfloat16"}, False),
        "bfloat16, float32 head": (
            {"dtype": "bfloat16", "head_dtype": "float32"},
            False,
        ),
        "float32": ({"dtype": "float32"}, False),
    },
}
# name -> compute_dtype, head_dtype
POLICIES: dict[str, tuple[str, str | None]] = {
    "bfloat16": ("bfloat16", None),
    "bfloat16, bfloat16 head": ("bfloat16", "bfloat16"),
    "bfloat16, float32 head": ("bfloat16", "float32"),
    "float16": ("float16", None),
    "float32": ("float32", None),
}
# what is changed -> (engine, policy); the first is the baseline
CAUSES: dict[str, tuple[str, str]] = {
    "today: bfloat16 on both sides": ("bfloat16", "bfloat16"),
    "head: float32 in the engine": ("bfloat16, float32 head", "bfloat16"),
    "head: float32 on both sides": ("bfloat16, float32 head", "bfloat16, float32 head"),
    "head: rounded as the engine rounds": ("bfloat16", "bfloat16, bfloat16 head"),
    "attention: Triton's instead of FlashAttention": (
        "bfloat16, Triton attention",
        "bfloat16",
    ),
    "kernels: batch-invariant": ("bfloat16, deterministic", "bfloat16"),
    "dtype: the trainer in float32": ("bfloat16", "float32"),
    "dtype: float16 on both sides": ("float16", "float16"),
    "dtype: float16, float32 head in the engine": ("float16, float32 head", "float16"),
    "dtype: float32 on both sides": ("float32", "float32"),
}


def run_bench_gap(
    model: str | None = None, device: str = "auto", eager: bool = False
) -> Plain:
    """Measure every pair; prints a table, returns the facts."""
    # the engines share the GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jvlab as jv
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device)
    path = model_of(model)
    if not Path(path).is_dir():
        raise ConfigError(
            f"{path!r} is not a folder",
            remedy="--model DIR, a checkpoint that the trainer can read too",
        )
    print(f"bench gap on {device}: {Path(path).name}", flush=True)
    with jv.Lab() as lab:
        batches, rates = _sample(lab, path, device, eager)
    rows = _compare(path, batches)
    print(
        f"\n{'what is switched':<46}{'mean':>9}{'p99':>9}{'largest':>9}{'engine tokens/s':>17}"
    )
    for row in rows:
        print(
            f"{row['what']:<46}{row['mean']:>9.4f}{row['p99']:>9.4f}{row['largest']:>9.4f}"
            f"{rates[row['engine']]:>17.0f}"
        )
    return {
        "device": device,
        "model": Path(path).name,
        "eager": eager or device == "cpu",
        "tokens": PROMPTS * TOKENS,
        "gap_mean": rows[0]["mean"],
        "gap_largest": rows[0]["largest"],
        "best_mean": min(row["mean"] for row in rows),
        "rows": rows,
        "engine_tokens_per_s": rates,
    }


def _sample(
    lab: Any, path: str, device: str, eager: bool
) -> tuple[Plain, dict[str, float]]:
    """What each engine sampled, and its tokens/s."""
    wanted = ENGINES[device]
    vocabulary = int(read_config(path)["vocab_size"])
    common: Plain = {
        "max_model_len": 1024,
        "enforce_eager": eager or device == "cpu",
    }
    if not (Path(path) / "tokenizer.json").is_file():
        common["skip_tokenizer_init"] = True
    if device == "cuda":
        common |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 3 << 30}
    launch = lambda name: lab.launch(
        path,
        device=device,
        engine={**common, **wanted[name][0]},
        deterministic=wanted[name][1],
    )
    # a GPU machine has memory and cores for all engines at once; a CPU runs one after the other
    pools = {name: launch(name) for name in wanted} if device == "cuda" else {}
    batches = {}
    rates = {}
    for name in wanted:
        # no deadline: `Pool.wait` has a default
        pool = (pools.get(name) or launch(name)).wait()
        random = np.random.default_rng(0)
        prompts = [
            random.integers(5, vocabulary - 5, 20 + 13 * i).tolist()
            for i in range(PROMPTS)
        ]
        found = []
        for turn in range(ROUNDS + 1):  # the first one warms up
            options = {
                "max_tokens": TOKENS,
                "temperature": 1.0,
                "seed": turn,
                "ignore_eos": True,
                "progress": False,
            }
            seconds, batch = timed(pool.generate, prompts, n=SAMPLES, **options)
            found.append(batch.tokens / seconds)
            batches[name] = list(batch)[:: PROMPTS * SAMPLES // SCORED]
        rates[name] = statistics.median(found[1:])
        print(f"  engine {name}: {rates[name]:.0f} tokens/s", flush=True)
        pool.close()
    return batches, rates


def _compare(path: str, batches: Plain) -> list[Plain]:
    """A row for each of CAUSES that these engines can show."""
    import jvlab as jv

    width = max(
        len(s.prompt_token_ids) + len(s.token_ids)
        for samples in batches.values()
        for s in samples
    )
    rows: dict[str, Plain] = {}
    for name, (compute, head) in POLICIES.items():
        policy = jv.Policy.from_pretrained(path, compute_dtype=compute, head_dtype=head)
        for what, (engine, compared) in CAUSES.items():
            if compared == name and engine in batches:
                gaps = _gaps(policy, batches[engine], width)
                rows[what] = {"what": what, "engine": engine, "policy": name, **gaps}
    return [rows[what] for what in CAUSES if what in rows]


def _gaps(policy: Any, samples: list[Any], width: int) -> Plain:
    tokens = np.zeros((len(samples), width), np.int32)
    mask = np.zeros((len(samples), width), bool)
    for row, sample in enumerate(samples):
        ids = [*sample.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    found = np.asarray(policy.logprobs(policy.params, tokens, mask))
    apart = np.concatenate(
        [
            _completion(row, s) - s.logprobs
            for row, s in zip(found, samples, strict=True)
        ]
    )
    gap = np.abs(apart)
    return {
        "mean": float(gap.mean()),
        "p99": float(np.quantile(gap, 0.99)),
        "largest": float(gap.max()),
        "signed": float(apart.mean()),
    }


def _completion(row: np.ndarray, sample: Any) -> np.ndarray:
    """The log-probabilities of the sampled tokens in a row."""
    start = len(sample.prompt_token_ids)
    return row[start : start + len(sample.token_ids)]

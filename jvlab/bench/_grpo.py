"""`jvlab bench grpo`: steps of the GRPO loop. Without a model a tiny one, with one where the time of a step goes.

Without `--model` or `--shape`: one loop, model, task and seed; rollouts by vLLM or decoded in JAX, on-policy or
overlapping.

(a) vs_jax_decode_ratio: steps per second of the on-policy loop with vLLM rollouts (weight syncs, verified, included)
over the same loop with rollouts decoded by one jitted JAX program with a KV cache (jvlab/bench/_jax_decode.py).
(b) k1_vs_k0_ratio, k2_vs_k0_ratio: steps per second with staleness up to 1 and 2 over the on-policy loop, all on vLLM.

The first steps compile and are not counted. How to read the numbers: on a CPU both sides share the same cores, so
overlap can only use time in which one side waits for a sync, a reward or a reply; K = 2 then adds contention. A tiny
model with short completions of one length is the best case for a jitted JAX loop: no other process, no sync, no
scheduler, all rows end together. An engine gains where rows end at different times (continuous batching), where
prompts share prefixes, and where the cache of every row at full length would not fit.

With `--model DIR --tokens 512,3000`: one step of a model of size. Its work: 8 prompts, 8 samples of each, every
completion exactly as long as it may be; float32 parameters, bfloat16 compute, AdamW; on a GPU vLLM beside the trainer
with `ENGINE_SHARE` of its memory; every sync is verified. Staleness 0 and 1. The first step compiles, over an empty
compilation cache, and is reported on its own; the others count: on-policy by their median, with a bound above 0 by
their mean, since their lengths alternate there. (Once a step is synced, the groups of the step after next start beside
those of the next: two batches end at about the same time, and the second is trained on at once.) With `--peer trl` TRL
does the same work with vLLM in its own process ("colocate"), its steps counted by their median. Each side is a process
of its own, one after the other: no memory is shared with a peer that has not ended.

`--drawn`: completions end after drawn numbers of tokens instead, `DrawnLengths`, the same ones on both sides; those of
`--tokens` are the most. `--fp8`: our rollouts in eight bits, weights, keys and values; training corrects for it by its
importance weights, whose effective sample size is in the row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import ConfigError, MissingDependency
from jvlab._files import Plain
from jvlab.bench._side import Lines, Side, model_of, since_start

# per step
GROUPS = 8
SAMPLES = 8
PHASES = ("generate", "score", "reward", "train", "sync", "overlap", "idle")


def record_of(
    policy: Any, pool: Any, link: Any, task: Any, folder: Path, **options: Any
) -> Any:
    """The record of one run, which takes its time and saves nothing else."""
    import jvlab as jv

    run = jv.grpo(
        policy,
        pool,
        link,
        task,
        folder=folder,
        checkpoint_every=0,
        background=False,
        progress=False,
        **options,
    )
    return run.record


def resolve(device: str) -> str:
    from jvlab.lab._launch_settings import resolve_device

    return resolve_device(device)


def _parts(seconds: dict[str, float]) -> str:
    """What took longer than nothing."""
    return ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if v >= 0.005)


# A tiny model ---------------------------------------------------------------------------------------------------------

WARM = 3  # steps that are not counted


def run_bench_grpo(steps: int = 15, device: str = "auto", eager: bool = False) -> Plain:
    """Measure all four runs; prints a table as it goes, returns the facts."""
    import jvlab as jv
    from jvlab.bench._jax_decode import JaxLink

    if steps < 3:
        raise ConfigError(
            f"{steps} steps",
            remedy="at least 3: what earlier ones train on is generated before they count",
        )
    path = model_of(None, vocab_size=288)
    print(
        f"bench grpo: {Path(path).name}, {GROUPS} × {SAMPLES} samples a step, {steps} steps counted",
        flush=True,
    )
    runs: dict[str, Plain] = {}
    with tempfile.TemporaryDirectory(prefix="jvlab-bench-") as folder, jv.Lab() as lab:
        engine = (
            {}
            if resolve(device) == "cpu"
            else {"gpu_memory_utilization": 0.4, "enforce_eager": eager}
        )
        pool = lab.launch(path, load="dummy", device=device, engine=engine).wait()
        for name, bound in (("k0", 0), ("k1", 1), ("k2", 2), ("jax", 0)):
            policy = jv.Policy.from_pretrained(path)
            if name == "jax":
                pool = _jax_pool(policy)
                link = JaxLink(pool)
            else:
                link = lab.connect(policy.params, pool, rules="policy")
            runs[name] = _loop(name, policy, pool, link, steps, bound, Path(folder))
    ratio = lambda one, other, rate="steps_per_s": runs[one][rate] / runs[other][rate]
    return {
        "vs_jax_decode_ratio": ratio("k0", "jax"),
        "vs_jax_decode_rollout_ratio": ratio("k0", "jax", "rollouts_per_s"),
        "k1_vs_k0_ratio": ratio("k1", "k0"),
        "k2_vs_k0_ratio": ratio("k2", "k0"),
        "model": Path(path).name,
        "device": resolve(device),
        "eager": eager,
        "steps": steps,
        "warm_up_steps": WARM,
        "samples_per_step": GROUPS * SAMPLES,
        "runs": runs,
    }


def _jax_pool(policy: Any) -> Any:
    from transformers import AutoTokenizer

    from jvlab.bench._jax_decode import JaxPool

    tokenizer = AutoTokenizer.from_pretrained(policy.source)
    text = lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    stop = policy.hf_config["eos_token_id"]
    return JaxPool(policy, GROUPS, tokenizer.encode, text, stop, width=16)


def _loop(
    name: str, policy: Any, pool: Any, link: Any, steps: int, bound: int, folder: Path
) -> Plain:
    import jvlab as jv

    record = record_of(
        policy,
        pool,
        link,
        jv.tasks.digits(seed=0),
        folder / name,
        steps=steps + WARM,
        max_staleness=bound,
        learning_rate=1e-3,
        group_size=SAMPLES,
        prompts_per_step=GROUPS,
        micro_batch=GROUPS * SAMPLES,
        seed=0,
    )
    facts = _rates(record.events(), steps)
    facts["reward_last"] = record.summary()["reward_last"]
    what = "decoded in JAX" if name == "jax" else f"vLLM, staleness ≤ {bound}"
    print(
        f"{what}: {facts['steps_per_s']:.2f} steps/s, {facts['rollouts_per_s']:.0f} rollouts/s while generating; "
        f"seconds of a step: {_parts(facts['seconds_per_step'])}; reward {facts['reward_last']:.2f}",
        flush=True,
    )
    return facts


def _rates(events: Sequence[Any], steps: int) -> Plain:
    """Rates over the counted steps, from the record."""
    from jvlab.record import _metrics
    from jvlab.record._events import RolloutEvent, StepEvent

    done = [e for e in events if isinstance(e, StepEvent)]
    since = done[WARM - 1].stop
    counted = [e for e in events if isinstance(e, RolloutEvent) and e.start >= since]
    generating = _metrics.measure(_metrics.spans(counted))
    table = _metrics.step_table(events)
    return {
        "steps_per_s": steps / (done[-1].stop - since),
        "rollouts_per_s": sum(e.samples for e in counted) / generating,
        "tokens_per_s": sum(e.tokens for e in counted) / generating,
        "max_staleness": int(table["staleness_max"].max()),
        "seconds_per_step": {
            name: float(table[f"{name}_s"][WARM:].mean())
            for name in PHASES
            if name != "score"
        },
    }


# A model of size ------------------------------------------------------------------------------------------------------

TOKENS = (512, 3000)
BOUNDS = (0, 1)
STEPS = 4  # counted ones; even, see above
# of a GPU's memory
ENGINE_SHARE = 0.35
TRAINER_SHARE = 0.57
EIGHT_BITS = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
# of compiled programs: JAX's, and what vLLM and torch keep
CACHES = ("JVLAB_COMPILE_CACHE", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
TEARDOWN_S = 90.0  # an engine on a GPU may hang when it ends
PROMPT_ROOM = 96  # tokens
PROMPTS = [
    f"Question {i}: how much is {i} plus {i * 7 % 31}? Think first, then answer."
    for i in range(64)
]
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
    drawn: bool = False,
    fp8: bool = False,
) -> Plain:
    """Measure; prints a line for each run, returns the facts."""
    import jvlab as jv

    device = resolve(device)
    if fp8 and device != "cuda":
        raise ConfigError(
            "vLLM has no kernels for eight bits on a CPU",
            remedy="leave --fp8 out, or --device cuda",
        )
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
        order: Plain = {
            "model": path,
            "tokens": tokens,
            "bounds": tuple(bounds),
            "steps": steps,
        }
        order |= {"device": device, "eager": eager, "scratch": scratch}
        order |= {"drawn": drawn, "fp8": fp8}
        print(
            f"bench grpo on {device}: {shape or Path(path).name}, {GROUPS} × {SAMPLES} samples a step",
            flush=True,
        )
        ours = list(_rows("jvlab", order))
        theirs, missing = _peer_rows(peer, order)
    return facts_of(ours, theirs) | {
        "model": shape or Path(path).name,
        "device": device,
        "eager": eager,
        "drawn": drawn,
        "fp8": fp8,
        "steps": steps,
        "samples_per_step": GROUPS * SAMPLES,
        **({"peer": missing or peer} if peer else {}),
    }


def one_length(
    tokens: Sequence[int] | None, usual: int, steps: int, least_steps: int = 1
) -> int:
    """The tokens of every completion, of benches that measure one length; raises on what they can't measure."""
    length, *others = tokens or (usual,)
    if steps < least_steps or length < 2 or others:
        raise ConfigError(
            f"tokens {tokens}, {steps} steps", remedy="e.g. --tokens 512 --steps 4"
        )
    return length


def folder_of(model: str | None, shape: str | None, scratch: str) -> str:
    """A model of a known shape, the one that was given, or a tiny one with digits."""
    if shape:
        return shaped_model(shape, f"{scratch}/model")
    return model_of(model, vocab_size=288)


def shaped_model(shape: str, path: str, **other: Any) -> str:
    """A model of a known shape with random weights; `other` goes into its config."""
    import jvlab as jv
    from jvlab.bench._train import QWEN3_1_7B

    if shape not in SHAPES:
        raise ConfigError(
            f"shape={shape!r}", remedy=f"one of {', '.join(SHAPES)}, or --model DIR"
        )
    return jv.models.tiny("qwen3", path, **{**QWEN3_1_7B, **other})


def _peer_rows(peer: str | None, order: Plain) -> tuple[list[Plain], str]:
    """What the peer measured, a process for each length; or why there is nothing."""
    if peer is None:
        return [], ""
    if why := missing_peer(peer, order["device"]):
        return [], why
    return [
        row for n in order["tokens"] for row in _rows(peer, {**order, "tokens": [n]})
    ], ""


def missing_peer(peer: str, device: str) -> str:
    """Why it cannot be measured here, which is printed; empty if it can."""
    if peer not in PEERS:
        raise ConfigError(f"peer={peer!r}", remedy=f"one of {', '.join(PEERS)}")
    why = "" if find_spec(peer) else f"{peer} is not installed: pip install {peer}"
    if device != "cuda":
        why = why or f"{peer} with vLLM in its process needs a GPU"
    if why:
        print(why, flush=True)
    return why


def facts_of(ours: Sequence[Plain], theirs: Sequence[Plain]) -> Plain:
    """Flat keys beside the runs themselves: step_s_512 (on-policy), step_s_512_k1, vs_trl_ratio_512, ..."""
    out: Plain = {}
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
    return out | _forecast(ours) | {"runs": [*ours, *theirs]}


def _forecast(rows: Sequence[Plain]) -> Plain:
    """How far `jv.whatif`, fitted to the on-policy runs, is from those with staleness: whatif_error_512_k1, ..."""
    import jvlab as jv

    told = [row for row in rows if "observation" in row]
    fitted = [row["observation"] for row in told if not row["max_staleness"]]
    others = [row for row in told if row["max_staleness"]]
    if not fitted or not others:
        return {}
    table = jv.whatif(*fitted).check(*[row["observation"] for row in others])
    print(table, flush=True)
    return {
        f"whatif_error_{row['tokens']}_k{row['max_staleness']}": error
        for row, error in zip(others, table.errors, strict=True)
    }


def _rows(side: str, order: Plain) -> Iterator[Plain]:
    """The results of one side, printed as they come."""
    caches = CACHES if order.get("first") else CACHES[:1]
    environment = {name: f"{order['scratch']}/{name}" for name in caches}
    ours = side == "jvlab"
    given = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if ours and not given & set(os.environ):
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(TRAINER_SHARE)
    elif not ours:  # torch trains, and JAX takes what it needs
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # TRL measures one length, on-policy; an engine in its process hangs when it ends
    count = len(order["tokens"]) * len(order["bounds"]) if ours else 1
    grace = TEARDOWN_S if ours or order.get("way") == "jvlab" else 0.0
    with Side(f"jvlab.bench._grpo:{side}_side", order, environment, grace) as process:
        for _ in range(count):
            row = process.receive()
            print(_text(row), flush=True)
            yield row


def _text(row: Plain) -> str:
    who = row["who"]
    if row.get("step_s") is None:
        parts = ", ".join(f"{name} {s:.1f}" for name, s in row["reached"].items())
        return (
            f"{who}, {row['tokens']} tokens, seconds since its process began: {parts}"
        )
    if who == "jvlab":
        who = f"jvlab, staleness ≤ {row['max_staleness']}"
    parts = _parts(row.get("seconds", {}))
    if "sync_s" in row:
        parts = f"a sync {row['sync_s']:.3f}"
    more = f" ({parts})" if parts else ""
    return f"{who}, {row['tokens']} tokens: {row['step_s']:.2f} s a step{more}; the first {row['first_step_s']:.1f} s"


# One side, in its own process -----------------------------------------------------------------------------------------


def reward_of(text: str) -> float:
    """Some number that depends on the text, so that every group has a spread."""
    return (sum(map(ord, text[:64])) % 97) / 97


def task_of(name: str) -> Any:
    """The prompts above, and a reward by the text."""
    import jvlab as jv

    return jv.Task(
        PROMPTS, lambda sample, example=None: reward_of(sample.text), name=name
    )


def jvlab_side(order: Plain, lines: Lines) -> None:
    at: dict[str, float] = {"imports": since_start()}
    mark = lambda part: at.update({part: since_start()})
    with started(order, mark) as (policy, pool, link):
        if order.get("first"):
            (tokens,) = order["tokens"]
            run_of(order, policy, pool, link, task_of("size"), tokens, 0, 0)
            mark("step")
            lines.send({"who": "jvlab", "tokens": tokens, "reached": at})
            return
        for row in jvlab_rows(order, policy, pool, link, task_of("size")):
            lines.send(row)


def engine_of(order: Plain) -> Plain:
    """Arguments of a side's engine."""
    engine: Plain = {"max_model_len": max(order["tokens"]) + PROMPT_ROOM}
    if order["device"] == "cuda":
        engine["gpu_memory_utilization"] = ENGINE_SHARE
        engine["enforce_eager"] = order["eager"]
    return engine


@contextmanager
def started(
    order: Plain, reached: Callable[[str], None] = lambda part: None
) -> Iterator[tuple[Any, Any, Any]]:
    """Policy, pool and link; says when each is there."""
    import jvlab as jv

    card = order["device"] == "cuda"
    engine = engine_of(order)
    if card:
        import jax

        if order["fp8"]:
            engine |= EIGHT_BITS
        # JAX takes its share before the engine measures what is free
        jax.block_until_ready(jax.numpy.zeros(1))
    with jv.Lab() as lab:
        pool = lab.launch(
            order["model"], load="dummy", device=order["device"], engine=engine
        )
        policy = jv.Policy.from_pretrained(
            order["model"], compute_dtype="bfloat16" if card else None
        )
        reached("policy")
        pool.wait()
        reached("engine")
        link = lab.connect(policy.params, pool, rules="policy")
        reached("link")
        yield policy, pool, link


def jvlab_rows(
    order: Plain, policy: Any, pool: Any, link: Any, task: Any
) -> Iterator[Plain]:
    """One row for each length and bound; with what `jv.whatif` reads of its record."""
    from jvlab.analysis.forecast._observe import Observation

    for tokens in order["tokens"]:
        for bound in order["bounds"]:
            record = run_of(
                order, policy, pool, link, task, tokens, bound, order["steps"] + bound
            )
            row = row_of(record.events(), tokens, bound, order["steps"])
            yield row | {"observation": Observation.of(record).to_json()}


def run_of(
    order: Plain,
    policy: Any,
    pool: Any,
    link: Any,
    task: Any,
    tokens: int,
    bound: int,
    after: int,
) -> Any:
    """The record of a run: the first step, and those after it."""
    return record_of(
        policy,
        DrawnPool(pool, tokens) if order.get("drawn") else pool,
        link,
        task,
        Path(order["scratch"]) / f"run-{tokens}-{bound}-{os.getpid()}",
        steps=1 + after,
        max_staleness=bound,
        group_size=SAMPLES,
        prompts_per_step=GROUPS,
        max_tokens=tokens,
        learning_rate=1e-6,
        sampling={"ignore_eos": True},
    )


def row_of(events: Sequence[Any], tokens: int, bound: int, steps: int) -> Plain:
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
        "effective_samples": float(np.nanmin(table["effective_samples"])),
    }


# Lengths as in life ---------------------------------------------------------------------------------------------------


class DrawnLengths:
    """Numbers of tokens after which samples end, as many at a time as are asked for: log-normal, half of them below a
    fifth of the most, about one in fifty at the most. Two with the same `most` give the same ones.
    """

    SPREAD = 0.8
    LEAST = 8

    def __init__(self, most: int) -> None:
        self.most = most
        self._random = np.random.default_rng(0)

    def next(self, count: int) -> list[int]:
        drawn = self.most / 5 * self._random.lognormal(0.0, self.SPREAD, count)
        return (
            np.clip(drawn, min(self.LEAST, self.most), self.most).astype(int).tolist()
        )


class DrawnPool:
    """A pool whose samples end after drawn numbers of tokens: each is a request of its own."""

    def __init__(self, pool: Any, most: int) -> None:
        self._pool = pool
        self._lengths = DrawnLengths(most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def agenerate(
        self, prompts: Any, n: int, *, seed: int, on_sample: Any = None, **options: Any
    ) -> Any:
        from jvlab.record._batch import RolloutBatch

        async def one(sample: int, tokens: int) -> Any:
            given = {**options, "seed": seed + sample, "max_tokens": tokens}
            (made,) = await self._pool.agenerate(prompts, n=1, **given)
            made = dataclasses.replace(made, sample_index=sample)
            if on_sample is not None:
                on_sample(made)
            return made

        lengths = self._lengths.next(n)
        return RolloutBatch(await asyncio.gather(*map(one, range(n), lengths)))


# The first step -------------------------------------------------------------------------------------------------------


def run_bench_first_step(
    model: str | None = None,
    shape: str | None = None,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    peer: str | None = None,
    eager: bool = False,
) -> Plain:
    """`jvlab bench launch --first-step`: from the start of a process to the end of its first step; returns the facts.

    One step of the work above, twice by each side: cold, without compiled programs and after the system was told to
    forget the files of this environment and of the model (what a process has mapped stays); then warm, as the same
    script started again. `reached` says after how many seconds each part was there. Ratios are TRL's seconds over ours.
    """
    device = resolve(device)
    length = one_length(tokens, TOKENS[0] if device == "cuda" else 32, 1)
    sides = ["jvlab"]
    if peer is not None and not missing_peer(peer, device):
        sides.append(peer)
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch:
        path = folder_of(model, shape, scratch)
        order: Plain = {"model": path, "tokens": [length], "first": True, "steps": 0}
        order |= {"device": device, "eager": eager, "bounds": (0,), "fp8": False}
        what = shape or Path(path).name
        print(f"bench launch to the first step on {device}: {what}", flush=True)
        runs: list[Plain] = []
        for side in sides:
            for cache in ("cold", "warm"):
                if cache == "cold":
                    forget_files([Path(path), Path(np.__file__).parents[1]])
                given = {**order, "scratch": f"{scratch}/{side}"}
                runs += [row | {"cache": cache} for row in _rows(side, given)]
    seconds = {(row["who"], row["cache"]): row["reached"]["step"] for row in runs}
    out: Plain = {}
    for (who, cache), taken in seconds.items():
        out[f"{who.lower()}_{cache}_s"] = taken
        if who != "jvlab":
            out[f"vs_trl_ratio_{cache}"] = taken / seconds["jvlab", cache]
    return out | {
        "model": what,
        "device": device,
        "eager": eager,
        "tokens": length,
        "samples_per_step": GROUPS * SAMPLES,
        "runs": runs,
    }


def forget_files(folders: Sequence[Path]) -> None:
    """Let the system forget what it keeps of these files in memory."""
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# TRL ------------------------------------------------------------------------------------------------------------------

WAYS = ("colocate", "jvlab")


def run_bench_trl(
    model: str | None = None,
    shape: str | None = None,
    tokens: Sequence[int] | None = None,
    steps: int = STEPS,
    device: str = "auto",
    eager: bool = False,
) -> Plain:
    """`jvlab bench trl`: TRL's GRPOTrainer on a pool beside TRL with vLLM in its process; prints, returns the facts.

    The work of a step is that above. Both train by the same code of TRL's, from one torch model: only who generates,
    and how the weights get there, differs. On a CPU TRL has no way of its own, and there is no ratio.
    """
    device = resolve(device)
    length = one_length(tokens, TOKENS[0] if device == "cuda" else 32, steps)
    if find_spec("trl") is None:
        raise MissingDependency("bench trl needs TRL", remedy="pip install trl==1.16.0")
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch:
        path = folder_of(model, shape, scratch)
        order = {"model": path, "tokens": [length], "bounds": (0,), "steps": steps}
        order |= {"device": device, "eager": eager, "scratch": scratch}
        what = shape or Path(path).name
        print(
            f"bench trl on {device}: {what}, {GROUPS} × {SAMPLES} samples a step",
            flush=True,
        )
        ways = WAYS if device == "cuda" else WAYS[1:]
        rows = {way: row for way in ways for row in _rows("trl", {**order, "way": way})}
    ratios = {
        f"vs_colocate_{part}_ratio": rows["colocate"][key] / rows["jvlab"][key]
        for part, key in (("step", "step_s"), ("sync", "sync_s"))
        if "colocate" in rows
    }
    return ratios | {
        "model": what,
        "device": device,
        "eager": eager,
        "steps": steps,
        "tokens": length,
        "samples_per_step": GROUPS * SAMPLES,
        "runs": list(rows.values()),
    }


def trl_side(order: Plain, lines: Lines) -> None:
    """TRL's GRPOTrainer, told to do the same work: with vLLM in its own process, or on a pool."""
    (_,) = order["tokens"]  # a wrong order ends it before seconds of imports
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ.update(alone | {"WANDB_DISABLED": "true"})
    if order.get("way", "colocate") == "colocate":
        lines.send(trl_row(order))
        return
    import jvlab as jv

    with jv.Lab() as lab:
        engine = engine_of(order)
        pool = lab.launch(
            order["model"], load="dummy", device=order["device"], engine=engine
        ).wait(progress=False)
        lines.send(trl_row(order, jv.integrations.trl.rollout_func(pool)))


def drawn_lengths(generate: Any, most: int) -> Any:
    """vLLM's `generate` for a peer that asks for one sample of each prompt: they end after drawn numbers of tokens."""
    lengths = DrawnLengths(most)

    def drawn(prompts: Any, sampling_params: Any, **options: Any) -> Any:
        assert sampling_params.n == 1
        params = [sampling_params.clone() for _ in prompts]
        for own, tokens in zip(params, lengths.next(len(prompts)), strict=True):
            own.max_tokens = tokens
        return generate(prompts, sampling_params=params, **options)

    return drawn


def trl_row(order: Plain, rollouts: Any = None) -> Plain:
    """Steps of TRL's trainer, timed; `rollouts` generates for it."""
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    (tokens,) = order["tokens"]
    card = order["device"] == "cuda"
    times: list[float] = []
    syncs: list[float] = []

    def now() -> float:
        if card:
            torch.cuda.synchronize()
        return time.perf_counter()

    class StepClock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(now())

    def timed(send: Any) -> Any:
        def sent(*args: Any) -> None:
            began = now()
            send(*args)
            syncs.append(now() - began)

        return sent

    own: Plain = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": ENGINE_SHARE,
        "vllm_max_model_length": tokens + PROMPT_ROOM,
        "vllm_importance_sampling_correction": False,
    }
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
        bf16=card,
        use_cpu=not card,
        gradient_checkpointing=True,
        **(own if rollouts is None else {}),
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
        callbacks=[StepClock()],
        rollout_func=rollouts,
    )
    if rollouts is None:
        engine: Any = trainer.vllm_generation
        engine.sync_weights = timed(engine.sync_weights)
        if order.get("drawn"):
            engine.llm.generate = drawn_lengths(engine.llm.generate, tokens)
    else:
        rollouts.transfer.send_weights = timed(rollouts.transfer.send_weights)
    start = time.perf_counter()
    trainer.train()
    seconds = np.diff([start, *times]).tolist()
    step_s = statistics.median(seconds[1:]) if order["steps"] else None
    before = since_start() - time.perf_counter()
    return {
        "who": "TRL" if rollouts is None else "TRL on a pool",
        "tokens": tokens,
        "max_staleness": 0,
        "step_s": step_s,
        "first_step_s": seconds[0],
        "reached": {"trainer": before + start, "step": before + times[0]},
        "steps_s": seconds[1:],
        "tokens_per_s": None
        if order.get("drawn") or not step_s
        else GROUPS * SAMPLES * tokens / step_s,
        # not the first, which connects
        "sync_s": statistics.median(syncs[1:] or syncs),
        "syncs_s": syncs,
        **({} if rollouts is None else _proof(rollouts)),
    }


def _proof(rollouts: Any) -> Plain:
    return {
        "syncs_verified": sum(report.verified for report in rollouts.reports),
        "transport": rollouts.link.transport,
        "meaning": rollouts.link.meaning.text,
    }

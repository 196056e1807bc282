"""`jvlab bench tunix`: Tunix' own GRPO learner with vLLM as its sampler, through a pool, beside its vanilla sampler.

One actor, optimiser, reward and seed: 8 prompts, 8 samples of each, every completion as long as it may be. Without
`--model` or `--shape` a tiny model; with `--shape qwen3-1.7b` one of size: float32 parameters, bfloat16 compute. On a
GPU vLLM runs beside the trainer with `ENGINE_SHARE` of its memory; every step's sync is verified. Each side is a
process of its own, one after the other.

(a) vs_vanilla_tokens_ratio: tokens per second while generating, over the vanilla sampler's.
(b) vs_vanilla_step_ratio: seconds of a whole step of the vanilla sampler, over ours.

The first step compiles, and is reported on its own; the others count by their median. A tiny model on a CPU is the best
case for a compiled program: no other process, no sync, no scheduler, all rows end together.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab._files import Plain
from jvlab.bench._grpo import (
    ENGINE_SHARE,
    GROUPS,
    PROMPTS,
    SAMPLES,
    TEARDOWN_S,
    TRAINER_SHARE,
    one_length,
    resolve,
    reward_of,
    shaped_model,
)
from jvlab.bench._side import Lines, Side

STEPS = 4  # counted ones
TOKENS = {"cpu": 32, "cuda": 512}
PROMPT_ROOM = 64  # tokens
THETA = 1_000_000.0  # by which Tunix 0.1.7's Qwen3 rotates, whatever its config says
TINY: Plain = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 288,
    "tie_word_embeddings": True,
    "rope_theta": THETA,
}


def run_bench_tunix(
    model: str | None = None,
    shape: str | None = None,
    tokens: Sequence[int] | None = None,
    steps: int = STEPS,
    device: str = "auto",
    eager: bool = False,
    train: bool = True,
) -> Plain:
    """Measure both sides; prints a line for each, returns the facts. Without `train` they only generate."""
    if find_spec("tunix") is None:
        raise MissingDependency(
            "bench tunix needs Tunix",
            remedy='pip install "jvlab[tunix]", then pip install --no-deps google-tunix==0.1.7',
        )
    device = resolve(device)
    # a step ends with the generation of the next
    length = one_length(tokens, TOKENS[device], steps, least_steps=2)
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch:
        order = {
            "model": _folder(model, shape, scratch),
            "tokens": length,
            "steps": steps,
            "device": device,
            "eager": eager,
            "train": train,
        }
        what = shape or Path(order["model"]).name
        print(
            f"bench tunix on {device}: {what}, {GROUPS} × {SAMPLES} samples of {length} tokens a step",
            flush=True,
        )
        ours, theirs = (_row(who, order) for who in ("jvlab", "vanilla"))
    return {
        "vs_vanilla_tokens_ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "vs_vanilla_step_ratio": theirs["step_s"] / ours["step_s"] if train else None,
        "model": what,
        "device": device,
        "eager": eager,
        "steps": steps,
        "tokens": length,
        "samples_per_step": GROUPS * SAMPLES,
        "runs": [ours, theirs],
    }


def _folder(model: str | None, shape: str | None, scratch: str) -> str:
    """A model for both sides: one given, one of a known shape, or a tiny one."""
    import jvlab as jv

    if model is not None:
        return jv.models.resolve(model)
    if shape is None:
        return jv.models.tiny("qwen3", **TINY)
    return shaped_model(shape, f"{scratch}/model", rope_theta=THETA)


def _row(who: str, order: Plain) -> Plain:
    environment = {}
    if order["device"] == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    elif who == "jvlab":
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(TRAINER_SHARE)
    grace = TEARDOWN_S if who == "jvlab" else 0.0
    with Side(
        "jvlab.bench._tunix:tunix_side", {**order, "who": who}, environment, grace
    ) as process:
        row = process.receive()
    said = f"{who}: {row['tokens_per_s']:,.0f} tokens/s while generating"
    if order["train"]:
        said += f", {row['step_s']:.2f} s a step, the first {row['first_step_s']:.1f} s"
        said += f"; reward {row['rewards'][0]:.3f} → {row['rewards'][-1]:.3f}"
    if row["sync_s"] is not None:
        said += f"; a sync {row['sync_s']:.3f} s"
    print(said, flush=True)
    return row


# One side, in its own process -----------------------------------------------------------------------------------------


def tunix_side(order: Plain, lines: Lines) -> None:
    import jax

    if order["who"] == "vanilla":
        lines.send(measure(order, "vanilla"))
        return
    import jvlab as jv

    engine: Plain = {"max_model_len": PROMPT_ROOM + order["tokens"]}
    if order["device"] == "cuda":
        engine |= {
            "gpu_memory_utilization": ENGINE_SHARE,
            "enforce_eager": order["eager"],
        }
        # JAX takes its share before the engine measures what is free
        jax.block_until_ready(jax.numpy.zeros(1))
    with jv.Lab() as lab:
        pool = lab.launch(
            order["model"], load="dummy", device=order["device"], engine=engine
        ).wait(progress=False)
        rollout = functools.partial(jv.integrations.tunix.Rollout, pool=pool)
        lines.send(measure(order, rollout))


def measure(order: Plain, engine: Any) -> Plain:
    """Steps of Tunix' GRPO with this rollout engine, or its generations alone, timed."""
    import optax
    from transformers import AutoTokenizer
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = one_device()
    roles = (
        rl_cluster.Role.ACTOR,
        rl_cluster.Role.REFERENCE,
        rl_cluster.Role.ROLLOUT,
    )
    steps = 1 + order["steps"]
    # nothing ends a completion early: the two samplers have different switches for it
    ends: Plain = (
        {"eos_tokens": [-1]}
        if engine == "vanilla"
        else {"rollout_vllm_sampling_kwargs": {"ignore_eos": True}}
    )
    cluster = rl_cluster.RLCluster(
        actor=actor_of(
            order["model"], mesh, "bfloat16" if order["device"] == "cuda" else "float32"
        ),
        reference=None,
        tokenizer=AutoTokenizer.from_pretrained(order["model"]),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=engine,
            training_config=rl_cluster.RLTrainingConfig(
                eval_every_n_steps=10**9,
                max_steps=steps,
                actor_optimizer=optax.adam(1e-5),
                # a group at a time: logits of all of them would not fit
                mini_batch_size=GROUPS,
                train_micro_batch_size=1,
                rollout_micro_batch_size=GROUPS,
                compute_logps_micro_batch_size=GROUPS,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=order["tokens"],
                max_prompt_length=PROMPT_ROOM,
                kv_cache_size=PROMPT_ROOM + order["tokens"],
                temperature=1.0,
                return_logprobs=True,
                **ends,
            ),
        ),
    )
    times: list[float] = []
    rewards: list[float] = []
    generated: list[tuple[float, int]] = []
    generate = cluster.rollout.generate

    who = "vanilla" if engine == "vanilla" else "jvlab"

    def timed_generate(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = generate(*args, **options)
        generated.append((time.perf_counter() - start, sum(map(len, out.tokens))))
        seconds, count = generated[-1]
        print(f"  {who}: {count:,} tokens in {seconds:.1f} s", file=sys.stderr)
        return out

    def reward(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
        times.append(time.perf_counter())
        found = [reward_of(text) for text in completions]
        rewards.append(float(np.mean(found)))
        return found

    cluster.rollout.generate = timed_generate
    prompts = np.array(PROMPTS[:GROUPS])
    if not order["train"]:
        repeated = np.repeat(prompts, SAMPLES).tolist()
        with mesh:
            for _ in range(steps):
                timed_generate(repeated, cluster.cluster_config.rollout_config)
        return {"who": who, **_sampling_row(generated, cluster.rollout)}
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=SAMPLES, num_iterations=1, beta=0.0
        ),
        reward_fns=reward,
    )
    start = time.perf_counter()
    learner.train([{"prompts": prompts} for _ in range(steps)])
    # a step is from the end of one generation to the end of the next; the last has no next one
    whole = np.diff(times).tolist()
    return {
        "who": who,
        "step_s": statistics.median(whole[1:]),
        "first_step_s": times[0] - start + whole[0],
        "steps_s": whole,
        "rewards": rewards,
        **_sampling_row(generated, cluster.rollout),
    }


def _sampling_row(generated: list[tuple[float, int]], rollout: Any) -> Plain:
    """What both kinds of measurement say; the first generation compiles."""
    counted = generated[1:]
    reports = getattr(rollout, "reports", None)
    synced = [] if reports is None else [r.seconds["total"] for r in reports[1:]]
    return {
        "generate_s": statistics.median(seconds for seconds, _ in counted),
        "tokens_per_s": statistics.median(n / seconds for seconds, n in counted),
        "tokens_per_step": counted[-1][1],
        "sync_s": statistics.median(synced) if synced else None,
        "syncs_verified": None if reports is None else sum(r.verified for r in reports),
        "meaning": None if reports is None else rollout.link.meaning.text,
        "cores": os.cpu_count(),
    }


def one_device() -> Any:
    """A mesh of one device, under the names that Tunix' models shard by."""
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def actor_of(folder: str, mesh: Any, dtype: str = "float32", seed: int = 0) -> Any:
    """Tunix' Qwen3 of the shapes of a model folder, with first values of its own; it computes in `dtype`."""
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = json.loads(Path(folder, "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    shapes = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(theta),
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=config["tie_word_embeddings"],
        dtype=jnp.dtype(dtype),
    )
    with mesh:
        return qwen3.Qwen3(shapes, rngs=nnx.Rngs(seed))

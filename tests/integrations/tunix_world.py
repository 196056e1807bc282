"""Tunix' own models, clusters and learners at a tiny size, for tests with a fake pool and with a real one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout.base_rollout import RolloutConfig

from jvlab.bench._tunix import TINY, actor_of

Role = rl_cluster.Role
SIZES = {**TINY, "num_hidden_layers": 1}  # most of the time is spent on compiling
PROMPTS = ["Digits:", "Numbers:", "12", "Say:"]


def mesh(axes: tuple[str, ...] = ("fsdp", "tp")) -> jax.sharding.Mesh:
    """One device, under these names."""
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(axes))
    return jax.sharding.Mesh(devices, axes)


def qwen3_actor(folder: str, seed: int = 0) -> Any:
    """Tunix' Qwen3 of the shapes of a model folder, with values of its own."""
    return actor_of(folder, mesh(), seed=seed)


def letters(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of ASCII letters in a completion."""
    return [
        sum(c.isalpha() and c.isascii() for c in text) / max(1, len(text))
        for text in completions
    ]


def cluster_of(
    actor: Any, tokenizer: Any, engine: Any, steps: int = 2, **options: Any
) -> Any:
    """A cluster whose roles share a mesh, unless `meshes` says otherwise."""
    meshes = options.pop("meshes", {})
    training = options.pop("training", {})
    offload = options.pop("offload_to_cpu", False)
    rate = options.pop("learning_rate", 3e-3)
    rollout = RolloutConfig(
        **{
            "max_tokens_to_generate": 16,
            "max_prompt_length": 16,
            "kv_cache_size": 64,
            "temperature": 1.0,
            "return_logprobs": True,
            **options,
        }
    )
    shared = mesh()
    return rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                role: meshes.get(role, shared)
                for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
            },
            rollout_engine=engine,
            offload_to_cpu=offload,
            training_config=rl_cluster.RLTrainingConfig(
                eval_every_n_steps=1000,
                max_steps=steps,
                actor_optimizer=optax.adam(rate),
                **training,
            ),
            rollout_config=rollout,
        ),
    )


def learner_of(cluster: Any, group: int = 4, **options: Any) -> Any:
    """GRPO on it; `metric_fns` and the like go to the learner, the rest to its config."""
    own = {k: options.pop(k) for k in ("metric_fns",) if k in options}
    reward = options.pop("reward", letters)
    config = grpo_learner.GRPOConfig(
        **{"num_generations": group, "num_iterations": 1, "beta": 0.0, **options}
    )
    return grpo_learner.GRPOLearner(
        rl_cluster=cluster, algo_config=config, reward_fns=reward, **own
    )


def batches(steps: int, prompts: list[str] = PROMPTS) -> list[dict[str, Any]]:
    return [{"prompts": np.array(prompts)} for _ in range(steps)]


def rollout_on(pool: Any, **options: Any) -> functools.partial[Any]:
    """What a user writes."""
    import jvlab as jv

    return functools.partial(jv.integrations.tunix.Rollout, pool=pool, **options)

"""`Setting`: the sizes of a GRPO run that a forecast can change."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jvlab._errors import ConfigError

# `StepCosts`: what each part of a GRPO step costs, and the cost of a batch on one engine from them.

GENERATION = ("request", "sample", "prompt", "step", "row", "context")
TRAINING = ("train", "train_token", "train_context")
SYNC = ("sync", "sync_replica")
REWARD = ("reward", "reward_sample")

# on a device: the share of its time that is wanted; an engine's number, None: trainer
Claim = tuple[float, int | None]


@dataclass(frozen=True)
class StepCosts:
    """Seconds. A step of an engine with n rows and c tokens of context in all takes step + row · n + context · c."""

    request: float  # of a group, beside the engine's work: the way there and back
    sample: float  # of a sample that an engine takes in
    prompt: float  # of a prompt's token that is not in the prefix cache
    step: float  # of one decoding step, whatever it holds
    row: float  # more, for each sample in it
    context: float  # more, for each token that it attends to
    train: float  # of an optimiser step, whatever it holds
    train_token: float  # more, for each token computed, padding included
    # more, for each token times the tokens that its attention spans
    train_context: float
    sync: float  # of a weight sync
    sync_replica: float  # more, for each replica
    pause: float  # share of a sync in which engines stand still
    reward: float  # from a group's last token to its rewards
    reward_sample: float  # more, for each of its samples
    take: float  # from the last reward to the start of training
    hand: float  # from the end of training to the sync
    resume: float  # from the sync to the first request
    # share of a shared device's time that one engine at work takes if nobody else wants it
    engine_load: float
    train_load: float  # and the trainer
    # of the shared device, which replicas have to themselves; 1: they share it, as on an accelerator
    cores: int = 1

    def admission(self, samples: float, computed: float) -> float:
        """An engine's work when it takes in samples with so many prompt tokens to compute."""
        return self.sample * samples + self.prompt * computed

    def decoding(self, steps: float, rows: float, context: float) -> float:
        """An engine's work for some steps, with `context` tokens at the first; each row grows by one token a step."""
        return steps * (
            self.step + self.row * rows + self.context * (context + rows * steps / 2)
        )

    def steps_within(self, work: float, rows: float, context: float) -> float:
        """How many decoding steps an amount of work is: the inverse of `decoding`."""
        first = self.step + self.row * rows + self.context * context
        growth = self.context * rows / 2
        if growth * work < 1e-12 * first * first:
            return work / first if first > 0 else math.inf
        return (math.sqrt(first * first + 4 * growth * work) - first) / (2 * growth)

    def training(self, tokens: float, span: float) -> float:
        """The trainer's work for so many computed tokens, each of which attends over `span` tokens."""
        return self.train + tokens * (self.train_token + self.train_context * span)

    def syncing(self, replicas: int) -> float:
        """Seconds of one sync."""
        return self.sync + self.sync_replica * replicas

    def rewarding(self, samples: int) -> float:
        """Seconds from a group's last token to its rewards."""
        return self.reward + self.reward_sample * samples


def speeds(claims: Sequence[Claim], cores: int = 1) -> list[float]:
    """How fast activities on one device go, 1 being as fast as alone.

    Each core is divided fairly: who wants less than an equal part gets all of that, the others share the rest. A claim
    above 1 is of an activity that takes longer beside others, as caches are cold when its turn comes. An engine is
    bound to cores of its own while there are enough. The trainer computes on all cores in step: it advances while it
    has all of them at once, and what engines do on different cores is independent.
    """
    found = [1.0] * len(claims)
    for core in {number % cores for _, number in claims if number is not None}:
        here = [
            i
            for i, (_, number) in enumerate(claims)
            if number is None or number % cores == core
        ]
        left = 1.0
        count = len(here)
        if count == 1:
            continue
        for i in sorted(here, key=lambda i: claims[i][0]):
            got = min(claims[i][0], left / count)
            found[i] *= got / claims[i][0]
            left = left - got
            count = count - 1
    return found


# ----------------------------------------------------------------------------------------------------

PLACEMENTS = ("shared", "trainer apart", "apart")
MOST_PROMPT_TOKENS = 1 << 24
LIMITS = {
    "prompts_per_step": 4096,
    "group_size": 4096,
    "max_tokens": 1 << 20,
    "max_staleness": 64,
    "replicas": 1024,
}


@dataclass(frozen=True)
class Setting:
    """A run's sizes, named as in `jv.grpo` and `lab.launch`.

    `placement` says who shares a device: "shared" (trainer and engines on one, as on a CPU), "trainer apart" (the
    trainer has one of its own, the engines share another) or "apart" (each its own). `prompt_tokens` is the mean length
    of a prompt.
    """

    prompts_per_step: int
    group_size: int
    max_tokens: int
    max_staleness: int = 0
    replicas: int = 1
    prompt_tokens: float = 0.0
    placement: str = "shared"

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = getattr(self, name)
            least = 0 if name == "max_staleness" else 1
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not least <= value <= most
            ):
                raise ConfigError(
                    f"{name}={value!r}",
                    remedy=f"a whole number from {least} to {most}",
                    field=name,
                )
        tokens = self.prompt_tokens
        if (
            isinstance(tokens, bool)
            or not isinstance(tokens, (int, float))
            or not 0 <= tokens <= MOST_PROMPT_TOKENS
        ):
            raise ConfigError(
                f"prompt_tokens={tokens!r}",
                remedy=f"a number from 0 to {MOST_PROMPT_TOKENS}",
            )
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement={self.placement!r}",
                remedy=f"one of {', '.join(map(repr, PLACEMENTS))}",
            )

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts_per_step * self.group_size

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return {"shared": 1, "trainer apart": 2, "apart": 1 + self.replicas}[
            self.placement
        ]

    def changed(self, **changes: Any) -> Setting:
        """The same with other values; a wrong name is refused with the nearest right one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"a forecast has no setting {name!r}"
                    + (f"; did you mean {near[0]!r}?" if near else ""),
                    remedy=f"one of {', '.join(known)}",
                )
        return replace(self, **changes)

    def __str__(self) -> str:
        size = f"{self.prompts_per_step} × {self.group_size} samples of ≤ {self.max_tokens} tokens"
        replicas = f"{self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{size}, K = {self.max_staleness}, {replicas}, {self.placement}"

"""`Rates`: what each part of a GRPO step costs, and the cost of a batch on one engine from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

GENERATION = ("request", "sample", "prompt", "step", "row", "context")
TRAINING = ("train", "train_token", "train_context")
SYNC = ("sync", "sync_replica")
REWARD = ("reward", "reward_sample")


@dataclass(frozen=True)
class Rates:
    """Seconds. A step of an engine with n rows and c tokens of context in all takes step + row · n + context · c."""

    request: float  # of a group, beside the engine's work: the way there and back
    sample: float  # of a sample that an engine takes in
    prompt: float  # of a prompt's token that is not in the prefix cache
    step: float  # of one decoding step, whatever it holds
    row: float  # more, for each sample in it
    context: float  # more, for each token that it attends to
    train: float  # of an optimiser step, whatever it holds
    train_token: float  # more, for each token computed, padding included
    train_context: float  # more, for each token times the length of its sample
    sync: float  # of a weight sync
    sync_replica: float  # more, for each replica
    pause: float  # share of a sync in which engines stand still
    reward: float  # from a group's last token to its rewards
    reward_sample: float  # more, for each of its samples
    take: float  # from the last reward to the start of training
    hand: float  # from the end of training to the sync
    resume: float  # from the sync to the first request
    engine_load: float  # share of a shared device that one engine at work takes
    train_load: float  # and the trainer

    def admission(self, samples: float, computed: float) -> float:
        """An engine's work when it takes in samples with so many prompt tokens to compute."""
        return self.sample * samples + self.prompt * computed

    def decoding(self, steps: float, rows: float, context: float) -> float:
        """An engine's work for some steps, with `context` tokens at the first; each row grows by one token a step."""
        return steps * (self.step + self.row * rows + self.context * (context + rows * steps / 2))

    def steps_within(self, work: float, rows: float, context: float) -> float:
        """How many decoding steps an amount of work is: the inverse of `decoding`."""
        first, growth = self.step + self.row * rows + self.context * context, self.context * rows / 2
        if growth * work < 1e-12 * first * first:
            return work / first if first > 0 else math.inf
        return (math.sqrt(first * first + 4 * growth * work) - first) / (2 * growth)

    def training(self, tokens: float, length: float) -> float:
        """The trainer's work for so many computed tokens, in samples of this mean length."""
        return self.train + tokens * (self.train_token + self.train_context * length)

    def syncing(self, replicas: int) -> float:
        """Seconds of one sync."""
        return self.sync + self.sync_replica * replicas

    def rewarding(self, samples: int) -> float:
        """Seconds from a group's last token to its rewards."""
        return self.reward + self.reward_sample * samples

    @staticmethod
    def speed(*loads: float) -> float:
        """How fast activities on one device go: each gets its share once they want more than there is."""
        return 1.0 / max(1.0, sum(loads))

"""Closed forms of a step's time beside the simulation: exact on-policy, bounds where phases overlap.

On-policy a step is a sum. With K > 0 the operational laws of queueing hold: no step is shorter than what the busiest of
trainer, engines and shared device has to do for it; and overlapping makes it no longer than doing one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jvlab.forecast._rates import Rates
from jvlab.forecast._setting import Setting
from jvlab.forecast._simulate import BatchShape


@dataclass(frozen=True)
class Bounds:
    """No step is shorter than `low` or longer than `high` seconds; on-policy both are its time."""

    low: float
    high: float


def closed_form(setting: Setting, rates: Rates, lengths: Sequence[int], shape: BatchShape) -> Bounds:
    """Bounds of a step's seconds; `lengths` are the tokens of one step's samples."""
    training = rates.training(*shape.computed(setting, sum(lengths)))
    alone = training / Rates.speed(rates.train_load)
    trainer = rates.take + alone + rates.hand + rates.syncing(setting.replicas)
    around = rates.resume + rates.request + rates.rewarding(setting.group_size)
    strict = trainer + around + _generation(setting, rates, lengths, shape, 1) / _engine_speed(setting, rates)
    if setting.max_staleness == 0:
        return Bounds(strict, strict)
    batches = setting.max_staleness + 1
    engines = _generation(setting, rates, lengths, shape, batches) / batches
    together = 0.0
    if setting.placement == "shared":  # what all want of the one device
        together = setting.replicas * rates.engine_load * engines + rates.train_load * training
    return Bounds(max(trainer, engines / _engine_speed(setting, rates), together), strict)


def _engine_speed(setting: Setting, rates: Rates) -> float:
    """Of one engine while all of them work and the trainer does not."""
    return Rates.speed(*[rates.engine_load] * (1 if setting.placement == "apart" else setting.replicas))


def _generation(setting: Setting, rates: Rates, lengths: Sequence[int], shape: BatchShape, batches: int) -> float:
    """The busiest engine's work for so many batches at once: groups in turn to each, all rows from the start."""
    size = setting.group_size
    groups = [list(lengths[i : i + size]) for i in range(0, len(lengths), size)] * batches
    most = 0.0
    for first in range(setting.replicas):
        own = groups[first :: setting.replicas]
        rows = sorted(n for group in own for n in group)
        work = rates.admission(len(rows), len(own) * shape.computed_prompt(setting))
        done = 0
        for at, length in enumerate(rows):
            left = len(rows) - at
            work += rates.decoding(length - done, left, left * (setting.prompt_tokens + done))
            done = length
        most = max(most, work)
    return most

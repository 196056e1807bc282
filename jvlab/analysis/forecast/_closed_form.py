"""Closed forms of a step's time beside the simulation: exact on-policy, bounds where phases overlap.

On-policy a step is a sum. With K > 0 the operational laws of queueing hold: no step is shorter than what the busiest of
trainer, engines and shared device has to do for it; and overlapping makes it no longer than doing one after the other,
with engines as slow as they are beside the trainer where sharing loses time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jvlab.analysis.forecast._rates import Claim, Rates, speeds
from jvlab.analysis.forecast._setting import Setting
from jvlab.analysis.forecast._simulate import BatchShape


@dataclass(frozen=True)
class Bounds:
    """No step is shorter than `low` or longer than `high` seconds; on-policy both are its time."""

    low: float
    high: float


def closed_form(setting: Setting, rates: Rates, lengths: Sequence[int], shape: BatchShape) -> Bounds:
    """Bounds of a step's seconds; `lengths` are the tokens of one step's samples."""
    training = rates.training(*shape.computed(setting, sum(lengths)))
    trainer = rates.take + training + rates.hand + rates.syncing(setting.replicas)
    around = rates.resume + rates.rewarding(setting.group_size)
    engine = rates.request + _generation(setting, rates, lengths, shape, 1)
    strict = trainer + around + engine / _engine_speed(setting, rates)
    if setting.max_staleness == 0:
        return Bounds(strict, strict)
    batches = setting.max_staleness + 1
    engines = _generation(setting, rates, lengths, shape, batches) / batches
    together = 0.0
    if setting.placement == "shared":  # what all want of one device, or of the core that most want
        sharing = math.ceil(setting.replicas / rates.cores)
        together = sharing * min(rates.engine_load, 1.0) * engines + min(rates.train_load, 1.0) * training
    engine += rates.admission(*shape.probe(setting, lengths)) / setting.replicas
    loses = rates.cores > 1 or max(rates.engine_load, rates.train_load) > 1
    slow = _engine_speed(setting, rates, setting.placement == "shared" and loses)
    return Bounds(max(trainer, engines / _engine_speed(setting, rates), together), trainer + around + engine / slow)


def _engine_speed(setting: Setting, rates: Rates, training: bool = False) -> float:
    """Of the slowest engine while all of them work, beside the trainer or not."""
    count = 1 if setting.placement == "apart" else setting.replicas
    claims: list[Claim] = [(rates.engine_load, i) for i in range(count)]
    return min(speeds([*claims, *[(rates.train_load, None)] * training], rates.cores)[:count])


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

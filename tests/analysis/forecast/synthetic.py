"""Records of runs that never were: the simulation with known rates, written as the events of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jvlab.analysis.forecast._simulate import BatchShape, Setting, StepCosts, _Loop
from jvlab.record._events import (
    RewardEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    ScoreEvent,
    StepEvent,
    SyncEvent,
)
from jvlab.record._record import Record

BUDGET = 2048  # tokens of a micro-batch, where a record tells how rows were laid

RATES = StepCosts(
    request=0.02,
    sample=0.001,
    prompt=2e-5,
    step=0.006,
    row=2e-4,
    context=2e-7,
    train=0.05,
    train_token=6e-5,
    train_context=1e-8,
    sync=0.03,
    sync_replica=0.02,
    pause=0.8,
    reward=0.01,
    reward_sample=0.0005,
    take=0.004,
    hand=0.002,
    resume=0.003,
    engine_load=0.7,
    train_load=0.9,
    cores=1,
)


def setting(
    prompts: int = 8,
    group: int = 4,
    tokens: int = 64,
    bound: int = 0,
    replicas: int = 1,
) -> Setting:
    return Setting(prompts, group, tokens, bound, replicas, 30.0)


def record(
    wanted: Setting,
    rates: StepCosts = RATES,
    steps: int = 14,
    noise: float = 0.0,
    seed: int = 0,
    lengths: Any = None,
    rows: tuple[float, float] | None = None,
) -> Record:
    """A run with this setting; `noise`: the standard deviation of each duration, relative.

    `rows` are the padding and the length of the trainer's rows; None: the record does not tell.
    """
    random = np.random.default_rng(seed)
    drawn = lengths or (lambda count: [wanted.max_tokens] * count)
    loop = _Loop(
        wanted, rates, drawn, BatchShape(0.0, *rows) if rows else BatchShape(), steps
    )
    loop.env.run(until=loop.env.process(loop.train()))
    return Record.of(_events(loop, wanted, random, noise))


def _events(
    loop: _Loop, wanted: Setting, random: np.random.Generator, noise: float
) -> Sequence[Any]:
    config = {
        "prompts_per_step": wanted.prompts_per_step,
        "group_size": wanted.group_size,
        "max_staleness": wanted.max_staleness,
        "sampling": {"max_tokens": wanted.max_tokens},
        "cores": loop.rates.cores,
    }
    shape = loop.shape
    told = {
        "row_length": shape.span,
        "token_budget": BUDGET,
        "short_rows": True,
        "padding": shape.padding,
    }
    slow = lambda start, stop: (
        start + (stop - start) * (1 + noise * abs(random.standard_normal()))
    )
    found: list[Any] = []
    for group in loop.groups:
        start, stop, rewarded = group.times
        later = slow(start, stop) - stop
        stop, rewarded = stop + later, rewarded + later
        about: dict[str, Any] = {
            "samples": len(group.lengths),
            "groups": (group.index,),
        }
        versions = {v: round(n) for v, n in group.versions.items()}
        prompts = round(wanted.prompt_tokens * len(group.lengths))
        found.append(
            RolloutEvent(
                actor=f"pool/{group.replica}",
                start=start,
                stop=stop,
                tokens=sum(group.lengths),
                prompt_tokens=prompts,
                versions=versions,
                **about,
            )
        )
        found.append(RewardEvent(start=stop, stop=rewarded, mean=0.5, **about))
    order = [g.index for g in sorted(loop.groups, key=lambda g: g.index)]
    size = wanted.prompts_per_step
    for number, ((start, stop), (counts, version)) in enumerate(
        zip(loop.spans["train"], loop.taken, strict=False)
    ):
        found.append(
            StepEvent(
                start=start,
                stop=stop,
                step=number,
                version=version,
                tokens=round(sum(counts.values())),
                samples=wanted.samples,
                versions={v: round(n) for v, n in counts.items()},
                groups=tuple(order[number * size : (number + 1) * size]),
                extra=told if shape.span else {},
            )
        )
    for start, stop in loop.spans["score"]:
        samples, tokens = shape.probe(wanted, loop.groups[0].lengths)
        found.append(
            ScoreEvent(
                start=start,
                stop=stop,
                what="probe",
                samples=int(samples),
                tokens=int(tokens),
            )
        )
    names = tuple(f"pool/{i}" for i in range(wanted.replicas))
    for version, (start, stop) in enumerate(loop.spans["sync"], 1):
        pause = (stop - start) * loop.rates.pause
        found.append(
            SyncEvent(
                start=start, stop=stop, version=version, pause=pause, replicas=names
            )
        )
    found.sort(key=lambda e: e.stop)
    last = max(e.stop for e in found)
    return [
        RunStart(
            actor="trainer",
            run="synthetic",
            wall=0.0,
            config=config,
            start=0.0,
            stop=0.0,
        ),
        *found,
        RunStop(actor="trainer", start=last, stop=last),
    ]

"""Made-up runs: on-policy or overlapping, one replica or more, with a few faults."""

from __future__ import annotations

import numpy as np

from jvlab.record._events import (
    Event,
    FaultEvent,
    PauseEvent,
    RewardEvent,
    RolloutEvent,
    RunStart,
    RunStop,
    ScoreEvent,
    StepEvent,
    SyncEvent,
)

ORIGIN = 5000.0  # of the monotonic clock: not zero, so that a missing shift shows
WALL = 1.7e9
BY_STALENESS = {
    s: {"p01": 1 - 0.08 * (s + 1), "p50": 1.0, "p99": 1 + 0.1 * (s + 1)}
    for s in range(3)
}


def start(
    run: str = "made-up",
    at: float = ORIGIN,
    wall: float = WALL,
    gap_alarm: float = 1e-3,
) -> RunStart:
    return RunStart(
        run=run, start=at, stop=at, wall=wall, gap_alarm=gap_alarm, actor="trainer"
    )


def made_up(
    steps: int = 200, staleness: int = 0, replicas: int = 2, seed: int = 0
) -> list[Event]:
    """A run whose reward rises; rollouts of step i start `staleness` steps ahead of the training that uses them."""
    rng = np.random.default_rng(seed)
    events: list[Event] = [start()]
    free = [ORIGIN + 0.3] * replicas  # when each replica can start again
    trained = synced = ORIGIN + 0.3
    sync_done = [synced]  # time from which version v is served
    for step in range(steps):
        behind = max(step - staleness, 0)
        versions: dict[int, int] = {}
        ready = 0.0
        for r in range(replicas):
            begin = max(free[r], sync_done[behind])
            tokens = int(rng.integers(700, 1100))
            stop = begin + float(rng.uniform(0.8, 1.3))
            have = sum(t <= begin for t in sync_done) - 1
            later = sum(t < stop for t in sync_done) - 1
            split = (
                {have: tokens}
                if have == later
                else {have: tokens // 2, later: tokens - tokens // 2}
            )
            events.append(
                RolloutEvent(
                    actor=f"pool/{r}",
                    start=begin,
                    stop=stop,
                    samples=16,
                    tokens=tokens,
                    versions=split,
                    groups=tuple(range(step * 4, step * 4 + 4)),
                    finish={"stop": 12, "length": 4},
                )
            )
            for v, n in split.items():
                versions[v] = versions.get(v, 0) + n
            free[r] = stop
            ready = max(ready, stop)
        level = (
            0.15
            + 0.75 / (1 + np.exp(-(step - 0.4 * steps) / (0.08 * steps + 1)))
            + rng.normal(0, 0.03)
        )
        scored = ready + 0.15
        events.append(
            RewardEvent(
                start=ready,
                stop=scored,
                samples=16 * replicas,
                mean=level,
                failures=int(step % 50 == 7),
            )
        )
        if step % 40 == 20:
            events.append(
                ScoreEvent(
                    actor="pool/0",
                    start=ready,
                    stop=ready + 0.1,
                    samples=16,
                    tokens=900,
                )
            )
        begin = max(scored, synced)
        trained = begin + float(rng.uniform(0.6, 0.8))
        fresh = versions.get(step, 0) > 0
        gap = float(10 ** rng.normal(-4.2, 0.25)) if fresh else float("nan")
        if step == int(0.7 * steps) and steps > 20:
            gap = 4e-3
        events.append(
            StepEvent(
                step=step,
                version=step,
                start=begin,
                stop=trained,
                loss=float(rng.normal(0, 0.02)),
                reward_mean=level,
                reward_std=0.35 * (1 - level) + 0.05,
                kl=0.002 * step / steps + 1e-4,
                entropy=2.5 * (1 - 0.7 * step / steps) + float(rng.normal(0, 0.03)),
                grad_norm=float(rng.uniform(0.3, 1)),
                ratios_by_staleness=BY_STALENESS if staleness else {},
                ratios={"mean": 1.0, "p01": 0.8, "p50": 1.0, "p99": 1.25, "max": 2.0},
                clip_fraction=0.02,
                logprob_gap=gap,
                logprob_gap_mean=gap / 20,
                tokens=sum(versions.values()),
                samples=16 * replicas,
                versions=versions,
                learning_rate=1e-4,
                skipped=step == int(0.85 * steps) and steps > 20,
            )
        )
        synced = trained + float(rng.uniform(0.1, 0.14))
        names = tuple(f"pool/{r}" for r in range(replicas))
        events.append(
            PauseEvent(
                start=trained + 0.02,
                stop=synced - 0.02,
                replicas=names,
                mode="keep",
                why="sync",
            )
        )
        events.append(
            SyncEvent(
                version=step + 1,
                start=trained,
                stop=synced,
                bytes=int(4e7),
                verified=True,
                pause=0.08,
                replicas=names,
                phases={"pack": 0.02, "move": 0.06, "digest": 0.02, "commit": 0.02},
                mode="direct",
                transport="shm",
            )
        )
        sync_done.append(synced)
        if steps > 20 and step == int(0.3 * steps):
            events.append(
                FaultEvent(
                    fault="replica lost",
                    who="pool/1",
                    text="killed",
                    start=synced,
                    stop=synced,
                )
            )
    events.append(RunStop(start=synced + 0.1, stop=synced + 0.1, actor="trainer"))
    return events

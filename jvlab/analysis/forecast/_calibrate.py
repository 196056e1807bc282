"""Fits `StepCosts` to records: the work of engines and trainer, what they take from each other, the moments between.

While two activities share a device, each gets its share of it; an activity's *work* is the seconds it would have taken
alone. Work is a sum of `StepCosts`, so that for given loads the fit is linear. The loads are those, on a grid,
that leave the smallest errors. What the records do not show, such as the cost of a larger batch if all batches were of
one size, is held by a wide prior, and by wide intervals: every draw of `draws` is a fit to resampled steps, with loads
and prior drawn anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.analysis.forecast._observe import GroupRow, Observation
from jvlab.analysis.forecast._simulate import (
    GENERATION,
    REWARD,
    SYNC,
    TRAINING,
    StepCosts,
    speeds,
)
from jvlab.record._metrics import split_time, union

# Non-negative least squares with a prior, for many weightings at once: numpy only.

SWEEPS = 400  # of coordinate descent; problems have at most six unknowns
ROUNDS = 4  # of a fit, with the weights and expectations of the one before
CLOSE = 1e-6  # shares that change by less are found


def nonnegative(
    design: np.ndarray, target: np.ndarray, mean: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """The z ≥ 0 with the least |design z − target|² + |(z − mean) / spread|², for each of B problems.

    `design` is [B, rows, k], `target` [B, rows], both divided by the noise; `mean` and `spread` [k] or [B, k].
    """
    precision = np.broadcast_to(1.0 / np.square(spread), (len(design), design.shape[2]))
    matrix = np.einsum("bri,brj->bij", design, design)
    index = np.arange(design.shape[2])
    matrix[:, index, index] += precision
    side = np.einsum("bri,br->bi", design, target) + precision * mean
    found = np.linalg.solve(matrix, side[..., None])[..., 0]
    at = np.flatnonzero((found < 0).any(axis=1))  # only these need more
    matrix = matrix[at]
    side = side[at]
    rest = np.maximum(found[at], 0.0)
    for _ in range(SWEEPS if len(at) else 0):
        before = rest.copy()
        for i in index:
            without = (
                side[:, i]
                - (matrix[:, i] * rest).sum(axis=1)
                + matrix[:, i, i] * rest[:, i]
            )
            rest[:, i] = np.maximum(without / matrix[:, i, i], 0.0)
        if np.abs(rest - before).max() < CLOSE:
            break
    found[at] = rest
    return found


def fit(
    features: np.ndarray,
    seconds: np.ndarray,
    mean: np.ndarray,
    spread: np.ndarray,
    noise: float,
    weights: np.ndarray,
) -> np.ndarray:
    """Costs [B, k] per unit of each feature, from rows of features [rows, k] and seconds [B, rows].

    Errors are relative to what a row should have taken: to what it took, slow rows would count less than fast ones, and
    costs come out too low. `noise` is the standard deviation of one row. `mean` and `spread` are a prior over each
    feature's share of an average row's time. `weights` [B, rows] count rows more or less; rows far off count less
    (Huber), as a machine that was busy elsewhere makes only some rows slow.
    """
    scale = features.mean(axis=0)
    used = np.where(scale > 0, scale, 1.0)
    shares = features / used
    typical = seconds.mean(axis=1)
    robust = np.ones_like(seconds)
    expected = seconds
    z = np.zeros((len(seconds), features.shape[1]))
    for _ in range(ROUNDS):
        factor = np.sqrt(weights * robust) / noise / expected
        units = shares[None] * typical[:, None, None]
        z = nonnegative(units * factor[..., None], seconds * factor, mean, spread)
        expected = np.maximum(np.einsum("brk,bk->br", units, z), 0.1 * seconds)
        off = np.abs(seconds / expected - 1.0)
        robust = np.minimum(1.0, 1.5 * noise / np.maximum(off, 1e-9))
    z = np.where(scale > 0, z, 0.0)
    return z * typical[:, None] / used


def residuals(
    features: np.ndarray, seconds: np.ndarray, costs: np.ndarray
) -> np.ndarray:
    """Relative errors [B, rows] of fitted costs."""
    return 1.0 - seconds / np.maximum(costs @ features.T, 1e-9)


# ----------------------------------------------------------------------------------------------------

# Priors: each cost's share of an average row's seconds, and how sure that is.
# a group's way there and back, and taking in a sample, in steps of decoding
REQUEST_STEPS = 2.0
SAMPLE_STEPS = 0.1
PROMPT_ROWS = 0.2  # a prompt's token, in rows of a decoding step
# tokens of context that cost as much as a row; the rows of a step cost as much as the step itself
ROW_CONTEXT = 1000.0
TRAINING_PRIOR = (np.array([0.10, 0.80, 0.10]), np.array([0.10, 0.30, 0.10]))
# of syncs and of rewards: once, and for each
PAIR_PRIOR = (np.array([0.6, 0.4]), np.array([0.3, 0.3]))
# of a shared device, for one at work: all of it, as far as one knows
LOAD_PRIOR = (1.0, 0.25)
# means and standard deviations
Prior = tuple[np.ndarray, np.ndarray]
NOISE = 0.04  # of a row, relative, until its errors are known
# above 1: both together are slower than one after the other
GRID = np.arange(1, 14) / 10
SLICES = 12  # of a group's time, to average what else the engine ran
DRAWS = 24


@dataclass(frozen=True)
class Fit:
    """Costs, draws of them that are about as likely, and the relative errors of the rows they were fitted to."""

    rates: StepCosts
    draws: tuple[StepCosts, ...]
    generation_error: float  # root mean square
    training_error: float
    overlapping: bool  # whether any record showed two activities at once


@dataclass(frozen=True)
class _WorkRows:
    """Rows of one activity: features [rows, k], and seconds [rows, engines, 2] beside so many (other) engines at work,
    without and with training."""

    features: np.ndarray
    seconds: np.ndarray

    def work(self, loads: np.ndarray, cores: int, trainer: bool) -> np.ndarray:
        """[B, rows]: seconds that each would have taken alone, under B loads; of the trainer, or of engines."""
        speed = np.empty((len(loads), *self.seconds.shape[1:]))
        for at, (engine, train) in enumerate(loads.tolist()):
            for others, training in np.ndindex(*self.seconds.shape[1:]):
                running = [(engine, i) for i in range(others + (not trainer))]
                both = [(train, None)] * (trainer or training) + running
                speed[at, others, training] = speeds(both, cores)[
                    0 if trainer else training
                ]
        return np.einsum("rkt,bkt->br", self.seconds, speed)


def calibrate(seen: Sequence[Observation], seed: int = 0, draws: int = DRAWS) -> Fit:
    """Fit all records together."""
    generation = _generation_rows(seen)
    training = _training_rows(seen)
    cores = max(o.cores for o in seen)
    activities = (
        (generation, _generation_prior(generation.features), False),
        (training, TRAINING_PRIOR, True),
    )
    loads, posterior = _loads(activities, cores)
    random = np.random.default_rng(seed)
    chosen = random.choice(len(posterior), draws, p=posterior)
    loads = loads[[int(np.argmax(posterior)), *chosen]]
    costs = []
    errors = []
    for rows, prior, trainer in activities:
        work = rows.work(loads, cores, trainer)
        found = _fit_draws(rows.features, work, prior, random)
        off = residuals(rows.features, work, found)[0]
        errors.append(float(np.sqrt(np.mean(np.square(off)))))
        costs.append(found)
    syncs = [s for o in seen for s in o.syncs]
    sizes = [(1.0, s.replicas) for s in syncs]
    costs.append(_pair_draws(sizes, [s.stop - s.start for s in syncs], draws, random))
    costs.append(_pair_draws(*_rewards(seen), draws, random))
    names = (*GENERATION, *TRAINING, *SYNC, *REWARD, "engine_load", "train_load")
    pauses = _pauses(seen)
    made = [
        StepCosts(**dict(zip(names, values, strict=True)), **pauses, cores=cores)
        for values in np.concatenate([*costs, loads], axis=1).tolist()
    ]
    beside = generation.seconds
    overlapping = bool(beside[:, :, 1].sum() or beside[:, 1:].sum())
    return Fit(made[0], tuple(made[1:]), errors[0], errors[1], overlapping)


def _generation_prior(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the parts of generation take as far as one knows before any measurement."""
    _, samples, computed, steps, rows, context = features.mean(axis=0)
    rows = max(rows, 1e-9)
    prompts = PROMPT_ROWS * computed * steps / rows
    fixed = np.array([REQUEST_STEPS, SAMPLE_STEPS * samples, prompts]) / steps
    fixed *= min(1.0, 0.5 / fixed.sum())
    moving = np.array([1.0, 1.0, context / rows / ROW_CONTEXT])
    moving *= (1.0 - fixed.sum()) / moving.sum()
    mean = np.concatenate([fixed, moving])
    return mean, mean * np.array([1.2, 1.2, 1.2, 0.6, 0.6, 0.8]) + 1e-3


def _fit_draws(
    features: np.ndarray, work: np.ndarray, prior: Prior, random: np.random.Generator
) -> np.ndarray:
    """Costs [B, k]: the first from all rows alike, the others from rows and priors drawn anew."""
    mean, spread = prior
    ones = np.ones_like(work)
    first = fit(features, work[:1], mean, spread, NOISE, ones[:1])
    noise = max(
        NOISE / 2, float(np.median(np.abs(residuals(features, work[:1], first)))) * 1.48
    )
    weights = random.exponential(1.0, work.shape)
    weights[0] = 1.0
    means = np.maximum(
        mean + spread * random.standard_normal((len(work), len(mean))), 0.0
    )
    means[0] = mean
    return fit(features, work, means, spread, noise, weights)


def _loads(
    activities: Iterable[tuple[_WorkRows, Prior, bool]], cores: int
) -> tuple[np.ndarray, np.ndarray]:
    """Loads of an engine and of the trainer on a grid [B, 2], and how likely each pair is."""
    loads = np.stack([values.ravel() for values in np.meshgrid(GRID, GRID)], axis=1)
    score = -0.5 * np.square((loads - LOAD_PRIOR[0]) / LOAD_PRIOR[1]).sum(axis=1)
    for rows, prior, trainer in activities:
        work = rows.work(loads, cores, trainer)
        unlikely = np.zeros(len(work))
        noise = NOISE
        for _ in range(2):  # the second time with the noise that the first has shown
            costs = fit(rows.features, work, *prior, noise, np.ones_like(work))
            off = np.abs(residuals(rows.features, work, costs)) / noise
            huber = np.where(off < 1.5, np.square(off) / 2, 1.5 * (off - 0.75))
            unlikely = huber.sum(axis=1)
            typical = float(np.median(off[np.argmin(unlikely)]))
            noise = max(NOISE, 1.48 * noise * typical)
        score = score - unlikely
    likely = np.exp(score - score.max())
    return loads, likely / likely.sum()


# Rows -----------------------------------------------------------------------------------------------------------------


def _generation_rows(seen: Sequence[Observation]) -> _WorkRows:
    """One row for each step and replica: the group that ended last, as the step waits for it."""
    features = []
    seconds = []
    for o in seen:
        busy = _busy(o)
        training = [(s.start, s.stop) for s in o.steps]
        paused = [(s.stop - min(s.pause, s.stop - s.start), s.stop) for s in o.syncs]
        for group in _last_groups(o):
            features.append(_generation_features(o, group))
            others = [spans for name, spans in busy.items() if name != group.replica]
            seconds.append(_beside((group.start, group.stop), others, training, paused))
    return _WorkRows(np.array(features), _stack(seconds))


def _training_rows(seen: Sequence[Observation]) -> _WorkRows:
    features = []
    seconds = []
    for o in seen:
        busy = list(_busy(o).values())
        for step in o.counted:
            features.append([1.0, step.tokens, step.tokens * step.span])
            seconds.append(_beside((step.start, step.stop), busy))
    return _WorkRows(np.array(features), _stack(seconds))


def _busy(o: Observation) -> dict[str, np.ndarray]:
    """When each replica generated."""
    return {
        name: union([(g.start, g.stop) for g in o.groups if g.replica == name])
        for name in o.replicas
    }


def _last_groups(o: Observation) -> Iterable[GroupRow]:
    """Of each counted step and replica, the group that ended last."""
    for step in o.counted:
        last: dict[str, GroupRow] = {}
        for group in sorted(o.groups_of(step), key=lambda g: (g.replica, g.stop)):
            last[group.replica] = group
        yield from last.values()


def _generation_features(o: Observation, group: GroupRow) -> list[float]:
    """What an engine did while it generated a group: see `GENERATION`."""
    took = group.stop - group.start
    early = group.start - 0.05 * took
    at = group.start + took * (np.arange(SLICES) + 0.5) / SLICES
    rows = np.zeros(SLICES)
    context = np.zeros(SLICES)
    # each replica scores its part
    probes = [p for p in o.probes if early <= p.start < group.stop]
    samples = sum(p.samples for p in probes) / o.setting.replicas
    computed = sum(p.tokens for p in probes) / o.setting.replicas
    for g in o.groups:
        if g.replica != group.replica or g.start >= group.stop or g.stop <= group.start:
            continue
        sizes = np.array(g.lengths)
        share = (at - g.start) / max(g.stop - g.start, 1e-9)
        progress = share * sizes.max()
        running = ((sizes[:, None] > progress) & (share >= 0) & (share < 1)).sum(axis=0)
        rows += running
        context += running * (g.prompt + progress)
        if g.start >= early:
            samples += len(sizes)
            computed += g.computed
    steps = float(max(group.lengths))
    decoded = [steps, steps * float(rows.mean()), steps * float(context.mean())]
    return [1.0, samples, computed, *decoded]


def _beside(
    span: tuple[float, float],
    engines: Sequence[np.ndarray],
    training: object = (),
    paused: object = (),
) -> np.ndarray:
    """[engines + 1, 2]: seconds of the span beside so many of these engines at work, without and with training."""
    others = {str(number): spans for number, spans in enumerate(engines)}
    split = split_time({"train": training, "paused": paused, **others}, [span])
    found = np.zeros((len(engines) + 1, 2))
    found[0, 0] = split.idle[0]
    for names, seconds in split.together.items():
        if "paused" not in names:
            trained = int("train" in names)
            found[len(names) - trained, trained] += seconds[0]
    return found


def _stack(tables: Sequence[np.ndarray]) -> np.ndarray:
    most = max(len(t) for t in tables)
    return np.stack([np.pad(t, ((0, most - len(t)), (0, 0))) for t in tables])


# What is not work -----------------------------------------------------------------------------------------------------


def _rewards(
    seen: Sequence[Observation],
) -> tuple[list[tuple[float, float]], list[float]]:
    """From the last token of a step's groups to the last reward, for steps that waited for it."""
    features = []
    seconds = []
    for o in seen:
        for own in filter(None, map(o.groups_of, o.counted)):
            features.append((1.0, float(len(own[0].lengths))))
            seconds.append(max(g.rewarded for g in own) - max(g.stop for g in own))
    return features, seconds


def _pair_draws(
    features: Sequence[tuple[float, float]],
    seconds: Sequence[float],
    draws: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Costs [1 + draws, 2] of a fixed part and a part for each."""
    if not seconds:
        return np.zeros((1 + draws, 2))
    target = np.maximum(np.tile(seconds, (1 + draws, 1)), 1e-6)
    return _fit_draws(np.asarray(features, float), target, PAIR_PRIOR, random)


def _pauses(seen: Sequence[Observation]) -> dict[str, float]:
    """Medians of the moments between phases; of on-policy runs where there are any, as others overlap them."""
    found: dict[str, list[float]] = {"take": [], "hand": [], "resume": [], "pause": []}
    for o in [o for o in seen if not o.setting.max_staleness] or seen:
        for step in o.counted:
            known = [g.rewarded for g in o.groups_of(step)]
            found["take"].append(max(step.start - max(known, default=step.start), 0.0))
        for sync in o.syncs:
            ended = [sync.start - s.stop for s in o.steps if s.stop <= sync.start]
            found["hand"] += sorted(ended)[:1]
            later = [g.start - sync.stop for g in o.groups if g.start >= sync.stop]
            found["resume"].append(min(later, default=0.0))
    for sync in [s for o in seen for s in o.syncs if s.stop > s.start]:
        found["pause"].append(min(sync.pause / (sync.stop - sync.start), 1.0))
    return {name: statistics.median(v) if v else 0.0 for name, v in found.items()}

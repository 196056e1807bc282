"""A discrete-event simulation of the GRPO loop: engines, trainer and syncs on devices that they may share.

When a group starts and when it is trained on is decided by the loop's own `Flow` (jvlab/trainer/_schedule.py); only
durations come from `StepCosts`. An engine batches continuously: whatever arrives is taken in before the next decoding
step, and all rows grow by a token a step. Between two events everything is linear, so that one event stands for many
steps.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.record._metrics import split_time
from jvlab.trainer._batching import PROBE_SAMPLES
from jvlab.trainer._schedule import Flow, Schedule, Ticket

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


SMALL = 1e-9
PHASES = ("train", "sync", "score", "reward", "generate")
Wait = Generator[Any, Any, None]


@dataclass
class SimulatedGroup:
    """A group on its way: `versions` counts its tokens by the version that generated them."""

    index: int
    oldest: int
    versions: Counter[int] = field(default_factory=Counter)
    left: int = 0  # samples that are not complete
    lengths: Sequence[int] = ()
    replica: int = 0
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)  # start, last token, rewards


@dataclass
class _Row:
    """Samples of one group that end together."""

    group: SimulatedGroup
    count: int
    left: float  # tokens to come
    context: float


@dataclass(frozen=True)
class Simulated:
    """What a simulated run did, step by step, after the first ones."""

    windows: np.ndarray  # seconds of each step, as in a record
    tokens: np.ndarray  # of its completions
    staleness: np.ndarray  # mean over its tokens
    staleness_max: int
    phases: dict[str, float]  # seconds a step, overlaps included
    idle_s: float  # seconds a step in which nobody worked
    engine_busy: float  # share of the time, mean over engines
    trainer_busy: float


class _Device:
    """Activities that share a device: each runs at the speed that the claims of the others leave it."""

    def __init__(self, env: Any, cores: int) -> None:
        self._env = env
        self._cores = cores
        self.changed = env.event()
        self._claims: dict[int | None, Claim] = {}

    def spend(
        self,
        who: int | None,
        load: float,
        work: float,
        interrupt: Callable[[], Any] | None = None,
    ) -> Any:
        """Do `work` seconds' worth; returns what was done, all of it unless `interrupt()`'s event came first.

        `who` is an engine's number, or None: the trainer.
        """
        self._claims[who] = load, who
        self._tell()
        left = work
        while left > SMALL * (1 + work):
            began = self._env.now
            claims = [
                self._claims[who],
                *(c for at, c in self._claims.items() if at != who),
            ]
            speed = speeds(claims, self._cores)[0]
            events = [self._env.timeout(left / speed), self.changed]
            stop = interrupt() if interrupt else None
            yield self._env.any_of(events if stop is None else [*events, stop])
            left -= (self._env.now - began) * speed
            if stop is not None and stop.triggered:
                break
        del self._claims[who]
        self._tell()
        return work - max(left, 0.0)

    def _tell(self) -> None:
        before = self.changed
        self.changed = self._env.event()
        before.succeed()


class _Engine:
    """One replica."""

    def __init__(self, loop: _Loop, number: int, device: _Device) -> None:
        self.loop = loop
        self.number = number
        self.device = device
        self.rows: list[_Row] = []
        self.waiting: list[tuple[SimulatedGroup, Sequence[int], float]] = []
        # samples to score, their tokens, what to trigger then
        self.probes: list[tuple[float, float, Any]] = []
        self.paused = False
        self.news = loop.env.event()
        self.busy: list[tuple[float, float]] = []
        loop.env.process(self.run())

    @property
    def in_flight(self) -> int:
        return sum(row.count for row in self.rows) + sum(
            len(lengths) for _, lengths, _ in self.waiting
        )

    def notify(self) -> None:
        before = self.news
        self.news = self.loop.env.event()
        before.succeed()

    def run(self) -> Wait:
        while True:
            if self.paused or not (self.rows or self.waiting or self.probes):
                yield self.news
                continue
            began = self.loop.env.now
            if self.waiting or self.probes:
                yield from self._admit()
            else:
                yield from self._decode()
            self.busy.append((began, self.loop.env.now))

    def _admit(self) -> Wait:
        # more may arrive meanwhile
        rates = self.loop.rates
        arrived = len(self.waiting)
        probes = self.probes
        self.probes = []
        work = sum(
            rates.admission(len(lengths), computed)
            for _, lengths, computed in self.waiting
        )
        work += sum(rates.admission(samples, tokens) for samples, tokens, _ in probes)
        yield from self.device.spend(self.number, rates.engine_load, work)
        for *_, scored in probes:
            scored.succeed()
        for group, lengths, _ in self.waiting[:arrived]:
            for length, count in sorted(Counter(lengths).items()):
                self.rows.append(
                    _Row(group, count, float(length), self.loop.setting.prompt_tokens)
                )
        del self.waiting[:arrived]

    def _decode(self) -> Wait:
        rates = self.loop.rates
        count = sum(row.count for row in self.rows)
        context = sum(row.count * row.context for row in self.rows)
        steps = min(row.left for row in self.rows)
        work = rates.decoding(steps, count, context)
        done = yield from self.device.spend(
            self.number, rates.engine_load, work, lambda: self.news
        )
        if done < work * (1 - 1e-9):
            steps = min(steps, rates.steps_within(done, count, context))
        for row in self.rows:
            row.left -= steps
            row.context += steps
            row.group.versions[self.loop.pool_version] += row.count * steps  # type: ignore[assignment]
        ended = [row for row in self.rows if row.left <= 1e-6]
        self.rows = [row for row in self.rows if row.left > 1e-6]
        for row in ended:
            row.group.left -= row.count
        complete = [row.group for row in ended if not row.group.left]
        way = rates.request
        # the device works for the way back too, as records count it
        if complete and not (self.rows or self.waiting):
            yield from self.device.spend(self.number, rates.engine_load, way)
            way = 0.0
        for group in complete:
            self.loop.env.process(self.loop.reward(group, way))


class _Loop:
    """The trainer, the producer and the engines of one simulated run."""

    def __init__(
        self,
        setting: Setting,
        rates: StepCosts,
        lengths: Callable[[int], Sequence[int]],
        shape: BatchShape,
        steps: int,
    ) -> None:
        import simpy

        self.env: Any = simpy.Environment()
        self.setting = setting
        self.rates = rates
        self.lengths = lengths
        self.shape = shape
        self.steps = steps
        self.flow: Flow[SimulatedGroup] = Flow(
            Schedule(setting.prompts_per_step, setting.max_staleness), 1
        )
        self.pool_version = 0
        self.changed = self.env.event()
        device = lambda: _Device(self.env, rates.cores)
        shared = device()
        own = shared if setting.placement == "shared" else device()
        each = lambda: device() if setting.placement == "apart" else shared
        self.trainer_device = own
        self.engines = [_Engine(self, i, each()) for i in range(setting.replicas)]
        self.groups: list[SimulatedGroup] = []  # complete ones
        self.ends: list[float] = []
        # tokens by version, and the trainer's version
        self.taken: list[tuple[Counter[int], int]] = []
        self.spans: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}

    def notify(self) -> None:
        before = self.changed
        self.changed = self.env.event()
        before.succeed()
        self._fill()

    def _fill(self) -> None:
        remaining = (self.steps - len(self.taken)) * self.setting.prompts_per_step
        while (ticket := self.flow.start(remaining)) is not None:
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        lengths = self.lengths(self.setting.group_size)
        engine = min(self.engines, key=lambda e: (e.in_flight, e.number))
        group = SimulatedGroup(
            ticket.index,
            self.pool_version,
            Counter(),
            len(lengths),
            lengths,
            engine.number,
        )
        group.times = (self.env.now,) * 3
        engine.waiting.append(
            (group, lengths, self.shape.computed_prompt(self.setting))
        )
        engine.notify()

    def reward(self, group: SimulatedGroup, way: float) -> Wait:
        """A group's way back, and its rewards."""
        yield self.env.timeout(way)
        began = self.env.now
        yield self.env.timeout(self.rates.rewarding(self.setting.group_size))
        self.spans["reward"].append((began, self.env.now))
        group.times = (group.times[0], began, self.env.now)
        self.groups.append(group)
        self.flow.finish(group)
        self.notify()

    def train(self) -> Wait:
        """The trainer's loop."""
        rates = self.rates
        yield from self._sync(1)
        for number in range(self.steps):
            while True:
                self.flow.remove_stale()
                if (groups := self.flow.take()) is not None:
                    break
                self._fill()
                yield self.changed
            counts = sum((group.versions for group in groups), Counter())
            self.taken.append((counts, number + 1))
            self._fill()
            yield self.env.timeout(rates.take)
            began = self.env.now
            tokens = sum(counts.values())
            probe = self._probe(groups, number + 1)
            work = rates.training(*self.shape.computed(self.setting, tokens))
            yield from self.trainer_device.spend(None, rates.train_load, work)
            self.ends.append(self.env.now)
            self.spans["train"].append((began, self.env.now))
            if probe is not None:
                yield probe
            yield self.env.timeout(rates.hand)
            yield from self._sync(number + 2)

    def _probe(self, groups: Sequence[SimulatedGroup], version: int) -> Any:
        """Where no sample is of this version alone, the engines score some while the trainer trains on them."""
        if any(set(group.versions) == {version} for group in groups):
            return None
        return self.env.process(self._score(groups[0].lengths))

    def _score(self, lengths: Sequence[int]) -> Wait:
        samples, tokens = (
            n / len(self.engines) for n in self.shape.probe(self.setting, lengths)
        )
        began = self.env.now
        scored = [self.env.event() for _ in self.engines]
        for engine, event in zip(self.engines, scored, strict=True):
            engine.probes.append((samples, tokens, event))
            engine.notify()
        yield self.env.all_of(scored)
        self.spans["score"].append((began, self.env.now))

    def _sync(self, version: int) -> Wait:
        began = self.env.now
        seconds = self.rates.syncing(self.setting.replicas)
        yield self.env.timeout(seconds * (1 - self.rates.pause))
        for engine in self.engines:
            engine.paused = True
            engine.notify()
        yield self.env.timeout(seconds * self.rates.pause)
        self.pool_version = version
        for engine in self.engines:
            engine.paused = False
            engine.notify()
        self.spans["sync"].append((began, self.env.now))
        self.env.process(self._resume(version))

    def _resume(self, version: int) -> Wait:
        yield self.env.timeout(self.rates.resume)
        self.flow.synced(version)
        self.notify()


@dataclass(frozen=True)
class BatchShape:
    """What a batch is made of beside its completions."""

    # share of a prompt that a group's second sample finds in the prefix cache, and all later ones
    cached: float = 0.0
    padding: float = 0.0  # share of what the trainer computes
    # tokens that attention goes over in training, a row's; 0: those of a sample, its own
    span: float = 0.0

    def computed_prompt(self, setting: Setting) -> float:
        """Prompt tokens that an engine computes for one group."""
        return setting.prompt_tokens * (
            1 + (setting.group_size - 1) * (1 - self.cached)
        )

    def computed(self, setting: Setting, tokens: float) -> tuple[float, float]:
        """Tokens that the trainer computes, and those that each attends over, for so many completion tokens."""
        total = tokens + setting.samples * setting.prompt_tokens
        return total / max(1 - self.padding, 1e-3), self.span or total / setting.samples

    def probe(self, setting: Setting, lengths: Sequence[int]) -> tuple[float, float]:
        """Samples that the engines score in a probe, and their tokens; `lengths` are those of some samples."""
        count = min(PROBE_SAMPLES, setting.samples)
        return float(count), count * (
            setting.prompt_tokens + sum(lengths) / len(lengths)
        )


def simulate(
    setting: Setting,
    rates: StepCosts,
    lengths: Callable[[int], Sequence[int]],
    shape: BatchShape,
    steps: int,
    warm: int,
) -> Simulated:
    """Run `warm` + `steps` steps and a few more; those after `warm` count. `lengths(n)`: tokens of n samples."""
    loop = _Loop(
        setting, rates, lengths, shape, warm + steps + setting.max_staleness + 1
    )
    loop.env.run(until=loop.env.process(loop.train()))
    return _summary(loop, warm, steps)


def _summary(loop: _Loop, warm: int, steps: int) -> Simulated:
    ends = np.array([0.0, *loop.ends])
    counted = slice(warm, warm + steps)
    windows = np.diff(ends)[counted]
    frame = [(float(ends[warm]), float(ends[warm + steps]))]
    loop.spans["generate"] = [span for engine in loop.engines for span in engine.busy]
    split = split_time(loop.spans, frame)
    total = frame[0][1] - frame[0][0]
    engines = [
        float(split_time({"e": engine.busy}, frame).busy["e"][0])
        for engine in loop.engines
    ]
    stale = []
    most = 0
    for counts, version in loop.taken[counted]:
        ages = {version - v: n for v, n in counts.items() if n > 1e-6}
        stale.append(
            sum(age * n for age, n in ages.items()) / max(sum(ages.values()), SMALL)
        )
        most = max(most, *ages)
    return Simulated(
        windows=windows,
        tokens=np.array([sum(counts.values()) for counts, _ in loop.taken[counted]]),
        staleness=np.array(stale),
        staleness_max=most,
        phases={
            name: float(seconds[0]) / steps for name, seconds in split.busy.items()
        },
        idle_s=float(split.idle[0]) / steps,
        engine_busy=float(np.mean(engines)) / total,
        trainer_busy=float(split.busy["train"][0]) / total,
    )


# Closed forms of a step's time beside the simulation: exact on-policy, bounds where phases overlap.
# On-policy a step is a sum. With K > 0 the operational laws of queueing hold: no step is shorter than what the
# busiest of trainer, engines and shared device has to do for it; and overlapping makes it no longer than doing
# one after the other, with engines as slow as they are beside the trainer where sharing loses time.


@dataclass(frozen=True)
class Bounds:
    """No step is shorter than `low` or longer than `high` seconds; on-policy both are its time."""

    low: float
    high: float


def closed_form(
    setting: Setting, rates: StepCosts, lengths: Sequence[int], shape: BatchShape
) -> Bounds:
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
    # what all want of one device, or of the core that most want
    if setting.placement == "shared":
        sharing = math.ceil(setting.replicas / rates.cores)
        together = (
            sharing * min(rates.engine_load, 1.0) * engines
            + min(rates.train_load, 1.0) * training
        )
    engine += rates.admission(*shape.probe(setting, lengths)) / setting.replicas
    loses = rates.cores > 1 or max(rates.engine_load, rates.train_load) > 1
    slow = _engine_speed(setting, rates, setting.placement == "shared" and loses)
    return Bounds(
        max(trainer, engines / _engine_speed(setting, rates), together),
        trainer + around + engine / slow,
    )


def _engine_speed(setting: Setting, rates: StepCosts, training: bool = False) -> float:
    """Of the slowest engine while all of them work, beside the trainer or not."""
    count = 1 if setting.placement == "apart" else setting.replicas
    claims: list[Claim] = [(rates.engine_load, i) for i in range(count)]
    return min(
        speeds([*claims, *[(rates.train_load, None)] * training], rates.cores)[:count]
    )


def _generation(
    setting: Setting,
    rates: StepCosts,
    lengths: Sequence[int],
    shape: BatchShape,
    batches: int,
) -> float:
    """The busiest engine's work for so many batches at once: groups in turn to each, all rows from the start."""
    size = setting.group_size
    groups = [
        list(lengths[i : i + size]) for i in range(0, len(lengths), size)
    ] * batches
    most = 0.0
    for first in range(setting.replicas):
        own = groups[first :: setting.replicas]
        rows = sorted(n for group in own for n in group)
        work = rates.admission(len(rows), len(own) * shape.computed_prompt(setting))
        done = 0
        for at, length in enumerate(rows):
            left = len(rows) - at
            work += rates.decoding(
                length - done, left, left * (setting.prompt_tokens + done)
            )
            done = length
        most = max(most, work)
    return most

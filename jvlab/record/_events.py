"""The events of a run: frozen dataclasses to and from strict JSON, unknown kinds and fields included.

Times are seconds of one monotonic clock (`clock()`); a `RunStart` pairs it with the wall clock. A reader shifts them
to seconds since the run's first start. A float that was not measured is NaN. JSON has no NaN or infinity: fields that
are floats write them as the strings "NaN", "Infinity" and "-Infinity" and read them back; inside free-form values
(`RunStart.config`, `extra`) they stay such strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import socket
import time
import types
import typing
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from jvlab._errors import ConfigError
from jvlab._version import __version__

# of the files; readers keep unknown fields, so it changes only if a meaning does
FORMAT = 1
NAN = float("nan")
LARGE = 1 << 63  # integers must fit int64, as event tables are numpy arrays

clock = time.monotonic


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that one actor did from `start` to `stop`. Without times, it is stamped when written."""

    tag: ClassVar[str] = ""
    actor: str = ""  # "trainer", "pool/0", "reward", ...
    start: float = NAN
    stop: float = NAN
    # fields that a newer jvlab wrote
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, hint in _hints(type(self)).items():
            if type(values[name]) is hint and (
                hint is not int or -LARGE <= values[name] < LARGE
            ):
                continue  # the common case: already of the declared type
            try:
                values[name] = coerce(hint, values[name])
            except (TypeError, ValueError, OverflowError) as e:
                raise ConfigError(
                    f"{type(self).__name__}.{name}={getattr(self, name)!r} is not {_hint_text(hint)}",
                    remedy=f"pass {_hint_text(hint)}",
                    field=name,
                ) from e
        if self.stop < self.start:
            raise ConfigError(
                f"{type(self).__name__} stops at {self.stop} before it starts at {self.start}",
                remedy="take both times from jvlab.record._events.clock(), the start first",
            )

    @property
    def kind(self) -> str:
        """The event's name in the file: "rollout", "step", "sync", ..."""
        return self.tag

    @property
    def seconds(self) -> float:
        """Duration; 0 for an instant."""
        return self.stop - self.start

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, `kind` first; no NaN or infinity."""
        names = (f.name for f in dataclasses.fields(self) if f.name != "extra")
        return (
            {"kind": self.kind}
            | {n: plain(getattr(self, n)) for n in names}
            | plain(self.extra)
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """From JSON values; unknown fields go to `extra`."""
        known = _hints(cls).keys() - {"extra"}
        return cls(
            **{k: v for k, v in fields.items() if k in known},
            extra={k: v for k, v in fields.items() if k not in known},
        )


@dataclass(frozen=True, kw_only=True)
class RunStart(Event):
    """A process began, or resumed, writing this run. `wall` is the Unix time at `start`, which anchors the clock."""

    tag = "run_start"
    run: str = ""
    wall: float = NAN
    config: dict[str, Any] = field(default_factory=dict)
    gap_alarm: float = NAN  # largest acceptable `logprob_gap`
    # the step that a resumed session continues with; earlier records from there on are superseded
    resumed: int = -1
    jvlab: str = ""
    pid: int = 0
    host: str = ""
    format: int = FORMAT

    @classmethod
    def now(
        cls,
        run: str = "",
        *,
        config: Mapping[str, Any] | None = None,
        gap_alarm: float = NAN,
        resumed: int = -1,
    ) -> RunStart:
        """An event stamped with both clocks, this process and jvlab's version."""
        at = clock()
        wall = time.time()
        return cls(
            run=run,
            config=dict(config or {}),
            gap_alarm=gap_alarm,
            resumed=resumed,
            jvlab=__version__,
            actor="trainer",
            start=at,
            stop=at,
            wall=wall,
            pid=os.getpid(),
            host=socket.gethostname(),
        )


@dataclass(frozen=True, kw_only=True)
class RunStop(Event):
    """The run ended, or was left to be resumed: `reason` is "finished", "stopped", "failed", or "interrupted" if its
    process ended. One that was killed leaves none."""

    tag = "run_stop"
    reason: str = "finished"
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutEvent(Event):
    """A replica (`actor`) generated one request, a group or a whole batch."""

    tag = "rollout"
    actor: str = "pool"
    samples: int = 0
    tokens: int = 0  # generated; prompts not counted
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts' tokens: found in the prefix cache
    # version → tokens it generated
    versions: dict[int, int] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    finish: dict[str, int] = field(default_factory=dict)  # finish reason → samples
    retried: int = 0


@dataclass(frozen=True, kw_only=True)
class ScoreEvent(Event):
    """Log-probabilities of given tokens were computed: a reference, a reward model, the trainer's own old ones."""

    tag = "score"
    actor: str = "pool"
    what: str = "reference"
    samples: int = 0
    tokens: int = 0
    version: int = -1


@dataclass(frozen=True, kw_only=True)
class RewardEvent(Event):
    """Rewards of some samples; those that raised or timed out are counted separately.

    It starts when the last sample has ended: rewards of samples that ended before were computed meanwhile.
    """

    tag = "reward"
    actor: str = "reward"
    samples: int = 0
    mean: float = NAN
    std: float = NAN
    min: float = NAN
    max: float = NAN
    failures: int = 0
    timeouts: int = 0
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """Held-out prompts answered greedily, after `step` steps, by engines that hold `version`."""

    tag = "evaluation"
    actor: str = "pool"
    step: int
    version: int
    reward_mean: float = NAN
    reward_std: float = NAN
    samples: int = 0
    failed: int = 0  # without a reward
    tokens: int = 0
    best: bool = False  # so far


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """One optimiser step. `version` is the trainer's when it trained on the batch; the step produces version + 1."""

    tag = "step"
    actor: str = "trainer"
    step: int
    version: int
    loss: float = NAN
    reward_mean: float = NAN
    reward_std: float = NAN
    kl: float = NAN  # to the reference
    entropy: float = NAN
    # trainer over engine: mean, p01, p50, p99, max, ...
    ratios: dict[str, float] = field(default_factory=dict)
    ratios_by_staleness: dict[int, dict[str, float]] = field(default_factory=dict)
    clip_fraction: float = NAN
    # (Σw)² / (n Σw²) of the importance weights w: 1 if all weights are equal
    effective_samples: float = NAN
    masked_fraction: float = NAN  # share of tokens whose importance weight is 0
    # largest |trainer − engine| under the current version; NaN: not measured
    logprob_gap: float = NAN
    logprob_gap_mean: float = NAN
    grad_norm: float = NAN
    learning_rate: float = NAN
    skipped: bool = False  # the NaN guard kept the parameters unchanged
    samples: int = 0
    tokens: int = 0  # completion tokens in the loss
    # version → completion tokens it generated
    versions: dict[int, int] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    dropped: int = 0  # samples dropped as too stale since the previous step
    regenerated: int = 0
    # Of a mixture of experts, a number for each layer: `max` and `min`, the shares of the busiest and the idlest expert
    # in all choices; `entropy` of the shares over that of even use.
    experts: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def expert_extremes(self) -> dict[str, float]:
        """Of all layers the largest `max`, the smallest `min` and `entropy`; NaN without experts."""
        worst = {"max": max, "min": min, "entropy": min}
        return {
            name: of(self.experts.get(name) or (NAN,)) for name, of in worst.items()
        }

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness → tokens: how many versions each token was behind the trainer."""
        return {
            self.version - v: n for v, n in sorted(self.versions.items(), reverse=True)
        }

    @property
    def mean_staleness(self) -> float:
        """Of its tokens; NaN without any."""
        return mean_of(self.staleness)


@dataclass(frozen=True, kw_only=True)
class SyncEvent(Event):
    """Weights of `version` were sent to `replicas`. `pause` is how long generation was paused for it, in seconds."""

    tag = "sync"
    actor: str = "trainer"
    version: int
    bytes: int = 0
    # pack, move, scatter, digest, commit, ... in seconds
    phases: dict[str, float] = field(default_factory=dict)
    verified: bool | None = None  # digests compared and equal; None: not compared
    # whether the numbers mean the same on both sides: "checked by value ...", "unchecked: ..."
    meaning: str = ""
    pause: float = NAN
    replicas: tuple[str, ...] = ()
    mode: str = ""
    transport: str = ""

    @property
    def gb_per_s(self) -> float:
        """Bytes over the duration of the sync, in 10⁹ bytes per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else NAN


@dataclass(frozen=True, kw_only=True)
class DraftEvent(Event):
    """Tokens that a replica (`actor`) drafted since the last such event, and checked with the weights of `version`."""

    tag = "drafts"
    actor: str = "pool"
    version: int
    drafted: int = 0
    accepted: int = 0  # of the drafted tokens


@dataclass(frozen=True, kw_only=True)
class PauseEvent(Event):
    """Generation was paused; no replicas named: all of them."""

    tag = "pause"
    actor: str = "pool"
    replicas: tuple[str, ...] = ()
    mode: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class FaultEvent(Event):
    """A recorded failure: a replica lost, a reward that raised, a step that was skipped."""

    tag = "fault"
    fault: str  # "replica lost", "reward failed", "nan", ...
    who: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event that this version of jvlab cannot read; all its fields are in `extra`."""

    name: str = "unknown"

    @property
    def kind(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "actor": self.actor,
            "start": plain(self.start),
            "stop": plain(self.stop),
        } | plain(self.extra)


KINDS: dict[str, type[Event]] = {
    c.tag: c
    for c in (
        RunStart,
        RunStop,
        RolloutEvent,
        ScoreEvent,
        RewardEvent,
        EvaluationEvent,
        StepEvent,
        SyncEvent,
        DraftEvent,
        PauseEvent,
        FaultEvent,
    )
}


E = TypeVar("E", bound=Event)


def only(events: Iterable[Event], *kinds: type[E]) -> list[E]:
    """The events of these kinds."""
    return [event for event in events if isinstance(event, kinds)]


def run_name(events: Iterable[Event]) -> str:
    return next((e.run for e in only(events, RunStart) if e.run), "run")


def mean_of(histogram: Mapping[int, int]) -> float:
    """The mean of values by how often they occur; NaN without any."""
    total = sum(histogram.values())
    return sum(v * n for v, n in histogram.items()) / total if total else NAN


def event_from_json(fields: Mapping[str, Any]) -> Event:
    """The event of a JSON object. One from a newer jvlab, or a malformed one, is an `UnknownEvent`."""
    kind = str(fields.get("kind", "unknown"))
    rest = {k: v for k, v in fields.items() if k != "kind"}
    # unless a field changed its type, or a required one is missing: then all fields are kept as they are
    with contextlib.suppress(ConfigError, TypeError, KeyError):
        return KINDS[kind].from_fields(rest)
    known = {}
    for name, hint in (("actor", str), ("start", float), ("stop", float)):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            known[name] = coerce(hint, rest[name])
    if known.get("stop", 0.0) < known.get("start", 0.0):
        known.pop("stop")
    extra = {k: v for k, v in rest.items() if k not in known}
    return UnknownEvent(name=kind, **known, extra=extra)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _hint_text(hint: Any) -> str:
    plain_type = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if plain_type else str(hint).replace("typing.", "")


def coerce(hint: Any, value: Any) -> Any:
    """A value as its declared type: from numpy, from a 0-d array of any library, or from JSON. Never lossy."""
    if hint is Any:
        return value
    if hint is float and isinstance(value, str):
        return _NON_FINITE[value] if value in _NON_FINITE else _reject(value)
    if hint is float:
        return float(value)
    if hint is int:
        if not isinstance(value, float) or not value.is_integer():
            value = operator.index(_scalar(value))
        return int(value) if -LARGE <= value < LARGE else _reject(value)
    if hint is bool:
        value = _scalar(value)
        return bool(value) if isinstance(value, (bool, np.bool_)) else _reject(value)
    if hint is str:
        return str(value) if isinstance(value, str) else _reject(value)
    return _coerce_many(typing.get_origin(hint), typing.get_args(hint), value)


def _coerce_many(origin: Any, args: tuple[Any, ...], value: Any) -> Any:
    if origin is types.UnionType:  # only `X | None` is used
        return None if value is None else coerce(args[0], value)
    if isinstance(value, str):
        return _reject(value)
    if isinstance(value, (dict, list, tuple)) and not value:
        return origin()
    if origin is tuple and args[-1] is Ellipsis:
        if args[0] in (int, float) and _all_of(args[0], value):
            return tuple(value)
        return tuple(coerce(args[0], v) for v in value)
    if origin is tuple:
        return tuple(coerce(hint, v) for hint, v in zip(args, value, strict=True))
    if origin is not dict:
        raise TypeError(f"no rule for {origin}")
    out = {}
    for key, v in dict(value).items():
        if args[0] is int:
            key = coerce(int, int(key) if isinstance(key, str) else key)
        out[key if args[0] is int else str(key)] = coerce(args[1], v)
    return out


def _all_of(kind: type, value: Any) -> bool:
    """Whether these are plain Python numbers of one type, to be taken as they are: a sample has thousands of them."""
    if not isinstance(value, (list, tuple)) or set(map(type, value)) != {kind}:
        return False
    return kind is float or (min(value) >= -LARGE and max(value) < LARGE)


_NON_FINITE = {"NaN": NAN, "Infinity": math.inf, "-Infinity": -math.inf}


def _scalar(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


def _reject(value: Any) -> Any:
    raise TypeError(repr(value))


def plain(value: Any) -> Any:
    """A value as strict JSON: numbers finite, keys strings, arrays lists; anything else as its text."""
    value = value if isinstance(value, np.generic) else _scalar(value)
    match value:
        case None | bool() | str():
            return value
        case np.bool_():
            return bool(value)
        case int() | np.integer():
            return int(value)
        case np.floating() if value.dtype == np.float32:
            # the shortest text that round-trips this float32
            return plain(float(str(value)))
        case float() | np.floating():
            value = float(value)
            if math.isfinite(value):
                return value
            return (
                "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            )
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple() if _all_of(int, value) or (
            _all_of(float, value) and math.isfinite(sum(value))
        ):
            return list(value)  # a sum is finite only if all of it is
        case list() | tuple() | set() | frozenset() | np.ndarray() | Iterator():
            return [plain(v) for v in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)
            }
        case _:
            return str(value)


# What this process asked of a lab's pools, in memory: the timeline of a lab without a run.

KEPT = 2000  # events of a lab; older ones are dropped
# lab client -> its calls
_asked: weakref.WeakKeyDictionary[Any, deque[Event]] = weakref.WeakKeyDictionary()
# lab client -> folders of its runs, for `lab.timeline()`; here, where a lab finds them without importing JAX
runs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def note(client: Any, *events: Event) -> None:
    """Keep events of a lab, found by its client."""
    _asked.setdefault(client, deque(maxlen=KEPT)).extend(events)


def noted(client: Any) -> Iterable[Event]:
    """The events kept of a lab."""
    return _asked.get(client, ())


class RolloutTally:
    """Counts the samples of one call as they arrive; holds none of them."""

    def __init__(self) -> None:
        self.start = clock()
        self._last: dict[str, float] = {}  # replica -> when its last sample came
        self._counts: defaultdict[str, Any] = defaultdict(Counter)
        self._versions: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._finish: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, sample: Any) -> None:
        """Count one sample."""
        actor = sample.replica or "pool"
        own = sample.versions[sample.own].tolist()
        self._last[actor] = clock()
        self._versions[actor].update(own)
        self._finish[actor][sample.finish_reason] += 1
        self._counts[actor].update(
            samples=1,
            tokens=len(own),
            prompt_tokens=len(sample.prompt_token_ids),
            cached_tokens=sample.cached_tokens,
            retried=sample.retried,
        )

    def events(self) -> list[RolloutEvent]:
        """One per replica that generated."""
        return [
            RolloutEvent(
                actor=actor,
                start=self.start,
                stop=stop,
                versions=dict(self._versions[actor]),
                finish=dict(self._finish[actor]),
                **self._counts[actor],
            )
            for actor, stop in self._last.items()
        ]


class DraftTally:
    """Turns the counts that replicas report, which only grow, into events of what was new."""

    def __init__(self) -> None:
        # (replica, its epoch, version) -> tokens drafted, accepted
        self._seen: dict[tuple[str, int, int], tuple[int, int]] = {}

    def events(self, snapshot: Any) -> list[DraftEvent]:
        """What was drafted between the last snapshot and this one."""
        found = []
        for replica in snapshot.replicas:
            for count in replica.stats.drafts:
                key = replica.replica, replica.epoch, count.version
                drafted, accepted = self._seen.get(key, (0, 0))
                self._seen[key] = count.drafted, count.accepted
                if count.drafted > drafted:
                    found.append(
                        DraftEvent(
                            actor=replica.replica,
                            version=count.version,
                            drafted=count.drafted - drafted,
                            accepted=count.accepted - accepted,
                        )
                    )
        return found


def sync_event(report: Any, start: float, stop: float) -> SyncEvent:
    """A committed sync, from its report."""
    return SyncEvent(
        start=start,
        stop=stop,
        version=report.version,
        bytes=report.bytes,
        phases=dict(report.seconds),
        verified=report.verified if report.verify == "full" else None,
        pause=report.seconds.get("pause", float("nan")),
        replicas=tuple(o.replica for o in report.outcomes),
        mode=report.mode,
        transport=report.transport,
        meaning=report.meaning,
    )

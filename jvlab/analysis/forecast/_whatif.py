"""`jv.whatif`: what other settings of a GRPO run would do, from records of runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from jvlab import _faces
from jvlab._errors import ConfigError
from jvlab.analysis.forecast._calibrate import Fit, calibrate
from jvlab.analysis.forecast._observe import (
    Observation,
    measured,
    observations,
    typical_step,
)
from jvlab.analysis.forecast._simulate import (
    LIMITS,
    BatchShape,
    Bounds,
    Setting,
    Simulated,
    StepCosts,
    closed_form,
    simulate,
)
from jvlab.trainer._micro_batches import Packer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jvlab.views._forecast_view import ForecastPanel


# `Forecast`: what one setting is expected to do; `ForecastTable`: several of them.


@dataclass(frozen=True)
class Forecast:
    """What a run with this setting is expected to do. `low` and `high` hold nine of ten step times, as far as known.

    `closed` are the closed forms beside the simulation; `notes` say how far this is from what was measured. If the
    setting was measured too, `measured_s` is its step time.
    """

    setting: Setting
    step_s: float
    low: float
    high: float
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    idle_s: float  # seconds a step in which nobody works
    engine_busy: float  # share of the time, mean over engines
    trainer_busy: float
    # of a step, by phase; they may overlap
    seconds: dict[str, float] = field(default_factory=dict)
    closed: Bounds = field(default_factory=lambda: Bounds(0.0, 0.0))
    notes: tuple[str, ...] = ()
    measured_s: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; None if it was not measured."""
        return None if self.measured_s is None else self.step_s / self.measured_s - 1.0

    def __repr__(self) -> str:
        stale = f"staleness {self.staleness_mean:.2f}"
        text = f"{self.step_s:.3g} s a step ({self.low:.3g} to {self.high:.3g}), {self.tokens_per_s:,.0f} tokens/s"
        more = (
            ""
            if self.error is None
            else f", measured {self.measured_s:.3g} s ({self.error:+.1%})"
        )
        return f"Forecast({self.setting}: {text}, {stale}{more})"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


class ForecastTable(Sequence[Forecast]):
    """Forecasts, best first where they were ranked; a table in text and HTML."""

    def __init__(self, rows: Sequence[Forecast], title: str = "") -> None:
        self._rows = tuple(rows)
        self.title = title

    @overload
    def __getitem__(self, at: int) -> Forecast: ...
    @overload
    def __getitem__(self, at: slice) -> ForecastTable: ...
    def __getitem__(self, at: int | slice) -> Forecast | ForecastTable:
        return (
            ForecastTable(self._rows[at], self.title)
            if isinstance(at, slice)
            else self._rows[at]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Forecast]:
        return iter(self._rows)

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, minus 1, of those that were measured."""
        return tuple(row.error for row in self._rows if row.error is not None)

    def __repr__(self) -> str:
        return _faces.draw(self, "text")

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")


# How long samples are: as recorded, cut at a new limit, or carried on beyond the old one.


class Lengths:
    """The lengths of recorded samples. One that its limit cut short is carried on at the rate at which others ended."""

    def __init__(self, seen: Sequence[Observation]) -> None:
        ended = [n for o in seen for n in o.lengths if n < o.setting.max_tokens]
        cut = [n for o in seen for n in o.lengths if n >= o.setting.max_tokens]
        self._ended = np.array(ended, int)
        self._cut = np.array(cut, int)
        total = sum(ended) + sum(cut)
        self.hazard = len(ended) / total if total else 0.0  # ends per token
        self.longest = max((o.setting.max_tokens for o in seen), default=0)

    @property
    def fixed(self) -> bool:
        """Whether every sample was as long as it might be."""
        return not len(self._ended)

    def draw(self, count: int, limit: int, random: np.random.Generator) -> list[int]:
        """The lengths of some samples."""
        if self.fixed:
            return [limit] * count
        pool = np.concatenate([self._ended, self._cut])
        chosen = random.integers(len(pool), size=count)
        found = pool[chosen]
        more = random.geometric(self.hazard, size=count)
        return np.minimum(
            np.where(chosen < len(self._ended), found, found + more), limit
        ).tolist()

    def typical(self, count: int, limit: int) -> list[int]:
        """Lengths that stand for the distribution: its quantiles, in an order that mixes them over groups."""
        if self.fixed:
            return [limit] * count
        many = np.sort(self.draw(64 * count, limit, np.random.default_rng(0)))
        middle = many[32::64]
        return np.random.default_rng(1).permutation(middle).tolist()


# ----------------------------------------------------------------------------------------------------

CYCLES = 5  # of K + 1 steps that a simulation counts; more where lengths are random
RANDOM_STEPS = 40
# standard deviation of what no cost explains, even if the fit is perfect
MODEL_ERROR = 0.05
TAIL = 0.05  # of the draws on each side that an interval leaves out
MOST_STALENESS = 2  # that `suggest` tries unless the budget says more
# of prompts_per_step that `suggest` tries under a step's budget
FACTORS = (0.25, 0.5, 1, 2, 4)
LAID = 128  # samples that are laid into rows at most, to find the padding of a batch
LIMITED = ("devices", "replicas", "max_staleness", "step_s", "staleness_mean")


def whatif(*sources: Any, placement: str | None = None) -> WhatIf:
    """A model of the GRPO loop, fitted to one or several runs, that predicts runs with other settings.

    sources     runs, `jv.Record`s, run folders, or the JSON of `jvlab bench grpo --model`. Several teach more: with
                one batch size, the cost of another is a guess (and its interval wide); with max_staleness 0 only, so
                is what trainer and engines take from each other
    placement   who shared a device in them: "shared" (default: trainer and engines on one), "trainer apart", "apart"

    Returns a plan: `plan.predict(max_staleness=1, replicas=2)`, `plan.suggest(budget={"step_s": 3.0})`,
    `plan.check(run)` against measured runs, `plan.figure()`, `plan.rates`; in a notebook it is shown with sliders.

    The costs of generation (by batch, context and prompt tokens not in the prefix cache), training (by tokens and the
    length of their rows), syncs, rewards and the moments between them are fitted to the records; a discrete-event
    simulation then plays the loop, with the same rule that decides when a real group may start. Closed forms stand
    beside it as a check.

    >>> run = jv.grpo(policy, pool, link, jv.tasks.digits(), steps=8, group_size=4, prompts_per_step=2)
    >>> plan = jv.whatif(run.wait())
    >>> plan.predict(max_staleness=1).staleness_max
    1
    >>> plan.predict(group_size=64).step_s > plan.predict(group_size=2).step_s
    True
    >>> plan.suggest(budget={"max_staleness": 0})[0].setting.max_staleness
    0
    """
    return WhatIf(
        [one for source in sources for one in observations(source)], placement
    )


class WhatIf:
    """A fitted model of the loop; made by `jv.whatif`."""

    def __init__(
        self, seen: Sequence[Observation], placement: str | None = None
    ) -> None:
        if not seen:
            raise ConfigError(
                "jv.whatif() without a run",
                remedy="jv.whatif(run), or records of several runs",
            )
        if placement is not None:
            seen = [
                replace(o, setting=o.setting.changed(placement=placement)) for o in seen
            ]
        self.seen = tuple(seen)
        self.fit: Fit = calibrate(self.seen)
        self._lengths = Lengths(self.seen)
        self._made: dict[tuple[Setting, int | None, int | None], Forecast] = {}
        self._shapes: dict[tuple[int, int, float], BatchShape] = {}

    @property
    def setting(self) -> Setting:
        """The setting that `predict` starts from: that of the first run."""
        return self.seen[0].setting

    @property
    def rates(self) -> StepCosts:
        """The fitted costs, in seconds."""
        return self.fit.rates

    def predict(
        self, setting: Setting | None = None, *, interval: bool = True, **changes: Any
    ) -> Forecast:
        """What a run with these changes would do: prompts_per_step, group_size, max_tokens, max_staleness, replicas,
        placement, prompt_tokens. Without the interval it takes a twentieth of the time; `low` and `high` are NaN then.
        """
        wanted = (setting or self.setting).changed(**changes)
        return (
            self._predict(wanted)
            if interval
            else self._forecast(wanted, self._simulate(wanted, self.rates))
        )

    def check(self, *sources: Any) -> ForecastTable:
        """Predictions for runs that were measured, beside what was measured: `.errors`.

        They are about the same steps: the first ones of an overlapping run alternate more than later ones.
        """
        rows = []
        for one in (m for source in sources for m in measured(source)):
            setting = one.setting.changed(placement=self.setting.placement)
            rows.append(
                replace(
                    self._predict(setting, one.first, one.steps), measured_s=one.step_s
                )
            )
        return ForecastTable(rows, "predicted and measured")

    def suggest(
        self, budget: Mapping[str, float] | None = None, **fixed: Any
    ) -> ForecastTable:
        """The settings with the most trained tokens per second that stay within a budget, best first.

        budget   upper limits: "devices", "replicas", "max_staleness" (2 unless given), "staleness_mean", and "step_s",
                 which the interval's upper end must keep; with it, larger and smaller batches are tried too
        fixed    settings that every suggestion has, e.g. max_tokens=512
        """
        if budget is not None and not isinstance(budget, Mapping):
            raise ConfigError(
                f"budget={budget!r}",
                remedy='upper limits by name: budget={"step_s": 3.0}',
            )
        limits = dict(budget or {})
        for name, value in limits.items():
            if (
                name not in LIMITED
                or not isinstance(value, (int, float))
                or not value >= 0
            ):
                raise ConfigError(
                    f"budget has {name}={value!r}",
                    remedy=f"upper limits, numbers from 0: {', '.join(LIMITED)}",
                )
        words = ", ".join(f"{name} ≤ {value:g}" for name, value in limits.items())
        base = self.setting.changed(**fixed)
        found = [
            self._forecast(s, self._simulate(s, self.rates))
            for s in _candidates(base, limits, fixed)
        ]
        found.sort(key=lambda f: -f.tokens_per_s)
        good: list[Forecast] = []
        for forecast in found:
            if _exceeds(forecast, limits):
                continue
            full = self.predict(forecast.setting)
            if full.high <= limits.get("step_s", math.inf):
                good.append(full)
            if len(good) == 5:
                break
        if not good:
            least = min(found, key=lambda f: f.step_s, default=None)
            shortest = (
                f"the shortest step is {least.step_s:.3g} s with {least.setting}"
                if least
                else "nothing to try"
            )
            raise ConfigError(
                f"no setting keeps {words}: {shortest}", remedy="raise a limit"
            )
        return ForecastTable(good, f"within {words}" if limits else "")

    # Inside -------------------------------------------------------------------------------------------------------

    def _predict(
        self, setting: Setting, warm: int | None = None, steps: int | None = None
    ) -> Forecast:
        """The forecast of these steps; default: of steps far from the first. Made once."""
        key = (setting, warm, steps)
        if key in self._made:
            return self._made[key]
        point = self._simulate(setting, self.rates, 0, warm, steps)
        ran = [
            self._simulate(setting, rates, 1 + i, warm, steps)
            for i, rates in enumerate(self.fit.draws)
        ]
        bound = setting.max_staleness
        values = [typical_step(one.windows.tolist(), bound) for one in ran]
        middle = typical_step(point.windows.tolist(), bound)
        low, high = _interval(values, middle, self._unexplained(point, middle))
        self._made[key] = self._forecast(setting, point, low, high)
        return self._made[key]

    def _simulate(
        self,
        setting: Setting,
        rates: StepCosts,
        seed: int = 0,
        warm: int | None = None,
        steps: int | None = None,
    ) -> Simulated:
        cycle = setting.max_staleness + 1
        limit = setting.max_tokens
        more = (
            CYCLES * cycle if self._lengths.fixed else max(RANDOM_STEPS, CYCLES * cycle)
        )
        random = np.random.default_rng(seed)
        draw = lambda count: self._lengths.draw(count, limit, random)
        first = 2 * cycle if warm is None else warm
        return simulate(
            setting,
            rates,
            draw,
            self._shape(setting),
            more if steps is None else steps,
            first,
        )

    def _shape(self, setting: Setting) -> BatchShape:
        """What a batch is made of: its rows are those into which the trainer's own `Packer` lays such samples."""
        key = (setting.samples, setting.max_tokens, setting.prompt_tokens)
        if key not in self._shapes:
            self._shapes[key] = self._lay(setting)
        return self._shapes[key]

    def _lay(self, setting: Setting) -> BatchShape:
        cached = _cached(self.seen)
        known = next((o for o in self.seen if o.token_budget), None)
        if known is None:
            return BatchShape(cached, statistics.fmean(o.padding for o in self.seen))
        typical = self._lengths.typical(min(setting.samples, LAID), setting.max_tokens)
        lengths = np.array(typical) + round(setting.prompt_tokens)
        parts = [*Packer(known.token_budget, known.short_rows).parts(lengths)]
        computed = sum(part.tokens for part in parts)
        span = (
            sum(part.tokens * part.width for part in parts) / computed
            if known.short_rows
            else 0.0
        )
        return BatchShape(cached, 1 - float(lengths.sum()) / computed, span)

    def _unexplained(self, ran: Simulated, step_s: float) -> float:
        """The standard deviation of a step that no cost explains: as much as the steps of the fit were off by."""
        off = {"generate": self.fit.generation_error, "train": self.fit.training_error}
        return math.hypot(
            MODEL_ERROR,
            *(
                error * min(ran.phases[name] / step_s, 1.0)
                for name, error in off.items()
            ),
        )

    def _forecast(
        self,
        setting: Setting,
        ran: Simulated,
        low: float = math.nan,
        high: float = math.nan,
    ) -> Forecast:
        step_s = typical_step(ran.windows.tolist(), setting.max_staleness)
        typical = self._lengths.typical(setting.samples, setting.max_tokens)
        return Forecast(
            setting=setting,
            step_s=step_s,
            low=low,
            high=high,
            tokens_per_s=float(ran.tokens.sum() / ran.windows.sum()),
            staleness_mean=float(ran.staleness.mean()),
            staleness_max=ran.staleness_max,
            idle_s=ran.idle_s,
            engine_busy=ran.engine_busy,
            trainer_busy=ran.trainer_busy,
            seconds=ran.phases,
            closed=closed_form(setting, self.rates, typical, self._shape(setting)),
            notes=self._notes(setting),
        )

    def _notes(self, setting: Setting) -> tuple[str, ...]:
        """How far a setting is from what was measured."""
        out = []
        ranges = {
            "samples of an engine": lambda s: (
                s.samples * (s.max_staleness + 1) / s.replicas
            ),
            "max_tokens": lambda s: s.max_tokens,
            "replicas": lambda s: s.replicas,
        }
        for name, value in ranges.items():
            known = [value(o.setting) for o in self.seen]
            asked = value(setting)
            if asked > 2 * max(known) or asked < min(known) / 2:
                seen = (
                    f"{min(known):g}"
                    if len(set(known)) == 1
                    else f"{min(known):g} to {max(known):g}"
                )
                out.append(f"{name}: {asked:g}, measured {seen}")
        if (
            setting.max_staleness
            and setting.placement == "shared"
            and not self.fit.overlapping
        ):
            out.append(
                "no record overlaps generation and training: what they take from each other is assumed"
            )
        if setting.max_tokens > self._lengths.longest and not self._lengths.fixed:
            out.append(
                "samples that the old limit cut short are carried on at the rate at which others ended"
            )
        if any(o.setting.placement != setting.placement for o in self.seen):
            out.append(f"placement {setting.placement!r} was not measured")
        return tuple(out)

    # Display ------------------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """Step time and staleness by K, throughput by batch, and where a step's time goes; what was measured too."""
        return _faces.draw(self, "figure")

    def panel(self) -> ForecastPanel | None:
        """Show sliders for every setting with the forecast beside them. None without a notebook or ipywidgets."""
        return _faces.draw(self, "panel")

    def __repr__(self) -> str:
        runs = f"{len(self.seen)} run{'s' * (len(self.seen) > 1)}"
        steps = sum(len(o.counted) for o in self.seen)
        return f"WhatIf({runs}, {steps} steps; {self.setting}: {self.seen[0].step_s:.3g} s a step measured)"

    def _repr_html_(self) -> str:
        return _faces.draw(self, "html")

    def _ipython_display_(self) -> None:
        self.panel()


def _interval(
    values: Sequence[float], middle: float, unexplained: float
) -> tuple[float, float]:
    """Where nine of ten step times lie: over draws of the fit, and what the model does not explain."""
    random = np.random.default_rng(0)
    spread = np.log(np.array(values) / middle) + unexplained * random.standard_normal(
        len(values)
    )
    low, high = np.exp(np.quantile(spread, [TAIL, 1 - TAIL])) * middle
    return min(float(low), middle), max(float(high), middle)


def _cached(seen: Sequence[Observation]) -> float:
    """The share of a prompt that a group's later samples find in the prefix cache."""
    found = 0.0
    later = 0.0
    for group in (g for o in seen for g in o.groups):
        found += group.prompt * len(group.lengths) - group.computed
        later += group.prompt * (len(group.lengths) - 1)
    return min(max(found / later, 0.0), 1.0) if later else 0.0


def _candidates(
    base: Setting, limits: Mapping[str, float], fixed: Mapping[str, Any]
) -> list[Setting]:
    """Settings worth a simulation: numbers of replicas and where they are, staleness bounds, sizes of the batch."""
    at_most = lambda name, usual, top: int(min(limits.get(name, usual), top))
    devices = at_most("devices", base.devices, LIMITS["replicas"] + 1)
    usual = max(devices - 1, base.replicas)
    most = at_most("replicas", usual, LIMITS["replicas"])
    bound = at_most("max_staleness", MOST_STALENESS, LIMITS["max_staleness"])
    places = {(base.placement, base.replicas)}
    places |= {("shared", n) for n in _counts(min(most, base.replicas))}
    places |= {("apart", n) for n in _counts(min(most, devices - 1))}
    factors = FACTORS if "step_s" in limits else (1,)
    sizes = sorted({max(round(base.prompts_per_step * f), 1) for f in factors})
    out = []
    for place, staleness, prompts in itertools.product(
        sorted(places), range(bound + 1), sizes
    ):
        found = {
            "placement": place[0],
            "replicas": place[1],
            "max_staleness": staleness,
            "prompts_per_step": prompts,
        }
        setting = base.changed(**{**found, **fixed})
        fits = setting.devices <= devices and setting.replicas <= most
        if fits and setting not in out:
            out.append(setting)
    return out


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and the largest; none below 1."""
    return sorted({2**k for k in range(most.bit_length())} | {most}) if most > 0 else []


def _exceeds(forecast: Forecast, limits: Mapping[str, float]) -> bool:
    return (
        forecast.step_s > limits.get("step_s", math.inf)
        or forecast.staleness_mean > limits.get("staleness_mean", math.inf)
        or forecast.setting.max_staleness > limits.get("max_staleness", math.inf)
    )

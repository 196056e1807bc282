"""`Forecast`: what one setting is expected to do; `ForecastTable`: several of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from jvlab.analysis.forecast._closed_form import Bounds
from jvlab.analysis.forecast._setting import Setting


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
    seconds: dict[str, float] = field(default_factory=dict)  # of a step, by phase; they may overlap
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
        more = "" if self.error is None else f", measured {self.measured_s:.3g} s ({self.error:+.1%})"
        return f"Forecast({self.setting}: {text}, {stale}{more})"

    def _repr_html_(self) -> str:
        from jvlab.views._forecast_view import forecast_html

        return forecast_html(self)


class ForecastTable(Sequence[Forecast]):
    """Forecasts, best first where they were ranked; a table in text and HTML."""

    def __init__(self, rows: Sequence[Forecast], title: str = "") -> None:
        self._rows, self.title = tuple(rows), title

    @overload
    def __getitem__(self, at: int) -> Forecast: ...
    @overload
    def __getitem__(self, at: slice) -> ForecastTable: ...
    def __getitem__(self, at: int | slice) -> Forecast | ForecastTable:
        return ForecastTable(self._rows[at], self.title) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Forecast]:
        return iter(self._rows)

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, minus 1, of those that were measured."""
        return tuple(row.error for row in self._rows if row.error is not None)

    def __repr__(self) -> str:
        from jvlab.views._forecast_view import table_text

        return table_text(self)

    def _repr_html_(self) -> str:
        from jvlab.views._forecast_view import table_html

        return table_html(self)

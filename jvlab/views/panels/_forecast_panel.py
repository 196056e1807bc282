"""`jv.whatif`'s panel: a slider for each setting of a run, and the forecast beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab.views._forecast_view import forecast_html
from jvlab.views.panels._live import Panel, static_html

if TYPE_CHECKING:
    from jvlab.analysis.forecast._whatif import Forecast, WhatIf

LABELS = {
    "prompts_per_step": "prompts a step",
    "group_size": "samples of each",
    "max_tokens": "tokens at most",
    "max_staleness": "staleness K",
    "replicas": "replicas",
}
PLACEMENTS = ("shared", "trainer apart", "apart")


class ForecastPanel(Panel):
    """The sliders; `predict` does what they do, `reset` goes back to the measured setting."""

    hz = 0.2  # nothing changes by itself
    moving = False  # its snapshot is renewed when a slider was moved
    scripts = ("forecast.js",)
    css = ("forecast.css",)
    css_class = "jv-forecast-panel"
    traits: ClassVar[dict[str, Any]] = {
        "title": "",
        "sliders": [],
        "places": [],
        "chosen": {},
        "result": "",
        "note": "",
        "answers": 0,  # `answers`: forecasts so far
    }

    def __init__(self, plan: WhatIf) -> None:
        self.plan = plan
        self.forecast: Forecast = plan.predict()
        super().__init__(plan)

    def build(self) -> Any:
        widget = self.new_widget(
            title=repr(self.plan), sliders=self._sliders(), places=list(PLACEMENTS)
        )
        widget.on_msg(self._moved)
        self._write(widget)
        return widget

    def _sliders(self) -> list[dict[str, Any]]:
        base = self.plan.setting
        return [
            {"name": name, "label": label, "values": _values(name, getattr(base, name))}
            for name, label in LABELS.items()
        ]

    def refresh(self) -> None:
        """Nothing: a forecast changes only when a slider is moved."""

    def static_html(self) -> str:
        """The plan, and the forecast that the sliders asked for last."""
        return static_html(self.plan) + forecast_html(self.forecast)

    def say(self, text: str, bad: bool = False) -> None:
        self.widget.note = text

    def _moved(self, _: Any, message: Any, __: Any) -> None:
        if not isinstance(message, dict):
            return
        if message.get("do") == "reset":
            self.act(self.reset)
        elif message.get("do") == "predict" and isinstance(message.get("values"), dict):
            self.act(lambda: self.predict(**message["values"]))

    def predict(self, **changes: Any) -> Forecast:
        """`plan.predict(**changes)`, shown."""
        unknown = set(changes) - {*LABELS, "placement"}
        if unknown:
            raise ConfigError(
                f"no slider for {', '.join(sorted(unknown))}",
                remedy=f"one of {', '.join(LABELS)}",
            )
        self.forecast = self.plan.predict(**changes)
        with self.widget.hold_sync():
            self._write(self.widget)
        self.save_snapshot()
        return self.forecast

    def reset(self) -> Forecast:
        """The measured setting again."""
        return self.predict()

    def _write(self, widget: Any) -> None:
        setting = self.forecast.setting
        widget.chosen = {
            **{name: getattr(setting, name) for name in LABELS},
            "placement": setting.placement,
        }
        widget.result = forecast_html(self.forecast)
        widget.note = ""
        widget.answers += 1

    def __repr__(self) -> str:
        return f"ForecastPanel({self.forecast!r})"


def _values(name: str, base: int) -> list[int]:
    """The stops of a slider, the measured value among them."""
    if name == "max_staleness":
        return sorted({*range(9), base})
    if name == "replicas":
        return sorted({1, 2, 3, 4, 6, 8, 12, 16, base})
    steps = {max(round(base * 2 ** (k / 2)), 1) for k in range(-6, 7)}
    return sorted(steps | {base})

"""The plan's panel: heat map of links, schedule of buckets, predicted and measured seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab.views._plan_view import (
    bucket_lanes,
    heat_svg,
    link_html,
    plan_headline,
    plan_title,
    times_html,
)
from jvlab.views.panels._live import Panel

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._plan_types import LinkPlan


class PlanPanel(Panel):
    """The plan's panel; `predict` and `select` do the same as its field and clicks."""

    hz = 1.0  # a sync may have been measured
    moving = False
    scripts = ("lanes.js", "plan.js")
    css = ("lanes.css",)
    css_class = "jv-plan-panel"
    traits: ClassVar[dict[str, Any]] = {
        "title": "",
        "headline": "",
        "heat": "",
        "times": "",
        "detail": "",
        "note": "",
        "picked": -1,
        "gbps": 50.0,
        "lanes": {},
    }

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._last_version = -1
        super().__init__(plan)

    def build(self) -> Any:
        gbps = self.plan.link_gbps
        widget = self.new_widget(
            title=plan_title(self.plan),
            headline=plan_headline(self.plan),
            heat=heat_svg(self.plan),
            times=times_html(self.plan),
            gbps=gbps,
            lanes=bucket_lanes(self.plan).plain(),
        )
        widget.observe(lambda change: self._picked(change["new"]), "picked")
        widget.on_msg(self._pressed)
        return widget

    def refresh(self) -> None:
        newest = self.plan.reports[-1].version if self.plan.reports else -1
        if newest != self._last_version:
            self._last_version = newest
            self.widget.times = times_html(self.plan, self.widget.gbps)

    def say(self, text: str, bad: bool = False) -> None:
        self.widget.note = text

    def _pressed(self, _: Any, message: dict[str, Any], __: Any) -> None:
        if message.get("do") == "predict":
            self.act(lambda: self.predict(message["gbps"]))

    def predict(self, link_gbps: float) -> float:
        """`plan.predict(link_gbps)`, shown with the schedule of buckets at that speed."""
        if not isinstance(link_gbps, (int, float)) or not link_gbps > 0:
            raise ConfigError(
                f"GB/s must be above 0, not {link_gbps!r}",
                remedy="50 is a 400 Gb/s port",
            )
        with self.widget.hold_sync():
            self.widget.gbps = float(link_gbps)
            self.widget.times = times_html(self.plan, link_gbps)
            self.widget.headline = plan_headline(self.plan, link_gbps)
            self.widget.lanes = bucket_lanes(self.plan, link_gbps).plain()
        self.say("")
        return self.plan.predict(link_gbps)

    def select(self, device: int, rank: int, replica: int = 0) -> LinkPlan:
        """`plan.link(device, rank, replica)`, shown below the heat map."""
        links = self.plan.all_links
        found = (
            (links.device == device) & (links.rank == rank) & (links.replica == replica)
        ).nonzero()[0]
        if not len(found):
            raise ConfigError(
                f"device {device} sends nothing to rank {rank} of replica {replica}"
            )
        self.widget.picked = int(found[0])
        return self.plan.link(device, rank, replica)

    def _picked(self, at: int) -> None:
        self.widget.detail = (
            link_html(self.plan, at) if 0 <= at < len(self.plan.all_links) else ""
        )

    def __repr__(self) -> str:
        return f"PlanPanel({len(self.plan.all_links)} links)"

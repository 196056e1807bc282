"""The stepper's panel: walk a weight sync with buttons, each of which is a method of `Stepper`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import CancelledError
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._errors import JvlabError
from jvlab.panels._assets import asset
from jvlab.panels._lab_panel import Confirmed, button
from jvlab.panels._live import Panel
from jvlab.views._process_rows import describe
from jvlab.views._stepper_view import diff_html, head_html, snapshot, tensor_name
from jvlab.views._style import BAD, BOX, FAINT

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._stepper import Stepper

ASK_SECONDS = 2.0  # deadline of the look at the engines
OVER = ("committed", "aborted")


@functools.cache
def list_class() -> type[Any]:
    """The list of tensors, as an anywidget; made on first use, so that importing this module needs no widgets."""
    import anywidget
    import traitlets

    class TensorList(anywidget.AnyWidget):
        """Names and sizes once; then only where the sync stands, the digests' letters and the breaks."""

        _esm = asset("stepper.js")
        names = traitlets.List().tag(sync=True)
        sizes = traitlets.List().tag(sync=True)
        position = traitlets.Int(0).tag(sync=True)
        ticks = traitlets.Unicode("").tag(sync=True)
        breaks = traitlets.List().tag(sync=True)
        over = traitlets.Bool(False).tag(sync=True)

    return TensorList


class StepperPanel(Panel):
    """Step, run, run to a breakpoint, pause, abort, verify; where every byte stands, and the engines' state."""

    hz = 4.0

    def build(self) -> Any:
        import ipywidgets

        stepper: Stepper = self.subject
        s = snapshot(stepper)
        self.head, self.message, self.difference = (
            ipywidgets.HTML().add_class(mark) for mark in ("jv-head", "jv-message", "jv-diff")
        )
        self.list = list_class()(names=list(s.names), sizes=list(s.sizes))
        self.list.on_msg(lambda _, content, __: self._asked(content))
        self.pattern = ipywidgets.Text(placeholder=r"regex, e.g. layers\.3\.", layout={"width": "16em"})
        self.pattern.add_class("jv-pattern")
        self.compare = ipywidgets.Checkbox(value=True, description="differences", indent=False)
        self.compare.add_class("jv-compare").layout.width = "auto"
        bar = ipywidgets.HBox(self._buttons(), layout={"flex_flow": "row wrap", "align_items": "center"})
        self._write()
        return ipywidgets.VBox([self.head, bar, self.list, self.difference, self.message]).add_class("jv-stepper")

    def _buttons(self) -> list[Any]:
        stepper: Stepper = self.subject
        self.step = button("step", "stepper.step()", "jv-step", lambda: self._walk(stepper.step, "step", one=True))
        self.run = button("run", "stepper.run()", "jv-run", lambda: self._walk(stepper.run, "run"))
        self.run_to = button("run to", "stepper.run(until=regex)", "jv-run-to", self._run_to)
        self.pause = button("pause", "stepper.pause()", "jv-stop", lambda: self.act(stepper.pause, "pause"))
        self.verify = button("verify", "stepper.verify()", "jv-verify", lambda: self.act(self._verify))
        self.abort = button("abort", "stepper.abort()", "jv-abort")
        self._asking = Confirmed(self.abort, lambda: self.act(stepper.abort, "abort"))
        return [self.step, self.run, self.pattern, self.run_to, self.pause, self.verify, self.abort, self.compare]

    # What the buttons do ------------------------------------------------------------------------------------------

    def _run_to(self) -> None:
        until = self.pattern.value.strip()
        if not until:
            self.say("give a regular expression: the run stops in front of the first tensor that it matches", bad=True)
            return
        self._walk(lambda: self.subject.run(until=until), f"run to {until}")

    def _walk(self, method: Callable[[], Any], text: str, one: bool = False) -> None:
        self.act(lambda: self._walked(method, one), text)

    def _walked(self, method: Callable[[], Any], one: bool) -> None:
        """One step shows the same tensor before and after; a longer walk what lies ahead where it stopped."""
        stepper: Stepper = self.subject
        name = stepper.upcoming
        before = self._look(name) if one else None
        method()
        if one:
            self._compare(name, {"before": before, "after": self._look(name)})
        else:
            self._compare(stepper.upcoming, {"ahead": self._look(stepper.upcoming)})

    def _look(self, name: str) -> list[TensorDiff] | str | None:
        """`stepper.diff(name)`, or why not; None where there is no such tensor or nobody wants it."""
        stepper: Stepper = self.subject
        if not self.compare.value or name not in self.list.names or stepper.state in OVER:
            return None
        try:
            return stepper.diff(name)
        except JvlabError as error:  # some tensors can't be read back; the walk goes on
            return error.message

    def _compare(self, name: str, looks: dict[str, list[TensorDiff] | str | None]) -> None:
        found = {when: look for when, look in looks.items() if isinstance(look, list)}
        why = next((look for look in looks.values() if isinstance(look, str)), "")
        if found:
            self.difference.value = diff_html(name, found)
        elif why:
            faint = f'<span style="color:{FAINT}">{escape(why)}</span>'
            self.difference.value = f'<div style="{BOX}">{tensor_name(name)} {faint}</div>'
        else:
            self.difference.value = ""

    def _asked(self, content: Any) -> None:
        """A click on a tensor of the list."""
        index = content.get("look") if isinstance(content, dict) else None
        if isinstance(index, int) and 0 <= index < len(self.list.names):
            name = self.list.names[index]
            self.act(lambda: self._compare(name, {"now": self._look(name)}))

    def _verify(self) -> None:
        report = self.subject.verify()
        self.say(repr(report), bad=not report.ok)

    # What is shown ------------------------------------------------------------------------------------------------

    def say(self, text: str, bad: bool = False) -> None:
        colour = BAD if bad else FAINT
        self.message.value = (
            f'<div style="{BOX};color:{colour};white-space:pre-wrap">{escape(text)}</div>' if text else ""
        )

    def refresh(self) -> None:
        pool = self.subject.link.pool
        try:
            # asked, since the gateway sends nothing by itself when only numbers of a beat changed
            status = describe(pool._client, ASK_SECONDS)
            found = next((p for p in status.pools if p.pool == pool.name), None)
            if found is not None:
                pool._take(found)
        except (JvlabError, CancelledError, TimeoutError) as error:
            self.say(str(error) or "the gateway did not answer", bad=True)
        self._write()

    def _write(self) -> None:
        stepper: Stepper = self.subject
        s = snapshot(stepper)
        self.head.value = head_html(s, stepper.link.pool._snapshot)
        with self.list.hold_sync():
            self.list.position, self.list.ticks = s.position, s.ticks
            self.list.breaks, self.list.over = list(s.breaks), s.state in OVER
        over = s.state in OVER
        for walking in (self.step, self.run, self.run_to, self.verify):
            walking.disabled = s.busy or over
        self.pause.disabled = not s.busy
        self.abort.disabled = over
        self._asking.disarm(only_if_late=True)

    @property
    def done(self) -> bool:
        return self.subject.state in OVER and not self.subject.busy

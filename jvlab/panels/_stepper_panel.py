"""The stepper's panel: steps through a weight sync with buttons, each of which calls a method of `Stepper`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import CancelledError
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._errors import JvlabError
from jvlab.panels._assets import asset
from jvlab.panels._lab_panel import ConfirmButton, button
from jvlab.panels._live import Panel
from jvlab.views._process_rows import describe
from jvlab.views._stepper_view import diff_html, head_html, snapshot, tensor_name
from jvlab.views._style import BOX, FAINT, message_html

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._stepper import Stepper

DESCRIBE_SECONDS = 2.0  # deadline for the engines' state
OVER = ("committed", "aborted")


@functools.cache
def list_class() -> type[Any]:
    """The list of tensors as an anywidget; created on first use, so that importing this module needs no widgets."""
    import anywidget
    import traitlets

    class TensorList(anywidget.AnyWidget):
        """Names and sizes are sent once; after that only position, digest results and breakpoints."""

        _esm = asset("stepper.js")
        names = traitlets.List().tag(sync=True)
        sizes = traitlets.List().tag(sync=True)
        position = traitlets.Int(0).tag(sync=True)
        ticks = traitlets.Unicode("").tag(sync=True)
        breaks = traitlets.List().tag(sync=True)
        over = traitlets.Bool(False).tag(sync=True)

    return TensorList


class StepperPanel(Panel):
    """Step, run, run to a breakpoint, pause, abort, verify; shows progress and the engines' state."""

    hz = 4.0

    def build(self) -> Any:
        import ipywidgets

        stepper: Stepper = self.subject
        s = snapshot(stepper)
        self.head, self.message, self.difference = (
            ipywidgets.HTML().add_class(name) for name in ("jv-head", "jv-message", "jv-diff")
        )
        self.list = list_class()(names=list(s.names), sizes=list(s.sizes))
        self.list.on_msg(lambda _, content, __: self._clicked(content))
        self.pattern = ipywidgets.Text(placeholder=r"regex, e.g. layers\.3\.", layout={"width": "16em"})
        self.pattern.add_class("jv-pattern")
        self.compare = ipywidgets.Checkbox(value=True, description="differences", indent=False)
        self.compare.add_class("jv-compare").layout.width = "auto"
        bar = ipywidgets.HBox(self._buttons(), layout={"flex_flow": "row wrap", "align_items": "center"})
        self._write()
        return ipywidgets.VBox([self.head, bar, self.list, self.difference, self.message]).add_class("jv-stepper")

    def _buttons(self) -> list[Any]:
        stepper: Stepper = self.subject
        self.step = button("step", "stepper.step()", "jv-step", lambda: self._advance(stepper.step, "step", one=True))
        self.run = button("run", "stepper.run()", "jv-run", lambda: self._advance(stepper.run, "run"))
        self.run_to = button("run to", "stepper.run(until=regex)", "jv-run-to", self._run_to)
        self.pause = button("pause", "stepper.pause()", "jv-stop", lambda: self.act(stepper.pause, "pause"))
        self.verify = button("verify", "stepper.verify()", "jv-verify", lambda: self.act(self._verify))
        self.abort = button("abort", "stepper.abort()", "jv-abort")
        self._confirm = ConfirmButton(self.abort, lambda: self.act(stepper.abort, "abort"))
        return [self.step, self.run, self.pattern, self.run_to, self.pause, self.verify, self.abort, self.compare]

    # Actions of the buttons ---------------------------------------------------------------------------------------

    def _run_to(self) -> None:
        until = self.pattern.value.strip()
        if not until:
            self.say("give a regular expression: the run stops before the first tensor that it matches", bad=True)
            return
        self._advance(lambda: self.subject.run(until=until), f"run to {until}")

    def _advance(self, method: Callable[[], Any], text: str, one: bool = False) -> None:
        self.act(lambda: self._advance_and_compare(method, one), text)

    def _advance_and_compare(self, method: Callable[[], Any], one: bool) -> None:
        """After a single step, compare its tensor before and after; after a run, show the next tensor."""
        stepper: Stepper = self.subject
        name = stepper.upcoming
        before = self._diff(name) if one else None
        method()
        if one:
            self._compare(name, {"before": before, "after": self._diff(name)})
        else:
            self._compare(stepper.upcoming, {"ahead": self._diff(stepper.upcoming)})

    def _diff(self, name: str) -> list[TensorDiff] | str | None:
        """`stepper.diff(name)`, or why it failed; None if there is no such tensor or comparing is switched off."""
        stepper: Stepper = self.subject
        if not self.compare.value or name not in self.list.names or stepper.state in OVER:
            return None
        try:
            return stepper.diff(name)
        except JvlabError as error:  # some tensors cannot be read back; stepping continues
            return error.message

    def _compare(self, name: str, diffs: dict[str, list[TensorDiff] | str | None]) -> None:
        found = {when: diff for when, diff in diffs.items() if isinstance(diff, list)}
        why = next((diff for diff in diffs.values() if isinstance(diff, str)), "")
        if found:
            self.difference.value = diff_html(name, found)
        elif why:
            faint = f'<span style="color:{FAINT}">{escape(why)}</span>'
            self.difference.value = f'<div style="{BOX}">{tensor_name(name)} {faint}</div>'
        else:
            self.difference.value = ""

    def _clicked(self, content: Any) -> None:
        """A tensor in the list was clicked."""
        index = content.get("look") if isinstance(content, dict) else None
        if isinstance(index, int) and 0 <= index < len(self.list.names):
            name = self.list.names[index]
            self.act(lambda: self._compare(name, {"now": self._diff(name)}))

    def _verify(self) -> None:
        report = self.subject.verify()
        self.say(repr(report), bad=not report.ok)

    # Display ------------------------------------------------------------------------------------------------------

    def say(self, text: str, bad: bool = False) -> None:
        self.message.value = message_html(text, bad)

    def refresh(self) -> None:
        pool = self.subject.link.pool
        try:
            # polled, since the gateway does not push when only a heartbeat's numbers changed
            status = describe(pool._client, DESCRIBE_SECONDS)
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
        for widget in (self.step, self.run, self.run_to, self.verify):
            widget.disabled = s.busy or over
        self.pause.disabled = not s.busy
        self.abort.disabled = over
        self._confirm.disarm(only_if_expired=True)

    @property
    def done(self) -> bool:
        return self.subject.state in OVER and not self.subject.busy

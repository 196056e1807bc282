"""The stepper's panel: steps through a weight sync with buttons, each of which calls a method of `Stepper`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab._errors import GatewayUnreachable, JvlabError
from jvlab.views._cards import describe
from jvlab.views._style import BOX, FAINT, hollow_dots, message_html
from jvlab.views._sync_view import diff_html, head_html, snapshot, tensor_name
from jvlab.views.panels._live import module, parts_widget, styles
from jvlab.views.panels._parts import ConfirmButton, PartsPanel, box

if TYPE_CHECKING:
    from jvlab.sync._diff import TensorDiff
    from jvlab.sync._stepper import Stepper

DESCRIBE_SECONDS = 2.0  # deadline for the engines' state
OVER = ("committed", "aborted")


@functools.cache
def _widget_class() -> type[Any]:
    """Created on first use, so that importing this module needs no widgets."""
    import traitlets

    return parts_widget(
        module("controls.js", "stepper.js"),
        styles(),
        # names, units and sizes are sent once; after that only position, digest results and breakpoints
        names=traitlets.List().tag(sync=True),
        units=traitlets.List().tag(sync=True),
        sizes=traitlets.List().tag(sync=True),
        position=traitlets.Int(0).tag(sync=True),
        ticks=traitlets.Unicode("").tag(sync=True),
        breaks=traitlets.List().tag(sync=True),
        over=traitlets.Bool(False).tag(sync=True),
    )


class StepperPanel(PartsPanel):
    """Step, run, run to a breakpoint, pause, abort, verify; shows progress and the engines' state."""

    hz = 4.0
    remedy = (
        "jv.Lab.attach(), then link.stepper(params): the gateway abandoned this one"
    )

    def widget_class(self) -> type[Any]:
        return _widget_class()

    @property
    def progress(self) -> str:
        return snapshot(self.subject).progress

    def make_parts(self) -> None:
        self.classes = ["jv-stepper"]
        stepper: Stepper = self.subject
        s = snapshot(stepper)
        self.list = self.widget
        self.list.names = list(s.names)
        self.list.units = list(s.units)
        self.list.sizes = list(s.sizes)
        self.list.on_msg(lambda _, content, __: self._clicked(content))
        parts = self.parts
        self.head, self.message, self.difference = (
            parts.html(c) for c in ("jv-head", "jv-message", "jv-diff")
        )
        self.pattern = parts.add(
            "text",
            "jv-pattern",
            placeholder="regex of a tensor",
            width="16em",
            wrong="",
        )
        self.pattern.on_press(self._run_to)
        self.compare = parts.add(
            "check", "jv-compare", description="differences", value=True
        )
        rows = parts.add("draw", "jv-list", draw="tensors")
        parts.arrange(
            box(
                self.head,
                box(*self._buttons(), row=True),
                rows,
                self.difference,
                self.message,
            )
        )
        self._write()

    def _buttons(self) -> list[Any]:
        stepper: Stepper = self.subject
        button = self.parts.button
        self.step = button(
            "step",
            "stepper.step()",
            "jv-step",
            lambda: self._advance(stepper.step, "step", one=True),
        )
        self.run = button(
            "run", "stepper.run()", "jv-run", lambda: self._advance(stepper.run, "run")
        )
        self.run_to = button(
            "run to", "stepper.run(until=regex)", "jv-run-to", self._run_to
        )
        self.pause = button(
            "pause",
            "stepper.pause()",
            "jv-stop",
            lambda: self.act(stepper.pause, "pause"),
        )
        self.verify = button(
            "verify", "stepper.verify()", "jv-verify", lambda: self.act(self._verify)
        )
        self.abort = button("abort", "stepper.abort()", "jv-abort")
        self._confirm = ConfirmButton(
            self.abort, lambda: self.act(stepper.abort, "abort")
        )
        return [
            self.step,
            self.run,
            self.pattern,
            self.run_to,
            self.pause,
            self.verify,
            self.abort,
            self.compare,
        ]

    # Actions of the buttons ---------------------------------------------------------------------------------------

    def _run_to(self) -> None:
        until = self.pattern.value.strip()
        if not until:
            self.pattern.wrong = "give a regular expression: the run stops before the first tensor that it matches"
            return
        try:
            matches = [name for name in self.list.names if re.search(until, name)]
        except re.error as error:
            self.pattern.wrong = f"not a regular expression: {error}"
            return
        if not matches:
            self.pattern.wrong = "no tensor has this name"
            return
        self.pattern.wrong = ""
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
        if (
            not self.compare.value
            or name not in self.list.names
            or stepper.state in OVER
        ):
            return None
        try:
            return stepper.diff(name)
        # some tensors cannot be read back; stepping continues
        except JvlabError as error:
            return error.message

    def _compare(
        self, name: str, diffs: dict[str, list[TensorDiff] | str | None]
    ) -> None:
        found = {when: diff for when, diff in diffs.items() if isinstance(diff, list)}
        why = next((diff for diff in diffs.values() if isinstance(diff, str)), "")
        if found:
            self.difference.value = diff_html(name, found)
        elif why:
            faint = f'<span style="color:{FAINT}">{escape(why)}</span>'
            self.difference.value = (
                f'<div style="{BOX}">{tensor_name(name)} {faint}</div>'
            )
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
            status = describe(pool.client, DESCRIBE_SECONDS)
        except (JvlabError, CancelledError, TimeoutError) as error:
            self._lost(isinstance(error, GatewayUnreachable), error)
            return
        found = next((p for p in status.pools if p.pool == pool.name), None)
        if found is not None:
            pool.renew(found)
        self._write()
        self.found()

    def _lost(self, gone: bool, error: BaseException) -> None:
        """The gateway did not answer: nothing is known of the engines."""
        what = "gateway gone" if gone else "the gateway does not answer"
        with self.parts.together():
            self.head.value = hollow_dots(self.head.value)
            for part in (self.step, self.run, self.run_to, self.verify, self.pause):
                part.why = what
            self.say(str(error) or what, bad=True)
        self.lose(what, "lab = jv.Lab()" if gone else "lab.panel()")

    def _write(self) -> None:
        stepper: Stepper = self.subject
        s = snapshot(stepper)
        over = f"the sync is {s.state}" if s.state in OVER else ""
        with self.parts.together():
            self.head.value = head_html(s, stepper.link.pool.snapshot)
            for part in (self.step, self.run, self.run_to, self.verify):
                part.why = over or ("a step is being sent" if s.busy else "")
            self.pause.why = "" if s.busy else "nothing runs"
            self.abort.why = over
            self._confirm.disarm(only_if_expired=True)
        with self.list.hold_sync():
            self.list.position = s.position
            self.list.ticks = s.ticks
            self.list.breaks = list(s.breaks)
            self.list.over = s.state in OVER

    @property
    def done(self) -> bool:
        return self.subject.state in OVER and not self.subject.busy

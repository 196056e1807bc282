"""The stepper and its panel over a fake transaction: each button is its method, threads take turns, faces escape."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jvlab._errors import ConfigError, SyncError, VerifyError
from jvlab.sync._diff import TensorDiff
from jvlab.sync._stepper import Stepper
from jvlab.views._sync_view import StepperPanel, snapshot
from tests.views.html_checks import check
from tests.views.panels.calls import calls
from tests.views.panels.fake_stepper import EVIL, NAMES, stepper
from tests.views.panels.fifty import fifty_leave_nothing
from tests.waiting import until


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[Stepper, StepperPanel]]]:
    """Makes panels; `diff` answers without an engine."""
    looked: list[str] = []

    def diff(self: Stepper, name: str, replica: int = 0) -> list[TensorDiff]:
        looked.append(name)
        if name == NAMES[1]:
            raise ConfigError(f"{name} can't be read back")
        return [TensorDiff(name, 0, (3, 4), 1.0, 1.5, 0.5, 0.25, 0.75)]

    monkeypatch.setattr(Stepper, "diff", diff)
    made: list[StepperPanel] = []

    def make(**options: Any) -> tuple[Stepper, StepperPanel]:
        walked = stepper(**options)
        made.append(StepperPanel(walked))
        return walked, made[-1]

    make.looked = looked  # type: ignore[attr-defined]
    yield make
    for panel in made:
        panel.close()


def log(walked: Stepper) -> list[str]:
    return walked.link.transaction.log  # type: ignore[attr-defined]


def test_step_sends_one_tensor_and_shows_it_before_and_after(shown: Any):
    walked, panel = shown()
    panel.step.click()
    until(lambda: "after" in panel.difference.value)
    assert log(walked) == ["prepare", "embed.weight@0", "embed.weight@1"]
    assert shown.looked == ["embed.weight", "embed.weight"]
    assert "75.0%" in panel.difference.value
    panel.refresh_now()
    assert (panel.list.position, walked.state) == (1, "moving")
    assert "1 of 7 tensors sent" in words_of(panel.head.value)
    panel.step.click()
    until(lambda: "read back" in panel.difference.value)
    until(lambda: walked.position == 2)


def test_run_to_stops_in_front_of_the_match_and_run_commits(shown: Any):
    walked, panel = shown(breakpoints=("lm_head",))
    panel.refresh_now()
    assert panel.list.breaks == [6]
    panel.pattern.value = r"layers\.1\."
    panel.run_to.click()
    until(lambda: "done" in panel.message.value)
    assert walked.upcoming == "layers.1.qkv.weight"
    assert shown.looked == ["layers.1.qkv.weight"], "what lies ahead"
    panel.run.click()
    until(lambda: walked.upcoming == "lm_head.weight" and not walked.busy)
    panel.run.click()
    until(lambda: walked.state == "committed" and not walked.busy)
    assert log(walked)[-2:] == ["verify", "commit"]
    panel.refresh_now()
    assert panel.list.ticks == "=" * len(NAMES)
    assert panel.done
    assert panel.step.disabled
    assert panel.abort.disabled


def test_run_to_wants_a_pattern_and_says_what_is_wrong_with_one(shown: Any):
    walked, panel = shown()
    panel.run_to.click()
    assert "give a regular expression" in panel.pattern.wrong
    panel.pattern.value = "("
    panel.run_to.click()
    assert "not a regular expression" in panel.pattern.wrong
    panel.pattern.value = "layers.7"
    panel.run_to.click()
    assert panel.pattern.wrong == "no tensor has this name"
    assert log(walked) == []


def words_of(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_every_tensor_of_a_bucket_is_listed_and_can_be_stopped_at(shown: Any):
    walked, panel = shown(breakpoints=("layers.1.qkv",), per_bucket=3)
    s = snapshot(walked)
    assert s.names == NAMES
    assert s.units == (0, 0, 0, 1, 1, 1, 2)
    assert len(s.sizes) == 3
    assert panel.list.breaks == [3]
    # inside the second bucket, behind the breakpoint
    panel.pattern.value = "layers.1.mlp"
    walked.breakpoints.clear()
    panel.run_to.click()
    until(lambda: "done" in panel.message.value)
    assert (walked.stopped_at, walked.upcoming, walked.position) == (
        "layers.1.mlp.weight",
    ) * 2 + (1,)
    assert shown.looked == ["layers.1.mlp.weight"], (
        "the one that was asked for, not the first of its bucket"
    )
    panel.refresh_now()
    assert "3 of 7 tensors sent 1 of 3 buckets sent" in words_of(panel.head.value)
    assert "next: " in panel.head.value
    panel.step.click()
    until(lambda: "after" in panel.difference.value)
    assert set(shown.looked) == {"layers.1.mlp.weight"}
    assert walked.stopped_at == ""
    check(walked._repr_html_())


def test_pause_works_while_a_run_goes_on_and_nothing_runs_twice(shown: Any):
    walked, panel = shown(delay=0.05)
    panel.run.click()
    until(lambda: walked.busy and walked.position >= 1)
    panel.refresh_now()
    assert panel.step.disabled
    assert not panel.pause.disabled
    panel.pause.click()
    until(lambda: not walked.busy)
    stopped = walked.position
    assert 1 <= stopped < len(NAMES)
    time.sleep(0.15)
    assert walked.position == stopped
    threads = [threading.Thread(target=walked.step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert walked.position == min(stopped + 3, len(NAMES))
    assert walked.link.transaction.most_inside == 1  # type: ignore[attr-defined]


def test_abort_asks_first_and_then_gives_up(shown: Any):
    walked, panel = shown()
    walked.step()
    panel.abort.click()
    assert panel.abort.description == "really abort?"
    assert walked.state == "moving"
    panel.abort.click()
    until(lambda: walked.state == "aborted")
    until(lambda: log(walked)[-1] == "abandon")
    with pytest.raises(SyncError, match="over"):
        walked.step()


def test_abort_cuts_a_step_off_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jvlab.sync._stepper.ABORT_WAITS", 0.1)
    walked = stepper(hang=True)
    failed: list[BaseException] = []

    def step() -> None:
        try:
            walked.step()
        except SyncError as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    until(lambda: walked.link.transaction.inside)  # type: ignore[attr-defined]
    walked.abort()
    thread.join(5)
    assert not thread.is_alive()
    assert len(failed) == 1
    assert log(walked).count("abandon") == 1
    assert walked.state == "aborted"


def test_verify_ticks_what_has_arrived_and_marks_what_differs(shown: Any):
    walked, panel = shown(wrong=("layers.0.qkv.weight",))
    walked.step()
    walked.step()
    panel.verify.click()
    until(lambda: "1 parameters differ" in panel.message.value)
    panel.refresh_now()
    assert panel.list.ticks == "=x" + "." * (len(NAMES) - 2)
    with pytest.raises(VerifyError):
        walked.run()
    assert walked.state == "aborted"
    assert walked.checked["layers.0.qkv.weight"] is False
    assert walked.checked["lm_head.weight"] is True


def test_a_click_on_a_tensor_compares_it(shown: Any):
    _, panel = shown()
    panel._clicked({"look": 2})
    until(lambda: "layers.0.mlp.weight" in panel.difference.value)
    for wrong in ({"look": 99}, {"look": "2"}, {}, None):
        panel._clicked(wrong)
    time.sleep(0.05)
    assert shown.looked == ["layers.0.mlp.weight"]


def test_progress_per_rank_adds_up():
    walked = stepper()
    walked.run(until="layers.1")
    s = snapshot(walked)
    assert [(r.rank, r.done, r.total) for r in s.ranks] == [
        (0, 6000, 28000),
        (1, 6000, 28000),
    ]
    assert s.bytes_done == 12000
    assert sum(s.sizes) == 56000


@pytest.mark.parametrize("moment", ["ready", "moving", "aborted", "committed"])
def test_the_static_face(moment: str):
    def at() -> Stepper:
        walked = stepper(breakpoints=("lm_head",))
        if moment == "committed":
            walked.breakpoints.clear()
            walked.run()
        elif moment != "ready":
            walked.step()
        if moment == "aborted":
            walked.abort()
        return walked

    html = at()._repr_html_()
    check(html)
    assert html == at()._repr_html_()
    assert moment in html
    assert "serving" in html
    assert EVIL not in html
    assert "&lt;script&gt;" in html
    assert repr(at()) == repr(at())


def test_three_thousand_tensors_stay_small_and_quick():
    names = tuple(f"model.layers.{i // 10}.part{i % 10}.weight" for i in range(3000))
    walked = stepper(names=names)
    for _ in range(5):
        walked.step()
    assert len(walked._repr_html_()) < 12_000
    panel = StepperPanel(walked)
    try:
        few = StepperPanel(stepper())
        try:
            assert calls(panel.refresh_now) < 5 * calls(few.refresh_now), (
                "a look shows a page, not every tensor"
            )
        finally:
            few.close()
    finally:
        panel.close()


def test_fifty_panels_leave_no_thread_and_no_comm():
    walked = stepper()
    fifty_leave_nothing(lambda: StepperPanel(walked))

"""The stepper's panel in a real JupyterLab over a real engine: step, break, look, verify, abort, commit, die."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.browser.engine_cells import CONNECT, attach, shots
from tests.browser.lab_page import LabPage

pytestmark = pytest.mark.engine
PANEL = ".jv-stepper"
SOAK = pytest.mark.soak
ENDINGS = [
    pytest.param("shut down", "staged", marks=SOAK),
    pytest.param("kill", "staged", marks=SOAK),
    ("kill", "direct"),
]
START = """
link.sync(policy.params, progress=False)
before, version = greedy(), link.version
stepper = link.stepper(other, mode="staged", breakpoints=["lm_head"])
stepper
"""


def at(page: LabPage, position: int, seconds: float = 120.0) -> None:
    page.until(
        f"document.querySelector('{PANEL} .jv-tensors')?.dataset.position === '{position}'",
        seconds,
    )


def abort(page: LabPage) -> None:
    page.click(f"{PANEL} .jv-abort")
    page.wait(f"{PANEL} .jv-abort", text="really abort?")
    page.click(f"{PANEL} .jv-abort")
    page.until(f"!document.querySelector('{PANEL}')")


def test_it_steps_breaks_aborts_and_commits(page: LabPage, lab: Any, steered: Any):
    page.open([attach(lab), CONNECT, START]).run_all()
    page.wait(f"{PANEL} .jv-head", text="serving")
    page.click(f"{PANEL} .jv-step")
    at(page, 1)
    assert page.run("print(len(stepper.steps), stepper.state)") == "1 moving"
    page.wait(f"{PANEL} .jv-diff", text="after")
    # 288 of vLLM's 320 rows of an embedding are the model's
    assert page.text(f"{PANEL} .jv-diff").count("90.0%") == 2, (
        "staged: the engine's own memory waits for the commit"
    )
    assert page.run("print(greedy() == before)") == "True", "staged: it goes on serving"

    page.fill(f"{PANEL} .jv-pattern input", r"layers\.1\.")
    page.raw.keyboard.press("Tab")
    page.click(f"{PANEL} .jv-run-to")
    page.wait(f"{PANEL} .jv-head", text="next: model.layers.1.")
    place = page.run(
        "print(len(stepper.steps), any('layers.1' in n for s in stepper.steps for n in s.parameters))"
    )
    assert place.endswith("False")
    at(page, int(place.split()[0]))
    page.click(f"{PANEL} .jv-verify")
    page.wait(f"{PANEL} .jv-message", text="digests equal")
    page.until(
        f"Number(document.querySelector('{PANEL} .jv-tensors').dataset.ticked) > 0"
    )
    shots(page, "stepper", PANEL)
    page.click(f"{PANEL} .jv-run")
    page.wait(f"{PANEL} .jv-head", text="next: lm_head")

    # a second view, opened where the sync stands, not at its beginning
    page.run("stepper")
    page.until(f"document.querySelectorAll('{PANEL} .jv-tensors').length === 2")
    page.until(
        f"[...document.querySelectorAll('{PANEL} .jv-tensors')].every((box) => box.scrollTop > 0)"
    )

    abort(page)
    assert (
        page.run("print(stepper.state, greedy() == before, link.version == version)")
        == "aborted True True"
    )

    page.run("stepper = link.stepper(other, mode='direct')\nstepper")
    page.click(f"{PANEL} .jv-step")
    page.wait(f"{PANEL} .jv-diff", text="after")
    assert "0.0%" in page.text(f"{PANEL} .jv-diff"), "direct: what was sent is there"
    page.wait(f"{PANEL} .jv-head", text="paused for a sync")
    abort(page)
    assert (
        page.run(
            "try:\n    greedy()\nexcept jv.errors.EngineDirty:\n    print('dirty')"
        )
        == "dirty"
    )
    page.wait(".jp-OutputArea-output", text="dirty: sync again")

    page.run("stepper = link.stepper(other, mode='direct')\nstepper")
    page.click(f"{PANEL} .jv-run")
    page.until(f"!document.querySelector('{PANEL}')", 120)
    said = page.run(
        "print(stepper.state, stepper.report.verified, bool(link.verify(other)), greedy() != before)"
    )
    assert said == "committed True True True"


@pytest.mark.parametrize(("end", "mode"), ENDINGS)
def test_a_kernel_that_goes_leaves_a_clean_engine(
    page: LabPage, lab: Any, steered: Any, end: str, mode: str
):
    page.open([attach(lab), CONNECT, START.replace("staged", mode)]).run_all()
    page.click(f"{PANEL} .jv-step")
    at(page, 1)
    facts = page.run("import os; print(os.getpid(), version, *before)").split()
    pid, version, before = int(facts[0]), int(facts[1]), [int(t) for t in facts[2:]]
    os.kill(pid, signal.SIGKILL) if end == "kill" else page.server.end_kernels()
    until_idle(steered)
    ask = lambda: list(
        steered.generate(
            [[5, 6, 7, 8]], max_tokens=8, temperature=0.0, ignore_eos=True
        )[0].token_ids
    )
    if mode == "staged":
        assert (ask(), steered.status()["version"]) == (before, version), (
            "the old version goes on"
        )
    else:
        with pytest.raises(Exception, match="dirty"):
            ask()
    import jvlab as jv

    policy = jv.Policy.from_pretrained(steered.model)
    link = lab.connect(policy.params, steered, rules="policy", bucket_mib=0.25)
    assert link.sync(policy.params, progress=False).verified, "the next sync works"
    assert ask() == before
    link.close()


def until_idle(pool: Any, seconds: float = 120.0) -> None:
    """Until nobody holds the pool: the gateway has seen that the kernel is gone."""
    import time

    deadline = time.monotonic() + seconds
    while (status := pool.status())["trainer"] or status["sync"] != "idle":
        assert time.monotonic() < deadline, status
        time.sleep(0.1)

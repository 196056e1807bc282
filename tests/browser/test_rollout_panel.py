"""The rollout viewer in a real JupyterLab: keys and buttons move it, colours mean something, evil text stays text."""

from __future__ import annotations

import os

import pytest

from tests.browser.lab_page import LabPage
from tests.waiting import until

CELLS = [
    "import jvlab as jv\nfrom tests.views.batches import compared, make_batch\n"
    "batch = compared(make_batch(jv.models.tiny('llama')))\n"
    "batch = batch.with_rewards([{'form': 0.25, 'right': s.reward} for s in batch])",
    "panel = batch.panel()",
]
ROOT = ".jv-rollout"


def at(page: LabPage) -> tuple[int, int, str]:
    data = page.data(ROOT)
    return int(data["prompt"]), int(data["sample"]), data["colour"]


def kernel_knows(page: LabPage, what: str, want: str) -> None:
    """Until then ipywidgets may hold back what the page changed, and send it after the next cell."""
    until(lambda: page.run(f"print(({what}))") == want, f"{what} = {want}", pause=0.3)


def test_it_moves_colours_and_keeps_evil_text_as_text(page: LabPage):
    page.open(CELLS).run_all()
    page.wait(f"{ROOT} .jv-sample")
    assert page.count(f"{ROOT} .jv-sample") == 4, (
        "the samples of one prompt, side by side"
    )
    said = page.script(f"document.querySelector('{ROOT} .jv-text').textContent")
    assert "<script>window.jvHacked=1</script><img src=x onerror=" in said
    assert "**bold** \\u202eRTL" in said
    page.until(
        "document.querySelectorAll('.jv-rollout script, .jv-rollout img, .jv-rollout a').length === 0"
    )
    assert page.script("window.jvHacked === undefined")
    said = page.text(f"{ROOT} .jv-samples")
    assert "reward 1.250 ★" in said
    assert said.count("★") == 1, "only for the best"
    assert "form 0.250 + right 1.000" in said, "the reward by part"

    assert page.cut(ROOT) == []
    assert at(page) == (0, 0, "gap"), "a compared batch shows the gap first"
    cells = page.script("window.jupyterapp.shell.currentWidget.content.activeCellIndex")
    page.raw.locator(ROOT).focus()
    for key, want in (
        ("j", (1, 0)),
        ("ArrowDown", (2, 0)),
        ("j", (2, 0)),
        ("k", (1, 0)),
        ("ArrowRight", (1, 1)),
        ("ArrowRight", (1, 2)),
        ("ArrowLeft", (1, 1)),
        ("ArrowUp", (0, 0)),
    ):
        page.raw.keyboard.press(key)
        page.until(
            f"(d => d.prompt === '{want[0]}' && d.sample === '{want[1]}')(document.querySelector('{ROOT}').dataset)"
        )
    page.raw.keyboard.press("c")
    page.until(f"document.querySelector('{ROOT}').dataset.colour === 'version'")
    assert (
        page.script("window.jupyterapp.shell.currentWidget.content.activeCellIndex")
        == cells
    ), "keys stay here"
    assert "version 3" in page.text(f"{ROOT} .jv-legend")

    kernel_knows(page, "panel.at, panel.colour", "((0, 0), 'version')")
    page.run("panel.select(1, 1)")
    page.until(f"document.querySelector('{ROOT}').dataset.prompt === '1'")
    page.click(f"{ROOT} .jv-diff")
    page.wait(f"{ROOT} .jv-difference", text="compared with this one")
    first, last = (
        page.script(
            f"[...document.querySelectorAll('{ROOT} .jv-sample')][{n}].querySelectorAll('.jv-fresh').length"
        )
        for n in (1, 3)
    )
    assert first == 0, "nothing of the chosen one differs from itself"
    assert last > 0
    text = page.script(
        f"[...document.querySelectorAll('{ROOT} .jv-sample')][0].querySelector('.jv-fresh').textContent"
    )
    assert "0" in text, "the samples say their number"
    page.click(f"{ROOT} .jv-diff")
    page.until(f"document.querySelectorAll('{ROOT} .jv-fresh').length === 0")

    page.fill(f"{ROOT} .jv-search", "SAYS 2:")
    page.wait(f"{ROOT} .jv-hits", text="3 of 3 prompts")
    marked = page.script(
        f"[...document.querySelectorAll('{ROOT} .jv-found')].map(t => t.textContent).join('').toLowerCase()"
    )
    assert "says 2:" in marked
    page.fill(f"{ROOT} .jv-search", "prompt 2")
    page.wait(f"{ROOT} .jv-hits", text="1 of 3 prompts")
    page.raw.keyboard.press("Enter")
    page.until(f"document.querySelector('{ROOT}').dataset.prompt === '2'")
    page.fill(f"{ROOT} .jv-search", "not in any of them")
    page.wait(f"{ROOT} .jv-hits", text="0 of 3 prompts")
    page.wait(ROOT, text="no prompt and no answer holds")
    assert page.raw.locator(f"{ROOT} .jv-token").count() == 0, (
        "no sample is on show that does not hold the text"
    )
    page.fill(f"{ROOT} .jv-search", "")
    kernel_knows(page, "panel.at, panel.widget.query", "((2, 0), '')")
    page.run("panel.select(0)")
    page.until(f"document.querySelector('{ROOT}').dataset.prompt === '0'")

    page.click(f"{ROOT} .jv-on")
    page.click(f"{ROOT} .jv-sample >> nth=2")
    page.click(f"{ROOT} .jv-by-logprob")
    kernel_knows(page, "panel.at, panel.colour", "((1, 2), 'logprob')")
    page.run("panel.select(2, 1); panel.colour_by('gap')")
    page.until(f"document.querySelector('{ROOT}').dataset.prompt === '2'")
    assert at(page) == (2, 1, "gap")
    shades = page.script(
        f"[...document.querySelectorAll('{ROOT} .jv-token')].map(t => t.style.background).filter(Boolean)"
    )
    assert {s[:11] for s in shades} >= {"rgba(213, 9", "rgba(0, 114"}, (
        "both directions of the gap have a colour"
    )
    if folder := os.environ.get("JVLAB_SHOTS"):
        for theme in ("light", "dark"):
            for colour in ("logprob", "gap", "version"):
                page.run(f"panel.select(1, 2); panel.colour_by('{colour}')")
                page.screenshot(f"{folder}/rollout-{theme}-{colour}.png", theme, 1280)
            page.screenshot(f"{folder}/rollout-{theme}-1920.png", theme, 1920)


@pytest.mark.soak
def test_saved_and_reopened_it_is_a_table(page: LabPage):
    page.open(CELLS).run_all()
    page.wait(f"{ROOT} .jv-sample")
    page.run("panel.close()")
    page.until("document.querySelectorAll('.jv-rollout').length === 0")
    page.save()
    page.shut_kernel()
    page.open(kernel=False)
    page.wait(".jp-OutputArea-output table", text="completion")
    assert page.script("window.jvHacked === undefined")
    assert "<script>window.jvHacked=1" in page.text(".jp-OutputArea-output table")
    assert "Error displaying widget" not in page.text(".jp-Notebook")
    if folder := os.environ.get("JVLAB_SHOTS"):
        for theme in ("light", "dark"):
            page.screenshot(f"{folder}/rollout-static-{theme}.png", theme, 1280)

"""Figures in a real JupyterLab: their text can be read in a light and in a dark theme, live, saved, and untrusted."""

from __future__ import annotations

from tests.browser.lab_page import LabPage

CELL = """
from jvlab.record._record import Record
from jvlab.views._record_plots import run_figure
from jvlab.views._timeline import timeline_figure
from tests.record.synthetic import made_up
record = Record.of(made_up(12, staleness=1))
display(run_figure(record))
display(timeline_figure(record))
"""
FIGURES = ".jp-OutputArea-output svg.jv-figure"
# The contrast of each group of letters that frames the data with what is behind it, as WCAG 2 counts it.
CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { const c = getComputedStyle(e).backgroundColor;
    return (numbers(c)[3] ?? 1) > 0 ? c : behind(e.parentElement); };
  const letters = '.jp-OutputArea-output svg.jv-figure g[transform*="scale"][style*="currentColor"]';
  return [...document.querySelectorAll(letters)].map((e) => {
    const [a, b] = [light(getComputedStyle(e).fill), light(behind(e.closest('svg').parentElement))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
}"""


def legible(page: LabPage, figures: int = 2) -> None:
    page.until(f"document.querySelectorAll('{FIGURES}').length === {figures}")
    found = []
    for theme in ("light", "dark"):
        page.theme(theme)
        page.raw.wait_for_timeout(300)  # a theme's stylesheet is loaded on demand
        ratios = page.script(CONTRASTS)
        assert len(ratios) > 60, "titles, ticks, labels, legends"
        assert min(ratios) >= 4.5, (theme, min(ratios))
        found.append(
            page.script(f"getComputedStyle(document.querySelector('{FIGURES}')).color")
        )
    assert found[0] != found[1], "two themes, two colours: the theme is read"
    page.theme("light")


def test_text_and_axes_follow_the_theme(page: LabPage) -> None:
    page.open([CELL]).run_all()
    legible(page)
    hidden = f"[...document.querySelectorAll('{FIGURES} + img')].map(e => getComputedStyle(e).display)"
    assert page.script(hidden) == ["none", "none"], (
        "the PNG is for pages that take SVG out"
    )
    page.save()
    import nbformat  # takes seconds

    book = nbformat.read(page.server.notebooks / f"{page.name}.ipynb", as_version=4)
    page.close_notebook()
    page.open(kernel=False)
    legible(page)

    # as downloaded: JupyterLab trusts nothing of it, and takes SVG and styles out
    for cell in book.cells:
        cell.metadata.pop("trusted", None)
        for output in cell.outputs:
            output.data["text/html"] += "<i class='jv-downloaded'></i>"
    page.close_notebook()
    nbformat.write(book, page.server.notebooks / f"{page.name}_downloaded.ipynb")
    page.open(name=f"{page.name}_downloaded", kernel=False)
    page.wait(".jp-OutputArea-output img")
    assert page.count(FIGURES) == 0
    assert page.count(".jp-OutputArea-output img") == 2
    said = page.script(
        "[...document.querySelectorAll('.jp-OutputArea-output')].map(e => e.innerText.trim())"
    )
    assert said == ["", ""], "no stray letters of what was taken out"

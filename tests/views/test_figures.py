"""Figures show themselves in a cell, whether or not pyplot was ever imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_figure_is_a_picture_without_pyplot():
    code = (
        "import sys\n"
        "from jvlab.views._figures import new_figure\n"
        "figure = new_figure(2, 1)\n"
        "figure.subplots().plot([1, 2])\n"
        "from IPython.core.formatters import DisplayFormatter\n"
        "data, _ = DisplayFormatter().format(figure)\n"
        "assert data['image/png'].startswith(b'\\x89PNG'), data\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from jvlab._errors import MissingDependency
    from jvlab.views import _figures

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _figures._figure_class.cache_clear()
    with pytest.raises(MissingDependency, match="matplotlib"):
        _figures.new_figure(1, 1)


def test_a_figure_is_legible_on_a_light_and_on_a_dark_page(tmp_path: Path):
    from matplotlib.image import imread

    from jvlab.views._figures import new_figure

    figure = new_figure(3, 2)
    ax = figure.subplots()
    ax.plot([1, 2], label="line")
    ax.set_title("title")
    ax.set_title("another", loc="left")
    ax.legend()
    figure.savefig(tmp_path / "figure.png")
    pixels = imread(tmp_path / "figure.png")
    assert (pixels[..., 3] == 0).mean() > 0.5, "the page shows through"
    drawn = pixels[pixels[..., 3] > 0.99][:, :3]
    assert not (drawn.max(axis=1) < 0.2).any(), (
        "nothing black, which a dark page would hide"
    )
    assert not (drawn.min(axis=1) > 0.9).any(), "nothing white"


def test_every_figure_of_a_run_can_be_read_on_black_and_on_white(tmp_path: Path):
    """Composed onto each page: what differs from the page differs enough to be seen."""
    import numpy as np
    from matplotlib.image import imread

    from jvlab.record._record import Record
    from jvlab.views._palette import NEWEST, OLDEST, PHASES, TONES
    from jvlab.views._record_plots import (
        run_figure,
        staleness_figure,
        throughput_figure,
    )
    from jvlab.views._timeline import timeline_figure
    from tests.record.synthetic import made_up

    record = Record.of(made_up(12, staleness=2))
    for make in (run_figure, staleness_figure, throughput_figure, timeline_figure):
        make(record).savefig(tmp_path / "figure.png", dpi=40)
        pixels = imread(tmp_path / "figure.png")
        assert (pixels[..., 3] == 0).mean() > 0.3, (
            f"{make.__name__}: the page shows through"
        )
    ratio = lambda a, b: (max(a, b) + 0.05) / (min(a, b) + 0.05)
    rgb = lambda text: np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    colours = {
        **{n: rgb(c) for n, c in (PHASES | TONES).items()},
        "oldest": np.array(OLDEST),
        "newest": np.array(NEWEST),
    }
    for name, colour in colours.items():
        linear = np.where(
            colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4
        )
        light = float(linear @ [0.2126, 0.7152, 0.0722])
        assert min(ratio(light, 1.0), ratio(light, 0.006)) > 1.5, (
            f"{name} is hidden by a page"
        )


def test_phases_differ_in_a_dark_theme_too():
    from jvlab.views._palette import ON_DARK, PHASES

    assert len({ON_DARK.get(colour, colour) for colour in PHASES.values()}) == len(
        PHASES
    )


def test_in_a_page_a_figure_has_the_pages_text_colour():
    import base64
    import re
    from xml.etree import ElementTree

    from jvlab.views._figures import MOST, new_figure, themed_svg
    from jvlab.views._palette import NEUTRAL

    figure = new_figure(3, 2)
    ax = figure.subplots()
    ax.plot([1, 2], color="#0072B2", label="line")
    ax.set_title("title")
    ax.legend()
    html = figure._repr_html_()
    assert html is not None
    svg = html[html.index("<svg") : html.index("</svg>") + 6]
    root = ElementTree.fromstring(svg)
    assert not any(element.tag.endswith("text") for element in root.iter()), (
        "a page that drops SVG keeps its text"
    )
    words = [
        e
        for e in root.iter()
        if "scale(" in e.get("transform", "") and e.get("transform", "")[:5] == "trans"
    ]
    assert len(words) > 8, "a title, a legend, ticks"
    assert all("currentColor" in e.get("style", "") for e in words)
    assert NEUTRAL.lower() not in svg
    assert "#0072b2" in svg, "the data's colours stay"
    for rule in re.findall(r"<style>(.*?)</style>", svg):
        assert all(part.startswith(".jv-figure") for part in rule.split("}") if part), (
            "it styles the page: no"
        )
    own, other = (
        set(re.findall(r'id="([^"]+)"', text)) for text in (svg, themed_svg(figure))
    )
    assert own
    assert not own & other, "two figures in one page"
    assert {
        name[1:] for name in re.findall(r'(?:href="|url\()(#[^")]+)', svg)
    } <= own, "nothing refers to nothing"
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert data
    assert base64.b64decode(data[1]).startswith(b"\x89PNG")

    for _ in range(12):
        ax.plot(range(2000), [(7 * i) % 11 for i in range(2000)])
    svg = themed_svg(figure)
    assert len(svg) < MOST, "of very many points the data becomes pixels"
    assert "<image" in svg
    assert "currentColor" in svg
    assert not any(line.get_rasterized() for line in ax.lines), "for this drawing only"

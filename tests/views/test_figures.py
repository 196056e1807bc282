"""Figures show themselves in a cell, whether or not pyplot was ever imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from jvlab._errors import MissingDependency
    from jvlab.views import _figures

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _figures._figure_class.cache_clear()
    with pytest.raises(MissingDependency, match="matplotlib"):
        _figures.new_figure(1, 1)

"""The registry of pictures: every face that an object asks for is drawn by something, and nothing else is listed."""

from __future__ import annotations

import importlib
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jvlab
from jvlab import _faces
from jvlab.views._registered import FACES


@pytest.mark.parametrize("name", FACES)
def test_what_is_listed_is_there(name: str) -> None:
    source = "\n".join(p.read_text() for p in Path(jvlab.__path__[0]).rglob("*.py"))
    assert re.search(rf"^class {name}\b", source, re.MULTILINE)
    for face, place in FACES[name].items():
        module, _, what = place.partition(":")
        views = importlib.import_module(f"jvlab.views.{module}")
        assert callable(operator.attrgetter(what)(views))
        assert re.search(rf'_faces\.draw\([^)]*"{face}"|"{face}"', source)


def test_an_object_without_a_face_is_named() -> None:
    with pytest.raises(TypeError, match="nothing draws the html of a int"):
        _faces.draw(3, "html")


def test_a_class_inherits_its_faces() -> None:
    class Batch(jvlab.RolloutBatch):
        """Another class of batches."""

    assert "RolloutBatch(0 samples" in _faces.draw(Batch([]), "html")


def test_views_are_imported_when_something_is_drawn() -> None:
    code = (
        "import sys, jvlab as jv; jv.RolloutBatch; jv.Record; jv.Lab\n"
        "assert not [n for n in sys.modules if n.startswith('jvlab.views')]\n"
        "jv.RolloutBatch([])._repr_html_()\n"
        "assert 'jvlab.views._batch_view' in sys.modules\n"
        "assert not {'matplotlib', 'ipywidgets', 'anywidget'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

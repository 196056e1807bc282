"""Every object's text and HTML: one stable line; balanced, escaped, self-contained, small; and no widgets needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import jvlab as jv
from tests.views.every_object import every

NAMES = (
    "Lab",
    "Pool",
    "Link",
    "Mapping",
    "TransferPlan",
    "Explanation",
    "SyncReport",
    "CheckReport",
    "Stepper",
    "RolloutBatch",
    "Policy",
    "Run",
    "Record",
    "Bisection",
    "Session",
    "Sessions",
    "DeterminismReport",
    "Meaning",
    "Certificate",
)
MANY_LINES = {"Explanation"}  # its text is the explanation
SAYS_EVIL = {"RolloutBatch"}  # a completion's address may stand in a title, as text
VOID = {"br", "hr", "input", "wbr"}  # SVG's own close themselves: <rect/>
LIMIT = 60_000
# Text that a browser must never take for markup: `<b>` of a name would show as a tag, with or without attributes.
PLANTED = re.compile(r"<b>&\"|<script|<img|onerror=\"window")
DANGEROUS = {
    "script",
    "iframe",
    "object",
    "embed",
    "link",
    "img",
    "form",
    "base",
    "meta",
    "a",
}


class Attributes(HTMLParser):
    """Collects tags, attributes and the text between; a tag that closes another one than the last fails at once."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.attributes: dict[str, set[str]] = {}
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = every(jv.models.tiny("llama"), tmp_path_factory.mktemp("objects"))
    assert tuple(made) == NAMES
    return made


@pytest.mark.parametrize("name", NAMES)
def test_repr_is_one_stable_line(objects: dict[str, Any], name: str):
    line = repr(objects[name])
    assert line == repr(objects[name])
    assert name in MANY_LINES or "\n" not in line
    assert name in MANY_LINES or line.startswith(f"{name}(")
    assert name in MANY_LINES or len(line) < 400
    assert "0x" not in line
    assert "/home/x" not in line, "a path differs from machine to machine"
    assert "4711" not in line, "so does a process id"


@pytest.mark.parametrize("name", NAMES)
def test_html_is_valid_escaped_small_and_the_same_twice(
    objects: dict[str, Any], name: str, tmp_path: Path
):
    page = objects[name]._repr_html_()
    assert page == objects[name]._repr_html_(), (
        "nothing in it changes from display to display"
    )
    parser = Attributes(page)
    assert not parser.tags & DANGEROUS
    assert not PLANTED.search(page)
    assert not {a for a in parser.attributes if a in ("id", "src", "href", "class")}
    assert not any("url(" in style for style in parser.attributes.get("style", ()))
    inside = "".join(
        value
        for a, values in parser.attributes.items()
        if a != "xmlns"
        for value in values
    )
    assert "//" not in inside or name in SAYS_EVIL, "nothing is fetched"
    assert len(page.encode()) < LIMIT, f"{len(page.encode()):,} bytes"
    text = "".join(parser.text)
    assert "/home/x" not in text
    assert str(Path.home()) not in page
    assert "4711" not in text
    assert "\u202e" not in page or name not in ("RolloutBatch", "Bisection"), (
        "a mark that turns the reading order"
    )


def test_planted_names_are_seen(objects: dict[str, Any]):
    """Not left out, but written out: otherwise the test above would prove nothing."""
    # these plant other words
    for name in set(NAMES) - {"Explanation", "Stepper", "RolloutBatch", "Record"}:
        parser = Attributes(objects[name]._repr_html_())
        assert '<b>&"' in "".join(
            [*parser.text, *parser.attributes.get("title", ())]
        ), name


WITHOUT = """
import os, sys, json
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ipywidgets", "anywidget"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Block())
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
import jvlab as jv
from tests.views.every_object import every
shell = InteractiveShell.instance()
shell.kernel = object()  # as in a notebook
shown = []
shell.display_pub.publish = lambda data, metadata=None, **more: shown.append(data)
out = {}
for name, thing in every(jv.models.tiny("llama"), Path(sys.argv[1])).items():
    shown.clear()
    display(thing)
    out[name] = shown[-1].get("text/html", "")
print(json.dumps(out), flush=True)
os._exit(0)  # what the libraries do while Python ends is not the subject
"""


def test_without_widgets_there_is_a_hint_and_nothing_breaks(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(pages) == set(NAMES)
    for name, page in pages.items():
        assert Attributes(page).tags, name
        assert page.count("pip install ipywidgets anywidget") <= 1, name
    for name in ("Lab", "Stepper", "RolloutBatch", "Mapping"):
        assert "pip install ipywidgets anywidget" in pages[name], name


def test_a_sync_is_a_waterfall():
    from jvlab.views._sync_view import sync_html
    from tests.views.html_checks import check
    from tests.views.sync_reports import report

    # 100 ms in all: prepare 5, move 80, finish 15; paused for the last 90
    html = sync_html(report(move=0.08))
    check(html)
    lanes = re.findall(
        r"<td[^>]*>(\w+)</td><td[^>]*>[^<]*</td><td><div [^>]*><div style=\"margin-left:([\d.]+)%;width:([\d.]+)%",
        html,
    )
    places = {name: (float(left), float(width)) for name, left, width in lanes}
    assert places["prepare"] == (0.0, 5.0)
    assert places["move"] == (5.0, 80.0)
    assert places["finish"] == (85.0, 15.0)
    assert places["paused"] == (10.0, 90.0)
    assert places["pack"] == (5.0, 4.0), "inside the move"

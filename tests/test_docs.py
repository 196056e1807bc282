"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("GUIDE", "WHERE", "COMPARISON", "LIMITS")
DOCUMENTS = (
    *("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "tests/baselines/README.md"),
    *(f"notebooks/{page}.md" for page in PAGES),
)
MOST_WORDS = 1000


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str):
    text = (ROOT / document).read_text()
    named = set(
        re.findall(
            r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|js|proto|json|ipynb|txt))`", text
        )
    )
    lost = [
        name
        for name in named
        if not any((base / name).is_file() for base in (ROOT, ROOT / "jvlab"))
    ]
    lost = [
        name
        for name in lost
        if not name.startswith(("views/panels/static/name", "transport/_name"))
    ]
    assert not lost
    rooms = {
        name for name in re.findall(r"`([a-z]+)/`", text) if not (ROOT / name).is_dir()
    }
    assert all((ROOT / "jvlab" / name).is_dir() for name in rooms)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str):
    for target in re.findall(
        r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text()
    ):
        assert ((ROOT / document).parent / target).exists(), target


def test_readme_is_one_page_that_leads_to_the_others():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MOST_WORDS
    assert all(f"](notebooks/{page}.md)" in text for page in PAGES)

"""What every HTML face must be: balanced, self-contained, escaped, and the same each time it is drawn."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "polyline", "rect", "path", "line", "circle"}


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"


def check(html: str) -> list[str]:
    """The tags of a face that is as it should be."""
    parser = _Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == [], f"left open: {parser.open}"
    assert not {"script", "iframe", "object", "embed", "link"} & set(parser.seen)
    assert not re.search(r"https?://", html), "a face fetches nothing"
    assert not re.search(r"""\sid=["']""", html), "ids differ from display to display"
    assert not re.search(r"0x[0-9a-f]{6,}", html)
    return parser.seen

"""Code and figures of the pages: a test asks for the figure with its unit, and never for the words around it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str, language: str) -> list[str]:
    """Its blocks of code in a language."""
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def unquoted(page: str, *figures: str) -> list[str]:
    """Those of the figures that the page does not have. Blanks do not count: "2.2 ×" is "2.2×"."""
    squeeze = lambda text: re.sub(r"\s+", "", text)
    text = squeeze((ROOT / page).read_text())
    return [
        figure
        for figure in figures
        if not re.search(rf"(?<![\d.]){re.escape(squeeze(figure))}", text)
    ]

"""Notebook cells that join the test session's lab and connect a policy with its one engine."""

from __future__ import annotations

import os
from typing import Any

from tests.browser.lab_page import LabPage

CONNECT = """
policy = jv.Policy.from_pretrained(pool.model)
link = lab.connect(policy.params, pool, rules="policy", bucket_mib=0.25)
asked = dict(max_tokens=8, temperature=0.0, ignore_eos=True, progress=False)
greedy = lambda: list(pool.generate([[5, 6, 7, 8]], **asked)[0].token_ids)
other = jv.Policy.from_pretrained(jv.models.tiny("llama", vocab_size=288, seed=1)).params
"""


def attach(lab: Any) -> str:
    """The kernel's own hold of the lab that the tests launched: no second engine. Buttons that ask first wait longer
    for their second click: on a busy machine it comes later than a hand's."""
    return (
        f"import jvlab as jv\nlab = jv.Lab.attach({lab.address!r}, {lab._token!r})\npool = lab.pools['steered']\n"
        "import jvlab.views.panels._live\njvlab.views.panels._live.ARMED_SECONDS = 120.0\nprint(pool)"
    )


def shots(page: LabPage, name: str, of: str) -> None:
    """Nothing is cut in a narrow page; pictures for people, where JVLAB_SHOTS names a folder."""
    cut = page.cut(of)
    assert not cut, f"wider than their room at 700 px: {cut}"
    if folder := os.environ.get("JVLAB_SHOTS"):
        for theme, width in (("light", 1280), ("dark", 1280), ("light", 700)):
            page.screenshot(f"{folder}/{name}-{theme}-{width}.png", theme, width, of=of)

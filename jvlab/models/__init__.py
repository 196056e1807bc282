"""Models that need no hub: tiny random ones of ten families, and a small real one.

May import checkpoint and below.
"""

from __future__ import annotations

import os
import re

from jvlab._errors import ModelError
from jvlab.models._families import FAMILIES as _FAMILIES
from jvlab.models._smollm2 import smollm2
from jvlab.models._tiny import cache_dir, tiny

__all__ = ["cache_dir", "families", "resolve", "smollm2", "tiny"]

# owner/name, or a legacy bare name (gpt2): a Hugging Face hub id
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def families() -> tuple[str, ...]:
    """The families that `tiny` can write."""
    return tuple(_FAMILIES)


def resolve(name: str | os.PathLike[str]) -> str:
    """A model name as engines accept it: `tiny:llama` and `smollm2` become paths; a hub id is returned as it is.

    Nothing is downloaded. A string that looks like a path but is not a model is an error.
    """
    text = os.fspath(name)
    if text == "smollm2":
        return smollm2()
    if text.startswith("tiny:"):
        return tiny(text.removeprefix("tiny:"))
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(
                f"{text} is a directory without config.json",
                remedy="point at a Hugging Face model directory; jv.models.tiny() writes one",
                path=text,
            )
        return os.path.abspath(path)
    if os.path.exists(path):
        raise ModelError(
            f"{text} is a file, not a model directory", remedy="pass the directory that holds it", path=text
        )
    if text.startswith((".", "/", "~", os.sep)) or not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"no model at {text!r}: the path does not exist, and it is not a hub id",
            remedy='pass an existing directory, a hub id such as "Qwen/Qwen3-0.6B", "tiny:llama" or "smollm2"',
            path=text,
        )
    return text

"""Models that need no hub: tiny random ones of eleven families, and a small real one.

>>> jv.models.families()[:3]
('llama', 'qwen2', 'qwen3')
>>> jv.models.tiny("llama") == jv.models.resolve("tiny:llama")
True

Imports layout.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from jvlab._errors import ModelError, module_names
from jvlab.trainer.models._families import FAMILIES as _FAMILIES
from jvlab.trainer.models._smollm2 import smollm2
from jvlab.trainer.models._tiny import cache_dir, tiny

__all__ = ["cache_dir", "families", "resolve", "smollm2", "tiny"]


def _instead(name: str) -> str:
    return (
        f"a tiny model of that family: jv.models.tiny({name!r})"
        if name in _FAMILIES
        else ""
    )


if not TYPE_CHECKING:  # a type checker knows the names by itself
    __dir__, __getattr__ = module_names(
        __name__, __all__, "name of jv.models", _instead
    )


# owner/name, or a legacy bare name (gpt2): a Hugging Face hub id
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def families() -> tuple[str, ...]:
    """The families that `tiny` can write.

    >>> "qwen3" in jv.models.families()
    True
    """
    return tuple(_FAMILIES)


def resolve(name: str | os.PathLike[str]) -> str:
    """A model name as engines accept it: `tiny:llama` and `smollm2` become paths; a hub id is returned as it is.

    Nothing is downloaded. A string that looks like a path but is not a model is an error.

    >>> jv.models.resolve("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    if not isinstance(name, (str, os.PathLike)):
        raise ModelError(
            f"a model is named by a text or a path, not by {type(name).__name__}",
            remedy='pass a directory, a hub id such as "Qwen/Qwen3-0.6B", "tiny:llama" or "smollm2"',
        )
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
            f"{text} is a file, not a model directory",
            remedy="pass the directory that holds it",
            path=text,
        )
    if text.startswith((".", "/", "~", os.sep)) or not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"no model at {text!r}: the path does not exist, and it is not a hub id",
            remedy='pass an existing directory, a hub id such as "Qwen/Qwen3-0.6B", "tiny:llama" or "smollm2"',
            path=text,
        )
    return text

"""Trainers and servers that people have: `jv.integrations.trl`, `.tunix`, `.vllm`; each is loaded on first use.

>>> dir(jv.integrations)
['trl', 'tunix', 'vllm']

May import lab and below, and the trainer that the module is named after.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jvlab._errors import module_names

__all__ = ["trl", "tunix", "vllm"]

if TYPE_CHECKING:
    from jvlab.integrations import trl, tunix, vllm

_names, _missing = module_names(
    __name__, __all__, "integration", "help(jv.integrations) lists them"
)


def __dir__() -> list[str]:
    return _names()


def __getattr__(name: str) -> object:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    return _missing(name)

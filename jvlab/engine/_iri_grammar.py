"""A grammar that importing vLLM need not parse."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

NAME = "rfc3987_syntax"


def when_used() -> None:
    """Put off parsing a grammar of IRIs, a quarter of what importing vLLM takes: Jupyter's packages bring it,
    jsonschema imports it, Ray and mcp import that, vLLM both; and nobody checks an IRI."""
    if "jsonschema" in sys.modules or find_spec(NAME) is None:
        return
    waiting = ModuleType(NAME)

    def is_valid_syntax(term: str, value: str) -> bool:
        if sys.modules.get(NAME) is waiting:
            del sys.modules[NAME]
        return importlib.import_module(NAME).is_valid_syntax(term, value)

    vars(waiting)["is_valid_syntax"] = is_valid_syntax
    sys.modules[NAME] = waiting

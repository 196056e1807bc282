"""Parses JSON from callers, and rejects what a later consumer could not handle."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jvlab._errors import ConfigError

MAX_DEPTH = 64  # of nested lists and objects; real requests have a handful
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_REMEDY = "send plain JSON: objects, lists, strings, finite numbers"


def read_json(raw: bytes | str, what: str = "the body") -> Any:
    """The value, or a ConfigError that says what is wrong with `what`: syntax, depth, characters, numbers."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    try:
        value = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{what} is not valid JSON: {error}", remedy=_REMEDY) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _exceeds_depth(value):
        raise _too_deep(what)
    if _SURROGATE.search(data):  # a lone one has no UTF-8 form: it can be neither stored, hashed nor tokenised
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{what} holds a lone surrogate, which is not a character", remedy="send whole characters"
            ) from None
    return value


def read_object(raw: bytes | str, what: str = "the body") -> dict[str, Any]:
    """The same, for a JSON object."""
    value = read_json(raw, what)
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is of type {type(value).__name__}, not an object", remedy=_REMEDY)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _too_deep(what: str) -> ConfigError:
    return ConfigError(f"{what} is nested more than {MAX_DEPTH} deep", remedy=_REMEDY)


def _exceeds_depth(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [child for part in parts if isinstance(part, (list, type({}.values()))) for child in part]
        level = [child for child in level if isinstance(child, (list, dict))]
        if not level:
            return False
    return True

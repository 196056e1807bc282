"""What one call may ask of a pool: samples of a prompt, prompts, samples, tokens. Pure functions.

Checked by the gateway (gRPC and its HTTP front), by the replica (orders and its own HTTP), and by the caller's pool
object before it sends. Defaults come from the engine's own limits; `launch(limits={...})` sets others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jvlab._errors import ConfigError, LimitExceeded, UnknownName

# Parses JSON from callers, and rejects what a later consumer could not handle.

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
        raise ConfigError(
            f"{what} is not valid JSON: {error}", remedy=_REMEDY
        ) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _exceeds_depth(value):
        raise _too_deep(what)
    # a lone one has no UTF-8 form: it can be neither stored, hashed nor tokenised
    if _SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{what} holds a lone surrogate, which is not a character",
                remedy="send whole characters",
            ) from None
    return value


def read_object(raw: bytes | str, what: str = "the body") -> dict[str, Any]:
    """The same, for a JSON object."""
    value = read_json(raw, what)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{what} is of type {type(value).__name__}, not an object", remedy=_REMEDY
        )
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _too_deep(what: str) -> ConfigError:
    return ConfigError(f"{what} is nested more than {MAX_DEPTH} deep", remedy=_REMEDY)


def _exceeds_depth(value: Any, depth: int = MAX_DEPTH) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return False
    return not depth or any(_exceeds_depth(part, depth - 1) for part in parts)


# ----------------------------------------------------------------------------------------------------

DEFAULT_MAX_TOKENS = 16  # vLLM's, for a request without max_tokens
UNLIMITED = 2**53


@dataclass(frozen=True)
class Asked:
    """How much a call asks for; `tokens` counts what is known before anything is tokenised or generated."""

    n: int
    prompts: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class Limits:
    """The most of each that one call may ask for."""

    n: int  # samples of one prompt, all of them on one replica
    prompts: int
    samples: int  # prompts × n
    tokens: int  # of all samples: prompt + max_tokens

    @classmethod
    def resolve(
        cls, given: Mapping[str, int], max_num_seqs: int, max_model_len: int
    ) -> Limits:
        """The given limits, else defaults that an engine of this size handles without running out of memory.

        A queue as long as the minimums takes less of a replica's memory than its imports do.
        """
        defaults = {
            "n": max(1024, 16 * max_num_seqs),
            "prompts": max(65_536, 256 * max_num_seqs),
            "samples": max(131_072, 1024 * max_num_seqs),
            "tokens": max(2**26, 1024 * max_num_seqs * max_model_len),
        }
        return cls(**{**defaults, **given})

    def check(self, asked: Asked) -> None:
        """Raise `LimitExceeded` for the first limit that is exceeded."""
        for field in fields(self):
            limit = getattr(self, field.name)
            wanted = getattr(asked, field.name)
            if wanted > limit:
                raise LimitExceeded(
                    f"one call asks for {_shown(wanted)} {_LABELS[field.name]}; this pool takes at most {limit:,}",
                    remedy=f"{_REMEDIES[field.name]}, or launch it with limits={{{field.name!r}: ...}}",
                    limit=limit,
                    asked=wanted,
                    name=field.name,
                )


_LABELS = {
    "n": "samples of one prompt (n)",
    "prompts": "prompts",
    "samples": "samples (prompts × n)",
    "tokens": "tokens (prompts × n × (prompt + max_tokens))",
}
_REMEDIES = {
    "n": "ask for fewer at a time",
    "prompts": "send them in several calls",
    "samples": "send them in several calls",
    "tokens": "send them in several calls, or lower max_tokens",
}


def _shown(number: int) -> str:
    """A caller's number for a message; a huge one only as a power of ten."""
    return f"{number:,}" if number < 10**30 else f"10^{int(math.log10(number))}"


def check_given(given: Mapping[str, Any] | None) -> dict[str, int]:
    """`launch(limits={...})`, checked; None as a value removes the limit."""
    names = [field.name for field in fields(Limits)]
    checked: dict[str, int] = {}
    for name, value in (given or {}).items():
        if name not in names:
            raise UnknownName.of("limit", name, names)
        if value is None:
            checked[name] = UNLIMITED
        elif type(value) is int and 1 <= value <= UNLIMITED:
            checked[name] = value
        else:
            raise ConfigError(
                f"limits[{name!r}] must be a whole number of at least 1, not {value!r}",
                remedy="None for no limit",
            )
    return checked


# What a call asks for -------------------------------------------------------------------------------------------------


def count(value: Any) -> int:
    """A number of samples or tokens, parsed leniently ("7", 7.0); 0 if it is not a number."""
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else UNLIMITED
    if isinstance(value, str):
        text = value.strip()
        if not text.isdecimal():
            return 0
        return int(text) if len(text) < 19 else UNLIMITED
    return value if isinstance(value, int) else 0


def new_tokens(
    sampling: Mapping[str, Any], max_model_len: int, default: int = DEFAULT_MAX_TOKENS
) -> int:
    """The most tokens that one sample may generate; never more than the model's length."""
    given = [
        sampling[name]
        for name in ("max_tokens", "max_completion_tokens")
        if name in sampling
    ]
    wanted = max(
        (UNLIMITED if value is None else count(value) for value in given),
        default=default,
    )
    return min(wanted, max_model_len) if max_model_len else wanted


def of_prompts(
    lengths: Sequence[int], n: int, sampling: Mapping[str, Any], max_model_len: int
) -> Asked:
    """`n` samples of prompts of these lengths in tokens; 0 for a prompt that is not tokenised yet."""
    each = new_tokens(sampling, max_model_len)
    return Asked(
        n, len(lengths), n * len(lengths), n * (sum(lengths) + each * len(lengths))
    )


def of_http(content: Mapping[str, Any], max_model_len: int) -> Asked:
    """A request body of OpenAI's API, read as leniently as the server reads it."""
    nested = content.get("sampling_params")
    sources = [content, nested] if isinstance(nested, Mapping) else [content]
    n = max(
        1, *(count(source.get(name)) for source in sources for name in ("n", "best_of"))
    )
    prompts = max(
        1,
        *(
            _prompt_count(content.get(name))
            for name in ("prompt", "prompts", "input", "token_ids")
        ),
    )
    # A chat without max_tokens may run to the model's length.
    default = (
        max_model_len
        if "messages" in content or "prompt" not in content
        else DEFAULT_MAX_TOKENS
    )
    each = max(new_tokens(source, max_model_len, default) for source in sources)
    listed = [content.get(name) for name in ("prompt", "token_ids")]
    given = sum(sum(map(_tokens, p)) for p in listed if isinstance(p, list))
    return Asked(n, prompts, n * prompts, n * (given + prompts * each))


def _prompt_count(value: Any) -> int:
    """The prompts in a field: a list of strings or of token lists is several, a list of numbers is one."""
    several = isinstance(value, list) and any(
        isinstance(part, (str, list, dict)) for part in value
    )
    return len(value) if several else 1


def _tokens(part: Any) -> int:
    return len(part) if isinstance(part, list) else int(isinstance(part, int))

"""Names with holes, matched in bounded time: numbers `{i}`, any text `{x*}`, choices `[q|k]`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from jvlab.layout.rules._syntax import Index, Part, Pick, Wild

Captured = dict[str, int | str]  # {i} under "i", {x*} under "x*"
_NUMBER = "0|[1-9][0-9]*"
_ONE_NUMBER = re.compile(_NUMBER)
_DIGITS = 18  # of a number in a name; it fits a 64-bit index


def matcher(parts: Sequence[Part], k: int) -> Callable[[str], Captured | None]:
    """A function from a name to what it captures under choice k, or None.

    Greedy from left to right, as in a regular expression. With several `{x*}` or adjacent numbers an expression could
    backtrack exponentially: these are matched by dynamic programming, in time parts × length.
    """
    flat = list(_flat(parts, k))
    wild = sum(isinstance(p, Wild) for p in flat)
    adjacent = any(not isinstance(a, str) and not isinstance(b, str) for a, b in itertools.pairwise(flat))
    names = [_key(p) for p in flat if not isinstance(p, str)]
    if len(set(names)) == len(names) and (wild > 1 or adjacent):
        return lambda text: _walk(flat, text)
    pattern = re.compile(_expression(flat), re.DOTALL)

    def match(text: str) -> Captured | None:
        found = pattern.fullmatch(text)
        return _values(found.groupdict()) if found else None

    return match


def _flat(parts: Sequence[Part], k: int) -> Iterator[str | Index | Wild]:
    for part in parts:
        if isinstance(part, Pick):
            yield from _flat(part.options[k], k)
        else:
            yield part


def _key(hole: Index | Wild) -> str:
    return hole.name + "*" if isinstance(hole, Wild) else hole.terms[0][1]


def _expression(flat: Sequence[str | Index | Wild]) -> str:
    """A repeated hole is a back-reference."""
    out, seen = [], set()
    for part in flat:
        if isinstance(part, str):
            out.append(re.escape(part))
            continue
        group = ("w_" if isinstance(part, Wild) else "n_") + _key(part).rstrip("*")
        if group in seen:
            out.append(f"(?P={group})")
        else:
            out.append(f"(?P<{group}>{'.+' if isinstance(part, Wild) else _NUMBER})")
        seen.add(group)
    return "".join(out)


def _values(groups: dict[str, str]) -> Captured | None:
    if any(name[0] == "n" and len(text) > _DIGITS for name, text in groups.items()):
        return None
    return {n[2:] + "*" if n[0] == "w" else n[2:]: t if n[0] == "w" else int(t) for n, t in groups.items()}


def _walk(flat: Sequence[str | Index | Wild], text: str) -> Captured | None:
    """Backwards: where may each part start so that the rest matches? Then forwards, longest match first."""
    size = len(text)
    starts: list[bytearray] = [bytearray(size) + b"\x01"]  # after the last part, only the end of the text
    for part in reversed(flat):
        starts.append(_starts(part, text, starts[-1]))
    starts.reverse()
    if not starts[0][0]:
        return None
    at = [0]
    for part, after in zip(flat, starts[1:], strict=True):
        at.append(next(end for end in _ends(part, text, at[-1]) if after[end]))
    return _captured(flat, text, at)


def _starts(part: str | Index | Wild, text: str, after: bytearray) -> bytearray:
    """The positions at which this part may start, given those at which it may end."""
    out = bytearray(len(text) + 1)
    if isinstance(part, Wild):
        last = after.rfind(1)
        out[: max(last, 0)] = b"\x01" * max(last, 0)
    elif isinstance(part, str):
        found = text.find(part)
        while found >= 0:
            out[found] = after[found + len(part)]
            found = text.find(part, found + 1)
    else:
        for start in range(len(text)):
            out[start] = any(after[end] for end in _ends(part, text, start))
    return out


def _ends(part: str | Index | Wild, text: str, start: int) -> range:
    """Where a part that starts here may end, the longest first."""
    if isinstance(part, str):
        end = start + len(part)
        return range(end, end - 1, -1)
    if isinstance(part, Wild):
        return range(len(text), start, -1)
    found = _ONE_NUMBER.match(text, start, start + _DIGITS)
    return range(found.end() if found else start, start, -1)


def _captured(flat: Sequence[str | Index | Wild], text: str, at: Sequence[int]) -> Captured:
    out: Captured = {}
    for part, start, end in zip(flat, at[:-1], at[1:], strict=True):
        if not isinstance(part, str):
            out[_key(part)] = text[start:end] if isinstance(part, Wild) else int(text[start:end])
    return out

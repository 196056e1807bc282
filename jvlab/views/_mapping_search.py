"""Search of a mapping's rows by words, status, rule and rank, as the inspector's fields do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    from jvlab.sync._mapping_row import MappingRow

COLUMNS = ("leaf", "rule", "tensor", "parameter", "ranks", "dtype", "bytes", "status")


def dtype_text(row: MappingRow) -> str:
    """The engine's dtype, preceded by the leaf's where they differ."""
    if not row.dtype or row.leaf_dtype in ("", row.dtype):
        return row.dtype or row.leaf_dtype
    return f"{row.leaf_dtype} → {row.dtype}"


def search_rows(
    rows: Sequence[MappingRow],
    text: str = "",
    status: str = "",
    rule: str = "",
    rank: int | None = None,
    sort: str = "",
) -> list[MappingRow]:
    """Rows that contain every word, ignoring case; `sort` is a column, with a leading "-" in descending order."""
    words = text.lower().split()
    found = [
        r
        for r in rows
        if (not status or r.status == status)
        and (not rule or r.rule == rule)
        and (rank is None or rank in r.ranks)
        and _holds(r, words)
    ]
    column = sort.removeprefix("-")
    if column and column not in COLUMNS:
        raise ConfigError(f"no column is called {column!r}", remedy=f"sort by one of {', '.join(COLUMNS)}")
    return sorted(found, key=lambda r: _key(r, column), reverse=sort.startswith("-")) if column else found


def _holds(row: MappingRow, words: Sequence[str]) -> bool:
    if not words:
        return True
    columns = (row.name, row.numbered, row.rule, row.tensor, row.parameter, dtype_text(row), row.status)
    low = [c.lower() for c in columns]
    return all(any(word in c for c in low) for word in words)


def _key(row: MappingRow, column: str) -> Any:
    match column:
        case "bytes":
            return row.nbytes
        case "ranks":
            return row.ranks
        case "dtype":
            return dtype_text(row)
        case "leaf":
            return natural(row.name)
        case _:
            return natural(getattr(row, column))


def natural(name: str) -> str:
    """A sort key that puts layers.9 before layers.10."""
    return re.sub(r"\d+", lambda m: m[0].zfill(8), name)

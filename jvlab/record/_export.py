"""Tables of a record as pandas, Parquet and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.record._events import NAN, Event, plain

if TYPE_CHECKING:
    import pandas

Columns = Mapping[str, np.ndarray]


def event_columns(events: Iterable[Event], kind: type[Event] = Event) -> dict[str, np.ndarray]:
    """One row per event: its scalars; maps from names to numbers as one column per name; anything else as JSON text."""
    found = list(events)
    hints = typing.get_type_hints(kind)
    columns: dict[str, np.ndarray] = {}
    for name in (f.name for f in dataclasses.fields(kind)):
        values, hint = [getattr(e, name) for e in found], hints[name]
        if hint in (int, float, bool):
            columns[name] = np.array(values, np.int64 if hint is int else hint)
        elif hint is str or hint == bool | None:
            columns[name] = np.array(values, object)
        elif hint in (dict[str, float], dict[str, int]):
            for key in sorted({k for v in values for k in v}):
                columns[f"{name}_{key}"] = np.array([v.get(key, NAN) for v in values], float)
        elif name != "extra" or any(values):
            texts = [None if v is None else json.dumps(plain(v), ensure_ascii=False) for v in values]
            columns[name] = np.array(texts, object)
    return columns


def to_pandas(columns: Columns) -> pandas.DataFrame:
    """The columns as a DataFrame."""
    try:
        import pandas
    except ImportError as e:
        raise MissingDependency(
            "a DataFrame needs pandas", remedy="pip install pandas; record.steps() and to_csv() need nothing"
        ) from e
    return pandas.DataFrame(dict(columns))


def to_parquet(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as one Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise MissingDependency(
            "a Parquet file needs pyarrow", remedy="pip install pyarrow; to_csv() needs nothing"
        ) from e
    target = _target(path)
    table = pyarrow.table({name: pyarrow.array(values, from_pandas=False) for name, values in columns.items()})
    parquet.write_table(table, target)
    return str(target)


def to_csv(columns: Columns, path: str | os.PathLike[str]) -> str:
    """Write the columns as CSV: NaN as `nan`, missing values empty."""
    target = _target(path)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        lists = [values.tolist() for values in columns.values()]
        writer.writerows(zip(*lists, strict=True))
    return str(target)


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target

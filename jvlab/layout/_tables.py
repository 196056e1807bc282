"""The two sides of a join as tables: live parameters of all ranks, and traced rows of all ranks. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jvlab.layout._cells import pad_columns
from jvlab.layout._compose import row_major
from jvlab.layout._plan_types import LIVE, OPAQUE, STAGED, TargetInfo
from jvlab.layout._types import Parameter, RankLayout


@dataclass
class Targets:
    """Every live parameter on every rank, and a whole-tensor buffer for each opaque tensor."""

    parameters: tuple[TargetInfo, ...]
    rank: np.ndarray
    parameter: np.ndarray
    kind: np.ndarray
    padding: np.ndarray
    of_rank: list[np.ndarray]  # per layout: its parameter index -> target
    opaque_of_rank: list[dict[str, int]]  # per layout: opaque tensor -> target

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> Targets:
        table: dict[TargetInfo, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        of_rank, opaque_of_rank = [], []
        for layout in layouts:
            padding: dict[str, int] = {}
            for note in layout.padding:
                padding[note.name] = padding.get(note.name, 0) + note.elements
            staged = {note.name for note in layout.staged}
            mine = []
            for p in layout.parameters:
                info = table.setdefault(_info(p), len(table))
                mine.append(len(rows))
                rows.append((layout.rank, info, STAGED if p.name in staged else LIVE, padding.get(p.name, 0)))
            of_rank.append(np.array(mine, np.int32))
            shapes = {t.name: t for t in layout.tensors} if layout.opaque else {}
            opaque: dict[str, int] = {}
            for name in sorted({note.name for note in layout.opaque} & set(shapes)):
                t = shapes[name]
                info = table.setdefault(TargetInfo(name, t.shape, t.dtype, row_major(t.shape)), len(table))
                opaque[name] = len(rows)
                rows.append((layout.rank, info, OPAQUE, 0))
            opaque_of_rank.append(opaque)
        columns = np.array(rows, np.int64).reshape(-1, 4)
        rank, parameter = columns[:, 0].astype(np.int32), columns[:, 1].astype(np.int32)
        return cls(tuple(table), rank, parameter, columns[:, 2].astype(np.int8), columns[:, 3], of_rank, opaque_of_rank)


def _info(p: Parameter) -> TargetInfo:
    return TargetInfo(p.name, tuple(p.shape), p.dtype, tuple(p.strides))


@dataclass
class Rows:
    """Traced rows of all ranks in one table, with tensors numbered across ranks."""

    tensor_ids: dict[str, int]
    tensor: np.ndarray
    target: np.ndarray
    shape: np.ndarray
    src_offset: np.ndarray
    src_strides: np.ndarray
    dst_offset: np.ndarray
    dst_strides: np.ndarray

    @classmethod
    def of(cls, layouts: Sequence[RankLayout], targets: Targets) -> Rows:
        ids: dict[str, int] = {}
        numbered: dict[int, np.ndarray] = {}  # ranks usually share one tuple of tensors
        width = max(
            [x.shape.shape[1] for x in layouts] + [len(t.shape) for x in layouts for t in x.tensors if x.opaque]
        )
        parts: dict[str, list[np.ndarray]] = {k: [] for k in cls.__dataclass_fields__ if k != "tensor_ids"}
        for layout, of_rank, opaque in zip(layouts, targets.of_rank, targets.opaque_of_rank, strict=True):
            if id(layout.tensors) not in numbered:
                numbered[id(layout.tensors)] = np.array([ids.setdefault(t.name, len(ids)) for t in layout.tensors])
            number = numbered[id(layout.tensors)]
            plain = np.flatnonzero(~np.isin(number[layout.tensor], [ids[n] for n in opaque])) if opaque else slice(None)
            parts["tensor"].append(number[layout.tensor][plain])
            parts["target"].append(of_rank[layout.parameter][plain])
            parts["src_offset"].append(layout.src_offset[plain])
            parts["dst_offset"].append(layout.dst_offset[plain])
            for k, fill in (("shape", 1), ("src_strides", 0), ("dst_strides", 0)):
                parts[k].append(pad_columns(getattr(layout, k)[plain], width, fill))
            for name, target in opaque.items():
                info = targets.parameters[targets.parameter[target]]
                parts["tensor"].append(np.array([ids[name]]))
                parts["target"].append(np.array([target]))
                parts["src_offset"].append(np.zeros(1, np.int64))
                parts["dst_offset"].append(np.zeros(1, np.int64))
                for k, value, fill in (
                    ("shape", info.shape, 1),
                    ("src_strides", info.strides, 0),
                    ("dst_strides", info.strides, 0),
                ):
                    parts[k].append(pad_columns(np.array([value], np.int64).reshape(1, -1), width, fill))
        return cls(ids, **{k: np.concatenate(v).astype(np.int64) for k, v in parts.items()})

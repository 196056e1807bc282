"""Boxes of a plan → launch tables of the copy kernels: which block moves what, with which strides. numpy only.

Every box has one of two forms, over positions p along axis A and q along axis B, and up to four outer axes:

    rows    B is the axis with the smallest strides on both sides: lines are copied, A counts lines
    tiles   A has the smallest stride in the source, B in the target: tiles are transposed in shared memory

    source = src + A.source(p) + q·ssb + Σ outer      A.source(p) = (p // na1)·ssa2 + (p % na1)·ssa1
    target = dst + A.target(p) + q·dsb + Σ outer      A may be two axes that are contiguous in the source

A row of `Table.entries` is one box (FIELDS names its columns), `Table.first` its first block. For the digest a box is
cut at the lines of its target, so that a block needs one weight per line and one per column; where that is impossible
(no SEPARABLE flag) weights are computed per element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jvlab._errors import LayoutError, Unsupported
from jvlab.layout._digest import row_elements
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import (
    LIVE,
    LinkPlan,
    ValueTransform,
    item_bytes,
    storage_elements,
)

THREADS = 256
# side of a tile; tiles along A that a block of "tiles" handles in sequence
SIDE = 64
DEEP = 4
STEPS = 16  # lines that a thread of "rows" handles in sequence
OUTER = 4
# flags: digest by tables; 16-byte reads; 16-byte writes
SEPARABLE = 1
LOAD = 2
STORE = 4
FIELDS = (
    "source",
    "src",
    "target",
    "dst",
    "na",
    "na1",
    "ssa1",
    "ssa2",
    "dsa1",
    "dsa2",
    "nb",
    "ssb",
    "dsb",
    *(f"{name}{k}" for k in range(OUTER) for name in ("n", "ss", "ds")),
    "tiles_a",
    "tiles_b",
    "row",
    "line1",
    "line2",
    "flags",
    "slot",
    "add",
    "cast",
    "wide",
)
AT = {name: k for k, name in enumerate(FIELDS)}
# dtypes that the kernels convert; all others are moved as bits
FLOATS = {"float32": 1, "bfloat16": 2, "float16": 3}

Axis = tuple[int, int, int]  # size, source stride, target stride


@dataclass(frozen=True)
class IpcBox:
    """A strided copy. Offsets and strides in elements; `source`, `target`: pointer indices, `slot`: digest index."""

    source: int
    src: int
    target: int
    dst: int
    axes: tuple[Axis, ...]
    transform: ValueTransform
    row: int  # elements to a line of the target
    slot: int

    @property
    def count(self) -> int:
        out = 1
        for n, _, _ in self.axes:
            out *= n
        return out


@dataclass(frozen=True)
class Program:
    """Which kernel: its form, and the dtypes it was compiled for."""

    form: str  # "rows" or "tiles"
    source: str
    wire: str
    computes: bool  # adds a constant or casts in between
    # aligned whole vectors only: a kernel without other branches needs half the registers
    quick: bool = False

    @property
    def vector(self) -> int:
        """Elements that a thread of "rows" moves at once."""
        return 16 // max(item_bytes(self.source), item_bytes(self.wire))


@dataclass(frozen=True, eq=False)
class Table:
    """One launch."""

    program: Program
    entries: np.ndarray  # int64 [N, len(FIELDS)]
    first: np.ndarray  # uint32 [N], the first block of each entry
    blocks: int
    nbytes: int  # written


# ---- pieces of plans ------------------------------------------------------------------------------------------------


def refuse_other_kinds(plan: TransferPlan, targets: Iterable[int]) -> None:
    """Refuse targets that vLLM processes after loading: ipc can write live memory only."""
    for t in targets:
        if int(plan.target_kind[t]) != LIVE:
            name = plan.parameters[int(plan.target_parameter[t])].name
            raise Unsupported(
                f"{name} is not kept as the loader writes it (packed after loading, or placed by the loader only): "
                "ipc writes live memory",
                remedy='connect with transport="shm" or "nccl", or launch without that kernel or quantisation',
                parameter=name,
            )


def whole_links(
    plan: TransferPlan, rank: int, replica: int, devices: Iterable[int] | None = None
) -> list[LinkPlan]:
    """The links into a rank, with boxes not cut into buckets: ipc packs nothing."""
    uncut = replace(plan, bucket_bytes=1 << 60)
    table = plan.links(replica)
    mine = sorted(table.device[table.rank == rank].tolist())
    return [
        uncut.link(d, rank, replica)
        for d in mine
        if devices is None or d in set(devices)
    ]


def link_pieces(
    plan: TransferPlan, link: LinkPlan, leaf_slot: dict[int, int], slot: dict[int, int]
) -> list[IpcBox]:
    """The boxes of a link; `leaf_slot`: source pointer by leaf; `slot`: target pointer and digest by target."""
    refuse_other_kinds(plan, np.unique(link.target).tolist())
    rows = _rows(plan, np.unique(link.target).tolist())
    out = []
    for i in range(len(link)):
        t = int(link.target[i])
        axes = zip(
            link.shape[i].tolist(),
            link.src_strides[i].tolist(),
            link.dst_strides[i].tolist(),
            strict=True,
        )
        out.append(
            IpcBox(
                leaf_slot[int(link.leaf[i])],
                int(link.src_offset[i]),
                slot[t],
                int(link.dst_offset[i]),
                tuple(axes),
                plan.transforms[int(link.transform[i])],
                rows[t],
                slot[t],
            )
        )
    return out


def digest_pieces(
    plan: TransferPlan, links: Sequence[LinkPlan], slot: dict[int, int]
) -> list[IpcBox]:
    """What to read of a rank's targets for their digests: the whole storage, or the boxes where some is padding."""
    boxes: dict[int, list[tuple[int, tuple[Axis, ...]]]] = {}
    for link in links:
        for i in range(len(link)):
            strides = link.dst_strides[i].tolist()
            axes = tuple(
                (n, s, s) for n, s in zip(link.shape[i].tolist(), strides, strict=True)
            )
            boxes.setdefault(int(link.target[i]), []).append(
                (int(link.dst_offset[i]), axes)
            )
    rows = _rows(plan, boxes)
    out = []
    for t, found in sorted(boxes.items()):
        info = plan.parameters[int(plan.target_parameter[t])]
        transform = ValueTransform(info.dtype, info.dtype)
        size = storage_elements(info.shape, info.strides)
        whole = IpcBox(
            slot[t], 0, slot[t], 0, ((size, 1, 1),), transform, rows[t], slot[t]
        )
        parts = [replace(whole, src=at, dst=at, axes=axes) for at, axes in found]
        out += [whole] if sum(p.count for p in parts) == size else parts
    return out


def _rows(plan: TransferPlan, targets: Iterable[int]) -> dict[int, int]:
    infos = {int(t): plan.parameters[int(plan.target_parameter[t])] for t in targets}
    return {t: row_elements(info.shape, info.strides) for t, info in infos.items()}


# ---- boxes, normalised ----------------------------------------------------------------------------------------------


def cut_at_lines(piece: IpcBox) -> list[IpcBox]:
    """The same copy, cut so that no run crosses lines of the target: a head, whole lines, a tail."""
    axes = tuple(a for a in piece.axes if a[0] > 1)
    piece = replace(piece, axes=axes)
    row = piece.row
    column = piece.dst % piece.row
    runs = [k for k, (n, _, ds) in enumerate(axes) if ds == 1 and column + n > row]
    if (
        row == 1
        or not runs
        or any(ds % row for k, (_, _, ds) in enumerate(axes) if k != runs[0])
    ):
        return [piece]
    n, ss, _ = axes[runs[0]]
    rest = tuple(a for k, a in enumerate(axes) if k != runs[0])
    head = (row - column) % row
    lines, tail = divmod(n - head, row)
    out = []
    for at, parts in (
        (0, ((head, ss, 1),)),
        (head, ((lines, ss * row, row), (row, ss, 1))),
        (head + lines * row, ((tail, ss, 1),)),
    ):
        if all(size for size, _, _ in parts):
            kept = tuple(a for a in (*rest, *parts) if a[0] > 1)
            out.append(
                replace(piece, src=piece.src + at * ss, dst=piece.dst + at, axes=kept)
            )
    return out


def merged(piece: IpcBox) -> IpcBox:
    """Contiguous axes merged, in any order; axes along lines and within lines stay separate."""
    axes = [a for a in piece.axes if a[0] > 1]
    lines = lambda ds: piece.row > 1 and ds % piece.row == 0
    while True:
        for i, j in itertools.permutations(range(len(axes)), 2):
            (n, ss, ds), (m, ssm, dsm) = axes[i], axes[j]
            if ss == m * ssm and ds == m * dsm and lines(ds) == lines(dsm):
                axes[j] = (n * m, ssm, dsm)
                del axes[i]
                break
        else:
            return replace(piece, axes=tuple(axes))


@dataclass(frozen=True)
class Form:
    """A piece with its axes assigned to A, B and outer."""

    form: str
    a: Axis
    a2: Axis  # (1, 0, 0) if A is one axis
    b: Axis
    outer: tuple[Axis, ...]


def choose_form(piece: IpcBox) -> Form:
    """Choose A, B and the form."""
    one = (1, 0, 0)
    if not piece.axes:
        return Form("rows", one, one, (1, 1, 1), ())
    b = min(piece.axes, key=lambda a: (a[2], -a[0]))
    rest = [a for a in piece.axes if a is not b]
    closer = [a for a in rest if a[1] > 0 and (b[1] == 0 or a[1] < b[1])]
    if b[1] == 1 or not closer:
        by_line = [a for a in rest if piece.row > 1 and a[2] % piece.row == 0]
        a = max(by_line or rest, key=lambda a: a[0], default=one)
        return Form("rows", a, one, b, tuple(x for x in rest if x is not a))
    a = min(closer, key=lambda a: (a[1], -a[0]))
    rest = [x for x in rest if x is not a]
    a2 = next((x for x in rest if x[1] == a[0] * a[1]), one)
    return Form("tiles", a, a2, b, tuple(x for x in rest if x is not a2))


def separable(piece: IpcBox, form: Form) -> bool:
    """Whether A runs along lines and B within a line in every block: weights then come from two small tables."""
    row = piece.row
    if any(ds < 0 for _, _, ds in piece.axes):
        return False
    columns = [a for a in piece.axes if row == 1 or a[2] % row]
    if piece.dst % row + sum((n - 1) * ds for n, _, ds in columns) >= row:
        return False
    along = lambda a: a[0] == 1 or a[2] % row == 0
    return along(form.a) and along(form.a2) and (form.b[0] == 1 or form.b in columns)


# ---- tables ---------------------------------------------------------------------------------------------------------


def program_of(transform: ValueTransform, form: str, quick: bool = False) -> Program:
    """The kernel for a value transform; refuses what no kernel supports."""
    computes = bool(transform.add) or (
        transform.cast is not None
        and transform.cast not in (transform.source, transform.wire)
    )
    if computes or transform.source != transform.wire:
        for name in {
            transform.source,
            transform.wire,
            transform.cast or transform.wire,
        }:
            if name not in FLOATS:
                raise Unsupported(
                    f"ipc does not convert {transform.source} to {transform.wire}"
                    + (f" through {transform.cast}" if transform.cast else "")
                    + f": {name} can only be copied as it is",
                    remedy=f"keep these leaves as {transform.wire}, or as one of {', '.join(FLOATS)}; "
                    'or connect with transport="nccl" or "shm"',
                    dtype=name,
                )
    return Program(form, transform.source, transform.wire, computes, quick)


def tables(pieces: Iterable[IpcBox], aligned: bool = True) -> list[Table]:
    """The launches for these copies. `aligned`: all pointers are multiples of 16 bytes."""
    grouped: dict[Program, list[list[int]]] = {}
    for given in pieces:
        if any(n == 0 for n, _, _ in given.axes):
            continue
        for cut in cut_at_lines(given):
            piece = merged(cut)
            form = choose_form(piece)
            program = program_of(piece.transform, form.form)
            program = replace(program, quick=aligned and _quick(piece, form, program))
            grouped.setdefault(program, []).extend(_entries(piece, form, program))
    out = []
    for program, entries in sorted(grouped.items(), key=lambda item: str(item[0])):
        table = np.array([e[:-1] for e in entries], np.int64)
        ends = np.cumsum([e[-1] for e in entries], dtype=np.int64)
        if ends[-1] >= 1 << 31:
            raise LayoutError(
                f"{ends[-1]} blocks in one launch",
                remedy="shard the parameters over more devices",
            )
        first = np.concatenate([[0], ends[:-1]]).astype(np.uint32)
        counts = [
            table[:, AT[f]] for f in ("na", "nb", *(f"n{k}" for k in range(OUTER)))
        ]
        nbytes = int(np.prod(counts, axis=0).sum()) * item_bytes(program.wire)
        out.append(Table(program, table, first, int(ends[-1]), nbytes))
    return out


def _entries(piece: IpcBox, form: Form, program: Program) -> list[list[int]]:
    """Rows of the table, each followed by its number of blocks; axes beyond OUTER are unrolled into rows."""
    outer = sorted(form.outer, key=lambda a: -a[0])
    kept = outer[:OUTER]
    extra = outer[OUTER:]
    out = []
    for digits in itertools.product(*(range(n) for n, _, _ in extra)):
        src = piece.src + sum(
            i * ss for i, (_, ss, _) in zip(digits, extra, strict=True)
        )
        dst = piece.dst + sum(
            i * ds for i, (_, _, ds) in zip(digits, extra, strict=True)
        )
        out.append(
            _entry(
                replace(piece, src=src, dst=dst),
                form,
                kept,
                program,
                separable(piece, form),
            )
        )
    return out


def _entry(
    piece: IpcBox, form: Form, outer: list[Axis], program: Program, apart: bool
) -> list[int]:
    (n1, ssa1, dsa1), (n2, ssa2, dsa2), (nb, ssb, dsb) = form.a, form.a2, form.b
    na = n1 * n2
    wide = 0
    if program.form == "rows":
        while wide < 8 and (1 << wide) * program.vector < nb:
            wide += 1
        span_a = (THREADS >> wide) * STEPS
        span_b = (1 << wide) * program.vector
    else:
        span_a = SIDE * DEEP
        span_b = SIDE
    tiles_a = -(-na // span_a)
    tiles_b = -(-nb // span_b)
    padded = [*outer, *[(1, 0, 0)] * (OUTER - len(outer))]
    flags = SEPARABLE * apart | _aligned(piece, form, outer, program)
    row = piece.row
    entry = [
        piece.source,
        piece.src,
        piece.target,
        piece.dst,
        na,
        n1,
        ssa1,
        ssa2,
        dsa1,
        dsa2,
        nb,
        ssb,
        dsb,
        *(x for axis in padded for x in axis),
        tiles_a,
        tiles_b,
        row,
        dsa1 // row,
        dsa2 // row,
        flags,
        piece.slot,
        int(np.float32(piece.transform.add).view(np.uint32)),
        FLOATS[piece.transform.cast]
        if program.computes and piece.transform.cast
        else 0,
        wide,
    ]
    blocks = tiles_a * tiles_b
    for n, _, _ in outer:
        blocks *= n
    return [*entry, blocks]


def _quick(piece: IpcBox, form: Form, program: Program) -> bool:
    """Whether all accesses are whole vectors and weights come from tables."""
    if not separable(piece, form):
        return False
    if _aligned(piece, form, list(form.outer), program) != LOAD | STORE:
        return False
    if program.form == "rows":
        return form.b[0] % program.vector == 0
    size_a = form.a[0] * form.a2[0]
    return (
        size_a % (16 // item_bytes(program.source)) == 0
        and form.b[0] % (16 // item_bytes(program.wire)) == 0
    )


def _aligned(piece: IpcBox, form: Form, outer: list[Axis], program: Program) -> int:
    """LOAD and STORE: whether every run starts on a vector boundary if the pointers do."""
    load = 16 // item_bytes(program.source)
    store = 16 // item_bytes(program.wire)
    if program.form == "rows":
        load = store = program.vector
        runs_on = form.b[1] == 1 or form.b[0] == 1
        sources = [piece.src, form.a[1], *(ss for _, ss, _ in outer)]
    else:
        runs_on = form.a[1] == 1 and (form.a2[0] == 1 or form.a2[1] == form.a[0])
        sources = [piece.src, form.b[1], *(ss for _, ss, _ in outer)]
    targets = [piece.dst, form.a[2], form.a2[2], *(ds for _, _, ds in outer)]
    reads = LOAD * (runs_on and not any(s % load for s in sources))
    writes = STORE * (form.b[2] == 1 and not any(s % store for s in targets))
    return reads | writes

"""The tracer's dispatch mode: intercepts every write into a model and tracks the origin of its source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jvlab.engine._modules import memory_of
from jvlab.layout._boxes import merge_axes

# Algebra of strided boxes: views resolved exactly through re-ordering copies, and what a set of boxes covers.
# A *box* is an offset, a shape and strides, in elements: the addresses offset + Σ i_d · stride_d. Pure Python
# and numpy.


@dataclass(frozen=True)
class StridedAxis:
    """One axis of a part: `step` indices along dimension `dim` of a view are `stride` elements in the source."""

    dim: int
    size: int
    step: int
    stride: int


@dataclass(frozen=True)
class StridedPart:
    """A box of a view and where it comes from: `start[d]` is its first index in view dimension d."""

    source: int  # number of the root tensor
    offset: int  # in the root tensor, of the part's first element
    start: tuple[int, ...]
    axes: tuple[StridedAxis, ...]


@dataclass(frozen=True)
class Digits:
    """A re-ordered copy: its addresses, read as digits of a mixed radix, and for ranges of digits the source they hold.

    `sizes` and `strides` are the radix, largest stride first, dense. A range is (low, high) per digit, the root tensor,
    the offset there of the digits `low`, and the source stride of each digit.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    ranges: tuple[
        tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]], ...
    ]


def whole(
    source: int, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> list[StridedPart]:
    """The one part of a plain view of root tensor `source`."""
    axes = tuple(
        StridedAxis(d, n, 1, s)
        for d, (n, s) in enumerate(zip(shape, strides, strict=True))
        if n > 1
    )
    return [StridedPart(source, offset, (0,) * len(shape), axes)]


def _factor(
    digits: Digits, starts: list[int], dim: int, size: int, stride: int
) -> list[tuple[int, int, int, int]] | None:
    """Split one view dimension over the digits it runs through: (digit, size, digit step, index step) each."""
    found = []
    index_step = 1
    while size > 1:
        k = next(
            (
                k
                for k, s in enumerate(digits.strides)
                if s <= stride and stride % s == 0
            ),
            None,
        )
        if k is None:
            return None
        step = stride // digits.strides[k]
        if starts[k] + (size - 1) * step < digits.sizes[k]:
            found.append((k, size, step, index_step))
            return found
        count = digits.sizes[k] // step if digits.sizes[k] % step == 0 else 0
        if k == 0 or count < 1 or starts[k] >= step or size % count:
            return None  # the view crosses a digit's end in the middle of a step
        if count > 1:
            found.append((k, count, step, index_step))
        size = size // count
        index_step = index_step * count
        stride = digits.strides[k - 1]
    return found


def through(
    digits: Digits, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> list[StridedPart] | None:
    """The parts of a view (offset, shape, strides) of a re-ordered copy, or None if there is no cheap exact answer."""
    starts = [
        offset // s % n for n, s in zip(digits.sizes, digits.strides, strict=True)
    ]
    # per digit: (dim, size, step, index step)
    runs: list[list[tuple[int, int, int, int]]] = [[] for _ in digits.sizes]
    repeats = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride == 0:
            repeats.append(StridedAxis(dim, size, 1, 0))
        elif size > 1:
            factors = _factor(digits, starts, dim, size, stride)
            if factors is None:
                return None
            for k, count, step, index_step in factors:
                runs[k].append((dim, count, step, index_step))
    for k, size in enumerate(digits.sizes):
        if starts[k] + sum((count - 1) * step for _, count, step, _ in runs[k]) >= size:
            return None
    parts = []
    for low, high, source, base, source_strides in digits.ranges:
        begin = [0] * len(shape)
        axes = list(repeats)
        for k, stride in enumerate(source_strides):
            first = starts[k]
            last = first + sum((count - 1) * step for _, count, step, _ in runs[k])
            if last < low[k] or first >= high[k]:
                break  # this range has no element of the view
            if len(runs[k]) == 1:
                dim, count, step, index_step = runs[k][0]
                skip = max(0, -(-(low[k] - first) // step))
                count = min(count, (high[k] - 1 - first) // step + 1) - skip
                if count <= 0:
                    break
                begin[dim] += skip * index_step
                first += skip * step
                axes.append(StridedAxis(dim, count, index_step, step * stride))
            elif first < low[k] or last >= high[k]:
                return None
            else:
                axes.extend(
                    StridedAxis(dim, count, index_step, step * stride)
                    for dim, count, step, index_step in runs[k]
                )
            base += (first - low[k]) * stride
        else:
            parts.append(
                StridedPart(
                    source, base, tuple(begin), tuple(a for a in axes if a.size > 1)
                )
            )
    return parts


def reordered(
    parts: list[StridedPart], shape: Sequence[int], strides: Sequence[int]
) -> Digits | None:
    """The digits of a dense copy, with these strides, of a view made of `parts`; None if it has no mixed radix."""
    if len(parts) == 1:
        axes = sorted(parts[0].axes, key=lambda a: -a.step * strides[a.dim])
        sizes = tuple(a.size for a in axes)
        steps = tuple(a.step * strides[a.dim] for a in axes)
        ranges = (
            (
                (0,) * len(axes),
                sizes,
                parts[0].source,
                parts[0].offset,
                tuple(a.stride for a in axes),
            ),
        )
    else:
        dims = sorted(
            (d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d]
        )
        sizes = tuple(shape[d] for d in dims)
        steps = tuple(strides[d] for d in dims)
        ranges = tuple(_range(part, dims) for part in parts)
        if any(r is None for r in ranges):
            return None
    # each stride is that of the next digit times its size; that of the last is 1
    inner = zip(pairwise((*steps, 1)), (*sizes[1:], 1), strict=True) if steps else ()
    if any(a != b * n for (a, b), n in inner):
        return None
    return Digits(sizes, steps, tuple(r for r in ranges if r is not None))


def _range(
    part: StridedPart, dims: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]] | None:
    by_dim = {a.dim: a for a in part.axes}
    if len(by_dim) != len(part.axes) or any(a.step != 1 for a in part.axes):
        return None  # a dimension that is split further: not supported
    low = tuple(part.start[d] for d in dims)
    high = tuple(part.start[d] + (by_dim[d].size if d in by_dim else 1) for d in dims)
    return (
        low,
        high,
        part.source,
        part.offset,
        tuple(by_dim[d].stride if d in by_dim else 0 for d in dims),
    )


@dataclass(frozen=True)
class Row:
    """One strided copy from a root tensor into a parameter."""

    source: int
    target: int
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]


def row(part: StridedPart, target: int, offset: int, strides: Sequence[int]) -> Row:
    """The copy of one part into the target box (offset, strides), dimensions sorted and merged where that is exact."""
    offset += sum(s * i for s, i in zip(strides, part.start, strict=True))
    dims = sorted(
        ((a.size, a.stride, a.step * strides[a.dim]) for a in part.axes),
        key=lambda d: -d[2],
    )
    merged = merge_axes((size, (src, dst), None) for size, src, dst in dims) or [
        (1, (0, 0), None)
    ]
    sizes, srcs, dsts = zip(
        *((size, *strides) for size, strides, _ in merged), strict=True
    )
    return Row(
        part.source, target, tuple(sizes), part.offset, tuple(srcs), offset, tuple(dsts)
    )


def joined(rows: Iterable[Row]) -> list[Row]:
    """The same copies, with neighbours along the first dimension merged."""
    out: list[Row] = []
    for r in rows:
        p = out[-1] if out else None
        if (
            p is not None
            and (p.source, p.target, p.shape[1:], p.src_strides, p.dst_strides)
            == (r.source, r.target, r.shape[1:], r.src_strides, r.dst_strides)
            and r.src_offset - p.src_offset == p.shape[0] * p.src_strides[0]
            and r.dst_offset - p.dst_offset == p.shape[0] * p.dst_strides[0]
            and p.dst_strides[0] > 0
        ):
            out[-1] = replace(p, shape=(p.shape[0] + r.shape[0], *p.shape[1:]))
        else:
            out.append(r)
    return out


def runs(offset: int, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The addresses of a box as [begin, end) runs, int64 [N, 2]; N is small where the box is nearly contiguous."""
    dims = sorted(
        ((s, n) for n, s in zip(shape, strides, strict=True) if n > 1),
        key=lambda d: d[0],
    )
    length = 1
    outer = []
    for stride, size in dims:
        if not outer and stride == length:
            length *= size
        else:
            outer.append((stride, size))
    begins = np.array([offset], np.int64)
    for stride, size in outer:
        begins = (
            begins[None, :] + stride * np.arange(size, dtype=np.int64)[:, None]
        ).reshape(-1)
    return np.stack([begins, begins + length], axis=1)


def covered(pieces: Sequence[np.ndarray]) -> tuple[int, int]:
    """How many addresses the runs cover, and how many of these more than once."""
    if not pieces:
        return 0, 0
    runs_of_all = np.concatenate(pieces)
    ends = runs_of_all.T.reshape(-1)
    change = np.repeat(np.array([1, -1]), len(runs_of_all))
    order = np.argsort(ends, kind="stable")
    depth = np.cumsum(change[order])[:-1]
    width = np.diff(ends[order])
    return int(width[depth >= 1].sum()), int(width[depth >= 2].sum())


# ----------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def _schema(func: Any) -> Any:
    """What torch knows of an operation's arguments."""
    return func._schema


_SHAPE_ONLY = {  # results do not depend on the values of arguments
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "is_same_size",
    "sym_size",
    "sym_numel",
    "sym_stride",
    "sym_storage_offset",
}


class ValueRead(Exception):
    """The loader read the value of a tensor; meta tensors have none."""

    def __init__(self, names: set[str], operation: str) -> None:
        self.names = names
        self.operation = operation
        super().__init__(f"the loader reads values of {sorted(names)} ({operation})")


class Target:
    """A live parameter or buffer whose writes are recorded. Holds the tensor, so that its address is not reused."""

    def __init__(
        self, number: int, name: str, buffer: bool, tensor: torch.Tensor
    ) -> None:
        self.number = number
        self.name = name
        self.buffer = buffer
        self.tensor = tensor
        self.data = tensor.data
        self.shape = tuple(tensor.shape)
        self.strides = tuple(tensor.stride())
        self.dtype = tensor.dtype
        self.storage = memory_of(tensor)
        self.offset = int(tensor.storage_offset())
        self.elements = tensor.numel()
        self.end = (
            self.offset
            + 1
            + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        )

    def runs(self, view: torch.Tensor | None) -> np.ndarray:
        """The elements of a view of this tensor, as runs; all of them for no view, or one of another dtype."""
        if view is None or view.dtype != self.dtype:
            return runs(0, self.shape, self.strides)
        if not view.numel():
            return np.zeros((0, 2), np.int64)
        return runs(int(view.storage_offset()) - self.offset, view.shape, view.stride())


@dataclass
class WriteOrigin:
    """The content of a storage: a checkpoint tensor itself (`root`), a re-ordering (`digits`), or computed values."""

    dtype: torch.dtype
    names: set[str]
    root: int | None = None
    digits: Digits | None = None
    via: tuple[torch.dtype, ...] = ()  # intermediate dtypes of conversions
    reason: str = ""  # why it is opaque; empty if it is not


class Recorder(TorchDispatchMode):
    """Under this mode `copy_` into a model records a row instead of writing memory. Rows are in copy order."""

    def __init__(
        self, names: list[str], sources: list[torch.Tensor], targets: list[Target]
    ) -> None:
        super().__init__()
        self.names = names
        self.targets = list(targets)
        self._dtypes = [s.dtype for s in sources]
        self.rows: list[Row] = []
        self.opaque: dict[str, str] = {}  # checkpoint tensor -> why
        # target -> what the loader computes in place
        self.computed: dict[int, str] = {}
        # target -> (what, elements)
        self.loader_filled: dict[int, list[tuple[str, np.ndarray]]] = {}
        # target -> (tensors, elements)
        self.opaque_writes: dict[int, list[tuple[set[str], np.ndarray]]] = {}
        # (target, source) of copies into no model tensor
        self._orphans: list[tuple[torch.Tensor, torch.Tensor]] = []
        # storages are identified by address, so none may be freed
        self._held: list[Any] = [*sources]
        self._origins = {
            memory_of(s): WriteOrigin(s.dtype, {n}, root=i)
            for i, (n, s) in enumerate(zip(names, sources, strict=True))
        }
        self._by_storage: dict[int, list[Target]] = {}
        for t in targets:
            self._by_storage.setdefault(t.storage, []).append(t)
        self._handlers: dict[Any, Any] = {
            _aten.copy_.default: self._copy,
            _aten.clone.default: self._clone,
            _aten._to_copy.default: self._clone,
            _aten.cat.default: self._cat,
            _aten._local_scalar_dense.default: self._item,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        return handler(func, args, kwargs)

    def _handler(self, func: Any) -> Any:
        if _dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            # in inference mode reshape and to() arrive undecomposed, and may copy
            return self._decompose
        if _schema(func).is_mutable:
            return self._mutate
        if any(argument.alias_info is not None for argument in _schema(func).arguments):
            return self._view
        return self._follow

    # -- origins of tensors

    def _origin(self, tensor: torch.Tensor) -> WriteOrigin | None:
        return self._origins.get(memory_of(tensor))

    def _origins_in(self, args: Any, kwargs: Any) -> list[WriteOrigin]:
        found = [
            self._origin(a)
            for a in tree_leaves((args, kwargs))
            if isinstance(a, torch.Tensor)
        ]
        return [o for o in found if o is not None]

    def _set_origin(self, tensor: torch.Tensor, origin: WriteOrigin) -> None:
        self._held.append(tensor)
        self._origins[memory_of(tensor)] = origin

    def _target(self, tensor: torch.Tensor) -> Target | None:
        """The model tensor that `tensor` is a view of."""
        candidates = self._by_storage.get(memory_of(tensor), ())
        at = tensor.storage_offset()
        return next(
            (t for t in candidates if t.offset <= at < t.end),
            candidates[0] if candidates else None,
        )

    def _parts(
        self, view: torch.Tensor, origin: WriteOrigin
    ) -> list[StridedPart] | str:
        """Which boxes of which checkpoint tensors a view holds, or why that is unknown."""
        if origin.reason:
            return origin.reason
        if view.dtype != origin.dtype:
            return f"its bits are read as {view.dtype}"
        if origin.root is not None:
            return whole(
                origin.root, int(view.storage_offset()), view.shape, view.stride()
            )
        assert origin.digits is not None
        parts = through(
            origin.digits, int(view.storage_offset()), view.shape, view.stride()
        )
        return (
            "a view of a re-ordered copy that is not a strided box"
            if parts is None
            else parts
        )

    # -- operations

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Origins are per storage, which a view shares: nothing to record."""
        return func(*args, **kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation without side effects; what it computes from a checkpoint tensor is opaque."""
        out = func(*args, **kwargs)
        known = self._origins_in(args, kwargs)
        if known and _schema(func).name.removeprefix("aten::") not in _SHAPE_ONLY:
            names = set().union(*(o.names for o in known))
            for t in tree_leaves(out):
                if (
                    isinstance(t, torch.Tensor)
                    and self._origin(t) is None
                    and self._target(t) is None
                ):
                    self._set_origin(
                        t,
                        WriteOrigin(
                            t.dtype, names, reason=f"the loader computes it ({func})"
                        ),
                    )
        return out

    def _item(self, func: Any, args: Any, kwargs: Any) -> Any:
        origin = self._origin(args[0])
        if origin is None:
            return func(*args, **kwargs)
        raise ValueRead(origin.names, "item()")

    def _clone(self, func: Any, args: Any, kwargs: Any) -> Any:
        view = args[0]
        origin = self._origin(view)
        if origin is None:
            return func(*args, **kwargs)
        # stays on meta, whatever device the loader asks for
        if kwargs.get("device") is not None:
            kwargs = {
                **kwargs,
                "device": torch.device("meta"),
                "non_blocking": False,
                "pin_memory": False,
            }
        out = func(*args, **kwargs)
        parts = self._parts(view, origin)
        digits = (
            None
            if isinstance(parts, str)
            else reordered(parts, view.shape, out.stride())
        )
        reason = (
            parts
            if isinstance(parts, str)
            else "a copy of it is not a dense reordering"
            if digits is None
            else ""
        )
        via = (*origin.via, out.dtype) if out.dtype != origin.dtype else origin.via
        self._set_origin(
            out,
            WriteOrigin(out.dtype, origin.names, digits=digits, via=via, reason=reason),
        )
        return out

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Any:
        views = list(args[0])
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        known = [self._origin(v) for v in views]
        if not any(known):
            return func(*args, **kwargs)
        names = set().union(*(o.names for o in known if o is not None))
        if not all(v.is_meta for v in views):
            views = [v.to("meta") for v in views]
        out = func(views, dim)
        dim %= out.ndim
        parts: list[StridedPart] | None = []
        at = 0
        via = ()
        for view, origin in zip(views, known, strict=True):
            found = (
                self._parts(view, origin)
                if origin is not None
                else "with another tensor"
            )
            if (
                isinstance(found, str)
                or parts is None
                or (origin is not None and origin.dtype != out.dtype)
            ):
                parts = None
                break
            assert origin is not None
            via = max(via, origin.via, key=len)
            parts += [
                StridedPart(
                    p.source,
                    p.offset,
                    (*p.start[:dim], p.start[dim] + at, *p.start[dim + 1 :]),
                    p.axes,
                )
                for p in found
            ]
            at += view.shape[dim]
        digits = None if parts is None else reordered(parts, out.shape, out.stride())
        reason = (
            ""
            if digits is not None
            else "the loader concatenates it with something that cannot be followed"
        )
        self._set_origin(
            out, WriteOrigin(out.dtype, names, digits=digits, via=via, reason=reason)
        )
        return out

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        owner = self._target(target)
        origin = self._origin(source)
        if owner is None:
            if origin is None:
                return func(*args, **kwargs)
            self._orphans.append((target, source))
            self._taint(target, origin, "it goes through a temporary tensor")
            return target
        if origin is None:
            self.computed.setdefault(
                owner.number,
                f"the loader then writes a computed value into {owner.name}",
            )
            self.loader_filled.setdefault(owner.number, []).append(
                ("values of its own", owner.runs(target))
            )
            return target
        self._write(owner, target, source, origin)
        return target

    def _write(
        self,
        owner: Target,
        target: torch.Tensor,
        source: torch.Tensor,
        origin: WriteOrigin,
    ) -> None:
        """Records the copy of a source of known origin into a view of a model tensor."""
        if not target.numel():
            return
        parts = self._parts(source.expand(target.shape), origin)
        if not isinstance(parts, str):
            if target.dtype != owner.dtype:
                parts = f"{owner.name} is written through a view of its bits"
            elif not _same_values(
                [self._dtypes[p.source] for p in parts], origin.via, owner.dtype
            ):
                parts = f"converted to {', '.join(map(str, origin.via))} before {owner.dtype}"
        if isinstance(parts, str):
            self._mark(origin, owner, parts, target)
        else:
            at = int(target.storage_offset()) - owner.offset
            self.rows += [row(p, owner.number, at, target.stride()) for p in parts]

    def adopt(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Records copies into parameters that the loader created (vLLM's Transformers backend: lm_head.bias)."""
        known = {t.name: t for t in self.targets}
        made: dict[int, Target] = {}
        for name, p in parameters:
            storage = memory_of(p)
            if storage not in self._by_storage and any(
                memory_of(t) == storage for t, _ in self._orphans
            ):
                fresh = Target(len(self.targets), name, False, p)
                old = known.get(name)
                if old is not None and (old.shape, old.strides, old.dtype) == (
                    fresh.shape,
                    fresh.strides,
                    fresh.dtype,
                ):
                    fresh.number = old.number  # a live model had it before
                else:
                    self.targets.append(fresh)
                made[storage] = fresh
        for target, source in self._orphans:
            owner = made.get(memory_of(target))
            origin = self._origin(source)
            assert origin is not None
            if owner is not None:
                self._write(owner, target, source, origin)
            else:
                for name in origin.names:
                    self.opaque.setdefault(
                        name,
                        "it is copied into a tensor that is not a parameter of the model",
                    )

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Any other operation that writes; it is never applied to the model."""
        written = [
            value
            for argument, value in zip(_schema(func).arguments, args, strict=False)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, torch.Tensor)
        ]
        known = self._origins_in(args, kwargs)
        owned = [(o, view) for view in written if (o := self._target(view)) is not None]
        name = _schema(func).name.removeprefix("aten::")
        if (
            owned
            and not known
            and name in ("fill_", "zero_")
            and owned[0][1].dtype == owned[0][0].dtype
        ):
            self.fill(*owned[0], 0.0 if name == "zero_" else float(args[1]))
            return args[0]
        for owner, view in owned:
            reason = f"the loader changes {owner.name} in place ({func})"
            self.computed.setdefault(owner.number, reason)
            for origin in known:
                self._mark(origin, owner, reason, view)
        if owned:
            return args[0]
        if not known:
            return func(*args, **kwargs)
        for tensor in written:
            for origin in known:
                self._taint(tensor, origin, f"the loader computes it ({func})")
        return args[0]

    def fill(self, owner: Target, view: torch.Tensor, value: float) -> None:
        """Records a constant fill; where it overwrites earlier copies, their tensors become opaque."""
        place = owner.runs(view)
        before = [
            runs(r.dst_offset, r.shape, r.dst_strides)
            for r in self.rows
            if r.target == owner.number
        ]
        if any(covered([place, mine])[1] for mine in before):
            reason = f"the loader then fills elements copied into {owner.name} with {value:g}"
            self.computed.setdefault(owner.number, reason)
        self.loader_filled.setdefault(owner.number, []).append((f"{value:g}", place))

    def _taint(self, tensor: torch.Tensor, origin: WriteOrigin, reason: str) -> None:
        mine = self._origin(tensor)
        names = origin.names | (mine.names if mine else set())
        if (
            mine is not None and mine.root is not None
        ):  # the loader overwrites a checkpoint tensor: later views differ from it
            names |= {self.names[mine.root]}
        self._set_origin(
            tensor, WriteOrigin(tensor.dtype, names, reason=origin.reason or reason)
        )

    def check_memory(self) -> None:
        """Restores the memory of a parameter whose `.data` the loader replaced, and marks its sources opaque."""
        for t in self.targets:
            if memory_of(t.tensor) != t.storage:
                origin = self._origin(t.tensor)
                reason = f"the loader replaces the memory of {t.name}"
                self.computed.setdefault(t.number, reason)
                if origin is not None:
                    self._mark(origin, t, reason)
                t.tensor.data = t.data

    def _mark(
        self,
        origin: WriteOrigin,
        owner: Target,
        reason: str,
        view: torch.Tensor | None = None,
    ) -> None:
        self.opaque_writes.setdefault(owner.number, []).append(
            (origin.names, owner.runs(view))
        )
        for name in origin.names:
            self.opaque.setdefault(name, reason)


def _same_values(
    roots: list[torch.dtype], via: tuple[torch.dtype, ...], final: torch.dtype
) -> bool:
    """Whether converting through `via` gives the same bits as converting directly to `final`."""
    widening = {
        step
        for step in (torch.float32, torch.float64)
        if all(_holds(step, r) for r in roots)
    }
    return all(step == final or step in widening for step in via)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return narrow.is_floating_point and narrow.itemsize <= wide.itemsize

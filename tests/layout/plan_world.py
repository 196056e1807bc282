"""Hand-made worlds for plan tests: leaves, rules as axes, region tables of a vLLM-like loader, dense references."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec, default_spec
from jvlab.layout._types import (
    Axis,
    Binding,
    CheckpointTensor,
    Leaf,
    Note,
    Parameter,
    RankLayout,
)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape))
    )


@dataclass
class Loader:
    """Collects one rank's rows the way a traced loader reports them."""

    rank: int
    parameters: list[Parameter] = field(default_factory=list)
    rows: list[
        tuple[str, int, tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]
    ] = field(default_factory=list)
    padding: list[Note] = field(default_factory=list)

    def parameter(
        self, name: str, shape: tuple[int, ...], dtype: str = "float32"
    ) -> int:
        self.parameters.append(Parameter(name, shape, dtype, strides_of(shape)))
        return len(self.parameters) - 1

    def copy(
        self,
        tensor: CheckpointTensor,
        src: tuple[slice, ...],
        parameter: int,
        dst: tuple[slice, ...],
    ) -> None:
        """Row for parameter[dst] = tensor[src], both plain basic slices."""
        p = self.parameters[parameter]
        base_s, base_d = strides_of(tensor.shape), strides_of(p.shape)
        s = [x.indices(n) for x, n in zip(src, tensor.shape, strict=True)]
        d = [x.indices(n) for x, n in zip(dst, p.shape, strict=True)]
        s_shape = [len(range(*x)) for x in s]
        d_shape = [len(range(*x)) for x in d]
        # parameter[e] = tensor: the leading dimension has size 1
        while len(d_shape) > len(s_shape):
            assert d_shape[0] == 1
            offset_lead = d[0][0] * base_d[0]
            d, d_shape, base_d = d[1:], d_shape[1:], base_d[1:]
            break
        else:
            offset_lead = 0
        assert s_shape == d_shape, (s_shape, d_shape)
        if 0 in s_shape:
            return
        self.rows.append(
            (
                tensor.name,
                parameter,
                tuple(s_shape),
                sum(x[0] * b for x, b in zip(s, base_s, strict=True)),
                tuple(x[2] * b for x, b in zip(s, base_s, strict=True)),
                offset_lead + sum(x[0] * b for x, b in zip(d, base_d, strict=True)),
                tuple(x[2] * b for x, b in zip(d, base_d, strict=True)),
            )
        )

    def layout(
        self, tensors: tuple[CheckpointTensor, ...], width: int = 4
    ) -> RankLayout:
        number = {t.name: i for i, t in enumerate(tensors)}
        used = {r[0] for r in self.rows}

        def wide(k: int, fill: int) -> np.ndarray:
            rows = [tuple(r[k]) + (fill,) * (width - len(r[k])) for r in self.rows]  # type: ignore[arg-type]
            return np.array(rows, np.int64).reshape(-1, width)

        def column(k: int) -> np.ndarray:
            return np.array([r[k] for r in self.rows], np.int64)

        return RankLayout(
            self.rank,
            (("tp", self.rank),),
            tensors,
            tuple(self.parameters),
            np.array([number[r[0]] for r in self.rows], np.int32),
            column(1).astype(np.int32),
            wide(2, 1),
            column(3),
            wide(4, 0),
            column(5),
            wide(6, 0),
            padding=tuple(self.padding),
            unused=tuple(t.name for t in tensors if t.name not in used),
        )


# per dimension: the mesh axis (or axes) it is cut along
Spec = tuple[str | tuple[str, ...] | None, ...]


def cut_leaf(
    path: str,
    shape: tuple[int, ...],
    dtype: str,
    mesh: MeshSpec,
    spec: Spec | None = None,
) -> Leaf:
    """A leaf on a described mesh, cut as a PartitionSpec says."""
    entries = default_spec(shape, mesh) if spec is None else spec
    starts, stops = [], []
    for coords in np.ndindex(*mesh.sizes):
        start, stop = [0] * len(shape), list(shape)
        for d, entry in enumerate(entries):
            for name in (entry,) if isinstance(entry, str) else entry or ():
                k = mesh.names.index(name)
                step, rest = divmod(stop[d] - start[d], mesh.sizes[k])
                assert not rest, f"{path}: {shape} does not suit {spec}"
                start[d] += coords[k] * step
                stop[d] = start[d] + step
        starts.append(start)
        stops.append(stop)
    ids = np.array(mesh.ids or range(mesh.devices), np.int32)
    order = np.argsort(ids)
    size = (len(ids), len(shape))
    return Leaf(
        path,
        shape,
        dtype,
        ids[order],
        np.array(starts, np.int64).reshape(size)[order],
        np.array(stops, np.int64).reshape(size)[order],
    )


@dataclass
class World:
    """Leaves with values, their bindings, the ranks' layouts."""

    mesh: MeshSpec
    tp: int
    dtype: str = "float32"
    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    tensors: dict[str, CheckpointTensor] = field(default_factory=dict)
    loaders: list[Loader] = field(default_factory=list)
    seed: int = 0

    def __post_init__(self) -> None:
        self.loaders = [Loader(r) for r in range(self.tp)]
        self.rng = np.random.default_rng(self.seed)

    def leaf(
        self,
        path: str,
        shape: tuple[int, ...],
        spec: Spec | None = None,
        dtype: str = "float32",
    ) -> Leaf:
        leaf = cut_leaf(path, shape, dtype, self.mesh, spec)
        self.leaves.append(leaf)
        self.values[path] = self.rng.integers(-99, 99, shape).astype(dtype)
        return leaf

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: str = "float32"
    ) -> CheckpointTensor:
        self.tensors[name] = CheckpointTensor(name, shape, dtype)
        return self.tensors[name]

    def bind(
        self,
        leaf: str,
        tensor: str,
        axes: list[tuple[int, int, int, int, int]],
        leaf_start: tuple[int, ...] | None = None,
        tensor_start: tuple[int, ...] | None = None,
        add: float = 0.0,
    ) -> None:
        shape = next(x.shape for x in self.leaves if x.path == leaf)
        t = self.tensors[tensor]
        self.bindings.append(
            Binding(
                leaf,
                tensor,
                shape,
                t.shape,
                leaf_start or (0,) * len(shape),
                tensor_start or (0,) * len(t.shape),
                tuple(Axis(*a) for a in axes),
                add=add,
            )
        )

    @property
    def layouts(self) -> list[RankLayout]:
        tensors = tuple(self.tensors.values())
        return [x.layout(tensors) for x in self.loaders]

    # ---- dense reference: element by element, nothing shared with the compiler ------------------------------

    def dense_tensors(self) -> dict[str, np.ndarray]:
        out = {n: np.full(t.shape, np.nan) for n, t in self.tensors.items()}
        for b in self.bindings:
            for digits in np.ndindex(*[a.size for a in b.axes]):
                where, to = list(b.leaf_start), list(b.tensor_start)
                for i, a in zip(digits, b.axes, strict=True):
                    where[a.leaf_dim] += i * a.leaf_step
                    to[a.tensor_dim] += i * a.tensor_step
                out[b.tensor][tuple(to)] = self.values[b.leaf][tuple(where)] + b.add
        return out

    def dense_params(self) -> dict[tuple[int, str], np.ndarray]:
        tensors, out = self.dense_tensors(), {}
        for loader in self.loaders:
            flat = {
                i: np.full(int(np.prod(p.shape)), -777.0)
                for i, p in enumerate(loader.parameters)
            }
            for name, p, shape, src, src_strides, dst, dst_strides in loader.rows:
                source = tensors[name].reshape(-1)
                for digits in np.ndindex(*shape):
                    at = src + sum(
                        i * s for i, s in zip(digits, src_strides, strict=True)
                    )
                    to = dst + sum(
                        i * s for i, s in zip(digits, dst_strides, strict=True)
                    )
                    flat[p][to] = source[at]
            for i, p in enumerate(loader.parameters):
                out[loader.rank, p.name] = (
                    flat[i].reshape(p.shape).astype(numpy_dtype(p.dtype))
                )
        return out

    # ---- what the interpreter takes -------------------------------------------------------------------------

    def shards(self) -> dict[tuple[str, int], np.ndarray]:
        out = {}
        for leaf in self.leaves:
            for k, device in enumerate(leaf.devices.tolist()):
                box = tuple(
                    slice(a, b)
                    for a, b in zip(leaf.starts[k], leaf.stops[k], strict=True)
                )
                out[leaf.path, device] = np.ascontiguousarray(
                    self.values[leaf.path][box]
                )
        return out

    def blank_params(self, plan: TransferPlan) -> dict[tuple[int, str], np.ndarray]:
        return {
            (int(r), plan.parameters[p].name): np.full(
                plan.parameters[p].shape, -777.0
            ).astype(numpy_dtype(plan.parameters[p].dtype))
            for r, p in zip(plan.target_rank, plan.target_parameter, strict=True)
        }


SQUARE = {
    False: [(6, 0, 1, 0, 1), (6, 1, 1, 1, 1)],
    True: [(6, 0, 1, 1, 1), (6, 1, 1, 0, 1)],
}


def square(*, transposed: bool, tp: int = 1, halves: bool = False) -> World:
    """One 6 × 6 leaf and tensor, cut by rows over the ranks; with `halves`, its rule is two rules of three columns."""
    world = World(MeshSpec.parse("fsdp=1"), tp)
    world.leaf("w", (6, 6))
    tensor = world.tensor("t", (6, 6))
    if halves:
        for start in (0, 3):
            axes = [(6, 0, 1, int(transposed), 1), (3, 1, 1, 1 - int(transposed), 1)]
            at = (start, 0) if transposed else (0, start)
            world.bind("w", "t", axes, leaf_start=(0, start), tensor_start=at)
    else:
        world.bind("w", "t", SQUARE[transposed])
    for r, loader in enumerate(world.loaders):
        rows = slice(r * 6 // tp, (r + 1) * 6 // tp)
        p = loader.parameter("p", (6 // tp, 6))
        loader.copy(tensor, (rows, slice(None)), p, (slice(None), slice(None)))
    return world


@dataclass(frozen=True)
class Size:
    """A tiny transformer's numbers."""

    d: int = 12
    n: int = 4
    k: int = 2
    h: int = 6
    f: int = 24
    vocab: int = 10
    layers: int = 2
    experts: int = 3


def transformer(
    world: World,
    size: Size,
    *,
    layout: str,
    rotary: bool,
    specs: dict[str, Spec] | None = None,
) -> World:
    """A small model in one of several JAX layouts, loaded by vLLM-like column, row, fused and padded regions.

    layouts: "einsum" (d n h), "dense" (in × out), "checkpoint" (out × in), "scanned" (layers stacked), "fused" (qkv).
    """
    build = _Builder(world, size, layout, rotary, specs or {})
    for i in range(size.layers):
        build.layer(i)
    w, z = world, size
    w.tensor("model.embed_tokens.weight", (z.vocab, z.d))
    path = build.leaf("embed", (z.vocab, z.d))
    w.bind(
        path, "model.embed_tokens.weight", [(z.vocab, 0, 1, 0, 1), (z.d, 1, 1, 1, 1)]
    )
    for loader in w.loaders:
        _load(w, z, loader)
    return w


@dataclass
class _Builder:
    """Leaves and rules of one JAX layout."""

    w: World
    z: Size
    layout: str
    rotary: bool
    specs: dict[str, Spec]

    def leaf(self, path: str, shape: tuple[int, ...]) -> str:
        if path not in self.w.values:
            self.w.leaf(path, shape, self.specs.get(path))
        return path

    def layer(self, i: int) -> None:
        w, z, pre, stacked = (
            self.w,
            self.z,
            f"model.layers.{i}",
            self.layout == "scanned",
        )
        if self.layout == "fused":
            self.fused(i)
        else:
            for role, heads in (("q", z.n), ("k", z.k), ("v", z.k)):
                self.linear(i, role, heads, f"{pre}.{role}_proj.weight")
        self.linear(i, "o", z.n, f"{pre}.o_proj.weight", side="in")
        w.tensor(f"{pre}.norm.weight", (z.d,))
        norm = self.leaf(
            "layers.norm" if stacked else f"layers.{i}.norm",
            (z.layers, z.d) if stacked else (z.d,),
        )
        axes, start = [(z.d, int(stacked), 1, 0, 1)], (i, 0) if stacked else (0,)
        w.bind(norm, f"{pre}.norm.weight", axes, leaf_start=start, add=1.0)
        for role, shape in (("w1", (z.f, z.d)), ("w3", (z.f, z.d)), ("w2", (z.d, z.f))):
            path = self.leaf(
                f"layers.{i}.experts.{role}", (z.experts, shape[1], shape[0])
            )
            for e in range(z.experts):
                name = f"{pre}.experts.{e}.{role}.weight"
                w.tensor(name, shape)
                w.bind(
                    path,
                    name,
                    [(shape[1], 1, 1, 1, 1), (shape[0], 2, 1, 0, 1)],
                    leaf_start=(e, 0, 0),
                )

    def fused(self, i: int) -> None:
        """q, k and v side by side in one leaf."""
        w, z, at = self.w, self.z, 0
        path = self.leaf(f"layers.{i}.qkv", (z.d, (z.n + 2 * z.k) * z.h))
        for role, heads in (("q", z.n), ("k", z.k), ("v", z.k)):
            name = f"model.layers.{i}.{role}_proj.weight"
            w.tensor(name, (heads * z.h, z.d))
            w.bind(
                path,
                name,
                [(z.d, 0, 1, 1, 1), (heads * z.h, 1, 1, 0, 1)],
                leaf_start=(0, at),
            )
            at += heads * z.h

    def linear(
        self, i: int, role: str, heads: int, tensor: str, side: str = "out"
    ) -> None:
        """One projection: its rows are heads × h and its columns d for side "out"; the reverse for "in"."""
        w, z, h, out = self.w, self.z, self.z.h, heads * self.z.h
        shape = (out, z.d) if side == "out" else (z.d, out)
        w.tensor(tensor, shape)
        # tensor dimensions of the (heads h) and the d axis
        dh, dd = (0, 1) if side == "out" else (1, 0)
        stacked = self.layout == "scanned"
        name = f"layers.{role}" if stacked else f"layers.{i}.{role}"
        # leaf interleaved (half two) → tensor half-split (two half)
        rotated = self.rotary and role in ("q", "k")
        if self.layout == "checkpoint":
            w.bind(
                self.leaf(name, shape),
                tensor,
                [(shape[0], 0, 1, 0, 1), (shape[1], 1, 1, 1, 1)],
            )
        elif self.layout == "einsum":
            path = self.leaf(
                name, (z.d, heads, h) if side == "out" else (heads, h, z.d)
            )
            dim_d, dim_n, dim_h = (0, 1, 2) if side == "out" else (2, 0, 1)
            inner = (
                [(h // 2, dim_h, 2, dh, 1), (2, dim_h, 1, dh, h // 2)]
                if rotated
                else [(h, dim_h, 1, dh, 1)]
            )
            w.bind(
                path, tensor, [(z.d, dim_d, 1, dd, 1), (heads, dim_n, 1, dh, h), *inner]
            )
        else:  # dense, fused and scanned: in × out, the heads merged
            s = int(stacked)
            order = (z.d, out) if side == "out" else (out, z.d)
            path = self.leaf(name, (z.layers, *order) if stacked else order)
            dim_d, dim_o = (s, s + 1) if side == "out" else (s + 1, s)
            inner = [(out, dim_o, 1, dh, 1)]
            if rotated:
                inner = [
                    (heads, dim_o, h, dh, h),
                    (h // 2, dim_o, 2, dh, 1),
                    (2, dim_o, 1, dh, h // 2),
                ]
            w.bind(
                path,
                tensor,
                [(z.d, dim_d, 1, dd, 1), *inner],
                leaf_start=(i, 0, 0) if stacked else (0, 0),
            )


def _load(w: World, z: Size, rank: Loader) -> None:
    """What a tensor-parallel loader does: column, row, fused with KV replication, experts, padded vocabulary."""
    tp, r, all_ = w.tp, rank.rank, slice(None)
    n, k = z.n // tp, max(z.k // tp, 1)
    kv = r * z.k // tp if z.k >= tp else r // (tp // z.k)
    for i in range(z.layers):
        pre = f"model.layers.{i}"
        qkv = rank.parameter(
            f"{pre}.qkv_proj.weight", ((n + 2 * k) * z.h, z.d), w.dtype
        )
        at = 0
        for role, first, heads in (("q", r * n, n), ("k", kv, k), ("v", kv, k)):
            src = slice(first * z.h, (first + heads) * z.h)
            rank.copy(
                w.tensors[f"{pre}.{role}_proj.weight"],
                (src, all_),
                qkv,
                (slice(at, at + heads * z.h), all_),
            )
            at += heads * z.h
        o = rank.parameter(f"{pre}.o_proj.weight", (z.d, n * z.h), w.dtype)
        rank.copy(
            w.tensors[f"{pre}.o_proj.weight"],
            (all_, slice(r * n * z.h, (r + 1) * n * z.h)),
            o,
            (all_, all_),
        )
        norm = rank.parameter(f"{pre}.norm.weight", (z.d,), w.dtype)
        rank.copy(w.tensors[f"{pre}.norm.weight"], (all_,), norm, (all_,))
        f = z.f // tp
        w13 = rank.parameter(
            f"{pre}.experts.w13_weight", (z.experts, 2 * f, z.d), w.dtype
        )
        w2 = rank.parameter(f"{pre}.experts.w2_weight", (z.experts, z.d, f), w.dtype)
        for e in range(z.experts):
            part, one = slice(r * f, (r + 1) * f), slice(e, e + 1)
            rank.copy(
                w.tensors[f"{pre}.experts.{e}.w1.weight"],
                (part, all_),
                w13,
                (one, slice(0, f), all_),
            )
            rank.copy(
                w.tensors[f"{pre}.experts.{e}.w3.weight"],
                (part, all_),
                w13,
                (one, slice(f, 2 * f), all_),
            )
            rank.copy(
                w.tensors[f"{pre}.experts.{e}.w2.weight"],
                (all_, part),
                w2,
                (one, all_, all_),
            )
    rows = -(-z.vocab // (8 * tp)) * 8  # padded to 8 rows a rank
    emb = rank.parameter("model.embed_tokens.weight", (rows, z.d), w.dtype)
    lo, hi = min(r * rows, z.vocab), min((r + 1) * rows, z.vocab)
    rank.copy(
        w.tensors["model.embed_tokens.weight"],
        (slice(lo, hi), all_),
        emb,
        (slice(0, hi - lo), all_),
    )
    if hi - lo < rows:
        rank.padding.append(
            _zeros("model.embed_tokens.weight", (rows - (hi - lo)) * z.d)
        )


def _zeros(name: str, elements: int) -> Note:
    return Note(
        name, "vocabulary padding: the loader fills it with 0", elements, "constant"
    )

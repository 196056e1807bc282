"""Rule text → bindings → mesh → tensor-parallel regions → plan → loopback: the bytes a dense numpy reference has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._proof import prove
from jvlab.layout._tree import LeafShape, leaves_of
from jvlab.layout._types import CheckpointTensor, Leaf
from jvlab.layout.rules._ruleset import Rules
from tests.fuzzing import examples
from tests.layout.plan_interpreter import execute
from tests.layout.plan_world import Loader

pytestmark = pytest.mark.slow

# the leaf's axes; the leaf of a checkpoint matrix, in numpy
Way = tuple[str, Callable[[np.ndarray], np.ndarray]]
MESHES = [
    "fsdp=1",
    "fsdp=2",
    "fsdp=3,tp=2",
    "dp=2,fsdp=2",
    "dp=3",
    "tp=4",
    "fsdp=2,dp=2,tp=2",
]


@dataclass
class Model:
    """A drawn model: rule text, leaves and checkpoint as numbers, none of it made by the code under test."""

    d: int
    n: int
    k: int
    h: int
    f: int
    layers: int
    scan: int | None
    lines: list[str] = field(default_factory=list)
    leaves: dict[str, np.ndarray] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    made: int = 0

    def matrix(self, name: str, *shape: int) -> np.ndarray:
        """A checkpoint tensor whose every element differs from every other of the model."""
        size = int(np.prod(shape))
        self.tensors[name] = np.arange(
            self.made, self.made + size, dtype=np.float32
        ).reshape(shape)
        self.made += size
        return self.tensors[name]

    def add(
        self,
        leaf: str,
        tensor: str,
        axes: str,
        right: str,
        per_layer: list[np.ndarray],
        tail: str = "",
    ) -> None:
        """The rule and its leaves, one for each layer or all stacked on the scan axis."""
        if self.scan is None:
            self.lines.append(
                f"layers.{{i}}.{leaf} -> L.{{i}}.{tensor} : {axes} -> {right}{tail}"
            )
            self.leaves |= {f"layers.{i}.{leaf}": a for i, a in enumerate(per_layer)}
            return
        words = axes.replace("(", " ( ").replace(")", " ) ").split()
        # no axis may fall inside a group
        at = 0 if words[0] == "(" else min(self.scan, per_layer[0].ndim)
        left = " ".join([*axes.split()[:at], "i", *axes.split()[at:]])
        self.lines.append(
            f"layers.{leaf} -> L.{{i}}.{tensor} : {left} -> {right}{tail}"
        )
        self.leaves[f"layers.{leaf}"] = np.stack(per_layer, axis=at)


def attention(z: Model, heads: int, axis: str) -> list[Way]:
    """Ways to keep a (heads h) × d matrix."""
    d, h = z.d, z.h
    return [
        (f"d {axis} h", lambda w: w.T.reshape(d, heads, h)),
        (f"{axis} d h", lambda w: w.reshape(heads, h, d).transpose(0, 2, 1)),
        (f"({axis} h) d", lambda w: w),
        (f"d ({axis} h)", lambda w: w.T),
        (
            f"d {axis} (r two)",
            lambda w: (
                w.reshape(heads, 2, h // 2, d)
                .transpose(3, 0, 2, 1)
                .reshape(d, heads, h)
            ),
        ),
    ]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A small transformer, each matrix in a way of its own."""
    one = st.sampled_from
    z = Model(
        draw(one([6, 8, 12])),
        draw(one([4, 8])),
        draw(one([1, 2, 4])),
        draw(one([2, 4, 6])),
        draw(one([8, 12, 24])),
        draw(one([1, 2, 3])),
        draw(one([None, 0, 1])),
    )
    each = range(z.layers)
    w = {
        x: [z.matrix(f"L.{i}.{x}_proj.weight", *shape) for i in each]
        for x, shape in {
            "q": (z.n * z.h, z.d),
            "k": (z.k * z.h, z.d),
            "v": (z.k * z.h, z.d),
            "o": (z.d, z.n * z.h),
            "gate": (z.f, z.d),
            "up": (z.f, z.d),
            "down": (z.d, z.f),
        }.items()
    }
    norms = [z.matrix(f"L.{i}.norm.weight", z.d) for i in each]
    fused_kv, fused_mlp = draw(st.booleans()), draw(st.booleans())
    for x, heads, axis in (("q", z.n, "n"), ("k", z.k, "k"), ("v", z.k, "k")):
        if x != "q" and fused_kv:
            continue
        axes, leaf = draw(one(attention(z, heads, axis)))
        right, tail = (
            (f"({axis} two r) d", " where two=2")
            if "two" in axes
            else (f"({axis} h) d", "")
        )
        z.add(x, f"{x}_proj.weight", axes, right, [leaf(m) for m in w[x]], tail)
    if fused_kv:
        both = zip(w["k"], w["v"], strict=True)
        pairs = [
            np.stack([m.reshape(z.k, z.h, z.d).transpose(0, 2, 1) for m in kv])
            for kv in both
        ]
        z.add("kv", "[k|v]_proj.weight", "[1|1] k d h", "(k h) d", pairs)
    ways: list[Way] = [
        ("n h d", lambda m: m.T.reshape(z.n, z.h, z.d)),
        ("d n h", lambda m: m.reshape(z.d, z.n, z.h)),
    ]
    axes, leaf = draw(one(ways))
    z.add("o", "o_proj.weight", axes, "d (n h)", [leaf(m) for m in w["o"]])
    if fused_mlp:
        z.add(
            "gu",
            "[gate|up]_proj.weight",
            "d [f|f]",
            "f d",
            [
                np.concatenate([g.T, u.T], axis=1)
                for g, u in zip(w["gate"], w["up"], strict=True)
            ],
        )
    for x in ("down",) if fused_mlp else ("gate", "up", "down"):
        out, into = ("d", "f") if x == "down" else ("f", "d")
        turned = draw(st.booleans())
        axes = f"{into} {out}" if turned else f"{out} {into}"
        z.add(
            x,
            f"{x}_proj.weight",
            axes,
            f"{out} {into}",
            [m.T if turned else m for m in w[x]],
        )
    z.add("norm", "norm.weight", "d", "d", [m - 1 for m in norms], " + 1")
    return z


def regions(z: Model, loader: Loader, tp: int) -> dict[str, np.ndarray]:
    """One rank's region table, as a tensor-parallel loader has it, and beside it what its parameters must hold."""
    r, all_, want = loader.rank, slice(None), {}
    tensors = {n: CheckpointTensor(n, a.shape, "float32") for n, a in z.tensors.items()}
    n, k, f = z.n // tp, max(z.k // tp, 1), z.f // tp
    # the first key head of this rank; with fewer heads than ranks, several ranks hold one
    kv = r * z.k // tp

    def load(
        name: str,
        shape: tuple[int, ...],
        parts: list[tuple[str, tuple[slice, ...], tuple[slice, ...]]],
    ) -> None:
        at, want[name] = (
            loader.parameter(name, shape),
            np.full(shape, -777.0, np.float32),
        )
        for tensor, src, dst in parts:
            loader.copy(tensors[tensor], src, at, dst)
            want[name][dst] = z.tensors[tensor][src]

    for i in range(z.layers):
        pre, h = f"L.{i}.", z.h
        q, kk, kvs = (
            slice(r * n * h, (r + 1) * n * h),
            slice(kv * h, (kv + k) * h),
            n * h,
        )
        load(
            pre + "qkv",
            ((n + 2 * k) * h, z.d),
            [
                (pre + "q_proj.weight", (q, all_), (slice(0, kvs), all_)),
                (pre + "k_proj.weight", (kk, all_), (slice(kvs, kvs + k * h), all_)),
                (
                    pre + "v_proj.weight",
                    (kk, all_),
                    (slice(kvs + k * h, kvs + 2 * k * h), all_),
                ),
            ],
        )
        load(
            pre + "o", (z.d, n * h), [(pre + "o_proj.weight", (all_, q), (all_, all_))]
        )
        part = slice(r * f, (r + 1) * f)
        load(
            pre + "gate_up",
            (2 * f, z.d),
            [
                (pre + "gate_proj.weight", (part, all_), (slice(0, f), all_)),
                (pre + "up_proj.weight", (part, all_), (slice(f, 2 * f), all_)),
            ],
        )
        load(
            pre + "down",
            (z.d, f),
            [(pre + "down_proj.weight", (all_, part), (all_, all_))],
        )
        load(pre + "norm", (z.d,), [(pre + "norm.weight", (all_,), (all_,))])
    return want


def shards(
    leaves: list[Leaf], values: dict[str, np.ndarray]
) -> dict[tuple[str, int], np.ndarray]:
    out = {}
    for leaf in leaves:
        for j, device in enumerate(leaf.devices.tolist()):
            box = tuple(
                slice(a, b) for a, b in zip(leaf.starts[j], leaf.stops[j], strict=True)
            )
            out[leaf.path, device] = np.ascontiguousarray(values[leaf.path][box])
    return out


def blank(plan: TransferPlan) -> dict[tuple[int, str], np.ndarray]:
    found = [
        (int(r), plan.parameters[p])
        for r, p in zip(plan.target_rank, plan.target_parameter, strict=True)
    ]
    return {(r, p.name): np.full(p.shape, -777.0, np.float32) for r, p in found}


@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    z=models(),
    mesh=st.sampled_from(MESHES),
    tp=st.sampled_from([1, 2, 4]),
    replicas=st.sampled_from([1, 3]),
    mode=st.sampled_from(["packed", "direct"]),
    bucket=st.sampled_from([64, 1 << 20]),
)
def test_rule_text_to_memory(
    z: Model, mesh: str, tp: int, replicas: int, mode: str, bucket: int
) -> None:
    config: dict[str, Any] = {
        "hidden_size": z.d,
        "num_attention_heads": z.n,
        "num_key_value_heads": z.k,
    }
    config["head_dim"] = z.h
    tensors = tuple(
        CheckpointTensor(n, a.shape, "float32") for n, a in z.tensors.items()
    )
    shapes = {p: LeafShape(a.shape, "float32") for p, a in z.leaves.items()}
    bindings = Rules.parse("\n".join(z.lines)).bind(shapes, list(tensors), config)
    leaves = leaves_of(shapes, mesh)
    loaders = [Loader(r) for r in range(tp)]
    want = {(x.rank, name): a for x in loaders for name, a in regions(z, x, tp).items()}
    layouts = [x.layout(tensors) for x in loaders]
    plan = compile_plan(
        leaves, bindings, layouts, replicas=replicas, bucket_mib=bucket / (1 << 20)
    )
    prove(plan, bindings, layouts)
    held = shards(leaves, z.leaves)
    for replica in range(replicas):
        got = blank(plan)
        execute(plan, held, got, mode=mode, replica=replica)
        assert set(got) == set(want)
        for key, dense in want.items():
            np.testing.assert_array_equal(
                got[key], dense, err_msg=f"{key} of replica {replica}"
            )

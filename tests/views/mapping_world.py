"""Mappings to look at, made without an engine: small and real, with a stand-in for the link, or with made-up rows."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec
from jvlab.sync._compile_tree import MappingRow, compile_tree
from jvlab.sync._connections import Agreement
from jvlab.sync._diff import Values, values_of
from jvlab.sync._link import Link
from jvlab.sync._mapping import Mapping
from jvlab.sync._meaning import RememberedParams
from tests.layout.plan_world import Size, World, transformer

RULES = """
embed -> model.embed_tokens.weight
layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> (n h) d
layers.{i}.[k|v] -> model.layers.{i}.[k|v]_proj.weight : d n h -> (n h) d
layers.{i}.o -> model.layers.{i}.o_proj.weight : n h d -> d (n h)
layers.{i}.norm -> model.layers.{i}.norm.weight + 1
layers.{i}.experts.[w1|w2|w3] -> model.layers.{i}.experts.{e}.[w1|w2|w3].weight : e a b -> b a
"""
Q_RULE = "layers.{i}.q -> model.layers.{i}.q_proj.weight : d n h -> (n h) d"
TENSORS_PER_LAYER = 14


def world(layers: int = 2, mesh: str = "fsdp=3,tp=2") -> World:
    made = World(MeshSpec.parse(mesh), 2, "bfloat16")
    return transformer(made, Size(layers=layers), layout="einsum", rotary=False)


def small_mapping(
    layers: int = 2, mesh: str = "fsdp=3,tp=2", made: World | None = None
) -> Mapping:
    """A transformer of 14 tensors a layer on two ranks, bound by RULES."""
    w = made or world(layers, mesh)
    tensors = list(w.tensors.values())
    return compile_tree(
        Mapping, w.values, {}, tensors, w.layouts, mesh=mesh, rules=RULES, title="tiny"
    )


def with_link(shift: float = 0.0) -> tuple[Mapping, Any, dict[str, np.ndarray]]:
    """A mapping whose engine is a stand-in that holds the trainer's numbers plus `shift`; the link and the numbers."""
    w = world(1, "fsdp=1")
    mapping = small_mapping(mesh="fsdp=1", made=w)
    held = w.dense_params()

    def peek(name: str, rank: int, replica: int = 0) -> bytes:
        info = next(p for p in mapping.plan.parameters if p.name == name)
        return (held[rank, name] + shift).astype(numpy_dtype(info.dtype)).tobytes()

    link = SimpleLink(
        mapping=mapping,
        meaning=None,
        plan=mapping.plan,
        pool=SimpleNamespace(peek=peek),
        closed=False,
        remembered=RememberedParams(),
    )
    mapping._link = weakref.ref(link)
    return mapping, link, w.values


def with_checkpoint(folder: Path) -> tuple[Mapping, Any, dict[str, np.ndarray]]:
    """A mapping with square queries, a stand-in for its link, and values that were loaded from files in `folder`."""
    from safetensors.numpy import save_file

    w = transformer(
        World(MeshSpec.parse("fsdp=1"), 2),
        Size(d=24, f=48),
        layout="einsum",
        rotary=False,
    )
    mapping = small_mapping(mesh="fsdp=1", made=w)
    save_file(
        {name: value.astype(np.float32) for name, value in w.dense_tensors().items()},
        folder / "a.safetensors",
    )
    agreed = Agreement(mapping.plan, mapping, "shm", "", b"", {})
    link = SimpleLink(
        mapping=mapping,
        meaning=None,
        plan=mapping.plan,
        pool=SimpleNamespace(model=folder),
        closed=False,
        remembered=RememberedParams(),
        _agreed=agreed,
    )
    link.remembered.take(w.values)
    mapping._link = weakref.ref(link)
    return mapping, link, w.values


class SimpleLink(SimpleNamespace):
    """What `mapping.values` and an edit need of a link."""

    meaning_of = Link.meaning_of

    def values(self, name: str, params: Any, replica: int, bins: int) -> list[Values]:
        return values_of(self, name, params, replica, bins)  # type: ignore[arg-type]

    __hash__ = object.__hash__  # type: ignore[assignment]


def many_rows(count: int) -> Mapping:
    """A mapping whose table has `count` made-up rows, as a very large mixture-of-experts model has."""
    mapping = small_mapping(1)
    kinds = ("direct", "cast", "staged")
    mapping.__dict__["rows"] = tuple(
        MappingRow(
            f"layers.{i // 800}.moe.experts.{i % 800}.gate.kernel",
            f"layers.{{i}}.moe.gate{i % 7} -> model.layers.{{i}}.mlp.experts.{{e}}.gate{i % 7}.weight : e a b -> b a",
            "declared by a rule",
            1.0,
            f"model.layers.{i // 800}.mlp.experts.{i % 800}.gate_proj.weight",
            f"model.layers.{i // 800}.mlp.experts.w13_weight",
            (i % 8, i % 8 + 1),
            "float32",
            "bfloat16",
            14_680_064 + 4096 * (i % 97),
            kinds[i % 3],
        )
        for i in range(count)
    )
    return mapping

"""A small model in a quantised engine, described by hand: stacked leaves, fused q, k, v, padding, experts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab.layout._compile import compile_plan
from jvlab.layout._formats import expand_formats
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec, leaf_from_spec
from jvlab.layout._types import (
    Axis,
    Binding,
    CheckpointTensor,
    Format,
    Leaf,
    Note,
    Parameter,
    RankLayout,
)
from jvlab.sync._pack import LinkPack, Source

LAYERS, IN, OUT, EXPERTS, WIDTH = 2, 8, 4, 4, 6
FP8 = "float8_e4m3fn"
BF16 = ml_dtypes.bfloat16


@dataclass
class Engine:
    """The tables of one rank, as tracing reports them."""

    tensors: list[CheckpointTensor] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    formats: list[Format] = field(default_factory=list)
    padding: list[Note] = field(default_factory=list)

    def fill(
        self,
        parameter: int,
        tensor: str,
        shape: tuple[int, int],
        at: int,
        strides: tuple[int, int],
    ) -> None:
        self.tensors.append(CheckpointTensor(tensor, shape, "float32"))
        self.rows.append(
            (len(self.tensors) - 1, parameter, shape, 0, (shape[1], 1), at, strides)
        )

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        scales: int,
        padding: int = 0,
    ) -> int:
        """A quantised parameter; its scales are added by `layout`."""
        self.parameters.append(Parameter(name, shape, FP8, strides))
        block = int(np.prod(shape)) // scales
        self.formats.append(Format(name, f"{name}_scale", "bfloat16", block, "fp8"))
        if padding:
            self.padding.append(Note(name, "zeros", padding, "constant"))
        return len(self.parameters) - 1

    def layout(self) -> RankLayout:
        parameters, padding = [*self.parameters], [*self.padding]
        sizes = {p.name: int(np.prod(p.shape)) for p in self.parameters}
        for f in self.formats:
            count = sizes[f.parameter] // f.block
            parameters.append(Parameter(f.scale, (count,), "float32", (1,)))
            padding.append(Note(f.scale, "computed", count, "scale"))

        def column(k: int, kind: type[np.integer[Any]] = np.int64) -> np.ndarray:
            return np.array([r[k] for r in self.rows], kind)

        return RankLayout(
            0,
            (("tp", 0),),
            tuple(self.tensors),
            tuple(parameters),
            column(0, np.int32),
            column(1, np.int32),
            *(column(k) for k in (2, 3, 4, 5, 6)),
            padding=tuple(padding),
            formats=tuple(self.formats),
        )


def engine() -> RankLayout:
    made = Engine()
    for n in range(LAYERS):
        qkv = made.add(f"{n}.qkv", (IN, 3 * OUT), (1, IN), 1)
        for i, part in enumerate("qkv"):
            made.fill(qkv, f"{n}.{part}", (OUT, IN), i * OUT * IN, (IN, 1))
        down = made.add(f"{n}.down", (16, OUT), (1, 16), 1, padding=(16 - WIDTH) * OUT)
        made.fill(down, f"{n}.down", (OUT, WIDTH), 0, (16, 1))
        experts = made.add(f"{n}.w13", (EXPERTS, 4, 5), (20, 5, 1), EXPERTS)
        for e in range(EXPERTS):
            for i, part in enumerate(("gate", "up")):
                made.fill(experts, f"{n}.{e}.{part}", (2, 5), e * 20 + i * 10, (5, 1))
        norm = len(made.parameters)
        made.parameters.append(Parameter(f"{n}.norm", (IN, 1), "bfloat16", (1, 1)))
        made.fill(norm, f"{n}.norm", (IN, 1), 0, (1, 1))
    return made.layout()


SHAPES = {
    **dict.fromkeys("qkv", (LAYERS, IN, OUT)),
    "down": (LAYERS, WIDTH, OUT),
    "norm": (LAYERS, IN, 1),
    **dict.fromkeys(("gate", "up"), (LAYERS, EXPERTS, 5, 2)),
}


def bindings() -> list[Binding]:
    """Matrices are transposed, as Flax kernels are; layers and experts are stacked."""
    out = []
    for leaf, shape in SHAPES.items():
        lead = shape[:-2]
        for index in np.ndindex(*lead):
            name = ".".join(map(str, [*index, leaf]))
            at = len(lead)
            turned = leaf != "norm"
            axes = (
                Axis(shape[-2], at, 1, int(turned), 1),
                Axis(shape[-1], at + 1, 1, 1 - int(turned), 1),
            )
            to = shape[-2:][::-1] if turned else shape[-2:]
            out.append(Binding(leaf, name, shape, to, (*index, 0, 0), (0, 0), axes))
    return out


def leaves(dtype: str, mesh: str = "fsdp=1") -> list[Leaf]:
    return [
        leaf_from_spec(path, shape, dtype, MeshSpec.parse(mesh))
        for path, shape in SHAPES.items()
    ]


def plan_of(
    dtype: str, mesh: str = "fsdp=1", rules: list[Binding] | None = None
) -> TransferPlan:
    sent, bound, layouts, quantised = expand_formats(
        leaves(dtype, mesh), rules or bindings(), [engine()]
    )
    return replace(
        compile_plan(sent, bound, layouts, bucket_mib=0.001), quantised=quantised
    )


def memory(plan: TransferPlan, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the engine holds after these arrays were packed and written: its storage by parameter; untouched is 0."""
    source, out = Source.of_arrays(plan, arrays), {}
    for device in plan.devices.tolist():
        pack = LinkPack(plan, device, 0, 0)
        for bucket, boxes in enumerate(pack.buckets):
            for (_, box), values in zip(
                boxes, pack.values(bucket, source), strict=True
            ):
                info = plan.parameters[plan.target_parameter[box.target]]
                if info.name not in out:
                    out[info.name] = np.zeros(
                        int(np.prod(info.shape)), numpy_dtype(info.dtype)
                    )
                storage = out[info.name]
                steps = [s * storage.itemsize for s in box.dst_strides]
                as_strided(storage[box.dst_offset :], box.shape, steps)[...] = values
    return out

"""A trainer made of numpy: Flax-like kernels (in × out) on a mesh, a plan for traced ranks, buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jvlab.layout._compile import compile_plan
from jvlab.layout._digest import MASK, box_digest, row_elements
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype, source_order
from jvlab.layout._tree import MeshSpec, leaf_from_spec
from jvlab.layout._types import Axis, Binding, RankLayout
from jvlab.transport._peer import Header, Sender
from tests.layout.plan_interpreter import execute, pack_bucket

Values = dict[str, np.ndarray]  # by checkpoint name, in the checkpoint's own layout


def checkpoint(folder: str) -> Values:
    """Every tensor of a safetensors checkpoint."""
    from safetensors.numpy import load_file

    return {
        k: v
        for file in sorted(Path(folder).glob("*.safetensors"))
        for k, v in load_file(file).items()
    }


@dataclass
class FakeTrainer:
    """Leaves are named like checkpoint tensors; matrices lie transposed, cut over the mesh."""

    plan: TransferPlan

    @classmethod
    def of(
        cls,
        layouts: Sequence[RankLayout],
        mesh: str = "fsdp=2",
        bucket_mib: float = 0.25,
    ) -> FakeTrainer:
        used = {x.tensors[i].name for x in layouts for i in set(x.tensor.tolist())}
        used |= {note.name for x in layouts for note in x.opaque}
        leaves, bindings = [], []
        for t in layouts[0].tensors:
            if t.name not in used:
                continue
            turned = len(t.shape) == 2
            shape = t.shape[::-1] if turned else t.shape
            leaves.append(leaf_from_spec(t.name, shape, t.dtype, MeshSpec.parse(mesh)))
            axes = tuple(
                Axis(n, len(t.shape) - 1 - d if turned else d, 1, d, 1)
                for d, n in enumerate(t.shape)
            )
            zero = (0,) * len(shape)
            bindings.append(Binding(t.name, t.name, shape, t.shape, zero, zero, axes))
        return cls(compile_plan(leaves, bindings, layouts, bucket_mib=bucket_mib))

    def shards(self, values: Values) -> dict[tuple[str, int], np.ndarray]:
        out = {}
        for leaf in self.plan.leaves:
            whole = (
                values[leaf.path].T
                if values[leaf.path].ndim == 2
                else values[leaf.path]
            )
            sharding = self.plan.shardings[leaf.sharding]
            for device in self.plan.devices.tolist():
                cell = sharding.cell_of(device)
                if cell >= 0:
                    box = tuple(map(slice, sharding.starts[cell], sharding.stops[cell]))
                    out[leaf.path, device] = np.ascontiguousarray(whole[box])
        return out

    def memory(self, values: Values) -> dict[tuple[int, str], np.ndarray]:
        """What every rank must hold, by the loopback interpreter; what nothing fills is 0."""
        plan = self.plan
        params = {
            (int(r), plan.parameters[p].name): np.zeros(
                plan.parameters[p].shape, numpy_dtype(plan.parameters[p].dtype)
            )
            for r, p in zip(plan.target_rank, plan.target_parameter, strict=True)
        }
        execute(plan, self.shards(values), params, mode="direct")
        return params

    def digests(self, values: Values) -> dict[tuple[str, int], int]:
        """(parameter, rank) → digest of the elements that the plan writes."""
        memory, out = self.memory(values), {}
        for device, rank in zip(
            self.plan.links().device.tolist(),
            self.plan.links().rank.tolist(),
            strict=True,
        ):
            link = self.plan.link(device, rank)
            for i in range(len(link)):
                info = self.plan.parameters[self.plan.target_parameter[link.target[i]]]
                flat = memory[rank, info.name].reshape(-1)
                steps = [int(s) * flat.itemsize for s in link.dst_strides[i]]
                view = np.lib.stride_tricks.as_strided(
                    flat[int(link.dst_offset[i]) :], link.shape[i].tolist(), steps
                )
                row = row_elements(info.shape, info.strides)
                part = box_digest(
                    view, int(link.dst_offset[i]), link.dst_strides[i].tolist(), row
                )
                out[info.name, rank] = (out.get((info.name, rank), 0) + part) & MASK
        return out

    def send(
        self,
        senders: Sequence[Sender],
        values: Values,
        version: int,
        deadline: float = 20.0,
        between: Callable[[int], None] = lambda number: None,
    ) -> int:
        """Every bucket of every device to every rank, devices in turn; the bytes. `between` is called before each."""
        shards, moved, number = self.shards(values), 0, 0
        for rank, sender in enumerate(senders):
            links = [
                source_order(self.plan.link(d, rank))
                for d in self.plan.devices.tolist()
            ]
            for bucket in range(max(len(link.bucket_sizes) for link in links)):
                for link in links:
                    if bucket >= len(link.bucket_sizes):
                        continue
                    between(number)
                    data = pack_bucket(self.plan, link, bucket, shards)

                    def fill(room: memoryview, data: bytearray = data) -> None:
                        room[:] = data

                    sender.send(
                        Header(version, link.device, bucket, len(data)), fill, deadline
                    )
                    moved, number = moved + len(data), number + 1
        for sender in senders:
            sender.flush(deadline)
        return moved

"""Run as a program: one process of a trainer of several. Takes orders as JSON lines, answers each with one.

team_script.py jax|torch PROCESS PROCESSES PORT ADDRESS TOKEN POOL
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jvlab as jv

KIND, PROCESS, PROCESSES, PORT = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
    int(sys.argv[4]),
)


def start() -> None:
    if KIND == "jax":
        import jax

        jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)
    else:
        import torch.distributed

        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{PORT}",
            rank=PROCESS,
            world_size=PROCESSES,
        )


def jax_tree(model: str) -> dict[str, Any]:
    """A checkpoint over all devices of all processes; of each leaf, this process makes its own shards only."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from safetensors.numpy import load_file

    from jvlab.layout._tree import MeshSpec, default_spec

    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    tree = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        for name, value in load_file(file).items():
            sharding = NamedSharding(
                mesh, PartitionSpec(*default_spec(value.shape, MeshSpec.of(mesh)))
            )
            tree[name] = jax.make_array_from_callback(
                value.shape, sharding, lambda index, v=value: v[index]
            )
    return tree


def torch_tree(model: str) -> dict[str, Any]:
    """The state dict of a module under FSDP2, with float32 masters."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Module()
    for file in sorted(Path(model).glob("*.safetensors")):
        for name, value in load_file(file).items():
            *path, last = name.split(".")
            inner = module
            for part in path:
                if not hasattr(inner, part):
                    inner.add_module(part, torch.nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, torch.nn.Parameter(value.float()))
    fully_shard(module, mesh=init_device_mesh("cpu", (PROCESSES,)))
    return module.state_dict()


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trainer:
    """What the orders work on."""

    def __init__(self, address: str, token: str, pool: str) -> None:
        self.lab = jv.Lab.attach(address, token)
        self.pool = self.lab.pools[pool]
        self.trees: dict[str, Any] = {}
        self.link: Any = None

    def tree(self, model: str) -> Any:
        if model not in self.trees:
            self.trees[model] = jax_tree(model) if KIND == "jax" else torch_tree(model)
        return self.trees[model]

    def connect(self, model: str, dies: int = -1, **options: Any) -> dict[str, Any]:
        faults = jv.transport.Faults(hook=(1, die)).wrap if dies == PROCESS else None
        self.link = self.lab.connect(
            self.tree(model), self.pool, bucket_mib=0.05, faults=faults, **options
        )
        plan = self.link.plan
        return {
            "version": self.link.version,
            "plan": plan.digest,
            "transport": self.link.transport,
            "processes": sorted({int(p) for p in plan.processes}),
            "rules": str(self.link.mapping),
        }

    def sync(self, model: str, **options: Any) -> dict[str, Any]:
        report = self.link.sync(self.tree(model), **options)
        return {
            "version": report.version,
            "verified": report.verified,
            "bytes": report.bytes,
            "digests": sorted([*key, value] for key, value in report.digests.items()),
        }

    def verify(self, model: str | None = None) -> dict[str, Any]:
        report = self.link.verify(None if model is None else self.tree(model))
        return {"ok": report.ok, "version": report.version}

    def refuse(self, model: str) -> dict[str, Any]:
        """What one process can't do for all of them."""
        said = []
        for call in (
            lambda: self.link.stepper(self.tree(model)),
            lambda: self.link.diff("x", self.tree(model)),
        ):
            try:
                call()
            except jv.errors.Unsupported as error:
                said.append(error.remedy)
        return {"said": said}

    def close(self) -> dict[str, Any]:
        self.link.close()
        return {}


def main() -> None:
    # who waits too long for this process asks it where it is
    faulthandler.register(signal.SIGUSR1)
    start()
    trainer = Trainer(*sys.argv[5:8])
    print(json.dumps({"ready": PROCESS}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(trainer, order.pop("do"))(**order)
        except jv.JvlabError as error:
            answer = {
                "error": type(error).__name__,
                "message": error.message,
                "remedy": error.remedy,
            }
        print(json.dumps(answer), flush=True)
    trainer.lab._leave()
    os._exit(0)  # jax would wait here for a process that was killed


main()

"""Trainer and rank processes on one GPU for tests of nccl and nixl; each has a host id of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "layout"))

from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec
from tests.layout.plan_world import Size, World, cut_leaf, transformer

ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
SMALL = Size(d=48, n=6, k=6, h=10, f=96, vocab=203, layers=2, experts=2)
# about 0.5 GB in bfloat16, all of it in a few large leaves
LARGE = Size(d=2048, n=16, k=8, h=128, f=6144, vocab=32000, layers=4, experts=1)
STUCK = 40.0  # seconds after which a process of the team says where it stands


class Described(World):
    """A world of leaves without values: they are made on the GPU."""

    def leaf(
        self,
        path: str,
        shape: tuple[int, ...],
        spec: Any = None,
        dtype: str = "float32",
    ) -> Any:
        leaf = cut_leaf(path, shape, "bfloat16", self.mesh, spec)
        self.leaves.append(leaf)
        self.values[path] = np.zeros(0)
        return leaf


def small(devices: int, ranks: int) -> tuple[World, TransferPlan]:
    """float32 masters in Flax layout on `devices`, bfloat16 on `ranks`; the same in every process."""
    world = World(MeshSpec.parse(f"fsdp={devices}"), ranks, dtype="bfloat16")
    transformer(world, SMALL, layout="dense", rotary=True)
    rng = np.random.default_rng(5)
    for leaf in world.leaves:
        world.values[leaf.path] = rng.standard_normal(leaf.shape).astype(np.float32)
    return world, plan_of(world, devices, 8 / 1024)


def large(devices: int, ranks: int) -> tuple[World, TransferPlan]:
    """About 0.5 GB, bfloat16 on both sides, transposed on its way."""
    world = Described(MeshSpec.parse(f"fsdp={devices}"), ranks, dtype="bfloat16")
    transformer(world, LARGE, layout="dense", rotary=False)
    return world, plan_of(world, devices, 64)


def many(devices: int, ranks: int) -> tuple[World, TransferPlan]:
    """The same in hundreds of small buckets: nobody is done when something happens in the first few."""
    world, _ = large(devices, ranks)
    return world, plan_of(world, devices, 1)


def plan_of(world: World, devices: int, bucket_mib: float) -> TransferPlan:
    return compile_plan(
        world.leaves,
        world.bindings,
        world.layouts,
        bucket_mib=bucket_mib,
        device_process={d: d for d in range(devices)},
    )


class Shards:
    """What one trainer process holds: its device's shards, on its GPU."""

    def __init__(self, world: World, device: int, version: int) -> None:
        import jax

        self._arrays: dict[str, Any] = {}
        # Finite bit patterns, tiled by numpy: JAX would compile a program for each shape.
        base = np.random.default_rng(100 * version + device).integers(
            0, 0x3FFF, 1 << 22, np.uint16
        )
        for number, leaf in enumerate(world.leaves):
            at = leaf.devices.tolist().index(device)
            start, stop = leaf.starts[at], leaf.stops[at]
            if world.values[leaf.path].size:
                box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
                value = np.ascontiguousarray(world.values[leaf.path][box]) + np.float32(
                    version - 1
                )
                self._arrays[leaf.path] = jax.device_put(value, jax.devices("gpu")[0])
            else:
                shape = tuple((stop - start).tolist())
                bits = np.resize(base[number:], int(np.prod(shape)))
                value = bits.view(numpy_dtype("bfloat16")).reshape(shape)
                self._arrays[leaf.path] = jax.device_put(value, jax.devices("gpu")[0])
        jax.block_until_ready(list(self._arrays.values()))

    def shard(self, path: str, device: int) -> Any:
        return self._arrays[path]


class Trainer:
    """One process of a trainer: one device of the plan."""

    def __init__(self) -> None:
        self.senders: Any = None

    def listen(
        self,
        which: str,
        devices: int,
        ranks: int,
        me: int,
        kill: tuple[int, int] | None = None,
        wire: str = "nccl",
    ) -> Any:
        """Endpoints by rank. `kill`: (bucket, pid), a process that is killed when that bucket's turn comes."""
        from jvlab.sync._device_pack import DevicePack
        from jvlab.sync._senders import BucketSenders
        from jvlab.transport import Faults, listen

        self.world, self.plan = {"small": small, "large": large, "many": many}[which](
            devices, ranks
        )
        self.me = me
        faults = (
            Faults(hook=(kill[0], lambda _: os.kill(kill[1], signal.SIGKILL)))
            if kill
            else None
        )

        def make(room: int, replica: str, rank: int) -> Any:
            sender = listen(
                wire,
                slot_bytes=room,
                slots=3,
                on_gpu=True,
                peer=f"rank {rank}",
                label=f"trainer {me}",
            )
            return faults.wrap(sender) if faults and rank == ranks - 1 else sender

        pack: Any = functools.partial(DevicePack, ordinal=0)
        self.senders = BucketSenders(self.plan, {"r0": 0}, make, pack, process=me)
        return [channel.sender.endpoint() for channel in self.senders.channels]

    def ready(self, seconds: float) -> None:
        self.senders.ready(seconds)

    def send(self, version: int, seconds: float, digest: bool = True) -> Any:
        source = Shards(self.world, self.me, version)
        start = time.perf_counter()
        sent = self.senders.send_all(source, version, seconds, digest)
        return {
            "bytes": sent.bytes,
            "seconds": sent.seconds,
            "digests": sent.digests,
            "total": time.perf_counter() - start,
        }

    def close(self) -> None:
        if self.senders is not None:
            self.senders.close()

    def bare_id(self) -> bytes:
        from jvlab.transport._nccl import CudaGpu

        self.gpu = CudaGpu()
        return self.gpu.unique_id()

    def bare(self, identity: bytes, sizes: Sequence[int]) -> float:
        return bare(identity, 0, sizes)

    def bare_end(self) -> None:
        bare_end()


def bare(identity: bytes, rank: int, sizes: Sequence[int]) -> float:
    """NCCL alone: messages of these sizes one after the other, from one buffer into one buffer; seconds."""
    from jvlab.transport._nccl import CudaGpu

    gpu = CudaGpu()
    pair, stream, memory = (
        gpu.pair(identity, rank),
        gpu.stream(),
        gpu.allocate(max(sizes)),
    )

    def wait() -> None:
        while not pair.ready():
            pass

    wait()
    move = pair.send if rank == 0 else pair.recv
    move(memory.ptr, sizes[0], stream.ptr)
    wait()
    stream.synchronize()
    start = time.perf_counter()
    for size in sizes:
        move(memory.ptr, size, stream.ptr)
        wait()
    stream.synchronize()
    took = time.perf_counter() - start
    # a sender that ended now would take the last bytes with it, which are still in its buffers
    BARE.append(pair)
    return took


BARE: list[Any] = []


def bare_end() -> None:
    """Once both sides have their time."""
    while BARE:
        BARE.pop().abort()


class Rank:
    """One rank: blank parameters of the plan, received, digested and exchanged as in a vLLM worker, without vLLM."""

    def __init__(self) -> None:
        self.receivers: Any = None

    def open(
        self,
        which: str,
        devices: int,
        ranks: int,
        me: int,
        endpoints: list[Any],
        seconds: float,
    ) -> None:
        import torch

        from jvlab.engine.worker._rank_sync import DeviceDigest
        from jvlab.engine.worker._receivers import Ledger, Receivers, ReceivingChannel
        from jvlab.layout._plan_types import source_order
        from jvlab.transport import open_receiver

        _, plan = {"small": small, "large": large, "many": many}[which](devices, ranks)
        table = plan.links(0)
        mine = sorted(table.device[table.rank == me].tolist())
        links = [source_order(plan.link(d, me, 0)) for d in mine]
        ledger = Ledger(links)
        self.live: dict[int, Any] = {}
        for t in sorted(ledger.boxes):
            info = plan.parameters[int(plan.target_parameter[t])]
            self.live[t] = torch.full(info.shape, -777.0, device="cuda").to(
                getattr(torch, info.dtype)
            )
        self.names = {
            t: plan.parameters[int(plan.target_parameter[t])].name for t in self.live
        }
        self.room, self.found, self.digest = self.live, {}, DeviceDigest(plan, links, 0)
        torch.cuda.synchronize()
        end = time.monotonic() + seconds
        channels: list[ReceivingChannel] = []
        try:
            for d in mine:
                receiver = open_receiver(
                    endpoints[d], end - time.monotonic(), label=f"rank {me}"
                )
                channels.append(ReceivingChannel(receiver, (d,), d))
        except BaseException:
            for channel in channels:
                channel.receiver.close()
            raise
        self.receivers = Receivers(
            channels, ledger, self._scatter, self._finish, lambda: None
        )

    def half_open(self, endpoint: dict[str, Any]) -> None:
        """Shake hands as a rank does, and go no further."""
        import json
        import socket

        from jvlab.transport._peer import Clock, Peer
        from jvlab.transport._slots import HELLO, FramedSocket

        self.framed = FramedSocket(
            socket.create_connection((endpoint["host"], endpoint["port"])),
            "nccl",
            "trainer",
        )
        self.framed.put(
            HELLO,
            json.dumps(
                {"token": endpoint["token"], "peer": Peer.me("rank").values()}
            ).encode(),
        )
        self.framed.get(Clock(10.0), "welcome us")

    def _scatter(self, box: Any, data: Any) -> None:
        from jvlab.engine.worker._live_memory import flat, scatter

        scatter(box, data, flat(self.room[box.target]))

    def _finish(self, number: int) -> None:
        if self.verify:
            self.found[number] = self.digest(number, self.room[number])

    def move(
        self, version: int, mode: str, seconds: float, verify: bool = True
    ) -> None:
        import torch

        self.verify, self.found = verify, {}
        self.room = (
            self.live
            if mode == "direct"
            else {t: torch.clone(v) for t, v in self.live.items()}
        )
        torch.cuda.synchronize()
        self.receivers.start(version, seconds)

    def finish(self, seconds: float) -> dict[int, int]:
        end = time.monotonic() + seconds
        while not self.receivers.done:
            assert time.monotonic() < end, "not complete"
            time.sleep(0.0005)
        if self.receivers.error is not None:
            raise self.receivers.error
        return self.found

    def commit(self) -> None:
        import torch

        if self.room is not self.live:
            for t, value in self.live.items():
                value.copy_(self.room[t])
            torch.cuda.synchronize()

    def memory(self) -> dict[str, str]:
        import torch

        hashed = lambda t: hashlib.sha256(
            t.contiguous().view(torch.int16).cpu().numpy().tobytes()
        ).hexdigest()
        return {self.names[t]: hashed(value) for t, value in self.live.items()}

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.live.values()]

    def standing(self) -> dict[str, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        threads, files = (
            len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")
        )
        return {"threads": threads, "files": files, "used": total - free}

    def close(self) -> None:
        if self.receivers is not None:
            ended = self.receivers.stop(10)
            self.receivers.close()
            assert ended, "a receive thread did not end"

    def bare(self, identity: bytes, sizes: Sequence[int]) -> float:
        return bare(identity, 1, sizes)

    def bare_end(self) -> None:
        bare_end()


def wanted(world: World, plan: TransferPlan, rank: int, version: int) -> dict[str, str]:
    """What each parameter of a rank must hold, by the loopback interpreter."""
    from tests.layout.plan_interpreter import execute

    world.values = {
        path: value + np.float32(version - 1) for path, value in world.values.items()
    }
    params = {
        (int(r), plan.parameters[p].name): np.full(
            plan.parameters[p].shape, -777.0
        ).astype(numpy_dtype(plan.parameters[p].dtype))
        for r, p in zip(plan.target_rank, plan.target_parameter, strict=True)
    }
    execute(plan, world.shards(), params, mode="direct")
    return {
        name: hashlib.sha256(v.tobytes()).hexdigest()
        for (r, name), v in params.items()
        if r == rank
    }


def serve(pipe: Any, kind: str, host_id: str) -> None:
    os.environ.update(
        {**ONE_GPU, "NCCL_HOSTID": host_id, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    )
    end = Trainer() if kind == "trainer" else Rank()
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
        if kind == "trainer":
            import jax

            jax.devices("gpu")
        else:
            import torch

            torch.zeros(1, device="cuda")
        pipe.send(("ok", os.getpid()))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
        return
    while (order := pipe.recv()) is not None:
        faulthandler.dump_traceback_later(STUCK)
        try:
            pipe.send(("ok", getattr(end, order[0])(*order[1:])))
        except Exception as error:
            kind_, reason = (
                type(error).__name__,
                getattr(error, "fields", {}).get("reason", ""),
            )
            pipe.send(
                ("error", f"{kind_}[{reason}]: {error}\n{traceback.format_exc()}")
            )
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(Exception):
        end.close()


class Member:
    """A process of the team. `start` asks, `wait` takes the answer."""

    def __init__(self, kind: str, host_id: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(theirs, kind, host_id), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pid = self.process.pid or 0
        self._owed = 1  # answers; the first says that it is up

    @property
    def fit(self) -> bool:
        """It lives, and owes no answer of a test that failed in the middle."""
        return self.process.is_alive() and self._owed == 0

    def start(self, *order: Any) -> Member:
        self.pipe.send(order)
        self._owed += 1
        return self

    def answer(self, seconds: float = 60) -> tuple[str, Any]:
        assert self.pipe.poll(seconds), "a process of the team does not answer"
        said = self.pipe.recv()
        self._owed -= 1
        return said

    def wait(self, seconds: float = 60) -> Any:
        kind, what = self.answer(seconds)
        if kind == "error":
            raise RuntimeError(what)
        return what

    def __call__(self, *order: Any) -> Any:
        return self.start(*order).wait()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)

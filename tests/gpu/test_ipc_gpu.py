"""The ipc transport on one GPU: JAX here, torch's memory in another process; plans, casts, staged, fences, endings."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "layout"))

from jvlab._errors import DeadlineExceeded, SyncError, TransportError, Unsupported
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import MeshSpec
from tests.layout.plan_interpreter import execute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


# ---- the other process: a rank ---------------------------------------------------------------------------------------


class Rank:
    """What a vLLM worker does in a sync, with blank parameters of a plan."""

    def __init__(self, plan_bytes: bytes, kind: str) -> None:
        import torch

        from jvlab.engine.worker._ipc_rank import IpcExport

        self.torch, self.plan = torch, TransferPlan.from_bytes(plan_bytes)
        self.params = {}
        for t in range(len(self.plan.target_parameter)):
            info = self.plan.parameters[int(self.plan.target_parameter[t])]
            blank = torch.full(info.shape, -777.0, device=kind).to(
                getattr(torch, info.dtype)
            )
            self.params[t] = blank
        torch.cuda.synchronize()
        self.side = IpcExport(self.plan, 0, 0, dict(self.params))

    def call(self, name: str, *args: Any) -> Any:
        return (
            getattr(self, name)(*args)
            if hasattr(Rank, name)
            else getattr(self.side, name)(*args)
        )

    def memory(self, staged: bool) -> dict[int, bytes]:
        tensors = self.side._memory(staged)
        view = lambda t: (
            t.contiguous()
            .view(getattr(self.torch, BITS[t.element_size()]))
            .cpu()
            .numpy()
            .tobytes()
        )
        return {t: view(tensor) for t, tensor in tensors.items()}

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.params.values()]

    def used(self) -> int:
        free, total = self.torch.cuda.mem_get_info()
        return total - free

    def expandable(self) -> str:
        """What the export of memory that is mapped piecewise says."""
        import torch

        from jvlab.transport._ipc_memory import Exports

        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        try:
            Exports(0).add(held.data_ptr(), held.nbytes, "held")
        except Unsupported as error:
            return error.remedy
        return "exported"


def serve(pipe: Any) -> None:
    rank: Rank | None = None
    while (order := pipe.recv()) is not None:
        try:
            if order[0] == "begin":
                rank = None
                rank = Rank(*order[1:])
                pipe.send(("ok", None))
            else:
                assert rank is not None
                pipe.send(("ok", rank.call(*order)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


class Other:
    """A rank in another process, asked over a pipe. A later test takes over the process of one that ended well."""

    # (process, pipe): starting one takes seconds
    idle: ClassVar[list[tuple[Any, Any]]] = []

    def __init__(
        self, plan: TransferPlan, kind: str = "cuda", fresh: bool = False
    ) -> None:
        self.process, self.pipe = (
            self.start() if fresh or not self.idle else self.idle.pop()
        )
        self._fresh, self._owed = fresh, 0
        try:
            self("begin", plan.to_bytes(), kind)
        except BaseException:
            self.end()
            raise

    @staticmethod
    def start() -> tuple[Any, Any]:
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, pipe

    def __call__(self, *order: Any) -> Any:
        self._owed += 1
        self.pipe.send(order)
        assert self.pipe.poll(60), "the rank does not answer"
        kind, what = self.pipe.recv()
        self._owed -= 1
        if kind == "error":
            raise RuntimeError(what)
        return what

    def end(self) -> None:
        if self.process.is_alive() and self._owed == 0 and not self._fresh:
            self.idle.append((self.process, self.pipe))
            return
        end(self.process, self.pipe)


def end(process: Any, pipe: Any) -> None:
    with contextlib.suppress(OSError):
        pipe.send(None)
    process.join(5)
    if process.is_alive():
        process.kill()
    process.join(10)


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    while Other.idle:
        end(*Other.idle.pop())


# ---- worlds ----------------------------------------------------------------------------------------------------------


def world_of(layout: str, source: str, wire: str) -> tuple[Any, TransferPlan]:
    from tests.layout.plan_world import Size, World, transformer

    world = World(MeshSpec.parse("fsdp=1"), 1, dtype=wire)
    transformer(
        world,
        Size(d=136, n=4, k=2, h=18, f=200, vocab=203, layers=2),
        layout=layout,
        rotary=layout != "fused",
    )
    rng = np.random.default_rng(5)
    for k, leaf in enumerate(world.leaves):
        world.values[leaf.path] = rng.standard_normal(leaf.shape).astype(
            numpy_dtype(source)
        )
        world.leaves[k] = type(leaf)(
            leaf.path, leaf.shape, source, leaf.devices, leaf.starts, leaf.stops
        )
    return world, compile_plan(world.leaves, world.bindings, world.layouts)


def on_gpu(world: Any) -> dict[str, Any]:
    import jax

    return {
        path: jax.device_put(value, jax.devices("gpu")[0])
        for path, value in world.values.items()
    }


def wanted(world: Any, plan: TransferPlan) -> dict[int, bytes]:
    params = world.blank_params(plan)
    execute(plan, world.shards(), params, mode="direct")
    names = [plan.parameters[int(p)].name for p in plan.target_parameter]
    return {t: params[0, name].tobytes() for t, name in enumerate(names)}


@pytest.fixture
def pair() -> Iterator[tuple[Any, TransferPlan, Other, Any]]:
    from jvlab.sync._ipc_senders import IpcSenders

    world, plan = world_of("dense", "float32", "bfloat16")
    other, senders = Other(plan), IpcSenders(plan, {"r0": 0})
    senders.attach({"r0": [other("export", False)]})
    yield world, plan, other, senders
    senders.close()
    other.end()


def source_of(plan: TransferPlan, arrays: dict[str, Any]) -> Any:
    from jvlab.sync._pack import Source

    return Source(plan, arrays)


@pytest.mark.parametrize(
    ("layout", "source", "wire"),
    [
        *(
            (layout, "float32", "bfloat16")
            for layout in ("einsum", "dense", "checkpoint", "scanned", "fused")
        ),
        ("dense", "bfloat16", "bfloat16"),
        ("einsum", "float32", "float16"),
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_direct_is_bit_exact(
    layout: str, source: str, wire: str, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jvlab.sync import _ipc_lanes
    from jvlab.sync._ipc_senders import IpcSenders

    if parts:  # as large models are sent: a few leaves first
        monkeypatch.setattr(_ipc_lanes, "SPLIT_BYTES", 0)
        monkeypatch.setattr(_ipc_lanes, "FIRST_LEAVES", 2)
    world, plan = world_of(layout, source, wire)
    other, senders = Other(plan), IpcSenders(plan, {"r0": 0})
    try:
        senders.attach({"r0": [other("export", False)]})
        senders.ready(10)
        before = other("addresses")
        other("admit", 1)
        parameters = source_of(plan, on_gpu(world))
        sent = senders.send_all(parameters, 1, 30.0)
        other("revoke")
        assert other("memory", False) == wanted(world, plan)
        assert other("digests") == sent.digests == senders.digests(parameters)
        assert other("addresses") == before
        assert sent.bytes == senders.total_bytes == plan.total_bytes
    finally:
        senders.close()
        other.end()


def test_staged_leaves_live_memory_alone_until_the_swap(pair: Any) -> None:
    world, plan, other, senders = pair
    live, addresses = other("memory", False), other("addresses")
    senders.attach({"r0": [other("export", True)]})
    senders.staged = True
    other("admit", 1)
    sent = senders.send_all(source_of(plan, on_gpu(world)), 1, 30.0)
    other("revoke")
    assert other("digests", True) == sent.digests
    assert other("memory", False) == live
    other("swap")
    assert other("memory", False) == wanted(world, plan)
    assert other("digests", False) == sent.digests
    assert other("addresses") == addresses


def test_shadows_are_given_back_and_made_anew(pair: Any) -> None:
    world, plan, other, senders = pair
    senders.staged = True
    for version in (1, 2):
        senders.attach({"r0": [other("export", True)]})
        other("admit", version)
        sent = senders.send_all(source_of(plan, on_gpu(world)), version, 30.0)
        other("revoke")
        assert other("digests", True) == sent.digests
        other("swap")
        senders.release_shadows()
        other("release_shadows")
        with pytest.raises(TransportError, match="shadow memory"):
            senders._destination(
                senders.channels[0], senders.channels[0].lanes[0], True
            )
    assert other("memory", False) == wanted(world, plan)


def test_a_late_writer_writes_nothing(pair: Any) -> None:
    world, plan, other, senders = pair
    other("admit", 1)
    other("revoke")
    before = other("memory", False)
    with pytest.raises(TransportError, match="revoked write access"):
        senders.send_all(source_of(plan, on_gpu(world)), 1, 30.0)
    assert other("memory", False) == before
    with pytest.raises(TransportError, match="closed"):
        senders.ready(1)


def test_one_wrong_bit_shows(pair: Any) -> None:
    world, plan, other, senders = pair
    other("admit", 1)
    sent = senders.send_all(source_of(plan, on_gpu(world)), 1, 30.0)
    values = dict(world.values)
    path = next(iter(values))
    values[path] = values[path].copy()
    values[path].flat[7] += 1.0
    world.values = values
    other("admit", 2)
    again = senders.send_all(source_of(plan, on_gpu(world)), 2, 30.0)
    differing = [t for t in sent.digests if sent.digests[t] != again.digests[t]]
    assert len(differing) == 1
    assert other("digests") == again.digests


def test_300_syncs_leak_nothing_and_new_arrays_are_found(pair: Any) -> None:
    import jax

    world, plan, other, senders = pair
    arrays = on_gpu(world)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    used, threads = None, len(os.listdir("/proc/self/task"))
    for version in range(1, 301):
        arrays = step(arrays)  # new buffers, not waited for
        other("admit", version)
        sent = senders.send_all(source_of(plan, arrays), version, 30.0)
        if version % 50 == 0:
            assert other("digests") == sent.digests
            used = used or other("used")
    assert other("used") - used < 32 << 20
    assert len(os.listdir("/proc/self/task")) <= threads + 2
    world.values = {path: np.asarray(array) for path, array in arrays.items()}
    assert other("memory", False) == wanted(world, plan)


def test_a_restarted_rank_is_attached_anew(pair: Any) -> None:
    world, plan, other, senders = pair
    other.process.kill()
    other.process.join(10)
    fresh = Other(plan)
    try:
        senders.attach({"r0": [fresh("export", False)]})
        fresh("admit", 1)
        sent = senders.send_all(source_of(plan, on_gpu(world)), 1, 30.0)
        assert fresh("digests") == sent.digests
    finally:
        senders.close()
        fresh.end()


def test_memory_mapped_piecewise_is_refused_with_the_remedy() -> None:
    _, plan = world_of("dense", "float32", "bfloat16")
    # its allocator is not as others expect it afterwards
    other = Other(plan, fresh=True)
    try:
        assert "expandable_segments:False" in other("expandable")
    finally:
        other.end()


def test_a_rank_on_the_cpu_is_refused() -> None:
    _, plan = world_of("dense", "float32", "bfloat16")
    with pytest.raises(RuntimeError, match="ipc needs one GPU"):
        Other(plan, "cpu")


def test_another_plan_is_refused(pair: Any) -> None:
    _, _, other, senders = pair
    export = other("export", False)
    export["plan"] = "another"
    with pytest.raises(SyncError, match="another plan"):
        senders.attach({"r0": [export]})


def test_deadline_in_the_past(pair: Any) -> None:
    world, plan, other, senders = pair
    other("admit", 1)
    before, start = other("memory", False), time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rank 0 of r0"):
        senders.send_all(source_of(plan, on_gpu(world)), 1, 0.0)
    assert time.monotonic() - start < 10
    assert other("memory", False) == before

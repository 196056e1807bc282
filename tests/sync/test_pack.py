"""The trainer's pack: from sharded JAX arrays over a real channel into numpy memory, equal to the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jvlab._errors import DeadlineExceeded, LayoutError, TransportError
from jvlab.layout._compile import compile_plan
from jvlab.layout._digest import examine, flat_digest, row_elements
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import source_order
from jvlab.layout._tree import MeshSpec, default_spec
from jvlab.sync._pack import LinkPack, Source, plain
from jvlab.sync._senders import BucketSenders, Sent
from jvlab.transport._choose import listen, open_receiver
from jvlab.transport._faults import Faults
from tests.fuzzing import in_turn
from tests.layout.plan_interpreter import execute, scatter_bucket
from tests.layout.plan_world import Size, World, transformer
from tests.waiting import until

pytestmark = pytest.mark.slow

MESHES = ["fsdp=1", "fsdp=2", "fsdp=3", "fsdp=2,tp=2", "fsdp=3,tp=2", "dp=2,fsdp=2"]


def make(
    mesh: str,
    tp: int,
    layout: str = "einsum",
    dtype: str = "float32",
    size: Size | None = None,
) -> tuple[World, TransferPlan]:
    world = transformer(
        World(MeshSpec.parse(mesh), tp, dtype),
        size or Size(),
        layout=layout,
        rotary=True,
    )
    return world, compile_plan(
        world.leaves, world.bindings, world.layouts, replicas=2, bucket_mib=0.001
    )


def arrays_of(world: World) -> dict[str, Any]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    spec = world.mesh
    mesh = Mesh(np.array(jax.devices()[: spec.devices]).reshape(spec.sizes), spec.names)
    return {
        path: jax.device_put(
            value, NamedSharding(mesh, PartitionSpec(*default_spec(value.shape, spec)))
        )
        for path, value in world.values.items()
    }


class Ranks:
    """The receiving side in threads: what a worker does, on numpy memory."""

    def __init__(
        self, world: World, plan: TransferPlan, senders: BucketSenders
    ) -> None:
        self.plan, self.params = plan, world.blank_params(plan)
        self.order: list[tuple[str, int, str]] = []
        self.threads = []
        for name, channels in senders.replicas.items():
            for channel in channels:
                receiver = open_receiver(channel.sender.endpoint(), 10.0)
                count = len(channel.jobs)
                index = 0 if name == "a" else 1
                thread = threading.Thread(
                    target=self._take,
                    args=(receiver, channel.rank, index, count),
                    daemon=True,
                )
                thread.start()
                self.threads.append((thread, receiver))
        senders.ready(10.0)

    def _take(self, receiver: Any, rank: int, index: int, count: int) -> None:
        for _ in range(count):
            try:
                received = receiver.recv(60.0)
                link = source_order(self.plan.link(received.header.device, rank, index))
                scatter_bucket(
                    self.plan, link, received.header.bucket, received.data, self.params
                )
                receiver.release(received)
            except (TransportError, DeadlineExceeded):
                return

    def close(self) -> None:
        for thread, receiver in self.threads:
            thread.join(10.0)
            receiver.close()


CASES = [(mesh, tp, "einsum", "float32") for mesh in MESHES for tp in (1, 2)]
# casts are compiled: slower
CASES += [("fsdp=3,tp=2", 2, "scanned", "bfloat16"), ("fsdp=2", 2, "fused", "float16")]


@pytest.mark.parametrize(("mesh", "tp", "layout", "dtype"), CASES)
def test_what_arrives_and_its_digest(mesh: str, tp: int, layout: str, dtype: str):
    world, plan = make(mesh, tp, layout, dtype)
    senders = BucketSenders(
        plan,
        {"a": 0},
        lambda room, _replica, _rank: listen("loopback", slot_bytes=room, slots=2),
    )
    ranks = Ranks(world, plan, senders)
    sent = senders.send_all(Source(plan, arrays_of(world)), 1, 120.0)
    ranks.close()
    senders.close()
    wanted = world.blank_params(plan)
    execute(plan, world.shards(), wanted)
    assert all(np.array_equal(ranks.params[key], wanted[key]) for key in wanted)
    assert sent.bytes == senders.total_bytes
    assert sent.buckets > tp, "several buckets, or nothing was shown"
    whole = 0
    for target, value in sent.digests.items():
        info = plan.parameters[plan.target_parameter[target]]
        if not plan.target_padding[target]:
            memory = ranks.params[int(plan.target_rank[target]), info.name].reshape(-1)
            assert value == flat_digest(
                memory, row_elements(info.shape, info.strides)
            ), info.name
            whole += 1
    assert whole > 5


def test_two_replicas_get_the_same_and_digests_are_taken_once():
    world, plan = make("dp=2,fsdp=2", 2)
    senders = BucketSenders(
        plan,
        {"a": 0, "b": 1},
        lambda room, _a, _b: listen("loopback", slot_bytes=room, slots=2),
    )
    ranks = Ranks(world, plan, senders)
    sent = senders.send_all(Source(plan, arrays_of(world)), 1, 120.0)
    ranks.close()
    senders.close()
    one = BucketSenders(
        plan,
        {"b": 1},
        lambda room, _a, _b: listen("loopback", slot_bytes=room, slots=2),
    )
    again = Ranks(world, plan, one)
    other = one.send_all(Source(plan, arrays_of(world)), 2, 120.0)
    again.close()
    one.close()
    assert sent.digests == other.digests, (
        "copies of a leaf take turns between replicas; what arrives is the same"
    )
    assert sent.bytes == 2 * other.bytes


def test_only_casts_are_computed_and_the_rest_is_read_in_place():
    world, plan = make("fsdp=2", 1)
    arrays = arrays_of(world)
    source = Source(plan, arrays)
    pack = LinkPack(plan, 0, 0, 0)
    values = pack.values(0, source)
    assert all(plain(box.transform) for _, box in pack.buckets[0])
    shards = [source.memory(box.leaf, 0) for _, box in pack.buckets[0]]
    assert all(
        np.shares_memory(v, s)
        for v, s in zip(values, shards, strict=True)
        if s is not None
    )
    world, plan = make("fsdp=2", 1, dtype="bfloat16")
    assert not any(plain(transform) for transform in plan.transforms)


def test_another_tree_is_refused_before_a_byte_moves():
    import jax
    import jax.numpy as jnp

    world, plan = make("fsdp=2", 1)
    arrays = arrays_of(world)
    Source(plan, arrays)
    path = next(iter(arrays))
    for changed, text in (
        ({**arrays, path: arrays[path].astype(jnp.bfloat16)}, "connected as float32"),
        ({**arrays, path: jnp.zeros((3, 3))}, "now float32\\(3, 3\\)"),
        ({k: v for k, v in arrays.items() if k != path}, "is missing now"),
        ({**arrays, f"{path}.more": jnp.zeros(3)}, "is new, was not connected"),
        (
            {**arrays, path: jax.device_put(arrays[path], jax.devices()[0])},
            "another sharding",
        ),
    ):
        with pytest.raises(LayoutError, match=text) as caught:
            Source(plan, changed)
        assert path in str(caught.value)
        assert "connect again" in caught.value.remedy
    gone = jax.device_put(arrays[path], arrays[path].sharding)
    gone.delete()
    with pytest.raises(LayoutError, match="deleted or donated"):
        Source(plan, {**arrays, path: gone})


def test_a_failing_channel_ends_all_of_them_and_no_thread_stays():
    before = set(threading.enumerate())
    world, plan = make("fsdp=2", 2)
    faults = Faults(fail=1)
    senders = BucketSenders(
        plan,
        {"a": 0},
        lambda room, _a, _b: faults.wrap(listen("loopback", slot_bytes=room, slots=1)),
    )
    ranks = Ranks(world, plan, senders)
    with pytest.raises(TransportError, match="injected fault"):
        senders.send_all(Source(plan, arrays_of(world)), 1, 120.0)
    ranks.close()
    left = set(threading.enumerate()) - before
    assert not [t.name for t in left if t.name.startswith("jvlab-send")]


class HeldDigests:
    """No digest is computed until the senders' pool has begun to shut down: the order of events in which a sync with a
    failing channel once waited for ever, as happens by itself on a busy machine."""

    def __init__(self, patch: pytest.MonkeyPatch, tp: int) -> None:
        self._shut_down = threading.Event()
        digests, shutdown = LinkPack.digests, ThreadPoolExecutor.shutdown

        def held_digests(*args: Any) -> dict[int, int]:
            assert self._shut_down.wait(60)
            return digests(*args)

        def noted_shutdown(
            pool: ThreadPoolExecutor, wait: bool = True, **options: Any
        ) -> None:
            shutdown(pool, wait=False, **options)
            self._shut_down.set()
            shutdown(pool, wait=wait, **options)

        patch.setattr(LinkPack, "digests", held_digests)
        patch.setattr(ThreadPoolExecutor, "shutdown", noted_shutdown)
        # one head for each rank
        self.world, self.plan = make("fsdp=2", tp, size=Size(n=tp, k=tp))

    def full(self) -> bool:
        """Every channel that can has sent what it can without a digest."""
        return sum(channel.sent for channel in self.senders.channels) >= 5

    def error_of_a_sync(
        self,
        wrap: Callable[[Any], Any],
        progress: Callable[[Sent], None] = lambda _: None,
    ) -> BaseException:
        """What `send_all` raises; fails if it does not end."""
        self.senders = BucketSenders(
            self.plan,
            {"a": 0},
            lambda room, _a, _b: wrap(listen("loopback", slot_bytes=room, slots=8)),
        )
        ranks = Ranks(self.world, self.plan, self.senders)
        raised: list[BaseException] = []

        def sync() -> None:
            try:
                self.senders.send_all(
                    Source(self.plan, arrays_of(self.world)), 1, 30.0, progress=progress
                )
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=sync, daemon=True)
        thread.start()
        thread.join(90.0)
        assert not thread.is_alive(), "the sync goes on after its deadline"
        ranks.close()
        assert not [
            t.name for t in threading.enumerate() if t.name.startswith("jvlab-send")
        ]
        return raised[0]


def test_a_sync_ends_when_a_channel_fails_while_the_others_wait_for_digests(
    monkeypatch: pytest.MonkeyPatch,
):
    held = HeldDigests(monkeypatch, tp=4)
    faults = Faults(hook=(0, lambda _: until(held.full)), fail=0)
    number = iter(range(4))
    error = held.error_of_a_sync(
        lambda sender: faults.wrap(sender) if next(number) == 0 else sender
    )
    assert isinstance(error, TransportError)
    assert "injected fault" in str(error)


def test_a_sync_ends_at_ctrl_c_while_its_channels_wait_for_digests(
    monkeypatch: pytest.MonkeyPatch,
):
    held = HeldDigests(monkeypatch, tp=3)

    def interrupt(_: Sent) -> None:
        if held.full():
            raise KeyboardInterrupt

    assert isinstance(
        held.error_of_a_sync(lambda sender: sender, interrupt), KeyboardInterrupt
    )


def test_a_digest_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch):
    held = HeldDigests(monkeypatch, tp=1)
    monkeypatch.setattr("jvlab.sync._senders._left", lambda *_: 0.1)
    error = held.error_of_a_sync(lambda sender: sender)
    assert isinstance(error, DeadlineExceeded)
    assert "while the digest for rank 0 of a was computed" in str(error)


def test_a_receiver_that_never_takes_a_bucket_is_named():
    world, plan = make("fsdp=1", 1)
    senders = BucketSenders(
        plan,
        {"a": 0},
        lambda room, r, k: listen(
            "loopback", slot_bytes=room, slots=1, peer=f"{r}/{k}"
        ),
    )
    receiver = open_receiver(senders.channels[0].sender.endpoint(), 1.0)
    senders.ready(1.0)
    with pytest.raises((DeadlineExceeded, TransportError), match="a"):
        senders.send_all(Source(plan, arrays_of(world)), 1, 0.5)
    receiver.close()
    senders.close()


# Poison --------------------------------------------------------------------------------------------------------------


def planted(arrays: dict[str, Any], path: str, value: float) -> dict[str, Any]:
    """The arrays, with one value of one leaf changed: its last."""
    import jax

    array = arrays[path]
    return {
        **arrays,
        path: jax.device_put(array.at[(-1,) * array.ndim].set(value), array.sharding),
    }


@pytest.mark.parametrize(
    ("dtype", "digest"), in_turn(["float32", "bfloat16", "float16"], [True, False])
)
def test_poison_in_any_leaf_is_found_and_counted(dtype: str, digest: bool):
    """With digests and without; NaN, Inf, and what overflows in the cast to the engine's dtype. Float32 in."""
    world, plan = make("fsdp=2", 2, dtype=dtype)
    arrays = arrays_of(world)
    paths, kinds = list(arrays), (np.nan, -np.inf, 3.4e38)
    for path, value in [
        ("", 0.0),
        *((p, kinds[k % 3]) for k, p in enumerate(paths[:9])),
        ("", 0.0),
    ]:
        senders = BucketSenders(
            plan,
            {"a": 0},
            lambda room, _a, _b: listen("loopback", slot_bytes=room, slots=2),
        )
        source = Source(plan, planted(arrays, path, value) if path else arrays)
        ranks = Ranks(world, plan, senders)
        sent = senders.send_all(source, 1, 120.0, digest)
        ranks.close()
        senders.close()
        found = examine(source.by_path, sent.flawed)
        if not path or (dtype == "float32" and np.isfinite(value)):
            assert not sent.flawed, path
            continue
        assert {leaf for leaf, _ in sent.flawed} == {path}
        (one,) = found
        counts = (int(np.isnan(value)), int(np.isinf(value)), int(np.isfinite(value)))
        assert (one.leaf, one.nan, one.inf, one.overflow) == (path, *counts)
        assert one.elements == arrays[path].size
        assert str(one).startswith(f"{path}: 1 ")

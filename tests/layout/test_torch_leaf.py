"""Torch tensors as leaves: cut like DTensor cuts, packed bit for bit, named like the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jvlab._errors import LayoutError
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._tree import (
    Boxes,
    MeshSpec,
    TorchDevice,
    TorchLeaf,
    TorchShard,
    checkpoint_names,
    device_processes,
    flatten,
    leaf_from_array,
    leaves_of,
    mesh_boxes,
)
from jvlab.layout._types import CheckpointTensor
from jvlab.sync._pack import LinkPack, Source
from tests.layout.plan_interpreter import execute, scatter_bucket
from tests.layout.plan_world import Size, World, transformer

torch = pytest.importorskip("torch")

MESHES: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((2,), ((0, 0),)),
    ((3,), ((0, 0),)),
    ((5,), ((1, 0),)),
    ((7,), ((0, 0),)),
    ((4,), (None,)),
    ((2, 3), ((0, 0), (1, 0))),
    ((2, 3), (None, (0, 0))),
    ((2, 2), ((0, 0), (0, 0))),
    ((3, 2), ((1, 0), (1, 0))),
    ((2, 2), ((0, 2), (0, 0))),
    ((3, 2), ((0, 2), (0, 0))),
    ((2, 2, 2), (None, (1, 2), (1, 0))),
]


SHAPES = [(8, 6), (7, 5), (2, 11), (1, 4), (12, 12, 3)]


def cases() -> list[tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...]]]:
    """Every shape on every mesh; FSDP over tensor parallelism (a split factor) cuts evenly, or not at all."""
    out = []
    for mesh, cuts in MESHES:
        for shape in SHAPES:
            strided = any(cut and cut[1] for cut in cuts)
            if not strided or not any(
                shape[cut[0]] % int(np.prod(mesh)) for cut in cuts if cut
            ):
                out.append((mesh, cuts, shape))
    return out


@pytest.mark.parametrize(("mesh", "cuts", "shape"), cases())
def test_boxes_are_dtensors_own(
    mesh: tuple[int, ...], cuts: tuple[Any, ...], shape: tuple[int, ...]
):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as theirs,
    )
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = [
        Replicate()
        if cut is None
        else _StridedShard(cut[0], split_factor=cut[1])
        if cut[1]
        else Shard(cut[0])
        for cut in cuts
    ]
    found = mesh_boxes(shape, mesh, cuts)
    for coords, box in zip(np.ndindex(*mesh), found, strict=True):
        size, offset = theirs(shape, mesh, lambda d, c=coords: c[d], kinds)
        ours = tuple(b - a for a, b in box)
        assert ours == tuple(size)
        if all(ours):  # where nothing lies, any offset is as good
            assert tuple(a for a, _ in box) == tuple(offset)


class Cut:
    """An array cut unevenly over ranks."""

    def __init__(self, value: np.ndarray, parts: int, dim: int) -> None:
        self.shape, self.dtype, self.value = value.shape, value.dtype, value
        boxes = mesh_boxes(value.shape, (parts,), ((dim, 0),))
        held = {k: box for k, box in enumerate(boxes) if all(b > a for a, b in box)}
        self.sharding = Boxes(
            tuple(TorchDevice(k, k, "cpu") for k in held), tuple(held.values()), 0
        )

    def shards(self) -> dict[int, np.ndarray]:
        where = self.sharding.devices_indices_map(self.shape)
        return {
            place.id: np.ascontiguousarray(self.value[index])
            for place, index in where.items()
        }


@pytest.mark.parametrize("parts", [2, 3, 5, 7])
def test_uneven_cuts_move_every_element(parts: int):
    world = transformer(
        World(MeshSpec.parse("fsdp=1"), 2), Size(), layout="einsum", rotary=True
    )
    whole = compile_plan(world.leaves, world.bindings, world.layouts)
    expected = world.blank_params(whole)
    execute(whole, world.shards(), expected)
    cut = {
        p: Cut(v, parts, k % v.ndim) for k, (p, v) in enumerate(world.values.items())
    }
    processes = device_processes(cut)
    plan = compile_plan(
        leaves_of(cut),
        world.bindings,
        world.layouts,
        device_process=processes,
        bucket_mib=0.002,
    )
    holders = {place.id for c in cut.values() for place in c.sharding.places}
    assert {plan.process_of(d) for d in plan.devices.tolist()} == holders
    assert len(holders) >= min(parts, 6)
    found = world.blank_params(plan)
    execute(
        plan, {(p, d): s for p, c in cut.items() for d, s in c.shards().items()}, found
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=str(key))


DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int32",
    "uint8",
]


@pytest.mark.parametrize("name", DTYPES)
def test_bits_are_kept(name: str):
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (6, 40), np.uint8))
    tensor = raw.view(getattr(torch, name))
    for t in (
        tensor,
        tensor.t(),
        tensor[1::2, 1:],
        tensor.t()[2:].t(),
        torch.nn.Parameter(tensor, name[0] in "fb"),
    ):
        found = np.asarray(TorchShard(t))
        assert found.dtype == numpy_dtype(name)
        assert found.shape == tuple(t.shape)
        assert (
            np.ascontiguousarray(found).tobytes()
            == t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    assert np.shares_memory(np.asarray(TorchShard(tensor)), raw.numpy()), (
        "no copy of what is in host memory"
    )


def test_what_holds_no_numbers():
    leaf = flatten(
        {"w": torch.empty(3, 4, device="meta", dtype=torch.bfloat16)}
    ).arrays["w"]
    planned = leaf_from_array("w", leaf)
    assert (planned.shape, planned.dtype) == ((3, 4), "bfloat16")
    with pytest.raises(LayoutError, match="meta device"):
        np.asarray(leaf)
    with pytest.raises(LayoutError, match="sparse") as caught:
        flatten({"w": torch.eye(3).to_sparse()})
    assert "to_dense" in caught.value.remedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_like_the_interpreter_packs(dtype: str):
    """Masters in float32 into an engine of each dtype; half of the tensors do not lie contiguously."""
    world = transformer(
        World(MeshSpec.parse("fsdp=1"), 2, dtype), Size(), layout="einsum", rotary=True
    )
    plan = compile_plan(world.leaves, world.bindings, world.layouts, bucket_mib=0.002)
    expected = world.blank_params(plan)
    execute(plan, world.shards(), expected)
    tree = {}
    for k, (path, value) in enumerate(world.values.items()):
        t = torch.from_numpy(np.asarray(value, np.float32).copy()).to(
            getattr(torch, value.dtype.name)
        )
        tree[path] = (
            t.transpose(0, -1).contiguous().transpose(0, -1)
            if k % 2 and t.ndim > 1
            else t
        )
    source, found = Source(plan, flatten(tree).arrays), world.blank_params(plan)
    for rank in range(2):
        pack = LinkPack(plan, 0, rank, 0)
        for bucket, size in enumerate(pack.sizes):
            room = bytearray(size)
            pack.write(bucket, pack.values(bucket, source), memoryview(room))
            scatter_bucket(plan, pack.link, bucket, memoryview(room), found)
    for key, value in expected.items():
        assert found[key].tobytes() == value.tobytes(), key


# Trees ---------------------------------------------------------------------------------------------------------------


def test_one_library_to_a_tree():
    import jax.numpy as jnp

    tree = {"a": torch.zeros(2), "b": jnp.zeros(2), "c": np.zeros(2)}
    with pytest.raises(LayoutError, match=r"1 of torch.*2 others") as caught:
        flatten(tree)
    assert "from_dlpack" in caught.value.remedy
    assert caught.value.fields["others"] == ["b", "c"]


def test_a_module_is_its_state_dict():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    flat = flatten(module)
    assert list(flat.arrays) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(isinstance(leaf, TorchLeaf) for leaf in flat.arrays.values())
    again = flatten(flat.arrays).arrays
    assert all(again[path] is leaf for path, leaf in flat.arrays.items())


CHECKPOINT = [
    CheckpointTensor(name, (4, 3), "float32")
    for name in ("model.embed.weight", "model.up.weight")
]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "a.b."])
def test_names_of_the_checkpoint_are_seen_through_a_wrapper(prefix: str):
    embed = torch.randn(4, 3)
    tree = {
        f"{prefix}model.embed.weight": embed,
        f"{prefix}model.up.weight": torch.randn(4, 3),
        f"{prefix}lm_head.weight": embed,
    }
    kept, notes, rules = checkpoint_names(flatten(tree).arrays, "auto", CHECKPOINT)
    assert list(kept) == list(tree)[:2]
    assert [note.name for note in notes] == [f"{prefix}lm_head.weight"]
    assert "tied" in notes[0].reason
    assert rules == (f"{prefix}{{path*}} -> {{path*}}" if prefix else "checkpoint")
    assert checkpoint_names(flatten(tree).arrays, "mine", CHECKPOINT)[2] == "mine"


def test_what_is_only_equal_is_not_tied():
    embed = torch.randn(4, 3)
    tree = {
        "model.embed.weight": embed,
        "model.up.weight": torch.randn(4, 3),
        "lm_head.weight": embed.clone(),
    }
    assert list(checkpoint_names(flatten(tree).arrays, "auto", CHECKPOINT)[0]) == list(
        tree
    )
    other = {"layers.0.w": torch.zeros(2), "layers.1.w": torch.zeros(2)}
    assert checkpoint_names(flatten(other).arrays, "auto", CHECKPOINT)[2] == "auto", (
        "names of another convention"
    )


# DTensor -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def third_of_four() -> Iterator[None]:
    """This process as rank 2 of 4, as far as DTensor can tell; nothing is sent."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    distributed.destroy_process_group()


def test_a_dtensor_by_its_local_shard(third_of_four: None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    local = torch.arange(12.0).reshape(3, 4).to(torch.bfloat16)
    both = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False)
    rows = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    flat = flatten({"both": both, "rows": rows, "norm": torch.ones(5)}).arrays
    leaf = leaf_from_array("both", flat["both"])
    assert (leaf.shape, leaf.dtype, leaf.devices.tolist()) == (
        (6, 8),
        "bfloat16",
        [0, 1, 2, 3],
    )
    assert leaf.starts.tolist() == [[0, 0], [0, 4], [3, 0], [3, 4]]
    assert leaf_from_array("rows", flat["rows"]).starts.tolist() == [
        [0, 0],
        [0, 0],
        [3, 0],
        [3, 0],
    ]
    assert leaf_from_array("norm", flat["norm"]).devices.tolist() == [0], (
        "a copy everywhere: the first one sends it"
    )
    assert device_processes(flat) == {k: k for k in range(4)}
    (piece,) = flat["both"].addressable_shards
    assert piece.device.id == 2
    assert np.asarray(piece.data).astype(np.float32).tolist() == local.tolist()
    assert flat["norm"].addressable_shards == []
    assert not flat["both"].is_fully_addressable
    with pytest.raises(LayoutError, match="'sum' has the placement Partial") as caught:
        leaf_from_array(
            "sum",
            flatten(
                {"sum": DTensor.from_local(local, mesh, [Partial(), Shard(0)])}
            ).arrays["sum"],
        )
    assert "redistribute" in caught.value.remedy

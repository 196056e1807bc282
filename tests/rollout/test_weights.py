"""Destinations on CPU torch without an engine: scatter, digests, shadows, exchange of tied weights, packing again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from jvlab._errors import LayoutError, Unsupported
from jvlab.layout._compile import compile_plan
from jvlab.layout._execute import pack_bucket
from jvlab.layout._plan import TransferPlan
from jvlab.layout._shards import MeshSpec
from jvlab.layout._wire_order import source_order
from jvlab.rollout._receive import Box, Ledger
from jvlab.rollout._scatter import bits, flat, scatter
from jvlab.rollout._weights import Weights, peek
from tests.layout.plan_world import Size, World, transformer

PLENTY = 1 << 40
SMALL = Size(layers=1, experts=2)


class Tree(torch.nn.Module):
    """Parameters by dotted names."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in named.items():
            at: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in at._modules:
                    at.add_module(part, torch.nn.Module())
                at = at._modules[part]  # type: ignore[assignment]
            at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


def torch_of(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def blank(world: World, plan: TransferPlan, rank: int) -> Any:
    return Tree({name: torch_of(a) for (r, name), a in world.blank_params(plan).items() if r == rank})


def weights_of(model: torch.nn.Module, plan: TransferPlan, rank: int = 0, **more: Any) -> tuple[Weights, list[Any]]:
    table = plan.links()
    devices = sorted(table.device[table.rank == rank].tolist())
    links = [source_order(plan.link(d, rank)) for d in devices]
    return Weights(model, plan, rank, Ledger(links), more.pop("staged", []), **more), links


def move(world: World, plan: TransferPlan, weights: Weights, links: list[Any], readonly: bool = False) -> None:
    shards, left = world.shards(), {n: len(s.boxes) for n, s in weights.slots.items()}
    for link in links:
        for bucket in range(len(link.bucket_sizes)):
            data = pack_bucket(plan, link, bucket, shards)
            room = memoryview(bytes(data) if readonly else data)
            for box in Ledger([link]).buckets[link.device, bucket].boxes:
                weights.scatter(box, room)
                left[box.target] -= 1
                if not left[box.target]:
                    weights.finish(box.target)
    assert not any(left.values())
    weights.end()


def small(
    mesh: str = "fsdp=2", tp: int = 1, layout: str = "dense", dtype: str = "float32"
) -> tuple[World, TransferPlan]:
    world = transformer(World(MeshSpec.parse(mesh), tp, dtype), SMALL, layout=layout, rotary=layout == "einsum")
    return world, compile_plan(world.leaves, world.bindings, world.layouts, bucket_mib=0.002)


def same(
    model: torch.nn.Module, world: World, rank: int, dense: dict[tuple[int, str], np.ndarray] | None = None
) -> None:
    expected = dense or world.dense_params()  # element by element, nothing shared with the compiler
    for name, p in model.named_parameters():
        want = torch_of(expected[rank, name])
        assert torch.equal(bits_of(p), bits_of(want)), name


def bits_of(t: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(bits(flat(t)).copy())


@pytest.mark.parametrize(("mode", "readonly"), [("direct", False), ("staged", False), ("direct", True)])
@pytest.mark.parametrize(
    ("mesh", "tp", "layout", "dtype"),
    [
        ("fsdp=1", 1, "dense", "float32"),
        ("fsdp=2", 2, "einsum", "bfloat16"),
        ("fsdp=3", 1, "scanned", "float16"),
        ("fsdp=2,tp=2", 2, "fused", "float32"),
        ("fsdp=4", 4, "checkpoint", "bfloat16"),
    ],
)
def test_memory_is_what_a_loader_writes(mesh: str, tp: int, layout: str, dtype: str, mode: str, readonly: bool):
    world, plan = small(mesh, tp, layout, dtype)
    dense = world.dense_params()
    for rank in range(tp):
        model = blank(world, plan, rank)
        weights, links = weights_of(model, plan, rank)
        before = {n: bits_of(p) for n, p in model.named_parameters()}
        weights.prepare(1, mode, "full", PLENTY)
        move(world, plan, weights, links, readonly)
        if mode == "staged":
            assert all(torch.equal(before[n], bits_of(p)) for n, p in model.named_parameters()), (
                "live memory was touched"
            )
        weights.commit()
        same(model, world, rank, dense)
        found, packed = weights.check()
        assert found == weights.committed, "digests of live memory are those taken while it moved"
        assert not packed


def test_digests_are_sums_over_what_is_written_and_notice_a_bit():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    weights, links = weights_of(model, plan)
    weights.prepare(1, "direct", "full", PLENTY)
    move(world, plan, weights, links)
    padded = [n for n, s in weights.slots.items() if s.padded]
    assert padded, "the vocabulary is padded in this world"
    table = model.model.embed_tokens.weight
    table[-1, -1] = 5.0  # padding: no part of the digest
    assert weights.check()[0] == weights.found
    for number, slot in weights.slots.items():
        assert slot.live is not None
        at = flat(slot.live)[slot.boxes[0].offset : slot.boxes[0].offset + 1].view(torch.int32)
        at ^= 1
        assert weights.check()[0][number] != weights.found[number], slot.info.name
        at ^= 1
    weights.prepare(2, "direct", "off", PLENTY)
    move(world, plan, weights, links)
    assert weights.found == {}


def test_the_exchange_keeps_ties_views_and_strangers():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    embed = model.model.embed_tokens
    head: Any = torch.nn.Module()
    head.weight = embed.weight  # tied: the same Parameter
    model.add_module("head", head)
    norm = model.model.layers.get_submodule("0").norm
    head.__dict__["first_row"] = norm.weight.data[:4]  # an attribute that shows a part of the same storage
    qkv = model.model.layers.get_submodule("0").qkv_proj
    captured = qkv.weight.data  # held by somebody that can't be found
    reader = lambda x: x @ captured.t()
    weights, links = weights_of(model, plan)
    names = {s.info.name: s for s in weights.slots.values()}
    for version in (1, 2, 3):
        pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
        for path in world.values:
            world.values[path] = world.values[path] + 1
        weights.prepare(version, "staged", "full", PLENTY)
        assert names["model.layers.0.qkv_proj.weight"].holders is None, "a stranger holds it: it must be copied"
        move(world, plan, weights, links)
        room = names["model.embed_tokens.weight"].shadow
        assert room is not None
        shadow = room.data_ptr()
        del room  # a reference more would make a stranger of this test
        weights.commit()
        same(model, world, 0)
        assert head.weight is embed.weight
        assert embed.weight.data_ptr() == shadow, "pointers were exchanged, nothing was copied"
        assert torch.equal(head.__dict__["first_row"], norm.weight[:4])
        assert qkv.weight.data_ptr() == pointers["model.layers.0.qkv_proj.weight"]
        one = torch.eye(qkv.weight.shape[1])
        assert torch.equal(reader(one), one @ qkv.weight.t())
        assert weights.need("staged") == 0, "the old memory is the next shadow"
    weights.abandon()
    assert weights.need("staged") > 0
    same(model, world, 0)


def test_an_abandoned_staged_sync_changes_nothing():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    weights, links = weights_of(model, plan)
    before = {n: bits_of(p) for n, p in model.named_parameters()}
    weights.prepare(1, "staged", "full", PLENTY)
    move(world, plan, weights, links)
    weights.abandon()
    assert all(torch.equal(before[n], bits_of(p)) for n, p in model.named_parameters())
    assert all(s.shadow is None and s.raw is None for s in weights.slots.values())


def test_memory_that_does_not_suffice_is_named():
    world, plan = small(tp=1)
    weights, _ = weights_of(blank(world, plan, 0), plan)
    need = weights.need("staged")
    assert need == sum(s.nbytes for s in weights.slots.values())
    with pytest.raises(Unsupported, match=f"needs {need} bytes .* {need - 1} .* available") as caught:
        weights.prepare(1, "staged", "full", need - 1)
    assert 'mode="direct"' in caught.value.remedy
    assert weights.prepare(1, "staged", "full", need) == need
    assert weights.prepare(1, "direct", "full", 0) == 0


def test_a_plan_for_another_engine_is_refused():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    model.model.embed_tokens.weight.data = torch.zeros(3, 3)
    with pytest.raises(LayoutError, match=r"(?s)model\.embed_tokens\.weight .*connect again"):
        weights_of(model, plan)


def test_peek():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    whole = model.model.embed_tokens.weight.numpy().tobytes()
    assert peek(model, "model.embed_tokens.weight", 0, 1 << 20) == (whole, len(whole))
    assert peek(model, "model.embed_tokens.weight", 5, 7) == (whole[5:12], len(whole))
    with pytest.raises(LayoutError, match=r"no parameter 'nope\.weight'"):
        peek(model, "nope.weight", 0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [
        ((300, 70), (1, 300), 300 * 70),  # a dense transpose
        ((130, 64), (1, 400), 400 * 64),  # a transpose into a part of each line
        ((3, 90, 80), (90 * 80, 1, 90), 3 * 90 * 80),  # a stack of transposes
        ((5, 7), (20, 2), 120),  # every other element
        ((64,), (1,), 64),
        ((2, 3), (3, 1), 6),
    ],
)
def test_scatter_of_shapes(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], size: int):
    offset, rng = 11, np.random.default_rng(0)
    target = torch.zeros(size + 2 * offset, dtype=dtype)
    raw = rng.integers(0, 255, int(np.prod(shape)) * target.element_size() + 16, np.uint8)
    box = Box(0, 16, len(raw) - 16, offset, shape, strides)
    scatter(box, memoryview(bytearray(raw.tobytes())), target)
    expected = np.zeros(size + 2 * offset, bits(target).dtype)
    values = raw[16:].view(expected.dtype).reshape(shape)
    for at in np.ndindex(*shape):
        expected[offset + sum(i * s for i, s in zip(at, strides, strict=True))] = values[at]
    assert np.array_equal(bits(target), expected)


# With vLLM's own layers -------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    from jvlab.rollout import _vllm_model

    with _vllm_model.vllm_globals(), set_current_vllm_config(VllmConfig()):
        _vllm_model.stand_in(1, 1, 0)
        yield


def linear(weight: torch.Tensor, bias: bool = False) -> Any:
    """A vLLM linear layer after loading: packed."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    layer: Any = ReplicatedLinear(weight.shape[1], weight.shape[0], bias=bias, params_dtype=weight.dtype)
    record_metadata_for_reloading(layer)
    layer.weight.data.copy_(weight)
    if bias:
        layer.bias.data.copy_(torch.arange(len(weight)))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.vllm
@pytest.mark.parametrize("bias", [False, True])
def test_packing_again_equals_vllms_own_load(one_rank, bias: bool):
    from jvlab.rollout import _repack, _vllm_model

    torch.manual_seed(0)
    old, new, x = torch.randn(96, 64), torch.randn(96, 64), torch.randn(5, 64)
    layer, fresh = linear(old, bias), linear(new, bias)
    (item,) = _vllm_model.staged_layers(layer)
    assert (item.parameter, item.kind, _vllm_model.not_repackable(item)) == ("weight", "packed", "")
    was, target = layer(x)[0], fresh(x)[0]
    assert not torch.equal(was, target)
    packed = _repack.pack(layer, {"weight": new.clone()})
    assert torch.equal(layer(x)[0], was), "the live layer was touched before it was placed"
    parameter, method = layer.weight, layer.quant_method
    packed.place()
    assert torch.equal(layer(x)[0], target)
    assert layer.weight is parameter
    assert layer.quant_method is method
    again = _repack.pack(layer, {"weight": old.clone()})
    again.place()
    assert torch.equal(layer(x)[0], was)
    assert [i.parameter for i in _vllm_model.staged_layers(layer)] == ["weight"], "it is packed as before"


@pytest.mark.vllm
def test_a_packed_layer_through_weights(one_rank):
    """Both modes end to end for a packed linear, a tied head, and a plain norm beside them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from jvlab.layout._types import CheckpointTensor
    from jvlab.rollout import _vllm_model
    from jvlab.rollout._trace import trace_model
    from tests.rollout.fake_trainer import FakeTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed: Any = VocabParallelEmbedding(100, 32, params_dtype=torch.float32)
            self.up = linear(torch.randn(48, 32))
            self.norm = torch.nn.LayerNorm(32)
            self.head: Any = ParallelLMHead(100, 32, params_dtype=torch.float32)
            self.head.tie_weights(self.embed)
            self.embed.weight.data.normal_()

        def load_weights(self, tensors) -> None:
            live = dict(self.named_parameters())
            for name, tensor in tensors:
                loader = getattr(live[name], "weight_loader", lambda p, t: p.data.copy_(t))
                loader(live[name], tensor)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            head: Any = self.head
            return [self.up(x)[0], head.quant_method.apply(head, x), self.embed(torch.arange(100)), self.norm(x)]

    torch.manual_seed(1)
    model: Any = Model()
    for layer in (model.embed, model.head):
        layer.quant_method.process_weights_after_loading(layer)
    shapes = {"embed.weight": (100, 32), "up.weight": (48, 32), "norm.weight": (32,), "norm.bias": (32,)}
    layout = trace_model(model, [CheckpointTensor(n, s, "float32") for n, s in shapes.items()])
    assert {note.name for note in layout.staged} == {"embed.weight", "up.weight"}
    trainer = FakeTrainer.of([layout])
    x = torch.randn(3, 32)
    for version, mode in enumerate(("direct", "staged", "staged", "direct"), 1):
        rng = np.random.default_rng(version)
        values = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
        before = model(x)
        staged = _vllm_model.staged_layers(model)
        weights, links = weights_of(model, trainer.plan, staged=staged, refuse=_vllm_model.not_repackable)
        weights.prepare(version, mode, "full", PLENTY)
        shards = trainer.shards(values)
        left = {n: len(s.boxes) for n, s in weights.slots.items()}
        for link in links:
            for bucket in range(len(link.bucket_sizes)):
                data = memoryview(pack_bucket(trainer.plan, link, bucket, shards))
                for box in Ledger([link]).buckets[link.device, bucket].boxes:
                    weights.scatter(box, data)
                    left[box.target] -= 1
                    if not left[box.target]:
                        weights.finish(box.target)
        weights.end()
        if mode == "staged":
            assert all(torch.equal(a, b) for a, b in zip(before, model(x), strict=True)), "live before the commit"
        weights.commit()
        up, head, embed, norm = model(x)
        v = {n: torch.from_numpy(a) for n, a in values.items()}
        assert torch.equal(embed, v["embed.weight"])
        assert torch.equal(up, linear(v["up.weight"])(x)[0])
        assert torch.allclose(head[:, :100], x @ v["embed.weight"].t(), atol=1e-5)
        assert torch.equal(norm, torch.nn.functional.layer_norm(x, (32,), v["norm.weight"], v["norm.bias"]))
        assert model.head.weight is model.embed.weight
        assert all(s.raw is None for s in weights.slots.values()), "raw copies were kept"
        found, packed = weights.check()
        assert packed == ["up.weight"]
        assert {(weights.slots[n].info.name, 0): d for n, d in found.items()} == trainer.digests(values)

"""Destinations on CPU torch without an engine: scatter, digests, shadows, exchange of tied weights, packing again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from jvlab._errors import LayoutError, Unsupported
from jvlab.engine.worker._live_memory import bits, flat, peek, scatter
from jvlab.engine.worker._receivers import Ledger, ReceivedBox
from jvlab.engine.worker._weights import Weights
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import source_order
from jvlab.layout._tree import MeshSpec
from tests.layout.plan_interpreter import pack_bucket
from tests.layout.plan_world import Size, World, transformer

pytestmark = pytest.mark.vllm  # the module under test imports it

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
    return Tree(
        {
            name: torch_of(a)
            for (r, name), a in world.blank_params(plan).items()
            if r == rank
        }
    )


def fill(weights: Weights, links: Any, plan: TransferPlan, shards: Any) -> None:
    """Every box of every link, as a receiver writes it: a target is finished when its last box is there."""
    left = {n: len(s.boxes) for n, s in weights.slots.items()}
    for link in links:
        for bucket in range(len(link.bucket_sizes)):
            data = memoryview(pack_bucket(plan, link, bucket, shards))
            for box in Ledger([link]).buckets[link.device, bucket].boxes:
                weights.scatter(box, data)
                left[box.target] -= 1
                if not left[box.target]:
                    weights.finish(box.target)
    weights.end()


def weights_of(
    model: torch.nn.Module, plan: TransferPlan, rank: int = 0, worker: Any = None
) -> tuple[Weights, list[Any]]:
    table = plan.links()
    devices = sorted(table.device[table.rank == rank].tolist())
    links = [source_order(plan.link(d, rank)) for d in devices]
    return Weights(worker, model, plan, rank, Ledger(links)), links


def move(
    world: World,
    plan: TransferPlan,
    weights: Weights,
    links: list[Any],
    readonly: bool = False,
) -> None:
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
    world = transformer(
        World(MeshSpec.parse(mesh), tp, dtype),
        SMALL,
        layout=layout,
        rotary=layout == "einsum",
    )
    return world, compile_plan(
        world.leaves, world.bindings, world.layouts, bucket_mib=0.002
    )


def same(
    model: torch.nn.Module,
    world: World,
    rank: int,
    dense: dict[tuple[int, str], np.ndarray] | None = None,
) -> None:
    # element by element, nothing shared with the compiler
    expected = dense or world.dense_params()
    for name, p in model.named_parameters():
        want = torch_of(expected[rank, name])
        assert torch.equal(bits_of(p), bits_of(want)), name


def bits_of(t: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(bits(flat(t)).copy())


@pytest.mark.parametrize(
    ("mode", "readonly"), [("direct", False), ("staged", False), ("direct", True)]
)
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
def test_memory_is_what_a_loader_writes(
    mesh: str, tp: int, layout: str, dtype: str, mode: str, readonly: bool
):
    world, plan = small(mesh, tp, layout, dtype)
    dense = world.dense_params()
    for rank in range(tp):
        model = blank(world, plan, rank)
        weights, links = weights_of(model, plan, rank)
        before = {n: bits_of(p) for n, p in model.named_parameters()}
        weights.prepare(1, mode, "full", PLENTY)
        move(world, plan, weights, links, readonly)
        if mode == "staged":
            assert all(
                torch.equal(before[n], bits_of(p)) for n, p in model.named_parameters()
            ), "live memory was touched"
        weights.commit()
        same(model, world, rank, dense)
        found, how = weights.check()
        assert found == weights.committed, (
            "digests of live memory are those taken while it moved"
        )
        assert set(how.values()) == {"live"}


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
        at = flat(slot.live)[slot.boxes[0].offset : slot.boxes[0].offset + 1].view(
            torch.int32
        )
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
    # an attribute that shows a part of the same storage
    head.__dict__["first_row"] = norm.weight.data[:4]
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
        assert names["model.layers.0.qkv_proj.weight"].holders is None, (
            "a stranger holds it: it must be copied"
        )
        move(world, plan, weights, links)
        room = names["model.embed_tokens.weight"].shadow
        assert room is not None
        shadow = room.data_ptr()
        del room  # a reference more would make a stranger of this test
        weights.commit()
        same(model, world, 0)
        assert head.weight is embed.weight
        assert embed.weight.data_ptr() == shadow, (
            "pointers were exchanged, nothing was copied"
        )
        assert torch.equal(head.__dict__["first_row"], norm.weight[:4])
        assert qkv.weight.data_ptr() == pointers["model.layers.0.qkv_proj.weight"]
        one = torch.eye(qkv.weight.shape[1])
        assert torch.equal(reader(one), one @ qkv.weight.t())
        assert weights.need("staged") == 0, "the old memory is the next shadow"
    weights.abandon()
    assert weights.need("staged") > 0
    same(model, world, 0)


def test_shadows_that_changes_go_to_hold_what_is_live():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    weights, links = weights_of(model, plan)
    for version in (1, 2):  # the shadows are then of the version before
        for path in world.values:
            world.values[path] = world.values[path] + 1
        weights.prepare(version, "staged", "full", PLENTY, mark=str(version))
        assert not weights.sparse
        move(world, plan, weights, links)
        weights.commit()
    weights.prepare(3, "staged", "full", PLENTY, base="2", mark="3")
    assert weights.sparse
    for slot in weights.slots.values():
        room = weights._destination(slot)
        assert room is slot.shadow
        assert slot.live is not None
        assert torch.equal(bits_of(room), bits_of(slot.live)), slot.info.name
    weights.abandon()


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
    with pytest.raises(
        Unsupported, match=f"needs {need} bytes .* {need - 1} .* available"
    ) as caught:
        weights.prepare(1, "staged", "full", need - 1)
    assert 'mode="direct"' in caught.value.remedy
    assert weights.prepare(1, "staged", "full", need) == need
    assert weights.prepare(1, "direct", "full", 0) == 0


def test_a_plan_for_another_engine_is_refused():
    world, plan = small(tp=1)
    model = blank(world, plan, 0)
    model.model.embed_tokens.weight.data = torch.zeros(3, 3)
    with pytest.raises(
        LayoutError, match=r"(?s)model\.embed_tokens\.weight .*connect again"
    ):
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
def test_scatter_of_shapes(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], size: int
):
    offset, rng = 11, np.random.default_rng(0)
    target = torch.zeros(size + 2 * offset, dtype=dtype)
    raw = rng.integers(
        0, 255, int(np.prod(shape)) * target.element_size() + 16, np.uint8
    )
    box = ReceivedBox(0, 16, len(raw) - 16, offset, shape, strides)
    scatter(box, memoryview(bytearray(raw.tobytes())), target)
    expected = np.zeros(size + 2 * offset, bits(target).dtype)
    values = raw[16:].view(expected.dtype).reshape(shape)
    for at in np.ndindex(*shape):
        expected[offset + sum(i * s for i, s in zip(at, strides, strict=True))] = (
            values[at]
        )
    assert np.array_equal(bits(target), expected)


# With vLLM's own layers -------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    from jvlab.engine.tracing import _meta_model

    with _meta_model.vllm_globals(), set_current_vllm_config(VllmConfig()):
        _meta_model.stand_in(1, 1, 0)
        yield


def linear(weight: torch.Tensor, bias: bool = False) -> Any:
    """A vLLM linear layer after loading: packed."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.model_loader.reload.layerwise import (
        record_metadata_for_reloading,
    )

    layer: Any = ReplicatedLinear(
        weight.shape[1], weight.shape[0], bias=bias, params_dtype=weight.dtype
    )
    record_metadata_for_reloading(layer)
    layer.weight.data.copy_(weight)
    if bias:
        layer.bias.data.copy_(torch.arange(len(weight)))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.vllm
@pytest.mark.parametrize("bias", [False, True])
def test_packing_again_equals_vllms_own_load(one_rank, bias: bool):
    from jvlab.engine.tracing import _vllm_model
    from jvlab.engine.worker import _weights

    torch.manual_seed(0)
    old, new, x = torch.randn(96, 64), torch.randn(96, 64), torch.randn(5, 64)
    layer, fresh = linear(old, bias), linear(new, bias)
    (item,) = _vllm_model.repacked_layers(layer)
    assert (item.parameter, item.kind, _vllm_model.not_repackable(item)) == (
        "weight",
        "packed",
        "",
    )
    was, target = layer(x)[0], fresh(x)[0]
    assert not torch.equal(was, target)
    packed = _weights.pack(layer, {"weight": new.clone()}, ["weight"], False)
    assert torch.equal(layer(x)[0], was), (
        "the live layer was touched before it was placed"
    )
    parameter, method = layer.weight, layer.quant_method
    packed.place()
    assert torch.equal(layer(x)[0], target)
    assert layer.weight is parameter
    assert layer.quant_method is method
    again = _weights.pack(layer, {"weight": old.clone()}, ["weight"], False)
    again.place()
    assert torch.equal(layer(x)[0], was)
    assert [i.parameter for i in _vllm_model.repacked_layers(layer)] == ["weight"], (
        "it is packed as before"
    )


@pytest.mark.vllm
def test_a_packed_layer_through_weights(one_rank):
    """Both modes end to end for a packed linear, a tied head, and a plain norm beside them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    from jvlab.engine.tracing._trace import trace_model
    from jvlab.layout._types import CheckpointTensor
    from tests.engine.worker.fake_trainer import FakeTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed: Any = VocabParallelEmbedding(
                100, 32, params_dtype=torch.float32
            )
            self.up = linear(torch.randn(48, 32))
            self.norm = torch.nn.LayerNorm(32)
            self.head: Any = ParallelLMHead(100, 32, params_dtype=torch.float32)
            self.head.tie_weights(self.embed)
            self.embed.weight.data.normal_()

        def load_weights(self, tensors) -> None:
            live = dict(self.named_parameters())
            for name, tensor in tensors:
                loader = getattr(
                    live[name], "weight_loader", lambda p, t: p.data.copy_(t)
                )
                loader(live[name], tensor)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            head: Any = self.head
            return [
                self.up(x)[0],
                head.quant_method.apply(head, x),
                self.embed(torch.arange(100)),
                self.norm(x),
            ]

    torch.manual_seed(1)
    model: Any = Model()
    for layer in (model.embed, model.head):
        layer.quant_method.process_weights_after_loading(layer)
    shapes = {
        "embed.weight": (100, 32),
        "up.weight": (48, 32),
        "norm.weight": (32,),
        "norm.bias": (32,),
    }
    layout = trace_model(
        model, [CheckpointTensor(n, s, "float32") for n, s in shapes.items()]
    )
    assert {note.name for note in layout.repacked} == {"embed.weight", "up.weight"}
    trainer = FakeTrainer.of([layout])
    x = torch.randn(3, 32)
    for version, mode in enumerate(("direct", "staged", "staged", "direct"), 1):
        rng = np.random.default_rng(version)
        values = {
            n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()
        }
        before = model(x)
        weights, links = weights_of(model, trainer.plan)
        weights.prepare(version, mode, "full", PLENTY)
        shards = trainer.shards(values)
        fill(weights, links, trainer.plan, shards)
        assert weights.confirm(float("inf"))
        if mode == "staged":
            assert all(
                torch.equal(a, b) for a, b in zip(before, model(x), strict=True)
            ), "live before the commit"
        weights.commit()
        up, head, embed, norm = model(x)
        v = {n: torch.from_numpy(a) for n, a in values.items()}
        assert torch.equal(embed, v["embed.weight"])
        assert torch.equal(up, linear(v["up.weight"])(x)[0])
        assert torch.allclose(head[:, :100], x @ v["embed.weight"].t(), atol=1e-5)
        assert torch.equal(
            norm,
            torch.nn.functional.layer_norm(x, (32,), v["norm.weight"], v["norm.bias"]),
        )
        assert model.head.weight is model.embed.weight
        assert all(s.raw is None for s in weights.slots.values()), (
            "raw copies were kept"
        )
        found, how = weights.check()
        names = {weights.slots[n].info.name: way for n, way in how.items()}
        assert names == {
            "embed.weight": "read back",
            "up.weight": "read back",
            "norm.weight": "live",
            "norm.bias": "live",
        }
        assert {
            (weights.slots[n].info.name, 0): d for n, d in found.items()
        } == trainer.digests(values)


# What arrived and is dropped afterwards is not verified -------------------------------------------------------------


class Experts(torch.nn.Module):
    """As much of vLLM's layer of experts as packing asks for; its kernel is what vLLM's CPU build computes with."""

    def __init__(self, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        from types import SimpleNamespace

        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
            CPUUnquantizedExperts,
        )
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        config: Any = SimpleNamespace(
            intermediate_size_per_partition=inner, activation=MoEActivation.SILU
        )

        class Method(UnquantizedFusedMoEMethod):
            def __init__(self) -> None:
                torch.nn.Module.__init__(self)
                self.moe_kernel = None
                self.unquantized_backend = SimpleNamespace(name="CPU", value="CPU")

            def process_weights_after_loading(self, layer: Any) -> None:
                kernel: Any = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
                kernel.moe_config, kernel._use_zentorch = config, False
                biases = {"w1_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
                kernel.quant_config = SimpleNamespace(**biases)
                kernel._pad_moe_intermediate(layer)
                from vllm._custom_ops import cpu_prepack_moe_weight
                from vllm.model_executor.utils import replace_parameter

                for name in ("w13_weight", "w2_weight"):
                    replace_parameter(
                        layer,
                        name,
                        cpu_prepack_moe_weight(getattr(layer, name), kernel.isa),
                    )
                self.moe_kernel: Any = SimpleNamespace(fused_experts=kernel)

        self.quant_method = Method()
        shapes = {
            "w13_weight": (3, 2 * inner, 64),
            "w2_weight": (3, 64, inner),
            "w13_bias": (3, 2 * inner),
        }
        for name, shape in {**shapes, "w2_bias": (3, 64)}.items():
            tensor = torch.nn.Parameter(
                torch.randn(shape).to(dtype), requires_grad=False
            )
            tensor.weight_loader = lambda p, t: p.data.copy_(t)  # type: ignore[attr-defined]
            self.register_parameter(name, tensor)


def sync_layer(
    layer: Any, values: dict[str, torch.Tensor], mode: str, version: int = 1
) -> tuple[Weights, Any]:
    """Move these values into a layer as a model of its own; its weights, before the commit, and the digests wanted."""
    from jvlab.engine.tracing._trace import trace_model
    from jvlab.layout._types import CheckpointTensor
    from tests.engine.worker.fake_trainer import FakeTrainer

    def load_weights(tensors: Any) -> None:
        live = dict(layer.named_parameters())
        for name, tensor in tensors:
            live[name].data.copy_(tensor)

    layer.load_weights = load_weights
    kind = str(next(iter(values.values())).dtype).removeprefix("torch.")
    layout = trace_model(
        layer, [CheckpointTensor(n, tuple(t.shape), kind) for n, t in values.items()]
    )
    trainer = FakeTrainer.of([layout])
    weights, links = weights_of(layer, trainer.plan)
    weights.prepare(version, mode, "full", PLENTY)
    shards = trainer.shards({n: t.float().numpy() for n, t in values.items()})
    fill(weights, links, trainer.plan, shards)
    weights.confirm(float("inf"))
    wanted = {
        n: weights.digest(s, values[s.info.name]) for n, s in weights.slots.items()
    }
    return weights, wanted


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize(
    ("inner", "dtype"), [(32, torch.float32), (48, torch.float32), (64, torch.bfloat16)]
)
def test_biases_of_experts_arrive(one_rank, inner: int, dtype: torch.dtype, mode: str):
    """What processing left alone was dropped after its digest had passed; 48 is padded to 64 by vLLM."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        record_metadata_for_reloading,
    )

    torch.manual_seed(0)
    layer: Any = Experts(inner, dtype)
    record_metadata_for_reloading(layer)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    for version in (1, 2):
        values = {n: torch.randn(s).to(dtype) for n, s in shapes.items()}
        weights, wanted = sync_layer(layer, values, mode, version)
        assert weights.found == wanted
        weights.commit()
        assert weights.check()[0] == wanted
        kernel = layer.quant_method.moe_kernel.fused_experts
        assert torch.equal(kernel.w2_bias, values["w2_bias"]), "what the kernel reads"
        assert Counter(weights.how.values()) == {"read back": 4}
        whole = values["w13_weight"].contiguous().view(torch.uint8).numpy().tobytes()
        assert peek(layer, "w13_weight", 0, len(whole))[0] == whole


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("dropped", ["w13_bias", "w2_weight"])
def test_experts_that_processing_drops_do_not_arrive_unseen(
    one_rank, monkeypatch, dropped: str, mode: str
):
    from vllm.model_executor.model_loader.reload.layerwise import (
        record_metadata_for_reloading,
    )

    from jvlab.engine.worker import _weights

    layer: Any = Experts(32, torch.float32)
    record_metadata_for_reloading(layer)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    original = _weights.pack

    def forgetful(*args: Any) -> Any:
        packed = original(*args)
        del packed.tensors[dropped]
        return packed

    monkeypatch.setattr(_weights, "pack", forgetful)
    weights, wanted = sync_layer(
        layer, {n: torch.randn(s) for n, s in shapes.items()}, mode
    )
    wrong = {
        weights.slots[n].info.name
        for n, value in wanted.items()
        if weights.found.get(n) != value
    }
    assert wrong == {dropped}


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("fault", ["stale kernel", "one row", "never placed"])
def test_a_kernel_that_holds_other_weights_does_not_arrive_unseen(
    one_rank, monkeypatch, fault: str, mode: str
):
    from jvlab._errors import VerifyError
    from jvlab.engine.worker import _weights

    torch.manual_seed(3)
    layer = linear(torch.randn(96, 64))
    original = _weights.pack

    def forgetful(live: Any, raw: Any, own: Any, experts: bool) -> Any:
        if fault == "one row":
            raw = {n: t.clone() for n, t in raw.items()}
            raw["weight"][7] *= 1.5
        packed = original(live, raw, own, experts)
        if fault == "stale kernel":
            packed.attributes["cpu_linear"] = live.__dict__["cpu_linear"]
        return packed

    monkeypatch.setattr(_weights, "pack", forgetful)
    if fault == "never placed":
        monkeypatch.setattr(_weights.PackedLayer, "place", lambda packed: None)
    weights, wanted = sync_layer(layer, {"weight": torch.randn(96, 64)}, mode)
    if fault == "never placed":
        with pytest.raises(VerifyError, match="computes with different memory"):
            weights.commit()
    else:
        assert weights.found != wanted


@pytest.mark.vllm
def test_a_check_reads_kernels_back_and_sees_a_change_since(one_rank):
    torch.manual_seed(3)
    layer = linear(torch.randn(96, 64))
    value = torch.randn(96, 64)
    value[3, :5] = -0.0  # kernels lose the sign of zeros
    weights, wanted = sync_layer(layer, {"weight": value}, "direct")
    weights.commit()
    assert weights.check()[0] == wanted
    other = value.clone()
    other[50, 31] += 2**-12
    layer.__dict__["cpu_linear"] = linear(other).__dict__["cpu_linear"]
    assert weights.check()[0] != wanted


def test_memory_that_was_exchanged_does_not_arrive_unseen():
    from jvlab._errors import VerifyError

    world, plan = small()
    model = blank(world, plan, 0)
    weights, links = weights_of(model, plan)
    for version, mode in enumerate(("direct", "staged"), 1):
        weights.prepare(version, mode, "full", PLENTY)
        move(world, plan, weights, links)
        name, old = next(iter(model.named_parameters()))
        *path, leaf = name.split(".")
        owner = model.get_submodule(".".join(path))
        owner._parameters[leaf] = torch.nn.Parameter(
            old.data.clone(), requires_grad=False
        )
        with pytest.raises(
            VerifyError, match="computes with different memory"
        ) as caught:
            weights.commit()
        assert caught.value.fields["parameters"] == [name]
        owner._parameters[leaf] = old

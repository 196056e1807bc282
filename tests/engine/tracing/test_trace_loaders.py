"""Planted loaders: what the tracer says of a loader that computes, casts, re-orders, replaces memory or overwrites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from jvlab._errors import CoverageError, TraceError
from jvlab.engine.tracing._trace import parameter_aliases, trace_model
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import LIVE, OPAQUE
from jvlab.layout._proof import prove
from jvlab.layout._tree import MeshSpec, leaf_from_spec
from jvlab.layout._types import Axis, Binding, CheckpointTensor, RankLayout
from tests.engine.tracing import trace_oracle as oracle
from tests.engine.tracing.model_digest import model_digest

pytestmark = pytest.mark.vllm

Loader = Callable[[torch.nn.Parameter, torch.Tensor], Any]


class Planted(torch.nn.Module):
    """One parameter per checkpoint tensor, and a loader of the test's own."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        load: Loader,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(
                name,
                torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype, device=device)),
            )
        self.load, self.loaded = load, []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            self.load(self.get_parameter(name), tensor)


def trace(
    load: Loader,
    shape: tuple[int, ...] = (4, 6),
    source: tuple[int, ...] | None = None,
    **kinds: Any,
) -> RankLayout:
    """The layout of one parameter `w`; checks that the live model did not change, and rows against a real load."""
    dtype, kept = kinds.get("dtype", torch.float32), kinds.get("kept", "float32")
    layouts = []
    for device in ("meta", "cpu"):
        model = Planted({"w": shape}, load, device, dtype)
        before, attributes = model_digest(model), list(model.loaded)
        layouts.append(
            trace_model(model, [CheckpointTensor("w", source or shape, kept)])
        )
        assert model_digest(model) == before
        assert model.loaded == attributes
    a, b = layouts
    assert (a.opaque, a.padding, a.unused, a.parameters) == (
        b.opaque,
        b.padding,
        b.unused,
        b.parameters,
    )
    assert np.array_equal(a.src_strides, b.src_strides)
    if not a.opaque:
        real = Planted({"w": shape}, load, "cpu", dtype)
        weights = {"w": torch.randn(source or shape).to(getattr(torch, kept))}
        with torch.no_grad():
            real.load_weights([("w", weights["w"].clone())])
        assert oracle.differences(a, real, weights) == []
    return a


def only_reason(layout: RankLayout) -> str:
    assert len(layout.tensor) == 0
    (note,) = layout.opaque
    assert note.name == "w"
    (gap,) = layout.padding
    assert (gap.name, gap.elements) == ("w", 24)
    return note.reason


def test_plain_and_transposed_copies() -> None:
    assert trace(lambda p, w: p.data.copy_(w)).shape.tolist() == [[24]]
    assert trace(
        lambda p, w: p.data.copy_(w.t()), source=(6, 4)
    ).src_strides.tolist() == [[1, 4]]


REORDERINGS = (
    "regroup",
    "contiguous",
    "cat",
    "cat1",
    "reversed",
    "rows",
    "widen",
    "device",
    "broadcast",
    "scalar",
)


def regroup(p: torch.nn.Parameter, w: torch.Tensor) -> None:
    """As old GPT-NeoX checkpoints need it: [heads, 3, dim] rows to [3, heads, dim], a real copy in between."""
    heads, dim = 2, 3
    p.data.copy_(w.view(heads, 3, dim, -1).transpose(0, 1).reshape(w.shape))


@pytest.mark.parametrize(
    "load",
    [
        regroup,
        lambda p, w: p.data.copy_(w.t().contiguous().t()),
        lambda p, w: p.data.copy_(torch.cat([w[9:], w[:9]])),
        lambda p, w: p.data.copy_(torch.cat([w[:, 2:], w[:, :2]], dim=1)),
        lambda p, w: [p.data[i].copy_(w[17 - i]) for i in range(18)],
        lambda p, w: [p.data[i].copy_(w[i]) for i in range(18)],
        lambda p, w: p.data.copy_(w.to(torch.float64)),
        lambda p, w: p.data.copy_(w.to(p.device).clone()),
        lambda p, w: p.data.copy_(w[:1]),
        lambda p, w: p.data[:, 0].copy_(w[0, 0]),
    ],
    ids=REORDERINGS,
)
def test_reorderings_are_followed_exactly(load: Loader) -> None:
    assert trace(load, shape=(18, 5)).opaque == ()


def test_reorderings_inside_inference_mode() -> None:
    with torch.inference_mode():
        model = Planted({"w": (18, 5)}, regroup, "cpu", torch.float32)
        layout = trace_model(model, [CheckpointTensor("w", (18, 5), "float32")])
    assert layout.opaque == ()
    assert len(layout.tensor) == 1


def test_rows_of_neighbours_are_joined() -> None:
    assert (
        len(trace(lambda p, w: [p.data[i].copy_(w[i]) for i in range(4)]).tensor) == 1
    )


COMPUTED: dict[str, tuple[Loader, str]] = {
    "add": (lambda p, w: p.data.copy_(w + 1), "computes"),
    "in place": (lambda p, w: (p.data.copy_(w), p.data.add_(1)), "in place"),
    "of itself": (
        lambda p, w: (p.data.copy_(w), p.data.copy_(-p.data.exp())),
        "computed value",
    ),
    "of both": (lambda p, w: p.data.mul_(w), "in place"),
    "narrow cast": (lambda p, w: p.data.copy_(w.to(torch.float16)), "float16"),
    "bits": (lambda p, w: p.data.view(torch.int32).copy_(w.view(torch.int32)), "bits"),
    "bits read": (lambda p, w: p.data.copy_(w.view(torch.int32)), "bits are read"),
    "temporary": (lambda p, w: p.data.copy_(torch.empty_like(w).copy_(w)), "temporary"),
    "gather": (lambda p, w: p.data.copy_(w[torch.tensor([3, 1, 0, 2])]), "computes"),
    "value": (lambda p, w: p.data.fill_(float(w[0, 0])), "reads its values"),
    "branch": (
        lambda p, w: p.data.copy_(w if bool(w.sum() > 0) else -w),
        "reads its values",
    ),
    "mutated": (lambda p, w: p.data.copy_(w.mul_(2)), "computes"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_loader_that_computes_is_opaque(case: str) -> None:
    load, words = COMPUTED[case]
    assert words in only_reason(trace(load))


@pytest.mark.parametrize("case", COMPUTED)
def test_what_an_opaque_tensor_fills_can_be_planned(case: str) -> None:
    """No gap: the tensor goes whole to a buffer of its own, and load_weights fills the parameter from there."""
    layout = trace(COMPUTED[case][0])
    assert [(n.kind, n.reason) for n in layout.padding] == [
        ("opaque", "filled by the opaque w")
    ]
    made = planned(layout)
    assert [int(k) for k in made.target_kind] == [LIVE, OPAQUE]
    assert made.target_padding.tolist() == [24, 0]


def planned(layout: RankLayout) -> TransferPlan:
    leaves = [
        leaf_from_spec(t.name, t.shape, t.dtype, MeshSpec.parse("x=1"))
        for t in layout.tensors
    ]
    bindings = [
        Binding(
            t.name,
            t.name,
            t.shape,
            t.shape,
            (0,) * len(t.shape),
            (0,) * len(t.shape),
            tuple(Axis(n, d, 1, d, 1) for d, n in enumerate(t.shape)),
        )
        for t in layout.tensors
    ]
    made = compile_plan(leaves, bindings, [layout])
    prove(made, bindings, [layout])
    return made


def test_a_constant_over_what_was_copied_is_opaque() -> None:
    """The last rows end as zeros: a row that says otherwise would let a sync write them."""
    after: list[Loader] = [
        lambda p, w: (p.data.copy_(w), p.data[2:].zero_()),
        lambda p, w: (p.data.copy_(w), p.data[:, 5].fill_(3.0)),
        lambda p, w: (p.data.copy_(w), p.data.zero_()),
    ]
    for load in after:
        layout = trace(load)
        assert "then fills" in only_reason(layout)
        assert {n.kind for n in layout.padding} == {"opaque"}
        planned(layout)


def test_a_constant_beside_or_before_a_copy_is_padding() -> None:
    beside = trace(
        lambda p, w: (p.data[:3].copy_(w), p.data[3:].fill_(0.0)), source=(3, 6)
    )
    before = trace(lambda p, w: (p.data.fill_(0.0), p.data[:3].copy_(w)), source=(3, 6))
    for layout in (beside, before):
        assert layout.opaque == ()
        (note,) = layout.padding
        assert (note.kind, note.elements, note.reason) == (
            "constant",
            6,
            "the loader fills them with 0",
        )
        planned(layout)
    assert (
        trace(
            lambda p, w: (p.data.zero_(), p.data.copy_(w), p.data[4:].zero_())
        ).padding
        == ()
    )


@pytest.mark.parametrize(
    "more", [lambda p: None, lambda p: p.data[3:].zero_(), lambda p: p.data[4:].zero_()]
)
def test_what_nothing_fills_is_a_gap_though_the_rest_is_padded(
    more: Callable[[torch.nn.Parameter], Any],
) -> None:
    """As with k_proj left out of a fused parameter: neither a constant nor an opaque part elsewhere excuses it."""
    plain = trace(lambda p, w: (p.data[:2].copy_(w), more(p)), source=(2, 6))
    opaque = trace(lambda p, w: (p.data[:2].copy_(w + 1), more(p)), source=(2, 6))
    for layout in (plain, opaque):
        gaps = [n for n in layout.padding if n.kind == "gap"]
        assert [n.reason for n in gaps] == ["no checkpoint tensor given fills them"]
        assert sum(n.elements for n in layout.padding) == (24 if layout.opaque else 12)
        with pytest.raises(CoverageError, match=r"parameter of shape \(4, 6\)"):
            planned(layout)


def test_replaced_memory_is_opaque_and_put_back() -> None:
    def replace(p: torch.nn.Parameter, w: torch.Tensor) -> None:
        p.data = w

    model = Planted({"w": (4, 6)}, replace, "meta", torch.float32)
    memory = model.get_parameter("w").untyped_storage()._cdata
    layout = trace_model(model, [CheckpointTensor("w", (4, 6), "float32")])
    assert "replaces the memory" in only_reason(layout)
    assert model.get_parameter("w").untyped_storage()._cdata == memory


def test_a_cast_that_ends_in_the_parameters_dtype_is_exact() -> None:
    layout = trace(
        lambda p, w: p.data.copy_(w.to(torch.bfloat16).to(torch.float32)),
        dtype=torch.bfloat16,
    )
    assert layout.opaque == ()
    assert "bfloat16" in only_reason(
        trace(lambda p, w: p.data.copy_(w.to(torch.bfloat16)))
    )


def test_the_last_write_wins_and_half_an_overlap_is_opaque() -> None:
    shapes = {"a": (4, 6), "b": (4, 6)}
    tensors = [CheckpointTensor(n, s, "float32") for n, s in shapes.items()]
    model = Planted(
        {"a": (4, 6), "b": (2,)},
        lambda p, w: model.get_parameter("a").data.copy_(w),
        "meta",
        torch.float32,
    )
    layout = trace_model(model, tensors)
    assert [layout.tensors[i].name for i in layout.tensor] == ["b"]
    assert layout.unused == ("a",)
    model.load = lambda p, w: (
        model.get_parameter("a")
        .data[0 if p is model.get_parameter("a") else 3 :]
        .copy_(w[0 if p is model.get_parameter("a") else 3 :])
    )
    layout = trace_model(model, tensors)
    assert [n.name for n in layout.opaque] == ["a"]
    assert "overwritten" in layout.opaque[0].reason


def test_shared_memory_is_one_parameter_and_its_other_name_is_told() -> None:
    model = Planted({"w": (4, 6)}, lambda p, w: p.data.copy_(w), "cpu", torch.float32)
    model.register_parameter("v", torch.nn.Parameter(model.get_parameter("w").data))
    layout = trace_model(model, [CheckpointTensor("w", (4, 6), "float32")])
    assert [p.name for p in layout.parameters] == ["w"]
    assert parameter_aliases(model) == [("v", "w")]


def test_two_parameters_in_one_storage_keep_their_own_offsets() -> None:
    pool = torch.zeros(48)
    model = Planted({}, lambda p, w: p.data.copy_(w), "cpu", torch.float32)
    for i, name in enumerate(("a", "b")):
        model.register_parameter(
            name, torch.nn.Parameter(pool[24 * i : 24 * i + 24].view(4, 6))
        )
    layout = trace_model(
        model, [CheckpointTensor(n, (4, 6), "float32") for n in ("b", "a")]
    )
    assert [
        (layout.parameters[p].name, o)
        for p, o in zip(layout.parameter, layout.dst_offset, strict=True)
    ] == [
        ("b", 0),
        ("a", 0),
    ]
    assert float(pool.abs().sum()) == 0


def test_a_loaded_buffer_counts_as_a_parameter_and_others_do_not() -> None:
    model = Planted({}, lambda p, w: None, "cpu", torch.float32)
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("table", torch.zeros(5))
    model.load_weights = lambda weights: [
        model.get_buffer("mean").copy_(w) for _, w in weights
    ]  # type: ignore[method-assign]
    layout = trace_model(model, [CheckpointTensor("mean", (3,), "float32")])
    assert [p.name for p in layout.parameters] == ["mean"]
    assert float(model.get_buffer("mean").abs().sum()) == 0


def test_a_loader_that_fails_half_way_leaves_the_model_alone() -> None:
    def fail(p: torch.nn.Parameter, w: torch.Tensor) -> None:
        p.data.copy_(w)
        p.note = "half"  # type: ignore[attr-defined]
        raise KeyError("no such thing")

    model = Planted({"w": (4, 6)}, fail, "cpu", torch.float32)
    before = model_digest(model)
    with pytest.raises(
        TraceError,
        match=r"Planted refused checkpoint tensor w \(4, 6\): KeyError: 'no such thing'",
    ) as caught:
        trace_model(model, [CheckpointTensor("w", (4, 6), "float32")])
    assert caught.value.fields["tensor"] == "w"
    assert model_digest(model) == before
    assert not hasattr(model.get_parameter("w"), "note")
    assert model.loaded == []


def test_a_dtype_torch_does_not_have() -> None:
    model = Planted({"w": (4, 6)}, lambda p, w: None, "meta", torch.float32)
    with pytest.raises(TraceError, match="'bf16'"):
        trace_model(model, [CheckpointTensor("w", (4, 6), "bf16")])


def test_a_copy_into_no_parameter_is_opaque() -> None:
    assert "not a parameter" in only_reason(
        trace(lambda p, w: torch.empty(w.shape).copy_(w))
    )


def test_a_name_given_twice() -> None:
    model = Planted({"w": (4, 6)}, lambda p, w: p.data.copy_(w), "meta", torch.float32)
    with pytest.raises(TraceError, match="listed twice: w"):
        trace_model(model, [CheckpointTensor("w", (4, 6), "float32")] * 2)


def test_the_digest_sees_one_changed_bit() -> None:
    model = Planted({"w": (4, 6)}, lambda p, w: None, "cpu", torch.float32)
    before = model_digest(model)
    model.get_parameter("w").data.view(torch.int32)[3, 5] ^= 1
    assert model_digest(model) != before

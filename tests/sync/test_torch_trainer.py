"""Torch trainers: where their tensors can go, and which error comes where they can't."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jvlab._errors import ConfigError, LayoutError, Unsupported
from jvlab.layout._compile import compile_plan
from jvlab.layout._plan import TransferPlan
from jvlab.layout._tree import checkpoint_names, cuda_ordinals, flatten, leaves_of
from jvlab.layout._types import CheckpointTensor, Parameter, RankLayout
from jvlab.sync._compile_tree import bind_rules
from jvlab.sync._connections import _choose, _key
from jvlab.sync._ipc_senders import KnownTensors
from jvlab.sync._pack import Source

torch = pytest.importorskip("torch")


def plan_of(arrays: Any, dtype: str = "float32") -> TransferPlan:
    """Every leaf as it is into a parameter of its name, on one rank."""
    tensors = [
        CheckpointTensor(path, tuple(a.shape), dtype) for path, a in arrays.items()
    ]
    kept, _, rules = checkpoint_names(arrays, "auto", tensors)
    assert rules == "checkpoint"
    _, bindings = bind_rules(rules, flatten(kept).shapes, tensors, {})
    sizes = [int(np.prod(t.shape)) for t in tensors]
    one, n = (
        np.ones((len(tensors), 1), np.int64),
        np.arange(len(tensors), dtype=np.int32),
    )
    zero = np.zeros(len(tensors), np.int64)
    parameters = tuple(
        Parameter(t.name, (s,), dtype, (1,))
        for t, s in zip(tensors, sizes, strict=True)
    )
    layout = RankLayout(
        0,
        (("tp", 0),),
        tuple(tensors),
        parameters,
        n,
        n,
        np.array(sizes, np.int64)[:, None],
        zero,
        one,
        zero,
        one,
    )
    return compile_plan(leaves_of(kept), bindings, [layout])


def pool_on(device: str, one_process: bool = False) -> Any:
    snapshot = SimpleNamespace(device=device)
    return SimpleNamespace(snapshot=snapshot, one_process=one_process)


@pytest.fixture
def arrays() -> Any:
    return flatten({"a.weight": torch.randn(4, 6), "b.weight": torch.randn(6)}).arrays


def test_the_host_carries_torch(arrays: Any):
    assert (
        _choose("auto", True, arrays, plan_of(arrays), 1, pool_on("cpu"), True)[0]
        == "shm"
    )
    assert (
        _choose("auto", False, arrays, plan_of(arrays), 1, pool_on("cpu"), True)[0]
        == "tcp"
    )


def test_a_gpu_engine_and_tensors_on_the_host_are_refused_with_a_way_out(arrays: Any):
    for wanted in ("auto", "ipc", "nccl"):
        with pytest.raises(Unsupported, match="on a GPU") as caught:
            _choose(wanted, True, arrays, plan_of(arrays), 1, pool_on("cuda"), True)
        assert 'model.to("cuda")' in caught.value.remedy
    assert cuda_ordinals(arrays) == {}


def test_ipc_reads_torch_by_its_own_pointers():
    """tests/gpu/test_torch_cuda_gpu.py has the kernels; what they are given is known without a GPU."""
    strided = torch.randn(6, 4).T
    tree = {"a.weight": strided, "b.weight": torch.randn(6)}
    plan = plan_of(flatten(tree).arrays)
    known = KnownTensors(plan)
    source = known.source(tree)
    source.settle()
    copy, own = source.shards(["a.weight", "b.weight"], 0)
    assert own.data_ptr() == tree["b.weight"].data_ptr()
    assert copy.is_contiguous()
    assert torch.equal(copy, strided)
    assert set(source.by_path) == set(tree)
    # the same shapes again are not looked at closely; others are
    assert (
        known.source({name: t + 1 for name, t in tree.items()}).memory("a", 0) is None
    )
    with pytest.raises(LayoutError, match="now float16"):
        known.source({name: t.half() for name, t in tree.items()})
    with pytest.raises(LayoutError, match="is missing now"):
        known.source({"b.weight": tree["b.weight"]})


def test_a_module_is_sent_as_its_state_dict():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(6, 4, bias=False)
            self.head = torch.nn.Linear(6, 4, bias=False)
            self.head.weight = self.a.weight

    model = Tied()
    named = {"a.weight": model.a.weight.detach()}
    known = KnownTensors(plan_of(flatten(named).arrays))
    with pytest.raises(LayoutError, match=r"head\.weight: is new"):
        known.source(model)  # a plan that has never seen the tied name
    arrays = flatten(model).arrays
    kept, notes, rules = checkpoint_names(
        arrays, "auto", [CheckpointTensor("a.weight", (4, 6), "float32")]
    )
    assert (list(kept), rules) == (["a.weight"], "checkpoint")
    assert "the same memory as a.weight" in notes[0].reason


def test_the_remedy_works_here():
    """Arrays by DLPack are leaves of JAX, with the same numbers."""
    import jax

    tree = {"a.weight": torch.randn(4, 6), "b.weight": torch.randn(6)}
    handed = {name: jax.dlpack.from_dlpack(t) for name, t in tree.items()}
    assert all(
        np.array_equal(np.asarray(a), tree[name].numpy())
        for name, a in flatten(handed).arrays.items()
    )


def test_several_processes_never_get_ipc_or_an_engine_in_one_of_them(arrays: Any):
    with pytest.raises(ConfigError, match="trainer of several processes"):
        _choose("auto", True, arrays, plan_of(arrays), 1, pool_on("cpu", True), False)
    with pytest.raises(
        ConfigError,
        match="ipc: the parameters are spread over several trainer processes",
    ):
        _choose("ipc", True, arrays, plan_of(arrays), 1, pool_on("cpu"), False)


def test_what_changed_since_connect_is_one_error(arrays: Any):
    plan = plan_of(arrays)
    Source(plan, arrays)
    later = flatten(
        {"a.weight": torch.randn(4, 6).half(), "b.weight": torch.randn(7)}
    ).arrays
    with pytest.raises(LayoutError, match="2 of 2 leaves differ") as caught:
        Source(plan, later)
    assert (
        "a.weight: connected as float32(4, 6), now float16(4, 6)"
        in caught.value.message
    )
    import jax.numpy as jnp

    # whose they are does not matter
    Source(plan, {"a.weight": jnp.zeros((4, 6)), "b.weight": np.zeros(6, np.float32)})


def test_a_tensor_that_moved_to_another_device_is_planned_anew():
    """Torch's whole tensors have no sharding; what differs is where they are."""

    def key(platform: str) -> Any:
        place = SimpleNamespace(platform=platform)
        leaf = SimpleNamespace(shape=(2,), dtype="float32", devices=lambda: [place])
        return _key({"w": leaf}, cast(Any, SimpleNamespace(name="pool")), {})

    assert key("cuda") == key("cuda")
    assert key("cuda") != key("cpu")

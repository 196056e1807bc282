"""The launch tables of the ipc transport, run by a numpy interpreter of the kernels, against the plan's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jvlab._errors import LayoutError, Unsupported
from jvlab.layout._compile import compile_plan
from jvlab.layout._digest import MASK, box_digest, row_elements
from jvlab.layout._plan import TransferPlan
from jvlab.layout._plan_types import ValueTransform, convert, numpy_dtype
from jvlab.layout._tree import MeshSpec
from jvlab.transport import _ipc_tables as ipc
from tests.fuzzing import examples, soak_but
from tests.layout.plan_interpreter import execute
from tests.layout.plan_world import Size, World, transformer
from tests.layout.test_plan_random import worlds
from tests.transport import ipc_emulator
from tests.transport.ipc_interpreter import find, run

pytestmark = pytest.mark.slow

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def values(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Numbers of every magnitude that rounding must get right; bits of all kinds where nothing is computed."""
    if dtype in ipc.FLOATS:
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(
            numpy_dtype(dtype)
        )
    return rng.integers(0, 256, count * numpy_dtype(dtype).itemsize, np.uint8).view(
        numpy_dtype(dtype)
    )


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_plan(plan: TransferPlan, world: World, replica: int = 0) -> None:
    """Both sides of a sync by tables: memory as the plan's interpreter leaves it, digests as numpy takes them."""
    shards = world.shards()
    wanted, got = world.blank_params(plan), world.blank_params(plan)
    execute(plan, shards, wanted, mode="direct", replica=replica)
    for rank in range(plan.ranks):
        links = ipc.whole_links(plan, rank, replica)
        numbers = sorted({int(t) for link in links for t in link.target})
        slot = {t: k for k, t in enumerate(numbers)}
        memory = [
            got[rank, plan.parameters[int(plan.target_parameter[t])].name].reshape(-1)
            for t in numbers
        ]
        sent = [0] * len(numbers)
        for link in links:
            used = {
                int(leaf): k for k, leaf in enumerate(np.unique(link.leaf).tolist())
            }
            sources = [
                shards[plan.leaves[leaf].path, link.device].reshape(-1) for leaf in used
            ]
            parts = run(
                ipc.tables(ipc.link_pieces(plan, link, used, slot)),
                sources,
                memory,
                len(numbers),
            )
            sent = [(x + y) & MASK for x, y in zip(sent, parts, strict=True)]
        found = run(
            ipc.tables(ipc.digest_pieces(plan, links, slot)),
            memory,
            memory,
            len(numbers),
            write=False,
        )
        assert found == sent
        assert found == [reference(plan, links, t, memory[slot[t]]) for t in numbers]
    for key, array in wanted.items():
        np.testing.assert_array_equal(bits(got[key]), bits(array), err_msg=str(key))


def reference(plan: TransferPlan, links: list, t: int, memory: np.ndarray) -> int:
    info, total = plan.parameters[int(plan.target_parameter[t])], 0
    for link in links:
        for i in np.flatnonzero(link.target == t).tolist():
            strides = link.dst_strides[i].tolist()
            at = np.lib.stride_tricks.as_strided(
                memory[int(link.dst_offset[i]) :],
                link.shape[i].tolist(),
                [s * memory.itemsize for s in strides],
            )
            row = row_elements(info.shape, info.strides)
            total += box_digest(at.copy(), int(link.dst_offset[i]), strides, row)
    return total & MASK


@settings(max_examples=examples(40), deadline=None, suppress_health_check=QUIET)
@given(world=worlds(), bucket=st.sampled_from([32, 1 << 20]))
def test_random_worlds(world: World, bucket: int) -> None:
    plan = compile_plan(
        world.leaves, world.bindings, world.layouts, bucket_mib=bucket / (1 << 20)
    )
    check_plan(plan, world)


@pytest.mark.parametrize(
    "layout", ["einsum", "dense", "checkpoint", "scanned", "fused"]
)
@pytest.mark.parametrize(
    ("tp", "mesh", "dtype"), [(1, "fsdp=1", "bfloat16"), (2, "fsdp=3", "float16")]
)
def test_transformers(layout: str, tp: int, mesh: str, dtype: str) -> None:
    size = Size(d=72, n=4, k=2, h=10, f=34, vocab=70, layers=1, experts=2)
    world = World(MeshSpec.parse(mesh), tp, dtype=dtype)
    transformer(world, size, layout=layout, rotary=layout != "fused")
    check_plan(
        compile_plan(world.leaves, world.bindings, world.layouts, replicas=2),
        world,
        replica=1,
    )


AXES = st.lists(
    st.sampled_from([1, 2, 3, 5, 8, 16, 31, 64, 66, 130]), min_size=1, max_size=5
).filter(lambda shape: math.prod(shape) <= 40_000)
LAWS = [
    ValueTransform("bfloat16", "bfloat16"),
    ValueTransform("float32", "bfloat16"),
    ValueTransform("float32", "float16"),
    ValueTransform("bfloat16", "float32"),
    ValueTransform("float16", "bfloat16"),
    ValueTransform("bfloat16", "float16"),
    ValueTransform("float32", "float32"),
    ValueTransform("uint8", "uint8"),
    ValueTransform("int64", "int64"),
    ValueTransform("bfloat16", "bfloat16", add=1.0),
    ValueTransform("float32", "float32", cast="bfloat16"),
    ValueTransform("float32", "float16", add=1.0, cast="bfloat16"),
]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[ipc.IpcBox, int, int]:
    """A box in any order of axes on both sides, with gaps, at any offset, in a target of any line length."""
    shape = draw(AXES)
    gap = draw(st.sampled_from([0, 0, 0, 1, 8]))
    strides = []
    for order in (
        draw(st.permutations(range(len(shape)))),
        draw(st.permutations(range(len(shape)))),
    ):
        out, step = [0] * len(shape), 1
        for k in order:
            out[k] = step
            step = step * shape[k] + gap
        strides.append(out)
    src, dst = draw(st.sampled_from([0, 0, 8, 3])), draw(st.sampled_from([0, 0, 8, 5]))
    reach = [
        1 + sum((n - 1) * s for n, s in zip(shape, ss, strict=True)) for ss in strides
    ]
    row = draw(st.sampled_from([1, 2, 7, 64, *shape, max(strides[1])]))
    transform = draw(st.sampled_from(LAWS))
    axes = tuple(zip(shape, *strides, strict=True))
    return (
        ipc.IpcBox(0, src, 0, dst, axes, transform, row, 0),
        src + reach[0],
        dst + reach[1],
    )


@settings(max_examples=examples(150), deadline=None, suppress_health_check=QUIET)
@given(made=pieces(), digest=st.booleans(), seed=st.integers(0, 99))
def test_any_box(made: tuple[ipc.IpcBox, int, int], digest: bool, seed: int) -> None:
    piece, n, m = made
    source = values(np.random.default_rng(seed), n, piece.transform.source)
    got = np.zeros(m, numpy_dtype(piece.transform.wire))
    wanted = got.copy()
    shape = [a[0] for a in piece.axes]
    view = lambda flat, at, k: np.lib.stride_tricks.as_strided(
        flat[at:], shape, [a[k] * flat.itemsize for a in piece.axes]
    )
    result = convert(view(source, piece.src, 1), piece.transform)
    view(wanted, piece.dst, 2)[...] = result
    (found,) = run(ipc.tables([piece]), [source], [got], 1, digest=digest)
    np.testing.assert_array_equal(bits(got), bits(wanted))
    assert found == box_digest(result, piece.dst, [a[2] for a in piece.axes], piece.row)


def test_forms_and_vectors() -> None:
    """What must be quick takes the quick way: whole lines, tabulated weights, 16 bytes at once."""
    bf16 = ValueTransform("bfloat16", "bfloat16")
    quick = ipc.SEPARABLE | ipc.LOAD | ipc.STORE
    out_in, two, half, heads, d = 4096, 2, 64, 32, 2048
    kernel = ipc.IpcBox(0, 0, 0, 0, ((d, out_in, 1), (out_in, 1, d)), bf16, d, 0)
    flat = ipc.IpcBox(0, 0, 0, 3 * d, ((d * 500, 1, 1),), bf16, d, 0)
    rotary = (
        (d, heads * 128, 1),
        (heads, 128, 128 * d),
        (half, 2, d),
        (two, 1, half * d),
    )
    turned = ipc.IpcBox(0, 0, 0, 0, rotary, bf16, d, 0)
    for piece, form, blocks in (
        (kernel, "tiles", 16 * 32),
        (flat, "rows", 500 // 16 + 1),
        (turned, "tiles", 32 * 32),
    ):
        (table,) = ipc.tables([piece])
        assert table.program.form == form
        assert table.entries[:, ipc.AT["flags"]].tolist() == [quick]
        assert table.blocks == blocks
        assert table.nbytes == piece.count * 2


def test_search_over_many_entries() -> None:
    pieces = [
        ipc.IpcBox(
            0,
            8 * k,
            0,
            8 * k,
            ((5000 + k, 1, 1),),
            ValueTransform("uint8", "uint8"),
            8,
            0,
        )
        for k in range(1100)
    ]
    (table,) = [t for t in ipc.tables(pieces) if t.program.form == "rows"]
    ends = np.append(table.first[1:], table.blocks)
    for k, block in itertools.product([0, 1, 31, 32, 33, len(ends) - 1], [0, -1]):
        at = int(table.first[k]) if block == 0 else int(ends[k]) - 1
        entry, within = find(table, at)
        assert entry["dst"] == table.entries[k, ipc.AT["dst"]]
        assert within == at - int(table.first[k])


@pytest.mark.parametrize(
    "transform",
    [
        ValueTransform("float64", "bfloat16"),
        ValueTransform("float32", "float8_e4m3fn"),
        ValueTransform("int32", "int32", add=1.0),
    ],
)
def test_what_no_kernel_converts(transform: ValueTransform) -> None:
    with pytest.raises(Unsupported, match="can only be copied as it is"):
        ipc.tables([ipc.IpcBox(0, 0, 0, 0, ((4, 1, 1),), transform, 4, 0)])


# ---- the CUDA source itself, on the CPU -----------------------------------------------------------------------------

SHAPES = [
    (70, 130),
    (7, 3, 33),
    (3, 2, 64, 20),
    (1000,),
    (2, 3, 2, 3, 2, 3),
    (128, 8),
    (2, 64, 40),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if ipc_emulator.COMPILER is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("kernels")


def boxes_of(transform: ValueTransform) -> Iterator[tuple[ipc.IpcBox, int, int]]:
    """Boxes in several orders, with and without gaps and odd offsets."""
    rng = np.random.default_rng(len(transform.source) * 31 + len(transform.wire))
    # what most weights of a Flax tree are: (in, out) to (out, in)
    turned = ((128, 320, 1), (320, 1, 128))
    yield ipc.IpcBox(0, 0, 0, 0, turned, transform, 128, 0), 128 * 320, 128 * 320
    yield (
        ipc.IpcBox(0, 0, 0, 64, ((40, 320, 320), (256, 1, 1)), transform, 320, 0),
        40 * 320,
        64 + 40 * 320,
    )
    for k, shape in enumerate(SHAPES):
        for gap, src, dst in (
            (0, 0, 0),
            (8, 16, 32),
            ((1, 3, 5) if k % 2 else (0, 3, 16)),
        ):
            strides = []
            for _ in range(2):
                out, step = [0] * len(shape), 1
                for axis in rng.permutation(len(shape)).tolist():
                    out[axis] = step
                    step = step * shape[axis] + gap
                strides.append(out)
            reach = [
                1 + sum((n - 1) * s for n, s in zip(shape, ss, strict=True))
                for ss in strides
            ]
            row = int(rng.choice([1, 7, 64, *shape, *[s for s in strides[1] if s > 1]]))
            axes = tuple(zip(shape, *strides, strict=True))
            yield (
                ipc.IpcBox(0, src, 0, dst, axes, transform, row, 0),
                src + reach[0],
                dst + reach[1],
            )


@pytest.mark.parametrize(
    "transform",
    soak_but(LAWS[1:2], LAWS[:4] + LAWS[6:9] + LAWS[-1:]),
    ids=lambda transform: f"{transform.source}-{transform.wire}-{transform.add:g}",
)
def test_cuda_source(transform: ValueTransform, folder: Path) -> None:
    rng, seen = np.random.default_rng(0), set()
    for piece, n, m in boxes_of(transform):
        source, got = (
            aligned(values(rng, n, transform.source)),
            aligned(np.zeros(m, numpy_dtype(transform.wire))),
        )
        wanted = got.copy()
        (digest,) = run(ipc.tables([piece]), [source], [wanted], 1)
        made = ipc.tables([piece])
        seen |= {(t.program.form, t.program.quick) for t in made}
        found, refused = ipc_emulator.run(made, [source], [got], 1, folder)
        np.testing.assert_array_equal(bits(got), bits(wanted), err_msg=str(piece))
        assert (found, refused) == ([digest], 0), piece
        got[:] = 0
        slow = ipc.tables([piece], aligned=False)
        assert ipc_emulator.run(slow, [source], [got], 1, folder)[0] == [digest]
        np.testing.assert_array_equal(bits(got), bits(wanted))
    assert seen == {("rows", True), ("rows", False), ("tiles", True), ("tiles", False)}


@pytest.mark.parametrize(
    "transform",
    soak_but(
        [ValueTransform("float8_e4m3fn", "float8_e4m3fn")],
        [
            *LAWS[:2],
            LAWS[6],
            LAWS[-1],
            ValueTransform("float64", "float64"),
            ValueTransform("float8_e4m3fn", "float8_e4m3fn"),
        ],
    ),
    ids=lambda transform: f"{transform.source}-{transform.wire}-{transform.add:g}",
)
def test_cuda_source_finds_poison(transform: ValueTransform, folder: Path) -> None:
    """NaN, Inf, and what overflows in the cast, at any place of a box and nowhere else; with digests and without."""
    rng = np.random.default_rng(1)
    kind, words = (
        numpy_dtype(transform.source),
        f"u{numpy_dtype(transform.source).itemsize}",
    )  # numpy can't stride 8-bit floats
    for number, (piece, n, m) in enumerate(boxes_of(transform)):
        view = lambda flat, piece=piece: np.lib.stride_tricks.as_strided(
            flat.view(words)[piece.src :],
            [a[0] for a in piece.axes],
            [a[1] * flat.itemsize for a in piece.axes],
        ).view(kind)
        source = aligned(np.zeros(n, kind))
        # finite, also where the box does not read
        source[:] = (np.arange(n) % 7).astype(kind)
        bad = (
            [np.nan, np.inf, -np.inf, 3.4e38]
            if transform.source != transform.wire or transform.cast
            else [np.nan, np.inf, -np.inf]
        )
        bad = [np.nan] if transform.source == "float8_e4m3fn" else bad  # it has no Inf
        for planted in (None, bad[number % len(bad)]):
            given = aligned(source)
            if planted is not None:
                at = tuple(int(rng.integers(size)) for size in view(given).shape)
                view(given)[at] = np.array(planted).astype(kind)
            with np.errstate(all="ignore"):
                wire = convert(view(given), transform)
                wanted = [] if np.isfinite(wire.astype(np.float64)).all() else [0]
            assert bool(wanted) == (planted is not None), planted
            for digest, straight in ((True, number % 2 == 0), (False, True)):
                flawed: list[int] = [9]
                got = aligned(np.zeros(m, numpy_dtype(transform.wire)))
                made = ipc.tables([piece], aligned=straight)
                ipc_emulator.run(
                    made, [given], [got], 1, folder, digest=digest, flawed=flawed
                )
                assert flawed == wanted, (piece, planted)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a 64-byte boundary, as device memory does."""
    room = np.empty(array.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 64
    out = room[at : at + array.nbytes].view(array.dtype)
    out[:] = array
    return out


def test_digest_alone_and_no_permit(folder: Path) -> None:
    transform = ValueTransform("bfloat16", "bfloat16")
    piece = ipc.IpcBox(0, 0, 0, 0, ((300, 64, 1), (64, 1, 300)), transform, 300, 0)
    source, got = (
        aligned(values(np.random.default_rng(0), 300 * 64, "bfloat16")),
        aligned(np.zeros(300 * 64, np.uint16)),
    )
    made = ipc.tables([piece])
    _, refused = ipc_emulator.run(made, [source], [got], 1, folder, permit=6, version=7)
    assert refused == sum(t.blocks for t in made)
    assert not got.any(), "a writer without a permit writes nothing"
    (without,), _ = ipc_emulator.run(made, [source], [got], 1, folder, write=False)
    assert not got.any()
    (written,), refused = ipc_emulator.run(
        made, [source], [got], 1, folder, permit=7, version=7
    )
    assert refused == 0
    assert without == written == box_digest(source.reshape(300, 64), 0, (1, 300), 300)
    ipc_emulator.run(made, [source], [got], 1, folder, digest=False)
    whole = ipc.tables([ipc.IpcBox(0, 0, 0, 0, ((got.size, 1, 1),), transform, 300, 0)])
    assert ipc_emulator.run(whole, [got], [got], 1, folder, write=False)[0] == [written]


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_known_arrays_are_compared_and_others_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jvlab.sync import _ipc_senders

    world = World(MeshSpec.parse("fsdp=2"), 1)
    world.leaf("w", (8, 6), ("fsdp", None))
    world.tensor("t", (8, 6))
    world.bind("w", "t", [(8, 0, 1, 0, 1), (6, 1, 1, 1, 1)])
    parameter = world.loaders[0].parameter("p", (8, 6))
    both = (slice(None), slice(None))
    world.loaders[0].copy(world.tensors["t"], both, parameter, both)
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("fsdp",))
    put = lambda dtype, *spec: jax.device_put(
        np.ones((8, 6), dtype), NamedSharding(mesh, PartitionSpec(*spec))
    )
    known, looks = _ipc_senders.KnownArrays(plan), []
    check = _ipc_senders.check_like_connected
    monkeypatch.setattr(
        _ipc_senders,
        "check_like_connected",
        lambda *args: looks.append(1) or check(*args),
    )
    for _ in range(3):
        shards = known.source({"w": put("float32", "fsdp")})
        assert [shards.shard("w", d).shape for d in (0, 1)] == [(4, 6), (4, 6)]
    assert len(looks) == 1
    gone = put("float32", "fsdp")
    gone.delete()
    for arrays in (
        {"w": put("float32", None, "fsdp")},
        {"w": put("int32", "fsdp")},
        {},
        {"w": gone},
    ):
        with pytest.raises(LayoutError, match="differ from what was connected"):
            known.source(arrays)

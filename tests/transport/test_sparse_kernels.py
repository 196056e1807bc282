"""The CUDA source of sparse buckets, compiled by the C++ compiler and run on the CPU, against numpy."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jvlab._errors import Unsupported
from jvlab.layout import _sparse
from jvlab.transport import _sparse_kernels
from tests.transport.ipc_emulator import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
# The n-th vote of a lane is the n-th of all: a first run of a warp collects the votes, a second one reads them.
SHIM = r"""
#define __device__
#define __global__
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim;
static unsigned collected[64], votes;
static bool reads;
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned __ballot_sync(unsigned, bool vote) {
  if (!reads) collected[votes] |= (unsigned)vote << (threadIdx.x & 31);
  return collected[votes++];
}
"""
RUN = r"""
template <class Call> void run(unsigned blocks, unsigned threads, Call call) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (unsigned warp = 0; warp < threads; warp += 32) {
      for (unsigned& word : collected) word = 0;
      for (int again = 0; again < TURNS; ++again) {
        reads = again == 1;
        for (unsigned lane = 0; lane < 32; ++lane) { threadIdx.x = warp + lane; votes = 0; call(); }
      }
    }
}
#define KERNEL(name, parameters, arguments) \
  extern "C" void run_##name parameters { run(blocks, threads, [&] { name arguments; }); }
#define B unsigned blocks, unsigned threads
KERNEL(compare, (B, const W* a, const W* b, const i64* r, int n, u32* m, u32* c), (a, b, r, n, m, c))
KERNEL(gather, (B, const W* a, const u32* m, const u32* u, const i64* r, int n, unsigned char* o), (a, m, u, r, n, o))
KERNEL(count_bits, (B, const unsigned char* d, const i64* r, int n, u32* c), (d, r, n, c))
KERNEL(put, (B, const unsigned char* d, const u32* u, const i64* r, int n), (d, u, r, n))
"""
C_TYPES = {
    "uint32": ctypes.c_uint32,
    "int32": ctypes.c_int32,
    "uint64": ctypes.c_uint64,
}


class DeviceArray(np.ndarray):
    """Host memory that has an address as a cupy array has."""

    data: Any = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))


def on_device(values: np.ndarray) -> Any:
    return values.copy().view(DeviceArray)


def emulated(folder: Path) -> Callable[[str, int, int], Any]:
    libraries: dict[int, Any] = {}

    def library(item: int) -> Any:
        if item not in libraries:
            source = folder / f"kernels{item}.cpp"
            source.write_text(SHIM + _sparse_kernels.SOURCE + RUN)
            made = source.with_suffix(".so")
            options = [f"-DW={_sparse_kernels.TYPES[item]}", "-DTURNS=2", "-std=c++17"]
            command = [str(COMPILER), *options, "-shared", "-fPIC", "-O1"]
            subprocess.run(
                [*command, str(source), "-o", str(made)], check=True, timeout=120
            )
            libraries[item] = ctypes.CDLL(str(made))
        return libraries[item]

    def plain(argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            return ctypes.c_void_p(argument.ctypes.data)
        return C_TYPES[argument.dtype.name](int(argument))

    def kernel(name: str, item: int, _device: int) -> Any:
        def launch(blocks: Any, threads: Any, arguments: Any) -> None:
            function = getattr(library(item), f"run_{name}")
            function(blocks[0], threads[0], *map(plain, arguments))

        return launch

    return kernel


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = SimpleNamespace(synchronize=lambda: None)
    fake = SimpleNamespace(
        empty=lambda n, dtype: on_device(np.full(n, 0x5A, dtype)),
        asarray=on_device,
        cumsum=lambda x, dtype: np.cumsum(x, dtype=dtype),
        asnumpy=np.asarray,
        cuda=SimpleNamespace(
            Device=lambda _: nullcontext(), get_current_stream=lambda: stream
        ),
    )
    monkeypatch.setattr(_sparse_kernels, "cupy", lambda: fake)
    monkeypatch.setattr(_sparse_kernels, "_kernel", emulated(tmp_path))
    return _sparse_kernels


def test_the_kernels_do_what_numpy_does(kernels: Any) -> None:
    """A bucket of boxes of every width: a small and a large one, each changed by another share, and one not at all."""
    drawn = np.random.default_rng(0)
    shapes = [(5,), (13, 7, 147), (3, 31), (2, 70, 1), (64, 160)]
    boxes = []
    at = 0
    for item in (2, 8, 1, 4, 2):
        for shape in shapes:
            elements = int(np.prod(shape))
            boxes.append((at, elements, item))
            at += _sparse.aligned(elements * item)
    old = drawn.integers(0, 256, at, np.uint8)
    new = old.copy()
    shares = (0.004, 0.3, 0.0, 1.0, 0.02, 0.5, 0.01)
    for k, (begin, elements, item) in enumerate(boxes):
        words = new[begin : begin + elements * item].view(f"u{item}")
        words[drawn.random(elements) < shares[k % len(shares)]] ^= 1
    values = [new[b : b + n * item].view(f"u{item}") for b, n, item in boxes]
    held = [old[b : b + n * item] for b, n, item in boxes]
    positions = [_sparse.changed(v, h) for v, h in zip(values, held, strict=True)]
    counts = [len(where) for where in positions]
    _, elements, items = (list(column) for column in zip(*boxes, strict=True))
    parts, total = _sparse.sections(counts, elements, items)
    modes = {kernels._mode(part) for part in parts}
    assert modes == {kernels.NOTHING, kernels.LISTED, kernels.MASKED, kernels.WHOLE}
    wanted = np.zeros(total, np.uint8)
    for part, numbers, where in zip(parts, values, positions, strict=True):
        _sparse.pack_box(part, numbers, where, wanted)

    table = kernels.Boxes(boxes, 0)
    now = on_device(new)
    mask, until, found = table.differing(now, on_device(old))
    assert found == counts
    out = on_device(np.zeros(total, np.uint8))
    table.fill(parts, now, mask, until, out)
    np.testing.assert_array_equal(out, wanted)

    # each box in a larger tensor of its own, with its axes in another order
    engine = []
    after = []
    places = []
    for k, ((begin, size, item), part) in enumerate(zip(boxes, parts, strict=True)):
        a, b, c = (*shapes[k % len(shapes)], 1, 1)[:3]
        memory = np.zeros((c, b + 2, a + 7), f"u{item}")
        inside = np.s_[:, 1 : b + 1, 5 : a + 5]
        dense = old[begin : begin + size * item].view(f"u{item}").reshape(a, b, c)
        memory[inside] = dense.transpose(2, 1, 0)
        engine.append(on_device(memory))
        memory[inside] = values[k].reshape(a, b, c).transpose(2, 1, 0)
        after.append(memory)
        first = (a + 7) + 5
        strides = (1, a + 7, (a + 7) * (b + 2))
        pointer = engine[-1].ctypes.data
        places.append(kernels.Place(part, pointer, first, (a, b, c), strides))
    kernels.put(places, out.ctypes.data, 0)
    for got, right in zip(engine, after, strict=True):
        np.testing.assert_array_equal(got, right)

    # one that names an element outside of its box writes nothing there
    outside = 0
    for part in parts:
        if kernels._mode(part) == kernels.LISTED:
            out[part.at : part.at + 4].view(np.uint32)[0] = part.elements
            outside += 1
    assert outside
    kernels.put(places, out.ctypes.data, 0)
    for got, right in zip(engine, after, strict=True):
        np.testing.assert_array_equal(got, right)

    part = next(part for part in parts if part.count)
    too_many = kernels.Place(part, 0, 0, (1,) * 9, (1,) * 9)
    with pytest.raises(Unsupported, match="9 axes"):
        kernels.put([too_many], 0, 0)

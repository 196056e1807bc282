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

from jvlab.layout import _sparse
from jvlab.transport import _sparse_kernels
from tests.transport.ipc_emulator import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
# All lanes vote at one point: a first run of a warp collects the votes, a second one reads them.
SHIM = r"""
#define __device__
#define __global__
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim;
static unsigned collected;
static bool reads;
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned __ballot_sync(unsigned, bool vote) {
  if (!reads) collected |= (unsigned)vote << (threadIdx.x & 31);
  return collected;
}
"""
RUN = r"""
template <class Call> void run(unsigned blocks, unsigned threads, Call call) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (unsigned warp = 0; warp < threads; warp += 32) {
      collected = 0;
      for (int again = 0; again < TURNS; ++again) {
        reads = again == 1;
        for (unsigned lane = 0; lane < 32; ++lane) { threadIdx.x = warp + lane; call(); }
      }
    }
}
#define KERNEL(name, parameters, arguments) \
  extern "C" void run_##name parameters { run(blocks, threads, [&] { name arguments; }); }
#define B unsigned blocks, unsigned threads
KERNEL(compare, (B, const W* a, const W* b, unsigned n, unsigned* m, unsigned* c), (a, b, n, m, c))
KERNEL(count_bits, (B, const unsigned* m, unsigned n, unsigned* c), (m, n, c))
KERNEL(gather, (B, const W* a, unsigned n, const unsigned* m, const unsigned* u, unsigned* p, W* v), (a, n, m, u, p, v))
KERNEL(put_listed, (B, const unsigned* p, const W* v, unsigned c, unsigned n, W* o, u64 at, int k, const long long* b),
       (p, v, c, n, o, at, k, b))
KERNEL(put_masked, (B, const unsigned* m, const unsigned* u, const W* v, unsigned c, unsigned n, W* o, u64 at, int k,
       const long long* b), (m, u, v, c, n, o, at, k, b))
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
        cuda=SimpleNamespace(
            Device=lambda _: nullcontext(), get_current_stream=lambda: stream
        ),
    )
    monkeypatch.setattr(_sparse_kernels, "cupy", lambda: fake)
    monkeypatch.setattr(_sparse_kernels, "_kernel", emulated(tmp_path))
    _sparse_kernels._box.cache_clear()
    yield _sparse_kernels
    _sparse_kernels._box.cache_clear()


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_kernels_do_what_numpy_does(kernels: Any, item: int) -> None:
    drawn = np.random.default_rng(item)
    shape = (13, 7, 47)  # neither whole warps nor whole blocks
    old = drawn.integers(0, 256, 13 * 7 * 47 * item, np.uint8).view(f"u{item}")
    for share in (0.0, 0.004, 0.3, 1.0):
        changes = drawn.random(old.size) < share
        new = np.where(changes, old ^ old.dtype.type(1), old)
        positions = _sparse.changed(new, old.view(np.uint8))
        assert len(positions) == changes.sum()
        (part,), total = _sparse.sections([len(positions)], [old.size], [item])
        wanted = np.zeros(total, np.uint8)
        _sparse.pack_box(part, new, positions, wanted)
        now = on_device(new.view(np.uint8))
        held = on_device(old.view(np.uint8))
        mask, until = kernels.differing(now, held, item, 0)
        assert int(until[-1]) == len(positions)
        out = on_device(np.zeros(total, np.uint8))
        kernels.fill(part, now, mask, until, out, 0)
        np.testing.assert_array_equal(out, wanted)
        if part.whole or not part.count:
            continue
        # with its axes in another order, in a larger tensor
        memory = np.zeros((47, 9, 20), f"u{item}")
        memory[:, 1:8, 5:18] = old.reshape(shape).transpose(2, 1, 0)
        engine = on_device(memory)
        memory[:, 1:8, 5:18] = new.reshape(shape).transpose(2, 1, 0)
        where = (25, shape, (1, 20, 180))
        kernels.put(part, out.ctypes.data, 0, engine.ctypes.data, *where)
        np.testing.assert_array_equal(engine, memory)
        # one that names an element outside of its box writes nothing there
        if not part.masked:
            out[part.at : part.at + 4].view(np.uint32)[0] = old.size
            before = engine.copy()
            kernels.put(part, out.ctypes.data, 0, engine.ctypes.data, *where)
            np.testing.assert_array_equal(engine, before)

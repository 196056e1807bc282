"""The CUDA source of the ipc transport itself, compiled by the C++ compiler and run on the CPU: a fiber per thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from jvlab.layout._digest import MASK
from jvlab.transport._ipc_kernels import SOURCE, STRIPES, defines, shared
from jvlab.transport._ipc_tables import Program, Table

COMPILER = shutil.which("g++") or shutil.which("clang++")
SHIM = r"""
#include <ucontext.h>
#include <setjmp.h>
#include <cstring>
#include <cstdlib>
#include <cmath>
#include <algorithm>
using std::min;
#define EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
struct Index { unsigned x; }; static Index threadIdx, blockIdx;
struct uint4 { unsigned x, y, z, w; }; struct uint2 { unsigned x, y; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
static float from_f16(unsigned short x) {
  int e = x >> 10 & 31, m = x & 1023;
  float f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return x >> 15 ? -f : f;
}
static unsigned short to_f16(float f) {
  unsigned x = __float_as_uint(f), sign = x >> 16 & 0x8000; x &= 0x7fffffffu;
  if (x > 0x7f800000u) return 0x7fff;
  if (x < 0x38800000u) return sign | (unsigned)nearbyintf(ldexpf(__uint_as_float(x), 24));  // subnormal
  x += 0xfff + (x >> 13 & 1);
  return x >= 0x47800000u ? sign | 0x7c00 : sign | ((x >> 13) - (112 << 10));
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long both = (unsigned long long)b << 32 | a; unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
static unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) { auto old = *p; *p += x; return old; }
enum { NEW, RUNS, AT_BLOCK, AT_WARP, OVER };
static ucontext_t unused, fiber; static jmp_buf home, places[THREADS];  // jumps need no call of the system
static int state[THREADS]; static char* stacks;
static unsigned long long slots[THREADS];
static void wait(int why) {
  state[threadIdx.x] = why;
  if (!_setjmp(places[threadIdx.x])) _longjmp(home, 1);
}
static void __syncthreads() { wait(AT_BLOCK); }
static unsigned __ballot_sync(unsigned, bool x) {
  slots[threadIdx.x] = x; wait(AT_WARP);
  unsigned out = 0; for (int i = 0; i < 32; i++) out |= (unsigned)slots[(threadIdx.x & ~31u) + i] << i;
  wait(AT_WARP); return out;
}
static unsigned long long __shfl_down_sync(unsigned, unsigned long long x, int by) {
  slots[threadIdx.x] = x; wait(AT_WARP);
  unsigned from = (threadIdx.x & 31) + by; auto out = from < 32 ? slots[(threadIdx.x & ~31u) + from] : x;
  wait(AT_WARP); return out;
}
"""
DRIVER = r"""
static const void* given[9];
static int form;
static void body() {
  auto f = form ? tiles : rows;
  f((const i64*)given[0], (const u32*)given[1], (int)(i64)given[2], (const u64*)given[3], (const u64*)given[4],
    (u64*)given[5], (const u64*)given[6], (u64)given[7], (u64*)given[8]);
  state[threadIdx.x] = OVER;
  _longjmp(home, 1);
}
static void go_on(int i, size_t room) {
  threadIdx.x = i;
  if (_setjmp(home)) return;
  if (state[i] == RUNS) _longjmp(places[i], 1);
  state[i] = RUNS;
  getcontext(&fiber); fiber.uc_stack.ss_sp = stacks + room * i; fiber.uc_stack.ss_size = room; fiber.uc_link = &unused;
  makecontext(&fiber, body, 0); setcontext(&fiber);
}
static bool all(int first, int count, int what) {
  bool some = false;
  for (int i = first; i < first + count; i++)
    if (state[i] == what) some = true; else if (state[i] != OVER) return false;
  return some;
}
static void release(int first, int count) {
  for (int i = first; i < first + count; i++) if (state[i] != OVER) state[i] = RUNS;
}
extern "C" int launch(int which, int blocks, const void** args) {
  const size_t room = 1 << 16;
  if (!stacks) stacks = (char*)malloc(room * THREADS);
  form = which; memcpy(given, args, sizeof given);
  for (blockIdx.x = 0; (int)blockIdx.x < blocks; blockIdx.x++) {
    for (int i = 0; i < THREADS; i++) state[i] = NEW;
    for (;;) {
      bool ran = false;
      for (int i = 0; i < THREADS; i++)
        if (state[i] == NEW || state[i] == RUNS) { ran = true; go_on(i, room); }
      for (int w = 0; w < THREADS; w += 32)
        if (all(w, 32, AT_WARP)) { ran = true; release(w, 32); }
      if (all(0, THREADS, AT_BLOCK)) { ran = true; release(0, THREADS); }
      bool over = true;
      for (int i = 0; i < THREADS; i++) over = over && state[i] == OVER;
      if (over) break;
      if (!ran) return 1;  // threads wait for one another for ever
    }
  }
  return 0;
}
"""


@cache
def library(
    program: Program, write: bool, digest: bool, folder: Path, look: bool = True
) -> ctypes.CDLL:
    """The kernels of one program as a shared library."""
    assert COMPILER
    options = defines(shared(program, look), write, digest, look)
    out = folder / f"kernels-{abs(hash(options)):x}.so"
    if not out.exists():
        code = out.with_suffix(".cpp")
        code.write_text(SHIM + SOURCE + DRIVER)
        flags = [
            "-std=c++17",
            "-O1",
            "-w",
            "-U_FORTIFY_SOURCE",
            "-shared",
            "-fPIC",
            *options,
        ]
        subprocess.run(
            [COMPILER, *flags, "-o", str(out), str(code)], check=True, timeout=300
        )
    return ctypes.CDLL(str(out))


def run(
    tables: Sequence[Table],
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    slots: int,
    folder: Path,
    *,
    write: bool = True,
    digest: bool = True,
    permit: int | None = None,
    version: int = 0,
    flawed: list[int] | None = None,
) -> tuple[list[int], int]:
    """As `Launcher.launch`, `.sums` and `.refused`: digests by slot, and blocks that found no permit.

    `flawed` is filled as by `Launcher.flawed`.
    """
    sums = np.zeros(slots * STRIPES + 1 + slots, np.uint64)
    refused = sums[slots * STRIPES :]
    held = np.array([permit or 0], np.uint64)
    where = [
        np.array([a.ctypes.data for a in arrays], np.uint64)
        for arrays in (sources, targets)
    ]
    for table in tables:
        entries, first = (
            np.ascontiguousarray(table.entries),
            np.ascontiguousarray(table.first),
        )
        args = (ctypes.c_void_p * 9)(
            entries.ctypes.data,
            first.ctypes.data,
            len(first),
            where[0].ctypes.data,
            where[1].ctypes.data,
            sums.ctypes.data,
            None if permit is None else held.ctypes.data,
            version,
            refused.ctypes.data,
        )
        kernels = library(table.program, write, digest, folder)
        assert (
            kernels.launch(int(table.program.form == "tiles"), table.blocks, args) == 0
        ), "threads wait for ever"
    if flawed is not None:
        flawed[:] = np.flatnonzero(refused[1:]).tolist()
    by_slot = sums[: slots * STRIPES].reshape(slots, STRIPES)
    return [sum(row) & MASK for row in by_slot.tolist()], int(refused[0])

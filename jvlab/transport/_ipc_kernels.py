"""The CUDA kernels of the ipc transport, and their launches: tables on the device, one launch per form and dtypes.

A block finds its entry by a search over first blocks, then copies lines ("rows") or transposes tiles ("tiles"),
converts, and adds what it wrote to a digest of its target; NaN or Inf sets the target's flag.
tests/transport/ipc_interpreter.py does the same arithmetic in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.layout._digest import COLUMN, LINE, PLACE, exponent
from jvlab.layout._plan_types import item_bytes
from jvlab.transport import _ipc_tables as ipc
from jvlab.transport._ipc_tables import AT, FIELDS, FLOATS, THREADS, Program, Table

# partial sums per digest: blocks of a large parameter would contend for a single one
STRIPES = 8
# constants shared with the tables
SHARED = ("THREADS", "SIDE", "DEEP", "STEPS", "OUTER", "SEPARABLE", "LOAD", "STORE")


# The CUDA source: two kernels, compiled for each pair of dtypes -------------------------------------------------------
#
# "tiles" for 16-bit elements moved as bits: asynchronous reads ahead into shared memory.
# On an H200 this form transposed 3.4 GB of matrices at 0.94 of the GPU's copy rate, the one through registers at 0.77.
# More tiles ahead, deeper blocks or more blocks at once were all slower: they spread over more of the memory.

PIPED = r"""
#define STAGES 3                   // tiles in shared memory: one being written, the others in flight
#define TILE_WORDS (SIDE * SIDE / 2)   // words of a tile: 64 lines of 8 chunks of 16 bytes
// Chunks of a line are swizzled by groups of 8 lines to avoid bank conflicts on both sides.
#define CHUNK(r, ch) ((r) * 32 + (((ch) ^ (((r) >> 3) & 7)) << 2))
#define CELL(r, c) (CHUNK(r, (c) >> 2) + ((c) & 3))
#ifdef EMULATED
static void copy_async(u32* to, const S* from) { memcpy(to, from, 16); }
static void commit_copies() {}
static void wait_copies() {}
#else
__device__ __forceinline__ void copy_async(u32* to, const S* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory"); }
#endif
__device__ __forceinline__ void fetch(u32* tile, const S* src, i64 ssb, i64 nb, i64 b0, i64 na, i64 a) {
  const int chunk = threadIdx.x % LX;
  const i64 p = a + chunk * VL;
  #pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int r = i * LY + threadIdx.x / LX;
    if (b0 + r < nb && p < na) copy_async(tile + CHUNK(r, chunk), src + p + (b0 + r) * ssb);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) tiles(ARGS) {
  __shared__ i64 e[FIELDS]; __shared__ u32 at[2]; __shared__ __align__(16) u32 buffer[STAGES * TILE_WORDS];
  if (!begin(e, at, entries, first, count, sources, targets, sums, permit, version, refused)) return;
  const Place o = place(e, at[0]);
  const i64 na = E(na), nb = E(nb), ssb = E(ssb), b0 = (i64)o.b * SIDE, a0 = (i64)o.a * (SIDE * DEEP);
  const S* src = (const S*)sources[E(source)] + o.src;
  const A_axis into = {na, E(na1), E(dsa1), E(dsa2)};
  D* dst = (D*)targets[E(target)] + o.dst + b0;
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < DEEP && a0 + s * SIDE < na) fetch(buffer + s * TILE_WORDS, src, ssb, nb, b0, na, a0 + s * SIDE);
    commit_copies();
  }
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;  // 8 elements along B, two lines of A
  u64 total = 0; u32 carries = 0;
#if DIGEST
  __shared__ u32 us[SIDE * DEEP]; __shared__ u32 vs[SIDE];
  u64 line0, col0; split(o.dst, E(row), line0, col0);
  const A_axis lines = {na, E(na1), E(line1), E(line2)};
  for (int i = threadIdx.x; i < SIDE * DEEP; i += THREADS)
    us[i] = a0 + i < na ? weight((u32)(line0 + lines(a0 + i)), LINE) : 0;
  if (threadIdx.x < SIDE) {
    const i64 q = b0 + threadIdx.x;
    vs[threadIdx.x] = q < nb ? weight((u32)(col0 + q), COLUMN) : 0;
  }
  u32 v[8];
#endif
  #pragma unroll 1
  for (int t = 0; t < DEEP && a0 + t * SIDE < na; t++) {
    wait_copies();
    __syncthreads();  // the tile has arrived for all threads, and all have written the one before: its buffer is free
    const int n = t + STAGES - 1;
    if (n < DEEP && a0 + n * SIDE < na) fetch(buffer + (n % STAGES) * TILE_WORDS, src, ssb, nb, b0, na, a0 + n * SIDE);
    commit_copies();
#if DIGEST
    if (!t) {
      #pragma unroll
      for (int j = 0; j < 8; j++) v[j] = vs[x * 8 + j];
    }
#endif
    const u32* tile = buffer + (t % STAGES) * TILE_WORDS;
    Words<4> out[2];
    #pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const u32 lo = tile[CELL(8 * x + j, y)], hi = tile[CELL(8 * x + j + 1, y)];
      out[0].w[j / 2] = __byte_perm(lo, hi, 0x5410);
      out[1].w[j / 2] = __byte_perm(lo, hi, 0x7632);
    }
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int line = t * SIDE + y * 2 + r;
      if (a0 + line < na && b0 + x * 8 < nb) {
        check_words(carries, out[r]);
#if WRITE
        store(dst + into(a0 + line) + x * 8, out[r]);
#endif
#if DIGEST
        u64 sum = 0;
        #pragma unroll
        for (int j = 0; j < 8; j++) sum += term(get<2>(out[r], j), v[j]);
        total += sum * us[line];
#endif
      }
    }
  }
  report(carries, refused, E(slot));
#if DIGEST
  add_up(total, sums, E(slot));
#endif
}
"""


# ----------------------------------------------------------------------------------------------------

SOURCE = (
    r"""
typedef unsigned long long u64; typedef long long i64; typedef unsigned int u32; typedef unsigned short u16;
template <int N> struct Bits;
template <> struct Bits<1> { typedef unsigned char T; }; template <> struct Bits<2> { typedef u16 T; };
template <> struct Bits<4> { typedef u32 T; }; template <> struct Bits<8> { typedef u64 T; };
typedef Bits<S_BYTES>::T S; typedef Bits<D_BYTES>::T D;
#if QUICK && S_BYTES == 2 && D_BYTES == 2 && SRC == DST && !COMPUTES && (defined(EMULATED) || __CUDA_ARCH__ >= 800)
#define PIPED 1  // tiles are copied to shared memory asynchronously, ahead of the one being written
#else
#define PIPED 0
#endif

// ---- values ----
__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
#ifndef EMULATED  // tests run this source on the CPU
__device__ __forceinline__ float from_f16(u16 x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
__device__ __forceinline__ u16 to_f16(float f) { u16 x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f)); return x; }
#endif
__device__ __forceinline__ u16 to_bf16(float f) {
#if __CUDA_ARCH__ >= 800
  u16 x; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(f)); return x;
#else
  u32 x = __float_as_uint(f);
  return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)((x + 0x7fffu + ((x >> 16) & 1)) >> 16);
#endif
}
__device__ __forceinline__ D convert(S x, float add, int cast) {
#if SRC == DST && !COMPUTES
  return x;
#else
#if SRC == 1
  float f = __uint_as_float(x);
#elif SRC == 2
  float f = from_bf16(x);
#else
  float f = from_f16(x);
#endif
#if COMPUTES
  if (add != 0.0f) f += add;
  if (cast == 2) f = from_bf16(to_bf16(f));
  if (cast == 3) f = from_f16(to_f16(f));
#endif
#if DST == 1
  return __float_as_uint(f);
#elif DST == 2
  return to_bf16(f);
#else
  return to_f16(f);
#endif
#endif
}

// ---- vectors: N 32-bit words ----
template <int N> struct Words { u32 w[N]; };
template <int N> __device__ __forceinline__ Words<N> load(const void* p) {
  Words<N> out;
  if (N == 4) {
    uint4 v = *(const uint4*)p;
    out.w[0] = v.x; out.w[1 % N] = v.y; out.w[2 % N] = v.z; out.w[3 % N] = v.w;
  }
  if (N == 2) { uint2 v = *(const uint2*)p; out.w[0] = v.x; out.w[1 % N] = v.y; }
  if (N == 1) out.w[0] = *(const u32*)p;
  return out;
}
template <int N> __device__ __forceinline__ void store(void* p, const Words<N>& a) {
  if (N == 4) {
#ifdef EMULATED
    *(uint4*)p = make_uint4(a.w[0], a.w[1 % N], a.w[2 % N], a.w[3 % N]);
#else  // streaming store: keep the cache for reads ahead
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(a.w[0]), "r"(a.w[1 % N]), "r"(a.w[2 % N]), "r"(a.w[3 % N]) : "memory");
#endif
  }
  if (N == 2) *(uint2*)p = make_uint2(a.w[0], a.w[1 % N]);
  if (N == 1) *(u32*)p = a.w[0];
}
template <int BYTES, int N> __device__ __forceinline__ typename Bits<BYTES>::T get(const Words<N>& a, int j) {
  typedef typename Bits<BYTES>::T T;
  if (BYTES == 8) return (T)((u64)a.w[(2 * j) % N] | (u64)a.w[(2 * j + 1) % N] << 32);
  const int per = BYTES >= 4 ? 1 : 4 / BYTES;
  return (T)(a.w[j / per] >> (BYTES >= 4 ? 0 : 8 * BYTES * (j % per)));
}
template <int BYTES, int N> __device__ __forceinline__ void put(Words<N>& a, int j, typename Bits<BYTES>::T x) {
  if (BYTES == 8) { a.w[(2 * j) % N] = (u32)x; a.w[(2 * j + 1) % N] = (u32)((u64)x >> 32); return; }
  const int per = BYTES >= 4 ? 1 : 4 / BYTES;
  if (per == 1 || j % per == 0) a.w[j / per] = (u32)x;
  else a.w[j / per] |= (u32)x << (8 * BYTES * (j % per));
}

// ---- not finite: all exponent bits are set; adding the lowest of them carries into the bit above
#if EXPONENT
#define EACH (D_BYTES == 1 ? 0x01010101u : D_BYTES == 2 ? 0x00010001u : 1u)  // of 8 bytes the upper half is checked
#define ABOVE (EACH << (D_BYTES == 1 ? 7 : D_BYTES == 2 ? 15 : 31))
#define CHECK(carries, word) carries |= ((word) & (EXPONENT * EACH)) + (EXPONENT & (0u - EXPONENT)) * EACH
__device__ __forceinline__ void check_value(u32& carries, D x) {
  CHECK(carries, D_BYTES == 8 ? (u32)((u64)x >> 32) : (u32)x);
}
template <int N> __device__ __forceinline__ void check_words(u32& carries, const Words<N>& a) {
  #pragma unroll
  for (int i = D_BYTES == 8; i < N; i += D_BYTES == 8 ? 2 : 1) CHECK(carries, a.w[i]);
}
__device__ __forceinline__ void report(u32 carries, u64* refused, u64 slot) {
  if (carries & ABOVE) refused[1 + slot] = 1;  // all threads write the same value
}
#else
__device__ __forceinline__ void check_value(u32& carries, D x) {}
template <int N> __device__ __forceinline__ void check_words(u32& carries, const Words<N>& a) {}
__device__ __forceinline__ void report(u32 carries, u64* refused, u64 slot) {}
#endif

// ---- digest ----
__device__ __forceinline__ u32 weight(u32 x, u32 seed) {
  x ^= seed; x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; x ^= x >> 16;
  return (x >> 8) | 1u;
}
__device__ __forceinline__ u64 word(D x) {
#if D_BYTES == 8
  return (u64)(u32)x + (u64)(u32)(x >> 32) * PLACE_1;
#else
  return (u64)x;
#endif
}
__device__ __forceinline__ u64 term(D x, u32 v) {
#if D_BYTES == 8
  return word(x) * v;
#else
  return (u64)(u32)x * v;
#endif
}
__device__ __forceinline__ void split(u64 index, u64 row, u64& line, u64& column) {
  if ((index | row) >> 32) { line = index / row; column = index % row; }
  else { u32 l = (u32)index / (u32)row; line = l; column = (u32)index - l * (u32)row; }
}
__device__ __noinline__ u64 lone(D x, u64 index, u64 row) {
  u64 line, column; split(index, row, line, column);
  return word(x) * weight((u32)line, LINE) * weight((u32)column, COLUMN);
}
__device__ __forceinline__ void add_up(u64 total, u64* sums, u64 slot) {
  __shared__ u64 parts[THREADS / 32];
  #pragma unroll
  for (int i = 16; i; i >>= 1) total += __shfl_down_sync(~0u, total, i);
  if (!(threadIdx.x & 31)) parts[threadIdx.x >> 5] = total;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < THREADS / 32; i++) total += parts[i];
  atomicAdd(sums + slot * STRIPES + blockIdx.x % STRIPES, total);
}

// ---- which entry, which part of it ----
#define ARGS const i64* entries, const u32* first, int count, const u64* sources, const u64* targets, u64* sums, \
             const u64* permit, u64 version, u64* refused
#define E(name) e[F_##name]
__device__ __forceinline__ bool begin(i64* e, u32* at, ARGS) {
  if (threadIdx.x < 32) {
    int low = 0, n = count;
    while (n > 1) {
      int step = (n + 31) / 32, probe = threadIdx.x * step;
      u32 below = __ballot_sync(~0u, probe < n && first[low + min(probe, n - 1)] <= blockIdx.x);
      int k = (__popc(below) - 1) * step;
      low += k; n = min(step, n - k);
    }
    for (int i = threadIdx.x; i < FIELDS; i += 32) e[i] = entries[(i64)low * FIELDS + i];
    if (!threadIdx.x) at[0] = blockIdx.x - first[low];
  } else if (threadIdx.x == 32) {
    at[1] = !permit || *(const volatile u64*)permit == version;  // a late writer must not write memory in use
  }
  __syncthreads();
  if (!at[1] && !threadIdx.x) atomicAdd(refused, 1ull);
  return at[1];
}
struct Place { u32 a, b; i64 src, dst; };
__device__ __forceinline__ Place place(const i64* e, u32 t) {
  Place out; u32 n;
  n = (u32)E(tiles_b); out.b = t % n; t /= n;
  n = (u32)E(tiles_a); out.a = t % n; t /= n;
  out.src = E(src); out.dst = E(dst);
  #pragma unroll
  for (int k = 0; k < OUTER; k++) {
    n = (u32)e[F_n0 + 3 * k];
    if (n > 1) { u32 i = t % n; t /= n; out.src += i * e[F_n0 + 3 * k + 1]; out.dst += i * e[F_n0 + 3 * k + 2]; }
  }
  return out;
}

// ---- rows ----
#define VR (16 / (S_BYTES > D_BYTES ? S_BYTES : D_BYTES))
#define AHEAD 4
extern "C" __global__ void __launch_bounds__(THREADS, QUICK ? 4 : 1) rows(ARGS) {
  __shared__ i64 e[FIELDS]; __shared__ u32 at[2];
  if (!begin(e, at, entries, first, count, sources, targets, sums, permit, version, refused)) return;
  const Place o = place(e, at[0]);
  const int flags = (int)E(flags), wide = (int)E(wide), cast = (int)E(cast);
  const float add = __uint_as_float((u32)E(add));
  const u32 across = 1u << wide, x = threadIdx.x & (across - 1), y = threadIdx.x >> wide, high = THREADS >> wide;
  const i64 na = E(na), nb = E(nb), ssa = E(ssa1), dsa = E(dsa1), ssb = E(ssb), dsb = E(dsb);
  const u64 row = E(row);
  const S* src = (const S*)sources[E(source)] + o.src;
  D* dst = (D*)targets[E(target)] + o.dst;
  const bool apart = QUICK || !DIGEST || (flags & SEPARABLE);
  const bool in_line = !((sources[E(source)] | targets[E(target)]) & 15);
  const bool vec = QUICK || (apart && in_line && (flags & LOAD) && (flags & STORE));
  const i64 c0 = (i64)o.b * across * VR + (vec ? x * VR : x), step = vec ? 1 : across;
  const i64 a0 = (i64)o.a * high * STEPS + y;
  u64 total = 0; u32 carries = 0;
#if DIGEST
  u64 line0, col0; split(o.dst, row, line0, col0);
  const u32 line1 = (u32)E(line1);
  u32 v[VR];
  if (apart) {
    #pragma unroll
    for (int j = 0; j < VR; j++) v[j] = weight((u32)(col0 + (c0 + j * step) * dsb), COLUMN);
  }
#endif
  if (vec && c0 + VR <= nb) {
    const S* sp = src + c0; D* dp = dst + c0;
    #pragma unroll 1
    for (int k = 0; k < STEPS && a0 + (i64)k * high < na; k += AHEAD) {
      Words<VR * S_BYTES / 4> in[AHEAD];
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const i64 p = a0 + (i64)(k + i) * high;
        if (p < na) in[i] = load<VR * S_BYTES / 4>(sp + p * ssa);
      }
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const i64 p = a0 + (i64)(k + i) * high;
        if (p < na) {
          Words<VR * D_BYTES / 4> out;
          #pragma unroll
          for (int j = 0; j < VR; j++) put<D_BYTES>(out, j, convert(get<S_BYTES>(in[i], j), add, cast));
          check_words(carries, out);
#if WRITE
          store(dp + p * dsa, out);
#endif
#if DIGEST
          u64 sum = 0;
          #pragma unroll
          for (int j = 0; j < VR; j++) sum += term(get<D_BYTES>(out, j), v[j]);
          total += sum * weight((u32)line0 + (u32)p * line1, LINE);
#endif
        }
      }
    }
  } else if (QUICK) {
    // lines are whole vectors: no remainder
  } else if (apart) {
    #pragma unroll 1
    for (int k = 0; k < STEPS; k++) {
      const i64 p = a0 + (i64)k * high;
      if (p >= na) break;
      u64 sum = 0;
      #pragma unroll
      for (int j = 0; j < VR; j++) {
        const i64 c = c0 + j * step;
        if (c < nb) {
          const D out = convert(src[p * ssa + c * ssb], add, cast);
          check_value(carries, out);
#if WRITE
          dst[p * dsa + c * dsb] = out;
#endif
#if DIGEST
          sum += term(out, v[j]);
#endif
        }
      }
#if DIGEST
      total += sum * weight((u32)line0 + (u32)p * line1, LINE);
#endif
    }
  } else {
    #pragma unroll 1
    for (int k = 0; k < STEPS * VR; k++) {
      const i64 p = a0 + (i64)(k / VR) * high, c = c0 + (k % VR) * step;
      if (p < na && c < nb) {
        const D out = convert(src[p * ssa + c * ssb], add, cast);
        check_value(carries, out);
#if WRITE
        dst[p * dsa + c * dsb] = out;
#endif
        total += lone(out, o.dst + p * dsa + c * dsb, row);
      }
    }
  }
  report(carries, refused, E(slot));
#if DIGEST
  add_up(total, sums, E(slot));
#endif
}

// ---- tiles ----
#define VL (16 / S_BYTES)          // elements of a read
#define LX (SIDE / VL)             // reads across a line of a tile
#define LY (THREADS / LX)
#define PASSES (SIDE / LY)
struct A_axis { i64 na, na1, s1, s2;
  __device__ __forceinline__ i64 operator()(i64 p) const {
    if (na1 == na) return p * s1;
    const u32 q = (u32)p / (u32)na1; return q * s2 + ((u32)p - q * (u32)na1) * s1;
  } };
struct Reader { const S* src; A_axis a; i64 nb, ssb, b0; bool vec;
  __device__ __forceinline__ void operator()(Words<4>* in, i64 a0) const {
    const i64 p = a0 + (threadIdx.x % LX) * VL;
    #pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const i64 q = b0 + i * LY + threadIdx.x / LX;
      in[i] = Words<4>{{0, 0, 0, 0}};
      if (q < nb) {
        if (QUICK ? p < a.na : vec && p + VL <= a.na) in[i] = load<4>(src + p + q * ssb);
        else if (!QUICK) {
          #pragma unroll
          for (int j = 0; j < VL; j++) if (p + j < a.na) put<S_BYTES>(in[i], j, src[a(p + j) + q * ssb]);
        }
      }
    }
  } };

#if D_BYTES == 2
// Two rows of A per 32-bit word; the words of a line are rotated to avoid bank conflicts on both sides.
#define CELLS (2 * SIDE * SIDE / 2)
#define WORD(r, c) ((r) * 32 + (((c) + 4 * ((r) >> 3) + ((r) & 3)) & 31))
#define TURNS 2                    // rows of A that a thread writes
#define VS 8                       // elements of a write
typedef u32 Cell;
__device__ __forceinline__ void store_tile(Cell* tile, const Words<4>* in, float add, int cast) {
  #pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int r = i * LY + threadIdx.x / LX;
    #pragma unroll
    for (int j = 0; j < VL; j += 2)
      tile[WORD(r, (int)(threadIdx.x % LX) * (VL / 2) + j / 2)] =
          (u32)convert(get<S_BYTES>(in[i], j), add, cast) | (u32)convert(get<S_BYTES>(in[i], j + 1), add, cast) << 16;
  }
}
__device__ __forceinline__ void load_tile(const Cell* tile, Words<4>* out, int pair, int x) {
  #pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const u32 lo = tile[WORD(8 * x + j, pair)], hi = tile[WORD(8 * x + j + 1, pair)];
    out[0].w[j / 2] = __byte_perm(lo, hi, 0x5410);
    out[1].w[j / 2] = __byte_perm(lo, hi, 0x7632);
  }
}
#else
#define PITCH (SIDE + 1)
#define CELLS (SIDE * PITCH)
#define TURNS 1
#define VS (16 / D_BYTES)
typedef D Cell;
__device__ __forceinline__ void store_tile(Cell* tile, const Words<4>* in, float add, int cast) {
  #pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int r = i * LY + threadIdx.x / LX;
    #pragma unroll
    for (int j = 0; j < VL; j++)
      tile[r * PITCH + (threadIdx.x % LX) * VL + j] = convert(get<S_BYTES>(in[i], j), add, cast);
  }
}
__device__ __forceinline__ void load_tile(const Cell* tile, Words<4>* out, int line, int x) {
  out[0] = Words<4>{{0, 0, 0, 0}};
  #pragma unroll
  for (int j = 0; j < VS; j++) put<D_BYTES>(out[0], j, tile[(VS * x + j) * PITCH + line]);
}
#endif
#define WX (SIDE / VS)             // writes across a line of the target
#define WY (THREADS / WX)
#define ROUNDS (SIDE / TURNS / WY)

#if PIPED
"""
    + PIPED
    + r"""
#else
extern "C" __global__ void __launch_bounds__(THREADS, QUICK ? 4 : 1) tiles(ARGS) {
  __shared__ i64 e[FIELDS]; __shared__ u32 at[2]; __shared__ Cell buffer[CELLS];
  if (!begin(e, at, entries, first, count, sources, targets, sums, permit, version, refused)) return;
  const Place o = place(e, at[0]);
  const int flags = (int)E(flags), cast = (int)E(cast);
  const float add = __uint_as_float((u32)E(add));
  const i64 na = E(na), nb = E(nb), dsb = E(dsb), b0 = (i64)o.b * SIDE, a0 = (i64)o.a * (SIDE * DEEP);
  const S* from = (const S*)sources[E(source)];
  D* to = (D*)targets[E(target)];
  const bool loads = (flags & LOAD) && !((u64)from & 15);
  const Reader read = {from + o.src, {na, E(na1), E(ssa1), E(ssa2)}, nb, E(ssb), b0, loads};
  const A_axis into = {na, E(na1), E(dsa1), E(dsa2)};
  D* dst = to + o.dst + b0 * dsb;
  const bool vec = (flags & STORE) && !((u64)to & 15);
  const int x = threadIdx.x % WX, y = threadIdx.x / WX;
  u64 total = 0; u32 carries = 0;
#if DIGEST
  __shared__ u32 us[SIDE * DEEP]; __shared__ u32 vs[SIDE];
  const u64 row = E(row);
  if (QUICK || (flags & SEPARABLE)) {
    u64 line0, col0; split(o.dst, row, line0, col0);
    const A_axis line = {na, E(na1), E(line1), E(line2)};
    for (int i = threadIdx.x; i < SIDE * DEEP; i += THREADS)
      us[i] = a0 + i < na ? weight((u32)(line0 + line(a0 + i)), LINE) : 0;
    if (threadIdx.x < SIDE) {
      const i64 q = b0 + threadIdx.x;
      vs[threadIdx.x] = q < nb ? weight((u32)(col0 + q * dsb), COLUMN) : 0;
    }
  }
  u32 v[VS];
#endif
  Words<4> in[PASSES];
  read(in, a0);
  #pragma unroll 1
  for (int t = 0; t < DEEP && a0 + t * SIDE < na; t++) {
#if D_BYTES == 2
    Cell* tile = buffer + (t & 1) * (SIDE * SIDE / 2);  // double-buffered: one barrier per round is enough
#else
    Cell* tile = buffer;
    if (t) __syncthreads();
#endif
    store_tile(tile, in, add, cast);
    __syncthreads();
#if DIGEST
    if (!t && (QUICK || (flags & SEPARABLE))) {
      #pragma unroll
      for (int j = 0; j < VS; j++) v[j] = vs[x * VS + j];
    }
#endif
    if (t + 1 < DEEP && a0 + (t + 1) * SIDE < na) read(in, a0 + (t + 1) * SIDE);
    #pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
      Words<4> out[TURNS];
      load_tile(tile, out, k * WY + y, x);
      #pragma unroll
      for (int r = 0; r < TURNS; r++) {
        const int line = t * SIDE + (k * WY + y) * TURNS + r;
        const i64 p = a0 + line, q = b0 + x * VS;
        if (p < na && q < nb) {
          const i64 base = into(p);
          check_words(carries, out[r]);
#if WRITE
          if (QUICK || (vec && q + VS <= nb)) store(dst + base + x * VS, out[r]);
          else {
            #pragma unroll
            for (int j = 0; j < VS; j++) if (q + j < nb) dst[base + (x * VS + j) * dsb] = get<D_BYTES>(out[r], j);
          }
#endif
#if DIGEST
          if (QUICK || (flags & SEPARABLE)) {
            u64 sum = 0;
            #pragma unroll
            for (int j = 0; j < VS; j++) sum += term(get<D_BYTES>(out[r], j), v[j]);
            total += sum * us[line];
          } else {
            #pragma unroll
            for (int j = 0; j < VS; j++)
              if (q + j < nb) total += lone(get<D_BYTES>(out[r], j), o.dst + base + (q + j) * dsb, row);
          }
#endif
        }
      }
    }
  }
  report(carries, refused, E(slot));
#if DIGEST
  add_up(total, sums, E(slot));
#endif
}
#endif
"""
)


# Compilation and launches ------------------------------------------------------------------------------------------


def cupy() -> Any:
    """The cupy module, or an error that says what to install."""
    try:
        import cupy as module
    except ImportError as e:
        raise MissingDependency(
            "transport ipc needs cupy",
            remedy="pip install cupy-cuda12x or cupy-cuda13x",
        ) from e
    return module


def shared(program: Program, look: bool) -> Program:
    """The program whose kernel this one can use: values moved as bits share one kernel per width, unless checked."""
    if (
        program.source != program.wire
        or program.computes
        or (look and exponent(program.wire))
    ):
        return program
    name = f"uint{8 * item_bytes(program.source)}"
    return replace(program, source=name, wire=name)


def defines(program: Program, write: bool, digest: bool, look: bool) -> tuple[str, ...]:
    """The compiler options for one program; `look`: check for values that are not finite."""
    same = program.source == program.wire
    raw = same and not program.computes
    bits = exponent(program.wire) if look else 0
    values = {
        "EXPONENT": f"{bits >> 32 if item_bytes(program.wire) == 8 else bits}u",
        "S_BYTES": item_bytes(program.source),
        "D_BYTES": item_bytes(program.wire),
        "SRC": 0 if raw else FLOATS[program.source],
        "DST": 0 if raw else FLOATS[program.wire],
        "COMPUTES": int(program.computes),
        "QUICK": int(program.quick),
        "WRITE": int(write),
        "DIGEST": int(digest),
        "FIELDS": len(FIELDS),
        "STRIPES": STRIPES,
        "LINE": f"{LINE}u",
        "COLUMN": f"{COLUMN}u",
        "PLACE_1": f"{int(PLACE[1])}ull",
        **{f"F_{name}": k for name, k in AT.items()},
        **{name: getattr(ipc, name) for name in SHARED},
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def _module(options: tuple[str, ...]) -> Any:
    return cupy().RawModule(code=SOURCE, options=("-std=c++17", *options))


@cache
def compiled(
    program: Program, write: bool, digest: bool, look: bool, device: int
) -> Any:
    """The kernel of a program; compiled on first use on a device, then cached on disk by cupy."""
    program = shared(program, look)
    return _module(defines(program, write, digest, look)).get_function(program.form)


class Launcher:
    """Tables of one device, uploaded once; `launch` runs them all on a stream. Use it with that device current.

    `look`: also check for values that are not finite.
    """

    def __init__(
        self,
        device: int,
        tables: Sequence[Table],
        slots: int,
        write: bool = True,
        look: bool = True,
    ) -> None:
        cp = cupy()
        self.device = device
        self.slots = slots
        self._write = write
        self._look = look
        self.nbytes = sum(t.nbytes for t in tables)
        self._kernels: dict[bool, list[Any]] = {}  # with digests, or without
        with cp.cuda.Device(device):
            self._tables = [
                (
                    t.program,
                    t.blocks,
                    cp.asarray(t.entries),
                    cp.asarray(t.first),
                    np.int32(len(t.first)),
                )
                for t in sorted(tables, key=lambda t: -t.nbytes)
            ]
            # sums of the digests, how many blocks were refused, a flag for each slot
            self._sums = cp.zeros(slots * STRIPES + 1 + slots, dtype=np.uint64)
            # copied by the stream itself
            self._pinned = cp.cuda.alloc_pinned_memory(self._sums.nbytes)
            self._found = np.frombuffer(self._pinned, np.uint64, self._sums.size)
            self._refused = self._sums[slots * STRIPES :]
            cp.cuda.get_current_stream().synchronize()

    def warm(self, digests: Sequence[bool] | None = None) -> None:
        """Compile everything now, not in the first sync; `digests`: only launches with or without them."""
        with cupy().cuda.Device(self.device):
            for program, *_ in self._tables:
                for digest in {not self._write, True} if digests is None else digests:
                    compiled(program, self._write, digest, self._look, self.device)

    def clear(self, stream: Any) -> None:
        """Zero the sums, in stream order; once before each launch."""
        with cupy().cuda.Device(self.device), stream:
            # fill() would compile a kernel
            self._sums.data.memset_async(0, self._sums.nbytes, stream)

    def launch(
        self,
        stream: Any,
        sources: Any,
        targets: Any,
        *,
        digest: bool = True,
        permit: int = 0,
        version: int = 0,
        cleared: bool = False,
    ) -> None:
        """Launch everything, in stream order; `sources` and `targets` are device arrays of pointers."""
        if not cleared:
            self.clear(stream)
        with cupy().cuda.Device(self.device), stream:
            if digest not in self._kernels:
                options = self._write, digest, self._look, self.device
                self._kernels[digest] = [compiled(t[0], *options) for t in self._tables]
            last = (self._sums, np.uint64(permit), np.uint64(version), self._refused)
            for kernel, (_, blocks, entries, first, count) in zip(
                self._kernels[digest], self._tables, strict=True
            ):
                kernel(
                    (blocks,),
                    (THREADS,),
                    (entries, first, count, sources, targets, *last),
                )
            self._sums.data.copy_to_host_async(
                self._pinned.ptr, self._sums.nbytes, stream
            )

    def sums(self, stream: Any) -> np.ndarray:
        """Waits for the stream; digests by slot, modulo 2**64."""
        stream.synchronize()
        of_slots = self._found[: self.slots * STRIPES].reshape(self.slots, STRIPES)
        return of_slots.sum(axis=1, dtype=np.uint64)

    def refused(self, stream: Any) -> int:
        """Waits for the stream; how many blocks had no permit to write."""
        stream.synchronize()
        return int(self._found[self.slots * STRIPES])

    def flawed(self, stream: Any) -> list[int]:
        """Waits for the stream; the slots with a NaN or Inf among the converted values."""
        stream.synchronize()
        return np.flatnonzero(self._found[self.slots * STRIPES + 1 :]).tolist()

"""The CUDA source of "tiles" for 16-bit elements moved as bits: asynchronous reads ahead into shared memory.

On an H200 this form transposed 3.4 GB of matrices at 0.94 of the GPU's copy rate, the one through registers at 0.77.
More tiles ahead, deeper blocks or more blocks at once were all slower: they spread over more of the memory.
"""

from __future__ import annotations

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

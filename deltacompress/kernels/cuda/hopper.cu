// SBMM for many rows per variant on Hopper, groups of whole rows or of a multiple of 64 columns: the warpgroup matrix instructions (wgmma), sparse ones
// for 2:4, which reach rates that mma.sp does not, and read activations from shared memory without passing registers.
//
// A block computes 128 TALL out_features times 128 rows: two warpgroups, each TALL operands of 64 out_features, decoded
// in registers from the packed layout of decode.cu (a warp holds one 16-row tile of each). TALL is 2, or 1 where groups
// need registers for sums of their own. Activations lie in shared memory as the instruction's 128-byte swizzle wants them, which is the one that keeps copies free of bank conflicts.
//
// More macros: STAGES, FAST.
#include "prefill.cuh"

constexpr int BLOCKS = SPARSE ? 1 : 2;
constexpr int ROWS = 128, X_ROW = 128, X_BYTES = ROWS * X_ROW;
constexpr int DELTA = BLOCKS * BLOCK_BYTES;  // of a stage, 128 out_features
constexpr int TALL = GROUP ? 1 : 2, LOADERS = 256 / TALL;
constexpr int SLOT = (X_BYTES + TALL * DELTA + (GROUP ? SCALE_BYTES : 0) + 1023) / 1024 * 1024;

// Codes and patterns of one lane for one 16-row tile and one block.
struct Codes {
  u32 code[2], high, meta;

  __device__ __forceinline__ void load(const u8* block, int t, int lane) {
    if (BITS == 4) {
      uint2 v = *(const uint2*)(block + t / 2 * 512 + lane * 16 + t % 2 * 8);
      code[0] = v.x, code[1] = v.y;
    } else if (BITS == 1) {
      code[0] = word(block, t / 2, lane) >> t % 2 * 8;
    } else {
      code[0] = word(block, t, lane);
      if (BITS == 3) high = word(block, 8 + t / 2, lane) >> t % 2 * 8;
    }
    if (SPARSE) meta = word(block, CODE_WORDS + t, lane);
  }

  __device__ __forceinline__ u32 field(int s, int j) const {
    if (BITS == 4) return pick<0x001e001e>(code[s], 4 * j - 1, ONE_HALF_MAGIC);
    if (BITS == 1) return one_bit<1>(code[0], 0, s, j, ONE_HALF_MAGIC);
    u32 low = two_bits(code[0], s, j);
    return BITS == 2 ? low : one_bit<3>(high, 0, s, j, low);
  }

 private:
  static __device__ __forceinline__ u32 word(const u8* block, int index, int lane) {
    return *(const u32*)(block + index / 4 * 512 + lane * 16 + index % 4 * 4);
  }
};

// d[4 n + j] = add * d + A x^T: 64 out_features, 128 rows, 32 columns (dense: 16)
template <int STEP>
__device__ __forceinline__ void multiply_group(float (&d)[64], const u32 (&a)[4], u64 x, u32 meta, int add) {
#if SPARSE
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %71, 0; wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." OPERANDS " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, %69, %70, add, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(meta), "n"(STEP), "r"(add));
#else
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
#endif
}

// Where a thread's part of the next stages comes from.
struct Source {
  const u8 *blocks, *scales;
  const Value* x;
  u32 rows;   // bit i: row thread / 8 + 32 i is there
  int bytes;  // of a copy of codes: 0 beyond the last out_features

  __device__ __forceinline__ void enter(const Problem& p, const Tile& tile, int m) {
    int thread = threadIdx.x, row = thread / 8;
    m = TALL * m + thread / LOADERS;
    bytes = m < p.m_tiles ? 16 : 0;
    blocks = tile.delta + p.blocks_at + (long long)m * p.blocks * BLOCK_BYTES + thread % LOADERS * 16;
    scales = tile.delta + (long long)m * p.scale_sets * SCALE_BYTES + thread * 16;
    x = p.x + (tile.row + (FAST ? row : 0)) * p.x_stride + (FAST ? thread % 8 * 8 : 0);
    rows = 0;
    for (int i = 0; i < 4; i++) rows |= (row + 32 * i < tile.rows) << i;
  }

  __device__ __forceinline__ void load(u8* slot, const Problem& p, const Tile& tile, int stage) const {
    int thread = threadIdx.x % LOADERS;
    u32 to = shared_address(slot) + X_BYTES + threadIdx.x / LOADERS * DELTA + thread * 16;
    const u8* from = blocks + (long long)stage * DELTA;
#pragma unroll
    for (int i = 0; i < DELTA; i += 16 * LOADERS)
      if (i + 16 * LOADERS <= DELTA || thread * 16 < DELTA - i) copy16(to + i, from + i, bytes);
    if (GROUP && thread < SCALE_BYTES / 16)
      copy16(to + DELTA, scales + min(stage * STAGE_K / p.group, p.scale_sets - 1) * SCALE_BYTES, 16);
#if FAST
    int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    bool inside = stage * STAGE_K + chunk * 8 < p.in;
    const Value* at = x + stage * STAGE_K;
    u32 x_to = shared_address(slot) + row * X_ROW + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      copy16(x_to + i * 32 * X_ROW, at, inside && rows >> i & 1 ? 16 : 0);  // of 0 bytes, the address is not read
      at += 32 * p.x_stride;
    }
#else
    for (int i = threadIdx.x; i < ROWS * STAGE_K; i += 256) {
      int row = i / STAGE_K, k = i % STAGE_K, column = stage * STAGE_K + k;
      bool there = row < tile.rows && column < p.in;
      ((u16*)(slot + row * X_ROW + (k / 8 ^ row % 8) * 16))[k % 8] =
          there ? x[row * p.x_stride + column] : (Value)0;
    }
#endif
  }
};

// Scales and zero points of a lane's two rows of one tile.
struct Scales {
  u32 zero[2], scale;
  __device__ __forceinline__ void load(const u8* set, int t, int lane) {
    int at = lane / 4 * 16 + t * 2;
    u32 both = *(const u16*)(set + 256 + at);
    zero[0] = zero_point(both, 0), zero[1] = zero_point(both, 1), scale = *(const u32*)(set + at * 2);
  }
  // of element i of the accumulators
  __device__ __forceinline__ float s(int i) const { return i % 4 < 2 ? low_bf16(scale) : high_bf16(scale); }
};

// sum = add * sum + a stage's products; tile: the first of the lane's, the others are 4 apart.
__device__ __forceinline__ void compute(float (&sum)[TALL][64], int add, const u8* slot, const u8* codes,
                                        const Scales (&scales)[TALL], int tile, int lane) {
  // descriptor: address, rows of 8 1024 bytes apart, 128-byte swizzle
  u64 x = (shared_address(slot) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
  u32 a[BLOCKS][2][TALL][4], meta[BLOCKS][TALL];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int h = 0; h < TALL; h++) {
      Codes part;
      part.load(codes + b * BLOCK_BYTES, tile + 4 * h, lane);
      meta[b][h] = SPARSE ? part.meta : 0;
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) a[b][s][h][j] = centered(part.field(s, j), scales[h].zero[j % 2], j);
    }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int h = 0; h < TALL; h++) {
      multiply_group<0>(sum[h], a[b][0][h], x + (SPARSE ? 0 : b * 4), meta[b][h], b ? 1 : add);
      multiply_group<1>(sum[h], a[b][1][h], x + (SPARSE ? 4 : b * 4 + 2), meta[b][h], 1);
    }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1)
    sbmm(const Value* x, Value* y, long long x_stride, long long y_stride, int in, int out, int group,
         const int* offsets, const int* slots, const u8* const* table, int runs, int lo, int hi) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ int listed;
  Tile* tiles = (Tile*)shared;
  // the swizzle counts from multiples of 1024 bytes
  u8* ring = shared + ((MAX_TILES * sizeof(Tile) + shared_address(shared) + 1023) / 1024 * 1024 - shared_address(shared));
  int side = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // of its 128 out_features, a warpgroup computes all (TALL 2) or every other 64
  int own = TALL == 2 ? side : 0, row_tile = TALL == 2 ? warp : side * 4 + warp;
  float* results = (float*)ring + own * ROWS * PITCH;
  Problem p(x, y, x_stride, y_stride, in, out, group);

  for (int first = 0;; first += MAX_TILES) {
    if (threadIdx.x < 32) {
      int total = list_tiles(tiles, first, ROWS, offsets, slots, table, runs, lo, hi);
      if (lane == 0) listed = total;
    }
    __syncthreads();
    int total = listed, m_sets = (p.m_tiles + TALL - 1) / TALL;
    int units = min(total - first, MAX_TILES) * m_sets;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      Tile tile = tiles[unit / m_sets];
      int m = unit % m_sets;
      Source source;
      source.enter(p, tile, m);
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) {
        if (i < p.stages) source.load(ring + i * SLOT, p, tile, i);
        commit();
      }
      float acc[TALL][64] = {};
#if GROUP
      float part[TALL][64];
#endif
      Scales set[TALL];
#if GROUP == 0
      const u8* scales = tile.delta + (long long)min(TALL * m + own, p.m_tiles - 1) * SCALE_BYTES;
#pragma unroll
      for (int h = 0; h < TALL; h++) set[h].load(scales, row_tile + 4 * h, lane);
#endif
      int at = 0, to = STAGES - 1;
      for (int stage = 0; stage < p.stages; stage++) {
        wait<STAGES - 2>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was copied is read by wgmma
        __syncthreads();
        int next = stage + STAGES - 1;
        if (next < p.stages) source.load(ring + to * SLOT, p, tile, next);
        commit();
        const u8* slot = ring + at * SLOT;
#if GROUP == 0
        compute(acc, 1, slot, slot + X_BYTES + own * DELTA, set, row_tile, lane);
#else
        set[0].load(slot + X_BYTES + DELTA, row_tile, lane);
        compute(part, stage * STAGE_K % p.group, slot, slot + X_BYTES, set, row_tile, lane);
        if ((stage + 1) * STAGE_K % p.group == 0 || stage + 1 == p.stages)
#pragma unroll
          for (int i = 0; i < 64; i++) acc[0][i] += part[0][i] * set[0].s(i);
#endif
        at = at + 1 == STAGES ? 0 : at + 1, to = to + 1 == STAGES ? 0 : to + 1;
      }
      wait<0>();
      __syncthreads();
#pragma unroll
      for (int h = 0; h < TALL; h++)
#pragma unroll
        for (int i = 0; i < 64; i++) {
          int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = (row_tile + 4 * h) * 16 + lane / 4 + i % 4 / 2 * 8;
          results[row * PITCH + column] = acc[h][i] * (GROUP ? 1.f : set[h].s(i));
        }
      __syncthreads();
      if (TALL == 1) {
        int skipped = 64 * side;  // each warpgroup adds half of the rows
        tile.row += skipped, tile.rows = max(min(tile.rows - skipped, 64), 0);
        add_to_y(p, tile, m, results + skipped * PITCH);
      } else {
        add_to_y(p, tile, TALL * m + own, results);
      }
      __syncthreads();
    }
    if (total <= first + MAX_TILES) return;
    __syncthreads();
  }
}

// SBMM for many rows per variant: bound by the matrix instructions.
//
// A block computes 128 out_features times 16 WIDE rows: four warps, two by two, each 64 x 8 WIDE. Codes become operands
// in registers, once for all rows of the warp; activations come through shared memory, STAGES stages deep. The packed
// layout is that of decode.cu. Results are collected in shared memory, so that y is read and written in whole rows.
//
// More macros: WIDE (8 for scales of whole rows, 4 where groups need sums of their own), STAGES,
// PER_SM (blocks on a multiprocessor), FAST.
#include "prefill.cuh"

constexpr int BLOCKS = SPARSE ? 1 : 2, STEPS = SPARSE ? 2 : 4;
constexpr int SUBS = GROUP == 0 ? 0 : STAGE_K / GROUP;
constexpr int ROWS = 16 * WIDE, X_ROW = 128;
constexpr int DELTA = BLOCKS * BLOCK_BYTES + SUBS * SCALE_BYTES;  // of a stage
constexpr int SLOT = DELTA + ROWS * X_ROW;

// Scales and zero points of a lane's rows in its warp's four tiles.
struct Scales {
  u32 zero[2], scale[4];
  __device__ __forceinline__ void load(const u8* set, int half, int lane) {
    uint2 z = *(const uint2*)(set + 256 + lane / 4 * 16 + half * 8);
    uint4 s = *(const uint4*)(set + lane / 4 * 32 + half * 16);
    zero[0] = z.x, zero[1] = z.y;
    scale[0] = s.x, scale[1] = s.y, scale[2] = s.z, scale[3] = s.w;
  }
  __device__ __forceinline__ u32 z(int t, int row) const { return zero_point(zero[t / 2], t % 2 * 2 + row); }
  __device__ __forceinline__ float s(int t, int j) const { return j < 2 ? low_bf16(scale[t]) : high_bf16(scale[t]); }
};

// Where a thread's part of the next stages comes from.
struct Source {
  static constexpr int APART = 16, COPIES = ROWS / APART;  // of 16 bytes of x, one row in APART
  const u8 *blocks, *scales;
  const Value* x;
  u32 rows;  // bit i: row thread / 8 + APART i is there
  u32 x_to;

  __device__ __forceinline__ void enter(const Problem& p, const Tile& tile, int m) {
    int thread = threadIdx.x, row = thread / 8, chunk = thread % 8;
    blocks = tile.delta + p.blocks_at + (long long)m * p.blocks * BLOCK_BYTES + thread * 16;
    scales = tile.delta + (long long)m * p.scale_sets * SCALE_BYTES;
    x = p.x + (tile.row + (FAST ? row : 0)) * p.x_stride + (FAST ? chunk * 8 : 0);
    rows = 0;
    for (int i = 0; i < COPIES; i++) rows |= (row + APART * i < tile.rows) << i;
    x_to = DELTA + row * X_ROW + (chunk ^ row % 8) * 16;
  }

  __device__ __forceinline__ void load(u8* slot, const Problem& p, const Tile& tile, int stage) const {
    int thread = threadIdx.x;
    u32 to = shared_address(slot);
    const u8* from = blocks + (long long)stage * (BLOCKS * BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < BLOCKS * BLOCK_BYTES; i += 2048)
      if (i + 2048 <= BLOCKS * BLOCK_BYTES || thread * 16 < BLOCKS * BLOCK_BYTES - i)
        copy16(to + thread * 16 + i, from + i, 16);
    for (int i = thread; i < SUBS * 24; i += 128) {
      int set = min((stage * STAGE_K + i / 24 * GROUP) / p.group, p.scale_sets - 1);
      copy16(to + BLOCKS * BLOCK_BYTES + i * 16, scales + set * SCALE_BYTES + i % 24 * 16, 16);
    }
#if FAST
    bool inside = stage * STAGE_K + thread % 8 * 8 < p.in;
    const Value* at = x + stage * STAGE_K;
    u32 x_at = shared_address(slot) + x_to;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      bool there = inside && rows >> i & 1;
      copy16(x_at + i * APART * X_ROW, at, there ? 16 : 0);  // of 0 bytes, the address is not read
      at += APART * p.x_stride;
    }
#else
    u8* x_slot = slot + DELTA;
    for (int i = threadIdx.x; i < ROWS * STAGE_K; i += 128) {
      int row = i / STAGE_K, k = i % STAGE_K, column = stage * STAGE_K + k;
      bool there = row < tile.rows && column < p.in;
      ((u16*)(x_slot + row * X_ROW + (k / 8 ^ row % 8) * 16))[k % 8] =
          there ? x[row * p.x_stride + column] : (Value)0;
    }
#endif
  }
};

template <int STEP>
__device__ __forceinline__ void products(float (&sum)[WIDE][4], const u32 (&a)[4], const u32 (&b)[WIDE][4], int at,
                                         u32 meta) {
#pragma unroll
  for (int n = 0; n < WIDE; n++) multiply<STEP>(sum[n], a, &b[n][at], meta);
}

// `part` holds the sum of the scale group at hand, which `end` says ends here (groups of less than a stage end anyway).
__device__ __forceinline__ void compute(float (&acc)[4][WIDE][4], float (&part)[4][WIDE][4], bool end, const u8* slot,
                                        const u32 (&row_zero)[4][2], int half, int side, int lane) {
  u32 x = shared_address(slot + DELTA) + (side * 8 * WIDE + lane % 8) * X_ROW;
  const u8* scales = slot + BLOCKS * BLOCK_BYTES;
  Scales set[SUBS ? SUBS : 1];
#pragma unroll
  for (int i = 0; i < SUBS; i++) set[i].load(scales + i * SCALE_BYTES, half, lane);
#pragma unroll
  for (int quarter = 0; quarter < 2; quarter++) {  // 32 columns
    Half block;
    block.load(slot + (SPARSE ? 0 : quarter) * BLOCK_BYTES, half, lane);
    u32 b[WIDE][4];
#pragma unroll
    for (int n = 0; n < WIDE; n++)
      load_b(b[n], x + n * 8 * X_ROW + ((quarter * 4 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
    for (int k = 0; k < STEPS / 2; k++) {
      int step = quarter * (STEPS / 2) + k, in_block = SPARSE ? quarter : k;
      int sub = SUBS ? step * STEP_K / (GROUP ? GROUP : 1) : 0;
#pragma unroll
      for (int t = 0; t < 4; t++) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          int from = STEP_K > GROUP ? sub + j / 2 : sub;
          u32 zero = GROUP ? set[GROUP ? from : 0].z(t, j % 2) : row_zero[t][j % 2];
          a[j] = centered(block.field(t, in_block, j), zero, j);
        }
#if GROUP == 0
        if (in_block) products<1>(acc[t], a, b, k * 2, block.meta[t]);
        else products<0>(acc[t], a, b, k * 2, block.meta[t]);
#else
        if (STEP_K > GROUP) {
          // two groups of 16 columns in one instruction's 32: one at a time, the other's codes zero
          u32 left[4] = {a[0], a[1], 0, 0}, right[4] = {0, 0, a[2], a[3]};
          float other[WIDE][4] = {};
          if (in_block) {
            products<1>(part[t], left, b, k * 2, block.meta[t]), products<1>(other, right, b, k * 2, block.meta[t]);
          } else {
            products<0>(part[t], left, b, k * 2, block.meta[t]), products<0>(other, right, b, k * 2, block.meta[t]);
          }
#pragma unroll
          for (int n = 0; n < WIDE; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[t][n][j] += other[n][j] * set[STEP_K > GROUP ? sub + 1 : 0].s(t, j);
        } else if (in_block) {
          products<1>(part[t], a, b, k * 2, block.meta[t]);
        } else {
          products<0>(part[t], a, b, k * 2, block.meta[t]);
        }
        if (GROUP == STAGE_K ? step == STEPS - 1 && end : (step + 1) * STEP_K % GROUP == 0) {
#pragma unroll
          for (int n = 0; n < WIDE; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[t][n][j] += part[t][n][j] * set[sub].s(t, j), part[t][n][j] = 0;
        }
#endif
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, PER_SM)
    sbmm(const Value* x, Value* y, long long x_stride, long long y_stride, int in, int out, int group,
         const int* offsets, const int* slots, const u8* const* table, int runs, int lo, int hi) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ int listed;
  Tile* tiles = (Tile*)shared;
  u8* ring = shared + MAX_TILES * sizeof(Tile);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 2, side = warp % 2;
  float* results = (float*)ring;
  Problem p(x, y, x_stride, y_stride, in, out, group);

  for (int first = 0;; first += MAX_TILES) {
    if (warp == 0) {
      int total = list_tiles(tiles, first, ROWS, offsets, slots, table, runs, lo, hi);
      if (lane == 0) listed = total;
    }
    __syncthreads();
    int total = listed, units = min(total - first, MAX_TILES) * p.m_tiles;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      Tile tile = tiles[unit / p.m_tiles];
      int m = unit % p.m_tiles;
      Source source;
      source.enter(p, tile, m);
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) {
        if (i < p.stages) source.load(ring + i * SLOT, p, tile, i);
        commit();
      }
      int at = 0, to = STAGES - 1;
      float acc[4][WIDE][4] = {}, part[4][WIDE][4] = {};
      u32 row_zero[4][2] = {};
      Scales whole;
#if GROUP == 0
      whole.load(tile.delta + (long long)m * SCALE_BYTES, half, lane);
#pragma unroll
      for (int t = 0; t < 4; t++) row_zero[t][0] = whole.z(t, 0), row_zero[t][1] = whole.z(t, 1);
#endif
      for (int stage = 0; stage < p.stages; stage++) {
        wait<STAGES - 2>();
        __syncthreads();
        int next = stage + STAGES - 1;
        if (next < p.stages) source.load(ring + to * SLOT, p, tile, next);
        commit();
        bool end = GROUP != 0 && ((stage + 1) * STAGE_K % p.group == 0 || stage + 1 == p.stages);
        compute(acc, part, end, ring + at * SLOT, row_zero, half, side, lane);
        at = at + 1 == STAGES ? 0 : at + 1, to = to + 1 == STAGES ? 0 : to + 1;
      }
      wait<0>();
      __syncthreads();
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int n = 0; n < WIDE; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            int row = (side * WIDE + n) * 8 + lane % 4 * 2 + j % 2;
            int column = (half * 4 + t) * 16 + lane / 4 + j / 2 * 8;
            results[row * PITCH + column] = acc[t][n][j] * (GROUP == 0 ? whole.s(t, j) : 1.f);
          }
      __syncthreads();
      add_to_y(p, tile, m, results);
      __syncthreads();
    }
    if (total <= first + MAX_TILES) return;
    __syncthreads();
  }
}

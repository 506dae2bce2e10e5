// SBMM for few rows per variant: bound by the memory that the packed deltas come from.
//
// A unit of work is 128 out_features of one delta times up to ROWS rows. The warps of a block share a unit: warp w takes
// stages w, w + WARPS, ... of the columns, each with a ring of STAGES copies of its own that runs on into the next
// unit, so no barrier ever empties it; the partial sums meet in shared memory at the end of a unit. Blocks stay and
// walk over the units of all variants, and of all linears that read the same x (query, key and value, say), whose
// results lie side by side in y. A row's result does not depend on the other rows.
//
// More macros: ROWS (1, 8, 16), WARPS (at least 4), STAGES, PER_SM (blocks on a multiprocessor), FAST (1: rows of x start on
// 16 bytes).
#include "units.cuh"

constexpr int STAGE_K = 4 * STEP_K;
constexpr int SUBS = GROUP == 0 ? 1 : STAGE_K / GROUP;     // scales of one row in a stage
constexpr int X_ROW = STAGE_K * 2;                         // bytes
constexpr int NT = (ROWS + 7) / 8;
constexpr int X_PLANE = ROWS * X_ROW;
constexpr int PLANES = DTYPE == 2 ? 3 : 1;
constexpr int SLOT = 2 * BLOCK_BYTES + SUBS * SCALE_BYTES + PLANES * X_PLANE;
constexpr bool FLUSH = GROUP != 0 || DTYPE == 2;           // partial sums go through fp32 additions ...
constexpr int FLUSHES = DTYPE == 2 || SUBS > 2 ? 2 : 1;    // ... so many times in a block
// Two groups of 16 columns share one instruction of 32: it is issued for each of them, the other's codes zero.
constexpr bool HALVES = SUBS > 4;

// The scales and zero points of a lane's rows in all eight tiles.
struct Scales {
  u32 zero[4], scale[8];
  __device__ __forceinline__ void load(const u8* set, int lane) {
    uint4 z = *(const uint4*)(set + 256 + lane / 4 * 16);
    uint4 s = *(const uint4*)(set + lane / 4 * 32), r = *(const uint4*)(set + lane / 4 * 32 + 16);
    zero[0] = z.x, zero[1] = z.y, zero[2] = z.z, zero[3] = z.w;
    scale[0] = s.x, scale[1] = s.y, scale[2] = s.z, scale[3] = s.w;
    scale[4] = r.x, scale[5] = r.y, scale[6] = r.z, scale[7] = r.w;
  }
  // z of row g (0) or g + 8 (1) of tile t
  __device__ __forceinline__ u32 z(int t, int row) const { return zero_point(zero[t / 2], t % 2 * 2 + row); }
  // scale of element j of an accumulator
  __device__ __forceinline__ float s(int t, int j) const { return j < 2 ? low_bf16(scale[t]) : high_bf16(scale[t]); }
};

// Where a warp's next stage comes from: it runs ahead of the computation, across units.
struct Source {
  const u8 *blocks, *scales;
  const Value* x;
  int rows, stage, unit;

  __device__ __forceinline__ void enter(const Problem& p, const Unit& at, int first_stage, int lane) {
    Tile tile = *at.tile;
    stage = first_stage, rows = tile.rows;
    long long blocks_at = ((long long)at.m_tiles * p.scale_sets * SCALE_BYTES + 255) / 256 * 256;
    blocks = tile.delta + blocks_at + ((long long)at.m * p.stages + stage) * (2 * BLOCK_BYTES) + lane * 16;
    scales = tile.delta + (long long)at.m * p.scale_sets * SCALE_BYTES + lane * 16;
    x = p.x + tile.row * p.x_stride;
  }

  __device__ __forceinline__ void load(u8* slot, const Problem& p, bool first, int lane) const {
    u32 to = shared_address(slot) + lane * 16;
#pragma unroll
    for (int i = 0; i < 2 * BLOCK_BYTES / 512; i++) stream16(to + i * 512, blocks + i * 512);
    to += 2 * BLOCK_BYTES;
    if ((GROUP != 0 || first) && lane < SCALE_BYTES / 16) {
#pragma unroll
      for (int i = 0; i < SUBS; i++) {
        int set = GROUP == 0 ? 0 : min((stage * STAGE_K + i * GROUP) / p.group, p.scale_sets - 1);
        copy16(to + i * SCALE_BYTES, scales + set * SCALE_BYTES, 16);
      }
    }
    load_x(slot + 2 * BLOCK_BYTES + SUBS * SCALE_BYTES, p, lane);
  }

 private:
  __device__ __forceinline__ void load_x(u8* to, const Problem& p, int lane) const {
#if FAST
    constexpr int CHUNKS = X_ROW / 16;
    int chunk = lane % CHUNKS, column = stage * STAGE_K + chunk * 8, bytes = column < p.in ? 16 : 0;
    const Value* from = x + (bytes ? column : 0);
    for (int row = lane / CHUNKS; row < rows; row += 32 / CHUNKS)
      copy16(shared_address(to + row * X_ROW + (chunk ^ row % 8) * 16), from + row * p.x_stride, bytes);
#else
    for (int i = lane; i < rows * STAGE_K; i += 32) {
      int row = i / STAGE_K, k = i % STAGE_K, column = stage * STAGE_K + k;
      u16* at = (u16*)(to + row * X_ROW + (k / 8 ^ row % 8) * 16) + k % 8;
      Value v = column < p.in ? x[row * p.x_stride + column] : (Value)0;
#if DTYPE == 2
      u16 high = to_bf16(v);
      float rest = v - low_bf16(high);
      u16 middle = to_bf16(rest);
      at[0] = high, at[X_PLANE / 2] = middle, at[X_PLANE] = to_bf16(rest - low_bf16(middle));
#else
      *at = v;
#endif
    }
#endif
  }
};

__device__ __forceinline__ void products(float (&sum)[NT][4], const u32 (&a)[4], const u32 (&b)[PLANES][NT][8],
                                         int step, u32 meta) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) {
      const u32* operand = &b[plane][n][step * (SPARSE ? 4 : 2)];
      if (step) multiply<1>(sum[n], a, operand, meta);
      else multiply<0>(sum[n], a, operand, meta);
    }
}

__device__ __forceinline__ void compute(float (&acc)[8][NT][4], const u8* slot, const u32 (&row_zero)[8][2], int lane) {
  constexpr int X_CHUNKS = X_ROW / 32;  // of 16 bytes, of one row and block
  const u8* scales = slot + 2 * BLOCK_BYTES;
  int row = min(lane % 8, ROWS - 1);
  u32 x = shared_address(scales + SUBS * SCALE_BYTES) + row * X_ROW;
  // not unrolled: the code of a kernel that runs for some 30 us has to come from memory, too
#pragma unroll 1
  for (int block = 0; block < 2; block++, slot += BLOCK_BYTES, scales += SUBS / 2 * SCALE_BYTES) {
    u32 b[PLANES][NT][8];
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < X_CHUNKS / 4; i++) {
          u32 four[4];
          load_b(four, x + plane * X_PLANE + n * 8 * X_ROW + ((block * X_CHUNKS + i * 4 + lane / 8) ^ row) * 16);
#pragma unroll
          for (int j = 0; j < 4; j++) b[plane][n][i * 4 + j] = four[j];
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Half codes;
      codes.load(slot, half, lane);
#pragma unroll
      for (int sub = 0; sub < FLUSHES; sub++) {
        constexpr int STEPS = 2 / FLUSHES;
        Scales set, next;
        if (GROUP != 0) set.load(scales + (SUBS <= 2 ? 0 : sub * SUBS / 4) * SCALE_BYTES, lane);
        if (HALVES) next.load(scales + (2 * sub + 1) * SCALE_BYTES, lane);
        float part[4][NT][4] = {}, other[4][NT][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
          int step = sub * STEPS + k;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int t = half * 4 + i;
            u32 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
              u32 zero = GROUP == 0 ? row_zero[t][j % 2] : HALVES && j / 2 ? next.z(t, j % 2) : set.z(t, j % 2);
              a[j] = centered(codes.field(i, step, j), zero, j);
            }
            if (HALVES) {
              u32 left[4] = {a[0], a[1], 0, 0}, right[4] = {0, 0, a[2], a[3]};
              products(part[i], left, b, step, codes.meta[i]), products(other[i], right, b, step, codes.meta[i]);
            } else {
              products(FLUSH ? part[i] : acc[t], a, b, step, codes.meta[i]);
            }
          }
        }
        if (FLUSH)
#pragma unroll
          for (int i = 0; i < 4; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int j = 0; j < 4; j++) {
                int t = half * 4 + i;
                acc[t][n][j] += (GROUP == 0 ? 1.f : set.s(t, j)) * part[i][n][j];
                if (HALVES) acc[t][n][j] += next.s(t, j) * other[i][n][j];
              }
      }
    }
  }
}

// The warps' partial sums of a unit -> y. `meeting`: WARPS x 128 float4.
__device__ __forceinline__ void finish(const Problem& p, const Unit& unit, const float (&acc)[8][NT][4],
                                       float4* meeting, int warp, int lane) {
  constexpr int AT_ONCE = 4 / NT, ROUNDS = 8 / AT_ONCE;
  Tile tile = *unit.tile;
  int row = warp % NT * 8 + lane % 4 * 2, column = unit.m * 128 + warp / NT * 16 + lane / 4;
  Value* to = p.y + (tile.row + row) * p.y_stride + unit.first + column;
  auto inside = [&](int round, int j) {
    return warp < 4 && row + j % 2 < tile.rows && column + round * AT_ONCE * 16 + j / 2 * 8 < unit.out;
  };
  Value before[ROUNDS][4];  // asked for early: they come from far
#pragma unroll
  for (int round = 0; round < ROUNDS; round++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (inside(round, j)) before[round][j] = to[j % 2 * p.y_stride + round * AT_ONCE * 16 + j / 2 * 8];
#pragma unroll
  for (int first = 0; first < 8; first += AT_ONCE) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float(&v)[4] = acc[first + i][n];
        meeting[warp * 128 + (i * NT + n) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
      }
    __syncthreads();
    if (warp < 4) {
      float v[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float4 part = meeting[w * 128 + warp * 32 + lane];
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
      }
      int round = first / AT_ONCE;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (inside(round, j))
          to[j % 2 * p.y_stride + round * AT_ONCE * 16 + j / 2 * 8] = narrow(widen(before[round][j]) + v[j]);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM)
    sbmm(const Value* x, Value* y, long long x_stride, long long y_stride, int in, int group,
         const __grid_constant__ Members members, const int* offsets, const int* slots, int runs, int lo, int hi) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ int ends[MAX_MEMBERS], listed, unit_count;
  Tile* tiles = (Tile*)shared;
  float4* meeting = (float4*)(shared + MAX_TILES * sizeof(Tile));
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u8* ring = shared + MAX_TILES * sizeof(Tile) + WARPS * 2048 + warp * (STAGES * SLOT);
  Problem p = {x, y, x_stride, y_stride, in, group};
  p.stages = (in + STAGE_K - 1) / STAGE_K;
  p.scale_sets = GROUP == 0 ? 1 : (in + group - 1) / group;

  for (int first = 0;; first += MAX_TILES) {
    if (warp == 0) {
      int total = 0, sum = 0, before = 0;
      for (int i = 0; i < members.count; i++) {
        total = list_tiles(tiles, first, ROWS, offsets, slots, members.table[i], runs, lo, hi, total);
        int end = min(max(total - first, 0), MAX_TILES);
        sum += (end - before) * ((members.out[i] + 127) / 128), before = end;
        if (lane == 0) ends[i] = end;
      }
      if (lane == 0) listed = total, unit_count = sum;
    }
    __syncthreads();
    int total = listed, units = unit_count;

    Source source;
    source.unit = blockIdx.x;
    if (source.unit < units) source.enter(p, Unit(members, tiles, ends, source.unit), warp, lane);
    int to = 0;
    auto issue = [&]() {
      if (source.unit < units) {
        if (source.stage < p.stages) {
          source.load(ring + to * SLOT, p, source.stage == warp, lane);
          source.stage += WARPS, source.blocks += WARPS * 2 * BLOCK_BYTES;
        }
        if (source.stage >= p.stages && (source.unit += gridDim.x) < units)
          source.enter(p, Unit(members, tiles, ends, source.unit), warp, lane);
      }
      commit();
      to = to + 1 == STAGES ? 0 : to + 1;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) issue();

    int at = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      float acc[8][NT][4] = {};
      u32 row_zero[8][2] = {}, row_scale[8] = {};
      for (int stage = warp; stage < p.stages; stage += WARPS) {
        wait<STAGES - 2>();
        __syncwarp();  // everyone's copies are here, and everyone is done with the slot that is filled next
        issue();
        if (GROUP == 0 && stage == warp) {
          Scales set;
          set.load(ring + at * SLOT + 2 * BLOCK_BYTES, lane);
#pragma unroll
          for (int t = 0; t < 8; t++) {
            row_zero[t][0] = set.z(t, 0), row_zero[t][1] = set.z(t, 1), row_scale[t] = set.scale[t];
          }
        }
        compute(acc, ring + at * SLOT, row_zero, lane);
        at = at + 1 == STAGES ? 0 : at + 1;
      }
      if (GROUP == 0)
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[t][n][j] *= j < 2 ? low_bf16(row_scale[t]) : high_bf16(row_scale[t]);
      finish(p, Unit(members, tiles, ends, unit), acc, meeting, warp, lane);
    }
    wait<0>();
    if (total <= first + MAX_TILES) return;
    __syncthreads();
  }
}

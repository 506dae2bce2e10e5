// SBMM for many rows per variant on Hopper, scales of whole rows or of groups of a multiple of 64 columns: the
// warpgroup matrix instructions (wgmma), sparse ones for 2:4, which reach rates that mma.sp does not, and read
// activations from shared memory without passing registers.
//
// A block computes 256 out_features times 128 rows: two warpgroups, each two operands of 64 out_features, decoded in
// registers from the packed layout of decode.cu (a warp holds one 16-row tile of each). wgmma runs beside other
// instructions: while one operand is multiplied, the warpgroup decodes the other. Activations lie in shared memory as
// the instruction's 128-byte swizzle wants them, which is the one that keeps copies free of bank conflicts.
//
// More macros: STAGES (at least 3), FAST.
#include "prefill.cuh"
static_assert(GROUP == 0 || GROUP == STAGE_K, "groups are whole stages");

constexpr int BLOCKS = SPARSE ? 1 : 2;
constexpr int ROWS = 128, X_ROW = 128, X_BYTES = ROWS * X_ROW;
constexpr int DELTA = BLOCKS * BLOCK_BYTES;  // of a stage, 128 out_features
constexpr int LOADERS = 128;                 // threads that copy these: a warpgroup for itself
constexpr int SETS = X_BYTES + 2 * DELTA;    // where scales of groups lie
constexpr int SLOT = (SETS + (GROUP ? 2 * SCALE_BYTES : 0) + 1023) / 1024 * 1024;

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

// A lane's part of operand A: 64 out_features, the columns of a stage.
struct Operand {
  u32 a[BLOCKS][2][4], meta[BLOCKS];

  __device__ __forceinline__ void decode(const u8* codes, const Scales& scales, int t, int lane) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const u8* block = codes + b * BLOCK_BYTES;
      u32 code[2], high = 0;
      if (BITS == 4) {
        uint2 v = *(const uint2*)(block + t / 2 * 512 + lane * 16 + t % 2 * 8);
        code[0] = v.x, code[1] = v.y;
      } else if (BITS == 1) {
        code[0] = code[1] = word(block, t / 2, lane) >> t % 2 * 8;
      } else {
        code[0] = code[1] = word(block, t, lane);
        if (BITS == 3) high = word(block, 8 + t / 2, lane) >> t % 2 * 8;
      }
      meta[b] = SPARSE ? word(block, CODE_WORDS + t, lane) : 0;
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) a[b][s][j] = centered(field(code[s], high, s, j), scales.zero[j % 2], j);
    }
  }

 private:
  static __device__ __forceinline__ u32 word(const u8* block, int index, int lane) {
    return *(const u32*)(block + index / 4 * 512 + lane * 16 + index % 4 * 4);
  }

  static __device__ __forceinline__ u32 field(u32 code, u32 high, int s, int j) {
    if (BITS == 4) return pick<0x001e001e>(code, 4 * j - 1, ONE_HALF_MAGIC);
    if (BITS == 1) return one_bit<1>(code, 0, s, j, ONE_HALF_MAGIC);
    u32 low = two_bits(code, s, j);
    return BITS == 2 ? low : one_bit<3>(high, 0, s, j, low);
  }
};

// What one instruction yields: 64 out_features of COUNT rows; and the numbers of its operands in its text. Groups need
// sums of their own and take half the rows at a time: those of one half are scaled while the other's are made.
constexpr int COUNT = GROUP ? 64 : ROWS;
#if GROUP
#define SHAPE "m64n64"
#define SUMS \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CODES "%32, %33, %34, %35"
#define ROWS_AT "%36"
#define ADD "%37"
#define META "%38, %39"
#else
#define SHAPE "m64n128"
#define SUMS \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define CODES "%64, %65, %66, %67"
#define ROWS_AT "%68"
#define ADD "%69"
#define META "%70, %71"
#endif

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#if GROUP
#define RESULTS SIXTEEN(0), SIXTEEN(16)
#else
#define RESULTS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#endif
#define INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add)

// d[4 n + j] = add * d + A x^T: 32 columns (dense: 16). STEP: which half of `meta` is of these.
template <int STEP>
__device__ __forceinline__ void multiply_async(float (&d)[COUNT / 2], const u32 (&a)[4], u64 x, u32 meta, int add) {
#if SPARSE
  asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0; "
               "wgmma.mma_async.sp.sync.aligned." SHAPE "k32.f32." OPERANDS
               " {" SUMS "}, {" CODES "}, " ROWS_AT ", " META ", add, 1, 1, 0;}"
               : RESULTS
               : INPUTS, "r"(meta), "n"(STEP));
#else
  asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0; "
               "wgmma.mma_async.sync.aligned." SHAPE "k16.f32." OPERANDS
               " {" SUMS "}, {" CODES "}, " ROWS_AT ", add, 1, 1, 0;}"
               : RESULTS
               : INPUTS);
#endif
}

// Starts sum += A x^T of a stage (GROUP: sum = A x^T), for this part of the rows. Until it is finished, nothing may
// touch sum or operand.
__device__ __forceinline__ void start(float (&sum)[COUNT / 2], const Operand& operand, const u8* slot, int part = 0) {
  // descriptor: address, rows of 8 1024 bytes apart, 128-byte swizzle
  u64 at = (shared_address(slot) + part * COUNT * X_ROW) & 0x3ffff;
  u64 x = at >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    multiply_async<0>(sum, operand.a[b][0], x + b * 4, operand.meta[b], GROUP == 0 || b);
    multiply_async<1>(sum, operand.a[b][1], x + b * 4 + (SPARSE ? 4 : 2), operand.meta[b], 1);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING calls of `start` are under way; `done` is the sum of one that is not.
template <int PENDING>
__device__ __forceinline__ void finish(float (&done)[COUNT / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++) asm volatile("" : "+f"(done[i])::"memory");  // nothing reads it before
}

// Where a thread's part of the next stages comes from.
struct Source {
  const u8 *blocks, *scales;
  const Value* x;
  u32 rows;          // bit i: row thread / 8 + 32 i is there
  float per_column;  // groups: exact for the middle of a stage, since groups are whole stages; divisions are slow

  __device__ __forceinline__ void enter(const Problem& p, const Tile& tile, int m) {
    int thread = threadIdx.x, row = thread / 8;
    m = min(m, p.m_tiles - 1);  // beyond the last: that once more, which nobody adds to y
    blocks = tile.delta + p.blocks_at + (long long)m * p.blocks * BLOCK_BYTES + thread % LOADERS * 16;
    scales = tile.delta + (long long)m * p.scale_sets * SCALE_BYTES + thread % LOADERS * 16;
    x = p.x + (tile.row + (FAST ? row : 0)) * p.x_stride + (FAST ? thread % 8 * 8 : 0);
    per_column = 1.f / p.group, rows = 0;
    for (int i = 0; i < 4; i++) rows |= (row + 32 * i < tile.rows) << i;
  }

  __device__ __forceinline__ void load(u8* slot, const Problem& p, const Tile& tile, int stage) const {
    int thread = threadIdx.x % LOADERS, own = threadIdx.x / LOADERS;
    u32 to = shared_address(slot) + X_BYTES + own * DELTA + thread * 16;
    const u8* from = blocks + (long long)stage * DELTA;
#pragma unroll
    for (int i = 0; i < DELTA; i += 16 * LOADERS)
      if (i + 16 * LOADERS <= DELTA || thread * 16 < DELTA - i) copy16(to + i, from + i, 16);
    if (GROUP && thread < SCALE_BYTES / 16)
      copy16(shared_address(slot) + SETS + own * SCALE_BYTES + thread * 16,
             scales + (int)((stage * STAGE_K + STAGE_K / 2) * per_column) * SCALE_BYTES, 16);
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

extern "C" __global__ void __launch_bounds__(256, 1)
    sbmm(const Value* x, Value* y, long long x_stride, long long y_stride, int in, int out, int group,
         const int* offsets, const int* slots, const u8* const* table, int runs, int lo, int hi) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ int listed;
  Tile* tiles = (Tile*)shared;
  // the swizzle counts from multiples of 1024 bytes
  u32 start_at = shared_address(shared);
  u8* ring = shared + ((MAX_TILES * sizeof(Tile) + start_at + 1023) / 1024 * 1024 - start_at);
  int own = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float* results = (float*)ring + own * ROWS * PITCH;
  Problem p(x, y, x_stride, y_stride, in, out, group);

  for (int first = 0;; first += MAX_TILES) {
    if (threadIdx.x < 32) {
      int total = list_tiles(tiles, first, ROWS, offsets, slots, table, runs, lo, hi);
      if (lane == 0) listed = total;
    }
    __syncthreads();
    int total = listed, m_pairs = (p.m_tiles + 1) / 2;
    int units = min(total - first, MAX_TILES) * m_pairs;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      Tile tile = tiles[unit / m_pairs];
      int m = 2 * (unit % m_pairs) + own;
      Source source;
      source.enter(p, tile, m);
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) {
        if (i < p.stages) source.load(ring + i * SLOT, p, tile, i);
        commit();
      }
      float acc[2][64] = {};
      Scales set[2] = {};
      Operand operand[2];
#if GROUP
      float parts[2][COUNT / 2] = {};
      // adds a finished product (operand h, part n of the rows) to acc, scaled
      auto scale = [&](int h, int n) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) acc[h][n * COUNT / 2 + i] += parts[n][i] * set[h].s(i);
      };
#else
      const u8* scales = tile.delta + (long long)min(m, p.m_tiles - 1) * SCALE_BYTES;
      set[0].load(scales, warp, lane), set[1].load(scales, warp + 4, lane);
#endif
      auto decode = [&](int h, const u8* slot) {
        if (GROUP) set[h].load(slot + SETS + own * SCALE_BYTES, warp + 4 * h, lane);
        operand[h].decode(slot + X_BYTES + own * DELTA, set[h], warp + 4 * h, lane);
      };
      wait<STAGES - 2>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was copied is read by wgmma
      __syncthreads();
      decode(0, ring);
      int at = 0, to = STAGES - 1;
      for (int stage = 0; stage < p.stages; stage++) {
        const u8* slot = ring + at * SLOT;
        int after = at + 1 == STAGES ? 0 : at + 1;
#if GROUP == 0
        start(acc[0], operand[0], slot);
        finish<1>(acc[1]);  // of the stage before
        decode(1, slot);
        start(acc[1], operand[1], slot);
        finish<1>(acc[0]);
#else
        start(parts[0], operand[0], slot, 0);
        start(parts[1], operand[0], slot, 1);
        decode(1, slot);
        finish<1>(parts[0]), scale(0, 0);
        start(parts[0], operand[1], slot, 0);
        finish<1>(parts[1]), scale(0, 1);
        start(parts[1], operand[1], slot, 1);
#endif
        if (stage + 1 < p.stages) {
          wait<STAGES - 3>();
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncthreads();  // the next stage is there, and nobody reads the one before this, whose slot is next
          if (stage + STAGES - 1 < p.stages) source.load(ring + to * SLOT, p, tile, stage + STAGES - 1);
          commit();
          decode(0, ring + after * SLOT);
        }
#if GROUP
        finish<1>(parts[0]), scale(1, 0);
        finish<0>(parts[1]), scale(1, 1);
#endif
        at = after, to = to + 1 == STAGES ? 0 : to + 1;
      }
#if GROUP == 0
      finish<0>(acc[1]);
#endif
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 64; i++) {
          int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = (warp + 4 * h) * 16 + lane / 4 + i % 4 / 2 * 8;
          results[row * PITCH + column] = acc[h][i] * (GROUP ? 1.f : set[h].s(i));
        }
      __syncthreads();
      add_to_y(p, tile, m, results);
      __syncthreads();
    }
    if (total <= first + MAX_TILES) return;
    __syncthreads();
  }
}

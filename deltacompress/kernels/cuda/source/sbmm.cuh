// What the decode and the prefill kernel share: the packed layout (deltacompress/kernels/tiling.py writes it), the
// way from codes to matrix operands, and the list of row tiles.
//
// Compiled by NVRTC with these macros:
//   BITS   1, 2, 3, 4       bits of a code
//   SPARSE 0, 1             dense, or 2:4
//   GROUP  0, 16, 32, 64, 128   columns of a scale: 0 = the whole row; at most one pipeline stage, larger groups
//                               are that with the group size of the argument
//   DTYPE  0, 1, 2          activations: bf16, fp16, fp32 (fp32: split into three bf16 numbers, exact operands)
//
// The delta is operand A of the matrix instructions, [16 out_features x 32 (dense: 16) in_features]; activations are
// operand B, 8 rows at a time. A code q becomes q - z, exact in bf16 and fp16; scales meet fp32 sums. mma.sp takes the
// stored 2:4 pattern as it is, so a pruned weight costs nothing at all. What costs is turning codes into operands: of
// up to 3 bits, codes of the second row half stay LIFT bits above those of the first, so that one shift serves both.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int STEP_K = SPARSE ? 32 : 16;             // columns of one matrix instruction
constexpr int CODE_WORDS = 4 * BITS;                 // of one lane in one block of 8 x 2 instructions
constexpr int BLOCK_BYTES = (CODE_WORDS + (SPARSE ? 8 : 0)) * 4 * 32;
constexpr int SCALE_BYTES = 384;                     // 128 bf16 scales, 128 doubled zero points
constexpr int MAX_TILES = 128;
constexpr u32 ONE_HALF_MAGIC = DTYPE == 1 ? 0x60006000u : 0x42804280u;  // 512 or 64: one unit in the last place is 1/2
constexpr int LIFT = BITS == 4 ? 0 : 2;
constexpr u32 LOWERED_MAGIC = ONE_HALF_MAGIC - LIFT * (DTYPE == 1 ? 0x04000400u : 0x00800080u);  // over 2^LIFT
constexpr u32 LOWER = DTYPE == 1 ? 0x34003400u : 0x3e803e80u;                                   // 1/4, twice
constexpr u32 NEGATIVE = 0x80008000u;

struct Tile {
  const u8* delta;
  int row, rows;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void stream16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait() {
  static_assert(N >= 0, "the compiler takes it, and waits for nothing");
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void load_b(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

#if DTYPE == 1
#define OPERANDS "f16.f16"
#define ADD2 "add.rn.f16x2 %0, %1, %2;"
#define FMA2 "fma.rn.f16x2 %0, %1, %2, %3;"
#else
#define OPERANDS "bf16.bf16"
#define FMA2 "fma.rn.bf16x2 %0, %1, %2, %3;"
#if __CUDA_ARCH__ >= 900
#define ADD2 "add.rn.bf16x2 %0, %1, %2;"
#else
#define ADD2 "{.reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 %0, %1, one, %2;}"
#endif
#endif

// Register j of operand A: what `field` and `zero_point` made of codes and zero points -> q - z, exactly.
__device__ __forceinline__ u32 centered(u32 field, u32 zero, int j) {
  u32 out;
  if (LIFT && j % 2) asm(FMA2 : "=r"(out) : "r"(field), "r"(LOWER), "r"(zero));
  else asm(ADD2 : "=r"(out) : "r"(field), "r"(zero));
  return out;
}

#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define MMA_SP "mma.sp::ordered_metadata"  // our positions rise; without this promise newer chips are slow
#else
#define MMA_SP "mma.sp"
#endif

// d += A b for step 0 or 1 of a block: `meta` holds the patterns of both, `b` the activations of this step.
template <int STEP>
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32* b, u32 meta) {
#if SPARSE
  asm(MMA_SP ".sync.aligned.m16n8k32.row.col.f32." OPERANDS
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta), "n"(STEP));
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// (word >> right) & MASK | with, one shift and one logical operation
template <int MASK>
__device__ __forceinline__ u32 pick(u32 word, int right, u32 with) {
  u32 out, moved = right < 0 ? word << -right : word >> right;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(moved), "n"(MASK), "r"(with));
  return out;
}

// Fields of register j in step s, both halves of it, above MAGIC: of a word of two-bit codes; or of one-bit codes that
// start at bit `first`, brought to bit BIT, above `with`.
__device__ __forceinline__ u32 two_bits(u32 word, int s, int j) {
  int right = 8 * s + 4 * (j / 2) - 1;
  return j % 2 ? pick<0x00180018>(word, right, ONE_HALF_MAGIC) : pick<0x00060006>(word, right, ONE_HALF_MAGIC);
}
template <int BIT>
__device__ __forceinline__ u32 one_bit(u32 word, int first, int s, int j, u32 with) {
  int right = first + 4 * s + j / 2 - BIT;
  return j % 2 ? pick<(0x00040004 << BIT)>(word, right, with) : pick<(0x00010001 << BIT)>(word, right, with);
}

// Codes and patterns of one lane for half a block: four 16-row tiles, both steps.
struct Half {
  u32 code[BITS == 4 ? 8 : BITS == 1 ? 2 : 4];
  u32 high[2];  // third bits
  u32 meta[4];

  __device__ __forceinline__ void load(const u8* block, int half, int lane) {
    if (BITS == 4) {
      vector(code, block, 2 * half, lane);
      vector(code + 4, block, 2 * half + 1, lane);
    } else if (BITS == 1) {
      pair(code, block, 0, half, lane);
    } else {
      vector(code, block, half, lane);
      if (BITS == 3) pair(high, block, 2, half, lane);
    }
    if (SPARSE) vector(meta, block, CODE_WORDS / 4 + half, lane);
  }

  // Register j of operand A of tile t (0..3) in step s, before the zero point.
  __device__ __forceinline__ u32 field(int t, int s, int j) const {
    if (BITS == 4) return pick<0x001e001e>(code[BITS == 4 ? 2 * t + s : 0], 4 * j - 1, ONE_HALF_MAGIC);
    if (BITS == 1) return one_bit<1>(code[t / 2], 8 * (t % 2), s, j, ONE_HALF_MAGIC);
    u32 low = two_bits(code[BITS == 1 ? 0 : t], s, j);
    return BITS == 2 ? low : one_bit<3>(high[t / 2], 8 * (t % 2), s, j, low);
  }

 private:
  static __device__ __forceinline__ void vector(u32* to, const u8* block, int chunk, int lane) {
    uint4 v = *(const uint4*)(block + (chunk * 32 + lane) * 16);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  static __device__ __forceinline__ void pair(u32* to, const u8* block, int chunk, int half, int lane) {
    uint2 v = *(const uint2*)(block + (chunk * 32 + lane) * 16 + half * 8);
    to[0] = v.x, to[1] = v.y;
  }
};

// A doubled zero point (byte `at` of word: of the second row half if that is odd) as -(magic + z), twice.
__device__ __forceinline__ u32 zero_point(u32 word, int at) {
  bool lifted = LIFT && at % 2;
  u32 magic = (lifted ? LOWERED_MAGIC : ONE_HALF_MAGIC) | NEGATIVE;
  return __byte_perm(lifted ? word << LIFT : word, 0, 0x4040 | at * 0x0101) | magic;
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u16 to_bf16(float v) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return out;
}

// The dtype of activations and results.
#if DTYPE == 2
typedef float Value;
__device__ __forceinline__ float widen(Value v) { return v; }
__device__ __forceinline__ Value narrow(float v) { return v; }
#else
typedef u16 Value;
__device__ __forceinline__ float widen(Value v) {
  float out;
#if DTYPE == 1
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
#else
  out = __uint_as_float((u32)v << 16);
#endif
  return out;
}
__device__ __forceinline__ Value narrow(float v) {
#if DTYPE == 1
  u16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return out;
#else
  return to_bf16(v);
#endif
}
#endif

// One warp: the runs of lo..hi rows whose slot holds a delta of this format, cut into tiles of `size` rows. Writes tiles
// first .. first + MAX_TILES - 1 of the list and returns how many it has in all. Base rows are not in it. `total`: tiles
// of other linears that precede these in the list.
__device__ inline int list_tiles(Tile* tiles, int first, int size, const int* offsets, const int* slots,
                                 const u8* const* table, int runs, int lo, int hi, int total = 0) {
  int lane = threadIdx.x % 32;
  for (int base = 0; base < runs; base += 32) {
    int run = base + lane, row = 0, rows = 0;
    const u8* delta = nullptr;
    if (run < runs) {
      int slot = slots[run];
      row = offsets[run];
      rows = offsets[run + 1] - row;
      if (slot >= 0 && rows >= lo && rows <= hi) delta = table[slot];
    }
    int count = delta ? (rows + size - 1) / size : 0, sum = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    int start = total + sum - count - first;
    for (int i = max(0, -start); i < count && start + i < MAX_TILES; i++)
      tiles[start + i] = Tile{delta, row + i * size, min(size, rows - i * size)};
    total += __shfl_sync(~0u, sum, 31);
  }
  return total;
}

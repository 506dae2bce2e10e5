// What the two prefill kernels share.
#pragma once
#include "sbmm.cuh"

constexpr int STAGE_K = 64;
constexpr int PITCH = 132;  // floats of a result row: 128 and a shift of banks

struct Problem {
  const Value* x;
  Value* y;
  long long x_stride, y_stride;
  int in, out, group;
  int blocks, stages, scale_sets, m_tiles;
  long long blocks_at;

  __device__ __forceinline__ Problem(const Value* x, Value* y, long long x_stride, long long y_stride, int in, int out,
                                     int group)
      : x(x), y(y), x_stride(x_stride), y_stride(y_stride), in(in), out(out), group(group) {
    constexpr int PAIR_K = 4 * STEP_K;
    blocks = (in + PAIR_K - 1) / PAIR_K * 2;
    stages = (in + STAGE_K - 1) / STAGE_K;
    scale_sets = GROUP == 0 ? 1 : (in + group - 1) / group;
    m_tiles = (out + 127) / 128;
    blocks_at = ((long long)m_tiles * scale_sets * SCALE_BYTES + 255) / 256 * 256;
  }
};

// A tile of results, [rows][PITCH] in shared memory, added to y by 128 threads: 8 out_features of every eighth
// row to each.
__device__ __forceinline__ void add_to_y(const Problem& p, const Tile& tile, int m, const float* results) {
  constexpr int AT_ONCE = 4;  // rows whose old values are on their way together
  int first = threadIdx.x % 128 / 16, column = m * 128 + threadIdx.x % 16 * 8;
  const float* from = results + first * PITCH + threadIdx.x % 16 * 8;
  Value* to = p.y + (tile.row + first) * p.y_stride + column;
  bool whole = column + 8 <= p.out && (u64)p.y % 16 == 0 && p.y_stride % 8 == 0;
  for (int row = first; row < tile.rows; row += 8 * AT_ONCE) {
    if (whole) {
      union { uint4 all; Value v[8]; } before[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (row + 8 * i < tile.rows) before[i].all = *(const uint4*)(to + 8 * i * p.y_stride);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (row + 8 * i < tile.rows) {
          float4 low = *(const float4*)(from + 8 * i * PITCH), high = *(const float4*)(from + 8 * i * PITCH + 4);
          float sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int j = 0; j < 8; j++) before[i].v[j] = narrow(widen(before[i].v[j]) + sum[j]);
          *(uint4*)(to + 8 * i * p.y_stride) = before[i].all;
        }
    } else {
      for (int i = 0; i < AT_ONCE && row + 8 * i < tile.rows; i++)
        for (int j = 0; j < 8 && column + j < p.out; j++) {
          Value* at = to + 8 * i * p.y_stride + j;
          *at = narrow(widen(*at) + from[8 * i * PITCH + j]);
        }
    }
    from += 8 * AT_ONCE * PITCH, to += 8 * AT_ONCE * p.y_stride;
  }
}


// Which piece of work of the decode kernel is whose: the linears of one launch, and the tiles of their variants.
#pragma once
#include "sbmm.cuh"

constexpr int MAX_MEMBERS = 4;

// The linears of a launch: deltas by slot, out_features, and where they start in a row of y.
struct Members {
  const u8* const* table[MAX_MEMBERS];
  int out[MAX_MEMBERS], first[MAX_MEMBERS];
  int count;
};

struct Problem {
  const Value* x;
  Value* y;
  long long x_stride, y_stride;
  int in, group;
  int stages, scale_sets;
};

// 128 out_features of one tile.
struct Unit {
  const Tile* tile;
  int m, m_tiles, out, first;

  // Unit `index` of those of `tiles`, of which ends[i] are of the members up to i.
  __device__ __forceinline__ Unit(const Members& members, const Tile* tiles, const int* ends, int index) {
    int member = 0, begin = 0;
    for (;; member++) {
      m_tiles = (members.out[member] + 127) / 128;
      int units = (ends[member] - begin) * m_tiles;
      if (index < units) break;
      index -= units, begin = ends[member];
    }
    tile = tiles + begin + index / m_tiles, m = index % m_tiles;
    out = members.out[member], first = members.first[member];
  }
};

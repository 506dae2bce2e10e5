// Serving parts -> the layout of tiling.py, byte for byte what tiling.tile makes of them.
//
// Many tensors in a launch. One thread a word of codes or patterns, then one a pair of scale and zero point. Macros:
// BITS, SPARSE.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

constexpr int CODE_WORDS = 4 * BITS, WORDS = CODE_WORDS + (SPARSE ? 8 : 0);
constexpr int SET_BYTES = 384, CODES = 32;  // of one row in one block
constexpr u8 EMPTY = 0x44;
enum { BAD_PATTERN = 1, BAD_SCALE = 2, BAD_ZERO = 3 };

// One tensor: where its parts begin in `data`, its result in the output, and the result's blocks in that; its first CUDA
// block.
struct Job {
  long long codes, pattern, scales, zeros, out, blocks_at, first;  // zeros -1: `zero` for all
  int zero;                                                        // doubled
  int rows, kept, groups, code_bytes, pattern_bytes, padded, m_tiles, blocks, fault;
};

struct Parts {
  const u8 *codes, *pattern;
  int rows, kept, code_bytes, pattern_bytes, padded;
};

__device__ __forceinline__ u32 code(const Parts& p, int row, int k) {
  if (row >= p.rows || k >= p.kept) return 0;
  const u8* at = p.codes + (long long)row * p.code_bytes + k * BITS / 8;
  int bit = k * BITS % 8;
  u32 word = at[0];
  if (BITS == 3 && bit > 5) word |= (u32)at[1] << 8;
  return word >> bit & ((1 << BITS) - 1);
}

__device__ __forceinline__ u32 pattern(const Parts& p, int row, int byte, int* fault) {
  if (row >= p.rows || byte >= p.pattern_bytes) return EMPTY;
  u32 found = p.pattern[(long long)row * p.pattern_bytes + byte];
  if (byte == p.pattern_bytes - 1 && p.padded % 8) found |= EMPTY & 0xf0;
  if ((found & 3) >= (found >> 2 & 3) || (found >> 4 & 3) >= found >> 6) *fault = BAD_PATTERN;
  return found;
}

// Bits `first` .. of the code, as many as there are in a field of WIDTH, of tiles t .. of a lane.
template <int WIDTH>
__device__ __forceinline__ u32 word(const Parts& p, int index, int row, int k, int first) {
  u32 out = 0;
#pragma unroll
  for (int bit = 0; bit < 16; bit += WIDTH) {
    // fields from high to low: (t), s, p, h (one bit: h before p); those that do not fit are in the index
    int f = bit / WIDTH, h = f % 2, pp = f / 2 % 2, s = f / 4 % 2, t = f / 8, tile;
    if (WIDTH == 1) h = f / 2 % 2, pp = f % 2;
    if (WIDTH == 4) s = index % 2, tile = index / 2;
    else tile = WIDTH == 2 ? index : 2 * index + t;
#pragma unroll
    for (int e = 0; e < 2; e++)
      out |= (code(p, row + 16 * tile + 8 * h, k + 16 * s + 8 * pp + e) >> first & ((1 << WIDTH) - 1)) << (16 * e + bit);
  }
  return out;
}

extern "C" __global__ void __launch_bounds__(256)
    pack(const u8* data, u8* result, int* faults, const Job* jobs, int count) {
  int low = 0, high = count;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (jobs[middle].first <= blockIdx.x) low = middle;
    else high = middle;
  }
  const Job& job = jobs[low];
  Parts p = {data + job.codes, data + job.pattern, job.rows, job.kept, job.code_bytes, job.pattern_bytes, job.padded};
  u8* out = result + job.out;
  int blocks = job.blocks, fault = 0;
  long long index = (blockIdx.x - job.first) * 256 + threadIdx.x, words = (long long)job.m_tiles * blocks * WORDS * 32;
  if (index < words) {
    int lane = index % 32, w = index / 32 % WORDS, g = lane / 4, c = lane % 4;
    long long at = index / 32 / WORDS;
    int block = at % blocks, row = at / blocks * 128 + g, k = block * CODES + 2 * c;
    u32 made;
    if (w >= CODE_WORDS) {
      int first = row + 16 * (w - CODE_WORDS), byte = block * 8 + 2 * c;
      made = pattern(p, first, byte, &fault) | pattern(p, first, byte + 1, &fault) << 8 |
             pattern(p, first + 8, byte, &fault) << 16 | pattern(p, first + 8, byte + 1, &fault) << 24;
    } else if (BITS == 3) {
      made = w < 8 ? word<2>(p, w, row, k, 0) : word<1>(p, w - 8, row, k, 2);
    } else {
      made = word<BITS == 3 ? 2 : BITS>(p, w, row, k, 0);
    }
    *(u32*)(out + job.blocks_at + (at * (WORDS / 4) + w / 4) * 512 + lane * 16 + w % 4 * 4) = made;
  } else if ((index -= words) < (long long)job.m_tiles * job.groups * 128) {
    int i = index % 128, h = i % 2, t = i / 2 % 8, g = i / 16;
    long long set = index / 128, row = set / job.groups * 128 + 16 * t + 8 * h + g;
    u32 scale = 0, zero = 0;
    if (row < p.rows) {
      long long from = row * job.groups + set % job.groups;
      const u8* two = data + job.scales + 2 * from;  // parts of a file start anywhere
      scale = two[0] | two[1] << 8;
      if ((scale & 0x7f80) == 0x7f80) fault = BAD_SCALE;
      zero = job.zero;
      if (job.zeros != -1) {
        zero = data[job.zeros + from];
        if (zero >> BITS) fault = BAD_ZERO;
        zero *= 2;
      }
    }
    *(u16*)(out + set * SET_BYTES + i * 2) = scale;
    out[set * SET_BYTES + 256 + i] = zero;
    if (index == 0)
      for (long long gap = (long long)job.m_tiles * job.groups * SET_BYTES; gap < job.blocks_at; gap++) out[gap] = 0;
  }
  if (fault) atomicMax(faults + job.fault, fault);
}

// BLAKE3 (github.com/BLAKE3-team/BLAKE3-specs) of many spans of one buffer.
//
// `leaves`: one thread a chunk, one block a subtree of up to SUBTREE chunks, whose value it leaves in `nodes`. `roots`:
// one block a span, joins the values of its subtrees. Neighbours are joined level by level and the odd one out goes up
// as it is, which makes the tree of the specification. Macro: SUBTREE, a power of two, also the threads of a block.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int CHUNK = 1024, BLOCK = 64;
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

struct Span { long long begin, bytes, first; };  // first: of its subtrees, among those of all spans
struct Value { u32 word[8]; };
struct Message { u32 word[16]; };

#define IV_LOW 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a
#define IV IV_LOW, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19

__device__ __forceinline__ u32 turned(u32 x, int by) { return x >> by | x << (32 - by); }

__device__ __forceinline__ void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
  a += b + x, d = turned(d ^ a, 16), c += d, b = turned(b ^ c, 12);
  a += b + y, d = turned(d ^ a, 8), c += d, b = turned(b ^ c, 7);
}

__device__ __forceinline__ Value compress(Value h, Message m, u64 counter, u32 bytes, u32 flags) {
  u32 v[16] = {h.word[0], h.word[1], h.word[2], h.word[3], h.word[4], h.word[5], h.word[6], h.word[7],
               IV_LOW, (u32)counter, (u32)(counter >> 32), bytes, flags};
#pragma unroll
  for (int round = 0; round < 7; round++) {
    const u32* w = m.word;
    mix(v[0], v[4], v[8], v[12], w[0], w[1]);
    mix(v[1], v[5], v[9], v[13], w[2], w[3]);
    mix(v[2], v[6], v[10], v[14], w[4], w[5]);
    mix(v[3], v[7], v[11], v[15], w[6], w[7]);
    mix(v[0], v[5], v[10], v[15], w[8], w[9]);
    mix(v[1], v[6], v[11], v[12], w[10], w[11]);
    mix(v[2], v[7], v[8], v[13], w[12], w[13]);
    mix(v[3], v[4], v[9], v[14], w[14], w[15]);
    m = {{w[2], w[6], w[3], w[10], w[7], w[0], w[4], w[13], w[1], w[11], w[12], w[5], w[9], w[14], w[15], w[8]}};
  }
#pragma unroll
  for (int i = 0; i < 8; i++) h.word[i] = v[i] ^ v[i + 8];
  return h;
}

// `bytes` (at most BLOCK) from `at`, zeros after them. Reads no word of memory that holds none of them.
__device__ __forceinline__ Message message(const u8* at, int bytes) {
  int skip = (u64)at % 4;
  const u32* from = (const u32*)(at - skip);
  Message m;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int left = bytes - 4 * i;
    u32 word = 0;
    if (left > 0) {
      word = from[i] >> 8 * skip;
      if (skip && left > 4 - skip) word |= from[i + 1] << (32 - 8 * skip);
      if (left < 4) word &= (1u << 8 * left) - 1;
    }
    m.word[i] = word;
  }
  return m;
}

__device__ __forceinline__ Value chunk(const u8* data, long long bytes, long long index, bool alone) {
  const u8* at = data + index * CHUNK;
  long long rest = bytes - index * CHUNK;
  int left = rest < CHUNK ? rest : CHUNK, flags = CHUNK_START;
  Value h = {{IV}};
  for (; left > BLOCK; left -= BLOCK, at += BLOCK, flags = 0) h = compress(h, message(at, BLOCK), index, BLOCK, flags);
  return compress(h, message(at, left), index, left, flags | CHUNK_END | (alone ? ROOT : 0));
}

// The value above node i of the next level, whose two nodes are 2i and 2i + 1 of `level` [n].
__device__ __forceinline__ Value above(const Value* level, long long n, long long i, bool root) {
  Value left = level[2 * i];
  if (2 * i + 1 == n) return left;
  Value right = level[2 * i + 1];
  Message m;
#pragma unroll
  for (int k = 0; k < 8; k++) m.word[k] = left.word[k], m.word[k + 8] = right.word[k];
  return compress({{IV}}, m, 0, BLOCK, PARENT | (root ? ROOT : 0));
}

// spans [count + 1]: the last one closes `first`. As many blocks as there are subtrees.
extern "C" __global__ void __launch_bounds__(SUBTREE)
    leaves(const u8* data, const Span* spans, int count, Value* nodes) {
  __shared__ Value level[SUBTREE];
  int low = 0, high = count, i = threadIdx.x;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (spans[middle].first <= blockIdx.x) low = middle;
    else high = middle;
  }
  Span span = spans[low];
  long long all = span.bytes > CHUNK ? (span.bytes + CHUNK - 1) / CHUNK : 1, from = (blockIdx.x - span.first) * SUBTREE;
  int n = all - from < SUBTREE ? all - from : SUBTREE;
  if (i < n) level[i] = chunk(data + span.begin, span.bytes, from + i, all == 1);
  __syncthreads();
  for (; n > 1; n = (n + 1) / 2) {
    Value made;
    if (2 * i < n) made = above(level, n, i, n == 2 && all <= SUBTREE);
    __syncthreads();
    if (2 * i < n) level[i] = made;
    __syncthreads();
  }
  if (i == 0) nodes[blockIdx.x] = level[0];
}

extern "C" __global__ void __launch_bounds__(SUBTREE) roots(const Span* spans, Value* nodes, Value* out) {
  Value* level = nodes + spans[blockIdx.x].first;
  long long n = spans[blockIdx.x + 1].first - spans[blockIdx.x].first;
  for (; n > 1; n = (n + 1) / 2)
    for (long long from = 0; 2 * from < n; from += SUBTREE) {
      long long i = from + threadIdx.x;
      Value made;
      if (2 * i < n) made = above(level, n, i, n == 2);
      __syncthreads();  // what is written now was read before, by this or an earlier turn
      if (2 * i < n) level[i] = made;
      __syncthreads();
    }
  if (threadIdx.x == 0) out[blockIdx.x] = level[0];
}

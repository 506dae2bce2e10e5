// A GPU's block on one thread of a CPU: what the CUDA kernels of deltacompress/kernels/cuda call, in plain C++.
//
// Each CUDA thread is a fiber; barriers and warp-wide operations switch between them. Asynchronous copies arrive when the
// code waits for their group and not before, or at once (LAZY 0): both extremes of what a GPU may do.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>
using std::max;
using std::min;

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

alignas(128) static u8 shared[256 << 10];

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current, threads;

static void (*work)();

static void fiber() {
  work();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

// One block after another, of `count` CUDA threads that all call `kernel`.
static void run_blocks(int blocks, int count, size_t stack, void (*kernel)()) {
  work = kernel, threads = count, gridDim.x = blocks;
  fibers.resize(count);
  for (Fiber& one : fibers) one.stack.resize(stack);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared, 0xff, sizeof shared);  // NaN
    for (Fiber& one : fibers) {
      one.done = false;
      getcontext(&one.context);
      one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
      makecontext(&one.context, fiber, 0);
    }
    for (int left = count; left;)
      for (int i = 0; i < count; i++)
        if (!fibers[i].done) {
          current = threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
  }
}

struct Barrier {
  int count = 0;
  long round = 0;
  void arrive(int of) {
    long mine = round;
    if (++count == of) count = 0, round++;
    else while (round == mine) swapcontext(&fibers[current].context, &scheduler);
  }
};
static Barrier block_barrier, warp_barriers[32];
inline void __syncthreads() { block_barrier.arrive(threads); }
inline void __syncwarp() { warp_barriers[threadIdx.x / 32].arrive(32); }

// What the lanes of a warp show each other.
static u32 shown[32][32][16];
inline u32* mine() { return shown[threadIdx.x / 32][threadIdx.x % 32]; }
inline u32* lane_of(int lane) { return shown[threadIdx.x / 32][lane]; }

template <class T>
inline T __shfl_sync(unsigned, T value, int from) {
  memcpy(mine(), &value, sizeof value);
  __syncwarp();
  memcpy(&value, lane_of(from), sizeof value);
  __syncwarp();
  return value;
}
template <class T>
inline T __shfl_up_sync(unsigned all, T value, int by) {
  int lane = threadIdx.x % 32;
  return __shfl_sync(all, value, lane >= by ? lane - by : lane);
}

inline void atomicMax(int* at, int value) { *at = max(*at, value); }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 bf16_bits(float value) {  // of finite numbers, to the nearest even
  u32 bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float half_value(u16 bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
inline u16 half_bits(float value) {
  _Float16 half = value;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}

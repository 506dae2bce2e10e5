// The instructions that sbmm.cuh writes in assembly, by their description in NVIDIA's PTX manual.
inline float number(u32 bits) { return DTYPE == 1 ? half_value(bits) : bf16_value(bits); }
inline u32 bits_of(float value) { return DTYPE == 1 ? half_bits(value) : bf16_bits(value); }
inline u32 fma2(u32 a, u32 b, u32 c) {
  u32 low = bits_of(fmaf(number(a), number(b), number(c)));
  return low | bits_of(fmaf(number(a >> 16), number(b >> 16), number(c >> 16))) << 16;
}
inline u32 add2(u32 a, u32 b) { return fma2(a, bits_of(1) * 0x10001, b); }

struct Copy {
  u32 to;
  u8 data[16];
};
static std::vector<std::vector<Copy>> open_groups(1024);
static std::vector<std::deque<std::vector<Copy>>> groups(1024);
static bool lazy;

inline u32 shared_address(const void* at) { return (u32)((const u8*)at - shared); }
inline void copy16(u32 to, const void* from, int bytes) {
  Copy copy = {to, {}};
  if (bytes) memcpy(copy.data, from, bytes);
  if (to % 16 || to + 16 > sizeof shared) fprintf(stderr, "a copy to %u\n", to), abort();
  if (lazy) open_groups[threadIdx.x].push_back(copy);
  else memcpy(shared + to, copy.data, 16);
}
inline void stream16(u32 to, const void* from) { copy16(to, from, 16); }
inline void commit() {
  groups[threadIdx.x].push_back(open_groups[threadIdx.x]);
  open_groups[threadIdx.x].clear();
}
template <int N>
inline void wait() {
  auto& pending = groups[threadIdx.x];
  for (; pending.size() > N; pending.pop_front())
    for (const Copy& copy : pending.front()) memcpy(shared + copy.to, copy.data, 16);
}

// ldmatrix.x4: lane i gives the address of row i % 8 of matrix i / 8.
inline void load_b(u32 (&b)[4], u32 address) {
  int lane = threadIdx.x % 32;
  mine()[0] = address;
  __syncwarp();
  for (int j = 0; j < 4; j++) memcpy(&b[j], shared + lane_of(8 * j + lane / 4)[0] + lane % 4 * 4, 4);
  __syncwarp();
}

// mma.sp.m16n8k32, or mma.m16n8k16: d += A b; lane 4 g + c holds rows g and g + 8 of A, columns 2 c and 2 c + 1 of d.
template <int STEP>
inline void multiply(float (&d)[4], const u32 (&a)[4], const u32* b, u32 meta) {
  constexpr int B_WORDS = SPARSE ? 4 : 2;
  int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  memcpy(mine(), a, 16), memcpy(mine() + 4, b, 4 * B_WORDS), mine()[8] = meta;
  __syncwarp();
  for (int e = 0; e < 4; e++) {
    int half = e / 2, column = 2 * c + e % 2;
    auto left = [&](int k) { return (double)number(lane_of(4 * g + k % 8 / 2)[k / 8 * 2 + half] >> 16 * (k % 2)); };
    auto right = [&](int k) { return (double)number(lane_of(4 * column + k % 8 / 2)[4 + k / 8] >> 16 * (k % 2)); };
    double sum = 0;
    if (SPARSE) {
      for (int group = 0; group < 8; group++) {  // of four columns; lanes 2 STEP and 2 STEP + 1 of a row hold patterns
        u32 kept = lane_of(4 * g + 2 * STEP + group / 4)[8] >> (16 * half + 4 * (group % 4));
        sum += left(2 * group) * right(4 * group + (kept & 3));
        sum += left(2 * group + 1) * right(4 * group + (kept >> 2 & 3));
      }
    } else {
      for (int k = 0; k < 16; k++) sum += left(k) * right(k);
    }
    d[e] = (float)(d[e] + sum);
  }
  __syncwarp();
}

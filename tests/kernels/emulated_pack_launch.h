// The launch of pack.cu.
static struct {
  const u8* data;
  u8* out;
  int* faults;
  const Job* jobs;
  int count;
} given;

static void thread() { pack(given.data, given.out, given.faults, given.jobs, given.count); }

extern "C" void launch(const u8* data, u8* out, int* faults, const Job* jobs, int count, int blocks) {
  given = {data, out, faults, jobs, count};
  run_blocks(blocks, 256, 32 << 10, thread);
}

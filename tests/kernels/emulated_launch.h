// A launch: one block after another.
struct Arguments {
  const Value* x;
  Value* y;
  long long x_stride, y_stride;
  int in, group;
  Members members;
  const int *offsets, *slots;
  int runs;
};
static Arguments given;

static void thread() {
  const Arguments& p = given;
  sbmm(p.x, p.y, p.x_stride, p.y_stride, p.in, p.group, p.members, p.offsets, p.slots, p.runs, 1, 0x7fffffff);
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

extern "C" void launch(const Value* x, Value* y, int in, int out, int group, const u8* const* table, const int* offsets,
                       const int* slots, int runs, int blocks, int lazy_copies) {
  given = {x, y, in, out, in, group, {}, offsets, slots, runs};
  given.members.table[0] = table, given.members.out[0] = out, given.members.first[0] = 0, given.members.count = 1;
  lazy = lazy_copies, threads = 32 * WARPS, gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared, 0xff, sizeof shared);  // NaN
    fibers.assign(threads, Fiber());
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(256 << 10);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, thread, 0);
    }
    for (int left = threads; left;)
      for (int i = 0; i < threads; i++)
        if (!fibers[i].done) {
          current = threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
  }
}

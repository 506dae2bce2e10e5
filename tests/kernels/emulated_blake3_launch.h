// The launches of blake3.cu.
static struct {
  const u8* data;
  const Span* spans;
  int count;
  Value *nodes, *out;
} given;

static void run_leaves() { leaves(given.data, given.spans, given.count, given.nodes); }
static void run_roots() { roots(given.spans, given.nodes, given.out); }

extern "C" void launch(const u8* data, const Span* spans, int count, int subtrees, Value* nodes, Value* out) {
  given = {data, spans, count, nodes, out};
  run_blocks(subtrees, SUBTREE, 32 << 10, run_leaves);
  run_blocks(count, SUBTREE, 32 << 10, run_roots);
}

"""The same promises on a GPU: kernels, streams, graphs. `pytest tests/runtime/test_gpu.py -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from runtime_cases import Served, assert_close, give_pages, load, oracle_logits, oracle_tokens, random_ids

from deltacompress.bench.synthetic import SHAPE_TINY, write_base, write_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.errors import BackendError, ChecksumError
from deltacompress.kernels import available
from deltacompress.runtime import DeltaConfig, Runtime
from deltacompress.runtime.batch import Batch, FixedBatch, to_device
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.requests import Request, Told
from deltacompress.runtime.engine.scheduler import Scheduler
from deltacompress.runtime.engine.steps.graphs import GraphedStep
from deltacompress.runtime.engine.text import TextStream

pytestmark = pytest.mark.gpu
BACKENDS = ["reference", "triton", "cuda"]
NAMES = [None, "a", "b", "c"]
BF16 = 0.03
"""Share of the largest logit: bf16 through a tiny model, deltas not rounded."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if reason := available("cuda")[name]:
        pytest.skip(reason)
    return name


@pytest.fixture
def exact_products() -> Iterator[None]:
    """No tf32: what is compared is fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def serve(trio: dict[str, Served], **options: object) -> Runtime:
    runtime = Runtime.from_base(trio["a"].pair.base, device="cuda", **options)
    for name, one in trio.items():
        runtime.load(one.artifact, name)
    return runtime


def where(trio: dict[str, Served], name: str | None) -> object:
    return trio["a"].pair.base if name is None else trio[name].restored


@pytest.mark.usefixtures("exact_products")
def test_fp32_rounded_equals_the_restored_models(trio: dict[str, Served]) -> None:
    runtime = serve(trio, backend="reference")
    requests = [(NAMES[i % 4], random_ids(3 + 2 * i, i)) for i in range(9)]
    for (name, ids), found in zip(requests, runtime.logits(requests), strict=True):
        assert_close(found.cpu(), oracle_logits(where(trio, name), ids))
    for (name, ids), done in zip(requests, runtime.complete(requests, 8), strict=True):
        assert list(done.tokens) == oracle_tokens(where(trio, name), ids, 8)[: len(done.tokens)]


@pytest.mark.usefixtures("exact_products")
def test_kernels_agree_with_the_cpu(trio: dict[str, Served], backend: str) -> None:
    """fp32, deltas unrounded on both: what differs is the kernel alone."""
    runtime = serve(trio, backend=backend, merge_rounding=False)
    judge = Runtime.from_base(trio["a"].pair.base, merge_rounding=False)
    for name, one in trio.items():
        judge.load(one.artifact, name)
    requests = [(NAMES[i % 4], random_ids(1 + 3 * i, i)) for i in range(9)]
    for found, wanted in zip(runtime.logits(requests), judge.logits(requests), strict=True):
        assert_close(found.cpu(), wanted, 1e-4 if backend == "reference" else 2e-3)  # tensor cores round their inputs


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "gpt-neox", "phi3"])
def test_bf16(served: Callable[..., Served], backend: str, architecture: str) -> None:
    one = served(architecture, "int4-24")
    runtime = Runtime.from_base(one.pair.base, device="cuda", dtype=torch.bfloat16, backend=backend)
    runtime.load(one.artifact, "v")
    assert not runtime.merge_rounding
    requests = [("v", random_ids(19)), (None, random_ids(4, 1)), ("v", random_ids(5, 2))]
    for (name, ids), found in zip(requests, runtime.logits(requests), strict=True):
        assert_close(found.float().cpu(), oracle_logits(one.restored if name else one.pair.base, ids), BF16)
    assert len(runtime.complete(requests, 6)) == 3


def test_graphs_change_nothing(trio: dict[str, Served], backend: str) -> None:
    plain = serve(trio, backend=backend, dtype=torch.bfloat16)
    graphed = serve(trio, backend=backend, dtype=torch.bfloat16, cuda_graphs=True)
    requests = [(NAMES[i % 4], random_ids(3 + i, i)) for i in range(8)]
    assert graphed.complete(requests, 24) == plain.complete(requests, 24)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_device(trio: dict[str, Served], backend: str) -> None:
    if backend == "reference":
        pytest.skip("the reference backend serves decoded deltas; its loops are on the host")
    runtime = serve(trio, backend=backend, dtype=torch.bfloat16)
    scheduler = Scheduler(runtime.model, runtime.cache, Told(None), max_batch=8)
    give_pages(scheduler, 4)
    batch = Batch([0, 1, 2, 3], runtime.device)
    inputs = to_device([5, 6, 7, 8, 3, 9, 1, 0, 1, 2, 3, 4], runtime.device)
    with torch.inference_mode():
        scheduler.decoder.forward_step(batch, inputs, 2)  # makes what is made at first use
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scheduler.decoder.forward_step(batch, inputs, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_budget_moves_variants_in_and_out(trio: dict[str, Served], backend: str) -> None:
    wide = serve(trio, backend=backend)
    sizes = [one.nbytes for one in wide.variants.values()]
    narrow = serve(trio, backend=backend, budget_bytes=max(sizes) + 1, host_bytes=max(sizes))
    requests = [(name, random_ids(4 + i, i)) for i, name in enumerate(["a", "b", None, "c", "a", "b"])]
    for one, other in zip(narrow.complete(requests, 8), wide.complete(requests, 8), strict=True):
        assert one == other
    assert narrow.cache.bytes_in_use <= max(sizes) + 1
    assert narrow.cache.counters.loads >= 3  # a variant on its way while the next one is loaded keeps that one out


def test_merged_models_are_no_better_in_bf16(trio: dict[str, Served]) -> None:
    """Against fp64: the decoupled bf16 logits are off by at most twice what the merged bf16 model is."""
    runtime = serve(trio, dtype=torch.bfloat16)
    ids = random_ids(24)
    for name, one in trio.items():
        with torch.inference_mode():
            exact = load(one.restored, torch.float64)(torch.tensor([ids])).logits[0]
            merged = load(one.restored, torch.bfloat16).to("cuda")(torch.tensor([ids], device="cuda")).logits[0]
        load.cache_clear()
        found = runtime.logits([(name, ids)])[0]
        off, merged_off = (float((logits.double().cpu() - exact).pow(2).mean().sqrt()) for logits in (found, merged))
        assert off <= 2 * merged_off


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an artifact of it that is stored without a lossless stage: <path>/base, <path>/delta."""
    root = tmp_path_factory.mktemp("plain")
    for name in ("base", "delta"):
        (root / name).mkdir()
    write_base(root / "base", SHAPE_TINY, torch.device("cpu"))
    write_delta(root / "delta", SHAPE_TINY, Checkpoint.open(root / "base"), torch.device("cpu"))
    return root


def test_plain_parts_come_straight_from_their_file(plain: Path) -> None:
    runtime = Runtime.from_base(plain / "base", device="cuda", backend="cuda", cuda_graphs=True)
    judge = Runtime.from_base(plain / "base", merge_rounding=False)
    for verify in (True, False):
        runtime.load(plain / "delta", f"v{verify}", verify=verify)
        judge.load(plain / "delta", f"v{verify}")
    sources = runtime.variants["vTrue"].sources
    assert sources is not None
    assert sources.stored
    requests = [("vTrue", random_ids(9)), (None, random_ids(4, 1)), ("vFalse", random_ids(5, 2))]
    for found, wanted in zip(runtime.logits(requests), judge.logits(requests), strict=True):
        assert_close(found.cpu(), wanted, 2e-3)
    for found, wanted in zip(token_lists(runtime, requests), token_lists(judge, requests), strict=True):
        assert found == wanted


def token_lists(runtime: Runtime, requests: list[tuple[str | None, list[int]]]) -> list[list[int]]:
    """Greedy tokens of requests over a model without a tokenizer."""
    made = [
        Request(
            i,
            name,
            ids,
            runtime.model.vocabulary,
            12,
            "length",
            frozenset(),
            TextStream(lambda _: "", (), streams=False),
            Sampling(),
        )
        for i, (name, ids) in enumerate(requests)
    ]
    scheduler = Scheduler(
        runtime.model, runtime.cache, Told(None), max_batch=8, cuda_graphs=runtime.model.device.type == "cuda"
    )
    for request in made:
        scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
    return [request.tokens for request in made]


def test_damage_is_told_by_load(plain: Path) -> None:
    runtime = Runtime.from_base(plain / "base", device="cuda", backend="cuda", budget_bytes=1 << 20)
    shard = next((plain / "delta").glob("*.safetensors"))
    before = shard.read_bytes()
    try:
        shard.write_bytes(before[:-5000] + bytes([before[-5000] ^ 1]) + before[-4999:])
        for _ in range(2):
            with pytest.raises(ChecksumError, match="differ"):
                runtime.load(plain / "delta", "v")
            assert not runtime.variants
    finally:
        shard.write_bytes(before)
    runtime.load(plain / "delta", "v")
    assert len(token_lists(runtime, [("v", [5, 6])])[0]) == 12


def test_out_of_memory_tells_what_is_resident(plain: Path) -> None:
    runtime = Runtime.from_base(plain / "base", device="cuda", backend="cuda")
    runtime.load(plain / "delta", "v")
    held = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    told = r"out of memory \(one forward over 2000 sequences.*resident, in bytes: v \d+"
    try:
        with pytest.raises(BackendError, match=told):
            runtime.logits([("v", random_ids(500))] * 2000)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert runtime.logits([("v", [5, 6])])[0].shape[0] == 2


def test_other_threads_may_allocate_while_a_step_is_captured() -> None:
    inputs, kept = torch.tensor([5, 6, 1, 2], device="cuda"), []

    def allocate() -> None:
        kept.append((torch.ones(1 << 28, dtype=torch.uint8, device="cuda"), torch.empty(1 << 22, pin_memory=True)))
        torch.cuda.current_stream().synchronize()

    def step(inputs: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            mover.submit(with_stream, allocate).result()
        return inputs * 10.0

    def with_stream(work: Callable[[], None]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            work()

    torch.cuda.empty_cache()  # so that the allocation above asks the driver
    with ThreadPoolExecutor(1) as mover:
        batch = FixedBatch(2, 1, [0], torch.device("cuda"))
        graphed = GraphedStep(step, inputs, torch.cuda.graph_pool_handle(), batch)
    assert kept
    assert graphed.replay(inputs + 1).tolist() == [60.0, 70.0, 20.0, 30.0]


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma3", "gpt-neox", "phi3"])
def test_fused_steps_give_the_same_tokens(served: Callable[..., Served], architecture: str) -> None:
    """fp32: decoding with fused operations and joined linears, against the reference backend on a CPU."""
    one = served(architecture, "int4-24")
    runtime = Runtime.from_base(one.pair.base, device="cuda", backend="cuda", cuda_graphs=True)
    judge = Runtime.from_base(one.pair.base, merge_rounding=False)
    for made in (runtime, judge):
        made.load(one.artifact, "v")
    assert runtime.model.fused
    requests = [(("v", None)[i % 2], random_ids(3 + 4 * i, i)) for i in range(6)]
    for found, wanted in zip(runtime.complete(requests, 12), judge.complete(requests, 12), strict=True):
        assert found.tokens == wanted.tokens


def test_from_pretrained(served: Callable[..., Served], backend: str) -> None:
    one = served("llama", "int4-24")
    runtime = Runtime.from_base(one.pair.base, device="cuda", dtype=torch.bfloat16, backend=backend)
    runtime.load(one.artifact, "v")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        one.pair.base,
        quantization_config=DeltaConfig(delta=one.artifact, backend=backend),
        dtype=torch.bfloat16,
        device_map={"": 0},
    )
    ids = random_ids(19)
    wanted = runtime.logits([("v", ids)])[0]
    with torch.inference_mode():
        found = model(torch.tensor([ids], device="cuda")).logits[0]
        tokens = model.generate(torch.tensor([ids], device="cuda"), max_new_tokens=6, do_sample=False)
    assert_close(found.float().cpu(), wanted.float().cpu(), BF16)
    assert tokens.shape[1] > len(ids)

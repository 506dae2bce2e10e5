"""The calibrated walk: what it reads, what it keeps loaded, and that where things wait changes no byte."""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import Pair, Recorder, Weights, changed, edit, files_of, weights_of
from tiny_models import open_tiny
from tolerances import GPU_LOSS

from deltacompress.artifact.delta import load_delta
from deltacompress.artifact.restoration import restore
from deltacompress.calibration.data import load_calibration, load_tokenizer
from deltacompress.calibration.forwards.memory import Room
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import RULES, Recipe
from deltacompress.compression import steps
from deltacompress.compression.layerwise import model
from deltacompress.compression.planning import TensorPlan
from deltacompress.models.skeleton import Skeleton
from deltacompress.numerics.hessian import HessianAccumulator
from deltacompress.numerics.triton import repeated
from deltacompress.numerics.triton.repeated import Repeated

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_gpu_captured_goes_with_the_walk(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Also where it fails; stacks of all layers find it until then."""
    layer, made = model.compress_layer, []

    def compress_layer(*of: Any) -> float | None:
        repeated.remembered(
            "a stack", lambda: made.append(1) or Repeated(sum, sum, device=torch.device("cpu"), nbytes=0)
        )
        if fails and len(made) == 1 and of[1] == 1:
            raise ZeroDivisionError
        return layer(*of)

    monkeypatch.setattr(model, "compress_layer", compress_layer)
    pair = make_pair("llama")
    for number in (1, 2):
        with pytest.raises(ZeroDivisionError) if fails and number == 1 else nullcontext():
            pair.compress(tmp_path / f"out {number}")
        assert len(made) == number


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_collections_beside_a_gpu_pass_over_what_was_there(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A CPU is never idle."""
    told = list[str]()

    @contextmanager
    def spared() -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    monkeypatch.setattr(model, "heap_spared", spared)
    monkeypatch.setattr(model, "_compress_layers", lambda *_: told.append("walk"))
    given: Any = SimpleNamespace(device=torch.device(kind))
    model.compress_layers(given, given, torch.zeros(1), given, given)
    assert told == {"cpu": ["walk"], "cuda": ["begin", "walk", "end"]}[kind]


def reads_of(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> dict[Path, Counter[str]]:
    """How often each tensor is read whole, at once or piece by piece, by checkpoint directory."""
    reads: dict[Path, Counter[str]] = {}
    read, read_flat, examine = Checkpoint.read, Checkpoint.read_flat, Checkpoint.examine

    def count(self: Checkpoint, name: str, **options: Any) -> torch.Tensor:
        reads.setdefault(self.path, Counter())[name] += 1
        return read(self, name, **options)

    def count_flat(self: Checkpoint, name: str, begin: int, end: int) -> torch.Tensor:
        reads.setdefault(self.path, Counter())[name] += begin == 0
        return read_flat(self, name, begin, end)

    def count_examined(self: Checkpoint, name: str) -> bool:
        reads.setdefault(self.path, Counter())[name] += 1
        return examine(self, name)

    monkeypatch.setattr(Checkpoint, "examine", count_examined)
    monkeypatch.setattr(Checkpoint, "read", count)
    monkeypatch.setattr(Checkpoint, "read_flat", count_flat)
    run()
    return reads


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_linears_are_read_once_to_check_them_and_once_in_the_walk(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    reads = reads_of(lambda: pair.compress(tmp_path / "out", recipe=recipe), monkeypatch)
    linears = [name for name in reads[pair.finetuned] if "_proj" in name]
    assert len(linears) == 14
    for checkpoint in (pair.finetuned, pair.base):
        assert {name: reads[checkpoint][name] for name in linears} == dict.fromkeys(linears, 2)
    # The embedding: checked, loaded for the teacher's capture where there is a teacher, encoded.
    assert reads[pair.finetuned][EMBEDDING] == (3 if recipe == "int4-24" else 2)
    # The head: checked, encoded; for the KL, run.
    assert reads[pair.finetuned][HEAD] == (3 if recipe == "int4-24" else 2)


@pytest.mark.parametrize("recipe", ["int4-24", "deltazip-2bit"])
def test_only_one_layer_is_loaded_when_layers_run(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    run_layer, ran = Skeleton.run_layer, []

    def watch(self: Skeleton, i: int, *args: Any) -> torch.Tensor:
        loaded = {name for name, weight in self.model.named_parameters() if not weight.is_meta}
        assert loaded == {*self.layer_names(i), "model.norm.weight"}
        ran.append(i)
        return run_layer(self, i, *args)

    monkeypatch.setattr(Skeleton, "run_layer", watch)
    pair.compress(tmp_path / "out", recipe=recipe)
    assert set(ran) == {0, 1}


def test_weights_are_placed_once_however_many_batches(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = Skeleton.prepare, Counter[str]()

    def count(self: Skeleton, name: str, value: torch.Tensor) -> torch.Tensor:
        prepared[name] += 1
        return prepare(self, name, value)

    monkeypatch.setattr(Skeleton, "prepare", count)
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 16})  # eight batches
    pair.compress(tmp_path / "out", recipe="int2")
    # The teacher's and the student's.
    assert {name: times for name, times in prepared.items() if "_proj" in name and times != 2} == {}


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("recipe", ["int2-24", "deltazip-2bit"])
def test_streams_on_the_host_change_no_byte(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, share: float
) -> None:
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 48})  # batches of 3, 3, 2
    here = pair.compress(tmp_path / "here", recipe=recipe)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "deltacompress.compression.layerwise.model.host_share",
        lambda _room, nbytes, layer, processes: asked.append((nbytes, layer, processes)) or share,
    )
    there = pair.compress(tmp_path / "there", recipe=recipe)
    both = 2 if recipe == "int2-24" else 1
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert asked == [(8 * 16 * 32 * 4 * both, layer * 4 * both, 1)]
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    assert here.kl_on_calibration == there.kl_on_calibration


@pytest.mark.gpu
def test_on_a_gpu_streams_on_the_host_change_no_byte(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cuda": 32})  # four batches of 2
    found = []
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr("deltacompress.compression.layerwise.model.host_share", lambda *_, share=share, **__: share)
        result = pair.compress(tmp_path / str(share), recipe="int2-24", device="cuda")
        found.append((files_of(tmp_path / str(share)), result.kl_on_calibration))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("recipe", ["int2-24", "deltazip-2bit"])
def test_forwards_that_wait_change_no_byte(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 48})  # batches of 3, 3, 2
    waiting = pair.compress(tmp_path / "waiting", recipe=recipe)
    monkeypatch.setattr(Room, "left", lambda _self: False)
    anew = pair.compress(tmp_path / "anew", recipe=recipe)
    assert files_of(tmp_path / "waiting") == files_of(tmp_path / "anew")
    assert waiting.kl_on_calibration == anew.kl_on_calibration


@pytest.mark.parametrize("sequential", [True, False])
def test_each_token_passes_each_linear_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """In each stream, and the last batch twice more, to find groups and what is spent; the student twice at once."""
    monkeypatch.setattr("deltacompress.compression.layerwise.model.TOKENS_PER_BATCH", {"cpu": 48})  # batches of 3, 3, 2
    linear, tokens = torch.nn.functional.linear, Counter[int]()

    def count(inputs: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        tokens[weight.numel()] += 0 if inputs.is_meta else inputs[..., 0].numel()
        return linear(inputs, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", count)
    rule = {"kind": "linear", "codec": "obs", "bits": 4, "asymmetric": 1.0}
    recipe = Recipe.parse({"name": "mine", "sequential": sequential, "rules": [rule, {"codec": "exact"}]})
    pair.compress(tmp_path / "out", recipe=recipe)
    # gate, up and down of two layers; 8 sequences of 16 tokens, and 2 of the last batch
    assert tokens[32 * 48] == 6 * 16 * (8 + 8 + 2 + 2) + (0 if sequential else 2 * 16 * 2 * 8)


def test_linears_of_one_group_may_have_settings_of_their_own(pair: Pair, tmp_path: Path) -> None:
    def losses(*first: dict[str, Any]) -> dict[str, float | None]:
        rules = [*first, {"kind": "linear", "codec": "obs", "bits": 4}, {"codec": "exact"}]
        out = tmp_path / str(len(first))
        pair.compress(out, recipe=Recipe.parse({"name": "mine", "rules": rules}))
        return {name: record.loss for name, record in load_delta(out).tensors.items()}

    mixed = losses({"name": "*.k_proj.weight", "codec": "obs", "bits": 2})
    plain = losses()
    first = "model.layers.0.self_attn."
    for name in ("q_proj", "v_proj"):
        assert mixed[f"{first}{name}.weight"] == pytest.approx(plain[f"{first}{name}.weight"], rel=1e-3)
    assert (mixed[f"{first}k_proj.weight"] or 0) > 2 * (plain[f"{first}k_proj.weight"] or 0)


def made(pair: Pair, root: Path, *rules: dict[str, Any]) -> tuple[float | None, Weights, torch.Tensor]:
    """(KL on calibration, restored weights, log-probabilities on the calibration tokens) under these rules."""
    root.mkdir()
    recipe = Recipe.parse({"name": "mine", "rules": [*rules, {"codec": "exact"}]})
    divergence = pair.compress(root / "out", recipe=recipe).kl_on_calibration
    restored = restore(root / "out", base=pair.base, out=root / "restored")
    return divergence, weights_of(restored), log_probabilities(pair, restored)


def log_probabilities(pair: Pair, checkpoint: Path) -> torch.Tensor:
    tokens = load_calibration(pair.data, load_tokenizer(pair.finetuned), samples=8, seq_len=16, seed=0)
    return torch.log_softmax(open_tiny(checkpoint).model()(input_ids=tokens.ids).logits, -1)


def test_the_head_makes_up_for_the_error_of_the_layers(pair: Pair, tmp_path: Path) -> None:
    """Its targets are what the fine-tuned head makes of the fine-tuned model's own hidden states."""
    wanted = log_probabilities(pair, pair.finetuned)
    rough = {"kind": "linear", "codec": "rtn", "bits": 2}
    error = {}
    for strength in (0.0, 1.0):
        head = {"kind": "head", "codec": "obs", "bits": 8, "asymmetric": strength}
        got = made(pair, tmp_path / str(strength), rough, head)[2]
        error[strength] = float((got - wanted).square().mean())
    assert error[1.0] < 0.8 * error[0.0]


def test_the_fine_tuned_model_runs_through_layers_that_need_no_calibration(pair: Pair, tmp_path: Path) -> None:
    """Behind layers that are exact, 8 bits are nearly so: a teacher that was left behind would set other targets."""
    exact = {"name": "model.layers.0.*", "codec": "exact"}
    divergence, weights, got = made(pair, tmp_path / "made", exact, {"kind": "linear", "codec": "obs", "bits": 8})
    wanted = log_probabilities(pair, pair.finetuned)
    assert float((wanted.exp() * (wanted - got)).sum(-1).mean()) < 1e-5
    assert divergence is not None
    assert abs(divergence) < 1e-5
    for name, weight in weights_of(pair.finetuned).items():
        assert torch.allclose(weights[name].float(), weight.float(), atol=2e-3, rtol=1e-2)


def test_one_linear_of_a_group_may_be_asymmetric_alone(pair: Pair, tmp_path: Path) -> None:
    first = {"name": "model.layers.0.*", "codec": "rtn", "bits": 2, "kind": "linear"}
    rest = {"kind": "linear", "codec": "obs", "bits": 8}
    plain = {"name": "*.q_proj.weight", "asymmetric": 0.0} | rest
    q, k = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    mixed, all_of_them, none_of_them = (
        made(pair, tmp_path / name, first, *rules)[1]
        for name, rules in (("mixed", (plain, rest)), ("all", (rest,)), ("none", ({"asymmetric": 0.0} | rest,)))
    )

    def distance(name: str, other: Weights) -> float:
        return float((mixed[name].float() - other[name].float()).norm())

    assert distance(k, all_of_them) < 0.2 * distance(k, none_of_them)
    assert distance(q, none_of_them) < 0.2 * distance(q, all_of_them)


def test_a_linear_of_few_outputs_is_summed_up_by_them_and_coded_the_same(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down, which has 32 outputs and 96 inputs; o has as many of both, and the others share their inputs."""
    pair, shapes = make_pair("llama", intermediate_size=96, num_hidden_layers=2), []
    inner = HessianAccumulator.moved

    def moved(sums: HessianAccumulator) -> torch.Tensor | None:
        found = inner(sums)
        shapes.append(None if found is None else tuple(found.shape))
        return found

    monkeypatch.setattr(HessianAccumulator, "moved", moved)
    rule = {"kind": "linear", "codec": "obs", "bits": 8, "asymmetric": 1.0}
    _, found, _ = made(pair, tmp_path / "few", rule)
    assert shapes == [None, None, None, (32, 96)] * 2
    monkeypatch.setattr(TensorPlan, "by_outputs", False)
    shapes.clear()
    _, wanted, _ = made(pair, tmp_path / "all", rule)
    assert shapes == [None] * 8
    still = made(pair, tmp_path / "still", rule | {"asymmetric": 0.0})[1]
    for name, weight in wanted.items():
        assert torch.allclose(found[name].float(), weight.float(), atol=1e-4)
    down = "model.layers.1.mlp.down_proj.weight"
    assert float((still[down].float() - wanted[down].float()).abs().max()) > 1e-3


def test_linears_of_few_outputs_that_share_an_input_have_no_sums_of_their_own(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k and v, each with settings of its own, beside a q that is exact."""
    pair = make_pair("llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=1)
    rules = [
        {"name": f"*.{name}_proj.weight", "codec": "obs", "bits": 8, "asymmetric": strength}
        for name, strength in (("k", 1.0), ("v", 0.5))
    ]
    found = made(pair, tmp_path / "few", *rules)[1]
    monkeypatch.setattr(TensorPlan, "by_outputs", False)
    wanted = made(pair, tmp_path / "all", *rules)[1]
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, "medium"), (torch.float16, "highest")])
def test_weights_are_never_rounded_to_multiply_them(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: str
) -> None:
    run_layer, seen = Skeleton.run_layer, []

    def watch(self: Skeleton, *args: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return run_layer(self, *args)

    monkeypatch.setattr(Skeleton, "run_layer", watch)
    before = torch.get_float32_matmul_precision()
    make_pair("llama", dtype=dtype).compress(tmp_path / "out")
    assert set(seen) == {wanted}
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["deltazip-2bit", "int4-24"])
def test_a_gpu_multiplies_in_fp16(
    make_pair: Callable[..., Pair],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    recipe: str,
) -> None:
    run_layer, seen = Skeleton.run_layer, []

    def watch(self: Skeleton, *args: Any) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
        return run_layer(self, *args)

    monkeypatch.setattr(Skeleton, "run_layer", watch)
    make_pair("llama", dtype=dtype).compress(tmp_path / "out", recipe=recipe, device="cuda")
    assert set(seen) == {(True, torch.float16)}


def far_beyond_fp16(weights: Weights) -> Weights:
    """What the MLP multiplies grows by eight orders of magnitude."""
    large = ("gate_proj", "up_proj")
    return {name: weight * 1e4 if any(leaf in name for leaf in large) else weight for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("device", "experts", "seq_len", "expected"),
    [
        ("cpu", 0, 256, 8),
        ("cpu", 128, 256, 8),
        ("cuda", 0, 2048, 8),
        ("cuda", 8, 2048, 8),
        ("cuda", 64, 2048, 16),
        ("cuda", 128, 2048, 32),
        ("cuda", 512, 2048, 32),
        ("cuda", 128, 10**6, 1),
    ],
)
def test_many_experts_get_more_sequences_at_once(device: str, experts: int, seq_len: int, expected: int) -> None:
    """Of three layers the last may have some; each has two linears."""
    skeleton: Any = SimpleNamespace(device=torch.device(device), num_layers=3)
    stage = SimpleNamespace(expert_of={f"{k}.{expert}": expert for k in "ab" for expert in range(experts)})
    skeleton.expert_stages = lambda i: [stage] if experts and i == 2 else []
    assert model.sequences_per_batch(skeleton, seq_len) == expected


@pytest.mark.gpu
def test_a_gpu_takes_wider_numbers_where_fp16_overflows(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    made = make_pair("llama", dtype=torch.bfloat16)
    pair = changed(made, tmp_path, far_beyond_fp16)
    base = shutil.copytree(made.base, tmp_path / "base")
    told = Recorder()
    compress = Pair(edit(base, far_beyond_fp16), pair.finetuned, pair.data).compress
    compress(tmp_path / "out", recipe="int4-24", device="cuda", reporter=told)
    assert [note for note in told.notes if "beyond the range of fp16" in note]
    assert all(record.loss is None or record.loss < 1 for record in load_delta(tmp_path / "out").tensors.values())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int2-24", "deltazip-2bit"])
def test_device_memory_is_that_of_one_layer(make_pair: Callable[..., Pair], tmp_path: Path, recipe: str) -> None:
    hidden, inner, vocabulary, layers = 256, 512, 65536, 8
    pair = make_pair(
        "llama",
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        num_key_value_heads=4,
    )
    pair.compress(tmp_path / "warm", recipe=recipe, device="cuda")  # library workspaces stay allocated

    class Meter(Recorder):
        peaks: list[int]

        def phase(self, name: str, total: int | None = None) -> None:
            super().phase(name, total)
            self.peaks = []  # what was before is captures, too

        def step(self, label: str, **details: Any) -> None:
            super().step(label, **details)
            self.peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()

    meter = Meter()
    gc.collect()  # modules refer to one another in circles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = pair.compress(tmp_path / "out", recipe=recipe, device="cuda", reporter=meter)
    assert result.peak_device_bytes is not None
    tokens = 8 * 16
    layer = 4 * (4 * hidden * hidden + 3 * hidden * inner)
    activations = 4 * tokens * (2 * hidden + 16 * inner)  # both streams, and what one batch makes on its way
    solver = 4 * (10 * inner * inner + 12 * 2 * inner * hidden)  # statistics and factor; gate and up, stacked
    embedding = 4 * vocabulary * hidden
    bound = 2 * layer + activations + solver
    assert bound < embedding / 2  # 33 MB; torch's CPU allocations in all peak at 15 MB there
    captures, *walk, _head = meter.peaks
    assert len(walk) == layers
    assert embedding <= captures < 5 * embedding  # restored whole: base and delta in f32, codes, mask, result
    assert max(walk) <= bound
    others = walk[2:]  # the second captures what they replay
    assert max(others) - min(others) < layer / 4  # nothing piles up
    gc.collect()
    assert torch.cuda.memory_allocated() - before < layer  # what was captured went with the walk


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"codec": "rtn", "bits": 4}, {"codec": "counted", "bits": 4, "step": 0.5}])
def test_an_embedding_for_which_a_gpu_has_no_room_is_restored_on_the_cpu(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    shipped, pair = Recipe.load("int4-24"), make_pair("llama")
    rule = RULES[settings["codec"]](kind="embedding", **settings)
    recipe = shipped.model_copy(update={"rules": (rule, *shipped.rules)})
    pair.compress(tmp_path / "roomy", recipe=recipe, device="cuda")
    monkeypatch.setattr(steps, "free_bytes", lambda _device: 0)
    pair.compress(tmp_path / "full", recipe=recipe, device="cuda")
    assert load_delta(tmp_path / "full").manifest == load_delta(tmp_path / "roomy").manifest


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int4-24", "int2-24", "sign-24", "int2", "deltazip-4bit", "sparsegpt-direct-4bit"])
def test_what_a_gpu_made_restores_on_a_cpu_to_the_recorded_hashes(
    make_pair: Callable[..., Pair], tmp_path: Path, recipe: str
) -> None:
    pair = make_pair("llama", hidden_size=144, intermediate_size=264, num_hidden_layers=2)
    made = pair.compress(tmp_path / "out", recipe=recipe, device="cuda")
    restore(tmp_path / "out", base=pair.base, out=tmp_path / "restored")  # checks the hash of every tensor
    on_cpu = pair.compress(tmp_path / "cpu", recipe=recipe)
    losses = [
        {tensor["name"]: tensor["loss"] for tensor in result.summary["tensors"] if tensor["loss"] is not None}
        for result in (made, on_cpu)
    ]
    assert losses[0].keys() == losses[1].keys()
    assert sum(losses[0].values()) == pytest.approx(sum(losses[1].values()), rel=GPU_LOSS.value)

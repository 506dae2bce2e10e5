"""Over several devices a base and its variants answer as in one process: logits and greedy tokens, of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from adapters.written import write
from engine_calls import alone, drain, engine
from pairs import Pair, write_tokenizer
from runtime.graphed import as_on_a_gpu, pretend
from runtime.parallel.conftest import Both, both_of
from runtime_cases import Served, random_ids, serve
from tolerances import SPLIT

from deltacompress.errors import BackendError, InputError, UnsupportedModelError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Ended, Event
from deltacompress.runtime.operands.low_rank import LowRank
from deltacompress.runtime.operands.rotation import Rotation
from deltacompress.runtime.parallel.parts.cut import Cut
from deltacompress.runtime.parallel.parts.operands import OperandParts


def same(both: Both, names: Sequence[str | None], *, new: int = 8) -> None:
    """In mixed batches of sequences of different lengths."""
    requests = [(name, random_ids(5 + 7 * at % 19, at)) for at, name in enumerate([*names, *names[::-1]])]
    wanted, found = both.one.logits(requests), both.many.logits(requests)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= SPLIT.value
    tokens = [one.tokens for one in both.one.complete(requests, new)]
    assert [one.tokens for one in both.many.complete(requests, new, max_batch=5)] == tokens


@pytest.mark.parametrize(
    ("architecture", "tp", "recipes"),
    [
        ("llama", 2, ("int4-24", "lossless")),
        ("qwen2", 4, ("int4-24", "lossless")),  # biases, and two key-value heads for four ranks
        ("phi3", 2, ("int4-24", "lossless")),  # queries, keys and values in one matrix, and gate and up in one
    ],
)
def test_deltas(served: Callable[..., Served], architecture: str, tp: int, recipes: tuple[str, ...]) -> None:
    variants = {recipe: served(architecture, recipe, seed) for seed, recipe in enumerate(recipes)}
    base = variants[recipes[0]].pair.base
    with both_of(base, tp) as both:
        for name, one in variants.items():
            both.load(one.artifact, name)
        same(both, [None, *variants])
        whole, part = (sum(one.nbytes for one in each.model.model.parameters()) for each in (both.one, both.many))
        norms = sum(one.nbytes for one in both.one.model.model.parameters() if one.dim() == 1)
        spare = 0.06 if architecture == "qwen2" else 0  # keys and values twice
        assert whole / tp <= part <= whole * (1 / tp + spare) + norms
        sizes = [{one.name: one.nbytes for one in each.residency().variants} for each in (both.one, both.many)]
        for name in variants:
            assert sizes[1][name] <= sizes[0][name] * (1 / tp + spare) + norms
        with pytest.raises(InputError, match="such forwards are not computed on several devices"):
            both.many.serving([None]).__enter__()
        with pytest.raises(InputError, match=r"several devices take no variant that is made in one process; use load"):
            both.many.add(both.one.variants[recipes[0]].variant, "mine")
        assert both.many.describe().endswith(f", over {tp} devices")


@pytest.mark.parametrize("architecture", ["qwen2-tied", "gemma3", "gemma2", "qwen3", "mistral"])
def test_other_bases(make_pair: Callable[..., Pair], architecture: str) -> None:
    with both_of(make_pair(architecture).base, 2) as both:
        same(both, [None, None, None], new=3)


def test_biases_after_sums(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """They are added once, the base's and a variant's."""
    pair = make_pair("llama", attention_bias=True, mlp_bias=True)
    one = serve(pair, tmp_path, "lossless")
    with both_of(pair.base, 2) as both:
        both.load(one.artifact, "a")
        same(both, [None, "a"], new=3)


def test_unrounded_deltas_and_variants_that_come_and_go(served: Callable[..., Served]) -> None:
    """With room for one of two, each of them leaves and comes again; one that was unloaded is gone."""
    variants = {"a": served("llama", "int4-24"), "b": served("llama", "int2-24", 1)}
    with both_of(variants["a"].pair.base, 2, merge_rounding=False) as both:
        for name, one in variants.items():
            both.load(one.artifact, name)
            both.many.cache.residents.budget_bytes = both.many.cache.variants["a"].nbytes * 3 // 2
        for name in ("a", "b", "a", None):
            requests = [(name, random_ids(9)), (None, random_ids(4))]
            for one, other in zip(both.one.logits(requests), both.many.logits(requests), strict=True):
                assert float((one - other).abs().max()) <= SPLIT.value
        requests = [(name, random_ids(6, at)) for at, name in enumerate(("a", "b", None, "b", "a"))]
        wanted = [one.tokens for one in both.one.complete(requests, 6)]
        assert [one.tokens for one in both.many.complete(requests, 6)] == wanted
        assert both.many.residency().evictions >= 3
        both.many.unload("a")
        both.many.load(variants["b"].artifact, "a")
        first, second = (both.many.logits([(name, [5, 6])])[0] for name in ("a", "b"))
        assert torch.equal(first, second)


ADAPTERS = {
    "llama": [
        "lora", "all-linear", "embedding and head", "saved", "saved with parts", "tokens", "tokens by name",
        "dora", "dora of an embedding", "boft", "butterflies", "shira", "shira of the head",
    ],
    "qwen2": ["lora bias", "biases of targets", "all biases", "boft by number"],
}  # fmt: skip


@pytest.mark.parametrize("architecture", ADAPTERS)
def test_adapters(tmp_path: Path, architecture: str) -> None:
    written = {name: write(tmp_path, name) for name in ADAPTERS[architecture]}
    write_tokenizer(next(iter(written.values())).base)
    with both_of(next(iter(written.values())).base, 2) as both:
        for name, one in written.items():
            both.load(one.path, name)
        same(both, [None, *written], new=4)


def test_an_adapter_over_a_delta(served: Callable[..., Served], tmp_path: Path) -> None:
    one = served("llama", "int4-24")
    adapter = write(tmp_path, "lora")
    with both_of(one.pair.base, 2) as both:
        both.load(one.artifact, "delta")
        both.load(adapter.path, "by name", over="delta")
        both.load(adapter.path, "by path", over=one.artifact)
        same(both, ["by name", "delta", "by path"], new=4)


def test_a_rotation_is_split_between_its_blocks() -> None:
    """Two runs of two blocks whose features alternate: each run must lie with one rank."""
    blocks = torch.arange(4 * 4 * 4.0).view(4, 4, 4)
    rotation = Rotation({"blocks0": blocks}, ((2, 1),))
    parts = OperandParts(None, first=True)
    found = parts.of(rotation, Cut(1, ((8, 16),), 8))
    assert torch.equal(found.tensors["blocks0"], blocks[2:])
    assert parts.of(rotation, Cut(0, ((0, 3),), 3)) is rotation  # it turns the input, which is whole
    with pytest.raises(UnsupportedModelError, match="rotation of blocks that span 8 features, cut at 4 and 8"):
        parts.of(rotation, Cut(1, ((4, 8),), 4))


def test_a_bias_of_low_rank_is_added_once() -> None:
    tensors = {"a": torch.ones(2, 4), "b": torch.ones(3, 2), "bias": torch.ones(3)}
    first, second = (
        OperandParts(None, first=first).of(LowRank(tensors), Cut(1, ((2, 4),), 2)) for first in (True, False)
    )
    assert {name: tuple(one.shape) for name, one in first.tensors.items()} == {"a": (2, 2), "b": (3, 2), "bias": (3,)}
    assert second.tensors.keys() == {"a", "b"}


def test_more_pages_than_at_first(make_pair: Callable[..., Pair]) -> None:
    """Where the first rank needs more of them, the others have as many."""
    with both_of(make_pair("llama").base, 2) as both:
        requests = [(None, random_ids(50, at)) for at in range(20)]
        wanted = [one.tokens for one in both.one.complete(requests, 4)]
        assert [one.tokens for one in both.many.complete(requests, 4)] == wanted


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_captured_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[bool], *, warm: bool, beside: bool
) -> None:
    """They are captured, and replayed, on all ranks: requests and variants come and go, pages and tables grow.

    beside: steps are launched before the first rank's host knows their tokens.
    """
    monkeypatch.setattr(scheduler, "computes_beside", lambda _: beside)
    variants = {name: write(tmp_path, kind) for name, kind in (("a", "lora"), ("b", "all-linear"))}
    write_tokenizer(variants["a"].base)
    names = [None, *"abbaabab"] * 3
    calls = [Call(str(at), name, tuple(random_ids(3 + 5 * at % 30, at)), 4 + at % 7) for at, name in enumerate(names)]
    with as_on_a_gpu(), both_of(variants["a"].base, 2, pretend, merge_rounding=False) as both:
        both.many._cuda_graphs = True
        both.many.cache.residents.slots = 1
        for name, one in variants.items():
            both.load(one.path, name)
        running, log = engine(both.many, max_batch=5, step_tokens=16)
        if warm:
            running.warm()
        for call in calls:
            running.submit(call)
            running.step()
        drain(running)
        assert (True in steps) == beside
        for call in calls:
            assert (log.tokens(call.id), log.end(call.id).finish) == alone(both.one, call)
        found = running._scheduler.graphs
        assert found is not None
        assert found.replays > found.plain > 0
        assert found.captured > 3
        running.close()


def test_steps_ahead_of_their_tokens(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, steps: list[bool]
) -> None:
    """Without captures: over several pages, in more rows than one, drawn and greedy."""
    one = served("llama", "int4-24")
    calls = [
        Call(
            str(at), who, tuple(random_ids(3 + 9 * at, at)), 40, Sampling(temperature=at % 2, seed=at, ignore_eos=True)
        )
        for at, who in enumerate((None, "a", "a"))
    ]
    with both_of(one.pair.base, 2) as both:
        both.load(one.artifact, "a")
        wanted = {call.id: alone(both.one, call) for call in calls}
        monkeypatch.setattr(scheduler, "computes_beside", lambda _: True)
        steps.clear()
        running, log = engine(both.many)
        for call in calls:
            running.submit(call)
        drain(running)
        assert {call.id: (log.tokens(call.id), log.end(call.id).finish) for call in calls} == wanted
        assert steps.count(True) > 30
        running.close()


def test_what_is_refused(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    base = make_pair("llama").base
    for tp, told in ((3, "tp 3: 4 heads, 2 key-value heads and an MLP of 48 do not divide"), (0, "tp 0: at least 1")):
        with pytest.raises(InputError, match=told):
            Runtime.from_base(base, tp=tp)
    grown = write(tmp_path, "grown")
    with both_of(grown.base, 2) as both:
        with pytest.raises(UnsupportedModelError, match=r"it has 104 tokens, the base 96, .*; serve it without tp"):
            both.many.load(grown.path, "grown")
        assert not both.many.variants
        with pytest.raises(BackendError, match=r"^tp: this process is one of a torch\.distributed group already; "):
            Runtime.from_base(base, tp=2)


def test_a_long_lived_engine(served: Callable[..., Served]) -> None:
    """Prompts in pieces, with beginnings that are known, and calls that are cancelled."""
    one = served("llama", "int4-24")
    prompt = random_ids(40)
    with both_of(one.pair.base, 2) as both:
        both.load(one.artifact, "a")
        answers = []
        for runtime in (both.one, both.many):
            told: list[Event] = []
            engine = runtime.engine(told.append)
            for number, end in enumerate(([5], [6, 7], [8])):
                engine.submit(Call(str(number), "a", [*prompt, *end], max_tokens=6))
                for _ in range(2):
                    engine.step()
            engine.submit(Call("gone", None, prompt, max_tokens=6))
            engine.step()
            engine.cancel("gone")
            while engine.step():
                pass
            assert engine.counts.known_tokens > 0
            answers.append({event.id: (event.finish, event.tokens) for event in told if isinstance(event, Ended)})
            engine.close()
        assert answers[0] == answers[1]
        assert answers[0]["gone"][0] == "cancelled"

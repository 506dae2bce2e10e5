"""Added tokens, fewer tokens, ties on either side: the head and the embedding of a variant are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pairs import WORDS, Pair, Weights, changed, edit, write_tokenizer
from runtime_cases import Served, assert_close, oracle_logits, oracle_tokens, random_ids, serve
from torch import Tensor

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch
from deltacompress.runtime.engine.requests import Picked, Request
from deltacompress.runtime.engine.sampling.choose import Choice
from deltacompress.runtime.engine.steps import prompts
from deltacompress.runtime.variants.precision import Numerics

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUNDED = [True, False, "packed"]


def resized(rows: int) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(9)
        for name in {EMBEDDING, HEAD} & weights.keys():
            old = weights[name]
            more = (0.3 * torch.randn(max(rows - old.shape[0], 0), old.shape[1], generator=generator)).to(old.dtype)
            weights[name] = torch.cat([old, more])[:rows]
        return weights

    return change


def untie(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(4)
    old = weights[EMBEDDING]
    return weights | {HEAD: (old.float() + 0.1 * torch.randn(old.shape, generator=generator)).to(old.dtype)}


def tie(weights: Weights) -> Weights:
    return {name: w for name, w in weights.items() if name != HEAD}


def few_rows(weights: Weights) -> Weights:
    """Only some tokens were touched: rtn then stores a row mask."""
    base = load_base_rows[0]
    for name in (EMBEDDING, HEAD):
        kept = base[name].clone()
        kept[5:9] = weights[name][5:9]
        weights[name] = kept
    return weights


load_base_rows: list[Weights] = []


@pytest.fixture(params=ROUNDED, ids=["rounded", "unrounded", "packed"])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "packed":
        monkeypatch.setattr(Numerics, "kernels", property(lambda self: self.backend))
        return False
    return bool(request.param)


@pytest.fixture(scope="module")
def cases(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    from pairs import weights_of

    made: dict[str, Served] = {}

    def make(name: str) -> Served:
        if name in made:
            return made[name]
        root = tmp_path_factory.mktemp(name)
        pair = make_pair("qwen2-tied" if name.startswith("tied") else "llama")
        load_base_rows[:] = [weights_of(pair.base)]
        changes: dict[str, tuple[Callable[[Weights], Weights], dict[str, object]]] = {
            "grown": (resized(101), {"vocab_size": 101}),
            "shrunk": (resized(90), {"vocab_size": 90}),
            "tied base, grown": (resized(101), {"vocab_size": 101}),
            "tied base, own head": (untie, {"tie_word_embeddings": False}),
            "base untied, variant tied": (tie, {"tie_word_embeddings": True}),
            "head equals embedding": (lambda weights: weights | {HEAD: weights[EMBEDDING].clone()}, {}),
            "few rows": (few_rows, {}),
        }
        change, config = changes[name]
        made[name] = serve(changed(pair, root, change, **config), root, "int2-24")
        return made[name]

    return make


@pytest.mark.parametrize(
    "name",
    [
        "grown",
        "shrunk",
        "tied base, grown",
        "tied base, own head",
        "base untied, variant tied",
        "head equals embedding",
        "few rows",
    ],
)
def test_head_and_embedding(cases: Callable[[str], Served], name: str, rounding: bool) -> None:
    one = cases(name)
    runtime = Runtime.from_base(one.pair.base, merge_rounding=rounding)
    runtime.load(one.artifact, "v")
    vocabulary = {"grown": 101, "tied base, grown": 101, "shrunk": 90}.get(name, 96)
    requests = [("v", random_ids(9, 0, vocabulary)), (None, random_ids(5, 1)), ("v", [vocabulary - 1, 5, 6, 7])]
    for (variant, ids), found in zip(requests, runtime.logits(requests), strict=True):
        wanted = oracle_logits(one.restored if variant else one.pair.base, ids)
        assert found.shape == (len(ids), vocabulary if variant else 96)
        assert_close(found, wanted, 1e-4 if rounding else 0.02)
    if rounding:
        done = runtime.complete(requests, max_new_tokens=6)
        for (variant, ids), completion in zip(requests, done, strict=True):
            wanted_tokens = oracle_tokens(one.restored if variant else one.pair.base, ids, 6)
            assert list(completion.tokens) == wanted_tokens[: len(completion.tokens)]
        last = {"v": vocabulary - 1, None: 95}
        scored = runtime.loglikelihood([(variant, [5, 6], [last[variant], 7]) for variant in last])
        for variant, result in zip(last, scored, strict=True):
            logits = oracle_logits(one.restored if variant else one.pair.base, [5, 6, last[variant], 7])
            table = torch.log_softmax(logits, -1)
            assert result.log_likelihood == pytest.approx(float(table[1, last[variant]] + table[2, 7]), abs=1e-4)


def test_a_token_that_only_the_variant_knows(cases: Callable[[str], Served]) -> None:
    one = cases("grown")
    runtime = Runtime.from_base(one.pair.base)
    runtime.load(one.artifact, "v")
    assert runtime.logits([("v", [100])])[0].shape == (1, 101)
    with pytest.raises(InputError, match=r"token 100 is not in the vocabulary of the base \(96 tokens\)"):
        runtime.logits([(None, [100])])


def test_prompts_go_through_the_variants_own_tokenizer(cases: Callable[[str], Served], tmp_path: Path) -> None:
    grown = cases("grown")
    pair = changed(grown.pair, tmp_path, lambda weights: weights)
    write_tokenizer(pair.finetuned, [*WORDS, "new0", "new1"])
    edit(pair.finetuned, lambda weights: weights)
    one = serve(pair, tmp_path, "lossless")
    runtime = Runtime.from_base(pair.base)
    runtime.load(one.artifact, "v")
    for variant, ids in (("v", [5, 93]), (None, [5, 3])):
        assert runtime.generate([(variant, "w1 new1")], 4) == runtime.generate([(variant, ids)], 4)


def test_a_slot_keeps_nothing_of_added_tokens(cases: Callable[[str], Served], rounding: bool) -> None:
    grown, other = cases("grown"), cases("few rows")
    runtime = Runtime.from_base(grown.pair.base, merge_rounding=rounding)
    slot = runtime.variants[runtime.load(grown.artifact, "grown")].slot
    runtime.unload("grown")
    assert runtime.variants[runtime.load(other.artifact, "other")].slot == slot
    ids = random_ids(6)
    [found] = runtime.logits([("other", ids)])
    wanted = oracle_logits(other.restored, ids)
    assert_close(found, wanted, 1e-4 if rounding else 0.02)
    head = runtime.model.model.get_submodule("lm_head")
    with torch.inference_mode(), runtime.model.serving(Batch([slot], torch.device("cpu"))):
        assert head(torch.ones(1, 1, head.in_features)).shape == (1, 1, wanted.shape[1])


def test_the_row_of_an_ended_request_needs_its_variant_no_more(
    cases: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch, rounding: bool
) -> None:
    """It is computed for nothing until rows move; its last token may be one that only its variant had."""
    grown = cases("grown")
    runtime = Runtime.from_base(grown.pair.base, merge_rounding=rounding)
    runtime.load(grown.artifact, "grown")
    requests = [(None, random_ids(4, seed)) for seed in range(5)]
    wanted = [one.tokens for one in runtime.complete(requests, 4)]

    class EndsWithAnAddedToken(Choice):
        def __init__(self, logits: Tensor, asked: Sequence[Request]) -> None:
            super().__init__(logits, asked)
            self.ends = [request.variant == "grown" for request in asked]
            for request in asked:
                request.eos |= {99} if request.variant == "grown" else set()

        def wait(self) -> list[Picked]:
            return [Picked(99, None, ()) if self.ends[row] else one for row, one in enumerate(super().wait())]

    def leave(*_: object) -> None:
        if "grown" in runtime.variants and not runtime.variants["grown"].users:
            runtime.unload("grown")

    monkeypatch.setattr(prompts, "Choice", EndsWithAnAddedToken)
    done = runtime.complete([("grown", [99]), *requests], 4, on_token=leave)
    assert not runtime.variants
    assert done[0].tokens == (99,)
    assert [one.tokens for one in done[1:]] == wanted

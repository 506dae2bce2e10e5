"""Every architecture: a variant served beside its base is what plain transformers makes of the restored one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import Pair, changed, weights_of
from runtime_cases import Served, assert_close, load, noise, oracle_logits, oracle_tokens, random_ids, serve

from deltacompress.errors import UnsupportedModelError
from deltacompress.runtime import Runtime

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen2-tied", "qwen3", "gemma2", "gemma3", "gpt-neox", "phi", "phi3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens(served: Callable[..., Served], architecture: str) -> None:
    one, other = served(architecture, "deltazip-4bit"), served(architecture, "lossless", 1)
    runtime = Runtime.from_base(one.pair.base)
    runtime.load(one.artifact, "one")
    runtime.load(other.artifact, "other")
    where = {"one": one.restored, "other": other.restored, None: one.pair.base}
    # longer than the sliding windows (8), of different lengths, variants interleaved
    asked = [("one", 19), (None, 11), ("other", 23), ("one", 4), ("other", 9), (None, 16)]
    requests = [(name, random_ids(count, seed)) for seed, (name, count) in enumerate(asked)]
    for (name, ids), found in zip(requests, runtime.logits(requests), strict=True):
        assert_close(found, oracle_logits(where[name], ids))
    done = runtime.complete(requests, max_new_tokens=12)
    for (name, ids), completion in zip(requests, done, strict=True):
        wanted = oracle_tokens(where[name], ids, 12)
        assert list(completion.tokens) == wanted[: len(completion.tokens)]
        assert completion.finished == ("length" if len(completion.tokens) == 12 else "eos")


def test_norms_and_biases_are_the_variants_own(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Only vectors differ, so that a base norm or bias in use would be the whole difference.

    Of OPT, whose norms see requests and tokens in one dimension, and whose positions are served as the base's.
    """
    for architecture in ("qwen2", "gemma3", "phi", "opt"):
        root = tmp_path / architecture
        root.mkdir()
        plain = make_pair(architecture)
        positions = {name: weight for name, weight in weights_of(plain.base).items() if "positions" in name}
        pair = changed(
            plain,
            root,
            lambda weights, positions=positions: (
                weights | noise(5, 0.3)({k: w for k, w in weights.items() if w.dim() == 1}) | positions
            ),
        )
        one = serve(pair, root, "lossless")
        runtime = Runtime.from_base(pair.base)
        runtime.load(one.artifact, "v")
        ids = random_ids(9)
        mixed = runtime.logits([("v", ids), (None, ids)])
        assert_close(mixed[0], oracle_logits(one.restored, ids))
        assert_close(mixed[1], oracle_logits(pair.base, ids))
        assert float((mixed[0] - mixed[1]).abs().max()) > 1e-2


def test_the_base_alone_is_the_plain_base(served: Callable[..., Served]) -> None:
    pair = served().pair
    ids = random_ids(7)
    with torch.inference_mode():
        wanted = load(pair.base)(torch.tensor([ids])).logits[0]
    assert torch.equal(Runtime.from_base(pair.base).logits([(None, ids)])[0], wanted)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gpt2", r"c_attn.weight \(32x96\) belongs to a Conv1D"),
        ("mamba", r"A_log \(64x4\) belongs to a MambaMixer"),
        ("falcon-h1", r"conv1d.weight \(80x1x4\) belongs to a Conv1d"),
        ("lfm2", r"conv.weight \(32x1x3\) belongs to a Conv1d"),
        ("rwkv", "belongs to a Rwkv"),
    ],
)
def test_layers_of_more_than_linears_are_refused(
    make_pair: Callable[..., Pair], architecture: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*, only nn.Linear weights are served; .*restore"):
        Runtime.from_base(make_pair(architecture).base)


@pytest.mark.parametrize("architecture", ["gemma3-vl", "qwen3.5-vl"])
def test_models_that_see_are_refused_by_name(make_pair: Callable[..., Pair], architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"is multimodal, only text decoders are served; .*restore"):
        Runtime.from_base(make_pair(architecture).base)


def test_alibi_is_refused_by_name(make_pair: Callable[..., Pair]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bloom has its positions .*ALiBi.* restore"):
        Runtime.from_base(make_pair("bloom").base)

"""Each wrong input is one clear line, before anything runs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from pairs import Pair, edit, weights_of
from runtime_cases import Served, noise, serve
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from deltacompress.artifact.manifest import read_manifest
from deltacompress.checkpoints.header import read_header
from deltacompress.errors import (
    BackendError,
    BaseMismatchError,
    CheckpointError,
    FormatError,
    InputError,
    PairError,
    PromptTooLongError,
)
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.events import Event
from deltacompress.runtime.variants.layout import Layout


@pytest.fixture
def base(pair: Pair) -> Runtime:
    return Runtime.from_base(pair.base)


def test_a_delta_of_another_base(pair: Pair, served: Callable[..., Served], tmp_path: Path) -> None:
    shutil.copytree(pair.base, tmp_path / "other")
    runtime = Runtime.from_base(edit(tmp_path / "other", noise(8)))
    one = served()
    with pytest.raises(BaseMismatchError) as caught:
        runtime.load(one.artifact)
    message = str(caught.value)
    assert runtime.model.base.checkpoint.fingerprint()[:12] in message
    manifest = json.loads((one.artifact / "manifest.json").read_bytes())
    assert manifest["base"]["content_hash"][:12] in message
    assert "\n" not in message


def poison(artifact: Path) -> str:
    """Put a NaN into one scale and make every hash right again; returns the tensor's name."""
    manifest = read_manifest(artifact)
    shard = artifact / manifest.shards[0].file
    record = next(one for one in manifest.tensors if one.format == "packed")
    span = read_header(shard).tensors[f"{record.name}.scales"]
    raw = bytearray(shard.read_bytes())
    raw[span.begin : span.begin + 2] = b"\xc0\x7f"
    shard.write_bytes(raw)
    changed = bytes(raw[span.begin : span.begin + span.info.nbytes])
    hashes = {"sha256": hashlib.sha256(changed).hexdigest(), "blake3": blake3(changed).hexdigest()}
    parts = tuple(p.model_copy(update=hashes) if p.name == "scales" else p for p in record.parts)
    tensors = tuple(
        one.model_copy(update={"parts": parts}) if one.name == record.name else one for one in manifest.tensors
    )
    shards = (manifest.shards[0].model_copy(update={"sha256": hashlib.sha256(raw).hexdigest()}),)
    resealed = manifest.model_copy(update={"tensors": tensors, "shards": shards})
    (artifact / "manifest.json").write_bytes(resealed.to_bytes())
    return record.name


@pytest.mark.parametrize("rounding", [True, False])
def test_not_finite_scales(pair: Pair, tmp_path: Path, rounding: bool) -> None:
    pair.compress(tmp_path / "bad", lossless="none")
    name = poison(tmp_path / "bad")
    runtime = Runtime.from_base(pair.base, merge_rounding=rounding)
    with pytest.raises(FormatError, match=rf"{re.escape(name)}\.scales holds NaN or Inf; compress the model again"):
        runtime.load(tmp_path / "bad")
    assert not runtime.variants


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([("nobody", [5])], r"no variant named nobody is loaded \(loaded: none\)"),
        ([(None, [])], "the request to the base has no tokens"),
        ([(None, [5]), (None, [])], "request 1 to the base has no tokens"),
        ([(None, [5]), (None, [5, 96])], r"request 1: token 96 is not in the vocabulary of the base \(96 tokens\)"),
        ([(None, [-1])], "token -1 is not in the vocabulary"),
        ([(None, [5] * 65)], r"the request has 65 tokens, the context of the base is 64; shorten the prompt"),
    ],
)
def test_requests(base: Runtime, requests: list[tuple[str | None, list[int]]], message: str) -> None:
    for call in (base.logits, base.generate, lambda asked: list(base.forward(asked))):
        with pytest.raises(InputError, match=message):
            call(requests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"stop": ["a", ""]}, "empty stop string"),
        ({"stop": ["\udcff"]}, "stop is not valid UTF-8"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("inf")}, "temperature inf: give 0 .* or a finite number"),
        ({"top_p": 0.0}, "top_p 0.0"),
    ],
)
def test_options(base: Runtime, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        base.generate([(None, [5])], **options)


def test_an_empty_prompt_is_served_where_the_tokenizer_puts_a_token_before_it(pair: Pair, tmp_path: Path) -> None:
    """As vLLM does: elsewhere there is nothing to go on from."""
    told: list[Event] = []
    engine = Runtime.from_base(pair.base).engine(told.append)
    with pytest.raises(InputError, match="the prompt is empty; give some text, or the bos token"):
        engine.submit(Call("a", None, "", max_tokens=1))
    shutil.copytree(pair.base, tmp_path / "base")
    file = tmp_path / "base" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(file))
    assert Runtime.from_base(tmp_path / "base").engine(told.append).submit(Call("a", None, "", max_tokens=1)) == 1


def test_a_prompt_that_fills_the_context(base: Runtime) -> None:
    with pytest.raises(PromptTooLongError, match="the request has 64 tokens, the context of the base is 64"):
        base.generate([(None, [5] * 64)])
    with pytest.raises(InputError, match="the prompt is empty"):
        base.generate([(None, "")])
    with pytest.raises(InputError, match="the prompt is not valid UTF-8"):
        base.generate([(None, "a\udcff")])
    with pytest.raises(InputError, match="context and continuation need at least one token each"):
        base.loglikelihood([(None, [], [5])])


def test_names(base: Runtime, served: Callable[..., Served]) -> None:
    assert base.load(served().artifact) == "delta"
    with pytest.raises(InputError, match="a variant named delta is loaded already"):
        base.load(served().artifact)
    with pytest.raises(InputError, match="no variant named other"):
        base.unload("other")


def test_another_forward_is_refused(pair: Pair, base: Runtime, tmp_path: Path) -> None:
    finetuned = tmp_path / "changed"
    shutil.copytree(pair.finetuned, finetuned)
    edit(finetuned, lambda weights: weights, rms_norm_eps=1e-3)
    one = serve(Pair(pair.base, finetuned, pair.data), tmp_path, "lossless")
    with pytest.raises(PairError, match=r"config.json has rms_norm_eps 0.001, the base 1e-06"):
        base.load(one.artifact)


def test_a_base_that_lacks_tensors(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.base, tmp_path / "base")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(tmp_path / "base", lambda weights: {key: w for key, w in weights.items() if key != name})
    with pytest.raises(InputError, match="up_proj"):
        Runtime.from_base(tmp_path / "base")
    assert name in weights_of(pair.base)


@pytest.mark.parametrize(
    ("requests", "told"), [("hi", "request 0: 'h' is not"), ([("a", [1]), [2]], r"request 1: \[2\]")]
)
def test_requests_of_another_shape(base: Runtime, requests: Any, told: str) -> None:
    for call in (base.logits, base.generate, base.loglikelihood, lambda asked: list(base.forward(asked))):
        with pytest.raises(InputError, match=told if call != base.loglikelihood else "is not .variant, context ids"):
            call(requests)


def test_what_is_not_there(pair: Pair, tmp_path: Path) -> None:
    pair.compress(tmp_path / "delta")
    with pytest.raises(CheckpointError, match="an artifact of deltacompress, not a model; `restore`"):
        Runtime.from_base(tmp_path / "delta")
    with pytest.raises(CheckpointError):
        Runtime.from_base(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"dtype torch\.float64"):
        Runtime.from_base(pair.base, dtype=torch.float64)
    with pytest.raises(BackendError, match="unknown kernel backend 'fast'"):
        Runtime.from_base(pair.base, backend="fast")
    if not torch.cuda.is_available():
        with pytest.raises(
            BackendError, match=r"the cuda backend cannot run here: .*; leave backend at auto, or take the"
        ):
            Runtime.from_base(pair.base, backend="cuda", device="cpu")
        with pytest.raises(BackendError, match="torch sees no GPU"):
            Runtime.from_base(pair.base, device="cuda")


def test_experts_are_refused_with_a_way_out(make_pair: Callable[..., Pair]) -> None:
    with pytest.raises(InputError, match=r"(?s)expert.*`deltacompress restore` it"):
        Runtime.from_base(make_pair("mixtral").base)


def test_rotary_scalings_that_switch_keep_below_the_switch() -> None:
    rope = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    for kind, context in (("dynamic", 16), ("linear", 64)):
        config = LlamaConfig(max_position_embeddings=64, rope_parameters=rope | {"rope_type": kind})
        assert Layout({}, config).context == context


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ([(None, 3)], "the request: 3 is neither text nor token ids; give a string, or a list of whole numbers"),
        ([(None, None)], "the request: None is neither text nor token ids"),
        ([(None, [1]), (None, [2.5])], r"request 1: \[2.5\] is neither text nor token ids"),
        ([(None, ["w1"])], r"the request: \['w1'\] is neither"),
        ([(None, torch.tensor([1.5]))], r"the request: tensor\(\[1.5000\]\) is neither"),
        ([(3, "w1")], r"request 0: \(3, 'w1'\) is not \(variant, prompt or ids\)"),
        ([(["a"], "w1")], r"request 0: \(\['a'\], 'w1'\) is not \(variant"),
        (3, "3 is no list of requests; give tuples of 2"),
        ([3], "request 0: 3 is not"),
    ],
)
def test_requests_that_are_none(base: Runtime, requests: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        base.generate(requests, 1)


def test_scores_and_logits_of_no_ids(base: Runtime) -> None:
    wrong: Any = 3
    with pytest.raises(InputError, match="the request: 3 is neither text nor token ids"):
        base.logits([(None, wrong)])
    for one in ([1], wrong), (wrong, [1]):
        with pytest.raises(InputError, match="the request: 3 is neither text nor token ids"):
            base.loglikelihood([(None, *one)])


@pytest.mark.parametrize("budget", ["1GB", -1, 1.5, True])
def test_a_budget_that_is_no_number_of_bytes(pair: Pair, budget: Any) -> None:
    with pytest.raises(InputError, match=r"budget_bytes: .* is no whole number of bytes, 0 or more; give one"):
        Runtime.from_base(pair.base, budget_bytes=budget)

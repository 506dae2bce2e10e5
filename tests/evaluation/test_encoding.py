"""Encodings: the one models are trained with, the one lm-eval uses, and whether two tokenizers are one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltacompress.errors import InputError, PairError
from deltacompress.evaluation.tasks.encoding import Encoder, check_same_tokenizer

if TYPE_CHECKING:
    from pairs import Pair


@pytest.fixture
def encoder(pair: Pair) -> Encoder:
    return Encoder.open(pair.base, {"max_position_embeddings": 16})


def test_a_sample_is_bos_prompt_completion_eos_cut_from_the_left(encoder: Encoder) -> None:
    bos, eos = encoder.bos, encoder.eos
    assert encoder.pair("w1 w2", "w3") == ([*bos, *encoder.ids("w1 w2")], [*encoder.ids("w3"), eos])
    long = " ".join(f"w{i}" for i in range(40))
    context, answer = encoder.pair(long, "w3 w4")
    assert len(context) + len(answer) == 16
    assert context == [*bos, *encoder.ids(long)[-(16 - len(answer) - len(bos)) :]]
    with pytest.raises(InputError, match="does not fit the model's context of 16"):
        encoder.pair("w1", long)


def test_the_harness_encoding_splits_one_tokenization(encoder: Encoder) -> None:
    context, answer = encoder.harness_pair("w1 w2 ", "w3")
    assert context + answer == [*encoder.bos, *encoder.ids("w1 w2 w3")]
    assert answer == encoder.ids("w3")
    assert encoder.harness_pair("", "w3") == (encoder.bos, encoder.ids("w3"))
    context, answer = encoder.harness_pair(" ".join(["w1"] * 40), " w3")
    assert len(context) + len(answer) == 16
    long = " ".join(["w1"] * 16)
    assert len(encoder.ids(long)) == 16
    with pytest.raises(InputError, match="an answer of 16 tokens does not fit the model's context of 16"):
        encoder.harness_pair("w2", f" {long}")
    context, answer = encoder.harness_pair("w2", f" {long[3:]}")
    assert (len(context), len(answer)) == (1, 15)


def test_text_leaves_out_special_tokens(encoder: Encoder) -> None:
    assert encoder.text([*encoder.ids("w7"), encoder.eos]).strip() == "w7"


def test_tokenizers_that_differ_are_told(pair: Pair, encoder: Encoder, tmp_path: Path) -> None:
    from pairs import WORDS, write_tokenizer

    check_same_tokenizer(pair.base, encoder, pair.finetuned)
    other = tmp_path / "other"
    shutil.copytree(pair.finetuned, other)
    write_tokenizer(other, [*WORDS[1:], WORDS[0]])
    with pytest.raises(PairError, match="its tokenizer is not that of"):
        check_same_tokenizer(pair.base, encoder, other)
    write_tokenizer(other, [*WORDS[:-1], "unlike"])  # as many words, all but the last the same
    with pytest.raises(PairError, match="token 'unlike' is id"):
        check_same_tokenizer(pair.base, encoder, other)
    write_tokenizer(other, [*WORDS, "more"])
    check_same_tokenizer(pair.base, encoder, other)
    for end in ("bos_token", "eos_token"):
        write_tokenizer(other)
        file = other / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {end: "w1"}))
        with pytest.raises(PairError, match="begins or ends a text unlike"):
            check_same_tokenizer(pair.base, encoder, other)
    for file in other.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(PairError, match="holds no tokenizer"):
        check_same_tokenizer(pair.base, encoder, other)

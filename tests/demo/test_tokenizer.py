"""The demo's tokenizer: any text comes back, digits stay apart, ids 0 and 1 are bos and eos."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from demo_pair.corpus import documents
from demo_pair.tokenizer import VOCABULARY, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deltacompress.calibration.data import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(documents(0), 3000))


def test_vocabulary_and_special_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>"]) == [0, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 1)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<s>" not in text and "</s>" not in text))
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_each_digit_is_a_token_and_the_comma_between_numbers_one(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("471, 20") == ["4", "7", "1", ",Ġ", "2", "0"]


def test_saved_tokenizer_loads_and_encodes_alike(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    text = "even of [338, 227] -> [338]"
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)

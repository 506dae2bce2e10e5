"""A small byte-level BPE vocabulary for the demo, trained on the demo's own text.

Every digit is a token of its own, so that a model can look at the digits of a number; the comma between two numbers is
one token. All 256 bytes are in the vocabulary: any text can be encoded, also what the demo never generates.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 640
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
MAX_TOKENS = 512

_PIECES = r"\d|, (?=\d)| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a vocabulary of VOCABULARY entries on `texts`; `<s>` and `</s>` are ids 0 and 1, encoding adds neither."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=MAX_TOKENS
    )

"""From records to one stream of tokens: encoded as the model was trained, and joined; data.py cuts it into rows.

Rows are windows of one long stream, so a row may begin inside a record and hold several; every position is a real
token, no padding reaches the Hessians. Only as many records are tokenized as the rows need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from deltacompress.calibration.records import Record, RecordFormat, check_text
from deltacompress.errors import CalibrationError, first_line
from deltacompress.models.chat.rendering import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Text tokenized at once: enough to keep a Rust tokenizer busy, little beyond what the rows need.
_BATCH_CHARS = 1 << 17


def encode_records(
    records: Iterable[Record],
    record_format: RecordFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_record_tokens: int | None,
) -> Iterator[list[int]]:
    """Yield the token ids of each record, lazily and in order.

    text               bos + text + eos
    prompt+completion  bos + prompt + completion + eos, the two tokenized apart (no token spans the seam); a record
                       above `max_record_tokens` loses the left of its prompt, as it does in training and scoring
    messages           the chat template's output as it is, which brings its own special tokens

    bos and eos are left out where the tokenizer has none. A text or a conversation is never cut: only windows of it
    reach the model.

    Raises:
        CalibrationError: `messages` without a chat template, a conversation that the template rejects, or a tokenizer
            that fails.

    """
    for ids, _ in encode_marked(records, record_format, tokenizer, max_record_tokens=max_record_tokens):
        yield ids


def encode_marked(
    records: Iterable[Record],
    record_format: RecordFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_record_tokens: int | None,
) -> Iterator[tuple[list[int], int]]:
    """As `encode_records`, each with how many of its tokens come before what a model has to write.

    Of prompt and completion those up to the completion; of all others the first alone.
    """
    bos, eos = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    for pieces in _tokenize(records, record_format, tokenizer):
        if record_format == "messages":
            yield pieces[0], 1
        elif record_format == "text":
            yield bos + pieces[0] + eos, 1
        else:
            prompt, completion = pieces
            whole, given = bos + prompt + completion + eos, len(bos) + len(prompt)
            if max_record_tokens is not None and len(whole) > max_record_tokens:
                excess = len(whole) - max_record_tokens
                whole = (bos + prompt[excess:] + completion + eos)[:max_record_tokens]
                given -= min(excess, len(prompt))
            yield whole, given


def pack(encoded: Iterable[list[int]], needed: int) -> tuple[list[int], int]:
    """The first `needed` tokens of the joined records (fewer if they run out), and how many records they came from."""
    stream: list[int] = []
    records = 0
    for ids in encoded:
        stream += ids
        records += bool(ids)
        if len(stream) >= needed:
            break
    return stream[:needed], records


def _tokenize(
    records: Iterable[Record], record_format: RecordFormat, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[list[int]]]:
    """The ids of each record's pieces of text, tokenized in batches."""
    batch: list[tuple[str, ...]] = []
    chars = 0
    for record in records:
        pieces = _pieces(record, record_format, tokenizer)
        batch.append(pieces)
        chars += sum(map(len, pieces))
        if chars >= _BATCH_CHARS:
            yield from _tokenize_batch(batch, tokenizer)
            batch, chars = [], 0
    if batch:
        yield from _tokenize_batch(batch, tokenizer)


def _tokenize_batch(batch: list[tuple[str, ...]], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[list[int]]]:
    flat = [piece for pieces in batch for piece in pieces]
    # verbose=False: that a record is longer than the context is no news here, rows are cut to seq_len.
    try:
        encoding = tokenizer(flat, add_special_tokens=False, padding=False, truncation=False, verbose=False)
    except Exception as error:  # the Rust tokenizers raise bare Exception
        raise CalibrationError(
            f"the tokenizer fails on the calibration data: {first_line(error)}",
            where=tokenizer.name_or_path,
            way_out="save the one that the model was trained with there",
        ) from error
    ids = iter(encoding["input_ids"])
    for pieces in batch:
        yield [list(next(ids)) for _ in pieces]


def _pieces(record: Record, record_format: RecordFormat, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    if record_format == "text":
        return (record.fields["text"],)
    if record_format == "prompt+completion":
        return (record.fields["prompt"], record.fields["completion"])
    if tokenizer.chat_template is None:
        raise CalibrationError(
            "has `messages`, but the tokenizer has no chat template",
            where=record.where,
            way_out=(
                "pass data with `text` or `prompt` + `completion`, or add a chat template to the fine-tuned model"
            ),
        )
    try:
        text = render(tokenizer, record.fields["messages"], goes_on=False)
    except Exception as error:  # a template is a program from the checkpoint: it may raise anything
        raise CalibrationError(
            f"the chat template rejects it: {first_line(error)}", where=record.where, way_out="mend or remove it"
        ) from error
    check_text(text, f"{record.where}: the chat template's output")
    return (text,)

"""Records to judge by, each a sequence of its own, as a model is asked and evaluated: held back from calibration, or of
a file of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.calibration.data import check_counts, longest_record, positions_of
from deltacompress.calibration.packing import encode_marked
from deltacompress.calibration.records import Record, RecordSource
from deltacompress.calibration.sources import Calibration, name_of, open_source
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.errors import CalibrationError, option
from deltacompress.models.tokenizers import load_tokenizer

FEWEST = 8
"""Records below which nothing is judged by them."""


Records = list[tuple[list[int], int]]
"""Tokens of each, and how many of them come before what a model has to write; one at least."""


@dataclass(frozen=True, slots=True)
class Enough:
    """When records are enough: with so many tokens in all, and so many of them that a model has to write.

    Where answers are short that takes many records: at_most so many tokens, then.
    """

    tokens: int
    written: int
    at_most: int

    def of(self, records: Records) -> Records:
        """The first of them that are enough, or all."""
        tokens = written = 0
        for count, (ids, before) in enumerate(records):
            if self.reached(tokens, written):
                return records[:count]
            tokens, written = tokens + len(ids), written + len(ids) - before
        return records

    def reached(self, tokens: int, written: int) -> bool:
        """Whether so many are."""
        return tokens >= self.at_most or (tokens >= self.tokens and written >= self.written)


def held_back(
    finetuned: Checkpoint,
    source: Calibration,
    spec: CalibrationSpec,
    enough: Enough,
    *,
    judge: Calibration | None = None,
) -> Records:
    """As many records as are enough, or as there are: those of `judge`, or beyond those that `spec` calibrates on.

    Each is cut to `spec.seq_len` tokens, its end kept.

    Raises:
        CalibrationError: fewer than FEWEST records; `judge` is what is calibrated on; as load_calibration.
    """
    opened = open_source(source)
    if judge is not None:
        opened, calibration = open_source(judge, asked="judge"), opened
        if _is_of(opened, calibration):
            told = "is calibration data, by which nothing can be judged"
            where = f"{option('judge')} {name_of(judge)}"
            raise CalibrationError(told, where=where, way_out="give other records, or none")
    positions = positions_of(finetuned)
    check_counts(spec.samples, spec.seq_len, spec.seed, positions)
    tokenizer = load_tokenizer(finetuned.path)
    longest = longest_record(tokenizer, positions)  # as calibration cuts, so that its records are counted alike
    records = encode_marked(opened.shuffled(spec.seed), opened.format, tokenizer, max_record_tokens=longest)
    used, calibrated = 0, spec.samples * spec.seq_len if judge is None else 0
    found: Records = []
    last = deque[int](maxlen=FEWEST)
    tokens = written = 0
    for ids, given in records:
        if len(found) >= FEWEST and enough.reached(tokens, written):
            break
        if used >= calibrated and len(ids) > max(given, 1):
            cut = max(len(ids) - spec.seq_len, 0)
            found.append((ids[cut:], max(given - cut, 1)))
            tokens, written = tokens + len(ids) - cut, written + len(ids) - max(given, cut + 1)
        used += len(ids)
        last.append(len(ids))
    if len(found) < FEWEST and judge is not None:
        way_out = f"give at least {FEWEST}, of the kind that the model is asked"
        where = f"{option('judge')} {name_of(judge)}"
        raise CalibrationError(f"{len(found)} records to judge by", where=where, way_out=way_out)
    if len(found) < FEWEST:
        rows = (used - sum(last)) // spec.seq_len
        samples, seq_len = f"{option('samples')} {spec.samples}", f"{option('seq_len')} {spec.seq_len}"
        told = f"holds {used} tokens, {samples} x {seq_len} needs {calibrated}"
        way_out = f"use {option('samples')} {rows} or fewer, " if rows > 0 else ""
        way_out += f"give more data, or records of their own ({option('judge')})"
        raise CalibrationError(
            f"{told}, and {FEWEST} records more to judge by; there are {len(found)}",
            where=name_of(source),
            way_out=way_out,
        )
    return found


def _is_of(judge: RecordSource, source: RecordSource) -> bool:
    """Whether all records of the one are of the other, too: a copy of it, a part, or the same in another order."""
    known = {_spelled(record) for record in source.shuffled(0)}
    return all(_spelled(record) in known for record in judge.shuffled(0))


def _spelled(record: Record) -> bytes:
    fields = json.dumps(dict(record.fields), sort_keys=True, default=str)
    return hashlib.blake2b(fields.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class HeldBack:
    """One batch. ids: int64 [records, tokens], each filled up at its end, which no earlier token sees.

    written, given: bool, of each position whether what comes next is in the record, and is for a model to write or not.
    """

    ids: Tensor
    written: Tensor
    given: Tensor


def batched(records: Records, *, at_most: int) -> list[HeldBack]:
    """Batches of records, those of about one length together."""
    ordered = sorted(records, key=lambda one: len(one[0]))
    size = -(-len(ordered) // at_most)
    return [_batch(ordered[begin : begin + size]) for begin in range(0, len(ordered), size)]


def _batch(records: Sequence[tuple[list[int], int]]) -> HeldBack:
    shape = len(records), max(len(ids) for ids, _ in records)
    ids = torch.zeros(shape, dtype=torch.int64)
    written, given = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for row, (tokens, before) in enumerate(records):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        given[row, : before - 1] = True
        written[row, before - 1 : len(tokens) - 1] = True
    return HeldBack(ids, written, given)

"""Records that are held back from calibration, each a sequence of its own, as a model is asked and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltacompress.calibration.data import check_counts, longest_record, positions_of
from deltacompress.calibration.packing import encode_marked
from deltacompress.calibration.sources import Calibration, name_of, open_source
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.errors import CalibrationError, option
from deltacompress.models.tokenizers import load_tokenizer

FEWEST = 8
"""Records below which nothing is judged by them."""


Records = list[tuple[list[int], int]]
"""Tokens of each, and how many of them come before what a model has to write; one at least."""


def held_back(finetuned: Checkpoint, source: Calibration, spec: CalibrationSpec, *, tokens: int) -> Records:
    """Records beyond those that `spec` calibrates on, of so many tokens in all, or as many as there are.

    Each is cut to `spec.seq_len` tokens, its end kept.

    Raises:
        CalibrationError: fewer than FEWEST records are left; as load_calibration.
    """
    positions = positions_of(finetuned)
    check_counts(spec.samples, spec.seq_len, spec.seed, positions)
    opened = open_source(source, split="train")
    tokenizer = load_tokenizer(finetuned.path)
    longest = longest_record(tokenizer, positions)  # as calibration cuts, so that its records are counted alike
    records = encode_marked(opened.shuffled(spec.seed), opened.format, tokenizer, max_record_tokens=longest)
    used, left = 0, tokens
    found: Records = []
    for ids, given in records:
        if used >= spec.samples * spec.seq_len and len(ids) > max(given, 1):
            cut = max(len(ids) - spec.seq_len, 0)
            found.append((ids[cut:], max(given - cut, 1)))
            left -= len(found[-1][0])
        used += len(ids)
        if left <= 0:
            break
    if len(found) < FEWEST:
        told = f"{len(found)} records are left beyond the {spec.samples} x {spec.seq_len} tokens that are calibrated on"
        way_out = f"give more data, or use fewer {option('samples')}: some are held back, to judge by"
        raise CalibrationError(told, where=name_of(source), way_out=way_out)
    return found


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

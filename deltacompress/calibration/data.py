"""Calibration tokens: the one tensor that a compression run calibrates on, with all that is needed to name it again.

`load_calibration` is the way from a file or dataset id to [samples, seq_len] token ids; `sources` finds and shuffles
the records, `packing` joins them to one stream, which is cut into rows here. The same source, tokenizer, counts and
seed give the same ids, and `sha256` proves it: the artifact records it, and a resumed run compares it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltacompress.calibration.packing import encode_records, pack
from deltacompress.calibration.records import RecordFormat
from deltacompress.calibration.sources import Calibration, name_of, open_source
from deltacompress.codecs.recipe import MAX_SEED, CalibrationSpec
from deltacompress.errors import CalibrationError, option
from deltacompress.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deltacompress.checkpoints.reader import Checkpoint

# transformers writes "unknown" as 1e30; no context of a real model comes near this.
_SANE_LENGTH = 10**9


@dataclass(frozen=True, slots=True)
class CalibrationTokens:
    """What a model is calibrated on.

    ids      int64 [samples, seq_len], token ids, no padding
    source   file name or dataset id; no folder, so that the record does not depend on the machine
    sha256   `ids_sha256(ids)`
    records  number of records the tokens came from
    tokens   samples * seq_len
    seed     of the order of the records
    format   which fields were used
    """

    ids: torch.Tensor
    source: str
    sha256: str
    records: int
    tokens: int
    seed: int
    format: RecordFormat


def calibration_tokens(finetuned: Checkpoint, source: Calibration, spec: CalibrationSpec) -> CalibrationTokens:
    """The tokens that a checkpoint is calibrated on, with its own tokenizer; raises as load_calibration."""
    return load_calibration(
        source,
        load_tokenizer(finetuned.path),
        samples=spec.samples,
        seq_len=spec.seq_len,
        seed=spec.seed,
        max_positions=positions_of(finetuned),
    )


def positions_of(finetuned: Checkpoint) -> int | None:
    """The model's longest context in tokens, where its config says one."""
    limit = finetuned.config.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def load_calibration(
    source: Calibration,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    split: str = "train",
    max_positions: int | None = None,
) -> CalibrationTokens:
    """Read records, shuffle them by `seed`, join them (see `packing`) and cut `samples` rows of `seq_len` tokens.

    Args:
        source: a .jsonl, .json, .parquet or .txt file, or a `datasets` id (`id`, `id:config`, `id:config@revision`);
            or the records: texts, or mappings with the fields of such a file.
        tokenizer: of the fine-tuned model.
        samples: rows, at least 1.
        seq_len: tokens per row, at least 1.
        seed: 0 to 2**50.
        split: of a `datasets` id; a local file has only "train".
        max_positions: the model's longest context in tokens, where it has one.

    A `prompt` + `completion` record is cut to the smaller of the tokenizer's `model_max_length` and `max_positions`.

    Raises:
        CalibrationError: a count out of range; a source that is missing, empty, malformed or unreachable; fewer
            tokens than asked.

    """
    check_counts(samples, seq_len, seed, max_positions)
    opened = open_source(source, split=split)
    longest = longest_record(tokenizer, max_positions)
    encoded = encode_records(opened.shuffled(seed), opened.format, tokenizer, max_record_tokens=longest)
    needed = samples * seq_len
    stream, records = pack(encoded, needed)
    if len(stream) < needed:
        raise _too_few(len(stream), samples, seq_len, name_of(source))
    ids = torch.tensor(stream, dtype=torch.int64).reshape(samples, seq_len)
    return CalibrationTokens(ids, opened.name, ids_sha256(ids), records, needed, seed, opened.format)


def longest_record(tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> int | None:
    """Tokens that a `prompt` + `completion` record is cut to, None if it is not.

    Raises:
        CalibrationError: the tokenizer's own limit is no length.
    """
    longest = tokenizer.model_max_length
    if not _is_length(longest):
        raise CalibrationError(
            f"tokenizer_config.json says model_max_length {longest!r}, not a whole number above 0",
            where=tokenizer.name_or_path,
            way_out="mend it",
        )
    limits = [int(n) for n in (longest, max_positions) if n is not None and n < _SANE_LENGTH]
    return min(limits, default=None)


def check_counts(samples: int, seq_len: int, seed: int, max_positions: int | None) -> None:
    """Raise CalibrationError where a count is out of range, or a row longer than the model's context."""
    for name, value, least in (("samples", samples, 1), ("seq_len", seq_len, 1), ("seed", seed, 0)):
        if value < least:
            raise CalibrationError(f"must be at least {least}", where=f"{option(name)} {value}")
    if seed > MAX_SEED:
        raise CalibrationError(f"must be at most {MAX_SEED}", where=f"{option('seed')} {seed}")
    if max_positions is not None and max_positions < 1:
        raise CalibrationError(
            f"config.json says max_position_embeddings {max_positions}: the model can read nothing",
            way_out="mend the config",
        )
    if max_positions is not None and seq_len > max_positions:
        raise CalibrationError(
            f"the model has {max_positions} positions",
            where=f"{option('seq_len')} {seq_len}",
            way_out=f"use {option('seq_len')} {max_positions} or less",
        )


def _too_few(tokens: int, samples: int, seq_len: int, source: str) -> CalibrationError:
    """Of a source with fewer tokens than `samples` rows of `seq_len` take."""
    needed, rows, fewer = samples * seq_len, tokens // seq_len, option("samples")
    if rows:
        what = f"{fewer} {samples} x {option('seq_len')} {seq_len} needs {needed}"
        way_out = f"use {fewer} {rows} or fewer, a shorter {option('seq_len')}, or more data"
    else:
        what = f"less than one row of {option('seq_len')} {seq_len} ({needed} are needed for {fewer} {samples})"
        way_out = f"use a shorter {option('seq_len')} or more data"
    return CalibrationError(f"holds {tokens} tokens, {what}", where=source, way_out=way_out)


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and value >= 1 and (value >= _SANE_LENGTH or float(value).is_integer())


def ids_sha256(ids: torch.Tensor) -> str:
    """Hex SHA-256 of the shape, then the ids of an int64 [samples, seq_len] tensor, all as little-endian int64."""
    shape = np.asarray(ids.shape, dtype="<i8")
    return hashlib.sha256(shape.tobytes() + ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()

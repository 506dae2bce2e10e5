"""Calibration tokens: the one tensor that a compression run calibrates on, with all that is needed to name it again.

`load_calibration` is the way from a file or dataset id to [samples, seq_len] token ids; `sources` finds and shuffles
the records, `packing` turns them into rows. The same source, tokenizer, counts and seed give the same ids, and
`sha256` proves it: the artifact records it, and a resumed run compares it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltacompress.calibrate.packing import encode_records, pack
from deltacompress.calibrate.records import RecordFormat, first_line
from deltacompress.calibrate.sources import open_source
from deltacompress.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from deltacompress.checkpoint import Checkpoint
    from deltacompress.recipe import CalibrationSpec

# transformers writes "unknown" as 1e30; no context of a real model comes near this.
_SANE_LENGTH = 10**9

_MAX_SEED = 2**50
"""What the manifest can record: JSON numbers are exact up to 2^53 in every reader."""


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


def calibration_tokens(finetuned: Checkpoint, source: str | Path, spec: CalibrationSpec) -> CalibrationTokens:
    """The tokens that a checkpoint is calibrated on, with its own tokenizer; raises as load_calibration."""
    limit = finetuned.config.get("max_position_embeddings")
    return load_calibration(
        source,
        load_tokenizer(finetuned.path),
        samples=spec.samples,
        seq_len=spec.seq_len,
        seed=spec.seed,
        max_positions=limit if isinstance(limit, int) else None,
    )


def load_calibration(
    source: str | Path,
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
        source: a .jsonl, .json, .parquet or .txt file, or a `datasets` id (`id`, `id:config`, `id:config@revision`).
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
    for option, value, least in (("--samples", samples, 1), ("--seq-len", seq_len, 1), ("--seed", seed, 0)):
        if value < least:
            raise CalibrationError(f"{option} {value}: must be at least {least}")
    if seed > _MAX_SEED:
        raise CalibrationError(f"--seed {seed}: must be at most {_MAX_SEED}")
    if max_positions is not None and max_positions < 1:
        raise CalibrationError(
            f"config.json says max_position_embeddings {max_positions}: the model can read nothing; mend the config"
        )
    if max_positions is not None and seq_len > max_positions:
        raise CalibrationError(
            f"--seq-len {seq_len}: the model has {max_positions} positions; use --seq-len {max_positions} or less"
        )
    opened = open_source(str(source), split=split)
    longest = tokenizer.model_max_length
    if not _is_length(longest):
        raise CalibrationError(
            f"{tokenizer.name_or_path}: tokenizer_config.json says model_max_length {longest!r}, not a whole number "
            "above 0; mend it"
        )
    limits = [int(n) for n in (longest, max_positions) if n is not None and n < _SANE_LENGTH]
    encoded = encode_records(
        opened.shuffled(seed), opened.format, tokenizer, max_record_tokens=min(limits, default=None)
    )
    needed = samples * seq_len
    stream, records = pack(encoded, needed)
    if len(stream) < needed:
        raise CalibrationError(
            f"{source}: holds {len(stream)} tokens, --samples {samples} x --seq-len {seq_len} needs {needed}; "
            f"use --samples {len(stream) // seq_len} or fewer, a shorter --seq-len, or more data"
            if len(stream) >= seq_len
            else f"{source}: holds {len(stream)} tokens, less than one row of --seq-len {seq_len} "
            f"({needed} are needed for --samples {samples}); use a shorter --seq-len or more data"
        )
    ids = torch.tensor(stream, dtype=torch.int64).reshape(samples, seq_len)
    return CalibrationTokens(ids, opened.name, ids_sha256(ids), records, needed, seed, opened.format)


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and value >= 1 and (value >= _SANE_LENGTH or float(value).is_integer())


def ids_sha256(ids: torch.Tensor) -> str:
    """Hex SHA-256 of the shape, then the ids of an int64 [samples, seq_len] tensor, all as little-endian int64."""
    shape = np.asarray(ids.shape, dtype="<i8")
    return hashlib.sha256(shape.tobytes() + ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def load_tokenizer(checkpoint_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint directory, from local files only; code in the directory is never run.

    A lone tokenizer.json does not say which tokens are bos and eos; then config.json of the model does.

    Raises:
        CalibrationError: no directory, no tokenizer files in it, or files that transformers cannot load.

    """
    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        raise CalibrationError(f"{directory}: is not a directory; pass a checkpoint that holds its tokenizer")
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in known):
        raise CalibrationError(f"{directory}: holds no tokenizer (no tokenizer.json or tokenizer_config.json); add it")

    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    try:
        if (directory / "tokenizer_config.json").is_file() or not (directory / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
            _take_special_tokens(tokenizer, directory / "config.json")
    except CalibrationError:
        raise
    except Exception as error:  # the Rust tokenizers raise bare Exception
        raise CalibrationError(
            f"{directory}: the tokenizer cannot be loaded: {first_line(error)}; save it there again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CalibrationError(
            f"{directory}: holds a {type(tokenizer).__name__}, not a text tokenizer; save the model's there"
        )
    return tokenizer


def _take_special_tokens(tokenizer: PreTrainedTokenizerBase, config_file: Path) -> None:
    if not config_file.is_file():
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for role in ("bos", "eos"):
        token_id = config.get(f"{role}_token_id")
        if isinstance(token_id, list):  # several ends of text: the first is the model's own
            token_id = token_id[0]
        if token_id is not None:
            token = tokenizer.convert_ids_to_tokens(token_id)
            if token is None:
                raise CalibrationError(
                    f"{config_file}: {role}_token_id {token_id} is not in tokenizer.json; add tokenizer_config.json"
                )
            setattr(tokenizer, f"{role}_token", token)

"""What the jobs of one process share: a base opened, hashed and checked once, calibration tokens made once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

from deltacompress.calibration.data import CalibrationTokens, calibration_tokens
from deltacompress.calibration.sources import local_file
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.compression.job import CompressionJob
from deltacompress.models.tokenizers import FILES

_OF_THE_CONFIG = (
    *("model_type", "transformers_version", "tokenizer_class", "auto_map"),
    *("bos_token_id", "eos_token_id", "max_position_embeddings"),
)
"""What of config.json has a say in how text becomes rows of tokens (models/tokenizers, calibration/data)."""


class Inputs:
    """Checkpoints and tokens of earlier jobs, for the next one that asks for the same.

    Nothing else of a base can be shared: the method uses no activations of it. What is remembered is of files as they
    were: a base that changes meanwhile is refused when it is read (checkpoints/reader), another calibration file is
    other data.
    """

    def __init__(self, bases: Mapping[str, Checkpoint] | None = None) -> None:
        """bases: those that are open already, by what jobs call them."""
        self._bases = dict(bases or {})
        self._tokens: dict[str, CalibrationTokens] = {}

    def base(self, path: str) -> Checkpoint:
        """As Checkpoint.open, once for each path; what is hashed and found finite stays known."""
        if path not in self._bases:
            self._bases[path] = Checkpoint.open(path)
        found = self._bases[path]
        found.forget_ahead()
        return found

    def tokens(self, finetuned: Checkpoint, job: CompressionJob) -> CalibrationTokens:
        """The tokens that a job calibrates on, once for each data, tokenizer and spec; raises as calibration_tokens."""
        assert job.calibration is not None  # checked before anything was opened
        if not isinstance(job.calibration, str):
            return calibration_tokens(finetuned, job.calibration, job.calibration_spec)
        key = _key(finetuned, job, job.calibration)
        if key not in self._tokens:
            self._tokens[key] = calibration_tokens(finetuned, job.calibration, job.calibration_spec)
        return self._tokens[key]


def _key(finetuned: Checkpoint, job: CompressionJob, source: str) -> str:
    """Equal for two jobs only if their tokens are."""
    file = local_file(source)
    stat = None if file is None else os.stat(file)
    stamp = None if stat is None else (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    tokenizer = {name: sha256 for name, sha256 in finetuned.side_file_hashes().items() if name in FILES}
    config = {name: finetuned.config.get(name) for name in _OF_THE_CONFIG}
    parts = [source, stamp, job.calibration_spec.model_dump(), tokenizer, config]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

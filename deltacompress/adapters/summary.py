"""What a directory with an adapter says of itself, without its base: its config, and the tensors of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltacompress.adapters.adapter import digest_of, kind_of
from deltacompress.adapters.directory import read_config, weights_of
from deltacompress.adapters.settings import parse_settings
from deltacompress.checkpoints.header import read_header
from deltacompress.checkpoints.side_files import link_homes
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG
from deltacompress.errors import CheckpointError
from deltacompress.files.hashing import hash_file, sha256_hex
from deltacompress.files.regular import unreadable


def summarize(directory: Path) -> dict[str, Any]:
    """Plain data, a row per tensor too (what `inspect --json` prints).

    Raises:
        CheckpointError: as adapters.open_adapter, of what can be told without a base.
    """
    config, raw = read_config(directory)
    settings = parse_settings(config, str(directory / ADAPTER_CONFIG))
    weights, links = weights_of(directory), link_homes(directory)
    tensors = read_header(weights, links=links).tensors
    try:
        digest, size = hash_file(weights, links=links)
    except OSError as error:
        raise unreadable(CheckpointError, weights, error) from error
    return {
        "adapter": str(directory),
        "kind": kind_of(settings),
        "base": config.get("base_model_name_or_path"),
        "rank": settings.rank or None,
        "butterfly_factors": settings.factors or None,
        "target_modules": settings.targets if isinstance(settings.targets, str) else ", ".join(settings.targets),
        "digest": digest_of(sha256_hex(raw), digest),
        "bytes": size + len(raw),
        "parameters": sum(span.info.numel for span in tensors.values()),
        "tensors": [
            {"tensor": name, "dtype": span.info.dtype, "shape": list(span.info.shape), "bytes": span.info.nbytes}
            for name, span in tensors.items()
        ],
    }

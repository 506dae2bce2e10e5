"""The directory that PEFT's save_pretrained writes: which of its files are the adapter's, and its config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deltacompress.checkpoints.header import load_json_object
from deltacompress.checkpoints.side_files import (
    ADDED_TOKENS,
    MAX_USED_CONFIG_BYTES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    link_homes,
)
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deltacompress.errors import CheckpointError, InputError
from deltacompress.files.places import CONFIG, MANIFEST
from deltacompress.files.regular import read_bytes, unreadable

KEPT = (
    *(ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *(*VOCABULARY, "tokenizer.model", "chat_template.jinja"),
)
"""Names of the files that belong to an adapter."""
_AS_PEFT = "give a directory that PEFT's save_pretrained wrote"


def is_adapter(directory: Path) -> bool:
    """Whether a directory looks like a PEFT adapter, or half of one, and not like an artifact."""
    half = os.path.lexists(directory / ADAPTER_WEIGHTS) and not os.path.lexists(directory / CONFIG)
    return (half or os.path.lexists(directory / ADAPTER_CONFIG)) and not (directory / MANIFEST).exists()


def need_adapter(directory: Path, way_out: str) -> None:
    """Make sure that what is to go over a delta is an adapter.

    Raises:
        InputError: it is something else.
    """
    if not is_adapter(directory):
        raise InputError("no adapter, and nothing else goes over a delta", where=directory, way_out=way_out)


def read_config(directory: Path) -> tuple[dict[str, Any], bytes]:
    """The adapter's config and its bytes.

    Raises:
        CheckpointError: none, or one that cannot be read.
    """
    path = directory / ADAPTER_CONFIG
    try:
        raw = read_bytes(path, at_most=MAX_USED_CONFIG_BYTES, links=link_homes(directory))
    except FileNotFoundError as error:
        raise CheckpointError(f"no {ADAPTER_CONFIG}", where=directory, way_out=_AS_PEFT) from error
    except OSError as error:
        raise unreadable(CheckpointError, path, error) from error
    return load_json_object(raw, str(path)), raw


def claimed_base(directory: Path) -> tuple[str | None, str | None]:
    """(name, revision) of the base that the adapter's config gives.

    Raises:
        CheckpointError: as read_config.
    """
    config, _ = read_config(directory)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return name if isinstance(name, str) else None, revision if isinstance(revision, str) else None


def base_note(directory: Path, base: str) -> str | None:
    """What to tell of an adapter whose shapes fit the base of this name, and whose config does not name it; None: it
    does.

    Of names and paths the last part counts: who trained it had the base in another place.

    Raises:
        CheckpointError: as read_config.
    """
    claimed = claimed_base(directory)[0]
    if not claimed:
        return "its config does not say which base it is of; its shapes fit"
    if Path(claimed).name.lower() == Path(base).name.lower():
        return None
    return f"its config calls its base {claimed[:200]!a}, and this is {base!a}; its shapes fit"


def weights_of(directory: Path) -> Path:
    """The file with the adapter's matrices.

    Raises:
        CheckpointError: there is none, or a pickled one only.
    """
    if (directory / ADAPTER_WEIGHTS).is_file():
        return directory / ADAPTER_WEIGHTS
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for file in directory.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"only pickled weights ({pickled[0]}), which are never loaded",
            where=directory,
            way_out="save it again with safe_serialization=True",
        )
    if os.path.lexists(directory / ADAPTER_WEIGHTS):
        raise CheckpointError(
            "no regular file, or a link that leads nowhere",
            where=directory / ADAPTER_WEIGHTS,
            way_out="get the adapter again",
        )
    raise CheckpointError(f"no {ADAPTER_WEIGHTS}", where=directory, way_out=_AS_PEFT)


def own_files(directory: Path) -> list[Path]:
    """The files that belong to the adapter, by name."""
    return [path for name in sorted(KEPT) if (path := directory / name).exists() and not path.is_dir()]


def bytes_of(directory: Path) -> int:
    """Bytes of all files that belong to the adapter.

    Raises:
        CheckpointError: one cannot be read.
    """
    try:
        return sum(path.stat().st_size for path in own_files(directory))
    except OSError as error:
        raise unreadable(CheckpointError, directory, error) from error


def left_out(directory: Path) -> list[str]:
    """Files beside the adapter that are not its own (a trainer's state, its pickles)."""
    return sorted(file.name for file in directory.iterdir() if file.name not in KEPT)

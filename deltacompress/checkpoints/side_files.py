"""The files beside the weights that make a model of them, by name: config, tokenizer, chat template. Never code."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)
"""Patterns of their names; the only files that are copied into an artifact, and that an artifact may hold."""
MAX_SIDE_FILE_BYTES = 512 << 20
"""Of each; the largest tokenizers take some 40 MB."""
MAX_CONFIG_BYTES = 16 << 20
"""Of a config.json and its like, which is read whole."""


def link_homes(directory: Path) -> tuple[Path, ...]:
    """Where links in a model directory may lead if what they lead to is copied: for files.regular.open_regular.

    Into the directory itself; of a snapshot in the hub's cache, where all files are links, into the blobs beside it.
    Any other link would let a model's directory choose which of this machine's files is given to others.
    """
    home = directory.resolve()
    repository = home.parent.parent
    is_snapshot = home.parent.name == "snapshots" and repository.name.startswith("models--")
    return (home, repository / "blobs") if is_snapshot else (home,)


def is_side_file(name: str) -> bool:
    """Whether a file name is that of a config, tokenizer or chat-template file."""
    return any(fnmatchcase(name, pattern) for pattern in SIDE_FILES)

"""The files beside the weights that make a model of them, by name: config, tokenizer, chat template. Never code."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from deltacompress.files.places import CONFIG

GENERATION_CONFIG = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
VOCABULARY = ("vocab.json", "vocab.txt", "merges.txt")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
SIDE_FILES = (
    *(CONFIG, GENERATION_CONFIG, "tokenizer*.json", SPECIAL_TOKENS, ADDED_TOKENS, *VOCABULARY),
    *("*.model", "*.tiktoken", *CHAT_TEMPLATES),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)
"""Patterns of their names; the only files that are copied into an artifact, and that an artifact may hold."""
AS_THEY_ARE = (CONFIG, GENERATION_CONFIG)
"""What people and programs look into first: never stored as a zstd frame."""
FRAME = ".zst"
"""What a side file's name ends in besides, where it lies in an artifact as a zstd frame."""
TOKENIZER_FILES = (TOKENIZER, *VOCABULARY, ADDED_TOKENS, "*.model", "*.tiktoken")
"""Patterns of those that say which tokens a text becomes."""
MAX_SIDE_FILE_BYTES = 512 << 20
"""Of each; the largest tokenizers take some 40 MB."""
MAX_CONFIG_BYTES = 16 << 20
"""Of a config.json that is kept as it is, and read whole for the few fields that pairing compares."""
MAX_USED_CONFIG_BYTES = 4 << 20
"""Of a config or a map of tokens that a model is made of; the largest public ones (with labels, or per-module settings)
stay below 1 MB.
"""
MAX_CONFIG_DEPTH = 16
"""Of nested objects and lists in one: a sub-config of a sub-config, with rotary settings for each kind of layer."""


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
    return matches(name, SIDE_FILES)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file name is one of these, or fits a pattern among them."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)

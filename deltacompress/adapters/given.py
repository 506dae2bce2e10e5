"""Values of an adapter's config, checked for their type: whole numbers, switches, lists of names, patterns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltacompress.adapters.patterns import Pattern
from deltacompress.errors import CheckpointError

MAX_WHOLE = 1 << 20
"""Ranks, blocks and layers; tokens may be as many as 32 bits count."""


def whole(config: Mapping[str, Any], key: str, default: int, path: str) -> int:
    """A whole number from 0 to MAX_WHOLE; raises CheckpointError."""
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value <= MAX_WHOLE:
        raise CheckpointError(f"{key} must be a whole number from 0 to {MAX_WHOLE}, found {_brief(value)}", where=path)
    return value


def switch(config: Mapping[str, Any], key: str, path: str) -> bool:
    """true or false, which is also what null and nothing mean; raises CheckpointError."""
    value = config.get(key) or False
    if type(value) is not bool:
        raise CheckpointError(f"{key} must be true or false, found {_brief(value)}", where=path)
    return value


def texts(config: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    """A list of names, or none; raises CheckpointError."""
    value = config.get(key)
    if value is not None and not is_texts(value):
        raise CheckpointError(f"{key} must be a list of module names", where=path)
    return tuple(value or ())


def names(config: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    """A name or a list of such, all without a dot: PEFT takes them for expressions; raises CheckpointError."""
    value = config.get(key) or []
    value = [value] if isinstance(value, str) else value
    if not is_texts(value) or not all(one.replace("_", "a").isalnum() for one in value):
        raise CheckpointError(f"{key} must be names of lists of layers, found {_brief(value)}", where=path)
    return tuple(value)


def layers(config: Mapping[str, Any], key: str, path: str) -> tuple[int, ...] | None:
    """A number or a list of such; None where all are meant; raises CheckpointError."""
    value = config.get(key)
    value = [value] if type(value) is int else value
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= MAX_WHOLE for one in value):
        raise CheckpointError(f"{key} must be numbers of layers, found {_brief(value)}", where=path)
    return tuple(value)


def tokens(config: Mapping[str, Any], key: str, path: str) -> dict[str, tuple[int, ...]]:
    """Name of a module -> rows of it, none twice; "": the input embedding, which a mere list means.

    Raises:
        CheckpointError: something else.
    """
    value = config.get(key) or {}
    value = {"": value} if isinstance(value, list) else value
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} must be rows, or map module names to rows", where=path)
    for name, rows in value.items():
        if not isinstance(rows, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in rows):
            raise CheckpointError(f"{key} must list rows from 0 on, found {_brief(rows)}", where=path)
        if len(set(rows)) != len(rows) or not rows:
            raise CheckpointError(
                f"{key} must list rows of {ascii(name) if name else 'the embedding'}, each once", where=path
            )
    return {name: tuple(rows) for name, rows in value.items()}


def patterns(
    config: Mapping[str, Any], key: str, fits: Callable[[object], bool], called: str, path: str
) -> dict[str, Any]:
    """Patterns of module names -> values that fit; raises CheckpointError, also for a pattern that is not read here."""
    value = config.get(key) or {}
    if not isinstance(value, dict) or not all(fits(one) for one in value.values()):
        raise CheckpointError(f"{key} must map module names to {called}", where=path)
    for name in value:
        try:
            Pattern(name)
        except ValueError as error:
            raise CheckpointError(
                f"{key}: {error}", where=path, way_out="give each module a key of its own (its name)"
            ) from None
    return value


def is_number(value: object) -> bool:
    """Whether `value` is a number that scales anything (so no NaN, and no yes or no)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def is_share(value: object) -> bool:
    """Whether `value` is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def is_texts(value: object) -> bool:
    """Whether `value` is a list of texts, none of them empty."""
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _brief(value: object) -> str:
    return ascii(value)[:60]

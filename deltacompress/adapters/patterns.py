r"""Which modules a name of an adapter's config means, as PEFT 0.21 reads it. No expression out of a file is run.

rank_pattern and alpha_pattern: the first key that fits decides. A key is an expression to PEFT, which matches it after
any prefix that ends in a dot. Taken here are names (`q_proj`, `self_attn.q_proj`, where `.` fits any character, as it
does in an expression), names with escapes (`layers\.0\.self_attn`), and in front a `^` (the whole name) or `.*\.` (any
prefix that ends in a dot). All others are refused: one out of a file may take for ever to match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

_Value = TypeVar("_Value")
_ANY = ""
_MAX_KEY = 1024
_AFTER_A_DOT = r".*\."


class Pattern:
    """A key that PEFT takes for an expression.

    Raises:
        ValueError: it is one that is not understood here; the message quotes it.
    """

    def __init__(self, key: str) -> None:
        text, self._whole, self._dotted = key, False, False
        if text.startswith("^"):
            text, self._whole = text[1:], True
        elif text.startswith(_AFTER_A_DOT):
            text, self._dotted = text[len(_AFTER_A_DOT) :], True
        text = text.removesuffix("$") if not text.endswith("\\$") else text
        self._wanted: list[str] = []
        position = 0
        while position < len(text):
            one = text[position]
            if one == "\\" and position + 1 < len(text) and not text[position + 1].isalnum():
                position += 1
                one = text[position]
            elif one == ".":
                one = _ANY
            elif not (one.isalnum() or one in "_-/:"):
                one = "\\"  # what no name holds
            if one == "\\":
                break
            self._wanted.append(one)
            position += 1
        if position < len(text) or not text or len(key) > _MAX_KEY:
            raise ValueError(f"{key[:80]!a} is an expression, and none out of a file is run")

    @property
    def plain(self) -> bool:
        """Whether it is a name without a `^` or `.*` in front."""
        return not (self._whole or self._dotted)

    def fits(self, module: str, *, dotted: bool = False) -> bool:
        """Whether it means this module. dotted: only where something and a dot come before it."""
        begin = len(module) - len(self._wanted)
        if begin < 0 or (self._whole and begin) or ((self._dotted or dotted) and not begin):
            return False
        if begin and module[begin - 1] != ".":
            return False
        return all(one in (_ANY, two) for one, two in zip(self._wanted, module[begin:], strict=True))


@lru_cache(maxsize=4096)
def pattern_of(key: str) -> Pattern:
    """A key, read once however many modules it is held against; raises as Pattern."""
    return Pattern(key)


def of_module(patterns: Mapping[str, _Value], module: str, otherwise: _Value) -> _Value:
    """The value of the first key that means `module`; raises as Pattern."""
    return next((value for key, value in patterns.items() if pattern_of(key).fits(module)), otherwise)


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether one of these names is the module's, or its last parts."""
    return any(module == one or module.endswith("." + one) for one in names)


def is_plain(text: str) -> bool:
    """Whether an expression is a name: to PEFT it means the one module that is called so."""
    return len(text) < _MAX_KEY and re.fullmatch(r"[\w.-]+", text) is not None


def is_called(module: str, text: str) -> bool:
    """Whether that name is the module's, whole; text: as `is_plain` has it."""
    return pattern_of("^" + text).fits(module)


def layer_of(module: str, lists: Sequence[str]) -> int | None:
    """The number of the decoder layer that a module is in, as PEFT finds it for layers_to_transform.

    lists: names of the lists of layers (layers_pattern); none: the first number after two parts.
    """
    parts = module.split(".")
    for name in lists or ("",):
        for i in range(1 if name else 2, len(parts) - 1):
            if re.fullmatch(r"[0-9]{1,9}", parts[i]) and name in ("", parts[i - 1]):
                return int(parts[i])
    return None

"""Arguments of the wrong type, told as such at the door, in one line, before any work; sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from pydantic import ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from deltacompress.errors import InputError, option
from deltacompress.reporter import Reporter

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_WORDS = {
    "Count": "a whole number above 0",
    "Whole": "a whole number, 0 or more",
    "Share": "a number between 0 and 1",
    "Amount": "a number, 0 or more",
    "int": "a whole number",
    "bool": "True or False",
}
_SIZE = TypeAdapter(ByteSize)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hold the arguments of a public function against its annotations, strictly: `"10"` is no number.

    Raises:
        InputError: names the argument, what was given, and what it must be.
    """

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in signature(function).bind(*args, **kwargs).arguments.items():
            adapter = _adapters(function).get(name)
            if adapter is None:
                continue
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError as error:
                wanted = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), function.__annotations__[name])
                told = f"{value!r:.100} must be {wanted.replace(' | ', ' or ')}"
                raise InputError(told.replace("\n", " "), where=option(name)) from error
        return function(*args, **kwargs)

    return wrapped


def size_in_bytes(size: str | int, where: str, *, such_as: str, least: int = 1) -> int:
    """Bytes of a size as people write it, "1.2GB", or of one that is a number already.

    where: it is given, for the message. such_as: what is one there. least: bytes that it must be.

    Raises:
        InputError: it is none, or too little.
    """
    try:
        found = int(_SIZE.validate_python(size))  # a plain one, which can be sent
    except (ValidationError, OverflowError):  # beyond what a float holds
        found = -1
    if found < least:
        told = f"is {'too little' if found > 0 else 'no size'}"
        raise InputError(told, where=where, way_out=f"give one such as {such_as}")
    return found


@cache
def _adapters(function: Callable[..., object]) -> dict[str, TypeAdapter[Any]]:
    """One for each annotated parameter, but for reporters, which are any object of the right methods."""
    hints = get_type_hints(function, include_extras=True)
    known = signature(function).parameters
    config = ConfigDict(arbitrary_types_allowed=True)
    return {
        name: TypeAdapter(hint, config=None if _has_own(hint) else config)
        for name, hint in hints.items()
        if name in known and known[name].kind.name != "VAR_KEYWORD" and hint not in (Reporter, Reporter | None)
    }


def _has_own(hint: Any) -> bool:
    """Whether pydantic takes no other configuration for it: models."""
    return hasattr(hint, "model_config")

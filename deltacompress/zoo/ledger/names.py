"""Names: `namespace/name`, `namespace/name@7`, `namespace/name@prod`.

Lower case ASCII only, so that no two names meet on a file system that folds case or normalizes Unicode, and no name
can be a path, an option, a hidden file or a number of the format's own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from deltacompress.zoo.errors import InvalidNameError
from deltacompress.zoo.store.layout import LAST_NUMBER

MAX_PART = 96
MAX_TEXT = 1000
"""Characters of a name that others choose: of a model, a recipe, a commit."""
LATEST = "latest"
_PART = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*")
_VERSION = re.compile(r"[1-9][0-9]{0,7}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed name. At most one of version and alias is set; neither means the latest version."""

    name: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        selector = self.version if self.version is not None else self.alias
        return self.name if selector is None else f"{self.name}@{selector}"


def parse(text: str) -> Reference:
    """Parse `namespace/name`, with `@version` or `@alias` behind it or not.

    Raises:
        InvalidNameError: says which part breaks which rule.
    """
    if not text:
        raise InvalidNameError("an empty name", way_out="write it as namespace/name, e.g. team/support-bot")
    shown = ascii(text if len(text) <= 120 else text[:117] + "...")
    if not text.isascii():
        nfc = "" if unicodedata.is_normalized("NFC", text) else ", and not normalized (NFC)"
        raise InvalidNameError(f"not ASCII{nfc}; names use a-z, 0-9 and . _ - between them", where=shown)
    path, at, selector = text.partition("@")
    parts = path.split("/")
    if len(parts) != 2:
        raise InvalidNameError("write it as namespace/name, with exactly one slash, e.g. team/support-bot", where=shown)
    for what, part in zip(("namespace", "name"), parts, strict=True):
        _check(part, what, shown)
    if not at:
        return Reference(path)
    if "@" in selector:
        raise InvalidNameError("more than one @", where=shown)
    if selector == LATEST:
        return Reference(path)
    if selector.isdecimal():
        if not _VERSION.fullmatch(selector):
            raise InvalidNameError(f"{selector[:20]} is no version; versions are 1 to {LAST_NUMBER}", where=shown)
        return Reference(path, version=int(selector))
    _check(selector, "alias", shown)
    return Reference(path, alias=selector)


def parse_name(text: str) -> str:
    """Parse a name that may carry neither version nor alias.

    Raises:
        InvalidNameError: as parse, or there is an @.
    """
    reference = parse(text)
    if "@" in text:
        raise InvalidNameError(
            "a new version gets its number from the zoo", where=f"{text!a}", way_out="leave out @..."
        )
    return reference.name


def parse_alias(text: str) -> str:
    """Check the name of an alias.

    Raises:
        InvalidNameError: a number, the reserved word `latest`, or it breaks the grammar.
    """
    shown = ascii(text if len(text) <= 120 else text[:117] + "...")
    if text == LATEST:
        raise InvalidNameError(f"{shown} always means the newest version", way_out="choose another alias")
    if text.isdecimal():
        raise InvalidNameError("a number would be taken for a version", where=shown, way_out="choose another alias")
    _check(text, "alias", shown)
    return text


def check_texts(texts: Mapping[str, object], where: str) -> None:
    """Refuse texts of others (names of models, hub ids, recipes) that no reader could see as they are.

    texts: what each is -> the text; what is no text passes. `where` begins the message.

    Raises:
        InvalidNameError: too long, or with characters that cannot be printed: those that move the cursor, hide, or turn
            the direction of what follows.
    """
    for what, text in texts.items():
        if not isinstance(text, str):
            continue
        if len(text) > MAX_TEXT:
            raise InvalidNameError(
                f"{what}: {len(text)} characters, at most {MAX_TEXT} fit", where=where, way_out="shorten it"
            )
        if not text.isprintable():
            raise InvalidNameError(
                f"{what} {text[:80]!a} holds characters that cannot be printed",
                where=where,
                way_out="give it a plain name",
            )


def _check(part: str, what: str, shown: str) -> None:
    if not part:
        raise InvalidNameError(f"the {what} is empty", where=shown)
    if len(part) > MAX_PART:
        raise InvalidNameError(f"the {what} is longer than {MAX_PART} characters", where=shown)
    if _PART.fullmatch(part):
        return
    if part != part.lower() and _PART.fullmatch(part.lower()):
        raise InvalidNameError(f"the {what} has capitals", where=shown, way_out=f"write {part.lower()}")
    raise InvalidNameError(
        f"{part[:40]!a} is no {what}",
        where=shown,
        way_out="use a-z and 0-9, with . _ - between them but not at either end",
    )

"""Keys of a server: read from files that are nobody else's, and compared in constant time."""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deltacompress.errors import InputError
from deltacompress.files.regular import ANYWHERE, open_regular

_MOST_BYTES = 4096
_MOST_BYTES_OF_KEYS = 1 << 20
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key that no repr and no log shows; name: whose it is, which they do."""

    _secret: bytes = field(repr=False)
    name: str = ""

    def fits(self, given: bytes) -> bool:
        """Whether that is the key; takes as long whatever is given."""
        return hmac.compare_digest(self._secret, given)


def owner(keys: Iterable[Key], given: bytes) -> str | None:
    """The name of the key that fits, None if none does; takes as long whichever it is."""
    fitting = [one.name for one in keys if one.fits(given)]
    return fitting[0] if fitting else None


def read_keys(option: str, path: Path) -> tuple[Key, ...]:
    """The keys in a file: one a line, perhaps after a name and a space; without one it is called after its line.

    Raises:
        InputError: as read_key, and a name or a key is there twice.
    """
    where, found = f"{option} {path}", list[Key]()
    for number, line in enumerate(_read(where, path, _MOST_BYTES_OF_KEYS).split(b"\n"), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) > 2 or (len(words) == 2 and not _NAME.fullmatch(words[0])):
            told = "is neither a key nor a name and a key"
            way_out = "a name has letters, digits, '.', '_' and '-', 64 at most"
            raise InputError(told, where=f"{where}, line {number}", way_out=way_out)
        name = words[0].decode() if len(words) == 2 else f"line-{number}"
        if any(one.fits(words[-1]) or one.name == name for one in found):
            told = "its key or its name is there already"
            raise InputError(told, where=f"{where}, line {number}", way_out="give each a name and a key of its own")
        found.append(Key(_checked(words[-1], where), name))
    if not found:
        raise InputError("is empty", where=where, way_out="write the key into it")
    return tuple(found)


def read_key(option: str, path: Path) -> Key:
    """The key in a file: its one line.

    Raises:
        InputError: no such file, others may read it, it is empty or no key.
    """
    where = f"{option} {path}"
    secret = _read(where, path, _MOST_BYTES).strip()
    if not secret:
        raise InputError("is empty", where=where, way_out="write the key into it")
    return Key(_checked(secret, where))


def _read(where: str, path: Path, most: int) -> bytes:
    try:
        with open_regular(path, links=ANYWHERE) as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(most + 1)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where, way_out="give a file that holds the key") from error
    if mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        raise InputError("others may read or change it", where=where, way_out=f"chmod 600 {path}")
    if len(raw) > most:
        told = f"has more than the {most} bytes that it may have at most"
        raise InputError(told, where=where, way_out="give a file of keys alone")
    return raw


def _checked(secret: bytes, where: str) -> bytes:
    if any(not 0x21 <= byte <= 0x7E for byte in secret):
        raise InputError(
            "a key is one line of printable ASCII without spaces",
            where=where,
            way_out="such as `openssl rand -hex 32` prints",
        )
    return secret

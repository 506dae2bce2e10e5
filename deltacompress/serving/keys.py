"""Keys of a server: read from a file that is nobody else's, and compared in constant time."""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from deltacompress.errors import InputError
from deltacompress.files.regular import ANYWHERE, open_regular

_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Key:
    """A key that no repr and no log shows."""

    _secret: bytes = field(repr=False)

    def fits(self, given: bytes) -> bool:
        """Whether that is the key; takes as long whatever is given."""
        return hmac.compare_digest(self._secret, given)


def read_key(option: str, path: Path) -> Key:
    """The key in a file: its one line.

    Raises:
        InputError: no such file, others may read it, it is empty or no key.
    """
    where = f"{option} {path}"
    try:
        with open_regular(path, links=ANYWHERE) as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where, way_out="give a file that holds the key") from error
    if mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        raise InputError("others may read or change it", where=where, way_out=f"chmod 600 {path}")
    secret = raw.strip()
    if not secret:
        raise InputError("is empty", where=where, way_out="write the key into it")
    if len(raw) > _MOST_BYTES or any(not 0x21 <= byte <= 0x7E for byte in secret):
        raise InputError(
            f"a key is one line of printable ASCII without spaces, at most {_MOST_BYTES} bytes",
            where=where,
            way_out="such as `openssl rand -hex 32` prints",
        )
    return Key(secret)

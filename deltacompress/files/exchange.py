"""Putting a finished directory in the place of another one, so that at every moment one of the two stands there."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from deltacompress.files.output import sync

_AT_FDCWD = -100
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux, and RENAME_SWAP of macOS: the same number."""


def put_in_place(ready: Path, out: Path) -> None:
    """Give the synced directory `ready` the name `out`, durably, and then remove the directory that has it.

    Both lie in one file system. Where the system can exchange two names, nobody ever finds nothing at `out`; elsewhere
    it is gone for a moment, and if the process is killed in it, `put_back` finds it again.

    Raises:
        OSError: it cannot be done; then, as after any other exception, `out` and `ready` are what they were.
    """
    token = secrets.token_hex(4)
    exchanged = _exchange(ready, out)
    old = ready if exchanged else out.with_name(f".{out.name}.old-{token}")
    try:
        if not exchanged:
            os.rename(out, old)
            os.rename(ready, out)
        for folder in {out.parent, ready.parent}:
            sync(folder)
    except BaseException:
        if exchanged:
            _exchange(ready, out)
        elif old.exists():
            if out.exists():
                os.rename(out, ready)
            os.rename(old, out)
        raise
    with suppress(OSError):  # what is wanted is done; this only makes room
        gone = ready.with_name(f"{ready.name}.old-{token}")
        os.rename(old, gone)
        shutil.rmtree(gone)


def put_back(out: Path) -> None:
    """If nothing stands at `out`, and a killed `put_in_place` has set aside what stood there: give it its name again.

    Raises:
        OSError: it cannot be renamed.
    """
    if os.path.lexists(out) or not out.parent.is_dir():
        return
    aside = re.compile(re.escape(f".{out.name}.old-") + "[0-9a-f]{8}")
    for old in out.parent.iterdir():
        if aside.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            os.rename(old, out)
            return


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, ctypes.c_uint(_EXCHANGE))
    elif hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE))
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))

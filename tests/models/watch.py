"""Which files a block of code opens, and what else it does that data must not make it do.

Two watchers, since neither sees everything: audit events, which Python raises for what goes through it, and inotify,
by which the kernel tells of every file that is opened in a folder, by a Rust library too.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

IN_OPEN, IN_NONBLOCK, IS_DIRECTORY = 0x20, 0o4000, 0x40000000
DEEDS = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "pickle.find_class")
"""Audit events of the network, of other programs, and of a pickle that looks for what to call."""
# The interpreter's own files, and the ways to ask the system about itself.
OWN = (
    "/proc/",
    "/sys/",
    "/dev/",
    "/etc/",
    "/usr/",
    "/lib",
    *(f"{Path(one).resolve()}/" for one in {sys.prefix, sys.base_prefix}),
)

_listening: list[list[tuple[str, str]]] = []
"""What is heard, for the block that listens now; empty while none does."""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listening:
        return
    if event == "open" and isinstance(arguments[0], str | bytes):
        _listening[-1].append((event, os.fsdecode(arguments[0])))
    elif event in DEEDS:
        _listening[-1].append((event, repr(arguments)[:200]))


sys.addaudithook(_hear)  # for good: a hook cannot be taken away


class _Kernel:
    """One inotify instance for all blocks, since to close one takes the kernel ten milliseconds."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(IN_NONBLOCK)
        self._folders: dict[int, Path] = {}

    def begin(self, folders: Iterable[Path]) -> None:
        """Watch these folders, and forget what was told so far."""
        for folder in folders:
            self._folders[self._libc.inotify_add_watch(self._file, os.fsencode(folder), IN_OPEN)] = folder
        self._read()

    def opened(self) -> Iterator[tuple[Path, str]]:
        """(folder, file) of what was opened since: fixed-size events, each with a name that is padded with zeros."""
        raw, at = self._read(), 0
        while at < len(raw):
            number, mask, _, length = struct.unpack_from("iIII", raw, at)
            name = raw[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            at += 16 + length
            if name and not mask & IS_DIRECTORY:
                yield self._folders[number], name

    def _read(self) -> bytes:
        raw = b""
        try:
            while more := os.read(self._file, 1 << 16):
                raw += more
        except BlockingIOError:
            pass
        return raw


_kernel = _Kernel() if sys.platform == "linux" else None


class Watch:
    """Watches from `with` on: `opened` in the folders, by folder; `elsewhere` and `deeds` as Python tells of them."""

    def __init__(self, *folders: Path, ours: Iterable[Path] = ()) -> None:
        self.folders = folders
        self._ours = (*OWN, tempfile.gettempdir() + "/deltacompress-", *(f"{one}/" for one in folders), *map(str, ours))
        self.opened: dict[Path, set[str]] = {folder: set() for folder in folders}
        self.elsewhere: set[str] = set()
        self.deeds: list[tuple[str, str]] = []

    def __enter__(self) -> Watch:
        if _kernel is not None:
            _kernel.begin(self.folders)
        _listening.append([])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for event, told in _listening.pop():
            if event != "open":
                self.deeds.append((event, told))
                continue
            path = Path(os.path.abspath(told))
            if path.parent in self.opened:
                self.opened[path.parent].add(path.name)
            elif not str(path).startswith(self._ours):
                self.elsewhere.add(str(path))
        for folder, name in _kernel.opened() if _kernel is not None else ():
            if folder in self.opened:
                self.opened[folder].add(name)

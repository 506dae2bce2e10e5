"""Answers kept while an evaluation runs, so that an interrupted one goes on where it stopped.

One JSON Lines file per model; its name is a hash of all that can change an answer (weights, dtype, backend, versions),
so that answers of another model can never be taken for this one's. A line ends with a hash of what it says: one that is
not whole (a kill, damage) is dropped, with all after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deltacompress.files.output import output_errors


class AnswerStore:
    """Answers of one model by key, in memory and on disk; close it when done."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / _file_name(identity)
        self._answers: dict[str, Any] = {}
        whole = 0
        with output_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                raw = self.path.read_bytes()
                for line in raw.splitlines(keepends=True):
                    if (item := _item(line)) is None:
                        break
                    self._answers[item[0]] = item[1]
                    whole += len(line)
            self._file = self.path.open("ab")
            self._file.truncate(whole)
        self.resumed = len(self._answers)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def add(self, answers: Iterable[tuple[str, Any]]) -> None:
        """Keep answers (plain data), durably enough for a killed process."""
        new = dict(answers)
        self._answers |= new
        with output_errors(self.path):
            self._file.write(b"".join(_line(key, answer) for key, answer in new.items()))
            self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class AnswerStores:
    """The stores of one evaluation, one per identity: two names of the same model share their answers.

    A context manager: leaving it closes the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stores: dict[str, AnswerStore] = {}

    def open(self, identity: Mapping[str, Any]) -> AnswerStore:
        """The store of a model, opened once; raises OutputError."""
        name = _file_name(identity)
        if name not in self._stores:
            self._stores[name] = AnswerStore(self._folder, identity)
        return self._stores[name]

    def remove(self) -> None:
        """Remove the files when the report that they led to is written; those of other settings stay."""
        with output_errors(self._folder):
            for store in self._stores.values():
                store.close()
                store.path.unlink(missing_ok=True)
            if self._folder.is_dir() and not any(self._folder.iterdir()):
                self._folder.rmdir()

    def __enter__(self) -> AnswerStores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores.values():
            store.close()


def _line(key: str, answer: Any) -> bytes:
    check = hashlib.sha256(json.dumps([key, answer]).encode()).hexdigest()[:16]
    return json.dumps([key, answer, check]).encode() + b"\n"


def _item(line: bytes) -> tuple[str, Any] | None:
    """The key and the answer of a line, None if it is not whole."""
    try:
        key, answer, _ = json.loads(line)
        return (key, answer) if isinstance(key, str) and line == _line(key, answer) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _file_name(identity: Mapping[str, Any]) -> str:
    return f"{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]}.jsonl"


def key_of(kind: str, *parts: Any) -> str:
    """The key of a question: what was asked, as token ids."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()[:32]

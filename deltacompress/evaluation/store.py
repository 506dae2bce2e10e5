"""Answers kept while an evaluation runs, so that an interrupted one goes on where it stopped.

One JSON Lines file per model; its name is a hash of all that can change an answer (weights, dtype, backend, versions),
so that answers of another model can never be taken for this one's. A line cut short by a kill is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deltacompress.checkpoint_writer import output_errors


class AnswerStore:
    """Answers of one model by key, in memory and on disk; close it when done."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
        self.path = folder / f"{name}.jsonl"
        self._answers: dict[str, Any] = {}
        whole = 0
        with output_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                raw = self.path.read_bytes()
                whole = raw.rfind(b"\n") + 1
                for line in raw[:whole].splitlines():
                    key, answer = json.loads(line)
                    self._answers[key] = answer
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
            self._file.write(b"".join(json.dumps(item).encode() + b"\n" for item in new.items()))
            self._file.flush()

    def close(self, *, remove: bool) -> None:
        """Let go of the file; remove it when the report that it led to is written."""
        self._file.close()
        if remove:
            os.unlink(self.path)

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def key_of(kind: str, *parts: Any) -> str:
    """The key of a question: what was asked, as token ids."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()[:32]

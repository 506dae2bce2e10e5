"""A little of the fuzzer in every run of the tests; `python -m tests.models.fuzz` does much of it."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of opened files on Linux only")


def test_spoiled_models_open_nothing_and_end_in_one_line(tmp_path: Path) -> None:
    from models.fuzz import fuzz
    from models.fuzz_verbs import VERBS

    found = fuzz(60, 0, list(VERBS), ["llama"], tmp_path)
    assert found.faults == []
    assert found.outcomes.total() == 60
    assert {what.split(":")[0] for what in found.outcomes} == set(VERBS)
    assert sum(count for what, count in found.outcomes.items() if "accepted" in what) > 10
    assert found.memory < 256 << 20


def test_the_fuzzer_sees_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of fault, planted."""
    import socket

    from models import fuzz_verbs
    from models.fuzz import Findings, one
    from models.fuzz_verbs import Models, Verb

    at = Models(*(tmp_path / name for name in ("base", "finetuned", "delta", "data", "scratch")))
    for folder in (at.base, at.finetuned, at.delta):
        folder.mkdir()
        (folder / fuzz_verbs.DECOYS[0]).touch()
    (tmp_path / "elsewhere").touch()
    held: list[bytearray] = []

    def fail(_: Models) -> None:
        raise KeyError("x")

    def connect(_: Models) -> None:
        with socket.socket() as one_, suppress(OSError):
            one_.connect(("127.0.0.1", 9))

    deeds = {
        "KeyError": fail,
        "opened base/other.safetensors": lambda at: (at.base / fuzz_verbs.DECOYS[0]).read_bytes(),
        f"opened {tmp_path / 'elsewhere'}": lambda _: (tmp_path / "elsewhere").read_bytes(),
        "socket.connect": connect,
        " MiB": lambda _: held.append(bytearray(random.Random(0).randbytes(1) * (300 << 20))),
    }
    for told, deed in deeds.items():
        found = Findings()
        one(found, "verb", Verb(deed, "base"), at, "input")
        assert len(found.faults) == 1, (told, found.faults)
        assert told in found.faults[0]
    held.clear()

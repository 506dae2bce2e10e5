"""What the tests of the command line share: how a verb is run, and what its outcome must look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
Result = tuple[int, str, str]
"""Exit code, stdout, stderr."""
Run = Callable[..., Result]
"""run(verb, ...) of `deltacompress zoo`."""


def data(result: Result) -> Any:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def failed(result: Result, code: int, *words: str) -> None:
    """Exit code, nothing on stdout, one line on stderr that says all of this (under notes of progress)."""
    assert result[0] == code, result
    assert not result[1]
    lines = [line for line in result[2].splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result[2]
    assert result[2].splitlines()[-1] == lines[0]
    for word in words:
        assert word in lines[0]

"""`--tp` of verbs: the same text, and one line at the start of what cannot be."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from ranked import forked
from runtime.test_cli import run
from runtime_cases import Served

from deltacompress.runtime import Runtime


def test_generate(served: Callable[..., Served]) -> None:
    one, other = served("llama", "int4-24"), served("llama", "lossless", 1)
    asked = ("generate", one.artifact, "w1 w2", "--base", one.pair.base, "--max-new-tokens", 5, "--device", "cpu")
    found = []
    with forked() as started:
        for tp in (1, 2):
            code, out, err = run(*asked, "--also", f"o={other.artifact}", "--json", "--tp", tp)
            assert code == 0, err
            assert (", over 2 devices" in err) == (tp == 2)
            found.append(json.loads(out))
        assert len(started) == 1
        gc.collect()  # which a command leaves to the end of its process
        assert started[0].wait() is not None
    assert found[0]["answers"] == found[1]["answers"]
    assert found[1]["residency"]["device_bytes"] < 0.6 * found[0]["residency"]["device_bytes"]


def test_chat(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers; Ctrl-C amid one ends it, since the ranks are out of step then."""
    one = served("llama", "int4-24")
    asked = ("chat", one.artifact, "--base", one.pair.base, "--max-new-tokens", 5, "--device", "cpu")
    with forked() as started:
        (_, alone, _), (code, out, err) = (run(*asked, "--tp", tp, typed="w1\nw2 w3\n") for tp in (1, 2))
        assert (code, out) == (0, alone), err
        assert out.strip()
        assert ", over 2 devices" in err
        assert len(started) == 1
        monkeypatch.setattr(Runtime, "complete", Mock(side_effect=KeyboardInterrupt))
        code, out, err = run(*asked, "--tp", 2, typed="w1\nw2\n")
        assert (code, out, "stopped; Ctrl-C" in err) == (2, "", False)


@pytest.mark.parametrize(
    ("tp", "told"),
    [
        (3, "--tp 3: 4 heads, 2 key-value heads and an MLP of 48 do not divide by it; give one of 1, 2, 4"),
        (8, "--tp 8: 4 heads, 2 key-value heads and an MLP of 48 do not divide by it; give one of 1, 2, 4"),
    ],
)
def test_numbers_that_do_not_divide(served: Callable[..., Served], tp: int, told: str) -> None:
    one = served("llama", "int4-24")
    asked = ("generate", one.artifact, "w1 w2", "--base", one.pair.base, "--device", "cpu", "--tp", tp)
    with forked() as started:
        code, _, err = run(*asked)
    assert code == 2
    assert err.strip().splitlines()[-1].endswith(told)
    assert not started

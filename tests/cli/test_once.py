"""An option that takes one value is given once; what adds up, and flags, may come again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from deltacompress.cli.main import app, main
from deltacompress.errors import InputError


def verbs(command: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in command.commands.items():
        yield from verbs(one, *above, name) if hasattr(one, "commands") else [((*above, name), one)]


def test_a_second_value_is_refused_whatever_the_verb() -> None:
    seen = set()
    for verb, command in verbs(typer.main.get_command(app)):
        for one in command.params:
            if one.param_type_name == "argument" or one.is_flag or one.multiple:
                continue
            name = one.opts[0]
            with pytest.raises(InputError, match=f"^{name}: is given twice; "):
                command.make_context(" ".join(verb), [name, "1", f"{name}=2"])
            seen.add((*verb, name))
    assert len(seen) > 200
    assert {("bench", "serve", "--trace"), ("eval", "--tasks"), ("zoo", "list", "--kind")} <= seen


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "a", "--base", "b", "--out", "c", "--tasks", "x", "--tasks", "y"],
        ["compare", "a", "b", "--tasks", "x", "--calibration", "d", "--out", "c", "--methods", "x", "--methods", "y"],
        ["compress", "a", "b", "--devices", "0", "--devices", "1"],
        ["bench", "adapters", "--only", "boft", "--only", "mixed"],
        ["bench", "adapter-requests", "--adapters", "2", "--adapters", "4"],
        ["bench", "tuning", "a", "b", "--tasks", "t", "--out", "c", "--methods", "full", "--methods", "delta"],
        ["bench", "frontier", "a", "b", "--out", "c", "--ratios", "4", "--ratios", "8"],
    ],
)
def test_a_list_is_separated_by_commas(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"error: {argv[-2]}: is given twice; separate the values with commas\n"


def test_more_than_twice_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "a", *["--base", "b"] * 3, "--out", "c", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"] == {
        "type": "InputError",
        "where": "--base",
        "what": "is given 3 times",
        "way_out": "give it once",
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "/no/such/place", "w", "--base", "/no/such/base", "--stop", "a", "--stop", "b"],
        ["generate", "/no/such/place", "w", "--base", "/no/such/base", "--bos", "--no-bos"],
        ["inspect", "/no/such/place", "--entropy", "--entropy", "--json", "--json"],
        ["inspect", "/no/such/place", "--", "--zoo"],
        ["inspect", "/no/such/place", "--nonsense", "--nonsense"],
    ],
)
def test_what_adds_up_and_flags_may_come_again(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "is given" not in capsys.readouterr().err


def test_a_help_that_is_asked_for_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "--base", "a", "--base", "b", "--help"]) == 0
    assert "Usage: deltacompress restore" in capsys.readouterr().out

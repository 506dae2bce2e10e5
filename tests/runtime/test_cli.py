"""`generate` and `chat`: text on stdout, how it was made on stderr, JSON when asked."""

from __future__ import annotations

import json

import pytest
import typer
from runtime_cases import Served
from typer.testing import CliRunner

from deltacompress.cli.generate import chat, generate
from deltacompress.runtime import Runtime

app = typer.Typer()
app.command()(generate)
app.command()(chat)


def run(*arguments: object, typed: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], input=typed)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def options(trio: dict[str, Served]) -> list[object]:
    return ["--base", trio["a"].pair.base, "--max-new-tokens", 5, "--device", "cpu"]


def test_generate_prints_the_text(trio: dict[str, Served], runtime: Runtime, options: list[object]) -> None:
    code, out, err = run("generate", trio["a"].artifact, "w1 w2", *options)
    assert code == 0
    assert out == runtime.generate([("a", "w1 w2")], 5)[0] + "\n"
    assert "cpu, float32, backend reference" in err
    assert "tokens/s, ended by" in err
    code, out, err = run("generate", trio["a"].artifact, "w1 w2", *options, "--quiet")
    assert (code, err) == (0, "")


def test_generate_as_json(trio: dict[str, Served], runtime: Runtime, options: list[object]) -> None:
    code, out, _ = run("generate", trio["a"].artifact, "w1 w2", *options, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["text"] == runtime.generate([("a", "w1 w2")], 5)[0]
    assert (data["backend"], data["dtype"], data["merge_rounding"]) == ("reference", "float32", True)
    assert data["tokens_per_second"] > 0


def test_chat_answers_line_by_line(trio: dict[str, Served], runtime: Runtime, options: list[object]) -> None:
    code, out, _ = run("chat", trio["b"].artifact, *options, typed="w1\nw2 w3\n\nnever read\n")
    assert code == 0
    assert out.splitlines() == runtime.generate([("b", "w1"), ("b", "w2 w3")], 5)


def test_errors_are_one_line(trio: dict[str, Served], options: list[object]) -> None:
    code, out, err = run("generate", trio["a"].artifact, "w1 " * 70, *options)
    assert (code, out) == (2, "")
    assert "has 70 tokens, the context of variant delta is 64; shorten the prompt" in err
    code, _, err = run("generate", trio["a"].artifact, "w1", "--base", trio["a"].pair.finetuned)
    assert code == 3
    assert "not the base of this delta" in err

"""`generate` and `chat`: text on stdout, how it was made on stderr, JSON when asked."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import typer
from runtime_cases import Served
from typer.testing import CliRunner

from deltacompress.cli import interrupts
from deltacompress.cli.verbs import generate as generation
from deltacompress.cli.verbs.generate import chat, generate
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
    [variant] = data["residency"]["variants"]
    assert (variant["name"], variant["place"], variant["loads"]) == ("delta", "device", 1)
    assert data["residency"]["device_bytes"] == variant["nbytes"] == runtime.variants["a"].nbytes


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


def test_a_prompt_from_the_input(trio: dict[str, Served], runtime: Runtime, options: list[object]) -> None:
    code, out, _ = run("generate", trio["a"].artifact, "-", *options, typed="w1 w2\n")
    assert (code, out) == (0, runtime.generate([("a", "w1 w2")], 5)[0] + "\n")
    done = CliRunner().invoke(
        app, [str(one) for one in ("generate", trio["a"].artifact, "-", *options)], input=b"w1 \xff"
    )
    assert done.exit_code == 2
    assert "standard input: byte 3 is not UTF-8" in done.stderr
    code, _, err = run("generate", trio["a"].artifact, "-", *options, typed="")
    assert code == 2
    assert err == "error: standard input is empty, and so is the prompt; write some text to it, or add --bos\n"


def test_ctrl_c_ends_an_answer_and_not_the_chat(
    trio: dict[str, Served], runtime: Runtime, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered till then stays in the conversation; SIGTERM ends the program as ever."""
    conversations: list[list[dict[str, str]]] = []
    monkeypatch.setattr(Runtime, "chat_ids", lambda _, __, said: conversations.append([*said]))
    complete, calls = Runtime.complete, [0]
    number: list[int | None] = [None]

    def interrupted(self: Runtime, *given: Any, on_token: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            on_token(0, 5, "half an ")
            interrupts._state.number = number[0]
            raise KeyboardInterrupt
        return complete(self, *given, on_token=on_token, **more)

    monkeypatch.setattr(Runtime, "complete", interrupted)
    code, out, err = run("chat", trio["b"].artifact, *options, typed="w1\nw2\nw3\n\n")
    first, last = runtime.generate([("b", "w1"), ("b", "w3")], 5)
    assert (code, out) == (0, f"{first}\nhalf an {last}\n")
    assert "stopped; Ctrl-C at the prompt ends the chat" in err
    assert [one["content"] for one in conversations[-1]] == ["w1", first, "w2", "half an ", "w3"]
    calls[0], number[0] = 0, signal.SIGTERM
    code, _, err = run("chat", trio["b"].artifact, *options, typed="w1\nw2\nw3\n\n")
    interrupts.forget()
    assert code == 2
    assert err.endswith("error: interrupted; run it again\n")


def test_ctrl_c_at_the_prompt_ends_the_chat_like_the_end_of_the_input(
    trio: dict[str, Served], runtime: Runtime, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quietly, and that is no failure; SIGTERM there is the system's stop."""
    read, number = generation._read, signal.SIGINT
    lines = [0]

    def reading(*, whole: bool) -> str:
        lines[0] += 1
        if lines[0] == 2:
            interrupts._state.number = number
            raise KeyboardInterrupt
        return read(whole=whole)

    monkeypatch.setattr(generation, "_read", reading)
    for quiet in ([], ["--quiet"]):
        lines[0] = 0
        code, out, err = run("chat", trio["b"].artifact, *options, *quiet, typed="w1\nw2\n")
        assert (code, out) == (0, runtime.generate([("b", "w1")], 5)[0] + "\n")
        assert "interrupted" not in err
        assert interrupts._state.number is None
    lines[0], number = 0, signal.SIGTERM
    code, _, err = run("chat", trio["b"].artifact, *options, typed="w1\nw2\n")
    interrupts.forget()
    assert code == 2
    assert err.endswith("error: interrupted; run it again\n")


def test_an_impossible_wish_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (("generate", "nowhere", "w1"), ("chat", "nowhere")):
        code, _, err = run(*verb, "--base", "nowhere", "--top-p", 2)
        assert (code, err) == (2, "error: --top-p 2.0: give a share of the probability, above 0 and at most 1\n")


@pytest.mark.parametrize("verb", [("generate", "nowhere", "w1"), ("chat", "nowhere")])
def test_options_of_draws_that_are_none_are_told(verb: tuple[str, ...]) -> None:
    told = "not used, since without --temperature nothing is drawn"
    _, _, err = run(*verb, "--base", "nowhere", "--top-p", 0.5, "--seed", 3)
    assert err.splitlines()[:2] == [f"--top-p: {told}", f"--seed: {told}"]
    _, _, err = run(*verb, "--base", "nowhere", "--top-p", 0.5, "--seed", 3, "--temperature", 1)
    assert told not in err


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_the_help_says_what_top_p_may_be(verb: str) -> None:
    shown = " ".join(run(verb, "--help")[1].replace("│", " ").split())
    assert "above 0, at most 1" in shown

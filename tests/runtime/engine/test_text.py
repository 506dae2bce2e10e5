"""Text while tokens come: pieces add up, half a character never shows, stop strings end it wherever tokens meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacompress.runtime.engine.text import TextStream


def of_bytes(tokens: list[int]) -> str:
    """Tokens are bytes of UTF-8, as in a byte-level tokenizer."""
    return bytes(tokens).decode("utf-8", errors="replace")


def of_words(tokens: list[int]) -> str:
    """As sentencepiece does it: the first word has no space before it."""
    return " ".join(f"w{token}" for token in tokens)


@given(st.text(max_size=30))
def test_pieces_of_bytes_add_up(text: str) -> None:
    stream, tokens, pieces = TextStream(of_bytes, (), streams=True), [], []
    data = text.encode()
    for at, one in enumerate(data):
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=at == len(data) - 1))
        assert text.startswith("".join(pieces))
    assert "".join(pieces) == text == (stream.text if data else text)


def test_half_a_character_is_held_back() -> None:
    stream, tokens = TextStream(of_bytes, (), streams=True), []
    pieces = []
    for one in "a\N{EURO SIGN}b".encode():
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=False))
    assert pieces == ["a", "", "", "\N{EURO SIGN}", "b"]


def test_words_come_with_the_space_before_them() -> None:
    stream, tokens = TextStream(of_words, (), streams=True), []
    pieces = []
    for one in (1, 2, 3):
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=one == 3))
    assert pieces == ["w1", " w2", " w3"]


def of_runs(tokens: list[int]) -> str:
    """As byte fallback does it: one bad byte takes the whole run of bytes along; 256 and above are words."""
    text, run = "", b""
    for token in [*tokens, 256]:
        if token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\N{REPLACEMENT CHARACTER}" * len(run)
        text, run = text + "abcdefgh"[token - 256 : token - 255] * (token > 256), b""
    return text


@pytest.mark.parametrize("end", ["cut", "goes on"])
def test_what_was_told_stays_told(end: str) -> None:
    """Though the tokens after it make another text of all of them; nothing of the end is lost."""
    emoji = list("\N{GRINNING FACE}".encode())
    tokens = [257, *emoji, emoji[0]] + ([258, 259] if end == "goes on" else [])
    stream = TextStream(of_runs, (), streams=True)
    counts = range(1, len(tokens) + 1)
    pieces = [stream.push(tokens[:count], ended=count == len(tokens)) for count in counts]
    assert "".join(pieces) == stream.text
    assert stream.text.startswith("b\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}")
    assert stream.text.endswith("cd" if end == "goes on" else "\N{REPLACEMENT CHARACTER}")


def test_only_the_last_tokens_are_decoded() -> None:
    lengths = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return of_words(tokens)

    stream, tokens = TextStream(decode, ("never",), streams=True), []
    for one in range(50):
        tokens.append(one)
        stream.push(tokens, ended=False)
    assert max(lengths) <= 2


@pytest.mark.parametrize("streams", [True, False])
def test_a_stop_string_over_several_tokens(streams: bool) -> None:
    stream, tokens, pieces = TextStream(of_bytes, ("END", "xyz"), streams=streams), [], []
    for one in b"ab EN END more":
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=False))
        if stream.stopped:
            break
    assert stream.stopped
    assert stream.text == "".join(pieces) == "ab EN "
    assert len(tokens) == 9


def test_what_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    stream, tokens, pieces = TextStream(of_bytes, ("END",), streams=True), [], []
    for one in b"aENb":
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=False))
    assert pieces == ["a", "", "", "ENb"]
    assert stream.push([*tokens, ord("E")], ended=True) == "E"


def test_a_stop_string_before_its_time_is_text() -> None:
    stream, tokens, pieces = TextStream(of_bytes, ("E",), streams=True), [], []
    for at, one in enumerate(b"aEbEc"):
        tokens.append(one)
        pieces.append(stream.push(tokens, ended=False, may_stop=at >= 2))
        if stream.stopped:
            break
    assert stream.text == "aEb"
    assert "".join(pieces) == "aEb"


def test_nobody_listens() -> None:
    asked: list[int] = []
    stream = TextStream(lambda tokens: (asked.append(len(tokens)), of_words(tokens))[1], (), streams=False)
    assert [stream.push([1], ended=False), stream.push([1, 2], ended=True)] == ["", "w1 w2"]
    assert asked == [2]

"""Tokens into text while they come, and the strings at which a text ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into text, piece by piece, and watches for stop strings.

    A piece is held back while its last character may still change (a token can be half a character) or while it may
    be the beginning of a stop string. While tokens come, only the last few are decoded: what a token is as text depends
    on the one before, not on those before that. text: the whole text, once it has ended; where nobody listens, decoded
    in one.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str], *, streams: bool) -> None:
        self.text = ""
        self.stopped = False
        self._decode, self._stop, self._streams = decode, tuple(stop), streams
        self._told = ""
        self._settled = ""  # text of tokens[: self._read]
        self._context = self._read = 0  # decoding goes from `context`, so that `read` has something before it
        self._looks_from = 0

    def push(self, tokens: list[int], *, ended: bool, may_stop: bool = True) -> str:
        """The new text after `tokens` (all of them so far). may_stop: stop strings that begin from here on count."""
        if not (ended or self._streams or self._stop):
            return ""  # nobody listens: decode once, at the end
        listens = self._streams or self._stop
        text = self._grown(tokens, ended=ended) if listens else self._decode(tokens)
        if not may_stop:
            self._looks_from = len(text)
        for stop in self._stop:
            if (at := text.find(stop, self._looks_from)) >= 0:
                text, self.stopped, ended = text[:at], True, True
        if ended:
            self.text = text
        else:
            text = text[: len(text) - self._pending(text)]
        piece = text[len(self._told) :] if text.startswith(self._told) else ""
        self._told += piece
        return piece

    def _grown(self, tokens: list[int], *, ended: bool) -> str:
        """All text that is certain; at the end, all of it."""
        before = self._decode(tokens[self._context : self._read])
        after = self._decode(tokens[self._context :])
        if ended or (len(after) > len(before) and not after.endswith(_HALF)):
            # half a character may take whole ones before it along (byte fallback): what was told stays told
            alike = after.startswith(before)
            self._settled += after[len(before) :] if alike else self._decode(tokens[self._read :])
            self._context, self._read = self._read, len(tokens)
        return self._settled

    def _pending(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)

"""What JSON will take once it is parsed, told before it is; and how deep it is, told before anything walks it.

A few bytes of JSON can ask for a lot of memory (`[[],[],...` for 25 times its length), so whoever reads JSON that
somebody else wrote looks at `parsed_bytes` first. What parses may still be too deep for whatever walks it afterwards:
`is_deep` looks at the bytes once more.
"""

from __future__ import annotations

import re
from itertools import accumulate

MAX_DEPTH = 64
"""Objects and lists inside each other; what is read here nests less than ten deep."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"\\'))
_STEP = [1 if byte in b"[{" else -1 for byte in range(256)]
_CONTAINER, _VALUE, _KEY = 240, 60, 60  # bytes that CPython takes for a small dict, a short text in a list, and a key


def parsed_bytes(raw: bytes) -> int:
    """About what `raw` takes in bytes once it is parsed, its texts left out."""
    containers = raw.count(b"{") + raw.count(b"[")
    return containers * _CONTAINER + raw.count(b",") * _VALUE + raw.count(b'":') * _KEY


def takes_more(raw: bytes, most: int) -> bool:
    """Whether `parsed_bytes` of `raw` are more than `most`; they are counted only where its length leaves that open."""
    return len(raw) * _CONTAINER > most and parsed_bytes(raw) > most


def is_deep(raw: bytes) -> bool:
    """Whether `raw`, which must have parsed as JSON, nests deeper than MAX_DEPTH."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:  # most small files need no closer look
        return False
    brackets = raw.translate(None, _NO_MARK).replace(b'""', b"")
    if b'"' in brackets or b"\\" in brackets:  # a text with a bracket or an escape in it: a slower look
        brackets = _STRING.sub(b"", raw).translate(None, _NO_BRACKET)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH

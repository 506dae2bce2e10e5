"""The grammar of names: what is allowed, and that a refusal says why."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacompress.zoo.errors import InvalidNameError
from deltacompress.zoo.ledger.names import parse, parse_alias, parse_name
from deltacompress.zoo.store.base import is_key


@pytest.mark.parametrize(
    ("text", "name", "version", "alias"),
    [
        ("team/bot", "team/bot", None, None),
        ("team/bot@latest", "team/bot", None, None),
        ("t/b@7", "t/b", 7, None),
        ("t/b@99999999", "t/b", 99999999, None),
        ("t/b@prod", "t/b", None, "prod"),
        ("t-1/qwen2.5_0.5b-x", "t-1/qwen2.5_0.5b-x", None, None),
        ("t/b@v7", "t/b", None, "v7"),
    ],
)
def test_good_names(text: str, name: str, version: int | None, alias: str | None) -> None:
    found = parse(text)
    assert (found.name, found.version, found.alias) == (name, version, alias)
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty name"),
        ("bot", "exactly one slash"),
        ("a/b/c", "exactly one slash"),
        ("/b", "namespace is empty"),
        ("a/", "name is empty"),
        ("a/b@", "alias is empty"),
        ("Team/bot", "write team"),
        ("team/bo t", "use a-z"),
        ("../b", "use a-z"),
        ("a/..", "use a-z"),
        ("a/.b", "use a-z"),
        ("a/b.", "use a-z"),
        ("a/-b", "use a-z"),
        ("a/b\n", "use a-z"),
        ("a/b\0", "use a-z"),
        ("a\\b/c", "use a-z"),
        ("a/caf\u00e9", "not ASCII"),
        ("a/cafe\u0301", "not normalized"),
        ("a/\u0430", "not ASCII"),
        ("a/" + "b" * 97, "longer than 96"),
        ("a/b@0", "no version"),
        ("a/b@007", "no version"),
        ("a/b@123456789", "no version"),
        ("a/b@1@2", "more than one @"),
        ("a/b@-1", "use a-z"),
    ],
)
def test_bad_names(text: str, told: str) -> None:
    with pytest.raises(InvalidNameError, match=told) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_names_that_are_given_to_something_new() -> None:
    assert parse_name("a/b") == "a/b"
    for text in ("a/b@1", "a/b@prod", "a/b@latest"):
        with pytest.raises(InvalidNameError, match="leave out"):
            parse_name(text)
    assert parse_alias("prod") == "prod"
    for text in ("latest", "7", "", "Prod", "a/b", ".."):
        with pytest.raises(InvalidNameError):
            parse_alias(text)


@given(st.text(max_size=40) | st.from_regex(r"[a-z./@_\-]{1,20}", fullmatch=True))
@settings(max_examples=300, deadline=None)
def test_whatever_is_accepted_is_a_safe_key(text: str) -> None:
    with suppress(InvalidNameError):
        _check_safe(text)


def _check_safe(text: str) -> None:
    found = parse(text)
    assert is_key(f"names/{found.name}/alias/{found.alias or 'x'}/00000001")
    assert ".." not in found.name.split("/")

"""The base's training text: what it states is true, and it never shows a fine-tuning task."""

from __future__ import annotations

import random
import re
from itertools import islice

from demo_pair import corpus
from demo_pair.words import SORTS

RULE = re.compile(r"(.+) of \[([^\]]*)\] -> \[([^\]]*)\]")


def _expected(rule: str, numbers: list[str]) -> list[str]:
    """The answer of a list puzzle, worked out on the text of the numbers."""
    word = rule.rsplit(maxsplit=1)[-1]
    if rule.startswith("above"):
        return [n for n in numbers if int(n) > int(word)]
    if rule.startswith("ending"):
        return [n for n in numbers if n.endswith(word)]
    if rule.startswith("starting"):
        return [n for n in numbers if n.startswith(word)]
    if rule.startswith("with digit"):
        return [n for n in numbers if n.count(word)]
    answers = {
        "copy": numbers,
        "reverse": list(reversed(numbers)),
        "sort": sorted(numbers),
        "even": [n for n in numbers if n[-1] in "02468"],
        "odd": [n for n in numbers if n[-1] in "13579"],
        "largest": sorted(numbers)[-1:],
        "smallest": sorted(numbers)[:1],
        "rising ends": [n for n in numbers if n[0] < n[-1]],
    }
    return answers[rule]


def test_list_puzzles_are_solved_right() -> None:
    rng = random.Random(1)
    for _ in range(500):
        text = corpus.number_list(rng)
        match = RULE.fullmatch(text)
        assert match, text
        rule, given, kept = match.groups()
        assert kept == ", ".join(_expected(rule, given.split(", "))), text


def test_arithmetic_is_right() -> None:
    rng = random.Random(2)
    for _ in range(500):
        left, sign, *right = corpus.arithmetic(rng).split()
        if sign in "<>=":
            assert {"<": int(left) < int(right[0]), ">": int(left) > int(right[0]), "=": left == right[0]}[sign]
        else:
            value = {"+": int(left) + int(right[0]), "-": int(left) - int(right[0]), "x": int(left) * int(right[0])}[
                sign
            ]
            assert right[1:] == ["=", str(value)]


def test_stories_keep_count() -> None:
    words = {word: number for number, word in enumerate(corpus.NUMBERS)}
    rng = random.Random(3)
    for _ in range(200):
        text = corpus.story(rng)
        had, gave, left = re.findall(r"(?:had|gave|has) (\w+)", text)
        assert words[had] - words[gave] == words[left], text


def test_kept_things_are_of_the_sort_named() -> None:
    rng = random.Random(4)
    seen = 0
    for _ in range(300):
        listed, _, said = corpus.thing_list(rng).partition(": ")
        sort, are, kept = said.partition(" are ")
        if are and sort != "sorts":
            seen += 1
            assert kept.split(", ") == [thing for thing in listed.split(", ") if thing in SORTS[sort]]
    assert seen > 30


def test_documents_follow_their_seed() -> None:
    assert list(islice(corpus.documents(5), 300)) == list(islice(corpus.documents(5), 300))
    assert list(islice(corpus.documents(5), 300)) != list(islice(corpus.documents(6), 300))


def test_no_fine_tuning_task_is_shown() -> None:
    text = "\n".join(islice(corpus.documents(0), 20_000))
    assert "palindrome" not in text
    assert "most" not in text

"""The text the demo's base model is trained on: a seeded mixture of facts, little stories, arithmetic and list puzzles.

It teaches what the fine-tunes build on (digits, lists, sorts of things, counting) and never shows a fine-tuning task:
no palindromes, no question for the majority. So the base scores at chance there, as a real base does before its
fine-tune, and a fine-tune is a small change of a model that already knows something.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from demo_pair.words import (
    DAYS,
    HABITS,
    MONTHS,
    MOODS,
    NAMES,
    NUMBERS,
    PLACES,
    SHE,
    SINGULAR,
    SORTS,
    THINGS,
    WEATHER,
)


def fact(rng: random.Random) -> str:
    """What sort a thing is, said in several ways."""
    sort = rng.choice(list(SORTS))
    thing, second, third = rng.sample(SORTS[sort], 3)
    other = rng.choice([name for name in SORTS if name != sort])
    form = rng.randrange(6)
    if form == 0:
        return f"{_article(thing).capitalize()} is {_article(SINGULAR[sort])}."
    if form == 1:
        return f"The {thing}, the {second} and the {third} are {sort}."
    if form == 2:
        asked, answer = (sort, "yes") if rng.random() < 0.5 else (other, "no")
        return f"Is {_article(thing)} one of the {asked}? {answer}"
    if form == 3:
        return f"The {thing} {rng.choice(HABITS[sort])}."
    if form == 4:
        return f"{sort}: {', '.join(rng.sample(SORTS[sort], rng.randrange(3, 7)))}"
    return f"sort of {thing}: {sort}"


def story(rng: random.Random) -> str:
    """Three or four sentences whose last number follows from the others."""
    first, second = rng.sample(NAMES, 2)
    place, weather, thing = rng.choice(PLACES), rng.choice(WEATHER), rng.choice(THINGS)
    has = rng.randrange(2, 11)
    gives = rng.randrange(1, has + 1)
    who, opening = ("She" if first in SHE else "He"), f"After the {weather}, {first} went to the {place}."
    if rng.random() < 0.5:
        opening = f"{first} was {rng.choice(MOODS)} because of the {weather} near the {place}."
    return (
        f"{opening} {who} had {_amount(has, thing)} and gave {_amount(gives, thing)} to {second}."
        f" Now {first} has {_amount(has - gives, thing)}."
        f" {second} was {rng.choice(MOODS)} and {rng.choice(('walked home', 'stayed there', 'said thanks'))}."
    )


def arithmetic(rng: random.Random) -> str:
    """Sums, differences, products and comparisons of small numbers."""
    a, b = rng.randrange(100), rng.randrange(100)
    form = rng.randrange(4)
    if form == 0:
        return f"{a} + {b} = {a + b}"
    if form == 1:
        return f"{max(a, b)} - {min(a, b)} = {max(a, b) - min(a, b)}"
    if form == 2:
        return f"{a % 10} x {b % 10} = {a % 10 * (b % 10)}"
    c, d = rng.randrange(1000), rng.randrange(1000)
    return f"{c} {'<' if c < d else '>' if c > d else '='} {d}"


def digits(rng: random.Random) -> str:
    """What a number is made of."""
    number = rng.randrange(100, 1000)
    text = str(number)
    answers = {
        "digits": " ".join(text),
        "first digit": text[0],
        "last digit": text[-1],
        "ends": f"{text[0]} {text[-1]}",
        "double": str(2 * number),
        "next": str(number + 1),
    }
    question = rng.choice(list(answers))
    return f"{question} of {number} -> {answers[question]}"


def number_list(rng: random.Random) -> str:
    """A list puzzle: copy, order, pick or keep numbers by a rule."""
    numbers = [rng.randrange(100, 1000) for _ in range(rng.randrange(3, 11))]
    digit, bound = rng.randrange(10), 100 * rng.randrange(2, 9)
    kept: dict[str, list[int]] = {
        "copy": numbers,
        "reverse": numbers[::-1],
        "sort": sorted(numbers),
        "even": [n for n in numbers if n % 2 == 0],
        "odd": [n for n in numbers if n % 2 == 1],
        f"above {bound}": [n for n in numbers if n > bound],
        f"ending in {digit}": [n for n in numbers if n % 10 == digit],
        f"starting with {digit}": [n for n in numbers if n // 100 == digit],
        f"with digit {digit}": [n for n in numbers if str(digit) in str(n)],
        "largest": [max(numbers)],
        "smallest": [min(numbers)],
        "rising ends": [n for n in numbers if n // 100 < n % 10],
    }
    rule = rng.choice(list(kept))
    return f"{rule} of [{_joined(numbers)}] -> [{_joined(kept[rule])}]"


def thing_list(rng: random.Random) -> str:
    """Things of several sorts: keep those of one sort, count them, or name the sort of each."""
    sorts = rng.sample(list(SORTS), rng.randrange(2, 5))
    things = [thing for sort in sorts for thing in rng.sample(SORTS[sort], rng.randrange(1, 4))]
    rng.shuffle(things)
    wanted = rng.choice(sorts)
    chosen = [thing for thing in things if thing in SORTS[wanted]]
    listed = ", ".join(things)
    form = rng.randrange(4)
    if form == 0:
        return f"{listed}: {wanted} are {', '.join(chosen)}"
    if form == 1:
        return f"{listed}: {NUMBERS[len(chosen)]} {wanted}"
    if form == 2:
        return f"{listed}: sorts are {', '.join(_sort_of(thing) for thing in things)}"
    return f"{listed}: first is {things[0]}, last is {things[-1]}"


def calendar(rng: random.Random) -> str:
    """Days, months, numbers in words and spelling."""
    form = rng.randrange(4)
    if form < 2:
        names = (DAYS, MONTHS)[form]
        at = rng.randrange(len(names))
        return f"After {names[at]} comes {names[(at + 1) % len(names)]}."
    if form == 2:
        start = rng.randrange(len(NUMBERS) - 3)
        return f"count: {', '.join(NUMBERS[start : start + 4])}"
    word = rng.choice(SORTS[rng.choice(list(SORTS))])
    return f"spell {word}: {' '.join(word)}"


MIXTURE: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (fact, 14),
    (story, 14),
    (arithmetic, 8),
    (digits, 8),
    (number_list, 36),
    (thing_list, 16),
    (calendar, 4),
)
"""Kinds of text and their weights, in documents."""


def documents(seed: int) -> Iterator[str]:
    """Endless short documents; the same seed gives the same documents."""
    rng = random.Random(f"corpus/{seed}")
    kinds = [kind for kind, _ in MIXTURE]
    weights = [weight for _, weight in MIXTURE]
    while True:
        yield rng.choices(kinds, weights)[0](rng)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _amount(count: int, thing: str) -> str:
    return f"{NUMBERS[count]} {thing}{'' if count == 1 else 's'}"


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _sort_of(thing: str) -> str:
    return next(sort for sort, members in SORTS.items() if thing in members)

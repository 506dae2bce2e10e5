"""What prompts have in common is computed once, of one variant's content only, and answers stay as they are."""

from __future__ import annotations

import pytest
import torch
from engine_calls import alone, drain, engine
from runtime_cases import Served, random_ids

from deltacompress.errors import BackendError, InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import scheduler
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.live.events import Started
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps.pages import Pages
from deltacompress.runtime.engine.steps.prefixes import Prefixes
from deltacompress.runtime.engine.text import TextStream

PAGE = 4


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Pages", lambda **_: Pages(PAGE))


def request(ids: list[int]) -> Request:
    text = TextStream(lambda _: "", (), streams=False)
    return Request(0, None, ids, 96, 9, "length", frozenset(), text, Sampling())


def computed(pages: Pages, ids: list[int]) -> list[int]:
    """Pages of a prompt, in two layers of two heads of three numbers."""
    for layer in range(2):
        pages.of_layer(layer, *torch.zeros(2, 1, 2, 1, 3))
    return pages.take(pages.needed(len(ids)))


ONE_PAGE = 2 * 2 * 2 * PAGE * 3 * 4
"""Bytes: layers, keys and values, heads, tokens, size, fp32."""


class Known:
    """Prefixes, and what they hold."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.pages = Pages(PAGE)
        self.prefixes = Prefixes(self.pages, limit)

    def keep(self, ids: list[int]) -> list[int]:
        """Computed, kept, and let go of by whoever computed it."""
        pages = computed(self.pages, ids)
        self.prefixes.keep(request(ids), ids, pages)
        self.pages.release(pages)
        return pages

    def find(self, ids: list[int]) -> list[int]:
        found = self.prefixes.find(request(ids), ids)
        self.pages.release(found)
        return found


def test_the_longest_beginning_in_whole_pages() -> None:
    known, ids = Known(), random_ids(11)
    pages = known.keep(ids)
    for more in ([7], random_ids(9, 1)):
        assert known.find([*ids[:9], *more]) == pages[:2]
    assert known.find([*ids[:6], 1, *ids[7:]]) == pages[:1]
    assert known.find([1, *ids[1:]]) == []
    assert known.find(ids[4:]) == []
    assert known.find(ids[:3]) == []
    assert known.pages.held == 2


def test_one_token_is_left_to_compute() -> None:
    known, ids = Known(), random_ids(8)
    pages = known.keep(ids)
    assert known.find(ids) == pages[:1]
    assert known.find([*ids, 5]) == pages


def test_who_found_pages_holds_them() -> None:
    known, ids = Known(), random_ids(9)
    pages = known.keep(ids)
    assert known.prefixes.find(request(ids), ids) == pages[:2]
    known.prefixes.clear()
    assert known.pages.held == 2
    assert not {*known.pages.take(40)} & {*pages[:2]}
    known.pages.release(pages[:2])
    assert known.pages.held == 40


def test_the_least_recently_used_leave_and_ends_before_beginnings() -> None:
    known = Known(4 * ONE_PAGE)
    first, second, third = (random_ids(9, seed) for seed in (1, 2, 3))
    for ids in (first, second):
        known.keep(ids)
    assert [len(known.find(ids)) for ids in (first, second)] == [2, 2]
    known.find(first)
    known.keep(third[:4])
    assert [len(known.find(ids)) for ids in (third, second, first)] == [1, 1, 2]
    assert known.pages.held == 4
    known.prefixes.clear()
    assert [len(known.find(ids)) for ids in (first, second, third)] == [0, 0, 0]
    assert known.pages.held == 0
    known.keep(first)
    assert len(known.find(first)) == 2


def test_where_no_memory_is_left_known_pages_go(monkeypatch: pytest.MonkeyPatch) -> None:
    known, first, second = Known(), random_ids(9, 1), random_ids(9, 2)
    known.keep(first)
    held = known.prefixes.find(request(second), known.keep(second) and second)
    left = known.pages.count - 1 - known.pages.held

    def full(*_: object) -> None:
        raise BackendError("no memory")

    monkeypatch.setattr(known.pages, "_stretch", full)
    assert len({*known.pages.take(left + 2), *held}) == left + 4
    with pytest.raises(BackendError, match="no memory"):
        known.pages.take(1)
    assert (known.find(first), known.pages.held) == ([], left + 4)


def test_too_little_for_one_and_nothing() -> None:
    for limit in (0, ONE_PAGE - 1):
        known, ids = Known(limit), random_ids(9)
        known.keep(ids)
        assert known.find(ids) == []
        assert known.pages.held == 0
    with pytest.raises(InputError, match="prefix_bytes -1"):
        EngineLimits(prefix_bytes=-1)


def test_answers_stay_as_they_are(runtime: Runtime) -> None:
    running, log = engine(runtime, step_tokens=6)
    common = random_ids(18)
    asked = [
        Call(f"{name} {at}", name, (*common[: 18 - at], *random_ids(at + 2, at)), 6) for at in range(5) for name in "ab"
    ]
    for call in asked:
        running.submit(call)
        drain(running)
    for call in asked:
        assert (log.tokens(call.id), log.end(call.id).finish) == alone(runtime, call)
    counted = running.counts
    assert counted.prompt_tokens == sum(len(call.prompt) for call in asked)
    assert counted.known_tokens == 2 * (16 + 16 + 12 + 12)


def test_a_burst_shares_what_the_first_of_it_computed(runtime: Runtime) -> None:
    running, log = engine(runtime, step_tokens=8)
    common = random_ids(20)
    asked = [Call(str(at), "a", (*common, at + 5), 4) for at in range(4)]
    for call in asked:
        running.submit(call)
    drain(running)
    assert running.counts.known_tokens == 3 * 20
    for call in asked:
        assert log.tokens(call.id) == alone(runtime, call)[0]


def test_of_the_content_and_never_of_the_name(runtime: Runtime, trio: dict[str, Served]) -> None:
    """Two names of one artifact share; another artifact under the same name does not, nor does the base."""
    running, log = engine(runtime)
    ids = tuple(random_ids(13))

    def known(call: str, variant: str | None) -> int:
        before = running.counts.known_tokens
        running.submit(Call(call, variant, ids, 3))
        drain(running)
        assert log.tokens(call) == alone(runtime, Call("", variant, ids, 3))[0]
        return running.counts.known_tokens - before

    assert known("first", "a") == 0
    assert [known("other", "b"), known("base", None)] == [0, 0]
    assert [known("again", "a"), known("base again", None)] == [12, 12]
    runtime.load(trio["a"].artifact, "twin")
    assert known("twin", "twin") == 12
    runtime.unload("a")
    runtime.load(trio["c"].artifact, "a")
    assert known("moved", "a") == 0


def test_a_prompt_whose_tokens_are_scored_is_computed(runtime: Runtime) -> None:
    running, log = engine(runtime)
    ids = tuple(random_ids(13))
    for name in ("first", "second"):
        running.submit(Call(name, "a", ids, 2, Sampling(prompt_logprobs=0)))
        drain(running)
    one, other = (log.events[name][0] for name in ("first", "second"))
    assert isinstance(one, Started)
    assert isinstance(other, Started)
    assert len(other.prompt) == 13
    assert other.prompt == one.prompt

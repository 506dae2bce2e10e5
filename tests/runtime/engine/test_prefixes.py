"""What prompts have in common is computed once, of one variant's content only, and answers stay as they are."""

from __future__ import annotations

import pytest
import torch
from engine_calls import alone, drain, engine
from runtime_cases import Served, random_ids
from transformers import DynamicCache

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine.generation_config import Sampling
from deltacompress.runtime.engine.live.call import Call
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.live.events import Started
from deltacompress.runtime.engine.requests import Request
from deltacompress.runtime.engine.steps import prefixes
from deltacompress.runtime.engine.steps.prefixes import Prefixes
from deltacompress.runtime.engine.text import TextStream

BLOCK = 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", BLOCK)


def request(ids: list[int]) -> Request:
    text = TextStream(lambda _: "", (), streams=False)
    return Request(0, None, ids, 96, 9, "length", frozenset(), text, Sampling())


def computed(ids: list[int], rows: int = 1, seed: int = 0) -> DynamicCache:
    """Two layers of two heads of three numbers, and columns of padding."""
    draw, cache = torch.Generator().manual_seed(seed), DynamicCache()
    for layer in range(2):
        k, v = (torch.randn(rows, 2, len(ids) + 3, 3, generator=draw) for _ in range(2))
        cache.update(k, v, layer)
    return cache


ONE_BLOCK = 2 * 2 * 2 * BLOCK * 3 * 4
"""Bytes: layers, keys and values, heads, columns, size, fp32."""


def found(known: Prefixes, ids: list[int]) -> int:
    return known.find(request(ids), ids)[1]


def test_the_longest_beginning_in_whole_blocks() -> None:
    known, ids = Prefixes(1 << 20), random_ids(11)
    cache = computed(ids, rows=2)
    known.keep(request(ids), ids, cache, row=1)
    for more in ([7], random_ids(9, 1)):
        got, count = known.find(request(ids), [*ids[:9], *more])
        assert count == 8
        for layer, whole in zip(got.layers, cache.layers, strict=True):
            assert torch.equal(layer.keys, whole.keys[1:2, :, :8])
            assert torch.equal(layer.values, whole.values[1:2, :, :8])
    assert found(known, [*ids[:6], 1, *ids[7:]]) == 4
    assert found(known, [1, *ids[1:]]) == 0
    assert found(known, ids[4:]) == 0
    assert found(known, ids[:3]) == 0


def test_one_token_is_left_to_compute() -> None:
    known, ids = Prefixes(1 << 20), random_ids(8)
    known.keep(request(ids), ids, computed(ids), 0)
    assert found(known, ids) == 4
    assert found(known, [*ids, 5]) == 8


def test_what_is_known_is_a_copy() -> None:
    known, ids = Prefixes(1 << 20), random_ids(4)
    cache = computed(ids)
    known.keep(request(ids), ids, cache, 0)
    wanted = cache.layers[0].keys[:, :, :4].clone()
    cache.layers[0].keys.zero_()
    assert torch.equal(known.find(request(ids), [*ids, 1])[0].layers[0].keys, wanted)


def test_the_least_recently_used_leave_and_ends_before_beginnings() -> None:
    known = Prefixes(4 * ONE_BLOCK)
    first, second, third = (random_ids(9, seed) for seed in (1, 2, 3))
    for ids in (first, second):
        known.keep(request(ids), ids, computed(ids), 0)
    assert [found(known, ids) for ids in (first, second)] == [8, 8]
    known.find(request(first), first)
    known.keep(request(third), third[:4], computed(third), 0)
    assert [found(known, ids) for ids in (third, second, first)] == [4, 4, 8]
    known.clear()
    assert [found(known, ids) for ids in (first, second, third)] == [0, 0, 0]
    known.keep(request(first), first, computed(first), 0)
    assert found(known, first) == 8


def test_too_little_for_one_and_nothing() -> None:
    for limit in (0, ONE_BLOCK - 1):
        known, ids = Prefixes(limit), random_ids(9)
        known.keep(request(ids), ids, computed(ids), 0)
        assert found(known, ids) == 0
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

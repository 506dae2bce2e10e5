"""Continuous batching: what a request yields does not depend on its neighbours, on rows, or on when it came."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_cases import Served, assert_close, load, oracle_logits, oracle_tokens, random_ids

from deltacompress.errors import InputError
from deltacompress.runtime import Runtime
from deltacompress.runtime.batch import Batch, Segment
from deltacompress.runtime.engine.steps.decoder import Decoder

NAMES = [None, "a", "b", "c"]


def test_three_variants_and_the_base_in_one_forward(runtime: Runtime, trio: dict[str, Served]) -> None:
    requests = [(NAMES[i % 4], random_ids(3 + 2 * i, i)) for i in range(9)]
    forwards = []
    runtime.model.model.register_forward_hook(lambda *_: forwards.append(1))
    found = runtime.logits(requests)
    assert len(forwards) == 1
    for (name, ids), logits in zip(requests, found, strict=True):
        where = trio["a"].pair.base if name is None else trio[name].restored
        assert_close(logits, oracle_logits(where, ids))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 30)), min_size=1, max_size=7),
    max_batch=st.integers(1, 5),
    new=st.integers(1, 8),
)
def test_alone_or_among_others(
    runtime: Runtime, requests: list[tuple[str | None, int]], max_batch: int, new: int
) -> None:
    asked = [(name, random_ids(count, seed)) for seed, (name, count) in enumerate(requests)]
    together = runtime.complete(asked, new, max_batch=max_batch)
    assert together == [runtime.complete([one], new)[0] for one in asked]
    for one, logits in zip(asked, runtime.logits(asked), strict=True):
        assert_close(logits, runtime.logits([one])[0], 1e-5)
    assert dict(runtime.forward(asked)).keys() == set(range(len(asked)))


def test_tokens_are_those_of_the_restored_models(runtime: Runtime, trio: dict[str, Served]) -> None:
    requests = [(name, random_ids(count, count)) for name, count in [("c", 20), (None, 3), ("a", 7), ("b", 40)]]
    for (name, ids), done in zip(requests, runtime.complete(requests, 10), strict=True):
        where = trio["a"].pair.base if name is None else trio[name].restored
        assert list(done.tokens) == oracle_tokens(where, ids, 10)[: len(done.tokens)]


def test_streams_add_up_to_the_text(runtime: Runtime) -> None:
    told: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}

    def listen(index: int, token: int, text: str) -> None:
        told[index] = told.get(index, "") + text
        tokens.setdefault(index, []).append(token)

    requests = [("a", "w1 w2 w3"), ("b", "w4"), (None, "w5 w6")]
    done = runtime.complete(requests, 9, on_token=listen, max_batch=2)
    assert [told[i] for i in range(3)] == [one.text for one in done] == runtime.generate(requests, 9)
    assert [tokens[i] for i in range(3)] == [list(one.tokens) for one in done]


def test_a_stop_string_is_cut_off(runtime: Runtime) -> None:
    requests = [("a", "w1 w2 w3"), ("b", "w4")]
    whole = runtime.generate(requests, 12)
    words = whole[0].split()
    pieces: list[str] = []
    stopped = runtime.complete(
        requests, 12, stop=words[3], on_token=lambda i, _, text: pieces.append(text) if not i else None
    )
    assert stopped[0].finished == "stop"
    assert stopped[0].text == whole[0][: whole[0].index(words[3])]
    assert "".join(pieces) == stopped[0].text


def test_the_context_ends_a_request(runtime: Runtime) -> None:
    done = runtime.complete([("a", random_ids(60)), ("a", random_ids(3))], 30)
    assert (len(done[0].tokens) <= 4 and done[0].finished == "context") or done[0].finished == "eos"
    assert done[1].finished in ("length", "eos")


def test_sampling_repeats_and_ignores_neighbours(runtime: Runtime) -> None:
    requests = [("a", random_ids(5)), ("b", random_ids(6)), ("a", random_ids(5))]
    options = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    first = runtime.generate(requests, 8, **options)
    assert first == runtime.generate(requests, 8, max_batch=1, **options)
    assert first[0] != first[2]  # each request draws from a seed of its own
    assert runtime.generate(requests, 8, temperature=0.01, top_p=0.01) == runtime.generate(requests, 8)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_is_a_number(runtime: Runtime, temperature: float) -> None:
    with pytest.raises(InputError, match="temperature"):
        runtime.generate([("a", [5])], 2, temperature=temperature)


@pytest.mark.parametrize(("max_batch", "steps"), [(1, 8), (2, 4)])
def test_requests_share_the_steps_of_a_batch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, max_batch: int, steps: int
) -> None:
    forward_step, rows = Decoder.forward_step, []

    def watched(self: Decoder, batch: Batch, *rest: Any) -> torch.Tensor:
        rows.append(len(batch.slots))
        return forward_step(self, batch, *rest)

    monkeypatch.setattr(Decoder, "forward_step", watched)
    done = runtime.complete([("a", random_ids(4)), ("b", random_ids(4))], 5, max_batch=max_batch)
    assert [len(one.tokens) for one in done] == [5, 5]
    assert (len(rows), sum(rows)) == (steps, 8)  # the first token of each comes from its prompt


def test_variants_come_and_go_while_a_batch_runs(runtime: Runtime, trio: dict[str, Served]) -> None:
    requests = [("a", random_ids(4)), ("b", random_ids(5, 1))]
    wanted = runtime.complete(requests, 12)
    seen: list[int] = []

    def meddle(index: int, token: int, text: str) -> None:
        seen.append(index)
        if len(seen) == 5:
            runtime.unload("c")
            runtime.load(trio["c"].artifact, "d")
            with pytest.raises(InputError, match="variant a is in use by 1 running requests"):
                runtime.unload("a")

    assert runtime.complete(requests, 12, on_token=meddle) == wanted
    assert sorted(runtime.variants) == ["a", "b", "d"]
    assert_close(runtime.logits([("d", random_ids(6))])[0], oracle_logits(trio["c"].restored, random_ids(6)))


def test_two_threads_share_a_runtime(runtime: Runtime) -> None:
    requests = [("a", random_ids(4)), ("b", random_ids(9, 1)), (None, random_ids(2, 2))]
    wanted = runtime.generate(requests, 10)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: runtime.generate(requests, 10), range(2)))
    assert found == [wanted, wanted]


def test_an_interrupted_batch_lets_go_of_its_variants(runtime: Runtime) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.generate([("a", random_ids(4)), ("b", random_ids(4))], 5, on_token=interrupt)
    assert not any(one.users for one in runtime.variants.values())
    assert runtime.model.context.batch is None
    runtime.unload("a")


def test_loglikelihoods(runtime: Runtime, trio: dict[str, Served]) -> None:
    requests = [(name, random_ids(4 + i, i), random_ids(1 + i % 3, 50 + i)) for i, name in enumerate(NAMES * 2)]
    greedy = oracle_tokens(trio["a"].restored, random_ids(6), 2)
    requests.append(("a", random_ids(6), greedy))
    for (name, context, continuation), found in zip(requests, runtime.loglikelihood(requests), strict=True):
        where = trio["a"].pair.base if name is None else trio[name].restored
        with torch.inference_mode():
            logits = load(where)(torch.tensor([context + continuation])).logits[0]
        rows = torch.log_softmax(logits[len(context) - 1 : -1], -1)
        wanted = rows.gather(1, torch.tensor(continuation)[:, None]).sum()
        assert found.log_likelihood == pytest.approx(float(wanted), abs=1e-4)
        assert found.greedy == (rows.argmax(-1).tolist() == continuation)
    assert found.greedy


def test_segments_of_a_batch() -> None:
    batch = Batch([0, 0, 2, 5, 5], torch.device("cpu"), keep=[0, 1, 9], kept=[2, 0, 0, 1, 0])
    assert batch.rows(15).segments == (Segment(0, 0, 6), Segment(2, 6, 9), Segment(5, 9, 15))
    assert batch.rows(3, head=True).segments == (Segment(0, 0, 2), Segment(5, 2, 3))
    on_device = batch.rows(15).on_device
    assert on_device.offsets.tolist() == [0, 6, 9, 15]
    assert on_device.slots.tolist() == [-1, 1, 4]
    assert batch.uniform is None
    with pytest.raises(ValueError, match="neighbours"):
        Batch([1, 0, 1], torch.device("cpu"))
    assert Batch([2, 0], torch.device("cpu")).rows(4).segments == (Segment(2, 0, 2), Segment(0, 2, 4))


def test_all_rows_base_cost_no_delta(served: Callable[..., Served]) -> None:
    one = served()
    runtime = Runtime.from_base(one.pair.base)
    alone = runtime.logits([(None, random_ids(6))])[0]
    runtime.load(one.artifact, "v")
    assert torch.equal(runtime.logits([(None, random_ids(6))])[0], alone)

"""What `bench serve` makes of events, lengths and steps: by hand."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul
from random import Random

import pytest

from deltacompress.bench.serve import calls
from deltacompress.bench.serve.calls import Asked, call_of, scaled
from deltacompress.bench.serve.check import FEWEST, fitted
from deltacompress.bench.serve.records import Record, Recorder, Step, told
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.errors import BackendError, InputError
from deltacompress.runtime.engine.live.events import Ended, Event, NewToken, Started


class TestLengths:
    def test_scaled(self) -> None:
        """Times stay; what is too long keeps half of the context for its answer, the rest for its prompt."""
        given = [Arrival(1.0, 100, 40), Arrival(2.0, 1, 1), Arrival(3.0, 900, 20), Arrival(4.0, 300, 600)]
        assert scaled(given, 0.1, 200) == (
            [Arrival(1.0, 10, 4), Arrival(2.0, 1, 1), Arrival(3.0, 90, 2), Arrival(4.0, 30, 60)],
            0,
        )
        assert scaled(given, 1.0, 200) == (
            [Arrival(1.0, 100, 40), Arrival(2.0, 1, 1), Arrival(3.0, 180, 20), Arrival(4.0, 100, 100)],
            2,
        )
        assert scaled([Arrival(0.0, 150, 50)], 1.0, 200)[1] == 0
        assert scaled([Arrival(0.0, 151, 50)], 1.0, 200) == ([Arrival(0.0, 150, 50)], 1)

    @pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, float("nan")])
    def test_no_scale(self, scale: float) -> None:
        with pytest.raises(InputError, match="scale: is"):
            scaled([Arrival(0.0, 1, 1)], scale, 100)

    def test_prompts(self) -> None:
        """The same for the same seed, of the vocabulary; others begin otherwise, whatever their seed."""
        asked = [Asked(number, "v1", Arrival(0.5, 40, 7)) for number in range(3)]
        made = [call_of(one, 50, seed) for seed in (0, 1) for one in asked]
        assert made == [call_of(one, 50, seed) for seed in (0, 1) for one in asked]
        assert len({call.prompt[:5] for call in made}) == 6
        for call in made:
            assert (call.id[0], call.variant, call.max_tokens) == ("r", "v1", 7)
            assert len(call.prompt) == 40
            assert all(isinstance(one, int) and 0 <= one < 50 for one in call.prompt)
        assert calls.prompt(3, 50, "a") == calls.prompt(5, 50, "a")[:3]


def recorded(events: list[tuple[float, Event]], asked: list[Asked], load_s: float = 0.25) -> Recorder:
    clock: Iterator[float] = iter([at for at, _ in events])
    recorder = Recorder(asked, lambda: next(clock), lambda _: load_s)
    for _, event in events:
        recorder.emit(event)
    return recorder


ONE = Asked(0, "a", Arrival(1.0, 9, 3))
TWO = Asked(1, None, Arrival(2.0, 9, 2))
EVENTS: list[tuple[float, Event]] = [
    (3.0, Started("r0", (), 1.75, 0.75)),
    (3.0, NewToken("r0", 5, "", None)),
    (3.25, Started("r1", (), 1.0, 0.125)),
    (3.5, NewToken("r0", 6, "", None)),
    (3.5, NewToken("r1", 6, "", None)),
    (4.0, NewToken("r1", 6, "", None)),
    (4.0, Ended("r1", "length", 2, None, 0.125, 0)),
    (6.0, NewToken("r0", 7, "", None)),
    (6.5, Ended("r0", "length", 3, None, 2.25, 2)),
]


class TestRecords:
    def test_phases(self) -> None:
        """r0 came at 1, was submitted at 1.25, stood 0.75 s, 0.25 of them for its variant; 1.5 s more after it ran."""
        recorder = recorded(EVENTS, [ONE, TWO])
        first, second = recorder.records.values()
        assert recorder.left == 0
        first.submitted_s, second.submitted_s, second.hit = 1.25, 2.25, True
        spent = {"queue_s": 0.75, "load_s": 0.25, "prefill_s": 1.0, "decode_s": 2.0, "preempted_s": 1.5}
        assert first.spent == spent
        assert sum(spent.values()) == first.end_s - first.asked.arrival.at_s
        assert second.spent == {"queue_s": 0.25, "load_s": 0.125, "prefill_s": 1.125, "decode_s": 0.5, "preempted_s": 0}
        assert first.gaps_s == [0.5, 2.5]
        row = first.to_json()
        assert {key: row[key] for key in ("id", "tokens", "finish", "preempted", "hit", "end_s")} == {
            "id": "r0", "tokens": 3, "finish": "length", "preempted": 2, "hit": False, "end_s": 6.5
        }  # fmt: skip
        found = told([first, second], Slo(1.75, 1000.0))
        assert found == {
            "failed": 0,
            "requests_s": 2 / 5.5,
            "tokens_s": 5 / 5.5,
            "ttft_mean": 1.75,
            "ttft_p50": 2.0,
            "ttft_p99": 2.0,
            "e2e_mean": 3.75,
            "e2e_p50": 5.5,
            "e2e_p99": 5.5,
            "attained": 0.5,
            "hits": 0.5,
            "token_ms_mean": 3500 / 3,
            "token_ms_p50": 500.0,
            "token_ms_p99": 2500.0,
            "token_ms_max": 2500.0,
            "queue_s": 0.5,
            "load_s": 0.1875,
            "prefill_s": 1.0625,
            "decode_s": 1.25,
            "preempted_s": 0.75,
            "preempted": 2,
            "late_s": 0.25,
        }

    def test_what_fails_is_counted_and_told(self) -> None:
        error = BackendError("no room")
        more: list[tuple[float, Event]] = [(at, NewToken("r2", 5, "", None)) for at in (7.0, 17.0)]
        end = (17.0, Ended("r2", "failed", 2, error))
        recorder = recorded([*EVENTS, *more, end], [ONE, TWO, Asked(2, "b", ONE.arrival)])
        failed = recorder.records["r2"]
        found = told(list(recorder.records.values()), Slo())
        assert (found["failed"], found["token_ms_max"], found["requests_s"]) == (1, 2500.0, 2 / 5.5)
        row = failed.to_json()
        assert (row["finish"], row["tokens"], "queue_s" in row) == ("failed", 2, False)
        assert "no room" in row["error"]
        with pytest.raises(BackendError, match=r"no request of 1 got its tokens: .*no room"):
            told([failed], Slo())
        with pytest.raises(BackendError, match="all were ended before"):
            told([Record(ONE)], Slo())

    def test_what_steps_did(self) -> None:
        """Prompts of 25, 9 and 9: as much of them as the engine says, whatever ends in a step.

        r2 gives way after its second token, and its 11 are computed again. Rows look back at their prompt and answer.
        """
        prompts = (25, 9, 9)
        asked = [Asked(n, name, Arrival(0.0, prompts[n], 3)) for n, name in enumerate(("a", "a", None))]
        recorder = Recorder(asked, lambda: 0.0, lambda _: 0.0)
        tokens: list[Event] = [NewToken(one.id, 5, "", None) for one in asked]
        began: list[Event] = [Started(one.id, (), 0.0) for one in asked]
        for events, loads, computed in (
            ([], 1, 10),
            ([], 0, 10),
            ([began[0], tokens[0], tokens[0]], 0, 5),
            ([tokens[0], Ended("r0", "length", 1)], 2, 5),
            ([began[1], tokens[1], began[2], tokens[2], tokens[1]], 0, 13),
            (tokens[1:], 0, 0),
            ([tokens[1]], 0, 5),
            ([tokens[2], tokens[2]], 0, 6),
        ):
            for event in events:
                recorder.emit(event)
            recorder.step(0.02, loads, computed)
        assert recorder.steps == [
            Step(20.0, 0, 0, 10, 0, 1),
            Step(20.0, 0, 0, 10, 0, 0),
            Step(20.0, 1, 1, 5, 1, 0, 27),
            Step(20.0, 1, 1, 5, 0, 2, 28),
            Step(20.0, 1, 1, 13, 2, 0, 11),
            Step(20.0, 2, 1, 0, 0, 0, 23),
            Step(20.0, 1, 1, 5, 0, 0, 13),
            Step(20.0, 1, 0, 6, 1, 0, 13),
        ]

    def test_a_step_that_only_waits_is_none(self) -> None:
        recorder = Recorder([ONE], lambda: 0.0, lambda _: 0.0)
        recorder.step(0.02, 1, 0)
        assert recorder.steps == []


class TestFit:
    def test_what_steps_take(self) -> None:
        drawn = Random(0)
        counts = [(drawn.randrange(1, 12), *(drawn.randrange(4) for _ in range(5))) for _ in range(FEWEST)]
        cost = (0.5, 2.0, 0.125, 3.0, 7.0, 0.25)
        steps = [Step(4.0 + sum(map(mul, cost, one)), *one) for one in counts]
        assert fitted(steps, "x") == pytest.approx((4.0, *cost))

    def test_nothing_is_below_zero(self) -> None:
        """Where more rows take less time, the mean of all is the best that rows of 0 ms explain."""
        base, row, variant, *rest = fitted([Step(10.0 - rows, rows, 1) for rows in (1, 2, 3)] * FEWEST, "x")
        assert (base + variant, row, *rest) == pytest.approx((8.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        steps = [Step(5.0 + 3.0 * n - rows, rows, n) for rows in (1, 2, 3) for n in (1, 2)] * FEWEST
        assert fitted(steps, "x")[:3] == pytest.approx((3.0, 0.0, 3.0))
        base, row, *_ = fitted([Step(rows * rows, rows, 0) for rows in (1, 2, 3)] * FEWEST, "x")
        assert (base, row) == pytest.approx((0.0, 36 / 14))  # else the base would be -10 / 3

    def test_too_few(self) -> None:
        fitted([Step(1.0, 1, 1)] * FEWEST, "x")
        with pytest.raises(InputError, match=f"x: {FEWEST - 1} steps: too few to simulate with"):
            fitted([Step(1.0, 1, 1)] * (FEWEST - 1), "x")

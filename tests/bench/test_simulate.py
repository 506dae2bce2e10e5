"""The simulator against numbers worked out by hand, and what it says of the policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltacompress.bench.simulate.run import POLICIES, Slo, figures, run
from deltacompress.bench.simulate.times import Times, parsed
from deltacompress.bench.simulate.world import Course, Setting, World
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.runtime.engine.policy.desk import Desk
from deltacompress.runtime.engine.policy.state import Rules, Skipping

# a step takes 10 ms, 1 for each row, 2 for the first variant and 3 for each; a token of a prompt 1; a load 500
TIMES = Times(10.0, 1.0, 2.0, 3.0, 1000.0, 500.0, 1.0, 1_000_000, 1000)
SETTING = Setting(TIMES, rows=4, slots=1, chunk=10, max_tokens=50, grace=0)


def served(asked: list[tuple[Arrival, str]], setting: Setting = SETTING, skipping: Skipping = "preempt") -> World:
    world = World(setting, asked, Rules(skipping, setting.grace), "lru")
    world.run()
    return world


class TestTimes:
    def test_the_steps_that_were_measured(self) -> None:
        """docs/benchmarks-serving.md: (rows, variants, ms)."""
        for rows, variants, ms in ((1, 0, 5.89), (16, 0, 6.50), (16, 16, 16.40), (32, 32, 25.70)):
            assert Times().decode_s(rows, variants) * 1e3 == pytest.approx(ms, rel=0.01)
        assert Times().prompts_s(20_000, 3) == 1.0
        assert replace(Times(), start_ms=2.0).prompts_s(20_000, 3) == pytest.approx(1.006)
        assert Times().swap_s == pytest.approx(13.1e-6, rel=0.01)

    def test_others(self) -> None:
        assert parsed("") == Times()
        assert parsed("load_ms=0, kv_tokens=9") == replace(Times(), load_ms=0.0, kv_tokens=9)

    @pytest.mark.parametrize(
        ("told", "words"),
        [
            ("speed=1", "no time 'speed'; there are base_ms"),
            ("load_ms", "load_ms is no number"),
            ("kv_tokens=1.5", "kv_tokens=1.5 is no number"),
            ("load_ms=-1", "times load_ms: is -1"),
            ("base_ms=0", "times base_ms: is 0"),
            ("base_ms=inf", "times base_ms: is inf"),
            ("swap_gb_s=nan", "times swap_gb_s: is nan"),
        ],
    )
    def test_what_cannot_be(self, told: str, words: str) -> None:
        with pytest.raises(InputError, match=words):
            parsed(told)


class TestWorld:
    def test_one_request(self) -> None:
        """Load 500 ms; 25 tokens of prompt, all at once where nobody decodes; 2 of 16."""
        world = served([(Arrival(2.0, 25, 3), "a")])
        (course,) = world.courses.values()
        assert course.first_token_s == pytest.approx(2.5 + 0.025)
        assert course.end_s == pytest.approx(course.first_token_s + 0.032)
        assert dict(world.counts) == {"loads": 1, "evictions": 0, "steps": 2}
        assert not course.hit

    @pytest.mark.parametrize(
        ("prompts", "pieces"),
        [
            ([12], [5, 2, 2, 2, 1]),  # no more than 20 wait: half of 10; no more than 10: a quarter
            ([90], [*[10] * 7, 5, 5, *[2] * 5]),
            ([6, 6], [5, 1, 2, 2, 2]),  # what does not fit beside another waits for a step of its own
            ([3, 2], [2, 1, 2]),
            ([44, 44], [*[10] * 4, 4, 10, 10, 10, 5, 2, 2, 2, 2, 1]),
        ],
    )
    def test_prompts_beside_a_row(self, monkeypatch: pytest.MonkeyPatch, prompts: list[int], pieces: list[int]) -> None:
        """It decodes from 0.51 on; they come meanwhile. Each step takes 16 ms, and each token of theirs 1."""
        monkeypatch.setattr("deltacompress.runtime.engine.policy.portions._FEWEST", 1)
        world = served([(Arrival(0.0, 10, 40), "a"), *((Arrival(0.505, one, 1), "a") for one in prompts)])
        *_, last = world.courses.values()
        assert last.end_s == pytest.approx(0.526 + 0.016 * (len(pieces) - 1) + 0.001 * sum(pieces))

    @pytest.mark.parametrize(("in_line", "pieces"), [(30, [10, 2]), (1, [5, 2, 2, 2, 1])])
    def test_who_waits_for_a_row_waits_too(
        self, monkeypatch: pytest.MonkeyPatch, in_line: int, pieces: list[int]
    ) -> None:
        monkeypatch.setattr("deltacompress.runtime.engine.policy.portions._FEWEST", 1)
        asked = [(Arrival(0.0, 10, 40), "a"), (Arrival(0.505, 12, 1), "a"), (Arrival(0.505, in_line, 1), "a")]
        _, course, _ = served(asked, replace(SETTING, rows=2)).courses.values()
        assert course.end_s == pytest.approx(0.526 + 0.016 * (len(pieces) - 1) + 0.001 * sum(pieces))

    def test_two_variants_at_once(self) -> None:
        """The second load waits for the first; a hit is a variant that is there when its request comes."""
        asked = [(Arrival(0.0, 10, 1), "a"), (Arrival(0.0, 10, 1), "b"), (Arrival(3.0, 10, 1), "b")]
        world = served(asked, replace(SETTING, slots=2))
        assert [one.first_token_s for one in world.courses.values()] == pytest.approx([0.510, 1.010, 3.010])
        assert [one.hit for one in world.courses.values()] == [False, False, True]

    def test_a_cold_variant_behind_a_hot_one(self) -> None:
        """a comes each 50 ms; b waits for those before it and a load, for who skipped past it too, or for the end."""
        hot = [(Arrival(0.05 * number, 1, 20 if number < 2 else 40), "a") for number in range(100)]
        asked = sorted([*hot, (Arrival(0.06, 1, 5), "b")], key=lambda one: one[0].at_s)
        waits = {}
        for skipping in ("preempt", "drain", "free"):
            world = served(asked, replace(SETTING, times=replace(TIMES, kv_tokens=10_000)), skipping)
            parents = [one for one in world.courses.values() if one.variant == "a" and one.arrival.at_s < 0.06]
            (cold,) = (one for one in world.courses.values() if one.variant == "b")
            waits[skipping] = cold.first_token_s - max(one.end_s for one in parents)
        assert waits["preempt"] < 0.5 + 3 * 0.03  # a load, and the steps around it
        assert waits["preempt"] + 0.2 < waits["drain"] < 0.5 + 23 * 0.02
        assert waits["free"] > 5.0

    @pytest.mark.parametrize(
        ("swap_gb_s", "ends", "recomputed"),
        [
            (1.0, [0.570, 0.583], 1),  # a token's KV is 1 MB: there and back 2 ms, to compute it again 1
            (4.0, [0.5735, 0.593], 0),
        ],
    )
    def test_preemption_takes_its_time(self, swap_gb_s: float, ends: list[float], recomputed: int) -> None:
        """Two requests outgrow the KV: at 0.554 they have 14 of 26 tokens each, so the second gives its row.

        Prompts of 10 take 20 ms together, and 17 each to the second and the third token; then 16 for the first alone.
        Then the second computes 13 tokens again, of which the last tells it its own; or 14 tokens are copied in each
        step, 3.5 ms.
        """
        times = replace(TIMES, swap_gb_s=swap_gb_s, kv_tokens=26)
        world = served([(Arrival(0.0, 10, 4), "a")] * 2, replace(SETTING, times=times, rows=2))
        courses = [*world.courses.values()]
        assert [one.first_token_s for one in courses] == pytest.approx([0.520, 0.520])
        assert [one.end_s for one in courses] == pytest.approx(ends)
        assert [one.preempted for one in courses] == [0, 1]
        counted = (world.counts["out_of_kv"], world.counts["preempted"], world.counts["recomputed"])
        assert counted == (1, 0, recomputed)

    @pytest.mark.parametrize(("max_tokens", "asked"), [(50, [50, 50]), (0, [3, 7])])
    def test_how_many_tokens_each_asks_for(
        self, max_tokens: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[int] = []
        submit = Desk.submit

        def noted(self: Desk, *names: str, **rest: Any) -> Any:
            told.append(rest["max_tokens"])
            return submit(self, *names, **rest)

        monkeypatch.setattr(Desk, "submit", noted)
        served([(Arrival(0.0, 6, 3), "a"), (Arrival(0.0, 6, 7), "a")], replace(SETTING, max_tokens=max_tokens))
        assert told == asked

    def test_what_loads_and_prompts_hold_up(self) -> None:
        """a runs, when b comes at 0.53: that step and each prompt's end take 7 and 3 ms longer."""
        times = replace(TIMES, start_ms=3.0, hold_ms=7.0)
        asked = [(Arrival(0.0, 10, 4), "a"), (Arrival(0.53, 10, 1), "b")]
        world = served(asked, replace(SETTING, times=times, slots=2))
        first, second = world.courses.values()
        assert first.first_token_s == pytest.approx(0.5 + 0.013)
        assert first.end_s == pytest.approx(0.513 + 3 * 0.016 + 0.007)  # its third step begins at 0.545
        assert second.first_token_s == pytest.approx(0.545 + 0.5 + 0.013)

    def test_a_load_that_holds_up_longer_than_it_takes(self) -> None:
        """On a CPU nothing else is done meanwhile."""
        times = replace(TIMES, load_ms=5.0, hold_ms=7.0)
        (course,) = served([(Arrival(1.0, 10, 1), "a")], replace(SETTING, times=times)).courses.values()
        assert course.first_token_s == pytest.approx(1.017)


def test_the_figures() -> None:
    courses = [
        Course(Arrival(1.0, 5, 11), "a", hit=True, first_token_s=1.5, end_s=2.5),  # 0.5 s, 100 ms a token
        Course(Arrival(2.0, 5, 11), "a", first_token_s=3.0, end_s=4.05),  # 1.0 s, 105 ms
        Course(Arrival(3.0, 5, 1), "b", first_token_s=4.5, end_s=4.5),  # 1.5 s, of which there are no others
        Course(Arrival(4.0, 5, 1), "b", hit=True, first_token_s=5.0, end_s=5.0),
    ]
    found = figures(courses, Slo(1.0, 100.0))
    assert found == pytest.approx(
        {
            "requests_s": 1.0,
            "tokens_s": 6.0,
            "ttft_mean": 1.0,
            "ttft_p50": 1.0,
            "ttft_p99": 1.5,
            "e2e_mean": 1.5125,
            "e2e_p50": 1.5,
            "e2e_p99": 2.05,
            "attained": 0.5,
            "hits": 0.5,
        }
    )
    many = [Course(Arrival(0.0, 1, 1), "a", first_token_s=number, end_s=number) for number in range(1, 201)]
    assert (figures(many, Slo())["ttft_p50"], figures(many, Slo())["ttft_p99"]) == (101, 199)


@pytest.mark.parametrize(
    ("setting", "slo", "told"),
    [
        (replace(SETTING, rows=0), Slo(), "rows: is 0"),
        (replace(SETTING, slots=0), Slo(), "slots: is 0"),
        (replace(SETTING, chunk=0), Slo(), "chunk: is 0"),
        (SETTING, Slo(first_s=0.0), "slo_ttft_s: is 0"),
        (SETTING, Slo(token_ms=float("nan")), "slo_token_ms: is nan"),
        (replace(SETTING, times=replace(TIMES, kv_tokens=10)), Slo(), "kv_tokens: is 10, and the longest .* takes 16"),
    ],
)
def test_what_cannot_be_simulated(setting: Setting, slo: Slo, told: str) -> None:
    with pytest.raises(InputError, match=told):
        run([Arrival(0.0, 10, 5)], setting, slo, trace="t", popularity="one", variants=1, seed=0)


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = ({"at_s": number / 10, "prompt_tokens": 20, "output_tokens": 5} for number in range(50))
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["bench", "simulate", "--trace", str(trace), "--seconds", "2", "--rate", "20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["requests"] == 40
    assert [row["policy"] for row in data["rows"]] == [name for name, _, _ in POLICIES]
    assert main(["bench", "simulate", "--rate", "3", "--seconds", "5", "--times", "load_ms=10"]) == 0
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--trace", "gamma"], "--rate: gamma needs one"),
        (["--rate", "0"], "--rate: is 0"),
        (["--rate", "1", "--popularity", "none"], "--popularity: no popularity 'none'"),
        (["--rate", "1", "--times", "load_ms=x"], "--times: load_ms=x is no number"),
        (["--rate", "1", "--times", "load_ms=nan"], "--times load_ms: is nan"),
        (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
    ],
)
def test_what_the_verb_refuses(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", *options]) == 2
    assert told in capsys.readouterr().err

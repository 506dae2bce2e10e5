"""Arrivals by chance and from files, and who asks for what."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from deltacompress.bench.traffic.arrivals import Arrival, cut, drawn
from deltacompress.bench.traffic.choice import chosen, following
from deltacompress.bench.traffic.files import read
from deltacompress.bench.traffic.popularity import BURST_LENGTH, assigned
from deltacompress.errors import InputError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAY = "2023-11-16 18:15:"
LINE = '{"at_s": 0.5, "prompt_tokens": 3, "output_tokens": 4}\n'


class TestDrawn:
    @pytest.mark.parametrize("variation", [1.0, 3.0])
    def test_rate_variation_and_lengths(self, variation: float) -> None:
        found = drawn(50.0, 400.0, 7, variation=variation, prompt_tokens=100, output_tokens=20)
        times = [one.at_s for one in found]
        gaps = [after - before for before, after in pairwise(times)]
        assert times == sorted(times)
        assert 0 < times[0] <= times[-1] < 400
        assert len(found) / 400 == pytest.approx(50, rel=0.05)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)
        assert statistics.mean(one.prompt_tokens for one in found) == pytest.approx(100, rel=0.03)
        assert statistics.mean(one.output_tokens for one in found) == pytest.approx(20, rel=0.03)
        assert min(one.output_tokens for one in found) == 1

    def test_a_seed_gives_the_same_again(self) -> None:
        assert drawn(5.0, 20.0, 1) == drawn(5.0, 20.0, 1)
        assert drawn(5.0, 20.0, 1) != drawn(5.0, 20.0, 2)

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"rate": 0.0}, "rate: is 0"),
            ({"rate": float("nan")}, "rate: is nan"),
            ({"seconds": -1.0}, "seconds: is -1"),
            ({"variation": 0.0}, "variation: is 0"),
            ({"prompt_tokens": 0}, "prompt_tokens: a mean of 0 tokens"),
            ({"rate": 1e-9}, "no request comes in 10 s"),
        ],
    )
    def test_what_cannot_be(self, changed: dict[str, float], told: str) -> None:
        with pytest.raises(InputError, match=told):
            drawn(**{"rate": 1.0, "seconds": 10.0, "seed": 0, **changed})  # type: ignore[arg-type]


class TestCut:
    trace = tuple(Arrival(10.0 + 2 * number, number + 1, 5) for number in range(6))  # one each 2 s

    def test_time_is_scaled_and_lengths_stay(self) -> None:
        found = cut(self.trace, 2.0, 1.0, where="t")
        assert found == [Arrival(0.0, 1, 5), Arrival(0.5, 2, 5)]

    def test_a_slow_beginning_has_the_rate_that_is_asked_for(self) -> None:
        slow = [Arrival(at, 1, 1) for at in (0.0, 50.0, 60.0, 61.0, 62.0, 63.0)]
        found = cut(slow, 4.0, 1.0, where="t")
        assert [one.at_s for one in found] == [at / 62 for at in (0, 50, 60, 61)]
        assert [one.at_s for one in cut(slow, 2.0, 1.0, where="t", skip=2)] == [0, 0.5]
        with pytest.raises(InputError, match=r"6 requests within 63.0 s, 4 of which were taken before; 3, for"):
            cut(slow, 2.0, 1.0, where="t", skip=4)
        with pytest.raises(InputError, match="6 of which were taken before; 2, for"):
            cut(slow, 1.0, 1.0, where="t", skip=6)

    def test_as_it_is(self) -> None:
        assert [one.at_s for one in cut(self.trace, None, 10.0, where="t")] == [0, 2, 4, 6, 8]

    @pytest.mark.parametrize(
        ("rate", "seconds", "told"),
        [
            (0.0, 1.0, "rate: is 0"),
            (1.0, 0.0, "seconds: is 0"),
            (None, 10.5, "t: has 6 requests within 10.0 s; 10.5 s are"),
            (2.0, 3.0, "t: has 6 requests within 10.0 s; 7, for 3 s at 2 a second, are"),
        ],
    )
    def test_what_cannot_be(self, rate: float | None, seconds: float, told: str) -> None:
        with pytest.raises(InputError, match=told):
            cut(self.trace, rate, seconds, where="t")

    def test_all_at_once_has_no_rate(self) -> None:
        with pytest.raises(InputError, match="no rate to scale"):
            cut([Arrival(1.0, 1, 1)] * 3, 2.0, 1.0, where="t")


class TestFollowing:
    def test_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        lines = [LINE.replace("0.5", str(at)).replace("3", str(at + 1)) for at in (0, 1, 2, 4, 6, 8)]
        path.write_text("".join(lines))
        assert [one.prompt_tokens for one in chosen(str(path), 1.0, 1.0, 2.0, 0)] == [1, 2]
        assert following(str(path), 1.0, 1.0, 2.0, 3.0, 0) == (
            [Arrival(0, 3, 4), Arrival(1, 5, 4), Arrival(2, 7, 4)],
            2,
        )

    def test_of_a_file_as_it_is(self, tmp_path: Path) -> None:
        """Nobody comes at once: the piece begins where the one before ended, not with its first request."""
        path = tmp_path / "t.jsonl"
        path.write_text("".join(LINE.replace("0.5", str(at)) for at in (1, 2, 4.5, 6, 9)))
        assert [one.at_s for one in chosen(str(path), None, 1.0, 2.5, 0)] == [0, 1]
        rest, count = following(str(path), None, 1.0, 2.5, 4.0, 0)
        assert ([one.at_s for one in rest], count) == ([1.0, 2.5], 2)
        assert following(str(path), None, 1.0, 1.5, 1.0, 0) == ([], 2)
        with pytest.raises(InputError, match=r"5 requests within 8\.0 s; 8\.5 s are"):
            following(str(path), None, 1.0, 2.5, 6.0, 0)

    def test_of_chance(self) -> None:
        whole, before = chosen("poisson", 5.0, 1.0, 30.0, 3), chosen("poisson", 5.0, 1.0, 10.0, 3)
        rest, count = following("poisson", 5.0, 1.0, 10.0, 20.0, 3)
        assert count == len(before) == len(whole) - len(rest)
        assert [one.at_s + 10 for one in rest] == pytest.approx([one.at_s for one in whole[count:]])


class TestFiles:
    def test_azure(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text(HEADER + f"{DAY}46.6805900,374,44\n{DAY}50.9951690,396,109")
        assert read(path) == [Arrival(0.0, 374, 44), Arrival(pytest.approx(4.314579), 396, 109)]

    def test_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(LINE + "\n" + LINE.replace("0.5", "2"))
        assert read(path) == [Arrival(0.5, 3, 4), Arrival(2.0, 3, 4)]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "no column TIMESTAMP"),
            ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
            (HEADER, "holds no requests"),
            (HEADER + f"{DAY}46,374\n", "line 2: 2 columns, the header has 3"),
            (HEADER + "yesterday,1,1\n", "line 2: 'yesterday' is no time"),
            (HEADER + f"{DAY}46,1,1\n{DAY}47+00:00,1,1\n", "line 3: .* is no time"),
            (HEADER + f"{DAY}46,1,1\n{DAY}45,1,1\n", "line 3: comes before the first"),
            (HEADER + f"{DAY}46,1,1\n{DAY}48,1,1\n{DAY}47,1,1\n", "line 4: comes before the line above"),
            (HEADER + f"{DAY}46,,1\n", "line 2: '' is no length"),
            (HEADER + f"{DAY}46,1,0\n", "line 2: '0' is no length"),
            (HEADER + f"{DAY}46,1,-3\n", "line 2: '-3' is no length"),
            (HEADER + f"{DAY}46,1,2.5\n", "line 2: '2.5' is no length"),
            ("{nothing", "line 1: no JSON"),
            ('{"a": ' + "[" * 100_000, "line 1: no JSON"),
            (LINE + "[1]\n", "line 2: no object"),
            ('{"at_s": 1, "prompt_tokens": 3}\n', "line 1: no output_tokens"),
            (LINE.replace("0.5", "-0.5"), "line 1: a time of -0.5 s"),
            (LINE.replace("0.5", "NaN"), "line 1: at_s is nan"),
            (LINE.replace("0.5", "1e999"), "line 1: at_s is inf"),
            (LINE.replace("0.5", "1" * 400), "line 1: at_s is 1111"),
            (LINE.replace("0.5", "true"), "line 1: at_s is True"),
            (LINE + LINE.replace("0.5", "0.4"), "line 2: comes before the line above"),
            (LINE.replace("3", "null"), "line 1: None is no length"),
            (LINE.replace("3", "2.0"), "line 1: 2.0 is no length"),
            (LINE.replace("3", "true"), "line 1: True is no length"),
        ],
    )
    def test_what_is_no_trace(self, text: str, told: str, tmp_path: Path) -> None:
        path = tmp_path / "t"
        path.write_text(text)
        with pytest.raises(InputError, match=told) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such file"):
            read(tmp_path / "nothing")
        with pytest.raises(InputError, match="a directory"):
            read(tmp_path)
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match="no UTF-8 text"):
            read(tmp_path / "bytes")


class TestPopularity:
    def test_shares(self) -> None:
        found = Counter(assigned(60_000, 4, "uniform", 0))
        assert all(found[number] == pytest.approx(15_000, rel=0.05) for number in range(4))
        found = Counter(assigned(60_000, 3, "zipf-1.5", 0))
        total = sum(n**-1.5 for n in (1, 2, 3))
        assert all(found[n - 1] == pytest.approx(60_000 * n**-1.5 / total, rel=0.05) for n in (1, 2, 3))
        assert Counter(assigned(60_000, 2, "zipf-4", 0))[1] == pytest.approx(60_000 / 17, rel=0.05)
        assert assigned(5, 3, "distinct", 0) == [0, 1, 2, 0, 1]
        assert assigned(3, 3, "one", 0) == [0, 0, 0]

    def test_seeds(self) -> None:
        assert assigned(50, 9, "uniform", 1) == assigned(50, 9, "uniform", 1) != assigned(50, 9, "uniform", 2)

    def test_bursts(self) -> None:
        found = assigned(20_000, 1000, "bursts", 3)
        assert found == assigned(20_000, 1000, "bursts", 3) != assigned(20_000, 1000, "bursts", 4)
        assert all(len({*found[at : at + 8]}) <= 8 for at in range(20_000))
        rare = [at for at, number in enumerate(found) if number > 500]  # drawn again by chance hardly ever
        starts = sum(1 for before, at in pairwise([-1000, *rare]) if found[at] != found[before] or at - before > 200)
        assert len(rare) / starts == pytest.approx(BURST_LENGTH, rel=0.25)
        gaps = [after - before for before, after in pairwise(rare) if found[before] == found[after]]
        assert statistics.median(gaps) > 1  # others' requests lie between
        assert found.count(0) > 10 * found.count(20) > 0

    @pytest.mark.parametrize(
        "popularity", ["zip", "zipf", "zipf-", "zipf-x", "zipf-0", "zipf-nan", "zipf--1", "zipf-99"]
    )
    def test_what_there_is_not(self, popularity: str) -> None:
        with pytest.raises(InputError, match="no popularity"):
            assigned(1, 1, popularity, 0)
        with pytest.raises(InputError, match="variants"):
            assigned(1, 0, "one", 0)

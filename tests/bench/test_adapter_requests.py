"""`bench adapter-requests`: who is asked, in what order, how it is counted; answers; what is kept and gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from deltacompress.bench.adapters import coming, rivals, study
from deltacompress.bench.adapters.coming import met, ways
from deltacompress.bench.adapters.loops import GAP, Asker, Lengths, alone, asked_of, closed, row_of
from deltacompress.bench.adapters.rivals import rebuilt
from deltacompress.bench.adapters.served import DIRECTORIES, SYSTEMS, Stand
from deltacompress.bench.adapters.study import TINY, Study, run
from deltacompress.bench.adapters.tables import wrong
from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.serve.records import Record
from deltacompress.bench.synthetic import SHAPE_7B, SHAPE_TINY
from deltacompress.bench.traffic.arrivals import Arrival
from deltacompress.cli.bench import adapters as bench_adapters
from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.runtime.engine.live.engine import Engine, EngineLimits

CPU = torch.device("cpu")
SHORT = Lengths(output=6)
LIMITS = EngineLimits(max_batch=8, prefix_bytes=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    return Stand(tmp_path_factory.mktemp("stand"), SHAPE_TINY, CPU, "auto")


@pytest.fixture
def stand(made: Stand) -> Iterator[Stand]:
    yield made
    made.clear()


class TestRequests:
    def test_adapters_take_turns_and_lengths_are_as_published(self) -> None:
        asked = asked_of(["a", "b", "c"], 400, Lengths(), rate=8.0)
        assert [one.variant for one in asked[:4]] == ["a", "b", "c", "a"]
        prompts = [one.arrival.prompt_tokens for one in asked]
        assert (min(prompts), max(prompts)) == (10, 50)
        assert {one.arrival.output_tokens for one in asked} == {100}
        gaps = [after.arrival.at_s - before.arrival.at_s for before, after in pairwise(asked)]
        assert asked[0].arrival.at_s == 0
        assert min(gaps) > 0
        assert mean(gaps) == pytest.approx(1 / 8, rel=0.15)
        assert mean(gap**2 for gap in gaps) == pytest.approx(2 / 8**2, rel=0.4)  # of an exponential distribution
        assert {one.arrival.at_s for one in asked_of(["a"], 5, Lengths())} == {0.0}
        assert asked == asked_of(["a", "b", "c"], 400, Lengths(), rate=8.0)
        assert asked != asked_of(["a", "b", "c"], 400, Lengths(seed=1), rate=8.0)

    def test_a_closed_loop_never_runs_more_than_asked_and_never_fewer(self, stand: Stand) -> None:
        models = stand.registered(SYSTEMS["lora32"], 3, 8)
        asked = asked_of(models.names, 7, SHORT)
        records, _ = closed(models, asked, LIMITS, 3, 0)
        assert all(one.is_whole and len(one.token_s) == 6 for one in records)
        starts = sorted((one.submitted_s, 1) for one in records)
        ends = [(one.end_s, -1) for one in records]
        running, most = 0, 0
        for _, change in sorted([*starts, *ends]):
            running += change
            most = max(most, running)
        assert most == 3
        assert all(one.asked.arrival.at_s == one.submitted_s for one in records)
        assert sum(at < min(end for end, _ in ends) for at, _ in starts) == 3
        assert all(one.hit for one in records)

    def test_what_is_captured_is_so_before_the_first_request(
        self, stand: Stand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models, took = stand.registered(SYSTEMS["lora32"], 2, 8), []
        monkeypatch.setattr(Engine, "warm", lambda engine: took.append(engine.counts))
        closed(models, asked_of(models.names, 2, SHORT), LIMITS, 2, 0, warm=True)
        assert [(counts.queued, counts.running) for counts in took] == [(0, 0)]

    def test_figures_of_known_requests(self) -> None:
        def record(number: int, at: float, first: float, end: float, tokens: int = 2) -> Record:
            asked = Asked(number, "a", Arrival(at, 10, tokens))
            return Record(asked, at, hit=number == 0, token_s=[first, end], end_s=end, finish="length")

        runs = [[record(0, 0, 1, 2), record(1, 1, 3, 5)], [record(0, 0, 2, 4), record(1, 0, 2, 8)]]
        row = row_of(runs)
        assert (row["requests"], row["repeats"], row["failed"], row["hits"]) == (2, 2, 0, 0.5)
        assert row["spread"]["tokens_s"] == [4 / 8, 4 / 5]
        assert row["spread"]["e2e_mean"] == [3, 6]
        assert row["spread"]["ttft_mean"] == [1.5, 2]
        assert (row["e2e_mean"], row["e2e_p99"], row["ttft_p50"]) == (6, 8, 2)


class TestAnswers:
    def test_in_company_as_alone(self, stand: Stand) -> None:
        models = stand.registered(SYSTEMS["s2"], 5, 8)
        asked = asked_of(models.names, 5, SHORT)
        _, tokens = closed(models, asked, LIMITS, 5, 0, [one.id for one in asked])
        assert [len(one) for one in tokens.values()] == [6] * 5
        assert alone(models, asked, tokens, 0) == {"checked": 5, "alike": 5, "gap": 0.0}
        found = alone(models, asked, {"r0": tokens["r1"]}, 0)
        assert (found["checked"], found["alike"]) == (1, 0)
        assert found["gap"] > GAP
        assert alone(models, asked, {"r0": tokens["r0"][:3]}, 0) == {"checked": 1, "alike": 0, "gap": 0.0}  # it failed
        row = {"system": "s2", "adapters": 5, "load": "closed 5", **found}
        [told] = wrong([row, row | {"gap": GAP}, {"system": "s2"}])
        assert told.startswith("s2, 5, closed 5: WRONG: answered otherwise in company than alone, by ")

    def test_rounding_is_no_error(self, stand: Stand) -> None:
        """The second best token in the place of the best one, where the two are near."""
        models = stand.bare()
        for seed in range(40):
            [one] = asked = asked_of([None], 1, replace(SHORT, output=1, seed=seed))
            _, tokens = closed(models, asked, LIMITS, 1, seed, [one.id])
            from deltacompress.bench.serve.calls import prompt

            ids = prompt(one.arrival.prompt_tokens, SHAPE_TINY.vocabulary, f"{seed} {one.id}")
            last = models.runtime.logits([(None, ids)])[0][-1]
            best, second = last.topk(2).indices.tolist()
            gap = float((last[best] - last[second]) / last.std())
            assert tokens[one.id] == [best]
            if gap < 0.4:
                found = alone(models, asked, {one.id: [second]}, seed)
                assert (found["checked"], found["alike"]) == (1, 0)
                assert found["gap"] == pytest.approx(gap, rel=1e-3)
                return
        pytest.fail("no two tokens were near")


class TestStand:
    def test_names_take_turns_over_kinds_and_directories(self, stand: Stand) -> None:
        models = stand.registered(SYSTEMS["s2"], 9, 4)
        folders = [stand.runtime.variants[name].variant.folder.name for name in models.names]
        assert folders == [f"boft{'' if n % 2 else '64'}-{n // 2 % DIRECTORIES}" for n in range(9)]
        assert len(stand.runtime.cache.residents.by_slot) == 4
        more = stand.registered(SYSTEMS["s2"], 12, 6)
        assert more.names[:9] == models.names
        assert (more.slots, len(stand.runtime.variants)) == (6, 12)
        logits = stand.runtime.logits([(name, [5, 6, 7]) for name in (*models.names[:4], None)])
        assert all(not torch.allclose(one, two) for n, one in enumerate(logits) for two in logits[:n])

    @pytest.mark.parametrize(("system", "published"), [("s1", 0.48), ("s2", 0.72), ("lora64", 0.96), ("lora32", 0.48)])
    def test_sizes_are_those_that_were_published(self, system: str, published: float, stand: Stand) -> None:
        """Of a base of 7 billion, as they count; ours has 6.74."""
        own = Stand.__new__(Stand)
        own.shape = SHAPE_7B
        assert own.share(SYSTEMS[system]) * 6.738 / 7 == pytest.approx(published / 100, abs=1.5e-4)


class TestComing:
    def test_hits_and_misses_are_told_apart(self) -> None:
        def record(first: float, *, hit: bool, finish: str = "length", load: float = 0.0) -> Record:
            asked = Asked(0, "a", Arrival(1.0, 10, 1))
            return Record(asked, hit=hit, token_s=[1 + first], end_s=9, finish=finish, load_s=load)

        some = [record(0.010, hit=True), record(0.020, hit=True), record(0.012, hit=True)]
        some += [record(0.030, hit=False, load=0.02), record(9, hit=False, finish="failed")]
        found = met(some)
        assert (found["requests"], found["failed"], found["hits"], found["misses"]) == (5, 1, 3, 1)
        told = [found[name] for name in ("hit_ms", "miss_ms", "added_ms", "miss_p99_ms", "loading_ms")]
        assert told == pytest.approx([12, 30, 18, 30, 20])
        assert [met(some[:3])[name] for name in ("miss_ms", "added_ms", "loading_ms")] == [None] * 3

    def test_many_adapters_in_little_room(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """None is on the device at first."""
        there = list[int]()

        def replay(models: Any, *given: Any) -> Any:
            there.append(len(models.runtime.cache.residents.by_slot))
            return real(models, *given)

        real = coming.replay
        monkeypatch.setattr(coming, "replay", replay)
        found = coming.many(stand, SYSTEMS["lora32"], 20, 3, 100.0, 0.3, 8, SHORT)
        assert (found["requests"], found["failed"], found["registered"], found["room"]) == (30, 0, 20, 3)
        assert there == [0]
        assert found["misses"] >= 1
        counters = stand.runtime.cache.counters
        assert len(stand.runtime.cache.residents.by_slot) <= 3
        assert counters.loads > counters.evictions > 0

    def test_ways_to_a_first_token(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[str, bool]] = []
        real, warmed = Asker.first_token_s, Mock()

        def first(asker: Asker, name: str) -> float:
            seen.append((name, stand.runtime.variants[name].installed))
            return real(asker, name)

        monkeypatch.setattr(Asker, "first_token_s", first)
        monkeypatch.setattr(Asker, "warm", lambda _: warmed([*stand.runtime.variants]))
        rows = ways(stand, "boft", 2, SHORT)
        assert [there for _, there in seen] == [True, False, True] * 3
        assert [row["way"] for row in rows] == ["load, from the page cache", "from files, once more", "on the device"]
        assert rows[-1]["over_hit_ms"] == 0
        assert [row["over_hit_ms"] for row in rows[:2]] == [
            row["first_token_ms"] - rows[-1]["first_token_ms"] for row in rows[:2]
        ]
        assert not stand.runtime.variants
        warmed.assert_called_once_with(["boft -1"])


class TestRivals:
    def test_rows_of_known_times(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step of the base takes a millisecond a row; a module 0.5 for the layout, 0.25 to turn, 0.125 dense."""
        monkeypatch.setattr(rivals, "_base_ms", lambda _stand, rows: float(rows))
        monkeypatch.setattr(rivals, "rebuilt", lambda *_: (0.5, 0.25))
        monkeypatch.setattr(rivals, "dense", lambda *_: 0.125)
        rows = rivals.rivals(stand, 4, 6)  # two rows for each adapter
        assert [(row["what"], row["rows"], row["ms"], row["set_up_ms"], row["tokens_s"]) for row in rows] == [
            ("merged models in turn, all resident", 8, 8, 0, 1000),
            ("rebuilt per batch", 8, 8 + 8 * 0.25, 8 * 0.5, 800),
            ("dense rotations", 8, 9, 0, pytest.approx(8000 / 9)),
        ]
        assert [row["rows"] for row in rivals.rivals(stand, 6, 4)] == [4] * 3

    def test_the_published_design_turns_by_butterflies(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its rows are those that its blocks as one matrix would give."""
        turned: list[torch.Tensor] = []
        drawn: list[torch.Tensor] = []
        randn = torch.randn

        def draw(*size: Any, **options: Any) -> torch.Tensor:
            drawn.append(randn(*size, **options))
            return drawn[-1]

        def ms(work: Any, _stand: Stand) -> float:
            turned.append(work())
            return 0.0

        monkeypatch.setattr(rivals, "_ms", ms)
        monkeypatch.setattr(torch, "randn", draw)
        rebuilt(stand, 2, 3)
        first, second, x = drawn
        for at, blocks in enumerate((first, second)):
            rotation = torch.eye(128, dtype=torch.float64)
            for factor in range(2):
                whole = torch.block_diag(*blocks[factor].double())
                apart = torch.arange(128).view(-1, 2, 2**factor, 16).transpose(1, 2).flatten()
                shuffle = torch.eye(128, dtype=torch.float64)[apart]
                rotation = rotation @ shuffle.T @ whole @ shuffle
            own = slice(3 * at, 3 * at + 3)
            torch.testing.assert_close(turned[1][own].double(), x[own].double() @ rotation, rtol=1e-4, atol=1e-3)

    def test_peft_serves_as_many(self, stand: Stand) -> None:
        pytest.importorskip("peft")
        from deltacompress.bench.adapters.directories import KINDS
        from deltacompress.bench.adapters.peft_rival import peft_rows

        rows = peft_rows(stand, KINDS["lora32"], [1, 3], 4)
        assert [(row["adapters"], row["rows"], row["what"]) for row in rows] == [
            (1, 4, "PEFT, lora32, adapter_names"),
            (3, 4, "PEFT, lora32, adapter_names"),
        ]
        assert all(row["tokens_s"] == pytest.approx(4000 / row["ms"]) for row in rows)


SMALL = replace(
    TINY, adapters=(2,), at_once=(2,), rates=(), requests=3, repeats=1, checked=1, registered=5, room=2,
    zipf_rate=40.0, zipf_seconds=0.1, times=1, lengths=SHORT,
)  # fmt: skip


class TestStudy:
    def test_what_is_there_is_not_measured_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = ["s1", "zipf"]
        none = run(SMALL, device="cpu", parts=parts, minutes=0, out=tmp_path).to_json()
        assert none["left"] == ["base, 0, closed 2", "s1, 2, closed 2", "zipf, s1, 2", "zipf, lora64, 2"]
        assert none["rows"] == none["zipf"] == []
        first = run(SMALL, device="cpu", parts=parts, out=tmp_path).to_json()
        assert first["left"] == []
        assert [(row["system"], row["adapters"], row["load"], row["requests"]) for row in first["rows"]] == [
            ("base", 0, "closed 2", 3),
            ("s1", 2, "closed 2", 3),
        ]
        base, own = first["rows"]
        assert (base["over_base"], own["over_base"]) == (1, own["tokens_s"] / base["tokens_s"])
        assert (own["checked"], own["alike"]) == (1, 1)
        assert [row["system"] for row in first["zipf"]] == ["s1", "lora64"]

        def never(*_: Any) -> None:
            raise AssertionError("measured again")

        monkeypatch.setattr(study, "Stand", never)
        again = run(SMALL, device="cpu", parts=parts, out=tmp_path).to_json()
        assert (again["rows"], again["zipf"]) == (first["rows"], first["zipf"])
        with pytest.raises(AssertionError, match="measured again"):
            run(replace(SMALL, requests=4), device="cpu", parts=parts, out=tmp_path)
        (kept,) = (one for one in tmp_path.iterdir() if one.stat().st_size)
        kept.write_bytes(kept.read_bytes().replace(b'"tokens_s": ', b'"tokens_s": -', 1))
        with pytest.raises(AssertionError, match="measured again"):
            run(SMALL, device="cpu", parts=parts, out=tmp_path)

    def test_points_of_all_parts(self) -> None:
        asked = Study(adapters=(4, 2, 8), at_once=(1, 3), rates=(5.0,))
        made: Any = None
        keys = [key for key, _ in study._Bench(asked, made).points(["s2", "rivals", "loads"])]
        assert keys == [
            *(
                f"{system}, {count}, {load}"
                for system, count in (("base", 0), ("s2", 2), ("s2", 4), ("s2", 8))
                for load in ("closed 1", "closed 3", "5/s, 3 at most")
            ),
            *("rivals, 2, 3", "rivals, 3, 3", "loads, lora16", "loads, boft"),
        ]

    def test_a_number_of_requests_that_goes_with_those_at_once(self, stand: Stand) -> None:
        bench = study._Bench(replace(SMALL, requests=50, rounds=2), lambda: stand)
        assert bench._closed("base", 0, 3)["requests"] == 6

    @pytest.mark.parametrize("name", ["adapters", "at_once"])
    def test_no_numbers(self, name: str) -> None:
        none: dict[str, Any] = {name: ()}
        too_few: dict[str, Any] = {name: (0, 2)}
        with pytest.raises(InputError, match="names none, or one below 1"):
            replace(Study(), **none).check()
        with pytest.raises(InputError, match="names none, or one below 1"):
            replace(Study(), **too_few).check()
        with pytest.raises(InputError, match="requests a second"):
            replace(Study(), rates=(0.0,)).check()


class TestVerb:
    SHORT = (
        "--adapters",
        "2",
        "--at-once",
        "1",
        "--rates",
        "none",
        "--requests",
        "2",
        "--repeats",
        "1",
        "--device",
        "cpu",
    )

    def test_tables(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert main(["bench", "adapter-requests", *self.SHORT, "--only", "s1, loads", "--out", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert "closed 1" in told
        assert "page" in told
        assert main(["bench", "adapter-requests", *self.SHORT, "--only", "s1", "--out", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(row["system"], row["adapters"]) for row in found["rows"]] == [("base", 0), ("s1", 2)]
        assert (found["loads"], found["left"], found["requests"], found["output_tokens"]) == ([], [], 2, 20)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--only", "s3"], "--only: no part 's3'; give some of s1, s2, lora64, lora32, rivals, peft, zipf, loads"),
            (["--only", ","], "--only: no part ''"),
            (["--adapters", "two"], "--adapters: two is no list of numbers"),
            (["--shape", "huge"], "--shape: no shape 'huge'; give one of tiny, llama-7b"),
            (["--at-once", "0"], "--at-once: names none, or one below 1"),
            (
                ["--at-once", "3,4", "--requests", "3"],
                "--requests: is 3, which cannot be 4 at once; give 4 or more, or",
            ),
            (["--rates", "-1"], "--rates: -1 requests a second"),
            (["--rates", "10,nan"], "--rates: nan requests a second"),
        ],
    )
    def test_what_it_refuses(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "adapter-requests", "--device", "cpu", *options]) == 2
        assert told in " ".join(capsys.readouterr().err.split())

    @pytest.mark.parametrize(("at_once", "requests"), [("3,40", 40), ("3", TINY.requests)])
    def test_there_are_as_many_requests_as_run_at_once(
        self, at_once: str, requests: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def enough(study: Study, **_: Any) -> None:
            asked.append(study.requests)
            raise InputError("enough")

        monkeypatch.setattr(study, "run", enough)
        assert main(["bench", "adapter-requests", "--device", "cpu", "--at-once", at_once]) == 2
        assert asked == [requests]

    def test_the_parts_are_those_of_the_study(self) -> None:
        assert bench_adapters.PARTS == study.PARTS

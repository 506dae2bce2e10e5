"""`bench serve` runs anywhere: every request ends once, its time adds up, and whole models answer as the base."""

from __future__ import annotations

import json
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import given_instead
from ranked import forked

from deltacompress.bench.http.over_http import Load
from deltacompress.bench.serve import models as serving
from deltacompress.bench.serve import steady
from deltacompress.bench.serve.calls import Asked
from deltacompress.bench.serve.models import Models, made, shape_of, start
from deltacompress.bench.serve.records import PHASES
from deltacompress.bench.serve.replay import replay
from deltacompress.bench.serve.run import Setup, run_replay, run_steady
from deltacompress.bench.serve.steady import Steadiness, Steady, back, first_tokens, limits_for, measured
from deltacompress.bench.simulate.run import Slo
from deltacompress.bench.synthetic import SHAPE_TINY, SHAPES
from deltacompress.bench.traffic.arrivals import Arrival, drawn
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.runtime.engine.live.engine import EngineLimits
from deltacompress.runtime.engine.live.events import Counts
from deltacompress.runtime.engine.policy.state import Costs

SHORT = ["--device", "cpu", "--scale", "0.03", "--rate", "25", "--seconds", "1", "--json"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("packed")
    return made(root, shape_of("tiny", "cpu"), "cpu", "auto", variants=3, system="decoupled", slots=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("whole")
    return made(root, shape_of("tiny", "cpu"), "cpu", "auto", variants=2, system="swap", slots=None)


def let_go(models: Models) -> bool:
    """Whether nothing of any call is left."""
    return not any(one.users for one in models.runtime.variants.values()) and not any(
        one.name == "deltacompress-submit" for one in threading.enumerate()
    )


class TestOverHttp:
    def test_as_many_rows_as_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def run(_setup: Setup, load: Load, limits: EngineLimits, **_: object) -> None:
            asked.extend((load.streams, load.calls, limits.max_batch, limits.step_tokens))
            raise InputError("seen")

        monkeypatch.setattr("deltacompress.bench.http.run.run_http", run)
        assert main(["bench", "serve", "--http", "--device", "cpu"]) == 2
        assert asked == [64, 256, 64, 1024]

    def test_the_same_calls_both_ways(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--http", "--device", "cpu", "--scale", "0.05", "--max-batch", "4", "--variants", "2", "--json"]
        assert main(["bench", "serve", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        rows = {row["way"]: row for row in found["rows"]}
        assert list(rows) == ["engine", "HTTP", "HTTP, no model"]
        engine, http, echo = rows.values()
        assert min(row[name] for row in rows.values() for name in ("ttft_ms_median", "tokens_s")) > 0
        assert found["ttft_more_ms"] == http["ttft_ms_median"] - engine["ttft_ms_median"]
        assert found["throughput_ratio"] == http["tokens_s"] / engine["tokens_s"]
        assert found["echo_tokens_s"] == echo["tokens_s"] <= found["echo_offered_tokens_s"] == 16 / 0.02
        sizes = ("streams", "calls", "prompt_tokens", "tokens", "echo_connections", "variants", "max_batch")
        assert [found[name] for name in sizes] == [4, 16, 6, 6, 16, 2, 4]

    def test_calls_take_turns_among_the_models(self) -> None:
        calls = Load(calls=5, prompt_tokens=3, tokens=7).all_calls(["a", "b"], 50)
        assert [one.variant for one in calls] == ["a", "b", "a", "b", "a"]
        assert {(len(one.prompt), one.max_tokens, one.sampling.ignore_eos) for one in calls} == {(3, 7, True)}
        assert len({one.prompt for one in calls}) == 5
        assert Load().scaled(0.5) == Load(prompt_tokens=64, tokens=64, echoed=100)
        for scale in (0.0, 1.5, float("nan")):
            with pytest.raises(InputError, match="scale"):
                Load().scaled(scale)

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            (["--rate", "3"], "--rate: goes with a trace, and --http has none"),
            (["--seconds", "3"], "--seconds: goes with a trace, and --http has none"),
            (["--steady"], "--steady: goes without --http"),
            (["--system", "swap"], "--system: goes with a trace, and --http has none"),
            (["--rows", "2"], "--rows: needs --steady"),
        ],
    )
    def test_what_goes_with_other_ways(self, option: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "serve", "--http", *option]) == 2
        assert told in capsys.readouterr().err


class TestVerb:
    @pytest.mark.parametrize(("system", "slots"), [("decoupled", 2), ("swap", 1)])
    def test_a_trace(self, system: str, slots: int, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--variants", "4", "--slots", str(slots), "--seed", "3", "--system", system, "--simulate-check"]
        assert main(["bench", "serve", *given_instead(SHORT, "--seconds", "2"), *options]) == 0
        found = json.loads(capsys.readouterr().out)
        arrivals = drawn(25, 2, 3)
        named = [f"v{number}" for number in assigned(len(arrivals), 4, "zipf-1.5", 3)]
        assert [(row["id"], row["variant"], row["at_s"]) for row in found["records"]] == [
            (f"r{number}", name, one.at_s) for number, (name, one) in enumerate(zip(named, arrivals, strict=True))
        ]
        assert [row["prompt_tokens"] for row in found["records"]] == [
            max(1, round(one.prompt_tokens * 0.03)) for one in arrivals
        ]
        for row in found["records"]:
            assert (row["finish"], row["tokens"]) == ("length", row["output_tokens"])
            assert sum(row[phase] for phase in PHASES) == pytest.approx(row["end_s"] - row["at_s"])
            assert min(row[phase] for phase in PHASES) > -1e-9
        [told] = found["rows"]
        self._check_figures(found, told)
        assert (told["system"], told["failed"]) == (system, 0)
        assert told["loads"] >= len(set(named))  # it begins with none on the device
        assert told["loads"] - told["evictions"] <= slots
        assert [row["what"] for row in found["check"]] == ["e2e_mean", "ttft_mean"]
        for row in found["check"]:
            assert row["measured"] == told[row["what"]]
            assert row["ratio"] == pytest.approx(row["simulated"] / row["measured"])
        assert found["times"]["load_ms"] == told["load_ms"] > 0
        head = ("trace", "popularity", "seed", "scale", "system", "variants", "slots", "max_batch", "step_tokens")
        assert [found[key] for key in head] == ["poisson", "zipf-1.5", 3, 0.03, system, 4, slots, 128, 1024]

    @staticmethod
    def _check_figures(found: dict[str, Any], told: dict[str, Any]) -> None:
        rows = found["records"]
        span = max(row["end_s"] for row in rows) - min(row["at_s"] for row in rows)
        assert told["requests_s"] == pytest.approx(len(rows) / span)
        assert told["tokens_s"] == pytest.approx(sum(row["tokens"] for row in rows) / span)
        assert told["e2e_mean"] == pytest.approx(sum(row["end_s"] - row["at_s"] for row in rows) / len(rows))
        firsts = [row["queue_s"] + row["load_s"] + row["prefill_s"] for row in rows]  # none gave way before it
        assert told["ttft_mean"] == pytest.approx(sum(firsts) / len(rows))

    def test_steady(self, capsys: pytest.CaptureFixture[str]) -> None:
        short = ["--steps", "4", "--seconds", "0.3", "--long-tokens", "150", "--known-tokens", "200"]
        assert main(["bench", "serve", "--steady", "--device", "cpu", "--variants", "2", "--rows", "2", *short]) == 0
        told = capsys.readouterr().out
        assert told.index("ratio") < told.index("step ms")
        assert "while prompts of 150 come at 4/s" in " ".join(told.split())
        assert "device" in told

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ([], "--rate: poisson needs one"),
            (["--steady", "--scale", "0.5"], "--scale: goes with a trace, and --steady has none; leave it out"),
            (["--steady", "--simulate-check"], "--simulate-check: goes with a trace"),
            (["--steady", "--slo-ttft-s", "5"], "--slo-ttft-s: goes with a trace"),
            (["--http", "--slo-token-ms", "nan"], "--slo-token-ms: goes with a trace"),
            (["--http", "--seed", "1"], "--seed: goes with a trace"),
            (["--steady", "--variation", "2"], "--variation: goes with a trace"),
            (["--capacity", "--step-tokens", "64"], "--step-tokens: goes with a trace"),
            (["--capacity", "--prefix-cache", "64"], "--prefix-cache: goes with a trace"),
            (["--rate", "1", "--rows", "2"], "--rows: needs --steady; add that"),
            (["--rate", "1", "--scale", "2"], "--scale: is 2"),
            (["--rate", "1", "--popularity", "all"], "--popularity: no popularity 'all'"),
            (["--rate", "1", "--slo-ttft-s", "0"], "--slo-ttft-s: is 0"),
            (["--rate", "1", "--shape", "huge"], "--shape: no shape 'huge'; give one of tiny, llama-7b"),
            (["--rate", "1", "--shape", "qwen3-30b-a3b"], "--shape: no shape 'qwen3-30b-a3b'"),
            (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
            (["--steady", "--rate", "0"], "--rate: is 0"),
            (["--steady", "--steps", "2000"], "takes 10248 tokens, and the context is 4096"),
        ],
    )
    def test_what_it_refuses(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "serve", "--device", "cpu", *options]) == 2
        assert told in capsys.readouterr().err

    def test_too_short_to_simulate(self, capsys: pytest.CaptureFixture[str]) -> None:
        short = [*SHORT[:2], "--scale", "0.001", "--rate", "8", "--seconds", "0.5", "--variants", "1"]
        assert main(["bench", "serve", *short, "--simulate-check"]) == 2
        assert "--simulate-check: " in capsys.readouterr().err


class TestReplay:
    def test_in_real_time(self, packed: Models) -> None:
        """Nothing is submitted before its time; a variant that is there is a hit; the others are waited for."""
        start(packed)
        assert not packed.runtime.cache.residents.by_slot
        packed.runtime.cache.acquire(["v0"])
        packed.runtime.cache.release(["v0"])
        wanted = [("v0", 0.0), ("v1", 0.2), (None, 0.3)]
        asked = [Asked(number, name, Arrival(at_s, 20, 4)) for number, (name, at_s) in enumerate(wanted)]
        records, _ = replay(packed, asked, EngineLimits(), 0)
        assert [one.asked for one in records] == asked
        for record in records:
            assert record.submitted_s >= record.asked.arrival.at_s
            assert len(record.token_s) == 4
            assert record.finish == "length"
        assert [one.hit for one in records[:2]] == [True, False]
        assert [one.load_s > 0 for one in records] == [False, True, False]
        assert let_go(packed)

    def test_steps_have_the_tokens_that_the_engine_computed(self, packed: Models) -> None:
        """Of a prompt of 13 beside one that decodes, in pieces of 8."""
        start(packed)
        asked = [Asked(0, None, Arrival(0.0, 9, 400)), Asked(1, None, Arrival(0.1, 13, 2))]
        _, steps = replay(packed, asked, EngineLimits(step_tokens=8), 0)
        assert [one.prompt_tokens for one in steps if one.prompt_tokens] == [9, 8, 5]

    def test_who_gives_way(self, packed: Models) -> None:
        """One slot: hot requests skip past a cold one, and give way when the one before it has ended."""
        start(packed)
        packed.runtime.cache.residents.slots = 1
        try:
            hot = [Asked(number, "v0", Arrival(0.0, 4, 60)) for number in (0, *range(2, 5))]
            long = [Asked(one.number, "v0", Arrival(0.002 * one.number, 4, 400)) for one in hot[1:]]
            asked = [hot[0], Asked(1, "v1", Arrival(0.001, 4, 5)), *long]
            records, _ = replay(packed, asked, EngineLimits(), 0)
        finally:
            packed.runtime.cache.residents.slots = packed.slots
        cold = records[1]
        gone = [one for one in records[2:] if one.preempted]
        assert gone
        for record in records:
            assert (record.finish, len(record.token_s)) == ("length", record.asked.arrival.output_tokens)
            assert record.spent["preempted_s"] == pytest.approx(0, abs=1e-9) or record.preempted
        for record in gone:
            assert record.end_s > cold.end_s
            # which has the slot meanwhile; its last token is told in the step that gives the slot to others
            assert record.spent["preempted_s"] >= cold.token_s[-2] - cold.token_s[0]
            # the token before the gap was told at the end of the step in which it gave way
            at = record.gaps_s.index(max(record.gaps_s))
            assert (
                record.spent["preempted_s"]
                < sum(record.gaps_s[max(at - 1, 0) : at + 1]) + record.spent["queue_s"] + 1e-3
            )

    def test_one_that_cannot_be_served(self, packed: Models) -> None:
        asked = [Asked(0, "v0", Arrival(0.0, 20, 4000)), Asked(1, "v0", Arrival(0.1, 5000, 4))]
        with pytest.raises(InputError, match="5000 tokens, the context of variant v0 is 4096"):
            replay(packed, asked, EngineLimits(), 0)
        assert let_go(packed)

    def test_where_a_step_breaks_nobody_goes_on_submitting(
        self, packed: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_engine: object) -> bool:
            raise RuntimeError("broken")

        monkeypatch.setattr(steady.Engine, "step", broken)
        asked = [Asked(0, "v0", Arrival(0.0, 20, 4)), Asked(1, "v0", Arrival(600.0, 20, 4))]
        with pytest.raises(RuntimeError, match="broken"):
            replay(packed, asked, EngineLimits(), 0)
        assert let_go(packed)

    def test_lengths_are_cut_to_the_context(self) -> None:
        setup = Setup("cpu", variants=1)
        arrivals = [Arrival(0.0, 4090, 8), Arrival(0.1, 50, 60)]
        found = run_replay(
            setup, arrivals, EngineLimits(), Slo(), trace="two", popularity="one", seed=0, scale=1.0
        ).to_json()
        assert (found["cut_to_context"], found["requests"], found["trace"]) == (1, 2, "two")
        assert [row["prompt_tokens"] for row in found["records"]] == [4088, 50]
        assert found["prompt_tokens_mean"] == 2069


class TestSteady:
    def test_over_two_devices(self) -> None:
        asked = Steadiness(steps=2, every=1, seconds=0.2, long_tokens=40, known_tokens=40, times=1)
        with forked() as others:
            found = run_steady(Setup("cpu", variants=2, tp=2), asked).to_json()
            assert len(others) == 1
            assert not others[0].is_alive
        assert found["backend"].endswith(", over 2 devices")
        assert found["rows"] == 2

    def test_by_a_known_clock(self, packed: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        """It goes on by 1 ms each time it is read: twice a step, and once for each token of one."""
        ticks = count()
        monkeypatch.setattr(steady.time, "perf_counter", lambda: next(ticks) * 1e-3)
        firsts = {None: (4.0, 1.0), "v0": (2.0, 1.0)}
        monkeypatch.setattr(steady, "first_tokens", lambda _models, name, *_: firsts[name])
        asked = Steadiness(rows=2, steps=5, seconds=0.4, rate=20, long_tokens=150, known_tokens=130, times=2)
        monkeypatch.setattr(steady, "free_host_bytes", lambda: 4 << 20)
        assert limits_for(packed, asked, 512, 0, 1).swap_bytes == 1 << 20
        monkeypatch.setattr(steady, "free_host_bytes", lambda: 9 << 30)
        limits = limits_for(packed, asked, 512, 1 << 30, 1)
        assert limits.max_batch >= 4
        assert (limits.swap_bytes, limits_for(packed, asked, 512, 0, 2).swap_bytes) == (2 << 30, 0)
        backs = {limits.swap_bytes: (0.5, 40e9), 0: (2.0, 0.0)}
        monkeypatch.setattr(steady, "back", lambda _models, name, _, limits: backs[limits.swap_bytes])
        ratios, times = measured(packed, asked, limits)
        assert (times["rows"], times["step_ms"], times["step_median_ms"]) == (4, pytest.approx(5), pytest.approx(5))
        assert times["tokens_s"] == pytest.approx(4 / 5e-3)
        # in two of ten steps one enters and gets two tokens, one leaves and gets none: 5 ms, or 6 where it got one
        assert times["changing_step_ms"] == pytest.approx(5, abs=0.5)
        assert 6 <= times["long_prompts"] <= 9
        named = [(row["what"].partition(",")[0].partition(" while")[0], row["of"]) for row in ratios]
        assert named == [
            ("step", "mean"),
            *(("between tokens", which) for which in ("p50", "p99", "max")),
            ("first token", "median"),
            ("first token", "median"),
            ("back after giving way", "median"),
        ]
        assert ratios[0]["ratio"] == pytest.approx(times["changing_step_ms"] / 5)
        p50, p99, most = (row["ratio"] for row in ratios[1:4])
        assert [(row["what"][-4:], row["ratio"]) for row in ratios[4:6]] == [("base", 0.25), (", v0", 0.5)]
        assert (ratios[6]["ratio"], times["back_ms"], times["back_computed_ms"]) == (0.25, 500, 2000)
        assert times["swap_gb_s"] == 40
        assert (times["first_token_base_ms"], times["prompt_tokens_s_v0"]) == (4000, 65)
        assert 1 <= p50 <= p99 <= most == pytest.approx(times["between_tokens_max_ms"] / 5)
        assert let_go(packed)

    def test_who_comes_and_goes(self, packed: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        """The oldest leaves, one of its variant enters: as many rows of each as before."""
        gone: list[str] = []
        cancel = steady.Engine.cancel
        monkeypatch.setattr(steady.Engine, "cancel", lambda self, call: gone.append(call) or cancel(self, call))
        asked = Steadiness(rows=2)
        flow = Steady(packed, asked, limits_for(packed, asked, 512, 0, 1))
        try:
            assert gone == [f"steady {number}" for number in range(4)]  # before anything is timed
            flow.steps(10)
            assert len(gone) == 4
            flow.steps(21, every=10)
            assert gone[4:] == ["steady 4", "steady 5", "steady 6"]
            flow.steps(2)
            steady_ended = {call for call in flow.flow.ended if call.startswith("steady")}
            assert (flow.rows, steady_ended) == (4, set(gone))
            running = packed.runtime.variants
            assert [running[name].users for name in ("v0", "v1")] == [2, 2]
        finally:
            flow.close()
        assert let_go(packed)

    def test_known_prompts_are_not_computed_again(self, packed: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[int, int]] = []
        close = steady.Engine.close

        def closed(self: Any) -> None:
            seen.append((self.counts.prompt_tokens, self.counts.known_tokens))
            close(self)

        monkeypatch.setattr(steady.Engine, "close", closed)
        asked = Steadiness(known_tokens=200, times=3)
        first_tokens(packed, "v1", asked, EngineLimits(step_tokens=64))
        assert seen == [(2 * 7 * 200, 7 * 192)]  # whole pages of 16; four more than are timed

    @pytest.mark.parametrize("swap", [1 << 25, 0])
    def test_who_gives_way_comes_back(self, packed: Models, monkeypatch: pytest.MonkeyPatch, swap: int) -> None:
        """Once for each time, by way of the host or computed again, before its own answer ends."""
        costs = Costs(1.0, 0.1, 1.0)
        monkeypatch.setattr("deltacompress.runtime.engine.steps.pace.Pace.costs", lambda *_: costs)
        seen: list[Counts] = []
        close = steady.Engine.close

        def closed(self: Any) -> None:
            seen.append(self.counts)
            close(self)

        monkeypatch.setattr(steady.Engine, "close", closed)
        asked = Steadiness(known_tokens=200, times=3)
        seconds, rate = back(packed, "v1", asked, EngineLimits(step_tokens=64, swap_bytes=swap))
        assert seconds > 0
        assert (rate > 0) == (swap > 0)
        assert [(one.preempted, one.swapped) for one in seen] == [(5, 5 if swap else 0)]
        assert let_go(packed)

    def test_what_cannot_be(self) -> None:
        for wrong, told in (
            (Steadiness(rows=0), "rows: is 0"),
            (Steadiness(every=0), "every: is 0"),
            (Steadiness(seconds=0), "seconds: is 0"),
            (Steadiness(long_tokens=4089), "takes 4097 tokens"),
            (Steadiness(known_tokens=4096), "takes 4120 tokens"),
        ):
            with pytest.raises(InputError, match=told):
                wrong.check(4096)
        Steadiness(long_tokens=4088, known_tokens=4072).check(4096)


class TestWholeModels:
    def test_they_are_the_base(self, whole: Models) -> None:
        runtime = whole.runtime
        assert whole.slots == 1
        [ours] = runtime.logits([(None, [5, 6, 7, 8])])
        for name in whole.names:
            [own] = runtime.logits([(name, [5, 6, 7, 8])])
            torch.testing.assert_close(own, ours)

    def test_each_has_all_of_its_bytes(self, whole: Models) -> None:
        """In fp32, but for the table, which stays bf16."""
        weights = sum(torch.Size(shape).numel() for _, shape in SHAPE_TINY.tensors().values())
        table = 256 * 128
        for loaded in whole.runtime.variants.values():
            assert loaded.nbytes == whole.variant_bytes == 4 * (weights - table) + 2 * table
        one, two = (whole.runtime.variants[name].variant for name in whole.names)
        assert one.identity != two.identity
        path = one.paths()[0]
        assert one.operand(path).tensors.keys() == two.operand(path).tensors.keys()  # type: ignore[union-attr]
        for name, tensor in one.operand(path).tensors.items():  # type: ignore[union-attr]
            assert tensor.data_ptr() != two.operand(path).tensors[name].data_ptr()  # type: ignore[union-attr]


def test_shapes() -> None:
    assert shape_of(None, "cpu") == shape_of("tiny", "cpu")
    assert shape_of("llama-7b", "cpu").hidden == SHAPES["llama-7b"].hidden
    assert shape_of("tiny", "cpu").context == serving.CONTEXT


@pytest.mark.parametrize(("field", "value"), [("variants", 0), ("slots", 0), ("tp", 0)])
def test_setups(field: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{field}: is 0"):
        Setup(**{field: value}).check()


def test_whole_models_are_on_one_device() -> None:
    with pytest.raises(InputError, match="tp: is for packed deltas; leave it out"):
        Setup("cpu", system="swap", tp=2).check()


def test_no_more_slots_than_variants(tmp_path: Path) -> None:
    found = made(tmp_path, shape_of("tiny", "cpu"), "cpu", "auto", variants=2, system="decoupled", slots=5)
    assert found.slots == 2

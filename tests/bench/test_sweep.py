"""Choosing by the simulator: what is cheapest, what does not fit, how near a profile is on the rest of its trace."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deltacompress.bench.simulate.rest import _slots, after, times_of
from deltacompress.bench.simulate.sweep import CHUNKS, ROWS, WORTH, Choice, Problem, Room
from deltacompress.bench.simulate.times import Times
from deltacompress.bench.traffic.arrivals import Arrival, drawn
from deltacompress.bench.traffic.popularity import assigned
from deltacompress.cli.main import main
from deltacompress.errors import InputError
from deltacompress.serving.profile import Profile, Traffic

# a step takes 10 ms, 1 for each row, 3 for each variant; a token of a prompt 1; a load 500
TIMES = Times(10.0, 1.0, 0.0, 3.0, 1000.0, 500.0, 1e-9, 100, 1000)
FREE = Room(None, 1000)


def problem(count: int = 4, room: Room = FREE, times: Times = TIMES) -> Problem:
    """So many requests of 10 and 5 tokens at once, each for a variant of its own."""
    return Problem([(Arrival(0.0, 10, 5), f"v{number}") for number in range(count)], times, room, count)


def profile(**changes: Any) -> Profile:
    """One of a tiny base; its times are TIMES."""
    traffic = Traffic(
        trace="poisson", rate=4.0, variation=4.0, seconds=5.0, popularity="zipf-1.5", variants=3, seed=7, scale=0.1
    )
    known: dict[str, Any] = {
        "version": "0.1.0", "device": "CPU", "backend": "reference", "date": "2026-11-24", "base": {"hidden_size": 8},
        "recipe": "int2-24", "slots": 1, "max_batch": 4, "step_tokens": 256, "variant_bytes": 1000, "room_bytes": None,
        "times": asdict(TIMES), "traffic": traffic, "runs": (),
    }  # fmt: skip
    return Profile(**{**known, **changes})


class TestProblem:
    def test_one_request(self) -> None:
        """A load; its prompt; four more tokens."""
        assert problem(1).mean_s(Choice(1, 4, 128)) == pytest.approx(0.5 + 0.010 + 4 * 0.014)

    def test_slots_that_are_worth_their_load(self) -> None:
        """With one, each waits for who came before it to end before its load begins; else for the loads alone."""
        one, two, four = (problem().mean_s(Choice(slots, 4, 128)) for slots in (1, 2, 4))
        assert one == pytest.approx(2.5 * 0.566)
        assert two == pytest.approx(four) == pytest.approx(2.5 * 0.5 + 0.066)

    def test_what_does_not_fit(self) -> None:
        """Two variants leave 2,000 bytes, 20 tokens; three 10, and a request takes 16."""
        room = Room(4000, 1000)
        assert [room.kv_tokens(slots, 100) for slots in (1, 2, 4, 5)] == [30, 20, 0, -10]
        costs = [problem(room=room).mean_s(Choice(slots, 4, 128)) for slots in (1, 2, 3, 4)]
        assert [one < float("inf") for one in costs] == [True, True, False, False]
        assert problem(room=Room(2600, 1000)).mean_s(Choice(1, 4, 128)) < float("inf")
        assert problem(room=Room(2599, 1000)).mean_s(Choice(1, 4, 128)) == float("inf")

    def test_every_one(self) -> None:
        every = list(problem(6).every())
        assert {one.slots for one in every} == {1, 2, 4, 6}
        assert len(every) == len({*every}) == 4 * len(ROWS) * len(CHUNKS)

    def test_climbing(self) -> None:
        """To the best of all, but for what is noise; of equals the smallest."""
        own = problem()
        found = own.climbed(Choice(1, 64, 512))
        assert own.mean_s(found) * (1 - WORTH) <= min(map(own.mean_s, own.every()))
        assert found == Choice(2, 64, 512)  # neither more slots, rows nor tokens would change anything
        assert own.climbed(found) == found
        assert problem(room=Room(4000, 1000)).climbed(Choice(4, 64, 512)).slots in (1, 2)

    def test_a_change_that_is_not_worth_it(self) -> None:
        own = problem(1, times=replace(TIMES, base_ms=1e-3, row_ms=0.0, variant_ms=0.0, prefill_tokens_s=1e6))
        assert own.climbed(Choice(1, 256, 2048)) == Choice(1, 256, 2048)

    def test_a_hundredth_is_not_worth_it(self) -> None:
        """Beside a row a prompt of 500 takes four steps or one, 42 ms beside a load of 0.5 or 100 s."""
        for load_ms, chunk in ((500.0, 2048), (100_000.0, 128)):
            times = replace(TIMES, load_ms=load_ms, prefill_tokens_s=1e6)
            asked = [(Arrival(0.0, 10, 50), "v0"), (Arrival(load_ms / 1e3 + 0.005, 500, 1), "v0")]
            own = Problem(asked, times, FREE, 1)
            assert own.climbed(Choice(1, 4, 128)) == Choice(1, 4, chunk)


class TestRest:
    def test_what_the_profile_has_not_seen(self) -> None:
        """The same requests and variants as a longer run's, from the end of the piece on."""
        found = after(profile(), None, 6.0)
        arrivals = drawn(4.0, 11.0, 7)
        numbers = assigned(len(arrivals), 3, "zipf-1.5", 7)
        late = [(one, number) for one, number in zip(arrivals, numbers, strict=True) if one.at_s >= 5.0]
        assert [variant for _, variant in found] == [f"v{number}" for _, number in late]
        assert [one.at_s for one, _ in found] == pytest.approx([one.at_s - 5.0 for one, _ in late])
        assert [one.prompt_tokens for one, _ in found] == [max(1, round(one.prompt_tokens * 0.1)) for one, _ in late]

    def test_another_trace(self, tmp_path: Path) -> None:
        tuned = profile(traffic=profile().traffic.model_copy(update={"trace": "a.jsonl", "rate": None}))
        for other in (None, "poisson", str(tmp_path / "b.jsonl")):
            with pytest.raises(InputError, match=r"trace: the profile was made with a\.jsonl"):
                after(tuned, other, 6.0)
        path = tmp_path / "a.jsonl"
        lines = ({"at_s": number, "prompt_tokens": 20, "output_tokens": 5} for number in range(50))
        path.write_text("\n".join(map(json.dumps, lines)))
        assert [one.at_s for one, _ in after(tuned, str(path), 4.0)] == [0.0, 1.0, 2.0, 3.0]

    def test_times(self) -> None:
        assert times_of(profile()) == TIMES
        with pytest.raises(InputError, match="its times cannot be read"):
            times_of(profile(times={"base": 1.0}))
        with pytest.raises(InputError, match="base_ms: is 0"):
            times_of(profile(times={"base_ms": 0.0}))

    @pytest.mark.parametrize(("room", "slots"), [(4_000, 2), (3_999, 1), (100, 1), (1_000_000, 3)])
    def test_the_default_is_what_a_server_does(self, room: int, slots: int) -> None:
        """Of variants of 1000 bytes each."""
        assert _slots(profile(room_bytes=room)) == slots

    def test_the_verb(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "p.json"
        profile().write(path)
        assert main(["bench", "sweep", str(path), "--seconds", "2", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        best, own, default = data["rows"]
        assert [row["what"] for row in data["rows"]] == ["best of the sweep", "profile", "default"]
        assert (own["slots"], own["max_batch"], own["step_tokens"]) == (1, 4, 256)
        assert (default["slots"], default["max_batch"], default["step_tokens"]) == (3, 128, 1024)
        for row in data["rows"]:
            assert row["ratio"] == pytest.approx(row["e2e_mean"] / best["e2e_mean"])
            assert row["ratio"] >= 1.0
        whole = problem_of(2.0)
        assert own["e2e_mean"] == pytest.approx(whole.mean_s(Choice(1, 4, 256)))
        assert best["e2e_mean"] == pytest.approx(min(map(whole.mean_s, whole.every())))
        assert data["settings"] == 3 * len(ROWS) * len(CHUNKS)


def problem_of(seconds: float) -> Problem:
    return Problem(after(profile(), None, seconds), TIMES, Room(None, 1000), 3)

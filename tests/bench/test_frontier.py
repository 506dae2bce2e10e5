"""`bench frontier`: sketches against their definitions, the grid of measurements, what is kept, table and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from demo_pair.data import write_task
from pairs import Pair, Recorder, files_of

from deltacompress.bench.frontier import run as frontier
from deltacompress.bench.frontier import subjects
from deltacompress.bench.frontier.methods import chosen, points
from deltacompress.bench.frontier.picture import draw
from deltacompress.bench.frontier.sketches import SKETCHES, _sparsities, by_variance
from deltacompress.bench.frontier.table import frontier as unbeaten
from deltacompress.bench.frontier.table import means, predictions, to_markdown
from deltacompress.bench.pairs import run as bench_pairs
from deltacompress.budget import run as budget
from deltacompress.budget import target
from deltacompress.budget.measuring.measured import Walked
from deltacompress.budget.measuring.walk import walk
from deltacompress.budget.rungs import template
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import CalibrationSpec
from deltacompress.demo.score import read_task
from deltacompress.errors import InputError, Interrupted

TASK = "palindrome"


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def delta() -> torch.Tensor:
    return torch.randn(96, 160, generator=torch.Generator().manual_seed(1)) * 0.01


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize("bits", [1.3, 2.5, 4.0])
def test_a_sketch_spends_what_it_may_and_not_much_less(name: str, bits: float, delta: torch.Tensor) -> None:
    found = SKETCHES[name](delta, bits * delta.numel(), chance())
    assert found is not None
    assert found.values.shape == delta.shape
    # a singular vector more in fp16; of ultradelta, where all is kept, a grid of twice as many values
    step = 16 * sum(delta.shape) if name != "ultradelta" else 1.1 * delta.numel()
    assert bits * delta.numel() - step <= found.bits <= bits * delta.numel()


@pytest.mark.parametrize("name", SKETCHES)
def test_a_sketch_of_too_few_bits_is_none(name: str, delta: torch.Tensor) -> None:
    assert SKETCHES[name](delta, 1.0, chance()) is None


@pytest.mark.parametrize("name", ["svd", "delta-come", "sign+svd", "largest"])
def test_more_bits_lose_less(name: str, delta: torch.Tensor) -> None:
    errors = []
    for bits in (1.3, 2.5, 5.0):
        found = SKETCHES[name](delta, bits * delta.numel(), chance())
        assert found is not None
        errors.append(float((found.values - delta).square().sum()))
    assert errors[0] > errors[1] > errors[2]


def test_svd_is_the_best_of_its_rank(delta: torch.Tensor) -> None:
    """Eckart and Young: what is lost is the energy of the singular values that are left out."""
    found = SKETCHES["svd"](delta, 10.5 * 16 * (96 + 160), chance())
    assert found is not None
    values = torch.linalg.svdvals(delta.double())
    assert float((found.values - delta).square().sum()) == pytest.approx(float(values[10:].square().sum()), rel=1e-3)


def test_delta_come_gives_its_first_vectors_more_bits(delta: torch.Tensor) -> None:
    vector = 96 + 160
    grids = 16 * 3  # scales: one group of 96 elements, two of 160
    first = SKETCHES["delta-come"](delta, 8 * vector + grids + 8 * 3, chance())
    assert first is not None
    assert first.bits == 8 * vector + grids + 8 * 3
    left, values, right = torch.linalg.svd(delta)
    best = values[0] * torch.outer(left[:, 0], right[0])
    assert float((first.values - best).norm() / best.norm()) < 0.02
    three = SKETCHES["delta-come"](delta, 2 * first.bits + 3 * vector + grids + 3 * 3, chance())
    assert three is not None
    assert three.bits == 2 * first.bits + 3 * vector + grids + 3 * 3
    most = SKETCHES["delta-come"](delta, 1e9, chance())
    assert most is not None
    assert most.bits == 2 * first.bits + 32 * (3 * (vector + 3) + grids) + (96 - 34) * (2 * (vector + 3) + grids)


def test_sign_and_scale_take_one_bit_and_low_rank_the_rest(delta: torch.Tensor) -> None:
    least = delta.numel() + 16 * len(delta)
    found = SKETCHES["sign+svd"](delta, least, chance())
    assert found is not None
    assert found.bits == least
    expected = delta.sign() * delta.abs().mean(1, keepdim=True)
    torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=0)
    more = SKETCHES["sign+svd"](delta, least + 16 * (96 + 160), chance())
    assert more is not None
    assert torch.linalg.matrix_rank(more.values - found.values, rtol=1e-3) == 1


def test_dare_is_right_on_average() -> None:
    delta = torch.full((64, 4096), 0.5)
    found = SKETCHES["dare"](delta, 2.0 * delta.numel(), chance())
    assert found is not None
    kept = int((found.values != 0).sum())
    assert kept == (2 * delta.numel() - 16 * 64) // 4
    assert found.bits == 4 * kept + 16 * 64
    assert float(found.values.mean()) == pytest.approx(0.5, rel=1e-3)
    assert float(found.values[:32].mean()) == pytest.approx(0.5, rel=0.02)


def test_largest_keeps_the_largest(delta: torch.Tensor) -> None:
    found = SKETCHES["largest"](delta, 2.0 * delta.numel(), chance())
    assert found is not None
    kept = found.values != 0
    share = float(kept.float().mean())
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert found.bits == pytest.approx(delta.numel() * (entropy + 4 * share) + 16 * 96, rel=0.02)
    assert float(delta[kept].abs().min()) >= float(delta[~kept].abs().max()) * 0.9  # some are rounded to zero
    step = (delta * kept).abs().amax(1, keepdim=True) / 7
    assert bool(((found.values - delta)[kept].abs() <= (step * 0.51).expand_as(delta)[kept]).all())


def test_impart_is_right_on_average(delta: torch.Tensor) -> None:
    """An element that is kept is scaled up by its vector's share: the vectors that are kept come out as long."""
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    values = values * 0.9 ** torch.arange(96)
    steep = left * values @ right
    found = [SKETCHES["impart"](steep, 0.5 * steep.numel(), torch.Generator().manual_seed(k)) for k in range(60)]
    mean = torch.stack([one.values for one in found if one is not None]).mean(0)
    along = (left.T @ mean @ right.T).diagonal() / values
    torch.testing.assert_close(along[:7], torch.ones(7), rtol=0, atol=0.1)
    assert float(along[20:30].abs().max()) < 0.1  # these went whole, before any was thinned


def test_impart_leaves_out_fewer_vectors_where_all_bits_would_not_be_spent(delta: torch.Tensor) -> None:
    vector, grids = 96 + 160, 16 * 3  # one group of 96 elements, two of 160
    first = 2 * (8 * vector + grids + 8 * 3) + 18 * (3 * vector + grids + 3 * 3)
    for more in (0, 5):
        found = SKETCHES["impart"](delta, first + more * (3 * vector + grids + 3 * 3), chance())
        assert found is not None
        assert torch.linalg.matrix_rank(found.values, rtol=1e-4) == 20 + more


def test_impart_thins_the_vectors_that_say_less() -> None:
    kept = _sparsities([1.0, 0.9, 0.5, 0.2, 0.1, 0.1], 0.5)
    assert kept == pytest.approx([0.0, 0.05, 0.25])  # the last ones go whole, until half of all is left out
    assert _sparsities([1.0, 0.9], 1.0) == [0.0]
    assert _sparsities([1.0, 0.0], 0.0) == [0.0, 0.0]


def test_ultradelta_draws_as_large_a_share_of_each_value(delta: torch.Tensor) -> None:
    found = SKETCHES["ultradelta"](delta, 0.8 * delta.numel(), chance())
    assert found is not None
    low, top = delta.min().half().float(), delta.max()
    step = ((top - low) / 15).half().float()
    codes = ((delta - low) / step).round()
    kept = found.values != 0
    share = float(kept.float().mean())
    for code in range(16):
        assert float(kept[codes == code].sum()) == pytest.approx(share * int((codes == code).sum()), abs=1)
    expected = (low + codes * step) / share
    torch.testing.assert_close(found.values[kept], expected[kept])
    told = [float((codes == code).float().mean()) for code in range(16)]
    entropy = -sum(one * math.log2(one) for one in told if one > 0)
    which = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert found.bits == pytest.approx(delta.numel() * (which + share * entropy) + 32, rel=0.01)


@pytest.mark.parametrize("size", [1e-2, 1e-5])
def test_ultradelta_keeps_all_where_all_fit(size: float, delta: torch.Tensor) -> None:
    """Small deltas, too, are told in so many values."""
    found = SKETCHES["ultradelta"](delta * size / 0.01, 4.0 * delta.numel(), chance())
    assert found is not None
    assert 2.9 * delta.numel() < found.bits <= 4.0 * delta.numel()
    finer = SKETCHES["ultradelta"](delta * size / 0.01, 6.0 * delta.numel(), chance())
    assert finer is not None
    assert finer.bits > 4.9 * delta.numel()
    assert float((found.values - delta * size / 0.01).norm() / (delta * size / 0.01).norm()) < 0.2


@pytest.mark.parametrize("name", ["impart", "ultradelta"])
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_what_does_not_vary(name: str, value: float) -> None:
    """A linear that was frozen, or moved as a whole: few bits do."""
    for bits in (400, 20_000):
        found = SKETCHES[name](torch.full((24, 16), value), bits, chance())
        assert found is not None
        torch.testing.assert_close(found.values, torch.full((24, 16), value), rtol=0.02, atol=0)
    assert SKETCHES["impart"](torch.zeros(24, 16), 100, chance()) is None


def test_matrices_that_vary_more_get_more_bits() -> None:
    """By thirds of all weights; all together as many as evenly."""
    sizes = [100, 300, 200, 150, 250, 200]
    shares = by_variance([(size, spread) for size, spread in zip(sizes, (0.5, 0.1, 0.9, 0.3, 0.7, 0.2), strict=True)])
    assert shares[1] == 0.9  # the least, a quarter; the next one would make more than a third of it
    assert shares[5] == shares[3] == shares[0] == 1
    assert shares[2] == shares[4] == pytest.approx(1 + 0.1 * 300 / 450)
    assert sum(share * size for share, size in zip(shares, sizes, strict=True)) == pytest.approx(sum(sizes))
    assert by_variance([(7, 0.1)]) == [1.0]


def test_what_is_measured() -> None:
    named = chosen(["int2-24", "svd", "dare", "lossless", "budget"])
    found = [(one.method.label, one.asked, one.seed) for one in points([TASK], named, [4.0, 8.0], [0, 1])]
    assert found == [
        ("int2-24", None, 0), ("int2-24", None, 1), ("svd", 4.0, None), ("svd", 8.0, None),
        ("dare", 4.0, 0), ("dare", 4.0, 1), ("dare", 8.0, 0), ("dare", 8.0, 1), ("lossless", None, None),
        ("budget", 4.0, 0), ("budget", 4.0, 1), ("budget", 8.0, 0), ("budget", 8.0, 1),
    ]  # fmt: skip


def row(method: str, ratio: float | None, kl: float = 0.0, **more: Any) -> dict[str, Any]:
    size = {"ratio": ratio} if ratio is None else {"ratio": ratio, "linear_bits_per_weight": 1.0, "kl": kl}
    return {"task": TASK, "method": method, "asked": None, "seed": 0} | size | more


def test_means_are_over_seeds() -> None:
    rows = [row("a", 10.0, 0.1), row("a", 12.0, 0.3, seed=1), row("svd", None, asked=32.0), row("b", 4.0, 0.2)]
    first, second = means(rows)
    assert (first["ratio"], first["kl"], first["kl_least"], first["kl_most"], first["seeds"]) == (
        11.0, pytest.approx(0.2), 0.1, 0.3, 2,
    )  # fmt: skip
    assert (second["method"], second["seeds"]) == ("b", 1)


def test_predictions_against_what_noise_alone_would_leave() -> None:
    """Of an error of a tenth: what is reached may be two errors below the truth, or 3.33 above; of none all are."""
    told = [
        {"kl_predicted": 1.25, "kl_judged": 1.0, "kl_error": 0.1},
        {"kl_predicted": 2.2, "kl_judged": 3.0, "kl_error": 0.3},
        {"kl_predicted": 4.0, "kl_judged": 4.0, "kl_error": 0.0},
    ]
    found = predictions([row("budget", 4.0, 0.1, **one) for one in told] + [row("a", 4.0, 0.1)])
    assert (found["predictions"], found["within_a_quarter"]) == (3, 2)
    assert found["of_perfect_ones"] == pytest.approx(1 + 2 * (0.99957 - 0.02275), abs=1e-4)
    wide = predictions([row("budget", 4.0, 0.1, kl_predicted=1.0, kl_judged=1.0, kl_error=0.5)])
    assert wide["of_perfect_ones"] == pytest.approx(0.7475 - 0.3446, abs=1e-3)
    assert predictions([row("a", 4.0, 0.1)]) == {}


def test_a_table_of_nothing_says_so() -> None:
    assert to_markdown(means([row("svd", None, asked=32.0)])) == "Nothing that was asked for is so small.\n"


def test_what_nothing_beats() -> None:
    found = means([row("a", 4.0, 0.1), row("b", 5.0, 0.05), row("c", 6.0, 0.07), row("d", 6.0, 0.08), row("e", 3.0, 9)])
    assert [one["method"] for one in unbeaten(found, TASK)] == ["b", "c"]
    table = to_markdown(found)
    assert "**b**" in table
    assert "**d**" not in table
    assert table.index("| e |") < table.index("| a |") < table.index("**b**")


def test_the_picture_is_one_svg_with_every_method() -> None:
    drawn = draw(means([row("a<b", 4.0, 0.1), row("c", 6.0, 0.0, asked=6.0), row("c", 8.0, 0.2, asked=8.0)]))
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a<b", "c", TASK, "4x", "8x"} <= set(texts)
    assert len(list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}circle"))) == 3 + 2


@pytest.fixture
def demo(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The pair that ships; what lies around sketches is calibrated on little, no test asks how good it is."""
    small = subjects.REST.model_copy(update={"calibration": CalibrationSpec(samples=16, seq_len=32)})
    monkeypatch.setattr(subjects, "REST", small)
    write_task(tmp_path / "data" / TASK, TASK, seed=0)
    return {
        "models": repo_root / "registry" / "demo", "data": tmp_path / "data", "methods": ["lossless", "svd"],
        "out": tmp_path / "out", "limit": 2, "seeds": [0], "ratios": [3.0, 1000.0], "device": "cpu",
    }  # fmt: skip


def few_tokens(monkeypatch: pytest.MonkeyPatch, **calibration: int) -> None:
    """What a budget calibrates on, where it shall not take long."""
    small = template().model_copy(update={"calibration": CalibrationSpec(**calibration)})
    for module in (budget, subjects):
        monkeypatch.setattr(module, "template", lambda: small)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("worked although the input could have been refused before")

    monkeypatch.setattr(frontier, "Reference", never)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": Path("gone")}, "gone: no such directory"),
        ({"methods": []}, "methods: names none"),
        ({"methods": ["svd", "svd"]}, "methods: svd is given twice"),
        ({"methods": ["int2-42"]}, "unknown method 'int2-42'; did you mean int2-24"),
        ({"methods": ["low-rank"]}, "unknown method 'low-rank'"),
        ({"methods": ["gone.yaml"]}, "gone.yaml"),
        ({"ratios": []}, "ratios: names none"),
        ({"ratios": [4.0, 4.0]}, "ratios: 4 is given twice"),
        ({"ratios": [1.0]}, "ratios: 1 is no ratio to compress by; give some above 1"),
        ({"ratios": [float("nan")]}, "ratios: nan is no ratio"),
        ({"seeds": []}, "seeds: names none"),
        ({"seeds": [1, 1]}, "seeds: 1 is given twice"),
    ],
)
def test_told_before_any_work(demo: dict[str, Any], change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        frontier.run(**demo | change)
    assert told in str(error.value)
    assert not demo["out"].exists()


def test_a_row_for_each_made_once(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    found = frontier.run(**demo, reporter=recorder)
    exact, three, thousand = found.rows
    [note] = [one for one in recorder.notes if "so small" in one]
    assert note == f"{TASK}: svd at 1000x: it has nothing so small"
    assert (exact["kl"], exact["difference"], exact["method"]) == (pytest.approx(0, abs=1e-9), 0.0, "lossless")
    assert three["ratio"] == pytest.approx(3.0, rel=0.05)
    assert three["kl"] > 0
    assert thousand["ratio"] is None  # even without any linear it is larger
    assert len(found.means) == 2
    assert "svd" in (demo["out"] / "frontier.md").read_text()
    assert (demo["out"] / "frontier.svg").read_text().startswith("<svg")
    assert sorted(one.name for one in demo["out"].iterdir()) == ["frontier.md", "frontier.svg", "rows"]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("made what was made before")

    monkeypatch.setattr(frontier, "Reference", never)
    assert frontier.run(**demo).rows == found.rows
    with pytest.raises(AssertionError, match="made before"):
        frontier.run(**demo | {"limit": 3})


def test_the_budget_is_asked_for_every_size(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    few_tokens(monkeypatch, samples=16, seq_len=32)
    found = frontier.run(**demo | {"methods": ["budget"], "ratios": [7.0, 1000.0], "scores": False})
    seven, thousand = found.rows
    assert 7 <= seven["ratio"] < 7.2
    assert 0 < seven["kl"] < 0.1
    assert 0 < seven["kl_error"] < seven["kl_judged"] < 0.1
    assert seven["kl_predicted"] > 0
    assert thousand["ratio"] is None
    assert "kl_predicted" not in thousand


def test_sizes_share_what_is_measured_before_a_choice(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each seed, in any order of ratios, and in a call that goes on once more."""
    measured, asked = list[int | None](), list[tuple[float, int | None, str]]()

    def surveyed(pair: subjects.Pair, seed: int | None, folder: Path, device: str) -> Path:
        measured.append(seed)
        (folder / f"{seed}").write_text(f"of {pair.finetuned.name}, {seed}, {device}")
        return folder / f"{seed}"

    def chosen_for(
        pair: subjects.Pair, ratio: float, seed: int | None, survey: Path, folder: Path, device: str
    ) -> subjects.Made | None:
        if (ratio, seed) == (6.0, 1) and measured == [0, 1]:
            raise Interrupted("interrupted", way_out="what a row has made is not kept")
        asked.append((ratio, seed, survey.read_text()))
        return None

    monkeypatch.setattr(frontier, "surveyed", surveyed)
    monkeypatch.setattr(frontier, "chosen_for", chosen_for)
    several = demo | {"methods": ["budget"], "ratios": [8.0, 6.0], "seeds": [0, 1], "scores": False}
    with pytest.raises(Interrupted, match="finished rows stay in"):
        frontier.run(**several)
    assert measured == [0, 1]
    frontier.run(**several)
    assert measured == [0, 1, 1]
    assert asked == [(ratio, seed, f"of {TASK}, {seed}, cpu") for ratio in (8.0, 6.0) for seed in (0, 1)]
    assert sorted(one.name for one in demo["out"].iterdir()) == ["frontier.md", "frontier.svg", "rows"]


@pytest.mark.parametrize("judge_rest", [False, True])
def test_samples_that_are_not_scored_may_judge(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, judge_rest: bool
) -> None:
    """The first two are scored, all after them judge; rows of the one way are not the other's."""
    judges = list[Any]()

    def surveyed(pair: subjects.Pair, *_: Any) -> Path:
        judges.append(pair.judge)
        return Path("unused")

    monkeypatch.setattr(frontier, "surveyed", surveyed)
    monkeypatch.setattr(frontier, "chosen_for", lambda *_: None)
    asked = demo | {"methods": ["budget"], "ratios": [8.0], "limit": 2, "scores": False}
    frontier.run(**asked, judge_rest=judge_rest)
    every = read_task(demo["data"] / TASK / "validation.jsonl")
    wanted = tuple({"prompt": one.prompt, "completion": one.completion} for one in every[2:])
    assert judges == [wanted if judge_rest else None]
    frontier.run(**asked, judge_rest=not judge_rest)
    assert len(judges) == 2


def test_too_few_samples_to_judge_by_are_told_before_any_work(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("work")

    monkeypatch.setattr(frontier, "_Task", never)
    count = len(read_task(demo["data"] / TASK / "validation.jsonl"))
    asked = demo | {"methods": ["budget"], "ratios": [8.0], "judge_rest": True}
    with pytest.raises(InputError) as told:
        frontier.run(**asked | {"limit": count - 7})
    assert f"{count} samples, of which 7 are left to judge by; give limit {count - 8}, or leave out" in str(told.value)
    with pytest.raises(InputError, match="of which 0 are left"):
        frontier.run(**asked | {"limit": count + 1})
    for enough in ({"limit": count - 8}, {"limit": count, "judge_rest": False}, {"limit": count, "methods": ["svd"]}):
        with pytest.raises(AssertionError, match="work"):
            frontier.run(**asked | enough)


def test_a_size_that_shares_it_comes_to_what_it_does_alone(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very bytes, whatever was tried for another size; the fine-tuned model is walked once."""
    few_tokens(monkeypatch, samples=8, seq_len=16)
    monkeypatch.setattr(target, "_NEAR", {"size": 1.0, "kl": 1.0})  # every attempt misses: three each
    monkeypatch.setattr(target, "_AIM_AGAIN", 0.95)  # and none but the first can be larger than asked
    walks = list[int]()

    def counted(*arguments: Any) -> Walked:
        walks.append(len(walks))
        return walk(*arguments)

    monkeypatch.setattr("deltacompress.budget.measuring.pair.walk", counted)
    own = subjects.Pair(pair.base, pair.finetuned, pair.data)
    survey = subjects.surveyed(own, 0, tmp_path, "cpu")
    measured = survey.read_bytes()
    ratios, told = (1.22, 1.26), list[dict[str, float]]()
    for number, ratio in enumerate(ratios):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = subjects.chosen_for(own, ratio, 0, survey, folder, "cpu")
        assert made is not None
        told.append(dict(made.told))
        assert survey.read_bytes() == measured
    assert len(walks) == 1
    for number, ratio in enumerate(ratios):
        alone = tmp_path / f"alone-{number}"
        found = budget.compress_to(
            own.base, own.finetuned, out=alone, calibration=pair.data, target_ratio=ratio, seed=0, device="cpu"
        )
        assert found.attempts == 3
        known = {"kl_predicted": found.first.kl, "kl_judged": found.judged.kl, "kl_error": found.judged.error}
        assert told[number] == known
        assert files_of(tmp_path / str(number) / "artifact") == files_of(alone)
        recipe = tmp_path / str(number) / "artifact.recipe.yaml"
        assert recipe.read_bytes() == alone.with_name(f"{alone.name}.recipe.yaml").read_bytes()
    assert files_of(tmp_path / "0" / "artifact") != files_of(tmp_path / "1" / "artifact")
    assert len(walks) == 3
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="other input"):
        subjects.chosen_for(own, 1.22, 1, survey, tmp_path / "other", "cpu")


def test_the_same_divergence_as_bench_pairs(demo: dict[str, Any], tmp_path: Path) -> None:
    named = {"limit": 20, "models": demo["models"], "data": demo["data"]}
    here = frontier.run(**demo | named | {"methods": ["rtn-4bit"]}).rows[0]
    path = demo["models"].parents[1] / "evals" / "baselines" / "rtn-4bit.yaml"
    [_, there] = bench_pairs.run(**named, recipes=[str(path)], out=tmp_path / "pairs", device="cpu").rows
    for key in ("ratio", "linear_bits_per_weight", "accuracy", "difference", "mcnemar_p"):
        assert here[key] == there[key]
    assert here["kl"] == pytest.approx(there["kl"], rel=1e-6)


def test_what_was_interrupted_goes_on(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(frontier, "sketched", stop)
        with pytest.raises(Interrupted, match="finished rows stay in"):
            frontier.run(**demo)
    assert sorted(one.name for one in demo["out"].iterdir()) == ["frontier.md", "frontier.svg", "rows"]
    monkeypatch.setattr(frontier, "packed", stop)  # its row is there
    assert len(frontier.run(**demo).rows) == 3


def test_sketches_are_laid_into_what_a_recipe_makes_of_the_rest(demo: dict[str, Any], tmp_path: Path) -> None:
    pair = subjects.Pair(demo["models"] / "base", demo["models"] / TASK, demo["data"] / TASK / "train.jsonl")
    around = subjects.rest(pair, tmp_path / "rest", "cpu")
    made = subjects.sketched(pair, around, "svd", 4.0, 0, tmp_path)
    assert made is not None
    linears = sum(one.bytes for one in around.manifest.tensors if one.kind == "linear")
    weights = sum(math.prod(one.shape) for one in around.manifest.tensors if one.kind == "linear")
    others = sum(one.stat().st_size for one in around.path.iterdir()) - linears
    assert made.linear_bits is not None
    assert made.nbytes == pytest.approx(others + made.linear_bits * weights / 8, abs=1)


def test_a_sketch_may_share_bits_out(demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size and standard deviation of each delta: here all of them to one, whatever that is of use for."""
    pair = subjects.Pair(demo["models"] / "base", demo["models"] / TASK, demo["data"] / TASK / "train.jsonl")
    around = subjects.rest(pair, tmp_path / "rest", "cpu")
    seen: list[tuple[int, float]] = []

    def all_to_the_first(matrices: Sequence[tuple[int, float]]) -> list[float]:
        seen.extend(matrices)
        return [1.0] + [0.0] * (len(matrices) - 1)

    monkeypatch.setattr(subjects, "by_variance", all_to_the_first)
    made = subjects.sketched(pair, around, "ultradelta", 4.0, 0, tmp_path)
    assert made is not None
    base, before, after = (Checkpoint.open(one) for one in (pair.base, pair.finetuned, made.path))
    linears = [one for one in around.manifest.tensors if one.kind == "linear"]
    for k, (one, told) in enumerate(zip(linears, seen, strict=True)):
        own = base.read(str(one.base_name)).float()
        delta = before.read(one.name).float() - own
        assert told == (delta.numel(), pytest.approx(float(delta.std(correction=0)), rel=1e-5))
        assert torch.equal(after.read(one.name).float(), own) == (k > 0)


def test_the_verb(demo: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "frontier", str(demo["models"]), str(demo["data"]), "--out", str(demo["out"])]
    more = ["--methods", "svd", "--ratios", "3", "--seeds", "0", "--limit", "2", "--kl-only", "--device", "cpu"]
    assert main(["--json", "--quiet", *arguments, *more]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["method"] for one in told["means"]] == ["svd"]
    assert "accuracy" not in told["rows"][0]
    assert main([*arguments, "--ratios", "4,x"]) == 2
    assert "4,x is no list of numbers" in capsys.readouterr().err

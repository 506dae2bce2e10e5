"""`compress` by a size or a quality and `analyze --predict`, as commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pairs import Pair, files_of

from deltacompress.budget.prediction.frontier import SHIPPED
from deltacompress.budget.run import compress_to
from deltacompress.cli.main import main
from deltacompress.errors import CalibrationError

ASKED = ["--target-ratio", "1.2"]


def argv(pair: Pair, out: Path, *more: str) -> list[str]:
    """Of `compress`, without a recipe."""
    given = pair.argv(out, *more)
    at = given.index("--recipe")
    return [*given[:at], *given[at + 2 :]]


def test_asked_predicted_and_reached(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv(pair, tmp_path / "out", *ASKED), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["budget"]: row for row in data["budget"]}
    asked, predicted, reached = (rows[name] for name in ("asked", "predicted", "reached"))
    assert list(rows) == ["asked", "predicted", "predicted again", "reached"]  # it takes two compressions
    assert reached["bytes"] == data["artifact_bytes"] == sum(map(len, files_of(tmp_path / "out").values()))
    assert reached["bytes"] <= asked["bytes"]
    assert asked["ratio"] == pytest.approx(1.2, rel=1e-3)
    assert predicted["kl"] > 0
    assert reached["kl"] > 0
    assert data["judged_tokens"] > 0
    assert data["kl_upper_bound"] == pytest.approx(data["budget"][-1]["kl"] + 1.645 * data["kl_standard_error"])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--recipe", "int2"], "--target-ratio: does not go with --recipe"),
        (["--max-kl", "0.01"], "--target-ratio and --max-kl ask for two things"),
        (["--dry-run"], "--target-ratio: does not go with --dry-run"),
        (["--gate", "default"], "--target-ratio: does not go with --gate"),
        (["--zoo", "here"], "--target-ratio: does not go with --zoo"),
        (["--device-memory", "nothing"], "is no size"),
        (["--target-ratio", "0.5"], "--target-ratio 0.5: is no ratio above 1"),
    ],
)
def test_what_does_not_go_together_is_told_before_any_work(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    asked = [] if more[0] in ASKED else ASKED
    assert main(argv(pair, tmp_path / "out", *asked, *more)) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_data(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = argv(pair, tmp_path / "out", *ASKED)
    at = given.index("--calibration")
    assert main([*given[:at], *given[at + 2 :]]) == 2
    assert "a budget is chosen on data: give --calibration FILE" in capsys.readouterr().err


def test_an_empty_judge_is_told_by_its_own_name(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(pair.base), str(pair.finetuned)]
    for given in (
        argv(pair, tmp_path / "out", *ASKED),
        ["analyze", *models, "--predict", "--calibration", str(pair.data)],
    ):
        assert main([*given, "--judge", ""]) == 2
        assert "error: --judge is empty" in capsys.readouterr().err
    with pytest.raises(CalibrationError, match="judge is empty"):
        compress_to(pair.base, pair.finetuned, out=tmp_path / "out", calibration=pair.data, target_ratio=2, judge="")


def test_predict(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_file = tmp_path / "data.jsonl"
    data_file.symlink_to(pair.data)
    given = ["analyze", str(pair.base), str(pair.finetuned), "--predict", "--calibration", str(data_file)]
    given += ["--samples", "8", "--seq-len", "16", "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]
    assert main(given) == 0
    data = json.loads(capsys.readouterr().out)
    points = data["points"]
    assert [one["ratio"] for one in points] == sorted((one["ratio"] for one in points), reverse=True)
    assert [one["kl"] for one in points] == sorted((one["kl"] for one in points), reverse=True)
    assert {one["recipe"] for one in data["shipped"]} == set(SHIPPED)
    for one in data["shipped"]:  # the best is as good as any recipe that is no smaller than it
        better = [point["kl"] for point in points if point["bytes"] >= one["bytes"]]
        assert not better or min(better) <= one["kl"] * 1.001
    assert 0 < data["delta_share"] < 1
    assert any("a poor candidate" in note for note in data["notes"])  # so small a model is mostly manifest
    assert json.loads((tmp_path / "out" / "frontier.json").read_text()) == data
    written = files_of(tmp_path / "out")
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out) == data
    assert files_of(tmp_path / "out") == written
    other = shutil.copytree(pair.finetuned, tmp_path / "other")  # the same weights, another model
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    given[given.index(str(pair.finetuned))] = str(other)
    assert main(given) == 2
    assert "another fine-tuned model" in capsys.readouterr().err


def test_options_of_predict_alone_are_told(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(pair.base), str(pair.finetuned), "--samples", "8"]) == 2
    assert "--samples: says what --predict measures on: give --predict" in capsys.readouterr().err
    assert main(["analyze", str(pair.base), str(pair.finetuned), "--predict"]) == 2
    assert "a prediction is made on data: give --calibration FILE" in capsys.readouterr().err

"""Jobs files: what is wrong is told with the file, the line and the job, before anything is begun."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import fleet_of, tuned, write_jobs
from pairs import Pair

from deltacompress.cli.main import main
from deltacompress.errors import CheckpointError, DeltaCompressError, InputError, PairError, RecipeError
from deltacompress.files.strict_yaml import read_yaml_with_lines
from deltacompress.fleet.jobs_file import Fleet
from deltacompress.fleet.run import compress_fleet

Entry = dict[str, Any]


@pytest.fixture(scope="module")
def place(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fleet")
    tuned(pair, found / "first", 1)
    tuned(pair, found / "second", 2)
    return found


@pytest.fixture
def whole(pair: Pair, place: Path, tmp_path: Path) -> dict[str, Any]:
    """The content of a good jobs file, whose second job stands on line `SECOND`."""
    path = fleet_of(pair, tmp_path, [place / "first", place / "second"])
    return yaml.safe_load(path.read_text())  # type: ignore[no-any-return]


SECOND = 11


def refused(tmp_path: Path, whole: Any, kind: type[DeltaCompressError] = InputError) -> str:
    """What is told of a jobs file; it leaves nothing."""
    path = write_jobs(tmp_path / "fleet.yaml", whole)
    with pytest.raises(kind) as caught:
        compress_fleet(path)
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.yaml"]
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_a_good_one(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["finetunes"][1] |= {"samples": 4, "recipe": "lossless", "lossless": "none", "seed": 7}
    fleet = Fleet.load(write_jobs(tmp_path / "fleet.yaml", whole), resume=True)
    first, second = (one.job for one in fleet.jobs)
    assert (first.samples, first.seq_len, first.seed, first.lossless, first.recipe.name) == (
        8,
        16,
        None,
        "zstd",
        "int4-24",
    )
    assert (second.samples, second.seq_len, second.seed, second.lossless) == (4, 16, 7, "none")
    assert second.recipe.name == "lossless"
    assert (first.resume, first.force, first.device) == (True, False, "cpu")
    assert fleet.jobs[1].place.endswith(f"fleet.yaml, line {SECOND}")


CASES: dict[str, tuple[Callable[[Entry], object], str]] = {
    "key of an entry": (
        lambda w: w["finetunes"][1].update(recepie="int4"),
        "line 13 (out/second): finetunes.recepie: unknown key",
    ),
    "size": (
        lambda w: w["finetunes"][1].update(device_memory="12XB"),
        "line 13 (out/second): finetunes.device_memory: Value error, is no size; give one such as 26GB (got '12XB')",
    ),
    "key of the defaults": (lambda w: w["defaults"].update(sample=3), r"line 8: defaults.sample: unknown key"),
    "key of the file": (lambda w: w.update(bases="x"), r"line 13: bases: unknown key"),
    "no base": (lambda w: w.pop("base"), "line 1: base is missing"),
    "no model": (lambda w: w["finetunes"][1].pop("model"), f"line {SECOND} (out/second): finetunes: model is missing"),
    "no jobs": (lambda w: w.update(finetunes=[]), "line 8: finetunes: List should have at least 1 item"),
    "an entry is no mapping": (lambda w: w["finetunes"].append("third"), "line 13: finetunes: Input should be"),
    "samples is a text": (lambda w: w["finetunes"][0].update(samples="8"), "line 11 (out/first): finetunes.samples: "),
    "samples is true": (lambda w: w["defaults"].update(samples=True), "line 4: defaults.samples: Input should be a"),
    "no such codec": (lambda w: w["defaults"].update(lossless="rar"), "line 8: defaults.lossless: Input should be"),
    "seed out of range": (lambda w: w["defaults"].update(seed=-1), "line 8: defaults.seed: "),
    "neither out nor name": (lambda w: w["finetunes"][1].pop("out"), "(second): has neither out nor name"),
    "a name alone": (
        lambda w: w["finetunes"].__setitem__(1, {"model": w["finetunes"][1]["model"], "name": "a/b"}),
        f"line {SECOND} (a/b): has a name alone, and the file has no out",
    ),
    "a NUL": (lambda w: w["finetunes"][1].update(out="a\0b"), "line 12 (a"),
    "no recipe": (lambda w: w["defaults"].pop("recipe"), "(first): has no recipe"),
    "an output twice": (
        lambda w: w["finetunes"][1].update(out=w["finetunes"][0]["out"]),
        f"line {SECOND} (out/first): writes to out/first, as the job on line 9 does",
    ),
    "an output twice, in other words": (
        lambda w: w["finetunes"][1].update(out=w["finetunes"][0]["out"] + "/../first/"),
        "writes to out/first, as the job on line 9 does",
    ),
    "an output inside another": (
        lambda w: w["finetunes"][0].update(out=w["finetunes"][1]["out"] + "/deep/er"),
        f"line 9 (out/second/deep/er): its output lies inside that of the job on line {SECOND}",
    ),
    "an output where another works": (
        lambda w: w["finetunes"][0].update(out=w["finetunes"][1]["out"] + ".partial"),
        "writes to out/second.partial, as the job on line 9 does",
    ),
    "an output where another's state lies": (
        lambda w: w["finetunes"][0].update(out=w["finetunes"][1]["out"] + ".job.json"),
        "writes to out/second.job.json, as the job on line 9 does",
    ),
    "a name twice": (
        lambda w: (w["finetunes"][0].update(name="a/b"), w["finetunes"][1].update(name="a/b")),
        "line 12: the name a/b is given twice, first on line 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_says_wrong(whole: dict[str, Any], tmp_path: Path, case: str) -> None:
    change, told = CASES[case]
    change(whole)
    shown = re.sub(r"/\S*/(first|second)\)", r"\1)", refused(tmp_path, whole))
    assert told.replace("(out/", "(") in shown.replace("(out/", "(")
    assert shown.startswith("fleet.yaml, line ")
    assert "docs/cli.md" in shown or "; " in shown


@pytest.mark.parametrize("given", ["- a", "7", ""])
def test_no_mapping(tmp_path: Path, given: str) -> None:
    (tmp_path / "fleet.yaml").write_text(given)
    with pytest.raises(InputError, match="a jobs file is a mapping with base and finetunes"):
        compress_fleet(tmp_path / "fleet.yaml")


def test_a_key_twice(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("base: a\nfinetunes: []\nbase: b\n")
    with pytest.raises(InputError, match=r"fleet.yaml: line 3: 'base' is given twice"):
        compress_fleet(tmp_path / "fleet.yaml")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.yaml: the jobs file cannot be read"):
        compress_fleet(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        ({"recipe": "int5"}, RecipeError, "int5"),
        ({"model": "HERE/model"}, "CheckpointError", "no such directory"),
        ({"calibration": "missing.jsonl"}, "CalibrationError", "no such file"),
        ({"samples": 100000}, "CalibrationError", "needs 1600000"),
        ({"name": "team/bot"}, "NotAZooError", "which zoo?"),
        ({"name": "no name", "out": "x"}, "InvalidNameError", "no name"),
        ({"out": "BASE/inside"}, "OutputError", "lies inside"),
        ({"out": "BASE/config.json/x"}, "OutputError", "config.json is a file, where a directory is needed"),
    ],
)
def test_what_a_job_lacks(
    whole: dict[str, Any], tmp_path: Path, pair: Pair, change: Entry, kind: Any, told: str, monkeypatch: Any
) -> None:
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)
    whole["finetunes"][1] |= {
        key: value.replace("BASE", str(pair.base)).replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        for key, value in change.items()
    }
    path = write_jobs(tmp_path / "fleet.yaml", whole)
    with pytest.raises(DeltaCompressError) as caught:
        compress_fleet(path)
    assert type(caught.value).__name__ == (kind if isinstance(kind, str) else kind.__name__)
    assert str(caught.value).startswith(f"{path}, line {SECOND} (")
    assert told in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.yaml"]


def test_another_base(whole: dict[str, Any], tmp_path: Path, make_pair: Callable[..., Pair]) -> None:
    whole["finetunes"][1]["model"] = str(make_pair("llama", hidden_size=64).finetuned)
    told = refused(tmp_path, whole, PairError)
    assert re.match(rf"fleet\.yaml, line {SECOND} \(out/second\): /.*: ", told)


def test_the_same_on_the_command_line(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole["finetunes"][1]["recepie"] = "int4"
    path = write_jobs(tmp_path / "fleet.yaml", whole)
    assert main(["compress", "--jobs", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{path}, line 13 (" in told
    assert "recepie: unknown key" in told


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["base"], "BASE: goes into the jobs file"),
        (["--recipe", "int4"], "--recipe: goes into the jobs file"),
        (["--out", "x"], "--out: goes"),
        (["--device", "auto"], "--device: goes"),
        (["--lossless", "zstd"], "--lossless: goes"),
        (["--seq-len", "4"], "--seq-len: goes"),
        (["--seed", "0"], "--seed: goes"),
        (["--gate", "default"], "--gate: is for one model, not for --jobs"),
        (["--limit", "3"], "--limit: is for one model, not for --jobs"),
        (["--name", "a/b"], "--name: goes"),
        (
            ["--max-kl", "1"],
            "--max-kl: is for one model, not for --jobs; compress one model by it, and name the",
        ),
    ],
)
def test_options_that_a_file_says_itself(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", *argv, "--jobs", "fleet.yaml"]) == 2
    assert told in capsys.readouterr().err


def test_a_size_is_no_key(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["finetunes"][1]["max_size"] = 1000
    with pytest.raises(InputError, match=r"max_size: is for one model, not for a jobs file: compress one by it, and"):
        Fleet.load(write_jobs(tmp_path / "fleet.yaml", whole))


def test_home_is_what_a_shell_takes_for_it(whole: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    whole["finetunes"][1] |= {"out": "~/deltas/x", "model": "~/models/x", "calibration": "~x/data"}
    job = Fleet.load(write_jobs(tmp_path / "fleet.yaml", whole)).jobs[1].job
    assert (str(job.out), job.finetuned) == ("/home/somebody/deltas/x", "/home/somebody/models/x")
    assert job.calibration == "~x/data"


def test_what_is_wrong_with_the_base_names_the_file(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["base"] = "no/such/base/at/all"
    assert refused(tmp_path, whole, CheckpointError).startswith("fleet.yaml, base: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"give a YAML file as docs/cli\.md shows one"):
        Fleet.load(tmp_path / "fleet.yaml")


def test_workers_without_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "a", "b", "--recipe", "int4", "--out", "c", "--workers", "2"]) == 2
    assert "--workers 2: " in capsys.readouterr().err


def test_lines_of_values(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# a comment\na:\n  - b: 1\n    c: [x,\n        y]\nd: &d {e: 1}\nf: *d\n")
    data, lines = read_yaml_with_lines(path, what="file", docs="docs", kind=InputError)
    assert data == {"a": [{"b": 1, "c": ["x", "y"]}], "d": {"e": 1}, "f": {"e": 1}}
    places: list[tuple[str | int, ...]] = [(), ("a",), ("a", 0), ("a", 0, "c"), ("a", 0, "c", 1), ("d",), ("f", "e")]
    assert [lines.of(*one) for one in places] == [2, 2, 3, 4, 5, 6, 6]
    assert lines.of("a", 0, "unknown", 3) == 3
    assert lines.of("a", 7) == 2

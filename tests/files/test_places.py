"""Nothing is put into a zoo or an artifact by whoever is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacompress.cli.given import early
from deltacompress.cli.main import main
from deltacompress.errors import OutputError
from deltacompress.files.places import check_folder, check_place
from deltacompress.zoo import Zoo


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    Zoo.init(tmp_path / "zoo")
    return tmp_path / "zoo"


def test_a_place_in_a_zoo_or_an_artifact(zoo: Path, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(zoo / "names")
    for given, around in ((zoo / "out", zoo), (tmp_path / "link" / "a" / "b", zoo), (artifact / "a", artifact)):
        what = "artifact" if around is artifact else "zoo"
        for check in (check_place, check_folder, early.folder, early.output):
            with pytest.raises(OutputError) as caught:
                check(given)
            assert str(caught.value) == f"{given}: lies inside the {what} {around}; choose a place outside of it"
    for given, what in ((zoo, "zoo"), (artifact, "artifact")):
        check_place(given)
        with pytest.raises(OutputError, match=f"{given.name}: is the {what} "):
            check_folder(given)


def test_a_manifest_of_another_program_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"manifest_version": 3}')
    check_place(tmp_path / "out")
    check_folder(tmp_path)


@pytest.mark.parametrize("verb", ["restore", "export", "compress", "analyze", "eval", "compare", "dequantize", "bench"])
def test_no_verb_writes_into_a_zoo(
    verb: str, zoo: Path, artifact: Path, repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tuned = (str(repo_root / "registry" / "demo" / name) for name in ("base", "palindrome"))
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    task = ["--tasks", "demo-palindrome"]
    given = {
        "restore": ["restore", str(artifact), "--base", base],
        "export": ["export", str(artifact)],
        "compress": ["compress", base, tuned, "--recipe", "lossless"],
        "analyze": ["analyze", base, tuned],
        "eval": ["eval", str(artifact), "--base", base, *task],
        "compare": ["compare", base, tuned, *task, "--calibration", str(tmp_path / "data.jsonl")],
        "dequantize": ["dequantize", base],
        "bench": ["bench", "pairs", base, tuned],
    }[verb]
    before = sorted(zoo.rglob("*"))
    for place, what in ((zoo, "zoo"), (artifact, "artifact")):
        assert main([*given, "--out", str(place / "new")]) == 2
        assert f"lies inside the {what} {place}; choose a place outside of it" in capsys.readouterr().err
    assert sorted(zoo.rglob("*")) == before


def test_a_zoo_writes_nothing_into_an_artifact(zoo: Path, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Zoo.open(zoo).add(artifact, "t/bot")
    inside = str(artifact / "new")
    for argv in (
        ["pull", "t/bot", inside],
        ["export", inside, "t/bot"],
        ["init", inside],
        ["lineage", "--svg", inside],
    ):
        assert main(["zoo", *argv, *([] if argv[0] == "init" else ["--zoo", str(zoo)])]) == 2
        assert f"{inside}: lies inside the artifact {artifact}; choose a place" in capsys.readouterr().err

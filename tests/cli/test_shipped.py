"""The verbs of the first hour: what ships, what works here, completion."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from deltacompress import diagnosis as room
from deltacompress.cli.main import main
from deltacompress.errors import install_hint


def listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main([*argv, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_recipes(capsys: pytest.CaptureFixture[str], repo_root: Path) -> None:
    rows = {row["name"]: row for row in listed(["recipes"], capsys)}
    assert rows.keys() == {path.stem for path in (repo_root / "calibration" / "recipes").glob("*.yaml")}
    assert (rows["int2-24"]["linears"], rows["int2-24"]["calibrates"]) == ("2 bits, 2:4", True)
    assert (rows["sign-24"]["linears"], rows["gptq-4bit"]["scope"]) == ("1 bit, 2:4", "full")
    assert (rows["lossless"]["linears"], rows["lossless"]["calibrates"]) == ("as they are", False)
    assert main(["recipes", "int2-24"]) == 0
    assert capsys.readouterr().out == (repo_root / "calibration" / "recipes" / "int2-24.yaml").read_text()
    assert main(["recipes"]) == 0
    assert "start with int2-24" in capsys.readouterr().err


def test_gates(capsys: pytest.CaptureFixture[str], repo_root: Path) -> None:
    rows = {row["name"]: row["samples"] for row in listed(["gates"], capsys)}
    assert rows == {"default": 300, "one-bit": 100, "strict": 500}
    assert main(["gates", "strict"]) == 0
    assert capsys.readouterr().out == (repo_root / "evals" / "gates" / "strict.yaml").read_text()


def test_tasks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "validation.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    rows = {row["name"]: row for row in listed(["tasks", "--task-dir", str(tmp_path)], capsys)}
    assert rows["demo-palindrome"]["data"] == "here"
    assert rows["boolq"]["data"] == "fetched by lm-eval"
    assert rows["sst2"]["data"] == "--task-dir DIR, sst2/"
    assert rows["mine"]["kind"] == "generate"
    assert main(["tasks", "boolq"]) == 0
    assert "Yes or no questions about a passage" in capsys.readouterr().out


def test_a_folder_of_tasks_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--task-dir", "nowhere"]) == 2
    assert "--task-dir nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["recipes", "gates", "tasks"])
def test_a_name_that_does_not_ship(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


def test_the_doctor_tells_what_works_and_the_way_out_of_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "matplotlib":
            raise importlib.metadata.PackageNotFoundError
        return real(name)

    def broken() -> tuple[bool, str]:
        raise OSError("libcudart.so: not there\nand more")

    monkeypatch.setattr(room, "version", version)
    monkeypatch.setattr(room, "_gpu", broken)
    monkeypatch.setenv("DELTACOMPRESS_ZOO", "/no/such/place")
    rows = {row["what"]: row for row in listed(["doctor"], capsys)}
    assert rows["torch"]["works"] is True
    assert rows["lossless zstd"] == {"what": "lossless zstd", "works": True, "found": "zstd (CPU)"}
    assert rows["kernels reference"]["works"] is True
    assert rows["extra plot"]["works"] is False
    assert "pip install 'deltacompress[plot]'" in str(rows["extra plot"]["found"])
    assert rows["GPU"]["found"] == "does not work: OSError: libcudart.so: not there"
    assert "/no/such/place" in str(rows["zoo"]["found"])


def test_the_doctor_knows_every_extra(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {row["what"] for row in room.diagnose() if row["what"].startswith("extra ")} == {
        f"extra {name}" for name in extras if name != "dev"
    }
    for name, (package, _) in room._EXTRAS.items():
        assert any(one.startswith(package) for one in extras[name]), name


def test_how_to_install_an_extra_names_it_as_the_documents_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", lambda _: "1")
    assert install_hint("eval") == "pip install 'deltacompress[eval]'"
    monkeypatch.setattr("importlib.metadata.version", nowhere)
    assert install_hint("eval") == "pip install '.[eval]' in a checkout"


def test_every_hint_names_an_extra_that_there_is(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(path.read_text() for path in (repo_root / "deltacompress").rglob("*.py"))
    named = set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", sources))
    assert {"adapters", "cpu", "eval", "gpu", "plot", "serve", "sign", "zoo"} == named <= extras.keys()


def test_completion_knows_verbs_and_options_without_torch(tmp_path: Path) -> None:
    told = {"_DELTACOMPRESS_COMPLETE": "complete_bash", "HOME": str(tmp_path)}
    for words, expected in (("deltacompress com", ["compress", "compare"]), ("deltacompress inspect --", ["--zoo"])):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "deltacompress"],
            env=os.environ | told | {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)},
            capture_output=True,
            text=True,
        )
        assert set(expected) <= set(done.stdout.split()), done.stdout
        assert "| torch" not in done.stderr
    assert not list(tmp_path.iterdir())  # nothing is written unless asked

"""The verbs: their contract with scripts, exit codes and one line per error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from evaluation.reports import report

from deltacompress.cli.given.named import against, labelled
from deltacompress.cli.verbs.compare import compare
from deltacompress.cli.verbs.evaluate import evaluate, gate
from deltacompress.errors import InputError
from deltacompress.zoo import Zoo

if TYPE_CHECKING:
    from pairs import Pair


def call(*argv: str) -> int:
    """Run the three verbs as the command line does; the exit code."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("eval")(evaluate)
    app.command("gate")(gate)
    app.command("compare")(compare)
    code = app(args=[*argv, "--quiet"], standalone_mode=False)
    return code if isinstance(code, int) else 0


@pytest.fixture
def written(tmp_path: Path) -> Path:
    report().write(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_gate_exit_codes(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("name: p\nmin_ratio: 2\n")
    extras = ["--junit", str(tmp_path / "j.xml"), "--summary", str(tmp_path / "s.md")]
    assert call("gate", str(written), str(policy), *extras) == 0
    assert (tmp_path / "j.xml").is_file()
    assert "passed" in (tmp_path / "s.md").read_text()
    assert call("gate", str(written), str(policy), *extras[:2]) == 0  # equal: left there
    (tmp_path / "j.xml").write_text("<?xml mine")
    capsys.readouterr()
    assert call("gate", str(written), str(policy), *extras[:2]) == 2
    assert f"{tmp_path / 'j.xml'}: exists already, with other content" in capsys.readouterr().err
    assert (tmp_path / "j.xml").read_text() == "<?xml mine"
    assert call("gate", str(written), str(policy), *extras[:2], "--force") == 0
    assert (tmp_path / "j.xml").read_text().startswith("<?xml")
    policy.write_text("name: p\nmin_ratio: 20\n")
    assert call("gate", str(written), str(policy), "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out[shown.out.index("{") :])["failed"] == 1
    assert shown.err.count("\n") == 1
    policy.write_text("name: p\nmin_ration: 20\n")
    assert call("gate", str(written), str(policy)) == 2
    assert "unknown key min_ration" in capsys.readouterr().err
    written.write_text(written.read_text().replace("0.33", "0.99"))
    assert call("gate", str(written), "default") == 3


def test_gate_over_a_delta_needs_an_artifact(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "j.xml"
    assert call("gate", str(written), "default", "--over", "d", "--junit", str(junit)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: --over d: needs --artifact, which goes over it; give that too, or leave out --over\n"
    assert not junit.exists()


def test_gate_writes_into_nothing_that_is_read_or_finished(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, loose, policy = tmp_path / "done", tmp_path / "loose.json", tmp_path / "p.yaml"
    done.mkdir()
    report().write(done / "report.json")
    (done / "inputs.json").write_text('{"inputs": {}, "files": {"report.json": ""}}')
    loose.write_bytes((done / "report.json").read_bytes())
    policy.write_text("name: p\nmin_ratio: 2\n")
    (tmp_path / "data.json").write_text('{"mine": 1}')
    (tmp_path / "rows.jsonl").write_text('[{"mine": 1}]')
    (tmp_path / "w.safetensors").write_bytes((64).to_bytes(8, "little") + b'{"a": 1}')
    (tmp_path / "notes.md").write_text("# mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before |= {path: path.read_bytes() for path in artifact.iterdir()}
    for options, told in (
        (["--summary", loose], "is read by this run"),
        (["--junit", loose, "--force"], "is read by this run"),
        (["--summary", policy], "is read by this run"),
        (["--junit", tmp_path / "new", "--summary", tmp_path / "new"], "is the file of --junit too"),
        (["--summary", done / "report.md"], f"lies in the finished output {done}"),
        (["--junit", done / "samples" / "new.xml"], f"lies in the finished output {done}"),
        (["--summary", artifact / "manifest.json"], "lies inside the artifact"),
        (["--junit", artifact / "config.json", "--force"], "lies inside the artifact"),
        (["--summary", tmp_path / "data.json"], "holds no Markdown"),
        (["--summary", tmp_path / "rows.jsonl"], "holds no Markdown"),
        (["--junit", tmp_path / "new.xml", "--summary", tmp_path / "w.safetensors"], "holds no Markdown"),
        (["--junit", tmp_path / "notes.md", "--force"], "holds no XML"),
    ):
        for given in (loose,) if loose in options else (loose, done):
            assert call("gate", str(given), str(policy), *map(str, options)) == 2
            assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (*tmp_path.rglob("*"), *artifact.iterdir()) if path.is_file()} == before
    for name in ("notes.md", "empty"):
        (tmp_path / name).touch()
        assert call("gate", str(loose), str(policy), "--summary", str(tmp_path / name)) == 0
    (tmp_path / "empty.xml").touch()
    assert call("gate", str(loose), str(policy), "--junit", str(tmp_path / "empty.xml"), "--force") == 0


def test_gate_of_another_artifact(written: Path, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("gate", str(written), "default", "--artifact", str(artifact)) == 3
    assert (told := capsys.readouterr().err).endswith("; evaluate this artifact\n")
    assert "about another manifest" in told


@pytest.mark.usefixtures("lm_eval")
def test_eval_writes_the_report(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--base", str(pair.base), "--task-dir", str(task_dir), "--out", str(tmp_path / "out")]
    argv = ["eval", str(artifact), *where, "--tasks", "colours", "--against", f"finetuned={pair.finetuned}"]
    assert call(*argv, "--limit", "5", "--seed", "0", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["scores"]
    assert [row["model"] for row in rows] == ["finetuned", artifact.name]
    assert all(isinstance(row["score"], float) and row["samples"] == 5 for row in rows)
    for name in ("report.json", "report.md", "report.html"):
        assert (tmp_path / "out" / name).is_file()
    assert call("eval", str(artifact), *where, "--tasks", "colors") == 2
    assert "did you mean colours" in capsys.readouterr().err
    assert call("eval", "team/bot", *where, "--tasks", "colours") == 2
    assert "give --zoo ZOO" in capsys.readouterr().err


@pytest.mark.usefixtures("lm_eval")
def test_what_cannot_be_attached_is_not_evaluated(
    pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Zoo.init(tmp_path / "zoo").add(artifact, "team/bot")
    where = ["--base", str(pair.base), "--task-dir", str(task_dir), "--tasks", "colours", "--limit", "3"]
    argv = [*where, "--out", str(tmp_path / "out"), "--zoo", str(tmp_path / "zoo"), "--attach"]
    for given, told in ((str(artifact), "is a directory"), ("team/bot@prod", "prod")):
        assert call("eval", given, *argv) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert call("eval", "team/bot", *argv) == 0
    assert len(Zoo.open(tmp_path / "zoo").referrers("team/bot@1")) == 1


def test_labels_and_references() -> None:
    assert labelled(["a=x/y", "team/bot"]) == {"a": "x/y", "team/bot": "team/bot"}
    with pytest.raises(InputError, match="two artifacts are named a; give it another label than a="):
        labelled(["a=x", "a=y"])
    with pytest.raises(InputError, match="two artifacts are named team/bot; write LABEL=team/bot"):
        labelled(["team/bot=x", "team/bot"])
    assert against(["finetuned=f,base", "other=o"]) == (Path("f"), {"other": Path("o")}, True)
    for odd in ("finetuned", "=x", "x="):
        with pytest.raises(InputError, match="write finetuned=PATH"):
            against([odd])


@pytest.mark.usefixtures("lm_eval")
def test_eval_in_a_locale_that_knows_few_letters(pair: Pair, artifact: Path, task_dir: Path, tmp_path: Path) -> None:
    """What it writes and prints holds letters that ASCII lacks (±, ✅): the exit code is that of the work."""
    out = tmp_path / "gr\xf6\xdfe"
    argv = ["eval", str(artifact), "--base", str(pair.base), "--tasks", "colours", "--task-dir", str(task_dir)]
    more = ["--against", f"finetuned={pair.finetuned}", "--limit", "5", "--out", str(out)]
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for again in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "deltacompress", *argv, *more],
            env=os.environ | locale, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert done.stderr.isascii()
        assert b"report in" in done.stdout
        assert (b"used again" in done.stderr) == bool(again)
    assert "±" in (out / "report.md").read_text(encoding="utf-8")

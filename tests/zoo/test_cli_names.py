"""The zoo from the other verbs: `compress --zoo --name` publishes, names stand where a path may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo.checkpoints import files_of
from zoo.cli_helpers import GOLDEN, Result, Run, data, failed

from deltacompress.artifact.restoration import restore
from deltacompress.cli.main import main
from deltacompress.zoo import Zoo

Verb = Callable[..., Result]


@pytest.fixture
def verb(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """verb(name, ...) of `deltacompress`."""
    monkeypatch.setenv("DELTACOMPRESS_CACHE", str(tmp_path / "entries"))

    def call(*argv: object) -> Result:
        code = main([str(one) for one in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a fine-tuned model."""
    restore(GOLDEN / "int4-24", base=GOLDEN / "base", out=tmp_path / "finetuned")
    return GOLDEN / "base", tmp_path / "finetuned"


def test_an_entry_is_told_of_by_its_name(verb: Verb, run: Run, tmp_path: Path) -> None:
    """Not by the directory of the cache in which it lies."""
    where = tmp_path / "zoo"
    run("init", where)
    run("add", GOLDEN / "base", "t/base", "--zoo", where)
    run("add", GOLDEN / "int4-24", "t/bot", "--zoo", where)
    assert data(verb("inspect", "t/bot", "--zoo", where, "--json"))["artifact"] == "t/bot"
    export = ("export", "t/bot", "--zoo", where, "--out", tmp_path / "out")
    assert verb(*export)[2].splitlines()[-1].startswith("error: t/bot: holds deltas, ")
    assert json.loads(verb(*export, "--json")[2])["error"]["where"] == "t/bot"


def test_compress_publishes(verb: Verb, run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    where = tmp_path / "zoo"
    run("init", where)
    run("add", GOLDEN / "base", "t/base", "--zoo", where)
    compress = ("compress", *pair, "--recipe", "lossless", "--json", "--zoo", where, "--name", "t/bot")
    assert data(verb(*compress, "--out", tmp_path / "one"))["published"] == "t/bot@1"
    assert data(verb(*compress, "--out", tmp_path / "two"))["published"] == "t/bot@2"
    found, entry = Zoo.open(where).show("t/bot@1")
    assert (entry.kind, entry.summary["recipe"]) == ("delta", "lossless")
    assert entry.lineage.parents == (Zoo.open(where).resolve("t/base").manifest,)
    assert found.manifest == Zoo.open(where).resolve("t/bot@2").manifest  # the same bytes, the same digest
    assert run("pull", "t/bot", tmp_path / "out", "--zoo", where)[0] == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    assert run("verify", "--zoo", where)[0] == 0


def test_compress_finds_the_zoo_in_the_environment(
    verb: Verb, pair: tuple[Path, Path], cli_zoo: Path, tmp_path: Path
) -> None:
    done = verb("compress", *pair, "--recipe", "lossless", "--json", "--out", tmp_path / "one", "--name", "t/new")
    assert data(done)["published"] == "t/new@1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--zoo", "ZOO"], ["--zoo", "--name NAMESPACE/NAME"]),
        (["--zoo", "ZOO", "--name", "Bot"], ["'Bot'", "namespace/name"]),
        (["--zoo", "ZOO", "--name", "t/bot@3"], ["leave out @"]),
        (["--zoo", "FOLDER", "--name", "t/bot"], ["not a zoo"]),
        (["--zoo", "NONE", "--name", "t/bot"], ["no such directory"]),
        (["--name", "t/bot"], ["--zoo PATH", "DELTACOMPRESS_ZOO"]),
        (["--zoo", "ZOO", "--name", "t/base"], ["t/base", "kind base-ref", "choose another name"]),
    ],
)
def test_a_destination_that_cannot_be_is_refused_before_any_work(
    verb: Verb, run: Run, pair: tuple[Path, Path], tmp_path: Path, options: list[str], words: list[str]
) -> None:
    run("init", tmp_path / "ZOO")
    run("add", GOLDEN / "base", "t/base", "--zoo", tmp_path / "ZOO")
    (tmp_path / "FOLDER").mkdir()
    told = [str(tmp_path / one) if one.isupper() else one for one in options]
    failed(verb("compress", *pair, "--recipe", "lossless", "--out", tmp_path / "out", *told), 2, *words)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_a_name_stands_where_a_path_may(verb: Verb, cli_zoo: Path, run: Run, tmp_path: Path) -> None:
    run("tag", "t/bot@1", "prod")
    assert data(verb("inspect", "t/bot@prod", "--json"))["recipe"] == "int4-24"
    assert data(verb("verify", "t/bot@2", "--base", GOLDEN / "base", "--json"))["verified"] is True
    assert verb("restore", "t/bot@prod", "--base", GOLDEN / "base", "--out", tmp_path / "model")[0] == 0
    restore(GOLDEN / "int4-24", base=GOLDEN / "base", out=tmp_path / "same")
    assert files_of(tmp_path / "model") == files_of(tmp_path / "same")
    failed(verb("inspect", "t/none"), 2, "no entry t/none")
    failed(verb("restore", "t/bot@9", "--base", GOLDEN / "base", "--out", tmp_path / "no"), 2, "no version 9")
    failed(verb("restore", "t/base", "--base", GOLDEN / "base", "--out", tmp_path / "no"), 2, "a base-ref, not a delta")
    assert not (tmp_path / "no").exists()


def test_a_wrong_base_is_refused_for_an_entry_too(
    verb: Verb, run: Run, pair: tuple[Path, Path], cli_zoo: Path, tmp_path: Path
) -> None:
    failed(verb("restore", "t/bot", "--base", pair[1], "--out", tmp_path / "no"), 3, str(pair[1]))
    assert json.loads(run("list", "--json")[1])


def test_times_are_told_as_dates(run: Run, cli_zoo: Path) -> None:
    moved = data(run("tag", "t/bot@1", "prod", "--json"))
    (told,) = data(run("history", "t/bot@prod", "--json"))
    assert told["created"] == moved["created"]
    assert told["created"].endswith("Z")
    assert told["created"][:10] in run("history", "t/bot@prod")[1]

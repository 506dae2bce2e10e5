"""Small files that ask for much, and things that are no files: every verb refuses them, in one line, at once.

Times are printed, and nothing waits for ever; memory is held to what the project promises.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked, Outcome, usable
from hostile import CASES, KINDS, Forgery, lay, put_in_place
from pairs import Pair, given_instead, write_data

from deltacompress.codecs.recipe import Recipe

pytestmark = pytest.mark.skipif(not usable(), reason="needs /proc to tell what a process took")

MEMORY = 256 << 20
WHOLE = Recipe.parse(
    {
        "name": "whole",
        "scope": "full",
        "rules": [
            {"codec": "rtn", "kind": "linear", "bits": 4, "grid": "symmetric", "group_size": 16},
            {"codec": "exact"},
        ],
    }
)
VERBS = ("inspect", "verify", "verify with base", "restore", "generate", "zoo add", "export")


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as process:
        yield process


@pytest.fixture(scope="module")
def sources(pair: Pair, artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    pair.compress(root / "plain", lossless="none")
    pair.compress(root / "full", recipe=WHOLE)
    return {"coded": artifact, "plain": root / "plain", "full": root / "full"}


def argv(verb: str, artifact: Path, pair: Pair, root: Path) -> list[str | Path]:
    """The command line of a verb over an artifact."""
    lines: dict[str, list[str | Path]] = {
        "inspect": ["inspect", artifact],
        "verify": ["verify", artifact],
        "verify with base": ["verify", artifact, "--base", pair.base],
        "restore": ["restore", artifact, "--base", pair.base, "--out", root / "restored"],
        "generate": ["generate", artifact, "w1", "--base", pair.base, "--max-new-tokens", "1", "--device", "cpu"],
        "zoo add": ["zoo", "add", artifact, "t/x", "--zoo", root / "zoo"],
        "export": ["export", artifact, "--out", root / "exported"],
    }
    return [*lines[verb], "--quiet"]


def assert_refused(outcome: Outcome, what: str) -> str:
    """In one line, with an exit code of ours, within its memory; returns the line."""
    print(f"{what}: {outcome.seconds:.2f} s, {outcome.memory >> 20} MB, exit {outcome.code}")
    assert outcome.code in (2, 3), f"{what}: {outcome}"
    assert outcome.stderr.startswith("error: "), f"{what}: {outcome}"
    assert outcome.stderr.count("\n") == 1, f"{what}: {outcome}"
    assert "internal error" not in outcome.stderr, f"{what}: {outcome}"
    assert "out of memory" not in outcome.stderr, f"{what}: {outcome}"
    assert outcome.stderr.isprintable() or outcome.stderr[:-1].isprintable(), f"{what}: {outcome}"
    assert outcome.memory < MEMORY, f"{what}: {outcome}"
    return outcome.stderr


@pytest.mark.parametrize(
    ("name", "source"), [(name, source) for name, case in CASES.items() for source in case.sources]
)
def test_forged_artifacts(
    name: str, source: str, sources: dict[str, Path], pair: Pair, forked: Forked, tmp_path: Path
) -> None:
    case = CASES[name]
    forgery = Forgery(sources[source], tmp_path / "forged")
    case.make(forgery)
    artifact = forgery.seal()
    assert forked.run("zoo", "init", tmp_path / "zoo", "--quiet").code == 0
    before = sorted(tmp_path.iterdir())
    for verb in VERBS:
        if verb == "export" and source != "full":
            continue  # it takes whole models only
        outcome = forked.run(*argv(verb, artifact, pair, tmp_path))
        what = f"{name}, {source}, {verb}"
        if verb in case.passes:
            print(f"{what}: {outcome.seconds:.2f} s, {outcome.memory >> 20} MB")
            assert outcome.code == 0, f"{what}: {outcome}"
            assert outcome.memory < MEMORY, f"{what}: {outcome}"
        else:
            told = assert_refused(outcome, what)
            assert str(artifact) in told or source in told or verb == "export", told
    assert sorted(tmp_path.iterdir()) == before


def test_the_sources_pass(sources: dict[str, Path], pair: Pair, forked: Forked, tmp_path: Path) -> None:
    """What makes the tests beside this one mean something."""
    assert forked.run("zoo", "init", tmp_path / "zoo", "--quiet").code == 0
    for source, artifact in sources.items():
        (tmp_path / source).mkdir()
        shutil.copytree(tmp_path / "zoo", tmp_path / source / "zoo")
        sealed = Forgery(artifact, tmp_path / source / "sealed").seal()
        for verb in VERBS:
            if verb != "export" or source == "full":
                outcome = forked.run(*argv(verb, sealed, pair, tmp_path / source))
                assert outcome.code == 0, f"{source}, {verb}: {outcome}"


# --- what is no file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "manifest.json", "delta-00001-of-00001.safetensors"])
def test_what_lies_in_the_place_of_a_file(
    file: str, kind: str, artifact: Path, pair: Pair, forked: Forked, tmp_path: Path
) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    put_in_place(copy, file, kind)
    assert forked.run("zoo", "init", tmp_path / "zoo", "--quiet").code == 0
    for verb in VERBS:
        told = assert_refused(forked.run(*argv(verb, copy, pair, tmp_path)), f"{file}, {kind}, {verb}")
        assert f"{copy / file}: cannot be read (" in told
        assert told.rstrip().endswith(("give the right file", "put a copy of the file there (cp -L)"))
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (file, kind)
        for file in ("config.json", "tokenizer.json", "model.safetensors")
        for kind in KINDS[:-1]
        if (file, kind) != ("tokenizer.json", "directory")  # a folder is no side file, whatever its name
    ],
)
@pytest.mark.parametrize("which", ["base", "finetuned"])
def test_what_lies_in_the_place_of_a_checkpoints_file(
    which: str, file: str, kind: str, pair: Pair, forked: Forked, tmp_path: Path
) -> None:
    for side in ("base", "finetuned"):
        shutil.copytree(getattr(pair, side), tmp_path / side)
    mine = Pair(tmp_path / "base", tmp_path / "finetuned", pair.data)
    lay(tmp_path / which / file, kind)
    told = assert_refused(forked.run(*mine.argv(tmp_path / "out", recipe="lossless")), f"{which}, {file}, {kind}")
    assert str(tmp_path / which) in told


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_lies_in_the_place_of_a_file_that_is_named(
    kind: str, artifact: Path, pair: Pair, forked: Forked, tmp_path: Path
) -> None:
    """On the command line, or in a zoo."""
    made = {name: tmp_path / name for name in ("recipe.yaml", "policy.yaml", "data.jsonl", "export.tar", "report.json")}
    for path in made.values():
        lay(path, kind)
    lines = {
        "recipe": pair.argv(tmp_path / "out", recipe=str(made["recipe.yaml"])),
        "calibration": given_instead(pair.argv(tmp_path / "out"), "--calibration", str(made["data.jsonl"])),
        "policy": ["gate", str(tmp_path), str(made["policy.yaml"]), "--quiet"],
        "report": ["gate", str(made["report.json"]), "default", "--quiet"],
        "import": ["zoo", "import", str(made["export.tar"]), "--zoo", str(tmp_path / "zoo"), "--quiet"],
        "attest": ["zoo", "attest", "t/x", str(made["report.json"]), "--zoo", str(tmp_path / "zoo"), "--quiet"],
    }
    assert forked.run("zoo", "init", tmp_path / "zoo", "--quiet").code == 0
    assert forked.run("zoo", "add", artifact, "t/x", "--zoo", tmp_path / "zoo", "--quiet").code == 0
    for what, line in lines.items():
        assert_refused(forked.run(*line), f"{what}, {kind}")
    blob = max((tmp_path / "zoo" / "blobs").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    os.chmod(blob.parent, 0o755)
    lay(blob, kind)
    for verb in (["verify"], ["pull", "t/x", str(tmp_path / "pulled")]):
        assert_refused(forked.run("zoo", *verb, "--zoo", tmp_path / "zoo", "--quiet"), f"zoo {verb[0]}, {kind}")


# --- data --------------------------------------------------------------------------------------------------------


def test_data_of_endless_lines(pair: Pair, forked: Forked, tmp_path: Path) -> None:
    data = write_data(tmp_path / "train.jsonl")
    with data.open("ab") as file:
        file.write(b'{"text": "')
        file.truncate(3 << 30)
    line = given_instead(pair.argv(tmp_path / "out"), "--calibration", str(data))
    assert "line 61: over 67108864 bytes" in assert_refused(forked.run(*line), "a line of 3 GB")


def test_reports_and_configs_that_are_too_much(pair: Pair, forked: Forked, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for what, raw in (
        ("deep", b'{"schema_version": ' + b"[" * 500 + b"]" * 500 + b"}"),
        ("deeper", b"[" * 200_000 + b"]" * 200_000),
        ("wide", b'{"schema_version": [' + b"[]," * 2_000_000 + b"1]}"),
        ("no number", b'{"schema_version": NaN, "digest": ""}'),
        ("a long number", b'{"schema_version": ' + b"9" * 5000 + b"}"),
    ):
        report.write_bytes(raw)
        assert_refused(forked.run("gate", report, "default", "--quiet"), f"report, {what}")
        for side in ("base", "finetuned"):
            shutil.rmtree(tmp_path / side, ignore_errors=True)
            shutil.copytree(getattr(pair, side), tmp_path / side)
        (tmp_path / "base" / "config.json").write_bytes(raw.replace(b"schema_version", b"x"))
        mine = Pair(tmp_path / "base", tmp_path / "finetuned", pair.data)
        if what != "no number":  # which Python's JSON reads, and no field of ours is
            assert_refused(forked.run(*mine.argv(tmp_path / "out", recipe="lossless")), f"config, {what}")
    with (tmp_path / "base" / "config.json").open("wb") as file:
        file.truncate(2 << 30)
    told = assert_refused(forked.run(*mine.argv(tmp_path / "out", recipe="lossless")), "config, large")
    assert "config.json: cannot be read (2147483648 bytes, more than the 16777216 it may have)" in told


def test_recipes_that_multiply(pair: Pair, forked: Forked, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    merges = "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12))
    lists = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
    for what, text in (
        ("merges", f"a0: &a0 {{x: 1}}\n{merges}\nname: x\nrules: []\n"),
        ("lists", f"a0: &a0 [1]\n{lists}\nname: x\nrules: *a11\n"),
        ("deep", "name: x\nrules: " + "[" * 900 + "]" * 900 + "\n"),
        ("a round", "name: x\nrules: &a [*a]\n"),
        ("long", "name: x\nrules: [" + "1," * 600_000 + "]\n"),
    ):
        recipe.write_text(text)
        told = assert_refused(forked.run(*pair.argv(tmp_path / "out", recipe=str(recipe))), f"recipe, {what}")
        assert str(recipe) in told
        assert len(told) < 400 + len(str(recipe))

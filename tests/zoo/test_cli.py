"""`deltacompress zoo ...` as people and scripts use it: what is printed where, exit codes, one line per error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from zoo.checkpoints import LORA, files_of, write_adapter

from deltacompress.cli.main import main
from deltacompress.zoo import Zoo, osfs
from deltacompress.zoo.layout import ZOO, alias_key, version_key
from deltacompress.zoo.names import parse
from deltacompress.zoo.read import copy_sources
from deltacompress.zoo.records import AliasRecord, ZooRecord, encode, nonce, now
from deltacompress.zoo.versions import resolve

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v1"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(verb, ...): exit code, stdout, stderr."""
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)

    def call(*argv: object) -> tuple[int, str, str]:
        code = main(["zoo", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def zoo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with a base, two versions of a delta and an adapter, named by DELTACOMPRESS_ZOO."""
    where = tmp_path / "zoo"
    assert run("init", where)[0] == 0
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(where))
    assert run("add", GOLDEN / "base", "t/base", "--hub-id", "acme/llama")[1] == "t/base@1\n"
    assert run("add", GOLDEN / "int4-24", "t/bot")[1] == "t/bot@1\n"
    assert run("add", GOLDEN / "int2-24", "t/bot")[1] == "t/bot@2\n"
    return where


def data(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def failed(result: tuple[int, str, str], code: int, *words: str) -> None:
    """Exit code, nothing on stdout, one line on stderr that says all of this (under notes of progress)."""
    assert result[0] == code, result
    assert not result[1]
    lines = [line for line in result[2].splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result[2]
    assert result[2].splitlines()[-1] == lines[0]
    for word in words:
        assert word in lines[0]


def test_what_scripts_rely_on(run: Run, tmp_path: Path) -> None:
    where = str(tmp_path / "new")
    assert run("init", where)[0] == 0
    assert run("add", GOLDEN / "int4-24", "t/bot", "--zoo", where)[:2] == (0, "t/bot@1\n")
    assert run("add", GOLDEN / "int2-24", "t/bot", "--zoo", where)[:2] == (0, "t/bot@2\n")
    (entry,) = data(run("list", "--zoo", where, "--json"))
    assert (entry["name"], entry["version"], entry["recipe"]) == ("t/bot", 2, "int2-24")
    versions = data(run("list", "--zoo", where, "--all-versions", "--json"))
    assert [one["version"] for one in versions] == [2, 1]
    assert run("pull", "t/bot@1", tmp_path / "out", "--zoo", where)[0] == 0
    assert files_of(tmp_path / "out") == files_of(GOLDEN / "int4-24")
    assert run("verify", "--zoo", where)[0] == 0
    assert data(run("verify", "t/bot", "--zoo", where, "--json"))["ok"] is True


def test_list_filters(run: Run, zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"sst2": {"accuracy": 0.9}}')
    assert data(run("attest", "t/bot@1", tmp_path / "r.json", "--json"))["scores"] == {"sst2.accuracy": 0.9}
    run("add", write_adapter(tmp_path / "a", LORA), "t/lora")

    def found(*argv: str) -> list[str]:
        return sorted(f"{one['name']}@{one['version']}" for one in data(run("list", "--all-versions", "--json", *argv)))

    assert found() == ["t/base@1", "t/bot@1", "t/bot@2"]  # the adapter did not fit
    assert found("--kind", "delta") == ["t/bot@1", "t/bot@2"]
    assert found("--base", "t/base") == ["t/base@1", "t/bot@1", "t/bot@2"]
    assert found("--base", "t/base@1") == ["t/base@1", "t/bot@1", "t/bot@2"]
    assert found("--base", "acme/llama") == ["t/base@1", "t/bot@1", "t/bot@2"]
    assert found("--base", "52a6b5a28401") == ["t/base@1", "t/bot@1", "t/bot@2"]
    assert found("--base", "t/other") == []
    assert found("--recipe", "int2-24") == ["t/bot@2"]
    assert found("--min-ratio", "0.44") == ["t/bot@2"]
    assert found("--score", "sst2.accuracy>=0.9") == ["t/bot@1"]
    assert found("--score", "sst2.accuracy>0.9") == []
    failed(run("list", "--score", "good"), 2, "sst2.accuracy>=0.9")
    table = run("list")[1]
    assert "t/bot@2" in table
    assert "t/bot@1" not in table


def test_show_diff_lineage_du(run: Run, zoo: Path, tmp_path: Path) -> None:
    told = data(run("show", "t/bot@1", "--json"))
    assert (told["kind"], told["recipe"], told["manifest"]["kind"]) == ("delta", "int4-24", "delta")
    assert run("show", "t/bot", "--card")[1].startswith("---\nbase_model: acme/llama\nbase_model_relation: quantized\n")
    assert data(run("diff", "t/bot@1", "t/bot@2", "--json"))["same_tensors"] >= 0
    assert "int4-24" in run("diff", "t/bot@1", "t/bot@2")[1]
    assert data(run("du", "--json"))["logical_bytes"] > data(run("du", "--json"))["physical_bytes"] > 0
    assert [row["entry"] for row in data(run("du", "--json"))["entries"]] == ["t/base@1", "t/bot@1", "t/bot@2"]
    lines = run("lineage", "t/bot@1")[1].splitlines()
    assert [line.strip(" `|-").split("  ")[0] for line in lines] == [
        "t/base@1",
        "finetune: finetuned (93d828abfc35)",
        "quantized: t/bot@1",
    ]
    graph = data(run("lineage", "--json"))
    assert len(graph["nodes"]) == 4
    assert len(graph["edges"]) == 3
    assert run("lineage", "--mermaid")[1].startswith("flowchart LR\n")
    assert run("lineage", "--svg", tmp_path / "l.svg")[0] == 0
    ElementTree.parse(tmp_path / "l.svg")
    failed(run("lineage", "--svg", tmp_path / "no" / "l.svg"), 2, "l.svg")


def test_names_move_and_entries_go_and_come_back(run: Run, zoo: Path, tmp_path: Path) -> None:
    assert data(run("tag", "t/bot@2", "prod", "--json"))["generation"] == 1
    moved = run("tag", "t/bot@1", "prod", "--json")
    assert json.loads(moved[1])["rollback"] is True
    assert "went back to the older version 1" in moved[2]
    assert [one["version"] for one in data(run("history", "t/bot@prod", "--json"))] == [2, 1]
    failed(run("tag", "t/bot@2", "prod", "--expect", "2"), 2, "points to version 1")
    failed(run("rm", "t/bot@1"), 2, "alias prod points there")
    assert data(run("rm", "t/bot@1", "--force", "--json"))["removed"] == [1]
    failed(run("pull", "t/bot@prod", tmp_path / "x"), 2, "was removed", "undelete")
    assert data(run("gc", "--grace", "0", "--json"))["trashed"] > 0
    assert run("undelete", "t/bot@1")[0] == 0
    assert run("pull", "t/bot@prod", tmp_path / "x")[0] == 0
    assert data(run("gc", "--grace", "0", "--empty-trash", "--json"))["kept"] > 0
    assert run("verify")[0] == 0


def test_moves_between_zoos(run: Run, zoo: Path, tmp_path: Path) -> None:
    for name in ("second", "third", "fourth"):
        run("init", tmp_path / name)
    assert data(run("push", "t/bot@1", tmp_path / "second", "--as", "u/bot", "--json"))["name"] == "u/bot"
    assert data(run("pull", "t/bot", tmp_path / "third", "--json"))["version"] == 1
    assert run("export", tmp_path / "x.tar", "--all")[0] == 0
    rows = data(run("import", tmp_path / "x.tar", "--zoo", tmp_path / "fourth", "--json"))
    assert [one["target"] for one in rows] == ["t/base@1", "t/bot@1", "t/bot@2"]
    for name in ("second", "third", "fourth"):
        assert run("verify", "--zoo", tmp_path / name)[0] == 0
    failed(run("export", tmp_path / "y.tar"), 2, "--all")
    failed(run("import", zoo / "zoo.json"), 3, "not a file of `zoo export`")


def test_signatures(run: Run, zoo: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    assert run("keygen", tmp_path / "key")[0] == 0
    key = data(run("sign", "t/bot@1", "--key", tmp_path / "key", "--json"))["public_key"]
    signed = run("verify", "t/bot@1", "--signed-by", tmp_path / "key.pub", "--json")
    assert data(signed)["signed_by"] == key
    failed(run("verify", "t/bot@2", "--signed-by", tmp_path / "key.pub"), 2, "no signature of a key that you trust")
    failed(run("verify", "--signed-by", tmp_path / "key.pub"), 2, "NAME")


def test_a_damaged_blob_is_told_and_mended(run: Run, zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo, tmp_path / "copy")
    entry = Zoo.open(zoo).show("t/bot@2")[1]
    part = next(one for one in entry.layers if one.annotations.get("file", "").endswith(".safetensors"))
    blob = zoo / "blobs" / "sha256" / part.digest[:2] / part.digest
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    code, out, err = run("verify")
    assert code == 3
    assert "damaged" in out
    assert "t/bot@2" in err.splitlines()[-1]
    assert "zoo fsck --repair --from COPY" in err.splitlines()[-1]
    failed(
        run("pull", "t/bot@2", tmp_path / "out"), 3, "t/bot@2", "delta-00001-of-00001.safetensors", "zoo fsck --repair"
    )
    assert not (tmp_path / "out").exists()
    assert run("fsck")[0] == 3
    failed(run("fsck", "--from", tmp_path / "copy"), 2, "--repair")
    repaired = data(run("fsck", "--repair", "--from", tmp_path / "copy", "--json"))
    assert (repaired["ok"], len(repaired["repaired"])) == (True, 1)
    assert run("pull", "t/bot@2", tmp_path / "out")[0] == 0
    blob.unlink()
    shutil.rmtree(zoo / "blobs")
    failed(run("pull", "t/bot@1", tmp_path / "again"), 3, "t/bot@1", "missing", "zoo fsck --repair")
    assert len(data(run("list", "--json"))) == 2  # a list never stops


def test_no_name_moves_the_cursor(run: Run, zoo: Path) -> None:
    opened = Zoo.open(zoo)
    entry = opened.show("t/bot@2")[1]
    told = entry.lineage.model_copy(update={"base_name": "\x1b[2Jx\ny", "finetuned_name": "\x1b]0;x\x07"})
    hostile = entry.model_copy(update={"lineage": told, "summary": dict(entry.summary) | {"recipe": "\x1b[31m"}})
    opened.publish(hostile, copy_sources(opened.store, entry), "t/bot")
    for verb in (["list"], ["show", "t/bot"], ["diff", "t/bot@1", "t/bot"], ["lineage"], ["show", "t/bot", "--card"]):
        code, out, _ = run(*verb)
        assert code == 0
        assert "\x1b" not in out
        assert "\x07" not in out


def test_a_sample(run: Run, zoo: Path) -> None:
    some = data(run("verify", "--sample", "0.3", "--seed", "1", "--json"))
    assert 0 < some["blobs"] < data(run("verify", "--json"))["blobs"]
    failed(run("verify", "--sample", "0"), 2, "--sample")


def test_what_is_no_zoo(run: Run, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    failed(run("list", "--zoo", empty), 2, str(empty), "not a zoo", "zoo init")
    failed(run("list", "--zoo", tmp_path / "none"), 2, "no such directory")
    failed(run("list", "--zoo", zoo / "zoo.json"), 2, "no such directory")
    failed(run("list", "--zoo", "http://x/y"), 2, "s3://")
    failed(run("init", zoo), 2, "a zoo already")
    failed(run("init", GOLDEN / "base"), 2, "holds")
    monkeypatch.delenv("DELTACOMPRESS_ZOO")
    failed(run("list"), 2, "--zoo PATH", "DELTACOMPRESS_ZOO")


def test_a_newer_or_damaged_zoo(run: Run, zoo: Path) -> None:
    record = zoo / "zoo.json"
    raw = record.read_bytes()
    record.chmod(0o644)
    record.write_bytes(encode(ZOO, ZooRecord(id="0" * 32, capabilities=(), format=2)))
    failed(run("list"), 3, "format 2", "upgrade deltacompress")
    record.write_bytes(raw[:-9])
    failed(run("list"), 3, "zoo.json", "damaged")


@pytest.mark.parametrize("name", ["bot", "T/bot", "t/../x", "t/bot@1", "/t/bot", "t/bot/x", "t/\u212a", "t/bot@@"])
def test_names_that_are_none(run: Run, zoo: Path, name: str) -> None:
    failed(run("add", GOLDEN / "int2-24", name), 2)


def test_entries_that_are_not_there(run: Run, zoo: Path, tmp_path: Path) -> None:
    for verb in (["pull", "t/none", tmp_path / "o"], ["show", "t/none"], ["verify", "t/none"], ["rm", "t/none"]):
        failed(run(*verb), 2, "no entry t/none")
    failed(run("pull", "t/bot@9", tmp_path / "o"), 2, "has no version 9; it has 1 to 2")
    failed(run("pull", "t/bot@prod", tmp_path / "o"), 2, "no alias prod")
    failed(run("pull", "t/bot", GOLDEN / "base"), 2, "exists already")
    failed(run("add", tmp_path, "t/x"), 2, "adapter or base model")
    failed(run("add", GOLDEN / "restored.json", "t/x"), 2, "not a directory")
    failed(run("attest", "t/bot", GOLDEN / "base" / "model.safetensors"), 2, "not a JSON object")


def test_a_damaged_artifact_is_not_added(run: Run, zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "int2-24", tmp_path / "a")
    shard = tmp_path / "a" / "delta-00001-of-00001.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    failed(run("add", tmp_path / "a", "t/x"), 3, "delta-00001-of-00001.safetensors", "copy the artifact again")
    assert not [one for one in data(run("list", "--json")) if one["name"] == "t/x"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_store_that_is_read_only(run: Run, zoo: Path, tmp_path: Path) -> None:
    folders = [zoo, *(path for path in zoo.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        failed(run("add", GOLDEN / "sign-24", "t/bot"), 2, "no permission")
        failed(run("tag", "t/bot", "prod"), 2, "no permission")
        assert run("pull", "t/bot", tmp_path / "out")[0] == 0
        assert run("verify")[0] == 0
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_store_that_turns_read_only(run: Run, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(osfs, "link", refuse)
    failed(run("add", GOLDEN / "sign-24", "t/bot"), 2, "read-only")
    failed(run("tag", "t/bot", "prod"), 2, "read-only")
    monkeypatch.undo()
    assert [one.version for one in Zoo.open(zoo).list()] == [1, 2]


def test_two_people_move_one_alias(run: Run, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltacompress.zoo import tags

    run("tag", "t/bot@1", "prod")
    opened = Zoo.open(zoo)
    history = tags.history

    def somebody_is_quicker(store: Any, name: str, alias: str) -> Any:
        moves = history(store, name, alias)
        key = alias_key(name, alias, len(moves) + 1)
        previous = tags._hash(store, alias_key(name, alias, len(moves)))
        record = AliasRecord(version=2, previous=previous, rollback=False, nonce=nonce(), created=now())
        opened.store.put_if_absent(key, encode(key, record))
        return moves

    monkeypatch.setattr(tags, "history", somebody_is_quicker)
    failed(run("tag", "t/bot@2", "prod"), 2, "was moved by somebody else at the same moment")


def test_a_damaged_version_stops_nobody_else(run: Run, zoo: Path, tmp_path: Path) -> None:
    key = version_key("t/bot", 2)
    (zoo / key).chmod(0o644)
    (zoo / key).write_bytes(b"{}")
    failed(run("pull", "t/bot", tmp_path / "x"), 3, key)
    assert run("pull", "t/bot@1", tmp_path / "x")[0] == 0
    code, out, err = run("list", "--json")
    assert code == 0
    assert [one["problem"] is None for one in json.loads(out)] == [True, False]
    assert "warning" in err
    assert run("lineage")[0] == 0
    assert resolve(Zoo.open(zoo).store, parse("t/base")).version == 1

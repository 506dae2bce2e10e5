"""`deltacompress zoo ...` on bad input: exit codes, nothing on stdout, one clear line that says the way out."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from zoo.cli_helpers import GOLDEN, Run, data, failed

from deltacompress.artifact.manifest import read_manifest
from deltacompress.files.places import MANIFEST
from deltacompress.zoo import Zoo
from deltacompress.zoo.ledger import publish
from deltacompress.zoo.ledger.entry import EntryManifest
from deltacompress.zoo.ledger.names import parse
from deltacompress.zoo.ledger.read import copy_sources
from deltacompress.zoo.ledger.records import AliasRecord, ZooRecord, encode, nonce, now
from deltacompress.zoo.ledger.versions import resolve
from deltacompress.zoo.store import osfs
from deltacompress.zoo.store.layout import ZOO, alias_key, version_key


def test_a_damaged_blob_is_told_and_mended(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(cli_zoo, tmp_path / "copy")
    entry = Zoo.open(cli_zoo).show("t/bot@2")[1]
    part = next(one for one in entry.layers if one.annotations.get("file", "").endswith(".safetensors"))
    blob = cli_zoo / "blobs" / "sha256" / part.digest[:2] / part.digest
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
    shutil.rmtree(cli_zoo / "blobs")
    failed(run("pull", "t/bot@1", tmp_path / "again"), 3, "t/bot@1", "missing", "zoo fsck --repair")
    assert len(data(run("list", "--json"))) == 2  # a list never stops


def test_a_summary_says_nothing_of_what_is_known(run: Run, cli_zoo: Path) -> None:
    """Whoever made an entry wrote it."""
    zoo = Zoo.open(cli_zoo)
    _, entry = zoo.show("t/bot")
    told = {"name": "other/name", "kind": "spoofed", "digest": "spoofed", "entry_bytes": -1, "ratio": "large"}
    forged = entry.model_copy(update={"summary": dict(entry.summary) | told})
    made = zoo.publish(forged, copy_sources(zoo.store, entry), "far/bot")
    shown = data(run("show", "far/bot", "--json"))
    assert (shown["name"], shown["kind"], shown["digest"]) == ("far/bot", "delta", made.manifest)
    assert f"digest: {made.manifest}" in zoo.card("far/bot")
    rows = data(run("diff", "t/bot", "far/bot", "--json"))["facts"]
    assert not {"kind", "entry_bytes"} & {row["what"] for row in rows}
    assert "far/bot@1" in run("list")[1]
    assert {row["name"]: row["ratio"] for row in data(run("list", "--json"))}["far/bot"] == "large"


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("base", ["--base", "no/such"]),
        ("base", ["--parent", "no/such"]),
        ("base", ["--relation", "merge"]),
        ("int2-24", ["--hub-id", "acme/llama"]),
        ("int2-24", ["--revision", "abc"]),
    ],
)
def test_what_says_nothing_of_a_kind_is_refused(run: Run, cli_zoo: Path, source: str, options: list[str]) -> None:
    before = len(data(run("list", "--all-versions", "--json")))
    failed(run("add", GOLDEN / source, "t/new", *options), 2, source, f"for which {options[0]} says nothing")
    assert len(data(run("list", "--all-versions", "--json"))) == before


def test_a_history_is_of_an_alias(run: Run, cli_zoo: Path) -> None:
    for name in ("t/bot", "t/bot@1"):
        failed(run("history", name), 2, f"{name}: names no alias", "write t/bot@ALIAS")
    failed(run("history", "t/bot@none"), 2, "t/bot has no alias none")


NASTY = "\x1b[2Jx\ny\x1b]0;z\x07\u202e\x9b31m"
"""Clears a screen, begins a line, sets a title, rings, turns text around."""


@pytest.mark.usefixtures("any_text")
def test_no_name_moves_the_cursor(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    opened = Zoo.open(cli_zoo)
    entry = opened.show("t/bot@2")[1]
    told = entry.lineage.model_copy(update={"base_name": NASTY, "finetuned_name": NASTY})
    layers = tuple(
        one.model_copy(update={"annotations": dict(one.annotations) | {"part": NASTY}}) for one in entry.layers
    )
    summary = dict(entry.summary) | {"recipe": NASTY}
    hostile = entry.model_copy(update={"lineage": told, "summary": summary, "layers": layers})
    opened.publish(hostile, copy_sources(opened.store, entry), "t/bot")
    report = EntryManifest(
        kind="report", config=entry.config, summary={"tasks": NASTY, "acc": 0.5}, subject=hostile.digest
    )
    opened.attach(report, copy_sources(opened.store, report))
    part = next(one for one in hostile.layers if one.media_type.endswith("bundle.v1"))
    blob = cli_zoo / "blobs" / "sha256" / part.digest[:2] / part.digest
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    for verb, code in {
        ("list",): 0,
        ("list", "--all-versions", "--score", "acc>0"): 0,
        ("list", "--base", NASTY): 0,
        ("show", "t/bot"): 0,
        ("show", "t/bot", "--card"): 0,
        ("diff", "t/bot@1", "t/bot"): 0,
        ("lineage",): 0,
        ("lineage", "--mermaid"): 0,
        ("du",): 0,
        ("verify",): 3,
        ("verify", "t/bot"): 3,
        ("fsck", "--repair"): 3,
        ("pull", "t/bot", tmp_path / "out"): 3,
        ("export", tmp_path / "x.tar", "t/bot"): 3,
        ("show", NASTY): 2,
        ("tag", "t/bot", NASTY): 2,
        ("add", NASTY, "t/x"): 2,
        ("attest", "t/bot", tmp_path / NASTY): 2,
    }.items():
        found, out, err = run(*verb)
        assert found == code, (verb, err)
        for line in (out + err).splitlines():
            assert line.isprintable(), (verb, line)
        assert "\ny" not in out + err


def test_names_that_cannot_be_printed_are_not_added(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    told = "holds characters that cannot be printed; give it a plain name"
    for name in ("a\nb", "a\x1b[31mb", "a\u202eb", "a\u200bb"):
        failed(run("add", GOLDEN / "base", "t/new", "--hub-id", name), 2, "hub id", told)
        failed(run("add", GOLDEN / "base", "t/new", "--revision", name), 2, "revision", told)
        shutil.copytree(GOLDEN / "base", tmp_path / name)
        failed(run("add", tmp_path / name, "t/new"), 2, "its name", told)
        for what, change in {
            "name of the base": {"base": {"name": name}},
            "name of the fine-tuned model": {"finetuned": {"name": name}},
            "recipe": {"recipe": {"name": name}},
        }.items():
            failed(run("add", renamed(tmp_path / "delta", change), "t/new"), 2, "manifest.json", what, told)
    failed(run("add", GOLDEN / "base", "t/new", "--hub-id", "a" * 1001), 2, "hub id: 1001 characters, at most 1000 fit")
    failed(run("add", renamed(tmp_path / "delta", {"base": {"name": "a" * 5000}}), "t/new"), 2, "at most 1000 fit")
    assert not [one for one in data(run("list", "--json")) if one["name"] == "t/new"]
    for name in ("Büro Modell", "模型", "a'b\"c\\d"):  # whatever can be printed is a name
        assert run("add", renamed(tmp_path / "delta", {"base": {"name": name}}), "t/new")[0] == 0
        assert data(run("show", "t/new", "--json"))["base"] == name


def renamed(copy: Path, change: dict[str, dict[str, str]]) -> Path:
    """The golden delta with other names in its manifest."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(GOLDEN / "int2-24", copy)
    manifest = read_manifest(copy)
    told = manifest.model_dump()
    new = {key: told[key] | value for key, value in change.items()}
    (copy / MANIFEST).write_bytes(type(manifest).model_validate(told | new).to_bytes())
    return copy


def test_what_comes_from_another_zoo_is_held_to_the_same_rule(
    run: Run, cli_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Zoo.init(tmp_path / "other")
    entry = Zoo.open(cli_zoo).show("t/bot@2")[1]
    hostile = entry.model_copy(update={"summary": dict(entry.summary) | {"recipe": NASTY}})
    with monkeypatch.context() as patch:
        patch.setattr(publish, "check_texts", lambda texts, where: None)
        other.publish(hostile, copy_sources(Zoo.open(cli_zoo).store, entry), "t/far")
    assert run("export", tmp_path / "x.tar", "t/far", "--zoo", other.where)[0] == 0
    failed(run("import", tmp_path / "x.tar"), 2, "t/far: recipe", "cannot be printed")
    failed(run("push", "t/far", cli_zoo, "--zoo", other.where), 2, "t/far: recipe", "cannot be printed")
    (tmp_path / "r.json").write_text(json.dumps({"acc": 0.5}))
    assert run("attest", "t/far", tmp_path / "r.json", "--zoo", other.where)[0] == 0  # what is there can be used


def test_what_is_no_zoo(run: Run, cli_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    failed(run("list", "--zoo", empty), 2, str(empty), "not a zoo", "zoo init")
    failed(run("list", "--zoo", tmp_path / "none"), 2, "no such directory")
    failed(run("list", "--zoo", cli_zoo / "zoo.json"), 2, "a file; a zoo is a directory")
    failed(run("list", "--zoo", "http://x/y"), 2, "s3://")
    failed(run("init", cli_zoo), 2, "a zoo already")
    failed(run("init", GOLDEN / "base"), 2, "holds")
    monkeypatch.delenv("DELTACOMPRESS_ZOO")
    failed(run("list"), 2, "--zoo PATH", "DELTACOMPRESS_ZOO")


def test_a_newer_or_damaged_zoo(run: Run, cli_zoo: Path) -> None:
    record = cli_zoo / "zoo.json"
    raw = record.read_bytes()
    record.chmod(0o644)
    record.write_bytes(encode(ZOO, ZooRecord(id="0" * 32, capabilities=(), format=2)))
    failed(run("list"), 3, "format 2", "upgrade deltacompress")
    record.write_bytes(raw[:-9])
    failed(run("list"), 3, "zoo.json", "damaged")


@pytest.mark.parametrize("source", ["/none/such", "./none", "none", "a/b/c", "../none/such", "~/none"])
def test_a_source_that_is_not_there_is_told_before_torch_is_imported(
    run: Run, cli_zoo: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setitem(sys.modules, "deltacompress.checkpoints.reader", None)
    failed(run("add", source, "t/new"), 2, f"{source}: no such directory; give one, or the hub id of a base model")


@pytest.mark.parametrize("name", ["bot", "T/bot", "t/../x", "t/bot@1", "/t/bot", "t/bot/x", "t/\u212a", "t/bot@@"])
def test_names_that_are_none(run: Run, cli_zoo: Path, name: str) -> None:
    failed(run("add", GOLDEN / "int2-24", name), 2)


def test_entries_that_are_not_there(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    for verb in (["pull", "t/none", tmp_path / "o"], ["show", "t/none"], ["verify", "t/none"], ["rm", "t/none"]):
        failed(run(*verb), 2, "no entry t/none")
    failed(run("pull", "t/bot@9", tmp_path / "o"), 2, "has no version 9; it has 1 to 2")
    failed(run("pull", "t/bot@prod", tmp_path / "o"), 2, "no alias prod")
    failed(run("pull", "t/bot", GOLDEN / "base"), 2, "exists already, and holds config.json; choose another directory")
    failed(run("add", tmp_path, "t/x"), 2, "adapter or base model")
    failed(run("add", GOLDEN / "restored.json", "t/x"), 2, "not a directory")
    failed(run("attest", "t/bot", GOLDEN / "base" / "model.safetensors"), 2, "not a JSON object")


def test_a_damaged_artifact_is_not_added(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "int2-24", tmp_path / "a")
    shard = tmp_path / "a" / "delta-00001-of-00001.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    failed(run("add", tmp_path / "a", "t/x"), 3, "delta-00001-of-00001.safetensors", "copy the artifact again")
    assert not [one for one in data(run("list", "--json")) if one["name"] == "t/x"]


def test_a_store_that_is_read_only(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    folders = [cli_zoo, *(path for path in cli_zoo.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        if os.access(cli_zoo, os.W_OK):
            pytest.skip("this user writes everywhere")
        failed(run("add", GOLDEN / "sign-24", "t/bot"), 2, "no permission")
        failed(run("tag", "t/bot", "prod"), 2, "no permission")
        assert run("pull", "t/bot", tmp_path / "out")[0] == 0
        assert run("verify")[0] == 0
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_store_that_turns_read_only(run: Run, cli_zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(osfs, "link", refuse)
    failed(run("add", GOLDEN / "sign-24", "t/bot"), 2, "read-only")
    failed(run("tag", "t/bot", "prod"), 2, "read-only")
    monkeypatch.undo()
    assert [one.version for one in Zoo.open(cli_zoo).list()] == [1, 2]


def test_a_full_disk(run: Run, cli_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 3
    write = osfs.write

    def full(fd: int, chunk: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return write(fd, chunk)

    monkeypatch.setattr(osfs, "write", full)
    failed(run("add", GOLDEN / "sign-24", "t/new"), 2, str(cli_zoo), "the disk is full; free some space")
    failed(run("tag", "t/bot", "prod"), 2, "the disk is full")
    failed(run("export", tmp_path / "x.tar", "--all"), 2, "x.tar", "the disk is full")
    failed(run("pull", "t/bot", tmp_path / "out"), 2, "out", "the disk is full")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir() if path.name in ("x.tar", "out")] == []
    opened = Zoo.open(cli_zoo)
    assert opened.verify().ok
    assert [one.name for one in opened.list()] == ["t/base", "t/bot"]
    assert str(opened.add(GOLDEN / "sign-24", "t/new")) == "t/new@1"


def test_two_people_move_one_alias(run: Run, cli_zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltacompress.zoo.ledger import tags

    run("tag", "t/bot@1", "prod")
    opened = Zoo.open(cli_zoo)
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


def test_a_damaged_version_stops_nobody_else(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    key = version_key("t/bot", 2)
    (cli_zoo / key).chmod(0o644)
    (cli_zoo / key).write_bytes(b"{}")
    failed(run("pull", "t/bot", tmp_path / "x"), 3, key, "; repair it with `zoo fsck --repair --from COPY`")
    assert run("pull", "t/bot@1", tmp_path / "x")[0] == 0
    code, out, err = run("list", "--json")
    assert code == 0
    assert [one["problem"] is None for one in json.loads(out)] == [True, False]
    assert "warning" in err
    assert run("lineage")[0] == 0
    assert resolve(Zoo.open(cli_zoo).store, parse("t/base")).version == 1


def test_a_damaged_alias_is_told(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    run("tag", "t/bot@1", "prod")
    run("tag", "t/bot@2", "next")
    shutil.copytree(cli_zoo, tmp_path / "copy")
    key = alias_key("t/bot", "prod", 1)
    (cli_zoo / key).chmod(0o644)
    (cli_zoo / key).write_bytes(b"{}")
    for verb in (["list"], ["list", "--all-versions"], ["lineage"]):
        code, out, err = run(*verb)
        assert code == 0
        assert len([line for line in err.splitlines() if line.startswith("warning: t/bot@prod: ")]) == 1
        assert "zoo fsck --repair --from COPY" in err
        assert "t/bot@2" in out
    row = data(run("list", "--json"))[1]
    assert (row["problem"], row["aliases"], len(row["alias_problems"])) == (None, ["next"], 1)
    assert "alias damaged" in run("list")[1]
    failed(run("show", "t/bot@prod"), 3, key, "; repair it with `zoo fsck --repair --from COPY`")
    assert run("fsck", "--repair", "--from", tmp_path / "copy")[0] == 0
    assert data(run("list", "--json"))[1]["alias_problems"] == []


@pytest.mark.parametrize("file", [".", "/"])
def test_no_name_of_a_file(run: Run, cli_zoo: Path, file: str) -> None:
    failed(run("export", file, "t/bot"), 2, "no name of a file; give the tar file to write")
    failed(run("keygen", file), 2, "no name of a file; give the private key to write")


def test_nothing_is_written_into_a_zoo(
    run: Run, cli_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stands in a zoo and names a file by itself would leave a stray there."""
    before = sorted(cli_zoo.rglob("*"))
    (tmp_path / "link").symlink_to(cli_zoo / "names")
    monkeypatch.chdir(cli_zoo)
    for verb in (
        ["pull", "t/bot", "out"],
        ["pull", "t/bot", "names/t/out"],
        ["pull", "t/bot", tmp_path / "link" / "out"],
        ["export", "x.tar", "t/bot"],
        ["keygen", "key"],
        ["lineage", "--svg", "x.svg"],
        ["init", "nested"],
    ):
        failed(
            run(*verb), 2, f"{verb[-1] if verb[0] != 'export' else 'x.tar'}: lies inside the zoo {cli_zoo}", "outside"
        )
    assert sorted(cli_zoo.rglob("*")) == before
    assert run("verify", "--zoo", ".")[0] == 0
    assert run("pull", "t/bot", "../out", "--zoo", ".")[0] == 0


def test_an_export_that_exists_is_refused_before_any_work(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "x.tar").symlink_to(tmp_path / "nowhere")
    for name in ("t/bot", "t/none"):  # not even looked for
        failed(run("export", tmp_path / "x.tar", name), 2, "x.tar: exists already")


def test_another_kind_under_one_name_is_refused(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    told = "t/base: its versions are of kind base-ref, this one is of kind delta; choose another name"
    failed(run("add", GOLDEN / "int2-24", "t/base"), 2, told)
    failed(run("push", "t/bot", cli_zoo, "--as", "t/base"), 2, told)
    failed(
        run("add", GOLDEN / "base", "t/bot"), 2, "t/bot: its versions are of kind delta, this one is of kind base-ref"
    )
    run("init", tmp_path / "other")
    run("add", GOLDEN / "base", "t/bot", "--zoo", tmp_path / "other")
    run("export", tmp_path / "x.tar", "t/bot")
    failed(
        run("import", tmp_path / "x.tar", "--zoo", tmp_path / "other"), 2, "of kind base-ref, this one is of kind delta"
    )
    assert [one["version"] for one in data(run("list", "--json"))] == [1, 2]
    assert run("verify")[0] == 0


def test_the_kind_of_a_name_is_free_again_when_nothing_is_left_of_it(run: Run, cli_zoo: Path) -> None:
    run("rm", "t/base")
    assert run("add", GOLDEN / "int2-24", "t/base")[1] == "t/base@2\n"
    key = version_key("t/bot", 2)
    (cli_zoo / key).chmod(0o644)
    (cli_zoo / key).write_bytes(b"{}")
    failed(run("add", GOLDEN / "base", "t/bot"), 2, "of kind delta")  # what the version before says

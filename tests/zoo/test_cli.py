"""`deltacompress zoo ...` as people and scripts use it: what is printed where, and what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from zoo.checkpoints import LORA, files_of, write_adapter
from zoo.cli_helpers import GOLDEN, Run, data, failed

from deltacompress.zoo import Zoo
from deltacompress.zoo.ledger.read import copy_sources


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


def test_list_filters(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
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
    least = max(one["ratio"] or 0 for one in data(run("list", "--json")))
    assert found("--min-ratio", repr(least)) == ["t/bot@2"]
    assert found("--min-ratio", repr(least + 1e-6)) == []
    assert found("--score", "sst2.accuracy>=0.9") == ["t/bot@1"]
    assert found("--score", "sst2.accuracy>0.9") == []
    failed(run("list", "--score", "good"), 2, "sst2.acc>=0.9")
    table = run("list")[1]
    assert "t/bot@2" in table
    assert "t/bot@1" not in table


def test_show_diff_lineage_du(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
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


def test_names_move_and_entries_go_and_come_back(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
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


def test_moves_between_zoos(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    for name in ("second", "third", "fourth"):
        run("init", tmp_path / name)
    first = data(run("push", "t/bot@1", tmp_path / "second", "--as", "u/bot", "--json"))
    assert (first["name"], first["same_as"]) == ("u/bot", None)
    code, _, err = run("push", "t/bot@1", tmp_path / "second", "--as", "u/bot")
    assert (code, err.splitlines()[-1]) == (0, "u/bot@2 holds the same as u/bot@1, byte for byte")
    assert "holds the same" not in run("push", "t/bot@2", tmp_path / "second", "--as", "u/bot")[2]
    again = data(run("push", "t/bot@1", tmp_path / "second", "--as", "u/bot", "--json"))
    assert (again["version"], again["same_as"]) == (4, "u/bot@2")
    assert Zoo.open(cli_zoo).push("t/bot@1", Zoo.open(tmp_path / "second"), "u/bot").same_as == "u/bot@4"
    assert data(run("pull", "t/bot", tmp_path / "third", "--json"))["version"] == 1
    assert run("export", tmp_path / "x.tar", "--all")[0] == 0
    rows = data(run("import", tmp_path / "x.tar", "--zoo", tmp_path / "fourth", "--json"))
    assert "same as" not in run("push", "t/bot@1", tmp_path / "fourth", "--as", "u/bot")[1]
    assert [one["target"] for one in rows] == ["t/base@1", "t/bot@1", "t/bot@2"]
    for name in ("second", "third", "fourth"):
        assert run("verify", "--zoo", tmp_path / name)[0] == 0
    failed(run("export", tmp_path / "y.tar"), 2, "--all")
    failed(run("import", cli_zoo / "zoo.json"), 3, "not a file of `zoo export`")


def test_signatures(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    assert run("keygen", tmp_path / "key")[0] == 0
    key = data(run("sign", "t/bot@1", "--key", tmp_path / "key", "--json"))["public_key"]
    signed = run("verify", "t/bot@1", "--signed-by", tmp_path / "key.pub", "--json")
    assert data(signed)["signed_by"] == key
    failed(run("verify", "t/bot@2", "--signed-by", tmp_path / "key.pub"), 2, "no signature of a key that you trust")
    failed(run("verify", "--signed-by", tmp_path / "key.pub"), 2, "NAME")


def test_the_same_again_is_told(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    code, out, err = run("add", GOLDEN / "int4-24", "t/bot")
    assert (code, out) == (0, "t/bot@3\n")
    assert err.splitlines()[-1] == "t/bot@3 holds the same as t/bot@1, byte for byte"
    assert data(run("add", GOLDEN / "int4-24", "t/bot", "--json"))["same_as"] == "t/bot@3"  # the newest of them
    run("rm", "t/bot@4")
    assert data(run("add", GOLDEN / "int4-24", "t/bot", "--json"))["same_as"] == "t/bot@3"
    assert data(run("add", GOLDEN / "int4-24", "t/other", "--json"))["same_as"] is None
    assert data(run("add", GOLDEN / "base", "t/base", "--hub-id", "acme/llama", "--json"))["same_as"] == "t/base@1"
    assert data(run("add", GOLDEN / "base", "t/base", "--json"))["same_as"] is None  # another hub id
    assert run("add", GOLDEN / "int4-24", "t/bot", "--quiet")[1:] == ("", "")


def test_a_picture_that_is_there_is_kept(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    picture = tmp_path / "ein Bild.svg"
    assert run("lineage", "--svg", picture)[2] == f"picture in {picture}\n"
    drawn = picture.read_bytes()
    assert run("lineage", "--svg", picture)[2] == f"picture in {picture}, as it was\n"
    run("add", GOLDEN / "sign-24", "t/sign")
    failed(run("lineage", "--svg", picture), 2, f"{picture}: exists already", "--force replaces it")
    assert picture.read_bytes() == drawn
    assert run("lineage", "--svg", picture, "--force")[0] == 0
    assert b"t/sign@1" in picture.read_bytes()
    (tmp_path / "link.svg").symlink_to(picture)
    for path in (tmp_path, tmp_path / "link.svg", tmp_path / "none" / "x.svg"):
        for force in ([], ["--force"]):
            failed(run("lineage", "--svg", path, *force), 2, f"{path}: cannot be written")
    assert sorted(path.name for path in tmp_path.glob("*.svg*")) == ["ein Bild.svg", "link.svg"]
    assert not list(tmp_path.glob(".*"))


def test_a_key_is_looked_at_before_anything_is_hashed(
    run: Run, cli_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    for name in ("key", "other"):
        run("keygen", tmp_path / name)
    run("sign", "t/bot@1", "--key", tmp_path / "key")
    run("tag", "t/bot@1", "prod")

    def never(*args: object, **options: object) -> None:
        raise AssertionError("hashed everything first")

    with monkeypatch.context() as patch:
        patch.setattr(Zoo, "verify", never)
        for key, told in {
            tmp_path / "none.pub": "none.pub",
            tmp_path / "key": "no public key in PEM form",
            tmp_path / "other.pub": "t/bot@1 carries no signature of a key that you trust",
        }.items():
            failed(run("verify", "t/bot@prod", "--signed-by", key), 2, told)
        failed(run("verify", "t/none", "--signed-by", tmp_path / "key.pub"), 2, "no entry t/none")
    signed = ("verify", "t/bot@prod", "--signed-by", tmp_path / "key.pub", "--json")
    assert data(run(*signed))["ok"] is True
    (attached,) = Zoo.open(cli_zoo).referrers("t/bot@1")
    blob = cli_zoo / "blobs" / "sha256" / attached.config.digest[:2] / attached.config.digest
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    code, out, err = run(*signed)  # a damaged signature is damage, and told with all the rest of it
    found = json.loads(out)
    assert (code, found["ok"], found["signed_by"]) == (3, False, None)
    assert [one["kind"] for one in found["problems"]] == ["damaged"]
    assert "damaged" in err.splitlines()[-1]


def test_a_forged_signature_is_told_although_every_byte_is_right(run: Run, cli_zoo: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    run("keygen", tmp_path / "key")
    run("sign", "t/bot@1", "--key", tmp_path / "key")
    zoo = Zoo.open(cli_zoo)
    (good,) = zoo.referrers("t/bot@1")
    zoo.attach(good.model_copy(update={"subject": zoo.resolve("t/bot@2").manifest}), copy_sources(zoo.store, good))
    failed(run("verify", "t/bot@2", "--signed-by", tmp_path / "key.pub"), 3, "is not good; whoever attached it")


@pytest.mark.parametrize("verb", [["lineage"], ["list"], ["show", "t/bot@1"], ["diff", "t/bot@1", "t/bot@2"]])
def test_a_locale_without_our_characters(run: Run, cli_zoo: Path, verb: list[str]) -> None:
    """Nothing is lost after the work is done: what the locale lacks is escaped."""
    run("add", GOLDEN / "base", "t/more", "--hub-id", "Büro/模型")
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "deltacompress", "zoo", *verb], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    if verb == ["list"]:
        assert rb"B\xfcro/\u6a21\u578b" in done.stdout.replace(b"\n", b"")


def test_a_sample(run: Run, cli_zoo: Path) -> None:
    some = data(run("verify", "--sample", "0.3", "--seed", "1", "--json"))
    assert 0 < some["blobs"] < data(run("verify", "--json"))["blobs"]
    failed(run("verify", "--sample", "0"), 2, "--sample")

"""`deltacompress zoo ...` as people and scripts use it: what is printed where, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from zoo.checkpoints import LORA, files_of, write_adapter
from zoo.cli_helpers import GOLDEN, Run, data, failed


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
    assert found("--score", "sst2.accuracy>=0.9") == ["t/bot@1"]
    assert found("--score", "sst2.accuracy>0.9") == []
    failed(run("list", "--score", "good"), 2, "sst2.accuracy>=0.9")
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
    assert data(run("push", "t/bot@1", tmp_path / "second", "--as", "u/bot", "--json"))["name"] == "u/bot"
    assert data(run("pull", "t/bot", tmp_path / "third", "--json"))["version"] == 1
    assert run("export", tmp_path / "x.tar", "--all")[0] == 0
    rows = data(run("import", tmp_path / "x.tar", "--zoo", tmp_path / "fourth", "--json"))
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


def test_a_sample(run: Run, cli_zoo: Path) -> None:
    some = data(run("verify", "--sample", "0.3", "--seed", "1", "--json"))
    assert 0 < some["blobs"] < data(run("verify", "--json"))["blobs"]
    failed(run("verify", "--sample", "0"), 2, "--sample")

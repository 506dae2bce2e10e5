"""The zoo's tables on a terminal of 80 columns: whole cells, one line a row, and what there is no room for is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from zoo.cli_helpers import GOLDEN, Result, Run, data

from deltacompress.cli.shown import render
from deltacompress.zoo import Zoo

BOT = "acme-team/support-bot-customer-care"


@pytest.fixture
def narrow(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(...) on a terminal of 80 columns, beside a zoo with long names."""
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(tmp_path / "zoo"))
    run("init", tmp_path / "zoo")
    run("add", GOLDEN / "base", "acme-team/llama-base", "--hub-id", "acme-research/llama-3.1-8b-instruct")
    for artifact in ("int4-24", "int2-24", "lossless"):
        run("add", GOLDEN / artifact, BOT)
    run("tag", f"{BOT}@1", "production")
    for name, value in {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)

    def plain(*argv: object) -> Result:
        code, out, err = run(*argv)
        return code, re.sub(r"\x1b\[\d*m", "", out), err  # bold heads

    return plain


def lines_of(out: str) -> list[str]:
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(len(line) for line in lines) <= 80
    return lines


def test_a_list_has_one_line_an_entry(narrow: Run) -> None:
    lines = lines_of(narrow("list", "--all-versions")[1])
    assert [line.split()[0] for line in lines if "@" in line] == [
        "acme-team/llama-base@1",
        *(f"{BOT}@{n}" for n in (3, 2, 1)),
    ]
    assert any(line.split()[:2] == [f"{BOT}@1", "production"] for line in lines)
    assert all(line.startswith((" ", "/", "(no room for created, base")) for line in lines if line)
    assert lines[-1].endswith("; --json has everything)")


def test_a_wide_screen_and_a_pipe_show_everything(narrow: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    wide = narrow("list")[1]
    monkeypatch.delenv("COLUMNS")
    monkeypatch.delenv("TTY_COMPATIBLE")
    for out in (wide, narrow("list")[1]):
        head = next(line for line in out.splitlines() if "entry" in line).split()
        assert head == ["entry", "kind", "recipe", "ratio", "size", "base", "created"]
        assert "no room" not in out
        assert "acme-research/llama-3.1-8b-instruct" in out


def test_a_column_without_anything_in_it_is_left_out(narrow: Run) -> None:
    narrow("rm", f"{BOT}@3")
    head = next(line for line in narrow("list", "--removed", "--all-versions")[1].splitlines() if "entry" in line)
    assert "state" in head.split()
    assert "scores" not in head.split()


def test_a_difference_is_summed_up(narrow: Run, tmp_path: Path) -> None:
    found = data(narrow("diff", f"{BOT}@1", f"{BOT}@2", "--json"))
    assert {row["tensor"] for row in found["changed"]} == {row["tensor"] for row in found["tensors"]}
    assert sum(row["tensors"] for row in found["changes"]) == len(found["changed"]) == 9
    assert {row["change"] for row in found["changes"]} == {"bits, values"}
    assert [row["a_bytes"] for row in found["changed"]] == sorted(
        (row["a_bytes"] for row in found["changed"]), reverse=True
    )
    lines = lines_of(narrow("diff", f"{BOT}@1", f"{BOT}@2")[1])
    assert any(line.split() == ["linear", "bits,", "values", "7", "3.17", "kB", "2.39", "kB"] for line in lines)
    assert "the largest 9 of 9 (--all: every change of each)" in lines
    told = [line for line in lines if ".weight" in line]
    assert len(told) == 9
    assert told[0].split()[0] == found["changed"][0]["tensor"]
    assert not any("sha256" in line for line in lines)
    every = lines_of(narrow("diff", f"{BOT}@1", f"{BOT}@2", "--all")[1])
    assert sum("sha256" in line for line in every) == 9
    assert "every change" in every


def test_what_only_one_side_has(narrow: Run, tmp_path: Path) -> None:
    from zoo.checkpoints import weights, write_base

    zoo = Zoo.open(tmp_path / "zoo")
    zoo.add(write_base(tmp_path / "a"), "t/a")
    more = weights() | {"extra": weights(1)["model.layers.0.input_layernorm.weight"]}
    more["model.embed_tokens.weight"] = weights(1)["model.embed_tokens.weight"]
    del more["model.layers.0.mlp.down_proj.weight"]
    zoo.add(write_base(tmp_path / "b", more), "t/b")
    assert zoo.diff("t/a", "t/b")["changed"] == [
        {
            "tensor": "model.layers.0.mlp.down_proj.weight",
            "kind": "tensor",
            "change": "only in A",
            "a_bytes": 8 * 16 * 2,
            "b_bytes": None,
        },
        {
            "tensor": "model.embed_tokens.weight",
            "kind": "tensor",
            "change": "values",
            "a_bytes": 12 * 8 * 2,
            "b_bytes": 12 * 8 * 2,
        },
        {"tensor": "extra", "kind": "tensor", "change": "only in B", "a_bytes": None, "b_bytes": 16},
    ]
    assert {row["change"]: row["tensors"] for row in zoo.diff("t/a", "t/b")["changes"]} == {
        "only in A": 1,
        "values": 1,
        "only in B": 1,
    }


def test_many_tensors_are_not_all_named(narrow: Run, tmp_path: Path) -> None:
    from zoo.checkpoints import tensor, write_base

    zoo = Zoo.open(tmp_path / "zoo")
    for seed in "ab":
        tensors = {f"model.layers.{i}.w.weight": tensor((seed, i), 8, i + 1) for i in range(40)}
        zoo.add(write_base(tmp_path / seed, tensors), f"t/{seed}")
    lines = lines_of(narrow("diff", "t/a", "t/b")[1])
    assert "the largest 10 of 40 (--all: every change of each)" in lines
    assert [line.split()[0] for line in lines if ".weight" in line] == [
        f"model.layers.{i}.w.weight" for i in range(39, 29, -1)
    ]
    assert sum(".weight" in line for line in narrow("diff", "t/a", "t/b", "--all")[1].splitlines()) == 40


def test_sizes() -> None:
    told = {0: "0 B", 999: "999 B", 1000: "1 kB", 1234: "1.23 kB", 999_400: "999 kB", 999_600: "1 MB"}
    told |= {13_476_000_000: "13.5 GB", 5 * 10**15: "5 PB"}
    assert {count: render.size(count) for count in told} == told


@pytest.mark.parametrize("width", range(20, 70))
def test_spare_columns_go_one_by_one(width: int) -> None:
    rows = [{"name": "a" * 20, "first": "b" * 10, "second": "c" * 10, "third": "d" * 10}]
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(render.rows("t", rows, spare=("second", "first")))
    out = captured.get()
    assert ("c" * 10 in out) == (width >= 58)
    assert ("b" * 10 in out) == (width >= 46)
    assert ("no room for second;" in out) == (46 <= width < 58)
    if width >= 34:
        assert "d" * 10 in out
        assert "a" * 20 in out

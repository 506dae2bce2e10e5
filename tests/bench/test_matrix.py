"""The matrix: cells that are kept, refused or measured, and what table and picture make of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from deltacompress.bench.matrix import cells as kept
from deltacompress.bench.matrix.cells import Cell, cells, code_digest, part_of, read_cells, write_cell
from deltacompress.bench.matrix.picture import draw, telling_rate
from deltacompress.bench.matrix.table import attained, highest, rows, to_markdown
from deltacompress.cli.main import main
from deltacompress.errors import InputError

IDENTITY = {"device": "H100", "code": "abc", "slo_ttft_s": 1.0, "slo_token_ms": 100.0}
ROW = {"failed": 0, "e2e_mean": 2.0, "ttft_mean": 1.0, "ttft_p99": 1.5, "tokens_s": 10.0}


def found(share: float, factor: float = 1.0) -> dict[str, Any]:
    """Of 20 requests, so many just within the limits times `factor`; of the others one got no end."""
    good = round(share * 20)
    late = [[1.5 * factor, 0.01], [0.5, 0.2 * factor]] * 10
    requests = [[factor, 0.1 * factor]] * good + late[: max(0, 19 - good)] + [None] * (good < 20)
    return {"slots": 2, "row": ROW, "requests": requests}


def measured(*given: tuple[str, str, float, float]) -> dict[Cell, dict[str, Any]]:
    return {
        Cell(system, popularity, rate): {"identity": IDENTITY, **found(share)}  # type: ignore[arg-type]
        for system, popularity, rate, share in given
    }


class TestCells:
    def test_parts(self) -> None:
        """Every cell is in one part; parts are of one system as far as that goes."""
        matrix = cells(["decoupled", "swap"], ["uniform", "one"], [1.0, 2.0, 0.5])
        assert len(matrix) == 12
        assert matrix[0] == Cell("decoupled", "uniform", 1.0)
        for count in (1, 2, 5, 12, 20):
            parts = [part_of(matrix, f"{number}/{count}") for number in range(1, count + 1)]
            assert [cell for part in parts for cell in part] == matrix
        assert {cell.system for cell in part_of(matrix, "1/2")} == {"decoupled"}
        assert part_of(matrix, None) == matrix

    @pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", ""])
    def test_no_part(self, part: str) -> None:
        with pytest.raises(InputError, match="part: is"):
            part_of([Cell("swap", "one", 1.0)], part)

    @pytest.mark.parametrize(
        ("systems", "rates", "told"),
        [
            (["other"], [1.0], "no system 'other'"),
            ([], [1.0], "systems: names none"),
            (["swap", "swap"], [1.0], "or one twice"),
            (["swap"], [0.0], "rates: is 0"),
            (["swap"], [float("inf")], "rates: is inf"),
        ],
    )
    def test_no_matrix(self, systems: list[str], rates: list[float], told: str) -> None:
        with pytest.raises(InputError, match=told):
            cells(systems, ["one"], rates)

    def test_kept(self, tmp_path: Path) -> None:
        one, two = Cell("swap", "zipf-1.5", 0.5), Cell("decoupled", "one", 3.0)
        for cell in (one, two):
            write_cell(tmp_path, cell, IDENTITY, found(1.0))
        again = read_cells(tmp_path, IDENTITY)
        assert {*again} == {one, two}
        assert again[one]["requests"] == [[1.0, 0.1]] * 20
        assert read_cells(tmp_path) == again

    @pytest.mark.parametrize("name", ["device", "code", "extra"])
    def test_of_another_device_or_code(self, name: str, tmp_path: Path) -> None:
        write_cell(tmp_path, Cell("swap", "one", 1.0), {**IDENTITY, name: "other"}, found(1.0))
        with pytest.raises(InputError, match=rf"swap_one_1\.cell\.json: was measured with {name} other, not"):
            read_cells(tmp_path, IDENTITY)
        write_cell(tmp_path, Cell("swap", "one", 2.0), IDENTITY, found(1.0))
        with pytest.raises(InputError, match=rf"swap_one_2\.cell\.json: was measured with {name}"):
            read_cells(tmp_path)

    def test_damaged(self, tmp_path: Path) -> None:
        path = tmp_path / Cell("swap", "one", 1.0).file
        for text in ("", "{}", '{"cell": ["swap", "one", 2.0], "identity": {}, "row": {}, "requests": []}'):
            path.write_text(text)
            with pytest.raises(InputError, match="is no cell of a matrix"):
                read_cells(tmp_path)

    def test_the_digest_of_code(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("1")
        (tmp_path / "x.cu").write_text("2")
        before = code_digest(tmp_path)
        (tmp_path / "notes.txt").write_text("3")
        assert code_digest(tmp_path) == before
        (tmp_path / "x.cu").write_text("4")
        assert code_digest(tmp_path) != before


class TestTable:
    def test_attained(self) -> None:
        """At the limits is within; both count; so do those that got no end."""
        data = {"identity": IDENTITY, **found(0.5)}
        assert attained(data) == 0.5
        assert attained(data, 0.99) == 0.0
        assert attained(data, 2.0) == 19 / 20
        assert attained({"identity": IDENTITY, "requests": [[1.0, 0.101], [1.01, 0.1], None]}) == 0.0

    def test_the_highest_rate(self) -> None:
        """One that is missed at a lower rate counts no higher."""
        own = measured(
            ("decoupled", "one", 1.0, 1.0), ("decoupled", "one", 4.0, 0.9), ("decoupled", "one", 8.0, 0.85),
            ("swap", "one", 1.0, 0.95), ("swap", "one", 4.0, 0.5), ("swap", "one", 8.0, 1.0),
            ("decoupled", "uniform", 1.0, 1.0), ("swap", "uniform", 1.0, 0.0),
        )  # fmt: skip
        assert highest(own) == [
            {"popularity": "one", "system": "decoupled", "rate": 4.0, "ratio": 4.0},
            {"popularity": "one", "system": "swap", "rate": 1.0, "ratio": 1.0},
            {"popularity": "uniform", "system": "decoupled", "rate": 1.0, "ratio": None},
            {"popularity": "uniform", "system": "swap", "rate": None, "ratio": None},
        ]
        assert [(row["system"], row["rate"], row["attained"]) for row in rows(own)][:2] == [
            ("decoupled", 1.0, 1.0), ("decoupled", 4.0, 0.9)
        ]  # fmt: skip
        told = to_markdown(own)
        assert "| one | decoupled | 4 | 4.0x |" in told
        assert "| uniform | swap | - | - |" in told
        assert "| device | H100 |" in told

    def test_the_picture(self) -> None:
        own = measured(
            ("decoupled", "one", 1.0, 1.0), ("decoupled", "one", 4.0, 1.0), ("swap", "one", 1.0, 1.0),
            ("swap", "one", 4.0, 0.5), ("swap", "one", 8.0, 0.5),
        )  # fmt: skip
        assert telling_rate(own) == 4.0
        assert telling_rate({cell: own[cell] for cell in own if cell.system == "decoupled"}) == 4.0
        svg = ET.fromstring(draw(own))
        words = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert "one, 4 requests a second" in words
        circles = list(svg.iter("{http://www.w3.org/2000/svg}circle"))
        assert len(circles) == 2 + 3 + 2 * 7
        full, half = (float(circles[at].get("cy", "nan")) for at in (0, 3))
        assert full < half  # upwards


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part; what is there is not measured again; other settings are refused; the table alone."""
    out = tmp_path / "m"
    same = ["bench", "serve", "--device", "cpu", "--parts", str(out), "--json"]
    asked = [*same, "--scale", "0.02", "--seconds", "0.5", "--variants", "2", "--popularities", "one", "--rates", "20"]
    assert main([*asked, "--part", "2/2"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == 1
    assert [path.name for path in out.glob("*.cell.json")] == ["swap_one_20.cell.json"]
    assert main(asked) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["measured"], data["kept"]) == (1, 1)
    assert {(row["system"], row["failed"]) for row in data["rows"]} == {("decoupled", 0), ("swap", 0)}
    assert main([*asked, "--seed", "1"]) == 2
    assert "was measured with seed 0, not 1" in capsys.readouterr().err
    monkeypatch.setattr(kept, "code_digest", None)
    assert main(same) == 0
    assert json.loads(capsys.readouterr().out)["highest"] == data["highest"]
    assert (out / "serving.md").read_text().startswith("## Highest rate")
    assert (out / "serving.svg").read_text().startswith("<svg")

"""The benchmark of the runtime runs anywhere, and gives the rows that scripts depend on."""

from __future__ import annotations

import json

import pytest

from deltacompress.cli.main import main


def test_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--device", "cpu", "--variants", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "reference" in found["backend"]
    assert found["memory"] is None
    rows = {(row["what"], row["rows"]): row for row in found["rows"]}
    assert rows.keys() >= {("base alone", 1), ("base alone", 3), ("variants at once", 3)}
    for row in found["rows"]:
        assert {"ms", "served_ms", "tokens_s", "bytes", "floor_ms"} <= row.keys()
    assert rows["variants at once", 3]["variants"] == 3
    assert rows["variants at once", 3]["bytes"] > rows["base alone", 1]["bytes"]
    assert [row["load"] for row in found["loads"]] == ["first", "verified"]

"""docs/serving.md: its example runs, its tables are the server's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from serving.harness import Live

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def rows(title: str, after: str = "\n\n") -> list[list[str]]:
    """The cells of the table under a heading, after some words."""
    section = "\n" + TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    table = section.split(f"{after}|", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:] if line]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


def test_the_example(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", live.url).replace('"base"', '"tiny"')
    exec(compile(f"{code}client.close()\n", "docs/serving.md", "exec"), {})  # noqa: S102 - what the document says, run
    assert capsys.readouterr().out.startswith("palindromes of [")


def test_the_fields_are_those_that_are_served(live: Live) -> None:
    served = {(name, of) for fields, of, _ in rows("Fields") for name in names(fields)}
    taken = {name for fields, _ in rows("Fields", "harmless values alone:\n\n") for name in names(fields)}
    assert len(served) > 20
    everywhere = {name for name, _ in served} | taken | {"nonsense"}
    for of, body in (("completions", {"prompt": "a"}), ("chat", {"messages": [{"role": "user", "content": "a"}]})):
        path = "/v1/completions" if of == "completions" else "/v1/chat/completions"
        for name in everywhere:
            answer = live.post(path, **({"model": "bot"} | body | {name: {"odd": 1}}))
            assert answer.status_code == 400, name
            is_served = answer.json()["error"]["code"] != "unsupported_parameter"
            if name not in taken | {"best_of"}:
                assert is_served == bool({(name, of), (name, "both")} & served), (of, name)


def test_the_metrics_are_those_that_are_told(live: Live) -> None:
    live.post("/v1/completions", model="bot", prompt="a")
    told = {re.sub(r"_(bucket|count|sum)$", "", key[0]) for key in live.metrics() if not key[0].endswith("_created")}
    assert told == {name for cells in rows("Metrics") for name in names(cells[0])}


def test_the_routes_are_those_that_are_there(live: Live) -> None:
    documented = {path.replace("NAME", "") for cells in rows("Routes") for path in re.findall(r"(/[\w/]+)", cells[0])}
    assert documented == set(live.app._routes)

"""Fixtures for the tests of the zoo: no test touches the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.cli_helpers import GOLDEN, Result, Run
from zoo.s3 import no_server, serving

from deltacompress.cli.main import main
from deltacompress.zoo import Zoo
from deltacompress.zoo.ledger import publish
from deltacompress.zoo.store import osfs


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an empty bucket on a server on loopback."""
    if why := no_server():
        pytest.skip(f"no S3 server: {why}")
    with serving() as url:
        yield url


@pytest.fixture(params=["local", "s3"])
def any_zoo(request: pytest.FixtureRequest, tmp_path: Path) -> Zoo:
    """An empty zoo, on each backend."""
    if request.param == "local":
        return Zoo.init(tmp_path / "zoo")
    return Zoo.init(f"{request.getfixturevalue('s3_server')}/{tmp_path.name}")


@pytest.fixture
def any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are published with whatever names, as they were before names had to be printable."""
    monkeypatch.setattr(publish, "check_texts", lambda texts, where: None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(verb, ...): exit code, stdout, stderr."""
    monkeypatch.setattr(osfs, "fsync", lambda fd: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DELTACOMPRESS_ZOO", raising=False)

    def call(*argv: object) -> Result:
        code = main(["zoo", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def cli_zoo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with a base, two versions of a delta and an adapter, named by DELTACOMPRESS_ZOO."""
    where = tmp_path / "zoo"
    assert run("init", where)[0] == 0
    monkeypatch.setenv("DELTACOMPRESS_ZOO", str(where))
    assert run("add", GOLDEN / "base", "t/base", "--hub-id", "acme/llama")[1] == "t/base@1\n"
    assert run("add", GOLDEN / "int4-24", "t/bot")[1] == "t/bot@1\n"
    assert run("add", GOLDEN / "int2-24", "t/bot")[1] == "t/bot@2\n"
    return where

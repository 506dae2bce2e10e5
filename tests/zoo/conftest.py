"""Fixtures for the tests of the zoo: no test touches the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.s3 import no_server, serving

from deltacompress.zoo import Zoo


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

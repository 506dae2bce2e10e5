"""Fixtures every test may use. Importing this imports no torch, so the tests of the light modules stay quick."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """One thread per xdist worker: each torch would take all cores otherwise. Read when torch is first imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real model pairs and task data, which the project does not ship."""
    configured = os.environ.get("DELTACOMPRESS_SHARED")
    folder = Path(configured) if configured else ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip(f"the real model pairs are not at {folder} (set DELTACOMPRESS_SHARED)")
    return folder

"""Fixtures every test may use. Importing this imports no torch, so the tests of the light modules stay quick."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pairs import Pair

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """One thread per xdist worker: each torch would take all cores otherwise. Read when torch is first imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/test_interpreted.py runs these, in processes in which Triton interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    elsewhere = pytest.mark.skip(reason="tests/test_interpreted.py runs it, or pytest under TRITON_INTERPRET=1")
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(elsewhere)


def pytest_collection_finish() -> None:
    """What is there for the whole run, each collection of garbage would look at again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Modules with finalizers complain of what is left at the end."""
    gc.unfreeze()


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


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: arguments -> exit code, what it printed, what it complained of."""
    from deltacompress.cli.main import main

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(one) for one in argv])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def stoppable() -> Iterator[None]:
    """Signals stop this process and those that it starts, as in a terminal.

    A shell's job in the background ignores SIGINT, `nohup` SIGHUP, and so does whatever they start: the command line
    leaves it so.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """make_pair(architecture, dtype=..., **config fields): a tiny pair, made once; copy it before changing it."""
    import pairs

    made: dict[str, Pair] = {}

    def make(architecture: str, **overrides: Any) -> Pair:
        key = f"{architecture} {overrides}"
        if key not in made:
            made[key] = pairs.make_pair(tmp_path_factory.mktemp(architecture), architecture, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """The pair for tests that any will do: a Llama."""
    return make_pair("llama")


@pytest.fixture(scope="session")
def artifact(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pair` compressed with int4-24 and zstd; copy it before changing it."""
    out = tmp_path_factory.mktemp("artifact") / "out"
    pair.compress(out)
    return out


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Rows are computed alike, whatever else is in their batch: several threads may share them out unevenly."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

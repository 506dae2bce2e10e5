"""The reliability sweeps, thinned: a few points of each, so that every run of the tests sees them work.

`make reliability` runs them whole and prints the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo.reliability import flips, inject, interleave, kill, mutants, powerloss, processes, throughput
from zoo.reliability.scenarios import Bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as made:
        yield made


def test_kill_at_some_calls(bench: Bench) -> None:
    swept = list(kill.sweep(bench, stride=97))
    assert sum(count for _, count, _ in swept) > 30
    assert [fault for _, _, faults in swept for fault in faults] == []


def test_errors_at_some_calls(bench: Bench) -> None:
    swept = list(inject.sweep(bench, stride=211))
    assert sum(count for _, count, _ in swept) > 40
    assert [fault for _, _, faults in swept for fault in faults] == []


def test_power_loss_at_some_points(bench: Bench) -> None:
    swept = list(powerloss.sweep(bench, per_point=1, limit=60))
    assert sum(count for _, count, _ in swept) == 420
    assert [fault for _, _, faults in swept for fault in faults] == []


def test_some_schedules_of_two_verbs(bench: Bench) -> None:
    swept = [*interleave.sweep(bench, stride=97), *interleave.relays(bench, stride=41)]
    assert [fault for _, _, faults in swept for fault in faults] == []


@pytest.mark.parametrize("name", ["no fsync of directories", "version before blobs", "publisher without intent"])
def test_planted_faults_are_caught(bench: Bench, name: str) -> None:
    ((_, caught),) = mutants.sweep(bench, names=(name,))
    assert caught is not None


def test_a_few_processes(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(repo_root / "tests"), str(repo_root))))
    assert processes.race(str(tmp_path / "zoo"), tmp_path, processes=3, versions=3) is None


def test_some_flipped_bits() -> None:
    flipped, missed = flips.undetected(flips.small_zoo(), stride=499)
    assert flipped > 100
    assert missed == []


def test_the_measurements_run(tmp_path: Path) -> None:
    found = throughput.measure(tmp_path / "one", size=1 << 20, parts=4)
    assert min(found.disk, found.publish, found.hashing, found.verify) > 0
    assert min(throughput.list_seconds(tmp_path / "two", entries=30)) > 0

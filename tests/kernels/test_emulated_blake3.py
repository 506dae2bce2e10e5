"""The CUDA BLAKE3 kernels, run on a CPU (see emulation.py), against the blake3 package."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch
from kernels.emulation import COMPILER, build_blake3
from kernels.hash_cases import LENGTHS, laid_out

from deltacompress.kernels import hashing

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: Path = tmp_path_factory.mktemp("emulated")
    return cache(lambda subtree, fault=("", ""): build_blake3(folder, subtree, fault))


def run(library: object, skip: int, subtree: int, monkeypatch: pytest.MonkeyPatch, *fault: tuple[str, str]) -> bool:
    """Whether the kernels find what the package finds. subtree: chunks of one; few make high trees of short spans."""
    monkeypatch.setattr(hashing, "SUBTREE", subtree)
    data, spans = laid_out(LENGTHS, skip)
    nodes = torch.empty(spans.subtrees, hashing.DIGEST_BYTES, dtype=torch.uint8)
    out = torch.empty(len(spans), hashing.DIGEST_BYTES, dtype=torch.uint8)
    at, table, between, found = (ctypes.c_void_p(one.data_ptr()) for one in (data, spans.table, nodes, out))
    kernels = library(subtree, *fault)  # type: ignore[operator]
    kernels.launch(at, table, len(spans), spans.subtrees, between, found)
    return torch.equal(out, hashing.digests(data, spans))


@pytest.mark.parametrize("subtree", [4, 256])
@pytest.mark.parametrize("skip", range(4))
def test_digests(library: object, skip: int, subtree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(library, skip, subtree, monkeypatch)


@pytest.mark.parametrize(
    "fault",
    [
        ("turned(b ^ c, 7)", "turned(b ^ c, 9)"),
        ("(u32)counter", "0u"),
        ("skip && left > 4 - skip", "skip && left > 4"),
        ("n == 2 && all <= SUBTREE", "n == 2"),
        ("if (2 * i + 1 == n) return left;", ""),
        ("from += SUBTREE", "from += n"),
    ],
    ids=lambda fault: fault[0],
)
def test_planted_faults_are_seen(library: object, fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run(library, 1, 4, monkeypatch, fault)

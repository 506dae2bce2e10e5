"""Variants that go and come again while requests wait: each gets its own variant's result, or a clear error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_cases import Served, assert_close, oracle_logits, random_ids

from deltacompress.errors import ChecksumError, InputError
from deltacompress.runtime import Runtime

FIRST, SECOND = random_ids(5, 1), random_ids(6, 2)


def once(act: Callable[[], object]) -> Callable[[int, int, str], None]:
    """A listener that acts at the first token."""
    left = [act]

    def listen(*_: object) -> None:
        if left:
            left.pop()()

    return listen


def moved(runtime: Runtime, trio: dict[str, Served]) -> None:
    """Variant b comes again in another slot; c has its old one."""
    runtime.unload("b")
    runtime.load(trio["c"].artifact, "other")
    runtime.load(trio["b"].artifact, "b")


def test_a_waiting_request_follows_its_variant(runtime: Runtime, trio: dict[str, Served]) -> None:
    wanted = runtime.complete([("b", SECOND)], 6)[0]
    slot = runtime.variants["b"].slot
    requests = [("a", FIRST), ("b", SECOND)]
    found = runtime.complete(requests, 6, max_batch=1, on_token=once(lambda: moved(runtime, trio)))[1]
    assert runtime.variants["other"].slot == slot
    assert found.tokens == wanted.tokens
    assert found.tokens != runtime.complete([("other", SECOND)], 6)[0].tokens


def test_forward_follows_its_variants(runtime: Runtime, trio: dict[str, Served]) -> None:
    """It is a generator: variants can go between its batches."""
    requests = [*[("a", random_ids(40, seed)) for seed in range(110)], ("b", SECOND)]
    batches = runtime.forward(requests)
    next(batches)
    moved(runtime, trio)
    found = dict(batches)
    assert_close(found[110], oracle_logits(trio["b"].restored, SECOND))
    batches = runtime.forward(requests)
    next(batches)
    runtime.unload("b")
    with pytest.raises(InputError, match="variant b was unloaded while requests for it waited"):
        list(batches)
    assert not any(one.users for one in runtime.variants.values())


def test_a_variant_that_is_gone_is_told(runtime: Runtime) -> None:
    with pytest.raises(InputError, match="variant b was unloaded while requests for it waited; load it and ask again"):
        runtime.complete([("a", FIRST), ("b", SECOND)], 6, max_batch=1, on_token=once(lambda: runtime.unload("b")))
    assert not any(one.users for one in runtime.variants.values())


def test_another_artifact_under_the_name_is_told(runtime: Runtime, trio: dict[str, Served]) -> None:
    def replaced() -> None:
        runtime.unload("b")
        runtime.load(trio["c"].artifact, "b")

    with pytest.raises(InputError, match="variant b became another one while requests for it waited"):
        runtime.complete([("a", FIRST), ("b", SECOND)], 6, max_batch=1, on_token=once(replaced))
    assert_close(runtime.logits([("b", SECOND)])[0], oracle_logits(trio["c"].restored, SECOND))


def test_a_variant_that_cannot_come_leaves_the_others_free(trio: dict[str, Served], tmp_path: Path) -> None:
    whole = Runtime.from_base(trio["a"].pair.base)
    whole.load(trio["a"].artifact, "a")
    runtime = Runtime.from_base(trio["a"].pair.base, budget_bytes=int(2.1 * whole.variants["a"].nbytes))
    for name, one in trio.items():
        runtime.load(shutil.copytree(one.artifact, tmp_path / name), name)
    assert not runtime.variants["a"].installed
    for shard in (tmp_path / "a").glob("*.safetensors"):
        raw = shard.read_bytes()
        shard.write_bytes(raw[:-40] + bytes([raw[-40] ^ 255]) + raw[-39:])
    with pytest.raises(ChecksumError):
        runtime.complete([("c", FIRST), ("a", SECOND)], 3)
    assert not any(one.users for one in runtime.variants.values())
    runtime.unload("c")
    assert torch.isfinite(runtime.logits([("b", FIRST)])[0]).all()

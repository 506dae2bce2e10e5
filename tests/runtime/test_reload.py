"""Variants that go and come again while requests wait: each gets its own variant's result, or a clear error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_cases import Served, as_on_a_gpu, assert_close, oracle_logits, random_ids

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
    alone = runtime.complete([("a", FIRST)], 6)[0]
    requests = [("a", FIRST), ("b", SECOND), (None, FIRST), ("b", FIRST)]
    found = runtime.complete(requests, 6, max_batch=1, on_token=once(lambda: runtime.unload("b")))
    for one in (found[1], found[3]):
        assert isinstance(one.error, InputError)
        assert str(one.error) == "variant b was unloaded while requests for it waited; load it and ask again"
        assert (one.finished, one.tokens, one.text) == ("failed", (), "")
    assert found[0] == alone
    assert found[2].error is None
    assert len(found[2].tokens) == 6
    assert not any(one.users for one in runtime.variants.values())


def test_another_artifact_under_the_name_is_told(runtime: Runtime, trio: dict[str, Served]) -> None:
    def replaced() -> None:
        runtime.unload("b")
        runtime.load(trio["c"].artifact, "b")

    found = runtime.complete([("a", FIRST), ("b", SECOND)], 6, max_batch=1, on_token=once(replaced))
    assert str(found[1].error) == "variant b became another one while requests for it waited; ask again"
    assert_close(runtime.logits([("b", SECOND)])[0], oracle_logits(trio["c"].restored, SECOND))


def with_room_for_two(trio: dict[str, Served], tmp_path: Path) -> Runtime:
    """A runtime whose variant a has left the device and whose file is damaged since then."""
    whole = Runtime.from_base(trio["a"].pair.base)
    whole.load(trio["a"].artifact, "a")
    runtime = Runtime.from_base(trio["a"].pair.base, budget_bytes=int(2.1 * whole.variants["a"].nbytes))
    for name, one in trio.items():
        runtime.load(shutil.copytree(one.artifact, tmp_path / name), name)
    assert not runtime.variants["a"].installed
    flip(tmp_path / "a")
    return runtime


def flip(artifact: Path) -> None:
    for shard in artifact.glob("*.safetensors"):
        raw = shard.read_bytes()
        shard.write_bytes(raw[:-40] + bytes([raw[-40] ^ 255]) + raw[-39:])


@pytest.mark.parametrize("max_batch", [1, 2, 64])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_a_damaged_variant_fails_its_own_requests_only(
    trio: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_batch: int, on_a_gpu: bool
) -> None:
    runtime = with_room_for_two(trio, tmp_path)
    if on_a_gpu:  # there it fails on its way, after requests of others have begun
        as_on_a_gpu(monkeypatch, runtime)
    requests = [("c", FIRST), ("a", SECOND), (None, SECOND), ("a", FIRST), ("b", FIRST)]
    alone = {index: runtime.complete([requests[index]], 5)[0] for index in (0, 2, 4)}
    found = runtime.complete(requests, 5, max_batch=max_batch)
    for index, one in alone.items():
        assert found[index] == one
    for index in (1, 3):
        assert isinstance(found[index].error, ChecksumError)
        assert (found[index].finished, found[index].tokens) == ("failed", ())
    with pytest.raises(ChecksumError):
        runtime.generate(requests, 5)
    assert not any(one.users for one in runtime.variants.values())
    flip(tmp_path / "a")  # mended: the next request of it is served
    assert runtime.complete([("a", SECOND)], 5)[0].error is None
    runtime.unload("c")


def test_generate_tells_after_the_others_are_done(trio: dict[str, Served], tmp_path: Path) -> None:
    runtime = with_room_for_two(trio, tmp_path)
    heard: list[int] = []
    with pytest.raises(ChecksumError):
        runtime.generate([("a", SECOND), ("c", FIRST)], 4, on_token=lambda index, *_: heard.append(index))
    assert heard == [1] * 4
    assert torch.isfinite(runtime.logits([("b", FIRST)])[0]).all()

"""Operands in host memory are read while stored parts come to the device: nothing is used before all of it was read.

What stays in files comes here from a stand-in of the loader, which makes its operands by decoding.
"""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_cases import Served, as_on_a_gpu, assert_close, oracle_logits, random_ids
from torch import Tensor

from deltacompress.errors import BackendError, ChecksumError, InputError, IntegrityError
from deltacompress.runtime import Runtime
from deltacompress.runtime.engine import forwards
from deltacompress.runtime.modules.model import DecoupledModel
from deltacompress.runtime.operands.operand import Operand, Vector
from deltacompress.runtime.variants.delta import DeltaVariant

IDS = random_ids(5)


class Plain:
    """What a GPU would take as it lies in a file, of a size that operands of the reference backend have."""

    def __init__(self, operand: Operand) -> None:
        self.operand = operand

    def placed_bytes(self, _: object) -> int:
        return self.operand.nbytes


class Files:
    """The loader's stand-in. entered: set when a load begins; gate: it ends no sooner; made: what it gave."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.made: list[weakref.ref[Tensor]] = []
        self.loads = 0

    def load(self, stored: dict[str, Plain], *, verify: bool) -> dict[str, Operand]:
        self.entered.set()
        assert self.gate.wait(60)
        self.loads += 1
        found = {path: replace(one.operand, tensors=copied(one.operand)) for path, one in stored.items()}
        self.made += [weakref.ref(tensor) for one in found.values() for tensor in one.tensors.values()]
        return found


def copied(operand: Operand) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in operand.tensors.items()}


def plain_runtime(base: Path, monkeypatch: pytest.MonkeyPatch, files: Files, budget: int | None = None) -> Runtime:
    """Only vectors are read into host memory, all else comes from a file."""
    runtime = Runtime.from_base(base, budget_bytes=budget)
    as_on_a_gpu(monkeypatch, runtime)
    monkeypatch.setattr(runtime.cache, "_kernels", object())
    monkeypatch.setattr(runtime.cache.arrivals.transfer, "_loader", files)
    roles = runtime.model.base.roles

    def stored(self: DeltaVariant, path: str) -> Plain | None:
        return None if roles[path] == "vector" else Plain(of_disk(self, path))

    monkeypatch.setattr(DeltaVariant, "stored", stored)
    return runtime


_operand = DeltaVariant.operand


def of_disk(variant: DeltaVariant, path: str) -> Operand:
    found = _operand(variant, path)
    assert found is not None
    return found


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def runtime(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch, files: Files) -> Iterator[Runtime]:
    yield plain_runtime(trio["a"].pair.base, monkeypatch, files)
    files.gate.set()


def watched(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call act(path) before the operand of a path is read."""

    def operand(self: DeltaVariant, path: str) -> Operand | None:
        act(path)
        return _operand(self, path)

    monkeypatch.setattr(DeltaVariant, "operand", operand)


def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: str) -> None:
        if path.endswith("norm.weight"):
            raise ChecksumError("its bytes differ", where=path)

    watched(monkeypatch, damaged)


def test_vectors_are_read_while_parts_come(
    trio: dict[str, Served], runtime: Runtime, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.gate.clear()
    readers: set[str] = set()

    def see(path: str) -> None:
        assert files.entered.wait(60)  # the parts are on their way already
        readers.add(threading.current_thread().name)
        if path == "model.norm.weight":
            files.gate.set()  # and may arrive once the last of the vectors was asked for

    watched(monkeypatch, see)
    runtime.load(trio["a"].artifact, "a")
    assert len(readers) == 1
    assert threading.current_thread().name not in readers
    assert_close(runtime.logits([("a", IDS)])[0], oracle_logits(trio["a"].restored, IDS))


def test_what_it_will_weigh_is_what_it_weighs(
    trio: dict[str, Served], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Runtime.from_base(trio["a"].pair.base)
    read.load(trio["a"].artifact, "a")
    runtime.load(trio["a"].artifact, "a")
    assert runtime.variants["a"].nbytes == read.variants["a"].nbytes
    variant = DeltaVariant.open(trio["a"].artifact, runtime.model.base)
    vectors = [path for path in variant.paths() if isinstance(variant.operand(path), Vector)]
    assert len(vectors) > 3
    for path in variant.paths():
        said, operand = variant.operand_bytes(path), variant.operand(path)
        assert operand is not None
        assert said == (operand.nbytes if path in vectors else None)
    assert runtime.variants["a"].pinned_bytes == sum(variant.operand_bytes(path) or 0 for path in vectors)


def test_what_cannot_be_weighed_is_read_first(
    trio: dict[str, Served], runtime: Runtime, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of kinds that say nothing of it: before the budget is asked, and before anything moves."""
    read: list[str] = []
    monkeypatch.setattr(DeltaVariant, "operand_bytes", lambda self, path: 128 if path == "model.norm.weight" else None)
    watched(monkeypatch, lambda path: read.append(path) if not files.entered.is_set() else pytest.fail(path))
    runtime.load(trio["a"].artifact, "a")
    assert len(read) > 3
    fail(monkeypatch)
    with pytest.raises(ChecksumError):
        runtime.load(trio["a"].artifact, "again")
    assert files.loads == 1


def nothing_is_installed(*_: object) -> None:
    raise AssertionError("installed")


def test_damage_in_a_vector_leaves_nothing(
    trio: dict[str, Served], runtime: Runtime, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch)
        patch.setattr(DecoupledModel, "install", nothing_is_installed)
        with pytest.raises(ChecksumError, match=r"norm\.weight: its bytes differ") as caught:
            runtime.load(trio["a"].artifact, "a")
    assert files.loads == 1
    assert not any(one() is not None for one in files.made)  # whoever keeps the error keeps no device's memory
    assert caught.value.where is not None
    assert not runtime.variants
    assert runtime.cache.bytes_in_use == 0
    runtime.load(trio["a"].artifact, "a")
    assert_close(runtime.logits([("a", IDS)])[0], oracle_logits(trio["a"].restored, IDS))


@pytest.mark.parametrize("lie", [-4, 4])
def test_a_variant_that_weighs_other_than_it_said(
    trio: dict[str, Served], runtime: Runtime, monkeypatch: pytest.MonkeyPatch, lie: int
) -> None:
    said = DeltaVariant.operand_bytes

    def wrong(self: DeltaVariant, path: str) -> int | None:
        found = said(self, path)
        return found if found is None or path != "model.norm.weight" else found + lie

    monkeypatch.setattr(DeltaVariant, "operand_bytes", wrong)
    with pytest.raises(InputError, match=r"brings for model\.norm\.weight other than the \d+ bytes that it told"):
        runtime.load(trio["a"].artifact, "a")
    assert not runtime.variants


def test_operands_that_do_not_fit_are_refused_on_the_way(
    trio: dict[str, Served], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(self: DeltaVariant, path: str) -> Operand | None:
        found = of_disk(self, path)
        return Vector({"vector": found.tensors["vector"].double()}) if path == "model.norm.weight" else found

    monkeypatch.setattr(DeltaVariant, "operand", doubled)
    size = DeltaVariant.operand_bytes
    monkeypatch.setattr(
        DeltaVariant,
        "operand_bytes",
        lambda self, path: (size(self, path) or 0) * 2 if path == "model.norm.weight" else size(self, path),
    )
    monkeypatch.setattr(DecoupledModel, "install", nothing_is_installed)
    with pytest.raises(InputError, match=r"brings Vector for model\.norm\.weight of torch\.float64"):
        runtime.load(trio["a"].artifact, "a")
    assert not runtime.variants


@pytest.mark.parametrize("host_bytes", [None, 0])
@pytest.mark.parametrize("verify", [True, False])
def test_without_room_vectors_are_checked_all_the_same(
    trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch, files: Files, verify: bool, host_bytes: int | None
) -> None:
    whole = Runtime.from_base(trio["a"].pair.base)
    whole.load(trio["a"].artifact, "a")
    budget = int(1.1 * whole.variants["a"].nbytes)
    runtime = plain_runtime(trio["a"].pair.base, monkeypatch, files, budget)
    runtime.cache.host_bytes = host_bytes
    checked: list[Any] = []
    monkeypatch.setattr("deltacompress.runtime.cache.variant_cache.check_stored", checked.append)
    runtime.load(trio["b"].artifact, "b")
    runtime.cache.acquire(["b"])
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(IntegrityError):
            runtime.load(trio["a"].artifact, "a", verify=verify)
    assert list(runtime.variants) == ["b"]
    runtime.load(trio["a"].artifact, "a", verify=verify)
    assert len(checked) == verify
    assert not runtime.variants["a"].installed
    runtime.cache.release(["b"])
    assert_close(runtime.logits([("a", IDS)])[0], oracle_logits(trio["a"].restored, IDS))


def test_too_small_a_budget_is_told_without_a_read(
    trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    runtime = plain_runtime(trio["a"].pair.base, monkeypatch, files, 1000)
    with pytest.raises(BackendError, match=r"\d+ bytes as it is served, more than the whole budget of 1000"):
        runtime.load(trio["a"].artifact, "a")
    assert files.loads == 0
    assert not runtime.variants


def test_damage_on_the_way_back_can_be_mended(
    trio: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    """A variant that left both device and host: one bad read is not remembered."""
    whole = Runtime.from_base(trio["a"].pair.base)
    whole.load(trio["a"].artifact, "a")
    runtime = plain_runtime(trio["a"].pair.base, monkeypatch, files, int(1.1 * whole.variants["a"].nbytes))
    runtime.cache.host_bytes = 0
    runtime.load(shutil.copytree(trio["a"].artifact, tmp_path / "a"), "a")
    runtime.load(trio["b"].artifact, "b")
    runtime.logits([("b", IDS)])
    assert runtime.variants["a"].sources is None
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(ChecksumError):
            runtime.logits([("a", IDS)])
    assert not any(one.users for one in runtime.variants.values())
    assert_close(runtime.logits([("a", IDS)])[0], oracle_logits(trio["a"].restored, IDS))


def test_an_interrupt_meanwhile_leaves_nothing(
    trio: dict[str, Served], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: DeltaVariant) -> str | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaVariant, "note", stop)
        with pytest.raises(KeyboardInterrupt):
            runtime.load(trio["a"].artifact, "a")
    assert not runtime.variants
    runtime.load(trio["a"].artifact, "a")


def test_loads_of_many_threads(trio: dict[str, Served], runtime: Runtime) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: runtime.load(trio["abc"[number % 3]].artifact, f"v{number}"), range(12)))
    for number, kind in ((0, "a"), (4, "b"), (11, "c")):
        assert_close(runtime.logits([(f"v{number}", IDS)])[0], oracle_logits(trio[kind].restored, IDS))


def test_a_load_in_the_middle_of_a_forward(trio: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm has its rows' own vectors in its weight's place then; what a load asks of the base is the base's."""
    loaded: list[str] = []
    kind = type(Runtime.from_base(trio["a"].pair.base).model.model.get_submodule("model.norm"))
    plain = kind.forward

    def forward(norm: torch.nn.Module, x: Tensor) -> Any:
        if not loaded and not isinstance(norm.weight, torch.nn.Parameter):
            loaded.append("twin")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(runtime.load, trio["a"].artifact, "twin").result()
        return plain(norm, x)

    monkeypatch.setattr(kind, "forward", forward)
    runtime = Runtime.from_base(trio["a"].pair.base)
    runtime.load(trio["a"].artifact, "a")
    with forwards.holding(runtime.cache, runtime._input.items([("a", [5, 6])])) as held:
        _, found = forwards.run(runtime.model, held)
    assert loaded == ["twin"]
    assert_close(found, oracle_logits(trio["a"].restored, [5, 6]))

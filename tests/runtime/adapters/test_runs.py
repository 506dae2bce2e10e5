"""What is served as it is stored is read in runs: the same numbers as tensor by tensor, whoever reads."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft_models
import pytest
import torch
from runtime.adapters.family import Family

from deltacompress.checkpoints.header import TensorSpan
from deltacompress.errors import DeltaCompressError, InputError
from deltacompress.numerics.adapters import butterfly
from deltacompress.runtime import Runtime
from deltacompress.runtime.operands.operand import Operand
from deltacompress.runtime.operands.product import Combined
from deltacompress.runtime.variants import adapter_runs, adapter_tensors, adapter_turns
from deltacompress.runtime.variants.adapter import AdapterVariant
from deltacompress.runtime.variants.adapter_runs import Run, runs_of
from deltacompress.runtime.variants.variant import plain_memory
from deltacompress.types import TensorInfo


def opened(path: Path, runtime: Runtime) -> AdapterVariant:
    return AdapterVariant.open(path, runtime.model.base)


def held(operand: Operand | None) -> dict[str, torch.Tensor]:
    """All tensors of what serves a module, by name; of several parts, those of each."""
    if isinstance(operand, Combined):
        return {f"{at}.{name}": one for at, part in enumerate(operand.parts) for name, one in held(part).items()}
    assert operand is not None
    assert operand.tensors
    return operand.tensors


def same(some: Operand | None, other: Operand | None) -> bool:
    one, two = held(some), held(other)
    return one.keys() == two.keys() and all(part.equal(two[name]) for name, part in one.items())


@pytest.mark.parametrize("most", [4 << 20, 3000, 1])
def test_the_same_as_one_by_one(family: Family, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(adapter_runs, "_MOST", most)
    variant = opened(family.kinds["lora"].path, Runtime.from_base(family.pair.base))
    tensors = variant._operands.tensors
    alone = {path: variant.operand(path) for path in variant.paths()}
    with ThreadPoolExecutor(3) as pool:
        for threads in (None, pool):
            taken = list[int]()

            def memory(nbytes: int, taken: list[int] = taken) -> torch.Tensor:
                taken.append(nbytes)
                return plain_memory(nbytes)

            with variant.reading(memory, threads):
                names = [name for change in variant.adapter.changes.values() for name in change.tensors]
                assert all(tensors.ready(name) is not None for name in names)
                together = {path: variant.operand(path) for path in variant.paths()}
            assert tensors.ready(names[0]) is None
            assert sum(taken) == sum(variant.adapter.tensors[name].info.nbytes for name in names)
            assert len(taken) == (len(names) if most == 1 else 1 if most > 3000 else len(taken))
            assert all(same(one, together[path]) for path, one in alone.items())


def test_what_is_computed_is_not_read_in_runs(family: Family) -> None:
    """Magnitudes go with matrices that are not rounded; another dtype is another number."""
    runtime = Runtime.from_base(family.pair.base)
    assert not opened(family.kinds["dora"].path, runtime)._operands.tensors._runs
    narrow = Runtime.from_base(family.pair.base, dtype=torch.bfloat16)
    assert not opened(family.kinds["lora"].path, narrow)._operands.tensors._runs


def test_what_is_wrong_is_told_by_who_reads_it_alone(family: Family, tmp_path: Path) -> None:
    path = shutil.copytree(family.kinds["rslora"].path, tmp_path / "a")
    peft_models.change(path, lambda tensors: {name: one * 3e38 / one.abs().max() for name, one in tensors.items()})
    runtime = Runtime.from_base(family.pair.base)
    variant = opened(path, runtime)
    with pytest.raises(DeltaCompressError) as alone:
        [variant.operand(one) for one in variant.paths()]
    with variant.reading(), pytest.raises(DeltaCompressError) as together:
        [variant.operand(one) for one in variant.paths()]
    assert str(together.value) == str(alone.value)
    with pytest.raises(DeltaCompressError) as loaded:
        runtime.load(path, "a")
    assert str(loaded.value) == str(alone.value)

    whole = shutil.copytree(family.kinds["lora"].path, tmp_path / "b")
    variant = opened(whole, runtime)
    os.utime(variant.adapter.weights, (1, 1))
    with pytest.raises(DeltaCompressError, match="changed since it was opened"), variant.reading():
        variant.operand(variant.paths()[0])


def span(name: str, begin: int, count: int, dtype: str = "F32") -> TensorSpan:
    nbytes = count * (4 if dtype == "F32" else 2)
    return TensorSpan(TensorInfo(name, dtype, (count,), nbytes), begin, begin + nbytes)


def test_runs_end_at_gaps_and_other_dtypes() -> None:
    spans = [span("b", 12, 2), span("a", 8, 1), span("c", 20, 1, "BF16"), span("d", 22, 1, "BF16"), span("e", 30, 1)]
    assert [[one.info.name for one in run.spans] for run in runs_of(spans)] == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_leaves_none_of_the_run(bad: float, dtype: torch.dtype) -> None:
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    run = Run((span("a", 0, 40, name), span("b", 40 * dtype.itemsize, 3, name)))
    content = torch.arange(43).to(dtype)
    found = run.served(content.clone().view(torch.uint8), {"a": 1.0, "b": 0.5})
    assert torch.equal(found["a"], content[:40])
    assert torch.equal(found["b"], content[40:] * 0.5)
    content[41] = bad
    assert not run.served(content.view(torch.uint8), {"a": 1.0, "b": 0.5})


@pytest.mark.parametrize("at_once", [4 << 20, 1])
@pytest.mark.parametrize("kind", ["boft b4 m1", "boft b8 m3", "boft b32 m2"])
def test_rotations_made_together_are_those_of_each_module(
    family: Family, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_turns, "_AT_ONCE", at_once)
    made = list[int]()

    def rotations(parameters: torch.Tensor) -> list[butterfly.Rotation]:
        made.append(parameters.shape[1])
        return butterfly.rotations(parameters)

    monkeypatch.setattr(adapter_turns, "rotations", rotations)
    variant = opened(family.kinds[kind].path, Runtime.from_base(family.pair.base))
    alone = {path: variant.operand(path) for path in variant.paths()}
    with variant.reading(plain_memory, None, torch.device("cpu")):  # nobody to read them meanwhile
        assert not variant._operands.tensors._turns
    assert not made
    taken = list[int]()

    def memory(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return plain_memory(nbytes)

    with ThreadPoolExecutor(3) as pool, variant.reading(memory, pool, torch.device("cpu")):
        together = {path: variant.operand(path) for path in variant.paths()}
    assert (len(made) == len(alone)) == (at_once == 1)
    blocks = [part for one in together.values() for name, part in held(one).items() if "blocks" in name]
    assert sum(taken) == sum(part.nbytes for part in blocks) > 0
    assert all(same(one, together[path]) for path, one in alone.items())
    assert not variant._operands.tensors._turns


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_what_a_gpu_has_no_room_for_is_made_on_the_cpu(
    family: Family, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    variant = opened(family.kinds["boft b8 m3"].path, Runtime.from_base(family.pair.base))
    alone = variant.operand(variant.paths()[0])

    def full(_parameters: torch.Tensor) -> list[butterfly.Rotation]:
        raise error

    monkeypatch.setattr(adapter_turns, "rotations", full)
    with ThreadPoolExecutor(1) as pool, variant.reading(plain_memory, pool, torch.device("cpu")):
        found = variant.operand(variant.paths()[0])
    assert same(alone, found)

    def broken(_parameters: torch.Tensor) -> list[butterfly.Rotation]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(adapter_turns, "rotations", broken)  # that is told
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="illegal"):
        variant.reading(plain_memory, pool, torch.device("cpu")).__enter__()


def test_what_cannot_be_read_on_the_way_is_kept_by_nobody(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = opened(family.kinds["lora"].path, Runtime.from_base(family.pair.base))
    tensors = variant._operands.tensors

    def damaged(*_: object) -> dict[str, list[butterfly.Rotation]]:
        assert tensors._ready
        raise InputError("damaged")

    monkeypatch.setattr(adapter_tensors, "turns_of", damaged)
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="damaged"):
        variant.reading(plain_memory, pool, torch.device("cpu")).__enter__()
    assert not tensors._ready


def test_a_runtime_on_the_cpu_leaves_a_gpu_alone(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a stream that is none may be made current: that starts CUDA, which a forked process cannot."""

    def started(_stream: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "stream", started)
    for kind in ("lora", "boft b8 m3"):
        Runtime.from_base(family.pair.base).load(family.kinds[kind].path, kind)

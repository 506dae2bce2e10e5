"""Names of devices, on a machine with or without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from deltacompress.devices import device_name, map_in_pages, named_device, resolve_device
from deltacompress.errors import BackendError

CPU = torch.device("cpu")


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert named_device("auto") == resolve_device("auto") == torch.device("cuda" if there else "cpu")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for given, told in (("gpu", "device gpu: there is none of that name"), ("cuda", "device cuda: torch sees no CUDA")):
        with pytest.raises(BackendError, match=told):
            named_device(given)
    for given, told in (("gpu", "device gpu: torch knows no such"), ("cuda:1", "device cuda: torch sees no GPU here")):
        with pytest.raises(BackendError, match=told):
            resolve_device(given)


def test_any_of_torch_s_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device(CPU) == named_device("cpu") == CPU


def test_what_a_table_calls_a_device() -> None:
    assert device_name(CPU) == f"CPU, {os.cpu_count()} cores"


@pytest.mark.parametrize("said", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_is_mapped_in_pages_unless_the_environment_says_how(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if said:
        monkeypatch.setenv(said, "backend:native")
    map_in_pages()
    wanted = {said: "backend:native"} if said else {names[0]: "expandable_segments:True"}
    assert {name: os.environ[name] for name in names if name in os.environ} == wanted

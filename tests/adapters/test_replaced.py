"""A file that takes the place of an adapter's while it is read: what is served is what its digest names, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters.made import BASE, LORA, lora, write

from deltacompress.adapters import adapter as reading
from deltacompress.adapters.adapter import open_adapter, read_adapter
from deltacompress.adapters.values import check_finite, check_values
from deltacompress.errors import CheckpointError

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "one", LORA, lora())


@pytest.fixture
def replace(folder: Path, tmp_path: Path) -> Callable[[], None]:
    """Puts another adapter's weights, of the very same length, in the place of those in `folder`."""
    other = write(tmp_path / "other", LORA, {name: one + 1 for name, one in lora().items()}) / WEIGHTS
    assert other.stat().st_size == (folder / WEIGHTS).stat().st_size
    return lambda: os.replace(other, folder / WEIGHTS)


@pytest.mark.parametrize("when", ["before its header is read", "before it is hashed", "after"])
def test_while_it_is_read(
    folder: Path, replace: Callable[[], None], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors that are found, and the digest, are of one file."""
    name = "read_header" if when.endswith("read") else "_digest"
    work = getattr(reading, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        if when != "after":
            replace()
            return work(*arguments, **options)
        done = work(*arguments, **options)
        replace()
        return done

    monkeypatch.setattr(reading, name, watched)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: changed while it was read; run it again"):
        _ = read_adapter(folder).digest
    monkeypatch.undo()
    assert read_adapter(folder).digest == open_adapter(folder, BASE).digest


def test_after_it_was_opened(folder: Path, replace: Callable[[], None]) -> None:
    """No values of the other file are told to be those of this one."""
    adapter, read = open_adapter(folder, BASE), read_adapter(folder)
    assert adapter.digest == read.digest  # hashed while the file is that of before
    replace()
    for ask in (lambda: check_values(adapter), lambda: check_finite(read.weights, read.stamp, read.tensors.values())):
        with pytest.raises(CheckpointError, match="changed since it was opened; run it again"):
            ask()
    assert open_adapter(folder, BASE).digest != adapter.digest


def test_written_to_in_place(folder: Path) -> None:
    adapter = open_adapter(folder, BASE)
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x41")
    os.utime(folder / WEIGHTS, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        check_values(adapter)

"""Plainly stored parts: where they are read from, what is checked, and the same operands as by decoding.

The loader's threads, buffers and pieces run here over a CPU's memory; test_gpu.py runs them on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltacompress.bench.synthetic import SHAPE_TINY, write_base, write_delta
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.codecs.formats.packed import part_shapes
from deltacompress.errors import CheckpointError, ChecksumError, FormatError, TruncatedFileError
from deltacompress.kernels import hashing
from deltacompress.kernels.cuda import tiling
from deltacompress.kernels.ingest import Ingest, PackTask
from deltacompress.runtime import Runtime
from deltacompress.runtime.cache.loaded_variant import Sources
from deltacompress.runtime.cache.transfer import Transfer
from deltacompress.runtime.loading import arrangement, loader
from deltacompress.runtime.loading.reading import Files
from deltacompress.runtime.operands.embedding_rows import PackedRows
from deltacompress.runtime.operands.packed_delta import PackedDelta
from deltacompress.runtime.operands.stored import Stored, StoredPart
from deltacompress.runtime.variants.delta import DeltaVariant
from deltacompress.runtime.variants.precision import Numerics


class Tiler(Ingest):
    """What the CUDA backend's does, on a CPU."""

    def digests(self, data: Tensor, spans: hashing.Spans) -> Tensor:
        return hashing.digests(data, spans)

    def prepare(self, items: Sequence[PackTask]) -> list[PackTask]:
        return list(items)

    def pack(self, prepared: list[PackTask], data: Tensor, out: Tensor, faults: Tensor) -> None:
        for item in prepared:
            parts = {}
            for name, (dtype, shape) in part_shapes(item.spec, storage=False).items():
                size = shape[0] * shape[1] * dtype.itemsize
                parts[name] = data[item.parts[name] :][:size].clone().view(dtype).view(shape)
            try:
                out[item.into :][: tiling.tiled_bytes(item.spec)] = tiling.tile(item.spec, parts)
            except FormatError as error:
                number = next(number for number, text in tiling.FAULTS.items() if text == str(error))
                faults[item.fault] = number


class Tiles:
    """A backend that packs like the CUDA one."""

    name, device, ingest = "cuda", torch.device("cpu"), Tiler()
    supports = staticmethod(tiling.supported)
    nbytes = staticmethod(tiling.tiled_bytes)


class Event:
    """Of a copy that is done when it is waited for, and not before."""

    pending = False

    def record(self, _: object) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.pending = False


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    for name in ("base", "delta"):
        (root / name).mkdir()
    write_base(root / "base", SHAPE_TINY, torch.device("cpu"))
    write_delta(root / "delta", SHAPE_TINY, Checkpoint.open(root / "base"), torch.device("cpu"))
    return root / "delta"


@pytest.fixture
def variant(delta: Path) -> DeltaVariant:
    runtime = Runtime.from_base(delta.parent / "base", merge_rounding=False)
    numerics = Numerics(torch.float32, False, Tiles())  # type: ignore[arg-type]
    return DeltaVariant.open(delta, replace(runtime.model.base, numerics=numerics))


@pytest.fixture
def stored(variant: DeltaVariant) -> dict[str, Stored]:
    return {path: one for path in variant.paths() if (one := variant.stored(path)) is not None}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    def buffer(self: Any) -> None:
        self.tensor = torch.empty(arrangement.BUFFER_BYTES, dtype=torch.uint8)
        self.view, self.copied = loader.tensor_bytes(self.tensor), Event()

    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    monkeypatch.setattr(loader._Buffer, "__init__", buffer)
    monkeypatch.setattr(arrangement, "READ_BYTES", 3000)
    monkeypatch.setattr(arrangement, "BUFFER_BYTES", 7000)  # parts straddle buffers, and buffers hold several
    monkeypatch.setattr(arrangement, "PIECE_BYTES", 20_000)
    made = loader.Loader(Tiles(), Tiles.ingest, None)  # type: ignore[arg-type]
    read = Files.read

    def checked(self: Any, wanted: Any, into: Any) -> None:
        assert not any(buffer.copied.pending for buffer in made._buffers if buffer.view is into), "still being copied"  # type: ignore[attr-defined]
        read(self, wanted, into)

    monkeypatch.setattr(Files, "read", checked)
    return made.load


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("piece", [1, 20_000, 50_000, 1 << 30])
def test_the_same_as_decoded(
    variant: DeltaVariant,
    stored: dict[str, Stored],
    load: Any,
    verify: bool,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrangement, "PIECE_BYTES", piece)
    assert len(stored) == 7 * SHAPE_TINY.layers + 2
    found = load(stored, verify=verify)
    assert found.keys() == stored.keys()
    for path, one in found.items():
        wanted = variant.operand(path)
        assert type(one) is type(wanted)
        if isinstance(one, PackedDelta):
            assert isinstance(wanted, PackedDelta)
            assert (one.spec, one.out) == (wanted.spec, wanted.out)
            assert torch.equal(one.tensors["buffer"], tiling.tile(wanted.spec, wanted.tensors))
        else:
            assert isinstance(one, PackedRows)
            assert one.tensors.keys() == wanted.tensors.keys()
            assert all(torch.equal(tensor, wanted.tensors[name]) for name, tensor in one.tensors.items())


def damage(path: Path, at: int, value: bytes) -> bytes:
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + value + raw[at + len(value) :])
    return raw


def test_damage_is_found(stored: dict[str, Stored], load: Any) -> None:
    one = stored["model.layers.1.mlp.up_proj.weight"]
    part = one.parts["codes"]
    file, last = Path(part.file), part.begin + part.nbytes - 1
    before = damage(file, last, bytes([file.read_bytes()[last] ^ 1]))
    try:
        with pytest.raises(ChecksumError, match="differ from their recorded hash"):
            load(stored, verify=True)
        with pytest.raises(ChecksumError, match="differ from their recorded hash"):
            loader.check_stored(stored)
        load(stored, verify=False)  # as it was told
    finally:
        file.write_bytes(before)
    loader.check_stored(stored)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no list of open files here")
def test_whatever_fails_leaves_no_file_open(
    stored: dict[str, Stored], load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stored["model.layers.1.mlp.up_proj.weight"]
    lost = {name: replace(part, file=f"{part.file}.gone") for name, part in one.parts.items()}
    before = open_files()
    with pytest.raises(TruncatedFileError, match=r"gone: missing"):
        load(stored | {"model.layers.1.mlp.up_proj.weight": replace(one, parts=lost)}, verify=True)
    bad = {name: replace(part, blake3="0" * 64) for name, part in one.parts.items()}
    with pytest.raises(ChecksumError, match=r"layers\.1\.mlp\.up_proj\.weight\.\w+: its bytes differ"):
        load(stored | {"model.layers.1.mlp.up_proj.weight": replace(one, parts=bad)}, verify=True)
    monkeypatch.setattr("os.preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(stored, verify=True)
    assert open_files() == before


def test_reads_that_come_up_short(stored: dict[str, Stored], load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 2 GiB and more, or over a network."""
    whole = os.preadv
    monkeypatch.setattr("os.preadv", lambda file, views, at: whole(file, [views[0][:777]], at))
    load(stored, verify=True)
    loader.check_stored(stored)


def part(file: str, begin: int, nbytes: int) -> StoredPart:
    return StoredPart(file, begin, nbytes, "", torch.uint8, (nbytes,))


def test_pieces_of_several_files_and_empty_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is read once, to where its part is."""
    monkeypatch.setattr(arrangement, "READ_BYTES", 30)
    monkeypatch.setattr(arrangement, "BUFFER_BYTES", 300)
    spec: Any = None
    tensors = {
        "a": Stored("a", {"codes": part("x", 50, 100), "zeros": part("x", 50, 0), "scales": part("y", 7, 40)}, spec),
        "b": Stored("b", {"codes": part("y", 60, 500), "scales": part("x", 150, 9)}, spec),
        "tied": Stored("tied", {"codes": part("y", 60, 500), "scales": part("x", 150, 9)}, spec),
    }
    for piece in arrangement.pieces(tensors):
        filled = {}
        for transfer in piece.transfers():
            for read in transfer.reads:
                assert 0 < read.nbytes <= 30
                assert read.at + read.nbytes <= transfer.nbytes <= 300
                for i in range(read.nbytes):
                    assert filled.setdefault(transfer.begin + read.at + i, (read.file, read.begin + i)) == (
                        read.file,
                        read.begin + i,
                    )
        for _, one in piece.members:
            for wanted in one.parts.values():
                at = piece.places[arrangement.place(wanted)]
                found = [filled[at + i] for i in range(wanted.nbytes)]
                assert found == [(wanted.file, wanted.begin + i) for i in range(wanted.nbytes)]


@pytest.mark.parametrize(
    ("part", "value", "told"), [("pattern", b"\x00", "pattern"), ("scales", b"\x80\x7f", "finite")]
)
def test_impossible_content_is_found_without_hashes(
    stored: dict[str, Stored], load: Any, part: str, value: bytes, told: str
) -> None:
    place = stored["model.layers.0.self_attn.q_proj.weight"].parts[part]
    before = damage(Path(place.file), place.begin, value)
    try:
        with pytest.raises(FormatError, match=rf"q_proj.weight: .*{told}"):
            load(stored, verify=False)
        with pytest.raises(ChecksumError, match=rf"q_proj.weight.{part}: its bytes differ"):
            load(stored, verify=True)
    finally:
        Path(place.file).write_bytes(before)


def test_a_file_cut_short(stored: dict[str, Stored], load: Any) -> None:
    file = Path(next(iter(stored.values())).parts["codes"].file)
    before = file.read_bytes()
    file.write_bytes(before[: len(before) // 2])
    try:
        with pytest.raises(TruncatedFileError, match="cut short"):
            load(stored, verify=True)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("verify", [True, False])
def test_a_variant_that_has_no_room_yet_is_checked_when_it_is_loaded(
    delta: Path, tmp_path: Path, stored: dict[str, Stored], verify: bool
) -> None:
    """Its parts stay in their files until somebody asks for it, so they are compared where they lie."""
    runtime = Runtime.from_base(delta.parent / "base", merge_rounding=False)
    name = runtime.load(shutil.copytree(delta, tmp_path / "delta"))
    waits = runtime.variants[name]
    waits.installed, waits.verify = False, verify
    waits.sources = Sources({}, {path: moved(one, delta, tmp_path / "delta") for path, one in stored.items()})
    runtime.cache.confirm(waits)
    part = next(iter(next(iter(stored.values())).parts.values()))
    file = tmp_path / "delta" / Path(part.file).name
    with file.open("r+b") as raw:
        raw.seek(part.begin)
        byte = raw.read(1)[0]
        raw.seek(part.begin)
        raw.write(bytes([byte ^ 1]))
    with pytest.raises(ChecksumError) if verify else nullcontext():
        runtime.cache.confirm(waits)


def test_what_stays_in_files_weighs_what_its_operands_weigh(variant: DeltaVariant, stored: dict[str, Stored]) -> None:
    operands = {path: one for path in stored if (one := variant.operand(path)) is not None}
    both = [Sources({}, stored), Sources(operands, {}), Sources({}, {})]
    weighed = [one.placed_bytes(Tiles()) for one in both]  # type: ignore[arg-type]
    assert weighed[0] == weighed[1] > weighed[2] == 0


def test_what_stays_in_files_is_not_decoded(variant: DeltaVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Transfer(torch.device("cpu"), None)
    asked: list[str] = []
    operand = DeltaVariant.operand
    monkeypatch.setattr(DeltaVariant, "operand", lambda self, path: (asked.append(path), operand(self, path))[1])
    transfer._loader = object()  # type: ignore[assignment]
    found = transfer.read(variant)
    assert found.stored
    assert sorted(asked) == sorted(set(variant.paths()) - found.stored.keys())
    assert found.host.keys() <= set(asked)


def moved(one: Stored, source: Path, target: Path) -> Stored:
    """The same parts in a copy of their artifact."""
    parts = {name: replace(part, file=part.file.replace(str(source), str(target))) for name, part in one.parts.items()}
    return replace(one, parts=parts)

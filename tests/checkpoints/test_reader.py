"""Checkpoints: what is read equals what the safetensors library reads, and what is written loads there."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deltacompress.checkpoints import hub
from deltacompress.checkpoints.dtypes import DTYPES
from deltacompress.checkpoints.reader import Checkpoint, tensor_bytes
from deltacompress.checkpoints.weight_files import content_hash, find_weights
from deltacompress.checkpoints.writer import write_checkpoint, write_hashed
from deltacompress.errors import CheckpointError, OutputError
from deltacompress.numerics.finite import FiniteBytes, check_finite
from deltacompress.types import TensorInfo

NAMES = {dtype: name for name, dtype in DTYPES.items()}
Todo = list[tuple[TensorInfo, Callable[[], torch.Tensor]]]


def info_of(name: str, t: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, NAMES[t.dtype], tuple(t.shape), t.nbytes)


def todo(tensors: dict[str, torch.Tensor]) -> Todo:
    return [(info_of(name, t), lambda t=t: t) for name, t in tensors.items()]  # type: ignore[misc]


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor per dtype with random bits (NaN payloads included), plus a scalar and an empty one."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        bits = torch.randint(0, 2 if name == "BOOL" else 256, (6 * dtype.itemsize,), generator=g, dtype=torch.uint8)
        tensors[f"layers.{i}.{name}"] = bits.view(dtype).reshape(2, 3)
    return {**tensors, "scalar": torch.tensor(3, dtype=torch.int64), "empty": torch.zeros(0, 7, dtype=torch.bfloat16)}


def write(root: Path, tensors: dict[str, torch.Tensor], *, shard: int = 2**30, **config: Any) -> Path:
    root.mkdir(parents=True)
    write_checkpoint(root, todo(tensors), max_shard_bytes=shard)
    (root / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return root


def raw(t: torch.Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def fresh(factory: pytest.TempPathFactory, name: str) -> Path:
    """An empty directory, the same for every example of a property (mktemp would number hundreds of them)."""
    root = factory.getbasetemp() / name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


# --- reading


@pytest.mark.parametrize("shard", [1, 40, 2**30])
def test_read_is_bit_exact_and_sharding_does_not_matter(tmp_path: Path, shard: int) -> None:
    tensors = random_tensors()
    checkpoint = Checkpoint.open(write(tmp_path / "m", tensors, shard=shard))
    assert list(checkpoint.tensors) == sorted(tensors)
    for name, t in tensors.items():
        got = checkpoint.read(name)
        assert (got.dtype, got.shape) == (t.dtype, t.shape)
        assert raw(got) == raw(t)
        assert checkpoint.tensors[name] == info_of(name, t)
        assert checkpoint.sha256(name) == hashlib.sha256(raw(t)).hexdigest()


def test_read_gives_memory_of_its_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"a": torch.arange(4)}))
    before = checkpoint.fingerprint()
    checkpoint.read("a").fill_(9)
    assert checkpoint.read("a").tolist() == [0, 1, 2, 3]
    assert Checkpoint.open(tmp_path / "m").fingerprint() == before


def test_opens_what_the_library_saved(tmp_path: Path) -> None:
    tensors = {name: t for name, t in random_tensors().items() if name != "empty"}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "x": "y"})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(str(tmp_path))
    assert all(raw(checkpoint.read(name)) == raw(t) for name, t in tensors.items())


def test_unknown_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"a": torch.ones(1)}))
    for call in (checkpoint.read, checkpoint.sha256):
        with pytest.raises(CheckpointError, match="no tensor named b"):
            call("b")


def test_nbytes_counts_what_a_user_copies(tmp_path: Path) -> None:
    root = write(tmp_path / "m", random_tensors(), shard=64)
    (root / "tokenizer.json").write_text("{}")
    kept = sum(file.stat().st_size for file in root.iterdir())
    (root / "README.md").write_text("not the model")
    (root / "modeling.py").write_text("not the model")
    (root / "training_args.bin").write_text("not the model")
    assert Checkpoint.open(root).nbytes == kept


def test_side_files(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(1), "b": torch.ones(1)}, shard=4)
    wanted = (
        "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json "
    )
    wanted += "merges.txt tokenizer.model spiece.model chat_template.jinja added_tokens.json"
    for name in (*wanted.split(), "tokenization_x.py", "chat_template.py", "optimizer.pt", "trainer_state.json"):
        (root / name).touch()
    (root / "config.json").write_text("{}")
    assert [file.name for file in Checkpoint.open(root).side_files()] == sorted(wanted.split())


# --- hashes


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16), shards=st.lists(st.integers(0, 3), min_size=20, max_size=20), text=st.text(max_size=5)
)
def test_fingerprint_sees_neither_shards_nor_order_nor_metadata(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shards: list[int], text: str
) -> None:
    tensors = {name: t for name, t in random_tensors(seed).items() if name != "empty"}
    root = fresh(tmp_path_factory, "resharded")
    (root / "config.json").write_text("{}")
    weight_map = {name: f"part{shards[i]}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, root / file, metadata={"note": text})
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rows = [[n, NAMES[t.dtype], list(t.shape), hashlib.sha256(raw(t)).hexdigest()] for n, t in sorted(tensors.items())]
    oracle = hashlib.sha256(json.dumps(rows).replace(", ", ",").encode()).hexdigest()
    assert Checkpoint.open(root).fingerprint() == oracle


def test_fingerprint_sees_every_bit_name_shape_and_dtype() -> None:
    entries = [("a", "F32", (2, 3), "00"), ("b", "I64", (), "11")]
    changed = [
        [("A", "F32", (2, 3), "00"), entries[1]],
        [("a", "I32", (2, 3), "00"), entries[1]],
        [("a", "F32", (3, 2), "00"), entries[1]],
        [("a", "F32", (2, 3), "01"), entries[1]],
        entries[:1],
    ]
    assert len({content_hash(e) for e in [entries, *changed]}) == 6
    assert content_hash(reversed(entries)) == content_hash(entries)


def test_content_hash_is_pinned() -> None:
    """Artifacts carry this hash; it may never change."""
    entries = [("w\u00e9", "BF16", (2, 1), "ab" * 32), ("a", "F32", (), "cd" * 32)]
    text = '[["a","F32",[],"' + "cd" * 32 + '"],["w\u00e9","BF16",[2,1],"' + "ab" * 32 + '"]]'
    assert content_hash(entries) == hashlib.sha256(text.encode()).hexdigest()


def test_hash_is_read_once(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(8)})
    checkpoint = Checkpoint.open(root)
    first = checkpoint.sha256("a")
    (root / "model.safetensors").unlink()
    assert checkpoint.sha256("a") == first


LOOK, CHUNK = 1 << 16, 4 << 20


@pytest.mark.parametrize("size", [0, 1, LOOK - 1, LOOK, LOOK + 1, LOOK + CHUNK, LOOK + CHUNK + 1])
def test_a_tensor_comes_in_chunks_and_equals_only_its_like(tmp_path: Path, size: int) -> None:
    t = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, after = torch.randint(256, (2, 3), dtype=torch.uint8)
    first = Checkpoint.open(write(tmp_path / "a", {"a": before, "t": t, "z": after}))
    assert b"".join(first.chunks("t")) == raw(t)
    same = Checkpoint.open(write(tmp_path / "b", {"z": t, "y": before}))
    assert first.equals("t", same, "z")
    for k, at in enumerate({0, size // 2, LOOK - 1, LOOK, size - 1} & set(range(size))):
        other = t.clone()
        other[at] ^= 64
        assert not first.equals("t", Checkpoint.open(write(tmp_path / f"other{k}", {"t": other})), "t")
    assert first.sha256("t") == hashlib.sha256(raw(t)).hexdigest()
    assert first.equals("t", same, "z")
    assert same.equals("z", first, "t")
    assert first.sha256("t") == same.sha256("z")
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    assert first.equals("t", same, "z")  # by their hashes


@pytest.mark.parametrize("dtype", [t for t in DTYPES.values() if t.is_floating_point or t.is_complex], ids=str)
def test_examining_finds_what_is_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every bit pattern of up to 16 bits, and those around the last finite number of wider ones, alone among zeros."""
    part = torch.float32 if dtype.is_complex else dtype
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.itemsize]
    wide = torch.tensor([torch.finfo(part).max, -torch.finfo(part).max, torch.inf, -torch.inf, 0], dtype=torch.float64)
    found = wide.to(part).view(bits) if part.itemsize > 1 else torch.empty(0, dtype=bits)
    seen = (
        torch.cat([found + k for k in (-1, 0, 1)]).unique() if part.itemsize > 2 else torch.arange(256**part.itemsize)
    )
    values = seen.to(bits).view(part)
    checked = values if part.itemsize > 1 else values.float()
    expected = checked.isfinite().tolist()
    assert part.itemsize == 1 or {True, False} <= set(expected)
    for value, is_finite in zip(values, expected, strict=True):
        piece = torch.cat([torch.zeros(3, dtype=part), value.view(1)])
        look = FiniteBytes(dtype)
        assert look.at(raw(piece)) == raw(piece)
        assert look.finite == is_finite, value


@pytest.mark.parametrize("at", [0, LOOK // 2 - 1, LOOK // 2, CHUNK // 2, 3_000_000 - 1])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_value_that_is_not_finite_is_found_anywhere(tmp_path: Path, at: int, value: float) -> None:
    t = torch.zeros(3_000_000, dtype=torch.bfloat16)
    t[at] = value
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"bad": t, "good": torch.zeros(3_000_000)}))
    assert not checkpoint.examine("bad")
    assert checkpoint.examine("good")
    assert checkpoint.finite == {"good"}
    assert checkpoint.sha256("bad") == hashlib.sha256(raw(t)).hexdigest()


def test_who_asks_for_a_hash_that_is_on_its_way_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"a": torch.ones(8)}))
    begun, go, reads = Event(), Event(), []
    real = Checkpoint.chunks

    def slow(self: Checkpoint, name: str) -> Iterator[bytes]:
        reads.append(name)
        begun.set()
        assert go.wait(60)
        return real(self, name)

    monkeypatch.setattr(Checkpoint, "chunks", slow)
    with ThreadPoolExecutor(2) as threads:
        examined = threads.submit(checkpoint.examine, "a")
        assert begun.wait(60)
        hashed = threads.submit(checkpoint.sha256, "a")
        go.set()
        assert (examined.result(), hashed.result()) == (True, hashlib.sha256(raw(torch.ones(8))).hexdigest())
    assert reads == ["a"]


def test_what_is_written_is_hashed_on_the_way(tmp_path: Path) -> None:
    chunks = [b"some", memoryview(b"thing"), b"", b" more"]
    assert write_hashed(tmp_path / "a", chunks) == (hashlib.sha256(b"something more").hexdigest(), 14)
    assert (tmp_path / "a").read_bytes() == b"something more"


def test_hashing_holds_chunks_not_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"a": torch.zeros(64 * 2**20, dtype=torch.uint8)}))
    tracemalloc.start()
    try:
        checkpoint.fingerprint()
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES.values())
def test_tensor_bytes_shares_memory(name: str) -> None:
    t = torch.zeros(2, 3, dtype=DTYPES[name])
    view = tensor_bytes(t)
    assert view.nbytes == t.nbytes
    view[0] = 1
    assert raw(t)[:2] == b"\x01\x00"


def test_tensor_bytes_refuses_strides() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        tensor_bytes(torch.zeros(2, 3).T)


# --- bad input


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint.open(tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="pickled weights"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(1)})
    (root / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(root)


def test_truncated_shard_names_the_file(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(100), "b": torch.ones(100)}, shard=400)
    os.truncate(root / "model-00002-of-00002.safetensors", 300)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: truncated"):
        Checkpoint.open(root)


def test_a_file_that_changes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a model is copied over another: offsets of the old header would be read in the new file."""
    made, whole = write(tmp_path / "m", {"a": torch.ones(100)}), find_weights

    def replaced_meanwhile(root: Path) -> Any:
        found = whole(root)
        os.utime(root / "model.safetensors", ns=(1, 1))
        return found

    monkeypatch.setattr("deltacompress.checkpoints.reader.find_weights", replaced_meanwhile)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while its header was read; run it again"):
        Checkpoint.open(made)


@pytest.mark.parametrize("damage", ["truncate", "rewrite", "remove"])
def test_a_file_that_changes_after_opening(tmp_path: Path, damage: str) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(100)})
    checkpoint, file = Checkpoint.open(root), root / "model.safetensors"
    if damage == "truncate":
        os.truncate(file, 100)
    elif damage == "rewrite":
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
        os.utime(file, ns=(0, 0))
    else:
        file.unlink()
    for call in (checkpoint.read, checkpoint.sha256):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            call("a")


def test_a_file_cut_during_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "m", {"a": torch.ones(100)})
    checkpoint = Checkpoint.open(root)
    stamp = checkpoint._stamps[root / "model.safetensors"]
    os.truncate(root / "model.safetensors", 300)
    monkeypatch.setattr("deltacompress.checkpoints.reader._stamp", lambda _: stamp)
    for call in (checkpoint.read, checkpoint.sha256):
        with pytest.raises(CheckpointError, match="truncated while tensor a"):
            call("a")


# --- hub ids


def _host(reached: bool) -> Callable[[], None]:
    def look_up() -> None:
        if not reached:
            raise ConnectionError("huggingface.co: no such host")

    return look_up


def test_hub_id_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told in one line, at once: nothing is tried again and again."""
    monkeypatch.setattr(hub, "look_up_host", _host(False))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    told = "org/model: no such directory, and no network to fetch it from the hub; mend the path, or give a model's"
    with pytest.raises(CheckpointError, match=told):
        Checkpoint.open("org/model")


def test_hub_id_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    import huggingface_hub

    root = write(tmp_path / "snapshot", {"a": torch.ones(1)})
    asked: dict[str, Any] = {}

    def fake(repo: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.update(local=local_files_only, repo=repo, patterns=allow_patterns)
        return str(root)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    for reached in (True, False):  # without a network, what was fetched before is still here
        monkeypatch.setattr(hub, "look_up_host", _host(reached))
        for given_path in ("org/model-1.5", Path("org/model-1.5")):
            assert Checkpoint.open(given_path).path == root
            assert asked["repo"] == "org/model-1.5"
            assert asked["local"] is not reached

    def allowed(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in asked["patterns"])

    wanted = (
        "model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json config.json tokenizer.json"
    )
    assert all(allowed(file) for file in wanted.split())
    unwanted = "pytorch_model.bin modeling_x.py consolidated.safetensors model.pt optimizer.pt tf_model.h5 README.md"
    assert not any(allowed(file) for file in unwanted.split())


@pytest.mark.parametrize("error", [OSError("offline\nmore"), ConnectionError("offline"), ValueError("offline")])
def test_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "look_up_host", _host(True))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"org/model: no such directory.*\(offline\); mend the path, or download"):
        Checkpoint.open("org/model")


@pytest.mark.parametrize(
    "path", ["a/b/c", "./org/model", "../model", "/org/model", "~/model", "model", "org/..", "org/mo del", "models/7b"]
)
def test_what_is_no_hub_id_is_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    (tmp_path / "here" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


# --- writing


@pytest.mark.parametrize("shard", [1, 40, 100, 2**30])
def test_written_files_load_in_the_library(tmp_path: Path, shard: int) -> None:
    tensors = random_tensors()
    root = write(tmp_path / "m", tensors, shard=shard)
    files = sorted(root.glob("*.safetensors"))
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(file)
        payload = sum(t.nbytes for t in part.values())
        assert payload <= shard or len([t for t in part.values() if t.nbytes]) == 1
        loaded |= part
    assert {name: raw(t) for name, t in loaded.items()} == {name: raw(t) for name, t in tensors.items()}
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        assert not (root / "model.safetensors.index.json").exists()
    else:
        assert [f.name for f in files] == [
            f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
        ]
        index = json.loads((root / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(sorted(random_tensors())), shard=st.integers(1, 400))
def test_bytes_do_not_depend_on_order(tmp_path_factory: pytest.TempPathFactory, order: list[str], shard: int) -> None:
    root, tensors = fresh(tmp_path_factory, "order"), random_tensors()
    for name, names in (("a", sorted(tensors)), ("b", order)):
        write(root / name, {n: tensors[n] for n in names}, shard=shard)
    a, b = ({f.name: f.read_bytes() for f in (root / name).iterdir()} for name in "ab")
    assert a == b


def test_header_is_aligned_and_marked(tmp_path: Path) -> None:
    data = (write(tmp_path / "m", random_tensors()) / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for entry in header.values():
        assert (8 + length + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0


def test_strided_tensors_are_written_row_major(tmp_path: Path) -> None:
    t = torch.arange(6.0).reshape(2, 3).T
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"a": t}))
    assert torch.equal(checkpoint.read("a"), t)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    import weakref

    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> torch.Tensor:
        assert sum(ref() is not None for ref in made) <= 1  # the one just written, at most
        t = torch.zeros(4)
        made.append(weakref.ref(t))
        return t

    infos = [info_of(f"t{i}", torch.zeros(4)) for i in range(5)]
    (tmp_path / "m").mkdir()
    write_checkpoint(tmp_path / "m", ((info, make) for info in infos))
    assert len(made) == 5


def test_transformers_style_round_trip_keeps_the_fingerprint(tmp_path: Path) -> None:
    first = Checkpoint.open(write(tmp_path / "a", random_tensors(), shard=50))
    (tmp_path / "b").mkdir()
    write_checkpoint(tmp_path / "b", [(info, lambda n=name: first.read(n)) for name, info in first.tensors.items()])
    (tmp_path / "b" / "config.json").write_text("{}")
    assert Checkpoint.open(tmp_path / "b").fingerprint() == first.fingerprint()


def test_output_that_is_not_an_empty_directory(tmp_path: Path) -> None:
    items = todo({"a": torch.ones(1)})
    with pytest.raises(OutputError, match="existing empty directory"):
        write_checkpoint(tmp_path / "missing", items)
    (tmp_path / "x").touch()
    for out in (tmp_path, tmp_path / "x"):
        with pytest.raises(OutputError, match="existing empty directory"):
            write_checkpoint(out, items)


def test_nothing_sensible_to_write(tmp_path: Path) -> None:
    one = todo({"a": torch.ones(1)})
    for items, shard in (([], 1), (one + one, 1), (one, 0)):
        with pytest.raises(OutputError, match=r"at least one tensor|names given once"):
            write_checkpoint(tmp_path, items, max_shard_bytes=shard)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("t", [torch.ones(3), torch.ones(2, dtype=torch.float16), torch.ones(2, 1)])
def test_a_tensor_that_is_not_what_was_promised(tmp_path: Path, t: torch.Tensor) -> None:
    with pytest.raises(OutputError, match="tensor a should be F32"):
        write_checkpoint(tmp_path, [(TensorInfo("a", "F32", (2,), 8), lambda: t)])


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([torch.ones(2)], "lacks 4 of its 12 bytes"),
        ([], "lacks 12 of its 12 bytes"),
        ([torch.ones(2), torch.ones(2)], "tensor a"),
        ([torch.ones(2), torch.ones(1, dtype=torch.bfloat16)], "tensor a"),
    ],
)
def test_pieces_that_are_not_what_was_promised(tmp_path: Path, pieces: list[torch.Tensor], told: str) -> None:
    with pytest.raises(OutputError, match=told):
        write_checkpoint(tmp_path, [(TensorInfo("a", "F32", (3,), 12), lambda: iter(pieces))])


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "choose another"), (errno.EIO, "choose another")],
)
@pytest.mark.parametrize("stage", ["open", "write", "fsync"])
def test_os_errors_become_output_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, code: int, hint: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    class Full(io.BytesIO):
        write = fail

    if stage == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "open", fail if stage == "open" else lambda *_, **__: Full())
    with pytest.raises(OutputError, match=rf"model\.safetensors: cannot be written .*{hint}"):
        write_checkpoint(tmp_path, todo({"a": torch.ones(1)}))


def test_a_disk_that_is_really_full() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    from deltacompress.checkpoints.writer import write_file

    class DevFull(type(Path())):  # type: ignore[misc]
        def open(self, *_: object, **__: object) -> Any:  # type: ignore[override]
            return io.FileIO("/dev/full", "wb")

    with pytest.raises(OutputError, match="free some space"):
        write_file(DevFull("x"), [bytes(100)])


def test_an_error_of_the_source_keeps_its_class(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise CheckpointError("base/model.safetensors: truncated")

    def os_error() -> torch.Tensor:
        raise PermissionError("not about the output")

    for make, expected in ((fail, CheckpointError), (os_error, PermissionError)):
        out = tmp_path / expected.__name__
        out.mkdir()
        with pytest.raises(expected):
            write_checkpoint(out, [(TensorInfo("a", "F32", (2,), 8), make)])


# --- finite weights


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.is_floating_point])
def test_check_finite(dtype: torch.dtype) -> None:
    t = torch.ones(3, 4).to(dtype)
    check_finite("w", t)
    check_finite("empty", torch.empty(0, dtype=dtype))
    t[1, 2] = torch.tensor(float("nan")).to(dtype)
    with pytest.raises(CheckpointError, match="tensor w: 1 NaN and 0 Inf among 12 values"):
        check_finite("w", t)
    if dtype.itemsize > 1:
        t[0, 0], t[2, 3] = float("inf"), -float("inf")
        with pytest.raises(CheckpointError, match="tensor w: 1 NaN and 2 Inf"):
            check_finite("w", t)


def test_check_finite_passes_integers() -> None:
    check_finite("i", torch.tensor([2**63 - 1]))
    check_finite("b", torch.tensor([True]))
    check_finite("c", torch.ones(2, dtype=torch.complex64))

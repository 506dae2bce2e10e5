"""Reading an artifact: decoded by hand from the documented layout, and every damage refused by its own error."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from pairs import Pair, changed, edit, files_of, flips, remove, weights_of, write_tokenizer
from safetensors.torch import load_file, save_file

from deltacompress.artifact.delta import Delta, load_delta, verify
from deltacompress.artifact.manifest import parse_manifest
from deltacompress.artifact.parts import check_file
from deltacompress.artifact.restoration import restore
from deltacompress.checkpoints.reader import Checkpoint
from deltacompress.cli.main import main
from deltacompress.codecs.recipe import Recipe
from deltacompress.errors import (
    BackendError,
    BaseMismatchError,
    ChecksumError,
    FormatError,
    InputError,
    IntegrityError,
    SchemaVersionError,
    TruncatedFileError,
)
from deltacompress.lossless import coding

SHARD = "delta-00001-of-00001.safetensors"
Copy = Callable[[], Path]


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(artifact, tmp_path / "copy")


@pytest.fixture(scope="module")
def smallest(make_pair: Callable[..., Pair], tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Path]:
    """A pair so small that each byte of its artifacts can be damaged: (pair, folder with one artifact per codec)."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    made = make_pair("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)
    for checkpoint in (made.base, made.finetuned):
        write_tokenizer(checkpoint, [f"w{i}" for i in range(12)])
    root = tmp_path_factory.mktemp("smallest")
    for lossless in ("none", "zstd"):
        made.compress(root / lossless, lossless=lossless)
    return made, root


def assert_refused(artifact: Path, base: Path, error: type[IntegrityError], told: str) -> None:
    """By verify and restore alike, in one line, through the command line with exit code 3, with nothing left."""
    before = {path.name for path in artifact.parent.iterdir()}
    out = artifact.parent / "restored"
    for attempt in (lambda: verify(artifact, base=base), lambda: restore(artifact, base=base, out=out)):
        with pytest.raises(error, match=told) as caught:
            attempt()
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)
    assert main(["verify", str(artifact), "--base", str(base), "--quiet"]) == 3
    assert main(["restore", str(artifact), "--base", str(base), "--out", str(out), "--quiet"]) == 3
    assert {path.name for path in artifact.parent.iterdir()} == before


# --- what is stored --------------------------------------------------------------------------------------------


def codes_by_hand(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """b-bit codes [rows, count]: one long little-endian bit string per row."""
    strings = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits]
    return (strings.reshape(len(packed), count, bits) << np.arange(bits)).sum(-1)


def decoded_by_hand(delta: Delta, name: str) -> np.ndarray:
    """f32 [rows, columns] of a packed tensor, 2:4 or dense, min-max grid, from its parts in the serving layout."""
    record, parts = delta.tensors[name], delta.parts(name)
    bits, columns = int(record.params["bits"]), int(record.params["columns"])
    rows, group = int(record.params["rows"]), int(record.params["group_size"])
    scales, zeros = parts["scales"].float().numpy(), parts["zeros"].numpy().astype(np.float32)
    out = np.zeros((rows, columns), np.float32)
    where = np.tile(np.arange(columns), (rows, 1))
    if record.params["sparsity"] == "2:4":
        nibbles = codes_by_hand(parts["pattern"].numpy(), 4, columns // 4)
        first, second = nibbles & 3, nibbles >> 2
        assert (first < second).all()
        at = 4 * np.arange(columns // 4)
        where = np.stack([at + first, at + second], -1).reshape(rows, -1)
    codes = codes_by_hand(parts["codes"].numpy(), bits, where.shape[1]).astype(np.float32)
    for r in range(rows):
        of = where[r] // group
        out[r, where[r]] = (codes[r] - zeros[r, of]) * scales[r, of]
    return out


@pytest.mark.parametrize("recipe", ["int4-24", "int2-24", "int4", "int2", "deltazip-2bit"])
def test_restored_is_base_plus_what_the_parts_say(pair: Pair, tmp_path: Path, recipe: str) -> None:
    pair.compress(tmp_path / "out", recipe=recipe)
    delta = load_delta(tmp_path / "out")
    base, found = weights_of(pair.base), weights_of(restore(tmp_path / "out", base=pair.base, out=tmp_path / "found"))
    packed = [name for name, record in delta.tensors.items() if record.format == "packed"]
    assert len(packed) >= 2 * 7
    for name in packed:
        assert "row_mask" not in delta.parts(name)
        wanted = base[name].float() + torch.from_numpy(decoded_by_hand(delta, name))
        assert torch.equal(found[name], wanted.to(torch.bfloat16)), name


def test_rows_that_did_not_change_are_not_stored(pair: Pair, tmp_path: Path) -> None:
    base = weights_of(pair.base)["model.embed_tokens.weight"]
    shutil.copytree(pair.finetuned, tmp_path / "tuned")
    touched = torch.arange(96) % 3 == 1

    def freeze(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tuned = weights["model.embed_tokens.weight"]
        return weights | {"model.embed_tokens.weight": torch.where(touched[:, None], tuned, base)}

    some = Pair(pair.base, edit(tmp_path / "tuned", freeze), pair.data)
    some.compress(tmp_path / "out")
    delta = load_delta(tmp_path / "out")
    parts = delta.parts("model.embed_tokens.weight")
    assert parts["codes"].shape[0] == int(touched.sum())
    bits = np.unpackbits(parts["row_mask"].numpy(), bitorder="little")[:96].astype(bool)
    assert (bits == touched.numpy()).all()
    restored = restore(tmp_path / "out", base=pair.base, out=tmp_path / "found")
    found = weights_of(restored)["model.embed_tokens.weight"]
    assert torch.equal(found[~touched], base[~touched])
    wanted = base[touched].float() + torch.from_numpy(decoded_by_hand(delta, "model.embed_tokens.weight"))
    assert torch.equal(found[touched], wanted.to(torch.bfloat16))


def test_hashes_in_the_manifest_are_of_the_files(artifact: Path, pair: Pair) -> None:
    manifest = load_delta(artifact).manifest
    listed = {record.file: (record.bytes, record.sha256) for record in manifest.stored_files}
    found = {
        name: (len(raw), hashlib.sha256(raw).hexdigest())
        for name, raw in files_of(artifact).items()
        if name != "manifest.json"
    }
    assert listed == found
    assert {record.file for record in manifest.files} == {
        path.name for path in pair.finetuned.iterdir() if path.suffix != ".safetensors"
    }


def restored_weights(artifact: Path, pair: Pair) -> dict[str, torch.Tensor]:
    out = artifact.parent / "restored-weights"
    weights = weights_of(restore(artifact, base=pair.base, out=out))
    shutil.rmtree(out)
    return weights


def test_its_digest_is_that_of_the_manifest(artifact: Path) -> None:
    delta = load_delta(artifact)
    assert delta.digest == delta.manifest.digest == json.loads((artifact / "manifest.json").read_text())["digest"]


def test_restoring_twice_gives_the_same_files(artifact: Path, pair: Pair, tmp_path: Path) -> None:
    restore(artifact, base=pair.base, out=tmp_path / "a")
    restore(artifact, base=pair.base, out=tmp_path / "b" / "deeper")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b" / "deeper")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_one_tensor_at_a_time(artifact: Path, pair: Pair) -> None:
    delta = load_delta(artifact)
    base, name = Checkpoint.open(pair.base), "model.layers.0.mlp.up_proj.weight"
    spec = delta.spec(name)
    assert spec is not None
    assert (spec.rows, spec.columns) == delta.tensors[name].shape
    assert delta.spec("model.norm.weight") is None
    for part in delta.tensors[name].parts:
        stored = delta.stored_part(name, part)
        assert hashlib.sha256(stored).hexdigest() == part.sha256
        assert part.blake3 == (blake3(stored).hexdigest() if delta.manifest.lossless == "none" else None)
    assert torch.equal(delta.restored(name, delta.read_base(name, base)), restored_weights(artifact, pair)[name])
    other = delta.read_base(name, base)
    assert other is not None
    other[0, 0] += 1
    with pytest.raises(ChecksumError, match=f"{name}: the restored tensor is not what was compressed"):
        delta.restored(name, other)
    for ask in (delta.record, delta.spec, delta.parts):
        with pytest.raises(InputError, match="no tensor named nothing"):
            ask("nothing")


def test_a_few_bytes_are_not_decoded_to_a_huge_tensor_at_once(pair: Pair, tmp_path: Path) -> None:
    """Nothing but their own claim holds such values to their size; a base does."""
    zeros = torch.zeros(1 << 12, 1 << 12, dtype=torch.bfloat16)
    made = changed(pair, tmp_path, lambda weights: weights | {"extra.weight": zeros})
    made.compress(tmp_path / "out", recipe="lossless")
    with pytest.raises(FormatError, match=rf"extra.weight: {1 << 24} values in .* takes too much memory at once"):
        load_delta(tmp_path / "out").parts("extra.weight")
    found = restore(tmp_path / "out", base=made.base, out=tmp_path / "restored")
    assert torch.equal(weights_of(found)["extra.weight"], zeros)


def test_an_alias_is_read_as_its_twin(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.finetuned, tmp_path / "tuned")
    embedding = "model.embed_tokens.weight"
    tie = edit(tmp_path / "tuned", lambda weights: weights | {"lm_head.weight": weights[embedding].clone()})
    Pair(pair.base, tie, pair.data).compress(tmp_path / "out")
    delta, base = load_delta(tmp_path / "out"), Checkpoint.open(pair.base)
    assert delta.tensors["lm_head.weight"].status == "alias"
    assert delta.spec("lm_head.weight") == delta.spec(embedding)
    assert delta.parts("lm_head.weight").keys() == delta.parts(embedding).keys()
    restored = delta.restored("lm_head.weight", delta.read_base("lm_head.weight", base))
    assert torch.equal(restored, delta.restored(embedding, delta.read_base(embedding, base)))


def test_a_damaged_part_is_noticed_on_its_own(smallest: tuple[Pair, Path]) -> None:
    """Without a lossless stage there is no stream with digests; the part's own hash is what a partial read checks."""
    artifact = smallest[1] / "none"
    delta = load_delta(artifact)
    name = next(name for name, record in delta.tensors.items() if record.format == "packed")
    for part in delta.tensors[name].parts:
        path, span = delta.where(name, part)
        for _ in flips(path, range(span.begin, span.begin + part.bytes)):
            with pytest.raises(ChecksumError, match=re.escape(f"{name}.{part.name}")):
                delta.parts(name)
    delta.parts(name)


# --- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_every_byte_of_every_file_counts(smallest: tuple[Pair, Path], lossless: str) -> None:
    """Each single byte of each file, in every one of its bits by turns, by the check that `verify` gives the file."""
    artifact = smallest[1] / lossless
    delta = load_delta(artifact)
    good = (artifact / "manifest.json").read_bytes()
    assert len(good) > 5000
    for offset in range(len(good)):
        raw = bytearray(good)
        raw[offset] ^= 1 << offset % 8
        with pytest.raises(IntegrityError):
            parse_manifest(bytes(raw), "manifest.json")
    for record in (*delta.manifest.shards, *delta.manifest.files):
        path = artifact / record.file
        offsets = range(record.bytes)
        assert record.bytes > 30
        for offset in flips(path, offsets, bit=1 << record.bytes % 8):
            with pytest.raises(ChecksumError, match=re.escape(record.file)):
                check_file(artifact, record)
            assert offset in offsets
        check_file(artifact, record)


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_flipped_bytes_are_noticed_by_verify(smallest: tuple[Pair, Path], lossless: str) -> None:
    """The whole of `verify`: all of the shard's header, and every few bytes of everything else."""
    artifact = smallest[1] / lossless
    for path in sorted(artifact.iterdir()):
        size = path.stat().st_size
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.name == SHARD else 0
        step = max(1, size // 400)
        offsets = {*range(0, size, step), *range(0, header, 5), *range(16), *range(size - 16, size)}
        for offset in flips(path, sorted(offsets)):
            try:
                verify(artifact)
            except IntegrityError:
                continue
            pytest.fail(f"{path.name}: byte {offset} is not missed")
    verify(artifact, base=smallest[0].base)


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_a_flipped_byte_never_restores_to_another_model(
    smallest: tuple[Pair, Path], tmp_path: Path, lossless: str
) -> None:
    """restore reads no file hashes of shards, yet gives the recorded tensors or nothing."""
    made, root = smallest
    artifact = shutil.copytree(root / lossless, tmp_path / "artifact")
    good = files_of(restore(artifact, base=made.base, out=tmp_path / "good"))
    size = (artifact / SHARD).stat().st_size
    refused = 0
    for _ in flips(artifact / SHARD, range(3, size, size // 250), bit=4):
        try:
            restore(artifact, base=made.base, out=tmp_path / "out")
        except IntegrityError:
            refused += 1
            assert {path.name for path in tmp_path.iterdir()} == {"artifact", "good"}
        else:
            assert files_of(tmp_path / "out") == good  # a bit that nothing reads (padding)
            remove(tmp_path / "out")
    assert refused > 200


@pytest.mark.parametrize("sparsity", ["unstructured:0.5", "1:4", "2:3"])
@pytest.mark.parametrize("bits", [3, 16])
def test_a_flipped_byte_in_other_patterns(
    smallest: tuple[Pair, Path], tmp_path: Path, sparsity: str, bits: int
) -> None:
    """Patterns that claim another number of kept weights must not escape as an internal error."""
    made, _ = smallest
    rules = [{"codec": "rtn", "kind": "linear", "bits": bits, "sparsity": sparsity}, {"codec": "exact"}]
    artifact = tmp_path / "out"
    made.compress(artifact, recipe=Recipe.parse({"name": "x", "rules": rules}), lossless="none")
    delta = load_delta(artifact)
    base = Checkpoint.open(made.base)
    name = next(name for name, record in delta.tensors.items() if record.format == "packed")
    for part in delta.tensors[name].parts:
        path, span = delta.where(name, part)
        for _ in flips(path, range(span.begin, span.begin + part.bytes, 1 + part.bytes // 60), bit=1):
            with suppress(IntegrityError):  # else the recorded tensor: some bits are padding, or rounded away
                delta.restored(name, delta.read_base(name, base))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json", "manifest.json"])
def test_cut_short(copy: Path, pair: Pair, name: str, keep: int) -> None:
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(raw[:keep])
    assert_refused(copy, pair.base, TruncatedFileError, name)


@pytest.mark.parametrize("name", [SHARD, "config.json", "manifest.json"])
def test_longer_than_recorded(copy: Path, pair: Pair, name: str) -> None:
    with (copy / name).open("ab") as file:
        file.write(b"\0")
    assert_refused(copy, pair.base, ChecksumError if name == "manifest.json" else TruncatedFileError, name)


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json", "manifest.json"])
def test_missing(copy: Path, pair: Pair, name: str) -> None:
    (copy / name).unlink()
    assert_refused(copy, pair.base, TruncatedFileError, name)


@pytest.mark.parametrize("at", [-1, 500])
def test_flipped_in_place(copy: Path, pair: Pair, at: int) -> None:
    raw = bytearray((copy / "tokenizer.json").read_bytes())
    raw[at] ^= 64
    (copy / "tokenizer.json").write_bytes(raw)
    assert_refused(copy, pair.base, ChecksumError, "tokenizer.json")


def test_another_header_length(copy: Path, pair: Pair) -> None:
    for _ in flips(copy / SHARD, range(2)):
        assert_refused(copy, pair.base, ChecksumError, SHARD)


def rewrite(artifact: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Seal a changed manifest anew, as a forger or another program would."""
    path = artifact / "manifest.json"
    data = json.loads(path.read_bytes())
    del data["digest"]
    change(data)
    plain = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["digest"] = hashlib.sha256(plain.encode()).hexdigest()
    path.write_text(json.dumps(data, sort_keys=True, separators=(",", ":")))


def test_a_schema_of_the_future(copy: Path, pair: Pair) -> None:
    rewrite(copy, lambda data: data.update(schema_version=2))
    assert_refused(copy, pair.base, SchemaVersionError, "schema version 2.*upgrade")


def packed(data: dict, name: str = "mlp.up_proj") -> dict:  # type: ignore[type-arg]
    return next(record for record in data["tensors"] if name in record["name"])


def drop_part(data: dict, name: str) -> None:  # type: ignore[type-arg]
    packed(data)["parts"] = [part for part in packed(data)["parts"] if part["name"] != name]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: drop_part(data, "scales"), id="part gone"),
        pytest.param(lambda data: packed(data)["parts"][0].update(name="other"), id="part renamed"),
        pytest.param(lambda data: packed(data)["parts"][0].update(bytes=3), id="part of another length"),
        pytest.param(lambda data: packed(data)["parts"][0].update(shape=[1 << 40, 1 << 9]), id="huge part"),
        pytest.param(lambda data: packed(data).update(shape=[1 << 40, 1 << 40]), id="huge tensor"),
        pytest.param(lambda data: packed(data)["params"].update(bits=5), id="5 bits"),
        pytest.param(lambda data: packed(data)["params"].update(bits=2), id="other bits"),
        pytest.param(lambda data: packed(data)["params"].update(rows=1), id="other rows"),
        pytest.param(lambda data: packed(data)["params"].update(columns=4), id="other columns"),
        pytest.param(lambda data: packed(data)["params"].update(columns=10**15), id="huge columns"),
        pytest.param(lambda data: packed(data)["params"].update(sparsity="dense"), id="other pattern"),
        pytest.param(lambda data: packed(data)["params"].update(sparsity="9:1"), id="no pattern"),
        pytest.param(lambda data: packed(data)["params"].update(group_size=0), id="no group"),
        pytest.param(lambda data: packed(data)["params"].update(group_size=1), id="other group"),
        pytest.param(lambda data: packed(data)["params"].update(grid="midrise"), id="other grid"),
        pytest.param(lambda data: packed(data)["params"].clear(), id="no params"),
        pytest.param(lambda data: packed(data).update(format="exact"), id="other format"),
        pytest.param(lambda data: packed(data).update(format="none"), id="no format"),
        pytest.param(lambda data: packed(data).update(base_name=None), id="no base"),
        pytest.param(lambda data: packed(data).update(base_rows=3), id="fewer rows of the base"),
        pytest.param(lambda data: packed(data).update(sha256="0" * 64), id="other hash"),
        pytest.param(
            lambda data: packed(data, "post_attention_layernorm").update(params={"transform": "rot13"}), id="transform"
        ),
        pytest.param(lambda data: data.update(lossless="none"), id="other lossless codec"),
        pytest.param(lambda data: packed(data)["parts"][0].update(sha256="0" * 64), id="other part hash"),
        pytest.param(lambda data: packed(data)["parts"][0].update(blake3="0" * 64), id="other blake3"),
        pytest.param(lambda data: packed(data)["parts"][0].pop("blake3", None), id="no blake3"),
        pytest.param(lambda data: data["shards"].pop(), id="no shards"),
        pytest.param(lambda data: data["shards"][0].update(sha256="0" * 64), id="other shard hash"),
    ],
)
@pytest.mark.parametrize("lossless", ["zstd", "none"])
def test_a_sealed_manifest_that_contradicts_the_parts(
    smallest: tuple[Pair, Path],
    tmp_path: Path,
    change: Callable[[dict], None],
    lossless: str,  # type: ignore[type-arg]
) -> None:
    """Never an internal error, never a tensor that is not what the manifest says, never a huge allocation."""
    made, root = smallest
    copy = shutil.copytree(root / lossless, tmp_path / "copy")
    before = (copy / "manifest.json").read_bytes()
    rewrite(copy, change)
    if (copy / "manifest.json").read_bytes() == before:
        return  # lossless is none already
    with pytest.raises(IntegrityError) as caught:
        verify(copy, base=made.base)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, FormatError | ChecksumError | TruncatedFileError)


def reseal(artifact: Path, *shards: dict[str, torch.Tensor]) -> None:
    """Other shards, as a forger would make them: sizes and hashes are right."""
    for old in artifact.glob("delta-*"):
        old.unlink()
    records = []
    for i, tensors in enumerate(shards, start=1):
        name = f"delta-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, artifact / name, metadata={"format": "pt"})
        raw = (artifact / name).read_bytes()
        records.append({"bytes": len(raw), "file": name, "sha256": hashlib.sha256(raw).hexdigest()})
    rewrite(artifact, lambda data: data.update(shards=records))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_part_has_its_length_in_the_shard_too(copy: Path, more: int) -> None:
    tensors = load_file(copy / SHARD)
    part = min(tensors)
    size = tensors[part].numel()
    tensors[part] = torch.zeros(size + more, dtype=torch.uint8)
    reseal(copy, tensors)
    with pytest.raises(FormatError, match=f"part {re.escape(part)} has {size + more} bytes, the manifest says {size}"):
        load_delta(copy)


def test_a_part_stands_in_one_shard_only(copy: Path) -> None:
    tensors = load_file(copy / SHARD)
    twice = min(tensors)
    first = {name: part for name, part in tensors.items() if name <= sorted(tensors)[9]}
    rest = {name: part for name, part in tensors.items() if name not in first}
    reseal(copy, first, rest)
    load_delta(copy)
    reseal(copy, first, rest | {twice: torch.zeros_like(tensors[twice])})
    with pytest.raises(FormatError, match=f"part {re.escape(twice)} stands in two shards"):
        load_delta(copy)


# --- the base --------------------------------------------------------------------------------------------------


def other_base(pair: Pair, root: Path, **changes: torch.Tensor) -> Path:
    shutil.copytree(pair.base, root / "other")
    return edit(root / "other", lambda weights: weights | changes)


def test_a_base_with_one_changed_bit(copy: Path, pair: Pair, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = weights_of(pair.base)[name]
    weight.view(torch.int16)[0, 0] ^= 1
    base = other_base(pair, tmp_path, **{name: weight})
    assert_refused(copy, base, BaseMismatchError, rf"{base}: not the base.*tensor {name} differs")


def test_a_base_with_another_tensor_more(copy: Path, pair: Pair, tmp_path: Path) -> None:
    base = other_base(pair, tmp_path, extra=torch.zeros(1))
    assert_refused(copy, base, BaseMismatchError, "list of tensors differs")


def test_a_base_with_a_tensor_less(copy: Path, pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.base, tmp_path / "other")
    base = edit(tmp_path / "other", lambda weights: {n: w for n, w in weights.items() if "layers.0.mlp.up" not in n})
    assert_refused(copy, base, BaseMismatchError, "has no tensor model.layers.0.mlp.up_proj.weight")


def test_the_fine_tuned_model_is_not_the_base(copy: Path, pair: Pair) -> None:
    assert_refused(copy, pair.finetuned, BaseMismatchError, "give the original base")


def test_no_artifact_at_all(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", pair.base, TruncatedFileError, "not an artifact")
    with pytest.raises(InputError, match=r"no such artifact directory; .*zoo or DELTACOMPRESS_ZOO"):
        load_delta(tmp_path / "gone")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match=r"file: is a file, where the directory of an artifact is needed; give one"):
        load_delta(tmp_path / "file")


def test_files_that_the_manifest_does_not_know_are_not_restored(copy: Path, pair: Pair, tmp_path: Path) -> None:
    (copy / "modeling_evil.py").write_text("raise SystemExit")
    (copy / "delta-00002-of-00002.safetensors").write_bytes(b"junk")
    assert (restore(copy, base=pair.base, out=tmp_path / "out") / "modeling_evil.py").exists() is False
    assert not list((tmp_path / "out").glob("delta*"))


def test_what_cannot_be_decoded_here_can_still_be_looked_at(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact of a codec that needs a GPU opens anywhere; damage is told before the codec."""

    def nowhere(codec: str, **_: object) -> None:
        raise BackendError(f"cannot decode {codec} here")

    monkeypatch.setattr(coding, "resolve", nowhere)
    delta = load_delta(copy)
    assert delta.summary()["lossless"] == "zstd"
    name = next(name for name, record in delta.tensors.items() if record.parts)
    with pytest.raises(BackendError, match="cannot decode zstd here"):
        delta.parts(name)
    path, span = delta.where(name, delta.tensors[name].parts[0])
    raw = bytearray(path.read_bytes())
    raw[span.begin + 60] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError):
        delta.parts(name)

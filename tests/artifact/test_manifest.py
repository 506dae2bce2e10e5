"""manifest.json: one spelling, one digest, and an error class for each way to be wrong."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import HASH, PART, canonical, plain, record, sealed

from deltacompress.artifact.manifest import digest_told, parse_manifest, read_manifest
from deltacompress.artifact.records import Manifest
from deltacompress.checkpoints.names import is_tensor_name
from deltacompress.errors import (
    ChecksumError,
    FormatError,
    InputError,
    IntegrityError,
    SchemaVersionError,
    TruncatedFileError,
)


def test_the_file_is_canonical_and_names_itself() -> None:
    manifest = Manifest.model_validate(plain())
    assert manifest.to_bytes() == sealed(plain())
    assert manifest.digest == hashlib.sha256(canonical(plain())).hexdigest()
    assert parse_manifest(manifest.to_bytes(), "m") == manifest


def test_its_digest_is_told_whatever_else_is_called_so() -> None:
    """Names that hold the key, and keys of mappings that sort behind it."""
    odd = 'a","digest":"b'
    data = plain(recipe={"name": odd, "digest": HASH}, tools={"digest": HASH})
    data["base"] = data["base"] | {"name": odd}
    raw = sealed(data)
    assert digest_told(raw) == parse_manifest(raw, "m").digest


@given(
    name=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=40).filter(is_tensor_name),
    loss=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    kept=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
@settings(max_examples=50, deadline=None)
def test_any_name_and_number_comes_back(name: str, loss: float, kept: float | None) -> None:
    fields = {"loss": loss} | ({} if kept is None else {"kept": kept})
    manifest = Manifest.model_validate(plain(tensors=[record(name, **fields)]))
    assert (b'"kept"' in manifest.to_bytes()) == (kept is not None)
    again = parse_manifest(manifest.to_bytes(), "m")
    assert again.tensors[0].name == name
    assert again.tensors[0].loss == loss
    assert again.tensors[0].kept == kept


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(canonical(json.loads(sealed(plain())), indent=1), id="indented"),
        pytest.param(
            json.dumps(dict(reversed(json.loads(sealed(plain())).items())), separators=(",", ":")).encode(),
            id="reordered",
        ),
        pytest.param(b'{"scope":"delta",' + sealed(plain())[1:], id="a key twice"),
        pytest.param(sealed(plain()) + b"\n", id="a newline more"),
        pytest.param(b" " + sealed(plain()), id="a space more"),
        pytest.param(sealed(plain()).replace(b'"name":"m"', b'"name":"\\u006d"'), id="another escape"),
        pytest.param(sealed(plain()).replace(b'"bytes":24', b'"bytes":2.4e1'), id="another number"),
        pytest.param(canonical(plain()), id="no digest"),
        pytest.param(canonical(plain() | {"digest": ""}), id="empty digest"),
        pytest.param(
            canonical(plain(recipe={"digest": Manifest.model_validate(plain(recipe={})).digest})),
            id="the digest in another place",
        ),
        pytest.param(canonical(plain() | {"digest": 7}), id="a number as digest"),
        pytest.param(canonical(plain() | {"digest": HASH}), id="another digest"),
        pytest.param(canonical(plain(tensors=[record("a", loss=float("nan"))]) | {"digest": ""}), id="NaN"),
        pytest.param(canonical(plain(tensors=[record("a", loss=float("inf"))]) | {"digest": ""}), id="Infinity"),
        pytest.param(sealed(plain()).replace(b'"bytes":24', b'"bytes":1e999'), id="infinite number"),
        pytest.param(sealed(plain()).replace(b"torch", b"t\xffrch"), id="not UTF-8"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000 + b"}", id="nested too deep"),
    ],
)
def test_another_spelling_is_a_checksum_error(raw: bytes) -> None:
    with pytest.raises(ChecksumError, match=r"^here: "):
        parse_manifest(raw, "here")


def test_every_flipped_bit_is_noticed() -> None:
    raw = bytearray(sealed(plain()))
    for i in range(len(raw)):
        for bit in (1, 2, 16, 32, 128):
            raw[i] ^= bit
            with pytest.raises(IntegrityError):
                parse_manifest(bytes(raw), "m")
            raw[i] ^= bit


def test_every_cut_is_noticed_as_one() -> None:
    raw = sealed(plain())
    for length in range(len(raw)):
        with pytest.raises(TruncatedFileError, match="cut short"):
            parse_manifest(raw[:length], "m")


def test_other_bytes_are_not_cut_short() -> None:
    for raw in (b"\x9f\x00random", b"PK\x03\x04", b"thesis"):
        with pytest.raises(ChecksumError, match="not JSON any more"):
            parse_manifest(raw, "m")


def test_what_a_parser_cannot_take_is_told_in_the_terms_of_the_file() -> None:
    for value, told in ((b"[" * 100_000 + b"]" * 100_000, "nested too deep"), (b"9" * 5000, "a number of 5000 digits")):
        with pytest.raises(ChecksumError, match=rf"not JSON any more \({told}\)"):
            parse_manifest(b'{"recipe":' + value + b"}", "m")


def test_a_version_of_many_digits_is_told_in_few() -> None:
    with pytest.raises(SchemaVersionError) as caught:
        parse_manifest(sealed(plain(schema_version=10**400)), "m")
    assert len(str(caught.value)) < 150


def test_a_newer_schema_is_told_from_damage() -> None:
    newer = plain(schema_version=2, something="new")
    with pytest.raises(SchemaVersionError, match="schema version 2, this program reads up to 1; upgrade"):
        parse_manifest(sealed(newer), "m")
    with pytest.raises(ChecksumError):
        parse_manifest(canonical(newer | {"digest": HASH}), "m")


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.0, True])
def test_a_version_that_never_was(version: Any) -> None:
    with pytest.raises(SchemaVersionError, match="unknown schema version"):
        parse_manifest(sealed(plain(schema_version=version)), "m")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra": 1}, "extra"),
        ({"lossless": "lzma"}, "lossless"),
        ({"base": {"name": "m"}}, "base.content_hash"),
        ({"tensors": [record("a"), record("a")]}, "once each"),
        ({"tensors": [record("b"), record("a")]}, "by name"),
        ({"tensors": [record("a", shape=[-1])]}, "tensors.0.shape"),
        ({"tensors": [record("a", shape=[1] * 17)]}, "tensors.0.shape"),
        ({"tensors": [record("a", dtype="F17")]}, "tensors.0.dtype"),
        ({"tensors": [record("a", sha256="00")]}, "tensors.0.sha256"),
        ({"tensors": [record("a", status="gone")]}, "tensor 'a': tensors.0.status: Input should be"),
        (
            {"tensors": [record("a", params={"rank": None})]},
            "tensor 'a': tensors.0.params.rank: Input should be a text or a number; ",
        ),
        (
            {"tensors": [record("a", params={"rank": [4]})]},
            "tensor 'a': tensors.0.params.rank: Input should be a text or a number; ",
        ),
        ({"tensors": [5]}, "tensors.0: "),
        ({"tensors": [record("a", parts=[{"name": "x", "dtype": "??", "shape": [], "bytes": 1}])]}, "parts.0.dtype"),
        ({"tensors": [record("a", parts=[PART | {"blake3": HASH}])]}, "blake3"),
        ({"tensors": [record("a", parts=[PART | {"blake3": None}])]}, "parts.0.blake3"),
        ({"tensors": [record("a", parts=[PART | {"blake3": HASH.upper()}])]}, "parts.0.blake3"),
        ({"lossless": "none"}, "a: part planes: no blake3 hash"),
        (
            {"lossless": "none", "tensors": [record("a", parts=[PART | {"blake3": HASH}])]},
            "72 bytes are not its U8 [2, 6]",
        ),
        ({"tensors": [record("a", status="alias")]}, "alias"),
        ({"tensors": [record("a", alias_of="b"), record("b")]}, "alias"),
        ({"tensors": [record("a", status="alias", alias_of="gone", parts=[])]}, "alias"),
        ({"tensors": [record("a", status="alias", alias_of="a", parts=[])]}, "alias"),
        ({"tensors": [record("a", status="alias", alias_of="b", parts=[]), record("b", shape=[3, 2])]}, "alias"),
        ({"shards": [{"file": "../x", "bytes": 1, "sha256": HASH}]}, "shards.0.file"),
        ({"shards": [{"file": "/etc/x", "bytes": 1, "sha256": HASH}]}, "shards.0.file"),
        ({"files": [{"file": "x\n", "bytes": 1, "sha256": HASH}]}, "files.0.file"),
        ({"files": [{"file": "x", "bytes": 1, "sha256": HASH}] * 2}, "twice"),
        ({"files": [{"file": "manifest.json", "bytes": 1, "sha256": HASH}]}, "twice"),
    ],
)
def test_what_breaks_the_schema_is_named(change: dict[str, Any], told: str) -> None:
    """Well sealed, so somebody wrote it so; neither program nor damage would."""
    with pytest.raises(FormatError) as caught:
        parse_manifest(sealed(plain(**change)), "here")
    assert str(caught.value).startswith("here: ")
    assert told in str(caught.value)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(TruncatedFileError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"[]")
    with pytest.raises(FormatError, match="not an artifact's manifest"):
        read_manifest(tmp_path)


def test_a_checkpoint_is_told_as_such(tmp_path: Path) -> None:
    """Unless it may be an artifact that lost its manifest."""
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("")
    with pytest.raises(InputError, match="a model's checkpoint, not an artifact; give what `deltacompress compress`"):
        read_manifest(tmp_path)
    (tmp_path / "delta-00001.safetensors").write_text("")
    with pytest.raises(TruncatedFileError, match="not an artifact, or half of one"):
        read_manifest(tmp_path)


def test_an_adapter_is_no_artifact(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(InputError, match=r"a PEFT adapter, not an artifact; serve it .*, or merge it into its base"):
        read_manifest(tmp_path)


def test_adapters_that_lie_deeper(tmp_path: Path) -> None:
    """PEFT saves one of any name but "default" to a folder of that name."""
    for name in ("styled", "polite"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    told = rf"holds PEFT adapters in folders of their own \(2\); give one of them, such as {tmp_path}/polite$"
    with pytest.raises(InputError, match=told):
        read_manifest(tmp_path)


@pytest.mark.parametrize("raw", [b'{"recipe":[%s]}', b'{"tools":{%s}}', b'{"params":{%s}}'])
def test_refusing_takes_little_more_memory_than_parsing(raw: bytes) -> None:
    """Where the refusal of each of 25 fields held a copy of the whole, it would be 25 times that."""
    inner = b",".join((b"[]" if b"[" in raw else b'"%d":1' % k) for k in range(100_000))
    tracemalloc.start()
    json.loads(raw % inner)
    parsed = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    with pytest.raises(IntegrityError):
        parse_manifest(raw % inner, "m")
    assert tracemalloc.get_traced_memory()[1] < 4 * parsed
    tracemalloc.stop()

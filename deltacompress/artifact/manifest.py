"""manifest.json: the versioned description of an artifact. docs/formats.md documents every field.

The file is canonical JSON (sorted keys, no spaces, ASCII) and holds a digest over itself, so that any flipped bit, any
unknown or repeated key and any other spelling of the same content is noticed. It holds nothing that differs between two
runs over the same input (no times, no paths), so that a resumed run gives the same bytes.
"""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import from_json

from deltacompress.artifact.checks import check_relations
from deltacompress.artifact.records import SCHEMA_VERSION, Manifest
from deltacompress.checkpoints.names import shown
from deltacompress.checkpoints.weight_files import ADAPTER_CONFIG
from deltacompress.codecs.formats.spec import AGAIN
from deltacompress.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    InputError,
    SchemaVersionError,
    TruncatedFileError,
    option,
)
from deltacompress.files.canonical_json import canonical_bytes, canonical_fields, join_fields
from deltacompress.files.hashing import sha256_hex
from deltacompress.files.json_limits import MAX_DEPTH, is_deep, takes_more
from deltacompress.files.places import CONFIG, MANIFEST
from deltacompress.files.regular import UnfitFileError, read_bytes, unreadable

MAX_MANIFEST_BYTES = 64 << 20  # of 45,000 packed tensors of four parts each, or more of fewer
_MAX_MEMORY = 256 << 20  # of the parsed manifest, by the estimate
_USE_IT = (
    "serve it (`generate`, `chat`, `eval`), or merge it into its base (PEFT's merge_and_unload) and take the result"
)
_MOST_DIGITS = 4000  # Python reads a few more, where nobody has told it otherwise
_DIGEST, _DIGEST_CHARS = b'"digest":"', 64


def read_manifest(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json.

    Raises:
        InputError: no manifest, but a checkpoint, or adapters.
        TruncatedFileError: no manifest, or cut short.
        CheckpointError: the system does not read it.
        SchemaVersionError: written by a newer version.
        ChecksumError: its bytes differ from its digest.
        FormatError: it breaks the schema.
    """
    return parse_manifest(read_manifest_bytes(directory), str(directory / MANIFEST))


def digest_told(raw: bytes) -> str:
    """`Manifest.digest` of bytes that parse_manifest took: it found it there, and to compute it takes as long again."""
    return raw.partition(_DIGEST)[2][:_DIGEST_CHARS].decode()


def need_directory(place: Path) -> None:
    """Raises InputError: there is no directory."""
    if not place.is_dir():
        zoo = f"the zoo ({option('zoo')} or DELTACOMPRESS_ZOO)"
        made = "one that `compress` published (or PEFT, where adapters are taken)"
        way_out = f"give {made}, or the name of a zoo's entry and {zoo}"
        is_file = "is a file, where the directory of an artifact is needed"
        raise InputError(is_file if place.exists() else "no such artifact directory", where=place, way_out=way_out)


def read_manifest_bytes(directory: Path) -> bytes:
    """The bytes of `directory`/manifest.json, unchecked but for their number; raises as read_manifest."""
    path = directory / MANIFEST
    try:
        return read_bytes(path, at_most=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        if (directory / ADAPTER_CONFIG).is_file():
            raise InputError("a PEFT adapter, not an artifact", where=directory, way_out=_USE_IT) from error
        if _is_checkpoint(directory):
            raise InputError(
                "a model's checkpoint, not an artifact",
                where=directory,
                way_out=(
                    "give what `deltacompress compress` made of it (or, to compress it: deltacompress compress "
                    f"BASE {directory} --recipe int2-24 ...)"
                ),
            ) from error
        if inner := sorted(directory.glob(f"*/{ADAPTER_CONFIG}")):  # PEFT's, of any name but "default"
            told = f"holds PEFT adapters in folders of their own ({len(inner)})"
            raise InputError(told, where=directory, way_out=f"give one of them, such as {inner[0].parent}") from error
        raise TruncatedFileError(
            f"no {MANIFEST}; not an artifact, or half of one",
            where=directory,
            way_out="give one that `compress` published; of a PEFT adapter, the folder with its adapter_config.json",
        ) from error
    except UnfitFileError as error:
        raise unreadable(FormatError, path, error) from error
    except OSError as error:
        raise unreadable(CheckpointError, path, error) from error


def _is_checkpoint(directory: Path) -> bool:
    """Whether a directory without a manifest holds a model: an artifact that lost its own still has delta-* files."""
    if not (directory / CONFIG).is_file():
        return False
    weights = [one.name for one in directory.iterdir() if one.suffix in (".safetensors", ".bin")]
    return bool(weights) and not any(name.startswith("delta-") for name in weights)


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check the bytes of a manifest; raises as read_manifest."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise _too_large(where)
    if takes_more(raw, _MAX_MEMORY):
        raise FormatError("holds more values than any manifest does", where=where, way_out=AGAIN)
    manifest = _spelled_so(raw)
    if manifest is None or is_deep(canonical_bytes({"recipe": manifest.recipe})):  # of all fields, this one can be
        _refuse(raw, _parsed(raw, where), where)
    check_relations(manifest, where)
    return manifest


def _spelled_so(raw: bytes) -> Manifest | None:
    """The manifest whose one spelling, with its digest, `raw` is; None if there is none."""
    before, _, after = raw.partition(_DIGEST)
    try:
        # not model_validate_json, whose every error holds a copy of its input
        manifest = Manifest.model_validate(from_json(before + after[_DIGEST_CHARS + len('",') :]))
        return manifest if manifest.to_bytes() == raw else None  # whatever was cut out: this holds all of it
    except ValueError:  # pydantic's; or a number that has no spelling
        return None


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    """What `raw` holds, which spells no manifest; raises as read_manifest where it is no JSON object."""
    try:
        data = json.loads(raw, parse_constant=_refuse_constant, parse_float=_read_float, parse_int=_read_int)
    except (ValueError, RecursionError) as error:
        begun = raw.strip(b"\0")[:1] in (b"", b"{")
        unended = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc)
        if begun and (unended or not raw.rstrip(b"\0").endswith(b"}")):
            raise TruncatedFileError(f"cut short after {len(raw)} bytes", where=where, way_out=AGAIN) from error
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ChecksumError(f"not JSON any more ({why})", where=where, way_out=AGAIN) from error
    if not isinstance(data, dict):
        raise FormatError("not an artifact's manifest (no JSON object)", where=where, way_out=AGAIN)
    if is_deep(raw):
        raise FormatError(f"nested deeper than {MAX_DEPTH} levels, as no recipe is", where=where, way_out=AGAIN)
    return data


def _refuse(raw: bytes, data: dict[str, Any], where: str) -> NoReturn:
    """Say why `raw` spells no manifest; raises as read_manifest."""
    version = data.get("schema_version")
    claimed = data.pop("digest", None)
    fields = canonical_fields(data)
    digest = sha256_hex(join_fields(fields))
    if type(version) is int and version > SCHEMA_VERSION and claimed == digest:
        raise SchemaVersionError(
            f"schema version {reprlib.repr(version)}, this program reads up to {SCHEMA_VERSION}",
            where=where,
            way_out="upgrade deltacompress",
        )
    if claimed != digest or raw != join_fields(fields | {"digest": canonical_bytes(claimed)}):
        raise ChecksumError("its bytes differ from its digest", where=where, way_out=AGAIN)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise SchemaVersionError(f"unknown schema version {str(version)[:40]!a}", where=where, way_out=AGAIN)
    try:
        Manifest.model_validate(data)
    except ValidationError as error:
        raise FormatError(_told(error, data), where=where, way_out=AGAIN) from error
    # an absent optional field, or a value that was coerced: one spelling only
    raise FormatError("not spelled as this format spells it", where=where, way_out=AGAIN)


def _told(error: ValidationError, data: dict[str, Any]) -> str:
    """The first field that is wrong, with the name of the tensor that it is of, and what is wrong with it."""
    first = error.errors()[0]
    place, told, of = first["loc"], first["msg"], ""
    if place[:1] == ("tensors",) and len(place) > 2:
        if isinstance(name := data["tensors"][place[1]].get("name"), str):
            of = f"tensor {shown(name)}: "
        if place[2] == "params" and len(place) == 5:  # in the end: one of the types that it is not
            place, told = place[:-1], "Input should be a text or a number"
    return of + ascii(".".join(str(part) for part in place)[:200])[1:-1] + f": {told}"


def _too_large(where: str) -> FormatError:
    return FormatError(f"larger than {MAX_MANIFEST_BYTES} bytes", where=where, way_out=AGAIN)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is out of range")
    return value

"""Artifacts made to hurt whoever opens them: small files that ask for much, and things that are no files.

`Forgery` changes a copy of a real artifact and seals it again, hashes and digests right, as a careful forger would.
`CASES` are what forgers do with it, by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.post_attention_layernorm.weight"
ITEM = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
Record = dict[str, Any]


def canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def sealed(manifest: Record) -> bytes:
    """A manifest's bytes with its digest."""
    plain = {key: value for key, value in manifest.items() if key != "digest"}
    return canonical(plain | {"digest": hashlib.sha256(canonical(plain)).hexdigest()})


def safetensors(parts: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file with these tensors: name -> (dtype, shape, bytes)."""
    header, position = {}, 0
    for name, (dtype, shape, raw) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in parts.values())


def framed(chunks: Iterable[bytes], raw_bytes: int, raw_digest: bytes, *, chunk_bytes: int, codec: int = 1) -> bytes:
    """A lossless stream by docs/lossless.md, whatever it holds."""
    coded = list(chunks)
    head = b"DCLS\1" + bytes([codec, 0, 0]) + struct.pack("<QII", raw_bytes, chunk_bytes, len(coded)) + raw_digest
    rest = b"".join(struct.pack("<I", len(chunk)) for chunk in coded) + b"".join(coded)
    return head + hashlib.sha256(head + rest).digest()[:16] + rest


@cache
def zeros(raw_bytes: int) -> bytes:
    """The smallest zstd stream of so many zeros, its digest of them right: that takes a second for each GB."""
    size = 1 << 20
    full, rest = divmod(raw_bytes, size)
    frames = {n: zstandard.ZstdCompressor(level=9).compress(bytes(n)) for n in {size, rest} - {0}}
    digest = hashlib.sha256()
    for n in [size] * full + [rest]:
        digest.update(bytes(n))
    chunks = [frames[size]] * full + ([frames[rest]] if rest else [])
    return framed(chunks, raw_bytes, digest.digest()[:16], chunk_bytes=size)


class Forgery:
    """A copy of the artifact `source` at `out`. manifest: to be changed; call `seal` at the end."""

    def __init__(self, source: Path, out: Path) -> None:
        shutil.copytree(source, out)
        self.out = out
        self.manifest: Record = json.loads((out / "manifest.json").read_bytes())
        self.parts: dict[str, tuple[str, list[int], bytes]] = {}
        for shard in self.manifest["shards"]:
            raw = (out / shard["file"]).read_bytes()
            start = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:start])
            header.pop("__metadata__", None)
            for name, at in header.items():
                begin, end = at["data_offsets"]
                self.parts[name] = (at["dtype"], at["shape"], raw[start + begin : start + end])

    @property
    def coded(self) -> bool:
        return bool(self.manifest["lossless"] != "none")

    def tensor(self, name: str) -> Record:
        """The record of a tensor."""
        return next(record for record in self.manifest["tensors"] if record["name"] == name)

    def clear(self, name: str) -> Record:
        """The record of a tensor, its parts taken away."""
        record = self.tensor(name)
        for part in record["parts"]:
            del self.parts[f"{name}.{part['name']}"]
        record["parts"] = []
        return record

    def put(self, tensor: str, part: str, dtype: str, shape: list[int], stored: bytes | None = None) -> None:
        """Give a tensor a part; `stored` as it lies in the shard, else zeros of that shape, as small as can be."""
        size = ITEM[dtype]
        for n in shape:
            size *= n
        if stored is None:
            stored = zeros(size) if self.coded else bytes(size)
        self.parts[f"{tensor}.{part}"] = ("U8", [len(stored)], stored) if self.coded else (dtype, shape, stored)
        record = {"name": part, "dtype": dtype, "shape": shape, "bytes": len(stored)}
        record["sha256"] = hashlib.sha256(stored).hexdigest()
        if not self.coded:
            record["blake3"] = blake3(stored).hexdigest()
        parts = self.tensor(tensor)["parts"]
        parts.append(record)
        parts.sort(key=lambda one: one["name"])

    def claim(self) -> None:
        """Let the manifest say of both models that they are as large as its tensors are."""
        total = 0
        for record in self.manifest["tensors"]:
            size = ITEM.get(record["dtype"], 8)
            for n in record["shape"]:
                size *= n
            total += size
        for side in ("base", "finetuned"):
            self.manifest[side] |= {"bytes": min(total + (1 << 20), 1 << 50), "tensors": len(self.manifest["tensors"])}

    def seal(self) -> Path:
        """Write shard and manifest."""
        name = self.manifest["shards"][0]["file"]
        (self.out / name).write_bytes(safetensors(dict(sorted(self.parts.items()))))
        for record in (*self.manifest["shards"], *self.manifest["files"]):
            if not record:
                continue
            path = self.out / record["file"]
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    record["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                record["bytes"] = path.stat().st_size
        (self.out / "manifest.json").write_bytes(sealed(self.manifest))
        return self.out


@dataclass(frozen=True)
class Case:
    """make: what the forger does. sources: to which artifacts (a delta, "coded" with zstd or "plain"; "full": a whole
    model, coded). passes: verbs that take it all the same, since they decode nothing, or because a model that large
    could be meant; all others must refuse it.
    """

    make: Callable[[Forgery], None]
    sources: tuple[str, ...]
    passes: frozenset[str]


CASES: dict[str, Case] = {}


def case(*sources: str, passes: tuple[str, ...] = ()) -> Callable[[Callable[[Forgery], None]], None]:
    """Make a case of a function, by its name."""

    def add(make: Callable[[Forgery], None]) -> None:
        CASES[make.__name__] = Case(make, sources or ("coded",), frozenset(passes))

    return add


UNREAD = ("inspect", "zoo add")  # which decode no part


# --- sizes that are declared -----------------------------------------------------------------------------------


def _no_rows(forgery: Forgery, columns: int) -> Record:
    record = forgery.clear(EMBEDDING)
    full = forgery.manifest["scope"] == "full"
    record |= {
        "format": "packed", "codec": "rtn", "status": "coded",
        "params": {"rows": 0, "columns": columns, "bits": 4, "sparsity": "dense", "group_size": 16, "grid": "minmax"},
        "base_name": None if full else EMBEDDING,
    }  # fmt: skip
    coded = forgery.coded
    forgery.put(EMBEDDING, "symbols" if coded else "codes", "U8", [0, columns // 2])
    forgery.put(EMBEDDING, "scales", "BF16", [0, columns // 16])
    forgery.put(EMBEDDING, "zeros", "U8", [0, columns // 16])
    forgery.put(EMBEDDING, "row_mask", "U8", [12])
    return record


@case("coded", "plain", "full")
def no_rows_and_many_columns(forgery: Forgery) -> None:
    _no_rows(forgery, 1 << 28)["shape"] = [96, 1 << 28]


@case("coded", "plain", passes=(*UNREAD, "verify"))
def no_rows_and_many_columns_of_a_model_as_large(forgery: Forgery) -> None:
    _no_rows(forgery, 1 << 28)["shape"] = [96, 1 << 28]
    forgery.claim()


@case("coded", "plain", "full")
def columns_that_the_tensor_does_not_have(forgery: Forgery) -> None:
    _no_rows(forgery, 1 << 28)


def _long_vector(forgery: Forgery, sparsity: str, bits: int, columns: int) -> None:
    """One row of `columns` columns, all zero, in a few KB."""
    record = forgery.clear(NORM)
    record |= {
        "format": "packed", "codec": "rtn", "status": "coded", "shape": [columns],
        "params": {"rows": 1, "columns": columns, "bits": bits, "sparsity": sparsity, "group_size": columns,
                   "grid": "midrise"},
    }  # fmt: skip
    n, m = map(int, sparsity.split(":")) if ":" in sparsity else (1, 1)
    forgery.put(NORM, "codes", "U8", [1, columns * n // m * bits // 8])
    forgery.put(NORM, "scales", "BF16", [1, 1])
    if sparsity != "dense":
        forgery.put(NORM, "pattern", "U8", [1, columns // 8])


@case("coded", passes=(*UNREAD, "verify"))
def a_long_dense_vector(forgery: Forgery) -> None:
    _long_vector(forgery, "dense", 1, 1 << 28)
    forgery.claim()


@case("coded", passes=UNREAD)
def a_long_sparse_vector(forgery: Forgery) -> None:
    _long_vector(forgery, "1:4", 1, 1 << 28)
    forgery.claim()


def _factors(forgery: Forgery, rank: int, *, shape: list[int] | None = None, left: bytes | None = None) -> None:
    """Zeros as the factors of a linear (of another shape, perhaps), or `left` as it lies in the shard."""
    record = forgery.clear(UP)
    full = forgery.manifest["scope"] == "full"
    record |= {
        "format": "low_rank", "codec": "low-rank", "status": "coded", "params": {"rank": rank},
        "shape": shape or record["shape"], "base_name": None if full else UP,
    }  # fmt: skip
    rows, columns = record["shape"]
    forgery.put(UP, "left", "F16", [rows, rank], left)
    forgery.put(UP, "right", "F16", [rank, columns])


@case("coded", "plain", "full")
def factors_of_more_than_full_rank(forgery: Forgery) -> None:
    _factors(forgery, 1 << 12)


@case("coded", "plain", "full")
def factors_of_no_rank(forgery: Forgery) -> None:
    _factors(forgery, 0)


@case("coded", "plain", "full")
def thin_factors_of_a_huge_matrix(forgery: Forgery) -> None:
    _factors(forgery, 1, shape=[1 << 20, 1 << 20])


@case("coded", "plain", passes=(*UNREAD, "verify"))
def thin_factors_of_a_matrix_that_a_base_would_have_to_have(forgery: Forgery) -> None:
    _factors(forgery, 1, shape=[1 << 15, 1 << 15])
    forgery.claim()


@case("full", passes=(*UNREAD, "verify"))
def thin_factors_of_a_matrix_without_a_base(forgery: Forgery) -> None:
    _factors(forgery, 1, shape=[1 << 14, 1 << 14])
    forgery.claim()


@case("plain", passes=UNREAD)
def factors_that_are_no_numbers(forgery: Forgery) -> None:
    rows = forgery.tensor(UP)["shape"][0]
    _factors(forgery, 2, left=b"\xff\x7f" * (2 * rows))


def _planes(forgery: Forgery, numel: int, **fields: Any) -> None:
    record = forgery.clear(NORM)
    record |= {"shape": [numel], "format": "exact", "params": {"transform": "ordered"}, "status": "exact"} | fields
    forgery.put(NORM, "planes", "U8", [2, numel])


@case("coded", "full")
def zeros_that_unpack_to_gigabytes(forgery: Forgery) -> None:
    _planes(forgery, 9 << 26)


@case("coded", passes=(*UNREAD, "verify"))
def zeros_that_unpack_to_gigabytes_of_a_model_as_large(forgery: Forgery) -> None:
    _planes(forgery, 9 << 26)
    forgery.claim()


@case("coded", "full")
def zeros_that_were_added(forgery: Forgery) -> None:
    _planes(forgery, 9 << 27, status="added", base_name=None, base_sha256=None)
    forgery.claim()


@case("coded")
def added_rows_of_zeros(forgery: Forgery) -> None:
    record = forgery.tensor(EMBEDDING)
    rows, columns = record["shape"]
    record["shape"] = [rows + (1 << 25), columns]
    record["base_rows"] = rows
    forgery.put(EMBEDDING, "added_rows", "BF16", [1 << 25, columns])
    forgery.claim()


@case("coded", passes=UNREAD)
def a_table_of_tiny_chunks(forgery: Forgery) -> None:
    record = forgery.clear(NORM)
    count = 500_000
    record |= {"shape": [count // 2], "format": "exact", "params": {"transform": "ordered"}, "status": "exact"}
    raw = bytes(count)
    frame = zstandard.ZstdCompressor().compress(b"\0")
    stream = framed([frame] * count, count, hashlib.sha256(raw).digest()[:16], chunk_bytes=1)
    forgery.put(NORM, "planes", "U8", [2, count // 2], stream)
    forgery.claim()


@case("coded", passes=UNREAD)
def a_table_of_empty_chunks(forgery: Forgery) -> None:
    record = forgery.clear(NORM)
    count = 2_000_000
    record |= {"shape": [count << 11], "format": "exact", "params": {"transform": "ordered"}, "status": "exact"}
    stream = framed([b""] * count, count << 12, bytes(16), chunk_bytes=1 << 12)
    forgery.put(NORM, "planes", "U8", [2, count << 11], stream)
    forgery.claim()


@case("coded", "plain", "full")
def a_shape_with_a_zero_and_a_huge_side(forgery: Forgery) -> None:
    record = forgery.clear(NORM)
    record |= {"shape": [0, 1 << 50], "format": "exact", "params": {"transform": "ordered"}, "status": "exact"}
    forgery.put(NORM, "planes", "U8", [2, 0])


@case()
def more_tensors_than_the_model(forgery: Forgery) -> None:
    extra = forgery.tensor(UP) | {"name": "another", "alias_of": UP, "status": "alias", "format": "none", "parts": []}
    forgery.manifest["tensors"] = sorted([*forgery.manifest["tensors"], extra], key=lambda one: one["name"])


@case("coded", "full")
def fewer_tensors_than_the_model(forgery: Forgery) -> None:
    record = forgery.clear(UP)
    forgery.manifest["tensors"].remove(record)


# --- JSON --------------------------------------------------------------------------------------------------------


@case()
def a_deep_recipe(forgery: Forgery) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    forgery.manifest["recipe"] = {"name": deep}


@case()
def a_deep_recipe_of_objects(forgery: Forgery) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    forgery.manifest["recipe"] = {"name": "x", "rules": deep}


@case()
def a_loss_beyond_all_floats(forgery: Forgery) -> None:
    forgery.tensor(UP)["loss"] = 10**400


@case()
def a_parameter_beyond_all_floats(forgery: Forgery) -> None:
    forgery.tensor(UP)["params"]["rows"] = 10**400


@case()
def many_faults(forgery: Forgery) -> None:
    forgery.manifest["files"] = [0] * 500_000


@case()
def many_small_records(forgery: Forgery) -> None:
    forgery.manifest["files"] = [{}] * 200_000


@case()
def many_tools(forgery: Forgery) -> None:
    forgery.manifest["tools"] = {str(i): 0 for i in range(200_000)}


@case()
def a_large_recipe(forgery: Forgery) -> None:
    forgery.manifest["recipe"] = {"name": "x", "more": [[]] * 1_000_000}


@case()
def a_header_of_many_tensors(forgery: Forgery) -> None:
    for i in range(110_000):
        forgery.parts[f"{i}"] = ("U8", [0], b"")


@case()
def a_header_of_deep_fields(forgery: Forgery) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    forgery.parts[f"{UP}.scales"] = ("U8", deep, b"")


# --- names -------------------------------------------------------------------------------------------------------


def _renamed(forgery: Forgery, name: str) -> None:
    record = forgery.tensor(NORM)
    for part in record["parts"]:
        forgery.parts[f"{name}.{part['name']}"] = forgery.parts.pop(f"{NORM}.{part['name']}")
    record["name"] = name
    forgery.manifest["tensors"].sort(key=lambda one: one["name"])


@case()
def a_name_that_colours_the_terminal(forgery: Forgery) -> None:
    record = forgery.clear(NORM)  # no parts: no shard's header tells it
    record |= {"format": "none", "status": "identical", "params": {}}
    _renamed(forgery, "\x1b[31mred\x07")


@case()
def a_name_of_two_lines(forgery: Forgery) -> None:
    record = forgery.clear(NORM)
    record |= {"format": "none", "status": "identical", "params": {}}
    _renamed(forgery, "one\ntwo")


@case()
def a_name_in_two_spellings(forgery: Forgery) -> None:
    record = forgery.clear(NORM)
    record |= {"format": "none", "status": "identical", "params": {}}
    _renamed(forgery, "cafe\u0301")


# --- what is no file ---------------------------------------------------------------------------------------------


def lay(path: Path, kind: str) -> None:
    """Put something at `path` that is no regular file of its own."""
    if path.exists():
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short ones
            try:
                bound.bind(path.name)
            finally:
                os.chdir(here)
    else:
        elsewhere = path.parent.parent / f"{path.parent.name}.{path.name}"
        elsewhere.write_text("a secret of this machine\n")
        path.symlink_to(elsewhere)


KINDS = ("fifo", "directory", "device", "socket", "link")
FILES = ("tokenizer.json", "config.json", "manifest.json", "delta-00001-of-00001.safetensors")


def put_in_place(root: Path, file: str, kind: str) -> None:
    """Replace a file of a sealed artifact; a link leads to the very bytes that belong there."""
    raw = (root / file).read_bytes()
    lay(root / file, kind)
    if kind == "link":
        Path(os.readlink(root / file)).write_bytes(raw)


@case()
def a_side_file_larger_than_any(forgery: Forgery) -> None:
    with (forgery.out / "tokenizer.json").open("r+b") as file:
        file.truncate((512 << 20) + 1)
